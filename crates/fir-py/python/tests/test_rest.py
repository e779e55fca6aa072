"""Arguments that the other files leave at one value: names of specifications, what is ignored, what is refused, sizes that a
test of one shape does not reach."""

import functools
import inspect
import math

import pytest
import torch
from conftest import Pages, attention
from test_wrappers import DIM, HEADS, KV_HEADS, LENS, PAGE, QO, batch, i32, lse_of, near, one, padded

import fir.flashinfer as fi
from fir.flashinfer import jit, testing

BF16, F16, F32, I32, I64 = torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.int64
E4M3, U8 = torch.float8_e4m3fn, torch.uint8

# Specifications: every argument is part of the name, or changes nothing.

VALUES = {"backend": ("fa2", "fa3"), "pos_encoding_mode": (0, 1), "arc": ("sm80", "sm90"), "input_layout": ("SEPARATE_Q_K_V", "PACKED_QKV"), "num_qo_heads": (16, 32), "variant_name": ("A", "B")}


def values_of(name):
    for start, values in VALUES.items():
        if name.startswith(start):
            return values
    if name in ("dtype_idx", "idtype"):
        return I32, I64
    if "dtype" in name:
        return F16, BF16
    return (64, 128) if name.startswith("head_dim") else (False, True)


NAMED = [n for n in jit.__all__ if n.startswith(("gen_", "get_")) and "customize" not in n and n != "gen_jit_spec"]


@pytest.mark.cpu
@pytest.mark.parametrize("name", NAMED)
def test_names_tell_arguments(name):
    function = getattr(jit, name)
    given = lambda result: result.name if isinstance(result, jit.JitSpec) else result
    base = {n: values_of(n)[0] for n in inspect.signature(function).parameters}
    first = given(function(**base))
    for n in base:
        other = given(function(**{**base, n: values_of(n)[1]}))
        ignored = name == "gen_batch_decode_mla_module" and n in ("num_qo_heads", "use_tensor_cores")
        assert (other == first) == ignored, n


CUSTOM = [n for n in jit.__all__ if n.startswith("gen_customize")]


@pytest.mark.cpu
@pytest.mark.parametrize("name", CUSTOM)
def test_variants_of_ones_own(name):
    import fir.variant as va

    function = getattr(jit, name)
    parameters = inspect.signature(function).parameters
    scaled = va.variant("Scaled", logits=va.score * va.f32("gain") + va.per_head("slopes"))
    lists = dict(additional_tensor_names=["slopes"], additional_tensor_dtypes=["float"], additional_scalar_names=["gain"], additional_scalar_dtypes=["float"], variant_decl=scaled)
    base = {n: lists[n] if n in lists else f"u_{name}" if n == "uri" else values_of(n)[0] for n in parameters}
    for n, parameter in parameters.items():
        if n in lists:
            continue
        other = {**base, n: f"v_{name}" if n == "uri" else values_of(n)[1]}
        if n.startswith("variant_name_"):
            with pytest.raises(NotImplementedError, match="expected one for both parts"):
                function(**other)
        elif n.startswith(("pos_encoding_mode", "use_sliding_window", "use_logits_soft_cap")):
            with pytest.raises(NotImplementedError, match="for the variant to tell"):
                function(**other)
        else:
            module = function(**other).build_and_load()
            assert module.variant == scaled and jit.jit_spec_registry.get_spec_status(other["uri"]).is_compiled
    plain = function(**{**base, "additional_tensor_names": [], "additional_tensor_dtypes": [], "additional_scalar_names": [], "additional_scalar_dtypes": [], "variant_decl": va.causal()}).load(None)
    assert plain.values((), 0.5) == ({}, 0.5)
    module = function(**base).build_and_load()
    assert module.values((torch.ones(4), 2.0), 0.5)[0]["gain"] == 2.0
    with pytest.raises(TypeError, match="expected 2: slopes, gain"):
        module.values((1.0,), 0.5)


