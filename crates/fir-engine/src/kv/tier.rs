//! What has left the pool: pages kept in a memory budget, then in files, moved by a thread of its own.
//!
//! A tier is a cache of a cache: everything in it can be computed again. So a write that fails, a file that is gone,
//! cut short or altered means "not here", and no error reaches a request. Files are one page each: a header of 32 bytes
//! (magic, key, length, CRC-32 of the rest) and the page.

use std::collections::{HashMap, VecDeque};
use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;

use crate::error::{Error, Result};
use crate::sampler::fresh_seed;
use crate::stats::TierStats;

const MAGIC: [u8; 8] = *b"FIR-KV-1";
/// How names of engines' folders begin.
const PREFIX: &str = "fir-kv-";

/// How much may be kept below the pool.
#[derive(Clone, Debug, Default)]
pub(crate) struct Budget {
    /// Bytes of memory.
    pub host: u64,
    /// A folder and bytes in it.
    pub disk: Option<(PathBuf, u64)>,
}

/// A page that was asked for.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Fetch {
    /// Here it is; the tier has it no more.
    Ready(Vec<u8>),
    /// It is being read; `wake` is called when it has come.
    Pending,
    /// Not here.
    Missing,
}

#[derive(Debug)]
enum Entry {
    Host(Vec<u8>),
    Disk { bytes: u64, wanted: bool },
}

#[derive(Debug, Default)]
struct State {
    entries: HashMap<u64, Entry>,
    /// Oldest first; keys that have moved on are skipped.
    host: VecDeque<u64>,
    disk: VecDeque<u64>,
    wanted: VecDeque<u64>,
    /// Files of entries that are gone.
    unlink: Vec<u64>,
    lost: Vec<u64>,
    stats: TierStats,
    stop: bool,
}

struct Shared {
    state: Mutex<State>,
    work: Condvar,
    host_budget: u64,
    disk: Option<(PathBuf, u64)>,
    /// Says that the folder is in use, for as long as it is held.
    _used: Option<fs::File>,
    wake: Box<dyn Fn() + Send + Sync>,
}

/// Pages below the pool, by key.
pub(crate) struct Tier {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    next_key: u64,
}

impl Tier {
    /// `wake` is called from the tier's thread when a page that was [`Fetch::Pending`] has come or is lost.
    pub(crate) fn new(budget: Budget, wake: impl Fn() + Send + Sync + 'static) -> Result<Self> {
        let (mut disk, mut used) = (None, None);
        if let Some((folder, bytes)) = budget.disk {
            let (own, lock) =
                own_folder(&folder).map_err(|source| Error::Io { path: folder.display().to_string(), source })?;
            (disk, used) = (Some((own, bytes)), Some(lock));
        }
        let shared = Arc::new(Shared {
            state: Mutex::default(),
            work: Condvar::new(),
            host_budget: budget.host,
            disk,
            _used: used,
            wake: Box::new(wake),
        });
        let of_thread = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("fir-tier".into())
            .spawn(move || run(&of_thread))
            .map_err(|source| Error::Io { path: "thread fir-tier".into(), source })?;
        Ok(Self { shared, thread: Some(thread), next_key: 0 })
    }

    /// A key for a page of `bytes`, if there is room for it now: writing files may be behind.
    pub(crate) fn reserve(&mut self, bytes: usize) -> Option<u64> {
        let state = self.lock();
        if state.stats.host_bytes + bytes as u64 > self.shared.host_budget {
            return None;
        }
        drop(state);
        self.next_key += 1;
        Some(self.next_key)
    }

    pub(crate) fn put(&mut self, key: u64, page: Vec<u8>) {
        let mut state = self.lock();
        state.stats.host_bytes += page.len() as u64;
        state.stats.stored += 1;
        state.entries.insert(key, Entry::Host(page));
        state.host.push_back(key);
        drop(state);
        self.shared.work.notify_one();
    }

    /// The page of `key`, or a start at reading it.
    pub(crate) fn take(&mut self, key: u64) -> Fetch {
        let mut state = self.lock();
        match state.entries.get_mut(&key) {
            Some(Entry::Host(page)) => {
                let page = std::mem::take(page);
                state.entries.remove(&key);
                state.stats.host_bytes -= page.len() as u64;
                state.stats.restored += 1;
                Fetch::Ready(page)
            }
            Some(Entry::Disk { wanted, .. }) => {
                if !std::mem::replace(wanted, true) {
                    state.wanted.push_back(key);
                    drop(state);
                    self.shared.work.notify_one();
                }
                Fetch::Pending
            }
            None => Fetch::Missing,
        }
    }

