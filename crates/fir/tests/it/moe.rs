use fir::moe::*;
use fir::reference::{Precision, activation, moe as reference};
use fir::tensor::{Block, Scaled};
use fir::testing::Rng;
use fir::{DType, Exec, Result, Tensor, TensorMut, TensorRef};

use crate::support::{FLOATS, Wanted, assert_matches, every_exec};

fn routed(
    exec: &Exec,
    routing: Routing,
    logits: TensorRef<'_>,
    bias: Option<TensorRef<'_>>,
    top_k: usize,
) -> (Vec<i32>, Tensor) {
    let shape = [logits.shape()[0], top_k];
    let (mut ids, mut weights) =
        (Tensor::from_slice(&vec![-9; shape[0] * top_k], &shape).unwrap(), Tensor::zeros(DType::F32, &shape).unwrap());
    let args = RouteArgs { logits, bias, ids: ids.view_mut(), weights: weights.view_mut() };
    route(exec, routing, args).unwrap();
    (ids.as_slice::<i32>().unwrap().to_vec(), weights)
}

#[track_caller]
fn assert_routes(routing: Routing, logits: &Tensor, bias: Option<&Tensor>, top_k: usize) {
    let (logits, bias) = (logits.view(), bias.map(|b| b.view()));
    let (want, _) = reference::route(Precision::Exact, routing, logits, bias, top_k).unwrap();
    let wanted = Wanted::of(DType::F32, |p| Ok(reference::route(p, routing, logits, bias, top_k)?.1));
    every_exec(|exec| {
        let (ids, weights) = routed(exec, routing, logits, bias, top_k);
        let what = format!("{exec:?} {routing:?} {:?} top {top_k}", logits.shape());
        assert_eq!(ids, want, "{what}");
        wanted.check(&what, weights.view(), top_k);
    });
}

#[test]
fn routes_match_reference() {
    let mut rng = Rng::new(1);
    for dtype in FLOATS {
        for (tokens, experts, top_k) in
            [(1, 1, 1), (5, 8, 2), (3, 17, 5), (2, 60, 4), (300, 128, 8), (4, 7, 7), (2, 4, 0)]
        {
            let logits = rng.tensor(dtype, &[tokens, experts]);
            let bias = rng.tensor(dtype, &[experts]);
            for score in [Score::Softmax, Score::Sigmoid] {
                for (renormalize, scale) in [(false, 1.0), (true, 1.0), (true, 2.5)] {
                    let routing = Routing { score, renormalize, groups: None, scale };
                    assert_routes(routing, &logits, None, top_k);
                    assert_routes(routing, &logits, Some(&bias), top_k);
                }
            }
        }
    }
}

#[test]
fn groups_are_chosen_by_their_two_best() {
    let mut rng = Rng::new(2);
    let logits = rng.tensor(DType::F32, &[40, 256]);
    let bias = rng.tensor(DType::F32, &[256]);
    assert_routes(Routing::deepseek_v3(), &logits, Some(&bias), 8);
    assert_routes(Routing::deepseek_v3(), &logits, None, 8);
    for (count, chosen) in [(1, 1), (2, 1), (256, 9), (128, 128), (32, 2), (4, 3)] {
        let routing = Routing { groups: Some(Groups { count, chosen }), ..Routing::default() };
        assert_routes(routing, &logits, Some(&bias), 8);
        assert_routes(routing, &logits, None, 8);
    }
    // Two good experts beat one that is better: groups of 3, sums 0.9 + 0.1 and 0.6 + 0.6.
    let logit = |p: f32| (p / (1.0 - p)).ln();
    let scores: Vec<f32> = [0.9, 0.1, 0.05, 0.6, 0.01, 0.6].map(logit).to_vec();
    let logits = Tensor::from_f32(DType::F32, &scores, &[1, 6]).unwrap();
    let routing = Routing { groups: Some(Groups { count: 2, chosen: 1 }), ..Routing::llama4() };
    every_exec(|exec| assert_eq!(routed(exec, routing, logits.view(), None, 2).0, [3, 5]));
}

