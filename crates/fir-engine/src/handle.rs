//! What callers hold: ask, abort, look, drain.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use fir::Exec;
use llguidance::Matcher;

use crate::backend::{Backend, Running};
use crate::config::{Config, MemoryPlan};
use crate::engine::{Engine, Parts, Sink};
use crate::error::{Error, Result};
use crate::grammar::{Grammars, Lazy};
use crate::kv::tier::Tier;
use crate::models::Model;
use crate::request::{Attention, Event, Request};
use crate::runner::{KvCache, Limits, Runner};
use crate::sampler::fresh_seed;
use crate::sched::stream_room;
use crate::spec::draft::Drafter;
use crate::stats::Stats;

/// Continuations of one request, at most.
const MAX_N: usize = 128;
/// Alternatives whose log probabilities can be asked for.
const MAX_LOGPROBS: usize = 100;

/// Names a request that was accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RequestId(u64);

/// How an engine is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Health {
    /// It serves.
    Ok,
    /// It finishes what it has and takes nothing new.
    Draining,
    /// Its current step has run for so long.
    Stuck(Duration),
    /// It has ended, with the reason; `crashed` if nobody asked for it.
    Stopped {
        /// Why.
        reason: String,
        /// Nobody asked for it.
        crashed: bool,
    },
}

pub(crate) enum Command {
    Submit(Box<Job>),
    Abort(RequestId),
    Embed(Vec<u32>, SyncSender<Result<Vec<f32>>>),
    /// Forget prefixes that nobody uses.
    Forget(SyncSender<usize>),
    Drain(Instant),
    /// A page has come from a tier.
    Wake,
}

/// A request on its way to the engine.
pub(crate) struct Job {
    pub id: RequestId,
    pub request: Request,
    pub sink: Sink,
    pub grammar: Option<Matcher>,
    pub seed: u64,
    pub submitted: Instant,
}

#[derive(Debug, Default)]
struct State {
    stopped: Option<(String, bool)>,
    draining: bool,
    waiting: usize,
    waiting_tokens: usize,
    refused: u64,
}

/// What the engine's thread and its handles share.
pub(crate) struct Link {
    pub context: usize,
    pub vocab: usize,
    page_size: usize,
    /// Why the model cannot stream, and why it cannot skip blocks, if so.
    refused: Refused,
    max_queue: usize,
    max_queue_tokens: usize,
    stuck_after: Duration,
    state: Mutex<State>,
    ended: Condvar,
    stats: Mutex<Stats>,
    start: Instant,
    /// Nanoseconds after `start` at which the step began that runs now, and 0 between steps.
    step: AtomicU64,
    next: AtomicU64,
}

/// Why a model cannot attend as a request asks, if so.
#[derive(Clone, Debug, Default)]
pub(crate) struct Refused {
    pub streaming: Option<String>,
    pub sparse: Option<String>,
}

impl Link {
    pub(crate) fn new(config: &Config, context: usize, vocab: usize, refused: Refused) -> Self {
        Self {
            context,
            vocab,
            page_size: config.page_size,
            refused,
            max_queue: config.max_queue,
            max_queue_tokens: config.max_queue_tokens,
            stuck_after: config.stuck_after,
            state: Mutex::default(),
            ended: Condvar::new(),
            stats: Mutex::default(),
            start: Instant::now(),
            step: AtomicU64::new(0),
            next: AtomicU64::new(1),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Plain numbers, whole after every statement.
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// A request waits no more.
    pub(crate) fn admitted(&self, tokens: usize) {
        let mut state = self.state();
        state.waiting = state.waiting.saturating_sub(1);
        state.waiting_tokens = state.waiting_tokens.saturating_sub(tokens);
    }

    pub(crate) fn stop(&self, reason: &str, crashed: bool) {
        self.state().stopped.get_or_insert_with(|| (reason.into(), crashed));
        self.step.store(0, Ordering::Relaxed);
        self.ended.notify_all();
    }

    pub(crate) fn step_began(&self) {
        self.step.store(self.start.elapsed().as_nanos().max(1) as u64, Ordering::Relaxed);
    }

    /// How long the step took.
    pub(crate) fn step_ended(&self) -> Duration {
        let began = self.step.swap(0, Ordering::Relaxed);
        self.start.elapsed().saturating_sub(Duration::from_nanos(began))
    }

    pub(crate) fn publish(&self, stats: &Stats) {
        self.stats.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).clone_from(stats);
    }
}

/// An engine that runs. Cheap to clone; when the last clone is gone, the engine finishes what it has and ends.
#[derive(Clone)]
pub struct Handle {
    link: Arc<Link>,
    commands: Arc<Sender<Command>>,
    grammars: Arc<Lazy>,
    plan: Arc<MemoryPlan>,
}

impl std::fmt::Debug for Handle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Handle").field("health", &self.health()).finish_non_exhaustive()
    }
}

