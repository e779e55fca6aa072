//! Mixtures of experts: routing of tokens, dispatch by expert, and the experts' feed-forward layers.
//!
//! ```
//! use fir::moe::{FfnArgs, Gate, Routing, RouteArgs, moe_ffn, route};
//! use fir::{DType, Exec, Tensor};
//!
//! let exec = Exec::cpu()?;
//! let (tokens, experts, top_k, hidden, inter) = (3, 4, 2, 16, 8);
//! let x = Tensor::zeros(DType::BF16, &[tokens, hidden])?;
//! let logits = Tensor::zeros(DType::F32, &[tokens, experts])?;
//! let mut ids = Tensor::zeros(DType::I32, &[tokens, top_k])?;
//! let mut weights = Tensor::zeros(DType::F32, &[tokens, top_k])?;
//! let (logits, bias) = (logits.view(), None);
//! let args = RouteArgs { logits, bias, ids: ids.view_mut(), weights: weights.view_mut() };
//! route(&exec, Routing::default(), args)?;
//! assert_eq!(weights.as_slice::<f32>()?, [0.5; 6]);
//!
//! let w_gate_up = Tensor::zeros(DType::BF16, &[experts, 2 * inter, hidden])?;
//! let w_down = Tensor::zeros(DType::BF16, &[experts, hidden, inter])?;
//! let mut out = x.clone();
//! moe_ffn(
//!     &exec,
//!     FfnArgs {
//!         x: x.view(),
//!         ids: ids.view(),
//!         weights: weights.view(),
//!         w_gate_up: w_gate_up.view().into(),
//!         w_down: w_down.view().into(),
//!         gate: Gate::Silu,
//!         out: out.view_mut(),
//!     },
//! )?;
//! # Ok::<(), fir::Error>(())
//! ```

use super::gemm::bind_scaled;
pub use crate::args::TableRouteArgs;
use crate::cpu;
use crate::cpu::moe::{Ffn, Route};
#[cfg(feature = "cuda")]
use crate::cuda;
use crate::error::{Error, Result};
use crate::exec::Exec;
use crate::kv::Ragged;
pub use crate::routing::{Groups, Routing, Score};
#[cfg(feature = "cuda")]
use crate::tensor::Place;
use crate::tensor::{DType, Dims, Scaled, TensorMut, TensorRef};

/// What [`route`] reads and writes.
#[derive(Debug)]
pub struct RouteArgs<'a> {
    /// `[tokens, experts]`, f32, f16 or bf16; rows contiguous
    pub logits: TensorRef<'a>,
    /// `[experts]`, f32, f16 or bf16: added to the scores by which experts are chosen, but not to their weights
    pub bias: Option<TensorRef<'a>>,
    /// `[tokens, top_k]`, i32: a token's experts, the best first; rows contiguous
    pub ids: TensorMut<'a>,
    /// `[tokens, top_k]`, f32: their weights; rows contiguous
    pub weights: TensorMut<'a>,
}

