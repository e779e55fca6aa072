//! Numbers in fewer bits: which instantiation of `kernels/quantize.cuh`, and how blocks are cut.

use super::call::Call;
use super::driver::Grid;
use super::exec::Gpu;
use super::jit::Source;
use super::norm::cpp;
use super::params::{Address, params};
use super::tokens::check_last_axis;
use crate::error::{Error, Result};
use crate::tensor::{Block, DType, Layout, TensorMut, TensorRef};

params! {
    struct QuantizeParams = "fir::QuantizeParams" {
        x: Address,
        out: Address,
        scales: Address,
        x_outer: u64,
        x_stride: u64,
        out_outer: u64,
        out_stride: u64,
        scales_outer: u64,
        scales_stride: u64,
        rows: u32,
        inner: u32,
        k: u32,
        columns: u32,
        block_rows: u32,
        column_blocks: u32,
        row_blocks: u32,
        width: u32,
        scale: f32,
        fill: f32,
    }
}

params! {
    struct PackParams = "fir::PackParams" {
        x: Address,
        out: Address,
        indptr: Address,
        count: u64,
        bytes: u64,
        segments: u32,
        big: u32,
    }
}

/// A format of codes with a byte of scale per block of a row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Format {
    /// Codes of this type, e8m0 per 32.
    Mxfp8(DType),
    Mxfp4,
    /// With the scale of all.
    Nvfp4(f32),
}

impl Format {
    fn name(self) -> String {
        match self {
            Self::Mxfp8(dtype) => format!("fir::Mxfp8<{}>", cpp(dtype)),
            Self::Mxfp4 => "fir::Mxfp4".into(),
            Self::Nvfp4(_) => "fir::Nvfp4".into(),
        }
    }

    /// Elements of a code.
    fn pack(self) -> usize {
        if matches!(self, Self::Mxfp8(_)) { 1 } else { 2 }
    }

    fn scale(self) -> f32 {
        if let Self::Nvfp4(scale) = self { scale } else { 1.0 }
    }
}

/// Threads of a block.
const BLOCK: u32 = 256;
/// Elements of an item: what a thread has at a time.
const ITEM: usize = 16;
/// The scale of a block of nothing.
const LEAST: f32 = f32::MIN_POSITIVE;
/// Elements of the largest block that threads of one multiprocessor round; larger ones take three launches.
const OWN: usize = 1 << 15;

fn source(name: String) -> Source {
    Source::new::<QuantizeParams>("quantize.cuh", name)
}

fn packbits_source() -> Source {
    Source::new::<PackParams>("quantize.cuh", "fir::packbits<>".into())
}

fn quantize_source(x: DType, out: DType, vector: bool) -> Source {
    source(format!("fir::quantize_fp8<{}, {}, {vector}>", cpp(x), cpp(out)))
}

fn largest_source(x: DType, vector: bool) -> Source {
    source(format!("fir::largest_fp8<{}, {vector}>", cpp(x)))
}

fn scale_source(x: DType, out: DType, invert: bool, vector: bool) -> Source {
    source(format!("fir::scale_fp8<{}, {}, {invert}, {vector}>", cpp(x), cpp(out)))
}

fn blocks_source(x: DType, format: Format, vector: bool) -> Source {
    source(format!("fir::quantize_blocks<{}, {}, {vector}>", cpp(x), format.name()))
}

fn expand_source(format: Format, out: DType, vector: bool) -> Source {
    source(format!("fir::expand_blocks<{}, {}, {vector}>", format.name(), cpp(out)))
}

/// Every instantiation that the operators may choose.
pub(super) fn kernels() -> Vec<Source> {
    let mut all = vec![source("fir::fill_scales<>".into()), packbits_source()];
    for vector in [false, true] {
        for wide in [DType::F32, DType::F16, DType::BF16] {
            all.push(largest_source(wide, vector));
            for fp8 in [DType::E4M3, DType::E5M2] {
                all.push(quantize_source(wide, fp8, vector));
                all.push(scale_source(wide, fp8, true, vector));
                all.push(scale_source(fp8, wide, false, vector));
            }
            for format in [Format::Mxfp8(DType::E4M3), Format::Mxfp8(DType::E5M2), Format::Mxfp4, Format::Nvfp4(1.0)] {
                all.push(blocks_source(wide, format, vector));
                all.push(expand_source(format, wide, vector));
            }
        }
    }
    all
}

