"""Attention through FlashInfer's API against the reference, request by request."""

import math

import pytest
import torch
from conftest import Pages, attention, close, visible

import fir.flashinfer as fi

HALF = (torch.float16, torch.bfloat16)


@pytest.mark.parametrize("dtype", (torch.float32, *HALF))
@pytest.mark.parametrize("layout", ("NHD", "HND"))
@pytest.mark.parametrize("kv_len", (1, 33, 200))
def test_single_decode(dtype, layout, kv_len):
    q, k, v = torch.randn(8, 64).to(dtype), torch.randn(kv_len, 2, 64).to(dtype), torch.randn(kv_len, 2, 64).to(dtype)
    give = (k, v) if layout == "NHD" else (k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous())
    out, lse = fi.single_decode_with_kv_cache(q, *give, kv_layout=layout, return_lse=True)
    want, want_lse = attention(q[None], k, v)
    close(out, want[0])
    close(lse, want_lse[0])


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("window", (-1, 0, 5))
@pytest.mark.parametrize("cap", (None, 8.0))
@pytest.mark.parametrize("n,m", ((1, 1), (7, 7), (5, 40), (9, 4)))
def test_single_prefill(causal, window, cap, n, m):
    q, k, v = torch.randn(n, 4, 32), torch.randn(m, 2, 32), torch.randn(m, 2, 48)
    out, lse = fi.single_prefill_with_kv_cache(
        q, k, v, causal=causal, window_left=window, logits_soft_cap=cap, sm_scale=0.3, return_lse=True
    )
    want, want_lse = attention(q, k, v, 0.3, visible(n, m, causal, window), cap or 0.0)
    close(out, want)
    close(lse, want_lse)


@pytest.mark.parametrize("packed", (False, True))
def test_single_prefill_with_a_mask_of_ones_own(packed):
    q, k, v = torch.randn(6, 4, 32), torch.randn(11, 2, 32), torch.randn(11, 2, 32)
    mask = torch.rand(6, 11) < 0.5
    given = {"custom_mask": mask}
    if packed:
        given = {"packed_custom_mask": fi.packbits(mask.reshape(-1), "little")}
    out, lse = fi.single_prefill_with_kv_cache(q, k, v, return_lse=True, **given)
    want, want_lse = attention(q, k, v, mask=mask)
    close(out, want)
    close(lse, want_lse)


def test_alibi_and_rope():
    q, k, v = torch.randn(5, 6, 32), torch.randn(20, 2, 32), torch.randn(20, 2, 32)
    slopes = fi.utils.get_alibi_slopes(6)
    bias = slopes[:, None, None] * (torch.arange(20)[None, None] - torch.arange(5)[None, :, None])
    out, lse = fi.single_prefill_with_kv_cache(q, k, v, pos_encoding_mode="ALIBI", return_lse=True)
    want, want_lse = attention(q, k, v, bias=bias)
    close(out, want)
    close(lse, want_lse)

    def turned(x, start):
        half, pos = x.shape[-1] // 2, torch.arange(start, start + x.shape[0]).float() / 2.0
        angle = pos[:, None] * 500.0 ** (-torch.arange(half).float() / half)
        c, s = angle.cos()[:, None], angle.sin()[:, None]
        return torch.cat([x[..., :half] * c - x[..., half:] * s, x[..., half:] * c + x[..., :half] * s], -1)

    out = fi.single_prefill_with_kv_cache(
        q, k, v, causal=True, pos_encoding_mode="ROPE_LLAMA", rope_scale=2.0, rope_theta=500.0
    )
    close(out, attention(turned(q, 15), turned(k, 0), v, mask=visible(5, 20, True))[0])


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("layout", ("NHD", "HND"))
@pytest.mark.parametrize("one", (False, True))
@pytest.mark.parametrize("page", (1, 5, 16))
def test_batch_decode(dtype, layout, one, page):
    lens = [1, page, page + 1, 70, 0, 3 * page]
    pages = Pages(lens, page, 2, 64, dtype, layout, one)
    q = torch.randn(len(lens), 8, 64).to(dtype)
    wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1), layout)
    wrapper.plan(pages.indptr, pages.indices, pages.last, 8, 2, 64, page, q_data_type=dtype)
    out, lse = wrapper.run(q, pages.cache, return_lse=True)
    given = torch.full_like(out, math.nan)
    assert wrapper.run(q, pages.cache, out=given) is given and torch.equal(given, out)
    for r in range(len(lens)):
        want, want_lse = attention(q[r : r + 1], *pages.request(r))
        close(out[r], want[0])
        close(lse[r], want_lse[0])


