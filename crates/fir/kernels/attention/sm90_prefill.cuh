// sm90_prefill.cuh: many query rows against KV on Hopper: prefill, append, mixed batches, block-sparse; wgmma and TMA.
//
//   o[r]   = sum_j softmax_j(logits(scale q[r] . k[j])) v[j]
//   lse[r] = log2 sum_j 2^(logits_j log2 e)                          (base 2; softmax.cuh)
//
// grid   (blocks)   persistent, one per multiprocessor; block b takes unit b, then the next that nobody took. A unit is
//                   a KV head of an item; items come longest first, `heads_at_once` heads of all items at a time
// block  384        warpgroup 0 brings q, keys and values; warpgroups 1 and 2 own 64 rows of the tile each
// smem   q of kQStages units, 2 x kTile keys, 2 x kTile values, all in rows of 128 swizzled bytes; barriers; the units
// needs  sm_90a; q, keys and values of one 16-bit type, head dims multiples of 64 up to 256; no rotation.
//        kGather false: TMA, so boxes of `box_rows` (a multiple of 8) rows that lie in one page
//
// The rows of a tile are the query heads of a KV head for several tokens: row = token * group + head in the group.
// Scores of tile j are under way together with the weighted values of tile j - 1, and a warpgroup's softmax runs while
// the other has the tensor cores: they issue in turns. Everything else (page table, copies, clearing of values that
// nobody may see) is warpgroup 0's, ahead of them. docs/kernels.md has the pipeline as a picture.
//
// reads  q; pages of the items' requests. Rows at or past kv_end may be read, and do not count
// writes out, lse of whole units and of merged ones; partial_o, partial_md of parts; counters and queue end as they began
// twins  src/cpu/attention/, src/reference/attention.rs, src/plan/schedule.rs
#pragma once
#include <fir/attention/finite.cuh>
#include <fir/attention/params.cuh>
#include <fir/base/mbarrier.cuh>
#include <fir/base/tma.cuh>
#include <fir/base/wgmma.cuh>

namespace fir {

template <class Variant>
struct alignas(64) Sm90Params {
  /// q as [token][head][64 columns], a box of a tile's tokens and a group's heads.
  TensorMap q;
  /// Keys and values as [head][8-row group][64 columns][row][column]: boxes of `box_rows` rows from row c1 of group c3 on.
  TensorMap k, v;
  /// The same of 8 rows, which may begin at any row: the last rows of ragged KV.
  TensorMap k_tail, v_tail;
  WorkQueue* queue;
  /// Number of items, in device memory.
  const int* count;
  /// KV heads: units per item; how many of them are taken before the next: as many as have their keys and values in L2.
  int heads, heads_at_once;
  /// Query tokens of a box of q.
  int box_tokens;
  /// Rows of a box, at most 64; groups between pages of keys and of values; groups that a box may not pass.
  int box_rows, k_page, v_page, groups, pad;
  AttentionParams<Variant> common;
};

template <class T, class TO, int kDimQk_, int kDimVo_, class Variant_, int kTile_, int kQStages_, bool kGather_>
struct Sm90Config {
  using Type = T;
  using Out = TO;
  using Variant = Variant_;
  static constexpr int kDimQk = kDimQk_, kDimVo = kDimVo_, kTile = kTile_, kQStages = kQStages_;
  static constexpr bool kGather = kGather_;
  static constexpr int kRows = 128, kThreads = 384, kConsumers = 256, kStages = 2;
  static constexpr Wgmma kType = Same<T, Bf16>::value ? Wgmma::kBf16 : Wgmma::kF16;
  static constexpr int kQBytes = kRows * kDimQk * 2, kKBytes = kTile * kDimQk * 2, kVBytes = kTile * kDimVo * 2;
  /// Hooks see every logit: scores become logits before the maximum is taken.
  static constexpr bool kEach = Variant_::kHasQuery || Variant_::kHasKey || Variant_::kHasLogits || !Variant_::kSoftmax;
  static constexpr bool kContexts = Variant_::kHasQuery || Variant_::kHasLogits || Variant_::kHasMask;
  /// Warps that look after values before they are used; of them who arrives at `v_ready`.
  static constexpr int kKeepers = kGather ? 4 : 3;

