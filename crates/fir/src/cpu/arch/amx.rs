//! AMX: products of tiles, 16 rows of 64 bytes each.
//!
//! A thread that computes with tiles does so inside [`Amx::run`], which configures them and releases them after; the
//! [`Tiles`] it passes is the proof. A product keeps its sums in tiles over its whole depth, so a call is one `asm!`
//! block and no tile lives between two of them.
//!
//! A left operand is rows along the depth, as it lies in memory. A right operand is packed: a tile of 1 KB holds, for
//! each of 16 depth groups of 4 bytes (2 bf16, 4 i8), those of its 16 columns side by side. See [`Avx512::pack_rows`] and
//! [`Avx512::pack_columns`].

mod groups;
pub(crate) use groups::PAIR;

use std::arch::asm;
use std::arch::x86_64::*;
use std::marker::PhantomData;
use std::sync::OnceLock;

use super::x86::{Avx512, transpose};
use crate::cpu::vector::Vector;
use crate::tensor::bf16;

/// Bytes of a tile row.
const ROW: usize = 64;
/// bf16 values of a packed tile: 32 deep, 16 columns.
pub(crate) const TILE: usize = 512;

/// Proof that this process may use AMX tiles with bf16 and i8, and has AVX-512 BF16, VBMI and VNNI and all that
/// [`Avx512`] proves; only `detect` makes one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Amx(Avx512);

/// Proof that this thread's tiles are configured. Sums may stay in them from call to call: were they used by others in
/// between, sums would be wrong, and memory as safe.
#[derive(Clone, Copy)]
pub(crate) struct Tiles {
    amx: Amx,
    /// Not of another thread.
    here: PhantomData<*const ()>,
}

/// A computation with tiles.
pub(crate) trait TileKernel {
    /// What it returns.
    type Out;
    /// The algorithm. Implementations are `#[inline(always)]`.
    fn run(self, v: Avx512, tiles: Tiles) -> Self::Out;
}

impl Amx {
    pub(crate) fn detect() -> Option<Self> {
        static ALLOWED: OnceLock<bool> = OnceLock::new();
        let avx512 = Avx512::detect()?;
        ALLOWED.get_or_init(|| has_tiles() || Self::emulated()).then_some(Self(avx512))
    }

    /// Whether tiles are emulated, as tests may ask.
    pub(crate) fn emulated() -> bool {
        #[cfg(all(feature = "testing", target_os = "linux"))]
        {
            static EMULATED: OnceLock<bool> = OnceLock::new();
            *EMULATED.get_or_init(|| has_vectors() && !has_tiles() && super::emulate::tiles())
        }
        #[cfg(not(all(feature = "testing", target_os = "linux")))]
        false
    }

    pub(crate) fn vectors(self) -> Avx512 {
        self.0
    }

    /// Runs `kernel`, compiled for this level, with tiles.
    pub(crate) fn run<K: TileKernel>(self, kernel: K) -> K::Out {
        #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vbmi,avx512vnni")]
        fn go<K: TileKernel>(kernel: K, amx: Amx) -> K::Out {
            kernel.run(amx.0, Tiles { amx, here: PhantomData })
        }
        struct Release;
        impl Drop for Release {
            fn drop(&mut self) {
                // SAFETY: tiles exist, as `run` configured them; nothing reads them after.
                unsafe { asm!("tilerelease", options(nostack, nomem)) };
            }
        }
        // Palette 1: 16 bit column bytes from byte 16 on, row counts from byte 48 on.
        let mut config = [0u8; 64];
        config[0] = 1;
        for tile in 0..8 {
            config[16 + 2 * tile] = ROW as u8;
            config[48 + tile] = 16;
        }
        // SAFETY: `self` exists, so the CPU has tiles and the kernel lets this process use them; 64 bytes are read.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &config, options(nostack, readonly)) };
        let _release = Release;
        // SAFETY: `self` exists, so `detect` saw these features on this CPU.
        unsafe { go(kernel, self) }
    }
}

/// Whether the CPU has AVX-512 BF16, VBMI and VNNI.
fn has_vectors() -> bool {
    is_x86_feature_detected!("avx512bf16")
        && is_x86_feature_detected!("avx512vbmi")
        && is_x86_feature_detected!("avx512vnni")
}

/// Whether the CPU has those, tiles and their bf16 and i8 products, and the operating system lets this process use them.
fn has_tiles() -> bool {
    // Leaf 7, EDX: AMX-BF16 22, AMX-TILE 24, AMX-INT8 25. Leaf 0x1D (the geometry) is hidden by some virtual machines;
    // there is only one palette.
    const BITS: u32 = 1 << 22 | 1 << 24 | 1 << 25;
    if __cpuid(0).eax < 7 || __cpuid_count(7, 0).edx & BITS != BITS || !has_vectors() {
        return false;
    }
    #[cfg(target_os = "linux")]
    {
        const ARCH_PRCTL: u64 = 158;
        const ARCH_REQ_XCOMP_PERM: u64 = 0x1023;
        const TILE_DATA: u64 = 18;
        let mut ret = ARCH_PRCTL;
        // SAFETY: a system call that reads and writes no memory of ours.
        unsafe {
            asm!(
                "syscall",
                inlateout("rax") ret,
                in("rdi") ARCH_REQ_XCOMP_PERM,
                in("rsi") TILE_DATA,
                lateout("rcx") _,
                lateout("r11") _,
                options(nostack)
            );
        }
        ret == 0
    }
    #[cfg(not(target_os = "linux"))]
    false
}

/// Left operand of a product: tile `i` is 16 rows from row `16 * i` on, `stride` elements apart; the next step along
/// the depth is the next 64 bytes of each row.
#[derive(Clone, Copy)]
pub(crate) struct Left<'a, T> {
    pub data: &'a [T],
    pub stride: usize,
}

/// Right operand: packed tiles, the next step along the depth right behind, columns `16 * j` on `stride` elements further.
#[derive(Clone, Copy)]
pub(crate) struct Right<'a, T> {
    pub data: &'a [T],
    pub stride: usize,
}

/// Sums of a product, `stride` elements from row to row.
pub(crate) struct Sums<'a, T> {
    pub data: &'a mut [T],
    pub stride: usize,
}

/// What [`Tiles::begin_bf16`] asks for as it goes.
pub(crate) struct Ahead<'a> {
    /// Eight lines a step, into the first-level cache: the sums of the next product.
    pub sums: &'a [f32],
    /// A line of either a step, into the second level.
    pub rows: [&'a [bf16]; 2],
    /// Two lines a step into the second level, or, if `twice`, four.
    pub x: &'a [bf16],
    pub twice: bool,
}

