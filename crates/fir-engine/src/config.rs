//! The engine's settings, and what they come to in bytes before anything is allocated.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::error::{Error, Result};
use crate::kv::tier::Budget;
use crate::models::Model;
use crate::runner::{KvCache, KvType};
use crate::sched::scored_rows;

/// Settings of an engine; `Default` suits a CPU.
#[derive(Clone, Debug)]
pub struct Config {
    /// Bytes for everything but the model's weights; half of what is free if not given.
    pub memory: Option<u64>,
    /// Element type of cached keys and values.
    pub kv_type: KvType,
    /// Tokens of a page.
    pub page_size: usize,
    /// Longest sequence; the model's own limit if not given.
    pub context: Option<usize>,
    /// Sequences that run at once.
    pub max_seqs: usize,
    /// Tokens of a step.
    pub max_step_tokens: usize,
    /// While answers are running, steps with prompts in them are cut to take about so long.
    pub itl_target_ms: Option<f64>,
    /// Requests that may wait.
    pub max_queue: usize,
    /// Prompt tokens that may wait.
    pub max_queue_tokens: usize,
    /// Whether prefixes are kept and shared.
    pub prefix_cache: bool,
    /// Whether a prefix that several sequences share is read once for all.
    pub cascade: bool,
    /// Tokens guessed at once, at most, from what came before; 0 guesses none.
    pub drafts: usize,
    /// A smaller model of the same vocabulary that guesses, in place of what came before.
    pub draft_model: Option<Arc<Model>>,
    /// Bytes of memory for pages that left the pool; beside `memory`. 64 MiB if it is 0 and there is a `disk_tier`, which pages
    /// reach through it.
    pub host_tier: u64,
    /// A folder for pages that left memory, and bytes in it.
    pub disk_tier: Option<(PathBuf, u64)>,
    /// A step that takes longer makes the engine unhealthy.
    pub stuck_after: Duration,
    /// Whether every kernel is run once before the engine is ready, so that the first request finds all of it warm.
    pub warm_up: bool,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            memory: None,
            kv_type: KvType::Bf16,
            page_size: 16,
            context: None,
            max_seqs: 64,
            max_step_tokens: 512,
            itl_target_ms: Some(50.0),
            max_queue: 512,
            max_queue_tokens: 1 << 20,
            prefix_cache: true,
            cascade: true,
            drafts: 4,
            draft_model: None,
            host_tier: 0,
            disk_tier: None,
            stuck_after: Duration::from_secs(60),
            warm_up: true,
        }
    }
}

/// Bytes for pages on their way to disk, where no more are given.
const STAGING: u64 = 64 << 20;

/// One line of a [`MemoryPlan`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// What it is for.
    pub name: &'static str,
    /// How large it is.
    pub bytes: u64,
    /// How that follows from the settings.
    pub why: String,
}

/// What an engine allocates, all of it before it is ready.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryPlan {
    /// Its parts.
    pub parts: Vec<Part>,
    /// Pages of the pool.
    pub pages: usize,
    /// Longest sequence.
    pub context: usize,
}

impl std::fmt::Display for MemoryPlan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for Part { name, bytes, why } in &self.parts {
            writeln!(f, "{name:<14} {:>9.1} MiB  {why}", *bytes as f64 / 1048576.0)?;
        }
        let total: u64 = self.parts.iter().map(|p| p.bytes).sum();
        write!(f, "{:<14} {:>9.1} MiB", "total", total as f64 / 1048576.0)
    }
}

impl Config {
    /// Rows of logits of a step: one per sequence and one per guess.
    pub(crate) fn max_rows(&self) -> usize {
        (self.max_seqs * (1 + self.drafts) + scored_rows(self.page_size)).min(self.max_step_tokens)
    }

