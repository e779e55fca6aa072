//! The engine: one thread that schedules, runs and settles steps, and the handle that others hold.

#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};
use std::time::{Duration, Instant};

use fir::Exec;
use llguidance::Matcher;

use crate::backend::Backend;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::handle::{Command, Job, Link, RequestId};
use crate::kv::tier::Tier;
use crate::request::{Event, Finish, Usage};
use crate::runner::{Batch, Seq, Shared};
use crate::sampler::{Chooser, Sampler};
use crate::sched::{self, Scheduler, SeqId, Step, Work};
use crate::spec::Guesser;
use crate::stats::Stats;
use crate::text::StopText;
use crate::tokenizer::Detokenizer;

/// Steps that fail one after the other before the engine gives up.
const MAX_FAILURES: u32 = 3;

/// Where a request's events go. False: nobody listens.
pub(crate) type Sink = Box<dyn FnMut(Event) -> bool + Send>;

/// A request: its continuations and where they are told.
struct Running {
    sink: Sink,
    /// The continuations that have not ended.
    seqs: Vec<SeqId>,
    /// Prompt tokens that are still counted as waiting.
    queued: usize,
    submitted: Instant,
}

/// One continuation.
struct Choice {
    request: RequestId,
    index: usize,
    chooser: Chooser,
    text: Detokenizer,
    stop: StopText,
    guesser: Guesser,
    logprobs: Option<usize>,
    min_tokens: usize,
    last_token: Option<Instant>,
}

/// Serves requests on a thread of its own; [`Engine::start`] gives the handle to it.
pub struct Engine {
    config: Config,
    backend: Backend,
    sched: Scheduler,
    sampler: Sampler,
    host: Exec,
    eos: Vec<u32>,
    link: Arc<Link>,
    requests: HashMap<RequestId, Running>,
    choices: HashMap<SeqId, Choice>,
    stats: Stats,
    failures: u32,
    /// When the engine stops whatever is left.
    drain: Option<Instant>,
}

impl Engine {
    pub(crate) fn new(
        config: Config,
        backend: Backend,
        pages: usize,
        tier: Option<Tier>,
        eos: Vec<u32>,
        host: Exec,
        link: Arc<Link>,
    ) -> Self {
        let limits = sched::Limits {
            page_size: config.page_size,
            max_seqs: config.max_seqs,
            max_tokens: config.max_step_tokens,
            itl_target_ms: config.itl_target_ms,
            prefix_cache: config.prefix_cache,
            cascade: config.cascade,
        };
        Self {
            sched: Scheduler::new(limits, pages, tier, Instant::now()),
            sampler: Sampler::new(config.max_rows()),
            config,
            backend,
            host,
            eos,
            link,
            requests: HashMap::new(),
            choices: HashMap::new(),
            stats: Stats::default(),
            failures: 0,
            drain: None,
        }
    }

    /// Runs every kernel that serving needs, and learns what steps cost: nothing is compiled or touched first later.
    pub(crate) fn warm_up(&mut self) -> Result<()> {
        let page_size = self.config.page_size;
        let most = self.config.max_step_tokens.min(self.sched.capacity());
        let pages: Vec<u32> = (0..most.div_ceil(page_size) as u32).collect();
        for (past, new) in [(0, most), (0, most / 2), (most / 2, most / 4), (most - 1, 1), (most / 2, 1), (0, 1)] {
            let tokens = vec![0; new.max(1)];
            let seqs = [Seq { new: tokens.len(), past, pages: &pages }];
            let rows = [tokens.len() as u32 - 1];
            let start = Instant::now();
            self.backend.step(&Batch { tokens: &tokens, seqs: &seqs, logits: &rows, shared: &[] })?;
            self.sched.cost.learn(sched::cost::Load::of(past, tokens.len(), 1), start.elapsed());
        }
        if self.config.cascade && pages.len() > 1 {
            let seqs = [Seq { new: 1, past: page_size, pages: &pages }; 2];
            let shared = [Shared { first: 0, count: 2, len: page_size }];
            self.backend.step(&Batch { tokens: &[0, 0], seqs: &seqs, logits: &[0, 1], shared: &shared })?;
        }
        Ok(())
    }

