"""FlashInfer's compiler, by its names. The library compiles what it needs when it needs it, so that a specification is
ready as soon as it is made; attention variants are the library's own (:mod:`fir.variant`), or CUDA text whose expressions
can be read as such.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any, Callable, Optional, Sequence

import torch

from .. import variant as va

__all__ = [
    "JitSpec", "JitSpecRegistry", "JitSpecStatus", "MissingJITCacheError", "build_jit_specs", "check_cuda_arch",
    "clear_cache_dir", "compile", "gen_batch_attention_module", "gen_batch_decode_mla_module", "gen_batch_decode_module",
    "gen_batch_mla_module", "gen_batch_pod_module", "gen_batch_prefill_attention_sink_module",
    "gen_batch_prefill_module", "gen_customize_batch_attention_module", "gen_customize_batch_decode_module",
    "gen_customize_batch_pod_module", "gen_customize_batch_prefill_module", "gen_customize_pod_module",
    "gen_customize_single_decode_module", "gen_customize_single_prefill_module", "gen_fmha_v2_module", "gen_jit_spec",
    "gen_pod_module", "gen_single_decode_module", "gen_single_prefill_module", "get_batch_attention_uri",
    "get_batch_decode_mla_uri", "get_batch_decode_uri", "get_batch_mla_uri", "get_batch_prefill_attention_sink_uri",
    "get_batch_prefill_uri", "get_pod_uri", "get_single_decode_uri", "get_single_prefill_uri", "jit_spec_registry",
]


class MissingJITCacheError(RuntimeError):
    """What must not be compiled is not there; never raised, as nothing is compiled beforehand."""


class Module:
    """A variant with the names of its values, in the order in which calls give them."""

    def __init__(self, name: str, variant, tensors=(), tensor_dtypes=(), scalars=(), scalar_dtypes=()) -> None:
        self.name, self._tensors, self._scalars = name, tuple(tensors), tuple(scalars)
        self._raw, self._bits = False, frozenset()
        if isinstance(variant, str):
            from ._cuda_text import translate

            self._raw = True
            variant, self._bits = translate(name, variant, tensors, tensor_dtypes, scalars, scalar_dtypes)
        elif not isinstance(variant, va.Variant):
            raise TypeError(f"variant_decl is {type(variant).__name__}, expected CUDA text or a fir.variant.Variant")
        self.variant = variant

    def values(self, args, sm_scale: float) -> tuple[dict[str, Any], float]:
        """``args`` by name, and the factor of the scores: 1 if the variant multiplies itself."""
        names = self._tensors + self._scalars
        if len(args) != len(names):
            raise TypeError(f"{self.name} got {len(args)} values, expected {len(names)}: {', '.join(names)}")
        given = {n: x for n, x in zip(names, args) if x is not None}
        for name in self._bits & given.keys():
            bytes_ = given[name].view(torch.uint8) if given[name].dtype != torch.uint8 else given[name]
            ends = torch.tensor([0, bytes_.shape[0]], dtype=torch.int32, device=bytes_.device)
            given[name] = (bytes_, ends)
        wanted = {name for name, _ in self.variant.params}
        scale = 1.0 if self._raw else float(given.get("sm_scale", sm_scale))
        return {n: x for n, x in given.items() if n in wanted}, scale


class JitSpecStatus:
    """What is known of a specification."""

    def __init__(self, spec: "JitSpec") -> None:
        self.name, self.status, self.is_compiled = spec.name, "Compiled", True


class JitSpec:
    """Something that FlashInfer compiles; here it is ready."""

    def __init__(self, name: str, module: Optional[Callable[[], Any]] = None, sources: Sequence = ()) -> None:
        self.name, self.sources, self._module = name, list(sources), module
        jit_spec_registry.register(self)

    is_compiled = is_aot = True
    needs_device_linking = False

    @property
    def jit_library_path(self) -> Path:
        """Where this package's library is, which serves all."""
        from .. import _fir

        return Path(_fir.__file__)

    aot_path = jit_library_path

    def get_library_path(self) -> Path:
        """Where this package's library is."""
        return self.jit_library_path

    def build(self, verbose: bool = False, need_lock: bool = True) -> None:
        """Nothing is left to do."""

    def load(self, so_path: Optional[Path] = None):
        """The module, if the specification is of a variant; else this specification."""
        return self if self._module is None else self._module()

    def build_and_load(self):
        """As :meth:`load`."""
        return self.load()

    try_load = build_and_load


