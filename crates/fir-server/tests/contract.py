"""The official clients of OpenAI and Anthropic against a server at $FIR_URL: the double (examples/double.rs) or a model.

What holds for any model is asked of both; what needs a script is asked of the double only (its model is `double`).
"""

import asyncio
import json
import os
import statistics
import threading
import time

import anthropic
import httpx
import openai
import pytest
from anthropic import Anthropic
from openai import AsyncOpenAI, OpenAI
from prometheus_client.parser import text_string_to_metric_families
from pydantic import BaseModel

URL = os.environ.get("FIR_URL", "http://127.0.0.1:8000")
client = OpenAI(base_url=f"{URL}/v1", api_key=os.environ.get("FIR_KEY", "none"), max_retries=0, timeout=120)
claude = Anthropic(base_url=URL, api_key=os.environ.get("FIR_KEY", "none"), max_retries=0, timeout=120)
MODEL = client.models.list().data[0].id
double = pytest.mark.skipif(MODEL != "double", reason="needs the double's script")
HI = [{"role": "user", "content": "Say hello to the world in a few words."}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def chat(**more):
    return client.chat.completions.create(**{"model": MODEL, "messages": HI, "max_tokens": 24, **more})


def test_models():
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")


def test_a_chat_and_its_usage():
    answer = chat(temperature=0)
    assert answer.object == "chat.completion" and answer.model == MODEL
    choice = answer.choices[0]
    assert choice.message.role == "assistant" and choice.message.content
    assert choice.finish_reason in ("stop", "length")
    usage = answer.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert 0 < usage.completion_tokens <= 24
    assert usage.prompt_tokens_details.cached_tokens >= 0


def test_a_stream_says_the_same():
    whole = chat(temperature=0, seed=1).choices[0].message.content
    chunks = list(chat(temperature=0, seed=1, stream=True, stream_options={"include_usage": True}))
    assert len({(c.id, c.created) for c in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens > 0
    assert all(c.usage is None for c in chunks[:-1])
    assert chunks[-2].choices[0].finish_reason in ("stop", "length")
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole


def test_raw_events_end_with_done():
    body = {"model": MODEL, "messages": HI, "stream": True, "max_tokens": 3}
    with httpx.stream("POST", f"{URL}/v1/chat/completions", json=body, timeout=60) as response:
        assert response.headers["content-type"] == "text/event-stream"
        events = [line for line in response.iter_lines() if line and not line.startswith(":")]
    assert all(e.startswith("data: ") for e in events) and events[-1] == "data: [DONE]"


def test_several_answers():
    answer = chat(n=3, temperature=1.0)
    assert sorted(c.index for c in answer.choices) == [0, 1, 2]


def test_a_seed_repeats():
    once, again = chat(seed=5, temperature=1.0), chat(seed=5, temperature=1.0)
    assert once.choices[0].message.content == again.choices[0].message.content


def test_stop_and_length():
    answer = chat(max_tokens=1)
    assert answer.choices[0].finish_reason == "length" and answer.usage.completion_tokens == 1
    if MODEL != "double":
        text = chat(temperature=0).choices[0].message.content
        word = text.split()[1]
        cut = chat(temperature=0, stop=[word]).choices[0]
        assert word not in cut.message.content and cut.finish_reason == "stop"
        assert text.startswith(cut.message.content)


def test_log_probabilities():
    content = chat(logprobs=True, top_logprobs=3, max_tokens=4, temperature=0).choices[0].logprobs.content
    assert len(content) == 4
    for token in content:
        assert len(token.top_logprobs) == 3 and token.logprob <= 0
        assert token.logprob == pytest.approx(token.top_logprobs[0].logprob)
        assert bytes(token.bytes).decode(errors="replace") == token.token


def test_completions():
    answer = client.completions.create(model=MODEL, prompt=["One, two,", "A, B,"], max_tokens=4, temperature=0, echo=True)
    assert [c.index for c in answer.choices] == [0, 1]
    assert answer.choices[0].text.startswith("One, two,")
    parts = client.completions.create(model=MODEL, prompt="One, two,", max_tokens=4, temperature=0, stream=True)
    assert "One, two," + "".join(p.choices[0].text for p in parts) == answer.choices[0].text
    lists = client.completions.create(model=MODEL, prompt="One", max_tokens=2, logprobs=2, temperature=0).choices[0].logprobs
    assert len(lists.tokens) == len(lists.token_logprobs) == len(lists.text_offset) == 2


def test_a_prompt_is_scored():
    """As evaluation harnesses ask: the probability of each token of a text, and nothing more."""
    text = "One, two, three, four"
    ask = dict(model=MODEL, prompt=text, echo=True, logprobs=1, temperature=0)
    scored = client.completions.create(**ask, max_tokens=0)
    logprobs = scored.choices[0].logprobs
    assert scored.choices[0].text == text and scored.usage.completion_tokens == 0
    assert len(logprobs.tokens) == scored.usage.prompt_tokens and "".join(logprobs.tokens) == text
    assert logprobs.token_logprobs[0] is None and all(p <= 0 for p in logprobs.token_logprobs[1:])
    assert [text[at:].startswith(token) for at, token in zip(logprobs.text_offset, logprobs.tokens)]
    more = client.completions.create(**ask, max_tokens=2).choices[0].logprobs
    assert more.token_logprobs[1:-2] == pytest.approx(logprobs.token_logprobs[1:], abs=1e-5)
    parts = [p.choices[0] for p in client.completions.create(**ask, max_tokens=2, stream=True)]
    assert sum((p.logprobs.tokens for p in parts if p.logprobs), []) == more.tokens


def test_the_best_of_several():
    ask = dict(model=MODEL, prompt="The sky is", max_tokens=6, temperature=1.0, seed=3)
    best = client.completions.create(**ask, n=1, best_of=4, logprobs=0)
    assert len(best.choices) == 1 and best.usage.completion_tokens <= 24
    mean = lambda c: statistics.mean(c.logprobs.token_logprobs)
    all_four = client.completions.create(**ask, n=4, logprobs=0).choices
    assert mean(best.choices[0]) == pytest.approx(max(map(mean, all_four)), abs=1e-4)


def test_words_that_must_not_come_and_stop_texts_that_stay():
    if MODEL == "double":
        pytest.skip("needs a model")
    text = chat(temperature=0, max_tokens=40).choices[0].message.content
    word = text.split()[2].strip(".,!?")
    other = chat(temperature=0, max_tokens=40, extra_body={"bad_words": [word]}).choices[0].message.content
    assert word not in other
    kept = chat(temperature=0, max_tokens=40, stop=[word], extra_body={"include_stop_str_in_output": True}).choices[0]
    assert kept.message.content.endswith(word) and text.startswith(kept.message.content)


def test_tokens_come_back():
    post = lambda path, body: httpx.post(f"{URL}{path}", json=body).json()
    text = "Grüße, 世界! 🌲 def f(x): return x"
    tokens = post("/tokenize", {"prompt": text, "add_special_tokens": False})
    assert tokens["count"] == len(tokens["tokens"])
    assert post("/detokenize", {"tokens": tokens["tokens"]})["prompt"] == text


def test_embeddings():
    answer = client.embeddings.create(model=MODEL, input=["a cat", "a kitten", "quarterly tax returns"])
    vectors = [d.embedding for d in answer.data]
    assert len({len(v) for v in vectors}) == 1 and answer.usage.prompt_tokens > 0
    plain = client.embeddings.create(model=MODEL, input="a cat", encoding_format="float").data[0].embedding
    assert plain == pytest.approx(vectors[0], rel=1e-4, abs=1e-4)


class Place(BaseModel):
    city: str
    degrees: int


def test_parse_with_a_schema():
    answer = client.chat.completions.parse(
        model=MODEL, messages=[{"role": "user", "content": "It is 7 degrees in Oslo. Answer in JSON."}],
        response_format=Place, max_tokens=64, temperature=0,
    )
    assert isinstance(answer.choices[0].message.parsed, Place)


def test_json_object_and_choice():
    text = chat(response_format={"type": "json_object"}, max_tokens=200, temperature=0).choices[0]
    if text.finish_reason == "stop":
        assert isinstance(json.loads(text.message.content), dict)
    body = {"structured_outputs": {"choice": ["red", "green"]}}
    assert chat(extra_body=body, temperature=0).choices[0].message.content in ("red", "green")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
@pytest.mark.parametrize("stream", [False, True])
def test_forced_calls(choice, stream):
    ask = dict(
        messages=[{"role": "user", "content": "What is the weather in Oslo?"}], tools=[WEATHER], tool_choice=choice,
        parallel_tool_calls=False, max_tokens=100, temperature=0,
    )
    if stream:
        name, arguments, reason = "", "", None
        for chunk in chat(**ask, stream=True):
            for call in chunk.choices[0].delta.tool_calls or []:
                name += call.function.name or ""
                arguments += call.function.arguments or ""
            reason = chunk.choices[0].finish_reason or reason
    else:
        answer = chat(**ask).choices[0]
        call, reason = answer.message.tool_calls[0], answer.finish_reason
        name, arguments = call.function.name, call.function.arguments
        assert call.id and call.type == "function"
    assert name == "get_weather" and reason == "tool_calls"
    assert isinstance(json.loads(arguments)["city"], str)


@double
def test_free_calls_and_thoughts_and_what_follows():
    answer = chat(tools=[WEATHER], max_tokens=200).choices[0]
    assert answer.finish_reason == "tool_calls" and answer.message.reasoning_content == "The weather?"
    call = answer.message.tool_calls[0]
    assert json.loads(call.function.arguments) == {"city": "Oslo"}
    told = {"role": "tool", "tool_call_id": call.id, "content": "7 degrees"}
    past = [*HI, answer.message.model_dump(exclude_none=True), told]
    assert chat(messages=past, tools=[WEATHER]).choices[0].message.content


def test_responses():
    answer = client.responses.create(model=MODEL, input="Say hello.", instructions="Be brief.", max_output_tokens=24)
    assert answer.output_text and answer.usage.output_tokens > 0 and answer.status in ("completed", "incomplete")
    # Room for all of it: what is cut off ends with another event, which the client's last line takes for none.
    with client.responses.stream(model=MODEL, input="Say hello.", max_output_tokens=200, temperature=0) as stream:
        text = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
        assert text == stream.get_final_response().output_text
    tool = {"type": "function", **WEATHER["function"]}
    called = client.responses.create(
        model=MODEL, input="What is the weather in Oslo?", tools=[tool], tool_choice="required",
        parallel_tool_calls=False, max_output_tokens=100, temperature=0,
    )
    calls = [o for o in called.output if o.type == "function_call"]
    assert calls and calls[0].name == "get_weather" and json.loads(calls[0].arguments)
    # Round: what it said, what the tool said, and on.
    told = [{"role": "user", "content": "What is the weather in Oslo?"}, *called.output,
            {"type": "function_call_output", "call_id": calls[0].call_id, "output": "7 degrees, rain"}]
    final = client.responses.create(model=MODEL, input=told, tools=[tool], tool_choice="none", max_output_tokens=40)
    assert final.output_text
    parsed = client.responses.parse(
        model=MODEL, input="It is 7 degrees in Oslo. Answer in JSON.", text_format=Place, max_output_tokens=64, temperature=0
    )
    assert isinstance(parsed.output_parsed, Place)


def test_anthropic_s_client():
    # Which has no word for it; the server has.
    ask = dict(model=MODEL, max_tokens=24, messages=HI, extra_body={"temperature": 0})
    message = claude.messages.create(**ask)
    assert message.role == "assistant" and message.content[0].type == "text" and message.content[0].text
    assert message.stop_reason in ("end_turn", "max_tokens") and message.usage.output_tokens > 0
    count = claude.messages.count_tokens(model=MODEL, messages=HI).input_tokens
    assert count == message.usage.input_tokens + message.usage.cache_read_input_tokens
    with claude.messages.stream(**ask) as stream:
        text = "".join(stream.text_stream)
        assert text == stream.get_final_message().content[0].text == message.content[0].text
    tool = {"name": "get_weather", "description": "The weather of a city", "input_schema": WEATHER["function"]["parameters"]}
    ask = dict(ask, max_tokens=100, messages=[{"role": "user", "content": "What is the weather in Oslo?"}], tools=[tool])
    called = claude.messages.create(**ask, tool_choice={"type": "tool", "name": "get_weather"})
    call = called.content[-1]
    assert called.stop_reason == "tool_use" and call.type == "tool_use" and isinstance(call.input["city"], str)
    told = {"type": "tool_result", "tool_use_id": call.id, "content": "7 degrees, rain"}
    past = [*ask["messages"], {"role": "assistant", "content": called.content}, {"role": "user", "content": [told]}]
    final = claude.messages.create(**dict(ask, messages=past), tool_choice={"type": "none"})
    assert final.content[0].text
    shape = {"type": "json_schema", "schema": {**Place.model_json_schema(), "additionalProperties": False}}
    written = claude.messages.create(**dict(ask, tools=[], messages=[{"role": "user", "content": "It is 7 degrees in Oslo."}]), output_config={"format": shape})
    assert isinstance(Place.model_validate_json(written.content[0].text), Place)
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(**dict(ask, model="another"))
    with pytest.raises(anthropic.BadRequestError) as e:
        claude.messages.create(**dict(ask, max_tokens=10**9))
    assert e.value.body["error"]["type"] == "invalid_request_error"


def test_64_streams_at_once():
    """None is lost, none is mixed up with another; prints when first tokens came."""
    patient = AsyncOpenAI(base_url=f"{URL}/v1", api_key=client.api_key, max_retries=12, timeout=300)

    async def one(i):
        begin, first, chunks = time.perf_counter(), None, []
        stream = await patient.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": f"Count up from {i}."}], max_tokens=32, temperature=0,
            stream=True, stream_options={"include_usage": True},
        )
        async for chunk in stream:
            chunks.append(chunk)
            if first is None and chunk.choices and chunk.choices[0].delta.content:
                first = time.perf_counter() - begin
        return first, time.perf_counter() - begin, chunks

    async def all_of_them():
        return await asyncio.gather(*(one(i) for i in range(64)))

    begin = time.perf_counter()
    answers = asyncio.run(all_of_them())
    took = time.perf_counter() - begin
    tokens = 0
    for first, _, chunks in answers:
        assert first is not None and len({c.id for c in chunks}) == 1
        assert chunks[-1].usage and chunks[-2].choices[0].finish_reason in ("stop", "length")
        tokens += chunks[-1].usage.completion_tokens
    firsts = sorted(a[0] for a in answers)
    print(f"\n64 streams: first token median {firsts[32]:.2f} s, last {firsts[-1]:.2f} s; {tokens} tokens in {took:.2f} s")


def test_errors_are_the_clients_own():
    with pytest.raises(openai.NotFoundError) as e:
        chat(model="another")
    assert e.value.code == "model_not_found" and e.value.param == "model"
    with pytest.raises(openai.BadRequestError) as e:
        chat(temperature=3)
    assert e.value.param == "temperature" and "from 0 to 2" in e.value.message
    with pytest.raises(openai.BadRequestError) as e:
        chat(max_tokens=10**9)
    assert e.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError):
        chat(extra_body={"temprature": 1})
    for bad in ({"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no such type"}}},):
        if MODEL != "double":
            with pytest.raises(openai.BadRequestError):
                chat(response_format=bad)


