// vec.cuh: 16 bytes at a time, and the same elements one by one where memory is not aligned for it.
//
// A row is cut into chunks of kLanes elements, 16 bytes of T. A chunk is loaded as one vector if the row allows, else
// element by element into the same registers: who holds what, and so every sum, is the same in both cases.
//
// needs  sm_80
#pragma once
#include <fir/base/types.cuh>

namespace fir {

// 16 bytes in registers.
struct alignas(16) Chunk { u32 word[4]; };

template <class T> constexpr int kLanes = 16 / sizeof(T);

// Through the first-level cache, also what is read once: 8192 x 8192 bf16 on an H200, silu_and_mul 99.6 us against 109.2 by
// L1::no_allocate, rms_norm 72.1 against 75.1; hints to evict first are slower still.
__device__ __forceinline__ Chunk load(const void* p) {
  Chunk c;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(c.word[0]), "=r"(c.word[1]), "=r"(c.word[2]), "=r"(c.word[3]) : "l"(p));
  return c;
}

__device__ __forceinline__ void store(void* p, Chunk c) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
               :: "l"(p), "r"(c.word[0]), "r"(c.word[1]), "r"(c.word[2]), "r"(c.word[3]) : "memory");
}

// Makes the compiler take the chunk apart again at its next use, where it would rather hold all the floats in registers.
__device__ __forceinline__ void repack(Chunk& c) {
  asm volatile("" : "+r"(c.word[0]), "+r"(c.word[1]), "+r"(c.word[2]), "+r"(c.word[3]));
}

__device__ __forceinline__ u16 raw(f16 x) { return x.bits; }
__device__ __forceinline__ u16 raw(bf16 x) { return x.bits; }
__device__ __forceinline__ u8 raw(e4m3 x) { return x.bits; }
__device__ __forceinline__ u8 raw(e5m2 x) { return x.bits; }
__device__ __forceinline__ u32 raw(float x) { return bits_of(x); }

// Elements `at` to `at + kLanes` of a row of `len`, zeros past its end. kVector: the row starts and ends on 16 bytes.
template <bool kVector, class T>
__device__ __forceinline__ Chunk load_chunk(const T* row, u32 at, u32 len) {
  if constexpr (kVector) return load(row + at);
  Chunk c = {};
#pragma unroll
  for (int i = 0; i < kLanes<T>; ++i) {
    if (at + i < len) c.word[i * sizeof(T) / 4] |= u32(raw(row[at + i])) << (i * sizeof(T) % 4 * 8);
  }
  return c;
}

// The elements of a chunk.
template <class T>
__device__ __forceinline__ void widen(const Chunk& c, float (&out)[kLanes<T>]) {
#pragma unroll
  for (int i = 0; i < kLanes<T>; ++i) {
    u32 word = c.word[i * sizeof(T) / 4] >> (i * sizeof(T) % 4 * 8);
    if constexpr (is_same<T, float>::value) out[i] = float_of(word);
    else if constexpr (is_same<T, bf16>::value) out[i] = i % 2 ? float_of(c.word[i / 2] & 0xffff0000u) : float_of(word << 16);
    else if constexpr (sizeof(T) == 2) out[i] = to_float(T{u16(word)});
    else out[i] = to_float(T{u8(word)});
  }
}

// Rounds kCount elements to O and stores them from `at` on, none past `len`. kVector: the row starts and ends on the bytes
// that kCount elements of O take.
template <bool kVector, class O, int kCount>
__device__ __forceinline__ void store_elements(O* row, u32 at, u32 len, const float (&x)[kCount]) {
  if constexpr (kVector) {
    constexpr int kWords = kCount * sizeof(O) / 4;
    u32 word[kWords];
    if constexpr (sizeof(O) == 4) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) word[i] = bits_of(x[i]);
    } else if constexpr (sizeof(O) == 2) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) word[i] = pack2<O>(x[2 * i], x[2 * i + 1]);
    } else {
#pragma unroll
      for (int i = 0; i < kWords; ++i) word[i] = pack2<O>(x[4 * i], x[4 * i + 1]) | pack2<O>(x[4 * i + 2], x[4 * i + 3]) << 16;
    }
    if constexpr (kWords == 4) {
      store(row + at, Chunk{{word[0], word[1], word[2], word[3]}});
    } else if constexpr (kWords == 2) {
      asm volatile("st.global.v2.u32 [%0], {%1, %2};" :: "l"(row + at), "r"(word[0]), "r"(word[1]) : "memory");
    } else {
      static_assert(kWords == 1, "16, 8 or 4 bytes");
      asm volatile("st.global.u32 [%0], %1;" :: "l"(row + at), "r"(word[0]) : "memory");
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (at + i < len) row[at + i] = from_float<O>(x[i]);
  }
}

// Rows of a tensor [a, b, row]: row r starts at (r / inner) * outer_stride + (r % inner) * stride, in elements. A tensor
// whose rows are evenly apart has inner = rows, and no division is made.
__device__ __forceinline__ u64 row_offset(u32 r, u32 rows, u32 inner, u64 outer_stride, u64 stride) {
  if (inner >= rows) return r * stride;
  return r / inner * outer_stride + r % inner * stride;
}

}  // namespace fir
