//! [`List`]: the work list, as `state.cuh` reads it, in memory that stays where it is from batch to batch.

use bytemuck::{Pod, Zeroable};

use super::super::call::Call;
use super::super::driver::Buffer;
use super::super::exec::Gpu;
use super::super::params::Address;
use super::Batch;
use crate::error::{Error, Result};
use crate::plan::{DeviceSizes, Item, Schedule, Scratch};
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
    full_end: i32,
}

/// `fir::MergeItem`.
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
#[repr(C)]
struct MergeItem {
    first: i32,
    stride: i32,
    parts: i32,
    item: i32,
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

    /// Where requests' starts, merges, tokens and items begin, and the end. The numbers of items and merges are first, items
    /// are last: as many as there are travel.
    fn offsets(self) -> [usize; 5] {
        let merges = (STARTS + self.starts * 4).next_multiple_of(LINE);
        let tokens = merges + self.merges * size_of::<MergeItem>();
        let items = (tokens + self.tokens * 16).next_multiple_of(LINE);
        [STARTS, merges, tokens, items, items + self.items * LINE]
    }
}

/// The device's copy of a schedule.
#[derive(Debug)]
pub(super) struct List {
    gpu: Gpu,
    room: Room,
    /// None on a dry run.
    memory: Option<Buffer>,
    /// What was last sent there, up to its last item.
    lines: Vec<WorkItem>,
    /// Whether tokens stand elsewhere than their items say: a level of a cascade.
    has_tokens: bool,
    is_empty: bool,
}

/// Bytes before requests' starts: the numbers of items and of merges.
const STARTS: usize = 16;

/// Bytes of an item; the parts of a list begin at multiples of it.
const LINE: usize = size_of::<WorkItem>();

/// How workers come to their items.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    /// A list for each team of so many workers.
    Lists(usize),
    /// From a queue; and for a kernel that knows of none, every so-manieth from one's own number on.
    Queue(usize),
}

/// Where the list of a dry run is.
const NOWHERE: u64 = 3 << 60;