class JitSpecRegistry:
    """The specifications that were made."""

    def __init__(self) -> None:
        self._specs: dict[str, JitSpec] = {}

    def register(self, spec: JitSpec) -> None:
        """Remembers one."""
        self._specs[spec.name] = spec

    def get_all_specs(self) -> dict[str, JitSpec]:
        """All of them."""
        return dict(self._specs)

    def get_spec_status(self, name: str) -> Optional[JitSpecStatus]:
        """That of one."""
        return JitSpecStatus(self._specs[name]) if name in self._specs else None


jit_spec_registry = JitSpecRegistry()

# `flashinfer.jit.env`: the one folder of the library's cache stands for all of them.
FLASHINFER_WORKSPACE_DIR = Path(os.environ.get("FIR_CACHE_DIR") or Path.home() / ".cache" / "fir")
FLASHINFER_JIT_DIR = FLASHINFER_GEN_SRC_DIR = FLASHINFER_CUBIN_DIR = FLASHINFER_WORKSPACE_DIR
FLASHINFER_AOT_DIR = FLASHINFER_CSRC_DIR = FLASHINFER_INCLUDE_DIR = FLASHINFER_WORKSPACE_DIR


def gen_jit_spec(name: str, sources=(), extra_cflags=None, extra_cuda_cflags=None, extra_ldflags=None,
                 extra_include_paths=None, needs_device_linking: bool = False) -> JitSpec:
    """Sources of one's own cannot be compiled here."""
    raise NotImplementedError(f"gen_jit_spec({name!r}): sources of one's own are not compiled; write a fir.variant")


def build_jit_specs(specs, verbose: bool = False, skip_prebuilt: bool = True) -> None:
    """Builds each."""
    for spec in specs:
        spec.build(verbose)


def check_cuda_arch() -> None:
    """Every device that the library runs on will do."""


def clear_cache_dir() -> None:
    """Forgets the specifications; the library keeps its kernels where ``FIR_CACHE_DIR`` says."""
    jit_spec_registry._specs.clear()


_SHORT = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2",
          torch.int32: "i32", torch.int64: "i64", torch.uint8: "u8", torch.float32: "f32"}


def _uri(prefix: str, /, **parts) -> str:
    return "_".join([prefix] + [f"{k}_{_SHORT.get(v, v) if isinstance(v, torch.dtype) else v}" for k, v in parts.items()])


def get_single_decode_uri(dtype_q, dtype_kv, dtype_o, head_dim_qk: int, head_dim_vo: int, pos_encoding_mode: int,
                          use_sliding_window: bool, use_logits_soft_cap: bool) -> str:
    """A name for these choices."""
    return _uri("single_decode_with_kv_cache", dtype_q=dtype_q, dtype_kv=dtype_kv, dtype_o=dtype_o,
                head_dim_qk=head_dim_qk, head_dim_vo=head_dim_vo, posenc=pos_encoding_mode, use_swa=use_sliding_window,
                use_logits_cap=use_logits_soft_cap)


def get_batch_decode_uri(dtype_q, dtype_kv, dtype_o, dtype_idx, head_dim_qk: int, head_dim_vo: int,
                         pos_encoding_mode: int, use_sliding_window: bool, use_logits_soft_cap: bool) -> str:
    """A name for these choices."""
    return _uri("batch_decode_with_kv_cache", dtype_q=dtype_q, dtype_kv=dtype_kv, dtype_o=dtype_o, dtype_idx=dtype_idx,
                head_dim_qk=head_dim_qk, head_dim_vo=head_dim_vo, posenc=pos_encoding_mode, use_swa=use_sliding_window,
                use_logits_cap=use_logits_soft_cap)


