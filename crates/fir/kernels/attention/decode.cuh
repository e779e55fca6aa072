// decode.cuh: up to 16 query rows per KV head against a long KV cache; bound by how fast KV can be read.
//
//   o[r]   = sum_j softmax_j(logits(scale q[r] . k[j])) v[j]
//   lse[r] = log2 sum_j 2^(logits_j log2 e)                          (base 2; softmax.cuh)
//
// grid   (workers)      persistent; worker b does its heads of items[b / team] and of what follows it by `next` (state.cuh).
//        Neighbours should do the heads of the same positions: 128 requests of 1 to 8192 took 498 us so on an H200 and 538 head after head
//        (HND: 499 and 524, so more than NHD's one piece of memory for all heads of a token is behind it)
// block  32 kWarps      warp w does tiles w, w + kWarps, ... of kTile positions, with a softmax of its own
// smem   kWarps rings of kStages x (kTile keys + kTile values), each read by its warp alone: no block barrier while KV
//        streams. The ring runs on into the next units, so that ends and starts of units leave no gap in the reads.
// needs  sm_80 (cp.async, mma.sync); head dims multiples of 16 (of 32 for 8 bit, of 64 for fp4), rows 16-byte aligned
//
// The rows of all query heads of a KV head (and of several query tokens) are the 16 rows of one mma tile. 8 KB of KV
// cost a warp some 450 issue slots of the 1600 that pass while H200's memory delivers them, so the tile's empty rows
// are free. KV of 8 and 4 bits becomes f16 in registers, after ldmatrix, which moves pairs of bytes: the order of k in
// q . k and of the output's columns is permuted to fit (`Fragment`), and costs nothing.
//
// It may run beside the kernel before it, of the same call and with scratch of its own: it waits for that one's end, not
// for its results.
//
// reads  q; pages of the items' requests, never a row at or past kv_end
// writes out, lse of whole units and of merged ones; partial_o, partial_md of parts; counters end as they began
// twins  src/cpu/attention/, src/reference/attention.rs, src/plan/schedule.rs
#pragma once
#include <fir/attention/finite.cuh>
#include <fir/attention/params.cuh>

namespace fir {

/// How a lane's numbers lie in the mma operands, by the bits of a KV element. A lane holds `kPerLane` neighbours
/// (4 bytes' worth) of each `4 kPerLane` elements: elements kPerLane q + i.
template <int kKvBits>
struct Fragment {
  static constexpr int kPerLane = 32 / kKvBits;   // 2, 4, 8
  static constexpr int kGroup = 4 * kPerLane;   // elements per 16-byte chunk

  /// Where element i of group g goes in the A operand: k step, and pair of registers; i and its partner are one word.
  template <class T, int kSteps>
  __device__ __forceinline__ static void put(unsigned (&a)[kSteps][4], int g, int half, const float (&x)[kPerLane]) {
    if constexpr (kKvBits == 16) {
      a[g / 2][(g & 1) * 2 + half] = pack2<T>(x[0], x[1]);
    } else if constexpr (kKvBits == 8) {
      a[g][half] = pack2<T>(x[0], x[1]);
      a[g][2 + half] = pack2<T>(x[2], x[3]);
    } else {
      a[2 * g][half] = pack2<T>(x[0], x[4]);
      a[2 * g][2 + half] = pack2<T>(x[1], x[5]);
      a[2 * g + 1][half] = pack2<T>(x[2], x[6]);
      a[2 * g + 1][2 + half] = pack2<T>(x[3], x[7]);
    }
  }

  /// Element i of the lane's share of group g in the accumulators of the second product.
  template <int kTiles>
  __device__ __forceinline__ static float get(const float (&o)[kTiles][4], int g, int half, int i) {
    constexpr int kEach = kPerLane / 2;
    return o[g * kEach + i % kEach][half * 2 + i / kEach];
  }

  /// Where 4 columns from 4 u on of row r were put by `share` (in float4).
  __device__ __forceinline__ static int shared_unit(int u, int r) {
    const int half = r >> 3, lane = (r & 7) * 4;
    if constexpr (kPerLane == 2) return ((u / 2 * 2 + half) * 32 + lane) / 2 + (u & 1);
    else if constexpr (kPerLane == 4) return (u / 4 * 2 + half) * 32 + lane + u % 4;
    else return ((u / 8 * 2 + (u & 1)) * 2 + half) * 32 + lane + u % 8 / 2;
  }

  /// Puts a warp's accumulators to shared memory, conflict-free.
  template <int kTiles>
  __device__ __forceinline__ static void share(const float (&o)[kTiles][4], unsigned char* to, bool both) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int g = 0; g < kTiles * 2 / kPerLane; ++g) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (half == 1 && !both) continue;
        if constexpr (kPerLane == 2) {
          reinterpret_cast<float2*>(to)[(g * 2 + half) * 32 + lane] = make_float2(get(o, g, half, 0), get(o, g, half, 1));
        } else {
#pragma unroll
          for (int s = 0; s < kPerLane / 4; ++s) {
            reinterpret_cast<float4*>(to)[((g * (kPerLane / 4) + s) * 2 + half) * 32 + lane] =
                make_float4(get(o, g, half, 4 * s), get(o, g, half, 4 * s + 1), get(o, g, half, 4 * s + 2), get(o, g, half, 4 * s + 3));
          }
        }
      }
    }
  }
};

