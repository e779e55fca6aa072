//! Parameters: their types belong to the variant, their values to the call.

use crate::error::{Error, Result};
use crate::tensor::{DType, Place, TensorRef};

use super::spec::Variant;

/// Type of a variant's parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ParamType {
    /// A number.
    F32,
    /// An integer.
    I32,
    /// `[n]`, f32, of one element or more.
    F32Tensor,
    /// `[n]`, i32, of one element or more.
    I32Tensor,
    /// `[qo_heads]`, f32.
    PerHead,
    /// Packed bits, a segment of bytes for each request.
    Bits,
    /// Contiguous, of this type and any shape: for hooks of CUDA C++ text, which see its first element's address.
    Tensor(DType),
}

impl std::fmt::Display for ParamType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::I32 => "i32",
            Self::F32Tensor => "f32 tensor",
            Self::I32Tensor => "i32 tensor",
            Self::PerHead => "f32 tensor of one value per query head",
            Self::Bits => "bits",
            Self::Tensor(dtype) => return write!(f, "contiguous {dtype} tensor"),
        })
    }
}

/// Values of a variant's parameters, by name. Checked by [`Variant::bind`].
///
/// ```
/// # use fir::variant::*;
/// let slopes = [0.5, 0.25];
/// let params = Params::new().f32("soft_cap", 30.0).f32_tensor("alibi_slopes", &slopes);
/// # let v = soft_cap().and(alibi()).unwrap();
/// # v.bind(&params, 2, 1).unwrap();
/// ```
#[derive(Clone, Debug, Default)]
pub struct Params<'a> {
    values: Vec<(String, Value<'a>)>,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Value<'a> {
    F32(f32),
    I32(i32),
    F32s(&'a [f32]),
    I32s(&'a [i32]),
    Tensor(TensorRef<'a>),
    Bits { bytes: &'a [u8], indptr: &'a [i32] },
    BitTensors { bytes: TensorRef<'a>, indptr: TensorRef<'a> },
}

impl std::fmt::Display for Value<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::F32(x) => write!(f, "f32 {x}"),
            Self::I32(x) => write!(f, "i32 {x}"),
            Self::F32s(x) => write!(f, "f32 tensor [{}]", x.len()),
            Self::I32s(x) => write!(f, "i32 tensor [{}]", x.len()),
            Self::Tensor(t) => write!(f, "{} tensor {:?} with strides {:?}", t.dtype(), t.shape(), t.strides()),
            Self::Bits { bytes, indptr } => write!(f, "bits of {} bytes, indptr [{}]", bytes.len(), indptr.len()),
            Self::BitTensors { bytes: b, indptr: i } => {
                write!(f, "bits in {} tensor {:?}, indptr {} {:?}", b.dtype(), b.shape(), i.dtype(), i.shape())
            }
        }
    }
}

impl<'a> Params<'a> {
    /// None.
    pub fn new() -> Self {
        Self::default()
    }

    fn with(mut self, name: &str, value: Value<'a>) -> Self {
        self.values.push((name.into(), value));
        self
    }

    /// A number.
    pub fn f32(self, name: &str, value: f32) -> Self {
        self.with(name, Value::F32(value))
    }

    /// An integer.
    pub fn i32(self, name: &str, value: i32) -> Self {
        self.with(name, Value::I32(value))
    }

    /// An f32 tensor of one axis; also a value per query head.
    pub fn f32_tensor(self, name: &str, values: &'a [f32]) -> Self {
        self.with(name, Value::F32s(values))
    }

    /// An i32 tensor of one axis.
    pub fn i32_tensor(self, name: &str, values: &'a [i32]) -> Self {
        self.with(name, Value::I32s(values))
    }

    /// A contiguous tensor where the executor's tensors are: of one axis, f32 or i32, or what a [`ParamType::Tensor`] says.
    pub fn tensor(self, name: &str, values: TensorRef<'a>) -> Self {
        self.with(name, Value::Tensor(values))
    }

    /// Packed bits: request `b` has the bytes `indptr[b]..indptr[b + 1]`, lowest bit of a byte first.
    pub fn bits(self, name: &str, bytes: &'a [u8], indptr: &'a [i32]) -> Self {
        self.with(name, Value::Bits { bytes, indptr })
    }

    /// [`Self::bits`] in tensors, contiguous u8 and i32. On a device nobody looks at `indptr` before the kernels do: bits of
    /// a segment that does not lie inside of the bytes are 0.
    pub fn bits_tensors(self, name: &str, bytes: TensorRef<'a>, indptr: TensorRef<'a>) -> Self {
        self.with(name, Value::BitTensors { bytes, indptr })
    }
}

/// The values of one variant's parameters, checked and in the variant's order.
#[derive(Clone, Debug)]
pub struct Bound<'a> {
    pub(super) slots: Vec<Value<'a>>,
}

