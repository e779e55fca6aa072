//! What this machine can do, measured in short slices between the samples of a bench.
//!
//! Bandwidth of a shared machine moves by a factor of two within minutes, so a ceiling is worth something only beside
//! the samples it is compared with. Every slice is done the best way found, on as many threads as the operators use.

use std::hint::black_box;
use std::sync::Barrier;
use std::time::Instant;

/// Bytes that the read and copy ceilings go through: above any share of a last-level cache (260 MB on a Xeon of model
/// 207), so that a slice finds nothing of the one before.
const MEMORY: usize = 1 << 30;

/// A page of the address translation: prefetchers stop at its end.
const PAGE: usize = 4096 / 8;

/// Per second: bytes read; bytes read and written; f32 operations; operations of tile products of bf16 and of int8.
/// 0 is "not measured" or "this machine has none".
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Rates {
    pub(crate) read: f64,
    pub(crate) copy: f64,
    pub(crate) fma: f64,
    pub(crate) amx_bf16: f64,
    pub(crate) amx_int8: f64,
}

pub(crate) struct Ceilings {
    threads: usize,
    /// Faulted in; its start is aligned to a page.
    memory: Vec<u64>,
    from: usize,
    /// Words of one slice.
    slice: usize,
    turn: usize,
    amx: bool,
    /// The best since the last [`Self::reset`].
    pub(crate) best: Rates,
}

impl Ceilings {
    /// `quick`: slices of 2 ms instead of 10.
    pub(crate) fn new(threads: usize, quick: bool) -> Self {
        // Not zeros: pages that were never written are all the same one.
        let memory = vec![0x9e37_79b9_7f4a_7c15u64; MEMORY / 8 + PAGE];
        let from = memory.as_ptr().align_offset(4096);
        let slice = MEMORY / 8 / if quick { 16 } else { 4 };
        Self { threads, memory, from, slice, turn: 0, amx: amx::is_allowed(), best: Rates::default() }
    }

    pub(crate) fn reset(&mut self) {
        self.best = Rates::default();
    }

    /// Measures each memory ceiling once more.
    pub(crate) fn memory_slice(&mut self) {
        self.turn += 1;
        let words = MEMORY / 8;
        let at = self.from + self.turn * self.slice % words;
        let each = self.slice / self.threads / (4 * PAGE) * (4 * PAGE);
        let parts = self.memory[at..][..self.slice].chunks_exact(each).take(self.threads).collect();
        let seconds = together(parts, |part| {
            black_box(read(part));
        });
        self.best.read = self.best.read.max((each * self.threads * 8) as f64 / seconds);

        let (half, slice) = (words / 2, self.slice / 2);
        let at = self.turn * slice % half;
        let each = slice / self.threads / PAGE * PAGE;
        let (low, high) = self.memory[self.from..][..words].split_at_mut(half);
        let (low, high) = (&low[at..][..slice], &mut high[at..][..slice]);
        let parts = low.chunks_exact(each).zip(high.chunks_exact_mut(each)).take(self.threads).collect();
        // Which way is best depends on the machine's mood: past the cache, or through it and without reading first.
        let past = self.turn.is_multiple_of(2);
        let seconds =
            together(parts, |(from, to)| if past { copy_past_cache(from, to) } else { to.copy_from_slice(from) });
        self.best.copy = self.best.copy.max((each * self.threads * 16) as f64 / seconds);
    }

    /// Measures each arithmetic ceiling once more: about 2 ms each.
    pub(crate) fn arithmetic_slice(&mut self) {
        let all = |amount: usize, run: fn(usize)| {
            let rounds = 1 << 16;
            (rounds * amount * self.threads) as f64 / together(vec![rounds; self.threads], run)
        };
        self.best.fma = self.best.fma.max(all(8 * fma::operations(), |n| {
            black_box(fma::rounds(8 * n));
        }));
        if self.amx {
            self.best.amx_bf16 = self.best.amx_bf16.max(all(amx::OPERATIONS, amx::rounds::<false>));
            self.best.amx_int8 = self.best.amx_int8.max(all(2 * amx::OPERATIONS, amx::rounds::<true>));
        }
    }
}

