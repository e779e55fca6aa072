//! Matrix products: which instantiation of `kernels/gemm.cuh` or `gemm_any.cuh`, and how the output is cut into tiles. What
//! Hopper takes by its own instructions is in `sm90_gemm.rs`.
//!
//! Every kernel adds along `k` in one order, so the tile may be chosen by the number of rows and no bit depends on it.

use super::call::Call;
use super::driver::Grid;
use super::exec::Gpu;
use super::jit::Source;
use super::norm::{check_float, cpp};
use super::params::{Address, params};
use super::sm90_gemm::{self, Choice};
use super::tokens::check_last_axis;
use crate::error::{Error, Result};
use crate::tensor::{DType, Layout, Scaled, TensorMut, TensorRef};

params! {
    pub(super) struct GemmParams = "fir::GemmParams" {
        x: Address,
        w: Address,
        out: Address,
        bias: Address,
        x_scales: Address,
        w_scales: Address,
        tiles: Address,
        weight_ids: Address,
        x_rows: Address,
        out_rows: Address,
        x_stride: u64,
        w_stride: u64,
        out_stride: u64,
        x_batch: u64,
        w_batch: u64,
        out_batch: u64,
        xs_stride: u64,
        ws_stride: u64,
        xs_batch: u64,
        ws_batch: u64,
        m: u32,
        n: u32,
        k: u32,
        row_tiles: u32,
        x_share: u32,
        weights: u32,
        wide_ids: u32,
        x_block_rows: u32,
        x_block_columns: u32,
        w_block_rows: u32,
        w_block_columns: u32,
        fold: u32,
        x_type: u32,
        w_type: u32,
        out_type: u32,
        bias_type: u32,
        then: u32,
        gate: u32,
        vector: u32,
        beside: u32,
    }
}

/// What becomes of the sums.
#[derive(Clone, Copy)]
pub(crate) enum Then<'a> {
    None,
    /// `[n]` is added to every row.
    Bias(TensorRef<'a>),
    /// The output is added to.
    Add,
    /// Twice as many weight rows as columns: `gate(sum j) * sum (n + j)`.
    Gate(Gate),
}

/// The function of a gate, by its number in `gemm_common.cuh`.
#[derive(Clone, Copy)]
pub(crate) enum Gate {
    Silu = 0,
    Gelu = 1,
    GeluTanh = 2,
}

/// A product, or a batch of them; shapes and scales are checked by the caller.
pub(crate) struct Product<'a> {
    /// `[m, k]` or `[batch, m, k]`
    pub(crate) x: Scaled<'a>,
    /// `[n, k]` or `[batch, n, k]`
    pub(crate) w: Scaled<'a>,
    /// `[m, n]` or `[batch, m, n]`
    pub(crate) out: TensorMut<'a>,
    pub(crate) then: Then<'a>,
}

/// Sizes of a tile of `gemm.cuh`.
#[derive(Clone, Copy)]
struct Tile {
    rows: u32,
    columns: u32,
    depth: u32,
    warp_rows: u32,
    warp_columns: u32,
    stages: u32,
    /// On a multiprocessor at once.
    blocks: u32,
    /// Tiles for each eight multiprocessors below which a smaller one is better.
    wanted: u32,
}

impl Tile {
    const fn new([rows, columns, depth, warp_rows, warp_columns, stages, blocks]: [u32; 7], wanted: u32) -> Self {
        Self { rows, columns, depth, warp_rows, warp_columns, stages, blocks, wanted }
    }

    fn threads(&self) -> u32 {
        32 * (self.rows / self.warp_rows) * (self.columns / self.warp_columns)
    }

    fn smem(&self, x: DType, w: DType) -> u32 {
        self.stages * self.depth * (self.rows * x.size() as u32 + self.columns * w.size() as u32)
    }

    /// Shared memory that is not in `smem`: which rows a block has, and with fp8 the scales of its stages.
    fn lists(&self, w: DType) -> u32 {
        4 * (self.rows + self.columns) * if is_fp8(w) { 1 + self.stages } else { 1 }
    }

