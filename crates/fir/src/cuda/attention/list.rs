//! [`List`]: the work list, as `state.cuh` reads it, in memory that stays where it is from batch to batch.

use bytemuck::{Pod, Zeroable};

use super::super::call::Call;
use super::super::driver::Buffer;
use super::super::exec::Gpu;
use super::super::params::Address;
use super::Batch;
use crate::error::{Error, Result};
use crate::plan::{DeviceSizes, Item, Scratch};
use crate::tensor::DeviceMemory;

/// `fir::WorkItem`.
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
#[repr(C)]
struct WorkItem {
    request: i32,
    q_start: i32,
    tokens: i32,
    q_idx: i32,
    q_len: i32,
    kv_len: i32,
    head_start: i32,
    head_end: i32,
    kv_start: i32,
    kv_end: i32,
    pages: i32,
    partial: i32,
    merge: i32,
    next: i32,
    kv_base: i32,
    pad: i32,
}

/// `fir::MergeItem`.
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
#[repr(C)]
struct MergeItem {
    first: i32,
    stride: i32,
    parts: i32,
    pad: i32,
}

/// Entries that there is room for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Room {
    starts: usize,
    merges: usize,
    tokens: usize,
    items: usize,
}

impl Room {
    fn max(self, other: Self) -> Self {
        Self {
            starts: self.starts.max(other.starts),
            merges: self.merges.max(other.merges),
            tokens: self.tokens.max(other.tokens),
            items: self.items.max(other.items),
        }
    }

    /// Where requests' starts, merges, tokens and items begin, and the end. Items are last: as many as there are travel.
    fn offsets(self) -> [usize; 5] {
        let merges = (self.starts * 4).next_multiple_of(64);
        let tokens = merges + self.merges * size_of::<MergeItem>();
        let items = (tokens + self.tokens * 16).next_multiple_of(64);
        [0, merges, tokens, items, items + self.items * size_of::<WorkItem>()]
    }
}

/// The device's copy of a schedule.
#[derive(Debug)]
pub(super) struct List {
    gpu: Gpu,
    room: Room,
    /// None on a dry run.
    memory: Option<Buffer>,
    bytes: Vec<u8>,
    /// Whether tokens stand elsewhere than their items say: a level of a cascade.
    has_tokens: bool,
    is_empty: bool,
}

/// Where the list of a dry run is.
const NOWHERE: u64 = 3 << 60;

impl List {
    /// Room for balanced cuts of `tiles` query tiles, of a request each.
    pub(super) fn new(gpu: &Gpu, tiles: usize, workers: usize) -> Result<Self> {
        // A border between workers cuts a query tile's stretch into at most three more items.
        let room = Room { starts: tiles, merges: workers, tokens: 0, items: tiles + 4 * workers };
        let mut list = Self {
            gpu: gpu.clone(),
            room: Room::default(),
            memory: None,
            bytes: Vec::new(),
            has_tokens: false,
            is_empty: true,
        };
        list.reserve(room)?;
        Ok(list)
    }

    /// Moves to other memory if there is not enough room.
    fn reserve(&mut self, room: Room) -> Result<()> {
        let room = self.room.max(room);
        if room == self.room {
            return Ok(());
        }
        let len = room.offsets()[4];
        if let Some(stream) = self.gpu.stream() {
            self.memory = Some(Buffer::new(stream, len)?);
        }
        self.room = room;
        Ok(())
    }

