//! Rotary embedding: how near it comes to the memory's speed.

mod support;

use fir::rope::{self, Angles, Positions, Roped};
use fir::variant::Rope;
use fir::{DType, Tensor, reference};
use support::{Suite, Work, matches, random};

fn main() {
    let mut suite = Suite::new();
    let (levels, heads, kv_heads, dim) = (suite.levels(), 32, 8, 128);
    let batches: &[usize] = if suite.checks_only() { &[5] } else { &[1, 64, 2048] };
    let positions = |tokens: usize| -> Vec<i64> { (0..tokens as i64).map(|t| t * 61 % 8192).collect() };
    let mut table = Tensor::zeros(DType::F32, &[8192, dim]).unwrap();
    rope::cos_sin_cache(&levels[0].1, &Rope::default(), table.view_mut()).unwrap();
    for dtype in [DType::F32, DType::BF16] {
        for &tokens in batches {
            let at = positions(tokens);
            let ids = Tensor::from_slice(&at, &[tokens]).unwrap();
            let (q, k) = (random(1, dtype, &[tokens, heads, dim]), random(2, dtype, &[tokens, kv_heads, dim]));
            let elements = tokens * (heads + kv_heads) * dim;
            let rows = 0..tokens.min(4);
            for (level, exec) in &levels {
                let id = |op: &str| format!("{op}/h{heads}x{kv_heads}-d{dim}-{dtype}/t{tokens}/{level}");
                let work = Work { bytes: elements * 2 * dtype.size(), flops: elements * 3 };
                for (op, angles) in [
                    ("apply_rope", Angles::Rope(Rope::default())),
                    ("apply_rope-cache", Angles::Cache { table: table.view(), interleave: false }),
                ] {
                    suite.bench(
                        &id(op),
                        work,
                        (q.clone(), k.clone()),
                        |(q_out, k_out)| {
                            let (at, q_out, k_out) = (Positions::Ids(ids.view()), q_out.view_mut(), k_out.view_mut());
                            rope::apply_rope(exec, q.view(), k.view(), at, angles, q_out, k_out).unwrap();
                        },
                        |(q_out, _)| {
                            let (got, x) = (q_out.view().slice(0, rows.clone()), q.view().slice(0, rows.clone()));
                            matches(got.unwrap(), dim, |p| match angles {
                                Angles::Rope(rope) => reference::rope::apply_rope(p, x.clone()?, &at, &rope),
                                Angles::Cache { table, interleave } => {
                                    reference::rope::apply_rope_with_cache(p, x.clone()?, &at, table, interleave)
                                }
                            })
                        },
                    );
                }
                let fp8 = |heads| Tensor::zeros(DType::E4M3, &[tokens, heads, dim]).unwrap();
                suite.bench(
                    &id("rope_quantize-e4m3"),
                    Work { bytes: elements * (dtype.size() + 1), flops: elements * 4 },
                    (fp8(heads), fp8(kv_heads)),
                    |(q_out, k_out)| {
                        let [q, k] = [(&q, q_out), (&k, k_out)].map(|(x, out)| Roped {
                            rope: x.view(),
                            rope_out: out.view_mut(),
                            nope: None,
                            scale: 0.1,
                        });
                        let at = Positions::Ids(ids.view());
                        rope::rope_quantize(exec, q, k, at, Rope::default()).unwrap();
                    },
                    |(q_out, _)| {
                        let (got, x) = (q_out.view().slice(0, rows.clone()), q.view().slice(0, rows.clone()));
                        matches(got.unwrap(), dim, |p| {
                            reference::rope::rope_quantize(p, x.clone()?, &at, &Rope::default(), 0.1)
                        })
                    },
                );
            }
        }
    }
}