def get_batch_mla_uri(backend: str, dtype_q, dtype_kv, dtype_o, dtype_idx, head_dim_ckv: int, head_dim_kpe: int,
                      use_profiler: bool) -> str:
    """A name for these choices."""
    return _uri("batch_mla_attention", dtype_q=dtype_q, dtype_kv=dtype_kv, dtype_o=dtype_o, dtype_idx=dtype_idx,
                head_dim_ckv=head_dim_ckv, head_dim_kpe=head_dim_kpe, profiler=use_profiler) + _sm90(backend)


def get_batch_decode_mla_uri(dtype_q, dtype_kv, dtype_o, dtype_idx, head_dim_ckv: int, use_sliding_window: bool,
                             use_logits_soft_cap: bool, arc: str) -> str:
    """A name for these choices."""
    return _uri("batch_decode_mla_with_kv_cache", dtype_q=dtype_q, dtype_kv=dtype_kv, dtype_o=dtype_o,
                dtype_idx=dtype_idx, head_dim_ckv=head_dim_ckv, use_swa=use_sliding_window,
                use_logits_cap=use_logits_soft_cap, arc=arc)


def _sm90(backend: str) -> str:
    return "_sm90" if backend == "fa3" else ""


def get_single_prefill_uri(backend: str, dtype_q, dtype_kv, dtype_o, head_dim_qk: int, head_dim_vo: int,
                           pos_encoding_mode: int, use_sliding_window: bool, use_logits_soft_cap: bool,
                           use_fp16_qk_reduction: bool) -> str:
    """A name for these choices."""
    return _uri("single_prefill_with_kv_cache", dtype_q=dtype_q, dtype_kv=dtype_kv, dtype_o=dtype_o,
                head_dim_qk=head_dim_qk, head_dim_vo=head_dim_vo, posenc=pos_encoding_mode, use_swa=use_sliding_window,
                use_logits_cap=use_logits_soft_cap, f16qk=use_fp16_qk_reduction) + _sm90(backend)


def get_batch_prefill_uri(backend: str, dtype_q, dtype_kv, dtype_o, dtype_idx, head_dim_qk: int, head_dim_vo: int,
                          pos_encoding_mode: int, use_sliding_window: bool, use_logits_soft_cap: bool,
                          use_fp16_qk_reduction: bool) -> str:
    """A name for these choices."""
    return _uri("batch_prefill_with_kv_cache", dtype_q=dtype_q, dtype_kv=dtype_kv, dtype_o=dtype_o, dtype_idx=dtype_idx,
                head_dim_qk=head_dim_qk, head_dim_vo=head_dim_vo, posenc=pos_encoding_mode, use_swa=use_sliding_window,
                use_logits_cap=use_logits_soft_cap, f16qk=use_fp16_qk_reduction) + _sm90(backend)


def get_batch_prefill_attention_sink_uri(backend: str, dtype_q, dtype_kv, dtype_o, dtype_idx, head_dim_qk: int,
                                         head_dim_vo: int, pos_encoding_mode: int, use_sliding_window: bool) -> str:
    """A name for these choices."""
    return _uri("batch_prefill_with_attention_sink_kv_cache", dtype_q=dtype_q, dtype_kv=dtype_kv, dtype_o=dtype_o,
                dtype_idx=dtype_idx, head_dim_qk=head_dim_qk, head_dim_vo=head_dim_vo, posenc=pos_encoding_mode,
                use_swa=use_sliding_window) + _sm90(backend)