/// `$name`: sums of `I` × `J` tiles over `steps` steps, with `$dp` for one step of one pair.
macro_rules! products {
    ($name:ident, $t:ty, $sum:ty, $dp:literal) => {
        /// Adds to `c` (or puts there, unless `keep`) the product of `16 * I` rows and `16 * J` columns, `steps` tiles deep.
        #[inline(always)]
        pub(crate) fn $name<const I: usize, const J: usize>(
            self,
            a: Left<'_, $t>,
            b: Right<'_, $t>,
            steps: usize,
            c: Sums<'_, $sum>,
            keep: bool,
        ) {
            const { assert!(matches!((I, J), (1 | 2, 1 | 2))) };
            let row = ROW / size_of::<$t>();
            if steps == 0 && keep {
                return;
            }
            // Everything the block below reads and writes lies inside the slices.
            assert!(steps == 0 || (16 * I - 1) * a.stride + steps * row <= a.data.len());
            assert!((J - 1) * b.stride + steps * 16 * row <= b.data.len());
            assert!((16 * I - 1) * c.stride + 16 * J <= c.data.len());
            let size = size_of::<$t>();
            let (mut a0, mut b0) = (a.data.as_ptr(), b.data.as_ptr());
            let mut a1 = a0.wrapping_add(16 * (I - 1) * a.stride);
            let mut b1 = b0.wrapping_add((J - 1) * b.stride);
            let c0 = c.data.as_mut_ptr();
            let c1 = c0.wrapping_add(16 * (I - 1) * c.stride);
            // The second row or column of tiles is the first again where there is one only: computed, and not stored.
            macro_rules! block {
                ($body:expr, $store:expr, $load:expr) => {
                    asm!(
                        "tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3",
                        "test {keep:e}, {keep:e}",
                        "jz 2f",
                        $load,
                        "2:",
                        "test {n}, {n}",
                        "jz 4f",
                        "3:",
                        $body,
                        "dec {n}",
                        "jnz 3b",
                        "4:",
                        $store,
                        a0 = inout(reg) a0, a1 = inout(reg) a1, b0 = inout(reg) b0, b1 = inout(reg) b1,
                        sa = in(reg) a.stride * size, row = in(reg) ROW,
                        c0 = in(reg) c0, c1 = in(reg) c1, sc = in(reg) c.stride * 4,
                        n = inout(reg) steps => _, keep = in(reg) u32::from(keep),
                        out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                        out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                        options(nostack)
                    )
                };
            }
            // SAFETY: tiles of 16 rows of 64 bytes are configured on this thread (`self`), and the assertions above
            // keep every row inside its slice.
            unsafe {
                match (I, J) {
                    (2, 2) => block!(
                        concat!(
                            "tileloadd tmm4, [{a0} + {sa}*1]\n", "tileloadd tmm6, [{b0} + {row}*1]\n",
                            "tileloadd tmm5, [{a1} + {sa}*1]\n", "tileloadd tmm7, [{b1} + {row}*1]\n",
                            $dp, " tmm0, tmm4, tmm6\n", $dp, " tmm2, tmm5, tmm6\n",
                            $dp, " tmm1, tmm4, tmm7\n", $dp, " tmm3, tmm5, tmm7\n",
                            "add {a0}, 64\n", "add {a1}, 64\n", "add {b0}, 1024\n", "add {b1}, 1024\n",
                        ),
                        "tilestored [{c0} + {sc}*1], tmm0\ntilestored [{c0} + {sc}*1 + 64], tmm1\ntilestored [{c1} + {sc}*1], tmm2\ntilestored [{c1} + {sc}*1 + 64], tmm3",
                        "tileloadd tmm0, [{c0} + {sc}*1]\ntileloadd tmm1, [{c0} + {sc}*1 + 64]\ntileloadd tmm2, [{c1} + {sc}*1]\ntileloadd tmm3, [{c1} + {sc}*1 + 64]"
                    ),
                    (2, 1) => block!(
                        concat!(
                            "tileloadd tmm4, [{a0} + {sa}*1]\n", "tileloadd tmm6, [{b0} + {row}*1]\n",
                            "tileloadd tmm5, [{a1} + {sa}*1]\n",
                            $dp, " tmm0, tmm4, tmm6\n", $dp, " tmm2, tmm5, tmm6\n",
                            "add {a0}, 64\n", "add {a1}, 64\n", "add {b0}, 1024\n", "/* {b1} */",
                        ),
                        "tilestored [{c0} + {sc}*1], tmm0\ntilestored [{c1} + {sc}*1], tmm2",
                        "tileloadd tmm0, [{c0} + {sc}*1]\ntileloadd tmm2, [{c1} + {sc}*1]"
                    ),
                    (1, 2) => block!(
                        concat!(
                            "tileloadd tmm4, [{a0} + {sa}*1]\n", "tileloadd tmm6, [{b0} + {row}*1]\n",
                            "tileloadd tmm7, [{b1} + {row}*1]\n",
                            $dp, " tmm0, tmm4, tmm6\n", $dp, " tmm1, tmm4, tmm7\n",
                            "add {a0}, 64\n", "add {b0}, 1024\n", "add {b1}, 1024\n", "/* {a1} {c1} */",
                        ),
                        "tilestored [{c0} + {sc}*1], tmm0\ntilestored [{c0} + {sc}*1 + 64], tmm1",
                        "tileloadd tmm0, [{c0} + {sc}*1]\ntileloadd tmm1, [{c0} + {sc}*1 + 64]"
                    ),
                    _ => block!(
                        concat!(
                            "tileloadd tmm4, [{a0} + {sa}*1]\n", "tileloadd tmm6, [{b0} + {row}*1]\n",
                            $dp, " tmm0, tmm4, tmm6\n",
                            "add {a0}, 64\n", "add {b0}, 1024\n", "/* {a1} {b1} {c1} */",
                        ),
                        "tilestored [{c0} + {sc}*1], tmm0",
                        "tileloadd tmm0, [{c0} + {sc}*1]"
                    ),
                }
            }
            let _ = (a0, a1, b0, b1);
        }
    };
}

