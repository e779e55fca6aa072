// sm90_mla.cuh: latent attention (512 + 64) on Hopper: wgmma, TMA, blocks in pairs.
//
//   s[r][j] = scale (q[r] . ckv[j] + q_pe[r] . kpe[j])        o[r] = sum_j softmax_j(s) ckv[j]        lse as in decode.cuh
//
// grid   (workers x kCluster)  a worker is a cluster: block `rank` has rows 64 rank.. of the query tile; items as in
//                              decode.cuh, a "KV head" here being `group` query heads of those that share the one latent
// block  512 = 4 warpgroups    load: one warp asks for tiles of 64 positions; score: S = Q K^T, softmax, P to shared memory;
//                              two for the output: O += P V, 256 columns each
// smem   kHalves x 32 KB of ckv (64 positions x 256 columns), kRopes x 8 KB of kpe, 3 of the 9 column blocks of Q, 2 P
// needs  sm_90a; head dims 512 and 64, 16-bit operands and output, pages of a multiple of 8 rows
//
//   load    ropes, halves  --full-->  score   --P, factors-->  output  --empty (to both blocks of the pair)-->  load
//
// A tile is in shared memory once and serves both products: as keys k-major, as values mn-major. An SM's tensor cores take
// 2176 clocks for a tile; its shared memory 576 to write it, 768 for the second product, and 1152 for the first if all of Q
// came from there, which together is more. So 6 of Q's 9 column blocks stay in registers (768 for the first product), and
// their 48 KB go to the ring. Both blocks of a pair have the same positions: each asks for half of a tile and has it sent
// to both, or L2 would have to give 7 TB/s at full rate.
// P is relative to a maximum that moves only when it grew by more than 8 (in powers of 2), so the 128 registers of output
// are seldom multiplied.
//
// The tensor cores take what they are asked for by several warpgroups in turn. If values of a tile are asked for as soon as its
// weights are there, they run beside the next scores, and nothing runs beside the softmax after those. So in long units they
// wait for the scores, the first half before the second one, whose place is wanted later; the places being free later, tiles are
// asked for ahead to L2. On an H200 (128 heads, pages of 64) 64 x 8192 takes 223 us so, 655 TFLOP/s; 240 with neither, 247 without L2, 242
// without the wait. The places of units that have just begun are still filling: 64 x 2048 takes 71 us either way, 16 x 2048 33 and 40.
// Of the 38 us that 16 x 2048 took, queries in three rounds by way of shared memory were 7, 8 tiles 14, writing parts
// 5 and merging them 7.
//
// Values that are not finite: in tiles where a position is shown to one row and hidden from another (or is past the end),
// they are made 0 once the scores are known. A row that saw them has a score that is not finite, and says so in its sum.
//
// reads  q; whole pages of the items' requests
// writes out, lse of whole units; partial_o, partial_md of parts, which mla_merge reads
// twins  src/cpu/attention/, src/reference/attention.rs
#pragma once
#include <fir/attention/finite.cuh>
#include <fir/attention/params.cuh>
#include <fir/base/cluster.cuh>
#include <fir/base/mbarrier.cuh>
#include <fir/base/tma.cuh>
#include <fir/base/wgmma.cuh>