/// Chooses each token's experts and weighs them.
///
/// `s = score(logits[t])`, `c = s + bias`; `ids[t]` are the `top_k` experts of the largest `c` (among the groups of the
/// largest sums of two `c`, if there are groups); `weights[t, j] = s[ids[t, j]] / (Σ_j s[ids[t, j]] + 1e-20) * scale`,
/// without the division unless the rule renormalizes
///
/// Of equal ones the first is chosen. A NaN logit does not count for a softmax, and is chosen after all others.
pub fn route(exec: &Exec, routing: Routing, args: RouteArgs<'_>) -> Result<()> {
    const OP: &str = "route";
    let RouteArgs { logits, bias, ids, weights } = args;
    let mut dims = Dims::of(OP);
    dims.bind("logits", &logits, &["tokens", "experts"])?;
    if let Some(bias) = &bias {
        dims.bind("bias", bias, &["experts"])?;
    }
    dims.bind("ids", &ids, &["tokens", "top_k"])?.bind("weights", &weights, &["tokens", "top_k"])?;
    let (experts, top_k) = (dims.get("experts"), dims.get("top_k"));
    if experts > i32::MAX as usize {
        return Err(Error::value(OP, "experts", experts, "at most 2^31 - 1"));
    }
    let Groups { count, chosen } = routing.groups.unwrap_or(Groups { count: 1, chosen: 1 });
    if count == 0 || !experts.is_multiple_of(count) {
        return Err(Error::value(OP, "groups.count", count, format!("a divisor of {experts} experts")));
    }
    if chosen == 0 || chosen > count {
        return Err(Error::value(OP, "groups.chosen", chosen, format!("1 to {count}")));
    }
    let most = experts / count * chosen;
    if top_k > most {
        return Err(Error::value(OP, "top_k", top_k, format!("at most the {most} experts to choose from")));
    }
    if !routing.scale.is_finite() {
        return Err(Error::value(OP, "scale", routing.scale, "a finite number"));
    }
    match exec {
        Exec::Cpu(cpu) => cpu::moe::route(cpu, OP, Route { routing, logits, bias, ids, weights }),
        #[cfg(feature = "cuda")]
        Exec::Cuda(gpu) => cuda::moe::route(gpu, OP, cuda::moe::Route { routing, logits, bias, ids, weights }),
    }
}

/// Weighs experts that a table names for each token of the vocabulary.
///
/// `ids[t] = table[tokens[t]]`, `weights[t, j] = s_j / Σ_j s_j`, `s_j = sqrt(log(1 + e^logits[t, ids[t, j]]))`; with `shared`,
/// after them an expert of the number of `experts` and of that weight
///
/// Numbers that are on a device nobody looks at before the kernel does: a token past the table, or an expert past the logits,
/// has id -1 and weight 0 there.
pub fn route_by_table(exec: &Exec, args: TableRouteArgs<'_>) -> Result<()> {
    const OP: &str = "route_by_table";
    let mut dims = Dims::of(OP);
    dims.bind("logits", &args.logits, &["tokens", "experts"])?.bind("tokens", &args.tokens, &["tokens"])?;
    dims.bind("table", &args.table, &["vocabulary", "top_k"])?;
    let slots = dims.get("top_k") + usize::from(args.shared.is_some());
    dims.axis("table", "slots", slots)?;
    dims.bind("ids", &args.ids, &["tokens", "slots"])?.bind("weights", &args.weights, &["tokens", "slots"])?;
    for (arg, got, want) in [
        ("table", args.table.dtype(), DType::I32),
        ("ids", args.ids.dtype(), DType::I32),
        ("weights", args.weights.dtype(), DType::F32),
    ] {
        if got != want {
            return Err(Error::DType { op: OP, arg, got: got.name(), want: want.name().into() });
        }
    }
    if dims.get("experts") >= i32::MAX as usize {
        return Err(Error::value(OP, "experts", dims.get("experts"), "less than 2^31 - 1"));
    }
    if args.shared.is_some_and(|w| !w.is_finite()) {
        return Err(Error::value(OP, "shared", format!("{:?}", args.shared), "a finite number"));
    }
    match exec {
        Exec::Cpu(_) => cpu::moe::route_by_table(OP, args),
        #[cfg(feature = "cuda")]
        Exec::Cuda(gpu) => cuda::moe::route_by_table(gpu, OP, args),
    }
}

/// The pairs of a token and one of its experts, sorted by expert: the order in which experts meet their rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dispatch {
    pairs: Vec<u32>,
    indptr: Ragged,
}

impl Dispatch {
    /// Sorts the pairs of `ids`, `[tokens, top_k]`, i32 or i64, in time linear in their number. A pair whose id is
    /// negative has no expert here; an id of `experts` or more is refused.
    pub fn new(ids: TensorRef<'_>, experts: usize) -> Result<Self> {
        const OP: &str = "Dispatch";
        Dims::of(OP).bind("ids", &ids, &["tokens", "top_k"])?;
        Self::of(OP, &checked_ids(OP, ids, experts)?, experts)
    }

