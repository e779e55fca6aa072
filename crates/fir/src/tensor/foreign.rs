//! Memory of others: DLPack tensors in and out, and mapped files.
//!
//! [`Foreign`] owns a tensor that another library made, lends it as [`TensorRef`] or [`TensorMut`], and gives it back
//! when dropped, unless it was lent itself. [`Dlpack`] is the way out: a [`Tensor`] wrapped for another library.
//!
//! Everything a descriptor says is checked before the memory is touched; what cannot be checked, that the memory is
//! there and nobody else writes it, is the caller's promise.
#![allow(unsafe_code)]

use std::ptr::{self, NonNull};

use super::dlpack::{
    DEVICE_CPU, DEVICE_CUDA, DLPACK_MAJOR, DLPACK_MINOR, DlDevice, DlManagedTensor, DlManagedTensorVersioned, DlTensor,
    DlVersion, FLAG_READ_ONLY, FLAG_SUBBYTE_PADDED,
};
use super::place::Span;
use super::{DType, Layout, MAX_RANK, Place, Tensor, TensorMut, TensorRef};
use crate::error::{Error, Result};

const OP: &str = "Foreign::from_dlpack";

mod sealed {
    /// What the two managed structs have in common.
    pub trait Sealed {
        /// Calls the deleter, if there is one.
        ///
        /// # Safety
        /// `this` is a managed tensor that its producer made and nobody freed; it is not used again.
        unsafe fn delete(this: *mut Self);
        /// Wraps `tensor`; `ctx` is the pointer that `free` gets back.
        fn wrap(tensor: super::DlTensor, ctx: *mut std::ffi::c_void) -> Self;
    }
}

/// One of the two managed structs of DLPack: [`DlManagedTensorVersioned`] and [`DlManagedTensor`].
pub trait Managed: sealed::Sealed + Sized {}
impl Managed for DlManagedTensor {}
impl Managed for DlManagedTensorVersioned {}

impl sealed::Sealed for DlManagedTensor {
    unsafe fn delete(this: *mut Self) {
        // SAFETY: the caller says that it is a live managed tensor.
        if let Some(deleter) = unsafe { (*this).deleter } {
            // SAFETY: the producer made this function for this struct, and the caller calls it once.
            unsafe { deleter(this) };
        }
    }
    fn wrap(dl_tensor: DlTensor, manager_ctx: *mut std::ffi::c_void) -> Self {
        unsafe extern "C" fn free(this: *mut DlManagedTensor) {
            // SAFETY: `this` is what `wrap` made, so its context is the box of `Dlpack::new`; the consumer calls the
            // deleter once.
            drop(unsafe { Box::from_raw((*this).manager_ctx.cast::<Export<DlManagedTensor>>()) });
        }
        Self { dl_tensor, manager_ctx, deleter: Some(free) }
    }
}

impl sealed::Sealed for DlManagedTensorVersioned {
    unsafe fn delete(this: *mut Self) {
        // SAFETY: the caller says that it is a live managed tensor; `deleter` has its place in every major version.
        if let Some(deleter) = unsafe { (*this).deleter } {
            // SAFETY: the producer made this function for this struct, and the caller calls it once.
            unsafe { deleter(this) };
        }
    }
    fn wrap(dl_tensor: DlTensor, manager_ctx: *mut std::ffi::c_void) -> Self {
        unsafe extern "C" fn free(this: *mut DlManagedTensorVersioned) {
            // SAFETY: as in `DlManagedTensor::wrap`.
            drop(unsafe { Box::from_raw((*this).manager_ctx.cast::<Export<DlManagedTensorVersioned>>()) });
        }
        let version = DlVersion { major: DLPACK_MAJOR, minor: DLPACK_MINOR };
        Self { version, manager_ctx, deleter: Some(free), flags: 0, dl_tensor }
    }
}

/// What an exported tensor keeps alive, in one box: the managed struct points into it, and its deleter drops it.
struct Export<M> {
    managed: Option<M>,
    shape: [i64; MAX_RANK],
    strides: [i64; MAX_RANK],
    tensor: Tensor,
}

