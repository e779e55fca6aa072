// number.cuh: element types of attention's operands, and how they reach a 16-bit tensor-core operand.
//
// A KV type is multiplied in `Kv::Mma`: bf16 as bf16, all others as f16, in which e4m3, e5m2 and e2m1 times an e4m3
// scale are exact.
#pragma once
#include <fir/base/mma.cuh>
#include <fir/base/types.cuh>

namespace fir {

struct F32 { static constexpr int kBits = 32; };
struct F16 { static constexpr int kBits = 16; using Mma = F16; };
struct Bf16 { static constexpr int kBits = 16; using Mma = Bf16; };
struct E4m3 { static constexpr int kBits = 8; using Mma = F16; };
struct E5m2 { static constexpr int kBits = 8; using Mma = F16; };
/// Two to a byte, the first in the low nibble; an e4m3 scale for each 16.
struct E2m1 { static constexpr int kBits = 4; using Mma = F16; };

template <class A, class B> using Same = is_same<A, B>;

// The tags round as the types of base/types.cuh do.
template <> __device__ __forceinline__ u32 pack2<F16>(float lo, float hi) { return pack2<f16>(lo, hi); }
template <> __device__ __forceinline__ u32 pack2<Bf16>(float lo, float hi) { return pack2<bf16>(lo, hi); }
template <> __device__ __forceinline__ u32 pack2<E4m3>(float lo, float hi) { return pack2<e4m3>(lo, hi); }
template <> __device__ __forceinline__ u32 pack2<E5m2>(float lo, float hi) { return pack2<e5m2>(lo, hi); }

template <class T>
__device__ __forceinline__ void unpack2(unsigned x, float& lo, float& hi) {
  if constexpr (Same<T, Bf16>::value) {
    lo = __uint_as_float(x << 16);
    hi = __uint_as_float(x & 0xffff0000u);
  } else {
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h; }" : "=f"(lo), "=f"(hi) : "r"(x));
  }
}

__device__ __forceinline__ unsigned mul_f16x2(unsigned a, unsigned b) {
  unsigned d;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

/// Two fp8 in the low 16 bits of `x` as f16x2.
template <class T>
__device__ __forceinline__ unsigned fp8x2_to_f16x2(unsigned x) {
  if constexpr (Same<T, E5m2>::value) {
    return __byte_perm(x, 0, 0x1404);  // e5m2 is the high byte of an f16
  } else {
#if __CUDA_ARCH__ >= 890
    unsigned d;
    asm("{ .reg .b16 l; cvt.u16.u32 l, %1; cvt.rn.f16x2.e4m3x2 %0, l; }" : "=r"(d) : "r"(x));
    return d;
#else
    const unsigned v = __byte_perm(x, 0, 0x1404);
    const unsigned d = mul_f16x2((v & 0x80008000u) | ((v >> 1) & 0x3f803f80u), 0x5c005c00u);  // times 2^8: exact
    // 0x7f and 0xff are NaN, and would be +-480.
    const unsigned lo = (v & 0x7f00u) == 0x7f00u ? 0x7fffu : 0, hi = (v & 0x7f000000u) == 0x7f000000u ? 0x7fff0000u : 0;
    return d | lo | hi;
#endif
  }
}

/// Four fp8 in `w` as two f16x2, the lower two in `lo`. On sm_89+ two instructions: the second cvt reads the high half.
template <class T>
__device__ __forceinline__ void fp8x4_to_f16x4(unsigned w, unsigned& lo, unsigned& hi) {
#if __CUDA_ARCH__ >= 890
  if constexpr (Same<T, E4m3>::value) {
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h; }"
        : "=r"(lo), "=r"(hi)
        : "r"(w));
    return;
  }
#endif
  lo = fp8x2_to_f16x2<T>(w & 0xffffu);
  hi = fp8x2_to_f16x2<T>(w >> 16);
}