impl Engine {
    /// Allocates all that `config` asks for, starts the engine's thread and, unless told not to, runs every kernel once.
    pub fn start(model: impl Into<Arc<Model>>, config: Config) -> Result<Handle> {
        let model = model.into();
        config.check()?;
        // Each token of an answer is a sequence of the step's.
        let tokens = config.max_step_tokens;
        let limits = Limits { max_tokens: tokens, max_seqs: tokens, max_logits: config.max_rows() };
        let runner = Runner::new(&model, limits)?;
        let small = config.draft_model.clone();
        let small_runner = match &small {
            Some(small) if small.config().vocab != model.config().vocab => {
                let (got, want) = (small.config().vocab, model.config().vocab);
                return Err(Error::Config(format!("draft_model has {got} tokens, expected the model's {want}")));
            }
            Some(small) => Some(Runner::new(small, Limits { max_logits: config.max_seqs, ..limits })?),
            None => None,
        };
        let buffers = runner.bytes() + small_runner.as_ref().map_or(0, Runner::bytes);
        let plan = config.plan(&model, buffers as u64)?;
        let kv = |model: &Model| KvCache::new(model, plan.pages, config.page_size, config.kv_type);
        let drafter = match (small, small_runner) {
            (Some(small), Some(runner)) => {
                let backend = Backend::Model(Box::new(Running { kv: kv(&small)?, model: small, runner }));
                Some(Drafter::new(backend, plan.pages, config.page_size, config.max_step_tokens))
            }
            _ => None,
        };
        let kv = kv(&model)?;
        let host = if matches!(model.exec(), Exec::Cpu(_)) { model.exec().clone() } else { Exec::cpu()? };
        let (vocab, eos) = (model.config().vocab, model.config().eos.clone());
        let (ends, of) = (eos.clone(), Arc::clone(&model));
        let grammars = Lazy::new(move || {
            let tokenizer = of.tokenizer();
            let text = |id: u32| (id as usize) < tokenizer.vocab() && !tokenizer.is_special(id);
            let words = (0..vocab as u32).map(|id| text(id).then(|| tokenizer.token_bytes(id).to_vec()));
            let words: Vec<_> = words.collect();
            if ends.is_empty() { Ok(None) } else { Grammars::new(&words, &ends).map(Some) }
        });
        let (warm, backend) = (config.warm_up, Backend::Model(Box::new(Running { model, kv, runner })));
        let handle = launch(config, Parts { backend, drafter, plan, eos, host }, grammars)?;
        if warm {
            // Others need not wait for it; who needs it and comes first makes it.
            let grammars = Arc::clone(&handle.grammars);
            let _ = std::thread::Builder::new().name("fir-grammars".into()).spawn(move || grammars.get().is_ok());
        }
        Ok(handle)
    }
}

/// Starts the thread; returns when the first steps have run.
pub(crate) fn launch(config: Config, parts: Parts, grammars: Lazy) -> Result<Handle> {
    let plan = Arc::new(parts.plan.clone());
    let link = Arc::new(Link::new(&config, plan.context, parts.backend.vocab(), parts.backend.refused()));
    let (commands, inbox) = channel();
    let commands = Arc::new(commands);
    let waker = Arc::downgrade(&commands);
    let wake = move || {
        if let Some(commands) = waker.upgrade() {
            let _ = commands.send(Command::Wake);
        }
    };
    let tier = config.budget().map(|budget| Tier::new(budget, wake)).transpose()?;
    let mut engine = Engine::new(config, parts, tier, Arc::clone(&link));
    let (ready, is_ready) = sync_channel(1);
    std::thread::Builder::new()
        .name("fir-engine".into())
        .spawn(move || {
            let warm = if engine.warms_up() { engine.warm_up() } else { Ok(()) };
            let good = warm.is_ok();
            if ready.send(warm).is_ok() && good {
                engine.run(&inbox);
            }
        })
        .map_err(|source| Error::Io { path: "thread fir-engine".into(), source })?;
    is_ready.recv().map_err(|_| Error::Stopped("it panicked in its first step".into()))??;
    Ok(Handle { link, commands, grammars: Arc::new(grammars), plan })
}

