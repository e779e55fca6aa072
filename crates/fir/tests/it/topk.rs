use fir::reference::{self, topk::top_places};
use fir::testing::Rng;
use fir::topk::{self, TopKOrder, TopKPages, TopKRagged};
use fir::{DType, Exec, Tensor, TensorMut, TensorRef};

use crate::support::{FLOATS, every_exec};

fn ints(x: &[i32]) -> TensorRef<'_> {
    TensorRef::new(x, &[x.len()]).unwrap()
}

#[track_caller]
fn check(what: &str, exec: &Exec, x: TensorRef<'_>, k: usize) {
    let rows = x.shape()[0];
    let flat = x.to_f32_vec().unwrap();
    let n = x.shape()[1];
    for order in [TopKOrder::Place, TopKOrder::Value] {
        let want = reference::topk::top_k(x, k, order == TopKOrder::Value).unwrap();
        for dtype in [DType::I32, DType::I64] {
            let mut values = Tensor::zeros(x.dtype(), &[rows, k]).unwrap();
            let mut indices = Tensor::zeros(dtype, &[rows, k]).unwrap();
            topk::top_k(exec, x, order, values.view_mut(), indices.view_mut()).unwrap();
            let got: Vec<i64> = match dtype {
                DType::I32 => indices.as_slice::<i32>().unwrap().iter().map(|&i| i.into()).collect(),
                _ => indices.as_slice::<i64>().unwrap().to_vec(),
            };
            assert_eq!(got, want, "{what} {order:?}");
            for (j, (&i, v)) in got.iter().zip(values.view().to_f32_vec().unwrap()).enumerate() {
                let want = if i < 0 { f32::NEG_INFINITY } else { flat[j / k * n + i as usize] };
                assert_eq!(v, want, "{what} {order:?} {j}");
            }
        }
    }
}

#[test]
fn top_k_matches_reference_at_every_length_and_type() {
    every_exec(|exec| {
        let mut rng = Rng::new(1);
        for dtype in FLOATS {
            for n in [1, 2, 7, 8, 9, 16, 17, 31, 64, 130, 700] {
                let x = rng.tensor(dtype, &[3, n]);
                for k in [0, 1, 2, 5, 8, n / 2, n - 1, n, n + 3] {
                    check(&format!("{exec:?} {dtype} {n} {k}"), exec, x.view(), k);
                }
            }
        }
        let x = rng.tensor(DType::F32, &[2, 3000]);
        for k in [1, 10, 90, 500] {
            check(&format!("{exec:?} {k}"), exec, x.view(), k);
        }
    });
}

#[test]
fn ties_go_to_the_first_and_nan_is_never_taken() {
    let (inf, nan) = (f32::INFINITY, f32::NAN);
    every_exec(|exec| {
        for n in [12, 40, 600] {
            let cycle = [2.0, -1.0, 2.0, nan, 0.0, -0.0, inf, -inf, 1.0];
            let mut x: Vec<f32> = (0..4 * n).map(|i| cycle[i * i % 9]).collect();
            x[n..2 * n].fill(3.0);
            x[2 * n..3 * n].fill(nan);
            x[2 * n + 5] = -inf;
            x[3 * n..].fill(-inf);
            let x = TensorRef::new(&x, &[4, n]).unwrap();
            for k in [1, 2, 3, n / 3, n / 2, n - 1, n, n + 1] {
                check(&format!("{exec:?} {n} {k}"), exec, x, k);
            }
        }
    });
}

