//! The support matrix: which operator takes which types. The snapshot is the promise; a cell that is lost or gained
//! fails here until the snapshot says so too.

use fir::exec::Level;
use fir::{DType, Error, Exec, Result, Tensor, norm};

/// Types in the order of the columns.
const DTYPES: [DType; 8] =
    [DType::F32, DType::F16, DType::BF16, DType::E4M3, DType::E5M2, DType::E2M1x2, DType::I8, DType::I32];

/// Operators by row; each runs once on a tiny input of a type.
const ROWS: &[(&str, fn(&Exec, DType) -> Result<()>)] = &[("norm::rms_norm", rms_norm)];

fn rms_norm(exec: &Exec, dtype: DType) -> Result<()> {
    let (x, w, mut out) =
        (Tensor::zeros(dtype, &[2, 8])?, Tensor::zeros(DType::F32, &[8])?, Tensor::zeros(dtype, &[2, 8])?);
    norm::rms_norm(exec, x.view(), w.view(), 1e-6, out.view_mut())
}

#[test]
fn support_matrix_is_as_promised() {
    let execs: Vec<Exec> = Level::available().into_iter().map(|level| Exec::cpu_with(level, 1).unwrap()).collect();
    let mut table = format!("{:24}{}\n", "", DTYPES.map(|d| format!("{:>8}", d.name())).concat());
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
        table += &format!("{name:24}{}\n", cells.concat());
    }
    insta::assert_snapshot!(table);
}
