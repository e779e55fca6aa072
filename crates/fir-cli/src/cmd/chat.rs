//! `fir chat`: a conversation in the terminal.

use std::io::{BufRead, IsTerminal, Write, stderr, stdin};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Result;
use clap::Args;
use fir_engine::{Request, Sampling};
use fir_server::Backend;
use serde_json::{Map, Value, json};

use super::answer::stream;
use super::engine::{Start, start};
use super::serve::defaults;
use super::settings::{Settings, resolve};

/// Options of `fir chat`.
#[derive(Args, Clone, Debug)]
pub(crate) struct Options {
    /// A GGUF file, a folder of safetensors, pypi:PACKAGE or hf:ORG/REPO
    model: Option<String>,
    /// What the model is told beforehand
    #[arg(long)]
    system: Option<String>,
    /// At most so many tokens of an answer
    #[arg(long, default_value_t = 1024)]
    max_tokens: usize,
    /// 0 takes the likeliest token
    #[arg(long, default_value_t = 0.7)]
    temperature: f32,
    /// Of the likeliest tokens, those that together have this probability
    #[arg(long, default_value_t = 0.9)]
    top_p: f32,
    /// The same seed gives the same answers
    #[arg(long)]
    seed: Option<u64>,
    /// A TOML file with settings of the engine
    #[arg(long)]
    config: Option<PathBuf>,
}

const HELP: &str =
    "/reset begins anew, /system TEXT sets what the model is told, /exit or Ctrl-D ends; Ctrl-C stops an answer";

pub(crate) fn run(options: &Options, out: &mut impl Write) -> Result<bool> {
    let flags = Settings { model: options.model.clone(), max_running: Some(1), ..Settings::default() };
    let settings = resolve(&flags, options.config.as_deref(), &defaults())?.settings;
    let backend = start(&settings, Start::Quiet)?;
    let stopped = Arc::new(AtomicBool::new(false));
    let flag = stopped.clone();
    let answering = Arc::new(AtomicBool::new(false));
    let busy = answering.clone();
    ctrlc::set_handler(move || {
        // Between answers there is nothing to stop but the program.
        if !busy.load(Ordering::SeqCst) {
            std::process::exit(130);
        }
        flag.store(true, Ordering::SeqCst);
    })?;
    let prompt = stdin().is_terminal() && stderr().is_terminal();
    if prompt {
        eprintln!("{}: {HELP}", backend.model().id);
    }
    let mut chat = Chat { options, system: options.system.clone(), messages: Vec::new() };
    loop {
        if prompt {
            eprint!("\n> ");
        }
        let mut line = String::new();
        if stdin().lock().read_line(&mut line)? == 0 {
            return Ok(true);
        }
        match line.trim() {
            "" => {}
            "/exit" | "/quit" => return Ok(true),
            "/help" => eprintln!("{HELP}"),
            "/reset" => chat.messages.clear(),
            line if line.starts_with("/system") => {
                chat.system = Some(line["/system".len()..].trim().to_owned()).filter(|s| !s.is_empty());
                chat.messages.clear();
            }
            line if line.starts_with('/') => eprintln!("`{line}` is no command; {HELP}"),
            line => {
                stopped.store(false, Ordering::SeqCst);
                answering.store(true, Ordering::SeqCst);
                let answered = chat.answer(backend.as_ref(), line, &stopped, out);
                answering.store(false, Ordering::SeqCst);
                match answered {
                    Ok(summary) if prompt => eprintln!("{summary}"),
                    Ok(_) => {}
                    // A refused message is not part of the conversation; the next may do better.
                    Err(e) if e.downcast_ref::<fir_engine::Error>().is_some() => eprintln!("{e}"),
                    Err(e) => return Err(e),
                }
            }
        }
    }
}

struct Chat<'a> {
    options: &'a Options,
    system: Option<String>,
    messages: Vec<Value>,
}

impl Chat<'_> {
    /// Streams the answer to `line`, and takes both into the conversation.
    fn answer(
        &mut self,
        backend: &dyn Backend,
        line: &str,
        stopped: &AtomicBool,
        out: &mut impl Write,
    ) -> Result<String> {
        let user = json!({"role": "user", "content": line});
        let system = self.system.as_ref().map(|s| json!({"role": "system", "content": s}));
        let all: Vec<Value> = system.into_iter().chain(self.messages.iter().cloned()).chain([user.clone()]).collect();
        let text = backend.render(&Value::Array(all), None, true, &Map::new())?;
        let prompt = backend.encode(&text, false)?;
        let room = backend.model().context.saturating_sub(prompt.len());
        let Options { temperature, top_p, seed, max_tokens, .. } = *self.options;
        let sampling = Sampling { temperature, top_p, seed, max_tokens: max_tokens.min(room), ..Sampling::default() };
        let request = Request { prompt, sampling, ..Request::default() };
        let answer = stream(backend, request, stopped, out)?;
        self.messages.extend([user, json!({"role": "assistant", "content": answer.text})]);
        Ok(format!(
            "[{} tokens at {:.0}/s, the first after {:.0} ms; {} of {} prompt tokens were cached{}]",
            answer.usage.generated,
            answer.rate(),
            answer.first.as_secs_f64() * 1e3,
            answer.usage.cached,
            answer.usage.prompt,
            if answer.stopped { "; stopped" } else { "" }
        ))
    }
}
