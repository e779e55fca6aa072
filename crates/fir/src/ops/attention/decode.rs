//! [`DecodePlan`]: one query token per request.

use super::batch::{BatchArgs, BatchPlan, Problem, Use};
use crate::error::Result;
use crate::exec::Exec;
use crate::kv::{Kv, Ragged};
use crate::plan::{Schedule, Scratch, Split};
use crate::tensor::{TensorMut, TensorRef};
use crate::variant::Params;

/// A decode batch, scheduled: immutable between refills, reusable by every layer of a step.
#[must_use = "a plan does nothing until `run`"]
#[derive(Debug)]
pub struct DecodePlan {
    plan: BatchPlan,
    /// A token of each request.
    ones: Ragged,
}

/// One layer's tensors for [`DecodePlan::run`].
#[derive(Debug)]
pub struct DecodeArgs<'a> {
    /// `[batch, qo_heads, head_dim_qk]`
    pub q: TensorRef<'a>,
    /// Keys and values of the requests, with the lengths that were planned.
    pub kv: Kv<'a>,
    /// Values of the variant's parameters; their types are in the problem.
    pub params: &'a Params<'a>,
    /// Factor of the scores; `1 / sqrt(head_dim_qk)` when `None`.
    pub sm_scale: Option<f32>,
    /// Made by [`DecodePlan::scratch`]; one per call in flight.
    pub scratch: &'a mut Scratch,
    /// `[batch, qo_heads, head_dim_vo]`
    pub out: TensorMut<'a>,
    /// `[batch, qo_heads]`, f32; written when given.
    pub lse: Option<TensorMut<'a>>,
}

impl DecodePlan {
    /// Chooses a kernel for `problem` and cuts `kv_lens` over the workers of `exec`.
    pub fn new(exec: &Exec, problem: Problem, kv_lens: &[u32], split: Split) -> Result<Self> {
        let mut plan = Self::with_capacity(exec, problem, kv_lens.len(), split)?;
        plan.refill(kv_lens)?;
        Ok(plan)
    }

    /// An empty plan with room for `requests`; see [`Self::refill`].
    pub fn with_capacity(exec: &Exec, problem: Problem, requests: usize, split: Split) -> Result<Self> {
        let plan = BatchPlan::with_use(exec, problem, requests, split, Use::Decodes)?;
        Ok(Self { plan, ones: Ragged::ones(0)? })
    }

    /// Plans another batch in the same memory.
    pub fn refill(&mut self, kv_lens: &[u32]) -> Result<()> {
        if self.ones.batch() != kv_lens.len() {
            self.ones = Ragged::ones(kv_lens.len())?;
        }
        self.plan.refill(&self.ones, kv_lens)
    }

    /// Which worker does what.
    pub fn schedule(&self) -> &Schedule {
        self.plan.schedule()
    }

    /// Scratch of exactly the size that [`Self::run`] needs for the batch as it is planned now.
    pub fn scratch(&self) -> Scratch {
        self.plan.scratch()
    }

    /// Runs one layer. Takes `&self`: a plan has no state that a run changes.
    pub fn run(&self, exec: &Exec, args: DecodeArgs<'_>) -> Result<()> {
        let DecodeArgs { q, kv, params, sm_scale, scratch, out, lse } = args;
        self.plan.run(exec, BatchArgs { q, kv, params, sm_scale, scratch, out, lse })
    }
}
