//! Rotary position embedding of queries and keys.
//!
//! One rotation, told apart by two arguments instead of a dozen names: [`Positions`] says where each token stands,
//! [`Angles`] where the angles come from. A token's sines and cosines are computed once, for all heads of `q` and `k`.

use crate::cpu;
use crate::error::{Error, Result};
use crate::exec::Exec;
use crate::kv::Ragged;
use crate::tensor::{Dims, Shaped, TensorMut, TensorRef};
use crate::variant::{Rope, frequencies};

/// The position of each token.
#[derive(Clone, Copy, Debug)]
pub enum Positions<'a> {
    /// `[nnz]`, i32 or i64: the position itself.
    Ids(TensorRef<'a>),
    /// Requests one after another: token `t` of request `r` stands at `offsets[r] + t - indptr[r]`.
    Ragged {
        /// Offsets of the requests' tokens, `nnz` in all.
        indptr: &'a Ragged,
        /// `[batch]`, i32 or i64: position of each request's first token.
        offsets: TensorRef<'a>,
    },
}

/// Where the angles of a rotation come from.
#[derive(Clone, Copy, Debug)]
pub enum Angles<'a> {
    /// The formula, in f64: right for any position.
    Rope(Rope),
    /// A table, as [`cos_sin_cache`] makes it; a position outside it is an error.
    Cache {
        /// `[max_position, rotary_dim]`, f32: `rotary_dim / 2` cosines, then as many sines.
        table: TensorRef<'a>,
        /// Pairs are neighbours rather than halves apart.
        interleave: bool,
    },
}

impl From<Rope> for Angles<'_> {
    fn from(rope: Rope) -> Self {
        Self::Rope(rope)
    }
}

/// Rotates queries and keys by their positions.
///
/// With `a = position[t] * frequency[i]` and the pair `(x, y)` of elements `(i, i + rotary_dim / 2)`, or
/// `(2i, 2i + 1)` when interleaved: `out = (x cos a - y sin a, y cos a + x sin a)`. Elements past `rotary_dim` are
/// copied. For the frequencies see [`Rope`].
///
/// * `q`, `q_out`: `[nnz, qo_heads, head_dim]`, f32, f16 or bf16; any strides of tokens and heads
/// * `k`, `k_out`: `[nnz, kv_heads, head_dim]`, as `q`
/// * `positions`: `nnz` of them
pub fn apply_rope<'a>(
    exec: &Exec,
    q: TensorRef<'_>,
    k: TensorRef<'_>,
    positions: Positions<'_>,
    angles: impl Into<Angles<'a>>,
    q_out: TensorMut<'_>,
    k_out: TensorMut<'_>,
) -> Result<()> {
    const OP: &str = "apply_rope";
    let (qo, kv) = (["nnz", "qo_heads", "head_dim"], ["nnz", "kv_heads", "head_dim"]);
    let mut dims = Dims::of(OP);
    dims.bind("q", &q, &qo)?.bind("k", &k, &kv)?.bind("q_out", &q_out, &qo)?.bind("k_out", &k_out, &kv)?;
    for (arg, dtype) in [("k", k.dtype()), ("q_out", q_out.dtype()), ("k_out", k_out.dtype())] {
        if dtype != q.dtype() {
            return Err(Error::DType { op: OP, arg, got: dtype.name(), want: format!("{} as `q`", q.dtype()) });
        }
    }
    let positions = resolve(OP, positions, dims.get("nnz"))?;
    let angles = angles.into();
    let angles = prepare(OP, &angles, dims.get("head_dim"), &positions)?;
    match exec {
        Exec::Cpu(cpu) => cpu::rope::rotate(cpu, OP, Some((q, k)), &positions, &angles, q_out, k_out),
    }
}

/// As [`apply_rope`], with the result in the place of `q` and `k`.
///
/// * `q`: `[nnz, qo_heads, head_dim]`, f32, f16 or bf16; any strides of tokens and heads
/// * `k`: `[nnz, kv_heads, head_dim]`, as `q`
pub fn apply_rope_in_place<'a>(
    exec: &Exec,
    positions: Positions<'_>,
    angles: impl Into<Angles<'a>>,
    q: TensorMut<'_>,
    k: TensorMut<'_>,
) -> Result<()> {
    const OP: &str = "apply_rope_in_place";
    let mut dims = Dims::of(OP);
    dims.bind("q", &q, &["nnz", "qo_heads", "head_dim"])?.bind("k", &k, &["nnz", "kv_heads", "head_dim"])?;
    if k.dtype() != q.dtype() {
        return Err(Error::DType { op: OP, arg: "k", got: k.dtype().name(), want: format!("{} as `q`", q.dtype()) });
    }
    let positions = resolve(OP, positions, dims.get("nnz"))?;
    let angles = angles.into();
    let angles = prepare(OP, &angles, dims.get("head_dim"), &positions)?;
    match exec {
        Exec::Cpu(cpu) => cpu::rope::rotate(cpu, OP, None, &positions, &angles, q, k),
    }
}

