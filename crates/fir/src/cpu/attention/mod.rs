//! Attention on the CPU: one kernel for decode, prefill, mixed batches, cascade levels, latent and sparse attention.
//!
//! A worker walks its items of the schedule. For an item it keeps, per query row, the running maximum `m`, the sum
//! `d` and the unnormalised output `o`; for every KV tile and head it widens the keys (f32, in cache), takes the
//! scores, lets the variant turn them into logits, rescales, and adds the weighted values.
//!
//! Weights are `2^(base * (s - m))`: the difference is taken first, as it is small where weights are not, so a logit
//! of 100 costs no digits. `base` is `log2(e)` for logits, and carries the softmax scale too when the variant leaves
//! the plain dot products alone.
//!
//! Tiles outer, heads inner: a tile's rows of all heads lie side by side in memory, so lines that the hardware
//! prefetches for one head are the next head's. With few query rows to a head the memory is the bound, and [`direct`]
//! goes further.

mod direct;
#[cfg(target_arch = "x86_64")]
mod dots;
mod merge;
mod operand;
#[cfg(target_arch = "x86_64")]
mod pairs;
#[cfg(target_arch = "x86_64")]
mod pipe;
#[cfg(target_arch = "x86_64")]
mod stream;
mod tile;
#[cfg(target_arch = "x86_64")]
mod tiles;

use std::ops::Range;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicUsize, Ordering};

use self::direct::Stretch;
use self::merge::Merges;
pub(crate) use self::merge::{merge_levels, merge_state, merge_state_in_place, merge_states};
use self::operand::Ahead;
pub(crate) use self::operand::Operand;
use self::tile::{Accumulate, Scores, TileRows};
#[cfg(target_arch = "x86_64")]
use super::arch::{Amx, Avx512, first_level_bytes};
use super::exec::Cpu;
use super::level::Level;
use super::math;
use super::pool::{RowsMut, RowsOnce};
use super::rows::narrow;
use super::variant::{self as hooks, Registers};
use super::vector::{Kernel, Vector};
use crate::kv::{PageTable, Ragged};
use crate::plan::{Item, Schedule, Split, TILE_KV, Tile, Token};
use crate::tensor::{DType, bf16, f16};
use crate::variant::{Block, Bound, RowCtx, RowProgram, Visible};

/// Most query rows (tokens × heads) of one pass over an item's KV, unless one head alone has more.
const MAX_ROWS: usize = 64;

/// Most query rows of an item whose keys and values are widened: a tile of them is loaded for all. With 64 rows and a row of
/// f32 in a page of its own, as eight KV heads of 128 have it, loading took as long as the products.
const WIDENED_ROWS: usize = 256;

/// Most query rows of a head whose products read the cache directly.
const DIRECT_ROWS: usize = 8;

/// Where a request's KV rows are.
#[derive(Clone, Copy)]
pub(crate) enum Index<'a> {
    Paged(&'a PageTable<'a>),
    Ragged(&'a Ragged),
}

/// Everything that one launch reads.
pub(crate) struct Launch<'a> {
    pub schedule: &'a Schedule,
    pub tokens: &'a [Token],
    /// First KV position of each request of the schedule: not 0 at the lower levels of a cascade.
    pub kv_base: Option<&'a [i32]>,
    /// Parts of a query row and the factor of each.
    pub q: &'a [(Operand<'a>, f32)],
    /// Factor of the scores, above 0.
    pub sm_scale: f32,
    /// Parts of a key row.
    pub k: &'a [Operand<'a>],
    /// Values; `None`: the first `dim_vo` elements of the key.
    pub v: Option<Operand<'a>>,
    pub v_scale: f32,
    pub dim_vo: usize,
    /// Type of the output in the end.
    pub out: DType,
    pub few: Few,
    /// Query heads per KV head.
    pub group: usize,
    pub shape: Shape,
    pub kv_heads: usize,
    pub index: Index<'a>,
    pub program: &'a RowProgram,
    pub bound: &'a Bound<'a>,
}

/// Which of the requests with few query rows go through AMX tiles or sums of pairs, for which weights are rounded to bf16.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Few {
    /// All: no bits are promised.
    All,
    /// Those of one token. A row has the bits that it has alone at the shared levels of a cascade, too, as rows go through
    /// the same tiles or sums without touching each other.
    Single,
    /// None.
    Never,
}

impl Few {
    /// For plans that are cut this way.
    pub(crate) fn of(split: Split) -> Self {
        if split == Split::Balanced { Self::All } else { Self::Single }
    }
}

