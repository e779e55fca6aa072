//! Numbers of fp8 as bf16, exactly: by a table of their 128 magnitudes, which VBMI looks up for 64 of them at a time.

use std::arch::x86_64::*;
use std::ops::Range;

use super::TILE;
use super::x86::Avx512;
use crate::cpu::vector::Vector;
use crate::tensor::bf16;

impl Avx512<true> {
    /// Packs 64 numbers of fp8 of each of 16 rows as bf16: two tiles, `apart` elements apart, whose columns those rows are.
    #[inline(always)]
    pub(crate) fn pack_fp8(self, table: &Fp8, rows: &[&[u8; 64]; 16], tiles: &mut [bf16], apart: usize) {
        assert!(tiles.len() >= apart + TILE);
        // SAFETY: `self` proves AVX-512 and VBMI, and both tiles lie inside `tiles`.
        unsafe {
            let table = table.load();
            for (b, quarter) in quarters(rows).into_iter().enumerate() {
                for (i, x) in turned(quarter).into_iter().enumerate() {
                    let (low, high) = widened(x, table);
                    let to = tiles.as_mut_ptr().add(b / 2 * apart + (b % 2 * 4 + i) * 64);
                    _mm512_storeu_si512(to.cast(), _mm512_unpacklo_epi8(low, high));
                    _mm512_storeu_si512(to.add(32).cast(), _mm512_unpackhi_epi8(low, high));
                }
            }
        }
    }

    /// Adds to `sums`, whose lanes are the rows, the products of chunks of 64 rows of fp8 and of `x`, pairs of bf16: the same bits
    /// as with packed tiles. `space` has room for a chunk of all rows.
    ///
    /// Four sums of 16 rows each are under way: one alone would wait 6 cycles for every pair.
    #[inline(always)]
    pub(crate) fn add_fp8<const R: usize>(
        self,
        table: &Fp8,
        rows: &Chunks<'_>,
        x: [&[[f32; 32]]; R],
        chunks: Range<usize>,
        space: &mut [bf16],
        mut sums: [[__m512; 4]; R],
    ) -> [[__m512; 4]; R] {
        assert!(chunks.end <= rows.len && space.len() >= 64 * 32);
        let space = space.as_mut_ptr();
        // SAFETY: `self` proves AVX-512 and VBMI; rows have as many chunks; 64 vectors lie inside `space`; and a prefetch reads
        // nothing, wherever it points.
        unsafe {
            let table = table.load();
            for c in chunks {
                for (g, rows) in rows.rows.as_chunks::<16>().0.iter().enumerate() {
                    let mut lines = [&[0; 64]; 16];
                    for (line, row) in lines.iter_mut().zip(rows) {
                        let at = row.as_ptr().add(c);
                        // Of rows of 4 KiB, which share a place in the first-level cache, more would push out each other.
                        _mm_prefetch::<_MM_HINT_T1>(at.wrapping_add(4).cast());
                        *line = &*at;
                    }
                    for (i, x) in quarters(&lines).as_flattened().iter().enumerate() {
                        _mm512_storeu_si512(space.add((16 * g + i) * 32).cast(), *x);
                    }
                }
                for b in 0..4 {
                    let mut turns = [[_mm512_setzero_si512(); 4]; 4];
                    for (g, turns) in turns.iter_mut().enumerate() {
                        for (r, turn) in turns.iter_mut().enumerate() {
                            *turn = _mm512_loadu_si512(space.add((16 * g + 4 * b + r) * 32).cast());
                        }
                        *turns = turned(*turns);
                    }
                    for i in 0..4 {
                        for (g, turns) in turns.iter().enumerate() {
                            let (low, high) = widened(turns[i], table);
                            let first = _mm512_castsi512_ps(_mm512_unpacklo_epi8(low, high));
                            let second = _mm512_castsi512_ps(_mm512_unpackhi_epi8(low, high));
                            for (sums, x) in sums.iter_mut().zip(x) {
                                let at = 8 * b + 2 * i;
                                sums[g] = self.fma(self.splat(x[c][at]), first, sums[g]);
                                sums[g] = self.fma(self.splat(x[c][at + 1]), second, sums[g]);
                            }
                        }
                    }
                }
            }
        }
        sums
    }

