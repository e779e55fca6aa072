"""Models that answer: the tiny, random ones that the engine's own tests have."""

import asyncio
import gc
import json
import subprocess
import sys
import threading
import time

import pytest
from conftest import checkout

import fir
from fir import SamplingParams, StructuredOutputsParams

MODEL = checkout() / "crates/fir-engine/tests/golden/llama"
pytestmark = [pytest.mark.cpu, pytest.mark.skipif(not MODEL.exists(), reason="the engine's models are not here")]
SMALL = dict(memory=64 << 20, max_seqs=4, drafts=0)
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


@pytest.fixture(scope="module")
def llm():
    with fir.LLM(MODEL, **SMALL) as model:
        yield model


def test_answers_do_not_depend_on_the_batch(llm):
    prompts = ["hello", "abc", [5, 6, 7], {"prompt": "xyz"}, {"prompt_token_ids": [5, 6, 7]}]
    together = llm.generate(prompts, GREEDY)
    alone = [llm.generate(p, GREEDY)[0] for p in prompts]
    texts = lambda outputs: [(o.outputs[0].text, o.outputs[0].token_ids) for o in outputs]
    assert texts(together) == texts(alone) and texts(together)[2] == texts(together)[4]
    first = together[0]
    assert first.prompt == "hello" and first.prompt_token_ids == llm.encode("hello") and first.finished
    assert first.outputs[0].text == llm.decode(first.outputs[0].token_ids) and first.outputs[0].finish_reason == "length"
    assert together[2].prompt is None and together[3].prompt == "xyz" and len(first.outputs[0].token_ids) == 8


def test_more_prompts_than_the_queue_holds(llm):
    outputs = llm.generate([[3 + i % 50, 4] for i in range(600)], SamplingParams(max_tokens=1, temperature=0.0))
    assert len(outputs) == 600 and outputs[0].outputs[0].token_ids == outputs[50].outputs[0].token_ids
    assert [o.prompt_token_ids[0] for o in outputs[:3]] == [3, 4, 5]


def test_every_rule(llm):
    one = lambda **rules: llm.generate("hello", SamplingParams(**{"max_tokens": 8, "seed": 7, **rules}))[0].outputs
    plain = one()[0]
    assert plain.token_ids == one()[0].token_ids != one(seed=8)[0].token_ids
    several = one(n=3)
    assert len({tuple(o.token_ids) for o in several}) == 3 and [o.index for o in several] == [0, 1, 2]
    best = one(temperature=0.0)[0].token_ids
    assert one(top_k=1)[0].token_ids == best == one(top_p=1e-6)[0].token_ids == one(min_p=1.0)[0].token_ids
    assert one(top_k=-1)[0].token_ids == plain.token_ids
    logged = one(temperature=0.0, logprobs=3)[0]
    assert all(len(at) == 3 and at[t].rank == 1 for at, t in zip(logged.logprobs, logged.token_ids))
    assert logged.cumulative_logprob == pytest.approx(sum(at[t].logprob for at, t in zip(logged.logprobs, logged.token_ids)))
    assert set(one(allowed_token_ids=[5, 6])[0].token_ids) <= {5, 6}
    assert set(one(logit_bias={9: 1000.0})[0].token_ids) == {9}
    stopped = one(stop_token_ids=[best[2]], temperature=0.0)[0]
    assert stopped.finish_reason == "stop" and len(stopped.token_ids) <= 3
    text = one(temperature=0.0)[0].text
    for stop in (text[1:3], [text[1:3], "never"]):
        cut = one(stop=stop, temperature=0.0)[0]
        assert cut.text == text[:text.index(text[1:3])] and cut.finish_reason == "stop"
    assert len(one(max_tokens=3)[0].token_ids) == 3
    assert len(one(min_tokens=8, ignore_eos=True, max_tokens=8)[0].token_ids) == 8
    for rules in (dict(presence_penalty=50.0), dict(frequency_penalty=50.0), dict(repetition_penalty=50.0)):
        drawn = one(temperature=0.0, **rules)[0].token_ids
        assert len(set(drawn)) == len(drawn), rules
    assert one(priority=5)[0].token_ids == plain.token_ids
    rule = lambda **r: one(structured_outputs=StructuredOutputsParams(**r), max_tokens=40)[0].text
    assert rule(choice=["ab", "cd"]) in ("ab", "cd") and rule(regex="[0-9]{3}").isdigit()
    assert set(rule(grammar='start: "a" "b"+')) <= {"a", "b"}
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
    assert json.loads(rule(json=schema))["a"] in (True, False) and json.loads(rule(json=json.dumps(schema)))["a"] in (True, False)
    assert rule(json_object=True).lstrip().startswith("{")


