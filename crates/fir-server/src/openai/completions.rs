//! `POST /v1/completions`.

use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock};

use axum::Json;
use axum::extract::State as Shared;
use axum::response::{IntoResponse, Response};
use fir_engine::{Request, TokenLogprobs};
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Map, Value};

use super::conversation::{blocking, engine_request, served};
use super::types::{ChatLogprob, Completion, CompletionChoice, CompletionLogprobs, FINGERPRINT, FinishReason, Usage};
use crate::asked::Asked;
use crate::backend::Backend;
use crate::error::{ApiError, Result};
use crate::generation::{Generation, Update};
use crate::params::{Common, fields, part, within};
use crate::parse::{Parser, Piece};
use crate::state::{State, now};
use crate::stream::{self, Encode, Step};

/// What a completion has beside [`Common`].
#[derive(Debug, Deserialize, JsonSchema)]
pub(crate) struct CompletionRequest {
    prompt: Prompt,
    /// Most tokens of an answer.
    #[schemars(range(min = 1))]
    max_tokens: Option<usize>,
    /// The answer begins with the prompt.
    echo: Option<bool>,
    /// Log probabilities of so many tokens beside the chosen one.
    #[schemars(range(min = 0, max = 20))]
    logprobs: Option<usize>,
    /// Only as large as `n`.
    best_of: Option<usize>,
    /// Only empty.
    suffix: Option<String>,
    /// Adds what the model wants at the beginning of a text; true by default.
    add_special_tokens: Option<bool>,
}

/// One prompt or several, as texts or tokens.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(untagged, expecting = "a text, a list of texts, a list of tokens or a list of lists of tokens")]
pub(crate) enum Prompt {
    Text(String),
    Tokens(Vec<u32>),
    Texts(Vec<String>),
    Lists(Vec<Vec<u32>>),
}

/// Every field of a completion.
pub(crate) static FIELDS: LazyLock<Map<String, Value>> = LazyLock::new(|| {
    let mut all = fields::<Common>();
    all.extend(fields::<CompletionRequest>());
    all
});

/// OpenAI's default.
const MAX_TOKENS: usize = 16;

pub(crate) async fn handle(Shared(state): Shared<Arc<State>>, asked: Asked) -> Result<Response> {
    let (backend, model) = served(&state)?;
    asked.known(&FIELDS)?;
    let common: Common = part(&asked.body)?;
    let completion: CompletionRequest = part(&asked.body)?;
    let (streams, usage) = (common.stream == Some(true), common.usage_chunk());
    let id = common.id("cmpl", || state.fresh_id())?;
    let with_logprobs = completion.logprobs.is_some();
    let start = move |state: &Arc<State>| {
        let (requests, echo) = completion.prepare(state, &common, asked.salt)?;
        let n = requests.first().map_or(1, |r| r.n);
        let text = |i: usize| Text { echo: echo.get(i / n).cloned().unwrap_or_default(), ..Text::default() };
        let texts: Vec<Text> = (0..n * requests.len()).map(text).collect();
        Ok((Generation::start(state, requests, &Parser::raw(), false)?, texts))
    };
    let (generation, texts) = blocking(&state, start).await?;
    let head = Head { id, model, created: now(), backend: backend.clone(), with_logprobs };
    if streams {
        return stream::respond(&state, generation, TextStream { head, usage, texts }).await;
    }
    collect(generation, head, texts).await
}

impl Prompt {
    /// Token ids of each prompt.
    pub(crate) fn tokens(self, param: &str, backend: &dyn Backend, special: bool) -> Result<Vec<Vec<u32>>> {
        let lists = match self {
            Self::Text(text) => vec![backend.encode(&text, special)?],
            Self::Texts(texts) => texts.iter().map(|t| Ok(backend.encode(t, special)?)).collect::<Result<Vec<_>>>()?,
            Self::Tokens(tokens) => vec![tokens],
            Self::Lists(lists) => lists,
        };
        let vocab = backend.model().vocab;
        if let Some(id) = lists.iter().flatten().find(|&&id| id as usize >= vocab) {
            let message = format!("`{param}` has token {id}, but tokens go from 0 to {}", vocab - 1);
            return Err(ApiError::invalid(param, message));
        }
        Ok(lists)
    }
}

