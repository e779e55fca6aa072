// prefill.cuh: many query rows against KV: prefill, append, mixed batches, block-sparse; bound by tensor cores.
//
//   o[r]   = sum_j softmax_j(logits(scale q[r] . k[j])) v[j]
//   lse[r] = log2 sum_j 2^(logits_j log2 e)                          (base 2; softmax.cuh)
//
// grid   (blocks)       persistent; block b takes unit b, then the next that nobody took. A unit is a KV head of an item;
//                       items come longest first, so that the last to be taken are short
// block  32 kWarps      warp w owns rows 16 kMTiles w and on of the tile, with their softmax and output in registers
// smem   q of kRows rows, kStages x (kTile keys + kTile values), all swizzled; places of 2 tiles' rows; row contexts
// needs  sm_80 (cp.async, mma.sync); head dims multiples of 16 (of 32 for 8 bit), rows 16-byte aligned, a pool that
//        spans less than 64 GB (offsets travel as 32-bit counts of 16 bytes); no rotation
//
// The rows of a tile are the query heads of a KV head for several tokens: row = token * group + head in the group.
// Why 32 rows a warp: a fragment of K or V, 512 bytes by ldmatrix, takes shared memory 4 clocks and feeds 2 mma for
// each 16 rows, of which an SM does one in 1.6 clocks. With 16 rows shared memory is the bound, with 32 mma.sync is.
// 32 rows of 128 columns are 128 registers of output, 64 positions 64 of scores: q stays in shared memory, two blocks
// of 4 warps fill the register file, and one's softmax runs under the other's products. Within a warp the
// exponentials of 16 positions stand between the products of the 16 before.
//
// reads  q; pages of the items' requests, never a row at or past kv_end
// writes out, lse of whole units and of merged ones; partial_o, partial_md of parts; counters and queue end as they began
// twins  src/cpu/attention/, src/reference/attention.rs, src/plan/schedule.rs
#pragma once
#include <fir/attention/finite.cuh>
#include <fir/attention/params.cuh>

namespace fir {

template <class Variant>
struct PrefillParams {
  WorkQueue* queue;
  /// Number of items, in device memory.
  const int* count;
  /// KV heads: units per item.
  int heads;
  int pad;
  AttentionParams<Variant> common;
};

template <class TQ, class TKv, class TO, int kDimQk_, int kDimVo_, class Variant_, int kWarps_, int kMTiles_, int kTile_, int kStages_>
struct PrefillConfig {
  using Q = TQ;
  using Kv = TKv;
  using Out = TO;
  using Mma = typename TKv::Mma;
  using Variant = Variant_;
  static constexpr int kDimQk = kDimQk_, kDimVo = kDimVo_, kWarps = kWarps_, kMTiles = kMTiles_, kTile = kTile_, kStages = kStages_;
  static constexpr int kThreads = 32 * kWarps, kRows = 16 * kMTiles * kWarps;
  static constexpr int kQChunks = kDimQk / 8, kKChunks = kDimQk * TKv::kBits / 128, kVChunks = kDimVo * TKv::kBits / 128;
  static constexpr int kKBytes = kTile * kKChunks * 16, kVBytes = kTile * kVChunks * 16;
  static constexpr int kStageBytes = kKBytes + kVBytes;
  static constexpr int kSteps = kDimQk / 16;
  /// q goes to shared memory as it is; else through registers, converted, its columns permuted for 8-bit keys.
  static constexpr bool kQDirect = Same<TQ, Mma>::value && TKv::kBits == 16;
  /// Rows of q are scaled to fit f16.
  static constexpr bool kRange = Same<Mma, F16>::value && !Same<TQ, F16>::value;
  /// Hooks see every logit: scores become logits before the maximum is taken.
  static constexpr bool kEach = Variant_::kHasQuery || Variant_::kHasKey || Variant_::kHasLogits || !Variant_::kSoftmax;
  static constexpr bool kContexts = Variant_::kHasQuery || Variant_::kHasLogits || Variant_::kHasMask;

  // Shared memory, in bytes from the start.
  static constexpr int kQ = 0;
  static constexpr int kRing = kQ + kRows * kDimQk * 2;
  static constexpr int kPlaces = kRing + kStages * kStageBytes;                 // unsigned [2][2][kTile]: K and V of two tiles
  static constexpr int kFactors = kPlaces + 4 * kTile * 4;                      // float [kRows]
  static constexpr int kRowContexts = kFactors + (kRange ? kRows * 4 : 0);     // RowContext [kRows]
  static constexpr int kFlag = kRowContexts + (kContexts ? kRows * int(sizeof(RowContext)) : 0);  // int [2]
  static constexpr int kShared = kFlag + 16;

