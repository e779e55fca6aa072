// gemm.cuh: products of rows by weights stored as a linear layer's are, through mma.sync.
//
//   out[i, j] = then(sum_l x[i, l] * w[j, l])
//
// 16-bit operands are multiplied as they are; fp8 becomes f16 (bf16 where x is bf16) on its way from shared memory to
// the registers, exactly, so sums have f32's precision whatever the type. Its scales meet the sums: those of whole rows
// at the end, those of parts (a multiple of 128 columns) where a part ends.
//
// Tensor cores cut what they add to a sum off instead of rounding it: at k = 4096 a sum in f32 is up to 5 times as far off
// as one rounded at every step (5e-7 of the sum of |x w|). Nothing of that is left in an output of 16 bits; for one of f32
// (kExact) the sums of 128 columns are added up outside.
//
// An output is one chain of m16n8k16 instructions along k (or along 128 columns of it), in order, in every tile below: its
// bits depend on its row of x and its row of w alone, not on how many rows there are. Hence no split along k; few rows fill the device by narrow
// tiles instead, and are bound by reading the weights.
//
// grid   (row tiles * column tiles, batch)   16 row tiles beside each other, then the next columns
// block  a warp per kWarpRows x kWarpColumns of the tile
// smem   kStages * (kRows * x + kColumns * w) bytes of kDepth columns, 16-byte units swizzled by row
// needs  sm_80
//
// reads  x, w, scales, bias; out where it is added to; never past a row's k
// writes out, rows of the tile's group alone
// twins  src/cpu/gemm/mod.rs, src/reference/gemm/mod.rs
#pragma once
#include <fir/base/cp_async.cuh>
#include <fir/base/mma.cuh>
#include <fir/gemm_common.cuh>

namespace fir {

template <int R, int C, int D, int WR, int WC, int S, int B>
struct GemmTile {
  static constexpr int kRows = R, kColumns = C, kDepth = D, kWarpRows = WR, kWarpColumns = WC, kStages = S, kBlocks = B;
  static constexpr int kThreads = 32 * (R / WR) * (C / WC);
};

// Which type products are made in.
template <class X, class W> struct MmaType { using type = f16; };
template <class W> struct MmaType<bf16, W> { using type = bf16; };

template <class T>
__device__ __forceinline__ void mma_16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  if constexpr (is_same<T, bf16>::value) mma_bf16(d, a, b0, b1);
  else mma_f16(d, a, b0, b1);
}

// Whether fp8 is converted by an instruction.
#if __CUDA_ARCH__ >= 890
constexpr bool kHasFp8 = true;
#else
constexpr bool kHasFp8 = false;
#endif

// Four fp8 as 16-bit numbers, the first two in `lo`; exact.
template <class T, class F>
__device__ __forceinline__ void expand4(u32 x, u32& lo, u32& hi) {
  if constexpr (is_same<T, f16>::value && is_same<F, e5m2>::value) {
    lo = __byte_perm(x, 0, 0x1404);  // the upper half of an f16
    hi = __byte_perm(x, 0, 0x3424);
  } else {
    if constexpr (is_same<T, bf16>::value && (is_same<F, e5m2>::value || kHasFp8)) {
      // By way of f16 and f32, which hold every code: 8 instructions where the bits below take 20.
      u32 half[2];
      expand4<f16, F>(x, half[0], half[1]);
      auto next = [](u32 h) {
        u32 y;
        asm("{ .reg .b16 l, h; .reg .f32 a, b; mov.b32 {l, h}, %1; cvt.f32.f16 a, l; cvt.f32.f16 b, h; cvt.rn.bf16x2.f32 %0, b, a; }" : "=r"(y) : "r"(h));
        return y;
      };
      lo = next(half[0]), hi = next(half[1]);
      return;
    }
#if __CUDA_ARCH__ >= 890
    if constexpr (is_same<T, f16>::value) {
      asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h; }" : "=r"(lo), "=r"(hi) : "r"(x));
      return;
    }
#endif
    // The bits moved to the place of exponent and mantissa, times a power of two: subnormals come out right too.
    constexpr int kBias = is_same<F, e4m3>::value ? 7 : 15, kMan = is_same<F, e4m3>::value ? 3 : 2;
    constexpr bool kBf16 = is_same<T, bf16>::value;
    constexpr int kShift = kBf16 ? 7 - kMan : 10 - kMan;  // how far the code, in the low byte, goes up
    constexpr u32 kMask = (0x7fu << kShift) * 0x10001u;
    constexpr u32 kScale = kBf16 ? u32(127 + 127 - kBias) << 7 : u32(15 + 15 - kBias) << 10;
    auto one = [&](u32 v) {  // a code in the low byte of either half
      u32 y, bits = ((v << 8) & 0x80008000u) | ((v << kShift) & kMask);
      if constexpr (kBf16) asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(bits), "r"(kScale * 0x10001u), "r"(0x80008000u));
      else asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(bits), "r"(kScale * 0x10001u));
      return y;
    };
    // Codes that are no numbers (e4m3's 0x7f, e5m2's largest exponent) get the exponent of those; the mantissa is right.
    constexpr u32 kTop = is_same<F, e4m3>::value ? 0x7f7f7f7fu : 0x7c7c7c7cu, kUnit = is_same<F, e4m3>::value ? 0x01010101u : 0x04040404u;
    const u32 none = ((x & kTop) + kUnit) & 0x80808080u;
    constexpr u32 kFill = kBf16 ? 0xff : 0xf8;  // times 0x80: all ones of the exponent
    lo = one(__byte_perm(x, 0, 0x4140)) | __byte_perm(none, 0, 0x4140) * kFill;
    hi = one(__byte_perm(x, 0, 0x4342)) | __byte_perm(none, 0, 0x4342) * kFill;
  }
}

