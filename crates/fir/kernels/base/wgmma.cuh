// wgmma.cuh: products of a warpgroup, m64 x n x k16 (8-bit types k32): A from shared memory or registers, B from shared.
//
// Thread t of the warpgroup, r = 16 (t / 32) + t % 32 / 4, q = t % 4:
//   D  d[i] = (row r + 8 ((i >> 1) & 1), column 8 (i >> 2) + 2q + (i & 1))
//   A  a0 = (row r, k 2q..2q+1)  a1 = (r + 8, same)  a2 = (r, k 8+2q..)  a3 = (r + 8, k 8+2q..)   low half = lower k
// So columns 16 j..16 j + 15 of D are the A of step j: a[y] = pack(d[8 j + 2 y], d[8 j + 2 y + 1]).
//
// Operands in shared memory are tiles of 128-byte rows with the 128-byte swizzle (tma.cuh), tiles from a multiple of
// 1024 bytes on. The swizzle is taken from address bits, so a descriptor may start anywhere in a tile:
//   k-major   rows of A or B, 64 elements of k each: `stride` = bytes between groups of 8 rows; a step of k is 32 bytes
//   mn-major  rows of k, 64 elements of n each (a value tile): `leading` = bytes between tiles of 64 n, `stride` =
//             bytes between groups of 8 k; a step of 16 k is two groups
//
// Order: wait for the data; wgmma_fence; products; wgmma_commit; wgmma_wait. The fence is needed whenever other code wrote
// registers of a product since. Everything between fence and wait is inlined and without branches around products, or
// ptxas makes them wait for each other (notes C7510 to C7519).
//
// needs  sm_90a
#pragma once
#include <fir/base/types.cuh>

namespace fir {

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
/// Waits until at most `kLeft` groups are under way.
template <int kLeft>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
}

/// A tile in shared memory with the 128-byte swizzle. Adding `bytes >> 4` moves its start.
__device__ __forceinline__ u64 wgmma_tile(u32 address, u32 leading, u32 stride) {
  return u64((address & 0x3ffff) >> 4) | u64(leading >> 4) << 16 | u64(stride >> 4) << 32 | 1ull << 62;
}

/// The same, for many starts: only the low word changes, without a carry.
struct WgmmaTile {
  u32 low, high;
  __device__ __forceinline__ WgmmaTile(u32 address, u32 leading, u32 stride)
      : low((address & 0x3ffff) >> 4 | leading >> 4 << 16), high(stride >> 4 | 1u << 30) {}
  /// From `bytes` further on.
  __device__ __forceinline__ u64 at(u32 bytes) const { return u64(high) << 32 | (low + (bytes >> 4)); }
};

/// Four 8x8 matrices of 16-bit units to shared memory: lane 8i + j gives the address of row j of matrix i.
__device__ __forceinline__ void stmatrix_x4(u32 address, u32 r0, u32 r1, u32 r2, u32 r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r0), "r"(r1), "r"(r2), "r"(r3) : "memory");
}

/// Element types of a product.
enum class Wgmma { kBf16, kF16, kE4m3 };

// Operands 0 to 8 i - 1 of an asm statement, and the accumulators that they are.
#define FIR_S1 "%0, %1, %2, %3, %4, %5, %6, %7"
#define FIR_S2 FIR_S1 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define FIR_S3 FIR_S2 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define FIR_S4 FIR_S3 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define FIR_S5 FIR_S4 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define FIR_S6 FIR_S5 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define FIR_S7 FIR_S6 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define FIR_S8 FIR_S7 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define FIR_S9 FIR_S8 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define FIR_S10 FIR_S9 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define FIR_S11 FIR_S10 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define FIR_S12 FIR_S11 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define FIR_S13 FIR_S12 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define FIR_S14 FIR_S13 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define FIR_S15 FIR_S14 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define FIR_S16 FIR_S15 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define FIR_D(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define FIR_D1 FIR_D(0)
#define FIR_D2 FIR_D1, FIR_D(8)
#define FIR_D3 FIR_D2, FIR_D(16)
#define FIR_D4 FIR_D3, FIR_D(24)
#define FIR_D5 FIR_D4, FIR_D(32)
#define FIR_D6 FIR_D5, FIR_D(40)
#define FIR_D7 FIR_D6, FIR_D(48)
#define FIR_D8 FIR_D7, FIR_D(56)
#define FIR_D9 FIR_D8, FIR_D(64)
#define FIR_D10 FIR_D9, FIR_D(72)
#define FIR_D11 FIR_D10, FIR_D(80)
#define FIR_D12 FIR_D11, FIR_D(88)
#define FIR_D13 FIR_D12, FIR_D(96)
#define FIR_D14 FIR_D13, FIR_D(104)
#define FIR_D15 FIR_D14, FIR_D(112)
#define FIR_D16 FIR_D15, FIR_D(120)

