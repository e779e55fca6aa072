// sm90_pipe.cuh: what the roles of sm90_prefill.cuh share: parameters, shared memory, barriers, places in a ring.
//
// needs  sm_90a
// twins  src/cuda/attention/hopper.rs
#pragma once
#include <fir/attention/params.cuh>
#include <fir/base/mbarrier.cuh>
#include <fir/base/tma.cuh>
#include <fir/base/wgmma.cuh>

namespace fir {

template <class Variant>
struct alignas(64) Sm90Params {
  /// q as [token][head][128 bytes], a box of a tile's tokens and a group's heads.
  TensorMap q;
  /// Keys and values as [head][8-row group][128 bytes][row][column]: boxes of `box_rows` rows from row c1 of group c3 on.
  TensorMap k, v;
  /// The output, as [token][head][64 columns].
  TensorMap out;
  /// Keys and values of 8 rows, which may begin at any row: the last rows of ragged KV.
  TensorMap k_tail, v_tail;
  WorkQueue* queue;
  /// Number of items, in device memory.
  const int* count;
  /// KV heads: units per item; how many of them are taken before the next: as many as have their keys and values in L2.
  int heads, heads_at_once;
  /// Query tokens of a box of q.
  int box_tokens;
  /// Rows of a box, at most 64; groups between pages of keys and of values; groups that a box may not pass.
  int box_rows, k_page, v_page, groups;
  /// 2^22 over the group, rounded up: rows below 2^7 times it, over 2^22, are tokens.
  int group_inverse;
  AttentionParams<Variant> common;
};

template <class TQ, class TKV, class TO, int kDimQk_, int kDimVo_, class Variant_, int kTile_, int kQStages_, bool kGather_>
struct Sm90Config {
  /// What queries and keys are multiplied in, and weights and values; what keys and values come in.
  using Key = TQ;
  using Type = typename TQ::Mma;
  using Kv = TKV;
  using Out = TO;
  using Variant = Variant_;
  static constexpr int kDimQk = kDimQk_, kDimVo = kDimVo_, kTile = kTile_, kQStages = kQStages_;
  static constexpr bool kGather = kGather_;
  /// Values come as e4m3 and are made wider; keys too.
  static constexpr bool kWiden = TKV::kBits == 8, kWidenKeys = kWiden && TQ::kBits == 16;
  /// Whether a warpgroup more has something to do. 512 threads begin with 128 registers each, which a product of 256 columns does not fit.
  static constexpr bool kFourth = (kGather || kWiden) && kDimVo < 256;
  static constexpr int kCopyWarps = kFourth ? 4 : 2;
  /// Warps that read what warp 0 tells of a unit: those of products, of copies, and those that look at values.
  static constexpr int kUnitReaders = 8 + (kGather ? kCopyWarps : 2) + (kWiden ? 4 : 1);
  static constexpr int kRows = 128, kThreads = kFourth ? 512 : 384, kStages = 2, kUnitStages = 4;
  static constexpr Wgmma kType = Same<Type, Bf16>::value ? Wgmma::kBf16 : Wgmma::kF16, kKeyType = TQ::kBits == 8 ? Wgmma::kE4m3 : kType;
  /// Bytes of a row of q and of keys.
  static constexpr int kRowBytes = kDimQk * TQ::kBits / 8;
  /// The output stands where q was, and may be longer.
  static constexpr int kQBytes = kRows * (kRowBytes > kDimVo * 2 ? kRowBytes : kDimVo * 2), kKBytes = kTile * kRowBytes, kVBytes = kTile * kDimVo * 2;
  /// Values as they come, and keys, of which there is room for one tile.
  static constexpr int kRawStages = kWidenKeys ? 1 : kStages;
  static constexpr int kRawBytes = kWiden ? kTile * kDimVo : 0, kRawKeyBytes = kWidenKeys ? kTile * kDimQk : 0;
  /// Hooks see every logit: scores become logits before the maximum is taken.
  static constexpr bool kEach = Variant_::kHasQuery || Variant_::kHasKey || Variant_::kHasLogits || !Variant_::kSoftmax;
  static constexpr bool kContexts = Variant_::kHasQuery || Variant_::kHasLogits || Variant_::kHasMask;

