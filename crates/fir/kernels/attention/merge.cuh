// merge.cuh: merging attention states (o, lse).
//
//   lse = log2 sum_i 2^lse_i        o = sum_i 2^(lse_i - lse) o_i        nothing seen: o = 0, lse = -inf
//
// grid   blocks of rows (a row is a token and a head), as many as there are, then again from the first
// block  256: `width` threads per row, a power of two up to 32, so a row's threads are in one warp
// smem   none
// needs  sm_80
//
// reads  o, lse of every state; an o of weight 0 does not count, whatever it holds. In place: only where `mask` is set
// writes out, lse_out; they may be those of the first of two states
// twins  src/cpu/attention/merge.rs, src/reference/attention/merge.rs
#pragma once
#include <fir/base/math.cuh>
#include <fir/base/vec.cuh>

namespace fir {

// Strides in elements. The states of a row: `states` of them at `a`, or one at `a` and one at `b`.
struct MergeParams {
  const void* o_a;
  const void* o_b;
  const float* lse_a;
  const float* lse_b;
  void* out;
  float* lse_out;
  const u8* mask;  // a byte per token: rows with 0 stay as they are; null: all
  u64 o_a_token, o_a_head, o_a_state, lse_a_token, lse_a_head, lse_a_state;
  u64 o_b_token, o_b_head, lse_b_token, lse_b_head;
  u64 out_token, out_head, lse_out_token, lse_out_head;
  u64 mask_stride;
  u32 tokens, heads, states, dim;
  u32 width, unused;
};

// Weight of a state at the maximum m, which is -inf if every state is empty.
__device__ __forceinline__ float weight_of(float lse, float m) {
  return exp2f(m == float_of(0xff800000u) ? lse : lse - m);
}

// kTwo: of `a` and `b`; else of all `states` of `a`. kVector: rows on 16 bytes.
template <class T, bool kTwo, bool kVector>
__global__ void __launch_bounds__(256) merge_states(const __grid_constant__ MergeParams p) {
  constexpr u32 kL = kLanes<T>;
  const u32 lane = threadIdx.x & (p.width - 1), per_block = 256 / p.width;
  const u64 rows = u64(p.tokens) * p.heads;
  wait_for_previous();
  for (u64 first = u64(blockIdx.x) * per_block; first < rows; first += u64(gridDim.x) * per_block) {
    const u64 own = first + threadIdx.x / p.width, row = own < rows ? own : rows - 1;
    const u32 token = u32(row / p.heads), head = u32(row % p.heads);
    const bool mine = own < rows && (!p.mask || p.mask[token * p.mask_stride] != 0);
    const T* o_a = static_cast<const T*>(p.o_a) + token * p.o_a_token + head * p.o_a_head;
    const T* o_b = kTwo ? static_cast<const T*>(p.o_b) + token * p.o_b_token + head * p.o_b_head : nullptr;
    const float* lse_a = p.lse_a + token * p.lse_a_token + head * p.lse_a_head;
    float two[2] = {};
    if constexpr (kTwo) {
      two[0] = *lse_a;
      two[1] = p.lse_b[token * p.lse_b_token + head * p.lse_b_head];
      // In place lse_out is lse_a: all threads of a row have read it before one writes it.
      __syncwarp();
    }
    start_next();
    if (!mine) continue;
    const u32 states = kTwo ? 2 : p.states;
    auto lse = [&](u32 i) { return kTwo ? (i == 0 ? two[0] : two[1]) : lse_a[i * p.lse_a_state]; };
    float m = float_of(0xff800000u), d = 0.f;
#pragma unroll 4
    for (u32 i = 0; i < states; ++i) m = fmaxf(m, lse(i));
#pragma unroll 4
    for (u32 i = 0; i < states; ++i) d += weight_of(lse(i), m);
    const float inverse = d == 0.f ? 0.f : __fdiv_rn(1.f, d);
    T* out = static_cast<T*>(p.out) + token * p.out_token + head * p.out_head;
    for (u32 at = lane * kL; at < p.dim; at += p.width * kL) {
      float sum[kL] = {};
#pragma unroll 4
      for (u32 i = 0; i < states; ++i) {
        const T* o = kTwo ? (i == 0 ? o_a : o_b) : o_a + i * p.o_a_state;
        float x[kL];
        widen<T>(load_chunk<kVector>(o, at, p.dim), x);
        const float w = weight_of(lse(i), m);
#pragma unroll
        for (u32 j = 0; j < kL; ++j) sum[j] = w == 0.f ? sum[j] : fmaf(w, x[j], sum[j]);
      }
#pragma unroll
      for (u32 j = 0; j < kL; ++j) sum[j] *= inverse;
      store_elements<kVector>(out, at, p.dim, sum);
    }
    if (lane == 0) p.lse_out[token * p.lse_out_token + head * p.lse_out_head] = m + log2f(d);
  }
}

}  // namespace fir
