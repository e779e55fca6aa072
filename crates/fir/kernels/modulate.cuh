// modulate.cuh: a gated sum with the residual, its layer norm, and a scale and shift of every element, one launch.
//
//   s            = residual + x * x_scale * gate
//   residual_out = s, rounded
//   out          = (s - mean(s)) / sqrt(mean((s - mean(s))^2) + eps) * scale + shift
//   gate, scale, shift = plus + rows[r][h] + columns[h], each part if it is there
//
// grid   blocks of rows, as many as there are, then again from the first
// block  width threads per row, a power of two: several rows to a block up to 32, one above
// smem   128 bytes
// needs  sm_80
//
// reads  x, residual, gate's parts: each element once (rows that are too long for registers, or not aligned: three times);
//        the parts of scale and shift once
// writes residual_out, out; nothing between their rows. residual_out may be x or residual.
// twins  src/cpu/modulate.rs, src/reference/norm.rs
#pragma once
#include <fir/base/math.cuh>
#include <fir/base/reduce.cuh>
#include <fir/base/vec.cuh>

namespace fir {

struct Modulation {
  const void* rows;       // none: 0
  const float* columns;   // none: 0
  u64 outer, stride;
  float plus;
  u32 pad;
};

struct ModulateParams {
  const void* x;
  const void* residual;   // none: 0
  const float* x_scale;   // none: 1
  void* residual_out;
  void* out;
  Modulation gate, scale, shift;
  u32 rows, inner;        // as in norm.cuh
  u64 x_outer, x_stride;
  u64 residual_outer, residual_stride;
  u64 sum_outer, sum_stride;
  u64 out_outer, out_stride;
  u32 hidden, width;
  float eps, inverse_hidden;
};

template <class T, bool kVector>
struct ModulateRow {
  static constexpr int kL = kLanes<T>;
  const ModulateParams& p;
  u32 r;
  const T* x;
  const T* residual;
  T* sum;
  T* out;
  float x_scale;

  __device__ __forceinline__ ModulateRow(const ModulateParams& p, u32 r) : p(p), r(r) {
    x = at<const T>(p.x, p.x_outer, p.x_stride);
    residual = p.residual ? at<const T>(p.residual, p.residual_outer, p.residual_stride) : nullptr;
    sum = at<T>(p.residual_out, p.sum_outer, p.sum_stride);
    out = at<T>(p.out, p.out_outer, p.out_stride);
    x_scale = p.x_scale ? *p.x_scale : 1.f;
  }

  template <class E, class Void>
  __device__ __forceinline__ E* at(Void* from, u64 outer, u64 stride) const {
    return static_cast<E*>(from) + row_offset(r, p.rows, p.inner, outer, stride);
  }

  __device__ __forceinline__ Chunk load_rows(const Modulation& m, u32 column) const {
    if (!m.rows) return Chunk{};
    return load_chunk<kVector>(at<const T>(m.rows, m.outer, m.stride), column, p.hidden);
  }

  __device__ __forceinline__ void modulation(const Modulation& m, const Chunk& rows, u32 column, float (&y)[kL]) const {
    widen<T>(rows, y);
    float c[kL] = {};
    if (m.columns) {
      if constexpr (kVector) {
#pragma unroll
        for (int i = 0; i < kL; i += 4) widen4(load(m.columns + column + i), c + i);
      } else {
#pragma unroll
        for (int i = 0; i < kL; ++i) c[i] = column + i < p.hidden ? m.columns[column + i] : 0.f;
      }
    }
#pragma unroll
    for (int i = 0; i < kL; ++i) y[i] = m.plus + (y[i] + c[i]);
  }

  static __device__ __forceinline__ void widen4(const Chunk& c, float* out) {
#pragma unroll
    for (int i = 0; i < 4; ++i) out[i] = float_of(c.word[i]);
  }

  // What is normed, unrounded; zeros past the row's end.
  __device__ __forceinline__ void load_sum(u32 column, float (&s)[kL]) const {
    float g[kL], other[kL] = {};
    widen<T>(load_chunk<kVector>(x, column, p.hidden), s);
    if (residual) widen<T>(load_chunk<kVector>(residual, column, p.hidden), other);
    modulation(p.gate, load_rows(p.gate, column), column, g);
#pragma unroll
    for (int i = 0; i < kL; ++i) s[i] = column + i < p.hidden ? fmaf(s[i], g[i] * x_scale, other[i]) : 0.f;
  }

