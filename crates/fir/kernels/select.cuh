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

struct SearchSmem {
  u32 bins[2][kBins], rest[2][kBins];
  double totals[kWarps];
  u32 found[2][2];
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
  }

  // Positive normal floats are in the order of their bits, and nothing else is asked for when masses are.
  template <bool kMass>
  __device__ __forceinline__ static i32 key(float x) { return kMass ? __float_as_int(x) : order(x); }

  // The key from which on elements are kept, in [lo, hi); `target` is a mass or a number of elements. `kLocal`: this block alone has
  // all elements of the bracket, and those above it have the sum `base`. `beyond`: they do not reach the target.
  template <bool kMass, bool kLocal, class R>
  __device__ __forceinline__ i32 run(const R& row, Exchange& ex, i32 lo, i32 hi, double target, double base, bool& beyond) {
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

      u32 *const bins = s->bins[phase], *const rest = s->rest[phase];
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
      } else {
        for (u32 q = 0; q < ex.size; ++q) {
          units += peer_load(peer_address(&bins[t], q));
          if (kMass && exact) rests += peer_load(peer_address(&rest[t], q));
        }
      }
      u32* const found = s->found[phase];
      phase ^= 1;
      s->bins[phase][t] = s->rest[phase][t] = 0;
      if (t < 2) s->found[phase][t] = kBins;
      double mass = double(units);
      if (kMass && shift == 0) mass *= double(__int_as_float(top - i32(t)));
      if (kMass && shift > 0) { // a unit's value is a power of two
        const u32 exponent = (u32(head - i32(t)) << shift) >> 23;
        mass = (mass + double(rests) / (1u << kRest)) * __longlong_as_double(i64(exponent - 127 - (kBits - 1) + 1023) << 52);
      }
      double begin, end;
      prefix(s->totals, mass, begin, end);
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

  // The same as a function of its own: where speed does not hang on it, or its registers would be a burden.
  template <bool kMass, bool kLocal, class R>
  __device__ __noinline__ i32 run_apart(const R& row, Exchange& ex, i32 lo, i32 hi, double target, double base, bool& beyond) {
    Search search{known_shared(s), phase};
    Exchange exchange = ex;
    exchange.s = known_shared(ex.s);
    R own = row;
    own.localize();
    const i32 key = search.run<kMass, kLocal>(own, exchange, lo, hi, target, base, beyond);
    phase = search.phase;
    ex.phase = exchange.phase;
    ex.alone = exchange.alone;
    return key;
  }

  // Sums of the values of the threads before this one, and with it. `end` of a thread is exactly `begin` of the next.
  __device__ __forceinline__ static void prefix(double (&totals)[kWarps], double value, double& begin, double& end) {
    const Span span = spans(shared_address(totals), value);
    begin = span.begin;
    end = span.end;
  }
  struct Span { double begin, end; };
  __device__ __noinline__ static Span spans(u32 totals_at, double value) {
    double* const totals = static_cast<double*>(__cvta_shared_to_generic(totals_at));
    const u32 lane = lane_id(), warp = warp_id();
    double upto = value;
#pragma unroll
    for (u32 d = 1; d < 32; d *= 2) {
      const double v = __shfl_up_sync(kAll, upto, d);
      if (lane >= d) upto += v;
    }
    if (lane == 31) totals[warp] = upto;
    __syncthreads();
    double before = 0.0;
#pragma unroll
    for (u32 w = 0; w < kWarps - 1; ++w) before += w < warp ? totals[w] : 0.0;
    const double up = __shfl_up_sync(kAll, upto, 1);
    return Span{lane == 0 ? before : before + up, before + upto};
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
// that `k` elements reach.
template <class R>
__device__ __forceinline__ float kth_cutoff(const R& row, Exchange& ex, Search& search, u32 k, float max, i32 bound) {
  if (k >= row.n) return -infinity();
  bool beyond;
  if constexpr (R::kResident) return unorder(search.run<false, false>(row, ex, bound, order(max) + 1, double(k), 0.0, beyond));
  return unorder(search.run_apart<false, false>(row, ex, bound, order(max) + 1, double(k), 0.0, beyond));
}

// What is kept of the positive elements is at or above it. `max` is 2^-60 or more and below 2^127, `least` a lower bound of the
// cutoff. Elements below 2^-126 weigh nothing beside such a maximum.
template <class R>
__device__ __forceinline__ float mass_cutoff(const R& row, Exchange& ex, Search& search, double target, float max, float least) {
  const i32 lo = ::max(0x00800000, __float_as_int(least));
  bool beyond;
  if constexpr (R::kResident) return __int_as_float(search.run<true, false>(row, ex, lo, __float_as_int(max) + 1, target, 0.0, beyond));
  return __int_as_float(search.run_apart<true, false>(row, ex, lo, __float_as_int(max) + 1, target, 0.0, beyond));
}

// In unit `unit`, before which the mass is `at`: the first element whose running sum exceeds `goal`, by one warp.
// Its place in the one lane that has it, else -1.
template <class R>
__device__ __noinline__ u32 pick_in_unit(R row, u32 unit, double at, double goal, float cutoff) {
  row.localize();
  double below = at;
  float sums[kGroups];
  if constexpr (R::kResident) {
#pragma unroll
    for (u32 g = 0; g < kGroups; ++g) {
      float x[4];
      row.read_one(unit, g, x);
      sums[g] = R::warp_total(R::kept(x, cutoff));
    }
  } else { // all at once: a trip to memory
    float x[2][4][4];
#pragma unroll
    for (u32 half = 0; half < 2; ++half) row.read(unit, half, x[half]);
#pragma unroll
    for (u32 g = 0; g < kGroups; ++g) sums[g] = R::warp_total(R::kept(x[g / 4][g % 4], cutoff));
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
    return place;
  }
  return ~0u;
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
  const u32 place = pick_in_unit(row, unit, at, goal, cutoff);
  if (place != ~0u) found(place);
  return true;
}

}  // namespace fir
