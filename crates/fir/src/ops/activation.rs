//! Gated activations, between the two matrix products of a feed-forward layer.

use crate::cpu;
#[cfg(feature = "cuda")]
use crate::cuda;
use crate::error::{Error, Result};
use crate::exec::Exec;
use crate::tensor::{Dims, TensorMut, TensorRef};

/// SiLU of the first half of each row, times the second half.
///
/// `out[t, i] = g / (1 + e^-g) * x[t, d + i]`, `g = x[t, i]`
///
/// * `x`: `[tokens, 2 * d]` or `[batch, tokens, 2 * d]`, f32, f16 or bf16; rows contiguous
/// * `out`: `[tokens, d]` or `[batch, tokens, d]`, as `x`
pub fn silu_and_mul(exec: &Exec, x: TensorRef<'_>, out: TensorMut<'_>) -> Result<()> {
    run(exec, "silu_and_mul", Act::Silu, x, out)
}

/// GELU of the first half of each row, times the second half.
///
/// `out[t, i] = g / 2 * (1 + erf(g / √2)) * x[t, d + i]`, `g = x[t, i]`
///
/// Shapes and types as in [`silu_and_mul`].
pub fn gelu_and_mul(exec: &Exec, x: TensorRef<'_>, out: TensorMut<'_>) -> Result<()> {
    run(exec, "gelu_and_mul", Act::Gelu, x, out)
}

/// GELU by its tanh approximation of the first half of each row, times the second half.
///
/// `out[t, i] = g / 2 * (1 + tanh(√(2/π) * (g + 0.044715 * g³))) * x[t, d + i]`, `g = x[t, i]`
///
/// Shapes and types as in [`silu_and_mul`].
pub fn gelu_tanh_and_mul(exec: &Exec, x: TensorRef<'_>, out: TensorMut<'_>) -> Result<()> {
    run(exec, "gelu_tanh_and_mul", Act::GeluTanh, x, out)
}

#[derive(Clone, Copy)]
enum Act {
    Silu,
    Gelu,
    GeluTanh,
}

fn run(exec: &Exec, op: &'static str, act: Act, x: TensorRef<'_>, out: TensorMut<'_>) -> Result<()> {
    let mut dims = Dims::of(op);
    if x.shape().len() == 3 {
        dims.bind("x", &x, &["batch", "tokens", "2 * d"])?;
    } else {
        dims.bind("x", &x, &["tokens", "2 * d"])?;
    }
    let width = dims.get("2 * d");
    if !width.is_multiple_of(2) {
        return Err(Error::value(op, "x", format!("{width} wide"), "an even width, 2 * d"));
    }
    dims.axis("x", "d", width / 2)?;
    dims.bind("out", &out, if x.shape().len() == 3 { &["batch", "tokens", "d"] } else { &["tokens", "d"] })?;
    if x.dtype() != out.dtype() {
        return Err(Error::DType { op, arg: "out", got: out.dtype().name(), want: format!("{} as `x`", x.dtype()) });
    }
    match exec {
        Exec::Cpu(on) => match act {
            Act::Silu => cpu::activation::act_and_mul(on, op, cpu::activation::Silu, x, out),
            Act::Gelu => cpu::activation::act_and_mul(on, op, cpu::activation::Gelu, x, out),
            Act::GeluTanh => cpu::activation::act_and_mul(on, op, cpu::activation::GeluTanh, x, out),
        },
        #[cfg(feature = "cuda")]
        Exec::Cuda(gpu) => {
            let act = match act {
                Act::Silu => cuda::activation::Activation::Silu,
                Act::Gelu => cuda::activation::Activation::Gelu,
                Act::GeluTanh => cuda::activation::Activation::GeluTanh,
            };
            cuda::activation::act_and_mul(gpu, op, act, x, out)
        }
    }
}
