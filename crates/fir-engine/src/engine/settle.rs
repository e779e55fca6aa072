//! What becomes of a step's tokens: sequences take them or end, and callers are told.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use super::{Engine, Sink};
use crate::handle::RequestId;
use crate::request::{Event, Finish, Usage};
use crate::sched::{self, SeqId, Step};
use crate::tokenizer::Detokenizer;

impl Engine {
    /// Gives each sequence its tokens.
    pub(super) fn settle(&mut self, step: &Step, bad: &[(SeqId, String)]) {
        let mut row = 0;
        for work in &step.works {
            let first = row;
            row += work.rows;
            let behind = row;
            // Of a sequence that is gone, too: rows are counted by the batch.
            row += work.branch_rows;
            // Its caller may have gone while another of its continuations was told.
            if !self.choices.contains_key(&work.id) {
                continue;
            }
            if let Some((_, why)) = bad.iter().find(|(id, _)| *id == work.id) {
                self.fail(work.id, why);
                continue;
            }
            if work.scored > 0 {
                self.sched.seq_mut(work.id).scored += work.scored;
            }
            if work.rows == 0 {
                self.sched.advance(work.id, work.new, &[]);
                continue;
            }
            let seq = self.sched.seq_mut(work.id);
            seq.scored = seq.prompt;
            if let Some(choice) = self.choices.get_mut(&work.id)
                && let Some((_, scores)) = choice.scores.take()
            {
                let request = choice.request;
                if !self.tell(request, Event::Prompt(scores)) {
                    continue;
                }
            }
            let seq = self.sched.seq_mut(work.id);
            let (drafts, other) = (std::mem::take(&mut seq.drafts), std::mem::take(&mut seq.branch.tokens));
            let guessed = drafts.len() + work.branch_rows;
            let drawn = |row: usize| self.sampler.out[row] as u32;
            // The chain that begins with what was drawn; rows after its first token stand in another place.
            let aside = work.branch_rows > 0 && other[0] == drawn(first);
            let (chain, rows) = if aside { (&other, behind - 1) } else { (&drafts, first) };
            let row_of = |i: usize| if i == 0 { first } else { rows + i };
            let right = chain.iter().enumerate().take_while(|&(i, &d)| d == drawn(row_of(i))).count();
            if let Some(choice) = self.choices.get_mut(&work.id)
                && guessed > 0
            {
                choice.guesser.learn(drafts.len(), if aside { 0 } else { right });
                self.stats.drafted_tokens += guessed as u64;
                self.stats.accepted_tokens += right as u64;
                self.stats.branches_taken += u64::from(aside);
            }
            if aside {
                self.sched.take_branch(work.id);
            } else {
                self.sched.cut_branch(work.id);
            }
            self.sched.advance(work.id, work.new - drafts.len(), &[]);
            for i in 0..=right {
                // The token before it was guessed right, so that its KV is there.
                if i > 0 {
                    self.sched.advance(work.id, 1, &[]);
                }
                let row = row_of(i);
                if !self.take(work.id, self.sampler.out[row] as u32, row) {
                    break;
                }
            }
        }
    }

    /// Takes a token that was drawn in `row`; false if the sequence has ended.
    fn take(&mut self, seq: SeqId, id: u32, row: usize) -> bool {
        if !self.sampler.valid(row) {
            self.fail(seq, "the model gave no distribution (a NaN, or nothing that may be chosen)");
            return false;
        }
        self.sched.advance(seq, 0, &[id]);
        let (len, max_len) = (self.sched.seq(seq).tokens.len(), self.sched.seq(seq).max_len);
        let generated = len - self.sched.seq(seq).prompt;
        let Some(choice) = self.choices.get_mut(&seq) else { return false };
        let now = Instant::now();
        if let Some(request) = self.requests.get(&choice.request) {
            match choice.last_token.replace(now) {
                Some(last) => self.stats.between_tokens.observe((now - last).as_secs_f64()),
                None => {
                    choice.first_token = Some(now);
                    self.stats.first_token.observe((now - request.submitted).as_secs_f64());
                    let began = request.began.unwrap_or(request.submitted);
                    self.stats.prefill.observe((now - began).as_secs_f64());
                }
            }
        }
        self.stats.generated_tokens += 1;
        if choice.chooser.ends(id, generated - 1) {
            self.end(seq, Finish::Stop);
            return false;
        }
        let complete = match choice.chooser.accept(id) {
            Ok(complete) => complete,
            Err(error) => {
                self.fail(seq, &error.to_string());
                return false;
            }
        };
        let text = self.backend.text(&mut choice.text, id);
        let (text, stopped) = if generated < choice.min_tokens { (text, None) } else { choice.stop.push(text) };
        let logprobs = self.sampler.logprobs(row, choice.logprobs);
        let event = Event::Token { choice: choice.index, id, text, logprobs };
        let request = choice.request;
        if !self.tell(request, event) {
            return false;
        }
        if stopped.is_some()
            && let Some(choice) = self.choices.get_mut(&seq)
        {
            // Nothing after a stop text is part of the answer, half a character neither.
            choice.text = Detokenizer::default();
            choice.stopped = stopped;
        }
        if stopped.is_some() || complete {
            self.end(seq, Finish::Stop);
            return false;
        }
        if len >= max_len {
            self.end(seq, Finish::Length);
            return false;
        }
        true
    }

