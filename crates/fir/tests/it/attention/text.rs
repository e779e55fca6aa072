//! Hooks as CUDA C++ text, in the form of FlashInfer's variants, against the expressions that say the same.
#![cfg(feature = "cuda")]

use fir::attention::{BatchPlan, Problem, Split};
use fir::exec::{Arch, Exec};
use fir::kv::Ragged;
use fir::testing::Rng;
use fir::variant::{self, ParamType, Params, Variant};
use fir::{DType, Error, Tensor, jit};

use super::case::{Batch, Case, expected, run};

const F32: ParamType = ParamType::F32;

/// The constructor of a struct that softmax follows.
const SCALED: &str = r"
  uint32_t window_left, qo_len, kv_len;
  float sm_scale_log2;

  // Create closure
  template <typename Params>
  __device__ __host__ NAME(const Params& params, uint32_t batch_idx, uint8_t* smem_ptr) {
    qo_len = params.get_qo_len(batch_idx);
    kv_len = params.get_kv_len(batch_idx);
    window_left = kv_len;
    sm_scale_log2 = params.sm_scale * math::log2e;
  }
";

const DIVIDED: &str = r"
  REGISTER_OUTPUT_TRANSFORM(params, output, batch_idx, qo_idx, qo_head_idx, m, d, scale, {
    float d_rcp = (m != -math::inf) ? math::ptx_rcp(d) : 0.f;
    return output * scale * d_rcp;
  })
";

const SIGMOID: &str = r"
struct FlashSigmoid : AttentionVariantBase {
  static constexpr bool use_softmax = false;

  uint32_t window_left, qo_len, kv_len;
  float sigmoid_scale_log2;
  float sigmoid_bias_log2;

  // Create closure
  template <typename Params>
  __device__ __host__ FlashSigmoid(const Params& params, uint32_t batch_idx, uint8_t* smem_ptr) {
    qo_len = params.get_qo_len(batch_idx);
    kv_len = params.get_kv_len(batch_idx);
    window_left = kv_len;
    sigmoid_bias_log2 = params.sigmoid_bias * math::log2e;
    sigmoid_scale_log2 = params.logits_scale * math::log2e;
  }

  REGISTER_LOGITS_TRANSFORM(params, logits, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    return math::ptx_rcp(1.f + math::ptx_exp2(-float(logits * sigmoid_scale_log2 + sigmoid_bias_log2)));
  });

  REGISTER_OUTPUT_TRANSFORM(params, output, batch_idx, qo_idx, qo_head_idx, m, d, scale, {
    return output;
  })
};
";

/// A text, and the variant of expressions that it is to equal.
struct Example {
    text: Variant,
    same: Variant,
}

#[expect(unsafe_code, reason = "the texts below read their parameters alone, within what the tests give")]
fn text(name: &str, source: &str, params: &[(&str, ParamType)]) -> fir::Result<Variant> {
    // SAFETY: as above.
    unsafe { Variant::cuda_text(name, source, params) }
}

fn softmax(name: &str, members: &str, params: &[(&str, ParamType)]) -> Variant {
    let scaled = SCALED.replace("NAME", name);
    let head = format!("struct {name} : AttentionVariantBase {{\n  static constexpr bool use_softmax = true;\n");
    text(name, &format!("{head}{scaled}{members}{DIVIDED}}};\n"), params).unwrap()
}

fn examples() -> [Example; 4] {
    let sigmoid = text("FlashSigmoid", SIGMOID, &[("logits_scale", F32), ("sigmoid_bias", F32)]).unwrap();
    let mask = softmax(
        "PackedMask",
        r"
  REGISTER_LOGITS_MASK(params, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    const uint32_t offset = qo_idx * kv_len + kv_idx;
    return ((params.custom_mask[params.mask_indptr[batch_idx] + offset / 8] >> (offset % 8)) & 1);
  })
",
        &[("custom_mask", ParamType::Tensor(DType::U8)), ("mask_indptr", ParamType::Tensor(DType::I32))],
    );
    let alibi = softmax(
        "Slopes",
        r"
  REGISTER_LOGITS_TRANSFORM(params, logits, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    const float distance = float(int(kv_idx) - int(kv_len - qo_len + qo_idx));
    return logits + params.alibi_slopes[qo_head_idx] * distance / params.sm_scale;
  })
