// sm90_sparse.cuh: block-sparse attention with blocks of 16 query rows: neighbouring row blocks share what they read.
//
//   o[r]   = sum_j softmax_j(scale q[r] . k[j]) v[j]     over the columns j of the blocks that the row's block lists
//   lse[r] = log2 sum_j 2^(scale q[r] . k[j] log2 e)
//
// grid   (blocks)   persistent, one per multiprocessor; block b does units b, b + grid, ...: a KV head of kWarps row blocks
// block  32 (kWarps + 1)   warp w has row block w of the unit; the last one brings keys and values
// smem   kStages x (kBlocks blocks of 16 keys, the same of values) in rows of 128 swizzled bytes; barriers
// needs  sm_90a (TMA); q, keys, values and the output of one 16-bit type, head dims 64 or 128, at most 16 rows to a row block,
//        no hooks
//
// 16 rows against 16 columns are 16 operations for each byte of keys and values: alone, every row block is bound by the second-level
// cache (89 TFLOP/s on an H200). Here the columns that any of kWarps row blocks sees are read once for all of them, and a
// warp multiplies those of its own list alone. Warps take no turns: each goes through the ring at its own pace, up to kStages
// apart, and writes its rows when it is through its list.
//
// reads  q; keys and values of listed blocks
// writes out, lse
// twins  src/cuda/attention/sparse.rs, src/reference/attention.rs
#pragma once
#include <fir/attention/number.cuh>
#include <fir/attention/softmax.cuh>
#include <fir/base/cp_async.cuh>
#include <fir/base/mbarrier.cuh>
#include <fir/base/tma.cuh>

namespace fir {

struct SparseParams {
  /// Keys and values as [head][8-row group][64 columns][row][column], in boxes of 16 rows.
  TensorMap k, v;
  const unsigned char* q;
  unsigned char* out;
  /// Null: not wanted.
  float* lse;
  /// Strides of tokens and heads: bytes of q and out, elements of lse.
  long long q_token, q_head, out_token, out_head, lse_token, lse_head;
  /// First entry and number of entries of each unit's list; the first is a multiple of 32.
  const int2* lists;
  /// Column blocks of 16 that any row block of a unit sees.
  const int* columns;
  /// Who sees them: for warp w of a list of n entries from e on, bit i % 32 of word e / 32 * kWarps + w * ceil(n / 32) + i / 32.
  const unsigned* seen;
  int tokens, block_tokens, group, heads, units;
  /// Factor of the scores, log2 e included.
  float scale;
  long long pad;
};

template <class T_, int kDim_, int kWarps_, int kBlocks_, int kStages_>
struct SparseConfig {
  using T = T_;
  static constexpr int kDim = kDim_, kWarps = kWarps_, kThreads = 32 * (kWarps + 1), kBlocks = kBlocks_, kStages = kStages_;
  static constexpr int kBlockBytes = 16 * kDim * 2, kStageBytes = 2 * kBlocks * kBlockBytes;
  static constexpr int kBarriers = kStages * kStageBytes, kShared = kBarriers + 2 * kStages * 8;
  static_assert(kDim == 64 || kDim == 128);
};

/// The last warp: boxes of keys by the first lanes, of values by others.
template <class C>
__device__ __forceinline__ void sparse_bring(const SparseParams& p, unsigned base) {
  const int lane = threadIdx.x & 31, which = lane >> 4, mine = lane & 15;
  int stage = 0;
  unsigned phase = 0;
  for (int unit = blockIdx.x; unit < p.units * p.heads; unit += gridDim.x) {
    const int head = unit / p.units;
    const int2 list = __ldg(p.lists + (unit - head * p.units));
    const int* columns = p.columns + list.x + mine;
    int column = mine < min(C::kBlocks, list.y) ? __ldg(columns) : 0;
#pragma unroll 1
    for (int i = 0; i < list.y; i += C::kBlocks) {
      const int here = min(C::kBlocks, list.y - i), now = column;
      if (mine < C::kBlocks && i + C::kBlocks + mine < list.y) column = __ldg(columns + i + C::kBlocks);
      const unsigned full = base + C::kBarriers + stage * 16;
      barrier_wait(full + 8, phase ^ 1);
      if (lane == 0) barrier_expect(full, here * 2 * C::kBlockBytes);
      __syncwarp();
      if (mine < here) {
        const unsigned to = base + stage * C::kStageBytes + (which * C::kBlocks + mine) * C::kBlockBytes;
        tma_load(to, which ? &p.v : &p.k, full, 0, 0, 0, 2 * now, head);
      }
      if (++stage == C::kStages) stage = 0, phase ^= 1;
    }
  }
}

/// A row block against key blocks: two rows of it to a thread (lane / 4 and 8 further), four threads to a row.
template <class C>
struct SparseRows {
  using T = typename C::T;
  /// A maximum is moved only when it grows by more than this factor's log2: weights then reach 256 at most, which f16 holds.
  static constexpr float kSlack = 8.0f;
  unsigned q[C::kDim / 16][4];
  float o[C::kDim / 8][4], m[2], d[2];

