//! Formats with an f16 scale to 32 elements, through AMX tiles.
//!
//! Codes and quantized activations are integers of up to eight bits, exact in bf16, and the sum of 32 products is exact in
//! f32: one tile instruction multiplies the groups of 16 rows and of 16 columns, and leaves the numbers that
//! [`super::kernel`] has after its conversion. What is left to vectors is one multiply-add for 16 sums, and one more for
//! minima.
//!
//! What it costs, in cycles for 16 rows of a cell (16 × 16 sums, 256 deep), measured on a Xeon of model 207: eight tile
//! instructions of 16 cycles each, and to store a tile keeps the next instruction waiting for seven more: 182. With the
//! multiply-adds of a whole cell beside them, 16 a turn on the port that is left, 245, with minima 285, in the first-level
//! cache. Activations, 8.7 KB for 16 rows and so from the second level for every two panels, add 60 to 100; to ask for them
//! ahead adds 30 more, as what is asked for pushes out what is in use.

use std::marker::PhantomData;

use bytemuck::{Pod, Zeroable};

use super::kernel::{Codes, Scales, each};
use super::pack::{Cell, GROUP, LANES, Packed, SUPER};
use super::{Activations, Line, Quantized};
use crate::cpu::arch::{Amx, Avx512, TileKernel, Tiles};
use crate::cpu::integers::Integers;
use crate::tensor::bf16;

/// Groups of a cell.
const GROUPS: usize = SUPER / GROUP;
/// bf16 of a tile.
const TILE: usize = LANES * GROUP;
/// Panels that a block of rows is multiplied by before the next.
const AT_ONCE: usize = 2;
/// Bytes of activations that stay in the second-level cache beside the rest. Those of all cells then do, and weights are
/// read in their order.
const NEAR: usize = 1 << 20;

/// 256 elements of 16 rows of `x`, quantized.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
pub(super) struct Sixteen {
    /// By group a tile: rows of 32 integers, of each four of which the second and the third have changed places, as in
    /// [`Tiles::widen_codes`].
    codes: [[bf16; TILE]; GROUPS],
    /// By group: sums of the rows' integers.
    sums: [[f32; LANES]; GROUPS],
    scales: [f32; LANES],
}

impl Quantized for Sixteen {
    const ROWS: usize = LANES;
    type With = Amx;
    #[inline(always)]
    fn put(&mut self, amx: Amx, row: usize, acts: &Activations) {
        for (g, (codes, words)) in self.codes.iter_mut().zip(acts.words.as_chunks().0).enumerate() {
            amx.widen_integers(words, &mut codes.as_chunks_mut().0[row]);
            self.sums[g][row] = acts.sum(g);
        }
        self.scales[row] = acts.scale;
    }
}

/// Codes of a panel's cell: by group a tile.
type Tiled = [[bf16; TILE]; GROUPS];

/// Scales and minima of a panel's cell.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
struct Factors {
    d: [[f32; LANES]; GROUPS],
    m: [[f32; LANES]; GROUPS],
}

/// Sums of a block's groups.
type Products = [[f32; LANES * LANES]; GROUPS];

/// What a thread works in: 28 KB, which the first-level cache holds beside a block's activations and sums. With 16 KB more
/// of it everything takes twice as long.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
struct Scratch {
    codes: [Tiled; AT_ONCE],
    /// Of this turn and of the one before, whose last block is still to be finished.
    factors: [Factors; 2 * AT_ONCE],
    products: Products,
}

/// A block: 16 rows of a cell times a panel.
#[derive(Clone, Copy)]
struct Block {
    /// Which of `acts`.
    acts: usize,
    codes: usize,
    factors: usize,
    /// Where its sums begin.
    sums: usize,
    /// Whether nothing was added to them.
    first: bool,
}

thread_local! {
    /// Kept, as zeros of this size take as long as five cells of 16 rows.
    static SCRATCH: std::cell::Cell<Vec<Scratch>> = const { std::cell::Cell::new(Vec::new()) };
}

