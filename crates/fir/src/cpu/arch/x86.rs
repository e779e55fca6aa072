//! AVX2 + FMA (8 lanes) and AVX-512 (16 lanes).
//!
//! Every method below is sound for the same reason: its `self` exists, so `detect` saw the features on this CPU, and
//! loads and stores go through arrays whose length was checked.

use std::arch::x86_64::*;
use std::sync::LazyLock;

use super::amx::Amx;
use crate::cpu::vector::{Kernel, Vector};
use crate::tensor::{E2M1_VALUES, E2m1x2, E4m3, E5m2, Element, bf16, f16};

/// Proof that this CPU has AVX2, FMA and F16C; only `detect` makes one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx2(());

/// Proof that this CPU has AVX-512 F, BW, DQ and VL, and all that [`Avx2`] proves; only `detect` makes one.
///
/// With `PAIRS` also AVX-512 BF16 and VBMI, which `pairs` saw or an [`Amx`] proves: then the factors of [`Vector::fma`], and nothing else, are two numbers of bf16 in every lane, whose products
/// are both added.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx512<const PAIRS: bool = false>(());

/// Bytes of a core's first-level cache for data, if it is one of AMD's; else 0.
pub(crate) fn first_level_bytes() -> usize {
    // Asked once: a virtual machine takes 20 µs and more to answer.
    static KILOBYTES: LazyLock<u32> = LazyLock::new(|| match __cpuid(0x8000_0000).eax {
        0x8000_0005.. => __cpuid(0x8000_0005).ecx >> 24,
        _ => 0,
    });
    (*KILOBYTES as usize) << 10
}

impl Avx2 {
    pub(crate) fn detect() -> Option<Self> {
        (is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c"))
            .then_some(Self(()))
    }

    /// Runs `kernel` compiled for this level.
    pub(crate) fn run<K: Kernel>(self, kernel: K) -> K::Out {
        #[target_feature(enable = "avx2,fma,f16c")]
        fn go<K: Kernel>(kernel: K, v: Avx2) -> K::Out {
            kernel.run(v)
        }
        // SAFETY: `self` exists, so `detect` saw these features on this CPU.
        unsafe { go(kernel, self) }
    }
}

impl Avx512 {
    pub(crate) fn detect() -> Option<Self> {
        (Avx2::detect().is_some()
            && is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl"))
        .then_some(Self(()))
    }

    /// The same with sums of pairs, where the CPU has them, and permutations of bytes (VBMI).
    pub(crate) fn pairs(self) -> Option<Avx512<true>> {
        (is_x86_feature_detected!("avx512bf16") && is_x86_feature_detected!("avx512vbmi")).then_some(Avx512(()))
    }
}

impl<const PAIRS: bool> Avx512<PAIRS> {
    /// The lower level, which this one proves.
    pub(crate) fn avx2(self) -> Avx2 {
        Avx2(())
    }

    /// Runs `kernel` compiled for this level.
    pub(crate) fn run<K: Kernel>(self, kernel: K) -> K::Out {
        #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
        fn go<K: Kernel, V: Vector>(kernel: K, v: V) -> K::Out {
            kernel.run(v)
        }
        #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
        fn go_pairs<K: Kernel, V: Vector>(kernel: K, v: V) -> K::Out {
            kernel.run(v)
        }
        // SAFETY: `self` exists, so `detect`, and `pairs` for `PAIRS`, saw these features on this CPU.
        unsafe { if PAIRS { go_pairs(kernel, self) } else { go(kernel, self) } }
    }
}

/// A computation with sums of pairs beside vectors of f32.
pub(crate) trait PairKernel {
    /// What it returns.
    type Out;
    /// The algorithm. Implementations are `#[inline(always)]`.
    fn run(self, v: Avx512, pairs: Avx512<true>) -> Self::Out;
}

impl Avx512<true> {
    /// What tiles prove too.
    pub(super) fn of(_: Amx) -> Self {
        Self(())
    }

    /// The columns of two rows side by side, as pairs: of each eight the first four, and the last four.
    #[inline(always)]
    pub(crate) fn interleave(self, a: __m512, b: __m512) -> [__m512; 2] {
        with!(self, {
            let (a, b) = (_mm512_castps_si512(a), _mm512_castps_si512(b));
            [_mm512_castsi512_ps(_mm512_unpacklo_epi16(a, b)), _mm512_castsi512_ps(_mm512_unpackhi_epi16(a, b))]
        })
    }

    /// Numbers rounded to bf16, those of `a` first, as pairs.
    #[inline(always)]
    pub(crate) fn rounded(self, a: __m512, b: __m512) -> __m512 {
        // The same bits, as another type.
        with!(self, std::mem::transmute::<__m512bh, __m512>(_mm512_cvtne2ps_pbh(b, a)))
    }

