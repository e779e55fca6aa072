// rows.cuh: a row of floats held by the registers of a cluster, and sums and maxima over it.
//
// A row is cut into units of 32 * kPer elements; a warp reads a unit with 16-byte loads, 512 bytes at a time, and lane l holds
//
//   x[j * kVec + e] = row[unit * 32 * kPer + (j * 32 + l) * kVec + e]           kVec = 16 / sizeof(T)
//
// so units, and the f32 sums within them, depend on the row alone: not on its alignment, the batch, the threads or the
// cluster. Across units sums are f64. Blocks, and warps within them, own consecutive units.
//
// kResident: every warp has at most one unit, read once (128,256 f32 = 126 units of 1,024 = a cluster of 8 blocks of 16
// warps, 32 values a thread). Otherwise every pass reads the row anew: longer rows, and everything below sm_90.
#pragma once
#include <fir/base/cluster.cuh>

namespace fir {

struct f16 {
    unsigned short bits;
};
struct bf16 {
    unsigned short bits;
};

constexpr u32 kAll = 0xffffffffu;
constexpr int kMaxCluster = 16;

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }
__device__ __forceinline__ float not_a_number() { return __int_as_float(0x7fc00000); }

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16 x) { return __int_as_float(static_cast<i32>(static_cast<u32>(x.bits) << 16)); }
__device__ __forceinline__ float to_float(f16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}
template <class T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) { return x; }
template <>
__device__ __forceinline__ f16 from_float<f16>(float x) {
    f16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}
template <>
__device__ __forceinline__ bf16 from_float<bf16>(float x) {
    bf16 y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}

/// A value for every row, or one for all.
template <class T>
struct PerRow {
    const T* each;
    T one;
    __device__ __forceinline__ T get(i64 row) const { return each ? each[row] : one; }
};

/// 16 bytes that are read once, zeros where `ok` is false. The predicate is inside, so that all loads of a unit are in
/// flight before the first use.
__device__ __forceinline__ void load16(const void* p, bool ok, u32 (&x)[4]) {
    asm("{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\nmov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;\n"
        "@p ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
        : "=&r"(x[0]), "=&r"(x[1]), "=&r"(x[2]), "=&r"(x[3])
        : "l"(p), "r"(static_cast<i32>(ok)));
}

__device__ __forceinline__ void store16(void* p, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("st.global.L1::no_allocate.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

__device__ __forceinline__ void widen(const u32 (&raw)[4], float* x, float) {
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = __int_as_float(static_cast<i32>(raw[i]));
}
template <class T>
__device__ __forceinline__ void widen(const u32 (&raw)[4], float* x, T) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        x[2 * i] = to_float(T{static_cast<unsigned short>(raw[i] & 0xffff)});
        x[2 * i + 1] = to_float(T{static_cast<unsigned short>(raw[i] >> 16)});
    }
}

/// 2^x within 2 ulp; results below 2^-126 are 0.
__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/// What becomes of the numbers of a row on their way to weights.
struct Stage {
    enum Kind : i32 { kRaw, kCut, kWeights };
    Kind kind;
    float cut;        // what is less becomes 0
    float max, scale; // kWeights: 2^((x - max) * scale); with max = inf, 1 for the infinite
    __device__ __forceinline__ float operator()(float x) const {
        if (kind == kWeights) {
            float w = exp2_approx((x - max) * scale);
            if (max == infinity()) w = x == max ? 1.0f : x < max ? 0.0f : x;
            return x < cut ? 0.0f : w;
        }
        return kind == kCut && x < cut ? 0.0f : x;
    }
};

/// What else is done to a unit once it is read: nothing.
struct AsRead {
    template <class R>
    __device__ __forceinline__ void operator()(R&, i32) const {}
};

template <class T_, int kThreads_, int kPer_, bool kResident_, class Fix = AsRead>
struct Row {
    using T = T_;
    static constexpr int kThreads = kThreads_, kWarps = kThreads / 32, kPer = kPer_;
    static constexpr bool kResident = kResident_;
    static constexpr int kVec = 16 / sizeof(T), kLoads = kPer / kVec, kUnit = 32 * kPer;

    const T* p;
    u32 n;
    i32 unit, unit_end; // this warp's
    float pad;          // stands behind the row's end
    Stage stage;
    Fix fix;
    float x[kPer];

