//! [`BlockFormat`]: weights quantized in blocks, as GGUF files hold them.

use super::f16;
use crate::error::{Error, Result};

/// A block format of GGUF: codes of a few bits with scales of their own.
///
/// A weight is `d * q` or `d * q + m`, with f16 `d` and `m` per block of 32, in the first five; and
/// `d * sc * q` or `d * sc * q - dmin * min`, with f16 `d` and `dmin` per block of 256 and small integers `sc` and `min`
/// per 16 or 32 weights, in the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum BlockFormat {
    /// 4 bits, `d * (q - 8)`.
    Q4_0,
    /// 4 bits, `d * q + m`.
    Q4_1,
    /// 5 bits, `d * (q - 16)`.
    Q5_0,
    /// 5 bits, `d * q + m`.
    Q5_1,
    /// 8 bits, signed.
    Q8_0,
    /// 2 bits; 4-bit scale and minimum per 16.
    Q2K,
    /// 3 bits, `q - 4`; 6-bit signed scale per 16.
    Q3K,
    /// 4 bits; 6-bit scale and minimum per 32.
    Q4K,
    /// 5 bits; 6-bit scale and minimum per 32.
    Q5K,
    /// 6 bits, `q - 32`; 8-bit signed scale per 16.
    Q6K,
    /// 4 bits, an index into [`IQ4_VALUES`]; 6-bit signed scale per 32.
    Iq4Xs,
}

/// Values of the sixteen codes of [`BlockFormat::Iq4Xs`].
pub const IQ4_VALUES: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

impl BlockFormat {
    /// All formats.
    pub const ALL: [Self; 11] = [
        Self::Q4_0,
        Self::Q4_1,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q8_0,
        Self::Q2K,
        Self::Q3K,
        Self::Q4K,
        Self::Q5K,
        Self::Q6K,
        Self::Iq4Xs,
    ];

    /// Weights per block: 32 or 256.
    pub const fn elements(self) -> usize {
        match self {
            Self::Q4_0 | Self::Q4_1 | Self::Q5_0 | Self::Q5_1 | Self::Q8_0 => 32,
            _ => 256,
        }
    }

    /// Bytes per block.
    pub const fn bytes(self) -> usize {
        match self {
            Self::Q4_0 => 18,
            Self::Q4_1 => 20,
            Self::Q5_0 => 22,
            Self::Q5_1 => 24,
            Self::Q8_0 => 34,
            Self::Q2K => 84,
            Self::Q3K => 110,
            Self::Q4K => 144,
            Self::Q5K => 176,
            Self::Q6K => 210,
            Self::Iq4Xs => 136,
        }
    }

    /// Its name in GGUF tools.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Q4_0 => "Q4_0",
            Self::Q4_1 => "Q4_1",
            Self::Q5_0 => "Q5_0",
            Self::Q5_1 => "Q5_1",
            Self::Q8_0 => "Q8_0",
            Self::Q2K => "Q2_K",
            Self::Q3K => "Q3_K",
            Self::Q4K => "Q4_K",
            Self::Q5K => "Q5_K",
            Self::Q6K => "Q6_K",
            Self::Iq4Xs => "IQ4_XS",
        }
    }

    /// Its number in a GGUF file's tensor table.
    pub const fn gguf(self) -> u32 {
        match self {
            Self::Q4_0 => 2,
            Self::Q4_1 => 3,
            Self::Q5_0 => 6,
            Self::Q5_1 => 7,
            Self::Q8_0 => 8,
            Self::Q2K => 10,
            Self::Q3K => 11,
            Self::Q4K => 12,
            Self::Q5K => 13,
            Self::Q6K => 14,
            Self::Iq4Xs => 23,
        }
    }

    /// The format with this number in a GGUF file's tensor table.
    pub fn from_gguf(id: u32) -> Result<Self> {
        Self::ALL.into_iter().find(|f| f.gguf() == id).ok_or_else(|| {
            let known = Self::ALL.map(|f| format!("{} ({f})", f.gguf())).join(", ");
            Error::value("BlockFormat", "id", id, known)
        })
    }

    /// Bytes of a row of `k` weights; `k` must be whole blocks.
    pub fn row_bytes(self, op: &'static str, k: usize) -> Result<usize> {
        if !k.is_multiple_of(self.elements()) {
            let want = format!("a multiple of {}, the block of {self}", self.elements());
            return Err(Error::value(op, "k", k, want));
        }
        (k / self.elements())
            .checked_mul(self.bytes())
            .ok_or_else(|| Error::value(op, "k", k, format!("a row of {self} that memory can hold")))
    }

    /// What is subtracted from a code. Codes of [`Self::Q8_0`] count as stored with 128 added, those of
    /// [`Self::Iq4Xs`] as [`IQ4_VALUES`] with 128 added.
    pub(crate) const fn offset(self) -> i32 {
        match self {
            Self::Q4_0 => 8,
            Self::Q5_0 => 16,
            Self::Q8_0 | Self::Iq4Xs => 128,
            Self::Q3K => 4,
            Self::Q6K => 32,
            _ => 0,
        }
    }

    /// Bits of a packed code's low and high part.
    pub(crate) const fn bits(self) -> (usize, usize) {
        match self {
            Self::Q8_0 => (8, 0),
            Self::Q4_0 | Self::Q4_1 | Self::Q4K | Self::Iq4Xs => (4, 0),
            Self::Q5_0 | Self::Q5_1 | Self::Q5K => (4, 1),
            Self::Q6K => (4, 2),
            Self::Q2K => (2, 0),
            Self::Q3K => (2, 1),
        }
    }

    /// Weights per integer scale; per f16 scale where there are no others.
    pub(crate) const fn sub(self) -> usize {
        match self {
            Self::Q2K | Self::Q3K | Self::Q6K => 16,
            _ => 32,
        }
    }

    /// Whether weights have a minimum beside their scale.
    pub(crate) const fn has_min(self) -> bool {
        matches!(self, Self::Q4_1 | Self::Q5_1 | Self::Q2K | Self::Q4K | Self::Q5K)
    }

    /// Whether products take scales and minima in whole steps: see [`Steps`].
    pub(crate) const fn is_stepped(self) -> bool {
        matches!(self, Self::Q4_0 | Self::Q4_1 | Self::Q5_0 | Self::Q5_1)
    }

    /// The integer that a code stands for.
    pub(crate) fn level(self, code: u8) -> i32 {
        match self {
            Self::Iq4Xs => i32::from(IQ4_VALUES[usize::from(code & 15)]),
            _ => i32::from(code) - self.offset(),
        }
    }
}

