//! Matrix products on Hopper: which instantiation of `kernels/sm90_gemm.cuh`, and the maps that it copies by.

use super::arch::Arch;
use super::call::Call;
use super::driver::{Boxes, Grid, TensorMap};
use super::exec::Gpu;
use super::gemm::{GemmParams, Kind, Shape};
use super::jit::Source;
use super::norm::cpp;
use super::params::{Address, params};
use crate::error::{Error, Result};
use crate::tensor::DType;

params! {
    struct Sm90GemmParams = "fir::Sm90GemmParams" {
        x_map: TensorMap,
        w_map: TensorMap,
        gemm: GemmParams,
        tiles: u32,
        each: u32,
        unused: [u32; 2],
    }
}

/// Sizes of a tile: of a block, 64 rows to a warpgroup.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tile {
    rows: u32,
    columns: u32,
    stages: u32,
    /// Blocks of a cluster, one below the other.
    cluster: u32,
    /// Blocks on a multiprocessor at once.
    blocks: u32,
    /// Tenths of a µs that a wave of them takes for 4096 columns of `x`, on an H200.
    cost: u32,
}

impl Tile {
    const fn new([rows, columns, stages, cluster, blocks]: [u32; 5], cost: u32) -> Self {
        Self { rows, columns, stages, cluster, blocks, cost }
    }

    /// Rows of a cluster.
    pub(super) fn all_rows(&self) -> u32 {
        self.rows * self.cluster
    }

    /// Columns of the output.
    pub(super) fn out_columns(&self, gate: bool) -> u32 {
        if gate { self.columns / 2 } else { self.columns }
    }

    fn smem(&self, dtype: DType, folded: bool) -> u32 {
        // 128 bytes of a row, or 128 columns of 16 bits; and 2560 bytes for a warp that writes.
        let row = if folded && dtype.size() == 2 { 256 } else { 128 };
        self.stages * row * (self.rows + self.columns) + 2560 * self.rows / 16
    }
}

/// Tiles for 16-bit numbers. µs on an H200, cold, by weights of 4096 columns (cuBLAS; the best of `gemm.cuh`):
///
/// | rows x weights | 64 x 32 | 64 x 64 | 64 x 128 | 128 x 128 | 256 x 256 | cuBLAS | gemm.cuh |
/// |----------------|---------|---------|----------|-----------|-----------|--------|----------|
/// | 64 x 4096      | 18.1    | 17.8    | 21.4     | 27.1      | 47.2      | 17.7   | 23.2     |
/// | 256 x 4096     | 47.4    | 27.0    | 22.1     | 28.2      | 48.1      | 23.7   | 40.6     |
/// | 512 x 4096     | 89.0    | 50.9    | 36.1     | 29.6      | 48.4      | 27.9   | 61.4     |
/// | 4096 x 4096    |         |         |          | 185       | 177       | 176    | 404      |
/// | 64 x 28672     | 81.7    | 75.3    | 71.6     | 87.4      | 108       | 71.6   | 76.6     |
///
/// With two blocks to a multiprocessor 64 x 28672 takes 69.8, and 64 x 4096 29. Groups: 32 of 256 rows by 4096 x 4096 each take
/// 397 us (852 through `gemm.cuh`), 8 of 64 rows 77 (109, cuBLAS 80): 3.5 TB/s of weights. Gathered rows with a gate, 8192 of
/// 8 experts of 4096 x 14336: 3.9 ms (5.8).
const TILES: [Tile; 6] = [
    Tile::new([64, 32, 15, 1, 1], 105),
    Tile::new([64, 64, 12, 1, 1], 113),
    Tile::new([64, 128, 8, 1, 1], 155),
    Tile::new([64, 128, 4, 1, 2], 290),
    Tile::new([128, 128, 6, 1, 1], 240),
    Tile::new([128, 256, 4, 2, 1], 435),
];
/// Tiles for outputs of f32, whose sums are folded: 4096 x 4096 by 4096 takes 250 us.
const FOLDED: [Tile; 3] =
    [Tile::new([64, 64, 6, 1, 1], 120), Tile::new([64, 128, 4, 1, 1], 190), Tile::new([128, 128, 3, 1, 1], 310)];
/// Tiles for e4m3: 4096 x 4096 by 4096 takes 133 us with scales of 1 x 128 and 128 x 128 (cuBLAS with one for each tensor 102).
const FP8: [Tile; 4] = [
    Tile::new([64, 32, 15, 1, 1], 65),
    Tile::new([64, 64, 12, 1, 1], 75),
    Tile::new([64, 128, 8, 1, 1], 100),
    Tile::new([128, 128, 6, 1, 1], 165),
];
/// Fewer rows than this to a group are better off in smaller tiles, through `gemm.cuh`; the same bits.
const FEWEST: usize = 33;
/// Rows of `x` whose tiles come one after another: their columns of weights are read once, while they are in L2.
const BESIDE: u32 = 2048;

fn source(dtype: DType, tile: &Tile, gate: bool, folded: bool, gathered: bool) -> Source {
    let Tile { rows, columns, stages, cluster, .. } = tile;
    let tile = format!("fir::Sm90Tile<{rows}, {columns}, {stages}, {cluster}>");
    let name = format!("fir::sm90_gemm<{}, {tile}, {gate}, {folded}, {gathered}>", cpp(dtype));
    Source::new::<Sm90GemmParams>("sm90_gemm.cuh", name)
}