/// The e2m1 in bits `4 i` and `16 + 4 i` of `x`, times 2^-14, as f16x2. Three bits of a code, moved to the low
/// exponent bits and the high mantissa bit, read as f16 are its value times 2^-14, subnormals included.
template <int i>
__device__ __forceinline__ unsigned e2m1_to_f16x2(unsigned x) {
  constexpr int kSign = 12 - 4 * i, kRest = 9 - 4 * i;
  const unsigned sign = x << kSign;
  const unsigned rest = kRest >= 0 ? x << (kRest & 31) : x >> (-kRest & 31);
  return (sign & 0x80008000u) | (rest & 0x0e000e00u);
}

/// What an e4m3 block scale multiplies `e2m1_to_f16x2` by, so that the product is 2^-7 of the true value: the scale
/// times 2^7, at most 57344. All products are multiples of 2^-17 with at most 6 significant bits: exact in f16.
constexpr float kE2m1Rest = 128.0f;
__device__ __forceinline__ unsigned e2m1_scale(unsigned lo, unsigned hi) {
  return mul_f16x2(fp8x2_to_f16x2<E4m3>(lo | hi << 8), 0x58005800u);
}

/// One number at element `i` of a row, of any type; `scales` is the row's block scales (E2m1 alone).
template <class T>
__device__ __forceinline__ float load_one(const unsigned char* row, int i, const unsigned char* scales = nullptr) {
  if constexpr (Same<T, F32>::value) {
    return reinterpret_cast<const float*>(row)[i];
  } else if constexpr (T::kBits == 16) {
    float lo, hi;
    unpack2<T>(reinterpret_cast<const unsigned short*>(row)[i], lo, hi);
    return lo;
  } else if constexpr (T::kBits == 8) {
    float lo, hi;
    unpack2<F16>(fp8x2_to_f16x2<T>(row[i]), lo, hi);
    return lo;
  } else {
    float lo, hi;
    const unsigned code = (row[i >> 1] >> ((i & 1) * 4)) & 15;
    unpack2<F16>(mul_f16x2(e2m1_to_f16x2<0>(code), e2m1_scale(scales[i >> 4], 0)), lo, hi);
    return lo * kE2m1Rest;
  }
}

/// `kCount` (1, 2 or 4) words from an address aligned to as many.
template <int kCount>
__device__ __forceinline__ void load_words(const unsigned char* p, unsigned (&w)[kCount]) {
  if constexpr (kCount == 1) {
    w[0] = *reinterpret_cast<const unsigned*>(p);
  } else if constexpr (kCount == 2) {
    const uint2 v = *reinterpret_cast<const uint2*>(p);
    w[0] = v.x, w[1] = v.y;
  } else {
    const uint4 v = *reinterpret_cast<const uint4*>(p);
    w[0] = v.x, w[1] = v.y, w[2] = v.z, w[3] = v.w;
  }
}

/// `kCount` (2, 4 or 8) numbers from an address aligned to as many elements.
template <class T, int kCount>
__device__ __forceinline__ void load_some(const unsigned char* p, float (&x)[kCount]) {
  if constexpr (T::kBits == 16) {
    unsigned w[kCount / 2];
    load_words(p, w);
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) unpack2<T>(w[i], x[2 * i], x[2 * i + 1]);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = load_one<T>(p, i);
  }
}

/// Four numbers to an address aligned to as many elements.
template <class T>
__device__ __forceinline__ void store4(unsigned char* p, const float (&x)[4]) {
  if constexpr (Same<T, F32>::value) {
    *reinterpret_cast<float4*>(p) = make_float4(x[0], x[1], x[2], x[3]);
  } else {
    *reinterpret_cast<uint2*>(p) = make_uint2(pack2<T>(x[0], x[1]), pack2<T>(x[2], x[3]));
  }
}

template <class T>
__device__ __forceinline__ void mma(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  if constexpr (Same<T, Bf16>::value) mma_bf16(d, a, b0, b1);
  else mma_f16(d, a, b0, b1);
}

}  // namespace fir
