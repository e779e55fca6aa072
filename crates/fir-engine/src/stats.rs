//! What the engine counts: plain numbers, copied out whole.

/// A histogram with fixed bounds, as monitoring systems read them: of times, or of numbers of tokens.
#[derive(Clone, Debug)]
pub struct Histogram {
    /// Upper bounds of the buckets; the last bucket has none.
    pub bounds: &'static [f64; 19],
    /// Observations at or below each of the bounds, and above the last; not cumulative.
    pub counts: [u64; 20],
    /// Sum of all observations.
    pub sum: f64,
}

impl Histogram {
    /// In seconds.
    const TIMES: [f64; 19] = [
        0.001, 0.0025, 0.005, 0.0075, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
        300.0,
    ];
    const TOKENS: [f64; 19] = [
        1.0, 2.0, 4.0, 8.0, 16.0, 24.0, 32.0, 48.0, 64.0, 96.0, 128.0, 192.0, 256.0, 384.0, 512.0, 1024.0, 2048.0,
        4096.0, 8192.0,
    ];

    pub(crate) fn of_tokens() -> Self {
        Self { bounds: &Self::TOKENS, ..Self::default() }
    }

    pub(crate) fn observe(&mut self, value: f64) {
        self.counts[self.bounds.partition_point(|&b| b < value)] += 1;
        self.sum += value;
    }

    /// Number of observations.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }
}

impl Default for Histogram {
    fn default() -> Self {
        Self { bounds: &Self::TIMES, counts: [0; 20], sum: 0.0 }
    }
}

/// What lies below the pool, and what it has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TierStats {
    /// Bytes in memory.
    pub host_bytes: u64,
    /// Bytes in files.
    pub disk_bytes: u64,
    /// Pages taken in from the pool.
    pub stored: u64,
    /// Pages written to files.
    pub written: u64,
    /// Pages given back to the pool.
    pub restored: u64,
    /// Files that were missing, cut short or altered, and writes that failed.
    pub damaged: u64,
}

/// The state of the engine and its counters since it started.
#[derive(Clone, Debug, Default)]
pub struct Stats {
    /// Sequences that run.
    pub running: usize,
    /// Sequences that wait.
    pub waiting: usize,
    /// Prompt tokens of those that wait.
    pub waiting_tokens: usize,
    /// Pages of the pool.
    pub pages: usize,
    /// Pages that running sequences hold; others are free or hold prefixes that may be forgotten.
    pub pages_used: usize,
    /// Steps run.
    pub steps: u64,
    /// Prompt tokens of sequences that have run.
    pub prompt_tokens: u64,
    /// Of those, found in the prefix cache.
    pub cached_tokens: u64,
    /// Tokens given to the model, prompts and answers alike.
    pub computed_tokens: u64,
    /// Tokens generated.
    pub generated_tokens: u64,
    /// Sequences ended by an end token or a stop text.
    pub finished_stop: u64,
    /// Sequences ended by their length.
    pub finished_length: u64,
    /// Sequences whose callers went away.
    pub aborted: u64,
    /// Sequences that waited past their deadline.
    pub expired: u64,
    /// Sequences that ended with an error.
    pub failed: u64,
    /// Requests refused because the queue was full.
    pub refused: u64,
    /// Sequences that gave up their pages for others.
    pub preemptions: u64,
    /// Pages taken from the prefix tree.
    pub evictions: u64,
    /// Tokens whose KV came back from a tier.
    pub restored_tokens: u64,
    /// Groups of sequences whose common prefix was read once.
    pub cascade_groups: u64,
    /// KV bytes that attention would have read without them.
    pub kv_bytes_flat: u64,
    /// KV bytes that it read.
    pub kv_bytes_read: u64,
    /// Tokens guessed.
    pub drafted_tokens: u64,
    /// Of those, right.
    pub accepted_tokens: u64,
    /// Times that a second chain of guesses was right where the first was not.
    pub branches_taken: u64,
    /// Why the small model guesses no more, if it failed.
    pub drafter_error: Option<String>,
    /// What lies below the pool.
    pub tier: TierStats,
    /// From submission to the first time it runs.
    pub queue_time: Histogram,
    /// From submission to the first token.
    pub first_token: Histogram,
    /// Between tokens.
    pub between_tokens: Histogram,
    /// From the first time it runs to the first token.
    pub prefill: Histogram,
    /// From the first token to the last.
    pub decode: Histogram,
    /// Between tokens, as the mean of an answer.
    pub per_token: Histogram,
    /// From submission to the end.
    pub whole: Histogram,
    /// Of a step.
    pub step: Histogram,
    /// Tokens of a step.
    pub step_tokens: Histogram,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_on_a_bound_is_below_it() {
        let mut h = Histogram::default();
        [0.001, 0.0011, 299.0, 301.0].into_iter().for_each(|t| h.observe(t));
        assert_eq!((h.counts[0], h.counts[1], h.counts[18], h.counts[19], h.count()), (1, 1, 1, 1, 4));
    }
}
