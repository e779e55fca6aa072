//! [`MlaPlan`]: multi-head latent attention over a paged cache of compressed vectors.
//!
//! All heads share one key, `[ckv, kpe]`, and one value, `ckv`:
//!
//! ```text
//! score_j = sm_scale * (q_nope[i, h] · ckv[j] + q_pe[i, h] · kpe[j])
//! o[i, h] = Σ_j softmax_j(score) ckv[j]
//! ```

use super::asked;
use super::batch::{
    Backend, MAX_TOKENS, check_batch, check_output, check_q, check_scale, check_split, check_table, output_sink,
    same_lens, split_scale,
};
use crate::cpu::attention::{self as kernel, Few, Index, Launch, Operand, Shape, Work};
#[cfg(feature = "cuda")]
use crate::cuda::attention as gpu_kernel;
use crate::error::{Error, Result};
use crate::exec::Exec;
use crate::kv::{PageTable, PagedMla, Ragged};
use crate::plan::{Cut, Entry, Schedule, Scratch, Split, Token};
use crate::tensor::{DType, Dims, TensorMut, TensorRef};
use crate::variant::{self, Params, RowProgram, Variant};

/// Which latent attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MlaProblem {
    /// Query heads.
    pub heads: usize,
    /// Elements of the compressed vector: 1 to 512.
    pub head_dim_ckv: usize,
    /// Elements of the rotary part: 0 to 512.
    pub head_dim_kpe: usize,
    /// Type of the query: f32, f16, bf16, e4m3 or e5m2.
    pub q_dtype: DType,
    /// Type of the cache: f32, f16, bf16, e4m3 or e5m2.
    pub kv_dtype: DType,
    /// Type of the output: f32, f16 or bf16.
    pub out_dtype: DType,
    /// Whether query token `i` sees no position past its own.
    pub causal: bool,
}

const OP: &str = "MlaPlan";

/// A batch of latent attention, scheduled: immutable between refills, reusable by every layer of a step.
#[must_use = "a plan does nothing until `run`"]
#[derive(Debug)]
pub struct MlaPlan {
    problem: MlaProblem,
    split: Split,
    workers: usize,
    backend: Backend,
    kv_lens: Vec<u32>,
    /// Offsets of the requests' query tokens.
    qo: Vec<i32>,
    tokens: Vec<Token>,
    /// Query tiles; those of a GPU's kernel for long ones apart.
    entries: Vec<Entry>,
    long: Vec<Entry>,
    schedule: Schedule,
    variant: Variant,
    program: RowProgram,
}

/// One layer's tensors for [`MlaPlan::run`].
#[derive(Debug)]
pub struct MlaArgs<'a> {
    /// `[tokens, heads, head_dim_ckv]`: queries times the key projection.
    pub q_nope: TensorRef<'a>,
    /// `[tokens, heads, head_dim_kpe]`
    pub q_pe: TensorRef<'a>,
    /// The cache.
    pub kv: PagedMla<'a>,
    /// Its pages, with the lengths that were planned.
    pub table: &'a PageTable<'a>,
    /// Factor of the scores. No default: it is `1 / sqrt` of the head dim before compression.
    pub sm_scale: f32,
    /// Made by [`MlaPlan::scratch`]; one per call in flight.
    pub scratch: &'a mut Scratch,
    /// `[tokens, heads, head_dim_ckv]`
    pub out: TensorMut<'a>,
    /// `[tokens, heads]`, f32; written when given.
    pub lse: Option<TensorMut<'a>>,
}

impl MlaPlan {
    /// Cuts the batch over the workers of `exec`.
    ///
    /// * `qo`: query tokens of each request (1 for decode)
    /// * `kv_lens`: cached tokens of each request, the query tokens included
    pub fn new(exec: &Exec, problem: MlaProblem, qo: &Ragged, kv_lens: &[u32], split: Split) -> Result<Self> {
        let mut plan = Self::with_capacity(exec, problem, qo.batch(), split)?;
        plan.refill(qo, kv_lens)?;
        Ok(plan)
    }

