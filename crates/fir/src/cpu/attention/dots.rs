//! Attention of few query rows to a head through sums of pairs of bf16 (AVX-512 BF16), with keys and values where they lie.
//!
//! What [`super::stream`] does where there are tiles. Scores are the products of [`super::direct`] on rows of pairs; of two
//! rows of values the columns are put side by side, so that a pair of weights meets them. Against f32 that leaves out what
//! widens rows, and half of the products: decodes of a Zen 4 became 1.06 to 1.5 times as fast (docs/bench/cpu.md), the
//! more the less they wait for memory.
//!
//! A row's sums have one order whatever rows are beside it, so in a cascade it has the bits that it has alone.

use super::direct::{Load, Rows, STREAMS, Scores, Stretch};
use super::tiles::TileItem;
use super::{
    At, Launch, MAX_ROWS, Operand, block_of, ctx_of, end_row, locate, row_ctx, see, start_state, tokens_of, weigh,
};
use crate::cpu::arch::{Avx512, PairKernel};
use crate::cpu::vector::{Kernel as _, Vector};
use crate::plan::TILE_KV;
use crate::tensor::bf16;
use crate::variant::Visible;

const LANES: usize = 16;
/// Columns that are put side by side at a time.
const WIDE: usize = 2 * LANES;
/// Pairs of a row's weights.
const PAIRS: usize = TILE_KV / 2;

/// Two numbers side by side; for `NEAR` see [`DotsItem`].
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(transparent)]
pub(super) struct Pair<const NEAR: bool>([bf16; 2]);

impl<const NEAR: bool> Load for Pair<NEAR> {
    const NEAR: bool = NEAR;
    #[inline(always)]
    fn load<V: Vector>(v: V, x: &[Self]) -> V::F {
        v.load(&bytemuck::cast::<[Self; LANES], [f32; LANES]>(*x.first_chunk().expect("16 pairs")))
    }
}

/// Whether keys and values can be read where they lie; the rest is as for [`super::tiles::suits`].
pub(super) fn suits(launch: &Launch<'_>) -> bool {
    let ([keys], Some(values)) = (launch.k, &launch.v) else { return false };
    let lies = |part: &Operand<'_>| {
        part.bf16_data().is_some() && part.dim().is_multiple_of(WIDE) && part.strides().iter().all(|s| s % 2 == 0)
    };
    lies(keys) && lies(values) && launch.dim_vo == values.dim()
}

/// An item. Its result is what was not written, heads and tokens of the item: a number in them is not finite, and they have to be
/// computed another way.
///
/// What is asked for into the second-level cache does not come in time on a Zen 5: there it comes `NEAR`, into the first, of 48 KB. That of
/// a Zen 4, of 32 KB, loses it: decodes of 8 x 4096 and of 8 x 16384 tokens took 1.3 and 1.45 times as long.
pub(super) struct DotsItem<'a, 'b, const NEAR: bool>(pub TileItem<'a, 'b>);

