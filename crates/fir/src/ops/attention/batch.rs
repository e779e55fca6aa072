//! [`BatchPlan`]: prefill, decode and append in one plan; what the other plans are made of.

use super::asked;
use crate::cpu::attention::{self as kernel, Few, Index, Launch, Operand, Out, Shape, Sink, Work};
use crate::cpu::pool::{RowsMut, RowsOnce};
#[cfg(feature = "cuda")]
use crate::cuda::{self, attention as gpu_kernel};
use crate::error::{Error, Result};
use crate::exec::Exec;
use crate::kv::{Kv, KvPool, Ragged};
use crate::plan::{Cut, Entry, Schedule, Scratch, Split, TILE_KV, Tile, Token};
use crate::tensor::{DType, Dims, Place, TensorMut, TensorRef};
use crate::variant::{Block, Bound, Params, RowProgram, Variant, Visible};

/// Which attention: shapes, element types and variant. Hashable; a kernel is chosen by it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Problem {
    /// Heads of the query; a multiple of `kv_heads`.
    pub qo_heads: usize,
    /// Heads of keys and values.
    pub kv_heads: usize,
    /// Elements of a query or key row: 1 to 512.
    pub head_dim_qk: usize,
    /// Elements of a value or output row: 1 to 512.
    pub head_dim_vo: usize,
    /// Type of the query: f32, f16, bf16, e4m3 or e5m2.
    pub q_dtype: DType,
    /// Type of keys and values: f32, f16, bf16, e4m3, e5m2, or e2m1x2 for NVFP4.
    pub kv_dtype: DType,
    /// Type of the output: f32, f16 or bf16.
    pub out_dtype: DType,
    /// What is done to a score between `q · k` and softmax.
    pub variant: Variant,
}

impl Problem {
    /// One head dim and one type for all.
    pub fn new(qo_heads: usize, kv_heads: usize, head_dim: usize, dtype: DType, variant: Variant) -> Self {
        Self {
            qo_heads,
            kv_heads,
            head_dim_qk: head_dim,
            head_dim_vo: head_dim,
            q_dtype: dtype,
            kv_dtype: dtype,
            out_dtype: dtype,
            variant,
        }
    }

    /// Query heads per KV head.
    pub fn group(&self) -> usize {
        self.qo_heads / self.kv_heads.max(1)
    }

    /// The kernels that a plan of it may need on a device of `arch`, for [`jit::build`](cuda::jit::build): those of a
    /// variant of your own are in no list.
    #[cfg(feature = "cuda")]
    pub fn kernels(&self, arch: cuda::jit::Arch) -> Result<Vec<cuda::jit::Source>> {
        const OP: &str = "Problem::kernels";
        self.check(OP)?;
        gpu_kernel::sources(&self.spec(OP, false, 0), arch)
    }

    #[cfg(feature = "cuda")]
    pub(super) fn spec(&self, op: &'static str, states: bool, requests: usize) -> gpu_kernel::Spec {
        gpu_kernel::Spec {
            op,
            q: self.q_dtype,
            kv: self.kv_dtype,
            out: self.out_dtype,
            dim_qk: self.head_dim_qk,
            dim_vo: self.head_dim_vo,
            dim_pe: None,
            group: self.group(),
            states,
            many: requests >= gpu_kernel::MANY,
            variant: self.variant.clone(),
        }
    }

    fn default_scale(&self) -> f32 {
        1.0 / (self.head_dim_qk as f32).sqrt()
    }

    pub(super) fn check(&self, op: &'static str) -> Result<()> {
        let mut why = vec![];
        if self.kv_heads == 0 || self.qo_heads == 0 || !self.qo_heads.is_multiple_of(self.kv_heads) {
            why.push(format!("qo_heads {} is not a positive multiple of kv_heads {}", self.qo_heads, self.kv_heads));
        }
        // Positions of heads travel as i32.
        if self.qo_heads > 1 << 20 {
            why.push(format!("qo_heads {} > 2^20", self.qo_heads));
        }
        for (name, dim) in [("head_dim_qk", self.head_dim_qk), ("head_dim_vo", self.head_dim_vo)] {
            if !(1..=512).contains(&dim) {
                why.push(format!("{name} {dim} is not in 1..=512"));
            }
        }
        let fp8 = [DType::E4M3, DType::E5M2];
        let float = [DType::F32, DType::F16, DType::BF16];
        if !float.contains(&self.q_dtype) && !fp8.contains(&self.q_dtype) {
            why.push(format!("q_dtype {} is not f32, f16, bf16, e4m3 or e5m2", self.q_dtype));
        }
        if !float.contains(&self.kv_dtype) && !fp8.contains(&self.kv_dtype) && self.kv_dtype != DType::E2M1x2 {
            why.push(format!("kv_dtype {} is not f32, f16, bf16, e4m3, e5m2 or e2m1x2", self.kv_dtype));
        }
        if !float.contains(&self.out_dtype) {
            why.push(format!("out_dtype {} is not f32, f16 or bf16", self.out_dtype));
        }
        if self.kv_dtype == DType::E2M1x2
            && !(self.head_dim_qk.is_multiple_of(16) && self.head_dim_vo.is_multiple_of(16))
        {
            why.push(format!("NVFP4 with head dims {}, {}: not multiples of 16", self.head_dim_qk, self.head_dim_vo));
        }
        if why.is_empty() { Ok(()) } else { Err(Error::Unsupported { op, why }) }
    }
}

