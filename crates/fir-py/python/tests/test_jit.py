"""Variants of one's own: CUDA text, expressions, and functions of Python."""

import math
from types import SimpleNamespace

import pytest
import torch
from conftest import Pages, attention, close

import fir.flashinfer as fi
from fir import variant as va
from fir.flashinfer import jit

F16 = torch.float16

MASKED = r"""
struct Masked : AttentionVariantBase {
  static constexpr bool use_softmax = true;
  uint8_t* mask_ptr;
  uint32_t window_left, qo_len, kv_len;
  float sm_scale_log2;
  template <typename Params>
  __device__ __host__ Masked(const Params& params, uint32_t batch_idx, uint8_t* smem_ptr) {
    mask_ptr = params.custom_mask;
    qo_len = 1;  // one query
    kv_len = params.get_kv_len(batch_idx);
    window_left = kv_len;
    sm_scale_log2 = params.sm_scale * math::log2e;
  }
  REGISTER_LOGITS_MASK(params, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    const uint32_t offset = kv_idx;
    return ((mask_ptr[offset / 8] >> (offset % 8)) & 1);
  })
  REGISTER_OUTPUT_TRANSFORM(params, output, batch_idx, qo_idx, qo_head_idx, m, d, scale, {
    float d_rcp = (m != -math::inf) ? math::ptx_rcp(d) : 0.f;
    return output * d_rcp;
  })
};
"""
SIGMOID = r"""
struct Sigmoid : AttentionVariantBase {
  static constexpr bool use_softmax = false;
  float scale_log2, bias_log2;
  template <typename Params>
  __device__ __host__ Sigmoid(const Params& params, uint32_t batch_idx, uint8_t* smem_ptr) {
    scale_log2 = params.logits_scale * math::log2e;
    bias_log2 = params.sigmoid_bias * math::log2e;
  }
  REGISTER_LOGITS_TRANSFORM(params, logits, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    return math::ptx_rcp(1.f + math::ptx_exp2(-float(logits * scale_log2 + bias_log2)));
  });
  REGISTER_OUTPUT_TRANSFORM(params, output, batch_idx, qo_idx, qo_head_idx, m, d, scale, { return output; })
};
"""
SIGMOID_SM90 = r"""
struct Sigmoid : AttentionVariantBase {
  float scale_log2, bias_log2;
  template <typename MainloopParams, typename BlockCoord>
  __device__ __host__ Sigmoid(const MainloopParams& params, const BlockCoord& block_coord) {
    scale_log2 = params.additional_params.logits_scale * math::log2e;
    bias_log2 = params.additional_params.sigmoid_bias * math::log2e;
  }
  template <int NUM_ROWS_PER_THREAD> __device__ auto GetAttentionUpdater() { return DefaultUpdater<NUM_ROWS_PER_THREAD>(); }
  REGISTER_LOGITS_TRANSFORM(params, logits, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    return math::ptx_rcp(1.f + math::ptx_exp2(-float(logits * scale_log2 + bias_log2)));
  });
};
"""
# Slopes, a cap, a window of its own, and branches.
MIXED = r"""
struct Mixed : AttentionVariantBase {
  static constexpr bool use_softmax = true;
  float sm_scale_log2, cap;
  int32_t left;
  template <typename Params>
  __device__ __host__ Mixed(const Params& params, uint32_t batch_idx, uint8_t* smem_ptr) {
    sm_scale_log2 = params.sm_scale * math::log2e;
    cap = params.cap; left = params.left;
  }
  REGISTER_LOGITS_TRANSFORM(params, logits, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    float x = logits + params.slopes[qo_head_idx] * float(int(kv_idx) - int(qo_idx));
    if (kv_idx % 2 == 0) return x;
    return cap * math::tanh(x / cap);
  })
  REGISTER_LOGITS_MASK(params, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    return kv_idx + left >= qo_idx && !(kv_idx == 3) || kv_idx == 0;
  })
};
"""


def single(kind, decl, name, tensors=(), tensor_types=(), scalars=(), scalar_types=(), backend="fa2"):
    args = [f"test_{name}", F16, F16, F16, 64, 64, list(tensors), list(tensor_types), list(scalars), list(scalar_types), name, decl]
    if kind == "decode":
        return jit.gen_customize_single_decode_module(*args).build_and_load()
    return jit.gen_customize_single_prefill_module(backend, *args).build_and_load()


def test_text_with_packed_bits():
    module = single("decode", MASKED, "Masked", ["custom_mask"], ["uint8_t"], ["sm_scale"], ["double"])
    q, k, v = torch.randn(4, 64).half(), torch.randn(54, 2, 64).half(), torch.randn(54, 2, 64).half()
    mask = torch.rand(54) < 0.5
    got, lse = fi.decode.single_decode_with_kv_cache_with_jit_module(
        module, q, k, v, fi.packbits(mask, "little"), 0.2, return_lse=True)
    want, want_lse = attention(q[None], k, v, 0.2, mask[None])
    close(got, want[0])
    close(lse, want_lse[0])
    with pytest.raises(TypeError, match="got 1 values, expected 2: custom_mask, sm_scale"):
        fi.decode.single_decode_with_kv_cache_with_jit_module(module, q, k, v, 0.2)