  static_assert(TKv::kBits == 16 || TKv::kBits == 8);
  static_assert(kDimQk % (256 / TKv::kBits) == 0 && kDimVo % (256 / TKv::kBits) == 0);
  static_assert(kTile % 16 == 0 && kTile <= kThreads && kStages >= 2);
  static_assert(!RopeOf<Variant_, false>::kOn && !RopeOf<Variant_, true>::kOn, "rotations are decode.cuh's and plain.cuh's");
};

/// Where a lane's chunk of a 16-row (for ldmatrix) stretch of a swizzled tile lies. `kHalf`: which of two neighbouring
/// chunks this lane names. Row lengths that are powers of two take one XOR per chunk.
template <int kChunks>
struct FragmentRows {
  static constexpr bool kXor = (kChunks & (kChunks - 1)) == 0;
  unsigned first, swizzle, half;

  __device__ __forceinline__ FragmentRows(int row, int half) : half(half) {
    using Rows = SwizzledRows<kChunks>;
    swizzle = (row >> (3 - Rows::kBits)) & ((1 << Rows::kBits) - 1);
    first = kXor ? Rows::offset(row, half) : row * Rows::kRowBytes;
  }
  /// Chunks 2 c + half of rows 16 n + row; `tile` is aligned to a row.
  __device__ __forceinline__ unsigned at(unsigned tile, int c, int n) const {
    if constexpr (kXor) return ((tile + first) ^ unsigned(c << 5)) + n * 16 * kChunks * 16;
    else return tile + first + (((2 * c + half) ^ swizzle) << 4) + n * 16 * kChunks * 16;
  }
};

/// All threads copy a tile of `C::kTile` rows whose places are in shared memory: 16-byte units from `base`. Rows from
/// `valid` on and chunks from `row_bytes` on become zeros.
template <class C, int kChunks>
__device__ __forceinline__ void copy_tile(unsigned to, const unsigned char* base, const unsigned* places, int valid, int row_bytes) {
  using Rows = SwizzledRows<kChunks>;
  constexpr int kAll = C::kTile * kChunks, kCopies = (kAll + C::kThreads - 1) / C::kThreads;
  // Neighbouring rows to a thread, so that their places are read 4 at a time.
  constexpr bool kDown = (kChunks & (kChunks - 1)) == 0 && kChunks <= C::kThreads && kCopies % 4 == 0 && (kCopies & (kCopies - 1)) == 0 &&
                         kAll % C::kThreads == 0;
  if constexpr (kDown) {
    const int chunk = threadIdx.x % kChunks, row = threadIdx.x / kChunks * kCopies;
    if (valid >= C::kTile && row_bytes == kChunks * 16) {
      const unsigned char* from = base + chunk * 16;
      asm("" : "+l"(from));  // one sum, not one per copy
      // `row` is a multiple of kCopies, so adding i to it is setting bits, and the swizzle an XOR of the address.
      const unsigned first = to + Rows::offset(row, chunk);
      auto at = [&](int i) { return (first ^ (((i >> (3 - Rows::kBits)) & ((1 << Rows::kBits) - 1)) << 4)) + i * Rows::kRowBytes; };
#pragma unroll
      for (int i = 0; i < kCopies; i += 4) {
        const uint4 v = *reinterpret_cast<const uint4*>(places + row + i);
        cp_async_16(at(i), from + v.x * 16ull);
        cp_async_16(at(i + 1), from + v.y * 16ull);
        cp_async_16(at(i + 2), from + v.z * 16ull);
        cp_async_16(at(i + 3), from + v.w * 16ull);
      }
      return;
    }
  }
#pragma unroll kDown ? 1 : kCopies
  for (int i = 0; i < kCopies; ++i) {
    const int index = i * C::kThreads + threadIdx.x, row = index / kChunks, chunk = index % kChunks;
    if (kAll % C::kThreads != 0 && index >= kAll) break;
    const bool there = row < valid && chunk * 16 < row_bytes;
    cp_async_16(to + Rows::offset(row, chunk), base + places[row] * 16ull + (there ? chunk * 16 : 0), there ? 16 : 0);
  }
}

/// Brings the tiles of a unit into the ring. A row's place is looked up by one thread, a tile ahead of its copy; its
/// page id is asked for a tile ahead of that.
template <class C>
struct TileLoader {
  using Variant = typename C::Variant;
  const AttentionParams<Variant>& p;
  unsigned ring;
  unsigned* places;
  int pages, kv_end;
  /// First position of the tile whose page ids are in `entry`, and its number.
  int ahead, number;
  int entry;

