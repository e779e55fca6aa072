"""Every argument of attention and of what writes its cache, one at a time, as in ``test_arguments.py``. A wrapper is called as
one function: what its constructor, its ``plan`` and its ``run`` take are told apart by their names."""

import inspect
import math

import pytest
import torch
from conftest import Pages, attention, visible

import fir.flashinfer as fi

BF16, F16, F32, I32, I64 = torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.int64
E4M3, U8 = torch.float8_e4m3fn, torch.uint8
HEADS, KV_HEADS, DIM, PAGE = 4, 2, 64, 4
LENS, QO = [9, 20, 1], [0, 3, 5, 6]


def i32(*values):
    return torch.tensor(values, dtype=I32)


def split(cls, kwargs, methods=("plan", "run")):
    """Keyword arguments of the constructor and of each method."""
    groups = []
    for method in (cls.__init__, *(getattr(cls, m) for m in methods)):
        names = set(inspect.signature(method).parameters)
        groups.append({k: kwargs[k] for k in kwargs if k in names})
    assert set().union(*groups) == set(kwargs), set(kwargs) - set().union(*groups)
    return groups


def call(cls, kwargs, methods=("plan", "run")):
    init, *rest = split(cls, kwargs, methods)
    wrapper = cls(**init)
    for method, args in zip(methods, rest):
        result = getattr(wrapper, method)(**args)
    return result


def rotated(x, pos, scale, theta):
    f = theta ** (-torch.arange(0, x.shape[-1], 2).double() / x.shape[-1]) / scale
    angles = (pos[:, None].double() * f).float()
    c, s = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * c - b * s, b * c + a * s), -1).to(x.dtype)


def one(q, k, v, causal=False, window_left=-1, logits_soft_cap=None, sm_scale=None, pos_encoding_mode="NONE", rope_scale=None, rope_theta=None, mask=None, sink=None,
        q_scale=None, k_scale=None, v_scale=None):
    """The reference of one request, by FlashInfer's flags."""
    n, m = len(q), len(k)
    scale = (q.shape[-1] ** -0.5 if sm_scale is None else sm_scale) * float(q_scale or 1) * float(k_scale or 1)
    bias = None
    if pos_encoding_mode == "ROPE_LLAMA":
        turn = lambda x, pos: rotated(x, pos, rope_scale or 1.0, rope_theta or 1e4)
        q, k = turn(q, torch.arange(n) + m - n), turn(k, torch.arange(m))
    if pos_encoding_mode == "ALIBI":
        slopes = 2.0 ** (-8.0 / q.shape[1] * torch.arange(1, q.shape[1] + 1))
        bias = slopes[:, None, None] * (torch.arange(m)[None] - torch.arange(n)[:, None])
    seen = visible(n, m, causal and mask is None, window_left)
    seen = seen & mask if mask is not None else seen
    o, lse = attention(q, k, v, scale, seen, logits_soft_cap or 0.0, bias, sink)
    return o * float(v_scale or 1), lse


def batch(q, qo, keys, **flags):
    masks = flags.pop("masks", None)
    outs = [one(q[qo[r]:qo[r + 1]], *keys(r), mask=None if masks is None else masks[r], **flags) for r in range(len(qo) - 1)]
    return torch.cat([o for o, _ in outs]), torch.cat([s for _, s in outs])


def near(got, want, limit=3e-2):
    assert got.shape == want.shape, (got.shape, want.shape)
    torch.testing.assert_close(got.float(), want.float(), atol=limit, rtol=limit)


def lse_of(result):
    return result if isinstance(result, tuple) else (result, None)


FLAGS = {"window_left": [0, 5], "logits_soft_cap": [0.0, 2.0], "sm_scale": [0.3], "pos_encoding_mode": ["ROPE_LLAMA", "ALIBI"],
         "rope_scale": [dict(pos_encoding_mode="ROPE_LLAMA", rope_scale=2.0)], "rope_theta": [dict(pos_encoding_mode="ROPE_LLAMA", rope_theta=100.0)]}
SPLIT = {"fixed_split_size": [16], "disable_split_kv": [True]}
SCALES = {"q_scale": [0.5], "k_scale": [0.5, lambda: torch.tensor([0.5])], "v_scale": [3.0]}
OUTS = {"out": [lambda: torch.full((6, HEADS, DIM), math.nan, dtype=BF16)], "lse": [lambda: dict(lse=torch.full((6, HEADS), math.nan), return_lse=True)], "return_lse": [True]}
TYPES = {"q_data_type": ["bfloat16", dict(q_data_type=F16, dtype=F16)], "kv_data_type": [dict(kv_data_type=E4M3, kv=E4M3)], "o_data_type": [F32]}
IGNORED = {"enable_pdl": [True], "non_blocking": [False], "backend": ["fa2", "fa3"], "float_workspace_buffer": [lambda: torch.empty(64, dtype=U8)], "use_fp16_qk_reduction": [True],
           "seq_lens": [lambda: i32(*LENS)], "seq_lens_q": [lambda: i32(3, 2, 1)], "block_tables": [lambda: torch.zeros(3, 5, dtype=I32)], "max_token_per_sequence": [3], "max_sequence_kv": [20],
           "max_item_len_ptr": [None], "skip_softmax_threshold_scale_factor": [1.0], "use_fp16_softmax": [True], "uses_spcompress": [False], "sinks": [None]}
