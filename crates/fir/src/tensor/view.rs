//! [`Tensor`], [`TensorRef`], [`TensorMut`], and their typed forms [`View`] and [`ViewMut`].

use std::ops::Range;

use bytemuck::{Pod, Zeroable};

use super::place::{DeviceMemory, Memory, MemoryMut, Span};
use super::{DType, Element, Float, Layout, Place};
use crate::error::{Error, Result};

/// Anything with a shape: what [`super::Dims`] checks.
pub trait Shaped {
    /// Sizes of the axes.
    fn shape(&self) -> &[usize];
}

/// Unit of owned memory: one cache line, so that every buffer starts on one.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
struct Line([u8; 64]);

/// Owned, contiguous memory with a shape and an element type, here or on a device.
///
/// A clone of one on a device is a copy there; it panics when that device has no memory left, as a `Vec`'s does here.
#[derive(Clone)]
pub struct Tensor {
    owned: Owned,
    dtype: DType,
    layout: Layout,
}

enum Owned {
    Host(Vec<Line>),
    Device(Box<dyn DeviceMemory>),
}

impl Clone for Owned {
    fn clone(&self) -> Self {
        match self {
            Self::Host(lines) => Self::Host(lines.clone()),
            Self::Device(memory) => Self::Device(memory.duplicate().unwrap_or_else(|e| panic!("{e}"))),
        }
    }
}

/// A borrowed tensor; `Copy`, like `&[T]`.
#[derive(Clone, Copy)]
pub struct TensorRef<'a> {
    memory: Memory<'a>,
    dtype: DType,
    layout: Layout,
}

/// A tensor borrowed for writing. No element of it is reached by two indices.
pub struct TensorMut<'a> {
    memory: MemoryMut<'a>,
    dtype: DType,
    layout: Layout,
}

/// A borrowed tensor whose element type is known.
#[derive(Clone, Copy, Debug)]
pub struct View<'a, T> {
    data: &'a [T],
    layout: Layout,
}

/// An exclusively borrowed tensor whose element type is known.
#[derive(Debug)]
pub struct ViewMut<'a, T> {
    data: &'a mut [T],
    layout: Layout,
}

fn check_extent(op: &'static str, layout: &Layout, dtype: DType, bytes: usize) -> Result<()> {
    let need = layout.extent() * dtype.size();
    if need > bytes {
        return Err(Error::layout(
            op,
            "data",
            format!("{bytes} bytes"),
            format!("{need} bytes for shape {:?} with strides {:?} of {dtype}", layout.shape(), layout.strides()),
        ));
    }
    Ok(())
}

/// A device's kernels read elements at their natural alignment, as the CPU's do.
fn check_span(op: &'static str, layout: &Layout, dtype: DType, span: Span) -> Result<()> {
    check_extent(op, layout, dtype, span.len)?;
    if layout.is_empty() || span.address.is_multiple_of(dtype.size() as u64) {
        return Ok(());
    }
    Err(Error::layout(op, "data", format!("address {:#x}", span.address), format!("alignment for {dtype}")))
}

fn check_alias(layout: &Layout) -> Result<()> {
    if !layout.may_alias() {
        return Ok(());
    }
    Err(Error::layout(
        "TensorMut",
        "strides",
        format!("{:?} for shape {:?}", layout.strides(), layout.shape()),
        "strides that reach no element twice",
    ))
}

fn check_axis(layout: &Layout, axis: usize) -> Result<()> {
    if axis >= layout.shape().len() {
        return Err(Error::value("tensor", "axis", axis, format!("less than the rank {}", layout.shape().len())));
    }
    Ok(())
}

fn check_range(layout: &Layout, axis: usize, range: &Range<usize>) -> Result<()> {
    check_axis(layout, axis)?;
    if range.start > range.end || range.end > layout.shape()[axis] {
        return Err(Error::value(
            "tensor",
            "range",
            format!("{range:?}"),
            format!("within 0..{} (axis {axis})", layout.shape()[axis]),
        ));
    }
    Ok(())
}