    fn name(&self) -> String {
        let Self { rows, columns, depth, warp_rows, warp_columns, stages, blocks, .. } = self;
        format!("fir::GemmTile<{rows}, {columns}, {depth}, {warp_rows}, {warp_columns}, {stages}, {blocks}>")
    }
}

/// Tiles for weights of 16 bits, small ones first, as measured on an H200 (us, weights of 4096 columns):
///
/// | rows x weights | 32 x 32 | 32 x 64 | 64 x 64 | 64 x 128 | 128 x 128 |
/// |----------------|---------|---------|---------|----------|-----------|
/// | 32 x 4096      | 18.3    | 22.7    | 30.3    | 41.6     |           |
/// | 32 x 28672     | 79.9    | 70.7    | 103     | 73.6     |           |
/// | 64 x 6144      | 39.7    | 29.7    | 34.8    | 45.3     |           |
/// | 64 x 28672     | 123     | 103     | 107     | 75.0     |           |
/// | 128 x 4096     |         |         | 32.5    | 42.8     | 60.7      |
/// | 512 x 4096     |         |         | 84.0    | 64.9     | 61.3      |
///
/// 128 x 256 was no faster anywhere.
const TILES: [Tile; 7] = [
    Tile::new([16, 32, 128, 16, 16, 8, 2], 0),
    Tile::new([16, 64, 128, 16, 16, 5, 2], 16),
    Tile::new([32, 32, 128, 16, 16, 6, 2], 0),
    Tile::new([32, 64, 128, 32, 16, 4, 2], 8),
    Tile::new([64, 64, 64, 32, 32, 4, 3], 7),
    Tile::new([64, 128, 64, 32, 32, 3, 2], 7),
    Tile::new([128, 128, 64, 64, 64, 3, 2], 7),
];
/// Tiles for weights of 16 bits and an output of f32: a warp holds its sums twice, those of 128 columns and all.
const TILES_EXACT: [Tile; 7] =
    [TILES[0], TILES[1], TILES[2], TILES[3], TILES[4], TILES[5], Tile::new([128, 128, 64, 64, 32, 3, 1], 7)];
/// Tiles for weights of 8 bits. A warp holds its sums twice, with scales and without.
const TILES_FP8: [Tile; 5] = [
    Tile::new([16, 32, 128, 16, 16, 8, 2], 0),
    Tile::new([16, 64, 128, 16, 16, 6, 2], 16),
    Tile::new([32, 32, 128, 16, 16, 6, 2], 0),
    Tile::new([64, 64, 128, 32, 32, 3, 2], 8),
    Tile::new([128, 128, 128, 64, 32, 3, 1], 7),
];
/// The one whose operands are read element by element, where memory is not aligned for more.
const UNALIGNED: [Tile; 2] = [TILES[4], TILES_FP8[3]];

/// Row tiles that come one after another before the next columns.
const BESIDE: u32 = 16;
/// Columns of a tile of `gemm_any.cuh`.
const ANY_COLUMNS: u32 = 64;

fn is_fp8(dtype: DType) -> bool {
    matches!(dtype, DType::E4M3 | DType::E5M2)
}

fn source([x, w]: [DType; 2], tile: &Tile, gate: bool, vector: bool, exact: bool) -> Source {
    let name = format!("fir::gemm<{}, {}, {}, {gate}, {vector}, {exact}>", cpp(x), cpp(w), tile.name());
    Source::new::<GemmParams>("gemm.cuh", name)
}

fn any_source(rows: u32, gate: bool) -> Source {
    Source::new::<GemmParams>("gemm_any.cuh", format!("fir::gemm_any<{rows}, {gate}>"))
}