/// What packs tiles; pairs of numbers in vectors are of the same layout.
impl Avx512 {
    /// Packs 32 elements of each of 16 rows, from element `at` on, as the tile whose columns are those rows.
    #[inline(always)]
    pub(crate) fn pack_rows(self, rows: &[&[bf16]; 16], at: usize, tile: &mut [bf16]) {
        let tile = tile.first_chunk_mut::<TILE>().expect("a tile");
        let mut lines = [self.zero(); 16];
        for (line, row) in lines.iter_mut().zip(rows) {
            *line = self.line(&row[at..]);
        }
        // SAFETY: `self` proves AVX-512; 16 × 64 bytes are written to a tile of as many.
        unsafe {
            for (i, line) in transpose(lines).into_iter().enumerate() {
                _mm512_storeu_si512(tile.as_mut_ptr().add(i * 32).cast(), line);
            }
        }
    }

    /// Packs 32 elements of each of 32 rows, from element `at` on, as two tiles, `apart` elements apart, whose depth those
    /// rows are; whether all of them are finite.
    #[inline(always)]
    pub(crate) fn pack_columns(self, rows: &[&[bf16]; 32], at: usize, tiles: &mut [bf16], apart: usize) -> bool {
        assert!(tiles.len() >= apart + TILE);
        let (low, high) = (pairs(0), pairs(16));
        let mut bad = 0;
        for (pair, rows) in rows.as_chunks::<2>().0.iter().enumerate() {
            let (even, odd) = (self.line(&rows[0][at..]), self.line(&rows[1][at..]));
            // SAFETY: `self` proves AVX-512; a tile has 16 × 64 bytes, and both lie inside `tiles`.
            unsafe {
                let to = tiles.as_mut_ptr().add(pair * 32);
                _mm512_storeu_si512(to.cast(), _mm512_permutex2var_epi16(even, low, odd));
                _mm512_storeu_si512(to.add(apart).cast(), _mm512_permutex2var_epi16(even, high, odd));
                // All ones in the exponent: infinite or no number.
                let exponent = _mm512_set1_epi16(0x7f80);
                bad |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(even, exponent), exponent)
                    | _mm512_cmpeq_epi16_mask(_mm512_and_si512(odd, exponent), exponent);
            }
        }
        bad == 0
    }

    /// The sum of every row: in 45 instructions, where one row for itself takes eight that wait for each other.
    #[inline(always)]
    pub(crate) fn sums_of_rows(self, rows: &[[f32; 16]; 16]) -> [f32; 16] {
        // Loops and no closures, which would be compiled for another level.
        // SAFETY: `self` proves AVX-512; a row has 64 bytes, and so has what is returned.
        unsafe {
            let (mut two, mut four) = ([_mm512_setzero_ps(); 8], [_mm512_setzero_ps(); 4]);
            for (two, [a, b]) in two.iter_mut().zip(rows.as_chunks().0) {
                let (a, b) = (_mm512_loadu_ps(a.as_ptr()), _mm512_loadu_ps(b.as_ptr()));
                *two = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
            }
            for (four, &[a, b]) in four.iter_mut().zip(two.as_chunks().0) {
                let (a, b) = (_mm512_castps_pd(a), _mm512_castps_pd(b));
                let (low, high) = (_mm512_unpacklo_pd(a, b), _mm512_unpackhi_pd(a, b));
                *four = _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
            }
            // Quarters 0 and 2 of both, and 1 and 3.
            let [a, b, c, d] = four;
            let ab = _mm512_add_ps(_mm512_shuffle_f32x4::<0x88>(a, b), _mm512_shuffle_f32x4::<0xdd>(a, b));
            let cd = _mm512_add_ps(_mm512_shuffle_f32x4::<0x88>(c, d), _mm512_shuffle_f32x4::<0xdd>(c, d));
            let mut sums = [0f32; 16];
            let all = _mm512_add_ps(_mm512_shuffle_f32x4::<0x88>(ab, cd), _mm512_shuffle_f32x4::<0xdd>(ab, cd));
            _mm512_storeu_ps(sums.as_mut_ptr(), all);
            sums
        }
    }

    /// The first 32 elements of a row.
    #[inline(always)]
    fn line(self, row: &[bf16]) -> __m512i {
        let row = row.first_chunk::<32>().expect("32 elements").as_ptr();
        // SAFETY: `self` proves AVX-512; the array has 64 bytes.
        unsafe { _mm512_loadu_si512(row.cast()) }
    }

    #[inline(always)]
    fn zero(self) -> __m512i {
        // SAFETY: `self` proves AVX-512.
        unsafe { _mm512_setzero_si512() }
    }
}

impl Tiles {
    /// Sums of pairs, which [`Amx`] proves.
    #[inline(always)]
    pub(crate) fn bf16_pairs(self) -> Avx512<true> {
        Avx512::of(self.amx)
    }

    products!(product_bf16, bf16, f32, "tdpbf16ps");

    /// Begins a product of 32 rows and two tiles of columns, the first of unsigned bytes, one step deep, and stores the sums of the product before
    /// it, which had their time since: to wait for them right away would take a hundred cycles. A first call
    /// stores what the tiles hold, at the start of [`Amx::run`] zeros.
    ///
    /// Sums stay in tiles between the calls of a product, so that the caller's vectors work beside it: a core looks some
    /// 500 instructions ahead, no further than a few steps. Of `half` a product the first 16 rows are multiplied, and what the others
    /// hold has no meaning.
    #[inline(always)]
    pub(crate) fn begin_i8(self, a: Left<'_, i8>, b: Right<'_, i8>, half: bool, last: &mut [i32; 32 * 32]) {
        if half {
            self.end(last);
            // SAFETY: tiles are configured here (`self`).
            unsafe { asm!("tilezero tmm0", "tilezero tmm1", options(nostack, nomem)) };
            return self.step_i8(a, b, half);
        }
        let (a0, a1, b0, b1) = pointers(a, b);
        // SAFETY: tiles of 16 rows of 64 bytes are configured here (`self`); `pointers` keeps what is read inside the
        // slices, and 32 rows of 128 bytes are written to an array of as many.
        unsafe {
            asm!(
                "tileloadd tmm4, [{a0} + {sa}*1]",
                "tileloadd tmm6, [{b0} + {row}*1]",
                "tilestored [{c} + {sc}*1], tmm0",
                "tilezero tmm0",
                "tdpbsud tmm0, tmm4, tmm6",
                "tileloadd tmm5, [{a1} + {sa}*1]",
                "tilestored [{c} + {sc}*1 + 2048], tmm2",
                "tilezero tmm2",
                "tdpbsud tmm2, tmm5, tmm6",
                "tileloadd tmm7, [{b1} + {row}*1]",
                "tilestored [{c} + {sc}*1 + 64], tmm1",
                "tilezero tmm1",
                "tdpbssd tmm1, tmm4, tmm7",
                "tilestored [{c} + {sc}*1 + 2112], tmm3",
                "tilezero tmm3",
                "tdpbssd tmm3, tmm5, tmm7",
                a0 = in(reg) a0, a1 = in(reg) a1, b0 = in(reg) b0, b1 = in(reg) b1,
                sa = in(reg) a.stride, row = in(reg) ROW, sc = in(reg) 2 * ROW, c = in(reg) last.as_mut_ptr(),
                options(nostack)
            );
        }
    }

