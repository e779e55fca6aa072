"""Calls of ``flashinfer`` and of ``torch.nn.functional.linear`` that ask ``apply`` first, and that ``enable_tracing`` sees."""

import json
import os
import subprocess
import sys

import pytest
import torch

import fir.bench as bench
import fir.flashinfer as fi
from fir.bench import (
    AxisConst, AxisVar, BuildSpec, Definition, Environment, Evaluation, RandomInput, SafetensorsInput, ScalarInput, Solution, SourceFile,
    TensorSpec, Trace, TraceSet, TracingConfig, Workload, integration)


def marked(name, op_type, inputs, outputs, var, hardware=("unknown",), code=None, reference="", root=None, language="python"):
    """A set with a definition and a solution that marks its outputs with 7. Inputs and outputs are tensors, or numbers; axes have
    the names of what they are of, and ``var`` are those that vary, with their values."""
    axes, specs = {}, {}
    for side in (inputs, outputs):
        for n, (dtype, *shape) in side.items():
            for a in shape:
                axes[a[0]] = AxisVar() if a[0] in var else AxisConst(value=a[1])
            specs[n] = TensorSpec(shape=[a[0] for a in shape] if shape else None, dtype=dtype)
    made = ", ".join(f"torch.full({[a[1] for a in shape]}, 7).to(torch.{dtype})" for dtype, *shape in outputs.values())
    text = code or f"import torch\n\n\ndef run({', '.join(inputs)}):\n    return {made}\n"
    definition = Definition(name=name, op_type=op_type, axes=axes, inputs={n: specs[n] for n in inputs},
                            outputs={n: specs[n] for n in outputs}, reference=f"{reference}\n{text}")
    spec = BuildSpec(language=language, target_hardware=["any"], entry_point="m.py::run", destination_passing_style=False)
    solution = Solution(name=f"marks_{name}", definition=name, author="a", spec=spec, sources=[SourceFile(path="m.py", content=text)])
    traces = [Trace(definition=name, workload=Workload(axes=var, inputs={}), solution=solution.name, evaluation=Evaluation(
        status="PASSED", environment=Environment(hardware=h), max_absolute_error=0.0, latency_ms=1.0)) for h in hardware]
    return TraceSet(root, {name: definition}, {name: [solution]}, traces={name: traces})


def is_marked(*results):
    return all((r == 7).all() for r in results)


def ints(*x):
    return torch.tensor(x, dtype=torch.int32)


@pytest.fixture(autouse=True)
def flashinfer():
    fi.install()
    import flashinfer

    yield flashinfer
    assert not integration._patched, "what was enabled is disabled, and everything is as it was"


H, KV, D, PS = ("h", 4), ("kv", 2), ("d", 64), ("ps", 16)


def norm(dtype="float32", **more):
    x = ("n", 3), ("hidden", 64)
    return marked("rmsnorm_h64", "rmsnorm", {"hidden_states": (dtype, *x), "weight": (dtype, x[1])}, {"output": (dtype, *x)},
                  {"n": 3}, **more)


def test_a_norm_of_another_eps_type_or_device_is_not_the_definitions(flashinfer):
    import flashinfer.norm as calls

    x, w = torch.randn(3, 64), torch.ones(64)
    with bench.enable_apply(norm(reference="EPS = 1e-5")):
        assert is_marked(calls.rmsnorm(x, w, 1e-5), flashinfer.rmsnorm(x, w, eps=1e-5)) and not is_marked(calls.rmsnorm(x, w))
        assert not is_marked(calls.rmsnorm(x.half(), w.half(), 1e-5))
        out = torch.empty_like(x)
        assert calls.rmsnorm(x, w, 1e-5, out=out) is out and is_marked(out)
    # A trace counts where it was measured, or wherever it is asked for.
    here = bench.apply.__globals__["hardware_of"]([x])
    for hardware, asked, want in ((here, None, True), ("another", None, False), ("another", "another", True), (here, "another", False)):
        with bench.enable_apply(norm(hardware=(hardware,)), bench.ApplyConfig(hardware=asked)):
            assert is_marked(calls.rmsnorm(x, w)) == want, (hardware, asked)


def test_what_cannot_be_called_here_is_not_chosen():
    both = norm()
    name, own = "rmsnorm_h64", both.solutions["rmsnorm_h64"][0]
    rust = Solution(name="rust", definition=name, author="a", spec=BuildSpec(language="rust", target_hardware=["cpu"], entry_point="lib.rs::run"),
                    sources=[SourceFile(path="lib.rs", content="x")])
    both.solutions[name].append(rust)
    both.traces[name].append(Trace(definition=name, workload=Workload(axes={"n": 3}, inputs={}), solution="rust", evaluation=Evaluation(
        status="PASSED", max_absolute_error=0.0, latency_ms=0.1)))
    with bench.enable_apply(both) as runtime:
        assert runtime.entries[name].choose((3,)) == own.name
    # A kernel may take packed tensors for granted.
    kernel = norm(language="triton")
    with bench.enable_apply(kernel):
        import flashinfer.norm as calls

        x, w = torch.randn(3, 64), torch.ones(64)
        assert is_marked(calls.rmsnorm(x, w)) and not is_marked(calls.rmsnorm(torch.randn(3, 128)[:, :64], w))


