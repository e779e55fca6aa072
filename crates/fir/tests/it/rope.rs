use fir::kv::Ragged;
use fir::reference;
use fir::rope::{Angles, Positions, apply_rope, apply_rope_in_place, cos_sin_cache};
use fir::testing::Rng;
use fir::variant::{Llama31, Rope};
use fir::{DType, Exec, Tensor, TensorMut, TensorRef};

use crate::support::{FLOATS, assert_matches, every_exec};

const LLAMA31: Rope = Rope {
    theta: 5e5,
    scale: 8.0,
    interleave: false,
    rotary_dim: None,
    llama31: Some(Llama31 { low_freq_factor: 1.0, high_freq_factor: 4.0, old_context_len: 8192.0 }),
};

fn ropes() -> [Rope; 4] {
    let plain = Rope::default();
    [plain, Rope { interleave: true, scale: 2.5, ..plain }, LLAMA31, Rope { interleave: true, ..LLAMA31 }]
}

fn ids(positions: &[i64]) -> Tensor {
    Tensor::from_slice(positions, &[positions.len()]).unwrap()
}

/// Out of place, as fresh tensors.
fn rotated<'a>(
    exec: &Exec,
    q: TensorRef<'_>,
    k: TensorRef<'_>,
    positions: Positions<'_>,
    angles: impl Into<Angles<'a>>,
) -> fir::Result<(Tensor, Tensor)> {
    let mut out = (Tensor::zeros(q.dtype(), q.shape())?, Tensor::zeros(k.dtype(), k.shape())?);
    apply_rope(exec, q, k, positions, angles, out.0.view_mut(), out.1.view_mut())?;
    Ok(out)
}

#[test]
fn rope_matches_reference_at_every_rotary_dim() {
    let positions = [0, 1, 77, 8191, 131_072, 1_000_000, -3, 1 << 40];
    let pos = ids(&positions);
    every_exec(|exec| {
        let mut rng = Rng::new(1);
        for dtype in FLOATS {
            for (i, dim) in (2..70).step_by(2).chain([128, 256]).enumerate() {
                // Also heads with elements that do not rotate.
                let head_dim = dim + [0, 1, 16][i % 3];
                let q = rng.tensor(dtype, &[positions.len(), 3, head_dim]);
                let k = rng.tensor(dtype, &[positions.len(), 1, head_dim]);
                for rope in ropes() {
                    let rope = Rope { rotary_dim: (head_dim != dim).then_some(dim), ..rope };
                    let what = format!("{exec:?} {dtype} {dim} of {head_dim} {rope:?}");
                    let (q_out, k_out) =
                        rotated(exec, q.view(), k.view(), Positions::Ids(pos.view()), rope).expect(&what);
                    for (x, out) in [(&q, &q_out), (&k, &k_out)] {
                        assert_matches(&what, out.view(), head_dim, |p| {
                            reference::rope::apply_rope(p, x.view(), &positions, &rope)
                        });
                    }
                }
            }
        }
    });
}

#[test]
fn the_ways_to_rotate_agree_bit_for_bit() {
    let indptr = Ragged::new(&[0, 3, 3, 8, 9]).unwrap();
    let offsets = Tensor::from_slice(&[5i32, 99, 0, 30], &[4]).unwrap();
    let positions = [5i64, 6, 7, 0, 1, 2, 3, 4, 30];
    let (pos64, pos32) = (ids(&positions), Tensor::from_slice(&positions.map(|p| p as i32), &[9]).unwrap());
    every_exec(|exec| {
        let mut rng = Rng::new(2);
        for dtype in FLOATS {
            for rope in ropes() {
                let rope = Rope { rotary_dim: Some(36), ..rope };
                let (q, k) = (rng.tensor(dtype, &[9, 4, 40]), rng.tensor(dtype, &[9, 2, 40]));
                let by = |positions, angles: Angles<'_>| {
                    let (q, k) = rotated(exec, q.view(), k.view(), positions, angles).unwrap();
                    (q.view().to_f32_vec().unwrap(), k.view().to_f32_vec().unwrap())
                };
                let want = by(Positions::Ids(pos64.view()), rope.into());
                assert_eq!(by(Positions::Ids(pos32.view()), rope.into()), want);
                let ragged = Positions::Ragged { indptr: &indptr, offsets: offsets.view() };
                assert_eq!(by(ragged, rope.into()), want);

                let mut table = Tensor::zeros(DType::F32, &[31, 36]).unwrap();
                cos_sin_cache(exec, &rope, table.view_mut()).unwrap();
                assert_matches("table", table.view(), 36, |p| reference::rope::cos_sin_cache(p, &rope, 31, 36));
                let cache = Angles::Cache { table: table.view(), interleave: rope.interleave };
                assert_eq!(by(ragged, cache), want);

                let (mut q, mut k) = (q.clone(), k.clone());
                apply_rope_in_place(exec, ragged, rope, q.view_mut(), k.view_mut()).unwrap();
                assert_eq!((q.view().to_f32_vec().unwrap(), k.view().to_f32_vec().unwrap()), want);
            }
        }
    });
}

