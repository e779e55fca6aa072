// prefill_queue.cuh: the queue that blocks of the prefill kernels take units from.
#pragma once

namespace fir {

/// Who has taken what.
struct WorkQueue {
  /// Units taken beyond the first of each block, and blocks that are done; 0 before and after every launch.
  unsigned taken, done;
};

/// A number as a type, for lambdas.
template <int n>
struct Number {
  static constexpr int value = n;
};

}  // namespace fir
