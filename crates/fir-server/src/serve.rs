//! The listening socket: connections, supervision of the engine, and an orderly end.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::backend::Backend;
use crate::config::Config;
use crate::routes::router;
use crate::state::State;

/// A client gets so long to send the head of a request.
const HEADER_TIMEOUT: Duration = Duration::from_secs(30);

/// How often the engine is looked after, and the end of a drain looked for.
const TICK: Duration = Duration::from_millis(20);

/// Time for the last answers to reach their clients.
const LAST_WRITES: Duration = Duration::from_secs(2);

/// A server that listens. Until a backend is installed it answers 503.
pub struct Server {
    listener: TcpListener,
    state: Arc<State>,
}

/// Gives a server its backend.
#[derive(Clone)]
pub struct Installer(Arc<State>);

impl Installer {
    /// From now on requests are answered; a second backend is ignored.
    pub fn install(&self, backend: Arc<dyn Backend>) {
        self.0.install(backend);
    }
}

impl Server {
    /// Listens on `address`, such as `127.0.0.1:8000`; port 0 takes a free one.
    pub async fn bind(address: &str, config: Config) -> io::Result<Self> {
        let listener = TcpListener::bind(address).await?;
        Ok(Self { listener, state: Arc::new(State::new(config)) })
    }

    /// Where it listens.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// The way to give it a backend while it runs.
    pub fn installer(&self) -> Installer {
        Installer(self.state.clone())
    }

    /// Serves until `shutdown` is ready and every accepted request is answered, or as many as end in [`Config::drain`].
    /// An error if the engine stopped by itself.
    pub async fn run(self, shutdown: impl Future<Output = ()>) -> fir_engine::Result<()> {
        let Self { listener, state } = self;
        let service = TowerToHyperService::new(router(state.clone()));
        let open = Arc::new(Semaphore::new(state.config.limits.connections));
        let graceful = GracefulShutdown::new();
        let mut http = http1::Builder::new();
        http.timer(TokioTimer::new()).header_read_timeout(HEADER_TIMEOUT);
        let mut tick = tokio::time::interval(TICK);
        let mut end = None;
        let mut failure = None;
        tokio::pin!(shutdown);
        loop {
            tokio::select! {
                Some((stream, permit)) = accept(&listener, &open) => {
                    let connection = graceful.watch(http.serve_connection(TokioIo::new(stream), service.clone()));
                    tokio::spawn(async move {
                        // A client that breaks the protocol or goes away is no concern of others.
                        let _ = connection.await;
                        drop(permit);
                    });
                }
                () = &mut shutdown, if end.is_none() => {
                    state.drain();
                    end = Some(Instant::now() + state.config.drain);
                }
                _ = tick.tick() => {
                    if let Some(Err(e)) = state.backend().ok().map(|b| b.health()) {
                        failure = Some(e);
                        break;
                    }
                    if end.is_some_and(|end| state.metrics.in_flight() == 0 || Instant::now() >= end) {
                        break;
                    }
                }
            }
        }
        drop(listener);
        state.drain();
        if let Ok(backend) = state.backend() {
            // What still runs is aborted, and its clients are told.
            let backend = backend.clone();
            let _ = tokio::task::spawn_blocking(move || backend.drain(Duration::ZERO)).await;
        }
        let _ = tokio::time::timeout(LAST_WRITES, graceful.shutdown()).await;
        failure.map_or(Ok(()), Err)
    }
}

/// The next connection, once there is room for one; none if it was gone before it was taken.
async fn accept(listener: &TcpListener, open: &Arc<Semaphore>) -> Option<(TcpStream, OwnedSemaphorePermit)> {
    let permit = open.clone().acquire_owned().await.ok()?;
    match listener.accept().await {
        Ok((stream, _)) => {
            let _ = stream.set_nodelay(true);
            Some((stream, permit))
        }
        Err(_) => {
            // Out of file descriptors: others must close first.
            tokio::time::sleep(TICK).await;
            None
        }
    }
}
