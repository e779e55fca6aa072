"""Every argument of every implemented function, one at a time: a call that works, then the same with another value of one
argument, each against the reference. Arguments that are ignored must change nothing. Attention's wrappers are in
``test_wrappers.py``."""

import inspect
import math
import sys

import pytest
import torch
import torch.nn.functional as F

import fir.flashinfer as fi
from fir.flashinfer.check import table

BF16, F16, F32, I32, I64 = torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.int64
E4M3, E5M2, U8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8

#: api -> (base, other values by argument, reference of the arguments, ignored arguments and other values of theirs)
CASES = {}


def case(api, base, varied, ignored=None):
    """``base``: a function of keyword arguments; a value that is a function makes the argument's tensor anew, from those
    of the base call. The decorated function is the reference: it gets the arguments, and returns what the call must return
    (and what it must have written, by argument)."""

    def add(reference):
        CASES[api] = (base, varied, reference, ignored or {})
        return reference

    return add


def i32(*values):
    return torch.tensor(values, dtype=I32)


def filled(like, dtype=None):
    """Memory that nothing may be read from."""
    out = torch.empty_like(like, dtype=dtype)
    return out.fill_(math.nan) if out.is_floating_point() and out.dtype.itemsize > 1 else out


def called(api, kwargs):
    """The function's results, then the tensors it was given to write."""
    module, name = api.split(".")
    function = getattr(sys.modules[f"fir.flashinfer.{module}"], name)
    before = {k: v.clone() for k, v in kwargs.items() if isinstance(v, torch.Tensor)}
    result = function(**kwargs)
    results = [] if result is None else list(result) if isinstance(result, (tuple, list)) else [result]
    return results, before


def check(api, kwargs):
    reference = CASES[api][2]
    given = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()}
    want = reference(**given)
    want, written = list(want) if isinstance(want, tuple) else [want], {}
    if want and isinstance(want[-1], dict):
        *want, written = want
    want = [] if want == [()] else want
    got, before = called(api, kwargs)
    assert len(got) == len(want), (len(got), len(want))
    pairs = list(zip(got, want)) + [(kwargs[k], w) for k, w in written.items()]
    for g, w in pairs:
        if not isinstance(w, torch.Tensor):
            assert g == w or (w is None and g is None)
            continue
        assert g.shape == w.shape and g.dtype == w.dtype, (g.shape, w.shape, g.dtype, w.dtype)
        limit = {F32: 3e-5, F16: 4e-3, BF16: 3e-2}.get(g.dtype, 0.13 if g.dtype in (E4M3, E5M2) else 0)
        torch.testing.assert_close(g.float(), w.float(), atol=limit, rtol=limit, equal_nan=True)
    changed = {k for k, v in before.items() if not torch.equal(v.view(U8) if v.dtype.itemsize == 1 else v.nan_to_num(7.0) if v.is_floating_point() else v,
                                                            kwargs[k].view(U8) if v.dtype.itemsize == 1 else kwargs[k].nan_to_num(7.0) if v.is_floating_point() else kwargs[k])}
    assert changed <= set(written), f"{changed - set(written)} were written"


def rows():
    return [(api, arg, i) for api, (_, varied, _, ignored) in CASES.items()
            for arg, values in {**varied, **ignored}.items() for i in range(len(values))]


# Norms and activations.

def norm(x, weight, eps, center=False, bias=None, shift=0.0):
    x = x.float()
    x = x - x.mean(-1, keepdim=True) if center else x
    y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (weight.float() + shift)
    return y if bias is None else y + bias.float()


def fp8(x, dtype):
    return x.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)


X = lambda d=F32, *shape: torch.randn(*(shape or (5, 64))).to(d)
PDL = {"enable_pdl": [True, False]}
ROW = {"input": [lambda b: X(BF16), lambda b: X(F16), lambda b: X(F32, 0, 64), lambda b: X(F32, 9, 128)[:, ::2][:, :64].contiguous(), lambda b: X(F32, 5, 100)[:, :64]],
       "weight": [lambda b: X(F32, 64), lambda b: X(BF16, 64)], "eps": [1e-2]}
for _name, _shift in (("rmsnorm", 0.0), ("gemma_rmsnorm", 1.0)):
    @case(f"norm.{_name}", lambda: dict(input=X(), weight=X(F32, 64)),
          {**ROW, "input": ROW["input"] + [lambda b: X(BF16, 3, 4, 64), lambda b: X(F32, 3, 8, 64)[:, ::2]], "out": [lambda b: filled(b["input"])]}, PDL)
    def _(input, weight, eps=1e-6, out=None, enable_pdl=None, shift=_shift):
        y = norm(input, weight, eps, shift=shift).to(input.dtype)
        return (y, {"out": y}) if out is not None else y
for _name, _shift in (("fused_add_rmsnorm", 0.0), ("gemma_fused_add_rmsnorm", 1.0)):
    @case(f"norm.{_name}", lambda: dict(input=X(), residual=X(), weight=X(F32, 64)),
          {"input": [lambda b: X() * 3], "residual": [lambda b: X() * 5], "weight": ROW["weight"], "eps": [1e-2]}, PDL)
    def _(input, residual, weight, eps=1e-6, enable_pdl=None, shift=_shift):
        total = input.float() + residual.float()
        return (), {"input": norm(total, weight, eps, shift=shift).to(input.dtype), "residual": total.to(residual.dtype)}


@case("norm.layernorm", lambda: dict(input=X(), gemma=X(F32, 64), beta=X(F32, 64)),
      {"input": ROW["input"], "gemma": ROW["weight"], "beta": ROW["weight"], "eps": [1e-2]})
def _(input, gemma, beta, eps=1e-6):
    return norm(input, gemma, eps, True, beta).to(input.dtype)


QUANT = {"out": [lambda b: torch.zeros(5, 64).to(E5M2)], "input": [lambda b: X(BF16)], "weight": ROW["weight"], "scale": [0.1, lambda b: torch.tensor([3.0])], "eps": [1e-2]}


@case("norm.rmsnorm_quant", lambda: dict(out=torch.zeros(5, 64).to(E4M3), input=X(), weight=X(F32, 64), scale=0.5), QUANT, PDL)
def _(out, input, weight, scale, eps=1e-6, enable_pdl=None):
    return (), {"out": fp8(norm(input, weight, eps) / scale, out.dtype)}


@case("norm.fused_add_rmsnorm_quant", lambda: dict(out=torch.zeros(5, 64).to(E4M3), input=X(), residual=X(), weight=X(F32, 64), scale=0.5),
      {**QUANT, "input": [lambda b: X() * 2], "residual": [lambda b: X() * 3]}, PDL)
def _(out, input, residual, weight, scale, eps=1e-6, enable_pdl=None):
    total = input.float() + residual.float()
    return (), {"out": fp8(norm(total, weight, eps) / scale, out.dtype), "residual": total.to(residual.dtype)}


@case("norm.layernorm_quant", lambda: dict(out=torch.zeros(5, 64).to(E4M3), input=X(), gemma=X(F32, 64), beta=X(F32, 64), scale=0.5),
      {**{k: v for k, v in QUANT.items() if k != "weight"}, "gemma": ROW["weight"], "beta": ROW["weight"]})
def _(out, input, gemma, beta, scale, eps=1e-6):
    return (), {"out": fp8(norm(input, gemma, eps, True, beta) / scale, out.dtype)}


GRID = dict(ppf=2, pph=2, ppw=3, num_frame_channels=24, num_height_channels=20, num_width_channels=20, num_heads_q=4, num_heads_k=4,
            num_heads_v=4, head_dim=64)