/// Every instantiation that [`launch`] may choose.
pub(super) fn kernels() -> Vec<Source> {
    let mut all = Vec::new();
    for rows in [16, 64] {
        all.extend([false, true].map(|gate| any_source(rows, gate)));
    }
    for (x, w) in pairs() {
        let (tiles, unaligned) = if is_fp8(w) { (&TILES_FP8[..], UNALIGNED[1]) } else { (&TILES[..], UNALIGNED[0]) };
        // Experts' rows are never fp8.
        for gate in [false, true].into_iter().filter(|gate| !(*gate && is_fp8(x))) {
            all.extend(tiles.iter().map(|tile| source([x, w], tile, gate, true, false)));
            all.push(source([x, w], &unaligned, gate, false, false));
            if !is_fp8(w) {
                all.extend(TILES_EXACT.iter().map(|tile| source([x, w], tile, gate, true, true)));
                all.push(source([x, w], &unaligned, gate, false, true));
            }
        }
    }
    all.extend(sm90_gemm::kernels());
    all
}

/// Types that tensor cores multiply without rounding them.
fn pairs() -> impl Iterator<Item = (DType, DType)> {
    let half = [DType::F16, DType::BF16];
    let fp8 = [DType::E4M3, DType::E5M2];
    half.map(|x| (x, x))
        .into_iter()
        .chain(fp8.into_iter().flat_map(move |w| half.into_iter().chain(fp8).map(move |x| (x, w))))
}

pub(super) fn type_code(dtype: DType) -> u32 {
    match dtype {
        DType::F32 => 0,
        DType::F16 => 1,
        DType::BF16 => 2,
        DType::E4M3 => 3,
        _ => 4,
    }
}

/// `[rows, columns]` of a matrix and the strides of its batch and its rows, in elements.
struct Matrix {
    batch: usize,
    rows: usize,
    columns: usize,
    strides: [u64; 2],
}

impl Matrix {
    fn new(op: &'static str, arg: &'static str, layout: &Layout) -> Result<Self> {
        let (shape, strides) = (layout.shape(), layout.strides());
        check_last_axis(op, arg, shape, strides)?;
        let (batch, rows, columns, strides) = match (shape, strides) {
            (&[r, c], &[s, _]) => (1, r, c, [0, s as u64]),
            (&[b, r, c], &[t, s, _]) => (b, r, c, [t as u64, s as u64]),
            _ => return Err(Error::Rank { op, arg, got: shape.len(), want: 3, axes: "at most".into() }),
        };
        for n in [batch, rows, columns] {
            if n > i32::MAX as usize && !layout.is_empty() {
                return Err(Error::value(op, arg, format!("{shape:?}"), "at most 2^31 - 1 along an axis on CUDA"));
            }
        }
        Ok(Self { batch, rows, columns, strides })
    }

    /// Whether every row begins on `bytes`.
    fn is_aligned(&self, start: Address, dtype: DType, bytes: u64) -> bool {
        let fits = |n: u64| n.wrapping_mul(dtype.size() as u64).is_multiple_of(bytes);
        // Kernels count in 32 bits, 16 bytes each.
        let extent = (self.rows as u64).saturating_mul(self.strides[1]).saturating_mul(dtype.size() as u64);
        start.0.is_multiple_of(bytes)
            && extent < 1 << 36
            && (self.rows <= 1 || fits(self.strides[1]))
            && (self.batch <= 1 || fits(self.strides[0]))
    }
}

/// How rows meet weights.
pub(super) struct Shape<'a> {
    /// Groups, or matrices of a batch.
    pub(super) groups: usize,
    /// Rows of all groups, or of one matrix.
    pub(super) rows: usize,
    /// Whether `tiles` lists the groups' rows.
    pub(super) listed: bool,
    /// Where groups begin and end, if the host knows.
    pub(super) indptr: Option<&'a [i32]>,
}

