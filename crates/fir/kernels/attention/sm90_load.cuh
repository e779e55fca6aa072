// sm90_load.cuh: warpgroup 0 of sm90_prefill.cuh: takes units, brings q, keys and values, and makes values ready.
//
// Boxes by TMA, or rows by cp.async where no box lies in one page. A stage is filled when both other warpgroups have given
// it back.
//
// reads  items, the page table, q, keys and values
// needs  sm_90a
#pragma once
#include <fir/attention/finite.cuh>
#include <fir/attention/sm90_pipe.cuh>

namespace fir {

/// The item and the KV head of a unit.
template <class V>
__device__ __forceinline__ void unit_of(const Sm90Params<V>& all, int unit, int count, int& item, int& head) {
  const int block = count * all.heads_at_once, first = unit / block * all.heads_at_once, heads = min(all.heads_at_once, all.heads - first);
  const int rest = unit - unit / block * block;
  item = rest / heads, head = first + rest - item * heads;
}

/// Clears rows of values from `valid` on and says whether the others have something that is not finite. `thread` of `threads`
/// that share the tile; with `kOwn`, of chunks that `own(row, chunk)` says are this thread's.
template <class C>
__device__ __forceinline__ bool keep_values(unsigned char* values, int valid, int thread, int threads) {
  using Rows = GroupedRows<C::kDimVo>;
  constexpr int kChunks = C::kDimVo / 8;
  bool any = false;
  for (int i = thread; i < C::kTile * kChunks; i += threads) {
    const int row = i / kChunks;
    uint4* x = reinterpret_cast<uint4*>(values + Rows::offset(row, i % kChunks));
    if (row >= valid) *x = make_uint4(0, 0, 0, 0);
    else if (C::Variant::kHasMask) any |= not_finite<typename C::Type>(*x);
  }
  return any;
}

/// One warp: q, keys and values by TMA.
template <class C>
__device__ __forceinline__ void bring_boxes(const Sm90Params<typename C::Variant>& all, const Sm90Pipe<C>& pipe, unsigned char* shared) {
  const auto& p = all.common;
  const int lane = threadIdx.x & 31;
  Sm90Unit* units = reinterpret_cast<Sm90Unit*>(shared + C::kUnits);
  const int count = *all.count, total = count * all.heads, boxes = C::kTile / all.box_rows;
  Ring<C::kQStages> qs;
  Ring<C::kStages> ks, vs;
  int unit = blockIdx.x;
  while (true) {
    barrier_wait(pipe.q_empty(qs.stage), qs.phase ^ 1);
    if (unit >= total) break;
    int item, head;
    unit_of(all, unit, count, item, head);
    const int word = lane < 16 ? __ldg(reinterpret_cast<const int*>(p.items + item) + lane) : head;
    if (lane <= 16) reinterpret_cast<int*>(units + qs.stage)[lane] = word;
    const int q_start = __shfl_sync(~0u, word, 1), kv_start = __shfl_sync(~0u, word, 8), kv_end = __shfl_sync(~0u, word, 9);
    const int pages = p.kv.start(__shfl_sync(~0u, word, 10));
    __syncwarp();
    if (lane == 0) {
      const int rows = all.box_tokens * p.group;
      barrier_expect(pipe.q_full(qs.stage), rows * C::kDimQk * 2);
#pragma unroll
      for (int i = 0; i < C::kDimQk / 64; ++i) {
        tma_load(pipe.base + C::kQ + qs.stage * C::kQBytes + i * C::kRows * 128, &all.q, pipe.q_full(qs.stage), i * 64, head * p.group, q_start);
      }
      unit = int(gridDim.x + atomicAdd(&all.queue->taken, 1u));
    }
    qs.next();

    // This lane's box of a tile: its entry of the page table, asked for a tile ahead, then page and row in it.
    int entry = 0;
    auto look = [&](int pos) {
      const int row = pos + lane * all.box_rows;
      if (lane < boxes && row < kv_end) entry = p.kv.entry(pages, row);
    };
    auto place = [&](int pos, unsigned& page, int& slot) {
      long long at;
      p.kv.place(entry, pos + lane * all.box_rows, page, at);
      slot = int(at);
      look(pos + C::kTile);
    };
    auto load = [&](int pos, unsigned page, int slot, const TensorMap* map, const TensorMap* tail, int page_groups, unsigned to, int dim, unsigned barrier) {
      const int here = min(boxes, (kv_end - pos + all.box_rows - 1) / all.box_rows);
      if (lane == 0) barrier_expect(barrier, here * all.box_rows * dim * 2);
      __syncwarp();
      if (lane < here) {
        const int group = int(page) * page_groups + (slot >> 3);
        to += lane * all.box_rows * dim * 2;
        if (group + all.box_rows / 8 <= all.groups) {
          tma_load(to, map, barrier, 0, slot & 7, 0, group, head);
        } else {
          for (int i = 0; i < all.box_rows; i += 8) tma_load(to + i * dim * 2, tail, barrier, 0, slot + i, 0, 0, head);
        }
      }
    };
    auto keys = [&](int pos, unsigned page, int slot) {
      barrier_wait(pipe.k_empty(ks.stage), ks.phase ^ 1);
      load(pos, page, slot, &all.k, &all.k_tail, all.k_page, pipe.base + C::kK + ks.stage * C::kKBytes, C::kDimQk, pipe.k_full(ks.stage));
      ks.next();
    };
    unsigned page, next_page = 0;
    int slot, next_slot = 0;
    if (kv_start < kv_end) {
      look(kv_start);
      place(kv_start, page, slot);
      keys(kv_start, page, slot);
    }
#pragma unroll 1
    for (int pos = kv_start; pos < kv_end; pos += C::kTile) {
      if (pos + C::kTile < kv_end) {
        place(pos + C::kTile, next_page, next_slot);
        keys(pos + C::kTile, next_page, next_slot);
      }
      barrier_wait(pipe.v_empty(vs.stage), vs.phase ^ 1);
      load(pos, page, slot, &all.v, &all.v_tail, all.v_page, pipe.base + C::kV + vs.stage * C::kVBytes, C::kDimVo, pipe.v_full(vs.stage));
      vs.next();
      page = next_page, slot = next_slot;
    }
    unit = __shfl_sync(~0u, unit, 0);
  }
  if (lane == 0) {
    units[qs.stage].head = -1;
    barrier_arrive(pipe.q_full(qs.stage));
    // Whoever is last has everyone's tickets behind it.
    if (atomicAdd(&all.queue->done, 1u) == gridDim.x - 1) all.queue->taken = 0, all.queue->done = 0;
  }
}

/// The other three warps: values that have come are made ready. Most tiles are as they are.
template <class C>
__device__ __forceinline__ void keep_boxes(const Sm90Pipe<C>& pipe, unsigned char* shared) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32 - 1;
  const Sm90Unit* units = reinterpret_cast<const Sm90Unit*>(shared + C::kUnits);
  Ring<C::kQStages> qs;
  Ring<C::kStages> vs;
  while (true) {
    barrier_wait(pipe.q_full(qs.stage), qs.phase);
    const Sm90Unit& u = units[qs.stage];
    if (u.head < 0) break;
    const int kv_start = u.item.kv_start, kv_end = u.item.kv_end, full_end = C::Variant::kHasMask ? u.item.full_end : u.item.kv_end;
    __syncwarp();
    if (lane == 0) barrier_arrive(pipe.q_empty(qs.stage));
    qs.next();
#pragma unroll 1
    for (int pos = kv_start; pos < kv_end; pos += C::kTile) {
      barrier_wait(pipe.v_full(vs.stage), vs.phase);
      if (pos + C::kTile > full_end) {
        const bool any = keep_values<C>(shared + C::kV + vs.stage * C::kVBytes, kv_end - pos, warp * 32 + lane, 96);
        const bool all = __any_sync(~0u, any);
        if (lane == 0) reinterpret_cast<int*>(shared + C::kStrange)[vs.stage * 4 + warp] = all;
        fence_async_proxy();
        __syncwarp();
      }
      if (lane == 0) barrier_arrive(pipe.v_ready(vs.stage));
      vs.next();
    }
  }
}