namespace fir {

template <class Variant>
struct MlaParams {
  /// ckv as {64, 8, 8, page_size / 8, pages}: columns, rows, blocks of 64 columns, groups of 8 rows, pages; boxes of
  /// {64, 8, 4, box_rows / 8, 1}. kpe without the third.
  TensorMap ckv, kpe;
  const unsigned char* q_pe;
  long long q_pe_token, q_pe_head;
  const int* merge_count;
  /// Rows of a box: divides the page size and 32.
  int box_rows;
  int pad;
  AttentionParams<Variant> common;
};

template <class TKv, class TO, class Variant_, int kCluster_>
struct MlaConfig {
  using Kv = TKv;
  using Out = TO;
  using Variant = Variant_;
  static constexpr int kCluster = kCluster_, kThreads = 512, kDim = 512, kTile = 64;
  /// Column blocks (of 64) of Q's first part that are registers of the score warpgroup; the others are in shared memory.
  static constexpr int kQRegs = 6, kQShared = 9 - kQRegs;
  /// Positions of a unit from which on the second product waits for the next scores.
  static constexpr int kMany = 48 * kTile;
  static constexpr int kHalves = 5, kRopes = 3, kP = 2;
  static constexpr int kHalfBytes = 32768, kBlockBytes = 8192;
  static constexpr int kRopeAt = kHalves * kHalfBytes, kQAt = kRopeAt + kRopes * kBlockBytes, kPAt = kQAt + kQShared * kBlockBytes;
  static constexpr int kFactorAt = kPAt + kP * kBlockBytes, kStateAt = kFactorAt + kP * 256, kBarrierAt = kStateAt + 512;
  static constexpr int kBarriers = 2 * (kHalves + kRopes + kP + 1);
  static constexpr int kSharedBytes = kBarrierAt + 8 * kBarriers;
  static_assert(kSharedBytes == 230576, "src/cuda/attention/mla.rs");
};

/// A box to this block, or to all blocks of the cluster at the same place.
template <int kCluster>
__device__ __forceinline__ void mla_load(u32 to, const TensorMap* map, u32 barrier, int c0, int c1, int c2, int c3, int c4) {
  if constexpr (kCluster == 1) {
    tma_load(to, map, barrier, c0, c1, c2, c3, c4);
  } else {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(to),
                 "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "h"(static_cast<unsigned short>((1 << kCluster) - 1))
                 : "memory");
  }
}
template <int kCluster>
__device__ __forceinline__ void mla_load(u32 to, const TensorMap* map, u32 barrier, int c0, int c1, int c2, int c3) {
  if constexpr (kCluster == 1) {
    tma_load(to, map, barrier, c0, c1, c2, c3);
  } else {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(to),
                 "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "h"(static_cast<unsigned short>((1 << kCluster) - 1))
                 : "memory");
  }
}

/// A warp says to every block of the cluster that it has read what `barrier` guards.
template <int kCluster>
__device__ __forceinline__ void mla_release(u32 barrier) {
  const int lane = threadIdx.x & 31;
  if constexpr (kCluster == 1) {
    barrier_arrive_warp(barrier);
  } else if (lane < kCluster) {
    // Without .release: nothing was written, and ptxas would make a fence of all memory of it.
    asm volatile("{\n.reg .b32 r;\nmapa.shared::cluster.u32 r, %0, %1;\nmbarrier.arrive.shared::cluster.b64 _, [r];\n}" ::"r"(barrier),
                 "r"(lane)
                 : "memory");
  }
}

/// Fragments of two rows, 8 apart: words 0 and 16 bytes from 32 i on. Offsets are constants, as ptxas would keep an address for each.
template <int kFrom = 0, int kCount>
__device__ __forceinline__ void load_fragments(u32 (&q)[kCount][4], const unsigned char* row, const unsigned char* below) {
  if constexpr (kFrom < kCount) {
    asm volatile("ld.global.nc.b32 %0, [%1 + %2];" : "=r"(q[kFrom][0]) : "l"(row), "n"(32 * kFrom));
    asm volatile("ld.global.nc.b32 %0, [%1 + %2];" : "=r"(q[kFrom][1]) : "l"(below), "n"(32 * kFrom));
    asm volatile("ld.global.nc.b32 %0, [%1 + %2];" : "=r"(q[kFrom][2]) : "l"(row), "n"(32 * kFrom + 16));
    asm volatile("ld.global.nc.b32 %0, [%1 + %2];" : "=r"(q[kFrom][3]) : "l"(below), "n"(32 * kFrom + 16));
    load_fragments<kFrom + 1>(q, row, below);
  }
}

/// A place in a ring of kCount, and the parity of its round.
template <int kCount>
struct RingPlace {
  int at = 0;
  u32 round = 0;
  __device__ __forceinline__ void step() {
    if (++at == kCount) at = 0, round ^= 1;
  }
};

/// A worker's units, heads of items, one after the other. What an item says is read where it is used: registers are few.
struct UnitList {
  const WorkItem* items;
  int item, head;
  __device__ __forceinline__ UnitList(const WorkItem* list, int worker) : items(list), item(worker), head(list[worker].head_start) {}
  __device__ __forceinline__ bool any() const { return item >= 0 && items[item].tokens != 0; }
  __device__ __forceinline__ void next() {
    if (++head < items[item].head_end) return;
    item = items[item].next;
    if (item >= 0) head = items[item].head_start;
  }
  __device__ __forceinline__ const WorkItem& operator*() const { return items[item]; }
  __device__ __forceinline__ const WorkItem* operator->() const { return items + item; }
};