  // Shared memory, in bytes from the start.
  static constexpr int kQ = 0;
  static constexpr int kK = kQ + kQStages * kQBytes;
  static constexpr int kV = kK + kStages * kKBytes;
  static constexpr int kRaw = kV + kStages * kVBytes;
  static constexpr int kRawKeys = kRaw + kRawStages * kRawBytes;
  static constexpr int kBarriers = kRawKeys + kRawStages * kRawKeyBytes;  // u64 [10 kStages + 2 kUnitStages]
  static constexpr int kUnits = kBarriers + 224;                // Sm90Unit [kUnitStages]
  static constexpr int kStrange = kUnits + kUnitStages * 80;    // int [kStages]
  static constexpr int kFlag = kStrange + kStages * 16;         // int
  static constexpr int kRowContexts = kFlag + 16;               // RowContext [kUnitStages][kRows]
  static constexpr int kShared = kRowContexts + (kContexts ? kUnitStages * kRows * int(sizeof(RowContext)) : 0);

  static_assert(Same<TQ, TKV>::value || Same<TKV, E4m3>::value);
  static_assert(TKV::kBits == 16 || (Same<TKV, E4m3>::value && kFourth && !kGather));
  static_assert(kDimQk * TKV::kBits % 1024 == 0 && kDimVo * TKV::kBits % 1024 == 0 && kDimVo <= kDimQk && kDimQk <= 256);
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
  /// Where the request's entries of the page table start.
  int start;
  int pad[2];
};

/// Whether rows of an item leave as a box, by warp 0. Others are written from registers, which takes longer (docs/kernels.md).
template <class C, class V>
__device__ __forceinline__ bool is_staged(const Sm90Params<V>& all, const WorkItem& w) {
  return !Same<typename C::Out, State>::value && w.partial < 0 && w.tokens == all.box_tokens;
}

/// Where the last tile of an item begins: below `kv_start` if there is none.
template <class C>
__device__ __forceinline__ int last_tile(const WorkItem& w) {
  return w.kv_start + (w.kv_end > w.kv_start ? (w.kv_end - w.kv_start - 1) / C::kTile * C::kTile : -C::kTile);
}

/// Keys and values in shared memory: [8-row group][128 bytes][row][16-byte chunk], swizzled. A page's rows are one box, and
/// groups of 8 rows are equally far apart, which is all that wgmma asks.
template <int kRowBytes>
struct GroupedRows {
  __device__ __forceinline__ static unsigned offset(int row, int chunk) {
    return (row >> 3) * kRowBytes * 8 + (chunk >> 3) * 1024 + (row & 7) * 128 + (((chunk ^ row) & 7) << 4);
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
  /// A unit is told of; its q may be on the way still. Four of them, so kind 8 is theirs too.
  __device__ __forceinline__ unsigned unit_full(int s) const { return barrier(7, s); }
  /// Keys have come, copied by threads.
  __device__ __forceinline__ unsigned k_copied(int s) const { return barrier(9, s); }
  /// Of values that are made wider: they have come as `v_full` says; all have been read. The same of keys.
  __device__ __forceinline__ unsigned raw_empty(int s) const { return barrier(9, s); }
  __device__ __forceinline__ unsigned k_raw_full(int s) const { return barrier(10, s); }
  __device__ __forceinline__ unsigned k_raw_empty(int s) const { return barrier(11, s); }
  /// Nobody reads a unit any more.
  __device__ __forceinline__ unsigned unit_empty(int s) const { return barrier(12, s); }

  __device__ __forceinline__ void init() const {
    constexpr int kCopiers = C::kGather ? C::kCopyWarps * 32 : 1;  // threads that say that rows have come
    for (int s = 0; s < 2; ++s) {
      barrier_init(q_full(s), 1);
      barrier_init(q_empty(s), 8 * kWarpArrivals);
      barrier_init(k_full(s), C::kWidenKeys ? 4 * kWarpArrivals : C::kGather ? kWarpArrivals : 1);
      barrier_init(k_raw_full(s), 1);
      barrier_init(k_raw_empty(s), 4 * kWarpArrivals);
      barrier_init(k_copied(s), C::kWiden ? 4 * kWarpArrivals : kCopiers);
      barrier_init(k_empty(s), 8 * kWarpArrivals);
      barrier_init(v_full(s), kCopiers);
      barrier_init(v_ready(s), (C::kWiden ? 4 : 1) * kWarpArrivals);
      barrier_init(v_empty(s), 8 * kWarpArrivals);
    }
    for (int s = 0; s < C::kUnitStages; ++s) barrier_init(unit_full(s), kWarpArrivals), barrier_init(unit_empty(s), C::kUnitReaders * kWarpArrivals);
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

}  // namespace fir