// A thread's share of copying kRows rows of kRowBytes to shared memory, 16 bytes at a time: the same unit of several rows.
// A row that there is not is left as it is if kSkip, and else is a copy of the first: what it gives is not written.
template <int kRows, int kRowBytes, int kThreads, bool kSkip>
struct Copies {
  static constexpr u32 kUnits = kRowBytes / 16, kCount = kRows * kUnits / kThreads, kApart = kThreads / kUnits;
  static_assert(kRows * kUnits % kThreads == 0 && kThreads % kUnits == 0 && kCount <= 32 && kApart % 4 == 0, "whole rows");
  u32 from[kCount];  // in units of 16 bytes
  u32 to[2];         // of even and odd copies: swizzles of rows 4 apart differ, of rows 8 apart do not
  u32 mask;          // rows that there are

  // `stride` is a multiple of 16 bytes, and no row lies 2^36 bytes on.
  __device__ __forceinline__ Copies(const u32* rows, u64 stride) : mask(0) {
    const u32 row = threadIdx.x / kUnits, unit = threadIdx.x % kUnits;
#pragma unroll
    for (u32 i = 0; i < kCount; ++i) {
      const u32 r = rows[row + i * kApart];
      from[i] = u32((r == kNone ? rows[0] : r) * stride / 16) + unit;
      mask |= u32(r != kNone) << i;
      asm volatile("" : "+r"(from[i]));  // kept, and not computed anew every time
    }
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
      to[i] = (row + i * kApart) * kRowBytes + (unit ^ ((row + i * kApart) & 7)) * 16;
      asm volatile("" : "+r"(to[i]));
    }
  }
  __device__ __forceinline__ void start(const u8* source, u32 base) const {
#pragma unroll
    for (u32 i = 0; i < kCount; ++i) {
      const u32 at = base + (kApart % 8 == 0 ? to[0] + i * kApart * kRowBytes : to[i % 2] + i / 2 * 2 * kApart * kRowBytes);
      if (!kSkip || (mask >> i & 1)) cp_async_16(at, source + u64(from[i]) * 16);
    }
  }
};