impl Handle {
    /// Asks for continuations of a prompt. `sink` is called on the engine's thread for each event, in order, and must
    /// not wait; if it returns false the request is aborted. Returns when the request is queued: its grammar is compiled
    /// here, which may take some milliseconds.
    ///
    /// A request that cannot be served is an error at once; [`Error::Busy`] if the queue is full.
    pub fn submit(&self, request: Request, sink: impl FnMut(Event) -> bool + Send + 'static) -> Result<RequestId> {
        self.check(&request)?;
        let submitted = Instant::now();
        let grammar = match &request.sampling.grammar {
            None => None,
            Some(grammar) => Some(self.grammars.get()?.compile(grammar)?),
        };
        let tokens = request.prompt.len();
        let mut state = self.link.state();
        if let Some((reason, _)) = &state.stopped {
            return Err(Error::Stopped(reason.clone()));
        }
        if state.draining {
            return Err(Error::Stopped("it is draining".into()));
        }
        if state.waiting >= self.link.max_queue || state.waiting_tokens + tokens > self.link.max_queue_tokens {
            state.refused += 1;
            return Err(Error::Busy { waiting: state.waiting, tokens: state.waiting_tokens });
        }
        state.waiting += 1;
        state.waiting_tokens += tokens;
        drop(state);
        let id = RequestId(self.link.next.fetch_add(1, Ordering::Relaxed));
        let seed = request.sampling.seed.unwrap_or_else(fresh_seed);
        let job = Job { id, request, sink: Box::new(sink), grammar, seed, submitted };
        self.send(Command::Submit(Box::new(job)))?;
        Ok(id)
    }

    /// Ends a request with [`Finish::Aborted`](crate::Finish::Aborted), within a step; one that has ended is left alone.
    pub fn abort(&self, id: RequestId) {
        let _ = self.send(Command::Abort(id));
    }

    /// The mean of the final hidden states of `tokens`.
    pub fn embed(&self, tokens: &[u32]) -> Result<Vec<f32>> {
        self.check_tokens("tokens", tokens, self.link.context)?;
        let (reply, answer) = sync_channel(1);
        self.send(Command::Embed(tokens.to_vec(), reply))?;
        answer.recv().map_err(|_| self.gone())?
    }

    /// Forgets every cached prefix that no running sequence reads, in the tiers too; how many pages of the pool came free.
    pub fn forget_prefixes(&self) -> Result<usize> {
        let (reply, answer) = sync_channel(1);
        self.send(Command::Forget(reply))?;
        answer.recv().map_err(|_| self.gone())
    }

