//! `POST /v1/completions`.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, LazyLock};

use axum::Json;
use axum::extract::State as Shared;
use axum::response::{IntoResponse, Response};
use fir_engine::{Request, TokenLogprobs};
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Map, Value};

use super::types::{ChatLogprob, Completion, CompletionChoice, CompletionLogprobs, FINGERPRINT, FinishReason, Usage};
use crate::asked::Asked;
use crate::backend::Backend;
use crate::conversation::{blocking, engine_request, served};
use crate::error::{ApiError, Result};
use crate::generation::{Generation, Total, Update};
use crate::params::{Common, fields, part, within};
use crate::parse::{Parser, Piece};
use crate::state::{State, now};
use crate::stream::{self, Encode, Step};

/// What a completion has beside [`Common`].
#[derive(Debug, Deserialize, JsonSchema)]
pub(crate) struct CompletionRequest {
    prompt: Prompt,
    /// Most tokens of an answer; 0 goes with `echo`.
    max_tokens: Option<usize>,
    /// The answer begins with the prompt; with `logprobs`, so do these.
    echo: Option<bool>,
    /// Log probabilities of so many tokens beside the chosen one.
    #[schemars(range(min = 0, max = 20))]
    logprobs: Option<usize>,
    /// Answers of which the `n` likeliest are told, by the mean of their tokens' log probabilities; not in a stream.
    #[schemars(range(min = 1, max = 64))]
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
    let (with_logprobs, silent) = (completion.logprobs.is_some(), completion.max_tokens == Some(0));
    let n = common.n(&state.config.limits)?;
    let start = move |state: &Arc<State>| {
        let (requests, echo) = completion.prepare(state, &common, asked.salt)?;
        let made = requests.first().map_or(1, |r| r.n);
        let text = |i: usize| echo.get(i / made).map_or_else(Text::default, |echo| Text::echoing(echo, with_logprobs));
        let texts: Vec<Text> = (0..made * requests.len()).map(text).collect();
        Ok((Generation::start(state, requests, &Parser::raw(), false)?, texts, made))
    };
    let (generation, texts, made) = blocking(&state, start).await?;
    let head = Head { id, model, created: now(), backend: backend.clone(), with_logprobs, silent, made };
    if streams {
        return stream::respond(&state, generation, TextStream { head, usage, texts }).await;
    }
    collect(generation, head, texts, n).await
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
    fn prepare(self, state: &State, common: &Common, salt: u64) -> Result<(Vec<Request>, Vec<Echo>)> {
        let (backend, limits) = (state.backend()?.as_ref(), &state.config.limits);
        let mut sampling = common.sampling(backend.model(), limits)?;
        let n = common.n(limits)?;
        if self.suffix.as_deref().is_some_and(|s| !s.is_empty()) {
            return Err(ApiError::invalid("suffix", "`suffix`: is not offered"));
        }
        let made = within("best_of", self.best_of.unwrap_or(n), n, limits.n)?;
        if made > n {
            if common.stream == Some(true) {
                let message =
                    format!("`best_of` is {made}, but a stream cannot take back what it has told: set it to {n}");
                return Err(ApiError::invalid("best_of", message));
            }
            sampling.logprobs = Some(0);
        }
        let echo = self.echo == Some(true);
        if let Some(count) = self.logprobs {
            sampling.logprobs = Some(within("logprobs", count, 0, limits.logprobs)?);
            sampling.prompt_logprobs = sampling.logprobs.filter(|_| echo);
        }
        if self.max_tokens == Some(0) && !echo {
            let message = "`max_tokens` is 0, but must be from 1, or 0 with `echo`";
            return Err(ApiError::invalid("max_tokens", message));
        }
        let prompts = self.prompt.tokens("prompt", backend, self.add_special_tokens != Some(false))?;
        if prompts.is_empty() || prompts.len().saturating_mul(made) > limits.n {
            let message = format!(
                "`prompt` has {} prompts of {made} answers, but from 1 to {} answers are made",
                prompts.len(),
                limits.n
            );
            return Err(ApiError::invalid("prompt", message));
        }
        let (mut requests, mut begin) = (Vec::new(), Vec::new());
        for prompt in prompts {
            if echo {
                begin.push(Echo { text: backend.decode(&prompt)?, tokens: prompt.clone() });
            }
            // What fits, if that is less than the default. A token is made in any case, told or not.
            let room = backend.model().context.saturating_sub(prompt.len()).max(1);
            let most = ("max_tokens", Some(self.max_tokens.unwrap_or(MAX_TOKENS.min(room)).max(1)));
            let request = engine_request(state, common, salt, prompt, sampling.clone(), ("prompt", most))?;
            requests.push(Request { n: made, ..request });
        }
        Ok((requests, begin))
    }
}

/// What an answer begins with.
struct Echo {
    text: String,
    tokens: Vec<u32>,
}

struct Head {
    id: String,
    model: String,
    created: u64,
    backend: Arc<dyn Backend>,
    with_logprobs: bool,
    /// Only the prompt is told.
    silent: bool,
    /// Answers to each prompt.
    made: usize,
}

