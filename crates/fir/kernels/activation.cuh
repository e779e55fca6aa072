// activation.cuh: gated activations.
//
//   out[r, i] = act(x[r, i]) * x[r, d + i]
//
// grid   (row blocks) * parts: a row of more than blockDim.x chunks is cut into parts
// block  256: `width` threads per row, a power of two, 256 / width rows
// needs  sm_80
//
// reads  x, each element once
// writes out, each element once; nothing between its rows
// twins  src/cpu/activation.rs, src/reference/activation.rs
#pragma once
#include <fir/base/math.cuh>
#include <fir/base/vec.cuh>

namespace fir {

struct ActivationParams {
  const void* x;
  void* out;
  u32 rows;
  u32 inner;  // rows of the second axis; >= rows when all are evenly apart
  u64 x_outer, x_stride;
  u64 out_outer, out_stride;
  u32 d;
  u32 width;    // threads per row and part
  u32 parts;    // blocks per row
  u32 unused;
};

struct Silu {
  static __device__ __forceinline__ float apply(float x) { return x * sigmoid(x); }
};
// 1 + erf z = erfc(-z), which does not cancel for negative z.
struct Gelu {
  static __device__ __forceinline__ float apply(float x) { return x * 0.5f * erfcf(x * -0.70710678f); }
};
// (1 + tanh u) / 2 = sigmoid(2u), which does not cancel for negative u. 1.5957692 = 2 sqrt(2 / pi).
struct GeluTanh {
  static __device__ __forceinline__ float apply(float x) {
    return x * sigmoid(x * fmaf(x * x, 0.044715f * 1.5957692f, 1.5957692f));
  }
};

// kVector: both halves and out are aligned for vectors. A thread has one chunk of each half under way: two or four are no
// faster (8192 x 8192 bf16 on an H200: 100.3 us, 99.6, 100.0; 4096 x 4096: 29.9, 30.6, 30.4).
template <class T, class Act, bool kVector>
__global__ void __launch_bounds__(256) act_and_mul(const __grid_constant__ ActivationParams p) {
  constexpr int kL = kLanes<T>;
  const u32 log_width = 31 - __clz(p.width), per_block = blockDim.x >> log_width;
  const u32 at = (blockIdx.x % p.parts * p.width + (threadIdx.x & (p.width - 1))) * kL;
  wait_for_previous();
  for (u64 first = u64(blockIdx.x / p.parts) * per_block; first < p.rows; first += u64(gridDim.x / p.parts) * per_block) {
    const u64 r = first + (threadIdx.x >> log_width);
    if (r >= p.rows) break;
    const T* gate = static_cast<const T*>(p.x) + row_offset(u32(r), p.rows, p.inner, p.x_outer, p.x_stride);
    T* out = static_cast<T*>(p.out) + row_offset(u32(r), p.rows, p.inner, p.out_outer, p.out_stride);
    Chunk g = {}, u = {};
    if (at < p.d) {
      g = load_chunk<kVector>(gate, at, p.d);
      u = load_chunk<kVector>(gate + p.d, at, p.d);
    }
    start_next();
    if (at >= p.d) continue;
    float a[kL], b[kL];
    widen<T>(g, a);
    widen<T>(u, b);
#pragma unroll
    for (int i = 0; i < kL; ++i) a[i] = Act::apply(a[i]) * b[i];
    store_elements<kVector>(out, at, p.d, a);
  }
}

}  // namespace fir
