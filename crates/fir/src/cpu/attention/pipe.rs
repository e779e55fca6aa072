//! Strips of query rows against a span of packed keys and values, block after block.
//!
//! A block is 32 query rows by 32 positions. With a head dim of 128 its products take 512 cycles of the tiles, its
//! exponentials, 11 instructions for 16 of them, 350 of the vectors, and loads and stores of tiles 200 more. So the
//! products for the scores of one block run beside the weights of the one before the last. What a strip needs at a time
//! stays in the first-level cache (48 KB): its queries, two blocks of scores, its weights. For the same reason the
//! weighted values are added strip by strip and not beside all that, which took longer than one after the other.
//!
//! Nothing else is done per element. A row's weights are relative to a logit that was the maximum of the first block it
//! saw, not to the maximum so far: as floats are as exact at 2^16 as at 1, a row is taken again, with its maximum, only
//! where its weights add up to more ([`TOO_MUCH`]).

use std::ops::Range;

use super::tiles::{BLOCK, Buffers, Coming, Hull, RING, STEP, STRIP};
use super::{Item, Launch, Operand, Registers, State, base, block_of, hooks, natural, row_ctx, see};
use crate::cpu::arch::{Aligned, Avx512, Right, TILE, Tiles};
use crate::cpu::vector::Vector;
use crate::variant::Visible;
use crate::variant::row::Test;

/// What the weights of a span may add up to before a row takes a new maximum.
const TOO_MUCH: f32 = 65_536.0;
/// Rows between two steps of the products beside them.
const EIGHT: usize = 8;

/// Query rows `first..first + count` of an item, and which positions of a span they see.
#[derive(Clone)]
struct Strip {
    first: usize,
    count: usize,
    /// Positions that some of its rows see: from a step's start on.
    seen: Range<usize>,
    /// Those among them that all see, from the start of a step to the start of one or the end.
    clear: Range<usize>,
}

/// A block of a strip on its way through the pipeline.
struct Part {
    strip: Strip,
    /// Its first position.
    j: usize,
    /// Its place in the ring; none: it is the whole strip, whose scores are taken with its weights.
    slot: Option<usize>,
}

/// One span of an item's head, packed.
pub(super) struct Pipe<'a, 'b, 'c> {
    v: Avx512,
    tiles: Tiles,
    launch: &'b Launch<'a>,
    item: &'b Item,
    head: u32,
    kv_pos: i32,
    dq: usize,
    finite: bool,
    b: &'b mut Buffers<'c>,
    /// Where the sums that tiles hold belong.
    last: usize,
    /// What is added to the scores of the strip whose weights are taken, in base-2 units: minus its rows' maxima.
    offsets: [f32; STRIP],
    /// Sums of its rows' weights before they were rounded, as lanes.
    lanes: Aligned<[[f32; 16]; STRIP]>,
    /// Whether some of its rows have no maximum yet.
    begins: bool,
    coming: Coming,
}

impl<'a, 'b, 'c> Pipe<'a, 'b, 'c> {
    #[expect(clippy::too_many_arguments, reason = "one call site")]
    #[inline(always)]
    pub(super) fn new(
        v: Avx512,
        tiles: Tiles,
        launch: &'b Launch<'a>,
        item: &'b Item,
        (head, kv_pos): (u32, i32),
        finite: bool,
        coming: Coming,
        b: &'b mut Buffers<'c>,
    ) -> Self {
        let dq = launch.k.iter().map(Operand::dim).sum();
        let (last, offsets, lanes) = ((RING - 1) * BLOCK, [0.0; STRIP], Aligned([[0.0; 16]; STRIP]));
        Self { v, tiles, launch, item, head, kv_pos, dq, finite, b, last, offsets, lanes, begins: true, coming }
    }

