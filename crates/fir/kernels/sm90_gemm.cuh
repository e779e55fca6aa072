// sm90_gemm.cuh: products of rows by weights through TMA and wgmma.
//
//   out[i, j] = then(sum_l x[i, l] * w[j, l])
//
// A block is a warpgroup that copies and one or two that multiply, 64 rows of the tile each; between them is a ring of
// kStages stages, 128 bytes of every row of the tile (256 where sums are folded), full and empty told by mbarriers. Blocks
// stay, and take tiles in turns: the copies of the next tile are under way while this one's sums are written. Two blocks of
// a cluster take tiles of rows one below the other; each copies half of the weights, to both (8192^3: 48 KB a
// stage become 32, and L2 was the bound).
//
// Where sums are folded (kFold), those of 128 columns are made in the tensor cores and added up outside: an output of f32 is
// as exact as that of gemm.cuh, to the bit, and so is one of 16 bits without it. Sums of fp8 are always folded, as tensor
// cores keep but 13 bits of them: theirs are another rounding than gemm.cuh's, so these products come here whatever the
// number of rows. Scales of parts of k meet the sums at the fold, those of whole rows of w at the end.
//
// grid   as many clusters as there is room for
// block  128 + 128 * kConsumers
// smem   kStages * kStage bytes of operands with the 128-byte swizzle, then 2560 bytes for every warp that writes
// needs  sm_90a
//
// reads  x, w (rows of 16-byte multiples) through maps of [columns, rows, matrices]; scales, bias; out where it is added to
// writes out, rows of the tile's group alone
// twins  kernels/gemm.cuh, src/cpu/gemm/mod.rs, src/reference/gemm/mod.rs
#pragma once
#include <fir/base/cluster.cuh>
#include <fir/base/cp_async.cuh>
#include <fir/base/mbarrier.cuh>
#include <fir/base/tma.cuh>
#include <fir/base/wgmma.cuh>
#include <fir/gemm_common.cuh>

namespace fir {

struct Sm90GemmParams {
  TensorMap x_map, w_map;
  GemmParams gemm;
  u32 tiles, each;  // in all, and of one matrix
  u32 unused[2];
};

template <int R, int C, int S, int B>
struct Sm90Tile {
  static constexpr int kRows = R, kColumns = C, kStages = S, kCluster = B, kConsumers = R / 64, kThreads = 128 + 128 * kConsumers;
};

template <class T> struct WgmmaType;
template <> struct WgmmaType<bf16> { static constexpr Wgmma value = Wgmma::kBf16; };
template <> struct WgmmaType<f16> { static constexpr Wgmma value = Wgmma::kF16; };
template <> struct WgmmaType<e4m3> { static constexpr Wgmma value = Wgmma::kE4m3; };

template <class T> struct HalfOf { using type = T; };
template <> struct HalfOf<e4m3> { using type = bf16; };

__device__ __forceinline__ u32 min_of(u32 a, u32 b) { return a < b ? a : b; }

// The same box to both blocks of the cluster, and to a barrier of each.
__device__ __forceinline__ void tma_load_both(u32 to, const TensorMap* map, u32 barrier, int c0, int c1, int c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(to),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "h"(u16(3))
      : "memory");
}

// At a barrier of block `rank` of the cluster. With `.release.cluster` it would wait for all memory (628 against 796
// TFLOP/s); what is told here is that shared memory was read.
__device__ __forceinline__ void barrier_arrive_at(u32 barrier, u32 rank) {
  asm volatile("{\n.reg .b32 r;\nmapa.shared::cluster.u32 r, %0, %1;\nmbarrier.arrive.shared::cluster.b64 _, [r];\n}" ::"r"(barrier), "r"(rank) : "memory");
}

