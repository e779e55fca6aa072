//! Rotary position embedding of queries and keys.
//!
//! One rotation, told apart by two arguments instead of a dozen names: [`Positions`] says where each token stands,
//! [`Angles`] where the angles come from. A token's sines and cosines are computed once, for all heads of `q` and `k`.

use super::page::{Slots, bind_cache, bind_mla, check_last_axis, check_rows, mla_targets, targets};
use crate::cpu;
use crate::cpu::rope::{Tokens, Work};
#[cfg(feature = "cuda")]
use crate::cuda;
use crate::error::{Error, Result};
use crate::exec::Exec;
use crate::kv::{PagedKvMut, PagedMlaMut, Ragged};
use crate::tensor::{DType, Dims, TensorMut, TensorRef};
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
    let (nnz, head_dim, angles) = (dims.get("nnz"), dims.get("head_dim"), angles.into());
    match exec {
        Exec::Cpu(cpu) => {
            let positions = resolve(OP, positions, nnz)?;
            let angles = prepare(OP, &angles, head_dim, &positions)?;
            cpu::rope::rotate(cpu, OP, Some((q, k)), &positions, &angles, q_out, k_out)
        }
        #[cfg(feature = "cuda")]
        Exec::Cuda(gpu) => {
            let rotation = on_cuda(OP, positions, nnz, &angles, head_dim)?;
            let streams = vec![stream(("q", q), ("q_out", q_out), 1.0), stream(("k", k), ("k_out", k_out), 1.0)];
            cuda::tokens::run(gpu, OP, nnz, Some(rotation), None, streams)
        }
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
    let (nnz, head_dim, angles) = (dims.get("nnz"), dims.get("head_dim"), angles.into());
    match exec {
        Exec::Cpu(cpu) => {
            let positions = resolve(OP, positions, nnz)?;
            let angles = prepare(OP, &angles, head_dim, &positions)?;
            cpu::rope::rotate(cpu, OP, None, &positions, &angles, q, k)
        }
        #[cfg(feature = "cuda")]
        Exec::Cuda(gpu) => {
            let rotation = on_cuda(OP, positions, nnz, &angles, head_dim)?;
            let streams = [("q", q), ("k", k)].map(|to| cuda::tokens::Stream {
                from: None,
                rotated: true,
                rest: None,
                to,
                paged: false,
                block_scales: None,
                scale: 1.0,
            });
            cuda::tokens::run(gpu, OP, nnz, Some(rotation), None, streams.into())
        }
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
        #[cfg(feature = "cuda")]
        Exec::Cuda(gpu) => cuda::rope::cos_sin_cache(gpu, OP, &frequencies(rope, dim), out),
    }
}

/// Queries or keys that are rotated, in whole or in part, and divided by a scale, with where they go.
#[derive(Debug)]
pub struct Roped<'a> {
    /// `[nnz, heads, rope_dim]` or, for a single head, `[nnz, rope_dim]`; f32, f16 or bf16. Rotated.
    pub rope: TensorRef<'a>,
    /// As `rope`; f32, f16, bf16, e4m3 or e5m2.
    pub rope_out: TensorMut<'a>,
    /// `[nnz, heads, nope_dim]`, or without heads, and where it goes: what is not rotated, where that is a tensor of
    /// its own.
    pub nope: Option<(TensorRef<'a>, TensorMut<'a>)>,
    /// `out = value / scale`
    pub scale: f32,
}

impl Roped<'_> {
    /// Elements to write.
    fn elements(&self) -> usize {
        self.rope.layout().len().saturating_add(self.nope.as_ref().map_or(0, |(x, _)| x.layout().len()))
    }
}

/// Keys and values on their way into a paged cache.
#[derive(Debug)]
pub struct RopedKv<'a> {
    /// `[nnz, kv_heads, rope_dim]`, f32, f16 or bf16: rotated, the first elements of a key.
    pub rope: TensorRef<'a>,
    /// `[nnz, kv_heads, nope_dim]`, f32, f16 or bf16: not rotated, the elements after.
    pub nope: Option<TensorRef<'a>>,
    /// `[nnz, kv_heads, head_dim_vo]`
    pub v: TensorRef<'a>,
    /// Where the tokens go.
    pub slots: Slots<'a>,
    /// The cache, with its scales; `head_dim_qk = rope_dim + nope_dim`.
    pub cache: PagedKvMut<'a>,
}

