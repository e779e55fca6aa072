//! Sampling: from a row of logits or probabilities to a token.
//!
//! | operator | from | draws among |
//! |---|---|---|
//! | [`sample_from_probs`] | probabilities | all tokens |
//! | [`top_k_sample`], [`top_p_sample`], [`min_p_sample`], [`top_k_top_p_sample`] | probabilities | what passes |
//! | [`sample_from_logits`], [`top_k_top_p_sample_from_logits`] | logits | all tokens, what passes |
//! | [`sample`] | logits | what passes all of [`Filters`], with a temperature: an engine's one call |
//!
//! A token is drawn by inverse CDF: with `u` uniform in `[0, 1)` and `w` the row's weights that pass, it is the first
//! `i` with `w[0] + … + w[i] > u · Σ w`. One `u` per row, from [`RngState`]: a row's token depends on its numbers, its
//! parameters and its state, not on the other rows nor on the number of threads. Logits become weights by softmax.
//! (The Gumbel maximum would need a random number for each token of the vocabulary.)
//!
//! Weights need not sum to 1. Negative and zero ones are never drawn. A row that is no distribution (a NaN; an infinite
//! or no positive mass; logits of -inf alone) gives token 0 and `valid` false. A logit of +inf takes all the mass, in
//! equal parts if there are several.
//!
//! On CUDA a value for each row ([`PerRow::Each`]) is copied to the device by the call, which waits for that; ids in the
//! device's memory are not looked at before the launch, and one out of range counts as the nearest in it. The draws are
//! the CPU's but where two sums, in another order, fall on different sides of `u · Σ w`.

use crate::cpu;
use crate::cpu::sampling::{Keep, Kind};
#[cfg(feature = "cuda")]
use crate::cuda;
use crate::error::{Error, Result};
use crate::exec::Exec;
pub use crate::filters::{FilterOrder, Filters, PerRow};
pub use crate::philox::RngState;
#[cfg(feature = "cuda")]
use crate::tensor::Place;
use crate::tensor::{DType, Dims, TensorMut, TensorRef};

/// Where a sampler's randomness comes from and where its tokens go.
#[derive(Debug)]
pub struct Draw<'a> {
    /// One uniform number is drawn for each row of the output.
    pub rng: PerRow<'a, RngState>,
    /// `[batch]`, i32 or i64: the row of the input for each row of the output; as they come when not given.
    /// Parameters and states belong to rows of the output.
    pub indices: Option<TensorRef<'a>>,
    /// `[batch]`, i32 or i64
    pub out: TensorMut<'a>,
    /// `[batch]`, bool: whether the row was a distribution; written when given.
    pub valid: Option<TensorMut<'a>>,
}

impl<'a> Draw<'a> {
    /// Every row of the input once, into `out`.
    pub fn new(rng: impl Into<PerRow<'a, RngState>>, out: TensorMut<'a>) -> Self {
        Self { rng: rng.into(), indices: None, out, valid: None }
    }
}

/// Turns logits into probabilities.
///
/// `out[b, i] = exp(logits[b, i] / temperature[b]) / Σ_j exp(logits[b, j] / temperature[b])`
///
/// At temperature 0 it is 1 for the largest logit, of equal ones the first. A row with a NaN, or of -inf alone, gives
/// NaN; +inf takes all the mass, in equal parts if there are several.
///
/// * `logits`: `[batch, vocab]`, f32, f16 or bf16; rows contiguous
/// * `temperature`: finite, 0 or more
/// * `out`: `[batch, vocab]`, f32; rows contiguous
pub fn softmax(exec: &Exec, logits: TensorRef<'_>, temperature: PerRow<'_, f32>, out: TensorMut<'_>) -> Result<()> {
    const OP: &str = "softmax";
    let mut dims = Dims::of(OP);
    dims.bind("logits", &logits, &["batch", "vocab"])?.bind("out", &out, &["batch", "vocab"])?;
    check_float(OP, "logits", logits.dtype())?;
    check_dtype(OP, "out", out.dtype(), DType::F32)?;
    check_temperature(OP, temperature, dims.get("batch"))?;
    match exec {
        Exec::Cpu(cpu) => cpu::sampling::softmax(cpu, logits, temperature, out),
        #[cfg(feature = "cuda")]
        Exec::Cuda(gpu) => cuda::sampling::softmax(gpu, logits, temperature, out),
    }
}

