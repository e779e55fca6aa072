// rows.cuh: a row of floats in the shared memory of a cluster, and sums and maxima over it.
//
// A row is cut into units of 1,024 elements, a unit into 8 groups of 128: lane l of a warp has elements 4 l to 4 l + 4 of each. Blocks,
// and warps within them, own consecutive units, and a thread touches no element but its own, so passes need no barrier.
//
//   sum of a unit   f32: a lane's chunks in order, then lanes by halves
//   sum of a row    f64 over units
//
// so sums depend on the row alone: not on its alignment, its type, or the cluster.
//
// kResident: the row is read once, into shared memory as f32: 4,096 bytes for each of ceil(units / C) units of a block (128,256 elements
// in a cluster of 8: 64 KB, three blocks to an SM). Otherwise every pass reads the row anew: longer rows, and below sm_90.
#pragma once
#include <fir/base/cluster.cuh>
#include <fir/base/math.cuh>
#include <fir/base/vec.cuh>

namespace fir {

constexpr u32 kAll = 0xffffffffu;
constexpr u32 kMaxCluster = 8;
constexpr u32 kThreads = 512, kWarps = kThreads / 32, kBlocks = 3; // of every kernel over rows; blocks on an SM
constexpr u32 kUnit = 1024, kGroups = 8;
constexpr float kPositive = 1.401298464324817e-45f; // as a cutoff it lets every positive element pass

__device__ __forceinline__ float infinity() { return float_of(0x7f800000u); }
__device__ __forceinline__ float not_a_number() { return float_of(0x7fc00000u); }
__device__ __forceinline__ u32 lane_id() { return threadIdx.x % 32; }
__device__ __forceinline__ u32 warp_id() { return threadIdx.x / 32; }

// A value for every row, or one for all.
template <class T>
struct PerRow {
  const T* each;
  T one;
  u32 unused;
  __device__ __forceinline__ T get(i64 row) const { return each ? each[row] : one; }
};

// What becomes of the numbers of a row on their way to weights.
struct Stage {
  enum Kind : u32 { kRaw, kScaled, kWeights };
  Kind kind;
  float cut;        // kWeights: what is less becomes 0
  float max, scale; // kWeights: 2^((x - max) * scale); with max = inf, 1 for the infinite
  template <bool kWeighted = true>
  __device__ __forceinline__ float of(float x) const {
    if (kind == kRaw) return x;
    if (!kWeighted || kind == kScaled) return x * scale;
    float w = exp2_fast((x - max) * scale);
    if (max == infinity()) w = x == max ? 1.f : x < max ? 0.f : x;
    return x < cut ? 0.f : w;
  }
  __device__ __forceinline__ float operator()(float x) const { return of(x); }
};

// What is done to elements when they are read: nothing.
struct AsRead {
  __device__ __forceinline__ void operator()(u32, u32, float (&)[4]) const {}
};

// kWeighted: elements may become kWeights.
template <class T, bool kResident_, class Fix = AsRead, bool kWeighted = true>
struct Row {
  static constexpr bool kResident = kResident_;

  const T* p;
  u32 n;
  u32 unit, unit_end; // this warp's
  float* data;        // kResident: this lane's first chunk of the first of them
  float pad;          // stands behind the row's end
  Stage stage;        // not kResident: done on reading
  Fix fix;

  // `smem`: 16-byte aligned.
  __device__ __forceinline__ void open(const T* row, u32 length, float padding, void* smem) {
    p = row;
    n = length;
    pad = padding;
    stage = Stage{Stage::kRaw, 0.f, 0.f, 0.f};
    const u32 units = (n + (kUnit - 1)) / kUnit, blocks = cluster_size(), rank = cluster_rank();
    const u32 per_block = (units + blocks - 1) / blocks, per_warp = (per_block + kWarps - 1) / kWarps;
    unit = rank * per_block + warp_id() * per_warp;
    unit_end = min(min(units, (rank + 1) * per_block), unit + per_warp);
    if constexpr (kResident) {
      data = static_cast<float*>(smem) + warp_id() * per_warp * kUnit + lane_id() * 4;
      load();
    }
  }

  // For functions that are not inlined.
  __device__ __forceinline__ void localize() {
    if constexpr (kResident) data = known_shared(data);
  }

  // Place in the row of the first of this lane's four elements of group `g`.
  __device__ __forceinline__ static u32 place(u32 u, u32 g) { return u * kUnit + g * 128 + lane_id() * 4; }

