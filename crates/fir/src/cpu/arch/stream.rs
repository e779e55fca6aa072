//! Tile products of few query rows with keys and values as they lie in memory: nothing of a cache is packed.
//!
//! Scores are taken the other way round, `k · qᵀ`: 16 keys are the rows of a left operand, where they need no packing, and
//! the few queries, packed once, the columns of the right one.
//!
//! Of the weighted values a right operand wants two positions side by side, and a row of values has two columns there.
//! So the weights come in pairs with a zero, first `(p, 0)` and then `(0, p)`: with the same tile of values they give the
//! even columns and the odd ones. Half of the multiplications are with zeros, and at a product for every 512 bytes tiles
//! are still twice as fast as the memory. A value that is not finite puts a NaN into the column beside its own; whoever
//! finds such a result takes another road.

use std::arch::asm;
use std::arch::x86_64::*;

use super::amx::{Left, Tiles};
use crate::tensor::bf16;

/// Bytes of a tile row.
const ROW: usize = 64;

impl Tiles {
    /// Tiles of these rows and bytes of columns from now on, zeros.
    #[inline(always)]
    fn configure(self, shapes: [[usize; 2]; 8]) {
        let mut config = [0u8; 64];
        config[0] = 1;
        for (tile, [rows, columns]) in shapes.into_iter().enumerate() {
            config[16 + 2 * tile] = columns as u8;
            config[48 + tile] = rows as u8;
        }
        // SAFETY: `self` proves tiles; 64 bytes are read. No tile is larger than those that all methods expect.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &config, options(nostack, readonly)) };
    }

    /// Shapes the tiles for [`Self::score`] and [`Self::score_two`]: with this many queries, 1 to 16.
    #[inline(always)]
    pub(crate) fn shape_scores(self, queries: usize) {
        assert!((1..=16).contains(&queries));
        let (few, keys) = ([16, 4 * queries], [16, ROW]);
        self.configure([few, few, few, few, few, keys, keys, few]);
    }

    /// Shapes the tiles for [`Self::add_values`]: with the weights of this many queries, 1 to 16.
    #[inline(always)]
    pub(crate) fn shape_values(self, queries: usize) {
        assert!((1..=16).contains(&queries));
        let (sums, values) = ([queries, ROW], [16, ROW]);
        self.configure([sums, sums, sums, sums, sums, sums, values, values]);
    }

    /// Begins four blocks of scores.
    #[inline(always)]
    pub(crate) fn begin_scores(self) {
        // SAFETY: `self` proves tiles; no memory is touched.
        unsafe { asm!("tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3", options(nostack, nomem)) };
    }

    /// Takes 32 elements of each query, or as `SECOND` the next 32: `[16, queries]` pairs of them, `stride` elements from pair
    /// to pair.
    #[inline(always)]
    pub(crate) fn take_queries<const SECOND: bool>(self, q: &[bf16], stride: usize) {
        assert!(15 * stride + ROW / 2 <= q.len());
        // SAFETY: tiles are configured on this thread (`self`), and 16 rows of 64 bytes would lie inside the slice.
        unsafe {
            if SECOND {
                asm!("tileloadd tmm7, [{q} + {s}*1]", q = in(reg) q.as_ptr(), s = in(reg) 2 * stride, options(nostack));
            } else {
                asm!("tileloadd tmm4, [{q} + {s}*1]", q = in(reg) q.as_ptr(), s = in(reg) 2 * stride, options(nostack));
            }
        }
    }

    /// Adds to block `B` of scores the products of 32 elements of 16 keys with those of the queries.
    #[inline(always)]
    pub(crate) fn score<const B: usize>(self, keys: Left<'_, bf16>) {
        assert!(15 * keys.stride + ROW / 2 <= keys.data.len());
        macro_rules! block {
            ($sums:literal, $keys:literal) => {
                asm!(
                    concat!("tileloadd ", $keys, ", [{k} + {s}*1]"),
                    concat!("tdpbf16ps ", $sums, ", ", $keys, ", tmm4"),
                    k = in(reg) keys.data.as_ptr(), s = in(reg) 2 * keys.stride, options(nostack)
                )
            };
        }
        // SAFETY: as in `take_queries`.
        unsafe {
            match B {
                0 => block!("tmm0", "tmm5"),
                1 => block!("tmm1", "tmm6"),
                2 => block!("tmm2", "tmm5"),
                _ => block!("tmm3", "tmm6"),
            }
        }
    }