    #[inline(always)]
    pub(super) fn run(
        mut self,
        per_head: usize,
        visible: Visible,
        n: usize,
        regs: &mut Registers,
        states: &mut [State],
    ) {
        let program = self.launch.program;
        let hooked = program.has_logits() || program.has_output();
        let by_column = program.mask.iter().any(|of| matches!(of.test, Test::Columns(_)));
        let (mut first, mut strip, mut at, mut slot) = (0, None::<Strip>, 0, 0);
        // The block whose products run and the two behind it; the weights of the older are taken beside them. They stay where
        // they are, as copies of what was just written in parts have to wait: 3 % of 2048 tokens.
        let (mut parts, mut turn): ([Option<Part>; 3], _) = ([const { None }; 3], 0);
        loop {
            while strip.is_none() && first < per_head {
                strip = self.strip(first, STRIP.min(per_head - first), visible, n);
                at = strip.as_ref().map_or(0, |strip| strip.seen.start);
                first += STRIP;
            }
            parts[turn] = strip.clone().map(|of| {
                // Hooks want long rows, and `output` wants the maximum itself. Which maximum a row has goes by no other
                // rows of its strip where its mask is an interval: so it is the same in any piece of a prompt.
                let whole = hooked || by_column && of.clear != of.seen;
                let part = Part { j: at, slot: (!whole).then_some(slot), strip: of };
                at += STEP;
                slot = 1 - slot;
                if whole || at >= part.strip.seen.end {
                    strip = None;
                }
                part
            });
            if parts.iter().all(Option::is_none) {
                return self.end();
            }
            let next = parts[turn].as_ref();
            turn = (turn + 1) % parts.len();
            self.weigh(parts[turn].as_ref(), next, regs, states);
        }
    }

    /// What some rows see of the span; nothing: `None`.
    fn strip(&self, first: usize, count: usize, visible: Visible, n: usize) -> Option<Strip> {
        let (launch, item, kv_pos, group) = (self.launch, self.item, self.kv_pos, self.launch.group);
        let all = Strip { first, count, seen: 0..n, clear: 0..n };
        if visible == Visible::All {
            return Some(all);
        }
        if launch.program.has_interval() {
            return self.limited(all);
        }
        let tokens = item.q_start as usize + first / group..item.q_start as usize + (first + count - 1) / group + 1;
        let block = block_of(&launch.tokens[tokens], self.head..self.head + 1, group);
        match see(launch, &block, kv_pos, n) {
            Visible::All => return Some(all),
            Visible::None => return None,
            Visible::Some => {}
        }
        // It need not compute what none of it sees at either end.
        let hidden = |at: usize, to: usize| see(launch, &block, kv_pos + at as i32, to.min(n) - at) == Visible::None;
        let (mut from, mut end) = (0, n);
        while from < n && hidden(from, from + STEP) {
            from += STEP;
        }
        while from < end && hidden((end - 1) / STEP * STEP, end) {
            end = (end - 1) / STEP * STEP;
        }
        if from >= end {
            return None;
        }
        // Behind a causal mask all but the last positions are seen, behind a window all but the first.
        let seen = |at: usize, to: usize| see(launch, &block, kv_pos + at as i32, to.min(end) - at) == Visible::All;
        let mut clear = from..end;
        while clear.start < end && !seen(clear.start, clear.start + STEP) {
            clear.start += STEP;
        }
        while clear.start < clear.end && !seen((clear.end - 1) / STEP * STEP, clear.end) {
            clear.end = (clear.end - 1) / STEP * STEP;
        }
        if clear.is_empty() || !seen(clear.start, clear.end) {
            clear = from..from;
        }
        Some(Strip { first, count, seen: from..end, clear })
    }

    /// What some rows see of the span, by their limits.
    #[inline(always)]
    fn limited(&self, Strip { first, count, seen: Range { end: n, .. }, .. }: Strip) -> Option<Strip> {
        let in_span = |pos: i32| pos.saturating_sub(self.kv_pos).clamp(0, n as i32) as usize;
        let hull: Hull = self.b.hulls[first / STRIP];
        let [from, end, low, high] = hull.map(in_span);
        if from >= end {
            return None;
        }
        let seen = from / STEP * STEP..n.min(end.next_multiple_of(STEP));
        let clear = low.next_multiple_of(STEP)..if high >= seen.end { seen.end } else { high / STEP * STEP };
        let clear = if clear.is_empty() { seen.start..seen.start } else { clear };
        Some(Strip { first, count, seen, clear })
    }

