// select.cuh: thresholds of a row without sorting it, and a draw from what passes them, by one cluster.
//
//   kth_cutoff   the k-th largest number
//   mass_cutoff  the largest element with  sum of elements >= it  at least `target`
//
// Both narrow a bracket [lo, hi) of keys (floats as integers in the same order) that holds the cutoff:
//
//   1. histogram   each block counts its elements in 4,096 bins of the bracket (shared memory, integer atomics); block r
//                  adds up bins r * 4096 / C .. of all blocks; the bin where the running count reaches k is the new bracket.
//                  For masses a bin's count bounds its mass by its smallest and largest float (0.4 % apart, 256 bins an
//                  octave), so the new bracket is one or a few bins.                                   3 cluster barriers
//   2. gather      elements in the bracket are listed (4,096 at most), those above are summed.           1 cluster barrier
//   3. finish      block 0 reads all lists and narrows by 2,048 bins a pass to a single key, with exact masses: in a bin
//                  all floats have one exponent, so its mass is an integer sum.                          1 cluster barrier
//
// 1 and 2 repeat while the bracket holds more than the list; ties end as a bracket of one key. A `k` up to half of
// the threads of a block begins at 2, from a lower bound that the threads' own maxima give. No result depends on the order of
// atomics: counts are integers, lists are histogrammed, float sums have a fixed order.
//
// smem   SearchSmem, 33 KB
// twins  src/cpu/select.rs (whose sums are in another order: a cutoff at the edge of rounding may differ by one element)
#pragma once
#include <fir/rows.cuh>

namespace fir {

constexpr u32 kBins = 4096, kCap = 4096, kFineBins = 2048;

struct SearchSmem {
    u32 hist[kBins];
    i32 list[kCap];
    double scan[2][32];
    u32 scan_count[32];
    double slice[2][kMaxCluster]; // lower and upper mass of each block's bins
    u32 slice_count[kMaxCluster];
    i32 found[4]; // the new hi and lo, and whether there is one: written by whichever block finds them
    u32 list_count;
    u32 fine[2]; // bin found, last bin that is not empty
    double fine_over; // mass above it
    u32 fine_count;   // count above it
    i32 result;
};

__device__ __forceinline__ float key_float(i32 key) { return __int_as_float(key); }

/// Exclusive prefix sum over the block's threads; `total` gets the sum of all. The end of a thread is exactly the
/// beginning of the next. `totals` is free again after the next barrier.
template <int kThreads>
__device__ __forceinline__ double block_prefix(double v, double* totals, double& incl, double& total) {
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    double in_warp = v;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const double t = __shfl_up_sync(kAll, in_warp, d);
        if (lane >= d) in_warp += t;
    }
    if (lane == 31) totals[warp] = in_warp;
    __syncthreads();
    double before = 0.0, all = 0.0;
    for (u32 w = 0; w < kThreads / 32; ++w) {
        if (w == warp) before = all;
        all += totals[w];
    }
    const double up = __shfl_up_sync(kAll, in_warp, 1);
    total = all;
    incl = before + in_warp;
    return lane == 0 ? before : before + up;
}

template <int kThreads>
__device__ __forceinline__ u32 block_prefix(u32 v, u32* totals, u32& incl, u32& total) {
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    u32 in_warp = v;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const u32 t = __shfl_up_sync(kAll, in_warp, d);
        if (lane >= d) in_warp += t;
    }
    if (lane == 31) totals[warp] = in_warp;
    __syncthreads();
    u32 before = 0, all = 0;
    for (u32 w = 0; w < kThreads / 32; ++w) {
        if (w == warp) before = all;
        all += totals[w];
    }
    total = all;
    incl = before + in_warp;
    return incl - v;
}

/// The bracket of a search, the same in all threads of the cluster. `over` and `over_count` are what lies at or above `hi`.
struct Bracket {
    i32 lo, hi;
    double over;
    u32 over_count;
};

/// Mass of `count` floats whose bits begin with `prefix` and whose other bits add up to `offsets`.
__device__ __forceinline__ double bin_mass(i32 prefix, u32 shift, u32 count, u32 offsets) {
    if (count == 0) return 0.0;
    const u32 base = static_cast<u32>(prefix) << shift, exponent = base >> 23;
    // A unit in the last place is 2^(max(exponent, 1) - 150): as bits of a double.
    const i64 ulp = static_cast<i64>((exponent > 0 ? exponent : 1) + 1023 - 150) << 52;
    return count * static_cast<double>(key_float(static_cast<i32>(base))) + offsets * __longlong_as_double(ulp);
}

    /// The cutoff among the `total` keys that the blocks listed, by block 0 alone. Not inlined: its registers are not to push out