/// Every instantiation that [`choose`] may choose.
pub(super) fn kernels() -> Vec<Source> {
    let mut all = Vec::new();
    for dtype in [DType::F16, DType::BF16] {
        for tile in &TILES {
            // Gathered rows are those of experts, who have a gate.
            let forms = [(false, false), (true, false), (true, true)];
            all.extend(forms.map(|(gate, gathered)| source(dtype, tile, gate, false, gathered)));
        }
        for tile in &FOLDED {
            all.extend([false, true].map(|gate| source(dtype, tile, gate, true, false)));
        }
    }
    all.extend(FP8.iter().map(|tile| source(DType::E4M3, tile, false, true, false)));
    all
}

/// A tile and its kernel.
pub(super) struct Choice {
    pub(super) tile: &'static Tile,
    pub(super) source: Source,
    gate: bool,
    smem: u32,
    beside: u32,
}

/// The kernel for a product that it takes; `rows` and `n` may be zero.
///
/// What is asked of the rows' number is asked of 16-bit numbers alone, whose sums are the same here and in `gemm.cuh`.
pub(super) fn choose(gpu: &Gpu, kind: &Kind, shape: &Shape<'_>, n: usize) -> Option<Choice> {
    let &Kind { x, w, gate, aligned, exact, gathered, .. } = kind;
    if gpu.properties().arch != Arch::HOPPER || !aligned || kind.k == 0 || x != w {
        return None;
    }
    let (tiles, folded) = match x {
        DType::F16 | DType::BF16 if shape.each() < FEWEST || (exact && gathered) => return None,
        DType::F16 | DType::BF16 if exact => (&FOLDED[..], true),
        DType::F16 | DType::BF16 => (&TILES[..], false),
        DType::E4M3 if !exact && !gate && !gathered && kind.takes_fp8 => (&FP8[..], true),
        _ => return None,
    };
    let sms = gpu.properties().multiprocessors as usize;
    let time = |tile: &Tile| {
        let count = shape.row_tiles(tile.all_rows() as usize) * n.div_ceil(tile.out_columns(gate) as usize);
        count.div_ceil(sms * tile.blocks as usize / tile.cluster as usize) * tile.cost as usize
    };
    let tile = tiles.iter().min_by_key(|tile| time(tile))?;
    let rows = tile.all_rows();
    // As many as a group has, as the next group's weights are others.
    let beside = if shape.listed { shape.each().div_ceil(rows as usize) as u32 } else { u32::MAX };
    let beside = beside.clamp(1, (BESIDE / rows).max(1));
    Some(Choice { tile, source: source(x, tile, gate, folded, gathered), gate, smem: tile.smem(x, folded), beside })
}

impl Choice {
    /// Queues the product, of `batch` matrices.
    pub(super) fn launch(&self, gpu: &Gpu, call: &Call<'_>, p: GemmParams, batch: usize, dtype: DType) -> Result<()> {
        let Tile { rows, columns, cluster, blocks, .. } = *self.tile;
        let each = u64::from(p.row_tiles) * u64::from(p.n.div_ceil(self.tile.out_columns(self.gate)));
        let tiles = each * batch as u64;
        if tiles > i32::MAX as u64 {
            return Err(Error::value(call.op(), "out", format!("{tiles} tiles"), "at most 2^31 - 1 on CUDA"));
        }
        let map = |start: Address, [rows, matrices]: [u64; 2], [stride, apart]: [u64; 2], box_rows: u32| {
            let size = dtype.size() as u64;
            let row = (u64::from(p.k) * size).next_multiple_of(16);
            // Strides that are never used are whatever the caller's tensor had.
            let stride = if rows > 1 { stride * size } else { row };
            let apart = if matrices > 1 { apart * size } else { row };
            gpu.tensor_map(&Boxes {
                start: start.0,
                dtype,
                dims: &[p.k.into(), rows, matrices],
                strides: &[stride, apart],
                shape: &[128 / size as u32, box_rows, 1],
                // 8 groups of 64 rows: 77.1 us against 79.1; products of many rows gain nothing.
                in_order: blocks > 1,
            })
        };
        let weight_rows = u64::from(p.n) * if self.gate { 2 } else { 1 };
        let gathered = p.x_rows != Address(0);
        let x_map = if gathered {
            TensorMap([0; 16])
        } else {
            map(p.x, [p.m.into(), batch as u64], [p.x_stride, p.x_batch], rows)?
        };
        let params = Sm90GemmParams {
            x_map,
            w_map: map(p.w, [weight_rows, p.weights.into()], [p.w_stride, p.w_batch], columns / 2)?,
            gemm: GemmParams { beside: self.beside, ..p },
            tiles: tiles as u32,
            each: each as u32,
            unused: [0; 2],
        };
        let kernel = gpu.kernel(self.source.clone())?;
        let most = gpu.properties().multiprocessors * blocks / cluster;
        let grid = Grid::new(most.min(params.tiles) * cluster, 128 + 2 * rows);
        call.launch(&kernel, Grid { smem: self.smem, cluster, early: true, ..grid }, &params)
    }
}
