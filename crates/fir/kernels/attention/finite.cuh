// finite.cuh: values that are infinite or NaN, in tiles where a mask shows a position to one row and hides it from another.
//
// A weight of 0 times such a value is NaN in a product of matrices. So in those tiles, the only ones with both kinds of
// weights, values are looked at first (8 loads of 16 bytes per lane and 4 KB); what is not finite is added element by
// element to the rows that see it, and is 0 for the product.
#pragma once
#include <fir/attention/number.cuh>
#include <fir/attention/paged_kv.cuh>

namespace fir {

/// The sign bits of those elements of `w` that are not finite; e4m3 has NaN alone, e2m1 none.
template <class T>
__device__ __forceinline__ unsigned not_finite(unsigned w) {
  if constexpr (T::kBits == 4) return 0;
  // The exponent (e4m3: and the mantissa), all ones, carries into the sign's place when one is added.
  constexpr unsigned kOnes = Same<T, Bf16>::value ? 0x7f807f80u : Same<T, F16>::value ? 0x7c007c00u : Same<T, E5m2>::value ? 0x7c7c7c7cu : 0x7f7f7f7fu;
  constexpr unsigned kOne = Same<T, Bf16>::value ? 0x00800080u : Same<T, F16>::value ? 0x04000400u : Same<T, E5m2>::value ? 0x04040404u : 0x01010101u;
  return ((w & kOnes) + kOne) & (T::kBits == 16 ? 0x80008000u : 0x80808080u);
}

template <class T>
__device__ __forceinline__ bool not_finite(const uint4& x) {
  return (not_finite<T>(x.x) | not_finite<T>(x.y) | not_finite<T>(x.z) | not_finite<T>(x.w)) != 0;
}

/// A tile of `kRows` value rows in shared memory, and their block scales (E2m1 alone). `Rows` says where a row's chunks are.
template <class T, int kRows, int kChunks, class Rows = SwizzledRows<kChunks>>
struct ValueTile {
  static_assert(kChunks <= 32);
  static constexpr int kScales = T::kBits == 4 ? 2 * kChunks : 0;
  unsigned char *values, *scales;

  /// Whether chunks `thread`, `thread + kThreads`, ... hold anything that is not finite.
  template <int kThreads>
  __device__ __forceinline__ bool strange(int thread) const {
    bool any = false;
    if constexpr (T::kBits == 4) {
      for (int i = thread; i < kRows * kScales / 4; i += kThreads) any |= not_finite<E4m3>(reinterpret_cast<const unsigned*>(scales)[i]) != 0;
    } else {
#pragma unroll
      for (int i = 0; i < kRows * kChunks; i += kThreads) {
        if (kRows * kChunks % kThreads == 0 || i + thread < kRows * kChunks) any |= not_finite<T>(reinterpret_cast<const uint4*>(values)[i + thread]);
      }
    }
    return any;
  }

  /// Makes them 0.
  template <int kThreads>
  __device__ __forceinline__ void clear(int thread) const {
    constexpr int kWords = T::kBits == 4 ? kRows * kScales / 4 : kRows * kChunks * 4;
    unsigned* words = reinterpret_cast<unsigned*>(T::kBits == 4 ? scales : values);
    for (int i = thread; i < kWords; i += kThreads) {
      const unsigned w = words[i];
      if constexpr (T::kBits == 16) words[i] = w & ~((not_finite<T>(w) >> 15) * 0xffffu);
      else if constexpr (T::kBits == 8) words[i] = w & ~((not_finite<T>(w) >> 7) * 0xffu);
      else words[i] = w & ~((not_finite<E4m3>(w) >> 7) * 0xffu);
    }
  }

  /// A warp adds them to its rows, 16 for each of `kM` tiles of accumulators: `o` is [kM][kOut][4], `s` [kM][kRows / 8][4]
  /// (mma.cuh), `weight(x, i, h, j)` what a score of x weighs in row h of tile i at position j.
  template <int kM, int kOut, class F>
  __device__ __forceinline__ void add(float* o, const float* s, F weight) const {
    constexpr int kN = kRows / 8;
    // Indexed as the kernel runs, so in local memory: unrolled for registers, this would be half of a kernel's text.
    float sum[kM * kOut * 4], score[kM * kN * 4];
#pragma unroll
    for (int i = 0; i < kM * kOut * 4; ++i) sum[i] = o[i];
#pragma unroll
    for (int i = 0; i < kM * kN * 4; ++i) score[i] = s[i];
    const int lane = threadIdx.x & 31;
#pragma unroll 1
    for (int j = 0; j < kRows; ++j) {
      bool any = false;
      if constexpr (T::kBits == 4) {
        if (lane < kScales) any = not_finite<E4m3>(scales[j * kScales + lane]) != 0;
      } else {
        if (lane < kChunks) any = not_finite<T>(*reinterpret_cast<const uint4*>(values + Rows::offset(j, lane)));
      }
      if (!__any_sync(~0u, any)) continue;
#pragma unroll
      for (int i = 0; i < kM; ++i) {
        float w[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float x = __shfl_sync(~0u, score[(i * kN + j / 8) * 4 + 2 * h + (j & 1)], (lane & 28) | (j & 7) / 2);
          w[h] = weight(x, i, h, j);
        }
        // Column of o[t][c]: a lane's accumulators of a chunk are as many neighbours as 4 bytes hold (decode.cuh).
        constexpr int kPer = 32 / T::kBits, kEach = kPer / 2;
#pragma unroll 1
        for (int t = 0; t < 2 * kOut; ++t) {
          const int chunk = t / 2 / kEach, c = t & 1, e = kPer * (lane & 3) + t / 2 % kEach + c * kEach;
          const float v = load_one<T>(values + Rows::offset(j, chunk), e, scales + j * kScales + 2 * chunk);
          if (fabsf(v) < __int_as_float(0x7f800000)) continue;
          float* to = sum + (i * kOut + t / 2) * 4 + c;
          if (w[0] != 0.0f) to[0] += w[0] * v;
          if (w[1] != 0.0f) to[2] += w[1] * v;
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kM * kOut * 4; ++i) o[i] = sum[i];
  }
};

}  // namespace fir
