"""What vLLM and SGLang call on a Hopper GPU, in their words, with their shapes; and what they ask before."""

import functools
import json
import math
import os
import struct
import subprocess
import sys

import pytest
import torch
from conftest import Pages, attention, checkout, close, shared, visible

import fir.flashinfer as fi

BF16 = torch.bfloat16
I32 = torch.int32


def i32(*values):
    return torch.tensor(values, dtype=I32)


def requests(q, qo, pages, causal=True, sm_scale=None, **options):
    """The reference of each request, one after another."""
    outs = []
    for r in range(len(pages.lens)):
        mine = q[qo[r]:qo[r + 1]]
        k, v = pages.request(r)
        outs.append(attention(mine, k, v, sm_scale, visible(len(mine), len(k), causal), **options))
    return torch.cat([o for o, _ in outs]), torch.cat([s for _, s in outs])


# What they ask before they call.

@pytest.mark.cpu
@pytest.mark.parametrize("way", ("install", "pth"))
def test_presence_version_and_names(way, tmp_path):
    code = r"""
import importlib.util, importlib.metadata, shutil
START
assert importlib.util.find_spec("flashinfer") is not None
assert importlib.metadata.version("flashinfer_python") == importlib.metadata.version("flashinfer-python") == "0.6.17"
assert shutil.which("nvcc") or importlib.util.find_spec("flashinfer_cubin")
import flashinfer
assert flashinfer.__version__ == "0.6.17" and flashinfer is importlib.import_module("fir.flashinfer")
from flashinfer import (BatchAttentionWithAttentionSinkWrapper, BatchDecodeWithPagedKVCacheWrapper,
    BatchPrefillWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper, MultiLevelCascadeAttentionWrapper)
from flashinfer.decode import fast_decode_plan, trtllm_batch_decode_with_kv_cache
from flashinfer.prefill import trtllm_batch_context_with_kv_cache
from flashinfer.utils import FP4Tensor
from flashinfer.cascade import merge_state
from flashinfer.sampling import min_p_sampling_from_probs, top_k_top_p_sampling_from_probs, top_k_renorm_prob, top_p_renorm_prob
from flashinfer.norm import fused_add_rmsnorm, gemma_fused_add_rmsnorm, gemma_rmsnorm, rmsnorm
from flashinfer.autotuner import autotune, AutoTuner, set_autotune_process_group
from flashinfer.concat_ops import concat_mla_k
from flashinfer.fused_moe import cutlass_fused_moe
from flashinfer.testing import bench_gpu_time
from flashinfer.jit import MissingJITCacheError
import flashinfer.fused_moe.core, flashinfer.jit.attention, flashinfer.rope, flashinfer.topk
with autotune(): pass
assert callable(flashinfer.top_k) and callable(flashinfer.topk)
"""
    env = None
    if way == "install":
        code = code.replace("START", "import importlib, fir.flashinfer; fir.flashinfer.install()")
    else:
        pth = checkout() / "crates/fir-py/data/purelib/fir_as_flashinfer.pth"
        (tmp_path / pth.name).write_text(pth.read_text())
        code = code.replace("START", f"import importlib, site, sys; site.addsitedir({str(tmp_path)!r}); assert 'torch' not in sys.modules")
        env = {**os.environ, "FIR_AS_FLASHINFER": "1"}
    subprocess.run([sys.executable, "-c", code], check=True, env=env)
    if way == "pth":
        code = f"import site, importlib.util as u; site.addsitedir({str(tmp_path)!r}); assert u.find_spec('flashinfer_cubin') is None"
        subprocess.run([sys.executable, "-c", code], check=True, env={**env, "FIR_AS_FLASHINFER": "0"})


# vLLM.

