"""Utilities for tests and benchmarks, definitions of operators, the tuner's names."""

import json
import math
import os
import subprocess
import sys
import time

import pytest
import torch
from conftest import Pages, close

import fir.flashinfer as fi
from fir.flashinfer import autotuner, testing
from fir.flashinfer._traces import TRACES
from fir.flashinfer.fi_trace import fi_trace


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("q_len,kv_len", ((1, 7), (5, 5), (3, 9)))
def test_work(causal, q_len, kv_len):
    batch, qk, vo, heads, kv_heads = 3, 64, 128, 4, 2
    # Of a causal triangle FlashInfer counts its area, half of the diagonal included.
    pairs = q_len * kv_len - (q_len * q_len / 2 if causal else 0)
    want = batch * heads * 2 * pairs * (qk + vo)
    assert testing.attention_flops(batch, q_len, kv_len, qk, vo, heads, causal) == want
    q_lens, kv_lens = torch.full((batch,), q_len), torch.full((batch,), kv_len)
    assert testing.attention_flops_with_actual_seq_lens(q_lens, kv_lens, qk, vo, heads, causal) == want
    assert testing.attention_tflops_per_sec(batch, q_len, kv_len, qk, vo, heads, causal, 2.0) == pytest.approx(want / 2e-3 / 1e12)
    assert testing.attention_tflops_per_sec_with_actual_seq_lens(q_lens, kv_lens, qk, vo, heads, causal, 2.0) == pytest.approx(want / 2e-3 / 1e12)
    size = batch * (q_len * heads * (qk * 4 + vo * 2) + kv_len * kv_heads * (qk + vo) * 1)
    types = dict(q_dtype=torch.float32, kv_dtype=torch.float8_e4m3fn, o_dtype=torch.float16)
    assert testing.attention_tb_per_sec(batch, q_len, kv_len, qk, vo, heads, kv_heads, 4.0, **types) == pytest.approx(size / 4e-3 / 1e12)
    assert testing.attention_tb_per_sec_with_actual_seq_lens(q_lens, kv_lens, qk, vo, heads, kv_heads, 4.0, **types) == pytest.approx(size / 4e-3 / 1e12)
    assert testing.attention_tflops_per_sec(batch, q_len, kv_len, qk, vo, heads, causal, math.inf) == 0.0
    with pytest.raises(ValueError, match="qo_seqlen is 9"):
        testing.attention_flops(1, 9, 3, qk, vo, heads, causal)


@pytest.mark.cpu
def test_time():
    calls = []
    times = testing.bench_gpu_time(lambda a, b=0: (calls.append((a, b)), time.sleep(0.002)), dry_run_iters=2, repeat_iters=5,
                                   input_args=(1,), input_kwargs={"b": 2})
    assert len(times) == 5 and all(1.9 <= t < 50 for t in times) and len(calls) == 6 + 2 + 5 and set(calls) == {(1, 2)}
    assert len(testing.bench_gpu_time_with_cupti(lambda: None, dry_run_iters=1, repeat_iters=3, sleep_after_run=True)) == 3
    assert len(testing.bench_gpu_time_with_cuda_event(lambda: time.sleep(0.001), dry_run_time_ms=3, repeat_time_ms=8)) >= 2
    assert testing.aggregate_gpu_time_across_ranks(3.0, max) == 3.0
    for call in (lambda: testing.bench_gpu_time(lambda: None, use_cuda_graph=True), lambda: testing.bench_kineto(lambda: None, "k")):
        if not torch.cuda.is_available():
            with pytest.raises(RuntimeError, match="needs a CUDA device"):
                call()
    assert testing.count_bytes(torch.empty(3), [torch.empty(2, dtype=torch.int8)], {"a": torch.empty(1)}) == 18
    assert testing.calculate_rotation_count([]) == 1 if torch.cuda.is_available() else True
    testing.set_seed(3)
    first = torch.rand(2)
    testing.set_seed(3)
    assert torch.equal(first, torch.rand(2))
    start = time.perf_counter()
    testing.sleep_after_kernel_run(2.0)
    testing.sleep_after_kernel_run(math.inf)
    assert 0.02 <= time.perf_counter() - start < 1.0
    with testing.empty_suppress():
        pass


@pytest.mark.cpu
def test_silence(capfd):
    print("before", flush=True)
    with testing.suppress_stdout_stderr():
        print("hidden", flush=True)
        os.write(2, b"hidden too")
    print("after", flush=True)
    out, err = capfd.readouterr()
    assert out.split() == ["before", "after"] and err == ""