// The form for n columns; x0 to x6 are the numbers of the operands after the accumulators.
// d = a . b, plus d where `add` is not 0. kTransA, kTransB: 0 k-major, 1 mn-major (16-bit types alone).
#define FIR_WGMMA(n, s, d_, x0, x1, x2, x3, x4, x5, x6)                                                                        \
  template <Wgmma kType, int kTransA, int kTransB>                                                                             \
  __device__ __forceinline__ void wgmma(float (&d)[n / 2], u64 a, u64 b, int add) {                                            \
    if constexpr (kType == Wgmma::kBf16)                                                                                       \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " x2 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n                         \
                   "k16.f32.bf16.bf16 {" s "}, " x0 ", " x1 ", p, 1, 1, " x3 ", " x4 ";\n}"                                    \
                   : d_ : "l"(a), "l"(b), "r"(add), "n"(kTransA), "n"(kTransB));                                               \
    else if constexpr (kType == Wgmma::kF16)                                                                                   \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " x2 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n                         \
                   "k16.f32.f16.f16 {" s "}, " x0 ", " x1 ", p, 1, 1, " x3 ", " x4 ";\n}"                                      \
                   : d_ : "l"(a), "l"(b), "r"(add), "n"(kTransA), "n"(kTransB));                                               \
    else                                                                                                                       \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " x2 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n                         \
                   "k32.f32.e4m3.e4m3 {" s "}, " x0 ", " x1 ", p, 1, 1;\n}"                                                    \
                   : d_ : "l"(a), "l"(b), "r"(add));                                                                           \
  }                                                                                                                            \
  template <Wgmma kType, int kTransB>                                                                                          \
  __device__ __forceinline__ void wgmma(float (&d)[n / 2], const u32 (&a)[4], u64 b, int add) {                                \
    if constexpr (kType == Wgmma::kBf16)                                                                                       \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " x5 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n                         \
                   "k16.f32.bf16.bf16 {" s "}, {" x0 ", " x1 ", " x2 ", " x3 "}, " x4 ", p, 1, 1, " x6 ";\n}"                  \
                   : d_ : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(kTransB));                         \
    else if constexpr (kType == Wgmma::kF16)                                                                                   \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " x5 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n                         \
                   "k16.f32.f16.f16 {" s "}, {" x0 ", " x1 ", " x2 ", " x3 "}, " x4 ", p, 1, 1, " x6 ";\n}"                    \
                   : d_ : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(kTransB));                         \
    else                                                                                                                       \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " x5 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n                         \
                   "k32.f32.e4m3.e4m3 {" s "}, {" x0 ", " x1 ", " x2 ", " x3 "}, " x4 ", p, 1, 1;\n}"                          \
                   : d_ : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));                                       \
  }

FIR_WGMMA(16, FIR_S1, FIR_D1, "%8", "%9", "%10", "%11", "%12", "%13", "%14")
FIR_WGMMA(32, FIR_S2, FIR_D2, "%16", "%17", "%18", "%19", "%20", "%21", "%22")
FIR_WGMMA(64, FIR_S4, FIR_D4, "%32", "%33", "%34", "%35", "%36", "%37", "%38")
FIR_WGMMA(80, FIR_S5, FIR_D5, "%40", "%41", "%42", "%43", "%44", "%45", "%46")
FIR_WGMMA(96, FIR_S6, FIR_D6, "%48", "%49", "%50", "%51", "%52", "%53", "%54")
FIR_WGMMA(112, FIR_S7, FIR_D7, "%56", "%57", "%58", "%59", "%60", "%61", "%62")
FIR_WGMMA(128, FIR_S8, FIR_D8, "%64", "%65", "%66", "%67", "%68", "%69", "%70")
FIR_WGMMA(144, FIR_S9, FIR_D9, "%72", "%73", "%74", "%75", "%76", "%77", "%78")
FIR_WGMMA(160, FIR_S10, FIR_D10, "%80", "%81", "%82", "%83", "%84", "%85", "%86")
FIR_WGMMA(176, FIR_S11, FIR_D11, "%88", "%89", "%90", "%91", "%92", "%93", "%94")
FIR_WGMMA(192, FIR_S12, FIR_D12, "%96", "%97", "%98", "%99", "%100", "%101", "%102")
FIR_WGMMA(224, FIR_S14, FIR_D14, "%112", "%113", "%114", "%115", "%116", "%117", "%118")
FIR_WGMMA(256, FIR_S16, FIR_D16, "%128", "%129", "%130", "%131", "%132", "%133", "%134")


}  // namespace fir