    /// Of ids that were checked.
    fn of(op: &'static str, ids: &[i64], experts: usize) -> Result<Self> {
        if ids.len() > i32::MAX as usize {
            return Err(Error::value(op, "ids", format!("{} pairs", ids.len()), "at most 2^31 - 1"));
        }
        let mut lens = vec![0u32; experts];
        let here = || ids.iter().enumerate().filter(|(_, id)| **id >= 0).map(|(pair, &id)| (pair as u32, id as usize));
        here().for_each(|(_, id)| lens[id] += 1);
        let indptr = Ragged::from_lens(&lens)?;
        let mut next: Vec<usize> = indptr.indptr().iter().map(|&at| at as usize).collect();
        let mut pairs = vec![0; indptr.rows()];
        for (pair, id) in here() {
            pairs[next[id]] = pair;
            next[id] += 1;
        }
        Ok(Self { pairs, indptr })
    }

    /// Pairs (`token * top_k + choice`), by expert and then in ascending order.
    pub fn pairs(&self) -> &[u32] {
        &self.pairs
    }

    /// Where each expert's pairs begin and end.
    pub fn indptr(&self) -> &Ragged {
        &self.indptr
    }
}

fn checked_ids(op: &'static str, ids: TensorRef<'_>, experts: usize) -> Result<Vec<i64>> {
    let ids = cpu::sampling::read_ids(op, "ids", ids)?;
    match ids.iter().position(|&id| usize::try_from(id).is_ok_and(|id| id >= experts)) {
        Some(i) => Err(Error::value(op, "ids", format!("{} at {i}", ids[i]), format!("less than {experts}"))),
        None => Ok(ids),
    }
}

/// The function of the gate in [`moe_ffn`]; see [`activation`](super::activation).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Gate {
    /// `g / (1 + e^-g)`
    #[default]
    Silu,
    /// `g / 2 * (1 + erf(g / √2))`
    Gelu,
    /// `g / 2 * (1 + tanh(√(2/π) * (g + 0.044715 * g³)))`
    GeluTanh,
}

/// What [`moe_ffn`] reads and writes.
#[derive(Debug)]
pub struct FfnArgs<'a> {
    /// `[tokens, hidden]`, f32, f16 or bf16; rows contiguous
    pub x: TensorRef<'a>,
    /// `[tokens, top_k]`, i32 or i64; a choice with a negative id is left out. In a device's memory nobody looks at them
    /// before the kernels do, which leave one past the experts out too
    pub ids: TensorRef<'a>,
    /// `[tokens, top_k]`, f32; rows contiguous
    pub weights: TensorRef<'a>,
    /// `[experts, 2 * inter, hidden]`, gates first; types as the weights of [`grouped_gemm`](super::gemm::grouped_gemm)
    pub w_gate_up: Scaled<'a>,
    /// `[experts, hidden, inter]`, as `w_gate_up`
    pub w_down: Scaled<'a>,
    /// The function of the gate.
    pub gate: Gate,
    /// `[tokens, hidden]`, of `x`'s type; rows contiguous
    pub out: TensorMut<'a>,
}