/// Byte offset of entry `index` of `axis`; 0, which is aligned, for one past `bytes`: only a slice without elements
/// starts there.
fn start_of(layout: &Layout, axis: usize, index: usize, dtype: DType, bytes: usize) -> usize {
    let start = index.checked_mul(layout.strides()[axis]).and_then(|at| at.checked_mul(dtype.size()));
    start.filter(|&at| at <= bytes).unwrap_or(0)
}

impl Tensor {
    /// Zeros.
    pub fn zeros(dtype: DType, shape: &[usize]) -> Result<Self> {
        let layout = Layout::contiguous("Tensor::zeros", "shape", shape)?;
        let bytes =
            layout.len().checked_mul(dtype.size()).filter(|&b| b <= isize::MAX as usize - 64).ok_or_else(|| {
                Error::layout("Tensor::zeros", "shape", format!("{shape:?} of {dtype}"), "a size that fits")
            })?;
        let (mut lines, n) = (Vec::new(), bytes.div_ceil(64));
        lines.try_reserve_exact(n).map_err(|_| {
            Error::layout("Tensor::zeros", "shape", format!("{shape:?} of {dtype}"), "a size that there is memory for")
        })?;
        super::large_pages::ask(lines.spare_capacity_mut());
        lines.resize(n, Line::zeroed());
        Ok(Self { owned: Owned::Host(lines), dtype, layout })
    }

    /// Copies `data`, which must have as many elements as `shape`.
    pub fn from_slice<T: Element>(data: &[T], shape: &[usize]) -> Result<Self> {
        let mut t = Self::zeros(T::DTYPE, shape)?;
        if t.layout.len() != data.len() {
            return Err(Error::value(
                "Tensor::from_slice",
                "data.len()",
                data.len(),
                format!("{} for shape {shape:?}", t.layout.len()),
            ));
        }
        t.as_mut_slice::<T>()?.copy_from_slice(data);
        Ok(t)
    }

    /// Rounds `data` to `dtype`, one of the float types other than fp4.
    pub fn from_f32(dtype: DType, data: &[f32], shape: &[usize]) -> Result<Self> {
        fn fill<T: Float>(t: &mut Tensor, data: &[f32]) -> Result<()> {
            for (o, &x) in t.as_mut_slice::<T>()?.iter_mut().zip(data) {
                *o = T::from_f32(x);
            }
            Ok(())
        }
        let mut t = Self::zeros(dtype, shape)?;
        if t.layout.len() != data.len() {
            return Err(Error::value(
                "Tensor::from_f32",
                "data.len()",
                data.len(),
                format!("{} for shape {shape:?}", t.layout.len()),
            ));
        }
        match dtype {
            DType::F32 => fill::<f32>(&mut t, data)?,
            DType::F16 => fill::<super::f16>(&mut t, data)?,
            DType::BF16 => fill::<super::bf16>(&mut t, data)?,
            DType::E4M3 => fill::<super::E4m3>(&mut t, data)?,
            DType::E5M2 => fill::<super::E5m2>(&mut t, data)?,
            other => {
                return Err(Error::DType {
                    op: "Tensor::from_f32",
                    arg: "dtype",
                    got: other.name(),
                    want: "f32, f16, bf16, e4m3 or e5m2".into(),
                });
            }
        }
        Ok(t)
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Takes over memory of a device, which holds as many bytes as the shape needs.
    #[cfg_attr(not(any(test, feature = "cuda")), expect(dead_code, reason = "a device makes these"))]
    pub(crate) fn on_device(memory: Box<dyn DeviceMemory>, dtype: DType, layout: Layout) -> Result<Self> {
        check_extent("Tensor::on_device", &layout, dtype, memory.span().len)?;
        Ok(Self { owned: Owned::Device(memory), dtype, layout })
    }

    /// Its memory, if it is a device's.
    #[cfg(feature = "cuda")]
    pub(crate) fn into_device_memory(self) -> Option<Box<dyn DeviceMemory>> {
        match self.owned {
            Owned::Host(_) => None,
            Owned::Device(memory) => Some(memory),
        }
    }

    /// Where its memory lies.
    pub fn place(&self) -> Place {
        self.view().place()
    }

    /// A copy in this process's memory; waits for what a device still writes.
    pub fn to_host(&self) -> Result<Self> {
        match &self.owned {
            Owned::Host(_) => Ok(self.clone()),
            Owned::Device(memory) => {
                let mut t = Self::zeros(self.dtype, self.layout.shape())?;
                memory.read(t.view_mut().memory.host("Tensor::to_host", "self")?)?;
                Ok(t)
            }
        }
    }

    /// Borrows all of it.
    pub fn view(&self) -> TensorRef<'_> {
        let n = self.layout.len() * self.dtype.size();
        let memory = match &self.owned {
            Owned::Host(lines) => Memory::Host(&bytemuck::cast_slice(lines)[..n]),
            Owned::Device(memory) => Memory::Device(memory.span()),
        };
        TensorRef { memory, dtype: self.dtype, layout: self.layout }
    }

