use fir::filters::PerRow;
use fir::philox::RngState;
use fir::reference::speculative as reference;
use fir::speculative::{self, ChainArgs, Coins, Tree, TreeArgs, TreeOut};
use fir::tensor::Bool;
use fir::testing::Rng;
use fir::{Exec, TensorMut, TensorRef};

use crate::support::{assert_distributed, every_exec};

/// A distribution over `vocab` tokens.
fn distribution(rng: &mut Rng, vocab: usize) -> Vec<f32> {
    let w: Vec<f64> = (0..vocab).map(|_| f64::from(2.0 * rng.normal()).exp()).collect();
    let sum: f64 = w.iter().sum();
    w.iter().map(|w| (w / sum) as f32).collect()
}

fn f64s(rows: &[f32], vocab: usize) -> Vec<Vec<f64>> {
    rows.chunks(vocab).map(|row| row.iter().map(|&x| f64::from(x)).collect()).collect()
}

fn token_of(dist: &[f32], u: f32) -> i32 {
    let dist: Vec<f64> = dist.iter().map(|&x| x.into()).collect();
    fir::reference::sampling::inverse_cdf(&dist, u.into()).unwrap() as i32
}

#[test]
fn chains_match_reference() {
    every_exec(|exec| {
        let mut rng = Rng::new(1);
        for (batch, drafts, vocab) in [(1, 1, 1), (7, 0, 5), (9, 1, 17), (30, 4, 40), (5, 3, 1100)] {
            let mut p: Vec<f32> = (0..batch * drafts).flat_map(|_| distribution(&mut rng, vocab)).collect();
            let q: Vec<f32> = (0..batch * (drafts + 1)).flat_map(|_| distribution(&mut rng, vocab)).collect();
            let tokens: Vec<i32> = (0..batch * drafts)
                .map(|i| {
                    // A third of the drafts come from the target itself, so that long chains are accepted.
                    if i % 3 == 0 {
                        let (b, d) = (i / drafts, i % drafts);
                        let target = &q[(b * (drafts + 1) + d) * vocab..][..vocab];
                        p[i * vocab..][..vocab].copy_from_slice(target);
                    }
                    token_of(&p[i * vocab..][..vocab], rng.uniform())
                })
                .collect();
            let states: Vec<RngState> = (0..batch as u64).map(|b| RngState { seed: b, offset: 9 }).collect();
            let (mut out, mut valid) = (vec![7i32; batch * (drafts + 1)], vec![Bool(7); batch]);
            let (mut accepted, mut emitted) = (vec![100i32; batch], vec![-3i64; batch]);
            speculative::chain_speculative_sample(
                exec,
                ChainArgs {
                    draft_probs: TensorRef::new(&p, &[batch, drafts, vocab]).unwrap(),
                    draft_tokens: TensorRef::new(&tokens, &[batch, drafts]).unwrap(),
                    target_probs: TensorRef::new(&q, &[batch, drafts + 1, vocab]).unwrap(),
                    rng: PerRow::Each(&states),
                    out: TensorMut::new(&mut out, &[batch, drafts + 1]).unwrap(),
                    accepted: Some(TensorMut::new(&mut accepted, &[batch]).unwrap()),
                    emitted: Some(TensorMut::new(&mut emitted, &[batch]).unwrap()),
                    valid: Some(TensorMut::new(&mut valid, &[batch]).unwrap()),
                },
            )
            .unwrap();
            for b in 0..batch {
                let ids: Vec<usize> = tokens[b * drafts..][..drafts].iter().map(|&t| t as usize).collect();
                let mut draw = 0;
                let want = reference::chain(
                    &ids,
                    &f64s(&p[b * drafts * vocab..][..drafts * vocab], vocab),
                    &f64s(&q[b * (drafts + 1) * vocab..][..(drafts + 1) * vocab], vocab),
                    || {
                        draw += 1;
                        states[b].uniform(0, draw - 1).into()
                    },
                );
                let mut row: Vec<i32> = want.path.iter().map(|&t| t as i32).collect();
                row.push(want.next.unwrap() as i32);
                row.resize(drafts + 1, -1);
                assert_eq!(out[b * (drafts + 1)..][..=drafts], row, "{exec:?} {vocab} {b}");
                assert_eq!((accepted[b], emitted[b]), (100 + want.accepted as i32, -3 + want.path.len() as i64));
                assert!(valid[b].get());
            }
        }
    });
}

