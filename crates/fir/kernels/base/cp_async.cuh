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

/// 16 bytes, past L1. `bytes` below 16 reads so many and fills the rest with zeros; 0 reads nothing, but the address
/// must still be one that could be read. A whole 128-byte line comes to L2, of which other lanes ask the rest anyway.
///
/// No cache policy: `evict_first` for KV brought nothing on an H200 whose L2 was clean (64 x 2048: 130.3 us against 130.7)
/// and cost 4 % of large batches (64 x 8192: 509 against 490). It hid 1 to 3 us of small ones where the kernel before had left L2 full of
/// lines to write back, and no more. Nor do hinted copies come out right everywhere: ptxas 13.0 takes [register + uniform
/// register] for their shared address and then leaves base and descriptor unset, an illegal instruction.
__device__ __forceinline__ void cp_async_16(unsigned shared, const void* global, unsigned bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}

/// The same, all 16 bytes.
__device__ __forceinline__ void cp_async_16(unsigned shared, const void* global) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
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