#[test]
fn cached_rope_matches_reference_for_any_table() {
    every_exec(|exec| {
        let mut rng = Rng::new(3);
        let positions = [6i64, 0, 3];
        let pos = ids(&positions);
        // Rows of a wider table, and values that are no cosines.
        let wide = rng.tensor(DType::F32, &[7, 24]);
        let table = wide.view().slice(1, 2..20).unwrap();
        for dtype in FLOATS {
            for interleave in [false, true] {
                let (q, k) = (rng.tensor(dtype, &[3, 2, 20]), rng.tensor(dtype, &[3, 1, 20]));
                let angles = Angles::Cache { table, interleave };
                let (q_out, _) = rotated(exec, q.view(), k.view(), Positions::Ids(pos.view()), angles).unwrap();
                assert_matches(&format!("{exec:?} {dtype}"), q_out.view(), 20, |p| {
                    reference::rope::apply_rope_with_cache(p, q.view(), &positions, table, interleave)
                });
            }
        }
    });
}

#[test]
fn a_token_does_not_depend_on_its_neighbours_and_strides() {
    let mut rng = Rng::new(4);
    let n = 200;
    let qkv = rng.tensor(DType::BF16, &[n, 12, 64]);
    let positions: Vec<i64> = (0..n).map(|_| rng.below(1 << 20) as i64).collect();
    let pos = ids(&positions);
    let rope = LLAMA31;
    let all = std::sync::Mutex::new(Vec::new());
    every_exec(|exec| {
        // q and k are slices of one projection, the outputs of another.
        let mut out = Tensor::zeros(DType::BF16, &[n, 64 * 12]).unwrap();
        let part = |from, to| qkv.view().slice(1, from..to).unwrap();
        let data = out.as_mut_slice::<fir::tensor::bf16>().unwrap();
        let (q_out, k_out) = data.split_at_mut(8 * 64 * n);
        let q_out = TensorMut::strided(q_out, &[n, 8, 64], &[64, 64 * n, 1]).unwrap();
        let k_out = TensorMut::new(k_out, &[n, 2, 64 * 2]).unwrap().slice(2, 3..67).unwrap();
        apply_rope(exec, part(0, 8), part(8, 10), Positions::Ids(pos.view()), rope, q_out, k_out).unwrap();
        for t in [0, 57, n - 1] {
            let one = |x: TensorRef<'_>| x.slice(0, t..t + 1).map(|x| x.to_f32_vec().unwrap()).unwrap();
            let (q, k) = rotated(
                exec,
                part(0, 8).slice(0, t..t + 1).unwrap(),
                part(8, 10).slice(0, t..t + 1).unwrap(),
                Positions::Ids(pos.view().slice(0, t..t + 1).unwrap()),
                rope,
            )
            .unwrap();
            let data = out.as_slice::<fir::tensor::bf16>().unwrap();
            let q_all = TensorRef::strided(data, &[n, 8, 64], &[64, 64 * n, 1]).unwrap();
            let k_all = TensorRef::new(&data[8 * 64 * n..], &[n, 2, 128]).unwrap().slice(2, 3..67).unwrap();
            assert_eq!(one(q_all), q.view().to_f32_vec().unwrap());
            assert_eq!(one(k_all), k.view().to_f32_vec().unwrap());
        }
        all.lock().unwrap().push(out.view().to_f32_vec().unwrap());
    });
    let all = all.into_inner().unwrap();
    assert!(all.windows(2).all(|w| w[0] == w[1]), "levels or thread counts differ");
}