@pytest.mark.parametrize("flags", (
    {}, {"window_left": 3}, {"logits_soft_cap": 5.0}, {"sm_scale": 0.5}, {"fixed_split_size": 2},
    {"disable_split_kv": True},
))
def test_batch_decode_flags_and_scales(flags):
    pages = Pages([9, 200, 1], 4, 1, 32, torch.float32)
    q = torch.randn(3, 4, 32)
    wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1))
    wrapper.plan(pages.indptr, pages.indices, pages.last, 4, 1, 32, 4, q_data_type="float32", **flags)
    out = wrapper.run(q, pages.cache, q_scale=0.7, k_scale=1.3, v_scale=2.0)
    for r, n in enumerate(pages.lens.tolist()):
        k, v = pages.request(r)
        scale = flags.get("sm_scale", 1 / math.sqrt(32)) * 0.7 * 1.3
        mask = visible(1, n, window=flags.get("window_left", -1))
        close(out[r], attention(q[r : r + 1], k, v * 2, scale, mask, flags.get("logits_soft_cap", 0.0))[0][0])


def test_decode_replans_in_the_same_wrapper_and_by_deprecated_names():
    wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1))
    # Page ids on a device, then on the host, whose copies take the memory of the batch before the last.
    batches = [[3], [700, 2, 90], [1, 1]]
    for lens, host in [(lens, False) for lens in batches] + [(lens, True) for lens in batches * 2]:
        pages = Pages(lens, 8, 2, 32, torch.float32)
        q = torch.randn(len(lens), 4, 32)
        indices = pages.indices.cpu() if host else pages.indices
        wrapper.begin_forward(pages.indptr, indices, pages.last, 4, 2, 32, 8, data_type="float32")
        out, lse = wrapper.forward_return_lse(q, pages.cache, window_left=6, logits_soft_cap=3.0)
        for r, n in enumerate(lens):
            want, want_lse = attention(q[r : r + 1], *pages.request(r), None, visible(1, n, window=6), 3.0)
            close(out[r], want[0])
            close(lse[r], want_lse[0])
        wrapper.end_forward()


def test_fp8_cache():
    pages = Pages([40, 7], 8, 2, 64, torch.float8_e4m3fn)
    q = torch.randn(2, 4, 64, dtype=torch.bfloat16)
    wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1))
    wrapper.plan(pages.indptr, pages.indices, pages.last, 4, 2, 64, 8, q_data_type=torch.bfloat16,
                 kv_data_type=torch.float8_e4m3fn)
    out = wrapper.run(q, pages.cache, k_scale=0.5, v_scale=3.0)
    for r in range(2):
        k, v = pages.request(r)
        torch.testing.assert_close(
            out[r].float(), attention(q[r : r + 1], k.float() * 0.5, v.float() * 3)[0][0], atol=6e-2, rtol=3e-2
        )


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("layout,one", (("NHD", True), ("HND", False)))
@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("page", (1, 7, 16))
def test_batch_prefill_paged(dtype, layout, one, causal, page):
    q_lens, kv_lens = [3, 1, 0, 17], [3, 50, 4, 40]
    pages = Pages(kv_lens, page, 2, 64, dtype, layout, one)
    qo = torch.tensor([0, *torch.tensor(q_lens).cumsum(0).tolist()], dtype=torch.int32)
    q = torch.randn(sum(q_lens), 4, 64).to(dtype)
    wrapper = fi.BatchPrefillWithPagedKVCacheWrapper(torch.empty(1), layout)
    wrapper.plan(qo, pages.indptr, pages.indices, pages.last, 4, 2, 64, page, causal=causal, q_data_type=dtype)
    out, lse = wrapper.run(q, pages.cache, return_lse=True)
    for r, (n, m) in enumerate(zip(q_lens, kv_lens)):
        rows = slice(int(qo[r]), int(qo[r + 1]))
        want, want_lse = attention(q[rows], *pages.request(r), mask=visible(n, m, causal))
        close(out[rows], want)
        close(lse[rows], want_lse)