  // Shared memory, in bytes from the start.
  static constexpr int kQ = 0;
  static constexpr int kK = kQ + kQStages * kQBytes;
  static constexpr int kV = kK + kStages * kKBytes;
  static constexpr int kBarriers = kV + kStages * kVBytes;      // u64 [2 kQStages + 5 kStages]
  static constexpr int kUnits = kBarriers + 128;                // Sm90Unit [kQStages]
  static constexpr int kStrange = kUnits + 2 * 80;              // int [kStages][4]
  static constexpr int kFlag = kStrange + kStages * 16;         // int
  static constexpr int kRowContexts = kFlag + 16;               // RowContext [kRows]
  static constexpr int kShared = kRowContexts + (kContexts ? kRows * int(sizeof(RowContext)) : 0);

  static_assert(T::kBits == 16 && kDimQk % 64 == 0 && kDimVo % 64 == 0 && kDimVo <= kDimQk && kDimQk <= 256);
  static_assert(kTile % 64 == 0 && kQStages <= 2 && kShared <= 232448);
  static_assert(!RopeOf<Variant_, false>::kOn && !RopeOf<Variant_, true>::kOn, "rotations are decode.cuh's and plain.cuh's");
};

/// A number as a type, for lambdas.
template <int n>
struct Number {
  static constexpr int value = n;
};

/// What the producer tells the others of a unit; `head` -1: there are no more.
struct Sm90Unit {
  WorkItem item;
  int head;
  int pad[3];
};

/// Keys and values in shared memory: [8-row group][64 columns][row][16-byte chunk], swizzled. A page's rows are one box, and
/// groups of 8 rows are equally far apart, which is all that wgmma asks.
template <int kDim>
struct GroupedRows {
  __device__ __forceinline__ static unsigned offset(int row, int chunk) {
    return (row >> 3) * kDim * 16 + (chunk >> 3) * 1024 + (row & 7) * 128 + (((chunk ^ row) & 7) << 4);
  }
};

/// Barriers of the pipeline, and where a role stands in a ring.
template <class C>
struct Sm90Pipe {
  unsigned base;
  __device__ __forceinline__ unsigned barrier(int kind, int stage) const { return base + C::kBarriers + (kind * 2 + stage) * 8; }
  __device__ __forceinline__ unsigned q_full(int s) const { return barrier(0, s); }
  __device__ __forceinline__ unsigned q_empty(int s) const { return barrier(1, s); }
  __device__ __forceinline__ unsigned k_full(int s) const { return barrier(2, s); }
  __device__ __forceinline__ unsigned k_empty(int s) const { return barrier(3, s); }
  /// Values have come; they may be used.
  __device__ __forceinline__ unsigned v_full(int s) const { return barrier(4, s); }
  __device__ __forceinline__ unsigned v_ready(int s) const { return barrier(5, s); }
  __device__ __forceinline__ unsigned v_empty(int s) const { return barrier(6, s); }