#[test]
fn strided_rows_are_read_and_written() {
    every_exec(|exec| {
        let mut rng = Rng::new(2);
        let data = rng.normals(5 * 50);
        let x = TensorRef::strided(&data, &[5, 33], &[50, 1]).unwrap();
        check(&format!("{exec:?}"), exec, x, 4);
        let (mut values, mut indices) = (vec![9f32; 40], vec![9i32; 40]);
        let v = TensorMut::strided(&mut values, &[5, 4], &[8, 1]).unwrap();
        let i = TensorMut::strided(&mut indices, &[5, 4], &[8, 1]).unwrap();
        topk::top_k(exec, x, TopKOrder::Place, v, i).unwrap();
        let want = reference::topk::top_k(x, 4, false).unwrap();
        for (r, row) in indices.chunks(8).enumerate() {
            assert!(row[..4].iter().zip(&want[r * 4..]).all(|(&a, &b)| i64::from(a) == b));
            assert_eq!(row[4..], [9; 4]);
        }
        assert!(values.chunks(8).all(|row| row[4..] == [9.0; 4]));
    });
}

#[test]
fn page_table_transform_matches_reference() {
    every_exec(|exec| {
        let mut rng = Rng::new(3);
        for (page_size, with_starts) in [(1, false), (1, true), (4, false), (16, true)] {
            for dtype in FLOATS {
                let (rows, max_len, requests, max_pages, k) = (6, 90, 3, 120, 10);
                let x = rng.tensor(dtype, &[rows, max_len]);
                // Pages that no row reaches hold what may not be used.
                let mut table: Vec<i32> = vec![-5; requests * max_pages];
                let lens = [90, 0, 1, 10, 11, 57];
                let starts = if with_starts { [0, 90, 3, 80, 2, 33] } else { [0; 6] };
                let page_starts = if with_starts && page_size > 1 { [0, 500, 3, 1, 2, 7] } else { starts };
                let owner = [2, 0, 1, 1, 0, 2];
                for r in 0..rows {
                    for p in 0..(lens[r] as usize).div_ceil(page_size) {
                        table[owner[r] as usize * max_pages + page_starts[r] as usize + p] = rng.below(1000) as i32;
                    }
                }
                let scores: Vec<f64> = reference::values(x.view()).unwrap();
                let (mut out, mut raw) = (vec![7i32; rows * k], vec![7i32; rows * k]);
                let with = with_starts.then_some(());
                topk::top_k_page_table_transform(
                    exec,
                    TopKPages {
                        scores: x.view(),
                        lens: ints(&lens),
                        starts: with.map(|()| ints(&starts)),
                        page_table: TensorRef::new(&table, &[requests, max_pages]).unwrap(),
                        requests: Some(ints(&owner)),
                        page_starts: with.filter(|()| page_size > 1).map(|()| ints(&page_starts)),
                        page_size,
                        out: TensorMut::new(&mut out, &[rows, k]).unwrap(),
                        raw: Some(TensorMut::new(&mut raw, &[rows, k]).unwrap()),
                    },
                )
                .unwrap();
                for r in 0..rows {
                    let (start, len) = (starts[r] as usize, lens[r] as usize);
                    let places = top_places(&scores[r * max_len + start..][..len], k);
                    for j in 0..k {
                        let (want, want_raw) = places.get(j).map_or((-1, -1), |&i| {
                            let page = owner[r] as usize * max_pages + page_starts[r] as usize + i / page_size;
                            (table[page] * page_size as i32 + (i % page_size) as i32, i as i32)
                        });
                        assert_eq!((out[r * k + j], raw[r * k + j]), (want, want_raw), "{exec:?} {page_size} {r} {j}");
                    }
                }
            }
        }
    });
}

