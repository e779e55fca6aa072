//! What a step is made of: how far each prompt goes, who reads a prefix together, and the batch that the model gets.

use super::cost::Load;
use super::{CHUNK, STREAM, Scheduler, Seq, SeqId, Step, Work, scored_rows};
use crate::request::Attention;
use crate::runner::{self, Batch, Rule, Shared};

/// Lists of a step, kept from one to the next.
#[derive(Debug, Default)]
pub(crate) struct Lists {
    tokens: Vec<u32>,
    logits: Vec<u32>,
    shared: Vec<Shared>,
    starts: Vec<usize>,
}

/// A step as the model takes it.
#[derive(Debug, Default)]
pub(crate) struct Built<'a> {
    lists: Lists,
    seqs: Vec<runner::Seq<'a>>,
}

impl Built<'_> {
    pub(crate) fn batch(&self) -> Batch<'_> {
        let Lists { tokens, logits, shared, .. } = &self.lists;
        Batch { tokens, seqs: &self.seqs, logits, shared }
    }

    pub(crate) fn into_lists(self) -> Lists {
        self.lists
    }
}

impl Scheduler {
    /// Deals the step's tokens out to prompts: half to the first in order, the rest to the shortest; so a long prompt
    /// slows short ones down by no more than half, and they it.
    pub(super) fn split(&self, most: usize, works: &mut Vec<Work>, load: &mut Load) {
        let mut prompts: Vec<SeqId> = self.prefilling().collect();
        prompts.sort_unstable_by_key(|&id| self.seq(id).place);
        let Some((&first, others)) = prompts.split_first() else { return };
        let mut others = others.to_vec();
        others.sort_by_key(|&id| self.seq(id).pending());
        let wanted: usize = others.iter().map(|&id| self.seq(id).pending()).sum();
        let mut left = most;
        let mut share = vec![(first, self.seq(first).pending().min(most - wanted.min(most / 2)))];
        left -= share[0].1;
        for &id in &others {
            let take = self.seq(id).pending().min(left);
            left -= take;
            share.push((id, take));
        }
        share[0].1 += left.min(self.seq(first).pending() - share[0].1);
        let alone = works.is_empty();
        let mut scored_left = scored_rows(self.limits.page_size);
        for (id, take) in share {
            let seq = self.seq(id);
            let scores = seq.scored < seq.prompt;
            let take = if scores { take.min(scored_left + seq.scored.saturating_sub(seq.computed)) } else { take };
            let mut new = take;
            if let Attention::Streaming { sinks, window } = seq.attention {
                // To the end of a block, and further only while nothing is dropped on the way; tokens of an answer that are
                // computed again, one by one.
                let further = (sinks + window).saturating_sub(seq.held() + STREAM).min(take.saturating_sub(STREAM));
                let end = ((seq.computed / STREAM + 1 + further / STREAM) * STREAM).min(seq.prompt);
                let want = if seq.computed < seq.prompt { end - seq.computed } else { 1 };
                new = want.min(self.limits.max_tokens - load.tokens);
            } else if new < seq.pending() {
                new = self.cut(seq, take);
                if new == 0 && alone && works.is_empty() {
                    new = take;
                }
            }
            if new > 0 {
                let rows = usize::from(new == seq.pending());
                // Up to the last but one: the row of the last gives the answer's first token.
                let end = (seq.computed + new).min(seq.prompt - 1);
                let scored = if scores { end.saturating_sub(seq.computed.max(seq.scored)) } else { 0 };
                scored_left -= scored;
                *load = load.plus(Load::of(seq.held(), new, rows + scored));
                works.push(Work { id, new, rows, branch_rows: 0, scored });
            }
        }
    }

