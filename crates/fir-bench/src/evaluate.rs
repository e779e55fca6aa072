//! Whether outputs are right: errors within tolerances, and distributions for samplers.

use std::collections::HashSet;
use std::sync::Arc;

use serde_json::{Map, json};

use crate::array::Array;
use crate::inputs::Ready;
use crate::schema::{Correctness, DType, Definition};

/// How far from the reference an output may be.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tolerance {
    /// An element is wrong only if its error is over this,
    pub atol: f64,
    /// and its error over the reference's magnitude over this.
    pub rtol: f64,
    /// Share of the elements that must not be wrong.
    pub matched_ratio: f64,
}

/// A verdict on one set of outputs.
#[derive(Clone, Debug)]
pub enum Verdict {
    /// Right.
    Right(Correctness),
    /// Too far off; why, for the log.
    Wrong(Correctness, String),
}

/// Errors of one output.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Errors {
    /// Largest `|got - want|`.
    pub absolute: f64,
    /// Largest `|got - want| / (|want| + 1e-8)`.
    pub relative: f64,
    /// Share of the elements that are right.
    pub matched: f64,
}

/// Decides about outputs of its own op type; see [`Config::evaluators`](crate::benchmark::Config::evaluators).
pub type Custom = Arc<dyn Fn(&Definition, &[Ready], &[Array], &[Array], Tolerance) -> Verdict + Send + Sync>;

/// Compares an output with the reference's, which has its shape and type. An infinity or NaN is right where the reference
/// has the same.
pub fn compare(got: &Array, want: &Array, tolerance: Tolerance) -> Errors {
    let (mut absolute, mut relative, mut wrong) = (0f64, 0f64, 0usize);
    let mut one = |g: f64, w: f64| {
        if g == w || (g.is_nan() && w.is_nan()) {
            return;
        }
        let (a, r) = if g.is_nan() || w.is_nan() {
            (f64::NAN, f64::NAN)
        } else {
            let a = (g - w).abs();
            (a, if a.is_infinite() { a } else { a / (w.abs() + 1e-8) })
        };
        // NaN is the largest error there is, and stays.
        absolute = if a.is_nan() || absolute.is_nan() { f64::NAN } else { absolute.max(a) };
        relative = if r.is_nan() || relative.is_nan() { f64::NAN } else { relative.max(r) };
        // As `a > atol && r > rtol`, but true for NaN.
        wrong += usize::from(!(a <= tolerance.atol || r <= tolerance.rtol));
    };
    if got.dtype() == DType::Float4E2m1 {
        let pairs = got.typed::<fir::tensor::E2m1x2>().iter().zip(want.typed::<fir::tensor::E2m1x2>());
        for (g, w) in pairs {
            let (g, w) = (g.to_f32(), w.to_f32());
            one(f64::from(g[0]), f64::from(w[0]));
            one(f64::from(g[1]), f64::from(w[1]));
        }
    } else {
        (0..got.len()).for_each(|i| one(got.get(i), want.get(i)));
    }
    let count = got.len() * if got.dtype() == DType::Float4E2m1 { 2 } else { 1 };
    let matched = if count == 0 { 1.0 } else { 1.0 - wrong as f64 / count as f64 };
    Errors { absolute, relative, matched }
}

/// Compares all outputs.
pub fn compare_all(definition: &Definition, got: &[Array], want: &[Array], tolerance: Tolerance) -> Verdict {
    let mut total = Errors { absolute: 0.0, relative: 0.0, matched: 1.0 };
    let mut worst = None;
    for ((name, _), (g, w)) in definition.outputs().iter().zip(got.iter().zip(want)) {
        let errors = compare(g, w, tolerance);
        let larger = |a: f64, b: f64| if a.is_nan() || b.is_nan() { f64::NAN } else { a.max(b) };
        total.absolute = larger(total.absolute, errors.absolute);
        total.relative = larger(total.relative, errors.relative);
        if errors.matched < total.matched {
            total.matched = errors.matched;
            worst = Some(name);
        }
    }
    let extra =
        (tolerance.matched_ratio < 1.0).then(|| Map::from_iter([("matched_ratio".into(), json!(total.matched))]));
    let correctness = Correctness { max_relative_error: total.relative, max_absolute_error: total.absolute, extra };
    match worst {
        Some(name) if total.matched < tolerance.matched_ratio => {
            let why = format!(
                "output `{name}`: {:.4} % of its elements are within atol {} or rtol {}, not {} %",
                total.matched * 100.0,
                tolerance.atol,
                tolerance.rtol,
                tolerance.matched_ratio * 100.0
            );
            Verdict::Wrong(correctness, why)
        }
        _ => Verdict::Right(correctness),
    }
}