    /// Serves until nobody can ask any more, or a drain is over. Returns why it ended, if not in peace.
    pub(crate) fn run(mut self, commands: &Receiver<Command>) -> Option<String> {
        let outcome = catch_unwind(AssertUnwindSafe(|| self.serve(commands)));
        let why = match outcome {
            Ok(Ok(())) => None,
            Ok(Err(error)) => Some(error.to_string()),
            Err(panic) => {
                let text = panic.downcast_ref::<&str>().map(ToString::to_string);
                Some(text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "a panic".into()))
            }
        };
        let reason = why.clone().unwrap_or_else(|| "it was shut down".into());
        self.link.stop(&reason, why.is_some());
        for (_, mut request) in self.requests.drain() {
            tell(&mut request.sink, Event::Failed(format!("the engine has stopped: {reason}")));
        }
        // Those whose command was on its way.
        while let Ok(command) = commands.try_recv() {
            match command {
                Command::Submit(mut job) => {
                    tell(&mut job.sink, Event::Failed(format!("the engine has stopped: {reason}")));
                }
                Command::Embed(_, reply) => {
                    let _ = reply.send(Err(Error::Stopped(reason.clone())));
                }
                Command::Abort(_) | Command::Drain(_) | Command::Wake => {}
            }
        }
        why
    }

    fn serve(&mut self, commands: &Receiver<Command>) -> Result<()> {
        loop {
            loop {
                match commands.try_recv() {
                    Ok(command) => self.obey(command),
                    Err(TryRecvError::Empty) => break,
                    // No handle is left; what was asked for is finished.
                    Err(TryRecvError::Disconnected) => {
                        self.drain.get_or_insert(Instant::now() + Duration::from_secs(3600));
                        break;
                    }
                }
            }
            let now = Instant::now();
            for id in self.sched.expired(now) {
                self.end(id, Finish::Deadline);
            }
            if let Some(deadline) = self.drain {
                if now >= deadline {
                    let left: Vec<SeqId> = self.choices.keys().copied().collect();
                    left.into_iter().for_each(|id| self.end(id, Finish::Aborted));
                }
                if self.choices.is_empty() {
                    self.publish();
                    return Ok(());
                }
            }
            let ran = self.step()?;
            self.publish();
            if !ran {
                // Asleep until something comes; deadlines and drains are looked at now and then.
                match commands.recv_timeout(Duration::from_millis(50)) {
                    Ok(command) => self.obey(command),
                    Err(RecvTimeoutError::Timeout) => {}
                    Err(RecvTimeoutError::Disconnected) if self.choices.is_empty() => return Ok(()),
                    Err(RecvTimeoutError::Disconnected) => std::thread::sleep(Duration::from_millis(1)),
                }
            }
        }
    }

    fn obey(&mut self, command: Command) {
        match command {
            Command::Submit(job) => self.submit(*job),
            Command::Abort(id) => {
                let seqs = self.requests.get(&id).map(|r| r.seqs.clone()).unwrap_or_default();
                seqs.into_iter().for_each(|seq| self.end(seq, Finish::Aborted));
            }
            Command::Embed(tokens, reply) => {
                let _ = reply.send(self.embed(&tokens));
            }
            Command::Drain(deadline) => self.drain = Some(deadline),
            Command::Wake => {}
        }
    }

    fn submit(&mut self, job: Job) {
        let Job { id, request, sink, grammar, seed, submitted } = job;
        let prompt = request.prompt.len();
        let mut running = Running { sink, seqs: Vec::new(), queued: prompt, submitted };
        let max_len = (prompt + request.sampling.max_tokens).min(self.link.context);
        for index in 0..request.n {
            let seq = sched::Seq::new(request.prompt.clone(), max_len, request.salt, request.deadline);
            let seq = match self.sched.add(seq, request.priority, submitted) {
                Ok(seq) => seq,
                Err(error) => {
                    // As `Handle::submit` checked the length, all of its continuations fail, and the first at once.
                    self.link.admitted(prompt);
                    tell(&mut running.sink, Event::Failed(error.to_string()));
                    return;
                }
            };
            let s = &request.sampling;
            let chooser = Chooser::new(s, index, &request.prompt, &self.eos, seed, grammar.as_ref().map(Matcher::clone));
            let choice = Choice {
                request: id,
                index,
                chooser,
                text: Detokenizer::default(),
                stop: StopText::new(s.stop.clone()),
                guesser: Guesser::new(),
                logprobs: s.logprobs,
                min_tokens: s.min_tokens,
                last_token: None,
            };
            self.choices.insert(seq, choice);
            running.seqs.push(seq);
        }
        self.requests.insert(id, running);
    }

    /// Schedules, runs and settles one step; false if there was nothing to run.
    fn step(&mut self) -> Result<bool> {
        self.draft();
        let step = match self.sched.schedule(&mut self.backend) {
            Ok(step) => step,
            Err(error) => return self.failed(&[], &error).map(|()| true),
        };
        if step.works.is_empty() {
            return Ok(false);
        }
        let now = Instant::now();
        for work in &step.works {
            let Some(request) = self.choices.get(&work.id).and_then(|c| self.requests.get_mut(&c.request)) else { continue };
            if request.queued > 0 {
                self.link.admitted(std::mem::take(&mut request.queued));
                self.stats.queue_time.observe((now - request.submitted).as_secs_f64());
            }
        }
        self.link.step_began();
        let ran = self.run_step(&step);
        let took = self.link.step_ended();
        match ran {
            Ok(bad) => {
                self.failures = 0;
                self.sched.cost.learn(step.load, took);
                self.count(&step, took);
                self.settle(&step, &bad);
            }
            Err(error) => self.failed(&step.works, &error)?,
        }
        Ok(true)
    }

    /// A step that failed takes its sequences with it; one after the other, the engine.
    fn failed(&mut self, works: &[Work], error: &Error) -> Result<()> {
        self.failures += 1;
        for work in works {
            self.fail(work.id, &error.to_string());
        }
        if self.failures >= MAX_FAILURES {
            return Err(Error::Stopped(format!("{MAX_FAILURES} steps failed, the last with: {error}")));
        }
        Ok(())
    }

    /// Guesses for sequences that wait for one token, as far as that pays.
    fn draft(&mut self) {
        if self.config.drafts == 0 {
            return;
        }
        let decoding: Vec<SeqId> = self.sched.running().iter().copied().filter(|&id| self.sched.seq(id).decoding()).collect();
        let load = |&id: &SeqId| sched::cost::Load::of(self.sched.kv(id).1, 1, 1);
        let base = decoding.iter().map(load).fold(sched::cost::Load::default(), sched::cost::Load::plus);
        for id in decoding {
            let Some(choice) = self.choices.get_mut(&id) else { continue };
            let seq = self.sched.seq(id);
            let room = (seq.max_len - seq.tokens.len()).saturating_sub(1).min(self.config.drafts);
            let most = choice.guesser.worth(&self.sched.cost, base, seq.tokens.len(), room);
            let mut drafts = choice.guesser.guess(&seq.tokens, most);
            if !drafts.is_empty() {
                choice.chooser.valid_drafts(&mut drafts);
                self.sched.seq_mut(id).drafts = drafts;
            }
        }
    }

    /// Runs a step and draws its tokens; returns the sequences that cannot go on, with the reason.
    fn run_step(&mut self, step: &Step) -> Result<Vec<(SeqId, String)>> {
        let (mut tokens, mut seqs, mut rows) = (Vec::with_capacity(step.load.tokens), Vec::new(), Vec::new());
        for work in &step.works {
            let seq = self.sched.seq(work.id);
            let (pages, past) = self.sched.kv(work.id);
            tokens.extend(seq.tokens[past..].iter().chain(&seq.drafts).take(work.new));
            rows.extend((tokens.len() - work.rows..tokens.len()).map(|row| row as u32));
            seqs.push(Seq { new: work.new, past, pages });
        }
        let vocab = self.backend.vocab();
        let batch = Batch { tokens: &tokens, seqs: &seqs, logits: &rows, shared: &step.shared };
        let logits = self.backend.step(&batch)?;
        self.sampler.clear();
        let (mut at, mut bad) = (0, Vec::new());
        for work in step.works.iter().filter(|w| w.rows > 0) {
            let rows = &mut logits[at * vocab..(at + work.rows) * vocab];
            at += work.rows;
            let seq = self.sched.seq(work.id);
            let Some(choice) = self.choices.get_mut(&work.id) else { continue };
            let generated = seq.tokens.len() - seq.prompt;
            if let Err(error) = self.sampler.push(&mut choice.chooser, rows, vocab, &seq.drafts, generated) {
                bad.push((work.id, error.to_string()));
            }
        }
        self.sampler.draw(&self.host, logits, vocab)?;
        Ok(bad)
    }

    /// Gives each sequence its tokens.
    fn settle(&mut self, step: &Step, bad: &[(SeqId, String)]) {
        let mut row = 0;
        for work in &step.works {
            let first = row;
            row += work.rows;
            // Its caller may have gone while another of its continuations was told.
            if !self.choices.contains_key(&work.id) {
                continue;
            }
            if let Some((_, why)) = bad.iter().find(|(id, _)| *id == work.id) {
                self.fail(work.id, why);
                continue;
            }
            if work.rows == 0 {
                self.sched.advance(work.id, work.new, &[]);
                continue;
            }
            let drafts = std::mem::take(&mut self.sched.seq_mut(work.id).drafts);
            let drawn = &self.sampler.out[first..row];
            let right = drafts.iter().zip(drawn).take_while(|(d, t)| **d as i32 == **t).count();
            let next: Vec<u32> = drawn[..=right].iter().map(|&t| t as u32).collect();
            if let Some(choice) = self.choices.get_mut(&work.id)
                && !drafts.is_empty()
            {
                choice.guesser.learn(drafts.len(), right);
                self.stats.drafted_tokens += drafts.len() as u64;
                self.stats.accepted_tokens += right as u64;
            }
            self.sched.advance(work.id, work.new - drafts.len() + right, &[]);
            for (i, id) in next.into_iter().enumerate() {
                if !self.take(work.id, id, first + i) {
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
                None => self.stats.first_token.observe((now - request.submitted).as_secs_f64()),
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
        let (text, stopped) = if generated < choice.min_tokens { (text, false) } else { choice.stop.push(&text) };
        let logprobs = self.sampler.logprobs(row, choice.logprobs);
        let event = Event::Token { choice: choice.index, id, text, logprobs };
        let request = choice.request;
        if !self.tell(request, event) {
            return false;
        }
        if stopped && let Some(choice) = self.choices.get_mut(&seq) {
            // Nothing after a stop text is part of the answer, half a character neither.
            choice.text = Detokenizer::default();
        }
        if stopped || complete {
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
    fn end(&mut self, id: SeqId, reason: Finish) {
        let Some(mut choice) = self.choices.remove(&id) else { return };
        let seq = self.sched.remove(id);
        let usage = Usage { prompt: seq.prompt, cached: seq.cached, generated: seq.tokens.len() - seq.prompt };
        let text = choice.stop.finish() + &choice.text.finish();
        *match reason {
            Finish::Stop => &mut self.stats.finished_stop,
            Finish::Length => &mut self.stats.finished_length,
            Finish::Aborted => &mut self.stats.aborted,
            Finish::Deadline => &mut self.stats.expired,
        } += 1;
        let event = Event::Finished { choice: choice.index, text, reason, usage };
        self.leave(choice.request, id, event);
    }

    /// Ends a request with an error: its other continuations go too.
    fn fail(&mut self, id: SeqId, why: &str) {
        let Some(choice) = self.choices.remove(&id) else { return };
        self.sched.remove(id);
        self.stats.failed += 1;
        let Some(mut request) = self.requests.remove(&choice.request) else { return };
        if request.queued > 0 {
            self.link.admitted(request.queued);
        }
        for other in request.seqs.into_iter().filter(|&s| s != id) {
            if self.choices.remove(&other).is_some() {
                self.sched.remove(other);
                self.stats.failed += 1;
            }
        }
        tell(&mut request.sink, Event::Failed(why.into()));
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

    /// The mean of the final states of `tokens`, in pages that are given back.
    fn embed(&mut self, tokens: &[u32]) -> Result<Vec<f32>> {
        let pages = self.sched.borrow_pages(tokens.len(), &mut self.backend)?;
        let mut sum: Vec<f64> = Vec::new();
        let mut past = 0;
        let mut result = Ok(());
        for part in tokens.chunks(self.config.max_step_tokens) {
            let seqs = [Seq { new: part.len(), past, pages: &pages }];
            match self.backend.hidden(&Batch { tokens: part, seqs: &seqs, logits: &[], shared: &[] }) {
                Ok((width, states)) => {
                    sum.resize(width, 0.0);
                    for state in states.chunks_exact(width) {
                        sum.iter_mut().zip(state).for_each(|(s, &x)| *s += f64::from(x));
                    }
                }
                Err(error) => {
                    result = Err(error);
                    break;
                }
            }
            past += part.len();
        }
        self.sched.return_pages(pages);
        self.stats.computed_tokens += past as u64;
        result.map(|()| sum.into_iter().map(|s| (s / tokens.len() as f64) as f32).collect())
    }

    fn count(&mut self, step: &Step, took: Duration) {
        let token_bytes = (self.backend.page_bytes() / self.config.page_size) as u64;
        self.stats.steps += 1;
        self.stats.computed_tokens += step.load.tokens as u64;
        self.stats.cascade_groups += step.shared.len() as u64;
        self.stats.kv_bytes_flat += step.read_flat as u64 * token_bytes;
        self.stats.kv_bytes_read += step.read as u64 * token_bytes;
        self.stats.step.observe(took.as_secs_f64());
    }

    /// Copies the numbers to where handles see them.
    fn publish(&mut self) {
        let counts = self.sched.counts;
        let (pages, available) = self.sched.pages();
        let stats = &mut self.stats;
        stats.running = self.sched.running().len();
        stats.waiting = self.sched.waiting();
        (stats.pages, stats.pages_used) = (pages, pages - available);
        (stats.preemptions, stats.evictions) = (counts.preemptions, counts.evictions);
        (stats.prompt_tokens, stats.cached_tokens) = (counts.queried_tokens, counts.hit_tokens);
        stats.restored_tokens = counts.restored_tokens;
        stats.tier = self.sched.tier().map(Tier::stats).unwrap_or_default();
        self.link.publish(stats);
    }
}

/// Calls a sink; one that panics is a caller that has gone.
fn tell(sink: &mut Sink, event: Event) -> bool {
    catch_unwind(AssertUnwindSafe(|| sink(event))).unwrap_or(false)
}
