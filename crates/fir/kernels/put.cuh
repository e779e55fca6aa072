// put.cuh: writes bytes that came as a parameter: how small arrays of the host reach the device without a wait, and stay as
// they are in a recorded graph.
//
// grid   (1)
// block  128
//
// reads  its parameter
// writes p.words words from p.to on
// twins  src/cuda/put.rs
#pragma once

namespace fir {

struct PutParams {
  unsigned long long* to;
  unsigned words, pad;
  unsigned long long values[256];
};

__global__ void __launch_bounds__(128) put(const __grid_constant__ PutParams p) {
  for (unsigned i = threadIdx.x; i < p.words; i += 128) p.to[i] = p.values[i];
}

}  // namespace fir
