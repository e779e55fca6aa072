// append.cuh: writes the keys and values (or latent rows) of new tokens into their pages.
//
//   cache[slot(t)] = x[t] / scale, rounded to the cache's type; fp8 saturates
//   NVFP4, per 16: block_scale = e4m3(max|x| / (6 scale)), codes e2m1(x / (block_scale scale))
//
// grid   (ceil(nnz / kTokens))
// block  256         a thread: kEach elements of one head, of each of the block's tokens; so kTokens loads under way
// smem   kTokens places, each found by one thread: a division by page_size per element would cost 20 us of 8 x 2048
// needs  sm_80 (conversions in software below sm_89)
//
// reads  every token's rows and place
// writes the token's slot; nothing where there is none: a negative slot, a request or page that is not there
// twins  src/ops/page.rs, src/cpu/page.rs
#pragma once
#include <fir/attention/number.cuh>

namespace fir {

/// One of the two tensors that are appended to; strides in bytes. `heads` is 1 for latent rows.
struct AppendTensor {
  const unsigned char* from;
  unsigned char* to;
  unsigned char* block_scales;
  long long from_token, from_head, to_page, to_row, to_head, scales_page, scales_row, scales_head;
  int heads, dim;
  float scale;
  int pad;
};

struct AppendParams {
  AppendTensor tensors[2];
  /// `page * page_size + offset` of each token; null: from what follows.
  const void* slots;
  const void* batch_indices;
  const void* positions;
  /// The page table, CSR.
  const int* indptr;
  const int* indices;
  unsigned nnz, batch, num_pages, page_size;
  /// The integers above are 64 bits wide (slots; batch_indices; positions).
  int wide_slots, wide_indices, wide_positions;
  int pad;
};

/// Code of the nearest e2m1, of two equally near the even one; 0 for NaN.
__device__ __forceinline__ unsigned to_e2m1(float x) {
  const float a = fabsf(x);
  const unsigned code = unsigned(a > 0.25f) + unsigned(a >= 0.75f) + unsigned(a > 1.25f) + unsigned(a >= 1.75f) + unsigned(a > 2.5f) +
                        unsigned(a >= 3.5f) + unsigned(a > 5.0f);
  return x != x ? 0 : code | (__float_as_uint(x) >> 31 << 3);
}

__device__ __forceinline__ long long load_integer(const void* p, unsigned i, bool wide) {
  return wide ? static_cast<const long long*>(p)[i] : static_cast<const int*>(p)[i];
}

/// Page of a token (-1: none) and row within it.
__device__ __forceinline__ int2 place_of(const AppendParams& p, unsigned token) {
  const int2 none = make_int2(-1, 0);
  if (token >= p.nnz) return none;
  if (p.slots != nullptr) {
    const long long slot = load_integer(p.slots, token, p.wide_slots);
    if (slot < 0 || slot >= static_cast<long long>(p.num_pages) * p.page_size) return none;
    return make_int2(int(slot / p.page_size), int(slot % p.page_size));
  }
  const long long request = load_integer(p.batch_indices, token, p.wide_indices), position = load_integer(p.positions, token, p.wide_positions);
  if (request < 0 || request >= p.batch || position < 0 || position > 0x7fffffff) return none;
  const int first = __ldg(p.indptr + request), end = __ldg(p.indptr + request + 1);
  const unsigned page = unsigned(position) / p.page_size, row = unsigned(position) % p.page_size;
  if (end <= first || page >= unsigned(end - first)) return none;
  const unsigned id = unsigned(__ldg(p.indices + first + page));
  return id < p.num_pages ? make_int2(int(id), int(row)) : none;
}

/// `kEach` elements as they come: 16-bit or f32.
template <class T, int kEach>
__device__ __forceinline__ void load_each(const unsigned char* from, uint4 (&raw)[kEach * T::kBits / 128]) {
#pragma unroll
  for (int i = 0; i < kEach * T::kBits / 128; ++i) raw[i] = __ldcs(reinterpret_cast<const uint4*>(from) + i);
}

template <class T, int kEach>
__device__ __forceinline__ void widen(const uint4 (&raw)[kEach * T::kBits / 128], float (&x)[kEach]) {
#pragma unroll
  for (int i = 0; i < kEach * T::kBits / 128; ++i) {
    const unsigned w[4] = {raw[i].x, raw[i].y, raw[i].z, raw[i].w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if constexpr (T::kBits == 32) x[4 * i + j] = __uint_as_float(w[j]);
      else unpack2<T>(w[j], x[8 * i + 2 * j], x[8 * i + 2 * j + 1]);
    }
  }
}

/// The elements in the cache's type, at a place aligned to their size (kEach > 1).
template <class TO, int kEach>
__device__ __forceinline__ void put(const AppendTensor& t, unsigned char* to, unsigned char* block_scale, float (&x)[kEach]) {
  if constexpr (TO::kBits != 4) {
    if (t.scale != 1.0f) {
#pragma unroll
      for (int i = 0; i < kEach; ++i) x[i] = __fdiv_rn(x[i], t.scale);
    }
    if constexpr (TO::kBits == 32) {
      if constexpr (kEach == 1) reinterpret_cast<float*>(to)[0] = x[0];
      else
#pragma unroll
        for (int i = 0; i < kEach / 4; ++i) reinterpret_cast<float4*>(to)[i] = make_float4(x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]);
    } else if constexpr (TO::kBits == 16) {
      if constexpr (kEach == 1) reinterpret_cast<unsigned short*>(to)[0] = static_cast<unsigned short>(pack2<TO>(x[0], 0.0f));
      else
        *reinterpret_cast<uint4*>(to) = make_uint4(pack2<TO>(x[0], x[1]), pack2<TO>(x[2], x[3]), pack2<TO>(x[4], x[5]), pack2<TO>(x[6], x[7]));
    } else {
      if constexpr (kEach == 1) to[0] = static_cast<unsigned char>(pack2<TO>(x[0], 0.0f));
      else
        *reinterpret_cast<uint2*>(to) = make_uint2(pack2<TO>(x[0], x[1]) | pack2<TO>(x[2], x[3]) << 16,
                                                   pack2<TO>(x[4], x[5]) | pack2<TO>(x[6], x[7]) << 16);
    }
  } else {
    float top = 0.0f;
    bool nan = false;
#pragma unroll
    for (int i = 0; i < kEach; ++i) top = fmaxf(top, fabsf(x[i])), nan = nan || x[i] != x[i];
    // A NaN makes the block's scale NaN: a fault that shows.
    const unsigned code = pack2<E4m3>(nan ? __int_as_float(0x7fffffff) : __fdiv_rn(top, 6.0f * t.scale), 0.0f) & 0xff;
    const unsigned char byte = static_cast<unsigned char>(code);
    float unit = load_one<E4m3>(&byte, 0) * t.scale;
    // A block too small for any scale is zero.
    unit = unit == 0.0f ? __int_as_float(0x7f800000) : unit;
    *block_scale = byte;
#pragma unroll
    for (int i = 0; i < kEach / 2; ++i) {
      to[i] = static_cast<unsigned char>(to_e2m1(__fdiv_rn(x[2 * i], unit)) | to_e2m1(__fdiv_rn(x[2 * i + 1], unit)) << 4);
    }
  }
}

