// moe.cuh: mixtures of experts: which experts a token uses, in which order experts meet rows, and the sum of what they made.
//
//   route      ids[t] = the experts of the largest c, weights[t] = their s, s = score(logits[t]), c = s + bias
//   route_by_table  ids[t] = table[tokens[t]], weights[t] = their s over the sum of all, s = sqrt(log(1 + e^logit))
//   dispatch   pairs (token * top_k + choice) by expert, then ascending; row tiles of every expert for gemm.cuh
//   combine    out[t] = sum_j weights[t, j] * results[t * top_k + j], in order of j, choices without an expert left out
//
// grid   route, route_by_table (tokens / 4), dispatch (experts), combine (tokens, parts of a row)
// block  128, 128, 1024, 256
// smem   route: 4 * (experts + groups) * 8 bytes
// needs  sm_80
//
// reads  logits, bias, tokens, table, ids, weights, results
// writes ids, weights; pairs, tiles; out
// twins  src/cpu/moe.rs, src/reference/moe.rs
#pragma once
#include <fir/gemm_common.cuh>

namespace fir {

struct RouteParams {
  const void* logits;
  const void* bias;
  i32* ids;
  float* weights;
  u64 logits_stride, ids_stride, weights_stride;
  u32 tokens, experts, top_k;
  u32 groups, chosen;  // chosen == groups: all experts at once
  u32 logits_type, bias_type, bias_stride;
  u32 sigmoid, renormalize;
  float scale;
  u32 unused;
};

// Integers in the order of the numbers, both zeros alike, NaN below all.
__device__ __forceinline__ u32 order(float x) {
  const u32 bits = bits_of(__fadd_rn(x, 0.f));
  return x != x ? 0 : (bits >> 31 ? ~bits : bits | 0x80000000u);
}

// The larger first, and of equal ones the one of the lower index; 0 is less than all.
__device__ __forceinline__ u64 rank(float x, u32 index) { return (u64(order(x)) + 1) << 32 | (0xffffffffu - index); }

__device__ __forceinline__ u64 warp_most(u64 x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    const u64 other = __shfl_xor_sync(0xffffffffu, x, step);
    x = other > x ? other : x;
  }
  return x;
}

// A warp to a token. One choice after another: the best of those that come after the last, so nothing is marked.
template <int = 0>
__global__ void __launch_bounds__(128) route(const __grid_constant__ RouteParams p) {
  extern __shared__ __align__(16) u64 space[];
  const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, t = blockIdx.x * 4 + warp;
  wait_for_previous();
  if (t >= p.tokens) return;
  u64* ranks = space + warp * (u64(p.experts) + p.groups);  // of groups
  float *scores = reinterpret_cast<float*>(ranks + p.groups), *keys = scores + p.experts;
  const u64 at = t * p.logits_stride;
  float most = -__int_as_float(0x7f800000);
  for (u32 e = lane; e < p.experts; e += 32) {
    const float x = load_any(p.logits, at + e, p.logits_type);
    keys[e] = x;
    most = fmaxf(most, x);  // the other one, if x is NaN
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, step));
  float sum = 0.f;
  for (u32 e = lane; e < p.experts; e += 32) {
    const float y = p.sigmoid ? 1.f / (1.f + expf(-keys[e])) : expf(keys[e] - most);
    scores[e] = y;
    sum += y == y ? y : 0.f;
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  for (u32 e = lane; e < p.experts; e += 32) {
    if (!p.sigmoid) scores[e] = scores[e] / sum;
    // Without a bias the order of the scores is that of the logits, and those are not rounded.
    if (p.bias) keys[e] = scores[e] + load_any(p.bias, u64(e) * p.bias_stride, p.bias_type);
  }
  __syncwarp();

  // Groups are chosen by the sum of their two largest: those whose rank is `least` or more.
  const u32 size = p.experts / p.groups;
  const bool all = p.chosen == p.groups;
  u64 least = ~0ull;
  if (!all) {
    for (u32 g = lane; g < p.groups; g += 32) {
      const float* from = (p.bias ? keys : scores) + u64(g) * size;
      float first = -__int_as_float(0x7f800000), second = first;
      for (u32 i = 0; i < size; ++i) {
        const float x = from[i];
        if (x > first) second = first, first = x;
        else if (x > second) second = x;
      }
      ranks[g] = rank(size == 1 ? first : first + second, g);
    }
    __syncwarp();
    for (u32 j = 0; j < p.chosen; ++j) {
      u64 best = 0;
      for (u32 g = lane; g < p.groups; g += 32) {
        if (ranks[g] < least && ranks[g] > best) best = ranks[g];
      }
      least = warp_most(best);
    }
  }
  u64 last = ~0ull;
  float total = 0.f;
  for (u32 j = 0; j < p.top_k; ++j) {
    u64 best = 0;
    for (u32 e = lane; e < p.experts; e += 32) {
      const u64 r = rank(keys[e], e);
      if (r < last && r > best && (all || ranks[e / size] >= least)) best = r;
    }
    last = warp_most(best);
    const u32 e = 0xffffffffu - u32(last);
    const float s = scores[e];
    total += s;
    if (lane == 0) {
      p.ids[t * p.ids_stride + j] = i32(e);
      p.weights[t * p.weights_stride + j] = s;
    }
  }
  __syncwarp();
  const float divisor = p.renormalize ? total + 1e-20f : 1.f;
  for (u32 j = lane; j < p.top_k; j += 32) {
    float* w = p.weights + t * p.weights_stride + j;
    *w = *w / divisor * p.scale;
  }
}