/// the row's.
template <bool kMass, int kThreads>
__device__ __noinline__ i32 finish_listed(SearchSmem& s, Exchange ex, Bracket b, double target, u32 k, u32 total) {
        const u32 t = threadIdx.x;
        for (;;) {
            // Bins are aligned, so all keys of one have one exponent, and at most 2^20 wide: 4,096 offsets add up in 32 bits.
            const i32 top = b.hi - 1;
            const u32 range = static_cast<u32>(b.hi) - static_cast<u32>(b.lo);
            u32 shift = range < kFineBins ? 0 : 22 - __clz(range); // at most 1,024 bins and the two that alignment may add
            if (kMass) shift = min(shift, 20u);
            const u32 *const counts = s.hist, *const offsets = s.hist + kFineBins;
            for (u32 i = t; i < kBins / 4; i += kThreads) reinterpret_cast<uint4*>(s.hist)[i] = make_uint4(0, 0, 0, 0);
            if (t == 0) s.fine[0] = kFineBins, s.fine[1] = 0;
            __syncthreads();
            for (u32 i = t; i < total; i += kThreads) {
                u32 q = 0, at = i;
                while (at >= ex.block(q).count) at -= ex.block(q++).count;
                const i32 y = static_cast<i32>(peer_load(peer_address(&s.list[at], q)));
                if (static_cast<u32>(y) - static_cast<u32>(b.lo) < range) {
                    const u32 bin = (top >> shift) - (y >> shift);
                    atomicAdd(&s.hist[bin], 1u);
                    if (kMass) atomicAdd(&s.hist[kFineBins + bin], static_cast<u32>(y) & ((1u << shift) - 1));
                }
            }
            __syncthreads();
            constexpr u32 per = kFineBins / kThreads;
            const u32 first = t * per;
            if constexpr (kMass) {
                double mass[per], own = 0.0;
#pragma unroll
                for (u32 i = 0; i < per; ++i) {
                    mass[i] = bin_mass((top >> shift) - static_cast<i32>(first + i), shift, counts[first + i], offsets[first + i]);
                    own += mass[i];
                }
                double end, all;
                double m = b.over + block_prefix<kThreads>(own, s.scan[0], end, all);
#pragma unroll
                for (u32 i = 0; i < per; ++i) {
                    const double m2 = i + 1 == per ? b.over + end : fmin(b.over + end, m + mass[i]);
                    if (counts[first + i] > 0) {
                        atomicMax(&s.fine[1], first + i);
                        if (m < target && m2 >= target) s.fine[0] = first + i, s.fine_over = m;
                    }
                    m = m2;
                }
            } else {
                u32 own = 0, end, all;
#pragma unroll
                for (u32 i = 0; i < per; ++i) own += counts[first + i];
                u32 c = b.over_count + block_prefix<kThreads>(own, s.scan_count, end, all);
#pragma unroll
                for (u32 i = 0; i < per; ++i) {
                    const u32 c2 = c + counts[first + i];
                    if (counts[first + i] > 0) atomicMax(&s.fine[1], first + i);
                    if (c < k && c2 >= k) s.fine[0] = first + i, s.fine_count = c;
                    c = c2;
                }
            }
            __syncthreads();
            const bool reached = s.fine[0] < kFineBins;
            const u32 bin = reached ? s.fine[0] : s.fine[1]; // rounding may leave the target out of reach: the least element, then
            const i32 base = static_cast<i32>(static_cast<u32>((top >> shift) - static_cast<i32>(bin)) << shift);
            if (shift == 0) return base;
            const i32 lo = max(b.lo, base);
            const i32 hi = static_cast<i32>(min(static_cast<i64>(b.hi), static_cast<i64>(base) + (1ll << shift)));
            if (reached && kMass) b.over = s.fine_over;
            if (reached && !kMass) b.over_count = s.fine_count;
            b.lo = lo;
            b.hi = hi;
            __syncthreads();
        }
    }

template <bool kMass, class R>
struct Search {
    static constexpr int kThreads = R::kThreads, kWarps = R::kWarps;
    R& row;
    Exchange& ex;
    SearchSmem& s;
    double target; // kMass
    u32 k;         // else

    /// Positive floats are in the order of their bits; elements that are not positive never count.
    __device__ __forceinline__ static i32 key(float x) { return kMass ? __float_as_int(x) : order(x); }

