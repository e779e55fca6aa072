//! Merging attention states: `(o, lse)` of two parts of the KV gives that of the whole.
//!
//! ```text
//! lse = log2(2^lse_a + 2^lse_b)        o = (2^lse_a o_a + 2^lse_b o_b) / 2^lse
//! ```
//!
//! Associative, commutative, with `(0, -inf)` as identity.

use crate::cpu::attention as kernel;
use crate::error::{Error, Result};
use crate::exec::Exec;
use crate::tensor::{Bool, DType, Dims, TensorMut, TensorRef};

const STATE: [&str; 3] = ["tokens", "heads", "head_dim"];

/// Merges two states.
///
/// * `o_a`, `o_b`, `out`: `[tokens, heads, head_dim]`, f32, f16 or bf16 alike
/// * `lse_a`, `lse_b`, `lse_out`: `[tokens, heads]`, f32, base 2
pub fn merge_state(
    exec: &Exec,
    (o_a, lse_a): (TensorRef<'_>, TensorRef<'_>),
    (o_b, lse_b): (TensorRef<'_>, TensorRef<'_>),
    (out, lse_out): (TensorMut<'_>, TensorMut<'_>),
) -> Result<()> {
    const OP: &str = "merge_state";
    Dims::of(OP)
        .bind("o_a", &o_a, &STATE)?
        .bind("lse_a", &lse_a, &STATE[..2])?
        .bind("o_b", &o_b, &STATE)?
        .bind("lse_b", &lse_b, &STATE[..2])?
        .bind("out", &out, &STATE)?
        .bind("lse_out", &lse_out, &STATE[..2])?;
    same_dtype(OP, "o_b", o_b.dtype(), o_a.dtype())?;
    same_dtype(OP, "out", out.dtype(), o_a.dtype())?;
    kernel::merge_state(exec.cpu_only(OP)?, (o_a, lse_a), (o_b, lse_b), (out, lse_out))
}

/// Merges another state into `o`, `lse`, for the tokens that `mask` selects (all when `None`).
///
/// * `o`, `o_other`: `[tokens, heads, head_dim]`, f32, f16 or bf16 alike
/// * `lse`, `lse_other`: `[tokens, heads]`, f32, base 2
/// * `mask`: `[tokens]`, bool
pub fn merge_state_in_place(
    exec: &Exec,
    (o, lse): (TensorMut<'_>, TensorMut<'_>),
    (o_other, lse_other): (TensorRef<'_>, TensorRef<'_>),
    mask: Option<TensorRef<'_>>,
) -> Result<()> {
    const OP: &str = "merge_state_in_place";
    let mut dims = Dims::of(OP);
    dims.bind("o", &o, &STATE)?.bind("lse", &lse, &STATE[..2])?.bind("o_other", &o_other, &STATE)?.bind(
        "lse_other",
        &lse_other,
        &STATE[..2],
    )?;
    same_dtype(OP, "o_other", o_other.dtype(), o.dtype())?;
    let mask = match mask {
        Some(mask) => {
            dims.bind("mask", &mask, &STATE[..1])?;
            mask.layout().check_listed(OP, "mask")?;
            let mask = mask.typed::<Bool>(OP, "mask")?;
            Some(mask.layout().offsets().map(|i| mask.data()[i].get()).collect::<Vec<_>>())
        }
        None => None,
    };
    kernel::merge_state_in_place(exec.cpu_only(OP)?, (o, lse), (o_other, lse_other), mask.as_deref())
}

/// Merges any number of states per row.
///
/// * `o`: `[tokens, states, heads, head_dim]`, f32, f16 or bf16; `lse`: `[tokens, states, heads]`, f32, base 2
/// * `out`: `[tokens, heads, head_dim]`, as `o`; `lse_out`: `[tokens, heads]`, f32
pub fn merge_states(
    exec: &Exec,
    (o, lse): (TensorRef<'_>, TensorRef<'_>),
    (out, lse_out): (TensorMut<'_>, TensorMut<'_>),
) -> Result<()> {
    const OP: &str = "merge_states";
    Dims::of(OP)
        .bind("o", &o, &["tokens", "states", "heads", "head_dim"])?
        .bind("lse", &lse, &["tokens", "states", "heads"])?
        .bind("out", &out, &STATE)?
        .bind("lse_out", &lse_out, &STATE[..2])?;
    same_dtype(OP, "out", out.dtype(), o.dtype())?;
    lse.layout().check_listed(OP, "lse")?;
    if lse_out.layout().is_empty() {
        return Ok(()); // Rows of no heads may claim states without end.
    }
    kernel::merge_states(exec.cpu_only(OP)?, (o, lse), (out, lse_out))
}

fn same_dtype(op: &'static str, arg: &'static str, got: DType, want: DType) -> Result<()> {
    if got != want {
        return Err(Error::DType { op, arg, got: got.name(), want: want.name().into() });
    }
    Ok(())
}
