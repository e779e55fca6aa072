// bracket.cuh: a threshold of a row, and a draw above it, from one read of the row.
//
//   1. every block of the cluster takes the same sample of the row, 1 element in 32, counts it in 1,024 bins, and reads off the bins
//      a bracket [lo, hi) of keys that should hold the threshold: three standard deviations to each side
//   2. each block reads its share of the row once. Of each unit (rows.cuh) the first block, the leader, gets: the sum, the largest,
//      sum and number of those from `hi` on, and a list of those in the bracket
//   3. one barrier; the leader finds the threshold in the lists, adds up what passes in each unit, and reads the one unit again
//      that the draw falls into
//
// Where the threshold is not in the bracket, or a unit has more in it than its list holds, select.cuh's search is made instead: no result
// depends on the guess but in rounding. Lists are per unit and in the row's order, so what is found depends on the row alone, not on
// the cluster.
//
// smem   dynamic   4.2 KB, and for each unit of the row 16 bytes and a list of 36 to 196 floats; in every block, the leader's is used
// needs  sm_80; clusters from sm_90
#pragma once
#include <fir/select.cuh>

namespace fir {

constexpr u32 kSampled = 32, kSampleBins = 2 * kThreads;
constexpr u32 kMostListed = 196; // of a unit; 4 of 32 banks apart
constexpr i32 kMostKey = 0x7f800001; // behind infinity

// Bins of a sample, in the order of keys: which one `x` is in, none if negative; and the least key of one.
template <bool kSigned>
struct SampleBins;

// Weights: 4 bins to an octave from 2^-126 up, 16 from 2^-40 up, as the mass of a row lies there; the last has all from 2^2 up.
template <>
struct SampleBins<false> {
  static constexpr i32 kLow = 4, kSplit = (87 << 2) - kLow, kHigh = (87 << 4) - kSplit;
  __device__ __forceinline__ static i32 of(float x) {
    const i32 key = __float_as_int(x);
    return min(max((key >> 21) - kLow, (key >> 19) - kHigh), i32(kSampleBins) - 1);
  }
  __device__ __forceinline__ static i32 edge(i32 bin) { return bin < kSplit ? (bin + kLow) << 21 : (bin + kHigh) << 19; }
  __device__ __forceinline__ static i32 key(float x) { return __float_as_int(x); }
};

// Numbers of both signs: 16 bins to an octave from 2^-16 to 2^16 for each; what is less or more is in the bins at the ends.
template <>
struct SampleBins<true> {
  static constexpr i32 kHalf = i32(kSampleBins) / 2, kFirst = (127 - 16) << 4;
  __device__ __forceinline__ static i32 of(float x) {
    const i32 q = min(max(((__float_as_int(x) & 0x7fffffff) >> 19) - kFirst, 0), kHalf - 1);
    return x != x ? -1 : __float_as_int(x) < 0 ? kHalf - 1 - q : kHalf + q;
  }
  __device__ __forceinline__ static i32 edge(i32 bin) {
    if (bin >= kHalf) return bin == kHalf ? 0 : (bin - kHalf + kFirst) << 19;
    return bin == 0 ? kLeastKey : -((kHalf - bin + kFirst) << 19);
  }
  __device__ __forceinline__ static i32 key(float x) { return order(x); }
};

struct alignas(16) UnitSum {
  float mass, above;
  i32 max;                    // key
  u32 listed : 16, over : 16; // how many in the bracket; from `hi` on
};

struct alignas(16) BracketSmem {
  u32 bins[kSampleBins];
  double totals[kWarps];
  i32 edges[2];
  u32 found[2];
  u32 answer; // 1: the lists told
  float cutoff;
  double mass; // of what passes
};

// Behind them are the units' sums, and then their lists.
__device__ __forceinline__ UnitSum* unit_sums(u8* smem) { return reinterpret_cast<UnitSum*>(smem + sizeof(BracketSmem)); }

// The elements of the lists, by all threads of a block.
struct List {
  static constexpr bool kResident = true;
  const UnitSum* sums;
  const float* lists;
  u32 units, room;
  float none;

  __device__ __forceinline__ void localize() {
    sums = known_shared(sums);
    lists = known_shared(lists);
  }

