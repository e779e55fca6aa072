//! Attention of few query rows to a head through AMX tiles, with keys and values where they lie: the memory is the bound.
//!
//! A tile of 64 positions is gone over twice, for the scores of all heads of a pass and for their weighted values, and
//! nothing is packed ([`crate::cpu::arch`], `stream`). Scores lie by position, the query rows of several heads side by
//! side as the lanes of a vector, so that maxima, exponentials and sums need no work across lanes.
//!
//! From the second-level cache two cores of a Xeon of model 207 take 78 GB/s this way, where the vectors of
//! [`super::direct`] take 30, no more than the memory gives: so one waited for the other. While the keys of a tile are
//! read its values are asked for, and meanwhile the next tile's keys. In which order makes no difference, but into
//! the second level it must be: the first is small, and its misses are few.

use super::{At, Item, Launch, Operand, Registers, Sink, State, base, block_of, ctx_of, end_row, locate, natural};
use super::{MAX_ROWS, hooks, see, start_state, tokens_of};
use crate::cpu::arch::{Avx512, Left, TileKernel, Tiles};
use crate::cpu::math::exp2;
use crate::cpu::pool::RowsOnce;
use crate::cpu::vector::Vector;
use crate::plan::TILE_KV;
use crate::tensor::bf16;
use crate::variant::Visible;

/// Most query rows of a head: the columns of a tile.
pub(super) const MOST: usize = 16;
/// Elements of a key in a tile.
const STEP: usize = 32;
/// Elements of a value that one pass over the weights adds.
const WIDE: usize = 64;
/// Positions of a tile's rows.
const GROUP: usize = 16;
/// Groups of a tile.
const GROUPS: usize = TILE_KV / GROUP;
/// Floats of the scores of [`MOST`] rows.
const SCORES: usize = TILE_KV * MOST;
/// Floats past the end of a buffer that a tile of all 16 rows would reach.
const PAST: usize = 16 * 16;

/// Whether keys and values can be read where they lie; the rest is as for [`super::tiles::suits`].
pub(super) fn suits(launch: &Launch<'_>) -> bool {
    let values = launch.v.unwrap_or(launch.k[0]);
    launch.k.iter().chain(&launch.v).all(|part| part.bf16_data().is_some())
        && launch.dim_vo.is_multiple_of(WIDE)
        && launch.dim_vo <= values.dim()
}

/// Floats of one worker's buffer.
pub(super) fn floats(dq: usize, dv: usize) -> usize {
    let groups = MAX_ROWS / (MOST / 2);
    // Queries, scores, weights, outputs, copies of rows that lie apart, one wide row, a row of scores; to a cache line.
    MAX_ROWS * dq / 2
        + groups * 3 * SCORES
        + MAX_ROWS * dv
        + TILE_KV * dq.max(dv) / 2
        + dq.max(dv)
        + TILE_KV
        + 4 * PAST
        + 16
}

/// Heads of an item, at most [`MAX_ROWS`] rows. Its result has a bit for each head whose rows were not written: a
/// number in them is not finite, and they have to be computed another way.
pub(super) struct StreamItem<'a, 'b> {
    pub launch: &'b Launch<'a>,
    pub item: &'b Item,
    pub buffer: &'b mut [f32],
    pub partials: &'b RowsOnce<'b, f32>,
    pub sink: &'b Sink<'a>,
    pub regs: &'b mut Registers,
}

/// A worker's buffer, cut up. Heads of a group share 16 lanes.
struct Buffers<'b> {
    /// `[heads, dim_qk / STEP, 16, per_head]` pairs.
    q: &'b mut [bf16],
    /// `[groups of heads, TILE_KV, MOST]`
    s: &'b mut [f32],
    /// `[groups of heads, GROUPS, MOST, 16]` pairs of a weight and a zero, and of a zero and a weight.
    first: &'b mut [bf16],
    second: &'b mut [bf16],
    /// `[heads, dim_vo / 32, even and odd columns, per_head, 16]`
    o: &'b mut [f32],
    copies: &'b mut [bf16],
    wide: &'b mut [f32],
    /// `[TILE_KV]`
    row: &'b mut [f32],
}

