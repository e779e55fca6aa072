// gemm_blocks.cuh: products with weights in GGUF's block formats, by integer tensor cores.
//
//   out[i, j] = sum over 256 columns at a time, in order: out = fma(t, scale of x, out), then for each column l taken out of x
//               out = fma(w[j, l], x[i, l], out)
//   t         = the sum of d * (codes of w . codes of x), exact within a scale; see ops/gemm/blocks.rs
//
// Integer sums are exact and the steps in f32 have one order: the bits are those of the CPU, for any number of rows.
//
// Weights lie as src/cpu/gemm/blocks/pack.rs packs them: panels of 16 rows, in them cells of 256 columns, whose words of
// four codes are just what lanes hold in m16n8k32. Activations are quantized into the order of that instruction's other
// operand: [16 rows][256 columns] are 8 x 32 x 16 bytes, a 16-byte load of each lane for 32 columns.
//
// quantize_rows   grid (256 columns, 16 rows), block 512: a warp to 256 elements of a row
// gemm_few        grid (at most panels, 16 rows), block 256: its warps take cells in turn and their sums are added in order
// gemm_many       grid (4 panels, 64 rows), block 128: a warp has a panel and 64 rows
// expand_rows     grid (rows), block 256
// smem            gemm_few 8, gemm_many 4 times kStages cells
// needs           sm_80
//
// reads  x, packed weights
// writes codes, sums and scales of x, what is taken out of it; out
// twins  src/cpu/gemm/blocks/mod.rs, src/reference/gemm/blocks.rs
#pragma once
#include <fir/base/cp_async.cuh>
#include <fir/base/math.cuh>
#include <fir/gemm_common.cuh>

namespace fir {

// Elements of 256 of a row that are multiplied on their own, in ascending order.
struct Taken {
  u32 count;
  u8 places[4];
  float values[4];
};

struct BlocksParams {
  const void* x;
  const u8* w;
  void* out;
  u32* codes;      // [tiles, cells, 8, 32, 4]: tiles of 16 rows; zeros past m and k
  i32* sums;       // [tiles, cells, 16, 16]: of the codes of a sub-block, by row
  float* scales;   // [tiles, cells, 16]
  Taken* taken;    // [tiles, cells, 16]
  u64 x_stride, out_stride;
  u64 panel_bytes;
  u32 m, n, k, cells;
  u32 x_type, out_type;
};

// Scales of blocks of 256, bytes within f16 ones; of 32, f16; of 32 in steps, i16, where minima are above them in 32 bits.
enum Scales { kBytes, kHalves, kWords };

// kSub columns share a scale.
template <int Low, int High, int Offset, int Sub, bool Min, Scales Kind>
struct Blocks {
  static constexpr int kLow = Low, kHigh = High, kOffset = Offset, kSub = Sub;
  static constexpr bool kMin = Min, kSmall = Kind == kHalves, kSteps = Kind == kWords, kTable = Offset == 128 && Low == 4;
  static constexpr int kCodes = 64 * (Low + High);  // bytes of 32 columns
  static constexpr int kScales = Kind != kBytes ? (Min ? 64 : 32) : (Sub == 16 || Min ? 32 : 16);
  static constexpr int kShared = kSmall ? 0 : (Min && !kSteps ? 64 : 32);
  static constexpr u32 bytes(u32 groups) { return groups * (kCodes + kScales) + kShared; }
  static constexpr u32 kCell = 8 * (kCodes + kScales) + kShared;
  static constexpr u32 kStages = kCell > 4096 ? 2 : 3;  // cells on their way for each warp: 99 KB hold all of a block's
};

__device__ __forceinline__ u32 shared_word(u32 address) {
  u32 x;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
  return x;
}
__device__ __forceinline__ u32 shared_half(u32 address) {
  u16 x;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(x) : "r"(address) : "memory");
  return x;
}

__device__ __forceinline__ u32 shared_byte(u32 address) {
  u32 x;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
  return x;
}

