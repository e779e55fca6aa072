//! Eight lanes in plain Rust: what any CPU runs, and what the others are compared with.
//!
//! Conversions and rounding are calls: inlined into every kernel they were a tenth of the crate's compile time.

use crate::cpu::vector::{Kernel, Vector};
use crate::tensor::{E2m1x2, E4m3, E5m2, Float, bf16, f16};

/// The level that needs no instruction beyond the target's baseline.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Portable;

type F = [f32; 8];

#[inline(always)]
fn map2(a: F, b: F, f: impl Fn(f32, f32) -> f32) -> F {
    std::array::from_fn(|i| f(a[i], b[i]))
}

#[inline(never)]
fn convert<T: Float>(x: &[T]) -> F {
    let x = x.first_chunk::<8>().expect("8 elements");
    std::array::from_fn(|i| x[i].to_f32())
}

#[inline(never)]
fn round_into<T: Float>(x: F, out: &mut [T]) {
    *out.first_chunk_mut::<8>().expect("8 elements") = std::array::from_fn(|i| T::from_f32(x[i]));
}

impl Vector for Portable {
    const LANES: usize = 8;
    type F = F;
    type M = [bool; 8];

    #[inline(never)]
    fn call<K: Kernel>(self, kernel: K) -> K::Out {
        kernel.run(self)
    }
    #[inline(always)]
    fn splat(self, x: f32) -> F {
        [x; 8]
    }
    #[inline(always)]
    fn load(self, x: &[f32]) -> F {
        *x.first_chunk().expect("8 elements")
    }
    #[inline(always)]
    fn load_f16(self, x: &[f16]) -> F {
        convert(x)
    }
    #[inline(always)]
    fn load_bf16(self, x: &[bf16]) -> F {
        convert(x)
    }
    #[inline(always)]
    fn load_e4m3(self, x: &[E4m3]) -> F {
        convert(x)
    }
    #[inline(always)]
    fn load_e5m2(self, x: &[E5m2]) -> F {
        convert(x)
    }
    #[inline(never)]
    fn load_e2m1(self, x: &[E2m1x2]) -> F {
        let x = x.first_chunk::<4>().expect("4 pairs").map(E2m1x2::to_f32);
        std::array::from_fn(|i| x[i / 2][i % 2])
    }
    #[inline(always)]
    fn store(self, x: F, out: &mut [f32]) {
        *out.first_chunk_mut().expect("8 elements") = x;
    }
    #[inline(always)]
    fn store_f16(self, x: F, out: &mut [f16]) {
        round_into(x, out);
    }
    #[inline(always)]
    fn store_bf16(self, x: F, out: &mut [bf16]) {
        round_into(x, out);
    }
    #[inline(never)]
    fn store_i8(self, x: F, out: &mut [i8]) {
        *out.first_chunk_mut::<8>().expect("8 elements") = self.round(x).map(|x| x as i8);
    }
    #[inline(always)]
    fn store_e4m3(self, x: F, out: &mut [E4m3]) {
        round_into(x, out);
    }
    #[inline(always)]
    fn store_e5m2(self, x: F, out: &mut [E5m2]) {
        round_into(x, out);
    }
    #[inline(never)]
    fn store_e2m1(self, x: F, out: &mut [E2m1x2]) {
        let codes = std::array::from_fn(|i| E2m1x2::from_f32([x[2 * i], x[2 * i + 1]]));
        *out.first_chunk_mut::<4>().expect("4 pairs") = codes;
    }
    #[inline(always)]
    fn add(self, a: F, b: F) -> F {
        map2(a, b, |a, b| a + b)
    }
    #[inline(always)]
    fn sub(self, a: F, b: F) -> F {
        map2(a, b, |a, b| a - b)
    }
    #[inline(always)]
    fn mul(self, a: F, b: F) -> F {
        map2(a, b, |a, b| a * b)
    }
    #[inline(never)]
    fn div(self, a: F, b: F) -> F {
        map2(a, b, |a, b| a / b)
    }
    #[inline(always)]
    fn fma(self, a: F, b: F, c: F) -> F {
        // Two roundings: `mul_add` without the instruction is a library call.
        std::array::from_fn(|i| a[i] * b[i] + c[i])
    }
    #[inline(always)]
    fn max(self, a: F, b: F) -> F {
        map2(a, b, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn min(self, a: F, b: F) -> F {
        map2(a, b, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    fn abs(self, a: F) -> F {
        a.map(f32::abs)
    }
    #[inline(always)]
    fn copysign(self, a: F, sign: F) -> F {
        map2(a, sign, f32::copysign)
    }
    #[inline(never)]
    fn round(self, a: F) -> F {
        // 1.5 * 2^23 pushes the fraction out of the mantissa, ties to even; right for |a| < 2^22, and larger
        // values are integers already or far outside what the callers' polynomials take.
        const SHIFT: f32 = 12_582_912.0;
        a.map(|a| if a.abs() < 4_194_304.0 { (a + SHIFT) - SHIFT } else { a })
    }
    #[inline(never)]
    fn pow2(self, n: F) -> F {
        n.map(|n| f32::from_bits(((n as i32).wrapping_add(127) as u32) << 23))
    }
    #[inline(never)]
    fn split(self, x: F) -> (F, F) {
        let c = self.max([-127.0; 8], self.min([128.0; 8], x));
        let n = self.round(c);
        (n, self.sub(c, n))
    }
    #[inline(never)]
    fn scale(self, p: F, n: F) -> F {
        // Adds to the exponent: from -127 to 128 with p = 1 that gives the bits of 0 and of infinity.
        std::array::from_fn(|i| f32::from_bits(p[i].to_bits().wrapping_add((n[i] as i32 as u32) << 23)))
    }
    #[inline(always)]
    fn lt(self, a: F, b: F) -> [bool; 8] {
        std::array::from_fn(|i| a[i] < b[i])
    }
    #[inline(always)]
    fn select(self, m: [bool; 8], a: F, b: F) -> F {
        std::array::from_fn(|i| if m[i] { a[i] } else { b[i] })
    }
    #[inline(never)]
    fn bits(self, m: [bool; 8]) -> u32 {
        // One multiplication gathers eight 0/1 bytes: byte i lands in bit 56 + i.
        let bytes = u64::from_le_bytes(m.map(u8::from));
        (bytes.wrapping_mul(0x0102_0408_1020_4080) >> 56) as u32
    }
    #[inline(always)]
    fn sum(self, a: F) -> f32 {
        let b: [f32; 4] = std::array::from_fn(|i| a[i] + a[i + 4]);
        (b[0] + b[2]) + (b[1] + b[3])
    }
    #[inline(always)]
    fn max_lane(self, a: F) -> f32 {
        a.iter().fold(f32::NEG_INFINITY, |m, &x| if x > m { x } else { m })
    }
    #[inline(always)]
    fn prefetch<T>(self, _: &[T]) {}
    #[inline(always)]
    fn prefetch_far<T>(self, _: &[T], _: usize) {}
}
