//! The engine: one thread that schedules, runs and settles steps, and the handle that others hold.

mod settle;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};
use std::time::{Duration, Instant};

use fir::Exec;

use crate::backend::Backend;
use crate::config::{Config, MemoryPlan};
use crate::error::{Error, Result};
use crate::handle::{Command, Job, Link, RequestId};
use crate::kv::tier::Tier;
use crate::request::{Attention, Event, Finish, TokenLogprobs};
use crate::runner::{Batch, Seq, Shared};
use crate::sampler::{Chooser, Sampler, logprobs_of};
use crate::sched::{self, Lists, Scheduler, SeqId, Step, Work};
use crate::spec::Guesser;
use crate::spec::draft::{Drafter, Want};
use crate::stats::{Histogram, Stats};
use crate::text::StopText;
use crate::tokenizer::Detokenizer;
use settle::tell;

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
    /// When it first ran.
    began: Option<Instant>,
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
    /// Of the prompt's tokens: alternatives asked for, and what is known so far.
    scores: Option<(usize, Vec<TokenLogprobs>)>,
    min_tokens: usize,
    /// Which of its stop texts has ended it.
    stopped: Option<usize>,
    first_token: Option<Instant>,
    last_token: Option<Instant>,
}

/// What an engine is made of.
pub(crate) struct Parts {
    pub backend: Backend,
    pub drafter: Option<Drafter>,
    pub plan: MemoryPlan,
    pub eos: Vec<u32>,
    /// Where tokens are drawn: logits come to the host's memory.
    pub host: Exec,
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
    /// A smaller model that guesses.
    drafter: Option<Drafter>,
    stats: Stats,
    /// Of the last step, for the next.
    lists: Lists,
    failures: u32,
    /// When the engine stops whatever is left.
    drain: Option<Instant>,
}

impl Engine {
    pub(crate) fn new(config: Config, parts: Parts, tier: Option<Tier>, link: Arc<Link>) -> Self {
        let Parts { backend, drafter, plan, eos, host } = parts;
        let limits = sched::Limits {
            page_size: config.page_size,
            max_seqs: config.max_seqs,
            max_tokens: config.max_step_tokens,
            itl_target_ms: config.itl_target_ms,
            prefix_cache: config.prefix_cache,
            cascade: config.cascade,
        };
        Self {
            sched: Scheduler::new(limits, plan.pages, tier, Instant::now()),
            sampler: Sampler::new(config.max_rows(), backend.vocab()),
            config,
            backend,
            host,
            eos,
            link,
            requests: HashMap::new(),
            choices: HashMap::new(),
            drafter,
            stats: Stats { step_tokens: Histogram::of_tokens(), ..Stats::default() },
            lists: Lists::default(),
            failures: 0,
            drain: None,
        }
    }

    pub(crate) fn warms_up(&self) -> bool {
        self.config.warm_up
    }

    /// Runs every kernel that serving needs, and learns what steps cost: nothing is compiled or touched first later.
    pub(crate) fn warm_up(&mut self) -> Result<()> {
        let page_size = self.config.page_size;
        // The largest step there is: attention's scratch is made for it here, and never again.
        let most = self.config.max_step_tokens.min(self.sched.capacity()).min(self.link.context);
        let pages: Vec<u32> = (0..most.div_ceil(page_size) as u32).collect();
        // What the first takes is not learned from: weights and buffers are touched for the first time.
        let steps = [(0, most), (0, most), (0, most / 2), (most / 2, most / 4), (most - 1, 1), (most / 2, 1), (0, 1)];
        for (i, (past, new)) in steps.into_iter().enumerate() {
            let tokens = vec![0; new.max(1)];
            let seqs = [Seq { new: tokens.len(), past, pages: &pages, ..Seq::default() }];
            let rows = [tokens.len() as u32 - 1];
            let start = Instant::now();
            self.backend.step(&Batch { tokens: &tokens, seqs: &seqs, logits: &rows, shared: &[] })?;
            if i > 0 {
                self.sched.cost.learn(sched::cost::Load::of(past, tokens.len(), 1), start.elapsed());
            }
        }
        if self.config.cascade && pages.len() > 2 {
            // The page before is shared; each writes into one of its own.
            let tails = [[pages[0], pages[1]], [pages[0], pages[2]]];
            let seqs = [0, 1].map(|i| Seq { new: 1, past: page_size, pages: &tails[i], ..Seq::default() });
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
        // Before it is known that the engine has ended: a process that waits for that may end at once, and leave files.
        self.sched.close_tier();
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
                Command::Abort(_) | Command::Forget(_) | Command::Drain(_) | Command::Wake => {}
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
            Command::Forget(reply) => {
                let _ = reply.send(self.sched.forget_prefixes());
            }
            Command::Drain(deadline) => self.drain = Some(deadline),
            Command::Wake => {}
        }
    }