/// kEach: 8 (16 for NVFP4) with rows aligned to 16 bytes and dims multiples of it; 1 for any other rows.
template <class T, class TO, int kEach, int kTokens>
__global__ void __launch_bounds__(256) append(const __grid_constant__ AppendParams p) {
  constexpr bool kVector = kEach > 1;
  constexpr int kRaw = kVector ? kEach * T::kBits / 128 : 1;
  __shared__ int2 places[kTokens];
  const unsigned first = blockIdx.x * kTokens;
  bool placed = false;
  const int counts[2] = {p.tensors[0].heads * (p.tensors[0].dim / kEach), p.tensors[1].heads * (p.tensors[1].dim / kEach)};
  // At least one turn each, as all must meet at the barrier.
  for (int work = threadIdx.x; work < counts[0] + counts[1] || !placed; work += 256) {
    const bool mine = work < counts[0] + counts[1];
    const int which = work >= counts[0];
    const AppendTensor& t = p.tensors[which];
    const int index = which ? work - counts[0] : work, per_head = max(t.dim / kEach, 1);
    const int head = index / per_head, column = index % per_head * kEach;
    uint4 raw[kTokens][kRaw];
    float single[kTokens];
    if (mine) {
#pragma unroll
      for (int i = 0; i < kTokens; ++i) {
        if (first + i < p.nnz) {
          const unsigned char* from = t.from + (first + i) * t.from_token + head * t.from_head + column * (T::kBits / 8);
          if constexpr (kVector) load_each<T, kEach>(from, raw[i]);
          else single[i] = load_one<T>(from, 0);
        }
      }
    }
    if (!placed) {  // while the rows are on their way
      if (threadIdx.x < kTokens) places[threadIdx.x] = place_of(p, first + threadIdx.x);
      __syncthreads();
      placed = true;
    }
    if (!mine) break;
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      const int page = places[i].x, row = places[i].y;
      if (page < 0) continue;
      unsigned char* to = t.to + page * t.to_page + row * t.to_row + head * t.to_head + column * TO::kBits / 8;
      unsigned char* scale = TO::kBits == 4 ? t.block_scales + page * t.scales_page + row * t.scales_row + head * t.scales_head + column / 16 : nullptr;
      float x[kEach];
      if constexpr (kVector) {
        if constexpr (Same<T, TO>::value) {
          if (t.scale == 1.0f) {
#pragma unroll
            for (int j = 0; j < kRaw; ++j) reinterpret_cast<uint4*>(to)[j] = raw[i][j];
            continue;
          }
        }
        widen<T, kEach>(raw[i], x);
      } else {
        x[0] = single[i];
      }
      put<TO, kEach>(t, to, scale, x);
    }
  }
}

}  // namespace fir