",
        &[("alibi_slopes", ParamType::Tensor(DType::F32))],
    );
    let sink = softmax(
        "SinkText",
        r"
  REGISTER_M_D_UPDATE(params, kv_tile_idx, qo_head_idx, m, d, scale, {
    float log_sink = (kv_tile_idx == 0 && qo_head_idx < params.num_qo_heads) ? params.sink[qo_head_idx] * math::log2e : -math::inf;
    float m_new = (log_sink > m) ? log_sink : m;
    scale = math::ptx_exp2(m - m_new);
    d = math::ptx_exp2(log_sink - m_new) + d * scale;
    m = m_new;
  })
",
        &[("sink", ParamType::Tensor(DType::F32))],
    );
    let and_causal = |v: Variant| v.and(variant::causal()).unwrap();
    [
        Example { text: and_causal(sigmoid), same: and_causal(variant::sigmoid()) },
        Example { text: mask, same: variant::custom_mask() },
        Example { text: and_causal(alibi), same: and_causal(variant::alibi()) },
        Example { text: and_causal(sink), same: and_causal(variant::sink()) },
    ]
}

#[test]
fn text_equals_the_expression_on_a_gpu() {
    let Some(gpu) = crate::support::gpu() else { return };
    for (dtype, dim) in [(DType::BF16, 128), (DType::F16, 64), (DType::F32, 40)] {
        for Example { text, same } in examples() {
            // Divided by `sm_scale` and multiplied by it again, a bias of 160 is off by more than f32's bound.
            if dtype == DType::F32 && text.name() == "SlopesCausal" {
                continue;
            }
            let mut case = Case::new(4, 2, dim, dtype, same);
            (case.q_lens, case.kv_lens, case.page_size) = (vec![1, 150, 1, 0, 33], vec![700, 320, 3, 0, 33], 16);
            let batch = Batch::new(&case);
            let mut rng = Rng::new(5);
            let mut indptr = vec![0i32];
            for (q, kv) in case.q_lens.iter().zip(&case.kv_lens) {
                indptr.push(indptr[indptr.len() - 1] + (q * kv).div_ceil(8) as i32);
            }
            let bits: Vec<u8> = (0..indptr[5]).map(|_| rng.bits() as u8).collect();
            let slopes = [0.5f32, 0.25, 0.125, -0.5];
            let (bits_tensor, indptr_tensor) =
                (Tensor::from_slice(&bits, &[bits.len()]).unwrap(), Tensor::from_slice(&indptr, &[6]).unwrap());
            let scale = 1.0 / (dim as f32).sqrt();
            let (ours, theirs) = match text.name() {
                "FlashSigmoidCausal" => (
                    Params::new().f32("sigmoid_bias", -0.5).f32("logits_scale", scale),
                    Params::new().f32("bias", -0.5),
                ),
                "PackedMask" => (
                    Params::new().tensor("custom_mask", bits_tensor.view()).tensor("mask_indptr", indptr_tensor.view()),
                    Params::new().bits("mask", &bits, &indptr),
                ),
                "SlopesCausal" => (
                    Params::new().f32_tensor("alibi_slopes", &slopes),
                    Params::new().f32_tensor("alibi_slopes", &slopes),
                ),
                _ => (Params::new().f32_tensor("sink", &slopes), Params::new().f32_tensor("sink", &slopes)),
            };
            let expected = expected(&case, &batch, &theirs);
            let softmax = text.normalize() == variant::Normalize::Softmax;
            case.problem.variant = text;
            for split in [Split::Balanced, Split::Fixed(64)] {
                let (out, lse) = run(gpu, &case, &batch, &ours, split, softmax);
                expected.check(&format!("{split:?} {case:?}"), out.view(), softmax.then(|| lse.view()));
            }
        }
    }
}

