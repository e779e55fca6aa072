//! Q8_0, with an f16 scale to 32 elements of eight bits, through AMX tiles.
//!
//! A tile is 64 elements deep, two groups. So a tile of activations meets two of codes, one whose second half is zeros and one
//! whose first is: the sums of either group, in i32, which [`super::kernel`] has, too. What is left to vectors is a conversion and
//! a multiply-add for 16 sums, and as arithmetic has one of two ports beside tiles, they are the bound. Integer scales have less
//! to do for vectors ([`super::tiles`]), but codes of eight bits leave them no more than eight.

use std::marker::PhantomData;

use bytemuck::{Pod, Zeroable};

use super::kernel::{AHEAD, Codes, Halves, add_taken, each};
use super::pack::{Cell, GROUP, LANES, Packed, SUPER};
use super::{Line, MANY, NEAR, Strip, centre};
use crate::cpu::arch::{Amx, Avx512, Left, PAIR, TileKernel, Tiles, prefetch_ahead};
use crate::cpu::integers::Integers;

/// Groups of a cell.
const GROUPS: usize = SUPER / GROUP;
/// Pairs of groups, which share a tile of activations.
const PAIRS: usize = GROUPS / 2;
/// Panels that a block of rows is multiplied by before the next.
const AT_ONCE: usize = 2;

/// Codes of a panel's cell: by pair those of a group, half a tile of zeros, those of the other. So the tile from the first on
/// has the first half of 64 elements, and the one that ends with the last the second.
type Tiled = [[[i8; 16 * GROUP]; 3]; PAIRS];

/// Scales of a panel's cell.
type Factors = [[f32; LANES]; GROUPS];

/// Sums of a block's groups.
type Products = [[[i32; LANES * LANES]; 2]; PAIRS];

/// What a thread works in.
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
struct Block<'a> {
    cell: Cell<'a>,
    /// Which strip of `acts`, and which half of it.
    acts: (usize, usize),
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

/// Puts to `sums`, `[panels, rows]`, the product of the panels from `first` on and all rows of `acts`, `[cells, strips]`.
#[inline(always)]
pub(super) fn run<V: Integers, C: Codes>(
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
    amx.run(Multiply { v, acts, w, first, rows, sums, scratch: &mut scratch[0], of: PhantomData::<C> });
    SCRATCH.set(scratch);
}

struct Multiply<'a, V, C> {
    v: V,
    acts: &'a [Strip],
    w: &'a Packed,
    first: usize,
    rows: usize,
    sums: &'a mut [Line],
    scratch: &'a mut Scratch,
    of: PhantomData<C>,
}

impl<V: Integers, C: Codes> TileKernel for Multiply<'_, V, C> {
    type Out = ();
    #[inline(always)]
    fn run(self, _: Avx512, tiles: Tiles) {
        let Self { v, acts, w, first, rows, sums, scratch: Scratch { codes, factors, products }, .. } = self;
        let (panels, cells) = (sums.len() / rows, w.k().div_ceil(SUPER));
        let offset = centre(w.format());
        let mut pipe = Pipe { v, tiles, acts, offset, sums, products, last: None, of: PhantomData::<C> };
        let (turns, mut pairs) = (panels.div_ceil(AT_ONCE), 0);
        // Weights in their order, as long as the activations of all cells are near; else those of a cell are.
        let by_cell = size_of_val(acts) > NEAR;
        for i in 0..turns * cells {
            let (s, turn) = if by_cell { (i / turns, i % turns) } else { (i % cells, i / cells) };
            let now = AT_ONCE * turn..panels.min(AT_ONCE * (turn + 1));
            let to = i % 2 * AT_ONCE;
            let mut cells_now = [w.cell(w.panel(first + now.start), s); AT_ONCE];
            let mut groups = 0;
            for (at, ((codes, factors), p)) in codes.iter_mut().zip(&mut factors[to..]).zip(now.clone()).enumerate() {
                let cell = w.cell(w.panel(first + p), s);
                cells_now[at] = cell;
                groups = cell.groups;
                prepare::<V, C>(v, w.format().offset() as u8, cell, codes, factors, !by_cell);
            }
            let next = if groups <= GROUPS / 2 { PAIRS / 2 } else { PAIRS };
            if next != pairs {
                pipe.end(pairs, factors);
                pairs = next;
            }
            for r in (0..rows).step_by(LANES) {
                for (at, p) in now.clone().enumerate() {
                    let acts = (s * rows.div_ceil(MANY) + r / MANY, r / LANES % 2);
                    let block = Block {
                        cell: cells_now[at],
                        acts,
                        codes: at,
                        factors: to + at,
                        sums: p * rows + r,
                        first: s == 0,
                    };
                    if pairs == PAIRS {
                        pipe.step::<PAIRS>(block, codes, factors);
                    } else {
                        pipe.step::<{ PAIRS / 2 }>(block, codes, factors);
                    }
                }
            }
        }
        pipe.end(pairs, factors);
    }
}

