// sampling.cuh: from rows of logits or probabilities to probabilities, filtered ones, or one token each.
//
//   softmax   out[b, i] = 2^((x[b, i] - max) * log2(e) / T) / sum         T = 0: 1 for the first largest
//   sample    w = x or softmax weights; out[b] = first i with  w[0] + ... + w[i] > u * sum w  over what passes
//             top_k, top_p and min_p (src/filters.rs)
//   renorm    out[b, i] = x[b, i] / sum of what passes, else 0
//   mask      out[b, i] = x[b, i] where fewer than top_k are greater, else -inf
//
// grid   (rows * C)       a cluster of C blocks (a power of two up to 8; 1 below sm_90) per row
// block  512
// smem   static           1.2 KB; with filters SearchSmem, 8.3 KB
//        dynamic          kResident: the row (rows.cuh); else sample of weights, renorm, mask: lists (bracket.cuh), or none
// needs  sm_80; clusters from sm_90
//
// reads  x, once where kResident; with lists once, and for renorm and mask those units once more that something passes of
// writes out, valid; a row that is no distribution: token 0 and valid 0, or NaN
// twins  src/cpu/sampling.rs, src/reference/sampling.rs. Draws are equal but where two sums in different orders put `u`
//        on different sides of an element's edge (relative 1e-7); so also, where filters are in use, those of a row with lists and
//        without.
#pragma once
#include <fir/philox.cuh>
#include <fir/bracket.cuh>

