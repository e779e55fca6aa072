// levels.cuh: the last step of a cascade: merges the states that each level left for a row, and finishes the row.
//
//   o = sum_i 2^(m_i - m) o_i      d = sum_i 2^(m_i - m) d_i      m = max_i m_i; then as every row ends (state.cuh)
//
// grid   (ceil(rows / 4))   rows: query tokens x query heads
// block  128                a warp per row, lanes across columns; for (m, d), across the parts of a level
// smem   none
// needs  sm_80
//
// A level that was cut leaves its parts as they are: a warp for each row adds them up on all multiprocessors, where the
// block that brings a part last would take 20 us for 16 parts of 64 rows.
//
// reads  states, md, partial_o, partial_md, parts
// writes out, lse
// twins  src/cpu/attention/merge.rs, src/cuda/attention/levels.rs
#pragma once
#include <fir/attention/state.cuh>
#include <fir/base/reduce.cuh>

namespace fir {

/// A token's rows at a level that was cut, of one KV head: that of its head g and of part i is first + i * stride + g. No
/// parts: the row is among the states.
struct LevelParts {
  int first, stride, parts, pad;
};

template <class Variant>
struct LevelsParams {
  /// With the partial results of all levels.
  OutParams out;
  /// `[levels, rows, dim]` and `[levels, rows]`.
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

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int i = 16; i > 0; i /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, i));
  return x;
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

  // Calls f(o, md, rows from one to the next, how many) for every level.
  auto levels = [&](auto f) {
    for (unsigned l = 0; l < p.levels; ++l) {
      const int table = p.parts[l];
      if (table >= 0) {
        const LevelParts parts = reinterpret_cast<const LevelParts*>(p.parts)[table + token * (p.qo_heads / p.group) + head];
        const long long first = parts.first + qo_head % p.group;
        if (parts.parts > 0) {
          f(p.out.partial_o + first * p.dim, p.out.partial_md + first, parts.stride, parts.parts);
          continue;
        }
      }
      const size_t at = static_cast<size_t>(l) * p.rows + row;
      f(p.states + at * p.dim, p.md + at, 0, 1);
    }
  };
  float m = neg_inf();
  levels([&](const float*, const float2* md, long long stride, int count) {
    for (int i = lane; i < count; i += 32) m = fmaxf(m, md[i * stride].x);
  });
  m = warp_max(m);

  for (int column = 0; column < p.dim; column += 32 * kColumns) {
    float d = 0.0f, o[kColumns] = {};
    levels([&](const float* x, const float2* md, long long stride, int count) {
      for (int from = 0; from < count; from += 32) {
        const float2 own = from + lane < count ? md[(from + lane) * stride] : make_float2(neg_inf(), 0.0f);
        const float mine = Variant::kSoftmax ? exp2_diff(own.x, m) : 1.0f;
        d += warp_sum(own.y * mine, 32);
        const int here = min(32, count - from);
#pragma unroll 4
        for (int i = 0; i < here; ++i) {
          const float f = __shfl_sync(~0u, mine, i);
          const float* from_row = x + (from + i) * stride * p.dim + column + lane;
#pragma unroll
          for (int c = 0; c < kColumns; ++c) {
            const float v = column + lane + 32 * c < p.dim ? from_row[32 * c] : 0.0f;
            if (f != 0.0f) o[c] += f * v;
          }
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
