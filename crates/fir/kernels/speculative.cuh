// speculative.cuh: which drafted tokens stand, and the token after the last of them.
//
//   chain   draft i of token x stands while  u_i * p_i[x] < q_i[x]; then one token from max(q - p, 0), or from q
//   tree    children of the last accepted node in order, by the node's coin against the sum of q; then one token from q
//           without the tokens tried in vain
//   greedy  children by the target's token
//
// grid   (requests * C)   chain, tree: a cluster of C blocks per request, as in sampling.cuh; greedy: one thread per request
// block  512; greedy: 64
// smem   static           1.2 KB
//        dynamic          kResident: the row (rows.cuh); tree: before it the rejected tokens, 4 * nodes bytes up to a multiple of 16
// needs  sm_80; clusters from sm_90
//
// reads  a few probabilities for the walk (every block makes the same one), then one row of q (and of p)
// writes as src/ops/speculative.rs says; ids are clamped to their arrays, and a walk ends after as many links as there are nodes
// twins  src/cpu/speculative.rs, src/reference/speculative.rs
#pragma once
#include <fir/sampling.cuh>

namespace fir {

// Weights max(q - p, 0) instead of q.
struct Minus {
  const float* p; // null: q itself
  __device__ __forceinline__ void operator()(u32 place, u32 n, float (&x)[4]) const {
    if (!p) return;
    float y[4];
    if ((reinterpret_cast<u64>(p) & 15) == 0 && place + 4 <= n) {
      widen<float>(load(p + place), y);
    } else {
#pragma unroll
      for (u32 e = 0; e < 4; ++e) y[e] = place + e < n ? p[place + e] : 0.f;
    }
#pragma unroll
    for (u32 e = 0; e < 4; ++e) x[e] = x[e] < y[e] ? 0.f : x[e] - y[e]; // NaN stays
  }
};

// Weights of the rejected tokens are 0.
struct Without {
  const i32* tokens; // in shared memory
  i32 count;
  __device__ __forceinline__ void operator()(u32 place, u32, float (&x)[4]) const {
    for (i32 c = 0; c < count; ++c) {
      const u32 at = u32(tokens[c]) - place;
#pragma unroll
      for (u32 e = 0; e < 4; ++e)
        if (at == e) x[e] = 0.f;
    }
  }
};

// Draws from the fixed row, or from the row as read where the fix left nothing; token 0 and invalid if that is no
// distribution. Calls `found` in one thread; returns the validity.
template <class R, class Clear, class F>
__device__ __forceinline__ bool draw_or_all(R& row, Exchange& ex, const float* q, u32 n, void* smem, const float& u, bool fixed, Clear clear,
                                            F found) {
  double mass = 0.0;
  for (bool again = false;; again = true) {
    row.open(q, n, 0.f, smem);
    mass = ex.all(row.sum(kPositive)).sum;
    if (!fixed || again || mass != 0.0) break; // NaN is not 0
    clear(row.fix);
  }
  return pick(row, ex, kPositive, mass, u, found);
}

struct ChainParams {
  const float *draft_probs, *target_probs;
  const void* draft_tokens;
  void *out, *accepted, *emitted; // the last two may be null
  u8* valid;           // may be null
  i64 p_stride[2], q_stride[2];   // elements from request to request, from draft to draft
  i64 token_stride[2], out_stride[2];
  i64 accepted_stride, emitted_stride, valid_stride;
  u32 n, drafts;
  i32 wide_tokens, wide_out, wide_accepted, wide_emitted;
  Rng rng;
};

template <bool kResident>
__global__ void __launch_bounds__(kThreads, kResident ? kBlocks : 2) chain(const __grid_constant__ ChainParams p) {
  __shared__ RecordSmem records;
  __shared__ u32 verdict[2]; // emitted, accepted
  __shared__ float u;
  Exchange ex;
  ex.open(&records);
  const i64 b = blockIdx.x / ex.size;
  auto token = [&](u32 i) {
    const u64 id = u64(read_id(p.draft_tokens, p.wide_tokens, b * p.token_stride[0] + i * p.token_stride[1]));
    return i64(min(id, u64(p.n) - 1));
  };
  if (threadIdx.x < 32) {
    // Draft i's test takes draw i; the second count's takes draw i + 1, as the draw that rejected was used too.
    u32 emitted = p.drafts, passed = 0;
    for (u32 first = 0; first < p.drafts; first += 32) {
      const u32 i = first + threadIdx.x;
      bool once = true, again = false;
      if (i < p.drafts) {
        const i64 x = token(i);
        const double dp = p.draft_probs[b * p.p_stride[0] + i * p.p_stride[1] + x];
        const double dq = p.target_probs[b * p.q_stride[0] + i * p.q_stride[1] + x];
        once = double(uniform(p.rng, u32(b), i)) * dp < dq; // exact in f64
        again = double(uniform(p.rng, u32(b), i + 1)) * dp < dq;
      }
      const u32 fails = __ballot_sync(kAll, !once);
      if (emitted == p.drafts && fails) emitted = first + __ffs(fails) - 1;
      passed += __popc(__ballot_sync(kAll, again && i >= emitted));
    }
    if (threadIdx.x == 0) {
      verdict[0] = emitted;
      verdict[1] = emitted + passed;
      u = uniform(p.rng, u32(b), p.drafts + (emitted < p.drafts ? 1 : 0));
    }
  }
  __syncthreads();
  const u32 emitted = verdict[0];
  if (ex.rank == 0) {
    for (u32 i = threadIdx.x; i <= p.drafts; i += kThreads)
      if (i != emitted) write_id(p.out, p.wide_out, b * p.out_stride[0] + i * p.out_stride[1], i < emitted ? token(i) : -1);
    if (threadIdx.x == 0) {
      const i64 at = b * p.accepted_stride, et = b * p.emitted_stride;
      if (p.accepted) write_id(p.accepted, p.wide_accepted, at, read_id(p.accepted, p.wide_accepted, at) + verdict[1]);
      if (p.emitted) write_id(p.emitted, p.wide_emitted, et, read_id(p.emitted, p.wide_emitted, et) + emitted);
    }
  }
  Row<float, kResident, Minus> row;
  const bool rejected = emitted < p.drafts;
  row.fix.p = rejected ? p.draft_probs + b * p.p_stride[0] + emitted * p.p_stride[1] : nullptr;
  const i64 slot = b * p.out_stride[0] + emitted * p.out_stride[1];
  const float* q = p.target_probs + b * p.q_stride[0] + emitted * p.q_stride[1];
  const bool valid = draw_or_all(
    row, ex, q, p.n, dynamic_smem(), u, rejected, [](Minus& m) { m.p = nullptr; }, [&](u32 place) { write_id(p.out, p.wide_out, slot, place); });
  if (ex.rank == 0 && threadIdx.x == 0) {
    if (!valid) write_id(p.out, p.wide_out, slot, 0);
    if (p.valid) p.valid[b * p.valid_stride] = valid;
  }
}

// Trees by links, and the verdict on them; ids i32, or i64 where `wide` says so.
struct TreeParams {
  const void *tokens, *slots, *child, *sibling; // [batch, nodes]
  const float* target_probs;                    // [batch, nodes, n]
  const void* target_tokens;                    // greedy: [batch, nodes]
  const float *coins, *last_coin;               // [batch, nodes] and [batch]; null: rng
  void *predicts, *accept_index, *accept_len;
  u8* valid;
  i64 stride[5][2];                             // of tokens, slots, child, sibling, target_tokens
  i64 q_stride[2], coin_stride[2], last_coin_stride;
  i64 predicts_stride, index_stride[2], len_stride, valid_stride;
  i64 total;                                    // entries of predicts
  u32 n, nodes, depth, batch;
  i32 wide[5], wide_predicts, wide_index, wide_len;
  float single, acc;
  Rng rng;
};

struct TreeView {
  const TreeParams& p;
  i64 b;
  __device__ __forceinline__ i64 read(int what, const void* ids, i64 node) const {
    return read_id(ids, p.wide[what], b * p.stride[what][0] + node * p.stride[what][1]);
  }
  __device__ __forceinline__ i64 token(i64 node) const { return read(0, p.tokens, node); }
  __device__ __forceinline__ i64 slot(i64 node) const {
    const u64 s = u64(read(1, p.slots, node));
    return i64(min(s, u64(p.total) - 1));
  }
  // -1 for none, and for what is no node.
  __device__ __forceinline__ i64 link(int what, const void* ids, i64 node) const {
    const i64 to = read(what, ids, node);
    return to >= 0 && to < p.nodes ? to : -1;
  }
  __device__ __forceinline__ i64 child(i64 node) const { return link(2, p.child, node); }
  __device__ __forceinline__ i64 sibling(i64 node) const { return link(3, p.sibling, node); }
  __device__ __forceinline__ void accept(u32 at, i64 node) const {
    write_id(p.accept_index, p.wide_index, b * p.index_stride[0] + at * p.index_stride[1], slot(node));
  }
  __device__ __forceinline__ void predict(i64 node, i64 token) const {
    write_id(p.predicts, p.wide_predicts, slot(node) * p.predicts_stride, token);
  }
  __device__ __forceinline__ void close(u32 length) const {
    for (u32 i = length; i < p.depth; ++i) write_id(p.accept_index, p.wide_index, b * p.index_stride[0] + i * p.index_stride[1], -1);
    write_id(p.accept_len, p.wide_len, b * p.len_stride, i64(length) - 1);
  }
};

template <bool kResident>
__global__ void __launch_bounds__(kThreads, kResident ? kBlocks : 2) tree(const __grid_constant__ TreeParams p) {
  __shared__ RecordSmem records;
  i32* const rejected = reinterpret_cast<i32*>(dynamic_smem()); // [nodes]
  __shared__ i32 state[2]; // last node, number of rejected tokens
  __shared__ float u;
  Exchange ex;
  ex.open(&records);
  const TreeView t{p, i64(blockIdx.x / ex.size)};
  const u32 b = u32(t.b);
  if (threadIdx.x == 0) {
    const bool writes = ex.rank == 0;
    i64 last = 0;
    u32 length = 1, links = 0;
    i32 tried = 0;
    if (writes) t.accept(0, 0);
    while (length < p.depth && p.n > 0) {
      const float coin = p.coins ? p.coins[t.b * p.coin_stride[0] + last * p.coin_stride[1]] : uniform(p.rng, b, u32(last));
      double sum = 0.0;
      tried = 0;
      i64 c = t.child(last);
      for (; c >= 0 && links < p.nodes; c = t.sibling(c), ++links) {
        const u32 token = min(u32(t.token(c)), p.n - 1);
        const float q = p.target_probs[t.b * p.q_stride[0] + last * p.q_stride[1] + token];
        sum += q;
        if (double(coin) < sum / double(fmaxf(p.acc, 1e-9f)) || q >= p.single) break;
        rejected[tried++] = i32(token); // no more than links: fits
      }
      if (c < 0 || links >= p.nodes) break;
      ++links;
      if (writes) {
        t.predict(last, t.token(c));
        t.accept(length, c);
      }
      ++length;
      last = c;
      tried = 0;
    }
    if (writes) t.close(length);
    state[0] = i32(last);
    state[1] = tried;
    u = p.last_coin ? p.last_coin[t.b * p.last_coin_stride] : uniform(p.rng, b, p.nodes);
  }
  __syncthreads();
  const i64 last = state[0];
  Row<float, kResident, Without> row;
  row.fix = Without{rejected, state[1]};
  const float* q = p.target_probs + t.b * p.q_stride[0] + last * p.q_stride[1];
  const bool valid = draw_or_all(
    row, ex, q, p.n, dynamic_smem() + (4 * p.nodes + 15) / 16 * 16, u, state[1] > 0, [](Without& w) { w.count = 0; }, [&](u32 place) { t.predict(last, place); });
  if (ex.rank == 0 && threadIdx.x == 0) {
    if (!valid) t.predict(last, 0);
    if (p.valid) p.valid[t.b * p.valid_stride] = valid;
  }
}

__global__ void tree_greedy(const __grid_constant__ TreeParams p) {
  const i64 b = i64(blockIdx.x) * blockDim.x + threadIdx.x;
  if (b >= p.batch) return;
  const TreeView t{p, b};
  i64 last = 0;
  u32 length = 1, links = 0;
  t.accept(0, 0);
  while (length < p.depth) {
    const i64 want = t.read(4, p.target_tokens, last);
    i64 c = t.child(last);
    while (c >= 0 && links < p.nodes && t.token(c) != want) c = t.sibling(c), ++links;
    if (c < 0 || links >= p.nodes) break;
    ++links;
    t.predict(last, want);
    t.accept(length++, c);
    last = c;
  }
  t.predict(last, t.read(4, p.target_tokens, last));
  t.close(length);
}

}  // namespace fir
