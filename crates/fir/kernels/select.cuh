// select.cuh: thresholds of a row without sorting it, and a draw from what passes them, by one cluster.
//
//   kth_cutoff   splits off the k largest numbers, and those that equal the least of them
//   mass_cutoff  splits off the fewest largest elements with a sum of at least `target`, and those that equal the least of them
//
// Both narrow a bracket [lo, hi) of keys (floats as integers in the same order) that holds the least element to keep, one
// pass and one cluster barrier at a time:
//
//   1. each block adds its elements of the bracket up in 512 bins (shared memory, integer atomics): 1 for counts, the first 16
//      bits of the mantissa for masses (a bin lies within an octave, so its mass is known to 2^-15; where that leaves open
//      which bin it is, the pass is made again with all bits); and sums those above, as floats
//   2. after the barrier every block adds the bins of all blocks up, bin t by thread t, and the prefix sum names the bin
//      that holds the key
//
// Bins of the first pass span 16 octaves, 32 to one; then 9 bits a pass, to a single key. A bin that is taken whole, or holds
// one element, ends the search before: two passes for most rows of 128K. A `k` up to the threads of a block starts from a
// lower bound that the threads' own maxima give, above which there are few elements. No result depends on the order of atomics: bins
// are integers, float sums have a fixed order. All blocks compute the same, bit for bit, so nothing is sent back.
//
// smem   SearchSmem, 8.3 KB
// twins  src/cpu/select.rs (whose sums are in another order: a cutoff at the edge of rounding may differ by one element)
#pragma once
#include <fir/rows.cuh>

namespace fir {

constexpr u32 kBins = kThreads;

// A list of the elements in a bracket: 64 of each warp's, 1 in 16 of a row of 128K in 8 blocks.
constexpr u32 kListed = 64;

struct alignas(16) SearchSmem {
  u32 bins[2][kBins];  // bins[0] also counts a sample, two bins to a word
  union {
    u32 rest[2][kBins];
    float list[kWarps][kListed];
  };
  double totals[kWarps];
  u32 found[2][2];
  i32 edges[2];
};

// A sample of the positive elements, 1 in 8, counted in bins of a 32th of an octave from 2^-31 up; larger ones in the last.
constexpr u32 kSampled = 8, kSampleBins = 2 * kBins;
constexpr i32 kSampleFirst = 96 << 5;

// Elements of the lists of a cluster, 16 of each thread.
struct List {
  static constexpr bool kResident = true;
  float x[4][4];

  __device__ __forceinline__ void load(const SearchSmem* s, u32 blocks, float none) {
    static_assert(kWarps * kListed * kMaxCluster == 16 * kThreads);
    constexpr u32 kEach = kThreads / kMaxCluster; // threads of a block's list
    const u32 q = threadIdx.x / kEach;
#pragma unroll
    for (u32 g = 0; g < 4; ++g) {
      u32 raw[4];
      if (q < blocks) peer_load(peer_address(&s->list[0][(g * kEach + threadIdx.x % kEach) * 4], q), raw);
#pragma unroll
      for (u32 e = 0; e < 4; ++e) x[g][e] = q < blocks ? float_of(raw[e]) : none;
    }
  }
  template <class F>
  __device__ __forceinline__ double fold(F f) const {
    float s = 0.f;
#pragma unroll
    for (u32 g = 0; g < 4; ++g) s += f(0, x[g]);
#pragma unroll
    for (u32 d = 16; d > 0; d /= 2) s += __shfl_xor_sync(kAll, s, d);
    return s;
  }
};

// The bracket of a search, and one pass after the other. Two sets of bins in turn: a set is cleared after a barrier that
// follows the others' reading.
struct Search {
  SearchSmem* s;
  u32 phase;

  // Before a barrier of the block.
  __device__ __forceinline__ void open(SearchSmem* smem) {
    s = smem;
    phase = 0;
    for (u32 i = 0; i < 2; ++i) s->bins[i][threadIdx.x] = s->rest[i][threadIdx.x] = 0;
    if (threadIdx.x < 4) s->found[threadIdx.x / 2][threadIdx.x % 2] = kBins;
    if (threadIdx.x < 2) s->edges[threadIdx.x] = threadIdx.x == 0 ? -1 : i32(kSampleBins) - 1;
  }