/// A matrix or a batch of them: sizes `[batch, rows, columns]`, and strides of the first two.
#[derive(Clone, Copy)]
struct Matrices {
    batch: usize,
    rows: usize,
    columns: usize,
    outer: u64,
    stride: u64,
    size: usize,
}

impl Matrices {
    fn new(op: &'static str, arg: &'static str, layout: &Layout, dtype: DType) -> Result<Self> {
        let (shape, strides) = (layout.shape(), layout.strides());
        check_last_axis(op, arg, shape, strides)?;
        let ([batch, rows, columns], [outer, stride]) = match (shape, strides) {
            (&[c], _) => ([1, 1, c], [0, 0]),
            (&[r, c], &[s, _]) => ([1, r, c], [0, s]),
            (&[b, r, c], &[t, s, _]) => ([b, r, c], [t, s]),
            _ => return Err(Error::Rank { op, arg, got: shape.len(), want: 3, axes: "at most".into() }),
        };
        let all = batch.saturating_mul(rows);
        if columns > i32::MAX as usize || (columns > 0 && all > u32::MAX as usize) {
            let got = format!("{all} rows of {columns}");
            return Err(Error::value(op, arg, got, "at most 2^32 - 1 rows of 2^31 - 1 on CUDA"));
        }
        Ok(Self { batch, rows, columns, outer: outer as u64, stride: stride as u64, size: dtype.size() })
    }

    fn is_empty(&self) -> bool {
        self.batch == 0 || self.rows == 0 || self.columns == 0
    }

    /// Whether items of a row, beginning at any sixteenth element, lie on `bytes`.
    fn is_vector(&self, start: Address, bytes: u64) -> bool {
        let fits = |n: u64| n.wrapping_mul(self.size as u64).is_multiple_of(bytes);
        start.0.is_multiple_of(bytes) && (self.rows <= 1 || fits(self.stride)) && (self.batch <= 1 || fits(self.outer))
    }
}

/// Threads for so many items of a row or block.
fn width(items: usize) -> u32 {
    items.next_power_of_two().min(BLOCK as usize) as u32
}

/// Blocks of threads for so many groups of `width`.
fn grid(groups: usize, width: u32) -> Grid {
    let blocks = groups.div_ceil((BLOCK / width) as usize).clamp(1, i32::MAX as usize);
    Grid { early: true, ..Grid::new(blocks as u32, BLOCK) }
}

/// `x`, `out` and the scales of their blocks, as addresses.
struct Fp8 {
    params: QuantizeParams,
    x: DType,
    out: DType,
    /// Elements of a block, at most.
    block: usize,
    /// Scales, all.
    count: usize,
    vector: bool,
    empty: bool,
}

