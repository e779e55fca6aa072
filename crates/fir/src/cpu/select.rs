//! Thresholds of a row without sorting it, and a draw from what passes them.
//!
//! A filter becomes one number, a *cutoff*: elements at least as large pass. Its two searches are linear in the row:
//!
//! * [`kth_largest`]: the k-th largest of the maxima of small groups is a lower bound, which few more than `k` elements
//!   reach; a selection among those ends it.
//! * [`mass_cutoff`]: the elements from 2⁻¹⁰ of the maximum up are copied out; in a language model's row they are few
//!   and hold the cutoff. Then each pass measures what lies above four pivots, chosen by a sample, and keeps the bracket that
//!   the wanted mass falls into; what is left is copied out once it is a quarter of what is read.
//!
//! Sums are f32 within blocks of 512 elements and f64 across them, always in the same order.

use std::ops::Range;

use super::math::exp2;
use super::rows::{Rows, widen};
use super::vector::Vector;
use crate::error::Result;
use crate::tensor::{DType, TensorRef, bf16, f16};

/// The least positive f32: as a cutoff it lets every positive element pass.
pub(crate) const POSITIVE: f32 = f32::from_bits(1);

/// Elements per f32 sum: 32 additions per lane of AVX-512, an error of about 1e-7 of the block's sum.
const BLOCK: usize = 512;

/// What is added in place of an element that does not count: unlike +0 it leaves every number as it is, -0 included,
/// which lets the compiler turn select and add into one masked addition.
const NOTHING: f32 = -0.0;

/// Below this many elements a bracket is sorted: 64 take about a microsecond.
const FEW: usize = 64;

/// Memory that the searches reuse from row to row.
#[derive(Default)]
pub(crate) struct Scratch {
    /// A row as f32, when it comes in another type.
    pub(crate) wide: Vec<f32>,
    /// Weights of a row: exponentials of logits, or what is left of a target distribution.
    pub(crate) weights: Vec<f32>,
    /// Sums of blocks.
    pub(crate) sums: Vec<f32>,
    pub(crate) ids: Vec<u32>,
    /// The elements that pass a `top_k`.
    pub(crate) kept: Vec<f32>,
    list: Vec<f32>,
    spare: Vec<f32>,
}