    __device__ __forceinline__ static u32 lane() { return threadIdx.x & 31; }
    __device__ __forceinline__ static i32 warp() { return threadIdx.x >> 5; }

    __device__ __forceinline__ void open(const T* row, u32 length, float padding) {
        p = row;
        n = length;
        pad = padding;
        stage = Stage{Stage::kRaw, 0.0f, 0.0f, 0.0f};
        const i32 units = static_cast<i32>((n + (kUnit - 1u)) / kUnit);
        const i32 blocks = cluster_size();
        const i32 per_block = (units + blocks - 1) / blocks, per_warp = (per_block + kWarps - 1) / kWarps;
        const i32 end = min(units, (static_cast<i32>(cluster_rank()) + 1) * per_block);
        unit = static_cast<i32>(cluster_rank()) * per_block + warp() * per_warp;
        unit_end = min(end, unit + per_warp);
        if constexpr (kResident) {
            load(unit < unit_end ? unit : -1);
            fix(*this, unit);
        }
    }

    /// Place in the row of `x[j * kVec]`.
    __device__ __forceinline__ static u32 place(i32 unit, int j) {
        return static_cast<u32>(unit) * kUnit + (j * 32 + lane()) * kVec;
    }

    __device__ __forceinline__ void load(i32 unit) {
        if (unit < 0) {
#pragma unroll
            for (int i = 0; i < kPer; ++i) x[i] = pad;
        } else if ((reinterpret_cast<u64>(p) & 15) == 0) {
            u32 raw[kLoads][4];
#pragma unroll
            for (int j = 0; j < kLoads; ++j) {
                const u32 i = place(unit, j);
                load16(p + i, i + kVec <= n, raw[j]);
            }
#pragma unroll
            for (int j = 0; j < kLoads; ++j) widen(raw[j], x + j * kVec, T{});
            if ((static_cast<u32>(unit) + 1) * kUnit > n) { // the last unit
#pragma unroll
                for (int j = 0; j < kLoads; ++j)
#pragma unroll
                    for (int e = 0; e < kVec; ++e) {
                        const u32 i = place(unit, j);
                        if (i + kVec > n) x[j * kVec + e] = i + e < n ? to_float(p[i + e]) : pad;
                    }
            }
        } else { // a row that does not begin at 16 bytes: the same elements one by one, through L1
#pragma unroll
            for (int j = 0; j < kLoads; ++j)
#pragma unroll
                for (int e = 0; e < kVec; ++e) {
                    const u32 i = place(unit, j) + e;
                    x[j * kVec + e] = i < n ? to_float(p[i]) : pad;
                }
        }
    }

    /// Changes what the later passes see: at once for numbers in registers, on every reading otherwise.
    __device__ __forceinline__ void become(Stage s) {
        stage = s;
        if constexpr (kResident) {
#pragma unroll
            for (int i = 0; i < kPer; ++i) x[i] = s(x[i]);
        }
    }

    /// Makes the compiler forget what it derived from `x`: without it keys and comparisons of one pass stay alive for the next, 32
    /// registers more, and are spilled.
    __device__ __forceinline__ void forget() {
#pragma unroll
        for (int i = 0; i < kPer; ++i) asm volatile("" : "+f"(x[i]));
    }

    /// Calls `f(unit)` with `x` filled for every unit of this warp; in all lanes.
    template <class F>
    __device__ __forceinline__ void each(F f) {
        if constexpr (kResident) {
            forget();
            f(unit);
        } else {
            for (i32 u = unit; u < unit_end; ++u) {
                load(u);
                fix(*this, u);
#pragma unroll
                for (int i = 0; i < kPer; ++i) x[i] = stage(x[i]);
                f(u);
            }
        }
    }

    __device__ __forceinline__ float max() {
        float m = -infinity();
        each([&](i32) {
#pragma unroll
            for (int i = 0; i < kPer; ++i) m = fmaxf(m, x[i]); // fmaxf drops NaN
        });
        return m;
    }

    /// Sum of this warp's elements from `cutoff` (positive) up; NaN if there is one. The same in all lanes.
    __device__ __forceinline__ double sum(float cutoff) {
        double all = 0.0;
        each([&](i32) { all += unit_sum(cutoff); });
        return all;
    }