/// How a row ends: what its output is multiplied by, and `lse`.
struct RowEnd {
  float scale;
  __device__ __forceinline__ RowEnd(const OutParams& out, float v_scale, float m, float d, long long token, long long head, bool first) {
    scale = d == 0.0f ? 0.0f : v_scale / d;
    if (first && out.lse != nullptr) out.lse[token * out.lse_token + head * out.lse_head] = d == 0.0f ? neg_inf() : m + log2f(d);
  }
};

/// Merges what was cut, a launch of its own: the last block to bring a part would take 1.5 us for each of them, as much as
/// for a tile. grid (merges x 16 kCluster; in a graph, whose next batch may have others, fewer blocks in turns), block 256: four
/// rows, 16 bytes of each half of one for a thread, so that 16 requests' blocks are there at the same time.
template <class C>
__global__ void __launch_bounds__(256, 4) mla_merge(const __grid_constant__ MlaParams<typename C::Variant> all) {
  using TO = typename C::Out;
  constexpr int kPerRow = C::kDim / 8, kAhead = 4, kFours = 16 * C::kCluster;
  const auto& p = all.common;
  const int column = threadIdx.x % kPerRow;
  wait_for_previous();
  const int units = *all.merge_count * kFours;
  for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
    const int own = unit % kFours * 4 + threadIdx.x / kPerRow;
    const MergeItem merge = p.out.merges[unit / kFours];
    const WorkItem& w = p.items[merge.item];
    if (own >= w.tokens * p.group) continue;
    float m = neg_inf(), d = 0.0f, o[2][4] = {};
    for (int i = 0; i < merge.parts; i += kAhead) {
      float2 md[kAhead];
      float4 x[kAhead][2];
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        const long long at = merge.first + static_cast<long long>(i + j) * merge.stride + own;
        const float4* from = reinterpret_cast<const float4*>(p.out.partial_o + at * C::kDim) + column;
        const bool there = i + j < merge.parts;
        md[j] = there ? __ldcg(p.out.partial_md + at) : make_float2(neg_inf(), 0.0f);
#pragma unroll
        for (int h = 0; h < 2; ++h) x[j][h] = there ? __ldcg(from + h * kPerRow) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      }
      float top = m;
#pragma unroll
      for (int j = 0; j < kAhead; ++j) top = fmaxf(top, md[j].x);
      const float a = exp2_diff(m, top);
      m = top, d *= a;
#pragma unroll
      for (int h = 0; h < 2; ++h) o[h][0] *= a, o[h][1] *= a, o[h][2] *= a, o[h][3] *= a;
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        const float b = exp2_diff(md[j].x, top);
        d += b * md[j].y;
#pragma unroll
        for (int h = 0; h < 2; ++h) o[h][0] += b * x[j][h].x, o[h][1] += b * x[j][h].y, o[h][2] += b * x[j][h].z, o[h][3] += b * x[j][h].w;
      }
    }
    const long long token = w.q_start + own / p.group;
    const long long head = static_cast<long long>(w.head_start + unit / kFours - w.merge) * p.group + own % p.group;
    const RowEnd finish(p.out, p.kv.v_scale, m, d, token, head, column == 0);
    unsigned char* to = p.out.out + token * p.out.out_token + head * p.out.out_head + column * (TO::kBits / 2);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int i = 0; i < 4; ++i) o[h][i] = d == 0.0f ? 0.0f : o[h][i] * finish.scale;
      store4<TO>(to + h * kPerRow * (TO::kBits / 2), o[h]);
    }
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) mla_sm90(const __grid_constant__ MlaParams<typename C::Variant> all) {
  using V = typename C::Variant;
  using Kv = typename C::Kv;
  using TO = typename C::Out;
  static_assert(V::kSoftmax && !V::kHasQuery && !V::kHasKey && !V::kHasValue && !V::kHasLogits && !V::kHasInit && !V::kHasOutput);
  static_assert(!RopeOf<V, false>::kOn && !RopeOf<V, true>::kOn);
  constexpr Wgmma kType = Same<Kv, Bf16>::value ? Wgmma::kBf16 : Wgmma::kF16;
  constexpr int kCluster = C::kCluster;
  extern __shared__ __align__(1024) unsigned char shared[];
  const AttentionParams<V>& p = all.common;
  const u32 base = shared_address(shared), barriers = base + C::kBarrierAt;
  const u32 half_full = barriers, half_empty = half_full + 8 * C::kHalves, rope_full = half_empty + 8 * C::kHalves,
            rope_empty = rope_full + 8 * C::kRopes, p_full = rope_empty + 8 * C::kRopes, p_empty = p_full + 8 * C::kP,
            state_full = p_empty + 8 * C::kP, state_empty = state_full + 8;
  float* factors = reinterpret_cast<float*>(shared + C::kFactorAt);  // [kP][64]
  float2* state = reinterpret_cast<float2*>(shared + C::kStateAt);   // [64] (m, d)
  const int role = __shfl_sync(~0u, threadIdx.x >> 7, 0), thread = threadIdx.x & 127, warp = thread >> 5, lane = thread & 31;
  const int rank = kCluster == 1 ? 0 : int(cluster_rank());
  const int row = 16 * warp + (lane >> 2);  // of this thread's accumulators, with row + 8

  if (threadIdx.x == 0) {
    constexpr u32 kReleases = 4 * (kCluster == 1 ? kWarpArrivals : kCluster);
    for (int i = 0; i < C::kHalves; ++i) barrier_init(half_full + 8 * i, 1), barrier_init(half_empty + 8 * i, kReleases);
    for (int i = 0; i < C::kRopes; ++i) barrier_init(rope_full + 8 * i, 1), barrier_init(rope_empty + 8 * i, kReleases);
    for (int i = 0; i < C::kP; ++i) barrier_init(p_full + 8 * i, 128), barrier_init(p_empty + 8 * i, 8 * kWarpArrivals);
    barrier_init(state_full, 128), barrier_init(state_empty, 8 * kWarpArrivals);
    barrier_init_done();
    tma_prefetch(&all.ckv), tma_prefetch(&all.kpe);
  }
  cluster_sync(kCluster);
  wait_for_previous();
  start_next();

  UnitList unit(p.items, blockIdx.x / kCluster);
  if (role == 0) {  // load
    fewer_registers<24>();
    if (warp == 0) {
      RingPlace<C::kHalves> half;
      RingPlace<C::kRopes> rope;
      // This block's rows of every tile, in boxes of one lane each.
      constexpr int kOwn = C::kTile / kCluster;
      const int in_tile = rank * kOwn + lane * all.box_rows;
      const bool mine = lane < kOwn / all.box_rows;
      for (; unit.any(); unit.next()) {
        const int pages = p.kv.start(unit->pages), end = unit->kv_end;
        const int ahead_end = end - unit->kv_start > C::kMany ? end - 2 * C::kTile : 0;
        for (int start = unit->kv_start; start < end; start += C::kTile) {
          // Past the end, any row of the last page will do.
          unsigned page;
          long long slot;
          p.kv.place(p.kv.entry(pages, min(start + in_tile, end - 1)), start + in_tile, page, slot);
          const int group = int(slot) >> 3, first = int(page);
          if (start + in_tile < ahead_end && mine) {
            // Two tiles on, to L2: what is asked for when its place is free is wanted some 1100 clocks later.
            const int later = start + 2 * C::kTile + in_tile;
            p.kv.place(p.kv.entry(pages, later), later, page, slot);
            tma_prefetch(&all.ckv, 0, 0, 0, int(slot) >> 3, int(page));
            tma_prefetch(&all.ckv, 0, 0, 4, int(slot) >> 3, int(page));
            tma_prefetch(&all.kpe, 0, 0, int(slot) >> 3, int(page));
          }
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            barrier_wait(half_empty + 8 * half.at, half.round ^ 1);
            if (lane == 0) barrier_expect(half_full + 8 * half.at, C::kHalfBytes);
            __syncwarp();
            if (mine) {
              mla_load<kCluster>(base + half.at * C::kHalfBytes + in_tile * 512, &all.ckv, half_full + 8 * half.at, 0, 0, 4 * h, group, first);
            }
            half.step();
          }
          barrier_wait(rope_empty + 8 * rope.at, rope.round ^ 1);
          if (lane == 0) barrier_expect(rope_full + 8 * rope.at, C::kBlockBytes);
          __syncwarp();
          if (mine) {
            mla_load<kCluster>(base + C::kRopeAt + rope.at * C::kBlockBytes + in_tile * 128, &all.kpe, rope_full + 8 * rope.at, 0, 0, group,
                               first);
          }
          rope.step();
        }
      }
    }
  } else if (role == 1) {  // score
    more_registers<168>();
    RingPlace<C::kHalves> half;
    RingPlace<C::kRopes> rope;
    RingPlace<C::kP> out;
    u32 round = 0;
    const float scale = p.sm_scale * p.kv.k_scale * kLog2e;
    const u64 q_tile = wgmma_tile(base + C::kQAt, 0, 1024);
    for (; unit.any(); unit.next()) {
      // Q: blocks that stay in shared memory by copies, the others straight into fragments, all asked for at once: in rounds by way
      // of shared memory they were there 7.7 us after the start of 16 x 2048. Rows past the last repeat it.
      u32 q[4 * C::kQRegs][4];
      {
        const int rows = unit->tokens * p.group, q_start = unit->q_start;
        auto place = [&](const unsigned char* from, long long token, long long heads, int r) {
          const int own = min(rank * 64 + r, rows - 1);
          return from + (q_start + own / p.group) * token + (static_cast<long long>(unit.head) * p.group + own % p.group) * heads;
        };
        named_sync(1, 128);  // no warp still reads what was there
#pragma unroll 1
        for (int i = 0; i < 4; ++i) {
          const int r = i * 16 + (thread >> 3), chunk = thread & 7;
          const u32 to = base + C::kQAt + r * 128 + ((chunk ^ (r & 7)) << 4);
          const unsigned char* at = place(p.q + C::kQRegs * 128, p.q_token, p.q_head, r) + chunk * 16;
#pragma unroll
          for (int block = 0; block < C::kQShared - 1; ++block) cp_async_16(to + block * C::kBlockBytes, at + block * 128);
          cp_async_16(to + (C::kQShared - 1) * C::kBlockBytes, place(all.q_pe, all.q_pe_token, all.q_pe_head, r) + chunk * 16);
        }
        cp_async_commit();
        const unsigned char *at = place(p.q, p.q_token, p.q_head, row) + (lane & 3) * 4, *below = place(p.q, p.q_token, p.q_head, row + 8) + (lane & 3) * 4;
        load_fragments(q, at, below);
        cp_async_wait<0>();
        fence_async_proxy();
        named_sync(1, 128);
      }

      float m[2] = {neg_inf(), neg_inf()}, d[2] = {0.0f, 0.0f};
      const int end = unit->kv_end, full_end = unit->full_end;
      const bool many = end - unit->kv_start > C::kMany;
      float s[32], x[32];
      auto score = [&] {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          barrier_wait(half_full + 8 * half.at, half.round);
          wgmma_fence();
          const u64 keys = wgmma_tile(base + half.at * C::kHalfBytes, 0, 4096);
#pragma unroll
          for (int i = 0; i < 16; ++i) {
            const u64 key = keys + (i / 4) * 64 + 2 * (i % 4);
            const int block = 4 * h + i / 4;
            if (block < C::kQRegs) wgmma<kType, 0>(s, q[block < C::kQRegs ? 16 * h + i : 0], key, h + i != 0);
            else wgmma<kType, 0, 0>(s, q_tile + (block - C::kQRegs) * (C::kBlockBytes >> 4) + 2 * (i % 4), key, h + i != 0);
          }
          half.step();
        }
        barrier_wait(rope_full + 8 * rope.at, rope.round);
        wgmma_fence();
        const u64 keys = wgmma_tile(base + C::kRopeAt + rope.at * C::kBlockBytes, 0, 1024);
#pragma unroll
        for (int k = 0; k < 4; ++k) wgmma<kType, 0, 0>(s, q_tile + (C::kQShared - 1) * (C::kBlockBytes >> 4) + 2 * k, keys + 2 * k, 1);
        wgmma_commit();
      };
      auto take = [&] {
        wgmma_wait<0>();
        mla_release<kCluster>(rope_empty + 8 * rope.at);
        rope.step();
#pragma unroll
        for (int i = 0; i < 32; ++i) x[i] = s[i] * scale;
      };
      auto weigh = [&](int start) {
        if (start + C::kTile > full_end) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const RowContext c = row_context(*unit, p.out.tokens, unit.head, p.group, rank * 64 + row + 8 * h);
#pragma unroll
            for (int i = 0; i < 16; ++i) {
              const int kv = start + 8 * (i >> 1) + 2 * (lane & 3) + (i & 1);
              bool seen = kv < end;
              if constexpr (V::kHasMask) seen = seen && c.template mask<V>(p.variant, kv);
              float& y = x[4 * (i >> 1) + 2 * h + (i & 1)];
              y = seen ? y : neg_inf();
            }
          }
        }
        float factor[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float top = fmaxf(x[2 * h], x[2 * h + 1]);
#pragma unroll
          for (int i = 1; i < 8; ++i) top = fmaxf(top, fmaxf(x[4 * i + 2 * h], x[4 * i + 2 * h + 1]));
          top = quad_max(top);
          const float next = top > m[h] + 8.0f ? top : m[h];
          factor[h] = next == m[h] ? 1.0f : exp2_fast(m[h] - next);
          m[h] = next;
          d[h] *= factor[h];
          const float from = next == neg_inf() ? 0.0f : next;
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            float &y = x[4 * i + 2 * h], &z = x[4 * i + 2 * h + 1];
            y = exp2_fast(y - from), z = exp2_fast(z - from);
            d[h] += y + z;
          }
        }
        barrier_wait(p_empty + 8 * out.at, out.round ^ 1);
        const u32 to = base + C::kPAt + out.at * C::kBlockBytes + (16 * warp + (lane & 15)) * 128;