    /// An empty plan with room for `requests`; [`Self::refill`] gives it a batch, in the memory of the one before. What that
    /// means on a GPU, and for graphs, is said at [`BatchPlan::with_capacity`](super::BatchPlan::with_capacity).
    pub fn with_capacity(exec: &Exec, problem: MlaProblem, requests: usize, split: Split) -> Result<Self> {
        problem.check(OP)?;
        if requests > MAX_TOKENS {
            return Err(Error::value(OP, "requests", requests, "at most 2^24"));
        }
        check_split(OP, split)?;
        let variant = if problem.causal { variant::causal() } else { variant::standard() };
        let program = RowProgram::new(&variant, problem.head_dim_ckv + problem.head_dim_kpe, problem.head_dim_ckv)?;
        let types = [problem.q_dtype, problem.kv_dtype, problem.out_dtype];
        let backend = match exec {
            Exec::Cpu(cpu) => Backend::Cpu(Shape::new(cpu, problem.heads, &types)),
            #[cfg(feature = "cuda")]
            Exec::Cuda(gpu) => {
                let spec = gpu_kernel::Spec {
                    op: OP,
                    q: problem.q_dtype,
                    kv: problem.kv_dtype,
                    out: problem.out_dtype,
                    dim_qk: problem.head_dim_ckv,
                    dim_vo: problem.head_dim_ckv,
                    dim_pe: Some(problem.head_dim_kpe),
                    group: problem.heads,
                    states: false,
                    many: false,
                    variant: variant.clone(),
                };
                Backend::Cuda(Box::new(gpu_kernel::Plan::new(gpu, spec, [requests, 1], split, false)?))
            }
        };
        Ok(Self {
            problem,
            split,
            workers: exec.workers(),
            backend,
            kv_lens: Vec::with_capacity(requests),
            qo: Vec::with_capacity(requests + 1),
            tokens: Vec::with_capacity(requests),
            entries: Vec::with_capacity(requests),
            long: Vec::new(),
            schedule: Schedule::default(),
            variant,
            program,
        })
    }

    /// Plans another batch in the same memory; arguments as of [`Self::new`].
    pub fn refill(&mut self, qo: &Ragged, kv_lens: &[u32]) -> Result<()> {
        let problem = &self.problem;
        check_batch(OP, qo, kv_lens, problem.heads)?;
        self.kv_lens.clear();
        self.kv_lens.extend_from_slice(kv_lens);
        self.qo.clear();
        self.qo.extend_from_slice(qo.indptr());
        self.tokens.clear();
        Token::list(qo.lens(), kv_lens, &mut self.tokens);
        self.entries.clear();
        self.long.clear();
        for (r, (&q_len, &kv_len)) in qo.lens().iter().zip(kv_lens).enumerate() {
            let (tile, is_long) = self.backend.tile(q_len, problem.heads);
            let entries = if is_long { &mut self.long } else { &mut self.entries };
            for at in (0..q_len).step_by(tile as usize) {
                let rows = tile.min(q_len - at);
                let end =
                    |at: u32| if problem.causal { (kv_len + at).saturating_sub(q_len).min(kv_len) } else { kv_len };
                let (request, q_start) = (r as u32, qo.indptr()[r] as u32 + at);
                let (kv_end, full_end) = (end(at + rows), end(at + 1));
                entries.push(Entry { request, q_start, q_len: rows, kv_start: 0, kv_end, full_end });
            }
        }
        match &mut self.backend {
            Backend::Cpu(_) => {
                let (workers, group, split) = (self.workers, problem.heads as u32, self.split);
                self.schedule
                    .fill(Cut { workers, kv_heads: 1, group, split, in_step: false }, &self.entries)
                    .ok_or_else(|| Error::value(OP, "split", format!("{split:?}"), "at most 2^24 partial rows"))
            }
            #[cfg(feature = "cuda")]
            Backend::Cuda(plan) => plan.fill(gpu_kernel::Batch {
                entries: &self.entries,
                long: &self.long,
                tokens: &self.tokens,
                kv_lens: &self.kv_lens,
                kv_base: None,
            }),
        }
    }

