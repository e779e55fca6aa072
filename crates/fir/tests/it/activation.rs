use fir::activation::*;
use fir::reference::{Precision, activation as reference};
use fir::testing::Rng;
use fir::{DType, Exec, Result, Tensor, TensorMut, TensorRef};

use crate::support::{FLOATS, assert_matches, every_exec};

type Op = fn(&Exec, TensorRef<'_>, TensorMut<'_>) -> Result<()>;
type Reference = fn(Precision, TensorRef<'_>) -> Result<Vec<f64>>;

const ALL: [(&str, Op, Reference); 3] = [
    ("silu", silu_and_mul, reference::silu_and_mul),
    ("gelu", gelu_and_mul, reference::gelu_and_mul),
    ("gelu_tanh", gelu_tanh_and_mul, reference::gelu_tanh_and_mul),
];

#[test]
fn matches_reference_at_every_tail_length() {
    every_exec(|exec| {
        let mut rng = Rng::new(1);
        for (name, op, reference) in ALL {
            for dtype in FLOATS {
                for d in (1..35).chain([64, 100, 5000]) {
                    let data: Vec<f32> = rng.normals(3 * 2 * d).iter().map(|x| 3.0 * x).collect();
                    let x = Tensor::from_f32(dtype, &data, &[3, 2 * d]).unwrap();
                    let mut out = Tensor::zeros(dtype, &[3, d]).unwrap();
                    op(exec, x.view(), out.view_mut()).unwrap();
                    assert_matches(&format!("{exec:?} {name} {dtype} {d}"), out.view(), d, |p| reference(p, x.view()));
                }
            }
        }
    });
}

#[test]
fn matches_reference_over_the_whole_line() {
    // One element per row, so that each is held to its own error and not to its row's.
    let gates = (-400..400).map(|i| i as f32 / 16.0).chain([1e4, -1e4, 1e-6, -1e-6, 0.0, -0.0]);
    let specials = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY];
    let data: Vec<f32> = gates.chain(specials).flat_map(|g| [g, 1.5]).collect();
    every_exec(|exec| {
        for (name, op, reference) in ALL {
            let x = TensorRef::new(&data, &[data.len() / 2, 2]).unwrap();
            let mut out = Tensor::zeros(DType::F32, &[data.len() / 2, 1]).unwrap();
            op(exec, x, out.view_mut()).unwrap();
            assert_matches(&format!("{exec:?} {name}"), out.view(), 1, |p| reference(p, x));
        }
    });
}

#[test]
fn strided_batches_match_reference_and_gaps_stay() {
    every_exec(|exec| {
        let data = Rng::new(2).normals(2 * 200);
        for (name, op, reference) in ALL {
            let x = TensorRef::strided(&data, &[2, 3, 34], &[200, 50, 1]).unwrap();
            let mut out = vec![-9.0f32; 2 * 70];
            op(exec, x, TensorMut::strided(&mut out, &[2, 3, 17], &[70, 20, 1]).unwrap()).unwrap();
            let got = TensorRef::strided(&out, &[2, 3, 17], &[70, 20, 1]).unwrap();
            assert_matches(&format!("{exec:?} {name}"), got, 17, |p| reference(p, x));
            assert_eq!(out.iter().filter(|&&x| x == -9.0).count(), 2 * 70 - 2 * 3 * 17);
        }
    });
}

#[test]
fn empty_tensors_are_left_alone() {
    let exec = Exec::cpu().unwrap();
    for (x, out) in [
        (&[0, 8][..], &[0, 4][..]),
        (&[3, 0], &[3, 0]),
        (&[1 << 50, 0], &[1 << 50, 0]),
        (&[2, 0, 4], &[2, 0, 2]),
        (&[2, 3, 0], &[2, 3, 0]),
    ] {
        let x = Tensor::zeros(DType::BF16, x).unwrap();
        silu_and_mul(&exec, x.view(), Tensor::zeros(DType::BF16, out).unwrap().view_mut()).unwrap();
        assert_eq!(reference::silu_and_mul(Precision::Exact, x.view()).unwrap(), [0f64; 0]);
    }
}

#[test]
fn bad_arguments_are_named() {
    let exec = Exec::cpu().unwrap();
    let check = |x: (DType, &[usize]), out: (DType, &[usize]), want: &str| {
        let (x, mut out) = (Tensor::zeros(x.0, x.1).unwrap(), Tensor::zeros(out.0, out.1).unwrap());
        assert_eq!(silu_and_mul(&exec, x.view(), out.view_mut()).unwrap_err().to_string(), want);
    };
    use DType::{F16, F32, I32};
    check((F32, &[2, 7]), (F32, &[2, 3]), "silu_and_mul: `x` is 7 wide, expected an even width, 2 * d");
    check((F32, &[2, 8]), (F32, &[2, 3]), "silu_and_mul: `out` has d=3, but `x` bound d=4");
    check((F32, &[2, 8]), (F32, &[3, 4]), "silu_and_mul: `out` has tokens=3, but `x` bound tokens=2");
    check((F32, &[2, 8]), (F16, &[2, 4]), "silu_and_mul: `out` is f16, expected f32 as `x`");
    check((I32, &[2, 8]), (I32, &[2, 4]), "silu_and_mul: `x` is i32, expected f32, f16 or bf16");
    check((F32, &[8]), (F32, &[4]), "silu_and_mul: `x` has 1 axes, expected 2 [tokens, 2 * d]");
}