/// Where finished rows go.
pub(crate) enum Sink<'a> {
    /// Normalised rows `[tokens, heads, dim_vo]`, and `[tokens * heads, 1]` base-2 log-sum-exps if wanted.
    Output { out: Out<'a>, lse: Option<RowsOnce<'a, f32>> },
    /// States `[tokens * heads, dim_vo + 2]`: unnormalised output, `m`, `d`.
    States(RowsOnce<'a, f32>),
}

/// Output rows of some type.
pub(crate) enum Out<'a> {
    F32(RowsOnce<'a, f32>),
    F16(RowsOnce<'a, f16>),
    Bf16(RowsOnce<'a, bf16>),
}

/// A row's running state: maximum, in the units that [`base`] takes to base 2, and sum.
#[derive(Clone, Copy)]
struct State {
    m: f32,
    d: f32,
}

/// How a plan cuts queries and its kernel walks the KV.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    /// Query rows per head (tokens × group) that an item has where there are as many.
    pub rows: usize,
    /// KV positions whose weights are taken at once through tiles.
    pub span: usize,
}

impl Shape {
    /// For a problem of these types. Everything that goes through AMX tiles wants more rows, as packing a span of KV
    /// costs as much as many rows' products.
    pub(crate) fn new(cpu: &Cpu, group: usize, types: &[DType]) -> Self {
        let tuning = cpu.tuning();
        let most = match cpu.level() {
            Level::Amx if types.iter().all(|&d| d.size() == 1 || d == DType::BF16) => tuning.attention_rows,
            _ => WIDENED_ROWS,
        };
        Self { rows: (most / group).max(1) * group, span: tuning.attention_span }
    }

    /// Floats of one worker's buffers.
    pub(crate) fn floats(self, dim_qk: usize, dim_vo: usize, shared_v: bool) -> usize {
        let (dq, dv, rows) = (padded(dim_qk), padded(dim_vo), self.rows.max(MAX_ROWS));
        let floats = rows * (dq + dv) + TILE_KV * (dq + if shared_v { 0 } else { dv }) + rows * TILE_KV;
        #[cfg(target_arch = "x86_64")]
        let floats = floats.max(tiles::floats(dq, dv, self)).max(stream::floats(dq, dv));
        floats + LINE
    }
}

/// Floats of a cache line: buffers start at one, as vectors across two lines take twice as long to load and store.
const LINE: usize = 16;

/// Rows are padded to whole vectors of the widest level.
fn padded(dim: usize) -> usize {
    dim.next_multiple_of(16)
}

/// A schedule to run.
pub(crate) struct Work<'a> {
    pub launch: &'a Launch<'a>,
    /// `[partial_rows, dim_vo + 2]`
    pub partials: &'a mut [f32],
    pub sink: &'a Sink<'a>,
}

/// Runs schedules, one after the other but for who is done with one, who goes on with the next: a level of a cascade may have
/// fewer items than there are workers. `tiles` has a buffer per worker.
pub(crate) fn run(cpu: &Cpu, work: &mut [Work<'_>], tiles: &[Tile]) {
    struct Queue<'a> {
        launch: &'a Launch<'a>,
        rows: RowsOnce<'a, f32>,
        sink: &'a Sink<'a>,
        next: Vec<AtomicUsize>,
    }
    let mut queues = Vec::with_capacity(work.len());
    for Work { launch, partials, sink } in &mut *work {
        let rows = RowsOnce::new(RowsMut::from_slice(partials, launch.dim_vo + 2));
        let next = (0..launch.schedule.workers()).map(|_| AtomicUsize::new(0)).collect();
        queues.push(Queue { launch, rows, sink, next });
    }
    cpu.pool().run(&|worker| {
        let mut tile = tiles[worker % tiles.len()].lock().unwrap_or_else(PoisonError::into_inner);
        for Queue { launch, rows, sink, next } in &queues {
            let claim = |list: usize| launch.schedule.of(list).get(next[list].fetch_add(1, Ordering::Relaxed));
            let mut work = Worker::new(launch, &mut tile, rows, sink);
            // Its own items first, then what others have left. Which worker does an item changes no bit of it.
            for list in (0..next.len()).map(|i| (worker + i) % next.len()) {
                while let Some(item) = claim(list) {
                    work.run(cpu, item);
                }
            }
        }
    });
    drop(queues);
    let mut merges = Vec::new();
    for Work { launch, partials, sink } in work {
        let all = launch.schedule.merges();
        let each = all.len().div_ceil(cpu.workers()).max(1);
        merges.extend(all.chunks(each).map(|merges| Merges { launch, merges, partials, sink }));
    }
    cpu.pool().scatter(merges, |merges| cpu.run(merges));
}

