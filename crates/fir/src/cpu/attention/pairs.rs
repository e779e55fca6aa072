//! Attention of many query rows through sums of pairs of bf16 (AVX-512 BF16), where there are no tiles.
//!
//! What [`super::tiles`] does, on keys and values that are packed as it packs them, with twice the products of f32 in an
//! instruction: for every span of KV positions and head, strips of query rows take their scores, turn them into weights
//! rounded to bf16, and add the weighted values. A vector of sums is 16 positions, or 16 columns of the output.

use super::tiles::{Buffers, STRIP, TileItem, pack};
use super::{
    At, Item, Launch, Operand, Registers, State, ask_rows, block_of, ctx_of, end_row, locate, row_ctx, see,
    start_state, tokens_of, weigh,
};
use crate::cpu::arch::{Avx512, PairKernel};
use crate::cpu::rows::narrow;
use crate::cpu::vector::Vector;
use crate::plan::TILE_KV;
use crate::tensor::bf16;
use crate::variant::Visible;

/// Query rows and vectors of a block of sums: 16 of 32 registers, and as many products for 8 loads.
const BLOCK: usize = 4;
const LANES: usize = 16;

impl PairKernel for TileItem<'_, '_> {
    type Out = ();
    #[inline(always)]
    fn run(self, v: Avx512, pairs: Avx512<true>) {
        let Self { launch, item, buffer, partials, sink, regs, states } = self;
        let (group, dv) = (launch.group, launch.dim_vo);
        let dq: usize = launch.k.iter().map(Operand::dim).sum();
        let per_head = item.q_len as usize * group;
        let rows = per_head.next_multiple_of(STRIP);
        let mut b = Buffers::new(buffer, rows, launch.shape.span, dq, dv);
        let tokens = tokens_of(launch, item);
        for head in item.head_start..item.head_end {
            b.q[per_head * dq..].fill(bf16::ZERO);
            for (row, state) in states[..per_head].iter_mut().enumerate() {
                let (token, qo_head) = (item.q_start as usize + row / group, head as usize * group + row % group);
                let mut to = &mut b.q[row * dq..][..dq];
                for (part, _) in launch.q {
                    let to = to.split_off_mut(..part.dim()).expect("checked by `suits`");
                    part.copy_bf16(v, [0, token, qo_head], b.wide, to);
                }
                *state = start_state(launch, item, &ctx_of(launch, token, qo_head), regs);
            }
            let outputs = b.outputs();
            b.sums[outputs..].fill(0.0);

            let block = block_of(tokens, head..head + 1, group);
            let mut pos = item.kv_start;
            while pos < item.kv_end {
                let n = (item.kv_end - pos).min(b.span as u32 - pos % b.span as u32) as usize;
                let kv_pos = launch.kv_base.map_or(0, |b| b[item.request as usize]) + pos as i32;
                if see(launch, &block, kv_pos, n) != Visible::None {
                    let finite = pack(v, launch, item, head, pos, n, &mut b, dq);
                    let span = Span { launch, item, head, kv_pos, n, finite, dq, next: pos + n as u32 };
                    for first in (0..per_head).step_by(STRIP) {
                        span.strip(v, pairs, first, STRIP.min(per_head - first), &mut b, regs, states);
                    }
                }
                pos += n as u32;
            }
            for (row, &state) in states[..per_head].iter().enumerate() {
                if row.is_multiple_of(group) {
                    ask_rows(launch, item, (head, row / group + 1), sink);
                }
                let o = &mut b.sums[outputs + row * dv..][..dv];
                end_row(v, launch, item, (head, row), o, state, partials, sink, regs);
            }
        }
    }
}

/// Packed positions of an item's head.
struct Span<'a, 'b> {
    launch: &'b Launch<'a>,
    item: &'b Item,
    head: u32,
    kv_pos: i32,
    n: usize,
    /// Whether all its values are.
    finite: bool,
    dq: usize,
    /// Where the positions after it begin.
    next: u32,
}