  __device__ __forceinline__ void init() const {
    for (int s = 0; s < 2; ++s) {
      barrier_init(q_full(s), 1);
      barrier_init(q_empty(s), 8 + (C::kGather ? 0 : C::kKeepers));
      barrier_init(k_full(s), C::kGather ? 4 : 1);
      barrier_init(k_empty(s), 8);
      barrier_init(v_full(s), 1);
      barrier_init(v_ready(s), C::kKeepers);
      barrier_init(v_empty(s), 8);
    }
    barrier_init_done();
  }
};

/// 2^x, where it stands in the text.
__device__ __forceinline__ float exp2_in_place(float x) {
  float y;
  asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// Ends a block of instructions once x is there. Within a block ptxas moves a wait for products up to its beginning, past
/// exponentials that are to run beside the product, and puts sums right behind the exponentials that they wait for, so
/// that one takes 14 clocks instead of 8.
__device__ __forceinline__ void after(float x) {
  if (__any_sync(~0u, x != x)) asm volatile("nanosleep.u32 0;");
}

template <int kCount>
struct Ring {
  int stage = 0;
  unsigned phase = 0;
  __device__ __forceinline__ void next() {
    if (++stage == kCount) stage = 0, phase ^= 1;
  }
};

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

/// What a thread keeps for its two rows (16 w + l / 4 and 8 further of a warpgroup's 64): softmax and output.
template <class C>
struct Sm90State {
  using V = typename C::Variant;
  static constexpr int kScores = C::kTile / 2, kOut = C::kDimVo / 2;
  /// A maximum is moved only when it grows by more than this factor's log2: weights then reach 256 at most, which f16
  /// holds, and after the first tiles `o` is hardly ever rescaled. With a hook on the output, (m, d) is as it says.
  static constexpr float kSlack = V::kHasOutput ? 0.0f : 8.0f;

  float o[kOut], m[2], d[2];

  /// Scores become logits, and -inf (0 without softmax) where a row may not see.
  __device__ __forceinline__ static void edit(float (&s)[kScores], const AttentionParams<V>& p, const Sm90Unit& u, const RowContext* contexts, int pos,
                                              bool masked, float factor) {
    const int lane = threadIdx.x & 31, head = u.head, kv_base = u.item.kv_base, kv_end = u.item.kv_end;
    const int request = u.item.request, kv_len = u.item.kv_len;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      RowContext c;
      if constexpr (C::kContexts) c = contexts[8 * h + lane / 4];
      float f = factor;
      if constexpr (V::kHasQuery) f *= c.template query_scale<V>(p.variant);
#pragma unroll
      for (int t = 0; t < kScores / 4; ++t) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int kv = pos + 8 * t + 2 * (lane & 3) + j, kv_pos = kv_base + kv;
          float& x = s[4 * t + 2 * h + j];
          if constexpr (C::kEach) {
            x *= f;
            if constexpr (V::kHasKey) x *= V::key_scale(p.variant, request, kv_len, kv_pos, head);
            if constexpr (V::kHasLogits) x = c.template logits<V>(p.variant, x, kv_pos) * (V::kSoftmax ? kLog2e : 1.0f);
          }
          bool seen = kv < kv_end;
          if constexpr (V::kHasMask) seen = seen && c.template mask<V>(p.variant, kv_pos);
          if (masked && !seen) x = V::kSoftmax ? neg_inf() : 0.0f;
        }
      }
    }
  }

  /// Moves the maxima to those of `s` times `scale`, where they grew enough; what `o` is to be multiplied by. Whether any
  /// row of the warp moved. Mostly none does, and the four threads of a row need not talk to know.
  __device__ __forceinline__ bool rise(const float (&s)[kScores], float scale, float (&factor)[2]) {
    float top[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      // Two chains each: a maximum takes 4 clocks before the next can have it.
      float a = fmaxf(s[2 * h], s[2 * h + 1]), b = fmaxf(s[4 + 2 * h], s[4 + 2 * h + 1]);
#pragma unroll
      for (int t = 2; t < kScores / 4; t += 2) {
        a = fmaxf(a, fmaxf(s[4 * t + 2 * h], s[4 * t + 2 * h + 1]));
        b = fmaxf(b, fmaxf(s[4 * t + 4 + 2 * h], s[4 * t + 4 + 2 * h + 1]));
      }
      top[h] = fmaxf(a, b) * scale;
    }
    if (!__any_sync(~0u, top[0] > m[0] + kSlack || top[1] > m[1] + kSlack)) return false;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      // Each row decides for itself, so that its bits do not depend on its neighbours.
      const float x = quad_max(top[h]);
      const bool up = x > m[h] + kSlack;
      factor[h] = up ? exp2_diff(m[h], x) : 1.0f;
      m[h] = up ? x : m[h];
      d[h] *= factor[h];
    }
    return true;
  }

  /// Scores become weights.
  __device__ __forceinline__ void weigh(float (&s)[kScores], float scale) const {
    if constexpr (V::kSoftmax) {
      float base[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) base[h] = m[h] == neg_inf() ? 0.0f : m[h];
#pragma unroll
      for (int i = 0; i < kScores; ++i) {
        s[i] = exp2_in_place(fmaf(s[i], scale, -base[(i >> 1) & 1]));
      }
      after(s[kScores - 1]);
    }
  }

  __device__ __forceinline__ static void add_up(const float (&s)[kScores], float (&sum)[2]) {
    float part[2][2] = {};
#pragma unroll
    for (int i = 0; i < kScores; ++i) part[(i >> 1) & 1][(i >> 2) & 1] += s[i];
    sum[0] = part[0][0] + part[0][1], sum[1] = part[1][0] + part[1][1];
  }

  /// Weights that were taken with the maxima of the tiles before. They are right as long as they are finite, and are made
  /// smaller, with all that came before, where a row's sum has passed 2^8; so the scores' own maximum is not needed, whose 64
  /// instructions stand in nobody's shadow (6 % of the kernel).
  __device__ __forceinline__ void calm(float (&s)[kScores], const float (&sum)[2]) {
    float total[2] = {sum[0], sum[1]};
    if (__any_sync(~0u, sum[0] > 256.0f || sum[1] > 256.0f)) {
      float f[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        // Each row decides for itself, so that its bits do not depend on its neighbours.
        const float top = quad_max(sum[h]);
        const int e = top > 256.0f ? min(int(__float_as_uint(top) >> 23) - 127, 126) : 0;
        f[h] = __uint_as_float(unsigned(127 - e) << 23);
        m[h] += float(e), d[h] *= f[h], total[h] *= f[h];
      }
#pragma unroll
      for (int i = 0; i < kScores; ++i) s[i] *= f[(i >> 1) & 1];
      rescale(f);
    }
    d[0] += total[0], d[1] += total[1];
  }

  /// Scores of a tile by plain sums over q and keys in shared memory. Rare, so short and not fast; and not inlined, as ptxas would have
  /// products wait for each other around its loops.
  __device__ __noinline__ static void plain_scores(float* x, const unsigned char* q, const unsigned char* keys) {
    const int lane = threadIdx.x & 31;
#pragma unroll 1
    for (int i = 0; i < kScores; ++i) {
      const int row = lane / 4 + 8 * ((i >> 1) & 1), column = 8 * (i >> 2) + 2 * (lane & 3) + (i & 1);
      float dot = 0.0f;
#pragma unroll 1
      for (int e = 0; e < C::kDimQk; ++e) {
        dot += load_one<typename C::Type>(q + (e >> 6) * C::kRows * 128 + row * 128 + ((((e >> 3) ^ row) & 7) << 4), e & 7) *
               load_one<typename C::Type>(keys + GroupedRows<C::kDimQk>::offset(column, e >> 3), e & 7);
      }
      x[i] = dot;
    }
  }

  /// Whether a row's weights were too large to be known, or there is no maximum yet that they could be taken with. What is NaN stays so.
  __device__ __forceinline__ bool is_lost(float sum, int h) const {
    return sum == __int_as_float(0x7f800000) || (m[h] == neg_inf() && d[h] == d[h]);
  }

  /// The same tile with its own maxima: for scores that pass the maxima by more than 2^127 can hold, or rows that have none yet.
  __device__ __forceinline__ void again(float (&s)[kScores], float (&sum)[2], const unsigned char* q, const unsigned char* keys, float factor) {
    float x[kScores], top[2] = {neg_inf(), neg_inf()}, by[2];
    plain_scores(x, q, keys);
#pragma unroll
    for (int i = 0; i < kScores; ++i) top[(i >> 1) & 1] = fmaxf(top[(i >> 1) & 1], x[i] * factor);
    bool redo[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      // Each row decides for itself, so that its bits do not depend on its neighbours.
      redo[h] = quad_max(is_lost(sum[h], h) ? 1.0f : 0.0f) > 0.0f;
      const float own = fmaxf(m[h], quad_max(top[h])), next = redo[h] ? own : m[h];
      by[h] = redo[h] ? exp2_diff(m[h], next) : 1.0f;
      m[h] = next, d[h] *= by[h];
    }
#pragma unroll
    for (int i = 0; i < kScores; ++i) s[i] = redo[(i >> 1) & 1] ? exp2_diff(x[i] * factor, m[(i >> 1) & 1]) : s[i];
    add_up(s, sum);
    rescale(by);
  }

  /// Adds the weights up, and gives them the values' factors.
  template <class F>
  __device__ __forceinline__ void sum(float (&s)[kScores], F value) {
    if constexpr (V::kSoftmax) {
      float sum[2];
      add_up(s, sum);
      d[0] += sum[0], d[1] += sum[1];
    }
    if constexpr (V::kHasValue) {
#pragma unroll
      for (int i = 0; i < kScores; ++i) {
        const float f = value(8 * (i >> 2) + 2 * (threadIdx.x & 3) + (i & 1));
        s[i] = s[i] == 0.0f ? 0.0f : s[i] * f;  // a weight of 0 stays 0, whatever the scale of a position that nobody sees
      }
    }
  }

  __device__ __forceinline__ void rescale(const float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < kOut; ++i) o[i] *= factor[(i >> 1) & 1];
  }

  /// Calls `put(column, x[4])` with 4 columns of row h at a time. All lanes call it.
  template <class F>
  __device__ __forceinline__ void columns(int h, F put) const {
    // Lanes 2 j and 2 j + 1 trade halves: the even one gets 4 columns of tile t, the odd one of t + 1.
    const int q = threadIdx.x & 3;
    const bool odd = q & 1;
#pragma unroll
    for (int t = 0; t < kOut / 4; t += 2) {
      const float a0 = o[4 * t + 2 * h], a1 = o[4 * t + 2 * h + 1], b0 = o[4 * t + 4 + 2 * h], b1 = o[4 * t + 4 + 2 * h + 1];
      const float y0 = __shfl_xor_sync(~0u, odd ? a0 : b0, 1), y1 = __shfl_xor_sync(~0u, odd ? a1 : b1, 1);
      float x[4] = {odd ? y0 : a0, odd ? y1 : a1, odd ? b0 : y0, odd ? b1 : y1};
      put(8 * (t + odd) + 2 * (q & 2), x);
    }
  }

  /// Writes the warp's rows from `first` on: the output of a whole unit, or a part's state. `stage` is the warp's place in
  /// shared memory, 16 rows of 128 bytes for each 64 columns, `kStride` bytes apart.
  template <int kStride>
  __device__ __forceinline__ void finish(const AttentionParams<V>& p, const WorkItem& w, int head, int first, unsigned char* stage) {
    const int lane = threadIdx.x & 31, rows = w.tokens * p.group;
    const float v_scale = p.kv.v_scale;
    constexpr bool kStates = Same<typename C::Out, State>::value;
    if (kStates || w.partial >= 0) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = first + 8 * h + lane / 4;
        const bool there = row < rows, whole = w.partial < 0;
        const int token = row / p.group, qo = head * p.group + row - token * p.group;
        const float sum = quad_sum(d[h]), scale = whole ? v_scale : 1.0f;
        const long long to = w.partial + static_cast<long long>(head - w.head_start) * rows + row;
        float* at = whole ? reinterpret_cast<float*>(p.out.out + static_cast<long long>(w.q_start + token) * p.out.out_token + qo * p.out.out_head)
                          : p.out.partial_o + to * C::kDimVo;
        columns(h, [&](int column, const float (&x)[4]) {
          if (there) __stcg(reinterpret_cast<float4*>(at + column), make_float4(x[0] * scale, x[1] * scale, x[2] * scale, x[3] * scale));
        });
        float2* md = whole ? reinterpret_cast<float2*>(p.out.lse) + ((w.q_start + token) * p.out.lse_token + qo * p.out.lse_head) : p.out.partial_md + to;
        if (there && (lane & 3) == 0) __stcg(md, make_float2(m[h], sum));
      }
      return;
    }
    if constexpr (!kStates) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = first + 8 * h + lane / 4;
        const int token = row / p.group, qo = head * p.group + row - token * p.group;
        float sum = quad_sum(d[h]), top = m[h], scale = v_scale;
        RowContext context;
        if constexpr (V::kHasInit || V::kHasOutput) context = row_context(w, p.out.tokens, head, p.group, min(row, rows - 1));
        if constexpr (V::kSoftmax) {
          if constexpr (V::kHasInit) {
            const float sink = context.template init<V>(p.variant) * kLog2e, next = fmaxf(top, sink), a = exp2_diff(top, next);
            sum = sum * a + exp2_diff(sink, next);
            scale *= a;
            top = next;
          }
          scale = sum == 0.0f ? 0.0f : scale / sum;
        }
