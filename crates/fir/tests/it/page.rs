use fir::kv::{KvLayout, PageTable, PagedKvMut, PagedMlaMut, Ragged};
use fir::page::{Slots, append_paged_kv, append_paged_mla, batch_indices_positions, seq_lens};
use fir::reference::{self, Precision};
use fir::tensor::{E2m1x2, E4m3};
use fir::testing::Rng;
use fir::{DType, Exec, Tensor, TensorMut, TensorRef};

use crate::support::{FLOATS, assert_matches, every_exec};

const FLOATS8: [DType; 5] = [DType::F32, DType::F16, DType::BF16, DType::E4M3, DType::E5M2];

/// Three requests of 9, 0 and 6 tokens in pages of 4, of which the last 3, 0 and 6 are new; unused slots are hostile.
const INDPTR: [i32; 4] = [0, 4, 5, 7];
const INDICES: [i32; 7] = [6, 0, 3, -9, 1 << 30, 5, 1];
const LENS: [i32; 3] = [9, 0, 6];
const BATCH: [i32; 9] = [0, 0, 0, 2, 2, 2, 2, 2, 2];
const POSITIONS: [i64; 9] = [6, 7, 8, 0, 1, 2, 3, 4, 5];
const PAGES: usize = 7;
const PAGE_SIZE: usize = 4;

fn table() -> PageTable<'static> {
    PageTable::with_lens(PAGE_SIZE, PAGES, &INDPTR[..], &INDICES[..], &LENS).unwrap()
}

/// The same, as slots of the pool.
fn wanted() -> Vec<Option<usize>> {
    [2, 3, 12, 20, 21, 22, 23, 4, 5].map(Some).to_vec()
}

fn ints<T: fir::tensor::Element>(x: &[T]) -> Tensor {
    Tensor::from_slice(x, &[x.len()]).unwrap()
}

/// A pool's tensor in `layout`, and its `[pages, page_size, heads, dim]` view.
fn pool(rng: &mut Rng, dtype: DType, layout: KvLayout, heads: usize, dim: usize) -> Tensor {
    match layout {
        KvLayout::Nhd => rng.tensor(dtype, &[PAGES, PAGE_SIZE, heads, dim]),
        KvLayout::Hnd => rng.tensor(dtype, &[PAGES, heads, PAGE_SIZE, dim]),
    }
}

fn nhd(t: &Tensor, layout: KvLayout) -> TensorRef<'_> {
    match layout {
        KvLayout::Nhd => t.view(),
        KvLayout::Hnd => t.view().transpose(1, 2).unwrap(),
    }
}

