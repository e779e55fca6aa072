// quantize.cuh: numbers in fewer bits with a scale per block, and back; bits packed into bytes.
//
//   quantize_fp8      scales[b] = max(max|x| / largest, 2^-126) over a block of rows and columns; out = fp8(x * (1 / scales[b]))
//   largest_fp8       the same scales, where a block is too large for a block of threads; they start at 0
//   scale_fp8         out = fp8(x * (1 / scales[b])), or out = x * scales[b]
//   quantize_blocks   MXFP8, MXFP4 (32 of a row) and NVFP4 (16 of a row)
//   expand_blocks     the numbers that they stand for
//   packbits          bit i of out[j] is x[8 j + i], of each segment on its own
//
// Threads work on items: 16 elements of a row, from the start of a block on. A maximum is the same in any order, so how the
// work is cut changes no bit.
//
// grid   blocks of rows, or of blocks of numbers, as many as there are, then again from the first
// block  256: `width` threads per row or block of numbers, a power of two
// smem   128 bytes
// needs  sm_80
//
// reads  x once (quantize_fp8: what is past four items a thread twice), scales
// writes out, scales; nothing between their rows
// twins  src/cpu/quantize.rs, src/reference/quantize.rs
#pragma once
#include <fir/base/fp4.cuh>
#include <fir/base/math.cuh>
#include <fir/base/vec.cuh>

