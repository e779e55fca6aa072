//! Attention of many query rows through AMX tiles.
//!
//! For every span of KV positions and head, keys and values are packed once as right operands; then strips of 32 query
//! rows take their scores, turn them into weights rounded to bf16, and add the weighted values, all in cache. Scores,
//! sums and outputs are f32.
//!
//! The strips of a span go through [`super::pipe`].

use std::ops::Range;

use super::pipe::Pipe;
use super::{
    Item, Launch, Operand, Out, Registers, Shape, Sink, State, ask_rows, block_of, end_row, first_row, hooks,
    last_scale, locate, log_sum, row_ctx, see, start_state, tokens_of,
};
use crate::cpu::arch::{Avx512, TILE, TileKernel, Tiles, prefetch_at, prefetch_far};
use crate::cpu::pool::RowsOnce;
use crate::cpu::vector::Vector;
use crate::plan::TILE_KV;
use crate::tensor::{DType, bf16};
use crate::variant::Visible;

/// Query rows whose weights are taken at once.
pub(super) const STRIP: usize = 32;
/// Depth of a tile, and positions of a block.
pub(super) const STEP: usize = 32;
/// Floats of a block.
pub(super) const BLOCK: usize = STRIP * STEP;
/// Blocks of sums before those of a strip's scores: two of the pipeline's, and one for what tiles hold at first.
pub(super) const RING: usize = 3;

/// Rows before those of the token that is written whose lines are asked for.
const ROWS_AHEAD: usize = 8;
/// The same of queries. Those of a head lie KiB apart: with a copy in between and nothing asked for, they took 6 % of 2048 tokens.
const Q_AHEAD: usize = 16;

/// What a strip's rows see, by their limits: the first position that some see, the one behind the last that some see, the first that all
/// see, the one behind the last that all see.
pub(super) type Hull = [i32; 4];

/// Whether a launch can go through tiles: queries, keys and values are exact in bf16, the weights need be no finer than
/// the output, and head dims are whole pairs of tiles.
pub(super) fn suits(launch: &Launch<'_>) -> bool {
    let program = launch.program;
    !launch.k.is_empty()
        && launch.k.iter().all(|part| part.dim() > 0 && part.dim().is_multiple_of(STEP))
        && launch.dim_vo.is_multiple_of(2 * 16)
        && launch.out == DType::BF16
        && program.softmax()
        && !(program.has_query() || program.has_key() || program.has_value())
        && launch.q.iter().all(|(q, factor)| *factor == 1.0 && q.fits_bf16() && q.dim().is_multiple_of(STEP))
        && launch.k.iter().chain(&launch.v).all(Operand::fits_bf16)
}

/// Floats of one worker's buffer.
pub(super) fn floats(dim_qk: usize, dim_vo: usize, shape: Shape) -> usize {
    let (rows, span) = (shape.rows.next_multiple_of(STRIP), shape.span);
    let (dq, dv) = (dim_qk.next_multiple_of(STEP), dim_vo.next_multiple_of(STEP));
    // Queries, sums (ring, scores, outputs), weights, keys, values, a step of rows, one wide row, a row of scores, limits and
    // hulls, strips, and to the next cache line.
    rows * dq / 2
        + (RING + span / STEP) * BLOCK
        + rows * dv
        + STRIP * span / 2
        + span * (dq + dv) / 2
        + STEP * dq.max(dv) / 2
        + dq.max(dv)
        + span
        + 2 * rows
        + rows / STRIP * 5
        + 16
}