#pragma unroll
        for (int i = 0; i < kOut; ++i) {
          if (((i >> 1) & 1) != h) continue;
          o[i] = V::kSoftmax && sum == 0.0f ? 0.0f : o[i] * scale;
          if constexpr (V::kHasOutput) o[i] = context.template output<V>(p.variant, o[i], top * kLn2, sum);
        }
        if (V::kSoftmax && p.out.lse != nullptr && row < rows && (lane & 3) == 0) {
          p.out.lse[(w.q_start + token) * p.out.lse_token + qo * p.out.lse_head] = sum == 0.0f ? neg_inf() : top + log2f(sum);
        }
      }
      // Through shared memory, so that 8 lanes write 128 bytes of a row.
      const unsigned at = shared_address(stage) + (lane & 15) * 128;
#pragma unroll
      for (int g = 0; g < C::kDimVo / 8; g += 2) {
        const float* x = o + g * 4;
        stmatrix_x4(at + (g >> 3) * kStride + ((((g & 7) + (lane >> 4)) ^ (lane & 7)) << 4), pack2<typename C::Out>(x[0], x[1]),
                    pack2<typename C::Out>(x[2], x[3]), pack2<typename C::Out>(x[4], x[5]), pack2<typename C::Out>(x[6], x[7]));
      }
      __syncwarp();
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = 4 * i + lane / 8, row = first + r, token = row / p.group;
        unsigned char* to = p.out.out + static_cast<long long>(w.q_start + token) * p.out.out_token +
                            static_cast<long long>(head * p.group + row - token * p.group) * p.out.out_head + (lane & 7) * 16;
