//! Products of a group of 32 elements alone, bf16 of small integers: each sum is exact, and is f32 when it is stored.

use std::arch::asm;
use std::arch::x86_64::*;

use super::{Amx, ROW, TILE, Tiles};
use crate::tensor::bf16;

impl Amx {
    /// 32 signed bytes as bf16; of each four the second and the third change places, as [`Tiles::widen_codes`] has them.
    #[inline(always)]
    pub(crate) fn widen_integers(self, x: &[i32; 8], out: &mut [bf16; 32]) {
        const ORDER: [i8; 16] = [0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15];
        // SAFETY: `self` proves AVX-512; loads and stores go through arrays of as many bytes.
        unsafe {
            let order = _mm_loadu_si128(ORDER.as_ptr().cast());
            let half = |at: usize| {
                let x = _mm_shuffle_epi8(_mm_loadu_si128(x.as_ptr().add(at / 4).cast()), order);
                let floats = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(x));
                // Eight bits: the upper half of an f32 has them all.
                _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(_mm512_castps_si512(floats)))
            };
            let out = out.as_mut_ptr();
            _mm256_storeu_si256(out.cast(), half(0));
            _mm256_storeu_si256(out.add(16).cast(), half(16));
        }
    }
}

impl Tiles {
    /// Begins the product of two tiles, and stores to `before` what `ACC`, one of four, held: sums of some turns ago, as
    /// to wait for them right away would take fifty cycles.
    #[inline(always)]
    pub(crate) fn turn_bf16<const ACC: usize>(self, a: &[bf16; TILE], b: &[bf16; TILE], before: &mut [f32; 256]) {
        macro_rules! block {
            ($a:literal, $b:literal, $c:literal) => {
                asm!(
                    concat!("tileloadd ", $a, ", [{a} + {row}*1]"),
                    concat!("tileloadd ", $b, ", [{b} + {row}*1]"),
                    concat!("tilestored [{c} + {row}*1], ", $c),
                    concat!("tilezero ", $c),
                    concat!("tdpbf16ps ", $c, ", ", $a, ", ", $b),
                    a = in(reg) a.as_ptr(), b = in(reg) b.as_ptr(), c = in(reg) before.as_mut_ptr(), row = in(reg) ROW,
                    options(nostack)
                )
            };
        }
        // SAFETY: tiles of 16 rows of 64 bytes are configured on this thread (`self`); all three operands are arrays of 1 KB.
        // Were tiles used by others between two calls, sums would be wrong, and memory as safe.
        unsafe {
            match ACC {
                0 => block!("tmm4", "tmm6", "tmm0"),
                1 => block!("tmm5", "tmm7", "tmm1"),
                2 => block!("tmm4", "tmm6", "tmm2"),
                _ => block!("tmm5", "tmm7", "tmm3"),
            }
        }
    }

    /// Stores the sums of the last turn with `ACC`.
    #[inline(always)]
    pub(crate) fn end_turn<const ACC: usize>(self, sums: &mut [f32; 256]) {
        macro_rules! block {
            ($c:literal) => {
                asm!(
                    concat!("tilestored [{c} + {row}*1], ", $c),
                    c = in(reg) sums.as_mut_ptr(), row = in(reg) ROW, options(nostack)
                )
            };
        }
        // SAFETY: as in `turn_bf16`.
        unsafe {
            match ACC {
                0 => block!("tmm0"),
                1 => block!("tmm1"),
                2 => block!("tmm2"),
                _ => block!("tmm3"),
            }
        }
    }

    /// Entries of a table by 64 bytes below 32; of each four the first and the third become a pair of `out`'s first half,
    /// the second and the fourth one of its second half.
    #[inline(always)]
    pub(crate) fn widen_codes(self, table: &[bf16; 32], x: &[u8; 64], out: &mut [bf16; 64]) {
        // SAFETY: `self` proves AVX-512; loads and stores go through arrays of as many bytes.
        unsafe {
            let table = _mm512_loadu_si512(table.as_ptr().cast());
            let x = _mm512_loadu_si512(x.as_ptr().cast());
            // Of each index of 16 bits the lower five count.
            let out = out.as_mut_ptr();
            _mm512_storeu_si512(out.cast(), _mm512_permutexvar_epi16(x, table));
            _mm512_storeu_si512(out.add(32).cast(), _mm512_permutexvar_epi16(_mm512_srli_epi16::<8>(x), table));
        }
    }

