//! A smaller model that guesses: it follows every running sequence in pages of its own, and says what it would.

use std::collections::HashMap;
use std::time::Instant;

use crate::backend::Backend;
use crate::error::Result;
use crate::kv::pool::Pool;
use crate::kv::radix::common;
use crate::runner::{Batch, Seq};
use crate::sched::SeqId;

/// What is guessed for.
pub(crate) struct Want<'a> {
    pub id: SeqId,
    pub tokens: &'a [u32],
    /// So many tokens.
    pub most: usize,
}

/// A sequence as the small model has it.
#[derive(Debug, Default)]
struct Known {
    /// Tokens with KV in its pages.
    tokens: Vec<u32>,
    pages: Vec<u32>,
}

pub(crate) struct Drafter {
    backend: Backend,
    pool: Pool,
    page_size: usize,
    /// Tokens and sequences of a step.
    max_tokens: usize,
    known: HashMap<SeqId, Known>,
    /// What a guess took, in milliseconds, of late.
    pub ms_per_guess: f64,
}

impl Drafter {
    pub(crate) fn new(backend: Backend, pages: usize, page_size: usize, max_tokens: usize) -> Self {
        let pool = Pool::new(u32::try_from(pages).unwrap_or(u32::MAX));
        Self { backend, pool, page_size, max_tokens, known: HashMap::new(), ms_per_guess: 0.0 }
    }