namespace fir {

struct QuantizeParams {
  const void* x;
  void* out;
  void* scales;
  u64 x_outer, x_stride;  // of the matrices of a batch and of their rows, in elements; of codes, in bytes
  u64 out_outer, out_stride;
  u64 scales_outer, scales_stride;
  u32 rows;         // of all matrices
  u32 inner;        // of one matrix
  u32 k;
  u32 columns;      // of a block, at most k
  u32 block_rows;   // of a block, at most inner
  u32 column_blocks;
  u32 row_blocks;   // of one matrix
  u32 width;        // threads per row or block
  float scale;      // NVFP4's for all blocks; the largest number of the format, for largest_fp8
  float fill;       // what fill_scales writes
};

constexpr float kLeastScale = 0x1p-126f;
constexpr float kMostFloat = 0x1.fffffep+127f;

// Sixteen elements of a row.
template <class T> struct Item { Chunk chunk[sizeof(T)]; };

template <bool kVector, class T>
__device__ __forceinline__ Item<T> load_item(const T* row, u32 at, u32 end) {
  Item<T> item;
#pragma unroll
  for (int i = 0; i < int(sizeof(T)); ++i) {
    // Neighbours of a sector come from the first-level cache.
    if constexpr (kVector) item.chunk[i] = load(row + at + i * kLanes<T>);
    else item.chunk[i] = load_chunk<false>(row, at + i * kLanes<T>, end);
  }
  return item;
}

template <class T>
__device__ __forceinline__ void widen_item(const Item<T>& item, float (&x)[16]) {
#pragma unroll
  for (int i = 0; i < int(sizeof(T)); ++i) {
    float part[kLanes<T>];
    widen<T>(item.chunk[i], part);
#pragma unroll
    for (int j = 0; j < kLanes<T>; ++j) x[i * kLanes<T> + j] = part[j];
  }
}

template <bool kVector, class O>
__device__ __forceinline__ void store_item(O* row, u32 at, u32 end, const float (&x)[16]) {
#pragma unroll
  for (int i = 0; i < int(sizeof(O)); ++i) {
    float part[kLanes<O>];
#pragma unroll
    for (int j = 0; j < kLanes<O>; ++j) part[j] = x[i * kLanes<O> + j];
    store_elements<kVector>(row, at + i * kLanes<O>, end, part);
  }
}

// The largest magnitude; NaN does not count.
__device__ __forceinline__ float largest_of(const float (&x)[16]) {
  float most = 0.f;
#pragma unroll
  for (int i = 0; i < 16; ++i) most = fmaxf(most, fabsf(x[i]));
  return most;
}

// The largest over `width` neighbouring threads, a power of two up to 256. Every thread of the block takes part and gets
// that of its group.
__device__ __forceinline__ float group_max(float x, u32 width, float* scratch) {
  const u32 lanes = width < 32 ? width : 32;
  for (u32 step = lanes / 2; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
  if (width <= 32) return x;
  __syncthreads();  // the last one has been read
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
  __syncthreads();
  for (u32 i = threadIdx.x / width * (width / 32), end = i + width / 32; i < end; ++i) x = fmaxf(x, scratch[i]);
  return x;
}

__device__ __forceinline__ float scale_of(float largest, float of_format) {
  return fmaxf(__fdiv_rn(fminf(largest, kMostFloat), of_format), kLeastScale);
}

// Infinities become the largest number of e5m2, which could hold them; e4m3 has none.
template <class O>
__device__ __forceinline__ float saturate(float x) {
  constexpr float kMost = largest<e5m2>::value;
  if constexpr (is_same<O, e5m2>::value) return x > kMost ? kMost : x < -kMost ? -kMost : x;
  return x;
}

template <class O>
__device__ __forceinline__ void scale_item(float (&x)[16], float factor) {
#pragma unroll
  for (int i = 0; i < 16; ++i) x[i] = saturate<O>(__fmul_rn(x[i], factor));
}

// A group of threads has a block of numbers, and keeps its first items in registers between the maximum and the rounding.
template <class T, class O, bool kVector>
__global__ void __launch_bounds__(256) quantize_fp8(const __grid_constant__ QuantizeParams p) {
  __shared__ float scratch[32];
  constexpr int kKept = sizeof(T) == 4 ? 2 : 4;
  const u32 lane = threadIdx.x & (p.width - 1), per_block = 256 / p.width;
  const u32 per_matrix = p.row_blocks * p.column_blocks, blocks = p.rows / p.inner * per_matrix;
  wait_for_previous();
  for (u64 first = u64(blockIdx.x) * per_block; first < blocks; first += u64(gridDim.x) * per_block) {
    // Groups past the last block go along with it, for the maximum, and write nothing.
    const bool active = first + threadIdx.x / p.width < blocks;
    const u32 block = active ? u32(first) + threadIdx.x / p.width : blocks - 1;
    const u32 matrix = block / per_matrix, row_block = block % per_matrix / p.column_blocks, column_block = block % p.column_blocks;
    const u32 row = row_block * p.block_rows, column = column_block * p.columns;
    const u32 rows = min(p.block_rows, p.inner - row), columns = min(p.columns, p.k - column);
    const u32 per_row = (columns + 15) / 16, items = rows * per_row;
    const T* x = static_cast<const T*>(p.x) + matrix * p.x_outer + row * p.x_stride + column;
    O* out = static_cast<O*>(p.out) + matrix * p.out_outer + row * p.out_stride + column;
    Item<T> kept[kKept];
    float most = 0.f, v[16];
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
      const u32 at = lane + i * p.width;
      if (at < items) kept[i] = load_item<kVector>(x + at / per_row * p.x_stride, at % per_row * 16, columns);
    }
    start_next();
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
      if (lane + i * p.width < items) {
        widen_item<T>(kept[i], v);
        most = fmaxf(most, largest_of(v));
      }
    }
    for (u32 at = lane + kKept * p.width; at < items; at += p.width) {
      widen_item<T>(load_item<kVector>(x + at / per_row * p.x_stride, at % per_row * 16, columns), v);
      most = fmaxf(most, largest_of(v));
    }
    const float scale = scale_of(group_max(most, p.width, scratch), largest<O>::value), factor = __fdiv_rn(1.f, scale);
    if (!active) continue;
    if (lane == 0) static_cast<float*>(p.scales)[matrix * p.scales_outer + row_block * p.scales_stride + column_block] = scale;
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
      const u32 at = lane + i * p.width;
      if (at < items) {
        widen_item<T>(kept[i], v);
        scale_item<O>(v, factor);
        store_item<kVector>(out + at / per_row * p.out_stride, at % per_row * 16, columns, v);
      }
    }
    for (u32 at = lane + kKept * p.width; at < items; at += p.width) {
      widen_item<T>(load_item<kVector>(x + at / per_row * p.x_stride, at % per_row * 16, columns), v);
      scale_item<O>(v, factor);
      store_item<kVector>(out + at / per_row * p.out_stride, at % per_row * 16, columns, v);
    }
  }
}