// Four codes as signed numbers.
template <class F>
__device__ __forceinline__ u32 levels(u32 codes) {
  if constexpr (F::kTable) {
    // Values of IQ4_XS: -127 -104 -83 -65, -49 -35 -22 -10, 1 13 25 38, 53 69 89 113. A byte permutation has 8 entries.
    const u32 low = codes & 0x07070707u, near = low | low >> 4, select = __byte_perm(near, 0, 0x4420);
    const u32 a = __byte_perm(0xbfad9881u, 0xf6eaddcfu, select), b = __byte_perm(0x26190d01u, 0x71594535u, select);
    const u32 upper = (codes >> 3 & 0x01010101u) * 0xffu;
    return (a & ~upper) | (b & upper);
  } else if constexpr (F::kOffset == 0) {
    return codes;
  } else if constexpr (F::kOffset == 128) {
    return codes ^ 0x80808080u;
  } else {
    return ((codes | 0x80808080u) - F::kOffset * 0x01010101u) ^ 0x80808080u;
  }
}

// Codes 4i to 4i + 3 of one row among the 32 columns at `group`.
template <class F>
__device__ __forceinline__ u32 word_of(u32 group, u32 i, u32 row) {
  constexpr u32 kLowMask = ((1u << F::kLow) - 1) * 0x01010101u, kHighMask = ((1u << F::kHigh) - 1) * 0x01010101u;
  const u32 at = group + 4 * row;
  u32 codes = shared_word(at + 64 * (i * F::kLow / 8));
  if constexpr (F::kLow < 8) codes = codes >> (i * F::kLow % 8) & kLowMask;
  if constexpr (F::kHigh > 0) {
    const u32 high = shared_word(at + 64 * F::kLow + 64 * (i * F::kHigh / 8));
    codes |= (high >> (i * F::kHigh % 8) & kHighMask) << F::kLow;
  }
  return levels<F>(codes);
}

__device__ __forceinline__ void mma_s8(i32 (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_s8(i32 (&d)[4], u32 a0, u32 a1, u32 b0) {
  asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]) : "r"(a0), "r"(a1), "r"(b0));
}

// Half of a word, as a signed number.
__device__ __forceinline__ i32 low_of(u32 word) { return i32(word << 16) >> 16; }
__device__ __forceinline__ i32 high_of(u32 word) { return i32(word) >> 16; }

__device__ __forceinline__ float half_of(u32 word, int i) { return to_float(f16{u16(word >> 16 * i)}); }