/// Draws a token for each row of probabilities: `P(out[b] = i) = probs[b, i] / Σ_j probs[b, j]`.
///
/// * `probs`: `[batch, vocab]` (`[rows, vocab]` with `draw.indices`), f32; rows contiguous
pub fn sample_from_probs(exec: &Exec, probs: TensorRef<'_>, draw: Draw<'_>) -> Result<()> {
    run(exec, "sample_from_probs", Kind::Probs, probs, Filters::default(), draw)
}

/// Draws a token for each row of logits: `P(out[b] = i) = softmax(logits[b] / temperature[b])[i]`.
///
/// * `logits`: `[batch, vocab]` (`[rows, vocab]` with `draw.indices`), f32, f16 or bf16; rows contiguous
/// * `temperature`: finite, 0 or more; 0 takes the largest logit, of equal ones the first
pub fn sample_from_logits(
    exec: &Exec,
    logits: TensorRef<'_>,
    temperature: PerRow<'_, f32>,
    draw: Draw<'_>,
) -> Result<()> {
    let filters = Filters { temperature, ..Filters::default() };
    run(exec, "sample_from_logits", Kind::Logits, logits, filters, draw)
}

/// Draws a token for each row among its `top_k` most probable ones, and the equals of the last of them.
///
/// `P(out[b] = i) ∝ probs[b, i]` where fewer than `top_k[b]` probabilities are greater, else 0
///
/// * `probs`: `[batch, vocab]` (`[rows, vocab]` with `draw.indices`), f32; rows contiguous
/// * `top_k`: 1 or more
pub fn top_k_sample(exec: &Exec, probs: TensorRef<'_>, top_k: PerRow<'_, u32>, draw: Draw<'_>) -> Result<()> {
    run(exec, "top_k_sample", Kind::Probs, probs, Filters { top_k, ..Filters::default() }, draw)
}

/// Draws a token for each row among the fewest most probable ones that together reach the share `top_p` of the mass,
/// and the equals of the last of them.
///
/// `P(out[b] = i) ∝ probs[b, i]` where the greater probabilities sum to less than `top_p[b] · Σ probs[b]`, else 0
///
/// * `probs`: `[batch, vocab]` (`[rows, vocab]` with `draw.indices`), f32; rows contiguous
/// * `top_p`: in `(0, 1]`
pub fn top_p_sample(exec: &Exec, probs: TensorRef<'_>, top_p: PerRow<'_, f32>, draw: Draw<'_>) -> Result<()> {
    run(exec, "top_p_sample", Kind::Probs, probs, Filters { top_p, ..Filters::default() }, draw)
}

/// Draws a token for each row among those at least `min_p` times as probable as the most probable.
///
/// `P(out[b] = i) ∝ probs[b, i]` where `probs[b, i] >= min_p[b] · max(probs[b])`, else 0
///
/// * `probs`: `[batch, vocab]` (`[rows, vocab]` with `draw.indices`), f32; rows contiguous
/// * `min_p`: in `[0, 1]`
pub fn min_p_sample(exec: &Exec, probs: TensorRef<'_>, min_p: PerRow<'_, f32>, draw: Draw<'_>) -> Result<()> {
    run(exec, "min_p_sample", Kind::Probs, probs, Filters { min_p, ..Filters::default() }, draw)
}

/// Draws a token for each row among those that pass `top_k` and `top_p`; see [`Filters`] for their meaning together.
///
/// * `probs`: `[batch, vocab]` (`[rows, vocab]` with `draw.indices`), f32; rows contiguous
/// * `top_k`: 1 or more; `top_p`: in `(0, 1]`
pub fn top_k_top_p_sample(
    exec: &Exec,
    probs: TensorRef<'_>,
    top_k: PerRow<'_, u32>,
    top_p: PerRow<'_, f32>,
    order: FilterOrder,
    draw: Draw<'_>,
) -> Result<()> {
    let filters = Filters { top_k, top_p, order, ..Filters::default() };
    run(exec, "top_k_top_p_sample", Kind::Probs, probs, filters, draw)
}