    /// What a graph that records a run with `scratch` counts on: see
    /// [`BatchPlan::recorded`](super::BatchPlan::recorded).
    #[cfg_attr(not(feature = "cuda"), expect(unused))]
    pub fn recorded(&self, scratch: &Scratch) -> Option<u64> {
        match &self.backend {
            Backend::Cpu(_) => None,
            #[cfg(feature = "cuda")]
            Backend::Cuda(plan) => scratch.holds(plan.sizes()).then(|| plan.recorded()),
        }
    }

    /// Query tokens of all requests.
    pub fn tokens(&self) -> usize {
        self.tokens.len()
    }

    /// Which worker does what.
    pub fn schedule(&self) -> &Schedule {
        match &self.backend {
            Backend::Cpu(_) => &self.schedule,
            #[cfg(feature = "cuda")]
            Backend::Cuda(plan) => plan.schedule(),
        }
    }

    /// Scratch of exactly the size that [`Self::run`] needs for the batch as it is planned now; on a GPU a balanced plan's
    /// fits its later batches too.
    pub fn scratch(&self) -> Scratch {
        match &self.backend {
            Backend::Cpu(shape) => Scratch::new(self.partial_floats(), self.workers, self.tile_floats(*shape)),
            #[cfg(feature = "cuda")]
            Backend::Cuda(plan) => plan.scratch(plan.sizes()),
        }
    }

    fn partial_floats(&self) -> usize {
        self.schedule.partial_rows() * (self.problem.head_dim_ckv + 2)
    }

    fn tile_floats(&self, shape: Shape) -> usize {
        let p = &self.problem;
        shape.floats(p.head_dim_ckv + p.head_dim_kpe, p.head_dim_ckv, true)
    }

