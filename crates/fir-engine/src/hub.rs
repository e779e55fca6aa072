//! The Hugging Face hub: files of a repository, fetched whole or not at all.
//!
//! A file grows under a name that ends with `.part`, goes on where it stopped, and gets its name when its size and its
//! SHA-256 are what the hub says (small files, which the hub keeps in git, have a size alone). The model's folder gets its
//! name last, when all of it is there.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::Value;
use sha2::{Digest, Sha256};
use ureq::http::StatusCode;
use ureq::{Agent, Body};

use crate::error::{Error, Result};
use crate::pull::{Progress, hex, io};

/// Times that a connection may break before a fetch is given up.
const TRIES: usize = 5;
/// Endings of the files that a model of safetensors is made of.
const ENDINGS: [&str; 3] = [".safetensors", ".json", ".jinja"];

/// Where the hub is and where its models go.
pub(crate) struct Hub {
    /// Without a slash at the end.
    pub endpoint: String,
    pub token: Option<String>,
    /// Folder of all models.
    pub models: PathBuf,
}

/// A file of a repository.
struct Remote {
    name: String,
    size: Option<u64>,
    sha256: Option<String>,
}

impl Hub {
    /// The one that `HF_ENDPOINT` names, with the token of `HF_TOKEN` or of the hub's own programs.
    pub(crate) fn from_env(models: PathBuf) -> Self {
        let var = |name: &str| std::env::var(name).ok().filter(|v| !v.is_empty());
        let saved = || {
            let home = var("HF_HOME").map(PathBuf::from);
            let home = home.or_else(|| var("HOME").map(|h| Path::new(&h).join(".cache/huggingface")))?;
            fs::read_to_string(home.join("token")).ok()
        };
        let token = var("HF_TOKEN").or_else(saved).map(|t| t.trim().to_string()).filter(|t| !t.is_empty());
        let endpoint = var("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".into());
        Self { endpoint: endpoint.trim_end_matches('/').into(), token, models }
    }

    /// `org/repo`, a folder of safetensors, or `org/repo/file.gguf`; fetched if it is not here yet.
    pub(crate) fn fetch(&self, spec: &str, name: &str, progress: &mut dyn FnMut(Progress)) -> Result<PathBuf> {
        let wrong = |why: String| Error::Model { path: spec.into(), why };
        let parts: Vec<&str> = name.split('/').collect();
        if parts.len() < 2 || !parts.iter().all(|p| plain(p)) {
            return Err(wrong("expected hf:ORG/REPO or hf:ORG/REPO/FILE.gguf".into()));
        }
        let (repository, file) = (parts[..2].join("/"), parts[2..].join("/"));
        let folder = self.models.join(parts[..2].join("--"));
        let found = if file.is_empty() { folder.join("config.json") } else { folder.join(&file) };
        let result = if file.is_empty() { folder.clone() } else { found.clone() };
        if found.exists() {
            return Ok(result);
        }
        let (revision, all) = self.list(&repository).map_err(wrong)?;
        let wanted: Vec<Remote> = all.into_iter().filter(|f| wants(&f.name, &file)).collect();
        if wanted.is_empty() || (file.is_empty() && !wanted.iter().any(|f| f.name == "config.json")) {
            let what = if file.is_empty() { "model of safetensors" } else { &file };
            return Err(wrong(format!("there is no {what} in {repository}")));
        }
        let partial = self.models.join(format!(".partial-hf-{}", parts[..2].join("--")));
        let total = wanted.iter().map(|f| f.size).sum::<Option<u64>>();
        let mut before = 0;
        for remote in &wanted {
            let url = format!("{}/{repository}/resolve/{revision}/{}", self.endpoint, remote.name);
            let mut tell = |done: u64| progress(Progress { done: before + done, total });
            before += self.file(&url, remote, &partial.join(&remote.name), &mut tell).map_err(wrong)?;
        }
        fs::create_dir_all(&folder).map_err(io(&folder))?;
        // The configuration last: a folder that has it is whole.
        let last = wanted.iter().filter(|f| f.name == "config.json");
        for remote in wanted.iter().filter(|f| f.name != "config.json").chain(last) {
            let to = folder.join(&remote.name);
            if let Some(parent) = to.parent() {
                fs::create_dir_all(parent).map_err(io(parent))?;
            }
            fs::rename(partial.join(&remote.name), &to).map_err(io(&to))?;
        }
        let _ = fs::remove_dir_all(&partial);
        Ok(result)
    }

