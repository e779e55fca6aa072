"""The Python blocks about FlashInfer that users were shown run as they are written, once their tensors are there."""

import re
from types import SimpleNamespace

import pytest
import torch
from conftest import Pages, attention, close, shared, visible

import fir.flashinfer as fi


def blocks() -> list[tuple[str, str]]:
    """``(file, text)`` of every block that calls FlashInfer."""
    found = []
    for file in sorted(shared("seeds").glob("*.txt")):
        for text in re.findall(r"```python\n(.*?)```", file.read_text(), re.S):
            if re.search(r"flashinfer\.|KVCacheWrapper\(", text) and "PatchSpec" not in text:
                found.append((file.name, text))
    return found


def run(text: str, **names) -> dict:
    fi.install()
    import flashinfer

    space = {"flashinfer": flashinfer, **names}
    exec(compile(text, "seed", "exec"), space)
    return space


def of(pattern: str) -> str:
    texts = [t for _, t in blocks() if re.search(pattern, t)]
    assert len(texts) == 1, (pattern, len(texts))
    return texts[0]


def test_every_block_is_known():
    known = ("pos_encoding_mode=\"ROPE_LLAMA\"", r"single_decode_with_kv_cache\(q, k, v\)\n", r"Wrapper\(\.\.\.\)", r"jit\.compile",
             "install_flashinfer_integrations", "# Backend selection in SGLang")
    for file, text in blocks():
        assert any(re.search(k, text) for k in known), (file, text)


def test_single_requests():
    q, k, v = torch.randn(1, 4, 64).half(), torch.randn(9, 2, 64).half(), torch.randn(9, 2, 64).half()
    text = of(r"single_decode_with_kv_cache\(q, k, v\)\n")
    decode, prefill = (line for line in text.splitlines() if line.startswith("flashinfer."))
    out = run(f"out = {decode}", q=q[0], k=k, v=v)["out"]
    close(out, attention(q, k, v)[0][0])
    out = run(f"out = {prefill}", q=q, k=k, v=v)["out"]
    close(out, attention(q, k, v, mask=visible(1, 9, True))[0])


def test_basic_usage():
    """The block calls decode, then prefill and a cascade, with the same names; each runs with its own tensors, and what
    stands for more arguments is filled in."""
    text = of("pos_encoding_mode=\"ROPE_LLAMA\"")
    first, second, third = re.split(r"\n# (?:Batch prefill|Cascade)[^\n]*\n", text)
    q, k, v = torch.randn(4, 64).half(), torch.randn(9, 2, 64).half(), torch.randn(9, 2, 64).half()
    close(run(first, q=q, k=k, v=v)["o"], fi.single_decode_with_kv_cache(q, k, v, pos_encoding_mode="ROPE_LLAMA"))
    pages = Pages([9, 20], 4, 2, 64, torch.float16, one=True)
    qo, q = torch.tensor([0, 3, 5], dtype=torch.int32), torch.randn(5, 4, 64).half()
    names = dict(
        workspace_buffer=torch.empty(1), qo_indptr=qo, paged_kv_indptr=pages.indptr, paged_kv_indices=pages.indices,
        paged_kv_last_page_len=pages.last, num_qo_heads=4, num_kv_heads=2, head_dim=64, page_size=4, q=q,
        paged_kv_cache=pages.cache)
    out = run(second, **names)["output"]
    for r in (0, 1):
        close(out[qo[r]:qo[r + 1]], attention(q[qo[r]:qo[r + 1]], *pages.request(r))[0])
    i32 = lambda *x: torch.tensor(x, dtype=torch.int32)
    rest = ("paged_kv_indices_arr=[i32(0, 1), pages.indices], paged_kv_last_page_len=[i32(4), pages.last],\n"
            "    num_qo_heads=4, num_kv_heads=2, head_dim=64, page_size=4,")
    assert "# ... other parameters" in third
    out = run(third.replace("# ... other parameters", rest), i32=i32, pages=pages, q=q, workspace_buffer=torch.empty(1),
              paged_kv_cache=pages.cache, shared_indptr=i32(0, 5), unique_indptr=qo, shared_kv_indptr=i32(0, 2),
              unique_kv_indptr=pages.indptr)["output"]
    prefix = [pages.kv[:2, i].reshape(-1, 2, 64) for i in (0, 1)]
    for r in (0, 1):
        k, v = (torch.cat(pair) for pair in zip(prefix, pages.request(r)))
        close(out[qo[r]:qo[r + 1]], attention(q[qo[r]:qo[r + 1]], k, v)[0])