// t of the `kMt` row tiles from `tile` on, by the 16 weights of a cell in shared memory. Element (m, n, i) is row
// lane / 4 + 8 (i / 2) of tile m, weight 8 n + 2 (lane % 4) + i % 2.
template <class F, int kMt>
__device__ __forceinline__ void multiply_cell(const BlocksParams& p, u32 cell, u32 index, u32 tile, u32 lane, float (&t)[kMt][2][4]) {
  const u32 left = p.k - index * 256, groups = left < 256 ? left / 32 : 8, q = lane % 4;
  const u32 scales = cell + groups * F::kCodes, shared = scales + groups * F::kScales;
  const u64 first = u64(tile) * p.cells + index;  // of the first tile; the next is p.cells on
  i32 s1[F::kSmall ? 1 : kMt][2][4] = {}, s2[!F::kSmall && !F::kSteps && F::kMin ? kMt : 1][2][4] = {};
#pragma unroll
  for (int m = 0; m < kMt; ++m) {
#pragma unroll
    for (int i = 0; i < 8; ++i) t[m][i / 4][i % 4] = 0.f;
  }
#pragma unroll 2
  for (u32 g = 0; g < groups; ++g) {
    u32 b[2][2];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      b[n][0] = word_of<F>(cell + g * F::kCodes, q, n * 8 + lane / 4);
      b[n][1] = word_of<F>(cell + g * F::kCodes, 4 + q, n * 8 + lane / 4);
    }
    const u32 own = scales + g * F::kScales;
#pragma unroll
    for (int m = 0; m < kMt; ++m) {
      const u64 place = first + u64(m) * p.cells;
      const uint4 a = reinterpret_cast<const uint4*>(p.codes)[(place * 8 + g) * 32 + lane];
      auto sum_of = [&](u32 j, u32 half) { return p.sums[(place * 16 + j) * 16 + lane / 4 + 8 * half]; };
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const u32 column = 8 * n + 2 * q;
        if constexpr (F::kSub == 32) {
          i32 d[4] = {};
          mma_s8(d, a.x, a.y, a.z, a.w, b[n][0], b[n][1]);
          if constexpr (F::kSmall) {
            const u32 factor = shared_word(own + 2 * column);
#pragma unroll
            for (int i = 0; i < 4; ++i) t[m][n][i] = fmaf(half_of(factor, i % 2), float(d[i]), t[m][n][i]);
          } else if constexpr (F::kSteps) {
            const u32 first_word = shared_word(own + (F::kMin ? 4 : 2) * column);
            const u32 both[2] = {first_word, F::kMin ? shared_word(own + 4 * column + 4) : first_word >> 16};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              s1[m][n][i] += low_of(both[i % 2]) * d[i];
              if constexpr (F::kMin) s1[m][n][i] += high_of(both[i % 2]) * sum_of(g, i / 2);
            }
          } else {
            const u32 factor = shared_half(own + column);
#pragma unroll
            for (int i = 0; i < 4; ++i) s1[m][n][i] += i32(static_cast<signed char>(factor >> 8 * (i % 2))) * d[i];
            if constexpr (F::kMin) {
              const u32 least = shared_half(own + 16 + column);
#pragma unroll
              for (int i = 0; i < 4; ++i) s2[m][n][i] += i32(least >> 8 * (i % 2) & 0xff) * sum_of(g, i / 2);
            }
          }
        } else {
#pragma unroll
          for (u32 h = 0; h < 2; ++h) {
            i32 d[4] = {};
            mma_s8(d, h ? a.z : a.x, h ? a.w : a.y, b[n][h]);
            const u32 factor = shared_half(own + 16 * h + column);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              const u32 byte = factor >> 8 * (i % 2) & 0xff;
              s1[m][n][i] += (F::kMin ? i32(byte & 15) : i32(static_cast<signed char>(byte))) * d[i];
              if constexpr (F::kMin) s2[m][n][i] += i32(byte >> 4) * sum_of(2 * g + h, i / 2);
            }
          }
        }
      }
    }
  }
  if constexpr (!F::kSmall) {
#pragma unroll
    for (int m = 0; m < kMt; ++m) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const u32 column = 8 * n + 2 * q, factor = shared_word(shared + 2 * column);
        u32 least = 0;
        if constexpr (F::kMin && !F::kSteps) least = shared_word(shared + 32 + 2 * column);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          t[m][n][i] = __fmul_rn(half_of(factor, i % 2), float(s1[m][n][i]));
          if constexpr (F::kMin && !F::kSteps) t[m][n][i] = fmaf(-half_of(least, i % 2), float(s2[m][n][i]), t[m][n][i]);
        }
      }
    }
  }
}