    /// Step `at` of the scores of a strip's block from position `j` on, which are to be at `to` of the sums.
    #[inline(always)]
    fn step(&mut self, strip: &Strip, j: usize, at: usize, to: usize) {
        let (b, tile_row) = (&mut *self.b, self.dq / STEP * TILE);
        let q = Right { data: &b.q[strip.first / 16 * tile_row..], stride: tile_row };
        let keys = Right { data: &b.k[j * self.dq..], stride: tile_row };
        if at > 0 {
            return self.tiles.step::<true>(q, keys, at);
        }
        self.tiles.begin::<true>(q, keys, b.sums, None, self.last);
        self.last = to;
    }

    /// Stores what tiles hold.
    #[inline(always)]
    fn end(&mut self) {
        self.tiles.end(self.b.sums[self.last..].first_chunk_mut().expect("a block"));
        self.last = (RING - 1) * BLOCK;
    }

    /// Takes the weights of a block, and on the way the products for the scores of another. After the last of a strip
    /// adds the weighted values.
    #[inline(always)]
    fn weigh(&mut self, part: Option<&Part>, next: Option<&Part>, regs: &mut Registers, states: &mut [State]) {
        let next = next.and_then(|part| Some((part, part.slot? * BLOCK)));
        let steps = if next.is_some() { self.dq / STEP } else { 0 };
        if next.is_none() {
            self.end();
        }
        let mut done = 0;
        let Some(&Part { ref strip, j, slot }) = part else {
            while let Some((part, to)) = next
                && done < steps
            {
                self.step(&part.strip, part.j, done, to);
                done += 1;
            }
            return;
        };
        let states = &mut states[strip.first..][..strip.count];
        let mut again = u32::MAX;
        if let Some(slot) = slot {
            self.begin_rows(strip, j, slot, regs, states);
            for rows in 0..STRIP / EIGHT {
                while let Some((part, to)) = next
                    && done * STRIP < (rows + 1) * EIGHT * steps
                {
                    self.step(&part.strip, part.j, done, to);
                    done += 1;
                }
                self.weigh_rows(slot, j, rows);
            }
            self.coming.ask(self.launch, self.item, self.head);
            if j + STEP < strip.seen.end {
                return;
            }
            again = 0;
            let (low, high) = self.lanes.0.split_first_chunk().expect("32 rows");
            let sums = [self.v.sums_of_rows(low), self.v.sums_of_rows(high.first_chunk().expect("16 more"))];
            for (row, (state, &sum)) in states.iter_mut().zip(sums.as_flattened()).enumerate() {
                if sum > TOO_MUCH {
                    again |= 1 << row;
                } else {
                    state.d += sum;
                }
            }
        }
        if again != 0 {
            // What the products on the way have brought is stored with the first of these.
            self.take_again(strip, again, regs, states);
        }
        self.add_values(strip);
        while let Some((part, to)) = next
            && done < steps
        {
            self.step(&part.strip, part.j, done, to);
            done += 1;
        }
    }

    /// Takes the weights of eight rows of a block.
    #[inline(always)]
    fn weigh_rows(&mut self, slot: usize, j: usize, rows: usize) {
        let (v, tiles, factor) = (self.v, self.tiles, self.v.splat(base(self.launch)));
        let at = self.b.weights(rows * EIGHT, j).start;
        // Arrays, so that the loop is free of checks: a row's own work is some 30 instructions.
        let s = self.b.sums[slot * BLOCK..][..BLOCK].as_chunks::<STEP>().0;
        let p = self.b.p[at..][..EIGHT * STEP].as_chunks_mut::<STEP>().0;
        let (offsets, lanes) = (self.offsets.as_chunks::<EIGHT>().0, self.lanes.0.as_chunks_mut::<EIGHT>().0);
        let rows = s.as_chunks::<EIGHT>().0[rows].iter().zip(p).zip(offsets[rows]).zip(&mut lanes[rows]);
        for (((s, p), offset), lanes) in rows {
            let low = tiles.exp2(v.fma(v.load(s), factor, v.splat(offset)));
            let high = tiles.exp2(v.fma(v.load(&s[16..]), factor, v.splat(offset)));
            tiles.narrow(low, high, p);
            v.store(v.add(v.load(lanes), v.add(low, high)), lanes);
        }
    }

