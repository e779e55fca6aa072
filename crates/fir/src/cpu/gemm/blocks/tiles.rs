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

use bytemuck::{Pod, Zeroable};

use super::kernel::{AHEAD, Codes, Scales};
use super::pack::{Cell, LANES, Packed, SUPER};
use super::{Line, MANY as ROWS, NEAR, Strip, centre};
use crate::cpu::arch::{Aligned, Amx, Avx512, Left, Right, TileKernel, Tiles, prefetch_ahead, prefetch_far};
use crate::cpu::integers::Integers;

/// Panels against which many rows are multiplied in turn: 16 KB of tiles, in the first-level cache beside the rows' 8 KB
/// and the sums of two products. Of few rows, whose panels are read in order, one: 32 rows of Q4_1 were 1.42 times as fast.
const AT_ONCE: usize = 2;
/// Bytes of a tile.
const TILE: usize = 1024;
/// Sums of a product: two tiles beside two.
const SUMS: usize = ROWS * 2 * LANES;

/// What is made of a panel's cell for all rows.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Prepared {
    right: [[i8; TILE]; 8],
    /// Integer minima by sub-block, each as bf16 twice: for the two parts of its sum of activations.
    minima: [[u32; LANES]; 16],
}

/// What a thread works in.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
struct Scratch {
    /// What a cell leaves of the last one's, fewer groups than it had, meets zeros.
    prepared: [Prepared; AT_ONCE],
    product: [i32; SUMS],
    minima: [f32; ROWS * LANES],
}

/// A block: a strip of rows times a panel's cell.
#[derive(Clone, Copy)]
struct Block<'a> {
    cell: Cell<'a>,
    strip: &'a Strip,
    /// Its rows, of which there are 16 at the end of some.
    rows: usize,
    /// Where its sums begin.
    at: usize,
    /// Whether nothing was added to them.
    first: bool,
}

thread_local! {
    /// Kept, as zeros of this size take as long as a cell of 48 rows.
    static SCRATCH: std::cell::Cell<Vec<Scratch>> = const { std::cell::Cell::new(Vec::new()) };
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
    let mut scratch = SCRATCH.take();
    scratch.resize(1, Scratch::zeroed());
    amx.run(Multiply { v, acts, w, first, rows, sums, scratch: &mut scratch[0], of: PhantomData::<(C, S)> });
    SCRATCH.set(scratch);
}

struct Multiply<'a, V, C, S> {
    v: V,
    acts: &'a [Strip],
    w: &'a Packed,
    first: usize,
    /// A multiple of 16.
    rows: usize,
    sums: &'a mut [Line],
    scratch: &'a mut Scratch,
    of: PhantomData<(C, S)>,
}

impl<V: Integers, C: Codes, S: Scales> TileKernel for Multiply<'_, V, C, S> {
    type Out = ();
    #[inline(always)]
    fn run(self, _: Avx512, tiles: Tiles) {
        let Self { v, acts, w, first, rows, sums, scratch: Scratch { prepared, product, minima }, .. } = self;
        let offset = centre(w.format());
        let (panels, cells, strips) = (sums.len() / rows, w.k().div_ceil(SUPER), rows.div_ceil(ROWS));
        let mut pipe = Pipe { v, tiles, offset, sums, product, minima, last: None, of: PhantomData::<(C, S)> };
        // Weights in their order, as long as the activations of all cells are near; else those of a cell are.
        let by_cell = size_of_val(acts) > NEAR;
        let once = if by_cell { AT_ONCE } else { 1 };
        let turns = panels.div_ceil(once);
        let place = |i: usize| if by_cell { (i / turns, i % turns) } else { (i % cells, i / cells) };
        for i in 0..turns * cells {
            let (s, turn) = place(i);
            let now = once * turn..panels.min(once * (turn + 1));
            let mut cells_now = [w.cell(w.panel(first + now.start), s); AT_ONCE];
            for ((cell, prepared), p) in cells_now.iter_mut().zip(&mut *prepared).zip(now.clone()) {
                *cell = w.cell(w.panel(first + p), s);
                prepare::<V, C, S>(v, offset, *cell, prepared, !by_cell);
            }
            // Cells of the next turn, which lie apart then, are asked for on the way: 512 rows of Q4_K and Q4_0 were 1.03 times as fast.
            let mut coming: [&[u8]; AT_ONCE] = [&[]; AT_ONCE];
            if by_cell && i + 1 < turns * cells {
                let (s, turn) = place(i + 1);
                for (coming, p) in coming.iter_mut().zip(turn * AT_ONCE..panels) {
                    *coming = w.bytes_of(w.panel(first + p), s);
                }
            }
            for (r, strip) in acts[s * strips..][..strips].iter().enumerate() {
                for cell in coming {
                    let each = cell.len().div_ceil(strips).next_multiple_of(64);
                    prefetch_far(&cell[cell.len().min(r * each)..cell.len().min((r + 1) * each)]);
                }
                for ((p, cell), prepared) in now.clone().zip(cells_now).zip(&*prepared) {
                    let block =
                        Block { cell, strip, rows: ROWS.min(rows - r * ROWS), at: p * rows + r * ROWS, first: s == 0 };
                    pipe.step(block, prepared);
                }
            }
        }
        pipe.end();
    }
}