// The same of 8 or 16 rows of one tile, with the operands' places changed: weights are the instruction's 16 rows and 8 rows
// of x its columns, half the work where there are no more. `x` has a lane's codes. Element (h, i) is row
// 8 h + 2 (lane % 4) + i % 2 of the tile, weight lane / 4 + 8 (i / 2).
template <class F, int kHalves>
__device__ __forceinline__ void multiply_few(const BlocksParams& p, u32 cell, u32 index, u32 tile, u32 lane, const uint2 (&x)[kHalves][8], float (&t)[kHalves][4]) {
  const u32 left = p.k - index * 256, groups = left < 256 ? left / 32 : 8, q = lane % 4, w = lane / 4;
  const u32 scales = cell + groups * F::kCodes, shared = scales + groups * F::kScales;
  const i32* sums = p.sums + (u64(tile) * p.cells + index) * 256 + 2 * q;
  i32 s1[kHalves][4] = {}, s2[kHalves][4] = {};
#pragma unroll
  for (int i = 0; i < 4 * kHalves; ++i) t[i / 4][i % 4] = 0.f;
#pragma unroll
  for (u32 g = 0; g < 8; ++g) {
    if (g >= groups) break;
    u32 a[2][2];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      a[n][0] = word_of<F>(cell + g * F::kCodes, q, n * 8 + w);
      a[n][1] = word_of<F>(cell + g * F::kCodes, 4 + q, n * 8 + w);
    }
    const u32 own = scales + g * F::kScales;
    constexpr int kSteps = 32 / F::kSub;
#pragma unroll
    for (u32 s = 0; s < kSteps; ++s) {
      // Of this lane's two weights.
      u32 factor[2], least[2] = {};
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        if constexpr (F::kSteps && F::kMin) factor[n] = shared_word(own + 4 * (w + 8 * n));
        else if constexpr (F::kSteps || F::kSmall) factor[n] = shared_half(own + 2 * (w + 8 * n));
        else factor[n] = shared_byte(own + 16 * s + w + 8 * n);
        if constexpr (F::kMin && !F::kSteps) {
          if constexpr (F::kSub == 32) least[n] = shared_byte(own + 16 + w + 8 * n);
          else least[n] = factor[n] >> 4, factor[n] &= 15;
        }
      }
#pragma unroll
      for (int h = 0; h < kHalves; ++h) {
        i32 d[4] = {};
        if constexpr (F::kSub == 32) mma_s8(d, a[0][0], a[1][0], a[0][1], a[1][1], x[h][g].x, x[h][g].y);
        else mma_s8(d, a[0][s], a[1][s], s ? x[h][g].y : x[h][g].x);
        int2 sum = make_int2(0, 0);
        if constexpr (F::kMin) sum = *reinterpret_cast<const int2*>(sums + (g * kSteps + s) * 16 + 8 * h);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const i32 of_row = i % 2 ? sum.y : sum.x;
          if constexpr (F::kSmall) {
            t[h][i] = fmaf(half_of(factor[i / 2], 0), float(d[i]), t[h][i]);
          } else if constexpr (F::kSteps) {
            s1[h][i] += low_of(factor[i / 2]) * d[i];
            if constexpr (F::kMin) s1[h][i] += high_of(factor[i / 2]) * of_row;
          } else {
            s1[h][i] += (F::kMin ? i32(factor[i / 2]) : i32(static_cast<signed char>(factor[i / 2]))) * d[i];
            if constexpr (F::kMin) s2[h][i] += i32(least[i / 2]) * of_row;
          }
        }
      }
    }
  }
  if constexpr (!F::kSmall) {
#pragma unroll
    for (int i = 0; i < 4 * kHalves; ++i) {
      const u32 at = shared + 2 * (w + 8 * (i % 4 / 2));
      float& y = t[i / 4][i % 4];
      y = __fmul_rn(half_of(shared_half(at), 0), float(s1[i / 4][i % 4]));
      if constexpr (F::kMin && !F::kSteps) y = fmaf(-half_of(shared_half(at + 32), 0), float(s2[i / 4][i % 4]), y);
    }
  }
}

// Weight `column` of row `in` of a panel that is not in shared memory.
template <class F>
__device__ __forceinline__ float weight_at(const u8* panel, u32 in, u32 columns, u32 column) {
  const u32 index = column / 256, left = columns - index * 256, groups = left < 256 ? left / 32 : 8;
  const u32 g = column % 256 / 32, i = column % 32 / 4, byte = column % 4 * 8;
  const u8* cell = panel + u64(index) * F::kCell;
  const u8 *scales = cell + groups * F::kCodes, *shared = scales + groups * F::kScales, *own = scales + g * F::kScales;
  auto word = [](const u8* at) { return *reinterpret_cast<const u32*>(at); };
  const u8* codes_at = cell + g * F::kCodes + 4 * in;
  u32 code = word(codes_at + 64 * (i * F::kLow / 8)) >> byte >> (i * F::kLow % 8) & ((1u << F::kLow) - 1);
  if constexpr (F::kHigh > 0) {
    code |= (word(codes_at + 64 * F::kLow + 64 * (i * F::kHigh / 8)) >> byte >> (i * F::kHigh % 8) & ((1u << F::kHigh) - 1)) << F::kLow;
  }
  const i32 level = static_cast<signed char>(levels<F>(code) & 0xff);
  auto half = [&](const u8* at) { return to_float(reinterpret_cast<const f16*>(at)[in]); };
  if constexpr (F::kSmall) {
    float y = half(own) * float(level);
    if constexpr (F::kMin) y += half(own + 32);
    return y;
  } else if constexpr (F::kSteps) {
    const u32 factor = F::kMin ? word(own + 4 * in) : reinterpret_cast<const u16*>(own)[in];
    return __fmul_rn(half(shared), float(low_of(factor) * level + (F::kMin ? high_of(factor) : 0)));
  } else {
    const u32 j = F::kSub == 16 ? column % 32 / 16 : 0, scale = own[16 * j + in];
    const bool nibbles = F::kMin && F::kSub == 16;
    const float y = half(shared) * float(nibbles ? i32(scale & 15) : i32(static_cast<signed char>(scale))) * float(level);
    if constexpr (!F::kMin) return y;
    else return fmaf(-half(shared + 32), float(nibbles ? scale >> 4 : u32(own[16 + in])), y);
  }
}

