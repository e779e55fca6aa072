//! The two products of a widened tile, for many query rows to a head or a transform on the way. With few, the products
//! of [`super::direct`] read the cache itself.
//!
//! A row's result is the same bits either way, and whatever rows are computed beside it: block shapes change which sums
//! share a register, never the order within a sum.

use super::operand::Ahead;
use crate::cpu::vector::{Kernel, Vector};
use crate::plan::TILE_KV;

/// `len` rows of `dim` floats, a multiple of the lanes, `stride` apart.
#[derive(Clone, Copy)]
pub(super) struct TileRows<'a> {
    pub data: &'a [f32],
    pub stride: usize,
    pub len: usize,
}

/// Query rows of one head against the keys of one KV tile: `s[r, j] = q[r] · k[j]`. Rows of `q` have `dim` floats,
/// those of `s` [`TILE_KV`].
pub(super) struct Scores<'a> {
    pub q: &'a [f32],
    pub k: TileRows<'a>,
    pub dim: usize,
    pub s: &'a mut [f32],
    pub ahead: Ahead<'a>,
}

impl Kernel for Scores<'_> {
    type Out = ();
    #[inline(always)]
    fn run<V: Vector>(self, v: V) {
        let Self { q, k, dim, s, ahead } = self;
        let rows = s.len() / TILE_KV;
        let mut r = 0;
        // 16 accumulators fill half of AVX-512's 32 registers; AVX2 has 16, so half as many there.
        if V::LANES == 16 {
            while r + 4 <= rows {
                ahead.share(v, r..r + 4, rows);
                scores_of_four(v, &q[r * dim..], k, dim, &mut s[r * TILE_KV..]);
                r += 4;
            }
        }
        if V::LANES == 8 {
            while r + 4 <= rows {
                ahead.share(v, r..r + 4, rows);
                scores_of_two_keys(v, &q[r * dim..], k, dim, &mut s[r * TILE_KV..]);
                r += 4;
            }
        }
        while r + 2 <= rows {
            ahead.share(v, r..r + 2, rows);
            scores_block::<V, 2, 4>(v, &q[r * dim..], k, dim, &mut s[r * TILE_KV..]);
            r += 2;
        }
        if r < rows {
            ahead.share(v, r..rows, rows);
            scores_block::<V, 1, 8>(v, &q[r * dim..], k, dim, &mut s[r * TILE_KV..]);
        }
    }
}

/// Four query rows, four keys at a time. Zipped, so that the loop, 16 multiply-adds, has a single check: with one for every
/// slice the products took twice as long.
#[inline(always)]
fn scores_of_four<V: Vector>(v: V, q: &[f32], k: TileRows<'_>, dim: usize, s: &mut [f32]) {
    let mut j = 0;
    while j < k.len {
        // Past the last row it is the last again; nobody reads its scores.
        let mut x = [&k.data[..0]; 4];
        for (jj, x) in x.iter_mut().enumerate() {
            *x = &k.data[(j + jj).min(k.len - 1) * k.stride..][..dim];
        }
        let mut y = [&q[..0]; 4];
        for (r, y) in y.iter_mut().enumerate() {
            *y = &q[r * dim..][..dim];
        }
        let x = x[0]
            .chunks_exact(V::LANES)
            .zip(x[1].chunks_exact(V::LANES))
            .zip(x[2].chunks_exact(V::LANES))
            .zip(x[3].chunks_exact(V::LANES));
        let y = y[0]
            .chunks_exact(V::LANES)
            .zip(y[1].chunks_exact(V::LANES))
            .zip(y[2].chunks_exact(V::LANES))
            .zip(y[3].chunks_exact(V::LANES));
        let mut acc = [[v.splat(0.0); 4]; 4];
        for ((((x0, x1), x2), x3), (((y0, y1), y2), y3)) in x.zip(y) {
            let x = [v.load(x0), v.load(x1), v.load(x2), v.load(x3)];
            let y = [v.load(y0), v.load(y1), v.load(y2), v.load(y3)];
            for (acc, y) in acc.iter_mut().zip(y) {
                for (acc, x) in acc.iter_mut().zip(x) {
                    *acc = v.fma(y, x, *acc);
                }
            }
        }
        for (sums, s) in v.sums16(acc).iter().zip(s.chunks_exact_mut(TILE_KV)) {
            s[j..j + 4].copy_from_slice(sums);
        }
        j += 4;
    }
}

