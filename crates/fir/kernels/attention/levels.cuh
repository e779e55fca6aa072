// levels.cuh: the last step of a cascade: merges the states that each level left for a row, and finishes the row.
//
//   o = sum_l 2^(m_l - m) o_l      d = sum_l 2^(m_l - m) d_l      m = max_l m_l; then as every row ends (state.cuh)
//
// grid   (ceil(rows / 4))   rows: query tokens x query heads
// block  128                a warp per row, lanes across columns
// smem   none
// needs  sm_80
//
// reads  states, md
// writes out, lse
// twins  src/cpu/attention/merge.rs
#pragma once
#include <fir/attention/state.cuh>

namespace fir {

template <class Variant>
struct LevelsParams {
  /// Its scratch is not used.
  OutParams out;
  /// `[levels, rows, dim]` and `[levels, rows]`.
  const float* states;
  const float2* md;
  unsigned rows, levels;
  int dim, qo_heads;
  /// Query heads per KV head.
  int group, pad;
  typename Variant::Params variant;
};

template <class TO, class Variant>
__global__ void __launch_bounds__(128) merge_levels(const __grid_constant__ LevelsParams<Variant> p) {
  const unsigned row = blockIdx.x * 4 + (threadIdx.x >> 5);
  if (row >= p.rows) return;
  const int token = row / p.qo_heads, qo_head = row % p.qo_heads;
  WorkItem w{};
  w.q_start = token, w.tokens = 1;
  float m = neg_inf(), d = 0.0f;
  for (unsigned l = 0; l < p.levels; ++l) m = fmaxf(m, p.md[static_cast<size_t>(l) * p.rows + row].x);
  for (unsigned l = 0; l < p.levels; ++l) {
    const float2 md = p.md[static_cast<size_t>(l) * p.rows + row];
    d += md.y * exp2_diff(md.x, m);
  }
  for (int column = threadIdx.x & 31; column < p.dim; column += 32) {
    float o[1] = {0.0f};
    for (unsigned l = 0; l < p.levels; ++l) {
      const size_t at = static_cast<size_t>(l) * p.rows + row;
      const float f = Variant::kSoftmax ? exp2_diff(p.md[at].x, m) : 1.0f;
      if (f != 0.0f) o[0] += f * p.states[at * p.dim + column];
    }
    finish_row<Variant, TO>(p.out, p.variant, w, qo_head / p.group, p.group, qo_head % p.group, column, 1.0f, o, m, d);
  }
}

}  // namespace fir
