//! [`Integers`] in plain Rust, in AVX2 and in AVX-512 with VNNI.

use super::Portable;
use crate::cpu::integers::{Integers, PITCH};
use crate::tensor::f16;

#[inline(always)]
fn array<T: Copy, const N: usize>(x: &[T]) -> &[T; N] {
    x.first_chunk().expect("a full vector")
}

impl Integers for Portable {
    const ROWS: usize = 1;
    type B = [u8; 64];
    type I = [i32; 16];
    type P = ();
    type F = [f32; 16];

    #[inline(always)]
    fn bytes(self, x: &[u8]) -> [u8; 64] {
        *array(x)
    }
    #[inline(always)]
    fn store_bytes(self, x: [u8; 64], out: &mut [u8]) {
        *out.first_chunk_mut().expect("64 bytes") = x;
    }
    #[inline(always)]
    fn field(self, x: [u8; 64], right: u32, left: u32, mask: u8) -> [u8; 64] {
        x.map(|x| x >> right << left & mask)
    }
    #[inline(always)]
    fn or(self, a: [u8; 64], b: [u8; 64]) -> [u8; 64] {
        std::array::from_fn(|i| a[i] | b[i])
    }
    #[inline(always)]
    fn sub_bytes(self, x: [u8; 64], by: u8) -> [u8; 64] {
        x.map(|x| x.wrapping_sub(by))
    }
    #[inline(always)]
    fn scaled(self, x: [u8; 64], scale: [i32; 16], base: [i32; 16]) -> ([u8; 64], [u8; 64]) {
        let scaled = |i: usize| i32::from(x[i]).wrapping_mul(scale[i / 4]).wrapping_add(base[i / 4]);
        let w: [i32; 64] = std::array::from_fn(scaled);
        (w.map(|w| (w >> 8) as u8), w.map(|w| w as u8))
    }
    #[inline(always)]
    fn lookup(self, table: &[u8; 16], x: [u8; 64]) -> [u8; 64] {
        x.map(|x| table[usize::from(x & 15)])
    }
    #[inline(always)]
    fn none(self) {}
    #[inline(always)]
    fn dots<const R: usize>(self, _: bool, sums: &mut [[i32; 16]; R], _: &mut [(); R], q: [u8; 64], a: &[i32]) {
        for (r, sums) in sums.iter_mut().enumerate() {
            let a = a[r * PITCH].to_le_bytes().map(|a| i32::from(a as i8));
            for (i, sum) in sums.iter_mut().enumerate() {
                let q = |j: usize| i32::from(q[4 * i + j]);
                *sum += q(0) * a[0] + q(1) * a[1] + q(2) * a[2] + q(3) * a[3];
            }
        }
    }
    #[inline(always)]
    fn settle<const R: usize>(self, _: &mut [[i32; 16]; R], _: &mut [(); R]) {}
    #[inline(always)]
    fn settle_scaled<const R: usize>(self, _: &mut [[i32; 16]; R], _: &mut [(); R], _: [i32; 16]) {}
    #[inline(always)]
    fn splat(self, x: i32) -> [i32; 16] {
        [x; 16]
    }
    #[inline(always)]
    fn load_i32(self, x: &[i32]) -> [i32; 16] {
        *array(x)
    }
    #[inline(always)]
    fn signed(self, x: &[u8]) -> [i32; 16] {
        array(x).map(|x: u8| i32::from(x as i8))
    }
    #[inline(always)]
    fn unsigned(self, x: &[u8], right: u32, mask: i32) -> [i32; 16] {
        array(x).map(|x: u8| i32::from(x) >> right & mask)
    }
    #[inline(always)]
    fn words(self, x: &[u8]) -> [i32; 16] {
        let x: &[u8; 32] = array(x);
        std::array::from_fn(|i| i32::from(u16::from_le_bytes([x[2 * i], x[2 * i + 1]])))
    }
    #[inline(always)]
    fn add_pairs(self, a: [i32; 16], b: [i32; 16], c: [i32; 16]) -> [i32; 16] {
        let low = |x: i32| i32::from(x as i16);
        std::array::from_fn(|i| c[i].wrapping_add(low(a[i]) * low(b[i])).wrapping_add((a[i] >> 16) * (b[i] >> 16)))
    }
    #[inline(always)]
    fn flip(self, x: [i32; 16]) -> [i32; 16] {
        x.map(|x| x ^ 0x8000)
    }
    #[inline(always)]
    fn mul_add(self, a: [i32; 16], b: [i32; 16], c: [i32; 16]) -> [i32; 16] {
        std::array::from_fn(|i| a[i] * b[i] + c[i])
    }
    #[inline(always)]
    fn splat_f32(self, x: f32) -> [f32; 16] {
        [x; 16]
    }
    #[inline(always)]
    fn halves(self, x: &[u8]) -> [f32; 16] {
        let x: &[u8; 32] = array(x);
        std::array::from_fn(|i| f16::from_le_bytes([x[2 * i], x[2 * i + 1]]).to_f32())
    }
    #[inline(always)]
    fn load(self, x: &[f32]) -> [f32; 16] {
        *array(x)
    }
    #[inline(always)]
    fn store(self, x: [f32; 16], out: &mut [f32]) {
        *out.first_chunk_mut().expect("16 elements") = x;
    }
    #[inline(always)]
    fn float(self, x: [i32; 16]) -> [f32; 16] {
        x.map(|x| x as f32)
    }
    #[inline(always)]
    fn mul(self, a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        std::array::from_fn(|i| a[i] * b[i])
    }
    #[inline(always)]
    fn fma(self, a: [f32; 16], b: [f32; 16], c: [f32; 16]) -> [f32; 16] {
        std::array::from_fn(|i| a[i].mul_add(b[i], c[i]))
    }
    #[inline(always)]
    fn fnma(self, a: [f32; 16], b: [f32; 16], c: [f32; 16]) -> [f32; 16] {
        std::array::from_fn(|i| (-a[i]).mul_add(b[i], c[i]))
    }
}