/// Rows of f32, f16 or bf16.
#[derive(Clone, Copy)]
pub(crate) enum FloatRows<'a> {
    F32(Rows<'a, f32>),
    F16(Rows<'a, f16>),
    BF16(Rows<'a, bf16>),
}

impl<'a> FloatRows<'a> {
    pub(crate) fn new(op: &'static str, arg: &'static str, x: TensorRef<'a>) -> Result<Self> {
        match x.dtype() {
            DType::F16 => Rows::new(op, arg, x).map(Self::F16),
            DType::BF16 => Rows::new(op, arg, x).map(Self::BF16),
            _ => Rows::new(op, arg, x).map(Self::F32),
        }
    }

    /// Row `r` as f32: itself, or widened into `wide`.
    #[inline(always)]
    pub(crate) fn row<'s, V: Vector>(&self, v: V, r: usize, wide: &'s mut Vec<f32>) -> &'s [f32]
    where
        'a: 's,
    {
        match self {
            Self::F32(rows) => return rows.row(r),
            Self::F16(rows) => {
                wide.resize(rows.row(r).len(), 0.0);
                widen(v, rows.row(r), wide);
            }
            Self::BF16(rows) => {
                wide.resize(rows.row(r).len(), 0.0);
                widen(v, rows.row(r), wide);
            }
        }
        wide
    }
}

/// What passes a cutoff.
#[derive(Clone, Copy)]
pub(crate) struct Mass {
    pub(crate) total: f64,
    /// Largest element; 0 when none is positive.
    pub(crate) max: f32,
}

impl Mass {
    /// Whether it is a distribution: no NaN, no infinity, something positive.
    pub(crate) fn is_valid(self) -> bool {
        self.total > 0.0 && self.total < f64::INFINITY
    }
}

/// Sums the elements that are at least `cutoff` (a positive number), block by block. A NaN makes the total NaN.
#[inline(always)]
pub(crate) fn block_sums<V: Vector>(v: V, x: &[f32], cutoff: f32, sums: &mut Vec<f32>) -> Mass {
    sums.clear();
    let (zero, nothing, cutoff) = (v.splat(0.0), v.splat(NOTHING), v.splat(cutoff));
    let (mut max, mut total) = (zero, 0.0);
    for block in x.chunks(BLOCK) {
        let mut acc = [zero; 4];
        let quads = block.len() / (4 * V::LANES) * (4 * V::LANES);
        let mut i = 0;
        while i < quads {
            for (c, acc) in acc.iter_mut().enumerate() {
                let y = v.load(&block[i + c * V::LANES..]);
                max = v.max(y, max);
                *acc = v.add(*acc, v.select(v.lt(y, cutoff), nothing, y));
            }
            i += 4 * V::LANES;
        }
        while i < block.len() {
            let y = load_padded(v, &block[i..]);
            max = v.max(y, max);
            acc[0] = v.add(acc[0], v.select(v.lt(y, cutoff), nothing, y));
            i += V::LANES;
        }
        let sum = v.sum(v.add(v.add(acc[0], acc[1]), v.add(acc[2], acc[3])));
        sums.push(sum);
        total += f64::from(sum);
    }
    Mass { total, max: v.max_lane(max) }
}

/// The first vector of `x`, with zeros behind its end.
#[inline(always)]
fn load_padded<V: Vector>(v: V, x: &[f32]) -> V::F {
    if x.len() >= V::LANES {
        return v.load(x);
    }
    let mut lanes = [0f32; 16];
    lanes[..x.len()].copy_from_slice(x);
    v.load(&lanes)
}

/// The element in whose share of the mass `u` (in `[0, 1]`) falls: the first whose running sum, itself included,
/// exceeds `u · total`. `sums` and `mass` are [`block_sums`]' for the same row and cutoff, and valid.
pub(crate) fn pick(x: &[f32], cutoff: f32, sums: &[f32], mass: Mass, u: f32) -> u32 {
    let target = f64::from(u) * mass.total;
    let (mut below, mut last) = (0.0, 0);
    for (b, &sum) in sums.iter().enumerate() {
        if sum > 0.0 {
            last = b;
            if below + f64::from(sum) > target {
                break;
            }
            below += f64::from(sum);
        }
    }
    let mut found = 0;
    for (i, &y) in x[last * BLOCK..].iter().take(BLOCK).enumerate() {
        if y >= cutoff {
            found = i;
            below += f64::from(y);
            if below > target {
                break;
            }
        }
    }
    // When rounding leaves the block's running sum short of its sum, its last element that passes is taken.
    (last * BLOCK + found) as u32
}

/// Largest element that is a number; -inf when there is none.
#[inline(always)]
pub(crate) fn row_max<V: Vector>(v: V, x: &[f32]) -> f32 {
    let mut acc = [v.splat(f32::NEG_INFINITY); 4];
    let quads = x.len() / (4 * V::LANES) * (4 * V::LANES);
    let mut i = 0;
    while i < quads {
        for (c, acc) in acc.iter_mut().enumerate() {
            *acc = v.max(v.load(&x[i + c * V::LANES..]), *acc);
        }
        i += 4 * V::LANES;
    }
    while i + V::LANES <= x.len() {
        acc[0] = v.max(v.load(&x[i..]), acc[0]);
        i += V::LANES;
    }
    let mut max = v.max_lane(v.max(v.max(acc[0], acc[1]), v.max(acc[2], acc[3])));
    for &y in &x[i..] {
        if y > max {
            max = y;
        }
    }
    max
}

/// First place of a value that is in the row.
#[inline(always)]
pub(crate) fn first_of<V: Vector>(v: V, x: &[f32], value: f32) -> usize {
    let full = x.len() / V::LANES * V::LANES;
    // The row holds nothing larger, so "not less" is "equal".
    let wanted = v.splat(value);
    let mut i = 0;
    while i < full && v.bits(v.lt(v.load(&x[i..]), wanted)).count_ones() as usize == V::LANES {
        i += V::LANES;
    }
    while i < x.len() && x[i] != value {
        i += 1;
    }
    i
}

#[inline(always)]
pub(crate) fn has_nan(x: &[f32]) -> bool {
    let mut nan = false;
    for y in x {
        nan |= y.is_nan();
    }
    nan
}

/// `out = 2^((x - max) · scale)`; returns the sum. A NaN stays one and makes the sum NaN. With `max` +inf, the infinite
/// elements weigh 1 and the others 0.
#[inline(always)]
pub(crate) fn weigh<V: Vector>(v: V, x: &[f32], max: f32, scale: f32, out: &mut [f32]) -> f64 {
    assert_eq!(x.len(), out.len());
    let mut total = 0.0;
    if max == f32::INFINITY {
        for (o, &x) in out.iter_mut().zip(x) {
            *o = if x.is_nan() { x } else { f32::from(u8::from(x == max)) };
            total += f64::from(*o);
        }
        return total;
    }
    let (top, scale) = (v.splat(max), v.splat(scale));
    for (x, out) in x.chunks(BLOCK).zip(out.chunks_mut(BLOCK)) {
        let mut sum = v.splat(0.0);
        let mut i = 0;
        while i + V::LANES <= x.len() {
            let e = exp2(v, v.mul(v.sub(v.load(&x[i..]), top), scale));
            sum = v.add(sum, e);
            v.store(e, &mut out[i..]);
            i += V::LANES;
        }
        if i < x.len() {
            // Padded with -inf, whose weight is 0.
            let mut lanes = [f32::NEG_INFINITY; 16];
            lanes[..x.len() - i].copy_from_slice(&x[i..]);
            let e = exp2(v, v.mul(v.sub(v.load(&lanes), top), scale));
            sum = v.add(sum, e);
            v.store(e, &mut lanes);
            out[i..].copy_from_slice(&lanes[..x.len() - i]);
        }
        total += f64::from(v.sum(sum));
    }
    total
}

/// The k-th largest of the elements that are numbers, equals counted apart; -inf when there are at most `k`.
#[inline(always)]
pub(crate) fn kth_largest<V: Vector>(v: V, x: &[f32], k: usize, s: &mut Scratch) -> f32 {
    if k >= x.len() {
        return f32::NEG_INFINITY;
    }
    candidates(v, x, k, s);
    nth(x, k, s)
}

/// Leaves in `s.ids` the places of the `k` largest elements in ascending order: of equal elements the first ones, NaN
/// never. There are fewer when the row has fewer numbers.
#[inline(always)]
pub(crate) fn top_places<V: Vector>(v: V, x: &[f32], k: usize, s: &mut Scratch) {
    candidates(v, x, k, s);
    if s.ids.len() <= k {
        return;
    }
    if k == 0 {
        s.ids.clear();
        return;
    }
    let cutoff = nth(x, k, s);
    let mut equals = k - s.ids.iter().filter(|&&i| x[i as usize] > cutoff).count();
    s.ids.retain(|&i| {
        let y = x[i as usize];
        let tied = y == cutoff && equals > 0;
        equals -= usize::from(tied);
        y > cutoff || tied
    });
}

/// The k-th largest of the elements that `s.ids` names; -inf when they are fewer.
fn nth(x: &[f32], k: usize, s: &mut Scratch) -> f32 {
    if s.ids.len() < k || k == 0 {
        return f32::NEG_INFINITY;
    }
    s.list.clear();
    s.list.extend(s.ids.iter().map(|&i| x[i as usize]));
    *s.list.select_nth_unstable_by(k - 1, |a, b| b.total_cmp(a)).1
}

/// Fills `s.ids` with places in ascending order: all that may be among the `k` largest, equals included.
#[inline(always)]
fn candidates<V: Vector>(v: V, x: &[f32], k: usize, s: &mut Scratch) {
    s.ids.clear();
    // Four groups per wanted element: few more than k elements then reach the k-th largest maximum.
    let group = (x.len() / (4 * k).max(1)).min(1024);
    let mut cutoff = f32::NEG_INFINITY;
    if group >= 2 {
        group_maxima(v, x, group, &mut s.list);
        if (1..=s.list.len()).contains(&k) {
            // k groups reach it, each with an element of its own.
            cutoff = *s.list.select_nth_unstable_by(k - 1, |a, b| b.total_cmp(a)).1;
        }
    }
    if cutoff == f32::NEG_INFINITY {
        for (i, y) in x.iter().enumerate() {
            if !y.is_nan() {
                s.ids.push(i as u32);
            }
        }
        return;
    }
    // `x > the number before`, as NaN is neither less nor greater.
    let before = cutoff.next_down();
    let full = x.len() / V::LANES * V::LANES;
    let mut i = 0;
    while i < full {
        let mut bits = v.bits(v.lt(v.splat(before), v.load(&x[i..])));
        while bits != 0 {
            s.ids.push(i as u32 + bits.trailing_zeros());
            bits &= bits - 1;
        }
        i += V::LANES;
    }
    for (i, &y) in x.iter().enumerate().skip(full) {
        if y > before {
            s.ids.push(i as u32);
        }
    }
}

/// Maxima of groups of at most `size` elements: a group is what one lane reads of `size` vectors, as that needs no
/// maximum across lanes; what is left of the row, less than a vector, is one more. A group without a number has -inf.
#[inline(always)]
fn group_maxima<V: Vector>(v: V, x: &[f32], size: usize, maxima: &mut Vec<f32>) {
    maxima.clear();
    for block in x.chunks(size * V::LANES) {
        let full = block.len() / V::LANES * V::LANES;
        let quads = full / (4 * V::LANES) * (4 * V::LANES);
        let mut acc = [v.splat(f32::NEG_INFINITY); 4];
        let mut i = 0;
        while i < quads {
            for (c, acc) in acc.iter_mut().enumerate() {
                *acc = v.max(v.load(&block[i + c * V::LANES..]), *acc);
            }
            i += 4 * V::LANES;
        }
        while i < full {
            acc[0] = v.max(v.load(&block[i..]), acc[0]);
            i += V::LANES;
        }
        let at = maxima.len();
        maxima.resize(at + V::LANES, 0.0);
        v.store(v.max(v.max(acc[0], acc[1]), v.max(acc[2], acc[3])), &mut maxima[at..]);
        if full < block.len() {
            maxima.push(row_max(v, &block[full..]));
        }
    }
}

/// The largest cutoff that leaves a mass of at least `target` (positive), out of the row's own positive elements; the
/// smallest of them when rounding puts the target out of reach. `mass` is the row's, and valid.
#[inline(always)]
pub(crate) fn mass_cutoff<V: Vector>(v: V, x: &[f32], mass: Mass, target: f64, s: &mut Scratch) -> f32 {
    // The bits of positive floats are in the floats' order. The cutoff is in `lo..hi`: `over`, the mass from `hi` up,
    // is short of the target; `under`, the mass from `lo` up, is not.
    let (mut lo, mut hi) = (1u32, mass.max.to_bits().saturating_add(1));
    let (mut under, mut over) = (mass.total, 0.0);
    // What the row (or the list, once there is one) has from `lo` and from `hi` up, and what the list left out.
    let (mut lo_count, mut hi_count, mut base) = (x.len(), 0, 0.0);
    let (mut listed, mut sampled) = (false, false);
    let peak = (mass.max / 1024.0).max(POSITIVE);
    if between(v, x, peak, f32::INFINITY, x.len() / 8, &mut s.list) {
        let mut sum = 0.0;
        for &y in &s.list {
            sum += f64::from(y);
        }
        if sum >= target {
            (lo, lo_count, under, listed) = (peak.to_bits(), s.list.len(), sum, true);
        } else {
            (hi, hi_count, over) = (peak.to_bits(), s.list.len(), sum);
        }
    }
    while lo_count - hi_count > FEW && hi - lo > 1 {
        let data = if listed { &*s.list } else { x };
        // Every other time at fifths of the bracket, which bounds the number of passes whatever the row.
        sampled = !sampled;
        let pivots =
            if sampled { pivots_by_sample(data, lo..hi, (target - over) / (under - over), &mut s.spare) } else { None };
        let pivots = match pivots {
            Some(pivots) => pivots,
            None => [4u64, 3, 2, 1].map(|j| lo + (u64::from(hi - lo) * j / 5).max(1) as u32),
        };
        let found = above(v, data, pivots.map(f32::from_bits));
        for (pivot, (count, sum)) in pivots.into_iter().zip(found) {
            if base + sum >= target {
                (lo, lo_count, under) = (pivot, count, base + sum);
                break;
            }
            (hi, hi_count, over) = (pivot, count, base + sum);
        }
        if (lo_count - hi_count) * 4 <= data.len() {
            between(v, data, f32::from_bits(lo), f32::from_bits(hi), usize::MAX, &mut s.spare);
            std::mem::swap(&mut s.list, &mut s.spare);
            (listed, base, lo_count, hi_count) = (true, over, s.list.len(), 0);
        }
    }
    if hi - lo <= 1 {
        return f32::from_bits(lo);
    }
    let data = if listed { &*s.list } else { x };
    between(v, data, f32::from_bits(lo), f32::from_bits(hi), usize::MAX, &mut s.spare);
    s.spare.sort_unstable_by(|a, b| b.total_cmp(a));
    for &y in &s.spare {
        over += f64::from(y);
        if over >= target {
            return y;
        }
    }
    s.spare.last().copied().unwrap_or(f32::from_bits(lo))
}

/// Four pivots in descending order around the place where the mass of a bracket's largest elements would reach `share`
/// of the bracket's mass, by a sample of 256: 8 and 32 sampled elements to each side, once and four times the error
/// to be expected of the place. `None` when the sample has too few elements of the bracket.
fn pivots_by_sample(x: &[f32], bracket: Range<u32>, share: f64, sample: &mut Vec<f32>) -> Option<[u32; 4]> {
    sample.clear();
    for &y in x.iter().step_by(x.len().div_ceil(256).max(1)) {
        if y > 0.0 && bracket.contains(&y.to_bits()) {
            sample.push(y);
        }
    }
    if sample.len() < 32 {
        return None;
    }
    sample.sort_unstable_by(|a, b| b.total_cmp(a));
    let mut left = share * sample.iter().map(|&y| f64::from(y)).sum::<f64>();
    let mut at = 0;
    while at + 1 < sample.len() && left > f64::from(sample[at]) {
        left -= f64::from(sample[at]);
        at += 1;
    }
    let place = |i: usize| sample[i.min(sample.len() - 1)].to_bits().clamp(bracket.start + 1, bracket.end - 1);
    Some([place(at.saturating_sub(32)), place(at.saturating_sub(8)), place(at + 8), place(at + 32)])
}

/// Number and sum of the elements from each pivot (a positive number) up.
#[inline(always)]
fn above<V: Vector>(v: V, x: &[f32], pivots: [f32; 4]) -> [(usize, f64); 4] {
    let (zero, nothing, one) = (v.splat(0.0), v.splat(NOTHING), v.splat(1.0));
    let cut = [v.splat(pivots[0]), v.splat(pivots[1]), v.splat(pivots[2]), v.splat(pivots[3])];
    let mut found = [(0, 0.0); 4];
    for block in x.chunks(BLOCK) {
        let (mut count, mut mass) = ([zero; 4], [zero; 4]);
        let mut i = 0;
        while i < block.len() {
            let y = load_padded(v, &block[i..]);
            for j in 0..4 {
                let less = v.lt(y, cut[j]);
                count[j] = v.add(count[j], v.select(less, nothing, one));
                mass[j] = v.add(mass[j], v.select(less, nothing, y));
            }
            i += V::LANES;
        }
        let (count, mass) = (v.sums4(count), v.sums4(mass));
        for j in 0..4 {
            found[j].0 += count[j] as usize;
            found[j].1 += f64::from(mass[j]);
        }
    }
    found
}

/// Fills `out` with the elements in `lo..hi`, `lo` positive; false if it gave up as there are more than `most`.
#[inline(always)]
fn between<V: Vector>(v: V, x: &[f32], lo: f32, hi: f32, most: usize, out: &mut Vec<f32>) -> bool {
    out.clear();
    let mut i = 0;
    while i < x.len() && out.len() <= most {
        let y = load_padded(v, &x[i..]);
        let mut bits = v.bits(v.lt(y, v.splat(hi))) & !v.bits(v.lt(y, v.splat(lo)));
        while bits != 0 {
            out.push(x[i + bits.trailing_zeros() as usize]);
            bits &= bits - 1;
        }
        i += V::LANES;
    }
    out.len() <= most
}
