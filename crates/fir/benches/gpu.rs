//! Operators on a GPU, beside the goal and the best figure known of others on an H200.
//!
//! ```text
//! cargo bench -p fir-infer --bench gpu -- [filters]
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
    mod attention;
    mod gemm;
    mod sampling;

    use std::cell::Cell;
    use std::time::Instant;

    use fir::exec::{Gpu, Stream};
    use fir::kv::{KvLayout, PagedKvMut};
    use fir::page::{self, Slots};
    use fir::reference::{self, Precision};
    use fir::rope::{self, Positions};
    use fir::testing::{Compare, Rng, compare};
    use fir::variant::Rope;
    use fir::{DType, Error, Exec, Result, Tensor, TensorRef, activation, norm};

    const SAMPLES: usize = 100;
    const EPS: f32 = 1e-6;
    /// Rows and columns of the element-wise cases, each with our goal and FlashInfer's time in µs.
    type Sizes = [([usize; 2], f64, &'static str); 3];
    const RMS_NORM: Sizes = [([64, 4096], 3.5, "6.2"), ([4096, 4096], 18.0, "27.7"), ([8192, 8192], 68.0, "101.7")];
    const FUSED_ADD: Sizes = [([64, 4096], 4.0, "5.7"), ([4096, 4096], 34.0, "39.0"), ([8192, 8192], 130.0, "138.0")];
    const SILU: Sizes = [([64, 4096], 4.0, "6.2"), ([4096, 4096], 26.0, "30.1"), ([8192, 8192], 96.0, "99.4")];

    /// Tokens, each with our goal and FlashInfer's time in µs; 32 query heads and 8 key heads of 128.
    const ROPE: [(usize, f64, &str); 2] = [(4096, 22.0, "38.6"), (16_384, 84.0, "97.4")];
    const APPEND: [(usize, f64, &str); 2] = [(64, 4.0, "6.9"), (16_384, 34.0, "41.1")];

    pub(crate) fn main() -> Result<()> {
        let gpu = match Gpu::new(0) {
            Ok(gpu) => gpu,
            Err(e) if std::env::var(fir::env::FIR_REQUIRE_GPU).is_ok_and(|v| v == "1") => return Err(e),
            Err(e) => {
                println!("skipped: {e}");
                return Ok(());
            }
        };
        let filters: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with("--")).collect();
        println!("{gpu:?}\n");
        println!("µs; TFLOP/s where a goal is in them. `first`: ms of the first call, what it compiles included.\n");
        println!("| case | first | µs | rate | goal | best peer | |\n|---|--:|--:|--:|--:|--:|---|");
        let suite = Suite { exec: Exec::Cuda(gpu.clone()), gpu, filters, last: Cell::new(0.0) };
        for (shape, goal, peer) in RMS_NORM {
            suite.rms_norm(shape, goal, peer)?;
        }
        for (shape, goal, peer) in FUSED_ADD {
            suite.fused_add(shape, goal, peer)?;
        }
        for (shape, goal, peer) in SILU {
            suite.silu(shape, goal, peer)?;
        }
        for (tokens, goal, peer) in ROPE {
            suite.rope(tokens, goal, peer)?;
        }
        for (tokens, goal, peer) in APPEND {
            suite.append(tokens, goal, peer)?;
        }
        gemm::run(&suite)?;
        attention::run(&suite)?;
        sampling::run(&suite)?;
        suite.bench("nothing", Work::Bytes(0), Goal::Us(0.0), "", || Ok(()), || Ok(()))
    }

    /// What a call does, for its rate.
    #[derive(Clone, Copy)]
    enum Work {
        Bytes(usize),
        Flops(f64),
    }

    #[derive(Clone, Copy)]
    enum Goal {
        Us(f64),
        /// With [`Work::Flops`] alone.
        Tflops(f64),
    }

    struct Suite {
        exec: Exec,
        gpu: Gpu,
        filters: Vec<String>,
        /// Microseconds of the last case.
        last: Cell<f64>,
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

        /// Random numbers of any type, not on the device: two million again and again.
        fn repeated(&self, seed: u64, dtype: DType, shape: &[usize]) -> Result<Tensor> {
            // An odd number, so that heads and tokens do not repeat together.
            let numbers = Tensor::from_f32(dtype, &Rng::new(seed).normals((1 << 21) - 1), &[(1 << 21) - 1])?;
            let mut all = Tensor::zeros(dtype, shape)?;
            match dtype {
                DType::E4M3 => fill(all.as_mut_slice::<fir::tensor::E4m3>()?, numbers.as_slice()?),
                _ => fill(all.as_mut_slice::<half::bf16>()?, numbers.as_slice()?),
            }
            Ok(all)
        }

        fn rms_norm(&self, [rows, hidden]: [usize; 2], goal: f64, peer: &'static str) -> Result<()> {
            let (x, x_host) = self.random(1, &[rows, hidden])?;
            let (w, w_host) = self.random(2, &[hidden])?;
            let out = std::cell::RefCell::new(self.gpu.zeros(DType::BF16, &[rows, hidden])?);
            self.bench(
                &format!("rms_norm bf16 {rows} × {hidden}"),
                Work::Bytes(2 * 2 * rows * hidden),
                Goal::Us(goal),
                peer,
                || norm::rms_norm(&self.exec, x.view(), w.view(), EPS, out.borrow_mut().view_mut()),
                || check(&out.borrow(), hidden, &x_host, |p, x| reference::norm::rms_norm(p, x, w_host.view(), EPS)),
            )
        }

        fn fused_add(&self, [rows, hidden]: [usize; 2], goal: f64, peer: &'static str) -> Result<()> {
            let (x, x_host) = self.random(1, &[rows, hidden])?;
            let (w, w_host) = self.random(2, &[hidden])?;
            // The sum with nothing is x, so that the result may be checked after one call.
            let residual = std::cell::RefCell::new(self.gpu.zeros(DType::BF16, &[rows, hidden])?);
            let x = std::cell::RefCell::new(x);
            self.bench(
                &format!("fused_add_rms_norm bf16 {rows} × {hidden}"),
                Work::Bytes(4 * 2 * rows * hidden),
                Goal::Us(goal),
                peer,
                || {
                    let (mut x, mut residual) = (x.borrow_mut(), residual.borrow_mut());
                    norm::fused_add_rms_norm(&self.exec, x.view_mut(), residual.view_mut(), w.view(), EPS)
                },
                || check(&x.borrow(), hidden, &x_host, |p, x| reference::norm::rms_norm(p, x, w_host.view(), EPS)),
            )
        }

        fn silu(&self, [rows, d]: [usize; 2], goal: f64, peer: &'static str) -> Result<()> {
            let (x, x_host) = self.random(1, &[rows, 2 * d])?;
            let out = std::cell::RefCell::new(self.gpu.zeros(DType::BF16, &[rows, d])?);
            self.bench(
                &format!("silu_and_mul bf16 {rows} × {d}"),
                Work::Bytes(3 * 2 * rows * d),
                Goal::Us(goal),
                peer,
                || activation::silu_and_mul(&self.exec, x.view(), out.borrow_mut().view_mut()),
                || check(&out.borrow(), d, &x_host, reference::activation::silu_and_mul),
            )
        }

        fn rope(&self, tokens: usize, goal: f64, peer: &'static str) -> Result<()> {
            let (q, q_host) = self.random(1, &[tokens, 32, 128])?;
            let (k, _) = self.random(2, &[tokens, 8, 128])?;
            let [q_out, k_out] = [q.clone(), k.clone()].map(std::cell::RefCell::new);
            // The same for the first four tokens and for the last four, which are looked at.
            let positions: Vec<i64> = (0..tokens as i64).map(|t| t % 4 * 250_000).collect();
            let at = Tensor::from_slice(&positions, &[tokens])?.to_device(&self.gpu)?;
            self.bench(
                &format!("apply_rope bf16 {tokens} × (32 + 8) × 128"),
                Work::Bytes(2 * 2 * tokens * 40 * 128),
                Goal::Us(goal),
                peer,
                || {
                    let (mut q_out, mut k_out) = (q_out.borrow_mut(), k_out.borrow_mut());
                    let (q_out, k_out, at) = (q_out.view_mut(), k_out.view_mut(), Positions::Ids(at.view()));
                    rope::apply_rope(&self.exec, q.view(), k.view(), at, Rope::default(), q_out, k_out)
                },
                || {
                    check(&q_out.borrow(), 128, &q_host, |p, x| {
                        reference::rope::apply_rope(p, x, &positions[..x.shape()[0]], &Rope::default())
                    })
                },
            )
        }

        fn append(&self, tokens: usize, goal: f64, peer: &'static str) -> Result<()> {
            const PAGE: usize = 16;
            let (k, k_host) = self.random(1, &[tokens, 8, 128])?;
            let pages = 2 * tokens.div_ceil(PAGE);
            let cache = || Ok(std::cell::RefCell::new(self.gpu.zeros(DType::BF16, &[pages, PAGE, 8, 128])?));
            let (k_cache, v_cache) = (cache()?, cache()?);
            // Every page's place is far from its neighbours'; few tokens are each of another request.
            let slot = |t: usize| {
                let (page, row) = if tokens < 1024 { (t / 8, t % 8 * 2) } else { (t / PAGE, t % PAGE) };
                page * 7919 % pages * PAGE + row
            };
            let slots: Vec<i64> = (0..tokens).map(|t| slot(t) as i64).collect();
            let slots = Tensor::from_slice(&slots, &[tokens])?.to_device(&self.gpu)?;
            self.bench(
                &format!("append_paged_kv bf16 {tokens} × 8 × 128"),
                Work::Bytes(2 * 2 * 2 * tokens * 8 * 128),
                Goal::Us(goal),
                peer,
                || {
                    let (mut k_cache, mut v_cache) = (k_cache.borrow_mut(), v_cache.borrow_mut());
                    let cache = PagedKvMut::new(k_cache.view_mut(), v_cache.view_mut(), KvLayout::Nhd)?;
                    page::append_paged_kv(&self.exec, k.view(), k.view(), Slots::Mapping(slots.view()), cache)
                },
                || {
                    let cache = k_cache.borrow().to_host()?.reshaped(&[pages * PAGE, 8, 128])?;
                    for t in [0, 1, tokens / 2, tokens - 1] {
                        let (got, want) = (cache.view().select(0, slot(t))?, k_host.view().select(0, t)?);
                        if got.to_f32_vec()? != want.to_f32_vec()? {
                            return Err(Error::value("gpu", "cache", format!("other numbers at token {t}"), "k"));
                        }
                    }
                    Ok(())
                },
            )
        }

        /// Whether a filter of the command line has it, or there is none.
        fn wants(&self, name: &str) -> bool {
            // A family is wanted for each of its cases.
            let has = |filter: &String| name.contains(filter) || (filter.starts_with(name) && !name.is_empty());
            self.filters.is_empty() || self.filters.iter().any(has)
        }

        fn bench(
            &self,
            name: &str,
            work: Work,
            goal: Goal,
            peer: &'static str,
            run: impl Fn() -> Result<()>,
            check: impl Fn() -> Result<()>,
        ) -> Result<()> {
            if !self.wants(name) {
                return Ok(());
            }
            let start = Instant::now();
            run()?;
            self.gpu.synchronize()?;
            let first = start.elapsed().as_secs_f64() * 1e3;
            // A wrong result is a row that says so: the others are wanted all the same.
            if let Err(e) = check() {
                println!("| {name} | {first:.1} | wrong: {e} |");
                return Ok(());
            }
            let mut times = (0..SAMPLES).map(|_| self.sample(&run)).collect::<Result<Vec<_>>>()?;
            times.sort_by(f64::total_cmp);
            let us = times[SAMPLES / 2];
            self.last.set(us);
            let (rate, shown) = match work {
                Work::Bytes(n) => (n as f64 / us / 1e3, format!("{:.0} GB/s", n as f64 / us / 1e3)),
                Work::Flops(n) => (n / us / 1e6, format!("{:.0} TFLOP/s", n / us / 1e6)),
            };
            match goal {
                Goal::Us(goal) => self.row(name, Some(first), us, &shown, goal, peer),
                Goal::Tflops(goal) => {
                    let verdict = if rate >= goal { "reached" } else { "missed" };
                    println!("| {name} | {first:.1} | {us:.2} | {shown} | {goal} TFLOP/s | {peer} | {verdict} |");
                }
            }
            Ok(())
        }

        /// Prints a row whose goal is a time; none if that is infinite.
        fn row(&self, name: &str, first: Option<f64>, time: f64, rate: &str, goal: f64, peer: &str) {
            let (goal, verdict) = match goal {
                f64::INFINITY => (String::new(), ""),
                goal if time <= goal => (goal.to_string(), "reached"),
                goal => (goal.to_string(), "missed"),
            };
            let first = first.map_or(String::new(), |ms| format!("{ms:.1}"));
            println!("| {name} | {first} | {time:.2} | {rate} | {goal} | {peer} | {verdict} |");
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

    fn fill<T: Copy>(to: &mut [T], from: &[T]) {
        to.chunks_mut(from.len()).for_each(|part| part.copy_from_slice(&from[..part.len()]));
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