impl Fp8 {
    fn new(
        op: &'static str,
        (x, x_dtype): (&Layout, DType),
        (out, out_dtype): (&Layout, DType),
        scales: &Layout,
        block: Block,
        addresses: impl FnOnce() -> Result<[Address; 3]>,
    ) -> Result<Self> {
        let from = Matrices::new(op, "x", x, x_dtype)?;
        let to = Matrices::new(op, "out", out, out_dtype)?;
        let scale = Matrices::new(op, "scales", scales, DType::F32)?;
        let (rows, columns) = (block.rows.min(from.rows).max(1), block.columns.min(from.columns).max(1));
        if scale.rows.saturating_mul(scale.columns).saturating_mul(scale.batch) > u32::MAX as usize {
            return Err(Error::value(op, "scales", format!("{:?}", scales.shape()), "at most 2^32 - 1 blocks on CUDA"));
        }
        let [x, out, scales] = addresses()?;
        let even = from.columns.is_multiple_of(ITEM) && (columns.is_multiple_of(ITEM) || columns == from.columns);
        let params = QuantizeParams {
            x,
            out,
            scales,
            x_outer: from.outer,
            x_stride: from.stride,
            out_outer: to.outer,
            out_stride: to.stride,
            scales_outer: scale.outer,
            scales_stride: scale.stride,
            rows: from.batch.saturating_mul(from.rows) as u32,
            inner: from.rows as u32,
            k: from.columns as u32,
            columns: columns as u32,
            block_rows: rows as u32,
            column_blocks: scale.columns as u32,
            row_blocks: scale.rows as u32,
            width: 1,
            scale: 1.0,
            fill: 0.0,
        };
        Ok(Self {
            params,
            x: x_dtype,
            out: out_dtype,
            block: rows.saturating_mul(columns.next_multiple_of(ITEM)),
            count: scale.batch * scale.rows * scale.columns,
            vector: even && from.is_vector(x, 16) && to.is_vector(out, 16),
            empty: from.is_empty(),
        })
    }

    /// Sets every scale.
    fn fill(&self, gpu: &Gpu, call: &Call<'_>, value: f32) -> Result<()> {
        if self.count == 0 {
            return Ok(());
        }
        let p = self.params;
        let matrices = self.count / (p.row_blocks as usize * p.column_blocks as usize);
        let params = QuantizeParams { fill: value, rows: matrices as u32, ..p };
        call.launch(&*gpu.kernel(source("fir::fill_scales<>".into()))?, grid(self.count, 1), &params)
    }

    /// Rounds by the scales, or multiplies by them.
    fn scale(&self, gpu: &Gpu, call: &Call<'_>, invert: bool) -> Result<()> {
        let p = self.params;
        let width = width((p.columns as usize).div_ceil(ITEM) * p.column_blocks as usize);
        let kernel = gpu.kernel(scale_source(self.x, self.out, invert, self.vector))?;
        call.launch(&kernel, grid(p.rows as usize, width), &QuantizeParams { width, ..p })
    }
}

pub(crate) fn fp8<'a>(
    gpu: &'a Gpu,
    op: &'static str,
    x: TensorRef<'a>,
    block: Block,
    out: TensorMut<'a>,
    scales: TensorMut<'a>,
) -> Result<()> {
    let mut call = Call::new(gpu, op);
    let (from, to, scale) = ((*x.layout(), x.dtype()), (*out.layout(), out.dtype()), *scales.layout());
    let addresses = || Ok([call.read("x", x)?, call.write("out", out)?, call.write("scales", scales)?]);
    let job = Fp8::new(op, (&from.0, from.1), (&to.0, to.1), &scale, block, addresses)?;
    let p = job.params;
    if job.empty {
        job.fill(gpu, &call, LEAST)?;
    } else if job.block <= OWN {
        let width = width(job.block / ITEM);
        let kernel = gpu.kernel(quantize_source(job.x, job.out, job.vector))?;
        call.launch(&kernel, grid(job.count, width), &QuantizeParams { width, ..p })?;
    } else {
        job.fill(gpu, &call, 0.0)?;
        let largest = if job.out == DType::E4M3 { 448.0 } else { 57344.0 };
        largest_of(gpu, &call, job.x, job.vector, QuantizeParams { scale: largest, ..p })?;
        job.scale(gpu, &call, true)?;
    }
    call.finish()
}

/// The scales of blocks whose largest number is to be `p.scale`, into `p.scales`, which are 0.
fn largest_of(gpu: &Gpu, call: &Call<'_>, x: DType, vector: bool, p: QuantizeParams) -> Result<()> {
    let width = width((p.columns as usize).div_ceil(ITEM));
    let strips = (p.rows as usize).saturating_mul(p.column_blocks as usize);
    let mut grid = grid(strips, width);
    // A few blocks for each multiprocessor, so that a maximum over all is made of few.
    grid.grid[0] = grid.grid[0].min(8 * gpu.properties().multiprocessors);
    call.launch(&*gpu.kernel(largest_source(x, vector))?, grid, &QuantizeParams { width, ..p })
}

