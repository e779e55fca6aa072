"""torch.compile: no graph breaks, and the results of the plain calls."""

import pytest
import torch
from conftest import Pages, close

import fir.flashinfer as fi

BACKENDS = ("eager", "aot_eager")


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


def same(function, backend, *args):
    """A compiled call against a plain one, each on copies of the arguments; what is written in place counts too."""
    first, second = ([a.clone() if isinstance(a, torch.Tensor) else a for a in args] for _ in range(2))
    want = function(*first)
    got = torch.compile(function, fullgraph=True, backend=backend)(*second)
    flat = lambda r: [t for t in (r if isinstance(r, (tuple, list)) else (r,)) if isinstance(t, torch.Tensor)]
    results = list(zip(flat(got) + flat(second), flat(want) + flat(first)))
    assert results
    for g, w in results:
        assert torch.equal(g, w)


def _rows(x, w):
    y = fi.rmsnorm(x * 2, w) + fi.gemma_rmsnorm(x, w)
    fi.fused_add_rmsnorm(y, x, w)
    return fi.silu_and_mul(y) + fi.gelu_and_mul(y) + fi.gelu_tanh_and_mul(y), fi.layernorm(x, w, w), y


def _ropes(q, k, pos, indptr, offsets, table):
    a = fi.apply_rope_pos_ids(q, k, pos)
    b = fi.apply_rope(q, k, indptr, offsets, interleave=True, rope_theta=5e5)
    c = fi.apply_llama31_rope_pos_ids(q, k, pos)
    d = fi.apply_rope_with_cos_sin_cache(pos, q.flatten(1), k.flatten(1), q.shape[-1], table)
    fi.apply_llama31_rope_inplace(q, k, indptr, offsets)
    fi.apply_rope_with_cos_sin_cache_inplace(pos, q, k, q.shape[-1], table, is_neox=False)
    return *a, *b, *c, *d


def _samples(p, ks):
    s = fi.softmax(p, temperature=0.7)
    return (fi.sampling_from_probs(s, seed=1, offset=2), fi.top_k_sampling_from_probs(s, 3, seed=1, offset=2),
            fi.top_k_sampling_from_probs(s, ks, seed=1, offset=2), fi.top_p_sampling_from_probs(s, 0.5, seed=3, offset=4),
            fi.min_p_sampling_from_probs(s, 0.1, seed=3, offset=4),
            *fi.top_k_top_p_sampling_from_probs(s, ks, 0.9, seed=5, offset=6, return_valid=True),
            fi.top_k_top_p_sampling_from_logits(p, 4, 0.9, seed=5, offset=6, filter_apply_order="joint"),
            fi.sampling_from_logits(p, seed=7, offset=8), fi.top_p_renorm_probs(s, 0.5), fi.top_k_renorm_probs(s, ks),
            fi.top_k_mask_logits(p, 3), *fi.top_k(p, 4, sorted=True))