impl CompletionRequest {
    /// Requests for the engine, and what their answers begin with.
    fn prepare(self, state: &State, common: &Common, salt: u64) -> Result<(Vec<Request>, Vec<String>)> {
        let (backend, limits) = (state.backend()?.as_ref(), &state.config.limits);
        let mut sampling = common.sampling(backend.model(), limits)?;
        let n = common.n(limits)?;
        if self.suffix.as_deref().is_some_and(|s| !s.is_empty()) {
            return Err(ApiError::invalid("suffix", "`suffix`: is not offered"));
        }
        if let Some(best_of) = self.best_of.filter(|&b| b != n) {
            let message = format!("`best_of` is {best_of}, but only as many as `n`, {n}, are made");
            return Err(ApiError::invalid("best_of", message));
        }
        if let Some(count) = self.logprobs {
            sampling.logprobs = Some(within("logprobs", count, 0, limits.logprobs)?);
        }
        let echo = self.echo == Some(true);
        if echo && self.logprobs.is_some() {
            return Err(ApiError::invalid("echo", "`echo` with `logprobs`: prompts have no log probabilities here"));
        }
        let prompts = self.prompt.tokens("prompt", backend, self.add_special_tokens != Some(false))?;
        if prompts.is_empty() || prompts.len().saturating_mul(n) > limits.n {
            let message = format!(
                "`prompt` has {} prompts of {n} answers, but from 1 to {} answers are made",
                prompts.len(),
                limits.n
            );
            return Err(ApiError::invalid("prompt", message));
        }
        let (mut requests, mut begin) = (Vec::new(), Vec::new());
        for prompt in prompts {
            if echo {
                begin.push(backend.decode(&prompt)?);
            }
            // What fits, if that is less than the default.
            let room = backend.model().context.saturating_sub(prompt.len()).max(1);
            let most = ("max_tokens", Some(self.max_tokens.unwrap_or(MAX_TOKENS.min(room))));
            requests.push(engine_request(state, common, salt, prompt, sampling.clone(), ("prompt", most))?);
        }
        Ok((requests, begin))
    }
}

struct Head {
    id: String,
    model: String,
    created: u64,
    backend: Arc<dyn Backend>,
    with_logprobs: bool,
}

impl Head {
    fn completion(&self, choices: Vec<CompletionChoice>, usage: Option<Option<Usage>>) -> Completion {
        Completion {
            id: self.id.clone(),
            object: "text_completion",
            created: self.created,
            model: self.model.clone(),
            system_fingerprint: FINGERPRINT,
            choices,
            usage,
        }
    }
}

/// One answer so far.
#[derive(Default)]
struct Text {
    /// What it begins with.
    echo: String,
    text: String,
    /// Characters of the tokens so far.
    offset: usize,
    logprobs: CompletionLogprobs,
    reason: Option<FinishReason>,
}

impl Text {
    fn push(&mut self, pieces: Vec<Piece>) {
        for piece in pieces {
            if let Piece::Content(text) = piece {
                self.text += &text;
            }
        }
    }

    fn log(&mut self, backend: &dyn Backend, of: &TokenLogprobs) {
        let ChatLogprob { token, logprob, top_logprobs, .. } = ChatLogprob::new(backend, of);
        self.logprobs.text_offset.push(self.offset);
        self.offset += token.chars().count();
        let mut top: BTreeMap<String, f32> = top_logprobs.into_iter().map(|l| (l.token, l.logprob)).collect();
        top.insert(token.clone(), logprob);
        self.logprobs.tokens.push(token);
        self.logprobs.token_logprobs.push(logprob);
        self.logprobs.top_logprobs.push(top);
    }

    /// What has come since the last call.
    fn take(&mut self, index: usize, with_logprobs: bool) -> CompletionChoice {
        CompletionChoice {
            index,
            text: std::mem::take(&mut self.text),
            logprobs: with_logprobs.then(|| std::mem::take(&mut self.logprobs)),
            finish_reason: self.reason,
        }
    }
}

async fn collect(mut generation: Generation, head: Head, mut texts: Vec<Text>) -> Result<Response> {
    for text in &mut texts {
        text.text = std::mem::take(&mut text.echo);
    }
    while let Some(update) = generation.next().await {
        take(&head, update?, &mut texts);
    }
    let choices = texts.iter_mut().enumerate().map(|(i, t)| t.take(i, head.with_logprobs)).collect();
    Ok(Json(head.completion(choices, Some(Some(generation.total.into())))).into_response())
}

/// Adds an update to the text of its choice, which is returned.
fn take(head: &Head, update: Update, texts: &mut [Text]) -> usize {
    match update {
        Update::Token { choice, pieces, logprobs } => {
            texts[choice].push(pieces);
            if let Some(of) = &logprobs {
                texts[choice].log(head.backend.as_ref(), of);
            }
            choice
        }
        Update::End { choice, pieces, length } => {
            texts[choice].push(pieces);
            texts[choice].reason = Some(if length { FinishReason::Length } else { FinishReason::Stop });
            choice
        }
    }
}

struct TextStream {
    head: Head,
    usage: bool,
    texts: Vec<Text>,
}

impl Encode for TextStream {
    fn encode(&mut self, step: Step, out: &mut String) {
        let no_usage = self.usage.then_some(None);
        match step {
            Step::Begin => {
                for (i, text) in self.texts.iter_mut().enumerate().filter(|(_, t)| !t.echo.is_empty()) {
                    text.text = std::mem::take(&mut text.echo);
                    let choice = text.take(i, false);
                    stream::data(out, &self.head.completion(vec![choice], no_usage));
                }
            }
            Step::Update(update) => {
                let i = take(&self.head, update, &mut self.texts);
                let choice = self.texts[i].take(i, self.head.with_logprobs);
                let told = choice.logprobs.as_ref().is_some_and(|l| !l.tokens.is_empty());
                if !choice.text.is_empty() || told || choice.finish_reason.is_some() {
                    stream::data(out, &self.head.completion(vec![choice], no_usage));
                }
            }
            Step::End(total) => {
                if self.usage {
                    stream::data(out, &self.head.completion(vec![], Some(Some(total.into()))));
                }
                out.push_str("data: [DONE]\n\n");
            }
            Step::Failed(e) => stream::data(out, &e.body),
        }
    }
}
