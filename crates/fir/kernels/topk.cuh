// topk.cuh: the k largest elements of rows: values and places, or places turned into those of a KV cache.
//
//   indices[r]   the places for which fewer than k elements are greater, or equal and before them; ascending, or (sorted)
//                by falling value and rising place; values[r, j] = x[r, indices[r, j]]
//   kRagged      offsets[r] + place,  place counted from starts[r], among lens[r] elements
//   kPaged       page_table[requests[r], page_starts[r] + place / page_size] * page_size + place % page_size
//
// grid   (rows * C)       a cluster of C blocks per row, as in sampling.cuh
// block  512
// smem   static           10 KB
//        dynamic          kResident: the row (rows.cuh); sorted: 8 * room bytes at least, to sort that many on chip
// needs  sm_80; clusters from sm_90
//
// reads  x, once where kResident; page ids only where a chosen place needs them, rows and columns clamped to the table
// writes values, indices, raw: all k of a row (-inf and -1 behind the last number; -1 also where a page id is negative or its
//        place is no i32)
// twins  src/cpu/topk.rs, src/reference/topk.rs: the same places on every run and device
#pragma once
#include <fir/select.cuh>

namespace fir {

enum class Places : i32 { kPlain, kRagged, kPaged };

struct TopKParams {
  const void* x;
  void* values;  // of x's type; may be null
  void* indices; // i32 or i64
  i32* raw;      // places before the translation; may be null
  i64 x_stride, values_stride, indices_stride, raw_stride;
  const i32 *lens, *starts;                    // may be null: n and 0
  const i32 *offsets;                          // kRagged
  const i32 *page_table, *requests, *page_starts; // kPaged; the last two may be null: r, and starts
  i64 table_stride;
  u32 n, k;
  u32 table_rows, table_columns;
  u32 page_shift; // page_size = 1 << page_shift
  u32 room; // entries that dynamic shared memory has room for
  i32 wide, sorted;
  Places places;
  i32 unused;
};

// Sorts `n` entries so that `less(i, j)` holds for no i > j: a bitonic network whose comparators all point one way, so
// that entries past the end need not exist. `threads` work, `t` being this one; `sync` is their barrier.
template <class Less, class Swap, class Sync>
__device__ __forceinline__ void sort_network(u32 n, u32 t, u32 threads, Less less, Swap swap, Sync sync) {
  for (u32 size = 2; size / 2 < n; size *= 2) {
    for (u32 stride = size / 2; stride > 0; stride /= 2) {
      const bool mirror = stride == size / 2;
      for (u32 c = t; c < (n + size - 1) / size * (size / 2); c += threads) {
        const u32 i = c / stride * stride * 2 + c % stride;
        const u32 j = mirror ? i ^ (size - 1) : i + stride;
        if (j < n && less(j, i)) swap(i, j);
      }
      sync();
    }
  }
}

template <class T, bool kResident>
__global__ void __launch_bounds__(kThreads, kResident ? kBlocks : 2) top_k(const __grid_constant__ TopKParams p) {
  __shared__ RecordSmem records;
  __shared__ SearchSmem search_smem;
  Exchange ex;
  ex.open(&records);
  Search search;
  search.open(&search_smem);
  const i64 r = blockIdx.x / ex.size;
  const u32 start = p.starts ? min(u32(p.starts[r]), p.n) : 0;
  const u32 len = p.lens ? min(u32(p.lens[r]), p.n - start) : p.n;
  Row<T, kResident> row;
  row.open(static_cast<const T*>(p.x) + r * p.x_stride + start, len, not_a_number(), dynamic_smem());

  // All numbers pass a cutoff of -inf, as equals.
  float cutoff = -infinity();
  if (p.k < len && p.k > 0) {
    const float own = row.max();
    const i32 bound = p.k <= kThreads ? reached_by(p.k, own) : kLeastKey;
    const Record all = ex.all(0.0, order(own), 0, bound);
    cutoff = kth_cutoff(row, ex, search, p.k, unorder(all.key), all.key2);
  }
  u32 greater = 0, equal = 0;
  row.each([&](u32, const float (&x)[4]) {
#pragma unroll
    for (u32 e = 0; e < 4; ++e) {
      greater += x[e] > cutoff;
      equal += x[e] == cutoff;
    }
  });
  const Record all = ex.all(double(__reduce_add_sync(kAll, greater)), 0, equal);
  const u32 above = u32(all.sum);
  const u32 ties = p.k - min(p.k, above); // so many equals, the first ones
  const u32 found = min(p.k, above) + min(ties, all.count);

  // What the blocks and warps before this one have.
  u32 g = 0, q = 0;
  for (u32 b = 0; b < ex.rank; ++b) g += u32(ex.block(b).sum), q += ex.block(b).count;
  for (u32 w = 0; w < threadIdx.x / 32; ++w) g += u32(ex.warp(w).sum), q += ex.warp(w).count;

  T* const values = static_cast<T*>(p.values) + r * p.values_stride;
  auto put_index = [&](u32 slot, i64 index) {
    if (p.wide) static_cast<i64*>(p.indices)[r * p.indices_stride + slot] = index;
    else static_cast<i32*>(p.indices)[r * p.indices_stride + slot] = i32(index);
  };
  auto put = [&](u32 slot, u32 place, float x) {
    if (slot >= p.k) return; // k = 0
    if (p.values) values[slot] = from_float<T>(x);
    if (p.raw) p.raw[r * p.raw_stride + slot] = i32(place);
    i64 index = place;
    if (p.places == Places::kRagged) index += p.offsets[r];
    if (p.places == Places::kPaged) {
      const u32 request = p.requests ? min(u32(p.requests[r]), p.table_rows - 1) : u32(r);
      const u32 first = p.page_starts ? u32(p.page_starts[r]) : start;
      const u32 column = min(first + (place >> p.page_shift), p.table_columns - 1);
      const i64 page = p.page_table[request * p.table_stride + column];
      index = (page << p.page_shift) + (place & ((1u << p.page_shift) - 1));
      if (page < 0 || index > 0x7fffffff) index = -1;
    }
    put_index(slot, index);
  };
  row.each([&](u32 place, const float (&x)[4]) {
    u32 mine = 0; // greater ones, and equal ones from bit 16 on
#pragma unroll
    for (u32 e = 0; e < 4; ++e) mine += (x[e] > cutoff ? 1u : 0u) + (x[e] == cutoff ? 0x10000u : 0u);
    if (!__any_sync(kAll, mine != 0)) return;
    u32 upto = mine;
#pragma unroll
    for (u32 d = 1; d < 32; d *= 2) {
      const u32 v = __shfl_up_sync(kAll, upto, d);
      if (lane_id() >= d) upto += v;
    }
    u32 my_g = g + ((upto - mine) & 0xffff), my_q = q + ((upto - mine) >> 16);
#pragma unroll
    for (u32 e = 0; e < 4; ++e) {
      if (x[e] > cutoff || (x[e] == cutoff && my_q < ties)) put(my_g + min(my_q, ties), place + e, x[e]);
      my_g += x[e] > cutoff;
      my_q += x[e] == cutoff;
    }
    const u32 group = __shfl_sync(kAll, upto, 31);
    g += group & 0xffff;
    q += group >> 16;
  });
  for (u32 slot = found + ex.rank * kThreads + threadIdx.x; slot < p.k; slot += ex.size * kThreads) {
    if (p.values) values[slot] = from_float<T>(-infinity());
    if (p.raw) p.raw[r * p.raw_stride + slot] = -1;
    put_index(slot, -1);
  }
  if (!p.sorted) return;

  // By falling value and rising place. kPlain only, so that indices are places.
  cluster_sync();
  auto index_at = [&](u32 slot) -> i64 {
    return p.wide ? static_cast<i64*>(p.indices)[r * p.indices_stride + slot]
            : i64(static_cast<i32*>(p.indices)[r * p.indices_stride + slot]);
  };
  // + 0: the zeros are equal.
  auto entry = [&](u32 slot) {
    const u32 value = u32(order(to_float(values[slot]) + 0.0f)) ^ 0x80000000u;
    return u64(~value) << 32 | u32(index_at(slot));
  };
  if (found <= p.room) {
    if (ex.rank != 0) return; // nobody reaches into another block any more
    u64* const entries = reinterpret_cast<u64*>(dynamic_smem()); // in the row's place
    for (u32 i = threadIdx.x; i < found; i += kThreads) entries[i] = entry(i);
    __syncthreads();
    sort_network(
      found, threadIdx.x, kThreads, [&](u32 i, u32 j) { return entries[i] < entries[j]; },
      [&](u32 i, u32 j) {
        const u64 t = entries[i];
        entries[i] = entries[j];
        entries[j] = t;
      },
      [] { __syncthreads(); });
    for (u32 i = threadIdx.x; i < found; i += kThreads) {
      values[i] = from_float<T>(unorder(i32(~u32(entries[i] >> 32) ^ 0x80000000u)));
      put_index(i, i64(entries[i] & 0xffffffffu));
    }
  } else { // in place, by all blocks
    sort_network(
      found, ex.rank * kThreads + threadIdx.x, ex.size * kThreads, [&](u32 i, u32 j) { return entry(i) < entry(j); },
      [&](u32 i, u32 j) {
        const T value = values[i];
        const i64 index = index_at(i);
        values[i] = values[j];
        put_index(i, index_at(j));
        values[j] = value;
        put_index(j, index);
      },
      [] { cluster_sync(); });
  }
}

}  // namespace fir
