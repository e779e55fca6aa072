//! [`Schedule`]: attention work cut over workers.
//!
//! The work of a batch is a line: query tile after query tile, within one head after head, within one KV tile after
//! KV tile. [`Split::Balanced`] cuts the line into as many equal pieces as there are workers, at tile borders, so
//! that no worker has more than its share plus one tile, and at most `workers - 1` heads are cut in two; what is cut
//! becomes partial results and a [`Merge`]. Long decodes are cut for all heads at once. For a GPU the line has no heads ([`Cut::in_step`]): it is cut over teams of
//! as many workers as there are heads, which do the heads of the same positions at the same time. [`Split::Fixed`] cuts
//! every request at the same absolute positions instead, whatever else is in the batch, so that a row's bits do not
//! depend on its neighbours. Workers that take items from a queue ([`Schedule::fill_queue`]) get them longest first.

/// KV positions per tile: the grain of every cut.
pub const TILE_KV: usize = 64;

/// How KV is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Split {
    /// Wherever it makes the workers' shares equal.
    #[default]
    Balanced,
    /// At multiples of this many positions (a multiple of [`TILE_KV`]): results are bit-identical whatever else is
    /// in the batch and however many workers there are. Query tiles of many rows are cut at fewer of them on CUDA, those
    /// 8192 positions and more apart.
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
    /// Every row sees the positions from `kv_start` to here, as far as the plan knows.
    pub full_end: u32,
}

impl Entry {
    /// Its item for heads `head_start..head_end` against `kv_start..kv_end`.
    fn item(&self, [head_start, head_end]: [u32; 2], [kv_start, kv_end]: [u32; 2], partial: u32) -> Item {
        Item {
            request: self.request,
            q_start: self.q_start,
            q_len: self.q_len,
            head_start,
            head_end,
            kv_start,
            kv_end,
            full_end: self.full_end.clamp(kv_start, kv_end),
            partial,
        }
    }

    /// The merges of its heads, whose partial results, `rows` each, lie from `first` on: all heads of a part together.
    fn merges(&self, heads: u32, [first, rows]: [u32; 2], parts: u32) -> impl Iterator<Item = Merge> {
        let Self { request, q_start, q_len, .. } = *self;
        let stride = heads * rows;
        (0..heads).map(move |head| Merge { request, q_start, q_len, head, first: first + head * rows, stride, parts })
    }
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
            if q_len == 1 {
                tokens.push(token);
                continue;
            }
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
    /// What is cut goes to teams: workers `heads * t + h` do the same positions for every head `h`, so that what lies
    /// beside each other in memory is read at the same time.
    pub in_step: bool,
}

impl Cut {
    fn in_teams(&self) -> bool {
        self.split != Split::Off && self.in_step && self.workers >= self.kv_heads as usize
    }

    /// Workers that share a list of items; 1 when each has its own.
    #[cfg(feature = "cuda")]
    pub(crate) fn team(&self) -> usize {
        if self.in_teams() { self.kv_heads as usize } else { 1 }
    }
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
    /// Every row sees the positions before this, as far as the plan knows.
    pub full_end: u32,
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

/// Who does what: items in order, cut over teams of workers, and the merges of what was cut.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Schedule {
    items: Vec<Item>,
    /// Team `t` does `items[bounds[t]..bounds[t + 1]]`.
    bounds: Vec<u32>,
    merges: Vec<Merge>,
    partial_rows: u32,
    group: u32,
    workers: u32,
    team: u32,
}

impl Schedule {
    /// All items, team after team.
    pub fn items(&self) -> &[Item] {
        &self.items
    }

    /// The items of worker `w`'s team, of each of which it does every [`Self::team`]-th KV head from `w % team` on.
    pub fn of(&self, w: usize) -> &[Item] {
        let team = w / self.team();
        match (self.bounds.get(team), self.bounds.get(team + 1)) {
            (Some(&a), Some(&b)) => &self.items[a as usize..b as usize],
            _ => &[],
        }
    }

    /// Workers that share a list of items: all KV heads' on a GPU, else one.
    pub fn team(&self) -> usize {
        self.team.max(1) as usize
    }

    /// Number of workers it was cut for.
    pub fn workers(&self) -> usize {
        self.workers as usize
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
        // A team of several has items of as many heads.
        self.of(w).iter().map(|i| self.item_cost(i)).sum::<u64>() / self.team() as u64
    }