    fn submit(&mut self, job: Job) {
        let Job { id, request, sink, grammar, seed, submitted } = job;
        let prompt = request.prompt.len();
        let mut running = Running { sink, seqs: Vec::new(), queued: prompt, submitted, began: None };
        let whole = prompt.saturating_add(request.sampling.max_tokens);
        let streams = matches!(request.attention, Attention::Streaming { .. });
        let max_len = if streams { whole } else { whole.min(self.link.context) };
        for index in 0..request.n {
            let mut seq = sched::Seq::new(request.prompt.clone(), max_len, request.salt, request.deadline);
            seq.attention = request.attention;
            // Once is enough for all continuations.
            let scores = request.sampling.prompt_logprobs.filter(|_| index == 0);
            if scores.is_some() && prompt > 1 {
                seq.scored = 0;
            }
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
            let chooser = Chooser::new(s, index, &request.prompt, &self.eos, seed, grammar.clone());
            let choice = Choice {
                request: id,
                index,
                chooser,
                text: Detokenizer::default(),
                stop: StopText::new(s.stop.clone(), s.include_stop),
                guesser: Guesser::new(),
                logprobs: s.logprobs,
                scores: scores.map(|top| (top, Vec::with_capacity(prompt - 1))),
                stopped: None,
                min_tokens: s.min_tokens,
                first_token: None,
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
            let Some(request) = self.choices.get(&work.id).and_then(|c| self.requests.get_mut(&c.request)) else {
                continue;
            };
            if request.queued > 0 {
                self.link.admitted(std::mem::take(&mut request.queued));
                request.began = Some(now);
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
        self.sched.recycle(step);
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
        let decoding: Vec<SeqId> =
            self.sched.running().iter().copied().filter(|&id| self.sched.seq(id).decoding()).collect();
        let load = |&id: &SeqId| sched::cost::Load::of(self.sched.kv(id).1, 1, 1);
        let base = decoding.iter().map(load).fold(sched::cost::Load::default(), sched::cost::Load::plus);
        let guess_ms = self.drafter.as_ref().map_or(0.0, |d| d.ms_per_guess);
        let mut wants = Vec::new();
        for id in decoding {
            let Some(choice) = self.choices.get_mut(&id) else { continue };
            let seq = self.sched.seq(id);
            let room = (seq.max_len - seq.tokens.len()).saturating_sub(1).min(self.config.drafts);
            let most = choice.guesser.worth(&self.sched.cost, base, seq.tokens.len(), room, guess_ms);
            wants.push(Want { id, tokens: &seq.tokens, most });
        }
        let mut guesses = Vec::with_capacity(wants.len());
        match &mut self.drafter {
            Some(drafter) => match drafter.guess(&wants) {
                Ok(made) => guesses.extend(wants.iter().zip(made).map(|(w, (guess, second))| {
                    let aside = self.choices.get(&w.id).map_or(0, |c| c.guesser.aside(w.most));
                    let other: Vec<u32> = second.into_iter().take(aside).collect();
                    (w.id, w.most, guess, other)
                })),
                Err(error) => {
                    // It is of no use, but nothing depends on it.
                    self.stats.drafter_error = Some(error.to_string());
                    self.drafter = None;
                }
            },
            None => {
                for w in &wants {
                    let Some(choice) = self.choices.get_mut(&w.id) else { continue };
                    let guess = choice.guesser.guess(w.tokens, w.most);
                    let other = choice.guesser.other(w.tokens, choice.guesser.aside(w.most));
                    guesses.push((w.id, w.most, guess, other));
                }
            }
        }
        for (id, most, mut drafts, mut other) in guesses {
            self.sched.cut_branch(id);
            let Some(choice) = self.choices.get_mut(&id).filter(|_| !drafts.is_empty()) else { continue };
            choice.chooser.valid_drafts(&mut drafts);
            choice.chooser.valid_drafts(&mut other);
            if !other.is_empty() && other.first() != drafts.first() {
                // Both, and the last token again, are no more rows than one chain would be.
                drafts.truncate(most.saturating_sub(1 + other.len()));
                self.sched.seq_mut(id).branch.tokens = other;
            }
            self.sched.seq_mut(id).drafts = drafts;
        }
    }

    /// Runs a step and draws its tokens; returns the sequences that cannot go on, with the reason.
    fn run_step(&mut self, step: &Step) -> Result<Vec<(SeqId, String)>> {
        let built = self.sched.batch(step, std::mem::take(&mut self.lists));
        let vocab = self.backend.vocab();
        let logits = self.backend.step(&built.batch())?;
        self.lists = built.into_lists();
        self.sampler.clear();
        let (mut at, mut bad) = (0, Vec::new());
        for work in step.works.iter().filter(|w| w.rows + w.scored > 0) {
            let seq = self.sched.seq(work.id);
            let Some(choice) = self.choices.get_mut(&work.id) else { continue };
            if let Some((top, scores)) = &mut choice.scores {
                // A row is of the token after it; those known from before come first.
                for row in logits[at * vocab..(at + work.scored) * vocab].chunks_exact(vocab) {
                    scores.push(logprobs_of(row, seq.tokens[scores.len() + 1], *top));
                }
            }
            at += work.scored;
            let generated = seq.tokens.len() - seq.prompt;
            let chains = [(&seq.drafts, 0, work.rows), (&seq.branch.tokens, 1, work.branch_rows)];
            for (chain, from, rows) in chains {
                let logits = &mut logits[at * vocab..(at + rows) * vocab];
                at += rows;
                if let Err(error) =
                    self.sampler.push(&mut choice.chooser, logits, at - rows, vocab, chain, from, generated)
                {
                    bad.push((work.id, error.to_string()));
                }
            }
        }
        self.sampler.draw(&self.host, logits, vocab)?;
        Ok(bad)
    }

    /// The mean of the final states of `tokens`, in pages that are given back.
    fn embed(&mut self, tokens: &[u32]) -> Result<Vec<f32>> {
        let pages = self.sched.borrow_pages(tokens.len(), &mut self.backend)?;
        let mut sum: Vec<f64> = Vec::new();
        let mut past = 0;
        let mut result = Ok(());
        for part in tokens.chunks(self.config.max_step_tokens) {
            let seqs = [Seq { new: part.len(), past, pages: &pages, ..Seq::default() }];
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
        self.stats.step_tokens.observe(step.load.tokens as f64);
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