#[test]
fn the_first_token_of_a_chain_has_the_targets_distribution() {
    let exec = Exec::cpu().unwrap();
    let mut rng = Rng::new(2);
    let (batch, vocab) = (20_000, 12);
    let p = distribution(&mut rng, vocab);
    let q: Vec<f32> = (0..2).flat_map(|_| distribution(&mut rng, vocab)).collect();
    let tokens: Vec<i32> = (0..batch).map(|_| token_of(&p, rng.uniform())).collect();
    let mut out = vec![0i32; batch * 2];
    speculative::chain_speculative_sample(
        &exec,
        ChainArgs {
            draft_probs: TensorRef::strided(&p, &[batch, 1, vocab], &[0, 0, 1]).unwrap(),
            draft_tokens: TensorRef::new(&tokens, &[batch, 1]).unwrap(),
            target_probs: TensorRef::strided(&q, &[batch, 2, vocab], &[0, vocab, 1]).unwrap(),
            rng: PerRow::One(RngState { seed: 3, offset: 0 }),
            out: TensorMut::new(&mut out, &[batch, 2]).unwrap(),
            accepted: None,
            emitted: None,
            valid: None,
        },
    )
    .unwrap();
    assert_distributed("first", out.chunks(2).map(|row| row[0]), &f64s(&q, vocab)[0]);
    let after: Vec<i32> = out.chunks(2).map(|row| row[1]).filter(|&t| t >= 0).collect();
    assert!(after.len() > 1000);
    assert_distributed("after", after.into_iter(), &f64s(&q, vocab)[1]);
}

/// A tree in which every node's parent is one of the nodes before it.
fn random_tree(rng: &mut Rng, nodes: usize, vocab: usize) -> reference::Tree {
    let mut tree = reference::Tree { tokens: vec![0; nodes], child: vec![-1; nodes], sibling: vec![-1; nodes] };
    for i in (1..nodes).rev() {
        let parent = rng.below(i);
        tree.tokens[i] = rng.below(vocab) as i64;
        tree.sibling[i] = tree.child[parent];
        tree.child[parent] = i as i64;
    }
    tree
}

