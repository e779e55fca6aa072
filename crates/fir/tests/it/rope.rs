use fir::kv::{KvLayout, PagedKvMut, PagedMlaMut, Ragged};
use fir::page::{Slots, append_paged_kv, append_paged_mla};
use fir::reference;
use fir::rope::{
    Angles, Positions, Roped, RopedKv, RopedMla, apply_rope, apply_rope_in_place, cos_sin_cache, rope_quantize,
    rope_quantize_append_paged_kv, rope_quantize_append_paged_mla,
};
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

const FLOATS8: [DType; 5] = [DType::F32, DType::F16, DType::BF16, DType::E4M3, DType::E5M2];
const POSITIONS: [i64; 5] = [0, 4000, 7, 1_000_000, 31];
/// Slots of a pool of 3 pages of 4 tokens; the fourth token goes nowhere.
const SLOTS: [i64; 5] = [9, 2, 3, -1, 0];

fn wanted() -> Vec<Option<usize>> {
    SLOTS.iter().map(|&s| usize::try_from(s).ok()).collect()
}

fn zeros_like(x: &Tensor, dtype: DType) -> Tensor {
    Tensor::zeros(dtype, x.shape()).unwrap()
}

/// `x / scale` as a reference.
fn divided(p: reference::Precision, x: TensorRef<'_>, scale: f32) -> fir::Result<Vec<f64>> {
    Ok(reference::values(x)?.into_iter().map(|x| p.store(p.acc(x / f64::from(scale)))).collect())
}

#[test]
fn rope_quantize_matches_reference() {
    let pos = ids(&POSITIONS);
    every_exec(|exec| {
        let mut rng = Rng::new(6);
        for (i, (from, to)) in FLOATS.iter().flat_map(|&f| FLOATS8.map(|t| (f, t))).enumerate() {
            for (rope_dim, nope_dim) in [(64, 512), (2, 3), (38, 7)] {
                let rope = ropes()[(i + rope_dim) % 4];
                let what = format!("{exec:?} {from} to {to}, {rope_dim} {nope_dim} {rope:?}");
                let q = [rng.tensor(from, &[5, 3, rope_dim]), rng.tensor(from, &[5, 3, nope_dim])];
                let k = [rng.tensor(from, &[5, rope_dim]), rng.tensor(from, &[5, nope_dim])];
                let [mut q_out, mut k_out] = [&q, &k].map(|x| [zeros_like(&x[0], to), zeros_like(&x[1], to)]);
                let roped =
                    |x: &'_ [Tensor; 2], out: &'_ mut [Tensor; 2], scale: f32, run: &mut dyn FnMut(Roped<'_>)| {
                        let [rope_out, nope_out] = out;
                        run(Roped {
                            rope: x[0].view(),
                            rope_out: rope_out.view_mut(),
                            nope: Some((x[1].view(), nope_out.view_mut())),
                            scale,
                        });
                    };
                roped(&q, &mut q_out, 0.37, &mut |q| {
                    let mut q = Some(q);
                    roped(&k, &mut k_out, 3.0, &mut |k| {
                        rope_quantize(exec, q.take().unwrap(), k, Positions::Ids(pos.view()), rope).expect(&what);
                    });
                });
                for (x, out, scale) in [(&q, &q_out, 0.37), (&k, &k_out, 3.0)] {
                    let heads = x[0].shape().len() - 1;
                    let three = x[0].view().reshape(&[5, [1, 3][heads - 1], rope_dim]).unwrap();
                    assert_matches(&what, out[0].view(), rope_dim, |p| {
                        reference::rope::rope_quantize(p, three, &POSITIONS, &rope, scale)
                    });
                    assert_matches(&what, out[1].view(), nope_dim, |p| divided(p, x[1].view(), scale));
                }
            }
        }
    });
}

/// Two pools of 3 pages of 4 tokens.
fn pools(rng: &mut Rng, dtype: DType, heads: usize, dims: [usize; 2]) -> [Tensor; 2] {
    dims.map(|dim| rng.tensor(dtype, &[3, 4, heads, dim]))
}