template <class = void>
__global__ void __launch_bounds__(256) fill_scales(const __grid_constant__ QuantizeParams p) {
  wait_for_previous();
  start_next();
  const u64 per_matrix = u64(p.row_blocks) * p.column_blocks, count = u64(p.rows) * per_matrix;  // rows: matrices here
  for (u64 at = u64(blockIdx.x) * 256 + threadIdx.x; at < count; at += u64(gridDim.x) * 256) {
    const u64 rest = at % per_matrix;
    static_cast<float*>(p.scales)[at / per_matrix * p.scales_outer + rest / p.column_blocks * p.scales_stride + rest % p.column_blocks] = p.fill;
  }
}

// A group of threads has a block's columns of one row at a time. The scale of the largest of all is the largest of their
// scales, and numbers above 0 are in the order of their bits.
template <class T, bool kVector>
__global__ void __launch_bounds__(256) largest_fp8(const __grid_constant__ QuantizeParams p) {
  __shared__ float scratch[32];
  const u32 lane = threadIdx.x & (p.width - 1), per_block = 256 / p.width;
  const u64 strips = u64(p.rows) * p.column_blocks;
  const bool single = p.column_blocks == 1 && p.row_blocks == 1 && p.rows == p.inner;
  float most = 0.f;
  wait_for_previous();
  start_next();
  auto put = [&](u64 at) {
    const float scale = scale_of(group_max(most, p.width, scratch), p.scale);
    u32* to = static_cast<u32*>(p.scales) + at;
    // Seldom more than a few are larger than what is there.
    if (lane == 0 && *static_cast<volatile u32*>(to) < bits_of(scale)) atomicMax(to, bits_of(scale));
    most = 0.f;
  };
  for (u64 first = u64(blockIdx.x) * per_block; first < strips; first += u64(gridDim.x) * per_block) {
    const u64 own = first + threadIdx.x / p.width, strip = own < strips ? own : strips - 1;
    const u32 row = u32(strip / p.column_blocks), column_block = u32(strip % p.column_blocks), column = column_block * p.columns;
    const u32 matrix = row / p.inner, inner = row % p.inner, columns = min(p.columns, p.k - column);
    const T* x = static_cast<const T*>(p.x) + matrix * p.x_outer + inner * p.x_stride + column;
#pragma unroll 4
    for (u32 at = lane * 16; at < columns; at += p.width * 16) {
      float v[16];
      widen_item<T>(load_item<kVector>(x, at, columns), v);
      most = fmaxf(most, largest_of(v));
    }
    if (!single) put(matrix * p.scales_outer + inner / p.block_rows * p.scales_stride + column_block);
  }
  if (single) put(0);
}

// kInvert: by the inverse of the scale.
template <class X, class O, bool kInvert, bool kVector>
__global__ void __launch_bounds__(256) scale_fp8(const __grid_constant__ QuantizeParams p) {
  const u32 lane = threadIdx.x & (p.width - 1), per_block = 256 / p.width;
  const u32 per_strip = (p.columns + 15) / 16, items = per_strip * p.column_blocks;
  wait_for_previous();
  for (u64 first = u64(blockIdx.x) * per_block; first < p.rows; first += u64(gridDim.x) * per_block) {
    const u64 row = first + threadIdx.x / p.width;
    if (row >= p.rows) break;
    const u32 matrix = u32(row) / p.inner, inner = u32(row) % p.inner;
    const X* x = static_cast<const X*>(p.x) + matrix * p.x_outer + inner * p.x_stride;
    O* out = static_cast<O*>(p.out) + matrix * p.out_outer + inner * p.out_stride;
    const float* scales = static_cast<const float*>(p.scales) + matrix * p.scales_outer + inner / p.block_rows * p.scales_stride;
#pragma unroll 2
    for (u32 i = lane; i < items; i += p.width) {
      const u32 block = i / per_strip, at = block * p.columns + i % per_strip * 16;
      const u32 end = min(block * p.columns + p.columns, p.k);
      if (at >= end) continue;  // the last block may have fewer items
      const Item<X> item = load_item<kVector>(x, at, end);
      const float scale = scales[block], factor = kInvert ? __fdiv_rn(1.f, scale) : scale;
      float v[16];
      widen_item<X>(item, v);
      if constexpr (kInvert) {
        scale_item<O>(v, factor);
      } else {
#pragma unroll
        for (int j = 0; j < 16; ++j) v[j] = __fmul_rn(v[j], factor);
      }
      store_item<kVector>(out, at, end, v);
    }
    start_next();
  }
}

