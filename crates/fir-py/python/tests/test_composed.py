"""What is made of plans: items and packed caches, shared prefixes, masks of blocks, prefill beside decode, segments."""

import math

import pytest
import torch
from conftest import Pages, visible
from test_wrappers import BF16, F16, F32, FLAGS, HEADS, I32, KV_HEADS, LENS, PAGE, QO, U8, batch, chosen, expand, i32, lse_of, near, one, padded

import fir.flashinfer as fi

DIM = 64


@pytest.mark.parametrize("kind", ("paged", "ragged"))
def test_items_behind_one_prefix(kind):
    """Two prompts: a prefix, then items that see it and themselves; positions in items count from 0 at a delimiter."""
    prefixes, items = [5, 3], [[0, 1, 2, 0, 1, 2, 3, 0], [0, 1, 0, 1, 2, 0]]
    lens = [p + len(t) for p, t in zip(prefixes, items)]
    width = 9
    flat = torch.zeros(2, width, dtype=I32)
    for r, t in enumerate(items):
        flat[r, : len(t)] = i32(*t)
    given = dict(prefix_len_ptr=torch.tensor(prefixes, dtype=torch.uint32).to(flat.device), token_pos_in_items_ptr=flat.to(torch.uint16), token_pos_in_items_len=width,
                 max_item_len_ptr=torch.tensor([3, 2], dtype=torch.uint16), causal=True, q_data_type=BF16)
    pages = Pages(lens, PAGE, KV_HEADS, DIM, BF16)
    qo = i32(0, lens[0], sum(lens))
    q = torch.randn(sum(lens), HEADS, DIM).to(BF16)
    if kind == "paged":
        wrapper = fi.BatchPrefillWithPagedKVCacheWrapper(torch.empty(1))
        wrapper.plan(qo, pages.indptr, pages.indices, pages.last, HEADS, KV_HEADS, DIM, PAGE, **given)
        got = wrapper.run(q, pages.cache)
    else:
        wrapper = fi.BatchPrefillWithRaggedKVCacheWrapper(torch.empty(1))
        wrapper.plan(qo, qo, HEADS, KV_HEADS, DIM, **given)
        got = wrapper.run(q, *(torch.cat(t) for t in zip(pages.request(0), pages.request(1))))
    masks = []
    for p, t, n in zip(prefixes, items, lens):
        mask = visible(n, n, True)
        for i, at in enumerate(t):
            for j in range(p, p + i + 1):
                mask[p + i, j] = j > p + i - at
        masks.append(mask)
    near(got, batch(q, qo.tolist(), pages.request, masks=masks)[0])


@pytest.mark.parametrize("layout", ("NHD", "HND"))
@pytest.mark.parametrize("stacked", (False, True))
@pytest.mark.parametrize("kind", ("decode", "prefill", "attention", "xqa"))
def test_nvfp4_caches(layout, stacked, kind):
    pages = Pages(LENS, PAGE, KV_HEADS, DIM, F32, layout)
    rows = pages.kv.reshape(-1, DIM)
    codes, scales = fi.quantization.nvfp4_kv_quantize(rows, torch.tensor([0.5]))
    pages.kv = fi.quantization.nvfp4_kv_dequantize(codes, scales, torch.tensor([1.0]), BF16).float().view(pages.kv.shape)
    codes, scales = codes.view(*pages.kv.shape[:-1], DIM // 2), scales.view(*pages.kv.shape[:-1], DIM // 16)
    give = (lambda t: t) if stacked else (lambda t: (t[:, 0], t[:, 1]))
    qo = [0, 1, 2, 3] if kind in ("decode", "xqa") else QO
    q = torch.randn(qo[-1], HEADS, DIM).to(BF16)
    table = (pages.indptr, pages.indices, pages.last, HEADS, KV_HEADS, DIM, PAGE)
    run = dict(kv_cache_sf=give(scales), k_scale=0.5, v_scale=0.5)
    if kind == "decode":
        wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1), layout)
        wrapper.plan(*table, q_data_type=BF16, kv_data_type=U8)
    elif kind == "prefill":
        wrapper = fi.BatchPrefillWithPagedKVCacheWrapper(torch.empty(1), layout)
        wrapper.plan(i32(*qo), *table, q_data_type=BF16, kv_data_type=U8)
    elif kind == "attention":
        wrapper = fi.BatchAttention(layout, device=q.device)
        wrapper.plan(i32(*qo), pages.indptr, pages.indices, pages.lens, HEADS, KV_HEADS, DIM, DIM, PAGE, q_data_type=BF16, kv_data_type=U8)
    want = batch(q, qo, pages.request, k_scale=0.5, v_scale=0.5)[0]
    if kind == "xqa":
        got = fi.decode.xqa_batch_decode_with_kv_cache(q, give(codes), torch.empty(1), padded(pages), pages.lens, 20, DIM**-0.5 * 0.5, 0.5, kv_layout=layout, kv_cache_sf=give(scales))
    else:
        got = lse_of(wrapper.run(q, give(codes), **run))[0]
    near(got, want)


