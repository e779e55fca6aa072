//! A model that answers: the serving engine as a Python object. What it tells about all requests comes out of one queue,
//! which a thread of `fir.llm` waits on.

use std::collections::HashMap;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};

use fir::tensor::Place;
use fir_engine::{Config, Error, Event, Finish, Grammar, Handle, Model, Request, RequestId, Sampling, Usage};
use pyo3::exceptions::{PyOSError, PyRuntimeError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::error::to_py;
use crate::plan::locked;
use crate::tensor::exec_at;

fn engine_error(error: Error) -> PyErr {
    let text = error.to_string();
    match error {
        Error::Op(error) => to_py(error),
        Error::Io { .. } => PyOSError::new_err(text),
        Error::Busy { .. } | Error::Stopped(_) => PyRuntimeError::new_err(text),
        _ => PyValueError::new_err(text),
    }
}

/// Log probability of a token, and of the likeliest ones at its place.
type Logs = (u32, f32, Vec<(u32, f32)>);
/// Request, choice, text, tokens, their log probabilities, why it ended, `(prompt, cached, generated)` tokens, error.
type Told = (u64, usize, String, Vec<u32>, Vec<Logs>, Option<&'static str>, (usize, usize, usize), Option<String>);

/// What a choice has told and nobody has been sent yet.
#[derive(Default)]
struct Piece {
    text: String,
    ids: Vec<u32>,
    logs: Vec<Logs>,
}

impl Piece {
    fn told(self, request: u64, choice: usize, ended: Option<(Finish, Usage)>, error: Option<String>) -> Told {
        let reason = ended.map(|(reason, _)| match reason {
            Finish::Stop => "stop",
            Finish::Length => "length",
            Finish::Aborted => "abort",
            Finish::Deadline => "deadline",
        });
        let Usage { prompt, cached, generated } = ended.map_or(Usage::default(), |(_, usage)| usage);
        (request, choice, self.text, self.ids, self.logs, reason, (prompt, cached, generated), error)
    }
}

/// A loaded model and the thread that serves it.
#[pyclass(frozen, name = "Engine", module = "fir")]
pub(crate) struct Engine {
    model: Arc<Model>,
    handle: Mutex<Option<Handle>>,
    told: Mutex<Receiver<Option<Told>>>,
    tell: Sender<Option<Told>>,
    running: Mutex<HashMap<u64, RequestId>>,
}

const CLOSED: &str = "the model is closed";

#[pymethods]
impl Engine {
    /// `settings`: fields of the engine's configuration by name.
    #[new]
    fn new(py: Python<'_>, model: &str, device: &str, settings: &Bound<'_, PyDict>) -> PyResult<Self> {
        let config = configured(settings)?;
        let place = match device.split_once(':').unwrap_or((device, "0")) {
            ("cpu", _) => Place::Host,
            ("cuda", ordinal) => {
                let wrong = |_| PyValueError::new_err(format!("device {device:?}, expected \"cpu\" or \"cuda:0\""));
                Place::Cuda(ordinal.parse().map_err(wrong)?)
            }
            _ => return Err(PyValueError::new_err(format!("device {device:?}, expected \"cpu\" or \"cuda:0\""))),
        };
        let exec = fir_bench::apply::attach(exec_at(place)?).map_err(|e| PyValueError::new_err(e.to_string()))?;
        let started = py.detach(|| {
            let path = fir_engine::pull::pull(model, &mut |_| {})?;
            let model = Arc::new(Model::load(&exec, &path)?);
            let handle = fir_engine::Engine::start(Arc::clone(&model), config)?;
            Ok((model, handle))
        });
        let (model, handle) = started.map_err(engine_error)?;
        let (tell, told) = channel();
        Ok(Self { model, handle: Mutex::new(Some(handle)), told: Mutex::new(told), tell, running: Mutex::default() })
    }

    /// Tokens of the longest sequence, prompt and answer.
    #[getter]
    fn context(&self) -> PyResult<usize> {
        Ok(self.handle()?.context())
    }

    /// Tokens of the vocabulary.
    #[getter]
    fn vocab(&self) -> usize {
        self.model.config().vocab
    }

    /// Tokens of a text; `special` puts what the model wants at the start of a sequence before them.
    #[pyo3(signature = (text, special=true))]
    fn encode(&self, text: &str, special: bool) -> PyResult<Vec<u32>> {
        self.model.tokenizer().encode(text, special).map_err(engine_error)
    }

    /// The text of tokens, without special ones.
    fn decode(&self, ids: Vec<u32>) -> String {
        self.model.tokenizer().decode(&ids)
    }

    /// The prompt of a chat; arguments are JSON.
    #[pyo3(signature = (messages, tools=None, add_generation_prompt=true, extra=None))]
    fn chat(
        &self,
        messages: &str,
        tools: Option<&str>,
        add_generation_prompt: bool,
        extra: Option<&str>,
    ) -> PyResult<String> {
        let json = |text: &str| {
            serde_json::from_str::<serde_json::Value>(text).map_err(|e| PyValueError::new_err(format!("chat: {e}")))
        };
        let Some(template) = self.model.chat() else {
            return Err(PyValueError::new_err("chat: this model has no chat template; use generate()"));
        };
        let (tools, extra) = (tools.map(json).transpose()?, extra.map(json).transpose()?);
        template.render(&json(messages)?, tools.as_ref(), add_generation_prompt, extra.as_ref()).map_err(engine_error)
    }

    /// Queues a request that the caller named `id`. With `stream` every token is told, else a choice when it has ended.
    fn submit(
        &self,
        py: Python<'_>,
        id: u64,
        prompt: Vec<u32>,
        sampling: &Bound<'_, PyDict>,
        stream: bool,
    ) -> PyResult<()> {
        let (sampling, n, priority) = sampled(sampling)?;
        let request = Request { prompt, sampling, n, priority, ..Request::default() };
        let (handle, tell) = (self.handle()?, self.tell.clone());
        let mut pieces: Vec<Piece> = Vec::new();
        let sink = move |event: Event| {
            if let Event::Token { choice, .. } | Event::Finished { choice, .. } = &event
                && pieces.len() <= *choice
            {
                pieces.resize_with(choice + 1, Piece::default);
            }
            let told = match event {
                // Nobody asks for it.
                Event::Prompt(_) => return true,
                Event::Token { choice, id: token, text, logprobs } => {
                    let piece = &mut pieces[choice];
                    piece.text.push_str(&text);
                    piece.ids.push(token);
                    if let Some(at) = logprobs {
                        let top = at.top.iter().map(|l| (l.id, l.logprob)).collect();
                        piece.logs.push((at.chosen.id, at.chosen.logprob, top));
                    }
                    if !stream {
                        return true;
                    }
                    std::mem::take(piece).told(id, choice, None, None)
                }
                Event::Finished { choice, text, reason, usage, .. } => {
                    let mut piece = std::mem::take(&mut pieces[choice]);
                    piece.text.push_str(&text);
                    piece.told(id, choice, Some((reason, usage)), None)
                }
                Event::Failed(why) => Piece::default().told(id, 0, None, Some(why)),
            };
            tell.send(Some(told)).is_ok()
        };
        let request = py.detach(|| handle.submit(request, sink)).map_err(engine_error)?;
        locked(&self.running).insert(id, request);
        Ok(())
    }

    /// What was told since the last call, waiting for the first of it; None when the model is closed.
    fn wait(&self, py: Python<'_>) -> Option<Vec<Told>> {
        py.detach(|| {
            let told = locked(&self.told);
            let mut all = vec![told.recv().ok().flatten()?];
            while let Ok(next) = told.try_recv() {
                match next {
                    Some(next) => all.push(next),
                    None => {
                        let _ = self.tell.send(None); // For the next call.
                        break;
                    }
                }
            }
            Some(all)
        })
    }

    /// Forgets a request that has ended.
    fn forget(&self, id: u64) {
        locked(&self.running).remove(&id);
    }

    /// Ends a request within a step.
    fn abort(&self, id: u64) -> PyResult<()> {
        if let Some(&request) = locked(&self.running).get(&id) {
            self.handle()?.abort(request);
        }
        Ok(())
    }

    /// Ends the engine once it has answered what it has, and the waiting thread.
    fn close(&self) {
        drop(locked(&self.handle).take());
        let _ = self.tell.send(None);
    }

    /// The mean of the final hidden states of tokens.
    fn embed(&self, py: Python<'_>, ids: Vec<u32>) -> PyResult<Vec<f32>> {
        let handle = self.handle()?;
        py.detach(|| handle.embed(&ids)).map_err(engine_error)
    }
}

impl Engine {
    fn handle(&self) -> PyResult<Handle> {
        locked(&self.handle).clone().ok_or_else(|| PyRuntimeError::new_err(CLOSED))
    }
}

/// What is wrong with a named value.
fn wrong(name: &str) -> impl Fn(PyErr) -> PyErr {
    move |e| PyTypeError::new_err(format!("`{name}`: {e}"))
}

fn configured(settings: &Bound<'_, PyDict>) -> PyResult<Config> {
    let mut c = Config::default();
    for (name, value) in settings {
        let name: String = name.extract()?;
        let wrong = wrong(&name);
        match name.as_str() {
            "memory" => c.memory = Some(value.extract().map_err(wrong)?),
            "kv_type" => c.kv_type = value.extract::<&str>().map_err(wrong)?.parse().map_err(engine_error)?,
            "page_size" => c.page_size = value.extract().map_err(wrong)?,
            "context" => c.context = Some(value.extract().map_err(wrong)?),
            "max_seqs" => c.max_seqs = value.extract().map_err(wrong)?,
            "max_step_tokens" => c.max_step_tokens = value.extract().map_err(wrong)?,
            "itl_target_ms" => c.itl_target_ms = value.extract().map_err(wrong)?,
            "prefix_cache" => c.prefix_cache = value.extract().map_err(wrong)?,
            "cascade" => c.cascade = value.extract().map_err(wrong)?,
            "drafts" => c.drafts = value.extract().map_err(wrong)?,
            "host_tier" => c.host_tier = value.extract().map_err(wrong)?,
            _ => return Err(PyTypeError::new_err(format!("`{name}` is no setting of the engine"))),
        }
    }
    Ok(c)
}

/// Rules of sampling, how many continuations, and how urgent they are.
fn sampled(given: &Bound<'_, PyDict>) -> PyResult<(Sampling, usize, i32)> {
    let (mut s, mut n, mut priority) = (Sampling::default(), 1, 0);
    for (name, value) in given {
        let name: String = name.extract()?;
        let wrong = wrong(&name);
        match name.as_str() {
            "n" => n = value.extract().map_err(wrong)?,
            "priority" => priority = value.extract().map_err(wrong)?,
            "temperature" => s.temperature = value.extract().map_err(wrong)?,
            "top_k" => s.top_k = value.extract().map_err(wrong)?,
            "top_p" => s.top_p = value.extract().map_err(wrong)?,
            "min_p" => s.min_p = value.extract().map_err(wrong)?,
            "repetition_penalty" => s.repetition_penalty = value.extract().map_err(wrong)?,
            "frequency_penalty" => s.frequency_penalty = value.extract().map_err(wrong)?,
            "presence_penalty" => s.presence_penalty = value.extract().map_err(wrong)?,
            "logit_bias" => s.logit_bias = value.extract::<HashMap<u32, f32>>().map_err(wrong)?.into_iter().collect(),
            "allowed_token_ids" => s.allowed_tokens = value.extract().map_err(wrong)?,
            "seed" => s.seed = value.extract().map_err(wrong)?,
            "logprobs" => s.logprobs = value.extract().map_err(wrong)?,
            "max_tokens" => s.max_tokens = value.extract().map_err(wrong)?,
            "min_tokens" => s.min_tokens = value.extract().map_err(wrong)?,
            "stop" => s.stop = value.extract().map_err(wrong)?,
            "stop_token_ids" => s.stop_ids = value.extract().map_err(wrong)?,
            "ignore_eos" => s.ignore_eos = value.extract().map_err(wrong)?,
            "json_object" => s.grammar = Some(Grammar::Json),
            "json" => s.grammar = Some(Grammar::JsonSchema(value.extract().map_err(wrong)?)),
            "regex" => s.grammar = Some(Grammar::Regex(value.extract().map_err(wrong)?)),
            "choice" => s.grammar = Some(Grammar::Choice(value.extract().map_err(wrong)?)),
            "grammar" => s.grammar = Some(Grammar::Lark(value.extract().map_err(wrong)?)),
            _ => return Err(PyTypeError::new_err(format!("`{name}` is no rule of sampling"))),
        }
    }
    Ok((s, n, priority))
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Engine>()
}
