//! What a mask says of a whole block of the attention matrix, by interval analysis of its expression.
//!
//! Every integer node gets an interval that holds its value at every place of the block, every truth value the set
//! of values it may have. Arithmetic that may wrap around gives "any integer", floating comparisons give "either":
//! the verdict may be [`Visible::Some`] without need, but `All` and `None` are always right.

use super::expr::{Binary, Leaf, Op, Unary};
use super::params::{Bound, ParamType};
use super::spec::{Expr, Variant};

/// Whether a block of (query, key) pairs is visible.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Visible {
    /// Every pair.
    All,
    /// No pair.
    None,
    /// Perhaps some pairs.
    Some,
}

/// Inclusive bounds of what a block of the attention matrix spans.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Block {
    pub(crate) batch: (i32, i32),
    pub(crate) q_idx: (i32, i32),
    pub(crate) q_len: (i32, i32),
    pub(crate) kv_len: (i32, i32),
    pub(crate) q_pos: (i32, i32),
    pub(crate) kv_pos: (i32, i32),
    pub(crate) qo_head: (i32, i32),
    pub(crate) kv_head: (i32, i32),
}

/// Tensor elements and mask bits that one verdict may read; beyond it they count as anything. 64 rows of 256 columns
/// are 16k bits, read by the byte in about a microsecond.
const MOST_READS: i64 = 1 << 14;

#[derive(Clone, Copy, Debug)]
enum Set {
    /// Any number, NaN too.
    Float,
    /// Integers from, to.
    Int(i32, i32),
    /// May be false, may be true.
    Truth(bool, bool),
}

const ANY: Set = Set::Int(i32::MIN, i32::MAX);
const EITHER: Set = Set::Truth(true, true);

impl Set {
    fn int(self) -> (i64, i64) {
        match self {
            Self::Int(lo, hi) => (lo.into(), hi.into()),
            _ => (i32::MIN.into(), i32::MAX.into()),
        }
    }
    fn truth(self) -> (bool, bool) {
        match self {
            Self::Truth(f, t) => (f, t),
            _ => (true, true),
        }
    }
}

/// `lo..=hi`, or any integer when that does not fit: then the operation may have wrapped around.
fn within(lo: i64, hi: i64) -> Set {
    match (i32::try_from(lo), i32::try_from(hi)) {
        (Ok(lo), Ok(hi)) => Set::Int(lo, hi),
        _ => ANY,
    }
}

fn hull(values: [i64; 4]) -> Set {
    within(values.into_iter().fold(i64::MAX, i64::min), values.into_iter().fold(i64::MIN, i64::max))
}

/// The verdict of `mask`; with `bound` unknown, parameters count as any value.
pub(super) fn block(variant: &Variant, mask: &Expr, bound: Option<&Bound<'_>>, block: &Block) -> Visible {
    let mut sets = vec![Set::Float; mask.root as usize + 1];
    for &id in &mask.order {
        let at = |id: u32| sets[id as usize];
        let set = match variant.0.nodes[id as usize] {
            Op::F32(_) | Op::Select(..) | Op::TooDeep => Set::Float,
            Op::I32(x) => Set::Int(x, x),
            Op::Bool(x) => Set::Truth(!x, x),
            Op::Leaf(leaf) => {
                let (lo, hi) = match leaf {
                    Leaf::QPos => block.q_pos,
                    Leaf::KvPos => block.kv_pos,
                    Leaf::QIdx => block.q_idx,
                    Leaf::QLen => block.q_len,
                    Leaf::KvLen => block.kv_len,
                    Leaf::Batch => block.batch,
                    Leaf::QoHead => block.qo_head,
                    Leaf::KvHead => block.kv_head,
                    Leaf::Score | Leaf::O | Leaf::M | Leaf::D => (i32::MIN, i32::MAX),
                };
                Set::Int(lo, hi)
            }
            Op::Param(p) => match (variant.param_type(p), bound) {
                (ParamType::I32, Some(bound)) => Set::Int(bound.i32(p), bound.i32(p)),
                (ParamType::I32, None) => ANY,
                _ => Set::Float,
            },
            Op::At(p, i) => match (variant.param_type(p), bound) {
                (ParamType::I32Tensor, Some(bound)) => elements(bound.i32s(p), at(i).int()),
                (ParamType::I32Tensor, None) => ANY,
                _ => Set::Float,
            },
            Op::Bit(p, [r, c, s]) => match bound {
                Some(bound) if block.batch.0 == block.batch.1 => {
                    bits(bound.segment(p, block.batch.0), at(r).int(), at(c).int(), at(s).int())
                }
                _ => EITHER,
            },
            Op::Unary(Unary::Not, a) => {
                let (f, t) = at(a).truth();
                Set::Truth(t, f)
            }
            Op::Unary(..) => Set::Float,
            Op::Binary(op, a, b) => binary(op, at(a), at(b)),
        };
        sets[id as usize] = set;
    }
    match sets[mask.root as usize].truth() {
        (false, true) => Visible::All,
        (true, false) => Visible::None,
        _ => Visible::Some,
    }
}

