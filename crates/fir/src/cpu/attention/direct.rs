//! The two products of a tile with rows as they lie in the cache, for few query rows to a head: the memory is the bound.
//!
//! A core waits for memory by line: it can wait for 16 at a time, 9 GB/s of a Xeon of model 207, unless the
//! second-level cache has fetched a line before it is asked for. That prefetcher follows a page of 4 KiB upwards and
//! starts anew in the next; with four pages at a time its starts overlap, and two cores read 36 GB/s instead of 27.
//!
//! So the rows of a tile are taken in *blocks* of four pages, and within a block page by page in turn: four tokens in
//! four pages, head after head, then the next four tokens. Rows two blocks on (one, where they come near) are asked for in the same order. With the
//! heads outside and the tokens inside, 256 of every 2048 bytes at a time, the decode of docs/bench/cpu.md took 1.2
//! times as long. Above four query rows to a head the arithmetic is the bound, so heads are outside there: sums stay in
//! registers for a whole tile.
//!
//! Sums have the same order as those of [`super::tile`], so a row's result is the same bits.

use super::operand::Operand;
use crate::cpu::arch::prefetch_at;
use crate::cpu::vector::{Kernel, Lane, Vector};
use crate::plan::TILE_KV;

/// Tokens whose rows are read side by side.
pub(super) const STREAMS: usize = 4;

/// Which rows a pass over a tile reads.
#[derive(Clone, Copy)]
pub(super) struct Stretch<'a> {
    /// Outer and middle index of the tile's tokens, and of the next tile's.
    pub at: &'a [[usize; 2]],
    pub ahead: &'a [[usize; 2]],
    /// First head and number of heads.
    pub heads: (usize, usize),
    /// Query rows of each head.
    pub per_head: usize,
}

/// What the lanes of a vector are loaded from.
pub(super) trait Load: Copy {
    /// Whether rows are asked for into the first-level cache, not the second.
    const NEAR: bool = false;
    fn load<V: Vector>(v: V, x: &[Self]) -> V::F;
}

impl<T: Lane> Load for T {
    #[inline(always)]
    fn load<V: Vector>(v: V, x: &[Self]) -> V::F {
        Lane::load(v, x)
    }
}

/// Rows of a tile, with the order to take them in.
pub(super) struct Rows<'a, T> {
    data: &'a [T],
    /// Where the first head's row of each token starts: of this tile's, then of the next one's.
    at: [usize; 2 * TILE_KV],
    pub len: usize,
    pub heads: usize,
    head_stride: usize,
    pub dim: usize,
    /// Tokens that lie in a page, or all of a quarter of the tile, a power of two: a block is [`STREAMS`] times as many.
    pub spacing: usize,
    /// Whether heads are taken within tokens, as they lie, and not tokens within heads.
    pub by_token: bool,
}

impl<'a, T: Load> Rows<'a, T> {
    #[inline(always)]
    pub(super) fn new(operand: &Operand<'_>, data: &'a [T], tile: Stretch<'_>) -> Self {
        Self::of(operand, data, 1, tile)
    }

    /// Rows of a `T` for every `each` numbers of the operand.
    #[inline(always)]
    pub(super) fn of(operand: &Operand<'_>, data: &'a [T], each: usize, tile: Stretch<'_>) -> Self {
        let ([s, t, u], (first, heads)) = (operand.strides().map(|s| s / each), tile.heads);
        let most = TILE_KV / STREAMS;
        let by_token = u < t && tile.per_head <= 4;
        let spacing = if by_token { (4096 / (t * size_of::<T>()).max(1)).clamp(1, most) } else { most };
        let mut rows = Self {
            data,
            at: [0; 2 * TILE_KV],
            len: tile.at.len(),
            heads,
            head_stride: u,
            dim: operand.dim() / each,
            spacing: 1 << spacing.ilog2(),
            by_token,
        };
        let (here, next) = rows.at.split_at_mut(TILE_KV);
        for (out, &[a, b]) in here.iter_mut().zip(tile.at).chain(next.iter_mut().zip(tile.ahead)) {
            *out = a * s + b * t + first * u;
        }
        rows
    }

