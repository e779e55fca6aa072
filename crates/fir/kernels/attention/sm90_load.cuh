// sm90_load.cuh: warpgroup 0 of sm90_prefill.cuh: takes units, brings q, keys and values, and makes values ready.
//
// warp 0   units, told two ahead of the one that runs, and q: what a unit is (a ticket, its item, its pages) takes three
//          loads that wait for each other, longer than a tile
// boxes    warp 1 brings keys, warp 2 values by TMA; warp 3 looks after values
// rows     where no box lies in one page, warpgroup 3 (of 256 columns warps 1 and 2) brings both by cp.async
// e4m3     warpgroup 3 makes keys and values wider, and looks after them
//
// A stage is filled when both other warpgroups have given it back.
//
// reads  items, the page table, q, keys and values
// needs  sm_90a
#pragma once
#include <fir/attention/finite.cuh>
#include <fir/attention/sm90_pipe.cuh>

namespace fir {

/// Warp 0. A unit's place among four is free when every warp that reads it has said so.
template <class C>
__device__ __forceinline__ void bring_units(const Sm90Params<typename C::Variant>& all, const Sm90Pipe<C>& pipe, unsigned char* shared) {
  const auto& p = all.common;
  const int lane = threadIdx.x & 31;
  Sm90Unit* units = reinterpret_cast<Sm90Unit*>(shared + C::kUnits);
  const int count = *all.count, total = count * all.heads, block = count * all.heads_at_once;
  Ring<C::kQStages> qs;
  Ring<C::kUnitStages> us, done;
  int unit = blockIdx.x, q_start = 0, head = -1, loaded = 0;
  // Waits until the place of q at `qs` is free. What is in it then is the output of the unit that had it, unless that went out by itself.
  auto empty = [&] {
    barrier_wait(pipe.q_empty(qs.stage), qs.phase ^ 1);
    if (loaded++ < C::kQStages) return;
    const Sm90Unit& u = units[done.stage];
    if (lane == 0 && is_staged<C>(all, u.item)) {
#pragma unroll
      for (int i = 0; i < C::kDimVo / 64; ++i) {
        tma_store(&all.out, pipe.base + C::kQ + qs.stage * C::kQBytes + i * C::kRows * 128, i * 64, u.head * p.group, u.item.q_start);
      }
      bulk_commit();
      bulk_wait_read<0>();
    }
    done.next();
  };
  while (true) {
    const int q_before = q_start, head_before = head;
    int next = total;
    barrier_wait(pipe.unit_empty(us.stage), us.phase ^ 1);
    if (unit < total) {
      if (lane == 0) next = int(gridDim.x + atomicAdd(&all.queue->taken, 1u));
      const int first = unit / block * all.heads_at_once, heads = min(all.heads_at_once, all.heads - first), rest = unit % block;
      head = first + rest % heads;
      int word = lane < 16 ? __ldg(reinterpret_cast<const int*>(p.items + rest / heads) + lane) : head;
      const int start = p.kv.start(__shfl_sync(~0u, word, 10));
      q_start = __shfl_sync(~0u, word, 1);
      if (lane == 17) word = start;
      if (lane <= 17) reinterpret_cast<int*>(units + us.stage)[lane] = word;
      __syncwarp();
      if constexpr (C::kContexts) {
        const WorkItem& w = units[us.stage].item;
        RowContext* contexts = reinterpret_cast<RowContext*>(shared + C::kRowContexts) + us.stage * C::kRows;
        for (int row = lane; row < C::kRows; row += 32) contexts[row] = row_context(w, p.out.tokens, head, p.group, min(row, w.tokens * p.group - 1));
        __syncwarp();
      }
    } else {
      head = -1;
      if (lane == 0) units[us.stage].head = -1;
    }
    barrier_arrive_warp(pipe.unit_full(us.stage));
    us.next();
    if (head_before >= 0) {
      empty();
      if (lane == 0) {
        barrier_expect(pipe.q_full(qs.stage), all.box_tokens * p.group * C::kRowBytes);
#pragma unroll
        for (int i = 0; i < C::kRowBytes / 128; ++i) {
          tma_load(pipe.base + C::kQ + qs.stage * C::kQBytes + i * C::kRows * 128, &all.q, pipe.q_full(qs.stage), i * (1024 / C::Key::kBits), head_before * p.group,
                   q_before);
        }
      }
      qs.next();
    }
    if (head < 0) break;
    unit = __shfl_sync(~0u, next, 0);
  }
#pragma unroll 1
  for (int i = 0; i < C::kQStages; ++i) {
    empty();
    qs.next();
  }
  // Whoever is last has everyone's tickets behind it.
  if (lane == 0 && atomicAdd(&all.queue->done, 1u) == gridDim.x - 1) all.queue->taken = 0, all.queue->done = 0;
}

/// The tiles of all units that warp 0 tells of, one after the other; those of a unit from the last to the first.
template <class C>
struct Tiles {
  const Sm90Pipe<C>& pipe;
  const Sm90Unit* units;
  Ring<C::kUnitStages> ring;
  int pos = 0, begin = 0, end = 0, full_end = 0, head = 0, start = 0;