def test_a_fused_norm_works_in_place():
    import flashinfer.norm as calls

    x = ("n", 3), ("hidden", 64)
    made = marked("fused_add_rmsnorm_h64", "rmsnorm", {n: ("float32", *x) for n in ("hidden_states", "residual")} | {"weight": ("float32", x[1])},
                  {"output": ("float32", *x)}, {"n": 3})
    a, b = torch.randn(3, 64), torch.randn(3, 64)
    total = a + b
    with bench.enable_apply(made):
        calls.fused_add_rmsnorm(a, b, torch.ones(64))
    assert is_marked(a) and torch.equal(b, total)


def test_products_ask():
    import flashinfer.gemm as gemm

    io = {"A": ("bfloat16", ("M", 6), ("K", 32)), "B": ("bfloat16", ("N", 8), ("K", 32))}, {"C": ("bfloat16", ("M", 6), ("N", 8))}
    a, b, layer = torch.randn(6, 32).bfloat16(), torch.randn(8, 32).bfloat16(), torch.nn.Linear(32, 8, bias=False).bfloat16()
    with bench.enable_apply(marked("gemm_n8_k32", "gemm", *io, {"M": 6})):
        assert is_marked(gemm.mm_bf16(a, b.T), layer(a), torch.nn.functional.linear(a.view(2, 3, 32), b))
        assert layer(a.view(2, 3, 32)).shape == (2, 3, 8)
        assert not is_marked(gemm.mm_bf16(a, b.T, out_dtype=torch.float32)) and not is_marked(layer(a[:4]))
        assert not is_marked(torch.nn.functional.linear(a, b, torch.ones(8).bfloat16()))
    assert not is_marked(gemm.mm_bf16(a, b.T))


@pytest.mark.parametrize("kind", ["top_k", "top_p", "top_k_top_p"])
def test_sampling_asks(kind):
    import flashinfer.sampling as sampling

    inputs = {"probs": ("float32", ("n", 2), ("vocab", 16))}
    if "top_k" in kind:
        inputs["top_k"] = ("int32", ("n", 2))
    if "top_p" in kind:
        inputs["top_p"] = ("float32", ("n", 2))
    made = marked(f"{kind}_sampling_from_probs_v16", "sampling", inputs, {"samples": ("int64", ("n", 2))}, {"n": 2})
    probs = torch.zeros(2, 16)
    probs[:, 3] = 1
    numbers = [x for name, x in (("top_k", 4), ("top_p", 0.5)) if name in inputs]
    call = lambda *more, **named: getattr(sampling, f"{kind}_sampling_from_probs")(probs, *numbers, *more, **named)
    with bench.enable_apply(made):
        assert is_marked(call()) and call().dtype == torch.int32
        assert is_marked(getattr(sampling, f"{kind}_sampling_from_probs")(probs, *(torch.full((2,), x) if isinstance(x, float) else ints(x, x) for x in numbers)))
        assert (call(indices=ints(0, 1)) == 3).all()
    assert (call() == 3).all()


@pytest.mark.parametrize("style", ["neox", "gptj"])
def test_rope_asks(style):
    import flashinfer.rope as rope

    q, k = ("float32", ("n", 3), ("qh", 4), D), ("float32", ("n", 3), ("kh", 2), D)
    made = marked(f"rope_with_cos_sin_cache_{style}_style_d64_rd32", "rope",
                  {"q": q, "k": k, "cos_sin_cache": ("float32", ("most", 10), ("rd", 32)), "positions": ("int64", ("n", 3))},
                  {"q_out": q, "k_out": k}, {"n": 3, "qh": 4, "kh": 2, "most": 10})
    args = torch.arange(3), torch.randn(3, 256), torch.randn(3, 128), 64, torch.randn(10, 32)
    with bench.enable_apply(made):
        out = rope.apply_rope_with_cos_sin_cache(*args, is_neox=style == "neox")
        assert is_marked(*out) and [x.shape for x in out] == [(3, 256), (3, 128)]
        assert not is_marked(*rope.apply_rope_with_cos_sin_cache(*args, is_neox=style != "neox"))


