//! From logits to tokens: each row by its own request's rules and random numbers, whatever stands beside it.
//!
//! The token at position `p` of a request is drawn with the `p`-th number of the request's seed, from its own row. So it
//! does not depend on the batch; and a guess at it can be verified by drawing it: a guess is right if it is the token
//! that is drawn. Speculation with that rule gives the very tokens that there would be without it, and accepts a guess
//! with the probability that the model has for it, which is the most that a fixed guess can have.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hasher, RandomState};

use fir::sampling::{Draw, Filters, PerRow, RngState};
use fir::tensor::Bool;
use fir::{Exec, TensorMut, TensorRef};
use llguidance::Matcher;

use crate::error::{Error, Result};
use crate::request::{Logprob, Sampling, TokenLogprobs};

/// How one sequence's tokens are chosen, and what that depends on of those before.
pub(crate) struct Chooser {
    sampling: Sampling,
    seed: u64,
    /// Tokens that end the answer.
    ends: Vec<u32>,
    /// Occurrences in the answer; kept if a penalty asks for it.
    answer: HashMap<u32, u32>,
    /// Tokens of the prompt; kept if a penalty asks for it.
    prompt: Vec<u32>,
    /// The last tokens of the answer, as many as a sequence that must not come has before its last.
    last: Vec<u32>,
    grammar: Option<Matcher>,
}

impl Chooser {
    /// For continuation `choice` of a request; `eos` are the model's end tokens.
    pub(crate) fn new(
        sampling: &Sampling,
        choice: usize,
        prompt: &[u32],
        eos: &[u32],
        seed: u64,
        grammar: Option<Matcher>,
    ) -> Self {
        let mut ends = sampling.stop_ids.clone();
        ends.extend(eos.iter().filter(|_| !sampling.ignore_eos));
        let mut seen = Vec::new();
        if sampling.repetition_penalty != 1.0 {
            seen = prompt.to_vec();
            seen.sort_unstable();
            seen.dedup();
        }
        Self {
            sampling: sampling.clone(),
            // Far apart in the space of seeds, as requests count theirs up.
            seed: seed.wrapping_add((choice as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)),
            ends,
            answer: HashMap::new(),
            prompt: seen,
            last: Vec::new(),
            grammar,
        }
    }

    /// Changes rows of logits, of the tokens after the first `from` of `drafts`, after one more, and so on, by all that is
    /// not a filter.
    pub(crate) fn prepare(
        &mut self,
        rows: &mut [f32],
        vocab: usize,
        drafts: &[u32],
        from: usize,
        generated: usize,
    ) -> Result<()> {
        let mut ahead = None;
        for (i, row) in (from..).zip(rows.chunks_exact_mut(vocab)) {
            self.penalize(row, &drafts[..i]);
            for &(id, bias) in &self.sampling.logit_bias {
                row[id as usize] += bias;
            }
            for bad in &self.sampling.bad_tokens {
                let Some((&id, before)) = bad.split_last() else { continue };
                let (drafted, rest) = (&drafts[..i], before.len().saturating_sub(i));
                if before.ends_with(&drafted[i - i.min(before.len())..]) && self.last.ends_with(&before[..rest]) {
                    row[id as usize] = f32::NEG_INFINITY;
                }
            }
            if let Some(allowed) = &self.sampling.allowed_tokens {
                let kept: Vec<(u32, f32)> = allowed.iter().map(|&id| (id, row[id as usize])).collect();
                row.fill(f32::NEG_INFINITY);
                kept.into_iter().for_each(|(id, logit)| row[id as usize] = logit);
            }
            match &mut self.grammar {
                Some(grammar) => {
                    let matcher = match i {
                        0 => grammar,
                        _ => {
                            let (matcher, taken) = ahead.get_or_insert_with(|| (grammar.clone(), 0));
                            for &id in &drafts[*taken..i] {
                                matcher.consume_token(id).map_err(broken)?;
                            }
                            *taken = i;
                            matcher
                        }
                    };
                    let mask = matcher.compute_mask_or_eos().map_err(broken)?;
                    mask.iter_unset_entries(|id| {
                        if let Some(logit) = row.get_mut(id) {
                            *logit = f32::NEG_INFINITY;
                        }
                    });
                }
                // A grammar says itself when it may end.
                None if generated + i < self.sampling.min_tokens => {
                    self.ends.iter().for_each(|&id| row[id as usize] = f32::NEG_INFINITY);
                }
                None => {}
            }
        }
        Ok(())
    }

