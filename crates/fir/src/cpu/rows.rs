//! Tensors as rows: the last axis, of stride 1. Most operators read and write row by row.

use std::borrow::Cow;

use half::slice::HalfFloatSliceExt;

use super::arch::prefetch_at;
use super::exec::Cpu;
use super::pool::RowsMut;
use super::vector::{Lane, Vector};
use crate::error::{Error, Result};
use crate::tensor::{DType, Element, Layout, TensorRef, bf16, f16};

/// Runs `$body` with `$t` standing for the float type that `$dtype` names; refuses other types.
macro_rules! with_float {
    ($op:expr, $arg:expr, $dtype:expr, $t:ident => $body:expr) => {
        match $dtype {
            crate::tensor::DType::F32 => {
                type $t = f32;
                $body
            }
            crate::tensor::DType::F16 => {
                type $t = crate::tensor::f16;
                $body
            }
            crate::tensor::DType::BF16 => {
                type $t = crate::tensor::bf16;
                $body
            }
            other => Err(crate::error::Error::DType {
                op: $op,
                arg: $arg,
                got: other.name(),
                want: "f32, f16 or bf16".into(),
            }),
        }
    };
}
pub(crate) use with_float;

/// As [`with_float`], and fp8.
macro_rules! with_float8 {
    ($op:expr, $arg:expr, $dtype:expr, $t:ident => $body:expr) => {
        match $dtype {
            crate::tensor::DType::F32 => {
                type $t = f32;
                $body
            }
            crate::tensor::DType::F16 => {
                type $t = crate::tensor::f16;
                $body
            }
            crate::tensor::DType::BF16 => {
                type $t = crate::tensor::bf16;
                $body
            }
            crate::tensor::DType::E4M3 => {
                type $t = crate::tensor::E4m3;
                $body
            }
            crate::tensor::DType::E5M2 => {
                type $t = crate::tensor::E5m2;
                $body
            }
            other => Err(crate::error::Error::DType {
                op: $op,
                arg: $arg,
                got: other.name(),
                want: "f32, f16, bf16, e4m3 or e5m2".into(),
            }),
        }
    };
}
pub(crate) use with_float8;

/// The layout as `[a, b, row]` with strides of the first two axes; refuses rows that are not contiguous.
pub(super) fn three_axes(op: &'static str, arg: &'static str, layout: &Layout) -> Result<([usize; 3], [usize; 2])> {
    let (shape, strides) = (layout.shape(), layout.strides());
    let (shape3, strides3) = match (shape, strides) {
        (&[c], &[u]) => ([1, 1, c], [0, 0, u]),
        (&[b, c], &[t, u]) => ([1, b, c], [0, t, u]),
        (&[a, b, c], &[s, t, u]) => ([a, b, c], [s, t, u]),
        _ => return Err(Error::Rank { op, arg, got: shape.len(), want: 3, axes: "at most".into() }),
    };
    if strides3[2] != 1 && shape3[2] > 1 {
        return Err(Error::layout(op, arg, format!("stride {} of the last axis", strides3[2]), "1"));
    }
    Ok((shape3, [strides3[0], strides3[1]]))
}

/// Rows of a borrowed tensor of rank 1 to 3; row `r` of `[a, b, row]` is `(r / b, r % b)`.
#[derive(Clone, Copy)]
pub(crate) struct Rows<'a, T> {
    data: &'a [T],
    inner: usize,
    strides: [usize; 2],
    row: usize,
    len: usize,
}

#[cfg(target_arch = "x86_64")]
impl<'a> Rows<'a, bf16> {
    /// The same rows, with two numbers in the bits of each; none if a row is odd, or begins where no f32 does.
    pub(crate) fn pairs(&self) -> Option<Rows<'a, f32>> {
        let data = bytemuck::try_cast_slice(&self.data[..self.data.len() / 2 * 2]).ok()?;
        // Strides of axes of one entry say nothing: a row alone must pair where it does among others.
        let [outer, inner] = [self.len > self.inner, self.inner > 1];
        let even = |used: bool, n: usize| !used || n.is_multiple_of(2);
        let even = even(true, self.row) && even(outer, self.strides[0]) && even(inner, self.strides[1]);
        let strides = self.strides.map(|s| s / 2);
        even.then_some(Rows { data, inner: self.inner, strides, row: self.row / 2, len: self.len })
    }
}

