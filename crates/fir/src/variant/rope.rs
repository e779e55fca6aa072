//! Rotary position embedding: its description, and the frequencies that every lowering shares.

use std::hash::{Hash, Hasher};

/// Rotates pairs of a head's elements by angles that grow with the position.
///
/// Pair `i` of `rotary_dim / 2` turns by `position · f(i)` radians, where `f(i) = theta^(−2i / rotary_dim) / scale`.
/// The pairs are `(i, i + rotary_dim / 2)`, or `(2i, 2i + 1)` when interleaved; elements past `rotary_dim` stay.
#[derive(Clone, Copy, Debug)]
pub struct Rope {
    /// Base of the frequencies.
    pub theta: f32,
    /// Positions are divided by it.
    pub scale: f32,
    /// Pairs are neighbours rather than halves apart.
    pub interleave: bool,
    /// How many leading elements rotate; all of the head when `None`.
    pub rotary_dim: Option<usize>,
    /// The smoothed frequencies of Llama 3.1.
    pub llama31: Option<Llama31>,
}

/// With `s(i) = clamp((old_context_len · theta^(−2i/rotary_dim) / 2π − low) / (high − low), 0, 1)`, the frequency is
/// `theta^(−2i/rotary_dim) · ((1 − s) / scale + s)`: the fast ones stay, the slow ones are divided by the scale.
#[derive(Clone, Copy, Debug)]
pub struct Llama31 {
    /// Turns within the old context below which a frequency is scaled in full.
    pub low_freq_factor: f32,
    /// Turns within the old context above which a frequency is not scaled.
    pub high_freq_factor: f32,
    /// Context length of the model before it was extended.
    pub old_context_len: f32,
}

impl Default for Rope {
    /// `theta` 10⁴, no scaling, halves, all of the head.
    fn default() -> Self {
        Self { theta: 1e4, scale: 1.0, interleave: false, rotary_dim: None, llama31: None }
    }
}

impl Llama31 {
    fn key(&self) -> [u32; 3] {
        [self.low_freq_factor, self.high_freq_factor, self.old_context_len].map(f32::to_bits)
    }
}

impl Rope {
    /// What it is compared and hashed by: floats by their bits.
    fn key(&self) -> (u32, u32, bool, Option<usize>, Option<[u32; 3]>) {
        let llama31 = self.llama31.as_ref().map(Llama31::key);
        (self.theta.to_bits(), self.scale.to_bits(), self.interleave, self.rotary_dim, llama31)
    }

    /// The field that cannot be, with its value and what it must be.
    pub(crate) fn fault(&self) -> Option<(&'static str, String, &'static str)> {
        const POSITIVE: &str = "a finite number above 0";
        let positive = |x: f32| x > 0.0 && x.is_finite();
        if !positive(self.theta) {
            return Some(("theta", self.theta.to_string(), POSITIVE));
        }
        if !positive(self.scale) {
            return Some(("scale", self.scale.to_string(), POSITIVE));
        }
        if let Some(d) = self.rotary_dim
            && (d == 0 || !d.is_multiple_of(2))
        {
            return Some(("rotary_dim", d.to_string(), "an even number above 0"));
        }
        if let Some(l) = self.llama31 {
            if !positive(l.old_context_len) {
                return Some(("old_context_len", l.old_context_len.to_string(), POSITIVE));
            }
            // Negated, so that NaN is a fault.
            if !(l.high_freq_factor > l.low_freq_factor && (l.high_freq_factor - l.low_freq_factor).is_finite()) {
                let got = format!("{} (low_freq_factor {})", l.high_freq_factor, l.low_freq_factor);
                return Some(("high_freq_factor", got, "above low_freq_factor, both finite"));
            }
        }
        None
    }

    /// How many elements of a head of `head_dim` rotate; the reason when it does not fit.
    pub(crate) fn rotated(&self, head_dim: usize) -> Result<usize, String> {
        let dim = self.rotary_dim.unwrap_or(head_dim);
        if !dim.is_multiple_of(2) || dim > head_dim {
            return Err(format!("rotary_dim even and at most the head's {head_dim}"));
        }
        Ok(dim)
    }
}

impl PartialEq for Rope {
    fn eq(&self, other: &Self) -> bool {
        self.key() == other.key()
    }
}
impl Eq for Rope {}
impl Hash for Rope {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.key().hash(state);
    }
}
impl PartialEq for Llama31 {
    fn eq(&self, other: &Self) -> bool {
        self.key() == other.key()
    }
}
impl Eq for Llama31 {}
impl Hash for Llama31 {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.key().hash(state);
    }
}

/// Radians per position of each pair, `rotary_dim / 2` of them.
pub(crate) fn frequencies(rope: &Rope, head_dim: usize) -> Vec<f64> {
    let dim = rope.rotary_dim.unwrap_or(head_dim);
    let (theta, scale) = (f64::from(rope.theta), f64::from(rope.scale));
    (0..dim / 2)
        .map(|i| {
            let f = theta.powf(-2.0 * i as f64 / dim as f64);
            match rope.llama31 {
                None => f / scale,
                Some(l) => {
                    let (low, high) = (f64::from(l.low_freq_factor), f64::from(l.high_freq_factor));
                    let turns = f64::from(l.old_context_len) * f / std::f64::consts::TAU;
                    let s = ((turns - low) / (high - low)).clamp(0.0, 1.0);
                    (1.0 - s) * f / scale + s * f
                }
            }
        })
        .collect()
}