ATTENTION = {"kv_layout": ["HND"], "causal": [True], "sm_scale": [0.3], "logits_soft_cap": [2.0], "q_data_type": [F16], "use_profiler": [True], "k_scale": [0.5], "v_scale": [2.0],
             "out": [lambda: torch.full((6, HEADS, DIM), math.nan, dtype=BF16)], "lse": [lambda: torch.zeros(6, HEADS)], "profiler_buffer": [None]}


@pytest.mark.parametrize("arg,i", expand(ATTENTION))
def test_batch_attention(arg, i, device):
    change = chosen(ATTENTION, arg, i)
    dtype = change.get("q_data_type", BF16)
    pages = Pages(LENS, PAGE, KV_HEADS, DIM, dtype, change.get("kv_layout", "NHD"))
    q = torch.randn(6, HEADS, DIM).to(dtype)
    wrapper = fi.BatchAttention(change.pop("kv_layout", "NHD"), device)
    run = {k: change.pop(k) for k in ("k_scale", "v_scale", "out", "lse", "profiler_buffer") if k in change}
    change.setdefault("q_data_type", BF16)
    wrapper.plan(i32(*QO), pages.indptr, pages.indices, pages.lens, HEADS, KV_HEADS, DIM, DIM, PAGE, kv_data_type=change["q_data_type"], **change)
    got, lse = wrapper.run(q, pages.cache, logits_soft_cap=change.get("logits_soft_cap", 0.0), **run)
    flags = {k: v for k, v in {**change, **run}.items() if k in ("causal", "sm_scale", "logits_soft_cap", "k_scale", "v_scale")}
    want, want_lse = batch(q, QO, pages.request, **flags)
    near(got, want), near(lse, want_lse, 1e-2)
    with pytest.raises(ValueError, match="logits_soft_cap 9.0 mismatches"):
        wrapper.run(q, pages.cache, logits_soft_cap=9.0)


CASCADE = {**FLAGS, "kv_layout": ["HND"], "causal": [False], "use_fp16_qk_reduction": [True], "q_data_type": [F16], "kv_data_type": [BF16], "use_cuda_graph": [True]}


