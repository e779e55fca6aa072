//! A layer norm of a gated sum, scaled and shifted: which instantiation of `kernels/modulate.cuh`.

use bytemuck::Zeroable;

use super::call::Call;
use super::driver::Grid;
use super::exec::Gpu;
use super::jit::Source;
use super::norm::{BLOCK, check_float, cpp, threads};
use super::params::{Address, params};
use super::rows::{Rows, common_inner};
use crate::args::ModulatedArgs;
use crate::error::Result;
use crate::tensor::{DType, TensorRef};

params! {
    struct ModulationParams = "fir::Modulation" {
        rows: Address,
        columns: Address,
        outer: u64,
        stride: u64,
        plus: f32,
        pad: u32,
    }
}

params! {
    struct ModulateParams = "fir::ModulateParams" {
        x: Address,
        residual: Address,
        x_scale: Address,
        residual_out: Address,
        out: Address,
        gate: ModulationParams,
        scale: ModulationParams,
        shift: ModulationParams,
        rows: u32,
        inner: u32,
        x_outer: u64,
        x_stride: u64,
        residual_outer: u64,
        residual_stride: u64,
        sum_outer: u64,
        sum_stride: u64,
        out_outer: u64,
        out_stride: u64,
        hidden: u32,
        width: u32,
        eps: f32,
        inverse_hidden: f32,
    }
}

fn source(dtype: DType, chunks: u32) -> Source {
    Source::new::<ModulateParams>("modulate.cuh", format!("fir::modulate<{}, {chunks}>", cpp(dtype)))
}

pub(super) fn kernels() -> Vec<Source> {
    [DType::F32, DType::F16, DType::BF16].iter().flat_map(|&d| [0, 1, 2, 4].map(|chunks| source(d, chunks))).collect()
}

pub(crate) fn modulate<'a>(gpu: &'a Gpu, op: &'static str, m: ModulatedArgs<'a>) -> Result<()> {
    let dtype = m.x.dtype();
    check_float(op, "x", dtype)?;
    let rows = |arg, x: TensorRef<'_>| Rows::new(op, arg, x.layout(), dtype);
    let x = rows("x", m.x)?;
    let residual = m.residual.map(|r| rows("residual", r)).transpose()?;
    let terms = m.terms();
    let [gate, scale, shift] = terms.map(|(t, arg, _)| t.rows.map(|r| rows(arg, r)).transpose());
    let (gate, scale, shift) = (gate?, scale?, shift?);
    let (sum, out) = (rows("residual_out", m.residual_out.as_ref())?, rows("out", m.out.as_ref())?);
    let mut call = Call::new(gpu, op);
    let mut read = |arg, x: Option<TensorRef<'a>>| x.map_or(Ok(Address(0)), |x| call.read(arg, x));
    let (x_at, residual_at) = (read("x", Some(m.x))?, read("residual", m.residual)?);
    let x_scale = read("x_scale", m.x_scale)?;
    let mut params = [ModulationParams::zeroed(); 3];
    for (to, (t, rows, columns)) in params.iter_mut().zip(terms) {
        (to.rows, to.columns, to.plus) = (read(rows, t.rows)?, read(columns, t.columns)?, t.plus);
    }
    let (sum_at, out_at) = (call.write("residual_out", m.residual_out)?, call.write("out", m.out)?);
    if x.is_empty() {
        return call.finish();
    }
    let tensors = [
        (Some(x), x_at),
        (residual, residual_at),
        (gate, params[0].rows),
        (scale, params[1].rows),
        (shift, params[2].rows),
        (Some(sum), sum_at),
        (Some(out), out_at),
    ];
    let here: Vec<&Rows> = tensors.iter().filter_map(|(rows, _)| rows.as_ref()).collect();
    let (even, inner) = common_inner(&here);
    let strides = |rows: Option<Rows>| rows.map_or([0; 2], |r| r.strides(even));
    for (params, rows) in params.iter_mut().zip([gate, scale, shift]) {
        [params.outer, params.stride] = strides(rows);
    }
    let chunk = 16 / dtype.size();
    let (width, chunks) = threads(x.row.div_ceil(chunk));
    let aligned = tensors.iter().all(|(rows, at)| rows.is_none_or(|r| r.is_vector(*at, 0, x.row, chunk)));
    let aligned = aligned && params.iter().all(|p| p.columns.0.is_multiple_of(16));
    let fits = x.row <= (width * chunks) as usize * chunk;
    let kernel = gpu.kernel(source(dtype, if aligned && fits { chunks } else { 0 }))?;
    let ([x_outer, x_stride], [residual_outer, residual_stride]) = (strides(Some(x)), strides(residual));
    let ([sum_outer, sum_stride], [out_outer, out_stride]) = (strides(Some(sum)), strides(Some(out)));
    let [gate, scale, shift] = params;
    let params = ModulateParams {
        x: x_at,
        residual: residual_at,
        x_scale,
        residual_out: sum_at,
        out: out_at,
        gate,
        scale,
        shift,
        rows: x.rows as u32,
        inner,
        x_outer,
        x_stride,
        residual_outer,
        residual_stride,
        sum_outer,
        sum_stride,
        out_outer,
        out_stride,
        hidden: x.row as u32,
        width,
        eps: m.eps,
        inverse_hidden: 1.0 / x.row as f32,
    };
    let block = if width > 32 { width } else { BLOCK };
    let blocks = x.rows.div_ceil((block / width) as usize).min(i32::MAX as usize) as u32;
    call.launch(&kernel, Grid { early: true, ..Grid::new(blocks, block) }, &params)?;
    call.finish()
}