/// One item of the schedule, for tiles or pairs.
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
pub(super) struct Buffers<'b> {
    /// Tiles of 16 rows `[rows / 16, dim_qk / STEP]`; without tiles rows, as weights and sums are
    pub q: &'b mut [bf16],
    /// Blocks: [`RING`], then `[span / STEP]` of scores, then `[rows / STRIP, dim_vo / STEP]` of outputs.
    pub sums: &'b mut [f32],
    /// Tiles of 16 rows `[STRIP / 16, span / STEP]`
    pub p: &'b mut [bf16],
    /// Tiles `[span / 16, dim_qk / STEP]`
    pub k: &'b mut [bf16],
    /// Tiles `[dim_vo / 16, span / STEP]`
    pub v: &'b mut [bf16],
    /// `[STEP, dim_qk.max(dim_vo)]`
    step: &'b mut [bf16],
    pub wide: &'b mut [f32],
    /// `[span]`
    pub row: &'b mut [f32],
    /// By query row, the first position that its mask shows and the one behind the last, if that is all it shows: filled in
    /// for the first span that it hides some of.
    pub limits: &'b mut [[i32; 2]],
    /// Of strips, filled in with them.
    pub hulls: &'b mut [Hull],
    /// Whether a strip has outputs, 1 or 0; before, they have no meaning.
    pub begun: &'b mut [u32],
    pub span: usize,
}

impl<'b> Buffers<'b> {
    pub(super) fn new(buffer: &'b mut [f32], rows: usize, span: usize, dq: usize, dv: usize) -> Self {
        let at = buffer.as_ptr().align_offset(64).min(16);
        let mut rest = &mut buffer[at..];
        let mut take = |n: usize| rest.split_off_mut(..n).expect("sized by `floats`");
        let (q, sums) = (take(rows * dq / 2), take((RING + span / STEP) * BLOCK + rows * dv));
        let (p, k, v) = (take(STRIP * span / 2), take(span * dq / 2), take(span * dv / 2));
        let (step, wide, row, limits) = (take(STEP * dq.max(dv) / 2), take(dq.max(dv)), take(span), take(2 * rows));
        let (hulls, begun) = (take(rows / STRIP * 4), take(rows / STRIP));
        let half = bytemuck::cast_slice_mut::<f32, bf16>;
        let (limits, hulls) = (bytemuck::cast_slice_mut(limits), bytemuck::cast_slice_mut(hulls));
        let (step, begun) = (half(step), bytemuck::cast_slice_mut(begun));
        Self { q: half(q), sums, p: half(p), k: half(k), v: half(v), step, wide, row, limits, hulls, begun, span }
    }

    /// Fills in the limits of all rows of a head, if its mask is an interval.
    #[inline(always)]
    fn limit(&mut self, launch: &Launch<'_>, item: &Item, head: u32, regs: &mut Registers) {
        let (program, group) = (launch.program, launch.group);
        for (token, to) in self.limits.chunks_exact_mut(group).enumerate().take(item.q_len as usize) {
            let mut limits = [0; 2];
            for (g, to) in to.iter_mut().enumerate() {
                if g == 0 || program.masks_by_head {
                    let ctx = row_ctx(launch, item, head, token * group + g);
                    limits = hooks::interval(program, launch.bound, &ctx, regs);
                }
                *to = limits;
            }
        }
        let limits = &self.limits[..item.q_len as usize * group];
        for (limits, hull) in limits.chunks(STRIP).zip(&mut *self.hulls) {
            *hull = [i32::MAX, i32::MIN, i32::MIN, i32::MAX];
            for &[from, end] in limits {
                if from < end {
                    (hull[0], hull[1]) = (hull[0].min(from), hull[1].max(end));
                }
                (hull[2], hull[3]) = (hull[2].max(from), hull[3].min(end));
            }
        }
    }

    /// Puts zeros into the outputs of a strip that has none.
    pub(super) fn begin(&mut self, strip: usize, dv: usize) {
        if self.begun[strip] == 0 {
            let at = self.output(strip * STRIP, 0, dv).start;
            self.sums[at..][..STRIP * dv].fill(0.0);
            self.begun[strip] = 1;
        }
    }

    /// Where the first block of outputs is in `sums`.
    pub(super) fn outputs(&self) -> usize {
        (RING + self.span / STEP) * BLOCK
    }

    /// Where piece `c` (of [`STEP`] columns) of the output of query row `row` is in `sums`.
    #[inline(always)]
    pub(super) fn output(&self, row: usize, c: usize, dv: usize) -> Range<usize> {
        let at = self.outputs() + (row / STRIP * (dv / STEP) + c) * BLOCK + row % STRIP * STEP;
        at..at + STEP
    }

