//! More than few rows through AMX tiles, where every 32 elements have an f16 scale; `tiles.rs` has integer scales.
//!
//! A group's sums are wanted apart, so a product of tiles is one instruction: 16 rows, 16 columns, and a group of 32 alone
//! in the 64 deep tile that it shares with its neighbour, the rest zeros. Sums are exact in i32, as in [`super::kernel`],
//! and the f32 steps after it the same.
//!
//! What it costs, in cycles for a group and 16 rows on a Xeon of model 207: 16 for the tile instruction, 24 with the store
//! of its sums, and 16 for a conversion and a multiply-add of each row, 24 with minima. To read what a tile has just stored,
//! or a tile what a vector has, takes longer than all of that: so cells are unpacked one ahead of the tiles, and vectors
//! work one behind.

use std::marker::PhantomData;

use super::Activations;
use super::kernel::{AHEAD, Codes, Scales};
use super::pack::{Cell, LANES, Packed};
use crate::cpu::arch::{Amx, Avx512, Left, TileKernel, Tiles, prefetch_ahead};
use crate::cpu::integers::{Integers, PITCH};

/// Rows per product: a tile.
pub(super) const ROWS: usize = 16;
/// Most rows for which a cell is unpacked beside the tiles of the one before: then it comes from memory.
const CLOSE: usize = 64;
/// Bytes of a tile.
const TILE: usize = 1024;

#[derive(Clone, Copy)]
#[repr(align(64))]
struct Aligned<T>(T);

/// Four tiles: half a cell.
type Four = Aligned<[i8; 4 * TILE]>;
/// The sums of a cell and 16 rows, by group.
type Sums = Aligned<[[[i32; ROWS * LANES]; 4]; 2]>;

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
    amx.run(Unit { v, acts, w, first, rows, sums, of: PhantomData::<(C, S)> });
}

struct Unit<'a, V, C, S> {
    v: V,
    /// `[cells, rows]`
    acts: &'a [Activations],
    w: &'a Packed,
    first: usize,
    rows: usize,
    sums: &'a mut [f32],
    of: PhantomData<(C, S)>,
}

impl<V: Integers, C: Codes, S: Scales> TileKernel for Unit<'_, V, C, S> {
    type Out = ();
    #[inline(always)]
    fn run(self, _: Avx512, tiles: Tiles) {
        let Self { v, acts, w, first, rows, sums, .. } = self;
        let (cells, panels) = (acts.len() / rows, sums.len() / (rows * LANES));
        let (data, bytes) = w.panels(first, panels);
        let cell_of = |panel: usize, s: usize| w.cell(&data[panel * bytes..][..bytes], s);
        let offset = w.format().offset() as u8;
        // What a cell leaves of the last one's tiles, fewer groups than it had, is not looked at.
        let mut right: [[Four; 2]; 2] = [[Aligned([0; 4 * TILE]); 2]; 2];
        let mut buffers: [Sums; 2] = [Aligned([[[0; ROWS * LANES]; 4]; 2]); 2];
        let mut pipe = Pipe { now: 0, half: 0, scales: &[], acts: 0, sums: 0 };
        if rows <= CLOSE {
            // A panel meets all rows before the next, so that weights are read in their order.
            let mut scales = prepare::<V, C, S>(v, cell_of(0, 0), offset, true, &mut right[0]);
            let (mut panel, mut s) = (0, 0);
            for turn in 0..cells * panels {
                let (next_panel, next_s) = if s + 1 < cells { (panel, s + 1) } else { (panel + 1, 0) };
                let mut next: &[u8] = &[];
                for r in (0..rows).step_by(ROWS) {
                    let (at, to) = (s * rows + r, (panel * rows + r) * LANES);
                    pipe.begin::<S>(tiles, &right[turn % 2], scales, &acts[at..], &mut buffers);
                    if r == 0 && next_panel < panels {
                        let cell = cell_of(next_panel, next_s);
                        next = prepare::<V, C, S>(v, cell, offset, true, &mut right[1 - turn % 2]);
                    }
                    pipe.finish::<V, S>(v, acts, &buffers, sums);
                    (pipe.scales, pipe.acts, pipe.sums) = (scales, at, to);
                }
                (panel, s, scales) = (next_panel, next_s, next);
            }
        } else {
            // Rows come from the second-level cache, for two panels each time.
            for (s, panel) in (0..cells).flat_map(|s| (0..panels).step_by(2).map(move |panel| (s, panel))) {
                let count = 2.min(panels - panel);
                let mut scales = [&[][..]; 2];
                for p in 0..count {
                    scales[p] = prepare::<V, C, S>(v, cell_of(panel + p, s), offset, false, &mut right[p]);
                }
                for r in (0..rows).step_by(ROWS) {
                    for (p, &scales) in scales.iter().enumerate().take(count) {
                        let (at, to) = (s * rows + r, ((panel + p) * rows + r) * LANES);
                        pipe.begin::<S>(tiles, &right[p], scales, &acts[at..], &mut buffers);
                        pipe.finish::<V, S>(v, acts, &buffers, sums);
                        (pipe.scales, pipe.acts, pipe.sums) = (scales, at, to);
                    }
                }
            }
        }
        tiles.end_four_i8(&mut buffers[1 - pipe.now].0[pipe.half]);
        pipe.now = 1 - pipe.now;
        pipe.finish::<V, S>(v, acts, &buffers, sums);
    }
}

