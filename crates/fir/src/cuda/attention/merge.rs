//! Merging states: which instantiation of `kernels/attention/merge.cuh`.

use super::super::call::Call;
use super::super::driver::Grid;
use super::super::exec::Gpu;
use super::super::jit::Source;
use super::super::norm::{check_float, cpp};
use super::super::params::{Address, params};
use super::super::tokens::check_last_axis;
use crate::error::{Error, Result};
use crate::tensor::{DType, Layout, TensorMut, TensorRef};

params! {
    struct MergeParams = "fir::MergeParams" {
        o_a: Address,
        o_b: Address,
        lse_a: Address,
        lse_b: Address,
        out: Address,
        lse_out: Address,
        mask: Address,
        o_a_token: u64,
        o_a_head: u64,
        o_a_state: u64,
        lse_a_token: u64,
        lse_a_head: u64,
        lse_a_state: u64,
        o_b_token: u64,
        o_b_head: u64,
        lse_b_token: u64,
        lse_b_head: u64,
        out_token: u64,
        out_head: u64,
        lse_out_token: u64,
        lse_out_head: u64,
        mask_stride: u64,
        tokens: u32,
        heads: u32,
        states: u32,
        dim: u32,
        width: u32,
        unused: u32,
    }
}

/// Threads of a block.
const BLOCK: u32 = 256;

fn source(dtype: DType, two: bool, vector: bool) -> Source {
    let name = format!("fir::merge_states<{}, {two}, {vector}>", cpp(dtype));
    Source::new::<MergeParams>("attention/merge.cuh", name)
}

/// Every instantiation that the operators may choose.
pub(in super::super) fn kernels() -> Vec<Source> {
    let mut all = Vec::new();
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for two in [false, true] {
            all.extend([false, true].map(|vector| source(dtype, two, vector)));
        }
    }
    all
}

/// A state's outputs or its lse: where they are, and how far apart.
#[derive(Clone, Copy, Default)]
struct Operand {
    address: Address,
    token: u64,
    state: u64,
    head: u64,
    vector: bool,
}

impl Operand {
    /// `[tokens, heads, dim]`, `[tokens, states, heads, dim]`, or without `dim` for an lse.
    fn new(op: &'static str, arg: &'static str, layout: &Layout, dtype: DType, lse: bool) -> Result<Self> {
        let (shape, strides) = (layout.shape(), layout.strides());
        if lse && dtype != DType::F32 {
            return Err(Error::DType { op, arg, got: dtype.name(), want: "f32".into() });
        }
        if !lse {
            check_float(op, arg, dtype)?;
            check_last_axis(op, arg, shape, strides)?;
        }
        let axes = if lse { strides } else { &strides[..strides.len() - 1] };
        let [token, state, head] = match *axes {
            [token, state, head] => [token, state, head],
            [token, head] => [token, 0, head],
            _ => return Err(Error::Rank { op, arg, got: shape.len(), want: 3, axes: "tokens and heads".into() }),
        };
        let fits = |axis: usize| shape[axis] <= 1 || strides[axis].wrapping_mul(dtype.size()).is_multiple_of(16);
        let vector =
            !lse && (0..axes.len()).all(fits) && shape[shape.len() - 1].wrapping_mul(dtype.size()).is_multiple_of(16);
        let [token, state, head] = [token, state, head].map(|n| n as u64);
        Ok(Self { address: Address::default(), token, state, head, vector })
    }

    fn read<'a>(call: &mut Call<'a>, arg: &'static str, x: TensorRef<'a>, lse: bool) -> Result<Self> {
        let operand = Self::new(call.op(), arg, x.layout(), x.dtype(), lse)?;
        Ok(operand.at(call.read(arg, x)?))
    }

    fn write<'a>(call: &mut Call<'a>, arg: &'static str, x: TensorMut<'a>, lse: bool) -> Result<Self> {
        let operand = Self::new(call.op(), arg, x.layout(), x.dtype(), lse)?;
        Ok(operand.at(call.write(arg, x)?))
    }

    fn at(self, address: Address) -> Self {
        Self { address, vector: self.vector && address.0.is_multiple_of(16), ..self }
    }
}

/// A state: its name's parts, outputs and lse.
pub(crate) type State<'a> = ([&'static str; 2], TensorRef<'a>, TensorRef<'a>);
/// As [`State`], to be written.
pub(crate) type StateMut<'a> = ([&'static str; 2], TensorMut<'a>, TensorMut<'a>);