#[test]
fn rope_quantize_append_matches_reference() {
    let (pos, slots) = (ids(&POSITIONS), ids(&SLOTS));
    every_exec(|exec| {
        let mut rng = Rng::new(7);
        for (i, (from, to)) in FLOATS.iter().flat_map(|&f| FLOATS8.map(|t| (f, t))).enumerate() {
            for (rope_dim, nope_dim, vo) in [(64, 64, 128), (6, 0, 5), (10, 9, 19)] {
                let rope = ropes()[(i + rope_dim) % 4];
                let what = format!("{exec:?} {from} to {to}, {rope_dim} {nope_dim} {rope:?}");
                let q = rng.tensor(from, &[5, 4, rope_dim]);
                // The parts of a key as slices of one tensor.
                let k = rng.tensor(from, &[5, 2, rope_dim + nope_dim]);
                let (k_rope, k_nope) = (
                    k.view().slice(2, 0..rope_dim).unwrap(),
                    k.view().slice(2, rope_dim..rope_dim + nope_dim).unwrap(),
                );
                let v = rng.tensor(from, &[5, 2, vo]);
                let before = pools(&mut rng, to, 2, [rope_dim + nope_dim, vo]);
                let [mut k_after, mut v_after] = before.clone();
                let mut q_out = zeros_like(&q, to);
                let cache = PagedKvMut::new(k_after.view_mut(), v_after.view_mut(), KvLayout::Nhd).unwrap();
                rope_quantize_append_paged_kv(
                    exec,
                    Roped { rope: q.view(), rope_out: q_out.view_mut(), nope: None, scale: 0.5 },
                    RopedKv {
                        rope: k_rope,
                        nope: (nope_dim > 0).then_some(k_nope),
                        v: v.view(),
                        slots: Slots::Mapping(slots.view()),
                        cache: cache.with_scales(0.37, 2.0).unwrap(),
                    },
                    Positions::Ids(pos.view()),
                    rope,
                )
                .expect(&what);
                assert_matches(&what, q_out.view(), rope_dim, |p| {
                    reference::rope::rope_quantize(p, q.view(), &POSITIONS, &rope, 0.5)
                });
                // The rotation of a whole key with a part that stays is the partial one.
                let partial = Rope { rotary_dim: Some(rope_dim), ..rope };
                assert_matches(&what, k_after.view(), rope_dim + nope_dim, |p| {
                    let rotated = reference::rope::apply_rope(p, k.view(), &POSITIONS, &partial)?;
                    reference::page::append_values(p, before[0].view(), &rotated, &wanted(), 0.37)
                });
                assert_matches(&what, v_after.view(), vo, |p| {
                    reference::page::append(p, before[1].view(), v.view(), &wanted(), 2.0)
                });
            }
        }
    });
}

