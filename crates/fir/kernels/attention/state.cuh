// state.cuh: the work list, attention states in parts, and how a row ends.
//
// A unit of work is one KV head of one item: query rows (row = token * group + head in the group) against the positions
// kv_start..kv_end. A whole unit writes its output. A part leaves (o, m, d), not normalised, in scratch; the
// block that brings the last part of a head merges them all, in the order of the parts, so the bits do not depend on
// who was last. Nobody waits for anybody.
//
//   o = sum_i 2^(m_i - m) o_i      d = sum_i 2^(m_i - m) d_i      m = max_i m_i
//
// twins  src/plan/schedule.rs, src/ops/attention/merge.rs
#pragma once
#include <fir/attention/number.cuh>
#include <fir/attention/softmax.cuh>
#include <fir/attention/variant.cuh>

namespace fir {

/// A team's work on one query tile; 64 bytes. Worker b of teams of n starts with items[b / n], follows `next`, and does
/// every n-th head of each item from its b % n-th on: all of them when it is alone, one where a team has as many
/// workers as there are heads. prefill.cuh takes heads of items from a queue instead.
struct WorkItem {
  /// Request, as hooks see it.
  int request;
  /// First query token (row of q and out), and how many: at most the rows of a kernel's tile. 0 tokens: no work.
  int q_start, tokens;
  /// Index of the first query token within its request, and the request's numbers of query and KV tokens.
  int q_idx, q_len, kv_len;
  /// KV heads.
  int head_start, head_end;
  /// KV positions.
  int kv_start, kv_end;
  /// The request's place in `KvPool::indptr`, or what would stand there.
  int pages;
  /// First row of the partial results, head after head; -1 when the unit is whole.
  int partial;
  /// The merge of head_start; those of the following heads follow.
  int merge;
  /// The team's next item, -1 at the end.
  int next;
  /// Added to positions before hooks see them: levels of a cascade.
  int kv_base;
  /// Every row sees the positions kv_start..full_end, if there are any: no mask is asked there. Not past kv_end.
  int full_end;
};

/// Partial results of one head of a query tile: part i is at row first + i * stride.
struct MergeItem {
  int first, stride, parts;
  /// One of the items whose part it is.
  int item;
};

/// Where a query token stands in its whole request, for cascades, whose tiles mix requests.
struct TokenContext {
  int batch, q_idx, q_len, kv_len;
};

struct OutParams {
  unsigned char* out;
  /// Null: not wanted.
  float* lse;
  /// Strides of tokens and heads: bytes of `out`, elements of `lse`.
  long long out_token, out_head, lse_token, lse_head;
  /// Scratch: `[rows, dim_vo]` and `[rows]` of (m, d).
  float* partial_o;
  float2* partial_md;
  const MergeItem* merges;
  /// One per merge; 0 before and after every launch. Null: parts stay what they are.
  unsigned* counters;
  /// Null: the item's own request, q_idx and so on.
  const TokenContext* tokens;
};

/// An output type of rows that are not finished, for levels.cuh: `out` takes o as summed, in f32 and times the values'
/// scale, `lse` pairs (m, d), its strides in pairs.
struct State {
  static constexpr int kBits = 32;
};

/// What the rows of a part are multiplied by: they are merged and then get the values' scale, but for levels.cuh, to which a part
/// is as good as a whole.
template <class TO>
__device__ __forceinline__ float part_scale(float v_scale) {
  return Same<TO, State>::value ? v_scale : 1.0f;
}

/// Row `row` of a unit, as hooks see it.
__device__ __forceinline__ RowContext row_context(const WorkItem& w, const TokenContext* tokens, int head, int group, int row) {
  const int token = row / group;
  RowContext c{w.request, w.q_idx + token, w.q_len, w.kv_len, head * group + row % group, head};
  if (tokens != nullptr) {
    const TokenContext t = tokens[w.q_start + min(token, w.tokens - 1)];
    c.batch = t.batch, c.q_idx = t.q_idx, c.q_len = t.q_len, c.kv_len = t.kv_len;
  }
  return c;
}

/// Normalises elements `column..column + kCount` of a row, and writes them.
template <class V, class TO, int kCount>
__device__ __forceinline__ void write_row(const OutParams& out, const typename V::Params& params, const WorkItem& w, int head,
                                          int group, int row, int column, float v_scale, float (&o)[kCount], float m, float d) {
  const long long token = w.q_start + row / group, qo_head = static_cast<long long>(head) * group + row % group;
  float scale = v_scale;
  if constexpr (V::kSoftmax) {
    if constexpr (V::kHasInit) {
      const float sink = row_context(w, out.tokens, head, group, row).template init<V>(params) * kLog2e;
      const float top = fmaxf(m, sink), a = exp2_diff(m, top);
      d = d * a + exp2_diff(sink, top);
      scale *= a;
      m = top;
    }
    scale = d == 0.0f ? 0.0f : scale / d;
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    o[i] = V::kSoftmax && d == 0.0f ? 0.0f : o[i] * scale;
    if constexpr (V::kHasOutput) {
      o[i] = row_context(w, out.tokens, head, group, row).template output<V>(params, o[i], m * kLn2, d);
    }
  }
  unsigned char* to = out.out + token * out.out_token + qo_head * out.out_head + column * (TO::kBits / 8);
  if constexpr (kCount == 4) {
    store4<TO>(to, o);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if constexpr (Same<TO, F32>::value) reinterpret_cast<float*>(to)[i] = o[i];
      else reinterpret_cast<unsigned short*>(to)[i] = static_cast<unsigned short>(pack2<TO>(o[i], 0.0f));
    }
  }
  if (V::kSoftmax && out.lse != nullptr && column == 0) {
    out.lse[token * out.lse_token + qo_head * out.lse_head] = d == 0.0f ? neg_inf() : m + log2f(d);
  }
}