/// Instructions per second, of the simplest, that the slowest of so many threads is given: 11 instead of 19 to the ns while a neighbour
/// has the other thread of its core (a Xeon of 3.5 GHz). In 0.1 ms; 0 where it is not known how.
pub(crate) fn issued(threads: usize) -> f64 {
    #[cfg(target_arch = "x86_64")]
    {
        const ROUNDS: usize = 20_000;
        let nops = |mut rounds: usize| {
            // SAFETY: it counts a register down.
            unsafe {
                std::arch::asm!(
                    "2:", ".rept 64", "nop", ".endr", "dec {0}", "jnz 2b",
                    inout(reg) rounds, options(nostack, nomem)
                );
            }
            black_box(rounds);
        };
        (64 * ROUNDS) as f64 / together(vec![ROUNDS; threads], nops)
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = threads;
        0.0
    }
}

/// Runs the parts on a thread each, from one moment on; the seconds of the slowest.
fn together<P: Send>(parts: Vec<P>, run: impl Fn(P) + Sync) -> f64 {
    let (ready, run) = (Barrier::new(parts.len()), &run);
    std::thread::scope(|s| {
        let start = |part| {
            s.spawn(|| {
                let part = part;
                ready.wait();
                let start = Instant::now();
                run(part);
                start.elapsed().as_secs_f64()
            })
        };
        let threads: Vec<_> = parts.into_iter().map(start).collect();
        threads.into_iter().map(|t| t.join().expect("no panic in a ceiling")).fold(0.0, f64::max)
    })
}

/// Reads all words, four pages at a time: prefetchers start anew in every page, and four starts overlap. On a Xeon of
/// model 207 two threads read 36 GB/s this way, 27 page after page, and 20 with vectors of 16 bytes.
fn read(words: &[u64]) -> u64 {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::*;
        #[target_feature(enable = "avx512f")]
        fn avx512(words: &[u64]) -> u64 {
            let mut sums = [_mm512_setzero_si512(); 4];
            for pages in words.chunks_exact(4 * PAGE) {
                for at in (0..PAGE).step_by(8) {
                    for (page, sum) in sums.iter_mut().enumerate() {
                        let line = &pages[page * PAGE + at..][..8];
                        // SAFETY: `line` has the 64 bytes that are loaded.
                        *sum = _mm512_xor_si512(*sum, unsafe { _mm512_loadu_si512(line.as_ptr().cast()) });
                    }
                }
            }
            let sum = _mm512_xor_si512(_mm512_xor_si512(sums[0], sums[1]), _mm512_xor_si512(sums[2], sums[3]));
            _mm512_reduce_add_epi64(sum) as u64
        }
        if is_x86_feature_detected!("avx512f") {
            // SAFETY: the feature was just detected.
            return unsafe { avx512(words) };
        }
    }
    let mut sums = [[0u64; 8]; 4];
    for pages in words.chunks_exact(4 * PAGE) {
        for at in (0..PAGE).step_by(8) {
            for (page, sum) in sums.iter_mut().enumerate() {
                for (sum, word) in sum.iter_mut().zip(&pages[page * PAGE + at..][..8]) {
                    *sum ^= word;
                }
            }
        }
    }
    sums.as_flattened().iter().fold(0, |all, sum| all ^ sum)
}

/// Copies without reading the lines that it overwrites.
fn copy_past_cache(from: &[u64], to: &mut [u64]) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::*;
        #[target_feature(enable = "avx512f")]
        fn avx512(from: &[u64], to: &mut [u64]) {
            for (from, to) in from.chunks_exact(8).zip(to.chunks_exact_mut(8)) {
                assert!(to.as_ptr().addr().is_multiple_of(64));
                // SAFETY: both have 64 bytes, and `to` is aligned to as many.
                unsafe { _mm512_stream_si512(to.as_mut_ptr().cast(), _mm512_loadu_si512(from.as_ptr().cast())) };
            }
            // Streaming stores are ordered by nothing else.
            _mm_sfence();
        }
        if is_x86_feature_detected!("avx512f") {
            // SAFETY: the feature was just detected.
            return unsafe { avx512(from, to) };
        }
    }
    to.copy_from_slice(from);
}