impl<const NEAR: bool> PairKernel for DotsItem<'_, '_, NEAR> {
    type Out = Vec<[u32; 2]>;
    #[inline(always)]
    fn run(self, v: Avx512, pairs: Avx512<true>) -> Self::Out {
        let TileItem { launch, item, buffer, partials, sink, regs, states } = self.0;
        let ([keys], Some(values)) = (launch.k, &launch.v) else { unreachable!("checked by `suits`") };
        let (group, tokens, dq, dv) = (launch.group, item.q_len as usize, keys.dim(), launch.dim_vo);
        let per_head = tokens * group;
        let heads_per_pass = (MAX_ROWS / per_head).max(1) as u32;
        let rows = MAX_ROWS.max(launch.shape.rows);
        let skipped = buffer.as_ptr().align_offset(64).min(super::LINE);
        let (q, rest) = buffer[skipped..].split_at_mut(rows * dq / 2);
        let (o, rest) = rest.split_at_mut(rows * dv);
        let (s, wide) = rest.split_at_mut(rows * TILE_KV);
        let (mut at, mut ahead) = ([[0usize; 2]; TILE_KV], [[0usize; 2]; TILE_KV]);
        let block = block_of(tokens_of(launch, item), item.head_start..item.head_end, group);
        let mut bad = Vec::new();

        let mut head_start = item.head_start;
        while head_start < item.head_end {
            let heads = head_start..item.head_end.min(head_start + heads_per_pass);
            let pass_rows = heads.len() * per_head;
            head_start = heads.end;
            for at in 0..pass_rows {
                let (head, row) = (heads.start as usize + at / per_head, at % per_head);
                let (token, qo_head) = (item.q_start as usize + row / group, head * group + row % group);
                let mut to = bytemuck::cast_slice_mut::<f32, bf16>(&mut q[at * dq / 2..][..dq / 2]);
                for (part, _) in launch.q {
                    let to = to.split_off_mut(..part.dim()).expect("checked by `suits`");
                    part.copy_bf16(v, [0, token, qo_head], wide, to);
                }
                states[at] = start_state(launch, item, &ctx_of(launch, token, qo_head), regs);
            }
            let (q, o, s) = (&q[..pass_rows * dq / 2], &mut o[..pass_rows * dv], &mut s[..pass_rows * TILE_KV]);
            o.fill(0.0);

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
                if visible != Visible::None {
                    let (here, next) = (&at[..n], &ahead[..n_ahead]);
                    let tile = Stretch { at: here, ahead: next, heads: (heads.start as usize, heads.len()), per_head };
                    let (k, x) = (paired::<NEAR>(keys, tile), paired::<NEAR>(values, tile));
                    Scores { q, k, s }.run(pairs);
                    let tile = At { kv_pos, n, masked: visible == Visible::Some };
                    for (row, s) in s.as_chunks_mut::<TILE_KV>().0.iter_mut().enumerate() {
                        let ctx = row_ctx(launch, item, heads.start + (row / per_head) as u32, row % per_head);
                        weigh(v, launch, &ctx, tile, s, &mut states[row], &mut o[row * dv..][..dv], regs);
                        s[n..].fill(0.0);
                        // In place: a row's weights take the first half of it.
                        for at in 0..PAIRS / LANES {
                            let two = pairs.rounded(v.load(&s[2 * at * LANES..]), v.load(&s[(2 * at + 1) * LANES..]));
                            v.store(two, &mut s[at * LANES..]);
                        }
                    }
                    accumulate(v, pairs, s, &x, o);
                }
                std::mem::swap(&mut at, &mut ahead);
                pos = next;
            }

            for (i, head) in heads.enumerate() {
                for token in 0..tokens {
                    let rows = i * per_head + token * group..i * per_head + (token + 1) * group;
                    let finite = states[rows.clone()].iter().all(|state| state.d.is_finite());
                    if !finite || !super::tile::all_finite(v, &o[rows.start * dv..rows.end * dv]) {
                        bad.push([head, token as u32]);
                        continue;
                    }
                    for row in rows {
                        let from = o[row * dv..][..dv].as_chunks::<WIDE>().0;
                        for (to, from) in wide[..dv].as_chunks_mut::<WIDE>().0.iter_mut().zip(from) {
                            // Fours of the first half and of the second in turn, as `interleave` leaves them.
                            for (i, to) in to.as_chunks_mut::<4>().0.iter_mut().enumerate() {
                                *to = from.as_chunks::<4>().0[i / 2 + i % 2 * 4];
                            }
                        }
                        let row_of_head = (head, row - i * per_head);
                        end_row(v, launch, item, row_of_head, &mut wide[..dv], states[row], partials, sink, regs);
                    }
                }
            }
        }
        bad
    }
}

/// Rows of keys or values as pairs.
#[inline(always)]
fn paired<'a, const NEAR: bool>(part: &Operand<'a>, tile: Stretch<'_>) -> Rows<'a, Pair<NEAR>> {
    let data = part.bf16_data().unwrap_or_default();
    Rows::of(part, bytemuck::cast_slice(&data[..data.len() / 2 * 2]), 2, tile)
}

