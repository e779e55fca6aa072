"""Calls of ``flashinfer`` that ask ``apply`` first; what does not fit goes to the function that was there.

Functions and wrappers of norm, RoPE, sampling, MoE in fp8 blocks, GEMM, decode, prefill and MLA, and ``torch.nn.functional.linear``.
A call fits if it uses nothing beyond what its definition has, and the table has a solution for its size. ``enable_tracing`` sees
the same calls.
"""

import dataclasses
import functools
import importlib
import inspect
import math
import re
import weakref

from ._enabled import _wanted
from .apply import get_apply_runtime
from .tracing import get_tracing_runtime

_patched, _plans, _MISSED = {}, weakref.WeakKeyDictionary(), object()


def _asked():
    """Whether somebody wants to know of calls."""
    return get_apply_runtime() is not None or get_tracing_runtime() is not None


def _eps_of(definition):
    """What a norm's definition adds to the mean of the squares: its reference says ``EPS =``, or it is 1e-6."""
    found = re.search(r"\bEPS = ([0-9.eE+-]+)", definition.reference)
    return float(found[1]) if found else 1e-6


def _arguments(definition, values):
    """Arguments of a definition in its order, if the call has them all; a norm's ``eps`` must be the definition's."""
    other = "eps" in values and "eps" not in definition.inputs and values["eps"] != _eps_of(definition)
    if other or any(values.get(n) is None for n in definition.inputs):
        return None
    return tuple(values[n] for n in definition.inputs)


def _ask(name, values):
    """The result of the best solution of a definition, given values for its inputs by name; ``_MISSED`` without one."""
    runtime, recorder = get_apply_runtime(), get_tracing_runtime()
    if recorder is not None and name in recorder.trace_set.definitions:
        args = _arguments(recorder.trace_set.definitions[name], values)
        if args is not None:
            recorder.collect(name, args, {})
    entry = runtime.entries.get(name) if runtime else None
    args = _arguments(entry.definition, values) if entry else None
    return _MISSED if args is None else runtime.dispatch(name, args, {}, lambda *_: _MISSED)


def _function(resolve, finish=None, like=None):
    """An adapter of a function: ``resolve`` takes the arguments given, and says a definition's name and its inputs. ``like`` has
    its arguments, where it is not written in Python and does not say them."""
    def adapter(original):
        signature = inspect.signature(like or original)

        @functools.wraps(original)
        def wrapped(*args, **kwargs):
            if _asked():
                given = {n: v for n, v in signature.bind(*args, **kwargs).arguments.items() if v is not None}
                found = resolve(given)
                result = _ask(*found) if found else _MISSED
                if result is not _MISSED:
                    return finish(given, result) if finish else result
            return original(*args, **kwargs)
        return wrapped
    return adapter


def _only(given, *names):
    return not set(given) - set(names)


def _rmsnorm(given):
    if _only(given, "input", "weight", "eps", "out", "enable_pdl"):
        values = {"hidden_states": given["input"], "weight": given["weight"], "eps": given.get("eps", 1e-6)}
        return f"rmsnorm_h{given['weight'].shape[-1]}", values


def _fused_add_rmsnorm(given):
    if _only(given, "input", "residual", "weight", "eps", "enable_pdl"):
        values = {"hidden_states": given["input"], "residual": given["residual"], "weight": given["weight"],
                  "eps": given.get("eps", 1e-6)}
        return f"fused_add_rmsnorm_h{given['weight'].shape[-1]}", values


def _in_place(given, result):
    # The function works in place and definitions do not.
    given["residual"].add_(given["input"])
    given["input"].copy_(result)


def _to_out(given, result):
    return given["out"].copy_(result) if "out" in given else result


def _sampling(kind):
    def resolve(given):
        if not _only(given, "probs", "top_k", "top_p", "deterministic", "generator"):
            return None
        probs, values = given["probs"], {"probs": given["probs"]}
        for name in ("top_k", "top_p"):
            value = given.get(name)
            if value is not None and not hasattr(value, "shape"):
                dtype = "int32" if name == "top_k" else "float32"
                torch = importlib.import_module("torch")
                value = torch.full((probs.shape[0],), value, dtype=getattr(torch, dtype), device=probs.device)
            values[name] = value
        return f"{kind}_sampling_from_probs_v{probs.shape[-1]}", values
    return resolve


