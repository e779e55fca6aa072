// lora.cuh: rows of tokens by the matrices of their low-rank adapters, one for each expert.
//
//   out[o] (+)= factors[p] * weights[a, e] . x[i]    pair p: e = experts[p], a = adapters[tokens[p]]; i, o: p or tokens[p]
//
// grid   (pairs, parts of the outputs)
// block  128: `width` threads to an output, a power of two that covers a row with one chunk each if it can
// needs  sm_80
//
// reads  tokens, experts, adapters, factors; x and the pair's matrix, once for each part
// writes out: rows of pairs at once, rows of tokens by atomic additions. Pairs of a token, expert or adapter that there is not
//        write nothing.
// twins  src/cpu/lora.rs, src/reference/lora.rs
#pragma once
#include <fir/base/math.cuh>
#include <fir/base/reduce.cuh>
#include <fir/base/vec.cuh>

namespace fir {

struct AdaptParams {
  const void* x;
  const void* weights;
  const void* tokens;
  const void* experts;
  const void* adapters;
  const float* factors;  // none: 1
  void* out;
  u64 x_stride, out_stride;
  u64 adapter_stride, expert_stride, row_stride;
  u64 tokens_stride, experts_stride, adapters_stride, factors_stride;
  u32 wide;              // which of tokens, experts and adapters are i64: bits 0 to 2
  u32 num_tokens, num_experts, num_adapters;
  u32 inputs, outputs;
  u32 per_block, width;  // outputs of a block, threads to an output
  u32 x_by_token, out_by_token;
  u32 add, out_type;     // 0: f32, else T
};

__device__ __forceinline__ i64 load_id(const void* ids, u64 at, bool wide) {
  return wide ? static_cast<const i64*>(ids)[at] : static_cast<const i32*>(ids)[at];
}

template <class T, bool kVector>
__global__ void __launch_bounds__(128) adapt(const __grid_constant__ AdaptParams p) {
  constexpr int kL = kLanes<T>;
  wait_for_previous();
  const u32 pair = blockIdx.x, lane = threadIdx.x & (p.width - 1), groups = 128 / p.width;
  const i64 token = load_id(p.tokens, pair * p.tokens_stride, p.wide & 1);
  if (token < 0 || token >= i64(p.num_tokens)) return;
  const i64 expert = load_id(p.experts, pair * p.experts_stride, p.wide & 2);
  const i64 adapter = load_id(p.adapters, u64(token) * p.adapters_stride, p.wide & 4);
  if (adapter < 0 || adapter >= i64(p.num_adapters) || expert < 0 || expert >= i64(p.num_experts)) return;
  const T* x = static_cast<const T*>(p.x) + (p.x_by_token ? u64(token) : u64(pair)) * p.x_stride;
  const T* w = static_cast<const T*>(p.weights) + u64(adapter) * p.adapter_stride + u64(expert) * p.expert_stride;
  const u64 row = (p.out_by_token ? u64(token) : u64(pair)) * p.out_stride;
  const float factor = p.factors ? p.factors[pair * p.factors_stride] : 1.f;
  const u32 first = blockIdx.y * p.per_block, end = min(first + p.per_block, p.outputs);
  // All groups of a warp go as far, for the sums over its lanes.
  for (u32 base = first; base < end; base += groups) {
    const u32 j = base + threadIdx.x / p.width;
    float sum = 0.f;
    if (j < end) {
      const T* own = w + j * p.row_stride;
      for (u32 at = lane * kL; at < p.inputs; at += p.width * kL) {
        float a[kL], b[kL];
        widen<T>(load_chunk<kVector>(own, at, p.inputs), a);
        widen<T>(load_chunk<kVector>(x, at, p.inputs), b);
#pragma unroll
        for (int i = 0; i < kL; ++i) sum = fmaf(a[i], b[i], sum);
      }
    }
    sum = warp_sum(sum, p.width) * factor;
    if (lane != 0 || j >= end) continue;
    if (p.out_by_token) {
      atomicAdd(static_cast<float*>(p.out) + row + j, sum);
    } else if (p.out_type == 0) {
      float* out = static_cast<float*>(p.out) + row + j;
      *out = p.add ? *out + sum : sum;
    } else {
      T* out = static_cast<T*>(p.out) + row + j;
      *out = from_float<T>(p.add ? to_float(*out) + sum : sum);
    }
  }
}

}  // namespace fir
