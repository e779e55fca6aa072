//! Mixtures of experts.

use super::gemm::scaled_values;
use super::{Precision, values};
use crate::error::Result;
use crate::routing::{Groups, Routing, Score};
use crate::tensor::{Scaled, TensorRef};

/// `(ids, weights)` of each token's `top_k` experts, the best first: see [`route`](crate::moe::route).
pub fn route(
    p: Precision,
    routing: Routing,
    logits: TensorRef<'_>,
    bias: Option<TensorRef<'_>>,
    top_k: usize,
) -> Result<(Vec<i32>, Vec<f64>)> {
    let experts = logits.shape()[1];
    let bias = bias.map(values).transpose()?;
    let (mut ids, mut weights) = (Vec::new(), Vec::new());
    for logits in values(logits)?.chunks(experts.max(1)) {
        let scores: Vec<f64> = match routing.score {
            Score::Softmax => {
                let most = logits.iter().fold(f64::NEG_INFINITY, |m, &x| m.max(x));
                let e: Vec<f64> = logits.iter().map(|x| p.acc((x - most).exp())).collect();
                let sum = e.iter().filter(|e| !e.is_nan()).fold(0.0, |sum, e| p.acc(sum + e));
                e.iter().map(|e| p.acc(e / sum)).collect()
            }
            Score::Sigmoid => logits.iter().map(|x| p.acc(1.0 / p.acc(1.0 + p.acc((-x).exp())))).collect(),
        };
        // Without a bias, the order of the scores: that of the logits, which never round to equal ones.
        let keys: Vec<f64> = match &bias {
            Some(bias) => scores.iter().zip(bias).map(|(s, b)| s + b).collect(),
            None => logits.to_vec(),
        };
        let Groups { count, chosen } = routing.groups.unwrap_or(Groups { count: 1, chosen: 1 });
        let size = experts / count;
        let sums: Vec<f64> = (0..count)
            .map(|g| {
                let of = if bias.is_some() { &keys } else { &scores };
                let best = descending(&of[g * size..][..size]);
                best.iter().take(2).map(|&i| of[g * size + i]).sum()
            })
            .collect();
        let open: Vec<usize> = descending(&sums).into_iter().take(chosen).collect();
        let ranked = descending(&keys).into_iter().filter(|e| open.contains(&(e / size.max(1))));
        let best: Vec<usize> = ranked.take(top_k).collect();
        let sum = best.iter().fold(0.0, |sum, &e| p.acc(sum + scores[e]));
        let divisor = if routing.renormalize { p.acc(sum + 1e-20) } else { 1.0 };
        for e in best {
            ids.push(e as i32);
            weights.push(p.acc(p.acc(scores[e] / divisor) * f64::from(routing.scale)));
        }
    }
    Ok((ids, weights))
}

/// Weights of the experts of each token, `[tokens, top_k]`: see [`route_by_table`](crate::moe::route_by_table).
pub fn route_by_table(p: Precision, logits: TensorRef<'_>, ids: &[i32]) -> Result<Vec<f64>> {
    let (tokens, experts) = (logits.shape()[0], logits.shape()[1]);
    let (logits, top_k) = (values(logits)?, ids.len() / tokens.max(1));
    let mut weights = Vec::new();
    for (t, ids) in ids.chunks(top_k.max(1)).enumerate() {
        let scores = ids.iter().map(|&id| {
            let x = logits[t * experts + id as usize];
            p.acc(p.acc(x.max(0.0) + p.acc((-x.abs()).exp().ln_1p())).sqrt())
        });
        let scores: Vec<f64> = scores.collect();
        let sum = scores.iter().fold(0.0, |sum, s| p.acc(sum + s));
        weights.extend(scores.iter().map(|s| p.acc(s / sum)));
    }
    Ok(weights)
}

/// Places of the largest first, of equal ones the first, NaN last.
fn descending(x: &[f64]) -> Vec<usize> {
    let mut places: Vec<usize> = (0..x.len()).collect();
    let rank = |i: usize| (x[i].is_nan(), -x[i]);
    places.sort_by(|&a, &b| rank(a).partial_cmp(&rank(b)).unwrap_or(std::cmp::Ordering::Equal));
    places
}

/// `out[t] = Σ_j weights[t, j] * w_down[e] · (act(w_gate[e] · x[t]) * (w_up[e] · x[t]))`, `e = ids[t, j]`; a choice
/// with a negative id is left out.
pub fn moe_ffn(
    p: Precision,
    x: TensorRef<'_>,
    (ids, weights): (&[i32], &[f64]),
    (w_gate_up, w_down): (Scaled<'_>, Scaled<'_>),
    act: fn(Precision, f64) -> f64,
) -> Result<Vec<f64>> {
    let (tokens, hidden, inter) = (x.shape()[0], x.shape()[1], w_down.data.shape()[2]);
    let top_k = ids.len() / tokens.max(1);
    let x = values(x)?;
    let mut out = vec![0.0; tokens * hidden];
    for t in 0..tokens {
        for j in 0..top_k {
            let (id, weight) = (ids[t * top_k + j], weights[t * top_k + j]);
            let Ok(e) = usize::try_from(id) else { continue };
            let row = &x[t * hidden..][..hidden];
            let gate_up = product(p, 2 * inter, &scaled_values(p, w_gate_up.select(e)?)?, row);
            let (gate, up) = gate_up.split_at(inter);
            let middle: Vec<f64> = gate.iter().zip(up).map(|(&g, u)| p.store(p.store(act(p, g)) * u)).collect();
            let result = product(p, hidden, &scaled_values(p, w_down.select(e)?)?, &middle);
            for (out, y) in out[t * hidden..].iter_mut().zip(result) {
                *out = p.acc(*out + p.acc(weight * y));
            }
        }
    }
    Ok(out.into_iter().map(|x| p.store(x)).collect())
}

/// A matrix of `rows` rows times a vector.
fn product(p: Precision, rows: usize, w: &[f64], x: &[f64]) -> Vec<f64> {
    let mut out = Vec::new();
    for r in 0..rows {
        let row = &w[r * x.len()..][..x.len()];
        out.push(p.store(row.iter().zip(x).fold(0.0, |sum, (w, x)| p.acc(sum + p.acc(w * x)))));
    }
    out
}
