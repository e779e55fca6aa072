"""PyTorch's side of `cargo xtask bench-cpu`: answers as `compared.rs --serve` does, on the same inputs."""

import json
import re
import sys
import time

import torch
import torch.nn.functional as F

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}


def block(seed):
    """65536 numbers in [-1, 1): a hash of their places."""
    mask = 0xFFFFFFFF
    h = (torch.arange(1 << 16) * 2654435761 + seed * 974711) & mask
    h = ((h ^ (h >> 15)) * 2246822519) & mask
    return ((h ^ (h >> 13)) >> 8).to(torch.float64) / 8388608 - 1


def filled(seed, dtype, shape, of=lambda x: x):
    numbers = of(block(seed)).to(torch.float32).to(dtype)
    count = torch.Size(shape).numel()
    return numbers.repeat(-(-count // (1 << 16)))[:count].view(shape)


def logits(size):
    return filled(1, torch.float32, (size["b"][0], size["v"][0]), lambda x: 20 * x**5)


def attention(size, dtype, batch, q_len, kv_len):
    heads, kv_heads = size["h"]
    dim = size["d"][0]

    def heads_first(seed, tokens, heads):
        return filled(seed, dtype, (batch, tokens, heads, dim)).transpose(1, 2).contiguous()

    q, k, v = heads_first(1, q_len, heads), heads_first(2, kv_len, kv_heads), heads_first(3, kv_len, kv_heads)
    causal = q_len > 1

    def run():
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=heads != kv_heads)

    return run, lambda out: out[-1, :, -1, :]


def prefill(size, dtype):
    return attention(size, dtype, 1, size["t"][0], size["t"][0])


def decode(size, dtype):
    return attention(size, dtype, size["b"][0], 1, size["kv"][0])


def gemm(size, dtype):
    n, k, m = (size[name][0] for name in "nkm")
    x, w = filled(1, dtype, (m, k)), filled(2, dtype, (n, k))
    return lambda: F.linear(x, w), lambda out: out[-1]


def packed_gemm(size, dtype):
    return gemm(size, dtype)


def block_gemm(size, dtype):
    """Torch has no such formats: the product in bf16, with weights of its own."""
    n, k, m = (size[name][0] for name in "nkm")
    x, w = filled(1, torch.bfloat16, (m, k)), filled(2, torch.bfloat16, (n, k))
    return lambda: F.linear(x, w), lambda out: torch.empty(0)


def scaled_gemm(size, dtype):
    """The product in bf16, weights dequantized before."""
    n, k, m = (size[name][0] for name in "nkm")
    x, w = filled(1, torch.bfloat16, (m, k)), filled(2, dtype, (n, k)).to(torch.float32)
    scales = filled(4, torch.float32, (-(-n // 128), -(-k // 128)))
    scales = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[:n, :k]
    w = (w * scales).to(torch.bfloat16)
    return lambda: F.linear(x, w), lambda out: out[-1]


def grouped_gemm(size, dtype):
    """Groups of equal size: a batched product."""
    g, n, k, m = (size[name][0] for name in "gnkm")
    x, w = filled(1, dtype, (g, m, k)), filled(2, dtype, (g, n, k)).transpose(1, 2)
    return lambda: torch.bmm(x, w), lambda out: out[-1, -1]


def moe_ffn(size, dtype):
    """Expert by expert, as models are written."""
    (experts, top_k), hidden, inter, tokens = size["e"], size["h"][0], size["i"][0], size["t"][0]
    x, weights = filled(1, dtype, (tokens, hidden)), filled(4, torch.float32, (tokens, top_k)).to(dtype)
    up, down = filled(2, dtype, (experts, 2 * inter, hidden)), filled(3, dtype, (experts, hidden, inter))
    ids = (torch.arange(tokens * top_k) % experts).view(tokens, top_k)

    def run():
        out = torch.zeros_like(x)
        for expert in range(experts):
            rows, slots = torch.where(ids == expert)
            if len(rows) == 0:
                continue
            gate, value = F.linear(x[rows], up[expert]).chunk(2, -1)
            y = F.linear(F.silu(gate) * value, down[expert])
            out.index_add_(0, rows, y * weights[rows, slots, None])
        return out

    return run, lambda out: out[-1]


def rms_norm(size, dtype):
    shape = (size["t"][0], size["h"][0])
    x, weight = filled(1, dtype, shape), filled(2, dtype, shape[1:])
    return lambda: F.rms_norm(x, shape[1:], weight, 1e-6), lambda out: out[-1]


def softmax(size, dtype):
    x = logits(size)
    return lambda: torch.softmax(x, -1), lambda out: out[-1]


def top_p(size, dtype):
    x = logits(size)

    def run():
        probs, places = torch.softmax(x, -1).sort(dim=-1, descending=True)
        probs[probs.cumsum(-1) - probs > 0.9] = 0
        return places.gather(-1, torch.multinomial(probs, 1))

    return run, lambda out: torch.empty(0)


# What torch has none of is left out: `mla`.
KINDS = {
    f.__name__: f
    for f in (prefill, decode, gemm, packed_gemm, block_gemm, scaled_gemm, grouped_gemm, moe_ffn, rms_norm, softmax, top_p)
}


def prepared(id):
    kind, dtype, sizes = id.split("/")
    if kind not in KINDS:
        return None
    pieces = (re.fullmatch(r"([a-z]+)([0-9x]+)", piece).groups() for piece in sizes.split("-"))
    return KINDS[kind]({name: [int(n) for n in numbers.split("x")] for name, numbers in pieces}, DTYPES.get(dtype))


def fastest(seconds, run):
    """Seconds of the fastest call, or of the fastest millisecond of calls."""
    begin, calls, least = time.perf_counter(), 1, float("inf")
    while time.perf_counter() - begin < seconds or least == float("inf"):
        start = time.perf_counter()
        for _ in range(calls):
            run()
        took = time.perf_counter() - start
        least = min(least, took / calls)
        if took < 1e-3:
            calls *= 2
    return least


def main():
    torch.manual_seed(1)
    torch.set_num_threads(int(sys.argv[1]))
    run = None
    with torch.inference_mode():
        for line in sys.stdin:
            command, argument = line.split()
            if command == "case":
                run = None
                case = prepared(argument)
                if case is None:
                    answer = {"error": "torch has no such operator"}
                else:
                    run, result = case
                    answer = {"result": result(run()).flatten()[:8].tolist()}
            else:
                answer = {"seconds": fastest(int(argument) / 1000, run)}
            print(json.dumps(answer), flush=True)


main()