    /// Starts reading a page that will be taken soon.
    pub(crate) fn prefetch(&mut self, key: u64) {
        let mut state = self.lock();
        if let Some(Entry::Disk { wanted, .. }) = state.entries.get_mut(&key)
            && !std::mem::replace(wanted, true)
        {
            state.wanted.push_back(key);
            drop(state);
            self.shared.work.notify_one();
        }
    }

    /// Drops what nobody will ask for again.
    pub(crate) fn discard(&mut self, key: u64) {
        let mut state = self.lock();
        match state.entries.remove(&key) {
            Some(Entry::Host(page)) => state.stats.host_bytes -= page.len() as u64,
            Some(Entry::Disk { bytes, .. }) => {
                state.stats.disk_bytes -= bytes;
                state.unlink.push(key);
                drop(state);
                self.shared.work.notify_one();
            }
            None => {}
        }
    }

    /// Keys whose pages are gone since the last call.
    pub(crate) fn lost(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.lock().lost)
    }

    pub(crate) fn stats(&self) -> TierStats {
        self.lock().stats
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.shared)
    }
}

impl Drop for Tier {
    fn drop(&mut self) {
        self.lock().stop = true;
        self.shared.work.notify_one();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        if let Some((folder, _)) = &self.shared.disk {
            remove(folder);
        }
    }
}

fn lock(shared: &Shared) -> MutexGuard<'_, State> {
    // The state is plain data, whole after every statement: a panic elsewhere does not spoil it.
    shared.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// A folder of this engine alone, as others may be given the same one (from another machine's view of the disk too, where
/// process numbers repeat), and the file beside it that is locked while it is in use. Folders of engines that were killed
/// are removed: the system has let go of their locks.
fn own_folder(folder: &Path) -> std::io::Result<(PathBuf, fs::File)> {
    fs::create_dir_all(folder)?;
    for other in fs::read_dir(folder)?.filter_map(std::result::Result::ok) {
        let path = other.path();
        if !other.file_name().to_string_lossy().starts_with(PREFIX) || !path.is_dir() {
            continue;
        }
        let dead = match fs::File::open(lock_of(&path)) {
            Ok(file) => file.try_lock().is_ok(),
            Err(error) => error.kind() == std::io::ErrorKind::NotFound,
        };
        if dead {
            remove(&path);
        }
    }
    let own = folder.join(format!("{PREFIX}{:016x}", fresh_seed()));
    // Before there is a folder to be found. Where files cannot be locked, nobody can lock this one, and all folders stay.
    let used = fs::File::create_new(lock_of(&own))?;
    let _ = used.lock();
    fs::create_dir(&own)?;
    Ok((own, used))
}

fn lock_of(own: &Path) -> PathBuf {
    own.with_extension("lock")
}

fn remove(own: &Path) {
    let _ = fs::remove_dir_all(own);
    let _ = fs::remove_file(lock_of(own));
}

fn file(folder: &Path, key: u64) -> PathBuf {
    folder.join(format!("{key:016x}.kv"))
}

/// The thread: reads what is waited for, then writes what is too much for the memory budget, then removes files.
fn run(shared: &Shared) {
    let mut state = lock(shared);
    loop {
        if state.stop {
            return;
        }
        if let Some(key) = state.wanted.pop_front() {
            if !matches!(state.entries.get(&key), Some(Entry::Disk { .. })) {
                continue;
            }
            let Some((folder, _)) = &shared.disk else { continue };
            drop(state);
            let page = read(&file(folder, key), key);
            state = lock(shared);
            // It may have been discarded meanwhile.
            if let Some(Entry::Disk { bytes, .. }) = state.entries.remove(&key) {
                state.stats.disk_bytes -= bytes;
                match page {
                    Some(page) => {
                        state.stats.host_bytes += page.len() as u64;
                        state.entries.insert(key, Entry::Host(page));
                        state.host.push_back(key);
                    }
                    None => {
                        state.stats.damaged += 1;
                        state.lost.push(key);
                    }
                }
                state.unlink.push(key);
            }
            drop(state);
            (shared.wake)();
            state = lock(shared);
        } else if let Some(key) = state.unlink.pop() {
            drop(state);
            if let Some((folder, _)) = &shared.disk {
                let _ = fs::remove_file(file(folder, key));
            }
            state = lock(shared);
        // A quarter of the budget stays free, so that evictions need not wait for the disk.
        } else if state.stats.host_bytes > shared.host_budget / 4 * 3 && !state.host.is_empty() {
            state = spill(shared, state);
        } else {
            state = shared.work.wait(state).unwrap_or_else(|poisoned| poisoned.into_inner());
        }
    }
}