    /// Runs `kernel` compiled for this level.
    pub(crate) fn run_pairs<K: PairKernel>(self, kernel: K) -> K::Out {
        #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vbmi")]
        fn go<K: PairKernel>(kernel: K, pairs: Avx512<true>) -> K::Out {
            kernel.run(Avx512(()), pairs)
        }
        // SAFETY: `self` exists, so this CPU has these features.
        unsafe { go(kernel, self) }
    }
}

/// Calls an intrinsic that the token allows.
macro_rules! with {
    ($token:expr, $e:expr) => {{
        let _proof = $token;
        // SAFETY: the token exists, so `detect` saw the features on this CPU; memory operands are arrays of the
        // full vector's size, borrowed at the call, and the loads and stores are the unaligned ones.
        unsafe { $e }
    }};
}
pub(super) use with;

#[inline(always)]
fn chunk<T, const N: usize>(x: &[T]) -> *const T {
    x.first_chunk::<N>().expect("a full vector").as_ptr()
}

#[inline(always)]
fn chunk_mut<T, const N: usize>(x: &mut [T]) -> *mut T {
    x.first_chunk_mut::<N>().expect("a full vector").as_mut_ptr()
}

#[inline(always)]
fn prefetch_lines<T>(x: &[T]) {
    let start = x.as_ptr().cast::<i8>();
    for at in (0..size_of_val(x)).step_by(64) {
        // SAFETY: SSE is in the x86-64 baseline, a prefetch reads nothing, and `at` stays inside `x`.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(start.add(at)) };
    }
}

/// Values of the sixteen e2m1 codes.
const FP4: [f32; 16] = {
    let mut all = [0.0; 16];
    let mut i = 0;
    while i < 8 {
        all[i] = E2M1_VALUES[i];
        all[i + 8] = -E2M1_VALUES[i];
        i += 1;
    }
    all
};

/// What `round_to` of `tensor/dtype.rs` does, by lanes: the bits of `$exp` exponent and `$man` mantissa bits without the
/// sign, which may exceed the format. A macro, as a shift by a constant of a generic function is no constant.
macro_rules! round_to_256 {
    ($x:expr, $exp:literal, $man:literal) => {{
        const BIAS: i32 = (1 << ($exp - 1)) - 1;
        let bits = _mm256_and_si256(_mm256_castps_si256($x), _mm256_set1_epi32(i32::MAX));
        let shifter = _mm256_set1_epi32((127 + 24 - BIAS - $man) << 23);
        let sum = _mm256_add_ps(_mm256_castsi256_ps(bits), _mm256_castsi256_ps(shifter));
        let subnormal = _mm256_sub_epi32(_mm256_castps_si256(sum), shifter);
        let odd = _mm256_and_si256(_mm256_srli_epi32::<{ 23 - $man }>(bits), _mm256_set1_epi32(1));
        let half_below = _mm256_set1_epi32((1 << (22 - $man)) - 1);
        let rounded = _mm256_srli_epi32::<{ 23 - $man }>(_mm256_add_epi32(_mm256_add_epi32(bits, half_below), odd));
        let normal = _mm256_sub_epi32(rounded, _mm256_set1_epi32((127 - BIAS) << $man));
        _mm256_blendv_epi8(normal, subnormal, _mm256_cmpgt_epi32(_mm256_set1_epi32((128 - BIAS) << 23), bits))
    }};
}

/// As [`round_to_256`].
macro_rules! round_to_512 {
    ($x:expr, $exp:literal, $man:literal) => {{
        const BIAS: i32 = (1 << ($exp - 1)) - 1;
        let bits = _mm512_and_si512(_mm512_castps_si512($x), _mm512_set1_epi32(i32::MAX));
        let shifter = _mm512_set1_epi32((127 + 24 - BIAS - $man) << 23);
        let sum = _mm512_add_ps(_mm512_castsi512_ps(bits), _mm512_castsi512_ps(shifter));
        let subnormal = _mm512_sub_epi32(_mm512_castps_si512(sum), shifter);
        let odd = _mm512_and_si512(_mm512_srli_epi32::<{ 23 - $man }>(bits), _mm512_set1_epi32(1));
        let half_below = _mm512_set1_epi32((1 << (22 - $man)) - 1);
        let rounded = _mm512_srli_epi32::<{ 23 - $man }>(_mm512_add_epi32(_mm512_add_epi32(bits, half_below), odd));
        let normal = _mm512_sub_epi32(rounded, _mm512_set1_epi32((127 - BIAS) << $man));
        let small = _mm512_cmplt_epi32_mask(bits, _mm512_set1_epi32((128 - BIAS) << 23));
        _mm512_mask_blend_epi32(small, normal, subnormal)
    }};
}

/// The lowest byte of each lane.
#[inline(always)]
fn low_bytes(token: Avx2, x: __m256i) -> __m128i {
    with!(token, {
        let x = _mm256_packus_epi32(x, x);
        let x = _mm256_packus_epi16(x, x);
        _mm_unpacklo_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256::<1>(x))
    })
}

impl Vector for Avx2 {
    const LANES: usize = 8;
    type F = __m256;
    type M = __m256;