    /// As [`Self::score`] twice, with both that were taken of the queries: two lines of a key at a time come a quarter faster
    /// from the second-level cache.
    #[inline(always)]
    pub(crate) fn score_two<const B: usize>(self, keys: Left<'_, bf16>) {
        assert!(15 * keys.stride + ROW <= keys.data.len());
        macro_rules! block {
            ($sums:literal) => {
                asm!(
                    "tileloadd tmm5, [{k} + {s}*1]",
                    concat!("tdpbf16ps ", $sums, ", tmm5, tmm4"),
                    "tileloadd tmm6, [{k} + {s}*1 + 64]",
                    concat!("tdpbf16ps ", $sums, ", tmm6, tmm7"),
                    k = in(reg) keys.data.as_ptr(), s = in(reg) 2 * keys.stride, options(nostack)
                )
            };
        }
        // SAFETY: as in `take_queries`, with rows of 128 bytes.
        unsafe {
            match B {
                0 => block!("tmm0"),
                1 => block!("tmm1"),
                2 => block!("tmm2"),
                _ => block!("tmm3"),
            }
        }
    }

    /// Stores four blocks of scores: 64 rows of keys, 16 floats apart.
    #[inline(always)]
    pub(crate) fn end_scores(self, s: &mut [f32]) {
        assert!(s.len() >= 64 * 16);
        // SAFETY: as in `take_queries`; 64 rows of 64 bytes would lie inside the slice.
        unsafe {
            asm!(
                "tilestored [{s} + {row}*1], tmm0",
                "tilestored [{s} + {row}*1 + 1024], tmm1",
                "tilestored [{s} + {row}*1 + 2048], tmm2",
                "tilestored [{s} + {row}*1 + 3072], tmm3",
                s = in(reg) s.as_mut_ptr(), row = in(reg) ROW, options(nostack)
            );
        }
    }