@pytest.mark.cpu
def test_building():
    from pathlib import Path

    spec = jit.JitSpec("one", sources=["a.cu"])
    assert spec.sources == ["a.cu"] and jit.JitSpec("two", lambda: 7).load(Path("/nowhere")) == 7
    spec.build(verbose=True, need_lock=False)
    jit.build_jit_specs([spec], verbose=True, skip_prebuilt=False), jit.build_jit_specs([])
    for extra in ({}, dict(extra_cflags=["-g"]), dict(extra_cuda_cflags=["-g"]), dict(extra_ldflags=["-l"]), dict(extra_include_paths=["."]), dict(needs_device_linking=True)):
        for name in ("mine", "yours"):
            with pytest.raises(NotImplementedError, match=f"gen_jit_spec\\('{name}'\\)"):
                jit.gen_jit_spec(name, ["k.cu"], **extra)
    assert jit.get_batch_decode_mla_uri(F16, F16, F16, I32, 512, False, False, "sm80") != jit.get_batch_decode_mla_uri(F16, F16, F16, I32, 512, False, False, "sm90")


# Attention.

@pytest.mark.parametrize("heads,kv_heads,dim,page,dtype", [(4, 2, 64, 4, BF16), (8, 8, 128, 16, F16), (6, 2, 96, 1, BF16)])
def test_every_wrapper_of_other_sizes(heads, kv_heads, dim, page, dtype, device):
    """Heads, head dims, pages and types that a batch of one shape does not vary, for each wrapper that takes them."""
    lens, qo = [9, 20, 1], [0, 3, 5, 6]
    pages = Pages(lens, page, kv_heads, dim, dtype)
    q, qd = torch.randn(6, heads, dim).to(dtype), torch.randn(3, heads, dim).to(dtype)
    table = (pages.indptr, pages.indices, pages.last)
    shape = (heads, kv_heads, dim, page)
    space = torch.empty(heads)
    decoded, want = batch(qd, [0, 1, 2, 3], pages.request)[0], batch(q, qo, pages.request, causal=True)[0]

    wrapper = fi.BatchAttention("NHD", device)
    wrapper.plan(i32(*qo), pages.indptr, pages.indices, pages.lens, heads, kv_heads, dim, dim, page, causal=True, q_data_type=dtype, kv_data_type=dtype)
    near(wrapper.run(q, pages.cache, profiler_buffer=torch.empty(4))[0], want)

    sink = torch.randn(heads)
    wrapper = fi.BatchAttentionWithAttentionSinkWrapper(space, q_data_type=dtype, kv_data_type=dtype, head_dim_qk=dim, head_dim_vo=dim)
    wrapper.plan(i32(*qo), *table, *shape, causal=True, q_data_type=dtype)
    near(wrapper.run(q, pages.cache, sink, 0.2), batch(q, qo, pages.request, causal=True, sink=sink, sm_scale=0.2)[0])

    buffers = [torch.zeros(n, dtype=I32) for n in (4, len(pages.indices), 3)]
    for tensor_cores in (False, True):
        wrapper = fi.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(space, *buffers, "NHD", tensor_cores)
        wrapper.plan(pages.indptr, pages.indices[:-1], pages.last, *shape, q_data_type=dtype)
        near(wrapper.run(qd, pages.cache), decoded)
    for flags in ({}, dict(window_left=3), dict(pos_encoding_mode="ROPE_LLAMA", rope_scale=2.0, rope_theta=100.0), dict(q_len_per_req=1, non_blocking=False, fixed_split_size=8), dict(disable_split_kv=True, logits_soft_cap=2.0, sm_scale=0.3)):
        wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(space)
        fi.fast_decode_plan(wrapper, *table, *shape, q_data_type=dtype, kv_data_type=dtype, **flags)
        near(wrapper.run(qd, pages.cache), batch(qd, [0, 1, 2, 3], pages.request, **{n: x for n, x in flags.items() if n in ("window_left", "pos_encoding_mode", "rope_scale", "rope_theta", "logits_soft_cap", "sm_scale")})[0])
    wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(space)
    fi.fast_decode_plan(wrapper, *table, *shape, data_type=dtype, global_override_indptr_cpu=pages.indptr.cpu())
    near(wrapper.run(qd, pages.cache), decoded)
    fi.fast_decode_plan(wrapper, *table, *shape, q_data_type=dtype, q_len_per_req=2)
    two = torch.randn(6, heads, dim).to(dtype)
    near(wrapper.run(two, pages.cache), batch(two, [0, 2, 4, 6], pages.request, causal=True)[0])

    wrapper = fi.MultiLevelCascadeAttentionWrapper(1, space)
    wrapper.reset_workspace_buffer(torch.empty(2), [torch.empty(2)])
    wrapper.plan([i32(*qo)], [pages.indptr], [pages.indices], [pages.last], *shape, causal=True, q_data_type=dtype)
    near(wrapper.run(q, pages.cache), want)

    k, v = torch.randn(5, kv_heads, dim).to(dtype), torch.randn(5, kv_heads, dim).to(dtype)
    whole = lambda r: tuple(torch.cat(pair) for pair in zip((k, v), pages.request(r)))
    wrapper = fi.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(space)
    wrapper.reset_workspace_buffer(torch.empty(2), torch.empty(3))
    wrapper.begin_forward(*table, *shape, data_type=dtype)
    near(wrapper.forward(qd, k, v, pages.cache), batch(qd, [0, 1, 2, 3], whole)[0])
    if dtype == F16:
        wrapper = fi.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(space)
        wrapper.reset_workspace_buffer(torch.empty(2), torch.empty(3))
        wrapper.begin_forward(i32(*qo), *table, *shape)
        near(wrapper.forward(q, k, v, pages.cache, causal=True), batch(q, qo, whole, causal=True)[0])
        near(wrapper.forward(q, k, v, pages.cache, causal=True, rope_scale=1.0, rope_theta=1e4), batch(q, qo, whole, causal=True)[0])