def get_batch_attention_uri(dtype_q, dtype_kv, dtype_o, dtype_idx, head_dim_qk: int, head_dim_vo: int,
                            pos_encoding_mode: int, use_logits_soft_cap: bool, use_profiler: bool) -> str:
    """A name for these choices."""
    return _uri("batch_attention_with_kv_cache", dtype_q=dtype_q, dtype_kv=dtype_kv, dtype_o=dtype_o,
                dtype_idx=dtype_idx, head_dim_qk=head_dim_qk, head_dim_vo=head_dim_vo, posenc=pos_encoding_mode,
                use_logits_cap=use_logits_soft_cap, use_profiler=use_profiler)


def get_pod_uri(dtype_q, dtype_kv, dtype_o, head_dim: int, pos_encoding_mode_p: int, use_sliding_window_p: bool,
                use_logits_soft_cap_p: bool, use_fp16_qk_reduction: bool, dtype_idx, pos_encoding_mode_d: int,
                use_sliding_window_d: bool, use_logits_soft_cap_d: bool) -> str:
    """A name for these choices."""
    return _uri("pod_with_kv_cache", dtype_q=dtype_q, dtype_kv=dtype_kv, dtype_o=dtype_o, head_dim=head_dim,
                posenc_p=pos_encoding_mode_p, use_swa_p=use_sliding_window_p, use_logits_cap_p=use_logits_soft_cap_p,
                posenc_d=pos_encoding_mode_d, use_swa_d=use_sliding_window_d, use_logits_cap_d=use_logits_soft_cap_d,
                dtype_idx=dtype_idx, f16qk=use_fp16_qk_reduction)


def _ready(uri) -> Callable[..., JitSpec]:
    @functools.wraps(uri)
    def gen(*args, **kwargs) -> JitSpec:
        return JitSpec(uri(*args, **kwargs))

    gen.__doc__ = "A specification that is ready; its arguments make its name."
    return gen


gen_single_decode_module = _ready(get_single_decode_uri)
gen_single_prefill_module = _ready(get_single_prefill_uri)
gen_batch_decode_module = _ready(get_batch_decode_uri)
gen_batch_prefill_module = _ready(get_batch_prefill_uri)
gen_batch_prefill_attention_sink_module = _ready(get_batch_prefill_attention_sink_uri)
gen_batch_attention_module = _ready(get_batch_attention_uri)
gen_batch_mla_module = _ready(get_batch_mla_uri)
gen_pod_module = _ready(get_pod_uri)
gen_batch_pod_module = _ready(get_pod_uri)


def gen_batch_decode_mla_module(dtype_q, dtype_kv, dtype_o, dtype_idx, head_dim: int, num_qo_heads: int,
                                use_sliding_window: bool, use_logits_soft_cap: bool, use_tensor_cores: bool) -> JitSpec:
    """A specification that is ready."""
    return JitSpec(get_batch_decode_mla_uri(dtype_q, dtype_kv, dtype_o, dtype_idx, head_dim, use_sliding_window,
                                            use_logits_soft_cap, "sm90"))


def gen_fmha_v2_module(input_layout: str, input_dtype, output_dtype=None) -> JitSpec:
    """A specification that is ready."""
    return JitSpec(_uri("fmha_v2", layout=input_layout, dtype=input_dtype, dtype_o=output_dtype or input_dtype))


def _whole(uri: str):
    def gen(*args, **kwargs) -> JitSpec:
        """A specification that is ready."""
        return JitSpec("_".join([uri, *(str(_SHORT.get(a, a)) for a in args), *(f"{k}_{v}" for k, v in kwargs.items())]))

    return gen


gen_act_and_mul_module, gen_norm_module, gen_page_module = _whole("act_and_mul"), _whole("norm"), _whole("page")
gen_rope_module, gen_sampling_module, gen_topk_module = _whole("rope"), _whole("sampling"), _whole("topk")
gen_quantization_module, gen_cascade_module, gen_xqa_module = _whole("quantization"), _whole("cascade"), _whole("xqa")
gen_gemm_module, gen_gemm_sm90_module = _whole("gemm"), _whole("gemm_sm90")
gen_fp8_blockscale_gemm_sm90_module = _whole("fp8_blockscale_gemm_90")