  template <class F>
  __device__ __forceinline__ double fold(F f) const {
    float s = 0.f;
    for (u32 u = threadIdx.x / 4; u < units; u += kThreads / 4) {
      const u32 listed = sums[u].listed;
      for (u32 i = threadIdx.x % 4; i < listed; i += 4 * 4) {
        float x[4];
#pragma unroll
        for (u32 e = 0; e < 4; ++e) x[e] = i + e * 4 < listed ? lists[u * room + i + e * 4] : none;
        s += f(0, x);
      }
    }
#pragma unroll
    for (u32 d = 16; d > 0; d /= 2) s += __shfl_xor_sync(kAll, s, d);
    return s;
  }
};

// kSigned: of numbers of both signs; else of weights, of which those above 0 count.
template <bool kSigned>
struct Bracket {
  using Bins = SampleBins<kSigned>;
  static constexpr i32 kLeast = kSigned ? kLeastKey : 1; // the least key that counts

  BracketSmem* s;
  UnitSum* sums;
  float* lists;
  u32 units, room; // of each list
  i32 lo, hi;

  // Whether there is room for the lists. A barrier of the block comes before the sample.
  __device__ __forceinline__ bool open(u8* smem, u32 n) {
    units = (n + (kUnit - 1)) / kUnit;
    u32 bytes;
    asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(bytes));
    bytes -= min(bytes, u32(sizeof(BracketSmem)));
    const u32 words = bytes / units / 4;
    room = min((words - min(words, 8u)) / 32 * 32 + 4, kMostListed); // 16 bytes are for the sum
    if (units > kThreads || words < 40) return false;
    s = reinterpret_cast<BracketSmem*>(smem);
    sums = unit_sums(smem);
    lists = reinterpret_cast<float*>(sums + units);
    lo = hi = kMostKey;
    for (u32 i = 0; i < 2; ++i) s->bins[i * kThreads + threadIdx.x] = 0;
    if (threadIdx.x < 2) s->edges[threadIdx.x] = threadIdx.x == 0 ? -1 : i32(kSampleBins);
    if (threadIdx.x == 2) s->answer = s->found[0] = s->found[1] = 0;
    return true;
  }

  // Counts the sample: 16 elements of every 512, as memory is fetched by 64 bytes. Thread 0 calls `meanwhile` while it waits.
  template <class T, class F>
  __device__ __forceinline__ void sample(const T* p, u32 n, F meanwhile) {
    const bool aligned = (reinterpret_cast<u64>(p) & (4 * sizeof(T) - 1)) == 0;
    for (u32 c = threadIdx.x; c < units * (kUnit / 4 / kSampled); c += 2 * kThreads) {
      float x[2][4];
#pragma unroll
      for (u32 j = 0; j < 2; ++j) {
        const u32 i = c + j * kThreads, at = i / 4 * (16 * kSampled) + i % 4 * 4;
        if (sizeof(T) == 4 && aligned && at + 4 <= n) {
          const Chunk v = load(p + at);
#pragma unroll
          for (u32 e = 0; e < 4; ++e) x[j][e] = float_of(v.word[e]);
        } else {
#pragma unroll
          for (u32 e = 0; e < 4; ++e) x[j][e] = at + e < n ? to_float(p[at + e]) : kSigned ? not_a_number() : 0.f;
        }
      }
      if (c == 0) meanwhile();
#pragma unroll
      for (u32 j = 0; j < 2; ++j)
#pragma unroll
        for (u32 e = 0; e < 4; ++e) {
          const i32 bin = Bins::of(x[j][e]);
          if (bin >= 0) atomicAdd(&s->bins[bin], 1u);
        }
    }
    __syncthreads();
  }

