//! [`CascadePlan`]: requests that share prefixes read each shared part once.
//!
//! A level holds part of every request's KV, in groups of query tokens that share it: level 0 the longest shared
//! prefix, the last level what each request has alone. Each level is a [`BatchPlan`] whose groups are its requests;
//! the levels' states are merged row by row. Positions are those of the whole request, so any variant means the same
//! as over flat KV.

#[cfg(feature = "cuda")]
use std::hash::{DefaultHasher, Hash as _, Hasher as _};

use super::batch::{BatchPlan, Problem, Use, check_kv_lens, check_output, check_tokens, output_sink};
use crate::cpu::attention::{self as kernel, Sink, Work};
use crate::cpu::pool::{RowsMut, RowsOnce};
#[cfg(feature = "cuda")]
use crate::cuda::attention::{
    self as gpu_kernel,
    levels::{Parts, States},
};
use crate::error::{Error, Result};
use crate::exec::Exec;
use crate::kv::{Kv, Ragged};
#[cfg(feature = "cuda")]
use crate::plan::DeviceSizes;
use crate::plan::{Schedule, Scratch, Split, Token};
use crate::tensor::{TensorMut, TensorRef};
use crate::variant::Params;

const OP: &str = "CascadePlan";
/// What a level costs on the CPU beside the reading of its tokens, as so many KV tokens: a state for each query token, written and
/// merged. And what a cascade does: a call more of the thread pool, 20 µs at the most.
const MERGE_TOKENS: usize = 32;
const LAUNCH_TOKENS: usize = 768;

/// One level: which query tokens share which stretch of KV.
#[derive(Clone, Copy, Debug)]
pub struct CascadeLevel<'a> {
    /// Query tokens of each group, in order; group borders are borders of requests.
    pub qo: &'a Ragged,
    /// Tokens each group shares at this level.
    pub kv_lens: &'a [u32],
}

/// A batch with shared prefixes, scheduled level by level.
#[must_use = "a plan does nothing until `run`"]
#[derive(Debug)]
pub struct CascadePlan {
    problem: Problem,
    levels: Vec<BatchPlan>,
    tokens: usize,
    /// Not after a refill that failed on its way.
    filled: bool,
    /// On a GPU: what was cut of the levels.
    #[cfg(feature = "cuda")]
    parts: Option<Parts>,
}

/// One layer's tensors for [`CascadePlan::run`].
#[derive(Debug)]
pub struct CascadeArgs<'a> {
    /// `[tokens, qo_heads, head_dim_qk]`
    pub q: TensorRef<'a>,
    /// Keys and values of each level, its groups as requests.
    pub kv: &'a [Kv<'a>],
    /// Values of the variant's parameters.
    pub params: &'a Params<'a>,
    /// Factor of the scores; `1 / sqrt(head_dim_qk)` when `None`.
    pub sm_scale: Option<f32>,
    /// Made by [`CascadePlan::scratch`]; one per call in flight.
    pub scratch: &'a mut [Scratch],
    /// `[tokens, qo_heads, head_dim_vo]`
    pub out: TensorMut<'a>,
    /// `[tokens, qo_heads]`, f32; written when given.
    pub lse: Option<TensorMut<'a>>,
}

impl CascadePlan {
    /// Whether a cascade of these levels is expected to be faster than a [`BatchPlan`] of the same requests, each of which then
    /// reads its prefix for itself: on a GPU by a model that was measured on an H200, on the CPU by what is not read. Few requests do not win back what it costs to
    /// write and merge a state for each level. [`PageTable::joined`](crate::kv::PageTable::joined) is the table of such a batch.
    pub fn pays(exec: &Exec, problem: &Problem, levels: &[CascadeLevel<'_>]) -> Result<bool> {
        #[cfg_attr(not(feature = "cuda"), expect(unused_variables))]
        let (kv_len, _) = check_levels(problem, levels)?;
        let Some((own, shared)) = levels.split_last().filter(|(_, shared)| !shared.is_empty()) else {
            return Ok(false);
        };
        match exec {
            Exec::Cpu(_) => {
                // What all requests of a group but the first need not read.
                let saved = |level: &CascadeLevel<'_>| -> usize {
                    let mut starts = own.qo.indptr().windows(2).filter(|r| r[0] < r[1]).map(|r| r[0]).peekable();
                    let groups = level.qo.indptr()[1..].iter().zip(level.kv_lens);
                    groups.fold(0, |sum: usize, (&end, &len)| {
                        let members = std::iter::from_fn(|| starts.next_if(|&start| start < end)).count();
                        sum.saturating_add(members.saturating_sub(1).saturating_mul(len as usize))
                    })
                };
                let cost = shared.len() * own.qo.rows() * MERGE_TOKENS + LAUNCH_TOKENS;
                Ok(shared.iter().map(saved).sum::<usize>() > cost)
            }
            #[cfg(feature = "cuda")]
            Exec::Cuda(gpu) => {
                let spec = problem.spec(OP, true, own.qo.batch());
                let lens: Vec<_> = levels.iter().map(|l| [l.qo.lens(), l.kv_lens]).collect();
                gpu_kernel::share::pays(gpu, &spec, problem.kv_heads, &lens, [own.qo.lens(), &kv_len])
            }
        }
    }