    #[inline(always)]
    fn call<K: Kernel>(self, kernel: K) -> K::Out {
        self.run(kernel)
    }
    #[inline(always)]
    fn splat(self, x: f32) -> __m256 {
        with!(self, _mm256_set1_ps(x))
    }
    #[inline(always)]
    fn load(self, x: &[f32]) -> __m256 {
        with!(self, _mm256_loadu_ps(chunk::<_, 8>(x)))
    }
    #[inline(always)]
    fn load_f16(self, x: &[f16]) -> __m256 {
        with!(self, _mm256_cvtph_ps(_mm_loadu_si128(chunk::<_, 8>(x).cast())))
    }
    #[inline(always)]
    fn load_bf16(self, x: &[bf16]) -> __m256 {
        with!(self, {
            let x = _mm256_cvtepu16_epi32(_mm_loadu_si128(chunk::<_, 8>(x).cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(x))
        })
    }
    #[inline(always)]
    fn load_e4m3(self, x: &[E4m3]) -> __m256 {
        with!(self, {
            let x = _mm_cvtepu8_epi16(_mm_loadl_epi64(chunk::<_, 8>(x).cast()));
            let magnitude = _mm_and_si128(x, _mm_set1_epi16(0x7f));
            let sign = _mm_slli_epi16::<8>(_mm_and_si128(x, _mm_set1_epi16(0x80)));
            // As f16 it is the value over 2^8, subnormals included; a multiplication of f32 subnormals is done by
            // microcode, and took 70 % of a decode's time. 0x7f is NaN.
            let nan = _mm_cmpeq_epi16(magnitude, _mm_set1_epi16(0x7f));
            let half = _mm_or_si128(
                _mm_or_si128(sign, _mm_slli_epi16::<7>(magnitude)),
                _mm_and_si128(nan, _mm_set1_epi16(0x7e00)),
            );
            _mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(256.0))
        })
    }
    #[inline(always)]
    fn load_e5m2(self, x: &[E5m2]) -> __m256 {
        with!(self, {
            let x = _mm_cvtepu8_epi16(_mm_loadl_epi64(chunk::<_, 8>(x).cast()));
            _mm256_cvtph_ps(_mm_slli_epi16::<8>(x))
        })
    }
    #[inline(always)]
    fn load_e2m1(self, x: &[E2m1x2]) -> __m256 {
        let x = x.first_chunk::<4>().expect("a full vector").map(|x| x.0);
        with!(self, {
            let x = _mm_cvtepu8_epi16(_mm_cvtsi32_si128(i32::from_le_bytes(x)));
            let codes = _mm_and_si128(_mm_or_si128(x, _mm_slli_epi16::<4>(x)), _mm_set1_epi16(0x0f0f));
            let codes = _mm256_cvtepi8_epi32(codes);
            let sign = _mm256_and_si256(_mm256_slli_epi32::<28>(codes), _mm256_set1_epi32(i32::MIN));
            // The table is looked up by the lowest three bits.
            let magnitude = _mm256_permutevar8x32_ps(_mm256_loadu_ps(E2M1_VALUES.as_ptr()), codes);
            _mm256_or_ps(magnitude, _mm256_castsi256_ps(sign))
        })
    }
    #[inline(always)]
    fn store(self, x: __m256, out: &mut [f32]) {
        with!(self, _mm256_storeu_ps(chunk_mut::<_, 8>(out), x));
    }
    #[inline(always)]
    fn store_f16(self, x: __m256, out: &mut [f16]) {
        with!(self, {
            let h = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x);
            _mm_storeu_si128(chunk_mut::<_, 8>(out).cast(), h);
        });
    }
    #[inline(always)]
    fn store_bf16(self, x: __m256, out: &mut [bf16]) {
        with!(self, {
            let bits = _mm256_castps_si256(x);
            let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
            let rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
            let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(x, x));
            let quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x40_0000));
            let high = _mm256_srli_epi32::<16>(_mm256_blendv_epi8(rounded, quiet, nan));
            let packed = _mm256_packus_epi32(high, high);
            let packed = _mm256_permute4x64_epi64::<0b1000>(packed);
            _mm_storeu_si128(chunk_mut::<_, 8>(out).cast(), _mm256_castsi256_si128(packed));
        });
    }
    #[inline(always)]
    fn store_i8(self, x: __m256, out: &mut [i8]) {
        with!(self, {
            let x = _mm256_cvtps_epi32(x);
            let x = _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256::<1>(x));
            _mm_storel_epi64(chunk_mut::<_, 8>(out).cast(), _mm_packs_epi16(x, x));
        });
    }
    #[inline(always)]
    fn store_e4m3(self, x: __m256, out: &mut [E4m3]) {
        with!(self, {
            let code = _mm256_min_epu32(round_to_256!(x, 4, 3), _mm256_set1_epi32(0x7e));
            let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(x, x));
            let code = _mm256_blendv_epi8(code, _mm256_set1_epi32(0x7f), nan);
            let sign = _mm256_and_si256(_mm256_srli_epi32::<24>(_mm256_castps_si256(x)), _mm256_set1_epi32(0x80));
            _mm_storel_epi64(chunk_mut::<_, 8>(out).cast(), low_bytes(self, _mm256_or_si256(code, sign)));
        });
    }
    #[inline(always)]
    fn store_e5m2(self, x: __m256, out: &mut [E5m2]) {
        with!(self, {
            let code = _mm256_min_epu32(round_to_256!(x, 5, 2), _mm256_set1_epi32(0x7b));
            let bits = _mm256_castps_si256(x);
            let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(x, x));
            let code = _mm256_blendv_epi8(code, _mm256_set1_epi32(0x7f), nan);
            let magnitude = _mm256_and_si256(bits, _mm256_set1_epi32(i32::MAX));
            let infinite = _mm256_cmpeq_epi32(magnitude, _mm256_set1_epi32(0x7f80_0000));
            let code = _mm256_blendv_epi8(code, _mm256_set1_epi32(0x7c), infinite);
            let sign = _mm256_and_si256(_mm256_srli_epi32::<24>(bits), _mm256_set1_epi32(0x80));
            _mm_storel_epi64(chunk_mut::<_, 8>(out).cast(), low_bytes(self, _mm256_or_si256(code, sign)));
        });
    }
    #[inline(always)]
    fn store_e2m1(self, x: __m256, out: &mut [E2m1x2]) {
        let out = out.first_chunk_mut::<4>().expect("a full vector");
        let pairs = with!(self, {
            let code = _mm256_min_epu32(round_to_256!(x, 2, 1), _mm256_set1_epi32(7));
            let sign = _mm256_and_si256(_mm256_srli_epi32::<28>(_mm256_castps_si256(x)), _mm256_set1_epi32(8));
            let number = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_ORD_Q>(x, x));
            let code = _mm256_and_si256(_mm256_or_si256(code, sign), number);
            // First + 16 * second of every two bytes.
            let pairs = _mm_maddubs_epi16(low_bytes(self, code), _mm_set1_epi16(0x1001));
            _mm_cvtsi128_si32(_mm_packus_epi16(pairs, pairs))
        });
        *out = pairs.to_le_bytes().map(E2m1x2);
    }
    #[inline(always)]
    fn add(self, a: __m256, b: __m256) -> __m256 {
        with!(self, _mm256_add_ps(a, b))
    }
    #[inline(always)]
    fn sub(self, a: __m256, b: __m256) -> __m256 {
        with!(self, _mm256_sub_ps(a, b))
    }
    #[inline(always)]
    fn mul(self, a: __m256, b: __m256) -> __m256 {
        with!(self, _mm256_mul_ps(a, b))
    }
    #[inline(always)]
    fn div(self, a: __m256, b: __m256) -> __m256 {
        with!(self, _mm256_div_ps(a, b))
    }
    #[inline(always)]
    fn fma(self, a: __m256, b: __m256, c: __m256) -> __m256 {
        with!(self, _mm256_fmadd_ps(a, b, c))
    }
    #[inline(always)]
    fn max(self, a: __m256, b: __m256) -> __m256 {
        with!(self, _mm256_max_ps(a, b))
    }
    #[inline(always)]
    fn min(self, a: __m256, b: __m256) -> __m256 {
        with!(self, _mm256_min_ps(a, b))
    }
    #[inline(always)]
    fn abs(self, a: __m256) -> __m256 {
        with!(self, _mm256_andnot_ps(_mm256_set1_ps(-0.0), a))
    }
    #[inline(always)]
    fn copysign(self, a: __m256, sign: __m256) -> __m256 {
        with!(self, {
            let bit = _mm256_set1_ps(-0.0);
            _mm256_or_ps(_mm256_andnot_ps(bit, a), _mm256_and_ps(bit, sign))
        })
    }
    #[inline(always)]
    fn round(self, a: __m256) -> __m256 {
        with!(self, _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a))
    }
    #[inline(always)]
    fn pow2(self, n: __m256) -> __m256 {
        with!(self, {
            let e = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
            _mm256_castsi256_ps(_mm256_slli_epi32::<23>(e))
        })
    }
    #[inline(always)]
    fn split(self, x: __m256) -> (__m256, __m256) {
        let c = self.max(self.splat(-127.0), self.min(self.splat(128.0), x));
        let n = self.round(c);
        (n, self.sub(c, n))
    }
    #[inline(always)]
    fn scale(self, p: __m256, n: __m256) -> __m256 {
        // Adds to the exponent: from -127 to 128 with p = 1 that gives the bits of 0 and of infinity.
        with!(self, {
            let e = _mm256_slli_epi32::<23>(_mm256_cvtps_epi32(n));
            _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), e))
        })
    }
    #[inline(always)]
    fn lt(self, a: __m256, b: __m256) -> __m256 {
        with!(self, _mm256_cmp_ps::<_CMP_LT_OQ>(a, b))
    }
    #[inline(always)]
    fn select(self, m: __m256, a: __m256, b: __m256) -> __m256 {
        with!(self, _mm256_blendv_ps(b, a, m))
    }
    #[inline(always)]
    fn bits(self, m: __m256) -> u32 {
        with!(self, _mm256_movemask_ps(m)) as u32
    }
    #[inline(always)]
    fn sum(self, a: __m256) -> f32 {
        with!(self, {
            let b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let c = _mm_add_ps(b, _mm_movehl_ps(b, b));
            _mm_cvtss_f32(_mm_add_ss(c, _mm_shuffle_ps::<1>(c, c)))
        })
    }
    #[inline(always)]
    fn sums4(self, a: [__m256; 4]) -> [f32; 4] {
        // Written out: a closure for `map` would be compiled without AVX, every intrinsic in it a call.
        with!(self, {
            let (al, ah) = (_mm256_castps256_ps128(a[0]), _mm256_extractf128_ps::<1>(a[0]));
            let (bl, bh) = (_mm256_castps256_ps128(a[1]), _mm256_extractf128_ps::<1>(a[1]));
            let (cl, ch) = (_mm256_castps256_ps128(a[2]), _mm256_extractf128_ps::<1>(a[2]));
            let (dl, dh) = (_mm256_castps256_ps128(a[3]), _mm256_extractf128_ps::<1>(a[3]));
            sums4_of_128([_mm_add_ps(al, ah), _mm_add_ps(bl, bh), _mm_add_ps(cl, ch), _mm_add_ps(dl, dh)])
        })
    }
    #[inline(always)]
    fn transpose(self, a: [__m256; 16]) -> [__m256; 16] {
        #[inline]
        #[target_feature(enable = "avx2,fma,f16c")]
        fn four(a: __m256, b: __m256, c: __m256, d: __m256) -> [__m256; 4] {
            let (ab, cd) = (_mm256_unpacklo_ps(a, b), _mm256_unpacklo_ps(c, d));
            let (ef, gh) = (_mm256_unpackhi_ps(a, b), _mm256_unpackhi_ps(c, d));
            [
                _mm256_shuffle_ps::<0b01_00_01_00>(ab, cd),
                _mm256_shuffle_ps::<0b11_10_11_10>(ab, cd),
                _mm256_shuffle_ps::<0b01_00_01_00>(ef, gh),
                _mm256_shuffle_ps::<0b11_10_11_10>(ef, gh),
            ]
        }
        let mut out = a;
        with!(self, {
            let (low, high) = (four(a[0], a[1], a[2], a[3]), four(a[4], a[5], a[6], a[7]));
            for i in 0..4 {
                out[i] = _mm256_permute2f128_ps::<0x20>(low[i], high[i]);
                out[4 + i] = _mm256_permute2f128_ps::<0x31>(low[i], high[i]);
            }
        });
        out
    }
    #[inline(always)]
    fn sums8(self, a: [__m256; 8]) -> [f32; 8] {
        // Of two vectors at a time: halves, then quarters, then what is left.
        #[inline]
        #[target_feature(enable = "avx2,fma,f16c")]
        fn halves(a: __m256, b: __m256) -> __m256 {
            _mm256_add_ps(_mm256_blend_ps::<0xf0>(a, b), _mm256_permute2f128_ps::<0x21>(a, b))
        }
        #[inline]
        #[target_feature(enable = "avx2,fma,f16c")]
        fn quarters(a: __m256, b: __m256) -> __m256 {
            let (a, b) = (_mm256_castps_pd(a), _mm256_castps_pd(b));
            let (low, high) = (_mm256_unpacklo_pd(a, b), _mm256_unpackhi_pd(a, b));
            _mm256_add_ps(_mm256_castpd_ps(low), _mm256_castpd_ps(high))
        }
        let mut out = [0f32; 8];
        with!(self, {
            let low = quarters(halves(a[0], a[4]), halves(a[1], a[5]));
            let high = quarters(halves(a[2], a[6]), halves(a[3], a[7]));
            let even = _mm256_shuffle_ps::<0b10_00_10_00>(low, high);
            let odd = _mm256_shuffle_ps::<0b11_01_11_01>(low, high);
            _mm256_storeu_ps(out.as_mut_ptr(), _mm256_add_ps(even, odd));
        });
        out
    }
    #[inline(always)]
    fn max_lane(self, a: __m256) -> f32 {
        with!(self, {
            let b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let c = _mm_max_ps(b, _mm_movehl_ps(b, b));
            _mm_cvtss_f32(_mm_max_ss(c, _mm_shuffle_ps::<1>(c, c)))
        })
    }
    #[inline(always)]
    fn stream<T: Element>(self, from: &[T], to: &mut [T]) {
        assert_eq!(from.len(), to.len());
        let (line, n) = (64 / size_of::<T>(), to.len());
        let head = to.as_ptr().align_offset(64).min(n);
        let end = head + (n - head) / line * line;
        to[..head].copy_from_slice(&from[..head]);
        to[end..].copy_from_slice(&from[end..]);
        let mut at = head;
        while at < end {
            let (from, to) = (from[at..at + line].as_ptr(), to[at..at + line].as_mut_ptr());
            // SAFETY: `self` proves the vectors; both have the 64 bytes, plain numbers, and `to` is aligned to as many.
            unsafe {
                _mm256_stream_si256(to.cast(), _mm256_loadu_si256(from.cast()));
                _mm256_stream_si256(to.cast::<__m256i>().add(1), _mm256_loadu_si256(from.cast::<__m256i>().add(1)));
            }
            at += line;
        }
    }
    #[inline(always)]
    fn fence(self) {
        // SAFETY: SSE is in the x86-64 baseline.
        unsafe { _mm_sfence() };
    }
    #[inline(always)]
    fn prefetch<T>(self, x: &[T]) {
        prefetch_lines(x);
    }
    #[inline(always)]
    fn prefetch_far<T>(self, x: &[T], at: usize) {
        // SAFETY: SSE is in the x86-64 baseline, and a prefetch reads nothing, wherever it points.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(x.as_ptr().wrapping_add(at).cast()) };
    }
}