impl std::fmt::Display for BlockFormat {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for BlockFormat {
    type Err = Error;
    fn from_str(s: &str) -> Result<Self> {
        Self::ALL
            .into_iter()
            .find(|f| f.name() == s)
            .ok_or_else(|| Error::value("BlockFormat", "name", format!("{s:?}"), Self::ALL.map(Self::name).join(", ")))
    }
}

/// A block with its fields apart: what every reader of a format starts from.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlockFields {
    /// Scale of all weights.
    pub(crate) d: f16,
    /// The minimum, or the scale of the minima; 0 without them.
    pub(crate) m: f16,
    /// One code per weight, as many as the format's blocks have.
    pub(crate) codes: [u8; 256],
    /// Integer scales; 1 where a format has none.
    pub(crate) scales: [i8; 16],
    /// Integer minima; 0 where a format has none.
    pub(crate) mins: [u8; 16],
}

impl BlockFields {
    pub(crate) const ZERO: Self = Self { d: f16::ZERO, m: f16::ZERO, codes: [0; 256], scales: [1; 16], mins: [0; 16] };

    /// Reads a block of `format`, of which there must be `format.bytes()` bytes.
    pub(crate) fn read(&mut self, format: BlockFormat, bytes: &[u8]) {
        let half = |at: usize| f16::from_le_bytes([bytes[at], bytes[at + 1]]);
        let codes = &mut self.codes;
        match format {
            BlockFormat::Q4_0 | BlockFormat::Q4_1 | BlockFormat::Q5_0 | BlockFormat::Q5_1 => {
                self.d = half(0);
                let mut at = 2;
                if format.has_min() {
                    self.m = half(2);
                    at = 4;
                }
                let mut high = 0;
                if matches!(format, BlockFormat::Q5_0 | BlockFormat::Q5_1) {
                    high = u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
                    at += 4;
                }
                for (i, &q) in bytes[at..at + 16].iter().enumerate() {
                    codes[i] = q & 15 | ((high >> i & 1) << 4) as u8;
                    codes[16 + i] = q >> 4 | ((high >> (16 + i) & 1) << 4) as u8;
                }
            }
            BlockFormat::Q8_0 => {
                self.d = half(0);
                for (code, q) in codes.iter_mut().zip(&bytes[2..34]) {
                    *code = q ^ 0x80;
                }
            }
            BlockFormat::Q2K => {
                (self.d, self.m) = (half(80), half(82));
                for (j, &s) in bytes[..16].iter().enumerate() {
                    (self.scales[j], self.mins[j]) = ((s & 15) as i8, s >> 4);
                }
                spread::<2, 32>(&bytes[16..80], codes);
            }
            BlockFormat::Q3K => {
                self.d = half(108);
                for j in 0..16 {
                    let low = bytes[96 + j % 8] >> (4 * (j / 8)) & 15;
                    let high = bytes[104 + j % 4] >> (2 * (j / 4)) & 3;
                    self.scales[j] = (low | high << 4) as i8 - 32;
                }
                spread::<2, 32>(&bytes[32..96], codes);
                add_bit::<2>(&bytes[..32], codes);
            }
            BlockFormat::Q4K | BlockFormat::Q5K => {
                (self.d, self.m) = (half(0), half(2));
                let packed = &bytes[4..16];
                for j in 0..4 {
                    let (sc, min, both) = (packed[j], packed[4 + j], packed[8 + j]);
                    (self.scales[j], self.mins[j]) = ((sc & 63) as i8, min & 63);
                    (self.scales[4 + j], self.mins[4 + j]) =
                        ((both & 15 | sc >> 6 << 4) as i8, both >> 4 | min >> 6 << 4);
                }
                if format == BlockFormat::Q4K {
                    spread::<4, 32>(&bytes[16..144], codes);
                } else {
                    spread::<4, 32>(&bytes[48..176], codes);
                    add_bit::<4>(&bytes[16..48], codes);
                }
            }
            BlockFormat::Q6K => {
                self.d = half(208);
                for (s, &b) in self.scales.iter_mut().zip(&bytes[192..208]) {
                    *s = b as i8;
                }
                let mut high = [0; 256];
                spread::<4, 64>(&bytes[..128], codes);
                spread::<2, 32>(&bytes[128..192], &mut high);
                for (code, high) in codes.iter_mut().zip(high) {
                    *code |= high << 4;
                }
            }
            BlockFormat::Iq4Xs => {
                self.d = half(0);
                let high = u16::from_le_bytes([bytes[2], bytes[3]]);
                for j in 0..8 {
                    let low = bytes[4 + j / 2] >> (4 * (j % 2)) & 15;
                    self.scales[j] = (low | ((high >> (2 * j) & 3) << 4) as u8) as i8 - 32;
                }
                spread::<4, 16>(&bytes[8..136], codes);
            }
        }
    }
}

