// fp4.cuh: e2m1 codes, two to a byte, and the scales of their blocks.
//
//   e2m1   0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives; the first of a byte is in its low half
//   e8m0   2^(bits - 127); 0xff is NaN
//
// needs  sm_80; sm_100 on has an instruction for e2m1, which is not used: it differs in what NaN becomes
// twins  src/tensor/dtype.rs
#pragma once
#include <fir/base/types.cuh>

namespace fir {

struct e2m1x2 { u8 bits; };

// Code of the nearest e2m1, of two equally near the even one; past 6 it is 6, and 0 for NaN.
__device__ __forceinline__ u32 to_e2m1(float x) {
  const float a = fabsf(x);
  const u32 low = u32(a > 0.25f) + u32(a >= 0.75f) + u32(a > 1.25f) + u32(a >= 1.75f);
  const u32 high = u32(a > 2.5f) + u32(a >= 3.5f) + u32(a > 5.f);
  return (low + high) | (x != x ? 0u : bits_of(x) >> 31 << 3);
}

// Eight codes in a word.
__device__ __forceinline__ u32 pack_e2m1(const float* x) {
  u32 word = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) word |= to_e2m1(x[i]) << (4 * i);
  return word;
}

// The number of a code: twice 0, 1, 2, 3, 4, 6, 8, 12, a hexadecimal digit each.
__device__ __forceinline__ float from_e2m1(u32 code) {
  const float magnitude = 0.5f * float(0xc8643210u >> (4 * (code & 7)) & 15);
  return code & 8 ? -magnitude : magnitude;
}

// The least power of two that is not below x, from 2^-127 to 2^127; NaN for NaN.
__device__ __forceinline__ u32 e8m0_at_least(float x) {
  const u32 bits = bits_of(x), up = (bits + 0x7fffffu) >> 23;
  const u32 code = bits <= 1u << 22 ? 0u : up < 254u ? up : 254u;
  return x != x ? 0xffu : x <= 0.f ? 0u : code;
}

__device__ __forceinline__ float from_e8m0(u32 code) {
  return code == 0xff ? float_of(0x7fc00000u) : code == 0 ? float_of(1u << 22) : float_of(code << 23);
}

// A block of NVFP4: the e4m3 scale for its largest magnitude, and what its numbers are divided by, which is infinite for a
// block too small for any scale.
__device__ __forceinline__ u8 nvfp4_scale(float largest, float scale, float& divisor) {
  const e4m3 code = from_float<e4m3>(__fdiv_rn(largest, __fmul_rn(6.f, scale)));
  const float unit = __fmul_rn(to_float(code), scale);
  divisor = unit == 0.f ? float_of(0x7f800000u) : unit;
  return code.bits;
}

}  // namespace fir