/// Sums of four 4-lane vectors, each as `(x0 + x2) + (x1 + x3)`.
#[inline(always)]
fn sums4_of_128(a: [__m128; 4]) -> [f32; 4] {
    // SAFETY: SSE is in the x86-64 baseline; the store goes to an array of four.
    unsafe {
        let ab = _mm_add_ps(_mm_movelh_ps(a[0], a[1]), _mm_movehl_ps(a[1], a[0]));
        let cd = _mm_add_ps(_mm_movelh_ps(a[2], a[3]), _mm_movehl_ps(a[3], a[2]));
        let s = _mm_add_ps(_mm_shuffle_ps::<0b10_00_10_00>(ab, cd), _mm_shuffle_ps::<0b11_01_11_01>(ab, cd));
        let mut out = [0f32; 4];
        _mm_storeu_ps(out.as_mut_ptr(), s);
        out
    }
}

impl<const PAIRS: bool> Vector for Avx512<PAIRS> {
    const LANES: usize = 16;
    type F = __m512;
    type M = __mmask16;

    #[inline(always)]
    fn call<K: Kernel>(self, kernel: K) -> K::Out {
        self.run(kernel)
    }
    #[inline(always)]
    fn splat(self, x: f32) -> __m512 {
        with!(self, _mm512_set1_ps(x))
    }
    #[inline(always)]
    fn load(self, x: &[f32]) -> __m512 {
        with!(self, _mm512_loadu_ps(chunk::<_, 16>(x)))
    }
    #[inline(always)]
    fn load_f16(self, x: &[f16]) -> __m512 {
        with!(self, _mm512_cvtph_ps(_mm256_loadu_si256(chunk::<_, 16>(x).cast())))
    }
    #[inline(always)]
    fn load_bf16(self, x: &[bf16]) -> __m512 {
        with!(self, {
            let x = _mm512_cvtepu16_epi32(_mm256_loadu_si256(chunk::<_, 16>(x).cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(x))
        })
    }
    #[inline(always)]
    fn load_e4m3(self, x: &[E4m3]) -> __m512 {
        with!(self, {
            let x = _mm256_cvtepu8_epi16(_mm_loadu_si128(chunk::<_, 16>(x).cast()));
            let magnitude = _mm256_and_si256(x, _mm256_set1_epi16(0x7f));
            let sign = _mm256_slli_epi16::<8>(_mm256_and_si256(x, _mm256_set1_epi16(0x80)));
            let nan = _mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(0x7f));
            let half = _mm256_or_si256(
                _mm256_or_si256(sign, _mm256_slli_epi16::<7>(magnitude)),
                _mm256_and_si256(nan, _mm256_set1_epi16(0x7e00)),
            );
            _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256.0))
        })
    }
    #[inline(always)]
    fn load_e5m2(self, x: &[E5m2]) -> __m512 {
        with!(self, {
            let x = _mm256_cvtepu8_epi16(_mm_loadu_si128(chunk::<_, 16>(x).cast()));
            _mm512_cvtph_ps(_mm256_slli_epi16::<8>(x))
        })
    }
    #[inline(always)]
    fn load_e2m1(self, x: &[E2m1x2]) -> __m512 {
        with!(self, {
            let x = _mm_cvtepu8_epi16(_mm_loadl_epi64(chunk::<_, 8>(x).cast()));
            let codes = _mm_and_si128(_mm_or_si128(x, _mm_slli_epi16::<4>(x)), _mm_set1_epi16(0x0f0f));
            _mm512_permutexvar_ps(_mm512_cvtepi8_epi32(codes), _mm512_loadu_ps(FP4.as_ptr()))
        })
    }
    #[inline(always)]
    fn store(self, x: __m512, out: &mut [f32]) {
        with!(self, _mm512_storeu_ps(chunk_mut::<_, 16>(out), x));
    }
    #[inline(always)]
    fn store_f16(self, x: __m512, out: &mut [f16]) {
        with!(self, {
            let h = _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x);
            _mm256_storeu_si256(chunk_mut::<_, 16>(out).cast(), h);
        });
    }
    #[inline(always)]
    fn store_bf16(self, x: __m512, out: &mut [bf16]) {
        with!(self, {
            let bits = _mm512_castps_si512(x);
            let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
            let rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
            let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x);
            let quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x40_0000));
            let high = _mm512_srli_epi32::<16>(_mm512_mask_blend_epi32(nan, rounded, quiet));
            _mm256_storeu_si256(chunk_mut::<_, 16>(out).cast(), _mm512_cvtepi32_epi16(high));
        });
    }
    #[inline(always)]
    fn store_i8(self, x: __m512, out: &mut [i8]) {
        with!(self, {
            let x = _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x));
            _mm_storeu_si128(chunk_mut::<_, 16>(out).cast(), x);
        });
    }
    #[inline(always)]
    fn store_e4m3(self, x: __m512, out: &mut [E4m3]) {
        with!(self, {
            let code = _mm512_min_epu32(round_to_512!(x, 4, 3), _mm512_set1_epi32(0x7e));
            let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x);
            let code = _mm512_mask_mov_epi32(code, nan, _mm512_set1_epi32(0x7f));
            let sign = _mm512_and_si512(_mm512_srli_epi32::<24>(_mm512_castps_si512(x)), _mm512_set1_epi32(0x80));
            let code = _mm512_cvtepi32_epi8(_mm512_or_si512(code, sign));
            _mm_storeu_si128(chunk_mut::<_, 16>(out).cast(), code);
        });
    }
    #[inline(always)]
    fn store_e5m2(self, x: __m512, out: &mut [E5m2]) {
        with!(self, {
            let code = _mm512_min_epu32(round_to_512!(x, 5, 2), _mm512_set1_epi32(0x7b));
            let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x);
            let code = _mm512_mask_mov_epi32(code, nan, _mm512_set1_epi32(0x7f));
            let infinite = _mm512_cmp_ps_mask::<_CMP_EQ_OQ>(_mm512_abs_ps(x), _mm512_set1_ps(f32::INFINITY));
            let code = _mm512_mask_mov_epi32(code, infinite, _mm512_set1_epi32(0x7c));
            let sign = _mm512_and_si512(_mm512_srli_epi32::<24>(_mm512_castps_si512(x)), _mm512_set1_epi32(0x80));
            let code = _mm512_cvtepi32_epi8(_mm512_or_si512(code, sign));
            _mm_storeu_si128(chunk_mut::<_, 16>(out).cast(), code);
        });
    }
    #[inline(always)]
    fn store_e2m1(self, x: __m512, out: &mut [E2m1x2]) {
        with!(self, {
            let code = _mm512_min_epu32(round_to_512!(x, 2, 1), _mm512_set1_epi32(7));
            let sign = _mm512_and_si512(_mm512_srli_epi32::<28>(_mm512_castps_si512(x)), _mm512_set1_epi32(8));
            let number = _mm512_cmp_ps_mask::<_CMP_ORD_Q>(x, x);
            let code = _mm512_cvtepi32_epi8(_mm512_maskz_or_epi32(number, code, sign));
            // First + 16 * second of every two bytes.
            let pairs = _mm_maddubs_epi16(code, _mm_set1_epi16(0x1001));
            _mm_storel_epi64(chunk_mut::<_, 8>(out).cast(), _mm_packus_epi16(pairs, pairs));
        });
    }
    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        with!(self, _mm512_add_ps(a, b))
    }
    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        with!(self, _mm512_sub_ps(a, b))
    }
    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        with!(self, _mm512_mul_ps(a, b))
    }
    #[inline(always)]
    fn div(self, a: __m512, b: __m512) -> __m512 {
        with!(self, _mm512_div_ps(a, b))
    }
    #[inline(always)]
    fn fma(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        with!(self, {
            if PAIRS {
                // The same bits, as another type.
                _mm512_dpbf16_ps(
                    c,
                    std::mem::transmute::<__m512, __m512bh>(a),
                    std::mem::transmute::<__m512, __m512bh>(b),
                )
            } else {
                _mm512_fmadd_ps(a, b, c)
            }
        })
    }
    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        with!(self, _mm512_max_ps(a, b))
    }
    #[inline(always)]
    fn min(self, a: __m512, b: __m512) -> __m512 {
        with!(self, _mm512_min_ps(a, b))
    }
    #[inline(always)]
    fn abs(self, a: __m512) -> __m512 {
        with!(self, _mm512_abs_ps(a))
    }
    #[inline(always)]
    fn copysign(self, a: __m512, sign: __m512) -> __m512 {
        // 0xd8: the sign bit from `sign`, the others from `a`.
        with!(self, {
            let (a, sign, bit) = (_mm512_castps_si512(a), _mm512_castps_si512(sign), _mm512_set1_epi32(i32::MIN));
            _mm512_castsi512_ps(_mm512_ternarylogic_epi32::<0xd8>(a, sign, bit))
        })
    }
    #[inline(always)]
    fn round(self, a: __m512) -> __m512 {
        with!(self, _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a))
    }
    #[inline(always)]
    fn pow2(self, n: __m512) -> __m512 {
        with!(self, {
            let e = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
            _mm512_castsi512_ps(_mm512_slli_epi32::<23>(e))
        })
    }
    #[inline(always)]
    fn split(self, x: __m512) -> (__m512, __m512) {
        // The fraction of an infinity is 0, and `scale` takes any exponent, so nothing need be clamped.
        let f = with!(self, _mm512_reduce_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x));
        (self.sub(x, f), f)
    }
    #[inline(always)]
    fn scale(self, p: __m512, n: __m512) -> __m512 {
        with!(self, _mm512_scalef_ps(p, n))
    }
    #[inline(always)]
    fn lt(self, a: __m512, b: __m512) -> __mmask16 {
        with!(self, _mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b))
    }
    #[inline(always)]
    fn select(self, m: __mmask16, a: __m512, b: __m512) -> __m512 {
        with!(self, _mm512_mask_blend_ps(m, b, a))
    }
    #[inline(always)]
    fn bits(self, m: __mmask16) -> u32 {
        u32::from(m)
    }
    #[inline(always)]
    fn sum(self, a: __m512) -> f32 {
        with!(self, {
            let b = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps::<1>(a));
            let c = _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps::<1>(b));
            let d = _mm_add_ps(c, _mm_movehl_ps(c, c));
            _mm_cvtss_f32(_mm_add_ss(d, _mm_shuffle_ps::<1>(d, d)))
        })
    }
    #[inline(always)]
    fn sums4(self, a: [__m512; 4]) -> [f32; 4] {
        // As there; an `Avx512` proves an `Avx2`.
        with!(self, {
            let (al, ah) = (_mm512_castps512_ps256(a[0]), _mm512_extractf32x8_ps::<1>(a[0]));
            let (bl, bh) = (_mm512_castps512_ps256(a[1]), _mm512_extractf32x8_ps::<1>(a[1]));
            let (cl, ch) = (_mm512_castps512_ps256(a[2]), _mm512_extractf32x8_ps::<1>(a[2]));
            let (dl, dh) = (_mm512_castps512_ps256(a[3]), _mm512_extractf32x8_ps::<1>(a[3]));
            let halves = [_mm256_add_ps(al, ah), _mm256_add_ps(bl, bh), _mm256_add_ps(cl, ch), _mm256_add_ps(dl, dh)];
            Avx2(()).sums4(halves)
        })
    }
    #[inline(always)]
    fn sums16(self, a: [[__m512; 4]; 4]) -> [[f32; 4]; 4] {
        // Halves of two vectors are added in one, quarters of four, and so on: 45 instructions for the 16 sums, where
        // four times `sums4` are about 100. Lane `4 r + j` of the last is the sum of `a[r][j]`.
        let mut out = [[0.0; 4]; 4];
        with!(self, {
            let (mut quarters, mut j) = ([_mm512_setzero_ps(); 4], 0);
            while j < 4 {
                let ab = halves_added(a[0][j], a[1][j]);
                let cd = halves_added(a[2][j], a[3][j]);
                let low = _mm512_shuffle_f32x4::<0b10_00_10_00>(ab, cd);
                quarters[j] = _mm512_add_ps(low, _mm512_shuffle_f32x4::<0b11_01_11_01>(ab, cd));
                j += 1;
            }
            let ab = pairs_added(quarters[0], quarters[1]);
            let cd = pairs_added(quarters[2], quarters[3]);
            let even = _mm512_shuffle_ps::<0b10_00_10_00>(ab, cd);
            let sums = _mm512_add_ps(even, _mm512_shuffle_ps::<0b11_01_11_01>(ab, cd));
            _mm512_storeu_ps(out.as_flattened_mut().as_mut_ptr(), sums);
        });
        out
    }
    #[inline(always)]
    fn transpose(self, a: [__m512; 16]) -> [__m512; 16] {
        // Vectors of floats and of integers are the same bits.
        with!(self, std::mem::transmute(transpose(std::mem::transmute::<[__m512; 16], [__m512i; 16]>(a))))
    }
    #[inline(always)]
    fn max_lane(self, a: __m512) -> f32 {
        with!(self, _mm512_reduce_max_ps(a))
    }
    #[inline(always)]
    fn stream<T: Element>(self, from: &[T], to: &mut [T]) {
        assert_eq!(from.len(), to.len());
        let (line, n) = (64 / size_of::<T>(), to.len());
        let head = to.as_ptr().align_offset(64).min(n);
        let end = head + (n - head) / line * line;
        to[..head].copy_from_slice(&from[..head]);
        to[end..].copy_from_slice(&from[end..]);
        let mut at = head;
        while at < end {
            let (from, to) = (from[at..at + line].as_ptr(), to[at..at + line].as_mut_ptr());
            // SAFETY: `self` proves the vectors; both have the 64 bytes, plain numbers, and `to` is aligned to as many.
            unsafe { _mm512_stream_si512(to.cast(), _mm512_loadu_si512(from.cast())) };
            at += line;
        }
    }
    #[inline(always)]
    fn fence(self) {
        // SAFETY: SSE is in the x86-64 baseline.
        unsafe { _mm_sfence() };
    }
    #[inline(always)]
    fn prefetch<T>(self, x: &[T]) {
        prefetch_lines(x);
    }
    #[inline(always)]
    fn prefetch_far<T>(self, x: &[T], at: usize) {
        // SAFETY: SSE is in the x86-64 baseline, and a prefetch reads nothing, wherever it points.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(x.as_ptr().wrapping_add(at).cast()) };
    }
}