/// Ends elements `column..column + kCount` of a row: `o`, `m` (base 2) and `d` as summed.
template <class V, class TO, int kCount>
__device__ __forceinline__ void finish_row(const OutParams& out, const typename V::Params& params, const WorkItem& w, int head,
                                           int group, int row, int column, float v_scale, float (&o)[kCount], float m, float d) {
  if constexpr (Same<TO, State>::value) {
    const long long token = w.q_start + row / group, qo_head = static_cast<long long>(head) * group + row % group;
    float* to = reinterpret_cast<float*>(out.out + token * out.out_token + qo_head * out.out_head) + column;
#pragma unroll
    for (int i = 0; i < kCount; ++i) to[i] = o[i] * v_scale;
    if (column == 0) reinterpret_cast<float2*>(out.lse)[token * out.lse_token + qo_head * out.lse_head] = make_float2(m, d);
  } else {
    write_row<V, TO>(out, params, w, head, group, row, column, v_scale, o, m, d);
  }
}

/// Says that this block's part of merge `merge` is written; true in the block that was the last of all parts, which
/// then sees every other's. Threads from 0 on call it, all those of `sync`; `flag` is a shared word. Without counters
/// nobody is: another kernel merges.
template <class Sync>
__device__ __forceinline__ bool last_part(const OutParams& out, int merge, int parts, int* flag, int thread, Sync sync) {
  if (out.counters == nullptr) return false;
  __threadfence();
  sync();
  if (thread == 0) {
    const bool last = atomicAdd(out.counters + merge, 1u) == unsigned(parts) - 1;
    if (last) out.counters[merge] = 0;  // for the next launch
    *flag = last;
  }
  sync();
  const bool last = *flag != 0;
  if (last) __threadfence();
  return last;
}

/// The same for all threads of a block.
__device__ __forceinline__ bool last_part(const OutParams& out, int merge, int parts, int* flag) {
  return last_part(out, merge, parts, flag, threadIdx.x, [] { __syncthreads(); });
}

/// Merges the parts of a head and writes its rows; `threads` threads share out the (row, kCount columns) of it. Parts come
/// `kAhead` at a time, as each load takes some 600 ns.
template <class V, class TO, int kCount, int kAhead>
__device__ __forceinline__ void merge_parts(const OutParams& out, const typename V::Params& params, const WorkItem& w, int head,
                                            int group, const MergeItem& merge, int dim, float v_scale, int thread = threadIdx.x,
                                            int threads = blockDim.x) {
  const int per_row = dim / kCount, units = w.tokens * group * per_row;
  for (int unit = thread; unit < units; unit += threads) {
    const int row = unit / per_row, column = unit % per_row * kCount;
    float m = neg_inf(), d = 0.0f, o[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) o[i] = 0.0f;
    const float2* md_from = out.partial_md + merge.first + row;
    const float* from = out.partial_o + (static_cast<long long>(merge.first) + row) * dim + column;
    const long long step = merge.stride;
    for (int first = 0; first < merge.parts; first += kAhead) {
      float2 md[kAhead];
      float x[kAhead][kCount];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        md[i] = make_float2(neg_inf(), 0.0f);
#pragma unroll
        for (int j = 0; j < kCount; ++j) x[i][j] = 0.0f;
        if (first + i < merge.parts) {
          md[i] = __ldcg(md_from);
          if constexpr (kCount == 4) {
            const float4 v = __ldcg(reinterpret_cast<const float4*>(from));
            x[i][0] = v.x, x[i][1] = v.y, x[i][2] = v.z, x[i][3] = v.w;
          } else {
#pragma unroll
            for (int j = 0; j < kCount; ++j) x[i][j] = __ldcg(from + j);
          }
          md_from += step, from += step * dim;
        }
      }
      float top = m;
#pragma unroll
      for (int i = 0; i < kAhead; ++i) top = fmaxf(top, md[i].x);
      const float a = V::kSoftmax ? exp2_diff(m, top) : 1.0f;
      d *= a;
#pragma unroll
      for (int j = 0; j < kCount; ++j) o[j] *= a;
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const float b = V::kSoftmax ? exp2_diff(md[i].x, top) : 1.0f;
        d += md[i].y * b;
#pragma unroll
        for (int j = 0; j < kCount; ++j) o[j] += x[i][j] * b;
      }
      m = top;
    }
    finish_row<V, TO>(out, params, w, head, group, row, column, v_scale, o, m, d);
  }
}

}  // namespace fir
