// plain.cuh: attention of any shape in f32, without tensor cores: what the other kernels do not take. f32 tensors,
// outputs finer than 16-bit products, head dims and strides of any kind, groups of more than 16 heads, latent attention.
//
//   o, lse as in decode.cuh; latent: scale (q . ckv[j] + q_pe . kpe[j]) for q . k[j], values ckv
//
// grid   (workers)   as decode.cuh, the same work list, with any number of rows
// block  128         scores: a warp per position, lanes across the row; softmax: a warp per row, lanes across positions;
//                    output: a thread per column; 16 rows at a time
// smem   floats: q [16][kMaxDim], weights [16][32], (m, d, factor) [16]; turns of rotations u64 [kMaxDim]
// needs  sm_80; dim_qk + dim_pe <= kMaxDim, dim_vo <= min(kMaxDim, 512); kMaxDim a multiple of 128
//
// Types of q, k and v are numbers and not template arguments: one text for all of them.
//
// reads  q; pages of the items' requests, never a row at or past kv_end
// writes as decode.cuh
// twins  src/cpu/attention/, src/reference/attention.rs
#pragma once
#include <fir/attention/params.cuh>

namespace fir {

/// Element types by number, as src/cuda/attention/mod.rs counts them.
enum PlainType { kPlainF32, kPlainF16, kPlainBf16, kPlainE4m3, kPlainE5m2, kPlainE2m1 };

template <class Variant>
struct PlainParams {
  /// Latent attention: the query's second part, by strides in bytes.
  const unsigned char* q_pe;
  long long q_pe_token, q_pe_head;
  /// The keys' second part.
  KvTensor kpe;
  /// Elements of the second parts; 0 when there are none.
  int dim_pe;
  /// What q_pe is multiplied by beside the scale of all scores.
  float pe_factor;
  int q_type, kv_type;
  AttentionParams<Variant> common;
};

/// Element `i` of a row.
__device__ __forceinline__ float load_any(int type, const unsigned char* row, int i, const unsigned char* scales = nullptr) {
  switch (type) {
    case kPlainF32: return load_one<F32>(row, i);
    case kPlainF16: return load_one<F16>(row, i);
    case kPlainBf16: return load_one<Bf16>(row, i);
    case kPlainE4m3: return load_one<E4m3>(row, i);
    case kPlainE5m2: return load_one<E5m2>(row, i);
    default: return load_one<E2m1>(row, i, scales);
  }
}

/// Element e of a row of `dim_qk`, turned by `position` when the rotation `Rope` is on.
template <class Rope, class Load>
__device__ __forceinline__ float rotated(const unsigned long long* turns, int position, int dim_qk, int e, Load load) {
  const float x = load(e);
  if constexpr (Rope::kOn) {
    const int dim = Rope::dim(dim_qk);
    if (e < dim) {
      const bool first = Rope::kInterleave ? e % 2 == 0 : e < dim / 2;
      const int pair = Rope::kInterleave ? e / 2 : (first ? e : e - dim / 2);
      const float y = load(Rope::kInterleave ? e ^ 1 : (first ? e + dim / 2 : e - dim / 2));
      const unsigned long long angle = static_cast<unsigned long long>(static_cast<long long>(position)) * turns[pair];
      // Half turns, from the signed top 32 bits: f32 results deserve better than rope::rotate's fast functions.
      float s, c;
      sincospif(static_cast<float>(static_cast<int>(angle >> 32)) * 4.656612873077392578125e-10f, &s, &c);
      return first ? x * c - y * s : x * c + y * s;
    }
  }
  return x;
}

template <class TO, int kMaxDim, class Variant>
__global__ void __launch_bounds__(128, 1) plain(const __grid_constant__ PlainParams<Variant> all) {
  using V = Variant;
  using QRope = RopeOf<V, false>;
  using KRope = RopeOf<V, true>;
  constexpr int kTile = 32, kPart = kMaxDim < 512 ? kMaxDim : 512, kColumns = kPart / 128;
  __shared__ float weights[16][kTile], state[3][16];
  __shared__ unsigned long long turns[QRope::kOn || KRope::kOn ? kMaxDim : 1];
  __shared__ int flag;
  extern __shared__ __align__(16) float q[];
  const AttentionParams<V>& p = all.common;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, dim_vo = p.kv.dim_vo, dim_1 = p.kv.dim_qk, dim = dim_1 + all.dim_pe;
  float *m = state[0], *d = state[1], *factor = state[2];

  if constexpr (QRope::kOn || KRope::kOn) {
    for (int i = threadIdx.x; i < kMaxDim / 2; i += 128) {
      if constexpr (QRope::kOn) turns[i] = QRope::turn(i, QRope::dim(dim_1));
      if constexpr (KRope::kOn) turns[kMaxDim / 2 + i] = KRope::turn(i, KRope::dim(dim_1));
    }
    __syncthreads();
  }

  for (int item = blockIdx.x / p.team; item >= 0;) {
    const WorkItem w = p.items[item];
    if (w.tokens == 0) break;
    const int rows = w.tokens * p.group, pages = p.kv.start(w.pages);
    for (int head = w.head_start + blockIdx.x % p.team; head < w.head_end; head += p.team) {
      for (int first = 0; first < rows; first += 16) {
        const int count = min(16, rows - first);
        for (int i = threadIdx.x; i < count * dim; i += 128) {
          const int row = first + i / dim, e = i % dim;
          const long long token = w.q_start + row / p.group, qo_head = static_cast<long long>(head) * p.group + row % p.group;
          float x;
          if (e < dim_1) {
            const unsigned char* from = p.q + token * p.q_token + qo_head * p.q_head;
            const int position = QRope::kOn ? row_context(w, p.out.tokens, head, p.group, row).q_pos() : 0;
            x = rotated<QRope>(turns, position, dim_1, e, [&](int j) { return load_any(all.q_type, from, j); });
          } else {
            x = load_any(all.q_type, all.q_pe + token * all.q_pe_token + qo_head * all.q_pe_head, e - dim_1) * all.pe_factor;
          }
          q[i / dim * kMaxDim + e] = x;
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
          p.kv.place(p.kv.entry(pages, own), own, page, slot);
          const long long k_row = row_offset(p.kv.k, page, slot), v_row = row_offset(p.kv.v, page, slot);
          const long long k_scales = row_offset(p.kv.k_scales, page, slot), v_scales = row_offset(p.kv.v_scales, page, slot);
          const long long pe_row = row_offset(all.kpe, page, slot);

          for (int j = warp; j < kTile; j += 4) {
            const unsigned char* key = p.kv.k.data + shuffle64(k_row, j) + head * p.kv.k.head;
            const unsigned char* scales = p.kv.k_scales.data + shuffle64(k_scales, j) + head * p.kv.k_scales.head;
            const unsigned char* pe = all.kpe.data + shuffle64(pe_row, j);
            if (start + j >= w.kv_end) break;
            for (int part = 0; part < dim; part += kPart) {
              float k[kPart / 32];
#pragma unroll
              for (int i = 0; i < kPart / 32; ++i) {
                const int e = part + i * 32 + lane;
                k[i] = 0.0f;
                if (e < dim_1) {
                  k[i] = rotated<KRope>(turns + kMaxDim / 2, w.kv_base + start + j, dim_1, e,
                                        [&](int at) { return load_any(all.kv_type, key, at, scales); });
                } else if (e < dim) {
                  k[i] = load_any(all.kv_type, pe, e - dim_1);
                }
              }
              for (int row = 0; row < count; ++row) {
                float sum = 0.0f;
#pragma unroll
                for (int i = 0; i < kPart / 32; ++i) {
                  const int e = part + i * 32 + lane;
                  if (e < dim) sum += q[row * kMaxDim + e] * k[i];
                }
#pragma unroll
                for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
                if (lane == 0) weights[row][j] = part == 0 ? sum : weights[row][j] + sum;
              }
            }
          }
          __syncthreads();
          for (int row = warp; row < count; row += 4) {
            const int kv = start + lane, kv_pos = w.kv_base + kv;
            const RowContext c = row_context(w, p.out.tokens, head, p.group, first + row);
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
              // The difference comes before the change of base: it is small where weights are not.
              if (!seen) x = neg_inf();
              float top = x;
#pragma unroll
              for (int step = 16; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
              const float old = m[row], now = fmaxf(old, top), base = now == neg_inf() ? 0.0f : now;
              x = exp2_fast((x - base) * kLog2e);
              float sum = x;
#pragma unroll
              for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
              __syncwarp();
              if (lane == 0) {
                factor[row] = exp2_fast((old - base) * kLog2e);
                d[row] = d[row] * factor[row] + sum;
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
              if (row < count) {
#pragma unroll
                for (int c = 0; c < kColumns; ++c) o[c][row] *= factor[row];
              }
            }
          }
          for (int j = 0; j < kTile; ++j) {
            const unsigned char* value = p.kv.v.data + shuffle64(v_row, j) + head * p.kv.v.head;
            const unsigned char* scales = p.kv.v_scales.data + shuffle64(v_scales, j) + head * p.kv.v_scales.head;
            if (start + j >= w.kv_end) break;
#pragma unroll
            for (int c = 0; c < kColumns; ++c) {
              const int column = c * 128 + threadIdx.x;
              const float v = column < dim_vo ? load_any(all.kv_type, value, column, scales) : 0.0f;
#pragma unroll
              for (int row = 0; row < 16; ++row) {
                // A weight of 0 takes nothing of a value that may be infinite.
                if (row < count && weights[row][j] != 0.0f) o[c][row] += weights[row][j] * v;
              }
            }
          }
          __syncthreads();
        }

        // Through shared memory, where q was, as the text of an end per register would take seconds to compile.
        __syncthreads();
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
#pragma unroll
          for (int row = 0; row < 16; ++row) q[row * kMaxDim + c * 128 + threadIdx.x] = o[c][row];
        }
        for (int row = 0; row < count; ++row) {
          const float top = m[row] * kLog2e;
          for (int column = threadIdx.x; column < dim_vo; column += 128) {  // the columns this thread wrote
            float x[1] = {q[row * kMaxDim + column]};
            if (w.partial < 0) {
              finish_row<V, TO>(p.out, p.variant, w, head, p.group, first + row, column, p.kv.v_scale, x, top, d[row]);
            } else {
              const long long to = w.partial + static_cast<long long>(head - w.head_start) * rows + first + row;
              __stcg(p.out.partial_o + to * dim_vo + column, x[0] * part_scale<TO>(p.kv.v_scale));
              if (column == 0) __stcg(p.out.partial_md + to, make_float2(top, d[row]));
            }
          }
        }
        __syncthreads();
      }
      if (w.partial >= 0) {
        const int at = w.merge + head - w.head_start;
        const MergeItem merge = p.out.merges[at];
        if (last_part(p.out, at, merge.parts, &flag)) {
          merge_parts<V, TO, 1, 4>(p.out, p.variant, w, head, p.group, merge, dim_vo, p.kv.v_scale);
        }
        __syncthreads();
      }
    }
    item = w.next;
  }
}

}  // namespace fir