impl Shape<'_> {
    /// Rows of a group or matrix, of groups the mean.
    pub(super) fn each(&self) -> usize {
        if self.listed { self.rows.div_ceil(self.groups.max(1)) } else { self.rows }
    }

    /// Tiles of so many rows that there will be.
    pub(super) fn row_tiles(&self, rows: usize) -> usize {
        match self.indptr {
            Some(indptr) => indptr.windows(2).map(|w| (w[1] - w[0]).max(0) as usize).map(|n| n.div_ceil(rows)).sum(),
            // The last tile of a group is half full.
            None if self.listed => self.rows.div_ceil(rows) + self.groups / 2,
            None => self.groups * self.rows.div_ceil(rows),
        }
    }
}

/// A kernel chosen for a product.
pub(super) struct Chosen {
    source: Source,
    grid: Grid,
    /// Rows of a tile.
    pub(super) rows: u32,
    /// Columns of `out` in a tile.
    columns: u32,
    /// Columns after which sums are folded.
    fold: u32,
    /// With the type of its operands.
    hopper: Option<(Choice, DType)>,
}

/// Types and alignment of a product.
#[derive(Clone, Copy)]
pub(super) struct Kind {
    pub(super) x: DType,
    pub(super) w: DType,
    pub(super) gate: bool,
    /// Both operands' rows begin on 16 bytes.
    pub(super) aligned: bool,
    /// Columns after which scales change.
    pub(super) fold: u32,
    pub(super) k: usize,
    /// Sums are to be as those of f32 arithmetic: the output is f32.
    pub(super) exact: bool,
    /// Rows of `x` are found through a list.
    pub(super) gathered: bool,
    /// Scales, if any, are those that fp8 products of `sm90_gemm.cuh` take.
    pub(super) takes_fp8: bool,
}

impl Kind {
    pub(super) fn new(x: &Side, w: &Side, gate: bool) -> Self {
        let aligned = x.is_aligned() && w.is_aligned();
        // Parts of 128 columns, or the whole of k; parts of weights' rows that a tile does not cut.
        let parts = [x, w].iter().all(|s| s.fold.is_none_or(|n| n == 128));
        let rows = w.fold.is_none() || w.block[0].is_multiple_of(128) || w.block[0] as usize >= w.matrix.rows;
        Self {
            x: x.dtype,
            w: w.dtype,
            gate,
            aligned,
            fold: fold([x, w]),
            k: x.matrix.columns,
            exact: false,
            gathered: false,
            takes_fp8: parts && rows,
        }
    }
}

impl Chosen {
    pub(super) fn new(gpu: &Gpu, kind: Kind, shape: &Shape<'_>, n: usize) -> Self {
        let Kind { x, w, gate, aligned, fold, exact, .. } = kind;
        let each = shape.each();
        let weight_rows = if gate { 2 * n } else { n };
        let (sms, smem) = (gpu.properties().multiprocessors as usize, gpu.properties().shared_per_block as usize);
        if !pairs().any(|pair| pair == (x, w)) || (gate && is_fp8(x)) || (fold < u32::MAX && !fold.is_multiple_of(128))
        {
            let rows = if each <= 16 { 16 } else { 64 };
            let columns = if gate { ANY_COLUMNS / 2 } else { ANY_COLUMNS };
            return Self { source: any_source(rows, gate), grid: Grid::new(0, 256), rows, columns, fold, hopper: None };
        }
        // Those of parts of k end on a multiple of 128 too.
        let fold = if exact { 128 } else { fold };
        if let Some(choice) = sm90_gemm::choose(gpu, &kind, shape, n) {
            let (source, grid) = (choice.source.clone(), Grid::new(0, 0));
            let (rows, columns) = (choice.tile.all_rows(), choice.tile.out_columns(gate));
            return Self { source, grid, rows, columns, fold, hopper: Some((choice, x)) };
        }
        let exact = exact && !is_fp8(w);
        let tile = if aligned {
            let tiles = match is_fp8(w) {
                true => &TILES_FP8[..],
                false if exact => &TILES_EXACT[..],
                false => &TILES[..],
            };
            let fits = |t: &&Tile| (t.smem(x, w) + t.lists(w)) as usize <= smem;
            let count =
                |t: &Tile| shape.groups * each.div_ceil(t.rows as usize) * weight_rows.div_ceil(t.columns as usize);
            let rows = match each {
                ..=16 => 16..=16,
                17..=32 => 32..=32,
                33..=64 => 32..=64,
                _ => 32..=128,
            };
            // The largest tile of which there are enough for every multiprocessor, or else the smallest.
            let enough = |t: &&Tile| 8 * count(t) >= t.wanted as usize * sms;
            let mut able = tiles.iter().filter(|t| rows.contains(&t.rows)).filter(fits);
            able.rfind(enough).copied().unwrap_or(tiles[0])
        } else {
            UNALIGNED[usize::from(is_fp8(w))]
        };
        let columns = if gate { tile.columns / 2 } else { tile.columns };
        let grid = Grid { smem: tile.smem(x, w), ..Grid::new(0, tile.threads()) };
        let source = source([x, w], &tile, gate, aligned, exact);
        Self { source, grid, rows: tile.rows, columns, fold, hopper: None }
    }

