use fir::filters::{FilterOrder, Filters, PerRow};
use fir::philox::RngState;
use fir::reference::{self, Precision};
use fir::sampling::{self, Draw};
use fir::tensor::Bool;
use fir::testing::Rng;
use fir::{DType, Exec, Tensor, TensorMut, TensorRef};

use crate::support::{FLOATS, assert_distributed, assert_matches, every_exec};

const VOCABS: [usize; 12] = [1, 2, 7, 8, 15, 16, 33, 100, 511, 513, 1000, 2500];

fn rows(x: &[f32], vocab: usize) -> TensorRef<'_> {
    TensorRef::new(x, &[x.len() / vocab, vocab]).unwrap()
}

/// Rows of softmax of normal logits, of a sharpness that grows with the row's number.
fn probs(rng: &mut Rng, batch: usize, vocab: usize) -> Vec<f32> {
    let mut x = Vec::new();
    for b in 0..batch {
        let row: Vec<f64> = (0..vocab).map(|_| (f64::from(rng.normal()) * (0.2 + b as f64)).exp()).collect();
        let sum: f64 = row.iter().sum();
        x.extend(row.iter().map(|x| (x / sum) as f32));
    }
    x
}

fn states(batch: usize, seed: u64) -> Vec<RngState> {
    (0..batch as u64).map(|b| RngState { seed: seed + 17 * b, offset: b % 3 }).collect()
}

/// Tokens and validity of a call.
fn drawn(batch: usize, call: impl FnOnce(TensorMut<'_>, TensorMut<'_>) -> fir::Result<()>) -> (Vec<i32>, Vec<bool>) {
    let (mut out, mut valid) = (vec![-7i32; batch], vec![Bool(9); batch]);
    call(TensorMut::new(&mut out, &[batch]).unwrap(), TensorMut::new(&mut valid, &[batch]).unwrap()).unwrap();
    assert!(valid.iter().all(|v| v.0 < 2));
    (out, valid.into_iter().map(Bool::get).collect())
}

