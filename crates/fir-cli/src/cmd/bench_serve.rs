//! `fir bench serve`: open-loop load on a running server. Requests begin when they are due, whether or not others have
//! ended, so a server that falls behind shows it in its times.

mod arrivals;
mod client;
mod report;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::Args;
use serde_json::{Value, json};
use std::io::Write;

use self::arrivals::Arrival;
use self::client::{Client, Outcome};

/// Options of `fir bench serve`.
#[derive(Args, Clone, Debug)]
pub(crate) struct Options {
    /// The server
    #[arg(long, default_value = "http://127.0.0.1:8000")]
    url: String,
    /// A key of the server
    #[arg(long)]
    api_key: Option<String>,
    /// Requests per second, at random (Poisson) times
    #[arg(long, default_value_t = 1.0, conflicts_with = "trace")]
    rate: f64,
    /// Arrivals and lengths of a trace: CSV (TIMESTAMP,ContextTokens,GeneratedTokens) or JSON lines (timestamp in ms,
    /// input_length, output_length)
    #[arg(long)]
    trace: Option<PathBuf>,
    /// How much faster the trace is replayed than it was recorded
    #[arg(long, default_value_t = 1.0)]
    speed: f64,
    /// How many requests
    #[arg(long, default_value_t = 64)]
    requests: usize,
    /// Tokens of a prompt; of a trace, the most that are sent
    #[arg(long, default_value_t = 256)]
    input: usize,
    /// Tokens of an answer; of a trace, the most that are asked for
    #[arg(long, default_value_t = 64)]
    output: usize,
    /// Chooses times and prompts
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Writes the report, with every request, as JSON
    #[arg(long)]
    json: Option<PathBuf>,
    /// Draws how the times are distributed
    #[arg(long)]
    svg: Option<PathBuf>,
}

pub(crate) fn run(options: &Options, out: &mut impl Write) -> Result<bool> {
    let arrivals = match &options.trace {
        Some(path) => arrivals::of_trace(path, options.requests, options.speed, options.input, options.output)?,
        None => arrivals::poisson(options.rate, options.requests, options.input, options.output, options.seed)?,
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let (outcomes, wall) = runtime.block_on(load(options, &arrivals))?;
    let report = report::Report::new(&arrivals, &outcomes, wall);
    write!(out, "{}", report.table())?;
    if let Some(path) = &options.json {
        let text = serde_json::to_string_pretty(&report.json(&arrivals, &outcomes))?;
        std::fs::write(path, text).with_context(|| format!("--json {}", path.display()))?;
    }
    if let Some(path) = &options.svg {
        std::fs::write(path, report.svg()).with_context(|| format!("--svg {}", path.display()))?;
    }
    Ok(report.failed() == 0)
}

/// How long a server may take to load its model.
const PATIENCE: Duration = Duration::from_secs(120);

/// Text whose tokens prompts are made of.
const TEXT: &str = "The river had been rising since morning, and by noon the lower fields were under water. Nobody in \
the village remembered such a spring. The miller counted his sacks twice, the schoolmaster sent the children home, and \
the ferryman tied his boat to the church gate, where it knocked against the stones like a visitor who will not leave.";

async fn load(options: &Options, arrivals: &[Arrival]) -> Result<(Vec<Outcome>, Duration)> {
    let client = Arc::new(Client::new(&options.url, options.api_key.as_deref())?);
    let ask = json!({"prompt": TEXT, "add_special_tokens": false});
    let mut told = client.post("/tokenize", &ask).await;
    // A server that has just been started is still loading its model.
    let patience = Instant::now() + PATIENCE;
    while told.as_ref().is_err_and(|e| e.to_string().contains("503")) && Instant::now() < patience {
        tokio::time::sleep(Duration::from_millis(250)).await;
        told = client.post("/tokenize", &ask).await;
    }
    let told = told?;
    let words: Vec<Value> = told["tokens"].as_array().cloned().unwrap_or_default();
    if words.is_empty() {
        bail!("{}: /tokenize gave no tokens: {told}", options.url);
    }
    let model = client.get("/v1/models").await?["data"][0]["id"].clone();
    let begin = Instant::now();
    let mut tasks = Vec::with_capacity(arrivals.len());
    for (i, arrival) in arrivals.iter().enumerate() {
        // Every prompt begins at another word, or all but the first would be found in the prefix cache.
        let from = arrivals::mix(options.seed, i as u64) as usize;
        let prompt: Vec<&Value> =
            (0..arrival.input).map(|t| &words[(from + t * (1 + from % 7)) % words.len()]).collect();
        let body = json!({
            "model": model, "prompt": prompt, "max_tokens": arrival.output, "min_tokens": arrival.output,
            "ignore_eos": true, "temperature": 0, "stream": true, "stream_options": {"include_usage": true},
        });
        let body = body.to_string();
        let client = client.clone();
        tokio::time::sleep_until((begin + arrival.at).into()).await;
        tasks.push(tokio::spawn(async move { client.complete(body, begin).await }));
    }
    let mut outcomes = Vec::with_capacity(tasks.len());
    for task in tasks {
        outcomes.push(task.await?);
    }
    Ok((outcomes, begin.elapsed()))
}