/// Rounds by given scales, or with `invert` not set, multiplies by them.
pub(crate) fn scale_fp8<'a>(
    gpu: &'a Gpu,
    op: &'static str,
    invert: bool,
    x: TensorRef<'a>,
    scales: TensorRef<'a>,
    block: Block,
    out: TensorMut<'a>,
) -> Result<()> {
    let mut call = Call::new(gpu, op);
    let (from, to, scale) = ((*x.layout(), x.dtype()), (*out.layout(), out.dtype()), *scales.layout());
    let addresses = || Ok([call.read("x", x)?, call.write("out", out)?, call.read("scales", scales)?]);
    let job = Fp8::new(op, (&from.0, from.1), (&to.0, to.1), &scale, block, addresses)?;
    if !job.empty {
        job.scale(gpu, &call, invert)?;
    }
    call.finish()
}

/// The parameters of rows in a format of blocks, and whether `wide` and `codes` are aligned for vectors.
fn rows_of(
    op: &'static str,
    format: Format,
    wide: (&'static str, &Layout, DType, Address),
    codes: (&'static str, &Layout, DType, Address),
    scales: (&Layout, Address),
) -> Result<(QuantizeParams, bool)> {
    let numbers = Matrices::new(op, wide.0, wide.1, wide.2)?;
    let packed = Matrices::new(op, codes.0, codes.1, codes.2)?;
    let scale = Matrices::new(op, "scales", scales.0, DType::U8)?;
    let params = QuantizeParams {
        x: wide.3,
        out: codes.3,
        scales: scales.1,
        x_outer: numbers.outer,
        x_stride: numbers.stride,
        out_outer: packed.outer,
        out_stride: packed.stride,
        scales_outer: scale.outer,
        scales_stride: scale.stride,
        rows: if numbers.is_empty() { 0 } else { (numbers.batch * numbers.rows) as u32 },
        inner: numbers.rows as u32,
        k: numbers.columns as u32,
        columns: numbers.columns as u32,
        block_rows: 1,
        column_blocks: 1,
        row_blocks: 1,
        width: width(numbers.columns / ITEM),
        scale: format.scale(),
        fill: 0.0,
    };
    let vector = numbers.is_vector(wide.3, 16) && packed.is_vector(codes.3, 16 / format.pack() as u64);
    Ok((params, vector))
}

/// Rounds `x` to a format of blocks.
pub(crate) fn blocks<'a>(
    gpu: &'a Gpu,
    op: &'static str,
    format: Format,
    x: TensorRef<'a>,
    out: TensorMut<'a>,
    scales: TensorMut<'a>,
) -> Result<()> {
    let mut call = Call::new(gpu, op);
    let (from, to, scale, x_dtype, out_dtype) = (*x.layout(), *out.layout(), *scales.layout(), x.dtype(), out.dtype());
    let (x, out) = (call.read("x", x)?, call.write("out", out)?);
    let scales = (&scale, call.write("scales", scales)?);
    let (params, vector) = rows_of(op, format, ("x", &from, x_dtype, x), ("out", &to, out_dtype, out), scales)?;
    if params.rows > 0 {
        let kernel = gpu.kernel(blocks_source(x_dtype, format, vector))?;
        call.launch(&kernel, grid(params.rows as usize, params.width), &params)?;
    }
    call.finish()
}

/// The numbers of a format of blocks.
pub(crate) fn expand<'a>(
    gpu: &'a Gpu,
    op: &'static str,
    format: Format,
    x: TensorRef<'a>,
    scales: TensorRef<'a>,
    out: TensorMut<'a>,
) -> Result<()> {
    let mut call = Call::new(gpu, op);
    let (from, to, scale, x_dtype, out_dtype) = (*x.layout(), *out.layout(), *scales.layout(), x.dtype(), out.dtype());
    let (x, out) = (call.read("x", x)?, call.write("out", out)?);
    let scales = (&scale, call.read("scales", scales)?);
    let (p, vector) = rows_of(op, format, ("out", &to, out_dtype, out), ("x", &from, x_dtype, x), scales)?;
    // The kernel reads codes and writes numbers: the other way round.
    let params = QuantizeParams {
        x: p.out,
        x_outer: p.out_outer,
        x_stride: p.out_stride,
        out: p.x,
        out_outer: p.x_outer,
        out_stride: p.x_stride,
        ..p
    };
    if params.rows > 0 {
        let kernel = gpu.kernel(expand_source(format, out_dtype, vector))?;
        call.launch(&kernel, grid(params.rows as usize, params.width), &params)?;
    }
    call.finish()
}