  __device__ __forceinline__ Tiles(const Sm90Pipe<C>& pipe, const unsigned char* shared)
      : pipe(pipe), units(reinterpret_cast<const Sm90Unit*>(shared + C::kUnits)) {}

  /// The next one; false: there is none.
  __device__ __forceinline__ bool next() {
    pos -= C::kTile;
    while (pos < begin) {
      barrier_wait(pipe.unit_full(ring.stage), ring.phase);
      const Sm90Unit& u = units[ring.stage];
      head = u.head, start = u.start, begin = u.item.kv_start, end = u.item.kv_end;
      pos = last_tile<C>(u.item);
      full_end = C::Variant::kHasMask ? u.item.full_end : end;
      if (head < 0) return false;
      __syncwarp();
      barrier_arrive_warp(pipe.unit_empty(ring.stage));
      ring.next();
    }
    return true;
  }
};

/// Warp 1, keys, or warp 2, values: boxes by TMA, a lane's each. A warp for each, as boxes of small pages are many.
template <class C, bool kKeys>
__device__ __forceinline__ void bring_boxes(const Sm90Params<typename C::Variant>& all, const Sm90Pipe<C>& pipe, const unsigned char* shared) {
  constexpr bool kRaw = kKeys ? C::kWidenKeys : C::kWiden;
  constexpr int kBytes = (kKeys ? C::kDimQk : C::kDimVo) * C::Kv::kBits / 8;
  constexpr int kTo = kRaw ? (kKeys ? C::kRawKeys : C::kRaw) : kKeys ? C::kK : C::kV, kStage = C::kTile * kBytes;
  const auto& kv = all.common.kv;
  const TensorMap *map = kKeys ? &all.k : &all.v, *tail = kKeys ? &all.k_tail : &all.v_tail;
  const int lane = threadIdx.x & 31, boxes = C::kTile / all.box_rows, first = lane * all.box_rows;
  Tiles<C> tiles(pipe, shared);
  Ring<kRaw ? C::kRawStages : C::kStages> ring;
  // This lane's entry of the page table, asked for a tile ahead.
  int entry = 0;
  auto look = [&] {
    if (lane < boxes && tiles.pos + first < tiles.end) entry = kv.entry(tiles.start, tiles.pos + first);
  };
  bool more = tiles.next();
  if (more) look();
#pragma unroll 1
  while (more) {
    unsigned page;
    long long slot;
    kv.place(entry, tiles.pos + first, page, slot);
    const int head = tiles.head, here = min(boxes, (tiles.end - tiles.pos + all.box_rows - 1) / all.box_rows);
    more = tiles.next();
    if (more) look();
    const unsigned full = !kKeys ? pipe.v_full(ring.stage) : kRaw ? pipe.k_raw_full(ring.stage) : pipe.k_full(ring.stage);
    const unsigned k_empty = kRaw ? pipe.k_raw_empty(ring.stage) : pipe.k_empty(ring.stage);
    const unsigned v_empty = kRaw ? pipe.raw_empty(ring.stage) : pipe.v_empty(ring.stage);
    barrier_wait(kKeys ? k_empty : v_empty, ring.phase ^ 1);
    if (lane == 0) barrier_expect(full, here * all.box_rows * kBytes);
    __syncwarp();
    if (lane < here) {
      const int row = int(slot), group = int(page) * (kKeys ? all.k_page : all.v_page) + (row >> 3);
      const unsigned to = pipe.base + kTo + ring.stage * kStage + first * kBytes;
      if (group + all.box_rows / 8 <= all.groups) {
        tma_load(to, map, full, 0, row & 7, 0, group, head);
      } else {
        for (int i = 0; i < all.box_rows; i += 8) tma_load(to + i * kBytes, tail, full, 0, row + i, 0, 0, head);
      }
    }
    ring.next();
  }
}

/// Whether rows `from..to` of values, or their neighbours in groups of 8, have something that is not finite. One warp, through 16-byte
/// chunks as they lie.
template <class C>
__device__ __forceinline__ bool look_at_values(const unsigned char* values, int from, int to) {
  bool any = false;
  const int stop = (to + 7) / 8 * C::kDimVo;
#pragma unroll 4
  for (int i = from / 8 * C::kDimVo + (threadIdx.x & 31); i < stop; i += 32) any |= not_finite<typename C::Type>(reinterpret_cast<const uint4*>(values)[i]);
  return __any_sync(~0u, any);
}

/// Rows of values from `to` on become zeros. One warp.
template <class C>
__device__ __forceinline__ void clear_values(unsigned char* values, int to) {
  uint4* chunks = reinterpret_cast<uint4*>(values) + (threadIdx.x & 31);
  const uint4 none = make_uint4(0, 0, 0, 0);
  // A group of 8 rows is kDimVo chunks, row after row in each 64 columns.
  if (to & 7) {
#pragma unroll
    for (int i = 0; i < C::kDimVo; i += 32) {
      if ((((threadIdx.x & 31) + i) >> 3 & 7) >= (to & 7)) chunks[to / 8 * C::kDimVo + i] = none;
    }
  }
#pragma unroll 8
  for (int i = (to + 7) / 8 * C::kDimVo; i < C::kTile / 8 * C::kDimVo; i += 32) chunks[i] = none;
}

/// Warp 3: values that have come are made ready: rows past the end become zeros, and are there any that a mask may hide from
/// some rows and that are not finite? Most tiles are as they are. Rows that threads have copied, keys too, are made visible to wgmma.
template <class C>
__device__ __forceinline__ void keep_values(const Sm90Pipe<C>& pipe, unsigned char* shared) {
  const int lane = threadIdx.x & 31;
  Tiles<C> tiles(pipe, shared);
  Ring<C::kStages> ring;
  while (tiles.next()) {
    if constexpr (C::kGather) {
      barrier_wait(pipe.k_copied(ring.stage), ring.phase);
      fence_async_proxy();
      barrier_arrive_warp(pipe.k_full(ring.stage));
    }
    barrier_wait(pipe.v_full(ring.stage), ring.phase);
    const bool masked = tiles.pos + C::kTile > tiles.full_end;
    if (masked) {
      unsigned char* values = shared + C::kV + ring.stage * C::kVBytes;
      const int valid = min(tiles.end - tiles.pos, C::kTile);
      if constexpr (!C::kGather) clear_values<C>(values, valid);
      bool any = false;
      if constexpr (C::Variant::kHasMask) {
        __syncwarp();
        any = look_at_values<C>(values, max(tiles.full_end - tiles.pos, 0), valid);
      }
      if (lane == 0) reinterpret_cast<int*>(shared + C::kStrange)[ring.stage] = any;
    }
    if (C::kGather || masked) fence_async_proxy();
    __syncwarp();
    barrier_arrive_warp(pipe.v_ready(ring.stage));
    ring.next();
  }
}

/// Two numbers of f16 as two of T.
template <class T>
__device__ __forceinline__ u32 from_f16x2(u32 x) {
  if constexpr (Same<T, F16>::value) return x;
  float lo, hi;
  unpack2<F16>(x, lo, hi);
  return pack2<T>(lo, hi);
}

/// A warp makes its rows of an e4m3 tile of kDim columns wider, in which they are exact: groups of 8 rows, a quarter of them. With `masked`,
/// those from `valid` on become zeros. Whether it met something that is not finite, where it looked.
template <class C, int kDim>
__device__ __forceinline__ bool widen(const unsigned char* raw, unsigned char* wide, int warp, bool masked, int valid) {
  constexpr int kPieces = kDim / 8, kTogether = 32 / kPieces, kSteps = 8 / kTogether;  // 8 numbers of a row; rows of a warp
  const int lane = threadIdx.x & 31, row = lane / kPieces, piece = lane % kPieces;
  // Those of row `i kTogether + row` of 8 rows: the swizzle of rows 0.. with i's bits changed.
  const unsigned from = GroupedRows<kDim>::offset(row, piece >> 1) + (piece & 1) * 8, to = GroupedRows<kDim * 2>::offset(row, piece);
  bool strange = false;
#pragma unroll 1
  for (int group = warp; group < C::kTile / 8; group += 4) {
    uint2 x[kSteps];
#pragma unroll
    for (int i = 0; i < kSteps; ++i) x[i] = *reinterpret_cast<const uint2*>(raw + group * kDim * 8 + i * kTogether * 128 + (from ^ (i * kTogether << 4)));
    if (masked) {
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        if (group * 8 + i * kTogether + row >= valid) x[i] = make_uint2(0, 0);
        if constexpr (C::Variant::kHasMask) strange |= (not_finite<E4m3>(x[i].x) | not_finite<E4m3>(x[i].y)) != 0;
      }
    }
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      u32 y[4];
      fp8x4_to_f16x4<E4m3>(x[i].x, y[0], y[1]);
      fp8x4_to_f16x4<E4m3>(x[i].y, y[2], y[3]);
#pragma unroll
      for (u32& pair : y) pair = from_f16x2<typename C::Type>(pair);
      *reinterpret_cast<uint4*>(wide + group * kDim * 16 + i * kTogether * 128 + (to ^ (i * kTogether << 4))) = make_uint4(y[0], y[1], y[2], y[3]);
    }
  }
  return strange;
}

