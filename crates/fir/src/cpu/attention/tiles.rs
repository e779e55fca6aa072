//! Attention of many query rows through AMX tiles.
//!
//! For every span of KV positions and head, keys and values are packed once as right operands; then strips of 32 query
//! rows take their scores, turn them into weights rounded to bf16, and add the weighted values, all in cache. Scores,
//! sums and outputs are f32.
//!
//! Two products of 16 × 16 × 32 take 32 cycles, the weights between them about as many: each weight is an exponential,
//! so nothing else of the softmax is done per element. Laying pieces of the next strip's scores between the rows of one
//! strip's weights, so that tiles and vectors work at once, brought nothing on a Xeon of model 207.

use super::{
    Item, Launch, Operand, Registers, Shape, Sink, State, base, block_of, ctx_of, end_row, hooks, locate, natural,
    row_ctx, start_state,
};
use crate::cpu::arch::{Avx512, Left, Right, Sums, TILE, TileKernel, Tiles};
use crate::cpu::pool::RowsOnce;
use crate::cpu::vector::Vector;
use crate::plan::TILE_KV;
use crate::tensor::{DType, bf16};
use crate::variant::{Block, Visible};

/// Query rows whose weights are taken at once.
const STRIP: usize = 32;
/// Depth of a tile.
const STEP: usize = 32;

/// Whether a launch can go through tiles: queries, keys and values are exact in bf16, the weights need be no finer than
/// the output, and head dims are whole pairs of tiles.
pub(super) fn suits(launch: &Launch<'_>) -> bool {
    let program = launch.program;
    let dim_qk: usize = launch.k.iter().map(Operand::dim).sum();
    dim_qk > 0
        && launch.k.iter().all(|part| part.dim().is_multiple_of(STEP))
        && launch.dim_vo.is_multiple_of(2 * 16)
        && launch.out == DType::BF16
        && program.softmax()
        && !(program.has_query() || program.has_key() || program.has_value())
        && launch.q.iter().all(|(q, factor)| *factor == 1.0 && q.fits_bf16())
        && launch.k.iter().chain(&launch.v).all(Operand::fits_bf16)
}

/// Floats of one worker's buffer.
pub(super) fn floats(dim_qk: usize, dim_vo: usize, shape: Shape) -> usize {
    let (rows, span) = (shape.rows.next_multiple_of(STRIP), shape.span);
    let (dq, dv) = (dim_qk, dim_vo);
    // Queries, outputs, scores, weights, keys, values, a step of rows, one wide row, and to the next cache line.
    rows * dq / 2 + rows * dv + STRIP * span * 3 / 2 + span * (dq + dv) / 2 + STEP * dq.max(dv) / 2 + dq.max(dv) + 16
}

/// One item of the schedule.
pub(super) struct TileItem<'a, 'b> {
    pub launch: &'b Launch<'a>,
    pub item: &'b Item,
    pub buffer: &'b mut [f32],
    pub partials: &'b RowsOnce<'b, f32>,
    pub sink: &'b Sink<'a>,
    pub regs: &'b mut Registers,
    pub states: &'b mut [State],
}

/// A worker's buffer, cut up.
struct Buffers<'b> {
    /// `[rows, dim_qk]`
    q: &'b mut [bf16],
    /// `[rows, dim_vo]`
    o: &'b mut [f32],
    /// `[STRIP, span]`
    s: &'b mut [f32],
    /// `[STRIP, span]`
    p: &'b mut [bf16],
    /// Tiles `[span / 16, dim_qk / STEP]`
    k: &'b mut [bf16],
    /// Tiles `[dim_vo / 16, span / STEP]`
    v: &'b mut [bf16],
    /// `[STEP, dim_qk.max(dim_vo)]`
    step: &'b mut [bf16],
    wide: &'b mut [f32],
    span: usize,
}

impl<'b> Buffers<'b> {
    fn new(buffer: &'b mut [f32], rows: usize, span: usize, dq: usize, dv: usize) -> Self {
        let at = buffer.as_ptr().align_offset(64).min(16);
        let mut rest = &mut buffer[at..];
        let mut take = |n: usize| rest.split_off_mut(..n).expect("sized by `floats`");
        let (q, o, s, p) = (take(rows * dq / 2), take(rows * dv), take(STRIP * span), take(STRIP * span / 2));
        let (k, v) = (take(span * dq / 2), take(span * dv / 2));
        let (step, wide) = (take(STEP * dq.max(dv) / 2), take(dq.max(dv)));
        let half = bytemuck::cast_slice_mut::<f32, bf16>;
        Self { q: half(q), o, s, p: half(p), k: half(k), v: half(v), step: half(step), wide, span }
    }
}