    /// One more step of the product begun last.
    #[inline(always)]
    pub(crate) fn step_i8(self, a: Left<'_, i8>, b: Right<'_, i8>, half: bool) {
        let (a0, a1, b0, b1) = pointers(a, b);
        if half {
            // SAFETY: as in `begin_i8`.
            unsafe {
                asm!(
                    "tileloadd tmm4, [{a0} + {sa}*1]",
                    "tileloadd tmm6, [{b0} + {row}*1]",
                    "tileloadd tmm7, [{b1} + {row}*1]",
                    "tdpbsud tmm0, tmm4, tmm6",
                    "tdpbssd tmm1, tmm4, tmm7",
                    a0 = in(reg) a0, b0 = in(reg) b0, b1 = in(reg) b1, sa = in(reg) a.stride, row = in(reg) ROW,
                    options(nostack)
                );
            }
            return;
        }
        // SAFETY: as in `begin_i8`.
        unsafe {
            asm!(
                "tileloadd tmm4, [{a0} + {sa}*1]",
                "tileloadd tmm6, [{b0} + {row}*1]",
                "tileloadd tmm5, [{a1} + {sa}*1]",
                "tileloadd tmm7, [{b1} + {row}*1]",
                "tdpbsud tmm0, tmm4, tmm6",
                "tdpbsud tmm2, tmm5, tmm6",
                "tdpbssd tmm1, tmm4, tmm7",
                "tdpbssd tmm3, tmm5, tmm7",
                a0 = in(reg) a0, a1 = in(reg) a1, b0 = in(reg) b0, b1 = in(reg) b1,
                sa = in(reg) a.stride, row = in(reg) ROW,
                options(nostack)
            );
        }
    }

    /// Stores the sums of the product begun last, of i32 or f32.
    #[inline(always)]
    pub(crate) fn end<T: bytemuck::Pod>(self, last: &mut [T; 32 * 32]) {
        const { assert!(size_of::<T>() == 4) };
        // SAFETY: as in `begin_i8`.
        unsafe {
            asm!(
                "tilestored [{c} + {sc}*1], tmm0",
                "tilestored [{c} + {sc}*1 + 64], tmm1",
                "tilestored [{c} + {sc}*1 + 2048], tmm2",
                "tilestored [{c} + {sc}*1 + 2112], tmm3",
                c = in(reg) last.as_mut_ptr(), sc = in(reg) 2 * ROW,
                options(nostack)
            );
        }
    }

    /// Begins a product of 2 × 2 tiles, `steps` deep, whose left operand is in the first-level cache and whose right one
    /// comes from the second: `[steps, 2, TILE]` both. It starts from the sums `from`, or from zeros, and stores those
    /// of the product before it to `last`, as in [`Self::begin_i8`]; [`Self::end`] stores its own.
    ///
    /// The right operand is loaded past the first level, which it would push the left one out of: that took
    /// a product with 32 KB of left operand from 56 to 86 % of the tiles' own speed on a core of a Xeon of model 207. What is
    /// asked for is spread over the steps, as a core waits for no more than sixteen lines at a time.
    #[inline(always)]
    pub(crate) fn begin_bf16(
        self,
        a: &[bf16],
        b: &[bf16],
        steps: usize,
        from: Option<&[f32; 1024]>,
        last: &mut [f32; 1024],
        ahead: &Ahead<'_>,
    ) {
        // Everything the block below reads lies inside the slices; prefetches read nothing, wherever they point.
        assert!(steps > 0 && 2 * steps * TILE <= a.len() && 2 * steps * TILE <= b.len());
        let from = from.map_or(std::ptr::null(), |from| from.as_ptr());
        macro_rules! block {
            ($more:literal, $x:literal) => {
                asm!(
                    "tileloadd tmm4, [{a} + {row}*1]",
                    "tileloaddt1 tmm6, [{b} + {row}*1]",
                    "tilestored [{last} + {row}*2], tmm0",
                    "tilezero tmm0",
                    "test {from}, {from}",
                    "jz 2f",
                    "tileloadd tmm0, [{from} + {row}*2]",
                    "2:",
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    "tileloadd tmm5, [{a} + {row}*1 + 1024]",
                    "tilestored [{last} + {row}*2 + 2048], tmm2",
                    "tilezero tmm2",
                    "test {from}, {from}",
                    "jz 2f",
                    "tileloadd tmm2, [{from} + {row}*2 + 2048]",
                    "2:",
                    "tdpbf16ps tmm2, tmm5, tmm6",
                    "tileloaddt1 tmm7, [{b} + {row}*1 + 1024]",
                    "tilestored [{last} + {row}*2 + 64], tmm1",
                    "tilezero tmm1",
                    "test {from}, {from}",
                    "jz 2f",
                    "tileloadd tmm1, [{from} + {row}*2 + 64]",
                    "2:",
                    "tdpbf16ps tmm1, tmm4, tmm7",
                    "tilestored [{last} + {row}*2 + 2112], tmm3",
                    "tilezero tmm3",
                    "test {from}, {from}",
                    "jz 2f",
                    "tileloadd tmm3, [{from} + {row}*2 + 2112]",
                    "2:",
                    "tdpbf16ps tmm3, tmm5, tmm7",
                    "jmp 4f",
                    "3:",
                    "tileloadd tmm4, [{a} + {row}*1]",
                    "tileloaddt1 tmm6, [{b} + {row}*1]",
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    "tileloadd tmm5, [{a} + {row}*1 + 1024]",
                    "tdpbf16ps tmm2, tmm5, tmm6",
                    "tileloaddt1 tmm7, [{b} + {row}*1 + 1024]",
                    "tdpbf16ps tmm1, tmm4, tmm7",
                    "tdpbf16ps tmm3, tmm5, tmm7",
                    "4:",
                    "prefetchw [{sums}]", "prefetchw [{sums} + 64]", "prefetchw [{sums} + 128]",
                    "prefetchw [{sums} + 192]", "prefetchw [{sums} + 256]", "prefetchw [{sums} + 320]",
                    "prefetchw [{sums} + 384]", "prefetchw [{sums} + 448]",
                    "prefetcht1 [{w0}]", "prefetcht1 [{w1}]",
                    "prefetcht1 [{x}]", "prefetcht1 [{x} + 64]", $more,
                    "add {sums}, 512", "add {w0}, 64", "add {w1}, 64", $x,
                    "add {a}, 2048", "add {b}, 2048",
                    "dec {n}",
                    "jnz 3b",
                    a = inout(reg) a.as_ptr() => _, b = inout(reg) b.as_ptr() => _, n = inout(reg) steps => _,
                    sums = inout(reg) ahead.sums.as_ptr() => _, x = inout(reg) ahead.x.as_ptr() => _,
                    w0 = inout(reg) ahead.rows[0].as_ptr() => _, w1 = inout(reg) ahead.rows[1].as_ptr() => _,
                    row = in(reg) ROW, from = in(reg) from, last = in(reg) last.as_mut_ptr(),
                    options(nostack)
                )
            };
        }
        // SAFETY: tiles of 16 rows of 64 bytes are configured here (`self`), the assertion above keeps every tile inside
        // its slice, and `from` and `last` have 32 rows of 128 bytes.
        unsafe {
            if ahead.twice {
                block!("prefetcht1 [{x} + 128]\nprefetcht1 [{x} + 192]", "add {x}, 256");
            } else {
                block!("", "add {x}, 128");
            }
        }
    }

