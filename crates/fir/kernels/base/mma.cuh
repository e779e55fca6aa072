// mma.cuh: the tensor-core tile m16n8k16 of mma.sync, and ldmatrix, which brings its operands from shared memory.
//
// Lane l of a warp, r = l / 4, q = l % 4:
//   A  a0 = (row r, k 2q..2q+1)  a1 = (r + 8, same)  a2 = (r, k 8+2q..)  a3 = (r + 8, k 8+2q..)   low half = lower k
//   B  b0 = (k 2q..2q+1, col r)  b1 = (k 8+2q.., col r)
//   D  d[i] = (row r + 8 (i >> 1), col 2q + (i & 1))
// So two D tiles side by side are one A tile: a = {pack(d0[0..1]), pack(d0[2..3]), pack(d1[0..1]), pack(d1[2..3])}.
//
// needs  sm_80
#pragma once

namespace fir {

/// Four 8x8 matrices of 16-bit units: lane 8i + j gives the address of row j of matrix i; `r[i]` of lane l is units
/// 2q, 2q + 1 of row l / 4.
__device__ __forceinline__ void ldmatrix_x4(unsigned (&r)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

/// The same, transposed: `r[i]` of lane l is unit l / 4 of rows 2q (low half) and 2q + 1.
__device__ __forceinline__ void ldmatrix_x4_trans(unsigned (&r)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void mma_bf16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void mma_f16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace fir
