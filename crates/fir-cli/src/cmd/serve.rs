//! `fir serve`: a model behind OpenAI's interface.

use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::Args;
use fir_server::{Backend, Config, Limits, Server};
use tokio::signal::unix::{SignalKind, signal};

use super::engine::{Start, start};
use super::settings::{Settings, Size, resolve};

/// Options of `fir serve`.
#[derive(Args, Clone, Debug)]
pub(crate) struct Options {
    #[command(flatten)]
    settings: Settings,
    /// A TOML file; its keys are the flags' names
    #[arg(long)]
    config: Option<PathBuf>,
    /// Prints every setting and where it came from, and ends
    #[arg(long)]
    print_config: bool,
}

/// What is set where nobody says otherwise.
pub(crate) fn defaults() -> Settings {
    let config = Config::default();
    Settings {
        model: Some(fir_engine::pull::DEFAULT_MODEL.into()),
        host: Some("127.0.0.1".into()),
        port: Some(8000),
        drain: Some(config.drain.as_secs_f64()),
        body_limit: Some(Size(config.limits.body as u64)),
        vllm_metrics: Some(config.vllm_metrics),
        ..super::engine::defaults()
    }
}

pub(crate) fn run(options: &Options, out: &mut impl Write) -> Result<bool> {
    let resolved = resolve(&options.settings, options.config.as_deref(), &defaults())?;
    if options.print_config {
        write!(out, "{}", resolved.print())?;
        return Ok(true);
    }
    let settings = resolved.settings;
    let begin = Instant::now();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let served = runtime.block_on(serve(settings, begin));
    // Threads that still load or compute are not waited for.
    runtime.shutdown_timeout(Duration::from_millis(100));
    served.map(|()| true)
}

fn config(settings: &Settings) -> Result<Config> {
    let seconds = |name: &str, value: f64| {
        Duration::try_from_secs_f64(value).with_context(|| format!("--{name} {value} is not a number of seconds"))
    };
    let base = Config::default();
    Ok(Config {
        api_keys: settings.api_keys.clone(),
        allow_origins: settings.allow_origins.clone(),
        drain: settings.drain.map_or(Ok(base.drain), |s| seconds("drain", s))?,
        queue_timeout: settings.queue_timeout.map(|s| seconds("queue-timeout", s)).transpose()?,
        vllm_metrics: settings.vllm_metrics.unwrap_or(base.vllm_metrics),
        limits: Limits { body: settings.body_limit.map_or(base.limits.body, |s| s.0 as usize), ..base.limits },
        ..base
    })
}

async fn serve(settings: Settings, begin: Instant) -> Result<()> {
    // A signal while the model loads ends the load, too.
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let address = format!("{}:{}", settings.host.as_deref().unwrap_or("127.0.0.1"), settings.port.unwrap_or(8000));
    let server = Server::bind(&address, config(&settings)?).await.with_context(|| format!("listening on {address}"))?;
    let address = server.address()?;
    let installer = server.installer();
    let (loaded, load) = tokio::sync::oneshot::channel::<Result<Arc<dyn Backend>>>();
    std::thread::Builder::new().name("load".into()).spawn(move || loaded.send(start(&settings, Start::Warm)).ok())?;
    let shutdown = async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        eprintln!("ending: no new requests, waiting for those that were accepted");
    };
    let running = server.run(shutdown);
    tokio::pin!(running);
    tokio::select! {
        ended = &mut running => return Ok(ended?),
        backend = load => installer.install(backend??),
    }
    eprintln!("{:<8} {:>7.2} s  http://{address}", "ready", begin.elapsed().as_secs_f64());
    Ok(running.await?)
}