  // Where elements are below that have the mass `goal`. From below, as a sample misses what is large and rare.
  __device__ __forceinline__ void guess_mass(float goal) {
    const u32 t = threadIdx.x;
    float middle[2], mass[2];
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
      middle[i] = __int_as_float((Bins::edge(2 * t + i) + Bins::edge(2 * t + i + 1)) / 2);
      mass[i] = float(s->bins[2 * t + i]) * middle[i] * kSampled;
    }
    double begin, end;
    Search::prefix(s->totals, double(mass[0]) + double(mass[1]), begin, end);
    const float below[2] = {float(begin) + mass[0], float(end)};
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
      const float spread = 3.f * sqrtf(float(kSampled - 1) * middle[i] * (below[i] + float(kSampled) * middle[i]));
      if (below[i] + spread <= goal) atomicMax(&s->edges[0], i32(2 * t + i));
      if (below[i] - spread >= goal) atomicMin(&s->edges[1], i32(2 * t + i));
    }
    __syncthreads();
    const i32 first = s->edges[0], last = s->edges[1];
    lo = first >= 0 ? Bins::edge(first + 1) : 0x00800000; // the least normal number
    hi = last < i32(kSampleBins) - 1 ? max(Bins::edge(last + 1), lo + 1) : kMostKey;
  }

  // From where on there are `k` elements.
  __device__ __forceinline__ void guess_count(u32 k) {
    const u32 t = threadIdx.x, bin = kSampleBins - 1 - 2 * t; // from above
    const float wanted = float(k) / kSampled;
    double begin, end;
    const u32 first = s->bins[bin];
    Search::prefix(s->totals, double(first + s->bins[bin - 1]), begin, end);
    const float upto[2] = {float(begin) + float(first), float(end)};
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
      const float spread = 3.f * sqrtf(upto[i]);
      if (upto[i] - spread >= wanted) atomicMax(&s->edges[0], i32(bin - i));
      if (upto[i] + spread + 9.f <= wanted) atomicMin(&s->edges[1], i32(bin - i));
    }
    __syncthreads();
    const i32 low = s->edges[0], high = s->edges[1];
    lo = low >= 0 ? Bins::edge(low) : kLeast;
    hi = high < i32(kSampleBins) ? max(Bins::edge(high), lo + 1) : kMostKey;
  }

  // Where `share` of the largest element is: not below that share of the sample's largest. All from there on, if the lists should
  // hold them; else up to the share of what the row's largest should not exceed. False if that is too much, too.
  __device__ __forceinline__ bool guess_share(float share) {
    const u32 t = threadIdx.x, most = units * room / kSampled * 3 / 4;
    const u32 count[2] = {s->bins[2 * t], s->bins[2 * t + 1]};
    if (count[0] + count[1] != 0) atomicMax(&s->edges[0], i32(2 * t + (count[1] != 0)));
    __syncthreads();
    const i32 top = max(s->edges[0], 0);
    lo = max(__float_as_int(__int_as_float(Bins::edge(top)) * share * 0.999f), kLeast);
    auto add = [&](u32& sum, i32 first, i32 last) { // the counts of these bins
      u32 mine = 0;
#pragma unroll
      for (u32 i = 0; i < 2; ++i) mine += i32(2 * t + i) >= first && i32(2 * t + i) <= last ? count[i] : 0;
      if (mine != 0) atomicAdd(&sum, mine);
    };
    const i32 first = Bins::of(__int_as_float(lo));
    add(s->found[0], first, kSampleBins);
    add(s->found[1], top - 15, top); // an octave
    __syncthreads();
    hi = kMostKey;
    if (s->found[0] < most) return true;
    hi = __float_as_int(__int_as_float(Bins::edge(top + 1)) * share * (s->found[1] < 64 ? 4.f : 1.25f));
    add(s->answer, first, Bins::of(__int_as_float(hi)));
    __syncthreads();
    return s->answer < most;
  }

  // max(x, 0), and NaN of NaN
  __device__ __forceinline__ static float no_less(float x) {
    float y;
    asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(y) : "f"(x));
    return y;
  }

  // Reads this block's part of the row; all blocks have begun. A barrier of the cluster comes before the leader's part. kList: there may
  // be something in the bracket.
  template <bool kCount, bool kList, class R>
  __device__ __forceinline__ void read(const R& row) {
    const u32 to_sums = peer_address(sums, 0), to_lists = peer_address(lists, 0);
    const u32 before = (1u << lane_id()) - 1, range = u32(hi) - u32(lo);
    for (u32 u = row.unit; u < row.unit_end; ++u) {
      float x[2][4][4];
#pragma unroll
      for (u32 half = 0; half < 2; ++half) row.fetch(u, half, x[half]);
      float mass = 0.f, above = 0.f;
      i32 most = kLeastKey;
      u32 listed = 0, over = 0;
      const u32 list = to_lists + u * (4 * room);
#pragma unroll
      for (u32 g = 0; g < kGroups; ++g) {
        const float(&y)[4] = x[g / 4][g % 4];
        mass += (no_less(y[0]) + no_less(y[1])) + (no_less(y[2]) + no_less(y[3])); // as Row::kept
#pragma unroll
        for (u32 e = 0; e < 4; ++e) {
          // The bits of a positive number are in its order, those of a negative one are less. A row of weights with a NaN is
          // none anyway, and one of numbers is told by its mass.
          const i32 key = Bins::key(y[e]);
          most = max(most, key);
          if (kList && key >= hi) {
            above += y[e];
            if (kCount) ++over;
          }
          if (!kList) continue;
          const bool in = u32(key) - u32(lo) < range;
          const u32 who = __ballot_sync(kAll, in);
          if (who != 0) {
            const u32 at = listed + __popc(who & before);
            if (in && at < room) peer_store(list + 4 * at, bits_of(y[e]));
            listed += __popc(who);
          }
        }
      }
      mass = R::warp_total(mass);
      above = R::warp_total(above);
      most = __reduce_max_sync(kAll, most);
      if (kCount) over = __reduce_add_sync(kAll, over);
      if (lane_id() == 0) {
        peer_store(to_sums + u * u32(sizeof(UnitSum)), bits_of(mass), bits_of(above), u32(most), listed | over << 16);
        sums[u].max = most; // for this block's own second pass
      }
    }
  }

  // The leader's part.

  struct Totals {
    double mass, above;
    i32 max; // key
    u32 over;
    bool complete; // the lists
  };
  __device__ __forceinline__ Totals totals(Exchange& ex) const {
    UnitSum mine{0.f, 0.f, kLeastKey, 0, 0};
    if (threadIdx.x < units) mine = sums[threadIdx.x];
    double mass = mine.mass, above = mine.above;
#pragma unroll
    for (u32 d = 16; d > 0; d /= 2) {
      mass += __shfl_xor_sync(kAll, mass, d);
      above += __shfl_xor_sync(kAll, above, d);
    }
    const Record a = ex.block_all(mass, __reduce_max_sync(kAll, mine.max), __reduce_add_sync(kAll, u32(mine.over)));
    const bool complete = !__syncthreads_or(mine.listed > room);
    const double b = ex.block_all(above);
    __syncthreads();
    return Totals{a.sum, b, a.key, a.count, complete};
  }

  __device__ __forceinline__ List list(float none) const { return List{sums, lists, units, room, none}; }

  // The key from which on there are `k` elements, the least one if there are fewer; false if the lists do not tell.
  __device__ __forceinline__ bool kth(Exchange& ex, Search& search, const Totals& all, u32 k, i32& from) {
    const i32 end = min(hi, all.max + 1);
    bool beyond = true;
    from = lo;
    if (all.complete && all.over < k && lo < end)
      from = search.run_apart<false, true>(list(not_a_number()), ex, lo, end, double(k), double(all.over), beyond);
    return !beyond || (all.complete && lo == kLeast && all.over < k);
  }

  // What passes of each unit, in place of `above`; returns the sum of all, and of the units before this thread's.
  __device__ __forceinline__ double keep(float cutoff, double& begin, double& end, float& mine) {
    if (cutoff > kPositive) {
      for (u32 first = 0; first < units; first += kThreads / 4) { // four threads a unit
        const u32 u = first + threadIdx.x / 4, listed = u < units ? sums[u].listed : 0;
        float sum = 0.f;
        for (u32 i = threadIdx.x % 4; i < listed; i += 4) {
          const float x = lists[u * room + i];
          sum += x < cutoff ? 0.f : x;
        }
        sum += __shfl_xor_sync(kAll, sum, 1);
        sum += __shfl_xor_sync(kAll, sum, 2);
        if (u < units && threadIdx.x % 4 == 0) sums[u].mass = sum + sums[u].above;
      }
      __syncthreads();
    }
    mine = threadIdx.x < units ? sums[threadIdx.x].mass : 0.f;
    Search::prefix(s->totals, mine, begin, end);
    double all = 0.0;
    for (u32 w = 0; w < kWarps; ++w) all += s->totals[w];
    return all;
  }

  __device__ __forceinline__ double keep(float cutoff) {
    double begin, end;
    float mine;
    return keep(cutoff, begin, end, mine);
  }

  // Draws: the thread that finds the element calls `found(place)`. False if nothing passes.
  template <class R, class F>
  __device__ __forceinline__ bool draw(const R& row, float cutoff, float u, F found) {
    double begin, end;
    float mine;
    const double all = keep(cutoff, begin, end, mine), goal = double(u) * all;
    if (!(all > 0.0 && all < double(infinity()))) return false;
    if (threadIdx.x == 0) s->edges[0] = kThreads, s->edges[1] = 0;
    __syncthreads();
    if (mine > 0.f) {
      if (end > goal) atomicMin(&s->edges[0], i32(threadIdx.x));
      atomicMax(&s->edges[1], i32(threadIdx.x));
    }
    __syncthreads();
    const u32 unit = s->edges[0] < i32(kThreads) ? s->edges[0] : s->edges[1];
    if (unit / 32 == warp_id()) {
      const u32 place = pick_in_unit(row, unit, __shfl_sync(kAll, begin, unit % 32), goal, cutoff);
      if (place != ~0u) found(place);
    }
    return true;
  }

  // Tells all blocks what the leader found.
  __device__ __forceinline__ void tell(const Exchange& ex, u32 answer, float cutoff, double mass) {
    if (threadIdx.x < ex.size) {
      peer_store(peer_address(&s->answer, threadIdx.x), answer);
      peer_store(peer_address(&s->cutoff, threadIdx.x), bits_of(cutoff));
      peer_store(peer_address(&s->mass, threadIdx.x), u64(__double_as_longlong(mass)));
    }
  }
};

}  // namespace fir
