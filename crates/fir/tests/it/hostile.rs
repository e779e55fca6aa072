use fir::testing::Rng;
use fir::testing::hostile::{TARGETS, call};

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
