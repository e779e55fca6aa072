// tokens.cuh: rows of tokens, rotated or not, divided by a scale and rounded, to rows or to pages.
//
//   x' = (x cos a - y sin a, y cos a + x sin a)     for the pairs of a side that is rotated; see rope.cuh
//   to[place(t), h] = x'[t, h] / scale              rounded to the output's type; fp8 saturates
//   NVFP4, per 16: block_scale = e4m3(max|x'| / (6 scale)), codes e2m1(x' / (block_scale scale))
//
// One kernel for rope, appending to pages, and both at once: a launch has up to five sides (queries, their unrotated part,
// keys, theirs, values), whose elements a token's threads share.
//
// grid   nnz: a token each. Two or four to a block are slower (rope of 16384 x 40 x 128 bf16 on an H200: 95.5 us, 97.5, 97.0)
// block  up to 256: a thread has one unit, two groups of kEach elements of a row
// smem   2 * pairs floats: cosines and sines, found while the rows are on their way
// needs  sm_80
//
// reads  each element once; nothing of a token without a place
// writes each row once; a token without a place nowhere. Sides may be rotated in place.
// twins  src/cpu/rope.rs, src/cpu/page.rs, src/reference/rope.rs, src/reference/page.rs
#pragma once
#include <fir/base/fp4.cuh>
#include <fir/base/vec.cuh>
#include <fir/page.cuh>
#include <fir/rope.cuh>

namespace fir {

// Strides in bytes. `to_outer` is of pages if paged, else of tokens.
struct Side {
  const u8* from;
  u8* to;
  u8* block_scales;
  u64 from_token, from_head;
  u64 to_outer, to_row, to_head;
  u64 scales_outer, scales_row, scales_head;
  u32 dim;
  u32 units;    // of a row
  u32 first;    // units of a token before this side's
  u32 rotated;
  u32 paged;
  u32 code;     // type of `from`, for fp4_rows
  float scale;
  float inverse;  // of a scale that is a power of two, whose product is the quotient; else 0
};

struct TokensParams {
  Side sides[5];
  Angles angles;
  Slots slots;
  u32 nnz, units, count, paged;
};

// Divides as the CPU does.
template <int kCount>
__device__ __forceinline__ void divide(float (&x)[kCount], const Side& side) {
  if (side.inverse != 0.f) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = __fmul_rn(x[i], side.inverse);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = __fdiv_rn(x[i], side.scale);
  }
}

// Sixteen numbers as a block of NVFP4: eight bytes of codes, in two words, and the block's scale.
__device__ __forceinline__ u8 nvfp4_block(const float* x, float scale, u32 (&word)[2]) {
  float largest = 0.f, sum = 0.f;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    largest = fmaxf(largest, fabsf(x[i]));
    sum += x[i] != x[i] ? x[i] : 0.f;
  }
  float divisor, y[16];
  // A NaN makes the block's scale NaN: a fault that shows.
  const u8 code = nvfp4_scale(sum != sum ? sum : largest, scale, divisor);
#pragma unroll
  for (int i = 0; i < 16; ++i) y[i] = __fdiv_rn(x[i], divisor);
  word[0] = pack_e2m1(y);
  word[1] = pack_e2m1(y + 8);
  return code;
}

// kCount numbers, rounded, at element `at` of a row, on the bytes that they take.
template <class O, int kCount>
__device__ __forceinline__ void put(u8* row, u32 at, const float* x) {
  constexpr int kBytes = kCount * sizeof(O);
  if constexpr (kCount == 1) {
    reinterpret_cast<O*>(row)[at] = from_float<O>(x[0]);
  } else if constexpr (kBytes > 16) {
    put<O, kCount / 2>(row, at, x);
    put<O, kCount / 2>(row, at + kCount / 2, x + kCount / 2);
  } else {
    float y[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) y[i] = x[i];
    store_elements<true>(reinterpret_cast<O*>(row), at, at + kCount, y);
  }
}