impl<'b> Buffers<'b> {
    fn new(buffer: &'b mut [f32], rows: usize, groups: usize, dq: usize, dv: usize) -> Self {
        let at = buffer.as_ptr().align_offset(64).min(16);
        let mut rest = &mut buffer[at..];
        let mut take = |n: usize| rest.split_off_mut(..n).expect("sized by `floats`");
        let (q, s) = (take((rows * dq / 2).next_multiple_of(16) + 16), take(groups * SCORES + 16));
        let (first, second) = (take(groups * SCORES + PAST), take(groups * SCORES + PAST));
        let (o, copies) = (take(rows * dv + PAST), take(TILE_KV * dq.max(dv) / 2));
        let (wide, row) = (take(dq.max(dv)), take(TILE_KV));
        let half = bytemuck::cast_slice_mut::<f32, bf16>;
        Self { q: half(q), s, first: half(first), second: half(second), o, copies: half(copies), wide, row }
    }
}

impl TileKernel for StreamItem<'_, '_> {
    type Out = u64;
    #[inline(always)]
    fn run(self, v: Avx512, tiles: Tiles) -> u64 {
        let Self { launch, item, buffer, partials, sink, regs } = self;
        let (program, group, dv) = (launch.program, launch.group, launch.dim_vo);
        let dq: usize = launch.k.iter().map(Operand::dim).sum();
        let per_head = item.q_len as usize * group;
        let (first, heads) = (item.head_start as usize, (item.head_end - item.head_start) as usize);
        // Heads of a group of lanes.
        let beside = MOST / per_head;
        let groups = heads.div_ceil(beside);
        let mut b = Buffers::new(buffer, heads * per_head, groups, dq, dv);
        let block = block_of(tokens_of(launch, item), item.head_start..item.head_end, group);

        // Lanes without a row have scores of 0, which nobody reads.
        b.s.fill(0.0);
        b.o.fill(0.0);
        let mut lanes = [[State { m: 0.0, d: 0.0 }; MOST]; MAX_ROWS / (MOST / 2)];
        for head in 0..heads {
            for row in 0..per_head {
                let (token, qo_head) = (item.q_start as usize + row / group, (first + head) * group + row % group);
                let mut to = &mut b.copies[..dq];
                for (part, _) in launch.q {
                    let to = to.split_off_mut(..part.dim()).expect("checked by `suits`");
                    part.copy_bf16(v, [0, token, qo_head], b.wide, to);
                }
                let q = b.q[head * dq * per_head..].as_chunks_mut::<2>().0;
                for (q, pair) in q.iter_mut().skip(row).step_by(per_head).zip(b.copies[..dq].as_chunks::<2>().0) {
                    *q = *pair;
                }
                let state = start_state(launch, item, &ctx_of(launch, token, qo_head), regs);
                lanes[head / beside][head % beside * per_head + row] = state;
            }
        }

        let (mut at, mut ahead) = ([[0usize; 2]; TILE_KV], [[0usize; 2]; TILE_KV]);
        let mut pos = item.kv_start;
        locate(launch.index, item.request as usize, pos, item.kv_end, &mut at);
        while pos < item.kv_end {
            let n = (item.kv_end - pos).min(TILE_KV as u32) as usize;
            let next = pos + n as u32;
            let mut n_ahead = 0;
            if next < item.kv_end {
                n_ahead = (item.kv_end - next).min(TILE_KV as u32) as usize;
                locate(launch.index, item.request as usize, next, item.kv_end, &mut ahead);
            }
            let kv_pos = launch.kv_base.map_or(0, |b| b[item.request as usize]) + pos as i32;
            let visible = see(launch, &block, kv_pos, n);
            if visible != Visible::None {
                let pass = Pass { v, tiles, launch, heads: (first, heads), per_head };
                let (at, ahead) = (&at[..n], &ahead[..n_ahead]);
                let (of_scores, of_values) = (heads * dq / STEP * GROUPS, heads * dv / 16 * GROUPS);
                // Values that are the keys' first elements are there already: then the next tile is asked for all the time.
                let mut asked = match &launch.v {
                    Some(values) => Asked::new(std::slice::from_ref(values), at, (first, heads), of_scores),
                    None => Asked::new(launch.k, ahead, (first, heads), of_scores + of_values),
                };
                pass.scores(&mut b, at, &mut asked);
                if launch.v.is_some() {
                    asked = Asked::new(launch.k, ahead, (first, heads), of_values);
                }
                let tile = At { kv_pos, n, masked: visible == Visible::Some };
                for (group, states) in lanes[..groups].iter_mut().enumerate() {
                    if program.has_logits() || tile.masked {
                        for lane in 0..beside.min(heads - group * beside) * per_head {
                            let head = item.head_start + (group * beside + lane / per_head) as u32;
                            let ctx = super::row_ctx(launch, item, head, lane % per_head);
                            let s = b.s[group * SCORES..][..SCORES].as_chunks_mut::<MOST>().0;
                            for (x, s) in b.row.iter_mut().zip(&*s) {
                                *x = s[lane];
                            }
                            if natural(launch) {
                                b.row.iter_mut().for_each(|x| *x *= launch.sm_scale);
                            }
                            hooks::logits(v, program, launch.bound, &ctx, kv_pos, &mut b.row[..n], regs, tile.masked);
                            for (x, s) in b.row.iter().zip(s) {
                                s[lane] = *x;
                            }
                        }
                    }
                    pass.weigh(&mut b, group, n, states);
                }
                pass.values(&mut b, at, &mut asked);
            }
            std::mem::swap(&mut at, &mut ahead);
            pos = next;
        }

        let mut bad = 0;
        for head in 0..heads {
            let states = &lanes[head / beside][head % beside * per_head..][..per_head];
            let o = &b.o[head * per_head * dv..][..per_head * dv];
            if !super::tile::all_finite(v, o) || states.iter().any(|state| !state.d.is_finite()) {
                bad |= 1 << head;
                continue;
            }
            for (row, &state) in states.iter().enumerate() {
                for (c, wide) in b.wide[..dv].as_chunks_mut::<STEP>().0.iter_mut().enumerate() {
                    let even = &o[(2 * c * per_head + row) * 16..][..16];
                    let odd = &o[((2 * c + 1) * per_head + row) * 16..][..16];
                    for (wide, (even, odd)) in wide.as_chunks_mut::<2>().0.iter_mut().zip(even.iter().zip(odd)) {
                        *wide = [*even, *odd];
                    }
                }
                let head = item.head_start + head as u32;
                end_row(v, launch, item, (head, row), &mut b.wide[..dv], state, partials, sink, regs);
            }
        }
        bad
    }
}

