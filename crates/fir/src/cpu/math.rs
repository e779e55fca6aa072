//! Elementary functions over vectors.
//!
//! Errors are in units in the last place of the f32 result, against f64 over all inputs; the tests below hold them at
//! every level. Results below `2^-126` have an absolute bound instead. Polynomials are minimax fits.

use super::vector::Vector;

/// `Σ c[i] x^i`, by Horner's rule.
#[inline(always)]
fn polynomial<V: Vector, const N: usize>(v: V, x: V::F, c: [f32; N]) -> V::F {
    let mut p = v.splat(c[N - 1]);
    let mut i = N - 1;
    while i > 0 {
        i -= 1;
        p = v.fma(p, x, v.splat(c[i]));
    }
    p
}

/// `2^x`, within 2 ulp, and within `2^-127` below `2^-126`; exactly 0 from -150 down, infinity from 128 up, NaN for
/// NaN.
#[inline(always)]
pub(crate) fn exp2<V: Vector>(v: V, x: V::F) -> V::F {
    let (n, f) = v.split(x);
    // Relative error 3e-9. The first coefficient is exactly 1, so powers of two are exact.
    let c = [1.0, std::f32::consts::LN_2, 0.240_226_48, 0.055_503_6, 9.618_506e-3, 1.339_080_6e-3, 1.532_645_7e-4];
    v.scale(polynomial(v, f, c), n)
}

/// `(n, e^f - 1)` with `x = n ln 2 + f` and `|f| <= ln 2 / 2`, for `|x| < 90`.
#[inline(always)]
fn exp_parts<V: Vector>(v: V, x: V::F) -> (V::F, V::F) {
    let (n, _) = v.split(v.mul(x, v.splat(std::f32::consts::LOG2_E)));
    // ln 2 in two parts: the first has 9 bits, so its product with `n` is exact, fused or not.
    let f = v.fma(n, v.splat(-355.0 / 512.0), x);
    let f = v.fma(n, v.splat(2.121_944_4e-4), f);
    // (e^f - 1 - f) / f², which costs e^f - 1 a relative error of 1.4e-8.
    let c = [0.499_999_97, 0.166_665_47, 0.041_667_435, 8.366_262e-3, 1.387_066_3e-3];
    (n, v.fma(v.mul(f, f), polynomial(v, f, c), f))
}

/// `e^x`, within 2 ulp; 0 where the result is below `2^-126`, infinity above `f32::MAX`, NaN for NaN.
#[inline(always)]
pub(crate) fn exp<V: Vector>(v: V, x: V::F) -> V::F {
    let (n, p) = exp_parts(v, x);
    let y = v.scale(v.add(p, v.splat(1.0)), n);
    // The last numbers before ln 2^-126 and ln f32::MAX; past them `y` is anything, and for NaN it is NaN.
    let y = v.select(v.lt(x, v.splat(-87.336_54)), v.splat(0.0), y);
    v.select(v.lt(v.splat(88.722_83), x), v.splat(f32::INFINITY), y)
}

/// `tanh x`, within 3 ulp; odd, exactly ±1 from 10 on, NaN for NaN.
#[inline(always)]
pub(crate) fn tanh<V: Vector>(v: V, x: V::F) -> V::F {
    // e / (e + 2) with e = e^2|x| - 1, which keeps small results exact; from 9.1 on the quotient rounds to 1.
    let a = v.min(v.splat(10.0), v.abs(x));
    let (n, p) = exp_parts(v, v.add(a, a));
    let s = v.pow2(n);
    let e = v.fma(s, p, v.sub(s, v.splat(1.0)));
    v.copysign(v.div(e, v.add(e, v.splat(2.0))), x)
}

/// `1 / (1 + e^-x)`, within 3 ulp; 0 below -88.72, NaN for NaN.
#[inline(always)]
pub(crate) fn sigmoid<V: Vector>(v: V, x: V::F) -> V::F {
    let e = exp(v, v.sub(v.splat(0.0), x));
    v.div(v.splat(1.0), v.add(v.splat(1.0), e))
}