/// Tokens of a call.
fn tokens(batch: usize, call: impl FnOnce(TensorMut<'_>) -> fir::Result<()>) -> Vec<i32> {
    let mut out = vec![-7i32; batch];
    call(TensorMut::new(&mut out, &[batch]).unwrap()).unwrap();
    out
}

/// `token` is the one whose share of the distribution `u` falls into, or its neighbour within rounding of the border.
#[track_caller]
fn assert_drawn(what: &str, dist: &[f64], u: f32, token: i32) {
    let i = token as usize;
    assert!(dist[i] > 0.0, "{what}: token {i} has no mass");
    let total: f64 = dist.iter().sum();
    let below: f64 = dist[..i].iter().sum();
    let (u, slack) = (f64::from(u) * total, 1e-6 * total);
    assert!(below - slack <= u && u <= below + dist[i] + slack, "{what}: token {i} is {below}..+{}, u {u}", dist[i]);
}

/// Shares of the mass that lie between two steps of the sorted row's cumulative sum, away from rounding.
fn safe_p(row: &[f32], want: f64) -> f32 {
    let mut sorted: Vec<f64> = row.iter().map(|&x| f64::from(x)).collect();
    sorted.sort_by(|a, b| b.total_cmp(a));
    let total: f64 = sorted.iter().sum();
    let mut sum = 0.0;
    for x in sorted {
        if sum + x >= want * total && x > 1e-5 * total {
            return ((sum + x / 2.0) / total) as f32;
        }
        sum += x;
    }
    1.0
}

#[test]
fn softmax_matches_reference_at_every_level_and_type() {
    every_exec(|exec| {
        let mut rng = Rng::new(3);
        for dtype in FLOATS {
            for vocab in (1..40).chain(VOCABS).chain([5000]) {
                let x = rng.tensor(dtype, &[4, vocab]);
                for t in [PerRow::One(1.0), PerRow::Each(&[0.1, 3.0, 0.0, 1e-30])] {
                    let mut out = Tensor::zeros(DType::F32, &[4, vocab]).unwrap();
                    sampling::softmax(exec, x.view(), t, out.view_mut()).unwrap();
                    assert_matches(&format!("{exec:?} {dtype} {vocab} {t:?}"), out.view(), vocab, |p| {
                        reference::sampling::softmax(p, x.view(), t)
                    });
                }
            }
        }
    });
}

#[test]
fn softmax_of_infinities_and_nan_is_defined() {
    let (inf, nan) = (f32::INFINITY, f32::NAN);
    every_exec(|exec| {
        for vocab in [3, 8, 16, 37] {
            let mut x = vec![0.5f32; 6 * vocab];
            x[1] = inf;
            x[vocab] = -inf;
            x[2 * vocab..3 * vocab].fill(-inf);
            x[3 * vocab + 1] = nan;
            x[4 * vocab] = inf;
            x[5 * vocab - 1] = inf;
            x[5 * vocab..].copy_from_slice(&vec![f32::MAX; vocab]);
            x[5 * vocab] = f32::MIN;
            for t in [1.0, 0.0, 1e30, f32::MIN_POSITIVE] {
                let mut out = Tensor::zeros(DType::F32, &[6, vocab]).unwrap();
                sampling::softmax(exec, rows(&x, vocab), t.into(), out.view_mut()).unwrap();
                assert_matches(&format!("{exec:?} {vocab} {t}"), out.view(), vocab, |p| {
                    reference::sampling::softmax(p, rows(&x, vocab), t.into())
                });
            }
        }
    });
}

#[test]
fn renorms_and_mask_match_reference() {
    every_exec(|exec| {
        let mut rng = Rng::new(4);
        for vocab in VOCABS {
            let x = probs(&mut rng, 5, vocab);
            let mut out = Tensor::zeros(DType::F32, &[5, vocab]).unwrap();
            for k in [1, 2, 5, 40, vocab as u32, vocab as u32 + 9] {
                let ks = [k, 1 + k / 2, k, 1, u32::MAX];
                sampling::top_k_renorm(exec, rows(&x, vocab), (&ks[..]).into(), out.view_mut()).unwrap();
                assert_matches(&format!("{exec:?} {vocab} {k}"), out.view(), vocab, |p| {
                    reference::sampling::top_k_renorm(p, rows(&x, vocab), (&ks[..]).into())
                });
            }
            for want in [1e-9, 0.1, 0.5, 0.9, 0.999] {
                let ps: Vec<f32> = x.chunks(vocab).map(|row| safe_p(row, want)).collect();
                sampling::top_p_renorm(exec, rows(&x, vocab), (&ps[..]).into(), out.view_mut()).unwrap();
                assert_matches(&format!("{exec:?} {vocab} {ps:?}"), out.view(), vocab, |p| {
                    reference::sampling::top_p_renorm(p, rows(&x, vocab), (&ps[..]).into())
                });
                // The comparer allows a small error: the sets themselves must be the same.
                let want = reference::sampling::top_p_renorm(Precision::Exact, rows(&x, vocab), (&ps[..]).into());
                let kept = out.as_slice::<f32>().unwrap().iter().map(|&x| x > 0.0);
                assert!(kept.eq(want.unwrap().iter().map(|&x| x > 0.0)), "{exec:?} {vocab} {ps:?}");
            }
            for dtype in FLOATS {
                let x = rng.tensor(dtype, &[4, vocab]);
                let mut out = Tensor::zeros(dtype, &[4, vocab]).unwrap();
                for k in [1, 3, 60] {
                    sampling::top_k_mask_logits(exec, x.view(), k.into(), out.view_mut()).unwrap();
                    let want = reference::sampling::top_k_mask_logits(x.view(), k.into()).unwrap();
                    assert_eq!(reference::values(out.view()).unwrap(), want, "{exec:?} {dtype} {vocab} {k}");
                }
            }
        }
    });
}

#[test]
fn ties_pass_together() {
    every_exec(|exec| {
        for vocab in [5, 70, 700] {
            // Exact in f32: every sum of them is a multiple of 1/1024.
            let x: Vec<f32> = (0..vocab).map(|i| f32::from([8u8, 1, 4, 4, 2][i % 5]) / 1024.0).collect();
            let mut out = Tensor::zeros(DType::F32, &[1, vocab]).unwrap();
            let groups = vocab as u32 / 5;
            for (k, passing) in [
                (1, 1),
                (groups, 1),
                (groups + 1, 3),
                (3 * groups, 3),
                (3 * groups + 1, 4),
                (4 * groups, 4),
                (4 * groups + 1, 5),
            ] {
                sampling::top_k_renorm(exec, rows(&x, vocab), k.into(), out.view_mut()).unwrap();
                let kept = out.as_slice::<f32>().unwrap().iter().filter(|&&x| x > 0.0).count();
                assert_eq!(kept, passing * vocab / 5, "{exec:?} {vocab} {k}");
            }
            // 8 of 19 parts is a set's exact mass; a hair more needs the next.
            let unit = 1.0 / 19.0f64;
            for (p, passing) in [
                (7.9 * unit, 1),
                (8.1 * unit, 3),
                (15.9 * unit, 3),
                (16.1 * unit, 4),
                (17.9 * unit, 4),
                (18.1 * unit, 5),
                (1.0, 5),
            ] {
                sampling::top_p_renorm(exec, rows(&x, vocab), (p as f32).into(), out.view_mut()).unwrap();
                let kept = out.as_slice::<f32>().unwrap().iter().filter(|&&x| x > 0.0).count();
                assert_eq!(kept, passing * vocab / 5, "{exec:?} {vocab} {p}");
            }
        }
        // A share that is reached exactly is enough.
        let x = [0.25f32, 0.5, 0.125, 0.125];
        let mut out = Tensor::zeros(DType::F32, &[1, 4]).unwrap();
        for (p, want) in [(0.5, [0.0, 1.0, 0.0, 0.0]), (0.75, [1.0 / 3.0, 2.0 / 3.0, 0.0, 0.0]), (0.875, x)] {
            sampling::top_p_renorm(exec, rows(&x, 4), p.into(), out.view_mut()).unwrap();
            assert_eq!(out.as_slice::<f32>().unwrap(), want, "{exec:?} {p}");
        }
    });
}

/// Every filter, alone and together, as `(name, filters)` for rows of these probabilities.
fn filter_cases<'a>(ps: &'a [f32], ks: &'a [u32]) -> Vec<(&'static str, Filters<'a>)> {
    let none = Filters::default();
    let (top_p, top_k) = (PerRow::Each(ps), PerRow::Each(ks));
    vec![
        ("none", none),
        ("k", Filters { top_k, ..none }),
        ("p", Filters { top_p, ..none }),
        ("min_p", Filters { min_p: 0.13.into(), ..none }),
        ("joint", Filters { top_k, top_p, order: FilterOrder::Joint, ..none }),
        ("k first", Filters { top_k, top_p, ..none }),
        ("all", Filters { top_k, top_p, min_p: 0.07.into(), order: FilterOrder::Joint, ..none }),
    ]
}

