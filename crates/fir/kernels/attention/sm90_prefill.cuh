// sm90_prefill.cuh: many query rows against KV on Hopper: prefill, append, mixed batches, block-sparse; wgmma and TMA.
//
//   o[r]   = sum_j softmax_j(logits(scale q[r] . k[j])) v[j]
//   lse[r] = log2 sum_j 2^(logits_j log2 e)                          (base 2; softmax.cuh)
//
// grid   (blocks)   persistent, one per multiprocessor; block b takes unit b, then the next that nobody took. A unit is
//                   a KV head of an item; items come longest first, `heads_at_once` heads of all items at a time
// block  384        warpgroup 0 brings q, keys and values; warpgroups 1 and 2 own 64 rows of the tile each
// smem   q of kQStages units, 2 x kTile keys, 2 x kTile values, all in rows of 128 swizzled bytes; barriers; the units
// needs  sm_90a; q, keys and values of one 16-bit type, head dims multiples of 64 up to 256; no rotation.
//        kGather false: TMA, so boxes of `box_rows` (a multiple of 8) rows that lie in one page
//
// The rows of a tile are the query heads of a KV head for several tokens: row = token * group + head in the group.
// Scores of tile j are under way together with the weighted values of tile j - 1, and a warpgroup's softmax runs while
// the other has the tensor cores: they issue in turns. Everything else (page table, copies, clearing of values that
// nobody may see) is warpgroup 0's, ahead of them. docs/kernels.md has the pipeline as a picture.
//
// reads  q; pages of the items' requests. Rows at or past kv_end may be read, and do not count
// writes out, lse of whole units and of merged ones; partial_o, partial_md of parts; counters and queue end as they began
// twins  src/cpu/attention/, src/reference/attention.rs, src/plan/schedule.rs
#pragma once
#include <fir/attention/finite.cuh>
#include <fir/attention/sm90_load.cuh>
#include <fir/attention/sm90_state.cuh>

