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
    let (dry, mut rng) = (Exec::dry(Arch::HOPPER), Rng::new(2));
    for (target, (name, _)) in TARGETS.iter().enumerate() {
        let there = !crate::matrix::NOT_ON_CUDA.contains(&name.split(':').next().unwrap());
        let gpu = if there { crate::support::gpu() } else { None };
        let mut accepted = 0;
        for _ in 0..CASES {
            let data: Vec<u8> = (0..64 << rng.below(4)).map(|_| rng.bits() as u8).collect();
            let result = call_on(&dry, target, &data);
            accepted += usize::from(result.is_ok());
            if let Some(gpu) = gpu {
                assert_eq!(call_on(gpu, target, &data), result, "{name}: the GPU and the dry run differ");
            }
        }
        assert!(!there || accepted >= CASES / 20, "{name}: {accepted} accepted");
    }
}