/// What the steps of a pass over an item's heads have in common.
#[derive(Clone, Copy)]
struct Pass<'a, 'b> {
    v: Avx512,
    tiles: Tiles,
    launch: &'b Launch<'a>,
    /// First head and number of heads.
    heads: (usize, usize),
    per_head: usize,
}

impl<'a> Pass<'a, '_> {
    /// Scores of all heads with a tile's keys, into `s`.
    #[inline(always)]
    fn scores(self, b: &mut Buffers<'_>, at: &[[usize; 2]], asked: &mut Asked<'_, '_>) {
        let Self { v, tiles, launch, heads: (first, heads), per_head } = self;
        let dq: usize = launch.k.iter().map(Operand::dim).sum();
        let beside = MOST / per_head;
        tiles.shape_scores(per_head);
        let mut rows = [Lie::default(); 2];
        for (rows, part) in rows.iter_mut().zip(launch.k) {
            *rows = Lie::new(part, at);
        }
        for head in 0..heads {
            tiles.begin_scores();
            let mut q = &b.q[head * dq * per_head..];
            for (part, rows) in launch.k.iter().zip(&rows) {
                let keys = rows.of(part, at, first + head, b.copies);
                let mut c = 0;
                while c < part.dim() {
                    let from = c;
                    let keys = |g: usize| after(keys[g], from);
                    tiles.take_queries::<false>(q, 2 * per_head);
                    q = &q[STEP * per_head..];
                    c += STEP;
                    if c == part.dim() {
                        tiles.score::<0>(keys(0));
                        tiles.score::<1>(keys(1));
                        tiles.score::<2>(keys(2));
                        tiles.score::<3>(keys(3));
                        asked.more(v, 4);
                        continue;
                    }
                    tiles.take_queries::<true>(q, 2 * per_head);
                    q = &q[STEP * per_head..];
                    c += STEP;
                    tiles.score_two::<0>(keys(0));
                    asked.more(v, 2);
                    tiles.score_two::<1>(keys(1));
                    asked.more(v, 2);
                    tiles.score_two::<2>(keys(2));
                    asked.more(v, 2);
                    tiles.score_two::<3>(keys(3));
                    asked.more(v, 2);
                }
            }
            tiles.end_scores(&mut b.s[head / beside * SCORES + head % beside * per_head..]);
        }
    }

    /// Turns the scores of a group of heads into weights, and brings states and outputs to the new maxima.
    #[inline(always)]
    fn weigh(self, b: &mut Buffers<'_>, group: usize, n: usize, states: &mut [State; MOST]) {
        let Self { v, tiles, launch, heads: (_, heads), per_head } = self;
        let (base, dv, beside) = (base(launch), launch.dim_vo, MOST / per_head);
        let s = b.s[group * SCORES..][..SCORES].as_chunks_mut::<MOST>().0;
        s[n..].as_flattened_mut().fill(f32::NEG_INFINITY);
        let mut max = [v.splat(f32::NEG_INFINITY); 4];
        for s in s.as_chunks::<4>().0 {
            for (max, s) in max.iter_mut().zip(s) {
                *max = v.max(v.load(s), *max);
            }
        }
        let mut most = [0f32; MOST];
        v.store(v.max(v.max(max[0], max[1]), v.max(max[2], max[3])), &mut most);
        // What is added to scores in base-2 units. A row without a visible position so far has no maximum: 0.
        let mut offsets = [0f32; MOST];
        for (lane, state) in states.iter_mut().enumerate() {
            if most[lane] > state.m {
                let scale = ((state.m - most[lane]) * base).exp2();
                *state = State { m: most[lane], d: state.d * scale };
                let (head, row) = (group * beside + lane / per_head, lane % per_head);
                if lane / per_head < beside && head < heads {
                    for o in b.o[head * per_head * dv..][..per_head * dv]
                        .as_chunks_mut::<16>()
                        .0
                        .iter_mut()
                        .skip(row)
                        .step_by(per_head)
                    {
                        v.store(v.mul(v.load(o), v.splat(scale)), o);
                    }
                }
            }
            offsets[lane] = if state.m == f32::NEG_INFINITY { 0.0 } else { -state.m * base };
        }
        let (factor, offset) = (v.splat(base), v.load(&offsets));
        let mut sum = v.splat(0.0);
        let s = b.s[group * SCORES..][..SCORES].as_chunks::<MOST>().0;
        for (g, s) in s.as_chunks::<GROUP>().0.iter().enumerate() {
            let mut p = [v.splat(0.0); 16];
            for (p, s) in p.iter_mut().zip(s) {
                // To all bits: the coarse one of many rows puts log-sum-exps off by 1e-4, and here exponentials are few.
                *p = exp2(v, v.fma(v.load(s), factor, offset));
                sum = v.add(sum, *p);
            }
            let at = (group * GROUPS + g) * 2 * GROUP * MOST;
            let first = b.first[at..].as_chunks_mut::<32>().0;
            let second = b.second[at..].as_chunks_mut::<32>().0;
            for ((p, first), second) in v.transpose(p).into_iter().zip(first).zip(second) {
                tiles.pairs(p, first, second);
            }
        }
        let mut sums = [0f32; MOST];
        v.store(sum, &mut sums);
        for (state, sum) in states.iter_mut().zip(sums) {
            state.d += sum;
        }
    }

    /// Adds a tile's weighted values to the outputs of all heads.
    #[inline(always)]
    fn values(self, b: &mut Buffers<'_>, at: &[[usize; 2]], asked: &mut Asked<'_, '_>) {
        let Self { v, tiles, launch, heads: (first, heads), per_head } = self;
        let (dv, beside) = (launch.dim_vo, MOST / per_head);
        let part = launch.v.as_ref().unwrap_or(&launch.k[0]);
        let rows = Lie::new(part, at);
        tiles.shape_values(per_head);
        for head in 0..heads {
            let values = rows.of(part, at, first + head, b.copies);
            let p = head / beside * GROUPS * 2 * GROUP * MOST + head % beside * per_head * 32;
            for c in (0..dv).step_by(WIDE) {
                let o = &mut b.o[(head * dv + c) * per_head..];
                tiles.begin_values(o, per_head * 16);
                for (g, values) in values.iter().enumerate() {
                    let p = p + g * 2 * GROUP * MOST;
                    tiles.add_values(&b.first[p..], &b.second[p..], after(*values, c));
                    asked.more(v, WIDE / 16);
                }
                tiles.end_values(o, per_head * 16);
            }
        }
    }
}