// Adds what was taken out of a row in a cell, to the sums of weight `column` and of those 1, 8 and 9 on.
template <class F, int kColumns>
__device__ __forceinline__ void add_taken(const BlocksParams& p, const Taken& taken, u32 index, u32 column, float (&y)[kColumns]) {
  for (u32 e = 0; e < taken.count; ++e) {
    // Nothing of this rare loop is worked out ahead of it: with that the many rows of Q2_K took 245 registers, so 210.
    asm volatile("" : "+r"(column));
    const u8* panel = p.w + column / 16 * p.panel_bytes;
    const u32 at = index * 256 + taken.places[e];
    const float x = taken.values[e];
#pragma unroll
    for (int i = 0; i < kColumns; ++i) y[i] = fmaf(weight_at<F>(panel, column % 16 + 8 * (i / 2) + i % 2, p.k, at), x, y[i]);
  }
}

// A cell on its way to shared memory, by one warp.
template <class F>
__device__ __forceinline__ void fetch_cell(const BlocksParams& p, u32 to, u32 panel, u32 index, u32 lane) {
  const u32 left = p.k - index * 256, bytes = F::bytes(left < 256 ? left / 32 : 8);
  const u8* from = p.w + panel * p.panel_bytes + u64(index) * F::kCell;
  for (u32 at = lane * 16; at < bytes; at += 512) cp_async_16(to + at, from + at);
}

__device__ __forceinline__ void put(const BlocksParams& p, u32 row, u32 column, float y) {
  if (row >= p.m || column >= p.n) return;
  const u64 at = row * p.out_stride + column;
  if (p.out_type == 0) static_cast<float*>(p.out)[at] = y;
  else if (p.out_type == 1) static_cast<f16*>(p.out)[at] = from_float<f16>(y);
  else static_cast<bf16*>(p.out)[at] = from_float<bf16>(y);
}

// A block's panels, one after the other: while one is multiplied, the next one's first cells are on their way.
template <class F, int kHalves>
__device__ __forceinline__ void few_rows(const BlocksParams& p, u8* smem, float (&parts)[2][8][16][16]) {
  constexpr u32 kWarps = 8, kStages = F::kStages;
  const u32 tid = threadIdx.x, lane = tid % 32, warp = tid / 32, tile = blockIdx.y, panels = (p.n + 15) / 16;
  const u32 own = shared_address(smem) + warp * kStages * F::kCell, row = tid / 16, column = tid % 16;
  u32 ahead = blockIdx.x, ahead_index = warp, to = 0;  // the next cell to fetch, and where it goes
  auto fetch = [&] {
    if (ahead < panels && ahead_index < p.cells) fetch_cell<F>(p, own + to * F::kCell, ahead, ahead_index, lane);
    cp_async_commit();
    to = to + 1 == kStages ? 0 : to + 1;
    ahead_index += kWarps;
    if (ahead_index - warp >= p.cells) ahead_index = warp, ahead += gridDim.x;
  };
#pragma unroll
  for (u32 s = 0; s < kStages - 1; ++s) fetch();
  u32 at = 0, turn = 0;
  for (u32 panel = blockIdx.x; panel < panels; panel += gridDim.x) {
    float y[1] = {};
    for (u32 first = 0; first < p.cells; first += kWarps) {
      const u32 index = first + warp;
      fetch();
      if (index < p.cells) {
        uint2 x[kHalves][8];
        const uint4* codes = reinterpret_cast<const uint4*>(p.codes) + (u64(tile) * p.cells + index) * 256 + lane;
#pragma unroll
        for (u32 g = 0; g < 8; ++g) {
          const uint4 c = codes[g * 32];
          x[0][g] = make_uint2(c.x, c.z);
          if constexpr (kHalves == 2) x[1][g] = make_uint2(c.y, c.w);
        }
        cp_async_wait<kStages - 1>();
        __syncwarp();
        float t[kHalves][4];
        multiply_few<F, kHalves>(p, own + at * F::kCell, index, tile, lane, x, t);
#pragma unroll
        for (int i = 0; i < 4 * kHalves; ++i) parts[turn][warp][8 * (i / 4) + 2 * (lane % 4) + i % 2][lane / 4 + 8 * (i % 4 / 2)] = t[i / 4][i % 4];
      }
      at = at + 1 == kStages ? 0 : at + 1;
      __syncthreads();  // two turns of parts: those of the last are read by now
      if (row < 8 * kHalves) {
        const float* scale = p.scales + (u64(tile) * p.cells + first) * 16 + row;
#pragma unroll
        for (u32 i = 0; i < kWarps; ++i) {
          if (first + i < p.cells) {
            y[0] = fmaf(parts[turn][i][row][column], scale[16 * i], y[0]);
            add_taken<F>(p, p.taken[(u64(tile) * p.cells + first + i) * 16 + row], first + i, panel * 16 + column, y);
          }
        }
      }
      turn ^= 1;
    }
    if (row < 8 * kHalves) put(p, tile * 16 + row, panel * 16 + column, y[0]);
  }
}