def _products(a, b, indptr, w):
    fp8, scales = fi.quantization.quantize_fp8(a, (1, 16))
    return (fi.mm_bf16(a, b), fi.bmm_bf16(a[None], b[None]), fi.grouped_mm_bf16(a, w, indptr),
            fi.quantization.dequantize_fp8(fp8, scales, (1, 16)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_token_operators(backend):
    same(_rows, backend, torch.randn(5, 64), torch.randn(64))
    q, k = torch.randn(6, 4, 32), torch.randn(6, 2, 32)
    pos, indptr = torch.arange(6), torch.tensor([0, 2, 6], dtype=torch.int32)
    offsets, table = torch.tensor([3, 0], dtype=torch.int32), torch.randn(10, 32)
    same(_ropes, backend, q, k, pos, indptr, offsets, table)
    same(_samples, backend, torch.randn(4, 40), torch.tensor([1, 5, 9, 40], dtype=torch.int32))
    half = torch.bfloat16
    same(_products, backend, torch.randn(7, 32).to(half), torch.randn(32, 16).to(half),
         torch.tensor([0, 3, 7], dtype=torch.int32), torch.randn(2, 16, 32).to(half))


@pytest.mark.parametrize("backend", BACKENDS)
def test_states_and_pages(backend):
    v, s = torch.randn(5, 4, 32), torch.randn(5, 4)

    def states(v, s):
        a, b = fi.merge_state(v, s, v + 1, s - 1)
        fi.merge_state_in_place(a, b, v, s)
        return *fi.merge_states(torch.stack((a, v), 1), torch.stack((b, s), 1)), a, b

    same(states, backend, v, s)
    pages = Pages([9, 20], 4, 2, 32, torch.float32)
    batch, pos = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([8, 19], dtype=torch.int32)

    def append(k, v, k_cache, v_cache):
        fi.append_paged_kv_cache(k * 2, v, batch, pos, (k_cache, v_cache), pages.indices, pages.indptr, pages.last)
        return k_cache + 1

    same(append, backend, torch.randn(2, 2, 32), torch.randn(2, 2, 32), *pages.cache)


@pytest.mark.parametrize("backend", BACKENDS)
def test_attention(backend):
    q, k, v = torch.randn(6, 4, 32), torch.randn(20, 2, 32), torch.randn(20, 2, 32)

    def single(q, k, v):
        return (*fi.single_prefill_with_kv_cache(q, k, v, causal=True, return_lse=True),
                fi.single_decode_with_kv_cache(q[0], k, v, logits_soft_cap=3.0, window_left=4))

    same(single, backend, q, k, v)
    pages = Pages([9, 20], 4, 2, 32, torch.float32)
    decode = fi.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1))
    prefill = fi.BatchPrefillWithPagedKVCacheWrapper(torch.empty(1))
    ragged = fi.BatchPrefillWithRaggedKVCacheWrapper(torch.empty(1))
    sink = fi.BatchAttentionWithAttentionSinkWrapper(torch.empty(1))
    qo, kv = torch.tensor([0, 4, 6], dtype=torch.int32), torch.tensor([0, 8, 20], dtype=torch.int32)

    def plan(cap):
        table = (pages.indptr, pages.indices, pages.last, 4, 2, 32, 4)
        decode.plan(*table, q_data_type="float32", logits_soft_cap=cap)
        prefill.plan(qo, *table, causal=True, q_data_type="float32")
        ragged.plan(qo, kv, 4, 2, 32, causal=True, q_data_type="float32")
        sink.plan(qo, *table, causal=True, q_data_type="float32")

    def layer(q, k, v, k_cache, v_cache, s):
        a = decode.run(q[:2] * 1.5, (k_cache, v_cache), q_scale=0.5)
        b, lse = prefill.run(q, (k_cache, v_cache), return_lse=True)
        c = ragged.run(q, k, v) + sink.run(q, (k_cache, v_cache), s, 0.2)
        return a + 1, b, lse, c

    plan(None)
    args = (q, k, v, *pages.cache, torch.randn(4))
    same(layer, backend, *args)
    # A plan that changes afterwards is read when the graph runs, which is not compiled again.
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    before = compiled(*args)[0]
    plan(1.0)
    after = compiled(*args)[0]
    assert counter.frame_count == 1 and not torch.equal(before, after)
    close(after, layer(*args)[0])


def test_latent_attention():
    pages = Pages([9, 20], 4, 1, 512, torch.float32)
    ckv, kpe = pages.kv[:, 0, :, 0].contiguous(), torch.randn(pages.kv.shape[0], 4, 64)
    wrapper = fi.mla.BatchMLAPagedAttentionWrapper(torch.empty(1))
    qo = torch.tensor([0, 1, 2], dtype=torch.int32)
    wrapper.plan(qo, pages.indptr, pages.indices, pages.lens, 4, 512, 64, 4, False, 0.1, torch.float32, torch.float32)
    same(lambda a, b, c, d: wrapper.run(a, b, c, d, return_lse=True), "aot_eager", torch.randn(2, 4, 512),
         torch.randn(2, 4, 64), ckv, kpe)