    /// Sum of what `s` would make of this warp's elements, none of them negative.
    __device__ __forceinline__ double sum_of(Stage s) {
        double all = 0.0;
        each([&](i32) {
            float t = 0.0f;
#pragma unroll
            for (int i = 0; i < kPer; ++i) t += s(x[i]);
#pragma unroll
            for (int d = 16; d > 0; d /= 2) t += __shfl_xor_sync(kAll, t, d);
            all += t;
        });
        return all;
    }

    __device__ __forceinline__ float unit_sum(float cutoff) const {
        float s[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int i = 0; i < kPer; ++i)
            if (!(x[i] < cutoff)) s[i & 3] += x[i];
        float t = (s[0] + s[1]) + (s[2] + s[3]);
#pragma unroll
        for (int d = 16; d > 0; d /= 2) t += __shfl_xor_sync(kAll, t, d);
        return t;
    }
};

/// Floats as integers in the same order; an involution. NaN lies outside of [-inf, +inf].
__device__ __forceinline__ i32 order(float x) {
    const i32 b = __float_as_int(x);
    return b ^ ((b >> 31) & 0x7fffffff);
}
__device__ __forceinline__ float unorder(i32 k) { return __int_as_float(k ^ ((k >> 31) & 0x7fffffff)); }

constexpr i32 kLeastKey = static_cast<i32>(0x807fffffu); // order(-inf)

/// What blocks tell each other, combined over a cluster.
struct Record {
    double sum;
    i32 key;   // largest
    u32 count; // summed
    i32 key2;  // largest
    i32 unused;
};

struct RecordSmem {
    Record warps[32];
    Record slots[2][kMaxCluster];
};

/// Reductions over the cluster, one barrier each. Two sets of slots in turn: a block that is ahead writes the other set,
/// and cannot be two ahead.
struct Exchange {
    RecordSmem* s;
    u32 rank, size, phase;

    __device__ __forceinline__ void open(RecordSmem* smem) {
        s = smem;
        rank = cluster_rank();
        size = cluster_size();
        phase = 0;
    }

    /// Over all lanes of the cluster: the largest keys and the sum of the counts; of `sum`, which is the same in all
    /// lanes of a warp already, the sum over warps.
    template <int kWarps>
    __device__ __forceinline__ Record all(double sum, i32 key, u32 count, i32 key2 = 0) {
        const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
        key = __reduce_max_sync(kAll, key);
        key2 = __reduce_max_sync(kAll, key2);
        count = __reduce_add_sync(kAll, count);
        if (lane == 0) s->warps[warp] = Record{sum, key, count, key2, 0};
        __syncthreads();
        phase ^= 1;
        if (warp == 0) {
            const Record r = combine(s->warps, kWarps);
            if (lane < size) {
                const u32 to = peer_address(&s->slots[phase][rank], lane);
                peer_store(to, static_cast<u64>(__double_as_longlong(r.sum)));
                peer_store(to + 8, static_cast<u64>(static_cast<u32>(r.key)) | static_cast<u64>(r.count) << 32);
                peer_store(to + 16, static_cast<u32>(r.key2));
            }
        }
        cluster_sync();
        return combine(s->slots[phase], size);
    }

    __device__ __forceinline__ static Record combine(const Record* records, u32 n) {
        constexpr i32 kLeast = static_cast<i32>(0x80000000u);
        const u32 lane = threadIdx.x & 31;
        Record r{0.0, kLeast, 0, kLeast, 0};
        if (lane < n) r = records[lane];
        r.key = __reduce_max_sync(kAll, r.key);
        r.key2 = __reduce_max_sync(kAll, r.key2);
        r.count = __reduce_add_sync(kAll, r.count);
#pragma unroll
        for (int d = 16; d > 0; d /= 2) r.sum += __shfl_xor_sync(kAll, r.sum, d);
        return r;
    }

    /// The last exchange's record of block `q`, of warp `w` of this block.
    __device__ __forceinline__ const Record& block(u32 q) const { return s->slots[phase][q]; }
    __device__ __forceinline__ const Record& warp(u32 w) const { return s->warps[w]; }
};

} // namespace fir
