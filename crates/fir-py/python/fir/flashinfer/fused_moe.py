"""Mixtures of experts: routing, and the experts' layers."""

from __future__ import annotations

import math
import weakref
from enum import IntEnum
from typing import Optional

import torch

from .. import _fir
from ._core import F32, I32, dtype_of, refuse

__all__ = [
    "ActivationType", "RoutingMethodType", "alloc_scratchpad", "bgmv_moe", "bgmv_moe_expand", "bgmv_moe_shrink",
    "cutlass_fused_moe", "cutlass_fused_moe_workspace_size", "fill_w_ptr", "fused_topk_deepseek",
    "get_scratchpad_size_bytes", "has_bgmv_moe", "has_monomoe", "hash_topk", "interleave_for_tma_wgmma_up",
    "max_num_padded_tokens", "mono_moe",
]


class ActivationType(IntEnum):
    """The function between an expert's two products."""

    Gelu = 0
    Relu = 1
    Silu = 2
    Swiglu = 3
    Geglu = 4
    SwigluBias = 5
    Relu2 = 6
    SwigluStep = 7
    GegluTanh = 8
    Identity = 9
    Situ = 10
    InvalidType = 11


class RoutingMethodType(IntEnum):
    """How logits become experts and weights."""

    Default = 0
    Renormalize = 1
    DeepSeekV3 = 2
    Llama4 = 3
    RenormalizeNaive = 4
    TopK = 5
    SigmoidRenorm = 6
    MiniMax2 = 7
    Sigmoid = 8
    TopKSigmoid = 9
    Unspecified = 10


_GATES = {ActivationType.Swiglu: "silu", ActivationType.Geglu: "gelu", ActivationType.GegluTanh: "gelu_tanh"}


def fused_topk_deepseek(
    scores: torch.Tensor, bias: torch.Tensor, n_group: int, topk_group: int, topk: int, routed_scaling_factor: float,
    topk_values: torch.Tensor, topk_indices: torch.Tensor, launch_with_pdl: bool = True,
    routing_replay_out: Optional[torch.Tensor] = None, *, backend: str = "default",
) -> None:
    """DeepSeek's routing: sigmoid scores, groups by the sum of their two best, weights that sum to the factor. Writes
    ``topk_values`` and ``topk_indices``, ``[tokens, topk]``. ``launch_with_pdl`` and ``backend`` are ignored."""
    if routing_replay_out is not None:
        refuse("routing_replay_out", "a tensor", "None")
    if topk_values.shape[1] != topk:
        raise ValueError(f"topk_values has {topk_values.shape[1]} columns, expected topk={topk}")
    ids = topk_indices if topk_indices.dtype == I32 else torch.empty_like(topk_indices, dtype=I32)
    weights = topk_values if topk_values.dtype == F32 else torch.empty_like(topk_values, dtype=F32)
    _fir.moe_route(scores, bias, ids, weights, score="sigmoid", groups=(n_group, topk_group), scale=routed_scaling_factor)
    if ids is not topk_indices:
        topk_indices.copy_(ids)
    if weights is not topk_values:
        topk_values.copy_(weights)


#: Weights whose halves were exchanged, by the tensor that they were made of.
_EXCHANGED: dict[int, tuple] = {}


def _gates_first(w: torch.Tensor) -> torch.Tensor:
    """``[experts, up then gate, ...]`` as gate then up: a copy that is kept while ``w`` lives and is not written."""
    version = 0 if w.is_inference() else w._version
    known = _EXCHANGED.get(id(w))
    if known is not None and known[0]() is w and known[1] == (w.data_ptr(), version):
        return known[2]
    half, copy = w.shape[1] // 2, torch.empty_like(w)
    copy[:, :half].copy_(w[:, half:])
    copy[:, half:].copy_(w[:, :half])
    gone = weakref.ref(w, lambda _, key=id(w): _EXCHANGED.pop(key, None))
    _EXCHANGED[id(w)] = (gone, (w.data_ptr(), version), copy)
    return copy


