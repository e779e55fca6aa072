//! Sampling over a vocabulary of 128,256: how near to reading the logits once.

mod support;

use fir::sampling::{self, Draw, FilterOrder, Filters, PerRow, RngState};
use fir::testing::Rng;
use fir::{DType, Exec, Tensor, TensorRef, reference};
use support::{Suite, Work, matches};

const STATE: RngState = RngState { seed: 1, offset: 0 };

/// Logits of a row: `peaked` as a language model's, with a few tokens far above the rest, or nearly `flat`.
fn logits(shape: &str, batch: usize, vocab: usize) -> Tensor {
    let mut rng = Rng::new(1);
    let mut x = rng.normals(batch * vocab);
    if shape == "flat" {
        x.iter_mut().for_each(|x| *x *= 0.1);
    } else {
        for _ in 0..batch * vocab / 640 {
            let i = rng.below(batch * vocab);
            x[i] += 8.0 + 4.0 * rng.normal();
        }
    }
    Tensor::from_slice(&x, &[batch, vocab]).unwrap()
}

/// Whether `token` is where the uniform of row `b` falls in the distribution, up to the rounding of its sum.
fn drawn(dist: &[f64], b: usize, token: i32) -> Result<(), String> {
    let u = f64::from(PerRow::One(STATE).uniform(b, 0));
    let before: f64 = dist[..token as usize].iter().sum();
    let mass = dist[token as usize];
    if mass > 0.0 && before <= u + 1e-4 && before + mass >= u - 1e-4 {
        Ok(())
    } else {
        Err(format!("token {token} at {before} with {mass} for {u}"))
    }
}

type Sampler = fn(&Exec, TensorRef<'_>, &Filters<'_>, Draw<'_>) -> fir::Result<()>;

/// Name, whether it takes logits, filters that it uses, and the call.
fn samplers() -> Vec<(&'static str, bool, Filters<'static>, Sampler)> {
    let none = Filters::default();
    let (k, p) = (Filters { top_k: 50.into(), ..none }, Filters { top_p: 0.9.into(), ..none });
    let both = Filters { top_k: 50.into(), top_p: 0.9.into(), ..none };
    let all = Filters { temperature: 0.7.into(), min_p: 0.01.into(), ..both };
    vec![
        ("sample_from_probs", false, none, |e, x, _, d| sampling::sample_from_probs(e, x, d)),
        ("top_k_sample-50", false, k, |e, x, f, d| sampling::top_k_sample(e, x, f.top_k, d)),
        ("top_p_sample-0.9", false, p, |e, x, f, d| sampling::top_p_sample(e, x, f.top_p, d)),
        ("min_p_sample-0.1", false, Filters { min_p: 0.1.into(), ..none }, |e, x, f, d| {
            sampling::min_p_sample(e, x, f.min_p, d)
        }),
        ("top_k_top_p_sample-50-0.9", false, both, |e, x, f, d| {
            sampling::top_k_top_p_sample(e, x, f.top_k, f.top_p, FilterOrder::TopKFirst, d)
        }),
        ("sample_from_logits", true, Filters { temperature: 0.7.into(), ..none }, |e, x, f, d| {
            sampling::sample_from_logits(e, x, f.temperature, d)
        }),
        ("greedy", true, Filters { temperature: 0.0.into(), ..none }, |e, x, f, d| {
            sampling::sample_from_logits(e, x, f.temperature, d)
        }),
        ("sample-all", true, all, |e, x, f, d| sampling::sample(e, x, *f, d)),
    ]
}

fn main() {
    let mut suite = Suite::new();
    let levels = suite.levels();
    let vocab = if suite.checks_only() { 3000 } else { 128_256 };
    for (shape, batch) in [("peaked", 1), ("flat", 1), ("peaked", 16)] {
        let x = logits(shape, batch, vocab);
        let mut probs = Tensor::zeros(DType::F32, &[batch, vocab]).unwrap();
        sampling::softmax(&levels[0].1, x.view(), 1.0.into(), probs.view_mut()).unwrap();
        let last = |t: &Tensor| -> Tensor {
            let row = &t.as_slice::<f32>().unwrap()[(batch - 1) * vocab..];
            Tensor::from_slice(row, &[1, vocab]).unwrap()
        };
        let (last_x, last_probs) = (last(&x), last(&probs));
        for (level, exec) in &levels {
            let id = |op: &str| format!("{op}/v{vocab}-{shape}-f32/b{batch}/{level}");
            suite.bench(
                &id("softmax"),
                Work { bytes: batch * vocab * 8, flops: 0 },
                probs.clone(),
                |out| sampling::softmax(exec, x.view(), 1.0.into(), out.view_mut()).unwrap(),
                |out| matches(last(out).view(), vocab, |p| reference::sampling::softmax(p, last_x.view(), 1.0.into())),
            );
            for (name, from_logits, filters, call) in samplers() {
                let input = if from_logits { &x } else { &probs };
                suite.bench(
                    &id(name),
                    Work { bytes: batch * vocab * 4, flops: 0 },
                    Tensor::zeros(DType::I32, &[batch]).unwrap(),
                    |out| call(exec, input.view(), &filters, Draw::new(STATE, out.view_mut())).unwrap(),
                    |out| {
                        let exact = reference::Precision::Exact;
                        let dist = if from_logits {
                            reference::sampling::filtered_softmax(exact, last_x.view(), &filters)
                        } else {
                            reference::sampling::filtered(exact, last_probs.view(), &filters)
                        };
                        let token = out.as_slice::<i32>().unwrap()[batch - 1];
                        drawn(&dist.map_err(|e| e.to_string())?, batch - 1, token)
                    },
                );
            }
        }
    }
}