/// The weighted sum of what a token's experts make of it.
///
/// `out[t] = Σ_j weights[t, j] * w_down[e] · (gate(w_gate[e] · x[t]) * (w_up[e] · x[t]))`, `e = ids[t, j]`, `w_gate` and
/// `w_up` being the halves of `w_gate_up`
///
/// Sums are f32, in order of the token's choices; between the two products there are numbers of `x`'s type. A token's
/// result depends on no other token. Experts that all tokens share are the caller's own, added afterwards.
pub fn moe_ffn(exec: &Exec, args: FfnArgs<'_>) -> Result<()> {
    const OP: &str = "moe_ffn";
    /// Bytes of rows between the products that are held at once: more tokens are taken in turns.
    const HELD: usize = 64 << 20;
    let FfnArgs { x, ids, weights, w_gate_up, w_down, gate, mut out } = args;
    let mut dims = Dims::of(OP);
    dims.bind("x", &x, &["tokens", "hidden"])?.bind("ids", &ids, &["tokens", "top_k"])?;
    dims.bind("weights", &weights, &["tokens", "top_k"])?;
    bind_scaled(&mut dims, OP, ["w_gate_up", "w_gate_up.scales"], &w_gate_up, &["experts", "2 * inter", "hidden"])?;
    let (hidden, top_k) = (dims.get("hidden"), dims.get("top_k"));
    let width = dims.get("2 * inter");
    if !width.is_multiple_of(2) {
        return Err(Error::value(OP, "w_gate_up", format!("{width} rows"), "an even number, 2 * inter"));
    }
    dims.axis("w_gate_up", "inter", width / 2)?;
    bind_scaled(&mut dims, OP, ["w_down", "w_down.scales"], &w_down, &["experts", "hidden", "inter"])?;
    dims.bind("out", &out, &["tokens", "hidden"])?;
    for (arg, got, want) in [
        ("weights", weights.dtype(), DType::F32),
        ("w_down", w_down.data.dtype(), w_gate_up.data.dtype()),
        ("out", out.dtype(), x.dtype()),
    ] {
        if got != want {
            return Err(Error::DType { op: OP, arg, got: got.name(), want: want.name().into() });
        }
    }
    for (arg, w) in [("w_gate_up.scales", &w_gate_up), ("w_down.scales", &w_down)] {
        if w.scales.is_some() && !matches!(w.data.dtype(), DType::E4M3 | DType::E5M2) {
            return Err(Error::value(OP, arg, "given", format!("none with weights of {}", w.data.dtype())));
        }
    }
    let experts = dims.get("experts");
    #[cfg(feature = "cuda")]
    if let Exec::Cuda(gpu) = exec {
        // Ids on the device are not looked at: its kernels leave one past the experts out, as a negative one.
        if ids.place() == Place::Host {
            checked_ids(OP, ids, experts)?;
        }
        let gate = match gate {
            Gate::Silu => cuda::gemm::Gate::Silu,
            Gate::Gelu => cuda::gemm::Gate::Gelu,
            Gate::GeluTanh => cuda::gemm::Gate::GeluTanh,
        };
        return cuda::moe::ffn(gpu, OP, cuda::moe::Ffn { x, ids, weights, w_gate_up, w_down, gate, out });
    }
    let ids = checked_ids(OP, ids, experts)?;
    if out.layout().is_empty() {
        return Ok(());
    }
    let row = hidden.saturating_add(width).saturating_mul(6).saturating_mul(top_k.max(1));
    let each = (HELD / row.max(1)).max(1);
    let tokens = dims.get("tokens");
    for from in (0..tokens).step_by(each) {
        let range = from..tokens.min(from + each);
        let dispatch = Dispatch::of(OP, &ids[from * top_k..range.end * top_k], experts)?;
        let ffn = Ffn {
            x: x.slice(0, range.clone())?,
            weights: weights.slice(0, range.clone())?,
            pairs: &dispatch.pairs,
            indptr: dispatch.indptr.indptr(),
            w_gate_up,
            w_down,
            out: out.reborrow().slice(0, range)?,
        };
        let cpu = exec.cpu_only(OP)?;
        match gate {
            Gate::Silu => cpu::moe::ffn(cpu, OP, cpu::activation::Silu, ffn),
            Gate::Gelu => cpu::moe::ffn(cpu, OP, cpu::activation::Gelu, ffn),
            Gate::GeluTanh => cpu::moe::ffn(cpu, OP, cpu::activation::GeluTanh, ffn),
        }?;
    }
    Ok(())
}