#[test]
fn fused_append_of_f32_is_the_composition_bit_for_bit() {
    let (pos, slots) = (ids(&POSITIONS), ids(&SLOTS));
    let (positions, slots) = (Positions::Ids(pos.view()), Slots::Mapping(slots.view()));
    every_exec(|exec| {
        let mut rng = Rng::new(8);
        for rope in ropes() {
            let partial = Rope { rotary_dim: Some(22), ..rope };
            let (q, k, v) = (
                rng.tensor(DType::F32, &[5, 4, 32]),
                rng.tensor(DType::F32, &[5, 2, 32]),
                rng.tensor(DType::F32, &[5, 2, 48]),
            );
            let (q2, k2) = rotated(exec, q.view(), k.view(), positions, partial).unwrap();
            let fused = |out: &mut Tensor, cache: PagedKvMut<'_>| {
                let q = Roped { rope: q.view(), rope_out: out.view_mut(), nope: None, scale: 1.0 };
                let kv = RopedKv { rope: k.view(), nope: None, v: v.view(), slots, cache };
                rope_quantize_append_paged_kv(exec, q, kv, positions, partial).unwrap();
            };
            for to in FLOATS8 {
                let [mut one, mut two] = [(); 2].map(|()| [32, 48].map(|d| Tensor::zeros(to, &[3, 4, 2, d]).unwrap()));
                let mut q_out = zeros_like(&q, DType::F32);
                let [ck, cv] = &mut one;
                let target = PagedKvMut::new(ck.view_mut(), cv.view_mut(), KvLayout::Nhd).unwrap();
                fused(&mut q_out, target.with_scales(0.37, 0.11).unwrap());
                let [ck, cv] = &mut two;
                let target = PagedKvMut::new(ck.view_mut(), cv.view_mut(), KvLayout::Nhd).unwrap();
                append_paged_kv(exec, k2.view(), v.view(), slots, target.with_scales(0.37, 0.11).unwrap()).unwrap();
                for (one, two) in one.iter().zip(&two) {
                    assert_eq!(one.view().to_f32_vec().unwrap(), two.view().to_f32_vec().unwrap());
                }
                assert_eq!(q_out.view().to_f32_vec().unwrap(), q2.view().to_f32_vec().unwrap());
            }
            // NVFP4: codes and scales.
            let new = || {
                let codes = [16, 24].map(|d| Tensor::zeros(DType::E2M1x2, &[3, 4, 2, d]).unwrap());
                (codes, [2, 3].map(|d| Tensor::zeros(DType::E4M3, &[3, 4, 2, d]).unwrap()))
            };
            let (mut one, mut two) = (new(), new());
            fn target<'a>(c: &'a mut ([Tensor; 2], [Tensor; 2])) -> PagedKvMut<'a> {
                let ([k, v], [ks, vs]) = c;
                PagedKvMut::nvfp4(k.view_mut(), v.view_mut(), ks.view_mut(), vs.view_mut(), KvLayout::Nhd)
                    .and_then(|c| c.with_scales(0.02, 0.5))
                    .unwrap()
            }
            fused(&mut zeros_like(&q, DType::E4M3), target(&mut one));
            append_paged_kv(exec, k2.view(), v.view(), slots, target(&mut two)).unwrap();
            for i in 0..2 {
                let codes = |c: &([Tensor; 2], [Tensor; 2])| c.0[i].as_slice::<fir::tensor::E2m1x2>().unwrap().to_vec();
                assert_eq!(codes(&one), codes(&two));
                assert!(codes(&one).iter().any(|c| c.0 != 0));
                assert_eq!(one.1[i].view().to_f32_vec().unwrap(), two.1[i].view().to_f32_vec().unwrap());
            }
        }
    });
}

#[test]
fn latent_rope_quantize_append_matches_reference_and_composition() {
    let (pos, slots) = (ids(&POSITIONS), ids(&SLOTS));
    let (positions, slots) = (Positions::Ids(pos.view()), Slots::Mapping(slots.view()));
    every_exec(|exec| {
        let mut rng = Rng::new(9);
        for (from, to) in FLOATS.iter().flat_map(|&f| FLOATS8.map(|t| (f, t))) {
            let rope = Rope { interleave: true, ..Rope::default() };
            let what = format!("{exec:?} {from} to {to}");
            let (q_pe, q_nope) = (rng.tensor(from, &[5, 4, 64]), rng.tensor(from, &[5, 4, 100]));
            let (kpe, ckv) = (rng.tensor(from, &[5, 64]), rng.tensor(from, &[5, 100]));
            let before = [100, 64].map(|d| rng.tensor(to, &[3, 4, d]));
            let [mut ckv_after, mut kpe_after] = before.clone();
            let (mut q_pe_out, mut q_nope_out) = (zeros_like(&q_pe, to), zeros_like(&q_nope, to));
            let cache = PagedMlaMut::new(ckv_after.view_mut(), kpe_after.view_mut()).unwrap();
            let q = Roped {
                rope: q_pe.view(),
                rope_out: q_pe_out.view_mut(),
                nope: Some((q_nope.view(), q_nope_out.view_mut())),
                scale: 2.0,
            };
            let kv = RopedMla { kpe: kpe.view(), ckv: ckv.view(), slots, cache: cache.with_scales(0.3, 0.7).unwrap() };
            rope_quantize_append_paged_mla(exec, q, kv, positions, rope).expect(&what);
            assert_matches(&what, q_pe_out.view(), 64, |p| {
                reference::rope::rope_quantize(p, q_pe.view(), &POSITIONS, &rope, 2.0)
            });
            assert_matches(&what, q_nope_out.view(), 100, |p| divided(p, q_nope.view(), 2.0));
            let one_head = kpe.view().reshape(&[5, 1, 64]).unwrap();
            assert_matches(&what, kpe_after.view(), 64, |p| {
                let rotated = reference::rope::apply_rope(p, one_head, &POSITIONS, &rope)?;
                reference::page::append_values(p, before[1].view(), &rotated, &wanted(), 0.7)
            });
            assert_matches(&what, ckv_after.view(), 100, |p| {
                reference::page::append(p, before[0].view(), ckv.view(), &wanted(), 0.3)
            });
            if from == DType::F32 {
                let none = Tensor::zeros(from, &[5, 0, 64]).unwrap();
                let (kpe2, _) = rotated(exec, one_head, none.view(), positions, rope).unwrap();
                let [mut ckv2, mut kpe_cache2] = before.clone();
                let cache = PagedMlaMut::new(ckv2.view_mut(), kpe_cache2.view_mut()).unwrap().with_scales(0.3, 0.7);
                let kpe2 = kpe2.reshaped(&[5, 64]).unwrap();
                append_paged_mla(exec, ckv.view(), kpe2.view(), slots, cache.unwrap()).unwrap();
                assert_eq!(ckv2.view().to_f32_vec().unwrap(), ckv_after.view().to_f32_vec().unwrap());
                assert_eq!(kpe_cache2.view().to_f32_vec().unwrap(), kpe_after.view().to_f32_vec().unwrap());
            }
        }
    });
}