// The fragments of a warp come in two ways. ldmatrix of 16-bit rows puts columns 2q, 2q + 1 and 8 + 2q, 9 + 2q of a step's
// 16 into lane q's registers. Of fp8 rows it puts columns 4q to 4q + 3, which are taken for the same places: the sum of a
// step does not mind, as long as x is read likewise.
template <class X, class W, class Tile, bool kGate, bool kVector, bool kExact>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks) gemm(const __grid_constant__ GemmParams p) {
  using T = typename MmaType<X, W>::type;
  constexpr int kRows = Tile::kRows, kColumns = Tile::kColumns, kDepth = Tile::kDepth, kStages = Tile::kStages;
  constexpr int kThreads = Tile::kThreads, kMt = Tile::kWarpRows / 16, kNt = Tile::kWarpColumns / 8;
  constexpr int kWarpsAcross = kColumns / Tile::kWarpColumns;
  constexpr bool kScaled = sizeof(W) == 1, kTwice = kScaled || kExact;
  constexpr int kXRow = kDepth * sizeof(X), kWRow = kDepth * sizeof(W);  // bytes of a row in shared memory
  constexpr int kStage = kRows * kXRow + kColumns * kWRow;
  static_assert(kXRow >= 128 && kWRow >= 128 && kNt % 2 == 0, "8 units to swizzle, columns in pairs of 8");
  extern __shared__ __align__(128) u8 smem[];
  __shared__ u32 x_rows[kRows], w_rows[kColumns];  // kNone: no such row
  wait_for_previous();

  const Place place = find_place<kRows, kGate ? kColumns / 2 : kColumns>(p, blockIdx.x, blockIdx.y);
  if (place.first >= place.end) return;
  const u8* x = static_cast<const u8*>(p.x) + blockIdx.y * p.x_batch * sizeof(X);
  const u8* w = static_cast<const u8*>(p.w) + place.weight * p.w_batch * sizeof(W);
  const u32 tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
  const u32 warp_row = warp / kWarpsAcross * Tile::kWarpRows, warp_column = warp % kWarpsAcross;
  list_rows<kRows, kColumns, kGate, Tile::kWarpColumns, kThreads>(p, place, x_rows, w_rows);
  __syncthreads();

  // Rows of one operand, `kDepth` columns from `k0` on: those past k are zeros.
  const u32 base = shared_address(smem);
  auto copy_some = [&](const u8* from, u64 stride, const u32* rows, u32 to, u32 k0, auto count, auto row_bytes, auto size) {
    constexpr u32 kUnits = decltype(row_bytes)::value / 16, kSize = decltype(size)::value;
#pragma unroll 1
    for (u32 i = tid; i < decltype(count)::value * kUnits; i += kThreads) {
      const u32 row = i / kUnits, unit = i % kUnits, r = rows[row], column = k0 + unit * (16 / kSize);
      if (r == kNone) continue;
      const u32 at = to + row * kUnits * 16 + (unit ^ (row & 7)) * 16, left = column < p.k ? (p.k - column) * kSize : 0;
      const u8* source = from + (r * stride + column) * kSize;
      if constexpr (kVector) {
        cp_async_16(at, left ? source : from, left < 16 ? left : 16);
      } else {
        u32 word[4] = {};
#pragma unroll
        for (u32 b = 0; b < 16; b += kSize) {
          if (b >= left) continue;
          const u32 v = kSize == 2 ? *reinterpret_cast<const u16*>(source + b) : source[b];
          word[b / 4] |= v << b % 4 * 8;
        }
        asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(word[0]), "r"(word[1]), "r"(word[2]), "r"(word[3]) : "memory");
      }
    }
  };
  const Copies<kRows, kXRow, kThreads, kRows <= 64> x_copies(x_rows, p.x_stride * sizeof(X));
  const Copies<kColumns, kWRow, kThreads, false> w_copies(w_rows, p.w_stride * sizeof(W));
  // Every stage has the scales of its columns beside it: a thread copies those of one row of x or of w. They are 1 where
  // there are none.
  __shared__ __align__(8) float scales[kScaled ? kStages : 1][kScaled ? kRows + kColumns : 1];
  const float* scale_row = nullptr;
  // Counted down instead of divided: divisions cost one row by 4096 x 4096 a quarter of its time (24 us against 19).
  const u32 scale_columns = tid < kRows ? p.x_block_columns : p.w_block_columns;
  u32 scale_left = scale_columns;
  if constexpr (kScaled) {
    static_assert(kRows + kColumns <= kThreads, "a thread to a row");
    if (tid < kRows + kColumns) {
      scale_row = tid < kRows ? x_scales_of(p, place.batch, x_rows[tid]) : w_scales_of(p, place.weight, w_rows[tid - kRows]);
#pragma unroll
      for (u32 s = 0; s < kStages; ++s) {
        if (!scale_row) scales[s][tid] = 1.f;
      }
    }
  }
  auto load = [&](u32 stage, u32 step) {
    const u32 to = base + stage * kStage, k0 = step * kDepth;
    if constexpr (kScaled) {
      if (scale_row) cp_async_4(shared_address(&scales[stage][tid]), scale_row);
      scale_left -= kDepth;
      if (scale_left == 0) scale_left = scale_columns, scale_row += scale_row != nullptr;
    }
    if (kVector && k0 + kDepth <= p.k) {
      x_copies.start(x + u64(k0) * sizeof(X), to);
      w_copies.start(w + u64(k0) * sizeof(W), to + kRows * kXRow);
    } else {
      copy_some(x, p.x_stride, x_rows, to, k0, Constant<kRows>{}, Constant<kXRow>{}, Constant<sizeof(X)>{});
      copy_some(w, p.w_stride, w_rows, to + kRows * kXRow, k0, Constant<kColumns>{}, Constant<kWRow>{}, Constant<sizeof(W)>{});
    }
  };

  float acc[kMt][kNt][4] = {};
  auto step16 = [&](const u32 (&a)[kMt][4], const u32 (&b)[kNt][2]) {
#pragma unroll
    for (int m = 0; m < kMt; ++m) {
#pragma unroll
      for (int n = 0; n < kNt; ++n) mma_16<T>(acc[m][n], a[m], b[n][0], b[n][1]);
    }
  };
  auto multiply = [&](u32 stage) {
    const u32 xs = base + stage * kStage + warp_row * kXRow, ws = base + stage * kStage + kRows * kXRow + warp_column * Tile::kWarpColumns * kWRow;
    const u32 swizzle = lane & 7;
    if constexpr (!kScaled) {
      // The next step's fragments are on their way while this step's are multiplied.
      u32 a[2][kMt][4], b[2][kNt][2];
      auto fetch = [&](u32 s) {
#pragma unroll
        for (int m = 0; m < kMt; ++m) ldmatrix_x4(a[s % 2][m], xs + (m * 16 + lane % 16) * kXRow + ((2 * s + lane / 16) ^ swizzle) * 16);
#pragma unroll
        for (int n = 0; n < kNt; n += 2) {
          u32 r[4];
          ldmatrix_x4(r, ws + (n * 8 + lane / 16 * 8 + lane % 8) * kWRow + ((2 * s + lane / 8 % 2) ^ swizzle) * 16);
          b[s % 2][n][0] = r[0], b[s % 2][n][1] = r[1], b[s % 2][n + 1][0] = r[2], b[s % 2][n + 1][1] = r[3];
        }
      };
      fetch(0);
#pragma unroll
      for (u32 s = 0; s < kDepth / 16; ++s) {
        if (s + 1 < kDepth / 16) fetch(s + 1);
        step16(a[s % 2], b[s % 2]);
      }
    } else {
      u32 a[kMt][4], b[kNt][2];
#pragma unroll
      for (u32 s = 0; s < kDepth / 16; s += 2) {
        u32 wide[kNt][2];  // both steps' codes
#pragma unroll
        for (int n = 0; n < kNt; n += 2) {
          u32 r[4];
          ldmatrix_x4(r, ws + (n * 8 + lane / 16 * 8 + lane % 8) * kWRow + ((s + lane / 8 % 2) ^ swizzle) * 16);
          wide[n][0] = r[0], wide[n][1] = r[1], wide[n + 1][0] = r[2], wide[n + 1][1] = r[3];
        }
        u32 codes[kMt][4];
        if constexpr (sizeof(X) == 1) {
#pragma unroll
          for (int m = 0; m < kMt; ++m) ldmatrix_x4(codes[m], xs + (m * 16 + lane % 16) * kXRow + ((s + lane / 16) ^ swizzle) * 16);
        }
#pragma unroll
        for (u32 h = 0; h < 2; ++h) {
#pragma unroll
          for (int m = 0; m < kMt; ++m) {
            if constexpr (sizeof(X) == 1) {
              expand4<T, X>(codes[m][2 * h], a[m][0], a[m][2]);
              expand4<T, X>(codes[m][2 * h + 1], a[m][1], a[m][3]);
            } else {
              const u32 unit = 2 * (s + h) + lane % 4 / 2, row = m * 16 + lane / 4;
              const u32 at = xs + row * kXRow + (unit ^ (row & 7)) * 16 + lane % 2 * 8;
              asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(a[m][0]), "=r"(a[m][2]) : "r"(at) : "memory");
              asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(a[m][1]), "=r"(a[m][3]) : "r"(at + 8 * kXRow) : "memory");
            }
          }
#pragma unroll
          for (int n = 0; n < kNt; ++n) expand4<T, W>(wide[n][h], b[n][0], b[n][1]);
          step16(a, b);
        }
      }
    }
  };

  // What parts of k came to, with their scales.
  float total[kTwice ? kMt : 1][kTwice ? kNt : 1][4] = {};
  auto fold = [&](u32 stage) {
    float by_row[kMt][2];
    float2 by_column[kNt];
    if constexpr (kScaled) {
      const float* rows = scales[stage] + warp_row + lane / 4;
      const float* columns = scales[stage] + kRows + warp_column * Tile::kWarpColumns + lane % 4 * 2;
#pragma unroll
      for (int m = 0; m < 2 * kMt; ++m) by_row[m / 2][m % 2] = rows[m * 8];
#pragma unroll
      for (int n = 0; n < kNt; ++n) by_column[n] = *reinterpret_cast<const float2*>(columns + n * 8);
    }
    if constexpr (kTwice) {
#pragma unroll
      for (int m = 0; m < kMt; ++m) {
#pragma unroll
        for (int n = 0; n < kNt; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            if constexpr (kScaled) total[m][n][i] = fmaf(acc[m][n][i], by_row[m][i / 2] * (i % 2 ? by_column[n].y : by_column[n].x), total[m][n][i]);
            else total[m][n][i] += acc[m][n][i];
            acc[m][n][i] = 0.f;
          }
        }
      }
    }
  };

  const u32 steps = (p.k + kDepth - 1) / kDepth;