template <class T, int kEach> struct Group {
  static constexpr int kChunks = kEach * sizeof(T) / 16;
  Chunk chunk[kChunks];
  __device__ __forceinline__ void load(const u8* p) {
#pragma unroll
    for (int i = 0; i < kChunks; ++i) chunk[i] = fir::load(p + 16 * i);
  }
  __device__ __forceinline__ void widened(float* out) const {
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      float x[kLanes<T>];
      widen<T>(chunk[i], x);
#pragma unroll
      for (int j = 0; j < kLanes<T>; ++j) out[i * kLanes<T> + j] = x[j];
    }
  }
  __device__ __forceinline__ void copy(u8* p) const {
#pragma unroll
    for (int i = 0; i < kChunks; ++i) store(p + 16 * i, chunk[i]);
  }
};
template <class T> struct Group<T, 1> {
  T x;
  __device__ __forceinline__ void load(const u8* p) { x = *reinterpret_cast<const T*>(p); }
  __device__ __forceinline__ void widened(float* out) const { out[0] = to_float(x); }
  __device__ __forceinline__ void copy(u8* p) const { *reinterpret_cast<T*>(p) = x; }
};

// kEach floats of shared memory, aligned to 16 bytes where there are so many.
template <int kEach>
__device__ __forceinline__ void read_turn(const float* from, float (&out)[kEach]) {
  if constexpr (kEach % 4 == 0) {
#pragma unroll
    for (int i = 0; i < kEach; i += 4) {
      const Chunk chunk = *reinterpret_cast<const Chunk*>(from + i);
#pragma unroll
      for (int j = 0; j < 4; ++j) out[i + j] = float_of(chunk.word[j]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kEach; ++i) out[i] = from[i];
  }
}

// Two rows of a pair's numbers, by each pair's cosine and sine: every product and sum rounded, as on the CPU.
template <int kEach>
__device__ __forceinline__ void rotate(float (&x)[2 * kEach], const float* cosine, const float* sine, bool interleave) {
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const float c = cosine[i], s = sine[i];
    if (interleave) {
      const float a = x[2 * i], b = x[2 * i + 1];
      x[2 * i] = __fsub_rn(__fmul_rn(a, c), __fmul_rn(b, s));
      x[2 * i + 1] = __fadd_rn(__fmul_rn(b, c), __fmul_rn(a, s));
    } else {
      const float a = x[i], b = x[kEach + i];
      x[i] = __fsub_rn(__fmul_rn(a, c), __fmul_rn(b, s));
      x[kEach + i] = __fadd_rn(__fmul_rn(b, c), __fmul_rn(a, s));
    }
  }
}

// kEach: the elements of 16 bytes (of a block, for NVFP4), with rows and groups aligned to them; 1 for any rows.
template <class T, class O, int kEach>
__global__ void __launch_bounds__(256) tokens(const __grid_constant__ TokensParams p) {
  extern __shared__ __align__(16) float turn[];
  __shared__ Place place;
  constexpr bool kFp4 = is_same<O, e2m1x2>::value;
  static_assert(!kFp4 || kEach == 16, "a block of NVFP4 is a thread's");
  const u32 token = blockIdx.x;
  const Angles& angles = p.angles;
  wait_for_previous();
  bool ready = false;
  // At least one turn each, as all must meet at the barrier.
  for (u32 u = threadIdx.x; u < p.units || !ready; u += blockDim.x) {
    const bool mine = u < p.units;
    u32 s = 0;
#pragma unroll
    for (u32 i = 1; i < 5; ++i) s += i < p.count && u >= p.sides[i].first;
    const Side& side = p.sides[s];
    const u32 head = (u - side.first) / side.units, unit = (u - side.first) % side.units;
    // Where the two groups are: halves of a rotation apart, or beside each other.
    const u32 pairs = side.rotated ? angles.pairs : 0, turned = pairs / kEach;
    const bool rotated = unit < turned, apart = rotated && !angles.interleave;
    const u32 a = apart ? unit * kEach : unit * 2 * kEach, b = apart ? a + pairs : a + kEach;
    const bool both = b < side.dim;
    Group<T, kEach> groups[2];
    if (mine) {
      const u8* from = side.from + token * side.from_token + head * side.from_head;
      groups[0].load(from + a * sizeof(T));
      if (both) groups[1].load(from + b * sizeof(T));
    }
    start_next();
    if (!ready) {  // while the rows are on their way
      if (p.paged && threadIdx.x == 0) place = place_of(p.slots, token);
      if (angles.pairs) find_angles(angles, token, turn);
      if (p.paged || angles.pairs) __syncthreads();
      ready = true;
    }
    if (!mine) break;
    u8 *to = side.to + head * side.to_head, *scales = kFp4 ? side.block_scales + head * side.scales_head : nullptr;
    if (side.paged) {
      if (!place.some) continue;
      to += place.page * side.to_outer + place.row * side.to_row;
      if constexpr (kFp4) scales += place.page * side.scales_outer + place.row * side.scales_row;
    } else {
      to += token * side.to_outer;
    }
    if constexpr (is_same<T, O>::value) {
      if (!rotated && side.scale == 1.f) {
        groups[0].copy(to + a * sizeof(T));
        if (both) groups[1].copy(to + b * sizeof(T));
        continue;
      }
    }
    float x[2 * kEach];
    groups[0].widened(x);
    if (both) {
      groups[1].widened(x + kEach);
    } else {
#pragma unroll
      for (int i = 0; i < kEach; ++i) x[kEach + i] = 0.f;
    }
    if (rotated) {
      float cosine[kEach], sine[kEach];
      read_turn<kEach>(turn + unit * kEach, cosine);
      read_turn<kEach>(turn + angles.pairs + unit * kEach, sine);
      rotate<kEach>(x, cosine, sine, angles.interleave);
    }
    if constexpr (kFp4) {
      u32 word[2];
      scales[a / 16] = nvfp4_block(x, side.scale, word);
      asm volatile("st.global.v2.u32 [%0], {%1, %2};" :: "l"(to + a / 2), "r"(word[0]), "r"(word[1]) : "memory");
      if (both) {
        scales[b / 16] = nvfp4_block(x + 16, side.scale, word);
        asm volatile("st.global.v2.u32 [%0], {%1, %2};" :: "l"(to + b / 2), "r"(word[0]), "r"(word[1]) : "memory");
      }
    } else {
      if (side.scale != 1.f) divide(x, side);
      put<O, kEach>(to, a, x);
      if (both) put<O, kEach>(to, b, x + kEach);
    }
  }
}

