//! Many rows through AMX tiles.
//!
//! A product of tiles is exact in i32, as the instructions of [`super::kernel`] are, so the f32 steps after it see the
//! same integers. Of a cell the right operand is eight tiles, 256 deep and 16 columns wide twice:
//!
//! * integer scales: `sc * q`, up to 13 bits, as `256 * high + low` in signed bytes. One product over the whole depth
//!   gives the sums of both parts, and one pass of vectors per cell joins them.
//! * f16 scales: `q`, each group of 32 alone in the 64 deep tile that it shares with its neighbour, the rest zeros. One
//!   product of one step gives the sums of both groups.

use std::marker::PhantomData;

use super::kernel::{Codes, Scales};
use super::pack::{Cell, LANES, Packed};
use super::{Activations, MANY as ROWS};
use crate::cpu::arch::{Amx, Avx512, Left, Right, Sums, TileKernel, Tiles};
use crate::cpu::integers::{Integers, PITCH};
use crate::cpu::vector::Vector;

/// Panels against which all rows are multiplied in turn: 16 KB of tiles, in the first-level cache beside the rows' 8 KB
/// and the sums of two products.
const AT_ONCE: usize = 2;
/// Bytes of a tile.
const TILE: usize = 1024;
/// Sums of a product: two tiles beside two.
const SUMS: usize = ROWS * 2 * LANES;

#[derive(Clone, Copy)]
#[repr(align(64))]
struct Aligned<T>(T);

/// What is made of a cell for all rows.
#[derive(Clone, Copy)]
struct Prepared<'a, V: Integers> {
    cell: Cell<'a>,
    right: Aligned<[i8; 8 * TILE]>,
    /// Integer minima, as f32.
    minima: [V::F; 16],
}

/// Adds to `sums`, `[panels, rows, 16]`, the product of the panels from `first` on and all rows of `acts`.
#[inline(always)]
pub(super) fn run<V: Integers, C: Codes, S: Scales>(
    v: V,
    amx: Amx,
    acts: &[Activations],
    w: &Packed,
    first: usize,
    rows: usize,
    sums: &mut [f32],
) {
    // What a cell leaves of the last one's tiles, fewer groups than it had, is not looked at.
    let cell = Cell { groups: 0, codes: &[], scales: &[], shared: &[] };
    let (right, minima) = (Aligned([0; 8 * TILE]), [v.splat_f32(0.0); 16]);
    let mut prepared = [Prepared::<V> { cell, right, minima }; AT_ONCE];
    for (s, acts) in acts.chunks_exact(rows).enumerate() {
        for (group, sums) in sums.chunks_mut(AT_ONCE * rows * LANES).enumerate() {
            let prepared = &mut prepared[..sums.len() / (rows * LANES)];
            for (p, out) in prepared.iter_mut().enumerate() {
                out.cell = w.cell(w.panel(first + group * AT_ONCE + p), s);
                prepare::<V, C, S>(v, w.format().offset() as u8, out);
            }
            amx.run(Multiply { v, acts, prepared, sums, of: PhantomData::<S> });
        }
    }
}

#[inline(always)]
fn prepare<V: Integers, C: Codes, S: Scales>(v: V, offset: u8, out: &mut Prepared<'_, V>) {
    let right: &mut [u8] = bytemuck::cast_slice_mut(&mut out.right.0);
    let scale_bytes = S::bytes();
    let groups = out.cell.codes.chunks_exact(C::BYTES).zip(out.cell.scales.chunks_exact(scale_bytes));
    for (g, (group, scales)) in groups.enumerate().take(8) {
        let (mut scale, mut min) = ([v.splat(0); 2], [v.splat(0); 2]);
        if S::INTEGERS {
            for sub in 0..S::SUBS {
                (scale[sub], min[sub]) = S::read(v, scales, sub);
                if S::MIN {
                    out.minima[S::SUBS * g + sub] = v.float(min[sub]);
                }
            }
        }
        super::kernel::each!(I in [0 1 2 3 4 5 6 7] {
            let levels = v.sub_bytes(C::read::<V, I>(v, group), offset);
            if S::INTEGERS {
                let (high, low) = v.scaled(levels, scale[I * S::SUBS / 8]);
                let at = 64 * (8 * g + I);
                v.store_bytes(low, &mut right[at..]);
                v.store_bytes(high, &mut right[4 * TILE + at..]);
            } else {
                // Tile `g`; the second of two groups lies in its second half.
                v.store_bytes(levels, &mut right[g * TILE + 64 * (8 * (g % 2) + I)..]);
            }
        });
    }
}

