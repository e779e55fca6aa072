//! Gated activations: how near they come to the memory's speed.

mod support;

use fir::reference::{Precision, activation as reference};
use fir::{DType, Exec, Result, TensorMut, TensorRef, activation};
use support::{Suite, Work, matches, random};

type Op = fn(&Exec, TensorRef<'_>, TensorMut<'_>) -> Result<()>;
type Reference = fn(Precision, TensorRef<'_>) -> Result<Vec<f64>>;

const OPS: [(&str, Op, Reference); 3] = [
    ("silu_and_mul", activation::silu_and_mul, reference::silu_and_mul),
    ("gelu_and_mul", activation::gelu_and_mul, reference::gelu_and_mul),
    ("gelu_tanh_and_mul", activation::gelu_tanh_and_mul, reference::gelu_tanh_and_mul),
];

fn main() {
    let mut suite = Suite::new();
    let (d, levels) = (11008, suite.levels());
    let batches: &[usize] = if suite.checks_only() { &[2] } else { &[1, 64, 1024] };
    for (name, op, reference) in OPS {
        for dtype in [DType::F32, DType::BF16] {
            for &tokens in batches {
                let (x, rows) = (random(1, dtype, &[tokens, 2 * d]), 0..tokens.min(2));
                let out = random(2, dtype, &[tokens, d]);
                let work = Work { bytes: 3 * tokens * d * dtype.size(), flops: 0 };
                for (level, exec) in &levels {
                    suite.bench(
                        &format!("{name}/d{d}-{dtype}/t{tokens}/{level}"),
                        work,
                        out.clone(),
                        |out| op(exec, x.view(), out.view_mut()).unwrap(),
                        |out| {
                            let x = x.view().slice(0, rows.clone()).unwrap();
                            matches(out.view().slice(0, rows.clone()).unwrap(), d, |p| reference(p, x))
                        },
                    );
                }
                if tokens == 1 {
                    suite.bench(
                        &format!("{name}/d{d}-{dtype}/t{tokens}/reference"),
                        work,
                        Vec::new(),
                        |out| *out = reference(Precision::Exact, x.view()).unwrap(),
                        |out| if out.len() == d { Ok(()) } else { Err(format!("{} elements", out.len())) },
                    );
                }
            }
        }
    }
}