    /// Queues the product: `row_tiles` tiles of rows, for each matrix of a batch.
    pub(super) fn launch(&self, gpu: &Gpu, call: &Call<'_>, mut p: GemmParams, batch: usize) -> Result<()> {
        let blocks = u64::from(p.row_tiles) * u64::from(p.n.div_ceil(self.columns));
        if blocks > i32::MAX as u64 {
            return Err(Error::value(call.op(), "out", format!("{blocks} tiles"), "at most 2^31 - 1 on CUDA"));
        }
        if blocks == 0 {
            return Ok(());
        }
        (p.fold, p.beside) = (self.fold, BESIDE);
        if let Some((choice, dtype)) = &self.hopper {
            return choice.launch(gpu, call, p, batch, *dtype);
        }
        let kernel = gpu.kernel(self.source.clone())?;
        // A grid's second axis has at most 65535 entries.
        let most = 65535;
        let (x, w, out) = (p.x.0, p.w.0, p.out.0);
        let (xs, ws) = (p.x_scales.0, p.w_scales.0);
        let size = |code: u32| [4, 2, 2, 1, 1][code as usize];
        for first in (0..batch).step_by(most) {
            let at = |start: u64, stride: u64, size: u64| {
                Address(if start == 0 { 0 } else { start + first as u64 * stride * size })
            };
            p.x = at(x, p.x_batch, size(p.x_type));
            p.w = at(w, p.w_batch, size(p.w_type));
            p.out = at(out, p.out_batch, size(p.out_type));
            (p.x_scales, p.w_scales) = (at(xs, p.xs_batch, 4), at(ws, p.ws_batch, 4));
            let grid = [blocks as u32, (batch - first).min(most) as u32, 1];
            call.launch(&kernel, Grid { grid, early: true, ..self.grid }, &p)?;
        }
        Ok(())
    }
}

/// Addresses and strides of one side, in the parameters' order.
pub(super) struct Side {
    data: Address,
    scales: Address,
    matrix: Matrix,
    scale_strides: [u64; 2],
    block: [u32; 2],
    dtype: DType,
    /// Columns of a scale, if a row has several.
    fold: Option<usize>,
}

impl Side {
    pub(super) fn new<'a>(call: &mut Call<'a>, [arg, scales_arg]: [&'static str; 2], x: Scaled<'a>) -> Result<Self> {
        let op = call.op();
        let matrix = Matrix::new(op, arg, x.data.layout())?;
        let (mut scales, mut scale_strides, mut fold) = (Address(0), [0; 2], None);
        if let Some(s) = x.scales {
            let found = Matrix::new(op, scales_arg, s.layout())?;
            scale_strides = found.strides;
            fold = (found.columns > 1).then_some(x.block.columns);
            scales = call.read(scales_arg, s)?;
        }
        let block = [x.block.rows, x.block.columns].map(|n| n.min(u32::MAX as usize) as u32);
        let data = call.read(arg, x.data)?;
        Ok(Self { data, scales, matrix, scale_strides, block, dtype: x.data.dtype(), fold })
    }

