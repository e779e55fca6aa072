// sampling.cuh: from rows of logits or probabilities to probabilities, filtered ones, or one token each.
//
//   softmax   out[b, i] = 2^((x[b, i] - max) * log2(e) / T) / sum         T = 0: 1 for the first largest
//   sample    w = x or softmax weights; out[b] = first i with  w[0] + ... + w[i] > u * sum w  over what passes
//             top_k, top_p and min_p (src/filters.rs)
//   renorm    out[b, i] = x[b, i] / sum of what passes, else 0
//   mask      out[b, i] = x[b, i] where fewer than top_k are greater, else -inf
//
// grid   (rows * C)       a cluster of C blocks (a power of two up to 16; 1 below sm_90) per row
// block  kThreads         512 or 1,024
// smem   static           1 KB; with filters SearchSmem, 34 KB
// needs  sm_80; clusters from sm_90
//
// reads  x, once where kResident (rows.cuh: the row stays in registers), with kThreads * kPer * C >= n
// writes out, valid; a row that is no distribution: token 0 and valid 0, or NaN
// twins  src/cpu/sampling.rs, src/reference/sampling.rs. Draws are equal but where two sums in different orders put `u`
//        on different sides of an element's edge (relative 1e-7).
#pragma once
#include <fir/philox.cuh>
#include <fir/select.cuh>

namespace fir {

constexpr float kPositive = 1.401298464324817e-45f; // as a cutoff it lets every positive element pass

/// log2(e) / temperature, finite also for the smallest temperature.
__device__ __forceinline__ float log2_scale(float temperature) {
    return static_cast<float>(fmin(1.4426950408889634 / static_cast<double>(temperature), 3.4028234663852886e38));
}

/// An i32 or i64 of an array.
__device__ __forceinline__ i64 read_id(const void* ids, bool wide, i64 i) {
    return wide ? static_cast<const i64*>(ids)[i] : static_cast<const i32*>(ids)[i];
}
__device__ __forceinline__ void write_id(void* ids, bool wide, i64 i, i64 value) {
    if (wide) static_cast<i64*>(ids)[i] = value;
    else static_cast<i32*>(ids)[i] = static_cast<i32>(value);
}

/// Stores a unit of results, `f(x)` each, with 16-byte stores where rows begin at 16 bytes.
template <class Out, class R, class F>
__device__ __forceinline__ void write_unit(const R& row, i32 unit, Out* out, F f) {
    constexpr int kOut = 16 / sizeof(Out); // elements per store: kVec, or half of it when 16 bits become f32
    const bool whole = (reinterpret_cast<u64>(out) & 15) == 0 && (static_cast<u32>(unit) + 1) * R::kUnit <= row.n;
    if (unit >= row.unit_end) return;
#pragma unroll
    for (int j = 0; j < R::kLoads; ++j) {
        const u32 i = row.place(unit, j);
        if (whole) {
#pragma unroll
            for (int h = 0; h < R::kVec / kOut; ++h) {
                u32 y[4];
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const float* x = row.x + j * R::kVec + h * kOut;
                    if constexpr (sizeof(Out) == 4) {
                        y[e] = __float_as_uint(f(x[e]));
                    } else {
                        const Out a = from_float<Out>(f(x[2 * e])), b = from_float<Out>(f(x[2 * e + 1]));
                        y[e] = static_cast<u32>(a.bits) | static_cast<u32>(b.bits) << 16;
                    }
                }
                store16(out + i + h * kOut, y[0], y[1], y[2], y[3]);
            }
        } else {
#pragma unroll
            for (int e = 0; e < R::kVec; ++e)
                if (i + e < row.n) out[i + e] = from_float<Out>(f(row.x[j * R::kVec + e]));
        }
    }
}

/// The first place of the largest element, over the cluster; -1 if the row has a NaN.
template <class R>
__device__ __forceinline__ i64 first_largest(R& row, Exchange& ex, float max) {
    i32 first = static_cast<i32>(0x80000000u); // ~place, so that the largest is the first place
    u32 nan = 0;
    row.each([&](i32 unit) {
#pragma unroll
        for (int i = R::kPer - 1; i >= 0; --i) {
            const u32 place = row.place(unit, i / R::kVec) + i % R::kVec;
            // Padding equals a row's -inf, but comes after it.
            if (row.x[i] == max && place < row.n) first = ::max(first, ~static_cast<i32>(place));
            nan += row.x[i] != row.x[i];
        }
    });
    const Record r = ex.all<R::kWarps>(0.0, first, nan);
    return r.count > 0 ? -1 : static_cast<i64>(~r.key);
}

struct SoftmaxParams {
    const void* x;
    float* out;
    i64 x_stride, out_stride; // elements from row to row
    u32 n;
    u32 unused;
    PerRow<float> temperature;
};