/// Moves the oldest page in memory to a file, or drops it if there is no room for files.
fn spill<'a>(shared: &'a Shared, mut state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
    let Some(key) = state.host.pop_front() else { return state };
    let Some(Entry::Host(page)) = state.entries.get_mut(&key) else { return state };
    let bytes = page.len() as u64;
    let Some((folder, budget)) = shared.disk.as_ref().filter(|(_, budget)| bytes <= *budget) else {
        state.entries.remove(&key);
        state.stats.host_bytes -= bytes;
        state.lost.push(key);
        return state;
    };
    // The entry stays, without its page, while the file is written: it is not there to take, nor to lose.
    let page = std::mem::take(page);
    state.entries.insert(key, Entry::Disk { bytes, wanted: false });
    state.stats.disk_bytes += bytes;
    while state.stats.disk_bytes > *budget {
        let Some(oldest) = state.disk.pop_front() else { break };
        if let Some(&Entry::Disk { bytes, .. }) = state.entries.get(&oldest) {
            state.stats.disk_bytes -= bytes;
            state.entries.remove(&oldest);
            state.lost.push(oldest);
            state.unlink.push(oldest);
        }
    }
    drop(state);
    let written = write(&file(folder, key), key, &page);
    let mut state = lock(shared);
    state.stats.host_bytes -= bytes;
    match written {
        Ok(()) => {
            state.stats.written += 1;
            state.disk.push_back(key);
        }
        Err(_) => {
            state.stats.damaged += 1;
            if state.entries.remove(&key).is_some() {
                state.stats.disk_bytes -= bytes;
                state.lost.push(key);
            }
            state.unlink.push(key);
        }
    }
    state
}

fn write(path: &Path, key: u64, page: &[u8]) -> std::io::Result<()> {
    let mut header = [0; 32];
    header[..8].copy_from_slice(&MAGIC);
    header[8..16].copy_from_slice(&key.to_le_bytes());
    header[16..24].copy_from_slice(&(page.len() as u64).to_le_bytes());
    header[24..28].copy_from_slice(&crc32fast::hash(page).to_le_bytes());
    let mut file = fs::File::create(path)?;
    file.write_all(&header)?;
    file.write_all(page)
}