@pytest.mark.parametrize("layout", ("NHD", "HND"))
@pytest.mark.parametrize("block_size", (16, 32, 64))
@pytest.mark.parametrize("kv_dtype", (BF16, torch.float8_e4m3fn))
def test_vllm_prefill_and_decode(layout, block_size, kv_dtype):
    """Llama-3.1-8B: 32 heads of 128 to 8; keys and values are strided halves of one cache; offsets on the host."""
    heads, kv_heads, dim = 32, 8, 128
    pages = Pages([40, 3, 130], block_size, kv_heads, dim, torch.float32, layout)
    both = torch.cat((pages.kv[:, 0], pages.kv[:, 1]), -1).to(kv_dtype)
    k, v = both[..., :dim], both[..., dim:]
    pages.kv = torch.stack((k, v), 1).float()
    k_scale, v_scale = (0.5, 2.0) if kv_dtype != BF16 else (1.0, 1.0)
    qo = i32(0, 5, 6, 36)
    q, out = torch.randn(36, heads, dim).to(BF16), torch.full((36, heads, dim), math.nan).to(BF16)
    prefill = fi.BatchPrefillWithPagedKVCacheWrapper(torch.empty(1, dtype=torch.uint8), layout, backend="auto")
    prefill.plan(
        qo_indptr=qo.cpu(), paged_kv_indptr=pages.indptr.cpu(), paged_kv_indices=pages.indices,
        paged_kv_last_page_len=pages.last.cpu(), num_qo_heads=heads, num_kv_heads=kv_heads, head_dim_qk=dim,
        page_size=block_size, causal=True, sm_scale=0.1, window_left=-1, logits_soft_cap=0.0, q_data_type=BF16,
        kv_data_type=kv_dtype, o_data_type=BF16, fixed_split_size=-1, disable_split_kv=False)
    assert (prefill._window_left, prefill._logits_soft_cap, prefill._sm_scale, prefill._causal) == (-1, 0.0, 0.1, True)
    prefill.vllm_first_call = False
    prefill.run(q, (k, v), q_scale=1.0, k_scale=k_scale, v_scale=v_scale, out=out, kv_cache_sf=None)
    want = requests(q, qo, pages, sm_scale=0.1 * k_scale)[0] * v_scale
    torch.testing.assert_close(out.float(), want, atol=3e-2 * v_scale, rtol=3e-2)

    indptr, indices, last = torch.zeros(4, dtype=I32), torch.zeros(64, dtype=I32), torch.zeros(3, dtype=I32)
    decode = fi.BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(1, dtype=torch.uint8), layout, use_cuda_graph=True, paged_kv_indptr_buffer=indptr,
        paged_kv_indices_buffer=indices, paged_kv_last_page_len_buffer=last, use_tensor_cores=True, backend="auto")
    for plan in (decode.plan, functools.partial(fi.decode.fast_decode_plan, decode)):
        kwargs = {} if plan == decode.plan else {"global_override_indptr_cpu": pages.indptr.cpu()}
        plan(pages.indptr.cpu(), pages.indices[:-1], pages.last.cpu(), heads, kv_heads, dim, block_size,
             pos_encoding_mode="NONE", sm_scale=0.1, window_left=-1, logits_soft_cap=0.0, q_data_type=BF16,
             kv_data_type=kv_dtype, **kwargs)
        assert torch.equal(indptr.cpu(), pages.indptr.cpu()) and torch.equal(last, pages.last)
        first = q[:3]
        got, lse = decode.run(first, (k, v), q_scale=1.0, k_scale=k_scale, v_scale=v_scale, kv_cache_sf=None, sinks=None,
                              lse=torch.empty(3, heads), return_lse=True)
        want, want_lse = requests(first, i32(0, 1, 2, 3), pages, sm_scale=0.1 * k_scale)
        torch.testing.assert_close(got.float(), want * v_scale, atol=3e-2 * v_scale, rtol=3e-2)
        torch.testing.assert_close(lse, want_lse, atol=1e-2, rtol=1e-2)
    with pytest.raises(ValueError, match="batch size"):
        decode.plan(pages.indptr[:3].cpu(), pages.indices[:-1], pages.last[:2].cpu(), heads, kv_heads, dim, block_size)


def test_vllm_xqa_decode():
    pages = Pages([40, 3], 16, 8, 128, BF16, "HND")
    table = torch.zeros(2, 3, dtype=I32)
    for r in (0, 1):
        ids = pages.indices[pages.indptr[r]:pages.indptr[r + 1]]
        table[r, : len(ids)] = ids
    q, out = torch.randn(2, 32, 128).to(BF16), torch.empty(2, 32, 128, dtype=BF16)
    fi.decode.trtllm_batch_decode_with_kv_cache(
        query=q, kv_cache=torch.stack(pages.cache, 1), workspace_buffer=torch.empty(1), block_tables=table,
        seq_lens=pages.lens, max_seq_len=40, bmm1_scale=0.1, bmm2_scale=1.0, window_left=-1, sinks=None, out=out,
        q_len_per_req=1, backend="xqa", kv_layout="HND")
    close(out, requests(q, i32(0, 1, 2), pages, sm_scale=0.1)[0])