#[test]
fn samples_from_probs_fall_where_the_reference_puts_the_uniform() {
    every_exec(|exec| {
        let mut rng = Rng::new(5);
        for vocab in VOCABS {
            let batch = 12;
            let x = probs(&mut rng, batch, vocab);
            let ps: Vec<f32> = x.chunks(vocab).map(|row| safe_p(row, 0.8)).collect();
            let ks: Vec<u32> = (0..batch as u32).map(|b| 1 + b * b * vocab as u32 / 100).collect();
            let states = states(batch, 100 + vocab as u64);
            let rng = PerRow::Each(&states[..]);
            for (name, f) in filter_cases(&ps, &ks).into_iter().filter(|(name, _)| *name != "all") {
                let x = rows(&x, vocab);
                let (tokens, valid) = drawn(batch, |out, valid| {
                    let draw = Draw { valid: Some(valid), ..Draw::new(rng, out) };
                    match name {
                        "none" => sampling::sample_from_probs(exec, x, draw),
                        "k" => sampling::top_k_sample(exec, x, f.top_k, draw),
                        "p" => sampling::top_p_sample(exec, x, f.top_p, draw),
                        "min_p" => sampling::min_p_sample(exec, x, f.min_p, draw),
                        _ => sampling::top_k_top_p_sample(exec, x, f.top_k, f.top_p, f.order, draw),
                    }
                });
                let want = reference::sampling::filtered(Precision::Exact, x, &f).unwrap();
                for (b, dist) in want.chunks(vocab).enumerate() {
                    assert!(valid[b]);
                    assert_drawn(&format!("{exec:?} {name} {vocab} {b}"), dist, rng.uniform(b, 0), tokens[b]);
                }
            }
        }
    });
}

#[test]
fn samples_from_logits_fall_where_the_reference_puts_the_uniform() {
    every_exec(|exec| {
        let mut rng = Rng::new(6);
        for (vocab, dtype) in VOCABS.into_iter().zip(FLOATS.into_iter().cycle()) {
            let batch = 12;
            let x = rng.tensor(dtype, &[batch, vocab]);
            let temperatures: Vec<f32> = (0..batch).map(|b| b as f32 * 0.25).collect();
            let temperature = PerRow::Each(&temperatures[..]);
            let dist = reference::sampling::softmax(Precision::Exact, x.view(), temperature).unwrap();
            let dist: Vec<f32> = dist.into_iter().map(|x| x as f32).collect();
            let ps: Vec<f32> = dist.chunks(vocab).map(|row| safe_p(row, 0.7)).collect();
            let ks: Vec<u32> = (0..batch as u32).map(|b| 1 + b * vocab as u32 / 11).collect();
            let states = states(batch, 900 + vocab as u64);
            let rng = PerRow::Each(&states[..]);
            for (name, f) in filter_cases(&ps, &ks) {
                let f = Filters { temperature, ..f };
                let x = x.view();
                let (got, valid) = drawn(batch, |out, valid| {
                    let draw = Draw { valid: Some(valid), ..Draw::new(rng, out) };
                    sampling::sample(exec, x, f, draw)
                });
                let want = reference::sampling::filtered_softmax(Precision::Exact, x, &f).unwrap();
                for (b, dist) in want.chunks(vocab).enumerate() {
                    assert!(valid[b]);
                    assert_drawn(&format!("{exec:?} {dtype} {name} {vocab} {b}"), dist, rng.uniform(b, 0), got[b]);
                }
                if name == "none" {
                    let plain =
                        tokens(batch, |out| sampling::sample_from_logits(exec, x, temperature, Draw::new(rng, out)));
                    assert_eq!(plain, got);
                }
            }
        }
    });
}