#[inline(always)]
fn prepare<V: Integers, C: Codes>(
    v: V,
    offset: u8,
    cell: Cell<'_>,
    codes: &mut Tiled,
    factors: &mut Factors,
    ahead: bool,
) {
    let groups = cell.codes.chunks_exact(C::BYTES).zip(cell.scales.chunks_exact(2 * LANES));
    for (g, (group, scales)) in groups.enumerate().take(GROUPS) {
        if ahead {
            prefetch_ahead(group, AHEAD);
            prefetch_ahead(scales, AHEAD);
        }
        let half: &mut [u8; 16 * GROUP] = bytemuck::cast_mut(&mut codes[g / 2][g % 2 * 2]);
        let (vectors, _) = half.as_chunks_mut::<64>();
        each!(I in [0 1 2 3 4 5 6 7] { v.store_bytes(v.sub_bytes(C::read::<V, I>(v, group), offset), &mut vectors[I]); });
        v.store(v.halves(scales), &mut factors[g]);
    }
    // Groups that are not there add 0 times 0: activations are zeros.
    factors[cell.groups..].fill([0.0; LANES]);
}

/// Tile products of a block beside the f32 steps of the one before.
struct Pipe<'a, V, C> {
    v: V,
    tiles: Tiles,
    acts: &'a [Strip],
    offset: i32,
    sums: &'a mut [Line],
    products: &'a mut Products,
    last: Option<Block<'a>>,
    of: PhantomData<C>,
}

impl<'a, V: Integers, C: Codes> Pipe<'a, V, C> {
    /// Begins a block of `N` pairs and finishes the one before: a turn begins a pair, stores the sums of half a
    /// block ago, and adds those that were stored half a block before that.
    #[inline(always)]
    fn step<const N: usize>(&mut self, block: Block<'a>, codes: &[Tiled; AT_ONCE], factors: &[Factors]) {
        let (v, last) = (self.v, self.last.unwrap_or(block));
        let (left, right) = (&self.acts[block.acts.0].codes, &codes[block.codes]);
        let of = &factors[last.factors];
        let mut t = [v.splat_f32(0.0); LANES];
        each!(P in [0 1 2 3] {
            if P < N {
                let to = &mut self.products[(P + N / 2) % N];
                let left = Left { data: half(&left[P], block).as_flattened(), stride: 2 * GROUP };
                let right: &[i8; PAIR] = right[P].as_flattened().try_into().expect("three halves");
                if P.is_multiple_of(N / 2) {
                    self.tiles.turn_i8::<0>(left, right, to);
                } else {
                    self.tiles.turn_i8::<1>(left, right, to);
                }
                add(v, &mut t, &self.products[P], of, P);
            }
        });
        if let Some(last) = self.last.replace(block) {
            self.finish(&t, last);
        }
    }

    /// Finishes the last block, of so many pairs.
    #[inline(always)]
    fn end(&mut self, pairs: usize, factors: &[Factors]) {
        let Some(last) = self.last.take() else { return };
        if pairs == PAIRS {
            self.tiles.end_turn::<0>(&mut self.products[2]);
            self.tiles.end_turn::<1>(&mut self.products[3]);
        } else {
            self.tiles.end_turn::<0>(&mut self.products[1]);
        }
        let of = &factors[last.factors];
        let mut t = [self.v.splat_f32(0.0); LANES];
        for (p, product) in self.products.iter().enumerate().take(pairs) {
            add(self.v, &mut t, product, of, p);
        }
        self.finish(&t, last);
    }

    /// The step of a cell: `t * scale` to the sums, and what was taken out.
    #[inline(always)]
    fn finish(&mut self, t: &[V::F; LANES], block: Block<'a>) {
        let (v, acts, sums) = (self.v, &self.acts[block.acts.0], &mut self.sums[block.sums..block.sums + LANES]);
        let rows = half(&acts.scales, block).iter().zip(half(&acts.taken, block));
        for ((Line(sum), &t), (&scale, taken)) in sums.iter_mut().zip(t).zip(rows) {
            let old = if block.first { v.splat_f32(0.0) } else { v.load(sum) };
            v.store(v.fma(t, v.splat_f32(scale), old), sum);
            if taken.count > 0 {
                add_taken::<V, C, Halves>(v, self.offset, block.cell, taken, sum);
            }
        }
    }
}

/// Of a strip's rows those of a block.
#[inline(always)]
fn half<'b, T>(of: &'b [T; MANY], block: Block<'_>) -> &'b [T; LANES] {
    &of.as_chunks().0[block.acts.1]
}

/// The f32 steps of a pair of groups.
#[inline(always)]
fn add<V: Integers>(v: V, t: &mut [V::F; LANES], products: &[[i32; LANES * LANES]; 2], of: &Factors, pair: usize) {
    for (i, product) in products.iter().enumerate() {
        let d = v.load(&of[2 * pair + i]);
        for (t, product) in t.iter_mut().zip(product.as_chunks::<LANES>().0) {
            *t = v.fma(d, v.float(v.load_i32(product)), *t);
        }
    }
}
