#[cfg(feature = "cuda")]
use std::sync::atomic::{AtomicUsize, Ordering};

use fir::testing::Rng;
use fir::testing::hostile::{TARGETS, call};
#[cfg(feature = "cuda")]
use fir::{Exec, exec::Arch, testing::hostile::call_on};

/// A slice of what the fuzz target does for minutes: no panic, and the cases are worth having.
#[test]
fn hostile_arguments_are_accepted_or_refused() {
    const CASES: usize = 1_000;
    let mut rng = Rng::new(1);
    let mut outcomes = vec![[0usize; 2]; TARGETS.len()];
    for _ in 0..CASES * TARGETS.len() {
        let data: Vec<u8> = (0..64 << rng.below(4)).map(|_| rng.bits() as u8).collect();
        let (target, result) = call(&data);
        outcomes[target][usize::from(result.is_err())] += 1;
        if let Err(e) = result {
            assert!(!e.to_string().is_empty());
        }
    }
    for ((name, _), [accepted, refused]) in TARGETS.iter().zip(outcomes) {
        // A decoder that never fits two arguments together would test the checks alone.
        assert!(accepted >= CASES / 20 && refused >= CASES / 20, "{name}: {accepted} accepted, {refused} refused");
    }
}

/// The same on CUDA: the host's side of every operator by a dry run, and the kernels where there is a GPU.
#[cfg(feature = "cuda")]
#[test]
fn hostile_arguments_are_accepted_or_refused_on_cuda() {
    const CASES: usize = 500;
    /// Of attention: nearly every case is a kernel that nobody had before, and takes a second to compile.
    const OWN_KERNELS: usize = 48;
    let (dry, mut rng) = (Exec::dry(Arch::HOPPER), Rng::new(2));
    for (target, (name, _)) in TARGETS.iter().enumerate() {
        let family = name.split(':').next().unwrap();
        let there = !crate::matrix::NOT_ON_CUDA.contains(&family);
        let mut data = || -> Vec<u8> { (0..64 << rng.below(4)).map(|_| rng.bits() as u8).collect() };
        let cases: Vec<_> = (0..CASES).map(|_| data()).map(|data| (call_on(&dry, target, &data), data)).collect();
        let accepted = cases.iter().filter(|(result, _)| result.is_ok()).count();
        assert!(!there || accepted >= CASES / 20, "{name}: {accepted} accepted");
        let Some(gpu) = crate::support::gpu().filter(|_| there) else { continue };
        let live = if family == "attention" { OWN_KERNELS } else { CASES };
        let (next, threads) = (AtomicUsize::new(0), std::thread::available_parallelism().map_or(1, usize::from));
        // Compilers run beside each other.
        std::thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| {
                    while let Some((result, data)) = cases[..live].get(next.fetch_add(1, Ordering::Relaxed)) {
                        assert_eq!(&call_on(gpu, target, data), result, "{name}: the GPU and the dry run differ");
                    }
                });
            }
        });
    }
}