    fn penalize(&self, row: &mut [f32], drafts: &[u32]) {
        let s = &self.sampling;
        if s.repetition_penalty != 1.0 {
            let drafted = drafts.iter().filter(|id| !self.answer.contains_key(id));
            let mut seen: Vec<u32> = self.prompt.iter().chain(self.answer.keys()).chain(drafted).copied().collect();
            seen.sort_unstable();
            seen.dedup();
            for id in seen {
                let logit = &mut row[id as usize];
                *logit = if *logit > 0.0 { *logit / s.repetition_penalty } else { *logit * s.repetition_penalty };
            }
        }
        if s.frequency_penalty != 0.0 || s.presence_penalty != 0.0 {
            let mut counts = std::borrow::Cow::Borrowed(&self.answer);
            drafts.iter().for_each(|&id| *counts.to_mut().entry(id).or_default() += 1);
            for (&id, &n) in counts.iter() {
                row[id as usize] -= s.frequency_penalty * n as f32 + s.presence_penalty;
            }
        }
    }

    /// Whether `id` ends the answer as its `generated`-th token (from 0).
    pub(crate) fn ends(&self, id: u32, generated: usize) -> bool {
        self.ends.contains(&id) && (self.grammar.is_some() || generated >= self.sampling.min_tokens)
    }

    /// Takes a token as part of the answer; returns whether the grammar allows no other after it.
    pub(crate) fn accept(&mut self, id: u32) -> Result<bool> {
        let s = &self.sampling;
        if s.repetition_penalty != 1.0 || s.frequency_penalty != 0.0 || s.presence_penalty != 0.0 {
            *self.answer.entry(id).or_default() += 1;
        }
        let most = s.bad_tokens.iter().map(Vec::len).max().unwrap_or(0).saturating_sub(1);
        if most > 0 {
            self.last.push(id);
            self.last.drain(..self.last.len().saturating_sub(most));
        }
        match &mut self.grammar {
            None => Ok(false),
            Some(grammar) => {
                grammar.consume_token(id).map_err(broken)?;
                Ok(grammar.is_stopped())
            }
        }
    }

    /// Of guessed tokens, those from the start that may follow.
    pub(crate) fn valid_drafts(&mut self, drafts: &mut Vec<u32>) {
        let ends = drafts.iter().position(|id| self.ends.contains(id)).unwrap_or(drafts.len());
        drafts.truncate(ends);
        if let Some(grammar) = &mut self.grammar {
            drafts.truncate(grammar.validate_tokens(drafts).unwrap_or(0));
        }
    }
}

fn broken(error: impl std::fmt::Display) -> Error {
    Error::Request { field: "grammar", why: format!("cannot be followed: {error}") }
}

/// A seed that no other request has.
pub(crate) fn fresh_seed() -> u64 {
    RandomState::new().build_hasher().finish()
}

/// The rows of a step, drawn together.
#[derive(Debug)]
pub(crate) struct Sampler {
    temperature: Vec<f32>,
    top_k: Vec<u32>,
    top_p: Vec<f32>,
    min_p: Vec<f32>,
    rng: Vec<RngState>,
    /// The row of logits that each is drawn from.
    rows: Vec<i32>,
    /// Token of each row.
    pub out: Vec<i32>,
    /// Whether the row was a distribution.
    valid: Vec<Bool>,
    /// Logits as the model gave them, of rows whose request asks for log probabilities, and which row each is.
    raw: Vec<f32>,
    raw_rows: Vec<usize>,
}