    /// Rows that a kernel of this call made, `stride` elements apart.
    pub(super) fn of_rows(data: Address, dtype: DType, [rows, columns]: [usize; 2], stride: usize) -> Self {
        let matrix = Matrix { batch: 1, rows, columns, strides: [0, stride as u64] };
        Self { data, scales: Address(0), matrix, scale_strides: [0; 2], block: [1; 2], dtype, fold: None }
    }

    fn is_aligned(&self) -> bool {
        self.matrix.is_aligned(self.data, self.dtype, 16)
    }
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Columns after which a scale of either side changes.
fn fold(sides: [&Side; 2]) -> u32 {
    sides.into_iter().filter_map(|s| s.fold).fold(0, gcd).try_into().ok().filter(|&n| n > 0).unwrap_or(u32::MAX)
}

impl GemmParams {
    /// Of both sides; the rest is zero.
    pub(super) fn new(x: &Side, w: &Side, n: usize) -> Self {
        Self {
            x: x.data,
            w: w.data,
            x_scales: x.scales,
            w_scales: w.scales,
            x_stride: x.matrix.strides[1],
            w_stride: w.matrix.strides[1],
            x_batch: x.matrix.strides[0],
            w_batch: w.matrix.strides[0],
            xs_stride: x.scale_strides[1],
            ws_stride: w.scale_strides[1],
            xs_batch: x.scale_strides[0],
            ws_batch: w.scale_strides[0],
            m: x.matrix.rows as u32,
            n: n as u32,
            k: x.matrix.columns as u32,
            x_share: 1,
            weights: w.matrix.batch as u32,
            x_block_rows: x.block[0],
            x_block_columns: x.block[1],
            w_block_rows: w.block[0],
            w_block_columns: w.block[1],
            fold: fold([x, w]),
            x_type: type_code(x.dtype),
            w_type: type_code(w.dtype),
            ..bytemuck::Zeroable::zeroed()
        }
    }

    /// Where sums go: rows `stride` apart.
    pub(super) fn to(self, out: Address, dtype: DType, [out_batch, out_stride]: [u64; 2], vector: bool) -> Self {
        Self { out, out_type: type_code(dtype), out_batch, out_stride, vector: vector.into(), ..self }
    }
}

/// Refuses types that no kernel takes; scales are for fp8 alone.
fn check_types(op: &'static str, scaled: bool, x: &Scaled<'_>, w: &Scaled<'_>, out: DType) -> Result<()> {
    if scaled {
        let x = x.data.dtype();
        if !is_fp8(x) && check_float(op, "x", x).is_err() {
            let want = "f32, f16, bf16, e4m3 or e5m2".into();
            return Err(Error::DType { op, arg: "x", got: x.name(), want });
        }
        if !is_fp8(w.data.dtype()) {
            return Err(Error::DType { op, arg: "w", got: w.data.dtype().name(), want: "e4m3 or e5m2".into() });
        }
    } else {
        check_float(op, "x", x.data.dtype())?;
        check_float(op, "w", w.data.dtype())?;
    }
    check_float(op, "out", out)
}

/// Both sides, the matrix of results, and what a kernel is told about them.
fn arguments<'a>(
    call: &mut Call<'a>,
    x: Scaled<'a>,
    w: Scaled<'a>,
    out: TensorMut<'a>,
) -> Result<(Side, Side, Matrix, GemmParams)> {
    let op = call.op();
    x.data.layout().check_listed(op, "x")?;
    let (xs, ws) = (Side::new(call, ["x", "x.scales"], x)?, Side::new(call, ["w", "w.scales"], w)?);
    let (to, out_type) = (Matrix::new(op, "out", out.layout())?, out.dtype());
    let out = call.write("out", out)?;
    let params = GemmParams::new(&xs, &ws, to.columns);
    let params = params.to(out, out_type, to.strides, to.is_aligned(out, DType::F16, 16));
    Ok((xs, ws, to, params))
}

