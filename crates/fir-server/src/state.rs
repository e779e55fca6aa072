//! What all requests share.

use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::auth::Keys;
use crate::backend::Backend;
use crate::config::Config;
use crate::error::{ApiError, Result};
use crate::metrics::Metrics;

/// What all requests share.
pub(crate) struct State {
    pub(crate) config: Config,
    pub(crate) keys: Keys,
    pub(crate) metrics: Metrics,
    backend: OnceLock<Arc<dyn Backend>>,
    draining: AtomicBool,
    requests: AtomicU64,
    random: RandomState,
    /// When the server was made, in seconds since 1970.
    pub(crate) created: u64,
}

impl State {
    pub(crate) fn new(config: Config) -> Self {
        Self {
            keys: Keys::new(&config.api_keys),
            config,
            metrics: Metrics::default(),
            backend: OnceLock::new(),
            draining: AtomicBool::new(false),
            requests: AtomicU64::new(0),
            random: RandomState::new(),
            created: now(),
        }
    }

    /// From now on requests are answered.
    pub(crate) fn install(&self, backend: Arc<dyn Backend>) {
        // A second one is ignored: requests may hold the first.
        let _ = self.backend.set(backend);
    }

    /// The engine, or 503 while it loads.
    pub(crate) fn backend(&self) -> Result<&Arc<dyn Backend>> {
        self.backend.get().ok_or_else(|| ApiError::unavailable("the model is being loaded", "loading"))
    }

    /// The engine, or 503 if no new request may begin.
    pub(crate) fn open(&self) -> Result<&Arc<dyn Backend>> {
        let backend = self.backend()?;
        if self.draining() {
            return Err(ApiError::unavailable("the server is shutting down", "draining"));
        }
        backend.health()?;
        Ok(backend)
    }

    pub(crate) fn drain(&self) {
        self.draining.store(true, Ordering::SeqCst);
    }

    pub(crate) fn draining(&self) -> bool {
        self.draining.load(Ordering::SeqCst)
    }

    /// Seconds after which a client may try again: when as many requests have ended as wait, if they take as long as those
    /// before.
    pub(crate) fn retry_after(&self) -> u64 {
        let Ok(backend) = self.backend() else { return 1 };
        let stats = backend.stats();
        let mean = stats.whole.sum / stats.whole.count().max(1) as f64;
        let rounds = stats.waiting as f64 / stats.running.max(1) as f64;
        (mean * rounds).ceil().clamp(1.0, 60.0) as u64
    }

    /// A name that no other request has.
    pub(crate) fn fresh_id(&self) -> String {
        let count = self.requests.fetch_add(1, Ordering::Relaxed);
        format!("{:016x}{:08x}", self.random.hash_one(count), count as u32)
    }
}

/// Seconds since 1970.
pub(crate) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}