    #[inline(always)]
    pub(super) fn row(&self, token: usize, head: usize) -> &'a [T] {
        &self.data[self.at[token] + head * self.head_stride..][..self.dim]
    }

    /// Asks for the rows of a head that are two blocks on from the `i`-th tokens of the pages of `block`, one if they are to come near:
    /// two are more than half of that cache, and decodes of a Zen 5 took 1.03 to 1.15 times as long. Past the end it asks for what is
    /// there already.
    #[inline(always)]
    fn prefetch<V: Vector>(&self, v: V, block: usize, i: usize, head: usize) {
        let blocks = if T::NEAR { 1 } else { 2 };
        let token = block + (blocks * STREAMS * self.spacing).min(TILE_KV) + i;
        let mut at = [head * self.head_stride; STREAMS];
        for (stream, at) in at.iter_mut().enumerate() {
            *at += self.at[(token + stream * self.spacing) % (2 * TILE_KV)];
        }
        let mut c = 0;
        while c < self.dim {
            for at in at {
                if T::NEAR {
                    prefetch_at(self.data.as_ptr().wrapping_add(at + c), 1);
                } else {
                    v.prefetch_far(self.data, at + c);
                }
            }
            c += 64 / size_of::<T>();
        }
    }

    /// Asks for as many rows as the `i`-th four of a head's part of a block are, in the order they lie in.
    #[inline(always)]
    pub(super) fn prefetch_share<V: Vector>(&self, v: V, block: usize, i: usize, head: usize) {
        if self.by_token {
            let (i, heads) = ((head * self.spacing + i) as u32, self.heads as u32);
            self.prefetch(v, block, (i / heads) as usize, (i % heads) as usize);
        } else {
            self.prefetch(v, block, i, head);
        }
    }
}

/// `s[h, r, j] = q[h, r] · k[h, j]` for the heads `h` of a pass, the query rows `r` of each and the tile's tokens `j`:
/// rows of `q` have `dim` floats, those of `s` [`TILE_KV`].
pub(super) struct Scores<'a, T> {
    pub q: &'a [f32],
    pub k: Rows<'a, T>,
    pub s: &'a mut [f32],
}

impl<T: Load> Kernel for Scores<'_, T> {
    type Out = ();
    #[inline(always)]
    fn run<V: Vector>(self, v: V) {
        let Self { q, k, s } = self;
        let (heads, block) = (k.heads, STREAMS * k.spacing);
        let (outer, inner) = if k.by_token { (1, heads) } else { (heads, 1) };
        for o in 0..outer {
            let mut b = 0;
            while b < k.len {
                for i in 0..k.spacing.min(k.len - b) {
                    for h in 0..inner {
                        k.prefetch(v, b, i, o + h);
                        scores_of_head(v, q, &k, s, b + i, o + h);
                    }
                }
                b += block;
            }
        }
    }
}

/// The scores of one head with the tokens `token`, `token + spacing`, and so on, four of them.
#[inline(always)]
fn scores_of_head<V: Vector, T: Load>(v: V, q: &[f32], k: &Rows<'_, T>, s: &mut [f32], token: usize, head: usize) {
    let per_head = s.len() / TILE_KV / k.heads;
    let mut r = head * per_head;
    let end = r + per_head;
    // 16 accumulators fill half of AVX-512's 32 registers; AVX2 has 16, so half as many there: of two keys at a time, as to
    // widen keys, and values, for two rows and again for two more took up to a third longer on Zen 3.
    if V::LANES == 16 {
        while r + 4 <= end {
            scores_block::<V, T, 4, 16>(v, &q[r * k.dim..], k, &mut s[r * TILE_KV..], token, head);
            r += 4;
        }
        // Not as two and one, which would widen every row twice: groups of 3 and 7 are usual.
        if r + 3 == end {
            return scores_block::<V, T, 3, 16>(v, &q[r * k.dim..], k, &mut s[r * TILE_KV..], token, head);
        }
    }
    if V::LANES == 8 {
        while r + 3 <= end {
            let to = end.min(r + 4);
            scores_of_two_keys(v, &q[r * k.dim..], k, &mut s[r * TILE_KV..to * TILE_KV], token, head);
            r = to;
        }
    }
    while r < end {
        let (q, s) = (&q[r * k.dim..], &mut s[r * TILE_KV..]);
        match (V::LANES, end - r) {
            (16, 1) => scores_block::<V, T, 1, 16>(v, q, k, s, token, head),
            (16, _) => scores_block::<V, T, 2, 16>(v, q, k, s, token, head),
            (_, 1) => scores_block::<V, T, 1, 8>(v, q, k, s, token, head),
            (_, _) => scores_block::<V, T, 2, 8>(v, q, k, s, token, head),
        }
        r += 2;
    }
}

