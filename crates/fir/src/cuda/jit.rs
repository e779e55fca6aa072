//! Compiled kernels: from memory, else from disk, else by NVRTC.
#![doc = include_str!("../../docs/jit.md")]

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

pub use super::arch::Arch;
use super::nvrtc::{Job, Nvrtc};
use super::params::{Params, Twin};
use super::source::{self, Hash};
use super::{
    activation, attention, gemm, gemm_blocks, lora, modulate, moe, norm, page, put, quantize, rope, sampling,
    speculative, tokens, topk,
};
use crate::env;
use crate::error::{Error, Result};

/// One instantiation of a kernel's template: what is compiled.
#[derive(Clone, Debug)]
pub struct Source {
    /// File under `kernels/` that holds the template.
    pub(crate) file: &'static str,
    /// C++ name with the template's arguments.
    pub(crate) name: String,
    /// Text before the file's: what the arguments name that no file has, such as a variant.
    pub(crate) prelude: String,
    pub(crate) params: Twin,
}

impl PartialEq for Source {
    fn eq(&self, other: &Self) -> bool {
        (self.file, &self.name, &self.prelude) == (other.file, &other.name, &other.prelude)
    }
}

impl Eq for Source {}

impl std::hash::Hash for Source {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.name.hash(state);
    }
}

/// What a kernel needs of the device, by the compiler's count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes that a thread stores for want of registers.
    pub spilled: u32,
    /// Bytes of a thread's stack.
    pub stack: u32,
    /// Static shared memory of a block, in bytes.
    pub shared: u32,
}

/// A compiled kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cubin {
    pub(crate) image: Vec<u8>,
    /// The kernel's name in the image.
    pub(crate) symbol: String,
    /// What the compiler counted.
    pub usage: Usage,
}

/// Where a compiled kernel came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// Compiled or read earlier in this process.
    Memory,
    /// The cache's folder.
    Disk,
    /// NVRTC.
    Compiled,
}

/// A file of the cache.
#[derive(Clone, Debug)]
pub struct Entry {
    /// Name of the kernel, and what it was compiled for and with.
    pub title: String,
    /// The file.
    pub path: PathBuf,
    /// Its size.
    pub bytes: u64,
}

type Hook = Box<dyn Fn(&str, Arch) + Send + Sync>;
static HOOK: OnceLock<Hook> = OnceLock::new();

/// Calls `hook` with a kernel's name whenever one is about to be compiled, in this process and from now on. The first hook
/// stays; whether this is it is the answer.
pub fn on_compile(hook: impl Fn(&str, Arch) + Send + Sync + 'static) -> bool {
    HOOK.set(Box::new(hook)).is_ok()
}

/// Every instantiation that an operator may choose: what `fir jit build` compiles.
pub fn kernels() -> Vec<Source> {
    [
        activation::kernels(),
        attention::kernels(),
        gemm::kernels(),
        gemm_blocks::kernels(),
        lora::kernels(),
        modulate::kernels(),
        moe::kernels(),
        norm::kernels(),
        page::kernels(),
        put::kernels(),
        quantize::kernels(),
        rope::kernels(),
        sampling::kernels(),
        speculative::kernels(),
        tokens::kernels(),
        topk::kernels(),
    ]
    .concat()
}

impl Source {
    /// The kernel `name` of `file`, which takes a `P`.
    pub(crate) fn new<P: Params>(file: &'static str, name: String) -> Self {
        Self { file, name, prelude: String::new(), params: Twin::of::<P>() }
    }

    /// Its name: the C++ template with its arguments.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The file that its template is in, without the extension.
    pub fn family(&self) -> &str {
        self.file.trim_end_matches(".cuh")
    }

    /// Whether devices of `arch` run it: the files `sm90_…` use instructions that Hopper alone has.
    pub fn runs_on(&self, arch: Arch) -> bool {
        let name = self.file.rsplit('/').next().unwrap_or_default();
        arch == Arch::HOPPER || !name.starts_with("sm90_")
    }

    /// The text that is compiled.
    fn text(&self) -> String {
        format!("{}#include <fir/{}>\n{}", self.prelude, self.file, self.params.assertions())
    }

    fn options(arch: Arch) -> Vec<String> {
        [format!("--gpu-architecture={arch}")]
            .into_iter()
            // Lambdas and hooks that say nothing of where they run are for the device: there is no host here.
            .chain(["--std=c++17", "--ptxas-options=-v", "--device-as-default-execution-space"].map(String::from))
            .chain(std::env::var(env::FIR_RACECHECK).is_ok_and(|v| v == "1").then(|| "-DFIR_EACH_LANE".into()))
            .collect()
    }

