//! Products with weights in GGUF's block formats: near the memory's speed for few rows. Bytes are those of the packed
//! weights, activations and outputs; operations are those of the dense product.

mod support;

use fir::gemm::{self, BlockFormat, BlockWeights};
use fir::reference::gemm as reference;
use fir::{DType, Exec};
use support::{Suite, Work, blocks, matches, random};

fn main() {
    let mut suite = Suite::new();
    let levels = suite.levels();
    let (batches, sides): (&[usize], &[(usize, usize)]) =
        if suite.checks_only() { (&[1, 40], &[(160, 512)]) } else { (&[1, 8, 512], &[(4096, 4096), (14336, 4096)]) };
    let exec = Exec::cpu().unwrap();
    for &(n, k) in sides {
        for format in BlockFormat::ALL {
            let problem = format!("block_gemm/n{n}-k{k}-{format}");
            if !suite.wants(&problem) {
                continue;
            }
            let data = blocks(format, n, k);
            let w = BlockWeights::pack(&exec, format, &data, n, k).unwrap();
            for &m in batches {
                let (x, out) = (random(2, DType::BF16, &[m, k]), random(3, DType::BF16, &[m, n]));
                let work = Work { bytes: w.bytes() + 2 * m * (k + n), flops: 2 * m * n * k };
                for (level, exec) in &levels {
                    suite.bench(
                        &format!("{problem}/m{m}/{level}"),
                        work,
                        out.clone(),
                        |out| gemm::block_gemm(exec, x.view(), &w, out.view_mut()).unwrap(),
                        |out| {
                            let (x, rows) = (x.view().slice(0, m - 1..m).unwrap(), data.len() / n * (n - 100));
                            let got = out.view().slice(0, m - 1..m).unwrap().slice(1, n - 100..n).unwrap();
                            matches(got, 100, |p| reference::block_gemm(p, x, format, &data[rows..], 100))
                        },
                    );
                }
            }
        }
    }
    let (n, k) = if suite.checks_only() { (100, 512) } else { (4096, 4096) };
    for format in BlockFormat::ALL {
        let data = blocks(format, n, k);
        let work = Work { bytes: data.len(), flops: 0 };
        suite.bench(
            &format!("block_weights/n{n}-k{k}-{format}/pack/{}", levels.last().map_or("", |l| l.0)),
            work,
            None,
            |out| *out = Some(BlockWeights::pack(&exec, format, &data, n, k).unwrap()),
            |out| if out.is_some() { Ok(()) } else { Err("nothing".into()) },
        );
    }
}