namespace fir {

/// Warpgroups 1 and 2.
template <class C>
__device__ __forceinline__ void consume(const Sm90Params<typename C::Variant>& all, const Sm90Pipe<C>& pipe, unsigned char* shared, int group) {
  using V = typename C::Variant;
  using S = Sm90State<C>;
  const AttentionParams<V>& p = all.common;
  const int thread = threadIdx.x - 128, warp = (thread >> 5) & 3, lane = thread & 31;
  const Sm90Unit* units = reinterpret_cast<const Sm90Unit*>(shared + C::kUnits);
  RowContext* contexts = reinterpret_cast<RowContext*>(shared + C::kRowContexts) + group * 64 + warp * 16;
  const int* strange = reinterpret_cast<const int*>(shared + C::kStrange);

  // The maximum is that of the scores when they are multiplied by a positive number: a negative one goes to their signs.
  const float factor = p.sm_scale * p.kv.k_scale * (V::kHasLogits || !V::kSoftmax ? 1.0f : kLog2e);
  const bool flip = !C::kEach && factor < 0.0f;
  const float scale = C::kEach ? 1.0f : fmaxf(fabsf(factor), 1e-30f);

  Ring<C::kQStages> qs;
  Ring<C::kStages> ks, vs;
  auto free = [&](unsigned barrier) {
    if (lane == 0) barrier_arrive(barrier);
  };
  if (group == 1) named_arrive(1, 256);
  while (true) {
    barrier_wait(pipe.q_full(qs.stage), qs.phase);
    const Sm90Unit& u = units[qs.stage];
    if (u.head < 0) break;
    const int kv_start = u.item.kv_start, kv_end = u.item.kv_end, rows = u.item.tokens * p.group, full_end = u.item.full_end;
    // A short unit is the first warpgroup's alone.
    const bool both = rows > 64;
    if (group == 1 && !both) {
#pragma unroll 1
      for (int pos = kv_start; pos < kv_end; pos += C::kTile) {
        barrier_wait(pipe.k_full(ks.stage), ks.phase);
        free(pipe.k_empty(ks.stage));
        barrier_wait(pipe.v_ready(vs.stage), vs.phase);
        free(pipe.v_empty(vs.stage));
        ks.next(), vs.next();
      }
    } else {
      if constexpr (C::kContexts) {
        if (lane < 16) contexts[lane] = row_context(u.item, p.out.tokens, u.head, p.group, min(group * 64 + warp * 16 + lane, rows - 1));
        __syncwarp();
      }
      S state;
      float s[S::kScores];
      u32 weights[C::kTile / 16][4];
      state.m[0] = state.m[1] = neg_inf();
      state.d[0] = state.d[1] = 0.0f;
#pragma unroll
      for (int i = 0; i < S::kOut; ++i) state.o[i] = 0.0f;

      const unsigned q_at = pipe.base + C::kQ + qs.stage * C::kQBytes + group * 64 * 128;
      const WgmmaTile q_tile(q_at, 16, 1024);
      auto turn = [&] {
        if (both) named_sync(1 + group, 256);
      };
      auto pass = [&] {
        if (both) named_arrive(2 - group, 256);
      };
      auto scores = [&] {
        const WgmmaTile k_tile(pipe.base + C::kK + ks.stage * C::kKBytes, 16, C::kDimQk * 16);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < C::kDimQk / 16; ++i) {
          wgmma<C::kType, 0, 0>(s, q_tile.at((i / 4) * C::kRows * 128 + (i % 4) * 32), k_tile.at((i / 4) * 1024 + (i % 4) * 32), i != 0);
        }
        wgmma_commit();
      };
      auto values = [&] {
        const WgmmaTile v_tile(pipe.base + C::kV + vs.stage * C::kVBytes, 1024, C::kDimVo * 16);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < C::kTile / 16; ++i) wgmma<C::kType, 1>(state.o, weights[i], v_tile.at(i * C::kDimVo * 32), 1);
        wgmma_commit();
      };
      // Scores to weights, but for what waits until `o` is at rest.
      constexpr bool kStale = V::kSoftmax && !C::kEach && !V::kHasOutput && !V::kHasValue;
      float by[2];
      auto soften = [&](int pos, bool masked) {
        if (flip) {
#pragma unroll
          for (int i = 0; i < S::kScores; ++i) s[i] = -s[i];
        }
        if (C::kEach || masked) S::edit(s, p, u, contexts, pos, masked, factor);
        bool grown = false;
        if constexpr (V::kSoftmax) grown = state.rise(s, scale, by);
        state.weigh(s, scale);
        return grown;
      };
      auto sum = [&](int pos) {
        state.sum(s, [&](int j) { return V::value_scale(p.variant, u.item.request, u.item.kv_len, u.item.kv_base + pos + j, u.head); });
      };
      // Values that are not finite where a mask hides some: added to the rows that see them, then cleared for the product.
      // `at`: the stage of this tile's values.
      auto settle = [&](bool masked, Ring<C::kStages> at) {
        if constexpr (V::kHasMask) {
          if (masked) {
            barrier_wait(pipe.v_ready(at.stage), at.phase);
            const int* f = strange + at.stage * 4;
            if (f[0] | f[1] | f[2] | (C::kGather ? f[3] : 0)) {
              const ValueTile<typename C::Type, C::kTile, C::kDimVo / 8, GroupedRows<C::kDimVo>> tile{shared + C::kV + at.stage * C::kVBytes, nullptr};
              tile.template add<1, C::kDimVo / 8>(state.o, s, [](float x, int, int, int) { return x; });
              named_sync(4, both ? 256 : 128);
              if (both) tile.template clear<256>(thread);
              else tile.template clear<128>(thread);
              fence_async_proxy();
              named_sync(4, both ? 256 : 128);
            }
          }
        }
      };
      auto pack = [&] {
#pragma unroll
        for (int i = 0; i < C::kTile / 16; ++i) {
#pragma unroll
          for (int j = 0; j < 4; ++j) weights[i][j] = pack2<typename C::Type>(s[8 * i + 2 * j], s[8 * i + 2 * j + 1]);
        }
      };

      if (kv_start < kv_end) {
        barrier_wait(pipe.k_full(ks.stage), ks.phase);
        turn();
        scores();
        pass();
        wgmma_wait<0>();
        free(pipe.k_empty(ks.stage));
        ks.next();
        const bool first = kv_start + C::kTile > full_end;
        soften(kv_start, first);
        sum(kv_start);
        settle(first, vs);
        pack();
        int pos = kv_start + C::kTile;
        auto step = [&](bool masked) {
          barrier_wait(pipe.k_full(ks.stage), ks.phase);
          turn();
          scores();
          barrier_wait(pipe.v_ready(vs.stage), vs.phase);
          values();
          pass();
          wgmma_wait<1>();
          if (kStale && !masked) {
            if (flip) {
#pragma unroll
              for (int i = 0; i < S::kScores; ++i) s[i] = -s[i];
            }
            state.weigh(s, scale);
            wgmma_wait<0>();
            free(pipe.v_empty(vs.stage));
            vs.next();
            float sum[2];
            S::add_up(s, sum);
            if (__any_sync(~0u, state.is_lost(sum[0], 0) || state.is_lost(sum[1], 1))) {
              state.again(s, sum, shared + C::kQ + qs.stage * C::kQBytes + (group * 64 + warp * 16) * 128, shared + C::kK + ks.stage * C::kKBytes, factor);
            }
            free(pipe.k_empty(ks.stage));
            ks.next();
            state.calm(s, sum);
            pack();
            return;
          }
          free(pipe.k_empty(ks.stage));
          ks.next();
          const bool grown = soften(pos, masked);
          wgmma_wait<0>();
          free(pipe.v_empty(vs.stage));
          vs.next();
          sum(pos);
          if (grown) state.rescale(by);
          settle(masked, vs);
          pack();
        };
        // Tiles that every row sees, then the others: no question is asked in the first loop.
#pragma unroll 1
        for (; pos + C::kTile <= full_end; pos += C::kTile) step(false);
#pragma unroll 1
        for (; pos < kv_end; pos += C::kTile) step(true);
        barrier_wait(pipe.v_ready(vs.stage), vs.phase);
        values();
        wgmma_wait<0>();
        free(pipe.v_empty(vs.stage));
        vs.next();
      }
      // The unit's queries are no longer read: their place takes the rows on their way out.
      named_sync(5 + group, 128);
      state.template finish<C::kRows * 128>(p, u.item, u.head, group * 64 + warp * 16,
                                            shared + C::kQ + qs.stage * C::kQBytes + (group * 64 + warp * 16) * 128);
    }
    if (u.item.partial >= 0) {
      const int at = u.item.merge + u.head - u.item.head_start;
      const MergeItem merge = p.out.merges[at];
      if (last_part(p.out, at, merge.parts, reinterpret_cast<int*>(shared + C::kFlag), thread, [] { named_sync(3, 256); })) {
        merge_parts<V, typename C::Out, 4, 4>(p.out, p.variant, u.item, u.head, p.group, merge, C::kDimVo, p.kv.v_scale, thread, 256);
      }
    }
    fence_async_proxy();
    __syncwarp();
    free(pipe.q_empty(qs.stage));
    qs.next();
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) prefill_sm90(const __grid_constant__ Sm90Params<typename C::Variant> all) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // dispatch knows; the text compiles for all
  extern __shared__ __align__(1024) unsigned char shared[];
  const Sm90Pipe<C> pipe{shared_address(shared)};
  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
  start_next();  // short tiles of the same call run beside this (decode.cuh)
  if (threadIdx.x == 0) pipe.init();
  __syncthreads();
  if (group == 0) {
    fewer_registers<40>();
    if constexpr (C::kGather) bring_rows(all, pipe, shared);
    else if (threadIdx.x < 32) bring_boxes(all, pipe, shared);
    else keep_boxes(pipe, shared);
  } else {
    more_registers<232>();
    consume(all, pipe, shared, group - 1);
  }
#endif
}

}  // namespace fir
