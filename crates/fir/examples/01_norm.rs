//! One operator: slices borrowed as tensors, an executor, and the result in your own memory.

use fir::{Exec, TensorMut, TensorRef, norm};

fn main() -> fir::Result<()> {
    let exec = Exec::cpu()?; // the best instructions this CPU has, on all its cores

    let x = [3.0f32, 4.0, 0.0, 0.0, 1.0, -1.0, 1.0, -1.0];
    let weight = [1.0f32, 1.0, 1.0, 2.0];
    let mut out = [0f32; 8];

    let tokens = TensorRef::new(&x, &[2, 4])?;
    let scale = TensorRef::new(&weight, &[4])?;
    norm::rms_norm(&exec, tokens, scale, 1e-6, TensorMut::new(&mut out, &[2, 4])?)?;
    println!("{out:.2?}");
    assert!((out[0] - 1.2).abs() < 1e-5 && (out[7] + 2.0).abs() < 1e-5);

    // What does not fit is refused, naming the operator, the argument and both values.
    let short = TensorRef::new(&weight[..3], &[3])?;
    let refused = norm::rms_norm(&exec, tokens, short, 1e-6, TensorMut::new(&mut out, &[2, 4])?);
    let message = refused.unwrap_err().to_string();
    println!("{message}");
    assert_eq!(message, "rms_norm: `weight` has hidden=3, but `x` bound hidden=4");
    Ok(())
}