  // Counts an element of the sample.
  __device__ __forceinline__ void count(float x) {
    const i32 bin = min(__float_as_int(x) >> 18, kSampleFirst + i32(kSampleBins) - 1) - kSampleFirst;
    if (bin >= 0) atomicAdd(&s->bins[0][bin / 2], 1u << (bin % 2 * 16));
  }
  // For rows' `seen`.
  __device__ __forceinline__ void sample(u32 place, const float (&x)[4]) {
    if ((place & 128) == 0) count(x[0]);
  }

  // Where the sample, counted before the last exchange, expects the key below which elements have a sum of `discard`: a bracket
  // three standard deviations to each side. From below, as a sample misses what is large and rare.
  __device__ __forceinline__ void guess(const Exchange& ex, double discard, u32 n, i32& lo, i32& hi) {
    const u32 t = threadIdx.x;
    u32 both = 0; // at most 2^16 - 1 in a bin: n < 2^19
    for (u32 q = 0; q < ex.size; ++q) both += peer_load(peer_address(&s->bins[0][t], q));
    const float middle[2] = {__int_as_float(((kSampleFirst + i32(2 * t)) << 18) + (1 << 17)), __int_as_float(((kSampleFirst + i32(2 * t) + 1) << 18) + (1 << 17))};
    const float mass[2] = {float(both & 0xffff) * middle[0] * kSampled, float(both >> 16) * middle[1] * kSampled};
    double begin, end;
    prefix(double(mass[0]) + double(mass[1]), begin, end);
    const float goal = float(discard), unseen = float(n) * 4.656612873077393e-10f; // 2^-31
    const float below[2] = {float(begin) + mass[0], float(end)};
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
      const float spread = 3.f * sqrtf(float(kSampled - 1) * middle[i] * (below[i] + float(kSampled) * middle[i]));
      if (below[i] + unseen + spread <= goal) atomicMax(&s->edges[0], i32(2 * t + i));
      if (below[i] - spread >= goal) atomicMin(&s->edges[1], i32(2 * t + i));
    }
    __syncthreads();
    const i32 first = s->edges[0], last = s->edges[1];
    if (first >= 0) lo = max(lo, (kSampleFirst + first + 1) << 18);
    if (last < i32(kSampleBins) - 1) hi = min(hi, (kSampleFirst + last + 1) << 18);
    lo = min(lo, hi - 1);
  }

  // Lists the elements of [lo, hi); returns the sum of those above, and how many of this warp's were too many.
  template <bool kMass, class R>
  __device__ __forceinline__ double gather(const R& row, i32 lo, i32 hi, u32& missed) {
    float* const list = s->list[warp_id()];
    const u32 before = (1u << lane_id()) - 1, range = u32(hi) - u32(lo);
    const i32 top = hi - 1;
    for (u32 i = lane_id(); i < kListed; i += 32) list[i] = kMass ? 0.f : not_a_number();
    __syncwarp();
    u32 size = 0;
    const double over = row.fold([&](u32, const float (&x)[4]) {
      float above = 0.f;
#pragma unroll
      for (u32 e = 0; e < 4; ++e) {
        const i32 y = key<kMass>(x[e]);
        const bool in = u32(top) - u32(y) < range;
        const u32 who = __ballot_sync(kAll, in);
        if (who != 0) {
          const u32 at = size + __popc(who & before);
          if (in && at < kListed) list[at] = x[e];
          size += __popc(who);
        }
        if (y > top && y <= 0x7f800000) above += kMass ? x[e] : 1.f; // NaN is beyond infinity
      }
      return above;
    });
    missed = size - min(size, kListed);
    return over;
  }