/// A latent vector and its rotary part on their way into a paged cache.
#[derive(Debug)]
pub struct RopedMla<'a> {
    /// `[nnz, head_dim_kpe]`, f32, f16 or bf16: rotated.
    pub kpe: TensorRef<'a>,
    /// `[nnz, head_dim_ckv]`, f32, f16 or bf16.
    pub ckv: TensorRef<'a>,
    /// Where the tokens go.
    pub slots: Slots<'a>,
    /// The cache, with its scales.
    pub cache: PagedMlaMut<'a>,
}

/// Rotates queries and keys and rounds them to a smaller type, in one pass.
///
/// `out = apply_rope(rope) / scale`, and `nope / scale`; fp8 saturates. The rotated value is rounded once.
///
/// Shapes are in [`Roped`]; `q` and `k` have `nnz` and `rope_dim` in common.
pub fn rope_quantize<'a>(
    exec: &Exec,
    q: Roped<'_>,
    k: Roped<'_>,
    positions: Positions<'_>,
    angles: impl Into<Angles<'a>>,
) -> Result<()> {
    const OP: &str = "rope_quantize";
    let mut dims = Dims::of(OP);
    check_roped(OP, &mut dims, &q, &Q)?;
    check_roped(OP, &mut dims, &k, &K)?;
    let (nnz, rope_dim, angles) = (dims.get("nnz"), dims.get("rope_dim"), angles.into());
    match exec {
        Exec::Cpu(cpu) => {
            let positions = resolve(OP, positions, nnz)?;
            let angles = prepare(OP, &angles, rope_dim, &positions)?;
            let mut work = Work::new(cpu, &[q.elements(), k.elements()]);
            quantize(&mut work, OP, q, &Q, &positions, &angles)?;
            quantize(&mut work, OP, k, &K, &positions, &angles)?;
            work.run();
            Ok(())
        }
        #[cfg(feature = "cuda")]
        Exec::Cuda(gpu) => {
            let rotation = on_cuda(OP, positions, nnz, &angles, rope_dim)?;
            let streams = streams(q, &Q).chain(streams(k, &K)).collect();
            cuda::tokens::run(gpu, OP, nnz, Some(rotation), None, streams)
        }
    }
}

/// As [`rope_quantize`], with keys and values going into their pages.
///
/// `q_out` as there; `cache.k[slot(t)] = [apply_rope(rope[t]), nope[t]] / k_scale`, `cache.v[slot(t)] = v[t] / v_scale`,
/// as [`append_paged_kv`](super::page::append_paged_kv) stores them.
///
/// Shapes are in [`Roped`] and [`RopedKv`].
pub fn rope_quantize_append_paged_kv<'a>(
    exec: &Exec,
    q: Roped<'_>,
    kv: RopedKv<'_>,
    positions: Positions<'_>,
    angles: impl Into<Angles<'a>>,
) -> Result<()> {
    const OP: &str = "rope_quantize_append_paged_kv";
    let RopedKv { rope, nope, v, slots, cache } = kv;
    let mut dims = Dims::of(OP);
    check_roped(OP, &mut dims, &q, &Q)?;
    dims.bind("kv.rope", &rope, &["nnz", "kv_heads", "rope_dim"])?.bind(
        "kv.v",
        &v,
        &["nnz", "kv_heads", "head_dim_vo"],
    )?;
    check_rows(OP, "kv.rope", &rope)?;
    check_rows(OP, "kv.v", &v)?;
    if let Some(nope) = &nope {
        dims.bind("kv.nope", nope, &["nnz", "kv_heads", "nope_dim"])?;
        check_rows(OP, "kv.nope", nope)?;
    }
    let head_dim = dims.get("rope_dim").saturating_add(dims.get("nope_dim"));
    dims.axis("kv.rope and kv.nope", "head_dim_qk", head_dim)?;
    bind_cache(&mut dims, &cache)?;
    let (nnz, rope_dim, angles) = (dims.get("nnz"), dims.get("rope_dim"), angles.into());
    let (pages, page_size) = (cache.k.shape()[0], cache.k.shape()[1]);
    let [to_k, to_v] = targets(cache);
    match exec {
        Exec::Cpu(cpu) => {
            let moves = slots.moves(OP, nnz, pages, page_size)?;
            let positions = resolve(OP, positions, nnz)?;
            let angles = prepare(OP, &angles, rope_dim, &positions)?;
            let rest = nope.as_ref().map_or(0, |x| x.layout().len());
            let mut work = Work::new(cpu, &[q.elements(), rope.layout().len(), rest, v.layout().len()]);
            quantize(&mut work, OP, q, &Q, &positions, &angles)?;
            let k = Tokens::plain(OP, "kv.rope", rope)?.rotated(&angles, &positions);
            let k = match nope {
                Some(nope) => k.followed_by(OP, "kv.nope", nope)?,
                None => k,
            };
            cpu::page::append(&mut work, OP, k, &moves, to_k)?;
            cpu::page::append(&mut work, OP, Tokens::plain(OP, "kv.v", v)?, &moves, to_v)?;
            work.run();
            Ok(())
        }
        #[cfg(feature = "cuda")]
        Exec::Cuda(gpu) => {
            let rotation = on_cuda(OP, positions, nnz, &angles, rope_dim)?;
            let pages = slots.on_cuda(OP, nnz, pages, page_size)?;
            let k = to_k.stream(("kv.rope", rope), true, nope.map(|nope| ("kv.nope", nope)));
            let v = to_v.stream(("kv.v", v), false, None);
            cuda::tokens::run(gpu, OP, nnz, Some(rotation), Some(pages), streams(q, &Q).chain([k, v]).collect())
        }
    }
}