/// Where the rows of a tile's groups lie: the first one of head 0, and how far apart; `None`: not evenly, or fewer.
#[derive(Clone, Copy, Default)]
struct Lie([Option<[usize; 2]>; GROUPS]);

impl Lie {
    #[inline(always)]
    fn new(part: &Operand<'_>, at: &[[usize; 2]]) -> Self {
        let [s, t, _] = part.strides();
        let mut all = Self::default();
        for (lie, at) in all.0.iter_mut().zip(at.as_chunks::<GROUP>().0) {
            let [page, slot] = at[0];
            // Of one page, one after the other.
            if at.iter().enumerate().all(|(i, at)| *at == [page, slot + i]) {
                *lie = Some([page * s + slot * t, t]);
            }
        }
        all
    }

    /// The groups' rows of a head, copied where they do not lie evenly; zeros after the last.
    #[inline(always)]
    fn of<'x>(
        &self,
        part: &Operand<'x>,
        at: &[[usize; 2]],
        head: usize,
        copies: &'x mut [bf16],
    ) -> [Left<'x, bf16>; GROUPS] {
        static ZEROS: [bf16; 1024] = [bf16::ZERO; 1024];
        let ([s, t, u], dim) = (part.strides(), part.dim());
        let data = part.bf16_data().expect("checked by `suits`");
        let mut all = [Left { data: &ZEROS[..], stride: 0 }; GROUPS];
        let mut copies = copies.chunks_exact_mut(GROUP * dim);
        for (g, rows) in all.iter_mut().enumerate() {
            let at = at.get(g * GROUP..).unwrap_or_default();
            if let Some([from, stride]) = self.0[g] {
                *rows = Left { data: &data[from + head * u..], stride };
            } else if !at.is_empty() {
                let copy = copies.next().expect("a tile of rows");
                for (i, copy) in copy.chunks_exact_mut(dim).enumerate() {
                    match at.get(i) {
                        Some(&[a, b]) => copy.copy_from_slice(&data[a * s + b * t + head * u..][..dim]),
                        None => copy.fill(bf16::ZERO),
                    }
                }
                *rows = Left { data: copy, stride: dim };
            }
        }
        all
    }
}