impl TileKernel for TileItem<'_, '_> {
    type Out = ();
    #[inline(always)]
    fn run(self, v: Avx512, tiles: Tiles) {
        let Self { launch, item, buffer, partials, sink, regs, states } = self;
        let (group, dv) = (launch.group, launch.dim_vo);
        let dq: usize = launch.k.iter().map(Operand::dim).sum();
        let per_head = item.q_len as usize * group;
        let rows = per_head.next_multiple_of(STRIP);
        let mut b = Buffers::new(buffer, rows, launch.shape.span, dq, dv);
        let tokens = &launch.tokens[item.q_start as usize..][..item.q_len as usize];
        for head in item.head_start..item.head_end {
            for (row, state) in states[..per_head].iter_mut().enumerate() {
                let (token, qo_head) = (item.q_start as usize + row / group, head as usize * group + row % group);
                let mut to = &mut b.q[row * dq..][..dq];
                for (part, _) in launch.q {
                    let to = to.split_off_mut(..part.dim()).expect("checked by `suits`");
                    part.copy_bf16(v, [0, token, qo_head], b.wide, to);
                }
                *state = start_state(launch, item, &ctx_of(launch, token, qo_head), regs);
            }
            b.q[per_head * dq..].fill(bf16::ZERO);
            b.o.fill(0.0);

            let block = block_of(tokens, head..head + 1, group);
            let mut pos = item.kv_start;
            while pos < item.kv_end {
                let n = (item.kv_end - pos).min(b.span as u32) as usize;
                let kv_pos = launch.kv_base.map_or(0, |b| b[item.request as usize]) + pos as i32;
                let visible = see(launch, &block, kv_pos, n);
                if visible != Visible::None {
                    let finite = pack(v, tiles, launch, item, head, pos, n, &mut b, dq);
                    for first in (0..per_head).step_by(STRIP) {
                        let count = STRIP.min(per_head - first);
                        let strip = Strip { launch, item, head, kv_pos, first, count, finite };
                        strip.run(v, tiles, visible, n, &mut b, dq, regs, states);
                    }
                }
                pos += n as u32;
            }

            for (row, &state) in states[..per_head].iter().enumerate() {
                let o = &mut b.o[row * dv..][..dv];
                end_row(v, launch, item, (head, row), o, state, partials, sink, regs);
            }
        }
    }
}

/// What a block of queries sees of `n` positions from `kv_pos` on.
#[inline(always)]
fn see(launch: &Launch<'_>, block: &Block, kv_pos: i32, n: usize) -> Visible {
    if !launch.program.has_mask() {
        return Visible::All;
    }
    launch.program.block(Some(launch.bound), &Block { kv_pos: (kv_pos, kv_pos + n as i32 - 1), ..*block })
}

/// Packs keys and values of `n` positions from `pos` on, zeros up to the next step; whether all values are finite.
#[expect(clippy::too_many_arguments, reason = "one call site")]
#[inline(always)]
fn pack(
    v: Avx512,
    tiles: Tiles,
    launch: &Launch<'_>,
    item: &Item,
    head: u32,
    pos: u32,
    n: usize,
    b: &mut Buffers<'_>,
    dq: usize,
) -> bool {
    let dv = launch.dim_vo;
    let mut at = [[0usize; 2]; TILE_KV];
    let mut finite = true;
    for from in (0..n).step_by(STEP) {
        if from % TILE_KV == 0 {
            locate(launch.index, item.request as usize, pos + from as u32, item.kv_end, &mut at);
        }
        let at = &at[from % TILE_KV..][..STEP.min(n - from)];
        let keys = &mut b.k[from * dq..][..STEP * dq];
        let apart = b.span / STEP * TILE;
        let values = &mut b.v[from / STEP * TILE..];
        let mut column = 0;
        for part in launch.k {
            let rows = rows_of(v, part, head, at, b.wide, b.step);
            let (low, high) = keys.split_at_mut(16 * dq);
            for (rows, tiles_of) in rows.as_chunks::<16>().0.iter().zip([low, high]) {
                for c in (0..part.dim()).step_by(STEP) {
                    tiles.pack_rows(rows, c, &mut tiles_of[(column + c) * 16..]);
                }
            }
            if launch.v.is_none() && column < dv {
                finite &= all_finite(&rows, dv - column);
                for c in (0..part.dim().min(dv - column)).step_by(32) {
                    tiles.pack_columns(&rows, c, &mut values[(column + c) / 16 * apart..], apart);
                }
            }
            column += part.dim();
        }
        if let Some(part) = &launch.v {
            let rows = rows_of(v, part, head, at, b.wide, b.step);
            finite &= all_finite(&rows, dv);
            for c in (0..dv).step_by(32) {
                tiles.pack_columns(&rows, c, &mut values[c / 16 * apart..], apart);
            }
        }
    }
    finite
}