    /// The product of a strip of weights, `[steps, 2, TILE]`, and `16 * J` columns, into `c`, 32 floats from row to row.
    ///
    /// The strip comes from memory, asked for two steps ahead: its 2 KB of a step are one stream, where rows as they lie are
    /// 32, and the caches' own prefetchers start anew in every page of it.
    #[inline(always)]
    pub(crate) fn product_strip<const J: usize>(
        self,
        a: &[bf16],
        b: Right<'_, bf16>,
        steps: usize,
        c: &mut [f32; 1024],
    ) {
        const { assert!(matches!(J, 1 | 2)) };
        assert!(steps > 0 && 2 * steps * TILE <= a.len() && (J - 1) * b.stride + steps * TILE <= b.data.len());
        let b0 = b.data.as_ptr();
        let b1 = b0.wrapping_add((J - 1) * b.stride);
        macro_rules! block {
            ($load:literal, $first:literal, $second:literal, $store:literal) => {
                asm!(
                    "tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3",
                    "3:",
                    ".irp at, 0, 64, 128, 192, 256, 320, 384, 448, 512, 576, 640, 704, 768, 832, 896, 960",
                    "prefetcht0 [{a} + 4096 + \\at]",
                    "prefetcht0 [{a} + 5120 + \\at]",
                    ".endr",
                    "tileloadd tmm6, [{b0} + {row}*1]",
                    "tileloadd tmm4, [{a} + {row}*1]",
                    $load,
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    $first,
                    "tileloadd tmm5, [{a} + {row}*1 + 1024]",
                    "tdpbf16ps tmm2, tmm5, tmm6",
                    $second,
                    "add {a}, 2048", "add {b0}, 1024", "add {b1}, 1024",
                    "dec {n}",
                    "jnz 3b",
                    "tilestored [{c} + {row}*2], tmm0",
                    "tilestored [{c} + {row}*2 + 2048], tmm2",
                    $store,
                    a = inout(reg) a.as_ptr() => _, b0 = inout(reg) b0 => _, b1 = inout(reg) b1 => _,
                    n = inout(reg) steps => _, row = in(reg) ROW, c = in(reg) c.as_mut_ptr(),
                    options(nostack)
                )
            };
        }
        // SAFETY: tiles of 16 rows of 64 bytes are configured here (`self`), the assertion above keeps every tile inside
        // its slice, `c` has 32 rows of 128 bytes, and prefetches read nothing, wherever they point.
        unsafe {
            match J {
                1 => block!("", "", "", ""),
                _ => block!(
                    "tileloadd tmm7, [{b1} + {row}*1]",
                    "tdpbf16ps tmm1, tmm4, tmm7",
                    "tdpbf16ps tmm3, tmm5, tmm7",
                    "tilestored [{c} + {row}*2 + 64], tmm1\ntilestored [{c} + {row}*2 + 2112], tmm3"
                ),
            }
        }
    }

    /// Copies a block of 16 × 16 floats, `stride` apart in `x`, turned by a quarter: row `j` of `out` is column `j`.
    #[inline(always)]
    pub(crate) fn turn(self, x: &[f32], stride: usize, out: &mut [[f32; 16]; 16]) {
        assert!(x.len() >= 15 * stride + 16);
        // SAFETY: `self` proves AVX-512; row `i` of the sixteen ends inside `x`, and `out` has sixteen of 64 bytes.
        unsafe {
            let mut rows = [_mm512_setzero_si512(); 16];
            for (i, row) in rows.iter_mut().enumerate() {
                *row = _mm512_loadu_si512(x.as_ptr().add(i * stride).cast());
            }
            for (out, t) in out.iter_mut().zip(transpose(rows)) {
                _mm512_storeu_si512(out.as_mut_ptr().cast(), t);
            }
        }
    }

    /// Rounds 32 floats to bf16, ties to even.
    #[inline(always)]
    pub(crate) fn narrow(self, lo: __m512, hi: __m512, out: &mut [bf16]) {
        let out = out.first_chunk_mut::<32>().expect("two vectors").as_mut_ptr();
        // SAFETY: `self` proves AVX-512 BF16; 64 bytes are written to an array of 32 two-byte elements.
        unsafe { out.cast::<__m512bh>().write_unaligned(_mm512_cvtne2ps_pbh(hi, lo)) };
    }