#[test]
fn a_bias_chooses_and_does_not_weigh() {
    every_exec(|exec| {
        let logits = Tensor::from_f32(DType::F32, &[0.0, 0.0, 2.0], &[1, 3]).unwrap();
        let bias = Tensor::from_f32(DType::BF16, &[0.0, 5.0, 0.0], &[3]).unwrap();
        let routing = Routing { score: Score::Sigmoid, renormalize: false, groups: None, scale: 1.0 };
        let (ids, weights) = routed(exec, routing, logits.view(), Some(bias.view()), 1);
        assert_eq!((ids, weights.as_slice::<f32>().unwrap()), (vec![1], &[0.5][..]));
    });
}

#[test]
fn ties_go_to_the_first_and_not_numbers_come_last() {
    const INF: f32 = f32::INFINITY;
    every_exec(|exec| {
        let logits = Tensor::from_f32(
            DType::F32,
            &[1.0, 3.0, 3.0, -0.0, 0.0, 3.0, f32::NAN, -INF, -INF, f32::NAN, 0.0, -1.0],
            &[2, 6],
        )
        .unwrap();
        let (ids, weights) = routed(exec, Routing::default(), logits.view(), None, 6);
        assert_eq!(ids, [1, 2, 5, 0, 3, 4, 4, 5, 1, 2, 0, 3]);
        let weights = weights.as_slice::<f32>().unwrap();
        let best = 3.0 * 3f32.exp();
        assert!((weights[..3].iter().sum::<f32>() - best / (best + 1f32.exp() + 2.0)).abs() < 1e-5);
        // The weights of a token are NaN only if it must use an expert whose logit is.
        assert!(weights[6..].iter().all(|w| w.is_nan()));
        let (ids, weights) = routed(exec, Routing::default(), logits.view(), None, 3);
        assert_eq!(ids[3..], [4, 5, 1]);
        let weights = weights.as_slice::<f32>().unwrap();
        assert!((weights[3] - 1.0 / (1.0 + (-1f32).exp())).abs() < 1e-6 && weights[5] == 0.0, "{weights:?}");
        // Scores that saturate keep the order of their logits.
        let logits = Tensor::from_f32(DType::F32, &[50.0, 90.0, 70.0], &[1, 3]).unwrap();
        assert_eq!(routed(exec, Routing::llama4(), logits.view(), None, 2).0, [1, 2]);
    });
}

#[test]
fn dispatch_sorts_pairs_by_expert_and_keeps_their_order() {
    let mut rng = Rng::new(3);
    for (tokens, top_k, experts) in [(0, 2, 3), (5, 0, 3), (1, 1, 1), (50, 4, 7), (300, 8, 64)] {
        let ids: Vec<i32> = (0..tokens * top_k).map(|_| rng.below(experts + 2) as i32 - 2).collect();
        let dispatch = Dispatch::new(TensorRef::new(&ids, &[tokens, top_k]).unwrap(), experts).unwrap();
        let mut want: Vec<u32> = (0..ids.len() as u32).filter(|&pair| ids[pair as usize] >= 0).collect();
        want.sort_by_key(|&pair| (ids[pair as usize], pair));
        assert_eq!(dispatch.pairs(), want);
        for (e, range) in dispatch.indptr().indptr().windows(2).enumerate() {
            let pairs = &dispatch.pairs()[range[0] as usize..range[1] as usize];
            assert!(pairs.iter().all(|&pair| ids[pair as usize] as usize == e));
        }
        assert_eq!(dispatch.indptr().batch(), experts);
    }
    let err = Dispatch::new(TensorRef::new(&[0i64, 3], &[1, 2]).unwrap(), 3).unwrap_err();
    assert_eq!(err.to_string(), "Dispatch: `ids` is 3 at 1, expected less than 3");
}

/// A layer of experts with tokens.
struct Layer {
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    scales: Option<[Tensor; 2]>,
}