MADE = {"jit_args": "test_jit.py", "jit_kwargs": "test_jit.py", "prefix_len_ptr": "test_composed.py", "token_pos_in_items_ptr": "test_composed.py", "token_pos_in_items_len": "test_composed.py",
        "kv_cache_sf": "test_composed.py"}


def expand(varied):
    return [(arg, i) for arg, values in varied.items() for i in range(len(values))]


def chosen(varied, arg, i):
    value = varied[arg][i]
    value = value() if callable(value) and not isinstance(value, torch.dtype) else value
    return dict(value) if isinstance(value, dict) else {arg: value}


GRAPH = dict(use_cuda_graph=True)
DECODE = {**FLAGS, **SPLIT, **SCALES, **TYPES, **IGNORED,
          "kv_layout": ["HND"], "indptr": [dict(lens=[3, 3, 40])], "indices": [dict(on_host=True)], "last_page_len": [dict(lens=[4, 8, 12])], "num_qo_heads": [dict(heads=8)], "num_kv_heads": [dict(kv_heads=4)],
          "head_dim": [dict(dim=128)], "page_size": [dict(page=1), dict(page=16)], "data_type": [dict(data_type=F16, q_data_type=None, dtype=F16)], "q_len_per_req": [2], "window_right": [0],
          "use_tensor_cores": [True], "use_cuda_graph": [GRAPH], "paged_kv_indptr_buffer": [GRAPH], "paged_kv_indices_buffer": [GRAPH], "paged_kv_last_page_len_buffer": [GRAPH],
          "out": [lambda: torch.full((3, HEADS, DIM), math.nan, dtype=BF16)], "lse": [lambda: dict(lse=torch.full((3, HEADS), math.nan), return_lse=True)], "return_lse": [True],
          "q": [dict(scale=2.0)], "paged_kv_cache": [dict(one=True)]}
DECODE = {k: v for k, v in DECODE.items() if k not in ("use_fp16_qk_reduction", "seq_lens_q", "max_token_per_sequence", "max_sequence_kv", "max_item_len_ptr", "use_fp16_softmax", "uses_spcompress")}


