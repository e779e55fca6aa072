//! Weights of bf16 in the order in which AMX tiles read them, packed once.
//!
//! Weight rows are cut into strips of [`STRIP`], their elements along `k` into steps of [`STEP`]. A strip's steps lie one
//! behind the other, each two tiles of 16 rows; zeros stand beyond the last row and the end of each.

use crate::cpu::exec::Cpu;
use crate::cpu::rows::Rows;
use crate::error::Result;
use crate::tensor::{DType, Tensor, TensorRef, bf16};

/// Elements along `k` of one step of a tile.
pub(super) const STEP: usize = 32;
/// Weight rows and rows of `x` per product of tiles.
pub(super) const STRIP: usize = 32;
/// Elements of a tile.
const TILE: usize = 16 * STEP;

/// Weights `[n, k]`, packed.
pub(crate) struct Strips {
    n: usize,
    k: usize,
    /// `[strips, elements of a strip]`
    data: Tensor,
}

impl Strips {
    /// Rows that are packed together.
    pub(crate) const ROWS: usize = STRIP;

    pub(crate) fn new(cpu: &Cpu, op: &'static str, w: TensorRef<'_>) -> Result<Self> {
        // Copied: a stride of 0 could claim more rows than memory holds.
        w.layout().check_listed(op, "w")?;
        let w = Rows::<bf16>::new(op, "w", w)?;
        let (n, k) = (w.len(), w.row_len());
        let len = strip_len(k);
        let mut data = Tensor::zeros(DType::BF16, &[n.div_ceil(STRIP), len])?;
        let strips = data.as_mut_slice::<bf16>()?.chunks_exact_mut(len.max(1)).enumerate();
        cpu.pool().scatter(strips.collect(), |(i, strip)| {
            for r in 0..STRIP.min(n - i * STRIP) {
                copy(w.row(i * STRIP + r), lines(strip, r));
            }
        });
        Ok(Self { n, k, data })
    }

    /// `[n, k]`
    pub(crate) fn shape(&self) -> [usize; 2] {
        [self.n, self.k]
    }

    /// Bytes, with the zeros.
    pub(crate) fn bytes(&self) -> usize {
        self.data.view().layout().len() * size_of::<bf16>()
    }

    /// All strips.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn data(&self) -> &[bf16] {
        self.data.as_slice().expect("bf16")
    }
}

/// Elements of a strip.
pub(super) fn strip_len(k: usize) -> usize {
    k.div_ceil(STEP) * STRIP * STEP
}

/// Where row `r` of a strip lies, step by step.
#[inline(always)]
pub(super) fn lines(strip: &mut [bf16], r: usize) -> impl Iterator<Item = &mut [bf16]> {
    strip[r / 16 * TILE + r % 16 * STEP..].chunks_mut(2 * TILE)
}

/// Copies a weight row to `lines`, a step each; zeros beyond its end.
#[inline(always)]
pub(super) fn copy<'a>(row: &[bf16], lines: impl Iterator<Item = &'a mut [bf16]>) {
    let (whole, rest) = row.as_chunks::<STEP>();
    for (i, line) in lines.enumerate() {
        let line = line.first_chunk_mut::<STEP>().expect("a line of a tile");
        if let Some(from) = whole.get(i) {
            *line = *from;
        } else {
            *line = [bf16::ZERO; STEP];
            if i == whole.len() {
                line[..rest.len()].copy_from_slice(rest);
            }
        }
    }
}
