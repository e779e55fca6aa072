//! Products with weights in GGUF's block formats: launches of `kernels/gemm_blocks.cuh`.
//!
//! Weights are packed as the CPU packs them: its panels hold words in the order of a tensor core's lanes.

use super::call::Call;
use super::driver::Grid;
use super::exec::Gpu;
use super::gemm::type_code;
use super::jit::Source;
use super::norm::check_float;
use super::params::{Address, params};
use super::tokens::check_last_axis;
use crate::error::{Error, Result};
use crate::tensor::{BlockFormat, TensorMut, TensorRef};

params! {
    struct BlocksParams = "fir::BlocksParams" {
        x: Address,
        w: Address,
        out: Address,
        codes: Address,
        sums: Address,
        scales: Address,
        taken: Address,
        x_stride: u64,
        out_stride: u64,
        panel_bytes: u64,
        m: u32,
        n: u32,
        k: u32,
        cells: u32,
        x_type: u32,
        out_type: u32,
    }
}

/// Panels of weights, where the device can read them.
#[derive(Clone, Copy)]
pub(crate) struct Panels<'a> {
    pub(crate) format: BlockFormat,
    pub(crate) n: usize,
    pub(crate) k: usize,
    /// `[panels, bytes of a panel]`
    pub(crate) data: TensorRef<'a>,
    pub(crate) panel_bytes: usize,
    /// Bytes of 256 columns of a panel.
    pub(crate) cell_bytes: usize,
}

/// Rows up to which a panel's columns are cut over a block's warps, anew for every 16 of them.
const FEW: usize = 32;
/// The same where there are so few panels for each multiprocessor that the other kernel would leave some without work.
const FEW_OF_FEW_PANELS: (usize, usize) = (64, 4);
/// Rows of a block of the other kernel.
const MANY: usize = 64;
/// Rows that are quantized before they are multiplied: 64 MiB of codes with 8192 columns.
const PASS: usize = 8192;
/// Columns of a cell.
const CELL: usize = 256;
/// Bytes of what is taken out of 256 elements of a row: how many, where, and up to four of them.
const TAKEN: usize = 24;
/// Weights of a panel.
const PANEL: usize = 16;

/// The format's type, with the panels that products read, or those that are dequantized.
fn cpp(format: BlockFormat, products: bool) -> String {
    let ((low, high), sub, min) = (format.bits(), format.sub(), format.has_min());
    let (offset, scales) = match format.elements() {
        32 if products && format.is_stepped() => (1 << (low + high - 1), "kWords"), // Minima are those of the middle code.
        32 => (format.offset(), "kHalves"),
        _ => (format.offset(), "kBytes"),
    };
    format!("fir::Blocks<{low}, {high}, {offset}, {sub}, {min}, fir::{scales}>")
}

fn source(kernel: &str, format: &str) -> Source {
    Source::new::<BlocksParams>("gemm_blocks.cuh", format!("fir::{kernel}<{format}>"))
}

/// Every instantiation that the operators may choose.
pub(super) fn kernels() -> Vec<Source> {
    let mut all: Vec<_> = ["16", "32"].map(|sub| source("quantize_rows", sub)).into();
    for format in BlockFormat::ALL {
        all.push(source("expand_rows", &cpp(format, false)));
        all.extend(["gemm_few", "gemm_many"].map(|kernel| source(kernel, &cpp(format, true))));
    }
    all
}

fn check<'a>(op: &'static str, arg: &'static str, x: &TensorRef<'a>) -> Result<()> {
    check_float(op, arg, x.dtype())?;
    check_last_axis(op, arg, x.shape(), x.strides())?;
    if x.shape().iter().any(|&n| n > i32::MAX as usize) {
        return Err(Error::value(op, arg, format!("{:?}", x.shape()), "at most 2^31 - 1 along an axis on CUDA"));
    }
    Ok(())
}