impl List {
    /// Room for balanced cuts of so many query tiles, of a request each, with so many lists of heads.
    pub(super) fn new(gpu: &Gpu, [tiles, heads]: [usize; 2], workers: usize) -> Result<Self> {
        // A border between workers cuts a query tile's stretch into at most three more items; teams have an item for each
        // of their query tiles.
        let room = Room { starts: tiles, merges: 2 * workers, tokens: 0, items: tiles * heads + 4 * workers };
        let mut list = Self {
            gpu: gpu.clone(),
            room: Room::default(),
            memory: None,
            lines: Vec::new(),
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
    pub(super) fn fill(&mut self, schedule: &Schedule, batch: Batch<'_>, order: Order) -> Result<()> {
        let Batch { tokens, kv_lens, kv_base, .. } = batch;
        let count = schedule.items().len();
        let (lists, items) = match order {
            Order::Lists(workers) => {
                let lists = workers.div_ceil(schedule.team());
                let busy = (0..lists).filter(|t| !schedule.of(t * schedule.team()).is_empty()).count();
                (lists, lists + count - busy)
            }
            Order::Queue(workers) => (workers, workers.max(count)),
        };
        let (merges, tokens_here) = (schedule.merges().len(), if kv_base.is_some() { tokens.len() } else { 0 });
        self.reserve(Room { starts: kv_lens.len(), merges, tokens: tokens_here, items })?;
        self.has_tokens = kv_base.is_some();
        self.is_empty = schedule.items().is_empty();

        let [_, at_merges, at_tokens, at_items, _] = self.room.offsets();
        // What stands behind the last of anything is never read; every item up to the last is written below.
        self.lines.resize(at_items / LINE + items, WorkItem::default());
        let (head, list) = self.lines.split_at_mut(at_items / LINE);
        // Everything is written where it stays: what is put together elsewhere and copied costs 10 ns each, as the copy's
        // wide loads wait for the narrow stores before them.
        let words: &mut [i32] = bytemuck::cast_slice_mut(head);
        (words[0], words[1]) = (count as i32, merges as i32);
        let mut start = 0i32;
        for (to, &len) in words[STARTS / 4..at_merges / 4].iter_mut().zip(kv_lens) {
            *to = start;
            // Ragged KV has fewer than 2^31 rows; for pages it is not used.
            start = start.wrapping_add(len as i32);
        }
        if kv_base.is_some() {
            words[at_tokens / 4..][..tokens.len() * 4].copy_from_slice(bytemuck::cast_slice(tokens));
        }
        let slots: &mut [MergeItem] = bytemuck::cast_slice_mut(&mut words[at_merges / 4..at_tokens / 4]);
        for (to, m) in slots.iter_mut().zip(schedule.merges()) {
            (to.first, to.stride, to.parts) = (m.first as i32, m.stride as i32, m.parts as i32);
        }
        let (all, mut near) = (schedule.merges(), 0);
        let mut line = |list: &mut [WorkItem], at: usize, item: &Item, next: Option<usize>| {
            let to = &mut list[at];
            let token = tokens[item.q_start as usize];
            let (mut partial, mut merge) = (-1, 0);
            if item.partial != Item::WHOLE {
                let key = (item.q_start, item.head_start);
                // Parts mostly follow each other as their merges do: the last one's, or that of the next cut tile.
                let here = |at: &usize| all.get(*at).is_some_and(|m| (m.q_start, m.head) == key);
                near = [near, near + schedule.team()]
                    .into_iter()
                    .find(here)
                    .unwrap_or_else(|| all.binary_search_by_key(&key, |m| (m.q_start, m.head)).unwrap_or(0));
                (partial, merge) = (item.partial as i32, near as i32);
                let heads = (item.head_end - item.head_start) as usize;
                slots.iter_mut().skip(near).take(heads).for_each(|slot| slot.item = at as i32);
            }
            to.request = token.batch;
            to.q_start = item.q_start as i32;
            to.tokens = item.q_len as i32;
            to.q_idx = token.q_idx;
            to.q_len = token.q_len;
            to.kv_len = token.kv_len;
            to.head_start = item.head_start as i32;
            to.head_end = item.head_end as i32;
            to.kv_start = item.kv_start as i32;
            to.kv_end = item.kv_end as i32;
            to.pages = item.request as i32;
            to.partial = partial;
            to.merge = merge;
            to.next = next.map_or(-1, |i| i as i32);
            to.kv_base = kv_base.map_or(0, |b| b[item.request as usize]);
            to.full_end = item.full_end as i32;
        };
        // Items of no tokens are no work.
        match order {
            // A list's first item stands at its number, the others behind all of those.
            Order::Lists(_) => {
                let mut rest = lists;
                for first in 0..lists {
                    let own = schedule.of(first * schedule.team());
                    if own.is_empty() {
                        (list[first].tokens, list[first].next) = (0, -1);
                    }
                    let mut at = first;
                    for (i, item) in own.iter().enumerate() {
                        let next = (i + 1 < own.len()).then_some(rest);
                        line(list, at, item, next);
                        at = rest;
                        rest += usize::from(next.is_some());
                    }
                }
            }
            Order::Queue(workers) => {
                for (i, item) in schedule.items().iter().enumerate() {
                    line(list, i, item, Some(i + workers).filter(|&next| next < count));
                }
                list[count..].iter_mut().for_each(|to| (to.tokens, to.next) = (0, -1));
            }
        }
        self.memory.as_ref().map_or(Ok(()), |memory| self.gpu.send(&[bytemuck::cast_slice(&self.lines)], memory))
    }

    /// Whether nobody has anything to do.
    pub(super) fn is_empty(&self) -> bool {
        self.is_empty
    }

    fn at(&self, offset: usize) -> Address {
        Address(self.memory.as_ref().map_or(NOWHERE, Buffer::address) + offset as u64)
    }

    /// Where the number of items is.
    pub(super) fn count(&self) -> Address {
        self.at(0)
    }

    /// Where the number of merges is.
    pub(super) fn merge_count(&self) -> Address {
        self.at(4)
    }

    pub(super) fn starts(&self) -> Address {
        self.at(STARTS)
    }

    pub(super) fn merges(&self) -> Address {
        self.at(self.room.offsets()[1])
    }

    pub(super) fn tokens(&self) -> Address {
        if self.has_tokens { self.at(self.room.offsets()[2]) } else { Address(0) }
    }

    pub(super) fn items(&self) -> Address {
        self.at(self.room.offsets()[3])
    }

    /// Names it for the records of a dry run.
    pub(super) fn name(&self, call: &mut Call<'_>) {
        let [_, merges, tokens, items, end] = self.room.offsets();
        let parts = [
            ("count", 0, STARTS),
            ("starts", STARTS, merges),
            ("merges", merges, tokens),
            ("tokens", tokens, items),
            ("items", items, end),
        ];
        for (name, from, to) in parts {
            call.name(name, self.at(from).0, to - from);
        }
    }
}

/// A run's scratch: zeros where counters are.
pub(super) fn scratch(gpu: &Gpu, sizes: DeviceSizes) -> Scratch {
    let memory = gpu.stream().map(|stream| -> Result<Box<dyn DeviceMemory>> {
        let buffer = Buffer::new(stream, sizes.bytes())?;
        buffer.fill(0, sizes.counter_bytes())?;
        Ok(Box::new(buffer))
    });
    Scratch::on_device(sizes, memory.transpose())
}

/// Refuses another device than that of a plan made with `own`.
pub(super) fn check(op: &'static str, own: &Gpu, gpu: &Gpu) -> Result<()> {
    let ordinal = |g: &Gpu| g.stream().map(|s| s.context().ordinal());
    if ordinal(gpu) == ordinal(own) {
        return Ok(());
    }
    Err(Error::place(op, "plan", format!("{own:?}"), format!("{gpu:?}")))
}

/// Lets a run on another stream than `own` wait for the copies of lists; whether it did. What is recorded into a graph waits
/// for nothing: who replays it sees to that.
pub(super) fn enter(own: &Gpu, gpu: &Gpu) -> Result<bool> {
    let (Some(own), Some(stream)) = (own.stream(), gpu.stream()) else { return Ok(false) };
    if own.handle() == stream.handle() || stream.is_recorded()? {
        return Ok(false);
    }
    stream.wait(&own.record()?)?;
    Ok(true)
}

/// Lets the next batch's copy wait for a run on another stream.
pub(super) fn leave(own: &Gpu, gpu: &Gpu) -> Result<()> {
    let (Some(own), Some(stream)) = (own.stream(), gpu.stream()) else { return Ok(()) };
    own.wait(&stream.record()?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::arch::Arch;
    use crate::plan::{Cut, Entry, Split, Token};

    /// Every worker finds its items in order, each part its merge, and refilling leaves everything in its place.
    #[test]
    fn a_list_is_its_schedule() {
        let gpu = Gpu::dry(Arch::HOPPER);
        let mut list = List::new(&gpu, [8, 1], 20).unwrap();
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
                full_end: kv_end / 2,
            };
            let entries: Vec<_> = lens.iter().enumerate().map(entry).collect();
            let mut schedule = Schedule::default();
            let cut = Cut { workers: 20, kv_heads: 3, group: 4, split, in_step: true };
            schedule.fill(cut, &entries).unwrap();
            let batch = Batch { entries: &entries, long: &[], tokens: &tokens, kv_lens: lens, kv_base: None };
            list.fill(&schedule, batch, Order::Lists(20)).unwrap();
            let [_, at_merges, _, at_items, _] = list.room.offsets();
            let items = list.lines[at_items / LINE..].to_vec();
            for w in 0..20 {
                let (mut at, mut found) = ((w / schedule.team()) as i32, Vec::new());
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
                    assert_eq!(got.full_end, want.full_end as i32);
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
                let got = bytemuck::cast_slice::<_, MergeItem>(&list.lines)[at_merges / 16 + i];
                assert_eq!((got.first, got.stride, got.parts), (m.first as i32, m.stride as i32, m.parts as i32));
            }
            // The same as a queue: in order, and each once by the chains of those who know of none.
            schedule.fill_queue(cut, &entries).unwrap();
            list.fill(&schedule, batch, Order::Queue(20)).unwrap();
            let [_, _, _, at_items, _] = list.room.offsets();
            let items = list.lines[at_items / LINE..].to_vec();
            let count = list.lines[0].request as usize;
            assert_eq!(count, schedule.items().len());
            for (got, want) in items.iter().zip(schedule.items()) {
                assert_eq!(
                    (got.q_start, got.kv_start, got.kv_end),
                    (want.q_start as i32, want.kv_start as i32, want.kv_end as i32)
                );
            }
            let mut met = vec![0; items.len()];
            for w in 0..20 {
                let mut at = w;
                while at >= 0 && items[at as usize].tokens > 0 {
                    met[at as usize] += 1;
                    at = items[at as usize].next;
                }
            }
            assert!(met.iter().enumerate().all(|(i, &n)| n == i32::from(i < count)), "{met:?}");
            if split == Split::Balanced {
                assert_eq!(list.items(), place, "{lens:?}");
            }
        }
    }
}
