// decode_plain.cuh: what decode.cuh computes, in f32 without tensor cores: for f32 tensors, head dims that are no
// multiples of 16, rows that are not 16-byte aligned, keys of 8 and 4 bits that a variant rotates.
//
//   o, lse as in decode.cuh
//
// grid   (workers)   as decode.cuh, the same work list
// block  128         scores: a warp per position, lanes across the row; softmax: a warp per row, lanes across positions;
//                    output: a thread per column
// smem   floats: q [16][kMaxDim], weights [16][32], (m, d, factor) [16]; turns of rotations u64 [kMaxDim]
// needs  sm_80; dim_qk, dim_vo <= kMaxDim, a multiple of 128
//
// reads  q; pages of the items' requests, never a row at or past kv_end
// writes as decode.cuh
// twins  src/cpu/attention/, src/reference/attention.rs
#pragma once
#include <fir/attention/decode.cuh>

namespace fir {

template <class TQ, class TKv, class TO, int kMaxDim, class Variant>
__global__ void __launch_bounds__(128) decode_plain(const __grid_constant__ DecodeParams<Variant> p) {
  using V = Variant;
  using QRope = RopeOf<V, false>;
  using KRope = RopeOf<V, true>;
  constexpr int kTile = 32, kColumns = kMaxDim / 128;
  __shared__ float weights[16][kTile], state[3][16];
  __shared__ unsigned long long turns[QRope::kOn || KRope::kOn ? kMaxDim : 1];
  __shared__ int flag;
  extern __shared__ __align__(16) float q[];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, dim_qk = p.kv.dim_qk, dim_vo = p.kv.dim_vo;
  float *m = state[0], *d = state[1], *factor = state[2];

  if constexpr (QRope::kOn || KRope::kOn) {
    for (int i = threadIdx.x; i < kMaxDim / 2; i += 128) {
      if constexpr (QRope::kOn) turns[i] = QRope::turn(i, QRope::dim(dim_qk));
      if constexpr (KRope::kOn) turns[kMaxDim / 2 + i] = KRope::turn(i, KRope::dim(dim_qk));
    }
    __syncthreads();
  }
  // Element e of a row, turned by `position` when a rotation `Rope` is on.
  auto rotated = [&](auto rope, const unsigned long long* table, int position, int e, auto load) -> float {
    using Rope = decltype(rope);
    const float x = load(e);
    if constexpr (Rope::kOn) {
      const int dim = Rope::dim(dim_qk);
      if (e < dim) {
        const bool first = Rope::kInterleave ? e % 2 == 0 : e < dim / 2;
        const int pair = Rope::kInterleave ? e / 2 : (first ? e : e - dim / 2);
        const float y = load(Rope::kInterleave ? e ^ 1 : (first ? e + dim / 2 : e - dim / 2));
        float u = first ? x : y, v = first ? y : x;
        rope::rotate(u, v, position, table[pair]);
        return first ? u : v;
      }
    }
    return x;
  };

  for (int item = blockIdx.x; item >= 0;) {
    const WorkItem w = p.items[item];
    if (w.tokens == 0) break;
    const int rows = w.tokens * p.group;
    for (int head = w.head_start; head < w.head_end; ++head) {
      for (int i = threadIdx.x; i < rows * dim_qk; i += 128) {
        const int row = i / dim_qk, e = i % dim_qk;
        const unsigned char* from = p.q + static_cast<long long>(w.q_start + row / p.group) * p.q_token +
                                    (static_cast<long long>(head) * p.group + row % p.group) * p.q_head;
        const int position = QRope::kOn ? row_context(w, p.out.tokens, head, p.group, row).q_pos() : 0;
        q[row * kMaxDim + e] = rotated(QRope{}, turns, position, e, [&](int j) { return load_one<TQ>(from, j); });
      }
      float o[kColumns][16];
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
#pragma unroll
        for (int row = 0; row < 16; ++row) o[c][row] = 0.0f;
      }
      if (threadIdx.x < 16) m[threadIdx.x] = neg_inf(), d[threadIdx.x] = 0.0f;
      __syncthreads();

      for (int start = w.kv_start; start < w.kv_end; start += kTile) {
        // Where a position's rows are, one position per lane; lanes past the end repeat the last.
        const int own = min(start + lane, w.kv_end - 1);
        unsigned page;
        long long slot;
        p.kv.place(p.kv.entry(w.pages, own), own, page, slot);
        const long long k_row = row_offset(p.kv.k, page, slot), v_row = row_offset(p.kv.v, page, slot);
        const long long k_scales = row_offset(p.kv.k_scales, page, slot), v_scales = row_offset(p.kv.v_scales, page, slot);

        for (int j = warp; j < kTile; j += 4) {
          const unsigned char* key = p.kv.k.data + shuffle64(k_row, j) + head * p.kv.k.head;
          const unsigned char* scales = TKv::kBits == 4 ? p.kv.k_scales.data + shuffle64(k_scales, j) + head * p.kv.k_scales.head : nullptr;
          if (start + j >= w.kv_end) break;
          float k[kMaxDim / 32];
#pragma unroll
          for (int i = 0; i < kMaxDim / 32; ++i) {
            const int e = i * 32 + lane;
            k[i] = e < dim_qk ? rotated(KRope{}, turns + kMaxDim / 2, w.kv_base + start + j, e,
                                        [&](int at) { return load_one<TKv>(key, at, scales); })
                              : 0.0f;
          }
          for (int row = 0; row < rows; ++row) {
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < kMaxDim / 32; ++i) {
              if (i * 32 + lane < dim_qk) sum += q[row * kMaxDim + i * 32 + lane] * k[i];
            }
#pragma unroll
            for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
            if (lane == 0) weights[row][j] = sum;
          }
        }
        __syncthreads();
        for (int row = warp; row < rows; row += 4) {
          const int kv = start + lane, kv_pos = w.kv_base + kv;
          const RowContext c = row_context(w, p.out.tokens, head, p.group, row);
          bool seen = kv < w.kv_end;
          if constexpr (V::kHasMask) seen = seen && c.template mask<V>(p.variant, kv_pos);
          float x = 0.0f;
          if (seen) {
            x = weights[row][lane] * p.sm_scale * p.kv.k_scale;
            if constexpr (V::kHasQuery) x *= c.template query_scale<V>(p.variant);
            if constexpr (V::kHasKey) x *= V::key_scale(p.variant, w.request, w.kv_len, kv_pos, head);
            if constexpr (V::kHasLogits) x = c.template logits<V>(p.variant, x, kv_pos);
          }
          if constexpr (V::kSoftmax) {
            x = seen ? x * kLog2e : neg_inf();
            float top = x;
#pragma unroll
            for (int step = 16; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
            const float old = m[row], now = fmaxf(old, top);
            x = exp2_diff(x, now);
            float sum = x;
#pragma unroll
            for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
            __syncwarp();
            if (lane == 0) {
              factor[row] = exp2_diff(old, now);
              d[row] = d[row] * exp2_diff(old, now) + sum;
              m[row] = now;
            }
          }
          if constexpr (V::kHasValue) {
            if (x != 0.0f) x *= V::value_scale(p.variant, w.request, w.kv_len, kv_pos, head);
          }
          weights[row][lane] = x;
        }
        __syncthreads();
        if constexpr (V::kSoftmax) {
#pragma unroll
          for (int row = 0; row < 16; ++row) {
            if (row < rows) {
#pragma unroll
              for (int c = 0; c < kColumns; ++c) o[c][row] *= factor[row];
            }
          }
        }
        for (int j = 0; j < kTile; ++j) {
          const unsigned char* value = p.kv.v.data + shuffle64(v_row, j) + head * p.kv.v.head;
          const unsigned char* scales = TKv::kBits == 4 ? p.kv.v_scales.data + shuffle64(v_scales, j) + head * p.kv.v_scales.head : nullptr;
          if (start + j >= w.kv_end) break;
#pragma unroll
          for (int c = 0; c < kColumns; ++c) {
            const int column = c * 128 + threadIdx.x;
            const float v = column < dim_vo ? load_one<TKv>(value, column, scales) : 0.0f;
#pragma unroll
            for (int row = 0; row < 16; ++row) {
              // A weight of 0 takes nothing of a value that may be infinite.
              if (row < rows && weights[row][j] != 0.0f) o[c][row] += weights[row][j] * v;
            }
          }
        }
        __syncthreads();
      }

      // Through shared memory, where q was, as the text of an end per register would take seconds to compile.
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
#pragma unroll
        for (int row = 0; row < 16; ++row) q[row * kMaxDim + c * 128 + threadIdx.x] = o[c][row];
      }
      for (int row = 0; row < rows; ++row) {
        for (int column = threadIdx.x; column < dim_vo; column += 128) {  // the columns this thread wrote
          float x[1] = {q[row * kMaxDim + column]};
          if (w.partial < 0) {
            finish_row<V, TO>(p.out, p.variant, w, head, p.group, row, column, p.kv.v_scale, x, m[row], d[row]);
          } else {
            const long long to = w.partial + static_cast<long long>(head - w.head_start) * rows + row;
            __stcg(p.out.partial_o + to * dim_vo + column, x[0]);
            if (column == 0) __stcg(p.out.partial_md + to, make_float2(m[row], d[row]));
          }
        }
      }
      if (w.partial >= 0) {
        const int at = w.merge + head - w.head_start;
        const MergeItem merge = p.out.merges[at];
        if (last_part(p.out, at, merge.parts, &flag)) {
          merge_parts<V, TO, 1, 4>(p.out, p.variant, w, head, p.group, merge, dim_vo, p.kv.v_scale);
        }
      }
      __syncthreads();
    }
    item = w.next;
  }
}

}  // namespace fir
