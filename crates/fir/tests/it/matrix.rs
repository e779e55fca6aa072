//! The support matrix: which operator takes which types. The snapshot is the promise; a cell that is lost or gained
//! fails here until the snapshot says so too.

use fir::exec::Level;
use fir::{DType, Error, Exec, Result, Tensor, TensorMut, TensorRef, activation, gemm, norm};

/// Types in the order of the columns.
const DTYPES: [DType; 8] =
    [DType::F32, DType::F16, DType::BF16, DType::E4M3, DType::E5M2, DType::E2M1x2, DType::I8, DType::I32];

type Row = fn(&Exec, DType) -> Result<()>;

/// Operators by row; each runs once on a tiny input of a type. `→ e4m3` gives fp8, the others give what they take.
const ROWS: &[(&str, Row)] = &[
    ("activation::silu_and_mul", |exec, d| gated(activation::silu_and_mul, exec, d)),
    ("activation::gelu_and_mul", |exec, d| gated(activation::gelu_and_mul, exec, d)),
    ("activation::gelu_tanh_and_mul", |exec, d| gated(activation::gelu_tanh_and_mul, exec, d)),
    ("gemm::gemm", |exec, d| gemm::gemm(exec, zeros(d).view(), zeros(d).view(), zeros(d).view_mut())),
    ("norm::rms_norm", |exec, d| norm::rms_norm(exec, zeros(d).view(), row().view(), 1e-6, zeros(d).view_mut())),
    ("norm::gemma_rms_norm", |exec, d| {
        norm::gemma_rms_norm(exec, zeros(d).view(), row().view(), 1e-6, zeros(d).view_mut())
    }),
    ("norm::fused_add_rms_norm", |exec, d| {
        norm::fused_add_rms_norm(exec, zeros(d).view_mut(), zeros(d).view_mut(), row().view(), 1e-6)
    }),
    ("norm::layer_norm", |exec, d| {
        norm::layer_norm(exec, zeros(d).view(), row().view(), row().view(), 1e-6, zeros(d).view_mut())
    }),
    ("norm::qk_rms_norm", |exec, d| {
        let [mut q, mut k] = [(); 2].map(|()| zeros(d).reshaped(&[2, 4, 8]).unwrap());
        norm::qk_rms_norm(exec, q.view_mut(), k.view_mut(), row().view(), row().view(), 1e-6)
    }),
    ("norm::rms_norm_quant → e4m3", |exec, d| {
        norm::rms_norm_quant(exec, zeros(d).view(), row().view(), 1.0, 1e-6, zeros(DType::E4M3).view_mut())
    }),
];

/// `[8, 8]`, which fits every argument that is not a row.
fn zeros(dtype: DType) -> Tensor {
    Tensor::zeros(dtype, &[8, 8]).unwrap()
}

fn row() -> Tensor {
    Tensor::zeros(DType::F32, &[8]).unwrap()
}

fn gated(op: fn(&Exec, TensorRef<'_>, TensorMut<'_>) -> Result<()>, exec: &Exec, dtype: DType) -> Result<()> {
    let mut out = Tensor::zeros(dtype, &[8, 4])?;
    op(exec, zeros(dtype).view(), out.view_mut())
}

#[test]
fn support_matrix_is_as_promised() {
    let execs: Vec<Exec> = Level::available().into_iter().map(|level| Exec::cpu_with(level, 1).unwrap()).collect();
    let mut table = format!("{:32}{}\n", "", DTYPES.map(|d| format!("{:>8}", d.name())).concat());
    for (name, run) in ROWS {
        let cells = DTYPES.map(|dtype| {
            // The answer may not depend on the level: the table is the same on every machine.
            let answers: Vec<bool> = execs
                .iter()
                .map(|exec| match run(exec, dtype) {
                    Ok(()) => true,
                    Err(Error::DType { .. } | Error::Unsupported { .. }) => false,
                    Err(e) => panic!("{name} {dtype}: {e}"),
                })
                .collect();
            assert!(answers.iter().all(|a| *a == answers[0]), "{name} {dtype}: levels differ: {answers:?}");
            format!("{:>8}", if answers[0] { "yes" } else { "-" })
        });
        table += &format!("{name:32}{}\n", cells.concat());
    }
    insta::assert_snapshot!(table);
}