  __device__ __forceinline__ Chunk* chunk(u32 u, u32 g) const { return reinterpret_cast<Chunk*>(data + (u - unit) * kUnit + g * 128); }

  __device__ __forceinline__ void load() {
    if constexpr (sizeof(T) == 4) {
      // Copies that need no registers: all of a block's bytes are in flight at once.
      const bool aligned = (reinterpret_cast<u64>(p) & 15) == 0;
      for (u32 u = unit; u < unit_end; ++u) {
        for (u32 g = 0; g < kGroups; ++g) {
          const u32 i = place(u, g);
          float* const to = reinterpret_cast<float*>(chunk(u, g));
          if (aligned && i + 4 <= n) {
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(p + i) : "memory");
          } else {
#pragma unroll
            for (u32 e = 0; e < 4; ++e) {
              if (i + e < n) asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to + e)), "l"(p + i + e) : "memory");
              else to[e] = pad;
            }
          }
        }
      }
      asm volatile("cp.async.wait_all;" ::: "memory");
      if constexpr (!is_same<Fix, AsRead>::value) change([](float x) { return x; });
    } else {
      change([](float x) { return x; });
    }
  }

  // Half a unit from global memory.
  __device__ __forceinline__ void fetch(u32 u, u32 half, float (&x)[4][4]) const {
    if ((reinterpret_cast<u64>(p) & (4 * sizeof(T) - 1)) == 0 && (u + 1) * kUnit <= n) {
      u32 raw[4][sizeof(T)];
#pragma unroll
      for (u32 g = 0; g < 4; ++g) {
        const T* from = p + place(u, half * 4 + g);
        if constexpr (sizeof(T) == 4) {
          asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                       : "=r"(raw[g][0]), "=r"(raw[g][1]), "=r"(raw[g][2]), "=r"(raw[g][3]) : "l"(from));
        } else {
          asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(raw[g][0]), "=r"(raw[g][1]) : "l"(from));
        }
      }
#pragma unroll
      for (u32 g = 0; g < 4; ++g)
