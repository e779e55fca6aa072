use fir::norm::*;
use fir::reference::{Precision, norm as reference};
use fir::testing::Rng;
use fir::{DType, Error, Exec, Result, Tensor, TensorMut, TensorRef};

use crate::support::{FLOATS, assert_matches, every_exec};

const EPS: f32 = 1e-6;

type FusedAdd = fn(&Exec, TensorMut<'_>, TensorMut<'_>, TensorRef<'_>, f32) -> Result<()>;
type FusedReference = fn(Precision, TensorRef<'_>, TensorRef<'_>, TensorRef<'_>, f32) -> Result<(Vec<f64>, Vec<f64>)>;

/// Row lengths about every vector's and every unrolled loop's end.
fn tails() -> impl Iterator<Item = usize> {
    (1..35).chain([47, 48, 49, 63, 64, 65, 127, 128, 129, 576])
}

#[test]
fn rms_norm_matches_reference_at_every_tail_length() {
    every_exec(|exec| {
        let mut rng = Rng::new(1);
        for dtype in FLOATS {
            for hidden in tails().chain([4096]) {
                let (x, w) = (rng.tensor(dtype, &[5, hidden]), rng.tensor(dtype, &[hidden]));
                let what = format!("{exec:?} {dtype} {hidden}");
                let mut out = Tensor::zeros(dtype, &[5, hidden]).unwrap();
                rms_norm(exec, x.view(), w.view(), EPS, out.view_mut()).unwrap();
                assert_matches(&what, out.view(), hidden, |p| reference::rms_norm(p, x.view(), w.view(), EPS));
                gemma_rms_norm(exec, x.view(), w.view(), EPS, out.view_mut()).unwrap();
                assert_matches(&what, out.view(), hidden, |p| reference::gemma_rms_norm(p, x.view(), w.view(), EPS));
            }
        }
    });
}

#[test]
fn layer_norm_matches_reference_at_every_tail_length() {
    every_exec(|exec| {
        let mut rng = Rng::new(2);
        for dtype in FLOATS {
            for hidden in tails().chain([2048]) {
                // A mean far from zero: the variance must not be a difference of large squares.
                let data: Vec<f32> = rng.normals(3 * hidden).iter().map(|x| x + 20.0).collect();
                let x = Tensor::from_f32(dtype, &data, &[3, hidden]).unwrap();
                for parameters in [dtype, DType::F32] {
                    let (g, b) = (rng.tensor(parameters, &[hidden]), rng.tensor(parameters, &[hidden]));
                    let mut out = Tensor::zeros(dtype, &[3, hidden]).unwrap();
                    layer_norm(exec, x.view(), g.view(), b.view(), EPS, out.view_mut()).unwrap();
                    assert_matches(&format!("{exec:?} {dtype} {hidden}"), out.view(), hidden, |p| {
                        reference::layer_norm(p, x.view(), g.view(), b.view(), EPS)
                    });
                }
            }
        }
    });
}

#[test]
fn fused_add_matches_reference_in_both_tensors() {
    every_exec(|exec| {
        let mut rng = Rng::new(3);
        for dtype in FLOATS {
            for hidden in tails().chain([4096]) {
                let (x, r) = (rng.tensor(dtype, &[5, hidden]), rng.tensor(dtype, &[5, hidden]));
                let w = rng.tensor(DType::F32, &[hidden]);
                for gemma in [false, true] {
                    let what = format!("{exec:?} {dtype} {hidden} gemma={gemma}");
                    let (mut y, mut s) = (x.clone(), r.clone());
                    let (op, reference): (FusedAdd, FusedReference) = if gemma {
                        (gemma_fused_add_rms_norm, reference::gemma_fused_add_rms_norm)
                    } else {
                        (fused_add_rms_norm, reference::fused_add_rms_norm)
                    };
                    op(exec, y.view_mut(), s.view_mut(), w.view(), EPS).unwrap();
                    let want = |p| reference(p, x.view(), r.view(), w.view(), EPS);
                    assert_matches(&what, y.view(), hidden, |p: Precision| Ok(want(p)?.0));
                    // The sum of two numbers of the type is exact in f64, so what is stored is its rounding.
                    let sum = want(Precision::Naive(dtype)).unwrap().1;
                    assert!(
                        s.view().to_f32_vec().unwrap().iter().zip(&sum).all(|(&s, &w)| f64::from(s) == w),
                        "{what}"
                    );
                }
            }
        }
    });
}

#[test]
fn norm_of_a_sum_uses_the_unrounded_sum() {
    // In bf16 256 + 1 is stored as 256, but the norm of [257, 0] is of 257.
    let exec = Exec::cpu().unwrap();
    let mut x = Tensor::from_f32(DType::BF16, &[1.0, 3.0], &[1, 2]).unwrap();
    let mut r = Tensor::from_f32(DType::BF16, &[256.0, 0.0], &[1, 2]).unwrap();
    let w = Tensor::from_f32(DType::F32, &[1.0, 1e4], &[2]).unwrap();
    fused_add_rms_norm(&exec, x.view_mut(), r.view_mut(), w.view(), 0.0).unwrap();
    let unrounded = 3.0 / ((257f32 * 257.0 + 9.0) / 2.0).sqrt() * 1e4;
    let rounded = 3.0 / ((256f32 * 256.0 + 9.0) / 2.0).sqrt() * 1e4;
    let near = |y: f32| half::bf16::from_f32(y).to_f32();
    assert_ne!(near(unrounded), near(rounded));
    assert_eq!(x.view().to_f32_vec().unwrap()[1], near(unrounded));
    assert_eq!(r.view().to_f32_vec().unwrap(), [256.0, 3.0]);
}

#[test]
fn quantized_norms_match_reference() {
    every_exec(|exec| {
        let mut rng = Rng::new(4);
        for (dtype, q) in FLOATS.iter().flat_map(|&d| [(d, DType::E4M3), (d, DType::E5M2)]) {
            for hidden in [1, 7, 16, 17, 40, 576] {
                let (x, r) = (rng.tensor(dtype, &[4, hidden]), rng.tensor(dtype, &[4, hidden]));
                let (w, b) = (rng.tensor(dtype, &[hidden]), rng.tensor(dtype, &[hidden]));
                // The smallest makes most results saturate.
                for scale in [0.37, 20.0, 1e-6] {
                    let what = format!("{exec:?} {dtype} {q} {hidden} {scale}");
                    let mut out = Tensor::zeros(q, &[4, hidden]).unwrap();
                    rms_norm_quant(exec, x.view(), w.view(), scale, EPS, out.view_mut()).unwrap();
                    assert_matches(&what, out.view(), hidden, |p| {
                        Ok(reference::quantized(p, reference::rms_norm(p, x.view(), w.view(), EPS)?, scale, q))
                    });
                    layer_norm_quant(exec, x.view(), w.view(), b.view(), scale, EPS, out.view_mut()).unwrap();
                    assert_matches(&what, out.view(), hidden, |p| {
                        let norm = reference::layer_norm(p, x.view(), w.view(), b.view(), EPS)?;
                        Ok(reference::quantized(p, norm, scale, q))
                    });
                    let mut s = r.clone();
                    fused_add_rms_norm_quant(exec, x.view(), s.view_mut(), w.view(), scale, EPS, out.view_mut())
                        .unwrap();
                    let want = |p| reference::fused_add_rms_norm(p, x.view(), r.view(), w.view(), EPS);
                    assert_matches(&what, out.view(), hidden, |p| Ok(reference::quantized(p, want(p)?.0, scale, q)));
                    assert_matches(&what, s.view(), hidden, |p| Ok(want(p)?.1));
                }
            }
        }
    });
}

#[test]
fn quantized_infinities_saturate_and_nan_stays() {
    let exec = Exec::cpu().unwrap();
    let x = Tensor::from_f32(DType::F32, &[2.0, -2.0, f32::NAN, 1.0], &[2, 2]).unwrap();
    let w = Tensor::from_f32(DType::F32, &[f32::INFINITY, f32::INFINITY], &[2]).unwrap();
    for (q, largest) in [(DType::E4M3, 448.0), (DType::E5M2, 57344.0)] {
        let mut out = Tensor::zeros(q, &[2, 2]).unwrap();
        rms_norm_quant(&exec, x.view(), w.view(), 1.0, EPS, out.view_mut()).unwrap();
        let got = out.view().to_f32_vec().unwrap();
        assert_eq!(got[..2], [largest, -largest]);
        assert!(got[2].is_nan() && got[3].is_nan());
    }
}

#[test]
fn qk_norm_matches_reference_in_slices_of_one_tensor() {
    every_exec(|exec| {
        let mut rng = Rng::new(5);
        for dtype in FLOATS {
            for (tokens, q_heads, k_heads, dim) in
                [(3, 4, 2, 128), (1, 1, 1, 1), (5, 3, 1, 17), (40, 6, 2, 64), (0, 2, 1, 8)]
            {
                let heads = q_heads + 2 * k_heads;
                let before = rng.tensor(dtype, &[tokens, heads, dim]);
                let (qw, kw) = (rng.tensor(dtype, &[dim]), rng.tensor(DType::F32, &[dim]));
                let what = format!("{exec:?} {dtype} {tokens} {q_heads} {k_heads} {dim}");
                // Queries and keys lie in one tensor; a copy of it per call stands for the borrow of two parts.
                let (mut qkv, mut other) = (before.clone(), before.clone());
                let q = qkv.view_mut().slice(1, 0..q_heads).unwrap();
                let k = other.view_mut().slice(1, q_heads..q_heads + k_heads).unwrap();
                qk_rms_norm(exec, q, k, qw.view(), kw.view(), EPS).unwrap();
                for (after, range, w) in [(&qkv, 0..q_heads, &qw), (&other, q_heads..q_heads + k_heads, &kw)] {
                    let (got, x) =
                        (after.view().slice(1, range.clone()).unwrap(), before.view().slice(1, range.clone()).unwrap());
                    assert_matches(&what, got, dim, |p| reference::rms_norm(p, x, w.view(), EPS));
                    for rest in [0..range.start, range.end..heads] {
                        let (a, b) =
                            (after.view().slice(1, rest.clone()).unwrap(), before.view().slice(1, rest).unwrap());
                        assert_eq!(a.to_f32_vec().unwrap(), b.to_f32_vec().unwrap(), "{what}: outside the slice");
                    }
                }
            }
        }
    });
}

#[test]
fn strided_rows_match_reference_and_gaps_stay() {
    every_exec(|exec| {
        let mut rng = Rng::new(6);
        let (data, w) = (rng.normals(2 * 60), rng.tensor(DType::F16, &[2 * 17]));
        // [2, 3, 17] with gaps after rows and after groups; every second weight.
        let x = TensorRef::strided(&data, &[2, 3, 17], &[60, 20, 1]).unwrap();
        let w = TensorRef::strided(w.as_slice::<half::f16>().unwrap(), &[17], &[2]).unwrap();
        let mut out = vec![-9.0f32; 2 * 90];
        let strided = TensorMut::strided(&mut out, &[2, 3, 17], &[90, 25, 1]).unwrap();
        rms_norm(exec, x, w, EPS, strided).unwrap();
        let got = TensorRef::strided(&out, &[2, 3, 17], &[90, 25, 1]).unwrap();
        assert_matches(&format!("{exec:?}"), got, 17, |p| reference::rms_norm(p, x, w, EPS));
        assert_eq!(out.iter().filter(|&&x| x == -9.0).count(), 2 * 90 - 2 * 3 * 17);
    });
}

#[test]
fn a_row_is_the_same_whatever_is_beside_it() {
    every_exec(|exec| {
        let mut rng = Rng::new(7);
        let (x, w) = (rng.tensor(DType::F32, &[200, 515]), rng.tensor(DType::F32, &[515]));
        let mut all = Tensor::zeros(DType::F32, &[200, 515]).unwrap();
        rms_norm(exec, x.view(), w.view(), EPS, all.view_mut()).unwrap();
        for r in [0, 1, 99, 199] {
            let mut one = Tensor::zeros(DType::F32, &[1, 515]).unwrap();
            rms_norm(exec, x.view().slice(0, r..r + 1).unwrap(), w.view(), EPS, one.view_mut()).unwrap();
            let row = all.view().slice(0, r..r + 1).unwrap().to_f32_vec().unwrap();
            assert_eq!(one.as_slice::<f32>().unwrap(), row, "{exec:?} row {r}");
        }
    });
}

#[test]
fn empty_tensors_are_left_alone() {
    let exec = Exec::cpu().unwrap();
    for shape in [&[0, 8][..], &[3, 0], &[0, 0], &[2, 0, 8], &[2, 3, 0], &[1 << 50, 0]] {
        let x = Tensor::zeros(DType::F16, shape).unwrap();
        let w = Tensor::zeros(DType::F32, &shape[shape.len() - 1..]).unwrap();
        let (mut y, mut r, mut q) = (x.clone(), x.clone(), Tensor::zeros(DType::E4M3, shape).unwrap());
        rms_norm(&exec, x.view(), w.view(), EPS, y.view_mut()).unwrap();
        layer_norm(&exec, x.view(), w.view(), w.view(), EPS, y.view_mut()).unwrap();
        fused_add_rms_norm(&exec, y.view_mut(), r.view_mut(), w.view(), EPS).unwrap();
        fused_add_rms_norm_quant(&exec, x.view(), r.view_mut(), w.view(), 1.0, EPS, q.view_mut()).unwrap();
    }
}

#[test]
fn bad_arguments_are_named() {
    let exec = Exec::cpu().unwrap();
    let t = |dtype, shape: &[usize]| Tensor::zeros(dtype, shape).unwrap();
    let (x, w) = (t(DType::F32, &[2, 8]), t(DType::F32, &[8]));
    let check = |got: Result<()>, want: &str| assert_eq!(got.unwrap_err().to_string(), want);
    let rms = |x: &Tensor, w: &Tensor, eps, mut out: Tensor| rms_norm(&exec, x.view(), w.view(), eps, out.view_mut());
    check(rms(&x, &t(DType::F32, &[9]), EPS, x.clone()), "rms_norm: `weight` has hidden=9, but `x` bound hidden=8");
    check(rms(&x, &w, EPS, t(DType::F32, &[3, 8])), "rms_norm: `out` has tokens=3, but `x` bound tokens=2");
    check(rms(&x, &w, EPS, t(DType::F16, &[2, 8])), "rms_norm: `out` is f16, expected f32 as `x`");
    check(rms(&x, &t(DType::I32, &[8]), EPS, x.clone()), "rms_norm: `weight` is i32, expected f32, f16 or bf16");
    check(rms(&x, &w, f32::NAN, x.clone()), "rms_norm: `eps` is NaN, expected a finite number, 0 or more");
    check(rms(&w, &w, EPS, w.clone()), "rms_norm: `x` has 1 axes, expected 2 [tokens, hidden]");
    let i = t(DType::I32, &[2, 8]);
    check(rms(&i, &w, EPS, i.clone()), "rms_norm: `x` is i32, expected f32, f16 or bf16");
    for (scale, got) in [(0.0, "0"), (-1.0, "-1"), (f32::NAN, "NaN"), (f32::INFINITY, "inf")] {
        check(
            rms_norm_quant(&exec, x.view(), w.view(), scale, EPS, t(DType::E4M3, &[2, 8]).view_mut()),
            &format!("rms_norm_quant: `scale` is {got}, expected a number above 0, finite as is its inverse"),
        );
    }
    check(
        layer_norm_quant(&exec, x.view(), w.view(), w.view(), 1.0, EPS, x.clone().view_mut()),
        "layer_norm_quant: `out` is f32, expected e4m3 or e5m2",
    );
    check(
        layer_norm(&exec, x.view(), w.view(), t(DType::I8, &[8]).view(), EPS, x.clone().view_mut()),
        "layer_norm: `beta` is i8, expected f32, f16 or bf16",
    );
    check(
        fused_add_rms_norm(&exec, x.clone().view_mut(), t(DType::BF16, &[2, 8]).view_mut(), w.view(), EPS),
        "fused_add_rms_norm: `residual` is bf16, expected f32 as `x`",
    );
    let columns = TensorRef::strided(x.as_slice::<f32>().unwrap(), &[2, 8], &[1, 2]).unwrap();
    assert!(matches!(
        rms_norm(&exec, columns, w.view(), EPS, x.clone().view_mut()),
        Err(Error::Layout { arg: "x", .. })
    ));
}

#[test]
fn an_output_larger_than_the_caches_has_the_same_rows() {
    // 36 MB: above the size from which rows are written past the caches, at every place within a line.
    let (tokens, hidden) = (8_800, 1_030);
    let data: Vec<f32> = (0..tokens * hidden).map(|i| (i % 1_019) as f32 / 100.0 - 4.0).collect();
    let x = Tensor::from_f32(DType::F32, &data, &[tokens, hidden]).unwrap();
    let mut rng = Rng::new(7);
    let (w, b) = (rng.tensor(DType::F32, &[hidden]), rng.tensor(DType::F32, &[hidden]));
    every_exec(|exec| {
        for center in [false, true] {
            let norm = |x: TensorRef<'_>, out: TensorMut<'_>| match center {
                false => rms_norm(exec, x, w.view(), EPS, out).unwrap(),
                true => layer_norm(exec, x, w.view(), b.view(), EPS, out).unwrap(),
            };
            let mut all = Tensor::zeros(DType::F32, &[tokens, hidden]).unwrap();
            norm(x.view(), all.view_mut());
            for from in (0..tokens).step_by(1_100) {
                let mut few = Tensor::zeros(DType::F32, &[1_100, hidden]).unwrap();
                norm(x.view().slice(0, from..from + 1_100).unwrap(), few.view_mut());
                let all = &all.as_slice::<f32>().unwrap()[from * hidden..][..1_100 * hidden];
                assert!(few.as_slice::<f32>().unwrap() == all, "{exec:?} {center} {from}");
            }
        }
    });
}

/// The numbers of a modulation, element by element, as plain code adds them up.
fn spread(p: Precision, m: &Modulation<'_>, rows: usize, hidden: usize) -> Vec<f64> {
    let values = |t: Option<TensorRef<'_>>| t.map(|t| t.to_f32_vec().unwrap());
    let (own, columns) = (values(m.rows), values(m.columns));
    let one = |i: usize| own.as_ref().map_or(0.0, |o| f64::from(o[i]));
    let column = |i: usize| columns.as_ref().map_or(0.0, |c| f64::from(c[i % hidden]));
    (0..rows * hidden).map(|i| p.acc(f64::from(m.plus) + p.acc(one(i) + column(i)))).collect()
}

#[test]
fn modulated_layer_norms_match_reference() {
    every_exec(|exec| {
        let mut rng = Rng::new(9);
        for dtype in FLOATS {
            for hidden in [1, 5, 16, 33, 128, 3072, 20_000] {
                let shape = [2, 2, hidden];
                let [x, r, g, a, b] = [(); 5].map(|()| rng.tensor(dtype, &shape));
                let [gc, ac, bc] = [(); 3].map(|()| rng.tensor(DType::F32, &[hidden]));
                let (x_scale, none) = (Tensor::from_f32(DType::F32, &[0.5], &[1]).unwrap(), Modulation::default());
                let rows = |t| Modulation { rows: Some(t), ..none };
                let columns = |t| Modulation { columns: Some(t), ..none };
                let (gate, shift) = (rows(g.view()), rows(b.view()));
                let scale = Modulation { plus: 1.0, columns: Some(ac.view()), ..rows(a.view()) };
                let (r, gates) = (Some(r.view()), Modulation { columns: Some(gc.view()), ..gate });
                for (what, gate, scale, shift, residual, x_scale) in [
                    ("all", gates, scale, Modulation { columns: Some(bc.view()), ..shift }, r, Some(x_scale.view())),
                    ("gamma and beta", gate, columns(ac.view()), columns(bc.view()), r, None),
                    ("no gate", Modulation { plus: 1.0, ..none }, scale, shift, None, None),
                ] {
                    let [mut sum, mut out] = [(); 2].map(|()| Tensor::zeros(dtype, &shape).unwrap());
                    let args = ModulatedArgs {
                        x: x.view(),
                        x_scale,
                        residual,
                        gate,
                        scale,
                        shift,
                        eps: 1e-3,
                        residual_out: sum.view_mut(),
                        out: out.view_mut(),
                    };
                    modulated_layer_norm(exec, args).unwrap();
                    let before: Vec<f64> = match residual {
                        Some(r) => r.to_f32_vec().unwrap().iter().map(|&x| f64::from(x)).collect(),
                        None => vec![0.0; 4 * hidden],
                    };
                    let want = |p| {
                        let [mut gates, scales, shifts] = [gate, scale, shift].map(|m| spread(p, &m, 4, hidden));
                        if x_scale.is_some() {
                            gates.iter_mut().for_each(|g| *g *= 0.5);
                        }
                        reference::modulated_layer_norm(p, x.view(), &before, [&gates, &scales, &shifts], 1e-3)
                    };
                    let what = format!("{exec:?} {dtype} {hidden} {what}");
                    assert_matches(&what, out.view(), hidden, |p| Ok(want(p)?.0));
                    assert_matches(&what, sum.view(), hidden, |p| Ok(want(p)?.1));
                }
            }
        }
    });
}

#[test]
fn a_modulated_norm_reads_strided_rows_and_names_bad_arguments() {
    every_exec(|exec| {
        // Gate, scale and shift are three of six parts of every row.
        let (hidden, mut rng) = (24, Rng::new(10));
        let parts = rng.tensor(DType::BF16, &[4, 6, hidden]);
        let part = |i| parts.view().select(1, i).unwrap();
        let dense = |i| Tensor::from_f32(DType::BF16, &part(i).to_f32_vec().unwrap(), &[4, hidden]).unwrap();
        let copies = [dense(0), dense(2), dense(5)];
        let x = rng.tensor(DType::BF16, &[4, hidden]);
        let run = |rows: [TensorRef<'_>; 3]| {
            let [mut sum, mut out] = [(); 2].map(|()| Tensor::zeros(DType::BF16, &[4, hidden]).unwrap());
            let [gate, scale, shift] = rows.map(|r| Modulation { rows: Some(r), ..Modulation::default() });
            let (residual_out, to) = (sum.view_mut(), out.view_mut());
            let (x_scale, residual) = (None, Some(x.view()));
            let args =
                ModulatedArgs { x: x.view(), x_scale, residual, gate, scale, shift, eps: EPS, residual_out, out: to };
            modulated_layer_norm(exec, args).unwrap();
            [sum.view().to_f32_vec().unwrap(), out.view().to_f32_vec().unwrap()]
        };
        assert_eq!(run([part(0), part(2), part(5)]), run(copies.each_ref().map(|c| c.view())), "{exec:?}");
    });
    let exec = Exec::cpu().unwrap();
    let t = |dtype, shape: &[usize]| Tensor::zeros(dtype, shape).unwrap();
    let (x, none) = (t(DType::F32, &[2, 8]), Modulation::default());
    let (c9, half, two) = (t(DType::F32, &[9]), t(DType::F16, &[8]), t(DType::F32, &[2]));
    let (other, short) = (t(DType::F16, &[2, 8]), t(DType::F32, &[1, 8]));
    let columns = |c| Modulation { columns: Some(c), ..none };
    let rows = |r| Modulation { rows: Some(r), ..none };
    for (gate, shift, x_scale, eps, want) in [
        (columns(c9.view()), none, None, EPS, "`gate.columns` has hidden=9, but `x` bound hidden=8"),
        (columns(half.view()), none, None, EPS, "`gate.columns` is f16, expected f32"),
        (none, rows(other.view()), None, EPS, "`shift.rows` is f16, expected f32 as `x`"),
        (none, rows(short.view()), None, EPS, "`shift.rows` has tokens=1, but `x` bound tokens=2"),
        (none, none, Some(two.view()), EPS, "`x_scale` is 2 numbers, expected one"),
        (none, none, None, -1.0, "`eps` is -1, expected a finite number, 0 or more"),
    ] {
        let (mut sum, mut out) = (x.clone(), x.clone());
        let (residual_out, out) = (sum.view_mut(), out.view_mut());
        let args =
            ModulatedArgs { x: x.view(), x_scale, residual: None, gate, scale: none, shift, eps, residual_out, out };
        let error = modulated_layer_norm(&exec, args).unwrap_err().to_string();
        assert_eq!(error, format!("modulated_layer_norm: {want}"));
    }
}