/// `kWarps`, `kStages`, `kTile`: 4, 3 and 16 (fp8 32, fp4 64) are 96 KB at head dim 128, two blocks per SM, which together
/// ask for more than the 41 KB per SM that keep an H200's memory busy.
/// `kRun`: aligned runs of so many positions lie in one page (page sizes that are multiples of it, ragged KV; items start
/// at multiples of it): 1, 8 or 16; 1 for fp4. 16 takes 450 instructions per 8 KB where 1 takes 690 (256 x 512: 156 us
/// against 169).
template <class TQ, class TKv, class TO, int kDimQk_, int kDimVo_, class Variant_, int kWarps_, int kStages_, int kTile_, int kRun_ = 1>
struct DecodeConfig {
  using Q = TQ;
  using Kv = TKv;
  using Out = TO;
  using Mma = typename TKv::Mma;
  using Variant = Variant_;
  static constexpr int kDimQk = kDimQk_, kDimVo = kDimVo_, kWarps = kWarps_, kStages = kStages_, kTile = kTile_, kRun = kRun_;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kKChunks = kDimQk * TKv::kBits / 128, kVChunks = kDimVo * TKv::kBits / 128;
  static constexpr bool kScaled = TKv::kBits == 4;
  static constexpr int kKScale = kScaled ? kDimQk / 16 : 0, kVScale = kScaled ? kDimVo / 16 : 0;  // bytes per row
  static constexpr int kKBytes = kTile * kKChunks * 16, kVBytes = kTile * kVChunks * 16;
  static constexpr int kStageBytes = (kKBytes + kVBytes + kTile * (kKScale + kVScale) + 127) / 128 * 128;
  static constexpr int kSteps = kDimQk / 16;
  /// Fragments of q stay in registers while they fit beside the accumulators, 64 of each 255.
  static constexpr bool kQShared = kDimQk > 128;
  static constexpr bool kQRope = RopeOf<Variant_, false>::kOn, kKRope = RopeOf<Variant_, true>::kOn;

  // Shared memory, in bytes from the start.
  static constexpr int kRing = 0;
  static constexpr int kDesc = kRing + kWarps * kStages * kStageBytes;                // int2 per stage: unit, position
  static constexpr int kMd = kDesc + kWarps * kStages * 8;                            // float2 [kWarps][16]
  static constexpr int kSlot = kMd + kWarps * 16 * 8;                                 // int per warp, and a flag
  static constexpr int kQ = (kSlot + (kWarps + 1) * 4 + 15) / 16 * 16;                // uint4 [kSteps][32]
  static constexpr int kTurns = kQ + (kQShared ? kSteps * 512 : 0);                   // u64 [2][kDimQk / 2]
  static constexpr int kShared = kTurns + (kQRope || kKRope ? kDimQk * 8 : 0);

  static_assert(TKv::kBits != 16 || (kDimQk % 16 == 0 && kDimVo % 16 == 0));
  static_assert(TKv::kBits != 8 || (kDimQk % 32 == 0 && kDimVo % 32 == 0 && kTile % 16 == 0));
  static_assert(TKv::kBits != 4 || (kDimQk % 64 == 0 && kDimVo % 64 == 0 && kTile % 32 == 0));
  static_assert(kTile % 16 == 0 && kStages >= 2);
  static_assert(kRun == 1 || (!kScaled && (kRun == 8 || kRun == 16) && kRun * kKChunks % 32 == 0 && kRun * kVChunks % 32 == 0));
  static_assert(16 * kDimVo * 4 <= kStageBytes, "a stage is lent to the exchange of accumulators between warps");
  static_assert(!kKRope || TKv::kBits == 16, "keys are rotated in place");
};

/// Brings a warp's tiles into its ring, in the order in which the warp computes them, units ahead.
template <class C>
struct DecodeLoader {
  /// Page ids per lane: of rows 32 i + lane, or of runs, the same in all lanes.
  static constexpr int kEntries = C::kRun > 1 ? C::kTile / C::kRun : (C::kTile + 31) / 32;
  using Variant = typename C::Variant;
  const AttentionParams<Variant>& p;
  unsigned ring;
  int2* desc;
  /// Lane i < 16 holds word i of the item, and of the one after it.
  int words, next_words;
  int unit, head, head_end, pos, kv_start, kv_end, pages;
  int entries[kEntries];
  bool more;

  __device__ __forceinline__ DecodeLoader(const AttentionParams<Variant>& p, unsigned ring, int2* desc) : p(p), ring(ring), desc(desc) {}

  __device__ __forceinline__ static int lane() { return threadIdx.x & 31; }
  __device__ __forceinline__ static int warp() { return __shfl_sync(~0u, threadIdx.x >> 5, 0); }
  __device__ __forceinline__ int load_words(int item) const {
    return lane() < 16 ? __ldg(reinterpret_cast<const int*>(p.items + item) + lane()) : 0;
  }
  __device__ __forceinline__ int word(int i) const { return __shfl_sync(~0u, words, i); }

  __device__ __forceinline__ void open() {
    head = word(6) + blockIdx.x % p.team, head_end = word(7), kv_start = word(8), kv_end = word(9), pages = p.kv.start(word(10));
    const int next = word(13);
    next_words = next >= 0 ? load_words(next) : 0;
    more = word(2) > 0;
    pos = kv_start + warp() * C::kTile;
  }