impl Layer {
    fn new(rng: &mut Rng, [x, w]: [DType; 2], [tokens, top_k, experts, hidden, inter]: [usize; 5]) -> Self {
        let ids: Vec<i32> = (0..tokens * top_k).map(|_| rng.below(experts + 1) as i32 - 1).collect();
        let shapes = [[experts, 2 * inter, hidden], [experts, hidden, inter]];
        let scales = (w.size() == 1).then(|| {
            shapes.map(|[e, n, k]| {
                let [rows, columns] = Block::TILE.counts(n, k);
                let values: Vec<f32> = rng.normals(e * rows * columns).iter().map(|x| x.exp2()).collect();
                Tensor::from_f32(DType::F32, &values, &[e, rows, columns]).unwrap()
            })
        });
        let [w_gate_up, w_down] = shapes.map(|shape| {
            let data: Vec<f32> = rng.normals(shape.iter().product()).iter().map(|x| x * 0.2).collect();
            Tensor::from_f32(w, &data, &shape).unwrap()
        });
        Self {
            x: rng.tensor(x, &[tokens, hidden]),
            ids: Tensor::from_slice(&ids, &[tokens, top_k]).unwrap(),
            weights: rng.tensor(DType::F32, &[tokens, top_k]),
            w_gate_up,
            w_down,
            scales,
        }
    }

    fn experts(&self) -> (Scaled<'_>, Scaled<'_>) {
        match &self.scales {
            Some([a, b]) => (
                Scaled::new(self.w_gate_up.view(), a.view(), Block::TILE),
                Scaled::new(self.w_down.view(), b.view(), Block::TILE),
            ),
            None => (self.w_gate_up.view().into(), self.w_down.view().into()),
        }
    }

    fn run(&self, exec: &Exec, gate: Gate, tokens: std::ops::Range<usize>) -> Tensor {
        let mut out = Tensor::zeros(self.x.dtype(), &[tokens.len(), self.x.shape()[1]]).unwrap();
        let (w_gate_up, w_down) = self.experts();
        let (x, ids, weights) = (
            self.x.view().slice(0, tokens.clone()).unwrap(),
            self.ids.view().slice(0, tokens.clone()).unwrap(),
            self.weights.view().slice(0, tokens.clone()).unwrap(),
        );
        moe_ffn(exec, FfnArgs { x, ids, weights, w_gate_up, w_down, gate, out: out.view_mut() }).unwrap();
        out
    }

    #[track_caller]
    fn assert_matches(&self, gate: Gate, what: &str) {
        let act = match gate {
            Gate::Silu => activation::silu,
            Gate::Gelu => activation::gelu,
            Gate::GeluTanh => activation::gelu_tanh,
        };
        let weights: Vec<f64> = self.weights.as_slice::<f32>().unwrap().iter().map(|&w| f64::from(w)).collect();
        let wanted = Wanted::of(self.x.dtype(), |p| {
            reference::moe_ffn(p, self.x.view(), (self.ids.as_slice()?, &weights), self.experts(), act)
        });
        every_exec(|exec| {
            let out = self.run(exec, gate, 0..self.x.shape()[0]);
            wanted.check(&format!("{exec:?} {what}"), out.view(), out.shape()[1]);
        });
    }
}

#[test]
fn experts_match_reference() {
    let mut rng = Rng::new(4);
    for dtype in FLOATS {
        for (sizes, gate) in [
            ([7, 2, 4, 33, 17], Gate::Silu),
            ([1, 1, 1, 1, 1], Gate::Gelu),
            ([30, 3, 5, 64, 40], Gate::GeluTanh),
            ([2, 8, 3, 16, 16], Gate::Silu),
            // More than a tile of rows to an expert.
            ([200, 3, 4, 72, 136], Gate::Gelu),
            ([5, 2, 3, 0, 8], Gate::Silu),
            ([5, 2, 3, 8, 0], Gate::Silu),
            ([0, 2, 3, 8, 8], Gate::Silu),
            ([3, 0, 3, 8, 8], Gate::Silu),
        ] {
            let layer = Layer::new(&mut rng, [dtype, dtype], sizes);
            layer.assert_matches(gate, &format!("{dtype} {sizes:?} {gate:?}"));
        }
        let sizes = [20, 2, 4, 150, 140];
        for weights in [DType::E4M3, DType::E5M2] {
            let layer = Layer::new(&mut rng, [dtype, weights], sizes);
            layer.assert_matches(Gate::Silu, &format!("{dtype} {weights} {sizes:?}"));
        }
    }
}

