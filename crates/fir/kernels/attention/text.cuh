// text.cuh: hooks that a user wrote as CUDA C++, in the form of FlashInfer's variants, as the kernels' `Variant`.
//
//   struct X : AttentionVariantBase {
//     static constexpr bool use_softmax = …;
//     template <typename Params> X(const Params& params, uint32_t batch_idx, uint8_t* smem_ptr) { sm_scale_log2 = …; }
//     REGISTER_LOGITS_TRANSFORM(…)  REGISTER_LOGITS_MASK(…)  REGISTER_M_D_UPDATE(…)  REGISTER_OUTPUT_TRANSFORM(…)
//   };
//
// The macros' names, their arguments and the functions that they declare are that library's interface, so that a struct
// written for it compiles here as it is. LOGITS_TRANSFORM gets q . k without a factor; the weight is
// 2^(its result * sm_scale_log2), or the result itself without softmax. M_D_UPDATE is asked once, for a row that has seen
// no key: what it makes of (m, d) = (-inf, 0) is one more key, of value 0. OUTPUT_TRANSFORM gets sums as they are before
// the division by d. No hook is called for a query or a key that is not there.
//
// This text stands before the user's, and that before a kernel's file: it includes nothing. `TextHooks` is below the
// user's struct in use, not in text.
//
// twins  src/variant/text.rs

using int8_t = signed char;
using uint8_t = unsigned char;
using int16_t = short;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;

/// Elements of a user's tensors, which become float where they are used.
struct half {
  unsigned short bits;
  __device__ __forceinline__ operator float() const {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(bits));
    return y;
  }
};
struct nv_bfloat16 {
  unsigned short bits;
  __device__ __forceinline__ operator float() const { return __uint_as_float(unsigned(bits) << 16); }
};

#define REGISTER_QUERY_TRANSFORM(params, q, ...) \
  template <typename Params, typename T> \
  __device__ __forceinline__ T QueryTransform(const Params& params, T q) { __VA_ARGS__ }
#define REGISTER_KEY_TRANSFORM(params, k, ...) \
  template <typename Params, typename T> \
  __device__ __forceinline__ T KeyTransform(const Params& params, T k) { __VA_ARGS__ }
#define REGISTER_LOGITS_TRANSFORM(params, logits, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, ...) \
  template <typename Params, typename T> \
  __device__ __forceinline__ T LogitsTransform(const Params& params, T logits, uint32_t batch_idx, uint32_t qo_idx, \
                                               uint32_t kv_idx, uint32_t qo_head_idx, uint32_t kv_head_idx) { __VA_ARGS__ }
#define REGISTER_LOGITS_MASK(params, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, ...) \
  template <typename Params> \
  __device__ __forceinline__ bool LogitsMask(const Params& params, uint32_t batch_idx, uint32_t qo_idx, uint32_t kv_idx, \
                                             uint32_t qo_head_idx, uint32_t kv_head_idx) { __VA_ARGS__ }
#define REGISTER_M_D_UPDATE(params, kv_tile_idx, qo_head_idx, m, d, scale, ...) \
  template <typename Params, typename T_M> \
  __device__ __forceinline__ void update_m_d(const Params& params, uint32_t kv_tile_idx, uint32_t qo_head_idx, T_M& m, float& d, \
                                             float& scale) { __VA_ARGS__ }
#define REGISTER_OUTPUT_TRANSFORM(params, output, batch_idx, qo_idx, qo_head_idx, m, d, scale, ...) \
  template <typename Params, typename T, typename T_M> \
  __device__ __forceinline__ T OutputTransform(const Params& params, T output, uint32_t batch_idx, uint32_t qo_idx, \
                                               uint32_t qo_head_idx, T_M& m, float& d, float& scale) { __VA_ARGS__ }

