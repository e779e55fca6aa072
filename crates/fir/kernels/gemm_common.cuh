// gemm_common.cuh: what the kernels of products share: parameters, which tile is whose, scales, and the way out.
//
// needs  sm_80
#pragma once
#include <fir/activation.cuh>
#include <fir/base/math.cuh>
#include <fir/base/types.cuh>
#include <fir/base/vec.cuh>

namespace fir {

// Strides in elements. `tiles` lists {group, first row, end} of every row tile, for rows in groups of weights of their own;
// without it a batch's matrices are all m rows.
struct GemmParams {
  const void* x;
  const void* w;
  void* out;
  const void* bias;
  const float* x_scales;
  const float* w_scales;
  const u32* tiles;
  const void* weight_ids;  // of groups; null: group g meets weights g
  const u32* x_rows;       // row r of the product reads row x_rows[r] / x_share of x; null: row r
  const u32* out_rows;     // and is row out_rows[r] of out; null: row r
  u64 x_stride, w_stride, out_stride;
  u64 x_batch, w_batch, out_batch;
  u64 xs_stride, ws_stride, xs_batch, ws_batch;
  u32 m, n, k;        // n: columns of out
  u32 row_tiles;
  u32 x_share;
  u32 weights;        // matrices of w; an id past them is taken for the last
  u32 wide_ids;       // ids are i64
  u32 x_block_rows, x_block_columns, w_block_rows, w_block_columns;
  u32 fold;           // columns after which sums are added up outside of the tensor cores, as scales change or the output is f32
  u32 x_type, w_type, out_type, bias_type;  // 0 f32, 1 f16, 2 bf16, 3 e4m3, 4 e5m2
  u32 then;           // 1: bias is added, 2: out is added to
  u32 gate;           // 0 silu, 1 gelu, 2 gelu by tanh
  u32 vector;         // out may be written eight columns at a time
  u32 beside;         // row tiles that come one after another before the next columns
};

constexpr u32 kNone = 0xffffffffu;

template <u32 kValue> struct Constant { static constexpr u32 value = kValue; };

// Rows `first` to `end` of the product, columns from `column` on, by matrix `weight`; of matrix `batch` of x and out.
struct Place { u32 weight, first, end, column, batch; };

// The tile `index` of matrix `batch`.
template <int kRows, int kOut>
__device__ __forceinline__ Place find_place(const GemmParams& p, u32 index, u32 batch) {
  const u32 columns = (p.n + kOut - 1) / kOut, band = index / (p.beside * columns), in = index % (p.beside * columns);
  const u32 above = band * p.beside, height = p.row_tiles - above < p.beside ? p.row_tiles - above : p.beside;
  const u32 tile = above + in % height;
  Place place{batch, tile * kRows, p.m, in / height * kOut, batch};
  if (p.tiles) {
    const u32* t = p.tiles + 3 * u64(tile);
    place.weight = t[0], place.first = t[1], place.end = t[2];
    if (p.weight_ids && place.first < place.end) {
      const u64 id = p.wide_ids ? static_cast<const u64*>(p.weight_ids)[t[0]] : static_cast<const u32*>(p.weight_ids)[t[0]];
      place.weight = id < p.weights ? u32(id) : p.weights - 1;
    }
  }
  return place;
}

// Which rows of x and of w the tile's are. With a gate, every warp's columns are half gates and half what they multiply.
template <int kRows, int kColumns, bool kGate, int kWarpColumns, int kThreads>
__device__ __forceinline__ void list_rows(const GemmParams& p, const Place& place, u32* x_rows, u32* w_rows) {
  for (u32 i = threadIdx.x; i < kRows; i += kThreads) {
    const u32 r = place.first + i;
    x_rows[i] = r >= place.end ? kNone : (p.x_rows ? p.x_rows[r] / p.x_share : r);
  }
  for (u32 i = threadIdx.x; i < kColumns; i += kThreads) {
    if constexpr (kGate) {
      constexpr u32 kHalf = kWarpColumns / 2;
      const u32 column = place.column + i / kWarpColumns * kHalf + i % kHalf;
      w_rows[i] = column < p.n ? column + (i % kWarpColumns / kHalf) * p.n : kNone;
    } else {
      w_rows[i] = place.column + i < p.n ? place.column + i : kNone;
    }
  }
}

// Where the scales of a row are; null if there are none.
__device__ __forceinline__ const float* x_scales_of(const GemmParams& p, u32 batch, u32 row) {
  if (!p.x_scales || row == kNone) return nullptr;
  return p.x_scales + batch * p.xs_batch + row / p.x_block_rows * p.xs_stride;
}
__device__ __forceinline__ const float* w_scales_of(const GemmParams& p, u32 weight, u32 row) {
  if (!p.w_scales || row == kNone) return nullptr;
  return p.w_scales + weight * p.ws_batch + row / p.w_block_rows * p.ws_stride;
}
__device__ __forceinline__ float x_scale(const GemmParams& p, u32 batch, u32 row, u32 k) {
  const float* scales = x_scales_of(p, batch, row);
  return scales ? scales[k / p.x_block_columns] : 1.f;
}
__device__ __forceinline__ float w_scale(const GemmParams& p, u32 weight, u32 row, u32 k) {
  const float* scales = w_scales_of(p, weight, row);
  return scales ? scales[k / p.w_block_columns] : 1.f;
}

__device__ __forceinline__ float load_any(const void* from, u64 at, u32 type) {
  switch (type) {
    case 0: return static_cast<const float*>(from)[at];
    case 1: return to_float(static_cast<const f16*>(from)[at]);
    case 2: return to_float(static_cast<const bf16*>(from)[at]);
    case 3: return to_float(static_cast<const e4m3*>(from)[at]);
    default: return to_float(static_cast<const e5m2*>(from)[at]);
  }
}

__device__ __forceinline__ float gate(const GemmParams& p, float x) {
  return p.gate == 0 ? Silu::apply(x) : p.gate == 1 ? Gelu::apply(x) : GeluTanh::apply(x);
}

// Sums on their way to `out`.
struct Store {
  u64 batch;
  __device__ __forceinline__ Store(const GemmParams& p, u32 matrix) : batch(matrix * p.out_batch) {}