/// Share of a row's indices that must be the reference's: of scores in fp8, which of two is the larger at the end of the row is
/// a matter of rounding.
const SAME_INDICES: f64 = 0.99;

/// Compares rows of chosen indices as sets, in any order; a negative index is none.
pub fn compare_indices(definition: &Definition, got: &[Array], want: &[Array]) -> Verdict {
    let correctness = |extra: f64| Correctness {
        max_relative_error: 0.0,
        max_absolute_error: 0.0,
        extra: Some(Map::from_iter([("matched_ratio".into(), json!(extra))])),
    };
    let mut worst = 1f64;
    for ((name, _), (g, w)) in definition.outputs().iter().zip(got.iter().zip(want)) {
        let row = w.shape().last().copied().unwrap_or(1).max(1);
        for r in 0..w.len() / row {
            let set =
                |a: &Array| (r * row..(r + 1) * row).map(|i| a.integer(i)).filter(|i| *i >= 0).collect::<Vec<_>>();
            let (drawn, wanted) = (set(g), set(w).into_iter().collect::<HashSet<_>>());
            let distinct: HashSet<i64> = drawn.iter().copied().collect();
            if distinct.len() != drawn.len() {
                return Verdict::Wrong(correctness(0.0), format!("output `{name}`, row {r}: an index is there twice"));
            }
            if distinct.len() != wanted.len() {
                let why = format!("output `{name}`, row {r}: {} indices, not {}", distinct.len(), wanted.len());
                return Verdict::Wrong(correctness(0.0), why);
            }
            let share = if wanted.is_empty() {
                1.0
            } else {
                distinct.intersection(&wanted).count() as f64 / wanted.len() as f64
            };
            worst = worst.min(share);
            if share < SAME_INDICES {
                let why =
                    format!("output `{name}`, row {r}: {:.2} % of its indices are the reference's", share * 100.0);
                return Verdict::Wrong(correctness(share), why);
            }
        }
    }
    Verdict::Right(correctness(worst))
}

/// What a sampler should draw from: probabilities of the tokens that pass, and which pass at all.
pub(crate) struct Target {
    #[cfg(test)]
    probs: Vec<f64>,
    allowed: Vec<bool>,
    /// Tokens in parts of about equal mass, by part.
    part: Vec<u16>,
    parts: Vec<f64>,
}

/// Parts that a distribution is cut into for its test: enough to see a shape, few enough for thousands of draws.
const PARTS: usize = 32;