/// What a worker keeps from item to item.
struct Worker<'a, 'b> {
    launch: &'b Launch<'a>,
    tile: &'b mut [f32],
    partials: &'b RowsOnce<'b, f32>,
    sink: &'b Sink<'a>,
    regs: Registers,
    states: Vec<State>,
}

impl<'a, 'b> Worker<'a, 'b> {
    fn new(launch: &'b Launch<'a>, tile: &'b mut [f32], partials: &'b RowsOnce<'b, f32>, sink: &'b Sink<'a>) -> Self {
        // Columns past the head dims are added up but never written: zero, once.
        let dim_qk: usize = launch.k.iter().map(Operand::dim).sum();
        if padded(dim_qk) != dim_qk || padded(launch.dim_vo) != launch.dim_vo {
            tile.fill(0.0);
        }
        let states = vec![State { m: 0.0, d: 0.0 }; launch.shape.rows.max(MAX_ROWS)];
        Self { launch, tile, partials, sink, regs: Registers::default(), states }
    }

    fn run(&mut self, cpu: &Cpu, item: &Item) {
        let Self { launch, tile, partials, sink, regs, states } = self;
        // The request's rows and not the item's, whose last tile may have few: a row's bits do not depend on where it stands.
        // (At a level of a cascade an item has rows of many requests.)
        #[cfg(target_arch = "x86_64")]
        if tiles::suits(launch) {
            let tokens = item.q_len.max(launch.tokens[item.q_start as usize].q_len as u32) as usize;
            let rows = tokens * launch.group;
            if let Some(road) = Road::new(cpu, launch) {
                match launch.few {
                    Few::All if rows <= if tokens == 1 { stream::MOST } else { DIRECT_ROWS } => {
                        return self.few(cpu, road, item);
                    }
                    Few::Single if launch.group <= stream::MOST && tokens_of(launch, item).iter().any(is_single) => {
                        return self.single(cpu, road, item);
                    }
                    _ => {}
                }
            }
            // Weights are rounded to bf16, which those of few rows are not on every road. Not at a level of a cascade where
            // bits are promised: there it is the number of requests that makes the rows many.
            if rows > DIRECT_ROWS && (launch.few == Few::All || launch.kv_base.is_none()) {
                let tiles = tiles::TileItem { launch, item, buffer: tile, partials, sink, regs, states };
                match (cpu.amx(), cpu.pairs()) {
                    (Some(amx), _) => return amx.run(tiles),
                    (_, Some(pairs)) => return pairs.run_pairs(tiles),
                    _ => {}
                }
            }
        }
        cpu.run(RunItem { launch, item, tile, partials, sink, regs, states });
    }

    /// Few rows through tiles, as many heads at a time as there is room for, or pairs. Where a number is not finite, tokens of a
    /// head go without, one by one, so that no row depends on another's.
    #[cfg(target_arch = "x86_64")]
    fn few(&mut self, cpu: &Cpu, road: Road, item: &Item) {
        let Self { launch, partials, sink, .. } = *self;
        let amx = match road {
            Road::Tiles(amx) => amx,
            Road::Pairs(pairs) => {
                let Self { tile: buffer, regs, states, .. } = self;
                let rows = tiles::TileItem { launch, item, buffer, partials, sink, regs, states };
                let left = if first_level_bytes() >= 48 << 10 {
                    pairs.run_pairs(dots::DotsItem::<true>(rows))
                } else {
                    pairs.run_pairs(dots::DotsItem::<false>(rows))
                };
                for [head, token] in left {
                    let one = part(item, head, token..token + 1, launch.group);
                    let Self { tile, regs, states, .. } = self;
                    cpu.run(RunItem { launch, item: &one, tile, partials, sink, regs, states });
                }
                return;
            }
        };
        for item in passes(item, MAX_ROWS / (item.q_len as usize * launch.group), launch.group) {
            let (buffer, regs) = (&mut *self.tile, &mut self.regs);
            let bad = amx.run(stream::StreamItem { launch, item: &item, buffer, partials, sink, regs });
            for head in (item.head_start..item.head_end).filter(|head| bad >> (head - item.head_start) & 1 == 1) {
                for token in 0..item.q_len {
                    let one = part(&item, head, token..token + 1, launch.group);
                    if item.q_len > 1 {
                        self.few(cpu, road, &one);
                        continue;
                    }
                    let Self { tile, regs, states, .. } = self;
                    cpu.run(RunItem { launch, item: &one, tile, partials, sink, regs, states });
                }
            }
        }
    }

