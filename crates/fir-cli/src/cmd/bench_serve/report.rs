//! What the load showed: a table, JSON, curves.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::Duration;

use serde_json::{Value, json};

use super::arrivals::Arrival;
use super::client::Outcome;

/// Milliseconds, sorted.
struct Times {
    name: &'static str,
    ms: Vec<f64>,
}

impl Times {
    fn new(name: &'static str, mut ms: Vec<f64>) -> Self {
        ms.sort_by(f64::total_cmp);
        Self { name, ms }
    }

    /// The smallest time that at least this share is not above; 0 if there is none.
    fn percentile(&self, p: f64) -> f64 {
        let rank = (self.ms.len() as f64 * p / 100.0).ceil() as usize;
        self.ms.get(rank.max(1) - 1).copied().unwrap_or(0.0)
    }

    fn mean(&self) -> f64 {
        self.ms.iter().sum::<f64>() / (self.ms.len().max(1)) as f64
    }
}

const PERCENTILES: [f64; 4] = [50.0, 90.0, 99.0, 100.0];

pub(crate) struct Report {
    times: [Times; 4],
    wall: f64,
    /// Requests per second; none if all came at once.
    offered: Option<f64>,
    requests: usize,
    errors: BTreeMap<String, usize>,
    prompt: usize,
    cached: usize,
    generated: usize,
    peak: usize,
}

impl Report {
    pub(crate) fn new(arrivals: &[Arrival], outcomes: &[Outcome], wall: Duration) -> Self {
        let ms = |d: Duration| d.as_secs_f64() * 1e3;
        let good: Vec<&Outcome> = outcomes.iter().filter(|o| o.error.is_none()).collect();
        let first = good.iter().filter_map(|o| Some(ms(*o.tokens.first()? - o.sent))).collect();
        let gaps = good.iter().flat_map(|o| o.tokens.windows(2).map(|w| ms(w[1] - w[0]))).collect();
        let per_token = good.iter().filter_map(|o| {
            let (first, last) = (*o.tokens.first()?, *o.tokens.last()?);
            (o.generated > 1).then(|| ms(last - first) / (o.generated - 1) as f64)
        });
        let whole = good.iter().map(|o| ms(o.ended - o.sent)).collect();
        let mut errors = BTreeMap::new();
        for error in outcomes.iter().filter_map(|o| o.error.as_ref()) {
            *errors.entry(error.clone()).or_insert(0) += 1;
        }
        let sum = |of: fn(&Outcome) -> usize| good.iter().map(|o| of(o)).sum();
        let last = arrivals.last().map_or(0.0, |a| a.at.as_secs_f64());
        Self {
            times: [
                Times::new("first token", first),
                Times::new("between tokens", gaps),
                Times::new("per token", per_token.collect()),
                Times::new("whole request", whole),
            ],
            wall: wall.as_secs_f64(),
            offered: (last > 0.0).then(|| arrivals.len().saturating_sub(1) as f64 / last),
            requests: outcomes.len(),
            errors,
            prompt: sum(|o| o.prompt),
            cached: sum(|o| o.cached),
            generated: sum(|o| o.generated),
            peak: peak(outcomes),
        }
    }

    /// Requests that failed.
    pub(crate) fn failed(&self) -> usize {
        self.errors.values().sum()
    }

    pub(crate) fn table(&self) -> String {
        let mut text = String::new();
        let Self { wall, offered, requests, peak, .. } = self;
        let _ = writeln!(
            text,
            "{requests} requests in {wall:.1} s ({}), at most {peak} at a time, {} failed",
            offered.map_or("all at once".into(), |rate| format!("{rate:.2}/s offered")),
            self.failed()
        );
        let _ = writeln!(
            text,
            "{:.2} requests/s, {:.0} prompt tokens/s ({:.0} % cached), {:.0} generated tokens/s\n",
            (requests - self.failed()) as f64 / wall,
            self.prompt as f64 / wall,
            self.cached as f64 * 100.0 / (self.prompt.max(1)) as f64,
            self.generated as f64 / wall
        );
        let _ = writeln!(
            text,
            "{:<16}{:>10}{:>10}{:>10}{:>10}{:>10}   distribution",
            "ms", "mean", "p50", "p90", "p99", "max"
        );
        for times in &self.times {
            let _ = write!(text, "{:<16}{:>10.2}", times.name, times.mean());
            for p in PERCENTILES {
                let _ = write!(text, "{:>10.2}", times.percentile(p));
            }
            let _ = writeln!(text, "   {}", sparkline(&times.ms));
        }
        for (error, count) in &self.errors {
            let _ = writeln!(text, "\n{count} failed: {error}");
        }
        text
    }