    /// Work of one of its items for all of the item's heads, in the same units.
    pub fn item_cost(&self, item: &Item) -> u64 {
        item.tiles() * tile_cost(item.q_len * self.group)
    }

    /// Makes it the schedule of `entries`, keeping its memory. Entries with no KV still get an item, as somebody
    /// must write their rows. Returns `None` if the partial results would be more than [`MAX_PARTIALS`] rows.
    pub(crate) fn fill(&mut self, cut: Cut, entries: &[Entry]) -> Option<()> {
        self.clear(cut);
        match cut.split {
            Split::Balanced if cut.in_teams() => self.fill_in_step(cut, entries),
            Split::Balanced => self.fill_balanced(cut, entries),
            Split::Fixed(chunk) => self.fill_whole(cut, entries, chunk.max(1), |_| 0),
            Split::Off => self.fill_whole(cut, entries, u32::MAX, |_| 0),
        }
    }

    fn clear(&mut self, cut: Cut) {
        self.items.clear();
        self.bounds.clear();
        self.merges.clear();
        (self.partial_rows, self.group) = (0, cut.group);
        (self.workers, self.team) = (cut.workers as u32, 1);
    }

    /// Makes it the schedule of a queue that `workers` take heads of items from, longest first: a single list, each item
    /// of all heads.
    #[cfg(feature = "cuda")]
    pub(crate) fn fill_queue(&mut self, cut: Cut, entries: &[Entry]) -> Option<()> {
        let one = Cut { workers: 1, ..cut };
        match cut.split {
            Split::Balanced => {
                let parts = queue_parts(entries, u64::from(cut.kv_heads), cut.workers as u64);
                let chunk = entries.iter().map(tiles).max().unwrap_or(1).div_ceil(parts) * TILE_KV as u64;
                self.clear(one);
                self.fill_whole(one, entries, u32::try_from(chunk).unwrap_or(u32::MAX), |e| e.kv_start)?;
            }
            Split::Fixed(chunk) => {
                self.clear(one);
                let chunk = chunk.max(1);
                self.fill_whole(one, entries, chunk.saturating_mul(LONG_CUT.div_ceil(chunk)), |_| 0)?;
            }
            Split::Off => self.fill(one, entries)?,
        }
        // A stable order: of equal length, those of one request stay together.
        self.items.sort_by_key(|i| std::cmp::Reverse(i.kv_end - i.kv_start));
        Some(())
    }

    /// Rows of partial results for `parts` parts of `rows` each; their first row.
    fn partials(&mut self, parts: u32, rows: u32) -> Option<u32> {
        let first = self.partial_rows;
        self.partial_rows = first.checked_add(parts.checked_mul(rows)?).filter(|&n| n <= MAX_PARTIALS)?;
        Some(first)
    }

    fn fill_balanced(&mut self, cut: Cut, entries: &[Entry]) -> Option<()> {
        let heads = u64::from(cut.kv_heads);
        let total: u64 = entries.iter().map(|e| tiles(e) * heads * tile_cost(e.q_len * cut.group)).sum();
        let workers = cut.workers as u64;
        let (mut worker, mut done) = (0u64, 0u64);
        self.bounds.push(0);
        for e in entries {
            let (per_head, cost, rows) = (tiles(e), tile_cost(e.q_len * cut.group), e.q_len * cut.group);
            // Where it is read more than it is computed with, whole rows of tokens are read faster than every worker's heads
            // of them (1 x 16384, 8 heads, 2 cores of a Zen 4: 30.5 GB/s and 25.3), if a share has room for 8 tiles of them:
            // what a border moves is then an eighth of it at most.
            let joined = heads > 1 && !cut.in_step && rows <= FEW_ROWS && total >= 8 * cost * heads * workers;
            let (all, cost) = if joined { (per_head, cost * heads) } else { (per_head * heads, cost) };
            let (mut at, mut parts, first) = (0, 0, self.partial_rows);
            while at < all {
                let border = share(total, worker + 1, workers);
                // The tile that crosses the border of a share goes to the share it starts in.
                let room = border.saturating_sub(done).div_ceil(cost);
                if room == 0 && worker + 1 < workers {
                    self.bounds.push(self.items.len() as u32);
                    worker += 1;
                    continue;
                }
                let take = if worker + 1 == workers { all - at } else { room.min(all - at) };
                if joined {
                    parts += self.all_heads(e, cut.kv_heads, [at, take, all], rows)?;
                } else {
                    self.stretch(e, per_head, at, at + take, rows)?;
                }
                at += take;
                done += take * cost;
            }
            if parts > 0 {
                self.merges.extend(e.merges(cut.kv_heads, [first, rows], parts));
            }
        }
        self.bounds.resize(cut.workers + 1, self.items.len() as u32);
        Some(())
    }