#pragma unroll
        for (u32 e = 0; e < 4; ++e) {
          if constexpr (sizeof(T) == 4) x[g][e] = float_of(raw[g][e]);
          else x[g][e] = to_float(T{u16(raw[g][e / 2] >> (e % 2 * 16))});
        }
    } else {
      float y[4][4]; // in memory, so that `x` is not
      fetch_apart(p + place(u, half * 4), n - min(n, place(u, half * 4)), pad, y);
#pragma unroll
      for (u32 g = 0; g < 4; ++g)
#pragma unroll
        for (u32 e = 0; e < 4; ++e) x[g][e] = y[g][e];
    }
  }
  // The same element by element, for the row's end and where it is not aligned: one text for all passes. `from` has `left` elements.
  __device__ __noinline__ static void fetch_apart(const T* from, u32 left, float pad, float (&x)[4][4]) {
#pragma unroll
    for (u32 g = 0; g < 4; ++g)
#pragma unroll
      for (u32 e = 0; e < 4; ++e) x[g][e] = g * 128 + e < left ? to_float(from[g * 128 + e]) : pad;
  }

  __device__ __forceinline__ static void unpack(const Chunk& c, float (&x)[4]) {
#pragma unroll
    for (u32 e = 0; e < 4; ++e) x[e] = float_of(c.word[e]);
  }
  __device__ __forceinline__ static Chunk pack(const float (&x)[4]) { return Chunk{{bits_of(x[0]), bits_of(x[1]), bits_of(x[2]), bits_of(x[3])}}; }

  // Half a unit as the passes see it.
  __device__ __forceinline__ void read(u32 u, u32 half, float (&x)[4][4]) const {
    if constexpr (kResident) {
#pragma unroll
      for (u32 g = 0; g < 4; ++g) unpack(*chunk(u, half * 4 + g), x[g]);
    } else {
      fetch(u, half, x);
#pragma unroll
      for (u32 g = 0; g < 4; ++g) {
        fix(place(u, half * 4 + g), n, x[g]);
#pragma unroll
        for (u32 e = 0; e < 4; ++e) x[g][e] = stage.template of<kWeighted>(x[g][e]);
      }
    }
  }

  // One chunk as the passes see it.
  __device__ __forceinline__ void read_one(u32 u, u32 g, float (&x)[4]) const {
    if constexpr (kResident) {
      unpack(*chunk(u, g), x);
    } else {
      const u32 at = place(u, g);
#pragma unroll
      for (u32 e = 0; e < 4; ++e) x[e] = at + e < n ? to_float(p[at + e]) : pad;
      fix(at, n, x);
#pragma unroll
      for (u32 e = 0; e < 4; ++e) x[e] = stage.template of<kWeighted>(x[e]);
    }
  }

  // Makes `f(x)` of the elements in shared memory, first time from what is read; returns their sum as `sum` would.
  template <class F>
  __device__ __forceinline__ double change(F f, bool first = true) {
    double all = 0.0;
    for (u32 u = unit; u < unit_end; ++u) {
      float s = 0.f;
#pragma unroll 1
      for (u32 half = 0; half < 2; ++half) {
        float x[4][4];
        if (sizeof(T) != 4 && first) fetch(u, half, x);
        else read(u, half, x);
#pragma unroll
        for (u32 g = 0; g < 4; ++g) {
          if (first) fix(place(u, half * 4 + g), n, x[g]);
#pragma unroll
          for (u32 e = 0; e < 4; ++e) x[g][e] = f(x[g][e]);
          *chunk(u, half * 4 + g) = pack(x[g]);
          s += kept(x[g], kPositive);
        }
      }
      all += warp_total(s);
    }
    return all;
  }

  // Changes what the later passes see; returns the sum of it.
  __device__ __forceinline__ double become(Stage s) {
    if constexpr (kResident) return change(s, false);
    stage = s;
    return sum(kPositive);
  }

  __device__ __forceinline__ static float warp_total(float s) {
#pragma unroll
    for (u32 d = 16; d > 0; d /= 2) s += __shfl_xor_sync(kAll, s, d);
    return s;
  }

  // Sum of those that are not below `cutoff`: NaN is not.
  __device__ __forceinline__ static float kept(const float (&x)[4], float cutoff) {
    float s[4];
#pragma unroll
    for (u32 e = 0; e < 4; ++e) s[e] = x[e] < cutoff ? 0.f : x[e];
    return (s[0] + s[1]) + (s[2] + s[3]);
  }

  // Sum over this warp's elements of what `f(place, x)` gives for four of them: the same in all lanes, which all call it.
  template <class F>
  __device__ __forceinline__ double fold(F f) const {
    double all = 0.0;
    for (u32 u = unit; u < unit_end; ++u) all += fold_unit(u, f);
    return all;
  }
  template <class F>
  __device__ __forceinline__ float fold_unit(u32 u, F f) const {
    float s = 0.f;
#pragma unroll 1
    for (u32 half = 0; half < 2; ++half) {
      float x[4][4];
      read(u, half, x);
#pragma unroll
      for (u32 g = 0; g < 4; ++g) s += f(place(u, half * 4 + g), x[g]);
    }
    return warp_total(s);
  }

  // Calls `f(place, x)` for every four elements, in all lanes.
  template <class F>
  __device__ __forceinline__ void each(F f) const {
    for (u32 u = unit; u < unit_end; ++u) {
#pragma unroll 1
      for (u32 half = 0; half < 2; ++half) {
        float x[4][4];
        read(u, half, x);
#pragma unroll
        for (u32 g = 0; g < 4; ++g) f(place(u, half * 4 + g), x[g]);
      }
    }
  }

  // Largest of this thread's elements, -inf if there is none; NaN is none.
  __device__ __forceinline__ float max() const {
    float m = -infinity();
    each([&](u32, const float (&x)[4]) {
#pragma unroll
      for (u32 e = 0; e < 4; ++e) m = fmaxf(m, x[e]);
    });
    return m;
  }

  // Sum of this warp's elements from `cutoff` (positive) up; NaN if there is one.
  __device__ __forceinline__ double sum(float cutoff) const {
    return fold([=](u32, const float (&x)[4]) { return kept(x, cutoff); });
  }

  // Sum of what `s` would make of them.
  __device__ __forceinline__ double sum_of(Stage s) const {
    return fold([=](u32, const float (&x)[4]) {
      const float y[4] = {s(x[0]), s(x[1]), s(x[2]), s(x[3])};
      return kept(y, kPositive);
    });
  }

  // Both at once.
  __device__ __forceinline__ double sum_and_max(float& m) const {
    m = -infinity();
    return fold([&](u32, const float (&x)[4]) {
#pragma unroll
      for (u32 e = 0; e < 4; ++e) m = fmaxf(m, x[e]);
      return kept(x, kPositive);
    });
  }
};

// Bytes of dynamic shared memory begin here.
__device__ __forceinline__ u8* dynamic_smem() {
  extern __shared__ __align__(16) u8 fir_smem[];
  return fir_smem;
}

