// norm.cuh: a norm of each row, one launch, the row in registers between its passes.
//
//   s      = x                            or x + residual (kAdd), which is stored to residual, rounded
//   s      = s - mean(s)                  (kCenter)
//   out    = s / sqrt(mean(s^2) + eps) * (weight + shift) + bias     (bias with kCenter)
//   fp8    out = clamp(out * inverse_scale)
//
// grid   blocks of rows, as many as there are, then again from the first
// block  width threads per row, a power of two: several rows to a block up to 32, one above
// smem   128 bytes
// needs  sm_80
//
// reads  x, residual, weight, bias: each element once (rows of more than 4 * width chunks: the rest in every pass; rows
//        that are not aligned for vectors: all of it)
// writes out, residual; nothing between their rows. out may be x.
// twins  src/cpu/norm.rs, src/reference/norm.rs
#pragma once
#include <fir/base/math.cuh>
#include <fir/base/reduce.cuh>
#include <fir/base/vec.cuh>

namespace fir {

struct NormParams {
  const void* x;
  void* residual;
  void* out;
  const void* weight;
  const void* bias;
  u32 rows;
  u32 inner;  // rows of the second axis; >= rows when all are evenly apart
  u64 x_outer, x_stride;
  u64 residual_outer, residual_stride;
  u64 out_outer, out_stride;
  u64 weight_stride, bias_stride;
  u32 hidden;
  u32 width;       // threads per row
  u32 weight_type; // kWeight…
  u32 bias_type;
  float eps;
  float shift;
  float inverse_scale;
  float inverse_hidden;
};

enum : u32 { kWeightF32 = 0, kWeightF16 = 1, kWeightBF16 = 2 };

template <class T>
constexpr u32 kWeightType = is_same<T, float>::value ? kWeightF32 : is_same<T, f16>::value ? kWeightF16 : kWeightBF16;

// A chunk's columns from `at` on, zeros past `len`. kVector: contiguous, on 16 bytes, of type T or f32.
template <class T, bool kVector>
__device__ __forceinline__ void load_columns(const void* data, u32 type, u64 stride, u32 at, u32 len, float (&out)[kLanes<T>]) {
  constexpr int kL = kLanes<T>;
  if constexpr (kVector) {
    if (type == kWeightType<T>) return widen<T>(load(static_cast<const T*>(data) + at), out);
#pragma unroll
    for (int c = 0; c < kL; c += 4) {
      Chunk chunk = load(static_cast<const float*>(data) + at + c);
#pragma unroll
      for (int i = 0; i < 4; ++i) out[c + i] = float_of(chunk.word[i]);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kL; ++i) {
    u64 from = u64(at + i) * stride;
    if (at + i >= len) out[i] = 0.f;
    else if (type == kWeightF32) out[i] = static_cast<const float*>(data)[from];
    else if (type == kWeightF16) out[i] = to_float(static_cast<const f16*>(data)[from]);
    else out[i] = to_float(static_cast<const bf16*>(data)[from]);
  }
}

template <class T, class O, bool kCenter, bool kAdd, bool kVector>
struct NormRow {
  static constexpr int kL = kLanes<T>;
  const NormParams& p;
  const T* x;
  T* residual;
  O* out;

  __device__ __forceinline__ NormRow(const NormParams& p, u32 r) : p(p) {
    x = static_cast<const T*>(p.x) + row_offset(r, p.rows, p.inner, p.x_outer, p.x_stride);
    residual = kAdd ? static_cast<T*>(p.residual) + row_offset(r, p.rows, p.inner, p.residual_outer, p.residual_stride) : nullptr;
    out = static_cast<O*>(p.out) + row_offset(r, p.rows, p.inner, p.out_outer, p.out_stride);
  }

  // What is normed, unrounded; zeros past the row's end.
  __device__ __forceinline__ void widen_sum(const Chunk& cx, const Chunk& cr, float (&s)[kL]) const {
    widen<T>(cx, s);
    if constexpr (kAdd) {
      float r[kL];
      widen<T>(cr, r);
#pragma unroll
      for (int i = 0; i < kL; ++i) s[i] += r[i];
    }
  }

  __device__ __forceinline__ Chunk load_x(u32 at) const { return load_chunk<kVector>(x, at, p.hidden); }
  __device__ __forceinline__ Chunk load_residual(u32 at) const {
    if constexpr (kAdd) return load_chunk<kVector>(static_cast<const T*>(residual), at, p.hidden);
    return Chunk{};
  }

  // Sum of s, or of (s - mean)^2, over one chunk.
  template <bool kSquare>
  __device__ __forceinline__ float moment(const Chunk& cx, const Chunk& cr, u32 at, float mean) const {
    float s[kL], sum = 0.f;
    widen_sum(cx, cr, s);
#pragma unroll
    for (int i = 0; i < kL; ++i) {
      if constexpr (kSquare && kCenter) s[i] = at + i < p.hidden ? s[i] - mean : 0.f;
      sum = kSquare ? fmaf(s[i], s[i], sum) : sum + s[i];
    }
    return sum;
  }

  // `weight`: the columns' factors, if they were `loaded` already.
  __device__ __forceinline__ void write(const Chunk& cx, const Chunk& cr, bool loaded, const Chunk& weight, u32 at,
                                        float mean, float scale) const {
    float s[kL], w[kL];
    widen_sum(cx, cr, s);
    if constexpr (kAdd) store_elements<kVector>(residual, at, p.hidden, s);
    if (loaded) widen<T>(weight, w);
    else load_columns<T, kVector>(p.weight, p.weight_type, p.weight_stride, at, p.hidden, w);
    if constexpr (kCenter) {
      float b[kL];
      load_columns<T, kVector>(p.bias, p.bias_type, p.bias_stride, at, p.hidden, b);
#pragma unroll
      for (int i = 0; i < kL; ++i) s[i] = fmaf((s[i] - mean) * scale, w[i] + p.shift, b[i]);
    } else {
#pragma unroll
      for (int i = 0; i < kL; ++i) s[i] = s[i] * scale * (w[i] + p.shift);
    }
    if constexpr (sizeof(O) == 1) {
      // Saturates infinities too, which a conversion to e5m2 would keep; NaN passes.
      constexpr float kMost = largest<O>::value;
#pragma unroll
      for (int i = 0; i < kL; ++i) {
        float q = s[i] * p.inverse_scale;
        s[i] = q > kMost ? kMost : q < -kMost ? -kMost : q;
      }
    }
    store_elements<kVector>(out, at, p.hidden, s);
  }
};

template <int kCount>
__device__ __forceinline__ void repack_all(Chunk (&x)[kCount], Chunk (&residual)[kCount]) {
#pragma unroll
  for (int v = 0; v < kCount; ++v) {
    repack(x[v]);
    repack(residual[v]);
  }
}

// Blocks that a multiprocessor shall hold: 48 KiB and more of rows on their way, as far as registers go without spilling.
template <int kVecs, bool kCenter, bool kAdd>
constexpr int kMinBlocks = kVecs == 0 || kVecs == 4 ? 2 : (kCenter || kAdd ? 4 : 6);

// kVecs: chunks of a row that a thread keeps; with 4, rows may be longer. 0: no tensor need be aligned, and nothing is kept;
// the same threads add the same numbers in the same order.
template <class T, class O, bool kCenter, bool kAdd, int kVecs>
__global__ void __launch_bounds__(kVecs == 0 || kVecs == 4 ? 512 : 256, kMinBlocks<kVecs, kCenter, kAdd>)
    norm(const __grid_constant__ NormParams p) {
  __shared__ float scratch[32];
  constexpr int kL = kLanes<T>, kKept = kVecs > 0 ? kVecs : 1;
  constexpr bool kLong = kVecs == 0 || kVecs == 4;
  using Row = NormRow<T, O, kCenter, kAdd, (kVecs > 0)>;
  const u32 log_width = 31 - __clz(p.width), per_block = blockDim.x >> log_width;
  const u32 lane = threadIdx.x & (p.width - 1), step = p.width * kL;
  const u32 begin = lane * kL, rest = begin + kVecs * step;
  // Weights are on their way while the sum is taken, where there are registers for it.
  const bool early_weight = (kVecs == 1 || kVecs == 2) && p.weight_type == kWeightType<T>;
  wait_for_previous();
  for (u64 first = u64(blockIdx.x) * per_block; first < p.rows; first += u64(gridDim.x) * per_block) {
    // Threads past the last row go along with it, for the sums over warps, and write nothing.
    const u64 r = first + (threadIdx.x >> log_width);
    const bool active = r < p.rows;
    const Row row(p, active ? u32(r) : p.rows - 1);
    Chunk cx[kKept] = {}, cr[kKept] = {}, cw[kKept] = {};
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
      u32 at = begin + v * step;
      if (at < p.hidden) {
        cx[v] = row.load_x(at);
        cr[v] = row.load_residual(at);
      }
    }
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
      u32 at = begin + v * step;
      if (early_weight && at < p.hidden) cw[v] = load(static_cast<const T*>(p.weight) + at);
    }
    start_next();
    float mean = 0.f, sum = 0.f;
    if constexpr (kCenter) {
#pragma unroll
      for (int v = 0; v < kVecs; ++v) sum += row.template moment<false>(cx[v], cr[v], begin + v * step, 0.f);
      if constexpr (kLong) {
        for (u32 at = rest; at < p.hidden; at += step) {
          sum += row.template moment<false>(row.load_x(at), row.load_residual(at), at, 0.f);
        }
      }
      // Divided: what 1 / hidden is off by would be that much of the mean, which may be far larger than what is left.
      mean = __fdiv_rn(row_sum(sum, p.width, scratch), float(p.hidden));
      sum = 0.f;
      repack_all(cx, cr);
    }
#pragma unroll
    for (int v = 0; v < kVecs; ++v) sum += row.template moment<true>(cx[v], cr[v], begin + v * step, mean);
    if constexpr (kLong) {
      for (u32 at = rest; at < p.hidden; at += step) {
        sum += row.template moment<true>(row.load_x(at), row.load_residual(at), at, mean);
      }
    }
    repack_all(cx, cr);
    const float scale = rsqrt(fmaf(row_sum(sum, p.width, scratch), p.inverse_hidden, p.eps));
    if (!active) continue;
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
      u32 at = begin + v * step;
      if (at < p.hidden) row.write(cx[v], cr[v], early_weight, cw[v], at, mean, scale);
    }
    if constexpr (kLong) {
      for (u32 at = rest; at < p.hidden; at += step) {
        row.write(row.load_x(at), row.load_residual(at), false, Chunk{}, at, mean, scale);
      }
    }
  }
}

}  // namespace fir