#[test]
fn draws_are_distributed_as_the_reference_says() {
    let exec = Exec::cpu().unwrap();
    let batch = 20_000;
    let logits: Vec<f32> = (0..24).map(|i| ((i * 7 % 24) as f32 * 0.37).sin() * 2.0).collect();
    let dist = reference::sampling::softmax(Precision::Exact, rows(&logits, 24), 1.0.into()).unwrap();
    let p: Vec<f32> = dist.iter().map(|&x| x as f32).collect();
    let (ps, ks) = ([safe_p(&p, 0.75)], [9]);
    for (name, f) in filter_cases(&ps, &ks) {
        let all = Filters { top_k: ks[0].into(), top_p: ps[0].into(), ..f };
        let f = Filters {
            top_k: if matches!(f.top_k, PerRow::Each(_)) { all.top_k } else { f.top_k },
            top_p: if matches!(f.top_p, PerRow::Each(_)) { all.top_p } else { f.top_p },
            ..f
        };
        let want = reference::sampling::filtered(Precision::Exact, rows(&p, 24), &f).unwrap();
        let each: Vec<RngState> = (0..batch as u64).map(|b| RngState { seed: 77, offset: b }).collect();
        for rng in [PerRow::One(RngState { seed: 1, offset: 2 }), PerRow::Each(&each[..])] {
            for from_logits in [false, true] {
                if name == "all" && !from_logits {
                    continue; // No operator takes all filters on probabilities.
                }
                // One row, read by every row of the batch.
                let x = if from_logits { &logits } else { &p };
                let x = TensorRef::strided(x, &[batch, 24], &[0, 1]).unwrap();
                let tokens = tokens(batch, |out| {
                    let draw = Draw::new(rng, out);
                    match (from_logits, name) {
                        (true, _) => sampling::sample(&exec, x, f, draw),
                        (_, "none") => sampling::sample_from_probs(&exec, x, draw),
                        (_, "k") => sampling::top_k_sample(&exec, x, f.top_k, draw),
                        (_, "p") => sampling::top_p_sample(&exec, x, f.top_p, draw),
                        (_, "min_p") => sampling::min_p_sample(&exec, x, f.min_p, draw),
                        _ => sampling::top_k_top_p_sample(&exec, x, f.top_k, f.top_p, f.order, draw),
                    }
                });
                assert_distributed(&format!("{name} {from_logits}"), tokens.into_iter(), &want);
            }
        }
    }
}

#[test]
fn tokens_do_not_depend_on_threads_nor_on_the_batch() {
    let mut rng = Rng::new(8);
    let (batch, vocab) = (9, 20_000);
    let x = rng.tensor(DType::F32, &[batch, vocab]);
    let states = states(batch, 4);
    let f = Filters { top_k: 300.into(), top_p: 0.9.into(), temperature: 0.8.into(), ..Filters::default() };
    for level in fir::exec::Level::available() {
        let one = Exec::cpu_with(level, 1).unwrap();
        let alone = tokens(batch, |mut out| {
            for b in 0..batch {
                let x = x.view().slice(0, b..b + 1).unwrap();
                let out = out.reborrow().slice(0, b..b + 1).unwrap();
                sampling::sample(&one, x, f, Draw::new(&states[b..=b], out)).unwrap();
            }
            Ok(())
        });
        let mut bits: Option<Vec<f32>> = None;
        for threads in [1, 2, 3, 8] {
            let exec = Exec::cpu_with(level, threads).unwrap();
            let tokens = tokens(batch, |out| sampling::sample(&exec, x.view(), f, Draw::new(&states[..], out)));
            assert_eq!(tokens, alone, "{level} {threads}");
            let mut out = Tensor::zeros(DType::F32, &[batch, vocab]).unwrap();
            sampling::softmax(&exec, x.view(), 0.7.into(), out.view_mut()).unwrap();
            let out = out.as_slice::<f32>().unwrap().to_vec();
            assert!(*bits.get_or_insert_with(|| out.clone()) == out, "{level} {threads}");
        }
        // With one state for all, row 0 of a batch is as a batch of one.
        let rng = PerRow::One(states[0]);
        let all = tokens(batch, |out| sampling::sample(&one, x.view(), f, Draw::new(rng, out)));
        assert_eq!(all[0], alone[0]);
        assert!(all[1..].iter().any(|t| *t != all[0]));
    }
}

