// gemm_any.cuh: products of any two types with scales of any blocks, in f32 arithmetic.
//
//   out[i, j] = then(sum_l (x[i, l] * x_scale) * (w[j, l] * w_scale))
//
// For f32, which no tensor core multiplies without rounding it, for operands of two types, and for scales of blocks
// that gemm.cuh does not take. An output is one chain of fused multiply-adds along k in both tiles.
//
// grid   as gemm.cuh
// block  256: kRows / 16 x 4 outputs to a thread
// smem   static, 16 columns of both operands in f32
// needs  sm_80
//
// reads  x, w, scales, bias; out where it is added to
// writes out, rows of the tile's group alone
// twins  src/cpu/gemm/mod.rs, src/cpu/gemm/scaled.rs, src/reference/gemm/scaled.rs
#pragma once
#include <fir/gemm_common.cuh>

namespace fir {

template <int kRows, bool kGate>
__global__ void __launch_bounds__(256) gemm_any(const __grid_constant__ GemmParams p) {
  constexpr int kColumns = 64, kDepth = 16, kThreads = 256, kHigh = kRows / 16;
  __shared__ float xs[kDepth][kRows + 1], ws[kDepth][kColumns + 4];
  __shared__ u32 x_rows[kRows], w_rows[kColumns];
  wait_for_previous();
  const Place place = find_place<kRows, kGate ? kColumns / 2 : kColumns>(p, blockIdx.x, blockIdx.y);
  if (place.first >= place.end) return;
  // A thread's four columns lie together; with a gate two of them are gates and two what they multiply.
  list_rows<kRows, kColumns, kGate, 4, kThreads>(p, place, x_rows, w_rows);
  __syncthreads();
  const u32 across = threadIdx.x % 16, down = threadIdx.x / 16;
  const u64 x_at = blockIdx.y * p.x_batch, w_at = place.weight * p.w_batch;
  float acc[kHigh][4] = {};
  for (u32 k0 = 0; k0 < p.k; k0 += kDepth) {
    const u32 column = k0 + threadIdx.x % kDepth;
#pragma unroll
    for (u32 i = 0; i < kRows / 16; ++i) {
      const u32 row = threadIdx.x / kDepth + 16 * i, r = x_rows[row];
      float v = 0.f;
      if (r != kNone && column < p.k) {
        v = load_any(p.x, x_at + r * p.x_stride + column, p.x_type);
        if (p.x_scales) v *= x_scale(p, place.batch, r, column);
      }
      xs[column - k0][row] = v;
    }
#pragma unroll
    for (u32 i = 0; i < kColumns / 16; ++i) {
      const u32 row = threadIdx.x / kDepth + 16 * i, r = w_rows[row];
      float v = 0.f;
      if (r != kNone && column < p.k) {
        v = load_any(p.w, w_at + r * p.w_stride + column, p.w_type);
        if (p.w_scales) v *= w_scale(p, place.weight, r, column);
      }
      ws[column - k0][row] = v;
    }
    __syncthreads();
#pragma unroll
    for (int l = 0; l < kDepth; ++l) {
      const float4 b = *reinterpret_cast<const float4*>(&ws[l][4 * across]);
#pragma unroll
      for (int i = 0; i < kHigh; ++i) {
        const float a = xs[l][down + 16 * i];
        acc[i][0] = fmaf(a, b.x, acc[i][0]);
        acc[i][1] = fmaf(a, b.y, acc[i][1]);
        acc[i][2] = fmaf(a, b.z, acc[i][2]);
        acc[i][3] = fmaf(a, b.w, acc[i][3]);
      }
    }
    __syncthreads();
  }
  start_next();
  const Store store(p, place.batch);
#pragma unroll
  for (int i = 0; i < kHigh; ++i) {
    const u32 row = place.first + down + 16 * i;
    if (row >= place.end) continue;
    const u64 at = store.row(p, row);
    if constexpr (kGate) {
      store.one(p, at, place.column + 2 * across, gate(p, acc[i][0]) * acc[i][2]);
      store.one(p, at, place.column + 2 * across + 1, gate(p, acc[i][1]) * acc[i][3]);
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) store.one(p, at, place.column + 4 * across + j, acc[i][j]);
    }
  }
}

}  // namespace fir