// Formats: kBlock elements share a scale, a byte; kNan: a code can be NaN, else the scale is, for a block with one.
template <class O> struct Mxfp8 {
  static constexpr u32 kBlock = 32;
  static constexpr bool kNan = true;
  static __device__ __forceinline__ u8 scale(float most, float, float& factor) {
    const u32 code = e8m0_at_least(__fdiv_rn(most, largest<O>::value));
    factor = code == 0xff ? float_of(0x7fc00000u) : from_e8m0(254 - code);
    return u8(code);
  }
  static __device__ __forceinline__ float unit(u8 scale, float) { return from_e8m0(scale); }
  template <bool kVector> static __device__ __forceinline__ void store(u8* row, u32 at, u32 k, float (&x)[16], float factor) {
    scale_item<O>(x, factor);
    store_item<kVector>(reinterpret_cast<O*>(row), at, k, x);
  }
  template <bool kVector> static __device__ __forceinline__ void load(const u8* row, u32 at, u32 k, float (&x)[16]) {
    widen_item<O>(load_item<kVector>(reinterpret_cast<const O*>(row), at, k), x);
  }
};

struct Fp4Codes {
  template <bool kVector> static __device__ __forceinline__ void put(u8* row, u32 at, const float (&x)[16]) {
    const u32 word[2] = {pack_e2m1(x), pack_e2m1(x + 8)};
    if constexpr (kVector) {
      asm volatile("st.global.v2.u32 [%0], {%1, %2};" :: "l"(row + at / 2), "r"(word[0]), "r"(word[1]) : "memory");
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) row[at / 2 + i] = u8(word[i / 4] >> (i % 4 * 8));
    }
  }
  template <bool kVector> static __device__ __forceinline__ void load(const u8* row, u32 at, u32, float (&x)[16]) {
    u32 word[2] = {0, 0};
    if constexpr (kVector) {
      asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(word[0]), "=r"(word[1]) : "l"(row + at / 2));
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) word[i / 4] |= u32(row[at / 2 + i]) << (i % 4 * 8);
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) x[i] = from_e2m1(word[i / 8] >> (i % 8 * 4) & 15);
  }
};

struct Mxfp4 : Fp4Codes {
  static constexpr u32 kBlock = 32;
  static constexpr bool kNan = false;
  static __device__ __forceinline__ u8 scale(float most, float, float& factor) {
    const u32 code = e8m0_at_least(__fdiv_rn(most, 6.f));
    factor = code == 0xff ? float_of(0x7fc00000u) : from_e8m0(254 - code);
    return u8(code);
  }
  static __device__ __forceinline__ float unit(u8 scale, float) { return from_e8m0(scale); }
  template <bool kVector> static __device__ __forceinline__ void store(u8* row, u32 at, u32, float (&x)[16], float factor) {
#pragma unroll
    for (int i = 0; i < 16; ++i) x[i] = __fmul_rn(x[i], factor);
    put<kVector>(row, at, x);
  }
};

struct Nvfp4 : Fp4Codes {
  static constexpr u32 kBlock = 16;
  static constexpr bool kNan = false;
  static __device__ __forceinline__ u8 scale(float most, float all, float& divisor) { return nvfp4_scale(most, all, divisor); }
  static __device__ __forceinline__ float unit(u8 scale, float all) { return __fmul_rn(to_float(e4m3{scale}), all); }
  template <bool kVector> static __device__ __forceinline__ void store(u8* row, u32 at, u32, float (&x)[16], float divisor) {
#pragma unroll
    for (int i = 0; i < 16; ++i) x[i] = __fdiv_rn(x[i], divisor);
    put<kVector>(row, at, x);
  }
};