fn all_finite(rows: &[&[bf16]; STEP], dim: usize) -> bool {
    rows.iter()
        .all(|row| !row[..dim.min(row.len())].iter().fold(false, |bad, x| bad | (x.to_bits() & 0x7f80 == 0x7f80)))
}

/// The rows of some positions as bf16, where they lie if they are, in `step` if not; zeros after the last.
#[inline(always)]
fn rows_of<'a>(
    v: Avx512,
    part: &Operand<'a>,
    head: u32,
    at: &[[usize; 2]],
    wide: &mut [f32],
    step: &'a mut [bf16],
) -> [&'a [bf16]; STEP] {
    static ZEROS: [bf16; 512] = [bf16::ZERO; 512];
    let mut rows = [&ZEROS[..]; STEP];
    let mut copies = step.chunks_exact_mut(part.dim());
    for (row, &[a, b]) in rows.iter_mut().zip(at) {
        *row = match part.bf16_row([a, b, head as usize]) {
            Some(row) => row,
            None => {
                let copy = copies.next().expect("a step of rows");
                part.copy_bf16(v, [a, b, head as usize], wide, copy);
                copy
            }
        };
    }
    rows
}

/// Some query rows of an item against one span.
struct Strip<'a, 'b> {
    launch: &'b Launch<'a>,
    item: &'b Item,
    head: u32,
    kv_pos: i32,
    first: usize,
    count: usize,
    finite: bool,
}

impl Strip<'_, '_> {
    #[expect(clippy::too_many_arguments, reason = "one call site")]
    #[inline(always)]
    fn run(
        self,
        v: Avx512,
        tiles: Tiles,
        visible: Visible,
        mut n: usize,
        b: &mut Buffers<'_>,
        dq: usize,
        regs: &mut Registers,
        states: &mut [State],
    ) {
        let Self { launch, item, head, kv_pos, first, count, finite } = self;
        let (group, dv) = (launch.group, launch.dim_vo);
        let mut from = 0;
        // Positions that some of its rows see and some do not.
        let mut mixed = 0..0;
        if visible == Visible::Some {
            // This strip may see all of it or nothing; and it need not compute what it does not see at either end.
            let tokens = item.q_start as usize + first / group..item.q_start as usize + (first + count - 1) / group + 1;
            let block = block_of(&launch.tokens[tokens], head..head + 1, group);
            match see(launch, &block, kv_pos, n) {
                Visible::All => {}
                Visible::None => return,
                Visible::Some => {
                    let hidden = |at: usize, end: usize| {
                        see(launch, &block, kv_pos + at as i32, end.min(n) - at) == Visible::None
                    };
                    while from < n && hidden(from, from + STEP) {
                        from += STEP;
                    }
                    let mut end = n;
                    while from < end && hidden((end - 1) / STEP * STEP, end) {
                        end = (end - 1) / STEP * STEP;
                    }
                    if from >= end {
                        return;
                    }
                    n = end;
                    // Behind a causal mask all but the last positions are seen, behind a window all but the first.
                    let seen = |at: usize, end: usize| {
                        see(launch, &block, kv_pos + at as i32, end.min(n) - at) == Visible::All
                    };
                    mixed = from..n;
                    let mut step = (n - from).next_power_of_two().max(STEP);
                    while step >= STEP {
                        if mixed.start + step <= n && seen(from, mixed.start + step) {
                            mixed.start += step;
                        } else if mixed.start == from && mixed.end - from > step && seen(mixed.end - step, n) {
                            mixed.end = (mixed.end - step).next_multiple_of(STEP);
                        }
                        step /= 2;
                    }
                }
            }
        }
        let q = Left { data: &b.q[first * dq..], stride: dq };
        for j in (from..n).step_by(STEP) {
            let keys = Right { data: &b.k[j * dq..], stride: 16 * dq };
            tiles.product_bf16::<2, 2>(q, keys, dq / STEP, Sums { data: &mut b.s[j..], stride: b.span }, false);
        }

        let (base, natural, program) = (base(launch), natural(launch), launch.program);
        for row in 0..count {
            let s = &mut b.s[row * b.span..][..n.next_multiple_of(STEP)];
            if natural {
                for s in &mut s[from..n] {
                    *s *= launch.sm_scale;
                }
            }
            if program.has_logits() || !mixed.is_empty() {
                let ctx = row_ctx(launch, item, head, first + row);
                for (part, masked) in [(from..mixed.start, false), (mixed.clone(), true), (mixed.end..n, false)] {
                    if (masked || program.has_logits()) && !part.is_empty() {
                        let at = kv_pos + part.start as i32;
                        hooks::logits(v, program, launch.bound, &ctx, at, &mut s[part], regs, masked);
                    }
                }
            }
            s[n..].fill(f32::NEG_INFINITY);
            let s = &s[from..];
            let p = &mut b.p[row * b.span + from..][..s.len()];
            weights(v, tiles, s, p, base, &mut states[first + row], &mut b.o[(first + row) * dv..][..dv]);
        }

        if !mixed.is_empty() && !finite {
            return self.accumulate_visible(from, n, b);
        }
        let p = Left { data: &b.p[from..], stride: b.span };
        let apart = b.span / STEP * TILE;
        for c in (0..dv).step_by(32) {
            let values = Right { data: &b.v[c / 16 * apart + from / STEP * TILE..], stride: apart };
            let o = Sums { data: &mut b.o[first * dv + c..], stride: dv };
            tiles.product_bf16::<2, 2>(p, values, (n - from).div_ceil(STEP), o, true);
        }
    }

