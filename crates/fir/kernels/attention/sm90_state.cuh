// sm90_state.cuh: rows of sm90_prefill.cuh in registers: scores to weights, running softmax, and how rows end.
//
//   m >= max_j s_j - 8        d = sum_j 2^(s_j - m)        o = sum_j 2^(s_j - m) v_j
//
// writes out, lse; partial_o, partial_md of parts
// needs  sm_90a
#pragma once
#include <fir/attention/sm90_pipe.cuh>

namespace fir {

/// What a thread keeps for its two rows (16 w + l / 4 and 8 further of a warpgroup's 64): softmax and output.
template <class C>
struct Sm90State {
  using V = typename C::Variant;
  static constexpr int kScores = C::kTile / 2, kOut = C::kDimVo / 2;
  /// A maximum is moved only when it grows by more than this factor's log2: weights then reach 256 at most, which f16
  /// holds, and after the first tiles `o` is hardly ever rescaled. With a hook on the output, (m, d) is as it says.
  static constexpr float kSlack = V::kHasOutput ? 0.0f : 8.0f;

  float o[kOut], m[2], d[2];

  /// Scores become logits, and -inf (0 without softmax) where a row may not see.
  __device__ __forceinline__ static void edit(float (&s)[kScores], const AttentionParams<V>& p, const Sm90Unit& u, const RowContext* contexts, int pos,
                                              bool masked, float factor) {
    const int lane = threadIdx.x & 31, head = u.head, kv_base = u.item.kv_base, kv_end = u.item.kv_end;
    const int request = u.item.request, kv_len = u.item.kv_len;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      RowContext c;
      if constexpr (C::kContexts) c = contexts[8 * h + lane / 4];
      float f = factor;
      if constexpr (V::kHasQuery) f *= c.template query_scale<V>(p.variant);
#pragma unroll
      for (int t = 0; t < kScores / 4; ++t) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int kv = pos + 8 * t + 2 * (lane & 3) + j, kv_pos = kv_base + kv;
          float& x = s[4 * t + 2 * h + j];
          if constexpr (C::kEach) {
            x *= f;
            if constexpr (V::kHasKey) x *= V::key_scale(p.variant, request, kv_len, kv_pos, head);
            if constexpr (V::kHasLogits) x = c.template logits<V>(p.variant, x, kv_pos) * (V::kSoftmax ? kLog2e : 1.0f);
          }
          bool seen = kv < kv_end;
          if constexpr (V::kHasMask) seen = seen && c.template mask<V>(p.variant, kv_pos);
          if (masked && !seen) x = V::kSoftmax ? neg_inf() : 0.0f;
        }
      }
    }
  }

  /// Moves the maxima to those of `s` times `scale`, where they grew enough; what `o` is to be multiplied by. Whether any
  /// row of the warp moved. Mostly none does, and the four threads of a row need not talk to know.
  __device__ __forceinline__ bool rise(const float (&s)[kScores], float scale, float (&factor)[2]) {
    float top[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      // Two chains each: a maximum takes 4 clocks before the next can have it.
      float a = fmaxf(s[2 * h], s[2 * h + 1]), b = fmaxf(s[4 + 2 * h], s[4 + 2 * h + 1]);
#pragma unroll
      for (int t = 2; t < kScores / 4; t += 2) {
        a = fmaxf(a, fmaxf(s[4 * t + 2 * h], s[4 * t + 2 * h + 1]));
        b = fmaxf(b, fmaxf(s[4 * t + 4 + 2 * h], s[4 * t + 4 + 2 * h + 1]));
      }
      top[h] = fmaxf(a, b) * scale;
    }
    if (!__any_sync(~0u, top[0] > m[0] + kSlack || top[1] > m[1] + kSlack)) return false;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      // Each row decides for itself, so that its bits do not depend on its neighbours.
      const float x = quad_max(top[h]);
      const bool up = x > m[h] + kSlack;
      factor[h] = up ? exp2_diff(m[h], x) : 1.0f;
      m[h] = up ? x : m[h];
      d[h] *= factor[h];
    }
    return true;
  }

  /// Scores become weights.
  __device__ __forceinline__ void weigh(float (&s)[kScores], float scale) const {
    if constexpr (V::kSoftmax) {
      float base[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) base[h] = m[h] == neg_inf() ? 0.0f : m[h];
#pragma unroll
      for (int i = 0; i < kScores; ++i) {
        s[i] = exp2_in_place(fmaf(s[i], scale, -base[(i >> 1) & 1]));
      }
      after(s[kScores - 1]);
    }
  }

  /// The same, and their sums: eight at a time, so that those of one eight are added while the next one's exponentials run. On an H200
  /// (TFLOP/s, 1 x 16384 causal): e4m3 845, with all sums in the end 802; bf16 758 and 750.
  __device__ __forceinline__ void weigh_and_add(float (&s)[kScores], float scale, float (&sum)[2]) const {
    float base[2], part[2][2] = {};
    auto add = [&](int from) {
#pragma unroll
      for (int i = from; i < from + 8; ++i) part[(i >> 1) & 1][(i >> 2) & 1] += s[i];
    };
#pragma unroll
    for (int h = 0; h < 2; ++h) base[h] = m[h] == neg_inf() ? 0.0f : m[h];
#pragma unroll
    for (int from = 0; from < kScores; from += 8) {
#pragma unroll
      for (int i = from; i < from + 8; ++i) s[i] = exp2_in_place(fmaf(s[i], scale, -base[(i >> 1) & 1]));
      if (from > 0) add(from - 8);
      after(s[from + 7]);
    }
    add(kScores - 8);
    sum[0] = part[0][0] + part[0][1], sum[1] = part[1][0] + part[1][1];
  }

  __device__ __forceinline__ static void add_up(const float (&s)[kScores], float (&sum)[2]) {
    float part[2][2] = {};
#pragma unroll
    for (int i = 0; i < kScores; ++i) part[(i >> 1) & 1][(i >> 2) & 1] += s[i];
    sum[0] = part[0][0] + part[0][1], sum[1] = part[1][0] + part[1][1];
  }

  /// Weights that were taken with the maxima of the tiles before. They are right as long as they are finite, and are made
  /// smaller, with all that came before, where a row's sum has passed 2^8; so the scores' own maximum is not needed, whose 64
  /// instructions stand in nobody's shadow (6 % of the kernel).
  __device__ __forceinline__ void calm(float (&s)[kScores], const float (&sum)[2]) {
    float total[2] = {sum[0], sum[1]};
    if (__any_sync(~0u, sum[0] > 256.0f || sum[1] > 256.0f)) {
      float f[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        // Each row decides for itself, so that its bits do not depend on its neighbours.
        const float top = quad_max(sum[h]);
        const int e = top > 256.0f ? min(int(__float_as_uint(top) >> 23) - 127, 126) : 0;
        f[h] = __uint_as_float(unsigned(127 - e) << 23);
        m[h] += float(e), d[h] *= f[h], total[h] *= f[h];
      }
#pragma unroll
      for (int i = 0; i < kScores; ++i) s[i] *= f[(i >> 1) & 1];
      rescale(f);
    }
    d[0] += total[0], d[1] += total[1];
  }

  /// Scores of a tile by plain sums over q and keys in shared memory. Rare, so short and not fast; and not inlined, as ptxas would have
  /// products wait for each other around its loops.
  __device__ __noinline__ static void plain_scores(float* x, const unsigned char* q, const unsigned char* keys) {
    const int lane = threadIdx.x & 31;
#pragma unroll 1
    for (int i = 0; i < kScores; ++i) {
      const int row = lane / 4 + 8 * ((i >> 1) & 1), column = 8 * (i >> 2) + 2 * (lane & 3) + (i & 1);
      float dot = 0.0f;
#pragma unroll 1
      for (int e = 0; e < C::kDimQk; ++e) {
        constexpr int kPer = 128 / C::Key::kBits;  // elements of 16 bytes
        const int chunk = e / kPer;
        dot += load_one<typename C::Key>(q + (chunk >> 3) * C::kRows * 128 + row * 128 + (((chunk ^ row) & 7) << 4), e % kPer) *
               load_one<typename C::Key>(keys + GroupedRows<C::kRowBytes>::offset(column, chunk), e % kPer);
      }
      x[i] = dot;
    }
  }

  /// Whether a row's weights were too large to be known, or there is no maximum yet that they could be taken with. What is NaN stays so.
  __device__ __forceinline__ bool is_lost(float sum, int h) const {
    return sum == __int_as_float(0x7f800000) || (m[h] == neg_inf() && d[h] == d[h]);
  }

  /// The same tile with its own maxima: for scores that pass the maxima by more than 2^127 can hold, or rows that have none yet.
  __device__ __forceinline__ void again(float (&s)[kScores], float (&sum)[2], const unsigned char* q, const unsigned char* keys, float factor) {
    float x[kScores], top[2] = {neg_inf(), neg_inf()}, by[2];
    plain_scores(x, q, keys);
#pragma unroll
    for (int i = 0; i < kScores; ++i) top[(i >> 1) & 1] = fmaxf(top[(i >> 1) & 1], x[i] * factor);
    bool redo[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      // Each row decides for itself, so that its bits do not depend on its neighbours.
      redo[h] = quad_max(is_lost(sum[h], h) ? 1.0f : 0.0f) > 0.0f;
      const float own = fmaxf(m[h], quad_max(top[h])), next = redo[h] ? own : m[h];
      by[h] = redo[h] ? exp2_diff(m[h], next) : 1.0f;
      m[h] = next, d[h] *= by[h];
    }
#pragma unroll
    for (int i = 0; i < kScores; ++i) s[i] = redo[(i >> 1) & 1] ? exp2_diff(x[i] * factor, m[(i >> 1) & 1]) : s[i];
    add_up(s, sum);
    rescale(by);
  }

  /// Adds the weights up, and gives them the values' factors.
  template <class F>
  __device__ __forceinline__ void sum(float (&s)[kScores], F value) {
    if constexpr (V::kSoftmax) {
      float sum[2];
      add_up(s, sum);
      d[0] += sum[0], d[1] += sum[1];
    }
    if constexpr (V::kHasValue) {
#pragma unroll
      for (int i = 0; i < kScores; ++i) {
        const float f = value(8 * (i >> 2) + 2 * (threadIdx.x & 3) + (i & 1));
        s[i] = s[i] == 0.0f ? 0.0f : s[i] * f;  // a weight of 0 stays 0, whatever the scale of a position that nobody sees
      }
    }
  }

  __device__ __forceinline__ void rescale(const float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < kOut; ++i) o[i] *= factor[(i >> 1) & 1];
  }

  /// The lane whose bit is 0 gives b for the other's a.
  template <int kBit>
  __device__ __forceinline__ static void trade(u32& a, u32& b, int lane) {
    const bool high = lane & kBit;
    const u32 other = __shfl_xor_sync(~0u, high ? a : b, kBit);
    a = high ? other : a, b = high ? b : other;
  }

  /// Calls `put(column, x[4])` with 4 columns of row h at a time. All lanes call it.
  template <class F>
  __device__ __forceinline__ void columns(int h, F put) const {
    // Lanes 2 j and 2 j + 1 trade halves: the even one gets 4 columns of tile t, the odd one of t + 1.
    const int q = threadIdx.x & 3;
    const bool odd = q & 1;
#pragma unroll
    for (int t = 0; t < kOut / 4; t += 2) {
      const float a0 = o[4 * t + 2 * h], a1 = o[4 * t + 2 * h + 1], b0 = o[4 * t + 4 + 2 * h], b1 = o[4 * t + 4 + 2 * h + 1];
      const float y0 = __shfl_xor_sync(~0u, odd ? a0 : b0, 1), y1 = __shfl_xor_sync(~0u, odd ? a1 : b1, 1);
      float x[4] = {odd ? y0 : a0, odd ? y1 : a1, odd ? b0 : y0, odd ? b1 : y1};
      put(8 * (t + odd) + 2 * (q & 2), x);
    }
  }

  /// Writes the warp's rows from `first` on, whose softmax ended with (m, d): a part's state, or the output of a whole unit, that if
  /// `staged` to `stage`, the warp's place in shared memory (128-byte rows of 64 columns, the next 64 `kRows` rows further).
  __device__ __forceinline__ void finish(const AttentionParams<V>& p, const WorkItem& w, int head, int first, unsigned inverse, const float (&m)[2],
                                         const float (&d)[2], bool staged, unsigned stage) {
    const int lane = threadIdx.x & 31, rows = w.tokens * p.group;
    const float v_scale = p.kv.v_scale;
    constexpr bool kStates = Same<typename C::Out, State>::value;
    if (kStates || w.partial >= 0) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = first + 8 * h + lane / 4;
        const bool there = row < rows, whole = w.partial < 0;
        const int token = row * inverse >> 22, qo = head * p.group + row - token * p.group;
        const float sum = quad_sum(d[h]), scale = whole ? v_scale : part_scale<typename C::Out>(v_scale);
        const long long to = w.partial + static_cast<long long>(head - w.head_start) * rows + row;
        float* at = whole ? reinterpret_cast<float*>(p.out.out + static_cast<long long>(w.q_start + token) * p.out.out_token + qo * p.out.out_head)
                          : p.out.partial_o + to * C::kDimVo;
        columns(h, [&](int column, const float (&x)[4]) {
          if (there) __stcg(reinterpret_cast<float4*>(at + column), make_float4(x[0] * scale, x[1] * scale, x[2] * scale, x[3] * scale));
        });
        float2* md = whole ? reinterpret_cast<float2*>(p.out.lse) + ((w.q_start + token) * p.out.lse_token + qo * p.out.lse_head) : p.out.partial_md + to;
        if (there && (lane & 3) == 0) __stcg(md, make_float2(m[h], sum));
      }
      return;
    }
    if constexpr (!kStates) {
      float scale[2];
      unsigned char* to[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = first + 8 * h + lane / 4;
        const int token = row * inverse >> 22, qo = head * p.group + row - token * p.group;
        float sum = quad_sum(d[h]), top = m[h];
        scale[h] = v_scale;
        RowContext context;
        if constexpr (V::kHasInit || V::kHasOutput) context = row_context(w, p.out.tokens, head, p.group, min(row, rows - 1));
        if constexpr (V::kSoftmax) {
          if constexpr (V::kHasInit) {
            const float sink = context.template init<V>(p.variant) * kLog2e, next = fmaxf(top, sink), a = exp2_diff(top, next);
            sum = sum * a + exp2_diff(sink, next);
            scale[h] *= a;
            top = next;
          }
          scale[h] = sum == 0.0f ? 0.0f : __fdividef(scale[h], sum);
          if (__any_sync(~0u, sum == 0.0f)) {
            // A row that saw nothing: zeros, whatever was multiplied by 0.
#pragma unroll
            for (int i = 0; i < kOut; ++i) o[i] = ((i >> 1) & 1) == h && sum == 0.0f ? 0.0f : o[i];
          }
        }
        if constexpr (V::kHasOutput) {
#pragma unroll
          for (int i = 0; i < kOut; ++i) {
            if (((i >> 1) & 1) == h) o[i] = context.template output<V>(p.variant, o[i] * scale[h], top * kLn2, sum);
          }
          scale[h] = 1.0f;
        }
        to[h] = p.out.out + static_cast<long long>(w.q_start + token) * p.out.out_token + static_cast<long long>(qo) * p.out.out_head + (lane & 3) * 16;
        if (V::kSoftmax && p.out.lse != nullptr && row < rows && (lane & 3) == 0) {
          p.out.lse[(w.q_start + token) * p.out.lse_token + qo * p.out.lse_head] = sum == 0.0f ? neg_inf() : top + log2f(sum);
        }
      }
      if (staged) {
        const unsigned at = stage + (lane & 15) * 128;
#pragma unroll
        for (int g = 0; g < C::kDimVo / 8; g += 2) {
          const float* x = o + g * 4;
          stmatrix_x4(at + (g >> 3) * C::kRows * 128 + ((((g & 7) + (lane >> 4)) ^ (lane & 7)) << 4), pack2<typename C::Out>(x[0] * scale[0], x[1] * scale[0]),
                      pack2<typename C::Out>(x[2] * scale[1], x[3] * scale[1]), pack2<typename C::Out>(x[4] * scale[0], x[5] * scale[0]),
                      pack2<typename C::Out>(x[6] * scale[1], x[7] * scale[1]));
        }
        fence_async_proxy();
        return;
      }
      // Lanes of a quad have two columns each of 8: they trade until each has all of one in four chunks of 8, 16 bytes.
#pragma unroll
      for (int g = 0; g < C::kDimVo / 8; g += 4) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          u32 x[4];
#pragma unroll
          for (int k = 0; k < 4; ++k) x[k] = pack2<typename C::Out>(o[4 * (g + k) + 2 * h] * scale[h], o[4 * (g + k) + 2 * h + 1] * scale[h]);
          trade<1>(x[0], x[1], lane), trade<1>(x[2], x[3], lane);
          trade<2>(x[0], x[2], lane), trade<2>(x[1], x[3], lane);
          if (first + 8 * h + lane / 4 < rows) *reinterpret_cast<uint4*>(to[h] + g * 16) = make_uint4(x[0], x[1], x[2], x[3]);
        }
      }
    }
  }
};

}  // namespace fir