def _customized(uri, tensors, tensor_dtypes, scalars, scalar_dtypes, name, decl, mode: int, window: bool, cap: bool):
    if mode or window or cap:
        raise NotImplementedError(
            f"{uri}: pos_encoding_mode, use_sliding_window and use_logits_soft_cap of a variant of one's own are for the "
            "variant to tell")
    make = functools.cache(lambda: Module(name, decl, tensors, tensor_dtypes, scalars, scalar_dtypes))
    return JitSpec(uri, make)


def gen_customize_single_decode_module(
    uri: str, dtype_q, dtype_kv, dtype_o, head_dim_qk: int, head_dim_vo: int, additional_tensor_names,
    additional_tensor_dtypes, additional_scalar_names, additional_scalar_dtypes, variant_name: str, variant_decl,
    pos_encoding_mode: int = 0, use_sliding_window: bool = False, use_logits_soft_cap: bool = False,
) -> JitSpec:
    """A variant of one's own: ``variant_decl`` is CUDA text or a :class:`fir.variant.Variant`. Types and sizes are those
    of the tensors of a call."""
    return _customized(uri, additional_tensor_names, additional_tensor_dtypes, additional_scalar_names,
                       additional_scalar_dtypes, variant_name, variant_decl, pos_encoding_mode, use_sliding_window,
                       use_logits_soft_cap)


def gen_customize_single_prefill_module(
    backend: str, uri: str, dtype_q, dtype_kv, dtype_o, head_dim_qk: int, head_dim_vo: int, additional_tensor_names,
    additional_tensor_dtypes, additional_scalar_names, additional_scalar_dtypes, variant_name: str, variant_decl,
    pos_encoding_mode: int = 0, use_sliding_window: bool = False, use_logits_soft_cap: bool = False,
    use_fp16_qk_reduction: bool = False, fp8_enabled: bool = False,
) -> JitSpec:
    """As ``gen_customize_single_decode_module``; ``backend`` says in which form a text is written, and both are read."""
    return _customized(uri, additional_tensor_names, additional_tensor_dtypes, additional_scalar_names,
                       additional_scalar_dtypes, variant_name, variant_decl, pos_encoding_mode, use_sliding_window,
                       use_logits_soft_cap)


def gen_customize_batch_decode_module(
    uri: str, dtype_q, dtype_kv, dtype_o, idtype, head_dim_qk: int, head_dim_vo: int, additional_tensor_names,
    additional_tensor_dtypes, additional_scalar_names, additional_scalar_dtypes, variant_name: str, variant_decl,
    pos_encoding_mode: int = 0, use_sliding_window: bool = False, use_logits_soft_cap: bool = False,
) -> JitSpec:
    """As ``gen_customize_single_decode_module``, for wrappers of batches."""
    return _customized(uri, additional_tensor_names, additional_tensor_dtypes, additional_scalar_names,
                       additional_scalar_dtypes, variant_name, variant_decl, pos_encoding_mode, use_sliding_window,
                       use_logits_soft_cap)


def gen_customize_batch_prefill_module(
    backend: str, uri: str, dtype_q, dtype_kv, dtype_o, idtype, head_dim_qk: int, head_dim_vo: int,
    additional_tensor_names, additional_tensor_dtypes, additional_scalar_names, additional_scalar_dtypes,
    variant_name: str, variant_decl, pos_encoding_mode: int = 0, use_sliding_window: bool = False,
    use_logits_soft_cap: bool = False, use_fp16_qk_reduction: bool = False, fp8_enabled: bool = False,
) -> JitSpec:
    """As ``gen_customize_single_prefill_module``, for wrappers of batches."""
    return _customized(uri, additional_tensor_names, additional_tensor_dtypes, additional_scalar_names,
                       additional_scalar_dtypes, variant_name, variant_decl, pos_encoding_mode, use_sliding_window,
                       use_logits_soft_cap)