def test_vllm_context_parallel_states():
    """The two parts' log-sum-exps are base 2, and turned to base e by the caller."""
    pages = Pages([33, 20], 16, 2, 64, BF16)
    qo, q = i32(0, 4, 7), torch.randn(7, 4, 64).to(BF16)
    new_k, new_v = torch.randn(7, 2, 64).to(BF16), torch.randn(7, 2, 64).to(BF16)
    context = fi.BatchPrefillWithPagedKVCacheWrapper(torch.empty(1), "NHD")
    context.plan(qo, pages.indptr, pages.indices, pages.last, 4, 2, 64, 16, causal=False, q_data_type=BF16, kv_data_type=BF16)
    new = fi.BatchPrefillWithRaggedKVCacheWrapper(torch.empty(1), "NHD")
    new.plan(qo, qo, 4, 2, 64, causal=True, q_data_type=BF16, kv_data_type=BF16)
    a, b = context.run(q, pages.cache, return_lse=True), new.run(q, new_k, new_v, return_lse=True)
    out = torch.empty_like(a[0]).float()
    s, t = a[1] * math.log(2), b[1] * math.log(2)
    total = torch.logaddexp(s, t)
    out = a[0].float() * (s - total).exp()[..., None] + b[0].float() * (t - total).exp()[..., None]
    for r in (0, 1):
        rows = slice(int(qo[r]), int(qo[r + 1]))
        k, v = (torch.cat(pair) for pair in zip(pages.request(r), (new_k[rows], new_v[rows])))
        want = attention(q[rows], k, v, mask=visible(rows.stop - rows.start, len(k), True))[0]
        torch.testing.assert_close(out[rows], want, atol=3e-2, rtol=3e-2)


def test_vllm_samplers_and_the_rest():
    logits = torch.randn(4, 1000)
    probs = logits.softmax(-1)
    k, p = i32(1, 5, 50, 1000), torch.tensor([1e-6, 0.5, 0.9, 1.0])
    best = logits.argmax(-1).int()
    for got in (fi.sampling.top_p_sampling_from_probs(probs, p, deterministic=True),
                fi.sampling.top_k_sampling_from_probs(probs, k, deterministic=True),
                fi.sampling.top_k_top_p_sampling_from_logits(logits, k, p, deterministic=True)):
        assert got.dtype == I32 and got.shape == (4,) and got[0] == best[0]
    values, indices = fi.top_k(logits, 8, sorted=True, deterministic=True)
    assert torch.equal(values, logits.topk(8).values) and torch.equal(indices, logits.topk(8).indices)
    out = torch.empty(5, 4, 192, dtype=BF16)
    nope, rope = torch.randn(5, 4, 128).to(BF16), torch.randn(5, 1, 64).to(BF16)
    fi.concat_ops.concat_mla_k(out, nope, rope)
    assert torch.equal(out, torch.cat((nope, rope.expand(5, 4, 64)), -1))
    x, w = torch.randn(7, 256).to(BF16), torch.randn(256, 256)
    w8, ws = fi.quantization.quantize_fp8(w, (128, 128))
    got = fi.gemm.fp8_blockscale_gemm_sm90(x, w8, weight_scale=ws, out_dtype=BF16)
    want = x.float() @ fi.quantization.dequantize_fp8(w8, ws, (128, 128)).T
    torch.testing.assert_close(got.float(), want, atol=0.2, rtol=2e-2)


# SGLang: pages of one token, deprecated names, and a module's `plan` of its own.

def recorded(count: int):
    """Page tables of Llama-3.1-8B, the shortest first, with ids made dense."""
    tables = []
    for file in sorted(shared("data/page_tables").glob("*.safetensors"), key=lambda f: f.stat().st_size)[:count]:
        data = file.read_bytes()
        size = struct.unpack("<Q", data[:8])[0]
        table = {}
        for name, at in json.loads(data[8:8 + size]).items():
            start, end = (8 + size + n for n in at["data_offsets"])
            kind = "i" if at["dtype"] == "I32" else "f"
            table[name] = torch.tensor(struct.unpack(f"<{(end - start) // 4}{kind}", data[start:end]),
                                       dtype=I32 if kind == "i" else torch.float32).reshape(at["shape"])
        used, dense = table["kv_indices"].unique(return_inverse=True)
        table["kv_indices"], table["pages"] = dense.to(I32), len(used)
        tables.append(table)
    return tables