    /// Guesses, in the order of `wants`, each with what would be the second choice for the first token; none for sequences
    /// that it has not caught up with, or has no pages for.
    pub(crate) fn guess(&mut self, wants: &[Want<'_>]) -> Result<Vec<(Vec<u32>, Option<u32>)>> {
        let start = Instant::now();
        let mut guesses = vec![Vec::new(); wants.len()];
        let mut seconds = vec![None; wants.len()];
        let mut left = self.max_tokens;
        // What each is to compute next: at first what it has missed, then its own last guess.
        let mut next: Vec<Vec<u32>> = Vec::with_capacity(wants.len());
        for want in wants {
            let known = self.known.entry(want.id).or_default();
            let same = common(&known.tokens, &want.tokens[..want.tokens.len() - 1]);
            known.tokens.truncate(same);
            let missed = &want.tokens[same..];
            let take = if want.most == 0 { 0 } else { missed.len().min(left) };
            left -= take;
            next.push(missed[..take].to_vec());
        }
        let deepest = wants.iter().map(|w| w.most).max().unwrap_or(0);
        for _ in 0..deepest {
            let running: Vec<usize> = (0..wants.len())
                .filter(|&i| !next[i].is_empty() && guesses[i].len() < wants[i].most)
                .filter(|&i| self.make_room(wants[i].id, next[i].len()))
                .collect();
            if running.is_empty() {
                break;
            }
            let (mut tokens, mut seqs, mut rows) = (Vec::new(), Vec::new(), Vec::new());
            for &i in &running {
                let known = &self.known[&wants[i].id];
                tokens.extend_from_slice(&next[i]);
                rows.push(tokens.len() as u32 - 1);
                seqs.push(Seq { new: next[i].len(), past: known.tokens.len(), pages: &known.pages, ..Seq::default() });
            }
            let vocab = self.backend.vocab();
            let batch = Batch { tokens: &tokens, seqs: &seqs, logits: &rows, shared: &[] };
            let logits = self.backend.step(&batch)?;
            for (&i, row) in running.iter().zip(logits.chunks_exact(vocab)) {
                let likeliest = best_of(row, usize::MAX);
                let Some(known) = self.known.get_mut(&wants[i].id) else { continue };
                known.tokens.append(&mut next[i]);
                // All of the sequence and its guesses are computed: what comes next is a guess.
                if known.tokens.len() == wants[i].tokens.len() + guesses[i].len() {
                    if guesses[i].is_empty() && vocab > 1 {
                        seconds[i] = Some(best_of(row, likeliest) as u32);
                    }
                    guesses[i].push(likeliest as u32);
                    next[i].push(likeliest as u32);
                }
            }
        }
        let guessed: usize = guesses.iter().map(Vec::len).sum();
        if guessed > 0 {
            let each = start.elapsed().as_secs_f64() * 1e3 / guessed as f64;
            self.ms_per_guess += 0.1 * (each - self.ms_per_guess);
        }
        Ok(guesses.into_iter().zip(seconds).collect())
    }

    /// A sequence has ended.
    pub(crate) fn forget(&mut self, id: SeqId) {
        let pages = self.known.remove(&id).unwrap_or_default().pages;
        pages.into_iter().for_each(|page| self.pool.free(page));
    }

    fn make_room(&mut self, id: SeqId, new: usize) -> bool {
        let Some(known) = self.known.get_mut(&id) else { return false };
        while known.pages.len() * self.page_size < known.tokens.len() + new {
            match self.pool.alloc() {
                Some(page) => known.pages.push(page),
                None => return false,
            }
        }
        true
    }
}

/// The likeliest token but `not`.
fn best_of(row: &[f32], not: usize) -> usize {
    let start = usize::from(not == 0);
    (0..row.len()).filter(|&id| id != not).fold(start, |best, id| if row[id] > row[best] { id } else { best })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::Toy;

    /// Guesses without second choices.
    fn guess(drafter: &mut Drafter, wants: &[Want<'_>]) -> Vec<Vec<u32>> {
        drafter.guess(wants).unwrap().into_iter().map(|(guess, _)| guess).collect()
    }

    /// What the toy says after `tokens`, the likeliest each time.
    fn alone(tokens: &[u32], n: usize) -> Vec<u32> {
        let mut all = tokens.to_vec();
        let mut drafter = Drafter::new(Backend::Toy(Toy::new(64, 4, 30)), 64, 4, 512);
        for _ in 0..n {
            let got = guess(&mut drafter, &[Want { id: 0, tokens: &all, most: 1 }]);
            all.extend(&got[0]);
        }
        all.split_off(tokens.len())
    }

    #[test]
    fn follows_sequences_through_right_and_wrong_guesses() {
        let mut drafter = Drafter::new(Backend::Toy(Toy::new(64, 4, 30)), 64, 4, 512);
        let (mut a, b) = ((0..11).collect::<Vec<u32>>(), (5..30).collect::<Vec<u32>>());
        let got = guess(&mut drafter, &[Want { id: 7, tokens: &a, most: 3 }, Want { id: 9, tokens: &b, most: 2 }]);
        assert_eq!(got, [alone(&a, 3), alone(&b, 2)]);
        // The first was right, then another token came.
        a.extend([got[0][0], (got[0][1] + 1) % 30]);
        let got = guess(&mut drafter, &[Want { id: 7, tokens: &a, most: 4 }]);
        assert_eq!(got, [alone(&a, 4)]);
        [7, 9].into_iter().for_each(|id| drafter.forget(id));
        assert_eq!(drafter.pool.available(), 64);
    }

    #[test]
    fn catches_up_over_several_steps_and_does_without_pages() {
        let mut drafter = Drafter::new(Backend::Toy(Toy::new(8, 4, 30)), 8, 4, 10);
        let long: Vec<u32> = (0..25).collect();
        let want = || [Want { id: 1, tokens: &long, most: 1 }];
        assert!((0..2).all(|_| guess(&mut drafter, &want())[0].is_empty()));
        assert_eq!(guess(&mut drafter, &want())[0], alone(&long, 1));
        let other: Vec<u32> = (0..20).collect();
        for _ in 0..3 {
            assert!(guess(&mut drafter, &[Want { id: 2, tokens: &other, most: 1 }])[0].is_empty(), "no pages");
        }
        drafter.forget(1);
        for _ in 0..2 {
            guess(&mut drafter, &[Want { id: 2, tokens: &other, most: 1 }]);
        }
        assert_eq!(guess(&mut drafter, &[Want { id: 2, tokens: &other, most: 1 }])[0], alone(&other, 1));
    }
}