#pragma unroll
  for (u32 s = 0; s < kStages - 1; ++s) {
    if (s < steps) load(s, s);
    cp_async_commit();
  }
  u32 until_fold = p.fold;
  for (u32 step = 0, stage = 0; step < steps; ++step) {
    cp_async_wait<kStages - 2>();
    __syncthreads();  // this stage is there, and the one that is loaded next was read
    if (step + kStages - 1 < steps) load(stage == 0 ? kStages - 1 : stage - 1, step + kStages - 1);
    cp_async_commit();
    multiply(stage);
    until_fold -= kDepth;
    if (kTwice && (step + 1 == steps || until_fold == 0)) fold(stage), until_fold = p.fold;
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }
  start_next();

  // Through shared memory, so that a warp writes whole lines.
  constexpr int kOut = kGate ? kColumns / 2 : kColumns, kWarpOut = kOut / kWarpsAcross, kPitch = kOut + 8;
  static_assert(kRows * kPitch * 4 <= kStages * kStage, "sums fit where operands were");
  float* sums = reinterpret_cast<float*>(smem);
  cp_async_wait<0>();
  __syncthreads();
#pragma unroll
  for (int m = 0; m < kMt; ++m) {
#pragma unroll
    for (int n = 0; n < kWarpOut / 8; ++n) {
      float y[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (kTwice) y[i] = total[m][n][i];
        else y[i] = acc[m][n][i];
        if constexpr (kGate) {
          if constexpr (kTwice) y[i] = gate(p, y[i]) * total[m][n + kNt / 2][i];
          else y[i] = gate(p, y[i]) * acc[m][n + kNt / 2][i];
        }
      }
      float* at = sums + (warp_row + m * 16 + lane / 4) * kPitch + warp_column * kWarpOut + n * 8 + lane % 4 * 2;
      *reinterpret_cast<float2*>(at) = make_float2(y[0], y[1]);
      *reinterpret_cast<float2*>(at + 8 * kPitch) = make_float2(y[2], y[3]);
    }
  }
  __syncthreads();
  const Store store(p, place.batch);
#pragma unroll 1
  for (u32 i = tid; i < kRows * (kOut / 8); i += kThreads) {
    const u32 row = i / (kOut / 8), column = i % (kOut / 8) * 8;
    if (place.first + row >= place.end) break;
    store.eight(p, store.row(p, place.first + row), place.column + column, sums + row * kPitch + column);
  }
}

}  // namespace fir