/// An owned managed tensor, to be passed to another library. Dropped, it calls the deleter; [`Self::into_raw`] passes
/// that duty on.
#[derive(Debug)]
pub struct Dlpack<M: Managed = DlManagedTensorVersioned>(NonNull<M>);

// SAFETY: one made by `new` owns a `Tensor`, which is `Send`, and pointers into its own box; for one that came from
// another library, the caller of `Foreign::from_dlpack…` promised that the deleter may be called from any thread.
unsafe impl<M: Managed> Send for Dlpack<M> {}

impl<M: Managed> Dlpack<M> {
    fn new(tensor: Tensor) -> Self {
        // Only a tensor without elements has sizes beyond i64.
        let signed = |x: usize| i64::try_from(x).unwrap_or(i64::MAX);
        let (mut shape, mut strides) = ([0; MAX_RANK], [0; MAX_RANK]);
        let ndim = tensor.shape().len();
        for (o, &d) in shape.iter_mut().zip(tensor.shape()) {
            *o = signed(d);
        }
        for (o, &s) in strides.iter_mut().zip(tensor.view().strides()) {
            *o = signed(s);
        }
        let export = Box::into_raw(Box::new(Export { managed: None::<M>, shape, strides, tensor }));
        // SAFETY: `export` is the box made above, and this is the only reference into it.
        let Export { managed, shape, strides, tensor } = unsafe { &mut *export };
        let (mut view, mut data) = (tensor.view_mut(), ptr::null_mut());
        let (device_type, device_id) = match view.place() {
            Place::Host => (DEVICE_CPU, 0),
            Place::Cuda(ordinal) => (DEVICE_CUDA, ordinal as i32),
        };
        if let Some(span) = view.as_ref().span() {
            data = ptr::without_provenance_mut(span.address as usize);
        } else if let Ok(bytes @ [_, ..]) = view.reborrow().into_host_bytes(OP, "self") {
            data = bytes.as_mut_ptr().cast();
        }
        let dl_tensor = DlTensor {
            data,
            device: DlDevice { device_type, device_id },
            ndim: ndim as i32,
            dtype: tensor.dtype().into(),
            shape: shape.as_mut_ptr(),
            strides: strides.as_mut_ptr(),
            byte_offset: 0,
        };
        Self(NonNull::from(managed.insert(M::wrap(dl_tensor, export.cast()))))
    }

    /// The managed tensor; whoever holds the pointer must call its deleter, once.
    pub fn into_raw(self) -> *mut M {
        let raw = self.0.as_ptr();
        std::mem::forget(self);
        raw
    }
}

impl<M: Managed> Drop for Dlpack<M> {
    fn drop(&mut self) {
        // SAFETY: `new` made it or the caller of `Foreign::from_dlpack…` gave it away, so it is live and nobody else
        // frees it; `into_raw`, the only way out, forgets `self`.
        unsafe { M::delete(self.0.as_ptr()) };
    }
}

impl Tensor {
    /// Wraps the tensor for a library that speaks DLPack 1.x.
    pub fn into_dlpack(self) -> Dlpack {
        Dlpack::new(self)
    }

    /// Wraps the tensor for a library that speaks DLPack before 1.0.
    pub fn into_dlpack_unversioned(self) -> Dlpack<DlManagedTensor> {
        Dlpack::new(self)
    }
}

/// Bytes that live elsewhere: a mapped file, say.
pub type BytesOwner = Box<dyn AsRef<[u8]> + Send + Sync>;

/// A tensor in memory of others, given back on drop unless it was lent.
#[derive(Debug)]
pub struct Foreign {
    owner: Owner,
    dtype: DType,
    layout: Layout,
}

enum Owner {
    /// The checked descriptor and what frees it. `start` is the first element, dangling when there is none.
    Dlpack {
        start: NonNull<u8>,
        place: Place,
        read_only: bool,
        _managed: Guard,
    },
    Bytes(BytesOwner),
}