  __device__ __forceinline__ void start(int item) {
    unit = 0;
    words = load_words(item);
    open();
    settle();
  }

  /// Moves on to the next tile that has something to read, and asks for its page ids.
  __device__ __forceinline__ void settle() {
    while (more) {
      if (pos < kv_end) {
        if (!Variant::kHasMask || visible()) break;
        pos += C::kWarps * C::kTile;
        continue;
      }
      ++unit;
      if ((head += p.team) < head_end) {
        pos = kv_start + warp() * C::kTile;
      } else if (word(13) >= 0) {
        words = next_words;
        open();
      } else {
        more = false;
      }
    }
    if (more) {
#pragma unroll
      for (int i = 0; i < kEntries; ++i) entries[i] = p.kv.entry(pages, row_of_entry(i));
    }
  }

  __device__ __forceinline__ int row_of_entry(int i) const {
    if constexpr (C::kRun > 1) return min(pos + i * C::kRun, kv_end - 1);
    else return min(pos + i * 32 + (C::kTile < 32 ? lane() % C::kTile : lane()), kv_end - 1);
  }

  /// Whether any row of the unit sees any position of the tile: tiles that none sees are not read.
  __device__ __forceinline__ bool visible() const {
    if (pos + C::kTile <= word(15)) return true;
    WorkItem w;
    w.request = word(0), w.q_start = word(1), w.tokens = word(2), w.q_idx = word(3), w.q_len = word(4), w.kv_len = word(5);
    const int base = word(14), rows = w.tokens * p.group;
    bool any = false;
    for (int i = lane(); i < rows * C::kTile; i += 32) {
      const int kv = pos + i % C::kTile;
      if (kv < kv_end && !any) {
        any = row_context(w, p.out.tokens, head, p.group, i / C::kTile).template mask<Variant>(p.variant, base + kv);
      }
    }
    return __any_sync(~0u, any);
  }

  __device__ __forceinline__ void copy(unsigned to, const KvTensor& k, const KvTensor& v, int head, const unsigned (&page)[kEntries],
                                       const long long (&row)[kEntries], int valid) const {
    const int k_bytes = p.kv.dim_qk * C::Kv::kBits / 8, v_bytes = p.kv.dim_vo * C::Kv::kBits / 8;
    if constexpr (C::kRun > 1) {
      const bool whole = valid >= C::kTile && k_bytes == C::kKChunks * 16 && v_bytes == C::kVChunks * 16;
      auto runs = [&](auto all) {
#pragma unroll
        for (int i = 0; i < kEntries; ++i) {
          constexpr bool kWhole = decltype(all)::value;
          const int first = i * C::kRun, left = valid - first;
          copy_run<C::kRun, C::kKChunks, kWhole>(to, first, k.data + head * k.head + row_offset(k, page[i], row[i]), k.row, left, k_bytes);
          copy_run<C::kRun, C::kVChunks, kWhole>(to + C::kKBytes, first, v.data + head * v.head + row_offset(v, page[i], row[i]), v.row, left, v_bytes);
        }
      };
      if (whole) runs(Same<int, int>{});
      else runs(Same<int, char>{});
    } else {
      long long at[kEntries];
#pragma unroll
      for (int i = 0; i < kEntries; ++i) at[i] = row_offset(k, page[i], row[i]);
      copy_rows<C::kTile, C::kKChunks>(to, k.data + head * k.head, at, valid, k_bytes);
#pragma unroll
      for (int i = 0; i < kEntries; ++i) at[i] = row_offset(v, page[i], row[i]);
      copy_rows<C::kTile, C::kVChunks>(to + C::kKBytes, v.data + head * v.head, at, valid, v_bytes);
    }
    if constexpr (C::kScaled) {
      const unsigned scales = to + C::kKBytes + C::kVBytes;
      const KvTensor &ks = p.kv.k_scales, &vs = p.kv.v_scales;
      long long at[kEntries];
#pragma unroll
      for (int i = 0; i < kEntries; ++i) at[i] = row_offset(ks, page[i], row[i]);
      copy_words<C::kTile, C::kKScale / 4>(scales, ks.data + head * ks.head, at, valid, p.kv.dim_qk / 16);
#pragma unroll
      for (int i = 0; i < kEntries; ++i) at[i] = row_offset(vs, page[i], row[i]);
      copy_words<C::kTile, C::kVScale / 4>(scales + C::kTile * C::kKScale, vs.data + head * vs.head, at, valid, p.kv.dim_vo / 16);
    }
  }

  /// Issues the copies of the next tile into stage `slot`, as one group; an empty group at the end.
  __device__ __forceinline__ void issue(int slot) {
    if (more) {
      const unsigned to = ring + slot * C::kStageBytes;
      const int valid = kv_end - pos, at = head;
      unsigned page[kEntries];
      long long row[kEntries];
#pragma unroll
      for (int i = 0; i < kEntries; ++i) p.kv.place(entries[i], row_of_entry(i), page[i], row[i]);
      if (lane() == 0) desc[slot] = make_int2(unit, pos);
      pos += C::kWarps * C::kTile;
      settle();  // the page ids of the next tile are on their way while this one is asked for
      copy(to, p.kv.k, p.kv.v, at, page, row, valid);
    } else if (lane() == 0) {
      desc[slot] = make_int2(0x7fffffff, 0);
    }
    cp_async_commit();
    __syncwarp();  // shows the descriptor
  }
};