@pytest.mark.parametrize("paged", (False, True))
def test_batch_prefill_custom_mask(paged):
    q_lens, kv_lens = [3, 5], [11, 9]
    qo, kv = torch.tensor([0, 3, 8], dtype=torch.int32), torch.tensor([0, 11, 20], dtype=torch.int32)
    masks = [torch.rand(n, m) < 0.6 for n, m in zip(q_lens, kv_lens)]
    flat = torch.cat([m.reshape(-1) for m in masks])
    q = torch.randn(8, 2, 32)
    if paged:
        pages = Pages(kv_lens, 4, 1, 32, torch.float32)
        wrapper = fi.BatchPrefillWithPagedKVCacheWrapper(torch.empty(1))
        wrapper.plan(qo, pages.indptr, pages.indices, pages.last, 2, 1, 32, 4, custom_mask=flat, causal=True,
                     q_data_type="float32")
        out = wrapper.run(q, pages.cache)
        parts = [pages.request(r) for r in (0, 1)]
    else:
        k, v = torch.randn(20, 1, 32), torch.randn(20, 1, 32)
        wrapper = fi.BatchPrefillWithRaggedKVCacheWrapper(torch.empty(1))
        wrapper.plan(qo, kv, 2, 1, 32, custom_mask=flat, q_data_type="float32")
        out = wrapper.run(q, k, v)
        parts = [(k[:11], v[:11]), (k[11:], v[11:])]
    for r in (0, 1):
        close(out[qo[r] : qo[r + 1]], attention(q[qo[r] : qo[r + 1]], *parts[r], mask=masks[r])[0])


def test_ragged_prefill_with_two_head_dims_and_scales():
    qo, kv = torch.tensor([0, 4, 10], dtype=torch.int32), torch.tensor([0, 9, 30], dtype=torch.int32)
    q, k, v = torch.randn(10, 4, 192), torch.randn(30, 4, 192), torch.randn(30, 4, 128)
    wrapper = fi.BatchPrefillWithRaggedKVCacheWrapper(torch.empty(1))
    wrapper.plan(qo, kv, 4, 4, 192, 128, causal=True, q_data_type="float32")
    out, lse = wrapper.run_return_lse(q, k, v, q_scale=2.0, k_scale=0.5, v_scale=3.0)
    for r, (n, m) in enumerate(((4, 9), (6, 21))):
        rows, keys = slice(int(qo[r]), int(qo[r + 1])), slice(int(kv[r]), int(kv[r + 1]))
        want, want_lse = attention(q[rows], k[keys], v[keys] * 3, mask=visible(n, m, True))
        close(out[rows], want)
        close(lse[rows], want_lse)


def test_batch_attention_and_sinks(device):
    kv_lens = [20, 5]
    pages = Pages(kv_lens, 4, 2, 32, torch.float32)
    qo, q = torch.tensor([0, 3, 5], dtype=torch.int32), torch.randn(5, 4, 32)
    plain = fi.BatchAttention(device=device)
    plain.plan(qo, pages.indptr, pages.indices, pages.lens, 4, 2, 32, 32, 4, causal=True, q_data_type=torch.float32,
               kv_data_type=torch.float32)
    out, lse = plain.run(q, pages.cache)
    sink = torch.randn(4)
    sunk = fi.BatchAttentionWithAttentionSinkWrapper(torch.empty(1), window_left=6)
    sunk.plan(qo, pages.indptr, pages.indices, pages.last, 4, 2, 32, 4, causal=True, q_data_type="float32")
    with_sink = sunk.run(q, pages.cache, sink, 0.4)
    for r, (n, m) in enumerate(((3, 20), (2, 5))):
        rows = slice(int(qo[r]), int(qo[r + 1]))
        want, want_lse = attention(q[rows], *pages.request(r), mask=visible(n, m, True))
        close(out[rows], want)
        close(lse[rows], want_lse)
        want, _ = attention(q[rows], *pages.request(r), 0.4, visible(n, m, True, 6), sink=sink)
        close(with_sink[rows], want)


