//! `fir bench perplexity` and `fir bench needle`: what a model's answers are worth by the whole road, with KV of any type.

use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::channel;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use fir::Exec;
use fir_engine::pull::DEFAULT_MODEL;
use fir_engine::{Batch, Config, Engine, Event, KvCache, KvType, Limits, Model, Request, Runner, Sampling, Seq};
use serde_json::{Value, json};

use super::pull::fetched;

/// What both measure.
#[derive(Args, Clone, Debug)]
struct Common {
    /// A GGUF file, a folder of safetensors, pypi:PACKAGE or hf:ORG/REPO
    #[arg(long, default_value = DEFAULT_MODEL)]
    model: String,
    /// The text
    #[arg(long)]
    text: PathBuf,
    /// Bytes of the text that are left out at its beginning
    #[arg(long, default_value_t = 0)]
    skip: usize,
    /// Types of cached keys and values
    #[arg(long, value_delimiter = ',', default_value = "bf16,fp8,fp4")]
    kv: Vec<KvType>,
    /// Writes the results as JSON
    #[arg(long)]
    json: Option<PathBuf>,
}

impl Common {
    fn load(&self) -> Result<(Arc<Model>, String)> {
        let path = fetched(&self.model)?;
        let model = Model::load(&Exec::cpu()?, &path).with_context(|| format!("loading {}", self.model))?;
        let text = std::fs::read(&self.text).with_context(|| format!("--text {}", self.text.display()))?;
        let rest = text.get(self.skip..).unwrap_or_default();
        Ok((Arc::new(model), String::from_utf8_lossy(rest).into_owned()))
    }

    fn save(&self, value: &Value) -> Result<()> {
        let Some(path) = &self.json else { return Ok(()) };
        std::fs::write(path, value.to_string()).with_context(|| format!("--json {}", path.display()))
    }
}

/// Options of `fir bench perplexity`.
#[derive(Args, Clone, Debug)]
pub(crate) struct PerplexityOptions {
    #[command(flatten)]
    common: Common,
    /// Tokens of the text
    #[arg(long, default_value_t = 4096)]
    tokens: usize,
    /// It is cut into pieces of so many; the second half of each is predicted
    #[arg(long, default_value_t = 512)]
    context: usize,
}

const PAGE: usize = 16;

pub(crate) fn perplexity(options: &PerplexityOptions, out: &mut impl Write) -> Result<bool> {
    let (model, text) = options.common.load()?;
    let &PerplexityOptions { tokens, context, .. } = options;
    ensure!(context >= 4 && context <= model.config().context, "--context {context} must be 4 to the model's");
    // As much text as so many tokens can be, and not all of a book.
    let text: String = text.chars().take(tokens.saturating_mul(16)).collect();
    let mut ids = model.tokenizer().encode(&text, false)?;
    ids.truncate(tokens);
    let pieces: Vec<&[u32]> = ids.chunks_exact(context).collect();
    if pieces.is_empty() {
        bail!("the text has {} tokens, expected {context} at least", ids.len());
    }
    // What the model wants at the start of a sequence stands there, in the place of the piece's first token.
    let start = model.tokenizer().encode("", true)?.first().copied();
    let half = context / 2;
    let mut results = Vec::new();
    for &kv_type in &options.common.kv {
        let pages: Vec<u32> = (0..context.div_ceil(PAGE) as u32).collect();
        let mut kv = KvCache::new(&model, pages.len(), PAGE, kv_type)?;
        let mut runner = Runner::new(&model, Limits { max_tokens: context, max_seqs: 1, max_logits: half })?;
        let rows: Vec<u32> = (context as u32 - half as u32 - 1..context as u32 - 1).collect();
        let mut losses: Vec<f64> = Vec::new();
        for piece in &pieces {
            let mut piece = piece.to_vec();
            if let Some(start) = start {
                piece[0] = start;
            }
            let seqs = [Seq { new: context, past: 0, pages: &pages, ..Seq::default() }];
            let batch = Batch { tokens: &piece, seqs: &seqs, logits: &rows, shared: &[] };
            let logits = runner.step(model.exec(), &model, &mut kv, &batch)?;
            for (row, logits) in rows.iter().zip(logits.chunks_exact(model.config().vocab)) {
                losses.push(loss(logits, piece[*row as usize + 1] as usize));
            }
        }
        let n = losses.len() as f64;
        let mean = losses.iter().sum::<f64>() / n;
        let spread = (losses.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / (n * (n - 1.0).max(1.0))).sqrt();
        let (value, error) = (mean.exp(), mean.exp() * spread);
        writeln!(out, "{kv_type:<6} perplexity {value:.4} ± {error:.4} over {n} tokens")?;
        results.push(json!({"kv": kv_type.to_string(), "perplexity": value, "error": error, "tokens": n}));
    }
    let pieces: Vec<Vec<u32>> = pieces.iter().map(|p| p.to_vec()).collect();
    options.common.save(&json!({"pieces": pieces, "context": context, "start": start, "results": results}))?;
    Ok(true)
}