@pytest.mark.parametrize("arg,i", expand(CASCADE))
def test_cascade(arg, i):
    change = chosen(CASCADE, arg, i)
    dtype, layout = change.get("q_data_type", BF16), change.get("kv_layout", "NHD")
    pages = Pages([22, 5, 9], 8, KV_HEADS, DIM, dtype, layout)
    ptr, q = pages.indptr.tolist(), torch.randn(4, HEADS, DIM).to(dtype)
    levels = ((i32(0, 4), i32(0, ptr[1]), pages.indices[: ptr[1]], pages.last[:1]),
              (i32(0, 1, 4), i32(0, ptr[2] - ptr[1], ptr[3] - ptr[1]), pages.indices[ptr[1]:], pages.last[1:]))
    names = ("qo_indptr_buf_arr", "paged_kv_indptr_buf_arr", "paged_kv_indices_buf_arr", "paged_kv_last_page_len_buf_arr")
    buffers = {name: [torch.zeros_like(l[n]) for l in levels] for n, name in enumerate(names)} if "use_cuda_graph" in change else {}
    wrapper = fi.MultiLevelCascadeAttentionWrapper(2, torch.empty(1), **{k: change.pop(k) for k in ("kv_layout", "use_cuda_graph") if k in change}, **buffers)
    causal = change.pop("causal", True)
    wrapper.begin_forward(*([l[n] for l in levels] for n in range(4)), HEADS, KV_HEADS, DIM, 8, causal=causal, q_data_type=change.pop("q_data_type", BF16), **change)
    got = wrapper.forward(q, pages.cache)
    whole = lambda r: tuple(torch.cat(pair) for pair in zip(pages.request(0), pages.request(r + 1)))
    near(got, batch(q, [0, 1, 4], whole, causal=causal, **{k: v for k, v in change.items() if k in FLAGS})[0])
    with pytest.raises(ValueError, match="has 1 levels, expected num_levels=2"):
        wrapper.plan(*([l[n] for l in levels[:1]] for n in range(4)), HEADS, KV_HEADS, DIM, 8)


@pytest.mark.parametrize("layout", ("NHD", "HND"))
@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("sm_scale", (None, 0.3))
def test_shared_prefixes(layout, causal, sm_scale):
    pages = Pages(LENS, PAGE, KV_HEADS, DIM, F16, layout)
    k, v = torch.randn(11, KV_HEADS, DIM).half(), torch.randn(11, KV_HEADS, DIM).half()
    give = (k, v) if layout == "NHD" else (k.transpose(0, 1), v.transpose(0, 1))
    whole = lambda r: tuple(torch.cat(pair) for pair in zip((k, v), pages.request(r)))
    q = torch.randn(3, HEADS, DIM).half()
    decode = fi.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(torch.empty(1), layout)
    decode.begin_forward(pages.indptr, pages.indices, pages.last, HEADS, KV_HEADS, DIM, PAGE, data_type="float16")
    near(decode.forward(q, *give, pages.cache), batch(q, [0, 1, 2, 3], whole)[0])
    q = torch.randn(6, HEADS, DIM).half()
    prefill = fi.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(torch.empty(1), layout)
    prefill.begin_forward(i32(*QO), pages.indptr, pages.indices, pages.last, HEADS, KV_HEADS, DIM, PAGE)
    near(prefill.forward(q, *give, pages.cache, causal=causal, use_fp16_qk_reduction=True, sm_scale=sm_scale), batch(q, QO, whole, causal=causal, sm_scale=sm_scale)[0])
    for wrapper in (decode, prefill):
        wrapper.reset_workspace_buffer(torch.empty(1), torch.empty(1))
        wrapper.end_forward()


BLOCKS = {"mask": [True], "packed_mask": [True], "logits_soft_cap": [2.0], "sm_scale": [0.3], "q_data_type": ["bfloat16", F16], "o_data_type": [BF16], "kv_data_type": [BF16], "use_fp16_qk_reduction": [True], "non_blocking": [False], "backend": ["fa2"],
          "out": [lambda: torch.full((12, HEADS, DIM), math.nan, dtype=BF16)], "lse": [lambda: dict(lse=torch.zeros(12, HEADS), return_lse=True)], "return_lse": [True], "enable_pdl": [True], "R": [dict(R=3)], "C": [dict(C=8)], "M": [dict(M=24)], "N": [dict(N=48)],
          "num_qo_heads": [dict(heads=8)]}