def sigmoid(q, k, v, scale, bias):
    s = torch.einsum("nhd,mhd->hnm", q.float(), k.float().repeat_interleave(q.shape[1] // k.shape[1], 1))
    return torch.einsum("hnm,mhd->nhd", (s * scale + bias).sigmoid(), v.float().repeat_interleave(q.shape[1] // v.shape[1], 1))


@pytest.mark.parametrize("text,backend", ((SIGMOID, "fa2"), (SIGMOID_SM90, "fa3")))
@pytest.mark.parametrize("layout", ("NHD", "HND"))
@pytest.mark.parametrize("window", (-1, 4))
def test_text_without_softmax(text, backend, layout, window):
    module = single("prefill", text, "Sigmoid", scalars=["logits_scale", "sigmoid_bias"], scalar_types=["double"] * 2, backend=backend)
    q, k, v = torch.randn(7, 4, 64).half(), torch.randn(20, 2, 64).half(), torch.randn(20, 2, 64).half()
    give = (k, v) if layout == "NHD" else (k.transpose(0, 1), v.transpose(0, 1))
    got = fi.prefill.single_prefill_with_kv_cache_with_jit_module(module, q, *give, 0.1, -2.0, kv_layout=layout, window_left=window)
    if window < 0:
        torch.testing.assert_close(got.float(), sigmoid(q, k, v, 0.1, -2.0), atol=2e-2, rtol=2e-2)
    else:
        rows = [sigmoid(q[i:i + 1], k[max(i + 13 - window, 0):], v[max(i + 13 - window, 0):], 0.1, -2.0) for i in range(7)]
        torch.testing.assert_close(got.float(), torch.cat(rows), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("mode", (0, 1))
def test_text_with_everything(mode):
    module = single("prefill", MIXED, "Mixed", ["slopes"], ["float"], ["sm_scale", "cap", "left"], ["double", "double", "int64_t"])
    q, k, v, slopes = torch.randn(9, 4, 64), torch.randn(9, 2, 64), torch.randn(9, 2, 64), torch.rand(4)
    got = fi.prefill.single_prefill_with_kv_cache_with_jit_module(module, q, k, v, slopes, 0.3, 2.0, 4, mask_mode=mode)
    i, j = torch.arange(9)[:, None], torch.arange(9)[None]
    s = torch.einsum("nhd,mhd->hnm", q, k.repeat_interleave(2, 1)) + slopes[:, None, None] * (j - i)
    s = torch.where(j % 2 == 0, s, 2.0 * torch.tanh(s / 2.0)) * 0.3
    seen = ((j + 4 >= i) & (j != 3)) | (j == 0)
    seen = seen & (j <= i) if mode else seen
    want = torch.einsum("hnm,mhd->nhd", s.masked_fill(~seen, -math.inf).softmax(-1), v.repeat_interleave(2, 1))
    close(got, want)


@pytest.mark.parametrize("kind", ("decode", "paged", "ragged"))
@pytest.mark.parametrize("decl", (SIGMOID, "expression"))
def test_wrappers_with_jit_args(kind, decl):
    if decl == "expression":
        decl = va.variant("Sigmoid", logits=va.sigmoid(va.score * va.f32("logits_scale") + va.f32("sigmoid_bias")), softmax=False)
    args = ["test", F16, F16, F16, torch.int32, 64, 64, [], [], ["logits_scale", "sigmoid_bias"], ["double"] * 2, "Sigmoid", decl]
    pages = Pages([9, 20], 4, 2, 64, F16)
    table = (pages.indptr, pages.indices, pages.last, 4, 2, 64, 4)
    types, values = dict(q_data_type=F16, sm_scale=1.0), (0.1, -2.0)
    qo = torch.tensor([0, 1, 2] if kind == "decode" else [0, 3, 5], dtype=torch.int32)
    q = torch.randn(int(qo[-1]), 4, 64).half()
    if kind == "decode":
        wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1), jit_args=args)
        wrapper.plan(*table, **types)
        out = wrapper.run(q, pages.cache, *values)
    elif kind == "paged":
        wrapper = fi.BatchPrefillWithPagedKVCacheWrapper(torch.empty(1), backend="fa2", jit_args=args, jit_kwargs={})
        wrapper.plan(qo, *table, **types)
        out = wrapper.run(q, pages.cache, *values)
    else:
        wrapper = fi.BatchPrefillWithRaggedKVCacheWrapper(torch.empty(1), backend="fa2", jit_args=args)
        wrapper.plan(qo, torch.tensor([0, 9, 29], dtype=torch.int32), 4, 2, 64, **types)
        k, v = (torch.cat(t) for t in zip(pages.request(0), pages.request(1)))
        out = wrapper.run(q, k, v, *values)
    for r in (0, 1):
        want = sigmoid(q[qo[r]:qo[r + 1]], *pages.request(r), *values)
        torch.testing.assert_close(out[qo[r]:qo[r + 1]].float(), want, atol=2e-2, rtol=2e-2)
    with pytest.raises(TypeError, match="positional arguments"):
        plain = fi.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1))
        plain.plan(*table, **types)
        plain.run(torch.randn(2, 4, 64).half(), pages.cache, 1.0)


def test_what_text_cannot_tell_is_named():
    update = MASKED.replace("REGISTER_LOGITS_MASK", "REGISTER_M_D_UPDATE")
    writes = SIGMOID.replace("return math::ptx_rcp", "params.dump[kv_idx] = logits; return math::ptx_rcp")
    unknown = SIGMOID.replace("math::ptx_exp2(", "mystery(")
    other = SIGMOID.replace("{ return output; }", "{ return output * 2.f; }")
    for text, name, what in ((update, "Masked", "M_D_UPDATE"), (writes, "Sigmoid", "statement"), (unknown, "Sigmoid", "mystery"),
                             (other, "Sigmoid", "OUTPUT_TRANSFORM")):
        with pytest.raises(NotImplementedError, match=what):
            single("prefill", text, name, ["custom_mask"], ["uint8_t"], ["sm_scale", "logits_scale", "sigmoid_bias"], ["double"] * 3)
    with pytest.raises(NotImplementedError, match="neither the tensors nor the scalars"):
        single("prefill", SIGMOID, "Sigmoid")
    with pytest.raises(TypeError, match="expected CUDA text"):
        single("prefill", 3, "Sigmoid")
    with pytest.raises(NotImplementedError, match="use_sliding_window"):
        jit.gen_customize_single_decode_module("u", F16, F16, F16, 64, 64, [], [], [], [], "Sigmoid", SIGMOID, 0, True)
    with pytest.raises(NotImplementedError, match="expected one for both parts"):
        jit.gen_customize_pod_module("u", F16, F16, F16, torch.int32, 64, [], [], [], [], "A", "B", SIGMOID)
    with pytest.raises(NotImplementedError, match="sources of one's own"):
        jit.gen_jit_spec("mine", ["a.cu"])
    with pytest.raises(ValueError, match="expected 13"):
        fi.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1), jit_args=["uri"])