/// What a lane holds of q's rows of a unit, as it lies in memory. It is asked for before keys and values, as what is asked for behind
/// them also comes behind them: so it took 3 of the 13 us of 1 x 2048 on an H200, and word after word 5 of 15.
template <class C>
struct QueryWords {
  using F = Fragment<C::Kv::kBits>;
  /// Where registers are left for it.
  static constexpr bool kOn = !C::kQRope && C::Q::kBits == 16 && C::Kv::kBits >= 8 && C::kDimQk <= 128;
  static constexpr int kGroups = kOn ? C::kDimQk / F::kGroup : 1, kPer = F::kPerLane;
  unsigned words[2][kGroups][kPer / 2];

  /// Rows that are not there are read somewhere else, or not; rows that are shorter than the tile's are left to `load_short`.
  __device__ __forceinline__ void load(const AttentionParams<typename C::Variant>& p, int q_start, int tokens, int head) {
    if constexpr (kOn) {
      if (p.kv.dim_qk != C::kDimQk) return;
      const int lane = threadIdx.x & 31, rows = tokens * p.group;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (half == 1 && rows <= 8) continue;
        const unsigned char* from = query_row(p, q_start, head, min(lane / 4 + 8 * half, rows - 1)) + lane % 4 * kPer * 2;
#pragma unroll
        for (int g = 0; g < kGroups; ++g) load_words(from + g * F::kGroup * 2, words[half][g]);
      }
    }
  }

  __device__ __forceinline__ void load_short(const AttentionParams<typename C::Variant>& p, int q_start, int rows, int head) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int i = 0; i < 2 * kGroups; ++i) {
      const int column = i % kGroups * F::kGroup + lane % 4 * kPer, row = min(lane / 4 + 8 * (i / kGroups), rows - 1);
      const bool there = column < p.kv.dim_qk;
      load_words(query_row(p, q_start, head, row) + (there ? column * 2 : 0), words[i / kGroups][i % kGroups]);
#pragma unroll
      for (int j = 0; j < kPer / 2; ++j) words[i / kGroups][i % kGroups][j] = there ? words[i / kGroups][i % kGroups][j] : 0u;
    }
  }

  __device__ __forceinline__ static const unsigned char* query_row(const AttentionParams<typename C::Variant>& p, int q_start, int head, int row) {
    return p.q + static_cast<long long>(q_start + row / p.group) * p.q_token + (static_cast<long long>(head) * p.group + row % p.group) * p.q_head;
  }
};

/// q's rows as the A operand; rows that are not there are zero. For f16 products of other types each row is scaled
/// by a power of two to below 2, so that nothing overflows; `factor` undoes it.
template <class C>
__device__ __forceinline__ void load_queries(const AttentionParams<typename C::Variant>& p, const WorkItem& w, int head, const unsigned long long* turns,
                                             QueryWords<C>& q, unsigned (&a)[C::kSteps][4], float (&factor)[2]) {
  using F = Fragment<C::Kv::kBits>;
  constexpr int kGroups = C::kDimQk / F::kGroup, kPer = F::kPerLane;
  constexpr bool kRange = Same<typename C::Mma, F16>::value && !Same<typename C::Q, F16>::value;
  const int lane = threadIdx.x & 31, rows = w.tokens * p.group;
  if constexpr (QueryWords<C>::kOn) {
    if (p.kv.dim_qk != C::kDimQk) q.load_short(p, w.q_start, rows, head);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = lane / 4 + 8 * half;
    factor[half] = 1.0f;
    float x[kGroups][kPer];
    const bool there = row < rows;
    const unsigned char* from = QueryWords<C>::query_row(p, w.q_start, head, row);
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const int column = g * F::kGroup + lane % 4 * kPer;
#pragma unroll
      for (int i = 0; i < kPer; ++i) x[g][i] = 0.0f;
      if constexpr (QueryWords<C>::kOn) {
#pragma unroll
        for (int i = 0; i < kPer / 2; ++i) unpack2<typename C::Q>(there ? q.words[half][g][i] : 0u, x[g][2 * i], x[g][2 * i + 1]);
      } else if (there && column < p.kv.dim_qk) {
        if constexpr (!C::kQRope) {
          load_some<typename C::Q>(from + column * (C::Q::kBits / 8), x[g]);
        } else {
          using R = RopeOf<typename C::Variant, false>;
          const int dim = R::dim(p.kv.dim_qk), position = row_context(w, p.out.tokens, head, p.group, row).q_pos();
#pragma unroll
          for (int i = 0; i < kPer; ++i) {
            const int e = column + i;
            x[g][i] = load_one<typename C::Q>(from, e);
            if (e < dim) {
              const bool first = R::kInterleave ? e % 2 == 0 : e < dim / 2;
              const int pair = R::kInterleave ? e / 2 : (first ? e : e - dim / 2);
              const int other = R::kInterleave ? e ^ 1 : (first ? e + dim / 2 : e - dim / 2);
              float y = load_one<typename C::Q>(from, other), u = first ? x[g][i] : y, v = first ? y : x[g][i];
              rope::rotate(u, v, position, turns[pair]);
              x[g][i] = first ? u : v;
            }
          }
        }
      }
    }
    if constexpr (kRange) {
      float top = 0.0f;
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
#pragma unroll
        for (int i = 0; i < kPer; ++i) top = fmaxf(top, fabsf(x[g][i]));
      }
      top = quad_max(top);
      // 2^floor(log2 top) and its inverse, by the exponent's bits; clamped so that both are normal.
      const int e = min(max(int(__float_as_uint(top) >> 23) - 127, -120), 120);
      const float inverse = __uint_as_float(unsigned(127 - e) << 23);
      factor[half] = __uint_as_float(unsigned(127 + e) << 23);
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
#pragma unroll
        for (int i = 0; i < kPer; ++i) x[g][i] *= inverse;
      }
    }
