//! A small engine without a model: what it answers is a function of the request, a piece per step.

use std::collections::{HashSet, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use fir_engine::stats::Stats;
use fir_engine::{Error, Event, Finish, Logprob, Request, Result, TokenLogprobs, Usage};
use fir_server::{Abort, Backend, ModelInfo, Sink, ToolFormat};
use serde_json::{Map, Value};

/// What the double does with requests.
pub(crate) struct Script {
    /// The text of a choice.
    pub(crate) answer: fn(&Request, usize) -> String,
    /// Time of a step, in which every running request gets a token.
    pub(crate) pace: Duration,
    /// Requests that run at the same time.
    pub(crate) slots: usize,
    /// Requests that may wait.
    pub(crate) queue: usize,
    pub(crate) tools: ToolFormat,
}

impl Default for Script {
    fn default() -> Self {
        Self {
            answer: |_, choice| format!("Hello, wörld {choice}!"),
            pace: Duration::from_millis(1),
            slots: 4,
            queue: 64,
            tools: ToolFormat::Hermes,
        }
    }
}

struct Job {
    id: u64,
    request: Request,
    sink: Sink,
    /// Per choice: what is left to say, tokens said, whether it ended.
    choices: Vec<(VecDeque<String>, usize, bool)>,
    /// What was asked about the prompt is told.
    told: bool,
}

#[derive(Default)]
struct Shared {
    queue: VecDeque<Job>,
    running: Vec<Job>,
    aborted: HashSet<u64>,
}

pub(crate) struct Double {
    info: ModelInfo,
    script: Script,
    shared: Arc<Mutex<Shared>>,
    /// Requests as they came.
    pub(crate) seen: Mutex<Vec<Request>>,
    next: AtomicUsize,
    stop: AtomicBool,
    /// The engine has "crashed".
    pub(crate) dead: AtomicBool,
    /// Requests ended by an abort.
    pub(crate) aborts: AtomicUsize,
    /// Times that prefixes were forgotten.
    pub(crate) forgotten: AtomicUsize,
    /// Steps in which anything ran.
    pub(crate) steps: AtomicUsize,
}

impl Double {
    pub(crate) fn start(script: Script) -> Arc<Self> {
        let info = ModelInfo { id: "double".into(), context: 2000, vocab: 256, tools: script.tools };
        let this = Arc::new(Self {
            info,
            script,
            shared: Arc::default(),
            seen: Mutex::default(),
            next: AtomicUsize::new(1),
            stop: AtomicBool::new(false),
            dead: AtomicBool::new(false),
            aborts: AtomicUsize::new(0),
            forgotten: AtomicUsize::new(0),
            steps: AtomicUsize::new(0),
        });
        let engine = this.clone();
        thread::spawn(move || {
            while !engine.stop.load(Ordering::SeqCst) {
                engine.step();
                thread::sleep(engine.script.pace);
            }
        });
        this
    }

    /// Requests that wait and run.
    pub(crate) fn load(&self) -> (usize, usize) {
        let shared = self.shared.lock().unwrap();
        (shared.queue.len(), shared.running.len())
    }

    fn step(&self) {
        let mut shared = self.shared.lock().unwrap();
        let Shared { queue, running, aborted } = &mut *shared;
        let gone = |job: &mut Job| {
            let gone = aborted.remove(&job.id);
            if gone {
                self.aborts.fetch_add(1, Ordering::SeqCst);
                job.end(Finish::Aborted);
            }
            !gone
        };
        let mut gone = gone;
        queue.retain_mut(&mut gone);
        running.retain_mut(&mut gone);
        queue.retain_mut(|job| {
            let late = job.request.deadline.is_some_and(|d| d <= Instant::now());
            if late {
                job.end(Finish::Deadline);
            }
            !late
        });
        while running.len() < self.script.slots
            && let Some(job) = queue.pop_front()
        {
            running.push(job);
        }
        if !running.is_empty() {
            self.steps.fetch_add(1, Ordering::SeqCst);
        }
        running.retain_mut(|job| match job.step() {
            Some(done) => !done,
            None => {
                self.aborts.fetch_add(1, Ordering::SeqCst);
                false
            }
        });
    }
}

impl Job {
    fn end(&mut self, reason: Finish) {
        let usage = Usage { prompt: self.request.prompt.len(), cached: 1, generated: 0 };
        for choice in 0..self.choices.len() {
            (self.sink)(Event::Finished { choice, text: String::new(), reason, stop: None, usage });
        }
    }

    /// What was asked about the prompt: each of its tokens is as likely as its number is large.
    fn prompt(&mut self) -> bool {
        let Some(top) = self.request.sampling.prompt_logprobs.filter(|_| !std::mem::replace(&mut self.told, true))
        else {
            return true;
        };
        let of = |&id: &u32| TokenLogprobs {
            chosen: Logprob { id, logprob: -(id as f32) },
            top: (0..top as u32).map(|i| Logprob { id: i, logprob: -(i as f32) }).collect(),
        };
        (self.sink)(Event::Prompt(self.request.prompt[1..].iter().map(of).collect()))
    }

    /// One token for every choice: whether all are done, or none if nobody listens.
    fn step(&mut self) -> Option<bool> {
        if !self.prompt() {
            return None;
        }
        let prompt = self.request.prompt.len();
        for (choice, (left, said, done)) in self.choices.iter_mut().enumerate().filter(|(_, c)| !c.2) {
            let full = *said == self.request.sampling.max_tokens;
            let alive = match left.pop_front().filter(|_| !full) {
                Some(text) => {
                    *said += 1;
                    let id = u32::from(text.bytes().next().unwrap_or(0));
                    let top = |n| (0..n as u32).map(|i| Logprob { id: id + i, logprob: -0.5 - i as f32 }).collect();
                    let chosen = Logprob { id, logprob: -0.5 };
                    let logprobs = self.request.sampling.logprobs.map(|n| TokenLogprobs { chosen, top: top(n) });
                    (self.sink)(Event::Token { choice, id, text, logprobs })
                }
                None => {
                    *done = true;
                    let reason = if full { Finish::Length } else { Finish::Stop };
                    let usage = Usage { prompt, cached: prompt / 2, generated: *said };
                    let stop = (!full).then(|| self.request.sampling.stop.iter().position(|s| s == "STOP")).flatten();
                    (self.sink)(Event::Finished { choice, text: String::new(), reason, stop, usage })
                }
            };
            if !alive {
                return None;
            }
        }
        Some(self.choices.iter().all(|c| c.2))
    }
}

impl Backend for Double {
    fn model(&self) -> &ModelInfo {
        &self.info
    }

    fn submit(&self, request: Request, mut sink: Sink) -> Result<Abort> {
        self.health()?;
        let text = self.decode(&request.prompt)?;
        if text.contains("FAIL AT ONCE") {
            return Err(Error::Request { field: "messages", why: "asked to fail".into() });
        }
        let mut shared = self.shared.lock().unwrap();
        if shared.queue.len() >= self.script.queue {
            let tokens = shared.queue.iter().map(|j| j.request.prompt.len()).sum();
            return Err(Error::Busy { waiting: shared.queue.len(), tokens });
        }
        self.seen.lock().unwrap().push(request.clone());
        let id = self.next.fetch_add(1, Ordering::SeqCst) as u64;
        if text.contains("FAIL LATER") {
            sink(Event::Failed("asked to fail later".into()));
            return Ok(Box::new(|| ()));
        }
        if text.contains("FAIL MIDWAY") {
            sink(Event::Token { choice: 0, id: 72, text: "H".into(), logprobs: None });
            thread::spawn(move || {
                thread::sleep(Duration::from_millis(30));
                sink(Event::Failed("asked to fail midway".into()))
            });
            return Ok(Box::new(|| ()));
        }
        let pieces = |choice| -> VecDeque<String> {
            let text: Vec<char> = (self.script.answer)(&request, choice).chars().collect();
            text.chunks(3).map(String::from_iter).collect()
        };
        let choices = (0..request.n).map(|c| (pieces(c), 0, false)).collect();
        shared.queue.push_back(Job { id, request, sink, choices, told: false });
        let shared = self.shared.clone();
        Ok(Box::new(move || {
            let mut shared = shared.lock().unwrap();
            if shared.queue.iter().chain(&shared.running).any(|j| j.id == id) {
                shared.aborted.insert(id);
            }
        }))
    }

    fn health(&self) -> Result<()> {
        if self.dead.load(Ordering::SeqCst) { Err(Error::Stopped("asked to die".into())) } else { Ok(()) }
    }

    fn drain(&self, timeout: Duration) {
        let end = Instant::now() + timeout;
        while self.load() != (0, 0) && Instant::now() < end {
            thread::sleep(Duration::from_millis(1));
        }
        let mut shared = self.shared.lock().unwrap();
        let Shared { queue, running, .. } = &mut *shared;
        queue.drain(..).chain(running.drain(..)).for_each(|mut job| job.end(Finish::Aborted));
        self.stop.store(true, Ordering::SeqCst);
    }

    fn forget_prefixes(&self) -> Result<()> {
        self.forgotten.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }

    fn stats(&self) -> Stats {
        let (waiting, running) = self.load();
        Stats { waiting, running, pages: 9, ..Stats::default() }
    }

    fn embed(&self, tokens: &[u32]) -> Result<Vec<f32>> {
        Ok(vec![tokens.len() as f32, 0.5])
    }

    fn encode(&self, text: &str, _special: bool) -> Result<Vec<u32>> {
        Ok(text.bytes().map(u32::from).collect())
    }

    fn decode(&self, tokens: &[u32]) -> Result<String> {
        let bytes: Vec<u8> = tokens.iter().map(|&t| t as u8).collect();
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    fn token_bytes(&self, id: u32) -> Vec<u8> {
        vec![id as u8]
    }

    fn render(
        &self,
        messages: &Value,
        tools: Option<&Value>,
        reply: bool,
        extra: &Map<String, Value>,
    ) -> Result<String> {
        let mut text = String::new();
        for message in messages.as_array().into_iter().flatten() {
            text += &format!("[{}]{}", message["role"].as_str().unwrap(), message["content"].as_str().unwrap());
            if let Some(calls) = message.get("tool_calls") {
                text += &format!("{{{calls}}}");
            }
            text += "\n";
        }
        if let Some(tools) = tools {
            text += &format!("[tools]{tools}\n");
        }
        if !extra.is_empty() {
            text += &format!("[extra]{}\n", Value::Object(extra.clone()));
        }
        if reply {
            text += "[assistant]";
        }
        Ok(text)
    }
}