    /// An item with rows of requests of one token: those through tiles, up to 16 rows of a head at a time, or pairs, the others
    /// not.
    #[cfg(target_arch = "x86_64")]
    fn single(&mut self, cpu: &Cpu, road: Road, item: &Item) {
        let Self { launch, partials, sink, .. } = *self;
        let at_once = match road {
            Road::Tiles(_) => stream::MOST / launch.group,
            Road::Pairs(_) => usize::MAX,
        };
        if item.q_len == 1 || matches!(road, Road::Pairs(_)) && tokens_of(launch, item).iter().all(is_single) {
            return self.few(cpu, road, item);
        }
        for head in item.head_start..item.head_end {
            let (mut rest, mut at) = (tokens_of(launch, item), 0);
            while let Some(first) = rest.first() {
                let most = if is_single(first) { at_once } else { rest.len() };
                let n = rest.iter().take(most).take_while(|t| is_single(t) == is_single(first)).count();
                let item = part(item, head, at..at + n as u32, launch.group);
                if is_single(first) {
                    self.few(cpu, road, &item);
                } else {
                    let Self { tile, regs, states, .. } = self;
                    cpu.run(RunItem { launch, item: &item, tile, partials, sink, regs, states });
                }
                (rest, at) = (&rest[n..], at + n as u32);
            }
        }
    }
}

/// What few rows of bf16 go through.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
enum Road {
    Tiles(Amx),
    Pairs(Avx512<true>),
}

#[cfg(target_arch = "x86_64")]
impl Road {
    fn new(cpu: &Cpu, launch: &Launch<'_>) -> Option<Self> {
        match (cpu.amx(), cpu.pairs()) {
            (Some(amx), _) => stream::suits(launch).then_some(Self::Tiles(amx)),
            (_, Some(pairs)) => dots::suits(launch).then_some(Self::Pairs(pairs)),
            _ => None,
        }
    }
}

/// Whether a token is its request's only one.
#[cfg(target_arch = "x86_64")]
fn is_single(token: &Token) -> bool {
    token.q_len == 1
}

/// One head's part of an item, of some of its tokens.
#[cfg(target_arch = "x86_64")]
fn part(item: &Item, head: u32, tokens: Range<u32>, group: usize) -> Item {
    let before = ((head - item.head_start) * item.q_len + tokens.start) * group as u32;
    let partial = if item.partial == Item::WHOLE { Item::WHOLE } else { item.partial + before };
    let (q_start, q_len) = (item.q_start + tokens.start, tokens.end - tokens.start);
    Item { head_start: head, head_end: head + 1, q_start, q_len, partial, ..*item }
}

/// An item as several, of so many heads each.
#[cfg(target_arch = "x86_64")]
fn passes(item: &Item, heads: usize, group: usize) -> impl Iterator<Item = Item> + use<> {
    let item = *item;
    (item.head_start..item.head_end).step_by(heads).map(move |head_start| {
        let before = (head_start - item.head_start) * item.q_len * group as u32;
        let partial = if item.partial == Item::WHOLE { Item::WHOLE } else { item.partial + before };
        Item { head_start, head_end: item.head_end.min(head_start + heads as u32), partial, ..item }
    })
}

/// One item of the schedule.
struct RunItem<'a, 'b> {
    launch: &'b Launch<'a>,
    item: &'b Item,
    tile: &'b mut [f32],
    partials: &'b RowsOnce<'b, f32>,
    sink: &'b Sink<'a>,
    regs: &'b mut Registers,
    states: &'b mut [State],
}

