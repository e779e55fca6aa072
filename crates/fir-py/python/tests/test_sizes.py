"""Attention by wrappers and calls of sizes, types and flags that the other files leave at one value; what is ignored, and
what is refused."""

import functools
import math

import pytest
import torch
from conftest import Pages, attention
from test_wrappers import DIM, HEADS, KV_HEADS, LENS, PAGE, QO, batch, i32, near, one, padded

import fir.flashinfer as fi
from fir.flashinfer import jit

BF16, F16, F32, I32, I64 = torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.int64
E4M3, U8 = torch.float8_e4m3fn, torch.uint8


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
    wrapper.reset_workspace_buffer(torch.empty(heads), [torch.empty(dim)])
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
    both = lambda **kw: fi.prefill.trtllm_fmha_v2_prefill((q, k, v), "SEPARATE_Q_K_V", torch.empty(heads), lens, 7 + heads, 30 + heads, scale, 1.0, heads, i32(*qo), i32(*kv), **kw)
    near(both(skip_softmax_threshold_scale_factor=0.5), want)
    for kw in (dict(pos_encoding_mode="ALIBI"), dict(chunked_attention_size=64), dict(mask_mode="odd")):
        with pytest.raises(NotImplementedError, match=next(iter(kw))):
            both(**kw)


@pytest.mark.parametrize("heads,ckv,kpe,page,dtype", [(8, 512, 64, 4, BF16), (4, 128, 32, 16, F16)])
def test_older_latent_calls_of_other_sizes(heads, ckv, kpe, page, dtype):
    pages = Pages([5, 33], page, 1, ckv + kpe, dtype)
    latent, q = pages.kv[:, 0, :, 0], torch.randn(2, heads, ckv + kpe).to(dtype)
    keys = lambda r: (pages.request(r)[0], pages.request(r)[0][..., :ckv])
    buffers = dict(paged_kv_indptr_buffer=torch.zeros_like(pages.indptr), paged_kv_indices_buffer=torch.zeros_like(pages.indices),
                   paged_kv_last_page_len_buffer=torch.zeros_like(pages.last))
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
    call = (q[:, None], latent, torch.empty(heads), 100 + heads, ckv, kpe, padded(pages), pages.lens, 40 + heads)
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