    /// The cutoff's key. With `listed` the bracket is thought to hold few elements already.
    __device__ __forceinline__ i32 run(Bracket b, bool listed) {
        for (;;) {
            if (!listed && b.hi - 1 != b.lo && !narrow(b)) return b.lo;
            listed = false;
            const Record in = gather(b);
            if (kMass && b.over >= target) return b.hi;     // only by rounding
            if (in.count == 0 || b.hi - 1 == b.lo) return b.lo;
            if (in.count <= kCap) return finish(b, in.count);
        }
    }

    /// One histogram: a new bracket within the old. False if the row ends before the target.
    __device__ __forceinline__ bool narrow(Bracket& b) {
        const u32 t = threadIdx.x, range = static_cast<u32>(b.hi) - static_cast<u32>(b.lo);
        u32 shift = range <= kBins ? 0 : 20 - __clz(range - 1); // ceil(log2(range)) - 12
        if (kMass) shift = min(shift, 15u);
        const u32 window = shift == 20 || range <= (kBins << shift) ? range : kBins << shift;
        for (u32 i = t; i < kBins / 4; i += kThreads) reinterpret_cast<uint4*>(s.hist)[i] = make_uint4(0, 0, 0, 0);
        if (t < 4) s.found[t] = 0;
        __syncthreads();
        const i32 top = b.hi - 1;
        row.each([&](i32) {
#pragma unroll
            for (int i = 0; i < R::kPer; ++i) {
                const u32 d = static_cast<u32>(top) - static_cast<u32>(key(row.x[i]));
                if (d < window) atomicAdd(&s.hist[d >> shift], 1u);
            }
        });
        cluster_sync();

        // This block's bins, of all blocks. Nobody else reads them in this block's histogram, so the sums go there.
        const u32 slice = kBins / ex.size, per = slice >= kThreads ? slice / kThreads : 1;
        const u32 first = ex.rank * slice + t * per;
        const bool mine = t * per < slice;
        u32 count = 0;
        double low = 0.0, high = 0.0;
        if (mine) {
            for (u32 i = first; i < first + per; ++i) {
                u32 c = 0;
#pragma unroll 8
                for (u32 q = 0; q < ex.size; ++q) c += peer_load(peer_address(&s.hist[i], q));
                s.hist[i] = c;
                count += c;
                if (kMass) {
                    low += c * static_cast<double>(key_float(bin_low(b, i, shift)));
                    high += c * static_cast<double>(key_float(bin_high(b, i, shift)));
                }
            }
        }
        u32 begin_count = 0, end_count = 0, all_count = 0;
        double begin_low = 0.0, end_low = 0.0, all_low = 0.0, begin_high = 0.0, end_high = 0.0, all_high = 0.0;
        if constexpr (kMass) {
            begin_low = block_prefix<kThreads>(low, s.scan[0], end_low, all_low);
            begin_high = block_prefix<kThreads>(high, s.scan[1], end_high, all_high);
        } else {
            begin_count = block_prefix<kThreads>(count, s.scan_count, end_count, all_count);
        }
        if (t < ex.size) {
            if constexpr (kMass) {
                peer_store(peer_address(&s.slice[0][ex.rank], t), static_cast<u64>(__double_as_longlong(all_low)));
                peer_store(peer_address(&s.slice[1][ex.rank], t), static_cast<u64>(__double_as_longlong(all_high)));
            } else {
                peer_store(peer_address(&s.slice_count[ex.rank], t), all_count);
            }
        }
        cluster_sync();
        if constexpr (kMass) {
            double base_low = b.over, base_high = b.over;
            for (u32 q = 0; q < ex.rank; ++q) {
                base_low += s.slice[0][q];
                base_high += s.slice[1][q];
            }
            // Sums within and across bins are rounded; a millionth covers them.
            const double sure = target * (1.0 + 1e-6), maybe = target * (1.0 - 1e-6);
            double l = base_low + begin_low, h = base_high + begin_high;
            if (mine) {
                for (u32 i = first; i < first + per; ++i) {
                    const u32 c = s.hist[i];
                    const bool last = i + 1 == first + per;
                    const double l_end = base_low + end_low, h_end = base_high + end_high;
                    const double l2 = last ? l_end : fmin(l_end, l + c * static_cast<double>(key_float(bin_low(b, i, shift))));
                    const double h2 = last ? h_end : fmin(h_end, h + c * static_cast<double>(key_float(bin_high(b, i, shift))));
                    if (h < maybe && h2 >= maybe) tell(0, bin_high(b, i, shift) + 1);
                    if (l < sure && l2 >= sure) tell(1, bin_low(b, i, shift));
                    l = l2;
                    h = h2;
                }
            }
        } else {
            u32 c = b.over_count + begin_count;
            for (u32 q = 0; q < ex.rank; ++q) c += s.slice_count[q];
            if (mine) {
                for (u32 i = first; i < first + per; ++i) {
                    const u32 c2 = c + s.hist[i];
                    if (c < k && c2 >= k) {
                        tell(0, bin_high(b, i, shift) + 1);
                        tell(1, bin_low(b, i, shift));
                    }
                    c = c2;
                }
            }
        }
        cluster_sync();
        const bool has_hi = s.found[2] != 0, has_lo = s.found[3] != 0;
        if (has_hi) {
            b.hi = s.found[0];
            if (has_lo) b.lo = s.found[1];
            return true;
        }
        if (window == range) return false;
        b.hi = static_cast<i32>(static_cast<u32>(b.hi) - window);
        return true;
    }