    /// Borrows all of it for writing.
    pub fn view_mut(&mut self) -> TensorMut<'_> {
        let n = self.layout.len() * self.dtype.size();
        let memory = match &mut self.owned {
            Owned::Host(lines) => MemoryMut::Host(&mut bytemuck::cast_slice_mut(lines)[..n]),
            Owned::Device(memory) => MemoryMut::Device(memory.span()),
        };
        TensorMut { memory, dtype: self.dtype, layout: self.layout }
    }

    /// The elements in row-major order.
    pub fn as_slice<T: Element>(&self) -> Result<&[T]> {
        Ok(self.view().typed::<T>("Tensor::as_slice", "T")?.data)
    }

    /// The elements in row-major order, for writing.
    pub fn as_mut_slice<T: Element>(&mut self) -> Result<&mut [T]> {
        Ok(self.view_mut().typed::<T>("Tensor::as_mut_slice", "T")?.data)
    }

    /// The same elements under another shape of equal size.
    pub fn reshaped(mut self, shape: &[usize]) -> Result<Self> {
        let layout = Layout::contiguous("Tensor::reshaped", "shape", shape)?;
        if layout.len() != self.layout.len() {
            return Err(Error::value(
                "Tensor::reshaped",
                "shape",
                format!("{shape:?}"),
                format!("{} elements", self.layout.len()),
            ));
        }
        self.layout = layout;
        Ok(self)
    }
}

impl<'a> TensorRef<'a> {
    /// Borrows a slice as a contiguous tensor.
    pub fn new<T: Element>(data: &'a [T], shape: &[usize]) -> Result<Self> {
        Self::with_layout(data, Layout::contiguous("TensorRef::new", "shape", shape)?)
    }

    /// Borrows a slice under any strides, in elements.
    pub fn strided<T: Element>(data: &'a [T], shape: &[usize], strides: &[usize]) -> Result<Self> {
        Self::with_layout(data, Layout::strided("TensorRef::strided", "strides", shape, strides)?)
    }

    fn with_layout<T: Element>(data: &'a [T], layout: Layout) -> Result<Self> {
        Self::from_bytes(bytemuck::cast_slice(data), T::DTYPE, layout)
    }

    /// Borrows bytes that are aligned for `dtype`.
    pub(crate) fn from_bytes(bytes: &'a [u8], dtype: DType, layout: Layout) -> Result<Self> {
        check_extent("TensorRef", &layout, dtype, bytes.len())?;
        if bytes.as_ptr().align_offset(dtype.size()) != 0 {
            return Err(Error::layout("TensorRef", "data", "misaligned memory", format!("alignment for {dtype}")));
        }
        Ok(Self { memory: Memory::Host(bytes), dtype, layout })
    }

    /// Borrows memory of a device, for as long as the caller says that it lives.
    pub(super) fn from_span(span: Span, dtype: DType, layout: Layout) -> Result<Self> {
        check_span("TensorRef", &layout, dtype, span)?;
        Ok(Self { memory: Memory::Device(span), dtype, layout })
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Shape and strides.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Strides, in elements.
    pub fn strides(&self) -> &[usize] {
        self.layout.strides()
    }

    /// Where its memory lies.
    pub fn place(&self) -> Place {
        self.memory.place()
    }

    /// The memory from the first element on, if it is this process's; `op` and `arg` are for the message.
    pub fn host_bytes(self, op: &'static str, arg: &'static str) -> Result<&'a [u8]> {
        self.memory.host(op, arg)
    }

