"""Mixtures of experts: routing, and the experts' layers."""

from __future__ import annotations

import weakref
from enum import IntEnum
from typing import Optional

import torch

from .. import _fir
from ._core import F32, I32, dtype_of, refuse

__all__ = [
    "ActivationType", "RoutingMethodType", "alloc_scratchpad", "cutlass_fused_moe", "cutlass_fused_moe_workspace_size",
    "fused_topk_deepseek", "get_scratchpad_size_bytes", "has_bgmv_moe", "has_monomoe", "interleave_for_tma_wgmma_up",
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


def has_bgmv_moe() -> bool:
    """Whether adapters of experts are there: they are not."""
    return False