fn read(path: &Path, key: u64) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    fs::File::open(path).ok()?.read_to_end(&mut bytes).ok()?;
    let (header, page) = bytes.split_first_chunk::<32>()?;
    let good = header[..8] == MAGIC
        && header[8..16] == key.to_le_bytes()
        && header[16..24] == (page.len() as u64).to_le_bytes()
        && header[24..28] == crc32fast::hash(page).to_le_bytes();
    good.then(|| bytes.split_off(32))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, Instant};

    fn page(key: u64) -> Vec<u8> {
        (0..1000u64).map(|i| (i * 7 + key) as u8).collect()
    }

    fn folder(name: &str) -> PathBuf {
        std::env::temp_dir().join(format!("fir-tier-test-{}-{name}", std::process::id()))
    }

    fn until(what: &str, mut done: impl FnMut() -> bool) {
        let start = Instant::now();
        while !done() {
            assert!(start.elapsed() < Duration::from_secs(20), "{what} did not happen");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn filled(name: &str, pages: u64, disk: u64) -> (Tier, PathBuf, Vec<u64>) {
        let path = folder(name);
        let budget = Budget { host: 8_000, disk: Some((path.clone(), disk)) };
        let mut tier = Tier::new(budget, || {}).unwrap();
        let mut keys = Vec::new();
        for _ in 0..pages {
            let mut key = None;
            until("room in the memory budget", || {
                key = tier.reserve(1000);
                key.is_some()
            });
            let key = key.unwrap();
            tier.put(key, page(key));
            keys.push(key);
        }
        until("spilling", || tier.stats().host_bytes <= 6_000);
        (tier, path, keys)
    }

    /// The one engine's folder in `path`.
    fn own_of(path: &Path) -> PathBuf {
        let mut own = fs::read_dir(path).unwrap().map(|e| e.unwrap().path()).filter(|p| p.is_dir());
        let first = own.next().unwrap();
        assert_eq!(own.next(), None);
        first
    }

    #[test]
    fn folders_of_engines_that_were_killed_are_removed_and_those_of_others_not() {
        let (mut first, path, keys) = filled("killed", 40, 1 << 20);
        // What a killed process leaves: files, and a lock that nobody holds.
        for name in ["fir-kv-1-0", "fir-kv-00000000deadbeef"] {
            fs::create_dir(path.join(name)).unwrap();
            fs::write(path.join(name).join("0000000000000001.kv"), b"torn").unwrap();
        }
        fs::write(path.join("fir-kv-00000000deadbeef.lock"), b"").unwrap();
        fs::create_dir(path.join("somebody-elses")).unwrap();
        let budget = Budget { host: 8_000, disk: Some((path.clone(), 1 << 20)) };
        let second = Tier::new(budget, || {}).unwrap();
        let mut left: Vec<_> = fs::read_dir(&path).unwrap().map(|e| e.unwrap().file_name()).collect();
        left.sort();
        assert_eq!(left.len(), 5, "two folders and their locks, and a stranger's: {left:?}");
        drop(second);
        for &key in &keys {
            assert_eq!(take(&mut first, key), Fetch::Ready(page(key)));
        }
        drop(first);
        assert_eq!(fs::read_dir(&path).unwrap().count(), 1);
        fs::remove_dir_all(path).unwrap();
    }

    fn take(tier: &mut Tier, key: u64) -> Fetch {
        let mut got = Fetch::Pending;
        until("a page", || {
            got = tier.take(key);
            got != Fetch::Pending
        });
        got
    }

    #[test]
    fn pages_come_back_as_they_were_from_memory_and_from_files() {
        let (mut tier, path, keys) = filled("whole", 40, 1 << 20);
        assert!(tier.stats().written >= 34);
        for &key in keys.iter().rev() {
            assert_eq!(take(&mut tier, key), Fetch::Ready(page(key)));
            assert_eq!(tier.take(key), Fetch::Missing, "a page is given once");
        }
        until("removal of files", || fs::read_dir(own_of(&path)).unwrap().count() == 0);
        let stats = tier.stats();
        assert_eq!((stats.host_bytes, stats.disk_bytes, stats.restored, stats.damaged), (0, 0, 40, 0));
        drop(tier);
        assert_eq!(fs::read_dir(&path).unwrap().count(), 0, "the folder is gone with the tier");
        fs::remove_dir_all(path).unwrap();
    }

    #[test]
    fn damaged_files_are_missing_pages() {
        let (mut tier, path, keys) = filled("damaged", 40, 1 << 20);
        let own = own_of(&path);
        fs::remove_file(file(&own, keys[0])).unwrap();
        let cut = fs::OpenOptions::new().write(true).open(file(&own, keys[1])).unwrap();
        cut.set_len(500).unwrap();
        let mut altered = fs::read(file(&own, keys[2])).unwrap();
        altered[700] ^= 1;
        fs::write(file(&own, keys[2]), altered).unwrap();
        fs::copy(file(&own, keys[4]), file(&own, keys[3])).unwrap(); // another key's page
        for &key in &keys[..4] {
            assert_eq!(take(&mut tier, key), Fetch::Missing);
        }
        assert_eq!(tier.lost(), &keys[..4]);
        assert_eq!(tier.stats().damaged, 4);
        assert_eq!(take(&mut tier, keys[4]), Fetch::Ready(page(keys[4])));
        drop(tier);
        fs::remove_dir_all(path).unwrap();
    }

    #[test]
    fn budgets_hold_and_what_falls_out_is_named() {
        let (mut tier, path, keys) = filled("budget", 60, 10_000);
        until("room on disk", || tier.stats().disk_bytes <= 10_000);
        let lost = tier.lost();
        assert!(lost.len() >= 60 - 8 - 10, "{} lost", lost.len());
        for key in keys {
            let want = if lost.contains(&key) { Fetch::Missing } else { Fetch::Ready(page(key)) };
            assert_eq!(take(&mut tier, key), want);
        }
        drop(tier);
        fs::remove_dir_all(path).unwrap();
        // Without a folder, what is too much is dropped.
        let mut tier = Tier::new(Budget { host: 4_000, disk: None }, || {}).unwrap();
        for _ in 0..4 {
            let key = tier.reserve(1000).unwrap();
            tier.put(key, page(key));
        }
        until("dropping", || tier.stats().host_bytes <= 3_000);
        assert_eq!(tier.lost(), [1]);
    }
}
