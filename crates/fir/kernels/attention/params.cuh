// params.cuh: what a launch of attention is given.
//
// twins  src/cuda/attention/form.rs
#pragma once
#include <fir/attention/paged_kv.cuh>
#include <fir/attention/softmax.cuh>
#include <fir/attention/state.cuh>
#include <fir/attention/variant.cuh>

namespace fir {

/// Who has taken what of a list that blocks take from in turn.
struct WorkQueue {
  /// Units taken beyond the first of each block, and blocks that are done; 0 before and after every launch.
  unsigned taken, done;
};

template <class Variant>
struct AttentionParams {
  const unsigned char* q;
  /// Strides of tokens and heads in bytes, multiples of 16.
  long long q_token, q_head;
  const WorkItem* items;
  OutParams out;
  KvPool kv;
  float sm_scale;
  /// Query heads per KV head.
  int group;
  /// Blocks that share a list of items (state.cuh).
  int team;
  /// Whether the kernel before it is of the same call and runs beside this one; else nothing is read before it has ended.
  int beside;
  typename Variant::Params variant;
};

}  // namespace fir