impl Span<'_, '_> {
    /// Adds what `count` query rows from `first` on see of it to their outputs.
    #[expect(clippy::too_many_arguments, reason = "one call site")]
    #[inline(always)]
    fn strip(
        &self,
        v: Avx512,
        pairs: Avx512<true>,
        first: usize,
        count: usize,
        b: &mut Buffers<'_>,
        regs: &mut Registers,
        states: &mut [State],
    ) {
        let Self { launch, item, head, kv_pos, n, dq, .. } = *self;
        let (group, dv, width) = (launch.group, launch.dim_vo, b.span);
        let tokens = first / group..(first + count).div_ceil(group);
        let tokens = &launch.tokens[item.q_start as usize..][tokens];
        let block = block_of(tokens, head..head + 1, group);

        // Scores of the tiles that some rows see, from the first to the last of them.
        let at = b.outputs();
        let (scores, outputs) = b.sums.split_at_mut(at);
        let (q, k) = (bytemuck::cast_slice::<bf16, f32>(b.q), bytemuck::cast_slice::<bf16, f32>(b.k));
        let (mut seen, mut masked) = (n..0, false);
        for j in (0..n).step_by(TILE_KV) {
            let tile = see(launch, &block, kv_pos + j as i32, TILE_KV.min(n - j));
            if tile == Visible::None {
                continue;
            }
            masked |= tile == Visible::Some;
            // What lies between two tiles that are seen is hidden by the mask.
            masked |= seen.end > 0 && seen.end < j;
            seen = seen.start.min(j)..n.min(j + TILE_KV);
        }
        if seen.is_empty() {
            return;
        }
        let mut at = [[0usize; 2]; TILE_KV];
        for j in seen.clone().step_by(TILE_KV) {
            let columns: [_; BLOCK] = std::array::from_fn(|c| &k[(j + c * LANES) * dq / 2..][..LANES * dq / 2]);
            // The first strip asks for what comes after the span, a part of it with each of its blocks.
            let from = self.next.saturating_add(j as u32);
            let ahead = if first == 0 { item.kv_end.saturating_sub(from).min(TILE_KV as u32) as usize } else { 0 };
            if ahead > 0 {
                locate(launch.index, item.request as usize, from, item.kv_end, &mut at);
            }
            let each = TILE_KV.div_ceil(count.div_ceil(BLOCK));
            for r in (0..count).step_by(BLOCK) {
                for &[page, slot] in at[..ahead].iter().skip(r / BLOCK * each).take(each) {
                    for part in launch.k.iter().chain(&launch.v) {
                        let row = part.bf16_row([page, slot, head as usize]).unwrap_or_default();
                        for at in (0..row.len()).step_by(32) {
                            v.prefetch_far(row, at);
                        }
                    }
                }
                let rows: [_; BLOCK] = std::array::from_fn(|i| &q[(first + r + i) * dq / 2..][..dq / 2]);
                let sums = add(pairs, rows, columns, [[pairs.splat(0.0); BLOCK]; BLOCK]);
                for (i, sums) in sums.iter().enumerate() {
                    for (c, sum) in sums.iter().enumerate() {
                        v.store(*sum, &mut scores[(r + i) * width + j + c * LANES..]);
                    }
                }
            }
        }

        // Weights, zero up to the next whole pair of vectors.
        let len = seen.len();
        for r in 0..count {
            let s = &mut scores[r * width + seen.start..(r + 1) * width];
            let o = &mut outputs[(first + r) * dv..][..dv];
            let at = At { kv_pos: kv_pos + seen.start as i32, n: len, masked };
            weigh(v, launch, &row_ctx(launch, item, head, first + r), at, s, &mut states[first + r], o, regs);
            let p = &mut b.p[r * width + seen.start..(r + 1) * width];
            narrow(v, &s[..len], &mut p[..len]);
            p[len..len.next_multiple_of(2 * LANES)].fill(bf16::ZERO);
        }
        if !self.finite {
            return self.visible(seen, first, count, b.p, b.v, width, outputs);
        }
        let p = bytemuck::cast_slice::<bf16, f32>(b.p);
        let values = bytemuck::cast_slice::<bf16, f32>(b.v);
        let depth = len.next_multiple_of(2 * LANES) / 2;
        for c in (0..dv / LANES).step_by(BLOCK) {
            let column = |i: usize| &values[((c + i) * width + seen.start) * LANES / 2..][..depth * LANES];
            for r in (0..count).step_by(BLOCK) {
                let rows: [_; BLOCK] = std::array::from_fn(|i| &p[((r + i) * width + seen.start) / 2..][..depth]);
                let o = &mut outputs[(first + r) * dv + c * LANES..];
                if c + BLOCK <= dv / LANES {
                    add_to::<BLOCK>(v, pairs, rows, std::array::from_fn(column), o, dv);
                } else {
                    add_to::<2>(v, pairs, rows, std::array::from_fn(column), o, dv);
                }
            }
        }
    }