    pub(crate) fn check(&self) -> Result<()> {
        let wrong =
            |what: &str, got: String, want: &str| Err(Error::Config(format!("{what} is {got}, expected {want}")));
        if !(1..=1024).contains(&self.page_size) {
            return wrong("page_size", self.page_size.to_string(), "1 to 1024");
        }
        if !(1..=4096).contains(&self.max_seqs) {
            return wrong("max_seqs", self.max_seqs.to_string(), "1 to 4096");
        }
        let least = self.max_seqs * (1 + self.drafts) + 2 * self.page_size + 32;
        if self.max_step_tokens < least {
            let want = format!("at least max_seqs * (1 + drafts) + 2 * page_size + 32 = {least}");
            return wrong("max_step_tokens", self.max_step_tokens.to_string(), &want);
        }
        if self.itl_target_ms.is_some_and(|ms| ms.is_nan() || ms <= 0.0) {
            return wrong("itl_target_ms", format!("{:?}", self.itl_target_ms), "more than 0");
        }
        if self.max_queue == 0 || self.max_queue_tokens == 0 {
            return wrong("max_queue or max_queue_tokens", "0".into(), "at least 1");
        }
        Ok(())
    }

    pub(crate) fn budget(&self) -> Option<Budget> {
        let host = self.host_bytes();
        (host > 0).then(|| Budget { host, disk: self.disk_tier.clone() })
    }

    /// Bytes of memory for pages that left the pool: what goes to disk passes through it.
    fn host_bytes(&self) -> u64 {
        if self.host_tier == 0 && self.disk_tier.is_some() { STAGING } else { self.host_tier }
    }

    /// Sizes of all that an engine of `model` allocates; `runner` are the bytes of the steps' buffers.
    pub(crate) fn plan(&self, model: &Model, runner: u64) -> Result<MemoryPlan> {
        self.check()?;
        let config = model.config();
        let mut page_bytes = KvCache::page_bytes_for(model, self.page_size, self.kv_type)? as u64;
        if let Some(small) = &self.draft_model {
            // It follows the same sequences.
            page_bytes += KvCache::page_bytes_for(small, self.page_size, self.kv_type)? as u64;
        }
        let wanted = self.context.unwrap_or(config.context);
        if wanted == 0 || wanted > config.context {
            return Err(Error::Config(format!("context is {wanted}, expected 1 to the model's {}", config.context)));
        }
        let (memory, why) = match self.memory {
            Some(bytes) => (bytes, "memory".to_string()),
            None => {
                let free = free_memory().ok_or_else(|| {
                    Error::Config("memory: not given, and the system does not say what is free".into())
                })?;
                (free / 2, format!("half of the {} MiB that are free", free >> 20))
            }
        };
        // Logits as they came, of rows whose log probabilities are asked for; and the rows' parameters.
        let sampler = (self.max_rows() * (config.vocab * 4 + 32)) as u64;
        let Some(rest) = memory.checked_sub(runner + sampler + page_bytes) else {
            return Err(Error::Config(format!(
                "memory is {memory} bytes, expected {} for the buffers of a step and one page at least",
                runner + sampler + page_bytes
            )));
        };
        // More than every sequence at full length is of no use but for prefixes; twice that is plenty.
        let useful = (2 * self.max_seqs * wanted).div_ceil(self.page_size) as u64;
        let pages = (rest / page_bytes + 1).min(useful.max(1)).min(i32::MAX as u64 / self.page_size as u64);
        let context = wanted.min(pages as usize * self.page_size);
        let mut parts = vec![
            Part {
                name: "step buffers",
                bytes: runner,
                why: format!("{} tokens, {} rows of logits", self.max_step_tokens, self.max_rows()),
            },
            Part {
                name: "sampler",
                bytes: sampler,
                why: format!("{} rows of {} tokens", self.max_rows(), config.vocab),
            },
            Part {
                name: "KV pages",
                bytes: pages * page_bytes,
                why: format!("{pages} pages of {} tokens, {page_bytes} bytes each: the rest of {why}", self.page_size),
            },
        ];
        let host = self.host_bytes();
        if host > 0 {
            let why = if self.host_tier > 0 { "host_tier" } else { "what is on its way to the disk" };
            parts.push(Part { name: "host tier", bytes: host, why: why.into() });
        }
        Ok(MemoryPlan { parts, pages: pages as usize, context })
    }
}

/// Memory that the system could give, as Linux tells it.
fn free_memory() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find(|l| l.starts_with("MemAvailable:"))?;
    Some(line.split_whitespace().nth(1)?.parse::<u64>().ok()? * 1024)
}