fn binary(op: Binary, x: Set, y: Set) -> Set {
    let ((a, b), (c, d)) = (x.int(), y.int());
    match op {
        Binary::AddI => within(a + c, b + d),
        Binary::SubI => within(a - d, b - c),
        Binary::MulI => hull([a * c, a * d, b * c, b * d]),
        // The quotient is monotone in each operand on either side of 0, so its extremes are at the corners. A divisor
        // of 0 or less gives 0.
        Binary::DivI if d <= 0 => Set::Int(0, 0),
        Binary::DivI => {
            let least = c.max(1);
            let q = hull([a.div_euclid(least), a.div_euclid(d), b.div_euclid(least), b.div_euclid(d)]).int();
            if c > 0 { within(q.0, q.1) } else { within(q.0.min(0), q.1.max(0)) }
        }
        Binary::RemI if d <= 0 => Set::Int(0, 0),
        Binary::RemI if a >= 0 && b < c => x,
        Binary::RemI => within(0, d - 1),
        Binary::MinI => within(a.min(c), b.min(d)),
        Binary::MaxI => within(a.max(c), b.max(d)),
        Binary::LtI => Set::Truth(b >= c, a < d),
        Binary::LeI => Set::Truth(b > c, a <= d),
        Binary::EqI => Set::Truth(!(a == b && c == d && a == c), a <= d && c <= b),
        Binary::And => {
            let ((xf, xt), (yf, yt)) = (x.truth(), y.truth());
            Set::Truth(xf | yf, xt & yt)
        }
        Binary::Or => {
            let ((xf, xt), (yf, yt)) = (x.truth(), y.truth());
            Set::Truth(xf & yf, xt | yt)
        }
        Binary::LtF | Binary::LeF => EITHER,
        Binary::AddF | Binary::SubF | Binary::MulF | Binary::DivF | Binary::MinF | Binary::MaxF => Set::Float,
    }
}

/// The values of `x` at the indices `lo..=hi`, clamped.
fn elements(x: &[i32], (lo, hi): (i64, i64)) -> Set {
    let last = x.len() as i64 - 1;
    let (lo, hi) = (lo.clamp(0, last), hi.clamp(0, last));
    if hi - lo >= MOST_READS {
        return ANY;
    }
    let x = &x[lo as usize..=hi as usize];
    Set::Int(x.iter().copied().fold(i32::MAX, i32::min), x.iter().copied().fold(i32::MIN, i32::max))
}

/// The bits of rows and columns; exact for one stride and as many bits as may be read.
fn bits(segment: &[u8], row: (i64, i64), col: (i64, i64), stride: (i64, i64)) -> Set {
    let (rows, cols) = (row.1 - row.0 + 1, col.1 - col.0 + 1);
    if stride.0 != stride.1 || rows > MOST_READS || cols > MOST_READS || rows * cols > MOST_READS {
        return EITHER;
    }
    let (mut f, mut t) = (false, false);
    for r in row.0..=row.1 {
        let start = r * stride.0 + col.0;
        let (mut at, end) = (start, start + cols);
        while at < end {
            let byte = segment.get((at >> 3) as usize).copied().unwrap_or(0);
            // The bits of this byte from `at` on, and before `end`.
            let n = (8 - (at & 7)).min(end - at);
            let want = ((1u16 << n) - 1) as u8;
            let have = byte >> (at & 7) & want;
            f |= have != want;
            t |= have != 0;
            at += n;
        }
        if f && t {
            break;
        }
    }
    Set::Truth(f, t)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Case, Rng};
    use crate::variant::{RowCtx, eval, visible_in};

    /// A verdict over a random block of a random mask, against every pair of it.
    #[test]
    fn verdicts_hold_for_every_pair() {
        let mut counts = [0; 3];
        for seed in 0..3000 {
            let mut rng = Rng::new(seed);
            let case = Case::random(&mut rng, 4 + (seed as usize % 30));
            let bound = case.bind();
            let (q_len, kv_len) = (case.row.q_len, case.row.kv_len);
            let mut span = |n: i32, most: i32| {
                let lo = rng.below(n as usize) as i32;
                (lo, (lo + rng.below(most as usize) as i32).min(n - 1))
            };
            let (q_idx, kv_pos) = (span(q_len, 6), span(kv_len, 20));
            let one = |x: i32| (x, x);
            let block = Block {
                batch: one(case.row.batch),
                q_idx,
                q_len: one(q_len),
                kv_len: one(kv_len),
                q_pos: (kv_len - q_len + q_idx.0, kv_len - q_len + q_idx.1),
                kv_pos,
                qo_head: one(case.row.qo_head),
                kv_head: one(case.row.kv_head),
            };
            let mut seen = (false, false);
            for q in q_idx.0..=q_idx.1 {
                for k in kv_pos.0..=kv_pos.1 {
                    let row = RowCtx { q_idx: q, ..case.row };
                    if eval::visible(&case.variant, &bound, &row, k) { seen.1 = true } else { seen.0 = true }
                }
            }
            for bound in [Some(&bound), None] {
                let verdict = visible_in(&case.variant, bound, &block);
                counts[verdict as usize] += 1;
                let right = match verdict {
                    Visible::All => !seen.0,
                    Visible::None => !seen.1,
                    Visible::Some => true,
                };
                assert!(right, "seed {seed}: {verdict:?} but {seen:?}: {block:?} of {:?}", case.variant);
            }
        }
        // The analysis must say something: a third of random masks are decided over a block.
        assert!(counts[0] > 500 && counts[1] > 500, "{counts:?}");
    }
}