/// The scale for all of NVFP4; waits for it.
pub(crate) fn nvfp4_scale<'a>(gpu: &'a Gpu, op: &'static str, x: TensorRef<'a>) -> Result<f32> {
    let all = Matrices::new(op, "x", x.layout(), x.dtype())?;
    if all.is_empty() {
        return Ok(LEAST);
    }
    let mut call = Call::new(gpu, op);
    let (dtype, from) = (x.dtype(), call.read("x", x)?);
    let (mut found, staged) = ([0f32], gpu.staged());
    let mut result = Call::new(&staged, op);
    let to = result.write("scale", TensorMut::new(&mut found, &[1])?)?;
    let params = QuantizeParams {
        x: from,
        out: Address::default(),
        scales: to,
        x_outer: all.outer,
        x_stride: all.stride,
        out_outer: 0,
        out_stride: 0,
        scales_outer: 0,
        scales_stride: 0,
        rows: (all.batch * all.rows) as u32,
        inner: all.rows as u32,
        k: all.columns as u32,
        columns: all.columns as u32,
        block_rows: all.rows as u32,
        column_blocks: 1,
        row_blocks: 1,
        width: 1,
        scale: 6.0 * 448.0,
        fill: 0.0,
    };
    let vector = all.columns.is_multiple_of(ITEM) && all.is_vector(from, 16);
    largest_of(gpu, &call, dtype, vector, params)?;
    result.finish()?;
    call.finish()?;
    Ok(found[0].max(LEAST))
}

/// Packs truth values; `segments`: offsets of the segments' values, then of their bytes.
pub(crate) fn packbits<'a>(
    gpu: &'a Gpu,
    op: &'static str,
    x: TensorRef<'a>,
    segments: Option<(&[i32], &[i32])>,
    big: bool,
    out: TensorMut<'a>,
) -> Result<()> {
    for (arg, got, want) in [("x", x.dtype(), DType::Bool), ("out", out.dtype(), DType::U8)] {
        if got != want {
            return Err(Error::DType { op, arg, got: got.name(), want: want.name().into() });
        }
    }
    for (arg, layout) in [("x", x.layout()), ("out", out.layout())] {
        if !layout.is_contiguous() {
            return Err(Error::layout(op, arg, format!("stride {}", layout.strides()[0]), "1"));
        }
    }
    let mut call = Call::new(gpu, op);
    let (count, bytes) = (x.layout().len(), out.layout().len());
    let (x, out) = (call.read("x", x)?, call.write("out", out)?);
    if bytes == 0 {
        return call.finish();
    }
    let (indptr, segments) = match segments {
        Some((bits, bytes)) => {
            let both = [bits, bytes].concat();
            (call.upload("indptr", &both)?, bits.len() as u32 - 1)
        }
        None => (Address::default(), 0),
    };
    let big = u32::from(big);
    let params = PackParams { x, out, indptr, count: count as u64, bytes: bytes as u64, segments, big };
    call.launch(&*gpu.kernel(packbits_source())?, grid(bytes, 1), &params)?;
    call.finish()
}
