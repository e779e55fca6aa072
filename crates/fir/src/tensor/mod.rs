//! Tensors: an element type, a shape with strides, and memory that is owned, borrowed or foreign.
//!
//! | type | memory | like |
//! |---|---|---|
//! | [`Tensor`] | owned, 64-byte aligned | `Vec<T>` |
//! | [`TensorRef`] | borrowed | `&[T]` |
//! | [`TensorMut`] | borrowed, exclusive, no element reached twice | `&mut [T]` |
//! | [`Foreign`] | another library's, by DLPack, or a mapped file's | `Box<[T]>` |
//! | [`View`], [`ViewMut`] | as the two above, element type known | typed slices |
//!
//! [`Block`] says which elements of a matrix share a scale; [`Scaled`] is a matrix with its scales.
//!
//! Memory is this process's or a device's: [`Place`] says which, and an operator whose executor is elsewhere refuses it.
//!
//! An index is checked once, where a view is made: a layout that reaches past its memory is refused.

mod block;
mod blocks;
mod dims;
pub mod dlpack;
mod dtype;
mod foreign;
mod large_pages;
mod layout;
mod place;
mod view;

pub(crate) use self::blocks::{BlockFields, Steps};
#[cfg(feature = "cuda")]
pub(crate) use self::place::{DeviceMemory, Span};
pub use self::{
    block::{Block, Scaled},
    blocks::{BlockFormat, IQ4_VALUES},
    dims::Dims,
    dtype::{Bool, DType, E2M1_VALUES, E2m1x2, E4m3, E5m2, E8m0, Element, Float, bf16, f16},
    foreign::{BytesOwner, Dlpack, Foreign, Managed},
    layout::{Layout, MAX_RANK},
    place::Place,
    view::{Shaped, Tensor, TensorMut, TensorRef, View, ViewMut},
};