  __device__ __forceinline__ TileLoader(const AttentionParams<Variant>& p, unsigned ring, unsigned* places) : p(p), ring(ring), places(places) {}

  __device__ __forceinline__ int row() const { return min(ahead + int(threadIdx.x), kv_end - 1); }
  __device__ __forceinline__ void look() {
    if (threadIdx.x < C::kTile && ahead < kv_end) entry = p.kv.entry(pages, row());
  }
  __device__ __forceinline__ void start(const WorkItem& w) {
    pages = p.kv.start(w.pages), kv_end = w.kv_end, ahead = w.kv_start, number = 0;
    look();
  }
  /// Writes the places of the next tile; a barrier must come before they are read.
  __device__ __forceinline__ void place() {
    if (threadIdx.x < C::kTile && ahead < kv_end) {
      unsigned page;
      long long slot;
      p.kv.place(entry, row(), page, slot);
      unsigned* to = places + (number & 1) * 2 * C::kTile + threadIdx.x;
      to[0] = unsigned(static_cast<unsigned long long>(row_offset(p.kv.k, page, slot)) >> 4);
      to[C::kTile] = unsigned(static_cast<unsigned long long>(row_offset(p.kv.v, page, slot)) >> 4);
    }
    ahead += C::kTile, ++number;
    look();
  }
  /// Copies tile `tile`, from position `pos`, as one group; nothing at or past the end.
  __device__ __forceinline__ void copy(int tile, int slot, int pos, int head) {
    if (pos < kv_end) {
      const unsigned to = ring + slot * C::kStageBytes;
      const unsigned* from = places + (tile & 1) * 2 * C::kTile;
      const int valid = kv_end - pos;
      copy_tile<C, C::kKChunks>(to, p.kv.k.data + head * p.kv.k.head, from, valid, p.kv.dim_qk * C::Kv::kBits / 8);
      copy_tile<C, C::kVChunks>(to + C::kKBytes, p.kv.v.data + head * p.kv.v.head, from + C::kTile, valid, p.kv.dim_vo * C::Kv::kBits / 8);
    }
    cp_async_commit();
  }
};

/// q of a unit to shared memory. Rows that are not there become zeros.
template <class C>
__device__ __forceinline__ void load_tile_queries(const AttentionParams<typename C::Variant>& p, const WorkItem& w, int head, unsigned char* to,
                                                  float* factors) {
  using Rows = SwizzledRows<C::kQChunks>;
  const int rows = w.tokens * p.group;
  const unsigned char* base = p.q + w.q_start * p.q_token + static_cast<long long>(head) * p.group * p.q_head;
  if constexpr (C::kQDirect) {
    constexpr int kAll = C::kRows * C::kQChunks;
    const unsigned address = shared_address(to);
#pragma unroll 4
    for (int index = threadIdx.x; index < kAll; index += C::kThreads) {
      const int row = index / C::kQChunks, chunk = index % C::kQChunks;
      const bool there = row < rows && chunk * 8 < p.kv.dim_qk;
      const int token = row / p.group;
      cp_async_16(address + Rows::offset(row, chunk), there ? base + token * p.q_token + (row - token * p.group) * p.q_head + chunk * 16 : base,
                  there ? 16 : 0);
    }
  } else {
    // A row to a warp, 4 rows at a time to have their loads under way together.
    constexpr int kPer = (C::kDimQk + 31) / 32, kBatch = 4;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
#pragma unroll 1
    for (int first = warp * kBatch; first < C::kRows; first += C::kWarps * kBatch) {
      float x[kBatch][kPer];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int row = first + b, token = row / p.group;
        const unsigned char* from = base + token * p.q_token + (row - token * p.group) * p.q_head;
#pragma unroll
        for (int i = 0; i < kPer; ++i) {
          const int e = i * 32 + lane;
          x[b][i] = row < rows && e < p.kv.dim_qk ? load_one<typename C::Q>(from, e) : 0.0f;
        }
      }
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int row = first + b;
        if constexpr (C::kRange) {
          float top = 0.0f;
#pragma unroll
          for (int i = 0; i < kPer; ++i) top = fmaxf(top, fabsf(x[b][i]));
#pragma unroll
          for (int step = 16; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
          // 2^floor(log2 top) and its inverse, by the exponent's bits; clamped so that both are normal.
          const int e = min(max(int(__float_as_uint(top) >> 23) - 127, -120), 120);
          const float inverse = __uint_as_float(unsigned(127 - e) << 23);
          if (lane == 0) factors[row] = __uint_as_float(unsigned(127 + e) << 23);
#pragma unroll
          for (int i = 0; i < kPer; ++i) x[b][i] *= inverse;
        }
#pragma unroll
        for (int i = 0; i < kPer; ++i) {
          int e = i * 32 + lane;
          if (C::kDimQk % 32 != 0 && e >= C::kDimQk) continue;
          const unsigned short bits = static_cast<unsigned short>(pack2<typename C::Mma>(x[b][i], 0.0f));
          // Elements 4 j + 0, 1 and 4 j + 2, 3 of 16 are slots 2 j and 8 + 2 j: what 4 bytes of an 8-bit key widen to.
          if constexpr (C::Kv::kBits == 8) e = (e & ~15) | ((e & 2) << 2) | ((e & 12) >> 1) | (e & 1);
          *reinterpret_cast<unsigned short*>(to + Rows::offset(row, e >> 3) + (e & 7) * 2) = bits;
        }
      }
    }
  }
}