    /// Cuts the line without heads over teams. At most `teams - 1` entries are cut, each for all heads.
    fn fill_in_step(&mut self, cut: Cut, entries: &[Entry]) -> Option<()> {
        let heads = cut.kv_heads;
        let (mut total, mut count) = (0u64, 0u64);
        for e in entries {
            total += tiles(e) * tile_cost(e.q_len * cut.group);
            count += tiles(e);
        }
        let most = cut.workers as u64 / u64::from(heads);
        let teams = teams(most, count);
        self.team = heads;
        // Divisions are as dear as the rest of an entry: one for each border.
        let (mut team, mut done, mut border) = (0u64, 0u64, share(total, 1, teams));
        self.bounds.push(0);
        for e in entries {
            let (all, cost, rows) = (tiles(e), tile_cost(e.q_len * cut.group), e.q_len * cut.group);
            let (mut at, mut parts, first) = (0, 0, self.partial_rows);
            while at < all {
                // The tile that crosses the border of a share goes to the share it starts in.
                let room = border.saturating_sub(done);
                if room == 0 && team + 1 < teams {
                    self.bounds.push(self.items.len() as u32);
                    team += 1;
                    border = share(total, team + 1, teams);
                    continue;
                }
                let fits = team + 1 == teams || room >= (all - at) * cost;
                let take = if fits { all - at } else { room.div_ceil(cost).min(all - at) };
                parts += self.all_heads(e, heads, [at, take, all], rows)?;
                at += take;
                done += take * cost;
            }
            if parts > 0 {
                // Nothing else was cut in between: its parts are neighbours.
                self.merges.extend(e.merges(heads, [first, rows], parts));
            }
        }
        self.bounds.resize(most as usize + 1, self.items.len() as u32);
        Some(())
    }

    /// An item of all heads for `take` of an entry's `all` tiles, from tile `at` on; 1 if it is a part.
    fn all_heads(&mut self, e: &Entry, heads: u32, [at, take, all]: [u64; 3], rows: u32) -> Option<u32> {
        let is_part = take < all;
        let partial = if is_part { self.partials(heads, rows)? } else { Item::WHOLE };
        let place = |tile: u64| e.kv_start + tile as u32 * TILE_KV as u32;
        self.items.push(e.item([0, heads], [place(at), e.kv_end.min(place(at + take))], partial));
        Some(is_part.into())
    }

    /// Items for the tiles `from..to` of an entry whose heads have `per_head` tiles each: the end of a head, whole
    /// heads, the start of a head.
    fn stretch(&mut self, e: &Entry, per_head: u64, mut from: u64, to: u64, rows: u32) -> Option<()> {
        while from < to {
            let (head, tile) = ((from / per_head) as u32, from % per_head);
            if tile == 0 && to - from >= per_head {
                let heads = (to - from) / per_head;
                self.items.push(e.item([head, head + heads as u32], [e.kv_start, e.kv_end], Item::WHOLE));
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
                let at = |tile: u64| e.kv_start + tile as u32 * TILE_KV as u32;
                self.items.push(e.item([head, head + 1], [at(tile), e.kv_end.min(at(end))], first));
                from += end - tile;
            }
        }
        Some(())
    }

