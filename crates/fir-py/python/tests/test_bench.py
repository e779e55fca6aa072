"""``fir.bench``: the nouns, a benchmark, ``apply``, and upstream's name for it all."""

import json
import sys

import pytest

torch = pytest.importorskip("torch")

import fir.bench as bench
from fir.bench import (
    AxisConst, AxisVar, BuildSpec, Definition, DType, Evaluation, RandomInput, ScalarInput, Solution, SourceFile,
    SupportedLanguages, TensorSpec, Trace, TraceSet, Workload)

REFERENCE = "import torch\n\ndef run(x, weight, eps):\n    variance = x.pow(2).mean(-1, keepdim=True)\n" \
    "    return x * torch.rsqrt(variance + eps) * weight\n"


def definition(name="rmsnorm_d64"):
    return Definition(
        name=name, op_type="norm", axes={"batch": AxisVar(), "hidden": AxisConst(value=64)},
        inputs={"x": TensorSpec(shape=["batch", "hidden"], dtype=DType.FLOAT32),
                "weight": TensorSpec(shape=["hidden"], dtype=DType.FLOAT32), "eps": TensorSpec(shape=None, dtype=DType.FLOAT32)},
        outputs={"out": TensorSpec(shape=["batch", "hidden"], dtype=DType.FLOAT32)}, reference=REFERENCE,
        tags=["stage:inference"])


def solution(name="torch_v1", code=None, style=False):
    return Solution(
        name=name, definition="rmsnorm_d64", author="test",
        spec=BuildSpec(language=SupportedLanguages.PYTHON, target_hardware=["cpu"], entry_point="kernel.py::run",
                       destination_passing_style=style),
        sources=[SourceFile(path="kernel.py", content=code or REFERENCE)])


def workload(batch):
    return Workload(axes={"batch": batch}, inputs={"x": RandomInput(dtype="float32"), "weight": RandomInput(), "eps": ScalarInput(value=1e-6)})


def test_wrong_data_is_refused_and_nothing_changes():
    with pytest.raises(ValueError, match="must define a function `run`"):
        Definition(**{**{f: getattr(definition(), f) for f in Definition._fields}, "reference": "x = 1"})
    with pytest.raises(TypeError, match="no field 'shapes'"):
        TensorSpec(shapes=[], dtype="int8")
    with pytest.raises(AttributeError):
        definition().name = "other"
    again = Definition.model_validate_json(definition().model_dump_json())
    assert again == definition() and again.var_axes == ["batch"] and again.const_axes == {"hidden": 64}
    assert definition().get_axes_values([(3, 64), (64,), None]) == {"batch": 3}


def test_a_benchmark_runs_and_apply_routes(tmp_path):
    other = "import torch\n\ndef run(x, weight, eps, out):\n    out.copy_(torch.nn.functional.rms_norm(x, (64,), weight, eps))\n"
    wrong = "def run(x, weight, eps):\n    return x\n"
    made = TraceSet(tmp_path, {"rmsnorm_d64": definition()},
                    {"rmsnorm_d64": [solution(), solution("torch_v2", other, True), solution("wrong", wrong)]},
                    {"rmsnorm_d64": [Trace(definition="rmsnorm_d64", workload=workload(b)) for b in (2, 32)]})
    made.save()
    config = bench.BenchmarkConfig(warmup_runs=1, iterations=3, num_trials=1)
    done = bench.Benchmark(made, config).run_all()
    status = {(t.solution, t.workload.axes["batch"]): t.evaluation.status.value for t in done.traces["rmsnorm_d64"]}
    assert status[("torch_v1", 2)] == status[("torch_v2", 32)] == "PASSED" and status[("wrong", 2)] == "INCORRECT_NUMERICAL"
    assert len(TraceSet.from_path(tmp_path).traces["rmsnorm_d64"]) == 6

    calls = []

    @bench.apply("rmsnorm_d64")
    def rmsnorm(x, weight, eps):
        calls.append(x.shape[0])
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight

    # It was measured on the CPU, and traces of another device do not count.
    x, weight = torch.randn(32, 64, device="cpu"), torch.randn(64, device="cpu")
    want = rmsnorm(x, weight, 1e-6)
    with bench.enable_apply(TraceSet.load(tmp_path)):
        assert torch.allclose(rmsnorm(x, weight, 1e-6), want, atol=1e-5)
        assert calls == [32]
        rmsnorm(torch.randn(7, 64, device="cpu"), weight, 1e-6)
        assert calls == [32, 7]
        got = bench.apply("rmsnorm_d64", args=(x, weight), kwargs={"eps": 1e-6}, fallback=rmsnorm)
        assert torch.allclose(got, want, atol=1e-5)
        near = bench.ApplyConfig(on_miss_policy="use_nearest")
        with bench.enable_apply(tmp_path, near):
            rmsnorm(torch.randn(40, 64, device="cpu"), weight, 1e-6)
            assert calls == [32, 7]
    rmsnorm(x, weight, 1e-6)
    assert calls == [32, 7, 32]
    with pytest.raises(RuntimeError, match="no fallback"):
        bench.apply("rmsnorm_d64", args=(x, weight, 1e-6))


