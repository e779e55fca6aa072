//! Tables of sines and cosines; rotations themselves are [`tokens`](super::tokens)'.

use std::mem::offset_of;

use super::call::Call;
use super::driver::Grid;
use super::exec::Gpu;
use super::jit::Source;
use super::params::{Address, Field, Kind, Params};
use super::tokens::{Frequencies, check_last_axis};
use crate::error::{Error, Result};
use crate::tensor::{DType, TensorMut};

/// `fir::CosSinParams`.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct CosSinParams {
    frequencies: Frequencies,
    out: Address,
    stride: u64,
    rows: u64,
    pairs: u32,
    unused: u32,
}

impl Params for CosSinParams {
    const TYPE: &'static str = "fir::CosSinParams";
    const FIELDS: &'static [Field] = &[
        Field { name: "out", offset: offset_of!(CosSinParams, out), kind: Kind::Address },
        Field { name: "stride", offset: offset_of!(CosSinParams, stride), kind: Kind::U64 },
        Field { name: "rows", offset: offset_of!(CosSinParams, rows), kind: Kind::U64 },
        Field { name: "pairs", offset: offset_of!(CosSinParams, pairs), kind: Kind::U32 },
    ];
}

fn source() -> Source {
    Source::new::<CosSinParams>("rope.cuh", "fir::cos_sin_cache<>".into())
}

/// The one instantiation.
pub(super) fn kernels() -> Vec<Source> {
    vec![source()]
}

/// Fills `out`, `[positions, 2 * frequencies]`.
pub(crate) fn cos_sin_cache(gpu: &Gpu, op: &'static str, frequencies: &[f64], out: TensorMut<'_>) -> Result<()> {
    if out.dtype() != DType::F32 {
        return Err(Error::DType { op, arg: "out", got: out.dtype().name(), want: "f32".into() });
    }
    check_last_axis(op, "out", out.layout().shape(), out.strides())?;
    let mut call = Call::new(gpu, op);
    let (rows, pairs) = (out.layout().shape()[0], frequencies.len());
    if out.layout().is_empty() {
        return call.finish();
    }
    let stride = out.strides()[0] as u64;
    let frequencies = Frequencies::new(&mut call, frequencies)?;
    let out = call.write("out", out)?;
    let params = CosSinParams { frequencies, out, stride, rows: rows as u64, pairs: pairs as u32, unused: 0 };
    let blocks = (rows * pairs).div_ceil(256).min(i32::MAX as usize) as u32;
    call.launch(&*gpu.kernel(source())?, Grid { early: true, ..Grid::new(blocks, 256) }, &params)?;
    call.finish()
}