def _like_samples(given, result):
    return result.to(importlib.import_module("torch").int32)


def _rope(given):
    head, cache, style = given["head_size"], given["cos_sin_cache"], "neox" if given.get("is_neox", True) else "gptj"
    heads = lambda x: x.view(x.shape[0], -1, head)
    values = {"q": heads(given["query"]), "k": heads(given["key"]), "cos_sin_cache": cache, "positions": given["positions"].long()}
    return f"rope_with_cos_sin_cache_{style}_style_d{head}_rd{cache.shape[-1]}", values


def _flat(given, result):
    return tuple(r.reshape(x.shape) for r, x in zip(result, (given["query"], given["key"])))


def _linear(given):
    x, weight = given["input"], given["weight"]
    if _only(given, "input", "weight") and weight.dim() == 2 and x.dim() >= 2:
        return f"gemm_n{weight.shape[0]}_k{weight.shape[1]}", {"A": x.reshape(-1, x.shape[-1]), "B": weight}


def _rows(given, result):
    return result.reshape(*given["input"].shape[:-1], -1)


def _mm(given):
    a, rows = given["a"], given["b"].T
    same = str(given.get("out_dtype", "torch.bfloat16")) == str(a.dtype)
    if same and _only(given, "a", "b", "out", "out_dtype", "pdl", "backend") and a.dim() == 2 and rows.is_contiguous():
        return f"gemm_n{rows.shape[0]}_k{rows.shape[1]}", {"A": a, "B": rows}


def _moe(given):
    """Routings 1 (the best ``top_k``, renormalized) and 2 (DeepSeek's); weights must lie as they were trained."""
    usual = {"do_finalize": True, "use_shuffled_weight": False, "weight_layout": 0, "norm_topk_prob": True,
             **dict.fromkeys(("output", "activation_type", "fp8_quantization_type", "routing_replay_out"))}
    if any(given.get(name, value) != value for name, value in usual.items()):
        return None
    w, method = given["gemm1_weights"], int(given.get("routing_method_type", 0))
    size = f"e{w.shape[0]}_h{w.shape[2]}_i{w.shape[1] // 2}"
    groups, fields = (given.get("n_group"), given.get("topk_group")), (
        "routing_logits", "hidden_states", "hidden_states_scale", "gemm1_weights", "gemm1_weights_scale", "gemm2_weights",
        "gemm2_weights_scale")
    values = {name: given[name] for name in fields}
    if method == 1 and not any(groups) and given["num_experts"] == w.shape[0]:
        return f"moe_fp8_block_scale_renorm_topk{given['top_k']}_{size}", values
    if method == 2 and "routing_bias" in given and all(groups):
        more = {"routing_bias": given["routing_bias"], "local_expert_offset": given.get("local_expert_offset", 0),
                "routed_scaling_factor": given.get("routed_scaling_factor", 1.0)}
        return f"moe_fp8_block_scale_ds_routing_topk{given['top_k']}_ng{groups[0]}_kg{groups[1]}_{size}", {**values, **more}
    return None


def _plan(original):
    signature = inspect.signature(original)

    @functools.wraps(original)
    def plan(self, *args, **kwargs):
        result = original(self, *args, **kwargs)
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        _plans[self] = dict(bound.arguments)
        return result
    return plan


def _run(resolve):
    """An adapter of a wrapper's ``run``: ``resolve`` takes the plan's and the call's arguments."""
    def adapter(original):
        signature = inspect.signature(original)

        @functools.wraps(original)
        def run(self, *args, **kwargs):
            plan = _plans.get(self)
            if _asked() and plan is not None and _usual(plan) and getattr(self, "_kv_layout", "NHD") == "NHD":
                given = {n: v for n, v in signature.bind(self, *args, **kwargs).arguments.items() if v is not None}
                found = resolve(plan, given)
                result = _ask(*found) if found else _MISSED
                if result is not _MISSED:
                    out, lse = (to.copy_(r) if to is not None else r for r, to in zip(result, (given.get("out"), given.get("lse"))))
                    return (out, lse) if given.get("return_lse") else out
            return original(self, *args, **kwargs)
        return run
    return adapter


