//! Dense products: near the memory's speed for few rows, near the multiply-adds' for many.

mod support;

use fir::reference::{Precision, gemm as reference};
use fir::{DType, gemm};
use support::{Suite, Work, matches, random};

fn main() {
    let mut suite = Suite::new();
    let levels = suite.levels();
    let (batches, sides): (&[usize], &[(usize, usize)]) = if suite.checks_only() {
        (&[1, 40], &[(160, 256)])
    } else {
        (&[1, 8, 64, 512], &[(2048, 2048), (14336, 4096)])
    };
    for &(n, k) in sides {
        for dtype in [DType::F32, DType::BF16] {
            let w = random(1, dtype, &[n, k]);
            for &m in batches {
                let (x, out) = (random(2, dtype, &[m, k]), random(3, dtype, &[m, n]));
                let work = Work { bytes: (m * k + n * k + m * n) * dtype.size(), flops: 2 * m * n * k };
                for (level, exec) in &levels {
                    suite.bench(
                        &format!("gemm/n{n}-k{k}-{dtype}/m{m}/{level}"),
                        work,
                        out.clone(),
                        |out| gemm::gemm(exec, x.view(), w.view(), out.view_mut()).unwrap(),
                        |out| {
                            // The last rows and columns: what remains after whole tiles and panels.
                            let (x, w) = (x.view().slice(0, m - 1..m).unwrap(), w.view().slice(0, n - 100..n).unwrap());
                            let got = out.view().slice(0, m - 1..m).unwrap().slice(1, n - 100..n).unwrap();
                            matches(got, 100, |p| reference::gemm(p, x, w))
                        },
                    );
                }
                if m == 1 && n * k <= 1 << 22 {
                    suite.bench(
                        &format!("gemm/n{n}-k{k}-{dtype}/m{m}/reference"),
                        work,
                        Vec::new(),
                        |out| *out = reference::gemm(Precision::Exact, x.view(), w.view()).unwrap(),
                        |out| if out.len() == n { Ok(()) } else { Err(format!("{} elements", out.len())) },
                    );
                }
            }
        }
    }
}