@pytest.mark.parametrize("use_tensor_cores", (True, False))
def test_sglang_decode_of_recorded_tables(use_tensor_cores):
    heads, kv_heads, dim = 32, 8, 128
    for table in recorded(2):
        indptr, indices, last = table["kv_indptr"], table["kv_indices"], table["last_page_len"]
        batch, scale = len(last), float(table["sm_scale"])
        k, v = (torch.randn(table["pages"], kv_heads, dim).to(BF16) for _ in (0, 1))
        q = torch.randn(batch, heads, dim).to(BF16)
        wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1), "NHD", use_tensor_cores=use_tensor_cores, backend="fa2")
        wrapper.begin_forward(indptr, indices, last, heads, kv_heads, dim, 1, data_type=BF16, q_data_type=BF16,
                              non_blocking=True, fixed_split_size=None, disable_split_kv=False)
        out = wrapper.forward(q, (k.unsqueeze(1), v.unsqueeze(1)), sm_scale=scale, logits_soft_cap=0.0, k_scale=None, v_scale=None)
        wrapper.end_forward()
        for r in (0, batch // 2, batch - 1):
            ids = indices[indptr[r]:indptr[r + 1]].long()
            close(out[r:r + 1], attention(q[r:r + 1], k[ids], v[ids], scale)[0])


def test_sglang_ragged_and_paged_extend():
    heads, kv_heads, dim = 8, 2, 64
    pages = Pages([33, 20], 1, kv_heads, dim, BF16)
    qo, q = i32(0, 4, 7), torch.randn(7, heads, dim).to(BF16)
    k, v = torch.randn(7, kv_heads, dim).to(BF16), torch.randn(7, kv_heads, dim).to(BF16)
    ragged = fi.BatchPrefillWithRaggedKVCacheWrapper(torch.empty(1), "NHD", backend="auto")
    paged = fi.BatchPrefillWithPagedKVCacheWrapper(torch.empty(1), "NHD", backend="fa2")
    for cap, window in ((0.0, -1), (5.0, -1), (0.0, 3)):
        ragged.begin_forward(qo, qo, heads, kv_heads, dim, q_data_type=BF16)
        paged.begin_forward(qo, pages.indptr, pages.indices, pages.last, heads, kv_heads, dim, 1, q_data_type=BF16,
                            kv_data_type=BF16, custom_mask=None, non_blocking=True, fixed_split_size=None)
        o1, s1 = ragged.forward_return_lse(q, k, v, causal=True, sm_scale=0.2, window_left=window, logits_soft_cap=cap)
        o2, s2 = paged.forward_return_lse(q, pages.cache, causal=False, sm_scale=0.2, window_left=-1, logits_soft_cap=cap,
                                          k_scale=1.0, v_scale=1.0)
        out, _ = fi.cascade.merge_state(o1, s1, o2, s2)
        for r in (0, 1):
            rows = slice(int(qo[r]), int(qo[r + 1]))
            n, before = rows.stop - rows.start, len(pages.request(r)[0])
            mask = torch.cat((torch.ones(n, before, dtype=torch.bool), visible(n, n, True, window)), 1)
            kk, vv = (torch.cat(pair) for pair in zip(pages.request(r), (k[rows], v[rows])))
            torch.testing.assert_close(out[rows].float(), attention(q[rows], kk, vv, 0.2, mask, cap)[0], atol=3e-2, rtol=3e-2)


def test_sglang_plans_through_the_module():
    """CUDA-graph wrappers, planned once by ``begin_forward`` and then by SGLang's own functions, which hand host metadata to
    ``_cached_module.plan``: 20 arguments for prefill, 9 for MLA."""
    heads, kv_heads, dim = 8, 2, 64
    first, then = Pages([33, 20], 1, kv_heads, dim, BF16), Pages([50, 7], 1, kv_heads, dim, BF16)
    buffers = dict(qo_indptr_buf=torch.zeros(3, dtype=I32), paged_kv_indptr_buf=torch.zeros(3, dtype=I32),
                   paged_kv_indices_buf=torch.zeros(100, dtype=I32), paged_kv_last_page_len_buf=torch.ones(2, dtype=I32))
    wrapper = fi.BatchPrefillWithPagedKVCacheWrapper(torch.empty(1), "NHD", use_cuda_graph=True, backend="fa2", **buffers)
    qo = i32(0, 3, 5)
    wrapper.begin_forward(qo, first.indptr, first.indices[:-1], first.last, heads, kv_heads, dim, 1, causal=True,
                          q_data_type=BF16, kv_data_type=BF16)
    q = torch.randn(5, heads, dim).to(BF16)
    close(wrapper.run(q, first.cache), requests(q, qo, first)[0])
    assert wrapper.is_cuda_graph_enabled and wrapper._backend == "fa2" and wrapper._cached_module is not None
    wrapper._qo_indptr_buf.copy_(qo)
    wrapper._paged_kv_indptr_buf.copy_(then.indptr)
    wrapper._paged_kv_last_page_len_buf.copy_(then.last)
    wrapper._paged_kv_indices_buf[: len(then.indices) - 1].copy_(then.indices[:-1])
    wrapper._cached_q_data_type = wrapper._cached_kv_data_type = BF16
    wrapper._cached_o_data_type = wrapper._block_tables = None
    wrapper._plan_info = wrapper._cached_module.plan(
        wrapper._float_workspace_buffer, wrapper._int_workspace_buffer, wrapper._pin_memory_int_workspace_buffer,
        qo.cpu(), then.indptr.cpu(), then.lens.cpu(), wrapper._max_total_num_rows or 5, 2, heads, kv_heads, 1,
        wrapper.is_cuda_graph_enabled, dim, dim, True, -1, -1, False, 0, 0)
    close(wrapper.run(q, then.cache), requests(q, qo, then)[0])

    decode = fi.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1), "NHD", backend="fa2")
    decode.plan(first.indptr, first.indices, first.last, heads, kv_heads, dim, 1, q_data_type=BF16)
    decode._paged_kv_indices_buf, decode._paged_kv_last_page_len_buf = then.indices, then.last
    decode._cached_module.plan(None, None, None, then.indptr.cpu(), 2, heads, kv_heads, 1, False, -1, 0.0, dim, dim,
                               torch.empty(0), torch.empty(0))
    close(decode.run(q[:2], then.cache), requests(q[:2], i32(0, 1, 2), then)[0])

    buffers = dict(qo_indptr=torch.zeros(3, dtype=I32), kv_indptr=torch.zeros(3, dtype=I32),
                   kv_indices=torch.zeros(100, dtype=I32), kv_len_arr=torch.zeros(2, dtype=I32))
    mla = fi.mla.BatchMLAPagedAttentionWrapper(torch.empty(1), use_cuda_graph=True, backend="auto", **buffers)
    one = i32(0, 1, 2)
    latent = torch.randn(60, 1, 576).to(BF16)
    q_nope, q_rope = torch.randn(2, 16, 512).to(BF16), torch.randn(2, 16, 64).to(BF16)

    def check(table):
        out = torch.empty(2, 16, 512, dtype=BF16)
        mla.run(q_nope, q_rope, latent[:, :, :512], latent[:, :, 512:], out=out)
        for r in (0, 1):
            rows = latent[table.indices[table.indptr[r]:table.indptr[r + 1]].long()]
            query = torch.cat((q_nope, q_rope), -1)[r:r + 1]
            want = attention(query, rows, rows[..., :512], 0.05)[0]
            torch.testing.assert_close(out[r:r + 1].float(), want, atol=3e-2, rtol=3e-2)

    mla.plan(one, first.indptr, first.indices[:-1], first.lens, 16, 512, 64, 1, False, 0.05, BF16, BF16)
    check(first)
    mla._kv_indices_buf[: len(then.indices) - 1].copy_(then.indices[:-1])
    mla._causal, mla._page_size, mla._sm_scale = False, 1, 0.05
    mla._cached_module.plan(mla._float_workspace_buffer, mla._int_workspace_buffer, mla._pin_memory_int_workspace_buffer,
                            one.cpu(), then.indptr.cpu(), then.lens.cpu(), 16, 512, False)
    check(then)


