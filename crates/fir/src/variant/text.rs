//! Hooks as CUDA C++ text, in the form of FlashInfer's variants: see [`Variant::cuda_text`].
#![allow(unsafe_code)]

use std::sync::Arc;

use super::params::ParamType;
use super::spec::{Draft, Variant, finish};
use crate::error::{Error, Result};
use crate::tensor::DType;

/// What stands before a user's text.
pub(super) const SHIM: &str = include_str!("../../kernels/attention/text.cuh");

/// A user's struct.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Text {
    /// The struct's name.
    pub(super) name: String,
    pub(super) source: Arc<str>,
}

/// Fields that a text finds in its `params` besides the parameters it declared, if it did not declare one of that name.
pub(crate) const KNOWN: [(&str, ParamType); 3] =
    [("sm_scale", ParamType::F32), ("num_qo_heads", ParamType::I32), ("num_kv_heads", ParamType::I32)];

impl Variant {
    /// A variant whose hooks are CUDA C++ text, for CUDA devices alone: a struct `name` of `source`, in the form of
    /// FlashInfer's, whose constructor and hooks find the parameters in `params` by their names. Scalars are
    /// [`ParamType::F32`] and [`ParamType::I32`] (`float`, `int`), tensors [`ParamType::Tensor`] (`float*`, `uint8_t*`, …);
    /// `sm_scale`, `num_qo_heads` and `num_kv_heads` are there too, the first as the run was given it. What the struct is
    /// made of, and what its hooks get, is in `kernels/attention/text.cuh`.
    ///
    /// ```
    /// use fir::variant::{ParamType, Variant, causal};
    ///
    /// let source = r"
    /// struct FlashSigmoid : AttentionVariantBase {
    ///   static constexpr bool use_softmax = false;
    ///   float scale, bias;
    ///   template <typename Params>
    ///   __device__ FlashSigmoid(const Params& params, uint32_t batch_idx, uint8_t* smem_ptr) {
    ///     scale = params.logits_scale * math::log2e, bias = params.sigmoid_bias * math::log2e;
    ///   }
    ///   REGISTER_LOGITS_TRANSFORM(params, logits, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    ///     return math::ptx_rcp(1.f + math::ptx_exp2(-(logits * scale + bias)));
    ///   })
    /// };";
    /// let scalars = [("logits_scale", ParamType::F32), ("sigmoid_bias", ParamType::F32)];
    /// // SAFETY: it reads its parameters alone.
    /// let sigmoid = unsafe { Variant::cuda_text("FlashSigmoid", source, &scalars) }?.and(causal())?;
    /// # let _ = sigmoid;
    /// # Ok::<(), fir::Error>(())
    /// ```
    ///
    /// Masks, rotations and scales of other variants may be added by [`Variant::and`]; a CPU refuses to plan it. The text is
    /// compiled by the first batch that needs it; an error has the compiler's log, with lines of `source`, and says where
    /// the whole text is kept.
    ///
    /// # Safety
    /// The text runs on the device as it is: for every query and key that a run has, it reads and writes only what the
    /// tensors given for its parameters hold, and writes none that anybody reads meanwhile.
    pub unsafe fn cuda_text(name: &str, source: &str, params: &[(&str, ParamType)]) -> Result<Self> {
        let refuse = |what: String, got: String, want: &str| Error::Variant {
            variant: name.into(),
            what,
            got,
            want: want.into(),
        };
        for (i, (param, ty)) in params.iter().enumerate() {
            let known = match ty {
                ParamType::F32 | ParamType::I32 => true,
                ParamType::Tensor(dtype) => element(*dtype).is_some(),
                _ => false,
            };
            let what = || format!("parameter `{param}`");
            if !known {
                return Err(refuse(what(), ty.to_string(), "f32, i32, or a tensor of numbers that CUDA C++ has"));
            }
            if params[..i].iter().any(|p| p.0 == *param) {
                return Err(refuse(what(), "declared twice".into(), "once"));
            }
        }
        // Where the struct says it: the compiled text asserts that it was read right.
        let says =
            source.split("use_softmax").nth(1).map(|rest| rest.trim_start().trim_start_matches('=').trim_start());
        let text = Text { name: name.into(), source: source.into() };
        let draft = Draft::of_text(text, says.is_some_and(|s| s.starts_with("false")));
        finish(name.into(), params.iter().map(|(n, t)| ((*n).into(), *t)).collect(), Vec::new(), draft)
    }
}

/// The C++ type of an element that a text may point to.
pub(super) fn element(dtype: DType) -> Option<&'static str> {
    Some(match dtype {
        DType::F32 => "float",
        DType::F16 => "half",
        DType::BF16 => "nv_bfloat16",
        DType::I8 => "int8_t",
        DType::I16 => "int16_t",
        DType::I32 => "int32_t",
        DType::I64 => "int64_t",
        DType::U8 => "uint8_t",
        DType::U32 => "uint32_t",
        DType::Bool => "bool",
        _ => return None,
    })
}
