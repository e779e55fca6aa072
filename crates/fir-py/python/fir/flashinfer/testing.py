"""Timing, counts of work, and fp8 by hand, for tests and benchmarks."""

from __future__ import annotations

import math
import os
import random
import statistics
import sys
import time
from typing import Callable, Optional

import torch

from . import _native
from ._core import F32

__all__ = [
    "aggregate_gpu_time_across_ranks", "attention_flops", "attention_flops_with_actual_seq_lens", "attention_tb_per_sec",
    "attention_tb_per_sec_with_actual_seq_lens", "attention_tflops_per_sec",
    "attention_tflops_per_sec_with_actual_seq_lens", "bench_gpu_time", "bench_gpu_time_with_cuda_event",
    "bench_gpu_time_with_cudagraph", "bench_gpu_time_with_cupti", "bench_kineto", "calculate_rotation_count",
    "count_bytes", "dequantize_fp8", "empty_suppress", "get_l2_cache_size", "per_block_cast_to_fp8",
    "per_token_cast_to_fp8", "quantize_fp8", "set_seed", "sleep_after_kernel_run", "suppress_stdout_stderr",
]


def get_l2_cache_size(device=None) -> int:
    """Bytes of a CUDA device's L2 cache."""
    return torch.cuda.get_device_properties(torch.cuda.current_device() if device is None else device).L2_cache_size


def _tensors(x) -> list[torch.Tensor]:
    if isinstance(x, torch.Tensor):
        return [x]
    if isinstance(x, dict):
        x = x.values()
    return [t for item in x for t in _tensors(item)] if isinstance(x, (list, tuple, type({}.values()))) else []


def count_bytes(*tensors) -> int:
    """Bytes of tensors, and of those in lists and tuples."""
    return sum(t.numel() * t.element_size() for t in _tensors(tensors))


def calculate_rotation_count(tensors, device=None, min_rotations: int = 2) -> int:
    """How many copies of tensors must take turns so that none is in the L2 cache: together five times its size."""
    size = count_bytes([t for t in tensors if t.is_cuda])
    limit = 5 * get_l2_cache_size(device)
    return 1 if size == 0 or size >= limit else max(min_rotations, math.ceil(limit / size) + 1)