/// The elements of `out` that are not 0 are those that pass the filters.
#[track_caller]
fn assert_same_set(what: &str, out: &Tensor, x: TensorRef<'_>, filters: &Filters<'_>) {
    let want = reference::sampling::filtered(Precision::Exact, x, filters).unwrap();
    let got = out.as_slice::<f32>().unwrap();
    let wrong: Vec<usize> = (0..got.len()).filter(|&i| (got[i] > 0.0) != (want[i] > 0.0)).collect();
    assert!(wrong.is_empty(), "{what}: {} elements, first {}", wrong.len(), wrong[0]);
}

#[test]
fn large_and_flat_rows_keep_the_right_sets() {
    // Searches over rows far larger than their blocks, where most of the row stays in the bracket.
    let mut rng = Rng::new(9);
    let vocab = 40_000;
    let flat: Vec<f32> = (0..vocab).map(|_| 1.0 + rng.uniform()).collect();
    let equal = vec![0.5f32; vocab];
    let tiny: Vec<f32> = (0..vocab).map(|_| f32::from_bits(1 + rng.below(100_000) as u32)).collect();
    let wide: Vec<f32> = (0..vocab).map(|_| 2f32.powf(-100.0 * rng.uniform())).collect();
    let mut peak = vec![1e-7f32; vocab];
    peak[vocab - 1] = 0.9;
    let sparse: Vec<f32> = (0..vocab).map(|i| if i % 97 == 5 { rng.uniform().powi(9) } else { 0.0 }).collect();
    let steps: Vec<f32> = (0..vocab).map(|i| [1.0, 1e-3, 1e-6][i * i % 7 % 3]).collect();
    let signed: Vec<f32> = (0..vocab).map(|_| rng.normal().powi(5)).collect();
    every_exec(|exec| {
        for (name, x) in [
            ("flat", &flat),
            ("equal", &equal),
            ("tiny", &tiny),
            ("wide", &wide),
            ("peak", &peak),
            ("sparse", &sparse),
            ("steps", &steps),
            ("signed", &signed),
        ] {
            let mut out = Tensor::zeros(DType::F32, &[1, vocab]).unwrap();
            for k in [1, 50, 3000, 30_000, 39_999] {
                sampling::top_k_renorm(exec, rows(x, vocab), k.into(), out.view_mut()).unwrap();
                let f = Filters { top_k: k.into(), ..Filters::default() };
                assert_same_set(&format!("{exec:?} {name} k {k}"), &out, rows(x, vocab), &f);
            }
            for p in [0.001, 0.3, 0.9, 0.9999] {
                sampling::top_p_renorm(exec, rows(x, vocab), p.into(), out.view_mut()).unwrap();
                let f = Filters { top_p: p.into(), ..Filters::default() };
                assert_same_set(&format!("{exec:?} {name} p {p}"), &out, rows(x, vocab), &f);
            }
        }
    });
}