  __device__ __forceinline__ void reset() {
#pragma unroll
    for (int t = 0; t < C::kDim / 8; ++t) o[t][0] = o[t][1] = o[t][2] = o[t][3] = 0.0f;
    m[0] = m[1] = neg_inf();
    d[0] = d[1] = 0.0f;
  }

  __device__ __forceinline__ void load(const unsigned char* from, int h, bool there) {
#pragma unroll
    for (int c = 0; c < C::kDim / 16; ++c) {
      q[c][h] = there ? *reinterpret_cast<const unsigned*>(from + c * 32) : 0u;
      q[c][2 + h] = there ? *reinterpret_cast<const unsigned*>(from + c * 32 + 16) : 0u;
    }
  }

  /// Moves the maxima to those of `s` times `scale`.
  template <int kCount>
  __device__ __forceinline__ void rise(const float (&s)[kCount][2][4], float scale) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float top = neg_inf();
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
#pragma unroll
        for (int t = 0; t < 2; ++t) top = fmaxf(top, fmaxf(s[i][t][2 * h] * scale, s[i][t][2 * h + 1] * scale));
      }
      top = fmaxf(quad_max(top), m[h]);
      const float by = exp2_diff(m[h], top);
      m[h] = top, d[h] *= by;
#pragma unroll
      for (int t = 0; t < C::kDim / 8; ++t) o[t][2 * h] *= by, o[t][2 * h + 1] *= by;
    }
  }

  /// `keys` and `values`: this lane's rows of the blocks, for ldmatrix.
  template <int kCount>
  __device__ __forceinline__ void step(const unsigned (&keys)[kCount], const unsigned (&values)[kCount], float scale) {
    const int lane = threadIdx.x & 31;
    // Chunk c of row r of [8-row group][64 columns][row] is at place (c ^ r) % 8.
    auto chunk = [&](int c) { return (c >> 3) * 1024 + (((c ^ lane) & 7) << 4); };
    float s[kCount][2][4] = {};
#pragma unroll
    for (int c = 0; c < C::kDim / 16; ++c) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        unsigned r[4];
        ldmatrix_x4(r, keys[i] + chunk(2 * c + (lane >> 3 & 1)));
        mma<T>(s[i][0], q[c], r[0], r[1]), mma<T>(s[i][1], q[c], r[2], r[3]);
      }
    }
    bool grown = false;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float limit = m[h] + kSlack;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
#pragma unroll
        for (int t = 0; t < 2; ++t) grown |= s[i][t][2 * h] * scale > limit || s[i][t][2 * h + 1] * scale > limit;
      }
    }
    if (__any_sync(~0u, grown)) rise(s, scale);
    unsigned w[kCount][4];
    const float base[2] = {m[0] == neg_inf() ? 0.0f : m[0], m[1] == neg_inf() ? 0.0f : m[1]};
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
#pragma unroll
      for (int t = 0; t < 2; ++t) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float x = exp2_fast(fmaf(s[i][t][2 * h], scale, -base[h])), y = exp2_fast(fmaf(s[i][t][2 * h + 1], scale, -base[h]));
          d[h] += x + y;
          w[i][2 * t + h] = pack2<T>(x, y);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
#pragma unroll
      for (int c = 0; c < C::kDim / 16; ++c) {
        unsigned r[4];
        ldmatrix_x4_trans(r, values[i] + chunk(2 * c + (lane >> 4)));
        mma<T>(o[2 * c], w[i], r[0], r[1]);
        mma<T>(o[2 * c + 1], w[i], r[2], r[3]);
      }
    }
  }
};