@case("norm.fused_qk_rmsnorm_rope", lambda: dict(qkv=X(BF16, 1, 12, 768), q_weight=X(BF16, 256), k_weight=X(BF16, 256), **GRID),
      {"qkv": [lambda b: X(BF16, 24, 768), lambda b: X(BF16, 2, 12, 768)], "q_weight": [lambda b: X(BF16, 256) * 2], "k_weight": [lambda b: X(BF16, 256) * 2],
       "ppf": [lambda b: (dict(ppf=6, pph=2, ppw=1))], "pph": [lambda b: dict(ppf=1, pph=4)], "ppw": [lambda b: dict(ppf=3, pph=1, ppw=4)],
       "num_frame_channels": [lambda b: dict(num_frame_channels=40, num_height_channels=12, num_width_channels=12)],
       "num_height_channels": [lambda b: dict(num_frame_channels=20, num_height_channels=24)], "num_width_channels": [lambda b: dict(num_height_channels=8, num_width_channels=32)],
       "num_heads_q": [lambda b: dict(num_heads_q=8, num_heads_k=2, num_heads_v=2, q_weight=X(BF16, 512), k_weight=X(BF16, 128))],
       "num_heads_k": [lambda b: dict(num_heads_q=6, num_heads_k=2, q_weight=X(BF16, 384), k_weight=X(BF16, 128))],
       "num_heads_v": [lambda b: dict(num_heads_q=2, num_heads_v=6, q_weight=X(BF16, 128))],
       "head_dim": [lambda b: dict(head_dim=128, num_heads_q=2, num_heads_k=2, num_heads_v=2, num_frame_channels=64, num_height_channels=32, num_width_channels=32)],
       "eps": [0.5], "base": [100.0], "interleave": [False], "is_qk_norm": [False],
       "q_out": [lambda b: filled(X(BF16, 1, 12, 4, 64))], "k_out": [lambda b: filled(X(BF16, 1, 12, 4, 64))], "v_out": [lambda b: filled(X(BF16, 1, 12, 4, 64))],
       "output_fp8": [True], "output_quant_scale": [lambda b: dict(output_fp8=True, output_quant_scale=3.0)],
       "v_quant_scale": [lambda b: dict(output_fp8=True, v_quant_scale=3.0)]},
      {"low": [0.5], "high": [0.5]})
