"""Sampling from logits and probabilities.

Randomness is Philox of ``(seed, offset)``, the same numbers on every device. Filters of one value per row are read on the
host: on a device they cost one copy and one wait each. ``deterministic`` and ``enable_pdl`` are ignored: results are always
deterministic.
"""

from __future__ import annotations

from typing import Optional, Union

import torch

from .. import _fir
from . import _native
from ._core import F32, I32, host

__all__ = [
    "chain_speculative_sampling", "get_seed_and_offset", "min_p_sampling_from_probs", "sampling_from_logits",
    "sampling_from_probs", "softmax", "top_k_mask_logits", "top_k_renorm_prob", "top_k_renorm_probs",
    "top_k_sampling_from_probs", "top_k_top_p_sampling_from_logits", "top_k_top_p_sampling_from_probs",
    "top_p_renorm_prob", "top_p_renorm_probs", "top_p_sampling_from_probs",
]

PerRow = Union[torch.Tensor, float, int]


def get_seed_and_offset(increment: int, generator: Optional[torch.Generator] = None,
                        device: Optional[torch.device] = None) -> tuple[int, int]:
    """``(seed, offset)`` from a generator, which moves on by ``increment`` numbers."""
    cuda = device is not None and torch.device(device).type == "cuda"
    if generator is None:
        if cuda:
            generator = torch.cuda.default_generators[torch.device(device).index or torch.cuda.current_device()]
        else:
            generator = torch.default_generator
    if generator.device.type == "cuda":
        offset = generator.get_offset()
        generator.set_offset(offset + (increment + 3) // 4 * 4)
        return generator.initial_seed(), offset
    # A CPU generator has no offset to move: one draw from it is the seed.
    seed = torch.empty((1,), dtype=torch.int64, device="cpu").random_(generator=generator).item()
    return seed, 0


def _int(x) -> int:
    return int(x.item()) if isinstance(x, torch.Tensor) else int(x)


def _rng(rows: int, generator, device, seed, offset) -> tuple[int, int]:
    if seed is None or offset is None:
        if (seed is None) != (offset is None):
            raise ValueError("seed and offset must be given together")
        return get_seed_and_offset(rows, generator, device)
    return _int(seed) & (2**64 - 1), _int(offset) & (2**64 - 1)


def _rows(x: PerRow) -> PerRow:
    return host(x) if isinstance(x, torch.Tensor) else x


def _f32(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == F32 else x.to(F32)


def _draw_from(kind, x, indices, out, valid, a, b, order, generator, seed, offset) -> None:
    """Runs a function of the extension; ``a`` and ``b`` are its filters, or None."""
    rng = _rng(out.shape[0], generator, x.device, seed, offset)
    draw = (rng, indices, out, valid)
    if kind == "sample_from_probs":
        _fir.sample_from_probs(x, draw)
    elif kind.startswith("top_k_top_p"):
        _fir.top_k_top_p_sample(x, a, b, order, draw, logits=kind.endswith("logits"))
    else:
        getattr(_fir, kind)(x, a, draw)


def _traced(kind, x, indices, out, valid, a_rows, a, b_rows, b, order, seed, offset) -> None:
    number = int if kind.startswith("top_k") else float
    _draw_from(kind, x, indices, out, valid, _native.values(a_rows, number(a)), _native.values(b_rows, b), order, None,
               seed, offset)


_sample = _native.operator(
    "sample", "str kind, Tensor x, Tensor? indices, Tensor(a!) out, Tensor(b!)? valid, Tensor? a_rows, float a, "
    "Tensor? b_rows, float b, str order, int? seed, int? offset", _traced)


def _draw(kind, x, indices, generator, check_nan, seed, offset, return_valid, a=1.0, b=1.0, order=""):
    rows = x.shape[0] if indices is None else indices.shape[0]
    x = _f32(x)
    out = torch.empty((rows,), dtype=I32 if indices is None else indices.dtype, device=x.device)
    valid = torch.empty((rows,), dtype=torch.bool, device=x.device) if return_valid or check_nan else None
    if _native.is_compiling() and generator is None:
        a_rows, b_rows = (t if isinstance(t, torch.Tensor) else None for t in (a, b))
        _sample(kind, x, indices, out, valid, a_rows, 1.0 if a_rows is not None else float(a), b_rows,
                1.0 if b_rows is not None else float(b), order, seed, offset)
    else:
        _draw_from(kind, x, indices, out, valid, _rows(a), _rows(b), order, generator, seed, offset)
    if check_nan and not bool(host(valid).all()):
        raise ValueError(f"Input {'logits' if kind.endswith('logits') else 'probs'} contains NaN.")
    return (out, valid) if return_valid else out


def softmax(logits: torch.Tensor, temperature: Optional[PerRow] = None,
            enable_pdl: Optional[bool] = None) -> torch.Tensor:
    """Probabilities of ``[batch, classes]`` logits, f32, after a division by ``temperature``."""
    out = torch.empty(logits.shape, dtype=F32, device=logits.device)
    _native.softmax(_f32(logits), 1.0 if temperature is None else temperature, out)
    return out


def sampling_from_logits(
    logits: torch.Tensor, indices: Optional[torch.Tensor] = None, deterministic: bool = True,
    generator: Optional[torch.Generator] = None, check_nan: bool = False, seed=None, offset=None,
) -> torch.Tensor:
    """A class of each row; ``indices[i]`` names the row that output ``i`` is drawn from."""
    return _draw("sample_from_logits", logits, indices, generator, check_nan, seed, offset, False)


def sampling_from_probs(
    probs: torch.Tensor, indices: Optional[torch.Tensor] = None, deterministic: bool = True,
    generator: Optional[torch.Generator] = None, check_nan: bool = False, seed=None, offset=None,
    return_valid: bool = False,
):
    """A class of each row of probabilities; ``return_valid`` adds whether the row was a distribution."""
    return _draw("sample_from_probs", probs, indices, generator, check_nan, seed, offset, return_valid)


def top_p_sampling_from_probs(
    probs: torch.Tensor, top_p: PerRow, indices: Optional[torch.Tensor] = None, deterministic: bool = True,
    generator: Optional[torch.Generator] = None, check_nan: bool = False, seed=None, offset=None,
    return_valid: bool = False,
):
    """A class among the fewest that hold a share ``top_p`` of the mass."""
    return _draw("top_p_sample", probs, indices, generator, check_nan, seed, offset, return_valid, top_p)


def top_k_sampling_from_probs(
    probs: torch.Tensor, top_k: PerRow, indices: Optional[torch.Tensor] = None, deterministic: bool = True,
    generator: Optional[torch.Generator] = None, check_nan: bool = False, seed=None, offset=None,
    return_valid: bool = False,
):
    """A class among the ``top_k`` likeliest."""
    return _draw("top_k_sample", probs, indices, generator, check_nan, seed, offset, return_valid, top_k)


def min_p_sampling_from_probs(
    probs: torch.Tensor, min_p: PerRow, indices: Optional[torch.Tensor] = None, deterministic: bool = True,
    generator: Optional[torch.Generator] = None, check_nan: bool = False, seed=None, offset=None,
    return_valid: bool = False,
):
    """A class among those at least ``min_p`` times as likely as the likeliest."""
    return _draw("min_p_sample", probs, indices, generator, check_nan, seed, offset, return_valid, min_p)


def top_k_top_p_sampling_from_logits(
    logits: torch.Tensor, top_k: PerRow, top_p: PerRow, indices: Optional[torch.Tensor] = None,
    filter_apply_order: str = "top_k_first", deterministic: bool = True, generator: Optional[torch.Generator] = None,
    check_nan: bool = False, seed=None, offset=None,
) -> torch.Tensor:
    """A class that passes both filters: one after the other (``top_k_first``) or both on the same mass (``joint``)."""
    return _draw("top_k_top_p_logits", logits, indices, generator, check_nan, seed, offset, False, top_k, top_p,
                 filter_apply_order)


def top_k_top_p_sampling_from_probs(
    probs: torch.Tensor, top_k: PerRow, top_p: PerRow, indices: Optional[torch.Tensor] = None,
    filter_apply_order: str = "top_k_first", deterministic: bool = True, generator: Optional[torch.Generator] = None,
    check_nan: bool = False, seed=None, offset=None, return_valid: bool = False,
):
    """As ``top_k_top_p_sampling_from_logits``, of probabilities."""
    return _draw("top_k_top_p_probs", probs, indices, generator, check_nan, seed, offset, return_valid, top_k, top_p,
                 filter_apply_order)


def top_p_renorm_probs(probs: torch.Tensor, top_p: PerRow, is_deterministic: bool = False) -> torch.Tensor:
    """What ``top_p`` leaves of the probabilities, made to sum to 1."""
    out = torch.empty(probs.shape, dtype=F32, device=probs.device)
    _native.top_p_renorm(_f32(probs), top_p, out)
    return out


def top_k_renorm_probs(probs: torch.Tensor, top_k: PerRow) -> torch.Tensor:
    """What ``top_k`` leaves of the probabilities, made to sum to 1."""
    out = torch.empty(probs.shape, dtype=F32, device=probs.device)
    _native.top_k_renorm(_f32(probs), top_k, out)
    return out


def top_k_mask_logits(logits: torch.Tensor, top_k: PerRow) -> torch.Tensor:
    """The logits, with -inf for all but the ``top_k`` largest."""
    out = torch.empty(logits.shape, dtype=F32, device=logits.device)
    _native.top_k_mask_logits(_f32(logits), top_k, out)
    return out


top_p_renorm_prob = top_p_renorm_probs
top_k_renorm_prob = top_k_renorm_probs


def chain_speculative_sampling(
    draft_probs: torch.Tensor, draft_token_ids: torch.Tensor, target_probs: torch.Tensor,
    maybe_output_accepted_token_num: Optional[torch.Tensor] = None,
    maybe_output_emitted_draft_token_num: Optional[torch.Tensor] = None, deterministic: bool = True,
    generator: Optional[torch.Generator] = None, seed=None, offset=None,
):
    """Verifies chains of drafts; returns ``(tokens [batch, drafts + 1], accepted, emitted)``, -1 after the last token. The
    two counts are added to what is given."""
    batch, drafts = draft_token_ids.shape
    out = torch.empty((batch, drafts + 1), dtype=draft_token_ids.dtype, device=draft_probs.device)
    counts = []
    for given in (maybe_output_accepted_token_num, maybe_output_emitted_draft_token_num):
        counts.append(torch.zeros((batch,), dtype=I32, device=draft_probs.device) if given is None else given)
    rng = _rng(batch * (drafts + 1), generator, draft_probs.device, seed, offset)
    _fir.chain_speculative_sample(_f32(draft_probs), draft_token_ids, _f32(target_probs), rng, out, *counts)
    return out, counts[0], counts[1]
