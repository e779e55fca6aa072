"""Rows, pages, rotations, bits and products against the reference."""

import math

import pytest
import torch
from conftest import Pages, close

import fir.flashinfer as fi

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def rms(x, w, eps, plus=0.0):
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (w.float() + plus)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("hidden", (8, 111, 1024))
@pytest.mark.parametrize("eps", (1e-6, 0.1))
def test_norms(dtype, hidden, eps):
    x, w = torch.randn(5, hidden).to(dtype), torch.randn(hidden).to(dtype)
    close(fi.rmsnorm(x, w, eps), rms(x, w, eps), dtype)
    close(fi.gemma_rmsnorm(x, w, eps), rms(x, w, eps, 1.0), dtype)
    out = torch.empty_like(x)
    assert fi.rmsnorm(x, w, eps, out=out) is out
    for norm, plus in ((fi.fused_add_rmsnorm, 0.0), (fi.gemma_fused_add_rmsnorm, 1.0)):
        a, r = x.clone(), torch.randn(5, hidden).to(dtype)
        total = a.float() + r.float()
        norm(a, r, w, eps)
        close(r, total, dtype)
        close(a, rms(total, w, eps, plus), dtype)


def test_norms_of_heads_and_in_place():
    x, w = torch.randn(4, 6, 32), torch.randn(32)
    wide = torch.randn(4, 9, 64)[:, 1:7, :32]
    close(fi.rmsnorm(x, w), rms(x, w, 1e-6))
    close(fi.rmsnorm(wide, w), rms(wide, w, 1e-6))
    same, want = x[:, 0].clone(), rms(x[:, 0], w, 1e-6)
    fi.rmsnorm(same, w, out=same)
    close(same, want)


def test_layernorm_and_quantized_norms():
    x, g, b = torch.randn(3, 64, dtype=torch.bfloat16), torch.randn(64), torch.randn(64)
    close(fi.layernorm(x, g, b), torch.nn.functional.layer_norm(x.float(), (64,), g, b, 1e-6))
    w = torch.randn(64, dtype=torch.bfloat16)
    out, scale = torch.empty(3, 64, dtype=torch.float8_e4m3fn), torch.tensor([0.5])
    fi.rmsnorm_quant(out, x, w, scale)
    want = (rms(x, w, 1e-6) / 0.5).to(torch.float8_e4m3fn)
    assert (out.float() - want.float()).abs().max() <= want.float().abs().max() * 2**-3
    r, out2 = torch.randn(3, 64, dtype=torch.bfloat16), torch.empty_like(out)
    total = x.float() + r.float()
    fi.fused_add_rmsnorm_quant(out2, x, r, w, 0.5)
    close(r, total)
    torch.testing.assert_close(out2.float(), (rms(total, w, 1e-6) / 0.5).to(torch.float8_e4m3fn).float(), atol=0.1,
                               rtol=0.13)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", ((3, 64), (2, 5, 32)))
def test_activations(dtype, shape):
    x = torch.randn(*shape).to(dtype)
    a, b = x.float().chunk(2, -1)
    f = torch.nn.functional
    close(fi.silu_and_mul(x), f.silu(a) * b, dtype)
    close(fi.gelu_and_mul(x), f.gelu(a) * b, dtype)
    close(fi.gelu_tanh_and_mul(x), f.gelu(a, approximate="tanh") * b, dtype)


