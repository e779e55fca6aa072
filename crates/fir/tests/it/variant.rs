use std::collections::HashSet;
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};

use fir::testing::{Case, Rng, exact_variants, init_error, logit_error, output_error, scale_error};
use fir::variant::*;
use fir::{Tensor, variant::eval};
use proptest::prelude::*;

const ROW: RowCtx = RowCtx { batch: 0, q_idx: 0, q_len: 1, kv_len: 1, qo_head: 0, kv_head: 0 };

fn smooth() -> Llama31 {
    Llama31 { low_freq_factor: 1.0, high_freq_factor: 4.0, old_context_len: 8192.0 }
}

/// Every variant of the library, and two that are composed.
fn library() -> Vec<Variant> {
    vec![
        standard(),
        causal(),
        sliding_window(),
        soft_cap(),
        alibi(),
        rope_llama(1e4, 1.0, false).unwrap(),
        rope_llama31(5e5, 8.0, true, smooth()).unwrap(),
        sink(),
        custom_mask(),
        tree_mask(),
        sigmoid(),
        multi_item(),
        causal().and(soft_cap()).unwrap(),
        alibi().and(soft_cap()).unwrap().and(sliding_window()).unwrap().and(sink()).unwrap(),
    ]
}

/// Calls `check(row, kv_pos)` for every pair of a request.
fn every_pair(batch: i32, q_len: i32, kv_len: i32, heads: i32, mut check: impl FnMut(&RowCtx, i32)) {
    for qo_head in 0..heads {
        for q_idx in 0..q_len {
            let row = RowCtx { batch, q_idx, q_len, kv_len, qo_head, kv_head: qo_head / 2 };
            (0..kv_len).for_each(|k| check(&row, k));
        }
    }
}

#[test]
fn masks_of_the_library_are_what_they_say() {
    let empty = Params::new();
    for (q_len, kv_len) in [(1, 9), (5, 9), (9, 9), (9, 5)] {
        let (c, s) = (causal(), standard());
        let (bc, bs) = (c.bind(&empty, 2, 1).unwrap(), s.bind(&empty, 2, 1).unwrap());
        every_pair(0, q_len, kv_len, 1, |row, k| {
            let q = kv_len - q_len + row.q_idx;
            assert_eq!(row.q_pos(), q);
            assert_eq!(eval::visible(&c, &bc, row, k), k <= q);
            assert!(eval::visible(&s, &bs, row, k));
        });
        for left in [-1, i32::MIN, 0, 1, 3, 8, i32::MAX] {
            let (v, params) = (sliding_window(), Params::new().i32("window_left", left));
            let bound = v.bind(&params, 2, 1).unwrap();
            every_pair(0, q_len, kv_len, 1, |row, k| {
                let want = left < 0 || i64::from(k) + i64::from(left) >= i64::from(row.q_pos());
                assert_eq!(eval::visible(&v, &bound, row, k), want, "{left} {row:?} {k}");
            });
        }
    }
}

/// Packs truth values of each request into whole bytes, lowest bit first.
fn pack(requests: &[Vec<bool>]) -> (Vec<u8>, Vec<i32>) {
    let (mut bytes, mut indptr) = (Vec::new(), vec![0]);
    for bits in requests {
        for eight in bits.chunks(8) {
            bytes.push(eight.iter().enumerate().map(|(i, &b)| u8::from(b) << i).sum());
        }
        indptr.push(bytes.len() as i32);
    }
    (bytes, indptr)
}

#[test]
fn bit_masks_are_read_from_the_request_of_the_row() {
    let mut rng = Rng::new(1);
    let lens = [(3, 7), (1, 1), (5, 13)];
    for tree in [false, true] {
        let columns = |(q, kv): (i32, i32)| if tree { q } else { kv };
        let mut bits = |l: (i32, i32)| (0..l.0 * columns(l)).map(|_| rng.below(2) == 1).collect::<Vec<_>>();
        let requests: Vec<_> = lens.iter().map(|&l| bits(l)).collect();
        let (bytes, indptr) = pack(&requests);
        let v = if tree { tree_mask() } else { custom_mask() };
        let params = Params::new().bits("mask", &bytes, &indptr);
        let bound = v.bind(&params, 1, 3).unwrap();
        for (b, &(q_len, kv_len)) in lens.iter().enumerate() {
            every_pair(b as i32, q_len, kv_len, 1, |row, k| {
                let col = if tree { k - (kv_len - q_len) } else { k };
                let want = col < 0 || requests[b][(row.q_idx * columns((q_len, kv_len)) + col) as usize];
                assert_eq!(eval::visible(&v, &bound, row, k), want, "{tree} {row:?} {k}");
            });
            // A row past the segment sees nothing of it, whatever the next request holds.
            let row = RowCtx { batch: b as i32, q_idx: 1000, q_len, kv_len, ..ROW };
            assert!(!eval::visible(&custom_mask(), &bound, &row, 0));
        }
    }
}