    /// Plans every level; the last one's groups are the requests.
    pub fn new(exec: &Exec, problem: Problem, levels: &[CascadeLevel<'_>], split: Split) -> Result<Self> {
        check_levels(&problem, levels)?;
        let plans = levels.iter().map(|l| BatchPlan::with_use(exec, problem.clone(), l.qo.batch(), split, Use::Level));
        let mut plan = Self {
            levels: plans.collect::<Result<_>>()?,
            problem,
            tokens: 0,
            filled: false,
            #[cfg(feature = "cuda")]
            parts: matches!(exec, Exec::Cuda(_)).then(Parts::default),
        };
        plan.refill(levels)?;
        Ok(plan)
    }

    /// Plans another batch of as many levels in the same memory, with the rules of
    /// [`BatchPlan::with_capacity`](super::BatchPlan::with_capacity) for each of them: it has room for as many groups as the
    /// first batch had. The launches of a captured graph are for as many query tokens as were captured.
    pub fn refill(&mut self, levels: &[CascadeLevel<'_>]) -> Result<()> {
        if levels.len() != self.levels.len() {
            let (got, want) = (levels.len(), self.levels.len());
            return Err(Error::Dim { op: OP, arg: "levels", axis: "levels", got, first: "plan", want });
        }
        let (kv_len, bases) = check_levels(&self.problem, levels)?;
        let mut tokens = Vec::new();
        if let Some(own) = levels.last() {
            Token::list(own.qo.lens(), &kv_len, &mut tokens);
        }
        self.filled = false;
        #[cfg(feature = "cuda")]
        share(&mut self.levels, levels);
        for ((plan, level), base) in self.levels.iter_mut().zip(levels).zip(bases) {
            plan.refill_level(level.qo, level.kv_lens, &tokens, base)?;
        }
        #[cfg(feature = "cuda")]
        if let Some(parts) = &mut self.parts {
            let plans: Vec<_> = self.levels.iter().filter_map(BatchPlan::on_gpu).collect();
            parts.fill(&plans, tokens.len())?;
        }
        (self.tokens, self.filled) = (tokens.len(), true);
        Ok(())
    }

    /// As [`BatchPlan::recorded`](super::BatchPlan::recorded), with what [`Self::scratch`] made.
    #[cfg_attr(not(feature = "cuda"), expect(unused))]
    pub fn recorded(&self, scratch: &[Scratch]) -> Option<u64> {
        #[cfg(feature = "cuda")]
        if let (true, Some(parts), Some((states, per_level))) = (self.filled, &self.parts, scratch.split_last()) {
            let levels: Option<Vec<_>> = self.levels.iter().zip(per_level).map(|(l, s)| l.recorded(s)).collect();
            let levels = levels.filter(|l| l.len() == self.levels.len() && states.holds(self.state_sizes(parts)))?;
            let mut hasher = DefaultHasher::new();
            (levels, self.tokens, parts.place()).hash(&mut hasher);
            return Some(hasher.finish());
        }
        None
    }

    /// Schedules of the levels.
    pub fn schedules(&self) -> impl Iterator<Item = &Schedule> {
        self.levels.iter().map(BatchPlan::schedule)
    }

    /// Scratch of exactly the size that [`Self::run`] needs: one per level, and one for the levels' states.
    pub fn scratch(&self) -> Vec<Scratch> {
        let levels = self.levels.len();
        #[cfg_attr(not(feature = "cuda"), expect(unused_mut))]
        let mut states = Scratch::new(levels * self.state_floats(), 1, 0);
        #[cfg(feature = "cuda")]
        if let (Some(plan), Some(parts)) = (self.levels[0].on_gpu(), &self.parts) {
            states = plan.scratch(self.state_sizes(parts));
        }
        // The levels are one launch on the CPU, whose workers have the buffers of the first.
        let own = |(l, plan): (usize, &BatchPlan)| if l == 0 { plan.scratch() } else { plan.scratch_of_level() };
        self.levels.iter().enumerate().map(own).chain([states]).collect()
    }

    #[cfg(feature = "cuda")]
    fn state_sizes(&self, parts: &Parts) -> DeviceSizes {
        let p = &self.problem;
        States::sizes(self.levels.len(), [self.tokens, p.qo_heads, p.head_dim_vo], parts)
    }

    fn state_floats(&self) -> usize {
        self.tokens * self.problem.qo_heads * (self.problem.head_dim_vo + 2)
    }

    /// Runs one layer.
    pub fn run(&self, exec: &Exec, args: CascadeArgs<'_>) -> Result<()> {
        const OP: &str = "CascadePlan::run";
        let CascadeArgs { q, kv, params, sm_scale, scratch, out, lse } = args;
        let (p, n) = (&self.problem, self.levels.len());
        if !self.filled {
            return Err(Error::value(OP, "plan", "one whose refill failed", "one that was refilled since"));
        }
        if kv.len() != n {
            return Err(Error::Dim { op: OP, arg: "kv", axis: "levels", got: kv.len(), first: "plan", want: n });
        }
        if scratch.len() != n + 1 {
            return Err(Error::Dim {
                op: OP,
                arg: "scratch",
                axis: "levels + 1",
                got: scratch.len(),
                first: "plan",
                want: n + 1,
            });
        }
        if lse.is_some() {
            self.levels[0].refuse_lse(OP)?;
        }
        let v_scale = kv[0].pool().v_scale;
        if let Some(l) = kv.iter().position(|kv| kv.pool().v_scale.to_bits() != v_scale.to_bits()) {
            return Err(Error::value(
                OP,
                "kv",
                format!("v_scale {} at level {l}", kv[l].pool().v_scale),
                format!("{v_scale} as at level 0"),
            ));
        }
        check_output(OP, self.tokens, p.qo_heads, p.head_dim_vo, p.out_dtype, &out, lse.as_ref())?;
        let (per_level, states) = scratch.split_at_mut(n);
        #[cfg(feature = "cuda")]
        if let Exec::Cuda(gpu) = exec {
            let Some(parts) = &self.parts else { return Err(self.levels[0].refuse(OP, exec)) };
            let states = States::new(OP, &mut states[0], n, [self.tokens, p.qo_heads, p.head_dim_vo], parts)?;
            let mut behind = false;
            for (l, (plan, scratch)) in self.levels.iter().zip(per_level).enumerate() {
                let sink = gpu_kernel::Sink::Level(states, l);
                behind = plan.run_on_gpu(OP, gpu, q, kv[l], params, sm_scale, scratch, sink, behind)?;
            }
            let bound = self.levels[0].bind(gpu.place(), params)?;
            // Any level's plan knows where the tokens stand; the first is as good as another.
            return self.levels[0]
                .on_gpu()
                .map_or(Ok(()), |plan| plan.finish_levels(gpu, OP, states, &bound, out, lse));
        }
        let sink = output_sink(OP, p.out_dtype, out, lse)?;
        let (states, _) = states[0].take(OP, n * self.state_floats(), 0)?;
        let cpu = exec.cpu_only(OP)?;
        let inputs = self.levels.iter().zip(kv).map(|(plan, kv)| plan.inputs(OP, exec, q, *kv, params, sm_scale));
        let inputs = inputs.collect::<Result<Vec<_>>>()?;
        let launches: Vec<_> = self.levels.iter().zip(&inputs).map(|(plan, inputs)| plan.launch(inputs)).collect();
        let (mut partials, mut tiles) = (Vec::with_capacity(n), None);
        for ((plan, inputs), scratch) in self.levels.iter().zip(&inputs).zip(per_level) {
            let (rows, buffers) = plan.take(OP, tiles.is_none().then_some(inputs), scratch)?;
            partials.push(rows);
            tiles.get_or_insert(buffers);
        }
        let each = self.state_floats();
        let rows = states.chunks_exact_mut(each.max(1)).map(|rows| RowsMut::from_slice(rows, p.head_dim_vo + 2));
        let sinks: Vec<_> = rows.map(|rows| Sink::States(RowsOnce::new(rows))).collect();
        let work = launches.iter().zip(partials).zip(&sinks);
        let mut work: Vec<_> = work.map(|((launch, partials), sink)| Work { launch, partials, sink }).collect();
        // Heads of one problem: any level's buffers are as large as another's.
        kernel::run(cpu, &mut work, tiles.unwrap_or_default());
        // Any level's launch describes the rows; the first is as good as another.
        kernel::merge_levels(cpu, &launches[0], states, n, &sink);
        Ok(())
    }
}

/// KV tokens of each request at all levels, and the positions at which each level's groups begin.
fn check_levels(problem: &Problem, levels: &[CascadeLevel<'_>]) -> Result<(Vec<u32>, Vec<Vec<i32>>)> {
    let Some((own, _)) = levels.split_last() else {
        return Err(Error::value(OP, "levels", "empty", "at least one level"));
    };
    let requests = own.qo;
    problem.check(OP)?;
    check_tokens(OP, requests, problem.qo_heads)?;
    let mut kv_len = vec![0u32; requests.batch()];
    let mut bases = Vec::with_capacity(levels.len());
    for (l, level) in levels.iter().enumerate() {
        if level.kv_lens.len() != level.qo.batch() {
            return Err(Error::Dim {
                op: OP,
                arg: "kv_lens",
                axis: "groups",
                got: level.kv_lens.len(),
                first: "qo",
                want: level.qo.batch(),
            });
        }
        if level.qo.rows() != requests.rows() {
            return Err(Error::Dim {
                op: OP,
                arg: "levels[..].qo",
                axis: "tokens",
                got: level.qo.rows(),
                first: "levels[last].qo",
                want: requests.rows(),
            });
        }
        bases.push(level_bases(l, level, requests, &mut kv_len)?);
    }
    check_kv_lens(OP, &kv_len)?;
    Ok((kv_len, bases))
}

/// Lets the last level, of short query tiles, run beside the one before it, of long ones.
#[cfg(feature = "cuda")]
fn share(plans: &mut [BatchPlan], levels: &[CascadeLevel<'_>]) {
    plans.iter_mut().for_each(|plan| plan.set_beside(gpu_kernel::share::Load::default()));
    let ([.., before, last], [.., first, second]) = (plans, levels) else { return };
    let load = |plan: &BatchPlan, level: &CascadeLevel<'_>| {
        plan.on_gpu().map(|plan| plan.load(level.qo.lens(), level.kv_lens)).unwrap_or_default()
    };
    let loads = [load(before, first), load(last, second)];
    if loads[0].kinds()[0] && loads[1].kinds() == [false, true] {
        before.set_beside(loads[1]);
        last.set_beside(loads[0]);
    }
}

/// Position of each group's first token at level `l`: what its requests hold at the levels above, which must be the
/// same for all of them. Adds the level's lengths to `kv_len`.
fn level_bases(l: usize, level: &CascadeLevel<'_>, requests: &Ragged, kv_len: &mut [u32]) -> Result<Vec<i32>> {
    let (mut r, mut bases) = (0, Vec::with_capacity(level.qo.batch()));
    for (g, &len) in level.kv_lens.iter().enumerate() {
        let end = level.qo.indptr()[g + 1];
        let mut base = None;
        // Requests without query tokens at a border belong to the group that starts there, if they fit at all.
        while r < requests.batch() && requests.indptr()[r + 1] <= end {
            if requests.lens()[r] > 0 {
                let mine = kv_len[r];
                if *base.get_or_insert(mine) != mine {
                    return Err(Error::value(
                        OP,
                        "levels",
                        format!(
                            "group {g} of level {l} with requests that start it at {} and {mine}",
                            base.unwrap_or(0)
                        ),
                        "groups whose requests share all levels above",
                    ));
                }
                kv_len[r] = mine.checked_add(len).ok_or_else(|| {
                    Error::value(OP, "kv_lens", format!("over 2^32 tokens at request {r}"), "at most 2^31 - 65")
                })?;
            }
            r += 1;
        }
        if requests.indptr()[r] != end {
            return Err(Error::value(
                OP,
                "levels",
                format!("group {g} of level {l} ending at token {end}"),
                "borders of the last level's groups",
            ));
        }
        bases.push(base.unwrap_or(0) as i32);
    }
    Ok(bases)
}
