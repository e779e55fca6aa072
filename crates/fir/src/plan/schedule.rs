//! [`Schedule`]: attention work cut over workers.
//!
//! The work of a batch is a line: query tile after query tile, within one head after head, within one KV tile after
//! KV tile. [`Split::Balanced`] cuts the line into as many equal pieces as there are workers, at tile borders, so
//! that no worker has more than its share plus one tile, and at most `workers - 1` heads are cut in two; what is cut
//! becomes partial results and a [`Merge`]. [`Split::Fixed`] cuts every request at the same absolute positions
//! instead, whatever else is in the batch, so that a row's bits do not depend on its neighbours.

/// KV positions per tile: the grain of every cut.
pub const TILE_KV: usize = 64;

/// How KV is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Split {
    /// Wherever it makes the workers' shares equal.
    #[default]
    Balanced,
    /// At multiples of this many positions (a multiple of [`TILE_KV`]): results are bit-identical whatever else is
    /// in the batch and however many workers there are.
    Fixed(u32),
    /// Nowhere: a head of a query tile is one worker's. Bit-identical too; long requests may leave workers idle.
    Off,
}

/// A query tile with the KV positions it may see: one stretch of the line, once per head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    /// Request it belongs to.
    pub request: u32,
    /// First query row and number of rows.
    pub q_start: u32,
    pub q_len: u32,
    /// KV positions, the start a multiple of [`TILE_KV`].
    pub kv_start: u32,
    pub kv_end: u32,
}

/// Of which request a query token is, and where in it. Lengths are of the whole request, cascade levels together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(crate) struct Token {
    pub batch: i32,
    pub q_idx: i32,
    pub q_len: i32,
    pub kv_len: i32,
}

impl Token {
    /// Adds the query tokens of a batch, request after request.
    pub(crate) fn list(q_lens: &[u32], kv_lens: &[u32], tokens: &mut Vec<Self>) {
        for (r, (&q_len, &kv_len)) in q_lens.iter().zip(kv_lens).enumerate() {
            let token = Self { batch: r as i32, q_idx: 0, q_len: q_len as i32, kv_len: kv_len as i32 };
            tokens.extend((0..q_len as i32).map(|q_idx| Self { q_idx, ..token }));
        }
    }
}

/// How to cut: everything a schedule depends on besides the entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Cut {
    pub workers: usize,
    pub kv_heads: u32,
    /// Query heads per KV head.
    pub group: u32,
    pub split: Split,
}

/// One worker's work on one query tile: the heads `head_start..head_end` against the positions `kv_start..kv_end`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Item {
    /// Request of the batch.
    pub request: u32,
    /// First query row.
    pub q_start: u32,
    /// Number of query rows.
    pub q_len: u32,
    /// First KV head.
    pub head_start: u32,
    /// One past the last KV head.
    pub head_end: u32,
    /// First KV position.
    pub kv_start: u32,
    /// One past the last KV position.
    pub kv_end: u32,
    /// First row of the partial results, `u32::MAX` when the item is whole and writes the output.
    pub partial: u32,
}

impl Item {
    /// `partial` of an item that is no part.
    pub const WHOLE: u32 = u32::MAX;

    fn tiles(&self) -> u64 {
        u64::from((self.kv_end - self.kv_start).div_ceil(TILE_KV as u32).max(1))
            * u64::from(self.head_end - self.head_start)
    }
}

/// Partial results of one head of a query tile, to be merged in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Merge {
    /// Request of the batch.
    pub request: u32,
    /// First query row.
    pub q_start: u32,
    /// Number of query rows.
    pub q_len: u32,
    /// KV head.
    pub head: u32,
    /// First row of the first part; a part has `q_len * group` rows.
    pub first: u32,
    /// Rows from a part to the next.
    pub stride: u32,
    /// Number of parts.
    pub parts: u32,
}

/// Who does what: items in order, cut over the workers, and the merges of what was cut.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Schedule {
    items: Vec<Item>,
    /// Worker `w` does `items[bounds[w]..bounds[w + 1]]`.
    bounds: Vec<u32>,
    merges: Vec<Merge>,
    partial_rows: u32,
    group: u32,
}

impl Schedule {
    /// All items, worker after worker.
    pub fn items(&self) -> &[Item] {
        &self.items
    }

    /// The items of worker `w`.
    pub fn of(&self, w: usize) -> &[Item] {
        match (self.bounds.get(w), self.bounds.get(w + 1)) {
            (Some(&a), Some(&b)) => &self.items[a as usize..b as usize],
            _ => &[],
        }
    }