impl Kernel for RunItem<'_, '_> {
    type Out = ();
    #[inline(always)]
    fn run<V: Vector>(self, v: V) {
        let Self { launch, item, tile, partials, sink, regs, states } = self;
        let (group, tokens) = (launch.group, item.q_len as usize);
        let per_head = tokens * group;
        let heads_per_pass = (MAX_ROWS / per_head).max(1) as u32;
        let dim_qk: usize = launch.k.iter().map(Operand::dim).sum();
        let (dq, dv) = (padded(dim_qk), padded(launch.dim_vo));
        let rows = MAX_ROWS.max(launch.shape.rows);

        let skipped = tile.as_ptr().align_offset(64).min(LINE);
        let (q, rest) = tile[skipped..].split_at_mut(rows * dq);
        let (o, rest) = rest.split_at_mut(rows * dv);
        let (s, rest) = rest.split_at_mut(rows * TILE_KV);
        let (k, x) = rest.split_at_mut(TILE_KV * dq);
        let mut at = [[0usize; 2]; TILE_KV];
        let mut ahead = [[0usize; 2]; TILE_KV];

        let program = launch.program;
        // Up to a register block of rows, a widened tile would be read once or twice: not worth its place in the cache.
        let direct = per_head <= DIRECT_ROWS
            && launch.k.iter().all(Operand::is_direct)
            && launch.v.is_some_and(|v| v.is_direct())
            && !program.has_key()
            && !program.has_value();
        let block = block_of(tokens_of(launch, item), item.head_start..item.head_end, group);

        let mut head_start = item.head_start;
        while head_start < item.head_end {
            let heads = head_start..item.head_end.min(head_start + heads_per_pass);
            let pass_rows = heads.len() * per_head;
            head_start = heads.end;

            // Queries of the pass, transformed and scaled; empty states.
            for (h, head) in heads.clone().enumerate() {
                for row in 0..per_head {
                    let token = item.q_start as usize + row / group;
                    let qo_head = head as usize * group + row % group;
                    let ctx = ctx_of(launch, token, qo_head);
                    let at = h * per_head + row;
                    load_query(v, launch, &ctx, token, &mut q[at * dq..][..dq], regs);
                    states[at] = start_state(launch, item, &ctx, regs);
                }
            }
            o[..pass_rows * dv].fill(0.0);

            let mut pos = item.kv_start;
            locate(launch.index, item.request as usize, pos, item.kv_end, &mut at);
            while pos < item.kv_end {
                let n = (item.kv_end - pos).min(TILE_KV as u32) as usize;
                let next = pos + n as u32;
                if next < item.kv_end {
                    locate(launch.index, item.request as usize, next, item.kv_end, &mut ahead);
                }
                let n_ahead = (item.kv_end - next).min(TILE_KV as u32) as usize;
                let kv_pos = launch.kv_base.map_or(0, |b| b[item.request as usize]) + pos as i32;
                let visible = see(launch, &block, kv_pos, n);
                let tile = At { kv_pos, n, masked: visible == Visible::Some };
                if let (true, Visible::All, [keys], Some(values)) = (direct, visible, launch.k, &launch.v) {
                    let (here, next) = (&at[..n], &ahead[..n_ahead]);
                    let rows = Stretch { at: here, ahead: next, heads: (heads.start as usize, heads.len()), per_head };
                    let (s, o) = (&mut s[..pass_rows * TILE_KV], &mut o[..pass_rows * dv]);
                    keys.scores(v, rows, &q[..pass_rows * dq], s);
                    for (row, s) in s.chunks_exact_mut(TILE_KV).enumerate() {
                        let ctx = row_ctx(launch, item, heads.start + (row / per_head) as u32, row % per_head);
                        weigh(v, launch, &ctx, tile, s, &mut states[row], &mut o[row * dv..][..dv], regs);
                    }
                    values.accumulate(v, rows, s, o);
                } else if visible != Visible::None {
                    for (h, head) in heads.clone().enumerate() {
                        let rows = h * per_head..(h + 1) * per_head;
                        let s = &mut s[..per_head * TILE_KV];
                        let q = &q[rows.start * dq..rows.end * dq];
                        let next = Ahead {
                            operands: launch.k,
                            head: head as usize,
                            heads: (heads.start as usize, heads.len()),
                            at: &ahead[..n_ahead],
                        };
                        load_keys(v, launch, item, head, kv_pos, &at[..n], k, dq, regs);
                        let keys = TileRows { data: &*k, stride: dq, len: n };
                        v.call(Scores { q, k: keys, dim: dq, s, ahead: next });
                        for row in 0..per_head {
                            let ctx = row_ctx(launch, item, head, row);
                            let (s, o) = (&mut s[row * TILE_KV..], &mut o[(rows.start + row) * dv..][..dv]);
                            weigh(v, launch, &ctx, tile, s, &mut states[rows.start + row], o, regs);
                        }
                        let o = &mut o[rows.start * dv..rows.end * dv];
                        let next = Ahead { operands: launch.v.as_slice(), ..next };
                        // The values are the keys' first elements in latent attention: same rows, wider stride.
                        let (x, stride) = match launch.v {
                            Some(_) => {
                                load_values(v, launch, item, head, kv_pos, &at[..n], x, dv, regs);
                                (&*x, dv)
                            }
                            None => (&*k, dq),
                        };
                        let all = TileRows { data: x, stride, len: n };
                        if visible == Visible::Some && !tile::all_finite(v, &x[..n * stride]) {
                            tile::accumulate_visible(s, all, o, dv);
                        } else {
                            v.call(Accumulate { p: s, x: all, o, dim: dv, ahead: next });
                        }
                    }
                }
                std::mem::swap(&mut at, &mut ahead);
                pos = next;
            }

            for (h, head) in heads.enumerate() {
                for row in 0..per_head {
                    let at = h * per_head + row;
                    let (o, state) = (&mut o[at * dv..][..launch.dim_vo], states[at]);
                    end_row(v, launch, item, (head, row), o, state, partials, sink, regs);
                }
            }
        }
    }
}