/// Sound for the reason given in `x86.rs`: a token exists, and memory operands are arrays of the full size.
#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::array;
    use crate::cpu::arch::x86::{Avx2, Avx512, with};
    use crate::cpu::integers::{IntKernel, Integers, PITCH};

    /// Proof that this CPU has AVX-512 VNNI, and all that [`Avx512`] proves; only `detect` makes one.
    #[derive(Clone, Copy, Debug)]
    struct Vnni(());

    impl Vnni {
        fn detect() -> Option<Self> {
            (Avx512::detect().is_some() && is_x86_feature_detected!("avx512vnni")).then_some(Self(()))
        }

        /// Runs `kernel` compiled for these instructions.
        fn run_ints<K: IntKernel>(self, kernel: K) -> K::Out {
            #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
            fn go<K: IntKernel>(kernel: K, v: Vnni) -> K::Out {
                kernel.run(v)
            }
            // SAFETY: `self` exists, so `detect` saw these features on this CPU.
            unsafe { go(kernel, self) }
        }
    }

    impl Avx2 {
        /// Runs `kernel` compiled for this level.
        pub(crate) fn run_ints<K: IntKernel>(self, kernel: K) -> K::Out {
            #[target_feature(enable = "avx2,fma,f16c")]
            fn go<K: IntKernel>(kernel: K, v: Avx2) -> K::Out {
                kernel.run(v)
            }
            // SAFETY: `self` exists, so `detect` saw these features on this CPU.
            unsafe { go(kernel, self) }
        }
    }

    impl Avx512 {
        /// Runs `kernel` compiled for this level; without VNNI it has nothing that AVX2 lacks.
        pub(crate) fn run_ints<K: IntKernel>(self, kernel: K) -> K::Out {
            match Vnni::detect() {
                Some(v) => v.run_ints(kernel),
                None => self.avx2().run_ints(kernel),
            }
        }
    }

    /// The two halves of sixteen lanes.
    type Pair<T> = [T; 2];

    impl Integers for Avx2 {
        const ROWS: usize = 4;
        const SIXTEEN_BITS: bool = true;
        type B = Pair<__m256i>;
        type I = Pair<__m256i>;
        /// Of i16: every other instruction would be one that makes i32 of them.
        type P = Pair<__m256i>;
        type F = Pair<__m256>;

        #[inline(always)]
        fn bytes(self, x: &[u8]) -> Pair<__m256i> {
            let x: &[u8; 64] = array(x);
            with!(self, {
                let x = x.as_ptr().cast::<__m256i>();
                [_mm256_loadu_si256(x), _mm256_loadu_si256(x.add(1))]
            })
        }
        #[inline(always)]
        fn store_bytes(self, x: Pair<__m256i>, out: &mut [u8]) {
            let out: &mut [u8; 64] = out.first_chunk_mut().expect("64 bytes");
            with!(self, {
                let out = out.as_mut_ptr().cast::<__m256i>();
                _mm256_storeu_si256(out, x[0]);
                _mm256_storeu_si256(out.add(1), x[1]);
            });
        }
        #[inline(always)]
        fn field(self, x: Pair<__m256i>, right: u32, left: u32, mask: u8) -> Pair<__m256i> {
            // Shifts of 16 bits: what crosses from the other byte is masked away.
            with!(self, {
                let mask = _mm256_set1_epi8(mask as i8);
                let (right, left) = (_mm_cvtsi32_si128(right as i32), _mm_cvtsi32_si128(left as i32));
                let low = _mm256_sll_epi16(_mm256_srl_epi16(x[0], right), left);
                let high = _mm256_sll_epi16(_mm256_srl_epi16(x[1], right), left);
                [_mm256_and_si256(low, mask), _mm256_and_si256(high, mask)]
            })
        }
        #[inline(always)]
        fn or(self, a: Pair<__m256i>, b: Pair<__m256i>) -> Pair<__m256i> {
            with!(self, [_mm256_or_si256(a[0], b[0]), _mm256_or_si256(a[1], b[1])])
        }
        #[inline(always)]
        fn sub_bytes(self, x: Pair<__m256i>, by: u8) -> Pair<__m256i> {
            with!(self, {
                let by = _mm256_set1_epi8(by as i8);
                [_mm256_sub_epi8(x[0], by), _mm256_sub_epi8(x[1], by)]
            })
        }
        #[inline(always)]
        fn scaled(self, x: Pair<__m256i>, scale: Pair<__m256i>, base: Pair<__m256i>) -> (Pair<__m256i>, Pair<__m256i>) {
            // Where there are tiles, there are wider vectors.
            let low = half_scaled(self, x[0], scale[0], base[0]);
            let high = half_scaled(self, x[1], scale[1], base[1]);
            ([low.0, high.0], [low.1, high.1])
        }
        #[inline(always)]
        fn lookup(self, table: &[u8; 16], x: Pair<__m256i>) -> Pair<__m256i> {
            with!(self, {
                let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast()));
                [_mm256_shuffle_epi8(table, x[0]), _mm256_shuffle_epi8(table, x[1])]
            })
        }
        #[inline(always)]
        fn none(self) -> Pair<__m256i> {
            with!(self, [_mm256_setzero_si256(); 2])
        }
        #[inline(always)]
        fn dots<const R: usize>(
            self,
            wide: bool,
            sums: &mut [Pair<__m256i>; R],
            on_way: &mut [Pair<__m256i>; R],
            q: Pair<__m256i>,
            a: &[i32],
        ) {
            assert!(R == 0 || a.len() > (R - 1) * PITCH);
            with!(self, {
                if !wide {
                    if let Some(on_way) = on_way.as_mut_slice().as_mut_array::<4>() {
                        return dots4(on_way, q, a);
                    }
                    for r in 0..R {
                        let a = _mm256_set1_epi32(a[r * PITCH]);
                        on_way[r][0] = _mm256_add_epi16(on_way[r][0], _mm256_maddubs_epi16(q[0], a));
                        on_way[r][1] = _mm256_add_epi16(on_way[r][1], _mm256_maddubs_epi16(q[1], a));
                    }
                    return;
                }
                // As magnitudes, up to 128, and the activations with the codes' signs: two such products fit into 16 bits.
                let top = _mm256_set1_epi8(i8::MIN);
                let q = [_mm256_xor_si256(q[0], top), _mm256_xor_si256(q[1], top)];
                let magnitude = [_mm256_abs_epi8(q[0]), _mm256_abs_epi8(q[1])];
                let ones = _mm256_set1_epi16(1);
                if let Some(sums) = sums.as_mut_slice().as_mut_array::<4>() {
                    return wide_dots4(sums, q, magnitude, a);
                }
                for r in 0..R {
                    let a = _mm256_set1_epi32(a[r * PITCH]);
                    let low = _mm256_maddubs_epi16(magnitude[0], _mm256_sign_epi8(a, q[0]));
                    let high = _mm256_maddubs_epi16(magnitude[1], _mm256_sign_epi8(a, q[1]));
                    sums[r][0] = _mm256_add_epi32(sums[r][0], _mm256_madd_epi16(low, ones));
                    sums[r][1] = _mm256_add_epi32(sums[r][1], _mm256_madd_epi16(high, ones));
                }
            });
        }
        #[inline(always)]
        fn settle<const R: usize>(self, sums: &mut [Pair<__m256i>; R], on_way: &mut [Pair<__m256i>; R]) {
            with!(self, add_products(sums, on_way, [_mm256_set1_epi16(1); 2]));
        }
        #[inline(always)]
        fn settle_scaled<const R: usize>(
            self,
            sums: &mut [Pair<__m256i>; R],
            on_way: &mut [Pair<__m256i>; R],
            scale: Pair<__m256i>,
        ) {
            // In both halves of a lane, as what is on its way is.
            let scale = [twice(self, scale[0]), twice(self, scale[1])];
            with!(self, add_products(sums, on_way, scale));
        }
        #[inline(always)]
        fn splat(self, x: i32) -> Pair<__m256i> {
            with!(self, [_mm256_set1_epi32(x); 2])
        }
        #[inline(always)]
        fn load_i32(self, x: &[i32]) -> Pair<__m256i> {
            self.bytes(bytemuck::cast_slice(x))
        }
        #[inline(always)]
        fn signed(self, x: &[u8]) -> Pair<__m256i> {
            let x: &[u8; 16] = array(x);
            with!(self, {
                let x = _mm_loadu_si128(x.as_ptr().cast());
                [_mm256_cvtepi8_epi32(x), _mm256_cvtepi8_epi32(_mm_srli_si128::<8>(x))]
            })
        }
        #[inline(always)]
        fn unsigned(self, x: &[u8], right: u32, mask: i32) -> Pair<__m256i> {
            let x: &[u8; 16] = array(x);
            with!(self, {
                let (x, right) = (_mm_loadu_si128(x.as_ptr().cast()), _mm_cvtsi32_si128(right as i32));
                let (low, high) = (_mm256_cvtepu8_epi32(x), _mm256_cvtepu8_epi32(_mm_srli_si128::<8>(x)));
                let mask = _mm256_set1_epi32(mask);
                [
                    _mm256_and_si256(_mm256_srl_epi32(low, right), mask),
                    _mm256_and_si256(_mm256_srl_epi32(high, right), mask),
                ]
            })
        }
        #[inline(always)]
        fn words(self, x: &[u8]) -> Pair<__m256i> {
            let x: &[u8; 32] = array(x);
            with!(self, {
                let x = x.as_ptr().cast::<__m128i>();
                [_mm256_cvtepu16_epi32(_mm_loadu_si128(x)), _mm256_cvtepu16_epi32(_mm_loadu_si128(x.add(1)))]
            })
        }
        #[inline(always)]
        fn add_pairs(self, a: Pair<__m256i>, b: Pair<__m256i>, c: Pair<__m256i>) -> Pair<__m256i> {
            with!(self, {
                [
                    _mm256_add_epi32(_mm256_madd_epi16(a[0], b[0]), c[0]),
                    _mm256_add_epi32(_mm256_madd_epi16(a[1], b[1]), c[1]),
                ]
            })
        }
        #[inline(always)]
        fn flip(self, x: Pair<__m256i>) -> Pair<__m256i> {
            with!(self, {
                let bit = _mm256_set1_epi32(0x8000);
                [_mm256_xor_si256(x[0], bit), _mm256_xor_si256(x[1], bit)]
            })
        }
        #[inline(always)]
        fn mul_add(self, a: Pair<__m256i>, b: Pair<__m256i>, c: Pair<__m256i>) -> Pair<__m256i> {
            with!(self, {
                [
                    _mm256_add_epi32(_mm256_mullo_epi32(a[0], b[0]), c[0]),
                    _mm256_add_epi32(_mm256_mullo_epi32(a[1], b[1]), c[1]),
                ]
            })
        }
        #[inline(always)]
        fn splat_f32(self, x: f32) -> Pair<__m256> {
            with!(self, [_mm256_set1_ps(x); 2])
        }
        #[inline(always)]
        fn halves(self, x: &[u8]) -> Pair<__m256> {
            let x: &[u8; 32] = array(x);
            with!(self, {
                let x = x.as_ptr().cast::<__m128i>();
                [_mm256_cvtph_ps(_mm_loadu_si128(x)), _mm256_cvtph_ps(_mm_loadu_si128(x.add(1)))]
            })
        }
        #[inline(always)]
        fn load(self, x: &[f32]) -> Pair<__m256> {
            let x: &[f32; 16] = array(x);
            with!(self, [_mm256_loadu_ps(x.as_ptr()), _mm256_loadu_ps(x.as_ptr().add(8))])
        }
        #[inline(always)]
        fn store(self, x: Pair<__m256>, out: &mut [f32]) {
            let out: &mut [f32; 16] = out.first_chunk_mut().expect("16 elements");
            with!(self, {
                _mm256_storeu_ps(out.as_mut_ptr(), x[0]);
                _mm256_storeu_ps(out.as_mut_ptr().add(8), x[1]);
            });
        }
        #[inline(always)]
        fn float(self, x: Pair<__m256i>) -> Pair<__m256> {
            with!(self, [_mm256_cvtepi32_ps(x[0]), _mm256_cvtepi32_ps(x[1])])
        }
        #[inline(always)]
        fn mul(self, a: Pair<__m256>, b: Pair<__m256>) -> Pair<__m256> {
            with!(self, [_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])])
        }
        #[inline(always)]
        fn fma(self, a: Pair<__m256>, b: Pair<__m256>, c: Pair<__m256>) -> Pair<__m256> {
            with!(self, [_mm256_fmadd_ps(a[0], b[0], c[0]), _mm256_fmadd_ps(a[1], b[1], c[1])])
        }
        #[inline(always)]
        fn fnma(self, a: Pair<__m256>, b: Pair<__m256>, c: Pair<__m256>) -> Pair<__m256> {
            with!(self, [_mm256_fnmadd_ps(a[0], b[0], c[0]), _mm256_fnmadd_ps(a[1], b[1], c[1])])
        }
    }

    /// Moves the two halves of each lane of `on_way`, times those of `by`, to `sums`.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn add_products<const R: usize>(sums: &mut [Pair<__m256i>; R], on_way: &mut [Pair<__m256i>; R], by: Pair<__m256i>) {
        for r in 0..R {
            sums[r][0] = _mm256_add_epi32(sums[r][0], _mm256_madd_epi16(on_way[r][0], by[0]));
            sums[r][1] = _mm256_add_epi32(sums[r][1], _mm256_madd_epi16(on_way[r][1], by[1]));
            on_way[r] = [_mm256_setzero_si256(); 2];
        }
    }

    /// The lower halves of lanes, twice.
    #[inline(always)]
    fn twice(v: Avx2, x: __m256i) -> __m256i {
        with!(v, _mm256_or_si256(_mm256_and_si256(x, _mm256_set1_epi32(0xffff)), _mm256_slli_epi32::<16>(x)))
    }

    /// Bytes of even and of odd place are multiplied in 16 bits each, and their parts put together again.
    #[inline(always)]
    fn half_scaled(v: Avx2, x: __m256i, scale: __m256i, base: __m256i) -> (__m256i, __m256i) {
        let (scale, base) = (twice(v, scale), twice(v, base));
        with!(v, {
            let low = _mm256_set1_epi16(0xff);
            let even = _mm256_add_epi16(_mm256_mullo_epi16(_mm256_and_si256(x, low), scale), base);
            let odd = _mm256_add_epi16(_mm256_mullo_epi16(_mm256_srli_epi16::<8>(x), scale), base);
            let high_bytes = _mm256_or_si256(_mm256_srli_epi16::<8>(even), _mm256_andnot_si256(low, odd));
            (high_bytes, _mm256_or_si256(_mm256_and_si256(even, low), _mm256_slli_epi16::<8>(odd)))
        })
    }

    /// Adds to the sums of four rows what `$products` makes of a row's word, `{x}`: `{y}` of the first half, `{x}` of the second. For
    /// the reason that [`dots8`] has: left to the compiler, which also spills what it has broadcast, products of 512 rows took 1.15
    /// times as long, and of wide codes 1.4.
    macro_rules! four_rows {
        ($sums:expr, $a:expr, $products:literal, $add:literal, $($operands:tt)*) => {{
            let a = &$a[..3 * PITCH + 1];
            let [[s0, t0], [s1, t1], [s2, t2], [s3, t3]] = $sums;
            // SAFETY: the instructions are those of the function's features; the last word read is the slice's last.
            unsafe {
                std::arch::asm!(
                    "vpbroadcastd {x}, dword ptr [{a}]",
                    $products, concat!($add, " {s0}, {s0}, {y}"), concat!($add, " {t0}, {t0}, {x}"),
                    "vpbroadcastd {x}, dword ptr [{a} + {pitch}]",
                    $products, concat!($add, " {s1}, {s1}, {y}"), concat!($add, " {t1}, {t1}, {x}"),
                    "vpbroadcastd {x}, dword ptr [{a} + 2 * {pitch}]",
                    $products, concat!($add, " {s2}, {s2}, {y}"), concat!($add, " {t2}, {t2}, {x}"),
                    "vpbroadcastd {x}, dword ptr [{a} + 3 * {pitch}]",
                    $products, concat!($add, " {s3}, {s3}, {y}"), concat!($add, " {t3}, {t3}, {x}"),
                    s0 = inout(ymm_reg) *s0, t0 = inout(ymm_reg) *t0, s1 = inout(ymm_reg) *s1, t1 = inout(ymm_reg) *t1,
                    s2 = inout(ymm_reg) *s2, t2 = inout(ymm_reg) *t2, s3 = inout(ymm_reg) *s3, t3 = inout(ymm_reg) *t3,
                    $($operands)*, x = out(ymm_reg) _, y = out(ymm_reg) _,
                    a = in(reg) a.as_ptr(), pitch = const 4 * PITCH,
                    options(readonly, nostack, preserves_flags),
                );
            }
        }};
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn dots4(on_way: &mut [Pair<__m256i>; 4], q: Pair<__m256i>, a: &[i32]) {
        four_rows!(
            on_way, a, "vpmaddubsw {y}, {q0}, {x}\nvpmaddubsw {x}, {q1}, {x}", "vpaddw",
            q0 = in(ymm_reg) q[0], q1 = in(ymm_reg) q[1]
        );
    }

    /// The same for signed codes and their magnitudes.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn wide_dots4(sums: &mut [Pair<__m256i>; 4], q: Pair<__m256i>, magnitude: Pair<__m256i>, a: &[i32]) {
        four_rows!(
            sums, a,
            "vpsignb {y}, {x}, {q0}\nvpsignb {x}, {x}, {q1}\n\
             vpmaddubsw {y}, {m0}, {y}\nvpmaddubsw {x}, {m1}, {x}\n\
             vpmaddwd {y}, {y}, {ones}\nvpmaddwd {x}, {x}, {ones}", "vpaddd",
            q0 = in(ymm_reg) q[0], q1 = in(ymm_reg) q[1], m0 = in(ymm_reg) magnitude[0], m1 = in(ymm_reg) magnitude[1],
            ones = in(ymm_reg) _mm256_set1_epi16(1)
        );
    }

    /// Eight independent products. Written out, as compilers would rather finish one row before they begin the next, and
    /// then wait for every instruction's result: that is three times slower.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    fn dots8(sums: &mut [__m512i; 8], q: __m512i, a: &[i32]) {
        let a = &a[..7 * PITCH + 1];
        let [s0, s1, s2, s3, s4, s5, s6, s7] = sums;
        // SAFETY: the instructions are those of the function's features; the last word read is the slice's last.
        unsafe {
            std::arch::asm!(
                "vpdpbusd {0}, {q}, dword ptr [{a}]{{1to16}}",
                "vpdpbusd {1}, {q}, dword ptr [{a} + {pitch}]{{1to16}}",
                "vpdpbusd {2}, {q}, dword ptr [{a} + 2 * {pitch}]{{1to16}}",
                "vpdpbusd {3}, {q}, dword ptr [{a} + 3 * {pitch}]{{1to16}}",
                "vpdpbusd {4}, {q}, dword ptr [{a} + 4 * {pitch}]{{1to16}}",
                "vpdpbusd {5}, {q}, dword ptr [{a} + 5 * {pitch}]{{1to16}}",
                "vpdpbusd {6}, {q}, dword ptr [{a} + 6 * {pitch}]{{1to16}}",
                "vpdpbusd {7}, {q}, dword ptr [{a} + 7 * {pitch}]{{1to16}}",
                inout(zmm_reg) *s0, inout(zmm_reg) *s1, inout(zmm_reg) *s2, inout(zmm_reg) *s3,
                inout(zmm_reg) *s4, inout(zmm_reg) *s5, inout(zmm_reg) *s6, inout(zmm_reg) *s7,
                q = in(zmm_reg) q, a = in(reg) a.as_ptr(), pitch = const 4 * PITCH,
                options(readonly, nostack, preserves_flags),
            );
        }
    }

    impl Integers for Vnni {
        const ROWS: usize = 8;
        const TILES: bool = true;
        type B = __m512i;
        type I = __m512i;
        type P = ();
        type F = __m512;

        #[inline(always)]
        fn bytes(self, x: &[u8]) -> __m512i {
            let x: &[u8; 64] = array(x);
            with!(self, _mm512_loadu_si512(x.as_ptr().cast()))
        }
        #[inline(always)]
        fn store_bytes(self, x: __m512i, out: &mut [u8]) {
            let out: &mut [u8; 64] = out.first_chunk_mut().expect("64 bytes");
            with!(self, _mm512_storeu_si512(out.as_mut_ptr().cast(), x));
        }
        #[inline(always)]
        fn field(self, x: __m512i, right: u32, left: u32, mask: u8) -> __m512i {
            with!(self, {
                let (right, left) = (_mm_cvtsi32_si128(right as i32), _mm_cvtsi32_si128(left as i32));
                _mm512_and_si512(_mm512_sll_epi16(_mm512_srl_epi16(x, right), left), _mm512_set1_epi8(mask as i8))
            })
        }
        #[inline(always)]
        fn or(self, a: __m512i, b: __m512i) -> __m512i {
            with!(self, _mm512_or_si512(a, b))
        }
        #[inline(always)]
        fn sub_bytes(self, x: __m512i, by: u8) -> __m512i {
            with!(self, _mm512_sub_epi8(x, _mm512_set1_epi8(by as i8)))
        }
        #[inline(always)]
        fn scaled(self, x: __m512i, scale: __m512i, base: __m512i) -> (__m512i, __m512i) {
            with!(self, {
                let (word, low) = (_mm512_set1_epi32(0xffff), _mm512_set1_epi16(0xff));
                let scale = _mm512_or_si512(_mm512_and_si512(scale, word), _mm512_slli_epi32::<16>(scale));
                let base = _mm512_or_si512(_mm512_and_si512(base, word), _mm512_slli_epi32::<16>(base));
                // Bytes of even and of odd place are multiplied in 16 bits each, and their parts put together again.
                let even = _mm512_add_epi16(_mm512_mullo_epi16(_mm512_and_si512(x, low), scale), base);
                let odd = _mm512_add_epi16(_mm512_mullo_epi16(_mm512_srli_epi16::<8>(x), scale), base);
                let high_bytes = _mm512_or_si512(_mm512_srli_epi16::<8>(even), _mm512_andnot_si512(low, odd));
                (high_bytes, _mm512_or_si512(_mm512_and_si512(even, low), _mm512_slli_epi16::<8>(odd)))
            })
        }
        #[inline(always)]
        fn lookup(self, table: &[u8; 16], x: __m512i) -> __m512i {
            with!(self, {
                let table = _mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast()));
                _mm512_shuffle_epi8(table, x)
            })
        }
        #[inline(always)]
        fn none(self) {}
        #[inline(always)]
        fn dots<const R: usize>(self, _: bool, sums: &mut [__m512i; R], _: &mut [(); R], q: __m512i, a: &[i32]) {
            assert!(R == 0 || a.len() > (R - 1) * PITCH);
            if let Some(sums) = sums.as_mut_slice().as_mut_array::<8>() {
                with!(self, dots8(sums, q, a));
                return;
            }
            for r in 0..R {
                sums[r] = with!(self, _mm512_dpbusd_epi32(sums[r], q, _mm512_set1_epi32(a[r * PITCH])));
            }
        }
        #[inline(always)]
        fn settle<const R: usize>(self, _: &mut [__m512i; R], _: &mut [(); R]) {}
        #[inline(always)]
        fn settle_scaled<const R: usize>(self, _: &mut [__m512i; R], _: &mut [(); R], _: __m512i) {}
        #[inline(always)]
        fn splat(self, x: i32) -> __m512i {
            with!(self, _mm512_set1_epi32(x))
        }
        #[inline(always)]
        fn load_i32(self, x: &[i32]) -> __m512i {
            self.bytes(bytemuck::cast_slice(x))
        }
        #[inline(always)]
        fn signed(self, x: &[u8]) -> __m512i {
            let x: &[u8; 16] = array(x);
            with!(self, _mm512_cvtepi8_epi32(_mm_loadu_si128(x.as_ptr().cast())))
        }
        #[inline(always)]
        fn unsigned(self, x: &[u8], right: u32, mask: i32) -> __m512i {
            let x: &[u8; 16] = array(x);
            with!(self, {
                let x = _mm512_cvtepu8_epi32(_mm_loadu_si128(x.as_ptr().cast()));
                _mm512_and_si512(_mm512_srl_epi32(x, _mm_cvtsi32_si128(right as i32)), _mm512_set1_epi32(mask))
            })
        }
        #[inline(always)]
        fn words(self, x: &[u8]) -> __m512i {
            let x: &[u8; 32] = array(x);
            with!(self, _mm512_cvtepu16_epi32(_mm256_loadu_si256(x.as_ptr().cast())))
        }
        #[inline(always)]
        fn add_pairs(self, a: __m512i, b: __m512i, c: __m512i) -> __m512i {
            with!(self, _mm512_dpwssd_epi32(c, a, b))
        }
        #[inline(always)]
        fn flip(self, x: __m512i) -> __m512i {
            with!(self, _mm512_xor_si512(x, _mm512_set1_epi32(0x8000)))
        }
        #[inline(always)]
        fn mul_add(self, a: __m512i, b: __m512i, c: __m512i) -> __m512i {
            with!(self, _mm512_add_epi32(_mm512_mullo_epi32(a, b), c))
        }
        #[inline(always)]
        fn splat_f32(self, x: f32) -> __m512 {
            with!(self, _mm512_set1_ps(x))
        }
        #[inline(always)]
        fn halves(self, x: &[u8]) -> __m512 {
            let x: &[u8; 32] = array(x);
            with!(self, _mm512_cvtph_ps(_mm256_loadu_si256(x.as_ptr().cast())))
        }
        #[inline(always)]
        fn load(self, x: &[f32]) -> __m512 {
            let x: &[f32; 16] = array(x);
            with!(self, _mm512_loadu_ps(x.as_ptr()))
        }
        #[inline(always)]
        fn store(self, x: __m512, out: &mut [f32]) {
            let out: &mut [f32; 16] = out.first_chunk_mut().expect("16 elements");
            with!(self, _mm512_storeu_ps(out.as_mut_ptr(), x));
        }
        #[inline(always)]
        fn float(self, x: __m512i) -> __m512 {
            with!(self, _mm512_cvtepi32_ps(x))
        }
        #[inline(always)]
        fn mul(self, a: __m512, b: __m512) -> __m512 {
            with!(self, _mm512_mul_ps(a, b))
        }
        #[inline(always)]
        fn fma(self, a: __m512, b: __m512, c: __m512) -> __m512 {
            with!(self, _mm512_fmadd_ps(a, b, c))
        }
        #[inline(always)]
        fn fnma(self, a: __m512, b: __m512, c: __m512) -> __m512 {
            with!(self, _mm512_fnmadd_ps(a, b, c))
        }
    }
}