    /// Writes a batch down and queues its copy: one, however many layers will read it.
    pub(super) fn fill(&mut self, batch: Batch<'_>, workers: usize) -> Result<()> {
        let Batch { schedule, tokens, kv_lens, kv_base } = batch;
        let busy = (0..schedule.workers()).filter(|&w| !schedule.of(w).is_empty()).count();
        let items = workers + schedule.items().len() - busy;
        let (merges, tokens_here) = (schedule.merges().len(), if kv_base.is_some() { tokens.len() } else { 0 });
        self.reserve(Room { starts: kv_lens.len(), merges, tokens: tokens_here, items })?;
        self.has_tokens = kv_base.is_some();
        self.is_empty = schedule.items().is_empty();

        let [_, at_merges, at_tokens, at_items, _] = self.room.offsets();
        self.bytes.clear();
        self.bytes.resize(at_items + items * size_of::<WorkItem>(), 0);
        let (head, list) = self.bytes.split_at_mut(at_items);
        let mut start = 0i32;
        for (to, &len) in head[..at_merges].chunks_exact_mut(4).zip(kv_lens) {
            to.copy_from_slice(&start.to_ne_bytes());
            // Ragged KV has fewer than 2^31 rows; for pages it is not used.
            start = start.wrapping_add(len as i32);
        }
        for (to, m) in head[at_merges..at_tokens].chunks_exact_mut(16).zip(schedule.merges()) {
            let item = MergeItem { first: m.first as i32, stride: m.stride as i32, parts: m.parts as i32, pad: 0 };
            to.copy_from_slice(bytemuck::bytes_of(&item));
        }
        if kv_base.is_some() {
            head[at_tokens..][..tokens.len() * 16].copy_from_slice(bytemuck::cast_slice(tokens));
        }
        let mut put = |at: usize, item: WorkItem| {
            list[at * size_of::<WorkItem>()..][..size_of::<WorkItem>()].copy_from_slice(bytemuck::bytes_of(&item));
        };
        // A worker's first item stands at its number, the others behind all of those.
        let mut rest = workers;
        for worker in 0..workers {
            let own = schedule.of(worker);
            let mut at = worker;
            for (i, item) in own.iter().enumerate() {
                let next = if i + 1 < own.len() { rest as i32 } else { -1 };
                let token = tokens[item.q_start as usize];
                let key = (item.q_start, item.head_start);
                let merge = schedule.merges().binary_search_by_key(&key, |m| (m.q_start, m.head)).unwrap_or(0);
                put(
                    at,
                    WorkItem {
                        request: token.batch,
                        q_start: item.q_start as i32,
                        tokens: item.q_len as i32,
                        q_idx: token.q_idx,
                        q_len: token.q_len,
                        kv_len: token.kv_len,
                        head_start: item.head_start as i32,
                        head_end: item.head_end as i32,
                        kv_start: item.kv_start as i32,
                        kv_end: item.kv_end as i32,
                        pages: item.request as i32,
                        partial: if item.partial == Item::WHOLE { -1 } else { item.partial as i32 },
                        merge: merge as i32,
                        next,
                        kv_base: kv_base.map_or(0, |b| b[item.request as usize]),
                        pad: 0,
                    },
                );
                if next >= 0 {
                    at = rest;
                    rest += 1;
                }
            }
            if own.is_empty() {
                put(at, WorkItem { next: -1, ..WorkItem::default() });
            }
        }
        self.memory.as_ref().map_or(Ok(()), |memory| self.gpu.send(&self.bytes, memory))
    }

    /// Whether nobody has anything to do.
    pub(super) fn is_empty(&self) -> bool {
        self.is_empty
    }

    fn at(&self, part: usize) -> Address {
        let start = self.memory.as_ref().map_or(NOWHERE, Buffer::address);
        Address(start + self.room.offsets()[part] as u64)
    }

    pub(super) fn starts(&self) -> Address {
        self.at(0)
    }

    pub(super) fn merges(&self) -> Address {
        self.at(1)
    }

    pub(super) fn tokens(&self) -> Address {
        if self.has_tokens { self.at(2) } else { Address(0) }
    }

    pub(super) fn items(&self) -> Address {
        self.at(3)
    }

    /// Zeros for a run's scratch.
    pub(super) fn scratch(&self, sizes: DeviceSizes) -> Scratch {
        let memory = self.gpu.stream().map(|stream| -> Result<Box<dyn DeviceMemory>> {
            let buffer = Buffer::new(stream, sizes.bytes())?;
            buffer.fill(0)?;
            Ok(Box::new(buffer))
        });
        Scratch::on_device(sizes, memory.transpose())
    }

    /// Names it for the records of a dry run.
    pub(super) fn name(&self, call: &mut Call<'_>) {
        let [_, merges, tokens, items, end] = self.room.offsets();
        let parts =
            [("starts", 0, merges), ("merges", merges, tokens), ("tokens", tokens, items), ("items", items, end)];
        for (name, from, to) in parts {
            call.name(name, self.at(0).0 + from as u64, to - from);
        }
    }

    /// Refuses another device than the list is on.
    pub(super) fn check(&self, op: &'static str, gpu: &Gpu) -> Result<()> {
        let ordinal = |g: &Gpu| g.stream().map(|s| s.context().ordinal());
        if ordinal(gpu) == ordinal(&self.gpu) {
            return Ok(());
        }
        Err(Error::place(op, "plan", format!("{:?}", self.gpu), format!("{gpu:?}")))
    }

