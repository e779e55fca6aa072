// rope.cuh: positions of tokens, their sines and cosines, and a table of them.
//
//   a      = position * frequency[i], in f64
//   table  out[p] = [cos(p * frequency[i]) for all i, sin(p * frequency[i]) for all i]
//
// grid   blocks of 256 elements of the table's left half
// block  256: a sine and a cosine each
// needs  sm_80; arithmetic in f64, 36 operations for each pair of a token, which is shared by all its heads
//
// reads  frequencies
// writes out, nothing between its rows
// twins  src/cpu/rope.rs, src/reference/rope.rs
#pragma once
#include <fir/base/math.cuh>
#include <fir/base/types.cuh>

namespace fir {

// Radians per position of each pair: the first in the parameters, so that a call has nothing to copy; or all of them at
// `more`.
struct Frequencies {
  const double* more;
  double fastest;  // largest magnitude of all
  double first[128];
};

__device__ __forceinline__ double frequency(const Frequencies& f, u32 i) { return f.more ? f.more[i] : f.first[i]; }

// By hand and without fused steps, so that sines and cosines are those of the CPU in every bit: within 1e-11 for |x| below
// 1.6e6, where n * kPio2_1 and n * kPio2_2 are exact.
__device__ __forceinline__ void sin_cos_near(double x, double& s, double& c) {
  constexpr double kPio2_1 = 0x1.921fb544p+0, kPio2_2 = 0x1.0b4611a6p-34, kPio2_3 = 0x1.3198a2e037073p-69;
  constexpr double kShift = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to an integer, in the mantissa's low bits
  const double shifted = __dadd_rn(__dmul_rn(x, 0.636619772367581343075535053490057448), kShift);
  const u64 quadrant = u64(__double_as_longlong(shifted));
  const double n = __dsub_rn(shifted, kShift);
  const double r = __dsub_rn(__dsub_rn(__dsub_rn(x, __dmul_rn(n, kPio2_1)), __dmul_rn(n, kPio2_2)), __dmul_rn(n, kPio2_3));
  const double z = __dmul_rn(r, r);
  double p = -1.0 / 39916800.0;
  p = __dadd_rn(1.0 / 362880.0, __dmul_rn(z, p));
  p = __dadd_rn(-1.0 / 5040.0, __dmul_rn(z, p));
  p = __dadd_rn(1.0 / 120.0, __dmul_rn(z, p));
  p = __dadd_rn(-1.0 / 6.0, __dmul_rn(z, p));
  const double sine = __dadd_rn(r, __dmul_rn(__dmul_rn(r, z), p));
  p = 1.0 / 479001600.0;
  p = __dadd_rn(-1.0 / 3628800.0, __dmul_rn(z, p));
  p = __dadd_rn(1.0 / 40320.0, __dmul_rn(z, p));
  p = __dadd_rn(-1.0 / 720.0, __dmul_rn(z, p));
  p = __dadd_rn(1.0 / 24.0, __dmul_rn(z, p));
  p = __dadd_rn(-0.5, __dmul_rn(z, p));
  const double cosine = __dadd_rn(1.0, __dmul_rn(z, p));
  s = quadrant & 1 ? cosine : sine;
  c = quadrant & 1 ? sine : cosine;
  if (quadrant & 2) s = -s;
  if (quadrant + 1 & 2) c = -c;
}

// Any angle. Not inlined: it is seldom needed, and would cost every kernel its registers.
__device__ __noinline__ void sin_cos_far(double x, double& s, double& c) { sincos(x, &s, &c); }

__device__ __forceinline__ void sin_cos(i64 position, const Frequencies& f, u32 i, float& sine, float& cosine) {
  const double at = __ll2double_rn(position), x = __dmul_rn(at, frequency(f, i));
  double s, c;
  // Which way is taken depends on the token alone, as on the CPU.
  if (__dmul_rn(fabs(at), f.fastest) <= 1.6e6) sin_cos_near(x, s, c);
  else sin_cos_far(x, s, c);
  sine = __double2float_rn(s);
  cosine = __double2float_rn(c);
}

// Element i of a vector of i32, or of i64 if it is wide.
__device__ __forceinline__ i64 load_integer(const void* data, u64 i, u32 wide) {
  return wide ? static_cast<const i64*>(data)[i] : static_cast<const i32*>(data)[i];
}

struct Angles {
  Frequencies frequencies;
  const float* table;     // rows of cosines, then sines; null: by the frequencies
  const void* positions;  // of the tokens, or of the requests' first tokens
  const i32* indptr;      // null: positions are of the tokens
  u64 table_stride, table_rows, position_stride;
  u32 pairs, batch, wide, interleave;
};

// The request that `token` is of: the last whose first token is not after it. All lanes of the warp take part and get it;
// 32 of them look at once, so 1,024 requests take two looks.
__device__ __forceinline__ u32 request_of(const i32* indptr, u32 batch, i64 token) {
  u32 from = 0, to = batch;
  while (to - from > 1) {
    const u32 step = (to - from + 31) / 32, at = from + (threadIdx.x % 32 + 1) * step;
    const bool after = at < to && indptr[at] <= token;
    const u32 below = __popc(__ballot_sync(0xffffffffu, after));
    const u32 next = from + (below + 1) * step;
    from += below * step;
    to = next < to ? next : to;
  }
  return from;
}

// Sines and cosines of a token, by the whole block: `turn` gets its cosines and then its sines. NaN for a position that is not
// in the table: a fault that shows. The caller waits for the block.
__device__ __forceinline__ void find_angles(const Angles& a, u32 token, float* turn) {
  __shared__ i64 start;
  if (a.indptr) {
    if (threadIdx.x < 32) {
      const u32 r = request_of(a.indptr, a.batch, token);
      if (threadIdx.x == 0) start = load_integer(a.positions, r * a.position_stride, a.wide) + (i64(token) - a.indptr[r]);
    }
    __syncthreads();
  }
  for (u32 i = threadIdx.x; i < a.pairs; i += blockDim.x) {
    const i64 position = a.indptr ? start : load_integer(a.positions, token * a.position_stride, a.wide);
    float s, c;
    if (a.table) {
      const bool inside = u64(position) < a.table_rows;
      const float* row = a.table + (inside ? u64(position) * a.table_stride : 0);
      c = inside ? row[i] : float_of(0x7fc00000u);
      s = inside ? row[a.pairs + i] : float_of(0x7fc00000u);
    } else {
      sin_cos(position, a.frequencies, i, s, c);
    }
    turn[i] = c;
    turn[a.pairs + i] = s;
  }
}

struct CosSinParams {
  Frequencies frequencies;
  float* out;
  u64 stride, rows;
  u32 pairs, unused;
};

template <class = void>
__global__ void __launch_bounds__(256) cos_sin_cache(const __grid_constant__ CosSinParams p) {
  wait_for_previous();
  start_next();
  for (u64 at = u64(blockIdx.x) * blockDim.x + threadIdx.x; at < p.rows * p.pairs; at += u64(gridDim.x) * blockDim.x) {
    const u64 row = at / p.pairs;
    const u32 i = u32(at % p.pairs);
    float s, c;
    sin_cos(i64(row), p.frequencies, i, s, c);
    p.out[row * p.stride + i] = c;
    p.out[row * p.stride + p.pairs + i] = s;
  }
}

}  // namespace fir