def test_functions_of_python():
    q, k, v = torch.randn(5, 4, 32), torch.randn(11, 2, 32), torch.randn(11, 2, 32)

    def custom_attention_score(q, k, params):
        score = q @ k.T
        return score * params.custom_scale

    kernel = jit.compile(custom_attention_score)
    want = attention(q, k, v, 0.3)[0]
    close(kernel.run(q, k, v, SimpleNamespace(custom_scale=0.3)), want)
    close(kernel.run(q, k, v, {"custom_scale": 0.3}), want)
    with pytest.raises(TypeError, match="only product"):
        jit.compile(lambda q, k, params: q @ q)


def test_specifications():
    jit.clear_cache_dir()
    pair = (F16, F16, F16)
    specs = [
        jit.gen_single_decode_module(*pair, 64, 64, 0, False, False), jit.gen_single_prefill_module("fa3", *pair, 64, 64, 0, False, False, False),
        jit.gen_batch_decode_module(*pair, torch.int32, 64, 64, 0, False, False),
        jit.gen_batch_prefill_module("fa2", *pair, torch.int32, 128, 128, 0, False, False, False),
        jit.gen_batch_prefill_attention_sink_module("fa3", *pair, torch.int32, 64, 64, 0, True),
        jit.gen_batch_attention_module(*pair, torch.int32, 64, 64, 0, False, False),
        jit.gen_batch_mla_module("fa2", *pair, torch.int32, 512, 64, False),
        jit.gen_batch_decode_mla_module(*pair, torch.int32, 512, 16, False, False, True),
        jit.gen_pod_module(*pair, 64, 0, False, False, False, torch.int32, 0, False, False),
        jit.gen_fmha_v2_module("SEPARATE_Q_K_V", F16), jit.gen_act_and_mul_module("silu"), jit.gen_norm_module(),
    ]
    names = [s.name for s in specs]
    assert len(set(names)) == len(specs) == len(jit.jit_spec_registry.get_all_specs())
    assert names[3] == (
        "batch_prefill_with_kv_cache_dtype_q_f16_dtype_kv_f16_dtype_o_f16_dtype_idx_i32_head_dim_qk_128_head_dim_vo_128_"
        "posenc_0_use_swa_False_use_logits_cap_False_f16qk_False")
    jit.build_jit_specs(specs)
    for spec in specs:
        assert spec.is_compiled and spec.jit_library_path.exists() and spec.aot_path.exists() and spec.build_and_load() is spec
        assert jit.jit_spec_registry.get_spec_status(spec.name).is_compiled
    jit.check_cuda_arch()
    assert jit.jit_spec_registry.get_spec_status("nothing") is None
