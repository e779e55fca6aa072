"""Makes gguf/ beside it: tiny GGUF files whose weights are in every block format, and the logits of plain numpy.

    python3 -m venv V && V/bin/pip install gguf numpy safetensors && V/bin/python make_gguf.py

Weights are random: those of formats that `gguf` can write are quantized by it, blocks of the others are random bytes with
plausible scales. Both are read back by `gguf`'s own dequantization, and the forward is done with that in f64, twice: as it
is, and with what the engine rounds (activations to 8 bits before a product, and what lies between products to bf16).
"""

import pathlib

import numpy as np
from gguf import GGMLQuantizationType as Q
from gguf import GGML_QUANT_SIZES, GGUFWriter, TokenType, dequantize, quantize
from safetensors.numpy import save_file

HERE = pathlib.Path(__file__).parent / "gguf"
VOCAB, HIDDEN, HEADS, KV, DIM, INNER, CONTEXT, EPS = 96, 256, 4, 2, 64, 256, 2048, 1e-5
WRITTEN = [Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.Q8_0]
# Bytes of a block at which its f16 scales stand.
SCALES = {Q.Q2_K: [80, 82], Q.Q3_K: [108], Q.Q4_K: [0, 2], Q.Q5_K: [0, 2], Q.Q6_K: [208], Q.IQ4_XS: [0]}
# What a format's values are on average, for a scale of 1.
SIZES = {Q.Q2_K: 12, Q.Q3_K: 40, Q.Q4_K: 240, Q.Q5_K: 480, Q.Q6_K: 1200, Q.IQ4_XS: 1000}
# Of each layer: q, k, v, output, gate, up, down.
FORMATS = [
    [Q.Q4_K, Q.Q5_0, Q.Q6_K, Q.Q8_0, Q.Q4_0, Q.Q4_1, Q.Q5_K],
    [Q.Q5_1, Q.Q3_K, Q.Q8_0, Q.Q2_K, Q.IQ4_XS, Q.Q4_K, Q.Q6_K],
]
PARTS = ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"]


