//! What the server counts, in Prometheus' text format.

use std::fmt::{Display, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use fir_engine::Finish;

use crate::backend::{ModelInfo, Stats};

/// Upper ends of the buckets in seconds: half a millisecond (a token of a small model) to minutes (a long answer).
const BUCKETS: [f64; 20] = [
    0.0005, 0.001, 0.0025, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0,
    80.0, 160.0,
];

/// Times, sorted into buckets.
#[derive(Default)]
pub(crate) struct Histogram {
    counts: [AtomicU64; BUCKETS.len() + 1],
    micros: AtomicU64,
}

impl Histogram {
    pub(crate) fn record(&self, time: Duration) {
        let seconds = time.as_secs_f64();
        let bucket = BUCKETS.partition_point(|&b| b < seconds);
        self.counts[bucket].fetch_add(1, Ordering::Relaxed);
        self.micros.fetch_add(time.as_micros() as u64, Ordering::Relaxed);
    }
}

/// Counters of requests; the engine has its own.
#[derive(Default)]
pub(crate) struct Metrics {
    pub(crate) first_token: Histogram,
    pub(crate) inter_token: Histogram,
    pub(crate) whole: Histogram,
    in_flight: AtomicU64,
    accepted: AtomicU64,
    refused: AtomicU64,
    stopped: AtomicU64,
    length: AtomicU64,
    aborted: AtomicU64,
    deadline: AtomicU64,
    failed: AtomicU64,
    prompt_tokens: AtomicU64,
    generated_tokens: AtomicU64,
}

fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

impl Metrics {
    pub(crate) fn begin(&self) {
        count(&self.accepted);
        self.in_flight.fetch_add(1, Ordering::SeqCst);
    }

    pub(crate) fn end(&self) {
        self.in_flight.fetch_sub(1, Ordering::SeqCst);
    }

    /// Requests that have not been answered.
    pub(crate) fn in_flight(&self) -> u64 {
        self.in_flight.load(Ordering::SeqCst)
    }

    pub(crate) fn refused(&self) {
        count(&self.refused);
    }

    pub(crate) fn abort(&self) {
        count(&self.aborted);
    }

    pub(crate) fn fail(&self) {
        count(&self.failed);
    }

    pub(crate) fn finish(&self, reason: Finish, prompt: usize, generated: usize) {
        match reason {
            Finish::Stop => count(&self.stopped),
            Finish::Length => count(&self.length),
            Finish::Aborted => count(&self.aborted),
            Finish::Deadline => count(&self.deadline),
        }
        self.prompt_tokens.fetch_add(prompt as u64, Ordering::Relaxed);
        self.generated_tokens.fetch_add(generated as u64, Ordering::Relaxed);
    }

    /// All of it as text; `vllm` adds what dashboards for vLLM look for.
    pub(crate) fn text(&self, model: &ModelInfo, stats: &Stats, vllm: bool) -> String {
        let mut text = Text { out: String::new(), model: escaped(&model.id) };
        let own = Names { prefix: "fir_", own: true };
        self.write(&mut text, stats, own);
        if vllm {
            self.write(&mut text, stats, Names { prefix: "vllm:", own: false });
            let labels = format!(
                "block_size=\"{}\",num_gpu_blocks=\"{}\",enable_prefix_caching=\"True\"",
                stats.page_size, stats.kv_pages
            );
            text.head("vllm:cache_config_info", "gauge", "Sizes of the KV pool.");
            text.sample("vllm:cache_config_info", &labels, 1);
        }
        text.out
    }

    fn write(&self, text: &mut Text, stats: &Stats, names: Names) {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let name = |own: &str, vllm: &str| format!("{}{}", names.prefix, if names.own { own } else { vllm });
        text.one(&name("requests_running", "num_requests_running"), "gauge", "Requests that generate.", stats.running);
        text.one(&name("requests_waiting", "num_requests_waiting"), "gauge", "Requests that wait.", stats.waiting);
        text.one(&name("kv_usage_ratio", "kv_cache_usage_perc"), "gauge", "Share of the KV pool in use.", stats.kv_usage);
        for (own, vllm, help, value) in [
            ("prefix_tokens_total", "prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache.", stats.prefix_queries),
            ("prefix_hit_tokens_total", "prefix_cache_hits_total", "Prompt tokens found in the prefix cache.", stats.prefix_hits),
            ("preemptions_total", "num_preemptions_total", "Times a running request gave up its place.", stats.preemptions),
            ("prompt_tokens_total", "prompt_tokens_total", "Tokens of prompts.", get(&self.prompt_tokens)),
            ("generated_tokens_total", "generation_tokens_total", "Tokens of answers.", get(&self.generated_tokens)),
            ("draft_tokens_total", "spec_decode_num_draft_tokens_total", "Tokens proposed by speculation.", stats.draft_tokens),
            ("draft_accepted_tokens_total", "spec_decode_num_accepted_tokens_total", "Proposed tokens that were kept.", stats.accepted_tokens),
        ] {
            text.one(&name(own, vllm), "counter", help, value);
        }
        if names.own {
            for (own, help, value) in [
                ("steps_total", "Steps of the engine.", stats.steps),
                ("requests_total", "Requests begun.", get(&self.accepted)),
                ("requests_refused_total", "Requests refused as the queue was full.", get(&self.refused)),
                ("cascade_launches_total", "Attention launches that read a shared prefix once.", stats.cascade_launches),
                ("kv_read_bytes_total", "Bytes of KV read.", stats.kv_bytes_read),
                ("kv_flat_bytes_total", "Bytes of KV that reading each request on its own would have taken.", stats.kv_bytes_flat),
            ] {
                text.one(&name(own, own), "counter", help, value);
            }
        }
        let finished = name("choices_finished_total", "request_success_total");
        let label = if names.own { "reason" } else { "finished_reason" };
        text.head(&finished, "counter", "Answers by how they ended.");
        for (reason, value) in [
            ("stop", &self.stopped),
            ("length", &self.length),
            ("abort", &self.aborted),
            ("deadline", &self.deadline),
            ("error", &self.failed),
        ] {
            text.sample(&finished, &format!("{label}=\"{reason}\""), get(value));
        }
        for (own, vllm, help, histogram) in [
            ("first_token_seconds", "time_to_first_token_seconds", "From a request to its first token.", &self.first_token),
            ("inter_token_seconds", "inter_token_latency_seconds", "From a token to the next.", &self.inter_token),
            ("request_seconds", "e2e_request_latency_seconds", "From a request to the end of an answer.", &self.whole),
        ] {
            text.histogram(&name(own, vllm), help, histogram);
        }
    }
}

#[derive(Clone, Copy)]
struct Names {
    prefix: &'static str,
    own: bool,
}

struct Text {
    out: String,
    model: String,
}

impl Text {
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
            sum += count.load(Ordering::Relaxed);
            let end = BUCKETS.get(i).map_or_else(|| "+Inf".to_owned(), f64::to_string);
            self.sample(&format!("{name}_bucket"), &format!("le=\"{end}\""), sum);
        }
        let seconds = histogram.micros.load(Ordering::Relaxed) as f64 / 1e6;
        self.sample(&format!("{name}_sum"), "", seconds);
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
        for millis in [0, 1, 10, 10_000, 1_000_000] {
            metrics.first_token.record(Duration::from_millis(millis));
        }
        metrics.finish(Finish::Stop, 3, 4);
        let model = ModelInfo { id: "a\"b".into(), context: 1, vocab: 1, tools: ToolFormat::Hermes };
        let text = metrics.text(&model, &Stats { running: 2, ..Stats::default() }, true);
        for line in [
            "fir_first_token_seconds_bucket{model_name=\"a\\\"b\",le=\"0.0005\"} 1",
            "fir_first_token_seconds_bucket{model_name=\"a\\\"b\",le=\"0.001\"} 2",
            "fir_first_token_seconds_bucket{model_name=\"a\\\"b\",le=\"0.01\"} 3",
            "fir_first_token_seconds_bucket{model_name=\"a\\\"b\",le=\"160\"} 4",
            "fir_first_token_seconds_bucket{model_name=\"a\\\"b\",le=\"+Inf\"} 5",
            "fir_first_token_seconds_count{model_name=\"a\\\"b\"} 5",
            "vllm:num_requests_running{model_name=\"a\\\"b\"} 2",
            "vllm:request_success_total{model_name=\"a\\\"b\",finished_reason=\"stop\"} 1",
            "fir_prompt_tokens_total{model_name=\"a\\\"b\"} 3",
        ] {
            assert!(text.lines().any(|l| l == line), "{line}\n{text}");
        }
        let mut types: Vec<&str> = text.lines().filter(|l| l.starts_with("# TYPE")).collect();
        let told = types.len();
        types.sort_unstable();
        types.dedup();
        assert_eq!(types.len(), told);
        assert!(!metrics.text(&model, &Stats::default(), false).contains("vllm"));
    }
}