template <class T, class Format, bool kVector>
__global__ void __launch_bounds__(256) quantize_blocks(const __grid_constant__ QuantizeParams p) {
  const u32 lane = threadIdx.x & (p.width - 1), per_block = 256 / p.width;
  wait_for_previous();
  for (u64 first = u64(blockIdx.x) * per_block; first < p.rows; first += u64(gridDim.x) * per_block) {
    const u64 row = first + threadIdx.x / p.width;
    const u32 own = u32(row < p.rows ? row : p.rows - 1), matrix = own / p.inner, inner = own % p.inner;
    const T* x = static_cast<const T*>(p.x) + matrix * p.x_outer + inner * p.x_stride;
    u8* out = static_cast<u8*>(p.out) + matrix * p.out_outer + inner * p.out_stride;
    u8* scales = static_cast<u8*>(p.scales) + matrix * p.scales_outer + inner * p.scales_stride;
    // All lanes of a warp make as many turns, as two of them share a block of 32.
#pragma unroll 2
    for (u32 from = 0; from < p.k; from += p.width * 16) {
      const u32 at = from + lane * 16;
      const bool active = row < p.rows && at < p.k;
      float v[16] = {};
      if (active) widen_item<T>(load_item<kVector>(x, at, p.k), v);
      float most = largest_of(v), nan = 0.f;
      if constexpr (!Format::kNan) {
#pragma unroll
        for (int i = 0; i < 16; ++i) nan += v[i] != v[i] ? v[i] : 0.f;
      }
      if constexpr (Format::kBlock == 32) {
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
        if constexpr (!Format::kNan) nan += __shfl_xor_sync(0xffffffffu, nan, 1);
      }
      if (!active) continue;
      float factor;
      const u8 scale = Format::scale(nan != nan ? nan : most, p.scale, factor);
      if (at % Format::kBlock == 0) scales[at / Format::kBlock] = scale;
      Format::template store<kVector>(out, at, p.k, v, factor);
    }
    start_next();
  }
}

template <class Format, class O, bool kVector>
__global__ void __launch_bounds__(256) expand_blocks(const __grid_constant__ QuantizeParams p) {
  const u32 lane = threadIdx.x & (p.width - 1), per_block = 256 / p.width;
  wait_for_previous();
  for (u64 first = u64(blockIdx.x) * per_block; first < p.rows; first += u64(gridDim.x) * per_block) {
    const u64 row = first + threadIdx.x / p.width;
    if (row >= p.rows) break;
    const u32 matrix = u32(row) / p.inner, inner = u32(row) % p.inner;
    const u8* x = static_cast<const u8*>(p.x) + matrix * p.x_outer + inner * p.x_stride;
    const u8* scales = static_cast<const u8*>(p.scales) + matrix * p.scales_outer + inner * p.scales_stride;
    O* out = static_cast<O*>(p.out) + matrix * p.out_outer + inner * p.out_stride;
#pragma unroll 2
    for (u32 at = lane * 16; at < p.k; at += p.width * 16) {
      float v[16];
      Format::template load<kVector>(x, at, p.k, v);
      const float unit = Format::unit(scales[at / Format::kBlock], p.scale);
#pragma unroll
      for (int i = 0; i < 16; ++i) v[i] = __fmul_rn(v[i], unit);
      store_item<kVector>(out, at, p.k, v);
    }
    start_next();
  }
}

struct PackParams {
  const u8* x;
  u8* out;
  const i32* indptr;  // of the segments' truth values, then of their bytes; null: one segment
  u64 count, bytes;
  u32 segments;
  u32 big;  // the first bit is the highest
};

// A thread makes a byte. Reads of 8 bytes where x is aligned for them.
template <class = void>
__global__ void __launch_bounds__(256) packbits(const __grid_constant__ PackParams p) {
  wait_for_previous();
  start_next();
  for (u64 at = u64(blockIdx.x) * 256 + threadIdx.x; at < p.bytes; at += u64(gridDim.x) * 256) {
    u64 from = at * 8, end = p.count;
    if (p.indptr) {
      const i32* bytes = p.indptr + p.segments + 1;
      u32 low = 0, high = p.segments;  // the last segment that starts at or before this byte
      while (high - low > 1) {
        const u32 middle = low + (high - low) / 2;
        if (u64(bytes[middle]) <= at) low = middle;
        else high = middle;
      }
      from = u64(p.indptr[low]) + (at - u64(bytes[low])) * 8;
      end = u64(p.indptr[low + 1]);
    }
    const u8* x = p.x + from;
    u32 word[2] = {0, 0};
    if (from + 8 <= end && u64(x) % 8 == 0) {
      asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(word[0]), "=r"(word[1]) : "l"(x));
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (from + i < end) word[i / 4] |= u32(x[i]) << (i % 4 * 8);
      }
    }
    u32 byte = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const u32 bit = (word[i / 4] >> (i % 4 * 8) & 0xff) != 0;
      byte |= bit << (p.big ? 7 - i : i);
    }
    p.out[at] = u8(byte);
  }
}

}  // namespace fir