// Floats as integers in the same order; an involution. NaN lies outside of [-inf, +inf].
__device__ __forceinline__ i32 order(float x) {
  const i32 b = __float_as_int(x);
  return b ^ ((b >> 31) & 0x7fffffff);
}
__device__ __forceinline__ float unorder(i32 k) { return __int_as_float(k ^ ((k >> 31) & 0x7fffffff)); }

constexpr i32 kLeastKey = i32(0x807fffffu); // order(-inf)

// What blocks tell each other, combined over a cluster.
struct Record {
  double sum;
  i32 key;   // largest
  u32 count; // summed
  i32 key2;  // largest
  i32 unused;
};

struct RecordSmem {
  Record warps[kWarps];
  Record slots[2][kMaxCluster];
};

// Reductions over the cluster, one barrier each. Two sets of slots in turn: a block that is ahead writes the other set,
// and cannot be two ahead.
struct Exchange {
  RecordSmem* s;
  u32 rank, size, phase;
  bool alone; // others may not have begun

  __device__ __forceinline__ void open(RecordSmem* smem) {
    s = smem;
    rank = cluster_rank();
    size = cluster_size();
    phase = 0;
    alone = true;
    cluster_arrive();
  }

  // All blocks have begun: before another's memory is written or read, and before any other barrier of the cluster.
  __device__ __forceinline__ void meet() {
    if (alone) cluster_wait();
    alone = false;
  }

  // Over all lanes of the cluster: the largest keys and the sum of the counts; of `sum`, which is the same in all
  // lanes of a warp already, the sum over warps.
  __device__ __forceinline__ Record all(double sum, i32 key, u32 count = 0, i32 key2 = 0) {
    return exchange<true>(Record{sum, __reduce_max_sync(kAll, key), __reduce_add_sync(kAll, count), __reduce_max_sync(kAll, key2), 0});
  }
  __device__ __forceinline__ Record all(double sum) { return exchange<false>(Record{sum, 0, 0, 0, 0}); }

  // The same over this block alone, of what is the same in all lanes of a warp. A barrier of the block lies between two calls.
  __device__ __forceinline__ Record block_all(double sum, i32 key, u32 count) {
    if (lane_id() == 0) s->warps[warp_id()] = Record{sum, key, count, 0, 0};
    __syncthreads();
    return combine<true, kWarps>(s->warps, kWarps);
  }
  __device__ __forceinline__ double block_all(double sum) {
    if (lane_id() == 0) s->warps[warp_id()].sum = sum;
    __syncthreads();
    return combine<false, kWarps>(s->warps, kWarps).sum;
  }

  template <bool kKeys>
  __device__ __forceinline__ Record exchange(const Record& mine) {
    const u32 lane = lane_id(), warp = warp_id();
    if (lane == 0) s->warps[warp] = mine;
    __syncthreads();
    phase ^= 1;
    meet();
    if (warp == 0) {
      const Record r = combine<kKeys, kWarps>(s->warps, kWarps);
      if (lane < size) {
        const u32 to = peer_address(&s->slots[phase][rank], lane);
        peer_store(to, u64(__double_as_longlong(r.sum)));
        if (kKeys) {
          peer_store(to + 8, u64(u32(r.key)) | u64(r.count) << 32);
          peer_store(to + 16, u32(r.key2));
        }
      }
    }
    cluster_sync();
    return combine<kKeys, kMaxCluster>(s->slots[phase], size);
  }

  // Of `n` records, `kMost` (a power of two) at most: every group of so many lanes does the same.
  template <bool kKeys, u32 kMost>
  __device__ __forceinline__ static Record combine(const Record* records, u32 n) {
    constexpr i32 kLeast = i32(0x80000000u);
    const u32 i = lane_id() % kMost;
    Record r{0.0, kLeast, 0, kLeast, 0};
    if (i < n) r = records[i];
    if (kKeys) {
      r.key = __reduce_max_sync(kAll, r.key);
      r.key2 = __reduce_max_sync(kAll, r.key2);
      r.count = __reduce_add_sync(kAll, i == lane_id() ? r.count : 0u);
    }
#pragma unroll
    for (u32 d = kMost / 2; d > 0; d /= 2) r.sum += __shfl_xor_sync(kAll, r.sum, d);
    return r;
  }

  // The last exchange's record of block `q`, of warp `w` of this block.
  __device__ __forceinline__ const Record& block(u32 q) const { return s->slots[phase][q]; }
  __device__ __forceinline__ const Record& warp(u32 w) const { return s->warps[w]; }
};

}  // namespace fir
