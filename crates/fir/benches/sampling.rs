//! Sampling over a vocabulary of 128,256: `cargo bench -p fir-infer --bench sampling`.
//!
//! One line per operator, distribution, batch and level: the least time of a call, and the rate at which its rows are
//! consumed, as if each were read once.
#![allow(clippy::print_stdout, missing_docs)]

use std::time::{Duration, Instant};

use fir::exec::Level;
use fir::sampling::{self, Draw, FilterOrder, Filters, PerRow, RngState};
use fir::testing::Rng;
use fir::topk::{self, TopKOrder};
use fir::{DType, Exec, Tensor, TensorMut, TensorRef};

const VOCAB: usize = 128_256;

/// Least time of a call over about 200 ms.
fn least(mut call: impl FnMut()) -> Duration {
    let (start, mut least) = (Instant::now(), Duration::MAX);
    while start.elapsed() < Duration::from_millis(200) {
        let t = Instant::now();
        call();
        least = least.min(t.elapsed());
    }
    least
}

fn report(op: &str, shape: &str, batch: usize, level: &str, call: impl FnMut()) {
    let t = least(call);
    let rate = (batch * VOCAB * 4) as f64 / t.as_secs_f64() / 1e9;
    println!(
        "{:<60} {:>9.1} µs {rate:>7.2} GB/s",
        format!("sampling/{op}/{shape}-f32/b{batch}/{level}"),
        t.as_secs_f64() * 1e6
    );
}

/// Logits of a row: `peaked` as a language model's, with a few tokens far above the rest, or nearly `flat`.
fn logits(shape: &str, batch: usize) -> Vec<f32> {
    let mut rng = Rng::new(1);
    let mut x = rng.normals(batch * VOCAB);
    if shape == "flat" {
        x.iter_mut().for_each(|x| *x *= 0.1);
    } else {
        for _ in 0..batch * 200 {
            let i = rng.below(batch * VOCAB);
            x[i] += 8.0 + 4.0 * rng.normal();
        }
    }
    x
}

fn main() {
    for level in Level::available() {
        for (shape, batch) in [("peaked", 1), ("flat", 1), ("peaked", 16)] {
            let exec = &Exec::cpu_with(level, 1).expect("an available level");
            let name = level.name();
            let x = logits(shape, batch);
            let x = TensorRef::new(&x, &[batch, VOCAB]).expect("a tensor");
            let mut probs = Tensor::zeros(DType::F32, &[batch, VOCAB]).expect("a tensor");
            report("softmax", shape, batch, name, || {
                sampling::softmax(exec, x, 1.0.into(), probs.view_mut()).expect("softmax");
            });
            let probs = probs.view();
            let mut out = vec![0i32; batch];
            let mut draw = |call: &mut dyn FnMut(Draw<'_>) -> fir::Result<()>| {
                let out = TensorMut::new(&mut out, &[batch]).expect("a tensor");
                call(Draw::new(RngState { seed: 1, offset: 0 }, out)).expect("a sample");
            };
            let (k, p): (PerRow<'_, u32>, PerRow<'_, f32>) = (50.into(), 0.9.into());
            let all = Filters { temperature: 0.7.into(), top_k: k, top_p: p, min_p: 0.01.into(), ..Filters::default() };
            report("from_probs", shape, batch, name, || draw(&mut |d| sampling::sample_from_probs(exec, probs, d)));
            report("top_k50", shape, batch, name, || draw(&mut |d| sampling::top_k_sample(exec, probs, k, d)));
            report("top_p0.9", shape, batch, name, || draw(&mut |d| sampling::top_p_sample(exec, probs, p, d)));
            report("min_p0.1", shape, batch, name, || {
                draw(&mut |d| sampling::min_p_sample(exec, probs, 0.1.into(), d));
            });
            report("top_k50_top_p0.9", shape, batch, name, || {
                draw(&mut |d| sampling::top_k_top_p_sample(exec, probs, k, p, FilterOrder::TopKFirst, d));
            });
            report("from_logits", shape, batch, name, || {
                draw(&mut |d| sampling::sample_from_logits(exec, x, 0.7.into(), d));
            });
            report("greedy", shape, batch, name, || {
                draw(&mut |d| sampling::sample_from_logits(exec, x, 0.0.into(), d))
            });
            report("all_filters_from_logits", shape, batch, name, || draw(&mut |d| sampling::sample(exec, x, all, d)));
            for k in [50, 2048] {
                let mut values = Tensor::zeros(DType::F32, &[batch, k]).expect("a tensor");
                let mut indices = Tensor::zeros(DType::I32, &[batch, k]).expect("a tensor");
                report(&format!("top_k_indices{k}"), shape, batch, name, || {
                    topk::top_k(exec, x, TopKOrder::Place, values.view_mut(), indices.view_mut()).expect("top_k");
                });
            }
        }
    }
}