impl<'a> Bound<'a> {
    /// The values, in the order of the variant's parameters.
    #[cfg(feature = "cuda")]
    pub(crate) fn values(&self) -> &[Value<'a>] {
        &self.slots
    }
}

impl Bound<'_> {
    #[cold]
    fn foreign() -> ! {
        panic!("the parameters were bound for another variant")
    }

    #[inline]
    pub(crate) fn f32(&self, slot: u32) -> f32 {
        match self.slots.get(slot as usize) {
            Some(Value::F32(x)) => *x,
            _ => Self::foreign(),
        }
    }

    #[inline]
    pub(crate) fn i32(&self, slot: u32) -> i32 {
        match self.slots.get(slot as usize) {
            Some(Value::I32(x)) => *x,
            _ => Self::foreign(),
        }
    }

    #[inline]
    pub(crate) fn f32s(&self, slot: u32) -> &[f32] {
        match self.slots.get(slot as usize) {
            Some(Value::F32s(x)) => x,
            _ => Self::foreign(),
        }
    }

    #[inline]
    pub(crate) fn i32s(&self, slot: u32) -> &[i32] {
        match self.slots.get(slot as usize) {
            Some(Value::I32s(x)) => x,
            _ => Self::foreign(),
        }
    }

    /// The bytes of request `batch`; none for a request that is not in the batch.
    #[inline]
    pub(crate) fn segment(&self, slot: u32, batch: i32) -> &[u8] {
        let Some(&Value::Bits { bytes, indptr }) = self.slots.get(slot as usize) else { Self::foreign() };
        let Ok(b) = usize::try_from(batch) else { return &[] };
        match (indptr.get(b), indptr.get(b + 1)) {
            (Some(&start), Some(&end)) => bytes.get(start as usize..end as usize).unwrap_or(&[]),
            _ => &[],
        }
    }
}

/// Element `i` of `x` (not empty), clamped.
#[inline(always)]
pub(crate) fn clamped<T: Copy>(x: &[T], i: i32) -> T {
    x[(i.max(0) as usize).min(x.len() - 1)]
}

/// Bit `row * stride + col`, false outside.
#[inline(always)]
pub(crate) fn bit(segment: &[u8], row: i32, col: i32, stride: i32) -> bool {
    let bit = i64::from(row) * i64::from(stride) + i64::from(col);
    // A negative one becomes a byte far outside.
    segment.get((bit >> 3) as usize).is_some_and(|byte| byte >> (bit & 7) & 1 != 0)
}

impl Variant {
    /// Checks `params` against the parameters that this variant declares: every one has a value of its type, and no
    /// value is left over.
    ///
    /// Tensors have at least one element, a value per head has `num_qo_heads`, the `indptr` of bits has `batch + 1`
    /// entries that do not decrease and stay inside the bytes, and numbers are not NaN.
    pub fn bind<'a>(&self, params: &Params<'a>, num_qo_heads: usize, batch: usize) -> Result<Bound<'a>> {
        if self.is_cuda_text() {
            let (what, want) = ("hooks".into(), "expressions: text runs on CUDA devices alone".into());
            return Err(Error::Variant { variant: self.name().into(), what, got: "CUDA C++ text".into(), want });
        }
        self.bind_at(Place::Host, params, num_qo_heads, batch)
    }

    /// [`Self::bind`] for kernels that also read tensors at `place`. Only what the host can see of those is checked.
    pub(crate) fn bind_at<'a>(
        &self,
        place: Place,
        params: &Params<'a>,
        num_qo_heads: usize,
        batch: usize,
    ) -> Result<Bound<'a>> {
        let refuse = |name: &str, got: String, want: String| Error::Variant {
            variant: self.name().into(),
            what: format!("parameter `{name}`"),
            got,
            want,
        };
        for (i, (name, value)) in params.values.iter().enumerate() {
            if !self.params().any(|(n, _)| n == name) {
                let known: Vec<_> = self.params().map(|(n, t)| format!("`{n}`: {t}")).collect();
                let want = if known.is_empty() { "no parameter".into() } else { known.join(", ") };
                return Err(refuse(name, value.to_string(), want));
            }
            if params.values[..i].iter().any(|(n, _)| n == name) {
                return Err(refuse(name, "two values".into(), "one".into()));
            }
        }
        let mut slots = Vec::new();
        for (name, ty) in self.params() {
            let Some(&(_, value)) = params.values.iter().find(|(n, _)| n == name) else {
                return Err(refuse(name, "no value".into(), ty.to_string()));
            };
            slots.push(check(place, value, ty, num_qo_heads, batch).map_err(|(got, want)| refuse(name, got, want))?);
        }
        Ok(Bound { slots })
    }
}

