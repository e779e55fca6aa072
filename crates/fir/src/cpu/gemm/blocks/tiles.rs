//! Many rows of formats with integer scales through AMX tiles.
//!
//! A product of tiles is exact in i32, as the instructions of [`super::kernel`] are, so the f32 steps after it see the
//! same integers. Of a cell the right operand is eight tiles, 256 deep and 16 columns wide twice: `sc * q`, or `d * q + m` of scales in
//! steps, up to 16 bits, as `256 * high + low`, a signed byte and an unsigned one. One product over the whole depth gives the sums of both parts, and one pass of
//! vectors per cell joins them. Minima of bytes meet the sums of activations in a product of bf16, which is exact too: a sum of 12
//! bits is two numbers of bf16.
//!
//! What it costs, in cycles for 16 rows of a cell (16 × 16 sums, 256 deep), measured on a Xeon of model 207 in the
//! first-level cache: 145, with minima 180. A tile instruction takes 16, and while one runs vectors of any width have one
//! port instead of two: 8 × 16 = 128 beside 16 × 5 = 80 of vectors, or 96. At one product for each byte of weight there would
//! be four instructions, 64 cycles.
//!
//! Rows' activations come from the second-level cache, tile by tile ([`Strip`]).

use std::marker::PhantomData;
use std::ops::Range;

use super::kernel::{AHEAD, Codes, Scales};
use super::pack::{Cell, LANES, Packed, SUPER};
use super::{Line, MANY as ROWS, NEAR, Strip, Taken, centre};
use crate::cpu::arch::{Aligned, Amx, Avx512, Left, Right, TileKernel, Tiles, prefetch_ahead, prefetch_far};
use crate::cpu::integers::Integers;

/// Panels against which all rows are multiplied in turn: 16 KB of tiles, in the first-level cache beside the rows' 8 KB
/// and the sums of two products.
const AT_ONCE: usize = 2;
/// Bytes of a tile.
const TILE: usize = 1024;
/// Sums of a product: two tiles beside two.
const SUMS: usize = ROWS * 2 * LANES;

/// What is made of a cell for all rows.
#[derive(Clone, Copy)]
struct Prepared<'a> {
    cell: Cell<'a>,
    /// Whether it is a row's first, and sums begin with it.
    first: bool,
    right: Aligned<[i8; 8 * TILE]>,
    /// Integer minima by sub-block, each as bf16 twice: for the two parts of its sum of activations.
    minima: Aligned<[[u32; LANES]; 16]>,
}

/// Puts to `sums`, `[panels, rows]`, the product of the panels from `first` on and all rows of `acts`, `[cells, strips]`.
#[inline(always)]
pub(super) fn run<V: Integers, C: Codes, S: Scales>(
    v: V,
    amx: Amx,
    acts: &[Strip],
    w: &Packed,
    first: usize,
    rows: usize,
    sums: &mut [Line],
) {
    let sums: &mut [f32] = bytemuck::cast_slice_mut(sums);
    // What a cell leaves of the last one's tiles, fewer groups than it had, meets zeros.
    let cell = Cell { groups: 0, codes: &[], scales: &[], shared: &[] };
    let (right, minima) = (Aligned([0; 8 * TILE]), Aligned([[0; LANES]; 16]));
    let mut prepared = [Prepared { cell, first: true, right, minima }; AT_ONCE];
    let panels = sums.len() / (rows * LANES);
    let (strips, turn) = (rows.div_ceil(ROWS), AT_ONCE * rows * LANES);
    let (cells, turns) = (w.k().div_ceil(SUPER), sums.len().div_ceil(turn));
    // Weights in their order, as long as the activations of all cells are near; else those of a cell are.
    let by_cell = size_of_val(acts) > NEAR;
    for i in 0..turns * cells {
        let (s, t) = if by_cell { (i / turns, i % turns) } else { (i % cells, i / cells) };
        let end = sums.len().min((t + 1) * turn);
        let (sums, acts) = (&mut sums[t * turn..end], &acts[s * strips..][..strips]);
        let prepared = &mut prepared[..sums.len() / (rows * LANES)];
        for (p, out) in prepared.iter_mut().enumerate() {
            (out.cell, out.first) = (w.cell(w.panel(first + t * AT_ONCE + p), s), s == 0);
            prepare::<V, C, S>(v, centre(w.format()), out, !by_cell);
        }
        let mut coming: [&[u8]; AT_ONCE] = [&[]; AT_ONCE];
        if by_cell && i + 1 < turns * cells {
            let (s, t) = ((i + 1) / turns, (i + 1) % turns);
            for (coming, p) in coming.iter_mut().zip(t * AT_ONCE..panels) {
                *coming = w.bytes_of(w.panel(first + p), s);
            }
        }
        amx.run(Multiply {
            v,
            acts,
            rows,
            prepared,
            sums,
            coming,
            offset: centre(w.format()),
            of: PhantomData::<(C, S)>,
        });
    }
}