namespace flashinfer {

namespace math {
constexpr float log2e = 1.44269504088896340736f, loge2 = 0.693147180559945309417f;
[[maybe_unused]] constexpr float inf = __builtin_bit_cast(float, 0x7f800000);
__device__ __forceinline__ float ptx_exp2(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
__device__ __forceinline__ float ptx_log2(float x) { float y; asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
__device__ __forceinline__ float ptx_rcp(float x) { float y; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
__device__ __forceinline__ float rsqrt(float x) { float y; asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
__device__ __forceinline__ float tanh(float x) { float y; asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
}  // namespace math

/// What a hook does that a struct does not have. Never called: the kernels ask whose a hook is.
struct AttentionVariantBase {
  static constexpr bool use_softmax = true;
  REGISTER_QUERY_TRANSFORM(params, q, { return q; })
  REGISTER_KEY_TRANSFORM(params, k, { return k; })
  REGISTER_LOGITS_TRANSFORM(params, logits, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, { return logits; })
  REGISTER_LOGITS_MASK(params, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, { return true; })
  REGISTER_M_D_UPDATE(params, kv_tile_idx, qo_head_idx, m, d, scale, { return; })
  REGISTER_OUTPUT_TRANSFORM(params, output, batch_idx, qo_idx, qo_head_idx, m, d, scale, { return output; })
};

}  // namespace flashinfer

using namespace flashinfer;

namespace fir {

/// Whether a member function is the struct's own, and not the base's.
template <class F> struct IsOwn { static constexpr bool value = true; };
template <class R, class... A> struct IsOwn<R (flashinfer::AttentionVariantBase::*)(A...)> { static constexpr bool value = false; };

/// The hooks of `X` over those of `Rest`, a variant of expressions whose parameters hold those of both.
template <class X, class Rest>
struct TextHooks : Rest {
  using Params = typename Rest::Params;

  /// The parameters as `X` sees them, for one row.
  struct View : Params {
    uint32_t fir_q_len, fir_kv_len;
    __device__ __forceinline__ View(const Params& p, int q_len, int kv_len)
        : Params(p), fir_q_len(uint32_t(q_len)), fir_kv_len(uint32_t(kv_len)) {}
    __device__ __forceinline__ uint32_t get_qo_len(uint32_t) const { return fir_q_len; }
    __device__ __forceinline__ uint32_t get_kv_len(uint32_t) const { return fir_kv_len; }
  };

  static_assert(__is_base_of(flashinfer::AttentionVariantBase, X), "a variant's struct is derived from AttentionVariantBase");
  static_assert(!IsOwn<decltype(&X::template QueryTransform<View, float>)>::value, "QUERY_TRANSFORM is not taken: scale in LOGITS_TRANSFORM");
  static_assert(!IsOwn<decltype(&X::template KeyTransform<View, float>)>::value, "KEY_TRANSFORM is not taken: scale in LOGITS_TRANSFORM");
  static constexpr bool kOwnMask = IsOwn<decltype(&X::template LogitsMask<View>)>::value;
  static constexpr bool kSoftmax = X::use_softmax, kHasLogits = true, kHasMask = Rest::kHasMask || kOwnMask,
                        kMaskReads = Rest::kMaskReads || kOwnMask,
                        kHasInit = kSoftmax && IsOwn<decltype(&X::template update_m_d<View, float>)>::value,
                        kHasOutput = IsOwn<decltype(&X::template OutputTransform<View, float, float>)>::value;
  static_assert(kSoftmax == Rest::kSoftmax, "use_softmax must be written as `use_softmax = true` or `= false`");

  __device__ __forceinline__ static float logits(const Params& p, float score, int batch, int q_idx, int q_len, int kv_len, int kv_pos,
                                                 int qo_head, int kv_head) {
    if (unsigned(kv_pos) >= unsigned(kv_len) || q_idx >= q_len) return 0.0f;
    const View view(p, q_len, kv_len);
    X x(view, uint32_t(batch), nullptr);
    const float y = x.LogitsTransform(view, score, uint32_t(batch), uint32_t(q_idx), uint32_t(kv_pos), uint32_t(qo_head), uint32_t(kv_head));
    // Kernels take natural logits.
    if constexpr (kSoftmax) return y * (x.sm_scale_log2 * flashinfer::math::loge2);
    else return y;
  }

  __device__ __forceinline__ static bool mask(const Params& p, int batch, int q_idx, int q_len, int kv_len, int kv_pos, int qo_head, int kv_head) {
    if constexpr (Rest::kHasMask) {
      if (!Rest::mask(p, batch, q_idx, q_len, kv_len, kv_pos, qo_head, kv_head)) return false;
    }
    if constexpr (kOwnMask) {
      if (unsigned(kv_pos) >= unsigned(kv_len) || q_idx >= q_len) return false;
      const View view(p, q_len, kv_len);
      X x(view, uint32_t(batch), nullptr);
      return x.LogitsMask(view, uint32_t(batch), uint32_t(q_idx), uint32_t(kv_pos), uint32_t(qo_head), uint32_t(kv_head));
    }
    return true;
  }

  __device__ __forceinline__ static float init(const Params& p, int batch, int q_idx, int q_len, int kv_len, int qo_head, int) {
    const View view(p, q_len, kv_len);
    X x(view, uint32_t(batch), nullptr);
    float m = -flashinfer::math::inf, d = 0.0f, scale = 1.0f;
    x.update_m_d(view, 0u, uint32_t(qo_head), m, d, scale);
    return m == -flashinfer::math::inf ? m : (m + log2f(d)) * flashinfer::math::loge2;
  }

  __device__ __forceinline__ static float output(const Params& p, float o, float m, float d, int batch, int q_idx, int q_len, int kv_len,
                                                 int qo_head, int) {
    const View view(p, q_len, kv_len);
    X x(view, uint32_t(batch), nullptr);
    float top = kSoftmax ? m * flashinfer::math::log2e : 0.0f, sum = kSoftmax ? d : 1.0f, scale = 1.0f;
    return x.OutputTransform(view, kSoftmax ? o * d : o, uint32_t(batch), uint32_t(q_idx), uint32_t(qo_head), top, sum, scale);
  }
};

}  // namespace fir