@pytest.mark.parametrize("shared", (24, 21))
def test_cascade_is_attention_over_the_whole(shared):
    own, page = [5, 9], 8
    pages = Pages([shared, *own], page, 2, 32, torch.float32)
    ptr, q = pages.indptr.tolist(), torch.randn(4, 4, 32)
    levels = [
        (torch.tensor([0, 4]), torch.tensor([0, ptr[1]]), pages.indices[: ptr[1]], pages.last[:1]),
        (torch.tensor([0, 1, 4]), torch.tensor([0, ptr[2] - ptr[1], ptr[3] - ptr[1]]), pages.indices[ptr[1] :],
         pages.last[1:]),
    ]
    wrapper = fi.MultiLevelCascadeAttentionWrapper(2, torch.empty(1))
    wrapper.plan(*([l[i].int() for l in levels] for i in range(4)), 4, 2, 32, page, causal=True, q_data_type="float32")
    # Two requests win nothing by it; but a prefix that ends within a page cannot be read in any other way.
    assert wrapper._plan.is_flat == (shared % page == 0)
    out = wrapper.run(q, pages.cache)
    k0, v0 = pages.request(0)
    for r, rows in ((1, slice(0, 1)), (2, slice(1, 4))):
        k, v = pages.request(r)
        n = rows.stop - rows.start
        mask = visible(n, shared + own[r - 1], True)
        close(out[rows], attention(q[rows], torch.cat([k0, k]), torch.cat([v0, v]), mask=mask)[0])


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_merging(dtype):
    q, k, v = torch.randn(3, 2, 32), torch.randn(30, 2, 32), torch.randn(30, 2, 32)
    parts = [attention(q, k[s], v[s]) for s in (slice(0, 4), slice(4, 20), slice(20, 30))]
    want, want_lse = attention(q, k, v)
    o = torch.stack([p[0] for p in parts], 1).to(dtype)
    s = torch.stack([p[1] for p in parts], 1)
    got, lse = fi.merge_states(o, s)
    close(got, want, dtype)
    close(lse, want_lse)
    a, a_lse = fi.merge_state(o[:, 0], s[:, 0], o[:, 1], s[:, 1])
    before = a.clone()
    fi.merge_state_in_place(a, a_lse, o[:, 2], s[:, 2], torch.tensor([True, False, True]))
    close(a[::2], want[::2], dtype)
    assert torch.equal(a[1], before[1])


@pytest.mark.parametrize("causal", (False, True))
def test_mla(causal):
    lens, page, heads = [20, 3], 4, 6
    pages = Pages(lens, page, 1, 576, torch.float32, spare=1)
    cache = pages.kv[:, 0, :, 0]
    qo, q = torch.tensor([0, 2, 3], dtype=torch.int32), torch.randn(3, heads, 576)
    wrapper = fi.mla.BatchMLAPagedAttentionWrapper(torch.empty(1))
    wrapper.plan(qo, pages.indptr, pages.indices, pages.lens, heads, 512, 64, page, causal, 0.1, torch.float32,
                 torch.float32)
    out, lse = wrapper.run(q[..., :512], q[..., 512:], cache[..., :512], cache[..., 512:], return_lse=True)
    for r, n in ((0, 2), (1, 1)):
        rows, k = slice(int(qo[r]), int(qo[r + 1])), pages.request(r)[0]
        want, want_lse = attention(q[rows], k, k[..., :512], 0.1, visible(n, lens[r], causal))
        close(out[rows], want)
        close(lse[rows], want_lse)