template <class F>
__global__ void __launch_bounds__(256, 2) gemm_few(const __grid_constant__ BlocksParams p) {
  extern __shared__ __align__(128) u8 smem[];
  __shared__ float parts[2][8][16][16];
  wait_for_previous();
  if (p.m - blockIdx.y * 16 <= 8) few_rows<F, 1>(p, smem, parts);
  else few_rows<F, 2>(p, smem, parts);
  start_next();
}

template <class F>
__global__ void __launch_bounds__(128, 2) gemm_many(const __grid_constant__ BlocksParams p) {
  constexpr u32 kStages = F::kStages, kMt = 4;
  extern __shared__ __align__(128) u8 smem[];
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, panel = blockIdx.x * 4 + warp, tile = blockIdx.y * kMt;
  const u32 own = shared_address(smem) + warp * kStages * F::kCell;
  wait_for_previous();
  if (panel * 16 >= p.n) return;
#pragma unroll
  for (u32 s = 0; s < kStages - 1; ++s) {
    if (s < p.cells) fetch_cell<F>(p, own + s * F::kCell, panel, s, lane);
    cp_async_commit();
  }
  float y[kMt][2][4] = {};
  for (u32 index = 0; index < p.cells; ++index) {
    __syncwarp();  // the cell before was read
    if (index + kStages - 1 < p.cells) fetch_cell<F>(p, own + (index + kStages - 1) % kStages * F::kCell, panel, index + kStages - 1, lane);
    cp_async_commit();
    cp_async_wait<kStages - 1>();
    __syncwarp();
    float t[kMt][2][4];
    multiply_cell<F, kMt>(p, own + index % kStages * F::kCell, index, tile, lane, t);
#pragma unroll
    for (int m = 0; m < kMt; ++m) {
      const float* scale = p.scales + (u64(tile + m) * p.cells + index) * 16 + lane / 4;
      const float by[2] = {scale[0], scale[8]};
#pragma unroll
      for (int i = 0; i < 8; ++i) y[m][i / 4][i % 4] = fmaf(t[m][i / 4][i % 4], by[i % 4 / 2], y[m][i / 4][i % 4]);
    }
#pragma unroll
    for (int m = 0; m < kMt; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const Taken& taken = p.taken[(u64(tile + m) * p.cells + index) * 16 + lane / 4 + 8 * h];
        if (taken.count == 0) continue;
        float some[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) some[i] = y[m][i / 2][2 * h + i % 2];
        add_taken<F>(p, taken, index, panel * 16 + 2 * (lane % 4), some);
#pragma unroll
        for (int i = 0; i < 4; ++i) y[m][i / 2][2 * h + i % 2] = some[i];
      }
    }
  }
  start_next();
#pragma unroll
  for (int m = 0; m < kMt; ++m) {
#pragma unroll
    for (int i = 0; i < 8; ++i) put(p, (tile + m) * 16 + lane / 4 + 8 * (i % 4 / 2), panel * 16 + 8 * (i / 4) + 2 * (lane % 4) + i % 2, y[m][i / 4][i % 4]);
  }
}

