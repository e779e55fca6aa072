//! The engine of `fir-engine` as a [`Backend`].

use std::sync::Arc;
use std::time::Duration;

use fir_engine::stats::Stats;
use fir_engine::{Error, Handle, Health, Model, Request, Result};
use serde_json::{Map, Value};

use crate::backend::{Abort, Backend, ModelInfo, Sink, ToolFormat};

/// A running engine and the model it runs.
pub struct EngineBackend {
    handle: Handle,
    model: Arc<Model>,
    info: ModelInfo,
}

impl EngineBackend {
    /// Serves `model`, which `handle` runs, as `name`.
    pub fn new(handle: Handle, model: Arc<Model>, name: String) -> Self {
        let template = model.chat().map_or("", |c| c.source());
        let info = ModelInfo {
            id: name,
            context: handle.context(),
            vocab: model.config().vocab,
            tools: ToolFormat::of_template(template),
        };
        Self { handle, model, info }
    }
}

impl Backend for EngineBackend {
    fn model(&self) -> &ModelInfo {
        &self.info
    }

    fn submit(&self, request: Request, sink: Sink) -> Result<Abort> {
        let id = self.handle.submit(request, sink)?;
        let handle = self.handle.clone();
        Ok(Box::new(move || handle.abort(id)))
    }

    fn health(&self) -> Result<()> {
        match self.handle.health() {
            Health::Ok | Health::Draining => Ok(()),
            Health::Stuck(time) => Err(Error::Stopped(format!("a step has run for {:.0} s", time.as_secs_f64()))),
            Health::Stopped { reason, .. } => Err(Error::Stopped(reason)),
        }
    }

    fn drain(&self, timeout: Duration) {
        self.handle.drain(timeout);
    }

    fn forget_prefixes(&self) -> Result<()> {
        self.handle.forget_prefixes().map(|_| ())
    }

    fn stats(&self) -> Stats {
        self.handle.stats()
    }

    fn embed(&self, tokens: &[u32]) -> Result<Vec<f32>> {
        self.handle.embed(tokens)
    }

    fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>> {
        self.model.tokenizer().encode(text, special)
    }

    fn decode(&self, tokens: &[u32]) -> Result<String> {
        Ok(self.model.tokenizer().decode(tokens))
    }

    fn token_bytes(&self, id: u32) -> Vec<u8> {
        self.model.tokenizer().token_bytes(id).to_vec()
    }

    fn render(
        &self,
        messages: &Value,
        tools: Option<&Value>,
        reply: bool,
        extra: &Map<String, Value>,
    ) -> Result<String> {
        let Some(chat) = self.model.chat() else {
            let why = format!("{} has no chat template; use /v1/completions", self.info.id);
            return Err(Error::Request { field: "messages", why });
        };
        chat.render(messages, tools, reply, Some(&Value::Object(extra.clone())))
    }
}
