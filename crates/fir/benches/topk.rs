//! The largest of a row: how near to reading it once.

mod support;

use fir::topk::{self, TopKOrder, TopKRagged};
use fir::{DType, Tensor, reference};
use support::{Suite, Work, random};

fn main() {
    let mut suite = Suite::new();
    let levels = suite.levels();
    let (n, batches, ks): (usize, &[usize], &[usize]) =
        if suite.checks_only() { (3000, &[2], &[50]) } else { (128 << 10, &[1, 16], &[50, 2048]) };
    for dtype in [DType::F32, DType::BF16] {
        for &rows in batches {
            let x = random(1, dtype, &[rows, n]);
            for &k in ks {
                let work = Work { bytes: rows * (n + k) * dtype.size() + rows * k * 4, flops: 0 };
                let out =
                    || (Tensor::zeros(dtype, &[rows, k]).unwrap(), Tensor::zeros(DType::I32, &[rows, k]).unwrap());
                let check = |indices: &Tensor, order| {
                    let got = indices.as_slice::<i32>().map_err(|e| e.to_string())?;
                    // One row: the reference sorts it.
                    let row = x.view().slice(0, rows - 1..rows).map_err(|e| e.to_string())?;
                    let want = reference::topk::top_k(row, k, order == TopKOrder::Value).map_err(|e| e.to_string())?;
                    match got[(rows - 1) * k..].iter().zip(&want).position(|(&got, &want)| i64::from(got) != want) {
                        Some(j) => Err(format!("place {j} is not {}", want[j])),
                        None => Ok(()),
                    }
                };
                for (level, exec) in &levels {
                    for (name, order) in [("place", TopKOrder::Place), ("value", TopKOrder::Value)] {
                        suite.bench(
                            &format!("top_k-{name}/n{n}-k{k}-{dtype}/b{rows}/{level}"),
                            work,
                            out(),
                            |(values, places)| {
                                topk::top_k(exec, x.view(), order, values.view_mut(), places.view_mut()).unwrap();
                            },
                            |(_, places)| check(places, order),
                        );
                    }
                    let lens = Tensor::from_slice(&vec![n as i32; rows], &[rows]).unwrap();
                    let offsets = Tensor::zeros(DType::I32, &[rows]).unwrap();
                    suite.bench(
                        &format!("top_k_ragged_transform/n{n}-k{k}-{dtype}/b{rows}/{level}"),
                        work,
                        out().1,
                        |out| {
                            let (scores, lens, offsets) = (x.view(), lens.view(), offsets.view());
                            let args = TopKRagged { scores, lens, starts: None, offsets, out: out.view_mut() };
                            topk::top_k_ragged_transform(exec, args).unwrap();
                        },
                        |places| check(places, TopKOrder::Place),
                    );
                }
            }
        }
    }
}
