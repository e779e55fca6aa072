//! Rows beside others of ours: cuts that do not depend on the batch, and cascades beside flat decodes.

use fir::attention::{CascadeLevel, CascadePlan, Problem, Split};
use fir::kv::Ragged;
use fir::{DType, Result, variant};

use super::super::{Goal, Suite, Work};
use super::{DIM, HEADS, KV_HEADS, Pool, batch, cascade, decode_of, prefixed};

/// Cuts that do not depend on the batch beside balanced ones: at most 15 % more is wanted.
pub(super) fn fixed(suite: &Suite, pool: &Pool) -> Result<()> {
    const CUTS: [(Split, &str); 4] = [
        (Split::Balanced, "balanced"),
        (Split::Fixed(256), "cut every 256"),
        (Split::Fixed(1_024), "cut every 1024"),
        (Split::Off, "never cut"),
    ];
    let goal = |split, balanced: f64| match split {
        Split::Balanced => Goal::Us(f64::INFINITY),
        _ => Goal::Us((11.5 * balanced).round() / 10.0),
    };
    for (requests, kv) in [(1, 32_768), (16, 2_048), (64, 2_048), (64, 8_192), (256, 2_048)] {
        let (lens, mut balanced) = (vec![kv; requests], 0.0);
        for (split, name) in CUTS {
            let case = format!("attention, batch-invariant decode, {requests} × {kv}, {name}");
            if !suite.wants(&case) {
                continue;
            }
            let table = pool.table(suite, 16, &lens)?;
            decode_of(suite, pool, &case, &table, &lens, split, goal(split, balanced), "")?;
            if split == Split::Balanced {
                balanced = suite.last.get();
            }
        }
    }
    for (requests, q_len, kv_len) in [(16, 1_024, 1_024), (4, 4_096, 4_096), (1, 2_048, 2_048), (4, 512, 8_192)] {
        let (qo, kv_lens, mut balanced) = (Ragged::from_lens(&vec![q_len; requests])?, vec![kv_len; requests], 0.0);
        let seen = f64::from(kv_len) - f64::from(q_len) / 2.0;
        let work = Work::Flops(4.0 * (requests * HEADS * DIM) as f64 * f64::from(q_len) * seen);
        for (split, name) in CUTS {
            let case = format!("attention, batch-invariant prefill, page 16, {requests} × {q_len} on {kv_len}, {name}");
            if !suite.wants(&case) {
                continue;
            }
            let (queries, goal) = ((DType::BF16, &qo), goal(split, balanced));
            batch(suite, pool, &case, 16, variant::causal(), queries, &kv_lens, split, work, goal, "")?;
            if split == Split::Balanced {
                balanced = suite.last.get();
            }
        }
    }
    Ok(())
}

/// A cascade beside decodes that each read the prefix for themselves: what is chosen should never be slower.
pub(super) fn cascades(suite: &Suite, pool: &Pool) -> Result<()> {
    for requests in [1, 2, 4, 8, 16, 32, 64, 128] {
        for lens in [[2_048, 128], [8_192, 128]] {
            let case = format!("attention, flat bf16, page 16, {requests} × ({} shared + {})", lens[0], lens[1]);
            if !suite.wants(&case) {
                continue;
            }
            let [_, _, table] = prefixed(suite, pool, requests, lens)?;
            let kv_lens = vec![lens[0] + lens[1]; requests];
            decode_of(suite, pool, &case, &table, &kv_lens, Split::Balanced, Goal::Us(f64::INFINITY), "")?;
            let (all, each) = (Ragged::from_lens(&[requests as u32])?, Ragged::ones(requests)?);
            let (shared, own) = ([lens[0]], vec![lens[1]; requests]);
            let levels = [CascadeLevel { qo: &all, kv_lens: &shared }, CascadeLevel { qo: &each, kv_lens: &own }];
            let problem = Problem::new(HEADS, KV_HEADS, DIM, DType::BF16, variant::causal());
            let chosen = if CascadePlan::pays(&suite.exec, &problem, &levels)? { "chosen" } else { "flat is chosen" };
            cascade(suite, pool, requests, lens, (10.0 * suite.last.get()).round() / 10.0, chosen)?;
        }
    }
    Ok(())
}