def test_what_was_read_is_written_as_it_was(tmp_path):
    from conftest import shared

    data = shared("data/flashinfer_trace")
    TraceSet.from_path(data).save(tmp_path)
    files = {f.relative_to(data) for f in data.rglob("*.json*")}
    assert len(files) > 100 and files == {f.relative_to(tmp_path) for f in tmp_path.rglob("*.json*")}
    for file in files:
        assert (tmp_path / file).read_bytes() == (data / file).read_bytes(), file


def test_fields_that_are_not_known_are_kept(tmp_path):
    text = solution().model_dump()
    text["origin"], text["spec"]["flags"], text["spec"]["note"] = "\u2028 \u00e9", ["-O1"], {"a": 1}
    again = Solution.model_validate(text)
    assert again.spec.flags == ["-O1"] and again.model_dump() == text and again.model_dump()["origin"] == text["origin"]
    made = TraceSet(tmp_path, {"rmsnorm_d64": definition()}, {"rmsnorm_d64": [again]})
    made.add_workload_traces([Trace.model_validate({"definition": "rmsnorm_d64", "workload": workload(2).model_dump(), "origin": "\u2028"})])
    made.save()
    read = TraceSet.from_path(tmp_path)
    assert read.get_solution("torch_v1").model_dump() == text and read.workloads["rmsnorm_d64"][0].model_dump()["origin"] == "\u2028"
    assert again.with_unique_name().name == f"torch_v1_{again.hash()[:8]}"
    (tmp_path / "definitions/norm/broken.json").write_text('{"name": "x"}')
    with pytest.raises(ValueError, match="broken.json: Definition needs a field 'op_type'"):
        TraceSet.from_path(tmp_path)


def test_authors_are_ranked_by_their_speed_over_a_baseline(tmp_path):
    by = lambda name, author: Solution.model_validate({**solution(name).model_dump(), "author": author})
    made = TraceSet(tmp_path, {"rmsnorm_d64": definition()}, {"rmsnorm_d64": [by("base", "baseline"), by("fast", "ann"), by("flaky", "bob")]})
    loads = [workload(2), workload(32)]
    made.add_workload_traces([Trace(definition="rmsnorm_d64", workload=w) for w in loads])
    passed = lambda name, w, ms: Trace(definition="rmsnorm_d64", workload=w, solution=name, evaluation=Evaluation(
        status="PASSED", max_absolute_error=0.0, latency_ms=ms))
    made.add_traces([passed("base", loads[0], 2.0), passed("base", loads[1], 8.0), passed("fast", loads[0], 1.0), passed("fast", loads[0], 3.0),
                     passed("fast", loads[1], 2.0), passed("flaky", loads[0], 0.1)])
    made.add_traces([Trace(definition="rmsnorm_d64", workload=loads[1], solution="flaky", evaluation=Evaluation(status="TIMEOUT"))])
    made.save()
    summary = TraceSet.from_path(tmp_path).summary()
    assert (summary.total, summary.passed, summary.failed) == (7, 6, 1)
    (first, ann), (second, bob) = summary.rankings
    assert (first, ann.avg_speedup, ann.win_rate, ann.workloads, ann.best_solutions) == ("ann", 3.0, 1.0, 2, {"rmsnorm_d64": "fast"})
    assert (second, bob.avg_speedup, bob.success_rate) == ("bob", 0.0, 0.0)
    assert made.get_solution_score("base") is None
    with pytest.raises(ValueError, match="has 0 solutions by `nobody`, not 1"):
        made.get_solution_score("fast", "nobody")
    with pytest.raises(ValueError, match="solution `none` is not in the set"):
        made.add_traces([passed("none", loads[0], 1.0)])
    made.backup_traces()
    assert not TraceSet.from_path(tmp_path).traces and len(list(tmp_path.glob("traces_bak_*/*/*/*.jsonl"))) == 3