    /// Before the weights of a block: masks its scores, and gives rows that begin here their maximum.
    #[inline(always)]
    fn begin_rows(&mut self, strip: &Strip, j: usize, slot: usize, regs: &mut Registers, states: &mut [State]) {
        let (v, base) = (self.v, base(self.launch));
        if j == strip.seen.start {
            (self.offsets, self.lanes.0) = ([0.0; STRIP], [[0.0; 16]; STRIP]);
            for (offset, state) in self.offsets.iter_mut().zip(&*states) {
                *offset = if state.m == f32::NEG_INFINITY { 0.0 } else { -state.m * base };
            }
            self.begins = true;
        }
        let n = (strip.seen.end - j).min(STEP);
        let masked = !strip.clear.contains(&j);
        if n == STEP && !masked && !self.begins {
            return;
        }
        self.begins = false;
        for (row, state) in states.iter_mut().enumerate() {
            let s = &mut self.b.sums[slot * BLOCK + row * STEP..][..STEP];
            if masked && self.launch.program.has_interval() {
                let at = self.kv_pos + j as i32;
                let limits =
                    self.b.limits[strip.first + row].map(|pos| pos.saturating_sub(at).clamp(0, n as i32) as f32);
                show(v, limits, s);
            } else if masked {
                let ctx = row_ctx(self.launch, self.item, self.head, strip.first + row);
                let at = self.kv_pos + j as i32;
                hooks::logits(v, self.launch.program, self.launch.bound, &ctx, at, &mut s[..n], regs, true);
            }
            s[n..].fill(f32::NEG_INFINITY);
            if state.m == f32::NEG_INFINITY {
                let none = v.splat(f32::NEG_INFINITY);
                let max = v.max_lane(v.max(v.load(s), v.max(v.load(&s[16..]), none)));
                if max > f32::NEG_INFINITY {
                    (state.m, self.offsets[row]) = (max, -max * base);
                } else {
                    self.begins = true;
                }
            }
        }
    }

    /// Takes the scores of a strip, and for the rows whose bits are set the weights, relative to their maximum so far.
    #[inline(always)]
    fn take_again(&mut self, strip: &Strip, rows: u32, regs: &mut Registers, states: &mut [State]) {
        let Strip { first, seen: Range { start: from, end: n }, clear, .. } = strip.clone();
        for j in (from..n).step_by(STEP) {
            for at in 0..self.dq / STEP {
                self.step(strip, j, at, (RING + j / STEP) * BLOCK);
            }
        }
        self.end();
        let (v, tiles, launch, dv) = (self.v, self.tiles, self.launch, self.launch.dim_vo);
        let (base, natural, program) = (base(launch), natural(launch), launch.program);
        for (row, state) in states.iter_mut().enumerate().filter(|(row, _)| rows >> row & 1 == 1) {
            let b = &mut *self.b;
            let s = &mut b.row[..n.next_multiple_of(STEP)];
            for j in (from..n).step_by(STEP) {
                s[j..][..STEP].copy_from_slice(&b.sums[(RING + j / STEP) * BLOCK + row * STEP..][..STEP]);
            }
            if natural {
                for s in &mut s[from..n] {
                    *s *= launch.sm_scale;
                }
            }
            if program.has_logits() || strip.clear != strip.seen {
                let ctx = row_ctx(launch, self.item, self.head, first + row);
                for (part, masked) in [(from..clear.start, true), (clear.clone(), false), (clear.end..n, true)] {
                    if (masked || program.has_logits()) && !part.is_empty() {
                        let at = self.kv_pos + part.start as i32;
                        hooks::logits(v, program, launch.bound, &ctx, at, &mut s[part], regs, masked);
                    }
                }
            }
            s[n..].fill(f32::NEG_INFINITY);
            let mut max = [v.splat(f32::NEG_INFINITY); 2];
            for s in s[from..].chunks_exact(STEP) {
                max = [v.max(v.load(s), max[0]), v.max(v.load(&s[16..]), max[1])];
            }
            let max = v.max_lane(v.max(max[0], max[1]));
            let m = if max > state.m { max } else { state.m };
            // A row without a visible position so far has no maximum; 0 keeps -inf - (-inf) away.
            let shift = if m == f32::NEG_INFINITY { 0.0 } else { m };
            let (factor, offset) = (v.splat(base), v.splat(-shift * base));
            let mut sum = v.splat(0.0);
            for j in (from..n).step_by(STEP) {
                let s = &b.row[j..][..STEP];
                let low = tiles.exp2(v.fma(v.load(s), factor, offset));
                let high = tiles.exp2(v.fma(v.load(&s[16..]), factor, offset));
                let at = b.weights(row, j);
                tiles.narrow(low, high, &mut b.p[at]);
                sum = v.add(sum, v.add(low, high));
            }
            let scale = if m == state.m { 1.0 } else { ((state.m - shift) * base).exp2() };
            *state = State { m, d: state.d * scale + v.sum(sum) };
            if scale != 1.0 && self.b.begun[first / STRIP] == 1 {
                for c in 0..dv / STEP {
                    let at = self.b.output(first + row, c, dv);
                    for o in self.b.sums[at].chunks_exact_mut(16) {
                        v.store(v.mul(v.load(o), v.splat(scale)), o);
                    }
                }
            }
        }
    }