pub(crate) fn gemm<'a>(
    gpu: &'a Gpu,
    op: &'static str,
    x: TensorRef<'a>,
    w: Panels<'a>,
    out: TensorMut<'a>,
) -> Result<()> {
    check_float(op, "x", x.dtype())?;
    check_float(op, "out", out.dtype())?;
    if out.layout().is_empty() {
        return Ok(());
    }
    check(op, "x", &x)?;
    check(op, "out", &out.as_ref())?;
    let (m, cells) = (x.shape()[0], w.k.div_ceil(CELL));
    let name = cpp(w.format, true);
    let (panels, sms) = (w.n.div_ceil(PANEL), gpu.properties().multiprocessors as usize);
    let few = m <= FEW || (m <= FEW_OF_FEW_PANELS.0 && panels <= FEW_OF_FEW_PANELS.1 * sms);
    let tiles_of = |rows: usize| if few { rows.div_ceil(PANEL) } else { rows.div_ceil(MANY) * (MANY / PANEL) };
    let tiles = tiles_of(m.min(PASS));
    let mut call = Call::new(gpu, op);
    let mut params = BlocksParams {
        x_stride: x.strides()[0] as u64,
        out_stride: out.strides()[0] as u64,
        panel_bytes: w.panel_bytes as u64,
        n: w.n as u32,
        k: w.k as u32,
        cells: cells as u32,
        x_type: type_code(x.dtype()),
        out_type: type_code(out.dtype()),
        ..bytemuck::Zeroable::zeroed()
    };
    let sizes = [x.dtype().size() as u64, out.dtype().size() as u64];
    let start = [call.read("x", x)?, call.write("out", out)?];
    params.w = call.read("w", w.data)?;
    params.codes = call.scratch("codes", tiles * cells * CELL * PANEL)?;
    params.sums = call.scratch("sums", tiles * cells * 16 * PANEL * 4)?;
    params.scales = call.scratch("scales", tiles * cells * PANEL * 4)?;
    params.taken = call.scratch("taken", tiles * cells * PANEL * TAKEN)?;
    let quantize = gpu.kernel(source("quantize_rows", &w.format.sub().to_string()))?;
    let multiply = gpu.kernel(source(if few { "gemm_few" } else { "gemm_many" }, &name))?;
    for from in (0..m).step_by(PASS) {
        let rows = PASS.min(m - from);
        params.m = rows as u32;
        params.x = Address(start[0].0 + from as u64 * params.x_stride * sizes[0]);
        params.out = Address(start[1].0 + from as u64 * params.out_stride * sizes[1]);
        let tiles = tiles_of(rows);
        if cells > 0 {
            let grid = Grid { grid: [cells as u32, tiles as u32, 1], early: true, ..Grid::new(0, 32 * PANEL as u32) };
            call.launch(&quantize, grid, &params)?;
        }
        // Two blocks to a multiprocessor, each with panels one after the other.
        let (blocks, warps) = if few {
            ([panels.min((2 * sms / tiles).max(1)), tiles], 8)
        } else {
            ([panels.div_ceil(4), tiles * PANEL / MANY], 4)
        };
        let grid = [blocks[0] as u32, blocks[1] as u32, 1];
        // As `kStages` of the kernels.
        let stages = if w.cell_bytes > 4096 { 2 } else { 3 };
        let smem = (warps * stages * w.cell_bytes) as u32;
        call.launch(&multiply, Grid { grid, smem, early: true, ..Grid::new(0, 32 * warps as u32) }, &params)?;
    }
    call.finish()
}

/// The weights themselves, as the rows of `out`.
pub(crate) fn expand<'a>(gpu: &'a Gpu, op: &'static str, w: Panels<'a>, out: TensorMut<'a>) -> Result<()> {
    check(op, "out", &out.as_ref())?;
    if out.layout().is_empty() {
        return Ok(());
    }
    let mut call = Call::new(gpu, op);
    let mut params = BlocksParams {
        out_stride: out.strides()[0] as u64,
        panel_bytes: w.panel_bytes as u64,
        m: w.n as u32,
        n: w.k as u32,
        k: w.k as u32,
        out_type: type_code(out.dtype()),
        ..bytemuck::Zeroable::zeroed()
    };
    params.out = call.write("out", out)?;
    // The panels were made from bytes in this process's memory, whatever the device.
    params.w = call.upload("data", w.data.host_bytes(op, "data")?)?;
    let kernel = gpu.kernel(source("expand_rows", &cpp(w.format, false)))?;
    call.launch(&kernel, Grid { early: true, ..Grid::new(w.n as u32, 256) }, &params)?;
    call.finish()
}