#[test]
fn a_token_has_the_same_bits_whatever_is_beside_it() {
    every_exec(|exec| {
        let mut rng = Rng::new(5);
        for (weights, hidden, inter) in [(DType::BF16, 130, 50), (DType::E4M3, 130, 50), (DType::BF16, 136, 64)] {
            let layer = Layer::new(&mut rng, [DType::BF16, weights], [70, 3, 6, hidden, inter]);
            let all = layer.run(exec, Gate::Silu, 0..70).view().to_f32_vec().unwrap();
            for t in [0, 33, 69] {
                let one = layer.run(exec, Gate::Silu, t..t + 1).view().to_f32_vec().unwrap();
                assert_eq!(one, all[t * hidden..][..hidden], "{exec:?} {weights} {hidden} token {t}");
            }
        }
    });
}

#[test]
fn many_tokens_are_taken_in_turns() {
    // 400 tokens of 512 choices are more rows than are held at once.
    let exec = Exec::cpu().unwrap();
    let layer = Layer::new(&mut Rng::new(6), [DType::F32, DType::F32], [400, 512, 3, 64, 1]);
    let all = layer.run(&exec, Gate::Silu, 0..400);
    let one = layer.run(&exec, Gate::Silu, 399..400);
    assert_eq!(one.as_slice::<f32>().unwrap(), &all.as_slice::<f32>().unwrap()[399 * 64..]);
    assert!(one.as_slice::<f32>().unwrap().iter().any(|&x| x != 0.0));
}

#[test]
fn strided_tokens_match_and_gaps_stay() {
    every_exec(|exec| {
        let mut rng = Rng::new(7);
        let layer = Layer::new(&mut rng, [DType::F32, DType::F32], [6, 2, 3, 20, 9]);
        let mut data = vec![-9.5f32; 6 * 32];
        data.chunks_mut(32)
            .zip(layer.x.as_slice::<f32>().unwrap().chunks(20))
            .for_each(|(to, x)| to[..20].copy_from_slice(x));
        let x = TensorRef::strided(&data, &[6, 20], &[32, 1]).unwrap();
        let mut out = vec![-9.5f32; 6 * 25];
        let (w_gate_up, w_down) = layer.experts();
        let into = TensorMut::strided(&mut out, &[6, 20], &[25, 1]).unwrap();
        let (ids, weights) = (layer.ids.view(), layer.weights.view());
        moe_ffn(exec, FfnArgs { x, ids, weights, w_gate_up, w_down, gate: Gate::Silu, out: into }).unwrap();
        let want = layer.run(exec, Gate::Silu, 0..6);
        let got = TensorRef::strided(&out, &[6, 20], &[25, 1]).unwrap().to_f32_vec().unwrap();
        assert_eq!(got, want.as_slice::<f32>().unwrap());
        assert!(out.chunks(25).all(|row| row[20..].iter().all(|&x| x == -9.5)));
    });
}