/// As [`rope_quantize`], with the latent vector and its rotary part going into their pages.
///
/// `q_out` as there; `cache.kpe[slot(t)] = apply_rope(kpe[t]) / kpe_scale`, `cache.ckv[slot(t)] = ckv[t] / ckv_scale`.
///
/// Shapes are in [`Roped`] and [`RopedMla`]; `rope_dim` of `q` is `head_dim_kpe`.
pub fn rope_quantize_append_paged_mla<'a>(
    exec: &Exec,
    q: Roped<'_>,
    kv: RopedMla<'_>,
    positions: Positions<'_>,
    angles: impl Into<Angles<'a>>,
) -> Result<()> {
    const OP: &str = "rope_quantize_append_paged_mla";
    let RopedMla { kpe, ckv, slots, cache } = kv;
    let mut dims = Dims::of(OP);
    check_roped(OP, &mut dims, &q, &Q)?;
    dims.bind("kv.kpe", &kpe, &["nnz", "rope_dim"])?.bind("kv.ckv", &ckv, &["nnz", "head_dim_ckv"])?;
    check_rows(OP, "kv.kpe", &kpe)?;
    check_rows(OP, "kv.ckv", &ckv)?;
    dims.axis("kv.kpe", "head_dim_kpe", kpe.shape()[1])?;
    bind_mla(&mut dims, &cache)?;
    let (nnz, rope_dim, angles) = (dims.get("nnz"), dims.get("rope_dim"), angles.into());
    let (pages, page_size) = (cache.ckv.shape()[0], cache.ckv.shape()[1]);
    let [to_ckv, to_kpe] = mla_targets(cache);
    match exec {
        Exec::Cpu(cpu) => {
            let moves = slots.moves(OP, nnz, pages, page_size)?;
            let positions = resolve(OP, positions, nnz)?;
            let angles = prepare(OP, &angles, rope_dim, &positions)?;
            let mut work = Work::new(cpu, &[q.elements(), kpe.layout().len(), ckv.layout().len()]);
            quantize(&mut work, OP, q, &Q, &positions, &angles)?;
            let kpe = Tokens::plain(OP, "kv.kpe", kpe)?.rotated(&angles, &positions);
            cpu::page::append(&mut work, OP, kpe, &moves, to_kpe)?;
            cpu::page::append(&mut work, OP, Tokens::plain(OP, "kv.ckv", ckv)?, &moves, to_ckv)?;
            work.run();
            Ok(())
        }
        #[cfg(feature = "cuda")]
        Exec::Cuda(gpu) => {
            let rotation = on_cuda(OP, positions, nnz, &angles, rope_dim)?;
            let pages = slots.on_cuda(OP, nnz, pages, page_size)?;
            let kpe = to_kpe.stream(("kv.kpe", kpe), true, None);
            let ckv = to_ckv.stream(("kv.ckv", ckv), false, None);
            cuda::tokens::run(gpu, OP, nnz, Some(rotation), Some(pages), streams(q, &Q).chain([kpe, ckv]).collect())
        }
    }
}