    /// Where the weights of row `row` of the strip and of the positions from `j` on, a step of them, are in `p`.
    #[inline(always)]
    pub(super) fn weights(&self, row: usize, j: usize) -> Range<usize> {
        let at = (row / 16 * (self.span / STEP) + j / STEP) * TILE + row % 16 * STEP;
        at..at + STEP
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
        let tokens = tokens_of(launch, item);
        // A state that no row's own logit begins.
        let start = (!launch.program.has_init()).then(|| start_state(launch, item, &row_ctx(launch, item, 0, 0), regs));
        let mut limited = false;
        for head in item.head_start..item.head_end {
            limited &= !launch.program.masks_by_head;
            b.q[per_head / 16 * 16 * dq..].fill(bf16::ZERO);
            let ahead = Q_AHEAD.div_ceil(group);
            for (token, states) in states[..per_head].chunks_exact_mut(group).enumerate() {
                for (g, state) in states.iter_mut().enumerate() {
                    let (row, qo_head) = (token * group + g, head as usize * group + g);
                    let place = |token: usize| [0, item.q_start as usize + token, qo_head];
                    let mut tile = (row / 16 * (dq / STEP)) * TILE + row % 16 * STEP;
                    for (part, _) in launch.q {
                        if let Some(row) = part.bf16_row(place((token + ahead).min(item.q_len as usize - 1))) {
                            prefetch_at(row.as_ptr(), row.len());
                        }
                        for x in row_of(v, part, place(token), b.wide, b.step).as_chunks::<STEP>().0 {
                            *b.q[tile..].first_chunk_mut().expect("a row of a tile") = *x;
                            tile += TILE;
                        }
                    }
                    *state =
                        start.unwrap_or_else(|| start_state(launch, item, &row_ctx(launch, item, head, row), regs));
                }
            }
            b.begun.fill(0);

            let block = block_of(tokens, head..head + 1, group);
            let mut pos = item.kv_start;
            while pos < item.kv_end {
                // Borders of spans are where they are for any other rows.
                let n = (item.kv_end - pos).min(b.span as u32 - pos % b.span as u32) as usize;
                let kv_pos = launch.kv_base.map_or(0, |b| b[item.request as usize]) + pos as i32;
                let visible = see(launch, &block, kv_pos, n);
                if visible != Visible::None {
                    if visible == Visible::Some && launch.program.has_interval() && !limited {
                        b.limit(launch, item, head, regs);
                        limited = true;
                    }
                    let finite = pack(v, launch, item, head, pos, n, &mut b, dq);
                    let blocks = rows / STRIP * n.div_ceil(STEP);
                    let coming = Coming::new(item, pos + n as u32, b.span, blocks);
                    let pipe = Pipe::new(v, tiles, launch, item, (head, kv_pos), finite, coming, &mut b);
                    pipe.run(per_head, visible, n, regs, states);
                }
                pos += n as u32;
            }
            for strip in 0..rows / STRIP {
                b.begin(strip, dv);
            }
            end_rows(v, tiles, launch, item, head, &mut b, &states[..per_head], partials, sink, regs);
        }
    }
}