def _usual(plan):
    """Whether a plan asks for nothing that definitions do not have."""
    off = {"custom_mask": None, "packed_custom_mask": None, "pos_encoding_mode": "NONE", "window_left": -1, "prefix_len_ptr": None}
    return all(plan.get(name, usual) == usual if usual is not None else plan.get(name) is None for name, usual in off.items()) \
        and not plan.get("logits_soft_cap") and plan.get("q_len_per_req", 1) == 1


_CALL = ("self", "out", "lse", "return_lse", "enable_pdl")


def _paged(given):
    cache = given["paged_kv_cache"]
    return cache if isinstance(cache, tuple) else (cache[:, 0], cache[:, 1])


def _decode(plan, given):
    if not _only(given, "q", "paged_kv_cache", *_CALL):
        return None
    q, (k, v) = given["q"], _paged(given)
    values = {"q": q, "k_cache": k, "v_cache": v, "kv_indptr": plan["indptr"].to(q.device),
              "kv_indices": plan["indices"].to(q.device), "kv_last_page_len": plan["last_page_len"].to(q.device),
              "sm_scale": plan.get("sm_scale") or 1 / math.sqrt(q.shape[-1])}
    return f"gqa_paged_decode_h{q.shape[1]}_kv{k.shape[2]}_d{q.shape[2]}_ps{k.shape[1]}", values


def _prefill(plan, given):
    if not _only(given, "q", "paged_kv_cache", *_CALL) or not plan.get("causal"):
        return None
    q, (k, v) = given["q"], _paged(given)
    values = {"q": q, "k_cache": k, "v_cache": v, "qo_indptr": plan["qo_indptr"].to(q.device),
              "kv_indptr": plan["paged_kv_indptr"].to(q.device), "kv_indices": plan["paged_kv_indices"].to(q.device),
              "kv_last_page_len": plan["paged_kv_last_page_len"].to(q.device),
              "sm_scale": plan.get("sm_scale") or 1 / math.sqrt(q.shape[-1])}
    return f"gqa_paged_prefill_causal_h{q.shape[1]}_kv{k.shape[2]}_d{q.shape[2]}_ps{k.shape[1]}", values


def _ragged(plan, given):
    if not _only(given, "q", "k", "v", *_CALL) or not plan.get("causal"):
        return None
    q, k = given["q"], given["k"]
    values = {"q": q, "k": k, "v": given["v"], "qo_indptr": plan["qo_indptr"].to(q.device),
              "kv_indptr": plan["kv_indptr"].to(q.device), "sm_scale": plan.get("sm_scale") or 1 / math.sqrt(q.shape[-1])}
    return f"gqa_ragged_prefill_causal_h{q.shape[1]}_kv{k.shape[1]}_d{q.shape[2]}", values


def _mla(plan, given):
    if not _only(given, "q_nope", "q_pe", "ckv_cache", "kpe_cache", *_CALL):
        return None
    q, ckv = given["q_nope"], given["ckv_cache"]
    page, decode = ckv.shape[1], q.shape[0] == len(plan["qo_indptr"]) - 1
    if not decode and not plan.get("causal"):
        return None
    values = {"q_nope": q, "q_pe": given["q_pe"], "ckv_cache": ckv, "kpe_cache": given["kpe_cache"],
              "qo_indptr": plan["qo_indptr"].to(q.device), "kv_indptr": plan["kv_indptr"].to(q.device),
              "kv_indices": plan["kv_indices"].to(q.device),
              "kv_last_page_len": ((plan["kv_len_arr"] - 1) % page + 1).to(q.device), "sm_scale": plan["sm_scale"]}
    kind = "decode" if decode else "prefill_causal"
    return f"mla_paged_{kind}_h{q.shape[1]}_ckv{q.shape[2]}_kpe{given['q_pe'].shape[2]}_ps{page}", values


