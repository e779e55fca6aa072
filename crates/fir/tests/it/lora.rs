use fir::lora::*;
use fir::reference::lora as reference;
use fir::testing::Rng;
use fir::{DType, Error, Exec, Tensor};

use crate::support::{FLOATS, assert_matches, every_exec};

const ADAPTERS: usize = 3;
const EXPERTS: usize = 4;

/// Pairs of 6 tokens, two of which have no adapter; one pair has a token that there is not.
struct Pairs {
    tokens: Tensor,
    experts: Tensor,
    adapters: Tensor,
    factors: Tensor,
    /// `(pair, token, adapter, expert)` of those that are not left out.
    kept: Vec<(usize, usize, i64, usize)>,
}

impl Pairs {
    fn new(wide: bool) -> Self {
        let tokens = [0i64, 0, 1, 2, 3, 3, 5, 9, -1, 4, 0];
        let adapters = [2i64, 0, -1, 1, 2, -7];
        let experts: Vec<i64> = (0..tokens.len() as i64).map(|p| p * 3 % EXPERTS as i64).collect();
        let kept = tokens.iter().enumerate().filter_map(|(p, &t)| {
            let adapter = *adapters.get(usize::try_from(t).ok()?)?;
            (adapter >= 0).then_some((p, t as usize, adapter, experts[p] as usize))
        });
        let kept = kept.collect();
        let ids = |x: &[i64]| match wide {
            true => Tensor::from_slice(x, &[x.len()]).unwrap(),
            false => Tensor::from_slice(&x.iter().map(|&x| x as i32).collect::<Vec<_>>(), &[x.len()]).unwrap(),
        };
        let (tokens, adapters, experts) = (ids(&tokens), ids(&adapters), ids(&experts));
        Self { factors: Rng::new(3).tensor(DType::F32, &[tokens.shape()[0]]), tokens, experts, adapters, kept }
    }

    fn count(&self, of: RowOf) -> usize {
        if of == RowOf::Pair { self.tokens.shape()[0] } else { self.adapters.shape()[0] }
    }
}

#[test]
fn every_way_matches_reference() {
    every_exec(|exec| {
        let mut rng = Rng::new(1);
        for dtype in FLOATS {
            for (inputs, outputs) in [(64, 16), (16, 200), (7, 3), (1030, 9), (8, 1), (0, 4)] {
                let weights = rng.tensor(dtype, &[ADAPTERS, EXPERTS, outputs, inputs]);
                for (x_of, out_of, add, factored) in [
                    (RowOf::Token, RowOf::Pair, true, false),
                    (RowOf::Pair, RowOf::Pair, true, true),
                    (RowOf::Pair, RowOf::Token, true, true),
                    (RowOf::Pair, RowOf::Pair, false, false),
                    (RowOf::Token, RowOf::Token, false, true),
                ] {
                    let pairs = Pairs::new(add);
                    let out_type = if out_of == RowOf::Token || !add { DType::F32 } else { dtype };
                    let x = rng.tensor(dtype, &[pairs.count(x_of), inputs]);
                    let before = rng.tensor(out_type, &[pairs.count(out_of), outputs]);
                    let mut out = before.clone();
                    let args = AdaptArgs {
                        x: x.view(),
                        x_of,
                        weights: weights.view(),
                        tokens: pairs.tokens.view(),
                        experts: pairs.experts.view(),
                        adapters: pairs.adapters.view(),
                        factors: factored.then(|| pairs.factors.view()),
                        add,
                        out: out.view_mut(),
                        out_of,
                    };
                    adapt(exec, args).unwrap();
                    let row = |of, p, t| if of == RowOf::Pair { p } else { t };
                    let listed: Vec<_> = pairs.kept.iter().map(|&(p, t, a, e)| (row(x_of, p, t), a, e)).collect();
                    let factors = pairs.factors.as_slice::<f32>().unwrap();
                    let factors: Vec<f64> =
                        pairs.kept.iter().map(|k| if factored { f64::from(factors[k.0]) } else { 1.0 }).collect();
                    let before = before.view().to_f32_vec().unwrap();
                    let what = format!("{exec:?} {dtype} {inputs} {outputs} {x_of:?} {out_of:?} {add}");
                    assert_matches(&what, out.view(), inputs + 4, |p| {
                        let each = reference::adapted(p, x.view(), weights.view(), &listed, &factors)?;
                        let mut want: Vec<f64> = before.iter().map(|&x| f64::from(x)).collect();
                        for (k, each) in pairs.kept.iter().zip(each.chunks(outputs)) {
                            let to = &mut want[row(out_of, k.0, k.1) * outputs..][..outputs];
                            for (to, y) in to.iter_mut().zip(each) {
                                *to = if add || out_of == RowOf::Token { p.acc(*to + y) } else { *y };
                            }
                        }
                        Ok(want.into_iter().map(|x| p.store(x)).collect())
                    });
                    // Rows of pairs that were left out have their bits.
                    if out_of == RowOf::Pair {
                        let after = out.view().to_f32_vec().unwrap();
                        for p in (0..pairs.count(out_of)).filter(|p| pairs.kept.iter().all(|k| k.0 != *p)) {
                            let range = p * outputs..(p + 1) * outputs;
                            assert_eq!(after[range.clone()], before[range], "{what}, pair {p}");
                        }
                    }
                }
            }
        }
    });
}