def in_flight():
    text = httpx.get(f"{URL}/metrics").text
    values = {s.name: s.value for family in text_string_to_metric_families(text) for s in family.samples}
    return values["fir_requests_running"] + values["fir_requests_waiting"]


def test_metrics_are_prometheus_text():
    families = {f.name for f in text_string_to_metric_families(httpx.get(f"{URL}/metrics").text)}
    assert {"fir_requests_running", "fir_first_token_seconds", "fir_prompt_tokens"} <= families


def test_a_storm_of_clients_that_leave():
    def leave(i):
        body = {"model": MODEL, "messages": [{"role": "user", "content": f"Tell a long story {i}."}], "max_tokens": 500,
                "stream": i % 2 == 0, "ignore_eos": True}
        try:
            with httpx.stream("POST", f"{URL}/v1/chat/completions", json=body, timeout=0.05 + 0.02 * (i % 10)) as response:
                for _ in response.iter_raw():
                    pass
        except httpx.HTTPError:
            pass

    threads = [threading.Thread(target=leave, args=(i,)) for i in range(40)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    end = time.time() + 20
    while in_flight() and time.time() < end:
        time.sleep(0.05)
    assert in_flight() == 0
    assert chat().choices[0].message.content


def test_overload_is_429_and_retries_get_through():
    patient = OpenAI(base_url=f"{URL}/v1", api_key=client.api_key, max_retries=12, timeout=120)
    codes, answers, lock = [], [], threading.Lock()

    def once(who, to):
        try:
            answer = who.chat.completions.create(model=MODEL, messages=HI, max_tokens=8)
            with lock:
                to.append(answer.choices[0].finish_reason)
        except openai.RateLimitError as e:
            assert e.response.headers["retry-after"]
            with lock:
                to.append(429)

    threads = [threading.Thread(target=once, args=(client, codes)) for _ in range(int(os.environ.get("FIR_BURST", 150)))]
    threads += [threading.Thread(target=once, args=(patient, answers)) for _ in range(10)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    # Every request has an answer, whichever.
    assert len(codes) == len(threads) - 10 and set(codes) <= {429, "stop", "length"}
    assert len(answers) == 10 and 429 not in answers
    assert in_flight() == 0