/// What a warp keeps for its rows: softmax and output. Row h of m-tile m is 16 m + 8 h + lane / 4 of the warp's.
template <class C>
struct TileState {
  using V = typename C::Variant;
  using T = typename C::Mma;
  static constexpr int kM = C::kMTiles, kN = C::kTile / 8, kOut = C::kDimVo / 8;
  /// A maximum is moved only when it grows by more than this factor's log2: weights then reach 256 at most, which f16
  /// holds, and after the first tiles `o` is hardly ever rescaled. With a hook on the output, (m, d) is as it says.
  static constexpr float kSlack = V::kHasOutput ? 0.0f : 8.0f;

  float o[kM][kOut][4], m[kM][2], d[kM][2];

  __device__ __forceinline__ void reset() {
#pragma unroll
    for (int i = 0; i < kM; ++i) {
      m[i][0] = m[i][1] = neg_inf();
      d[i][0] = d[i][1] = 0.0f;
#pragma unroll
      for (int t = 0; t < kOut; ++t) o[i][t][0] = o[i][t][1] = o[i][t][2] = o[i][t][3] = 0.0f;
    }
  }

  /// s = q . k
  __device__ __forceinline__ static void scores(unsigned q, unsigned keys, float (&s)[kM][kN][4]) {
    const int lane = threadIdx.x & 31;
    const FragmentRows<C::kQChunks> q_rows(lane & 15, lane >> 4);
    const FragmentRows<C::kKChunks> k_rows((lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1);
    auto step = [&](int k, unsigned (&out)[kM][4]) {
#pragma unroll
      for (int i = 0; i < kM; ++i) ldmatrix_x4(out[i], q_rows.at(q, k, i));
    };
#pragma unroll
    for (int i = 0; i < kM; ++i) {
#pragma unroll
      for (int t = 0; t < kN; ++t) s[i][t][0] = s[i][t][1] = s[i][t][2] = s[i][t][3] = 0.0f;
    }
#pragma unroll
    for (int c = 0; c < C::kKChunks / 2; ++c) {
      unsigned a0[kM][4], a1[kM][4];
      if constexpr (C::Kv::kBits == 16) step(c, a0);
      else step(2 * c, a0), step(2 * c + 1, a1);
#pragma unroll
      for (int n = 0; n < kN / 2; ++n) {
        unsigned r[4];
        ldmatrix_x4(r, k_rows.at(keys, c, n));
        if constexpr (C::Kv::kBits == 16) {
#pragma unroll
          for (int i = 0; i < kM; ++i) {
            mma<T>(s[i][2 * n], a0[i], r[0], r[1]);
            mma<T>(s[i][2 * n + 1], a0[i], r[2], r[3]);
          }
        } else {
          // Chunk 2 c of 8 rows is r[0] (and r[2] of 8 more), chunk 2 c + 1 is r[1] (r[3]).
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            unsigned b0, b1;
            fp8x4_to_f16x4<typename C::Kv>(r[j], b0, b1);
#pragma unroll
            for (int i = 0; i < kM; ++i) mma<T>(s[i][2 * n + j / 2], j % 2 == 0 ? a0[i] : a1[i], b0, b1);
          }
        }
      }
    }
  }