#[test]
fn bad_arguments_are_named() {
    let exec = &Exec::cpu().unwrap();
    let t = |dtype, shape: &[usize]| Tensor::zeros(dtype, shape).unwrap();
    let check = |got: Result<()>, want: &str| assert_eq!(got.unwrap_err().to_string(), want);
    use DType::{BF16, E4M3, F32, I32};
    let routes = |routing: Routing, logits: Tensor, bias: Option<Tensor>, mut ids: Tensor, mut weights: Tensor| {
        let bias = bias.as_ref().map(|b| b.view());
        let args = RouteArgs { logits: logits.view(), bias, ids: ids.view_mut(), weights: weights.view_mut() };
        route(exec, routing, args)
    };
    let (logits, ids, weights) = (t(F32, &[3, 8]), t(I32, &[3, 2]), t(F32, &[3, 2]));
    let default = Routing::default();
    let in_groups = |count, chosen| Routing { groups: Some(Groups { count, chosen }), ..default };
    let all = || (logits.clone(), ids.clone(), weights.clone());
    let with = |routing| {
        let (logits, ids, weights) = all();
        routes(routing, logits, None, ids, weights)
    };
    check(with(in_groups(3, 1)), "route: `groups.count` is 3, expected a divisor of 8 experts");
    check(with(in_groups(0, 1)), "route: `groups.count` is 0, expected a divisor of 8 experts");
    check(with(in_groups(4, 5)), "route: `groups.chosen` is 5, expected 1 to 4");
    check(with(in_groups(8, 1)), "route: `top_k` is 2, expected at most the 1 experts to choose from");
    check(with(Routing { scale: f32::NAN, ..default }), "route: `scale` is NaN, expected a finite number");
    let (logits, ids, weights) = all();
    check(
        routes(default, t(F32, &[3, 1]), None, ids.clone(), weights.clone()),
        "route: `top_k` is 2, expected at most the 1 experts to choose from",
    );
    check(
        routes(default, logits.clone(), Some(t(F32, &[7])), ids.clone(), weights.clone()),
        "route: `bias` has experts=7, but `logits` bound experts=8",
    );
    check(routes(default, logits.clone(), None, t(F32, &[3, 2]), weights.clone()), "route: `ids` is f32, expected i32");
    check(
        routes(default, t(E4M3, &[3, 8]), None, ids.clone(), weights),
        "route: `logits` is e4m3, expected f32, f16 or bf16",
    );
    let ffn = |w_gate_up: Scaled<'_>, w_down: Scaled<'_>, ids: &[i32], mut out: Tensor| {
        let (x, weights, ids) = (t(BF16, &[1, 8]), t(F32, &[1, 2]), Tensor::from_slice(ids, &[1, ids.len()]).unwrap());
        let (x, ids, weights, out) = (x.view(), ids.view(), weights.view(), out.view_mut());
        moe_ffn(exec, FfnArgs { x, ids, weights, w_gate_up, w_down, gate: Gate::Silu, out })
    };
    let (up, down, out) = (t(BF16, &[2, 6, 8]), t(BF16, &[2, 8, 3]), t(BF16, &[1, 8]));
    let (upv, downv) = (Scaled::from(up.view()), Scaled::from(down.view()));
    check(ffn(upv, downv, &[0, 2], out.clone()), "moe_ffn: `ids` is 2 at 1, expected less than 2");
    check(ffn(upv, downv, &[0], out.clone()), "moe_ffn: `weights` has top_k=2, but `ids` bound top_k=1");
    check(
        ffn(t(BF16, &[2, 5, 8]).view().into(), downv, &[0, 1], out.clone()),
        "moe_ffn: `w_gate_up` is 5 rows, expected an even number, 2 * inter",
    );
    check(
        ffn(upv, t(BF16, &[2, 8, 4]).view().into(), &[0, 1], out.clone()),
        "moe_ffn: `w_down` has inter=4, but `w_gate_up` bound inter=3",
    );
    check(ffn(upv, t(F32, &[2, 8, 3]).view().into(), &[0, 1], out.clone()), "moe_ffn: `w_down` is f32, expected bf16");
    check(ffn(upv, downv, &[0, 1], t(F32, &[1, 8])), "moe_ffn: `out` is f32, expected bf16");
    check(
        ffn(Scaled::new(up.view(), t(F32, &[2, 1, 1]).view(), Block::TENSOR), downv, &[0, 1], out),
        "moe_ffn: `w_gate_up.scales` is given, expected none with weights of bf16",
    );
}

