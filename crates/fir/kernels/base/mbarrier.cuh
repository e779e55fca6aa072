// mbarrier.cuh: barriers in shared memory that count threads and bytes, named barriers, and registers per warpgroup.
//
// A barrier's phases alternate in parity. A fresh one is in phase 0: waiting for parity 0 returns after the first
// completion, waiting for parity 1 at once. So who fills a ring waits for "empty" with parity 1 first, who reads it
// for "full" with parity 0, and each flips when its stage number wraps.
//
// needs  sm_90 (setmaxnreg: sm_90a, and __launch_bounds__(threads, 1))
#pragma once
#include <fir/base/types.cuh>

namespace fir {

/// One thread, for each barrier; then `barrier_init_done`, then a barrier of the block.
__device__ __forceinline__ void barrier_init(u32 barrier, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
__device__ __forceinline__ void barrier_init_done() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/// A warp arrives, whose lanes have come together before: by lane 0, and with FIR_EACH_LANE by every lane, for tools that follow what each
/// thread does and not what a warp does. Barriers count `kWarpArrivals` for it.
#ifdef FIR_EACH_LANE
constexpr u32 kWarpArrivals = 32;
__device__ __forceinline__ void barrier_arrive_warp(u32 barrier) { barrier_arrive(barrier); }
#else
constexpr u32 kWarpArrivals = 1;
__device__ __forceinline__ void barrier_arrive_warp(u32 barrier) {
  if ((threadIdx.x & 31) == 0) barrier_arrive(barrier);
}
#endif

/// Arrives, and says that so many bytes will come (whole boxes, also where rows of them are out of bounds).
__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

/// Arrives when this thread's cp.async copies so far are done. The arrival is one of the barrier's count.
__device__ __forceinline__ void barrier_arrive_copies(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n.reg .pred p;\nagain: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra done;\nbra again;\ndone:\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

/// Named barriers 1 to 15 beside __syncthreads' 0; `threads` counts those who wait and those who only arrive.
__device__ __forceinline__ void named_sync(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
__device__ __forceinline__ void named_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/// Ordinary writes to shared memory become visible to wgmma and to copies by TMA: every writer, then a barrier.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

/// All threads of a warpgroup: registers per thread from here on, multiples of 8 from 24 to 256.
template <int kRegisters>
__device__ __forceinline__ void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace fir