/// As [`top_k_top_p_sample`] on `softmax(logits)`.
///
/// * `logits`: `[batch, vocab]` (`[rows, vocab]` with `draw.indices`), f32, f16 or bf16; rows contiguous
/// * `top_k`: 1 or more; `top_p`: in `(0, 1]`
pub fn top_k_top_p_sample_from_logits(
    exec: &Exec,
    logits: TensorRef<'_>,
    top_k: PerRow<'_, u32>,
    top_p: PerRow<'_, f32>,
    order: FilterOrder,
    draw: Draw<'_>,
) -> Result<()> {
    let filters = Filters { top_k, top_p, order, ..Filters::default() };
    run(exec, "top_k_top_p_sample_from_logits", Kind::Logits, logits, filters, draw)
}

/// Draws a token for each row of logits, with a temperature and every filter, each with its own value per row.
///
/// `P(out[b] = i) ∝ exp(logits[b, i] / temperature[b])` where token `i` passes; see [`Filters`]
///
/// * `logits`: `[batch, vocab]` (`[rows, vocab]` with `draw.indices`), f32, f16 or bf16; rows contiguous
pub fn sample(exec: &Exec, logits: TensorRef<'_>, filters: Filters<'_>, draw: Draw<'_>) -> Result<()> {
    run(exec, "sample", Kind::Logits, logits, filters, draw)
}

/// Keeps the `top_k` largest probabilities of each row, and all equal to the last of them, and scales them to sum to 1.
///
/// `out[b, i] = probs[b, i] / Σ_kept` where fewer than `top_k[b]` probabilities are greater, else 0
///
/// A row that is no distribution gives NaN.
///
/// * `probs`, `out`: `[batch, vocab]`, f32; rows contiguous
/// * `top_k`: 1 or more
pub fn top_k_renorm(exec: &Exec, probs: TensorRef<'_>, top_k: PerRow<'_, u32>, out: TensorMut<'_>) -> Result<()> {
    const OP: &str = "top_k_renorm";
    check_top_k(OP, top_k, check_renorm(OP, &probs, &out)?)?;
    match exec {
        Exec::Cpu(cpu) => cpu::sampling::renorm(cpu, OP, probs, Keep::TopK(top_k), out),
        #[cfg(feature = "cuda")]
        Exec::Cuda(gpu) => cuda::sampling::top_k_renorm(gpu, OP, probs, top_k, out),
    }
}

/// Keeps the fewest largest probabilities of each row that reach the share `top_p` of its mass, and all equal to the
/// last of them, and scales them to sum to 1.
///
/// `out[b, i] = probs[b, i] / Σ_kept` where the greater ones sum to less than `top_p[b] · Σ probs[b]`, else 0
///
/// A row that is no distribution gives NaN.
///
/// * `probs`, `out`: `[batch, vocab]`, f32; rows contiguous
/// * `top_p`: in `(0, 1]`
pub fn top_p_renorm(exec: &Exec, probs: TensorRef<'_>, top_p: PerRow<'_, f32>, out: TensorMut<'_>) -> Result<()> {
    const OP: &str = "top_p_renorm";
    check_top_p(OP, top_p, check_renorm(OP, &probs, &out)?)?;
    match exec {
        Exec::Cpu(cpu) => cpu::sampling::renorm(cpu, OP, probs, Keep::TopP(top_p), out),
        #[cfg(feature = "cuda")]
        Exec::Cuda(gpu) => cuda::sampling::top_p_renorm(gpu, OP, probs, top_p, out),
    }
}

