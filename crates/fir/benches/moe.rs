//! Mixtures of experts: routing, and layers near the memory's speed for few tokens.

mod support;

use fir::moe::{self, FfnArgs, Gate, RouteArgs, Routing};
use fir::reference::{activation, moe as reference};
use fir::tensor::{Block, Scaled};
use fir::{DType, Tensor, TensorRef};
use support::{Suite, Work, matches, random};

fn main() {
    let mut suite = Suite::new();
    let levels = suite.levels();
    let (experts, top_k) = (256, 8);
    let batches: &[usize] = if suite.checks_only() { &[5] } else { &[1, 64, 1024] };
    let bias = random(1, DType::F32, &[experts]);
    for &tokens in batches {
        let logits = random(2, DType::F32, &[tokens, experts]);
        for (name, routing) in [("softmax", Routing::default()), ("deepseek_v3", Routing::deepseek_v3())] {
            let bias = (name == "deepseek_v3").then(|| bias.view());
            for (level, exec) in &levels {
                suite.bench(
                    &format!("route/{name}-e{experts}-k{top_k}/t{tokens}/{level}"),
                    Work { bytes: tokens * (experts + 2 * top_k) * 4, flops: 0 },
                    (Tensor::zeros(DType::I32, &[tokens, top_k]).unwrap(), random(3, DType::F32, &[tokens, top_k])),
                    |(ids, weights)| {
                        let (ids, weights) = (ids.view_mut(), weights.view_mut());
                        moe::route(exec, routing, RouteArgs { logits: logits.view(), bias, ids, weights }).unwrap();
                    },
                    |(_, weights)| {
                        matches(weights.view(), top_k, |p| {
                            Ok(reference::route(p, routing, logits.view(), bias, top_k)?.1)
                        })
                    },
                );
            }
        }
    }
    let (experts, top_k, hidden, inter) = if suite.checks_only() { (4, 2, 128, 96) } else { (32, 4, 2048, 1024) };
    for dtype in [DType::BF16, DType::E4M3] {
        let (up, down) = (random(4, dtype, &[experts, 2 * inter, hidden]), random(5, dtype, &[experts, hidden, inter]));
        let scales = [(2 * inter, hidden), (hidden, inter)].map(|(n, k)| {
            let [rows, columns] = Block::TILE.counts(n, k);
            random(6, DType::F32, &[experts, rows, columns])
        });
        for &tokens in batches {
            let x = random(7, DType::BF16, &[tokens, hidden]);
            let ids: Vec<i32> = (0..tokens * top_k).map(|i| ((i * 7 + i / top_k) % experts) as i32).collect();
            let weights = random(8, DType::F32, &[tokens, top_k]);
            let used = (tokens * top_k).min(experts);
            let work = Work {
                bytes: used * 3 * inter * hidden * dtype.size() + 2 * tokens * hidden * 2,
                flops: 6 * tokens * top_k * inter * hidden,
            };
            let (w_gate_up, w_down) = if dtype == DType::BF16 {
                (Scaled::from(up.view()), Scaled::from(down.view()))
            } else {
                (
                    Scaled::new(up.view(), scales[0].view(), Block::TILE),
                    Scaled::new(down.view(), scales[1].view(), Block::TILE),
                )
            };
            for (level, exec) in &levels {
                suite.bench(
                    &format!("moe_ffn/e{experts}-k{top_k}-h{hidden}-i{inter}-{dtype}/t{tokens}/{level}"),
                    work,
                    x.clone(),
                    |out| {
                        let ids = TensorRef::new(&ids, &[tokens, top_k]).unwrap();
                        let (x, weights, gate, out) = (x.view(), weights.view(), Gate::Silu, out.view_mut());
                        moe::moe_ffn(exec, FfnArgs { x, ids, weights, w_gate_up, w_down, gate, out }).unwrap();
                    },
                    |out| {
                        let weights: Vec<f64> =
                            weights.as_slice::<f32>().unwrap()[..top_k].iter().map(|&w| f64::from(w)).collect();
                        matches(out.view().slice(0, 0..1).unwrap(), hidden, |p| {
                            let (x, ids) = (x.view().slice(0, 0..1)?, &ids[..top_k]);
                            reference::moe_ffn(p, x, (ids, &weights), (w_gate_up, w_down), activation::silu)
                        })
                    },
                );
            }
        }
    }
}