#[test]
fn routes_by_a_table_match_reference() {
    every_exec(|exec| {
        let mut rng = Rng::new(40);
        for dtype in FLOATS {
            for (tokens, experts, top_k, vocabulary) in
                [(1, 1, 1, 1), (5, 8, 2, 30), (33, 256, 8, 99), (2, 60, 40, 7), (0, 4, 2, 3)]
            {
                let logits = rng.tensor(dtype, &[tokens, experts]);
                let table: Vec<i32> = (0..vocabulary * top_k).map(|i| (i * 37 % experts) as i32).collect();
                let named: Vec<i64> = (0..tokens).map(|t| (t * 11 % vocabulary) as i64).collect();
                let want: Vec<i32> =
                    named.iter().flat_map(|&n| table[n as usize * top_k..][..top_k].to_vec()).collect();
                let table = Tensor::from_slice(&table, &[vocabulary, top_k]).unwrap();
                let wide = Tensor::from_slice(&named, &[tokens]).unwrap();
                let narrow: Vec<i32> = named.iter().map(|&n| n as i32).collect();
                let narrow = Tensor::from_slice(&narrow, &[tokens]).unwrap();
                for (shared, named) in [(None, &wide), (Some(0.4), &narrow)] {
                    let slots = top_k + usize::from(shared.is_some());
                    let mut ids = Tensor::from_slice(&vec![-9i32; tokens * slots], &[tokens, slots]).unwrap();
                    let mut weights = Tensor::zeros(DType::F32, &[tokens, slots]).unwrap();
                    let (logits, table, tokens) = (logits.view(), table.view(), named.view());
                    let args = TableRouteArgs {
                        logits,
                        tokens,
                        table,
                        shared,
                        ids: ids.view_mut(),
                        weights: weights.view_mut(),
                    };
                    route_by_table(exec, args).unwrap();
                    let what = format!("{exec:?} {dtype} {experts} {top_k} {shared:?}");
                    let ids = ids.as_slice::<i32>().unwrap();
                    let own: Vec<i32> = ids.chunks(slots).flat_map(|row| row[..top_k].to_vec()).collect();
                    assert_eq!(own, want, "{what}");
                    let shown = weights.view().slice(1, 0..top_k).unwrap();
                    assert_matches(&what, shown, top_k, |p| reference::route_by_table(p, logits, &want));
                    if let Some(weight) = shared {
                        assert!(ids.chunks(slots).all(|row| row[top_k] == experts as i32), "{what}");
                        assert!(
                            weights.as_slice::<f32>().unwrap().chunks(slots).all(|row| row[top_k] == weight),
                            "{what}"
                        );
                    }
                }
            }
        }
    });
}

#[test]
fn bad_tables_are_named() {
    let exec = Exec::cpu().unwrap();
    let check = |table: &[i32], token: i64, slots, shared, want: &str| {
        let (logits, table) =
            (Tensor::zeros(DType::F32, &[1, 4]).unwrap(), Tensor::from_slice(table, &[2, 2]).unwrap());
        let tokens = Tensor::from_slice(&[token], &[1]).unwrap();
        let mut ids = Tensor::zeros(DType::I32, &[1, slots]).unwrap();
        let mut weights = Tensor::zeros(DType::F32, &[1, slots]).unwrap();
        let (logits, tokens, table) = (logits.view(), tokens.view(), table.view());
        let args = TableRouteArgs { logits, tokens, table, shared, ids: ids.view_mut(), weights: weights.view_mut() };
        assert_eq!(route_by_table(&exec, args).unwrap_err().to_string(), format!("route_by_table: {want}"));
    };
    let ok = [0, 1, 2, 3];
    check(&ok, 2, 2, None, "`tokens` is 2 at 0, expected 0 to 2 - 1, as the table has");
    check(&ok, -1, 2, None, "`tokens` is -1 at 0, expected 0 to 2 - 1, as the table has");
    check(&[0, 4, 2, 3], 0, 2, None, "`table` is 4 for token 0, expected 0 to 4 - 1, as there are logits");
    check(&ok, 0, 2, Some(1.0), "`ids` has slots=2, but `table` bound slots=3");
    check(&ok, 0, 3, Some(f32::NAN), "`shared` is Some(NaN), expected a finite number");
}