__device__ __forceinline__ float load_as(const u8* row, u32 i, u32 type) {
  if (type == 0) return reinterpret_cast<const float*>(row)[i];
  if (type == 1) return to_float(reinterpret_cast<const f16*>(row)[i]);
  return to_float(reinterpret_cast<const bf16*>(row)[i]);
}

// NVFP4 for any rows: a thread gathers the sixteen numbers of a block. Side 0 is the row's first part, side 1, if it has one,
// what follows; blocks may have some of each.
template <class = void>
__global__ void __launch_bounds__(256) fp4_rows(const __grid_constant__ TokensParams p) {
  extern __shared__ __align__(16) float turn[];
  const Side &side = p.sides[0], &rest = p.sides[1];
  const u32 token = blockIdx.x, pairs = p.angles.pairs;
  wait_for_previous();
  start_next();
  if (pairs) {
    find_angles(p.angles, token, turn);
    __syncthreads();
  }
  const Place place = place_of(p.slots, token);
  if (!place.some) return;
  for (u32 u = threadIdx.x; u < p.units; u += blockDim.x) {
    const u32 head = u / side.units, at = u % side.units * 16;
    const u8* from = side.from + token * side.from_token + head * side.from_head;
    const u8* after = p.count > 1 ? rest.from + token * rest.from_token + head * rest.from_head : nullptr;
    float x[16];
#pragma unroll
    for (u32 i = 0; i < 16; ++i) {
      const u32 e = at + i;
      if (e >= side.dim) {
        x[i] = load_as(after, e - side.dim, rest.code);
        continue;
      }
      x[i] = load_as(from, e, side.code);
      if (e >= 2 * pairs) continue;
      const u32 pair = p.angles.interleave ? e / 2 : e % pairs;
      const bool second = p.angles.interleave ? e % 2 : e >= pairs;
      const u32 other = p.angles.interleave ? e ^ 1 : (second ? e - pairs : e + pairs);
      const float y = load_as(from, other, side.code), c = turn[pair], s = turn[pairs + pair];
      x[i] = second ? __fadd_rn(__fmul_rn(x[i], c), __fmul_rn(y, s)) : __fsub_rn(__fmul_rn(x[i], c), __fmul_rn(y, s));
    }
    u32 word[2];
    u8* to = side.to + place.page * side.to_outer + place.row * side.to_row + head * side.to_head + at / 2;
    u8* scales = side.block_scales + place.page * side.scales_outer + place.row * side.scales_row + head * side.scales_head;
    scales[at / 16] = nvfp4_block(x, side.scale, word);
#pragma unroll
    for (int i = 0; i < 8; ++i) to[i] = u8(word[i / 4] >> (i % 4 * 8));
  }
}

}  // namespace fir