/// A tile's first position, its length, and whether the mask hides some of it.
#[derive(Clone, Copy)]
struct At {
    kv_pos: i32,
    n: usize,
    masked: bool,
}

/// Turns a row's scores with a tile into weights: the variant's logits, then the softmax.
#[expect(clippy::too_many_arguments, reason = "two call sites; a struct would be built per row")]
#[inline(always)]
fn weigh<V: Vector>(
    v: V,
    launch: &Launch<'_>,
    ctx: &RowCtx,
    tile: At,
    s: &mut [f32],
    state: &mut State,
    o: &mut [f32],
    regs: &mut Registers,
) {
    let (program, At { kv_pos, n, masked }) = (launch.program, tile);
    if natural(launch) {
        for s in &mut s[..n] {
            *s *= launch.sm_scale;
        }
    }
    if program.has_logits() || masked {
        hooks::logits(v, program, launch.bound, ctx, kv_pos, &mut s[..n], regs, masked);
    }
    if program.softmax() {
        softmax_row(v, s, n, base(launch), state, o);
    }
}

/// Writes query row `row` (token × group) of a KV head: to the partial results, or finished to the output.
#[expect(clippy::too_many_arguments, reason = "two call sites; a struct would be built per row")]
#[inline(always)]
fn end_row<V: Vector>(
    v: V,
    launch: &Launch<'_>,
    item: &Item,
    (head, row): (u32, usize),
    o: &mut [f32],
    state: State,
    partials: &RowsOnce<'_, f32>,
    sink: &Sink<'_>,
    regs: &mut Registers,
) {
    let group = launch.group;
    if item.partial != Item::WHOLE {
        let part = (head - item.head_start) as usize * item.q_len as usize * group + row;
        write_state(partials.take(item.partial as usize + part), o, state);
    } else {
        let (token, qo_head) = (item.q_start as usize + row / group, head as usize * group + row % group);
        v.call(Finish { launch, token, qo_head, o, state, sink, regs });
    }
}

/// The first of the output rows of a token of an item and KV head.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn first_row(launch: &Launch<'_>, item: &Item, head: u32, token: usize) -> usize {
    ((item.q_start as usize + token) * launch.kv_heads + head as usize) * launch.group
}

/// Asks for the output rows that [`end_row`] will write for a token of an item and KV head, if there are any.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn ask_rows(launch: &Launch<'_>, item: &Item, (head, token): (u32, usize), sink: &Sink<'_>) {
    let (row, n) = (first_row(launch, item, head, token), launch.group);
    match sink {
        _ if item.partial != Item::WHOLE => {}
        Sink::Output { out: Out::F32(rows), .. } | Sink::States(rows) => rows.ask(row, n),
        Sink::Output { out: Out::F16(rows), .. } => rows.ask(row, n),
        Sink::Output { out: Out::Bf16(rows), .. } => rows.ask(row, n),
    }
}

/// What the variant may ask of query row `row` (token × group) of a KV head.
#[inline(always)]
fn row_ctx(launch: &Launch<'_>, item: &Item, head: u32, row: usize) -> RowCtx {
    let group = launch.group;
    ctx_of(launch, item.q_start as usize + row / group, head as usize * group + row % group)
}

#[inline(always)]
fn ctx_of(launch: &Launch<'_>, token: usize, qo_head: usize) -> RowCtx {
    let Token { batch, q_idx, q_len, kv_len } = launch.tokens[token];
    RowCtx { batch, q_idx, q_len, kv_len, qo_head: qo_head as i32, kv_head: (qo_head / launch.group) as i32 }
}

fn tokens_of<'a>(launch: &Launch<'a>, item: &Item) -> &'a [Token] {
    &launch.tokens[item.q_start as usize..][..item.q_len as usize]
}

/// What a block of queries sees of `n` positions from `kv_pos` on.
#[inline(always)]
fn see(launch: &Launch<'_>, block: &Block, kv_pos: i32, n: usize) -> Visible {
    if !launch.program.has_mask() {
        return Visible::All;
    }
    launch.program.block(Some(launch.bound), &Block { kv_pos: (kv_pos, kv_pos + n as i32 - 1), ..*block })
}

