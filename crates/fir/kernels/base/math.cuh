// math.cuh: functions of one float, and the instructions that let launches overlap.
//
// needs  sm_80
#pragma once
#include <fir/base/types.cuh>

namespace fir {

// 2^x: two units in the last place; subnormal results are 0.
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / (1 + e^-x). The quotient is within two units in the last place, and 0 below 2^-126.
__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.f, 1.f + expf(-x)); }

// 1 / sqrt(x), to a unit in the last place: the instruction's 2^-22.9 is mended by one step of Newton's, except where that
// would make NaN of 0 or infinity.
__device__ __forceinline__ float rsqrt(float x) {
  float y;
  asm("rsqrt.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  float better = y * fmaf(-0.5f * x * y, y, 1.5f);
  return x > 0.f && x < __int_as_float(0x7f800000) ? better : y;
}

// Lets the next kernel of the stream start, and waits until the one before has ended and its writes are seen. A kernel
// launched early must wait before it touches memory; the others lose nothing by it.
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void start_next() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace fir