#[test]
fn many_long_rows_keep_the_right_sets() {
    // So long and so many that a GPU of 132 multiprocessors cannot hold them all, and lists what is near a cutoff.
    const KINDS: usize = 6;
    let (batch, vocab) = (55, 66_000);
    let mut rng = Rng::new(10);
    let mut kinds = vec![0f32; KINDS * vocab];
    let mut logits = vec![0f32; KINDS * vocab];
    for (kind, (row, logit)) in kinds.chunks_mut(vocab).zip(logits.chunks_mut(vocab)).enumerate() {
        for i in 0..vocab {
            let z = rng.normal();
            let tall = if rng.below(640) == 0 { 8.0 + 4.0 * rng.normal() } else { 0.0 };
            // Like a language model's, flat, one far above the rest, over all exponents, few, equal.
            (row[i], logit[i]) = match kind {
                0 => ((z + tall - 20.0).exp(), z + tall),
                1 => (z.exp(), -20.0 - z),
                2 => (if i == 40_000 { 1.0 } else { (-60.0 + z).exp() }, 100.0 + 0.01 * z),
                3 => (2f32.powf(-120.0 * rng.uniform()), z * z * z),
                4 => (if i % 997 == 3 { 1.0 + z.abs() } else { 0.0 }, if i % 997 == 3 { z } else { f32::NEG_INFINITY }),
                _ => (0.5, (z * 3.0).round()),
            };
        }
    }
    let repeat = |x: &[f32]| x.iter().copied().cycle().take(batch * vocab).collect::<Vec<f32>>();
    let (x, logits) = (repeat(&kinds), repeat(&logits));
    let first = |x: &[f32]| Tensor::from_slice(&x[..KINDS * vocab], &[KINDS, vocab]).unwrap();
    // In the middle of a step of the sum, which is far from rounding even where all are small.
    let middle = |row: &[f32]| {
        let mut sorted: Vec<f64> = row.iter().map(|&x| f64::from(x)).collect();
        sorted.sort_by(|a, b| b.total_cmp(a));
        let (total, mut sum) = (sorted.iter().sum::<f64>(), 0.0);
        let step = sorted.iter().find(|&&x| {
            (sum + x >= 0.9 * total) || {
                sum += x;
                false
            }
        });
        ((sum + step.unwrap() / 2.0) / total) as f32
    };
    let ps: Vec<f32> = kinds.chunks(vocab).map(middle).collect();
    let ps = [(); 10].map(|()| &ps[..]).concat();
    let states = states(batch, 31);
    let none = Filters::default();
    every_exec(|exec| {
        let what = |name: &str| format!("{exec:?} {name}");
        let mut out = Tensor::zeros(DType::F32, &[batch, vocab]).unwrap();
        for f in [
            Filters { top_k: 50.into(), ..none },
            Filters { top_k: 3000.into(), ..none },
            Filters { top_p: (&ps[..KINDS]).into(), ..none },
        ] {
            if f.top_p == none.top_p {
                sampling::top_k_renorm(exec, rows(&x, vocab), f.top_k, out.view_mut()).unwrap();
            } else {
                sampling::top_p_renorm(exec, rows(&x, vocab), (&ps[..batch]).into(), out.view_mut()).unwrap();
            }
            assert_same_set(&what("renorm"), &first(out.as_slice().unwrap()), rows(&kinds, vocab), &f);
        }
        sampling::top_k_mask_logits(exec, rows(&logits, vocab), 50.into(), out.view_mut()).unwrap();
        let want = reference::sampling::top_k_mask_logits(rows(&logits[..KINDS * vocab], vocab), 50.into()).unwrap();
        assert!(reference::values(first(out.as_slice().unwrap()).view()).unwrap() == want, "{}", what("mask"));
        for (name, f) in [
            ("k", Filters { top_k: 50.into(), ..none }),
            ("p", Filters { top_p: (&ps[..KINDS]).into(), ..none }),
            ("min_p", Filters { min_p: 0.1.into(), ..none }),
            ("low min_p", Filters { min_p: 0.003.into(), ..none }),
            ("joint", Filters { top_k: 50.into(), top_p: (&ps[..KINDS]).into(), order: FilterOrder::Joint, ..none }),
        ] {
            let tokens = tokens(batch, |out| {
                let (x, draw, top_p) = (rows(&x, vocab), Draw::new(&states[..], out), (&ps[..batch]).into());
                match name {
                    "k" => sampling::top_k_sample(exec, x, f.top_k, draw),
                    "p" => sampling::top_p_sample(exec, x, top_p, draw),
                    "joint" => sampling::top_k_top_p_sample(exec, x, f.top_k, top_p, f.order, draw),
                    _ => sampling::min_p_sample(exec, x, f.min_p, draw),
                }
            });
            let want = reference::sampling::filtered(Precision::Exact, rows(&kinds, vocab), &f).unwrap();
            for (b, &token) in tokens.iter().enumerate() {
                let dist = &want[b % KINDS * vocab..][..vocab];
                assert_drawn(&what(&format!("{name} {b}")), dist, PerRow::Each(&states[..]).uniform(b, 0), token);
            }
        }
    });
}

#[test]
fn rows_that_are_no_distribution_are_invalid() {
    let (inf, nan) = (f32::INFINITY, f32::NAN);
    every_exec(|exec| {
        for vocab in [4, 16, 40] {
            let mut x = vec![1.0f32; 7 * vocab];
            x[vocab - 1] = nan;
            x[vocab..2 * vocab].fill(0.0);
            x[2 * vocab..3 * vocab].fill(-1.0);
            x[3 * vocab + 1] = inf;
            x[4 * vocab..5 * vocab].fill(nan);
            x[5 * vocab..6 * vocab].fill(-3.0);
            x[5 * vocab + 2] = 1e-40;
            let (p, k) = (PerRow::One(0.5), PerRow::One(2));
            for op in 0..5 {
                let (tokens, valid) = drawn(7, |out, valid| {
                    let draw = Draw { valid: Some(valid), ..Draw::new(RngState::default(), out) };
                    let x = rows(&x, vocab);
                    match op {
                        0 => sampling::sample_from_probs(exec, x, draw),
                        1 => sampling::top_k_sample(exec, x, k, draw),
                        2 => sampling::top_p_sample(exec, x, p, draw),
                        3 => sampling::min_p_sample(exec, x, p, draw),
                        _ => sampling::top_k_top_p_sample(exec, x, k, p, FilterOrder::Joint, draw),
                    }
                });
                assert_eq!(valid, [false, false, false, false, false, true, true], "{exec:?} {vocab} {op}");
                assert_eq!(tokens[..6], [0, 0, 0, 0, 0, 2], "{exec:?} {vocab} {op}");
            }
            let mut out = Tensor::zeros(DType::F32, &[7, vocab]).unwrap();
            for op in 0..2 {
                match op {
                    0 => sampling::top_k_renorm(exec, rows(&x, vocab), k, out.view_mut()).unwrap(),
                    _ => sampling::top_p_renorm(exec, rows(&x, vocab), p, out.view_mut()).unwrap(),
                }
                let out = out.as_slice::<f32>().unwrap();
                assert!(out[..5 * vocab].iter().all(|x| x.is_nan()), "{exec:?} {vocab}");
                assert_eq!(out[5 * vocab + 2], 1.0);
                assert!(out[5 * vocab..].iter().all(|x| !x.is_nan()));
            }
        }
    });
}

