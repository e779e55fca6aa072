//! Element types: [`DType`] names them at run time, [`Element`] and [`Float`] at compile time.

use bytemuck::{Pod, Zeroable};
pub use half::{bf16, f16};

/// Type of a tensor's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DType {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// The upper half of an f32.
    BF16,
    /// FP8 with 4 exponent bits, no infinity, largest value 448.
    E4M3,
    /// FP8 with 5 exponent bits, IEEE-like, largest finite value 57344.
    E5M2,
    /// An exponent alone: `2^(bits - 127)`, the scale of MX formats.
    E8M0,
    /// Two FP4 values in a byte, the first in the low nibble. Shapes and strides count bytes.
    E2M1x2,
    /// 8-bit integer.
    I8,
    /// 16-bit integer.
    I16,
    /// 32-bit integer.
    I32,
    /// 64-bit integer.
    I64,
    /// Byte.
    U8,
    /// 32-bit unsigned integer.
    U32,
    /// One byte, 0 or 1.
    Bool,
}

impl DType {
    /// Bytes per element.
    pub const fn size(self) -> usize {
        match self {
            Self::I64 => 8,
            Self::F32 | Self::I32 | Self::U32 => 4,
            Self::F16 | Self::BF16 | Self::I16 => 2,
            Self::E4M3 | Self::E5M2 | Self::E8M0 | Self::E2M1x2 | Self::I8 | Self::U8 | Self::Bool => 1,
        }
    }

    /// Its name in messages and file names.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::BF16 => "bf16",
            Self::E4M3 => "e4m3",
            Self::E5M2 => "e5m2",
            Self::E8M0 => "e8m0",
            Self::E2M1x2 => "e2m1x2",
            Self::I8 => "i8",
            Self::I16 => "i16",
            Self::I32 => "i32",
            Self::I64 => "i64",
            Self::U8 => "u8",
            Self::U32 => "u32",
            Self::Bool => "bool",
        }
    }
}

impl std::fmt::Display for DType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

mod sealed {
    pub trait Sealed {}
}

/// A Rust type that a tensor may hold.
pub trait Element: Pod + Send + Sync + PartialEq + std::fmt::Debug + sealed::Sealed {
    /// Its run-time name.
    const DTYPE: DType;
}

/// An element that stands for a real number.
pub trait Float: Element {
    /// Exact value.
    fn to_f32(self) -> f32;
    /// Nearest value, ties to even; too large a number saturates in fp8 and becomes infinite elsewhere.
    fn from_f32(x: f32) -> Self;
}

/// FP8 e4m3 (finite: `0x7f` is NaN, no infinity).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(transparent)]
pub struct E4m3(pub u8);

/// FP8 e5m2.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(transparent)]
pub struct E5m2(pub u8);

/// A power of two: `2^(bits - 127)`; `0xff` is NaN.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(transparent)]
pub struct E8m0(pub u8);

/// Two FP4 e2m1 values, the first in the low nibble.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(transparent)]
pub struct E2m1x2(pub u8);

/// A byte that is 0 or 1; any other byte reads as true.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(transparent)]
pub struct Bool(pub u8);

impl Bool {
    /// Its truth value.
    pub const fn get(self) -> bool {
        self.0 != 0
    }
}

/// Magnitudes of the eight non-negative e2m1 codes.
pub const E2M1_VALUES: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

impl E2m1x2 {
    /// Both values, first one first.
    pub fn to_f32(self) -> [f32; 2] {
        let one = |code: u8| {
            let v = E2M1_VALUES[(code & 7) as usize];
            if code & 8 != 0 { -v } else { v }
        };
        [one(self.0 & 15), one(self.0 >> 4)]
    }

    /// Nearest codes, ties to the even code; saturates at 6, NaN becomes 0.
    #[inline]
    pub fn from_f32(x: [f32; 2]) -> Self {
        let one = |x: f32| {
            // How many midpoints between neighbours lie below; at a tie the code with an even mantissa bit wins.
            // Sums of comparisons: no branch, so a loop over this becomes vectors.
            let a = x.abs();
            let low = u8::from(a > 0.25) + u8::from(a >= 0.75) + u8::from(a > 1.25) + u8::from(a >= 1.75);
            let high = u8::from(a > 2.5) + u8::from(a >= 3.5) + u8::from(a > 5.0);
            let negative = x.is_sign_negative() & !x.is_nan();
            (low + high) | u8::from(negative) << 3
        };
        Self(one(x[0]) | one(x[1]) << 4)
    }
}

