//! What may be set about an engine and its server: flags over a TOML file over defaults, and where each value came from.

use std::fmt::Write;
use std::path::Path;
use std::str::FromStr;

use anyhow::{Context, Result, anyhow};
use clap::Args;
use serde::{Deserialize, Serialize};
use toml::{Table, Value};

/// Every setting; each is a flag and, by the same name, a key of the file.
#[derive(Args, Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct Settings {
    /// A GGUF file, a folder of safetensors, pypi:PACKAGE or hf:ORG/REPO
    #[arg(long)]
    pub(crate) model: Option<String>,
    /// The model's name for clients; the model's own by default
    #[arg(long)]
    pub(crate) name: Option<String>,
    /// The address to listen on
    #[arg(long)]
    pub(crate) host: Option<String>,
    /// The port to listen on; 0 takes a free one
    #[arg(long)]
    pub(crate) port: Option<u16>,
    /// A key that clients must show; may be given several times, or in FIR_API_KEY, where other users do not see it
    #[arg(long = "api-key")]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) api_keys: Vec<String>,
    /// An origin whose pages may ask, or *; may be given several times
    #[arg(long = "allow-origin")]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) allow_origins: Vec<String>,
    /// Threads to compute on; one for each core by default
    #[arg(long)]
    pub(crate) threads: Option<usize>,
    /// Bytes for weights, KV and buffers together, such as 4GiB
    #[arg(long)]
    pub(crate) memory: Option<Size>,
    /// Most tokens of a prompt and its answer; the model's own by default
    #[arg(long)]
    pub(crate) context: Option<usize>,
    /// Sequences that run at the same time
    #[arg(long)]
    pub(crate) max_running: Option<usize>,
    /// Requests that may wait; more are answered 429
    #[arg(long)]
    pub(crate) queue_requests: Option<usize>,
    /// Prompt tokens that may wait; more are answered 429
    #[arg(long)]
    pub(crate) queue_tokens: Option<usize>,
    /// Seconds after which a request that still waits is answered 503
    #[arg(long)]
    pub(crate) queue_timeout: Option<f64>,
    /// Milliseconds between tokens that long prompts must leave to others
    #[arg(long)]
    pub(crate) itl_target_ms: Option<f64>,
    /// Bytes of memory for KV that the pool has no room for
    #[arg(long)]
    pub(crate) host_cache: Option<Size>,
    /// A folder for KV that memory has no room for
    #[arg(long)]
    pub(crate) disk_cache: Option<String>,
    /// Bytes in that folder
    #[arg(long)]
    pub(crate) disk_cache_size: Option<Size>,
    /// Guess tokens ahead from repeated text
    #[arg(long, num_args = 0..=1, default_missing_value = "true")]
    pub(crate) speculate: Option<bool>,
    /// Seconds that accepted requests have to end after a signal
    #[arg(long)]
    pub(crate) drain: Option<f64>,
    /// Most bytes of a request
    #[arg(long)]
    pub(crate) body_limit: Option<Size>,
    /// Also tell metrics by vLLM's names
    #[arg(long, num_args = 0..=1, default_missing_value = "true")]
    pub(crate) vllm_metrics: Option<bool>,
}

/// What is done about settings that nobody has made.
const UNSET: [(&str, &str); 9] = [
    ("allow-origins", "browsers let only this server's page ask"),
    ("api-keys", "anybody may ask"),
    ("context", "as long as the model's own"),
    ("disk-cache", "no KV goes to disk"),
    ("disk-cache-size", "8GiB, if there is a disk-cache"),
    ("memory", "half of what is free when it starts"),
    ("name", "of the file, package or repository"),
    ("queue-timeout", "requests wait as long as it takes"),
    ("threads", "one for each core"),
];

/// Keys of clients, as the environment has them: with commas between.
fn environment() -> Settings {
    let keys = std::env::var("FIR_API_KEY").unwrap_or_default();
    let keys = keys.split(',').map(str::trim).filter(|k| !k.is_empty());
    Settings { api_keys: keys.map(str::to_owned).collect(), ..Settings::default() }
}

/// A number of bytes; written as a number, or with KiB, MiB or GiB (K, M, G for short).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(try_from = "Value", into = "String")]
pub(crate) struct Size(pub(crate) u64);

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("`{text}` is no size; 512MiB would be one");
        let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
        let unit: u64 = match text[digits.len()..].to_ascii_lowercase().as_str() {
            "" | "b" => 1,
            "k" | "kib" => 1 << 10,
            "m" | "mib" => 1 << 20,
            "g" | "gib" => 1 << 30,
            "t" | "tib" => 1 << 40,
            _ => return Err(wrong()),
        };
        let bytes = digits.trim().parse::<f64>().map_err(|_| wrong())? * unit as f64;
        if bytes >= 0.0 && bytes < u64::MAX as f64 { Ok(Self(bytes as u64)) } else { Err(wrong()) }
    }
}

impl TryFrom<Value> for Size {
    type Error = String;

