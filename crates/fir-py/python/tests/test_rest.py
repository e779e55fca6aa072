"""Arguments that the other files leave at one value: names of specifications, pages, draws, experts, timers, devices."""

import inspect
import math

import pytest
import torch
from conftest import Pages
from test_wrappers import i32, near, padded

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


# Pages and blocks.

@pytest.mark.parametrize("layout", ("NHD", "HND"))
@pytest.mark.parametrize("latent", (False, True))
@pytest.mark.parametrize("change", ({}, dict(is_neox=False), dict(quant_scale_q=2.0), dict(quant_scale_kv=0.5), dict(quantize_dtype=torch.float8_e5m2), dict(page_size=4), dict(outs=True), dict(nope=None), dict(enable_pdl=True), dict(tokens=3)))
def test_rotated_into_pages(layout, latent, change):
    if latent and (layout == "HND" or "nope" in change):
        pytest.skip("latent pages have one order and both parts")
    change = dict(change)
    tokens, page, nope = change.pop("tokens", 5), change.get("page_size", 16), change.pop("nope", 24)
    lens = [7, 20]
    q_type, kv_type = change.get("quantize_dtype", E4M3), change.get("quantize_dtype", E4M3)
    b = i32(*[0, 0, 1, 1, 1][:tokens])
    pos = i32(*[5, 6, 3, 18, 19][:tokens])
    ids = torch.tensor([17, 3, 40, 1, 8][:tokens])
    angles = torch.randn(50 + tokens, 8) * 3
    table = torch.cat((angles.cos(), angles.sin()), -1)
    counts = [-(-n // page) for n in lens]
    indices, indptr = torch.randperm(sum(counts) + 2)[: sum(counts)].int(), i32(0, counts[0], sum(counts))
    neox = change.get("is_neox", True)

    def turned(x):
        a, c = (x[..., :8], x[..., 8:]) if neox else (x[..., ::2], x[..., 1::2])
        cos, sin = (f(angles)[ids].view(tokens, *(1,) * (x.dim() - 2), 8) for f in (torch.cos, torch.sin))
        y, z = a * cos - c * sin, c * cos + a * sin
        return torch.cat((y, z), -1) if neox else torch.stack((y, z), -1).flatten(-2)

    q_rope, q_nope = torch.randn(tokens, 4, 16), None if nope is None else torch.randn(tokens, 4, nope)
    heads = () if latent else (2,)
    k_rope, k_nope = torch.randn(tokens, *heads, 16), None if nope is None else torch.randn(tokens, *heads, nope)
    v = None if latent else torch.randn(tokens, 2, 32)
    pool = lambda dim: torch.zeros((sum(counts) + 2, page, dim) if latent else (sum(counts) + 2, page, 2, dim) if layout == "NHD" else (sum(counts) + 2, 2, page, dim)).to(kv_type)
    cache = (pool(nope), pool(16)) if latent else (pool(16 + (nope or 0)), pool(32))
    outs = {}
    if change.pop("outs", False):
        outs = dict(q_rope_out=torch.zeros(tokens, 4, 16).to(E4M3), q_nope_out=torch.zeros(tokens, 4, nope).to(E4M3))
    rope_out, nope_out = fi.rope.rope_quantize_fp8_append_paged_kv_cache(
        q_rope, k_rope, q_nope, k_nope, v, table, ids.int(), cache, indices, indptr, b, pos, kv_layout=layout, **{"page_size": page, **change}, **outs)
    assert not outs or rope_out is outs["q_rope_out"] and nope_out is outs["q_nope_out"]
    fp8 = lambda x, d: x.clamp(-torch.finfo(d).max, torch.finfo(d).max).to(d).float()
    scale_q, scale_kv = change.get("quant_scale_q", 1.0), change.get("quant_scale_kv", 1.0)
    rounded = lambda got, want: torch.testing.assert_close(got.float(), want, atol=0.07, rtol=0.26)
    rounded(rope_out, fp8(turned(q_rope) * scale_q, q_type))
    if nope is not None:
        rounded(nope_out, fp8(q_nope * scale_q, q_type))
    wants = (k_nope, turned(k_rope)) if latent else (turned(k_rope) if nope is None else torch.cat((turned(k_rope), k_nope), -1), v)
    for stored, want in zip(cache, wants):
        rows = stored if latent or layout == "NHD" else stored.transpose(1, 2)
        for t in range(tokens):
            place = indices[indptr[b[t]] + pos[t] // page].item(), int(pos[t] % page)
            rounded(rows[place], fp8(want[t] * scale_kv, kv_type))


@pytest.mark.parametrize("dtype,page", [(BF16, 4), (F16, 2)])
def test_latent_vectors_into_pages(dtype, page):
    for lens, b, pos in (([5, 2], [0, 1, 1], [4, 0, 1]), ([9, 7, 1], [1, 0, 2], [6, 8, 0])):
        pages = Pages(lens, page, 1, 24, dtype)
        ckv, kpe = torch.zeros(pages.kv.shape[0], page, 16, dtype=dtype), torch.zeros(pages.kv.shape[0], page, 8, dtype=dtype)
        x, y = torch.randn(3, 16).to(dtype), torch.randn(3, 8).to(dtype)
        fi.append_paged_mla_kv_cache(x, y, i32(*b), i32(*pos), ckv, kpe, pages.indices, pages.indptr, pages.last)
        for t, (r, p) in enumerate(zip(b, pos)):
            place = int(pages.indices[pages.indptr[r] + p // page]), p % page
            assert torch.equal(ckv[place], x[t]) and torch.equal(kpe[place], y[t])


@pytest.mark.parametrize("k_scale,v_scale,lens", [(0.5, 0.25, [6, 1, 9]), (2.0, 1.0, [3, 12])])
def test_nvfp4_pages_of_other_scales(k_scale, v_scale, lens):
    pages = Pages(lens, 4, 2, 32, BF16)
    b = i32(*range(len(lens)))
    pos = i32(*(n - 1 for n in lens))
    k, v = torch.randn(len(lens), 2, 32).to(BF16), torch.randn(len(lens), 2, 32).to(BF16)
    n, table = pages.kv.shape[0], padded(pages).clamp(max=pages.kv.shape[0] - 1)
    outs = {}
    for slots in (False, True):
        codes, scales = torch.zeros(n, 2, 4, 2, 16, dtype=U8), torch.zeros(n, 2, 4, 2, 2, dtype=U8)
        if slots:
            page = pages.indices[pages.indptr[b.long()].long() + pos.long() // 4]
            fi.page.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(k, v, page * 4 + pos % 4, codes, scales, k_scale, v_scale)
        else:
            fi.page.nvfp4_quantize_append_paged_kv_cache(k, v, b, pos, codes, scales, pages.indices, pages.indptr, pages.last, k_scale, v_scale)
        got = [torch.zeros(len(lens), max(lens), 2, 32, dtype=BF16) for _ in range(2)]
        fi.quantization.nvfp4_kv_dequantize_paged(codes, scales, table, pages.lens, torch.tensor([k_scale]), torch.tensor([v_scale]), *got)
        for out, x in zip(got, (k, v)):
            torch.testing.assert_close(torch.stack([out[r, p] for r, p in zip(b.tolist(), pos.tolist())]).float(), x.float(), atol=0.6, rtol=0.26)
        outs[slots] = got
    assert all(torch.equal(a, c) for a, c in zip(*outs.values()))


@pytest.mark.parametrize("rows,scale", [(6, 0.5), (3, 2.0)])
def test_blocks_of_other_sizes(rows, scale):
    q = fi.quantization
    x = torch.randn(rows, 64 * rows).to(BF16)
    codes, s = q.mxfp8_quantize(x, False)
    torch.testing.assert_close(q.mxfp8_dequantize_host(codes, s, False), x.float(), atol=0.1, rtol=0.08)
    with pytest.raises(NotImplementedError, match="swizzled"):
        q.mxfp8_dequantize_host(codes, s, False, sf_swizzle_layout=1)
    codes, s = q.mxfp4_quantize(x, "cute-dsl", sfLayout="linear")
    torch.testing.assert_close(q.mxfp4_dequantize(codes, s, "linear"), x.float(), atol=0.8, rtol=0.3)
    codes, s = q.nvfp4_kv_quantize(x, torch.tensor([scale]))
    torch.testing.assert_close(q.nvfp4_kv_dequantize(codes, s, torch.tensor([scale])).float(), x.float(), atol=0.6, rtol=0.26)


# Draws.

def test_every_argument_of_chains(device):
    target = torch.rand(300, 3, 8).softmax(-1)
    draft = torch.rand(300, 2, 8).softmax(-1)
    tokens = torch.randint(0, 8, (300, 2))
    first = fi.chain_speculative_sampling(draft, tokens, target, seed=3, offset=0)
    again = fi.chain_speculative_sampling(draft, tokens, target, seed=3, offset=0, deterministic=False)
    assert all(torch.equal(a, c) for a, c in zip(first, again))
    for other in (dict(seed=4, offset=0), dict(seed=3, offset=800)):
        assert not torch.equal(first[0], fi.chain_speculative_sampling(draft, tokens, target, **other)[0])
    counts = [torch.full((300,), n, dtype=I32) for n in (5, 7)]
    out, accepted, emitted = fi.chain_speculative_sampling(draft, tokens, target, *counts, seed=3, offset=0)
    assert accepted is counts[0] and emitted is counts[1] and torch.equal(out, first[0])
    assert torch.equal(accepted - 5, first[1]) and torch.equal(emitted - 7, first[2])
    draws = []
    for seed in (1, 1, 2):
        generator = torch.Generator(device=device)
        generator.manual_seed(seed)
        draws.append(fi.chain_speculative_sampling(draft, tokens, target, generator=generator)[0])
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])
    # Of rows that differ, a token is kept as often as the lesser of the two says.
    kept = torch.minimum(torch.ones(()), target[:, 0].gather(1, tokens[:, :1]) / draft[:, 0].gather(1, tokens[:, :1])).mean()
    assert abs((first[0][:, 0] == tokens[:, 0]).float().mean() - kept) < 0.12


def test_tags_and_steps():
    from fir.flashinfer import logits_processor as lp

    for shape in ((2, 3), (4, 5)):
        x = torch.rand(shape)
        for make, kind in ((lp.TaggedTensor.logits, lp.TensorType.LOGITS), (lp.TaggedTensor.probs, lp.TensorType.PROBS), (lp.TaggedTensor.indices, lp.TensorType.INDICES)):
            tagged = make(x)
            assert tagged.data is x and tagged.type == kind and tagged.shape == shape and tagged.size(0) == shape[0] and tagged.size(1) == shape[1] and tagged.size() == torch.Size(shape)
    pipe = lp.LogitsPipe([lp.Softmax(enable_pdl=True), lp.Sample(deterministic=False)])
    peaked = torch.full((3, 8), -30.0)
    peaked[range(3), [1, 7, 4]] = 30.0
    assert pipe(peaked).tolist() == [1, 7, 4]


# Experts, work, devices.

@pytest.mark.cpu
def test_sizes_that_are_none():
    m = fi.fused_moe
    base = dict(max_num_tokens=8, hidden_size=64, intermediate_size=32, num_experts_total=4, top_k=2, x_dtype=BF16, weight_dtype=BF16)
    other = dict(max_num_tokens=9, hidden_size=128, intermediate_size=64, num_experts_total=8, top_k=1, x_dtype=F16, weight_dtype=E4M3, output_dtype=F16, activation_type=m.ActivationType.Geglu, tp_size=2, tp_rank=1, ep_size=2, ep_rank=1,
                 min_latency_mode=True, use_deepseek_fp8_block_scale=True, use_w4_group_scaling=True, use_mxfp8_act_scaling=True, use_fused_finalize=False, use_packed_weights=True, use_wfp4afp8_humming=True, device="cpu")
    for name, value in other.items():
        assert m.cutlass_fused_moe_workspace_size(**{**base, name: value}) == 0
    for tokens, top_k, experts, tile in ((10, 2, 8, 4), (1, 1, 8, 16), (1000, 8, 64, 128), (3, 4, 2, 1)):
        # The worst routing: every expert has one row, and the rest fills whole tiles.
        worst, pairs = 0, tokens * top_k
        for used in range(1, min(pairs, experts) + 1):
            worst = max(worst, used + (pairs - used) // tile)
        assert m.max_num_padded_tokens(tokens, top_k, experts, tile) == worst * tile
    for shape in ((2, 4, 4), (3, 2, 8)):
        w = torch.randn(shape)
        assert m.interleave_for_tma_wgmma_up(w) is w
    assert m.alloc_scratchpad(torch.device("cpu")).numel() == 0


def test_what_experts_refuse():
    from test_arguments import MOE

    one_ = torch.ones(1)
    for kw in (dict(fc2_expert_biases=one_), dict(input_sf=one_), dict(swiglu_alpha=one_), dict(swiglu_beta=one_), dict(swiglu_limit=one_), dict(cluster_size=2), dict(enable_alltoall=True), dict(use_w4_group_scaling=True),
               dict(use_mxfp8_act_scaling=True), dict(min_latency_mode=True), dict(use_packed_weights=True), dict(use_wfp4afp8_humming=True), dict(situ_beta=one_), dict(situ_linear_beta=one_)):
        with pytest.raises(NotImplementedError, match=next(iter(kw))):
            fi.fused_moe.cutlass_fused_moe(**{**MOE(), **kw})
    args = MOE()
    assert torch.equal(fi.fused_moe.cutlass_fused_moe(**args), fi.fused_moe.cutlass_fused_moe(**args, ep_rank=1, cluster_rank=1))


@pytest.mark.cpu
@pytest.mark.parametrize("n,qk,vo,heads,kv_heads,ms", [(3, 64, 128, 4, 2, 2.0), (2, 192, 64, 6, 3, 0.5)])
def test_work_of_other_sizes(n, qk, vo, heads, kv_heads, ms):
    want = n * heads * 2 * 5 * 9 * (qk + vo)
    q, kv = torch.full((n,), 5), torch.full((n,), 9)
    assert testing.attention_flops(n, 5, 9, qk, vo, heads, False) == testing.attention_flops_with_actual_seq_lens(q, kv, qk, vo, heads, False) == want
    assert testing.attention_tflops_per_sec(n, 5, 9, qk, vo, heads, False, ms) == pytest.approx(want / ms / 1e9)
    assert testing.attention_tflops_per_sec_with_actual_seq_lens(q, kv, qk, vo, heads, False, ms) == pytest.approx(want / ms / 1e9)
    size = 2 * n * (5 * heads * (qk + vo) + 9 * kv_heads * (qk + vo))
    assert testing.attention_tb_per_sec(n, 5, 9, qk, vo, heads, kv_heads, ms) == pytest.approx(size / ms / 1e9)
    assert testing.attention_tb_per_sec_with_actual_seq_lens(q, kv, qk, vo, heads, kv_heads, ms) == pytest.approx(size / ms / 1e9)
    x = torch.randn(n * 100, 130)
    block, s = testing.per_block_cast_to_fp8(x)
    assert s.shape == (-(-len(x) // 128), 2)
    for seed in (n, n + 1):
        testing.set_seed(seed)
        first = torch.rand(1)
        torch.manual_seed(seed)
        assert torch.equal(first, torch.rand(1))


@pytest.mark.cpu
def test_timers_take_their_arguments(tmp_path):
    calls = []
    for kw in ({}, dict(cold_l2_cache=False), dict(l2_flush=False), dict(l2_flush=False, l2_flush_size_mb=1), dict(l2_flush=False, l2_flush_device="cuda:0")):
        assert len(testing.bench_gpu_time_with_cuda_event(lambda: calls.append(1), dry_run_iters=1, repeat_iters=2, **kw)) == 2
    assert len(testing.bench_gpu_time(lambda: None, dry_run_iters=1, repeat_iters=2, enable_cupti=True, num_iters_within_graph=3)) == 2
    on_device = [lambda fn, **kw: testing.bench_gpu_time_with_cudagraph(fn, dry_run_iters=1, repeat_iters=2, **kw), lambda fn, **kw: testing.bench_gpu_time_with_cupti(fn, dry_run_iters=1, repeat_iters=2, use_cuda_graph=True, **kw)]
    graph = (dict(), dict(num_iters_within_graph=3), dict(input_args=(1,)), dict(input_kwargs={"a": 1}))
    if not torch.cuda.is_available():
        for bench in on_device:
            for kw in graph:
                with pytest.raises(RuntimeError, match="needs a CUDA device"):
                    bench(lambda a=0: None, **kw)
        kineto = (dict(num_tests=2), dict(suppress_kineto_output=True), dict(trace_path="x"), dict(flush_l2=False), dict(with_multiple_kernels=True))
        for names in ("k", ("k", "l")):
            for kw in kineto:
                with pytest.raises(RuntimeError, match="needs a CUDA device"):
                    testing.bench_kineto(lambda: None, names, **kw)
        return
    x = torch.ones(1 << 16, device="cuda")
    for bench in on_device:
        for kw in graph:
            times = bench(lambda a=0: x.add_(1), **kw)
            assert len(times) == 2 and all(t > 0 for t in times)
    assert testing.bench_kineto(lambda: x.add_(1), "elementwise", num_tests=3, suppress_kineto_output=True, trace_path=str(tmp_path / "t.json"), flush_l2=False, with_multiple_kernels=True) > 0
    assert testing.get_l2_cache_size("cuda:0") == testing.get_l2_cache_size() > 0
    assert testing.calculate_rotation_count([x], "cuda:0", 3) >= 3


@pytest.mark.cpu
def test_questions_about_devices(device):
    from fir.flashinfer import utils

    for at in (None, "cpu", torch.device("cpu")):
        if not torch.cuda.is_available():
            assert not utils.is_sm90a_supported(at) and not utils.device_support_pdl(at)
    for kind in ("cpu", "meta"):
        with pytest.raises(ValueError, match="cuda device"):
            utils.get_compute_capability(torch.device(kind))
    if not torch.cuda.is_available():
        for at in (None, "cuda:0"):
            with pytest.raises((RuntimeError, AssertionError)):
                testing.get_l2_cache_size(at)
            with pytest.raises((RuntimeError, AssertionError)):
                testing.calculate_rotation_count([torch.empty(3)] if at else [], at, 3)
    for heads in (4, 6, 12):
        slopes = utils.get_alibi_slopes(heads, device="cpu")
        power = 2 ** math.floor(math.log2(heads))
        want = [2 ** (-8 / power * (i + 1)) for i in range(power)] + [2 ** (-4 / power * (2 * i + 1)) for i in range(heads - power)]
        torch.testing.assert_close(slopes, torch.tensor(want))
    assert [utils.next_positive_power_of_2(x) for x in (-3, 0, 1, 2, 3, 17, 64)] == [1, 1, 1, 2, 4, 32, 64]
    data, scale = torch.zeros(2, 4, dtype=U8), torch.zeros(2, 2, dtype=U8)
    for start, shape in ((0, None), (3, (2, 8))):
        tensor = utils.FP4Tensor(data[:, start:], scale[:, :2 - start % 2], start, shape)
        assert tensor.scale_start_index == start and tensor.original_shape == shape and tensor.dtype == "nvfp4"


def test_products_that_ignore_their_backend():
    for rows, backend in ((7, "auto"), (3, "sm90"), (2, "sm80")):
        x, w, out = torch.randn(rows, 32).to(BF16), torch.randn(16, 32).to(BF16), torch.zeros(rows, 16, dtype=BF16)
        fi.gemm.tinygemm_bf16(x, w, out)
        near(out, x.float() @ w.float().T, 5e-2)
        try:
            wrapper = fi.SegmentGEMMWrapper(torch.empty(rows), backend)
        except ValueError as refused:
            assert "backend" in str(refused)
            continue
        near(wrapper.run(x, w[None], 1, True, seg_indptr=i32(0, rows)), x.float() @ w.float().T, 5e-2)
    x, w = torch.randn(4, 32), torch.randn(2, 16, 32)
    for backend in ("auto", "cublas", "other"):
        got = fi.gemm.grouped_mm_bf16(x.to(BF16), w.to(BF16), i32(0, 1, 4), backend=backend)
        near(got, torch.cat((x[:1].to(BF16).float() @ w[0].to(BF16).float().T, x[1:].to(BF16).float() @ w[1].to(BF16).float().T)), 5e-2)
        q = fi.gemm.grouped_mm_fp8(x.to(E4M3), w.to(E4M3), i32(0, 1, 4), backend=backend)
        near(q, torch.cat((x[:1].to(E4M3).float() @ w[0].to(E4M3).float().T, x[1:].to(E4M3).float() @ w[1].to(E4M3).float().T)), 0.2)
    for backend in ("cuda", "triton"):
        assert fi.quantization.per_token_group_quant_8bit(torch.randn(2, 128), 64, backend=backend)[1].shape == (2, 2)
    args = (torch.randn(3, 2, 16), torch.randn(3, 16), None, None, torch.randn(9, 16), i32(1, 2, 3))
    want = fi.rope.rope_quantize_fp8(*args)[0]
    assert torch.equal(fi.rope.rope_quantize_fp8(*args, backend="cute-dsl")[0].view(U8), want.view(U8))


def test_definitions_go_where_they_are_told(tmp_path):
    from fir.flashinfer.fi_trace import fi_trace

    fi_trace(fi.rmsnorm, save_dir=str(tmp_path / "one"), input=torch.randn(2, 64), weight=torch.randn(64))
    assert list((tmp_path / "one").rglob("*.json"))