#pragma unroll
        for (int c = 0; c < C::kDimVo / 64; ++c) {
          const uint4 x = *reinterpret_cast<const uint4*>(stage + c * kStride + r * 128 + (((lane ^ r) & 7) << 4));
          if (row < rows) *reinterpret_cast<uint4*>(to + c * 128) = x;
        }
      }
    }
  }
};

/// Warpgroups 1 and 2.
template <class C>
__device__ __forceinline__ void consume(const Sm90Params<typename C::Variant>& all, const Sm90Pipe<C>& pipe, unsigned char* shared, int group) {
  using V = typename C::Variant;
  using S = Sm90State<C>;
  const AttentionParams<V>& p = all.common;
  const int thread = threadIdx.x - 128, warp = (thread >> 5) & 3, lane = thread & 31;
  const Sm90Unit* units = reinterpret_cast<const Sm90Unit*>(shared + C::kUnits);
  RowContext* contexts = reinterpret_cast<RowContext*>(shared + C::kRowContexts) + group * 64 + warp * 16;
  const int* strange = reinterpret_cast<const int*>(shared + C::kStrange);

  // The maximum is that of the scores when they are multiplied by a positive number: a negative one goes to their signs.
  const float factor = p.sm_scale * p.kv.k_scale * (V::kHasLogits || !V::kSoftmax ? 1.0f : kLog2e);
  const bool flip = !C::kEach && factor < 0.0f;
  const float scale = C::kEach ? 1.0f : fmaxf(fabsf(factor), 1e-30f);

  Ring<C::kQStages> qs;
  Ring<C::kStages> ks, vs;
  auto free = [&](unsigned barrier) {
    if (lane == 0) barrier_arrive(barrier);
  };
  if (group == 1) named_arrive(1, 256);
  while (true) {
    barrier_wait(pipe.q_full(qs.stage), qs.phase);
    const Sm90Unit& u = units[qs.stage];
    if (u.head < 0) break;
    const int kv_start = u.item.kv_start, kv_end = u.item.kv_end, rows = u.item.tokens * p.group, full_end = u.item.full_end;
    // A short unit is the first warpgroup's alone.
    const bool both = rows > 64;
    if (group == 1 && !both) {
#pragma unroll 1
      for (int pos = kv_start; pos < kv_end; pos += C::kTile) {
        barrier_wait(pipe.k_full(ks.stage), ks.phase);
        free(pipe.k_empty(ks.stage));
        barrier_wait(pipe.v_ready(vs.stage), vs.phase);
        free(pipe.v_empty(vs.stage));
        ks.next(), vs.next();
      }
    } else {
      if constexpr (C::kContexts) {
        if (lane < 16) contexts[lane] = row_context(u.item, p.out.tokens, u.head, p.group, min(group * 64 + warp * 16 + lane, rows - 1));
        __syncwarp();
      }
      S state;
      float s[S::kScores];
      u32 weights[C::kTile / 16][4];
      state.m[0] = state.m[1] = neg_inf();
      state.d[0] = state.d[1] = 0.0f;
#pragma unroll
      for (int i = 0; i < S::kOut; ++i) state.o[i] = 0.0f;

      const unsigned q_at = pipe.base + C::kQ + qs.stage * C::kQBytes + group * 64 * 128;
      const WgmmaTile q_tile(q_at, 16, 1024);
      auto turn = [&] {
        if (both) named_sync(1 + group, 256);
      };
      auto pass = [&] {
        if (both) named_arrive(2 - group, 256);
      };
      auto scores = [&] {
        const WgmmaTile k_tile(pipe.base + C::kK + ks.stage * C::kKBytes, 16, C::kDimQk * 16);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < C::kDimQk / 16; ++i) {
          wgmma<C::kType, 0, 0>(s, q_tile.at((i / 4) * C::kRows * 128 + (i % 4) * 32), k_tile.at((i / 4) * 1024 + (i % 4) * 32), i != 0);
        }
        wgmma_commit();
      };
      auto values = [&] {
        const WgmmaTile v_tile(pipe.base + C::kV + vs.stage * C::kVBytes, 1024, C::kDimVo * 16);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < C::kTile / 16; ++i) wgmma<C::kType, 1>(state.o, weights[i], v_tile.at(i * C::kDimVo * 32), 1);
        wgmma_commit();
      };
      // Scores to weights, but for what waits until `o` is at rest.
      constexpr bool kStale = V::kSoftmax && !C::kEach && !V::kHasOutput && !V::kHasValue;
      float by[2];
      auto soften = [&](int pos, bool masked) {
        if (flip) {
#pragma unroll
          for (int i = 0; i < S::kScores; ++i) s[i] = -s[i];
        }
        if (C::kEach || masked) S::edit(s, p, u, contexts, pos, masked, factor);
        bool grown = false;
        if constexpr (V::kSoftmax) grown = state.rise(s, scale, by);
        state.weigh(s, scale);
        return grown;
      };
      auto sum = [&](int pos) {
        state.sum(s, [&](int j) { return V::value_scale(p.variant, u.item.request, u.item.kv_len, u.item.kv_base + pos + j, u.head); });
      };
      // Values that are not finite where a mask hides some: added to the rows that see them, then cleared for the product.
      // `at`: the stage of this tile's values.
      auto settle = [&](bool masked, Ring<C::kStages> at) {
        if constexpr (V::kHasMask) {
          if (masked) {
            barrier_wait(pipe.v_ready(at.stage), at.phase);
            const int* f = strange + at.stage * 4;
            if (f[0] | f[1] | f[2] | (C::kGather ? f[3] : 0)) {
              const ValueTile<typename C::Type, C::kTile, C::kDimVo / 8, GroupedRows<C::kDimVo>> tile{shared + C::kV + at.stage * C::kVBytes, nullptr};
              tile.template add<1, C::kDimVo / 8>(state.o, s, [](float x, int, int, int) { return x; });
              named_sync(4, both ? 256 : 128);
              if (both) tile.template clear<256>(thread);
              else tile.template clear<128>(thread);
              fence_async_proxy();
              named_sync(4, both ? 256 : 128);
            }
          }
        }
      };
      auto pack = [&] {
#pragma unroll
        for (int i = 0; i < C::kTile / 16; ++i) {
#pragma unroll
          for (int j = 0; j < 4; ++j) weights[i][j] = pack2<typename C::Type>(s[8 * i + 2 * j], s[8 * i + 2 * j + 1]);
        }
      };

      if (kv_start < kv_end) {
        barrier_wait(pipe.k_full(ks.stage), ks.phase);
        turn();
        scores();
        pass();
        wgmma_wait<0>();
        free(pipe.k_empty(ks.stage));
        ks.next();
        const bool first = kv_start + C::kTile > full_end;
        soften(kv_start, first);
        sum(kv_start);
        settle(first, vs);
        pack();
        int pos = kv_start + C::kTile;
        auto step = [&](bool masked) {
          barrier_wait(pipe.k_full(ks.stage), ks.phase);
          turn();
          scores();
          barrier_wait(pipe.v_ready(vs.stage), vs.phase);
          values();
          pass();
          wgmma_wait<1>();
          if (kStale && !masked) {
            if (flip) {
#pragma unroll
              for (int i = 0; i < S::kScores; ++i) s[i] = -s[i];
            }
            state.weigh(s, scale);
            wgmma_wait<0>();
            free(pipe.v_empty(vs.stage));
            vs.next();
            float sum[2];
            S::add_up(s, sum);
            if (__any_sync(~0u, state.is_lost(sum[0], 0) || state.is_lost(sum[1], 1))) {
              state.again(s, sum, shared + C::kQ + qs.stage * C::kQBytes + (group * 64 + warp * 16) * 128, shared + C::kK + ks.stage * C::kKBytes, factor);
            }
            free(pipe.k_empty(ks.stage));
            ks.next();
            state.calm(s, sum);
            pack();
            return;
          }
          free(pipe.k_empty(ks.stage));
          ks.next();
          const bool grown = soften(pos, masked);
          wgmma_wait<0>();
          free(pipe.v_empty(vs.stage));
          vs.next();
          sum(pos);
          if (grown) state.rescale(by);
          settle(masked, vs);
          pack();
        };
        // Tiles that every row sees, then the others: no question is asked in the first loop.
#pragma unroll 1
        for (; pos + C::kTile <= full_end; pos += C::kTile) step(false);
#pragma unroll 1
        for (; pos < kv_end; pos += C::kTile) step(true);
        barrier_wait(pipe.v_ready(vs.stage), vs.phase);
        values();
        wgmma_wait<0>();
        free(pipe.v_empty(vs.stage));
        vs.next();
      }
      // The unit's queries are no longer read: their place takes the rows on their way out.
      named_sync(5 + group, 128);
      state.template finish<C::kRows * 128>(p, u.item, u.head, group * 64 + warp * 16,
                                            shared + C::kQ + qs.stage * C::kQBytes + (group * 64 + warp * 16) * 128);
    }
    if (u.item.partial >= 0) {
      const int at = u.item.merge + u.head - u.item.head_start;
      const MergeItem merge = p.out.merges[at];
      if (last_part(p.out, at, merge.parts, reinterpret_cast<int*>(shared + C::kFlag), thread, [] { named_sync(3, 256); })) {
        merge_parts<V, typename C::Out, 4, 4>(p.out, p.variant, u.item, u.head, p.group, merge, C::kDimVo, p.kv.v_scale, thread, 256);
      }
    }
    fence_async_proxy();
    __syncwarp();
    free(pipe.q_empty(qs.stage));
    qs.next();
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) prefill_sm90(const __grid_constant__ Sm90Params<typename C::Variant> all) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // dispatch knows; the text compiles for all
  extern __shared__ __align__(1024) unsigned char shared[];
  const Sm90Pipe<C> pipe{shared_address(shared)};
  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (threadIdx.x == 0) pipe.init();
  __syncthreads();
  if (group == 0) {
    fewer_registers<40>();
    if constexpr (C::kGather) bring_rows(all, pipe, shared);
    else if (threadIdx.x < 32) bring_boxes(all, pipe, shared);
    else keep_boxes(pipe, shared);
  } else {
    more_registers<232>();
    consume(all, pipe, shared, group - 1);
  }
#endif
}

}  // namespace fir