  /// Moves the maxima to those of `s` times `scale` of the row, where they grew enough, and rescales.
  __device__ __forceinline__ void rise(const float (&s)[kM][kN][4], const float (&scale)[kM][2]) {
    float factor[kM][2];
    bool grown = false;
#pragma unroll
    for (int i = 0; i < kM; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float x = fmaxf(s[i][0][2 * h], s[i][0][2 * h + 1]);
#pragma unroll
        for (int t = 1; t < kN; ++t) x = fmaxf(x, fmaxf(s[i][t][2 * h], s[i][t][2 * h + 1]));
        const float top = quad_max(x) * scale[i][h];
        // Each row decides for itself, so that its bits do not depend on its neighbours.
        const bool up = top > m[i][h] + kSlack;
        factor[i][h] = up ? exp2_diff(m[i][h], top) : 1.0f;
        m[i][h] = up ? top : m[i][h];
        grown |= up;
      }
    }
    if (__any_sync(~0u, grown)) {
#pragma unroll
      for (int i = 0; i < kM; ++i) {
        d[i][0] *= factor[i][0], d[i][1] *= factor[i][1];
#pragma unroll
        for (int t = 0; t < kOut; ++t) {
          o[i][t][0] *= factor[i][0], o[i][t][1] *= factor[i][0], o[i][t][2] *= factor[i][1], o[i][t][3] *= factor[i][1];
        }
      }
    }
  }

  __device__ __forceinline__ float base_of(int i, int h) const { return m[i][h] == neg_inf() ? 0.0f : m[i][h]; }

  /// What a score weighs in row h of m-tile i.
  __device__ __forceinline__ float weight(float x, const float (&scale)[kM][2], int i, int h) const {
    return exp2_fast(fmaf(x, scale[i][h], -base_of(i, h)));
  }

  /// o += weights . v, where the weights are 2^(s scale - m), or s itself without softmax.
  /// `value(t, j)`: factor of the value at column j of 16 positions t that this lane holds.
  template <class F>
  __device__ __forceinline__ void accumulate(float (&s)[kM][kN][4], const float (&scale)[kM][2], unsigned values, F value) {
    const int lane = threadIdx.x & 31;
    const FragmentRows<C::kVChunks> v_rows(lane & 15, lane >> 4);
    float base[kM][2];
#pragma unroll
    for (int i = 0; i < kM; ++i) base[i][0] = base_of(i, 0), base[i][1] = base_of(i, 1);
    // Weight e of the 8 kM of 16 positions: m-tile, half, column.
    auto weigh = [&](int t, int e) {
      const int i = e / 8, n = 2 * t + e % 8 / 4, j = e % 4;
      float& x = s[i][n][j];
      if constexpr (V::kSoftmax) {
        x = exp2_fast(fmaf(x, scale[i][j / 2], -base[i][j / 2]));
        d[i][j / 2] += x;
      }
      if constexpr (V::kHasValue) {
        const float f = value(n, j & 1);
        x = x == 0.0f ? 0.0f : x * f;  // a weight of 0 stays 0, whatever the scale of a position that nobody sees
      }
    };
    constexpr int kColumns = C::kVChunks / 2, kEach = (8 * kM + kColumns - 1) / kColumns;
#pragma unroll
    for (int e = 0; e < 8 * kM; ++e) weigh(0, e);
#pragma unroll
    for (int t = 0; t < kN / 2; ++t) {
      unsigned a[kM][4];
#pragma unroll
      for (int i = 0; i < kM; ++i) {
        a[i][0] = pack2<T>(s[i][2 * t][0], s[i][2 * t][1]), a[i][1] = pack2<T>(s[i][2 * t][2], s[i][2 * t][3]);
        a[i][2] = pack2<T>(s[i][2 * t + 1][0], s[i][2 * t + 1][1]), a[i][3] = pack2<T>(s[i][2 * t + 1][2], s[i][2 * t + 1][3]);
      }
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        unsigned r[4];
        ldmatrix_x4_trans(r, v_rows.at(values, c, t));
        if constexpr (C::Kv::kBits == 16) {
#pragma unroll
          for (int i = 0; i < kM; ++i) {
            mma<T>(o[i][2 * c], a[i], r[0], r[1]);
            mma<T>(o[i][2 * c + 1], a[i], r[2], r[3]);
          }
        } else {
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            // Bytes: two columns of one position, the same of the next; wanted: two positions of one column.
            unsigned even0, odd0, even1, odd1;
            fp8x4_to_f16x4<typename C::Kv>(__byte_perm(r[2 * j], 0, 0x3120), even0, odd0);
            fp8x4_to_f16x4<typename C::Kv>(__byte_perm(r[2 * j + 1], 0, 0x3120), even1, odd1);
#pragma unroll
            for (int i = 0; i < kM; ++i) {
              mma<T>(o[i][4 * c + 2 * j], a[i], even0, even1);
              mma<T>(o[i][4 * c + 2 * j + 1], a[i], odd0, odd1);
            }
          }
        }
        if (t + 1 < kN / 2) {
#pragma unroll
          for (int e = c * kEach; e < (c + 1) * kEach && e < 8 * kM; ++e) weigh(t + 1, e);
        }
      }
    }
  }

  /// Calls `put(column, x[4])` with 4 columns of row h of m-tile i at a time; a warp's calls fill whole 32-byte sectors
  /// of 16-bit rows. All lanes call it.
  template <class F>
  __device__ __forceinline__ void columns(int i, int h, F put) const {
    const int q = threadIdx.x & 3;
    if constexpr (C::Kv::kBits == 8) {
#pragma unroll
      for (int t = 0; t < kOut; t += 2) {
        float x[4] = {o[i][t][2 * h], o[i][t + 1][2 * h], o[i][t][2 * h + 1], o[i][t + 1][2 * h + 1]};
        put(8 * t + 4 * q, x);
      }
    } else {
      // Lanes 2 j and 2 j + 1 trade halves: the even one gets 4 columns of tile t, the odd one of t + 1.
      const bool odd = q & 1;
#pragma unroll
      for (int t = 0; t < kOut; t += 2) {
        const float a0 = o[i][t][2 * h], a1 = o[i][t][2 * h + 1], b0 = o[i][t + 1][2 * h], b1 = o[i][t + 1][2 * h + 1];
        const float y0 = __shfl_xor_sync(~0u, odd ? a0 : b0, 1), y1 = __shfl_xor_sync(~0u, odd ? a1 : b1, 1);
        float x[4] = {odd ? y0 : a0, odd ? y1 : a1, odd ? b0 : y0, odd ? b1 : y1};
        put(8 * (t + odd) + 2 * (q & 2), x);
      }
    }
  }

  /// Writes the warp's rows: the output of a whole unit, or a part's state.
  __device__ __forceinline__ void finish(const AttentionParams<V>& p, const WorkItem& w, int head, int first, float v_scale) const {
    const int lane = threadIdx.x & 31, rows = w.tokens * p.group, dim = p.kv.dim_vo;
#pragma unroll
    for (int i = 0; i < kM; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = first + 16 * i + 8 * h + lane / 4;
        const bool there = row < rows;
        float sum = quad_sum(d[i][h]), top = m[i][h];
        if (w.partial >= 0) {
          const long long to = w.partial + static_cast<long long>(head - w.head_start) * rows + row;
          float* at = p.out.partial_o + to * dim;
          const float f = part_scale<typename C::Out>(v_scale);
          columns(i, h, [&](int column, const float (&x)[4]) {
            if (there && column < dim) __stcg(reinterpret_cast<float4*>(at + column), make_float4(x[0] * f, x[1] * f, x[2] * f, x[3] * f));
          });
          if (there && (lane & 3) == 0) __stcg(p.out.partial_md + to, make_float2(top, sum));
          continue;
        }
        const int token = row / p.group, qo = head * p.group + row - token * p.group;
        if constexpr (Same<typename C::Out, State>::value) {
          float* at = reinterpret_cast<float*>(p.out.out + static_cast<long long>(w.q_start + token) * p.out.out_token + qo * p.out.out_head);
          columns(i, h, [&](int column, const float (&x)[4]) {
            if (there && column < dim) *reinterpret_cast<float4*>(at + column) = make_float4(x[0] * v_scale, x[1] * v_scale, x[2] * v_scale, x[3] * v_scale);
          });
          if (there && (lane & 3) == 0) {
            reinterpret_cast<float2*>(p.out.lse)[(w.q_start + token) * p.out.lse_token + qo * p.out.lse_head] = make_float2(top, sum);
          }
        } else {
          RowContext context;
          if constexpr (V::kHasInit || V::kHasOutput) context = row_context(w, p.out.tokens, head, p.group, min(row, rows - 1));
          float scale = v_scale;
          if constexpr (V::kSoftmax) {
            if constexpr (V::kHasInit) {
              const float sink = context.template init<V>(p.variant) * kLog2e, next = fmaxf(top, sink), a = exp2_diff(top, next);
              sum = sum * a + exp2_diff(sink, next);
              scale *= a;
              top = next;
            }
            scale = sum == 0.0f ? 0.0f : scale / sum;
          }
          unsigned char* at = p.out.out + static_cast<long long>(w.q_start + token) * p.out.out_token + qo * p.out.out_head;
          columns(i, h, [&](int column, float (&x)[4]) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
              x[j] = V::kSoftmax && sum == 0.0f ? 0.0f : x[j] * scale;
              if constexpr (V::kHasOutput) x[j] = context.template output<V>(p.variant, x[j], top * kLn2, sum);
            }
            if (there && column < dim) store4<typename C::Out>(at + column * (C::Out::kBits / 8), x);
          });
          if (V::kSoftmax && p.out.lse != nullptr && there && (lane & 3) == 0) {
            p.out.lse[(w.q_start + token) * p.out.lse_token + qo * p.out.lse_head] = sum == 0.0f ? neg_inf() : top + log2f(sum);
          }
        }
      }
    }
  }
};