/// All four warps: rows one by one, by cp.async. A warp copies 32 of 128 rows; what it copied it also makes ready.
template <class C>
__device__ __forceinline__ void bring_rows(const Sm90Params<typename C::Variant>& all, const Sm90Pipe<C>& pipe, unsigned char* shared) {
  const auto& p = all.common;
  const int lane = threadIdx.x & 31, warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  constexpr int kMine = C::kTile / 4;  // rows of a warp: 16 or 32
  Sm90Unit* units = reinterpret_cast<Sm90Unit*>(shared + C::kUnits);
  const int count = *all.count, total = count * all.heads;
  Ring<C::kQStages> qs;
  Ring<C::kStages> ks, vs;
  int unit = blockIdx.x;
  while (true) {
    if (warp == 0) barrier_wait(pipe.q_empty(qs.stage), qs.phase ^ 1);
    if (unit >= total) break;
    int item, head;
    unit_of(all, unit, count, item, head);
    const int word = lane < 16 ? __ldg(reinterpret_cast<const int*>(p.items + item) + lane) : head;
    const int q_start = __shfl_sync(~0u, word, 1), kv_start = __shfl_sync(~0u, word, 8), kv_end = __shfl_sync(~0u, word, 9);
    const int full_end = C::Variant::kHasMask ? __shfl_sync(~0u, word, 15) : kv_end;
    const int pages = p.kv.start(__shfl_sync(~0u, word, 10));
    if (warp == 0) {
      if (lane <= 16) reinterpret_cast<int*>(units + qs.stage)[lane] = word;
      __syncwarp();
      if (lane == 0) {
        barrier_expect(pipe.q_full(qs.stage), all.box_tokens * p.group * C::kDimQk * 2);
#pragma unroll
        for (int i = 0; i < C::kDimQk / 64; ++i) {
          tma_load(pipe.base + C::kQ + qs.stage * C::kQBytes + i * C::kRows * 128, &all.q, pipe.q_full(qs.stage), i * 64, head * p.group, q_start);
        }
        *reinterpret_cast<int*>(shared + C::kFlag + 4) = int(gridDim.x + atomicAdd(&all.queue->taken, 1u));
      }
    }
    qs.next();

    // Where this lane's row of a tile is, in 16-byte units; what is not there reads row 0 of nothing.
    auto place = [&](int pos, unsigned& k, unsigned& v) {
      const int row = min(pos + warp * kMine + (lane & (kMine - 1)), kv_end - 1);
      unsigned page;
      long long slot;
      p.kv.place(p.kv.entry(pages, row), row, page, slot);
      k = unsigned(static_cast<unsigned long long>(row_offset(p.kv.k, page, slot)) >> 4);
      v = unsigned(static_cast<unsigned long long>(row_offset(p.kv.v, page, slot)) >> 4);
    };
    auto copy = [&](auto dims, int pos, unsigned where, const KvTensor& t, unsigned to) {
      constexpr int kDim = decltype(dims)::value, kChunks = kDim / 8;
      const unsigned char* from = t.data + head * t.head;
#pragma unroll 4
      for (int i = 0; i < kMine * kChunks / 32; ++i) {
        const int row = (i * 32 + lane) / kChunks, chunk = (i * 32 + lane) % kChunks;
        const unsigned at = __shfl_sync(~0u, where, row);
        cp_async_16(to + GroupedRows<kDim>::offset(warp * kMine + row, chunk), from + at * 16ull + chunk * 16, pos + warp * kMine + row < kv_end ? 16 : 0);
      }
      cp_async_commit();
    };
    // Copies are announced one behind: keys when the values before them are under way, and so on.
    auto announce = [&](unsigned barrier) {
      fence_async_proxy();
      __syncwarp();
      if (lane == 0) barrier_arrive(barrier);
    };
    unsigned k_at = 0, v_at = 0, k_next = 0, v_next = 0;
    if (kv_start < kv_end) {
      place(kv_start, k_at, v_at);
      barrier_wait(pipe.k_empty(ks.stage), ks.phase ^ 1);
      copy(Number<C::kDimQk>{}, kv_start, k_at, p.kv.k, pipe.base + C::kK + ks.stage * C::kKBytes);
    }
#pragma unroll 1
    for (int pos = kv_start; pos < kv_end; pos += C::kTile) {
      const bool more = pos + C::kTile < kv_end;
      const int k_stage = ks.stage;
      if (more) place(pos + C::kTile, k_next, v_next);
      barrier_wait(pipe.v_empty(vs.stage), vs.phase ^ 1);
      copy(Number<C::kDimVo>{}, pos, v_at, p.kv.v, pipe.base + C::kV + vs.stage * C::kVBytes);
      cp_async_wait<1>();
      announce(pipe.k_full(k_stage));
      ks.next();
      if (more) {
        barrier_wait(pipe.k_empty(ks.stage), ks.phase ^ 1);
        copy(Number<C::kDimQk>{}, pos + C::kTile, k_next, p.kv.k, pipe.base + C::kK + ks.stage * C::kKBytes);
        cp_async_wait<1>();
      } else {
        cp_async_wait<0>();
      }
      if (C::Variant::kHasMask && pos + C::kTile > full_end) {
        // This warp's rows: those past the end are zeros already.
        __syncwarp();
        constexpr int kChunks = C::kDimVo / 8;
        bool any = false;
        for (int i = lane; i < kMine * kChunks; i += 32) {
          any |= not_finite<typename C::Type>(*reinterpret_cast<const uint4*>(shared + C::kV + vs.stage * C::kVBytes +
                                                                              GroupedRows<C::kDimVo>::offset(warp * kMine + i / kChunks, i % kChunks)));
        }
        any = __any_sync(~0u, any);
        if (lane == 0) reinterpret_cast<int*>(shared + C::kStrange)[vs.stage * 4 + warp] = any;
      }
      announce(pipe.v_ready(vs.stage));
      vs.next();
      k_at = k_next, v_at = v_next;
    }
    // The next unit, from warp 0 to the others.
    named_sync(7, 128);
    unit = *reinterpret_cast<const int*>(shared + C::kFlag + 4);
    named_sync(7, 128);
  }
  if (threadIdx.x == 0) {
    units[qs.stage].head = -1;
    barrier_arrive(pipe.q_full(qs.stage));
    if (atomicAdd(&all.queue->done, 1u) == gridDim.x - 1) all.queue->taken = 0, all.queue->done = 0;
  }
}

}  // namespace fir
