// levels.cuh: the last step of a cascade: merges the states that each level left for a row, and finishes the row.
//
//   o = sum_i 2^(m_i - m) o_i      d = sum_i 2^(m_i - m) d_i      m = max_i m_i; then as every row ends (state.cuh)
//
// grid   (ceil(rows / 4))   rows: query tokens x query heads
// block  128                a warp per row, lanes across columns; for (m, d), across states
// smem   none
// needs  sm_80
//
// A level that was cut leaves its parts as they are: a warp for each row adds them up on all multiprocessors, where the
// block that brings a part last would take 20 us for 16 parts of 64 rows.
//
// reads  states, md, parts
// writes out, lse
// twins  src/cpu/attention/merge.rs, src/cuda/attention/levels.rs
#pragma once
#include <fir/attention/state.cuh>

namespace fir {

/// A token's rows at a level that was cut, of one KV head: that of its head g and of part i is first + i * stride + g. No
/// parts: the row is among the states.
struct LevelParts {
  int first, stride, parts, pad;
};

template <class Variant>
struct LevelsParams {
  OutParams out;
  /// Rows of all levels, `[levels, rows]`, then those of parts: `dim` numbers and (m, d) each.
  const float* states;
  const float2* md;
  /// For each level where its `[tokens, kv_heads]` of LevelParts begin, counted in those; -1 where nothing was cut.
  const int* parts;
  unsigned rows, levels;
  int dim, qo_heads;
  /// Query heads per KV head.
  int group, pad;
  typename Variant::Params variant;
};

__device__ __forceinline__ long long from_lane(long long x, int lane) {
  const unsigned lo = __shfl_sync(~0u, unsigned(x), lane), hi = __shfl_sync(~0u, unsigned(x >> 32), lane);
  return static_cast<long long>((static_cast<unsigned long long>(hi) << 32) | lo);
}

template <class TO, class Variant>
__global__ void __launch_bounds__(128) merge_levels(const __grid_constant__ LevelsParams<Variant> p) {
  constexpr int kColumns = 4;  // of a lane at a time
  start_next();
  wait_for_previous();
  const unsigned row = blockIdx.x * 4 + (threadIdx.x >> 5);
  if (row >= p.rows) return;
  const int lane = threadIdx.x & 31, token = row / p.qo_heads, qo_head = row % p.qo_heads, head = qo_head / p.group;
  WorkItem w{};
  w.q_start = token, w.tokens = 1;

  // Calls f(its row, its (m, d), how many) with a state in each lane, in order, 32 at a time. A load waits for the one before, so lanes
  // look at levels, then at states, side by side.
  auto states = [&](auto f) {
    for (unsigned l = 0; l < p.levels; l += 32) {
      const unsigned level = l + lane;
      long long start = static_cast<long long>(level) * p.rows + row;
      int stride = 0, count = level < p.levels ? 1 : 0;
      const int table = level < p.levels ? p.parts[level] : -1;
      if (table >= 0) {
        const LevelParts parts = reinterpret_cast<const LevelParts*>(p.parts)[table + static_cast<long long>(token) * (p.qo_heads / p.group) + head];
        if (parts.parts > 0) {
          start = static_cast<long long>(p.levels) * p.rows + parts.first + qo_head % p.group;
          stride = parts.stride, count = parts.parts;
        }
      }
      int end = count;
#pragma unroll
      for (int i = 1; i < 32; i *= 2) {
        const int before = __shfl_up_sync(~0u, end, i);
        if (lane >= i) end += before;
      }
      const int total = __shfl_sync(~0u, end, 31), here = min(32u, p.levels - l);
      for (int first = 0; first < total; first += 32) {
        int own = 0;
        for (int i = 0; i + 1 < here; ++i) own += __shfl_sync(~0u, end, i) <= first + lane ? 1 : 0;
        const int part = first + lane - __shfl_sync(~0u, end - count, own);
        const long long at = from_lane(start, own) + static_cast<long long>(part) * __shfl_sync(~0u, stride, own);
        f(at, first + lane < total ? p.md[at] : make_float2(neg_inf(), 0.0f), min(32, total - first));
      }
    }
  };
  float m = neg_inf();
  states([&](long long, float2 md, int) { m = fmaxf(m, md.x); });
#pragma unroll
  for (int i = 16; i > 0; i /= 2) m = fmaxf(m, __shfl_xor_sync(~0u, m, i));

  for (int column = 0; column < p.dim; column += 32 * kColumns) {
    float d = 0.0f, o[kColumns] = {};
    states([&](long long at, float2 md, int count) {
      const float mine = Variant::kSoftmax ? exp2_diff(md.x, m) : 1.0f, part = md.y * mine;
#pragma unroll 4
      for (int i = 0; i < count; ++i) {
        const float f = __shfl_sync(~0u, mine, i);
        const float* from = p.states + from_lane(at, i) * p.dim + column + lane;
        d += __shfl_sync(~0u, part, i);
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          const float x = column + lane + 32 * c < p.dim ? from[32 * c] : 0.0f;
          if (f != 0.0f) o[c] += f * x;
        }
      }
    });
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int at = column + lane + 32 * c;
      float one[1] = {o[c]};
      if (at < p.dim) finish_row<Variant, TO>(p.out, p.variant, w, head, p.group, qo_head % p.group, at, 1.0f, one, m, d);
    }
  }
}

}  // namespace fir
