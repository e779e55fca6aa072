//! Norms over rows.

use crate::cpu;
use crate::error::{Error, Result};
use crate::exec::Exec;
use crate::tensor::{Dims, TensorMut, TensorRef};

/// Scales each row of `x` to unit root mean square, then by `weight`.
///
/// `out[t, h] = x[t, h] / sqrt(mean_h(x[t, h]²) + eps) * weight[h]`
///
/// * `x`, `out`: `[tokens, hidden]` or `[tokens, heads, hidden]`, f32, f16 or bf16; rows contiguous
/// * `weight`: `[hidden]`, f32, f16 or bf16
pub fn rms_norm(exec: &Exec, x: TensorRef<'_>, weight: TensorRef<'_>, eps: f32, out: TensorMut<'_>) -> Result<()> {
    const OP: &str = "rms_norm";
    check_rows(OP, &x, &weight, &out)?;
    check_eps(OP, eps)?;
    match exec {
        Exec::Cpu(cpu) => cpu::norm::rms_norm(cpu, x, weight, eps, out),
    }
}

/// `x` and `out` are alike, `weight` fits their rows.
fn check_rows(op: &'static str, x: &TensorRef<'_>, weight: &TensorRef<'_>, out: &TensorMut<'_>) -> Result<()> {
    let axes: &[&str] = if x.shape().len() == 3 { &["tokens", "heads", "hidden"] } else { &["tokens", "hidden"] };
    Dims::of(op).bind("x", x, axes)?.bind("weight", weight, &["hidden"])?.bind("out", out, axes)?;
    if x.dtype() != out.dtype() {
        return Err(Error::DType { op, arg: "out", got: out.dtype().name(), want: format!("{} as `x`", x.dtype()) });
    }
    Ok(())
}

fn check_eps(op: &'static str, eps: f32) -> Result<()> {
    if eps >= 0.0 && eps.is_finite() { Ok(()) } else { Err(Error::value(op, "eps", eps, "a finite number, 0 or more")) }
}