/// Products in a row, of a cell and 16 rows each: tiles work on one while vectors work on the one before.
struct Pipe<'a> {
    /// The buffer of the product that begins.
    now: usize,
    /// The half of the last product that is still in tiles.
    half: usize,
    /// Of the product before: the cell's scales, none if there is no such product, and where its rows' activations and sums
    /// begin. Plain numbers: to copy a structure in wide pieces right after it was written would wait for every store of
    /// the tiles, a sixth of the time.
    scales: &'a [u8],
    acts: usize,
    sums: usize,
}

impl Pipe<'_> {
    /// Begins the product of a cell with these scales and of the first 16 rows.
    #[inline(always)]
    fn begin<S: Scales>(
        &mut self,
        tiles: Tiles,
        right: &[Four; 2],
        scales: &[u8],
        acts: &[Activations],
        buffers: &mut [Sums; 2],
    ) {
        let data: &[i8] = bytemuck::cast_slice(&acts[..ROWS]);
        tiles.begin_four_i8(Left { data, stride: 4 * PITCH }, &right[0].0, &mut buffers[1 - self.now].0[self.half]);
        self.half = 0;
        if scales.len() > 4 * S::bytes() {
            let left = Left { data: &data[128..], stride: 4 * PITCH };
            tiles.begin_four_i8(left, &right[1].0, &mut buffers[self.now].0[0]);
            self.half = 1;
        }
        self.now = 1 - self.now;
    }

    /// The f32 steps on the sums of the product before the one that began last.
    #[inline(always)]
    fn finish<V: Integers, S: Scales>(&self, v: V, acts: &[Activations], buffers: &[Sums; 2], sums: &mut [f32]) {
        if self.scales.is_empty() {
            return;
        }
        let acts: &[Activations; ROWS] = acts[self.acts..].first_chunk().expect("16 rows");
        let sums: &mut [f32; ROWS * LANES] = sums[self.sums..].first_chunk_mut().expect("16 rows");
        let product: &[[i32; ROWS * LANES]] = buffers[self.now].0.as_flattened();
        let mut t = [v.splat_f32(0.0); ROWS];
        for (g, (scales, product)) in self.scales.chunks_exact(S::bytes()).zip(product).enumerate() {
            let d = v.halves(scales);
            for r in 0..ROWS {
                t[r] = v.fma(d, v.float(v.load_i32(&product[r * LANES..])), t[r]);
            }
            if S::MIN {
                let m = v.halves(&scales[2 * LANES..]);
                for r in 0..ROWS {
                    t[r] = v.fma(m, v.splat_f32(acts[r].sum(g)), t[r]);
                }
            }
        }
        for r in 0..ROWS {
            let sum = &mut sums[r * LANES..][..LANES];
            v.store(v.fma(t[r], v.splat_f32(acts[r].scale), v.load(sum)), sum);
        }
    }
}

/// Unpacks a cell's codes: tile `g` has group `g`, the second of two in its second half. Gives back its scales.
#[inline(always)]
fn prepare<'a, V: Integers, C: Codes, S: Scales>(
    v: V,
    cell: Cell<'a>,
    offset: u8,
    ahead: bool,
    out: &mut [Four; 2],
) -> &'a [u8] {
    let groups = cell.codes.chunks_exact(C::BYTES).zip(cell.scales.chunks_exact(S::bytes()));
    for (g, (group, scales)) in groups.enumerate().take(8) {
        if ahead {
            prefetch_ahead(group, AHEAD);
            prefetch_ahead(scales, AHEAD);
        }
        let tile = &mut bytemuck::cast_slice_mut::<i8, u8>(&mut out[g / 4].0)[g % 4 * TILE + g % 2 * (TILE / 2)..];
        super::kernel::each!(I in [0 1 2 3 4 5 6 7] {
            v.store_bytes(v.sub_bytes(C::read::<V, I>(v, group), offset), &mut tile[64 * I..]);
        });
    }
    cell.scales
}