  // As `run`, if [lo, hi) holds the key and few elements: then from a list of them.
  template <bool kMass, class R>
  __device__ __forceinline__ i32 find(const R& row, Exchange& ex, i32 lo, i32 hi, i32 least, i32 most, double target) {
    u32 missed;
    const double over = gather<kMass>(row, lo, hi, missed);
    const Record all = ex.all(over, 0, missed);
    if (all.count == 0 && all.sum < target) {
      List list;
      list.load(s, ex.size, kMass ? 0.f : not_a_number());
      s->bins[0][threadIdx.x] = s->bins[1][threadIdx.x] = 0; // no block reads the sample any more
      __syncthreads();
      bool beyond;
      const i32 key = run<kMass, true>(list, ex, lo, hi, target, all.sum, beyond);
      if (!beyond || lo == least) return key;
      hi = lo;
      lo = least;
    } else if (all.sum >= target && hi < most) {
      lo = hi;
      hi = most;
    } else {
      lo = least;
    }
    // It is elsewhere, or there were too many.
    cluster_sync(); // the others have read the lists
    open(s);
    __syncthreads();
    bool beyond;
    return run<kMass, false>(row, ex, lo, hi, target, 0.0, beyond);
  }

  // Positive normal floats are in the order of their bits, and nothing else is asked for when masses are.
  template <bool kMass>
  __device__ __forceinline__ static i32 key(float x) { return kMass ? __float_as_int(x) : order(x); }

  // The key from which on elements are kept, in [lo, hi); `target` is a mass or a number of elements. `kLocal`: this block alone has
  // all elements of the bracket, and those above it have the sum `base`. `beyond`: they do not reach the target.
  template <bool kMass, bool kLocal, class R>
  __device__ __noinline__ i32 run(const R& row, Exchange& ex, i32 lo, i32 hi, double target, double base, bool& beyond) {
    beyond = false;
    // Bits of the mantissa that a bin sums: 2^16 elements a block, or 2^20, fit 32 bits. The rest is summed only where they
    // leave open which bin it is.
    constexpr u32 kBits = R::kResident ? 16 : 12, kRest = 24 - kBits;
    bool exact = false;
    for (bool first = true;; first = false) {
      const u32 range = u32(hi) - u32(lo);
      const i32 top = hi - 1;
      u32 shift = range <= kBins ? 0 : 23 - __clz(range - 1); // ceil(log2(range)) - 9
      if (u32(top >> shift) - u32(lo >> shift) >= kBins) ++shift; // bins are aligned
      if (first) shift = min(shift, 18u);
      const i32 head = top >> shift, tail = max(lo >> shift, head - i32(kBins - 1)); // first and last bin
      const u32 window = u32(hi) - u32(max(lo, i32(u32(tail) << shift)));

      u32 *const bins = s->bins[kLocal ? 0 : phase], *const rest = kLocal ? s->bins[1] : s->rest[phase];
      const double over = row.fold([&](u32, const float (&x)[4]) {
        float above = 0.f;
#pragma unroll
        for (u32 e = 0; e < 4; ++e) {
          const i32 y = key<kMass>(x[e]);
          if (u32(top) - u32(y) < window) {
            const u32 bin = head - (y >> shift), mantissa = (u32(y) & 0x7fffffu) | 0x800000u;
            atomicAdd(&bins[bin], kMass && shift > 0 ? mantissa >> kRest : 1u);
            if (kMass && exact) atomicAdd(&rest[bin], mantissa & ((1u << kRest) - 1));
          }
          if (y > top && y <= 0x7f800000) above += kMass ? x[e] : 1.f; // NaN is beyond infinity
        }
        return above;
      });
      const double before = base + (kLocal ? ex.block_all(over) : ex.all(over).sum);

      // Bin t of all blocks.
      const u32 t = threadIdx.x;
      u64 units = 0, rests = 0;
      if constexpr (kLocal) {
        units = bins[t];
        rests = rest[t];
        bins[t] = rest[t] = 0; // for the next pass, which follows barriers
      } else {
        for (u32 q = 0; q < ex.size; ++q) {
          units += peer_load(peer_address(&bins[t], q));
          if (kMass && exact) rests += peer_load(peer_address(&rest[t], q));
        }
        s->bins[phase ^ 1][t] = s->rest[phase ^ 1][t] = 0;
      }
      u32* const found = s->found[phase];
      phase ^= 1;
      if (t < 2) s->found[phase][t] = kBins;
      double mass = double(units);
      if (kMass && shift == 0) mass *= double(__int_as_float(top - i32(t)));
      if (kMass && shift > 0) { // a unit's value is a power of two
        const u32 exponent = (u32(head - i32(t)) << shift) >> 23;
        mass = (mass + double(rests) / (1u << kRest)) * __longlong_as_double(i64(exponent - 127 - (kBits - 1) + 1023) << 52);
      }
      double begin, end;
      prefix(mass, begin, end);
      // Of each unit a 2^(kBits - 1)th may be missing.
      const double slack = kMass && shift > 0 && !exact ? 1.0 + 1.0 / (1u << (kBits - 1)) : 1.0;
      if (before + begin * slack < target && before + end * slack >= target) atomicMin(&found[0], t);
      if (before + begin < target && before + end >= target) atomicMin(&found[1], t);
      __syncthreads();
      const u32 high = found[0], low = found[1]; // bins that the key is in, or between
      // A bin of one element, or of all that are wanted: its end is as good a place as the element.
      const bool enough = kMass ? shift > 0 && units < (1u << kBits) : before + end == target;
      const bool done = __syncthreads_or(enough && low == t && high == t);
      if (before >= target) return hi; // only by rounding
      const i32 low_key = max(lo, i32(u32(head - i32(low)) << shift));
      if (high == kBins) { // not in these bins
        if (window == range) {
          beyond = true;
          return lo;
        }
        hi = i32(u32(hi) - window);
        exact = false;
      } else {
        if (done || shift == 0) return low_key;
        hi = i32(min(i64(hi), (i64(head - i32(high)) + 1) << shift));
        if (low < kBins) lo = low_key;
        exact = low != high;
      }
    }
  }