def paged(cls, change, decode):
    """A call of a paged wrapper and its reference, with the changed arguments."""
    own = {k: change.pop(k) for k in ("lens", "heads", "kv_heads", "dim", "page", "dtype", "kv", "one", "scale", "on_host", "qo") if k in change}
    lens, heads, kv_heads, dim, page = (own.get(*p) for p in (("lens", LENS), ("heads", HEADS), ("kv_heads", KV_HEADS), ("dim", DIM), ("page", PAGE)))
    layout, dtype = change.get("kv_layout", "NHD"), own.get("dtype", BF16)
    pages = Pages(lens, page, kv_heads, dim, dtype, layout, own.get("one", False))
    cache = pages.cache
    if own.get("kv") is not None:
        pages.kv = pages.kv.to(own["kv"])
        cache = (pages.kv[:, 0], pages.kv[:, 1])
        pages.kv = pages.kv.float()
    per = change.get("q_len_per_req", 1)
    qo = own.get("qo", [i * per for i in range(len(lens) + 1)] if decode else QO)
    q = (torch.randn(qo[-1], heads, dim) * own.get("scale", 1.0)).to(dtype)
    indices = pages.indices.cpu() if own.get("on_host") else pages.indices
    names = ("indptr", "indices", "last_page_len") if decode else ("paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
    kwargs = dict(zip(names, (pages.indptr, indices, pages.last)))
    kwargs |= dict(num_qo_heads=heads, num_kv_heads=kv_heads, page_size=page, q=q, paged_kv_cache=cache, float_workspace_buffer=torch.empty(1), q_data_type=dtype)
    kwargs |= dict(head_dim=dim) if decode else dict(qo_indptr=i32(*qo), head_dim_qk=dim)
    if change.get("use_cuda_graph"):
        kwargs[names[1]] = indices[:-1]
        sizes = (len(lens) + 1, len(indices) + 5, len(lens))
        ends = ("_buffer",) * 3 if decode else ("_buf",) * 3
        kwargs |= {f"{n if n.startswith('paged_kv') else 'paged_kv_' + n}{e}": torch.zeros(s, dtype=I32) for n, e, s in zip(names, ends, sizes)}
        if not decode:
            kwargs["qo_indptr_buf"] = torch.zeros(len(qo), dtype=I32)
    kwargs |= change
    flags = {k: kwargs[k] for k in (*FLAGS, *SCALES) if kwargs.get(k) is not None}
    masks = None
    if kwargs.get("custom_mask") is not None or kwargs.get("packed_custom_mask") is not None:
        masks = [torch.rand(qo[r + 1] - qo[r], n) < 0.6 for r, n in enumerate(lens)]
        flat = torch.cat([m.flatten() for m in masks])
        ends = i32(0, *torch.tensor([m.numel() for m in masks]).cumsum(0).tolist())
        if kwargs.get("custom_mask") is not None:
            kwargs["custom_mask"] = flat
        else:
            kwargs["packed_custom_mask"] = fi.segment_packbits(flat, ends, "little")[0]
    got, lse = lse_of(call(cls, kwargs))
    want, want_lse = batch(q, qo, pages.request, causal=kwargs.get("causal", decode and per > 1), masks=masks, **flags)
    near(got, want)
    assert got.dtype == (kwargs.get("o_data_type") or (kwargs["out"].dtype if kwargs.get("out") is not None else dtype))
    if kwargs.get("return_lse"):
        near(lse, want_lse, 1e-2)
        assert lse is kwargs["lse"] if kwargs.get("lse") is not None else True
    if kwargs.get("out") is not None:
        assert got is kwargs["out"]


@pytest.mark.parametrize("arg,i", expand(DECODE))
def test_batch_decode(arg, i):
    paged(fi.BatchDecodeWithPagedKVCacheWrapper, chosen(DECODE, arg, i), True)


PREFILL = {**FLAGS, **SPLIT, **SCALES, **TYPES, **IGNORED, **OUTS,
           "kv_layout": ["HND"], "qo_indptr": [dict(qo=[0, 1, 1, 2]), dict(qo=[0, 9, 29, 30], causal=True)], "paged_kv_indptr": [dict(lens=[30, 30, 40])], "paged_kv_indices": [dict(on_host=True)],
           "paged_kv_last_page_len": [dict(lens=[4, 8, 12])], "num_qo_heads": [dict(heads=8)], "num_kv_heads": [dict(kv_heads=4)], "head_dim_qk": [dict(dim=128)], "head_dim_vo": [DIM], "page_size": [dict(page=1), dict(page=16)],
           "causal": [True], "custom_mask": [True], "packed_custom_mask": [True], "use_cuda_graph": [GRAPH], "qo_indptr_buf": [GRAPH], "paged_kv_indptr_buf": [GRAPH], "paged_kv_indices_buf": [GRAPH],
           "paged_kv_last_page_len_buf": [GRAPH], "custom_mask_buf": [lambda: dict(custom_mask_buf=torch.zeros(64, dtype=U8), custom_mask=True)],
           "mask_indptr_buf": [lambda: dict(mask_indptr_buf=torch.zeros(4, dtype=I32), custom_mask=True)], "q": [dict(scale=2.0)], "paged_kv_cache": [dict(one=True)]}


@pytest.mark.parametrize("arg,i", expand(PREFILL))
def test_batch_prefill_paged(arg, i):
    paged(fi.BatchPrefillWithPagedKVCacheWrapper, chosen(PREFILL, arg, i), False)


RAGGED = {**{k: v for k, v in PREFILL.items() if not k.startswith("paged_kv") and k not in ("page_size", "kv_data_type", "block_tables", "window_left")}, "window_left": [0, 5],
          "kv_data_type": [BF16], "qo_indptr": [dict(qo=[0, 1, 1, 2])], "kv_indptr": [dict(lens=[30, 1, 2])], "kv_indptr_buf": [GRAPH], "head_dim_vo": [dict(vo=32), dict(vo=128)], "k": [dict(k_gain=2.0)], "v": [dict(v_gain=2.0)],
          "o_scale": [1.0], "v_indptr": [None], "o_indptr": [None], "on_host": [dict(on_host=True)]}
RAGGED = {k: v for k, v in RAGGED.items() if k not in ("skip_softmax_threshold_scale_factor", "use_fp16_softmax", "uses_spcompress", "sinks", "on_host")}


@pytest.mark.parametrize("arg,i", expand(RAGGED))
def test_batch_prefill_ragged(arg, i):
    change = chosen(RAGGED, arg, i)
    own = {k: change.pop(k) for k in ("lens", "heads", "kv_heads", "dim", "dtype", "scale", "qo", "vo", "k_gain", "v_gain", "on_host") if k in change}
    lens, heads, kv_heads, dim = (own.get(*p) for p in (("lens", LENS), ("heads", HEADS), ("kv_heads", KV_HEADS), ("dim", DIM)))
    dtype, qo, vo = own.get("dtype", BF16), own.get("qo", QO), own.get("vo", dim)
    ends = [0, *torch.tensor(lens).cumsum(0).tolist()]
    q = (torch.randn(qo[-1], heads, dim) * own.get("scale", 1.0)).to(dtype)
    k, v = (torch.randn(ends[-1], kv_heads, dim) * own.get("k_gain", 1.0)).to(dtype), (torch.randn(ends[-1], kv_heads, vo) * own.get("v_gain", 1.0)).to(dtype)
    hnd = change.get("kv_layout") == "HND"
    kwargs = dict(qo_indptr=i32(*qo), kv_indptr=i32(*ends), num_qo_heads=heads, num_kv_heads=kv_heads, head_dim_qk=dim, head_dim_vo=vo, q=q, k=k.transpose(0, 1) if hnd else k,
                  v=v.transpose(0, 1) if hnd else v, float_workspace_buffer=torch.empty(1), q_data_type=dtype)
    if change.get("use_cuda_graph"):
        kwargs |= dict(qo_indptr_buf=torch.zeros(4, dtype=I32), kv_indptr_buf=torch.zeros(4, dtype=I32))
    kwargs |= change
    masks = None
    if kwargs.get("custom_mask") is not None or kwargs.get("packed_custom_mask") is not None:
        masks = [torch.rand(qo[r + 1] - qo[r], n) < 0.6 for r, n in enumerate(lens)]
        flat = torch.cat([m.flatten() for m in masks])
        name = "custom_mask" if kwargs.get("custom_mask") is not None else "packed_custom_mask"
        bits = i32(0, *torch.tensor([m.numel() for m in masks]).cumsum(0).tolist())
        kwargs[name] = flat if name == "custom_mask" else fi.segment_packbits(flat, bits, "little")[0]
    got, lse = lse_of(call(fi.BatchPrefillWithRaggedKVCacheWrapper, kwargs))
    flags = {n: kwargs[n] for n in (*FLAGS, *SCALES) if kwargs.get(n) is not None}
    want, want_lse = batch(q, qo, lambda r: (k[ends[r]:ends[r + 1]], v[ends[r]:ends[r + 1]]), causal=kwargs.get("causal", False), masks=masks, **flags)
    near(got, want)
    if lse is not None:
        near(lse, want_lse, 1e-2)


SINGLE = {"q": [dict(scale=2.0)], "k": [dict(m=40)], "v": [dict(m=1)], "kv_layout": ["HND"], "k_scale": [0.5], "v_scale": [3.0], "return_lse": [True], **FLAGS}
SINGLE_DECODE = {**SINGLE, "use_tensor_cores": [True], "q_scale": [0.5]}
SINGLE_PREFILL = {**SINGLE, "scale_q": [lambda: torch.tensor([0.5])], "scale_k": [lambda: torch.tensor([0.5])], "scale_v": [lambda: torch.tensor([2.0])], "o_dtype": [F32, F16], "custom_mask": [True], "packed_custom_mask": [True],
                  "causal": [True], "use_fp16_qk_reduction": [True], "backend": ["fa2", "fa3"], "kv_cache_sf": [None]}


@pytest.mark.parametrize("arg,i", expand(SINGLE_DECODE))
def test_single_decode(arg, i):
    single(fi.single_decode_with_kv_cache, chosen(SINGLE_DECODE, arg, i), 1)


@pytest.mark.parametrize("arg,i", expand(SINGLE_PREFILL))
def test_single_prefill(arg, i):
    change = chosen(SINGLE_PREFILL, arg, i)
    single(fi.single_prefill_with_kv_cache, dict(change), 7)
    if "return_lse" not in change:
        single(fi.prefill.single_prefill_with_kv_cache_return_lse, dict(change), 7, True)


def single(function, change, n, with_lse=False):
    m = change.pop("m", 20)
    q, k, v = (torch.randn(n, HEADS, DIM) * change.pop("scale", 1.0)).to(BF16), torch.randn(m, KV_HEADS, DIM).to(BF16), torch.randn(m, KV_HEADS, DIM).to(BF16)
    mask = None
    if "custom_mask" in change or "packed_custom_mask" in change:
        mask = torch.rand(n, m) < 0.6
        change |= {"custom_mask": mask} if "custom_mask" in change else {"packed_custom_mask": fi.packbits(mask.flatten(), "little")}
    give = (k.transpose(0, 1), v.transpose(0, 1)) if change.get("kv_layout") == "HND" else (k, v)
    got, lse = lse_of(function(q[0] if n == 1 else q, *give, **change))
    flags = {f: change[f] for f in (*FLAGS, "causal", "q_scale", "k_scale", "v_scale") if f in change}
    flags |= {f: change[s] for f, s in (("q_scale", "scale_q"), ("k_scale", "scale_k"), ("v_scale", "scale_v")) if s in change}
    want, want_lse = one(q, k, v, mask=mask, **flags)
    near(got, want[0] if n == 1 else want)
    assert got.dtype == change.get("o_dtype", BF16)
    assert (lse is not None) == (with_lse or change.get("return_lse", False))
    if lse is not None:
        near(lse, want_lse[0] if n == 1 else want_lse, 1e-2)


MLA = {"q_nope": [dict(gain=2.0)], "q_pe": [dict(gain=0.5)], "ckv_cache": [dict(fp8=True)], "kpe_cache": [dict(page=16)], "qo_indptr": [dict(qo=[0, 2, 2, 5], causal=True)], "kv_indptr": [dict(lens=[30, 2, 3])],
       "kv_indices": [dict(on_host=True)], "kv_len_arr": [dict(lens=[4, 8, 12])], "num_heads": [dict(heads=16)], "head_dim_ckv": [dict(ckv=512)], "head_dim_kpe": [dict(kpe=64)], "page_size": [dict(page=1)], "causal": [dict(qo=[0, 4, 6, 7], causal=True)],
       "sm_scale": [0.05], "q_data_type": [dict(dtype=F16)], "kv_data_type": [dict(fp8=True)], "out": [lambda: torch.full((3, 8, 512), math.nan, dtype=BF16)], "lse": [lambda: dict(lse=torch.zeros(3, 8), return_lse=True)], "return_lse": [True],
       "ckv_scale": [dict(fp8=True, ckv_scale=2.0, kpe_scale=2.0)], "kpe_scale": [dict(fp8=True, ckv_scale=0.5, kpe_scale=0.5)], "use_cuda_graph": [GRAPH], "use_profiler": [False], "profiler_buffer": [None], "kv_len": [None], "page_table": [None], "o_scale": [1.0],
       "float_workspace_buffer": [lambda: torch.empty(9)], "backend": ["fa2", "fa3"], "return_lse_base_on_e": [False], "ckv_scale_arr": [None]}


@pytest.mark.parametrize("arg,i", expand(MLA))
def test_latent_attention(arg, i):
    change = chosen(MLA, arg, i)
    own = {k: change.pop(k) for k in ("gain", "fp8", "page", "qo", "lens", "on_host", "heads", "ckv", "kpe", "dtype") if k in change}
    lens, heads, page, dtype = own.get("lens", LENS), own.get("heads", 8), own.get("page", PAGE), own.get("dtype", BF16)
    qo, ckv_dim, kpe_dim = own.get("qo", [0, 1, 2, 3]), own.get("ckv", 512), own.get("kpe", 64)
    pages = Pages(lens, page, 1, ckv_dim + kpe_dim, dtype)
    latent = pages.kv[:, 0, :, 0]
    if own.get("fp8"):
        latent = latent.to(E4M3)
    pages.kv = pages.kv if not own.get("fp8") else torch.stack((latent, latent), 1)[..., None, :].float()
    q = (torch.randn(qo[-1], heads, ckv_dim + kpe_dim) * own.get("gain", 1.0)).to(dtype)
    kwargs = dict(float_workspace_buffer=torch.empty(1), kv_indices=pages.indices.cpu() if own.get("on_host") else pages.indices, num_heads=heads, head_dim_ckv=ckv_dim, head_dim_kpe=kpe_dim, page_size=page,
                  causal=False, sm_scale=0.1, q_data_type=dtype, kv_data_type=latent.dtype, q_nope=q[..., :ckv_dim], q_pe=q[..., ckv_dim:], ckv_cache=latent[..., :ckv_dim], kpe_cache=latent[..., ckv_dim:], **{})
    kwargs |= change
    plan = dict(qo_indptr=i32(*qo), kv_indptr=pages.indptr, kv_len_arr=pages.lens)
    cls = fi.BatchMLAPagedAttentionWrapper
    init, planned, run = split(cls, kwargs)
    init.pop("kv_indices", None)
    if change.get("use_cuda_graph"):
        init |= dict(qo_indptr=torch.zeros(4, dtype=I32), kv_indptr=torch.zeros(4, dtype=I32), kv_indices=torch.zeros(64, dtype=I32), kv_len_arr=torch.zeros(3, dtype=I32))
        planned["kv_indices"] = planned["kv_indices"][:-1]
    wrapper = cls(**init)
    wrapper.plan(**plan, **planned)
    got, lse = lse_of(wrapper.run(**run))
    factor = change.get("ckv_scale", 1.0)
    keys = lambda r: (pages.request(r)[0] * factor, pages.request(r)[0][..., :ckv_dim] * factor)
    want, want_lse = batch(q, qo, keys, causal=kwargs["causal"], sm_scale=kwargs["sm_scale"])
    near(got, want, 5e-2)
    if lse is not None:
        near(lse, want_lse, 2e-2)


SINK = {"sink": [dict(gain=3.0)], "sm_scale": [0.3], "window_left": [5], "q_scale": [0.5], "k_scale": [0.5], "v_scale": [2.0], "return_lse": [True], "kv_layout": ["HND"], "backend": ["fa3"], "use_fp16_qk_reduction": [True],
        "pos_encoding_mode": ["NONE"], "head_dim_qk": [64], "head_dim_vo": [64], "out": [lambda: torch.full((6, HEADS, DIM), math.nan, dtype=BF16)], "lse": [lambda: dict(lse=torch.zeros(6, HEADS), return_lse=True)], "enable_pdl": [True],
        "causal": [False]}


@pytest.mark.parametrize("arg,i", expand(SINK))
def test_sinks(arg, i):
    change = chosen(SINK, arg, i)
    pages = Pages(LENS, PAGE, KV_HEADS, DIM, BF16, change.get("kv_layout", "NHD"))
    q, sink = torch.randn(6, HEADS, DIM).to(BF16), torch.randn(HEADS) * change.pop("gain", 1.0)
    causal = change.pop("causal", True)
    wrapper = fi.BatchAttentionWithAttentionSinkWrapper(torch.empty(1), **{k: change.pop(k) for k in ("kv_layout", "backend", "use_fp16_qk_reduction", "pos_encoding_mode", "head_dim_qk", "head_dim_vo") if k in change},
                                                        window_left=change.get("window_left", -1), q_data_type=BF16, kv_data_type=BF16)
    wrapper.plan(i32(*QO), pages.indptr, pages.indices, pages.last, HEADS, KV_HEADS, DIM, PAGE, causal=causal, q_data_type=BF16)
    got, lse = lse_of(wrapper.run(q, pages.cache, sink, change.pop("sm_scale", 0.2), **change))
    scale = {"sm_scale": [0.3]}.get(arg, [0.2])[0]
    want, want_lse = batch(q, QO, pages.request, causal=causal, sink=sink, sm_scale=scale, **{k: v for k, v in change.items() if k in ("window_left", "q_scale", "k_scale", "v_scale")})
    near(got, want)
    if lse is not None:
        near(lse, want_lse, 1e-2)


APPEND = {"append_key": [F16], "append_value": [F16], "batch_indices": [[0, 1, 1, 2]], "positions": [[8, 0, 18, 0]], "paged_kv_cache": ["one"], "kv_indices": ["host"], "kv_indptr": ["host"], "kv_last_page_len": ["host"], "kv_layout": ["HND"]}


@pytest.mark.parametrize("arg,i", expand(APPEND))
def test_append(arg, i):
    value = APPEND[arg][i]
    dtype = value if arg.startswith("append") else F32
    layout = value if arg == "kv_layout" else "NHD"
    pages = Pages(LENS, PAGE, KV_HEADS, DIM, dtype, layout, one=arg == "paged_kv_cache")
    where = lambda t, name: t.cpu() if arg == name else t
    b = i32(*(value if arg == "batch_indices" else [0, 0, 1, 2]))
    p = i32(*(value if arg == "positions" else [3, 4, 19, 0]))
    k, v = torch.randn(4, KV_HEADS, DIM).to(dtype), torch.randn(4, KV_HEADS, DIM).to(dtype)
    before = [pages.request(r) for r in range(3)]
    fi.append_paged_kv_cache(k, v, b, p, pages.cache, where(pages.indices, "kv_indices"), where(pages.indptr, "kv_indptr"), where(pages.last, "kv_last_page_len"), layout)
    pages.kv = pages.cache if arg == "paged_kv_cache" else torch.stack(pages.cache, 1)
    for r in range(3):
        for got, old, new in zip(pages.request(r), before[r], (k, v)):
            want = old.clone()
            for t in range(4):
                if b[t] == r:
                    want[p[t]] = new[t]
            assert torch.equal(got, want)


def test_every_argument_of_the_wrappers_is_varied():
    classes = {fi.BatchDecodeWithPagedKVCacheWrapper: DECODE, fi.BatchPrefillWithPagedKVCacheWrapper: PREFILL, fi.BatchPrefillWithRaggedKVCacheWrapper: RAGGED, fi.BatchMLAPagedAttentionWrapper: MLA}
    for cls, varied in classes.items():
        for method in (cls.__init__, cls.plan, cls.run):
            names = {n for n, p in inspect.signature(method).parameters.items() if p.kind != p.VAR_POSITIONAL} - {"self"}
            assert names <= set(varied) | set(MADE), (cls.__name__, method.__name__, names - set(varied) - set(MADE))
    for function, varied in ((fi.single_decode_with_kv_cache, SINGLE_DECODE), (fi.single_prefill_with_kv_cache, SINGLE_PREFILL), (fi.append_paged_kv_cache, APPEND)):
        assert set(inspect.signature(function).parameters) <= set(varied), function.__name__


def test_deprecated_forms_and_plans_that_change():
    """``forward`` with flags of its own, over a plan that was made without them."""
    pages = Pages(LENS, PAGE, KV_HEADS, DIM, BF16)
    q = torch.randn(3, HEADS, DIM).to(BF16)
    wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1))
    wrapper.begin_forward(pages.indptr, pages.indices, pages.last, HEADS, KV_HEADS, DIM, PAGE, q_data_type=BF16)
    for flags in ({}, dict(window_left=4), dict(logits_soft_cap=2.0), dict(pos_encoding_mode="ALIBI"), dict(pos_encoding_mode="ROPE_LLAMA", rope_scale=2.0, rope_theta=100.0), dict(sm_scale=0.3), dict(k_scale=0.5, v_scale=2.0, q_scale=0.5)):
        got, lse = wrapper.forward_return_lse(q, pages.cache, **flags)
        want, want_lse = batch(q, [0, 1, 2, 3], pages.request, **{"sm_scale": wrapper._sm_scale, **flags})
        near(got, want), near(lse, want_lse, 1e-2)
        near(wrapper.forward(q, pages.cache, **flags), want)
    wrapper.reset_workspace_buffer(torch.empty(2), torch.empty(2))
    assert wrapper.workspace_size(pages.indptr, pages.indices, pages.last, 4, 2, 64, 4) == (0, 0) and wrapper.use_tensor_cores is False
    with pytest.raises(RuntimeError, match="plan"):
        fi.BatchPrefillWithPagedKVCacheWrapper(torch.empty(1)).forward(q, pages.cache)
    with pytest.raises(ValueError, match="window_left 3 mismatches"):
        wrapper.run(q, pages.cache, window_left=3)
    with pytest.raises(ValueError, match="q_len_per_req 2 mismatches"):
        wrapper.run(q, pages.cache, q_len_per_req=2)
    with pytest.raises(NotImplementedError, match="window_right"):
        wrapper.plan(pages.indptr, pages.indices, pages.last, HEADS, KV_HEADS, DIM, PAGE, window_right=1)
    with pytest.raises(KeyError, match="kv_layout"):
        fi.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1), "DHN")
    for names in (dict(use_cuda_graph=True), dict(use_cuda_graph=True, paged_kv_indptr_buffer=i32(0), paged_kv_indices_buffer=i32(0), paged_kv_last_page_len_buffer=i32(0))):
        with pytest.raises(ValueError, match="should be a torch.Tensor|expected batch_size"):
            fi.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1), **names)