    /// The same for any bytes, which stand for themselves less 128.
    #[inline(always)]
    pub(crate) fn widen_bytes(self, x: &[u8; 64], out: &mut [bf16; 64]) {
        // SAFETY: `self` proves AVX-512; loads and stores go through arrays of as many bytes.
        unsafe {
            let x = _mm512_xor_si512(_mm512_loadu_si512(x.as_ptr().cast()), _mm512_set1_epi8(i8::MIN));
            // Eight bits are exact in the upper half of an f32.
            let float = |x: __m512i| _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_srai_epi32::<24>(x)));
            let pair = |low: __m512i, high: __m512i| {
                let high = _mm512_and_si512(high, _mm512_set1_epi32(0xffff_0000u32 as i32));
                _mm512_or_si512(_mm512_srli_epi32::<16>(low), high)
            };
            let (first, second) = (float(_mm512_slli_epi32::<24>(x)), float(_mm512_slli_epi32::<16>(x)));
            let (third, fourth) = (float(_mm512_slli_epi32::<8>(x)), float(x));
            let out = out.as_mut_ptr();
            _mm512_storeu_si512(out.cast(), pair(first, third));
            _mm512_storeu_si512(out.add(32).cast(), pair(second, fourth));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::TileKernel;
    use super::*;
    use crate::cpu::arch::Avx512;

    /// Where element `i` of a group stands among its tile's.
    fn place(i: usize) -> usize {
        i / 4 * 4 + [0, 2, 1, 3][i % 4]
    }

    struct Check(Amx);

    impl TileKernel for Check {
        type Out = ();
        #[inline(always)]
        fn run(self, _: Avx512, tiles: Tiles) {
            let integers: [i8; 256] = std::array::from_fn(|i| (i as u8 as i8).max(-127));
            for (words, want) in integers.as_chunks::<32>().0.iter().map(|x| (bytemuck::cast::<_, [i32; 8]>(*x), x)) {
                let mut out = [bf16::NAN; 32];
                self.0.widen_integers(&words, &mut out);
                for (i, want) in want.iter().enumerate() {
                    assert_eq!(out[place(i)].to_f32(), f32::from(*want), "{i}");
                }
            }
            // Of a column's four elements the even ones are in the first half, the odd ones in the second.
            let widened = |out: &[bf16; 64], i: usize| out[i % 2 * 32 + i / 4 * 2 + i % 4 / 2].to_f32();
            for from in [0u8, 64, 128, 192] {
                let (x, mut out) = (std::array::from_fn(|i| from + i as u8), [bf16::NAN; 64]);
                tiles.widen_bytes(&x, &mut out);
                assert!((0..64).all(|i| widened(&out, i) == f32::from(x[i]) - 128.0), "{from}");
                let (x, table) = (x.map(|x| x % 32), std::array::from_fn(|i| bf16::from_f32(i as f32 - 16.0)));
                tiles.widen_codes(&table, &x, &mut out);
                assert!((0..64).all(|i| widened(&out, i) == f32::from(x[i]) - 16.0), "{from}");
            }
            // Four products in turn, each of which stores what its tile held; two rounds of them.
            let number = |i: usize, seed: usize| bf16::from_f32(((i * 7 + seed * 13) % 255) as f32 - 127.0);
            let operands: [[[bf16; TILE]; 2]; 8] =
                std::array::from_fn(|n| std::array::from_fn(|side| std::array::from_fn(|i| number(i, 2 * n + side))));
            let mut got = [[f32::NAN; 256]; 12];
            for (n, [a, b]) in operands.iter().enumerate() {
                match n % 4 {
                    0 => tiles.turn_bf16::<0>(a, b, &mut got[n]),
                    1 => tiles.turn_bf16::<1>(a, b, &mut got[n]),
                    2 => tiles.turn_bf16::<2>(a, b, &mut got[n]),
                    _ => tiles.turn_bf16::<3>(a, b, &mut got[n]),
                }
            }
            tiles.end_turn::<0>(&mut got[8]);
            tiles.end_turn::<1>(&mut got[9]);
            tiles.end_turn::<2>(&mut got[10]);
            tiles.end_turn::<3>(&mut got[11]);
            for (n, [a, b]) in operands.iter().enumerate() {
                for (at, got) in got[n + 4].iter().enumerate() {
                    let (i, j) = (at / 16, at % 16);
                    let want: f32 =
                        (0..32).map(|l| a[i * 32 + l].to_f32() * b[l / 2 * 32 + j * 2 + l % 2].to_f32()).sum();
                    assert_eq!(*got, want, "{n} {i} {j}");
                }
            }
        }
    }

    #[test]
    #[expect(clippy::print_stderr, reason = "a skip must be seen")]
    fn products_of_groups_match_plain_loops() {
        match Amx::detect() {
            Some(amx) => amx.run(Check(amx)),
            None => eprintln!("skipped: this CPU or system has no AMX"),
        }
    }
}