/// Puts to `sums`, `[panels, rows]`, the product of the panels from `first` on and all rows of `acts`, `[cells, rows / 16]`.
#[inline(always)]
pub(super) fn run<V: Integers, C: Codes, S: Scales>(
    v: V,
    amx: Amx,
    acts: &[Sixteen],
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
    acts: &'a [Sixteen],
    w: &'a Packed,
    first: usize,
    rows: usize,
    sums: &'a mut [Line],
    scratch: &'a mut Scratch,
    of: PhantomData<(C, S)>,
}

impl<V: Integers, C: Codes, S: Scales> TileKernel for Multiply<'_, V, C, S> {
    type Out = ();
    #[inline(always)]
    fn run(self, _: Avx512, tiles: Tiles) {
        let Self { v, acts, w, first, rows, sums, scratch: Scratch { codes, factors, products }, .. } = self;
        let (panels, cells, blocks) = (sums.len() / rows, w.k().div_ceil(SUPER), rows / LANES);
        let table = std::array::from_fn(|code| bf16::from_f32((code as i32 - w.format().offset()) as f32));
        let mut pipe = Pipe::<V, S> { v, tiles, acts, sums, products, last: None, of: PhantomData };
        let (turns, mut half) = (panels.div_ceil(AT_ONCE), 0);
        // Weights in their order, as long as the activations of all cells are near; else those of a cell are.
        let by_cell = size_of_val(acts) > NEAR;
        for i in 0..turns * cells {
            let (s, turn) = if by_cell { (i / turns, i % turns) } else { (i % cells, i / cells) };
            let now = AT_ONCE * turn..panels.min(AT_ONCE * (turn + 1));
            let to = i % 2 * AT_ONCE;
            let mut groups = 0;
            for ((codes, factors), p) in codes.iter_mut().zip(&mut factors[to..]).zip(now.clone()) {
                let cell = w.cell(w.panel(first + p), s);
                groups = cell.groups;
                prepare::<V, C, S>(v, tiles, &table, cell, codes, factors);
            }
            // An even number of groups, and no fewer than four, which are under way.
            let next = groups.div_ceil(2).max(2);
            if next != half {
                pipe.end(half, factors);
                half = next;
            }
            for r in 0..blocks {
                for (at, p) in now.clone().enumerate() {
                    let block = Block {
                        acts: s * blocks + r,
                        codes: at,
                        factors: to + at,
                        sums: p * rows + r * LANES,
                        first: s == 0,
                    };
                    match half {
                        2 => pipe.step::<2>(block, codes, factors),
                        3 => pipe.step::<3>(block, codes, factors),
                        _ => pipe.step::<4>(block, codes, factors),
                    }
                }
            }
        }
        pipe.end(half, factors);
    }
}

#[inline(always)]
fn prepare<V: Integers, C: Codes, S: Scales>(
    v: V,
    tiles: Tiles,
    table: &[bf16; 32],
    cell: Cell<'_>,
    codes: &mut Tiled,
    factors: &mut Factors,
) {
    let groups = cell.codes.chunks_exact(C::BYTES).zip(cell.scales.chunks_exact(S::bytes()));
    for (g, (group, scales)) in groups.enumerate().take(GROUPS) {
        let (vectors, _) = codes[g].as_chunks_mut::<64>();
        each!(I in [0 1 2 3 4 5 6 7] {
            let mut bytes = [0; 64];
            v.store_bytes(C::read::<V, I>(v, group), &mut bytes);
            if C::WIDE {
                tiles.widen_bytes(&bytes, &mut vectors[I]);
            } else {
                tiles.widen_codes(table, &bytes, &mut vectors[I]);
            }
        });
        v.store(v.halves(scales), &mut factors.d[g]);
        if S::MIN {
            v.store(v.halves(&scales[2 * LANES..]), &mut factors.m[g]);
        }
    }
    // Groups that are not there add 0 times 0: activations are zeros.
    factors.d[cell.groups..].fill([0.0; LANES]);
    factors.m[cell.groups..].fill([0.0; LANES]);
}