#[test]
fn ragged_transform_matches_reference() {
    every_exec(|exec| {
        let mut rng = Rng::new(4);
        for dtype in FLOATS {
            let (rows, max_len, k) = (5, 70, 8);
            let x = rng.tensor(dtype, &[rows, max_len]);
            let (lens, starts, offsets) = ([70, 8, 0, 3, 40], [0, 62, 70, 10, 29], [0, 1000, 5, i32::MAX - 3, 7]);
            for starts in [None, Some(starts)] {
                let mut out = vec![3i32; rows * k];
                topk::top_k_ragged_transform(
                    exec,
                    TopKRagged {
                        scores: x.view(),
                        lens: ints(&lens),
                        starts: starts.as_ref().map(|s| ints(s)),
                        offsets: ints(&offsets),
                        out: TensorMut::new(&mut out, &[rows, k]).unwrap(),
                    },
                )
                .unwrap();
                let scores = reference::values(x.view()).unwrap();
                for r in 0..rows {
                    let start = starts.map_or(0, |s| s[r] as usize);
                    let places = top_places(&scores[r * max_len + start..][..lens[r] as usize], k);
                    for j in 0..k {
                        let want = places.get(j).map_or(-1, |&i| offsets[r] + i as i32);
                        assert_eq!(out[r * k + j], want, "{exec:?} {r} {j}");
                    }
                }
            }
        }
    });
}

#[test]
fn bad_arguments_are_errors() {
    let exec = &Exec::cpu().unwrap();
    let x = [1.0f32; 8];
    let x = TensorRef::new(&x, &[2, 4]).unwrap();
    let table = [3i32, -1, i32::MAX, 0];
    let call = |lens: [i32; 2], starts: Option<[i32; 2]>, requests: [i32; 2], page_size: usize| {
        let mut out = [0i32; 4];
        topk::top_k_page_table_transform(
            exec,
            TopKPages {
                scores: x,
                lens: ints(&lens),
                starts: starts.as_ref().map(|s| ints(s)),
                page_table: TensorRef::new(&table, &[2, 2]).unwrap(),
                requests: Some(ints(&requests)),
                page_starts: None,
                page_size,
                out: TensorMut::new(&mut out, &[2, 2]).unwrap(),
                raw: None,
            },
        )
        .map(|()| out)
        .map_err(|e| e.to_string())
    };
    assert_eq!(call([1, 1], None, [0, 1], 1), Ok([3, -1, i32::MAX, -1]));
    assert_eq!(call([1, 2], None, [0, 0], 2), Ok([6, -1, 6, 7]));
    for (got, want) in [
        (call([5, 1], None, [0, 1], 1), "`lens` is 5 at 0, expected 0 or more and less than 5"),
        (call([1, -1], None, [0, 1], 1), "`lens` is -1 at 1, expected 0 or more and less than 5"),
        (call([2, 1], Some([3, 0]), [0, 1], 1), "`lens` is 2 from 3 for row 0, expected at most the 4 scores of a row"),
        (call([1, 1], None, [0, 2], 1), "`requests` is 2 at 1, expected 0 or more and less than 2"),
        (call([1, 1], None, [0, 1], 3), "`page_size` is 3, expected a power of two, at most 2^30"),
        (
            call([1, 1], Some([0, 0]), [0, 1], 2),
            "`page_starts` is missing, expected given with `starts` and a page size above 1",
        ),
        (call([1, 3], None, [0, 1], 1), "`lens` is 3 for row 1, pages 0..3, expected pages within the table's 2"),
        (
            call([1, 2], None, [1, 0], 1),
            "`page_table` is a negative or too large page in row 0, for row 1 of the scores, expected pages of 1 whose places are 0 to 2147483647",
        ),
        (
            call([2, 1], None, [1, 0], 2),
            "`page_table` is a negative or too large page in row 1, for row 0 of the scores, expected pages of 2 whose places are 0 to 2147483647",
        ),
    ] {
        assert_eq!(got, Err(format!("top_k_page_table_transform: {want}")));
    }
    let (mut values, mut indices) = ([0f32; 4], [0i32; 6]);
    let (v, i) = (TensorMut::new(&mut values, &[2, 2]).unwrap(), TensorMut::new(&mut indices, &[2, 3]).unwrap());
    let e = topk::top_k(exec, x, TopKOrder::Place, v, i).unwrap_err();
    assert_eq!(e.to_string(), "top_k: `indices` has k=3, but `values` bound k=2");
}
