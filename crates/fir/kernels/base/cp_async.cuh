// cp_async.cuh: copies from device to shared memory that pass no register.
//
// A copy belongs to the thread that issued it: that thread waits for its groups, then a barrier (of the warp, where
// only the warp reads) shows the bytes to the others.
//
// needs  sm_80
#pragma once

namespace fir {

__device__ __forceinline__ unsigned shared_address(const void* p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

#ifndef FIR_L2
#define FIR_L2 1
#endif

/// How L2 treats what is read once: the lines come in as the first to leave again, so that a stream of hundreds of MB
/// displaces its own lines and neither what the next kernel wants nor (which costs bandwidth now) lines to be written back.
__device__ __forceinline__ unsigned long long l2_read_once() {
  unsigned long long policy = 0;
#if FIR_L2 == 1 || FIR_L2 == 2 || FIR_L2 == 3
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
#elif FIR_L2 == 6
  asm("createpolicy.fractional.L2::evict_unchanged.b64 %0, 1.0;" : "=l"(policy));
#endif
  return policy;
}

/// 16 bytes, past L1. `bytes` below 16 reads so many and fills the rest with zeros; 0 reads nothing, but the address
/// must still be one that could be read.
__device__ __forceinline__ void cp_async_16(unsigned shared, const void* global, unsigned bytes, unsigned long long policy) {
  // The hint: a whole 128-byte line comes to L2, of which other lanes ask the rest anyway.
#if FIR_L2 == 0
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
#elif FIR_L2 == 2
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(shared), "l"(global), "r"(bytes), "l"(policy) : "memory");
#elif FIR_L2 == 3
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::256B [%0], [%1], 16, %2, %3;" ::"r"(shared), "l"(global), "r"(bytes), "l"(policy) : "memory");
#elif FIR_L2 == 4
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
#elif FIR_L2 == 5
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
#else
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(shared), "l"(global), "r"(bytes), "l"(policy)
               : "memory");
#endif
}

/// The same, all 16 bytes.
__device__ __forceinline__ void cp_async_16(unsigned shared, const void* global, unsigned long long policy) {
#if FIR_L2 == 0
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
#elif FIR_L2 == 2
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "l"(policy) : "memory");
#elif FIR_L2 == 3
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::256B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "l"(policy) : "memory");
#elif FIR_L2 == 4
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
#elif FIR_L2 == 5
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
#else
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "l"(policy) : "memory");
#endif
}

/// 4 bytes, as above.
__device__ __forceinline__ void cp_async_4(unsigned shared, const void* global, unsigned bytes = 4) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}

/// Closes the group of the copies since the last one; an empty group is complete at once.
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

/// Waits until at most `kLeft` of this thread's groups are under way.
template <int kLeft>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

}  // namespace fir