def cutlass_fused_moe(
    input: torch.Tensor, token_selected_experts: torch.Tensor, token_final_scales: torch.Tensor,
    fc1_expert_weights: torch.Tensor, fc2_expert_weights: torch.Tensor, output_dtype: torch.dtype, quant_scales,
    fc1_expert_biases: Optional[torch.Tensor] = None, fc2_expert_biases: Optional[torch.Tensor] = None,
    input_sf: Optional[torch.Tensor] = None, swiglu_alpha: Optional[torch.Tensor] = None,
    swiglu_beta: Optional[torch.Tensor] = None, swiglu_limit: Optional[torch.Tensor] = None, tp_size: int = 1,
    tp_rank: int = 0, ep_size: int = 1, ep_rank: int = 0, cluster_size: int = 1, cluster_rank: int = 0,
    output: Optional[torch.Tensor] = None, enable_alltoall: bool = False, use_deepseek_fp8_block_scale: bool = False,
    use_w4_group_scaling: bool = False, use_mxfp8_act_scaling: bool = False, min_latency_mode: bool = False,
    use_packed_weights: bool = False, use_wfp4afp8_humming: bool = False, tune_max_num_tokens: int = 8192,
    enable_pdl: Optional[bool] = None, activation_type: ActivationType = ActivationType.Swiglu,
    swizzled_input_sf: bool = True, use_fused_finalize: bool = True, profile_ids=None,
    workspace_buffer: Optional[torch.Tensor] = None, *, situ_beta: Optional[torch.Tensor] = None,
    situ_linear_beta: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """The weighted sum of what each token's experts make of it: ``input``: ``[tokens, hidden]``,
    ``fc1_expert_weights``: ``[experts, 2 * inter, hidden]`` with the up rows before the gate's,
    ``fc2_expert_weights``: ``[experts, hidden, inter]``.

    Weights are 16 bits wide, or e4m3 with ``use_deepseek_fp8_block_scale`` and ``quant_scales = [fc1, fc2]``, a scale per
    128 x 128. The library wants gates first: the first call with some weights makes a copy of ``fc1_expert_weights``
    with its halves exchanged, which is kept while they live. Ignored: ``tp_size``, ``tp_rank`` (weights are this rank's
    own), ``tune_max_num_tokens``, ``enable_pdl``, ``use_fused_finalize``, ``profile_ids``, ``workspace_buffer``.
    """
    for name, got, want in (
        ("fc1_expert_biases", fc1_expert_biases, None), ("fc2_expert_biases", fc2_expert_biases, None),
        ("input_sf", input_sf, None), ("swiglu_alpha", swiglu_alpha, None), ("swiglu_beta", swiglu_beta, None),
        ("swiglu_limit", swiglu_limit, None), ("ep_size", ep_size, 1), ("cluster_size", cluster_size, 1),
        ("enable_alltoall", enable_alltoall, False), ("use_w4_group_scaling", use_w4_group_scaling, False),
        ("use_mxfp8_act_scaling", use_mxfp8_act_scaling, False), ("min_latency_mode", min_latency_mode, False),
        ("use_packed_weights", use_packed_weights, False), ("use_wfp4afp8_humming", use_wfp4afp8_humming, False),
        ("situ_beta", situ_beta, None), ("situ_linear_beta", situ_linear_beta, None),
    ):
        if got is not want and (isinstance(got, torch.Tensor) or got != want):
            refuse(name, "a tensor" if isinstance(got, torch.Tensor) else got, repr(want))
    if activation_type not in _GATES:
        refuse("activation_type", ActivationType(activation_type), "Swiglu, Geglu or GegluTanh")
    if dtype_of(output_dtype) != input.dtype:
        refuse("output_dtype", output_dtype, f"{input.dtype}, the input's")
    scales, block = (None, None), (0, 0)
    if use_deepseek_fp8_block_scale:
        if fc2_expert_weights.shape[2] % 128:
            raise ValueError(f"inter is {fc2_expert_weights.shape[2]}, expected a multiple of 128, the size of a block")
        scales, block = (_gates_first(quant_scales[0]), quant_scales[1]), (128, 128)
    elif quant_scales:
        refuse("quant_scales", f"{len(quant_scales)} tensors", "none, or two with use_deepseek_fp8_block_scale")
    if output is None:
        output = torch.empty(input.shape, dtype=input.dtype, device=input.device)
    weights = token_final_scales if token_final_scales.dtype == F32 else token_final_scales.to(F32)
    _fir.moe_ffn(input, token_selected_experts, weights, (_gates_first(fc1_expert_weights), scales[0], block),
                 (fc2_expert_weights, scales[1], block), output, _GATES[activation_type])
    return output


def cutlass_fused_moe_workspace_size(
    max_num_tokens: int, hidden_size: int, intermediate_size: int, num_experts_total: int, top_k: int, *, x_dtype,
    weight_dtype, output_dtype=torch.bfloat16, activation_type: ActivationType = ActivationType.Swiglu, tp_size: int = 1,
    tp_rank: int = 0, ep_size: int = 1, ep_rank: int = 0, min_latency_mode: bool = False,
    use_deepseek_fp8_block_scale: bool = False, use_w4_group_scaling: bool = False, use_mxfp8_act_scaling: bool = False,
    use_fused_finalize: bool = True, use_packed_weights: bool = False, use_wfp4afp8_humming: bool = False, device=None,
) -> int:
    """Bytes that ``workspace_buffer`` must have: none, as the library has its own."""
    return 0


def has_monomoe() -> bool:
    """Whether :func:`mono_moe` is there."""
    return True


def get_scratchpad_size_bytes() -> int:
    """Bytes that ``scratchpad`` must have: none."""
    return 0


def alloc_scratchpad(device) -> torch.Tensor:
    """A scratchpad for :func:`mono_moe`, which ignores it."""
    return torch.empty((0,), dtype=torch.uint8, device=device)


def interleave_for_tma_wgmma_up(w_fp8: torch.Tensor) -> torch.Tensor:
    """The weights as :func:`mono_moe` reads them: as they are."""
    return w_fp8


def mono_moe(
    activations_in: torch.Tensor, router_logits: torch.Tensor, expert_weights_up: torch.Tensor,
    expert_scales_up: torch.Tensor, expert_weights_down: torch.Tensor, expert_scales_down: torch.Tensor, top_k: int,
    scoring_func: str = "softmax", renormalize: bool = True, out: Optional[torch.Tensor] = None,
    scratchpad: Optional[torch.Tensor] = None, interleave_up: bool = True,
) -> torch.Tensor:
    """Routing and experts of block-scaled fp8 in one call: ``expert_weights_up``: ``[experts, 2 * inter, hidden]``, gates
    first, ``expert_weights_down``: ``[experts, hidden, inter]``, a scale per 128 x 128. Of any size; activations are not
    rounded to fp8. ``scratchpad`` and ``interleave_up`` are ignored."""
    shape = (activations_in.shape[0], top_k)
    ids = torch.empty(shape, dtype=I32, device=activations_in.device)
    weights = torch.empty(shape, dtype=F32, device=activations_in.device)
    _fir.moe_route(router_logits, None, ids, weights, score=scoring_func, renormalize=renormalize)
    out = torch.empty_like(activations_in) if out is None else out
    _fir.moe_ffn(activations_in, ids, weights, (expert_weights_up, expert_scales_up, (128, 128)),
                 (expert_weights_down, expert_scales_down, (128, 128)), out, "silu")
    return out


def max_num_padded_tokens(num_tokens: int, top_k: int, num_experts: int, tile_tokens_dim: int) -> int:
    """The most rows that a routing can fill when each expert's are padded to a multiple of ``tile_tokens_dim``."""
    pairs = num_tokens * top_k
    full = min(pairs, num_experts)  # Experts with one row each, and the rest all in whole tiles.
    return (full + (pairs - full) // tile_tokens_dim) * tile_tokens_dim


def hash_topk(
    router_logits: torch.Tensor, input_ids: torch.Tensor, tid2eid: torch.Tensor, num_fused_shared_experts: int = 0,
    routed_scaling_factor: float = 1.0, launch_with_pdl: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts by a table, ``tid2eid[input_ids]``, weighed by ``sqrt(softplus(logit))`` over their sum: returns
    ``(topk_weights, topk_ids)``, ``[tokens, topk]``, with one more column if ``num_fused_shared_experts`` is 1: expert
    ``router_logits.shape[1]`` of weight ``1 / routed_scaling_factor``. ``launch_with_pdl`` is ignored."""
    if num_fused_shared_experts not in (0, 1):
        raise ValueError(f"num_fused_shared_experts must be 0 or 1, got {num_fused_shared_experts}")
    if num_fused_shared_experts and not (math.isfinite(routed_scaling_factor) and routed_scaling_factor > 0):
        raise ValueError(f"routed_scaling_factor must be positive and finite, got {routed_scaling_factor}")
    shape = (router_logits.shape[0], tid2eid.shape[1] + num_fused_shared_experts)
    weights = torch.empty(shape, dtype=F32, device=router_logits.device)
    ids = torch.empty(shape, dtype=I32, device=router_logits.device)
    shared = 1.0 / routed_scaling_factor if num_fused_shared_experts else None
    _fir.moe_route_by_table(router_logits, input_ids, tid2eid, shared, ids, weights)
    return weights, ids


# Low-rank adapters of experts. A matrix of a pair is at ``w_ptr[slice, expert] + lora * lora_stride`` elements.

def has_bgmv_moe() -> bool:
    """Whether :func:`bgmv_moe` is there."""
    return True


def fill_w_ptr(w_ptr: torch.Tensor, weights: torch.Tensor, num_experts: int, slice_id: int) -> int:
    """Writes the addresses of the experts' matrices of ``weights``, ``[max_loras, num_experts, rows, columns]``, to
    ``w_ptr[slice_id]``, and returns how many elements lie from one adapter to the next."""
    step = weights.stride(1) * weights.element_size()
    addresses = [weights.data_ptr() + expert * step for expert in range(num_experts)]
    w_ptr[slice_id, :num_experts].copy_(torch.tensor(addresses, dtype=torch.int64, device="cpu"))
    return weights.stride(0)


#: What was read of tensors of numbers, by the tensor.
_READ: dict[int, tuple] = {}


def _read(t: torch.Tensor) -> list:
    """The tensor's numbers: one copy and one wait, and again when it was written since; in inference mode nobody counts
    writes, so every time."""
    if t.is_inference():
        return t.tolist()
    known, now = _READ.get(id(t)), (t.data_ptr(), t._version, t.shape)
    if known is not None and known[0]() is t and known[1] == now:
        return known[2]
    values = t.tolist()
    _READ[id(t)] = (weakref.ref(t, lambda _, key=id(t): _READ.pop(key, None)), now, values)
    return values


def _matrices(name: str, w_ptr: torch.Tensor, x: torch.Tensor, outputs: int, inputs: int, lora_stride: int) -> list[tuple]:
    """Where the matrices of each slice are: the first one's address, their sizes, the steps between them in elements."""
    size, found = x.element_size(), []
    for slice_id, row in enumerate(_read(w_ptr)):
        step = row[1] - row[0] if len(row) > 1 else 0
        if step % size or step < 0 or any(b - a != step for a, b in zip(row, row[1:])):
            raise ValueError(f"{name}: w_ptr[{slice_id}] has addresses {row}, expected them evenly apart, ascending, by a "
                             f"multiple of {size} bytes, as fill_w_ptr writes them")
        found.append((row[0], (len(row), outputs, inputs), (lora_stride, step // size)))
    return found


def bgmv_moe_shrink(
    y: torch.Tensor, x: torch.Tensor, w_ptr: torch.Tensor, sorted_token_ids: torch.Tensor, expert_ids: torch.Tensor,
    lora_indices: torch.Tensor, lora_stride: int, *, per_pair_input: bool = False,
) -> None:
    """``y[slice, pair] += lora_a[lora, expert] @ x[token]``, or ``x[pair]`` with ``per_pair_input``: ``y``:
    ``[slices, pairs, rank]``. A pair whose token is none of ``lora_indices``, or has a negative one there, is left out. What
    ``w_ptr`` says is read when it was written since the last call: one copy and one wait if it is on a device."""
    matrices = _matrices("bgmv_moe_shrink", w_ptr, x, y.shape[2], x.shape[1], lora_stride)
    for out, at in zip(y, matrices):
        _fir.adapt(x, not per_pair_input, at, sorted_token_ids, expert_ids, lora_indices, None, True, out, False)


def bgmv_moe_expand(
    y: torch.Tensor, x: torch.Tensor, w_ptr: torch.Tensor, sorted_token_ids: torch.Tensor, expert_ids: torch.Tensor,
    topk_weights: torch.Tensor, lora_indices: torch.Tensor, slice_start_loc: torch.Tensor, output_slices: list[int],
    lora_stride: int, *, finalize: bool = True,
) -> None:
    """``y[token, columns] += topk_weights[pair] * lora_b[lora, expert] @ x[slice, pair]``; without ``finalize``,
    ``y[pair, columns] = lora_b[lora, expert] @ x[slice, pair]``. ``y`` is f32; a slice's columns are the
    ``output_slices[slice]`` from ``slice_start_loc[slice]`` on. ``w_ptr`` and ``slice_start_loc`` are read as in
    :func:`bgmv_moe_shrink`. On a device a token's pairs are added in any order."""
    starts = _read(slice_start_loc)
    for i, (rows, start, width) in enumerate(zip(x, starts, output_slices)):
        at = _matrices("bgmv_moe_expand", w_ptr, x, width, x.shape[2], lora_stride)[i]
        _fir.adapt(rows, False, at, sorted_token_ids, expert_ids, lora_indices, topk_weights if finalize else None,
                   finalize, y[:, start:start + width], finalize)


def bgmv_moe(
    x: torch.Tensor, lora_a_weights: list[torch.Tensor], lora_b_weights: list[torch.Tensor],
    sorted_token_ids: torch.Tensor, expert_ids: torch.Tensor, lora_indices: torch.Tensor, topk_weights: torch.Tensor,
    num_experts: int, output_dim: Optional[int] = None,
) -> torch.Tensor:
    """What adapters add to a mixture's output: ``delta[token] = sum of topk_weights[pair] * b @ (a @ x[token])`` over the
    token's pairs, ``a`` and ``b`` being ``lora_a_weights[slice][lora, expert]``, ``[rank, hidden]``, and
    ``lora_b_weights[slice][lora, expert]``, ``[outputs, rank]``. Slices are beside each other in the result,
    ``[tokens, output_dim]`` of the type of ``x``."""
    widths = [b.shape[2] for b in lora_b_weights]
    total = sum(widths) if output_dim is None else output_dim
    y = torch.zeros((x.shape[0], total), dtype=F32, device=x.device)
    start = 0
    for a, b, width in zip(lora_a_weights, lora_b_weights, widths):
        middle = torch.zeros((sorted_token_ids.shape[0], a.shape[2]), dtype=x.dtype, device=x.device)
        pairs = (sorted_token_ids, expert_ids, lora_indices)
        _fir.adapt(x, True, a[:, :num_experts], *pairs, None, False, middle, False)
        _fir.adapt(middle, False, b[:, :num_experts], *pairs, topk_weights, True, y[:, start:start + width], True)
        start += width
    if y.dtype == x.dtype:
        return y
    out = torch.empty(y.shape, dtype=x.dtype, device=x.device)
    return out.copy_(y)