#[test]
fn logits_of_infinities_and_nan_are_defined() {
    let (inf, nan) = (f32::INFINITY, f32::NAN);
    every_exec(|exec| {
        for vocab in [4, 16, 40] {
            let mut x = vec![0.0f32; 5 * vocab];
            x[..vocab].fill(-inf);
            x[vocab + 1] = nan;
            x[2 * vocab + 3] = inf;
            x[3 * vocab..4 * vocab].fill(-inf);
            x[3 * vocab + 2] = -1e30;
            x[4 * vocab..].fill(nan);
            for temperature in [0.0, 1.0, 1e-38] {
                for f in filter_cases(&[0.5; 5], &[1, 2, 3, 4, 5]) {
                    let f = Filters { temperature: temperature.into(), ..f.1 };
                    let (tokens, valid) = drawn(5, |out, valid| {
                        let draw = Draw { valid: Some(valid), ..Draw::new(RngState::default(), out) };
                        sampling::sample(exec, rows(&x, vocab), f, draw)
                    });
                    assert_eq!(valid, [false, false, true, true, false], "{exec:?} {vocab} {temperature}");
                    assert_eq!(tokens, [0, 0, 3, 2, 0], "{exec:?} {vocab} {temperature}");
                }
            }
            let mut out = Tensor::zeros(DType::F32, &[5, vocab]).unwrap();
            sampling::top_k_mask_logits(exec, rows(&x, vocab), 1.into(), out.view_mut()).unwrap();
            let out = out.as_slice::<f32>().unwrap();
            assert!(out[..vocab].iter().all(|x| *x == -inf));
            assert!(out[vocab + 1].is_nan() && out[vocab] == 0.0 && out[vocab + 2] == 0.0);
            assert_eq!((out[2 * vocab + 3], out[2 * vocab]), (inf, -inf));
        }
        // Two infinities share the mass.
        let x = [inf, 3.0, inf, -inf];
        let wide = TensorRef::strided(&x, &[400, 4], &[0, 1]).unwrap();
        let tokens = tokens(400, |out| {
            sampling::sample_from_logits(exec, wide, 1.0.into(), Draw::new(RngState::default(), out))
        });
        let firsts = tokens.iter().filter(|t| **t == 0).count();
        assert!(tokens.iter().all(|t| [0, 2].contains(t)) && (150..250).contains(&firsts), "{firsts}");
    });
}

#[test]
fn indices_strides_and_wide_ids_are_honoured() {
    every_exec(|exec| {
        let (rows, vocab, pitch) = (3, 21, 32);
        let mut x = vec![f32::NAN; rows * pitch];
        for r in 0..rows {
            x[r * pitch..][..vocab].fill(0.0);
            x[r * pitch + 5 * r + 1] = 1.0;
        }
        let x = TensorRef::strided(&x, &[rows, vocab], &[pitch, 1]).unwrap();
        let (narrow, wide) = ([2i32, 0, 0, 1, 2], [2i64, 0, 0, 1, 2]);
        for indices in [TensorRef::new(&narrow, &[5]).unwrap(), TensorRef::new(&wide, &[5]).unwrap()] {
            let mut out = [-1i64; 10];
            let out_view = TensorMut::strided(&mut out, &[5], &[2]).unwrap();
            let draw = Draw { indices: Some(indices), ..Draw::new(RngState::default(), out_view) };
            sampling::top_k_sample(exec, x, 4.into(), draw).unwrap();
            assert_eq!(out, [11, -1, 1, -1, 1, -1, 6, -1, 11, -1]);
        }
        // Parameters belong to the rows of the output.
        let y = [0.4f32, 0.6, 0.5, 0.5];
        let (mut out, indices) = ([-1i32; 4], [0i32, 0, 0, 1]);
        let each: Vec<RngState> = (0..4).map(|seed| RngState { seed, offset: 0 }).collect();
        let draw = Draw {
            indices: Some(TensorRef::new(&indices, &[4]).unwrap()),
            ..Draw::new(&each[..], TensorMut::new(&mut out, &[4]).unwrap())
        };
        let ks = [1, 1, 1, 2];
        sampling::top_k_sample(exec, self::rows(&y, 2), (&ks[..]).into(), draw).unwrap();
        assert_eq!(out[..3], [1, 1, 1]);
        assert_eq!(out[3], i32::from(each[3].uniform(0, 0) >= 0.5));
    });
}

