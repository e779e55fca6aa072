//! Operators on a GPU, beside the goal and the best figure known of others on an H200.
//!
//! ```text
//! cargo bench -p fir-infer --bench gpu -- [filter]
//! ```
//!
//! A sample is one call between two events, after 256 MB were written so that nothing of it is in the cache; the time shown
//! is the median of 100. Each operator's result is checked against the reference before it is timed. Without a GPU nothing
//! is done, and said so; with `FIR_REQUIRE_GPU=1` that is a failure.
#![allow(clippy::print_stdout, reason = "it is a table")]

#[cfg(not(feature = "cuda"))]
fn main() {
    println!("skipped: built without the feature `cuda`");
}

#[cfg(feature = "cuda")]
fn main() -> fir::Result<()> {
    gpu::main()
}

#[cfg(feature = "cuda")]
mod gpu {
    use std::time::Instant;

    use fir::exec::{Gpu, Stream};
    use fir::reference::{self, Precision};
    use fir::testing::{Compare, Rng, compare};
    use fir::{DType, Error, Exec, Result, Tensor, TensorRef, activation, norm};

    const SAMPLES: usize = 100;
    const EPS: f32 = 1e-6;
    /// Rows and columns of the element-wise cases, each with our goal and FlashInfer's time in µs.
    type Sizes = [([usize; 2], f64, f64); 3];
    const RMS_NORM: Sizes = [([64, 4096], 3.5, 6.2), ([4096, 4096], 18.0, 27.7), ([8192, 8192], 68.0, 101.7)];
    const FUSED_ADD: Sizes = [([64, 4096], 4.0, 5.7), ([4096, 4096], 34.0, 39.0), ([8192, 8192], 130.0, 138.0)];
    const SILU: Sizes = [([64, 4096], 4.0, 6.2), ([4096, 4096], 26.0, 30.1), ([8192, 8192], 96.0, 99.4)];

    pub(crate) fn main() -> Result<()> {
        let gpu = match Gpu::new(0) {
            Ok(gpu) => gpu,
            Err(e) if std::env::var(fir::env::FIR_REQUIRE_GPU).is_ok_and(|v| v == "1") => return Err(e),
            Err(e) => {
                println!("skipped: {e}");
                return Ok(());
            }
        };
        let filter = std::env::args().skip(1).find(|a| !a.starts_with("--")).unwrap_or_default();
        println!("{gpu:?}\n");
        println!("| case | first call ms | µs | GB/s | goal µs | best peer µs | goal |\n|---|---|---|---|---|---|---|");
        let suite = Suite { exec: Exec::Cuda(gpu.clone()), gpu, filter };
        for (shape, goal, peer) in RMS_NORM {
            suite.rms_norm(shape, goal, peer)?;
        }
        for (shape, goal, peer) in FUSED_ADD {
            suite.fused_add(shape, goal, peer)?;
        }
        for (shape, goal, peer) in SILU {
            suite.silu(shape, goal, peer)?;
        }
        suite.bench("nothing", 0, 0.0, 0.0, || Ok(()), || Ok(()))
    }

    struct Suite {
        exec: Exec,
        gpu: Gpu,
        filter: String,
    }

    impl Suite {
        fn random(&self, seed: u64, shape: &[usize]) -> Result<(Tensor, Tensor)> {
            // Two million numbers again and again: making all of them would take longer than everything else.
            let n: usize = shape.iter().product();
            let numbers = Rng::new(seed).normals(n.min(1 << 21));
            let data: Vec<f32> = (0..n).map(|i| numbers[i % numbers.len()]).collect();
            let host = Tensor::from_f32(DType::BF16, &data, shape)?;
            Ok((host.to_device(&self.gpu)?, host))
        }

        fn rms_norm(&self, [rows, hidden]: [usize; 2], goal: f64, peer: f64) -> Result<()> {
            let (x, x_host) = self.random(1, &[rows, hidden])?;
            let (w, w_host) = self.random(2, &[hidden])?;
            let out = std::cell::RefCell::new(self.gpu.zeros(DType::BF16, &[rows, hidden])?);
            self.bench(
                &format!("rms_norm bf16 {rows} × {hidden}"),
                2 * 2 * rows * hidden,
                goal,
                peer,
                || norm::rms_norm(&self.exec, x.view(), w.view(), EPS, out.borrow_mut().view_mut()),
                || check(&out.borrow(), hidden, &x_host, |p, x| reference::norm::rms_norm(p, x, w_host.view(), EPS)),
            )
        }