#[test]
fn fused_arguments_are_all_checked_before_anything_is_written() {
    let exec = Exec::cpu().unwrap();
    let ones = |dtype, shape: &[usize]| Tensor::from_f32(dtype, &vec![1.0; shape.iter().product()], shape).unwrap();
    let (q, k, v) = (ones(DType::F16, &[2, 2, 8]), ones(DType::F16, &[2, 1, 8]), ones(DType::F16, &[2, 1, 4]));
    let run = |k: &Tensor, nope: Option<&Tensor>, v: &Tensor, slots: [i64; 2], rope: Rope, out: DType, scale: f32| {
        let (pos, slots) = (ids(&[0, 1]), ids(&slots));
        let mut q_out = Tensor::zeros(out, &[2, 2, 8]).unwrap();
        let [mut ck, mut cv] = [8, 4].map(|d| Tensor::zeros(DType::E4M3, &[2, 4, 1, d]).unwrap());
        let err = rope_quantize_append_paged_kv(
            &exec,
            Roped { rope: q.view(), rope_out: q_out.view_mut(), nope: None, scale },
            RopedKv {
                rope: k.view(),
                nope: nope.map(Tensor::view),
                v: v.view(),
                slots: Slots::Mapping(slots.view()),
                cache: PagedKvMut::new(ck.view_mut(), cv.view_mut(), KvLayout::Nhd).unwrap(),
            },
            Positions::Ids(pos.view()),
            rope,
        )
        .unwrap_err();
        if out == DType::E4M3 {
            for t in [&q_out, &ck, &cv] {
                assert!(t.view().to_f32_vec().unwrap().iter().all(|&x| x == 0.0), "written in spite of: {err}");
            }
        }
        err.to_string()
    };
    let (rope, fp8) = (Rope::default(), DType::E4M3);
    assert!(run(&k, None, &v, [0, 8], rope, fp8, 1.0).contains("8 at token 1"));
    assert!(run(&k, None, &v, [3, 3], rope, fp8, 1.0).contains("tokens 0 and 1"));
    assert!(run(&k, None, &v, [0, 1], Rope { theta: -1.0, ..rope }, fp8, 1.0).contains("theta -1"));
    assert!(run(&k, None, &v, [0, 1], rope, DType::I8, 1.0).contains("`q.rope_out` is i8"));
    assert!(run(&k, None, &v, [0, 1], rope, fp8, f32::NAN).contains("`q.scale` is NaN"));
    assert!(run(&k, None, &v, [0, 1], rope, fp8, 0.0).contains("`q.scale` is 0"));
    assert!(run(&k, Some(&v), &v, [0, 1], rope, fp8, 1.0).contains("head_dim_qk=8"));
    assert!(
        run(&k, Some(&ids(&[1, 1]).reshaped(&[2, 1, 1]).unwrap()), &v, [0, 1], rope, fp8, 1.0)
            .contains("`kv.nope` is i64")
    );
    assert!(run(&k, None, &k, [0, 1], rope, fp8, 1.0).contains("head_dim_vo=4"));
    assert!(run(&ones(DType::F16, &[2, 1, 6]), None, &v, [0, 1], rope, fp8, 1.0).contains("rope_dim=6"));
    assert!(run(&ones(DType::F16, &[3, 1, 8]), None, &v, [0, 1], rope, fp8, 1.0).contains("nnz=3"));
}