/// Four query rows, two keys at a time, for 16 registers of eight lanes. Rows are slices of as many arrays, so that the loop
/// has no checks: with iterators over chunks a fifth of a prompt's time went into beginning them.
#[inline(always)]
fn scores_of_two_keys<V: Vector>(v: V, q: &[f32], k: TileRows<'_>, dim: usize, s: &mut [f32]) {
    let steps = dim / 8;
    let mut y = [&[[0f32; 8]; 0][..]; 4];
    for (r, y) in y.iter_mut().enumerate() {
        *y = &q[r * dim..][..dim].as_chunks().0[..steps];
    }
    let (s, _) = s.as_chunks_mut::<TILE_KV>();
    let s = &mut s[..4];
    for j in (0..k.len.min(TILE_KV)).step_by(2) {
        // Past the last row it is the last again; nobody reads its scores.
        let x0 = &k.data[j * k.stride..][..dim].as_chunks::<8>().0[..steps];
        let x1 = &k.data[(j + 1).min(k.len - 1) * k.stride..][..dim].as_chunks::<8>().0[..steps];
        let mut acc = [v.splat(0.0); 8];
        for c in 0..steps {
            let (x0, x1) = (v.load(&x0[c]), v.load(&x1[c]));
            for (r, y) in y.into_iter().enumerate() {
                let y = v.load(&y[c]);
                acc[2 * r] = v.fma(y, x0, acc[2 * r]);
                acc[2 * r + 1] = v.fma(y, x1, acc[2 * r + 1]);
            }
        }
        for (sums, s) in v.sums8(acc).as_chunks::<2>().0.iter().zip(&mut *s) {
            s[j..j + 2].copy_from_slice(sums);
        }
    }
}

#[inline(always)]
fn scores_block<V: Vector, const R: usize, const J: usize>(
    v: V,
    q: &[f32],
    k: TileRows<'_>,
    dim: usize,
    s: &mut [f32],
) {
    let q = &q[..R * dim];
    let n = k.len;
    let mut j = 0;
    while j < n {
        // Past the last row it is the last again; nobody reads its scores.
        let mut rows = [&k.data[..0]; J];
        for (jj, row) in rows.iter_mut().enumerate() {
            *row = &k.data[(j + jj).min(n - 1) * k.stride..][..dim];
        }
        let mut acc = [[v.splat(0.0); J]; R];
        let mut c = 0;
        while c < dim {
            let mut kv = [v.splat(0.0); J];
            for (kv, row) in kv.iter_mut().zip(rows) {
                *kv = v.load(&row[c..]);
            }
            for (r, acc) in acc.iter_mut().enumerate() {
                let qv = v.load(&q[r * dim + c..]);
                for (acc, kv) in acc.iter_mut().zip(kv) {
                    *acc = v.fma(qv, kv, *acc);
                }
            }
            c += V::LANES;
        }
        for (r, acc) in acc.iter().enumerate() {
            let (fours, _) = acc.as_chunks::<4>();
            for (i, four) in fours.iter().enumerate() {
                let at = r * TILE_KV + j + 4 * i;
                s[at..at + 4].copy_from_slice(&v.sums4(*four));
            }
        }
        j += J;
    }
}

/// `o[r] += Σ_j p[r, j] · x[j]`, in ascending order of `j`; `p` has [`TILE_KV`] columns, `o` has `dim` floats per row.
pub(super) struct Accumulate<'a> {
    pub p: &'a [f32],
    pub x: TileRows<'a>,
    pub o: &'a mut [f32],
    pub dim: usize,
    pub ahead: Ahead<'a>,
}

impl Kernel for Accumulate<'_> {
    type Out = ();
    #[inline(always)]
    fn run<V: Vector>(self, v: V) {
        let Self { p, x, o, dim, ahead } = self;
        let rows = p.len() / TILE_KV;
        let mut r = 0;
        if V::LANES == 16 {
            while r + 4 <= rows {
                ahead.share(v, r..r + 4, rows);
                let (p, o) = (&p[r * TILE_KV..], &mut o[r * dim..]);
                let mut c = 0;
                while c + 4 * V::LANES <= dim {
                    accumulate_four(v, p, x, o, dim, c);
                    c += 4 * V::LANES;
                }
                while c < dim {
                    accumulate_block::<V, 4, 1>(v, p, x, o, dim, c);
                    c += V::LANES;
                }
                r += 4;
            }
        }
        if V::LANES == 8 {
            while r + 6 <= rows {
                ahead.share(v, r..r + 6, rows);
                accumulate_rows::<V, 6, 2>(v, &p[r * TILE_KV..], x, &mut o[r * dim..], dim);
                r += 6;
            }
        }
        while r + 2 <= rows {
            ahead.share(v, r..r + 2, rows);
            accumulate_rows::<V, 2, 4>(v, &p[r * TILE_KV..], x, &mut o[r * dim..], dim);
            r += 2;
        }
        if r < rows {
            ahead.share(v, r..rows, rows);
            accumulate_rows::<V, 1, 8>(v, &p[r * TILE_KV..], x, &mut o[r * dim..], dim);
        }
    }
}

