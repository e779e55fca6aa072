"""Arguments that the other files leave at one value: names of specifications, what is ignored, what is refused, sizes that a
test of one shape does not reach."""

import functools
import inspect
import math

import pytest
import torch
from conftest import Pages, attention
from test_wrappers import DIM, HEADS, KV_HEADS, LENS, PAGE, QO, batch, i32, lse_of, near, one, padded

import fir.flashinfer as fi
from fir.flashinfer import jit, testing

BF16, F16, F32, I32, I64 = torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.int64
E4M3, U8 = torch.float8_e4m3fn, torch.uint8

# Specifications: every argument is part of the name, or changes nothing.

VALUES = {"backend": ("fa2", "fa3"), "pos_encoding_mode": (0, 1), "arc": ("sm80", "sm90"), "input_layout": ("SEPARATE_Q_K_V", "PACKED_QKV"), "num_qo_heads": (16, 32), "variant_name": ("A", "B")}


def values_of(name):
    for start, values in VALUES.items():
        if name.startswith(start):
            return values
    if name in ("dtype_idx", "idtype"):
        return I32, I64
    if "dtype" in name:
        return F16, BF16
    return (64, 128) if name.startswith("head_dim") else (False, True)


NAMED = [n for n in jit.__all__ if n.startswith(("gen_", "get_")) and "customize" not in n and n != "gen_jit_spec"]


@pytest.mark.cpu
@pytest.mark.parametrize("name", NAMED)
def test_names_tell_arguments(name):
    function = getattr(jit, name)
    given = lambda result: result.name if isinstance(result, jit.JitSpec) else result
    base = {n: values_of(n)[0] for n in inspect.signature(function).parameters}
    first = given(function(**base))
    for n in base:
        other = given(function(**{**base, n: values_of(n)[1]}))
        ignored = name == "gen_batch_decode_mla_module" and n in ("num_qo_heads", "use_tensor_cores")
        assert (other == first) == ignored, n


CUSTOM = [n for n in jit.__all__ if n.startswith("gen_customize")]


@pytest.mark.cpu
@pytest.mark.parametrize("name", CUSTOM)
def test_variants_of_ones_own(name):
    import fir.variant as va

    function = getattr(jit, name)
    parameters = inspect.signature(function).parameters
    scaled = va.variant("Scaled", logits=va.score * va.f32("gain") + va.per_head("slopes"))
    lists = dict(additional_tensor_names=["slopes"], additional_tensor_dtypes=["float"], additional_scalar_names=["gain"], additional_scalar_dtypes=["float"], variant_decl=scaled)
    base = {n: lists[n] if n in lists else f"u_{name}" if n == "uri" else values_of(n)[0] for n in parameters}
    for n, parameter in parameters.items():
        if n in lists:
            continue
        other = {**base, n: f"v_{name}" if n == "uri" else values_of(n)[1]}
        if n.startswith("variant_name_"):
            with pytest.raises(NotImplementedError, match="expected one for both parts"):
                function(**other)
        elif n.startswith(("pos_encoding_mode", "use_sliding_window", "use_logits_soft_cap")):
            with pytest.raises(NotImplementedError, match="for the variant to tell"):
                function(**other)
        else:
            module = function(**other).build_and_load()
            assert module.variant == scaled and jit.jit_spec_registry.get_spec_status(other["uri"]).is_compiled
    plain = function(**{**base, "additional_tensor_names": [], "additional_tensor_dtypes": [], "additional_scalar_names": [], "additional_scalar_dtypes": [], "variant_decl": va.causal()}).load(None)
    assert plain.values((), 0.5) == ({}, 0.5)
    module = function(**base).build_and_load()
    assert module.values((torch.ones(4), 2.0), 0.5)[0]["gain"] == 2.0
    with pytest.raises(TypeError, match="expected 2: slopes, gain"):
        module.values((1.0,), 0.5)


@pytest.mark.cpu
def test_building():
    from pathlib import Path

    spec = jit.JitSpec("one", sources=["a.cu"])
    assert spec.sources == ["a.cu"] and jit.JitSpec("two", lambda: 7).load(Path("/nowhere")) == 7
    spec.build(verbose=True, need_lock=False)
    jit.build_jit_specs([spec], verbose=True, skip_prebuilt=False), jit.build_jit_specs([])
    for extra in ({}, dict(extra_cflags=["-g"]), dict(extra_cuda_cflags=["-g"]), dict(extra_ldflags=["-l"]), dict(extra_include_paths=["."]), dict(needs_device_linking=True)):
        for name in ("mine", "yours"):
            with pytest.raises(NotImplementedError, match=f"gen_jit_spec\\('{name}'\\)"):
                jit.gen_jit_spec(name, ["k.cu"], **extra)
    assert jit.get_batch_decode_mla_uri(F16, F16, F16, I32, 512, False, False, "sm80") != jit.get_batch_decode_mla_uri(F16, F16, F16, I32, 512, False, False, "sm90")


# Attention.

@pytest.mark.parametrize("heads,kv_heads,dim,page,dtype", [(4, 2, 64, 4, BF16), (8, 8, 128, 16, F16), (6, 2, 96, 1, BF16)])
def test_every_wrapper_of_other_sizes(heads, kv_heads, dim, page, dtype, device):
    """Heads, head dims, pages and types that a batch of one shape does not vary, for each wrapper that takes them."""
    lens, qo = [9, 20, 1], [0, 3, 5, 6]
    pages = Pages(lens, page, kv_heads, dim, dtype)
    q, qd = torch.randn(6, heads, dim).to(dtype), torch.randn(3, heads, dim).to(dtype)
    table = (pages.indptr, pages.indices, pages.last)
    shape = (heads, kv_heads, dim, page)
    space = torch.empty(heads)
    decoded, want = batch(qd, [0, 1, 2, 3], pages.request)[0], batch(q, qo, pages.request, causal=True)[0]

    wrapper = fi.BatchAttention("NHD", device)
    wrapper.plan(i32(*qo), pages.indptr, pages.indices, pages.lens, heads, kv_heads, dim, dim, page, causal=True, q_data_type=dtype, kv_data_type=dtype)
    near(wrapper.run(q, pages.cache, profiler_buffer=torch.empty(4))[0], want)

    sink = torch.randn(heads)
    wrapper = fi.BatchAttentionWithAttentionSinkWrapper(space, q_data_type=dtype, kv_data_type=dtype, head_dim_qk=dim, head_dim_vo=dim)
    wrapper.plan(i32(*qo), *table, *shape, causal=True, q_data_type=dtype)
    near(wrapper.run(q, pages.cache, sink, 0.2), batch(q, qo, pages.request, causal=True, sink=sink, sm_scale=0.2)[0])

    buffers = [torch.zeros(n, dtype=I32) for n in (4, len(pages.indices), 3)]
    for tensor_cores in (False, True):
        wrapper = fi.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(space, *buffers, "NHD", tensor_cores)
        wrapper.plan(pages.indptr, pages.indices[:-1], pages.last, *shape, q_data_type=dtype)
        near(wrapper.run(qd, pages.cache), decoded)
    for flags in ({}, dict(window_left=3), dict(pos_encoding_mode="ROPE_LLAMA", rope_scale=2.0, rope_theta=100.0), dict(q_len_per_req=1, non_blocking=False, fixed_split_size=8), dict(disable_split_kv=True, logits_soft_cap=2.0, sm_scale=0.3)):
        wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(space)
        fi.fast_decode_plan(wrapper, *table, *shape, q_data_type=dtype, kv_data_type=dtype, **flags)
        near(wrapper.run(qd, pages.cache), batch(qd, [0, 1, 2, 3], pages.request, **{n: x for n, x in flags.items() if n in ("window_left", "pos_encoding_mode", "rope_scale", "rope_theta", "logits_soft_cap", "sm_scale")})[0])
    wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(space)
    fi.fast_decode_plan(wrapper, *table, *shape, data_type=dtype, global_override_indptr_cpu=pages.indptr.cpu())
    near(wrapper.run(qd, pages.cache), decoded)
    fi.fast_decode_plan(wrapper, *table, *shape, q_data_type=dtype, q_len_per_req=2)
    two = torch.randn(6, heads, dim).to(dtype)
    near(wrapper.run(two, pages.cache), batch(two, [0, 2, 4, 6], pages.request, causal=True)[0])

    wrapper = fi.MultiLevelCascadeAttentionWrapper(1, space)
    wrapper.reset_workspace_buffer(torch.empty(2), [torch.empty(2)])
    wrapper.plan([i32(*qo)], [pages.indptr], [pages.indices], [pages.last], *shape, causal=True, q_data_type=dtype)
    near(wrapper.run(q, pages.cache), want)

    k, v = torch.randn(5, kv_heads, dim).to(dtype), torch.randn(5, kv_heads, dim).to(dtype)
    whole = lambda r: tuple(torch.cat(pair) for pair in zip((k, v), pages.request(r)))
    wrapper = fi.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(space)
    wrapper.reset_workspace_buffer(torch.empty(2), torch.empty(3))
    wrapper.begin_forward(*table, *shape, data_type=dtype)
    near(wrapper.forward(qd, k, v, pages.cache), batch(qd, [0, 1, 2, 3], whole)[0])
    if dtype == F16:
        wrapper = fi.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(space)
        wrapper.reset_workspace_buffer(torch.empty(2), torch.empty(3))
        wrapper.begin_forward(i32(*qo), *table, *shape)
        near(wrapper.forward(q, k, v, pages.cache, causal=True), batch(q, qo, whole, causal=True)[0])
        near(wrapper.forward(q, k, v, pages.cache, causal=True, rope_scale=1.0, rope_theta=1e4), batch(q, qo, whole, causal=True)[0])