    /// 64 numbers of fp8 as bf16, exactly.
    #[inline(always)]
    pub(crate) fn widen_fp8(self, table: &Fp8, x: &[u8; 64], out: [&mut [bf16; 32]; 2]) {
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
            let [first, second] = out;
            _mm512_storeu_si512(first.as_mut_ptr().cast(), _mm512_unpacklo_epi8(low, high));
            _mm512_storeu_si512(second.as_mut_ptr().cast(), _mm512_unpackhi_epi8(low, high));
        }
    }
}

/// Rows of fp8 by chunks of 64.
pub(crate) struct Chunks<'a> {
    rows: [&'a [[u8; 64]]; 64],
    /// Chunks that all of them have.
    len: usize,
}

impl<'a> Chunks<'a> {
    /// The whole chunks of some rows.
    pub(crate) fn new(rows: &[&'a [u8]; 64]) -> Self {
        let rows = rows.map(|row| row.as_chunks().0);
        Self { rows, len: rows.iter().map(|row| row.len()).min().unwrap_or(0) }
    }
}

/// 64 bytes of 16 rows: of vector `[b][r]`, in quarter `q`, those of quarter `b` of row `4 * q + r`.
#[target_feature(enable = "avx512f")]
#[inline]
fn quarters(rows: &[&[u8; 64]; 16]) -> [[__m512i; 4]; 4] {
    let mut out = [[_mm512_setzero_si512(); 4]; 4];
    for r in 0..4 {
        let mut a = [_mm512_setzero_si512(); 4];
        for (q, a) in a.iter_mut().enumerate() {
            // SAFETY: a row has 64 bytes.
            *a = unsafe { _mm512_loadu_si512(rows[4 * q + r].as_ptr().cast()) };
        }
        let low = _mm512_shuffle_i32x4::<0b01_00_01_00>(a[0], a[1]);
        let low2 = _mm512_shuffle_i32x4::<0b01_00_01_00>(a[2], a[3]);
        let high = _mm512_shuffle_i32x4::<0b11_10_11_10>(a[0], a[1]);
        let high2 = _mm512_shuffle_i32x4::<0b11_10_11_10>(a[2], a[3]);
        out[0][r] = _mm512_shuffle_i32x4::<0b10_00_10_00>(low, low2);
        out[1][r] = _mm512_shuffle_i32x4::<0b11_01_11_01>(low, low2);
        out[2][r] = _mm512_shuffle_i32x4::<0b10_00_10_00>(high, high2);
        out[3][r] = _mm512_shuffle_i32x4::<0b11_01_11_01>(high, high2);
    }
    out
}

/// Of one of the [`quarters`], by pairs of numbers: in quarter `q` of vector `i` the pairs `2 * i` of rows `4 * q..4 * q + 4`, then
/// their pairs `2 * i + 1`.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
fn turned([a, b, c, d]: [__m512i; 4]) -> [__m512i; 4] {
    let (even, odd) = (_mm512_unpacklo_epi16(a, c), _mm512_unpacklo_epi16(b, d));
    let (even2, odd2) = (_mm512_unpackhi_epi16(a, c), _mm512_unpackhi_epi16(b, d));
    [
        _mm512_unpacklo_epi16(even, odd),
        _mm512_unpackhi_epi16(even, odd),
        _mm512_unpacklo_epi16(even2, odd2),
        _mm512_unpackhi_epi16(even2, odd2),
    ]
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
                    let (mut got, x) = ([[bf16::ZERO; 32]; 2], std::array::from_fn(|i| from + i as u8 | sign));
                    pairs.widen_fp8(&Fp8::E4M3, &x, got.each_mut());
                    is_exact(&x.map(E4m3), got.as_flattened());
                    pairs.widen_fp8(&Fp8::E5M2, &x, got.each_mut());
                    is_exact(&x.map(E5m2), got.as_flattened());
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