impl Sampler {
    pub(crate) fn new(rows: usize, vocab: usize) -> Self {
        Self {
            temperature: Vec::with_capacity(rows),
            top_k: Vec::with_capacity(rows),
            top_p: Vec::with_capacity(rows),
            min_p: Vec::with_capacity(rows),
            rng: Vec::with_capacity(rows),
            rows: Vec::with_capacity(rows),
            out: Vec::with_capacity(rows),
            valid: Vec::with_capacity(rows),
            raw: Vec::with_capacity(rows * vocab),
            raw_rows: Vec::with_capacity(rows),
        }
    }

    pub(crate) fn clear(&mut self) {
        self.temperature.clear();
        self.top_k.clear();
        self.top_p.clear();
        self.min_p.clear();
        self.rng.clear();
        self.rows.clear();
        self.raw.clear();
        self.raw_rows.clear();
    }

    /// Adds rows of one sequence, as the model gave them, from `row` on: after the first `from` of `drafts`, after one more,
    /// and so on.
    #[expect(clippy::too_many_arguments, reason = "rows, where they stand, and what they follow")]
    pub(crate) fn push(
        &mut self,
        chooser: &mut Chooser,
        rows: &mut [f32],
        row: usize,
        vocab: usize,
        drafts: &[u32],
        from: usize,
        generated: usize,
    ) -> Result<()> {
        let s = &chooser.sampling;
        for (n, logits) in rows.chunks_exact(vocab).enumerate() {
            let i = from + n;
            self.rows.push((row + n) as i32);
            if s.logprobs.is_some() {
                self.raw.extend_from_slice(logits);
                self.raw_rows.push(self.rng.len());
            }
            self.temperature.push(s.temperature);
            self.top_k.push(if s.top_k == 0 { u32::MAX } else { s.top_k });
            self.top_p.push(s.top_p);
            self.min_p.push(s.min_p);
            self.rng.push(RngState { seed: chooser.seed, offset: (generated + i) as u64 });
        }
        chooser.prepare(rows, vocab, drafts, from, generated)
    }

    /// Draws a token for each row pushed since `clear`.
    pub(crate) fn draw(&mut self, exec: &Exec, logits: &[f32], vocab: usize) -> Result<()> {
        let rows = self.rng.len();
        self.out.clear();
        self.out.resize(rows, 0);
        self.valid.clear();
        self.valid.resize(rows, Bool(0));
        if rows == 0 {
            return Ok(());
        }
        let filters = Filters {
            temperature: PerRow::Each(&self.temperature),
            top_k: PerRow::Each(&self.top_k),
            top_p: PerRow::Each(&self.top_p),
            min_p: PerRow::Each(&self.min_p),
            ..Filters::default()
        };
        // All rows, unless some are of prompts.
        let some = logits.len() != rows * vocab;
        let indices = some.then(|| TensorRef::new(&self.rows, &[rows])).transpose()?;
        let draw = Draw {
            rng: PerRow::Each(&self.rng),
            indices,
            out: TensorMut::new(&mut self.out, &[rows])?,
            valid: Some(TensorMut::new(&mut self.valid, &[rows])?),
        };
        fir::sampling::sample(exec, TensorRef::new(logits, &[logits.len() / vocab, vocab])?, filters, draw)?;
        Ok(())
    }

    /// Whether a row was a distribution.
    pub(crate) fn valid(&self, row: usize) -> bool {
        self.valid[row].0 != 0
    }

    /// Log probabilities of a row's token and the `top` likeliest, if its request asked for them.
    pub(crate) fn logprobs(&self, row: usize, top: Option<usize>) -> Option<TokenLogprobs> {
        let (at, top) = (self.raw_rows.binary_search(&row).ok()?, top?);
        let vocab = self.raw.len() / self.raw_rows.len();
        Some(logprobs_of(&self.raw[at * vocab..(at + 1) * vocab], self.out[row] as u32, top))
    }
}