/// Fills the table that [`Angles::Cache`] takes.
///
/// `out[p] = [cos(p * frequency[i]) for all i, sin(p * frequency[i]) for all i]`
///
/// * `out`: `[max_position, rotary_dim]`, f32
pub fn cos_sin_cache(exec: &Exec, rope: &Rope, out: TensorMut<'_>) -> Result<()> {
    const OP: &str = "cos_sin_cache";
    let mut dims = Dims::of(OP);
    dims.bind("out", &out, &["max_position", "rotary_dim"])?;
    let dim = dims.get("rotary_dim");
    if rotary_dim(OP, rope, dim)? != dim {
        return Err(Error::value(OP, "rope.rotary_dim", format!("{:?}", rope.rotary_dim), format!("{dim} as `out`")));
    }
    match exec {
        Exec::Cpu(cpu) => cpu::rope::cos_sin_cache(cpu, OP, &frequencies(rope, dim), out),
    }
}

/// How many elements of a head rotate.
pub(super) fn rotary_dim(op: &'static str, rope: &Rope, head_dim: usize) -> Result<usize> {
    if let Some((field, got, want)) = rope.fault() {
        return Err(Error::value(op, "rope", format!("{field} {got}"), want));
    }
    let dim = rope
        .rotated(head_dim)
        .map_err(|want| Error::value(op, "rope.rotary_dim", rope.rotary_dim.unwrap_or(head_dim), want))?;
    if dim == 0 {
        return Err(Error::value(op, "rope.rotary_dim", 0, "an even number above 0"));
    }
    Ok(dim)
}

/// The angles as the kernels take them, checked against the head and the positions.
pub(super) fn prepare<'a>(
    op: &'static str,
    angles: &Angles<'a>,
    head_dim: usize,
    positions: &[i64],
) -> Result<cpu::rope::Angles<'a>> {
    match *angles {
        Angles::Rope(rope) => {
            rotary_dim(op, &rope, head_dim)?;
            Ok(cpu::rope::Angles::formula(frequencies(&rope, head_dim), rope.interleave))
        }
        Angles::Cache { table, interleave } => {
            let mut dims = Dims::of(op);
            dims.bind("table", &table, &["max_position", "rotary_dim"])?;
            let (rows, dim) = (dims.get("max_position"), dims.get("rotary_dim"));
            if dim == 0 || dim % 2 != 0 || dim > head_dim {
                let want = format!("an even number from 2 to head_dim={head_dim}");
                return Err(Error::value(op, "table", format!("rotary_dim={dim}"), want));
            }
            if let Some(t) = positions.iter().position(|&p| p < 0 || p as u64 >= rows as u64) {
                let got = format!("{} at token {t}", positions[t]);
                return Err(Error::value(
                    op,
                    "positions",
                    got,
                    format!("0 or more and below {rows}, the rows of `table`"),
                ));
            }
            cpu::rope::Angles::table(op, table, interleave)
        }
    }
}

/// The position of each of `nnz` tokens.
pub(super) fn resolve(op: &'static str, positions: Positions<'_>, nnz: usize) -> Result<Vec<i64>> {
    match positions {
        Positions::Ids(ids) => integers(op, "positions", ids, "nnz", nnz, "q"),
        Positions::Ragged { indptr, offsets } => {
            let offsets = integers(op, "offsets", offsets, "batch", indptr.batch(), "indptr")?;
            if indptr.rows() != nnz {
                return Err(Error::Dim { op, arg: "indptr", axis: "nnz", got: indptr.rows(), first: "q", want: nnz });
            }
            let mut out = Vec::with_capacity(nnz);
            for (r, (&first, &len)) in offsets.iter().zip(indptr.lens()).enumerate() {
                let end = first.checked_add(i64::from(len)).ok_or_else(|| {
                    Error::value(op, "offsets", format!("{first} at request {r}"), "positions that fit 64 bits")
                })?;
                out.extend(first..end);
            }
            Ok(out)
        }
    }
}

/// The values of an i32 or i64 vector that has `want` of them.
pub(super) fn integers(
    op: &'static str,
    arg: &'static str,
    x: TensorRef<'_>,
    axis: &'static str,
    want: usize,
    first: &'static str,
) -> Result<Vec<i64>> {
    use crate::tensor::DType;
    let &[got] = Shaped::shape(&x) else {
        return Err(Error::Rank { op, arg, got: x.shape().len(), want: 1, axes: format!("[{axis}]") });
    };
    if got != want {
        return Err(Error::Dim { op, arg, axis, got, first, want });
    }
    match x.dtype() {
        DType::I32 => {
            let x = x.typed::<i32>(op, arg)?;
            Ok(x.layout().offsets().map(|i| i64::from(x.data()[i])).collect())
        }
        DType::I64 => {
            let x = x.typed::<i64>(op, arg)?;
            Ok(x.layout().offsets().map(|i| x.data()[i]).collect())
        }
        other => Err(Error::DType { op, arg, got: other.name(), want: "i32 or i64".into() }),
    }
}