/// Bounds of everything a mask may ask of these tokens and KV heads; `kv_pos` is the tile's to fill in.
pub(crate) fn block_of(tokens: &[Token], kv_heads: Range<u32>, group: usize) -> Block {
    let range =
        |f: fn(&Token) -> i32| tokens.iter().map(f).fold((i32::MAX, i32::MIN), |(lo, hi), x| (lo.min(x), hi.max(x)));
    Block {
        batch: range(|t| t.batch),
        q_idx: range(|t| t.q_idx),
        q_len: range(|t| t.q_len),
        kv_len: range(|t| t.kv_len),
        q_pos: range(|t| t.kv_len.wrapping_sub(t.q_len).wrapping_add(t.q_idx)),
        kv_pos: (0, 0),
        qo_head: ((kv_heads.start as usize * group) as i32, (kv_heads.end as usize * group) as i32 - 1),
        kv_head: (kv_heads.start as i32, kv_heads.end as i32 - 1),
    }
}

#[inline(always)]
fn load_query<V: Vector>(v: V, launch: &Launch<'_>, ctx: &RowCtx, token: usize, q: &mut [f32], regs: &mut Registers) {
    let qo_head = ctx.qo_head as usize;
    let mut from = 0;
    for (part, _) in launch.q {
        part.widen_row(v, [0, token, qo_head], &mut q[from..]);
        from += part.dim();
    }
    let (p, bound) = (launch.program, launch.bound);
    if p.has_query() {
        hooks::transform(v, p, &p.query, bound, ctx, ctx.q_pos(), &mut q[..from], regs);
    }
    let mut from = 0;
    for (part, factor) in launch.q {
        if *factor != 1.0 {
            for x in &mut q[from..from + part.dim()] {
                *x *= factor;
            }
        }
        from += part.dim();
    }
}

/// Whether scores are scaled as soon as they are taken: the variant reads them, or they are the weights.
#[inline(always)]
fn natural(launch: &Launch<'_>) -> bool {
    launch.program.has_logits() || !launch.program.softmax()
}

/// What turns a difference of logits into one of base-2 exponents.
#[inline(always)]
fn base(launch: &Launch<'_>) -> f32 {
    std::f32::consts::LOG2_E * if natural(launch) { 1.0 } else { launch.sm_scale }
}

#[inline(always)]
fn start_state(launch: &Launch<'_>, item: &Item, ctx: &RowCtx, regs: &mut Registers) -> State {
    if !launch.program.softmax() {
        // Weights need no maximum and sums no division: a state that merges by addition.
        return State { m: 0.0, d: 1.0 };
    }
    let first = item.kv_start == 0 && launch.kv_base.is_none_or(|b| b[item.request as usize] == 0);
    match hooks::init(launch.program, launch.bound, ctx, regs) {
        Some(logit) if first => State { m: logit * (std::f32::consts::LOG2_E / base(launch)), d: 1.0 },
        _ => State { m: f32::NEG_INFINITY, d: 0.0 },
    }
}

/// Page and slot of the positions from `pos` on, a tile of them at most.
#[inline(always)]
fn locate(index: Index<'_>, request: usize, pos: u32, end: u32, at: &mut [[usize; 2]; TILE_KV]) {
    let n = (end - pos).min(TILE_KV as u32) as usize;
    match index {
        Index::Ragged(indptr) => {
            let first = indptr.indptr()[request] as usize + pos as usize;
            for (i, at) in at[..n].iter_mut().enumerate() {
                *at = [0, first + i];
            }
        }
        Index::Paged(table) => {
            let (pages, size) = (table.pages(request), table.page_size());
            let (mut page, mut slot) = (pos as usize / size, pos as usize % size);
            for at in &mut at[..n] {
                *at = [pages[page] as usize, slot];
                slot += 1;
                if slot == size {
                    (page, slot) = (page + 1, 0);
                }
            }
        }
    }
}

#[expect(clippy::too_many_arguments, reason = "one call site; a struct would be built per tile and head")]
#[inline(always)]
fn load_keys<V: Vector>(
    v: V,
    launch: &Launch<'_>,
    item: &Item,
    head: u32,
    kv_pos: i32,
    at: &[[usize; 2]],
    k: &mut [f32],
    dq: usize,
    regs: &mut Registers,
) {
    let mut from = 0;
    for part in launch.k {
        part.widen_rows(v, head as usize, at, &mut k[from..], dq);
        from += part.dim();
    }
    let (p, bound) = (launch.program, launch.bound);
    if p.has_key() {
        let ctx = kv_ctx(launch, item, head);
        for (j, k) in k.chunks_exact_mut(dq).take(at.len()).enumerate() {
            hooks::transform(v, p, &p.key, bound, &ctx, kv_pos + j as i32, &mut k[..from], regs);
        }
    }
}

