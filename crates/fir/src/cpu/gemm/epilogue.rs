//! What becomes of a product's sums on their way to the output.

use crate::cpu::activation::{Activation, Silu};
use crate::cpu::vector::{Lane, Vector};

/// Done to f32 sums before they are rounded, so nothing is rounded twice.
#[derive(Clone, Copy)]
pub(crate) enum Epilogue<'a> {
    None,
    /// Element `j` is added to column `j`.
    Bias(&'a [f32]),
    /// There are twice as many weight rows as columns: column `j` is `silu(sum j) * sum (n + j)`.
    SiluMul,
    /// The output is added to.
    Add,
}

impl Epilogue<'_> {
    /// Weight rows per column.
    pub(super) fn rows(self) -> usize {
        if matches!(self, Self::SiluMul) { 2 } else { 1 }
    }

    /// Writes the columns from `first` on of one row: `sums`, and those of the second half of the weights.
    #[inline(always)]
    pub(super) fn write<V: Vector, O: Lane>(self, v: V, first: usize, sums: &[f32], second: &[f32], out: &mut [O]) {
        assert_eq!(sums.len(), out.len());
        let mut i = 0;
        while i < out.len() {
            let n = V::LANES.min(out.len() - i);
            let whole = n == V::LANES;
            let sum = load(v, whole, &sums[i..i + n]);
            let y = match self {
                Self::None => sum,
                Self::Bias(bias) => v.add(sum, load(v, whole, &bias[first + i..][..n])),
                Self::SiluMul => v.mul(Silu.apply(v, sum), load(v, whole, &second[i..i + n])),
                Self::Add => v.add(sum, load(v, whole, &out[i..i + n])),
            };
            if whole {
                O::store(v, y, &mut out[i..]);
            } else {
                O::store_tail(v, y, &mut out[i..]);
            }
            i += n;
        }
    }
}

#[inline(always)]
fn load<V: Vector, T: Lane>(v: V, whole: bool, x: &[T]) -> V::F {
    if whole { T::load(v, x) } else { T::load_tail(v, x) }
}
