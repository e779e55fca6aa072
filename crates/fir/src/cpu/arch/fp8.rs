//! Numbers of fp8 as bf16, exactly: by a table of their 128 magnitudes, which VBMI looks up for 64 of them at a time.

use std::arch::x86_64::*;

use super::TILE;
use super::x86::{Avx512, transpose};
use crate::tensor::bf16;

impl Avx512<true> {
    /// Packs 64 numbers of fp8 of each of 16 rows as bf16: two tiles, `apart` elements apart, whose columns those rows are.
    #[inline(always)]
    pub(crate) fn pack_fp8(self, table: &Fp8, rows: &[&[u8; 64]; 16], tiles: &mut [bf16], apart: usize) {
        assert!(tiles.len() >= apart + TILE);
        // In every quarter: the first two of four numbers of each row, then the other two.
        const HALVES: [u8; 16] = [0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15];
        // SAFETY: `self` proves AVX-512 and VBMI; loads go through arrays of as many bytes, and both tiles lie inside `tiles`.
        unsafe {
            let mut lines = [_mm512_setzero_si512(); 16];
            for (line, row) in lines.iter_mut().zip(rows) {
                *line = _mm512_loadu_si512(row.as_ptr().cast());
            }
            let table = table.load();
            let halves = _mm512_broadcast_i32x4(_mm_loadu_si128(HALVES.as_ptr().cast()));
            for (i, x) in transpose(lines).into_iter().enumerate() {
                let x = _mm512_shuffle_epi8(x, halves);
                let (low, high) = widened(x, table);
                let to = tiles.as_mut_ptr().add(i / 8 * apart + i % 8 * 64);
                _mm512_storeu_si512(to.cast(), _mm512_unpacklo_epi8(low, high));
                _mm512_storeu_si512(to.add(32).cast(), _mm512_unpackhi_epi8(low, high));
            }
        }
    }

    /// 64 numbers of fp8 as bf16, exactly.
    #[inline(always)]
    pub(crate) fn widen_fp8(self, table: &Fp8, x: &[u8; 64], out: &mut [bf16; 64]) {
        const QUARTERS: [u64; 8] = [0, 4, 1, 5, 2, 6, 3, 7];
        // SAFETY: `self` proves AVX-512 and VBMI; loads and stores go through arrays of as many bytes.
        unsafe {
            let table = table.load();
            // Interleaving works by 16 bytes: so the halves of 64 numbers come by eights in turn.
            let x = _mm512_permutexvar_epi64(
                _mm512_loadu_si512(QUARTERS.as_ptr().cast()),
                _mm512_loadu_si512(x.as_ptr().cast()),
            );
            let (low, high) = widened(x, table);
            let out = out.as_mut_ptr();
            _mm512_storeu_si512(out.cast(), _mm512_unpacklo_epi8(low, high));
            _mm512_storeu_si512(out.add(32).cast(), _mm512_unpackhi_epi8(low, high));
        }
    }
}

/// The low and the high bytes of the bf16 of 64 numbers of fp8, by an [`Fp8`].
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
#[inline]
fn widened(x: __m512i, [low, high]: [[__m512i; 2]; 2]) -> (__m512i, __m512i) {
    let high = _mm512_permutex2var_epi8(high[0], x, high[1]);
    // high | x & 0x80
    let high = _mm512_ternarylogic_epi32::<0b1111_1000>(high, x, _mm512_set1_epi8(i8::MIN));
    (_mm512_permutex2var_epi8(low[0], x, low[1]), high)
}

/// The bytes of the bf16 of an fp8 format's 128 magnitudes.
pub(crate) struct Fp8 {
    low: [u8; 128],
    high: [u8; 128],
}

impl Fp8 {
    /// Halves of either, no closure: that would be compiled for another CPU.
    #[target_feature(enable = "avx512f")]
    #[inline]
    fn load(&self) -> [[__m512i; 2]; 2] {
        let (low, high) = (self.low.as_ptr(), self.high.as_ptr());
        // SAFETY: both have 128 bytes.
        unsafe {
            [
                [_mm512_loadu_si512(low.cast()), _mm512_loadu_si512(low.add(64).cast())],
                [_mm512_loadu_si512(high.cast()), _mm512_loadu_si512(high.add(64).cast())],
            ]
        }
    }

    pub(crate) const E4M3: Self = Self::new(4, 3);
    pub(crate) const E5M2: Self = Self::new(5, 2);

    const fn new(exponent: u32, mantissa: u32) -> Self {
        let (mut low, mut high, mut code) = ([0; 128], [0; 128], 0);
        let bias = (1 << (exponent - 1)) - 1;
        while code < 128 {
            let (e, m) = ((code as u32) >> mantissa, code as u32 & ((1 << mantissa) - 1));
            let bits = if (mantissa == 3 && code == 127) || (mantissa == 2 && e == 31 && m > 0) {
                0x7fc0
            } else if mantissa == 2 && e == 31 {
                0x7f80
            } else if e > 0 {
                (e + 127 - bias) << 7 | m << (7 - mantissa)
            } else if m > 0 {
                // Subnormal: the first bit of `m` becomes the one before the point.
                let first = m.ilog2();
                (1 + 127 - bias - mantissa + first) << 7 | (m << (7 - first)) & 0x7f
            } else {
                0
            };
            low[code] = bits as u8;
            high[code] = (bits >> 8) as u8;
            code += 1;
        }
        Self { low, high }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::arch::PairKernel;
    use crate::tensor::{E4m3, E5m2, Float};

    struct Check;

    impl PairKernel for Check {
        type Out = ();
        #[inline(always)]
        fn run(self, _: Avx512, pairs: Avx512<true>) {
            for sign in [0, 128] {
                for from in [0u8, 64] {
                    let (mut got, x) = ([bf16::ZERO; 64], std::array::from_fn(|i| from + i as u8 | sign));
                    pairs.widen_fp8(&Fp8::E4M3, &x, &mut got);
                    is_exact(&x.map(E4m3), &got);
                    pairs.widen_fp8(&Fp8::E5M2, &x, &mut got);
                    is_exact(&x.map(E5m2), &got);
                }
            }
            let rows: [[u8; 64]; 16] = std::array::from_fn(|r| std::array::from_fn(|i| (37 * r + 3 * i) as u8));
            let (apart, mut tiles) = (TILE + 32, vec![bf16::ZERO; 2 * TILE + 32]);
            pairs.pack_fp8(&Fp8::E4M3, &rows.each_ref(), &mut tiles, apart);
            for (r, row) in rows.iter().enumerate() {
                let place = |i: usize| tiles[i / 32 * apart + i % 32 / 2 * 32 + 2 * r + i % 2];
                is_exact(&row.map(E4m3), &std::array::from_fn::<_, 64, _>(place));
            }
        }
    }

    fn is_exact<T: Float>(x: &[T], got: &[bf16]) {
        for (x, got) in x.iter().zip(got) {
            let (want, got) = (x.to_f32(), got.to_f32());
            assert!(want.to_bits() == got.to_bits() || want.is_nan() && got.is_nan(), "{x:?}: {got} for {want}");
        }
    }

    #[test]
    fn fp8_is_bf16_exactly() {
        match Avx512::detect().and_then(Avx512::pairs) {
            Some(pairs) => pairs.run_pairs(Check),
            None => eprintln!("skipped: this CPU lacks AVX-512 BF16 or VBMI"),
        }
    }
}
