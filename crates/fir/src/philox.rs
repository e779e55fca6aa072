//! Random numbers as a function: Philox4x32-10, the counter-based generator of Salmon et al. (SC 2011).
//!
//! A draw is `philox(counter, key)`: it has no state to carry, so any draw of any request is made anywhere, in any
//! order, and the same numbers come out on every device. The 128 counter bits and 64 key bits are used as
//!
//! | word | holds |
//! |---|---|
//! | key 0, 1 | `seed`, low and high half |
//! | counter 0 | number of the draw, divided by 4 (a block gives four words) |
//! | counter 1 | stream: tells the rows of a call apart that share one [`RngState`] |
//! | counter 2, 3 | `offset`, low and high half |

use crate::filters::PerRow;

/// Where a row's random numbers come from: which sequence, and where in it.
///
/// An engine that wants a request's tokens to be the same alone and in any batch keeps one per request: `seed` from
/// the request, `offset` the position of the token to be drawn, and gives them as [`PerRow::Each`]. Every operator
/// uses stream 0 for them, so the row's place in the batch has no part in the draw. With [`PerRow::One`] row `r` of
/// the output uses stream `r`: all rows differ, and each depends on its place.
///
/// An operator draws as often as it needs from one `(seed, offset)`; the next call needs another `offset`, and one
/// step on is enough.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct RngState {
    /// Chooses the sequence.
    pub seed: u64,
    /// Place in the sequence, in calls.
    pub offset: u64,
}

impl RngState {
    /// Draw number `draw` of a stream: uniform in `[0, 1)`, a multiple of 2⁻²⁴.
    #[must_use]
    pub fn uniform(self, stream: u32, draw: u32) -> f32 {
        let counter = [draw / 4, stream, self.offset as u32, (self.offset >> 32) as u32];
        let word = philox4x32(counter, [self.seed as u32, (self.seed >> 32) as u32])[draw as usize % 4];
        (word >> 8) as f32 * (1.0 / 16_777_216.0)
    }
}

impl PerRow<'_, RngState> {
    /// Draw number `draw` of output row `row`: from stream `row` of the one state, or stream 0 of the row's own.
    #[must_use]
    pub fn uniform(&self, row: usize, draw: u32) -> f32 {
        match self {
            Self::One(state) => state.uniform(row as u32, draw),
            Self::Each(states) => states[row].uniform(0, draw),
        }
    }
}

/// Philox4x32 with 10 rounds.
#[must_use]
pub fn philox4x32(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let ([mut c0, mut c1, mut c2, mut c3], [mut k0, mut k1]) = (counter, key);
    for _ in 0..10 {
        let (a, b) = (u64::from(c0) * 0xd251_1f53, u64::from(c2) * 0xcd9e_8d57);
        [c0, c1, c2, c3] = [(b >> 32) as u32 ^ c1 ^ k0, b as u32, (a >> 32) as u32 ^ c3 ^ k1, a as u32];
        // The Weyl steps: golden ratio and sqrt(3) - 1, in 32 bits.
        k0 = k0.wrapping_add(0x9e37_79b9);
        k1 = k1.wrapping_add(0xbb67_ae85);
    }
    [c0, c1, c2, c3]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The vectors that Random123 publishes in `kat_vectors`.
    #[test]
    fn matches_the_known_answers() {
        const F: u32 = u32::MAX;
        for (counter, key, want) in [
            ([0; 4], [0; 2], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]),
            ([F; 4], [F; 2], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]),
            (
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xa409_3822, 0x299f_31d0],
                [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
            ),
        ] {
            assert_eq!(philox4x32(counter, key), want);
        }
    }

    #[test]
    fn uniforms_are_the_top_24_bits_of_the_words_in_order() {
        let zero = RngState::default();
        for (draw, word) in [0x6627_e8d5u32, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8].into_iter().enumerate() {
            assert_eq!(zero.uniform(0, draw as u32), (word >> 8) as f32 / 16_777_216.0);
        }
        let s = RngState { seed: 0x299f_31d0_a409_3822, offset: 0x0370_7344_1319_8a2e };
        let word = philox4x32([7, 9, 0x1319_8a2e, 0x0370_7344], [0xa409_3822, 0x299f_31d0])[2];
        assert_eq!(s.uniform(9, 30), (word >> 8) as f32 / 16_777_216.0);
    }

    #[test]
    fn uniforms_stay_below_one_and_fill_the_interval() {
        let mut bins = [0u32; 16];
        for i in 0..16_384u32 {
            let u = RngState { seed: 5, offset: u64::from(i % 8) }.uniform(i / 64, i / 8 % 8);
            assert!((0.0..1.0).contains(&u));
            bins[(u * 16.0) as usize] += 1;
        }
        let chi2: f32 = bins.iter().map(|&b| (b as f32 - 1024.0).powi(2) / 1024.0).sum();
        assert!(chi2 < 45.0, "{chi2} {bins:?}");
    }
}