/// `1 - erf x = 2/√π ∫ₓ e^-t² dt` over `t > x`: within 2e-7 and, where it is small, within 2e-4 of itself; 0 from 10.5
/// up, 2 from -4 down, NaN for NaN.
#[inline(always)]
pub(crate) fn erfc<V: Vector>(v: V, x: V::F) -> V::F {
    let a = v.min(v.splat(10.5), v.abs(x));
    // Below 1: erf x = x + x P(x²), relative error 1.5e-9.
    let c = [0.128_379_17, -0.376_126_26, 0.112_835_79, -0.026_853_347, 5.187_162e-3, -7.997_853e-4, 7.806_903e-5];
    let small = v.sub(v.splat(1.0), v.fma(x, polynomial(v, v.mul(x, x), c), x));
    // From 1 on: erfc a = 2^-Q(a), error 1.4e-8, and at the far end 1.4e-4 of the result.
    let c = [
        7.942_066e-4,
        1.625_527_3,
        0.919_957_46,
        0.151_264_44,
        -0.034_169_53,
        5.641_290_5e-3,
        -6.438_351e-4,
        4.748_478_4e-5,
        -2.019_796_7e-6,
        3.744_112_6e-8,
    ];
    let large = exp2(v, v.sub(v.splat(0.0), polynomial(v, a, c)));
    let large = v.select(v.lt(x, v.splat(0.0)), v.sub(v.splat(2.0), large), large);
    v.select(v.lt(a, v.splat(1.0)), small, large)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::level::{Level, Token};
    use crate::cpu::vector::Kernel;

    #[derive(Clone, Copy, Debug)]
    enum Function {
        Exp2,
        Exp,
        Tanh,
        Sigmoid,
        Erfc,
    }
    use Function::*;

    struct Map<'a>(Function, &'a [f32], &'a mut [f32]);

    impl Kernel for Map<'_> {
        type Out = ();
        #[inline(always)]
        fn run<V: Vector>(self, v: V) {
            let Map(function, x, out) = self;
            for (x, out) in x.chunks_exact(V::LANES).zip(out.chunks_exact_mut(V::LANES)) {
                let x = v.load(x);
                let y = match function {
                    Exp2 => exp2(v, x),
                    Exp => exp(v, x),
                    Tanh => tanh(v, x),
                    Sigmoid => sigmoid(v, x),
                    Erfc => erfc(v, x),
                };
                v.store(y, out);
            }
        }
    }

    /// The function of every `x`, at every level of this CPU.
    fn every_level(f: Function, x: &[f32], check: impl Fn(Level, f32, f32)) {
        let mut padded = x.to_vec();
        padded.resize(x.len().next_multiple_of(16), 0.0);
        let mut out = vec![0.0; padded.len()];
        for level in Level::available() {
            Token::of(level).unwrap().run(Map(f, &padded, &mut out));
            for (&x, &y) in x.iter().zip(&out) {
                check(level, x, y);
            }
        }
    }

    fn exact(f: Function, x: f64) -> f64 {
        match f {
            Exp2 => x.exp2(),
            Exp => x.exp(),
            Tanh => x.tanh(),
            Sigmoid => 1.0 / (1.0 + (-x).exp()),
            Erfc if x < 0.0 => 2.0 - exact(Erfc, -x),
            Erfc if x < 2.0 => {
                // 1 - 2/√π e^-x² Σ 2^k x^(2k+1) / (2k+1)!!
                let (mut sum, mut term, mut k) = (0.0, x, 0.0);
                while term > 1e-18 * sum {
                    sum += term;
                    k += 1.0;
                    term *= 2.0 * x * x / (2.0 * k + 1.0);
                }
                1.0 - std::f64::consts::FRAC_2_SQRT_PI * (-x * x).exp() * sum
            }
            Erfc => {
                // e^-x² / √π / (x + ½/(x + 1/(x + 3⁄2/(x + …)))), from the inside out.
                let tail = (1..100).rev().fold(x, |t, k| x + f64::from(k) * 0.5 / t);
                (-x * x).exp() / (tail * std::f64::consts::PI.sqrt())
            }
        }
    }

    /// Numbers of either sign and every exponent, about `n` of them, and all near where a branch is taken.
    fn inputs(n: u32) -> Vec<f32> {
        let step = (u32::MAX / n) | 1;
        let spread = (0..n).map(|i| f32::from_bits(i.wrapping_mul(step)));
        let edges = [0.5, 1.0, 1.5, 4.0, 9.0, 10.0, 87.336_54, 88.722_84, 126.0, 126.5, 127.0, 127.5, 128.0, 149.0];
        let near = edges.into_iter().flat_map(|e: f32| (0..200).map(move |i| f32::from_bits(e.to_bits() + i - 100)));
        // Bits alone seldom land where the functions are neither 0, 1 nor infinity.
        let middle = (0..n).map(|i| i as f32 / n as f32 * 180.0);
        let all: Vec<f32> = spread.chain(near).chain(middle).filter(|x| !x.is_nan()).collect();
        all.iter().copied().chain(all.iter().map(|x| -x)).collect()
    }

    #[track_caller]
    fn assert_within(f: Function, ulps: f64, below_normal: f64, n: u32) {
        let x = inputs(n);
        every_level(f, &x, |level, x, y| {
            let want = exact(f, f64::from(x));
            if want >= f64::from(f32::MAX) * (1.0 + 2f64.powi(-25)) {
                return assert_eq!(y, f32::INFINITY, "{f:?} {level} {x}");
            }
            let error = (f64::from(y) - want).abs();
            let (unit, bound) = if want.abs() < 2f64.powi(-126) {
                (1.0, below_normal)
            } else {
                (2f64.powi(want.abs().log2().floor() as i32 - 23), ulps)
            };
            assert!(error <= bound * unit, "{f:?}({x}) at {level}: {y}, exactly {want}: {} > {bound}", error / unit);
        });
    }

    #[test]
    fn exp2_is_within_2_ulp_at_every_level() {
        assert_within(Exp2, 2.0, 2f64.powi(-127), 300_000);
    }

    #[test]
    fn exp_is_within_2_ulp_at_every_level() {
        assert_within(Exp, 2.0, 2f64.powi(-126), 300_000);
    }

    #[test]
    fn tanh_is_within_3_ulp_at_every_level() {
        assert_within(Tanh, 3.0, 2f64.powi(-149), 300_000);
    }

    #[test]
    fn sigmoid_is_within_3_ulp_at_every_level() {
        assert_within(Sigmoid, 3.0, 2f64.powi(-127), 300_000);
    }

    #[test]
    fn erfc_is_within_its_bounds_at_every_level() {
        every_level(Erfc, &inputs(100_000), |level, x, y| {
            let want = exact(Erfc, f64::from(x));
            let error = (f64::from(y) - want).abs();
            let bound = if want < 2f64.powi(-126) { 2f64.powi(-126) } else { f64::min(2e-7, 2e-4 * want) };
            assert!(error <= bound, "erfc({x}) at {level}: {y}, exactly {want}: {error:e} > {bound:e}");
        });
    }

    #[test]
    fn ends_of_the_line_are_exact() {
        const INF: f32 = f32::INFINITY;
        for (f, x, want) in [
            (
                Exp2,
                [-INF, -1e30, -150.0, -0.0, 0.0, 1.0, 127.0, 128.0, 1e30, INF],
                [0., 0., 0., 1., 1., 2., 2f32.powi(127), INF, INF, INF],
            ),
            (
                Exp,
                [-INF, -1e30, -104.0, -0.0, 0.0, 0.0, 88.8, 104.0, 1e30, INF],
                [0., 0., 0., 1., 1., 1., INF, INF, INF, INF],
            ),
            (
                Tanh,
                [-INF, -1e30, -10.0, -0.0, 0.0, 1e-40, 10.0, 88.8, 1e30, INF],
                [-1., -1., -1., -0., 0., 1e-40, 1., 1., 1., 1.],
            ),
            (
                Sigmoid,
                [-INF, -1e30, -104.0, -0.0, 0.0, 1e-40, 88.0, 104.0, 1e30, INF],
                [0., 0., 0., 0.5, 0.5, 0.5, 1., 1., 1., 1.],
            ),
            (
                Erfc,
                [-INF, -1e30, -10.5, -4.0, -0.0, 0.0, 10.5, 88.8, 1e30, INF],
                [2., 2., 2., 2., 1., 1., 0., 0., 0., 0.],
            ),
        ] {
            for (x, want) in x.into_iter().zip(want) {
                every_level(f, &[x], |level, x, y| {
                    assert_eq!(y.to_bits(), want.to_bits(), "{f:?}({x}) at {level}: {y}, want {want}");
                });
            }
            every_level(f, &[f32::NAN, -f32::NAN], |level, _, y| assert!(y.is_nan(), "{f:?}(NaN) at {level}: {y}"));
        }
    }
}