impl std::fmt::Debug for Owner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Dlpack { read_only: false, .. } => "Dlpack",
            Self::Dlpack { read_only: true, .. } => "Dlpack, read-only",
            Self::Bytes(_) => "Bytes",
        })
    }
}

/// Calls the deleter on drop.
enum Guard {
    Versioned(#[expect(dead_code, reason = "held for its drop")] Dlpack),
    Unversioned(#[expect(dead_code, reason = "held for its drop")] Dlpack<DlManagedTensor>),
    /// Lent, so nothing is to be given back.
    Nothing,
}

// SAFETY: the caller of `from_dlpack…` promised that the memory may be read and the deleter called from any thread;
// a `BytesOwner` is `Send` and `Sync` by its type.
unsafe impl Send for Foreign {}
// SAFETY: as above; through `&Foreign` memory is only read.
unsafe impl Sync for Foreign {}

impl Foreign {
    /// Takes over a tensor of DLPack 1.x. Its deleter is called when the value is dropped, and before an error is
    /// returned.
    ///
    /// Refused are null pointers, other major versions, devices other than the CPU and CUDA's, element types that this crate
    /// has not, more than [`MAX_RANK`] axes, negative sizes and strides, misaligned memory, and sizes that overflow.
    ///
    /// # Safety
    /// Unless null, `managed` is a managed tensor that its producer made by the DLPack rules, with `shape` and
    /// `strides` of `ndim` entries, and the caller gives it away: nobody else calls its deleter. Until the deleter
    /// is called, every element its shape and strides reach from `data + byte_offset` is initialised and readable
    /// (writable too, unless flagged read-only); nobody writes it while a view of the value is in use, nor reads it
    /// while a mutable view is. The deleter may be called from any thread. Memory of a device counts as touched until the
    /// stream that touches it was waited for, by the host or by the stream of the executor that takes it next.
    pub unsafe fn from_dlpack(managed: *mut DlManagedTensorVersioned) -> Result<Self> {
        let p = NonNull::new(managed)
            .ok_or_else(|| Error::value(OP, "managed", "null", "a pointer to a managed tensor"))?;
        // From here on a refusal frees the tensor.
        let guard = Guard::Versioned(Dlpack(p));
        // SAFETY: the caller says that it is a live managed tensor; `version` has its place in every major version.
        let version = unsafe { (&raw const (*p.as_ptr()).version).read() };
        if version.major != DLPACK_MAJOR {
            return Err(Error::value(
                OP,
                "version",
                format!("{}.{}", version.major, version.minor),
                format!("{DLPACK_MAJOR}.x"),
            ));
        }
        // SAFETY: as above, and the major version says that the whole struct is laid out as ours.
        let (tensor, flags) = unsafe { ((*p.as_ptr()).dl_tensor, (*p.as_ptr()).flags) };
        // SAFETY: the caller's contract, passed on.
        unsafe { Self::check(tensor, flags, guard) }
    }

    /// As [`Self::from_dlpack`], for a tensor of DLPack before 1.0, which has no flags and is taken as writable.
    ///
    /// # Safety
    /// As [`Self::from_dlpack`].
    pub unsafe fn from_dlpack_unversioned(managed: *mut DlManagedTensor) -> Result<Self> {
        let p = NonNull::new(managed)
            .ok_or_else(|| Error::value(OP, "managed", "null", "a pointer to a managed tensor"))?;
        let guard = Guard::Unversioned(Dlpack(p));
        // SAFETY: the caller says that it is a live managed tensor.
        let tensor = unsafe { (*p.as_ptr()).dl_tensor };
        // SAFETY: the caller's contract, passed on.
        unsafe { Self::check(tensor, 0, guard) }
    }

    /// A tensor that is lent for a while: nobody is told when the value is dropped. Refused is what [`Self::from_dlpack`] refuses.
    ///
    /// # Safety
    /// As [`Self::from_dlpack`], of memory that lives as long as the value; `shape` and `strides` are read in the call alone.
    pub unsafe fn lent(tensor: DlTensor, read_only: bool) -> Result<Self> {
        // SAFETY: the caller's contract, passed on.
        unsafe { Self::check(tensor, if read_only { FLAG_READ_ONLY } else { 0 }, Guard::Nothing) }
    }

    /// # Safety
    /// `tensor` keeps the contract of [`Self::from_dlpack`], and `guard` frees it.
    unsafe fn check(tensor: DlTensor, flags: u64, guard: Guard) -> Result<Self> {
        let DlTensor { data, device, ndim, dtype, shape, strides, byte_offset } = tensor;
        let place = match (device.device_type, u32::try_from(device.device_id)) {
            (DEVICE_CPU, _) => Place::Host,
            (DEVICE_CUDA, Ok(ordinal)) => Place::Cuda(ordinal),
            _ => {
                return Err(Error::value(
                    OP,
                    "device",
                    format!("type {}, id {}", device.device_type, device.device_id),
                    format!("type {DEVICE_CPU} (CPU) or {DEVICE_CUDA} (CUDA)"),
                ));
            }
        };
        let dtype = dtype.to_dtype(OP)?;
        if dtype == DType::E2M1x2 && flags & FLAG_SUBBYTE_PADDED != 0 {
            return Err(Error::value(OP, "flags", "padded elements of 4 bits", "two to a byte"));
        }
        let rank = usize::try_from(ndim)
            .ok()
            .filter(|&n| n <= MAX_RANK)
            .ok_or_else(|| Error::value(OP, "ndim", ndim, format!("0 to {MAX_RANK}")))?;
        if rank > 0 && shape.is_null() {
            return Err(Error::value(OP, "shape", "null", format!("a pointer to {rank} sizes")));
        }
        let mut sizes = [0usize; MAX_RANK];
        for (axis, size) in sizes[..rank].iter_mut().enumerate() {
            // SAFETY: `shape` is not null as `axis < rank`, and the caller says that it has `ndim` entries. They are
            // read unaligned: packed descriptors exist.
            let got = unsafe { shape.add(axis).read_unaligned() };
            *size = usize::try_from(got)
                .map_err(|_| Error::value(OP, "shape", format!("{got} at axis {axis}"), "a size, 0 or more"))?;
        }
        let sizes = &sizes[..rank];
        let layout = if strides.is_null() || sizes.contains(&0) {
            // Strides of a tensor without elements mean nothing.
            Layout::contiguous(OP, "shape", sizes)?
        } else {
            let mut steps = [0usize; MAX_RANK];
            for (axis, step) in steps[..rank].iter_mut().enumerate() {
                // SAFETY: `strides` is not null, and the caller says that it has `ndim` entries.
                let got = unsafe { strides.add(axis).read_unaligned() };
                // The stride of an axis of one entry is never used and may be anything.
                if sizes[axis] > 1 {
                    *step = usize::try_from(got).map_err(|_| {
                        Error::value(OP, "strides", format!("{got} at axis {axis}"), "a stride, 0 or more")
                    })?;
                }
            }
            Layout::strided(OP, "strides", sizes, &steps[..rank])?
        };
        // A layout's extent times 8 fits usize, so this product does.
        let bytes = layout.extent() * dtype.size();
        let start = if bytes == 0 {
            NonNull::dangling()
        } else {
            let data = NonNull::new(data.cast::<u8>())
                .ok_or_else(|| Error::value(OP, "data", "null", format!("memory for shape {sizes:?}")))?;
            let offset = usize::try_from(byte_offset)
                .ok()
                .filter(|&o| {
                    let room = (isize::MAX as usize).min(usize::MAX - data.addr().get());
                    bytes <= room && o <= room - bytes
                })
                .ok_or_else(|| {
                    Error::layout(
                        OP,
                        "byte_offset",
                        format!("{byte_offset} before {bytes} bytes"),
                        "an end inside the address space",
                    )
                })?;
            // Not `add`: a device's addresses are in no allocation of this process. The sum does not wrap, as seen above.
            let start = NonNull::new(data.as_ptr().wrapping_add(offset)).unwrap_or(data);
            if !start.addr().get().is_multiple_of(dtype.size()) {
                return Err(Error::layout(
                    OP,
                    "data",
                    format!("address {:#x}", start.addr()),
                    format!("alignment for {dtype}"),
                ));
            }
            start
        };
        let owner = Owner::Dlpack { start, place, read_only: flags & FLAG_READ_ONLY != 0, _managed: guard };
        Ok(Self { owner, dtype, layout })
    }

    /// A contiguous tensor at the head of bytes that `owner` keeps: a mapped file, say. Read-only.
    pub fn from_owner(owner: BytesOwner, dtype: DType, shape: &[usize]) -> Result<Self> {
        let layout = Layout::contiguous("Foreign::from_owner", "shape", shape)?;
        let foreign = Self { owner: Owner::Bytes(owner), dtype, layout };
        foreign.view()?;
        Ok(foreign)
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Shape and strides.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Whether [`Self::view_mut`] is refused.
    pub fn is_read_only(&self) -> bool {
        match self.owner {
            Owner::Dlpack { read_only, .. } => read_only,
            Owner::Bytes(_) => true,
        }
    }

    /// Where its memory is.
    pub fn place(&self) -> Place {
        match self.owner {
            Owner::Dlpack { place, .. } => place,
            Owner::Bytes(_) => Place::Host,
        }
    }

    /// Its memory, when that is a device's. The borrow of `self` keeps it alive, and the caller of `from_dlpack…`
    /// promised that nobody else writes it.
    fn span(&self) -> Option<Span> {
        match self.owner {
            Owner::Dlpack { start, place: Place::Cuda(ordinal), .. } => {
                let len = self.layout.extent() * self.dtype.size();
                Some(Span { address: start.addr().get() as u64, len, ordinal })
            }
            _ => None,
        }
    }

    /// Borrows it. Fails only if a [`BytesOwner`] now shows fewer bytes than when the value was made.
    ///
    /// What the caller of `from_dlpack…` or `lent` promised holds for the borrow: the bytes, which `check` saw not to wrap, are
    /// initialised and readable while `self` lives, and others do not write them; nor does `self`, as `view_mut` needs `&mut self`.
    pub fn view(&self) -> Result<TensorRef<'_>> {
        if let Some(span) = self.span() {
            return TensorRef::from_span(span, self.dtype, self.layout);
        }
        let bytes = match &self.owner {
            // A null or unaligned pointer to nothing is as good as any.
            _ if self.layout.is_empty() => bytemuck::cast_slice::<u64, u8>(&[]),
            // SAFETY: bytes that are initialised, readable and not written, as said above.
            Owner::Dlpack { start, .. } => unsafe {
                std::slice::from_raw_parts(start.as_ptr(), self.layout.extent() * self.dtype.size())
            },
            Owner::Bytes(owner) => (**owner).as_ref(),
        };
        TensorRef::from_bytes(bytes, self.dtype, self.layout)
    }

    /// Borrows it for writing; refused when the memory is read-only or an element is reached twice.
    pub fn view_mut(&mut self) -> Result<TensorMut<'_>> {
        if let (Some(span), false) = (self.span(), self.is_read_only()) {
            return TensorMut::from_span(span, self.dtype, self.layout);
        }
        match self.owner {
            Owner::Dlpack { read_only: false, .. } if self.layout.is_empty() => {
                TensorMut::from_bytes(bytemuck::cast_slice_mut::<u64, u8>(&mut []), self.dtype, self.layout)
            }
            Owner::Dlpack { start, read_only: false, .. } => {
                let len = self.layout.extent() * self.dtype.size();
                // SAFETY: as in `view`; memory that is not read-only may be written, said the caller, and is not touched by others
                // while this borrow lives. `&mut self` keeps other views of `self` away.
                let bytes = unsafe { std::slice::from_raw_parts_mut(start.as_ptr(), len) };
                TensorMut::from_bytes(bytes, self.dtype, self.layout)
            }
            _ => Err(Error::value("Foreign::view_mut", "self", "read-only memory", "memory that may be written")),
        }
    }
}

#[cfg(test)]
mod tests;