/// Three or four query rows, two keys at a time, for 16 registers of eight lanes; rows are arrays for the reason given in
/// [`super::tile`].
#[inline(always)]
fn scores_of_two_keys<V: Vector, T: Load>(v: V, q: &[f32], k: &Rows<'_, T>, s: &mut [f32], token: usize, head: usize) {
    let (dim, spacing, steps, rows) = (k.dim, k.spacing, k.dim / 8, 4.min(s.len() / TILE_KV));
    // Past the last row it is that one again; nobody reads its scores.
    let mut y = [&[[0f32; 8]; 0][..]; 4];
    for (r, y) in y.iter_mut().enumerate() {
        *y = &q[r.min(rows - 1) * dim..][..dim].as_chunks().0[..steps];
    }
    for pair in 0..STREAMS / 2 {
        let at = [token + 2 * pair * spacing, token + (2 * pair + 1) * spacing];
        let mut x = [k.data[..0].as_chunks::<8>().0; 2];
        for (x, at) in x.iter_mut().zip(at) {
            *x = &k.row(if at < k.len { at } else { token }, head).as_chunks().0[..steps];
        }
        let mut acc = [v.splat(0.0); 8];
        for c in 0..steps {
            let (x0, x1) = (T::load(v, &x[0][c]), T::load(v, &x[1][c]));
            for (r, y) in y.into_iter().enumerate() {
                let y = v.load(&y[c]);
                acc[2 * r] = v.fma(y, x0, acc[2 * r]);
                acc[2 * r + 1] = v.fma(y, x1, acc[2 * r + 1]);
            }
        }
        for (sums, s) in v.sums8(acc).as_chunks::<2>().0.iter().zip(s.chunks_exact_mut(TILE_KV)) {
            (s[at[0]], s[at[1]]) = (sums[0], sums[1]);
        }
    }
}

/// `R` query rows, four keys at a time, in vectors of `W` lanes. Rows are arrays: with slices the loop had 33 instructions of
/// checks to 24 others.
#[inline(always)]
fn scores_block<V: Vector, T: Load, const R: usize, const W: usize>(
    v: V,
    q: &[f32],
    k: &Rows<'_, T>,
    s: &mut [f32],
    token: usize,
    head: usize,
) {
    debug_assert_eq!(W, V::LANES);
    let (dim, steps, s) = (k.dim, k.dim / W, &mut s.as_chunks_mut::<TILE_KV>().0[..R]);
    let at: [usize; STREAMS] = [token, token + k.spacing, token + 2 * k.spacing, token + 3 * k.spacing];
    // Past the last row it is the first of them again; nobody reads its scores.
    let mut x = [k.data[..0].as_chunks::<W>().0; STREAMS];
    for (x, at) in x.iter_mut().zip(at) {
        *x = &k.row(if at < k.len { at } else { token }, head).as_chunks().0[..steps];
    }
    let mut y = [&[[0f32; W]; 0][..]; R];
    for (r, y) in y.iter_mut().enumerate() {
        *y = &q[r * dim..][..dim].as_chunks().0[..steps];
    }
    let mut acc = [[v.splat(0.0); STREAMS]; R];
    for c in 0..steps {
        let x = [T::load(v, &x[0][c]), T::load(v, &x[1][c]), T::load(v, &x[2][c]), T::load(v, &x[3][c])];
        for (acc, y) in acc.iter_mut().zip(y) {
            let y = v.load(&y[c]);
            for (acc, x) in acc.iter_mut().zip(x) {
                *acc = v.fma(y, x, *acc);
            }
        }
    }
    let mut sums = [[0.0; STREAMS]; 4];
    if R >= 3 {
        sums = v.sums16([acc[0], acc[1 % R], acc[2 % R], acc[3 % R]]);
    } else {
        for (sums, acc) in sums.iter_mut().zip(acc) {
            *sums = v.sums4(acc);
        }
    }
    for (sums, s) in sums.iter().zip(s) {
        for (sum, at) in sums.iter().zip(at) {
            s[at % TILE_KV] = *sum; // Below it: a block is no more than a tile.
        }
    }
}

/// `o[h, r] += Σ_j p[h, r, j] · x[h, j]`, in ascending order of `j`; shapes as for [`Scores`].
pub(super) struct Accumulate<'a, T> {
    pub p: &'a [f32],
    pub x: Rows<'a, T>,
    pub o: &'a mut [f32],
}

impl<T: Load> Kernel for Accumulate<'_, T> {
    type Out = ();
    #[inline(always)]
    fn run<V: Vector>(self, v: V) {
        let Self { p, x, o } = self;
        let (heads, block) = (x.heads, STREAMS * x.spacing);
        let (outer, inner) = if x.by_token { (1, heads) } else { (heads, 1) };
        for out in 0..outer {
            let mut b = 0;
            while b < x.len {
                for h in 0..inner {
                    accumulate_head(v, p, &x, o, b..x.len.min(b + block), out + h);
                }
                b += block;
            }
        }
    }
}