/// `[a.low + a.high, b.low + b.high]`, in halves of eight lanes.
#[target_feature(enable = "avx512f")]
#[inline]
fn halves_added(a: __m512, b: __m512) -> __m512 {
    let low = _mm512_shuffle_f32x4::<0b01_00_01_00>(a, b);
    _mm512_add_ps(low, _mm512_shuffle_f32x4::<0b11_10_11_10>(a, b))
}

/// In every quarter: `[a0 + a2, a1 + a3, b0 + b2, b1 + b3]`.
#[target_feature(enable = "avx512f")]
#[inline]
fn pairs_added(a: __m512, b: __m512) -> __m512 {
    let low = _mm512_shuffle_ps::<0b01_00_01_00>(a, b);
    _mm512_add_ps(low, _mm512_shuffle_ps::<0b11_10_11_10>(a, b))
}

/// Columns of a 16 × 16 matrix of 32-bit elements.
///
/// # Safety
/// This CPU has AVX-512 F.
#[inline(always)]
pub(super) unsafe fn transpose(r: [__m512i; 16]) -> [__m512i; 16] {
    // SAFETY: as the caller says.
    unsafe {
        let mut a = r;
        for i in 0..8 {
            a[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
            a[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
        }
        let mut b = a;
        for i in 0..4 {
            for j in 0..2 {
                b[4 * i + 2 * j] = _mm512_unpacklo_epi64(a[4 * i + j], a[4 * i + 2 + j]);
                b[4 * i + 2 * j + 1] = _mm512_unpackhi_epi64(a[4 * i + j], a[4 * i + 2 + j]);
            }
        }
        // b[4i + c], lane l: column 4l + c of rows 4i..4i + 4.
        let mut out = b;
        for c in 0..4 {
            let low = _mm512_shuffle_i32x4::<0b10_00_10_00>(b[c], b[4 + c]);
            let high = _mm512_shuffle_i32x4::<0b11_01_11_01>(b[c], b[4 + c]);
            let low2 = _mm512_shuffle_i32x4::<0b10_00_10_00>(b[8 + c], b[12 + c]);
            let high2 = _mm512_shuffle_i32x4::<0b11_01_11_01>(b[8 + c], b[12 + c]);
            out[c] = _mm512_shuffle_i32x4::<0b10_00_10_00>(low, low2);
            out[8 + c] = _mm512_shuffle_i32x4::<0b11_01_11_01>(low, low2);
            out[4 + c] = _mm512_shuffle_i32x4::<0b10_00_10_00>(high, high2);
            out[12 + c] = _mm512_shuffle_i32x4::<0b11_01_11_01>(high, high2);
        }
        out
    }
}