POD_D = [dict(sm_scale_d=0.3), dict(window_left_d=2), dict(kv_layout_d="NHD"), dict(pos_encoding_mode_d="NONE"), dict(causal_d=True), dict(use_fp16_qk_reduction=True, enable_pdl=True), dict(rope_scale_d=1.0, rope_theta_d=1e4)]


@pytest.mark.parametrize("layout", ("NHD", "HND"))
def test_prefill_beside_decode_of_other_sizes(layout):
    for heads, kv_heads, dim, page, dtype in ((4, 2, 64, 4, F16), (8, 2, 128, 8, BF16)):
        pages = Pages([9, 30], page, kv_heads, dim, dtype, layout)
        q, k, v = torch.randn(5, heads, dim).to(dtype), torch.randn(12, kv_heads, dim).to(dtype), torch.randn(12, kv_heads, dim).to(dtype)
        qd = torch.randn(2, heads, dim).to(dtype)
        table, shape = (pages.indptr, pages.indices, pages.last), (heads, kv_heads, dim, page)
        give = (k, v) if layout == "NHD" else (k.transpose(0, 1), v.transpose(0, 1))
        for flags in ({}, dict(window_left=4), dict(pos_encoding_mode="ROPE_LLAMA", rope_scale=2.0, rope_theta=100.0), dict(non_blocking=False)):
            wrapper = fi.PODWithPagedKVCacheWrapper(torch.empty(dim), layout)
            wrapper.reset_workspace_buffer(torch.empty(dim), torch.empty(dim))
            wrapper.plan(*table, *shape, q_data_type=dtype, kv_data_type=dtype, data_type=None, **flags)
            first, second = wrapper.run(q, *give, qd, pages.cache, kv_layout_p=layout)
            near(first, one(q, k, v)[0])
            near(second, batch(qd, [0, 1, 2], pages.request, **{n: x for n, x in flags.items() if n != "non_blocking"})[0])
            both = fi.BatchPODWithPagedKVCacheWrapper(torch.empty(dim), layout)
            both.plan(i32(0, 3, 5), *table, i32(0, 1, 2), *table, *shape, q_data_type=dtype, kv_data_type=dtype, **flags)
            first, second = both.run(q, pages.cache, qd, pages.cache, causal_p=True, enable_pdl=True, use_fp16_qk_reduction=True)
            own = {n: x for n, x in flags.items() if n != "non_blocking"}
            near(first, batch(q, [0, 3, 5], pages.request, causal=True, **own)[0])
            near(second, batch(qd, [0, 1, 2], pages.request, **own)[0])
        wrapper = fi.PODWithPagedKVCacheWrapper(torch.empty(1), layout)
        wrapper.plan(*table, *shape, data_type=dtype)
        for flags in POD_D:
            flags = {**flags, "kv_layout_d": layout} if "kv_layout_d" in flags else flags
            near(wrapper.run(q, *give, qd, pages.cache, kv_layout_p=layout, **flags)[1], batch(qd, [0, 1, 2], pages.request)[0])