  // Sums of the values of the threads before this one, and with it. `end` of a thread is exactly `begin` of the next.
  __device__ __forceinline__ void prefix(double value, double& begin, double& end) {
    const u32 lane = lane_id(), warp = warp_id();
    double upto = value;
#pragma unroll
    for (u32 d = 1; d < 32; d *= 2) {
      const double v = __shfl_up_sync(kAll, upto, d);
      if (lane >= d) upto += v;
    }
    if (lane == 31) s->totals[warp] = upto;
    __syncthreads();
    double before = 0.0;
    for (u32 w = 0; w < warp; ++w) before += s->totals[w];
    const double up = __shfl_up_sync(kAll, upto, 1);
    begin = lane == 0 ? before : before + up;
    end = before + upto;
  }
};

// A key that at least `k` elements of this block reach, from the maxima of its threads; the least where there is none.
// 16 rounds, for sign, exponent and 7 bits: few more elements than needed lie above, and the search is exact later.
__device__ __forceinline__ i32 reached_by(u32 k, float thread_max) {
  const u32 mine = u32(order(thread_max)) ^ 0x80000000u;
  u32 bound = 0;
  for (u32 bit = 0x80000000u; bit >= 0x10000u; bit >>= 1)
    if (u32(__syncthreads_count(mine >= (bound | bit))) >= k) bound |= bit;
  return max(kLeastKey, i32(bound ^ 0x80000000u));
}

// What is kept of the row's numbers is at or above it: at least `k`, and of fewer than `k` all; -inf for all. `bound` is a key
// that `k` elements reach, the least one if none is known.
template <class R>
__device__ __forceinline__ float kth_cutoff(const R& row, Exchange& ex, Search& search, u32 k, float max, i32 bound) {
  if (k >= row.n) return -infinity();
  const i32 most = order(max) + 1;
  bool beyond;
  if (bound == kLeastKey) return unorder(search.run<false, false>(row, ex, bound, most, double(k), 0.0, beyond));
  return unorder(search.find<false>(row, ex, bound, most, bound, most, double(k)));
}