def test_refusals_name_the_field(llm):
    for rules, error, what in ((dict(temperature=-1.0), ValueError, "temperature"), (dict(top_p=0.0), ValueError, "top_p"),
                               (dict(max_tokens=0), ValueError, "max_tokens"), (dict(n=1000), ValueError, "`n`"),
                               (dict(seed="x"), TypeError, "seed"), (dict(logprobs=1000), ValueError, "logprobs")):
        with pytest.raises(error, match=what):
            llm.generate("hello", SamplingParams(**rules))
    with pytest.raises(ValueError, match="expected one rule"):
        llm.generate("hello", SamplingParams(structured_outputs=StructuredOutputsParams()))
    with pytest.raises(ValueError, match="at most 255 fit"):
        llm.generate([1] * 300)
    with pytest.raises(ValueError, match="vocabulary ends"):
        llm.generate([10**6])
    with pytest.raises(ValueError, match="3 sampling_params, expected one, or one for each of 2"):
        llm.generate(["a", "b"], [GREEDY] * 3)
    with pytest.raises(ValueError, match="no chat template"):
        llm.chat([{"role": "user", "content": "x"}])
    with pytest.raises(ValueError, match="no such file"):
        fir.LLM("/no/such/model")
    with pytest.raises(TypeError, match="`pages` is no setting"):
        fir.LLM(MODEL, pages=3)
    with pytest.raises(ValueError, match="device"):
        fir.LLM(MODEL, device="tpu")
    with pytest.raises(ValueError, match="KV type"):
        fir.LLM(MODEL, kv_type="f64")
    assert llm.generate("hello", GREEDY)[0].finished  # It still serves.


def test_settings_and_the_rest(llm):
    assert llm.context == 256 and len(llm.embed("hello")) == len(llm.embed([1, 2])) > 0
    with fir.LLM(MODEL, kv_type="f32", page_size=8, context=64, max_step_tokens=200, itl_target_ms=20.0, prefix_cache=False,
                 cascade=False, host_tier=1 << 20, **SMALL) as other:
        assert other.context == 64
        assert other.generate("hello", GREEDY)[0].outputs[0].token_ids == llm.generate("hello", GREEDY)[0].outputs[0].token_ids
    with pytest.raises(RuntimeError, match="closed"):
        other.generate("hello")
    cached = llm.generate([list(range(3, 60))] * 2, GREEDY)
    assert llm.generate([list(range(3, 60))], GREEDY)[0].num_cached_tokens >= 48 and cached[0].finished


def test_chat(tmp_path):
    for file in MODEL.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}{% if tools %}t{% endif %}{{ extra | default('') }}"
        "{% if add_generation_prompt %}a{% endif %}")
    chat = [{"role": "user", "content": "hello"}]
    with fir.LLM(tmp_path, **SMALL) as model:
        for kwargs, prompt in (({}, "uhelloa"), ({"add_generation_prompt": False}, "uhello"), ({"tools": [{}]}, "uhellota"),
                               ({"chat_template_kwargs": {"extra": "zz"}}, "uhellozza")):
            got = model.chat(chat, GREEDY, **kwargs)[0]
            assert got.prompt == prompt and got.outputs[0].token_ids == model.generate(prompt, GREEDY)[0].outputs[0].token_ids
        assert [o.prompt for o in model.chat([chat, chat * 2], GREEDY)] == ["uhelloa", "uhellouhelloa"]


def test_streams():
    async def one(model, prompt):
        seen = []
        async for output in model.generate(prompt, GREEDY, request_id=f"id-{prompt}"):
            seen.append(output)
        return seen

    async def all_():
        model = fir.AsyncLLM(MODEL, **SMALL)
        streams = await asyncio.gather(*(one(model, p) for p in ("hello", "abc", "xyz")))
        for prompt, seen in zip(("hello", "abc", "xyz"), streams):
            assert seen[-1].finished and not any(o.finished for o in seen[:-1]) and seen[0].request_id == f"id-{prompt}"
            texts = [o.outputs[0].text for o in seen]
            assert all(b.startswith(a) for a, b in zip(texts, texts[1:])) and len(seen[-1].outputs[0].token_ids) == 8
        # Leaving the loop aborts the request, and the model goes on.
        async for _ in model.generate("hello", SamplingParams(max_tokens=200, ignore_eos=True)):
            break
        for _ in range(200):
            if not model._requests:
                break
            await asyncio.sleep(0.01)
        assert not model._requests
        with pytest.raises(ValueError, match="top_p"):
            await one_bad(model)
        assert (await one(model, "abc"))[-1].outputs[0].token_ids == streams[1][-1].outputs[0].token_ids
        with pytest.raises(ValueError, match="no chat template"):
            async for _ in model.chat([{"role": "user", "content": "x"}]):
                pass
        model.close()

    async def one_bad(model):
        async for _ in model.generate("hello", SamplingParams(top_p=2.0)):
            pass

    asyncio.run(all_())


def test_threads_share_a_model_and_others_run_meanwhile(llm):
    want = llm.generate("hello", GREEDY)[0].outputs[0].token_ids
    results, ticks, done = [], 0, threading.Event()
    work = lambda: results.extend(llm.generate("hello", GREEDY)[0].outputs[0].token_ids == want for _ in range(10))
    threads = [threading.Thread(target=work) for _ in range(4)]
    [t.start() for t in threads]
    while any(t.is_alive() for t in threads):
        ticks += 1
        time.sleep(0.001)
    done.set()
    assert len(results) == 40 and all(results) and ticks > 5


def test_a_model_that_is_dropped_ends_and_so_does_the_interpreter():
    model = fir.LLM(MODEL, **SMALL)
    threads = lambda: sum(t.name == "fir-llm" for t in threading.enumerate())
    before = threads()
    del model
    gc.collect()
    assert threads() == before - 1
    code = f"import fir; m = fir.LLM({str(MODEL)!r}, memory=64 << 20, max_seqs=4, drafts=0); print(len(m.generate('hello')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.strip() == "1" and done.stderr == ""