  __device__ __forceinline__ u64 row(const GemmParams& p, u32 r) const {
    return batch + (p.out_rows ? p.out_rows[r] : r) * p.out_stride;
  }
  // One column, of the row that begins at `at`.
  __device__ __forceinline__ void one(const GemmParams& p, u64 at, u32 column, float y) const {
    if (column >= p.n) return;
    at += column;
    if (p.then == 1) y += load_any(p.bias, column, p.bias_type);
    if (p.then == 2) y += load_any(p.out, at, p.out_type);
    if (p.out_type == 0) static_cast<float*>(p.out)[at] = y;
    else if (p.out_type == 1) static_cast<f16*>(p.out)[at] = from_float<f16>(y);
    else static_cast<bf16*>(p.out)[at] = from_float<bf16>(y);
  }
  // Eight columns, the first of them a multiple of 8, from sums in shared memory.
  __device__ __forceinline__ void eight(const GemmParams& p, u64 at, u32 column, const float* sums) const {
    if (!p.vector || column + 8 > p.n) {
#pragma unroll 1
      for (u32 i = 0; i < 8; ++i) one(p, at, column + i, sums[i]);
      return;
    }
    float y[8];
    *reinterpret_cast<float4*>(y) = *reinterpret_cast<const float4*>(sums);
    *reinterpret_cast<float4*>(y + 4) = *reinterpret_cast<const float4*>(sums + 4);
    if (p.then == 1) {
#pragma unroll
      for (int i = 0; i < 8; ++i) y[i] += load_any(p.bias, column + i, p.bias_type);
    }
    at += column;
    if (p.then == 2) {
      if (p.out_type == 0) {
        const float4* old = reinterpret_cast<const float4*>(static_cast<const float*>(p.out) + at);
        const float4 a = old[0], b = old[1];
        y[0] += a.x, y[1] += a.y, y[2] += a.z, y[3] += a.w, y[4] += b.x, y[5] += b.y, y[6] += b.z, y[7] += b.w;
      } else {
        const Chunk c = load(static_cast<const u16*>(p.out) + at);
        float old[8];
        if (p.out_type == 1) widen<f16>(c, old);
        else widen<bf16>(c, old);
#pragma unroll
        for (int i = 0; i < 8; ++i) y[i] += old[i];
      }
    }
    if (p.out_type == 0) {
      const float first[4] = {y[0], y[1], y[2], y[3]}, second[4] = {y[4], y[5], y[6], y[7]};
      store_elements<true>(static_cast<float*>(p.out) + at, 0, 0, first);
      store_elements<true>(static_cast<float*>(p.out) + at + 4, 0, 0, second);
    } else if (p.out_type == 1) {
      store_elements<true>(static_cast<f16*>(p.out) + at, 0, 0, y);
    } else {
      store_elements<true>(static_cast<bf16*>(p.out) + at, 0, 0, y);
    }
  }
};

}  // namespace fir