/// Merges `a` with `b`; or all states of `a`.
pub(crate) fn merge<'a>(
    gpu: &'a Gpu,
    op: &'static str,
    a: State<'a>,
    b: Option<State<'a>>,
    out: StateMut<'a>,
) -> Result<()> {
    let mut call = Call::new(gpu, op);
    let (dtype, shape) = (a.1.dtype(), a.1.shape().to_vec());
    let states = if shape.len() == 4 { shape[1] } else { 1 };
    let a = [Operand::read(&mut call, a.0[0], a.1, false)?, Operand::read(&mut call, a.0[1], a.2, true)?];
    let b = b
        .map(|b| Ok([Operand::read(&mut call, b.0[0], b.1, false)?, Operand::read(&mut call, b.0[1], b.2, true)?]))
        .transpose()?;
    let out = [Operand::write(&mut call, out.0[0], out.1, false)?, Operand::write(&mut call, out.0[1], out.2, true)?];
    let sizes = [shape[0], shape[shape.len() - 2], states, shape[shape.len() - 1]];
    launch(gpu, &call, dtype, sizes, a, b, out, None)?;
    call.finish()
}

/// Merges `other` into `state`, for the tokens that `mask` selects.
pub(crate) fn merge_in_place<'a>(
    gpu: &'a Gpu,
    op: &'static str,
    state: StateMut<'a>,
    other: State<'a>,
    mask: Option<TensorRef<'a>>,
) -> Result<()> {
    let mut call = Call::new(gpu, op);
    let (dtype, shape) = (other.1.dtype(), other.1.shape().to_vec());
    let mask = match mask {
        Some(mask) if mask.dtype() != DType::Bool => {
            return Err(Error::DType { op, arg: "mask", got: mask.dtype().name(), want: "bool".into() });
        }
        Some(mask) => Some((mask.strides()[0] as u64, call.read("mask", mask)?)),
        None => None,
    };
    let other =
        [Operand::read(&mut call, other.0[0], other.1, false)?, Operand::read(&mut call, other.0[1], other.2, true)?];
    let state =
        [Operand::write(&mut call, state.0[0], state.1, false)?, Operand::write(&mut call, state.0[1], state.2, true)?];
    launch(gpu, &call, dtype, [shape[0], shape[1], 1, shape[2]], state, Some(other), state, mask)?;
    call.finish()
}

#[expect(clippy::too_many_arguments, reason = "the operands of one kernel")]
fn launch(
    gpu: &Gpu,
    call: &Call<'_>,
    dtype: DType,
    sizes: [usize; 4],
    [o_a, lse_a]: [Operand; 2],
    b: Option<[Operand; 2]>,
    [out, lse_out]: [Operand; 2],
    mask: Option<(u64, Address)>,
) -> Result<()> {
    let [tokens, heads, states, dim] = sizes;
    if tokens == 0 || heads == 0 {
        return Ok(());
    }
    if sizes.iter().any(|&n| n > i32::MAX as usize) {
        return Err(Error::value(call.op(), "o", format!("{sizes:?}"), "axes of at most 2^31 - 1 on CUDA"));
    }
    let two = b.is_some();
    let [o_b, lse_b] = b.unwrap_or_default();
    let vector = o_a.vector && out.vector && (!two || o_b.vector);
    let width = dim.div_ceil(16 / dtype.size()).next_power_of_two().min(32) as u32;
    let (mask_stride, mask) = mask.unwrap_or_default();
    let params = MergeParams {
        o_a: o_a.address,
        o_b: o_b.address,
        lse_a: lse_a.address,
        lse_b: lse_b.address,
        out: out.address,
        lse_out: lse_out.address,
        mask,
        o_a_token: o_a.token,
        o_a_head: o_a.head,
        o_a_state: o_a.state,
        lse_a_token: lse_a.token,
        lse_a_head: lse_a.head,
        lse_a_state: lse_a.state,
        o_b_token: o_b.token,
        o_b_head: o_b.head,
        lse_b_token: lse_b.token,
        lse_b_head: lse_b.head,
        out_token: out.token,
        out_head: out.head,
        lse_out_token: lse_out.token,
        lse_out_head: lse_out.head,
        mask_stride,
        tokens: tokens as u32,
        heads: heads as u32,
        states: states as u32,
        dim: dim as u32,
        width,
        unused: 0,
    };
    let blocks = tokens.saturating_mul(heads).div_ceil((BLOCK / width) as usize).min(i32::MAX as usize);
    let grid = Grid { early: true, ..Grid::new(blocks as u32, BLOCK) };
    call.launch(&*gpu.kernel(source(dtype, two, vector))?, grid, &params)
}