template <class C>
__device__ __forceinline__ void sparse_rows(const SparseParams& p, unsigned base) {
  using T = typename C::T;
  const int lane = threadIdx.x & 31, warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);
  const unsigned k_row = (lane >> 4) * C::kDim * 16 + (lane & 7) * 128;
  const unsigned v_row = (lane >> 3 & 1) * C::kDim * 16 + (lane & 7) * 128 + C::kBlocks * C::kBlockBytes;
  SparseRows<C> rows;
  int stage = 0;
  unsigned phase = 0;
  for (int unit = blockIdx.x; unit < p.units * p.heads; unit += gridDim.x) {
    const int head = unit / p.units, number = unit - head * p.units;
    const int2 list = __ldg(p.lists + number);
    const unsigned* seen = p.seen + list.x / 32 * C::kWarps + warp * ((list.y + 31) / 32);
    const int first = (number * C::kWarps + warp) * p.block_tokens;
    const int here = min(p.block_tokens, p.tokens - first) * p.group;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = lane / 4 + 8 * h, token = row / p.group;
      rows.load(p.q + static_cast<long long>(first + token) * p.q_token + static_cast<long long>(head * p.group + row - token * p.group) * p.q_head +
                    (lane & 3) * 4, h, row < here);
    }
    rows.reset();

    unsigned bits = 0;
#pragma unroll 1
    for (int i = 0; i < list.y; i += C::kBlocks) {
      if (i % 32 == 0) bits = __ldg(seen + i / 32);
      const unsigned full = base + C::kBarriers + stage * 16, at = base + stage * C::kStageBytes;
      unsigned mine = bits >> (i & 31) & ((1u << C::kBlocks) - 1);
      auto next = [&] {
        const unsigned from = at + (__ffs(mine) - 1) * C::kBlockBytes;
        mine &= mine - 1;
        return from;
      };
      barrier_wait(full, phase);
#pragma unroll 1
      while ((mine & (mine - 1)) != 0) {
        const unsigned a = next(), b = next(), keys[2] = {a + k_row, b + k_row}, values[2] = {a + v_row, b + v_row};
        rows.template step<2>(keys, values, p.scale);
      }
      if (mine != 0) {
        const unsigned a = next(), keys[1] = {a + k_row}, values[1] = {a + v_row};
        rows.template step<1>(keys, values, p.scale);
      }
      __syncwarp();
      barrier_arrive_warp(full + 8);
      if (++stage == C::kStages) stage = 0, phase ^= 1;
    }

#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = lane / 4 + 8 * h, token = row / p.group, qo = head * p.group + row - token * p.group;
      const float d = quad_sum(rows.d[h]), scale = d == 0.0f ? 0.0f : 1.0f / d;
      if (row >= here) continue;
      unsigned char* to = p.out + static_cast<long long>(first + token) * p.out_token + static_cast<long long>(qo) * p.out_head + (lane & 3) * 4;
#pragma unroll
      for (int t = 0; t < C::kDim / 8; ++t) {
        const float x = d == 0.0f ? 0.0f : rows.o[t][2 * h] * scale, y = d == 0.0f ? 0.0f : rows.o[t][2 * h + 1] * scale;
        *reinterpret_cast<unsigned*>(to + t * 16) = pack2<T>(x, y);
      }
      if (p.lse != nullptr && (lane & 3) == 0) {
        p.lse[(first + token) * p.lse_token + qo * p.lse_head] = d == 0.0f ? neg_inf() : rows.m[h] + log2f(d);
      }
    }
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) sparse_sm90(const __grid_constant__ SparseParams p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // dispatch knows; the text compiles for all
  extern __shared__ __align__(1024) unsigned char shared[];
  const unsigned base = shared_address(shared);
  if (threadIdx.x == 0) {
    for (int s = 0; s < C::kStages; ++s) {
      barrier_init(base + C::kBarriers + s * 16, 1);
      barrier_init(base + C::kBarriers + s * 16 + 8, C::kWarps * kWarpArrivals);
    }
    barrier_init_done();
  }
  __syncthreads();
  if (threadIdx.x >= 32 * C::kWarps) sparse_bring<C>(p, base);
  else sparse_rows<C>(p, base);
#endif
}

}  // namespace fir
