//! Verification of drafts over a vocabulary of 128,256.

mod support;

use fir::filters::PerRow;
use fir::philox::RngState;
use fir::sampling::softmax;
use fir::speculative::{self, ChainArgs, Tree, TreeOut};
use fir::{DType, Exec, Tensor, reference};
use support::{Suite, Work, random};

/// Distributions over the last axis.
fn distributions(seed: u64, rows: usize, vocab: usize, shape: &[usize]) -> Tensor {
    let (logits, mut probs) = (random(seed, DType::F32, &[rows, vocab]), Tensor::zeros(DType::F32, &[rows, vocab]));
    let out = probs.as_mut().unwrap().view_mut();
    softmax(&Exec::cpu().unwrap(), logits.view(), 0.5.into(), out).unwrap();
    probs.unwrap().reshaped(shape).unwrap()
}

fn rows(t: &Tensor, vocab: usize, range: std::ops::Range<usize>) -> Vec<Vec<f64>> {
    let all = t.as_slice::<f32>().unwrap();
    range.map(|r| all[r * vocab..][..vocab].iter().map(|&x| f64::from(x)).collect()).collect()
}

fn main() {
    let mut suite = Suite::new();
    let levels = suite.levels();
    let (vocab, batches): (usize, &[usize]) = if suite.checks_only() { (500, &[3]) } else { (128_256, &[1, 16]) };
    let drafts = 4;
    for &batch in batches {
        let p = distributions(1, batch * drafts, vocab, &[batch, drafts, vocab]);
        let q = distributions(2, batch * (drafts + 1), vocab, &[batch, drafts + 1, vocab]);
        let ids: Vec<i32> = (0..batch * drafts).map(|i| (i * 7919 % vocab) as i32).collect();
        let tokens = Tensor::from_slice(&ids, &[batch, drafts]).unwrap();
        let state = RngState { seed: 1, offset: 0 };
        for (level, exec) in &levels {
            suite.bench(
                &format!("chain_speculative_sample/v{vocab}-d{drafts}/b{batch}/{level}"),
                // The two distributions at the first rejection, at the least.
                Work { bytes: batch * vocab * 8, flops: 0 },
                Tensor::zeros(DType::I32, &[batch, drafts + 1]).unwrap(),
                |out| {
                    let args = ChainArgs {
                        draft_probs: p.view(),
                        draft_tokens: tokens.view(),
                        target_probs: q.view(),
                        rng: state.into(),
                        out: out.view_mut(),
                        accepted: None,
                        emitted: None,
                        valid: None,
                    };
                    speculative::chain_speculative_sample(exec, args).unwrap();
                },
                |out| {
                    let b = batch - 1;
                    let ids: Vec<usize> = ids[b * drafts..][..drafts].iter().map(|&t| t as usize).collect();
                    let (p, q) = (
                        rows(&p, vocab, b * drafts..(b + 1) * drafts),
                        rows(&q, vocab, b * (drafts + 1)..(b + 1) * (drafts + 1)),
                    );
                    let mut draw = 0;
                    let want = reference::speculative::chain(&ids, &p, &q, || {
                        draw += 1;
                        PerRow::One(state).uniform(b, draw - 1).into()
                    });
                    let got = &out.as_slice::<i32>().unwrap()[b * (drafts + 1)..];
                    let path: Vec<usize> = got[..want.path.len()].iter().map(|&t| t as usize).collect();
                    // The drawn token's own sum may round to the other side of the uniform: a neighbour in the sum.
                    if path == want.path && got[want.path.len()] >= 0 {
                        Ok(())
                    } else {
                        Err(format!("{got:?} for {:?}", want.path))
                    }
                },
            );
        }
    }
    let (batch, nodes) = (64, 16);
    // A chain whose every draft is what the target says.
    let ids = |f: &dyn Fn(usize) -> i32| {
        Tensor::from_slice(&(0..batch * nodes).map(f).collect::<Vec<_>>(), &[batch, nodes]).unwrap()
    };
    let (tokens, index) = (ids(&|i| (i % nodes) as i32), ids(&|i| i as i32));
    let next = ids(&|i| if i % nodes + 1 < nodes { (i % nodes + 1) as i32 } else { -1 });
    let (none, target) = (ids(&|_| -1), ids(&|i| (i % nodes + 1) as i32));
    for (level, exec) in &levels {
        let zeros = |shape: &[usize]| Tensor::zeros(DType::I32, shape).unwrap();
        suite.bench(
            &format!("verify_tree_greedy/n{nodes}/b{batch}/{level}"),
            Work { bytes: batch * nodes * 4 * 6, flops: 0 },
            [zeros(&[batch * nodes]), zeros(&[batch, nodes]), zeros(&[batch])],
            |[predicts, accepted, len]| {
                let tree = Tree {
                    tokens: tokens.view(),
                    retrieve_index: index.view(),
                    next_token: next.view(),
                    next_sibling: none.view(),
                };
                let (predicts, accept_index, accept_len) = (predicts.view_mut(), accepted.view_mut(), len.view_mut());
                let out = TreeOut { predicts, accept_index, accept_len };
                speculative::verify_tree_greedy(exec, tree, target.view(), out).unwrap();
            },
            |[_, accepted, len]| {
                let (accepted, len) = (accepted.as_slice::<i32>().unwrap(), len.as_slice::<i32>().unwrap());
                if len.iter().all(|&n| n as usize == nodes - 1) && accepted.iter().zip(0..).all(|(&a, i)| a == i) {
                    Ok(())
                } else {
                    Err(format!("accepted {len:?}"))
                }
            },
        );
    }
}
