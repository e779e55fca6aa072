//! Rankings: how much faster than a baseline solutions and authors are.

use std::collections::BTreeMap;

use crate::error::{Error, Result};
use crate::schema::{Definition, Solution, Status};
use crate::traceset::TraceSet;

/// Author of the solutions that others are compared with, where nothing else is said.
pub const BASELINE: &str = "baseline";

/// How a solution, or an author's best ones, compare with the baseline.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Score {
    /// Mean over workloads of `baseline latency / latency`; 0 as soon as one workload did not pass.
    pub avg_speedup: f64,
    /// Workloads compared.
    pub workloads: usize,
    /// Share of them that passed, 1 or 0.
    pub success_rate: f64,
    /// Share of them on which it was faster.
    pub win_rate: f64,
    /// Ratios by workload, in the order of their names.
    pub ratios: Vec<f64>,
}

/// An author's place.
#[derive(Clone, Debug, PartialEq)]
pub struct Ranked {
    /// Who.
    pub author: String,
    /// Mean over definitions of the best solution's score.
    pub score: Score,
    /// Best solution of each definition.
    pub best: BTreeMap<String, String>,
}

/// Lowest latency on each workload, by the workload's name; `None` for a workload that did not pass.
fn latencies<'a>(set: &'a TraceSet, solution: &Solution) -> Result<BTreeMap<&'a str, Option<f64>>> {
    let mut found: BTreeMap<&str, Option<f64>> = BTreeMap::new();
    for trace in set.traces_of(solution.definition()).filter(|t| t.solution() == Some(solution.name())) {
        let latency = trace.passed().map(|(_, p)| p.latency_ms);
        if latency.is_some_and(|ms| ms <= 0.0) {
            let why =
                format!("`{}` passed in {} ms on {}", solution.name(), latency.unwrap_or(0.0), trace.workload().uuid());
            return Err(Error::refused("score", why));
        }
        let entry = found.entry(trace.workload().uuid()).or_insert(latency);
        *entry = match (*entry, latency) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        };
    }
    Ok(found)
}

/// The one solution of `author` for a definition.
fn baseline<'a>(set: &'a TraceSet, definition: &Definition, author: &str) -> Result<&'a Solution> {
    let of: Vec<_> = set.solutions_of(definition.name()).filter(|s| s.author() == author).collect();
    match of.as_slice() {
        [one] => Ok(one),
        _ => {
            let why = format!("`{}` has {} solutions by `{author}`, not 1", definition.name(), of.len());
            Err(Error::refused("score", why))
        }
    }
}

/// How `solution` compares with the baseline's solution; `None` for the baseline itself.
pub fn solution_score(set: &TraceSet, solution: &Solution, baseline_author: &str) -> Result<Option<Score>> {
    let definition = set
        .definition(solution.definition())
        .ok_or_else(|| Error::refused("score", format!("definition `{}` is not in the set", solution.definition())))?;
    let base = baseline(set, definition, baseline_author)?;
    if base.name() == solution.name() {
        return Ok(None);
    }
    let (base, own) = (latencies(set, base)?, latencies(set, solution)?);
    let failed = set
        .traces_of(definition.name())
        .filter(|t| t.solution() == Some(solution.name()))
        .any(|t| t.evaluation().is_some_and(|e| e.status() != Status::Passed));
    let ratios: Vec<f64> =
        own.iter().filter_map(|(uuid, ms)| Some(base.get(uuid)?.as_ref()? / ms.unwrap_or(f64::INFINITY))).collect();
    let workloads = ratios.len();
    if failed || workloads == 0 {
        return Ok(Some(Score { workloads, ratios, ..Score::default() }));
    }
    let mean = |xs: &mut dyn Iterator<Item = f64>| xs.sum::<f64>() / workloads as f64;
    Ok(Some(Score {
        avg_speedup: mean(&mut ratios.iter().copied()),
        success_rate: 1.0,
        win_rate: mean(&mut ratios.iter().map(|r| f64::from(u8::from(*r > 1.0)))),
        workloads,
        ratios,
    }))
}

/// Authors by the mean speed-up of their best solutions over all definitions that have a baseline, the best first.
pub fn rank_authors(set: &TraceSet, baseline_author: &str) -> Result<Vec<Ranked>> {
    let mut of: BTreeMap<&str, BTreeMap<String, (Score, String)>> = BTreeMap::new();
    for definition in set.definitions() {
        if baseline(set, definition, baseline_author).is_err() {
            continue;
        }
        for solution in set.solutions_of(definition.name()) {
            let Some(score) = solution_score(set, solution, baseline_author)? else { continue };
            if score.workloads == 0 {
                continue;
            }
            let best = of.entry(solution.author()).or_default().entry(definition.name().to_owned());
            let entry = best.or_insert_with(|| (score.clone(), solution.name().to_owned()));
            if score.avg_speedup > entry.0.avg_speedup {
                *entry = (score, solution.name().to_owned());
            }
        }
    }
    let ranked = of.into_iter().map(|(author, scores)| {
        let n = scores.len() as f64;
        let mean = |f: fn(&Score) -> f64| scores.values().map(|(s, _)| f(s)).sum::<f64>() / n;
        let score = Score {
            avg_speedup: mean(|s| s.avg_speedup),
            workloads: scores.values().map(|(s, _)| s.workloads).sum(),
            success_rate: mean(|s| s.success_rate),
            win_rate: mean(|s| s.win_rate),
            ratios: scores.values().flat_map(|(s, _)| s.ratios.clone()).collect(),
        };
        let best = scores.into_iter().map(|(definition, (_, solution))| (definition, solution)).collect();
        Ranked { author: author.to_owned(), score, best }
    });
    let mut ranked: Vec<_> = ranked.collect();
    ranked.sort_by(|a, b| b.score.avg_speedup.total_cmp(&a.score.avg_speedup).then_with(|| a.author.cmp(&b.author)));
    Ok(ranked)
}
