// page.cuh: where tokens go in a paged cache, and the small vectors around it.
//
//   place(t) = (slot / page_size, slot % page_size)                        slots given
//            = (pages[position / page_size], position % page_size)         of the token's request
//   positions     requests[t] = r, positions[t] = seq_lens[r] - (indptr[r + 1] - t)       for the tokens t of request r
//   seq_lens      out[r] = (pages - 1) * page_size + last_page_len[r], 0 without pages
//
// grid   blocks of 256
// block  256: an element each
// needs  sm_80
//
// reads  the vectors; a page id outside the pool counts as none
// writes the outputs
// twins  src/ops/page.rs
#pragma once
#include <fir/rope.cuh>

namespace fir {

struct Slots {
  const void* slots;          // null: from what follows
  const void* requests;       // of each token
  const void* positions;      // of each token, in its request
  const u32* table;           // lengths of the requests in tokens, then where each one's pages start
  const i32* ids;             // of the pages
  u64 slots_stride, requests_stride, positions_stride;
  u64 pages;                  // of the pool
  u32 page_size, batch;
  u32 wide_slots, wide_requests, wide_positions;
  u32 unused;
};

struct Place {
  u32 page, row;
  bool some;
};

// A token without a place is not written: a negative slot, or one outside the cache; a position past the request's end.
__device__ __forceinline__ Place place_of(const Slots& s, u64 token) {
  if (s.slots) {
    const i64 slot = load_integer(s.slots, token * s.slots_stride, s.wide_slots);
    if (slot < 0 || u64(slot) >= s.pages * s.page_size) return {0, 0, false};
    // Pages are counted in 32 bits: the host refuses more.
    return {u32(u64(slot) / s.page_size), u32(u64(slot) % s.page_size), true};
  }
  const i64 request = load_integer(s.requests, token * s.requests_stride, s.wide_requests);
  const i64 position = load_integer(s.positions, token * s.positions_stride, s.wide_positions);
  if (request < 0 || request >= s.batch || position < 0 || position >= s.table[request]) return {0, 0, false};
  const u32 page = u32(s.ids[s.table[s.batch + request] + u32(position) / s.page_size]);
  return {page, u32(position) % s.page_size, page < s.pages};
}

struct PageParams {
  const i32* indptr;
  const void* lens;  // seq_lens, or last_page_len
  i32* first;        // batch_indices, or out
  i32* second;       // positions
  u64 lens_stride, first_stride, second_stride;
  u32 batch, count, wide, page_size;
};

template <class = void>
__global__ void __launch_bounds__(256) batch_indices_positions(const __grid_constant__ PageParams p) {
  wait_for_previous();
  start_next();
  const u32 t = blockIdx.x * 256 + threadIdx.x;
  if (t >= p.count) return;
  u32 low = 0, high = p.batch;  // the last request that starts at or before t
  while (high - low > 1) {
    const u32 middle = low + (high - low) / 2;
    if (p.indptr[middle] <= i64(t)) low = middle;
    else high = middle;
  }
  p.first[t * p.first_stride] = i32(low);
  p.second[t * p.second_stride] = i32(load_integer(p.lens, low * p.lens_stride, p.wide) - (p.indptr[low + 1] - i64(t)));
}

template <class = void>
__global__ void __launch_bounds__(256) seq_lens(const __grid_constant__ PageParams p) {
  wait_for_previous();
  start_next();
  const u32 r = blockIdx.x * 256 + threadIdx.x;
  if (r >= p.batch) return;
  const i64 pages = i64(p.indptr[r + 1]) - p.indptr[r];
  p.first[r * p.first_stride] = pages == 0 ? 0 : i32((pages - 1) * p.page_size + load_integer(p.lens, r * p.lens_stride, p.wide));
}

}  // namespace fir