POD_D = [dict(sm_scale_d=0.3), dict(window_left_d=2), dict(kv_layout_d="NHD"), dict(pos_encoding_mode_d="NONE"), dict(causal_d=True), dict(use_fp16_qk_reduction=True, enable_pdl=True), dict(rope_scale_d=1.0, rope_theta_d=1e4)]


@pytest.mark.parametrize("layout", ("NHD", "HND"))
def test_prefill_beside_decode_of_other_sizes(layout):
    for heads, kv_heads, dim, page, dtype in ((4, 2, 64, 4, F16), (8, 2, 128, 8, BF16)):
        pages = Pages([9, 30], page, kv_heads, dim, dtype, layout)
        q, k, v = torch.randn(5, heads, dim).to(dtype), torch.randn(12, kv_heads, dim).to(dtype), torch.randn(12, kv_heads, dim).to(dtype)
        qd = torch.randn(2, heads, dim).to(dtype)
        table, shape = (pages.indptr, pages.indices, pages.last), (heads, kv_heads, dim, page)
        give = (k, v) if layout == "NHD" else (k.transpose(0, 1), v.transpose(0, 1))
        for flags in ({}, dict(window_left=4), dict(pos_encoding_mode="ROPE_LLAMA", rope_scale=2.0, rope_theta=100.0), dict(non_blocking=False)):
            wrapper = fi.PODWithPagedKVCacheWrapper(torch.empty(dim), layout)
            wrapper.reset_workspace_buffer(torch.empty(dim), torch.empty(dim))
            wrapper.plan(*table, *shape, q_data_type=dtype, kv_data_type=dtype, data_type=None, **flags)
            first, second = wrapper.run(q, *give, qd, pages.cache, kv_layout_p=layout)
            near(first, one(q, k, v)[0])
            near(second, batch(qd, [0, 1, 2], pages.request, **{n: x for n, x in flags.items() if n != "non_blocking"})[0])
            both = fi.BatchPODWithPagedKVCacheWrapper(torch.empty(dim), layout)
            both.plan(i32(0, 3, 5), *table, i32(0, 1, 2), *table, *shape, q_data_type=dtype, kv_data_type=dtype, **flags)
            first, second = both.run(q, pages.cache, qd, pages.cache, causal_p=True, enable_pdl=True, use_fp16_qk_reduction=True)
            own = {n: x for n, x in flags.items() if n != "non_blocking"}
            near(first, batch(q, [0, 3, 5], pages.request, causal=True, **own)[0])
            near(second, batch(qd, [0, 1, 2], pages.request, **own)[0])
        wrapper = fi.PODWithPagedKVCacheWrapper(torch.empty(1), layout)
        wrapper.plan(*table, *shape, data_type=dtype)
        for flags in POD_D:
            flags = {**flags, "kv_layout_d": layout} if "kv_layout_d" in flags else flags
            near(wrapper.run(q, *give, qd, pages.cache, kv_layout_p=layout, **flags)[1], batch(qd, [0, 1, 2], pages.request)[0])