/// Keeps the `top_k` largest logits of each row, and all equal to the last of them; the others become -inf.
///
/// `out[b, i] = logits[b, i]` where fewer than `top_k[b]` logits are greater, else -inf
///
/// NaN stays NaN, and is not counted.
///
/// * `logits`, `out`: `[batch, vocab]`, f32, f16 or bf16, of one type; rows contiguous
/// * `top_k`: 1 or more
pub fn top_k_mask_logits(exec: &Exec, logits: TensorRef<'_>, top_k: PerRow<'_, u32>, out: TensorMut<'_>) -> Result<()> {
    const OP: &str = "top_k_mask_logits";
    let mut dims = Dims::of(OP);
    dims.bind("logits", &logits, &["batch", "vocab"])?.bind("out", &out, &["batch", "vocab"])?;
    check_float(OP, "logits", logits.dtype())?;
    check_dtype(OP, "out", out.dtype(), logits.dtype())?;
    check_vocab(OP, dims.get("vocab"))?;
    check_top_k(OP, top_k, dims.get("batch"))?;
    match exec {
        Exec::Cpu(cpu) => cpu::sampling::top_k_mask_logits(cpu, logits, top_k, out),
        #[cfg(feature = "cuda")]
        Exec::Cuda(gpu) => cuda::sampling::top_k_mask_logits(gpu, OP, logits, top_k, out),
    }
}

fn run(
    exec: &Exec,
    op: &'static str,
    kind: Kind,
    x: TensorRef<'_>,
    filters: Filters<'_>,
    draw: Draw<'_>,
) -> Result<()> {
    let Draw { rng, indices, out, valid } = draw;
    let mut dims = Dims::of(op);
    dims.bind("out", &out, &["batch"])?;
    check_id_type(op, "out", out.dtype())?;
    if let Some(valid) = &valid {
        dims.bind("valid", valid, &["batch"])?;
        check_dtype(op, "valid", valid.dtype(), DType::Bool)?;
    }
    let rows = if indices.is_some() { "rows" } else { "batch" };
    if kind == Kind::Logits {
        check_float(op, "logits", x.dtype())?;
        dims.bind("logits", &x, &[rows, "vocab"])?;
    } else {
        check_dtype(op, "probs", x.dtype(), DType::F32)?;
        dims.bind("probs", &x, &[rows, "vocab"])?;
    }
    check_vocab(op, dims.get("vocab"))?;
    let batch = dims.get("batch");
    check_temperature(op, filters.temperature, batch)?;
    check_top_k(op, filters.top_k, batch)?;
    check_top_p(op, filters.top_p, batch)?;
    check_rows(op, "min_p", filters.min_p, batch, "a number in [0, 1]", |p| (0.0..=1.0).contains(p))?;
    check_rows(op, "rng", rng, batch, "any", |_| true)?;
    if let Some(indices) = &indices {
        dims.bind("indices", indices, &["batch"])?;
    }
    match exec {
        Exec::Cpu(cpu) => {
            let indices = indices.map(|ids| check_ids(op, "indices", ids, x.shape()[0])).transpose()?;
            cpu::sampling::sample(cpu, cpu::sampling::Sample { op, kind, x, indices, filters, rng, out, valid })
        }
        #[cfg(feature = "cuda")]
        Exec::Cuda(gpu) => {
            if let Some(ids) = indices {
                check_host_ids(op, "indices", ids, x.shape()[0])?;
            }
            let logits = kind == Kind::Logits;
            cuda::sampling::sample(gpu, cuda::sampling::Sample { op, logits, x, indices, filters, rng, out, valid })
        }
    }
}

/// As [`check_ids`], of what the host can see: a kernel keeps ids of its device's memory within bounds itself.
#[cfg(feature = "cuda")]
pub(super) fn check_host_ids(op: &'static str, arg: &'static str, ids: TensorRef<'_>, end: usize) -> Result<()> {
    check_id_type(op, arg, ids.dtype())?;
    if on_host(&[Some(ids)]) {
        check_ids(op, arg, ids, end)?;
    }
    Ok(())
}

