// sm90_prefill.cuh: many query rows against KV on Hopper: prefill, append, mixed batches, block-sparse; wgmma and TMA.
//
//   o[r]   = sum_j softmax_j(logits(scale q[r] . k[j])) v[j]
//   lse[r] = log2 sum_j 2^(logits_j log2 e)                          (base 2; softmax.cuh)
//
// grid   (blocks)   persistent, one per multiprocessor; block b takes unit b, then the next that nobody took. A unit is
//                   a KV head of an item; items come longest first, `heads_at_once` heads of all items at a time
// block  384        warpgroup 0 brings q, keys and values, and the output out; warpgroups 1 and 2 own 64 rows of the tile each
//        512        of rows that are gathered: warpgroup 3 brings keys and values; of e4m3: it makes them wider
// smem   q of kQStages units, 2 x kTile keys, 2 x kTile values, all in rows of 128 swizzled bytes; e4m3: tiles as they come;
//        barriers; units and their rows' contexts
// needs  sm_90a; q, keys and values of one 16-bit type, head dims multiples of 64 up to 256; or keys and values of e4m3 in multiples of 128,
//        values up to 128, q of them or 16-bit; no rotation. kGather false: TMA, so boxes of `box_rows` (a multiple of 8) rows that lie
//        in one page
//
// e4m3   with q of e4m3, scores are products of e4m3, weighted values of f16. A sum of e4m3 products has some 13 bits (relative to its
//        largest term): better than scores rounded to bf16, but for terms of one sign. Weights of 3 bits would be off by 3 times what the
//        tests allow bf16 code. With q of 16 bits, keys and values become what it is, in which they are exact.
//
// The rows of a tile are the query heads of a KV head for several tokens: row = token * group + head in the group.
// Tiles come from the last to the first: the one with a mask, which takes a step of its own, is first. Scores of a tile are under
// way together with the weighted values of the tile before, also from unit to unit, and a warpgroup's softmax runs while the other has
// the tensor cores: they issue in turns. Everything else (units, page table, copies, clearing of values that nobody may see) is
// warpgroup 0's, ahead of them. docs/kernels.md has the pipeline as a picture.
//
// reads  q; pages of the items' requests. Rows at or past kv_end may be read, and do not count
// writes out, lse of whole units and of merged ones; partial_o, partial_md of parts; counters and queue end as they began
// twins  src/cpu/attention/, src/reference/attention.rs, src/plan/schedule.rs
#pragma once
#include <fir/attention/finite.cuh>
#include <fir/attention/sm90_load.cuh>
#include <fir/attention/sm90_state.cuh>