    /// The memory from the first element on, if it is a device's.
    pub(crate) fn span(&self) -> Option<Span> {
        match self.memory {
            Memory::Host(_) => None,
            Memory::Device(span) => Some(span),
        }
    }

    /// The entries `range` of `axis`.
    pub fn slice(self, axis: usize, range: Range<usize>) -> Result<Self> {
        check_range(&self.layout, axis, &range)?;
        let start = start_of(&self.layout, axis, range.start, self.dtype, self.memory.len());
        let layout = self.layout.narrow(axis, range.len());
        Ok(Self { memory: self.memory.from(start), layout, ..self })
    }

    /// Entry `index` of `axis`, which disappears.
    pub fn select(self, axis: usize, index: usize) -> Result<Self> {
        check_axis(&self.layout, axis)?;
        if index >= self.layout.shape()[axis] {
            return Err(Error::value(
                "TensorRef::select",
                "index",
                index,
                format!("less than {}", self.layout.shape()[axis]),
            ));
        }
        let t = self.slice(axis, index..index + 1)?;
        Ok(Self { layout: t.layout.without(axis), ..t })
    }

    /// Exchanges two axes.
    pub fn transpose(self, a: usize, b: usize) -> Result<Self> {
        check_axis(&self.layout, a)?;
        check_axis(&self.layout, b)?;
        Ok(Self { layout: self.layout.transpose(a, b), ..self })
    }

    /// With a new first axis of size 1.
    pub fn unsqueeze(self) -> Result<Self> {
        Ok(Self { layout: self.layout.with_unit("TensorRef::unsqueeze", false)?, ..self })
    }

    /// With a new last axis of size 1.
    pub fn with_unit_axis(self) -> Result<Self> {
        Ok(Self { layout: self.layout.with_unit("TensorRef::with_unit_axis", true)?, ..self })
    }

    /// The first axis, a multiple of `inner`, as two: `[n, …]` becomes `[n / inner, inner, …]`.
    pub fn split_axis(self, inner: usize) -> Result<Self> {
        const OP: &str = "TensorRef::split_axis";
        let (shape, strides) = (self.shape(), self.strides());
        if inner == 0 || shape.is_empty() || !shape[0].is_multiple_of(inner) {
            return Err(Error::value(OP, "inner", inner, format!("a divisor of the first axis of {shape:?}")));
        }
        let step = inner.saturating_mul(strides[0]);
        let new_shape = [&[shape[0] / inner, inner], &shape[1..]].concat();
        let new_strides = [&[step, strides[0]], &strides[1..]].concat();
        Ok(Self { layout: Layout::strided(OP, "self", &new_shape, &new_strides)?, ..self })
    }

    /// The same elements under another shape; only for contiguous tensors.
    pub fn reshape(self, shape: &[usize]) -> Result<Self> {
        let layout = Layout::contiguous("TensorRef::reshape", "shape", shape)?;
        if !self.layout.is_contiguous() || layout.len() != self.layout.len() {
            return Err(Error::layout(
                "TensorRef::reshape",
                "shape",
                format!("{shape:?}"),
                format!("a contiguous tensor of {} elements (it has strides {:?})", self.layout.len(), self.strides()),
            ));
        }
        Ok(Self { layout, ..self })
    }

    /// With the element type known; `op` and `arg` are for the message when it is another.
    pub fn typed<T: Element>(self, op: &'static str, arg: &'static str) -> Result<View<'a, T>> {
        if self.dtype != T::DTYPE {
            return Err(Error::DType { op, arg, got: self.dtype.name(), want: T::DTYPE.name().into() });
        }
        let (n, bytes) = (self.layout.extent() * self.dtype.size(), self.memory.host(op, arg)?);
        // No bytes at all may be aligned for nothing but bytes.
        let data = if n == 0 { &[] } else { bytemuck::cast_slice(&bytes[..n]) };
        Ok(View { data, layout: self.layout })
    }

    /// Every element in row-major order as f32; for float types other than fp4.
    pub fn to_f32_vec(self) -> Result<Vec<f32>> {
        fn all<T: Float>(t: TensorRef<'_>) -> Result<Vec<f32>> {
            let v = t.typed::<T>("TensorRef::to_f32_vec", "self")?;
            Ok(v.layout.offsets().map(|i| v.data[i].to_f32()).collect())
        }
        match self.dtype {
            DType::F16 => all::<super::f16>(self),
            DType::BF16 => all::<super::bf16>(self),
            DType::E4M3 => all::<super::E4m3>(self),
            DType::E5M2 => all::<super::E5m2>(self),
            _ => all::<f32>(self),
        }
    }
}