    fn get(&self, url: &str, from: u64) -> Result<ureq::http::Response<Body>, String> {
        let config = Agent::config_builder().http_status_as_error(false).timeout_connect(Some(Duration::from_secs(30)));
        let agent = Agent::new_with_config(config.timeout_recv_response(Some(Duration::from_secs(60))).build());
        let mut request = agent.get(url).header("user-agent", concat!("fir/", env!("CARGO_PKG_VERSION")));
        if let Some(token) = &self.token {
            // Sent to the hub alone: a redirect to where its files lie carries none.
            request = request.header("authorization", format!("Bearer {token}"));
        }
        if from > 0 {
            request = request.header("range", format!("bytes={from}-"));
        }
        let response = request.call().map_err(|e| format!("{url}: {e}"))?;
        match response.status() {
            s if s.is_success() || s == StatusCode::RANGE_NOT_SATISFIABLE => Ok(response),
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
                Err(format!("{url}: {}: there is none, or HF_TOKEN does not open it", response.status()))
            }
            status => Err(format!("{url}: {status}")),
        }
    }

    /// The commit that `main` is at, and its files.
    fn list(&self, repository: &str) -> Result<(String, Vec<Remote>), String> {
        let url = format!("{}/api/models/{repository}/revision/main?blobs=true", self.endpoint);
        let text = self.get(&url, 0)?.body_mut().read_to_string().map_err(|e| format!("{url}: {e}"))?;
        let json: Value = serde_json::from_str(&text).map_err(|e| format!("{url}: {e}"))?;
        let revision = json["sha"].as_str().filter(|s| plain(s)).ok_or_else(|| format!("{url}: no commit"))?;
        let files = json["siblings"].as_array().ok_or_else(|| format!("{url}: no list of files"))?;
        let file = |f: &Value| {
            let name = f["rfilename"].as_str().filter(|n| n.split('/').all(plain))?;
            let sha256 = f["lfs"]["sha256"].as_str().map(str::to_lowercase);
            Some(Remote { name: name.into(), size: f["lfs"]["size"].as_u64().or(f["size"].as_u64()), sha256 })
        };
        Ok((revision.into(), files.iter().filter_map(file).collect()))
    }

    /// Fetches a file to `to`; its size.
    fn file(&self, url: &str, remote: &Remote, to: &Path, tell: &mut dyn FnMut(u64)) -> Result<u64, String> {
        if let Ok(meta) = fs::metadata(to) {
            return Ok(meta.len());
        }
        let said = |path: &Path, e: std::io::Error| format!("{}: {e}", path.display());
        if let Some(parent) = to.parent() {
            fs::create_dir_all(parent).map_err(|e| said(parent, e))?;
        }
        let part = to.with_added_extension("part");
        let mut broken = String::new();
        for attempt in 0..TRIES {
            if attempt > 0 {
                std::thread::sleep(Duration::from_millis(200 << attempt));
            }
            match self.append(url, remote, &part, tell) {
                Ok(()) => break,
                Err(why) => broken = why,
            }
        }
        let size = fs::metadata(&part).map_or(0, |m| m.len());
        if remote.size.is_some_and(|want| want != size) || (size == 0 && !broken.is_empty()) {
            let want = remote.size.map_or("more".into(), |n| n.to_string());
            return Err(format!("{}: {size} bytes came, expected {want}: {broken}", remote.name));
        }
        if let Some(want) = &remote.sha256 {
            let got = hex(&digest(&part).map_err(|e| said(&part, e))?);
            if got != *want {
                let _ = fs::remove_file(&part);
                return Err(format!("{} has SHA-256 {got}, expected {want}", remote.name));
            }
        }
        File::open(&part).and_then(|f| f.sync_all()).map_err(|e| said(&part, e))?;
        fs::rename(&part, to).map_err(|e| said(to, e))?;
        Ok(size)
    }

    /// One connection's worth of a file, behind what is there.
    fn append(&self, url: &str, remote: &Remote, part: &Path, tell: &mut dyn FnMut(u64)) -> Result<(), String> {
        let said = |e: std::io::Error| format!("{}: {e}", part.display());
        let mut have = fs::metadata(part).map_or(0, |m| m.len());
        if remote.size == Some(have) {
            return Ok(());
        }
        let mut response = self.get(url, have)?;
        if response.status() != StatusCode::PARTIAL_CONTENT {
            // All of it comes, or what is there is more than there should be.
            have = 0;
        }
        let mut file = OpenOptions::new().create(true).write(true).truncate(have == 0).open(part).map_err(said)?;
        std::io::Seek::seek(&mut file, std::io::SeekFrom::Start(have)).map_err(said)?;
        if response.status() == StatusCode::RANGE_NOT_SATISFIABLE {
            return Err("the hub has less than was asked for".into());
        }
        let mut body = response.body_mut().as_reader();
        let mut buffer = vec![0; 1 << 18];
        loop {
            let n = body.read(&mut buffer).map_err(|e| format!("{url}: {e}"))?;
            if n == 0 {
                return Ok(());
            }
            file.write_all(&buffer[..n]).map_err(said)?;
            have += n as u64;
            tell(have);
        }
    }
}

/// A part of a path that stays where it is put.
fn plain(part: &str) -> bool {
    !part.is_empty()
        && !part.starts_with(['-', '.'])
        && part.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
}

fn wants(name: &str, file: &str) -> bool {
    if file.is_empty() { !name.contains('/') && ENDINGS.iter().any(|e| name.ends_with(e)) } else { name == file }
}

fn digest(path: &Path) -> std::io::Result<Vec<u8>> {
    let mut file = File::open(path)?;
    let (mut sha, mut buffer) = (Sha256::new(), vec![0; 1 << 20]);
    loop {
        let n = file.read(&mut buffer)?;
        if n == 0 {
            return Ok(sha.finalize().to_vec());
        }
        sha.update(&buffer[..n]);
    }
}

#[cfg(test)]
mod tests;