    /// Hash of all that decides the result but the compiler's version.
    fn hash(&self, arch: Arch) -> u128 {
        let mut hash = Hash::new();
        hash.add(self.name.as_bytes()).add(self.text().as_bytes());
        for option in Self::options(arch) {
            hash.add(option.as_bytes());
        }
        for (name, text) in source::with_includes(self.file) {
            hash.add(name.as_bytes()).add(text.as_bytes());
        }
        hash.finish()
    }
}

/// The kernel, compiled for `arch` by an NVRTC that a driver of major version `driver` can load the output of.
///
/// However many threads ask for one kernel, one of them compiles it and the others wait.
pub(crate) fn cubin(source: &Source, arch: Arch, driver: i32) -> Result<(Arc<Cubin>, Origin)> {
    type Slot = Arc<OnceLock<Result<Arc<Cubin>>>>;
    static MEMORY: Mutex<Option<HashMap<(u128, i32), Slot>>> = Mutex::new(None);
    let hash = source.hash(arch);
    let slot = {
        let mut memory = MEMORY.lock().unwrap_or_else(|e| e.into_inner());
        memory.get_or_insert_default().entry((hash, driver)).or_default().clone()
    };
    let mut origin = Origin::Memory;
    let found = slot.get_or_init(|| {
        let (cubin, from) = disk_or_compile(source, arch, driver, hash)?;
        origin = from;
        Ok(Arc::new(cubin))
    });
    Ok((found.clone()?, origin))
}

/// Compiles `source` for `arch` unless that was done before, and keeps the result for later runs.
///
/// Needs no GPU. The compiler is the newest there is; a driver may be older than it, which [`crate::exec::Exec::cuda`]
/// sees to when there is one.
pub fn build(source: &Source, arch: Arch) -> Result<(Arc<Cubin>, Origin)> {
    cubin(source, arch, i32::MAX)
}

/// [`build`], and a copy in `folder`, which [`env::FIR_CUBIN_DIR`] may name on another machine.
pub fn build_into(folder: &Path, source: &Source, arch: Arch) -> Result<(Arc<Cubin>, Origin)> {
    let (cubin, origin) = build(source, arch)?;
    let version = Nvrtc::get(i32::MAX)?.version();
    let path = folder.join(file_name(source.hash(arch), version));
    store(&path, &encode(&cubin, &title(source, arch, version)))
        .map_err(|e| Error::Io { path: path.display().to_string(), what: e.to_string() })?;
    Ok((cubin, origin))
}

/// Compiles `source` for `arch` whatever the cache holds, and leaves that alone.
pub fn compile(source: &Source, arch: Arch) -> Result<Cubin> {
    compile_with(Nvrtc::get(i32::MAX)?, source, arch)
}

/// Compiles the kernel `name` of a text of the caller's own, with these options of NVRTC beside the architecture; C++17 unless they say
/// otherwise. Needs no GPU, and no cache is looked into.
pub fn compile_text(text: &str, name: &str, options: &[String], arch: Arch) -> Result<Cubin> {
    compile_own(text, name, options, arch, i32::MAX)
}

/// The same for a driver of major version `driver`.
pub(super) fn compile_own(text: &str, name: &str, options: &[String], arch: Arch, driver: i32) -> Result<Cubin> {
    let options: Vec<_> = [format!("--gpu-architecture={arch}"), "--std=c++17".into(), "--ptxas-options=-v".into()]
        .into_iter()
        .chain(options.iter().cloned())
        .collect();
    let job = Job { text, headers: &[], options: &options, kernel: name };
    let out = Nvrtc::get(driver)?.compile(&job).map_err(|log| Error::Compile {
        kernel: name.to_owned(),
        arch: arch.to_string(),
        source_path: "the caller's".into(),
        log,
    })?;
    Ok(Cubin { usage: usage(&out.log), image: out.cubin, symbol: out.symbol })
}

/// Version and file of the compiler, or why there is none.
pub fn compiler() -> Result<String> {
    let nvrtc = Nvrtc::get(i32::MAX)?;
    let (major, minor) = nvrtc.version();
    Ok(format!("NVRTC {major}.{minor}, {}", nvrtc.path().display()))
}

fn disk_or_compile(source: &Source, arch: Arch, driver: i32, hash: u128) -> Result<(Cubin, Origin)> {
    if let Some(given) = prebuilt()?
        && let Some(cubin) = any_version(&given, source, arch, driver, hash)
    {
        return Ok((cubin, Origin::Disk));
    }
    let folder = folder()?;
    let nvrtc = match Nvrtc::get(driver) {
        Ok(nvrtc) => nvrtc,
        // Without a compiler any version's result will do, if the driver can load it.
        Err(missing) => {
            return any_version(&folder, source, arch, driver, hash).map(|c| (c, Origin::Disk)).ok_or(missing);
        }
    };
    let version = nvrtc.version();
    let (path, title) = (folder.join(file_name(hash, version)), title(source, arch, version));
    if let Some(cubin) = fs::read(&path).ok().and_then(|bytes| decode(&bytes, &title)) {
        return Ok((cubin, Origin::Disk));
    }
    let cubin = compile_with(nvrtc, source, arch)?;
    // A disk that is full or read-only costs the cache and no more.
    let _ = store(&path, &encode(&cubin, &title));
    Ok((cubin, Origin::Compiled))
}