/// Multiply-adds on registers: independent chains, enough to hide their latency.
mod fma {
    /// Operations of a round; 0 where there is no measure.
    pub(super) fn operations() -> usize {
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx512f") {
            return 16 * 16 * 2;
        } else if is_x86_feature_detected!("fma") {
            return 12 * 8 * 2;
        }
        0
    }

    pub(super) fn rounds(rounds: usize) -> f32 {
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::x86_64::*;
            #[target_feature(enable = "avx512f")]
            fn avx512(rounds: usize) -> f32 {
                let (a, b) = (_mm512_set1_ps(0.999), _mm512_set1_ps(0.001));
                let mut sums = [b; 16];
                for _ in 0..rounds {
                    for sum in &mut sums {
                        *sum = _mm512_fmadd_ps(*sum, a, b);
                    }
                }
                sums.iter().map(|&s| _mm512_reduce_add_ps(s)).sum()
            }
            #[target_feature(enable = "avx2,fma")]
            fn avx2(rounds: usize) -> f32 {
                let (a, b) = (_mm256_set1_ps(0.999), _mm256_set1_ps(0.001));
                let mut sums = [b; 12];
                for _ in 0..rounds {
                    for sum in &mut sums {
                        *sum = _mm256_fmadd_ps(*sum, a, b);
                    }
                }
                sums.iter().map(|&s| _mm256_cvtss_f32(s)).sum()
            }
            if is_x86_feature_detected!("avx512f") {
                // SAFETY: the feature was just detected.
                return unsafe { avx512(rounds) };
            } else if is_x86_feature_detected!("fma") {
                // SAFETY: the feature was just detected, and no CPU has it without AVX2.
                return unsafe { avx2(rounds) };
            }
        }
        rounds as f32
    }
}

/// Tile products on registers.
mod amx {
    /// Operations of a round of bf16: six products of 16 × 32 by 32 × 16. Of int8 they are twice as deep.
    pub(super) const OPERATIONS: usize = 6 * 2 * 16 * 16 * 32;

    /// Whether the CPU has the products and the kernel lets this process use their registers.
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    pub(super) fn is_allowed() -> bool {
        const ARCH_PRCTL: isize = 158;
        const REQUEST_PERMISSION: usize = 0x1023;
        const TILE_DATA: usize = 18;
        // Leaf 7: AMX-BF16, AMX-TILE, AMX-INT8.
        let features = std::arch::x86_64::__cpuid_count(7, 0).edx;
        if !is_x86_feature_detected!("avx512f") || [22, 24, 25].iter().any(|bit| features >> bit & 1 == 0) {
            return false;
        }
        let mut result = ARCH_PRCTL;
        // SAFETY: this call of the kernel reads and writes no memory of ours.
        unsafe {
            std::arch::asm!(
                "syscall", inout("rax") result, in("rdi") REQUEST_PERMISSION, in("rsi") TILE_DATA,
                lateout("rcx") _, lateout("r11") _, options(nostack),
            );
        }
        result == 0
    }

    #[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
    pub(super) fn is_allowed() -> bool {
        false
    }

    /// Six chains of products, enough to hide their latency. Only where [`is_allowed`] said so.
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    pub(super) fn rounds<const INT8: bool>(rounds: usize) {
        #[repr(C, align(64))]
        struct Lines([u8; 1024]);
        // Palette 1: eight tiles of 16 rows of 64 bytes.
        let mut config = Lines([0; 1024]);
        config.0[0] = 1;
        for tile in 0..8 {
            config.0[16 + 2 * tile] = 64;
            config.0[48 + tile] = 16;
        }
        // Bytes that are bf16 numbers from 0.5 to 2 too.
        let data = Lines(std::array::from_fn(|i| if i % 2 == 0 { (i * 37) as u8 } else { 0x3f }));
        macro_rules! products {
            ($product:literal) => {
                // SAFETY: `is_allowed` saw the instructions and the kernel's leave; the loads read the 64 bytes of a
                // configuration and the 1024 of a tile; all tiles are released at the end.
                unsafe {
                    std::arch::asm!(
                        "ldtilecfg [{config}]",
                        "tilezero tmm0", "tilezero tmm1", "tilezero tmm2",
                        "tilezero tmm3", "tilezero tmm4", "tilezero tmm5",
                        "tileloadd tmm6, [{data} + {stride}]",
                        "tileloadd tmm7, [{data} + {stride}]",
                        "2:",
                        concat!($product, " tmm0, tmm6, tmm7"), concat!($product, " tmm1, tmm6, tmm7"),
                        concat!($product, " tmm2, tmm6, tmm7"), concat!($product, " tmm3, tmm6, tmm7"),
                        concat!($product, " tmm4, tmm6, tmm7"), concat!($product, " tmm5, tmm6, tmm7"),
                        "dec {rounds}", "jnz 2b",
                        "tilerelease",
                        config = in(reg) &config, data = in(reg) &data, stride = in(reg) 64usize,
                        rounds = inout(reg) rounds.max(1) => _,
                        out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                        out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                        options(nostack),
                    )
                }
            };
        }
        if INT8 { products!("tdpbssd") } else { products!("tdpbf16ps") }
    }

    #[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
    pub(super) fn rounds<const INT8: bool>(_: usize) {}
}