#[test]
fn multi_item_hides_the_items_from_each_other() {
    // Two requests; a delimiter before each item and one at the end, as scoring prompts have them.
    let requests: [(i32, &[usize]); 2] = [(4, &[2, 3, 1]), (6, &[1, 4])];
    let len = 12;
    let (mut prefix, mut flat, mut groups) = (Vec::new(), Vec::new(), Vec::new());
    for (p, items) in requests {
        prefix.push(p);
        let mut pos = vec![0];
        for &n in items {
            pos.extend(1..=n as i32);
            pos.push(0);
        }
        // Group of every token: the prefix is 0, each delimiter starts another.
        let mut group = vec![0; p as usize];
        let mut g = 0;
        for &t in &pos {
            g += i32::from(t == 0);
            group.push(g);
        }
        groups.push(group);
        pos.resize(len, 0);
        flat.extend(pos);
    }
    let v = multi_item();
    let params = Params::new()
        .i32_tensor("prefix_len", &prefix)
        .i32_tensor("token_pos_in_items", &flat)
        .i32("token_pos_in_items_len", len as i32);
    let bound = v.bind(&params, 1, 2).unwrap();
    for (b, group) in groups.iter().enumerate() {
        let kv_len = group.len() as i32;
        for q_len in [kv_len, kv_len - prefix[b], 2] {
            every_pair(b as i32, q_len, kv_len, 1, |row, k| {
                let q = row.q_pos();
                let delimiter = |i: i32| i >= prefix[b] && flat[b * len + (i - prefix[b]) as usize] == 0;
                let same_item = group[q as usize] == group[k as usize] && !delimiter(q) && !delimiter(k);
                let want = k <= q && (k < prefix[b] || same_item);
                assert_eq!(eval::visible(&v, &bound, row, k), want, "request {b}: {q} {k}");
            });
        }
    }
}

#[test]
fn logits_of_the_library_are_what_they_say() {
    let slopes = [0.5, 0.25, -0.125, 0.0];
    let row = RowCtx { q_idx: 2, q_len: 3, kv_len: 9, qo_head: 1, ..ROW };
    for x in [-50.0, -1.0, 0.0, 0.25, 7.0] {
        for cap in [30.0, 0.5, 0.0] {
            let v = soft_cap();
            let params = Params::new().f32("soft_cap", cap);
            let c = f64::from(cap);
            let want = if c == 0.0 { x } else { c * (x / c).tanh() };
            assert_eq!(eval::logit(&v, &v.bind(&params, 1, 1).unwrap(), &row, 3, x), want);
        }
        let (v, params) = (alibi(), Params::new().f32_tensor("alibi_slopes", &slopes));
        let bound = v.bind(&params, 4, 1).unwrap();
        assert_eq!(eval::logit(&v, &bound, &row, 3, x), x + 0.25 * f64::from(3 - 8));
        let (v, params) = (sigmoid(), Params::new().f32("bias", -0.5));
        let bound = v.bind(&params, 4, 1).unwrap();
        assert_eq!(eval::logit(&v, &bound, &row, 3, x), 1.0 / (1.0 + (0.5 - x).exp()));
        assert_eq!(v.normalize(), Normalize::None);
    }
    let (v, params) = (sink(), Params::new().f32_tensor("sink", &slopes));
    assert_eq!(eval::init(&v, &v.bind(&params, 4, 1).unwrap(), &row), Some(0.25));
    assert_eq!(eval::init(&causal(), &causal().bind(&Params::new(), 4, 1).unwrap(), &row), None);
}