// What is kept of the positive elements is at or above it. `max` is 2^-60 or more and below 2^127, `least` a lower bound of the
// cutoff, `mass` the sum from there. Elements below 2^-126 weigh nothing beside such a maximum. `sampled`: a sample was counted before the
// last exchange.
template <class R>
__device__ __forceinline__ float mass_cutoff(const R& row, Exchange& ex, Search& search, double target, double mass, float max, float least,
                                             bool sampled) {
  const i32 bottom = ::max(0x00800000, __float_as_int(least)), most = __float_as_int(max) + 1;
  i32 lo = bottom, hi = most;
  if (sampled) search.guess(ex, mass - target, row.n, lo, hi);
  return __int_as_float(search.find<true>(row, ex, lo, hi, bottom, most, target));
}

// The element in whose share of the mass `u` falls, among those from `cutoff` up: the first whose running sum exceeds
// `u * total`. The last exchange was one of `row.sum(cutoff)` and gave `total`. The thread that finds it calls
// `found(place)`; returns whether the row was a distribution.
template <class R, class F>
__device__ __forceinline__ bool pick(const R& row, const Exchange& ex, float cutoff, double total, const float& u, F found) {
  if (!(total > 0.0 && total < double(infinity()))) return false;
  const double goal = double(u) * total;
  double below = 0.0, at = 0.0;
  u32 owner = 0;
  for (u32 q = 0; q < ex.size; ++q) {
    const double sum = ex.block(q).sum;
    if (sum > 0.0) {
      owner = q;
      at = below;
      below += sum;
      if (below > goal) break;
    }
  }
  if (owner != ex.rank) return true;
  below = at;
  for (u32 w = 0; w < kWarps; ++w) {
    const double sum = ex.warp(w).sum;
    if (sum > 0.0) {
      owner = w;
      at = below;
      below += sum;
      if (below > goal) break;
    }
  }
  if (owner != warp_id()) return true;
  // This warp: its unit, the group within it, the lane, the element.
  below = at;
  u32 unit = row.unit;
  for (u32 v = row.unit; v < row.unit_end; ++v) {
    const float sum = row.fold_unit(v, [=](u32, const float (&x)[4]) { return R::kept(x, cutoff); });
    if (sum > 0.f) {
      unit = v;
      at = below;
      below += sum;
      if (below > goal) break;
    }
  }
  below = at;
  float sums[kGroups];
#pragma unroll
  for (u32 g = 0; g < kGroups; ++g) {
    float x[4];
    row.read_one(unit, g, x);
    sums[g] = R::warp_total(R::kept(x, cutoff));
  }
  u32 group = 0;
  bool over = false;
#pragma unroll
  for (u32 g = 0; g < kGroups; ++g) {
    if (sums[g] > 0.f && !over) {
      group = g;
      at = below;
      below += sums[g];
      over = below > goal;
    }
  }
  float x[4];
  row.read_one(unit, group, x);
  double mine = 0.0;
#pragma unroll
  for (u32 e = 0; e < 4; ++e) mine += x[e] >= cutoff ? double(x[e]) : 0.0;
  double upto = mine;
#pragma unroll
  for (u32 d = 1; d < 32; d *= 2) {
    const double v = __shfl_up_sync(kAll, upto, d);
    if (lane_id() >= d) upto += v;
  }
  // Sums in another order may leave the goal out of reach: the last lane with mass, and its last element, then.
  const u32 some = __ballot_sync(kAll, mine > 0.0), reach = __ballot_sync(kAll, mine > 0.0 && at + upto > goal);
  if (lane_id() == (reach ? __ffs(reach) - 1 : 31 - __clz(some))) {
    double sum = at + (upto - mine);
    u32 place = 0;
    bool stop = false;
#pragma unroll
    for (u32 e = 0; e < 4; ++e) {
      if (x[e] >= cutoff && !stop) {
        place = R::place(unit, group) + e;
        sum += x[e];
        stop = sum > goal;
      }
    }
    found(place);
  }
  return true;
}

}  // namespace fir