/// The same rows from element `c` on.
#[inline(always)]
fn after(rows: Left<'_, bf16>, c: usize) -> Left<'_, bf16> {
    Left { data: &rows.data[c..], ..rows }
}

/// Lines to be asked for, a few with every product of tiles.
struct Asked<'a, 'b> {
    parts: &'b [Operand<'a>],
    at: &'b [[usize; 2]],
    heads: (usize, usize),
    /// Lines of a product.
    each: usize,
    /// Where the next row is: part, head, token.
    next: [usize; 3],
    /// The rest of a row: elements of the part.
    row: std::ops::Range<usize>,
    data: &'a [bf16],
}

impl<'a, 'b> Asked<'a, 'b> {
    #[inline(always)]
    fn new(parts: &'b [Operand<'a>], at: &'b [[usize; 2]], heads: (usize, usize), products: usize) -> Self {
        let elements: usize = parts.iter().map(|part| part.dim() * heads.1 * at.len()).sum();
        let each = elements.div_ceil(STEP * products.max(1));
        Self { parts, at, heads, each, next: [0; 3], row: 0..0, data: &[] }
    }

    /// Asks for the lines of some more products.
    #[inline(always)]
    fn more(&mut self, v: Avx512, products: usize) {
        for _ in 0..self.each * products {
            if self.row.is_empty() && !self.turn() {
                return;
            }
            v.prefetch_far(self.data, self.row.start);
            self.row.start += STEP;
        }
    }

    /// Goes to the next row; whether there is one. Where the heads of a token lie side by side, they are one.
    #[inline(always)]
    fn turn(&mut self) -> bool {
        let [part, head, token] = self.next;
        let (Some(operand), Some(&[a, b])) = (self.parts.get(part), self.at.get(token)) else { return false };
        let ([s, t, u], (first, heads), dim) = (operand.strides(), self.heads, operand.dim());
        let (rows, len) = if u == dim { (1, heads * dim) } else { (heads, dim) };
        let from = a * s + b * t + (first + head) * u;
        (self.row, self.data) = (from..from + len, operand.bf16_data().unwrap_or_default());
        self.next = match [head + 1 < rows, token + 1 < self.at.len()] {
            [_, true] => [part, head, token + 1],
            [true, false] => [part, head + 1, 0],
            [false, false] => [part + 1, 0, 0],
        };
        true
    }
}
