//! What may be set about a server.

use std::time::Duration;

/// What may be set about a server; `Default` suits one machine behind no proxy.
#[derive(Clone, Debug)]
pub struct Config {
    /// Keys of which a request must show one; none means that anybody may ask.
    pub api_keys: Vec<String>,
    /// Origins whose pages may ask, such as `https://chat.example.org`; `*` is all of them. Without any, browsers let only
    /// the server's own page ask.
    pub allow_origins: Vec<String>,
    /// How long requests that were accepted may take to end after a signal.
    pub drain: Duration,
    /// A request that has waited this long is answered 503.
    pub queue_timeout: Option<Duration>,
    /// Silence after which a stream gets a comment, so that proxies keep it open.
    pub keep_alive: Duration,
    /// Also tell metrics by vLLM's names.
    pub vllm_metrics: bool,
    /// What one request may ask for.
    pub limits: Limits,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            api_keys: Vec::new(),
            allow_origins: Vec::new(),
            drain: Duration::from_secs(30),
            queue_timeout: None,
            keep_alive: Duration::from_secs(5),
            vllm_metrics: false,
            limits: Limits::default(),
        }
    }
}

/// What one request may ask for. More is an error that names both values.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Bytes of a body.
    pub body: usize,
    /// Tokens of a prompt; the model's context is a limit of its own.
    pub prompt: usize,
    /// Answers to one prompt, and prompts of one request.
    pub n: usize,
    /// Stop texts.
    pub stop: usize,
    /// Bytes of a stop text, and of a word that must not come.
    pub stop_bytes: usize,
    /// Entries of a logit bias, and of other lists of tokens.
    pub logit_bias: usize,
    /// Alternatives with a log probability.
    pub logprobs: usize,
    /// Tools.
    pub tools: usize,
    /// Bytes of a schema, regular expression or grammar.
    pub schema: usize,
    /// Levels of a schema within each other.
    pub schema_depth: usize,
    /// Open connections.
    pub connections: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            body: 4 << 20,
            prompt: usize::MAX,
            n: 64,
            stop: 4,
            stop_bytes: 256,
            logit_bias: 1024,
            logprobs: 20,
            tools: 128,
            schema: 128 << 10,
            schema_depth: 32,
            connections: 4096,
        }
    }
}
