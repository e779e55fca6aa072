"""llama.cpp on the same GGUF file, asked the same questions as ours, through PyPI's `llama-cpp-python`.

    python llama.py speed MODEL [THREADS]           a case per line of stdin (pp512, tg128, tg128x16): tokens per second
    python llama.py perplexity MODEL FILE.json      on the pieces that `fir bench perplexity --json` wrote
    python llama.py needle MODEL FILE.json          on the prompts that `fir bench needle --json` wrote

Built by gcc 12 it dies at its first prompt on a machine with AMX: clang builds it right. The first time that a case is
asked it is run in every setting of flash attention and, with several sequences, of one cache for all or one each; from then
on in the fastest.
"""

import ctypes
import json
import sys
import time

import llama_cpp as lib
import numpy as np

STEPS = 32


class Context:
    def __init__(self, model, size, sequences, flash, threads, cache=None, unified=False):
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = size, 2048, 512, sequences
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_ENABLED if flash else lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.kv_unified = unified
        if cache is not None:
            params.type_k = params.type_v = cache
        self.handle = lib.llama_init_from_model(model, params)
        if not self.handle:
            raise SystemExit("llama.cpp gave no context")
        self.vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
        self.batch = lib.llama_batch_init(2048, 0, 1)

    def clear(self):
        lib.llama_memory_clear(lib.llama_get_memory(self.handle), False)

    def run(self, rows):
        """Rows are (token, position, sequence, whether its logits are wanted)."""
        batch = self.batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, wanted
            batch.seq_id[i][0] = sequence
        code = lib.llama_decode(self.handle, batch)
        if code != 0:
            raise SystemExit(f"llama_decode: {code}")

    def logits(self, row):
        return np.ctypeslib.as_array(lib.llama_get_logits_ith(self.handle, row), (self.vocab,))

    def free(self):
        lib.llama_batch_free(self.batch)
        lib.llama_free(self.handle)


def load(path):
    lib.llama_log_set(QUIET, ctypes.c_void_p(0))
    lib.llama_backend_init()
    model = lib.llama_model_load_from_file(path.encode(), lib.llama_model_default_params())
    if not model:
        raise SystemExit(f"{path}: llama.cpp cannot load it")
    return model


QUIET = lib.llama_log_callback(lambda level, text, data: None)


def tokens(n):
    return [100 + i * 37 % 9000 for i in range(n)]


class Prompt:
    """A prompt of so many tokens."""

    def __init__(self, model, n, flash, threads):
        self.context = Context(model, n + 64, 1, flash, threads)
        self.rows = [(t, i, 0, i == n - 1) for i, t in enumerate(tokens(n))]
        self.context.run(self.rows[:16])

    def sample(self):
        self.context.clear()
        start = time.perf_counter()
        self.context.run(self.rows)
        self.context.logits(len(self.rows) - 1)
        return len(self.rows) / (time.perf_counter() - start)


class Answers:
    """Steps of sequences that have so many tokens."""

    def __init__(self, model, at, many, flash, threads, unified):
        self.context = Context(model, (at + STEPS + 64) * many, many, flash, threads, unified=unified)
        self.at, self.many = at, many
        for sequence in range(many):
            self.context.run([(t, i, sequence, False) for i, t in enumerate(tokens(at))])

    def sample(self):
        memory = lib.llama_get_memory(self.context.handle)
        for sequence in range(self.many):
            lib.llama_memory_seq_rm(memory, sequence, self.at, -1)
        start = time.perf_counter()
        for step in range(STEPS):
            self.context.run([(100 + s, self.at + step, s, True) for s in range(self.many)])
            self.context.logits(self.many - 1)
        return self.many * STEPS / (time.perf_counter() - start)


def fastest(model, case, threads):
    """The case in the setting that is fastest, and its first sample."""
    kind, (at, _, many) = case[:2], case[2:].partition("x")
    at, many = int(at), int(many or 1)
    if kind == "pp":
        all = [Prompt(model, at, flash, threads) for flash in [False, True]]
    else:
        settings = [(flash, unified) for flash in [False, True] for unified in ([False, True] if many > 1 else [False])]
        all = [Answers(model, at, many, flash, threads, unified) for flash, unified in settings]
    samples = [max(each.sample(), each.sample()) for each in all]
    best = all[samples.index(max(samples))]
    for each in all:
        if each is not best:
            each.context.free()
    return best, max(samples)


def speed(path, threads=2):
    model, cases = load(path), {}
    print("ready", file=sys.stderr)
    for line in sys.stdin:
        case = line.strip()
        if case in cases:
            speed = cases[case].sample()
        else:
            cases[case], speed = fastest(model, case, int(threads))
        print(f"{speed:.3f}", flush=True)


def perplexity(path, pieces):
    model = load(path)
    asked = json.load(open(pieces))
    size, start = asked["context"], asked["start"]
    for name, cache in [("f16", None), ("q8_0", lib.GGML_TYPE_Q8_0), ("q4_0", lib.GGML_TYPE_Q4_0)]:
        context = Context(model, size, 1, True, 2, cache)
        losses = []
        first = size - size // 2 - 1
        for piece in asked["pieces"]:
            piece = [piece[0] if start is None else start] + piece[1:]
            context.clear()
            context.run([(t, i, 0, first <= i < size - 1) for i, t in enumerate(piece)])
            for i in range(first, size - 1):
                logits = context.logits(i).astype(np.float64)
                most = logits.max()
                losses.append(most + np.log(np.exp(logits - most).sum()) - logits[piece[i + 1]])
        context.free()
        print(f"llama.cpp, KV {name}: perplexity {np.exp(np.mean(losses)):.4f} over {len(losses)} tokens")
    for ours in asked["results"]:
        print(f"fir, KV {ours['kv']}: perplexity {ours['perplexity']:.4f} ± {ours['error']:.4f}")


def needle(path, prompts):
    model = load(path)
    asked = json.load(open(prompts))
    vocab = lib.llama_model_get_vocab(model)
    found = 0
    for each in asked[0]["each"]:
        prompt = each["prompt"]
        context = Context(model, len(prompt) + 64, 1, True, 2)
        for at in range(0, len(prompt), 2048):
            part = prompt[at : at + 2048]
            context.run([(t, at + i, 0, at + i == len(prompt) - 1) for i, t in enumerate(part)])
        said, row = b"", (len(prompt) - 1) % 2048
        for i in range(24):
            token = int(context.logits(row).argmax())
            if lib.llama_vocab_is_eog(vocab, token):
                break
            text = ctypes.create_string_buffer(64)
            length = lib.llama_token_to_piece(vocab, token, text, 64, 0, False)
            said += text.raw[: max(length, 0)]
            context.run([(token, len(prompt) + i, 0, True)])
            row = 0
        context.free()
        found += each["answer"].encode() in said
    print(f"llama.cpp: {found} of {len(asked[0]['each'])} found")
    for ours in asked:
        print(f"fir, KV {ours['kv']}: {ours['found']} of {ours['of']} found")


if __name__ == "__main__":
    {"speed": speed, "perplexity": perplexity, "needle": needle}[sys.argv[1]](*sys.argv[2:])