impl<'a> TensorMut<'a> {
    /// Borrows a slice as a contiguous tensor.
    pub fn new<T: Element>(data: &'a mut [T], shape: &[usize]) -> Result<Self> {
        let layout = Layout::contiguous("TensorMut::new", "shape", shape)?;
        Self::from_bytes(bytemuck::cast_slice_mut(data), T::DTYPE, layout)
    }

    /// Borrows a slice under any strides that reach no element twice.
    pub fn strided<T: Element>(data: &'a mut [T], shape: &[usize], strides: &[usize]) -> Result<Self> {
        let layout = Layout::strided("TensorMut::strided", "strides", shape, strides)?;
        Self::from_bytes(bytemuck::cast_slice_mut(data), T::DTYPE, layout)
    }

    /// Borrows bytes that are aligned for `dtype`.
    pub(crate) fn from_bytes(bytes: &'a mut [u8], dtype: DType, layout: Layout) -> Result<Self> {
        check_extent("TensorMut", &layout, dtype, bytes.len())?;
        if bytes.as_ptr().align_offset(dtype.size()) != 0 {
            return Err(Error::layout("TensorMut", "data", "misaligned memory", format!("alignment for {dtype}")));
        }
        check_alias(&layout)?;
        Ok(Self { memory: MemoryMut::Host(bytes), dtype, layout })
    }

    /// Borrows memory of a device, for as long as the caller says that it lives and nobody else uses it.
    pub(super) fn from_span(span: Span, dtype: DType, layout: Layout) -> Result<Self> {
        check_span("TensorMut", &layout, dtype, span)?;
        check_alias(&layout)?;
        Ok(Self { memory: MemoryMut::Device(span), dtype, layout })
    }

    /// Where its memory lies.
    pub fn place(&self) -> Place {
        self.memory.as_ref().place()
    }

    /// The memory from the first element on, if it is this process's; `op` and `arg` are for the message.
    pub fn into_host_bytes(self, op: &'static str, arg: &'static str) -> Result<&'a mut [u8]> {
        self.memory.host(op, arg)
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Shape and strides.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Strides, in elements.
    pub fn strides(&self) -> &[usize] {
        self.layout.strides()
    }

