//! Norms: how near they come to the memory's speed.

mod support;

use fir::{DType, norm, reference};
use support::{Suite, Work, matches, random};

const EPS: f32 = 1e-6;

fn main() {
    let mut suite = Suite::new();
    let (hidden, levels) = (4096, suite.levels());
    let batches: &[usize] = if suite.checks_only() { &[3] } else { &[1, 64, 2048] };
    for dtype in [DType::F32, DType::BF16] {
        for &tokens in batches {
            let shape = [tokens, hidden];
            let (x, r) = (random(1, dtype, &shape), random(2, dtype, &shape));
            let (w, b) = (random(3, dtype, &[hidden]), random(4, DType::F32, &[hidden]));
            let (elements, size) = (tokens * hidden, dtype.size());
            let rows = 0..tokens.min(4);
            for (level, exec) in &levels {
                let id = |op: &str| format!("{op}/h{hidden}-{dtype}/t{tokens}/{level}");
                let work = |tensors: usize, flops: usize| Work {
                    bytes: elements * size * tensors + hidden * size,
                    flops: elements * flops,
                };
                suite.bench(
                    &id("rms_norm"),
                    work(2, 4),
                    x.clone(),
                    |out| norm::rms_norm(exec, x.view(), w.view(), EPS, out.view_mut()).unwrap(),
                    |out| {
                        let (got, x) = (out.view().slice(0, rows.clone()), x.view().slice(0, rows.clone()));
                        matches(got.unwrap(), hidden, |p| reference::norm::rms_norm(p, x.clone()?, w.view(), EPS))
                    },
                );
                suite.bench(
                    &id("fused_add_rms_norm"),
                    work(4, 5),
                    (x.clone(), r.clone()),
                    |(x, r)| norm::fused_add_rms_norm(exec, x.view_mut(), r.view_mut(), w.view(), EPS).unwrap(),
                    |(out, _)| {
                        let (x, r) =
                            (x.view().slice(0, rows.clone()).unwrap(), r.view().slice(0, rows.clone()).unwrap());
                        matches(out.view().slice(0, rows.clone()).unwrap(), hidden, |p| {
                            Ok(reference::norm::fused_add_rms_norm(p, x, r, w.view(), EPS)?.0)
                        })
                    },
                );
                suite.bench(
                    &id("layer_norm"),
                    work(2, 6),
                    x.clone(),
                    |out| norm::layer_norm(exec, x.view(), w.view(), b.view(), EPS, out.view_mut()).unwrap(),
                    |out| {
                        let x = x.view().slice(0, rows.clone()).unwrap();
                        matches(out.view().slice(0, rows.clone()).unwrap(), hidden, |p| {
                            reference::norm::layer_norm(p, x, w.view(), b.view(), EPS)
                        })
                    },
                );
                suite.bench(
                    &id("rms_norm_quant-e4m3"),
                    Work { bytes: elements * (size + 1) + hidden * size, flops: elements * 5 },
                    random(5, DType::E4M3, &shape),
                    |out| norm::rms_norm_quant(exec, x.view(), w.view(), 0.1, EPS, out.view_mut()).unwrap(),
                    |out| {
                        let x = x.view().slice(0, rows.clone()).unwrap();
                        matches(out.view().slice(0, rows.clone()).unwrap(), hidden, |p| {
                            let norm = reference::norm::rms_norm(p, x, w.view(), EPS)?;
                            Ok(reference::norm::quantized(p, norm, 0.1, DType::E4M3))
                        })
                    },
                );
            }
            if tokens <= 64 {
                suite.bench(
                    &format!("rms_norm/h{hidden}-{dtype}/t{tokens}/reference"),
                    Work { bytes: elements * size * 2 + hidden * size, flops: elements * 4 },
                    Vec::new(),
                    |out| {
                        *out = reference::norm::rms_norm(reference::Precision::Exact, x.view(), w.view(), EPS).unwrap()
                    },
                    |out| if out.len() == elements { Ok(()) } else { Err(format!("{} elements", out.len())) },
                );
            }
        }
    }
    let (tokens, heads, dim) = (if suite.checks_only() { 3 } else { 64 }, 32, 128);
    let (q, k) = (random(6, DType::BF16, &[tokens, heads, dim]), random(7, DType::BF16, &[tokens, heads / 4, dim]));
    let w = random(8, DType::F32, &[dim]);
    for (level, exec) in &levels {
        let elements = tokens * (heads + heads / 4) * dim;
        suite.bench(
            &format!("qk_rms_norm/h{heads}x{}-d{dim}-bf16/t{tokens}/{level}", heads / 4),
            Work { bytes: elements * 4, flops: elements * 4 },
            (q.clone(), k.clone()),
            |(q, k)| norm::qk_rms_norm(exec, q.view_mut(), k.view_mut(), w.view(), w.view(), EPS).unwrap(),
            |(out_q, out_k)| {
                for (out, x) in [(out_q, &q), (out_k, &k)] {
                    matches(out.view(), dim, |p| reference::norm::rms_norm(p, x.view(), w.view(), EPS))?;
                }
                Ok(())
            },
        );
    }
}