#pragma unroll
    for (int g = 0; g < kGroups; ++g) F::template put<typename C::Mma>(a, g, half, x[g]);
  }
}

/// Rotates a tile of keys where it lies.
template <class C>
__device__ __forceinline__ void rotate_keys(unsigned char* tile, const unsigned long long* turns, int dim_qk, int first_position) {
  using R = RopeOf<typename C::Variant, true>;
  const int dim = R::dim(dim_qk), pairs = dim / 2;
  auto at = [&](int row, int e) {
    return reinterpret_cast<unsigned short*>(tile + SwizzledRows<C::kKChunks>::offset(row, e >> 3) + (e & 7) * 2);
  };
  for (int i = threadIdx.x & 31; i < C::kTile * pairs; i += 32) {
    const int row = i / pairs, pair = i % pairs;
    unsigned short* a = at(row, R::kInterleave ? 2 * pair : pair);
    unsigned short* b = at(row, R::kInterleave ? 2 * pair + 1 : pair + pairs);
    float x, y, none;
    unpack2<typename C::Kv>(*a, x, none), unpack2<typename C::Kv>(*b, y, none);
    rope::rotate(x, y, first_position + row, turns[pair]);
    const unsigned w = pack2<typename C::Kv>(x, y);
    *a = static_cast<unsigned short>(w), *b = static_cast<unsigned short>(w >> 16);
  }
  __syncwarp();
}

/// s[t] = q . k for 8 positions of the tile each.
template <class C>
__device__ __forceinline__ void scores(unsigned tile, unsigned scales, const unsigned (&a)[C::kSteps][4], const unsigned char* q_shared,
                                       float (&s)[C::kTile / 8][4]) {
  using T = typename C::Mma;
  using Rows = SwizzledRows<C::kKChunks>;
  const int lane = threadIdx.x & 31;
  auto step = [&](int k, unsigned (&out)[4]) {
    if constexpr (C::kQShared) {
      const uint4 v = reinterpret_cast<const uint4*>(q_shared)[k * 32 + lane];
      out[0] = v.x, out[1] = v.y, out[2] = v.z, out[3] = v.w;
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) out[i] = a[k][i];
    }
  };
#pragma unroll
  for (int t = 0; t < C::kTile / 8; ++t) s[t][0] = s[t][1] = s[t][2] = s[t][3] = 0.0f;
  if constexpr (C::Kv::kBits >= 8) {
    const int row = (lane & 7) + ((lane >> 4) << 3), chunk = (lane >> 3) & 1;
#pragma unroll
    for (int c = 0; c < C::kKChunks / 2; ++c) {
      unsigned a0[4], a1[4];
      if constexpr (C::Kv::kBits == 16) step(c, a0);
      else step(2 * c, a0), step(2 * c + 1, a1);
#pragma unroll
      for (int n = 0; n < C::kTile / 16; ++n) {
        unsigned r[4];
        ldmatrix_x4(r, tile + Rows::offset(16 * n + row, 2 * c + chunk));
        if constexpr (C::Kv::kBits == 16) {
          mma<T>(s[2 * n], a0, r[0], r[1]);
          mma<T>(s[2 * n + 1], a0, r[2], r[3]);
        } else {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            unsigned b0, b1;
            fp8x4_to_f16x4<typename C::Kv>(r[i], b0, b1);
            if (i % 2 == 0) mma<T>(s[2 * n + i / 2], a0, b0, b1);
            else mma<T>(s[2 * n + i / 2], a1, b0, b1);
          }
        }
      }
    }
  } else {
#pragma unroll
    for (int c = 0; c < C::kKChunks; ++c) {
      unsigned a0[4], a1[4];
      step(2 * c, a0), step(2 * c + 1, a1);
#pragma unroll
      for (int n = 0; n < C::kTile / 32; ++n) {
        unsigned r[4];
        ldmatrix_x4(r, tile + Rows::offset(32 * n + lane, c));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          unsigned scale;
          // The lane's 8 elements lie in one block of 16.
          asm volatile("ld.shared.u8 %0, [%1];" : "=r"(scale) : "r"(scales + (32 * n + 8 * i + lane / 4) * C::kKScale + 2 * c + (lane & 3) / 2));
          scale = e2m1_scale(scale, scale);
          mma<T>(s[4 * n + i], a0, mul_f16x2(e2m1_to_f16x2<0>(r[i]), scale), mul_f16x2(e2m1_to_f16x2<1>(r[i]), scale));
          mma<T>(s[4 * n + i], a1, mul_f16x2(e2m1_to_f16x2<2>(r[i]), scale), mul_f16x2(e2m1_to_f16x2<3>(r[i]), scale));
        }
      }
    }
  }
}