def test_a_plan_of_the_same_kind_is_kept_and_another_is_not():
    first, then = Pages(LENS, PAGE, KV_HEADS, DIM, BF16), Pages([30, 2, 7], PAGE, KV_HEADS, DIM, BF16)
    q, wrapper = torch.randn(3, HEADS, DIM).to(BF16), fi.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1))
    seen = []
    for pages, flags in ((first, {}), (then, {}), (first, dict(sm_scale=0.3)), (then, dict(sm_scale=0.3)), (first, dict(window_left=2)), (then, dict(window_left=3)),
                         (first, dict(logits_soft_cap=2.0)), (then, {}), (first, {})):
        wrapper.plan(pages.indptr, pages.indices, pages.last, HEADS, KV_HEADS, DIM, PAGE, q_data_type=BF16, **flags)
        near(wrapper.run(q, pages.cache), batch(q, [0, 1, 2, 3], pages.request, **flags)[0])
        near(wrapper.forward(q, pages.cache, sm_scale=0.7, window_left=flags.get("window_left", -1), logits_soft_cap=flags.get("logits_soft_cap")),
             batch(q, [0, 1, 2, 3], pages.request, **{**flags, "sm_scale": 0.7})[0])
        seen.append(wrapper._planned.plan)
    assert seen[0] is seen[1] is seen[2] is seen[3] and seen[4] is seen[5] is not seen[3] and seen[7] is seen[8]
    prefill = fi.BatchPrefillWithPagedKVCacheWrapper(torch.empty(1))
    mask = torch.ones(sum(LENS), dtype=torch.bool)
    for given in (None, mask, None):
        prefill.plan(i32(0, 1, 2, 3), first.indptr, first.indices, first.last, HEADS, KV_HEADS, DIM, PAGE, q_data_type=BF16, custom_mask=given)
        near(prefill.run(q, first.cache), batch(q, [0, 1, 2, 3], first.request)[0])