/// One head's part of a block; asks for as many rows on the way.
#[inline(always)]
fn accumulate_head<V: Vector, T: Load>(
    v: V,
    p: &[f32],
    x: &Rows<'_, T>,
    o: &mut [f32],
    tokens: std::ops::Range<usize>,
    head: usize,
) {
    let per_head = p.len() / TILE_KV / x.heads;
    let mut r = head * per_head;
    let end = r + per_head;
    let mut first = true;
    if V::LANES == 16 {
        while r + 4 <= end {
            let (p, o) = (&p[r * TILE_KV..], &mut o[r * x.dim..]);
            accumulate_rows::<V, T, 4, 4>(v, p, x, o, tokens.clone(), head, first);
            (r, first) = (r + 4, false);
        }
        if r + 3 == end {
            let (p, o) = (&p[r * TILE_KV..], &mut o[r * x.dim..]);
            return accumulate_rows::<V, T, 3, 4>(v, p, x, o, tokens, head, first);
        }
    }
    if V::LANES == 8 {
        while r + 4 <= end {
            let (p, o) = (&p[r * TILE_KV..], &mut o[r * x.dim..]);
            accumulate_rows::<V, T, 4, 2>(v, p, x, o, tokens.clone(), head, first);
            (r, first) = (r + 4, false);
        }
        if r + 3 == end {
            let (p, o) = (&p[r * TILE_KV..], &mut o[r * x.dim..]);
            return accumulate_rows::<V, T, 3, 2>(v, p, x, o, tokens, head, first);
        }
    }
    while r + 2 <= end {
        let (p, o) = (&p[r * TILE_KV..], &mut o[r * x.dim..]);
        accumulate_rows::<V, T, 2, 4>(v, p, x, o, tokens.clone(), head, first);
        (r, first) = (r + 2, false);
    }
    if r < end {
        let (p, o) = (&p[r * TILE_KV..], &mut o[r * x.dim..]);
        accumulate_rows::<V, T, 1, 8>(v, p, x, o, tokens, head, first);
    }
}

#[inline(always)]
fn accumulate_rows<V: Vector, T: Load, const R: usize, const C: usize>(
    v: V,
    p: &[f32],
    x: &Rows<'_, T>,
    o: &mut [f32],
    tokens: std::ops::Range<usize>,
    head: usize,
    mut first: bool,
) {
    let mut c = 0;
    while c + C * V::LANES <= x.dim {
        accumulate_block::<V, T, R, C>(v, p, x, o, tokens.clone(), head, c, first);
        (c, first) = (c + C * V::LANES, false);
    }
    // A sum in a register waits for itself: four side by side do not.
    while C > 4 && c + 4 * V::LANES <= x.dim {
        accumulate_block::<V, T, R, 4>(v, p, x, o, tokens.clone(), head, c, first);
        (c, first) = (c + 4 * V::LANES, false);
    }
    while c < x.dim {
        accumulate_block::<V, T, R, 1>(v, p, x, o, tokens.clone(), head, c, first);
        (c, first) = (c + V::LANES, false);
    }
}

#[expect(clippy::too_many_arguments, reason = "three call sites; a struct would be built per block")]
#[inline(always)]
fn accumulate_block<V: Vector, T: Load, const R: usize, const C: usize>(
    v: V,
    p: &[f32],
    x: &Rows<'_, T>,
    o: &mut [f32],
    tokens: std::ops::Range<usize>,
    head: usize,
    c: usize,
    first: bool,
) {
    let dim = x.dim;
    let mut acc = [[v.splat(0.0); C]; R];
    for (r, acc) in acc.iter_mut().enumerate() {
        for (i, acc) in acc.iter_mut().enumerate() {
            *acc = v.load(&o[r * dim + c + i * V::LANES..]);
        }
    }
    let p = &p.as_chunks::<TILE_KV>().0[..R];
    for four in tokens.clone().step_by(STREAMS) {
        if first {
            x.prefetch_share(v, tokens.start, (four - tokens.start) / STREAMS, head);
        }
        for j in four..tokens.end.min(four + STREAMS).min(TILE_KV) {
            let row = &x.row(j, head)[c..][..C * V::LANES];
            let mut xv = [v.splat(0.0); C];
            for (i, xv) in xv.iter_mut().enumerate() {
                *xv = T::load(v, &row[i * V::LANES..]);
            }
            for (p, acc) in p.iter().zip(&mut acc) {
                let pv = v.splat(p[j]);
                for (acc, xv) in acc.iter_mut().zip(xv) {
                    *acc = v.fma(pv, xv, *acc);
                }
            }
        }
    }
    for (r, acc) in acc.iter().enumerate() {
        for (i, acc) in acc.iter().enumerate() {
            v.store(*acc, &mut o[r * dim + c + i * V::LANES..]);
        }
    }
}