impl<'a, T: Element> Rows<'a, T> {
    pub(crate) fn new(op: &'static str, arg: &'static str, x: TensorRef<'a>) -> Result<Self> {
        let view = x.typed::<T>(op, arg)?;
        let (shape, strides) = three_axes(op, arg, view.layout())?;
        Ok(Self { data: view.data(), inner: shape[1], strides, row: shape[2], len: shape[0] * shape[1] })
    }

    /// Itself, if its numbers are f32.
    pub(crate) fn as_f32(&self) -> Option<Rows<'a, f32>> {
        let data = (T::DTYPE == DType::F32).then(|| bytemuck::cast_slice(self.data))?;
        Some(Rows { data, inner: self.inner, strides: self.strides, row: self.row, len: self.len })
    }

    /// A slice as rows of `row` elements.
    pub(crate) fn packed(data: &'a [T], row: usize) -> Self {
        let len = data.len() / row.max(1);
        Self { data, inner: len, strides: [0, row], row, len }
    }

    /// A slice as `len` rows of `row` elements, none perhaps.
    pub(crate) fn packed_as(data: &'a [T], len: usize, row: usize) -> Self {
        Self { data, inner: len, strides: [0, row], row, len }
    }

    /// Number of rows.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Elements per row.
    pub(crate) fn row_len(&self) -> usize {
        self.row
    }

    /// Row `r`; panics past the last.
    #[inline(always)]
    pub(crate) fn row(&self, r: usize) -> &'a [T] {
        assert!(r < self.len, "row {r} of {}", self.len);
        if self.row == 0 {
            return &[]; // There is no memory behind rows of no elements, whatever their strides.
        }
        let at = r / self.inner * self.strides[0] + r % self.inner * self.strides[1];
        &self.data[at..][..self.row]
    }

    /// `n` rows from row `r` on as memory that begins with the first, and the elements from one to the next; `None` if
    /// they are not evenly apart.
    pub(crate) fn stretch(&self, r: usize, n: usize) -> Option<(&'a [T], usize)> {
        assert!(n > 0 && r + n <= self.len, "rows {r}..{} of {}", r + n, self.len);
        let at = r / self.inner * self.strides[0] + r % self.inner * self.strides[1];
        (self.row > 0 && r % self.inner + n <= self.inner).then(|| (&self.data[at..], self.strides[1]))
    }
}

/// Calls `work` on parts of `out`, in parallel when there is enough of it ([`parts_for`]).
pub(crate) fn for_parts<'a, T: Element>(cpu: &Cpu, out: RowsMut<'a, T>, work: impl Fn(RowsMut<'a, T>) + Sync) {
    let elements = out.range().len() * out.row_len();
    // Rows without elements may be more than can be counted through.
    if elements > 0 {
        cpu.pool().scatter(out.split(parts_for(cpu, elements)), work);
    }
}

/// Into how many parts to cut an operator over `elements`: one below 16k of them (microseconds of work, as waking
/// the pool costs), or below 4k while it is awake; else two per worker, so that a late worker costs half a part.
pub(crate) fn parts_for(cpu: &Cpu, elements: usize) -> usize {
    let few = if cpu.pool().is_awake() { 4 << 10 } else { 16 << 10 };
    if elements < few { 1 } else { 2 * cpu.workers() }
}

/// Widens a row to f32; `out` may be longer, and the rest of it becomes zero.
#[inline(always)]
pub(crate) fn widen<V: Vector, T: Lane>(v: V, x: &[T], out: &mut [f32]) {
    let full = x.len() / V::LANES * V::LANES;
    let mut i = 0;
    while i < full {
        v.store(T::load(v, &x[i..]), &mut out[i..]);
        i += V::LANES;
    }
    for (o, x) in out[full..].iter_mut().zip(&x[full..]) {
        *o = x.to_f32();
    }
    out[x.len()..].fill(0.0);
}