def test_batches():
    """``Wrapper(...)`` and ``plan(...)`` leave their arguments out: they are filled in."""
    text = of(r"Wrapper\(\.\.\.\)")
    pages = Pages([9, 20], 4, 2, 64, torch.float16)
    table = (pages.indptr, pages.indices, pages.last, 4, 2, 64, 4)
    decode, prefill = text.split("# 批量 Prefill")
    q = torch.randn(2, 4, 64).half()
    fill = lambda text, plan: text.replace("Wrapper(...)", "Wrapper(workspace)").replace("plan(...)", f"plan(*{plan})")
    fi.install()
    names = dict(workspace=torch.empty(1), table=table, qo=torch.tensor([0, 1, 2], dtype=torch.int32), q=q,
                 paged_kv_cache=pages.cache, **{n: getattr(fi, n) for n in fi.__dict__ if n.endswith("CacheWrapper")})
    for text, plan in ((decode, "table"), (prefill, "(qo, *table)")):
        out = run(fill(text, plan).replace("wrapper.run(", "out = wrapper.run("), **names)["out"]
        for r in (0, 1):
            close(out[r:r + 1], attention(q[r:r + 1], *pages.request(r))[0])


def test_backend_of_an_engine():
    engine = SimpleNamespace(workspace_buffer=torch.empty(1))
    run(of("# Backend selection in SGLang"), self=engine, BatchPrefillWithPagedKVCacheWrapper=fi.BatchPrefillWithPagedKVCacheWrapper)
    assert engine.prefill_wrapper._backend == "auto"


def test_a_kernel_of_ones_own():
    q, k, v = torch.randn(5, 4, 64).half(), torch.randn(9, 2, 64).half(), torch.randn(9, 2, 64).half()
    out = run(of(r"jit\.compile"), q=q, k=k, v=v, params=SimpleNamespace(custom_scale=0.25))["output"]
    close(out, attention(q, k, v, 0.25)[0])


def test_a_patched_norm():
    from fir import bench
    from fir.bench import integration

    bench.install()
    x, residual, weight = torch.randn(3, 64), torch.randn(3, 64), torch.randn(64)
    want = residual + x
    total = want / want.pow(2).mean(-1, keepdim=True).add(1e-5).sqrt() * weight
    try:
        run(of("install_flashinfer_integrations"), input=x, residual=residual, weight=weight, eps=1e-5)
    finally:
        integration.uninstall_flashinfer_integrations()
        bench.uninstall()
    close(residual, want)
    close(x, total)
    with pytest.raises(AssertionError):
        of("no such block")