    /// 16 weights as bf16, as the first and as the second of pairs with zeros.
    #[inline(always)]
    pub(crate) fn pairs(self, p: __m512, first: &mut [bf16], second: &mut [bf16]) {
        let first = first.first_chunk_mut::<32>().expect("32 elements").as_mut_ptr();
        let second = second.first_chunk_mut::<32>().expect("32 elements").as_mut_ptr();
        // SAFETY: `self` proves AVX-512 BF16; arrays of 64 bytes are written.
        unsafe {
            let p = std::mem::transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(p));
            let p = _mm512_cvtepu16_epi32(p);
            _mm512_storeu_si512(first.cast(), p);
            _mm512_storeu_si512(second.cast(), _mm512_slli_epi32::<16>(p));
        }
    }

    /// Takes the sums of four blocks of outputs: 16 columns each, their rows 16 floats apart, `apart` from block to block.
    #[inline(always)]
    pub(crate) fn begin_values(self, o: &[f32], apart: usize) {
        assert!(3 * apart + 16 * 16 <= o.len());
        // SAFETY: as in `take_queries`; four tiles of 16 rows of 64 bytes would lie inside the slice.
        unsafe {
            asm!(
                "tileloadd tmm0, [{o0} + {row}*1]",
                "tileloadd tmm1, [{o1} + {row}*1]",
                "tileloadd tmm2, [{o2} + {row}*1]",
                "tileloadd tmm3, [{o3} + {row}*1]",
                o0 = in(reg) o.as_ptr(), o1 = in(reg) o[apart..].as_ptr(), o2 = in(reg) o[2 * apart..].as_ptr(),
                o3 = in(reg) o[3 * apart..].as_ptr(), row = in(reg) ROW, options(nostack)
            );
        }
    }

    /// Stores what [`Self::begin_values`] took, with all that was added.
    #[inline(always)]
    pub(crate) fn end_values(self, o: &mut [f32], apart: usize) {
        assert!(3 * apart + 16 * 16 <= o.len());
        // SAFETY: as in `begin_values`.
        unsafe {
            asm!(
                "tilestored [{o0} + {row}*1], tmm0",
                "tilestored [{o1} + {row}*1], tmm1",
                "tilestored [{o2} + {row}*1], tmm2",
                "tilestored [{o3} + {row}*1], tmm3",
                o0 = in(reg) o.as_mut_ptr(), o1 = in(reg) o[apart..].as_mut_ptr(),
                o2 = in(reg) o[2 * apart..].as_mut_ptr(), o3 = in(reg) o[3 * apart..].as_mut_ptr(),
                row = in(reg) ROW, options(nostack)
            );
        }
    }

    /// Adds 64 elements of 16 values, weighted: to the first block the even ones of 32, to the second the odd ones, then of
    /// the other 32. `first` and `second` are rows of [`Self::pairs`].
    #[inline(always)]
    pub(crate) fn add_values(self, first: &[bf16], second: &[bf16], values: Left<'_, bf16>) {
        assert!(first.len() >= 512 && second.len() >= 512 && 15 * values.stride + ROW <= values.data.len());
        // SAFETY: as in `take_queries`; 16 rows of 64 bytes of the weights and of 128 bytes of values would lie inside.
        unsafe {
            asm!(
                "tileloadd tmm4, [{p0} + {row}*1]",
                "tileloadd tmm6, [{x} + {s}*1]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tileloadd tmm5, [{p1} + {row}*1]",
                "tdpbf16ps tmm1, tmm5, tmm6",
                "tileloadd tmm7, [{x} + {s}*1 + 64]",
                "tdpbf16ps tmm2, tmm4, tmm7",
                "tdpbf16ps tmm3, tmm5, tmm7",
                p0 = in(reg) first.as_ptr(), p1 = in(reg) second.as_ptr(), row = in(reg) ROW,
                x = in(reg) values.data.as_ptr(), s = in(reg) 2 * values.stride, options(nostack)
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::amx::{Amx, TileKernel};
    use super::super::x86::Avx512;
    use super::*;
    use crate::cpu::vector::Vector;

    struct Check;

    impl TileKernel for Check {
        type Out = ();
        #[inline(always)]
        fn run(self, v: Avx512, tiles: Tiles) {
            for queries in [1, 4, 7, 16] {
                scores_match_loops(tiles, queries);
                values_match_loops(v, tiles, queries);
            }
        }
    }

    fn number(i: usize) -> bf16 {
        bf16::from_f32((i * 7 % 13) as f32 - 6.0)
    }

    fn scores_match_loops(tiles: Tiles, queries: usize) {
        let (stride, depth) = (104, 96);
        let keys: Vec<bf16> = (0..64 * stride).map(number).collect();
        let query = |r: usize, c: usize| number(3 * r + 5 * c);
        // [steps, 16, queries] pairs, and room for a row of 64 bytes.
        let mut q: Vec<bf16> =
            (0..depth / 2 * queries * 2).map(|i| query(i / 2 % queries, i / 2 / queries * 2 + i % 2)).collect();
        q.resize(q.len() + 32, bf16::ZERO);
        let mut s = vec![0f32; 64 * 16];
        let rows = |block: usize, c: usize| Left { data: &keys[block * 16 * stride + c..], stride };
        tiles.shape_scores(queries);
        tiles.begin_scores();
        tiles.take_queries::<false>(&q, 2 * queries);
        tiles.take_queries::<true>(&q[32 * queries..], 2 * queries);
        tiles.score_two::<0>(rows(0, 0));
        tiles.score_two::<1>(rows(1, 0));
        tiles.score_two::<2>(rows(2, 0));
        tiles.score_two::<3>(rows(3, 0));
        tiles.take_queries::<false>(&q[64 * queries..], 2 * queries);
        tiles.score::<0>(rows(0, 64));
        tiles.score::<1>(rows(1, 64));
        tiles.score::<2>(rows(2, 64));
        tiles.score::<3>(rows(3, 64));
        tiles.end_scores(&mut s);
        for (at, got) in s.iter().enumerate() {
            let (j, r) = (at / 16, at % 16);
            let dot: f32 = (0..depth).map(|c| keys[j * stride + c].to_f32() * query(r, c).to_f32()).sum();
            assert_eq!(*got, if r < queries { dot } else { 0.0 }, "{queries}: key {j}, query {r}");
        }
    }

    fn values_match_loops(v: Avx512, tiles: Tiles, queries: usize) {
        let (stride, apart) = (80, queries * 16);
        let values: Vec<bf16> = (0..16 * stride).map(number).collect();
        let weight = |r: usize, j: usize| ((r + 3 * j) % 5) as f32 * 0.25;
        let (mut first, mut second) = (vec![bf16::ONE; 512], vec![bf16::ONE; 512]);
        for r in 0..16 {
            let row: Vec<f32> = (0..16).map(|j| weight(r, j)).collect();
            tiles.pairs(v.load(&row), &mut first[32 * r..], &mut second[32 * r..]);
        }
        let before: Vec<f32> = (0..3 * apart + 256).map(|i| i as f32).collect();
        let mut o = before.clone();
        tiles.shape_values(queries);
        tiles.begin_values(&o, apart);
        tiles.add_values(&first, &second, Left { data: &values, stride });
        tiles.end_values(&mut o, apart);
        for (at, got) in o.iter().enumerate() {
            let (block, r, lane) = (at / apart, at % apart / 16, at % 16);
            let column = block / 2 * 32 + 2 * lane + block % 2;
            let dot: f32 = (0..16).map(|j| weight(r, j) * values[j * stride + column.min(63)].to_f32()).sum();
            assert_eq!(*got, before[at] + if block < 4 { dot } else { 0.0 }, "{queries}: row {r}, column {column}");
        }
    }

    #[test]
    #[expect(clippy::print_stderr, reason = "a skip must be seen")]
    fn products_in_place_match_plain_loops() {
        match Amx::detect() {
            Some(amx) => amx.run(Check),
            None => eprintln!("skipped: this CPU or system has no AMX"),
        }
    }
}
