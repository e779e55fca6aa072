// variant.cuh: what the kernels need around the hook struct that src/variant/cuda.rs writes.
//
// A `Variant` has `Params`, `kSoftmax`, `kHas{Query,Key,Value,Logits,Mask,Init,Output}`, `kMaskReads`, `k{Query,Key}Rope…` and static
// hooks. A hook that is not set is the identity and costs nothing: every use stands behind its flag.
//
// Rotation: pair i turns by pos * f(i) radians, f(i) = theta^(-2i / dim) / scale (Llama 3.1 smooths it). The angle is
// kept as a 64-bit fraction of a turn, so pos * f wraps around exactly: at position 131072 an f32 product would be
// off by 0.008 radians, this one by 2^-32 turns.
//
// twins  src/variant/{cuda,rope}.rs
#pragma once

namespace fir {

/// No hooks: the text of `cuda_source(&standard())` under another name.
struct Plain {
  struct Params {};
  static constexpr bool kSoftmax = true, kHasQuery = false, kHasKey = false, kHasValue = false, kHasLogits = false,
                        kHasMask = false, kMaskReads = false, kHasInit = false, kHasOutput = false, kQueryRope = false, kKeyRope = false;
  __device__ __forceinline__ static float query_scale(const Params&, int, int, int, int, int, int) { return 1.0f; }
  __device__ __forceinline__ static float key_scale(const Params&, int, int, int, int) { return 1.0f; }
  __device__ __forceinline__ static float value_scale(const Params&, int, int, int, int) { return 1.0f; }
  __device__ __forceinline__ static float logits(const Params&, float score, int, int, int, int, int, int, int) { return score; }
  __device__ __forceinline__ static bool mask(const Params&, int, int, int, int, int, int, int) { return true; }
  __device__ __forceinline__ static float init(const Params&, int, int, int, int, int, int) { return 0.0f; }
  __device__ __forceinline__ static float output(const Params&, float o, float, float, int, int, int, int, int, int) { return o; }
};

/// Where a query row stands: the arguments that hooks share.
struct RowContext {
  int batch, q_idx, q_len, kv_len, qo_head, kv_head;

  __device__ __forceinline__ int q_pos() const { return int(unsigned(kv_len) - unsigned(q_len) + unsigned(q_idx)); }
  template <class V>
  __device__ __forceinline__ float query_scale(const typename V::Params& p) const {
    return V::query_scale(p, batch, q_idx, q_len, kv_len, qo_head, kv_head);
  }
  template <class V>
  __device__ __forceinline__ float logits(const typename V::Params& p, float score, int kv_pos) const {
    return V::logits(p, score, batch, q_idx, q_len, kv_len, kv_pos, qo_head, kv_head);
  }
  template <class V>
  __device__ __forceinline__ bool mask(const typename V::Params& p, int kv_pos) const {
    return V::mask(p, batch, q_idx, q_len, kv_len, kv_pos, qo_head, kv_head);
  }
  template <class V>
  __device__ __forceinline__ float init(const typename V::Params& p) const {
    return V::init(p, batch, q_idx, q_len, kv_len, qo_head, kv_head);
  }
  template <class V>
  __device__ __forceinline__ float output(const typename V::Params& p, float o, float m, float d) const {
    return V::output(p, o, m, d, batch, q_idx, q_len, kv_len, qo_head, kv_head);
  }
};

/// The rotation of one side, as constants; `kOn` false when there is none.
template <class V, bool kKey, class = void>
struct RopeOf {
  static constexpr bool kOn = false, kInterleave = false;
  __device__ __forceinline__ static int dim(int) { return 0; }
  __device__ static unsigned long long turn(int, int) { return 0; }
};

template <bool kOn> struct EnableRope {};
template <> struct EnableRope<true> { using type = void; };

namespace rope {
/// The fraction of a turn per position, in units of 2^-64.
__device__ inline unsigned long long turn(double f) {
  const double turns = f * 0.15915494309189533577;  // 1 / (2 pi)
  return static_cast<unsigned long long>((turns - floor(turns)) * 18446744073709551616.0);
}
__device__ inline double frequency(float theta, int i, int dim) { return exp2(-2.0 * i / dim * log2(double(theta))); }
__device__ inline double smooth(double f, float scale, float low, float high, float context) {
  double s = (double(context) * f * 0.15915494309189533577 - double(low)) / (double(high) - double(low));
  s = s < 0.0 ? 0.0 : (s > 1.0 ? 1.0 : s);
  return (1.0 - s) * f / double(scale) + s * f;
}
/// Turns the pair (x, y) by `position` times `turn`.
__device__ __forceinline__ void rotate(float& x, float& y, int position, unsigned long long turn) {
  const unsigned long long angle = static_cast<unsigned long long>(static_cast<long long>(position)) * turn;
  // The signed top 32 bits: half a turn either way.
  const float radians = static_cast<float>(static_cast<int>(angle >> 32)) * 1.4629180792671596e-9f;
  const float c = __cosf(radians), s = __sinf(radians), x0 = x;
  x = x0 * c - y * s;
  y = y * c + x0 * s;
}
}  // namespace rope

template <class V>
struct RopeOf<V, false, typename EnableRope<V::kQueryRope>::type> {
  static constexpr bool kOn = true, kInterleave = V::kQueryRopeInterleave;
  __device__ __forceinline__ static int dim(int head_dim) { return V::kQueryRopeDim ? V::kQueryRopeDim : head_dim; }
  __device__ static unsigned long long turn(int i, int dim) {
    const double f = rope::frequency(V::kQueryRopeTheta, i, dim);
    if constexpr (V::kQueryRopeLlama31) {
      return rope::turn(rope::smooth(f, V::kQueryRopeScale, V::kQueryRopeLowFreqFactor, V::kQueryRopeHighFreqFactor,
                                     V::kQueryRopeOldContextLen));
    } else {
      return rope::turn(f / double(V::kQueryRopeScale));
    }
  }
};

template <class V>
struct RopeOf<V, true, typename EnableRope<V::kKeyRope>::type> {
  static constexpr bool kOn = true, kInterleave = V::kKeyRopeInterleave;
  __device__ __forceinline__ static int dim(int head_dim) { return V::kKeyRopeDim ? V::kKeyRopeDim : head_dim; }
  __device__ static unsigned long long turn(int i, int dim) {
    const double f = rope::frequency(V::kKeyRopeTheta, i, dim);
    if constexpr (V::kKeyRopeLlama31) {
      return rope::turn(rope::smooth(f, V::kKeyRopeScale, V::kKeyRopeLowFreqFactor, V::kKeyRopeHighFreqFactor,
                                     V::kKeyRopeOldContextLen));
    } else {
      return rope::turn(f / double(V::kKeyRopeScale));
    }
  }
};

}  // namespace fir