/// Log probabilities of a token and the `top` likeliest by a row of logits.
pub(crate) fn logprobs_of(logits: &[f32], chosen: u32, top: usize) -> TokenLogprobs {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&l| f64::from((l - max).exp())).sum();
    let total = f64::from(max) + sum.ln();
    let of = |id: usize| Logprob { id: id as u32, logprob: (f64::from(logits[id]) - total) as f32 };
    let mut order: Vec<usize> = Vec::with_capacity(top + 1);
    for id in 0..logits.len() {
        if top > 0 && (order.len() < top || logits[id] > logits[order[top - 1]]) {
            let at = order.partition_point(|&o| logits[o] >= logits[id]);
            order.insert(at, id);
            order.truncate(top);
        }
    }
    TokenLogprobs { chosen: of(chosen as usize), top: order.into_iter().map(of).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;

    const VOCAB: usize = 300;

    fn logits(seed: u64) -> Vec<f32> {
        (0..VOCAB).map(|i| RngState { seed, offset: i as u64 }.uniform(0, 0) * 8.0 - 2.0).collect()
    }

    fn draw(choosers: &mut [Chooser], mut rows: Vec<f32>, generated: usize) -> (Vec<i32>, Vec<Option<TokenLogprobs>>) {
        let exec = Exec::cpu().unwrap();
        let mut sampler = Sampler::new(choosers.len(), VOCAB);
        for (i, (chooser, row)) in choosers.iter_mut().zip(rows.chunks_exact_mut(VOCAB)).enumerate() {
            sampler.push(chooser, row, i, VOCAB, &[], 0, generated).unwrap();
        }
        sampler.draw(&exec, &rows, VOCAB).unwrap();
        assert!((0..choosers.len()).all(|row| sampler.valid(row)));
        let probs = choosers.iter().enumerate().map(|(i, c)| sampler.logprobs(i, c.sampling.logprobs)).collect();
        (sampler.out, probs)
    }

    fn varied(i: u64) -> Sampling {
        Sampling {
            temperature: [0.0, 0.7, 1.3][i as usize % 3],
            top_k: [0, 5, 40][i as usize / 3 % 3],
            top_p: [1.0, 0.8][i as usize / 9 % 2],
            min_p: [0.0, 0.1][i as usize / 18 % 2],
            repetition_penalty: [1.0, 1.2][i as usize % 2],
            frequency_penalty: [0.0, 0.5][i as usize / 2 % 2],
            logit_bias: vec![(i as u32, 1.5)],
            logprobs: i.is_multiple_of(4).then_some(3),
            ..Sampling::default()
        }
    }

    #[test]
    fn a_row_is_drawn_alike_alone_and_among_64() {
        let chooser = |i: u64| {
            let mut c = Chooser::new(&varied(i), 0, &[1, 2, 3], &[0], i * 77, None);
            [5, 5, 9].into_iter().for_each(|id| assert!(!c.accept(id).unwrap()));
            c
        };
        let mut all: Vec<Chooser> = (0..64).map(chooser).collect();
        let (together, _) = draw(&mut all, (0..64).flat_map(logits).collect(), 3);
        for i in 0..64u64 {
            assert_eq!(draw(&mut [chooser(i)], logits(i), 3).0[0], together[i as usize], "row {i}");
        }
        assert!(together.windows(2).any(|w| w[0] != w[1]));
    }

    #[test]
    fn logprobs_are_of_the_model_and_in_order() {
        let sampling =
            Sampling { logprobs: Some(4), logit_bias: vec![(7, 100.0)], temperature: 0.0, ..Sampling::default() };
        let (out, probs) = draw(&mut [Chooser::new(&sampling, 0, &[], &[0], 1, None)], logits(1), 0);
        assert_eq!(out, [7]);
        let probs = probs[0].clone().unwrap();
        let raw = logits(1);
        let total = raw.iter().map(|&l| f64::from(l).exp()).sum::<f64>().ln();
        assert!((f64::from(probs.chosen.logprob) - (f64::from(raw[7]) - total)).abs() < 1e-5);
        assert_eq!(probs.chosen.id, 7);
        let mut sorted: Vec<usize> = (0..VOCAB).collect();
        sorted.sort_by(|&a, &b| raw[b].total_cmp(&raw[a]));
        assert_eq!(probs.top.iter().map(|p| p.id as usize).collect::<Vec<_>>(), sorted[..4]);
    }

    #[test]
    fn penalties_bias_allowed_and_ends_do_what_they_say() {
        let base = Sampling { temperature: 0.0, ..Sampling::default() };
        let one = |s: Sampling, after: &[u32], generated: usize| {
            let mut c = Chooser::new(&s, 0, &[299], &[298], 0, None);
            after.iter().for_each(|&id| assert!(!c.accept(id).unwrap()));
            let mut row = vec![0.0; VOCAB];
            (row[299], row[298], row[10], row[11]) = (4.0, 3.0, 2.0, 1.0);
            draw(&mut [c], row, generated).0[0]
        };
        assert_eq!(one(base.clone(), &[], 0), 299);
        assert_eq!(one(Sampling { repetition_penalty: 2.0, ..base.clone() }, &[], 0), 298, "the prompt counts");
        assert_eq!(one(Sampling { presence_penalty: 2.5, ..base.clone() }, &[299], 0), 298);
        assert_eq!(one(Sampling { frequency_penalty: 1.1, ..base.clone() }, &[299, 299, 298], 0), 10);
        let never = |bad: &[&[u32]]| Sampling { bad_tokens: bad.iter().map(|b| b.to_vec()).collect(), ..base.clone() };
        assert_eq!(one(never(&[&[299], &[7, 8, 298], &[8, 10]]), &[7, 8], 0), 11, "those that would be whole");
        assert_eq!(one(never(&[&[299], &[7, 8, 298]]), &[8, 7], 0), 298);
        assert_eq!(one(Sampling { allowed_tokens: Some(vec![10, 11]), ..base.clone() }, &[], 0), 10);
        let min = Sampling { min_tokens: 3, logit_bias: vec![(299, -5.0)], ..base };
        assert_eq!(one(min.clone(), &[], 2), 10, "no end before the third token is there");
        assert_eq!(one(min, &[], 3), 298);
    }

    /// Of which some come with the drafts below, some before and with them.
    fn bad() -> Vec<Vec<u32>> {
        (0..VOCAB as u32)
            .flat_map(|id| [vec![9, id], vec![9, 4, id], vec![9, 9, 4, id]])
            .filter(|b| b[b.len() - 1] % 3 == 0)
            .collect()
    }

    #[test]
    fn rows_after_drafts_are_what_they_will_be_without() {
        let sampling = Sampling {
            seed: Some(3),
            repetition_penalty: 1.3,
            frequency_penalty: 0.4,
            bad_tokens: bad(),
            ..Sampling::default()
        };
        let new = || Chooser::new(&sampling, 0, &[1, 2], &[0], 3, None);
        let exec = Exec::cpu().unwrap();
        let drafts = [9, 9, 4];
        let mut rows: Vec<f32> = (0..4).flat_map(logits).collect();
        let mut sampler = Sampler::new(4, VOCAB);
        // In two parts, as branches come.
        let (first, rest) = rows.split_at_mut(2 * VOCAB);
        sampler.push(&mut new(), first, 0, VOCAB, &drafts, 0, 5).unwrap();
        sampler.push(&mut new(), rest, 2, VOCAB, &drafts, 2, 5).unwrap();
        sampler.draw(&exec, &rows, VOCAB).unwrap();
        let mut chooser = new();
        for (i, &want) in sampler.out.iter().enumerate() {
            let mut alone = [chooser];
            assert_eq!(draw(&mut alone, logits(i as u64), 5 + i).0[0], want, "row {i}");
            [chooser] = alone;
            drafts.get(i).map(|&id| chooser.accept(id).unwrap());
        }
    }
}