#pragma unroll
        for (int i = 0; i < 8; i += 2) {
          stmatrix_x4(to + (((i + (lane >> 4)) ^ (lane & 7)) << 4), pack2<Kv>(x[4 * i], x[4 * i + 1]), pack2<Kv>(x[4 * i + 2], x[4 * i + 3]),
                      pack2<Kv>(x[4 * i + 4], x[4 * i + 5]), pack2<Kv>(x[4 * i + 6], x[4 * i + 7]));
        }
        if ((lane & 3) == 0) factors[out.at * 64 + row] = factor[0], factors[out.at * 64 + row + 8] = factor[1];
        fence_async_proxy();
        barrier_arrive(p_full + 8 * out.at);
        out.step();
      };
      int start = unit->kv_start;
      if (start < end) {
        score();
        take();
#pragma unroll 1
        for (start += C::kTile; start < end; start += C::kTile) {
          weigh(start - C::kTile);
          score();
          take();
          if (many) named_arrive(5, 384);
        }
        weigh(start - C::kTile);
      }
      d[0] = quad_sum(d[0]), d[1] = quad_sum(d[1]);
      barrier_wait(state_empty, round ^ 1);
      if ((lane & 3) == 0) state[row] = make_float2(m[0], d[0]), state[row + 8] = make_float2(m[1], d[1]);
      barrier_arrive(state_full);
      round ^= 1;
    }
  } else {  // output
    more_registers<160>();
    const int side = role - 2;
    RingPlace<C::kHalves> half;
    RingPlace<C::kP> in;
    u32 round = 0;
    half.at = side;
    for (; unit.any(); unit.next()) {
      float o[2][64];
#pragma unroll
      for (int i = 0; i < 128; ++i) o[i / 64][i % 64] = 0.0f;
      const int end = unit->kv_end, full_end = unit->full_end;
      const bool many = end - unit->kv_start > C::kMany;
#pragma unroll 1
      for (int start = unit->kv_start; start < end; start += C::kTile) {
        barrier_wait(p_full + 8 * in.at, in.round);
        const float a = factors[in.at * 64 + row], b = factors[in.at * 64 + row + 8];
        if (__any_sync(~0u, a != 1.0f || b != 1.0f)) {
#pragma unroll
          for (int i = 0; i < 128; i += 4) {
            float* x = o[i / 64] + i % 64;
            x[0] *= a, x[1] *= a, x[2] *= b, x[3] *= b;
          }
        }
        if (start + C::kTile > full_end) {
          uint4* values = reinterpret_cast<uint4*>(shared + half.at * C::kHalfBytes);
#pragma unroll 1
          for (int i = thread; i < C::kHalfBytes / 16; i += 128) {
            const bool there = (i >> 8) * 8 + ((i >> 3) & 7) < end - start;  // [group of 8 rows][4 blocks][8 rows][8 chunks]
            if (!there) {
              values[i] = make_uint4(0, 0, 0, 0);
            } else if constexpr (V::kHasMask) {
              uint4 x = values[i];
              if (!not_finite<Kv>(x)) continue;
              x.x &= ~((not_finite<Kv>(x.x) >> 15) * 0xffffu), x.y &= ~((not_finite<Kv>(x.y) >> 15) * 0xffffu);
              x.z &= ~((not_finite<Kv>(x.z) >> 15) * 0xffffu), x.w &= ~((not_finite<Kv>(x.w) >> 15) * 0xffffu);
              values[i] = x;
            }
          }
          fence_async_proxy();
          named_sync(2 + side, 128);
        }
        const u64 weights = wgmma_tile(base + C::kPAt + in.at * C::kBlockBytes, 0, 1024);
        const u64 values = wgmma_tile(base + half.at * C::kHalfBytes, 1024, 4096);
        if (many && start + C::kTile < end) named_sync(5, 384);
        if (side == 1) named_sync(4, 256);  // the other half's place is wanted back first
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          wgmma<kType, 0, 1>(o[0], weights + 2 * k, values + 512 * k, 1);
          wgmma<kType, 0, 1>(o[1], weights + 2 * k, values + 512 * k + 128, 1);
        }
        wgmma_commit();
        if (side == 0) named_arrive(4, 256);
        wgmma_wait<0>();
        barrier_arrive_warp(p_empty + 8 * in.at);
        mla_release<kCluster>(half_empty + 8 * half.at);
        in.step();
        half.step(), half.step();
      }

      barrier_wait(state_full, round);
      const float2 md[2] = {state[row], state[row + 8]};
      __syncwarp();
      barrier_arrive_warp(state_empty);
      round ^= 1;
      const int rows = unit->tokens * p.group, partial = unit->partial;
      const bool odd = lane & 1;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int own = rank * 64 + row + 8 * h;
        const long long token = unit->q_start + own / p.group, head = static_cast<long long>(unit.head) * p.group + own % p.group;
        const int column = 256 * side + 8 * int(odd) + 2 * (lane & 2);
        const RowEnd finish(p.out, p.kv.v_scale, md[h].x, md[h].y, token, head, partial < 0 && own < rows && side == 0 && (lane & 3) == 0);
        unsigned char* to = p.out.out + token * p.out.out_token + head * p.out.out_head + column * (TO::kBits / 8);
        const long long at = partial + static_cast<long long>(unit.head - unit->head_start) * rows + own;
        if (partial >= 0) to = reinterpret_cast<unsigned char*>(p.out.partial_o + at * C::kDim + column);
        if (partial >= 0 && own < rows && side == 0 && (lane & 3) == 0) __stcg(p.out.partial_md + at, md[h]);
#pragma unroll
        for (int g = 0; g < 32; g += 2) {
          // A thread's pairs of columns in two groups of 8 become 4 neighbours in one of them.
          const float *x = o[g / 16] + 4 * (g % 16) + 2 * h, *y = x + 4;
          const float u = __shfl_xor_sync(~0u, odd ? x[0] : y[0], 1), v = __shfl_xor_sync(~0u, odd ? x[1] : y[1], 1);
          float four[4] = {odd ? u : x[0], odd ? v : x[1], odd ? y[0] : u, odd ? y[1] : v};
          if (own >= rows) continue;
          if (partial >= 0) {
            __stcg(reinterpret_cast<float4*>(to + 32 * g), make_float4(four[0], four[1], four[2], four[3]));
          } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) four[i] = md[h].y == 0.0f ? 0.0f : four[i] * finish.scale;
            store4<TO>(to + g * TO::kBits, four);
          }
        }
      }
    }
  }
  // The other block may still send here, or count on this one's barriers.
  cluster_sync(kCluster);
}

}  // namespace fir