#[inline(always)]
fn prepare<V: Integers, C: Codes, S: Scales>(v: V, centre: i32, out: &mut Prepared<'_>, ahead: bool) {
    let right: &mut [u8] = bytemuck::cast_slice_mut(&mut out.right.0);
    let groups = out.cell.codes.chunks_exact(C::BYTES).zip(out.cell.scales.chunks_exact(S::BYTES));
    // Of the upper half, if that has a minimum, and of the scale.
    let of_code_0 = v.splat(i32::from(S::PAIRS) << 16 | -centre & 0xffff);
    for (g, (group, scales)) in groups.enumerate().take(8) {
        if ahead {
            prefetch_ahead(group, AHEAD);
            prefetch_ahead(scales, AHEAD);
        }
        let (mut scale, mut min, mut base) = ([v.splat(0); 2], [v.splat(0); 2], [v.splat(0); 2]);
        for sub in 0..S::SUBS {
            (scale[sub], min[sub]) = S::read(v, scales, sub);
            base[sub] = v.add_pairs(scale[sub], of_code_0, v.splat(0));
        }
        for (sub, &min) in min.iter().enumerate().take(if S::MIN { S::SUBS } else { 0 }) {
            let mut lanes = Aligned([0f32; LANES]);
            v.store(v.float(min), &mut lanes.0);
            // Six bits: the upper half of an f32 has them all.
            for (pair, min) in out.minima.0[S::SUBS * g + sub].iter_mut().zip(lanes.0) {
                *pair = min.to_bits() | min.to_bits() >> 16;
            }
        }
        super::kernel::each!(I in [0 1 2 3 4 5 6 7] {
            let sub = I * S::SUBS / 8;
            let (high, low) = v.scaled(C::read::<V, I>(v, group), scale[sub], base[sub]);
            let at = 64 * (8 * g + I);
            v.store_bytes(low, &mut right[at..]);
            v.store_bytes(high, &mut right[4 * TILE + at..]);
        });
    }
}

/// Some panels' cells times all rows.
struct Multiply<'a, V: Integers, C, S> {
    v: V,
    acts: &'a [Strip],
    /// A multiple of 16.
    rows: usize,
    prepared: &'a [Prepared<'a>],
    sums: &'a mut [f32],
    /// Cells of the next turn, which lie apart: asked for on the way. 512 rows of Q4_K and Q4_0 were 1.03 times as fast.
    coming: [&'a [u8]; AT_ONCE],
    offset: i32,
    of: PhantomData<(C, S)>,
}

