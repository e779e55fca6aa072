//! What a caller asks of the engine, and what comes back.

use std::time::Instant;

use crate::runner::Sparse;

/// One prompt and how to continue it.
#[derive(Clone, Debug)]
pub struct Request {
    /// Token ids; not empty.
    pub prompt: Vec<u32>,
    /// How tokens are chosen and when to stop.
    pub sampling: Sampling,
    /// Continuations of the one prompt; they share its KV.
    pub n: usize,
    /// Larger runs first; 0 by default.
    pub priority: i32,
    /// A request still waiting then is finished with [`Finish::Deadline`].
    pub deadline: Option<Instant>,
    /// Prefixes are shared among requests of the same salt only.
    pub salt: u64,
    /// What its tokens attend to.
    pub attention: Attention,
}

impl Default for Request {
    /// One continuation of an empty prompt, which is to be filled in.
    fn default() -> Self {
        Self {
            prompt: Vec::new(),
            sampling: Sampling::default(),
            n: 1,
            priority: 0,
            deadline: None,
            salt: 0,
            attention: Attention::Full,
        }
    }
}

/// What a request's tokens attend to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Attention {
    /// All before them.
    #[default]
    Full,
    /// The first `sinks` and the last `window` tokens, both rounded up to whole pages, at the positions that they have
    /// among what is kept: a text of any length in memory of that size.
    Streaming {
        /// Tokens at the start that are kept.
        sinks: usize,
        /// Tokens at the end that are kept.
        window: usize,
    },
    /// Tokens of the prompt see some blocks of it; those of the answer see all.
    Sparse(Sparse),
}

impl Attention {
    /// Whether what its tokens leave in pages is what other requests would: prefixes can be shared then.
    pub(crate) fn shares(self) -> bool {
        self == Self::Full
    }
}

/// How tokens are chosen and when to stop. `Default` is greedy-free plain sampling: temperature 1, no filter.
#[derive(Clone, Debug)]
pub struct Sampling {
    /// 0 takes the likeliest token.
    pub temperature: f32,
    /// The likeliest so many; 0 is all.
    pub top_k: u32,
    /// The likeliest that together have this probability; 1 is all.
    pub top_p: f32,
    /// Only tokens with at least this share of the likeliest one's probability.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of seen tokens; 1 is off.
    pub repetition_penalty: f32,
    /// Subtracted per occurrence in the output.
    pub frequency_penalty: f32,
    /// Subtracted once for tokens in the output.
    pub presence_penalty: f32,
    /// Added to logits.
    pub logit_bias: Vec<(u32, f32)>,
    /// If given, no other token is ever chosen.
    pub allowed_tokens: Option<Vec<u32>>,
    /// The same seed gives the same tokens; without one, the engine takes a fresh one.
    pub seed: Option<u64>,
    /// Log probabilities of the chosen token and so many alternatives.
    pub logprobs: Option<usize>,
    /// Log probabilities of the prompt's tokens and so many alternatives: [`Event::Prompt`].
    pub prompt_logprobs: Option<usize>,
    /// Sequences of tokens that are never generated.
    pub bad_tokens: Vec<Vec<u32>>,
    /// At most so many tokens are generated.
    pub max_tokens: usize,
    /// No end before so many tokens.
    pub min_tokens: usize,
    /// Text that ends the answer; it is not part of it, unless `include_stop`.
    pub stop: Vec<String>,
    /// The text that ended the answer is part of it.
    pub include_stop: bool,
    /// Tokens that end the answer, beside the model's own.
    pub stop_ids: Vec<u32>,
    /// The model's own end tokens do not end the answer.
    pub ignore_eos: bool,
    /// What the text must be an instance of.
    pub grammar: Option<Grammar>,
}

impl Default for Sampling {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            logit_bias: Vec::new(),
            allowed_tokens: None,
            seed: None,
            logprobs: None,
            prompt_logprobs: None,
            bad_tokens: Vec::new(),
            max_tokens: 256,
            min_tokens: 0,
            stop: Vec::new(),
            include_stop: false,
            stop_ids: Vec::new(),
            ignore_eos: false,
            grammar: None,
        }
    }
}

/// What generated text must be an instance of.
#[derive(Clone, Debug)]
pub enum Grammar {
    /// Any JSON object.
    Json,
    /// JSON of this schema (the text of it).
    JsonSchema(String),
    /// A regular expression that matches the whole answer.
    Regex(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// A grammar in Lark's notation, as llguidance reads it.
    Lark(String),
}

/// One token's log probability.
#[derive(Clone, Debug)]
pub struct Logprob {
    /// The token.
    pub id: u32,
    /// Natural logarithm of its probability before temperature and filters.
    pub logprob: f32,
}

/// Log probabilities at one position.
#[derive(Clone, Debug)]
pub struct TokenLogprobs {
    /// Of the token chosen.
    pub chosen: Logprob,
    /// The likeliest ones, likeliest first; as many as asked for.
    pub top: Vec<Logprob>,
}

/// What the engine tells about a request, in order, per choice.
#[derive(Clone, Debug)]
pub enum Event {
    /// The prompt was read; of each of its tokens but the first, if that was asked for. Comes once, before the first token.
    Prompt(Vec<TokenLogprobs>),
    /// A token was generated.
    Token {
        /// Which of the `n` continuations.
        choice: usize,
        /// The token.
        id: u32,
        /// Text that is certain by now: whole characters, nothing that may yet become a stop text. May be empty.
        text: String,
        /// If asked for.
        logprobs: Option<TokenLogprobs>,
    },
    /// A continuation ended; `text` is what had been held back.
    Finished {
        /// Which of the `n` continuations.
        choice: usize,
        /// Text held back until now.
        text: String,
        /// Why.
        reason: Finish,
        /// Which of [`Sampling::stop`] ended it, if one did.
        stop: Option<usize>,
        /// Tokens of this continuation (and of the prompt, counted once).
        usage: Usage,
    },
    /// The request ended with an error; nothing follows.
    Failed(String),
}

/// Why a continuation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// An end token or a stop text.
    Stop,
    /// `max_tokens`, or the context is full.
    Length,
    /// The caller went away or asked for it.
    Aborted,
    /// It waited past its deadline.
    Deadline,
}

/// What a continuation cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt: usize,
    /// Of those, found in the prefix cache.
    pub cached: usize,
    /// Tokens generated.
    pub generated: usize,
}