struct TableParams {
  const void* logits;
  const void* tokens;
  const i32* table;
  i32* ids;
  float* weights;
  u64 logits_stride, tokens_stride, table_stride, ids_stride, weights_stride;
  u64 vocabulary;
  u32 count, experts, top_k;
  u32 logits_type, wide;  // tokens are i64
  u32 has_shared;
  float shared;
  u32 unused;
};

// A warp to a token; what the table does not have is expert -1 of weight 0.
template <int = 0>
__global__ void __launch_bounds__(128) route_by_table(const __grid_constant__ TableParams p) {
  const u32 lane = threadIdx.x % 32, t = blockIdx.x * 4 + threadIdx.x / 32;
  wait_for_previous();
  if (t >= p.count) return;
  const u64 where = t * p.tokens_stride;
  const i64 token = p.wide ? static_cast<const i64*>(p.tokens)[where] : static_cast<const i32*>(p.tokens)[where];
  const bool known = token >= 0 && u64(token) < p.vocabulary;
  const i32* row = p.table + (known ? u64(token) * p.table_stride : 0);
  auto expert = [&](u32 j) {
    const i32 id = known ? row[j] : -1;
    return id >= 0 && u32(id) < p.experts ? id : -1;
  };
  auto score = [&](i32 id) {
    if (id < 0) return 0.f;
    const float x = load_any(p.logits, t * p.logits_stride + id, p.logits_type);
    return sqrtf(fmaxf(x, 0.f) + log1pf(expf(-fabsf(x))));
  };
  float sum = 0.f;
  for (u32 j = lane; j < p.top_k; j += 32) sum += score(expert(j));
#pragma unroll
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  i32* ids = p.ids + t * p.ids_stride;
  float* weights = p.weights + t * p.weights_stride;
  for (u32 j = lane; j < p.top_k; j += 32) {
    const i32 id = expert(j);
    ids[j] = id;
    weights[j] = id < 0 ? 0.f : score(id) / sum;
  }
  if (p.has_shared && lane == 0) ids[p.top_k] = i32(p.experts), weights[p.top_k] = p.shared;
}

struct DispatchParams {
  const void* ids;
  u32* pairs;
  u32* tiles[2];      // {expert, first row, end} for gemm.cuh, of either product; where an expert has none, an empty one
  u64 token_stride, choice_stride;
  u32 count, top_k;   // pairs of all tokens
  u32 experts, wide;  // ids are i64
  u32 tile_rows[2], tile_counts[2];
};

// An id past the experts is left out as a negative one is.
__device__ __forceinline__ u32 expert_of(const void* ids, u64 at, u32 wide, u32 experts) {
  const i64 id = wide ? static_cast<const i64*>(ids)[at] : static_cast<const i32*>(ids)[at];
  return id >= 0 && id < i64(experts) ? u32(id) : kNone;
}

