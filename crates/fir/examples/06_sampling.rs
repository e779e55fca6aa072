//! Sampling: temperature, filters and seeds per request, in one call.

use fir::sampling::{Draw, Filters, PerRow, RngState, sample};
use fir::{Exec, TensorMut, TensorRef};

fn main() -> fir::Result<()> {
    let exec = Exec::cpu()?;
    #[rustfmt::skip]
    let logits = [
        1.0f32, 3.0, 2.0, 2.9, // greedy: temperature 0
        0.0,    0.0, 5.0, 4.0, // the two most probable tokens
        9.0,    1.0, 1.0, 1.0, // what has a tenth of the largest probability
    ];

    // A request's randomness is its seed and the position of the token it draws: nothing to store, nothing to share.
    let mut counts = [[0; 4]; 3];
    let mut last = [0; 3];
    for position in 0..1000 {
        let rng = [11, 12, 13].map(|seed| RngState { seed, offset: position });
        let filters = Filters {
            temperature: PerRow::Each(&[0.0, 1.0, 1.0]),
            top_k: PerRow::Each(&[4, 2, 4]),
            min_p: PerRow::Each(&[0.0, 0.0, 0.1]),
            ..Filters::default()
        };
        let draw = Draw::new(&rng[..], TensorMut::new(&mut last, &[3])?);
        sample(&exec, TensorRef::new(&logits, &[3, 4])?, filters, draw)?;
        for (row, &token) in last.iter().enumerate() {
            counts[row][token as usize] += 1;
        }
    }
    println!("{counts:?}");
    assert_eq!(counts[0], [0, 1000, 0, 0]);
    assert_eq!((counts[1][0], counts[1][1]), (0, 0));
    // Logits 5 and 4: e / (1 + e) is 0.731.
    assert!((690..770).contains(&counts[1][2]));
    assert_eq!(counts[2], [1000, 0, 0, 0]);

    // Alone in its batch, request 1 draws the token that it drew among others.
    let (mut alone, rng) = ([0; 1], [RngState { seed: 12, offset: 999 }]);
    let filters = Filters { top_k: PerRow::One(2), ..Filters::default() };
    let draw = Draw::new(&rng[..], TensorMut::new(&mut alone, &[1])?);
    sample(&exec, TensorRef::new(&logits[4..8], &[1, 4])?, filters, draw)?;
    assert_eq!(alone[0], last[1]);
    Ok(())
}
