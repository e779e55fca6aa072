//! Row norms: which instantiation of `kernels/norm.cuh`, and how many threads per row.

use super::call::Call;
use super::driver::Grid;
use super::exec::Gpu;
use super::jit::Source;
use super::params::{Address, params};
use super::rows::{Rows, common_inner};
use crate::error::{Error, Result};
use crate::tensor::{DType, TensorMut, TensorRef};

/// What a norm does to a row once it is scaled.
#[derive(Clone, Copy)]
pub(crate) struct Norm<'a> {
    pub(crate) op: &'static str,
    /// Factor of each column, `[hidden]`, and its name in messages.
    pub(crate) weight: (&'static str, TensorRef<'a>),
    /// Added to every weight.
    pub(crate) shift: f32,
    /// Added to each column; its presence makes a layer norm.
    pub(crate) bias: Option<TensorRef<'a>>,
    /// Divides the result when the output is fp8.
    pub(crate) scale: f32,
    pub(crate) eps: f32,
}

params! {
    struct NormParams = "fir::NormParams" {
        x: Address,
        residual: Address,
        out: Address,
        weight: Address,
        bias: Address,
        rows: u32,
        inner: u32,
        x_outer: u64,
        x_stride: u64,
        residual_outer: u64,
        residual_stride: u64,
        out_outer: u64,
        out_stride: u64,
        weight_stride: u64,
        bias_stride: u64,
        hidden: u32,
        width: u32,
        weight_type: u32,
        bias_type: u32,
        eps: f32,
        shift: f32,
        inverse_scale: f32,
        inverse_hidden: f32,
    }
}

/// An instantiation.
#[derive(Clone, Copy)]
struct Instance {
    x: DType,
    out: DType,
    center: bool,
    add: bool,
    /// Chunks of 16 bytes that a thread keeps; 0 for memory that is not aligned for them.
    chunks: u32,
}

impl Instance {
    fn source(self) -> Source {
        let Self { x, out, center, add, chunks } = self;
        let name = format!("fir::norm<{}, {}, {center}, {add}, {chunks}>", cpp(x), cpp(out));
        Source::new::<NormParams>("norm.cuh", name)
    }
}

/// Every instantiation that [`launch`] may choose.
pub(super) fn kernels() -> Vec<Source> {
    let mut all = Vec::new();
    for x in [DType::F32, DType::F16, DType::BF16] {
        for out in [x, DType::E4M3, DType::E5M2] {
            for (center, add) in [(false, false), (true, false), (false, true)] {
                all.extend([0, 1, 2, 4].map(|chunks| Instance { x, out, center, add, chunks }.source()));
            }
        }
    }
    all
}

/// C++ name of an element type.
pub(super) fn cpp(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "float",
        DType::F16 => "fir::f16",
        DType::BF16 => "fir::bf16",
        DType::E4M3 => "fir::e4m3",
        DType::E5M2 => "fir::e5m2",
        other => other.name(),
    }
}

/// Refuses what is not a float of 16 or 32 bits.
pub(super) fn check_float(op: &'static str, arg: &'static str, dtype: DType) -> Result<()> {
    if matches!(dtype, DType::F32 | DType::F16 | DType::BF16) {
        return Ok(());
    }
    Err(Error::DType { op, arg, got: dtype.name(), want: "f32, f16 or bf16".into() })
}

/// Threads of a row and the chunks of 16 bytes that each keeps. By the row's length alone, so that its sums are taken in
/// one order whatever is beside it. Two or four chunks rather than more threads: a multiprocessor holds 2048 threads, and
/// needs some 64 KiB on their way to keep the memory busy.
pub(super) fn threads(chunks: usize) -> (u32, u32) {
    match chunks {
        ..=32 => (chunks.next_power_of_two() as u32, 1),
        33..=64 => (32, 2),
        65..=128 => (32, 4),
        129..=256 => (128, 2),
        257..=512 => (256, 2),
        513..=1024 => (256, 4),
        _ => (512, 4),
    }
}

/// Threads of a block of several rows.
pub(super) const BLOCK: u32 = 256;

/// `out = norm(x)`, or `residual += x; out = norm(residual)` without rounding in between.
pub(crate) fn norm<'a>(
    gpu: &'a Gpu,
    n: Norm<'a>,
    x: TensorRef<'a>,
    residual: Option<TensorMut<'a>>,
    out: TensorMut<'a>,
) -> Result<()> {
    let (mut call, from) = (Call::new(gpu, n.op), Operand::new(n.op, "x", x)?);
    let residual = residual.map(|r| Operand::new_mut(&mut call, "residual", r)).transpose()?;
    let x = Operand { address: call.read("x", x)?, ..from };
    let out = Operand::new_mut(&mut call, "out", out)?;
    launch(gpu, &mut call, n, x, residual, out)?;
    call.finish()
}

/// `residual += x; x = norm(residual)`, without rounding in between.
pub(crate) fn fused_add<'a>(gpu: &'a Gpu, n: Norm<'a>, x: TensorMut<'a>, residual: TensorMut<'a>) -> Result<()> {
    let mut call = Call::new(gpu, n.op);
    let x = Operand::new_mut(&mut call, "x", x)?;
    let residual = Operand::new_mut(&mut call, "residual", residual)?;
    launch(gpu, &mut call, n, x, Some(residual), x)?;
    call.finish()
}