/// Rounds f32 values into a row of equal length.
#[inline(always)]
pub(crate) fn narrow<V: Vector, T: Lane>(v: V, x: &[f32], out: &mut [T]) {
    assert_eq!(x.len(), out.len());
    let full = x.len() / V::LANES * V::LANES;
    let mut i = 0;
    while i < full {
        T::store(v, v.load(&x[i..]), &mut out[i..]);
        i += V::LANES;
    }
    for (o, &x) in out[full..].iter_mut().zip(&x[full..]) {
        *o = T::from_f32(x);
    }
}

/// A vector-sized parameter (a norm's weight, say) of any float type, as f32; borrowed where it is that already.
pub(crate) fn widened<'a>(op: &'static str, arg: &'static str, x: TensorRef<'a>) -> Result<Cow<'a, [f32]>> {
    // A stride of 0 could claim 2^60 elements; without it there are no more than the memory behind `x` holds.
    if x.layout().may_alias() {
        return Err(Error::layout(
            op,
            arg,
            format!("strides {:?}", x.strides()),
            "strides that reach no element twice",
        ));
    }
    if !x.layout().is_contiguous() && matches!(x.dtype(), DType::F32 | DType::F16 | DType::BF16) {
        return x.to_f32_vec().map(Cow::Owned);
    }
    // `half` converts slices of f16 with the CPU's instruction; the loop over bf16 is vectorized.
    match x.dtype() {
        DType::F32 => Ok(Cow::Borrowed(x.typed::<f32>(op, arg)?.data())),
        DType::F16 => Ok(Cow::Owned(x.typed::<f16>(op, arg)?.data().to_f32_vec())),
        DType::BF16 => {
            let bits = x.typed::<bf16>(op, arg)?.data().iter().map(|x| u32::from(x.to_bits()) << 16);
            Ok(Cow::Owned(bits.map(f32::from_bits).collect()))
        }
        other => Err(Error::DType { op, arg, got: other.name(), want: "f32, f16 or bf16".into() }),
    }
}

/// Rows of f32, f16 or bf16 that are read as f32. The type is told apart row by row, which costs a nanosecond and
/// saves compiling a kernel for each.
#[derive(Clone, Copy)]
pub(crate) enum WideRows<'a> {
    F32(Rows<'a, f32>),
    F16(Rows<'a, f16>),
    BF16(Rows<'a, bf16>),
}

impl<'a> WideRows<'a> {
    pub(crate) fn new(op: &'static str, arg: &'static str, x: TensorRef<'a>) -> Result<Self> {
        match x.dtype() {
            DType::F32 => Rows::new(op, arg, x).map(Self::F32),
            DType::F16 => Rows::new(op, arg, x).map(Self::F16),
            DType::BF16 => Rows::new(op, arg, x).map(Self::BF16),
            other => Err(Error::DType { op, arg, got: other.name(), want: "f32, f16 or bf16".into() }),
        }
    }

    /// Elements per row.
    pub(crate) fn row_len(&self) -> usize {
        match self {
            Self::F32(x) => x.row_len(),
            Self::F16(x) => x.row_len(),
            Self::BF16(x) => x.row_len(),
        }
    }

    /// Asks for row `r`.
    #[inline(always)]
    pub(crate) fn ask(&self, r: usize) {
        match self {
            Self::F32(x) => prefetch_at(x.row(r).as_ptr(), x.row_len()),
            Self::F16(x) => prefetch_at(x.row(r).as_ptr(), x.row_len()),
            Self::BF16(x) => prefetch_at(x.row(r).as_ptr(), x.row_len()),
        }
    }

    /// Element `i` of row `r`.
    pub(crate) fn at(&self, r: usize, i: usize) -> f32 {
        match self {
            Self::F32(x) => x.row(r)[i],
            Self::F16(x) => x.row(r)[i].to_f32(),
            Self::BF16(x) => x.row(r)[i].to_f32(),
        }
    }

    /// Row `r`, into as many elements.
    #[inline(always)]
    pub(crate) fn widen<V: Vector>(&self, v: V, r: usize, out: &mut [f32]) {
        match self {
            Self::F32(x) => out.copy_from_slice(x.row(r)),
            Self::F16(x) => widen(v, x.row(r), out),
            Self::BF16(x) => widen(v, x.row(r), out),
        }
    }
}