#[inline(always)]
fn prepare<V: Integers, C: Codes, S: Scales>(v: V, centre: i32, cell: Cell<'_>, out: &mut Prepared, ahead: bool) {
    let right: &mut [u8] = bytemuck::cast_slice_mut(&mut out.right);
    let groups = cell.codes.chunks_exact(C::BYTES).zip(cell.scales.chunks_exact(S::BYTES));
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
            for (pair, min) in out.minima[S::SUBS * g + sub].iter_mut().zip(lanes.0) {
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

/// Tile products of a block beside the f32 steps of the one before. Of the one before that, whose sums lie in memory beside the next, was
/// slower: 512 rows of Q4_K by a fifth.
struct Pipe<'a, V, C, S> {
    v: V,
    tiles: Tiles,
    offset: i32,
    sums: &'a mut [Line],
    product: &'a mut [i32; SUMS],
    minima: &'a mut [f32; ROWS * LANES],
    last: Option<Block<'a>>,
    of: PhantomData<(C, S)>,
}

impl<'a, V: Integers, C: Codes, S: Scales> Pipe<'a, V, C, S> {
    #[inline(always)]
    fn step(&mut self, block: Block<'a>, prepared: &Prepared) {
        let half = block.rows < ROWS;
        // Groups beyond the last: activations are zeros.
        let steps = block.cell.groups.div_ceil(2);
        for step in 0..steps {
            let left = Left { data: block.strip.codes[step].as_flattened(), stride: 64 };
            // Low and high, a step of four.
            let right = Right { data: prepared.right[step..].as_flattened(), stride: 4 * TILE };
            match step {
                0 => self.tiles.begin_i8(left, right, half, self.product),
                _ => self.tiles.step_i8(left, right, half),
            }
            // Some of the rows beside each step.
            if let Some(last) = self.last {
                self.finish(last, last.rows * step / steps..last.rows * (step + 1) / steps);
            }
        }
        if S::MIN {
            let sums = Left { data: bytemuck::cast_slice(&block.strip.sums), stride: 64 };
            self.tiles.product_pairs(sums, &prepared.minima, self.minima);
        }
        self.last = Some(block);
    }

    /// Finishes the last block.
    #[inline(always)]
    fn end(&mut self) {
        if let Some(last) = self.last.take() {
            self.tiles.end(self.product);
            self.finish(last, 0..last.rows);
        }
    }

    /// The f32 steps on a block's integers, for some of its rows, and what was taken out of them.
    #[inline(always)]
    fn finish(&mut self, block: Block<'a>, rows: Range<usize>) {
        let (v, Block { cell, strip, at, first, .. }) = (self.v, block);
        let d = v.halves(cell.shared);
        let m = if S::MIN { v.halves(&cell.shared[2 * LANES..]) } else { d };
        let sums = &mut self.sums[at..][rows.clone()];
        let product = self.product.as_chunks::<{ 2 * LANES }>().0[rows.clone()].iter();
        let minima = self.minima.as_chunks::<LANES>().0[rows.clone()].iter();
        let scales = &strip.scales[rows.clone()];
        for (((Line(sum), row), minima), &scale) in sums.iter_mut().zip(product).zip(minima).zip(scales) {
            let whole = v.mul_add(v.load_i32(&row[LANES..]), v.splat(256), v.load_i32(row));
            let mut t = v.mul(d, v.float(whole));
            if S::MIN {
                t = v.fnma(m, v.load(minima), t);
            }
            let old = if first { v.splat_f32(0.0) } else { v.load(sum) };
            v.store(v.fma(t, v.splat_f32(scale), old), sum);
        }
        // Few rows have any: a loop of its own does not hold up the others, 1.09 times as fast for 512 rows of Q4_0.
        for (Line(sum), taken) in sums.iter_mut().zip(&strip.taken[rows]) {
            if taken.count > 0 {
                super::kernel::add_taken::<V, C, S>(v, self.offset, cell, taken, sum);
            }
        }
    }
}