def blocks(rng, kind, shape):
    """The bytes of a matrix in a format, values of about 1 / sqrt(k)."""
    if kind in WRITTEN:
        return quantize((rng.standard_normal(shape) / shape[1] ** 0.5).astype(np.float32), kind)
    elements, size = GGML_QUANT_SIZES[kind]
    data = rng.integers(0, 256, (shape[0], shape[1] // elements, size), dtype=np.uint8)
    for at in SCALES[kind]:
        scale = np.full(data.shape[:2], 1 / (SIZES[kind] * shape[1] ** 0.5)) * rng.uniform(0.5, 1.5, data.shape[:2])
        if at == SCALES[kind][-1] and len(SCALES[kind]) > 1:
            # Minima as large as the values' middle, so that they are of both signs.
            scale *= {Q.Q2_K: 1.5, Q.Q4_K: 7.5, Q.Q5_K: 15.5}[kind]
        data[:, :, at : at + 2] = scale.astype(np.float16)[..., None].view(np.uint8)
    return data.reshape(shape[0], -1)


def norm(x, w):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * w


def rotate(x, theta, neighbours):
    half = x.shape[-1] // 2
    angle = np.arange(x.shape[0])[:, None] * theta ** (-np.arange(half) / half)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    a, b = (x[..., ::2], x[..., 1::2]) if neighbours else (x[..., :half], x[..., half:])
    a, b = a * cos - b * sin, b * cos + a * sin
    return np.stack([a, b], -1).reshape(x.shape) if neighbours else np.concatenate([a, b], -1)


def short(x):
    """To bf16 and back, ties to even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return bits.astype(np.uint32).view(np.float32).astype(np.float64)


def bytes_of(x):
    """Each 256 elements of a row to 8 bits."""
    parts = x.reshape(*x.shape[:-1], -1, 256)
    scale = np.float64(np.float32(abs(parts).max(-1, keepdims=True)) / np.float32(127))
    return (np.rint(parts / scale) * scale).reshape(x.shape)


def forward(arch, w, tokens, rounds):
    narrow, codes = (short, bytes_of) if rounds else (lambda x: x, lambda x: x)
    gemma = arch == "gemma3"
    n = len(tokens)
    h = w["token_embd.weight"][tokens] * (HIDDEN**0.5 if gemma else 1)
    for i in range(len(FORMATS)):
        get = lambda part: w.get(f"blk.{i}.{part}")
        lin = lambda x, part: codes(x) @ get(part + ".weight").T + (get(part + ".bias") if get(part + ".bias") is not None else 0)
        x = norm(h, get("attn_norm.weight"))
        q, k, v = (narrow(lin(x, p)).reshape(n, -1, DIM) for p in PARTS[:3])
        if gemma:
            q, k = narrow(norm(q, get("attn_q_norm.weight"))), narrow(norm(k, get("attn_k_norm.weight")))
        theta = 1e4 if gemma else 1e5
        q, k = narrow(rotate(q, theta, arch == "llama")), rotate(k, theta, arch == "llama")
        seen = np.tril(np.ones((n, n), bool))
        if gemma:
            seen &= ~np.tril(seen, -WINDOW)
        o = np.zeros((n, HEADS, DIM))
        for head in range(HEADS):
            s = q[:, head] @ k[:, head * KV // HEADS].T / DIM**0.5
            s = np.exp(np.where(seen, s, -np.inf) - np.where(seen, s, -np.inf).max(-1, keepdims=True))
            o[:, head] = s / s.sum(-1, keepdims=True) @ v[:, head * KV // HEADS]
        y = lin(narrow(o.reshape(n, -1)), "attn_output")
        h = h + (norm(y, get("post_attention_norm.weight")) if gemma else y)
        x = norm(h, get("ffn_norm.weight"))
        g, u = narrow(lin(x, "ffn_gate")), narrow(lin(x, "ffn_up"))
        g = 0.5 * g * (1 + np.tanh((2 / np.pi) ** 0.5 * (g + 0.044715 * g**3))) if gemma else g / (1 + np.exp(-g))
        y = lin(narrow(g * u), "ffn_down")
        h = h + (norm(y, get("post_ffw_norm.weight")) if gemma else y)
    return codes(norm(h, w["output_norm.weight"])) @ w.get("output.weight", w["token_embd.weight"]).T


WINDOW = 16


def make(arch):
    rng = np.random.default_rng(sum(map(ord, arch)))
    path = HERE / f"{arch}.gguf"
    out = GGUFWriter(path, arch)
    out.add_block_count(len(FORMATS))
    out.add_context_length(CONTEXT)
    out.add_embedding_length(HIDDEN)
    out.add_feed_forward_length(INNER)
    out.add_head_count(HEADS)
    out.add_head_count_kv(KV)
    out.add_key_length(DIM)
    out.add_value_length(DIM)
    out.add_layer_norm_rms_eps(EPS)
    out.add_rope_freq_base(1e6 if arch == "gemma3" else 1e5)
    if arch == "gemma3":
        out.add_sliding_window(WINDOW)
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("gpt-2")
    # Two marks, 93 bytes and a pair of them.
    out.add_token_list(["<s>", "</s>"] + [chr(c) for c in range(33, 126)] + ["ab"])
    out.add_token_types([TokenType.CONTROL] * 2 + [TokenType.NORMAL] * 94)
    out.add_token_merges(["a b"])
    out.add_bos_token_id(0)
    out.add_eos_token_id(1)
    weights = {}

    def plain(name, value):
        value = value.astype(np.float32)
        out.add_tensor(name, value)
        weights[name] = value.astype(np.float64)

    def packed(name, kind, shape):
        data = blocks(rng, kind, shape)
        out.add_tensor(name, data, raw_dtype=kind)
        weights[name] = dequantize(data, kind).astype(np.float64).reshape(shape)

    gain = lambda n: 1 + 0.2 * rng.standard_normal(n)
    packed("token_embd.weight", Q.Q8_0, (VOCAB, HIDDEN))
    if arch == "qwen2":
        packed("output.weight", Q.Q3_K, (VOCAB, HIDDEN))
    plain("output_norm.weight", gain(HIDDEN))
    shapes = [(HEADS * DIM, HIDDEN), (KV * DIM, HIDDEN), (KV * DIM, HIDDEN), (HIDDEN, HEADS * DIM)]
    shapes += [(INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER)]
    for i, formats in enumerate(FORMATS):
        for part, kind, shape in zip(PARTS, formats, shapes):
            packed(f"blk.{i}.{part}.weight", kind, shape)
            if arch == "qwen2" and part in PARTS[:3]:
                plain(f"blk.{i}.{part}.bias", 0.3 * rng.standard_normal(shape[0]))
        norms = ["attn_norm", "ffn_norm"] + (["post_attention_norm", "post_ffw_norm"] if arch == "gemma3" else [])
        for name in norms:
            plain(f"blk.{i}.{name}.weight", gain(HIDDEN))
        if arch == "gemma3":
            plain(f"blk.{i}.attn_q_norm.weight", gain(DIM))
            plain(f"blk.{i}.attn_k_norm.weight", gain(DIM))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    tokens = rng.integers(2, VOCAB, 48)
    logits, rounded = (forward(arch, weights, tokens, rounds) for rounds in [False, True])
    values = {"logits": logits, "rounded": rounded}
    values = {name: np.ascontiguousarray(value, np.float32) for name, value in values.items()}
    save_file(values | {"tokens": tokens.astype(np.int32)}, HERE / f"{arch}.golden")
    error = ((logits - rounded) ** 2).mean() ** 0.5
    print(f"{arch}: {path.stat().st_size} bytes, logits of {logits.std():.3f}, off by {error / logits.std():.2%} if rounded")
    assert path.stat().st_size < 1_000_000


if __name__ == "__main__":
    HERE.mkdir(exist_ok=True)
    for arch in ["llama", "qwen2", "gemma3"]:
        make(arch)
