//! Tensors as rows, for kernels that go row by row: the last axis, of stride 1.

use super::params::Address;
use crate::error::{Error, Result};
use crate::tensor::{DType, Layout};

/// Rows of a tensor `[row]`, `[b, row]` or `[a, b, row]`; row `r` begins at `r / inner * outer + r % inner * stride`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rows {
    pub(super) rows: usize,
    pub(super) row: usize,
    inner: usize,
    outer: usize,
    stride: usize,
    size: usize,
}

impl Rows {
    /// Refuses rows that are not contiguous, rows of more than 2^31 elements, and more than 2^32 - 1 of them: kernels count
    /// both in 32 bits.
    pub(super) fn new(op: &'static str, arg: &'static str, layout: &Layout, dtype: DType) -> Result<Self> {
        let (shape, strides) = (layout.shape(), layout.strides());
        let ([a, inner, row], [outer, stride, step]) = match (shape, strides) {
            (&[c], &[u]) => ([1, 1, c], [0, 0, u]),
            (&[b, c], &[t, u]) => ([1, b, c], [0, t, u]),
            (&[a, b, c], &[s, t, u]) => ([a, b, c], [s, t, u]),
            _ => return Err(Error::Rank { op, arg, got: shape.len(), want: 3, axes: "at most".into() }),
        };
        if step != 1 && row > 1 {
            return Err(Error::layout(op, arg, format!("stride {step} of the last axis"), "1"));
        }
        if row > 1 << 31 {
            return Err(Error::value(op, arg, format!("{row} elements in a row"), "at most 2^31 on CUDA"));
        }
        let rows = a * inner;
        if row > 0 && rows > u32::MAX as usize {
            return Err(Error::value(op, arg, format!("{rows} rows"), "at most 2^32 - 1 on CUDA"));
        }
        Ok(Self { rows, row, inner, outer, stride, size: dtype.size() })
    }

    /// Whether there is nothing to do.
    pub(super) fn is_empty(&self) -> bool {
        self.rows == 0 || self.row == 0
    }

    /// Whether all rows are evenly apart.
    fn is_even(&self) -> bool {
        self.rows <= self.inner || self.inner == 1 || self.outer == self.inner.saturating_mul(self.stride)
    }

    /// Strides of the two axes, for a kernel whose other tensors have `all_even` rows.
    pub(super) fn strides(&self, all_even: bool) -> [u64; 2] {
        let stride = if all_even && self.inner == 1 { self.outer } else { self.stride };
        [self.outer as u64, stride as u64]
    }

    /// Whether the `len` elements of each row from its element `at` on, whose first lies at `start`, may be read `chunk` at
    /// a time.
    pub(super) fn is_vector(&self, start: Address, at: usize, len: usize, chunk: usize) -> bool {
        let bytes = chunk * self.size;
        let fits = |elements: usize| (elements * self.size).is_multiple_of(bytes);
        // The stride of an axis of one entry is never used.
        let outer = self.rows <= self.inner || fits(self.outer);
        let stride = self.inner <= 1 || fits(self.stride);
        start.0.is_multiple_of(bytes as u64) && fits(at) && fits(len) && outer && stride
    }
}

/// The size of the second axis for a kernel's parameters: none when every tensor's rows are evenly apart, so that no
/// division is made.
pub(super) fn common_inner(all: &[&Rows]) -> (bool, u32) {
    let even = all.iter().all(|r| r.is_even());
    (even, if even { u32::MAX } else { all[0].inner as u32 })
}