/// A batch of requests, scheduled: any number of query tokens each, prefill, decode and append alike. Immutable
/// between refills, reusable by every layer of a step.
#[must_use = "a plan does nothing until `run`"]
#[derive(Debug)]
pub struct BatchPlan {
    problem: Problem,
    split: Split,
    workers: usize,
    backend: Backend,
    program: RowProgram,
    kv_lens: Vec<u32>,
    /// Offsets of the requests' query tokens.
    qo: Vec<i32>,
    tokens: Vec<Token>,
    kv_base: Option<Vec<i32>>,
    /// Query tiles; those of a GPU's kernel for long ones apart.
    entries: Vec<Entry>,
    long: Vec<Entry>,
    schedule: Schedule,
}

/// What a plan is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Use {
    Any,
    /// One token each.
    Decodes,
    /// A level of a cascade, whose rows stay unfinished.
    Level,
}

/// What a plan has of the executor that it was made for.
#[derive(Debug)]
pub(super) enum Backend {
    Cpu(Shape),
    #[cfg(feature = "cuda")]
    Cuda(Box<gpu_kernel::Plan>),
}

impl Backend {
    /// Tokens of a query tile of a request of `q_len` tokens with `group` query heads to a KV head; whether it is one of a
    /// GPU's long tiles.
    pub(super) fn tile(
        &self,
        #[cfg_attr(not(feature = "cuda"), expect(unused))] q_len: u32,
        group: usize,
    ) -> (u32, bool) {
        match self {
            Self::Cpu(shape) => ((shape.rows / group) as u32, false),
            #[cfg(feature = "cuda")]
            Self::Cuda(plan) => plan.tile(q_len),
        }
    }

    /// An executor of the other kind than the plan's.
    #[cfg(feature = "cuda")]
    pub(super) fn refuse(&self, op: &'static str, exec: &Exec) -> Error {
        let own = match self {
            Self::Cpu(_) => "a CPU",
            Self::Cuda(_) => "a CUDA device",
        };
        Error::value(op, "exec", format!("{exec:?}"), format!("{own}, as planned"))
    }
}

/// One layer's tensors for [`BatchPlan::run`].
#[derive(Debug)]
pub struct BatchArgs<'a> {
    /// `[tokens, qo_heads, head_dim_qk]`
    pub q: TensorRef<'a>,
    /// Keys and values of the requests, with the lengths that were planned.
    pub kv: Kv<'a>,
    /// Values of the variant's parameters.
    pub params: &'a Params<'a>,
    /// Factor of the scores; `1 / sqrt(head_dim_qk)` when `None`.
    pub sm_scale: Option<f32>,
    /// Made by [`BatchPlan::scratch`]; one per call in flight.
    pub scratch: &'a mut Scratch,
    /// `[tokens, qo_heads, head_dim_vo]`
    pub out: TensorMut<'a>,
    /// `[tokens, qo_heads]`, f32; written when given.
    pub lse: Option<TensorMut<'a>>,
}

impl BatchPlan {
    /// Chooses a kernel for `problem` and cuts the batch over the workers of `exec`.
    ///
    /// * `qo`: query tokens of each request
    /// * `kv_lens`: cached tokens of each request, the query tokens included
    pub fn new(exec: &Exec, problem: Problem, qo: &Ragged, kv_lens: &[u32], split: Split) -> Result<Self> {
        let mut plan = Self::with_capacity(exec, problem, qo.batch(), split)?;
        plan.refill(qo, kv_lens)?;
        Ok(plan)
    }

    /// An empty plan with room for `requests`; [`Self::refill`] gives it a batch, in the memory of the one before.
    ///
    /// On a GPU a kernel is compiled and loaded by the first batch that needs it: one for requests of up to 16 query rows to
    /// a KV head, one for longer ones. The plan's memory there stays in its place for every balanced batch of up to
    /// `requests` query tiles (decodes, or a KV head's 16 query rows; 64 to 256 of the longer requests); a larger one moves
    /// it, and graphs that were captured before must be captured again, as must those of a batch without long requests
    /// when one with them comes.
    pub fn with_capacity(exec: &Exec, problem: Problem, requests: usize, split: Split) -> Result<Self> {
        Self::with_use(exec, problem, requests, split, Use::Any)
    }