    pub(crate) fn json(&self, arrivals: &[Arrival], outcomes: &[Outcome]) -> Value {
        let mut times = serde_json::Map::new();
        for t in &self.times {
            let name = t.name.replace(' ', "_") + "_ms";
            let [p50, p90, p99, max] = PERCENTILES.map(|p| t.percentile(p));
            times.insert(
                name,
                json!({"count": t.ms.len(), "mean": t.mean(), "p50": p50, "p90": p90, "p99": p99, "max": max}),
            );
        }
        let each: Vec<Value> = arrivals.iter().zip(outcomes).map(|(a, o)| {
            let seconds = |d: &Duration| d.as_secs_f64();
            json!({
                "due": seconds(&a.at), "sent": seconds(&o.sent), "tokens": o.tokens.iter().map(seconds).collect::<Vec<_>>(),
                "ended": seconds(&o.ended), "prompt": o.prompt, "cached": o.cached, "generated": o.generated, "error": o.error,
            })
        }).collect();
        json!({
            "wall_s": self.wall, "offered_per_s": self.offered, "requests": self.requests, "failed": self.failed(),
            "errors": self.errors, "peak_concurrency": self.peak,
            "prompt_tokens": self.prompt, "cached_tokens": self.cached, "generated_tokens": self.generated,
            "requests_per_s": (self.requests - self.failed()) as f64 / self.wall,
            "prompt_tokens_per_s": self.prompt as f64 / self.wall, "generated_tokens_per_s": self.generated as f64 / self.wall,
            "times": times, "each": each,
        })
    }

    /// The share of times (up) that are below a value (across, logarithmic), a curve for each kind.
    pub(crate) fn svg(&self) -> String {
        const COLORS: [&str; 4] = ["#0b7285", "#e8590c", "#7048e8", "#868e96"];
        let all = || self.times.iter().flat_map(|t| &t.ms).copied().filter(|&x| x > 0.0);
        let low = all().fold(f64::INFINITY, f64::min).clamp(1e-3, 1e6).log10().floor();
        let high = all().fold(0.0, f64::max).clamp(1e-2, 1e7).log10().ceil().max(low + 1.0);
        let x = |ms: f64| 60.0 + 600.0 * (ms.max(1e-9).log10().clamp(low, high) - low) / (high - low);
        let y = |share: f64| 340.0 - 300.0 * share;
        let mut svg = String::from(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 700 400\" font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"700\" height=\"400\" fill=\"#fff\"/>\n",
        );
        for decade in low as i32..=high as i32 {
            let at = x(10f64.powi(decade));
            let _ = writeln!(
                svg,
                "<line x1=\"{at:.1}\" y1=\"40\" x2=\"{at:.1}\" y2=\"340\" stroke=\"#dee2e6\"/><text x=\"{at:.1}\" y=\"358\" text-anchor=\"middle\">{} ms</text>",
                10f64.powi(decade)
            );
        }
        for share in [0.0, 0.5, 0.9, 1.0] {
            let at = y(share);
            let _ = writeln!(
                svg,
                "<line x1=\"60\" y1=\"{at:.1}\" x2=\"660\" y2=\"{at:.1}\" stroke=\"#dee2e6\"/><text x=\"54\" y=\"{:.1}\" text-anchor=\"end\">{:.0} %</text>",
                at + 4.0,
                share * 100.0
            );
        }
        for ((times, color), i) in self.times.iter().zip(COLORS).zip(0..) {
            let count = times.ms.len();
            // At most 300 points: more would not be seen.
            let ranks = (0..=300.min(count)).map(|i| i * count / 300.min(count).max(1)).filter(|&r| r > 0);
            let points: Vec<String> =
                ranks.map(|r| format!("{:.1},{:.1}", x(times.ms[r - 1]), y(r as f64 / count as f64))).collect();
            let _ = writeln!(
                svg,
                "<polyline fill=\"none\" stroke=\"{color}\" stroke-width=\"2\" points=\"{}\"/>",
                points.join(" ")
            );
            let _ = writeln!(
                svg,
                "<text x=\"{}\" y=\"24\" fill=\"{color}\">{} (p50 {:.1} ms)</text>",
                60 + i * 155,
                times.name,
                times.percentile(50.0)
            );
        }
        svg + "</svg>\n"
    }
}