/// Scales and minima of the blocks that a row has in 256 weights, or in its last ones, as whole multiples of one power of two: a weight
/// is `step * (d * q + m)`, and the integers add up exactly over all the blocks.
///
/// The step is the least, from 2^-24 on, by which no weight that such blocks can hold is over 32000. A scale or minimum of f16 stays
/// as it is from 1024 steps on; of others the nearest multiple is taken.
pub(crate) struct Steps {
    /// NaN, and all else 0, if one of the blocks' numbers is not finite.
    pub(crate) step: f16,
    pub(crate) d: [i16; 8],
    pub(crate) m: [i16; 8],
}

impl Steps {
    /// Of `(d, m)` of up to eight blocks.
    pub(crate) fn new(format: BlockFormat, blocks: &[(f16, f16)]) -> Self {
        let (low, high) = format.bits();
        let last = ((1 << (low + high)) - 1) as u8;
        let ends = [0, last].map(|code| format.level(code) as f32);
        let mut most = 0f32;
        for &(d, m) in blocks {
            if !(d.is_finite() && m.is_finite()) {
                return Self { step: f16::NAN, d: [0; 8], m: [0; 8] };
            }
            for end in ends {
                most = most.max((d.to_f32() * end + m.to_f32()).abs());
            }
        }
        let mut step = f16::MIN_POSITIVE_SUBNORMAL.to_f32();
        while most > 32000.0 * step {
            step *= 2.0;
        }
        let mut steps = Self { step: f16::from_f32(step), d: [0; 8], m: [0; 8] };
        for (i, &(d, m)) in blocks.iter().enumerate() {
            // Within 16 bits: a weight of 32000 steps has a scale and a minimum of no more than twice as many over its largest code.
            steps.d[i] = (d.to_f32() / step).round_ties_even() as i16;
            steps.m[i] = (m.to_f32() / step).round_ties_even() as i16;
        }
        steps
    }
}

/// Codes of `BITS` bits: the lowest bits of `RUN` bytes, then the next bits of the same bytes, and so on; then the next
/// `RUN` bytes.
fn spread<const BITS: usize, const RUN: usize>(bytes: &[u8], codes: &mut [u8; 256]) {
    let runs = codes.chunks_exact_mut(RUN);
    for (i, run) in runs.enumerate() {
        let (from, shift) = (i / (8 / BITS) * RUN, BITS * (i % (8 / BITS)));
        for (code, byte) in run.iter_mut().zip(&bytes[from..from + RUN]) {
            *code = byte >> shift & ((1 << BITS) - 1);
        }
    }
}

/// Bit `AT` of the codes: bit `i` of 32 bytes for the `i`th 32 codes.
fn add_bit<const AT: usize>(bytes: &[u8], codes: &mut [u8; 256]) {
    for (i, run) in codes.chunks_exact_mut(32).enumerate() {
        for (code, byte) in run.iter_mut().zip(bytes) {
            *code |= (byte >> i & 1) << AT;
        }
    }
}