#[test]
fn bad_arguments_are_refused_with_their_values() {
    let exec = Exec::cpu().unwrap();
    let f = |shape: &[usize]| Tensor::zeros(DType::F16, shape).unwrap();
    let (q, k, pos) = (f(&[2, 4, 8]), f(&[2, 1, 8]), ids(&[0, 9]));
    let rope = Rope::default();
    let msg = |q: &Tensor, k: &Tensor, pos: &Tensor, angles: Angles<'_>| {
        rotated(&exec, q.view(), k.view(), Positions::Ids(pos.view()), angles).unwrap_err().to_string()
    };
    let table = Tensor::zeros(DType::F32, &[9, 8]).unwrap();
    fn cache(table: TensorRef<'_>) -> Angles<'_> {
        Angles::Cache { table, interleave: false }
    }
    assert_eq!(
        msg(&q, &k, &pos, cache(table.view())),
        "apply_rope: `positions` is 9 at token 1, expected 0 or more and below 9, the rows of `table`"
    );
    assert!(msg(&q, &k, &ids(&[i64::MIN, 0]), cache(table.view())).contains("-9223372036854775808 at token 0"));
    assert!(msg(&q, &k, &pos, cache(table.view().slice(1, 0..7).unwrap())).contains("rotary_dim=7"));
    assert!(msg(&q, &k, &pos, cache(f(&[10, 8]).view())).contains("`table` is f16"));
    assert!(msg(&q, &k, &pos, cache(Tensor::zeros(DType::F32, &[10, 10]).unwrap().view())).contains("head_dim=8"));
    for (bad, what) in [
        (Rope { theta: f32::NAN, ..rope }, "theta NaN"),
        (Rope { scale: 0.0, ..rope }, "scale 0"),
        (Rope { rotary_dim: Some(10), ..rope }, "10"),
        (Rope { rotary_dim: Some(3), ..rope }, "3"),
        (Rope { rotary_dim: Some(0), ..rope }, "0"),
    ] {
        let got = msg(&q, &k, &pos, bad.into());
        assert!(got.contains(what) && got.starts_with("apply_rope: `rope"), "{got}");
    }
    assert!(msg(&q, &k, &ids(&[0]), rope.into()).contains("nnz=1"));
    assert!(msg(&q, &f(&[2, 1, 6]), &pos, rope.into()).contains("head_dim=6"));
    assert!(msg(&q, &f(&[3, 1, 8]), &pos, rope.into()).contains("nnz=3"));
    assert!(msg(&q, &Tensor::zeros(DType::F32, &[2, 1, 8]).unwrap(), &pos, rope.into()).contains("`k` is f32"));
    assert!(msg(&q, &k, &f(&[2]), rope.into()).contains("`positions` is f16"));
    let ints = Tensor::zeros(DType::I32, &[2, 4, 8]).unwrap();
    assert!(msg(&ints, &ints, &pos, rope.into()).contains("`q` is i32"));
    assert!(msg(&f(&[2, 4, 0]), &f(&[2, 1, 0]), &pos, rope.into()).contains("rotary_dim"));
    let scattered = Tensor::zeros(DType::F16, &[2, 8, 4]).unwrap();
    let err = rotated(&exec, scattered.view().transpose(1, 2).unwrap(), k.view(), Positions::Ids(pos.view()), rope);
    assert!(err.unwrap_err().to_string().contains("stride 4 of the last axis"));

    let (one, three) = (Ragged::new(&[0, 1]).unwrap(), Ragged::new(&[0, 2]).unwrap());
    for (indptr, offsets, what) in
        [(&one, ids(&[0]), "nnz=1"), (&three, ids(&[0, 0]), "batch=2"), (&three, ids(&[i64::MAX]), "64 bits")]
    {
        let p = Positions::Ragged { indptr, offsets: offsets.view() };
        let got = rotated(&exec, q.view(), k.view(), p, rope).unwrap_err().to_string();
        assert!(got.contains(what), "{got}");
    }
    let mut odd = Tensor::zeros(DType::F32, &[4, 6]).unwrap();
    assert!(cos_sin_cache(&exec, &Rope { rotary_dim: Some(4), ..rope }, odd.view_mut()).is_err());
}

#[test]
fn nothing_to_rotate_is_no_error() {
    let exec = Exec::cpu().unwrap();
    for (nnz, q_heads, k_heads) in [(0, 4, 2), (3, 0, 2), (3, 4, 0)] {
        let mut rng = Rng::new(5);
        let (q, k) = (rng.tensor(DType::F32, &[nnz, q_heads, 8]), rng.tensor(DType::F32, &[nnz, k_heads, 8]));
        let pos = ids(&vec![3; nnz]);
        let (q_out, k_out) = rotated(&exec, q.view(), k.view(), Positions::Ids(pos.view()), Rope::default()).unwrap();
        let moved = |x: &Tensor, y: &Tensor| x.view().to_f32_vec().unwrap() != y.view().to_f32_vec().unwrap();
        assert_eq!((moved(&q, &q_out), moved(&k, &k_out)), (nnz * q_heads > 0, nnz * k_heads > 0));
    }
    let mut none = Tensor::zeros(DType::F32, &[0, 4]).unwrap();
    cos_sin_cache(&exec, &Rope::default(), none.view_mut()).unwrap();
}
