//! Elementary functions over vectors. Errors are stated against f64 over the whole range.

use super::vector::Vector;

/// `2^x`, within 2 ulp; 0 below -126, infinity above 128, NaN for NaN.
#[inline(always)]
pub(crate) fn exp2<V: Vector>(v: V, x: V::F) -> V::F {
    // `min` and `max` return their second operand for NaN, so NaN passes through.
    let c = v.max(v.splat(-127.0), v.min(v.splat(129.0), x));
    let n = v.round(c);
    let f = v.sub(c, n);
    // Minimax polynomial of 2^f on [-0.5, 0.5], relative error 2e-9.
    let mut p = v.splat(1.535_336_3e-4);
    p = v.fma(p, f, v.splat(1.339_887_4e-3));
    p = v.fma(p, f, v.splat(9.618_437e-3));
    p = v.fma(p, f, v.splat(5.550_332_5e-2));
    p = v.fma(p, f, v.splat(2.402_264_8e-1));
    p = v.fma(p, f, v.splat(std::f32::consts::LN_2));
    p = v.fma(p, f, v.splat(1.0));
    // In two steps, as 2^128 is not a number.
    let half = v.round(v.mul(n, v.splat(0.5)));
    let y = v.mul(v.mul(p, v.pow2(half)), v.pow2(v.sub(n, half)));
    v.select(v.lt(x, v.splat(-126.0)), v.splat(0.0), y)
}

/// `e^x`, within 3 ulp for `|x| < 1` and `|x|` ulp beyond (the rounding of `x * log2(e)`).
#[inline(always)]
pub(crate) fn exp<V: Vector>(v: V, x: V::F) -> V::F {
    // x * log2(e) in two parts keeps the fraction exact to an ulp.
    let hi = v.mul(x, v.splat(std::f32::consts::LOG2_E));
    let clamped = v.max(v.splat(-127.0), v.min(v.splat(129.0), hi));
    let n = v.round(clamped);
    // f = x - n * ln2, with ln2 in two parts (Cody-Waite), then back to base 2.
    let f = v.fma(n, v.splat(-0.693_359_4), x);
    let f = v.fma(n, v.splat(2.121_944_4e-4), f);
    let f = v.min(v.splat(0.4), v.max(v.splat(-0.4), f));
    let mut p = v.splat(1.987_569_1e-4);
    p = v.fma(p, f, v.splat(1.398_199_9e-3));
    p = v.fma(p, f, v.splat(8.333_452e-3));
    p = v.fma(p, f, v.splat(4.166_579_6e-2));
    p = v.fma(p, f, v.splat(1.666_666_5e-1));
    p = v.fma(p, f, v.splat(5.000_000_1e-1));
    let f2 = v.mul(f, f);
    p = v.fma(p, f2, v.add(f, v.splat(1.0)));
    let half = v.round(v.mul(n, v.splat(0.5)));
    let y = v.mul(v.mul(p, v.pow2(half)), v.pow2(v.sub(n, half)));
    let y = v.select(v.lt(hi, v.splat(-126.0)), v.splat(0.0), y);
    // NaN: `f` was clamped to a number, so bring it back.
    v.add(y, v.mul(x, v.select(v.lt(v.abs(x), v.splat(f32::INFINITY)), v.splat(0.0), v.sub(x, x))))
}

/// `tanh x`, within 4 ulp.
#[inline(always)]
pub(crate) fn tanh<V: Vector>(v: V, x: V::F) -> V::F {
    let a = v.abs(x);
    // Small: odd polynomial, as 1 - 2/(e^2x + 1) cancels.
    let x2 = v.mul(x, x);
    let mut p = v.splat(-5.704_988_7e-3);
    p = v.fma(p, x2, v.splat(2.063_908_9e-2));
    p = v.fma(p, x2, v.splat(-5.373_971_5e-2));
    p = v.fma(p, x2, v.splat(1.333_144_2e-1));
    p = v.fma(p, x2, v.splat(-3.333_328_2e-1));
    let small = v.fma(v.mul(p, x2), x, x);
    // Large: through e^2|x|.
    let e = exp(v, v.add(a, a));
    let big = v.sub(v.splat(1.0), v.div(v.splat(2.0), v.add(e, v.splat(1.0))));
    let big = v.select(v.lt(x, v.splat(0.0)), v.sub(v.splat(0.0), big), big);
    v.select(v.lt(a, v.splat(0.625)), small, big)
}

/// `1 / (1 + e^-x)`, within 4 ulp.
#[inline(always)]
pub(crate) fn sigmoid<V: Vector>(v: V, x: V::F) -> V::F {
    let e = exp(v, v.sub(v.splat(0.0), x));
    v.div(v.splat(1.0), v.add(v.splat(1.0), e))
}