template <class C, int kMinBlocks>
__global__ void __launch_bounds__(C::kThreads, kMinBlocks) prefill(const __grid_constant__ PrefillParams<typename C::Variant> all) {
  using V = typename C::Variant;
  using Tile = TileState<C>;
  constexpr int kM = C::kMTiles, kN = C::kTile / 8;
  const AttentionParams<V>& p = all.common;
  extern __shared__ __align__(1024) unsigned char shared[];
  const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
  const unsigned address = shared_address(shared), ring = address + C::kRing;
  const int first_row = warp * 16 * kM;
  const unsigned my_q = address + C::kQ + first_row * C::kDimQk * 2;
  float* factors = reinterpret_cast<float*>(shared + C::kFactors);
  RowContext* contexts = reinterpret_cast<RowContext*>(shared + C::kRowContexts);
  int* flag = reinterpret_cast<int*>(shared + C::kFlag);
  TileLoader<C> loader(p, ring, reinterpret_cast<unsigned*>(shared + C::kPlaces));

  // The maximum is that of the scores when they are multiplied by a positive number: a negative one goes to q's signs.
  const float factor = p.sm_scale * p.kv.k_scale * (V::kHasLogits || !V::kSoftmax ? 1.0f : kLog2e);
  const bool flip = !C::kEach && factor < 0.0f;
  const float scale = C::kEach ? factor : fmaxf(fabsf(factor), 1e-30f);

  const int units = *all.count * all.heads;
  for (int unit = blockIdx.x; unit < units;) {
    const int item = unit / all.heads, head = unit - item * all.heads;
    // Fields that only the end needs are read again there: they would cost registers that the products want.
    const WorkItem w = p.items[item];
    const int rows = w.tokens * p.group;
    loader.start(w);
    load_tile_queries<C>(p, w, head, shared + C::kQ, factors);
    if constexpr (C::kContexts) {
      for (int r = threadIdx.x; r < C::kRows; r += C::kThreads) contexts[r] = row_context(w, p.out.tokens, head, p.group, min(r, rows - 1));
    }
    loader.place();
    __syncthreads();
    // The next unit, asked for now and read when this one is done.
    if (threadIdx.x == 0) flag[1] = int(gridDim.x + atomicAdd(&all.queue->taken, 1u));
#pragma unroll
    for (int s = 0; s < C::kStages - 1; ++s) {
      loader.copy(s, s, w.kv_start + s * C::kTile, head);
      loader.place();
      if (s + 1 < C::kStages - 1) __syncthreads();
    }
    // Warps without rows only copy.
    const bool mine = first_row < rows;
    Tile state;
    state.reset();
    if (flip) {
      // The chunks of q that this thread copied itself.
      cp_async_wait<0>();
      for (int i = threadIdx.x; i < C::kRows * C::kQChunks; i += C::kThreads) {
        uint4* x = reinterpret_cast<uint4*>(shared + C::kQ + SwizzledRows<C::kQChunks>::offset(i / C::kQChunks, i % C::kQChunks));
        const uint4 v = *x;
        *x = make_uint4(v.x ^ 0x80008000u, v.y ^ 0x80008000u, v.z ^ 0x80008000u, v.w ^ 0x80008000u);
      }
    }

    int slot = 0, tile = 0;
#pragma unroll 1
    for (int pos = w.kv_start; pos < w.kv_end; pos += C::kTile, ++tile) {
      cp_async_wait<C::kStages - 2>();
      __syncthreads();  // the tile is there, the stage before it has been read, the next tile's places are written
      loader.copy(tile + C::kStages - 1, slot == 0 ? C::kStages - 1 : slot - 1, pos + (C::kStages - 1) * C::kTile, head);
      loader.place();
      const unsigned at = ring + slot * C::kStageBytes;
      const bool masked = pos + C::kTile > w.full_end;
      // All threads share the values: what is not finite is added by each warp, then cleared by all.
      const ValueTile<typename C::Kv, C::kTile, C::kVChunks> values{shared + C::kRing + slot * C::kStageBytes + C::kKBytes, nullptr};
      bool strange = false;
      if constexpr (V::kHasMask) {
        if (masked) strange = __syncthreads_or(values.template strange<C::kThreads>(threadIdx.x));
      }
      auto clear = [&] {
        __syncthreads();
        values.template clear<C::kThreads>(threadIdx.x);
        __syncthreads();
      };
      slot = slot + 1 == C::kStages ? 0 : slot + 1;
      if (!mine) {
        if (strange) clear();
        continue;
      }

      float s[kM][kN][4];
      unsigned q = my_q;
      asm volatile("" : "+r"(q));  // or else its 8 addresses are kept in registers that are not there
      Tile::scores(q, at, s);
      float row_scale[kM][2];
#pragma unroll
      for (int i = 0; i < kM; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) row_scale[i][h] = C::kRange ? scale * factors[first_row + 16 * i + 8 * h + lane / 4] : scale;
      }
      if (C::kEach || masked) {
#pragma unroll
        for (int i = 0; i < kM; ++i) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            RowContext c;
            if constexpr (C::kContexts) c = contexts[first_row + 16 * i + 8 * h + lane / 4];
            float f = row_scale[i][h];
            if constexpr (V::kHasQuery) f *= c.template query_scale<V>(p.variant);
            // A mask that reads memory is text of its own for every score: 4 copies of it, and not 64, for the compiler.
            unsigned seen_by_row = 0;
            if constexpr (V::kMaskReads) {
              if (masked) {
#pragma unroll 1
                for (int e = 2 * kN - 1; e >= 0; --e) {
                  const int kv = pos + 8 * (e >> 1) + 2 * (lane & 3) + (e & 1);
                  seen_by_row = seen_by_row << 1 | unsigned(kv < w.kv_end && c.template mask<V>(p.variant, w.kv_base + kv));
                }
              }
            }
#pragma unroll
            for (int t = 0; t < kN; ++t) {
#pragma unroll
              for (int j = 0; j < 2; ++j) {
                const int kv = pos + 8 * t + 2 * (lane & 3) + j, kv_pos = w.kv_base + kv;
                float& x = s[i][t][2 * h + j];
                if constexpr (C::kEach) {
                  x *= f;
                  if constexpr (V::kHasKey) x *= V::key_scale(p.variant, w.request, w.kv_len, kv_pos, head);
                  if constexpr (V::kHasLogits) x = c.template logits<V>(p.variant, x, kv_pos) * (V::kSoftmax ? kLog2e : 1.0f);
                }
                bool seen = kv < w.kv_end;
                if constexpr (V::kMaskReads) seen = seen_by_row >> (2 * t + j) & 1;
                else if constexpr (V::kHasMask) seen = seen && c.template mask<V>(p.variant, kv_pos);
                if (masked && !seen) x = V::kSoftmax ? neg_inf() : 0.0f;
              }
            }
          }
        }
      }
      if constexpr (C::kEach) {
#pragma unroll
        for (int i = 0; i < kM; ++i) row_scale[i][0] = row_scale[i][1] = 1.0f;
      }
      if constexpr (V::kSoftmax) state.rise(s, row_scale);
      auto value_scale = [&](int j) { return V::value_scale(p.variant, w.request, w.kv_len, w.kv_base + pos + j, head); };
      if constexpr (V::kHasMask) {
        if (strange) {
          values.template add<kM, C::kDimVo / 8>(&state.o[0][0][0], &s[0][0][0], [&](float x, int i, int h, int j) {
            if constexpr (V::kSoftmax) x = state.weight(x, row_scale, i, h);
            if constexpr (V::kHasValue) x = x == 0.0f ? 0.0f : x * value_scale(j);
            return x;
          });
          clear();
        }
      }
      state.accumulate(s, row_scale, at + C::kKBytes, [&](int n, int j) { return value_scale(8 * n + 2 * (lane & 3) + j); });
    }
    cp_async_wait<0>();  // of an item without KV: q

    const WorkItem e = p.items[item];
    const float v_scale = p.kv.v_scale;
    if (mine) state.finish(p, e, head, first_row, v_scale);
    if (e.partial >= 0) {
      const int at = e.merge + head - e.head_start;
      const MergeItem merge = p.out.merges[at];
      if (last_part(p.out, at, merge.parts, flag)) {
        merge_parts<V, typename C::Out, 4, 4>(p.out, p.variant, e, head, p.group, merge, p.kv.dim_vo, v_scale);
      }
    }
    __syncthreads();  // shared memory is free for the next unit
    unit = flag[1];
  }
  if (threadIdx.x == 0) {
    // Whoever is last has everyone's tickets behind it.
    if (atomicAdd(&all.queue->done, 1u) == gridDim.x - 1) all.queue->taken = 0, all.queue->done = 0;
  }
}

}  // namespace fir