#[test]
fn trees_match_reference() {
    every_exec(|exec| {
        let mut rng = Rng::new(3);
        for (batch, nodes, depth, vocab) in
            [(1, 1, 1, 3), (20, 6, 4, 5), (20, 12, 3, 8), (30, 9, 9, 700), (40, 8, 1, 6)]
        {
            let trees: Vec<_> = (0..batch).map(|_| random_tree(&mut rng, nodes, vocab)).collect();
            let flat = |f: fn(&reference::Tree) -> &Vec<i64>| trees.iter().flat_map(f).copied().collect::<Vec<i64>>();
            let (tokens, child, sibling) = (flat(|t| &t.tokens), flat(|t| &t.child), flat(|t| &t.sibling));
            // Any places will do as long as they differ.
            let total = batch * nodes + 3;
            let slots: Vec<i64> = (0..batch * nodes).map(|i| ((i * 7 + 2) % (batch * nodes)) as i64 + 3).collect();
            let slots = if (batch * nodes) % 7 == 0 { (0..(batch * nodes) as i64).collect() } else { slots };
            let q: Vec<f32> = (0..batch * nodes).flat_map(|_| distribution(&mut rng, vocab)).collect();
            let axes = [batch, nodes];
            let tree = Tree {
                tokens: TensorRef::new(&tokens, &axes).unwrap(),
                retrieve_index: TensorRef::new(&slots, &axes).unwrap(),
                next_token: TensorRef::new(&child, &axes).unwrap(),
                next_sibling: TensorRef::new(&sibling, &axes).unwrap(),
            };
            let states: Vec<RngState> = (0..batch as u64).map(|b| RngState { seed: 5, offset: b }).collect();
            let coins: Vec<f32> =
                (0..batch * nodes).map(|i| states[i / nodes].uniform(0, (i % nodes) as u32)).collect();
            let last: Vec<f32> = states.iter().map(|s| s.uniform(0, nodes as u32)).collect();
            let greedy: Vec<i32> = (0..batch * nodes).map(|_| rng.below(vocab) as i32).collect();
            for (single, acc) in [(1.0, 1.0), (0.3, 1.0), (1.0, 0.4), (0.9, 0.0), (0.0, 1.0)] {
                for how in 0..3 {
                    let (mut predicts, mut index, mut len) =
                        (vec![-9i32; total], vec![-9i64; batch * depth], vec![-9i32; batch]);
                    let out = TreeOut {
                        predicts: TensorMut::new(&mut predicts, &[total]).unwrap(),
                        accept_index: TensorMut::new(&mut index, &[batch, depth]).unwrap(),
                        accept_len: TensorMut::new(&mut len, &[batch]).unwrap(),
                    };
                    if how == 2 {
                        let target = TensorRef::new(&greedy, &axes).unwrap();
                        speculative::verify_tree_greedy(exec, tree, target, out).unwrap();
                    } else {
                        let coins = match how {
                            0 => Coins::Rng(PerRow::Each(&states)),
                            _ => Coins::Given {
                                nodes: TensorRef::new(&coins, &axes).unwrap(),
                                last: TensorRef::new(&last, &[batch]).unwrap(),
                            },
                        };
                        speculative::tree_speculative_sample(
                            exec,
                            TreeArgs {
                                tree,
                                target_probs: TensorRef::new(&q, &[batch, nodes, vocab]).unwrap(),
                                threshold_single: single,
                                threshold_acc: acc,
                                coins,
                                out,
                                valid: None,
                            },
                        )
                        .unwrap();
                    }
                    let (mut want_predicts, mut want_index) = (vec![-9i32; total], Vec::new());
                    for b in 0..batch {
                        let want = if how == 2 {
                            let target: Vec<i64> = greedy[b * nodes..][..nodes].iter().map(|&t| t.into()).collect();
                            reference::greedy(&trees[b], &target, depth)
                        } else {
                            let coins: Vec<f64> = coins[b * nodes..][..nodes].iter().map(|&c| c.into()).collect();
                            let q = f64s(&q[b * nodes * vocab..][..nodes * vocab], vocab);
                            reference::tree(&trees[b], &q, depth, single.into(), acc.into(), &coins, last[b].into())
                        };
                        assert_eq!(len[b] as usize, want.path.len(), "{exec:?} {nodes} {b} {how}");
                        let mut at = vec![0];
                        at.extend(&want.path);
                        for (j, &node) in at.iter().enumerate() {
                            let next = at.get(j + 1).map_or(want.next.unwrap() as i64, |&n| trees[b].tokens[n]);
                            want_predicts[slots[b * nodes + node] as usize] = next as i32;
                        }
                        want_index.extend((0..depth).map(|j| at.get(j).map_or(-1, |&n| slots[b * nodes + n])));
                    }
                    assert_eq!((predicts, index), (want_predicts, want_index), "{exec:?} {nodes} {single} {acc} {how}");
                }
            }
        }
    });
}