    /// Orders a step's parts so that those that share a prefix stand together; what streams stands last.
    pub(super) fn group(&mut self, works: &[Work], load: Load) -> Step {
        let mut step = std::mem::take(&mut self.spare);
        (step.load, step.read_flat) = (load, works.iter().map(|w| self.seq(w.id).held() + w.new).sum());
        step.works.clear();
        let mut groups = std::mem::take(&mut self.groups);
        let count = if self.limits.cascade && works.len() > 1 { works.len() } else { 0 };
        // Prompts take another road than answers, by many rows at once, with or without a shared prefix.
        groups.find(count, self.limits.page_size, |i| {
            let seq = self.seq(works[i].id);
            let grouped = seq.attention.shares() && seq.computed >= seq.prompt;
            if grouped { &seq.pages[..seq.computed / self.limits.page_size] } else { &[] }
        });
        for g in &mut groups.chosen {
            let members = &groups.order[g.first..g.first + g.count];
            g.first = step.works.len();
            step.works.extend(members.iter().map(|&i| works[i]));
        }
        let streams = |w: &Work| matches!(self.seq(w.id).attention, Attention::Streaming { .. });
        for last in [false, true] {
            let rest =
                works.iter().enumerate().filter(|(i, w)| groups.grouped.get(*i) != Some(&true) && streams(w) == last);
            step.works.extend(rest.map(|(_, w)| *w));
        }
        step.read = step.read_flat - groups.chosen.iter().map(|g| (g.count - 1) * g.len).sum::<usize>();
        step.shared.clear();
        step.shared.extend_from_slice(&groups.chosen);
        self.groups = groups;
        step
    }

    /// How many of `most` tokens a prompt goes on by, if that is not all of it: to the end of a page, so that its nodes are
    /// the tree's a step earlier, and so that neither this chunk nor what is left is shorter than [`CHUNK`].
    fn cut(&self, seq: &Seq, most: usize) -> usize {
        let whole_pages = |n: usize| n / self.limits.page_size * self.limits.page_size;
        let mut end = whole_pages(seq.computed + most);
        if end < seq.prompt {
            end = whole_pages(end.min(seq.prompt.saturating_sub(CHUNK)));
        }
        let new = end.saturating_sub(seq.computed);
        if new < CHUNK && seq.computed < seq.prompt { 0 } else { new }
    }

    /// The batch of a step. Tokens of a prompt are one sequence of it; those of an answer are one each, as they are when
    /// they are drawn one by one: guesses and what is computed again then have the very bits of the first time. (A
    /// layer stores the KV of all its tokens before it attends, so that each sees those before.)
    pub(crate) fn batch<'a>(&'a self, step: &Step, lists: Lists) -> Built<'a> {
        // A sequence for each prompt, and for each token of an answer, which has a row of logits.
        let mut built = Built { lists, seqs: Vec::with_capacity(step.load.rows + step.works.len()) };
        let Lists { tokens, logits, shared, starts } = &mut built.lists;
        tokens.clear();
        logits.clear();
        shared.clear();
        starts.clear();
        for work in &step.works {
            starts.push(built.seqs.len());
            let seq = self.seq(work.id);
            let (past, end, dropped) = (seq.computed, seq.computed + work.new, seq.dropped);
            tokens.extend(seq.tokens[past..].iter().chain(&seq.drafts).take(work.new));
            logits.extend((tokens.len() - work.rows - work.scored..tokens.len()).map(|row| row as u32));
            let prompt = end.min(seq.prompt);
            let rule = match seq.attention {
                Attention::Streaming { .. } => Rule::Streaming,
                Attention::Full | Attention::Sparse(_) => Rule::Model,
            };
            if prompt > past {
                let rule = if let Attention::Sparse(sparse) = seq.attention { Rule::Sparse(sparse) } else { rule };
                built.seqs.push(runner::Seq { new: prompt - past, past: past - dropped, pages: &seq.pages, rule });
            }
            let one = |past: usize, pages: &'a [u32]| runner::Seq { new: 1, past: past - dropped, pages, rule };
            built.seqs.extend((past.max(prompt)..end).map(|past| one(past, &seq.pages)));
            if work.branch_rows > 0 {
                // The last token once more: the branch's pages need its KV too.
                let branch = &seq.branch;
                tokens.push(seq.tokens[past]);
                let from = tokens.len() as u32;
                tokens.extend(&branch.tokens);
                logits.extend(from..tokens.len() as u32);
                built.seqs.extend((past..=past + branch.tokens.len()).map(|past| one(past, &branch.all)));
            }
        }
        starts.push(built.seqs.len());
        shared.extend(step.shared.iter().map(|g| Shared {
            first: starts[g.first],
            count: starts[g.first + g.count] - starts[g.first],
            len: g.len,
        }));
        built
    }
}