/// o += weights . v
template <class C>
__device__ __forceinline__ void accumulate(unsigned tile, unsigned scales, const float (&s)[C::kTile / 8][4], float (&o)[C::kDimVo / 8][4]) {
  using T = typename C::Mma;
  using Rows = SwizzledRows<C::kVChunks>;
  const int lane = threadIdx.x & 31;
  auto weights = [&](int t, unsigned (&a)[4]) {
    a[0] = pack2<T>(s[2 * t][0], s[2 * t][1]), a[1] = pack2<T>(s[2 * t][2], s[2 * t][3]);
    a[2] = pack2<T>(s[2 * t + 1][0], s[2 * t + 1][1]), a[3] = pack2<T>(s[2 * t + 1][2], s[2 * t + 1][3]);
  };
  if constexpr (C::Kv::kBits >= 8) {
#pragma unroll
    for (int t = 0; t < C::kTile / 16; ++t) {
      unsigned a[4];
      weights(t, a);
#pragma unroll
      for (int c = 0; c < C::kVChunks / 2; ++c) {
        unsigned r[4];
        ldmatrix_x4_trans(r, tile + Rows::offset(16 * t + (lane & 15), 2 * c + (lane >> 4)));
        if constexpr (C::Kv::kBits == 16) {
          mma<T>(o[2 * c], a, r[0], r[1]);
          mma<T>(o[2 * c + 1], a, r[2], r[3]);
        } else {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            // Bytes: two columns of one position, the same of the next; wanted: two positions of one column.
            unsigned even0, odd0, even1, odd1;
            fp8x4_to_f16x4<typename C::Kv>(__byte_perm(r[2 * i], 0, 0x3120), even0, odd0);
            fp8x4_to_f16x4<typename C::Kv>(__byte_perm(r[2 * i + 1], 0, 0x3120), even1, odd1);
            mma<T>(o[4 * c + 2 * i], a, even0, even1);
            mma<T>(o[4 * c + 2 * i + 1], a, odd0, odd1);
          }
        }
      }
    }
  } else {
#pragma unroll
    for (int t = 0; t < C::kTile / 32; ++t) {
      unsigned a0[4], a1[4];
      weights(2 * t, a0), weights(2 * t + 1, a1);
#pragma unroll
      for (int c = 0; c < C::kVChunks; ++c) {
        unsigned r[4], f[4];
        ldmatrix_x4_trans(r, tile + Rows::offset(32 * t + lane, c));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          // Positions 8 i + 2q and the next; columns 32 c + 4 (lane / 4) + 0..3.
          const unsigned at = scales + (32 * t + 8 * i + (lane & 3) * 2) * C::kVScale + 2 * c + lane / 16;
          unsigned lo, hi;
          asm volatile("ld.shared.u8 %0, [%1];" : "=r"(lo) : "r"(at));
          asm volatile("ld.shared.u8 %0, [%1];" : "=r"(hi) : "r"(at + C::kVScale));
          f[i] = e2m1_scale(lo, hi);
        }
        auto columns = [&](int j, unsigned b0, unsigned b1, unsigned b2, unsigned b3) {
          mma<T>(o[4 * c + j], a0, mul_f16x2(b0, f[0]), mul_f16x2(b1, f[1]));
          mma<T>(o[4 * c + j], a1, mul_f16x2(b2, f[2]), mul_f16x2(b3, f[3]));
        };
        columns(0, e2m1_to_f16x2<0>(r[0]), e2m1_to_f16x2<0>(r[1]), e2m1_to_f16x2<0>(r[2]), e2m1_to_f16x2<0>(r[3]));
        columns(1, e2m1_to_f16x2<1>(r[0]), e2m1_to_f16x2<1>(r[1]), e2m1_to_f16x2<1>(r[2]), e2m1_to_f16x2<1>(r[3]));
        columns(2, e2m1_to_f16x2<2>(r[0]), e2m1_to_f16x2<2>(r[1]), e2m1_to_f16x2<2>(r[2]), e2m1_to_f16x2<2>(r[3]));
        columns(3, e2m1_to_f16x2<3>(r[0]), e2m1_to_f16x2<3>(r[1]), e2m1_to_f16x2<3>(r[2]), e2m1_to_f16x2<3>(r[3]));
      }
    }
  }
}

/// The item whose words the lanes of a warp hold.
__device__ __forceinline__ WorkItem item_of(int words) {
  WorkItem w;
  auto at = [&](int i) { return __shfl_sync(~0u, words, i); };
  w.request = at(0), w.q_start = at(1), w.tokens = at(2), w.q_idx = at(3), w.q_len = at(4), w.kv_len = at(5);
  w.head_start = at(6), w.head_end = at(7), w.kv_start = at(8), w.kv_end = at(9), w.pages = at(10), w.partial = at(11);
  w.merge = at(12), w.next = at(13), w.kv_base = at(14), w.full_end = at(15);
  return w;
}

