//! How long a step takes: a line through what was measured, from which a prefill's share of a step is cut.

use std::time::Duration;

/// What a step's time depends on.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Load {
    /// New tokens.
    pub tokens: usize,
    /// Pairs of a new token and one that it attends to.
    pub pairs: usize,
    /// Rows of logits.
    pub rows: usize,
}

impl Load {
    /// `new` tokens after `past` ones, `rows` of them with logits.
    pub(crate) fn of(past: usize, new: usize, rows: usize) -> Self {
        Self { tokens: new, pairs: new * past + new * (new + 1) / 2, rows }
    }

    pub(crate) fn plus(self, other: Self) -> Self {
        Self { tokens: self.tokens + other.tokens, pairs: self.pairs + other.pairs, rows: self.rows + other.rows }
    }

    /// Scaled so that the four terms of a usual step are of one size: the fit is then well conditioned.
    fn features(self) -> [f64; 4] {
        [1.0, self.tokens as f64 / 64.0, self.pairs as f64 / 65_536.0, self.rows as f64 / 16.0]
    }
}

/// `time ≈ a + b · tokens + c · pairs + d · rows`, by recursive least squares that forgets slowly: a machine's speed
/// changes with its neighbours.
///
/// Beside that line it knows how the last steps went: a neighbour that comes or goes changes all of them at once, within
/// a step or two, and no line through a hundred steps can follow. What is foreseen for a prompt's share is stretched by
/// what those took over what was foreseen for them, and by how far they were apart, as TCP does with its time-outs.
#[derive(Clone, Debug)]
pub(crate) struct Cost {
    milliseconds: [f64; 4],
    covariance: [[f64; 4]; 4],
    seen: usize,
    /// Of the last steps, those before weighing less: what the line said, what they took, and how far each was from
    /// the others' ratio of the two; in milliseconds.
    foreseen: f64,
    took: f64,
    apart: f64,
}

/// A measurement's weight halves in about 140 steps.
const FORGET: f64 = 0.995;
/// What weighs as one of the last steps: after so many milliseconds a step's weight is `1/e`. Three steps at the usual
/// target of 50, or twenty short ones.
const RECENT_MS: f64 = 150.0;
/// Mean deviations kept free below the target: 2.5 of a normal distribution's leave 1 in 40 above it, and those by little.
const DEVIATIONS: f64 = 2.5;

impl Cost {
    pub(crate) fn new() -> Self {
        let mut covariance = [[0.0; 4]; 4];
        (0..4).for_each(|i| covariance[i][i] = 1e4);
        Self { milliseconds: [0.0; 4], covariance, seen: 0, foreseen: 0.0, took: 0.0, apart: 0.0 }
    }

    pub(crate) fn learn(&mut self, load: Load, took: Duration) {
        let took = took.as_secs_f64() * 1e3;
        // One step in a hundred is interrupted by something else: what takes three times what is known is cut to that.
        let took = if self.seen > 16 { took.min(3.0 * self.predict_ms(load) + 1.0) } else { took };
        if self.seen >= 4 {
            let said = self.predict_ms(load);
            let apart = (took - self.stretch(0.0) * said).abs();
            let keep = (-said / RECENT_MS).exp();
            for (sum, more) in [(&mut self.foreseen, said), (&mut self.took, took), (&mut self.apart, apart)] {
                *sum = *sum * keep + more;
            }
        }
        self.seen += 1;
        let x = load.features();
        let px: [f64; 4] = std::array::from_fn(|i| dot(&self.covariance[i], &x));
        let scale = FORGET + dot(&px, &x);
        let error = took - dot(&self.milliseconds, &x);
        for i in 0..4 {
            self.milliseconds[i] += px[i] / scale * error;
            for j in 0..4 {
                self.covariance[i][j] = (self.covariance[i][j] - px[i] * px[j] / scale) / FORGET;
            }
        }
        // Directions that no step shows (all prompts short) would grow without bound.
        let largest = (0..4).map(|i| self.covariance[i][i]).fold(0.0, f64::max);
        if largest > 1e6 {
            self.covariance.as_flattened_mut().iter_mut().for_each(|v| *v *= 1e6 / largest);
        }
    }