/// Most requests at the same time.
fn peak(outcomes: &[Outcome]) -> usize {
    let mut changes: Vec<(Duration, i64)> = outcomes.iter().flat_map(|o| [(o.sent, 1), (o.ended, -1)]).collect();
    changes.sort();
    let mut now = 0;
    changes
        .iter()
        .map(|c| {
            now += c.1;
            now
        })
        .max()
        .unwrap_or(0)
        .max(0) as usize
}

/// How often values fall into each of 24 equal steps between the smallest and the largest.
fn sparkline(sorted: &[f64]) -> String {
    const BARS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let (Some(&low), Some(&high)) = (sorted.first(), sorted.last()) else { return String::new() };
    let mut counts = [0usize; 24];
    for &x in sorted {
        let step = (x - low) / (high - low).max(1e-12) * counts.len() as f64;
        counts[(step as usize).min(counts.len() - 1)] += 1;
    }
    let most = counts.iter().max().copied().unwrap_or(1).max(1);
    counts.iter().map(|&c| if c == 0 { ' ' } else { BARS[(c * 7).div_ceil(most)] }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_times_that_were_seen() {
        let times = Times::new("x", (1..=100).rev().map(f64::from).collect());
        assert_eq!([50.0, 90.0, 99.0, 100.0].map(|p| times.percentile(p)), [50.0, 90.0, 99.0, 100.0]);
        assert_eq!(Times::new("x", vec![]).percentile(50.0), 0.0);
        assert_eq!(Times::new("x", vec![7.0]).percentile(1.0), 7.0);
    }

    #[test]
    fn a_report_counts_what_came_and_what_failed() {
        let ms = Duration::from_millis;
        let arrivals = [0, 100, 200].map(|at| Arrival { at: ms(at), input: 4, output: 3 });
        let good = Outcome {
            sent: ms(0),
            tokens: vec![ms(10), ms(15), ms(25)],
            ended: ms(26),
            prompt: 4,
            cached: 2,
            generated: 3,
            error: None,
        };
        let late = Outcome { sent: ms(20), tokens: vec![ms(60), ms(61), ms(62)], ended: ms(63), ..good.clone() };
        let bad = Outcome { sent: ms(200), ended: ms(201), error: Some("429: full".into()), ..Outcome::default() };
        let outcomes = [good, late, bad];
        let report = Report::new(&arrivals, &outcomes, ms(1000));
        let value = report.json(&arrivals, &outcomes);
        assert_eq!(
            (&value["failed"], &value["peak_concurrency"], &value["generated_tokens"]),
            (&json!(1), &json!(2), &json!(6))
        );
        assert_eq!(
            value["times"]["first_token_ms"],
            json!({"count": 2, "mean": 25.0, "p50": 10.0, "p90": 40.0, "p99": 40.0, "max": 40.0})
        );
        assert_eq!(value["times"]["between_tokens_ms"]["max"], 10.0);
        assert_eq!(value["times"]["per_token_ms"]["p50"], 1.0);
        let together = arrivals.map(|a| Arrival { at: Duration::ZERO, ..a });
        assert!(Report::new(&together, &outcomes, ms(1000)).table().contains("(all at once)"));
        let table = report.table();
        assert!(table.contains("1 failed: 429: full") && table.contains("2.00 requests/s"), "{table}");
        assert_eq!(report.svg().matches("<polyline").count(), 4);
    }
}
