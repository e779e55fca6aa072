// reduce.cuh: sums over the threads that share a row, in an order that depends on their number alone.
//
// needs  sm_80
#pragma once
#include <fir/base/types.cuh>

namespace fir {

// Sum over `width` neighbouring lanes, a power of two up to 32; every lane gets it. All lanes of the warp take part.
__device__ __forceinline__ float warp_sum(float x, u32 width) {
  for (u32 step = width / 2; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

// Sum over the threads of a row: `width` of them, neighbours, a power of two. Past 32 the row has the block for itself,
// and `scratch` is 32 floats of shared memory.
__device__ __forceinline__ float row_sum(float x, u32 width, float* scratch) {
  if (width <= 32) return warp_sum(x, width);
  x = warp_sum(x, 32);
  u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = width / 32;
  __syncthreads();  // the last sum has been read
  if (lane == 0) scratch[warp] = x;
  __syncthreads();
  return warp_sum(lane < warps ? scratch[lane] : 0.f, 32);
}

}  // namespace fir