    /// [`Self::with_capacity`] for something special.
    pub(super) fn with_use(
        exec: &Exec,
        problem: Problem,
        requests: usize,
        split: Split,
        #[cfg_attr(not(feature = "cuda"), expect(unused))] used: Use,
    ) -> Result<Self> {
        const OP: &str = "BatchPlan";
        problem.check(OP)?;
        if requests > MAX_TOKENS {
            return Err(Error::value(OP, "requests", requests, "at most 2^24"));
        }
        check_split(OP, split)?;
        let program = RowProgram::new(&problem.variant, problem.head_dim_qk, problem.head_dim_vo)?;
        let types = [problem.q_dtype, problem.kv_dtype, problem.out_dtype];
        let backend = match exec {
            Exec::Cpu(_) if problem.variant.is_cuda_text() => {
                let name = problem.variant.name();
                let why = vec![format!("the hooks of variant `{name}` are CUDA C++ text, which no CPU runs")];
                return Err(Error::Unsupported { op: OP, why });
            }
            Exec::Cpu(cpu) => Backend::Cpu(Shape::new(cpu, problem.group(), &types)),
            #[cfg(feature = "cuda")]
            Exec::Cuda(gpu) => {
                let spec = problem.spec(OP, used == Use::Level, requests);
                let (tiles, decodes) = ([requests, problem.kv_heads], used == Use::Decodes);
                Backend::Cuda(Box::new(gpu_kernel::Plan::new(gpu, spec, tiles, split, decodes)?))
            }
        };
        Ok(Self {
            program,
            problem,
            split,
            workers: exec.workers(),
            backend,
            kv_lens: Vec::with_capacity(requests),
            qo: Vec::with_capacity(requests + 1),
            tokens: Vec::with_capacity(requests),
            kv_base: None,
            entries: Vec::with_capacity(requests),
            long: Vec::new(),
            schedule: Schedule::default(),
        })
    }

    /// Plans another batch in the same memory.
    pub fn refill(&mut self, qo: &Ragged, kv_lens: &[u32]) -> Result<()> {
        const OP: &str = "BatchPlan";
        check_batch(OP, qo, kv_lens, self.problem.qo_heads)?;
        self.tokens.clear();
        Token::list(qo.lens(), kv_lens, &mut self.tokens);
        self.kv_base = None;
        self.fill(qo, kv_lens)
    }

    /// A level of a cascade: `kv_lens[r]` positions from `kv_base[r]` on for each group `r` of query tokens, whose
    /// places in their whole requests are `tokens`.
    pub(super) fn refill_level(
        &mut self,
        qo: &Ragged,
        kv_lens: &[u32],
        tokens: &[Token],
        kv_base: Vec<i32>,
    ) -> Result<()> {
        self.tokens.clear();
        self.tokens.extend_from_slice(tokens);
        self.kv_base = Some(kv_base);
        self.fill(qo, kv_lens)
    }

    fn fill(&mut self, qo: &Ragged, kv_lens: &[u32]) -> Result<()> {
        self.kv_lens.clear();
        self.kv_lens.extend_from_slice(kv_lens);
        self.qo.clear();
        self.qo.extend_from_slice(qo.indptr());
        self.entries.clear();
        self.long.clear();
        let group = self.problem.group();
        let (mask, on_gpu) = (self.program.has_mask(), !matches!(self.backend, Backend::Cpu(_)));
        let (one, text) = (self.backend.tile(1, group), self.problem.variant.is_cuda_text());
        for (r, (&q_len, &kv_len)) in qo.lens().iter().zip(kv_lens).enumerate() {
            let first = qo.indptr()[r] as u32;
            let (tile, long) = if q_len == 1 { one } else { self.backend.tile(q_len, group) };
            let entry = |at: u32| Entry {
                request: r as u32,
                q_start: first + at,
                q_len: tile.min(q_len - at),
                kv_start: 0,
                kv_end: kv_len,
                full_end: kv_len,
            };
            for at in (0..q_len).step_by(tile.max(1) as usize) {
                if !mask && !text {
                    if long { &mut self.long } else { &mut self.entries }.push(entry(at));
                    continue;
                }
                let mut entry = entry(at);
                // One query token sees all but a window or a user's mask, and those the kernel skips tile by tile.
                if q_len > 1 && mask {
                    entry = self.trimmed(entry);
                }
                // The CPU's kernels ask again, when parameters are known; what hooks of text hide is not known at all.
                entry.full_end = if on_gpu && !text { self.full_end(entry) } else { entry.kv_start };
                if long { &mut self.long } else { &mut self.entries }.push(entry);
            }
        }
        match &mut self.backend {
            Backend::Cpu(_) => {
                let (workers, kv_heads, split) = (self.workers, self.problem.kv_heads as u32, self.split);
                let cut = Cut { workers, kv_heads, group: group as u32, split, in_step: false };
                self.schedule.fill(cut, &self.entries).ok_or_else(|| {
                    Error::value("BatchPlan", "split", format!("{split:?}"), "at most 2^24 partial rows")
                })
            }
            #[cfg(feature = "cuda")]
            Backend::Cuda(plan) => plan.fill(gpu_kernel::Batch {
                entries: &self.entries,
                long: &self.long,
                tokens: &self.tokens,
                kv_lens: &self.kv_lens,
                kv_base: self.kv_base.as_deref(),
            }),
        }
    }