    /// `out`, `[32, 16]`, is the product of 32 rows of 64 bytes and of a packed tile, pairs of bf16 both. Leaves the sums of
    /// the product begun last where they are.
    #[inline(always)]
    pub(crate) fn product_pairs(self, a: Left<'_, i8>, b: &[[u32; 16]; 16], out: &mut [f32; 32 * 16]) {
        assert!(31 * a.stride + ROW <= a.data.len());
        // SAFETY: tiles of 16 rows of 64 bytes are configured on this thread (`self`); the assertion keeps 32 rows inside
        // their slice, `b` has 16 of 64 bytes and `out` 32.
        unsafe {
            asm!(
                "tileloadd tmm6, [{b} + {row}*1]",
                "tileloadd tmm4, [{a0} + {sa}*1]",
                "tilezero tmm7",
                "tdpbf16ps tmm7, tmm4, tmm6",
                "tilestored [{c} + {row}*1], tmm7",
                "tileloadd tmm5, [{a1} + {sa}*1]",
                "tilezero tmm4",
                "tdpbf16ps tmm4, tmm5, tmm6",
                "tilestored [{c} + {row}*1 + 1024], tmm4",
                a0 = in(reg) a.data.as_ptr(), a1 = in(reg) a.data[16 * a.stride..].as_ptr(), sa = in(reg) a.stride,
                b = in(reg) b.as_ptr(), row = in(reg) ROW, c = in(reg) out.as_mut_ptr(),
                options(nostack)
            );
        }
    }

    /// `2^x` to 13 bits, for weights that are rounded to bf16: exactly 0 for -inf.
    #[inline(always)]
    pub(crate) fn exp2(self, x: __m512) -> __m512 {
        let v = self.amx.0;
        // The cubic of least relative error on [0, 1): 7.5e-5.
        // SAFETY: `self` proves AVX-512.
        unsafe {
            let f = _mm512_reduce_ps::<{ _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC }>(x);
            let p = v.fma(v.splat(0.078_024_51), f, v.splat(0.226_067_17));
            let p = v.fma(p, f, v.splat(0.695_833_54));
            let p = v.fma(p, f, v.splat(0.999_925_2));
            _mm512_scalef_ps(p, x)
        }
    }

    /// Begins a product of 32 rows and 32 columns, one step deep, and stores the sums of the product before it at `last`
    /// of `sums`: blocks of 32 × 32, whose rows lie side by side. It begins with those at `from`, or with zeros. Both
    /// operands are packed: tiles of 1 KB, the next step right behind, the second one `stride` further.
    ///
    /// Of tiles whose rows are 256 bytes apart, as in a matrix, products take a quarter longer. As with
    /// [`Self::begin_i8`], sums stay in tiles between the calls of a product, so that vectors work beside it; and products
    /// stand between the stores, 16 cycles each, in which none runs.
    #[inline(always)]
    pub(crate) fn begin<const FAR: bool>(
        self,
        a: Right<'_, bf16>,
        b: Right<'_, bf16>,
        sums: &mut [f32],
        from: Option<usize>,
        last: usize,
    ) {
        let (a1, b1) = (&a.data[a.stride..], &b.data[b.stride..]);
        assert!(a.data.len() >= TILE && a1.len() >= TILE && b.data.len() >= TILE && b1.len() >= TILE);
        let last = sums[last..][..1024].as_mut_ptr();
        macro_rules! block {
            ($load:literal, $t0:literal, $t1:literal, $t2:literal, $t3:literal, $c:expr) => {
                asm!(
                    "tileloadd tmm4, [{a0} + {row}*1]",
                    concat!($load, " tmm6, [{b0} + {row}*1]"),
                    "tilestored [{last} + {sc}*1], tmm0",
                    $t0,
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    "tileloadd tmm5, [{a1} + {row}*1]",
                    "tilestored [{last} + {sc}*1 + 2048], tmm2",
                    $t2,
                    "tdpbf16ps tmm2, tmm5, tmm6",
                    concat!($load, " tmm7, [{b1} + {row}*1]"),
                    "tilestored [{last} + {sc}*1 + 64], tmm1",
                    $t1,
                    "tdpbf16ps tmm1, tmm4, tmm7",
                    "tilestored [{last} + {sc}*1 + 2112], tmm3",
                    $t3,
                    "tdpbf16ps tmm3, tmm5, tmm7",
                    "/* {c} */",
                    a0 = in(reg) a.data.as_ptr(), a1 = in(reg) a1.as_ptr(),
                    b0 = in(reg) b.data.as_ptr(), b1 = in(reg) b1.as_ptr(),
                    row = in(reg) ROW, sc = in(reg) 2 * ROW, last = in(reg) last, c = in(reg) $c,
                    options(nostack)
                )
            };
        }
        macro_rules! from_sums {
            ($load:literal, $from:expr) => {
                block!(
                    $load,
                    "tileloadd tmm0, [{c} + {sc}*1]",
                    "tileloadd tmm1, [{c} + {sc}*1 + 64]",
                    "tileloadd tmm2, [{c} + {sc}*1 + 2048]",
                    "tileloadd tmm3, [{c} + {sc}*1 + 2112]",
                    sums[$from..][..1024].as_ptr()
                )
            };
        }
        macro_rules! from_zeros {
            ($load:literal) => {
                block!($load, "tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3", last)
            };
        }
        // SAFETY: tiles of 16 rows of 64 bytes are configured here (`self`); the four tiles read and the blocks of 32 rows
        // of 128 bytes lie inside the slices.
        unsafe {
            match (from, FAR) {
                (Some(from), false) => from_sums!("tileloadd", from),
                (Some(from), true) => from_sums!("tileloaddt1", from),
                (None, false) => from_zeros!("tileloadd"),
                (None, true) => from_zeros!("tileloaddt1"),
            }
        }
    }

    /// As [`Self::begin`], of two tiles and one.
    #[inline(always)]
    pub(crate) fn begin_one(self, a: Right<'_, bf16>, b: &[bf16], last: &mut [f32; 1024]) {
        let a1 = &a.data[a.stride..];
        assert!(a.data.len() >= TILE && a1.len() >= TILE && b.len() >= TILE);
        // SAFETY: as in `begin`.
        unsafe {
            asm!(
                "tileloadd tmm6, [{b} + {row}*1]",
                "tileloadd tmm4, [{a0} + {row}*1]",
                "tilestored [{last} + {sc}*1], tmm0",
                "tilezero tmm0",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tileloadd tmm5, [{a1} + {row}*1]",
                "tilestored [{last} + {sc}*1 + 2048], tmm2",
                "tilezero tmm2",
                "tdpbf16ps tmm2, tmm5, tmm6",
                a0 = in(reg) a.data.as_ptr(), a1 = in(reg) a1.as_ptr(), b = in(reg) b.as_ptr(),
                row = in(reg) ROW, sc = in(reg) 2 * ROW, last = in(reg) last.as_mut_ptr(),
                options(nostack)
            );
        }
    }