def set_seed(random_seed: int) -> None:
    """Seeds torch, Python and, where it is there, numpy."""
    torch.manual_seed(random_seed)
    random.seed(random_seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(random_seed)


def sleep_after_kernel_run(execution_time: float) -> None:
    """Lets a device cool: a 200th of the milliseconds in seconds, a second at most."""
    time.sleep(0.01 if math.isinf(execution_time) else min(execution_time / 200, 1.0))


# Work.

def attention_flops(batch_size, qo_seqlen, kv_seqlen, head_dim_qk, head_dim_vo, num_qo_heads, causal):
    """Operations of an attention whose requests are equal: 2 per element of a visible score and of its output."""
    if qo_seqlen > kv_seqlen:
        raise ValueError(f"qo_seqlen is {qo_seqlen}, expected at most kv_seqlen={kv_seqlen}")
    visible = qo_seqlen * (2 * kv_seqlen - qo_seqlen) if causal else 2 * qo_seqlen * kv_seqlen
    return batch_size * visible * num_qo_heads * (head_dim_qk + head_dim_vo)


def attention_flops_with_actual_seq_lens(actual_seq_lens_q, actual_seq_lens_kv, head_dim_qk, head_dim_vo, num_qo_heads,
                                         causal):
    """As :func:`attention_flops`, of requests of these lengths."""
    pairs = zip(actual_seq_lens_q.flatten().tolist(), actual_seq_lens_kv.flatten().tolist())
    return sum(attention_flops(1, q, kv, head_dim_qk, head_dim_vo, num_qo_heads, causal) for q, kv in pairs)


def attention_tflops_per_sec(batch_size, qo_seqlen, kv_seqlen, head_dim_qk, head_dim_vo, num_qo_heads, causal, time):
    """Operations per second, in 10^12; ``time`` in milliseconds."""
    flops = attention_flops(batch_size, qo_seqlen, kv_seqlen, head_dim_qk, head_dim_vo, num_qo_heads, causal)
    return 0.0 if math.isinf(time) else flops / time / 1e9


def attention_tflops_per_sec_with_actual_seq_lens(actual_seq_lens_q, actual_seq_lens_kv, head_dim_qk, head_dim_vo,
                                                  num_qo_heads, causal, ms):
    """Operations per second, in 10^12, of requests of these lengths."""
    flops = attention_flops_with_actual_seq_lens(
        actual_seq_lens_q, actual_seq_lens_kv, head_dim_qk, head_dim_vo, num_qo_heads, causal)
    return 0.0 if math.isinf(ms) else flops / ms / 1e9


def _bytes(q_tokens, kv_tokens, qk, vo, qo_heads, kv_heads, q_dtype, kv_dtype, o_dtype):
    return (q_tokens * qo_heads * (qk * q_dtype.itemsize + vo * o_dtype.itemsize)
            + kv_tokens * kv_heads * (qk + vo) * kv_dtype.itemsize)


def attention_tb_per_sec(batch_size, qo_seqlen, kv_seqlen, head_dim_qk, head_dim_vo, num_qo_heads, num_kv_heads, time,
                         q_dtype=torch.bfloat16, kv_dtype=torch.bfloat16, o_dtype=torch.bfloat16):
    """Bytes of queries, keys, values and outputs per second, in 10^12; ``time`` in milliseconds."""
    size = _bytes(batch_size * qo_seqlen, batch_size * kv_seqlen, head_dim_qk, head_dim_vo, num_qo_heads, num_kv_heads,
                  q_dtype, kv_dtype, o_dtype)
    return 0.0 if math.isinf(time) else size / time / 1e9


def attention_tb_per_sec_with_actual_seq_lens(actual_seq_lens_q, actual_seq_lens_kv, head_dim_qk, head_dim_vo,
                                              num_qo_heads, num_kv_heads, time, q_dtype=torch.bfloat16,
                                              kv_dtype=torch.bfloat16, o_dtype=torch.bfloat16):
    """As :func:`attention_tb_per_sec`, of requests of these lengths."""
    q, kv = (sum(t.flatten().tolist()) for t in (actual_seq_lens_q, actual_seq_lens_kv))
    size = _bytes(q, kv, head_dim_qk, head_dim_vo, num_qo_heads, num_kv_heads, q_dtype, kv_dtype, o_dtype)
    return 0.0 if math.isinf(time) else size / time / 1e9


# Time.

def aggregate_gpu_time_across_ranks(x, op: Callable = max):
    """``op`` over the times of all ranks of ``torch.distributed``, or of this one alone."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return x
    all_ = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(all_, x)
    return op(all_)


def _once(fn, args, kwargs, flush) -> float:
    if torch.cuda.is_available():
        if flush is not None:
            flush.zero_()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        fn(*args, **kwargs)
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end)
    start = time.perf_counter()
    fn(*args, **kwargs)
    return (time.perf_counter() - start) * 1e3


def bench_gpu_time_with_cuda_event(
    fn, dry_run_iters: Optional[int] = None, repeat_iters: Optional[int] = None, dry_run_time_ms: int = 25,
    repeat_time_ms: int = 100, l2_flush: Optional[bool] = None, l2_flush_size_mb: Optional[int] = None,
    l2_flush_device: Optional[str] = None, sleep_after_run: bool = False, input_args: tuple = (),
    input_kwargs: Optional[dict] = None, cold_l2_cache: bool = True, aggregate_op: Callable = max,
) -> list[float]:
    """Milliseconds of each call of ``fn``: CUDA events, or the clock on a machine without a device. With
    ``cold_l2_cache`` twice the L2 cache is overwritten before each."""
    kwargs = input_kwargs or {}
    flush = None
    if torch.cuda.is_available() and (cold_l2_cache if l2_flush is None else l2_flush):
        size = 2 * get_l2_cache_size() if l2_flush_size_mb is None else l2_flush_size_mb << 20
        flush = torch.empty(size, dtype=torch.uint8, device=l2_flush_device or "cuda")
    _once(fn, input_args, kwargs, flush)
    estimate = max(statistics.median(_once(fn, input_args, kwargs, flush) for _ in range(5)), 1e-3)
    dry = max(1, int(dry_run_time_ms / estimate)) if dry_run_iters is None else dry_run_iters
    repeat = max(1, int(repeat_time_ms / estimate)) if repeat_iters is None else repeat_iters
    for _ in range(dry):
        _once(fn, input_args, kwargs, flush)
    times = []
    for _ in range(repeat):
        times.append(_once(fn, input_args, kwargs, flush))
        if sleep_after_run:
            sleep_after_kernel_run(estimate)
    return [aggregate_gpu_time_across_ranks(t, aggregate_op) for t in times]


def bench_gpu_time_with_cupti(fn, *args, use_cuda_graph: bool = False, **kwargs) -> list[float]:
    """As :func:`bench_gpu_time_with_cuda_event`: kernels are not told apart by CUPTI."""
    return bench_gpu_time(fn, *args, use_cuda_graph=use_cuda_graph, **kwargs)


def bench_gpu_time_with_cudagraph(fn, *args, num_iters_within_graph: int = 10, input_args: tuple = (),
                                  input_kwargs: Optional[dict] = None, **kwargs) -> list[float]:
    """Milliseconds of a call when ``num_iters_within_graph`` are captured and replayed as one."""
    if not torch.cuda.is_available():
        raise RuntimeError("bench_gpu_time_with_cudagraph needs a CUDA device")
    given = input_kwargs or {}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        fn(*input_args, **given)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(num_iters_within_graph):
            fn(*input_args, **given)
    return [t / num_iters_within_graph for t in bench_gpu_time_with_cuda_event(graph.replay, *args, **kwargs)]


def bench_gpu_time(fn, *args, enable_cupti: bool = False, use_cuda_graph: bool = False,
                   num_iters_within_graph: int = 10, **kwargs) -> list[float]:
    """Milliseconds of each call of ``fn``, by events or by replays of a graph; ``enable_cupti`` is ignored."""
    if use_cuda_graph:
        return bench_gpu_time_with_cudagraph(fn, *args, num_iters_within_graph=num_iters_within_graph, **kwargs)
    return bench_gpu_time_with_cuda_event(fn, *args, **kwargs)


class empty_suppress:
    """A context that does nothing."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


class suppress_stdout_stderr:
    """A context in which the process writes to nowhere, its libraries included."""

    def __enter__(self):
        sys.stdout.flush(), sys.stderr.flush()
        self._null, self._streams = open(os.devnull, "w"), (sys.stdout, sys.stderr)
        self._saved = [os.dup(1), os.dup(2)]
        os.dup2(self._null.fileno(), 1), os.dup2(self._null.fileno(), 2)
        sys.stdout = sys.stderr = self._null
        return self

    def __exit__(self, *_):
        sys.stdout, sys.stderr = self._streams
        for to, saved in enumerate(self._saved, 1):
            os.dup2(saved, to), os.close(saved)
        self._null.close()


def bench_kineto(fn, kernel_names, num_tests: int = 30, suppress_kineto_output: bool = False,
                 trace_path: Optional[str] = None, flush_l2: bool = True, with_multiple_kernels: bool = False):
    """Mean seconds of the kernels whose names contain ``kernel_names`` (a text or several), by torch's profiler."""
    if not torch.cuda.is_available():
        raise RuntimeError("bench_kineto needs a CUDA device")
    activities = [torch.profiler.ProfilerActivity.CUDA]
    fn()
    flush = torch.empty(2 * get_l2_cache_size(), dtype=torch.uint8, device="cuda") if flush_l2 else None
    with (suppress_stdout_stderr if suppress_kineto_output else empty_suppress)():
        with torch.profiler.profile(activities=activities) as profile:
            for _ in range(num_tests):
                if flush is not None:
                    flush.zero_()
                fn()
            torch.cuda.synchronize()
    if trace_path is not None:
        profile.export_chrome_trace(trace_path)
    names = (kernel_names,) if isinstance(kernel_names, str) else tuple(kernel_names)
    found = []
    for name in names:
        rows = [e for e in profile.key_averages() if name in e.key]
        if not rows or (len(rows) > 1 and not with_multiple_kernels):
            raise ValueError(f"{len(rows)} kernels have {name!r} in their names, expected one")
        found.append(sum(e.device_time_total for e in rows) / 1e6 / num_tests)
    return found[0] if isinstance(kernel_names, str) else tuple(found)


# fp8.

def per_token_cast_to_fp8(x: torch.Tensor):
    """``[m, n]`` to e4m3 and a scale per 128 elements of a row, ``[m, n / 128]``, f32."""
    return _cast(x, (1, 128))


def per_block_cast_to_fp8(x: torch.Tensor):
    """``[m, n]`` to e4m3 and a scale per 128 x 128, f32."""
    return _cast(x, (128, 128))


def _cast(x: torch.Tensor, block):
    counts = tuple(-(-n // b) for n, b in zip(x.shape[-2:], block))
    out = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((*x.shape[:-2], *counts), dtype=F32, device=x.device)
    _native.quantize_fp8(x, block, out, scales)
    return out, scales


def quantize_fp8(x: torch.Tensor, scale_shape, tile_shape, scale_major_mode: str):
    """e4m3 and f32 scales of tiles; scales are transposed unless ``scale_major_mode`` is ``"K"``. Scales are
    ``max / 448``, not rounded to powers of two."""
    if x.dim() == 3 and tile_shape[0] != 1:
        raise NotImplementedError(f"tile_shape {tuple(tile_shape)}, expected tiles within one matrix")
    out, scales = _cast(x, tuple(tile_shape[-2:]))
    scales = scales if scale_major_mode == "K" else scales.transpose(-1, -2).contiguous()
    if scales.shape != tuple(scale_shape):
        raise ValueError(f"scale_shape is {tuple(scale_shape)}, expected {tuple(scales.shape)}")
    return out, scales


def dequantize_fp8(x: torch.Tensor, x_scale: torch.Tensor, scale_major_mode: str) -> torch.Tensor:
    """The numbers of :func:`quantize_fp8`, f32."""
    scales = x_scale if scale_major_mode == "K" else x_scale.transpose(-1, -2).contiguous()
    out = torch.empty(x.shape, dtype=F32, device=x.device)
    block = tuple(n // s for n, s in zip(x.shape[-2:], scales.shape[-2:]))
    _native.dequantize_fp8(x, scales, block, out)
    return out