    /// How a mask sees tiles `first..end` of an entry, for any parameters.
    fn visible(&self, entry: Entry) -> impl Fn(u32, u32) -> Visible {
        let tokens = &self.tokens[entry.q_start as usize..][..entry.q_len as usize];
        let base = self.kv_base.as_ref().map_or(0, |b| b[entry.request as usize]);
        let block = kernel::block_of(tokens, 0..self.problem.kv_heads as u32, self.problem.group());
        move |first, end| {
            let at = |tile: u32| base + (tile * TILE_KV as u32) as i32;
            let last = (at(end) - 1).min(base + entry.kv_end as i32 - 1);
            self.program.block(None, &Block { kv_pos: (at(first), last), ..block })
        }
    }

    /// Where the first tile ends that not every row sees all of.
    fn full_end(&self, entry: Entry) -> u32 {
        let (first, end) = (entry.kv_start / TILE_KV as u32, entry.kv_end.div_ceil(TILE_KV as u32));
        let visible = self.visible(entry);
        let partly = |first: u32, end: u32| visible(first, end) == Visible::All;
        // The first tile that is not seen by all: those before it are.
        first_shown(&partly, first, end).map_or(entry.kv_end, |tile| tile * TILE_KV as u32)
    }

    /// The entry without the leading and trailing tiles that its mask hides for any parameters.
    fn trimmed(&self, entry: Entry) -> Entry {
        let visible = self.visible(entry);
        let hidden = |first: u32, end: u32| visible(first, end) == Visible::None;
        let tiles = entry.kv_end.div_ceil(TILE_KV as u32);
        match (first_shown(&hidden, 0, tiles), last_shown(&hidden, 0, tiles)) {
            (Some(first), Some(last)) => Entry {
                // The piece from position 0 on begins with the variant's `init`; it skips hidden tiles as it goes.
                kv_start: if self.program.has_init() { 0 } else { first * TILE_KV as u32 },
                kv_end: entry.kv_end.min((last + 1) * TILE_KV as u32),
                ..entry
            },
            _ => Entry { kv_start: 0, kv_end: 0, ..entry },
        }
    }

    /// What is computed.
    pub fn problem(&self) -> &Problem {
        &self.problem
    }

    /// Which worker does what. On a GPU: of requests of up to 16 query rows to a KV head; those of more are taken from a
    /// queue.
    pub fn schedule(&self) -> &Schedule {
        match &self.backend {
            Backend::Cpu(_) => &self.schedule,
            #[cfg(feature = "cuda")]
            Backend::Cuda(plan) => plan.schedule(),
        }
    }

    /// Query tokens of all requests.
    pub fn tokens(&self) -> usize {
        self.tokens.len()
    }

