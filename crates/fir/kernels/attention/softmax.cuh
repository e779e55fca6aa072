// softmax.cuh: the running softmax of a warp's 16 rows, in base 2, on mma accumulators.
//
//   m = max_j s_j        d = sum_j 2^(s_j - m)        o = sum_j 2^(s_j - m) v_j
//
// Lane l holds columns of rows l / 4 and l / 4 + 8 (mma.cuh); `m` is the row's, `d` only this lane's share until
// `row_sum`. A row that has seen nothing has m = -inf, d = 0.
#pragma once
#include <fir/base/math.cuh>
#include <fir/base/mma.cuh>

namespace fir {

constexpr float kLog2e = 1.44269504088896340736f;
constexpr float kLn2 = 0.69314718055994530942f;

__device__ __forceinline__ float neg_inf() { return __int_as_float(0xff800000); }

/// 2^(a - b), with 0 for a = -inf whatever b is.
__device__ __forceinline__ float exp2_diff(float a, float b) { return exp2_fast(a - (b == neg_inf() ? 0.0f : b)); }

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

struct RunningSoftmax {
  float m[2], d[2];

  __device__ __forceinline__ void reset() {
    m[0] = m[1] = neg_inf();
    d[0] = d[1] = 0.0f;
  }

  /// Turns logits (times log2 e; -inf where masked) into weights, and rescales `o` when a maximum has grown. After
  /// the first tiles it rarely has, and then the warp skips the products by 1.
  template <int kTiles, int kOut>
  __device__ __forceinline__ void step(float (&s)[kTiles][4], float (&o)[kOut][4]) {
    float next[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float x = fmaxf(s[0][2 * h], s[0][2 * h + 1]);
#pragma unroll
      for (int t = 1; t < kTiles; ++t) x = fmaxf(x, fmaxf(s[t][2 * h], s[t][2 * h + 1]));
      next[h] = fmaxf(m[h], quad_max(x));
    }
    if (__any_sync(~0u, next[0] != m[0] || next[1] != m[1])) {
      float a[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        a[h] = exp2_diff(m[h], next[h]);
        d[h] *= a[h];
        m[h] = next[h];
      }
#pragma unroll
      for (int t = 0; t < kOut; ++t) {
        o[t][0] *= a[0], o[t][1] *= a[0], o[t][2] *= a[1], o[t][3] *= a[1];
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float base = m[h] == neg_inf() ? 0.0f : m[h];
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        s[t][2 * h] = exp2_fast(s[t][2 * h] - base);
        s[t][2 * h + 1] = exp2_fast(s[t][2 * h + 1] - base);
        d[h] += s[t][2 * h] + s[t][2 * h + 1];
      }
    }
  }

  __device__ __forceinline__ float row_sum(int h) const { return quad_sum(d[h]); }
};

}  // namespace fir