    /// Lets a run on another stream wait for the copy; whether it is another. A graph is captured on the plan's own.
    pub(super) fn enter(&self, gpu: &Gpu) -> Result<bool> {
        let (Some(own), Some(stream)) = (self.gpu.stream(), gpu.stream()) else { return Ok(false) };
        if own.handle() == stream.handle() {
            return Ok(false);
        }
        stream.wait(&own.record()?)?;
        Ok(true)
    }

    /// Lets the next batch's copy wait for a run on another stream.
    pub(super) fn leave(&self, gpu: &Gpu) -> Result<()> {
        let (Some(own), Some(stream)) = (self.gpu.stream(), gpu.stream()) else { return Ok(()) };
        own.wait(&stream.record()?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::arch::Arch;
    use crate::plan::{Cut, Entry, Schedule, Split, Token};

    /// Every worker finds its items in order, each part its merge, and refilling leaves everything in its place.
    #[test]
    fn a_list_is_its_schedule() {
        let gpu = Gpu::dry(Arch::HOPPER);
        let mut list = List::new(&gpu, 8, 20).unwrap();
        let place = list.items();
        for (lens, split) in [
            (&[900u32, 3, 0, 64, 700][..], Split::Balanced),
            (&[1; 8], Split::Balanced),
            (&[], Split::Balanced),
            // What is cut more often may need more room.
            (&[500, 900], Split::Fixed(64)),
            (&[500, 900], Split::Off),
        ] {
            let (mut tokens, ones) = (Vec::new(), vec![1; lens.len()]);
            Token::list(&ones, lens, &mut tokens);
            let entry = |(r, &kv_end): (usize, &u32)| Entry {
                request: r as u32,
                q_start: r as u32,
                q_len: 1,
                kv_start: 0,
                kv_end,
            };
            let entries: Vec<_> = lens.iter().enumerate().map(entry).collect();
            let mut schedule = Schedule::default();
            schedule.fill(Cut { workers: 20, kv_heads: 3, group: 4, split }, &entries).unwrap();
            list.fill(Batch { schedule: &schedule, tokens: &tokens, kv_lens: lens, kv_base: None }, 20).unwrap();
            let [_, at_merges, _, at_items, _] = list.room.offsets();
            let items: Vec<WorkItem> =
                list.bytes[at_items..].chunks_exact(64).map(bytemuck::pod_read_unaligned).collect();
            for w in 0..20 {
                let (mut at, mut found) = (w as i32, Vec::new());
                while at >= 0 && items[at as usize].tokens > 0 {
                    found.push(items[at as usize]);
                    at = found[found.len() - 1].next;
                }
                let own = schedule.of(w);
                assert_eq!(found.len(), own.len(), "{lens:?} {split:?} worker {w}");
                for (got, want) in found.iter().zip(own) {
                    assert_eq!((got.q_start, got.tokens), (want.q_start as i32, want.q_len as i32));
                    assert_eq!((got.head_start, got.head_end), (want.head_start as i32, want.head_end as i32));
                    assert_eq!((got.kv_start, got.kv_end), (want.kv_start as i32, want.kv_end as i32));
                    assert_eq!((got.kv_len, got.pages), (lens[want.request as usize] as i32, want.request as i32));
                    assert_eq!(got.partial < 0, want.partial == Item::WHOLE);
                    for head in want.head_start..want.head_end {
                        let Some(merge) = schedule.merges().get(got.merge as usize + (head - want.head_start) as usize)
                        else {
                            assert!(got.partial < 0);
                            continue;
                        };
                        let is_own = (merge.q_start, merge.head) == (want.q_start, head);
                        assert!(got.partial < 0 || is_own, "{lens:?} {split:?} worker {w}");
                    }
                }
            }
            for (i, m) in schedule.merges().iter().enumerate() {
                let got: MergeItem = bytemuck::pod_read_unaligned(&list.bytes[at_merges + 16 * i..][..16]);
                assert_eq!((got.first, got.stride, got.parts), (m.first as i32, m.stride as i32, m.parts as i32));
            }
            if split == Split::Balanced {
                assert_eq!(list.items(), place, "{lens:?}");
            }
        }
    }
}
