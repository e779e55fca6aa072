// merge.cuh: merging attention states (o, lse).
//
//   lse = log2 sum_i 2^lse_i        o = sum_i 2^(lse_i - lse) o_i        nothing seen: o = 0, lse = -inf
//
// grid   (ceil(tokens * heads / blockDim.y))   a row each thread row; columns kVec at a time
// block  (a power of two <= 32, rows)         256 in all; a row's threads are in one warp
// smem   none
// needs  sm_80
//
// reads  o, lse of every state, an o of weight 0 not used (it may be NaN); in place: only where `mask` is set
// writes out, lse_out
// twins  src/ops/attention/merge.rs, src/cpu/attention/merge.rs
#pragma once
#include <fir/attention/number.cuh>
#include <fir/attention/softmax.cuh>

namespace fir {

/// `states` states at a distance of `o_state` bytes and `lse_state` elements; strides of tokens and heads likewise.
struct StatesRef {
  const unsigned char* o;
  const float* lse;
  long long o_token, o_head, o_state, lse_token, lse_head, lse_state;
};

struct MergeParams {
  /// All states; or the first and the second of two.
  StatesRef a, b;
  unsigned char* out;
  float* lse_out;
  long long out_token, out_head, lse_out_token, lse_out_head;
  /// A byte per token, rows with 0 stay as they are; null: all.
  const unsigned char* mask;
  unsigned tokens, heads, states, dim;
};

template <class T, int kVec>
__device__ __forceinline__ void load_vec(const unsigned char* p, float (&x)[kVec]) {
  if constexpr (kVec == 1) {
    x[0] = load_one<T>(p, 0);
  } else if constexpr (Same<T, F32>::value) {
    const float4 v = *reinterpret_cast<const float4*>(p);
    x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
  } else {
    load_some<T>(p, x);
  }
}

template <class T, int kVec>
__device__ __forceinline__ void store_vec(unsigned char* p, const float (&x)[kVec]) {
  if constexpr (Same<T, F32>::value) {
    if constexpr (kVec == 1) *reinterpret_cast<float*>(p) = x[0];
    else *reinterpret_cast<float4*>(p) = make_float4(x[0], x[1], x[2], x[3]);
  } else if constexpr (kVec == 1) {
    *reinterpret_cast<unsigned short*>(p) = static_cast<unsigned short>(pack2<T>(x[0], 0.0f));
  } else {
    *reinterpret_cast<uint4*>(p) =
        make_uint4(pack2<T>(x[0], x[1]), pack2<T>(x[2], x[3]), pack2<T>(x[4], x[5]), pack2<T>(x[6], x[7]));
  }
}

/// `kTwo`: of `a` and `b` (out may be a's); else of all `states` of `a`. kVec: 16 bytes' worth, or 1 where rows are
/// not 16-byte aligned.
template <class T, int kVec, bool kTwo>
__global__ void __launch_bounds__(256) merge_states(const __grid_constant__ MergeParams p) {
  const unsigned row = blockIdx.x * blockDim.y + threadIdx.y;
  const unsigned token = min(row, p.tokens * p.heads - 1) / p.heads, head = row % p.heads;
  const bool mine = row < p.tokens * p.heads && (p.mask == nullptr || p.mask[token] != 0);
  const unsigned states = kTwo ? 2 : p.states;
  const unsigned char* o_a = p.a.o + token * p.a.o_token + head * p.a.o_head;
  const float* lse_a = p.a.lse + token * p.a.lse_token + head * p.a.lse_head;
  const unsigned char* o_b = kTwo ? p.b.o + token * p.b.o_token + head * p.b.o_head : nullptr;
  const float* lse_b = kTwo ? p.b.lse + token * p.b.lse_token + head * p.b.lse_head : nullptr;
  float two[2] = {};
  if constexpr (kTwo) {
    // In place lse_out is lse_a: all threads of a row have read it before one writes it.
    if (mine) two[0] = *lse_a, two[1] = *lse_b;
    __syncwarp();
  }
  if (!mine) return;
  auto lse = [&](unsigned i) { return kTwo ? (i == 0 ? two[0] : two[1]) : lse_a[i * p.a.lse_state]; };
  auto part = [&](unsigned i) { return kTwo ? (i == 0 ? o_a : o_b) : o_a + i * p.a.o_state; };

  float m = neg_inf(), d = 0.0f;
#pragma unroll 4
  for (unsigned i = 0; i < states; ++i) m = fmaxf(m, lse(i));
#pragma unroll 4
  for (unsigned i = 0; i < states; ++i) d += exp2_diff(lse(i), m);
  const float scale = d == 0.0f ? 0.0f : 1.0f / d;
  for (unsigned column = threadIdx.x * kVec; column < p.dim; column += blockDim.x * kVec) {
    float sum[kVec];
#pragma unroll
    for (int j = 0; j < kVec; ++j) sum[j] = 0.0f;
#pragma unroll 4
    for (unsigned i = 0; i < states; ++i) {
      const float f = exp2_diff(lse(i), m);
      float x[kVec];
      load_vec<T>(part(i) + column * (T::kBits / 8), x);
#pragma unroll
      for (int j = 0; j < kVec; ++j) sum[j] += f == 0.0f ? 0.0f : f * x[j];
    }
#pragma unroll
    for (int j = 0; j < kVec; ++j) sum[j] *= scale;
    store_vec<T>(p.out + token * p.out_token + head * p.out_head + column * (T::kBits / 8), sum);
  }
  if (threadIdx.x == 0) p.lse_out[token * p.lse_out_token + head * p.lse_out_head] = d == 0.0f ? neg_inf() : m + log2f(d);
}

}  // namespace fir