impl E8m0 {
    /// The least power of two that is not below `x`, from `2^-127` to `2^127`; NaN for NaN.
    #[inline(always)]
    pub fn at_least(x: f32) -> Self {
        let bits = x.to_bits();
        // Any fraction carries into the exponent. Below 2^-126 there is none to carry into: 2^-127 is half of its step.
        let up = bits.wrapping_add(0x7f_ffff) >> 23;
        let code = if bits <= 1 << 22 { 0 } else { up.min(254) };
        Self(match x {
            x if x.is_nan() => 0xff,
            x if x <= 0.0 => 0,
            _ => code as u8,
        })
    }

    /// Its value, NaN for `0xff`.
    pub fn to_f32(self) -> f32 {
        match self.0 {
            0xff => f32::NAN,
            0 => f32::from_bits(1 << 22), // 2^-127 is subnormal in f32
            e => f32::from_bits(u32::from(e) << 23),
        }
    }
}

/// Rounds to a format of `EXP` exponent and `MAN` mantissa bits; returns sign-less bits that may exceed the format.
/// Without a branch, so that a loop over it is vectorized.
#[inline(always)]
fn round_to<const EXP: u32, const MAN: u32>(x: f32) -> u32 {
    let bias = (1u32 << (EXP - 1)) - 1;
    let bits = x.to_bits() & 0x7fff_ffff;
    // Subnormal: multiples of 2^(1 - bias - MAN), the last place of this number, so adding it rounds to them.
    let shifter = (127 + 24 - bias - MAN) << 23;
    let subnormal = (f32::from_bits(bits) + f32::from_bits(shifter)).to_bits().wrapping_sub(shifter);
    let shift = 23 - MAN;
    let half_below = (1u32 << (shift - 1)) - 1;
    let rounded = bits + half_below + ((bits >> shift) & 1);
    let normal = (rounded >> shift).wrapping_sub((127 - bias) << MAN);
    if bits < (128 - bias) << 23 { subnormal } else { normal }
}

impl Float for E4m3 {
    fn to_f32(self) -> f32 {
        let sign = u32::from(self.0 & 0x80) << 24;
        match self.0 & 0x7f {
            0x7f => f32::from_bits(sign | 0x7fc0_0000),
            // 2^120 re-biases 7 to 127 and makes subnormals come out exactly. By its bits: `powi` may be an ulp off.
            m => f32::from_bits(sign | u32::from(m) << 20) * f32::from_bits(247 << 23),
        }
    }

    #[inline(always)]
    fn from_f32(x: f32) -> Self {
        let sign = (x.to_bits() >> 24) & 0x80;
        let code = if x.is_nan() { 0x7f } else { round_to::<4, 3>(x).min(0x7e) };
        Self((sign | code) as u8)
    }
}

impl Float for E5m2 {
    fn to_f32(self) -> f32 {
        f16::from_bits(u16::from(self.0) << 8).to_f32()
    }

    #[inline(always)]
    fn from_f32(x: f32) -> Self {
        let sign = (x.to_bits() >> 24) & 0x80;
        let finite = round_to::<5, 2>(x).min(0x7b);
        let code = if x.is_nan() { 0x7f } else { finite };
        let code = if x.is_infinite() { 0x7c } else { code };
        Self((sign | code) as u8)
    }
}

impl Float for f32 {
    fn to_f32(self) -> f32 {
        self
    }
    fn from_f32(x: f32) -> Self {
        x
    }
}

impl Float for f16 {
    fn to_f32(self) -> f32 {
        self.to_f32()
    }
    fn from_f32(x: f32) -> Self {
        Self::from_f32(x)
    }
}

impl Float for bf16 {
    fn to_f32(self) -> f32 {
        self.to_f32()
    }
    fn from_f32(x: f32) -> Self {
        Self::from_f32(x)
    }
}