    fn try_from(value: Value) -> Result<Self, String> {
        match value {
            Value::Integer(bytes) => u64::try_from(bytes).map(Self).map_err(|_| format!("{bytes} is no size")),
            Value::String(text) => text.parse(),
            other => Err(format!("{other} is no size")),
        }
    }
}

impl From<Size> for String {
    fn from(size: Size) -> Self {
        size.to_string()
    }
}

impl std::fmt::Display for Size {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let units = [(1u64 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
        match units.iter().find(|(unit, _)| self.0 >= *unit && self.0.is_multiple_of(*unit)) {
            Some((unit, name)) => write!(f, "{}{name}", self.0 / unit),
            None => write!(f, "{}", self.0),
        }
    }
}

/// Settings, each with where it came from.
pub(crate) struct Resolved {
    pub(crate) settings: Settings,
    /// Key, value and origin, in the order of the keys.
    origins: Vec<(String, Value, String)>,
}

/// Flags over the environment over the file over `defaults`.
pub(crate) fn resolve(flags: &Settings, file: Option<&Path>, defaults: &Settings) -> Result<Resolved> {
    let mut layers = vec![("default".to_owned(), Table::try_from(defaults)?)];
    if let Some(path) = file {
        let text = std::fs::read_to_string(path).with_context(|| format!("--config {}", path.display()))?;
        let set: Settings = toml::from_str(&text).map_err(|e| anyhow!("{}: {e}", path.display()))?;
        layers.push((path.display().to_string(), Table::try_from(&set)?));
    }
    layers.push(("FIR_API_KEY".to_owned(), Table::try_from(environment())?));
    layers.push(("command line".to_owned(), Table::try_from(flags)?));
    let mut merged = std::collections::BTreeMap::new();
    for (origin, table) in layers {
        for (key, value) in table {
            merged.insert(key, (value, origin.clone()));
        }
    }
    let table: Table = merged.iter().map(|(key, (value, _))| (key.clone(), value.clone())).collect();
    let origins = merged.into_iter().map(|(key, (value, origin))| (key, value, origin)).collect();
    Ok(Resolved { settings: table.try_into()?, origins })
}

impl Resolved {
    /// As a file that `--config` takes; keys of clients are not shown.
    pub(crate) fn print(&self) -> String {
        let mut text = String::new();
        for (key, value, origin) in &self.origins {
            let shown = match value {
                Value::Array(keys) if key == "api-keys" => format!("{} keys, not shown", keys.len()),
                value => value.to_string(),
            };
            let line = if key == "api-keys" { format!("# {key}: {shown}") } else { format!("{key} = {shown}") };
            let _ = writeln!(text, "{line:<44} # {origin}");
        }
        for (key, what) in UNSET.iter().filter(|(key, _)| self.origins.iter().all(|(k, ..)| k != key)) {
            let _ = writeln!(text, "{:<44} # not set: {what}", format!("# {key}"));
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_and_written() {
        for (text, bytes) in [("512", 512), ("4GiB", 4 << 30), ("1.5g", 3 << 29), ("64 MiB", 64 << 20), ("2k", 2048)] {
            assert_eq!(text.parse(), Ok(Size(bytes)), "{text}");
        }
        for text in ["", "GiB", "4XB", "-1", "four", "1e40"] {
            assert!(text.parse::<Size>().is_err(), "{text}");
        }
        assert_eq!(Size(3 << 29).to_string(), "1536MiB");
        assert_eq!(Size(1000).to_string(), "1000");
    }

    #[test]
    fn flags_go_before_the_file_and_the_file_before_defaults() {
        let folder = std::env::temp_dir().join(format!("fir-settings-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.join("a.toml");
        std::fs::write(&path, "port = 1\nhost = \"h\"\nmemory = \"2GiB\"\napi-keys = [\"secret\"]\n").unwrap();
        let defaults = Settings { port: Some(0), drain: Some(30.0), ..Settings::default() };
        let flags = Settings { port: Some(2), ..Settings::default() };
        let resolved = resolve(&flags, Some(&path), &defaults).unwrap();
        let s = &resolved.settings;
        assert_eq!(
            (s.port, s.host.as_deref(), s.drain, s.memory),
            (Some(2), Some("h"), Some(30.0), Some(Size(2 << 30)))
        );
        let text = resolved.print();
        assert!(text.contains("port = 2 ") && text.contains("# command line"), "{text}");
        assert!(text.contains("# threads ") && text.contains("# not set: one for each core"), "{text}");
        assert!(!text.contains("# memory"), "{text}");
        assert!(text.contains("drain = 30.0") && text.contains("# default") && !text.contains("secret"), "{text}");
        // What is printed can be read back.
        let again: Settings = toml::from_str(&text).unwrap();
        assert_eq!((again.port, again.memory), (Some(2), Some(Size(2 << 30))));
        for (text, says) in [("prot = 1", "prot"), ("port = \"x\"", "port"), ("memory = true", "no size")] {
            std::fs::write(&path, text).unwrap();
            let error = resolve(&flags, Some(&path), &defaults).err().unwrap().to_string();
            assert!(error.contains(says) && error.contains("a.toml"), "{error}");
        }
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