        fn fused_add(&self, [rows, hidden]: [usize; 2], goal: f64, peer: f64) -> Result<()> {
            let (x, x_host) = self.random(1, &[rows, hidden])?;
            let (w, w_host) = self.random(2, &[hidden])?;
            // The sum with nothing is x, so that the result may be checked after one call.
            let residual = std::cell::RefCell::new(self.gpu.zeros(DType::BF16, &[rows, hidden])?);
            let x = std::cell::RefCell::new(x);
            self.bench(
                &format!("fused_add_rms_norm bf16 {rows} × {hidden}"),
                4 * 2 * rows * hidden,
                goal,
                peer,
                || {
                    let (mut x, mut residual) = (x.borrow_mut(), residual.borrow_mut());
                    norm::fused_add_rms_norm(&self.exec, x.view_mut(), residual.view_mut(), w.view(), EPS)
                },
                || check(&x.borrow(), hidden, &x_host, |p, x| reference::norm::rms_norm(p, x, w_host.view(), EPS)),
            )
        }

        fn silu(&self, [rows, d]: [usize; 2], goal: f64, peer: f64) -> Result<()> {
            let (x, x_host) = self.random(1, &[rows, 2 * d])?;
            let out = std::cell::RefCell::new(self.gpu.zeros(DType::BF16, &[rows, d])?);
            self.bench(
                &format!("silu_and_mul bf16 {rows} × {d}"),
                3 * 2 * rows * d,
                goal,
                peer,
                || activation::silu_and_mul(&self.exec, x.view(), out.borrow_mut().view_mut()),
                || check(&out.borrow(), d, &x_host, reference::activation::silu_and_mul),
            )
        }

        fn bench(
            &self,
            name: &str,
            bytes: usize,
            goal: f64,
            peer: f64,
            run: impl Fn() -> Result<()>,
            check: impl Fn() -> Result<()>,
        ) -> Result<()> {
            if !name.contains(&self.filter) {
                return Ok(());
            }
            let start = Instant::now();
            run()?;
            self.gpu.synchronize()?;
            let first = start.elapsed().as_secs_f64() * 1e3;
            check()?;
            let mut times = (0..SAMPLES).map(|_| self.sample(&run)).collect::<Result<Vec<_>>>()?;
            times.sort_by(f64::total_cmp);
            let us = times[SAMPLES / 2];
            let verdict = if us <= goal { "reached" } else { "missed" };
            let rate = bytes as f64 / us / 1e3;
            println!("| {name} | {first:.1} | {us:.2} | {rate:.0} | {goal} | {peer} | {verdict} |");
            Ok(())
        }

        /// Microseconds of one call.
        fn sample(&self, run: impl Fn() -> Result<()>) -> Result<f64> {
            drop(self.gpu.zeros(DType::U8, &[256 << 20])?);
            let stream: &Stream = self.gpu.stream().expect("a live device");
            let before = stream.record()?;
            run()?;
            Ok(f64::from(stream.record()?.since(&before)?) * 1e3)
        }
    }

    /// Compares the first and the last rows of `got` with the reference's of those rows of `x`.
    fn check(
        got: &Tensor,
        row: usize,
        x: &Tensor,
        reference: impl Fn(Precision, TensorRef<'_>) -> Result<Vec<f64>>,
    ) -> Result<()> {
        let (got, rows) = (got.to_host()?, x.shape()[0]);
        for range in [0..4.min(rows), rows.saturating_sub(4)..rows] {
            let x = x.view().slice(0, range.clone())?;
            let (exact, naive) = (reference(Precision::Exact, x)?, reference(Precision::Naive(DType::BF16), x)?);
            compare(got.view().slice(0, range)?, Compare { exact: &exact, naive: &naive, row })
                .map_err(|e| Error::value("gpu", "result", e, "as the reference has it"))?;
        }
        Ok(())
    }
}
