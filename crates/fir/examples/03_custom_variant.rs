//! An attention variant of your own: an expression with parameters, run by the same kernels as the library's.

use fir::attention::{SingleArgs, single_prefill};
use fir::kv::KvLayout;
use fir::variant::{self, Params, Variant, kv_pos, logits, q_pos, score};
use fir::{Exec, TensorMut, TensorRef};

const TOKENS: usize = 100;
const HEADS: usize = 2;
const DIM: usize = 16;

/// Old keys fade, each head at its own rate, and are out of sight past a window.
fn fading() -> fir::Result<Variant> {
    variant::variant("Fading", |p| {
        let (rate, window) = (p.per_head("rate"), p.i32("window"));
        let age = q_pos() - kv_pos();
        logits(score() - rate * age.clone().to_f32()).mask(age.clone().ge(0) & age.lt(window))
    })
}

/// Causal self-attention of `TOKENS` tokens; queries, keys and values are one tensor.
fn attend(exec: &Exec, x: &[f32], variant: &Variant, params: &Params<'_>) -> fir::Result<Vec<f32>> {
    let shape = [TOKENS, HEADS, DIM];
    let (x, mut out) = (TensorRef::new(x, &shape)?, vec![0f32; x.len()]);
    let args = SingleArgs {
        q: x,
        k: x,
        v: x,
        layout: KvLayout::Nhd,
        variant,
        params,
        sm_scale: None,
        out: TensorMut::new(&mut out, &shape)?,
        lse: None,
    };
    single_prefill(exec, args)?;
    Ok(out)
}

fn main() -> fir::Result<()> {
    let exec = Exec::cpu()?;
    let x: Vec<f32> = (0..TOKENS * HEADS * DIM).map(|i| (i as f32 * 0.7).sin()).collect();
    let fading = fading()?;
    let fade = |rate: &[f32], window| {
        attend(&exec, &x, &fading, &Params::new().f32_tensor("rate", rate).i32("window", window))
    };

    // Values belong to the call, so another rate or window needs no other kernel.
    let plain = attend(&exec, &x, &variant::causal(), &Params::new())?;
    assert_eq!(fade(&[0.0, 0.0], i32::MAX)?, plain);
    assert_eq!(fade(&[0.0, 0.5], 1)?, x); // a token that sees itself alone gives its own value

    // What is missing or wrong is named.
    let refused = attend(&exec, &x, &fading, &Params::new().i32("window", 8)).unwrap_err().to_string();
    println!("{refused}");
    assert!(refused.contains("rate"));
    Ok(())
}