def test_upstreams_name_finds_it():
    bench.install()
    try:
        from flashinfer_bench import apply
        from flashinfer_bench.data import Trace as Theirs
        from flashinfer_bench.integration.flashinfer import install_flashinfer_integrations

        assert apply is bench.apply and Theirs is Trace and callable(install_flashinfer_integrations)
        made = Trace(definition="d", workload=workload(1), solution="s", evaluation=Evaluation(
            status="PASSED", max_relative_error=1e-5, latency_ms=0.023, reference_latency_ms=0.045, speedup_factor=1.96))
        assert json.loads(made.model_dump_json())["evaluation"]["performance"]["latency_ms"] == 0.023
    finally:
        bench.uninstall()
    assert "flashinfer_bench" not in sys.modules


def test_calls_of_flashinfer_ask_first_and_are_put_back(tmp_path):
    flashinfer = pytest.importorskip("fir.flashinfer")
    flashinfer.install()
    from fir.bench import integration

    import flashinfer.norm as norm

    original = norm.rmsnorm
    try:
        assert "flashinfer.norm:rmsnorm" in integration.install_flashinfer_integrations()
        assert norm.rmsnorm is not original
        integration.install_flashinfer_integrations()
        name = "rmsnorm_h64"
        made = TraceSet(tmp_path, {name: Definition(
            name=name, op_type="rmsnorm", axes={"batch": AxisVar(), "h": AxisConst(value=64)},
            inputs={"hidden_states": TensorSpec(shape=["batch", "h"], dtype="float32"),
                    "weight": TensorSpec(shape=["h"], dtype="float32")},
            outputs={"y": TensorSpec(shape=["batch", "h"], dtype="float32")},
            reference="def run(hidden_states, weight):\n    return hidden_states\n")},
            {name: [Solution(name="marks", definition=name, author="a", spec=BuildSpec(
                language="python", target_hardware=["cpu"], entry_point="m.py::run", destination_passing_style=False),
                sources=[SourceFile(path="m.py", content="def run(x, w):\n    return x * 0 + 7\n")])]},
            traces={name: [Trace(definition=name, workload=Workload(axes={"batch": 2}, inputs={}), solution="marks",
                                 evaluation=Evaluation(status="PASSED", max_absolute_error=0.0, latency_ms=1.0))]})
        x, w = torch.randn(2, 64), torch.ones(64)
        with bench.enable_apply(made):
            assert (norm.rmsnorm(x, w) == 7).all()
            assert not (norm.rmsnorm(torch.randn(3, 64), w) == 7).any()
        assert not (norm.rmsnorm(x, w) == 7).any()
    finally:
        integration.uninstall_flashinfer_integrations()
    assert norm.rmsnorm is original


def test_a_planned_decode_asks_first(tmp_path):
    flashinfer = pytest.importorskip("fir.flashinfer")
    flashinfer.install()
    from fir.bench import integration

    import flashinfer.decode as decode

    name = "gqa_paged_decode_h4_kv2_d64_ps16"
    tensor = lambda *shape, dtype="float32": TensorSpec(shape=list(shape), dtype=dtype)
    axes = {n: AxisVar() for n in ("batch_size", "num_pages", "len_indptr", "num_kv_indices")}
    axes.update(h=AxisConst(value=4), kv=AxisConst(value=2), d=AxisConst(value=64), ps=AxisConst(value=16))
    inputs = {"q": tensor("batch_size", "h", "d"), "k_cache": tensor("num_pages", "ps", "kv", "d"),
              "v_cache": tensor("num_pages", "ps", "kv", "d"), "kv_indptr": tensor("len_indptr", dtype="int32"),
              "kv_indices": tensor("num_kv_indices", dtype="int32"), "kv_last_page_len": tensor("batch_size", dtype="int32"),
              "sm_scale": TensorSpec(shape=None, dtype="float32")}
    args = ", ".join(inputs)
    code = f"import torch\ndef run({args}):\n    return torch.full_like(q, sm_scale), q.new_full(q.shape[:2], 5)\n"
    made = TraceSet(tmp_path, {name: Definition(
        name=name, op_type="gqa_paged", axes=axes, inputs=inputs,
        outputs={"output": tensor("batch_size", "h", "d"), "lse": tensor("batch_size", "h")}, reference=code)},
        {name: [Solution(name="marks", definition=name, author="a", spec=BuildSpec(
            language="python", target_hardware=["cpu"], entry_point="m.py::run", destination_passing_style=False),
            sources=[SourceFile(path="m.py", content=code)])]},
        traces={name: [Trace(
            definition=name, workload=Workload(axes={"batch_size": 2, "num_pages": 4, "len_indptr": 3, "num_kv_indices": 3}, inputs={}),
            solution="marks", evaluation=Evaluation(status="PASSED", max_absolute_error=0.0, latency_ms=1.0))]})
    integration.install_flashinfer_integrations()
    try:
        wrapper = decode.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1 << 20, dtype=torch.uint8), "NHD")
        ints = lambda *x: torch.tensor(x, dtype=torch.int32)
        wrapper.plan(ints(0, 2, 3), ints(0, 1, 2), ints(3, 16), 4, 2, 64, 16, q_data_type=torch.float32, sm_scale=0.25)
        q, cache = torch.randn(2, 4, 64), torch.randn(4, 2, 16, 2, 64)
        own = wrapper.run(q, cache)
        with bench.enable_apply(made):
            out, lse = wrapper.run(q, cache, return_lse=True)
            assert (out == 0.25).all() and (lse == 5).all()
            other = torch.randn(5, 2, 16, 2, 64)
            assert not (wrapper.run(q, other) == 0.25).any()
        assert torch.equal(wrapper.run(q, cache), own)
    finally:
        integration.uninstall_flashinfer_integrations()