/// Names of a [`Roped`]'s tensors, and of its axes of heads and of the rest.
struct Names {
    rope: [&'static str; 2],
    nope: [&'static str; 2],
    heads: &'static str,
    nope_dim: &'static str,
    scale: &'static str,
}

const Q: Names = Names {
    rope: ["q.rope", "q.rope_out"],
    nope: ["q.nope", "q.nope_out"],
    heads: "qo_heads",
    nope_dim: "q_nope_dim",
    scale: "q.scale",
};
const K: Names = Names {
    rope: ["k.rope", "k.rope_out"],
    nope: ["k.nope", "k.nope_out"],
    heads: "kv_heads",
    nope_dim: "k_nope_dim",
    scale: "k.scale",
};

/// Checks all of `x`, so that nothing is written before a refusal.
fn check_roped(op: &'static str, dims: &mut Dims, x: &Roped<'_>, names: &Names) -> Result<()> {
    let three = [["nnz", names.heads, "rope_dim"], ["nnz", names.heads, names.nope_dim]];
    let two = [["nnz", "rope_dim"], ["nnz", names.nope_dim]];
    let axes: [&[&'static str]; 2] =
        if x.rope.shape().len() == 3 { [&three[0], &three[1]] } else { [&two[0], &two[1]] };
    let rope = [(x.rope, &x.rope_out, names.rope, axes[0])];
    let nope = x.nope.as_ref().map(|(x, out)| (*x, out, names.nope, axes[1]));
    for (x, out, [arg, arg_out], axes) in rope.into_iter().chain(nope) {
        dims.bind(arg, &x, axes)?.bind(arg_out, out, axes)?;
        check_rows(op, arg, &x)?;
        if !matches!(out.dtype(), DType::F32 | DType::F16 | DType::BF16 | DType::E4M3 | DType::E5M2) {
            let want = "f32, f16, bf16, e4m3 or e5m2".into();
            return Err(Error::DType { op, arg: arg_out, got: out.dtype().name(), want });
        }
        check_last_axis(op, arg_out, out.layout())?;
    }
    if x.scale.is_finite() && x.scale > 0.0 {
        Ok(())
    } else {
        Err(Error::value(op, names.scale, x.scale, "a finite number above 0"))
    }
}

/// Adds `x`, which was checked, to the work.
fn quantize<'a>(
    work: &mut Work<'a>,
    op: &'static str,
    x: Roped<'a>,
    names: &Names,
    positions: &'a [i64],
    angles: &'a cpu::rope::Angles<'_>,
) -> Result<()> {
    let Roped { rope, rope_out, nope, scale } = x;
    let [arg, arg_out] = names.rope;
    let rotated = Tokens::plain(op, arg, rope)?.rotated(angles, positions);
    cpu::rope::quantize(work, op, arg_out, rotated, scale, rope_out)?;
    if let Some((x, out)) = nope {
        let [arg, arg_out] = names.nope;
        cpu::rope::quantize(work, op, arg_out, Tokens::plain(op, arg, x)?, scale, out)?;
    }
    Ok(())
}

/// As [`quantize`], for CUDA.
#[cfg(feature = "cuda")]
fn streams<'a>(x: Roped<'a>, names: &Names) -> impl Iterator<Item = cuda::tokens::Stream<'a>> {
    let Roped { rope, rope_out, nope, scale } = x;
    let [arg, arg_out] = names.rope;
    let rotated = stream((arg, rope), (arg_out, rope_out), scale);
    let [arg, arg_out] = names.nope;
    let nope = nope.map(|(x, out)| cuda::tokens::Stream { rotated: false, ..stream((arg, x), (arg_out, out), scale) });
    [rotated].into_iter().chain(nope)
}

/// Rows that are rotated into rows.
#[cfg(feature = "cuda")]
fn stream<'a>(
    from: (&'static str, TensorRef<'a>),
    to: (&'static str, TensorMut<'a>),
    scale: f32,
) -> cuda::tokens::Stream<'a> {
    cuda::tokens::Stream { from: Some(from), rotated: true, rest: None, to, paged: false, block_scales: None, scale }
}