/// Ends all rows of a head.
#[expect(clippy::too_many_arguments, reason = "one call site")]
#[inline(always)]
fn end_rows(
    v: Avx512,
    tiles: Tiles,
    launch: &Launch<'_>,
    item: &Item,
    head: u32,
    b: &mut Buffers<'_>,
    states: &[State],
    partials: &RowsOnce<'_, f32>,
    sink: &Sink<'_>,
    regs: &mut Registers,
) {
    let (group, dv) = (launch.group, launch.dim_vo);
    // Rows that nothing is asked about, of a token at once: one by one they took a fifth of a prompt of 512 tokens.
    let plain = match sink {
        Sink::Output { out: Out::Bf16(out), lse } if item.partial == Item::WHOLE && !launch.program.has_output() => {
            Some((out, lse))
        }
        _ => None,
    };
    for (token, states) in states.chunks_exact(group).enumerate() {
        ask_rows(launch, item, (head, token + ROWS_AHEAD.div_ceil(group)), sink);
        let Some((out, lse)) = plain else {
            for (g, &state) in states.iter().enumerate() {
                let row = token * group + g;
                for c in 0..dv / STEP {
                    let at = b.output(row, c, dv);
                    // Of a length that is known it is two instructions, else a call.
                    let from = b.sums[at].first_chunk::<STEP>().expect("a step");
                    *b.wide[c * STEP..].first_chunk_mut().expect("a step") = *from;
                }
                end_row(v, launch, item, (head, row), &mut b.wide[..dv], state, partials, sink, regs);
            }
            continue;
        };
        let first = first_row(launch, item, head, token);
        if let Some(lse) = lse {
            for (lse, &state) in lse.take_some(first, group).zip(states) {
                lse[0] = log_sum(launch, state);
            }
        }
        for (g, (out, &state)) in out.take_some(first, group).zip(states).enumerate() {
            let scale = v.splat(last_scale(launch, state));
            for (c, out) in out.chunks_exact_mut(STEP).enumerate() {
                let o = &b.sums[b.output(token * group + g, c, dv)];
                tiles.narrow(v.mul(v.load(o), scale), v.mul(v.load(&o[16..]), scale), out);
            }
        }
    }
}

/// Positions of the span that comes, whose keys and values are asked for while the one before is multiplied: they lie KiB apart.
pub(super) struct Coming {
    rest: Range<u32>,
    /// Per block.
    each: usize,
    /// Those from a multiple of a tile on, or the start.
    at: [[usize; 2]; TILE_KV],
    located: Range<u32>,
}

impl Coming {
    #[inline(always)]
    fn new(item: &Item, next: u32, span: usize, blocks: usize) -> Self {
        let rest = next..item.kv_end.min(next.saturating_add(span as u32));
        Self { each: rest.len().div_ceil(blocks), rest, at: [[0; 2]; TILE_KV], located: 0..0 }
    }

    /// Asks for a block's share.
    #[inline(always)]
    pub(super) fn ask(&mut self, launch: &Launch<'_>, item: &Item, head: u32) {
        for pos in self.rest.by_ref().take(self.each) {
            if !self.located.contains(&pos) {
                locate(launch.index, item.request as usize, pos, item.kv_end, &mut self.at);
                self.located = pos..pos.saturating_add(TILE_KV as u32);
            }
            let [page, slot] = self.at[(pos - self.located.start) as usize];
            for part in launch.k.iter().chain(&launch.v) {
                prefetch_far(part.bf16_row([page, slot, head as usize]).unwrap_or_default());
            }
        }
    }
}

/// Packs keys and values of `n` positions from `pos` on, zeros up to the next step; whether all values are finite.
#[expect(clippy::too_many_arguments, reason = "two call sites")]
#[inline(always)]
pub(super) fn pack(
    v: Avx512,
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
                    v.pack_rows(rows, c, &mut tiles_of[(column + c) * 16..]);
                }
            }
            if launch.v.is_none() && column < dv {
                for c in (0..part.dim().min(dv - column)).step_by(32) {
                    finite &= v.pack_columns(&rows, c, &mut values[(column + c) / 16 * apart..], apart);
                }
            }
            column += part.dim();
        }
        if let Some(part) = &launch.v {
            let rows = rows_of(v, part, head, at, b.wide, b.step);
            for c in (0..dv).step_by(32) {
                finite &= v.pack_columns(&rows, c, &mut values[c / 16 * apart..], apart);
            }
        }
    }
    finite
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
    for ((row, &[a, b]), copy) in rows.iter_mut().zip(at).zip(step.chunks_exact_mut(part.dim())) {
        *row = row_of(v, part, [a, b, head as usize], wide, copy);
    }
    rows
}

/// A row as bf16, where it lies or in `copy`.
#[inline(always)]
fn row_of<'a>(v: Avx512, of: &Operand<'a>, at: [usize; 3], wide: &mut [f32], copy: &'a mut [bf16]) -> &'a [bf16] {
    if let Some(row) = of.bf16_row(at) {
        return row;
    }
    of.copy_bf16(v, at, wide, &mut copy[..of.dim()]);
    &copy[..of.dim()]
}