impl Head {
    /// What was told of what was made.
    fn total(&self, total: Total) -> Total {
        Total { generated: if self.silent { 0 } else { total.generated }, ..total }
    }

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
    text: String,
    /// Characters of the tokens so far.
    offset: usize,
    logprobs: CompletionLogprobs,
    /// Tokens of the prompt whose log probabilities are still to come: nothing is told before them.
    prompt: Option<Vec<u32>>,
    /// Sum of the tokens' log probabilities, and how many they are.
    score: (f64, usize),
    reason: Option<FinishReason>,
}

impl Text {
    /// One that begins with its prompt, with or without log probabilities.
    fn echoing(echo: &Echo, with_logprobs: bool) -> Self {
        Self { text: echo.text.clone(), prompt: with_logprobs.then(|| echo.tokens.clone()), ..Self::default() }
    }

    /// The prompt's tokens go before what has come so far.
    fn begin(&mut self, backend: &dyn Backend, scores: &[TokenLogprobs]) {
        let Some(tokens) = self.prompt.take() else { return };
        let later = std::mem::take(&mut self.logprobs);
        let characters = std::mem::take(&mut self.offset);
        if let Some(&first) = tokens.first() {
            let token = String::from_utf8_lossy(&backend.token_bytes(first)).into_owned();
            self.offset = token.chars().count();
            self.logprobs = CompletionLogprobs {
                tokens: vec![token],
                token_logprobs: vec![None],
                top_logprobs: vec![None],
                text_offset: vec![0],
            };
        }
        scores.iter().for_each(|of| self.log(backend, of));
        let all = &mut self.logprobs;
        all.tokens.extend(later.tokens);
        all.token_logprobs.extend(later.token_logprobs);
        all.top_logprobs.extend(later.top_logprobs);
        all.text_offset.extend(later.text_offset.iter().map(|at| at + self.offset));
        self.offset += characters;
    }

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
        self.logprobs.token_logprobs.push(Some(logprob));
        self.logprobs.top_logprobs.push(Some(top));
    }

    /// The mean of its tokens' log probabilities.
    fn likelihood(&self) -> f64 {
        self.score.0 / self.score.1.max(1) as f64
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

/// All answers at once; of those to each prompt, the `n` likeliest.
async fn collect(mut generation: Generation, head: Head, mut texts: Vec<Text>, n: usize) -> Result<Response> {
    while let Some(update) = generation.next().await {
        take(&head, update?, &mut texts);
    }
    if head.made > n {
        for answers in texts.chunks_mut(head.made) {
            answers.sort_by(|a, b| b.likelihood().total_cmp(&a.likelihood()));
        }
        let mut at = 0..;
        texts.retain(|_| at.next().is_some_and(|i: usize| i % head.made < n));
    }
    let choices = texts.iter_mut().enumerate().map(|(i, t)| t.take(i, head.with_logprobs)).collect();
    let total = head.total(generation.total);
    Ok(Json(head.completion(choices, Some(Some(total.into())))).into_response())
}

/// Adds an update to the texts of its choices, which are returned.
fn take(head: &Head, update: Update, texts: &mut [Text]) -> Range<usize> {
    match update {
        Update::Prompt { prompt, logprobs } => {
            let choices = prompt * head.made..(prompt + 1) * head.made;
            for text in &mut texts[choices.clone()] {
                text.begin(head.backend.as_ref(), &logprobs);
            }
            choices
        }
        Update::Token { choice, pieces, logprobs } => {
            let text = &mut texts[choice];
            if !head.silent {
                text.push(pieces);
                if let Some(of) = &logprobs {
                    text.score = (text.score.0 + f64::from(of.chosen.logprob), text.score.1 + 1);
                    text.log(head.backend.as_ref(), of);
                }
            }
            choice..choice + 1
        }
        Update::End { choice, pieces, length, .. } => {
            let text = &mut texts[choice];
            if !head.silent {
                text.push(pieces);
            }
            text.reason = Some(if length || head.silent { FinishReason::Length } else { FinishReason::Stop });
            choice..choice + 1
        }
    }
}

struct TextStream {
    head: Head,
    usage: bool,
    texts: Vec<Text>,
}

impl TextStream {
    /// What is new in these choices, as far as it may be told.
    fn tell(&mut self, choices: Range<usize>, out: &mut String) {
        for i in choices {
            if self.texts[i].prompt.is_some() {
                continue;
            }
            let choice = self.texts[i].take(i, self.head.with_logprobs);
            let told = choice.logprobs.as_ref().is_some_and(|l| !l.tokens.is_empty());
            if !choice.text.is_empty() || told || choice.finish_reason.is_some() {
                stream::data(out, &self.head.completion(vec![choice], self.usage.then_some(None)));
            }
        }
    }
}

impl Encode for TextStream {
    fn encode(&mut self, step: Step, out: &mut String) {
        match step {
            Step::Begin => self.tell(0..self.texts.len(), out),
            Step::Update(update) => {
                let choices = take(&self.head, update, &mut self.texts);
                self.tell(choices, out);
            }
            Step::End(total) => {
                if self.usage {
                    let total = self.head.total(total);
                    stream::data(out, &self.head.completion(vec![], Some(Some(total.into()))));
                }
                out.push_str("data: [DONE]\n\n");
            }
            Step::Failed(e) => stream::data(out, &e.body),
        }
    }
}