    /// Borrows it for reading.
    pub fn as_ref(&self) -> TensorRef<'_> {
        TensorRef { memory: self.memory.as_ref(), dtype: self.dtype, layout: self.layout }
    }

    /// Borrows it again, for a shorter time.
    pub fn reborrow(&mut self) -> TensorMut<'_> {
        TensorMut { memory: self.memory.reborrow(), dtype: self.dtype, layout: self.layout }
    }

    /// The entries `range` of `axis`.
    pub fn slice(self, axis: usize, range: Range<usize>) -> Result<Self> {
        check_range(&self.layout, axis, &range)?;
        let start = start_of(&self.layout, axis, range.start, self.dtype, self.memory.len());
        let layout = self.layout.narrow(axis, range.len());
        Ok(Self { memory: self.memory.from(start), layout, dtype: self.dtype })
    }

    /// Consecutive stretches of the first axis, of these numbers of entries. Entries must lie one behind another: what
    /// is between two of them belongs to neither of two stretches.
    pub fn split_rows(self, lens: impl IntoIterator<Item = usize>) -> Result<Vec<Self>> {
        const OP: &str = "TensorMut::split_rows";
        check_axis(&self.layout, 0)?;
        let (rows, stride) = (self.layout.shape()[0], self.layout.strides()[0]);
        if rows > 1 && stride < self.layout.without(0).extent() {
            let got = format!("{:?} for shape {:?}", self.layout.strides(), self.layout.shape());
            return Err(Error::layout(OP, "self", got, "entries of the first axis that do not interleave"));
        }
        let (mut rest, mut left, mut parts) = (self.memory, rows, Vec::new());
        for len in lens {
            if len > left {
                return Err(Error::value(OP, "lens", format!("{len} after {}", rows - left), format!("{rows} in all")));
            }
            left -= len;
            // The last entry may end before its stride does, or behind it: that of a single entry says nothing.
            let bytes = match left {
                0 if len > 0 => rest.len(),
                _ => len.saturating_mul(stride).saturating_mul(self.dtype.size()).min(rest.len()),
            };
            let (mine, others) = rest.split_at(bytes);
            rest = others;
            parts.push(Self { memory: mine, dtype: self.dtype, layout: self.layout.narrow(0, len) });
        }
        Ok(parts)
    }

    /// Entry `index` of `axis`, which disappears.
    pub fn select(self, axis: usize, index: usize) -> Result<Self> {
        check_axis(&self.layout, axis)?;
        let t = self.slice(axis, index..index.saturating_add(1))?;
        Ok(Self { layout: t.layout.without(axis), ..t })
    }

    /// Exchanges two axes.
    pub fn transpose(self, a: usize, b: usize) -> Result<Self> {
        check_axis(&self.layout, a)?;
        check_axis(&self.layout, b)?;
        Ok(Self { layout: self.layout.transpose(a, b), ..self })
    }

    /// With a new first axis of size 1.
    pub fn unsqueeze(self) -> Result<Self> {
        Ok(Self { layout: self.layout.with_unit("TensorMut::unsqueeze", false)?, ..self })
    }

    /// With a new last axis of size 1.
    pub fn with_unit_axis(self) -> Result<Self> {
        Ok(Self { layout: self.layout.with_unit("TensorMut::with_unit_axis", true)?, ..self })
    }

    /// With the element type known; `op` and `arg` are for the message when it is another.
    pub fn typed<T: Element>(self, op: &'static str, arg: &'static str) -> Result<ViewMut<'a, T>> {
        if self.dtype != T::DTYPE {
            return Err(Error::DType { op, arg, got: self.dtype.name(), want: T::DTYPE.name().into() });
        }
        let (n, bytes) = (self.layout.extent() * self.dtype.size(), self.memory.host(op, arg)?);
        let data = if n == 0 { &mut [] } else { bytemuck::cast_slice_mut(&mut bytes[..n]) };
        Ok(ViewMut { data, layout: self.layout })
    }
}

impl<'a, T: Element> View<'a, T> {
    /// The memory from the first element to the last.
    pub fn data(&self) -> &'a [T] {
        self.data
    }

    /// Shape and strides.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Sizes of the axes.
    pub fn shape(&self) -> &[usize] {
        self.layout.shape()
    }

    /// Strides, in elements.
    pub fn strides(&self) -> &[usize] {
        self.layout.strides()
    }
}

impl<'a, T: Element> ViewMut<'a, T> {
    /// The memory from the first element to the last.
    pub fn data(&mut self) -> &mut [T] {
        self.data
    }

    /// The memory and its layout.
    pub fn into_parts(self) -> (&'a mut [T], Layout) {
        (self.data, self.layout)
    }

    /// Shape and strides.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Sizes of the axes.
    pub fn shape(&self) -> &[usize] {
        self.layout.shape()
    }

    /// Strides, in elements.
    pub fn strides(&self) -> &[usize] {
        self.layout.strides()
    }
}