    /// Smallest and largest key of bin `i`; bins count downwards from `hi - 1`.
    __device__ __forceinline__ static i32 bin_high(const Bracket& b, u32 i, u32 shift) {
        const u32 range = static_cast<u32>(b.hi) - static_cast<u32>(b.lo);
        const u64 down = min(static_cast<u64>(i) << shift, static_cast<u64>(range - 1));
        return static_cast<i32>(static_cast<u32>(b.hi) - 1u - static_cast<u32>(down));
    }
    __device__ __forceinline__ static i32 bin_low(const Bracket& b, u32 i, u32 shift) {
        const u32 range = static_cast<u32>(b.hi) - static_cast<u32>(b.lo);
        const u64 down = min(static_cast<u64>(i + 1) << shift, static_cast<u64>(range));
        return static_cast<i32>(static_cast<u32>(b.hi) - static_cast<u32>(down));
    }

    /// Writes a find into every block: by one thread of the cluster.
    __device__ __forceinline__ void tell(u32 what, i32 value) {
        for (u32 q = 0; q < ex.size; ++q) {
            peer_store(peer_address(&s.found[what], q), static_cast<u32>(value));
            peer_store(peer_address(&s.found[2 + what], q), 1u);
        }
    }

    /// Lists the elements of the bracket and measures what lies above it.
    __device__ __forceinline__ Record gather(Bracket& b) {
        if (threadIdx.x == 0) s.list_count = 0;
        __syncthreads();
        double over = 0.0;
        u32 in = 0, above = 0;
        const u32 range = static_cast<u32>(b.hi) - static_cast<u32>(b.lo);
        row.each([&](i32) {
            float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
            u32 c = 0;
#pragma unroll
            for (int i = 0; i < R::kPer; ++i) {
                const i32 y = key(row.x[i]);
                c += static_cast<u32>(y) - static_cast<u32>(b.lo) < range;
                if (kMass) {
                    if (y >= b.hi) sum[i & 3] += row.x[i];
                } else {
                    above += y >= b.hi && y <= 0x7f800000; // NaN is beyond infinity
                }
            }
            if (kMass) {
                float total = (sum[0] + sum[1]) + (sum[2] + sum[3]);
#pragma unroll
                for (int d = 16; d > 0; d /= 2) total += __shfl_xor_sync(kAll, total, d);
                over += total;
            }
            in += c;
            if (c > 0) {
                u32 at = atomicAdd(&s.list_count, c);
                row.forget();
#pragma unroll
                for (int i = 0; i < R::kPer; ++i) {
                    const i32 y = key(row.x[i]);
                    if (static_cast<u32>(y) - static_cast<u32>(b.lo) < range) {
                        if (at < kCap) s.list[at] = y;
                        ++at;
                    }
                }
            }
        });
        // A count above travels as the sum, exactly.
        const Record r = ex.all<kWarps>(kMass ? over : static_cast<double>(__reduce_add_sync(kAll, above)), 0, in);
        if (kMass) b.over = r.sum;
        else b.over_count = static_cast<u32>(r.sum);
        return r;
    }

    /// Block 0 finds the key among the `total` listed elements; the others wait for it.
    __device__ __forceinline__ i32 finish(Bracket b, u32 total) {
        if (ex.rank == 0) {
            const i32 found = finish_listed<kMass, kThreads>(s, ex, b, target, k, total);
            if (threadIdx.x < ex.size) peer_store(peer_address(&s.result, threadIdx.x), static_cast<u32>(found));
        }
        cluster_sync();
        return s.result;
    }
};