/// `-ln p` of one token.
fn loss(logits: &[f32], token: usize) -> f64 {
    let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&l| f64::from(l - most).exp()).sum();
    f64::from(most) + sum.ln() - f64::from(logits[token])
}

/// Options of `fir bench needle`.
#[derive(Args, Clone, Debug)]
pub(crate) struct NeedleOptions {
    #[command(flatten)]
    common: Common,
    /// Tokens of the haystacks
    #[arg(long, value_delimiter = ',', default_value = "512,1024,2048,4096")]
    lengths: Vec<usize>,
    /// How many places of the needle in each, from the start to the end
    #[arg(long, default_value_t = 5)]
    places: usize,
}

/// A haystack's needle: what is asked for, and where it was put.
struct Needle {
    length: usize,
    place: usize,
    prompt: Vec<u32>,
    answer: String,
}

pub(crate) fn needle(options: &NeedleOptions, out: &mut impl Write) -> Result<bool> {
    let (model, text) = options.common.load()?;
    let needles = needles(options, &model, &text)?;
    let mut results = Vec::new();
    for &kv_type in &options.common.kv {
        let longest = needles.iter().map(|n| n.prompt.len() + 32).max().unwrap_or(1);
        let config = Config {
            kv_type,
            context: Some(longest.min(model.config().context)),
            max_seqs: 4,
            drafts: 0,
            warm_up: false,
            ..Config::default()
        };
        let handle = Engine::start(Arc::clone(&model), config)?;
        let mut found = Vec::new();
        for needle in &needles {
            let (tx, events) = channel();
            let sampling = Sampling { temperature: 0.0, max_tokens: 24, ..Sampling::default() };
            let request = Request { prompt: needle.prompt.clone(), sampling, ..Request::default() };
            handle.submit(request, move |event| tx.send(event).is_ok())?;
            let mut said = String::new();
            for event in events {
                match event {
                    Event::Token { text, .. } | Event::Finished { text, .. } => said += &text,
                    Event::Prompt(_) => {}
                    Event::Failed(why) => bail!("{why}"),
                }
            }
            found.push((said.contains(&needle.answer), said));
        }
        let all = found.iter().filter(|f| f.0).count();
        write!(out, "{kv_type:<6} {all} of {} found;", found.len())?;
        for chunk in needles.iter().zip(&found).collect::<Vec<_>>().chunks(options.places) {
            let marks: String = chunk.iter().map(|(_, f)| if f.0 { '+' } else { '-' }).collect();
            write!(out, "  {} {marks}", chunk[0].0.length)?;
        }
        writeln!(out)?;
        let each: Vec<Value> = needles.iter().zip(&found).map(|(n, (found, said))| {
            json!({"length": n.length, "place": n.place, "answer": n.answer, "found": found, "said": said, "prompt": n.prompt})
        }).collect();
        results.push(json!({"kv": kv_type.to_string(), "found": all, "of": found.len(), "each": each}));
    }
    options.common.save(&json!(results))?;
    Ok(true)
}

fn needles(options: &NeedleOptions, model: &Model, text: &str) -> Result<Vec<Needle>> {
    let Some(chat) = model.chat() else { bail!("{} has no chat template", model.config().name) };
    let longest = options.lengths.iter().copied().max().unwrap_or(0);
    let text: String = text.chars().take(longest.saturating_mul(16)).collect();
    let hay = model.tokenizer().encode(&text, false)?;
    let mut needles = Vec::new();
    for &length in options.lengths.iter().filter(|&&n| n + 128 <= model.config().context) {
        ensure!(hay.len() >= length, "the text has {} tokens, expected {length}", hay.len());
        let text = model.tokenizer().decode(&hay[..length]);
        for place in 0..options.places {
            let mut at = text.len() * place / options.places.max(2).saturating_sub(1);
            // Between words.
            while !text.is_char_boundary(at) || (at > 0 && at < text.len() && text.as_bytes()[at] != b' ') {
                at += 1;
            }
            let answer = (10_000 + (length * 31 + place * 7919) % 90_000).to_string();
            let (before, after) = text.split_at(at.min(text.len()));
            let content = format!(
                "{before} The secret number of the garden is {answer}. {after}\n\nWhat is the secret number of the garden? \
                 Answer with the number alone."
            );
            let prompt = chat.render(&json!([{"role": "user", "content": content}]), None, true, None)?;
            let prompt = model.tokenizer().encode(&prompt, false)?;
            needles.push(Needle { length, place, prompt, answer });
        }
    }
    Ok(needles)
}