// A block to an expert: it counts the pairs of those before it and its own, then writes its own in order. No block waits
// for another. Experts before e have at most floor(rows / tile_rows) + e tiles together, so that is where e's begin.
template <int = 0>
__global__ void __launch_bounds__(1024) dispatch(const __grid_constant__ DispatchParams p) {
  __shared__ u32 counts[32][2];
  const u32 e = blockIdx.x, tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
  wait_for_previous();
  auto expert = [&](u32 pair) {
    if (pair >= p.count) return kNone;
    const u32 token = pair / p.top_k, choice = pair % p.top_k;
    return expert_of(p.ids, token * p.token_stride + choice * p.choice_stride, p.wide, p.experts);
  };
  u32 before = 0, mine = 0;
  for (u32 pair = tid; pair < p.count; pair += 1024) {
    const u32 id = expert(pair);
    before += id < e;
    mine += id == e;
  }
  before = __reduce_add_sync(0xffffffffu, before);
  mine = __reduce_add_sync(0xffffffffu, mine);
  if (lane == 0) counts[warp][0] = before, counts[warp][1] = mine;
  __syncthreads();
  before = __reduce_add_sync(0xffffffffu, counts[lane][0]);
  mine = __reduce_add_sync(0xffffffffu, counts[lane][1]);
  const u32 end = before + mine;

#pragma unroll
  for (int l = 0; l < 2; ++l) {
    const u32 high = p.tile_rows[l], first_tile = before / high + e;
    const u32 last_tile = e + 1 == p.experts ? p.tile_counts[l] : end / high + e + 1;
    for (u32 i = tid; first_tile + i < last_tile; i += 1024) {
      const u32 first = before + i * high;
      u32* tile = p.tiles[l] + 3 * u64(first_tile + i);
      tile[0] = e, tile[1] = first < end ? first : 0, tile[2] = first < end ? end : 0;
    }
  }

  u32 at = before;
  for (u32 base = 0; base < p.count && at < end; base += 1024) {
    const bool here = expert(base + tid) == e;
    const u32 found = __ballot_sync(0xffffffffu, here);
    __syncthreads();  // the last counts were read
    if (lane == 0) counts[warp][0] = __popc(found);
    __syncthreads();
    const u32 c = counts[lane][0];
    const u32 above = __reduce_add_sync(0xffffffffu, lane < warp ? c : 0), whole = __reduce_add_sync(0xffffffffu, c);
    if (here) p.pairs[at + above + __popc(found & ((1u << lane) - 1))] = base + tid;
    at += whole;
  }
}

struct CombineParams {
  const float* results;
  const void* ids;
  const float* weights;
  void* out;
  u64 results_stride, token_stride, choice_stride, weights_stride, out_stride;
  u32 hidden, top_k, experts, wide;
  u32 out_type, vector;
};

template <int = 0>
__global__ void __launch_bounds__(256) combine(const __grid_constant__ CombineParams p) {
  const u32 t = blockIdx.x, column = (blockIdx.y * 256 + threadIdx.x) * 8;
  wait_for_previous();
  if (column >= p.hidden) return;
  float y[8] = {};
  for (u32 j = 0; j < p.top_k; ++j) {
    if (expert_of(p.ids, t * p.token_stride + j * p.choice_stride, p.wide, p.experts) == kNone) continue;
    const float weight = p.weights[t * p.weights_stride + j];
    // Rows of results are a multiple of 8 apart.
    const float4* row = reinterpret_cast<const float4*>(p.results + (u64(t) * p.top_k + j) * p.results_stride + column);
    const float4 a = row[0], b = row[1];
    const float x[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) y[i] = fmaf(weight, x[i], y[i]);
  }
  auto put = [&](auto* out) {
    out += t * p.out_stride;
    if (p.vector && column + 8 <= p.hidden) {
      if constexpr (sizeof(*out) == 4) {
        const float first[4] = {y[0], y[1], y[2], y[3]}, second[4] = {y[4], y[5], y[6], y[7]};
        store_elements<true>(out, column, p.hidden, first);
        store_elements<true>(out, column + 4, p.hidden, second);
      } else {
        store_elements<true>(out, column, p.hidden, y);
      }
    } else {
      store_elements<false>(out, column, p.hidden, y);
    }
  };
  if (p.out_type == 0) put(static_cast<float*>(p.out));
  else if (p.out_type == 1) put(static_cast<f16*>(p.out));
  else put(static_cast<bf16*>(p.out));
}

}  // namespace fir