def test_sglang_mla_prefill():
    """DeepSeek's prefill: keys of 192, values of 128."""
    qo = i32(0, 5, 9)
    q, k, v = torch.randn(9, 4, 192).to(BF16), torch.randn(9, 4, 192).to(BF16), torch.randn(9, 4, 128).to(BF16)
    wrapper = fi.BatchPrefillWithRaggedKVCacheWrapper(torch.empty(1), "NHD")
    wrapper.begin_forward(qo_indptr=qo, kv_indptr=qo, num_qo_heads=4, num_kv_heads=4, head_dim_qk=192, head_dim_vo=128, q_data_type=BF16, causal=True)
    out = wrapper.forward(q, k, v, causal=True, sm_scale=0.07, logits_soft_cap=0.0)
    for a, b in ((0, 5), (5, 9)):
        close(out[a:b], attention(q[a:b], k[a:b], v[a:b], 0.07, visible(b - a, b - a, True))[0])


def test_sglang_sampler_and_norms():
    probs = torch.randn(5, 500).softmax(-1)
    top_ks, top_ps, min_ps = i32(1, 10, 50, 500, 3), torch.tensor([0.9, 0.5, 0.9, 1.0, 0.8]), torch.full((5,), 0.05)
    renormed = fi.sampling.top_p_renorm_prob(fi.sampling.top_k_renorm_prob(probs, top_ks), top_ps)
    torch.testing.assert_close(renormed.sum(-1), torch.ones(5))
    tokens = fi.sampling.min_p_sampling_from_probs(renormed, min_ps)
    assert (renormed.gather(1, tokens.long()[:, None])[:, 0] >= 0.05 * renormed.amax(-1) - 1e-6).all()
    tokens = fi.sampling.top_k_top_p_sampling_from_probs(probs.contiguous(), top_ks, top_ps, filter_apply_order="joint", check_nan=True)
    assert tokens[0] == probs[0].argmax()
    x, residual, weight = torch.randn(3, 4096).to(BF16), torch.randn(3, 4096).to(BF16), torch.randn(4096).to(BF16)
    norm = lambda t, w: (t.float() / t.float().pow(2).mean(-1, keepdim=True).add(1e-6).sqrt() * w).to(BF16)
    close(fi.norm.rmsnorm(x, weight, 1e-6), norm(x, weight.float()))
    close(fi.norm.gemma_rmsnorm(x, weight, 1e-6), norm(x, weight.float() + 1))
    total = x.float() + residual.float()
    fi.norm.fused_add_rmsnorm(x, residual, weight, 1e-6)
    close(residual, total.to(BF16))
    close(x, norm(total, weight.float()))


