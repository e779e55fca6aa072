//! What the server asks of an engine. The tests' double is the other implementation.

use std::time::Duration;

use fir_engine::stats::Stats;
use fir_engine::{Event, Request, Result};
use serde_json::{Map, Value};

/// Takes what the engine tells about a request; false when nobody listens any more.
pub type Sink = Box<dyn FnMut(Event) -> bool + Send>;

/// Ends a request that may still wait or run; one that has ended is left alone.
pub type Abort = Box<dyn Fn() + Send + Sync>;

/// What the server says about the model it serves.
#[derive(Clone, Debug)]
pub struct ModelInfo {
    /// The name in `/v1/models`, which requests may give as `model`.
    pub id: String,
    /// Most tokens of a prompt and its answer.
    pub context: usize,
    /// Tokens there are.
    pub vocab: usize,
    /// How the model writes tool calls.
    pub tools: ToolFormat,
}

/// How a model writes a tool call into its text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToolFormat {
    /// `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, once per call: Hermes, Qwen.
    Hermes,
    /// `{"name": …, "parameters": {…}}` as the whole answer, several separated by `;`: Llama 3.
    Llama3,
}

impl ToolFormat {
    /// The format that a chat template teaches.
    pub fn of_template(template: &str) -> Self {
        let llama =
            !template.contains("<tool_call>") && (template.contains("<|python_tag|>") || template.contains("ipython"));
        if llama { Self::Llama3 } else { Self::Hermes }
    }
}

/// An engine, as the server sees it. What may take milliseconds (all but `health`, `stats` and `token_bytes`) is called
/// on threads that may block.
pub trait Backend: Send + Sync + 'static {
    /// The model served.
    fn model(&self) -> &ModelInfo;
    /// Queues a request, whose events go to `sink`; returns the way to end it before its time.
    fn submit(&self, request: Request, sink: Sink) -> Result<Abort>;
    /// An error once the engine has stopped by itself.
    fn health(&self) -> Result<()>;
    /// Waits until nothing runs, at most so long, then stops the engine.
    fn drain(&self, timeout: Duration);
    /// Forgets cached prefixes that nobody uses.
    fn forget_prefixes(&self) -> Result<()>;
    /// What the engine counts.
    fn stats(&self) -> Stats;
    /// The mean of the last hidden states.
    fn embed(&self, tokens: &[u32]) -> Result<Vec<f32>>;
    /// Tokens of a text; `special` adds what the model wants at the beginning.
    fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>>;
    /// The text of tokens.
    fn decode(&self, tokens: &[u32]) -> Result<String>;
    /// The bytes a token stands for; empty for ids that are no token.
    fn token_bytes(&self, id: u32) -> Vec<u8>;
    /// A conversation as the model's prompt.
    fn render(
        &self,
        messages: &Value,
        tools: Option<&Value>,
        reply: bool,
        extra: &Map<String, Value>,
    ) -> Result<String>;
}