impl Target {
    /// The target of row `row`, by the definition's inputs `probs`, `top_k` and `top_p`.
    pub(crate) fn new(inputs: &[Ready], row: usize) -> Option<Self> {
        let find = |name: &str| inputs.iter().find(|i| i.name == name).map(|i| &i.array);
        let probs = find("probs").filter(|p| p.dtype() == DType::Float32)?;
        let vocab = *probs.shape().last()?;
        let given = ["top_k", "top_p"].iter().all(|name| find(name).is_none_or(|a| row < a.len()));
        if vocab == 0 || row >= probs.len() / vocab || !given {
            return None;
        }
        let mut order: Vec<usize> = (0..vocab).collect();
        let weight = |i: usize| f64::from(probs.typed::<f32>()[row * vocab + i]);
        order.sort_by(|a, b| weight(*b).total_cmp(&weight(*a)));
        let k = find("top_k").map_or(vocab, |k| {
            usize::try_from(k.integer(row)).map_or(vocab, |k| if k == 0 { vocab } else { k.min(vocab) })
        });
        let p = find("top_p").map_or(1.0, |p| p.get(row));
        let mass: f64 = order[..k].iter().map(|&i| weight(i)).sum();
        let (mut kept, mut sum) = (0, 0.0);
        while kept < k && (kept == 0 || sum < p * mass) {
            sum += weight(order[kept]);
            kept += 1;
        }
        // Sums in another order may end a token earlier or later, and equals of the last may take its place.
        let (mut allowed, mut slack) = (vec![false; vocab], kept);
        let last = weight(order[kept - 1]);
        while slack < vocab && (weight(order[slack]) == last || (slack < k && sum < p * mass + 1e-4)) {
            sum += weight(order[slack]);
            slack += 1;
        }
        order[..slack].iter().for_each(|&i| allowed[i] = true);
        let total: f64 = order[..kept].iter().map(|&i| weight(i)).sum();
        let mut out = vec![0.0; vocab];
        let (mut part, mut parts, mut filled) = (vec![0u16; vocab], vec![0.0], 0.0);
        for &i in &order[..kept] {
            out[i] = weight(i) / total;
            if filled >= 1.0 / PARTS as f64 {
                parts.push(0.0);
                filled = 0.0;
            }
            part[i] = (parts.len() - 1) as u16;
            filled += out[i];
            *parts.last_mut()? += out[i];
        }
        let end = (parts.len() - 1) as u16;
        order[kept..slack].iter().for_each(|&i| part[i] = end);
        Some(Self {
            #[cfg(test)]
            probs: out,
            allowed,
            part,
            parts,
        })
    }

    /// Whether a token may be drawn at all.
    pub(crate) fn allows(&self, token: i64) -> bool {
        usize::try_from(token).is_ok_and(|t| self.allowed.get(t) == Some(&true))
    }

    /// Half the sum of differences between how often parts were drawn and how often they should be, and how many standard
    /// deviations the chi-square of that is away from what chance makes of it.
    pub(crate) fn distance(&self, draws: &[i64]) -> (f64, f64) {
        let n = draws.len() as f64;
        let mut seen = vec![0f64; self.parts.len()];
        for &token in draws {
            if let Some(part) = usize::try_from(token).ok().and_then(|t| self.part.get(t)) {
                seen[usize::from(*part)] += 1.0;
            }
        }
        let tvd = seen.iter().zip(&self.parts).map(|(s, p)| (s / n - p).abs()).sum::<f64>() / 2.0;
        let freedom = (self.parts.len() - 1) as f64;
        if freedom == 0.0 {
            return (tvd, 0.0);
        }
        let chi: f64 = seen.iter().zip(&self.parts).map(|(s, p)| (s - p * n).powi(2) / (p * n)).sum();
        // Wilson and Hilferty: the cube root of a chi-square over its freedom is nearly normal.
        let spread = 2.0 / (9.0 * freedom);
        (tvd, ((chi / freedom).cbrt() - (1.0 - spread)) / spread.sqrt())
    }