namespace fir {

// log2(e) / temperature, finite also for the smallest temperature.
__device__ __forceinline__ float log2_scale(float temperature) {
  return float(fmin(1.4426950408889634 / double(temperature), 3.4028234663852886e38));
}

// An i32 or i64 of an array.
__device__ __forceinline__ i64 read_id(const void* ids, bool wide, i64 i) {
  return wide ? static_cast<const i64*>(ids)[i] : static_cast<const i32*>(ids)[i];
}
__device__ __forceinline__ void write_id(void* ids, bool wide, i64 i, i64 value) {
  if (wide) static_cast<i64*>(ids)[i] = value;
  else static_cast<i32*>(ids)[i] = i32(value);
}

// Writes `f(x)` of every element; of units of which `empty(u)` says that it is `none` for all, without reading them.
template <class Out, class R, class F, class E>
__device__ __forceinline__ void write_row(const R& row, Out* out, F f, E empty, float none) {
  const bool aligned = (reinterpret_cast<u64>(out) & (4 * sizeof(Out) - 1)) == 0;
  auto put = [&](u32 place, const float (&y)[4]) {
    if (aligned && place + 4 <= row.n) store_elements<true>(out, place, row.n, y);
    else store_elements<false>(out, place, row.n, y);
  };
  for (u32 u = row.unit; u < row.unit_end; ++u) {
    if (empty(u)) {
      const float y[4] = {none, none, none, none};
#pragma unroll 1
      for (u32 g = 0; g < kGroups; ++g) put(row.place(u, g), y);
      continue;
    }
#pragma unroll 1
    for (u32 half = 0; half < 2; ++half) {
      float x[4][4];
      row.read(u, half, x);
#pragma unroll
      for (u32 g = 0; g < 4; ++g) {
        const float y[4] = {f(x[g][0]), f(x[g][1]), f(x[g][2]), f(x[g][3])};
        put(row.place(u, half * 4 + g), y);
      }
    }
  }
}
template <class Out, class R, class F>
__device__ __forceinline__ void write_row(const R& row, Out* out, F f) {
  write_row(row, out, f, [](u32) { return false; }, 0.f);
}

// The first place of the largest element, over the cluster; -1 if the row has a NaN.
template <class R>
__device__ __forceinline__ i64 first_largest(const R& row, Exchange& ex, float max) {
  i32 first = i32(0x80000000u); // ~place, so that the largest is the first place
  u32 nan = 0;
  row.each([&](u32 place, const float (&x)[4]) {
#pragma unroll
    for (u32 e = 0; e < 4; ++e) {
      // Padding equals a row's -inf, but comes after it.
      if (x[e] == max && place + e < row.n) first = ::max(first, ~i32(place + e));
      nan += x[e] != x[e];
    }
  });
  const Record r = ex.all(0.0, first, nan);
  return r.count > 0 ? -1 : i64(~r.key);
}

struct SoftmaxParams {
  const void* x;
  float* out;
  i64 x_stride, out_stride; // elements from row to row
  u32 n;
  u32 unused;
  PerRow<float> temperature;
};

template <class T, bool kResident>
__global__ void __launch_bounds__(kThreads, kResident ? kBlocks : 2) softmax(const __grid_constant__ SoftmaxParams p) {
  __shared__ RecordSmem records;
  Exchange ex;
  ex.open(&records);
  const i64 r = blockIdx.x / ex.size;
  Row<T, kResident> row;
  row.open(static_cast<const T*>(p.x) + r * p.x_stride, p.n, -infinity(), dynamic_smem());
  const float temperature = p.temperature.get(r);
  float* out = p.out + r * p.out_stride;

  const float max = unorder(ex.all(0.0, order(row.max())).key);
  float inverse = not_a_number();
  if (max != -infinity() && temperature == 0.f) {
    const i64 first = first_largest(row, ex, max);
    row.each([&](u32 place, const float (&)[4]) {
      float y[4];
#pragma unroll
      for (u32 e = 0; e < 4; ++e) y[e] = first < 0 ? not_a_number() : first == i64(place + e) ? 1.f : 0.f;
      store_elements<false>(out, place, p.n, y);
    });
    return;
  }
  if (max != -infinity()) {
    // The largest weight is 1, so the total is 1 or more; a NaN makes every element NaN.
    inverse = float(1.0 / ex.all(row.become(Stage{Stage::kWeights, -infinity(), max, log2_scale(temperature)})).sum);
  }
  write_row(row, out, [=](float x) { return x * inverse; });
}

struct SampleParams {
  const void* x;
  const void* indices; // row of x for each row of the output; i32 or i64; may be null
  void* out;           // i32 or i64
  u8* valid;           // may be null
  i64 x_stride, rows;  // rows of x
  i64 out_stride, valid_stride;
  u32 n;
  i32 wide_out, wide_indices, joint;
  PerRow<float> temperature, top_p, min_p;
  PerRow<u32> top_k;
  Rng rng;
};

// Rows whose largest element is small are scaled, exactly: subnormals have no place in the search for a mass.
template <class R>
__device__ __forceinline__ bool enlarge(R& row, float& max, double& mass) {
  if (max >= 8.673617379884035e-19f) return false; // 2^-60
  constexpr float kTwo64 = 18446744073709551616.f;
  row.become(Stage{Stage::kScaled, 0.f, 0.f, kTwo64});
  max *= kTwo64;
  mass *= double(kTwo64);
  return true;
}

// What a row is filtered by.
struct Wanted {
  u32 k;
  float top_p, min_p;
  bool by_k, by_p, joint;
};

// One read of a row, with a list of what may be near the cutoff; false, and no read, if no list would hold it.
template <bool kTopK, bool kTopP, class R, class B, class M>
__device__ __forceinline__ bool read_once(const R& row, Exchange& ex, B& bracket, const Wanted& w, M meanwhile) {
  bool listed = true;
  __syncthreads(); // bins are 0
  if (w.by_k || w.by_p || w.min_p > 0.f) {
    bracket.sample(row.p, row.n, meanwhile);
    if (kTopK && w.by_k) bracket.guess_count(w.k);
    else if (kTopP && w.by_p) bracket.guess_mass(1.f - w.top_p); // weights sum to 1, mostly
    else listed = bracket.guess_share(w.min_p);
  } else if (threadIdx.x == 0) {
    meanwhile();
  }
  ex.meet();
  if (!listed) return false;
  if (!kTopK && !kTopP && w.min_p == 0.f) bracket.template read<false, false>(row);
  else bracket.template read<kTopK, true>(row);
  cluster_sync(cluster_size());
  return true;
}

// What passes is at or above the cutoff; false if the lists do not tell. For the leader, and a row that is a distribution.
template <bool kTopK, bool kTopP>
__device__ __forceinline__ bool listed_cutoff(Exchange& ex, Search& search, Bracket<false>& bracket, const Wanted& w,
                                              const Bracket<false>::Totals& all, float& cutoff) {
  cutoff = kPositive;
  if (!all.complete) return false;
  if constexpr (kTopK || kTopP) {
    double target = double(w.top_p) * all.mass, mass = all.mass;
    i32 from = bracket.lo;
    if (kTopK && w.by_k) {
      if (!bracket.kth(ex, search, all, w.k, from)) return false;
      cutoff = __int_as_float(from);
      if (kTopP && w.by_p) {
        const double listed = bracket.list(0.f).fold([=](u32, const float (&x)[4]) { return Row<float, false>::kept(x, cutoff); });
        mass = all.above + ex.block_all(listed);
        __syncthreads();
        if (!w.joint) target = double(w.top_p) * mass;
      }
    }
    if (kTopP && w.by_p && target < mass) {
      // Subnormals have no place in the search for a mass.
      const i32 end = min(bracket.hi, all.max + 1);
      from = max(from, 0x00800000);
      if (all.above >= target || from >= end || all.max < 0x21800000) return false; // 2^-60
      bool beyond;
      from = search.run_apart<true, true>(bracket.list(0.f), ex, from, end, target, all.above, beyond);
      if (beyond && !w.by_k) return false;
      cutoff = __int_as_float(from);
    }
  }
  // The least f32 that is not below the product, which f64 holds exactly.
  const float least = __double2float_ru(double(__int_as_float(all.max)) * double(w.min_p));
  if (least > cutoff) {
    if (__float_as_int(least) < bracket.lo || __float_as_int(least) > bracket.hi) return false;
    cutoff = least;
  }
  return true;
}

// A draw from one read of a row of weights, if the lists tell what passes. `settle(valid)` and `found(place)` are called for it.
template <bool kTopK, bool kTopP, class R, class M, class S, class F>
__device__ __forceinline__ bool sample_once(const R& row, Exchange& ex, Search& search, Bracket<false>& bracket, const Wanted& w,
                                            const float& u, M meanwhile, S settle, F found) {
  if (!read_once<kTopK, kTopP>(row, ex, bracket, w, meanwhile)) return false;
  if (ex.rank == 0) {
    const Bracket<false>::Totals all = bracket.totals(ex);
    const bool valid = all.mass > 0.0 && all.mass < double(infinity());
    float cutoff;
    const bool known = valid && listed_cutoff<kTopK, kTopP>(ex, search, bracket, w, all, cutoff);
    if (!valid) settle(false);
    else if (known) settle(bracket.draw(row, cutoff, u, found));
    bracket.tell(ex, known || !valid, cutoff, 0.0);
  }
  cluster_sync(cluster_size());
  return bracket.s->answer;
}

// kLogits: `x` are logits; else weights. kTopK, kTopP: the filter may be in use.
template <class T, bool kLogits, bool kTopK, bool kTopP, bool kResident>
__global__ void __launch_bounds__(kThreads, kResident ? kBlocks : 2) sample(const __grid_constant__ SampleParams p) {
  constexpr bool kFilter = kTopK || kTopP;
  __shared__ RecordSmem records;
  __shared__ __align__(16) u8 search_smem[kFilter ? sizeof(SearchSmem) : 16];
  __shared__ float u;
  Exchange ex;
  ex.open(&records);
  Search search;
  if (kFilter) search.open(reinterpret_cast<SearchSmem*>(search_smem));
  const i64 r = blockIdx.x / ex.size;
  Row<T, kResident, AsRead, kLogits> row;
  i64 source = r;
  if (p.indices) {
    const u64 id = u64(read_id(p.indices, p.wide_indices, r));
    source = i64(min(id, u64(p.rows - 1)));
  }
  row.open(static_cast<const T*>(p.x) + source * p.x_stride, p.n, kLogits ? -infinity() : 0.f, dynamic_smem());
  auto draw_u = [&] { u = uniform(p.rng, u32(r), 0); }; // by thread 0
  const u32 k = kTopK ? p.top_k.get(r) : 0;
  const float top_p = kTopP ? p.top_p.get(r) : 1.f, min_p = p.min_p.get(r);
  const bool by_k = kTopK && k < p.n, by_p = kTopP && top_p < 1.f;
  const float temperature = kLogits ? p.temperature.get(r) : 1.f;

  // The token of a row that is no distribution; overwritten by no one.
  auto settle = [&](bool valid) {
    if (ex.rank == 0 && threadIdx.x == 0) {
      if (p.valid) p.valid[r * p.valid_stride] = valid;
      if (!valid) write_id(p.out, p.wide_out, r * p.out_stride, 0);
    }
  };
  auto found = [&](u32 place) { write_id(p.out, p.wide_out, r * p.out_stride, place); };
  auto finite = [](double mass) { return mass > 0.0 && mass < double(infinity()); };

  if constexpr (!kLogits && !kResident) {
    Bracket<false> bracket;
    if (bracket.open(dynamic_smem(), p.n)) {
      const Wanted wanted{k, top_p, min_p, by_k, by_p, p.joint != 0};
      if (sample_once<kTopK, kTopP>(row, ex, search, bracket, wanted, u, draw_u, settle, found)) return;
      if (kFilter) search.open(search.s);
    } else if (threadIdx.x == 0) {
      draw_u();
    }
  } else if (threadIdx.x == 0) {
    draw_u();
  }
  float max;
  double mass = kLogits ? 0.0 : row.sum_and_max(max);
  if (kLogits) max = row.max();
  const i32 bound = by_k && k <= kThreads ? reached_by(k, max) : kLeastKey;
  const Record all = ex.all(mass, order(max), 0, bound);
  max = unorder(all.key);
  mass = all.sum; // of what passes so far, once it is known
  if (kLogits ? max == -infinity() : !finite(mass)) return settle(false);
  if (kLogits && temperature == 0.f) {
    const i64 first = first_largest(row, ex, max);
    settle(first >= 0);
    if (first >= 0 && ex.rank == 0 && threadIdx.x == 0) found(u32(first));
    return;
  }
  float cutoff = kPositive;
  bool summed = true; // the last exchange was of what passes
  double whole = mass;
  if constexpr (kFilter) {
    i32 from = all.key2;
    if (!kLogits && by_p && enlarge(row, max, mass)) from = kLeastKey, whole = mass;
    float cut = -infinity();
    if (by_k) {
      cut = kth_cutoff(row, ex, search, k, max, from);
      summed = false;
    }
    if constexpr (kLogits) {
      const Stage weights{Stage::kWeights, -infinity(), max, log2_scale(temperature)};
      if (by_k && by_p && p.joint) whole = ex.all(row.sum_of(weights)).sum;
      mass = ex.all(row.become(Stage{Stage::kWeights, cut, max, weights.scale})).sum;
      summed = true;
      if (!(by_k && p.joint)) whole = mass;
      max = 1.f;
    } else if (by_k) {
      cutoff = fmaxf(kPositive, cut);
      if (by_p) {
        mass = ex.all(row.sum(cutoff)).sum;
        summed = true;
        if (!p.joint) whole = mass;
      }
    }
    if (by_p) {
      // A share of the whole mass when joint, of what top_k left otherwise.
      const double target = double(top_p) * whole;
      if (!finite(mass) || !(target < double(infinity()))) return settle(false);
      if (target < mass) {
        cutoff = fmaxf(cutoff, mass_cutoff(row, ex, search, target, max, cutoff));
        summed = false;
      }
    }
  } else if constexpr (kLogits) {
    mass = ex.all(row.become(Stage{Stage::kWeights, -infinity(), max, log2_scale(temperature)})).sum;
    max = 1.f;
  }
  // The least f32 that is not below the product, which f64 holds exactly.
  const float least = __double2float_ru(double(max) * double(min_p));
  if (least > cutoff) cutoff = least, summed = false;
  if (!summed) mass = ex.all(row.sum(cutoff)).sum;
  settle(pick(row, ex, cutoff, mass, u, found));
}

struct RenormParams {
  const void* x;
  void* out;
  i64 x_stride, out_stride;
  u32 n;
  u32 unused;
  PerRow<u32> top_k;
  PerRow<float> top_p;
};

enum class Keep : i32 { kTopK, kTopP };

constexpr i32 kNever = i32(0x80000000u); // no key is less

// Probabilities that pass, scaled to sum to 1.
template <Keep kKeep, bool kResident>
__global__ void __launch_bounds__(kThreads, kResident ? kBlocks : 2) renorm(const __grid_constant__ RenormParams p) {
  constexpr bool kTopK = kKeep == Keep::kTopK;
  __shared__ RecordSmem records;
  __shared__ SearchSmem search_smem;
  Exchange ex;
  ex.open(&records);
  Search search;
  search.open(&search_smem);
  const i64 r = blockIdx.x / ex.size;
  Row<float, kResident, AsRead, false> row;
  row.open(static_cast<const float*>(p.x) + r * p.x_stride, p.n, 0.f, dynamic_smem());
  float* out = static_cast<float*>(p.out) + r * p.out_stride;
  const u32 k = kTopK ? p.top_k.get(r) : 0;
  const float top_p = kTopK ? 1.f : p.top_p.get(r);
  const bool by_k = kTopK && k < p.n, by_p = !kTopK && top_p < 1.f;

  float cutoff = kPositive;
  double mass = 0.0;
  bool known = false;
  i32 least = kNever; // units whose largest key is less have nothing that passes, where lists told
  if constexpr (!kResident) {
    Bracket<false> bracket;
    if (bracket.open(dynamic_smem(), p.n)) {
      const Wanted w{k, top_p, 0.f, by_k, by_p, false};
      read_once<kTopK, !kTopK>(row, ex, bracket, w, [] {});
      if (ex.rank == 0) {
        const Bracket<false>::Totals all = bracket.totals(ex);
        mass = all.mass;
        cutoff = -infinity(); // of a row that is none all become NaN
        known = !(mass > 0.0 && mass < double(infinity()));
        if (!known) {
          // The inverse of less may be infinite.
          known = all.max >= 0x21800000 && listed_cutoff<kTopK, !kTopK>(ex, search, bracket, w, all, cutoff);
          if (known) mass = bracket.keep(cutoff);
        }
        bracket.tell(ex, known, cutoff, mass);
      }
      cluster_sync(ex.size);
      known = bracket.s->answer;
      if (known) cutoff = bracket.s->cutoff, mass = bracket.s->mass;
      else search.open(&search_smem);
      if (known && cutoff >= kPositive) least = __float_as_int(cutoff);
    }
  }
  if (!known) {
    float max;
    mass = row.sum_and_max(max);
    const Record all = ex.all(mass, order(max), 0, by_k && k <= kThreads ? reached_by(k, max) : kLeastKey);
    max = unorder(all.key);
    mass = all.sum;
    cutoff = -infinity();
    if (mass > 0.0 && mass < double(infinity())) {
      cutoff = kPositive;
      const bool enlarged = enlarge(row, max, mass);
      if constexpr (kTopK) {
        if (by_k) cutoff = fmaxf(kPositive, kth_cutoff(row, ex, search, k, max, enlarged ? kLeastKey : all.key2));
      } else {
        const double target = double(top_p) * mass;
        if (target < mass) cutoff = mass_cutoff(row, ex, search, target, max, kPositive);
      }
      if (cutoff > kPositive) mass = ex.all(row.sum(cutoff)).sum;
    }
  }
  const float inverse = cutoff == -infinity() ? not_a_number() : float(1.0 / mass);
  write_row(
      row, out, [=](float x) { return x < cutoff ? 0.f : x * inverse; },
      [=](u32 u) { return least != kNever && unit_sums(dynamic_smem())[u].max < least; }, 0.f);
  cluster_sync(); // others may still read this block's bins
}

// Logits below the k-th largest become -inf.
template <class T, bool kResident>
__global__ void __launch_bounds__(kThreads, kResident ? kBlocks : 2) mask(const __grid_constant__ RenormParams p) {
  __shared__ RecordSmem records;
  __shared__ SearchSmem search_smem;
  Exchange ex;
  ex.open(&records);
  Search search;
  search.open(&search_smem);
  const i64 r = blockIdx.x / ex.size;
  Row<T, kResident, AsRead, false> row;
  row.open(static_cast<const T*>(p.x) + r * p.x_stride, p.n, -infinity(), dynamic_smem());
  T* out = static_cast<T*>(p.out) + r * p.out_stride;

  const u32 k = p.top_k.get(r);
  float cutoff = -infinity();
  bool known = k >= p.n;
  i32 least = kNever; // units whose largest key is less have nothing that passes, where lists told
  if constexpr (!kResident) {
    Bracket<true> bracket;
    if (!known && bracket.open(dynamic_smem(), p.n)) {
      read_once<true, false>(row, ex, bracket, Wanted{k, 1.f, 0.f, true, false, false}, [] {});
      if (ex.rank == 0) {
        const Bracket<true>::Totals all = bracket.totals(ex);
        i32 from = kLeastKey;
        known = all.mass == all.mass && bracket.kth(ex, search, all, k, from); // a NaN has no place in the order
        bracket.tell(ex, known, unorder(from), 0.0);
      }
      cluster_sync(ex.size);
      known = bracket.s->answer;
      cutoff = bracket.s->cutoff;
      if (known) least = order(cutoff);
      else search.open(&search_smem);
    }
  }
  if (!known) {
    const float own = row.max();
    const i32 bound = k <= kThreads ? reached_by(k, own) : kLeastKey;
    const Record all = ex.all(0.0, order(own), 0, bound);
    cutoff = kth_cutoff(row, ex, search, k, unorder(all.key), all.key2);
  }
  write_row(
      row, out, [=](float x) { return x < cutoff ? -infinity() : x; },
      [=](u32 u) { return least != kNever && unit_sums(dynamic_smem())[u].max < least; }, -infinity());
  ex.meet();
  cluster_sync(); // others may still read this block's bins
}

}  // namespace fir