/// `value` as the kernels take it, or what it is and what it must be.
fn check<'a>(
    place: Place,
    value: Value<'a>,
    ty: ParamType,
    heads: usize,
    batch: usize,
) -> Result<Value<'a>, (String, String)> {
    let line = |t: &TensorRef<'_>| t.shape().len() == 1 && (t.strides()[0] == 1 || t.shape()[0] <= 1);
    let there = |t: &TensorRef<'_>| t.place() == place && place != Place::Host;
    if let ParamType::Tensor(dtype) = ty {
        let fits = match value {
            Value::Tensor(t) => t.dtype() == dtype && t.layout().is_contiguous(),
            Value::F32s(_) => dtype == DType::F32,
            Value::I32s(_) => dtype == DType::I32,
            _ => false,
        };
        return if fits { Ok(value) } else { Err((value.to_string(), ty.to_string())) };
    }
    let value = match value {
        Value::Tensor(t) if line(&t) && there(&t) => {
            let n = t.shape()[0];
            return match (ty, t.dtype()) {
                (ParamType::F32Tensor, DType::F32) | (ParamType::I32Tensor, DType::I32) if n > 0 => Ok(value),
                (ParamType::PerHead, DType::F32) if n == heads && heads > 0 => Ok(value),
                (ParamType::PerHead, _) => Err((value.to_string(), format!("f32 tensor [{heads}]"))),
                _ => Err((value.to_string(), format!("contiguous {ty} of one axis, not empty"))),
            };
        }
        Value::BitTensors { bytes, indptr } if line(&bytes) && line(&indptr) && there(&bytes) && there(&indptr) => {
            let types = (bytes.dtype(), indptr.dtype()) == (DType::U8, DType::I32);
            let fits = batch.checked_add(1) == Some(indptr.shape()[0]);
            if ty == ParamType::Bits && types && fits {
                return Ok(value);
            }
            let want =
                if ty == ParamType::Bits { "u8, with an i32 indptr of batch + 1".into() } else { ty.to_string() };
            return Err((value.to_string(), want));
        }
        Value::Tensor(t) if line(&t) => match t.dtype() {
            DType::F32 => t.typed::<f32>("Params", "tensor").map(|v| Value::F32s(v.data())),
            DType::I32 => t.typed::<i32>("Params", "tensor").map(|v| Value::I32s(v.data())),
            _ => Ok(value),
        }
        .unwrap_or(value),
        Value::BitTensors { bytes, indptr } if line(&bytes) && line(&indptr) => {
            match (bytes.typed::<u8>("Params", "bytes"), indptr.typed::<i32>("Params", "indptr")) {
                (Ok(b), Ok(i)) => Value::Bits { bytes: &b.data()[..b.shape()[0]], indptr: &i.data()[..i.shape()[0]] },
                _ => value,
            }
        }
        other => other,
    };
    match (ty, value) {
        (ParamType::F32, Value::F32(x)) if x.is_nan() => Err((value.to_string(), "a number".into())),
        (ParamType::F32, Value::F32(_)) | (ParamType::I32, Value::I32(_)) => Ok(value),
        (ParamType::F32Tensor, Value::F32s(x)) if !x.is_empty() => Ok(value),
        (ParamType::I32Tensor, Value::I32s(x)) if !x.is_empty() => Ok(value),
        (ParamType::F32Tensor | ParamType::I32Tensor, _) => {
            Err((value.to_string(), format!("contiguous {ty} of one axis, not empty")))
        }
        (ParamType::PerHead, Value::F32s(x)) if x.len() == heads && heads > 0 => Ok(value),
        (ParamType::PerHead, _) => Err((value.to_string(), format!("f32 tensor [{heads}], one value per query head"))),
        (ParamType::Bits, Value::Bits { bytes, indptr }) => {
            if batch.checked_add(1) != Some(indptr.len()) {
                return Err((
                    value.to_string(),
                    format!("indptr [{}] for a batch of {batch}", batch.saturating_add(1)),
                ));
            }
            if indptr[0] < 0 {
                return Err((format!("indptr[0] = {}", indptr[0]), "0 or more".into()));
            }
            for (i, w) in indptr.windows(2).enumerate() {
                if w[0] > w[1] {
                    let got = format!("indptr[{i}] = {}, indptr[{}] = {}", w[0], i + 1, w[1]);
                    return Err((got, "an indptr that does not decrease".into()));
                }
            }
            let last = indptr[batch];
            if last as usize > bytes.len() {
                return Err((format!("indptr[{batch}] = {last}"), format!("at most the {} bytes", bytes.len())));
            }
            Ok(value)
        }
        _ => Err((value.to_string(), ty.to_string())),
    }
}