# Functions that plan anew each time, over padded tables.

def padded(pages):
    width = int(pages.indptr.diff().max()) + 1
    table = torch.full((len(pages.lens), width), 2**30, dtype=I32)
    for r in range(len(pages.lens)):
        ids = pages.indices[pages.indptr[r]:pages.indptr[r + 1]]
        table[r, : len(ids)] = ids
    return table


XQA = {"query": [dict(gain=2.0)], "kv_cache": [dict(one=True)], "workspace_buffer": [lambda: torch.empty(9)], "block_tables": [dict(page=16)], "seq_lens": [dict(lens=[4, 8, 12])], "max_seq_len": [999], "bmm1_scale": [0.3, lambda: torch.tensor(0.3)],
       "bmm2_scale": [2.0, lambda: torch.tensor([2.0])], "window_left": [0, 5], "out": [lambda: torch.full((3, HEADS, DIM), math.nan, dtype=BF16)], "sinks": [dict(sink=True)], "kv_layout": ["NHD", "HND"], "enable_pdl": [True], "q_len_per_req": [2], "o_scale": [1.0],
       "mask": [None], "kv_cache_sf": [None]}
TRTLLM = {**XQA, "out_dtype": [F32, "float16"], "o_sf_scale": [None], "o_sf_vec_size": [None], "backend": ["auto", "xqa"], "max_q_len": [1], "cum_seq_lens_q": [dict(qo=[0, 2, 3, 6])], "skip_softmax_threshold_scale_factor": [0.5], "uses_shared_paged_kv_idx": [True],
          "lse": [None], "return_lse": [False], "bmm1_scale_log2": [None], "multi_ctas_kv_counter_buffer": [None], "enable_block_sparse_attention": [False], "bf16q_fp8kv_transform_mode": [None]}
