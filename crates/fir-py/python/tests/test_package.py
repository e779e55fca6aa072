"""The package itself: its own API, variants, errors, and that torch does none of the arithmetic."""

import subprocess
import sys
import threading

import pytest
import torch
from conftest import Pages, attention, close, visible
from torch.utils._python_dispatch import TorchDispatchMode

import fir
import fir.flashinfer as fi
from fir import variant as va


@pytest.mark.cpu
def test_own_api_and_numpy():
    numpy = pytest.importorskip("numpy")
    x, w = torch.randn(3, 16), torch.randn(16)
    want = fir.rms_norm(x, w)
    got = fir.rms_norm(x.numpy(), w.numpy())
    assert isinstance(got, numpy.ndarray) and torch.equal(torch.from_numpy(got), want)
    locked = x.numpy().copy()
    locked.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        fir.rms_norm(x.numpy(), w.numpy(), out=locked)
    pages = Pages([5, 30], 4, 2, 32, torch.float32)
    q = torch.randn(2, 4, 32)
    plan = fir.DecodePlan(q, page_size=4, indptr=pages.indptr, indices=pages.indices, kv_lens=pages.lens, qo_heads=4,
                          kv_heads=2, head_dim=32, dtype="f32")
    for r in (0, 1):
        close(plan.run(q, *pages.cache)[r], attention(q[r : r + 1], *pages.request(r))[0][0])
    assert plan.scratch_bytes > 0


def test_variants_in_python():
    q, k, v = torch.randn(6, 4, 32), torch.randn(20, 2, 32), torch.randn(20, 2, 32)
    cap, left = va.f32("cap"), va.i32("left")
    mine = va.variant("Mine", logits=cap * va.tanh(va.score / cap), mask=(va.kv_pos <= va.q_pos) & (va.kv_pos + left >= va.q_pos))
    out = fir.single_prefill(q, k, v, mine, params={"cap": 4.0, "left": 3})
    close(out, attention(q, k, v, mask=visible(6, 20, True, 3), soft_cap=4.0)[0])
    same = va.variant("Mine", logits=cap * va.tanh(va.score / cap), mask=(va.kv_pos <= va.q_pos) & (va.kv_pos + left >= va.q_pos))
    assert mine == same and hash(mine) == hash(same) and [p for p, _ in mine.params] == ["cap", "left"]
    library = va.causal() & va.sliding_window() & va.soft_cap()
    close(fir.single_prefill(q, k, v, library, params={"window_left": 3, "soft_cap": 4.0}), out)
    table = va.f32_tensor("bias")
    biased = va.variant("Biased", logits=va.score + table[(va.q_pos - va.kv_pos) // 2 % 8] + va.where(va.kv_head == 0, 1.0, 0.0))
    i = torch.arange(6)[:, None] + 14 - torch.arange(20)[None]
    values = torch.randn(8)
    bias = values[torch.div(i, 2, rounding_mode="floor") % 8]
    close(fir.single_prefill(q, k, v, biased, params={"bias": values}), attention(q, k, v, bias=bias)[0])
    weight = va.variant("Weights", logits=va.sigmoid(va.score - 1.0), softmax=False)
    s = torch.einsum("nhd,mhd->hnm", q, k.repeat_interleave(2, 1)) / 32**0.5
    close(fir.single_prefill(q, k, v, weight), torch.einsum("hnm,mhd->nhd", (s - 1).sigmoid(), v.repeat_interleave(2, 1)))
    with pytest.raises(TypeError, match="truth value"):
        bool(va.kv_pos < va.q_pos)
    with pytest.raises(ValueError, match="score"):
        va.variant("Wrong", mask=va.score < 0.0)
    with pytest.raises(ValueError, match="cap"):
        fir.single_prefill(q, k, v, mine, params={"left": 3})


@pytest.mark.cpu  # Page ids on a device are not looked at.
def test_errors_name_the_argument_and_both_values():
    x, w = torch.randn(2, 8), torch.randn(8)
    with pytest.raises(ValueError, match=r"`weight` has hidden=3, but `x` bound hidden=8"):
        fir.rms_norm(x, w[:3])
    with pytest.raises(TypeError, match="`out` is bf16, expected f32"):
        fir.rms_norm(x, w, out=x.bfloat16())
    with pytest.raises(TypeError, match="expected a tensor"):
        fir.rms_norm([1.0], w, out=x)
    with pytest.raises(ValueError, match="`dtype` is code 2, 64 bits"):
        fir.rms_norm(x.double(), w)
    wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1))
    with pytest.raises(RuntimeError, match="plan"):
        wrapper.run(torch.empty(1, 1, 8), torch.empty(1, 2, 1, 1, 8))
    one = torch.tensor([0, 1], dtype=torch.int32)
    wrapper.plan(one, torch.tensor([5], dtype=torch.int32), one[1:], 1, 1, 8, 1, q_data_type="float32")
    with pytest.raises(ValueError, match="page table"):
        wrapper.run(torch.empty(1, 1, 8), torch.empty(3, 2, 1, 1, 8))
    with pytest.raises(ValueError, match="does not match the q_data_type"):
        wrapper.run(torch.empty(1, 1, 8).half(), torch.empty(6, 2, 1, 1, 8))
    with pytest.raises(NotImplementedError, match="head_dim_qk 1000"):
        wrapper.plan(one, one[:1], one[1:], 1, 1, 1000, 1)
    with pytest.raises(NotImplementedError, match="Blackwell"):
        fi.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1), backend="trtllm-gen")
    with pytest.raises(NotImplementedError, match="Blackwell"):
        fi.mm_fp4()
    shared = torch.randn(4, 8)
    with pytest.raises(ValueError, match="share memory"):
        fir.fused_add_rms_norm(shared[:3], shared[1:], w)


