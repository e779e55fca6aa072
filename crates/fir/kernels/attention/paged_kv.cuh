// paged_kv.cuh: the pool of keys and values, the page table, and copies of rows into swizzled shared memory.
//
// Row j of a request is row j % page_size of page indices[start + j / page_size]; without `indices` (ragged KV) it is
// row start + j of a single page. The start is indptr[request]. Strides are in bytes, each multiple of 16 (of block scales: 4), the last axis dense.
// A page id at or past `num_pages` reads the last page: wrong ids give wrong numbers, never a fault.
//
// reads  never a row at or past the end it is given: those rows become zeros
// twins  src/kv/{page_table,paged,ragged}.rs
#pragma once
#include <fir/base/cp_async.cuh>
#include <fir/attention/number.cuh>

namespace fir {

/// One of the two tensors of a pool, `[pages, page_size, heads, dim]` by strides.
struct KvTensor {
  const unsigned char* data;
  long long page, row, head;
};

struct KvPool {
  KvTensor k, v;
  /// NVFP4's block scales, e4m3.
  KvTensor k_scales, v_scales;
  /// Page ids, CSR; null for ragged KV.
  const int* indices;
  /// Where each request's entries start; null: an item's `pages` is the start itself.
  const int* indptr;
  unsigned num_pages, page_size;
  /// log2 of page_size, or -1 when that is no power of two.
  int page_shift;
  /// Elements of a key and of a value row; the kernels' template dims are these rounded up.
  int dim_qk, dim_vo;
  /// What all keys, and all values, are multiplied by.
  float k_scale, v_scale;
  int pad;

  /// The start of an item's entries.
  __device__ __forceinline__ int start(int pages) const { return indptr == nullptr ? pages : __ldg(indptr + pages); }

  /// The entry of the page table for row `row` of a request whose entries start at `pages`; to be given to `place`.
  __device__ __forceinline__ int entry(int pages, int row) const {
    if (indices == nullptr) return pages;
    const int page = page_shift >= 0 ? row >> page_shift : int(unsigned(row) / page_size);
    return __ldg(indices + (static_cast<long long>(pages) + page));
  }

  /// Page and row within it.
  __device__ __forceinline__ void place(int entry, int row, unsigned& page, long long& slot) const {
    if (indices == nullptr) {
      page = 0;
      slot = static_cast<long long>(entry) + row;
      return;
    }
    page = min(unsigned(entry), num_pages - 1);
    slot = page_shift >= 0 ? row & int(page_size - 1) : int(unsigned(row) % page_size);
  }
};

__device__ __forceinline__ long long row_offset(const KvTensor& t, unsigned page, long long slot) {
  return static_cast<long long>(page) * t.page + slot * t.row;
}

/// A tile of rows of `kChunks` 16-byte chunks each in shared memory: chunk c of row r is stored at chunk c ^ s(r) of
/// the row, with s chosen so that the same chunk of 8 rows in turn lies in 8 different groups of 4 banks, which makes
/// ldmatrix free of conflicts for every row length.
template <int kChunks>
struct SwizzledRows {
  static constexpr int kBits = kChunks % 8 == 0 ? 3 : kChunks % 4 == 0 ? 2 : kChunks % 2 == 0 ? 1 : 0;
  static constexpr int kRowBytes = kChunks * 16;
  __device__ __forceinline__ static unsigned offset(int row, int chunk) {
    return unsigned(row * kRowBytes + ((chunk ^ ((row >> (3 - kBits)) & ((1 << kBits) - 1))) << 4));
  }
};

__device__ __forceinline__ long long shuffle64(long long x, int lane) {
  const unsigned lo = __shfl_sync(~0u, unsigned(x), lane), hi = __shfl_sync(~0u, unsigned(x >> 32), lane);
  return static_cast<long long>((static_cast<unsigned long long>(hi) << 32) | lo);
}

/// A warp copies `kRows` rows: `offsets[i]` of lane l is the byte offset of row 32 i + l (mod kRows). Rows from
/// `valid` on, and chunks from `row_bytes` on, become zeros.
template <int kRows, int kChunks>
__device__ __forceinline__ void copy_rows(unsigned shared, const unsigned char* base,
                                          const long long (&offsets)[(kRows + 31) / 32], int valid, int row_bytes) {
  static_assert(kRows * kChunks % 32 == 0);
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int i = 0; i < kRows * kChunks / 32; ++i) {
    const int index = i * 32 + lane, row = index / kChunks, chunk = index % kChunks;
    // 32 rows take kChunks copies, so the register is known when this is compiled.
    const long long offset = shuffle64(offsets[i / kChunks], row & 31);
    const bool there = row < valid && chunk * 16 < row_bytes;
    cp_async_16(shared + SwizzledRows<kChunks>::offset(row, chunk), base + offset + (there ? chunk * 16 : 0), there ? 16 : 0);
  }
}

/// The same for `kRows` rows from `from` on that lie `stride` bytes apart, `first` rows into the tile at `shared`: rows
/// of one page take a pointer, not a shuffle and a product each. With `kWhole`, all rows and chunks are there.
template <int kRows, int kChunks, bool kWhole>
__device__ __forceinline__ void copy_run(unsigned shared, int first, const unsigned char* from, long long stride, int valid,
                                         int row_bytes) {
  static_assert(kRows * kChunks % 32 == 0);
  const int lane = threadIdx.x & 31;
  constexpr bool kEven = 32 % kChunks == 0;  // every step of 32 chunks is so many rows
  const unsigned char* at = from + (lane / kChunks) * stride + (kWhole ? lane % kChunks * 16 : 0);
#pragma unroll
  for (int i = 0; i < kRows * kChunks / 32; ++i) {
    const int row = kEven ? i * (32 / kChunks) + lane / kChunks : (i * 32 + lane) / kChunks;
    const int chunk = kEven ? lane % kChunks : (i * 32 + lane) % kChunks;
    const unsigned to = shared + SwizzledRows<kChunks>::offset(first + row, chunk);
    if constexpr (kWhole && kEven) {
      cp_async_16(to, at);
      at += 32 / kChunks * stride;
    } else {
      const bool there = kWhole || (row < valid && chunk * 16 < row_bytes);
      cp_async_16(to, there ? from + row * stride + chunk * 16 : from, there ? 16 : 0);
    }
  }
}

/// The same for rows of `kWords` 4-byte words, not swizzled: block scales.
template <int kRows, int kWords>
__device__ __forceinline__ void copy_words(unsigned shared, const unsigned char* base,
                                           const long long (&offsets)[(kRows + 31) / 32], int valid, int row_bytes) {
  static_assert(kRows * kWords % 32 == 0);
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int i = 0; i < kRows * kWords / 32; ++i) {
    const int index = i * 32 + lane, row = index / kWords, word = index % kWords;
    const long long offset = shuffle64(offsets[i / kWords], row & 31);
    const bool there = row < valid && word * 4 < row_bytes;
    cp_async_4(shared + index * 4, base + offset + (there ? word * 4 : 0), there ? 4 : 0);
  }
}

}  // namespace fir
