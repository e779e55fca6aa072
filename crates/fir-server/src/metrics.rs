//! What is counted, in Prometheus' text format: the engine's numbers, and the server's own few.

use std::fmt::{Display, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use fir_engine::stats::{Histogram, Stats};

use crate::backend::ModelInfo;

/// The server's own counters.
#[derive(Default)]
pub(crate) struct Metrics {
    in_flight: Arc<AtomicU64>,
    begun: AtomicU64,
    left: AtomicU64,
}

/// A request that has not been answered; none as soon as this is dropped.
pub(crate) struct InFlight(Arc<AtomicU64>);

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Metrics {
    /// Counts a request until the guard is dropped.
    pub(crate) fn enter(&self) -> InFlight {
        self.in_flight.fetch_add(1, Ordering::SeqCst);
        InFlight(self.in_flight.clone())
    }

    /// Requests that have not been answered.
    pub(crate) fn in_flight(&self) -> u64 {
        self.in_flight.load(Ordering::SeqCst)
    }

    /// A request goes to the engine.
    pub(crate) fn begin(&self) {
        self.begun.fetch_add(1, Ordering::Relaxed);
    }

    /// A client has gone before its answer ended.
    pub(crate) fn leave(&self) {
        self.left.fetch_add(1, Ordering::Relaxed);
    }

    /// All of it as text; `vllm` adds what dashboards for vLLM look for.
    pub(crate) fn text(&self, model: &ModelInfo, stats: &Stats, vllm: bool) -> String {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let mut text = Text { out: String::new(), model: escaped(&model.id) };
        text.both(stats, "fir_", false);
        for (name, help, value) in [
            ("requests_total", "Requests given to the engine.", get(&self.begun)),
            ("requests_left_total", "Requests whose clients went away.", get(&self.left)),
            ("requests_refused_total", "Requests refused as the queue was full.", stats.refused),
            ("steps_total", "Steps of the engine.", stats.steps),
            ("computed_tokens_total", "Tokens given to the model.", stats.computed_tokens),
            ("evicted_pages_total", "Pages taken from the prefix tree.", stats.evictions),
            ("restored_tokens_total", "Tokens whose KV came back from a tier.", stats.restored_tokens),
            ("cascade_groups_total", "Groups of sequences whose common prefix was read once.", stats.cascade_groups),
            ("draft_branches_total", "Times that a second chain of guesses was the right one.", stats.branches_taken),
            ("kv_read_bytes_total", "Bytes of KV that attention read.", stats.kv_bytes_read),
            ("kv_flat_bytes_total", "Bytes of KV that it would have read without sharing.", stats.kv_bytes_flat),
            ("tier_stored_pages_total", "Pages that went to a tier.", stats.tier.stored),
            ("tier_damaged_pages_total", "Pages that a tier lost.", stats.tier.damaged),
        ] {
            text.one(&format!("fir_{name}"), "counter", help, value);
        }
        text.one("fir_http_requests_in_flight", "gauge", "Requests that have not been answered.", self.in_flight());
        text.one("fir_waiting_tokens", "gauge", "Prompt tokens that wait.", stats.waiting_tokens);
        text.one("fir_kv_pages", "gauge", "Pages of the KV pool.", stats.pages);
        text.one("fir_tier_host_bytes", "gauge", "Bytes of KV in the memory tier.", stats.tier.host_bytes);
        text.one("fir_tier_disk_bytes", "gauge", "Bytes of KV in the disk tier.", stats.tier.disk_bytes);
        text.histogram("fir_step_seconds", "Of a step of the engine.", &stats.step);
        if vllm {
            text.both(stats, "vllm:", true);
            let info = "vllm:cache_config_info";
            text.head(info, "gauge", "The KV pool.");
            text.sample(info, &format!("num_gpu_blocks=\"{}\",enable_prefix_caching=\"True\"", stats.pages), 1);
        }
        text.out
    }
}

struct Text {
    out: String,
    model: String,
}

impl Text {
    /// What has a name of ours and one of vLLM's.
    fn both(&mut self, stats: &Stats, prefix: &str, vllm: bool) {
        let name = |own: &str, theirs: &str| format!("{prefix}{}", if vllm { theirs } else { own });
        let used = stats.pages_used as f64 / stats.pages.max(1) as f64;
        self.one(&name("requests_running", "num_requests_running"), "gauge", "Sequences that run.", stats.running);
        self.one(&name("requests_waiting", "num_requests_waiting"), "gauge", "Sequences that wait.", stats.waiting);
        self.one(&name("kv_usage_ratio", "kv_cache_usage_perc"), "gauge", "Share of the KV pool in use, 0 to 1.", used);
        for (own, theirs, help, value) in [
            (
                "prefix_tokens_total",
                "prefix_cache_queries_total",
                "Prompt tokens looked up in the prefix cache.",
                stats.prompt_tokens,
            ),
            ("prefix_hit_tokens_total", "prefix_cache_hits_total", "Prompt tokens found there.", stats.cached_tokens),
            ("prompt_tokens_total", "prompt_tokens_total", "Tokens of prompts.", stats.prompt_tokens),
            ("generated_tokens_total", "generation_tokens_total", "Tokens of answers.", stats.generated_tokens),
            (
                "preemptions_total",
                "num_preemptions_total",
                "Sequences that gave up their pages for others.",
                stats.preemptions,
            ),
            ("draft_tokens_total", "spec_decode_num_draft_tokens_total", "Tokens guessed.", stats.drafted_tokens),
            (
                "draft_accepted_tokens_total",
                "spec_decode_num_accepted_tokens_total",
                "Tokens guessed right.",
                stats.accepted_tokens,
            ),
        ] {
            self.one(&name(own, theirs), "counter", help, value);
        }
        let finished = name("finished_total", "request_success_total");
        self.head(&finished, "counter", "Answers by how they ended.");
        for (reason, value) in [
            ("stop", stats.finished_stop),
            ("length", stats.finished_length),
            ("abort", stats.aborted),
            ("deadline", stats.expired),
            ("error", stats.failed),
        ] {
            let label = if vllm { "finished_reason" } else { "reason" };
            self.sample(&finished, &format!("{label}=\"{reason}\""), value);
        }
        for (own, theirs, help, histogram) in [
            ("queue_seconds", "request_queue_time_seconds", "From submission to the first step.", &stats.queue_time),
            (
                "first_token_seconds",
                "time_to_first_token_seconds",
                "From submission to the first token.",
                &stats.first_token,
            ),
            (
                "between_tokens_seconds",
                "inter_token_latency_seconds",
                "From a token to the next.",
                &stats.between_tokens,
            ),
            (
                "prefill_seconds",
                "request_prefill_time_seconds",
                "From the first step to the first token.",
                &stats.prefill,
            ),
            ("decode_seconds", "request_decode_time_seconds", "From the first token to the last.", &stats.decode),
            (
                "token_seconds",
                "request_time_per_output_token_seconds",
                "From a token to the next, as the mean of an answer.",
                &stats.per_token,
            ),
            ("step_tokens", "iteration_tokens_total", "Tokens of a step of the engine.", &stats.step_tokens),
            ("request_seconds", "e2e_request_latency_seconds", "From submission to the end.", &stats.whole),
        ] {
            self.histogram(&name(own, theirs), help, histogram);
        }
    }

    fn head(&mut self, name: &str, kind: &str, help: &str) {
        let _ = write!(self.out, "# HELP {name} {help}\n# TYPE {name} {kind}\n");
    }

    fn sample(&mut self, name: &str, labels: &str, value: impl Display) {
        let comma = if labels.is_empty() { "" } else { "," };
        let _ = writeln!(self.out, "{name}{{model_name=\"{}\"{comma}{labels}}} {value}", self.model);
    }

    fn one(&mut self, name: &str, kind: &str, help: &str, value: impl Display) {
        self.head(name, kind, help);
        self.sample(name, "", value);
    }

    fn histogram(&mut self, name: &str, help: &str, histogram: &Histogram) {
        self.head(name, "histogram", help);
        let mut sum = 0;
        for (i, count) in histogram.counts.iter().enumerate() {
            sum += count;
            let end = histogram.bounds.get(i).map_or_else(|| "+Inf".to_owned(), f64::to_string);
            self.sample(&format!("{name}_bucket"), &format!("le=\"{end}\""), sum);
        }
        self.sample(&format!("{name}_sum"), "", histogram.sum);
        self.sample(&format!("{name}_count"), "", sum);
    }
}

fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::ToolFormat;

    #[test]
    fn buckets_add_up_and_names_are_told_once() {
        let metrics = Metrics::default();
        metrics.begin();
        let flight = metrics.enter();
        let mut stats = Stats { running: 2, finished_stop: 1, pages: 4, pages_used: 1, ..Stats::default() };
        (stats.first_token.counts[0], stats.first_token.counts[1], stats.first_token.sum) = (3, 2, 0.5);
        *stats.first_token.counts.last_mut().unwrap() = 1;
        let model = ModelInfo { id: "a\"b".into(), context: 1, vocab: 1, tools: ToolFormat::Hermes };
        let text = metrics.text(&model, &stats, true);
        for line in [
            "fir_first_token_seconds_bucket{model_name=\"a\\\"b\",le=\"0.001\"} 3",
            "fir_first_token_seconds_bucket{model_name=\"a\\\"b\",le=\"0.0025\"} 5",
            "fir_first_token_seconds_bucket{model_name=\"a\\\"b\",le=\"300\"} 5",
            "fir_first_token_seconds_bucket{model_name=\"a\\\"b\",le=\"+Inf\"} 6",
            "fir_first_token_seconds_count{model_name=\"a\\\"b\"} 6",
            "fir_kv_usage_ratio{model_name=\"a\\\"b\"} 0.25",
            "fir_http_requests_in_flight{model_name=\"a\\\"b\"} 1",
            "vllm:num_requests_running{model_name=\"a\\\"b\"} 2",
            "vllm:request_success_total{model_name=\"a\\\"b\",finished_reason=\"stop\"} 1",
        ] {
            assert!(text.lines().any(|l| l == line), "{line}\n{text}");
        }
        let mut types: Vec<&str> = text.lines().filter(|l| l.starts_with("# TYPE")).collect();
        let told = types.len();
        types.sort_unstable();
        types.dedup();
        assert_eq!(types.len(), told);
        assert!(!metrics.text(&model, &stats, false).contains("vllm"));
        drop(flight);
        assert_eq!(metrics.in_flight(), 0);
    }
}