def test_planned_prefills_ask():
    import flashinfer.prefill as prefill

    q, cache = ("bfloat16", ("rows", 5), H, D), ("bfloat16", ("pages", 4), PS, KV, D)
    lse, indptr = ("float32", ("rows", 5), H), ("int32", ("len", 3))
    paged = marked("gqa_paged_prefill_causal_h4_kv2_d64_ps16", "gqa_paged",
                   {"q": q, "k_cache": cache, "v_cache": cache, "qo_indptr": indptr, "kv_indptr": indptr, "kv_indices": ("int32", ("ids", 3)),
                    "kv_last_page_len": ("int32", ("batch", 2)), "sm_scale": ("float32",)},
                   {"output": q, "lse": lse}, {"rows": 5, "pages": 4, "len": 3, "ids": 3, "batch": 2})
    kv = ("bfloat16", ("tokens", 9), KV, D)
    ragged = marked("gqa_ragged_prefill_causal_h4_kv2_d64", "gqa_ragged",
                    {"q": q, "k": kv, "v": kv, "qo_indptr": indptr, "kv_indptr": indptr, "sm_scale": ("float32",)},
                    {"output": q, "lse": lse}, {"rows": 5, "tokens": 9, "len": 3})
    bf16 = lambda *shape: torch.randn(*shape).bfloat16()
    work, x, dtype = torch.empty(1 << 20, dtype=torch.uint8), bf16(5, 4, 64), torch.bfloat16
    pages = bf16(4, 16, 2, 64), bf16(4, 16, 2, 64)
    k, v = bf16(9, 2, 64), bf16(9, 2, 64)
    for causal in (True, False):
        with bench.enable_apply(paged):
            wrapper = prefill.BatchPrefillWithPagedKVCacheWrapper(work, "NHD")
            wrapper.plan(ints(0, 2, 5), ints(0, 2, 3), ints(0, 1, 2), ints(3, 16), 4, 2, 64, 16, causal=causal, q_data_type=dtype)
            assert is_marked(*wrapper.run(x, pages, return_lse=True)) == causal
        assert not is_marked(wrapper.run(x, pages))
        with bench.enable_apply(ragged):
            wrapper = prefill.BatchPrefillWithRaggedKVCacheWrapper(work, "NHD")
            wrapper.plan(ints(0, 2, 5), ints(0, 4, 9), 4, 2, 64, causal=causal, q_data_type=dtype)
            out = torch.empty_like(x)
            assert is_marked(wrapper.run(x, k, v, out=out), out) == causal
        assert not is_marked(wrapper.run(x, k, v))


@pytest.mark.parametrize("rows", [2, 5])
def test_a_planned_mla_asks(rows):
    import flashinfer.mla as mla

    lens, indptr = (1, 1) if rows == 2 else (2, 3), ("int32", ("len", 3))
    q, pe, lse = ("bfloat16", ("rows", rows), H, ("ckv", 512)), ("bfloat16", ("rows", rows), H, ("kpe", 64)), ("float32", ("rows", rows), H)
    inputs = {"q_nope": q, "q_pe": pe, "ckv_cache": ("bfloat16", ("pages", 4), PS, ("ckv", 512)),
              "kpe_cache": ("bfloat16", ("pages", 4), PS, ("kpe", 64)), "kv_indptr": indptr, "kv_indices": ("int32", ("ids", 3)),
              "sm_scale": ("float32",)}
    var = {"rows": rows, "pages": 4, "len": 3, "ids": 3}
    kind = "decode" if rows == 2 else "prefill_causal"
    if rows == 5:
        inputs["qo_indptr"] = indptr
    made = marked(f"mla_paged_{kind}_h4_ckv512_kpe64_ps16", "mla_paged", inputs, {"output": q, "lse": lse}, var)
    bf16 = lambda *shape: torch.randn(*shape).bfloat16()
    ckv, kpe = bf16(4, 16, 512), bf16(4, 16, 64)
    call = lambda: wrapper.run(bf16(rows, 4, 512), bf16(rows, 4, 64), ckv, kpe, return_lse=True)
    with bench.enable_apply(made):
        wrapper = mla.BatchMLAPagedAttentionWrapper(torch.empty(1 << 20, dtype=torch.uint8))
        wrapper.plan(ints(0, lens[0], rows), ints(0, 2, 3), ints(0, 1, 2), ints(20, 16), 4, 512, 64, 16, True, 0.1, torch.bfloat16, torch.bfloat16)
        assert is_marked(*call())
    assert not is_marked(*call())


def test_calls_are_patched_as_long_as_something_is_enabled_or_for_good():
    import flashinfer.norm as calls

    original, x, w = calls.rmsnorm, torch.randn(3, 64), torch.ones(64)
    with bench.enable_apply(norm()):
        with bench.enable_apply(norm()):
            assert calls.rmsnorm is not original
        assert is_marked(calls.rmsnorm(x, w))
        integration.install_flashinfer_integrations()
    assert calls.rmsnorm is not original and not is_marked(calls.rmsnorm(x, w))
    with bench.enable_apply(norm()):
        assert is_marked(calls.rmsnorm(x, w))
    integration.uninstall_flashinfer_integrations()
    assert calls.rmsnorm is original