    /// The weighted values where some are not finite: what is hidden stays out, as `0 · inf` would be no number.
    #[expect(clippy::too_many_arguments, reason = "one call site")]
    #[cold]
    fn visible(
        &self,
        seen: std::ops::Range<usize>,
        first: usize,
        count: usize,
        weights: &[bf16],
        values: &[bf16],
        width: usize,
        outputs: &mut [f32],
    ) {
        let dv = self.launch.dim_vo;
        for r in 0..count {
            for j in seen.clone() {
                let p = weights[r * width + j].to_f32();
                if p == 0.0 {
                    continue;
                }
                for (c, o) in outputs[(first + r) * dv..][..dv].iter_mut().enumerate() {
                    let at = (c / LANES * width + j / 2 * 2) * LANES + c % LANES * 2 + j % 2;
                    *o += p * values[at].to_f32();
                }
            }
        }
    }
}

/// The sums of products of rows of pairs with columns of as many, 16 side by side, and what they were before.
#[inline(always)]
fn add<const C: usize>(
    pairs: Avx512<true>,
    rows: [&[f32]; BLOCK],
    columns: [&[f32]; C],
    mut sums: [[<Avx512<true> as Vector>::F; C]; BLOCK],
) -> [[<Avx512<true> as Vector>::F; C]; BLOCK] {
    let n = rows[0].len();
    let columns = columns.map(|x| x.as_chunks::<LANES>().0);
    assert!(rows.iter().all(|x| x.len() == n) && columns.iter().all(|x| x.len() == n));
    for i in 0..n {
        // Loops and no closures, which would be compiled for another CPU.
        let mut x = [pairs.splat(0.0); C];
        for (x, column) in x.iter_mut().zip(columns) {
            *x = pairs.load(&column[i]);
        }
        for (sums, row) in sums.iter_mut().zip(rows) {
            let y = pairs.splat(row[i]);
            for (sum, x) in sums.iter_mut().zip(x) {
                *sum = pairs.fma(y, x, *sum);
            }
        }
    }
    sums
}

/// [`add`] to rows of `o`, `dv` apart.
#[inline(always)]
fn add_to<const C: usize>(
    v: Avx512,
    pairs: Avx512<true>,
    rows: [&[f32]; BLOCK],
    columns: [&[f32]; C],
    o: &mut [f32],
    dv: usize,
) {
    let mut sums = [[v.splat(0.0); C]; BLOCK];
    for (i, sums) in sums.iter_mut().enumerate() {
        for (c, sum) in sums.iter_mut().enumerate() {
            *sum = v.load(&o[i * dv + c * LANES..]);
        }
    }
    for (i, sums) in add(pairs, rows, columns, sums).iter().enumerate() {
        for (c, sum) in sums.iter().enumerate() {
            v.store(*sum, &mut o[i * dv + c * LANES..]);
        }
    }
}