#[test]
fn empty_batches_and_vocabularies_are_no_error() {
    every_exec(|exec| {
        let (mut none, mut two): ([i32; 0], _) = ([], [5i32, 5]);
        let empty = TensorRef::new::<f32>(&[], &[0, 8]).unwrap();
        let draw = Draw::new(RngState::default(), TensorMut::new(&mut none, &[0]).unwrap());
        sampling::top_p_sample(exec, empty, 0.5.into(), draw).unwrap();
        let empty = TensorRef::new::<f32>(&[], &[2, 0]).unwrap();
        for logits in [false, true] {
            let draw = Draw::new(RngState::default(), TensorMut::new(&mut two, &[2]).unwrap());
            if logits {
                sampling::sample_from_logits(exec, empty, 1.0.into(), draw).unwrap();
            } else {
                sampling::sample_from_probs(exec, empty, draw).unwrap();
            }
            assert_eq!(two, [0, 0]);
            two = [5, 5];
        }
        let mut out = Tensor::zeros(DType::F32, &[2, 0]).unwrap();
        sampling::softmax(exec, empty, 1.0.into(), out.view_mut()).unwrap();
        sampling::top_k_renorm(exec, empty, 3.into(), out.view_mut()).unwrap();
        sampling::top_k_mask_logits(exec, empty, 3.into(), out.view_mut()).unwrap();
    });
}

#[test]
fn bad_arguments_are_named_with_row_and_value() {
    let exec = &Exec::cpu().unwrap();
    let x = [0.25f32; 8];
    let x = rows(&x, 4);
    let rng = PerRow::One(RngState::default());
    let fail = |call: &dyn Fn(Draw<'_>) -> fir::Result<()>| {
        let mut out = [0i32; 2];
        call(Draw::new(rng, TensorMut::new(&mut out, &[2]).unwrap())).unwrap_err().to_string()
    };
    for (got, want) in [
        (
            fail(&|d| sampling::top_p_sample(exec, x, PerRow::Each(&[0.5, f32::NAN]), d)),
            "top_p_sample: `top_p` is NaN for row 1, expected a number in (0, 1]",
        ),
        (
            fail(&|d| sampling::top_p_sample(exec, x, 0.0.into(), d)),
            "top_p_sample: `top_p` is 0.0, expected a number in (0, 1]",
        ),
        (
            fail(&|d| sampling::top_k_sample(exec, x, PerRow::Each(&[0, 1]), d)),
            "top_k_sample: `top_k` is 0 for row 0, expected 1 or more",
        ),
        (
            fail(&|d| sampling::top_k_sample(exec, x, PerRow::Each(&[1; 3]), d)),
            "top_k_sample: `top_k` is 3 values, expected 2, one per row",
        ),
        (
            fail(&|d| sampling::min_p_sample(exec, x, 1.5.into(), d)),
            "min_p_sample: `min_p` is 1.5, expected a number in [0, 1]",
        ),
        (
            fail(&|d| sampling::sample_from_logits(exec, x, PerRow::Each(&[1.0, -1.0]), d)),
            "sample_from_logits: `temperature` is -1.0 for row 1, expected a finite number, 0 or more",
        ),
        (
            fail(&|d| sampling::sample_from_probs(exec, x, Draw { rng: PerRow::Each(&[]), ..d })),
            "sample_from_probs: `rng` is 0 values, expected 2, one per row",
        ),
        (
            fail(&|d| {
                let indices = TensorRef::new(&[0i32, 2], &[2]).unwrap();
                sampling::sample_from_probs(exec, x, Draw { indices: Some(indices), ..d })
            }),
            "sample_from_probs: `indices` is 2 at 1, expected 0 or more and less than 2",
        ),
        (
            fail(&|d| sampling::sample_from_probs(exec, x.slice(0, 0..1).unwrap(), d)),
            "sample_from_probs: `probs` has batch=1, but `out` bound batch=2",
        ),
        (
            fail(&|d| sampling::sample_from_probs(exec, x.transpose(0, 1).unwrap().slice(0, 0..2).unwrap(), d)),
            "sample_from_probs: layout of `probs`: stride 4 of the last axis, expected 1",
        ),
    ] {
        assert_eq!(got, want);
    }
    let mut wrong = [0f32; 2];
    let draw = Draw::new(rng, TensorMut::new(&mut wrong, &[2]).unwrap());
    let e = sampling::sample_from_probs(exec, x, draw).unwrap_err();
    assert_eq!(e.to_string(), "sample_from_probs: `out` is f32, expected i32 or i64");
}