  // Sum of s, or of (s - mean)^2, over one chunk.
  template <bool kSquare>
  __device__ __forceinline__ float moment(const float (&s)[kL], u32 column, float mean) const {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < kL; ++i) {
      const float d = kSquare ? (column + i < p.hidden ? s[i] - mean : 0.f) : s[i];
      sum = kSquare ? fmaf(d, d, sum) : sum + d;
    }
    return sum;
  }

  __device__ __forceinline__ void write(const float (&s)[kL], const Chunk& scales, const Chunk& shifts, u32 column, float mean,
                                        float scale) const {
    float a[kL], b[kL];
    store_elements<kVector>(sum, column, p.hidden, s);
    modulation(p.scale, scales, column, a);
    modulation(p.shift, shifts, column, b);
#pragma unroll
    for (int i = 0; i < kL; ++i) a[i] = fmaf((s[i] - mean) * scale, a[i], b[i]);
    store_elements<kVector>(out, column, p.hidden, a);
  }
};

// kVecs: chunks of a row that a thread keeps, all there are. 0: nothing need be aligned, and nothing is kept.
template <class T, int kVecs>
__global__ void __launch_bounds__(kVecs == 0 || kVecs == 4 ? 512 : 256) modulate(const __grid_constant__ ModulateParams p) {
  __shared__ float scratch[32];
  constexpr int kL = kLanes<T>, kKept = kVecs > 0 ? kVecs : 1;
  using Row = ModulateRow<T, (kVecs > 0)>;
  const u32 log_width = 31 - __clz(p.width), per_block = blockDim.x >> log_width;
  const u32 begin = (threadIdx.x & (p.width - 1)) * kL, step = p.width * kL;
  wait_for_previous();
  for (u64 first = u64(blockIdx.x) * per_block; first < p.rows; first += u64(gridDim.x) * per_block) {
    // Threads past the last row go along with it, for the sums over warps, and write nothing.
    const u64 r = first + (threadIdx.x >> log_width);
    const bool active = r < p.rows;
    const Row row(p, active ? u32(r) : p.rows - 1);
    float s[kKept][kL], sum = 0.f;
    Chunk scales[kKept] = {}, shifts[kKept] = {};
    if constexpr (kVecs > 0) {
      // On their way while the sums are taken.
#pragma unroll
      for (int v = 0; v < kVecs; ++v) {
        if (begin + v * step < p.hidden) {
          scales[v] = row.load_rows(p.scale, begin + v * step);
          shifts[v] = row.load_rows(p.shift, begin + v * step);
        }
      }
#pragma unroll
      for (int v = 0; v < kVecs; ++v) {
        if (begin + v * step < p.hidden) {
          row.load_sum(begin + v * step, s[v]);
          sum += row.template moment<false>(s[v], begin + v * step, 0.f);
        }
      }
    } else {
      for (u32 at = begin; at < p.hidden; at += step) {
        row.load_sum(at, s[0]);
        sum += row.template moment<false>(s[0], at, 0.f);
      }
    }
    start_next();
    const float mean = __fdiv_rn(row_sum(sum, p.width, scratch), float(p.hidden));
    sum = 0.f;
    if constexpr (kVecs > 0) {
#pragma unroll
      for (int v = 0; v < kVecs; ++v) {
        if (begin + v * step < p.hidden) sum += row.template moment<true>(s[v], begin + v * step, mean);
      }
    } else {
      for (u32 at = begin; at < p.hidden; at += step) {
        row.load_sum(at, s[0]);
        sum += row.template moment<true>(s[0], at, mean);
      }
    }
    const float scale = rsqrt(fmaf(row_sum(sum, p.width, scratch), p.inverse_hidden, p.eps));
    if (!active) continue;
    if constexpr (kVecs > 0) {
#pragma unroll
      for (int v = 0; v < kVecs; ++v) {
        if (begin + v * step < p.hidden) row.write(s[v], scales[v], shifts[v], begin + v * step, mean, scale);
      }
    } else {
      for (u32 at = begin; at < p.hidden; at += step) {
        row.load_sum(at, s[0]);
        row.write(s[0], row.load_rows(p.scale, at), row.load_rows(p.shift, at), at, mean, scale);
      }
    }
  }
}

}  // namespace fir
