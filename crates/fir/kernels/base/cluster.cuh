// cluster.cuh: the blocks of one cluster as one: rank, barrier, and words in each other's shared memory.
//
// Below sm_90 there are no clusters: the size is 1, the barrier is the block's, and the other block is this one, so that
// one text serves both.
//
// Order: what a thread wrote before `cluster_sync` (to its own or another block's shared memory, or to global memory) is seen by
// every thread of the cluster after it. No block may exit while another may still reach into it: whoever reads or writes
// remotely is followed by one more `cluster_sync` of all.
#pragma once
#include <fir/base/cp_async.cuh>
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

// Cheaper where the cluster is one block: no fence of global memory.
__device__ __forceinline__ void cluster_sync(u32 size) {
  if (size == 1) __syncthreads();
  else cluster_sync();
}

// A barrier in two halves, with work of this block between them, that orders nothing: all have begun.
__device__ __forceinline__ void cluster_arrive() {
#if FIR_CLUSTERS
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if FIR_CLUSTERS
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
  __syncthreads();
#endif
}

// `p` again, as one that the compiler knows to be in shared memory: for functions that are not inlined.
template <class T>
__device__ __forceinline__ T* known_shared(T* p) {
  return static_cast<T*>(__cvta_shared_to_generic(shared_address(p)));
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

// 16 bytes, as aligned.
__device__ __forceinline__ void peer_store(u32 address, u32 a, u32 b, u32 c, u32 d) {
#if FIR_CLUSTERS
  asm volatile("st.shared::cluster.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
#else
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
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

}  // namespace fir
