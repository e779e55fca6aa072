//! Measuring a [`Tuning`] for this machine.

use std::time::Instant;

use crate::error::Result;
use crate::exec::{Cpu, Exec, Level, Tuning};
use crate::kv::{Kv, Ragged, RaggedKv};
use crate::ops::attention::{BatchArgs, BatchPlan, Problem};
use crate::ops::gemm::gemm;
use crate::plan::Split;
use crate::tensor::{DType, Tensor};
use crate::variant::{self, Params};

/// A candidate that was timed.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Trial {
    /// What was run: `gemm` or `attention`.
    pub op: &'static str,
    /// With which sizes.
    pub tuning: Tuning,
    /// Least time of a call, in seconds.
    pub seconds: f64,
}

/// Times the candidates on the threads of `cpu` and returns the fastest sizes, with every trial. A few seconds.
///
/// Candidates take turns, so that a machine that is slow for a while is slow for all of them. At levels that have no
/// sizes to choose the answer is the default, at once.
pub fn measure(cpu: &Cpu) -> Result<(Tuning, Vec<Trial>)> {
    let (mut best, mut trials) = (Tuning::default(), vec![]);
    if cpu.level() == Level::Amx {
        let sizes = |a: [usize; 3], b: [usize; 2]| a.into_iter().flat_map(move |a| b.map(|b| (a, b)));
        let gemms: Vec<_> = sizes([128, 256, 512], [256, 512])
            .map(|(gemm_depth, gemm_block)| Tuning { gemm_depth, gemm_block, ..best })
            .collect();
        let attentions: Vec<_> = sizes([128, 256, 512], [512, 1024])
            .map(|(attention_span, attention_rows)| Tuning { attention_span, attention_rows, ..best })
            .collect();
        let gemm = fastest("gemm", cpu, gemms, run_gemm, &mut trials)?;
        let attention = fastest("attention", cpu, attentions, run_attention, &mut trials)?;
        best = Tuning { gemm_depth: gemm.gemm_depth, gemm_block: gemm.gemm_block, ..attention };
    }
    Ok((best, trials))
}

/// The fastest of some candidates; the first of equals.
fn fastest(
    op: &'static str,
    cpu: &Cpu,
    candidates: Vec<Tuning>,
    run: fn(&Exec) -> Result<f64>,
    trials: &mut Vec<Trial>,
) -> Result<Tuning> {
    let mut times = vec![f64::INFINITY; candidates.len()];
    for _ in 0..8 {
        for (&tuning, least) in candidates.iter().zip(&mut times) {
            *least = least.min(run(&Exec::Cpu(cpu.tuned(tuning)?))?);
        }
    }
    trials.extend(candidates.iter().zip(&times).map(|(&tuning, &seconds)| Trial { op, tuning, seconds }));
    let best = (0..candidates.len()).reduce(|a, b| if times[b] < times[a] { b } else { a });
    Ok(best.map_or_else(Tuning::default, |i| candidates[i]))
}

/// Seconds of a product of a prefill's size.
fn run_gemm(exec: &Exec) -> Result<f64> {
    let (m, n, k) = (512, 2048, 2048);
    let (x, w, mut out) = (ramp(&[m, k])?, ramp(&[n, k])?, Tensor::zeros(DType::BF16, &[m, n])?);
    timed(|| gemm(exec, x.view(), w.view(), out.view_mut()))
}

/// Seconds of a causal prefill.
fn run_attention(exec: &Exec) -> Result<f64> {
    let (tokens, heads, kv_heads, dim) = (1024, 8, 2, 128);
    let (q, mut out) = (ramp(&[tokens, heads, dim])?, Tensor::zeros(DType::BF16, &[tokens, heads, dim])?);
    let (k, v) = (ramp(&[tokens, kv_heads, dim])?, ramp(&[tokens, kv_heads, dim])?);
    let qo = Ragged::from_lens(&[tokens as u32])?;
    let problem = Problem::new(heads, kv_heads, dim, DType::BF16, variant::causal());
    let plan = BatchPlan::new(exec, problem, &qo, &[tokens as u32], Split::Balanced)?;
    let (mut scratch, params) = (plan.scratch(), Params::new());
    timed(|| {
        let kv = Kv::Ragged(RaggedKv::new(k.view(), v.view(), &qo)?);
        let (scratch, out) = (&mut scratch, out.view_mut());
        plan.run(exec, BatchArgs { q: q.view(), kv, params: &params, sm_scale: None, scratch, out, lse: None })
    })
}

/// Least seconds of three calls, the first for the caches not counted.
fn timed(mut run: impl FnMut() -> Result<()>) -> Result<f64> {
    run()?;
    let mut least = f64::INFINITY;
    for _ in 0..2 {
        let start = Instant::now();
        run()?;
        least = least.min(start.elapsed().as_secs_f64());
    }
    Ok(least)
}

/// Numbers between -1 and 1.
fn ramp(shape: &[usize]) -> Result<Tensor> {
    let data: Vec<f32> = (0..shape.iter().product()).map(|i| (i % 251) as f32 / 125.0 - 1.0).collect();
    Tensor::from_f32(DType::BF16, &data, shape)
}
