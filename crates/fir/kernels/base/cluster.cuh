// cluster.cuh: the blocks of one cluster as one: rank, barrier, and words in each other's shared memory.
//
// Below sm_90 there are no clusters: the size is 1, the barrier is the block's, and the other block is this one, so that
// one text serves both.
//
// Order: what a thread wrote before `cluster_sync` (to its own or another block's shared memory, or to global memory) is seen by
// every thread of the cluster after it. No block may exit while another may still reach into it: whoever reads or writes
// remotely is followed by one more `cluster_sync` of all.
#pragma once
#include <fir/base/types.cuh>

namespace fir {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define FIR_CLUSTERS 1
#else
#define FIR_CLUSTERS 0
#endif

__device__ __forceinline__ u32 cluster_rank() {
#if FIR_CLUSTERS
  u32 r;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
#else
  return 0;
#endif
}

__device__ __forceinline__ u32 cluster_size() {
#if FIR_CLUSTERS
  u32 r;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(r));
  return r;
#else
  return 1;
#endif
}

__device__ __forceinline__ void cluster_sync() {
#if FIR_CLUSTERS
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
  __syncthreads();
#endif
}

__device__ __forceinline__ u32 shared_address(const void* p) {
  return u32(__cvta_generic_to_shared(p));
}

// The address that `p`, in this block's shared memory, has in block `rank`.
__device__ __forceinline__ u32 peer_address(const void* p, u32 rank) {
  u32 a = shared_address(p);
#if FIR_CLUSTERS
  asm("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(a) : "r"(rank));
#endif
  return a;
}

__device__ __forceinline__ void peer_store(u32 address, u32 x) {
#if FIR_CLUSTERS
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
#else
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
#endif
}

__device__ __forceinline__ void peer_store(u32 address, u64 x) {
#if FIR_CLUSTERS
  asm volatile("st.shared::cluster.u64 [%0], %1;" ::"r"(address), "l"(x) : "memory");
#else
  asm volatile("st.shared.u64 [%0], %1;" ::"r"(address), "l"(x) : "memory");
#endif
}

__device__ __forceinline__ u32 peer_load(u32 address) {
  u32 x;
#if FIR_CLUSTERS
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
#else
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
#endif
  return x;
}

// 16 bytes, as aligned.
__device__ __forceinline__ void peer_load(u32 address, u32 (&x)[4]) {
#if FIR_CLUSTERS
  asm volatile("ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(address) : "memory");
#else
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(address) : "memory");
#endif
}

}  // namespace fir