#[test]
fn rotations_are_those_of_llama() {
    let dim = 8;
    let x: Vec<f64> = (0..dim).map(|i| f64::from(i) + 1.0).collect();
    for interleave in [false, true] {
        for smoothed in [false, true] {
            let v = if smoothed {
                rope_llama31(5e5, 8.0, interleave, smooth()).unwrap()
            } else {
                rope_llama(1e4, 2.0, interleave).unwrap()
            };
            let bound = v.bind(&Params::new(), 1, 1).unwrap();
            for pos in [0, 1, 77, 100_000] {
                for side in [Side::Query, Side::Key, Side::Value] {
                    let mut got = x.clone();
                    eval::transform(&v, &bound, side, &ROW, pos, &mut got);
                    let mut want = x.clone();
                    for i in 0..if side == Side::Value { 0 } else { 4usize } {
                        let f = if smoothed {
                            let f = 5e5f64.powf(-(i as f64) / 4.0);
                            // Wave lengths against those of the old context, as the model's authors write it.
                            let wave = 2.0 * std::f64::consts::PI / f;
                            if wave < 8192.0 / 4.0 {
                                f
                            } else if wave > 8192.0 {
                                f / 8.0
                            } else {
                                let s = (8192.0 / wave - 1.0) / 3.0;
                                (1.0 - s) * f / 8.0 + s * f
                            }
                        } else {
                            1e4f64.powf(-(i as f64) / 4.0) / 2.0
                        };
                        let (sin, cos) = (f64::from(pos) * f).sin_cos();
                        let (a, b) = if interleave { (2 * i, 2 * i + 1) } else { (i, i + 4) };
                        want[a] = x[a] * cos - x[b] * sin;
                        want[b] = x[b] * cos + x[a] * sin;
                    }
                    for (g, w) in got.iter().zip(&want) {
                        assert!((g - w).abs() < 1e-9 * (1.0 + f64::from(pos)), "{pos}: {got:?} {want:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn composed_variants_do_both() {
    let v = alibi().and(soft_cap()).unwrap().and(causal()).unwrap().and(sliding_window()).unwrap();
    assert_eq!(v.name(), "AlibiSoftCapCausalSlidingWindow");
    assert_eq!(v.named("Mine").unwrap().name(), "Mine");
    let slopes = [0.5];
    let params = Params::new().f32_tensor("alibi_slopes", &slopes).f32("soft_cap", 20.0).i32("window_left", 2);
    let bound = v.bind(&params, 1, 1).unwrap();
    every_pair(0, 6, 8, 1, |row, k| {
        let q = row.q_pos();
        assert_eq!(eval::visible(&v, &bound, row, k), k <= q && k + 2 >= q);
        let alibi = 3.0 + 0.5 * f64::from(k - q);
        assert_eq!(eval::logit(&v, &bound, row, k, 3.0), 20.0 * (alibi / 20.0).tanh());
    });
    // A parameter of one name and type is shared; of another type it is refused.
    let cap = |ty: &str| {
        variant("Other", |p| match ty {
            "f32" => logits(score() * p.f32("soft_cap")),
            _ => mask(kv_pos().le(p.i32("soft_cap"))),
        })
        .unwrap()
    };
    assert_eq!(soft_cap().and(cap("f32")).unwrap().params().len(), 1);
    refused(
        soft_cap().and(cap("i32")),
        "variant `SoftCapOther`: parameter `soft_cap`: got i32 in `Other`, expected f32, as in `SoftCap`",
    );
    refused(sink().and(sink()), "variant `SinkSink`: hook `init`: got two, expected at most one");
    refused(
        sigmoid().and(sink()),
        "variant `SigmoidSink`: hook `init`: got an expression, expected none, as there is no softmax",
    );
    let rope = || rope_llama(1e4, 1.0, false).unwrap();
    refused(rope().and(rope()), "variant `RopeLlamaRopeLlama`: hook `query`: got 2 rotations, expected at most one");
}

#[track_caller]
fn refused<T: std::fmt::Debug>(got: fir::Result<T>, message: &str) {
    assert_eq!(got.expect_err("a refusal").to_string(), message);
}

#[test]
fn ill_formed_variants_are_refused() {
    refused(
        variant("V", |_| mask(score().gt(0.0))),
        "variant `V`: hook `mask`: got score(), expected batch(), q_idx(), q_len(), kv_len(), kv_pos(), qo_head(), \
         kv_head(), q_pos()",
    );
    refused(
        variant("V", |_| init(kv_pos().to_f32())),
        "variant `V`: hook `init`: got kv_pos(), expected batch(), q_idx(), q_len(), kv_len(), qo_head(), kv_head(), \
         q_pos()",
    );
    for bad in [
        variant("V", |_| logits(o())),
        variant("V", |_| output(o() + score())),
        variant("V", |_| output(o() * kv_pos().to_f32())),
        variant("V", |_| query(scale(kv_pos().to_f32()))),
        variant("V", |_| key(scale(q_pos().to_f32()))),
        variant("V", |p| key(scale(p.per_head("x")))),
        variant("V", |_| value(scale(m()))),
    ] {
        assert!(bad.unwrap_err().to_string().starts_with("variant `V`: hook `"));
    }
    refused(
        variant("V", |_| value(rope(Rope::default()))),
        "variant `V`: hook `value`: got 1 rotations, expected none",
    );
    refused(
        variant("V", |_| key(rope(Rope { theta: f32::NAN, ..Rope::default() }))),
        "variant `V`: hook `key`: rope's theta: got NaN, expected a finite number above 0",
    );
    assert!(rope_llama(0.0, 1.0, false).is_err() && rope_llama(1e4, -1.0, false).is_err());
    assert!(variant("V", |_| key(rope(Rope { rotary_dim: Some(7), ..Rope::default() }))).is_err());
    assert!(rope_llama31(1e4, 8.0, false, Llama31 { low_freq_factor: 4.0, ..smooth() }).is_err());
    refused(
        variant("V", |_| output(o() * d()).normalize_none()),
        "variant `V`: hook `output`: got d(), expected o() alone, as there is no softmax",
    );
    refused(
        variant("V", |_| init(0.0).normalize_none()),
        "variant `V`: hook `init`: got an expression, expected none, as there is no softmax",
    );
    refused(
        variant("V", |_| logits(score()).logits(score())),
        "variant `V`: hook `logits`: got set twice, expected once",
    );
    refused(
        variant("V", |p| logits(p.f32("x") + p.i32("x").to_f32())),
        "variant `V`: parameter `x`: got declared twice, expected once",
    );
    refused(
        variant("V", |_| logits(score() + f32::NAN)),
        "variant `V`: hook `logits`: got the constant NaN, expected a number",
    );
    let mut stolen = None;
    variant("Other", |p| logits(stolen.insert(p.f32("x")).clone())).unwrap();
    refused(
        variant("V", |_| logits(stolen.unwrap())),
        "variant `V`: parameter `x`: got an undeclared f32, expected one of its own",
    );
    for name in ["", "lower", "Two words", "A__b", "Ü", "9"] {
        assert!(variant(name, |_| plain()).is_err(), "{name}");
    }
    for name in ["", "float", "_x", "a b", "x-y", "1x"] {
        assert!(variant("V", |p| logits(p.f32(name))).is_err(), "{name}");
    }
    // Deep and wide expressions are refused or take linear time, and never exhaust the stack.
    let deep = (0..1_000_000).fold(score(), |x, _| x + 1.0);
    refused(
        variant("V", |_| logits(deep)),
        "variant `V`: hook `logits`: got a deeper expression, expected at most 500 operations deep",
    );
    let wide = variant("V", |_| logits((0..400).fold(score(), |x, _| x.clone() + x))).unwrap();
    assert_eq!(eval::logit(&wide, &wide.bind(&Params::new(), 1, 1).unwrap(), &ROW, 0, 1.0), 2f64.powi(400));
}

#[test]
fn bad_parameters_are_refused() {
    let v = variant("V", |p| {
        let (f, i) = (p.f32_tensor("floats").at(q_pos()), p.i32_tensor("ints").at(kv_pos()));
        let hidden = p.bits("bits").at(q_idx(), kv_pos(), kv_len());
        logits(score() * p.f32("x") + f + p.per_head("heads")).mask(i.le(p.i32("n")) & hidden)
    })
    .unwrap();
    let (floats, ints, heads, bytes, indptr) = ([1.0f32], [1i32, 2], [0.5f32, 1.0], [7u8, 0, 1], [0i32, 1, 3]);
    let all = |skip: &str| {
        let mut p = Params::new();
        for name in ["x", "n", "floats", "ints", "heads", "bits"].into_iter().filter(|n| *n != skip) {
            p = match name {
                "x" => p.f32(name, 2.0),
                "n" => p.i32(name, 9),
                "floats" => p.f32_tensor(name, &floats),
                "ints" => p.i32_tensor(name, &ints),
                "heads" => p.f32_tensor(name, &heads),
                _ => p.bits(name, &bytes, &indptr),
            };
        }
        p
    };
    v.bind(&all(""), 2, 2).unwrap();
    let check = |params: Params<'_>, message: &str| {
        refused(v.bind(&params, 2, 2), &format!("variant `V`: parameter {message}"));
    };
    check(all("x"), "`x`: got no value, expected f32");
    check(all("bits"), "`bits`: got no value, expected bits");
    check(all("x").i32("x", 3), "`x`: got i32 3, expected f32");
    check(all("x").f32("x", f32::NAN), "`x`: got f32 NaN, expected a number");
    check(all("n").f32("n", 3.0), "`n`: got f32 3, expected i32");
    check(all("").f32("x", 3.0), "`x`: got two values, expected one");
    check(
        all("").f32("y", 3.0),
        "`y`: got f32 3, expected `floats`: f32 tensor, `ints`: i32 tensor, `bits`: bits, `x`: f32, \
         `heads`: f32 tensor of one value per query head, `n`: i32",
    );
    check(
        all("heads").f32_tensor("heads", &[1.0; 3]),
        "`heads`: got f32 tensor [3], expected f32 tensor [2], one value per query head",
    );
    check(
        all("floats").f32_tensor("floats", &[]),
        "`floats`: got f32 tensor [0], expected contiguous f32 tensor of one axis, not empty",
    );
    check(
        all("ints").f32_tensor("ints", &[1.0]),
        "`ints`: got f32 tensor [1], expected contiguous i32 tensor of one axis, not empty",
    );
    check(
        all("bits").bits("bits", &bytes, &[0, 3]),
        "`bits`: got bits of 3 bytes, indptr [2], expected indptr [3] for a batch of 2",
    );
    check(
        all("bits").bits("bits", &bytes, &[0, 4, 3]),
        "`bits`: got indptr[1] = 4, indptr[2] = 3, expected an indptr that does not decrease",
    );
    check(all("bits").bits("bits", &bytes, &[0, 3, 4]), "`bits`: got indptr[2] = 4, expected at most the 3 bytes");
    check(all("bits").bits("bits", &bytes, &[-1, 3, 3]), "`bits`: got indptr[0] = -1, expected 0 or more");
    // Tensors come as such, too; of one axis, contiguous, of the right type.
    let two = Tensor::from_slice(&[1.0f32, 2.0, 3.0, 4.0], &[2, 2]).unwrap();
    let row = two.view().select(0, 1).unwrap();
    v.bind(&all("heads").tensor("heads", row), 2, 2).unwrap();
    let column = two.view().select(1, 1).unwrap();
    assert!(v.bind(&all("heads").tensor("heads", column), 2, 2).is_err());
    assert!(v.bind(&all("heads").tensor("heads", two.view()), 2, 2).is_err());
    let wrong = Tensor::from_slice(&[1i64, 2], &[2]).unwrap();
    check(
        all("ints").tensor("ints", wrong.view()),
        "`ints`: got i64 tensor [2] with strides [1], expected contiguous i32 tensor of one axis, not empty",
    );
    // Nothing panics on the extremes.
    assert!(v.bind(&all(""), 0, 2).is_err() && v.bind(&all(""), 2, usize::MAX).is_err());
    refused(
        causal().bind(&Params::new().f32("x", 1.0), 1, 1),
        "variant `Causal`: parameter `x`: got f32 1, expected no parameter",
    );
}

#[test]
fn reads_outside_are_clamped_or_false() {
    let v = variant("V", |p| {
        let (row, col, stride) = (p.i32("row"), p.i32("col"), p.i32("stride"));
        let bit = p.bits("bits").at(row.clone(), col, stride);
        logits(p.f32_tensor("x").at(row)).mask(bit)
    })
    .unwrap();
    for (row, value) in [(i32::MIN, 1.0), (-1, 1.0), (0, 1.0), (2, 3.0), (3, 3.0), (i32::MAX, 3.0)] {
        for (col, stride) in [(0, 1), (i32::MIN, i32::MIN), (i32::MAX, i32::MAX), (i32::MAX, i32::MIN), (3, 8)] {
            let params = Params::new()
                .i32("row", row)
                .i32("col", col)
                .i32("stride", stride)
                .f32_tensor("x", &[1.0, 2.0, 3.0])
                .bits("bits", &[0xff, 0xff], &[0, 1]);
            let bound = v.bind(&params, 1, 1).unwrap();
            assert_eq!(eval::logit(&v, &bound, &ROW, 0, 0.0), value);
            let bit = i64::from(row) * i64::from(stride) + i64::from(col);
            assert_eq!(eval::visible(&v, &bound, &ROW, 0), (0..8).contains(&bit), "{row} {col} {stride}");
            assert!(!eval::visible(&v, &bound, &RowCtx { batch: 1, ..ROW }, 0));
            assert!(!eval::visible(&v, &bound, &RowCtx { batch: -1, ..ROW }, 0));
        }
    }
}

#[test]
fn variants_are_equal_when_built_alike() {
    let capped = |name: &str, cap: f32| variant(name, |_| logits(cap * (score() / cap).tanh())).unwrap();
    assert_eq!(capped("A", 30.0), capped("A", 30.0));
    assert_eq!(HashSet::from([capped("A", 30.0), capped("A", 30.0)]).len(), 1);
    let different = [capped("A", 30.0), capped("A", 31.0), capped("B", 30.0), capped("A", -0.0), capped("A", 0.0)];
    assert_eq!(HashSet::from(different).len(), 5);
    let rope = |theta, interleave| rope_llama(theta, 1.0, interleave).unwrap();
    assert_eq!(HashSet::from([rope(1e4, false), rope(1e4, true), rope(2e4, false), rope(1e4, false)]).len(), 3);
    let all = library();
    assert_eq!(HashSet::<Variant>::from_iter(all.iter().cloned()).len(), all.len());
    // What a kernel's key needs.
    fn key<T: Clone + Eq + std::hash::Hash + std::fmt::Debug + Send + Sync>(_: &T) {}
    key(&all[0]);
}

proptest! {
    #[test]
    fn a_seed_builds_one_variant(seed: u64, size in 1usize..60) {
        let build = || Case::random(&mut Rng::new(seed), size).variant;
        prop_assert_eq!(build(), build());
        prop_assert_eq!(cuda_source(&build()), cuda_source(&build()));
    }

    #[test]
    fn and_composes_in_order(seed: u64, size in 1usize..40, score in -8f32..8.0) {
        let rng = &mut Rng::new(seed);
        let (a, cap) = (Case::random(rng, size), soft_cap());
        let both = a.variant.clone().and(cap.clone()).unwrap();
        let params = a.params().f32("soft_cap", 5.0);
        let bound = both.bind(&params, a.heads.len(), a.indptr.len() - 1).unwrap();
        let alone = a.bind();
        let capped = Params::new().f32("soft_cap", 5.0);
        let cap_bound = cap.bind(&capped, 1, 1).unwrap();
        for k in 0..20 {
            let first = eval::logit(&a.variant, &alone, &a.row, k, score.into());
            let want = eval::logit(&cap, &cap_bound, &a.row, k, first);
            let got = eval::logit(&both, &bound, &a.row, k, score.into());
            prop_assert!(got == want || got.is_nan() && want.is_nan());
            let seen = eval::visible(&a.variant, &alone, &a.row, k);
            prop_assert_eq!(eval::visible(&both, &bound, &a.row, k), seen);
        }
    }
}

#[test]
fn cuda_text_of_the_library() {
    for v in library() {
        insta::assert_snapshot!(v.name(), cuda_source(&v));
    }
}

/// One variant, its parameters' values and rows to try.
struct Trial {
    variant: Variant,
    case: Case,
    rows: Vec<(RowCtx, i32, [f32; 4])>,
}

impl Trial {
    fn new(variant: Variant, case: Case, rng: &mut Rng) -> Self {
        let rows = (0..64).map(|_| {
            let q_idx = rng.below(case.row.q_len as usize) as i32;
            let row = RowCtx { q_idx, qo_head: rng.below(case.heads.len()) as i32, ..case.row };
            let numbers = [rng.normal() * 4.0, rng.normal(), rng.normal(), rng.uniform() * 50.0];
            (row, rng.below(case.row.kv_len as usize) as i32, numbers)
        });
        let rows = rows.collect();
        Self { variant, case, rows }
    }

    /// The case's values under the names of the variant's parameters, by type.
    fn params(&self) -> Params<'_> {
        let c = &self.case;
        self.variant.params().fold(Params::new(), |p, (name, ty)| match ty {
            ParamType::F32 => p.f32(name, c.number),
            ParamType::I32 => p.i32(name, c.integer),
            ParamType::F32Tensor => p.f32_tensor(name, &c.numbers),
            ParamType::I32Tensor => p.i32_tensor(name, &c.integers),
            ParamType::PerHead => p.f32_tensor(name, &c.heads),
            ParamType::Bits => p.bits(name, &c.bytes, &c.indptr),
            other => panic!("{other}"),
        })
    }

    /// The statements that read the parameters, and the words they read.
    fn parameters(&self, words: &mut Vec<u32>) -> String {
        let c = &self.case;
        let mut text = String::new();
        for (name, ty) in self.variant.params() {
            let mut array = |values: Vec<u32>| {
                words.push(values.len() as u32);
                words.extend(values);
            };
            let line = match ty {
                ParamType::F32 => {
                    words.push(c.number.to_bits());
                    format!("p.{name} = f32();")
                }
                ParamType::I32 => {
                    words.push(c.integer as u32);
                    format!("p.{name} = i32();")
                }
                ParamType::F32Tensor | ParamType::PerHead => {
                    let values = if ty == ParamType::PerHead { &c.heads } else { &c.numbers };
                    array(values.iter().map(|x| x.to_bits()).collect());
                    format!("p.{name}.data = array<float>(p.{name}.len);")
                }
                ParamType::I32Tensor => {
                    array(c.integers.iter().map(|&x| x as u32).collect());
                    format!("p.{name}.data = array<int>(p.{name}.len);")
                }
                ParamType::Bits => {
                    array(c.bytes.iter().map(|&x| x.into()).collect());
                    array(c.indptr.iter().map(|&x| x as u32).collect());
                    format!(
                        "int n, m; p.{name}.data = bytes(m); p.{name}.len = m; p.{name}.indptr = array<int>(n); p.{name}.batch = n - 1;"
                    )
                }
                other => panic!("{other}"),
            };
            writeln!(text, "  {line}").unwrap();
        }
        text
    }
}

const DRIVER: &str = r"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#define __device__
#define __forceinline__ inline
static float __int_as_float(int x) { float f; memcpy(&f, &x, 4); return f; }
static int i32() { int x; if (fread(&x, 4, 1, stdin) != 1) exit(1); return x; }
static float f32() { return __int_as_float(i32()); }
template <typename T> static T* array(int& n) {
  n = i32();
  T* x = (T*)malloc(4 * n + 4);
  for (int i = 0; i < n; i++) { int w = i32(); memcpy(x + i, &w, 4); }
  return x;
}
static unsigned char* bytes(int& n) {
  n = i32();
  // Exactly as many as there are, so that a memory checker would see a read past them.
  unsigned char* x = (unsigned char*)malloc(n);
  for (int i = 0; i < n; i++) x[i] = (unsigned char)i32();
  return x;
}
static void put(float x) { fwrite(&x, 4, 1, stdout); }
template <typename V> static void rows(const typename V::Params& p) {
  for (int n = i32(); n > 0; n--) {
    int batch = i32(), q_idx = i32(), q_len = i32(), kv_len = i32(), qo_head = i32(), kv_head = i32(), kv_pos = i32();
    float score = f32(), o = f32(), m = f32(), d = f32();
    put(V::logits(p, score, batch, q_idx, q_len, kv_len, kv_pos, qo_head, kv_head));
    put(V::mask(p, batch, q_idx, q_len, kv_len, kv_pos, qo_head, kv_head) ? 1.0f : 0.0f);
    put(V::init(p, batch, q_idx, q_len, kv_len, qo_head, kv_head));
    put(V::output(p, o, m, d, batch, q_idx, q_len, kv_len, qo_head, kv_head));
    put(V::query_scale(p, batch, q_idx, q_len, kv_len, qo_head, kv_head));
    put(V::key_scale(p, batch, kv_len, kv_pos, kv_head));
    put(V::value_scale(p, batch, kv_len, kv_pos, kv_head));
  }
}
";

#[test]
#[expect(clippy::print_stderr, reason = "says what it skips")]
fn cuda_text_means_what_the_reference_says() {
    let Some(compiler) = ["c++", "g++", "clang++"].into_iter().find(|c| {
        let found = Command::new(c).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
        found.is_ok_and(|s| s.success())
    }) else {
        eprintln!("skipped: no C++ compiler (c++, g++, clang++)");
        return;
    };
    let mut trials = Vec::new();
    for (i, v) in library().into_iter().enumerate() {
        let rng = &mut Rng::new(i as u64);
        trials.push(Trial::new(v, Case::random(rng, 1), rng));
    }
    for (i, v) in exact_variants().into_iter().enumerate() {
        let rng = &mut Rng::new(i as u64);
        // Long enough for operands of either sign.
        let mut case = Case::random(rng, 1);
        (case.row.q_len, case.row.kv_len) = (50, 200);
        trials.push(Trial::new(v, case, rng));
    }
    for seed in 0..48 {
        let rng = &mut Rng::new(seed);
        let case = Case::random(rng, 3 + seed as usize);
        trials.push(Trial::new(case.variant.named(&format!("Random{seed}")).unwrap(), case, rng));
    }

    let (mut text, mut main, mut words) = (DRIVER.to_string(), String::new(), Vec::new());
    for t in &trials {
        let name = t.variant.name();
        writeln!(text, "{}", cuda_source(&t.variant)).unwrap();
        writeln!(main, "  {{ {name}::Params p;\n{}  rows<{name}>(p); }}", t.parameters(&mut words)).unwrap();
        words.push(t.rows.len() as u32);
        for (row, kv_pos, numbers) in &t.rows {
            let RowCtx { batch, q_idx, q_len, kv_len, qo_head, kv_head } = *row;
            words.extend([batch, q_idx, q_len, kv_len, qo_head, kv_head, *kv_pos].map(|x| x as u32));
            words.extend(numbers.map(f32::to_bits));
        }
    }
    writeln!(text, "int main() {{\n{main}  return 0;\n}}").unwrap();
    let got = run_cpp(compiler, &text, &words);

    let mut got = got.into_iter();
    for t in &trials {
        let params = t.params();
        let bound = t.variant.bind(&params, t.case.heads.len(), t.case.indptr.len() - 1).unwrap();
        let v = &t.variant;
        for (row, kv_pos, [score, o, m, d]) in &t.rows {
            let mut next = || got.next().expect("as many results as rows");
            let mut check = |what: &str, want: f64, err: f64| {
                let got = f64::from(next());
                assert!(err.is_infinite() || (got - want).abs() <= err, "{} {what}: {got} {want} ±{err}", v.name());
            };
            let [s64, o64, m64, d64] = [score, o, m, d].map(|&x| f64::from(x));
            let exact = v.name().starts_with("Exact");
            let err = if exact { 0.0 } else { logit_error(v, &bound, row, *kv_pos, *score) };
            check("logits", eval::logit(v, &bound, row, *kv_pos, s64), err);
            check("mask", f64::from(u8::from(eval::visible(v, &bound, row, *kv_pos))), 0.0);
            check("init", eval::init(v, &bound, row).unwrap_or(0.0), init_error(v, &bound, row));
            check("output", eval::output(v, &bound, row, o64, m64, d64), output_error(v, &bound, row, [*o, *m, *d]));
            for (side, pos) in [(Side::Query, row.q_pos()), (Side::Key, *kv_pos), (Side::Value, *kv_pos)] {
                let mut one = [1.0];
                // A row of one element has no pair to rotate.
                eval::transform(v, &bound, side, row, pos, &mut one);
                check("scale", one[0], scale_error(v, &bound, side, row, pos));
            }
        }
    }
    assert!(got.next().is_none());
}

/// Compiles `text`, gives it `words` and returns what it prints.
fn run_cpp(compiler: &str, text: &str, words: &[u32]) -> Vec<f32> {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("variant-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let (source, binary, input) = (dir.join("variants.cpp"), dir.join("variants"), dir.join("input"));
    std::fs::write(&source, text).unwrap();
    let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
    std::fs::File::create(&input).unwrap().write_all(&bytes).unwrap();
    let compiled = Command::new(compiler)
        .args(["-std=c++17", "-O0", "-w", "-o"])
        .args([&binary, &source])
        .output()
        .expect("a compiler that runs");
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    let run = Command::new(&binary).stdin(std::fs::File::open(&input).unwrap()).output().expect("a program that runs");
    assert!(run.status.success(), "{:?}", run.status);
    std::fs::remove_dir_all(&dir).unwrap();
    run.stdout.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}