# What is left of the two engines' tables: each call with the arguments they give it.

def table(rows, dim):
    """Cosines and sines of places, ``[rows, dim]``."""
    angles = torch.arange(rows)[:, None] * 1e4 ** (-torch.arange(0, dim, 2) / dim)
    return torch.cat((angles.cos(), angles.sin()), -1)


def test_vllm_batch_invariant_plans():
    """Fixed splits for prefill, none for decode: a request's bits do not depend on its neighbours."""
    pages = Pages([300, 40], 16, 2, 64, BF16)
    q, qo = torch.randn(6, 8, 64).to(BF16), i32(0, 4, 6)
    wrapper = fi.BatchPrefillWithPagedKVCacheWrapper(torch.empty(1, dtype=torch.uint8), "NHD")
    alone = fi.BatchPrefillWithPagedKVCacheWrapper(torch.empty(1, dtype=torch.uint8), "NHD")
    for split in (dict(fixed_split_size=4, disable_split_kv=False), dict(fixed_split_size=2048, disable_split_kv=True)):
        rest = dict(num_qo_heads=8, num_kv_heads=2, head_dim_qk=64, page_size=16, causal=True, q_data_type=BF16, kv_data_type=BF16, **split)
        wrapper.plan(qo.cpu(), pages.indptr.cpu(), pages.indices, pages.last.cpu(), **rest)
        got = wrapper.run(q, pages.cache)
        close(got, requests(q, qo, pages)[0])
        first = int(pages.indptr[1])
        alone.plan(i32(0, 2).cpu(), (pages.indptr[1:] - first).cpu(), pages.indices[first:], pages.last[1:].cpu(), **rest)
        assert torch.equal(alone.run(q[4:], pages.cache), got[4:])


def test_vllm_rope_and_experts():
    positions, cache = torch.tensor([0, 7, 3]), table(16, 64)
    query, key = torch.randn(3, 4 * 64).to(BF16), torch.randn(3, 64).to(BF16)
    before = query.clone(), key.clone()
    fi.rope.apply_rope_with_cos_sin_cache_inplace(positions=positions, query=query, key=key, head_size=64, cos_sin_cache=cache, is_neox=True)
    for got, x in zip((query, key), before):
        x = x.float().view(3, -1, 64)
        c, s = (t[positions][:, None] for t in cache.chunk(2, -1))
        a, b = x.chunk(2, -1)
        close(got.view(3, -1, 64), torch.cat((a * c - b * s, b * c + a * s), -1).to(BF16))
    hidden, inter, experts, top_k = 64, 32, 4, 2
    x, out = torch.randn(5, hidden).to(BF16) / 4, torch.full((5, hidden), math.nan).to(BF16)
    ids, scales = torch.randint(0, experts, (5, top_k), dtype=I32), torch.rand(5, top_k)
    w1, w2 = torch.randn(experts, 2 * inter, hidden).to(BF16) / 4, torch.randn(experts, hidden, inter).to(BF16) / 4
    fi.fused_moe.cutlass_fused_moe(
        input=x, token_selected_experts=ids.to(torch.int), token_final_scales=scales, fc1_expert_weights=w1, fc2_expert_weights=w2, output_dtype=BF16, quant_scales=None, input_sf=None,
        tp_size=1, tp_rank=0, ep_size=1, ep_rank=0, output=out, activation_type=fi.fused_moe.ActivationType.Swiglu, use_deepseek_fp8_block_scale=False, use_w4_group_scaling=False, tune_max_num_tokens=16)
    want = torch.zeros(5, hidden)
    for t in range(5):
        for e, w in zip(ids[t].tolist(), scales[t]):
            up, gate = (w1[e].float() @ x[t].float()).chunk(2)
            want[t] += w * (w2[e].float() @ (torch.nn.functional.silu(gate) * up).to(BF16).float())
    close(out, want.to(BF16))
    with fi.autotuner.autotune(True):
        fi.autotuner.AutoTuner.get().clear_cache()