    /// As [`Self::step`], of two tiles and one.
    #[inline(always)]
    pub(crate) fn step_one(self, a: Right<'_, bf16>, b: &[bf16], at: usize) {
        let (a0, b) = (&a.data[at * TILE..], &b[at * TILE..]);
        let a1 = &a0[a.stride..];
        assert!(a0.len() >= TILE && a1.len() >= TILE && b.len() >= TILE);
        // SAFETY: as in `begin`.
        unsafe {
            asm!(
                "tileloadd tmm6, [{b} + {row}*1]",
                "tileloadd tmm4, [{a0} + {row}*1]",
                "tileloadd tmm5, [{a1} + {row}*1]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tdpbf16ps tmm2, tmm5, tmm6",
                a0 = in(reg) a0.as_ptr(), a1 = in(reg) a1.as_ptr(), b = in(reg) b.as_ptr(),
                row = in(reg) ROW,
                options(nostack)
            );
        }
    }

    /// One more step of the product begun last by [`Self::begin`], `at` steps on in both operands.
    #[inline(always)]
    pub(crate) fn step<const FAR: bool>(self, a: Right<'_, bf16>, b: Right<'_, bf16>, at: usize) {
        let (a0, b0) = (&a.data[at * TILE..], &b.data[at * TILE..]);
        let (a1, b1) = (&a0[a.stride..], &b0[b.stride..]);
        assert!(a0.len() >= TILE && a1.len() >= TILE && b0.len() >= TILE && b1.len() >= TILE);
        macro_rules! block {
            ($load:literal) => {
                asm!(
                    "tileloadd tmm4, [{a0} + {row}*1]",
                    concat!($load, " tmm6, [{b0} + {row}*1]"),
                    "tileloadd tmm5, [{a1} + {row}*1]",
                    concat!($load, " tmm7, [{b1} + {row}*1]"),
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    "tdpbf16ps tmm2, tmm5, tmm6",
                    "tdpbf16ps tmm1, tmm4, tmm7",
                    "tdpbf16ps tmm3, tmm5, tmm7",
                    a0 = in(reg) a0.as_ptr(), a1 = in(reg) a1.as_ptr(), b0 = in(reg) b0.as_ptr(), b1 = in(reg) b1.as_ptr(),
                    row = in(reg) ROW,
                    options(nostack)
                )
            };
        }
        // SAFETY: as in `begin`.
        unsafe { if FAR { block!("tileloaddt1") } else { block!("tileloadd") } }
    }
}

/// Where the four tiles of a step lie: inside the slices.
#[inline(always)]
fn pointers(a: Left<'_, i8>, b: Right<'_, i8>) -> (*const i8, *const i8, *const i8, *const i8) {
    let (a1, b1) = (&a.data[16 * a.stride..], &b.data[b.stride..]);
    assert!(15 * a.stride + ROW <= a1.len() && 16 * ROW <= b1.len());
    (a.data.as_ptr(), a1.as_ptr(), b.data.as_ptr(), b1.as_ptr())
}