/// One product, or a batch of them; `scaled` if weights are fp8.
pub(crate) fn product<'a>(gpu: &'a Gpu, op: &'static str, scaled: bool, p: Product<'a>) -> Result<()> {
    let Product { x, w, out, then } = p;
    check_types(op, scaled, &x, &w, out.dtype())?;
    if out.layout().is_empty() {
        return Ok(());
    }
    let mut call = Call::new(gpu, op);
    let (xs, ws, to, mut params) = arguments(&mut call, x, w, out)?;
    let mut gate = false;
    match then {
        Then::None => {}
        Then::Bias(bias) => {
            check_float(op, "bias", bias.dtype())?;
            if bias.shape()[0] > 1 && bias.strides()[0] != 1 {
                let got = format!("stride {}", bias.strides()[0]);
                return Err(Error::layout(op, "bias", got, "1 on CUDA"));
            }
            (params.then, params.bias_type) = (1, type_code(bias.dtype()));
            params.bias = call.read("bias", bias)?;
        }
        Then::Add => params.then = 2,
        Then::Gate(function) => (gate, params.gate) = (true, function as u32),
    }
    let kind = Kind { exact: params.out_type == type_code(DType::F32), ..Kind::new(&xs, &ws, gate) };
    let shape = Shape { groups: to.batch, rows: to.rows, listed: false, indptr: None };
    let chosen = Chosen::new(gpu, kind, &shape, to.columns);
    params.row_tiles = (to.rows as u32).div_ceil(chosen.rows);
    chosen.launch(gpu, &call, params, to.batch)?;
    call.finish()
}

/// Rows in groups, `indptr[g]..indptr[g + 1]`, by weights of their own: `ids[g]`, or `g`.
pub(crate) fn grouped<'a>(
    gpu: &'a Gpu,
    op: &'static str,
    p: Product<'a>,
    indptr: &[i32],
    ids: Option<TensorRef<'a>>,
) -> Result<()> {
    let Product { x, w, out, .. } = p;
    check_types(op, is_fp8(w.data.dtype()), &x, &w, out.dtype())?;
    if out.layout().is_empty() {
        return Ok(());
    }
    let mut call = Call::new(gpu, op);
    let (xs, ws, to, mut params) = arguments(&mut call, x, w, out)?;
    let kind = Kind { exact: params.out_type == type_code(DType::F32), ..Kind::new(&xs, &ws, false) };
    let groups = indptr.windows(2).filter(|w| w[0] < w[1]).count();
    let shape = Shape { groups, rows: to.rows, listed: true, indptr: Some(indptr) };
    let chosen = Chosen::new(gpu, kind, &shape, to.columns);
    let mut tiles: Vec<u32> = Vec::new();
    for (g, rows) in indptr.windows(2).enumerate() {
        for first in (rows[0]..rows[1]).step_by(chosen.rows as usize) {
            tiles.extend([g as u32, first as u32, rows[1] as u32]);
        }
    }
    params.row_tiles = (tiles.len() / 3) as u32;
    params.tiles = call.upload("tiles", &tiles)?;
    if let Some(ids) = ids {
        if ids.shape()[0] > 1 && ids.strides()[0] != 1 {
            let got = format!("stride {}", ids.strides()[0]);
            return Err(Error::layout(op, "weight_indices", got, "1 on CUDA"));
        }
        params.wide_ids = match ids.dtype() {
            DType::I32 => 0,
            DType::I64 => 1,
            other => {
                let want = "i32 or i64".into();
                return Err(Error::DType { op, arg: "weight_indices", got: other.name(), want });
            }
        };
        params.weight_ids = call.read("weight_indices", ids)?;
    }
    chosen.launch(gpu, &call, params, 1)?;
    call.finish()
}