def test_masks_graphs_and_types_of_composed_wrappers():
    pages = Pages([9, 30], 8, KV_HEADS, DIM, F16)
    qp, qd = torch.randn(5, HEADS, DIM).half(), torch.randn(2, HEADS, DIM).half()
    kp, vp = torch.randn(12, KV_HEADS, DIM).half(), torch.randn(12, KV_HEADS, DIM).half()
    table, shape = (pages.indptr, pages.indices, pages.last), (HEADS, KV_HEADS, DIM, 8)
    masks = [torch.rand(3, 9) < 0.6, torch.rand(2, 30) < 0.6]
    flat = torch.cat([m.flatten() for m in masks])
    both = fi.BatchPODWithPagedKVCacheWrapper(torch.empty(1))
    both.plan(i32(0, 3, 5), *table, i32(0, 1, 2), *table, *shape, data_type=F16)
    want = batch(qp, [0, 3, 5], pages.request, masks=masks)[0]
    near(both.run(qp, pages.cache, qd, pages.cache, custom_mask_p=flat)[0], want)
    packed = fi.segment_packbits(flat, i32(0, 27, 87), "little")[0]
    first, second = both.run(qp, pages.cache, qd, pages.cache, packed_custom_mask_p=packed)
    near(first, want), near(second, batch(qd, [0, 1, 2], pages.request)[0])
    # Another split of the tokens over the requests, of the other batch too.
    both.plan(i32(0, 1, 5), *table, i32(0, 2, 2), *table, *shape, data_type=F16)
    first, second = both.run(qp, pages.cache, qd, pages.cache)
    near(first, batch(qp, [0, 1, 5], pages.request)[0]), near(second, batch(qd, [0, 2, 2], pages.request)[0])
    wide = Pages([9, 30], 8, HEADS, DIM, F16)
    both.plan(i32(0, 1, 5), wide.indptr, wide.indices, wide.last, i32(0, 1, 2), wide.indptr, wide.indices, wide.last, HEADS, HEADS, DIM, 8)
    near(both.run(qp, wide.cache, qd, wide.cache)[1], batch(qd, [0, 1, 2], wide.request)[0])
    buffers = [torch.zeros(n, dtype=I32) for n in (3, len(pages.indices), 2)]
    pod = fi.PODWithPagedKVCacheWrapper(torch.empty(1), "NHD", True, *buffers)
    assert pod.is_cuda_graph_enabled
    pod.plan(pages.indptr, pages.indices[:-1], pages.last, *shape)
    # What is told of the decode's part here is ignored: it is planned.
    ignored = dict(custom_mask_d=torch.ones(3), packed_custom_mask_d=torch.ones(3), pos_encoding_mode_d="ALIBI")
    first, second = pod.run(qp, kp, vp, qd, pages.cache, **ignored)
    near(first, one(qp, kp, vp)[0]), near(second, batch(qd, [0, 1, 2], pages.request)[0])
    pod = fi.PODWithPagedKVCacheWrapper(torch.empty(1))
    pod.plan(wide.indptr, wide.indices, wide.last, HEADS, HEADS, DIM, 8)
    near(pod.run(qp, kp, vp, qd, wide.cache)[1], batch(qd, [0, 1, 2], wide.request)[0])
    import fir.variant as va

    args = ["u", F16, F16, F16, I32, DIM, DIM, [], [], ["gain"], ["float"], "Scaled", va.variant("Scaled", logits=va.score * va.f32("gain"))]
    pod = fi.PODWithPagedKVCacheWrapper(torch.empty(1), jit_args=args)
    pod.plan(*table, *shape)
    with pytest.raises(ValueError, match="gain"):
        pod.run(qp, kp, vp, qd, pages.cache)
    # Wrappers with a sink have buffers, masks and rotations too.
    sink = torch.randn(HEADS)
    graph = [torch.zeros(n, dtype=I32) for n in (3, 3, len(pages.indices), 2)] + [torch.zeros(64, dtype=U8), torch.zeros(3, dtype=I32)]
    wrapper = fi.BatchAttentionWithAttentionSinkWrapper(torch.empty(1), "NHD", True, *graph, q_data_type=F16, kv_data_type=F16, head_dim_qk=DIM, head_dim_vo=DIM)
    wrapper.plan(i32(0, 3, 5), pages.indptr, pages.indices[:-1], pages.last, *shape, custom_mask=flat)
    near(wrapper.run(qp, pages.cache, sink, 0.2), batch(qp, [0, 3, 5], pages.request, masks=masks, sink=sink, sm_scale=0.2)[0])
    wrapper = fi.BatchAttentionWithAttentionSinkWrapper(torch.empty(1), pos_encoding_mode="ROPE_LLAMA", q_data_type=F16, kv_data_type=F16)
    wrapper.plan(i32(0, 3, 5), *table, *shape)
    near(wrapper.run(qp, pages.cache, sink, 0.2), batch(qp, [0, 3, 5], pages.request, sink=sink, sm_scale=0.2, pos_encoding_mode="ROPE_LLAMA")[0])
    codes = torch.randint(0, 256, (*pages.kv.shape[:-1], DIM // 2), dtype=U8)
    scales = (torch.rand(*pages.kv.shape[:-1], DIM // 16) + 0.5).to(E4M3)
    levels = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    nibbles = torch.stack((codes & 15, codes >> 4), -1).flatten(-2).long()
    pages.kv = (torch.where(nibbles > 7, -1.0, 1.0) * levels[nibbles % 8] * scales.float().repeat_interleave(16, -1)).half()
    wrapper.plan(i32(0, 3, 5), *table, *shape, kv_data_type=U8, pos_encoding_mode="NONE")
    near(wrapper.run(qp, codes, sink, 0.05, kv_cache_sf=scales), batch(qp, [0, 3, 5], pages.request, sink=sink, sm_scale=0.05)[0], 5e-2)
    arrays = dict(qo_indptr_buf_arr=[i32(0)], paged_kv_indptr_buf_arr=[i32(0)], paged_kv_indices_buf_arr=[i32(0)], paged_kv_last_page_len_buf_arr=[i32(0)])
    wrapper = fi.MultiLevelCascadeAttentionWrapper(1, None, "HND", True, **arrays, workspace_buffer=torch.empty(3))
    assert wrapper.is_cuda_graph_enabled
    shared = fi.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(torch.empty(1))
    plain = Pages([9, 30], 8, KV_HEADS, DIM, F16)
    whole = lambda r: tuple(torch.cat(pair) for pair in zip((kp, vp), plain.request(r)))
    for qo in ([0, 3, 5], [0, 5, 5]):
        shared.begin_forward(i32(*qo), plain.indptr, plain.indices, plain.last, *shape)
        near(shared.forward(qp, kp, vp, plain.cache), batch(qp, qo, whole)[0])
    layouts = fi.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(torch.empty(1), *buffers, "HND")
    hnd = Pages([9, 30], 8, KV_HEADS, DIM, F16, "HND")
    layouts.plan(hnd.indptr, hnd.indices[:-1], hnd.last, *shape)
    near(layouts.run(qd, hnd.cache), batch(qd, [0, 1, 2], hnd.request)[0])


FORWARD = [dict(causal=True), dict(pos_encoding_mode="ALIBI"), dict(pos_encoding_mode="ROPE_LLAMA", rope_scale=2.0), dict(pos_encoding_mode="ROPE_LLAMA", rope_theta=100.0), dict(window_left=3), dict(use_fp16_qk_reduction=True),
           dict(sm_scale=0.3), dict(logits_soft_cap=2.0)]


@pytest.mark.parametrize("flags", FORWARD)
def test_deprecated_forms_of_prefill(flags):
    pages = Pages(LENS, PAGE, KV_HEADS, DIM, BF16)
    q, ends = torch.randn(6, HEADS, DIM).to(BF16), [0, 9, 29, 30]
    k, v = torch.randn(30, KV_HEADS, DIM).to(BF16), torch.randn(30, KV_HEADS, DIM).to(BF16)
    own = {n: x for n, x in flags.items() if n != "use_fp16_qk_reduction"}
    wrapper = fi.BatchPrefillWithPagedKVCacheWrapper(torch.empty(1))
    wrapper.begin_forward(i32(*QO), pages.indptr, pages.indices, pages.last, HEADS, KV_HEADS, DIM, PAGE, q_data_type=BF16)
    want, lse = batch(q, QO, pages.request, **own)
    near(wrapper.forward(q, pages.cache, **flags), want)
    got, got_lse = wrapper.forward_return_lse(q, pages.cache, **flags)
    near(got, want), near(got_lse, lse, 1e-2)
    wrapper = fi.BatchPrefillWithRaggedKVCacheWrapper(torch.empty(1))
    wrapper.begin_forward(i32(*QO), i32(*ends), HEADS, KV_HEADS, DIM, q_data_type=BF16)
    near(wrapper.forward(q, k, v, **flags), batch(q, QO, lambda r: (k[ends[r]:ends[r + 1]], v[ends[r]:ends[r + 1]]), **own)[0])


def test_what_plain_wrappers_ignore_or_refuse():
    """``sinks`` of plain wrappers is ignored, as FlashInfer does on Hopper; what nothing here reads is refused by name."""
    pages = Pages(LENS, PAGE, KV_HEADS, DIM, BF16)
    table, q = (pages.indptr, pages.indices, pages.last, HEADS, KV_HEADS, DIM, PAGE), torch.randn(3, HEADS, DIM).to(BF16)
    want = batch(q, [0, 1, 2, 3], pages.request)[0]
    decode, prefill = fi.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1)), fi.BatchPrefillWithPagedKVCacheWrapper(torch.empty(1))
    decode.plan(*table, q_data_type=BF16), prefill.plan(i32(0, 1, 2, 3), *table, q_data_type=BF16)
    near(decode.run(q, pages.cache, sinks=torch.randn(HEADS)), want), near(prefill.run(q, pages.cache, sinks=torch.randn(HEADS)), want)
    ragged = fi.BatchPrefillWithRaggedKVCacheWrapper(torch.empty(1), jit_kwargs={})
    k = torch.randn(6, KV_HEADS, DIM).to(BF16)
    for name in ("v_indptr", "o_indptr"):
        with pytest.raises(NotImplementedError, match=name):
            ragged.plan(i32(0, 3), i32(0, 6), HEADS, KV_HEADS, DIM, **{name: i32(0, 6)})
    ragged.plan(i32(0, 3), i32(0, 6), HEADS, KV_HEADS, DIM, q_data_type=BF16)
    for call in (lambda **kw: ragged.run(q, k, k, **kw), lambda **kw: fi.single_prefill_with_kv_cache(q, k, k, **kw)):
        with pytest.raises(NotImplementedError, match="kv_cache_sf"):
            call(kv_cache_sf=(k, k))
    mla = fi.BatchMLAPagedAttentionWrapper(torch.empty(1))
    latent = torch.randn(4, PAGE, 96).to(BF16)
    for ckv, kpe in ((64, 32), (80, 16)):
        mla.plan(i32(0, 1), i32(0, 2), i32(3, 1), i32(7), 4, ckv, kpe, PAGE, False, 0.1, BF16, BF16, use_profiler=True)
        x = torch.randn(1, 4, 96).to(BF16)
        rest = (x[..., :ckv], x[..., ckv:], latent[..., :ckv], latent[..., ckv:])
        keys = torch.cat((latent[3], latent[1]))[:7, None]
        got = mla.run(*rest, profiler_buffer=torch.empty(9), kv_len=i32(7), page_table=i32(3, 1))
        near(got, attention(x, keys, keys[..., :ckv], 0.1)[0], 5e-2)
    lse = torch.empty(1, 4)
    got, natural = mla.run(*rest, lse=lse, return_lse=True, return_lse_base_on_e=True)
    torch.testing.assert_close(natural, mla.run(*rest, return_lse=True)[1] * math.log(2))
    assert natural is lse
    for kw in (dict(ckv_scale_arr=torch.ones(1)), dict(o_scale=2.0)):
        with pytest.raises(NotImplementedError, match=next(iter(kw))):
            mla.run(*rest, **kw)
    hnd = Pages(LENS, PAGE, KV_HEADS, DIM, BF16, "HND")
    blackwell = dict(o_sf_vec_size=16, lse=torch.empty(3, HEADS), multi_ctas_kv_counter_buffer=torch.zeros(4), bf16q_fp8kv_transform_mode="k_only")
    got = fi.decode.trtllm_batch_decode_with_kv_cache(q, hnd.cache, torch.empty(1), padded(hnd), hnd.lens, 20, 0.2, **blackwell)
    near(got, batch(q, [0, 1, 2, 3], hnd.request, sm_scale=0.2)[0])
    x = torch.randn(6, HEADS, DIM).to(BF16)
    context = lambda **kw: fi.prefill.trtllm_batch_context_with_kv_cache(x, hnd.cache, torch.empty(1), padded(hnd), hnd.lens, 3, 20, 0.2, 1.0, kw.pop("batch_size", 3), i32(*QO), kw.pop("cum_seq_lens_kv", i32(0, 9, 29, 30)), **kw)
    want = batch(x, QO, hnd.request, causal=True, sm_scale=0.2)[0]
    near(context(batch_size=4, cum_seq_lens_kv=i32(0), multi_ctas_kv_counter_buffer=torch.zeros(4), o_sf_vec_size=16), want)
    for kw in (dict(o_sf_scale=1.0), dict(uses_shared_paged_kv_idx=False)):
        with pytest.raises(NotImplementedError, match=next(iter(kw))):
            context(**kw)
    codes = tuple(torch.randint(0, 256, (*hnd.kv.shape[:1], *hnd.kv.shape[2:-1], DIM // 2), dtype=U8) for _ in range(2))
    scales = tuple(torch.ones(*c.shape[:-1], DIM // 16).to(E4M3) for c in codes)
    levels = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    nibbles = [torch.stack((c & 15, c >> 4), -1).flatten(-2).long() for c in codes]
    hnd.kv = torch.stack([torch.where(n > 7, -1.0, 1.0) * levels[n % 8] for n in nibbles], 1).to(BF16)
    got = fi.prefill.trtllm_batch_context_with_kv_cache(x, codes, torch.empty(1), padded(hnd), hnd.lens, 3, 20, 0.05, 1.0, 3, i32(*QO), i32(0, 9, 29, 30), kv_cache_sf=scales)
    near(got, batch(x, QO, hnd.request, causal=True, sm_scale=0.05)[0], 5e-2)
    got = fi.decode.trtllm_batch_decode_with_kv_cache(q, codes, torch.empty(1), padded(hnd), hnd.lens, 20, 0.05, kv_cache_sf=scales)
    near(got, batch(q, [0, 1, 2, 3], hnd.request, sm_scale=0.05)[0], 5e-2)


@pytest.mark.parametrize("heads,dim,vo,scale,dtype", [(4, 64, 32, 0.2, BF16), (2, 192, 128, 0.1, F16)])
def test_ragged_calls_of_other_sizes(heads, dim, vo, scale, dtype):
    qo, kv = [0, 2, 9], [0, 10, 40]
    q, k, v = torch.randn(9, heads, dim).to(dtype), torch.randn(40, 2, dim).to(dtype), torch.randn(40, 2, vo).to(dtype)
    keys = lambda r: (k[kv[r]:kv[r + 1]], v[kv[r]:kv[r + 1]])
    want, want_lse = batch(q, qo, keys, causal=True, sm_scale=scale)
    lens = i32(10, 30)
    call = lambda *args, **kw: fi.prefill.trtllm_ragged_attention_deepseek(
        q, k, v, torch.empty(heads), lens, 7, 30 + heads, scale, 1.0, float(heads), heads, -1, i32(*qo), i32(*kv), heads == 2, True, False, **kw)
    near(call(), want)
    near(call(skip_softmax_threshold_scale_factor=0.5, num_elts_per_sage_attn_blk=(1,) * 4, backend="cutlass", q_seq_lens_cpu=i32(2, 7), kv_seq_lens_cpu=lens, use_fp16_softmax=True, uses_spcompress=True), want)
    with pytest.raises(NotImplementedError, match="sage_attn_sfs"):
        call(sage_attn_sfs=(torch.ones(1),) * 4)
    near(fi.prefill.fmha_varlen(q, k, v, i32(*qo), i32(*kv), plan_info=[1], causal=True, sm_scale=scale, k_scale=0.5), batch(q, qo, keys, causal=True, sm_scale=scale, k_scale=0.5)[0])
    both = lambda **kw: fi.prefill.trtllm_fmha_v2_prefill((q, k, v), "SEPARATE_Q_K_V", torch.empty(1), lens, 7 + heads, 30 + heads, scale, 1.0, heads, i32(*qo), i32(*kv), **kw)
    near(both(skip_softmax_threshold_scale_factor=0.5), want)
    for kw in (dict(pos_encoding_mode="ALIBI"), dict(chunked_attention_size=64), dict(mask_mode="odd")):
        with pytest.raises(NotImplementedError, match=next(iter(kw))):
            both(**kw)


@pytest.mark.parametrize("heads,ckv,kpe,page,dtype", [(8, 512, 64, 4, BF16), (4, 128, 32, 16, F16)])
def test_older_latent_calls_of_other_sizes(heads, ckv, kpe, page, dtype):
    pages = Pages([5, 33], page, 1, ckv + kpe, dtype)
    latent, q = pages.kv[:, 0, :, 0], torch.randn(2, heads, ckv + kpe).to(dtype)
    keys = lambda r: (pages.request(r)[0], pages.request(r)[0][..., :ckv])
    buffers = dict(paged_kv_indptr_buffer=i32(0), paged_kv_indices_buffer=i32(0), paged_kv_last_page_len_buffer=i32(0))
    wrapper = fi.BatchDecodeMlaWithPagedKVCacheWrapper(torch.empty(heads), True, heads == 4, **buffers)
    assert wrapper.is_cuda_graph_enabled and wrapper.use_tensor_cores == (heads == 4)
    wrapper.reset_workspace_buffer(torch.empty(heads), torch.empty(heads))
    wrapper.plan(pages.indptr, pages.indices, pages.last, heads, ckv, page, 0.1 + heads / 100, data_type=dtype, rope_scale=float(heads), rope_theta=1e4 + heads)
    lse = torch.zeros(2, heads)
    args = (q[..., :ckv], q[..., ckv:], latent[..., :ckv], latent[..., ckv:])
    got, s = wrapper.run(*args, lse=lse, return_lse=True, enable_pdl=True)
    want, want_lse = batch(q, [0, 1, 2], keys, sm_scale=0.1 + heads / 100)
    near(got, want, 5e-2), near(s, want_lse, 2e-2)
    assert s is lse
    for kw in (dict(k_scale=0.5), dict(v_scale=0.5), dict(k_scale=0.5, v_scale=0.5)):
        halved = lambda r: tuple(t * 0.5 for t in keys(r))
        near(wrapper.run(*args, **kw), batch(q, [0, 1, 2], halved, sm_scale=0.1 + heads / 100)[0], 5e-2)
    with pytest.raises(NotImplementedError, match="v_scale"):
        wrapper.run(*args, k_scale=0.5, v_scale=0.25)
    call = (q[:, None], latent, torch.empty(1), 100 + heads, ckv, kpe, padded(pages), pages.lens, 40 + heads)
    for function in (fi.mla.xqa_batch_decode_with_kv_cache_mla, fi.mla.trtllm_batch_decode_with_kv_cache_mla):
        near(function(*call, bmm1_scale=0.1, enable_pdl=True).view(2, heads, ckv), batch(q, [0, 1, 2], keys, sm_scale=0.1)[0], 5e-2)
        with pytest.raises(NotImplementedError, match="bmm2_scale"):
            function(*call, bmm2_scale=2.0)
    function = fi.mla.trtllm_batch_decode_with_kv_cache_mla
    near(function(*call, bmm1_scale=0.1, backend="xqa", skip_softmax_threshold_scale_factor=0.5).view(2, heads, ckv), batch(q, [0, 1, 2], keys, sm_scale=0.1)[0], 5e-2)
    with pytest.raises(NotImplementedError, match="sparse_mla_top_k"):
        function(*call, sparse_mla_top_k=64)


def test_sparse_flags():
    rope = dict(pos_encoding_mode="ROPE_LLAMA", rope_scale=2.0, rope_theta=100.0)
    indptr, indices = i32(0, 2, 3), i32(0, 2, 1)
    mask = torch.zeros(8, 12, dtype=torch.bool)
    for r, c in ((0, 0), (0, 2), (1, 1)):
        mask[4 * r:4 * r + 4, 4 * c:4 * c + 4] = True
    for kv_heads in (1, 2):
        heads = 4 * kv_heads
        q, k, v = torch.randn(8, heads, DIM).half(), torch.randn(12, kv_heads, DIM).half(), torch.randn(12, kv_heads, DIM).half()
        fixed = fi.BlockSparseAttentionWrapper(torch.empty(kv_heads))
        fixed.reset_workspace_buffer(torch.empty(kv_heads), torch.empty(kv_heads))
        fixed.plan(indptr, indices, 8, 12, 4, 4, heads, kv_heads, DIM, logits_soft_cap=2.0)
        near(fixed.forward(q, k, v, use_fp16_qk_reduction=True, logits_soft_cap=2.0, rope_scale=None, rope_theta=None), one(q, k, v, mask=mask, logits_soft_cap=2.0)[0])
        for kw in (dict(logits_soft_cap=3.0), dict(pos_encoding_mode="ALIBI"), dict(rope_scale=2.0), dict(rope_theta=3.0)):
            with pytest.raises(ValueError, match=f"{next(iter(kw))} .* mismatches"):
                fixed.forward(q, k, v, **kw)
        for name in ("scale_q", "scale_k", "scale_v"):
            for method in (fixed.run, fixed.forward):
                with pytest.raises(NotImplementedError, match=name):
                    method(q, k, v, **{name: torch.ones(1)})
        variable = fi.VariableBlockSparseAttentionWrapper(torch.empty(kv_heads))
        variable.reset_workspace_buffer(torch.empty(kv_heads), torch.empty(kv_heads))
        blocks = torch.tensor([[[1, 0, 1], [0, 1, 0]]] * kv_heads, dtype=torch.bool)
        rows, cols = torch.tensor([[4, 4]] * kv_heads), torch.tensor([[4, 4, 4]] * kv_heads)
        turned = lambda t: t.transpose(0, 1).contiguous()
        variable.plan(blocks, rows, cols, heads, kv_heads, DIM, kv_data_type=F16, logits_soft_cap=2.0)
        near(turned(variable.forward(turned(q), turned(k), turned(v), use_fp16_qk_reduction=True, logits_soft_cap=2.0, sm_scale=0.3)), one(q, k, v, mask=mask, logits_soft_cap=2.0, sm_scale=0.3)[0])
        for kw in (dict(logits_soft_cap=3.0), dict(pos_encoding_mode="ALIBI"), dict(rope_scale=2.0), dict(rope_theta=3.0)):
            with pytest.raises(ValueError, match=f"{next(iter(kw))} .* mismatches"):
                variable.forward(turned(q), turned(k), turned(v), **kw)
    # Places of gathered keys are their places in the list: a row block that sees all has those of a dense call.
    for flags in (rope, dict(pos_encoding_mode="ALIBI")):
        fixed.plan(i32(0, 1), i32(0), 8, 12, 8, 12, heads, 2, DIM, **flags)
        want = fixed.run(q, k, v)
        assert not torch.allclose(want, one(q, k, v)[0].half(), atol=1e-2)
        every = (torch.ones(2, 1, 1, dtype=torch.bool), torch.tensor([[8]] * 2), torch.tensor([[12]] * 2), heads, 2, DIM)
        if flags is rope:
            variable.plan(*every, **flags)
            near(turned(variable.run(turned(q), turned(k), turned(v))), want)
        else:
            with pytest.raises(NotImplementedError, match="ALIBI"):
                variable.plan(*every, **flags)


def test_jit_modules_of_one_request():
    import fir.variant as va

    for name, gain in (("Once", 1.0), ("Twice", 2.0)):
        module = jit.gen_customize_single_decode_module(name, F16, F16, F16, DIM, DIM, [], [], ["gain"], ["float"], name, va.variant(name, logits=va.score * va.f32("gain"))).build_and_load()
        for n, layout, window in ((9, "NHD", -1), (14, "HND", 4)):
            q, k, v = torch.randn(HEADS, DIM).half(), torch.randn(n, KV_HEADS, DIM).half(), torch.randn(n, KV_HEADS, DIM).half()
            give = (k, v) if layout == "NHD" else (k.transpose(0, 1), v.transpose(0, 1))
            got = fi.decode.single_decode_with_kv_cache_with_jit_module(module, q, *give, gain, kv_layout=layout, window_left=window)
            near(got, one(q[None], k, v, sm_scale=gain * DIM**-0.5, window_left=window)[0][0])


# Pages and blocks.

@pytest.mark.parametrize("layout", ("NHD", "HND"))
@pytest.mark.parametrize("latent", (False, True))
@pytest.mark.parametrize("change", ({}, dict(is_neox=False), dict(quant_scale_q=2.0), dict(quant_scale_kv=0.5), dict(quantize_dtype=torch.float8_e5m2), dict(page_size=4), dict(outs=True), dict(nope=None), dict(enable_pdl=True), dict(tokens=3)))
def test_rotated_into_pages(layout, latent, change):
    if latent and (layout == "HND" or "nope" in change):
        pytest.skip("latent pages have one order and both parts")
    change = dict(change)
    tokens, page, nope = change.pop("tokens", 5), change.get("page_size", 16), change.pop("nope", 24)
    lens = [7, 20]
    q_type, kv_type = change.get("quantize_dtype", E4M3), change.get("quantize_dtype", E4M3)
    b = i32(*[0, 0, 1, 1, 1][:tokens])
    pos = i32(*[5, 6, 3, 18, 19][:tokens])
    ids = torch.tensor([17, 3, 40, 1, 8][:tokens])
    angles = torch.randn(50 + tokens, 8) * 3
    table = torch.cat((angles.cos(), angles.sin()), -1)
    counts = [-(-n // page) for n in lens]
    indices, indptr = torch.randperm(sum(counts) + 2)[: sum(counts)].int(), i32(0, counts[0], sum(counts))
    neox = change.get("is_neox", True)

    def turned(x):
        a, c = (x[..., :8], x[..., 8:]) if neox else (x[..., ::2], x[..., 1::2])
        cos, sin = (f(angles)[ids].view(tokens, *(1,) * (x.dim() - 2), 8) for f in (torch.cos, torch.sin))
        y, z = a * cos - c * sin, c * cos + a * sin
        return torch.cat((y, z), -1) if neox else torch.stack((y, z), -1).flatten(-2)

    q_rope, q_nope = torch.randn(tokens, 4, 16), None if nope is None else torch.randn(tokens, 4, nope)
    heads = () if latent else (2,)
    k_rope, k_nope = torch.randn(tokens, *heads, 16), None if nope is None else torch.randn(tokens, *heads, nope)
    v = None if latent else torch.randn(tokens, 2, 32)
    pool = lambda dim: torch.zeros((sum(counts) + 2, page, dim) if latent else (sum(counts) + 2, page, 2, dim) if layout == "NHD" else (sum(counts) + 2, 2, page, dim)).to(kv_type)
    cache = (pool(nope), pool(16)) if latent else (pool(16 + (nope or 0)), pool(32))
    outs = {}
    if change.pop("outs", False):
        outs = dict(q_rope_out=torch.zeros(tokens, 4, 16).to(E4M3), q_nope_out=torch.zeros(tokens, 4, nope).to(E4M3))
    rope_out, nope_out = fi.rope.rope_quantize_fp8_append_paged_kv_cache(
        q_rope, k_rope, q_nope, k_nope, v, table, ids.int(), cache, indices, indptr, b, pos, kv_layout=layout, **{"page_size": page, **change}, **outs)
    assert not outs or rope_out is outs["q_rope_out"] and nope_out is outs["q_nope_out"]
    fp8 = lambda x, d: x.clamp(-torch.finfo(d).max, torch.finfo(d).max).to(d).float()
    scale_q, scale_kv = change.get("quant_scale_q", 1.0), change.get("quant_scale_kv", 1.0)
    rounded = lambda got, want: torch.testing.assert_close(got.float(), want, atol=0.07, rtol=0.26)
    rounded(rope_out, fp8(turned(q_rope) * scale_q, q_type))
    if nope is not None:
        rounded(nope_out, fp8(q_nope * scale_q, q_type))
    wants = (k_nope, turned(k_rope)) if latent else (turned(k_rope) if nope is None else torch.cat((turned(k_rope), k_nope), -1), v)
    for stored, want in zip(cache, wants):
        rows = stored if latent or layout == "NHD" else stored.transpose(1, 2)
        for t in range(tokens):
            place = indices[indptr[b[t]] + pos[t] // page].item(), int(pos[t] % page)
            rounded(rows[place], fp8(want[t] * scale_kv, kv_type))


@pytest.mark.parametrize("dtype,page", [(BF16, 4), (F16, 2)])
def test_latent_vectors_into_pages(dtype, page):
    for lens, b, pos in (([5, 2], [0, 1, 1], [4, 0, 1]), ([9, 7, 1], [1, 0, 2], [6, 8, 0])):
        pages = Pages(lens, page, 1, 24, dtype)
        ckv, kpe = torch.zeros(pages.kv.shape[0], page, 16, dtype=dtype), torch.zeros(pages.kv.shape[0], page, 8, dtype=dtype)
        x, y = torch.randn(3, 16).to(dtype), torch.randn(3, 8).to(dtype)
        fi.append_paged_mla_kv_cache(x, y, i32(*b), i32(*pos), ckv, kpe, pages.indices, pages.indptr, pages.last)
        for t, (r, p) in enumerate(zip(b, pos)):
            place = int(pages.indices[pages.indptr[r] + p // page]), p % page
            assert torch.equal(ckv[place], x[t]) and torch.equal(kpe[place], y[t])


@pytest.mark.parametrize("k_scale,v_scale,lens", [(0.5, 0.25, [6, 1, 9]), (2.0, 1.0, [3, 12])])
def test_nvfp4_pages_of_other_scales(k_scale, v_scale, lens):
    pages = Pages(lens, 4, 2, 32, BF16)
    b = i32(*range(len(lens)))
    pos = i32(*(n - 1 for n in lens))
    k, v = torch.randn(len(lens), 2, 32).to(BF16), torch.randn(len(lens), 2, 32).to(BF16)
    n, table = pages.kv.shape[0], padded(pages).clamp(max=pages.kv.shape[0] - 1)
    outs = {}
    for slots in (False, True):
        codes, scales = torch.zeros(n, 2, 4, 2, 16, dtype=U8), torch.zeros(n, 2, 4, 2, 2, dtype=U8)
        if slots:
            page = pages.indices[pages.indptr[b.long()].long() + pos.long() // 4]
            fi.page.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(k, v, page * 4 + pos % 4, codes, scales, k_scale, v_scale)
        else:
            fi.page.nvfp4_quantize_append_paged_kv_cache(k, v, b, pos, codes, scales, pages.indices, pages.indptr, pages.last, k_scale, v_scale)
        got = [torch.zeros(len(lens), max(lens), 2, 32, dtype=BF16) for _ in range(2)]
        fi.quantization.nvfp4_kv_dequantize_paged(codes, scales, table, pages.lens, torch.tensor([k_scale]), torch.tensor([v_scale]), *got)
        for out, x in zip(got, (k, v)):
            torch.testing.assert_close(torch.stack([out[r, p] for r, p in zip(b.tolist(), pos.tolist())]).float(), x.float(), atol=0.6, rtol=0.26)
        outs[slots] = got
    assert all(torch.equal(a, c) for a, c in zip(*outs.values()))


@pytest.mark.parametrize("rows,scale", [(6, 0.5), (3, 2.0)])
def test_blocks_of_other_sizes(rows, scale):
    q = fi.quantization
    x = torch.randn(rows, 64 * rows).to(BF16)
    codes, s = q.mxfp8_quantize(x, False)
    torch.testing.assert_close(q.mxfp8_dequantize_host(codes, s, False), x.float(), atol=0.1, rtol=0.08)
    with pytest.raises(NotImplementedError, match="swizzled"):
        q.mxfp8_dequantize_host(codes, s, False, sf_swizzle_layout=1)
    codes, s = q.mxfp4_quantize(x, "cute-dsl", sfLayout="linear")
    torch.testing.assert_close(q.mxfp4_dequantize(codes, s, "linear"), x.float(), atol=0.8, rtol=0.3)
    codes, s = q.nvfp4_kv_quantize(x, torch.tensor([scale]))
    torch.testing.assert_close(q.nvfp4_kv_dequantize(codes, s, torch.tensor([scale])).float(), x.float(), atol=0.6, rtol=0.26)


# Draws.

def test_every_argument_of_chains(device):
    target = torch.rand(300, 3, 8).softmax(-1)
    draft = torch.rand(300, 2, 8).softmax(-1)
    tokens = torch.randint(0, 8, (300, 2))
    first = fi.chain_speculative_sampling(draft, tokens, target, seed=3, offset=0)
    again = fi.chain_speculative_sampling(draft, tokens, target, seed=3, offset=0, deterministic=False)
    assert all(torch.equal(a, c) for a, c in zip(first, again))
    for other in (dict(seed=4, offset=0), dict(seed=3, offset=800)):
        assert not torch.equal(first[0], fi.chain_speculative_sampling(draft, tokens, target, **other)[0])
    counts = [torch.full((300,), n, dtype=I32) for n in (5, 7)]
    out, accepted, emitted = fi.chain_speculative_sampling(draft, tokens, target, *counts, seed=3, offset=0)
    assert accepted is counts[0] and emitted is counts[1] and torch.equal(out, first[0])
    assert torch.equal(accepted - 5, first[1]) and torch.equal(emitted - 7, first[2])
    draws = []
    for seed in (1, 1, 2):
        generator = torch.Generator(device=device)
        generator.manual_seed(seed)
        draws.append(fi.chain_speculative_sampling(draft, tokens, target, generator=generator)[0])
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])
    # Of rows that differ, a token is kept as often as the lesser of the two says.
    kept = torch.minimum(torch.ones(()), target[:, 0].gather(1, tokens[:, :1]) / draft[:, 0].gather(1, tokens[:, :1])).mean()
    assert abs((first[0][:, 0] == tokens[:, 0]).float().mean() - kept) < 0.12


def test_tags_and_steps():
    from fir.flashinfer import logits_processor as lp

    for shape in ((2, 3), (4, 5)):
        x = torch.rand(shape)
        for make, kind in ((lp.TaggedTensor.logits, lp.TensorType.LOGITS), (lp.TaggedTensor.probs, lp.TensorType.PROBS), (lp.TaggedTensor.indices, lp.TensorType.INDICES)):
            tagged = make(x)
            assert tagged.data is x and tagged.type == kind and tagged.shape == shape and tagged.size(0) == shape[0] and tagged.size(1) == shape[1] and tagged.size() == torch.Size(shape)
    pipe = lp.LogitsPipe([lp.Softmax(enable_pdl=True), lp.Sample(deterministic=False)])
    peaked = torch.full((3, 8), -30.0)
    peaked[range(3), [1, 7, 4]] = 30.0
    assert pipe(peaked).tolist() == [1, 7, 4]


# Experts, work, devices.

@pytest.mark.cpu
def test_sizes_that_are_none():
    m = fi.fused_moe
    base = dict(max_num_tokens=8, hidden_size=64, intermediate_size=32, num_experts_total=4, top_k=2, x_dtype=BF16, weight_dtype=BF16)
    other = dict(max_num_tokens=9, hidden_size=128, intermediate_size=64, num_experts_total=8, top_k=1, x_dtype=F16, weight_dtype=E4M3, output_dtype=F16, activation_type=m.ActivationType.Geglu, tp_size=2, tp_rank=1, ep_size=2, ep_rank=1,
                 min_latency_mode=True, use_deepseek_fp8_block_scale=True, use_w4_group_scaling=True, use_mxfp8_act_scaling=True, use_fused_finalize=False, use_packed_weights=True, use_wfp4afp8_humming=True, device="cpu")
    for name, value in other.items():
        assert m.cutlass_fused_moe_workspace_size(**{**base, name: value}) == 0
    for tokens, top_k, experts, tile in ((10, 2, 8, 4), (1, 1, 8, 16), (1000, 8, 64, 128), (3, 4, 2, 1)):
        # The worst routing: every expert has one row, and the rest fills whole tiles.
        worst, pairs = 0, tokens * top_k
        for used in range(1, min(pairs, experts) + 1):
            worst = max(worst, used + (pairs - used) // tile)
        assert m.max_num_padded_tokens(tokens, top_k, experts, tile) == worst * tile
    for shape in ((2, 4, 4), (3, 2, 8)):
        w = torch.randn(shape)
        assert m.interleave_for_tma_wgmma_up(w) is w
    assert m.alloc_scratchpad(torch.device("cpu")).numel() == 0


def test_what_experts_refuse():
    from test_arguments import MOE

    one_ = torch.ones(1)
    for kw in (dict(fc2_expert_biases=one_), dict(input_sf=one_), dict(swiglu_alpha=one_), dict(swiglu_beta=one_), dict(swiglu_limit=one_), dict(cluster_size=2), dict(enable_alltoall=True), dict(use_w4_group_scaling=True),
               dict(use_mxfp8_act_scaling=True), dict(min_latency_mode=True), dict(use_packed_weights=True), dict(use_wfp4afp8_humming=True), dict(situ_beta=one_), dict(situ_linear_beta=one_)):
        with pytest.raises(NotImplementedError, match=next(iter(kw))):
            fi.fused_moe.cutlass_fused_moe(**{**MOE(), **kw})
    args = MOE()
    assert torch.equal(fi.fused_moe.cutlass_fused_moe(**args), fi.fused_moe.cutlass_fused_moe(**args, ep_rank=1, cluster_rank=1))


@pytest.mark.cpu
@pytest.mark.parametrize("n,qk,vo,heads,kv_heads,ms", [(3, 64, 128, 4, 2, 2.0), (2, 192, 64, 6, 3, 0.5)])
def test_work_of_other_sizes(n, qk, vo, heads, kv_heads, ms):
    want = n * heads * 2 * 5 * 9 * (qk + vo)
    q, kv = torch.full((n,), 5), torch.full((n,), 9)
    assert testing.attention_flops(n, 5, 9, qk, vo, heads, False) == testing.attention_flops_with_actual_seq_lens(q, kv, qk, vo, heads, False) == want
    assert testing.attention_tflops_per_sec(n, 5, 9, qk, vo, heads, False, ms) == pytest.approx(want / ms / 1e9)
    assert testing.attention_tflops_per_sec_with_actual_seq_lens(q, kv, qk, vo, heads, False, ms) == pytest.approx(want / ms / 1e9)
    size = 2 * n * (5 * heads * (qk + vo) + 9 * kv_heads * (qk + vo))
    assert testing.attention_tb_per_sec(n, 5, 9, qk, vo, heads, kv_heads, ms) == pytest.approx(size / ms / 1e9)
    assert testing.attention_tb_per_sec_with_actual_seq_lens(q, kv, qk, vo, heads, kv_heads, ms) == pytest.approx(size / ms / 1e9)
    x = torch.randn(n * 100, 130)
    block, s = testing.per_block_cast_to_fp8(x)
    assert s.shape == (-(-len(x) // 128), 2)
    for seed in (n, n + 1):
        testing.set_seed(seed)
        first = torch.rand(1)
        torch.manual_seed(seed)
        assert torch.equal(first, torch.rand(1))


@pytest.mark.cpu
def test_timers_take_their_arguments(tmp_path):
    calls = []
    for kw in ({}, dict(cold_l2_cache=False), dict(l2_flush=False), dict(l2_flush=False, l2_flush_size_mb=1), dict(l2_flush=False, l2_flush_device="cuda:0")):
        assert len(testing.bench_gpu_time_with_cuda_event(lambda: calls.append(1), dry_run_iters=1, repeat_iters=2, **kw)) == 2
    assert len(testing.bench_gpu_time(lambda: None, dry_run_iters=1, repeat_iters=2, enable_cupti=True, num_iters_within_graph=3)) == 2
    on_device = [lambda fn, **kw: testing.bench_gpu_time_with_cudagraph(fn, dry_run_iters=1, repeat_iters=2, **kw), lambda fn, **kw: testing.bench_gpu_time_with_cupti(fn, dry_run_iters=1, repeat_iters=2, use_cuda_graph=True, **kw)]
    graph = (dict(), dict(num_iters_within_graph=3), dict(input_args=(1,)), dict(input_kwargs={"a": 1}))
    if not torch.cuda.is_available():
        for bench in on_device:
            for kw in graph:
                with pytest.raises(RuntimeError, match="needs a CUDA device"):
                    bench(lambda a=0: None, **kw)
        kineto = (dict(num_tests=2), dict(suppress_kineto_output=True), dict(trace_path="x"), dict(flush_l2=False), dict(with_multiple_kernels=True))
        for names in ("k", ("k", "l")):
            for kw in kineto:
                with pytest.raises(RuntimeError, match="needs a CUDA device"):
                    testing.bench_kineto(lambda: None, names, **kw)
        return
    x = torch.ones(1 << 16, device="cuda")
    for bench in on_device:
        for kw in graph:
            times = bench(lambda a=0: x.add_(1), **kw)
            assert len(times) == 2 and all(t > 0 for t in times)
    assert testing.bench_kineto(lambda: x.add_(1), "elementwise", num_tests=3, suppress_kineto_output=True, trace_path=str(tmp_path / "t.json"), flush_l2=False, with_multiple_kernels=True) > 0
    assert testing.get_l2_cache_size("cuda:0") == testing.get_l2_cache_size() > 0
    assert testing.calculate_rotation_count([x], "cuda:0", 3) >= 3


@pytest.mark.cpu
def test_questions_about_devices(device):
    from fir.flashinfer import utils

    for at in (None, "cpu", torch.device("cpu")):
        if not torch.cuda.is_available():
            assert not utils.is_sm90a_supported(at) and not utils.device_support_pdl(at)
    for kind in ("cpu", "meta"):
        with pytest.raises(ValueError, match="cuda device"):
            utils.get_compute_capability(torch.device(kind))
    if not torch.cuda.is_available():
        for at in (None, "cuda:0"):
            with pytest.raises((RuntimeError, AssertionError)):
                testing.get_l2_cache_size(at)
            with pytest.raises((RuntimeError, AssertionError)):
                testing.calculate_rotation_count([torch.empty(3)] if at else [], at, 3)
    for heads in (4, 6, 12):
        slopes = utils.get_alibi_slopes(heads, device="cpu")
        power = 2 ** math.floor(math.log2(heads))
        want = [2 ** (-8 / power * (i + 1)) for i in range(power)] + [2 ** (-4 / power * (2 * i + 1)) for i in range(heads - power)]
        torch.testing.assert_close(slopes, torch.tensor(want))
    assert [utils.next_positive_power_of_2(x) for x in (-3, 0, 1, 2, 3, 17, 64)] == [1, 1, 1, 2, 4, 32, 64]
    data, scale = torch.zeros(2, 4, dtype=U8), torch.zeros(2, 2, dtype=U8)
    for start, shape in ((0, None), (3, (2, 8))):
        tensor = utils.FP4Tensor(data[:, start:], scale[:, :2 - start % 2], start, shape)
        assert tensor.scale_start_index == start and tensor.original_shape == shape and tensor.dtype == "nvfp4"


def test_products_that_ignore_their_backend():
    for rows, backend in ((7, "auto"), (3, "sm90"), (2, "sm80")):
        x, w, out = torch.randn(rows, 32).to(BF16), torch.randn(16, 32).to(BF16), torch.zeros(rows, 16, dtype=BF16)
        fi.gemm.tinygemm_bf16(x, w, out)
        near(out, x.float() @ w.float().T, 5e-2)
        try:
            wrapper = fi.SegmentGEMMWrapper(torch.empty(rows), backend)
        except ValueError as refused:
            assert "backend" in str(refused)
            continue
        near(wrapper.run(x, w[None], 1, True, seg_indptr=i32(0, rows)), x.float() @ w.float().T, 5e-2)
    x, w = torch.randn(4, 32), torch.randn(2, 16, 32)
    for backend in ("auto", "cublas", "other"):
        got = fi.gemm.grouped_mm_bf16(x.to(BF16), w.to(BF16), i32(0, 1, 4), backend=backend)
        near(got, torch.cat((x[:1].to(BF16).float() @ w[0].to(BF16).float().T, x[1:].to(BF16).float() @ w[1].to(BF16).float().T)), 5e-2)
        q = fi.gemm.grouped_mm_fp8(x.to(E4M3), w.to(E4M3), i32(0, 1, 4), backend=backend)
        near(q, torch.cat((x[:1].to(E4M3).float() @ w[0].to(E4M3).float().T, x[1:].to(E4M3).float() @ w[1].to(E4M3).float().T)), 0.2)
    for backend in ("cuda", "triton"):
        assert fi.quantization.per_token_group_quant_8bit(torch.randn(2, 128), 64, backend=backend)[1].shape == (2, 2)
    args = (torch.randn(3, 2, 16), torch.randn(3, 16), None, None, torch.randn(9, 16), i32(1, 2, 3))
    want = fi.rope.rope_quantize_fp8(*args)[0]
    assert torch.equal(fi.rope.rope_quantize_fp8(*args, backend="cute-dsl")[0].view(U8), want.view(U8))


def test_definitions_go_where_they_are_told(tmp_path):
    from fir.flashinfer.fi_trace import fi_trace

    fi_trace(fi.rmsnorm, save_dir=str(tmp_path / "one"), input=torch.randn(2, 64), weight=torch.randn(64))
    assert list((tmp_path / "one").rglob("*.json"))


CUDNN = [{}, dict(causal=True), dict(return_lse=True), dict(lse=True), dict(q_scale=0.5), dict(k_scale=0.5), dict(v_scale=2.0), dict(units="tokens"), dict(units="tokens", lens=False), dict(out=True), dict(o_data_type=F32),
         dict(heads=8, dtype=F16, scale=0.1), dict(ignored=True)]


@pytest.mark.parametrize("paged", (False, True))
@pytest.mark.parametrize("change", CUDNN)
def test_calls_by_cudnns_names(change, paged):
    heads, dtype, scale = change.get("heads", HEADS), change.get("dtype", BF16), change.get("scale", 0.2)
    lens, qo = [9, 20, 0, 7], [0, 3, 5, 5, 6]
    pages = Pages(lens, 4, KV_HEADS, DIM, dtype, "HND")
    ends = [0, *torch.tensor(lens).cumsum(0).tolist()]
    k, v = torch.randn(36, KV_HEADS, DIM).to(dtype), torch.randn(36, KV_HEADS, 32).to(dtype)
    q = torch.randn(6, heads, DIM).to(dtype)
    vo = DIM if paged else 32
    tokens = change.get("units") == "tokens"
    width = (lambda n, d: 1) if tokens else (lambda n, d: n * d)
    kwargs = dict(max_token_per_sequence=3, max_sequence_kv=20, causal=change.get("causal", False), return_lse=change.get("return_lse", "lse" in change),
                  batch_offsets_q=i32(*(n * width(heads, DIM) for n in qo)), batch_offsets_o=i32(*(n * width(heads, vo) for n in qo)))
    if tokens:
        kwargs["batch_offsets_units"] = "tokens"
    if change.get("lens", True):
        kwargs |= dict(actual_seq_lens_q=i32(3, 2, 0, 1).view(4, 1, 1, 1), actual_seq_lens_kv=i32(*lens).view(4, 1, 1, 1))
    if paged:
        kwargs |= dict(block_tables=padded(pages), actual_seq_lens_kv=pages.lens)
    else:
        kwargs |= dict(batch_offsets_k=i32(*(n * width(KV_HEADS, DIM) for n in ends)), batch_offsets_v=i32(*(n * width(KV_HEADS, 32) for n in ends)))
    for name in ("q_scale", "k_scale", "v_scale"):
        if name in change:
            kwargs[name] = torch.tensor(change[name]).view(1, 1, 1, 1)
    if "o_data_type" in change:
        kwargs["o_data_type"] = change["o_data_type"]
    if change.get("out"):
        kwargs["out"] = torch.full((6, heads, vo), math.nan, dtype=dtype)
    if change.get("lse"):
        kwargs["lse"] = torch.full((4, 3, heads), 9.0)
    if change.get("ignored"):
        kwargs |= dict(max_sequence_kv=999, batch_offsets_stats=i32(0), is_cuda_graph_compatible=True, backend="cudnn")
    got, lse = fi.prefill.cudnn_batch_prefill_with_kv_cache(q, *(pages.cache if paged else (k, v)), scale, torch.empty(heads), **kwargs)
    keys = pages.request if paged else lambda r: (k[ends[r]:ends[r + 1]], v[ends[r]:ends[r + 1]])
    flags = {n: change[n] for n in ("q_scale", "k_scale", "v_scale") if n in change}
    want, want_lse = batch(q, qo, keys, causal=kwargs["causal"], sm_scale=scale, **flags)
    near(got, want)
    assert got.dtype == change.get("o_data_type", dtype) and (lse is not None) == kwargs["return_lse"] and (not change.get("out") or got is kwargs["out"])
    if lse is not None:
        for r in range(4):
            near(lse[r, : qo[r + 1] - qo[r]], want_lse[qo[r]:qo[r + 1]] * math.log(2), 1e-2)
    if change.get("lse"):
        assert lse is kwargs["lse"] and (lse[2] == 9.0).all()


def test_decodes_by_cudnns_names():
    for heads, scale in ((4, 0.2), (8, 0.1)):
        pages = Pages([9, 20], heads, KV_HEADS, DIM, BF16, "HND")
        q, out = torch.randn(2, heads, DIM).to(BF16), torch.full((2, heads, DIM), math.nan, dtype=BF16)
        want = batch(q, [0, 1, 2], pages.request, sm_scale=scale)[0]
        call = functools.partial(fi.decode.cudnn_batch_decode_with_kv_cache, q, *pages.cache, scale, torch.empty(heads), max_sequence_kv=20 + heads, actual_seq_lens_kv=pages.lens, block_tables=padded(pages))
        near(call(), want)
        near(call(out=out, is_cuda_graph_compatible=True, batch_offsets_q=i32(0, heads * DIM, 2 * heads * DIM), batch_offsets_o=i32(0, heads * DIM, 2 * heads * DIM)), want)
        near(out, want)
    k = torch.randn(29, KV_HEADS, DIM).to(BF16)
    offsets = i32(0, 9 * KV_HEADS * DIM, 29 * KV_HEADS * DIM)
    got = fi.decode.cudnn_batch_decode_with_kv_cache(q, k, k, 0.1, torch.empty(1), max_sequence_kv=20, actual_seq_lens_kv=i32(9, 20), batch_offsets_k=offsets, batch_offsets_v=offsets)
    near(got, batch(q, [0, 1, 2], lambda r: (k[:9], k[:9]) if r == 0 else (k[9:], k[9:]), sm_scale=0.1)[0])
    for kw, error in ((dict(actual_seq_lens_kv=i32(9, 20), batch_offsets_k=offsets + KV_HEADS * DIM), NotImplementedError), (dict(block_tables=i32(0)), ValueError), ({}, ValueError)):
        with pytest.raises(error, match="batch_offsets_k|actual_seq_lens_kv"):
            fi.decode.cudnn_batch_decode_with_kv_cache(q, k, k, 0.1, torch.empty(1), max_sequence_kv=20, **kw)
    with pytest.raises(ValueError, match="batch_offsets_units"):
        fi.prefill.cudnn_batch_prefill_with_kv_cache(q, k, k, 0.1, torch.empty(1), max_token_per_sequence=1, max_sequence_kv=9, causal=False, return_lse=False, batch_offsets_units="bytes")
    import importlib

    fi.install()
    assert importlib.import_module("flashinfer.cudnn").cudnn_batch_prefill_with_kv_cache is fi.prefill.cudnn_batch_prefill_with_kv_cache