fn compile_with(nvrtc: &Nvrtc, source: &Source, arch: Arch) -> Result<Cubin> {
    if let Some(hook) = HOOK.get() {
        hook(&source.name, arch);
    }
    let text = source.text();
    let files = source::with_includes(source.file);
    let headers: Vec<_> = files.iter().map(|(name, text)| (format!("fir/{name}"), *text)).collect();
    let job = Job { text: &text, headers: &headers, options: &Source::options(arch), kernel: &source.name };
    match nvrtc.compile(&job) {
        Ok(out) => Ok(Cubin { usage: usage(&out.log), image: out.cubin, symbol: out.symbol }),
        Err(log) => {
            let path = folder()?.join("failed").join(format!("{:032x}.cu", source.hash(arch)));
            let kept = store(&path, format!("// {} for {arch}\n{text}", source.name).as_bytes());
            let source_path = kept.map_or_else(|e| format!("not kept: {e}"), |()| path.display().to_string());
            Err(Error::Compile { kernel: source.name.clone(), arch: arch.to_string(), source_path, log })
        }
    }
}

/// Numbers in the compiler's log, such as `Used 58 registers, used 1 barriers, 1024 bytes smem`.
fn usage(log: &str) -> Usage {
    let before = |unit: &str| -> u32 {
        log.match_indices(unit)
            .filter_map(|(at, _)| {
                log[..at].trim_end().rsplit(|c: char| !c.is_ascii_digit()).next()?.parse::<u32>().ok()
            })
            .max()
            .unwrap_or(0)
    };
    Usage {
        registers: before(" registers"),
        spilled: before(" bytes spill stores"),
        stack: before(" bytes stack frame"),
        shared: before(" bytes smem"),
    }
}

/// Folder of compiled kernels.
pub fn folder() -> Result<PathBuf> {
    let base = match env::read::<PathBuf>(env::FIR_CACHE_DIR, "a folder")? {
        Some(given) => given,
        None => {
            let variable = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|p| p.is_absolute());
            let cache = variable("XDG_CACHE_HOME").or_else(|| Some(variable("HOME")?.join(".cache")));
            cache.unwrap_or_else(std::env::temp_dir).join("fir")
        }
    };
    Ok(base.join("kernels"))
}

/// Folder of kernels that were compiled elsewhere, if one is named.
fn prebuilt() -> Result<Option<PathBuf>> {
    env::read(env::FIR_CUBIN_DIR, "a folder")
}

/// Whether there are kernels that need no compiler.
pub(super) fn any_built() -> Result<bool> {
    Ok(!files(&folder()?).is_empty() || prebuilt()?.is_some_and(|given| !files(&given).is_empty()))
}

/// The files of the cache.
pub fn list() -> Result<Vec<Entry>> {
    let folder = folder()?;
    let mut entries = Vec::new();
    for path in files(&folder) {
        let Ok(bytes) = fs::read(&path) else { continue };
        let title =
            split(&bytes).map_or("damaged: will be rebuilt", |(text, _)| text.lines().next().unwrap_or_default());
        entries.push(Entry { title: title.to_owned(), bytes: bytes.len() as u64, path });
    }
    entries.sort_by(|a, b| a.title.cmp(&b.title));
    Ok(entries)
}

/// Removes the files of the cache; how many they were.
pub fn clean() -> Result<usize> {
    let found = files(&folder()?);
    for path in &found {
        if let Err(e) = fs::remove_file(path)
            && e.kind() != std::io::ErrorKind::NotFound
        {
            return Err(Error::Io { path: path.display().to_string(), what: e.to_string() });
        }
    }
    Ok(found.len())
}

/// Files that this cache made, temporary ones that a killed process left too.
fn files(folder: &Path) -> Vec<PathBuf> {
    let ours = |p: &PathBuf| p.extension().is_some_and(|e| e == "fircubin" || e == "firtmp");
    fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).filter(ours).collect()
}

fn file_name(hash: u128, (major, minor): (i32, i32)) -> String {
    format!("{hash:032x}-{major}.{minor}.fircubin")
}

fn title(source: &Source, arch: Arch, (major, minor): (i32, i32)) -> String {
    format!("{} {arch} nvrtc-{major}.{minor}", source.name)
}