/// Indices that interleave 16 elements of two vectors, from element `from` on.
#[inline(always)]
fn pairs(from: u16) -> __m512i {
    let at: [u16; 32] = std::array::from_fn(|i| from + (i / 2) as u16 + 32 * (i % 2) as u16);
    // SAFETY: both are 64 bytes of plain integers.
    unsafe { std::mem::transmute(at) }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Check;

    impl TileKernel for Check {
        type Out = ();
        #[inline(always)]
        fn run(self, v: Avx512, tiles: Tiles) {
            // First, as it looks for the zeros of fresh tiles.
            i8_products_match_loops(tiles);
            products_match_loops::<1, 1>(tiles);
            products_match_loops::<1, 2>(tiles);
            products_match_loops::<2, 1>(tiles);
            products_match_loops::<2, 2>(tiles);
            packed_products_match_loops::<false>(tiles);
            packed_products_match_loops::<true>(tiles);
            streamed_products_match_loops(tiles);
            products_of_pairs_match_loops(tiles);
            for x in (-200..200).map(|i| i as f32 * 0.37).chain([f32::NEG_INFINITY, -1e30]) {
                let mut got = [0f32; 16];
                v.store(tiles.exp2(v.splat(x)), &mut got);
                assert!((got[0] - x.exp2()).abs() <= 1e-4 * x.exp2(), "{x}: {} {}", got[0], x.exp2());
            }
        }
    }

    fn products_match_loops<const I: usize, const J: usize>(tiles: Tiles) {
        let (rows, columns) = (16 * I, 16 * J);
        for steps in [0, 1, 3] {
            for keep in [false, true] {
                let depth = 32 * steps;
                let (sa, sc) = (depth + 8, columns + 4);
                let a: Vec<bf16> = (0..rows * sa).map(|i| bf16::from_f32((i % 13) as f32 - 6.0)).collect();
                let x: Vec<bf16> = (0..columns * sa + 32).map(|i| bf16::from_f32((i % 11) as f32 - 5.0)).collect();
                let mut packed = vec![bf16::ZERO; J * steps * TILE];
                for (t, tile) in packed.chunks_exact_mut(TILE).enumerate() {
                    let rows = std::array::from_fn(|r| &x[(16 * (t / steps) + r) * sa..]);
                    tiles.amx.0.pack_rows(&rows, 32 * (t % steps), tile);
                }
                let mut c: Vec<f32> = (0..rows * sc).map(|i| i as f32).collect();
                let old = c.clone();
                let right = Right { data: &packed, stride: steps * TILE };
                let sums = Sums { data: &mut c, stride: sc };
                tiles.product_bf16::<I, J>(Left { data: &a, stride: sa }, right, steps, sums, keep);
                for (i, j) in (0..rows).flat_map(|i| (0..sc).map(move |j| (i, j))) {
                    let dot: f32 =
                        (0..depth).map(|l| a[i * sa + l].to_f32() * x[j.min(columns - 1) * sa + l].to_f32()).sum();
                    let old = old[i * sc + j];
                    let want = if j >= columns { old } else { dot + if keep { old } else { 0.0 } };
                    assert_eq!(c[i * sc + j], want, "{I}x{J} {steps} {i} {j}");
                }
            }
        }
    }

    /// Products in a row, each but the first on top of the sums of the one before.
    fn streamed_products_match_loops(tiles: Tiles) {
        let (mut before, mut got) = ([0f32; 1024], [0f32; 1024]);
        let mut want: [f32; 1024] = std::array::from_fn(|i| i as f32);
        for (turn, steps) in [1, 3, 2].into_iter().enumerate() {
            let a: Vec<bf16> = (0..2 * steps * TILE).map(|i| bf16::from_f32((i % 13) as f32 - 6.0)).collect();
            let b: Vec<bf16> = (0..2 * steps * TILE).map(|i| bf16::from_f32((i % 11) as f32 - 5.0)).collect();
            let from = want;
            for (at, want) in want.iter_mut().enumerate() {
                let (i, j) = (at / 32, at % 32);
                let dot: f32 = (0..32 * steps)
                    .map(|l| {
                        let a = a[(l / 32 * 2 + i / 16) * TILE + i % 16 * 32 + l % 32];
                        a.to_f32() * b[(l / 32 * 2 + j / 16) * TILE + l % 32 / 2 * 32 + j % 16 * 2 + l % 2].to_f32()
                    })
                    .sum();
                *want = dot + if turn > 0 { *want } else { 0.0 };
            }
            let ahead = Ahead { sums: &[], rows: [&a, &[]], x: &b, twice: turn == 1 };
            tiles.begin_bf16(&a, &b, steps, (turn > 0).then_some(&from), &mut got, &ahead);
            if turn > 0 {
                assert_eq!(got, before, "before {steps}");
            }
            before = want;
        }
        tiles.end(&mut got);
        assert_eq!(got, want);
    }

    fn products_of_pairs_match_loops(tiles: Tiles) {
        let number = |i: usize, most: usize| bf16::from_f32((i * 7 % most) as f32 - 3.0);
        let a: Vec<bf16> = (0..32 * 48).map(|i| number(i, 11)).collect();
        let b: [[u32; 16]; 16] = std::array::from_fn(|p| {
            std::array::from_fn(|j| {
                let half = |l: usize| u32::from(number(l * 16 + j, 13).to_bits());
                half(2 * p) | half(2 * p + 1) << 16
            })
        });
        let mut got = [f32::NAN; 512];
        tiles.product_pairs(Left { data: bytemuck::cast_slice(&a), stride: 96 }, &b, &mut got);
        for (at, got) in got.iter().enumerate() {
            let (i, j) = (at / 16, at % 16);
            let want: f32 = (0..32).map(|l| a[i * 48 + l].to_f32() * number(l * 16 + j, 13).to_f32()).sum();
            assert_eq!(*got, want, "{i} {j}");
        }
    }

    fn packed_products_match_loops<const FAR: bool>(tiles: Tiles) {
        // Blocks: one to begin with, then one for each product.
        let (mut sums, mut want) = (vec![0f32; 4 * 1024], vec![0f32; 4 * 1024]);
        for (i, (sum, want)) in sums[..1024].iter_mut().zip(&mut want).enumerate() {
            (*sum, *want) = (i as f32, i as f32);
        }
        tiles.end(sums[1024..].first_chunk_mut().unwrap()); // What the tiles held before.
        let mut last = 1024;
        for (block, steps, from) in [(1, 1, None), (2, 3, Some(0)), (3, 4, None)] {
            let stride = steps * TILE;
            let a: Vec<bf16> = (0..2 * stride).map(|i| bf16::from_f32((i % 13) as f32 - 6.0)).collect();
            let b: Vec<bf16> = (0..2 * stride).map(|i| bf16::from_f32((i % 11) as f32 - 5.0)).collect();
            let (left, right) = (Right { data: &a, stride }, Right { data: &b, stride });
            tiles.begin::<FAR>(left, right, &mut sums, from, last);
            (1..steps).for_each(|at| tiles.step::<FAR>(left, right, at));
            last = block * 1024;
            for (i, j) in (0..32).flat_map(|i| (0..32).map(move |j| (i, j))) {
                let dot: f32 = (0..32 * steps)
                    .map(|l| {
                        let a = a[i / 16 * stride + l / 32 * TILE + i % 16 * 32 + l % 32];
                        let b = b[j / 16 * stride + l / 32 * TILE + l % 32 / 2 * 32 + j % 16 * 2 + l % 2];
                        a.to_f32() * b.to_f32()
                    })
                    .sum();
                want[last + i * 32 + j] = dot + from.map_or(0.0, |at| want[at + i * 32 + j]);
            }
        }
        tiles.end(sums[last..].first_chunk_mut().unwrap());
        assert_eq!(sums, want);
    }

    fn i8_products_match_loops(tiles: Tiles) {
        let (mut got, mut last) = ([0; 32 * 32], ([0; 32 * 32], false));
        for (steps, half) in [(1, false), (4, false), (4, true), (1, true), (2, false), (0, false)] {
            let a: Vec<i8> = (0..32 * 64 * steps).map(|i| (i % 251) as i8).collect();
            let b: Vec<i8> = (0..2 * steps * 1024).map(|i| (i % 241) as i8).collect();
            for step in 0..steps {
                let left = Left { data: &a[64 * step..], stride: 64 * steps };
                let right = Right { data: &b[1024 * step..], stride: steps * 1024 };
                match step {
                    0 => tiles.begin_i8(left, right, half, &mut got),
                    _ => tiles.step_i8(left, right, half),
                }
            }
            if steps == 0 {
                tiles.end(&mut got);
            }
            let want: [i32; 32 * 32] = std::array::from_fn(|at| {
                let (i, j) = (at / 32, at % 32);
                let at = |l: usize| (j / 16 * steps + l / 64) * 1024 + l % 64 / 4 * 64 + j % 16 * 4 + l % 4;
                let right = |b: i8| if j < 16 { i32::from(b as u8) } else { i32::from(b) };
                (0..64 * steps).map(|l| i32::from(a[i * 64 * steps + l]) * right(b[at(l)])).sum()
            });
            let rows = if last.1 { 16 } else { 32 };
            assert_eq!(got[..32 * rows], last.0[..32 * rows], "before {steps}");
            last = (want, half);
        }
    }

    #[test]
    #[expect(clippy::print_stderr, reason = "a skip must be seen")]
    fn products_and_packing_match_plain_loops() {
        match Amx::detect() {
            Some(amx) => amx.run(Check),
            None => eprintln!("skipped: this CPU or system has no AMX"),
        }
    }
}