#[test]
fn the_first_token_of_a_tree_has_the_targets_distribution() {
    let exec = Exec::cpu().unwrap();
    let mut rng = Rng::new(4);
    let (batch, nodes, vocab) = (20_000, 4, 10);
    let q: Vec<f32> = (0..nodes).flat_map(|_| distribution(&mut rng, vocab)).collect();
    // Three children of the root.
    let (tokens, child, sibling) = ([0i32, 3, 7, 1], [1i32, -1, -1, -1], [-1i32, 2, 3, -1]);
    let all: Vec<i32> = (0..(batch * nodes) as i32).collect();
    let (mut predicts, mut index, mut len) = (vec![-1i32; batch * nodes], vec![0i32; batch * 2], vec![0i32; batch]);
    speculative::tree_speculative_sample(
        &exec,
        TreeArgs {
            tree: Tree {
                tokens: TensorRef::strided(&tokens, &[batch, nodes], &[0, 1]).unwrap(),
                retrieve_index: TensorRef::new(&all, &[batch, nodes]).unwrap(),
                next_token: TensorRef::strided(&child, &[batch, nodes], &[0, 1]).unwrap(),
                next_sibling: TensorRef::strided(&sibling, &[batch, nodes], &[0, 1]).unwrap(),
            },
            target_probs: TensorRef::strided(&q, &[batch, nodes, vocab], &[0, vocab, 1]).unwrap(),
            threshold_single: 1.0,
            threshold_acc: 1.0,
            coins: Coins::Rng(PerRow::One(RngState { seed: 8, offset: 1 })),
            out: TreeOut {
                predicts: TensorMut::new(&mut predicts, &[batch * nodes]).unwrap(),
                accept_index: TensorMut::new(&mut index, &[batch, 2]).unwrap(),
                accept_len: TensorMut::new(&mut len, &[batch]).unwrap(),
            },
            valid: None,
        },
    )
    .unwrap();
    assert_distributed("first", predicts.chunks(nodes).map(|row| row[0]), &f64s(&q, vocab)[0]);
    // The second token, after each child that was accepted.
    for (node, &token) in tokens.iter().enumerate().skip(1) {
        let after = predicts.chunks(nodes).filter(|row| row[0] == token && row[node] >= 0).map(|row| row[node]);
        assert_distributed(&format!("after {node}"), after, &f64s(&q, vocab)[node]);
    }
}

#[test]
fn chains_without_a_distribution_left_are_defined() {
    every_exec(|exec| {
        let (batch, vocab) = (3, 20);
        let mut p = vec![0f32; batch * vocab];
        let mut q = vec![0f32; 2 * batch * vocab];
        // Row 0: the target gives the draft nothing, and is nowhere above the draft: drawn from the target itself.
        p[2..4].fill(1.0);
        q[3] = 0.5;
        // Row 1: the target is NaN.
        q[2 * vocab..4 * vocab].fill(f32::NAN);
        // Row 2: the target is nothing.
        p[2 * vocab + 2] = 1.0;
        let (tokens, mut out, mut valid) = ([2i32; 3], [9i32; 6], [Bool(7); 3]);
        speculative::chain_speculative_sample(
            exec,
            ChainArgs {
                draft_probs: TensorRef::new(&p, &[batch, 1, vocab]).unwrap(),
                draft_tokens: TensorRef::new(&tokens, &[batch, 1]).unwrap(),
                target_probs: TensorRef::new(&q, &[batch, 2, vocab]).unwrap(),
                rng: PerRow::One(RngState::default()),
                out: TensorMut::new(&mut out, &[batch, 2]).unwrap(),
                accepted: None,
                emitted: None,
                valid: Some(TensorMut::new(&mut valid, &[batch]).unwrap()),
            },
        )
        .unwrap();
        assert_eq!(out, [3, -1, 0, -1, 0, -1]);
        assert_eq!(valid.map(Bool::get), [true, false, false]);
    });
}