def test_the_benchmark_from_definition_to_apply(tmp_path, device):
    """The blocks about FlashInfer-Bench, one after another: what they define is measured here, and their calls go to what was
    best. The solution is in Triton, which only a GPU runs; elsewhere it is built and fails, and one in torch stands beside it."""
    from fir import bench
    from fir.bench import integration

    texts = [t for f in sorted(shared("seeds").glob("*.txt")) for t in re.findall(r"```python\n(.*?)```", f.read_text(), re.S)
             if "flashinfer_bench" in t and "install_flashinfer_integrations" not in t]
    space = {"torch": torch, "List": list, "PatchSpec": integration.PatchSpec, "resolve_rmsnorm_def": lambda args: "none",
             "x": torch.randn(32, 4096).half(), "weight": torch.randn(4096).half()}
    bench.install()
    try:
        made = {}
        for text in texts:
            if "TraceSet.load" in text:
                definition, solution, workload = (made[k] for k in ("Definition", "Solution", "Workload"))
                own = bench.Solution(
                    name="rmsnorm_torch", definition=definition.name, author="here", spec=bench.BuildSpec(
                        language="python", target_hardware=["any"], entry_point="m.py::run", destination_passing_style=False),
                    sources=[bench.SourceFile(path="m.py", content=definition.reference)])
                own_set = bench.TraceSet(
                    tmp_path, {definition.name: definition}, {definition.name: [solution, own]},
                    {definition.name: [bench.Trace(definition=definition.name, workload=workload)]})
                own_set.save()
                config = bench.BenchmarkConfig(warmup_runs=1, iterations=2, num_trials=1, device=device, atol=0.1, rtol=0.1)
                done = bench.Benchmark(own_set, config).run_all()
                status = {t.solution: t.evaluation.status.value for t in done.traces[definition.name]}
                assert status["rmsnorm_torch"] == "PASSED" and (device == "cpu" or status["rmsnorm_triton_v1"] == "PASSED"), status
                text = text.replace("path/to/traces", str(tmp_path))
            # What a block makes and leaves lying is kept.
            text = re.sub(r"^(Definition|Solution|Workload)\(", r"made['\1'] = \1(", text, flags=re.M)
            exec(compile(text, "seed", "exec"), {**space, "made": made} if "made[" in text else space)
        assert len(texts) == 7 and len(made) == 3, (len(texts), list(made))
        x, weight = space["x"].float(), space["weight"].float()
        want = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight
        torch.testing.assert_close(space["output"].float(), want, atol=3e-2, rtol=3e-2)
        calls, entry = [], bench.get_apply_runtime().entries["rmsnorm_d4096"]
        assert entry.choose((32,)) in ("rmsnorm_torch", "rmsnorm_triton_v1")
        got = bench.apply("rmsnorm_d4096", args=(space["x"], space["weight"], 1e-6), fallback=lambda *_: calls.append(1))
        torch.testing.assert_close(got.float(), want, atol=3e-2, rtol=3e-2)
        assert not calls
        bench.disable_apply()
    finally:
        bench.uninstall()


def test_a_trace_as_it_is_shown():
    from fir import bench

    text, = [t for f in sorted(shared("seeds").glob("*.txt")) for t in re.findall(r"```python\n(.*?)```", f.read_text(), re.S)
             if t.startswith("Trace(")]
    space = {**vars(bench), "workload": bench.Workload(axes={"batch": 32}, inputs={})}
    exec(compile(f"made = {text}", "seed", "exec"), space)
    performance = space["made"].evaluation.performance
    assert space["made"].is_successful() and (performance.latency_ms, performance.speedup_factor) == (0.023, 1.96)


def test_an_adapter_of_ones_own():
    """The block's adapter, with what it leaves out given: the wrapper asks, and falls back to what was there."""
    from fir import bench
    from fir.bench import integration

    fi.install()
    import flashinfer.norm as norm

    text = next(t for f in sorted(shared("seeds").glob("*.txt")) for t in re.findall(r"```python\n(.*?)```", f.read_text(), re.S)
                if "class RMSNormAdapter" in t)
    asked = []
    space = {"List": list, "PatchSpec": integration.PatchSpec, "apply": bench.apply,
             "resolve_rmsnorm_def": lambda args: asked.append(args) or "none"}
    exec(compile(text, "seed", "exec"), space)
    original = norm.fused_add_rmsnorm
    try:
        integration.install_flashinfer_integrations(space["RMSNormAdapter"]())
        x, residual, weight = torch.randn(3, 64), torch.randn(3, 64), torch.ones(64)
        want = x + residual
        norm.fused_add_rmsnorm(x, residual, weight)
        close(residual, want)
        assert len(asked) == 1
    finally:
        integration.uninstall_flashinfer_integrations()
    assert norm.fused_add_rmsnorm is original