@pytest.mark.parametrize("inner", (False, True))
def test_block_sparse(inner):
    rows, cols, R, C = 12, 24, 4, 6
    blocks = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]], dtype=torch.bool)
    indptr = torch.tensor([0, *blocks.sum(1).cumsum(0).tolist()], dtype=torch.int32)
    indices = blocks.nonzero()[:, 1].int()
    within = torch.rand(len(indices), R, C) < 0.7 if inner else torch.ones(len(indices), R, C, dtype=torch.bool)
    mask = torch.zeros(rows, cols, dtype=torch.bool)
    for i, (r, c) in enumerate(blocks.nonzero().tolist()):
        mask[r * R : (r + 1) * R, c * C : (c + 1) * C] = within[i]
    q, k, v = torch.randn(rows, 4, 32), torch.randn(cols, 2, 32), torch.randn(cols, 2, 32)
    wrapper = fi.BlockSparseAttentionWrapper(torch.empty(1))
    wrapper.plan(indptr, indices, rows, cols, R, C, 4, 2, 32, mask=within if inner else None, q_data_type="float32")
    out, lse = wrapper.run(q, k, v, return_lse=True)
    want, want_lse = attention(q, k, v, mask=mask)
    close(out, want)
    close(lse, want_lse)


def test_variable_block_sparse():
    sizes_r, sizes_c = torch.tensor([[3, 5], [4, 4]], dtype=torch.int32), torch.tensor([[2, 7], [6, 3]], dtype=torch.int32)
    blocks = torch.tensor([[[1, 0], [1, 1]], [[0, 1], [1, 0]]], dtype=torch.bool)
    q, k, v = torch.randn(4, 8, 32), torch.randn(2, 9, 32), torch.randn(2, 9, 32)
    wrapper = fi.VariableBlockSparseAttentionWrapper(torch.empty(1))
    wrapper.plan(blocks, sizes_r, sizes_c, 4, 2, 32, q_data_type="float32")
    out = wrapper.run(q, k, v)
    for h in range(2):
        mask = blocks[h].repeat_interleave(sizes_r[h].long(), 0).repeat_interleave(sizes_c[h].long(), 1)
        want, _ = attention(q[2 * h : 2 * h + 2].transpose(0, 1), k[h][:, None], v[h][:, None], mask=mask)
        close(out[2 * h : 2 * h + 2].transpose(0, 1), want)


def test_pod_is_its_two_parts():
    pages = Pages([9, 30], 8, 2, 32, torch.float32)
    qp, kp, vp, qd = torch.randn(5, 4, 32), torch.randn(12, 2, 32), torch.randn(12, 2, 32), torch.randn(2, 4, 32)
    wrapper = fi.PODWithPagedKVCacheWrapper(torch.empty(1))
    wrapper.plan(pages.indptr, pages.indices, pages.last, 4, 2, 32, 8, q_data_type="float32")
    first, second = wrapper.run(qp, kp, vp, qd, pages.cache, causal_p=True)
    close(first, attention(qp, kp, vp, mask=visible(5, 12, True))[0])
    for r in (0, 1):
        close(second[r], attention(qd[r : r + 1], *pages.request(r))[0][0])


@pytest.mark.parametrize("layout", ("NHD", "HND"))
def test_padded_tables_of_the_xqa_names(layout):
    lens, page = [5, 17], 8
    pages = Pages(lens, page, 2, 32, torch.bfloat16, layout, True)
    tables = torch.full((2, 3), 2**30, dtype=torch.int32)
    for r in (0, 1):
        ids = pages.indices[pages.indptr[r] : pages.indptr[r + 1]]
        tables[r, : len(ids)] = ids
    q, sinks = torch.randn(2, 4, 32, dtype=torch.bfloat16), torch.randn(4)
    out = fi.trtllm_batch_decode_with_kv_cache(
        q, pages.cache, torch.empty(1), tables, pages.lens, 17, 0.2, 1.5, window_left=9, sinks=[sinks], kv_layout=layout
    )
    for r in (0, 1):
        k, v = pages.request(r)
        want = attention(q[r : r + 1], k, v.float() * 1.5, 0.2, visible(1, lens[r], window=9), sink=sinks)[0][0]
        close(out[r], want)