    /// Number of workers it was cut for.
    pub fn workers(&self) -> usize {
        self.bounds.len().saturating_sub(1)
    }

    /// What to merge when all items are done.
    pub fn merges(&self) -> &[Merge] {
        &self.merges
    }

    /// Rows of partial results.
    pub fn partial_rows(&self) -> usize {
        self.partial_rows as usize
    }

    /// Work of worker `w`, in the units the cut was balanced by.
    pub fn cost(&self, w: usize) -> u64 {
        self.of(w).iter().map(|i| self.item_cost(i)).sum()
    }

    /// Work of one of its items, in the same units.
    pub fn item_cost(&self, item: &Item) -> u64 {
        item.tiles() * tile_cost(item.q_len * self.group)
    }

    /// Makes it the schedule of `entries`, keeping its memory. Entries with no KV still get an item, as somebody
    /// must write their rows. Returns `None` if the partial results would be more than [`MAX_PARTIALS`] rows.
    pub(crate) fn fill(&mut self, cut: Cut, entries: &[Entry]) -> Option<()> {
        self.items.clear();
        self.bounds.clear();
        self.merges.clear();
        (self.partial_rows, self.group) = (0, cut.group);
        match cut.split {
            Split::Balanced => self.fill_balanced(cut, entries),
            Split::Fixed(chunk) => self.fill_whole(cut, entries, chunk.max(1)),
            Split::Off => self.fill_whole(cut, entries, u32::MAX),
        }
    }

    /// Rows of partial results for `parts` parts of `rows` each; their first row.
    fn partials(&mut self, parts: u32, rows: u32) -> Option<u32> {
        let first = self.partial_rows;
        self.partial_rows = first.checked_add(parts.checked_mul(rows)?).filter(|&n| n <= MAX_PARTIALS)?;
        Some(first)
    }

    fn fill_balanced(&mut self, cut: Cut, entries: &[Entry]) -> Option<()> {
        let tiles = |e: &Entry| u64::from((e.kv_end - e.kv_start).div_ceil(TILE_KV as u32).max(1));
        let heads = u64::from(cut.kv_heads);
        let total: u64 = entries.iter().map(|e| tiles(e) * heads * tile_cost(e.q_len * cut.group)).sum();
        let workers = cut.workers as u64;
        let (mut worker, mut done) = (0u64, 0u64);
        self.bounds.push(0);
        for e in entries {
            let (per_head, cost, rows) = (tiles(e), tile_cost(e.q_len * cut.group), e.q_len * cut.group);
            let mut left = per_head * heads;
            while left > 0 {
                // The tile that crosses the border of a share goes to the share it starts in.
                let border = share(total, worker + 1, workers);
                let room = border.saturating_sub(done).div_ceil(cost);
                if room == 0 && worker + 1 < workers {
                    self.bounds.push(self.items.len() as u32);
                    worker += 1;
                    continue;
                }
                let take = if worker + 1 == workers { left } else { room.min(left) };
                let from = per_head * heads - left;
                self.stretch(e, per_head, from, from + take, rows)?;
                left -= take;
                done += take * cost;
            }
        }
        self.bounds.resize(cut.workers + 1, self.items.len() as u32);
        Some(())
    }

    /// Items for the tiles `from..to` of an entry whose heads have `per_head` tiles each: the end of a head, whole
    /// heads, the start of a head.
    fn stretch(&mut self, e: &Entry, per_head: u64, mut from: u64, to: u64, rows: u32) -> Option<()> {
        while from < to {
            let (head, tile) = ((from / per_head) as u32, from % per_head);
            if tile == 0 && to - from >= per_head {
                let heads = (to - from) / per_head;
                self.items.push(Item {
                    request: e.request,
                    q_start: e.q_start,
                    q_len: e.q_len,
                    head_start: head,
                    head_end: head + heads as u32,
                    kv_start: e.kv_start,
                    kv_end: e.kv_end,
                    partial: Item::WHOLE,
                });
                from += heads * per_head;
            } else {
                let end = per_head.min(tile + to - from);
                let first = self.partials(1, rows)?;
                match self.merges.last_mut() {
                    Some(m) if tile != 0 => m.parts += 1,
                    _ => self.merges.push(Merge {
                        request: e.request,
                        q_start: e.q_start,
                        q_len: e.q_len,
                        head,
                        first,
                        stride: rows,
                        parts: 1,
                    }),
                }
                self.items.push(Item {
                    request: e.request,
                    q_start: e.q_start,
                    q_len: e.q_len,
                    head_start: head,
                    head_end: head + 1,
                    kv_start: e.kv_start + tile as u32 * TILE_KV as u32,
                    kv_end: e.kv_end.min(e.kv_start + end as u32 * TILE_KV as u32),
                    partial: first,
                });
                from += end - tile;
            }
        }
        Some(())
    }