CONTEXT = {**{k: v for k, v in XQA.items() if k not in ("q_len_per_req", "o_scale", "mask", "max_seq_len", "out")}, "max_q_len": [9], "max_kv_len": [99], "batch_size": [3], "cum_seq_lens_q": [dict(qo=[0, 1, 2, 6])], "cum_seq_lens_kv": [lambda: i32(0, 9, 29, 30)],
           "out": [lambda: torch.full((6, HEADS, DIM), math.nan, dtype=BF16)], "out_dtype": [F32], "o_sf_scale": [None], "o_sf_vec_size": [None], "skip_softmax_threshold_scale_factor": [0.5], "uses_shared_paged_kv_idx": [True], "causal": [False],
           "lse": [lambda: dict(lse=torch.zeros(6, HEADS), return_lse=True)], "return_lse": [True], "multi_ctas_kv_counter_buffer": [None], "use_fp16_softmax": [True], "uses_spcompress": [True]}


@pytest.mark.parametrize("kind,arg,i", [(k, *row) for k, v in (("xqa", XQA), ("trtllm", TRTLLM), ("context", CONTEXT)) for row in expand(v)])
def test_padded_tables(kind, arg, i):
    change = chosen({"xqa": XQA, "trtllm": TRTLLM, "context": CONTEXT}[kind], arg, i)
    own = {k: change.pop(k) for k in ("gain", "one", "page", "lens", "sink", "qo") if k in change}
    function = {"xqa": fi.decode.xqa_batch_decode_with_kv_cache, "trtllm": fi.decode.trtllm_batch_decode_with_kv_cache, "context": fi.prefill.trtllm_batch_context_with_kv_cache}[kind]
    layout = change.get("kv_layout", "NHD" if kind == "xqa" else "HND")
    pages = Pages(own.get("lens", LENS), own.get("page", PAGE), KV_HEADS, DIM, BF16, layout, own.get("one", False))
    per = change.get("q_len_per_req", 1)
    qo = own.get("qo", QO if kind == "context" else [i * per for i in range(4)])
    q = (torch.randn(qo[-1], HEADS, DIM) * own.get("gain", 1.0)).to(BF16)
    sink = torch.randn(HEADS) if own.get("sink") else None
    kwargs = dict(query=q, kv_cache=pages.cache, workspace_buffer=torch.empty(1), block_tables=padded(pages), seq_lens=pages.lens, bmm1_scale=0.2)
    if kind == "context":
        kwargs |= dict(max_q_len=3, max_kv_len=20, batch_size=3, cum_seq_lens_q=i32(*qo), cum_seq_lens_kv=i32(0, 9, 29, 30), bmm2_scale=1.0)
    else:
        kwargs["max_seq_len"] = 20
        if "qo" in own:
            kwargs["cum_seq_lens_q"] = i32(*qo)
    if sink is not None:
        kwargs["sinks"] = sink if kind == "xqa" else [sink]
    kwargs |= change
    got, lse = lse_of(function(**kwargs))
    causal = kwargs.get("causal", kind == "context" or per > 1 or "qo" in own)
    want, want_lse = batch(q, qo, pages.request, causal=causal, sm_scale=float(kwargs["bmm1_scale"]), v_scale=float(kwargs.get("bmm2_scale", 1.0)), window_left=kwargs.get("window_left", -1), sink=sink)
    near(got, want)
    assert str(got.dtype).endswith(str(kwargs.get("out_dtype", BF16)).split(".")[-1]) and (lse is not None) == bool(kwargs.get("return_lse"))
    if lse is not None:
        near(lse, want_lse, 1e-2)


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("flags", ({}, dict(window=3), dict(sink=True), dict(lse=True), dict(out=True), dict(scale=2.0)))
def test_ragged_in_one_call(causal, flags):
    qo, kv = [0, 3, 5, 6], [0, 9, 29, 30]
    q, k, v = torch.randn(6, HEADS, 64).to(BF16), torch.randn(30, KV_HEADS, 64).to(BF16), torch.randn(30, KV_HEADS, 32).to(BF16)
    out, lse = (torch.empty(6, HEADS, 32, dtype=BF16) if flags.get("out") else None), (torch.empty(6, HEADS) if flags.get("lse") else None)
    sink = torch.randn(HEADS) if flags.get("sink") else None
    window, factor = flags.get("window", -1), flags.get("scale", 1.0)
    keys = lambda r: (k[kv[r]:kv[r + 1]], v[kv[r]:kv[r + 1]])
    want, want_lse = batch(q, qo, keys, causal=causal, window_left=window, sink=sink, sm_scale=0.2, v_scale=factor)
    wants_lse = bool(flags.get("lse"))
    got = [fi.prefill.trtllm_ragged_attention_deepseek(
        q, k, v, torch.empty(1), i32(9, 20, 1), 3, 20, 0.2, factor, 1.0, 3, window, i32(*qo), i32(*kv), None, causal, wants_lse, sink, out=out, lse=lse)]
    if sink is None and window < 0:
        got.append(fi.prefill.fmha_varlen(q, k, v, i32(*qo), i32(*kv), None, 3, out, lse, causal, 0.1, 2.0, None, factor, 1.0, wants_lse))
    got.append(fi.prefill.trtllm_fmha_v2_prefill(
        (q, k, v), "SEPARATE_Q_K_V", torch.empty(1), i32(9, 20, 1), 3, 20, 0.2, factor, 3, i32(*qo), i32(*kv), out=out, sinks=None if sink is None else [sink],
        mask_mode="causal" if causal else "padding", window_left=window, save_softmax_stats=wants_lse))
    for result in got:
        o, s = lse_of(result)
        near(o, want)
        if wants_lse:
            near(s, want_lse, 1e-2)
        assert out is None or o is out
    pages = Pages(LENS, PAGE, KV_HEADS, DIM, BF16, "HND")
    o = fi.prefill.trtllm_fmha_v2_prefill((q, torch.stack(pages.cache, 1)), "Q_PAGED_KV_HND", torch.empty(1), pages.lens, 3, 20, 0.2, factor, 3, i32(*qo), i32(*kv), padded(pages),
                                          out_dtype=F32, sinks=None if sink is None else [sink], logits_soft_cap_scale=2.0, mask_mode="causal" if causal else "padding", window_left=window)
    near(o, batch(q, qo, pages.request, causal=causal, window_left=window, sink=sink, sm_scale=0.2, v_scale=factor, logits_soft_cap=2.0)[0])
    assert o.dtype == F32


def test_what_padded_calls_refuse():
    pages = Pages(LENS, PAGE, KV_HEADS, DIM, BF16, "HND")
    q = torch.randn(3, HEADS, DIM).to(BF16)
    call_ = lambda **kw: fi.decode.trtllm_batch_decode_with_kv_cache(q, pages.cache, torch.empty(1), padded(pages), pages.lens, 20, **kw)
    for kw in (dict(o_sf_scale=1.0), dict(return_lse=True), dict(bmm1_scale_log2=torch.ones(1)), dict(uses_shared_paged_kv_idx=False), dict(enable_block_sparse_attention=True), dict(mask=torch.ones(1)), dict(o_scale=2.0),
               dict(backend="trtllm-gen")):
        with pytest.raises(NotImplementedError, match=next(iter(kw))):
            call_(**kw)
    with pytest.raises(ValueError, match="backend"):
        call_(backend="mystery")