    /// Runs one layer.
    pub fn run(&self, exec: &Exec, args: MlaArgs<'_>) -> Result<()> {
        const OP: &str = "MlaPlan::run";
        let MlaArgs { q_nope, q_pe, kv, table, sm_scale, scratch, mut out, mut lse } = args;
        let (p, n) = (&self.problem, self.tokens.len());
        check_q(OP, "q_nope", &q_nope, n, p.heads, p.head_dim_ckv, p.q_dtype)?;
        check_q(OP, "q_pe", &q_pe, n, p.heads, p.head_dim_kpe, p.q_dtype)?;
        Dims::of(OP)
            .axis("problem", "head_dim_ckv", p.head_dim_ckv)?
            .axis("problem", "head_dim_kpe", p.head_dim_kpe)?
            .bind("ckv", &kv.ckv, &["pages", "page_size", "head_dim_ckv"])?
            .bind("kpe", &kv.kpe, &["pages", "page_size", "head_dim_kpe"])?;
        if kv.dtype() != p.kv_dtype {
            return Err(Error::DType {
                op: OP,
                arg: "kv",
                got: kv.dtype().name(),
                want: format!("{}, as planned", p.kv_dtype),
            });
        }
        check_table(OP, table, kv.ckv.shape()[0], kv.ckv.shape()[1])?;
        same_lens(OP, table.lens(), &self.kv_lens)?;
        let (given, scale) = (sm_scale, check_scale(OP, sm_scale, kv.ckv_scale)?);
        let (sm_scale, q_factor) = split_scale(scale);
        let ratio = kv.kpe_scale / kv.ckv_scale;
        let kpe_factor = q_factor * ratio;
        if !ratio.is_finite() || !kpe_factor.is_finite() {
            return Err(Error::value(
                OP,
                "kv",
                format!("kpe_scale {} with ckv_scale {}", kv.kpe_scale, kv.ckv_scale),
                "scales whose ratio is finite",
            ));
        }
        check_output(OP, n, p.heads, p.head_dim_ckv, p.out_dtype, &out, lse.as_ref())?;
        let done = exec.overridden(|over| {
            let plain = (kv.ckv_scale, kv.kpe_scale) == (1.0, 1.0) && asked::is_usual(&self.variant, &self.qo);
            let tensors = [("q_nope", q_nope), ("q_pe", q_pe), ("ckv_cache", kv.ckv), ("kpe_cache", kv.kpe)];
            let (ops, index) = (["mla_paged_decode", "mla_paged_prefill_causal"], asked::Index::Paged(table));
            let to = (out.reborrow(), lse.as_mut().map(|l| l.reborrow()));
            Ok(plain && asked::ask((exec, over), ops, &tensors, (&self.qo, index), given, to)?)
        })?;
        if done {
            return Ok(());
        }
        let bound = self.variant.bind(&Params::new(), p.heads, self.kv_lens.len())?;
        let shape = match (&self.backend, exec) {
            (Backend::Cpu(shape), Exec::Cpu(_)) => *shape,
            #[cfg(feature = "cuda")]
            (Backend::Cuda(plan), Exec::Cuda(gpu)) => {
                // One head of all.
                fn head(t: TensorRef<'_>) -> Result<TensorRef<'_>> {
                    t.with_unit_axis()?.transpose(2, 3)
                }
                let queued = plan.run(
                    gpu,
                    gpu_kernel::Args {
                        op: OP,
                        q: ("q_nope", q_nope),
                        q_pe: Some((q_pe, ratio)),
                        k: head(kv.ckv)?,
                        v: head(kv.ckv)?,
                        kpe: Some(head(kv.kpe)?),
                        block_scales: None,
                        index: gpu_kernel::Index::Paged(table),
                        sm_scale: scale,
                        text_scale: scale,
                        v_scale: kv.ckv_scale,
                        bound: &bound,
                        scratch,
                        sink: gpu_kernel::Sink::Output { out, lse },
                        behind: false,
                    },
                );
                return queued.map(|_| ());
            }
            #[cfg(feature = "cuda")]
            _ => return Err(self.backend.refuse(OP, exec)),
        };
        table.check_host(OP)?;
        let sink = output_sink(OP, p.out_dtype, out, lse)?;
        let launch = Launch {
            schedule: &self.schedule,
            tokens: &self.tokens,
            kv_base: None,
            q: &[
                (Operand::new(OP, "q_nope", q_nope, true)?, q_factor),
                (Operand::new(OP, "q_pe", q_pe, true)?, kpe_factor),
            ],
            sm_scale,
            k: &[Operand::new(OP, "ckv", kv.ckv, false)?, Operand::new(OP, "kpe", kv.kpe, false)?],
            v: None,
            v_scale: kv.ckv_scale,
            dim_vo: p.head_dim_ckv,
            out: p.out_dtype,
            // The levels of a cascade of latent attention are plans with outputs of f32: a token has the same bits without one.
            few: if self.split == Split::Balanced { Few::All } else { Few::Never },
            group: p.heads,
            shape,
            kv_heads: 1,
            index: Index::Paged(table),
            program: &self.program,
            bound: &bound,
        };
        let (partials, tiles) = scratch.take(OP, self.partial_floats(), self.tile_floats(shape))?;
        kernel::run(exec.cpu_only(OP)?, &mut [Work { launch: &launch, partials, sink: &sink }], tiles);
        Ok(())
    }
}

impl MlaProblem {
    fn check(&self, op: &'static str) -> Result<()> {
        let mut why = vec![];
        if !(1..=1 << 20).contains(&self.heads) {
            why.push(format!("heads {} is not in 1..=2^20", self.heads));
        }
        if !(1..=512).contains(&self.head_dim_ckv) {
            why.push(format!("head_dim_ckv {} is not in 1..=512", self.head_dim_ckv));
        }
        if self.head_dim_kpe > 512 {
            why.push(format!("head_dim_kpe {} is not in 0..=512", self.head_dim_kpe));
        }
        let float = [DType::F32, DType::F16, DType::BF16];
        for (name, dtype) in [("q_dtype", self.q_dtype), ("kv_dtype", self.kv_dtype)] {
            if !float.contains(&dtype) && dtype != DType::E4M3 && dtype != DType::E5M2 {
                why.push(format!("{name} {dtype} is not f32, f16, bf16, e4m3 or e5m2"));
            }
        }
        if !float.contains(&self.out_dtype) {
            why.push(format!("out_dtype {} is not f32, f16 or bf16", self.out_dtype));
        }
        if why.is_empty() { Ok(()) } else { Err(Error::Unsupported { op, why }) }
    }
}