def gen_customize_batch_attention_module(
    uri: str, dtype_q, dtype_kv, dtype_o, idtype, head_dim_qk: int, head_dim_vo: int, additional_tensor_names,
    additional_tensor_dtypes, additional_scalar_names, additional_scalar_dtypes, variant_name: str, variant_decl,
    pos_encoding_mode: int = 0, use_logits_soft_cap: bool = False, use_profiler: bool = False,
) -> JitSpec:
    """As ``gen_customize_single_decode_module``, for ``BatchAttention``."""
    return _customized(uri, additional_tensor_names, additional_tensor_dtypes, additional_scalar_names,
                       additional_scalar_dtypes, variant_name, variant_decl, pos_encoding_mode, False,
                       use_logits_soft_cap)


def gen_customize_pod_module(
    uri: str, dtype_q, dtype_kv, dtype_o, dtype_idx, head_dim: int, additional_tensor_names, additional_tensor_dtypes,
    additional_scalar_names, additional_scalar_dtypes, variant_name_p: str, variant_name_d: str, variant_decl,
    pos_encoding_mode_p: int = 0, use_sliding_window_p: bool = False, use_logits_soft_cap_p: bool = False,
    pos_encoding_mode_d: int = 0, use_sliding_window_d: bool = False, use_logits_soft_cap_d: bool = False,
    use_fp16_qk_reduction: bool = False,
) -> JitSpec:
    """As ``gen_customize_single_decode_module``, one variant for prefill and decode."""
    if variant_name_p != variant_name_d:
        raise NotImplementedError(f"variants {variant_name_p} and {variant_name_d}, expected one for both parts")
    return _customized(uri, additional_tensor_names, additional_tensor_dtypes, additional_scalar_names,
                       additional_scalar_dtypes, variant_name_p, variant_decl,
                       pos_encoding_mode_p or pos_encoding_mode_d, use_sliding_window_p or use_sliding_window_d,
                       use_logits_soft_cap_p or use_logits_soft_cap_d)


gen_customize_batch_pod_module = gen_customize_pod_module


def module_of(jit_args, jit_kwargs=None) -> Module:
    """The module of a wrapper's ``jit_args``: ``[uri, dtype_q, dtype_kv, dtype_o, idtype, head_dim_qk, head_dim_vo,
    tensor names, tensor types, scalar names, scalar types, variant name, variant]``."""
    if len(jit_args) != 13:
        raise ValueError(f"jit_args has {len(jit_args)} entries, expected 13")
    uri, rest = jit_args[0], jit_args[7:]
    flags = jit_kwargs or {}
    return _customized(uri, *rest, flags.get("pos_encoding_mode", 0), flags.get("use_sliding_window", False),
                       flags.get("use_logits_soft_cap", False)).build_and_load()


class _Keys:
    T = property(lambda self: self)


class _Queries:
    def __matmul__(self, keys) -> va.Expr:
        if not isinstance(keys, _Keys):
            raise TypeError("q @ k.T is the only product of a score function")
        return va.score


class _Names:
    def __getattr__(self, name: str) -> va.Expr:
        return va.f32(name)


class Kernel:
    """What :func:`compile` returns."""

    def __init__(self, variant: va.Variant) -> None:
        self.variant = variant

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, params=None, **options) -> torch.Tensor:
        """Attention of one request; ``params`` has an attribute or an item for each name of the score function."""
        from ..plans import single_prefill

        of = params.__getitem__ if isinstance(params, dict) else functools.partial(getattr, params)
        values = {name: of(name) for name, _ in self.variant.params}
        return single_prefill(q, k, v, self.variant, sm_scale=1.0, params=values or None, **options)


def compile(score: Callable[..., Any], name: Optional[str] = None) -> Kernel:
    """A kernel from a Python function of a score: ``score(q, k, params)`` returns an expression of ``q @ k.T`` and of
    numbers named by attributes of ``params``."""
    from ._cuda_text import variant_name

    return Kernel(va.variant(variant_name(name or score.__name__), logits=score(_Queries(), _Keys(), _Names())))