def turned(x, pos, dim, interleave, freq):
    """Rotates the first `dim` elements of [tokens, heads, d] by pos * freq."""
    angle = pos.double()[:, None] * freq.double()
    c, s = angle.cos()[:, None].float(), angle.sin()[:, None].float()
    x = x.float().clone()
    a, b = (x[..., 0:dim:2], x[..., 1:dim:2]) if interleave else (x[..., : dim // 2], x[..., dim // 2 : dim])
    a, b = a.clone(), b.clone()
    if interleave:
        x[..., 0:dim:2], x[..., 1:dim:2] = a * c - b * s, b * c + a * s
    else:
        x[..., : dim // 2], x[..., dim // 2 : dim] = a * c - b * s, b * c + a * s
    return x


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("interleave", (False, True))
@pytest.mark.parametrize("dim", (None, 16))
@pytest.mark.parametrize("llama31", (False, True))
def test_rope(dtype, interleave, dim, llama31):
    q, k = torch.randn(7, 4, 32).to(dtype), torch.randn(7, 2, 32).to(dtype)
    indptr, offsets = torch.tensor([0, 3, 7], dtype=torch.int32), torch.tensor([10, 5000], dtype=torch.int32)
    pos = torch.tensor([10, 11, 12, 5000, 5001, 5002, 5003])
    d = dim or 32
    freq = 1e4 ** (-torch.arange(0, d, 2).double() / d)
    scale = 4.0
    if llama31:
        smooth = ((8192 * freq / (2 * math.pi) - 1) / (4 - 1)).clamp(0, 1)
        freq = (1 - smooth) * freq / scale + smooth * freq
        by_ids, by_ptr = fi.apply_llama31_rope_pos_ids, fi.apply_llama31_rope
        in_place = fi.apply_llama31_rope_pos_ids_inplace
    else:
        freq = freq / scale
        by_ids, by_ptr, in_place = fi.apply_rope_pos_ids, fi.apply_rope, fi.apply_rope_pos_ids_inplace
    options = dict(rotary_dim=dim, interleave=interleave, rope_scale=scale, rope_theta=1e4)
    want = turned(q, pos, d, interleave, freq), turned(k, pos, d, interleave, freq)
    for ids in (pos, pos.int()):
        for got, w in zip(by_ids(q, k, ids, **options), want):
            close(got, w, dtype)
    for got, w in zip(by_ptr(q, k, indptr, offsets, **options), want):
        close(got, w, dtype)
    in_place(q, k, pos, **options)
    close(q, want[0], dtype)
    close(k, want[1], dtype)


@pytest.mark.parametrize("neox", (False, True))
def test_rope_with_a_table(neox):
    q, k, pos = torch.randn(5, 4 * 32), torch.randn(5, 2 * 32), torch.tensor([0, 3, 7, 7, 1])
    freq = 1e4 ** (-torch.arange(0, 16, 2).float() / 16)
    angle = torch.arange(8)[:, None] * freq
    cache = torch.cat([angle.cos(), angle.sin()], -1)
    want = [turned(x.view(5, -1, 32), pos, 16, not neox, freq).view(5, -1) for x in (q, k)]
    for got, w in zip(fi.apply_rope_with_cos_sin_cache(pos, q, k, 32, cache, neox), want):
        close(got, w)
    fi.apply_rope_with_cos_sin_cache_inplace(pos, q, k, 32, cache, neox)
    close(q, want[0])
    past = torch.full((5,), 8)
    if past.is_cuda:  # Nobody on the host sees a device's positions: those past the table give NaN.
        got, _ = fi.apply_rope_with_cos_sin_cache(past, q, k, 32, cache, neox)
        assert got.view(5, -1, 32)[..., :16].isnan().all()
    else:
        with pytest.raises(ValueError, match="8"):
            fi.apply_rope_with_cos_sin_cache(past, q, k, 32, cache, neox)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("layout", ("NHD", "HND"))
@pytest.mark.parametrize("one", (False, True))
@pytest.mark.parametrize("page", (1, 4))
def test_append(dtype, layout, one, page):
    lens, new = [6, 1, 9], [2, 1, 5]
    pages = Pages(lens, page, 2, 16, dtype, layout, one)
    ptr = torch.tensor([0, 2, 3, 8], dtype=torch.int32)
    seq = fi.get_seq_lens(pages.indptr, pages.last, page)
    assert seq.tolist() == lens
    batch, pos = fi.get_batch_indices_positions(ptr, seq, 8)
    assert batch.tolist() == [0, 0, 1, 2, 2, 2, 2, 2] and pos.tolist() == [4, 5, 0, 4, 5, 6, 7, 8]
    k, v = torch.randn(8, 2, 16).to(dtype), torch.randn(8, 2, 16).to(dtype)
    before = [pages.request(r) for r in range(3)]
    fi.append_paged_kv_cache(k, v, batch, pos, pages.cache, pages.indices, pages.indptr, pages.last, layout)
    if not one:
        pages.kv = torch.stack(pages.cache, 1)
    for r, n in enumerate(new):
        for got, old, added in zip(pages.request(r), before[r], (k, v)):
            assert torch.equal(got, torch.cat([old[: lens[r] - n], added[ptr[r] : ptr[r + 1]]]))


def test_append_mla_and_more_rows_than_tokens():
    pages = Pages([5, 2], 4, 1, 24, torch.bfloat16)
    cache = pages.kv[:, 0, :, 0].contiguous()
    ckv, kpe = cache[..., :16].contiguous(), cache[..., 16:].contiguous()
    batch, pos = fi.get_batch_indices_positions(torch.tensor([0, 1, 3]).int(), pages.lens, 5)
    assert batch.tolist() == [0, 1, 1, -1, -1]
    x, y = torch.randn(3, 16, dtype=torch.bfloat16), torch.randn(3, 8, dtype=torch.bfloat16)
    fi.append_paged_mla_kv_cache(x, y, batch[:3], pos[:3], ckv, kpe, pages.indices, pages.indptr, pages.last)
    place = lambda r, p: (int(pages.indices[pages.indptr[r] + p // 4]), p % 4)
    for t, (r, p) in enumerate(((0, 4), (1, 0), (1, 1))):
        assert torch.equal(ckv[place(r, p)], x[t]) and torch.equal(kpe[place(r, p)], y[t])


@pytest.mark.parametrize("order", ("big", "little"))
@pytest.mark.parametrize("n", (1, 8, 21))
def test_packbits(order, n):
    numpy = pytest.importorskip("numpy")
    x = torch.rand(n) < 0.5
    assert fi.packbits(x, order).tolist() == numpy.packbits(x.cpu().numpy(), bitorder=order).tolist()
    ptr = torch.tensor([0, n // 2, n // 2, n], dtype=torch.int32)
    got, offsets = fi.segment_packbits(x, ptr, order)
    want = [numpy.packbits(x[a:b].cpu().numpy(), bitorder=order).tolist() for a, b in zip(ptr[:-1], ptr[1:])]
    assert got.tolist() == sum(want, []) and offsets.tolist() == [0, *torch.tensor([len(w) for w in want]).cumsum(0)]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("k,sorted", ((1, False), (5, True), (30, True)))
def test_top_k(dtype, k, sorted):
    x = torch.randn(6, 100).to(dtype)
    values, indices = fi.top_k(x, k, sorted=sorted)
    assert indices.dtype == torch.int64 and torch.equal(values, x.gather(1, indices))
    assert torch.equal(values.sort(-1, descending=True)[0], x.topk(k)[0])
    assert not sorted or torch.equal(values, x.topk(k)[0])


def test_top_k_transforms():
    x, lens = torch.randn(3, 20), torch.tensor([20, 4, 9], dtype=torch.int32)
    table = torch.randperm(60).view(3, 20).int()
    got = fi.top_k_page_table_transform(x, table, lens, 6)
    ragged = fi.top_k_ragged_transform(x, torch.tensor([100, 200, 300]).int(), lens, 6)
    for r, n in enumerate(lens.tolist()):
        best = set(x[r, :n].topk(min(6, n))[1].tolist())
        assert {i for i in got[r].tolist() if i >= 0} == {int(table[r, i]) for i in best}
        assert {i for i in ragged[r].tolist() if i >= 0} == {100 * (r + 1) + i for i in best}


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
def test_products(dtype):
    a, b, bias = torch.randn(9, 64).to(dtype), torch.randn(32, 64).to(dtype), torch.randn(32).to(dtype)
    want = a.float() @ b.float().T
    limit = dict(atol=0.08, rtol=2e-2)
    torch.testing.assert_close(fi.mm_bf16(a, b.T, out_dtype=dtype).float(), want, **limit)
    torch.testing.assert_close(fi.mm_bf16(a, b.T.contiguous(), bias, out_dtype=dtype).float(), want + bias, **limit)
    A, B = torch.randn(3, 5, 64).to(dtype), torch.randn(3, 64, 16).to(dtype)
    torch.testing.assert_close(fi.bmm_bf16(A, B, out_dtype=dtype).float(), A.float() @ B.float(), **limit)
    w = torch.randn(2, 64, 32).to(dtype)
    segments = fi.SegmentGEMMWrapper(torch.empty(1))
    got = segments.run(a, w, 3, False, seg_lens=torch.tensor([4, 0, 5]), weight_indices=torch.tensor([1, 0, 0]))
    want = torch.cat([a[:4].float() @ w[1].float(), a[4:].float() @ w[0].float()])
    torch.testing.assert_close(got.float(), want, **limit)
    ptr = torch.tensor([0, 4, 9], dtype=torch.int32)
    got = fi.grouped_mm_bf16(a, w.transpose(1, 2).contiguous(), ptr, out_dtype=dtype)
    want = torch.cat([a[:4].float() @ w[0].float(), a[4:].float() @ w[1].float()])
    torch.testing.assert_close(got.float(), want, **limit)


def test_fp8_products_and_rounding():
    x = torch.randn(5, 256)
    q, s = fi.per_token_group_quant_8bit(x, 128)
    assert s.shape == (5, 2)
    torch.testing.assert_close(q.float() * s.repeat_interleave(128, 1), x, atol=0.02, rtol=2**-3)
    w, ws = fi.quantization.quantize_fp8(torch.randn(384, 256), (128, 128))
    got = fi.fp8_blockscale_gemm_sm90(q, w, s, ws)
    full = w.float() * ws.repeat_interleave(128, 0).repeat_interleave(128, 1)
    want = (q.float() * s.repeat_interleave(128, 1)) @ full.T
    torch.testing.assert_close(got.float(), want, atol=0.2, rtol=2e-2)
    A, B = torch.randn(2, 4, 64).to(torch.float8_e4m3fn), torch.randn(2, 64, 8).to(torch.float8_e4m3fn)
    got = fi.bmm_fp8(A, B, torch.tensor(2.0), torch.tensor([0.5]), torch.bfloat16)
    torch.testing.assert_close(got.float(), A.float() @ B.float(), atol=0.2, rtol=2e-2)


def test_routing():
    scores, bias = torch.randn(6, 32), torch.randn(32)
    values, ids = torch.empty(6, 4), torch.empty(6, 4, dtype=torch.int32)
    fi.fused_topk_deepseek(scores, bias, 4, 2, 4, 2.5, values, ids)
    s = scores.sigmoid()
    c = (s + bias).view(6, 4, 8)
    keep = c.topk(2, -1)[0].sum(-1).topk(2, -1)[1]
    allowed = torch.zeros(6, 4, dtype=torch.bool).scatter(1, keep, True).repeat_interleave(8, 1)
    want = (s + bias).masked_fill(~allowed, -math.inf).topk(4, -1)[1]
    assert torch.equal(ids.long().sort(-1)[0], want.sort(-1)[0])
    chosen = s.gather(1, ids.long())
    close(values, chosen / chosen.sum(-1, keepdim=True) * 2.5)


def test_every_argument_of_pages_and_blocks():
    pages = Pages([6, 1, 9], 4, 2, 32, torch.bfloat16)
    ptr = torch.tensor([0, 2, 3, 8], dtype=torch.int32)
    for lens in (pages.lens, pages.lens.long(), pages.lens + 10):
        given = [torch.full((10,), 7, dtype=torch.int32) for _ in range(2)]
        batch, pos = fi.get_batch_indices_positions(ptr, lens, 10, *given)
        assert batch is given[0] and pos is given[1] and batch.tolist() == [0, 0, 1, 2, 2, 2, 2, 2, -1, -1]
        want = [int(lens[r]) - n + i for r, n in enumerate((2, 1, 5)) for i in range(n)]
        assert pos.tolist() == [*want, 0, 0]
    for page in (1, 4, 16):
        other = Pages([6, 1, 0, 9], page, 1, 8, torch.float32)
        assert fi.get_seq_lens(other.indptr, other.last.long() if page == 4 else other.last, page).tolist() == [6, 1, 0, 9]
    # NVFP4 pages: written by position or by slot, read back by the table.
    batch, pos = torch.tensor([0, 1, 2, 2], dtype=torch.int32), torch.tensor([5, 0, 0, 8], dtype=torch.int32)
    k, v = torch.randn(4, 2, 32).bfloat16(), torch.randn(4, 2, 32).bfloat16()
    n = pages.kv.shape[0]
    for layout in ("NHD", "HND"):
        shape = (n, 4, 2) if layout == "NHD" else (n, 2, 4)
        for slots in (False, True):
            for stacked in (False, True):
                new = lambda last: torch.zeros((n, 2, *shape[1:], last), dtype=torch.uint8)
                codes, scales = new(16), new(2)
                give = (lambda t: t) if stacked else (lambda t: (t[:, 0], t[:, 1]))
                if slots:
                    first = pages.indices[pages.indptr[batch.long()].long() + pos.long() // 4]
                    slot = (first * 4 + pos % 4).to(torch.int64 if stacked else torch.int32)
                    fi.page.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(k, v, slot, give(codes), give(scales), 0.5, torch.tensor([0.25]), layout)
                else:
                    fi.page.nvfp4_quantize_append_paged_kv_cache(k, v, batch, pos, give(codes), give(scales), pages.indices, pages.indptr, pages.last, 0.5, 0.25, layout)
                table = torch.zeros(3, 3, dtype=torch.int64 if slots else torch.int32)
                for r in range(3):
                    ids = pages.indices[pages.indptr[r]:pages.indptr[r + 1]]
                    table[r, : len(ids)] = ids
                outs = [torch.full((3, 10, 2, 32), 9.0, dtype=torch.float16 if slots else torch.bfloat16) for _ in range(2)]
                fi.quantization.nvfp4_kv_dequantize_paged(give(codes), give(scales), table, pages.lens, torch.tensor([0.5]), torch.tensor([0.25]), *outs, layout)
                for out, x in zip(outs, (k, v)):
                    got = torch.stack([out[b, p] for b, p in zip(batch.tolist(), pos.tolist())])
                    torch.testing.assert_close(got.float(), x.float(), atol=0.5, rtol=0.2)
                    assert (out[1, 1:] == 9.0).all() and (out[0, 6:] == 9.0).all() and (out[0, :5] == 0.0).all()
    # Blocks: what is written can be read, and what is Blackwell's is refused by name.
    x = torch.randn(6, 64)
    q, s = fi.quantization.mxfp8_quantize(x, False)
    close(fi.quantization.mxfp8_dequantize_host(q, s, False), q.float() * torch.exp2(s.float() - 127).repeat_interleave(32, 1))
    torch.testing.assert_close(q.float() * torch.exp2(s.float() - 127).repeat_interleave(32, 1), x, atol=0.1, rtol=0.08)
    assert all(torch.equal(a, b) for a, b in zip(fi.quantization.mxfp8_quantize(x, False, 64, True, "cute-dsl"), (q, s)) if a.dtype == torch.uint8)
    codes, s = fi.quantization.mxfp4_quantize(x, "cuda", True, sfLayout="linear")
    levels = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    nibbles = torch.stack((codes & 15, codes >> 4), -1).flatten(1).long()
    want = torch.where(nibbles > 7, -1.0, 1.0) * levels[nibbles % 8] * torch.exp2(s.float() - 127).repeat_interleave(32, 1)
    close(fi.quantization.mxfp4_dequantize(codes, s, "linear"), want)
    close(fi.quantization.mxfp4_dequantize_host(codes, s, 32), want)
    codes, s = fi.quantization.nvfp4_kv_quantize(x, torch.tensor([0.5]))
    for dtype in (torch.bfloat16, torch.float16):
        got = fi.quantization.nvfp4_kv_dequantize(codes, s, torch.tensor([0.5]), dtype)
        assert got.dtype == dtype
        torch.testing.assert_close(got.float(), x, atol=0.5, rtol=0.2)
    for call in (lambda: fi.quantization.mxfp8_quantize(x), lambda: fi.quantization.mxfp8_quantize(x, False, sf_swizzle_layout=1), lambda: fi.quantization.mxfp4_quantize(x),
                 lambda: fi.quantization.mxfp4_dequantize(codes, s), lambda: fi.quantization.mxfp4_dequantize_host(codes, s, 16), lambda: fi.quantization.mxfp8_dequantize_host(q, s)):
        with pytest.raises(NotImplementedError):
            call()