/// A cached result of any version of the compiler that `driver` can load.
fn any_version(folder: &Path, source: &Source, arch: Arch, driver: i32, hash: u128) -> Option<Cubin> {
    files(folder).into_iter().find_map(|path| {
        let name = path.file_name()?.to_string_lossy().into_owned();
        let (major, minor) = name.strip_prefix(&format!("{hash:032x}-"))?.strip_suffix(".fircubin")?.split_once('.')?;
        let version = (major.parse().ok()?, minor.parse().ok()?);
        (version.0 <= driver).then_some(())?;
        decode(&fs::read(&path).ok()?, &title(source, arch, version))
    })
}

const MAGIC: &[u8; 8] = b"fircubn2";

/// A cache file: a mark, the hash of all that follows, the length of a text, the text (title, symbol, usage), the image.
fn encode(cubin: &Cubin, title: &str) -> Vec<u8> {
    let Usage { registers, spilled, stack, shared } = cubin.usage;
    let text = format!("{title}\n{}\n{registers} {spilled} {stack} {shared}", cubin.symbol);
    let mut rest = (text.len() as u32).to_le_bytes().to_vec();
    rest.extend_from_slice(text.as_bytes());
    rest.extend_from_slice(&cubin.image);
    [&MAGIC[..], &Hash::new().add(&rest).finish().to_le_bytes(), &rest].concat()
}

/// Text and image of a cache file; nothing if it is torn, changed or of another kind.
fn split(bytes: &[u8]) -> Option<(&str, &[u8])> {
    let (hash, rest) = bytes.strip_prefix(MAGIC)?.split_first_chunk::<16>()?;
    if Hash::new().add(rest).finish().to_le_bytes() != *hash {
        return None;
    }
    let (len, rest) = rest.split_first_chunk::<4>()?;
    let (text, image) = rest.split_at_checked(u32::from_le_bytes(*len) as usize)?;
    Some((std::str::from_utf8(text).ok()?, image))
}

fn decode(bytes: &[u8], want: &str) -> Option<Cubin> {
    let (text, image) = split(bytes)?;
    let mut lines = text.lines();
    if lines.next()? != want {
        return None;
    }
    let (symbol, numbers) = (lines.next()?.to_owned(), lines.next()?);
    let mut numbers = numbers.split(' ').map(|n| n.parse().ok());
    let mut next = || numbers.next().flatten();
    let usage = Usage { registers: next()?, spilled: next()?, stack: next()?, shared: next()? };
    Some(Cubin { image: image.to_owned(), symbol, usage })
}

/// Writes beside `path` and renames into place, so that a reader sees the old file or the whole new one.
fn store(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    let unique = format!("{}-{}.firtmp", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
    let temporary = path.with_extension(unique);
    let done = fs::write(&temporary, bytes).and_then(|()| fs::rename(&temporary, path));
    if done.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    done
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cubin() -> Cubin {
        let usage = Usage { registers: 40, spilled: 0, stack: 8, shared: 128 };
        Cubin { image: (0..200u8).collect(), symbol: "_Z1k".into(), usage }
    }

    #[test]
    fn cache_files_are_read_back_and_damage_is_seen() {
        let bytes = encode(&cubin(), "k sm_90a nvrtc-13.0");
        assert_eq!(decode(&bytes, "k sm_90a nvrtc-13.0"), Some(cubin()));
        assert_eq!(decode(&bytes, "other sm_90a nvrtc-13.0"), None);
        for len in 0..bytes.len() {
            assert_eq!(split(&bytes[..len]), None, "cut to {len}");
        }
        for at in 0..bytes.len() {
            let mut changed = bytes.clone();
            changed[at] ^= 1;
            assert_eq!(split(&changed), None, "changed at {at}");
        }
        assert_eq!(split(&[&bytes[..], b"x"].concat()), None);
    }

    #[test]
    fn a_stored_file_replaces_the_old_one_whole() {
        let folder = std::env::temp_dir().join(format!("fir-jit-{}", std::process::id()));
        let path = folder.join("a/x.fircubin");
        for bytes in [&b"old"[..], b"new and longer"] {
            store(&path, bytes).unwrap();
            assert_eq!(fs::read(&path).unwrap(), bytes);
        }
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1, "temporary files are gone");
        // A file where a folder should be: an error, no panic.
        assert!(store(&path.join("y"), b"z").is_err());
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn numbers_of_the_log_are_read() {
        let log = "ptxas info    : 3 bytes gmem\nptxas info    : Compiling entry function '_Z' for 'sm_90a'\n\
                   ptxas info    : Function properties for _Z\n    16 bytes stack frame, 12 bytes spill stores, 4 bytes spill loads\n\
                   ptxas info    : Used 58 registers, used 1 barriers, 1024 bytes smem";
        assert_eq!(usage(log), Usage { registers: 58, spilled: 12, stack: 16, shared: 1024 });
        assert_eq!(usage(""), Usage::default());
    }
}