macro_rules! shaped {
    ($($t:ty),*) => {$(
        impl Shaped for $t {
            fn shape(&self) -> &[usize] {
                self.layout.shape()
            }
        }
        impl std::fmt::Debug for $t {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                write!(f, concat!(stringify!($t), " {} {:?} strides {:?}"), self.dtype, self.layout.shape(), self.layout.strides())
            }
        }
        impl $t {
            /// Sizes of the axes.
            pub fn shape(&self) -> &[usize] {
                self.layout.shape()
            }
        }
    )*};
}
shaped!(Tensor, TensorRef<'_>, TensorMut<'_>);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_and_selects_reach_the_right_elements() {
        let data: Vec<f32> = (0..24u8).map(f32::from).collect();
        let t = TensorRef::new(&data, &[2, 3, 4]).unwrap();
        let s = t.slice(1, 1..3).unwrap().select(0, 1).unwrap();
        assert_eq!(s.to_f32_vec().unwrap(), [16., 17., 18., 19., 20., 21., 22., 23.]);
        let x = t.transpose(0, 2).unwrap();
        assert_eq!(x.shape(), [4, 3, 2]);
        assert_eq!(x.to_f32_vec().unwrap()[..4], [0., 12., 4., 16.]);
        assert!(x.reshape(&[24]).is_err());
        assert!(t.slice(1, 2..4).is_err());
        assert!(t.select(0, 2).is_err());
        assert_eq!(t.slice(0, 2..2).unwrap().to_f32_vec().unwrap(), []);
        // Nothing, from past the end of the memory, and from an offset that overflows.
        let t = TensorRef::strided(&data, &[2, 3], &[21, 1]).unwrap();
        assert_eq!(t.slice(0, 2..2).unwrap().to_f32_vec().unwrap(), []);
        let t = TensorRef::strided(&data, &[1, 2], &[usize::MAX, 1]).unwrap();
        assert_eq!(t.slice(0, 1..1).unwrap().to_f32_vec().unwrap(), []);
    }

    #[test]
    fn empty_slices_may_start_anywhere() {
        let data = [0f32; 5];
        let t = TensorRef::strided(&data, &[2, 1], &[4, 9]).unwrap();
        assert_eq!(t.slice(0, 2..2).unwrap().to_f32_vec().unwrap(), []);
        let t = TensorRef::strided(&data, &[0, 3], &[1, usize::MAX]).unwrap();
        assert_eq!(t.slice(1, 2..3).unwrap().to_f32_vec().unwrap(), []);
    }

    #[test]
    fn memory_too_short_or_aliased_is_refused() {
        let mut data = [0f32; 8];
        assert!(TensorRef::new(&data, &[3, 3]).is_err());
        assert!(TensorRef::strided(&data, &[2, 4], &[5, 1]).is_err());
        assert!(TensorRef::strided(&data, &[100, 4], &[0, 1]).is_ok());
        assert!(TensorMut::strided(&mut data, &[100, 4], &[0, 1]).is_err());
        assert!(TensorMut::new(&mut data, &[2, 4]).is_ok());
    }

    #[test]
    fn split_rows_are_consecutive_and_apart() {
        let mut data: Vec<f32> = (0..22u8).map(f32::from).collect();
        let t = TensorMut::strided(&mut data, &[5, 2], &[5, 1]).unwrap();
        let parts = t.split_rows([2, 0, 3]).unwrap();
        let values: Vec<_> = parts.iter().map(|p| p.as_ref().to_f32_vec().unwrap()).collect();
        assert_eq!(values, [&[0., 1., 5., 6.][..], &[], &[10., 11., 15., 16., 20., 21.]]);
        let t = TensorMut::strided(&mut data, &[5, 2], &[5, 1]).unwrap();
        assert!(t.split_rows([2, 4]).is_err());
        // Columns of a matrix interleave, unless there is one only.
        assert!(TensorMut::strided(&mut data, &[2, 5], &[1, 2]).unwrap().split_rows([1, 1]).is_err());
        assert!(TensorMut::strided(&mut data, &[1, 5], &[1, 2]).unwrap().split_rows([0, 1]).is_ok());
        assert!(TensorMut::new::<f32>(&mut [], &[3, 0]).unwrap().split_rows([1, 2]).is_ok());
        // The stride of a single entry is never used: it may overflow, or be none.
        for stride in [usize::MAX, 0] {
            let one = TensorMut::strided(&mut data, &[1, 2], &[stride, 1]).unwrap().split_rows([1]).unwrap();
            assert_eq!(one[0].as_ref().to_f32_vec().unwrap(), [0., 1.]);
        }
    }

    #[test]
    fn owned_memory_is_aligned_to_a_cache_line() {
        let t = Tensor::from_f32(DType::BF16, &[1.0, -2.5, 3.0], &[3]).unwrap();
        assert_eq!(t.view().host_bytes("", "").unwrap().as_ptr() as usize % 64, 0);
        assert_eq!(t.view().to_f32_vec().unwrap(), [1.0, -2.5, 3.0]);
        assert!(t.as_slice::<f32>().is_err());
    }
}