    /// What a graph that records a run with `scratch` counts on, as a number: when it is another one after
    /// [`Self::refill`], graphs of earlier batches must be recorded again (see [`Self::with_capacity`]). None where nothing
    /// can be recorded: on a CPU, or when the scratch is too small.
    #[cfg_attr(not(feature = "cuda"), expect(unused))]
    pub fn recorded(&self, scratch: &Scratch) -> Option<u64> {
        match &self.backend {
            Backend::Cpu(_) => None,
            #[cfg(feature = "cuda")]
            Backend::Cuda(plan) => scratch.holds(plan.sizes()).then(|| plan.recorded()),
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

    /// [`Self::scratch`] of a level of a cascade that is not its first: on the CPU without buffers of workers.
    pub(super) fn scratch_of_level(&self) -> Scratch {
        match &self.backend {
            Backend::Cpu(_) => Scratch::new(self.partial_floats(), 1, 0),
            #[cfg(feature = "cuda")]
            Backend::Cuda(_) => self.scratch(),
        }
    }

    /// The plan on the device, if that is where it runs.
    #[cfg(feature = "cuda")]
    pub(super) fn on_gpu(&self) -> Option<&gpu_kernel::Plan> {
        match &self.backend {
            Backend::Cpu(_) => None,
            Backend::Cuda(plan) => Some(plan),
        }
    }

    /// Says what runs beside this level of a cascade.
    #[cfg(feature = "cuda")]
    pub(super) fn set_beside(&mut self, load: gpu_kernel::share::Load) {
        if let Backend::Cuda(plan) = &mut self.backend {
            plan.set_beside(load);
        }
    }

    /// An executor of the other kind than the plan's.
    #[cfg(feature = "cuda")]
    pub(super) fn refuse(&self, op: &'static str, exec: &Exec) -> Error {
        self.backend.refuse(op, exec)
    }

    fn partial_floats(&self) -> usize {
        self.schedule.partial_rows() * (self.problem.head_dim_vo + 2)
    }

    fn tile_floats(&self, shape: Shape) -> usize {
        let p = &self.problem;
        shape.floats(p.head_dim_qk, p.head_dim_vo, false)
    }

    /// Runs one layer. Takes `&self`: a plan has no state that a run changes.
    pub fn run(&self, exec: &Exec, args: BatchArgs<'_>) -> Result<()> {
        const OP: &str = "BatchPlan::run";
        let BatchArgs { q, kv, params, sm_scale, scratch, mut out, mut lse } = args;
        let p = &self.problem;
        check_output(OP, self.tokens.len(), p.qo_heads, p.head_dim_vo, p.out_dtype, &out, lse.as_ref())?;
        if lse.is_some() {
            self.refuse_lse(OP)?;
        }
        let done = exec.overridden(|over| {
            self.check_args(OP, &q, &kv, sm_scale)?;
            let pool = kv.pool();
            let plain = pool.block_scales.is_none() && (pool.k_scale, pool.v_scale) == (1.0, 1.0);
            if !plain || !asked::is_usual(&p.variant, &self.qo) {
                return Ok(false);
            }
            let (scale, to) =
                (sm_scale.unwrap_or(p.default_scale()), (out.reborrow(), lse.as_mut().map(|l| l.reborrow())));
            match &kv {
                Kv::Paged(_, table) => {
                    let tensors = [("q", q), ("k_cache", pool.k), ("v_cache", pool.v)];
                    let ops = ["gqa_paged_decode", "gqa_paged_prefill_causal"];
                    asked::ask((exec, over), ops, &tensors, (&self.qo, asked::Index::Paged(table)), scale, to)
                }
                Kv::Ragged(ragged) => {
                    // Rows that lie one after another are a pool of one page.
                    let tensors = [("q", q), ("k", pool.k.select(0, 0)?), ("v", pool.v.select(0, 0)?)];
                    let index = asked::Index::Ragged(ragged.indptr());
                    asked::ask((exec, over), ["gqa_ragged_prefill_causal"; 2], &tensors, (&self.qo, index), scale, to)
                }
            }
        })?;
        match exec {
            _ if done => Ok(()),
            Exec::Cpu(_) => {
                let sink = output_sink(OP, p.out_dtype, out, lse)?;
                let inputs = self.inputs(OP, exec, q, kv, params, sm_scale)?;
                let (partials, tiles) = self.take(OP, Some(&inputs), scratch)?;
                let work = Work { launch: &self.launch(&inputs), partials, sink: &sink };
                kernel::run(exec.cpu_only(OP)?, &mut [work], tiles);
                Ok(())
            }
            #[cfg(feature = "cuda")]
            Exec::Cuda(gpu) => {
                let sink = gpu_kernel::Sink::Output { out, lse };
                self.run_on_gpu(OP, gpu, q, kv, params, sm_scale, scratch, sink, false).map(|_| ())
            }
        }
    }

    /// Its parts of `scratch`, which [`Self::scratch`] made; without `inputs` no buffers of workers.
    pub(super) fn take<'a>(
        &self,
        op: &'static str,
        inputs: Option<&Inputs<'_>>,
        scratch: &'a mut Scratch,
    ) -> Result<(&'a mut [f32], &'a [Tile])> {
        scratch.take(op, self.partial_floats(), inputs.map_or(0, |inputs| self.tile_floats(inputs.shape)))
    }

    #[cfg(feature = "cuda")]
    #[expect(clippy::too_many_arguments, reason = "the fields of BatchArgs with another sink")]
    pub(super) fn run_on_gpu(
        &self,
        op: &'static str,
        gpu: &cuda::exec::Gpu,
        q: TensorRef<'_>,
        kv: Kv<'_>,
        params: &Params<'_>,
        sm_scale: Option<f32>,
        scratch: &mut Scratch,
        sink: gpu_kernel::Sink<'_>,
        behind: bool,
    ) -> Result<bool> {
        let Some(plan) = self.on_gpu() else { return Err(self.backend.refuse(op, &Exec::Cuda(gpu.clone()))) };
        let scale = self.check_args(op, &q, &kv, sm_scale)?;
        let bound = self.bind(gpu.place(), params)?;
        let pool = kv.pool();
        let (scale, text_scale) = match self.problem.variant.is_cuda_text() {
            true => (pool.k_scale, sm_scale.unwrap_or(self.problem.default_scale())),
            false => (scale, scale),
        };
        plan.run(
            gpu,
            gpu_kernel::Args {
                op,
                q: ("q", q),
                q_pe: None,
                k: pool.k,
                v: pool.v,
                kpe: None,
                block_scales: pool.block_scales,
                index: match &kv {
                    Kv::Paged(_, table) => gpu_kernel::Index::Paged(table),
                    Kv::Ragged(_) => gpu_kernel::Index::Ragged,
                },
                sm_scale: scale,
                text_scale,
                v_scale: pool.v_scale,
                bound: &bound,
                scratch,
                sink,
                behind,
            },
        )
    }

    /// All that [`Self::run`] checks of its arguments; the factor of the scores, the keys' scale included.
    #[cfg(feature = "cuda")]
    pub(super) fn check_run(
        &self,
        op: &'static str,
        q: &TensorRef<'_>,
        kv: &Kv<'_>,
        sm_scale: Option<f32>,
        out: &TensorMut<'_>,
        lse: Option<&TensorMut<'_>>,
    ) -> Result<f32> {
        let p = &self.problem;
        check_output(op, self.tokens.len(), p.qo_heads, p.head_dim_vo, p.out_dtype, out, lse)?;
        if lse.is_some() {
            self.refuse_lse(op)?;
        }
        self.check_args(op, q, kv, sm_scale)
    }

    /// Without softmax there is no log-sum-exp.
    pub(super) fn refuse_lse(&self, op: &'static str) -> Result<()> {
        if !self.program.softmax() {
            return Err(Error::value(op, "lse", "given", "none, as the variant does not normalise by softmax"));
        }
        Ok(())
    }

    /// Checks the arguments against the plan; the factor of the scores, the keys' scale included.
    fn check_args(&self, op: &'static str, q: &TensorRef<'_>, kv: &Kv<'_>, sm_scale: Option<f32>) -> Result<f32> {
        let p = &self.problem;
        check_q(op, "q", q, self.tokens.len(), p.qo_heads, p.head_dim_qk, p.q_dtype)?;
        let pool = kv.pool();
        check_pool(op, pool, p)?;
        check_lens(op, kv, &self.kv_lens)?;
        check_scale(op, sm_scale.unwrap_or(p.default_scale()), pool.k_scale)
    }

    /// The variant's parameters, checked.
    pub(super) fn bind<'a>(&self, place: Place, params: &Params<'a>) -> Result<Bound<'a>> {
        let batch = self.tokens.iter().map(|t| t.batch + 1).max().unwrap_or(0) as usize;
        self.problem.variant.bind_at(place, params, self.problem.qo_heads, batch)
    }

    /// Checks the arguments against the plan: what the CPU's kernels read.
    pub(super) fn inputs<'a>(
        &self,
        op: &'static str,
        #[cfg_attr(not(feature = "cuda"), expect(unused))] exec: &Exec,
        q: TensorRef<'a>,
        kv: Kv<'a>,
        params: &Params<'a>,
        sm_scale: Option<f32>,
    ) -> Result<Inputs<'a>> {
        let (sm_scale, q_factor) = split_scale(self.check_args(op, &q, &kv, sm_scale)?);
        #[cfg(feature = "cuda")]
        let Backend::Cpu(shape) = self.backend else { return Err(self.backend.refuse(op, exec)) };
        #[cfg(not(feature = "cuda"))]
        let Backend::Cpu(shape) = self.backend;
        let (pool, bound) = (kv.pool(), self.bind(Place::Host, params)?);
        if let Kv::Paged(_, table) = kv {
            table.check_host(op)?;
        }
        let (k, v) = match pool.block_scales {
            Some([ks, vs]) => (Operand::nvfp4(op, "k", pool.k, ks)?, Operand::nvfp4(op, "v", pool.v, vs)?),
            None => (Operand::new(op, "k", pool.k, true)?, Operand::new(op, "v", pool.v, true)?),
        };
        Ok(Inputs {
            q: [(Operand::new(op, "q", q, true)?, q_factor)],
            k: [k],
            v,
            sm_scale,
            v_scale: pool.v_scale,
            index: match kv {
                Kv::Paged(_, table) => Index::Paged(table),
                Kv::Ragged(kv) => Index::Ragged(kv.indptr()),
            },
            bound,
            shape,
        })
    }

    /// What one launch reads.
    pub(super) fn launch<'a>(&'a self, inputs: &'a Inputs<'_>) -> Launch<'a> {
        let p = &self.problem;
        Launch {
            schedule: &self.schedule,
            tokens: &self.tokens,
            kv_base: self.kv_base.as_deref(),
            q: &inputs.q,
            sm_scale: inputs.sm_scale,
            k: &inputs.k,
            v: Some(inputs.v),
            v_scale: inputs.v_scale,
            dim_vo: p.head_dim_vo,
            few: Few::of(self.split),
            out: p.out_dtype,
            group: p.group(),
            shape: inputs.shape,
            kv_heads: p.kv_heads,
            index: inputs.index,
            program: &self.program,
            bound: &inputs.bound,
        }
    }
}