_ADAPTERS = {
    "flashinfer.norm:rmsnorm": _function(_rmsnorm, _to_out),
    "flashinfer.norm:fused_add_rmsnorm": _function(_fused_add_rmsnorm, _in_place),
    "flashinfer.sampling:top_k_sampling_from_probs": _function(_sampling("top_k"), _like_samples),
    "flashinfer.sampling:top_p_sampling_from_probs": _function(_sampling("top_p"), _like_samples),
    "flashinfer.sampling:top_k_top_p_sampling_from_probs": _function(_sampling("top_k_top_p"), _like_samples),
    "flashinfer.rope:apply_rope_with_cos_sin_cache": _function(_rope, _flat),
    "flashinfer.fused_moe:trtllm_fp8_block_scale_moe": _function(_moe),
    "flashinfer.gemm:mm_bf16": _function(_mm, _to_out),
    "torch.nn.functional:linear": _function(_linear, _rows, lambda input, weight, bias=None: None),
    "flashinfer.decode:BatchDecodeWithPagedKVCacheWrapper.plan": _plan,
    "flashinfer.decode:BatchDecodeWithPagedKVCacheWrapper.run": _run(_decode),
    "flashinfer.prefill:BatchPrefillWithPagedKVCacheWrapper.plan": _plan,
    "flashinfer.prefill:BatchPrefillWithPagedKVCacheWrapper.run": _run(_prefill),
    "flashinfer.prefill:BatchPrefillWithRaggedKVCacheWrapper.plan": _plan,
    "flashinfer.prefill:BatchPrefillWithRaggedKVCacheWrapper.run": _run(_ragged),
    "flashinfer.mla:BatchMLAPagedAttentionWrapper.plan": _plan,
    "flashinfer.mla:BatchMLAPagedAttentionWrapper.run": _run(_mla),
}


@dataclasses.dataclass(frozen=True)
class PatchSpec:
    """What an adapter of one's own patches: a function, ``package.module.function``, or a method of a class there."""

    path: str
    kind: str = "function"
    name: str = ""
    ctx_key: str = ""


def _patch(key, adapter):
    """Patches ``module:function`` or ``module:class.method``, if it is there and was not patched."""
    module, _, path = key.partition(":")
    *owners, name = path.split(".")
    try:
        target = functools.reduce(getattr, owners, importlib.import_module(module))
        original = getattr(target, name)
        if key in _patched:
            return
        wrapper, places = adapter(original), [target]
    except Exception:  # what cannot be imported cannot be called either, and packages fail in their own ways
        return
    root = importlib.import_module(module.split(".")[0])
    if not owners and getattr(root, name, None) is original:
        places.append(root)
    _patched[key] = (places, name, original)
    for place in places:
        setattr(place, name, wrapper)


def install_flashinfer_integrations(*adapters):
    """Patches what is there of ``flashinfer``, until ``uninstall_flashinfer_integrations``; idempotent. Names of what is patched.

    ``enable_apply`` and ``enable_tracing`` do so as long as they are enabled.

    An adapter of one's own has ``targets()``, a list of ``PatchSpec``, and ``make_wrapper(spec, original)``; it goes before ours.
    """
    _wanted.clear()
    for adapter in adapters:
        for spec in adapter.targets():
            module, _, name = spec.path.rpartition(".")
            if spec.kind != "function":
                module, _, owner = module.rpartition(".")
                name = f"{owner}.{name}"
            _patch(f"{module}:{name}", functools.partial(adapter.make_wrapper, spec))
    for key, adapter in _ADAPTERS.items():
        _patch(key, adapter)
    return sorted(_patched)


def uninstall_flashinfer_integrations():
    """Puts back what was there."""
    for places, name, original in _patched.values():
        for place in places:
            setattr(place, name, original)
    _patched.clear()