template <class T, int kThreads, int kPer, bool kResident>
__global__ void __launch_bounds__(kThreads, 1024 / kThreads) softmax(const __grid_constant__ SoftmaxParams p) {
    __shared__ RecordSmem records;
    Exchange ex;
    ex.open(&records);
    const i64 r = blockIdx.x / ex.size;
    using R = Row<T, kThreads, kPer, kResident>;
    R row;
    row.open(static_cast<const T*>(p.x) + r * p.x_stride, p.n, -infinity());
    const float temperature = p.temperature.get(r);
    float* out = p.out + r * p.out_stride;

    const float max = unorder(ex.all<R::kWarps>(0.0, order(row.max()), 0).key);
    float inverse = not_a_number();
    if (max != -infinity() && temperature == 0.0f) {
        const i64 first = first_largest(row, ex, max);
        row.each([&](i32 unit) {
            write_unit<float>(row, unit, out, [&](float) { return first < 0 ? not_a_number() : 0.0f; });
            // After this warp's zeros: the same thread writes both.
#pragma unroll
            for (int i = 0; i < kPer; ++i)
                if (first == static_cast<i64>(row.place(unit, i / R::kVec) + i % R::kVec)) out[first] = 1.0f;
        });
        return;
    }
    if (max != -infinity()) {
        row.become(Stage{Stage::kWeights, -infinity(), max, log2_scale(temperature)});
        // The largest weight is 1, so the total is 1 or more; a NaN makes every element NaN.
        inverse = static_cast<float>(1.0 / ex.all<R::kWarps>(row.sum(kPositive), 0, 0).sum);
    }
    row.each([&](i32 unit) { write_unit<float>(row, unit, out, [&](float x) { return x * inverse; }); });
}

struct SampleParams {
    const void* x;
    const void* indices; // row of x for each row of the output; i32 or i64; may be null
    void* out;           // i32 or i64
    unsigned char* valid; // may be null
    i64 x_stride, rows;  // rows of x
    i64 out_stride, valid_stride;
    u32 n;
    i32 wide_out, wide_indices, joint;
    PerRow<float> temperature, top_p, min_p;
    PerRow<u32> top_k;
    Rng rng;
};