def test_sglang_decode_bound_to_the_fast_plan():
    """``wrapper.begin_forward = functools.partial(fast_decode_plan, wrapper)``, with offsets that are on the host already."""
    heads, kv_heads, dim = 8, 2, 64
    buffers = [torch.zeros(n, dtype=I32) for n in (3, 100, 2)]
    wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1), "NHD", use_cuda_graph=True, use_tensor_cores=True, paged_kv_indptr_buffer=buffers[0],
                                                    paged_kv_indices_buffer=buffers[1], paged_kv_last_page_len_buffer=buffers[2], backend="fa2")
    first = Pages([33, 20], 1, kv_heads, dim, BF16)
    wrapper.begin_forward(first.indptr, first.indices[:-1], first.last, heads, kv_heads, dim, 1, data_type=BF16, q_data_type=BF16, non_blocking=True)
    wrapper.begin_forward = functools.partial(fi.decode.fast_decode_plan, wrapper)
    for lens in ([50, 7], [1, 60]):
        pages = Pages(lens, 1, kv_heads, dim, BF16)
        wrapper.begin_forward(pages.indptr, pages.indices[:-1], pages.last, heads, kv_heads, dim, 1, data_type=BF16, q_data_type=BF16, non_blocking=True, fixed_split_size=None,
                              disable_split_kv=False, global_override_indptr_cpu=pages.indptr.cpu())
        q = torch.randn(2, heads, dim).to(BF16)
        close(wrapper.forward(q, pages.cache, sm_scale=0.2, logits_soft_cap=0.0, k_scale=1.0, v_scale=1.0), requests(q, i32(0, 1, 2), pages, sm_scale=0.2)[0])


def test_sglang_multi_item_prefill():
    """Items behind one prefix, scored in one pass: the arguments that ``begin_forward`` has for them."""
    heads, kv_heads, dim, prefix, items = 8, 2, 64, 9, (3, 4)
    total = prefix + sum(items) + len(items) + 1
    place = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 4, 0], dtype=torch.uint16)[: total - prefix]
    pages = Pages([total], 1, kv_heads, dim, BF16)
    wrapper = fi.BatchPrefillWithPagedKVCacheWrapper(torch.empty(1), "NHD", backend="fa2")
    qo = i32(0, total)
    wrapper.begin_forward(qo, pages.indptr, pages.indices, pages.last, heads, kv_heads, dim, 1, causal=True, q_data_type=BF16, kv_data_type=BF16, custom_mask=None, non_blocking=True, fixed_split_size=None,
                          prefix_len_ptr=torch.tensor([prefix], dtype=torch.uint32), token_pos_in_items_ptr=place, token_pos_in_items_len=len(place), max_item_len_ptr=torch.tensor([4], dtype=torch.uint16))
    q = torch.randn(total, heads, dim).to(BF16)
    k, v = pages.request(0)
    mask = visible(total, total, True)
    starts = torch.cat((torch.zeros(prefix), torch.tensor(place.tolist(), dtype=torch.float32))).int()
    for i in range(prefix, total):
        mask[i, prefix:] &= torch.arange(prefix, total) > i - int(starts[i])
        mask[i, i] = starts[i] != 0 or bool(mask[i, i])
    got = wrapper.forward(q, pages.cache, causal=True, sm_scale=0.2)
    close(got[:prefix], attention(q, k, v, 0.2, mask)[0][:prefix])
    inside = [i for i in range(prefix, total) if starts[i] > 0]
    close(got[inside], attention(q, k, v, 0.2, mask)[0][inside])