/// Warpgroup 3, where keys and values are e4m3: values become f16, or what q is, so that weights need not be rounded to e4m3; with q of
/// 16 bits keys too. Rows of values past the end become zeros; and are there any that a mask may hide from some rows and that are not finite?
template <class C>
__device__ __forceinline__ void widen_tiles(const Sm90Pipe<C>& pipe, unsigned char* shared) {
  const int lane = threadIdx.x & 31, warp = __shfl_sync(~0u, threadIdx.x / 32, 0) & 3;
  Tiles<C> tiles(pipe, shared);
  Ring<C::kStages> ring;
  Ring<C::kRawStages> raw;
  while (tiles.next()) {
    if constexpr (C::kWidenKeys) {
      barrier_wait(pipe.k_raw_full(raw.stage), raw.phase);
      barrier_wait(pipe.k_empty(ring.stage), ring.phase ^ 1);
      widen<C, C::kDimQk>(shared + C::kRawKeys + raw.stage * C::kRawKeyBytes, shared + C::kK + ring.stage * C::kKBytes, warp, false, 0);
      fence_async_proxy();
      __syncwarp();
      barrier_arrive_warp(pipe.k_raw_empty(raw.stage));
      barrier_arrive_warp(pipe.k_full(ring.stage));
    }
    const bool masked = tiles.pos + C::kTile > tiles.full_end;
    barrier_wait(pipe.v_full(raw.stage), raw.phase);
    barrier_wait(pipe.v_empty(ring.stage), ring.phase ^ 1);
    unsigned char* values = shared + C::kV + ring.stage * C::kVBytes;
    const bool strange = widen<C, C::kDimVo>(shared + C::kRaw + raw.stage * C::kRawBytes, values, warp, masked, tiles.end - tiles.pos);
    if (masked) {
      const bool any = __any_sync(~0u, strange);
      if (lane == 0) (shared + C::kStrange)[ring.stage * 4 + warp] = any;
    }
    fence_async_proxy();
    __syncwarp();
    barrier_arrive_warp(pipe.raw_empty(raw.stage));
    barrier_arrive_warp(pipe.v_ready(ring.stage));
    ring.next(), raw.next();
  }
}