/// Whether the host can see all of them.
#[cfg(feature = "cuda")]
pub(super) fn on_host(tensors: &[Option<TensorRef<'_>>]) -> bool {
    tensors.iter().flatten().all(|x| x.place() == Place::Host)
}

/// The ids of a tensor, all of them below `end`.
pub(super) fn check_ids(op: &'static str, arg: &'static str, ids: TensorRef<'_>, end: usize) -> Result<Vec<usize>> {
    let ids = cpu::sampling::read_ids(op, arg, ids)?;
    ids.into_iter()
        .enumerate()
        .map(|(i, id)| match usize::try_from(id) {
            Ok(id) if id < end => Ok(id),
            _ => Err(Error::value(op, arg, format!("{id} at {i}"), format!("0 or more and less than {end}"))),
        })
        .collect()
}

/// As many values as rows, if there is one for each, and all of them good.
pub(super) fn check_rows<T: Copy + std::fmt::Debug>(
    op: &'static str,
    arg: &'static str,
    values: PerRow<'_, T>,
    batch: usize,
    want: &str,
    good: impl Fn(&T) -> bool,
) -> Result<()> {
    match values {
        PerRow::One(x) if !good(&x) => Err(Error::value(op, arg, format!("{x:?}"), want)),
        PerRow::Each(xs) if xs.len() != batch => {
            Err(Error::value(op, arg, format!("{} values", xs.len()), format!("{batch}, one per row")))
        }
        PerRow::Each(xs) => match xs.iter().position(|x| !good(x)) {
            Some(r) => Err(Error::value(op, arg, format!("{:?} for row {r}", xs[r]), want)),
            None => Ok(()),
        },
        PerRow::One(_) => Ok(()),
    }
}

fn check_temperature(op: &'static str, temperature: PerRow<'_, f32>, batch: usize) -> Result<()> {
    check_rows(op, "temperature", temperature, batch, "a finite number, 0 or more", |t| t.is_finite() && *t >= 0.0)
}

fn check_top_k(op: &'static str, top_k: PerRow<'_, u32>, batch: usize) -> Result<()> {
    check_rows(op, "top_k", top_k, batch, "1 or more", |&k| k > 0)
}

fn check_top_p(op: &'static str, top_p: PerRow<'_, f32>, batch: usize) -> Result<()> {
    check_rows(op, "top_p", top_p, batch, "a number in (0, 1]", |&p| p > 0.0 && p <= 1.0)
}

/// Returns the batch.
fn check_renorm(op: &'static str, probs: &TensorRef<'_>, out: &TensorMut<'_>) -> Result<usize> {
    let mut dims = Dims::of(op);
    dims.bind("probs", probs, &["batch", "vocab"])?.bind("out", out, &["batch", "vocab"])?;
    check_dtype(op, "probs", probs.dtype(), DType::F32)?;
    check_dtype(op, "out", out.dtype(), DType::F32)?;
    check_vocab(op, dims.get("vocab"))?;
    Ok(dims.get("batch"))
}

/// Places in a row are kept in 32 bits.
pub(super) fn check_vocab(op: &'static str, vocab: usize) -> Result<()> {
    if vocab > i32::MAX as usize {
        return Err(Error::value(op, "vocab", vocab, format!("at most {}", i32::MAX)));
    }
    Ok(())
}

pub(super) fn check_dtype(op: &'static str, arg: &'static str, got: DType, want: DType) -> Result<()> {
    if got == want { Ok(()) } else { Err(Error::DType { op, arg, got: got.name(), want: want.name().into() }) }
}

pub(super) fn check_float(op: &'static str, arg: &'static str, got: DType) -> Result<()> {
    match got {
        DType::F32 | DType::F16 | DType::BF16 => Ok(()),
        _ => Err(Error::DType { op, arg, got: got.name(), want: "f32, f16 or bf16".into() }),
    }
}

pub(super) fn check_id_type(op: &'static str, arg: &'static str, got: DType) -> Result<()> {
    match got {
        DType::I32 | DType::I64 => Ok(()),
        _ => Err(Error::DType { op, arg, got: got.name(), want: "i32 or i64".into() }),
    }
}