/// kLogits: `x` are logits; else weights. kFilter: `top_k` or `top_p` may be in use.
template <class T, bool kLogits, bool kFilter, int kThreads, int kPer, bool kResident>
__global__ void __launch_bounds__(kThreads, 1024 / kThreads) sample(const __grid_constant__ SampleParams p) {
    __shared__ RecordSmem records;
    __shared__ float u;
    Exchange ex;
    ex.open(&records);
    const i64 r = blockIdx.x / ex.size;
    using R = Row<T, kThreads, kPer, kResident>;
    R row;
    i64 source = r;
    if (p.indices) {
        const u64 id = static_cast<u64>(read_id(p.indices, p.wide_indices, r));
        source = static_cast<i64>(min(id, static_cast<u64>(p.rows - 1)));
    }
    row.open(static_cast<const T*>(p.x) + source * p.x_stride, p.n, kLogits ? -infinity() : 0.0f);
    if (threadIdx.x == 0) u = uniform(p.rng, static_cast<u32>(r), 0);
    const u32 k = kFilter ? p.top_k.get(r) : 0;
    const float top_p = kFilter ? p.top_p.get(r) : 1.0f, min_p = p.min_p.get(r);
    const bool by_k = kFilter && k < p.n, by_p = kFilter && top_p < 1.0f;
    const float temperature = kLogits ? p.temperature.get(r) : 1.0f;

    // The token of a row that is no distribution; overwritten by no one.
    auto settle = [&](bool valid) {
        if (ex.rank == 0 && threadIdx.x == 0) {
            if (p.valid) p.valid[r * p.valid_stride] = valid;
            if (!valid) write_id(p.out, p.wide_out, r * p.out_stride, 0);
        }
    };
    auto found = [&](u32 place) { write_id(p.out, p.wide_out, r * p.out_stride, place); };

    float max = 0.0f, cutoff = kPositive;
    double mass = 0.0;
    if (kLogits || by_k || by_p || min_p > 0.0f) {
        const float own = row.max();
        const i32 bound = by_k && k <= kThreads / 2 ? reached_by<kThreads>(k, own) : kLeastKey;
        const Record all = ex.all<R::kWarps>(!kLogits && by_p ? row.sum(kPositive) : 0.0, order(own), 0, bound);
        max = unorder(all.key);
        mass = all.sum;
        if (kLogits ? max == -infinity() : !(max > 0.0f && max < infinity())) {
            // Probabilities with a NaN beside a good maximum are told by the mass, below.
            settle(false);
            return;
        }
        if (kLogits && temperature == 0.0f) {
            const i64 first = first_largest(row, ex, max);
            settle(first >= 0);
            if (first >= 0 && ex.rank == 0 && threadIdx.x == 0) found(static_cast<u32>(first));
            return;
        }
        if constexpr (kFilter) {
            __shared__ SearchSmem search;
            float cut = -infinity();
            if (by_k) cut = kth_cutoff(row, ex, search, k, max, all.key2);
            if constexpr (kLogits) {
                const Stage weights{Stage::kWeights, -infinity(), max, log2_scale(temperature)};
                if (by_p && by_k && p.joint) mass = ex.all<R::kWarps>(row.sum_of(weights), 0, 0).sum;
                row.become(Stage{Stage::kWeights, cut, max, weights.scale});
            } else if (by_k) {
                row.become(Stage{Stage::kCut, cut, 0.0f, 0.0f});
            }
            if (by_p) {
                // A share of the whole mass when joint, of what top_k left otherwise.
                const double kept = kLogits || by_k ? ex.all<R::kWarps>(row.sum(kPositive), 0, 0).sum : mass;
                const double target = static_cast<double>(top_p) * (p.joint && by_k ? mass : kept);
                if (!(kept > 0.0 && kept < static_cast<double>(infinity()) && target < static_cast<double>(infinity()))) {
                    settle(false);
                    return;
                }
                const bool few = by_k && k <= kCap / 2;
                if (target < kept) cutoff = mass_cutoff(row, ex, search, target, kLogits ? 1.0f : max, few);
            }
        } else if constexpr (kLogits) {
            row.become(Stage{Stage::kWeights, -infinity(), max, log2_scale(temperature)});
        }
        if constexpr (kLogits) max = 1.0f;
        // The least f32 that is not below the product, which f64 holds exactly.
        cutoff = fmaxf(cutoff, __double2float_ru(static_cast<double>(max) * static_cast<double>(min_p)));
    }
    settle(draw(row, ex, cutoff, u, found));
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

/// Probabilities that pass, scaled to sum to 1.
template <Keep kKeep, int kThreads, int kPer, bool kResident>
__global__ void __launch_bounds__(kThreads, 1024 / kThreads) renorm(const __grid_constant__ RenormParams p) {
    __shared__ RecordSmem records;
    __shared__ SearchSmem search;
    Exchange ex;
    ex.open(&records);
    const i64 r = blockIdx.x / ex.size;
    using R = Row<float, kThreads, kPer, kResident>;
    R row;
    row.open(static_cast<const float*>(p.x) + r * p.x_stride, p.n, 0.0f);
    float* out = static_cast<float*>(p.out) + r * p.out_stride;

    const u32 k = kKeep == Keep::kTopK ? p.top_k.get(r) : 0;
    const float own = row.max();
    const bool by_k = kKeep == Keep::kTopK && k < p.n;
    const i32 bound = by_k && k <= kThreads / 2 ? reached_by<kThreads>(k, own) : kLeastKey;
    const Record all = ex.all<R::kWarps>(row.sum(kPositive), order(own), 0, bound);
    const bool valid = all.sum > 0.0 && all.sum < static_cast<double>(infinity());
    float cutoff = kPositive;
    double total = all.sum;
    if (valid) {
        const float max = unorder(all.key);
        if constexpr (kKeep == Keep::kTopK) {
            if (by_k) cutoff = fmaxf(kPositive, kth_cutoff(row, ex, search, k, max, all.key2));
        } else {
            const double target = static_cast<double>(p.top_p.get(r)) * all.sum;
            if (target < all.sum) cutoff = mass_cutoff(row, ex, search, target, max, false);
        }
        if (cutoff > kPositive) total = ex.all<R::kWarps>(row.sum(cutoff), 0, 0).sum;
    }
    const float inverse = static_cast<float>(1.0 / total);
    const bool tiny = !(inverse < infinity()); // the inverse of a mass below 2^-126 is no f32
    row.each([&](i32 unit) {
        write_unit<float>(row, unit, out, [&](float x) {
            if (!valid) return not_a_number();
            if (x < cutoff) return 0.0f;
            return tiny ? static_cast<float>(static_cast<double>(x) / total) : x * inverse;
        });
    });
}

/// Logits below the k-th largest become -inf.
template <class T, int kThreads, int kPer, bool kResident>
__global__ void __launch_bounds__(kThreads, 1024 / kThreads) mask(const __grid_constant__ RenormParams p) {
    __shared__ RecordSmem records;
    __shared__ SearchSmem search;
    Exchange ex;
    ex.open(&records);
    const i64 r = blockIdx.x / ex.size;
    using R = Row<T, kThreads, kPer, kResident>;
    R row;
    row.open(static_cast<const T*>(p.x) + r * p.x_stride, p.n, -infinity());
    T* out = static_cast<T*>(p.out) + r * p.out_stride;

    const u32 k = p.top_k.get(r);
    float cutoff = -infinity();
    if (k < p.n) {
        const float own = row.max();
        const i32 bound = k <= kThreads / 2 ? reached_by<kThreads>(k, own) : kLeastKey;
        const Record all = ex.all<R::kWarps>(0.0, order(own), 0, bound);
        cutoff = kth_cutoff(row, ex, search, k, unorder(all.key), all.key2);
    }
    row.each([&](i32 unit) {
        write_unit<T>(row, unit, out, [&](float x) { return x < cutoff ? -infinity() : x; });
    });
}

} // namespace fir
