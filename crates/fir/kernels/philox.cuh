// philox.cuh: the random numbers of src/philox.rs, bit for bit: Philox4x32-10.
//
//   counter = (draw / 4, stream, offset low, offset high), key = (seed low, seed high)
//   uniform = (word[draw % 4] >> 8) / 2^24
//
// twins  src/philox.rs
#pragma once
#include <fir/base/types.cuh>

namespace fir {

struct RngState {
  u64 seed, offset;
};

// `PerRow<RngState>`: with `per_row`, row `r` draws from stream 0 of `states[r]`; else from stream `r` of the one state,
// which is `states[0]` if given (so that a replayed graph can be moved on) and else `one`.
struct Rng {
  const RngState* states;
  RngState one;
  i32 per_row;
  i32 unused;
};

__device__ __forceinline__ float philox_uniform(RngState s, u32 stream, u32 draw) {
  u32 c0 = draw / 4, c1 = stream, c2 = u32(s.offset), c3 = u32(s.offset >> 32);
  u32 k0 = u32(s.seed), k1 = u32(s.seed >> 32);
#pragma unroll
  for (int i = 0; i < 10; ++i) {
    const u32 ah = __umulhi(c0, 0xd2511f53u), al = c0 * 0xd2511f53u;
    const u32 bh = __umulhi(c2, 0xcd9e8d57u), bl = c2 * 0xcd9e8d57u;
    c0 = bh ^ c1 ^ k0;
    c1 = bl;
    c2 = ah ^ c3 ^ k1;
    c3 = al;
    k0 += 0x9e3779b9u;
    k1 += 0xbb67ae85u;
  }
  const u32 word = draw % 4 == 0 ? c0 : draw % 4 == 1 ? c1 : draw % 4 == 2 ? c2 : c3;
  return float(word >> 8) * (1.0f / 16777216.0f);
}

// Draw number `draw` of output row `row`.
__device__ __forceinline__ float uniform(const Rng& rng, u32 row, u32 draw) {
  const RngState s = rng.states ? rng.states[rng.per_row ? row : 0] : rng.one;
  return philox_uniform(s, rng.per_row ? 0 : row, draw);
}

}  // namespace fir