class NoArithmetic(TorchDispatchMode):
    """Lets torch make, view and copy tensors, and nothing else."""

    ALLOWED = ("empty", "view", "reshape", "transpose", "slice", "select", "unsqueeze", "expand", "copy_", "clone",
               "_to_copy", "contiguous", "detach", "alias", "full", "zeros", "fill_", "lift_fresh", "unflatten", "t.",
               "_local_scalar_dense", "random_", "squeeze", "permute", "new_empty", "as_strided", "is_pinned", "zero_", "index_select", "split")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func).removeprefix("aten.")
        if not name.startswith(self.ALLOWED):
            raise AssertionError(f"torch computes {func}")
        return func(*args, **(kwargs or {}))


def test_torch_does_no_arithmetic():
    pages = Pages([9, 20], 4, 2, 32, torch.float32)
    qo, q = torch.tensor([0, 3, 5], dtype=torch.int32), torch.randn(5, 4, 32)
    k, v, mask = torch.randn(20, 2, 32), torch.randn(20, 2, 32), torch.rand(5, 20) < 0.5
    p, w, x = torch.rand(2, 16), torch.randn(64), torch.randn(5, 64)
    with NoArithmetic():
        with pytest.raises(AssertionError, match="torch computes"):
            _ = p + p
        decode = fi.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1))
        decode.plan(pages.indptr, pages.indices, pages.last, 4, 2, 32, 4, q_data_type="float32", logits_soft_cap=2.0)
        decode.run(q[:2], pages.cache, q_scale=0.5, return_lse=True)
        prefill = fi.BatchPrefillWithPagedKVCacheWrapper(torch.empty(1))
        prefill.plan(qo, pages.indptr, pages.indices, pages.last, 4, 2, 32, 4, causal=True, q_data_type="float32")
        out, lse = prefill.run(q, pages.cache, return_lse=True)
        fi.merge_state(out, lse, out, lse)
        fi.single_prefill_with_kv_cache(q, k, v, custom_mask=mask)
        fi.single_decode_with_kv_cache(q[0], k, v, pos_encoding_mode="ALIBI")
        fi.rmsnorm(x, w)
        fi.fused_add_rmsnorm(x.clone(), x.clone(), w)
        fi.silu_and_mul(x)
        fi.apply_rope_pos_ids(q, q, torch.tensor([1, 2, 3, 4, 5]))
        fi.sampling_from_probs(p)
        fi.top_k_top_p_sampling_from_logits(p, 3, 0.5)
        fi.top_p_renorm_probs(p, torch.tensor([0.5, 0.7]))
        batch, pos = fi.get_batch_indices_positions(torch.tensor([0, 1, 2]).int(), pages.lens, 2)
        fi.append_paged_kv_cache(k[:2], v[:2], batch, pos, pages.cache, pages.indices, pages.indptr, pages.last)
        fi.mm_bf16(x, x.transpose(0, 1), out_dtype=torch.float32)
        fi.top_k(p, 3)
        half = torch.bfloat16
        fi.cutlass_fused_moe(x.to(half), torch.zeros((5, 2), dtype=torch.int32), torch.zeros((5, 2)), torch.zeros((3, 32, 64), dtype=half),
                             torch.zeros((3, 64, 16), dtype=half), half, [])
        fi.fused_qk_rmsnorm_rope(torch.zeros((6, 192), dtype=half), w.to(half), w.to(half), ppf=1, pph=2, ppw=3, num_frame_channels=32,
                                 num_height_channels=16, num_width_channels=16, num_heads_q=1, num_heads_k=1, num_heads_v=1, head_dim=64, output_fp8=True)
        codes, scales = torch.zeros((8, 2, 4, 2, 16), dtype=torch.uint8), torch.zeros((8, 2, 4, 2, 2), dtype=torch.uint8)
        fi.nvfp4_kv_dequantize_paged(codes, scales, torch.zeros((2, 5), dtype=torch.int32), pages.lens, torch.full((1,), 0.5), torch.full((1,), 0.5),
                                     torch.zeros((2, 20, 2, 32), dtype=half), torch.zeros((2, 20, 2, 32), dtype=half))
        fi.per_token_group_quant_8bit(x, 32, column_major_scales=True)
        fi.testing.per_token_cast_to_fp8(torch.zeros((4, 128)))
        fi.mla.BatchMLAPagedAttentionWrapper(torch.empty(1))
        sink = fi.BatchAttentionWithAttentionSinkWrapper(torch.empty(1))
        sink.plan(qo, pages.indptr, pages.indices, pages.last, 4, 2, 32, 4, causal=True, q_data_type="float32")
        sink.run(q, pages.cache, torch.zeros(4), 0.1)