    /// Adds the weighted values of a strip to its outputs.
    #[inline(always)]
    fn add_values(&mut self, strip: &Strip) {
        let (dv, Range { start: from, end: n }) = (self.launch.dim_vo, strip.seen.clone());
        if strip.clear != strip.seen && !self.finite {
            self.end();
            return self.add_visible(strip);
        }
        let b = &mut *self.b;
        let apart = b.span / STEP * TILE;
        let p = Right { data: &b.p[from / STEP * TILE..], stride: apart };
        let begun = std::mem::replace(&mut b.begun[strip.first / STRIP], 1) == 1;
        for c in 0..dv / STEP {
            let values = Right { data: &b.v[2 * c * apart + from / STEP * TILE..], stride: apart };
            let o = b.output(strip.first, c, dv).start;
            self.tiles.begin::<true>(p, values, b.sums, begun.then_some(o), self.last);
            for at in 1..(n - from).div_ceil(STEP) {
                self.tiles.step::<true>(p, values, at);
            }
            self.last = o;
        }
    }

    /// As [`Self::add_values`], leaving out positions of weight 0: where a value is not finite, `0 · inf` would put a NaN.
    fn add_visible(&mut self, strip: &Strip) {
        let (b, dv) = (&mut *self.b, self.launch.dim_vo);
        b.begin(strip.first / STRIP, dv);
        for row in 0..strip.count {
            for j in strip.seen.clone() {
                let p = b.p[b.weights(row, j)][j % STEP].to_f32();
                if p != 0.0 {
                    for c in 0..dv {
                        let tile = c / 16 * (b.span / STEP) + j / STEP;
                        let x = b.v[tile * TILE + j % STEP / 2 * 32 + c % 16 * 2 + j % 2].to_f32();
                        let o = b.output(strip.first + row, c / STEP, dv).start + c % STEP;
                        b.sums[o] += p * x;
                    }
                }
            }
        }
    }
}

/// Hides what is before the first limit or not before the second.
#[inline(always)]
fn show(v: Avx512, [from, end]: [f32; 2], s: &mut [f32]) {
    const AT: [f32; STEP] = {
        let (mut at, mut i) = ([0.0; STEP], 0);
        while i < STEP {
            (at[i], i) = (i as f32, i + 1);
        }
        at
    };
    let (from, end, hidden) = (v.splat(from), v.splat(end), v.splat(f32::NEG_INFINITY));
    for (s, at) in s.chunks_exact_mut(16).zip(AT.chunks_exact(16)) {
        let at = v.load(at);
        let shown = v.select(v.lt(at, end), v.load(s), hidden);
        v.store(v.select(v.lt(at, from), hidden, shown), s);
    }
}