def test_sglang_products_routing_and_the_rest():
    x = torch.randn(3, 256).to(BF16)
    a, b = torch.randn(2, 7, 64), torch.randn(2, 16, 64)
    a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
    got = fi.bmm_fp8(a8, b8.transpose(1, 2), torch.tensor(0.5), torch.tensor(0.25), BF16, backend="cublas")
    torch.testing.assert_close(got.float(), a8.float() @ b8.float().transpose(1, 2) / 8, atol=5e-2, rtol=2e-2)
    w8, ws = fi.quantization.quantize_fp8(torch.randn(128, 256), (128, 128))
    got = fi.gemm.fp8_blockscale_gemm_sm90(x, w8, None, ws, out_dtype=BF16)
    torch.testing.assert_close(got.float(), x.float() @ fi.quantization.dequantize_fp8(w8, ws, (128, 128)).T, atol=0.2, rtol=2e-2)
    w, out = torch.randn(128, 256).to(BF16), torch.empty(3, 128, dtype=BF16)
    fi.gemm.tinygemm_bf16(x, w, out, None, use_pdl=True)
    torch.testing.assert_close(out.float(), x.float() @ w.float().T, atol=0.2, rtol=2e-2)
    scores, bias = torch.randn(3, 16), torch.randn(16)
    values, ids = torch.empty(3, 4), torch.empty(3, 4, dtype=I32)
    fi.fused_moe.fused_topk_deepseek(scores, bias, 4, 2, 4, 2.5, values, ids, True)
    torch.testing.assert_close(values.sum(-1), torch.full((3,), 2.5))
    logits, lens = torch.randn(3, 60), i32(60, 9, 30)
    pages, of = torch.randperm(180).view(3, 60).int(), fi.top_k_page_table_transform
    got = of(logits, pages, lens, 8)
    for r in range(3):
        want = {int(pages[r, i]) for i in logits[r, : lens[r]].topk(8).indices}
        assert set(got[r].tolist()) == want
    q_rope, k_rope, q_nope, k_nope = torch.randn(3, 4, 64).to(BF16), torch.randn(3, 64).to(BF16), torch.randn(3, 4, 512).to(BF16), torch.randn(3, 512).to(BF16)
    rope_out, k_out, nope_out, kn_out = fi.rope.mla_rope_quantize_fp8(
        q_rope=q_rope, k_rope=k_rope, q_nope=q_nope, k_nope=k_nope, cos_sin_cache=table(8, 64), pos_ids=torch.tensor([1, 2, 3]), is_neox=False, quantize_dtype=torch.float8_e4m3fn,
        quant_scale_q=1.0, quant_scale_kv=1.0, enable_pdl=True)
    assert rope_out.dtype == torch.float8_e4m3fn and torch.equal(kn_out.float(), k_nope.to(torch.float8_e4m3fn).float())
    weight, residual, eps = torch.randn(256), torch.randn(3, 256), 1e-6
    unit = lambda t: t / t.pow(2).mean(-1, keepdim=True).add(eps).sqrt() * weight
    y, r = torch.zeros(3, 256).to(torch.float8_e4m3fn), residual.clone()
    fi.norm.rmsnorm_quant(y, x.float(), weight, 0.5, eps)
    torch.testing.assert_close(y.float(), unit(x.float()) / 0.5, atol=0.05, rtol=0.07)
    fi.norm.fused_add_rmsnorm_quant(y, x.float(), r, weight, 0.5, eps)
    torch.testing.assert_close(y.float(), unit(x.float() + residual) / 0.5, atol=0.05, rtol=0.07)
    torch.testing.assert_close(fi.norm.layernorm(x.float(), weight, weight, eps), torch.layer_norm(x.float(), (256,), weight, weight, eps), atol=1e-4, rtol=1e-4)
    assert len(fi.testing.bench_gpu_time(lambda: None, dry_run_iters=1, repeat_iters=2)) == 2


def test_sglang_vision():
    """Images one after another, offsets in elements, padded by requests of no tokens; the log-sum-exps are thrown away."""
    heads, dim, lens = 4, 64, [5, 9, 0, 0]
    q, k, v = (torch.randn(14, heads, dim).to(BF16) for _ in range(3))
    ends = torch.tensor([0, 5, 14, 14, 14], dtype=I32) * heads * dim
    each = torch.tensor(lens, dtype=I32).view(4, 1, 1, 1)
    from fir.flashinfer.prefill import cudnn_batch_prefill_with_kv_cache

    out, _ = cudnn_batch_prefill_with_kv_cache(
        q, k, v, dim**-0.5, torch.empty(1, dtype=torch.uint8), max_token_per_sequence=16, max_sequence_kv=16, actual_seq_lens_q=each, actual_seq_lens_kv=each, causal=False, return_lse=True,
        batch_offsets_q=ends.view(5, 1, 1, 1), batch_offsets_k=ends.view(5, 1, 1, 1), batch_offsets_v=ends.view(5, 1, 1, 1), batch_offsets_o=ends.view(5, 1, 1, 1), is_cuda_graph_compatible=True)
    for a, b in ((0, 5), (5, 14)):
        close(out[a:b], attention(q[a:b], k[a:b], v[a:b])[0])


def test_sglang_trtllm_mha():
    """``trtllm_mha`` on Hopper: decode by xqa, prefill by fmha_v2, both over padded tables."""
    pages = Pages([33, 20], 16, 2, 64, BF16, "HND")
    table_ = torch.zeros(2, 3, dtype=I32)
    for r in (0, 1):
        ids = pages.indices[pages.indptr[r]:pages.indptr[r + 1]]
        table_[r, : len(ids)] = ids
    cache, qd = torch.stack(pages.cache, 1), torch.randn(2, 8, 64).to(BF16)
    got = fi.decode.trtllm_batch_decode_with_kv_cache(query=qd, kv_cache=pages.cache, workspace_buffer=torch.empty(1), block_tables=table_, seq_lens=pages.lens, max_seq_len=64, bmm1_scale=0.2, bmm2_scale=1.0,
                                                      window_left=-1, sinks=None, out_dtype=BF16)
    close(got, requests(qd, i32(0, 1, 2), pages, sm_scale=0.2)[0])
    q, qo = torch.randn(6, 8, 64).to(BF16), i32(0, 4, 6)
    got = fi.prefill.trtllm_fmha_v2_prefill((q, cache), "Q_PAGED_KV_HND", torch.empty(1), pages.lens, 4, 33, 0.2, 1.0, 2, qo, i32(0, 33, 53), block_tables=table_, out_dtype=BF16, mask_mode="causal", window_left=-1)
    close(got, requests(q, qo, pages, sm_scale=0.2)[0])