/// Some panels' cells times all rows.
struct Multiply<'a, V: Integers, S> {
    v: V,
    acts: &'a [Activations],
    prepared: &'a [Prepared<'a, V>],
    sums: &'a mut [f32],
    of: PhantomData<S>,
}

impl<V: Integers, S: Scales> TileKernel for Multiply<'_, V, S> {
    type Out = ();
    #[inline(always)]
    fn run(self, vectors: Avx512, tiles: Tiles) {
        let Self { v, acts, prepared, sums, .. } = self;
        let (rows, products) = (acts.len(), if S::INTEGERS { 1 } else { 4 });
        // Vectors finish one product while tiles compute the next.
        let mut buffers = [const { Aligned([0i32; 4 * SUMS]) }; 2];
        let mut turn = 0;
        let mut last: Option<(usize, usize)> = None;
        for r in (0..rows).step_by(ROWS) {
            let data: &[i8] = bytemuck::cast_slice(&acts[r..r + ROWS]);
            // A tile's load waits for sixteen lines; nothing but this asks for them ahead.
            vectors.prefetch(&acts[r + ROWS..rows.min(r + 2 * ROWS)]);
            for (p, cell) in prepared.iter().enumerate() {
                for i in 0..products {
                    let out = Sums { data: &mut buffers[turn].0[i * SUMS..][..SUMS], stride: 2 * LANES };
                    // Integer scales: low and high, 4 steps deep. f16 scales: two groups, one step.
                    let (steps, stride) = if S::INTEGERS { (4, 4 * TILE) } else { (1, TILE) };
                    let right = Right { data: &cell.right.0[2 * i * TILE..], stride };
                    let left = Left { data: &data[64 * i..], stride: 4 * PITCH };
                    tiles.product_i8::<2, 2>(left, right, steps, out, false);
                }
                turn = 1 - turn;
                if let Some((p, r)) = last {
                    let sums = &mut sums[(p * rows + r) * LANES..][..ROWS * LANES];
                    finish::<V, S>(v, &buffers[turn].0, &prepared[p], &acts[r..r + ROWS], sums);
                }
                last = Some((p, r));
            }
        }
        if let Some((p, r)) = last {
            let sums = &mut sums[(p * rows + r) * LANES..][..ROWS * LANES];
            finish::<V, S>(v, &buffers[1 - turn].0, &prepared[p], &acts[r..r + ROWS], sums);
        }
    }
}

/// The f32 steps on a product's integers.
#[inline(always)]
fn finish<V: Integers, S: Scales>(
    v: V,
    product: &[i32; 4 * SUMS],
    of: &Prepared<'_, V>,
    acts: &[Activations],
    sums: &mut [f32],
) {
    let cell = of.cell;
    let (mut d, mut m) = ([v.splat_f32(0.0); 8], [v.splat_f32(0.0); 8]);
    let shared = if S::INTEGERS { cell.shared } else { cell.scales };
    for (g, scales) in shared.chunks_exact(2 * LANES * (1 + usize::from(S::MIN))).enumerate().take(8) {
        d[g] = v.halves(scales);
        if S::MIN {
            m[g] = v.halves(&scales[2 * LANES..]);
        }
    }
    for ((r, acts), sum) in acts.iter().enumerate().zip(sums.chunks_exact_mut(LANES)) {
        let row = &product[r * 2 * LANES..];
        let mut t = v.splat_f32(0.0);
        if S::INTEGERS {
            let whole = v.mul_add(v.load_i32(&row[LANES..]), v.splat(256), v.load_i32(row));
            t = v.mul(d[0], v.float(whole));
            if S::MIN {
                let mut minima = v.splat_f32(0.0);
                for j in 0..8 * S::SUBS {
                    minima = v.fma(of.minima[j], v.splat_f32(acts.sum(j)), minima);
                }
                t = v.fnma(m[0], minima, t);
            }
        } else {
            for g in 0..8 {
                if g < cell.groups {
                    t = v.fma(d[g], v.float(v.load_i32(&row[g / 2 * SUMS + g % 2 * LANES..])), t);
                    if S::MIN {
                        t = v.fma(m[g], v.splat_f32(acts.sum(g)), t);
                    }
                }
            }
        }
        v.store(v.fma(t, v.splat_f32(acts.scale), v.load(sum)), sum);
    }
}