@pytest.mark.parametrize("mode", ("K", "MN"))
@pytest.mark.parametrize("tile", ((1, 128), (128, 128), (64, 32)))
def test_fp8(mode, tile):
    x = torch.randn(128, 256)
    counts = (128 // tile[0], 256 // tile[1])
    q, scales = testing.quantize_fp8(x, counts if mode == "K" else counts[::-1], tile, mode)
    tiles = x.view(counts[0], tile[0], counts[1], tile[1]).abs().amax((1, 3)) / 448
    close(scales if mode == "K" else scales.T, tiles)
    torch.testing.assert_close(testing.dequantize_fp8(q, scales, mode), x, atol=0.3, rtol=0.07)
    many, many_scales = testing.quantize_fp8(x.view(2, 64, 256), (2, 64 // min(tile[0], 64), counts[1]), (1, min(tile[0], 64), tile[1]), "K")
    torch.testing.assert_close(testing.dequantize_fp8(many, many_scales, "K").view(128, 256), x, atol=0.3, rtol=0.07)
    token, s = testing.per_token_cast_to_fp8(x)
    close(token.float() * s.repeat_interleave(128, 1), testing.dequantize_fp8(token, s, "K"))
    block, s = testing.per_block_cast_to_fp8(torch.randn(130, 200))
    assert block.shape == (130, 200) and s.shape == (2, 2)
    with pytest.raises(ValueError, match="scale_shape"):
        testing.quantize_fp8(x, (1, 1), tile, "K")
    with pytest.raises(NotImplementedError, match="within one matrix"):
        testing.quantize_fp8(x.view(2, 64, 256), (1, 1, 1), (2, 64, 256), "K")


def test_tuner(tmp_path):
    with autotuner.autotune(True, cache="x", tuning_buckets=(1,), round_up=True, skip_ops="all"):
        tuner = autotuner.AutoTuner.get()
    tuner.clear_cache(), tuner.reset_statistics(), tuner.save_configs(str(tmp_path / "c.json"))
    assert json.loads((tmp_path / "c.json").read_text()) == {} and not tuner.load_configs("c") and tuner is autotuner.AutoTuner.get()
    autotuner.set_autotune_process_group("g")
    assert autotuner.get_autotune_process_group() == "g"
    autotuner.set_autotune_process_group(None)


# Definitions: each has its axes from a call's tensors, and a reference that says what the operator does.

def arguments(api: str) -> dict:
    """Tensors of a call, by argument, of every operator that has a definition."""
    x, w, h = torch.randn(3, 32), torch.randn(32), torch.randn(3, 16, 32)
    probs = torch.randn(3, 50).softmax(-1)
    q, k, v = torch.randn(6, 4, 32), torch.randn(9, 2, 32), torch.randn(9, 2, 32)
    name = api.split(".")[-1]
    if api.startswith("norm."):
        base = {"input": x, "weight": w, "residual": torch.randn(3, 32), "gemma": w, "beta": torch.randn(32)}
        wanted = {"layernorm": ("input", "gemma", "beta")}.get(name, ("input", "residual", "weight") if "add" in name else ("input", "weight"))
        return {n: base[n] for n in wanted}
    if api.startswith("activation."):
        return {"input": x}
    if api.startswith("rope."):
        places = {"pos_ids": torch.arange(6)} if "pos_ids" in name else {
            "indptr": torch.tensor([0, 2, 6], dtype=torch.int32), "offsets": torch.tensor([3, 0], dtype=torch.int32)}
        return {"q": q, "k": torch.randn(6, 2, 32), **places}
    if api.startswith("sampling."):
        base = {"logits": torch.randn(3, 50)} if "logits" in name or name == "softmax" else {"probs": probs}
        return {**base, **{n: value for n, value in (("top_k", 5), ("top_p", 0.7), ("min_p", 0.1)) if n in name}}
    return {
        "cascade.merge_state": {"v_a": h, "s_a": torch.randn(3, 16), "v_b": h + 1, "s_b": torch.randn(3, 16)},
        "cascade.merge_states": {"v": torch.randn(3, 5, 4, 32), "s": torch.randn(3, 5, 4)},
        "gemm.mm_bf16": {"a": x.bfloat16(), "b": torch.randn(32, 16).bfloat16()},
        "gemm.bmm_bf16": {"A": h.bfloat16(), "B": torch.randn(3, 32, 16).bfloat16()},
        "topk.top_k": {"input": torch.randn(3, 50), "k": 4},
        "decode.single_decode_with_kv_cache": {"q": q[0], "k": k, "v": v},
        "prefill.single_prefill_with_kv_cache": {"q": q, "k": k, "v": v},
    }.get(api, {})


def function(api: str):
    found = fi
    for name in api.split("."):
        found = sys.modules[f"fir.flashinfer.{name}"] if found is fi else getattr(found, name)
    return found


@pytest.mark.parametrize("api", [api for api in TRACES if not api.endswith(".run")])
def test_definitions_say_what_operators_do(api, tmp_path):
    call, args = function(api), arguments(api)
    defined = call.fi_trace(save_dir=tmp_path, **args)
    assert json.loads((tmp_path / f"{defined['name']}.json").read_text()) == defined == fi_trace(call, **args)
    assert any(t == f"fi_api:flashinfer.{api}" for t in defined["tags"]) and defined["outputs"]
    for name, tensor in defined["inputs"].items():
        assert tensor["dtype"] and all(axis in defined["axes"] for axis in tensor["shape"] or ())
    assert all("value" in a for a in defined["axes"].values() if a["type"] == "const")
    if "sampling_from" in api:
        return  # Draws are random.
    space = {}
    exec(defined["reference"], space)
    copies = [a.clone() if isinstance(a, torch.Tensor) else a for a in args.values()]
    want = space["run"](*copies)
    got = call(**args)
    if got is None:  # In place: what was given, in the order of the outputs.
        got = tuple(args[n] for n in (("input", "residual") if "norm" in api else ("q", "k")))
    want, got = (r if isinstance(r, tuple) else (r,) for r in (want, got))
    if "top_k" == api.split(".")[-1]:
        want, got = ([x.sort(-1).values for x in pair] for pair in (want, got))
    assert len(want) == len(got) == len(defined["outputs"])
    for g, w in zip(got, want):
        torch.testing.assert_close(g.float(), w.float(), atol=2e-2 if g.dtype == torch.bfloat16 else 1e-4, rtol=1e-2)


def test_definitions_of_plans():
    pages = Pages([9, 20], 4, 2, 64, torch.float32)
    q = torch.randn(2, 4, 64)
    one = torch.tensor([0, 1, 2], dtype=torch.int32)
    calls = {
        fi.BatchDecodeWithPagedKVCacheWrapper: dict(q=q, paged_kv_cache=pages.cache),
        fi.BatchPrefillWithPagedKVCacheWrapper: dict(q=q, paged_kv_cache=pages.kv),
        fi.BatchPrefillWithRaggedKVCacheWrapper: dict(q=q, k=torch.randn(9, 2, 64), v=torch.randn(9, 2, 64)),
        fi.BatchMLAPagedAttentionWrapper: dict(q_nope=torch.randn(2, 4, 512), q_pe=torch.randn(2, 4, 64),
                                               ckv_cache=torch.randn(8, 4, 512), kpe_cache=torch.randn(8, 4, 64)),
    }
    names = [cls.run.fi_trace(**args)["name"] for cls, args in calls.items()]
    assert names == ["gqa_paged_decode_h4_kv2_d64_ps4", "gqa_paged_prefill_h4_kv2_d64_ps4", "gqa_ragged_h4_kv2_d64",
                     "mla_paged_decode_h4_ckv512_kpe64_ps4"]
    wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1))
    wrapper.plan(pages.indptr, pages.indices, pages.last, 4, 2, 64, 4, q_data_type=torch.float32)
    space = {}
    exec(fi_trace(wrapper.run, q=q, paged_kv_cache=pages.cache)["reference"], space)
    want, lse = space["run"](q, *pages.cache, pages.indptr, pages.indices, pages.last, 0.125)
    got, got_lse = wrapper.run(q, pages.cache, return_lse=True)
    close(got, want), close(got_lse, lse)
    prefill = fi.BatchPrefillWithPagedKVCacheWrapper(torch.empty(1))
    prefill.plan(one, pages.indptr, pages.indices, pages.last, 4, 2, 64, 4, causal=True, q_data_type=torch.float32)
    exec(fi_trace(prefill.run, q=q, paged_kv_cache=pages.cache)["reference"], space)
    close(prefill.run(q, pages.cache), space["run"](q, *pages.cache, one, pages.indptr, pages.indices, pages.last, 0.125)[0])
    with pytest.raises(ValueError, match="paged_kv_cache is missing"):
        fi.BatchDecodeWithPagedKVCacheWrapper.run.fi_trace(q=q)
    with pytest.raises(ValueError, match="has head_dim=32, expected 64"):
        fi.single_decode_with_kv_cache.fi_trace(q=q[0], k=torch.randn(3, 2, 32), v=torch.randn(3, 2, 64))
    with pytest.raises(ValueError, match="has no definition"):
        fi_trace(fi.utils.next_positive_power_of_2)


@pytest.mark.cpu
def test_definitions_are_dumped(tmp_path):
    code = ("import torch, fir.flashinfer as f; x = torch.randn(3, 16)\n"
            "for _ in range(2): f.rmsnorm(x, x[0]); f.norm.rmsnorm(x, x[0], eps=1e-5)\n"
            "f.silu_and_mul(x)")
    env = {**os.environ, "FLASHINFER_TRACE_DUMP": "1", "FLASHINFER_TRACE_DUMP_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=env)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["rmsnorm_h16.json", "silu_and_mul_h16.json"]
