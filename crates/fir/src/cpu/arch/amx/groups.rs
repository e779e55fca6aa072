//! Products of groups of 32 elements, half the depth of a tile of bytes: two at a time, each with sums of its own.

use std::arch::asm;

use super::{Left, ROW, Tiles};

/// Bytes of a right operand of [`Tiles::turn_i8`]: the first group, half a tile of zeros, the second group.
pub(crate) const PAIR: usize = 24 * ROW;

impl Tiles {
    /// Begins the products of both groups of 16 rows of 64 bytes, and stores to `before` what `ACC`, one of two pairs of tiles, held:
    /// sums of some turns ago, as to wait for them right away would take fifty cycles.
    #[inline(always)]
    pub(crate) fn turn_i8<const ACC: usize>(self, a: Left<'_, i8>, b: &[i8; PAIR], before: &mut [[i32; 256]; 2]) {
        assert!(15 * a.stride + ROW <= a.data.len());
        macro_rules! block {
            ($a:literal, $c:literal, $d:literal) => {
                asm!(
                    concat!("tileloadd ", $a, ", [{a} + {stride}*1]"),
                    "tileloadd tmm6, [{b} + {row}*1]",
                    concat!("tilestored [{c} + {row}*1], ", $c),
                    concat!("tilezero ", $c),
                    concat!("tdpbssd ", $c, ", ", $a, ", tmm6"),
                    "tileloadd tmm7, [{b} + {row}*1 + 512]",
                    concat!("tilestored [{c} + {row}*1 + 1024], ", $d),
                    concat!("tilezero ", $d),
                    concat!("tdpbssd ", $d, ", ", $a, ", tmm7"),
                    a = in(reg) a.data.as_ptr(), b = in(reg) b.as_ptr(), c = in(reg) before.as_mut_ptr(),
                    stride = in(reg) a.stride, row = in(reg) ROW,
                    options(nostack)
                )
            };
        }
        // Were tiles used by others between two calls, sums would be wrong, and memory as safe.
        // SAFETY: tiles of 16 rows of 64 bytes are configured on this thread (`self`); the assertion keeps the rows of `a` inside its
        // slice, the second tile of `b` begins with its zeros and ends with it, and `before` has two tiles.
        unsafe {
            match ACC {
                0 => block!("tmm4", "tmm0", "tmm1"),
                _ => block!("tmm5", "tmm2", "tmm3"),
            }
        }
    }

    /// Stores the sums of the last turn with `ACC`.
    #[inline(always)]
    pub(crate) fn end_turn<const ACC: usize>(self, sums: &mut [[i32; 256]; 2]) {
        macro_rules! block {
            ($c:literal, $d:literal) => {
                asm!(
                    concat!("tilestored [{c} + {row}*1], ", $c),
                    concat!("tilestored [{c} + {row}*1 + 1024], ", $d),
                    c = in(reg) sums.as_mut_ptr(), row = in(reg) ROW, options(nostack)
                )
            };
        }
        // SAFETY: as in `turn_i8`.
        unsafe {
            match ACC {
                0 => block!("tmm0", "tmm1"),
                _ => block!("tmm2", "tmm3"),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Amx, TileKernel};
    use super::*;
    use crate::cpu::arch::Avx512;

    struct Check;

    impl TileKernel for Check {
        type Out = ();
        #[inline(always)]
        fn run(self, _: Avx512, tiles: Tiles) {
            let number = |i: usize, seed: usize| ((i * 7 + seed * 13) % 255) as i8;
            // Rows 80 bytes apart; four products in turn, each of which stores what its tiles held.
            let left: [[i8; 15 * 80 + ROW]; 4] = std::array::from_fn(|n| std::array::from_fn(|i| number(i, n)));
            let right: [[i8; PAIR]; 4] =
                std::array::from_fn(|n| std::array::from_fn(|i| if i / 512 == 1 { 0 } else { number(i, n + 4) }));
            let mut got = [[[i32::MIN; 256]; 2]; 6];
            for (n, (data, right)) in left.iter().zip(&right).enumerate() {
                let left = Left { data: &data[..], stride: 80 };
                match n % 2 {
                    0 => tiles.turn_i8::<0>(left, right, &mut got[n]),
                    _ => tiles.turn_i8::<1>(left, right, &mut got[n]),
                }
            }
            tiles.end_turn::<0>(&mut got[4]);
            tiles.end_turn::<1>(&mut got[5]);
            for n in 0..4 {
                for (at, got) in got[n + 2].as_flattened().iter().enumerate() {
                    let (group, i, j) = (at / 256, at / 16 % 16, at % 16);
                    let product = |l: usize| {
                        let (a, b) =
                            (left[n][i * 80 + 32 * group + l], right[n][1024 * group + l / 4 * 64 + 4 * j + l % 4]);
                        i32::from(a) * i32::from(b)
                    };
                    assert_eq!(*got, (0..32).map(product).sum::<i32>(), "{n} {group} {i} {j}");
                }
            }
        }
    }

    #[test]
    #[expect(clippy::print_stderr, reason = "a skip must be seen")]
    fn products_of_groups_match_plain_loops() {
        match Amx::detect() {
            Some(amx) => amx.run(Check),
            None => eprintln!("skipped: this CPU or system has no AMX"),
        }
    }
}
