//! The vector trait that every CPU kernel is written over, and how a kernel meets a level.
//!
//! A kernel is written once, as a [`Kernel`] whose `run` is generic over [`Vector`]. [`super::Level::run`] calls it
//! inside a function compiled for the level's instructions. For that to work everything on the way down is
//! `#[inline(always)]`, and hot loops hold no closure: what is not inlined is compiled for the baseline CPU.

use crate::tensor::{E2m1x2, E4m3, E5m2, Element, Float, bf16, f16};

/// A kernel to be run at some level.
pub(crate) trait Kernel {
    /// What it returns.
    type Out;
    /// The algorithm. Implementations are `#[inline(always)]`.
    fn run<V: Vector>(self, v: V) -> Self::Out;
}

/// A set of vector instructions on f32 lanes. The value is the proof that this CPU has them.
///
/// Loads and stores take slices of at least `LANES` elements and panic on shorter ones.
pub(crate) trait Vector: Copy + Send + Sync + 'static {
    /// f32 values per vector.
    const LANES: usize;
    /// `LANES` f32 values.
    type F: Copy;
    /// `LANES` truth values.
    type M: Copy;

    /// Runs `kernel` out of line, compiled for these instructions: once for all its callers.
    fn call<K: Kernel>(self, kernel: K) -> K::Out;

    fn splat(self, x: f32) -> Self::F;
    fn load(self, x: &[f32]) -> Self::F;
    fn load_f16(self, x: &[f16]) -> Self::F;
    fn load_bf16(self, x: &[bf16]) -> Self::F;
    fn load_e4m3(self, x: &[E4m3]) -> Self::F;
    fn load_e5m2(self, x: &[E5m2]) -> Self::F;
    /// `LANES` values from `LANES / 2` bytes.
    fn load_e2m1(self, x: &[E2m1x2]) -> Self::F;
    fn store(self, x: Self::F, out: &mut [f32]);
    /// Rounds to nearest, ties to even.
    fn store_f16(self, x: Self::F, out: &mut [f16]);
    /// Rounds to nearest, ties to even; NaN stays NaN.
    fn store_bf16(self, x: Self::F, out: &mut [bf16]);
    /// Nearest integers, ties to even, of numbers from -128 to 127.
    fn store_i8(self, x: Self::F, out: &mut [i8]);
    /// Bit for bit what [`Float::from_f32`] gives.
    fn store_e4m3(self, x: Self::F, out: &mut [E4m3]);
    /// Bit for bit what [`Float::from_f32`] gives.
    fn store_e5m2(self, x: Self::F, out: &mut [E5m2]);
    /// Bit for bit what [`E2m1x2::from_f32`] gives, into `LANES / 2` bytes.
    fn store_e2m1(self, x: Self::F, out: &mut [E2m1x2]);

    fn add(self, a: Self::F, b: Self::F) -> Self::F;
    fn sub(self, a: Self::F, b: Self::F) -> Self::F;
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    fn div(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`, rounded once where the CPU can.
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// `if a > b { a } else { b }`: `b` when either is NaN.
    fn max(self, a: Self::F, b: Self::F) -> Self::F;
    /// `if a < b { a } else { b }`: `b` when either is NaN.
    fn min(self, a: Self::F, b: Self::F) -> Self::F;
    fn abs(self, a: Self::F) -> Self::F;
    /// `|a|` with the sign of `sign`, zeros and NaN included.
    fn copysign(self, a: Self::F, sign: Self::F) -> Self::F;
    /// Nearest integer, ties to even.
    fn round(self, a: Self::F) -> Self::F;
    /// `2^n` for integral `n` in `-126..=127`; anything for other inputs.
    fn pow2(self, n: Self::F) -> Self::F;
    /// `(n, f)` with `x = n + f`, `n` integral and `|f| <= 1/2`: the exponent and the fraction of `2^x`. Past -127 and
    /// 128, where [`Self::scale`] gives 0 and infinity, `n` may stay there and `f` is 0. NaN for NaN.
    fn split(self, x: Self::F) -> (Self::F, Self::F);
    /// `p * 2^n` for `p` in `[0.7, 1.42]` and an `n` that [`Self::split`] gave. Results below `2^-126` are off by at
    /// most `2^-127`, and exactly 0 for `p = 1`, `n = -127`.
    fn scale(self, p: Self::F, n: Self::F) -> Self::F;
    /// `a < b`, false when either is NaN.
    fn lt(self, a: Self::F, b: Self::F) -> Self::M;
    /// `if m { a } else { b }`.
    fn select(self, m: Self::M, a: Self::F, b: Self::F) -> Self::F;
    /// Bit `i` is lane `i`.
    fn bits(self, m: Self::M) -> u32;

    /// Sum of the lanes, always in the same order: halves added, then quarters, and so on.
    fn sum(self, a: Self::F) -> f32;
    /// The four sums, each bit for bit what [`Self::sum`] gives.
    fn sums4(self, a: [Self::F; 4]) -> [f32; 4] {
        [self.sum(a[0]), self.sum(a[1]), self.sum(a[2]), self.sum(a[3])]
    }
    /// Eight sums at once, each bit for bit what [`Self::sum`] gives.
    fn sums8(self, a: [Self::F; 8]) -> [f32; 8] {
        let (low, high) = (self.sums4([a[0], a[1], a[2], a[3]]), self.sums4([a[4], a[5], a[6], a[7]]));
        [low[0], low[1], low[2], low[3], high[0], high[1], high[2], high[3]]
    }
    /// Sixteen sums at once, each bit for bit what [`Self::sum`] gives.
    fn sums16(self, a: [[Self::F; 4]; 4]) -> [[f32; 4]; 4] {
        [self.sums4(a[0]), self.sums4(a[1]), self.sums4(a[2]), self.sums4(a[3])]
    }
    /// Lane `j` of result `i` is lane `i` of vector `j`, of the first `LANES`.
    #[inline(always)]
    fn transpose(self, a: [Self::F; 16]) -> [Self::F; 16] {
        let (mut rows, mut turned, mut out) = ([[0f32; 16]; 16], [[0f32; 16]; 16], a);
        for (row, a) in rows.iter_mut().zip(a) {
            self.store(a, row);
        }
        for (i, turned) in turned.iter_mut().enumerate() {
            for (x, row) in turned.iter_mut().zip(&rows) {
                *x = row[i];
            }
        }
        for (out, turned) in out.iter_mut().zip(&turned) {
            *out = self.load(turned);
        }
        out
    }
    /// Largest lane; unspecified when a lane is NaN.
    fn max_lane(self, a: Self::F) -> f32;
    /// Copies past the caches, in no order with other memory before [`Self::fence`]: only [`PastCache`] calls it.
    fn stream<T: Element>(self, from: &[T], to: &mut [T]) {
        to.copy_from_slice(from);
    }
    /// Orders what was streamed before all that follows.
    fn fence(self) {}
    /// Asks for the cache lines of `x`; touches no memory.
    fn prefetch<T>(self, x: &[T]);
    /// Asks for the cache line of `x[at]`, into the second-level cache; there need be no such element.
    fn prefetch_far<T>(self, x: &[T], at: usize);
}

/// Copies past the caches, for what is larger than they are: lines are not read before they are overwritten.
pub(crate) struct PastCache<V: Vector>(pub(crate) V);

impl<V: Vector> PastCache<V> {
    /// Rows of equal length.
    #[inline(always)]
    pub(crate) fn copy<T: Element>(&self, from: &[T], to: &mut [T]) {
        self.0.stream(from, to);
    }
}

impl<V: Vector> Drop for PastCache<V> {
    #[inline(always)]
    fn drop(&mut self) {
        self.0.fence();
    }
}

/// An element that vectors load and store.
pub(crate) trait Lane: Float {
    /// The first `LANES` elements of `x`, as f32.
    fn load<V: Vector>(v: V, x: &[Self]) -> V::F;
    /// Rounds `x` into the first `LANES` elements of `out`.
    fn store<V: Vector>(v: V, x: V::F, out: &mut [Self]);

    /// All of `x` (at most `LANES` elements), then zeros.
    #[inline(always)]
    fn load_tail<V: Vector>(v: V, x: &[Self]) -> V::F {
        let mut lanes = [Self::from_f32(0.0); 16];
        lanes[..x.len()].copy_from_slice(x);
        Self::load(v, &lanes)
    }

    /// The first `out.len()` lanes (at most `LANES`).
    #[inline(always)]
    fn store_tail<V: Vector>(v: V, x: V::F, out: &mut [Self]) {
        let mut lanes = [Self::from_f32(0.0); 16];
        Self::store(v, x, &mut lanes);
        out.copy_from_slice(&lanes[..out.len()]);
    }
}

macro_rules! lane {
    ($t:ty, $load:ident, $store:ident) => {
        impl Lane for $t {
            #[inline(always)]
            fn load<V: Vector>(v: V, x: &[Self]) -> V::F {
                v.$load(x)
            }
            #[inline(always)]
            fn store<V: Vector>(v: V, x: V::F, out: &mut [Self]) {
                v.$store(x, out);
            }
        }
    };
}
lane!(f32, load, store);
lane!(f16, load_f16, store_f16);
lane!(bf16, load_bf16, store_bf16);
lane!(E4m3, load_e4m3, store_e4m3);
lane!(E5m2, load_e5m2, store_e5m2);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::level::{Level, Token};

    /// Every `LANES` of `x` through a store of the level.
    struct Codes<'a, T> {
        x: &'a [f32],
        out: &'a mut [T],
    }

    impl<T: Lane> Kernel for Codes<'_, T> {
        type Out = ();
        #[inline(always)]
        fn run<V: Vector>(self, v: V) {
            for (x, out) in self.x.chunks_exact(V::LANES).zip(self.out.chunks_exact_mut(V::LANES)) {
                T::store(v, v.load(x), out);
            }
        }
    }

    struct Codes4<'a> {
        x: &'a [f32],
        out: &'a mut [E2m1x2],
        back: &'a mut [f32],
    }

    impl Kernel for Codes4<'_> {
        type Out = ();
        #[inline(always)]
        fn run<V: Vector>(self, v: V) {
            let pairs = self.out.chunks_exact_mut(V::LANES / 2).zip(self.back.chunks_exact_mut(V::LANES));
            for (x, (out, back)) in self.x.chunks_exact(V::LANES).zip(pairs) {
                v.store_e2m1(v.load(x), out);
                v.store(v.load_e2m1(out), back);
            }
        }
    }

    /// A stride through all bits, and every number of `T` with its neighbours and the middle to the next.
    fn inputs<T: Float>(codes: impl Iterator<Item = T>) -> Vec<f32> {
        let step = if cfg!(miri) { 9_999_991 } else { 4_099 };
        let mut x: Vec<f32> = (0..u32::MAX / step).map(|i| f32::from_bits(i * step)).collect();
        for code in codes {
            let at = code.to_f32();
            let next = f32::from_bits(at.to_bits().wrapping_add(1 << 19));
            for near in [at, (at + next) / 2.0, next, at * 0.5, at * 0.75] {
                x.extend([near.next_down(), near, near.next_up()]);
            }
        }
        x.resize(x.len().next_multiple_of(16), f32::NEG_INFINITY);
        x
    }

    fn fp8_stores_are_scalar_roundings<T: Lane>(all: impl Fn(u8) -> T) {
        let x = inputs((0..=255).map(all));
        let mut out = vec![T::from_f32(0.0); x.len()];
        for level in Level::available() {
            Token::of(level).unwrap().run(Codes { x: &x, out: &mut out });
            for (&x, &got) in x.iter().zip(&out) {
                assert_eq!(got, T::from_f32(x), "{} of {x:e} ({:#x}) at {level}", T::DTYPE, x.to_bits());
            }
        }
    }

    #[test]
    fn stores_of_e4m3_round_as_one_by_one() {
        fp8_stores_are_scalar_roundings(E4m3);
    }

    #[test]
    fn stores_of_e5m2_round_as_one_by_one() {
        fp8_stores_are_scalar_roundings(E5m2);
    }

    #[test]
    fn stores_of_e2m1_round_as_two_by_two_and_load_back() {
        let mut x = inputs((0..=255).map(E4m3));
        for i in 0..1_000u16 {
            x.extend([f32::from(i) / 64.0, f32::from(i) / -64.0]);
        }
        x.resize(x.len().next_multiple_of(16), f32::NAN);
        let (mut out, mut back) = (vec![E2m1x2(0); x.len() / 2], vec![0.0; x.len()]);
        for level in Level::available() {
            Token::of(level).unwrap().run(Codes4 { x: &x, out: &mut out, back: &mut back });
            for ((x, &got), back) in x.chunks_exact(2).zip(&out).zip(back.chunks_exact(2)) {
                assert_eq!(got, E2m1x2::from_f32([x[0], x[1]]), "{x:?} at {level}");
                assert_eq!(
                    got.to_f32().map(f32::to_bits),
                    [back[0].to_bits(), back[1].to_bits()],
                    "{got:?} at {level}"
                );
            }
        }
    }
}