#[expect(clippy::too_many_arguments, reason = "as load_keys")]
#[inline(always)]
fn load_values<V: Vector>(
    v: V,
    launch: &Launch<'_>,
    item: &Item,
    head: u32,
    kv_pos: i32,
    at: &[[usize; 2]],
    x: &mut [f32],
    dv: usize,
    regs: &mut Registers,
) {
    let Some(values) = &launch.v else { return };
    values.widen_rows(v, head as usize, at, x, dv);
    let (p, bound) = (launch.program, launch.bound);
    if p.has_value() {
        let ctx = kv_ctx(launch, item, head);
        for (j, x) in x.chunks_exact_mut(dv).take(at.len()).enumerate() {
            hooks::transform(v, p, &p.value, bound, &ctx, kv_pos + j as i32, &mut x[..launch.dim_vo], regs);
        }
    }
}

/// What transforms of keys and values may ask: the request, its lengths and the head.
#[inline(always)]
fn kv_ctx(launch: &Launch<'_>, item: &Item, head: u32) -> RowCtx {
    ctx_of(launch, item.q_start as usize, head as usize * launch.group)
}

/// Turns the logits `s[..n]` into weights, and brings state and output to the new maximum.
#[inline(always)]
fn softmax_row<V: Vector>(v: V, s: &mut [f32], n: usize, base: f32, state: &mut State, o: &mut [f32]) {
    let n = {
        let whole = n.next_multiple_of(V::LANES);
        s[n..whole].fill(f32::NEG_INFINITY);
        whole
    };
    let mut max = v.splat(f32::NEG_INFINITY);
    let mut j = 0;
    while j < n {
        max = v.max(v.load(&s[j..]), max);
        j += V::LANES;
    }
    let max = v.max_lane(max);
    let m = if max > state.m { max } else { state.m };
    // A row without a visible position so far has no maximum; 0 keeps -inf - (-inf) away.
    let shift = if m == f32::NEG_INFINITY { 0.0 } else { m };
    let mut sum = v.splat(0.0);
    let mut j = 0;
    while j < n {
        let p = math::exp2(v, v.mul(v.sub(v.load(&s[j..]), v.splat(shift)), v.splat(base)));
        v.store(p, &mut s[j..]);
        sum = v.add(sum, p);
        j += V::LANES;
    }
    let sum = v.sum(sum);
    if m == state.m {
        state.d += sum;
        return;
    }
    let scale = ((state.m - shift) * base).exp2();
    *state = State { m, d: state.d * scale + sum };
    let mut c = 0;
    while c < o.len() {
        v.store(v.mul(v.load(&o[c..]), v.splat(scale)), &mut o[c..]);
        c += V::LANES;
    }
}

#[inline(always)]
fn write_state(row: &mut [f32], o: &[f32], state: State) {
    let (out, md) = row.split_at_mut(o.len());
    out.copy_from_slice(o);
    md.copy_from_slice(&[state.m, state.d]);
}

/// What turns a row's weighted values into its output. Where nothing is visible, `d` is 0, the output 0 and [`log_sum`] -inf.
#[inline(always)]
fn last_scale(launch: &Launch<'_>, state: State) -> f32 {
    match state.d {
        _ if !launch.program.softmax() => launch.v_scale,
        0.0 => 0.0,
        d => launch.v_scale / d,
    }
}

/// Of a row's weights, to base 2.
#[inline(always)]
fn log_sum(launch: &Launch<'_>, state: State) -> f32 {
    state.m * base(launch) + state.d.log2()
}

/// Normalises a row, lets the variant's `output` have it, and writes it.
struct Finish<'a, 'b> {
    launch: &'b Launch<'a>,
    token: usize,
    qo_head: usize,
    o: &'b mut [f32],
    state: State,
    sink: &'b Sink<'a>,
    regs: &'b mut Registers,
}

impl Kernel for Finish<'_, '_> {
    type Out = ();
    #[inline(always)]
    fn run<V: Vector>(self, v: V) {
        let Self { launch, token, qo_head, o, state, sink, regs } = self;
        let row = token * launch.kv_heads * launch.group + qo_head;
        let (out, lse) = match sink {
            Sink::States(rows) => return write_state(rows.take(row), o, state),
            Sink::Output { out, lse } => (out, lse),
        };
        let scale = last_scale(launch, state);
        for x in &mut *o {
            *x *= scale;
        }
        let (program, base) = (launch.program, base(launch));
        if program.has_output() {
            let ctx = ctx_of(launch, token, qo_head);
            let m = state.m * (base * std::f32::consts::LN_2);
            hooks::output(v, program, launch.bound, &ctx, o, m, state.d, regs);
        }
        if let Some(lse) = lse {
            lse.take(row)[0] = log_sum(launch, state);
        }
        match out {
            Out::F32(rows) => narrow(v, o, rows.take(row)),
            Out::F16(rows) => narrow(v, o, rows.take(row)),
            Out::Bf16(rows) => narrow(v, o, rows.take(row)),
        }
    }
}