#[test]
fn text_is_compiled_into_decode_and_prefill() {
    if !crate::jit::has_compiler() {
        return;
    }
    for Example { text, .. } in examples() {
        let kernels = Problem::new(8, 2, 128, DType::BF16, text).kernels(Arch::HOPPER).unwrap();
        let families: Vec<_> = kernels.iter().map(|k| k.family().to_owned()).collect();
        assert!(families.contains(&"attention/decode".to_owned()), "{families:?}");
        assert!(families.iter().any(|f| f.contains("prefill")), "{families:?}");
        for kernel in kernels {
            let usage = jit::compile(&kernel, Arch::HOPPER).unwrap_or_else(|e| panic!("{e}")).usage;
            assert!(usage.registers > 0 && usage.spilled <= 256, "{}: {usage:?}", kernel.name());
        }
    }
}

#[test]
fn errors_of_text_name_its_lines_and_keep_it() {
    let kernel = |source: &str| {
        let v = text("FlashSigmoid", source, &[("logits_scale", F32), ("sigmoid_bias", F32)]).unwrap();
        Problem::new(8, 2, 128, DType::BF16, v).kernels(Arch::HOPPER).unwrap().remove(0)
    };
    if crate::jit::has_compiler() {
        for (from, to, message) in [
            ("params.sigmoid_bias", "params.sigmoid_bais", "FlashSigmoid(15): error: class"),
            ("sigmoid_scale_log2 +", "sigmoid_scale +", "FlashSigmoid(19): error: identifier \"sigmoid_scale\""),
            (" : AttentionVariantBase", "", "a variant's struct is derived from AttentionVariantBase"),
            ("use_softmax = false", "use_softmax = !true", "use_softmax must be written as"),
        ] {
            let broken = SIGMOID.replace(from, to);
            let Err(Error::Compile { log, source_path, .. }) = jit::compile(&kernel(&broken), Arch::HOPPER) else {
                panic!("{to} compiled")
            };
            assert!(log.contains(message), "{log}");
            assert!(std::fs::read_to_string(&source_path).unwrap().contains(&broken), "{source_path}");
        }
    }
    for (params, message) in [
        (
            &[("x", ParamType::Bits)][..],
            "variant `FlashSigmoid`: parameter `x`: got bits, expected f32, i32, or a tensor",
        ),
        (&[("x", ParamType::Tensor(DType::E4M3))], "variant `FlashSigmoid`: parameter `x`: got contiguous e4m3 tensor"),
        (&[("x", F32), ("x", F32)], "variant `FlashSigmoid`: parameter `x`: got declared twice, expected once"),
        (&[("float", F32)], "variant `FlashSigmoid`: parameter's name: got \"float\""),
    ] {
        let refused = text("FlashSigmoid", SIGMOID, params).unwrap_err().to_string();
        assert!(refused.starts_with(message), "{refused}");
    }
}

#[test]
fn a_cpu_refuses_text() {
    let [sigmoid, mask, ..] = examples();
    let problem = Problem::new(4, 2, 64, DType::BF16, sigmoid.text.clone());
    let ones = Ragged::ones(1).unwrap();
    let refused = BatchPlan::new(&Exec::cpu().unwrap(), problem, &ones, &[4], Split::Balanced).unwrap_err().to_string();
    let message = "the hooks of variant `FlashSigmoidCausal` are CUDA C++ text, which no CPU runs";
    assert!(refused.contains(message), "{refused}");
    let refused = sigmoid.text.bind(&Params::new(), 4, 1).unwrap_err().to_string();
    assert!(refused.contains("hooks: got CUDA C++ text"), "{refused}");
    let refused = sigmoid.text.and(mask.text).unwrap_err().to_string();
    assert!(refused.contains("masks and transforms alone beside hooks of text"), "{refused}");
    let refused = mask.same.and(variant::sink()).unwrap().and(variant::sink()).unwrap_err().to_string();
    assert!(refused.contains("two"), "{refused}");
}