    /// Cuts only at multiples of `chunk`; workers get whole pieces.
    fn fill_whole(&mut self, cut: Cut, entries: &[Entry], chunk: u32) -> Option<()> {
        let heads = cut.kv_heads;
        for e in entries {
            let rows = e.q_len * cut.group;
            let first_chunk = e.kv_start / chunk;
            let parts = (e.kv_end.div_ceil(chunk).max(first_chunk + 1)) - first_chunk;
            let first = if parts > 1 { self.partials(parts.checked_mul(heads)?, rows)? } else { Item::WHOLE };
            for part in 0..parts {
                let kv_start = e.kv_start.max((first_chunk + part).saturating_mul(chunk));
                let kv_end = e.kv_end.min((first_chunk + part + 1).saturating_mul(chunk)).max(kv_start);
                for head in 0..heads {
                    let partial = if parts > 1 { first + (part * heads + head) * rows } else { Item::WHOLE };
                    self.items.push(Item {
                        request: e.request,
                        q_start: e.q_start,
                        q_len: e.q_len,
                        head_start: head,
                        head_end: head + 1,
                        kv_start,
                        kv_end,
                        partial,
                    });
                }
            }
            if parts > 1 {
                self.merges.extend((0..heads).map(|head| Merge {
                    request: e.request,
                    q_start: e.q_start,
                    q_len: e.q_len,
                    head,
                    first: first + head * rows,
                    stride: heads * rows,
                    parts,
                }));
            }
        }
        // Equal shares by cost, at item borders; then neighbours that differ only by the head become one.
        let cost = |i: &Item| i.tiles() * tile_cost(i.q_len * cut.group);
        let total: u64 = self.items.iter().map(cost).sum();
        let (mut done, mut worker, mut kept) = (0, 0u64, 0usize);
        self.bounds.push(0);
        for at in 0..self.items.len() {
            let item = self.items[at];
            while worker + 1 < cut.workers as u64 && done >= share(total, worker + 1, cut.workers as u64) {
                self.bounds.push(kept as u32);
                worker += 1;
            }
            done += cost(&item);
            let mine = self.bounds[worker as usize] as usize;
            let joined = match self.items[mine..kept].last_mut() {
                Some(last)
                    if (last.request, last.q_start, last.kv_start, last.head_end)
                        == (item.request, item.q_start, item.kv_start, item.head_start) =>
                {
                    last.head_end += 1;
                    true
                }
                _ => false,
            };
            if !joined {
                self.items[kept] = item;
                kept += 1;
            }
        }
        self.items.truncate(kept);
        self.bounds.resize(cut.workers + 1, kept as u32);
        Some(())
    }
}

/// Most rows of partial results: 8 GB of them at a head dim of 128. A cut of a request that claims 2^31 positions into
/// pieces of 64 is refused before it is listed.
const MAX_PARTIALS: u32 = 1 << 24;

/// `total * part / of`, which may pass through 2^64.
fn share(total: u64, part: u64, of: u64) -> u64 {
    (u128::from(total) * u128::from(part) / u128::from(of)) as u64
}