    /// Time of a step in milliseconds; no term makes it less.
    pub(crate) fn predict_ms(&self, load: Load) -> f64 {
        self.milliseconds.iter().zip(load.features()).map(|(c, x)| (c * x).max(0.0)).sum()
    }

    /// What the last steps took for each millisecond foreseen, and so many mean deviations more.
    fn stretch(&self, deviations: f64) -> f64 {
        if self.foreseen > 0.0 { (self.took + deviations * self.apart) / self.foreseen } else { 1.0 }
    }

    /// The most tokens of a prompt, `past` of which are done, that a step of `base` can take within `target` ms, as the
    /// last steps went.
    pub(crate) fn prefill_within(&self, base: Load, past: usize, most: usize, target_ms: f64) -> usize {
        if self.seen < 4 {
            return most;
        }
        let target_ms = target_ms / self.stretch(DEVIATIONS);
        let fits = |n: usize| self.predict_ms(base.plus(Load::of(past, n, 1))) <= target_ms;
        let (mut low, mut high) = (0, most);
        while low < high {
            let middle = (low + high).div_ceil(2);
            if fits(middle) { low = middle } else { high = middle - 1 }
        }
        low
    }
}

fn dot(a: &[f64; 4], b: &[f64; 4]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn learns_a_machine_and_keeps_steps_within_the_target() {
        let machine = |l: Load| 1.5 + 0.02 * l.tokens as f64 + 2e-5 * l.pairs as f64 + 0.1 * l.rows as f64;
        let mut cost = Cost::new();
        let mut random = 7u64;
        for i in 0..300 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let (past, rows) = ((random >> 40) as usize % 2000, 1 + (random >> 33) as usize % 32);
            let new = if i % 3 == 0 { 16 + (random >> 50) as usize % 500 } else { rows };
            let noise = 1.0 + ((random >> 20) % 100) as f64 / 1000.0;
            // An interruption now and then.
            let noise = if i % 97 == 50 { 40.0 } else { noise };
            cost.learn(
                Load::of(past, new, rows),
                Duration::from_secs_f64(machine(Load::of(past, new, rows)) * noise / 1e3),
            );
        }
        for (past, rows) in [(0, 1), (500, 8), (1500, 32)] {
            let base = Load::of(past, rows, rows);
            let n = cost.prefill_within(base, 1000, 4096, 20.0);
            let took = machine(base.plus(Load::of(1000, n, 1)));
            assert!((12.0..24.0).contains(&took), "{n} tokens took {took} ms");
        }
    }

    #[test]
    fn follows_a_neighbour_that_comes_and_goes_within_steps() {
        let quiet = |l: Load| 1.5 + 0.1 * l.tokens as f64 + 2e-5 * l.pairs as f64 + 0.1 * l.rows as f64;
        let mut cost = Cost::new();
        for i in 0..200 {
            let load = Load::of(i * 7 % 1000, if i % 3 == 0 { 40 + i } else { 1 }, 1);
            cost.learn(load, Duration::from_secs_f64(quiet(load) / 1e3));
        }
        // A prompt beside one answer: the step is cut to the target, then takes as long as it does.
        let mut run = |slower: f64, steps: usize| {
            let base = Load::of(500, 1, 1);
            let took = |past: usize| {
                let load = base.plus(Load::of(past, cost.prefill_within(base, past, 4096, 50.0), 1));
                cost.learn(load, Duration::from_secs_f64(slower * quiet(load) / 1e3));
                slower * quiet(load)
            };
            (0..steps).map(|i| i * 64).map(took).collect::<Vec<f64>>()
        };
        let alone = run(1.0, 10);
        assert!(alone.iter().all(|t| (40.0..52.0).contains(t)), "alone: {alone:?}");
        let beside = run(2.2, 12);
        assert!(beside[0] > 80.0, "the first could not know");
        assert!(beside[2..].iter().all(|t| *t < 55.0), "beside a neighbour: {beside:?}");
        let again = run(1.0, 12);
        assert!(again[6..].iter().all(|t| (30.0..55.0).contains(t)), "alone again: {again:?}");
    }

    #[test]
    fn knows_nothing_at_first_and_gives_all() {
        assert_eq!(Cost::new().prefill_within(Load::default(), 0, 512, 1.0), 512);
    }
}