def _(qkv, q_weight, k_weight, ppf, pph, ppw, num_frame_channels, num_height_channels, num_width_channels, num_heads_q, num_heads_k, num_heads_v,
      head_dim, eps=1e-6, base=1e4, interleave=True, is_qk_norm=True, output_fp8=False, output_quant_scale=1.0, v_quant_scale=1.0,
      q_out=None, k_out=None, v_out=None, low=0, high=0):
    flat = qkv.reshape(-1, qkv.shape[-1]).float()
    parts = flat.split([n * head_dim for n in (num_heads_q, num_heads_k, num_heads_v)], 1)
    place = torch.arange(len(flat)) % (ppf * pph * ppw)
    axes = (place // (pph * ppw), place // ppw % pph, place % ppw)
    angles = torch.cat([a[:, None] * base ** (-torch.arange(0, n, 2) / n) for a, n in zip(axes, (num_frame_channels, num_height_channels, num_width_channels))], 1)
    c, s = angles.cos()[:, None], angles.sin()[:, None]
    results = []
    for part, w, scale in zip(parts, (q_weight, k_weight, None), (output_quant_scale, output_quant_scale, v_quant_scale)):
        if w is not None:
            part = norm(part, w, eps) if is_qk_norm else part
            x = part.view(len(part), -1, head_dim)
            a, b = (x[..., ::2], x[..., 1::2]) if interleave else x.chunk(2, -1)
            y, z = a * c - b * s, b * c + a * s
            part = torch.stack((y, z), -1).flatten(-2) if interleave else torch.cat((y, z), -1)
        part = part.reshape(*qkv.shape[:-1], -1, head_dim)
        results.append(fp8(part * scale, E4M3) if output_fp8 else part.to(BF16))
    return (*results, {n: r for n, o, r in zip(("q_out", "k_out", "v_out"), (q_out, k_out, v_out), results) if o is not None})


DIT = lambda d=BF16, *shape: torch.randn(*(shape or (2, 3, 48))).to(d)
CHUNK = lambda b: torch.randn(2, 3, 6, 48).to(BF16).chunk(6, dim=2)[1].squeeze(2)
BIAS = [lambda b: torch.randn(48), lambda b: torch.randn(1, 48)]
DIT_MORE = {"residual": [lambda b: DIT() * 3], "epsilon": [0.5], "residual_out": [lambda b: filled(DIT())], "norm_out": [lambda b: filled(DIT())],
            "input_global_scaling_factor": [lambda b: torch.tensor([0.25])]}
DIT_IGNORED = {"use_nvfp4": [False], "use_mxfp8": [False], "global_scaling_factor": [lambda b: torch.ones(1)], "sf_out": [lambda b: torch.zeros(4, dtype=U8)]}


def modulated(input, residual, gate, scale, shift, epsilon, factor, outs):
    s = input.float() * (1.0 if factor is None else factor) * gate + (0.0 if residual is None else residual.float())
    c = s - s.mean(-1, keepdim=True)
    y = (c * torch.rsqrt(c.pow(2).mean(-1, keepdim=True) + epsilon) * scale + shift).to(input.dtype)
    s = s.to(input.dtype)
    return (s, y, {n: r for n, o, r in zip(("residual_out", "norm_out"), outs, (s, y)) if o is not None})


def summed(rows, bias):
    return rows.float() if bias is None else rows.float() + bias.view(-1)


@case("norm.fused_dit_gate_residual_layernorm_gamma_beta", lambda: dict(input=DIT(), residual=DIT(), gate=DIT(), gamma=torch.randn(48), beta=torch.randn(48)),
      {"input": [lambda b: DIT() * 2], "gate": [CHUNK, lambda b: DIT(BF16, 6, 48)], "gamma": [lambda b: torch.randn(48) * 2], "beta": [lambda b: torch.randn(48) * 2],
       "gate_bias": BIAS, **DIT_MORE}, DIT_IGNORED)
def _(input, residual, gate, gamma, beta, gate_bias=None, epsilon=1e-6, input_global_scaling_factor=None, residual_out=None, norm_out=None, **ignored):
    return modulated(input, residual, summed(gate.reshape(input.shape), gate_bias), gamma, beta, epsilon, input_global_scaling_factor, (residual_out, norm_out))


for _name in ("fused_dit_gate_residual_layernorm_scale_shift", "fused_dit_residual_layernorm_scale_shift"):
    _gated = "gate" in _name
    @case(f"norm.{_name}", lambda gated=_gated: dict(input=DIT(), scale=DIT(), shift=DIT(), **(dict(residual=DIT(), gate=DIT()) if gated else {})),
          {"input": [lambda b: DIT() * 2, lambda b: {n: DIT(F32) for n in b}, lambda b: {n: DIT(BF16, 1, 4, 3072) for n in b}], "scale": [CHUNK], "shift": [CHUNK, lambda b: DIT(BF16, 6, 48)],
           "scale_bias": BIAS, "shift_bias": BIAS, **({"gate": [CHUNK], "gate_bias": BIAS} if _gated else {}), **DIT_MORE}, DIT_IGNORED)
    def _(input, scale, shift, residual=None, gate=None, gate_bias=None, scale_bias=None, shift_bias=None, epsilon=1e-6, input_global_scaling_factor=None, residual_out=None,
          norm_out=None, **ignored):
        return modulated(input, residual, 1.0 if gate is None else summed(gate, gate_bias), 1 + summed(scale, scale_bias), summed(shift.reshape(input.shape), shift_bias), epsilon,
                         input_global_scaling_factor, (residual_out, norm_out))


for _name, _act in (("silu_and_mul", F.silu), ("gelu_and_mul", F.gelu), ("gelu_tanh_and_mul", lambda x: F.gelu(x, approximate="tanh"))):
    @case(f"activation.{_name}", lambda: dict(input=X()),
          {"input": [lambda b: X(BF16), lambda b: X(F16, 2, 3, 32), lambda b: X(F32, 0, 64)], "out": [lambda b: filled(X(F32, 5, 32))]}, PDL)
    def _(input, out=None, enable_pdl=None, act=_act):
        a, b = input.float().chunk(2, -1)
        y = (act(a) * b).to(input.dtype)
        return (y, {"out": y}) if out is not None else y


# States.

def merged(v, s):
    total = torch.logsumexp(s.double() * math.log(2), 1) / math.log(2)
    return (v.double() * torch.exp2(s - total[:, None])[..., None]).sum(1).to(v.dtype), total.float()


STATE = lambda d=F32: torch.randn(5, 4, 32).to(d)
LSE = lambda: torch.randn(5, 4)


@case("cascade.merge_state", lambda: dict(v_a=STATE(), s_a=LSE(), v_b=STATE(), s_b=LSE()),
      {"v_a": [lambda b: STATE() * 9], "s_a": [lambda b: LSE() + 30, lambda b: LSE().half()], "v_b": [lambda b: STATE() * 9], "s_b": [lambda b: LSE() - 30]})
def _(v_a, s_a, v_b, s_b):
    return merged(torch.stack((v_a, v_b), 1), torch.stack((s_a.float(), s_b), 1))


@case("cascade.merge_state_in_place", lambda: dict(v=STATE(), s=LSE(), v_other=STATE(), s_other=LSE()),
      {"v": [lambda b: STATE() * 3], "s": [lambda b: LSE() + 9], "v_other": [lambda b: STATE() * 3], "s_other": [lambda b: LSE() + 9],
       "mask": [lambda b: torch.tensor([True, False, True, False, False])]})
def _(v, s, v_other, s_other, mask=None):
    a, b = merged(torch.stack((v, v_other), 1), torch.stack((s, s_other), 1))
    if mask is not None:
        a, b = torch.where(mask[:, None, None], a, v), torch.where(mask[:, None], b, s)
    return (), {"v": a, "s": b}


@case("cascade.merge_states", lambda: dict(v=torch.randn(5, 3, 4, 32), s=torch.randn(5, 3, 4)),
      {"v": [lambda b: torch.randn(5, 3, 4, 32) * 5], "s": [lambda b: torch.randn(5, 3, 4) * 20]})
def _(v, s):
    return merged(v, s)


@case("concat_ops.concat_mla_k", lambda: dict(k=filled(torch.empty(5, 4, 48)), k_nope=torch.randn(5, 4, 32), k_rope=torch.randn(5, 1, 16)),
      {"k": [lambda b: filled(torch.empty(5, 4, 96))[..., ::2]], "k_nope": [lambda b: torch.randn(5, 4, 32) + 1], "k_rope": [lambda b: torch.randn(5, 1, 16) + 1]})
def _(k, k_nope, k_rope):
    return (), {"k": torch.cat((k_nope, k_rope.expand(5, 4, 16)), -1)}


# Rotary embedding.

def rotated(x, angles, interleave, dim):
    x, rest = x.float()[..., :dim], x[..., dim:]
    c, s = angles.cos()[:, None], angles.sin()[:, None]
    a, b = (x[..., ::2], x[..., 1::2]) if interleave else x.chunk(2, -1)
    y, z = a * c - b * s, b * c + a * s
    y = torch.stack((y, z), -1).flatten(-2) if interleave else torch.cat((y, z), -1)
    return torch.cat((y, rest.float()), -1)


BOTH = lambda d: lambda b: dict(q=torch.randn(6, 4, 32).to(d), k=torch.randn(6, 2, 32).to(d))
QK = dict(q=[BOTH(BF16), lambda b: torch.randn(6, 8, 32)[:, ::2]], k=[lambda b: torch.randn(6, 1, 32), BOTH(F16)])
PLACES = {"": (dict(indptr=lambda: i32(0, 2, 6), offsets=lambda: i32(7, 100)), {"indptr": [lambda b: i32(0, 5, 6)], "offsets": [lambda b: i32(0, 3)]}),
          "_pos_ids": (dict(pos_ids=lambda: i32(0, 5, 9, 1, 1, 300)), {"pos_ids": [lambda b: torch.tensor([1, 2, 3, 4, 5, 6])]})}
for _kind in ("", "_llama31"):
    for _way, (_base, _places) in PLACES.items():
        for _end in ("", "_inplace"):
            _more = {"low_freq_factor": [2.0], "high_freq_factor": [8.0], "old_context_len": [512]} if _kind else {}

            @case(f"rope.apply{_kind}_rope{_way}{_end}", lambda base=_base: dict(q=torch.randn(6, 4, 32), k=torch.randn(6, 2, 32), **{k: v() for k, v in base.items()}),
                  {**QK, **_places, "rotary_dim": [16], "interleave": [True], "rope_scale": [2.0], "rope_theta": [123.0], **_more})
            def _(q, k, indptr=None, offsets=None, pos_ids=None, rotary_dim=None, interleave=False, rope_scale=8.0 if _kind else 1.0, rope_theta=5e5 if _kind else 1e4,
                  low_freq_factor=1.0, high_freq_factor=4.0, old_context_len=8192, llama=bool(_kind), inplace=bool(_end)):
                pos = pos_ids if indptr is None else torch.cat([o + torch.arange(n) for o, n in zip(offsets.tolist(), indptr.diff().tolist())])
                d = rotary_dim or q.shape[-1]
                f = rope_theta ** (-torch.arange(0, d, 2).double() / d)
                if llama:
                    smooth = ((f * old_context_len / (2 * math.pi) - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0, 1)
                    f = (1 - smooth) * f / rope_scale + smooth * f
                else:
                    f = f / rope_scale
                angles = (pos[:, None].double() * f).float()
                out = [rotated(x, angles, interleave, d).to(x.dtype) for x in (q, k)]
                return ((), dict(zip(("q", "k"), out))) if inplace else tuple(out)



def TABLE(rows=9, d=32):
    angles = torch.randn(rows, d // 2) * 3
    return torch.cat((angles.cos(), angles.sin()), -1)


def by_table(x, table, pos, neox):
    c, s = table.chunk(2, -1)
    return rotated(x, torch.atan2(s, c)[pos.long()], not neox, table.shape[-1])


for _end in ("", "_inplace"):
    @case(f"rope.apply_rope_with_cos_sin_cache{_end}", lambda: dict(positions=torch.tensor([0, 8, 3]), query=torch.randn(3, 128), key=torch.randn(3, 64), head_size=32, cos_sin_cache=TABLE()),
          {"positions": [lambda b: i32(1, 1, 2)], "query": [lambda b: dict(query=torch.randn(3, 64).to(BF16), key=torch.randn(3, 64).to(BF16)), lambda b: torch.randn(3, 4, 32)], "key": [lambda b: torch.randn(3, 32)],
           "head_size": [64], "cos_sin_cache": [lambda b: TABLE(20, 16)], "is_neox": [False]})
    def _(positions, query, key, head_size, cos_sin_cache, is_neox=True, inplace=bool(_end)):
        out = [by_table(x.reshape(3, -1, head_size), cos_sin_cache, positions, is_neox).reshape(x.shape).to(x.dtype) for x in (query, key)]
        return ((), dict(zip(("query", "key"), out))) if inplace else tuple(out)

QUANTIZE = {"q_rope": [lambda b: torch.randn(6, 4, 32) * 2, lambda b: {n: b[n].to(BF16) for n in ("q_rope", "k_rope", "q_nope", "k_nope")}], "k_rope": [lambda b: torch.randn(6, 32) * 2], "q_nope": [lambda b: torch.randn(6, 4, 64) * 2],
            "k_nope": [lambda b: torch.randn(6, 64) * 2], "cos_sin_cache": [lambda b: TABLE(50)], "pos_ids": [lambda b: torch.tensor([8, 7, 6, 5, 4, 3])],
            "is_neox": [False], "quantize_dtype": [E5M2], "quant_scale_q": [3.0], "quant_scale_kv": [0.25],
            **{f"{n}_out": [lambda b, n=n: torch.zeros(b[n].shape).to(E4M3)] for n in ("q_rope", "k_rope", "q_nope", "k_nope")}}
for _name, _more in (("mla_rope_quantize_fp8", {}), ("rope_quantize_fp8", {"backend": ["cuda"]})):
    @case(f"rope.{_name}", lambda: dict(q_rope=torch.randn(6, 4, 32), k_rope=torch.randn(6, 32), q_nope=torch.randn(6, 4, 64), k_nope=torch.randn(6, 64), cos_sin_cache=TABLE(), pos_ids=i32(0, 1, 2, 8, 7, 3)),
          QUANTIZE, {**PDL, **_more})
    def _(q_rope, k_rope, q_nope, k_nope, cos_sin_cache, pos_ids, is_neox=True, quantize_dtype=None, quant_scale_q=1.0, quant_scale_kv=1.0, q_rope_out=None, k_rope_out=None,
          q_nope_out=None, k_nope_out=None, enable_pdl=False, backend="cuda"):
        d = quantize_dtype or E4M3
        turn = lambda x: by_table(x.reshape(6, -1, 32), cos_sin_cache, pos_ids, is_neox).reshape(x.shape)
        out = (fp8(turn(q_rope) * quant_scale_q, d), fp8(turn(k_rope) * quant_scale_kv, d), fp8(q_nope.float() * quant_scale_q, d), fp8(k_nope.float() * quant_scale_kv, d))
        given = dict(q_rope_out=q_rope_out, k_rope_out=k_rope_out, q_nope_out=q_nope_out, k_nope_out=k_nope_out)
        return (*out, {n: o for (n, g), o in zip(given.items(), out) if g is not None})


# Sampling: with a seed, draws are the same; which class may be drawn, the filters say.

PROBS = lambda d=F32, rows=4: torch.randn(rows, 60).softmax(-1).to(d)
LOGITS = lambda d=F32, rows=4: torch.randn(rows, 60).to(d)


@case("sampling.softmax", lambda: dict(logits=LOGITS()), {"logits": [lambda b: LOGITS(F16), lambda b: LOGITS(F32, 1) * 50], "temperature": [0.5, lambda b: torch.tensor([0.1, 1.0, 2.0, 9.0])]}, PDL)
def _(logits, temperature=None, enable_pdl=None):
    t = 1.0 if temperature is None else temperature if isinstance(temperature, float) else temperature[:, None]
    return torch.softmax(logits.float() / t, -1)


def kept(probs, top_k=None, top_p=None):
    each = lambda x, r: int(x[r]) if isinstance(x, torch.Tensor) and x.dtype in (I32, I64) else float(x[r]) if isinstance(x, torch.Tensor) else x
    out = probs.float().clone()
    for r in range(len(out)):
        if top_k is not None:
            out[r][out[r] < out[r].topk(min(each(top_k, r), 60)).values[-1]] = 0
        if top_p is not None:
            s, i = out[r].sort(descending=True)
            out[r][i[s.cumsum(0) - s >= each(top_p, r)]] = 0
    return out


KS, PS = [5, lambda b: i32(1, 3, 60, 9)], [0.3, lambda b: torch.tensor([0.1, 0.5, 0.9, 1.0])]


@case("sampling.top_k_renorm_probs", lambda: dict(probs=PROBS(), top_k=10), {"probs": [lambda b: PROBS(F32, 2), lambda b: PROBS(F16)], "top_k": KS})
def _(probs, top_k):
    k = kept(probs, top_k)
    return k / k.sum(-1, keepdim=True)


@case("sampling.top_p_renorm_probs", lambda: dict(probs=PROBS(), top_p=0.7), {"probs": [lambda b: PROBS(F32, 2)], "top_p": PS}, {"is_deterministic": [True]})
def _(probs, top_p, is_deterministic=False):
    k = kept(probs, top_p=top_p)
    return k / k.sum(-1, keepdim=True)


@case("sampling.top_k_mask_logits", lambda: dict(logits=LOGITS(), top_k=10), {"logits": [lambda b: LOGITS(F32, 2), lambda b: LOGITS(BF16) + torch.arange(60) * 4.0], "top_k": KS})
def _(logits, top_k):
    return torch.where(kept(logits.float().softmax(-1), top_k) > 0, logits.float(), -math.inf)


CASES["sampling.top_k_renorm_prob"], CASES["sampling.top_p_renorm_prob"] = CASES["sampling.top_k_renorm_probs"], CASES["sampling.top_p_renorm_probs"]


@case("topk.top_k", lambda: dict(input=LOGITS(), k=7), {"input": [lambda b: LOGITS(BF16) + torch.arange(60) * 4.0, lambda b: LOGITS(F16) + torch.arange(60) * 4.0], "k": [1, 60], "sorted": [True], "tie_break": [0, 1]},
      {"deterministic": [True], "dsa_graph_safe": [True]})
def _(input, k, sorted=False, tie_break=0, deterministic=False, dsa_graph_safe=False):
    v, i = input.topk(k)
    if not sorted:
        i = i.sort(-1).values
        v = input.gather(1, i)
    return v, i


CASES["topk.topk"] = CASES["topk.top_k"]


def places(scores, lens, k, starts):
    out = torch.full((len(scores), k), -1, dtype=torch.int64)
    for r in range(len(scores)):
        a = 0 if starts is None else int(starts[r])
        row = scores[r, a:a + int(lens[r])]
        got = row.topk(min(k, len(row))).indices.sort().values
        out[r, :len(got)] = got
    return out


@case("topk.top_k_ragged_transform", lambda: dict(input=LOGITS(), offsets=i32(0, 10, 20, 30), lengths=i32(60, 5, 0, 30), k=7),
      {"input": [lambda b: LOGITS() * 2], "offsets": [lambda b: i32(9, 8, 7, 6)], "lengths": [lambda b: i32(1, 2, 3, 4)], "k": [1, 30], "tie_break": [1], "row_starts": [lambda b: i32(0, 20, 3, 30)]},
      {"deterministic": [True], "dsa_graph_safe": [True]})
def _(input, offsets, lengths, k, row_starts=None, tie_break=0, deterministic=False, dsa_graph_safe=False):
    p = places(input, lengths, k, row_starts)
    return torch.where(p >= 0, p + offsets[:, None], -1).int()


@case("topk.top_k_page_table_transform", lambda: dict(input=LOGITS(), src_page_table=torch.randperm(400).view(4, 100).int(), lengths=i32(60, 5, 0, 30), k=7),
      {"input": [lambda b: LOGITS() * 2], "src_page_table": [lambda b: torch.randperm(240).view(4, 60).int()], "lengths": [lambda b: i32(1, 2, 3, 4)], "k": [1, 30], "tie_break": [1],
       "row_to_batch": [lambda b: i32(3, 3, 0, 1)], "row_starts": [lambda b: i32(0, 20, 3, 30)], "page_table_row_starts": [lambda b: i32(5, 0, 9, 40)], "page_size": [4],
       "out": [lambda b: torch.zeros(4, 7, dtype=I32)], "out_raw_indices": [lambda b: torch.zeros(4, 7, dtype=I32)]}, {"deterministic": [True], "dsa_graph_safe": [True]})
def _(input, src_page_table, lengths, k, row_to_batch=None, row_starts=None, page_table_row_starts=None, page_size=1, out=None, out_raw_indices=None, tie_break=0, deterministic=False, dsa_graph_safe=False):
    p = places(input, lengths, k, row_starts)
    got = torch.full_like(p, -1)
    for r in range(len(p)):
        row = src_page_table[r if row_to_batch is None else row_to_batch[r].item()]
        starts = row_starts if page_table_row_starts is None else page_table_row_starts
        start = 0 if starts is None else starts[r].item()
        for j in range(k):
            if p[r, j] >= 0:
                at = p[r, j].item()
                got[r, j] = row[start + at // page_size] * page_size + at % page_size
    written = {} if out is None else {"out": got.int()}
    if out_raw_indices is not None:
        written["out_raw_indices"] = p.int()
    return got.int(), written


# Quantization.

BITS = lambda n=21: torch.rand(n) < 0.5


def packed(x, order):
    x = F.pad(x.bool().int(), (0, -len(x) % 8)).view(-1, 8)
    w = 2 ** (torch.arange(8) if order == "little" else torch.arange(7, -1, -1))
    return (x * w).sum(-1).to(U8)


@case("quantization.packbits", lambda: dict(x=BITS()), {"x": [lambda b: BITS(8), lambda b: BITS(5).to(U8), lambda b: BITS(0)], "bitorder": ["little"]})
def _(x, bitorder="big"):
    return packed(x, bitorder)


@case("quantization.segment_packbits", lambda: dict(x=BITS(), indptr=i32(0, 5, 5, 21)), {"x": [lambda b: BITS().int()], "indptr": [lambda b: i32(0, 21), lambda b: i32(0, 8, 16, 21)], "bitorder": ["little"]})
def _(x, indptr, bitorder="big"):
    parts = [packed(x[a:b], bitorder) for a, b in zip(indptr.tolist(), indptr.tolist()[1:])]
    return torch.cat(parts), i32(0, *torch.tensor([len(p) for p in parts]).cumsum(0).tolist())


@case("quantization.per_token_group_quant_8bit", lambda: dict(x=X(F32, 5, 256), group_size=64), {"x": [lambda b: X(BF16, 3, 256)], "group_size": [128, 32], "dst_dtype": [E5M2], "column_major_scales": [True]},
      {"backend": ["cutile"], "eps": [1e-3], "scale_tma_aligned": [False], "scale_ue8m0": [False]})
def _(x, group_size, dst_dtype=E4M3, column_major_scales=False, **ignored):
    g = x.float().view(len(x), -1, group_size)
    s = g.abs().amax(-1) / torch.finfo(dst_dtype).max
    return fp8((g / s[..., None]).view(x.shape), dst_dtype), s


# Products.

MAT = lambda m, n, d=BF16: torch.randn(m, n).to(d)


@case("gemm.mm_bf16", lambda: dict(a=MAT(7, 32), b=MAT(16, 32).T), {"a": [lambda b: MAT(1, 32)], "b": [lambda b: MAT(32, 24)], "bias": [lambda b: X(BF16, 16)], "out": [lambda b: filled(MAT(7, 16))], "out_dtype": [F32, BF16]},
      {"pdl": [True], "backend": ["cublaslt", "auto"]})
def _(a, b, bias=None, out=None, out_dtype=BF16, pdl=False, backend=""):
    y = a.float() @ b.float()
    y = (y if bias is None else y + bias.float()).to(out_dtype)
    return (y, {"out": y}) if out is not None else y


@case("gemm.bmm_bf16", lambda: dict(A=MAT(14, 32).view(2, 7, 32), B=MAT(32, 32).view(2, 16, 32).transpose(1, 2)), {"A": [lambda b: MAT(2, 32).view(2, 1, 32)], "B": [lambda b: MAT(64, 8).view(2, 32, 8)], "out": [lambda b: filled(MAT(14, 16).view(2, 7, 16))], "out_dtype": [F32]},
      {"backend": ["auto"]})
def _(A, B, out=None, out_dtype=BF16, backend=""):
    y = (A.float() @ B.float()).to(out_dtype)
    return (y, {"out": y}) if out is not None else y


@case("gemm.bmm_fp8", lambda: dict(A=MAT(14, 32).view(2, 7, 32).to(E4M3), B=MAT(32, 32).to(E4M3).view(2, 16, 32).transpose(1, 2), A_scale=torch.tensor(0.5), B_scale=torch.tensor(0.25), dtype=BF16),
      {"A": [lambda b: MAT(2, 32).view(2, 1, 32).to(E4M3)], "B": [lambda b: MAT(64, 8).to(E4M3).view(2, 32, 8)], "A_scale": [lambda b: torch.tensor([3.0])], "B_scale": [lambda b: torch.tensor([3.0])], "dtype": [F16, F32], "out": [lambda b: filled(MAT(14, 16).view(2, 7, 16))]},
      {"backend": ["cudnn"]})
def _(A, B, A_scale, B_scale, dtype, out=None, backend=""):
    y = (A.float() @ B.float() * A_scale * B_scale).to(dtype)
    return (y, {"out": y}) if out is not None else y


@case("gemm.tinygemm_bf16", lambda: dict(input=MAT(7, 32), weight=MAT(16, 32), out=filled(MAT(7, 16))), {"input": [lambda b: MAT(7, 32) * 2], "weight": [lambda b: MAT(16, 32) * 2], "out": [lambda b: filled(MAT(7, 32))[:, ::2].contiguous()], "bias": [lambda b: X(BF16, 16)]}, {"use_pdl": [True]})
def _(input, weight, out, bias=None, use_pdl=False):
    y = input.float() @ weight.float().T
    return (), {"out": (y if bias is None else y + bias.float()).to(BF16)}


SCALES = lambda *s: torch.rand(*s) + 0.5


@case("gemm.fp8_blockscale_gemm_sm90", lambda: dict(input=MAT(7, 256).to(E4M3), weight=MAT(128, 256).to(E4M3), input_scale=SCALES(7, 2), weight_scale=SCALES(1, 2)),
      {"input": [lambda b: dict(input=MAT(7, 256), input_scale=None)], "weight": [lambda b: dict(weight=MAT(256, 256).to(E4M3), weight_scale=SCALES(2, 2))], "input_scale": [lambda b: SCALES(7, 2) * 2], "weight_scale": [lambda b: SCALES(1, 2) * 2],
       "out": [lambda b: filled(MAT(7, 128))], "out_dtype": [F16, BF16]})
def _(input, weight, input_scale=None, weight_scale=None, out=None, out_dtype=None):
    x = input.float() if input_scale is None else input.float() * input_scale.repeat_interleave(128, 1)
    y = x @ (weight.float() * weight_scale.repeat_interleave(128, 0)[:len(weight)].repeat_interleave(128, 1)).T
    y = y.to(out_dtype or BF16)
    return (y, {"out": y}) if out is not None else y


for _name, _d in (("grouped_mm_bf16", BF16), ("grouped_mm_fp8", E4M3)):
    @case(f"gemm.{_name}", lambda d=_d: dict(a=MAT(9, 32, d), b=MAT(48, 32, d).view(3, 16, 32), m_indptr=i32(0, 4, 4, 9)),
          {"a": [lambda b: MAT(9, 32, b["a"].dtype)], "b": [lambda b: MAT(72, 32, b["b"].dtype).view(3, 24, 32)], "m_indptr": [lambda b: i32(0, 0, 0, 9), lambda b: i32(0, 1, 2, 9).long()], "out": [lambda b: filled(MAT(9, 16))], "out_dtype": [F16 if _d == E4M3 else F32],
           **({"alpha": [lambda b: torch.tensor([0.25])]} if _d == E4M3 else {})}, {"backend": ["cudnn"], "tactic": [3]})
    def _(a, b, m_indptr, alpha=None, out=None, out_dtype=BF16, backend="", tactic=0):
        y = torch.cat([a[s:e].float() @ w.float().T for s, e, w in zip(m_indptr.tolist(), m_indptr.tolist()[1:], b)])
        y = (y if alpha is None else y * alpha).to(out_dtype)
        return (y, {"out": y}) if out is not None else y


# Experts.

def experts(x, ids, weights, up_gate, down, act=F.silu, gates_first=True):
    out = torch.zeros(x.shape).float()
    for t in range(len(x)):
        for e, w in zip(ids[t].tolist(), weights[t].float()):
            a, b = (up_gate[e].float() @ x[t].float()).chunk(2)
            a, b = (a, b) if gates_first else (b, a)
            out[t] += w * (down[e].float() @ (act(a) * b).to(x.dtype).float())
    return out.to(x.dtype)


MOE = lambda d=BF16: dict(input=(torch.randn(5, 64) / 4).to(d), token_selected_experts=torch.randint(0, 4, (5, 2), dtype=I32), token_final_scales=torch.rand(5, 2),
                          fc1_expert_weights=(torch.randn(4, 64, 64) / 4).to(d), fc2_expert_weights=(torch.randn(4, 64, 32) / 4).to(d), output_dtype=d, quant_scales=[])
BLOCKS = lambda b: dict(fc1_expert_weights=torch.randn(4, 256, 128).to(E4M3), fc2_expert_weights=torch.randn(4, 128, 128).to(E4M3), input=(torch.randn(5, 128) / 16).to(BF16),
                        quant_scales=[SCALES(4, 2, 1) / 4, SCALES(4, 1, 1) / 16], use_deepseek_fp8_block_scale=True)


@case("fused_moe.cutlass_fused_moe", MOE,
      {"input": [lambda b: (torch.randn(1, 64) / 4).to(BF16), lambda b: (torch.randn(5, 64) / 4).to(BF16)], "token_selected_experts": [lambda b: torch.randint(0, 4, (5, 2))], "token_final_scales": [lambda b: torch.rand(5, 2).to(BF16)],
       "fc1_expert_weights": [lambda b: (torch.randn(4, 64, 64) / 2).to(BF16)], "fc2_expert_weights": [lambda b: (torch.randn(4, 64, 32) / 2).to(BF16)], "output_dtype": [lambda b: MOE(F16)],
       "quant_scales": [BLOCKS], "use_deepseek_fp8_block_scale": [BLOCKS], "output": [lambda b: filled(b["input"])], "activation_type": [fi.fused_moe.ActivationType.Geglu, fi.fused_moe.ActivationType.GegluTanh]},
      {"tp_size": [2], "tp_rank": [1], "ep_rank": [0], "cluster_rank": [0], "tune_max_num_tokens": [16], "enable_pdl": [True], "swizzled_input_sf": [False], "use_fused_finalize": [False],
       "profile_ids": [[1]], "workspace_buffer": [lambda b: torch.empty(8)], "fc1_expert_biases": [None], "fc2_expert_biases": [None], "input_sf": [None], "swiglu_alpha": [None], "swiglu_beta": [None], "swiglu_limit": [None],
       "ep_size": [1], "cluster_size": [1], "enable_alltoall": [False], "use_w4_group_scaling": [False], "use_mxfp8_act_scaling": [False], "min_latency_mode": [False], "use_packed_weights": [False],
       "use_wfp4afp8_humming": [False], "situ_beta": [None], "situ_linear_beta": [None]})
def _(input, token_selected_experts, token_final_scales, fc1_expert_weights, fc2_expert_weights, output_dtype, quant_scales, output=None, activation_type=3, use_deepseek_fp8_block_scale=False, **ignored):
    act = {3: F.silu, 4: F.gelu, 8: lambda x: F.gelu(x, approximate="tanh")}[int(activation_type)]
    w1, w2 = fc1_expert_weights.float(), fc2_expert_weights.float()
    if use_deepseek_fp8_block_scale:
        big = lambda s: s.repeat_interleave(128, 1).repeat_interleave(128, 2)
        w1, w2 = w1 * big(quant_scales[0]), w2 * big(quant_scales[1])
    ids = token_selected_experts[:len(input)]
    y = experts(input, ids, token_final_scales, w1, w2, act, gates_first=False)
    return (y, {"output": y}) if output is not None else y


@case("fused_moe.mono_moe", lambda: dict(activations_in=(torch.randn(5, 128) / 16).to(BF16), router_logits=torch.randn(5, 8), expert_weights_up=torch.randn(8, 256, 128).to(E4M3), expert_scales_up=SCALES(8, 2, 1) / 4,
                                         expert_weights_down=torch.randn(8, 128, 128).to(E4M3), expert_scales_down=SCALES(8, 1, 1) / 16, top_k=2),
      {"activations_in": [lambda b: (torch.randn(5, 128) / 16).to(BF16)], "router_logits": [lambda b: torch.randn(5, 8) * 3], "expert_weights_up": [lambda b: torch.randn(8, 256, 128).to(E4M3)], "expert_scales_up": [lambda b: SCALES(8, 2, 1) / 8],
       "expert_weights_down": [lambda b: torch.randn(8, 128, 128).to(E4M3)], "expert_scales_down": [lambda b: SCALES(8, 1, 1) / 8], "top_k": [1, 4], "scoring_func": ["sigmoid"], "renormalize": [False], "out": [lambda b: filled(b["activations_in"])]},
      {"scratchpad": [lambda b: fi.fused_moe.alloc_scratchpad(b["activations_in"].device)], "interleave_up": [False]})
def _(activations_in, router_logits, expert_weights_up, expert_scales_up, expert_weights_down, expert_scales_down, top_k, scoring_func="softmax", renormalize=True, out=None, scratchpad=None, interleave_up=True):
    s = router_logits.softmax(-1) if scoring_func == "softmax" else router_logits.sigmoid()
    w, ids = s.topk(top_k)
    w = w / w.sum(-1, keepdim=True) if renormalize else w
    big = lambda s: s.repeat_interleave(128, 1).repeat_interleave(128, 2)
    y = experts(activations_in, ids, w, expert_weights_up.float() * big(expert_scales_up), expert_weights_down.float() * big(expert_scales_down))
    return (y, {"out": y}) if out is not None else y


@case("fused_moe.fused_topk_deepseek", lambda: dict(scores=torch.randn(5, 16), bias=torch.randn(16), n_group=4, topk_group=2, topk=3, routed_scaling_factor=2.5, topk_values=torch.zeros(5, 3), topk_indices=torch.zeros(5, 3, dtype=I32)),
      {"scores": [lambda b: torch.randn(5, 16).to(BF16)], "bias": [lambda b: torch.randn(16) * 3], "n_group": [1, 2], "topk_group": [1, 4], "topk": [lambda b: dict(topk=1, topk_values=torch.zeros(5, 1), topk_indices=torch.zeros(5, 1, dtype=I32))],
       "routed_scaling_factor": [1.0], "topk_values": [lambda b: torch.zeros(5, 3).to(BF16)], "topk_indices": [lambda b: torch.zeros(5, 3, dtype=I64)]}, {"launch_with_pdl": [False], "backend": ["cake"], "routing_replay_out": [None]})
def _(scores, bias, n_group, topk_group, topk, routed_scaling_factor, topk_values, topk_indices, launch_with_pdl=True, backend="", routing_replay_out=None):
    topk_group = min(topk_group, n_group)
    s = scores.float().sigmoid()
    c = s + bias
    groups = c.view(5, n_group, -1).topk(min(2, 16 // n_group), -1).values.sum(-1).topk(topk_group).indices
    allowed = torch.zeros(5, n_group, dtype=torch.bool).scatter(1, groups, True).repeat_interleave(16 // n_group, 1)
    ids = c.masked_fill(~allowed, -math.inf).topk(topk).indices
    w = s.gather(1, ids)
    return (), {"topk_values": (w / w.sum(-1, keepdim=True) * routed_scaling_factor).to(topk_values.dtype), "topk_indices": ids.to(topk_indices.dtype)}


@case("fused_moe.hash_topk", lambda: dict(router_logits=torch.randn(5, 8), input_ids=torch.tensor([3, 0, 9, 3, 1]), tid2eid=torch.randint(0, 8, (10, 3), dtype=I32)),
      {"router_logits": [lambda b: torch.randn(5, 8) * 5, lambda b: torch.randn(5, 9).to(BF16)], "input_ids": [lambda b: i32(9, 9, 8, 7, 0)], "tid2eid": [lambda b: torch.randint(0, 8, (20, 6), dtype=I32)],
       "num_fused_shared_experts": [1], "routed_scaling_factor": [lambda b: dict(num_fused_shared_experts=1, routed_scaling_factor=2.5)]}, {"launch_with_pdl": [False]})
def _(router_logits, input_ids, tid2eid, num_fused_shared_experts=0, routed_scaling_factor=1.0, launch_with_pdl=True):
    ids = tid2eid[input_ids.long()]
    s = F.softplus(router_logits.float()).sqrt().gather(1, ids.long())
    w = s / s.sum(-1, keepdim=True)
    if num_fused_shared_experts:
        w = torch.cat((w, torch.full((len(w), 1), 1 / routed_scaling_factor)), 1)
        ids = torch.cat((ids, torch.full((len(w), 1), router_logits.shape[1], dtype=I32)), 1)
    return w, ids


# Adapters: 5 tokens of two pairs each; the token of the third has no adapter, and one pair's token is past them all.

def LORA(d=BF16, **other):
    a, b = (torch.randn(2, 3, 4, 32) / 4).to(d), (torch.randn(2, 3, 24, 4) / 4).to(d)
    return {**dict(x=torch.randn(5, 32).to(d), lora_a_weights=[a, (torch.randn(2, 3, 4, 32) / 4).to(d)], lora_b_weights=[b, (torch.randn(2, 3, 24, 4) / 4).to(d)],
                   sorted_token_ids=torch.tensor([0, 0, 1, 2, 2, 3, 4, 4, 7, 0]), expert_ids=torch.tensor([0, 2, 1, 1, 0, 2, 2, 0, 1, 1]), lora_indices=torch.tensor([1, 0, -1, 1, 0]),
                   topk_weights=torch.rand(10), num_experts=3), **other}


def pairs_of(tokens, experts, loras):
    for p, (t, e) in enumerate(zip(tokens.tolist(), experts.tolist())):
        if 0 <= t < len(loras) and loras[t] >= 0:
            yield p, t, e, int(loras[t])


@case("fused_moe.bgmv_moe", LORA,
      {"x": [lambda b: LORA(F16), lambda b: LORA(F32), lambda b: torch.randn(5, 32).to(BF16) * 2], "lora_a_weights": [lambda b: [t * 2 for t in b["lora_a_weights"]]],
       "lora_b_weights": [lambda b: [(torch.randn(2, 3, 40, 4) / 4).to(BF16), b["lora_b_weights"][1]]], "sorted_token_ids": [lambda b: torch.tensor([4, 3, 2, 1, 0, -1, 4, 3, 2, 1], dtype=I32)],
       "expert_ids": [lambda b: torch.tensor([2] * 10)], "lora_indices": [lambda b: torch.tensor([-1, -1, 1, 0, 0])], "topk_weights": [lambda b: torch.rand(10) * 3],
       "num_experts": [lambda b: LORA(expert_ids=torch.tensor([0, 1] * 5), num_experts=2)], "output_dim": [50]})
def _(x, lora_a_weights, lora_b_weights, sorted_token_ids, expert_ids, lora_indices, topk_weights, num_experts, output_dim=None):
    widths = [b.shape[2] for b in lora_b_weights]
    y = torch.zeros(len(x), output_dim or sum(widths))
    for p, t, e, l in pairs_of(sorted_token_ids, expert_ids, lora_indices):
        at = 0
        for a, b in zip(lora_a_weights, lora_b_weights):
            middle = (a[l, e].float() @ x[t].float()).to(x.dtype).float()
            y[t, at:at + b.shape[2]] += topk_weights[p] * (b[l, e].float() @ middle)
            at += b.shape[2]
    return y.to(x.dtype)


@pytest.mark.parametrize("wide", [torch.int64, I32])
@pytest.mark.parametrize("per_pair", [False, True])
@pytest.mark.parametrize("finalize", [True, False])
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
def test_adapters_by_address(device, dtype, per_pair, finalize, wide):
    m, args = fi.fused_moe, LORA(dtype)
    args["topk_weights"] = torch.rand(10) + wide.itemsize
    a, b, tokens, experts, loras, weights = (args[n] for n in ("lora_a_weights", "lora_b_weights", "sorted_token_ids", "expert_ids", "lora_indices", "topk_weights"))
    tokens, experts, loras = tokens.to(wide), experts.to(wide), loras.to(wide)
    x = torch.randn(10 if per_pair else 5, 32).to(dtype)
    # The first slice's matrices lie in a larger tensor, the second's one after the other.
    room = torch.zeros(2, 5, 4, 32).to(dtype)
    room[:, :3] = a[0]
    w_ptr = torch.zeros(1, 3, dtype=I64)
    assert m.fill_w_ptr(w_ptr, room, 3, 0) == 5 * 4 * 32 and m.fill_w_ptr(w_ptr, a[0], 2, 0) == 3 * 4 * 32
    stride = m.fill_w_ptr(w_ptr, room, 3, 0)
    assert w_ptr.tolist() == [[room.data_ptr() + e * 4 * 32 * room.element_size() for e in range(3)]]
    y = torch.ones(1, 10, 4).to(dtype)
    m.bgmv_moe_shrink(y, x, w_ptr, tokens, experts, loras, stride, per_pair_input=per_pair)
    want = torch.ones(1, 10, 4)
    for p, t, e, l in pairs_of(tokens, experts, loras):
        want[0, p] += a[0][l, e].float() @ x[p if per_pair else t].float()
    torch.testing.assert_close(y.float(), want, atol=3e-2, rtol=3e-2)
    m.bgmv_moe_shrink(y, x, torch.cat((w_ptr, w_ptr))[:1] * 0 + a[0].data_ptr() + torch.arange(3) * a[0].stride(1) * a[0].element_size(), tokens, experts, loras, a[0].stride(0), per_pair_input=per_pair)
    torch.testing.assert_close(y.float(), 2 * want - 1, atol=6e-2, rtol=6e-2)
    if wide == I32:
        # Of a larger tensor: adapters are further apart.
        b = [torch.cat((t, t), 1)[:, :3] for t in b]
    tables = torch.zeros(2, 3, dtype=I64)
    for s in (0, 1):
        stride = m.fill_w_ptr(tables, b[s], 3, s)
    x = torch.randn(2, 10, 4).to(dtype)
    starts, out = torch.tensor([26, 0]), torch.ones(5 if finalize else 10, 50)
    m.bgmv_moe_expand(out, x, tables, tokens, experts, weights, loras, starts, [24, 24], stride, finalize=finalize)
    want = torch.ones_like(out)
    for p, t, e, l in pairs_of(tokens, experts, loras):
        for s, at in ((0, 26), (1, 0)):
            part = b[s][l, e].float() @ x[s, p].float()
            if finalize:
                want[t, at:at + 24] += weights[p] * part
            else:
                want[p, at:at + 24] = part
    torch.testing.assert_close(out, want, atol=1e-4, rtol=1e-4)
    # Written since: read anew.
    tables[0].copy_(tables[1])
    m.bgmv_moe_expand(out, x, tables, tokens, experts, weights, loras, torch.tensor([0]), [10], stride, finalize=False) if not finalize else None
    tables[0, 1] += 3
    with pytest.raises(ValueError, match="evenly apart"):
        m.bgmv_moe_expand(out, x, tables, tokens, experts, weights, loras, starts, [24, 24], stride)


@pytest.mark.parametrize("api,arg,i", rows())
def test_one_argument(api, arg, i):
    base, varied, _, ignored = CASES[api]
    kwargs = base()
    value = {**varied, **ignored}[arg][i]
    value = value(kwargs) if callable(value) and not isinstance(value, type) else value
    kwargs.update(value if isinstance(value, dict) else {arg: value})
    if api == "fused_moe.fused_topk_deepseek":
        kwargs["topk_group"] = min(kwargs["topk_group"], kwargs["n_group"])
    if api == "fused_moe.cutlass_fused_moe" and len(kwargs["input"]) == 1:
        kwargs.update({n: kwargs[n][:1] for n in ("token_selected_experts", "token_final_scales")})
    check(api, kwargs)


@pytest.mark.parametrize("api", CASES)
def test_base(api):
    check(api, CASES[api][0]())


#: Where the arguments of the rest are varied.
ELSEWHERE = {
    "test_wrappers.py": "attention decode mla page prefill", "test_composed.py": "cascade gemm pod sparse",
    "test_sampling.py": "sampling logits_processor", "test_tokens.py": "page quantization gemm rope", "test_jit.py": "jit", "test_tools.py": "testing fi_trace",
    "test_package.py": "utils",
}
#: Constants and questions without arguments that matter, and what has a test of its own here.
PLAIN = {"topk.TopKTieBreak", "topk.can_implement_filtered_topk", "fused_moe.has_bgmv_moe", "fused_moe.has_monomoe", "fused_moe.get_scratchpad_size_bytes",
         "fused_moe.alloc_scratchpad", "fused_moe.bgmv_moe_shrink", "fused_moe.bgmv_moe_expand", "fused_moe.fill_w_ptr", "fused_moe.interleave_for_tma_wgmma_up", "fused_moe.cutlass_fused_moe_workspace_size", "fused_moe.max_num_padded_tokens"}


def test_every_argument_is_varied():
    for api, (base, varied, _, ignored) in CASES.items():
        module, name = api.split(".")
        parameters = inspect.signature(getattr(sys.modules[f"fir.flashinfer.{module}"], name)).parameters
        missing = set(parameters) - set(varied) - set(ignored) - {"factor", "attention_factor"}  # Refused, see below.
        assert not missing, (api, missing)
    for module, name, status in table():
        if status == "implemented" and f"{module}.{name}" not in CASES and f"{module}.{name}" not in PLAIN:
            assert any(module in modules.split() for modules in ELSEWHERE.values()), (module, name)


def test_plain_ones():
    m = fi.fused_moe
    assert m.has_monomoe() and m.has_bgmv_moe() and m.get_scratchpad_size_bytes() == m.alloc_scratchpad("cpu").numel() == 0
    w = torch.randn(2, 4, 4)
    assert m.interleave_for_tma_wgmma_up(w) is w and m.max_num_padded_tokens(10, 2, 8, 4) == (8 + 12 // 4) * 4
    assert m.cutlass_fused_moe_workspace_size(8, 64, 32, 4, 2, x_dtype=BF16, weight_dtype=BF16) == 0
    assert not fi.topk.__module__.startswith("torch") and fi.can_implement_filtered_topk() is False


def test_refusals():
    cases = [("norm.fused_qk_rmsnorm_rope", dict(factor=2.0), "factor"), ("norm.fused_qk_rmsnorm_rope", dict(attention_factor=2.0), "factor"),
             ("fused_moe.cutlass_fused_moe", dict(fc1_expert_biases=torch.zeros(1)), "fc1_expert_biases"), ("fused_moe.cutlass_fused_moe", dict(ep_size=2), "ep_size"),
             ("fused_moe.cutlass_fused_moe", dict(activation_type=fi.fused_moe.ActivationType.Relu2), "activation_type"), ("fused_moe.cutlass_fused_moe", dict(quant_scales=[torch.ones(1)]), "quant_scales"),
             ("fused_moe.cutlass_fused_moe", dict(output_dtype=F32), "output_dtype"), ("fused_moe.fused_topk_deepseek", dict(routing_replay_out=torch.zeros(1)), "routing_replay_out"),
             ("quantization.per_token_group_quant_8bit", dict(scale_ue8m0=True), "scale_ue8m0"), ("quantization.per_token_group_quant_8bit", dict(scale_tma_aligned=True), "scale_tma_aligned"),
             ("quantization.per_token_group_quant_8bit", dict(dst_dtype=torch.int8), "dst_dtype"), ("topk.top_k", dict(tie_break=2), "tie_break")]
    for api, change, what in cases:
        with pytest.raises(NotImplementedError, match=what):
            called(api, {**CASES[api][0](), **change})
    for name in ("use_nvfp4", "use_mxfp8"):
        for api in ("gate_residual_layernorm_gamma_beta", "gate_residual_layernorm_scale_shift", "residual_layernorm_scale_shift"):
            with pytest.raises(NotImplementedError, match=f"{name}=True is for Blackwell"):
                called(f"norm.fused_dit_{api}", {**CASES[f"norm.fused_dit_{api}"][0](), name: True})
    with pytest.raises(ValueError, match="input has shape"):
        called("norm.fused_dit_residual_layernorm_scale_shift", {n: DIT(BF16, 3, 48) for n in ("input", "scale", "shift")})
    for change in (dict(num_fused_shared_experts=2), dict(num_fused_shared_experts=1, routed_scaling_factor=0.0)):
        with pytest.raises(ValueError, match="must be"):
            called("fused_moe.hash_topk", {**CASES["fused_moe.hash_topk"][0](), **change})
    with pytest.raises(ValueError, match="channels"):
        called("norm.fused_qk_rmsnorm_rope", {**CASES["norm.fused_qk_rmsnorm_rope"][0](), "num_frame_channels": 20})
    with pytest.raises(ValueError, match="multiple of"):
        called("norm.fused_qk_rmsnorm_rope", {**CASES["norm.fused_qk_rmsnorm_rope"][0](), "ppf": 5})


def test_exchanged_weights_are_kept_and_made_anew():
    kept_, args = fi.fused_moe._EXCHANGED, MOE()
    before = len(kept_)
    first = fi.fused_moe.cutlass_fused_moe(**args)
    assert len(kept_) == before + 1 and torch.equal(first, fi.fused_moe.cutlass_fused_moe(**args)) and len(kept_) == before + 1
    args["fc1_expert_weights"].mul_(2)
    assert not torch.equal(first, fi.fused_moe.cutlass_fused_moe(**args)) and len(kept_) == before + 1
    del args
    assert len(kept_) == before