def test_a_mixture_of_experts_asks_first(tmp_path):
    """Upstream's function by its signature: the package here has none of that name."""
    flashinfer = pytest.importorskip("fir.flashinfer")
    flashinfer.install()
    from fir.bench import integration

    import flashinfer.fused_moe as fused_moe

    def own(routing_logits, routing_bias, hidden_states, hidden_states_scale, gemm1_weights, gemm1_weights_scale,
            gemm2_weights, gemm2_weights_scale, num_experts, top_k, n_group, topk_group, intermediate_size,
            local_expert_offset, local_num_experts, routed_scaling_factor, routing_method_type=0, do_finalize=True):
        return hidden_states

    fused_moe.trtllm_fp8_block_scale_moe = own
    name, names = "moe_fp8_block_scale_renorm_topk2_e4_h8_i16", {
        "routing_logits": ("t", "e"), "hidden_states": ("t", "h"), "hidden_states_scale": ("b", "t"), "gemm1_weights": ("e", "j", "h"),
        "gemm1_weights_scale": ("e", "b", "b"), "gemm2_weights": ("e", "h", "i"), "gemm2_weights_scale": ("e", "b", "b")}
    sizes = {"e": 4, "h": 8, "i": 16, "j": 32, "b": 1}
    axes = {"t": AxisVar(), **{n: AxisConst(value=v) for n, v in sizes.items()}}
    code = f"def run({', '.join(names)}):\n    return hidden_states * 0 + 7\n"
    made = TraceSet(tmp_path, {name: Definition(
        name=name, op_type="moe", axes=axes, inputs={n: TensorSpec(shape=list(s), dtype="float32") for n, s in names.items()},
        outputs={"output": TensorSpec(shape=["t", "h"], dtype="float32")}, reference=code)},
        {name: [Solution(name="marks", definition=name, author="a", spec=BuildSpec(
            language="python", target_hardware=["cpu"], entry_point="m.py::run", destination_passing_style=False),
            sources=[SourceFile(path="m.py", content=code)])]},
        traces={name: [Trace(definition=name, workload=Workload(axes={"t": 3}, inputs={}), solution="marks",
                             evaluation=Evaluation(status="PASSED", max_absolute_error=0.0, latency_ms=1.0))]})
    tensors = {n: torch.randn(*[sizes.get(a, 3) for a in s]) for n, s in names.items()}
    rest = dict(routing_bias=None, num_experts=4, top_k=2, n_group=None, topk_group=None, intermediate_size=16,
                local_expert_offset=0, local_num_experts=4, routed_scaling_factor=None)
    try:
        assert "flashinfer.fused_moe:trtllm_fp8_block_scale_moe" in integration.install_flashinfer_integrations()
        call = lambda **more: (fused_moe.trtllm_fp8_block_scale_moe(**tensors, **{**rest, **more}) == 7).all()
        with bench.enable_apply(made):
            assert call(routing_method_type=1)
            assert not call(routing_method_type=1, do_finalize=False) and not call(routing_method_type=3)
            assert not call(routing_method_type=2) and not call(routing_method_type=1, top_k=1)
        assert not call(routing_method_type=1)
    finally:
        integration.uninstall_flashinfer_integrations()
        del fused_moe.trtllm_fp8_block_scale_moe