macro_rules! elements {
    ($($t:ty => $d:ident),* $(,)?) => {$(
        impl sealed::Sealed for $t {}
        impl Element for $t {
            const DTYPE: DType = DType::$d;
        }
    )*};
}
elements! {
    f32 => F32, f16 => F16, bf16 => BF16, E4m3 => E4M3, E5m2 => E5M2, E8m0 => E8M0, E2m1x2 => E2M1x2,
    i8 => I8, i16 => I16, i32 => I32, i64 => I64, u8 => U8, u32 => U32, Bool => Bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every value of `T` in ascending order of its non-negative codes.
    fn nearest<T: Float>(codes: impl Iterator<Item = u8> + Clone, make: impl Fn(u8) -> T, x: f32) -> u8 {
        let mut best = (f32::INFINITY, 0u8);
        for c in codes {
            let e = (make(c).to_f32() - x).abs();
            if e < best.0 || (e == best.0 && c & 1 == 0) {
                best = (e, c);
            }
        }
        best.1
    }

    #[test]
    fn e4m3_round_trips_and_rounds_to_nearest() {
        for c in 0..=255u8 {
            let x = E4m3(c).to_f32();
            assert!(x.is_nan() || E4m3::from_f32(x).0 == c, "{c:#x} {x}");
        }
        for i in (0..200_000u32).step_by(if cfg!(miri) { 20_011 } else { 1 }) {
            let x = f32::from_bits(0x3000_0000 + i * 0xd1f);
            if x < 448.0 {
                assert_eq!(E4m3::from_f32(x).0, nearest(0..0x7f, E4m3, x), "{x}");
            }
        }
        for i in 0..20_000u32 {
            // Below half the smallest number, at it, and through the subnormals.
            let x = i as f32 * 2f32.powi(-20);
            assert_eq!(E4m3::from_f32(x).0, nearest(0..0x7f, E4m3, x), "{x}");
            assert_eq!(E4m3::from_f32(-x).0, nearest(0..0x7f, E4m3, x) | 0x80, "{x}");
        }
        assert_eq!(E4m3::from_f32(1e9).to_f32(), 448.0);
        assert_eq!(E4m3::from_f32(1e-40).0, 0);
        assert_eq!(E4m3::from_f32(f32::NEG_INFINITY).to_f32(), -448.0);
        assert!(E4m3::from_f32(f32::NAN).to_f32().is_nan());
    }

    #[test]
    fn e5m2_round_trips_and_rounds_to_nearest() {
        for c in 0..=255u8 {
            let x = E5m2(c).to_f32();
            assert!(x.is_nan() || E5m2::from_f32(x).0 == c, "{c:#x} {x}");
        }
        for i in (0..200_000u32).step_by(if cfg!(miri) { 20_011 } else { 1 }) {
            let x = f32::from_bits(0x3000_0000 + i * 0xd1f);
            if x < 57344.0 {
                assert_eq!(E5m2::from_f32(x).0, nearest(0..0x7c, E5m2, x), "{x}");
            }
        }
        for i in 0..20_000u32 {
            let x = i as f32 * 2f32.powi(-27);
            assert_eq!(E5m2::from_f32(x).0, nearest(0..0x7c, E5m2, x), "{x}");
        }
        assert_eq!(E5m2::from_f32(1e9).to_f32(), 57344.0);
        assert_eq!(E5m2::from_f32(f32::NEG_INFINITY).to_f32(), f32::NEG_INFINITY);
        assert!(E5m2::from_f32(f32::NAN).to_f32().is_nan());
    }

    #[test]
    fn e2m1_rounds_ties_to_even() {
        for (x, want) in [
            (0.25, 0.0),
            (0.26, 0.5),
            (0.75, 1.0),
            (1.25, 1.0),
            (1.75, 2.0),
            (2.5, 2.0),
            (3.5, 4.0),
            (5.0, 4.0),
            (5.1, 6.0),
            (9.0, 6.0),
        ] {
            assert_eq!(E2m1x2::from_f32([x, -x]).to_f32(), [want, -want], "{x}");
        }
        assert_eq!(E2m1x2::from_f32([f32::NAN, 1.0]).to_f32(), [0.0, 1.0]);
    }

    #[test]
    fn e8m0_is_a_power_of_two() {
        assert_eq!(E8m0(127).to_f32(), 1.0);
        assert_eq!(E8m0(0).to_f32(), E8m0(1).to_f32() / 2.0);
        assert_eq!(E8m0(1).to_f32(), f32::MIN_POSITIVE);
        assert_eq!(E8m0(254).to_f32() * E8m0(0).to_f32(), 1.0);
        assert!(E8m0(255).to_f32().is_nan());
        for c in 0..255u8 {
            let x = E8m0(c).to_f32();
            assert_eq!(E8m0::at_least(x), E8m0(c));
            assert_eq!(E8m0::at_least(x.next_down()), E8m0(c), "below {x}");
            assert_eq!(E8m0::at_least(x.next_up()), E8m0(c.saturating_add(1).min(254)), "above {x}");
        }
        for (x, want) in [(0.0, 0), (-0.0, 0), (-1.0, 0), (f32::INFINITY, 254), (f32::NEG_INFINITY, 0)] {
            assert_eq!(E8m0::at_least(x), E8m0(want), "{x}");
        }
        assert_eq!(E8m0::at_least(-f32::NAN), E8m0(255));
    }
}