@pytest.mark.parametrize("arg,i", expand(BLOCKS))
def test_block_sparse(arg, i):
    change = chosen(BLOCKS, arg, i)
    rows, cols, R, C, heads = (change.pop(*p) for p in (("M", 12), ("N", 24), ("R", 4), ("C", 6), ("heads", HEADS)))
    dtype = F16 if change.get("q_data_type") == F16 else BF16
    blocks = torch.rand(rows // R, cols // C) < 0.6
    blocks[0] = False
    indptr, indices = i32(0, *blocks.sum(1).cumsum(0).tolist()), blocks.nonzero()[:, 1].int()
    inner = "mask" in change or "packed_mask" in change
    within = torch.rand(len(indices), R, C) < 0.7 if inner else torch.ones(len(indices), R, C, dtype=torch.bool)
    mask = torch.zeros(rows, cols, dtype=torch.bool)
    for n, (r, c) in enumerate(blocks.nonzero().tolist()):
        mask[r * R:(r + 1) * R, c * C:(c + 1) * C] = within[n]
    if "mask" in change:
        change["mask"] = within
    if "packed_mask" in change:
        bits = i32(*(n * R * C for n in indptr.tolist()))
        change["packed_mask"] = fi.segment_packbits(fi.sparse.convert_bsr_mask_layout(within, indptr), bits, "little")[0]
    q, k, v = torch.randn(rows, heads, DIM).to(dtype), torch.randn(cols, KV_HEADS, DIM).to(dtype), torch.randn(cols, KV_HEADS, DIM).to(dtype)
    run = {n: change.pop(n) for n in ("out", "lse", "return_lse", "enable_pdl") if n in change}
    wrapper = fi.BlockSparseAttentionWrapper(torch.empty(1), change.pop("backend", "auto"))
    change.setdefault("q_data_type", dtype)
    wrapper.plan(indptr, indices, rows, cols, R, C, heads, KV_HEADS, DIM, **change)
    got, lse = lse_of(wrapper.run(q, k, v, **run))
    want, want_lse = one(q, k, v, mask=mask, **{n: x for n, x in change.items() if n in ("logits_soft_cap", "sm_scale")})
    near(got, want)
    if lse is not None:
        near(lse, want_lse, 1e-2)
    near(wrapper.forward(q, k, v, sm_scale=0.2), one(q, k, v, mask=mask, sm_scale=0.2, logits_soft_cap=change.get("logits_soft_cap"))[0])
    for kw in (dict(causal=True), dict(block_mask=torch.ones(1))):
        with pytest.raises(NotImplementedError, match=next(iter(kw))):
            wrapper.plan(indptr, indices, rows, cols, R, C, heads, KV_HEADS, DIM, **kw)


@pytest.mark.parametrize("flags", ({}, dict(logits_soft_cap=2.0), dict(sm_scale=0.3), dict(q_data_type=F16), dict(non_blocking=False, use_fp16_qk_reduction=True)))
def test_variable_block_sparse(flags):
    dtype = flags.get("q_data_type", BF16)
    rows, cols = torch.tensor([[3, 5], [4, 4]]), i32(2, 7, 6, 3).view(2, 2)
    blocks = torch.tensor([[[1, 0], [1, 1]], [[0, 1], [1, 0]]], dtype=torch.bool)
    q, k, v = torch.randn(4, 8, DIM).to(dtype), torch.randn(2, 9, DIM).to(dtype), torch.randn(2, 9, DIM).to(dtype)
    wrapper = fi.VariableBlockSparseAttentionWrapper(torch.empty(1), "fa3")
    wrapper.plan(blocks, rows, cols, 4, 2, DIM, **{"q_data_type": dtype, **flags})
    out, lse = torch.empty_like(q), torch.empty(4, 8)
    got, s = wrapper.run(q, k, v, out=out, lse=lse, return_lse=True, enable_pdl=True)
    assert got is out and s is lse
    for h in range(2):
        mask = blocks[h].repeat_interleave(rows[h], 0).repeat_interleave(cols[h].long(), 1)
        heads = slice(2 * h, 2 * h + 2)
        want, want_lse = one(q[heads].transpose(0, 1), k[h][:, None], v[h][:, None], mask=mask, **{n: x for n, x in flags.items() if n in ("logits_soft_cap", "sm_scale")})
        near(got[heads].transpose(0, 1), want), near(s[heads].T, want_lse, 1e-2)
    near(wrapper.forward(q, k, v), got)
    with pytest.raises(NotImplementedError, match="causal"):
        wrapper.plan(blocks, rows, cols, 4, 2, DIM, causal=True)


@pytest.mark.parametrize("flags", ({}, dict(causal_p=True), dict(custom_mask_p=True), dict(packed_custom_mask_p=True), dict(sm_scale_p=0.3), dict(window_left_p=3), dict(return_lse_p=True, return_lse_d=True), dict(q_scale=0.5, k_scale=0.5, v_scale=2.0),
                                   dict(kv_layout_p="HND"), dict(pos_encoding_mode_p="ROPE_LLAMA", rope_scale_p=2.0, rope_theta_p=100.0)))
def test_prefill_beside_decode(flags):
    pages = Pages([9, 30], 8, KV_HEADS, DIM, BF16)
    qp, kp, vp, qd = torch.randn(5, HEADS, DIM).to(BF16), torch.randn(12, KV_HEADS, DIM).to(BF16), torch.randn(12, KV_HEADS, DIM).to(BF16), torch.randn(2, HEADS, DIM).to(BF16)
    flags, mask = dict(flags), None
    if "custom_mask_p" in flags or "packed_custom_mask_p" in flags:
        mask = torch.rand(5, 12) < 0.6
        flags = {"custom_mask_p": mask} if "custom_mask_p" in flags else {"packed_custom_mask_p": fi.packbits(mask.flatten(), "little")}
    wrapper = fi.PODWithPagedKVCacheWrapper(torch.empty(1))
    wrapper.plan(pages.indptr, pages.indices, pages.last, HEADS, KV_HEADS, DIM, 8, q_data_type=BF16, sm_scale=0.2)
    give = (kp.transpose(0, 1), vp.transpose(0, 1)) if flags.get("kv_layout_p") == "HND" else (kp, vp)
    first, second = wrapper.run(qp, *give, qd, pages.cache, **flags)
    own = {k.removesuffix("_p"): v for k, v in flags.items() if k in ("causal_p", "sm_scale_p", "window_left_p", "pos_encoding_mode_p", "rope_scale_p", "rope_theta_p")}
    want, want_lse = one(qp, kp, vp, mask=mask, **own)
    near(lse_of(first)[0], want)
    scales = {k: flags[k] for k in ("q_scale", "k_scale", "v_scale") if k in flags}
    want_d, want_d_lse = batch(qd, [0, 1, 2], pages.request, sm_scale=0.2, **scales)
    near(lse_of(second)[0], want_d)
    if "return_lse_p" in flags:
        near(first[1], want_lse, 1e-2), near(second[1], want_d_lse, 1e-2)
    both = fi.BatchPODWithPagedKVCacheWrapper(torch.empty(1))
    qo = i32(0, 3, 5)
    both.plan(qo, pages.indptr, pages.indices, pages.last, i32(0, 1, 2), pages.indptr, pages.indices, pages.last, HEADS, KV_HEADS, DIM, 8, q_data_type=BF16, sm_scale=0.2)
    first, second = both.run(qp, pages.cache, qd, pages.cache, causal_p=bool(flags.get("causal_p")), return_lse=bool(flags.get("return_lse_p")), **scales)
    near(lse_of(first)[0], batch(qp, [0, 3, 5], pages.request, sm_scale=0.2, causal=bool(flags.get("causal_p")), **scales)[0])
    near(lse_of(second)[0], want_d)
    wrapper.end_forward(), both.end_forward()


@pytest.mark.parametrize("flags", ({}, dict(out=True), dict(lens=True), dict(which=True), dict(row_major=True), dict(long=True)))
def test_segments(flags):
    x, w = torch.randn(9, 32).to(BF16), torch.randn(3, 16, 32).to(BF16)
    ends = i32(0, 4, 4, 9)
    which = torch.tensor([2, 0, 1]) if flags.get("which") else None
    room = torch.empty(1 + len(flags))
    wrapper = fi.SegmentGEMMWrapper(room, "auto")
    wrapper.reset_workspace_buffer(room, room)
    give = dict(seg_lens=ends.diff().long()) if flags.get("lens") else dict(seg_indptr=ends.long() if flags.get("long") else ends)
    out = torch.empty(9, 16, dtype=BF16) if flags.get("out") else None
    row = flags.get("row_major")
    got = wrapper.run(x, w.transpose(1, 2) if row else w, 3, not row, out=out, weight_indices=which, **give)
    used = w if which is None else w[which]
    near(got, torch.cat([x[a:b].float() @ m.float().T for a, b, m in zip(ends.tolist(), ends.tolist()[1:], used)]), 5e-2)
    assert out is None or got is out
    with pytest.raises(ValueError, match="seg_lens or seg_indptr"):
        wrapper.run(x, w, 3, True)
    with pytest.raises(NotImplementedError, match="batch_size"):
        wrapper.run(x, w, 2, True, **give)


@pytest.mark.parametrize("flags", ({}, dict(q_scale=0.5), dict(return_lse=True), dict(out=True), dict(half=True)))
def test_older_latent_wrappers(flags):
    dtype = F16 if flags.get("half") else BF16
    pages = Pages(LENS, PAGE, 1, 576, dtype)
    latent, q = pages.kv[:, 0, :, 0], torch.randn(3, 8, 576).to(dtype)
    wrapper = fi.BatchDecodeMlaWithPagedKVCacheWrapper(torch.empty(1))
    wrapper.plan(pages.indptr, pages.indices, pages.last, 8, 512, PAGE, 0.1, data_type=dtype, q_data_type=dtype)
    out = torch.empty(3, 8, 512, dtype=dtype) if flags.get("out") else None
    got, lse = lse_of(wrapper.run(q[..., :512], q[..., 512:], latent[..., :512], latent[..., 512:], out=out, **{k: v for k, v in flags.items() if k in ("q_scale", "return_lse")}))
    keys = lambda r: (pages.request(r)[0], pages.request(r)[0][..., :512])
    want, want_lse = batch(q, [0, 1, 2, 3], keys, sm_scale=0.1, q_scale=flags.get("q_scale"))
    near(got, want, 5e-2)
    if lse is not None:
        near(lse, want_lse, 2e-2)
    assert out is None or got is out
    for kw in (dict(window_left=3), dict(logits_soft_cap=2.0)):
        with pytest.raises(NotImplementedError, match=next(iter(kw))):
            wrapper.plan(pages.indptr, pages.indices, pages.last, 8, 512, PAGE, 0.1, **kw)
    args = (q[:, None], latent, torch.empty(1), 128, 512, 64, padded(pages), pages.lens, 20)
    for function in (fi.mla.xqa_batch_decode_with_kv_cache_mla, fi.mla.trtllm_batch_decode_with_kv_cache_mla):
        got = function(*args, bmm1_scale=0.1, out=None if out is None else out.view(3, 1, 8, 512))
        near(got.view(3, 8, 512), batch(q, [0, 1, 2, 3], keys, sm_scale=0.1)[0], 5e-2)
        with pytest.raises(NotImplementedError, match="sinks"):
            function(*args, sinks=[torch.zeros(8)])