def recorded(root):
    return [t.workload for of in TraceSet.from_path(root).workloads.values() for t in of]


def test_calls_are_recorded_by_policy(tmp_path):
    import flashinfer.norm as calls

    made = norm(root=tmp_path)
    made.save()
    w = torch.ones(64)
    with bench.enable_tracing(tmp_path, TracingConfig(input_dump_policy=["weight"], filter_policy="keep_first_k_by_axes")):
        for rows in (3, 3, 5):
            assert not is_marked(calls.rmsnorm(torch.randn(rows, 64), w)), "what is seen runs as it did"
        calls.rmsnorm(torch.randn(4, 64), w, 1e-5)
        calls.rmsnorm(torch.randn(4, 32), torch.ones(32))
    calls.rmsnorm(torch.randn(7, 64), w)
    first, second = recorded(tmp_path)
    assert (first.axes, second.axes) == ({"n": 3}, {"n": 5})
    assert isinstance(first.inputs["hidden_states"], RandomInput) and isinstance(first.inputs["weight"], SafetensorsInput)
    # What was recorded is benchmarked; the reference here is one of three rows.
    config = bench.BenchmarkConfig(warmup_runs=0, iterations=1, num_trials=1)
    done = bench.Benchmark(TraceSet.from_path(tmp_path), config).run_all()
    new = {t.workload.axes["n"]: t.evaluation.status.value for t in done.traces["rmsnorm_h64"] if t.evaluation.environment.hardware != "unknown"}
    assert new == {3: "PASSED"}


@pytest.mark.parametrize("policy, k, kept", [("keep_all", None, 4), ("keep_none", None, 0), ("keep_first", None, 1), ("keep_first_k", 2, 2), ("attention", None, 2)])
def test_what_is_kept(tmp_path, policy, k, kept):
    def lookup(x, kv_indptr, scale):
        return x

    io = {"x": ("float32", ("total_q", 4)), "kv_indptr": ("int32", ("len_indptr", 3)), "scale": ("float32",)}, {"y": ("float32", ("total_q", 4))}
    made = marked("lookup", "x", *io, {"total_q": 4, "len_indptr": 3}, root=tmp_path)
    made.save()
    config = {"lookup": TracingConfig(input_dump_policy="dump_int", filter_policy=policy, filter_policy_kwargs={"k": k} if k else {})}
    with bench.enable_tracing(tmp_path, config):
        call = bench.apply("lookup")(lookup)
        # Twice the same average length, another, and another number of requests with the first.
        for ends in ((0, 10, 20), (0, 5, 20), (0, 10, 30), (0, 10, 20)):
            assert call(torch.zeros(sum(ends) % 7 + 1), ints(*ends), scale=0.5).shape[0] > 0
        bench.apply("lookup", args=(1, 2, 3, 4, 5, 6, 7), fallback=lambda *_: None)
        bench.apply("unknown", args=(1,), fallback=lambda *_: None)
    found = recorded(tmp_path)
    assert len(found) == kept
    for w in found:
        assert isinstance(w.inputs["scale"], ScalarInput) and w.inputs["scale"].value == 0.5
        file = (tmp_path / w.inputs["kv_indptr"].path).read_bytes()
        size = int.from_bytes(file[:8], "little")
        header = json.loads(file[8:8 + size])["kv_indptr"]
        assert (header["dtype"], header["shape"]) == ("I32", [3]) and torch.frombuffer(bytearray(file[8 + size:]), dtype=torch.int32)[0] == 0
    with pytest.raises(ValueError, match="'keep_last' is not one of keep_all"):
        TracingConfig(filter_policy="keep_last")


@pytest.mark.cpu
def test_the_environment_enables_both(tmp_path):
    norm(root=tmp_path).save()
    text = ("import torch, fir.flashinfer as fi\nfi.install()\nimport flashinfer.norm as n\nimport fir.bench\n"
            "print(bool((n.rmsnorm(torch.randn(3, 64), torch.ones(64)) == 7).all()))\n")
    run = lambda **more: subprocess.run([sys.executable, "-c", text], env={**os.environ, "FIB_DATASET_PATH": str(tmp_path), **more},
                                        check=True, capture_output=True, text=True).stdout.strip()
    assert (run(), run(FIB_ENABLE_APPLY="1"), run(FIB_ENABLE_TRACING="1")) == ("False", "True", "False")
    assert [w.axes for w in recorded(tmp_path)] == [{"n": 3}]