template <class C, int kMinBlocks>
__global__ void __launch_bounds__(C::kThreads, kMinBlocks) decode(const __grid_constant__ AttentionParams<typename C::Variant> p) {
  using V = typename C::Variant;
  using F = Fragment<C::Kv::kBits>;
  extern __shared__ __align__(128) unsigned char shared[];
  const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
  unsigned char* ring = shared + C::kRing + warp * C::kStages * C::kStageBytes;
  const unsigned ring_address = shared_address(ring);
  int2* desc = reinterpret_cast<int2*>(shared + C::kDesc) + warp * C::kStages;
  float2* md = reinterpret_cast<float2*>(shared + C::kMd);
  int* slots = reinterpret_cast<int*>(shared + C::kSlot);
  unsigned char* q_shared = shared + C::kQ;
  unsigned long long* turns = reinterpret_cast<unsigned long long*>(shared + C::kTurns);

  DecodeLoader<C> loader(p, ring_address, desc);
  // Of the item, as the loader has them; then of the next one. The host wrote them before any kernel that may still run.
  int words = loader.load_words(blockIdx.x / p.team);
  // In this order: what runs beside this does not wait for the one before.
  if (!p.beside) wait_for_previous();
  start_next();
  loader.start(blockIdx.x / p.team);
  WorkItem w = item_of(words);
  int head = w.head_start + blockIdx.x % p.team;
  QueryWords<C> q;
  if (w.tokens > 0) q.load(p, w.q_start, w.tokens, head);
#pragma unroll 1
  for (int s = 0; s < C::kStages - 1; ++s) loader.issue(s);  // a second text of it, cold, takes longer than it saves

  if constexpr (C::kQRope || C::kKRope) {
    for (int i = threadIdx.x; i < C::kDimQk / 2; i += C::kThreads) {
      if constexpr (C::kQRope) turns[i] = RopeOf<V, false>::turn(i, RopeOf<V, false>::dim(p.kv.dim_qk));
      if constexpr (C::kKRope) turns[C::kDimQk / 2 + i] = RopeOf<V, true>::turn(i, RopeOf<V, true>::dim(p.kv.dim_qk));
    }
    __syncthreads();
  }
  // 2^7 undoes what the f16 form of e2m1 is short of.
  const float rest = C::kScaled ? kE2m1Rest : 1.0f;
  const float k_scale = p.sm_scale * p.kv.k_scale * rest * (V::kHasLogits || !V::kSoftmax ? 1.0f : kLog2e), v_scale = p.kv.v_scale * rest;

  int slot = 0, item = w.next;  // the next one
  if (w.tokens > 0) {
    if (QueryWords<C>::kOn && item >= 0) words = loader.load_words(item);
    for (int unit = 0;; ++unit) {
      const int rows = w.tokens * p.group;
      unsigned a[C::kSteps][4];
      float factor[2];
      load_queries<C>(p, w, head, turns, q, a, factor);
      if constexpr (C::kQShared) {
#pragma unroll
        for (int k = 0; k < C::kSteps; ++k) {
          if (k % C::kWarps == warp) reinterpret_cast<uint4*>(q_shared)[k * 32 + lane] = make_uint4(a[k][0], a[k][1], a[k][2], a[k][3]);
        }
        __syncthreads();
      }
      RowContext context[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        factor[h] *= k_scale;
        if constexpr (V::kHasQuery || V::kHasLogits || V::kHasMask) {
          context[h] = row_context(w, p.out.tokens, head, p.group, min(lane / 4 + 8 * h, rows - 1));
          if constexpr (V::kHasQuery) factor[h] *= context[h].template query_scale<V>(p.variant);
        }
      }

      // Asked for now, as it comes from device memory and the merge is the launch's last act.
      const int merge_at = w.merge + head - w.head_start;
      MergeItem merge{0, 0, 0, 0};
      if (w.partial >= 0) merge = p.out.merges[merge_at];

      float o[C::kDimVo / 8][4];
#pragma unroll
      for (int t = 0; t < C::kDimVo / 8; ++t) o[t][0] = o[t][1] = o[t][2] = o[t][3] = 0.0f;
      RunningSoftmax softmax;
      softmax.reset();
      int last = -1;
      for (;;) {
        const int2 tile = desc[slot];
        if (tile.x != unit) break;
        cp_async_wait<C::kStages - 2>();
        __syncwarp();
        loader.issue(slot == 0 ? C::kStages - 1 : slot - 1);
        const unsigned at = ring_address + slot * C::kStageBytes;
        if constexpr (C::kKRope) rotate_keys<C>(ring + slot * C::kStageBytes, turns + C::kDimQk / 2, p.kv.dim_qk, w.kv_base + tile.y);

        float s[C::kTile / 8][4];
        scores<C>(at, at + C::kKBytes + C::kVBytes, a, q_shared, s);
        const bool tail = tile.y + C::kTile > w.kv_end;
#pragma unroll
        for (int t = 0; t < C::kTile / 8; ++t) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int kv = tile.y + 8 * t + 2 * (lane & 3) + (i & 1), kv_pos = w.kv_base + kv;
            float x = s[t][i] * factor[i >> 1];
            if constexpr (V::kHasKey) x *= V::key_scale(p.variant, w.request, w.kv_len, kv_pos, head);
            if constexpr (V::kHasLogits) x = context[i >> 1].template logits<V>(p.variant, x, kv_pos) * (V::kSoftmax ? kLog2e : 1.0f);
            s[t][i] = !tail || kv < w.kv_end ? x : (V::kSoftmax ? neg_inf() : 0.0f);
          }
        }
        bool mixed = false;
        if constexpr (V::kHasMask) {
          if (tile.y + C::kTile > w.full_end) {
#pragma unroll
            for (int t = 0; t < C::kTile / 8; ++t) {
#pragma unroll
              for (int i = 0; i < 4; ++i) {
                const int kv_pos = w.kv_base + tile.y + 8 * t + 2 * (lane & 3) + (i & 1);
                if (!context[i >> 1].template mask<V>(p.variant, kv_pos)) s[t][i] = V::kSoftmax ? neg_inf() : 0.0f, mixed = true;
              }
            }
            mixed = __any_sync(~0u, mixed);
          }
        }
        if constexpr (V::kSoftmax) softmax.step(s, o);
        if constexpr (V::kHasValue) {
#pragma unroll
          for (int t = 0; t < C::kTile / 8; ++t) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              const float x = V::value_scale(p.variant, w.request, w.kv_len, w.kv_base + tile.y + 8 * t + 2 * (lane & 3) + i, head);
              // A weight of 0 stays 0, whatever the scale of a position that nobody sees.
              s[t][i] = s[t][i] == 0.0f ? 0.0f : s[t][i] * x, s[t][i + 2] = s[t][i + 2] == 0.0f ? 0.0f : s[t][i + 2] * x;
            }
          }
        }
        if constexpr (V::kHasMask) {
          if (mixed) {
            unsigned char* values = ring + slot * C::kStageBytes + C::kKBytes;
            const ValueTile<typename C::Kv, C::kTile, C::kVChunks> v{values, values + C::kVBytes + C::kTile * C::kKScale};
            if (__any_sync(~0u, v.template strange<32>(lane))) {
              v.template add<1, C::kDimVo / 8>(&o[0][0], &s[0][0], [](float x, int, int, int) { return x; });
              __syncwarp();
              v.template clear<32>(lane);
              __syncwarp();
            }
          }
        }
        accumulate<C>(at + C::kKBytes, at + C::kKBytes + C::kVBytes + C::kTile * C::kKScale, s, o);
        last = slot;
        slot = slot + 1 == C::kStages ? 0 : slot + 1;
      }

      // The warps' states meet in shared memory: each lends the stage it read last, which nothing is copied to before
      // its next turn.
      const float d0 = softmax.row_sum(0), d1 = softmax.row_sum(1);
      __syncwarp();
      if (lane == 0) slots[warp] = last;
      if (lane % 4 == 0) {
        md[warp * 16 + lane / 4] = make_float2(softmax.m[0], d0);
        md[warp * 16 + lane / 4 + 8] = make_float2(softmax.m[1], d1);
      }
      if (last >= 0) F::share(o, ring + last * C::kStageBytes, rows > 8);
      // The next unit: another head of the item, or the next item. Its queries come while this unit ends.
      const bool same = head + p.team < w.head_end;
      int next_tokens = 0, next_head = 0;
      if constexpr (QueryWords<C>::kOn) {
        next_tokens = same ? w.tokens : item >= 0 ? __shfl_sync(~0u, words, 2) : 0;
        next_head = same ? head + p.team : __shfl_sync(~0u, words, 6) + blockIdx.x % p.team;
        if (next_tokens > 0) q.load(p, same ? w.q_start : __shfl_sync(~0u, words, 1), next_tokens, next_head);
      }
      __syncthreads();
      const int per_row = p.kv.dim_vo / 4;
      for (int i = threadIdx.x; i < rows * per_row; i += C::kThreads) {
        const int row = i / per_row, u = i % per_row;
        float m = neg_inf(), d = 0.0f, x[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int j = 0; j < C::kWarps; ++j) m = fmaxf(m, md[j * 16 + row].x);
#pragma unroll
        for (int j = 0; j < C::kWarps; ++j) {
          const int lent = slots[j];
          if (lent < 0) continue;
          const float2 state = md[j * 16 + row];
          const float f = V::kSoftmax ? exp2_diff(state.x, m) : 1.0f;
          const float4 v = reinterpret_cast<const float4*>(shared + C::kRing + (j * C::kStages + lent) * C::kStageBytes)[F::shared_unit(u, row)];
          d += state.y * f;
          x[0] += v.x * f, x[1] += v.y * f, x[2] += v.z * f, x[3] += v.w * f;
        }
        if (w.partial < 0) {
          finish_row<V, typename C::Out>(p.out, p.variant, w, head, p.group, row, 4 * u, v_scale, x, m, d);
        } else {
          const long long to = w.partial + static_cast<long long>(head - w.head_start) * rows + row;
          const float f = part_scale<typename C::Out>(v_scale);
          __stcg(reinterpret_cast<float4*>(p.out.partial_o + to * p.kv.dim_vo) + u, make_float4(x[0] * f, x[1] * f, x[2] * f, x[3] * f));
          if (u == 0) __stcg(p.out.partial_md + to, make_float2(m, d));
        }
      }
      if (w.partial >= 0) {
        if (last_part(p.out, merge_at, merge.parts, slots + C::kWarps)) {
          merge_parts<V, typename C::Out, 4, 16>(p.out, p.variant, w, head, p.group, merge, p.kv.dim_vo, v_scale);
        }
      }
      if constexpr (QueryWords<C>::kOn) {
        if (next_tokens == 0) break;
        head = next_head;
        if (!same) {
          w = item_of(words);
          item = w.next;
          if (item >= 0) words = loader.load_words(item);
        }
      } else if (same) {
        head += p.team;
      } else {
        if (w.next < 0) break;
        w = p.items[w.next];
        if (w.tokens == 0) break;
        head = w.head_start + blockIdx.x % p.team;
      }
      __syncthreads();
    }
  }
  // Launched beside longer tiles of the same call, it ends after them.
  if (blockIdx.x == 0) wait_for_previous();
}

}  // namespace fir