    /// The state of the engine and its counters.
    pub fn stats(&self) -> Stats {
        let mut stats = self.link.stats.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).clone();
        let state = self.link.state();
        stats.refused = state.refused;
        stats.waiting = stats.waiting.max(state.waiting);
        stats.waiting_tokens = state.waiting_tokens;
        stats
    }

    /// How the engine is.
    pub fn health(&self) -> Health {
        let state = self.link.state();
        if let Some((reason, crashed)) = state.stopped.clone() {
            return Health::Stopped { reason, crashed };
        }
        let began = self.link.step.load(Ordering::Relaxed);
        let running = self.link.start.elapsed().saturating_sub(Duration::from_nanos(began));
        match began {
            1.. if running > self.link.stuck_after => Health::Stuck(running),
            _ if state.draining => Health::Draining,
            _ => Health::Ok,
        }
    }

    /// Takes nothing new, lets what is there end for at most `timeout`, aborts the rest, and ends the engine. Returns
    /// whether the engine has ended; it has not if its current step is stuck.
    pub fn drain(&self, timeout: Duration) -> bool {
        self.link.state().draining = true;
        let deadline = Instant::now() + timeout;
        let _ = self.send(Command::Drain(deadline));
        // A step may be running when time is up; it is waited for a little.
        let patience = timeout + self.link.stuck_after.min(Duration::from_secs(10));
        let state = self.link.state();
        let waited = self.link.ended.wait_timeout_while(state, patience, |s| s.stopped.is_none());
        waited.map_or_else(|poisoned| poisoned.into_inner().0.stopped.is_some(), |(s, _)| s.stopped.is_some())
    }

    /// What the engine has allocated.
    pub fn memory(&self) -> &MemoryPlan {
        &self.plan
    }

    /// Tokens of the longest sequence, prompt and answer.
    pub fn context(&self) -> usize {
        self.link.context
    }

    fn send(&self, command: Command) -> Result<()> {
        self.commands.send(command).map_err(|_| self.gone())
    }

    fn gone(&self) -> Error {
        let reason =
            self.link.state().stopped.clone().map_or_else(|| "its thread is gone".into(), |(reason, _)| reason);
        Error::Stopped(reason)
    }

    fn check_tokens(&self, field: &'static str, tokens: &[u32], most: usize) -> Result<()> {
        if tokens.is_empty() {
            return Err(bad(field, "is empty".into()));
        }
        if tokens.len() > most {
            return Err(bad(field, format!("has {} tokens, at most {most} fit", tokens.len())));
        }
        self.check_ids(field, tokens.iter().copied())
    }

    fn check_ids(&self, field: &'static str, mut ids: impl Iterator<Item = u32>) -> Result<()> {
        match ids.find(|&id| id as usize >= self.link.vocab) {
            Some(id) => Err(bad(field, format!("has token {id}, the vocabulary ends before {}", self.link.vocab))),
            None => Ok(()),
        }
    }

    fn check_attention(&self, attention: Attention) -> Result<()> {
        let wrong = |why: String| Err(bad("attention", why));
        let refused = match attention {
            Attention::Full => None,
            Attention::Streaming { .. } => self.link.refused.streaming.clone(),
            Attention::Sparse(_) => self.link.refused.sparse.clone(),
        };
        match (attention, refused) {
            (_, Some(why)) => wrong(why),
            (Attention::Streaming { sinks, window }, _) => {
                let (room, context) = (stream_room(self.link.page_size, sinks, window), self.link.context);
                if window == 0 || room > context {
                    let want = format!("1 token of window at least, and pages for {context} in all, not {room}");
                    return wrong(format!("has {sinks} sinks and a window of {window}, expected {want}"));
                }
                Ok(())
            }
            (Attention::Sparse(s), _) if s.block == 0 => wrong("has blocks of 0 tokens, expected 1 or more".into()),
            _ => Ok(()),
        }
    }

    fn check(&self, request: &Request) -> Result<()> {
        // One token at least must fit behind the prompt.
        let room = if let Attention::Streaming { .. } = request.attention { usize::MAX } else { self.link.context - 1 };
        self.check_tokens("prompt", &request.prompt, room)?;
        self.check_attention(request.attention)?;
        let s = &request.sampling;
        let range = |field, ok: bool, got: String, want: &str| match ok {
            true => Ok(()),
            false => Err(bad(field, format!("is {got}, expected {want}"))),
        };
        range("n", (1..=MAX_N).contains(&request.n), request.n.to_string(), &format!("1 to {MAX_N}"))?;
        let t = s.temperature;
        range("temperature", t.is_finite() && t >= 0.0, t.to_string(), "a number, 0 or more")?;
        range("top_p", s.top_p > 0.0 && s.top_p <= 1.0, s.top_p.to_string(), "more than 0 and at most 1")?;
        range("min_p", (0.0..=1.0).contains(&s.min_p), s.min_p.to_string(), "0 to 1")?;
        let p = s.repetition_penalty;
        range("repetition_penalty", p.is_finite() && p > 0.0, p.to_string(), "a number above 0")?;
        let number = "a number";
        range("frequency_penalty", s.frequency_penalty.is_finite(), s.frequency_penalty.to_string(), number)?;
        range("presence_penalty", s.presence_penalty.is_finite(), s.presence_penalty.to_string(), number)?;
        range("max_tokens", s.max_tokens > 0, "0".into(), "1 or more")?;
        range("min_tokens", s.min_tokens <= s.max_tokens, s.min_tokens.to_string(), "at most max_tokens")?;
        let logprobs = s.logprobs.unwrap_or(0);
        range("logprobs", logprobs <= MAX_LOGPROBS, logprobs.to_string(), &format!("at most {MAX_LOGPROBS}"))?;
        let logprobs = s.prompt_logprobs.unwrap_or(0);
        range("prompt_logprobs", logprobs <= MAX_LOGPROBS, logprobs.to_string(), &format!("at most {MAX_LOGPROBS}"))?;
        let whole = s.prompt_logprobs.is_none() || request.attention == Attention::Full;
        range("prompt_logprobs", whole, "asked for".into(), "none where not all of the prompt is seen")?;
        range("stop", s.stop.iter().all(|t| !t.is_empty()), "an empty text".into(), "texts of a character at least")?;
        let bias = s.logit_bias.iter().find(|(_, b)| b.is_nan());
        range("logit_bias", bias.is_none(), "not a number".into(), number)?;
        self.check_ids("logit_bias", s.logit_bias.iter().map(|b| b.0))?;
        self.check_ids("stop_ids", s.stop_ids.iter().copied())?;
        range("bad_tokens", s.bad_tokens.iter().all(|b| !b.is_empty()), "an empty list".into(), "a token at least")?;
        self.check_ids("bad_tokens", s.bad_tokens.iter().flatten().copied())?;
        if let Some(allowed) = &s.allowed_tokens {
            range("allowed_tokens", !allowed.is_empty(), "empty".into(), "a token at least")?;
            self.check_ids("allowed_tokens", allowed.iter().copied())?;
        }
        Ok(())
    }
}

fn bad(field: &'static str, why: String) -> Error {
    Error::Request { field, why }
}