/// Positions and angles as CUDA kernels take them. What a device holds is not looked at: a position outside of a table makes
/// NaN.
#[cfg(feature = "cuda")]
fn on_cuda<'a>(
    op: &'static str,
    positions: Positions<'a>,
    nnz: usize,
    angles: &Angles<'a>,
    head_dim: usize,
) -> Result<cuda::tokens::Rotation<'a>> {
    check_positions(op, positions, nnz)?;
    let positions = match positions {
        Positions::Ids(ids) => cuda::tokens::Positions::Ids(ids),
        Positions::Ragged { indptr, offsets } => cuda::tokens::Positions::Ragged { indptr, offsets },
    };
    Ok(match *angles {
        Angles::Rope(rope) => {
            rotary_dim(op, &rope, head_dim)?;
            let angles = cuda::tokens::Angles::Formula(frequencies(&rope, head_dim));
            cuda::tokens::Rotation { positions, angles, interleave: rope.interleave }
        }
        Angles::Cache { table, interleave } => {
            check_table(op, table, head_dim)?;
            cuda::tokens::Rotation { positions, angles: cuda::tokens::Angles::Table(table), interleave }
        }
    })
}

/// How many elements of a head rotate.
pub(super) fn rotary_dim(op: &'static str, rope: &Rope, head_dim: usize) -> Result<usize> {
    if let Some((field, got, want)) = rope.fault() {
        return Err(Error::value(op, "rope", format!("{field} {got}"), want));
    }
    let dim = rope
        .rotated(head_dim)
        .map_err(|want| Error::value(op, "rope.rotary_dim", rope.rotary_dim.unwrap_or(head_dim), want))?;
    // Tensors without tokens may claim heads of any size; a table of frequencies is made for the head.
    if !(1..=1 << 20).contains(&dim) {
        return Err(Error::value(op, "rope.rotary_dim", dim, "an even number from 2 to 2^20"));
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
            let rows = check_table(op, table, head_dim)?;
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

/// The positions that a table has rows for.
fn check_table(op: &'static str, table: TensorRef<'_>, head_dim: usize) -> Result<usize> {
    let mut dims = Dims::of(op);
    dims.bind("table", &table, &["max_position", "rotary_dim"])?;
    let dim = dims.get("rotary_dim");
    if dim == 0 || !dim.is_multiple_of(2) || dim > head_dim {
        let want = format!("an even number from 2 to head_dim={head_dim}");
        return Err(Error::value(op, "table", format!("rotary_dim={dim}"), want));
    }
    Ok(dims.get("max_position"))
}

fn check_positions(op: &'static str, positions: Positions<'_>, nnz: usize) -> Result<()> {
    match positions {
        Positions::Ids(ids) => check_integers(op, "positions", ids, "nnz", nnz, "q"),
        Positions::Ragged { indptr, .. } if indptr.rows() != nnz => {
            Err(Error::Dim { op, arg: "indptr", axis: "nnz", got: indptr.rows(), first: "q", want: nnz })
        }
        Positions::Ragged { indptr, offsets } => {
            check_integers(op, "offsets", offsets, "batch", indptr.batch(), "indptr")
        }
    }
}

/// The position of each of `nnz` tokens.
pub(super) fn resolve(op: &'static str, positions: Positions<'_>, nnz: usize) -> Result<Vec<i64>> {
    check_positions(op, positions, nnz)?;
    match positions {
        Positions::Ids(ids) => integers(op, "positions", ids, "nnz", nnz, "q"),
        Positions::Ragged { indptr, offsets } => {
            let offsets = integers(op, "offsets", offsets, "batch", indptr.batch(), "indptr")?;
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

/// Refuses what is no vector of `want` i32 or i64.
pub(super) fn check_integers(
    op: &'static str,
    arg: &'static str,
    x: TensorRef<'_>,
    axis: &'static str,
    want: usize,
    first: &'static str,
) -> Result<()> {
    let &[got] = x.shape() else {
        return Err(Error::Rank { op, arg, got: x.shape().len(), want: 1, axes: format!("[{axis}]") });
    };
    if got != want {
        return Err(Error::Dim { op, arg, axis, got, first, want });
    }
    match x.dtype() {
        DType::I32 | DType::I64 => Ok(()),
        other => Err(Error::DType { op, arg, got: other.name(), want: "i32 or i64".into() }),
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
    check_integers(op, arg, x, axis, want, first)?;
    x.layout().check_listed(op, arg)?;
    if x.dtype() == DType::I32 {
        let x = x.typed::<i32>(op, arg)?;
        return Ok(x.layout().offsets().map(|i| i64::from(x.data()[i])).collect());
    }
    let x = x.typed::<i64>(op, arg)?;
    Ok(x.layout().offsets().map(|i| x.data()[i]).collect())
}
