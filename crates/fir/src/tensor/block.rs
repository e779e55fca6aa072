//! [`Block`]: which elements of a matrix share a scale; [`Scaled`]: a matrix with its scales.

use super::TensorRef;
use crate::error::Result;

/// The part of a matrix that one scale stands for. A matrix of `[rows, k]` has scales of
/// `[⌈rows / block.rows⌉, ⌈k / block.columns⌉]`; the last block of a row or a column may be smaller.
///
/// ```
/// # use fir::tensor::Block;
/// assert_eq!(Block::GROUP.counts(3, 300), [3, 3]);
/// assert_eq!(Block::TENSOR.counts(3, 300), [1, 1]);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Block {
    /// Rows of a block; [`Self::ALL`] for all there are.
    pub rows: usize,
    /// Columns of a block; [`Self::ALL`] for all there are.
    pub columns: usize,
}

impl Block {
    /// As many rows or columns as there are, none included: always one block.
    pub const ALL: usize = usize::MAX;
    /// One scale for the whole matrix.
    pub const TENSOR: Self = Self { rows: Self::ALL, columns: Self::ALL };
    /// One scale per row: per token of activations, per output channel of weights.
    pub const ROW: Self = Self { rows: 1, columns: Self::ALL };
    /// One scale per 128 elements of a row, as DeepSeek scales activations.
    pub const GROUP: Self = Self { rows: 1, columns: 128 };
    /// One scale per 128 rows and 128 columns, as DeepSeek scales weights.
    pub const TILE: Self = Self { rows: 128, columns: 128 };

    /// How many blocks a matrix of `[rows, columns]` has along its axes.
    pub fn counts(self, rows: usize, columns: usize) -> [usize; 2] {
        let count = |n: usize, each: usize| if each == Self::ALL { 1 } else { n.div_ceil(each.max(1)) };
        [count(rows, self.rows), count(columns, self.columns)]
    }
}

/// A matrix, or a batch of them, with a scale for each block, or with none: `value = data * scale`.
///
/// ```
/// # use fir::tensor::{Block, DType, Scaled, Tensor};
/// let (w, scales) = (Tensor::zeros(DType::E4M3, &[256, 512])?, Tensor::zeros(DType::F32, &[2, 4])?);
/// let w = Scaled::new(w.view(), scales.view(), Block::TILE);
/// let x = Tensor::zeros(DType::BF16, &[8, 512])?;
/// let x = Scaled::from(x.view()); // no scales
/// # let _ = (w, x);
/// # Ok::<(), fir::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Scaled<'a> {
    /// `[rows, k]` or `[batch, rows, k]`.
    pub data: TensorRef<'a>,
    /// [`Block::counts`] of `[rows, k]`, after `batch` if there is one; f32.
    pub scales: Option<TensorRef<'a>>,
    /// Which elements share a scale.
    pub block: Block,
}

impl<'a> Scaled<'a> {
    /// With a scale per block.
    pub fn new(data: TensorRef<'a>, scales: TensorRef<'a>, block: Block) -> Self {
        Self { data, scales: Some(scales), block }
    }

    /// Matrix `index` of a batch.
    pub(crate) fn select(self, index: usize) -> Result<Self> {
        let scales = self.scales.map(|s| s.select(0, index)).transpose()?;
        Ok(Self { data: self.data.select(0, index)?, scales, ..self })
    }
}

impl<'a> From<TensorRef<'a>> for Scaled<'a> {
    fn from(data: TensorRef<'a>) -> Self {
        Self { data, scales: None, block: Block::TENSOR }
    }
}