/// Adds a tile's weighted values: rows of `p` have [`TILE_KV`] floats, the first half of them pairs of weights.
#[inline(always)]
fn accumulate<const N: bool>(v: Avx512, pairs: Avx512<true>, p: &[f32], x: &Rows<'_, Pair<N>>, o: &mut [f32]) {
    let block = STREAMS * x.spacing;
    let (outer, inner) = if x.by_token { (1, x.heads) } else { (x.heads, 1) };
    for out in 0..outer {
        let mut b = 0;
        while b < x.len {
            for h in 0..inner {
                let (tokens, head) = (b..x.len.min(b + block), out + h);
                let per_head = p.len() / TILE_KV / x.heads;
                let (mut r, end) = (head * per_head, (head + 1) * per_head);
                let mut first = true;
                while r < end {
                    let (p, o) = (&p[r * TILE_KV..], &mut o[r * 2 * x.dim..]);
                    let tokens = tokens.clone();
                    match end - r {
                        1 => add_rows::<N, 1, 4>(v, pairs, p, x, o, tokens, head, first),
                        2 => add_rows::<N, 2, 2>(v, pairs, p, x, o, tokens, head, first),
                        3 => add_rows::<N, 3, 2>(v, pairs, p, x, o, tokens, head, first),
                        _ => add_rows::<N, 4, 2>(v, pairs, p, x, o, tokens, head, first),
                    }
                    (r, first) = (r + 4, false);
                }
            }
            b += block;
        }
    }
}

/// `R` rows of a head, `C` times 32 columns at a time.
#[expect(clippy::too_many_arguments, reason = "four call sites; a struct would be built per block")]
#[inline(always)]
fn add_rows<const N: bool, const R: usize, const C: usize>(
    v: Avx512,
    pairs: Avx512<true>,
    p: &[f32],
    x: &Rows<'_, Pair<N>>,
    o: &mut [f32],
    tokens: std::ops::Range<usize>,
    head: usize,
    mut first: bool,
) {
    let mut c = 0;
    while c + C * LANES <= x.dim {
        add_block::<N, R, C>(v, pairs, p, x, o, tokens.clone(), head, c, first);
        (c, first) = (c + C * LANES, false);
    }
    while c < x.dim {
        add_block::<N, R, 1>(v, pairs, p, x, o, tokens.clone(), head, c, first);
        (c, first) = (c + LANES, false);
    }
}

#[expect(clippy::too_many_arguments, reason = "two call sites; a struct would be built per block")]
#[inline(always)]
fn add_block<const N: bool, const R: usize, const C: usize>(
    v: Avx512,
    pairs: Avx512<true>,
    p: &[f32],
    x: &Rows<'_, Pair<N>>,
    o: &mut [f32],
    tokens: std::ops::Range<usize>,
    head: usize,
    c: usize,
    first: bool,
) {
    let dv = 2 * x.dim;
    let mut acc = [[[v.splat(0.0); 2]; C]; R];
    for (r, acc) in acc.iter_mut().enumerate() {
        let o = o[r * dv + 2 * c..][..C * WIDE].as_chunks::<LANES>().0;
        for (i, acc) in acc.iter_mut().enumerate() {
            *acc = [v.load(&o[2 * i]), v.load(&o[2 * i + 1])];
        }
    }
    let p = p[..R * TILE_KV].as_chunks::<TILE_KV>().0;
    let zeros = [[Pair([bf16::ZERO; 2]); LANES]; C];
    for four in tokens.clone().step_by(STREAMS) {
        if first {
            x.prefetch_share(v, tokens.start, (four - tokens.start) / STREAMS, head);
        }
        for j in (four..tokens.end.min(four + STREAMS)).step_by(2) {
            let row = |j: usize| x.row(j, head).as_chunks().0[c / LANES..].first_chunk::<C>().expect("columns");
            let (even, odd) = (row(j), if j + 1 < tokens.end { row(j + 1) } else { &zeros });
            let mut side = [[v.splat(0.0); 2]; C];
            for (side, (even, odd)) in side.iter_mut().zip(even.iter().zip(odd)) {
                *side = pairs.interleave(Pair::load(v, even), Pair::load(v, odd));
            }
            for (acc, p) in acc.iter_mut().zip(p) {
                let weights = v.splat(p[j / 2 % TILE_KV]);
                for (acc, side) in acc.iter_mut().zip(side) {
                    acc[0] = pairs.fma(weights, side[0], acc[0]);
                    acc[1] = pairs.fma(weights, side[1], acc[1]);
                }
            }
        }
    }
    for (r, acc) in acc.iter().enumerate() {
        let o = o[r * dv + 2 * c..][..C * WIDE].as_chunks_mut::<LANES>().0;
        for (i, acc) in acc.iter().enumerate() {
            v.store(acc[0], &mut o[2 * i]);
            v.store(acc[1], &mut o[2 * i + 1]);
        }
    }
}