    /// Probability of a token.
    #[cfg(test)]
    fn prob(&self, token: usize) -> f64 {
        self.probs[token]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inputs::Rng;

    fn array(values: &[f32]) -> Array {
        Array::from_bytes(DType::Float32, &[values.len()], bytemuck::cast_slice(values)).unwrap()
    }

    const STRICT: Tolerance = Tolerance { atol: 1e-2, rtol: 1e-2, matched_ratio: 1.0 };

    #[test]
    fn an_element_is_wrong_when_both_errors_are_too_large() {
        let want = array(&[100.0, 0.001, 1.0, f32::NEG_INFINITY]);
        let near = compare(&array(&[100.5, 0.009, 1.0, f32::NEG_INFINITY]), &want, STRICT);
        assert_eq!(near.matched, 1.0);
        let far = compare(&array(&[102.0, 0.001, 1.0, f32::NEG_INFINITY]), &want, STRICT);
        assert_eq!((far.matched, far.absolute), (0.75, 2.0));
        let nan = compare(&array(&[f32::NAN, 0.001, 1.0, 0.0]), &want, STRICT);
        assert!(nan.matched == 0.5 && nan.absolute.is_nan());
        let inf = compare(&array(&[100.0, 0.001, f32::INFINITY, f32::NEG_INFINITY]), &want, STRICT);
        assert!(inf.matched == 0.75 && inf.absolute.is_infinite() && inf.relative.is_infinite());
        assert_eq!(compare(&array(&[]), &array(&[]), STRICT).matched, 1.0);
    }

    #[test]
    fn indices_are_compared_as_sets() {
        let d = Definition::from_value(&json!({
            "name": "dsa_topk_indexer_x", "op_type": "dsa_paged", "axes": {"b": {"type": "var"}, "k": {"type": "const", "value": 4}},
            "inputs": {}, "outputs": {"ids": {"shape": ["b", "k"], "dtype": "int32"}}, "reference": "def run():\n    pass\n",
        }))
        .unwrap();
        let ids = |x: &[i32]| vec![Array::from_bytes(DType::Int32, &[2, 4], bytemuck::cast_slice(x)).unwrap()];
        let want = ids(&[1, 2, 3, 4, 7, 9, -1, -1]);
        let right = |x: &[i32]| matches!(compare_indices(&d, &ids(x), &want), Verdict::Right(_));
        assert!(right(&[4, 3, 2, 1, -1, 9, -1, 7]));
        assert!(!right(&[4, 3, 2, 5, -1, 9, -1, 7]));
        assert!(!right(&[4, 3, 2, 1, -1, 9, 9, 7]));
        assert!(!right(&[4, 3, 2, 1, -1, 9, -1, -1]));
    }

    fn sampler(vocab: usize, top_k: i64, top_p: f32) -> Vec<Ready> {
        let mut rng = Rng::new(1, "sampler");
        let weights: Vec<f32> = (0..vocab).map(|_| rng.uniform() as f32).collect();
        let sum: f32 = weights.iter().sum();
        let probs: Vec<f32> = weights.iter().map(|w| w / sum).collect();
        let ready = |name: &str, array: Array| Ready { name: name.into(), array, scalar: false, random: true };
        let mut k = Array::zeros(DType::Int32, &[1]).unwrap();
        k.set(0, top_k as f64);
        let probs = Array::from_bytes(DType::Float32, &[1, vocab], bytemuck::cast_slice(&probs)).unwrap();
        vec![ready("probs", probs), ready("top_k", k), ready("top_p", array(&[top_p]))]
    }

    #[test]
    fn draws_from_the_target_pass_and_others_do_not() {
        for (vocab, k, p) in [(1000, 0, 1.0), (1000, 50, 0.9), (1000, 1, 1.0), (1000, -3, 0.3), (7, 5, 0.8)] {
            let target = Target::new(&sampler(vocab, k, p), 0).unwrap();
            let total: f64 = (0..vocab).map(|t| target.prob(t)).sum();
            assert!((total - 1.0).abs() < 1e-9);
            let mut rng = Rng::new(2, "draws");
            let mut draw = || {
                let (mut u, mut last) = (rng.uniform(), 0);
                for t in (0..vocab).filter(|&t| target.prob(t) > 0.0) {
                    last = t as i64;
                    u -= target.prob(t);
                    if u < 0.0 {
                        break;
                    }
                }
                last
            };
            let fair: Vec<i64> = (0..4000).map(|_| draw()).collect();
            assert!(fair.iter().all(|&t| target.allows(t)));
            let (_, z) = target.distance(&fair);
            assert!(z < 4.0, "vocab {vocab}, k {k}, p {p}: z = {z}");
            if (0..vocab).filter(|&t| target.prob(t) > 0.0).count() > 1 {
                let constant = vec![fair[0]; 4000];
                assert!(target.distance(&constant).1 > 20.0);
            }
            if k == 0 {
                let even: Vec<i64> = (0..4000).map(|i| i % vocab as i64).collect();
                assert!(target.distance(&even).1 > 6.0, "even draws pass");
            }
        }
    }
}
