//! Guessing ahead: tokens that may follow, verified in one step.
//!
//! The sampler verifies a guess by drawing (see [`crate::sampler`]), so guesses change how many steps an answer takes
//! and nothing else. Whether guessing pays is decided per sequence, from how often its guesses were right and what the
//! cost model says a row more takes.
//!
//! Guesses come from what followed the same tokens earlier in the sequence, or from a smaller model. Where they are often
//! wrong, some are spent on a second chain, which begins with another token: a tree with two branches.

pub(crate) mod draft;

use std::collections::HashMap;

use crate::sched::cost::{Cost, Load};

/// Tokens that must agree for what followed them to be a guess.
const GRAM: usize = 3;
/// A second chain is tried where less than this share of guesses was right: at 0.6 the third guess of a chain is right in
/// 0.22 of cases, and the first of another chain in as many, if it is right in half of the cases in which the chain is not.
const ASIDE: f64 = 0.6;
/// After so many guesses that did not pay, one is tried again.
const RETRY: u32 = 64;

/// What followed each run of three tokens in a sequence, and how often that was right.
#[derive(Debug)]
pub(crate) struct Guesser {
    /// Where a run's continuation begins, the latest and the latest that began otherwise.
    after: HashMap<[u32; GRAM], [Option<usize>; 2]>,
    indexed: usize,
    /// Share of guesses that were right, of late.
    right: f64,
    skipped: u32,
}

impl Guesser {
    pub(crate) fn new() -> Self {
        Self { after: HashMap::new(), indexed: 0, right: 0.7, skipped: 0 }
    }

    /// At most `most` tokens that may follow `tokens`; none where nothing like them came before.
    pub(crate) fn guess(&mut self, tokens: &[u32], most: usize) -> Vec<u32> {
        let Some(last) = tokens.last_chunk::<GRAM>() else { return Vec::new() };
        // The last run itself is indexed only when something follows it.
        while self.indexed + GRAM < tokens.len() {
            let at = self.indexed;
            let run = tokens[at..at + GRAM].try_into().expect("as long as a run");
            let found = self.after.entry(run).or_default();
            let begin = |at: Option<usize>| at.map(|at| tokens[at]);
            if begin(found[0]) != Some(tokens[at + GRAM]) {
                found[1] = found[0];
            }
            found[0] = Some(at + GRAM);
            self.indexed += 1;
        }
        let found = self.after.get(last).and_then(|found| found[0]);
        found.map_or_else(Vec::new, |at| tokens[at..].iter().take(most).copied().collect())
    }

    /// At most `most` tokens that may follow instead of [`Self::guess`]'s, the first being another; to be called after it.
    pub(crate) fn other(&self, tokens: &[u32], most: usize) -> Vec<u32> {
        let found = tokens.last_chunk::<GRAM>().and_then(|last| self.after.get(last)).and_then(|found| found[1]);
        found.map_or_else(Vec::new, |at| tokens[at..].iter().take(most).copied().collect())
    }

    /// How many of `most` guesses go into a second chain: none while the first is mostly right, as a longer one is worth
    /// more then. A second chain computes the last token once more.
    pub(crate) fn aside(&self, most: usize) -> usize {
        if self.right < ASIDE { most.saturating_sub(1) / 2 } else { 0 }
    }

    /// How many guesses pay for a sequence of `past` tokens: the number that gives most tokens per millisecond,
    /// if a guess takes `guess_ms` to make.
    pub(crate) fn worth(&mut self, cost: &Cost, base: Load, past: usize, most: usize, guess_ms: f64) -> usize {
        let (mut best, mut rate) = (0, 0.0);
        for n in 0..=most {
            let tokens: f64 = (0..=n).map(|i| self.right.powi(i as i32)).sum();
            // Other sequences of the step pay for it too: its price is what the step takes longer, its share what one
            // sequence of it takes.
            let share = cost.predict_ms(base) / base.rows.max(1) as f64;
            let more = cost.predict_ms(base.plus(Load::of(past, n, n))) - cost.predict_ms(base);
            let per_ms = tokens / (share + more + n as f64 * guess_ms).max(1e-6);
            if per_ms > rate * 1.02 {
                (best, rate) = (n, per_ms);
            }
        }
        if best == 0 && most > 0 {
            self.skipped += 1;
            if self.skipped >= RETRY {
                self.skipped = 0;
                return 1;
            }
        }
        best
    }

    /// Learns that of `guessed` tokens `right` were right.
    pub(crate) fn learn(&mut self, guessed: usize, right: usize) {
        // Each guess up to the first wrong one is one trial.
        for i in 0..guessed.min(right + 1) {
            let hit = if i < right { 1.0 } else { 0.0 };
            self.right += 0.1 * (hit - self.right);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn guesses_what_followed_last_time() {
        let mut g = Guesser::new();
        let mut tokens = vec![1, 2, 3, 4, 5, 9, 1, 2, 3];
        assert_eq!(g.guess(&tokens, 3), [4, 5, 9]);
        tokens.extend([7, 1, 2, 3]);
        assert_eq!(g.guess(&tokens, 2), [7, 1], "the latest counts");
        tokens.push(8);
        assert!(g.guess(&tokens, 2).is_empty(), "2 3 8 is new");
        assert!(Guesser::new().guess(&[1, 2], 4).is_empty());
        // What followed before that, and began otherwise.
        let mut g = Guesser::new();
        let tokens = [1, 2, 3, 4, 5, 1, 2, 3, 6, 1, 2, 3, 6, 7, 1, 2, 3];
        assert_eq!((g.guess(&tokens, 2), g.other(&tokens, 2)), (vec![6, 7], vec![4, 5]));
        assert!(Guesser::new().other(&tokens, 2).is_empty());
        assert_eq!((Guesser { right: 0.9, ..Guesser::new() }.aside(4), Guesser { right: 0.3, ..g }.aside(4)), (0, 1));
        // A run that repeats itself goes on.
        let mut g = Guesser::new();
        assert_eq!(g.guess(&[6, 6, 6, 6, 6], 4), [6]);
    }

    #[test]
    fn guesses_as_long_as_it_pays() {
        let learned = |row_ms: f64| {
            let mut cost = Cost::new();
            for n in 1..200usize {
                let load = Load::of(100 * (n % 7), 1 + n % 13, 1 + n % 5);
                cost.learn(load, Duration::from_secs_f64((5.0 + row_ms * load.tokens as f64) / 1e3));
            }
            cost
        };
        let base = Load::of(300, 1, 1);
        let mut sure = Guesser { right: 0.95, ..Guesser::new() };
        assert_eq!(sure.worth(&learned(0.01), base, 300, 6, 0.0), 6, "rows cost next to nothing");
        assert_eq!(sure.worth(&learned(0.01), base, 300, 6, 50.0), 0, "guesses that take longer than tokens");
        let mut never = Guesser { right: 0.02, ..Guesser::new() };
        assert_eq!(never.worth(&learned(2.0), base, 300, 6, 0.0), 0);
        let tries = (0..200).filter(|_| never.worth(&learned(2.0), base, 300, 6, 0.0) > 0).count();
        assert_eq!(tries, 3, "one in {RETRY} is tried again");
        (0..60).for_each(|_| never.learn(1, 1));
        assert!(never.right > 0.9);
        never.learn(4, 0);
        assert!(never.right < 0.9);
    }
}