/// The row of a head in a slot.
fn at(pool: TensorRef<'_>, slot: usize, head: usize) -> TensorRef<'_> {
    let page = pool.select(0, slot / PAGE_SIZE).unwrap();
    page.select(0, slot % PAGE_SIZE).unwrap().select(0, head).unwrap()
}

/// Within the comparer, and the exact quotient rounded once: append has no freedom.
#[track_caller]
fn assert_stored(what: &str, before: TensorRef<'_>, after: TensorRef<'_>, x: TensorRef<'_>, scale: f32) {
    let row = *after.shape().last().unwrap();
    let append = |p| reference::page::append(p, before, x, &wanted(), scale);
    assert_matches(what, after, row, append);
    for (i, (got, exact)) in after.to_f32_vec().unwrap().into_iter().zip(append(Precision::Exact).unwrap()).enumerate()
    {
        assert_eq!(f64::from(got), reference::round(after.dtype(), exact), "{what}: element {i}");
    }
}

#[test]
fn append_matches_reference_for_every_type_and_layout() {
    let (batch_indices, positions, table) = (ints(&BATCH), ints(&POSITIONS), table());
    let slots = Slots::Tokens { table: &table, batch_indices: batch_indices.view(), positions: positions.view() };
    every_exec(|exec| {
        let mut rng = Rng::new(1);
        for (from, to) in FLOATS.iter().flat_map(|&f| FLOATS8.map(|t| (f, t))) {
            for (heads, qk, vo) in [(1, 1, 3), (2, 16, 16), (3, 40, 33), (2, 128, 64)] {
                for layout in [KvLayout::Nhd, KvLayout::Hnd] {
                    // Strided tokens: k and v are parts of one projection.
                    let kv = rng.tensor(from, &[9, heads, qk + vo]);
                    let (k, v) = (kv.view().slice(2, 0..qk).unwrap(), kv.view().slice(2, qk..qk + vo).unwrap());
                    let before = [qk, vo].map(|dim| pool(&mut rng, to, layout, heads, dim));
                    let [mut k_after, mut v_after] = before.clone();
                    let scales = [[1.0, 1.0], [0.37, 2.0]][heads % 2];
                    let cache = PagedKvMut::new(k_after.view_mut(), v_after.view_mut(), layout).unwrap();
                    let cache = cache.with_scales(scales[0], scales[1]).unwrap();
                    append_paged_kv(exec, k, v, slots, cache).unwrap();
                    let what = format!("{exec:?} {from} to {to}, {heads} heads of {qk} and {vo}, {layout:?}");
                    assert_stored(&what, nhd(&before[0], layout), nhd(&k_after, layout), k, scales[0]);
                    assert_stored(&what, nhd(&before[1], layout), nhd(&v_after, layout), v, scales[1]);
                }
            }
        }
    });
}

/// Page ids that a device has a copy of, and those that it alone knows, whose unused slots hold anything.
#[cfg(feature = "cuda")]
#[test]
fn tables_on_a_device_are_followed() {
    let Some(exec @ Exec::Cuda(gpu)) = crate::support::gpu() else { return };
    let (batch_indices, positions, ids) = (ints(&BATCH), ints(&POSITIONS), ints(&INDICES).to_device(gpu).unwrap());
    let copied = table().to_device(gpu).unwrap();
    let alone = PageTable::on_device(gpu, PAGE_SIZE, 1, &INDPTR, ids.view(), &LENS).unwrap();
    // In the memory of a larger table, of one that is too small, and of one that has a clone.
    let other = |slots: i32| {
        let ids: Vec<_> = (0..slots).rev().map(|i| i % PAGES as i32).collect();
        PageTable::with_lens(PAGE_SIZE, PageTable::FEWEST, vec![0, slots], ids, &[slots])
            .unwrap()
            .to_device(gpu)
            .unwrap()
    };
    let (shared, spent) = (other(900), |spent| table().into_device_over(gpu, Some(spent)).unwrap());
    let over = [other(900), other(1), shared.clone()].map(spent);
    let mut rng = Rng::new(7);
    for table in [&copied, &alone].into_iter().chain(&over) {
        let slots = Slots::Tokens { table, batch_indices: batch_indices.view(), positions: positions.view() };
        let x = rng.tensor(DType::BF16, &[9, 2, 16]);
        let before = pool(&mut rng, DType::BF16, KvLayout::Nhd, 2, 16);
        let (mut k, mut v) = (before.clone(), before.clone());
        let cache = PagedKvMut::new(k.view_mut(), v.view_mut(), KvLayout::Nhd).unwrap();
        append_paged_kv(exec, x.view(), x.view(), slots, cache).unwrap();
        assert_stored("keys", before.view(), k.view(), x.view(), 1.0);
        assert_stored("values", before.view(), v.view(), x.view(), 1.0);
        let rows = Tensor::from_f32(DType::BF16, &x.view().to_f32_vec().unwrap(), &[9, 32]).unwrap();
        let latent = rng.tensor(DType::BF16, &[PAGES, PAGE_SIZE, 32]);
        let (mut ckv, mut kpe) = (latent.clone(), latent.clone());
        let cache = PagedMlaMut::new(ckv.view_mut(), kpe.view_mut()).unwrap();
        append_paged_mla(exec, rows.view(), rows.view(), slots, cache).unwrap();
        for (slot, token) in wanted().into_iter().flatten().zip(0..) {
            let at = |t: &Tensor| {
                t.view().select(0, slot / PAGE_SIZE).unwrap().select(0, slot % PAGE_SIZE).unwrap().to_f32_vec()
            };
            let row = rows.view().select(0, token).unwrap().to_f32_vec().unwrap();
            assert_eq!((at(&ckv).unwrap(), at(&kpe).unwrap()), (row.clone(), row), "token {token}");
        }
    }
    // A CPU cannot follow what a device alone knows.
    let slots = Slots::Tokens { table: &alone, batch_indices: batch_indices.view(), positions: positions.view() };
    let (x, mut k) = (rng.tensor(DType::BF16, &[9, 2, 16]), pool(&mut rng, DType::BF16, KvLayout::Nhd, 2, 16));
    let mut v = k.clone();
    let cache = PagedKvMut::new(k.view_mut(), v.view_mut(), KvLayout::Nhd).unwrap();
    let error = append_paged_kv(&Exec::cpu().unwrap(), x.view(), x.view(), slots, cache).unwrap_err().to_string();
    assert!(error.contains("page table") && error.contains("host memory"), "{error}");
}

#[test]
fn large_and_strange_values_are_stored_as_the_type_says() {
    let x = [1e30, -1e30, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 449.0, -0.0, 1e-30];
    let k = Tensor::from_slice(&x, &[1, 1, 8]).unwrap();
    let slots = ints(&[3i64]);
    every_exec(|exec| {
        for to in FLOATS8 {
            let mut cache = [Tensor::zeros(to, &[1, 4, 1, 8]).unwrap(), Tensor::zeros(to, &[1, 4, 1, 8]).unwrap()];
            let [ck, cv] = &mut cache;
            let target = PagedKvMut::new(ck.view_mut(), cv.view_mut(), KvLayout::Nhd).unwrap();
            append_paged_kv(exec, k.view(), k.view(), Slots::Mapping(slots.view()), target).unwrap();
            let got = cache[0].view().to_f32_vec().unwrap();
            for (&got, &x) in got[24..].iter().zip(&x) {
                let want = reference::round(to, f64::from(x)) as f32;
                assert!(got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan(), "{to}: {x} is {got}");
            }
            assert!(got[..24].iter().all(|&x| x == 0.0));
            if to == DType::E4M3 {
                assert_eq!(got[24..28], [448.0, -448.0, 448.0, -448.0]);
            }
        }
    });
}

#[test]
fn nvfp4_append_matches_reference_bit_for_bit() {
    let slots = ints(&wanted().iter().map(|s| s.unwrap() as i32).collect::<Vec<_>>());
    every_exec(|exec| {
        let mut rng = Rng::new(2);
        for dtype in FLOATS {
            for (scale, heads, dim) in [(1.0, 2, 32), (0.37, 1, 16), (1e-3, 3, 128), (300.0, 1, 64)] {
                for layout in [KvLayout::Nhd, KvLayout::Hnd] {
                    // Magnitudes from nothing to beyond the format, zeros, and a NaN.
                    let mut data = rng.normals(9 * heads * dim);
                    for (i, x) in data.iter_mut().enumerate() {
                        *x *= [1.0, 1e-3, 0.0, 600.0, 1e-7][i / dim % 5];
                    }
                    data[dim - 1] = f32::NAN;
                    let x = Tensor::from_f32(dtype, &data, &[9, heads, dim]).unwrap();
                    let shape = |last| match layout {
                        KvLayout::Nhd => [PAGES, PAGE_SIZE, heads, last],
                        KvLayout::Hnd => [PAGES, heads, PAGE_SIZE, last],
                    };
                    let new = || {
                        (
                            Tensor::zeros(DType::E2M1x2, &shape(dim / 2)).unwrap(),
                            Tensor::zeros(DType::E4M3, &shape(dim / 16)).unwrap(),
                        )
                    };
                    let ((mut k, mut ks), (mut v, mut vs)) = (new(), new());
                    let cache = PagedKvMut::nvfp4(k.view_mut(), v.view_mut(), ks.view_mut(), vs.view_mut(), layout);
                    let cache = cache.unwrap().with_scales(scale, scale).unwrap();
                    append_paged_kv(exec, x.view(), x.view(), Slots::Mapping(slots.view()), cache).unwrap();
                    assert_eq!(k.as_slice::<E2m1x2>().unwrap(), v.as_slice::<E2m1x2>().unwrap());
                    assert_eq!(ks.as_slice::<E4m3>().unwrap(), vs.as_slice::<E4m3>().unwrap());

                    let values = reference::values(x.view()).unwrap();
                    let (codes, scales) = (nhd(&k, layout), nhd(&ks, layout));
                    let mut written = 0;
                    for (token, slot) in wanted().into_iter().enumerate() {
                        for head in 0..heads {
                            let (codes, scales) = (at(codes, slot.unwrap(), head), at(scales, slot.unwrap(), head));
                            let row = &values[(token * heads + head) * dim..][..dim];
                            let (want_codes, want_scales) =
                                reference::page::nvfp4(Precision::Naive(DType::F32), row, scale);
                            let got = codes.typed::<E2m1x2>("t", "k").unwrap();
                            let got: Vec<u8> = got.data().iter().flat_map(|c| [c.0 & 15, c.0 >> 4]).collect();
                            assert_eq!(got, want_codes, "{exec:?} {dtype} token {token} head {head}");
                            let got_scales = reference::values(scales).unwrap();
                            for (b, (&got, &want)) in got_scales.iter().zip(&want_scales).enumerate() {
                                assert!(got == want || got.is_nan() && want.is_nan(), "block {b}: {got} {want}");
                                // What the format promises: half a step of e2m1 and of e4m3, unless out of its range.
                                let block = &row[16 * b..][..16];
                                let largest = block.iter().fold(0.0, |m: f64, x| m.max(x.abs()));
                                let top = largest / 6.0 / f64::from(scale);
                                if got.is_finite() && (0.016..=448.0).contains(&top) {
                                    for (x, code) in block.iter().zip(&want_codes[16 * b..]) {
                                        let stored = f64::from(E2m1x2(*code).to_f32()[0]) * got * f64::from(scale);
                                        let bound = largest * (1.0 / 6.0 + 1.0 / 16.0);
                                        assert!((stored - x).abs() <= bound, "{x} is {stored}");
                                    }
                                }
                            }
                            written += 1;
                        }
                    }
                    assert_eq!(written, 9 * heads);
                    // Nothing else was touched.
                    let used = |slot: usize| wanted().contains(&Some(slot));
                    for slot in (0..PAGES * PAGE_SIZE).filter(|&s| !used(s)) {
                        let page = scales.select(0, slot / PAGE_SIZE).unwrap().select(0, slot % PAGE_SIZE).unwrap();
                        assert!(reference::values(page).unwrap().iter().all(|&x| x == 0.0));
                    }
                }
            }
        }
    });
}

#[test]
fn mla_append_matches_reference() {
    let (batch_indices, positions, table) = (ints(&BATCH), ints(&POSITIONS), table());
    let slots = Slots::Tokens { table: &table, batch_indices: batch_indices.view(), positions: positions.view() };
    every_exec(|exec| {
        let mut rng = Rng::new(3);
        for (from, to) in FLOATS.iter().flat_map(|&f| FLOATS8.map(|t| (f, t))) {
            for (c, p) in [(512, 64), (24, 0), (5, 7)] {
                let (ckv, kpe) = (rng.tensor(from, &[9, c]), rng.tensor(from, &[9, p]));
                let before = [c, p].map(|dim| rng.tensor(to, &[PAGES, PAGE_SIZE, dim]));
                let [mut ckv_after, mut kpe_after] = before.clone();
                let cache = PagedMlaMut::new(ckv_after.view_mut(), kpe_after.view_mut()).unwrap();
                let cache = cache.with_scales(0.5, 3.0).unwrap();
                append_paged_mla(exec, ckv.view(), kpe.view(), slots, cache).unwrap();
                let what = format!("{exec:?} {from} to {to}");
                assert_stored(&what, before[0].view(), ckv_after.view(), ckv.view(), 0.5);
                assert_stored(&what, before[1].view(), kpe_after.view(), kpe.view(), 3.0);
            }
        }
    });
}

#[test]
fn a_large_append_is_the_same_for_any_threads_and_mapping() {
    let (pages, n) = (100, 300);
    let mut rng = Rng::new(4);
    let (k, v) = (rng.tensor(DType::BF16, &[n, 4, 64]), rng.tensor(DType::BF16, &[n, 4, 64]));
    // A permutation of the slots; every fifth token is padding.
    let mut slots: Vec<i64> = (0..pages as i64 * 4).collect();
    (0..slots.len()).for_each(|i| slots.swap(i, i + Rng::new(i as u64).below(400 - i)));
    slots.truncate(n);
    slots.iter_mut().step_by(5).for_each(|s| *s = -1 - *s);
    let slots = ints(&slots);
    let before = rng.tensor(DType::E4M3, &[pages, 4, 4, 64]);
    let wanted: Vec<_> = slots.as_slice::<i64>().unwrap().iter().map(|&s| usize::try_from(s).ok()).collect();
    every_exec(|exec| {
        let (mut ck, mut cv) = (before.clone(), before.clone());
        let cache = PagedKvMut::new(ck.view_mut(), cv.view_mut(), KvLayout::Nhd).unwrap();
        append_paged_kv(exec, k.view(), v.view(), Slots::Mapping(slots.view()), cache).unwrap();
        for (x, after) in [(&k, &ck), (&v, &cv)] {
            let want = reference::page::append(Precision::Exact, before.view(), x.view(), &wanted, 1.0).unwrap();
            let want: Vec<f32> = want.into_iter().map(|x| reference::round(DType::E4M3, x) as f32).collect();
            assert_eq!(after.view().to_f32_vec().unwrap(), want);
        }
    });
}

#[test]
fn bad_slots_are_refused_and_nothing_is_written() {
    let exec = Exec::cpu().unwrap();
    let mut rng = Rng::new(5);
    let x = rng.tensor(DType::F16, &[2, 1, 8]);
    let table = table();
    let mut cache = [PAGES, PAGES].map(|pages| Tensor::zeros(DType::F16, &[pages, PAGE_SIZE, 1, 8]).unwrap());
    let mut refused = |slots: Slots<'_>, k: TensorRef<'_>| {
        let [ck, cv] = &mut cache;
        let target = PagedKvMut::new(ck.view_mut(), cv.view_mut(), KvLayout::Nhd).unwrap();
        let err = append_paged_kv(&exec, k, x.view(), slots, target).unwrap_err().to_string();
        for c in &cache {
            assert!(c.view().to_f32_vec().unwrap().iter().all(|&x| x == 0.0), "written in spite of: {err}");
        }
        err
    };
    let mut tokens = |batch: [i32; 2], positions: [i64; 2]| {
        let (b, p) = (ints(&batch), ints(&positions));
        refused(Slots::Tokens { table: &table, batch_indices: b.view(), positions: p.view() }, x.view())
    };
    assert_eq!(
        tokens([0, 0], [0, 9]),
        "append_paged_kv: `positions` is 9 at token 1, expected 0 or more and below 9, the length of request 0"
    );
    assert!(tokens([0, 1], [0, 0]).contains("below 0, the length of request 1"));
    assert!(tokens([0, 3], [0, 0]).contains("`batch_indices` is 3 at token 1"));
    assert!(tokens([0, -1], [0, 0]).contains("`batch_indices` is -1"));
    assert!(tokens([0, 0], [0, -1]).contains("`positions` is -1"));
    assert!(tokens([0, 0], [i64::MAX, 0]).contains("9223372036854775807 at token 0"));
    assert!(tokens([0, 0], [5, 5]).contains("tokens 0 and 1 at page 0, offset 1"));

    let mut mapped = |slots: &Tensor, k: &Tensor| refused(Slots::Mapping(slots.view()), k.view());
    assert!(mapped(&ints(&[0i64, 28]), &x).contains("28 at token 1, expected below 28"));
    assert!(mapped(&ints(&[i64::MAX, 0]), &x).contains("at token 0"));
    assert!(mapped(&ints(&[3i32, 3]), &x).contains("tokens 0 and 1"));
    assert!(mapped(&ints(&[3i32]), &x).contains("nnz=1"));
    assert!(mapped(&ints(&[1.0f32, 2.0]), &x).contains("i32 or i64"));
    let good = ints(&[1i32, 2]);
    assert!(mapped(&good, &Tensor::zeros(DType::F16, &[2, 2, 8]).unwrap()).contains("kv_heads"));
    assert!(mapped(&good, &Tensor::zeros(DType::F16, &[2, 1, 9]).unwrap()).contains("head_dim_qk=8"));
    assert!(mapped(&good, &Tensor::zeros(DType::I8, &[2, 1, 8]).unwrap()).contains("`k` is i8"));
    assert!(mapped(&good, &Tensor::zeros(DType::F16, &[2, 8]).unwrap()).contains("axes"));

    let other = PageTable::with_lens(8, PAGES, &INDPTR[..], &INDICES[..], &LENS).unwrap();
    let (b, p) = (ints(&[0i32, 0]), ints(&[0i32, 1]));
    let slots = Slots::Tokens { table: &other, batch_indices: b.view(), positions: p.view() };
    assert!(refused(slots, x.view()).contains("page_size=8"));
    let larger = PageTable::with_lens(PAGE_SIZE, PAGES + 1, &INDPTR[..], &INDICES[..], &LENS).unwrap();
    let slots = Slots::Tokens { table: &larger, batch_indices: b.view(), positions: p.view() };
    assert!(refused(slots, x.view()).contains("at most the 7 of `cache`"));
}

#[test]
fn nothing_to_append_is_no_error() {
    let exec = Exec::cpu().unwrap();
    for (nnz, heads, dim, pages) in [(0, 2, 8, 3), (0, 2, 8, 0), (2, 0, 8, 3), (2, 2, 0, 3)] {
        let x = Tensor::zeros(DType::F32, &[nnz, heads, dim]).unwrap();
        let slots = ints(&(0..nnz as i32).collect::<Vec<_>>());
        let mut cache = [0, 1].map(|_| Tensor::zeros(DType::F32, &[pages, 4, heads, dim]).unwrap());
        let [k, v] = &mut cache;
        let cache = PagedKvMut::new(k.view_mut(), v.view_mut(), KvLayout::Nhd).unwrap();
        append_paged_kv(&exec, x.view(), x.view(), Slots::Mapping(slots.view()), cache).unwrap();
    }
}

#[test]
fn positions_and_lengths_are_those_of_the_requests() {
    let exec = Exec::cpu().unwrap();
    let indptr = Ragged::new(&[0, 3, 3, 9]).unwrap();
    let (mut b, mut p) = (ints(&[-7i32; 9]), ints(&[-7i32; 9]));
    batch_indices_positions(&exec, &indptr, ints(&LENS).view(), b.view_mut(), p.view_mut()).unwrap();
    assert_eq!(b.as_slice::<i32>().unwrap(), BATCH);
    assert_eq!(p.as_slice::<i32>().unwrap(), POSITIONS.map(|p| p as i32));
    // Strided outputs.
    let mut both = [0i32; 18];
    let (left, right) = both.split_at_mut(9);
    let left = TensorMut::new(left, &[9]).unwrap();
    batch_indices_positions(&exec, &indptr, ints(&LENS).view(), left, TensorMut::new(right, &[9]).unwrap()).unwrap();
    assert_eq!(both[9..], POSITIONS.map(|p| p as i32));
    let err = batch_indices_positions(&exec, &indptr, ints(&[2i64, 0, 6]).view(), b.view_mut(), p.view_mut());
    assert!(err.unwrap_err().to_string().contains("`seq_lens` is 2 at request 0, expected 3"));
    let err = batch_indices_positions(&exec, &indptr, ints(&[3i32, 0]).view(), b.view_mut(), p.view_mut());
    assert!(err.unwrap_err().to_string().contains("batch=2"));
    let mut short = ints(&[0i32; 8]);
    assert!(batch_indices_positions(&exec, &indptr, ints(&LENS).view(), short.view_mut(), p.view_mut()).is_err());

    let pages = Ragged::new(&[0, 3, 3, 5]).unwrap();
    let mut out = ints(&[-7i32; 3]);
    seq_lens(&exec, &pages, ints(&[1i32, 4, 2]).view(), 4, out.view_mut()).unwrap();
    assert_eq!(out.as_slice::<i32>().unwrap(), LENS);
    assert!(seq_lens(&exec, &pages, ints(&[5i32, 4, 2]).view(), 4, out.view_mut()).is_err());
    assert!(seq_lens(&exec, &pages, ints(&[-1i32, 4, 2]).view(), 4, out.view_mut()).is_err());
    assert!(seq_lens(&exec, &pages, ints(&[1i32, 4, 2]).view(), usize::MAX, out.view_mut()).is_err());
}
