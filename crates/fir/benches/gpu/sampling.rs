//! Sampling's rows: a vocabulary of 128,256, f32.

use std::cell::RefCell;

use fir::sampling::{self, Draw, FilterOrder, Filters, PerRow, RngState};
use fir::testing::Rng;
use fir::{DType, Error, Exec, Result, Tensor, TensorMut, TensorRef, reference};

use super::{Goal, Suite, Work};

const VOCAB: usize = 128_256;
const STATE: RngState = RngState { seed: 1, offset: 0 };

/// Goals in µs and FlashInfer's times for batches of 1, 64 and 512.
type Row = [(f64, &'static str); 3];
type Sampler = fn(&Exec, TensorRef<'_>, &Filters<'_>, Draw<'_>) -> Result<()>;
type Writer = fn(&Exec, TensorRef<'_>, TensorMut<'_>) -> Result<()>;

pub(super) fn run(suite: &Suite) -> Result<()> {
    if !suite.wants("sampling") {
        return Ok(());
    }
    for (i, batch) in [1, 64, 512].into_iter().enumerate() {
        let (logits, probs) = inputs(suite, batch)?;
        let none = Filters::default();
        let both = Filters { top_k: 50.into(), top_p: 0.9.into(), ..none };
        let samplers: [(&str, Filters<'_>, Sampler, Row); 5] = [
            (
                "from probs",
                none,
                |e, x, _, d| sampling::sample_from_probs(e, x, d),
                [(8.0, "25.7"), (18.0, "45.4"), (75.0, "118")],
            ),
            (
                "top-p",
                Filters { top_k: none.top_k, ..both },
                |e, x, f, d| sampling::top_p_sample(e, x, f.top_p, d),
                [(12.0, "36.1"), (25.0, "78.6"), (90.0, "196")],
            ),
            (
                "top-k 50",
                Filters { top_p: none.top_p, ..both },
                |e, x, f, d| sampling::top_k_sample(e, x, f.top_k, d),
                [(12.0, "64.4"), (25.0, "157"), (100.0, "403")],
            ),
            (
                "top-k and top-p",
                both,
                |e, x, f, d| sampling::top_k_top_p_sample(e, x, f.top_k, f.top_p, FilterOrder::Joint, d),
                [(14.0, "66.2"), (28.0, "160"), (110.0, "400")],
            ),
            (
                "min-p",
                Filters { min_p: 0.1.into(), ..none },
                |e, x, f, d| sampling::min_p_sample(e, x, f.min_p, d),
                [(10.0, "31.3"), (22.0, "52.1"), (85.0, "181")],
            ),
        ];
        for (name, filters, call, row) in samplers {
            sample(suite, batch, name, (&probs, filters), call, row[i])?;
        }
        let writers: [(&str, bool, Writer, Row); 4] = [
            (
                "softmax",
                true,
                |e, x, o| sampling::softmax(e, x, 1.0.into(), o),
                [(8.0, "20.9"), (25.0, "48.4"), (140.0, "224")],
            ),
            (
                "top-k renorm",
                false,
                |e, x, o| sampling::top_k_renorm(e, x, 50.into(), o),
                [(16.0, "42.7"), (40.0, "89.4"), (190.0, "519")],
            ),
            (
                "top-p renorm",
                false,
                |e, x, o| sampling::top_p_renorm(e, x, 0.9.into(), o),
                [(16.0, "75.7"), (40.0, "173"), (190.0, "712")],
            ),
            (
                "top-k mask logits",
                true,
                |e, x, o| sampling::top_k_mask_logits(e, x, 50.into(), o),
                [(16.0, "38.5"), (40.0, "82.3"), (190.0, "466")],
            ),
        ];
        for (name, from_logits, call, row) in writers {
            write(suite, batch, name, if from_logits { &logits } else { &probs }, call, row[i])?;
        }
    }
    Ok(())
}

/// Logits as a language model's, a few far above the rest, and their softmax; on the device and here.
fn inputs(suite: &Suite, batch: usize) -> Result<([Tensor; 2], [Tensor; 2])> {
    let mut rng = Rng::new(1);
    let row = rng.normals(VOCAB * 4);
    let mut x: Vec<f32> = (0..batch * VOCAB).map(|i| row[i % row.len()]).collect();
    for _ in 0..batch * VOCAB / 640 {
        let i = rng.below(batch * VOCAB);
        x[i] += 8.0 + 4.0 * rng.normal();
    }
    let logits = Tensor::from_slice(&x, &[batch, VOCAB])?;
    let mut probs = Tensor::zeros(DType::F32, &[batch, VOCAB])?;
    sampling::softmax(&Exec::cpu()?, logits.view(), 1.0.into(), probs.view_mut())?;
    Ok(([logits.to_device(&suite.gpu)?, logits], [probs.to_device(&suite.gpu)?, probs]))
}

fn last(x: &Tensor) -> Result<Tensor> {
    let rows = x.shape()[0];
    let row = x.view().select(0, rows - 1)?.to_f32_vec()?;
    Tensor::from_slice(&row, &[1, VOCAB])
}

fn sample(
    suite: &Suite,
    batch: usize,
    name: &str,
    (x, filters): (&[Tensor; 2], Filters<'_>),
    call: Sampler,
    (goal, peer): (f64, &'static str),
) -> Result<()> {
    let out = RefCell::new(suite.gpu.zeros(DType::I32, &[batch])?);
    suite.bench(
        &format!("sampling, {name}, {batch}"),
        Work::Bytes(4 * batch * VOCAB),
        Goal::Us(goal),
        peer,
        || call(&suite.exec, x[0].view(), &filters, Draw::new(STATE, out.borrow_mut().view_mut())),
        || {
            // The last row's token is where its uniform falls in the distribution, up to the rounding of its sum.
            let token = out.borrow().to_host()?.as_slice::<i32>()?[batch - 1] as usize;
            let dist = reference::sampling::filtered(reference::Precision::Exact, last(&x[1])?.view(), &filters)?;
            let u = f64::from(PerRow::One(STATE).uniform(batch - 1, 0));
            let before: f64 = dist[..token].iter().sum();
            if dist[token] > 0.0 && before <= u + 1e-4 && before + dist[token] >= u - 1e-4 {
                return Ok(());
            }
            let got = format!("token {token} at {before} with {}", dist[token]);
            Err(Error::value("gpu", "result", got, format!("the token at {u}")))
        },
    )
}

fn write(
    suite: &Suite,
    batch: usize,
    name: &str,
    x: &[Tensor; 2],
    call: Writer,
    (goal, peer): (f64, &'static str),
) -> Result<()> {
    let out = RefCell::new(suite.gpu.zeros(DType::F32, &[batch, VOCAB])?);
    suite.bench(
        &format!("sampling, {name}, {batch}"),
        Work::Bytes(8 * batch * VOCAB),
        Goal::Us(goal),
        peer,
        || call(&suite.exec, x[0].view(), out.borrow_mut().view_mut()),
        || {
            // As the CPU's, which the reference is held against.
            let (x, got) = (last(&x[1])?, last(&out.borrow().to_host()?)?);
            let mut want = Tensor::zeros(DType::F32, &[1, VOCAB])?;
            call(&Exec::cpu()?, x.view(), want.view_mut())?;
            let pairs = got.as_slice::<f32>()?.iter().zip(want.as_slice::<f32>()?);
            match pairs.clone().position(|(g, w)| g != w && (g - w).abs() > 1e-4 * w.abs() + 1e-7) {
                None => Ok(()),
                Some(i) => {
                    let (got, want) = (got.as_slice::<f32>()?[i], want.as_slice::<f32>()?[i]);
                    Err(Error::value("gpu", "result", format!("{got} at {i}"), want))
                }
            }
        },
    )
}