    /// Adds the weighted values, leaving out positions of weight 0: where a value is not finite, `0 · inf` would put a NaN.
    fn accumulate_visible(&self, from: usize, n: usize, b: &mut Buffers<'_>) {
        let dv = self.launch.dim_vo;
        for row in 0..self.count {
            let o = &mut b.o[(self.first + row) * dv..][..dv];
            for j in from..n {
                let p = b.p[row * b.span + j].to_f32();
                if p != 0.0 {
                    for (c, o) in o.iter_mut().enumerate() {
                        let tile = c / 16 * (b.span / STEP) + j / STEP;
                        *o += p * b.v[tile * TILE + j % STEP / 2 * 32 + c % 16 * 2 + j % 2].to_f32();
                    }
                }
            }
        }
    }
}

/// Turns logits, whole steps of them, into weights, and brings state and output to the new maximum.
#[inline(always)]
fn weights(v: Avx512, tiles: Tiles, s: &[f32], p: &mut [bf16], base: f32, state: &mut State, o: &mut [f32]) {
    let mut max = [v.splat(f32::NEG_INFINITY); 2];
    for s in s.chunks_exact(32) {
        max[0] = v.max(v.load(s), max[0]);
        max[1] = v.max(v.load(&s[16..]), max[1]);
    }
    let max = v.max_lane(v.max(max[0], max[1]));
    let m = if max > state.m { max } else { state.m };
    // A row without a visible position so far has no maximum; 0 keeps -inf - (-inf) away.
    let shift = if m == f32::NEG_INFINITY { 0.0 } else { m };
    let (factor, offset) = (v.splat(base), v.splat(-shift * base));
    let mut sum = [v.splat(0.0); 2];
    for (s, p) in s.chunks_exact(32).zip(p.chunks_exact_mut(32)) {
        let lo = tiles.exp2(v.fma(v.load(s), factor, offset));
        let hi = tiles.exp2(v.fma(v.load(&s[16..]), factor, offset));
        sum[0] = v.add(sum[0], lo);
        sum[1] = v.add(sum[1], hi);
        tiles.narrow(lo, hi, p);
    }
    let sum = v.sum(v.add(sum[0], sum[1]));
    if m == state.m {
        state.d += sum;
        return;
    }
    let scale = ((state.m - shift) * base).exp2();
    *state = State { m, d: state.d * scale + sum };
    for o in o.chunks_exact_mut(16) {
        v.store(v.mul(v.load(o), v.splat(scale)), o);
    }
}