    /// Tells a request's caller; false, and the request is gone, if nobody listens.
    fn tell(&mut self, id: RequestId, event: Event) -> bool {
        let Some(request) = self.requests.get_mut(&id) else { return false };
        if tell(&mut request.sink, event) {
            return true;
        }
        // Nothing more is told, so that nothing is told twice.
        request.sink = Box::new(|_| true);
        let seqs = request.seqs.clone();
        seqs.into_iter().for_each(|seq| self.end(seq, Finish::Aborted));
        false
    }

    /// Ends a continuation.
    pub(super) fn end(&mut self, id: SeqId, reason: Finish) {
        let Some(mut choice) = self.choices.remove(&id) else { return };
        let seq = self.remove(id);
        let usage = Usage { prompt: seq.prompt, cached: seq.cached, generated: seq.tokens.len() - seq.prompt };
        let text = choice.stop.finish() + &choice.text.finish();
        if let (Some(first), Some(last)) = (choice.first_token, choice.last_token) {
            let decode = (last - first).as_secs_f64();
            self.stats.decode.observe(decode);
            if usage.generated > 1 {
                self.stats.per_token.observe(decode / (usage.generated - 1) as f64);
            }
        }
        *match reason {
            Finish::Stop => &mut self.stats.finished_stop,
            Finish::Length => &mut self.stats.finished_length,
            Finish::Aborted => &mut self.stats.aborted,
            Finish::Deadline => &mut self.stats.expired,
        } += 1;
        let event = Event::Finished { choice: choice.index, text, reason, stop: choice.stopped, usage };
        self.leave(choice.request, id, event);
    }

    /// Ends a request with an error: its other continuations go too.
    pub(super) fn fail(&mut self, id: SeqId, why: &str) {
        let Some(choice) = self.choices.remove(&id) else { return };
        self.remove(id);
        self.stats.failed += 1;
        let Some(mut request) = self.requests.remove(&choice.request) else { return };
        if request.queued > 0 {
            self.link.admitted(request.queued);
        }
        for other in request.seqs.into_iter().filter(|&s| s != id) {
            if self.choices.remove(&other).is_some() {
                self.remove(other);
                self.stats.failed += 1;
            }
        }
        tell(&mut request.sink, Event::Failed(why.into()));
    }

    fn remove(&mut self, id: SeqId) -> sched::Seq {
        if let Some(drafter) = &mut self.drafter {
            drafter.forget(id);
        }
        self.sched.remove(id)
    }

    fn leave(&mut self, id: RequestId, seq: SeqId, event: Event) {
        let Some(request) = self.requests.get_mut(&id) else { return };
        request.seqs.retain(|&s| s != seq);
        tell(&mut request.sink, event);
        if request.seqs.is_empty()
            && let Some(request) = self.requests.remove(&id)
        {
            if request.queued > 0 {
                self.link.admitted(request.queued);
            }
            self.stats.whole.observe(request.submitted.elapsed().as_secs_f64());
        }
    }
}

/// Calls a sink; one that panics is a caller that has gone.
pub(super) fn tell(sink: &mut Sink, event: Event) -> bool {
    catch_unwind(AssertUnwindSafe(|| sink(event))).unwrap_or(false)
}