namespace fir {

/// Both warpgroups: their part of a unit is written; if it was the last, all parts become the output. Not inlined: it stands in two
/// places, and is rare.
template <class C>
__device__ __noinline__ void merge_unit(const AttentionParams<typename C::Variant>& p, const Sm90Unit& u, int* flag) {
  const int thread = threadIdx.x - 128, at = u.item.merge + u.head - u.item.head_start;
  const MergeItem merge = p.out.merges[at];
  if (last_part(p.out, at, merge.parts, flag, thread, [] { named_sync(3, 256); })) {
    merge_parts<typename C::Variant, typename C::Out, 4, 4>(p.out, p.variant, u.item, u.head, p.group, merge, C::kDimVo, p.kv.v_scale, thread, 256);
  }
}

/// Warpgroups 1 and 2.
template <class C>
__device__ __forceinline__ void consume(const Sm90Params<typename C::Variant>& all, const Sm90Pipe<C>& pipe, unsigned char* shared, int group) {
  using V = typename C::Variant;
  using S = Sm90State<C>;
  const AttentionParams<V>& p = all.common;
  const int thread = threadIdx.x - 128, warp = (thread >> 5) & 3;
  const int first_row = group * 64 + warp * 16;
  const Sm90Unit* units = reinterpret_cast<const Sm90Unit*>(shared + C::kUnits);
  const RowContext* all_contexts = reinterpret_cast<const RowContext*>(shared + C::kRowContexts) + first_row;
  const int* strange = reinterpret_cast<const int*>(shared + C::kStrange);

  // The maximum is that of the scores when they are multiplied by a positive number: a negative one goes to their signs.
  const float factor = p.sm_scale * p.kv.k_scale * (V::kHasLogits || !V::kSoftmax ? 1.0f : kLog2e);
  const bool flip = !C::kEach && factor < 0.0f;
  const float scale = C::kEach ? 1.0f : fmaxf(fabsf(factor), 1e-30f);
  constexpr bool kStale = V::kSoftmax && !C::kEach && !V::kHasOutput && !V::kHasValue;

  Ring<C::kQStages> qs;
  Ring<C::kUnitStages> us;
  Ring<C::kStages> ks, vs;
  // The unit at `us`: its places, and whether both warpgroups have rows of it.
  int pos, kv_start, full_end;
  bool both;
  S state;
  float s[S::kScores];
  u32 weights[C::kTile / 16][4];

  auto free = [](unsigned barrier) { barrier_arrive_warp(barrier); };
  auto wait_keys = [&] { barrier_wait(pipe.k_full(ks.stage), ks.phase); };
  auto wait_values = [&] { barrier_wait(pipe.v_ready(vs.stage), vs.phase); };
  auto open = [&](const Sm90Unit& u) {
    pos = last_tile<C>(u.item), kv_start = u.item.kv_start, full_end = u.item.full_end;
    both = u.item.tokens * p.group > 64;
    state.m[0] = state.m[1] = neg_inf();
    state.d[0] = state.d[1] = 0.0f;
  };
  auto turn = [&] {
    if (both) named_sync(1 + group, 256);
  };
  auto pass = [&] {
    if (both) named_arrive(2 - group, 256);
  };
  auto scores = [&] {
    const WgmmaTile q_tile(pipe.base + C::kQ + qs.stage * C::kQBytes + group * 64 * 128, 16, 1024);
    const WgmmaTile k_tile(pipe.base + C::kK + ks.stage * C::kKBytes, 16, C::kRowBytes * 8);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < C::kRowBytes / 32; ++i) {
      wgmma<C::kKeyType, 0, 0>(s, q_tile.at((i / 4) * C::kRows * 128 + (i % 4) * 32), k_tile.at((i / 4) * 1024 + (i % 4) * 32), i != 0);
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
  auto negate = [&] {
    if (flip) {
#pragma unroll
      for (int i = 0; i < S::kScores; ++i) s[i] = -s[i];
    }
  };
  // Scores to weights, but for what waits until `o` is at rest: whether that is to be multiplied by `by`.
  float by[2];
  auto soften = [&](bool masked) {
    negate();
    if (C::kEach || masked) S::edit(s, p, units[us.stage], all_contexts + us.stage * C::kRows, pos, masked, factor);
    bool grown = false;
    if constexpr (V::kSoftmax) grown = state.rise(s, scale, by);
    state.weigh(s, scale);
    return grown;
  };
  auto sum = [&] {
    const Sm90Unit& u = units[us.stage];
    state.sum(s, [&](int j) { return V::value_scale(p.variant, u.item.request, u.item.kv_len, u.item.kv_base + pos + j, u.head); });
  };
  // Values that are not finite where a mask hides some: added to the rows that see them, then cleared for the product.
  auto settle = [&](bool masked) {
    if constexpr (V::kHasMask) {
      if (masked) {
        wait_values();
        if (strange[vs.stage]) {
          const ValueTile<typename C::Type, C::kTile, C::kDimVo / 8, GroupedRows<C::kDimVo * 2>> tile{shared + C::kV + vs.stage * C::kVBytes, nullptr};
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
  auto clear = [&] {
#pragma unroll
    for (int i = 0; i < S::kOut; ++i) state.o[i] = 0.0f;
  };
  // Writes the unit at `place`, whose q is at stage `at` and whose softmax ended with (m, d), and gives both back: the place of q with the
  // output in it.
  auto finish = [&](int place, int at, const float (&m)[2], const float (&d)[2], bool mine) {
    const Sm90Unit& u = units[place];
    if (mine) {
      named_sync(5 + group, 128);
      state.finish(p, u.item, u.head, first_row, all.group_inverse, m, d, is_staged<C>(all, u.item), pipe.base + C::kQ + at * C::kQBytes + first_row * 128);
    }
    if (u.item.partial >= 0) merge_unit<C>(p, u, reinterpret_cast<int*>(shared + C::kFlag));
    __syncwarp();
    free(pipe.q_empty(at));
    free(pipe.unit_empty(place));
  };

  if (group == 1) named_arrive(1, 256);
  while (true) {
    barrier_wait(pipe.unit_full(us.stage), us.phase);
    if (units[us.stage].head < 0) break;
    open(units[us.stage]);
    barrier_wait(pipe.q_full(qs.stage), qs.phase);
    // A short unit is the first warpgroup's alone.
    const bool mine = group == 0 || both;
    if (!mine) {
#pragma unroll 1
      for (; pos >= kv_start; pos -= C::kTile) {
        barrier_wait(pipe.k_full(ks.stage), ks.phase);
        free(pipe.k_empty(ks.stage));
        barrier_wait(pipe.v_ready(vs.stage), vs.phase);
        free(pipe.v_empty(vs.stage));
        ks.next(), vs.next();
      }
    }
    clear();
    if (pos >= kv_start) {
      wait_keys();
      turn();
      scores();
      pass();
      wgmma_wait<0>();
      free(pipe.k_empty(ks.stage));
      ks.next();
      const bool masked = pos + C::kTile > full_end;
      soften(masked);
      sum();
      settle(masked);
      pack();
      pos -= C::kTile;
      while (true) {
        // Tiles that every row sees, where it has seen something before: no question is asked.
#pragma unroll 1
        for (; pos >= kv_start && pos + C::kTile < full_end; pos -= C::kTile) {
          wait_keys();
          turn();
          scores();
          wait_values();
          values();
          pass();
          wgmma_wait<1>();
          if constexpr (kStale) {
            negate();
            float sums[2];
            state.weigh_and_add(s, scale, sums);
            wgmma_wait<0>();
            free(pipe.v_empty(vs.stage));
            vs.next();
            if (__any_sync(~0u, state.is_lost(sums[0], 0) || state.is_lost(sums[1], 1))) {
              state.again(s, sums, shared + C::kQ + qs.stage * C::kQBytes + first_row * 128, shared + C::kK + ks.stage * C::kKBytes, factor);
            }
            free(pipe.k_empty(ks.stage));
            ks.next();
            state.calm(s, sums);
          } else {
            free(pipe.k_empty(ks.stage));
            ks.next();
            const bool grown = soften(false);
            wgmma_wait<0>();
            free(pipe.v_empty(vs.stage));
            vs.next();
            sum();
            if (grown) state.rescale(by);
          }
          pack();
        }
        // Others; and, beside the last values of this unit, the first tile of the next.
        float m[2] = {state.m[0], state.m[1]}, d[2] = {state.d[0], state.d[1]};
        const bool last = pos < kv_start;
        const int place = us.stage, at = qs.stage;
        if (last) {
          // With one place for q, the next is not there yet.
          if constexpr (C::kQStages == 1) break;
          Ring<C::kUnitStages> next = us;
          next.next();
          barrier_wait(pipe.unit_full(next.stage), next.phase);
          const Sm90Unit& n = units[next.stage];
          if (n.head < 0 || n.item.kv_start >= n.item.kv_end || (n.item.tokens * p.group > 64) != both) break;
          us = next;
          qs.next();
          open(n);
          barrier_wait(pipe.q_full(qs.stage), qs.phase);
        }
        wait_keys();
        turn();
        scores();
        wait_values();
        values();
        pass();
        wgmma_wait<1>();
        free(pipe.k_empty(ks.stage));
        ks.next();
        const bool masked = pos + C::kTile > full_end;
        const bool grown = soften(masked);
        wgmma_wait<0>();
        free(pipe.v_empty(vs.stage));
        vs.next();
        sum();
        if (last) {
          finish(place, at, m, d, true);
          clear();
        } else if (grown) {
          state.rescale(by);
        }
        settle(masked);
        pack();
        pos -= C::kTile;
      }
      wait_values();
      values();
      wgmma_wait<0>();
      free(pipe.v_empty(vs.stage));
      vs.next();
    }
    finish(us.stage, qs.stage, state.m, state.d, mine);
    us.next(), qs.next();
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) prefill_sm90(const __grid_constant__ Sm90Params<typename C::Variant> all) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // dispatch knows; the text compiles for all
  extern __shared__ __align__(1024) unsigned char shared[];
  const Sm90Pipe<C> pipe{shared_address(shared)};
  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (threadIdx.x == 0) pipe.init();
  wait_for_previous();
  start_next();  // short tiles of the same call run beside this (decode.cuh), and do not wait for the one before
  __syncthreads();
  if (group == 0) {
    fewer_registers<C::kFourth ? 32 : 40>();
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    if (warp == 0) {
      bring_units(all, pipe, shared);
    } else if (warp == 3) {
      if constexpr (!C::kWiden) keep_values(pipe, shared);
    } else if constexpr (C::kGather) {
      if constexpr (!C::kFourth) bring_rows(all, pipe, shared);
    } else if (warp == 1) {
      bring_boxes<C, true>(all, pipe, shared);
    } else {
      bring_boxes<C, false>(all, pipe, shared);
    }
  } else if (C::kFourth && group == 3) {
    fewer_registers<C::kFourth ? 32 : 40>();
    if constexpr (C::kWiden) widen_tiles(pipe, shared);
    else if constexpr (C::kGather) bring_rows(all, pipe, shared);
  } else {
    more_registers<C::kFourth ? 224 : 232>();
    consume(all, pipe, shared, group - 1);
  }
#endif
}

}  // namespace fir