impl<V: Integers, C: Codes, S: Scales> TileKernel for Multiply<'_, V, C, S> {
    type Out = ();
    #[inline(always)]
    fn run(self, _: Avx512, tiles: Tiles) {
        let Self { v, acts, rows, prepared, sums, offset, coming, .. } = self;

        let own = |r: usize| ROWS.min(rows - r * ROWS);
        let mut product = Aligned([0i32; SUMS]);
        let mut minima = Aligned([0f32; ROWS * LANES]);
        let mut last: Option<(usize, usize)> = None;
        for (r, strip) in acts.iter().enumerate() {
            for cell in coming {
                let each = cell.len().div_ceil(acts.len()).next_multiple_of(64);
                prefetch_far(&cell[cell.len().min(r * each)..cell.len().min((r + 1) * each)]);
            }
            for (p, cell) in prepared.iter().enumerate() {
                // Groups beyond the last: activations are zeros.
                let steps = cell.cell.groups.div_ceil(2);
                for step in 0..steps {
                    let left = Left { data: strip.codes[step].as_flattened(), stride: 64 };
                    // Low and high, a step of four.
                    let right = Right { data: &cell.right.0[step * TILE..], stride: 4 * TILE };
                    match step {
                        0 => tiles.begin_i8(left, right, own(r) < ROWS, &mut product.0),
                        _ => tiles.step_i8(left, right, own(r) < ROWS),
                    }
                    // The cell before, some of its rows beside each step.
                    if let Some((p, r)) = last {
                        let at = (p * rows + r * ROWS) * LANES;
                        let (scales, sums) = (&acts[r].scales, &mut sums[at..at + own(r) * LANES]);
                        let now = own(r) * step / steps..own(r) * (step + 1) / steps;
                        finish::<V, S>(v, &product.0, &minima.0, now.clone(), &prepared[p], scales, sums);
                        add_taken::<V, C, S>(v, offset, prepared[p].cell, &acts[r].taken, now, sums);
                    }
                }
                if S::MIN {
                    let sums = Left { data: bytemuck::cast_slice(&strip.sums), stride: 64 };
                    tiles.product_pairs(sums, &cell.minima.0, &mut minima.0);
                }
                last = Some((p, r));
            }
        }
        if let Some((p, r)) = last {
            tiles.end(&mut product.0);
            let at = (p * rows + r * ROWS) * LANES;
            let sums = &mut sums[at..at + own(r) * LANES];
            finish::<V, S>(v, &product.0, &minima.0, 0..own(r), &prepared[p], &acts[r].scales, sums);
            add_taken::<V, C, S>(v, offset, prepared[p].cell, &acts[r].taken, 0..own(r), sums);
        }
    }
}

/// Adds what was taken out of some rows.
#[inline(always)]
fn add_taken<V: Integers, C: Codes, S: Scales>(
    v: V,
    offset: i32,
    cell: Cell<'_>,
    taken: &[Taken; ROWS],
    rows: Range<usize>,
    sums: &mut [f32],
) {
    for (taken, sum) in taken[rows.clone()].iter().zip(sums.chunks_exact_mut(LANES).skip(rows.start)) {
        if taken.count > 0 {
            super::kernel::add_taken::<V, C, S>(v, offset, cell, taken, sum);
        }
    }
}

/// The f32 steps on a cell's integers, for some of its rows.
#[inline(always)]
fn finish<V: Integers, S: Scales>(
    v: V,
    product: &[i32; SUMS],
    minima: &[f32; ROWS * LANES],
    rows: Range<usize>,
    of: &Prepared<'_>,
    scales: &[f32; ROWS],
    sums: &mut [f32],
) {
    let shared = of.cell.shared;
    let d = v.halves(shared);
    let m = if S::MIN { v.halves(&shared[2 * LANES..]) } else { d };
    let product = product[rows.start * 2 * LANES..rows.end * 2 * LANES].chunks_exact(2 * LANES);
    let sums = sums[rows.start * LANES..rows.end * LANES].chunks_exact_mut(LANES);
    let minima = minima[rows.start * LANES..rows.end * LANES].chunks_exact(LANES);
    for (((row, minima), &scale), sum) in product.zip(minima).zip(&scales[rows]).zip(sums) {
        let whole = v.mul_add(v.load_i32(&row[LANES..]), v.splat(256), v.load_i32(row));
        let mut t = v.mul(d, v.float(whole));
        if S::MIN {
            t = v.fnma(m, v.load(minima), t);
        }
        let old = if of.first { v.splat_f32(0.0) } else { v.load(sum) };
        v.store(v.fma(t, v.splat_f32(scale), old), sum);
    }
}