def test_threads_may_share_a_plan():
    pages = Pages([300, 80], 16, 2, 64, torch.float32)
    q = torch.randn(2, 8, 64)
    wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1))
    wrapper.plan(pages.indptr, pages.indices, pages.last, 8, 2, 64, 16, q_data_type="float32")
    want, results = wrapper.run(q, pages.cache), []
    work = lambda: results.extend(torch.equal(wrapper.run(q, pages.cache), want) for _ in range(50))
    threads = [threading.Thread(target=work) for _ in range(4)]
    [t.start() for t in threads], [t.join() for t in threads]
    assert len(results) == 200 and all(results)


def test_install_and_check():
    code = (
        "import fir.flashinfer as f; f.install(); import flashinfer, flashinfer.decode, flashinfer.sampling as s;"
        "from flashinfer import BatchDecodeWithPagedKVCacheWrapper as B; from flashinfer.utils import FP4Tensor;"
        "from flashinfer.decode import fast_decode_plan, trtllm_batch_decode_with_kv_cache;"
        "assert B is f.BatchDecodeWithPagedKVCacheWrapper and s.softmax is f.softmax and flashinfer.__version__ == '0.6.17'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    from fir.flashinfer.check import table

    rows = table()
    assert len(rows) > 150
    for module, name, status in rows:
        there = hasattr(getattr(fi, module, None) or sys.modules[f"fir.flashinfer.{module}"], name)
        assert there == (status != "missing") or module == "topk", (module, name, status)
