// types.cuh: the numbers that kernels read and write, by their bits. No CUDA header is needed.
//
//   f16, bf16, e4m3, e5m2   storage; arithmetic is in float
//   to_float(x)             exact
//   from_float<T>(x)        nearest, ties to even; fp8 saturates (e5m2 keeps infinities), NaN stays NaN
//
// needs  sm_80; sm_89 on has instructions for fp8, below it the same results come by bits
// twins  src/tensor/dtype.rs
#pragma once

namespace fir {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;

struct f16 { u16 bits; };
struct bf16 { u16 bits; };
struct e4m3 { u8 bits; };
struct e5m2 { u8 bits; };

template <class A, class B> struct is_same { static constexpr bool value = false; };
template <class A> struct is_same<A, A> { static constexpr bool value = true; };

__device__ __forceinline__ u32 bits_of(float x) { return __float_as_uint(x); }
__device__ __forceinline__ float float_of(u32 x) { return __uint_as_float(x); }

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16 x) { return float_of(u32(x.bits) << 16); }
__device__ __forceinline__ float to_float(f16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}
// e5m2 is the upper half of f16.
__device__ __forceinline__ float to_float(e5m2 x) { return to_float(f16{u16(x.bits << 8)}); }
// The bits at f32's place times 2^120 are the value, subnormals too; the code 0x7f is NaN.
__device__ __forceinline__ float to_float(e4m3 x) {
  u32 magnitude = x.bits & 0x7f, sign = u32(x.bits & 0x80) << 24;
  float y = float_of(sign | magnitude << 20) * float_of(247u << 23);
  return magnitude == 0x7f ? float_of(sign | 0x7fc00000u) : y;
}

// Largest finite value; only asked of fp8.
template <class T> struct largest;
template <> struct largest<e4m3> { static constexpr float value = 448.f; };
template <> struct largest<e5m2> { static constexpr float value = 57344.f; };

// Rounds |x| to kMan bits of mantissa and kExp of exponent; may exceed the format. As `round_to` of dtype.rs.
template <int kExp, int kMan>
__device__ __forceinline__ u32 round_to(float x) {
  constexpr u32 kBias = (1u << (kExp - 1)) - 1, kShift = 23 - kMan, kShifter = (127 + 24 - kBias - kMan) << 23;
  u32 bits = bits_of(x) & 0x7fffffffu;
  u32 subnormal = bits_of(__fadd_rn(float_of(bits), float_of(kShifter))) - kShifter;
  u32 normal = ((bits + ((1u << (kShift - 1)) - 1) + ((bits >> kShift) & 1)) >> kShift) - ((127 - kBias) << kMan);
  return bits < ((128 - kBias) << 23) ? subnormal : normal;
}

template <class T> struct Rounded;
template <> struct Rounded<float> {
  static __device__ __forceinline__ float from(float x) { return x; }
};
template <> struct Rounded<f16> {
  static __device__ __forceinline__ f16 from(float x) {
    f16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
  }
};
template <> struct Rounded<bf16> {
  static __device__ __forceinline__ bf16 from(float x) {
    bf16 y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
  }
};
// Two to a register: the instruction that fp8 has, and 16-bit types are twice as fast in. `lo` is the lower half.
template <class T> __device__ __forceinline__ u32 pack2(float lo, float hi);
template <> __device__ __forceinline__ u32 pack2<f16>(float lo, float hi) {
  u32 y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo));
  return y;
}
template <> __device__ __forceinline__ u32 pack2<bf16>(float lo, float hi) {
  u32 y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo));
  return y;
}
template <> __device__ __forceinline__ u32 pack2<e4m3>(float lo, float hi) {
#if __CUDA_ARCH__ >= 890
  u16 y;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(y) : "f"(hi), "f"(lo));
  return y;
#else
  auto one = [](float x) {
    u32 code = round_to<4, 3>(x);
    code = x != x ? 0x7f : (code < 0x7e ? code : 0x7e);
    return ((bits_of(x) >> 24) & 0x80) | code;
  };
  return one(lo) | one(hi) << 8;
#endif
}
// satfinite would make infinities finite, which dtype.rs keeps: the bits are mended after.
template <> __device__ __forceinline__ u32 pack2<e5m2>(float lo, float hi) {
  auto infinite = [](float x) { return (bits_of(x) & 0x7fffffffu) == 0x7f800000u; };
#if __CUDA_ARCH__ >= 890
  u16 y;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(y) : "f"(hi), "f"(lo));
  u32 out = y;
  if (infinite(lo)) out = (out & 0xff80) | 0x7c;
  if (infinite(hi)) out = (out & 0x80ff) | 0x7c00;
  return out;
#else
  auto one = [&](float x) {
    u32 code = round_to<5, 2>(x);
    code = code < 0x7b ? code : 0x7b;
    code = x != x ? 0x7f : (infinite(x) ? 0x7c : code);
    return ((bits_of(x) >> 24) & 0x80) | code;
  };
  return one(lo) | one(hi) << 8;
#endif
}
template <> struct Rounded<e4m3> {
  static __device__ __forceinline__ e4m3 from(float x) { return {u8(pack2<e4m3>(x, 0.f))}; }
};
template <> struct Rounded<e5m2> {
  static __device__ __forceinline__ e5m2 from(float x) { return {u8(pack2<e5m2>(x, 0.f))}; }
};

template <class T> __device__ __forceinline__ T from_float(float x) { return Rounded<T>::from(x); }

}  // namespace fir