// kGather: row r of the product reads row p.x_rows[r] / p.x_share of x, which TMA cannot; all threads of the copying
// warpgroup copy them, 16 bytes at a time.
template <class T, class Tile, bool kGate, bool kFold, bool kGather>
__global__ void __launch_bounds__(Tile::kThreads, 1) sm90_gemm(const __grid_constant__ Sm90GemmParams all) {
  constexpr int kRows = Tile::kRows, kColumns = Tile::kColumns, kStages = Tile::kStages, kCluster = Tile::kCluster, kConsumers = Tile::kConsumers;
  constexpr bool kScaled = sizeof(T) == 1;
  static_assert(kFold || !kScaled, "sums of fp8 are folded");
  constexpr u32 kPiece = 128 / sizeof(T), kParts = kFold ? 128 / kPiece : 1, kDepth = kParts * kPiece;  // columns
  constexpr u32 kX = kRows * 128, kW = kColumns * 128, kStage = kParts * (kX + kW);                     // bytes
  constexpr int kOut = kGate ? kColumns / 2 : kColumns;
  constexpr Wgmma kType = WgmmaType<T>::value;
  const GemmParams& p = all.gemm;
  extern __shared__ __align__(1024) u8 smem[];
  __shared__ __align__(8) u64 barriers[2 * kStages];
  __shared__ float unit;
  const u32 base = shared_address(smem), full = shared_address(barriers), empty = full + 8 * kStages;
  const u32 group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0), rank = kCluster > 1 ? cluster_rank() : 0;
  if (threadIdx.x == 0) {
    if constexpr (!kGather) tma_prefetch(&all.x_map);
    tma_prefetch(&all.w_map);
    for (u32 i = 0; i < kStages; ++i) {
      barrier_init(full + 8 * i, kGather ? 129 : 1);
      barrier_init(empty + 8 * i, 4 * kConsumers * kCluster);
    }
    barrier_init_done();
    unit = 1.f;
  }
  if constexpr (kCluster > 1) cluster_sync();
  else __syncthreads();
  wait_for_previous();

  const u32 steps = (p.k + kDepth - 1) / kDepth;
  auto place_of = [&](u32 index) {
    const u32 batch = index / all.each;
    Place place = find_place<kRows * kCluster, kOut>(p, index - batch * all.each, batch);
    return place;
  };

  if (group == 0) {
    if constexpr (kConsumers == 2) fewer_registers<kGather ? 56 : 40>();
    if (kGather || threadIdx.x == 0) {
      u32 stage = 0, parity = 1;
      for (u32 index = blockIdx.x / kCluster; index < all.tiles; index += gridDim.x / kCluster) {
        const Place place = place_of(index);
        if (place.first >= place.end) continue;
        const u32 first = place.first + rank * kRows, apart = kGate ? p.n : kColumns / 2;  // the second half of the weights' rows
        constexpr u32 kEach = kRows / 16;
        const u8* from[kGather ? kEach : 1];
        if constexpr (kGather) {
#pragma unroll
          for (u32 i = 0; i < kEach; ++i) {
            const u32 row = first + threadIdx.x / 8 + 16 * i;
            from[i] = static_cast<const u8*>(p.x) + (p.x_rows[row < place.end ? row : place.first] / p.x_share) * p.x_stride * sizeof(T) + threadIdx.x % 8 * 16;
          }
        }
        for (u32 step = 0; step < steps; ++step) {
          const u32 at = base + stage * kStage, told = full + 8 * stage;
          barrier_wait(empty + 8 * stage, parity);
          if (threadIdx.x == 0) {
            barrier_expect(told, kParts * (kW + (kGather ? 0 : kX)));
#pragma unroll
            for (u32 part = 0; part < kParts; ++part) {
              const u32 k = step * kDepth + part * kPiece, to = at + kParts * kX + part * kW;
              if constexpr (!kGather) tma_load(at + part * kX, &all.x_map, told, k, first, place.batch);
              if constexpr (kCluster > 1) {
                tma_load_both(to + rank * (kW / 2), &all.w_map, told, k, place.column + rank * apart, place.weight);
              } else {
                tma_load(to, &all.w_map, told, k, place.column, place.weight);
                tma_load(to + kW / 2, &all.w_map, told, k, place.column + apart, place.weight);
              }
            }
          }
          if constexpr (kGather) {
#pragma unroll
            for (u32 part = 0; part < kParts; ++part) {
              const u32 unit = threadIdx.x % 8, row = threadIdx.x / 8, k = step * kDepth + part * kPiece, column = k + unit * (16 / sizeof(T));
              const u32 left = column < p.k ? (p.k - column) * sizeof(T) : 0, to = at + part * kX + row * 128 + (unit ^ (row & 7)) * 16;
#pragma unroll
              for (u32 i = 0; i < kEach; ++i) cp_async_16(to + i * 16 * 128, left ? from[i] + k * sizeof(T) : from[i], left < 16 ? left : 16);
            }
            barrier_arrive_copies(told);
          }
          if (++stage == kStages) stage = 0, parity ^= 1;
        }
      }
      start_next();
    }
    __syncwarp();
  } else {
    if constexpr (kConsumers == 2) more_registers<kGather ? 224 : 232>();
    const u32 consumer = group - 1, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    u32 stage = 0, parity = 0;
    auto release = [&](u32 s) {
      if constexpr (kCluster > 1) {
        if (lane < kCluster) barrier_arrive_at(empty + 8 * s, lane);
      } else {
        if (lane == 0) barrier_arrive(empty + 8 * s);
      }
    };
    constexpr u32 kPitch = 40;
    float* sums = reinterpret_cast<float*>(smem + kStages * kStage) + (consumer * 4 + warp) * 16 * kPitch;
    for (u32 index = blockIdx.x / kCluster; index < all.tiles; index += gridDim.x / kCluster) {
      Place place = place_of(index);
      if (place.first >= place.end) continue;
      const u32 in_tile = rank * kRows + consumer * 64 + warp * 16;  // the warp's first row
      float acc[kColumns / 2], total[kFold ? kColumns / 2 : 1];
      if constexpr (kFold) {
#pragma unroll
        for (int i = 0; i < kColumns / 2; ++i) total[i] = 0.f;
      }
      // Scales of this thread's first row, of the row 8 below, and of the tile's columns, if they share one. Where there
      // are none there is a 1, and where there is one for all of k it stays.
      const float *x_scales = &unit, *w_scales = &unit;
      u32 below = 0;
      const bool by_column = kScaled && p.w_scales && p.w_block_rows % 128 != 0 && p.w_block_rows < p.n;
      if constexpr (kScaled) {
        if (p.x_scales) {
          const u32 row = place.first + in_tile + lane / 4, last = place.end - 1;
          x_scales = x_scales_of(p, place.batch, row < last ? row : last);
          below = x_scales_of(p, place.batch, row + 8 < last ? row + 8 : last) - x_scales;
        }
        if (p.w_scales && !by_column) w_scales = w_scales_of(p, place.weight, place.column);
      }
      // Which scales change every 128 columns. A number, not branches, of which ptxas would make loops of their own that spill.
      u32 change = (p.x_scales && p.x_block_columns == 128 ? 1 : 0) | (p.w_scales && p.w_block_columns == 128 ? 2 : 0);
      asm volatile("" : "+r"(change));
      // Products of one stage, begun.
      auto begin = [&](float (&to)[kColumns / 2], u32 at, u32 add) {
        const u64 a = wgmma_tile(at + consumer * 64 * 128, 0, 1024), b = wgmma_tile(at + kParts * kX, 0, 1024);
        wgmma_fence();
#pragma unroll
        for (u32 part = 0; part < kParts; ++part) {
#pragma unroll
          for (u32 j = 0; j < 4; ++j) wgmma<kType, 0, 0>(to, a + ((part * kX + 32 * j) >> 4), b + ((part * kW + 32 * j) >> 4), add | part | j);
        }
        wgmma_commit();
      };
      auto next_stage = [&] {
        barrier_wait(full + 8 * stage, parity);
        if constexpr (kGather) fence_async_proxy();
        const u32 now = stage;
        if (++stage == kStages) stage = 0, parity ^= 1;
        return now;
      };
      if constexpr (kFold) {
        // Two sets of sums: one is made while the other is added. Straight on for six stages, as ptxas lets no sums that
        // are read be under way around a loop (C7514).
        float other[kColumns / 2];
        struct Scales { float x[2], w; } scale, other_scale;
        auto next_scale = [&](Scales& to) {
          if constexpr (kScaled) {
            to = {{x_scales[0], x_scales[below]}, *w_scales};
            x_scales += change & 1, w_scales += change >> 1;
          }
        };
        u32 one, two;
        auto begin_one = [&] { next_scale(scale), one = next_stage(), begin(acc, base + one * kStage, 0); };
        auto begin_two = [&] { next_scale(other_scale), two = next_stage(), begin(other, base + two * kStage, 0); };
        auto fold = [&](const float (&from)[kColumns / 2], const Scales& by, u32 read) {
          release(read);
          const float scale[2] = {by.x[0] * by.w, by.x[1] * by.w};
#pragma unroll
          for (int i = 0; i < kColumns / 2; ++i) {
            if constexpr (kScaled) total[i] = fmaf(from[i], scale[i / 2 % 2], total[i]);
            else total[i] += from[i];
          }
        };
        auto both = [&](auto pairs) {
          begin_one();
#pragma unroll
          for (u32 i = 0; i + 1 < decltype(pairs)::value; ++i) {
            begin_two();
            wgmma_wait<1>();
            fold(acc, scale, one);
            begin_one();
            wgmma_wait<1>();
            fold(other, other_scale, two);
          }
          begin_two();
          wgmma_wait<1>();
          fold(acc, scale, one);
          wgmma_wait<0>();
          fold(other, other_scale, two);
        };
        u32 left = steps;
        for (; left >= 6; left -= 6) both(Constant<3>{});
        for (; left >= 2; left -= 2) both(Constant<1>{});
        if (left > 0) {
          begin_one();
          wgmma_wait<0>();
          fold(acc, scale, one);
        }
      } else {
        u32 previous = next_stage();
        begin(acc, base + previous * kStage, 0);
        for (u32 step = 1; step < steps; ++step) {
          const u32 now = next_stage();
          begin(acc, base + now * kStage, 1);
          wgmma_wait<1>();
          release(previous);
          previous = now;
        }
        wgmma_wait<0>();
        release(previous);
      }
      if constexpr (kFold) {
        // Asked again, so that it takes no registers until here.
        u32 again = index;
        asm volatile("" : "+r"(again)::"memory");
        place = place_of(again);
      }
      const u32 first = place.first + in_tile;
      if (first >= place.end) continue;

      // Through shared memory, so that a warp writes whole sectors: 32 sums of a row at a time, with a gate 16 of either kind.
      const Store store(p, place.batch);
      if constexpr (!kGate && kColumns >= 64) {
        using Half = typename HalfOf<T>::type;
        if (p.then == 0 && p.out_type == (is_same<Half, bf16>::value ? 2 : 1) && p.vector && p.n % 8 == 0 && !by_column) {
          // Nothing but rounding: 64 columns at a time, 16-byte units swizzled by row.
          u16* rows[4];
          const u32 unit = lane % 8, to = shared_address(sums), row = lane % 16;
#pragma unroll
          for (u32 i = 0; i < 4; ++i) rows[i] = static_cast<u16*>(p.out) + store.row(p, min_of(first + lane / 8 + 4 * i, place.end - 1)) + place.column + unit * 8;
#pragma unroll
          for (u32 c = 0; c < kColumns / 64; ++c) {
            __syncwarp();  // the last ones were read
#pragma unroll
            for (u32 g = 0; g < 8; g += 2) {
              const float* y;
              if constexpr (kFold) y = total + 32 * c + 4 * g;
              else y = acc + 32 * c + 4 * g;
              stmatrix_x4(to + row * 128 + ((g + lane / 16) ^ (row & 7)) * 16, pack2<Half>(y[0], y[1]), pack2<Half>(y[2], y[3]), pack2<Half>(y[4], y[5]),
                          pack2<Half>(y[6], y[7]));
            }
            __syncwarp();
#pragma unroll
            for (u32 i = 0; i < 4; ++i) {
              const u32 r = lane / 8 + 4 * i;
              const Chunk chunk = *reinterpret_cast<const Chunk*>(reinterpret_cast<const u8*>(sums) + r * 128 + (unit ^ (r & 7)) * 16);
              if (first + r < place.end && place.column + 64 * c + unit * 8 < p.n) fir::store(rows[i] + 64 * c, chunk);
            }
          }
          continue;
        }
      }
      constexpr u32 kChunk = kGate ? 16 : 32, kUnits = kChunk / 8;
#pragma unroll 1
      for (u32 c = 0; c < kColumns / 32; ++c) {
        __syncwarp();  // the last ones were read
#pragma unroll
        for (u32 here = 0; here < kColumns / 32; ++here) {
          if (here != c) continue;  // so that registers have constant numbers, and the rest of the loop is there once
#pragma unroll
          for (u32 g = 0; g < 4; ++g) {
            const u32 d = kGate ? 8 * here + 4 * (g % 2) + g / 2 * (kColumns / 4) : 16 * here + 4 * g;
            const float* y;
            if constexpr (kFold) y = total + d;
            else y = acc + d;
            float* to = sums + lane / 4 * kPitch + g * 8 + lane % 4 * 2;
            *reinterpret_cast<float2*>(to) = make_float2(y[0], y[1]);
            *reinterpret_cast<float2*>(to + 8 * kPitch) = make_float2(y[2], y[3]);
          }
        }
        __syncwarp();
#pragma unroll
        for (u32 i = lane; i < 16 * kUnits; i += 32) {
          const u32 row = i / kUnits, column = place.column + c * kChunk + i % kUnits * 8;
          float* from = sums + row * kPitch + i % kUnits * 8;
          if (first + row >= place.end) continue;
          if constexpr (kGate) {
#pragma unroll 2
            for (u32 e = 0; e < 8; ++e) from[e] = gate(p, from[e]) * from[16 + e];
          }
          if (by_column) {
#pragma unroll 1
            for (u32 e = 0; e < 8; ++e) from[e] *= w_scale(p, place.weight, column + e < p.n ? column + e : p.n - 1, 0);
          }
          store.eight(p, store.row(p, first + row), column, from);
        }
      }
    }
  }
  // No block leaves while the other may still copy into it.
  if constexpr (kCluster > 1) cluster_sync();
}

}  // namespace fir