    /// Cuts only at multiples of `chunk` from `base` on; workers, or teams of them, get whole pieces.
    fn fill_whole(&mut self, cut: Cut, entries: &[Entry], chunk: u32, base: fn(&Entry) -> u32) -> Option<()> {
        let heads = cut.kv_heads;
        // Heads of a piece: all of them are a team's.
        self.team = if cut.in_teams() { heads } else { 1 };
        let each = self.team;
        let workers = cut.workers as u64 / u64::from(each);
        for e in entries {
            let rows = e.q_len * cut.group;
            let base = base(e);
            let first_chunk = (e.kv_start - base) / chunk;
            let parts = ((e.kv_end - base).div_ceil(chunk).max(first_chunk + 1)) - first_chunk;
            let first = if parts > 1 { self.partials(parts.checked_mul(heads)?, rows)? } else { Item::WHOLE };
            for part in 0..parts {
                let border = |i: u32| (first_chunk + i).saturating_mul(chunk).saturating_add(base);
                let kv_start = e.kv_start.max(border(part));
                let kv_end = e.kv_end.min(border(part + 1)).max(kv_start);
                for head in (0..heads).step_by(each as usize) {
                    let partial = if parts > 1 { first + (part * heads + head) * rows } else { Item::WHOLE };
                    self.items.push(e.item([head, head + each], [kv_start, kv_end], partial));
                }
            }
            if parts > 1 {
                self.merges.extend(e.merges(heads, [first, rows], parts));
            }
        }
        // Equal shares by cost, at item borders; then neighbours that differ only by the head become one.
        let cost = |i: &Item| i.tiles() * tile_cost(i.q_len * cut.group);
        let total: u64 = self.items.iter().map(cost).sum();
        let (mut done, mut worker, mut kept) = (0, 0u64, 0usize);
        self.bounds.push(0);
        for at in 0..self.items.len() {
            let item = self.items[at];
            while worker + 1 < workers && done >= share(total, worker + 1, workers) {
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
                    last.head_end = item.head_end;
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
        self.bounds.resize(workers as usize + 1, kept as u32);
        Some(())
    }
}

/// Fewest positions between two fixed cuts of items in a queue. A part costs 9 us of an H200's multiprocessor, 8192
/// positions for 128 rows 87 (4 x 4096 causal: 823 us whole, 1419 cut every 1024 and 2814 every 256).
#[cfg(feature = "cuda")]
const LONG_CUT: u32 = 8192;

/// Most query rows of a KV head with which keys and values are rather read than computed with.
const FEW_ROWS: u32 = 16;

/// Most rows of partial results: 8 GB of them at a head dim of 128. A cut of a request that claims 2^31 positions into
/// pieces of 64 is refused before it is listed.
const MAX_PARTIALS: u32 = 1 << 24;

/// KV tiles of an entry; somebody must write the rows of one without KV.
fn tiles(e: &Entry) -> u64 {
    u64::from((e.kv_end - e.kv_start).div_ceil(TILE_KV as u32).max(1))
}

/// How many of `most` teams share `tiles`. A part of less than two tiles costs more to merge than it saves (1 x 2048 on an
/// H200: 14.9 us with 16 teams, 16.2 with 32). And a count that batches of usual sizes divide by cuts fewer requests: up to
/// a sixteenth stays idle for the sake of a power of two as a factor (16 x 512: 20.8 us with 32 teams, 24.1 with 33).
fn teams(most: u64, tiles: u64) -> u64 {
    let most = most.min(tiles.div_ceil(2)).max(1);
    let down = |step: u64| most / step * step;
    let step = (0..u64::BITS).map(|i| 1 << i).take_while(|&s| down(s) * 16 >= most * 15).last().unwrap_or(1);
    down(step)
}

/// Into how many parts to cut the longest entry of a queue, and others in proportion: so that `workers` who always take
/// the longest item that is left end first.
///
/// A part costs what 4 tiles do to write and to merge (4 chunks of 512 tokens against 8192 on an H200: 765 us whole, 946 in
/// parts of 1024). More parts than two per worker are never made: scratch memory has room for so many.
#[cfg(feature = "cuda")]
fn queue_parts(entries: &[Entry], heads: u64, workers: u64) -> u64 {
    const PART: u64 = 4;
    let longest = entries.iter().map(tiles).max().unwrap_or(0);
    // With many items for each worker the last ones are short beside the whole.
    if entries.len() as u64 * heads >= 4 * workers {
        return 1;
    }
    let mut best = (u64::MAX, 1);
    for parts in 1..=16u64 {
        let chunk = longest.div_ceil(parts);
        if parts > 1 && (chunk < PART || chunk == longest.div_ceil(parts - 1)) {
            continue;
        }
        // (cost, how many), longest first; an entry's last part may be short.
        let mut pieces = Vec::with_capacity(2 * entries.len());
        for e in entries {
            let (all, extra) = (tiles(e), if tiles(e) > chunk { PART } else { 0 });
            pieces.extend([(chunk + extra, all / chunk), (all % chunk + extra, u64::from(all % chunk > 0))]);
        }
        let count: u64 = pieces.iter().map(|p| p.1).sum::<u64>() * heads;
        if parts > 1 && count > 2 * workers {
            break;
        }
        pieces.sort_unstable_by_key(|p| std::cmp::Reverse(p.0));
        let mut ends: std::collections::BinaryHeap<_> = (0..workers).map(|_| std::cmp::Reverse(0u64)).collect();
        for (cost, n) in pieces {
            for _ in 0..n * heads {
                if let Some(mut first) = ends.peek_mut() {
                    first.0 += cost;
                }
            }
        }
        let end = ends.into_iter().map(|e| e.0).max().unwrap_or(0);
        best = best.min((end, parts));
    }
    best.1
}

/// `total * part / of`, which may pass through 2^64.
fn share(total: u64, part: u64, of: u64) -> u64 {
    match total.checked_mul(part) {
        Some(product) => product / of,
        None => (u128::from(total) * u128::from(part) / u128::from(of)) as u64,
    }
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
                    let kv_end = kv_start + kv;
                    let e =
                        Entry { request: request as u32, q_start: q, q_len, kv_start, kv_end, full_end: kv_end / 2 };
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
        prop_assert_eq!((0..cut.workers).step_by(s.team()).map(|w| s.of(w).len()).sum::<usize>(), s.items().len());
        let mut items: Vec<&Item> = s.items().iter().collect();
        items.sort_by_key(|i| (i.request, i.kv_start));
        for i in items {
            let e = entries[i.request as usize];
            prop_assert_eq!((i.q_start, i.q_len), (e.q_start, e.q_len));
            prop_assert_eq!(i.full_end, e.full_end.clamp(i.kv_start, i.kv_end));
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

    #[cfg(feature = "cuda")]
    #[test]
    fn a_queue_is_cut_where_workers_would_wait() {
        let entries = |n: u32, kv: u32| -> Vec<Entry> {
            let e = Entry { request: 0, q_start: 0, q_len: 32, kv_start: 0, kv_end: kv, full_end: 0 };
            (0..n).map(|request| Entry { request, ..e }).collect()
        };
        // 512 units of 128 tiles for 264 workers are two rounds, nearly full; 128 units leave half of them idle.
        assert_eq!(queue_parts(&entries(64, 8192), 8, 264), 1);
        assert_eq!(queue_parts(&entries(16, 8192), 8, 264), 2);
        // One tile of queries: as many parts as there are workers for, if they are worth it.
        assert_eq!(queue_parts(&entries(1, 32768), 8, 264), 16);
        assert_eq!(queue_parts(&entries(1, 256), 8, 264), 1);
        assert_eq!(queue_parts(&[], 8, 264), 1);
    }

    #[test]
    fn teams_have_powers_of_two_and_two_tiles_each() {
        for (most, tiles, want) in
            [(33, 1000, 32), (66, 1000, 64), (132, 1000, 128), (37, 1000, 36), (27, 1000, 26), (52, 1000, 52)]
        {
            assert_eq!(teams(most, tiles), want);
        }
        assert_eq!([teams(33, 32), teams(33, 1), teams(33, 0), teams(1, 9)], [16, 1, 1, 1]);
    }

    #[test]
    fn a_long_decode_is_cut_for_all_heads_at_once() {
        let e = Entry { request: 0, q_start: 0, q_len: 1, kv_start: 0, kv_end: 4096, full_end: 4096 };
        let cut = Cut { workers: 2, kv_heads: 8, group: 4, split: Split::Balanced, in_step: false };
        let mut s = Schedule::default();
        s.fill(cut, &[e]).unwrap();
        let of = |i: &Item| (i.head_start..i.head_end, i.kv_start..i.kv_end);
        assert_eq!(s.items().iter().map(of).collect::<Vec<_>>(), [(0..8, 0..2048), (0..8, 2048..4096)]);
        assert_eq!((s.merges().len(), s.partial_rows()), (8, 64));
        // A short one, or one of many rows, goes by heads.
        for (kv_end, q_len) in [(512, 1), (4096, 5)] {
            s.fill(cut, &[Entry { kv_end, q_len, full_end: 0, ..e }]).unwrap();
            assert_eq!(s.items().iter().map(of).collect::<Vec<_>>(), [(0..4, 0..kv_end), (4..8, 0..kv_end)]);
        }
    }

    proptest! {
        #[test]
        fn schedule_covers_each_block_once(
            entries in entries(), workers in 1usize..9, kv_heads in 1u32..5, group in 1u32..4, mode in 0usize..4,
            in_step: bool,
        ) {
            let split = [Split::Balanced, Split::Fixed(64), Split::Fixed(256), Split::Off][mode];
            let cut = Cut { workers, kv_heads, group, split, in_step };
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
            s.fill(Cut { workers, kv_heads, group, split: Split::Balanced, in_step: false }, &entries).unwrap();
            let total: u64 = (0..workers).map(|w| s.cost(w)).sum();
            // Of long decodes a tile of all heads is the grain, of which a share has 8.
            let heads = u64::from(kv_heads);
            let tile = |e: &Entry| {
                let one = tile_cost(e.q_len * group);
                let joined = kv_heads > 1 && e.q_len * group <= FEW_ROWS && total >= 8 * one * heads * workers as u64;
                if joined { one * heads } else { one }
            };
            let tile = entries.iter().map(tile).max().unwrap_or(0);
            for w in 0..workers {
                prop_assert!(s.cost(w) <= total.div_ceil(workers as u64) + tile, "{} of {total}", s.cost(w));
            }
            prop_assert!(s.merges().len() <= (workers - 1) * kv_heads as usize);
        }

        #[test]
        fn teams_do_the_heads_of_the_same_positions(
            entries in entries(), teams in 1usize..70, rest in 0u32..4, kv_heads in 1u32..5, group in 1u32..4,
        ) {
            let workers = teams * kv_heads as usize + (rest % kv_heads) as usize;
            let cut = Cut { workers, kv_heads, group, split: Split::Balanced, in_step: true };
            let mut s = Schedule::default();
            s.fill(cut, &entries).unwrap();
            check_cover(&s, cut, &entries)?;
            prop_assert_eq!(s.team(), kv_heads as usize);
            let lists: Vec<_> = (0..workers).map(|w| s.of(w)).collect();
            let busy = lists.iter().filter(|l| !l.is_empty()).count() as u64;
            let total: u64 = (0..workers).map(|w| s.cost(w)).sum();
            let tile = entries.iter().map(|e| tile_cost(e.q_len * group)).max().unwrap_or(0);
            let used = super::teams(teams as u64, entries.iter().map(tiles).sum()) * u64::from(kv_heads);
            prop_assert!(busy <= used && used <= workers as u64);
            for (w, list) in lists.iter().enumerate() {
                prop_assert!(list.iter().all(|i| (i.head_start, i.head_end) == (0, kv_heads)));
                prop_assert!(list.is_empty() || w < teams * kv_heads as usize);
                prop_assert!(s.cost(w) <= total.div_ceil(used) + tile, "{} of {total}", s.cost(w));
            }
            // The device's list and scratch have room for so much (`cuda/attention`).
            prop_assert!(s.merges().len() < workers || s.merges().is_empty());
            prop_assert!(s.items().len() <= entries.len() + teams);
            let rows = entries.iter().map(|e| e.q_len * group).max().unwrap_or(0) as usize;
            prop_assert!(s.partial_rows() <= 2 * workers * rows);
        }

        #[cfg(feature = "cuda")]
        #[test]
        fn a_queue_has_everything_longest_first(
            entries in entries(), workers in 1usize..40, kv_heads in 1u32..5, group in 1u32..4, mode in 0usize..3,
        ) {
            let split = [Split::Balanced, Split::Fixed(64), Split::Off][mode];
            let cut = Cut { workers, kv_heads, group, split, in_step: true };
            let mut s = Schedule::default();
            s.fill_queue(cut, &entries).unwrap();
            prop_assert!(s.items().is_sorted_by_key(|i| std::cmp::Reverse(i.kv_end - i.kv_start)));
            prop_assert!(s.items().iter().all(|i| (i.head_start, i.head_end) == (0, kv_heads)));
            if split == Split::Balanced {
                let rows = entries.iter().map(|e| e.q_len * group).max().unwrap_or(0) as usize;
                prop_assert!(s.partial_rows() <= 2 * workers * rows && s.merges().len() <= 2 * workers);
            }
            check_cover(&s, Cut { workers: 1, ..cut }, &entries)?;
        }

        #[test]
        fn fixed_cuts_do_not_depend_on_the_batch(entries in entries(), workers in 1usize..9, kv_heads in 1u32..5) {
            let cuts = |entries: &[Entry], workers| {
                let mut s = Schedule::default();
                s.fill(Cut { workers, kv_heads, group: 1, split: Split::Fixed(128), in_step: true }, entries).unwrap();
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