/// Tile products of a block beside the f32 steps of the one before.
struct Pipe<'a, V, S> {
    v: V,
    tiles: Tiles,
    acts: &'a [Sixteen],
    sums: &'a mut [Line],
    products: &'a mut Products,
    last: Option<Block>,
    of: PhantomData<S>,
}

impl<V: Integers, S: Scales> Pipe<'_, V, S> {
    /// Begins a block of `2 * HALF` groups and finishes the one before: a turn begins a group, stores the sums of half a
    /// block ago, and adds those that were stored half a block before that.
    #[inline(always)]
    fn step<const HALF: usize>(&mut self, block: Block, codes: &[Tiled; AT_ONCE], factors: &[Factors]) {
        let (v, last) = (self.v, self.last.unwrap_or(block));
        let (left, right) = (&self.acts[block.acts].codes, &codes[block.codes]);
        let (acts, of) = (&self.acts[last.acts], &factors[last.factors]);
        let mut t = [v.splat_f32(0.0); LANES];
        each!(G in [0 1 2 3 4 5 6 7] {
            if G < 2 * HALF {
                let to = &mut self.products[(G + HALF) % (2 * HALF)];
                match G % HALF {
                    0 => self.tiles.turn_bf16::<0>(&left[G], &right[G], to),
                    1 => self.tiles.turn_bf16::<1>(&left[G], &right[G], to),
                    2 => self.tiles.turn_bf16::<2>(&left[G], &right[G], to),
                    _ => self.tiles.turn_bf16::<3>(&left[G], &right[G], to),
                }
                add::<V, S>(v, &mut t, &self.products[G], acts, of, G);
            }
        });
        if let Some(last) = self.last.replace(block) {
            finish(v, &t, acts, last.first, &mut self.sums[last.sums..last.sums + LANES]);
        }
    }

    /// Finishes the last block, of `2 * half` groups.
    #[inline(always)]
    fn end(&mut self, half: usize, factors: &[Factors]) {
        let Some(last) = self.last.take() else { return };
        each!(G in [0 1 2 3] {
            if G < half {
                self.tiles.end_turn::<G>(&mut self.products[half + G]);
            }
        });
        let (acts, of) = (&self.acts[last.acts], &factors[last.factors]);
        let mut t = [self.v.splat_f32(0.0); LANES];
        for (g, product) in self.products.iter().enumerate().take(2 * half) {
            add::<V, S>(self.v, &mut t, product, acts, of, g);
        }
        finish(self.v, &t, acts, last.first, &mut self.sums[last.sums..last.sums + LANES]);
    }
}

/// The f32 steps of group `g`.
#[inline(always)]
fn add<V: Integers, S: Scales>(
    v: V,
    t: &mut [V::F; LANES],
    product: &[f32; LANES * LANES],
    acts: &Sixteen,
    of: &Factors,
    g: usize,
) {
    let d = v.load(&of.d[g]);
    for (t, product) in t.iter_mut().zip(product.as_chunks::<LANES>().0) {
        *t = v.fma(d, v.load(product), *t);
    }
    if S::MIN {
        let m = v.load(&of.m[g]);
        for (t, &sum) in t.iter_mut().zip(&acts.sums[g]) {
            *t = v.fma(m, v.splat_f32(sum), *t);
        }
    }
}

/// The step of a cell: `t * scale` to the sums.
#[inline(always)]
fn finish<V: Integers>(v: V, t: &[V::F; LANES], acts: &Sixteen, first: bool, sums: &mut [Line]) {
    for ((Line(sum), &t), &scale) in sums.iter_mut().zip(t).zip(&acts.scales) {
        let old = if first { v.splat_f32(0.0) } else { v.load(sum) };
        v.store(v.fma(t, v.splat_f32(scale), old), sum);
    }
}