/// Warpgroup 3, of 256 columns warps 1 and 2: rows one by one, by cp.async. Four warps, as all parts of the multiprocessor then have as
/// much of it (4 x 4096 at page 1: 591 TFLOP/s, by two 469). No copy is waited for: it says itself that it is done.
template <class C>
__device__ __forceinline__ void bring_rows(const Sm90Params<typename C::Variant>& all, const Sm90Pipe<C>& pipe, unsigned char* shared) {
  const auto& kv = all.common.kv;
  const int lane = threadIdx.x & 31, warp = __shfl_sync(~0u, threadIdx.x / 32, 0) - (C::kFourth ? 12 : 1);
  constexpr int kMine = C::kTile / C::kCopyWarps;  // rows of a warp: 16 or 32
  const int own = warp * kMine;
  Tiles<C> tiles(pipe, shared);
  Ring<C::kStages> ring;
  // This lane's entry of the page table, asked for a tile ahead; then where its row is, in 16-byte units.
  int next = 0;
  auto row_of = [&] { return min(tiles.pos + own + (lane & (kMine - 1)), tiles.end - 1); };
  auto look = [&] { next = kv.entry(tiles.start, row_of()); };
  // Eight lanes bring 128 bytes of a row: a line of the cache is asked for once.
  auto copy = [&](auto dims, unsigned where, const KvTensor& t, int head, int valid, unsigned to) {
    constexpr int kDim = decltype(dims)::value;
    const int first = own + (lane >> 3), chunk = lane & 7;
    const unsigned char* from = t.data + head * t.head + chunk * 16;
    const unsigned at[2] = {to + GroupedRows<kDim * 2>::offset(first, chunk), to + GroupedRows<kDim * 2>::offset(first + 4, chunk)};
#pragma unroll
    for (int i = 0; i < kMine / 4; ++i) {
      const unsigned char* source = from + __shfl_sync(~0u, where, 4 * i + (lane >> 3)) * 16ull;
      const unsigned bytes = first + 4 * i < valid ? 16 : 0;
#pragma unroll
      for (int j = 0; j < kDim / 64; ++j) cp_async_16(at[i & 1] + i / 2 * kDim * 16 + j * 1024, source + j * 128, bytes);
    }
  };
  bool more = tiles.next();
  if (more) look();
#pragma unroll 1
  while (more) {
    unsigned page;
    long long slot;
    kv.place(next, row_of(), page, slot);
    const unsigned k_at = unsigned(static_cast<unsigned long long>(row_offset(kv.k, page, slot)) >> 4);
    const unsigned v_at = unsigned(static_cast<unsigned long long>(row_offset(kv.v, page, slot)) >> 4);
    const int head = tiles.head, valid = tiles.end - tiles.pos;
    more = tiles.next();
    if (more) look();
    barrier_wait(pipe.k_empty(ring.stage), ring.phase ^ 1);
    copy(Number<C::kDimQk>{}, k_at, kv.k, head, valid, pipe.base + C::kK + ring.stage * C::kKBytes);
    barrier_arrive_copies(pipe.k_copied(ring.stage));
    barrier_wait(pipe.v_empty(ring.stage), ring.phase ^ 1);
    copy(Number<C::kDimVo>{}, v_at, kv.v, head, valid, pipe.base + C::kV + ring.stage * C::kVBytes);
    barrier_arrive_copies(pipe.v_full(ring.stage));
    ring.next();
  }
}

}  // namespace fir