/// Cost of a KV tile for one head against `rows` query rows: that of reading the tile counts as 8 rows' arithmetic.
/// An estimate: only batches that mix decodes and prefills depend on it, and those by little.
fn tile_cost(rows: u32) -> u64 {
    8 + u64::from(rows)
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    fn entries() -> impl Strategy<Value = Vec<Entry>> {
        prop::collection::vec((1u32..20, 0u32..5, 0u32..2000), 0..20).prop_map(|v| {
            let mut q = 0;
            v.into_iter()
                .enumerate()
                .map(|(request, (q_len, skip, kv))| {
                    let kv_start = skip * TILE_KV as u32;
                    let e = Entry { request: request as u32, q_start: q, q_len, kv_start, kv_end: kv_start + kv };
                    q += q_len;
                    e
                })
                .collect()
        })
    }

    /// Every (entry, head, position) is in exactly one item, the entries' rows are all written, and every part is
    /// in exactly one merge, in order.
    fn check_cover(s: &Schedule, cut: Cut, entries: &[Entry]) -> Result<(), TestCaseError> {
        let mut at: HashMap<(u32, u32), (u32, u32)> = HashMap::new(); // (request, head) -> (next position, parts)
        let merges: HashMap<(u32, u32), Merge> = s.merges().iter().map(|m| ((m.request, m.head), *m)).collect();
        prop_assert_eq!(merges.len(), s.merges().len());
        let mut used = vec![false; s.partial_rows()];
        prop_assert_eq!(s.workers(), cut.workers);
        prop_assert_eq!((0..cut.workers).map(|w| s.of(w).len()).sum::<usize>(), s.items().len());
        let mut items: Vec<&Item> = s.items().iter().collect();
        items.sort_by_key(|i| (i.request, i.kv_start));
        for i in items {
            let e = entries[i.request as usize];
            prop_assert_eq!((i.q_start, i.q_len), (e.q_start, e.q_len));
            for head in i.head_start..i.head_end {
                let (next, parts) = at.entry((i.request, head)).or_insert((e.kv_start, 0));
                prop_assert_eq!(i.kv_start, *next);
                *next = i.kv_end;
                if i.partial == Item::WHOLE {
                    prop_assert_eq!(i.kv_end, e.kv_end);
                    prop_assert!(!merges.contains_key(&(i.request, head)));
                } else {
                    let (m, rows) = (merges[&(i.request, head)], i.q_len * cut.group);
                    let first = i.partial + (head - i.head_start) * rows;
                    prop_assert_eq!(first, m.first + *parts * m.stride);
                    for r in first..first + rows {
                        prop_assert!(!std::mem::replace(&mut used[r as usize], true));
                    }
                }
                *parts += 1;
            }
        }
        for e in entries {
            for head in 0..cut.kv_heads {
                let (next, parts) = at.remove(&(e.request, head)).unwrap();
                prop_assert_eq!(next, e.kv_end);
                prop_assert_eq!(parts, merges.get(&(e.request, head)).map_or(1, |m| m.parts));
            }
        }
        prop_assert!(at.is_empty());
        prop_assert!(used.into_iter().all(|u| u));
        Ok(())
    }

    proptest! {
        #[test]
        fn schedule_covers_each_block_once(
            entries in entries(), workers in 1usize..9, kv_heads in 1u32..5, group in 1u32..4, mode in 0usize..4,
        ) {
            let split = [Split::Balanced, Split::Fixed(64), Split::Fixed(256), Split::Off][mode];
            let cut = Cut { workers, kv_heads, group, split };
            let mut s = Schedule::default();
            s.fill(cut, &entries).unwrap();
            check_cover(&s, cut, &entries)?;
            // A second fill of the same value gives the same schedule: nothing is left of the first.
            let once = s.clone();
            s.fill(cut, &entries).unwrap();
            prop_assert_eq!(once, s);
        }

        #[test]
        fn no_worker_has_more_than_its_share_plus_one_tile(
            entries in entries(), workers in 1usize..9, kv_heads in 1u32..5, group in 1u32..4,
        ) {
            let mut s = Schedule::default();
            s.fill(Cut { workers, kv_heads, group, split: Split::Balanced }, &entries).unwrap();
            let total: u64 = (0..workers).map(|w| s.cost(w)).sum();
            let tile = entries.iter().map(|e| tile_cost(e.q_len * group)).max().unwrap_or(0);
            for w in 0..workers {
                prop_assert!(s.cost(w) <= total.div_ceil(workers as u64) + tile, "{} of {total}", s.cost(w));
            }
            prop_assert!(s.merges().len() < workers);
        }

        #[test]
        fn fixed_cuts_do_not_depend_on_the_batch(entries in entries(), workers in 1usize..9, kv_heads in 1u32..5) {
            let cuts = |entries: &[Entry], workers| {
                let mut s = Schedule::default();
                s.fill(Cut { workers, kv_heads, group: 1, split: Split::Fixed(128) }, entries).unwrap();
                let mut all: Vec<_> = s.items().iter()
                    .flat_map(|i| (i.head_start..i.head_end).map(|h| (i.q_start, h, i.kv_start, i.kv_end)))
                    .collect();
                all.sort_unstable();
                all
            };
            let together = cuts(&entries, workers);
            let mut alone: Vec<_> = entries.iter().flat_map(|e| cuts(std::slice::from_ref(e), 1)).collect();
            alone.sort_unstable();
            prop_assert_eq!(together, alone);
        }
    }
}