/// A key that at least `k` elements of this block reach, from the maxima of its threads; the least where there is none.
/// 16 rounds, for sign, exponent and 7 bits: few more elements than needed lie above, and the search is exact later.
template <int kThreads>
__device__ __forceinline__ i32 reached_by(u32 k, float thread_max) {
    const u32 mine = static_cast<u32>(order(thread_max)) ^ 0x80000000u;
    u32 bound = 0;
    for (u32 bit = 0x80000000u; bit >= 0x10000u; bit >>= 1)
        if (static_cast<u32>(__syncthreads_count(mine >= (bound | bit))) >= k) bound |= bit;
    return max(kLeastKey, static_cast<i32>(bound ^ 0x80000000u));
}

/// The k-th largest of the row's numbers; -inf if there are fewer. `bound` is a key that `k` elements reach, if `k` is at
/// most half of the block's threads.
template <class R>
__device__ __forceinline__ float kth_cutoff(R& row, Exchange& ex, SearchSmem& s, u32 k, float max, i32 bound) {
    if (k >= row.n) return -infinity();
    Search<false, R> search{row, ex, s, 0.0, k};
    return unorder(search.run(Bracket{bound, order(max) + 1, 0.0, 0}, bound != kLeastKey));
}

/// The largest positive element with at least the mass `target` at and above it. `few`: the row has few positive elements.
template <class R>
__device__ __forceinline__ float mass_cutoff(R& row, Exchange& ex, SearchSmem& s, double target, float max, bool few) {
    Search<true, R> search{row, ex, s, target, 0};
    return key_float(search.run(Bracket{1, __float_as_int(max) + 1, 0.0, 0}, few));
}

/// The element in whose share of the mass `u` falls, among those from `cutoff` up: the first whose running sum exceeds
/// `u * total`. The thread that finds it calls `found(place)`; returns whether the row was a distribution. The last
/// exchange of a kernel.
template <class R, class F>
__device__ __forceinline__ bool draw(R& row, Exchange& ex, float cutoff, const float& u, F found) {
    const double total = ex.all<R::kWarps>(row.sum(cutoff), 0, 0).sum;
    if (!(total > 0.0 && total < static_cast<double>(infinity()))) return false;
    const double goal = static_cast<double>(u) * total;
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
    for (u32 w = 0; w < R::kWarps; ++w) {
        const double sum = ex.warp(w).sum;
        if (sum > 0.0) {
            owner = w;
            at = below;
            below += sum;
            if (below > goal) break;
        }
    }
    if (owner != threadIdx.x >> 5) return true;
    below = at;
    // This warp: its units in order, then the groups of 32 * kVec elements of the one that holds it.
    const u32 lane = row.lane();
    bool done = false;
    u32 last = 0;
    row.each([&](i32 unit) {
        if (done) return;
        if (!R::kResident) {
            const float sum = row.unit_sum(cutoff);
            if (below + sum <= goal && unit + 1 < row.unit_end) {
                below += sum;
#pragma unroll
                for (int i = 0; i < R::kPer; ++i)
                    if (row.x[i] >= cutoff) last = row.place(unit, i / R::kVec) + i % R::kVec;
                return;
            }
        }
#pragma unroll
        for (int j = 0; j < R::kLoads; ++j) {
            double own = 0.0;
#pragma unroll
            for (int e = 0; e < R::kVec; ++e) {
                const float x = row.x[j * R::kVec + e];
                if (x >= cutoff) own += x, last = row.place(unit, j) + e;
            }
            double upto = own;
#pragma unroll
            for (int d = 1; d < 32; d *= 2) {
                const double v = __shfl_up_sync(kAll, upto, d);
                if (lane >= d) upto += v;
            }
            // Not a lane without mass: sums of neighbours are rounded each in its own way.
            const u32 over = __ballot_sync(kAll, own > 0.0 && below + upto > goal);
            if (over != 0 && !done) {
                if (lane == __ffs(over) - 1) {
                    double b = below + (upto - own);
                    u32 place = 0;
                    bool stop = false;
#pragma unroll
                    for (int e = 0; e < R::kVec; ++e) {
                        const float x = row.x[j * R::kVec + e];
                        if (x >= cutoff && !stop) {
                            place = row.place(unit, j) + e;
                            b += x;
                            stop = b > goal;
                        }
                    }
                    found(place);
                }
                done = true;
            }
            below += __shfl_sync(kAll, upto, 31);
        }
    });
    // Rounding may leave the running sum short of the unit's: the last element that passes, then.
    if (!done) {
        last = __reduce_max_sync(kAll, last);
        if (lane == 0) found(last);
    }
    return true;
}

} // namespace fir
