//! Rotation of queries and keys: its frequencies, and the sines and cosines of a step's positions.

use std::f64::consts::TAU;

use serde_json::Value as Json;

use super::config::Fields;
use crate::error::Result;

/// How a model rotates queries and keys.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeConfig {
    /// Base of the frequencies.
    pub theta: f64,
    /// Elements of a head that rotate.
    pub rotary: usize,
    /// Pairs are neighbours rather than halves apart.
    pub interleave: bool,
    /// How a longer context was made of a shorter one.
    pub scaling: Scaling,
    /// Divisors of the frequencies that a file brings along.
    pub factors: Option<Vec<f32>>,
}

/// How a longer context was made of a shorter one.
#[derive(Clone, Debug, PartialEq)]
pub enum Scaling {
    /// It was not.
    None,
    /// Positions are divided by it.
    Linear(f64),
    /// Llama 3: slow frequencies are divided, fast ones stay, with a ramp in between.
    Llama3 {
        /// Divisor.
        factor: f64,
        /// Turns within the old context up to which a frequency is slow.
        low: f64,
        /// Turns from which it is fast.
        high: f64,
        /// The old context.
        old: f64,
    },
    /// YaRN: the same with another ramp, and a factor of the sines.
    Yarn {
        /// Divisor.
        factor: f64,
        /// The old context.
        old: f64,
        /// Turns of the ramp's fast end.
        fast: f64,
        /// Turns of its slow end.
        slow: f64,
        /// Factor of sines and cosines.
        attention: f64,
        /// DeepSeek's correction of the scores, if it has one: `0.1 * mscale * ln(factor) + 1`, squared.
        mscale: Option<f64>,
    },
}

impl Scaling {
    /// What the scores are multiplied by, twice.
    pub(crate) fn mscale(&self) -> f32 {
        match *self {
            Self::Yarn { factor, mscale: Some(m), .. } if factor > 1.0 => (0.1 * m * factor.ln() + 1.0) as f32,
            _ => 1.0,
        }
    }
}

impl RopeConfig {
    /// From the fields of a `config.json`: `rope_scaling`, or `rope_parameters` (with an entry per kind of layer or
    /// without).
    pub(crate) fn from_json(
        text: &Json,
        path: &str,
        kind: &str,
        theta: f64,
        rotary: usize,
        interleave: bool,
        context: usize,
    ) -> Result<Self> {
        let all = text.get("rope_parameters").or(text.get("rope_scaling")).filter(|v| v.is_object());
        let own = all.map(|all| all.get(kind).filter(|v| v.is_object()).unwrap_or(all));
        let Some(own) = own else {
            return Ok(Self { theta, rotary, interleave, scaling: Scaling::None, factors: None });
        };
        let j = Fields { json: own, path };
        let theta = j.float("rope_theta").unwrap_or(theta);
        let factor = j.float("factor").unwrap_or(1.0);
        let old = j.float("original_max_position_embeddings").unwrap_or(context as f64);
        let scaling = match own.get("rope_type").or(own.get("type")).and_then(Json::as_str) {
            None | Some("default" | "mrope") => Scaling::None,
            // Only in older files, where it was given for all layers alike, Gemma's windows have none.
            Some("linear") if kind == "sliding_attention" && text.get("rope_parameters").is_none() => Scaling::None,
            Some("linear") => Scaling::Linear(factor),
            Some("llama3") => Scaling::Llama3 {
                factor,
                low: j.float("low_freq_factor").unwrap_or(1.0),
                high: j.float("high_freq_factor").unwrap_or(4.0),
                old,
            },
            Some("yarn") => {
                let get = |scale: f64, m: f64| if scale <= 1.0 { 1.0 } else { 0.1 * m * scale.ln() + 1.0 };
                let (mscale, all_dim) = (j.float("mscale"), j.float("mscale_all_dim"));
                let attention = match (j.float("attention_factor"), mscale, all_dim) {
                    (Some(a), ..) => a,
                    (None, Some(m), Some(all)) => get(factor, m) / get(factor, all),
                    _ => get(factor, 1.0),
                };
                let (fast, slow) = (j.float("beta_fast").unwrap_or(32.0), j.float("beta_slow").unwrap_or(1.0));
                Scaling::Yarn { factor, old, fast, slow, attention, mscale: all_dim.filter(|&m| m != 0.0) }
            }
            Some(other) => return Err(j.wrong("rope_type", other, "default, linear, llama3 or yarn")),
        };
        Ok(Self { theta, rotary, interleave, scaling, factors: None })
    }

    /// Radians per position of each pair.
    pub(crate) fn frequencies(&self) -> Vec<f64> {
        let dim = self.rotary as f64;
        let base = |i: usize| self.theta.powf(-2.0 * i as f64 / dim);
        let scaled = |i: usize| {
            let f = base(i);
            match self.scaling {
                Scaling::None => f,
                Scaling::Linear(factor) => f / factor,
                Scaling::Llama3 { factor, low, high, old } => {
                    let s = ((old * f / TAU - low) / (high - low)).clamp(0.0, 1.0);
                    (1.0 - s) * f / factor + s * f
                }
                Scaling::Yarn { factor, old, fast, slow, .. } => {
                    // The pair that makes so many turns within the old context.
                    let pair = |turns: f64| dim * (old / (turns * TAU)).ln() / (2.0 * self.theta.ln());
                    let (from, to) = (pair(fast).floor().max(0.0), pair(slow).ceil().min(dim - 1.0));
                    let ramp = ((i as f64 - from) / (to - from).max(0.001)).clamp(0.0, 1.0);
                    f / factor * ramp + f * (1.0 - ramp)
                }
            }
        };
        let factor = |i: usize| self.factors.as_ref().and_then(|f| f.get(i)).map_or(1.0, |&x| f64::from(x));
        (0..self.rotary / 2).map(|i| scaled(i) / factor(i)).collect()
    }

    /// Factor of sines and cosines.
    pub(crate) fn amplitude(&self) -> f64 {
        match self.scaling {
            Scaling::Yarn { attention, .. } => attention,
            _ => 1.0,
        }
    }
}

/// The angles of a step: a row of cosines and sines for each of its tokens, made once for all layers.
pub(crate) struct Angles {
    frequencies: Vec<f64>,
    amplitude: f64,
    pub(crate) interleave: bool,
    pub(crate) table: Vec<f32>,
}

impl Angles {
    pub(crate) fn new(rope: &RopeConfig, tokens: usize) -> Self {
        let frequencies = rope.frequencies();
        let table = vec![0.0; tokens * rope.rotary];
        Self { frequencies, amplitude: rope.amplitude(), interleave: rope.interleave, table }
    }

    /// Fills the rows of tokens at these positions.
    pub(crate) fn fill(&mut self, positions: impl Iterator<Item = usize>) {
        let half = self.frequencies.len();
        for (row, position) in self.table.chunks_exact_mut((2 * half).max(1)).zip(positions) {
            let (cos, sin) = row.split_at_mut(half);
            for ((c, s), f) in cos.iter_mut().zip(sin).zip(&self.frequencies) {
                let (sin, cos) = (position as f64 * f).sin_cos();
                (*c, *s) = ((cos * self.amplitude) as f32, (sin * self.amplitude) as f32);
            }
        }
    }
}