#[test]
fn bad_chains_and_trees_are_errors() {
    let exec = &Exec::cpu().unwrap();
    let (p, q) = ([0.25f32; 8], [0.25f32; 12]);
    let chain = |tokens: [i32; 2], states: &[RngState]| {
        let mut out = [0i32; 3];
        speculative::chain_speculative_sample(
            exec,
            ChainArgs {
                draft_probs: TensorRef::new(&p, &[1, 2, 4]).unwrap(),
                draft_tokens: TensorRef::new(&tokens, &[1, 2]).unwrap(),
                target_probs: TensorRef::new(&q, &[1, 3, 4]).unwrap(),
                rng: PerRow::Each(states),
                out: TensorMut::new(&mut out, &[1, 3]).unwrap(),
                accepted: None,
                emitted: None,
                valid: None,
            },
        )
        .map_err(|e| e.to_string())
    };
    let one = [RngState::default()];
    assert_eq!(chain([0, 3], &one), Ok(()));
    for (got, want) in [
        (chain([0, 4], &one), "`draft_tokens` is 4 at 1, expected 0 or more and less than 4"),
        (chain([-1, 0], &one), "`draft_tokens` is -1 at 0, expected 0 or more and less than 4"),
        (chain([0, 0], &[]), "`rng` is 0 values, expected 1, one per row"),
    ] {
        assert_eq!(got, Err(format!("chain_speculative_sample: {want}")));
    }

    let tree = |tokens: [i32; 3], slots: [i32; 3], child: [i32; 3], sibling: [i32; 3], coin: f32| {
        let (mut predicts, mut index, mut len) = ([0i32; 3], [0i32; 2], [0i32; 1]);
        let coins = [coin; 3];
        speculative::tree_speculative_sample(
            exec,
            TreeArgs {
                tree: Tree {
                    tokens: TensorRef::new(&tokens, &[1, 3]).unwrap(),
                    retrieve_index: TensorRef::new(&slots, &[1, 3]).unwrap(),
                    next_token: TensorRef::new(&child, &[1, 3]).unwrap(),
                    next_sibling: TensorRef::new(&sibling, &[1, 3]).unwrap(),
                },
                target_probs: TensorRef::new(&q, &[1, 3, 4]).unwrap(),
                threshold_single: 1.0,
                threshold_acc: 1.0,
                coins: Coins::Given {
                    nodes: TensorRef::new(&coins, &[1, 3]).unwrap(),
                    last: TensorRef::new(&coins[..1], &[1]).unwrap(),
                },
                out: TreeOut {
                    predicts: TensorMut::new(&mut predicts, &[3]).unwrap(),
                    accept_index: TensorMut::new(&mut index, &[1, 2]).unwrap(),
                    accept_len: TensorMut::new(&mut len, &[1]).unwrap(),
                },
                valid: None,
            },
        )
        .map(|()| (predicts, index, len[0]))
        .map_err(|e| e.to_string())
    };
    let (none, slots) = ([-1; 3], [0, 1, 2]);
    // Ids of nodes that no link reaches, and the root's token, are not looked at.
    assert_eq!(tree([-7, 2, 99], [0, 1, 77], [1, -1, -1], none, 0.0), Ok(([2, 0, 0], [0, 1], 1)));
    assert_eq!(tree([0, 2, 3], slots, [1, -1, -1], [-1, 2, -1], 0.3), Ok(([3, 0, 1], [0, 2], 1)));
    for (got, want) in [
        (tree([0, 4, 0], slots, [1, -1, -1], none, 0.0), "`tokens` is 4 at [0, 1], expected 0 or more and less than 4"),
        (
            tree([0; 3], [0, 3, 0], [1, -1, -1], none, 0.0),
            "`retrieve_index` is 3 at [0, 1], expected 0 or more and less than 3",
        ),
        (tree([0; 3], slots, [3, -1, -1], none, 0.0), "`next_token` is 3 at [0, 0], expected -1 to 2"),
        (tree([0; 3], slots, none, [-1, -2, -1], 0.0), "`next_sibling` is -2 at [0, 1], expected -1 to 2"),
        (
            tree([0; 3], slots, [1, -1, -1], [-1, 2, 1], 0.9),
            "`next_sibling` is 1 at [0, 2], expected a node that no other link reaches",
        ),
        (
            tree([0; 3], slots, [1, 0, -1], none, 0.0),
            "`next_token` is 0 at [0, 1], expected a node that no other link reaches",
        ),
        (tree([0; 3], slots, none, none, f32::NAN), "`coins.nodes` is NaN for row 0, expected a number in [0, 1]"),
    ] {
        assert_eq!(got, Err(format!("tree_speculative_sample: {want}")));
    }
}
