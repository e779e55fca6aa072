//! [`Scratch`]: memory a run needs besides its tensors, sized exactly by the plan.

use crate::error::{Error, Result};

/// Floats of a worker's tile buffers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct TileSizes {
    /// Rows (query tokens × heads of one pass) and their padded widths.
    pub rows: usize,
    pub dim_qk: usize,
    pub dim_vo: usize,
}

/// Memory of one call in flight; a plan's `scratch()` makes one of the right size. Two calls at once need two.
#[derive(Debug)]
pub struct Scratch {
    /// `[partial_rows, dim_vo + 2]`: output, then its `m` and `d`.
    pub(crate) partials: Vec<f32>,
}

impl Scratch {
    pub(crate) fn with_len(floats: usize) -> Self {
        Self { partials: vec![0.0; floats] }
    }

    /// Bytes it holds.
    pub fn bytes(&self) -> usize {
        self.partials.len() * size_of::<f32>()
    }

    /// The first `floats` of it.
    pub(crate) fn partials(&mut self, op: &'static str, floats: usize) -> Result<&mut [f32]> {
        let have = self.partials.len();
        self.partials.get_mut(..floats).ok_or_else(|| {
            Error::value(op, "scratch", format!("{have} floats"), format!("{floats} as this plan needs"))
        })
    }
}