/// `x = norm(x)` for two tensors.
pub(crate) fn pair_in_place<'a>(
    gpu: &'a Gpu,
    norms: [Norm<'a>; 2],
    names: [&'static str; 2],
    tensors: [TensorMut<'a>; 2],
) -> Result<()> {
    let mut call = Call::new(gpu, norms[0].op);
    let [a, b] = tensors;
    // Both are looked at before one is written.
    let operands = [Operand::new_mut(&mut call, names[0], a)?, Operand::new_mut(&mut call, names[1], b)?];
    for (n, x) in norms.into_iter().zip(operands) {
        launch(gpu, &mut call, n, x, None, x)?;
    }
    call.finish()
}

/// Rows of a tensor and where they are.
#[derive(Clone, Copy)]
struct Operand {
    rows: Rows,
    dtype: DType,
    address: Address,
}

impl Operand {
    fn new(op: &'static str, arg: &'static str, x: TensorRef<'_>) -> Result<Self> {
        let rows = Rows::new(op, arg, x.layout(), x.dtype())?;
        Ok(Self { rows, dtype: x.dtype(), address: Address::default() })
    }

    fn new_mut<'a>(call: &mut Call<'a>, arg: &'static str, x: TensorMut<'a>) -> Result<Self> {
        let operand = Self::new(call.op(), arg, x.as_ref())?;
        Ok(Self { address: call.write(arg, x)?, ..operand })
    }

    /// Whether rows may be read and written in chunks of so many elements.
    fn is_vector(&self, chunk: usize) -> bool {
        self.rows.is_vector(self.address, 0, self.rows.row, chunk)
    }
}

/// A parameter of each column, `[hidden]`.
#[derive(Clone, Copy, Default)]
struct Column {
    address: Address,
    stride: u64,
    code: u32,
    /// Whether chunks of the row's type, or of f32, may be read from it.
    vector: bool,
}

impl Column {
    fn new<'a>(call: &mut Call<'a>, arg: &'static str, x: TensorRef<'a>, row: DType) -> Result<Self> {
        check_float(call.op(), arg, x.dtype())?;
        let code = match x.dtype() {
            DType::F32 => 0,
            DType::F16 => 1,
            _ => 2,
        };
        let stride = x.strides()[0];
        let typed = x.dtype() == row || x.dtype() == DType::F32;
        let address = call.read(arg, x)?;
        Ok(Self { address, stride: stride as u64, code, vector: typed && stride == 1 && address.0.is_multiple_of(16) })
    }
}

fn launch<'a>(
    gpu: &Gpu,
    call: &mut Call<'a>,
    n: Norm<'a>,
    x: Operand,
    residual: Option<Operand>,
    out: Operand,
) -> Result<()> {
    check_float(n.op, "x", x.dtype)?;
    // A chunk is 16 bytes of `x`, and as many elements of the other tensors.
    let chunk = 16 / x.dtype.size();
    let weight = Column::new(call, n.weight.0, n.weight.1, x.dtype)?;
    let bias = n.bias.map(|b| Column::new(call, "beta", b, x.dtype)).transpose()?;
    let (rows, hidden) = (x.rows.rows, x.rows.row);
    if x.rows.is_empty() {
        return Ok(());
    }
    let (width, chunks) = threads(hidden.div_ceil(chunk));
    let tensors = [Some(x), residual, Some(out)];
    let vector =
        tensors.iter().flatten().all(|t| t.is_vector(chunk)) && [Some(weight), bias].iter().flatten().all(|c| c.vector);
    let chunks = if vector { chunks } else { 0 };
    let instance = Instance { x: x.dtype, out: out.dtype, center: bias.is_some(), add: residual.is_some(), chunks };
    let kernel = gpu.kernel(instance.source())?;
    let (other, bias) = (residual.unwrap_or(x), bias.unwrap_or_default());
    let (even, inner) = common_inner(&[&x.rows, &other.rows, &out.rows]);
    let ([x_outer, x_stride], [out_outer, out_stride]) = (x.rows.strides(even), out.rows.strides(even));
    let [residual_outer, residual_stride] = other.rows.strides(even);
    let params = NormParams {
        x: x.address,
        residual: residual.map_or(Address(0), |r| r.address),
        out: out.address,
        weight: weight.address,
        bias: bias.address,
        rows: rows as u32,
        inner,
        x_outer,
        x_stride,
        residual_outer,
        residual_stride,
        out_outer,
        out_stride,
        weight_stride: weight.stride,
        bias_stride: bias.stride,
        hidden: hidden as u32,
        width,
        weight_type: weight.code,
        bias_type: bias.code,
        eps: n.eps,
        shift: n.shift,
        inverse_scale: 1.0 / n.scale,
        inverse_hidden: 1.0 / hidden as f32,
    };
    // Rows of one warp and less share a block; sums over more go through its shared memory, which is one row's.
    let block = if width > 32 { width } else { BLOCK };
    let blocks = rows.div_ceil((block / width) as usize).min(i32::MAX as usize) as u32;
    call.launch(&kernel, Grid { early: true, ..Grid::new(blocks, block) }, &params)
}