/// A run's arguments as the CPU's kernels take them.
pub(super) struct Inputs<'a> {
    q: [(Operand<'a>, f32); 1],
    k: [Operand<'a>; 1],
    v: Operand<'a>,
    sm_scale: f32,
    v_scale: f32,
    index: Index<'a>,
    bound: Bound<'a>,
    shape: Shape,
}

/// First tile of `lo..hi` that is not hidden; monotone masks need O(log n) questions.
fn first_shown(hidden: &impl Fn(u32, u32) -> bool, lo: u32, hi: u32) -> Option<u32> {
    if lo >= hi || hidden(lo, hi) {
        return None;
    }
    if hi - lo == 1 {
        return Some(lo);
    }
    let mid = lo + (hi - lo) / 2;
    first_shown(hidden, lo, mid).or_else(|| first_shown(hidden, mid, hi))
}

/// Last tile of `lo..hi` that is not hidden.
fn last_shown(hidden: &impl Fn(u32, u32) -> bool, lo: u32, hi: u32) -> Option<u32> {
    if lo >= hi || hidden(lo, hi) {
        return None;
    }
    if hi - lo == 1 {
        return Some(lo);
    }
    let mid = lo + (hi - lo) / 2;
    last_shown(hidden, mid, hi).or_else(|| last_shown(hidden, lo, mid))
}

/// Most query tokens of a batch: a plan holds 16 bytes for each, and is made before their memory is seen.
pub(super) const MAX_TOKENS: usize = 1 << 24;

/// Query tokens that a plan can be made for.
pub(super) fn check_tokens(op: &'static str, qo: &Ragged, heads: usize) -> Result<()> {
    let tokens = qo.rows();
    if tokens > MAX_TOKENS || tokens.saturating_mul(heads) > 1 << 28 {
        return Err(Error::value(
            op,
            "qo",
            format!("{tokens} tokens of {heads} heads"),
            "at most 2^24 tokens and 2^28 rows of heads",
        ));
    }
    Ok(())
}

/// Cuts are at tile borders.
pub(super) fn check_split(op: &'static str, split: Split) -> Result<()> {
    match split {
        Split::Fixed(n) if n == 0 || !(n as usize).is_multiple_of(TILE_KV) => {
            Err(Error::value(op, "split", format!("Fixed({n})"), format!("a positive multiple of {TILE_KV}")))
        }
        _ => Ok(()),
    }
}

/// Lengths of a batch of requests, before anything is made of them.
pub(super) fn check_batch(op: &'static str, qo: &Ragged, kv_lens: &[u32], qo_heads: usize) -> Result<()> {
    if kv_lens.len() != qo.batch() {
        let (got, want) = (kv_lens.len(), qo.batch());
        return Err(Error::Dim { op, arg: "kv_lens", axis: "batch", got, first: "qo", want });
    }
    check_kv_lens(op, kv_lens)?;
    check_tokens(op, qo, qo_heads)
}

/// Positions travel as i32.
pub(super) fn check_kv_lens(op: &'static str, kv_lens: &[u32]) -> Result<()> {
    match kv_lens.iter().position(|&n| n > i32::MAX as u32 - TILE_KV as u32) {
        Some(r) => Err(Error::value(op, "kv_lens", format!("{} at request {r}", kv_lens[r]), "at most 2^31 - 65")),
        None => Ok(()),
    }
}

pub(super) fn check_q(
    op: &'static str,
    arg: &'static str,
    q: &TensorRef<'_>,
    tokens: usize,
    heads: usize,
    dim: usize,
    dtype: DType,
) -> Result<()> {
    Dims::of(op)
        .axis("plan", "tokens", tokens)?
        .axis("problem", "qo_heads", heads)?
        .axis("problem", "head_dim", dim)?
        .bind(arg, q, &["tokens", "qo_heads", "head_dim"])?;
    if q.dtype() != dtype {
        return Err(Error::DType { op, arg, got: q.dtype().name(), want: format!("{dtype}, as planned") });
    }
    Ok(())
}

fn check_pool(op: &'static str, pool: &KvPool<'_>, p: &Problem) -> Result<()> {
    Dims::of(op)
        .axis("problem", "kv_heads", p.kv_heads)?
        .axis("problem", "head_dim_qk", p.head_dim_qk)?
        .axis("problem", "head_dim_vo", p.head_dim_vo)?
        .axis("kv", "kv_heads", pool.kv_heads())?
        .axis("kv", "head_dim_qk", pool.head_dim_qk())?
        .axis("kv", "head_dim_vo", pool.head_dim_vo())?;
    if pool.dtype() != p.kv_dtype {
        return Err(Error::DType {
            op,
            arg: "kv",
            got: pool.dtype().name(),
            want: format!("{}, as planned", p.kv_dtype),
        });
    }
    Ok(())
}

fn check_lens(op: &'static str, kv: &Kv<'_>, planned: &[u32]) -> Result<()> {
    if let Kv::Paged(kv, table) = kv {
        check_table(op, table, kv.pool().num_pages(), kv.pool().page_size())?;
    }
    same_lens(op, kv.lens(), planned)
}

pub(super) fn check_table(
    op: &'static str,
    table: &crate::kv::PageTable<'_>,
    pages: usize,
    page_size: usize,
) -> Result<()> {
    Dims::of(op).axis("page table", "page_size", table.page_size())?.axis("kv", "page_size", page_size)?;
    if table.num_pages() > pages {
        return Err(Error::value(
            op,
            "page table",
            format!("for {} pages", table.num_pages()),
            format!("at most the pool's {pages}"),
        ));
    }
    Ok(())
}

pub(super) fn same_lens(op: &'static str, got: &[u32], planned: &[u32]) -> Result<()> {
    if got.len() != planned.len() {
        return Err(Error::Dim { op, arg: "kv", axis: "batch", got: got.len(), first: "plan", want: planned.len() });
    }
    match got.iter().zip(planned).position(|(a, b)| a != b) {
        Some(r) => Err(Error::value(
            op,
            "kv",
            format!("{} tokens at request {r}", got[r]),
            format!("{}, as planned", planned[r]),
        )),
        None => Ok(()),
    }
}

/// The factor of the scores times the keys' scale.
pub(super) fn check_scale(op: &'static str, sm_scale: f32, k_scale: f32) -> Result<f32> {
    let scale = sm_scale * k_scale;
    if !scale.is_finite() {
        return Err(Error::value(op, "sm_scale", format!("{sm_scale} (keys' scale {k_scale})"), "a finite number"));
    }
    Ok(scale)
}

/// A factor of the scores as one above 0, which the CPU's kernels use to compare, and one of the query.
pub(super) fn split_scale(scale: f32) -> (f32, f32) {
    if scale > 0.0 { (scale, 1.0) } else { (1.0, scale) }
}

pub(super) fn check_output(
    op: &'static str,
    tokens: usize,
    heads: usize,
    dim: usize,
    dtype: DType,
    out: &TensorMut<'_>,
    lse: Option<&TensorMut<'_>>,
) -> Result<()> {
    let mut dims = Dims::of(op);
    dims.axis("plan", "tokens", tokens)?.axis("problem", "qo_heads", heads)?.axis("problem", "head_dim_vo", dim)?;
    dims.bind("out", out, &["tokens", "qo_heads", "head_dim_vo"])?;
    if out.dtype() != dtype {
        return Err(Error::DType { op, arg: "out", got: out.dtype().name(), want: format!("{dtype}, as planned") });
    }
    if let Some(lse) = lse {
        dims.bind("lse", lse, &["tokens", "qo_heads"])?;
        if lse.dtype() != DType::F32 {
            return Err(Error::DType { op, arg: "lse", got: lse.dtype().name(), want: "f32".into() });
        }
    }
    Ok(())
}

/// Checked outputs as the CPU's kernels take them.
pub(super) fn output_sink<'a>(
    op: &'static str,
    dtype: DType,
    out: TensorMut<'a>,
    lse: Option<TensorMut<'a>>,
) -> Result<Sink<'a>> {
    let lse = match lse {
        Some(lse) => Some(RowsOnce::new(RowsMut::new(op, "lse", lse.with_unit_axis()?)?)),
        None => None,
    };
    let out = match dtype {
        DType::F16 => Out::F16(RowsOnce::new(RowsMut::new(op, "out", out)?)),
        DType::BF16 => Out::Bf16(RowsOnce::new(RowsMut::new(op, "out", out)?)),
        _ => Out::F32(RowsOnce::new(RowsMut::new(op, "out", out)?)),
    };
    Ok(Sink::Output { out, lse })
}