#[test]
fn bad_arguments_are_named() {
    let exec = Exec::cpu().unwrap();
    let t = |dtype, shape: &[usize]| Tensor::zeros(dtype, shape).unwrap();
    let ids = |x: &[i32]| Tensor::from_slice(x, &[x.len()]).unwrap();
    let call = |x: &Tensor, weights: &Tensor, experts: &Tensor, adapters: &Tensor, mut out: Tensor, out_of| {
        let tokens = ids(&[0, 1]);
        let args = AdaptArgs {
            x: x.view(),
            x_of: RowOf::Token,
            weights: weights.view(),
            tokens: tokens.view(),
            experts: experts.view(),
            adapters: adapters.view(),
            factors: None,
            add: true,
            out: out.view_mut(),
            out_of,
        };
        adapt(&exec, args)
    };
    let (x, w, e, a) = (t(DType::BF16, &[2, 8]), t(DType::BF16, &[3, 4, 5, 8]), ids(&[0, 3]), ids(&[2, -1]));
    let out = |dtype| t(dtype, &[2, 5]);
    let check = |got: fir::Result<()>, want: &str| assert_eq!(got.unwrap_err().to_string(), format!("adapt: {want}"));
    call(&x, &w, &e, &a, out(DType::BF16), RowOf::Pair).unwrap();
    check(call(&x, &w, &ids(&[4, 0]), &a, out(DType::F32), RowOf::Pair), "`experts` is 4 at 0, expected 0 to 4 - 1");
    check(call(&x, &w, &e, &ids(&[3, 0]), out(DType::F32), RowOf::Pair), "`adapters` is 3 at 0, expected less than 3");
    check(
        call(&x, &w, &ids(&[0]), &a, out(DType::F32), RowOf::Pair),
        "`experts` has pairs=1, but `tokens` bound pairs=2",
    );
    check(
        call(&x, &t(DType::F16, &[3, 4, 5, 8]), &e, &a, out(DType::F32), RowOf::Pair),
        "`weights` is f16, expected bf16 as `x`",
    );
    check(call(&x, &w, &e, &a, out(DType::F16), RowOf::Pair), "`out` is f16, expected f32, or bf16 as `x`");
    check(
        call(&x, &w, &e, &a, out(DType::BF16), RowOf::Token),
        "`out` is bf16, expected f32, as rows of several pairs are added up",
    );
    let turned = w.view().transpose(2, 3).unwrap();
    assert!(matches!(
        adapt(
            &exec,
            AdaptArgs {
                x: t(DType::BF16, &[2, 5]).view(),
                x_of: RowOf::Token,
                weights: turned,
                tokens: ids(&[0, 1]).view(),
                experts: e.view(),
                adapters: a.view(),
                factors: None,
                add: false,
                out: t(DType::F32, &[2, 8]).view_mut(),
                out_of: RowOf::Pair,
            }
        ),
        Err(Error::Layout { arg: "weights", .. })
    ));
}
