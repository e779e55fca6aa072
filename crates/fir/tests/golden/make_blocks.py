"""Writes blocks.safetensors: random GGUF blocks of every format and what the `gguf` package dequantizes them to.

    pip install gguf==0.19.0 numpy==2.4.6
    python make_blocks.py
"""

import json
import pathlib

import gguf
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

# Where a block holds f16 numbers; all its other bytes may have any value.
HALVES = {
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q8_0": [0],
    "Q2_K": [80, 82],
    "Q3_K": [108],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
    "IQ4_XS": [0],
}


def halves(rng, n):
    """Ordinary, then: zero, negative zero, least subnormal, a negative subnormal, largest, its negative, negative."""
    x = (rng.standard_normal(n) * 0.02).astype(np.float16)
    special = np.array([0x0000, 0x8000, 0x0001, 0x83FF, 0x7BFF, 0xFBFF, 0xA0B1], dtype=np.uint16).view(np.float16)
    x[1 : 1 + len(special)] = special
    return x


def main():
    rng = np.random.default_rng(20)
    header, chunks, at = {}, [], 0
    for name, offsets in HALVES.items():
        elements, size = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
        n = 12 if elements == 256 else 40
        blocks = rng.integers(0, 256, (n, size), dtype=np.uint8)
        blocks[n - 2], blocks[n - 1] = 0, 255
        for i, offset in enumerate(offsets):
            # The second number's special values stand beside ordinary first ones.
            blocks[:, offset : offset + 2] = np.roll(halves(rng, n)[:, None].view(np.uint8), -2 * i, axis=0)
        values = gguf.dequantize(blocks, GGMLQuantizationType[name])
        assert np.isfinite(values).all() and values.shape == (n, elements) and values.dtype == np.float32
        for what, dtype, data in [("blocks", "U8", blocks), ("values", "F32", values)]:
            data = np.ascontiguousarray(data)
            header[f"{name}.{what}"] = {
                "dtype": dtype,
                "shape": list(data.shape),
                "data_offsets": [at, at + data.nbytes],
            }
            chunks.append(data.tobytes())
            at += data.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path = pathlib.Path(__file__).with_name("blocks.safetensors")
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(chunks))


main()
