//! When requests come and how long they are.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::Value;

/// One request to come.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Arrival {
    /// After the first.
    pub(crate) at: Duration,
    /// Tokens of the prompt.
    pub(crate) input: usize,
    /// Tokens of the answer.
    pub(crate) output: usize,
}

/// A number without pattern for each index (the finaliser of splitmix64).
pub(crate) fn mix(seed: u64, index: u64) -> u64 {
    let mut x = seed.wrapping_add((index + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ x >> 31
}

/// `count` requests whose distances are exponential: `rate` in a second, on average.
pub(crate) fn poisson(rate: f64, count: usize, input: usize, output: usize, seed: u64) -> Result<Vec<Arrival>> {
    if !(rate > 0.0 && rate.is_finite()) || input == 0 || output == 0 {
        bail!("--rate {rate}, --input {input} and --output {output} must all be above 0");
    }
    let mut at = 0.0;
    let arrival = |i: usize| {
        let uniform = (mix(seed, i as u64) >> 11) as f64 / (1u64 << 53) as f64;
        let now = at;
        at += -(1.0 - uniform).ln() / rate;
        Arrival { at: Duration::from_secs_f64(now), input, output }
    };
    Ok((0..count).map(arrival).collect())
}

/// The first `count` requests of a trace, `speed` times as fast, no longer than `input` and `output`.
pub(crate) fn of_trace(path: &Path, count: usize, speed: f64, input: usize, output: usize) -> Result<Vec<Arrival>> {
    if !(speed > 0.0 && speed.is_finite()) {
        bail!("--speed {speed} must be above 0");
    }
    let text = std::fs::read_to_string(path).with_context(|| format!("--trace {}", path.display()))?;
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let json = text.trim_start().starts_with('{');
    let mut found = Vec::new();
    for (i, line) in lines.skip(usize::from(!json)).take(count) {
        let read = if json { of_json(line) } else { of_csv(line) };
        found.push(read.with_context(|| format!("{}, line {}: `{line}`", path.display(), i + 1))?);
    }
    let first = found.iter().map(|f| f.0).fold(f64::INFINITY, f64::min);
    found.sort_by(|a, b| a.0.total_cmp(&b.0));
    let arrival = |(at, i, o): (f64, usize, usize)| Arrival {
        at: Duration::from_secs_f64((at - first) / speed),
        input: i.clamp(1, input),
        output: o.clamp(1, output),
    };
    Ok(found.into_iter().map(arrival).collect())
}

/// Seconds and lengths of `{"timestamp": 27482, "input_length": 6955, "output_length": 52, …}`.
fn of_json(line: &str) -> Result<(f64, usize, usize)> {
    let value: Value = serde_json::from_str(line)?;
    let number = |key: &str| value[key].as_f64().with_context(|| format!("no number `{key}`"));
    Ok((number("timestamp")? / 1e3, number("input_length")? as usize, number("output_length")? as usize))
}

/// Seconds (of their day) and lengths of `2023-11-16 18:17:03.9799600,4808,10`.
fn of_csv(line: &str) -> Result<(f64, usize, usize)> {
    let fields: Vec<&str> = line.split(',').map(str::trim).collect();
    let [time, input, output] = fields[..] else { bail!("{} fields, expected 3", fields.len()) };
    // Days only matter to traces over midnight: a date's last number is its day.
    let (date, clock) = time.split_once(' ').unwrap_or(("0", time));
    let day: f64 = date.rsplit('-').next().unwrap_or("0").parse()?;
    let mut seconds = 0.0;
    for part in clock.split(':') {
        seconds = seconds * 60.0 + part.parse::<f64>()?;
    }
    Ok((day * 86_400.0 + seconds, input.parse()?, output.parse()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn poisson_arrivals_have_their_rate_and_repeat() {
        let a = poisson(20.0, 4000, 8, 9, 1).unwrap();
        assert_eq!(a, poisson(20.0, 4000, 8, 9, 1).unwrap());
        assert_ne!(a[1..], poisson(20.0, 4000, 8, 9, 2).unwrap()[1..]);
        let mean = a.last().unwrap().at.as_secs_f64() / 3999.0;
        // Four standard errors of the mean of 4,000 exponential distances.
        assert!((mean - 0.05).abs() < 4.0 * 0.05 / 4000f64.sqrt(), "{mean}");
        assert!(a.windows(2).all(|w| w[0].at <= w[1].at));
        assert!(poisson(0.0, 1, 1, 1, 0).is_err() && poisson(1.0, 1, 0, 1, 0).is_err());
    }

    #[test]
    fn traces_are_read_scaled_and_cut() {
        let folder = std::env::temp_dir().join(format!("fir-arrivals-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let csv = folder.join("a.csv");
        std::fs::write(
            &csv,
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 23:59:59.5,4808,10\n2023-11-17 00:00:00.5,31,8\n",
        )
        .unwrap();
        let want = [(0.0, 500, 10), (0.5, 31, 8)];
        let want = want.map(|(at, input, output)| Arrival { at: Duration::from_secs_f64(at), input, output });
        assert_eq!(of_trace(&csv, 10, 2.0, 500, 64).unwrap(), want);
        let lines = folder.join("a.jsonl");
        std::fs::write(&lines, "{\"timestamp\": 1000, \"input_length\": 31, \"output_length\": 8}\n{\"timestamp\": 0, \"input_length\": 4808, \"output_length\": 10}\n").unwrap();
        assert_eq!(of_trace(&lines, 10, 2.0, 500, 64).unwrap(), want);
        std::fs::write(&csv, "head\n2023-11-16 23:59:59.5,x,10\n").unwrap();
        let error = format!("{:#}", of_trace(&csv, 10, 1.0, 500, 64).unwrap_err());
        assert!(error.contains("line 2"), "{error}");
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