#[inline(always)]
fn accumulate_rows<V: Vector, const R: usize, const C: usize>(
    v: V,
    p: &[f32],
    x: TileRows<'_>,
    o: &mut [f32],
    dim: usize,
) {
    let mut c = 0;
    while c + C * V::LANES <= dim {
        accumulate_block::<V, R, C>(v, p, x, o, dim, c);
        c += C * V::LANES;
    }
    while c < dim {
        accumulate_block::<V, R, 1>(v, p, x, o, dim, c);
        c += V::LANES;
    }
}

/// Four rows, four vectors of columns from `c` on; zipped for the reason that [`scores_of_four`] is.
#[inline(always)]
fn accumulate_four<V: Vector>(v: V, p: &[f32], x: TileRows<'_>, o: &mut [f32], dim: usize, c: usize) {
    let mut acc = [[v.splat(0.0); 4]; 4];
    for (acc, o) in acc.iter_mut().zip(o.chunks_exact(dim)) {
        for (acc, o) in acc.iter_mut().zip(o[c..].chunks_exact(V::LANES)) {
            *acc = v.load(o);
        }
    }
    let rows = x.data.chunks_exact(x.stride).take(x.len);
    let [p0, p1, p2, p3] = [0, 1, 2, 3].map(|r| &p[r * TILE_KV..][..TILE_KV]);
    for ((row, (p0, p1)), (p2, p3)) in rows.zip(p0.iter().zip(p1)).zip(p2.iter().zip(p3)) {
        let row = &row[c..c + 4 * V::LANES];
        let mut x = [v.splat(0.0); 4];
        for (x, row) in x.iter_mut().zip(row.chunks_exact(V::LANES)) {
            *x = v.load(row);
        }
        for (acc, p) in acc.iter_mut().zip([p0, p1, p2, p3]) {
            let p = v.splat(*p);
            for (acc, x) in acc.iter_mut().zip(x) {
                *acc = v.fma(p, x, *acc);
            }
        }
    }
    for (acc, o) in acc.iter().zip(o.chunks_exact_mut(dim)) {
        for (acc, o) in acc.iter().zip(o[c..].chunks_exact_mut(V::LANES)) {
            v.store(*acc, o);
        }
    }
}

#[inline(always)]
fn accumulate_block<V: Vector, const R: usize, const C: usize>(
    v: V,
    p: &[f32],
    x: TileRows<'_>,
    o: &mut [f32],
    dim: usize,
    c: usize,
) {
    let mut acc = [[v.splat(0.0); C]; R];
    for (r, acc) in acc.iter_mut().enumerate() {
        for (i, acc) in acc.iter_mut().enumerate() {
            *acc = v.load(&o[r * dim + c + i * V::LANES..]);
        }
    }
    // Arrays of a row's weights, and rows from an iterator, leave the loop a single check.
    let p = &p.as_chunks::<TILE_KV>().0[..R];
    for (j, row) in x.data.chunks_exact(x.stride).take(x.len.min(TILE_KV)).enumerate() {
        let row = &row[c..c + C * V::LANES];
        let mut xv = [v.splat(0.0); C];
        for (i, xv) in xv.iter_mut().enumerate() {
            *xv = v.load(&row[i * V::LANES..]);
        }
        for (p, acc) in p.iter().zip(&mut acc) {
            let pv = v.splat(p[j]);
            for (acc, xv) in acc.iter_mut().zip(xv) {
                *acc = v.fma(pv, xv, *acc);
            }
        }
    }
    for (r, acc) in acc.iter().enumerate() {
        for (i, acc) in acc.iter().enumerate() {
            v.store(*acc, &mut o[r * dim + c + i * V::LANES..]);
        }
    }
}

/// As [`Accumulate`], leaving out positions of weight 0: for a tile with a value that is not finite at a masked
/// position, where `0 · inf` would put a NaN.
#[inline(always)]
pub(super) fn accumulate_visible(p: &[f32], x: TileRows<'_>, o: &mut [f32], dim: usize) {
    for (p, o) in p.chunks_exact(TILE_KV).zip(o.chunks_exact_mut(dim)) {
        for (&p, x) in p.iter().zip(x.data.chunks(x.stride)).take(x.len) {
            if p != 0.0 {
                for (o, x) in o.iter_mut().zip(&x[..dim]) {
                    *o += p * x;
                }
            }
        }
    }
}

/// Whether all of `x` is finite.
#[inline(always)]
pub(super) fn all_finite<V: Vector>(v: V, x: &[f32]) -> bool {
    let mut acc = [v.splat(0.0); 4];
    let step = 4 * V::LANES;
    let full = x.len() / step * step;
    let mut i = 0;
    while i < full {
        for (c, acc) in acc.iter_mut().enumerate() {
            *acc = v.fma(v.load(&x[i + c * V::LANES..]), v.splat(0.0), *acc);
        }
        i += step;
    }
    let sum = v.sum(v.add(v.add(acc[0], acc[1]), v.add(acc[2], acc[3])));
    sum == 0.0 && x[full..].iter().all(|x| x.is_finite())
}
