//! Low-rank adapters of experts: both products of a step of tokens with an adapter each.

mod support;

use fir::lora::{AdaptArgs, RowOf, adapt};
use fir::reference::lora as reference;
use fir::{DType, Tensor};
use support::{Suite, Work, matches, random};

fn main() {
    let mut suite = Suite::new();
    let levels = suite.levels();
    let (experts, top_k, adapters, hidden, rank) =
        if suite.checks_only() { (4, 2, 2, 64, 8) } else { (32, 4, 4, 2048, 16) };
    let batches: &[usize] = if suite.checks_only() { &[3] } else { &[1, 64] };
    for &tokens in batches {
        let pairs: Vec<(usize, i64, usize)> =
            (0..tokens * top_k).map(|p| (p / top_k, (p / top_k % adapters) as i64, p * 7 % experts)).collect();
        let ids = |of: &dyn Fn(&(usize, i64, usize)) -> i64| {
            Tensor::from_slice(&pairs.iter().map(of).collect::<Vec<_>>(), &[pairs.len()]).unwrap()
        };
        let (of_tokens, of_experts) = (ids(&|p| p.0 as i64), ids(&|p| p.2 as i64));
        let own: Vec<i64> = (0..tokens).map(|t| (t % adapters) as i64).collect();
        let own = Tensor::from_slice(&own, &[tokens]).unwrap();
        for (name, x_of, inputs, outputs) in [("a", RowOf::Token, hidden, rank), ("b", RowOf::Pair, rank, hidden)] {
            let weights = random(1, DType::BF16, &[adapters, experts, outputs, inputs]);
            let rows = if x_of == RowOf::Token { tokens } else { pairs.len() };
            let x = random(2, DType::BF16, &[rows, inputs]);
            let listed: Vec<_> =
                pairs.iter().enumerate().map(|(i, p)| (if x_of == RowOf::Token { p.0 } else { i }, p.1, p.2)).collect();
            let ones = vec![1.0; listed.len()];
            for (level, exec) in &levels {
                suite.bench(
                    &format!("adapt/{name}-e{experts}-k{top_k}-r{rank}/t{tokens}/{level}"),
                    Work { bytes: pairs.len() * inputs * outputs * 2, flops: 2 * pairs.len() * inputs * outputs },
                    Tensor::zeros(DType::F32, &[pairs.len(), outputs]).unwrap(),
                    |out| {
                        let args = AdaptArgs {
                            x: x.view(),
                            x_of,
                            weights: weights.view(),
                            tokens: of_tokens.view(),
                            experts: of_experts.view(),
                            adapters: own.view(),
                            factors: None,
                            add: false,
                            out: out.view_mut(),
                            out_of: RowOf::Pair,
                        };
                        adapt(exec, args).unwrap();
                    },
                    |out| {
                        matches(out.view(), inputs, |p| reference::adapted(p, x.view(), weights.view(), &listed, &ones))
                    },
                );
            }
        }
    }
}