// scale = max|x| / 127, code = round(x / scale), ties to even; zeros if that is 0; NaN if an element is not finite. Up to four
// elements over three times the mean of 16 maxima, those of the elements 16 apart, are taken out before.
template <int kSub>
__global__ void __launch_bounds__(512) quantize_rows(const __grid_constant__ BlocksParams p) {
  const u32 lane = threadIdx.x % 32, in = threadIdx.x / 32, cell = blockIdx.x, tile = blockIdx.y, row = tile * 16 + in;
  wait_for_previous();
  float x[8], classes[8];
  bool finite = true;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const u32 column = cell * 256 + lane * 8 + i;
    x[i] = row < p.m && column < p.k ? load_any(p.x, row * p.x_stride + column, p.x_type) : 0.f;
    classes[i] = fabsf(x[i]);
    finite &= fabsf(x[i]) < __int_as_float(0x7f800000);
  }
  finite = __all_sync(0xffffffffu, finite);
  // Every other lane has eight of the sixteen.
#pragma unroll
  for (int step = 2; step < 32; step *= 2) {
#pragma unroll
    for (int i = 0; i < 8; ++i) classes[i] = fmaxf(classes[i], __shfl_xor_sync(0xffffffffu, classes[i], step));
  }
  // Made one: first those 8 apart, then 4, 2 and 1.
  float sums[8], most = 0.f;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float other = __shfl_xor_sync(0xffffffffu, classes[i], 1);
    sums[i] = __fadd_rn(classes[i], other);
    most = fmaxf(most, fmaxf(classes[i], other));
  }
#pragma unroll
  for (int half = 4; half > 0; half /= 2) {
#pragma unroll
    for (int i = 0; i < half; ++i) sums[i] = __fadd_rn(sums[i], sums[i + half]);
  }
  const u64 place = u64(tile) * p.cells + cell;
  const float bound = __fmul_rn(3.f / 16.f, sums[0]);
  Taken& taken = p.taken[place * 16 + in];
  u32 count = 0, before = 0;
  if (finite && most > bound) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const u32 large = __ballot_sync(0xffffffffu, fabsf(x[i]) > bound);
      count += __popc(large);
      before += __popc(large & ((1u << lane) - 1));
    }
    if (count > 4) count = 0;
    if (count > 0) {
      most = 0.f;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (fabsf(x[i]) > bound) {
          taken.places[before] = lane * 8 + i, taken.values[before] = x[i], ++before;
          x[i] = 0.f;
        }
        most = fmaxf(most, fabsf(x[i]));
      }
#pragma unroll
      for (int step = 16; step > 0; step /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, step));
    }
  }
  if (lane == 0) taken.count = count;
  const float scale = finite ? __fdiv_rn(most, 127.f) : __int_as_float(0x7fc00000);
  u32 word[2] = {};
  i32 sum = 0;
  if (finite && scale > 0.f) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      // A subnormal scale may be rounded down by as much as a third: hence the bounds.
      const float y = fminf(fmaxf(rintf(__fdiv_rn(x[i], scale)), -127.f), 127.f);
      const i32 code = i32(y);
      sum += code;
      word[i / 4] |= u32(code & 0xff) << 8 * (i % 4);
    }
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const u32 i = lane % 4 * 2 + h;  // of the eight words of 32 columns
    p.codes[(place * 8 + lane / 4) * 128 + (in % 8 * 4 + i % 4) * 4 + in / 8 + 2 * (i / 4)] = word[h];
  }
  constexpr u32 kLanes8 = kSub / 8;
#pragma unroll
  for (u32 step = 1; step < kLanes8; step *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  if (lane % kLanes8 == 0) p.sums[(place * 16 + lane / kLanes8) * 16 + in] = sum;
  if (lane == 0) p.scales[place * 16 + in] = scale;
}

// The weights themselves, in f32 and then rounded; products are exact.
template <class F>
__global__ void __launch_bounds__(256) expand_rows(const __grid_constant__ BlocksParams p) {
  wait_for_previous();
  const u32 row = blockIdx.x;
  for (u32 k = threadIdx.x; k < p.k; k += 256) put(p, row, k, weight_at<F>(p.w + row / 16 * p.panel_bytes, row % 16, p.k, k));
}

}  // namespace fir
