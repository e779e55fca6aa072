//! The one comparer of floating results.

use crate::reference;
use crate::tensor::TensorRef;

/// What a result is compared with, and by which rows.
#[derive(Clone, Copy, Debug)]
pub struct Compare<'a> {
    /// The reference, in f64.
    pub exact: &'a [f64],
    /// The reference's loops rounding as plain low-precision code does.
    pub naive: &'a [f64],
    /// Elements per row: errors are bounded row by row, so that a wrong row of small values shows.
    pub row: usize,
}

/// Checks that `got` is as near to `exact` as twice the error of `naive`, row by row, and that NaN, +inf and -inf
/// stand in exactly the same places.
///
/// To a row's bound comes one unit in the last place of `got`'s type at the row's largest value, as a short row's
/// naive result may be exact by luck; and the mean naive error over all rows, for the same reason.
pub fn compare(got: TensorRef<'_>, want: Compare<'_>) -> Result<(), String> {
    let dtype = got.dtype();
    let got = got.to_f32_vec().map_err(|e| e.to_string())?;
    let Compare { exact, naive, row } = want;
    if got.len() != exact.len() || got.len() != naive.len() {
        return Err(format!("{} elements, reference has {}, naive {}", got.len(), exact.len(), naive.len()));
    }
    let row = row.max(1);
    for (i, (&g, &e)) in got.iter().zip(exact).enumerate() {
        // A finite f64 may be beyond the type: compare with what the type makes of it.
        let e = reference::round(dtype, e);
        let same = if g.is_nan() || e.is_nan() {
            g.is_nan() == e.is_nan()
        } else if g.is_infinite() || e.is_infinite() {
            f64::from(g) == e
        } else {
            true
        };
        if !same {
            return Err(format!("row {}, element {}: got {g}, reference {e}", i / row, i % row));
        }
    }
    let error = |a: f64, e: f64| if e.is_finite() && a.is_finite() { (a - e).abs() } else { 0.0 };
    let naive_error: Vec<f64> = naive
        .chunks(row)
        .zip(exact.chunks(row))
        .map(|(n, e)| n.iter().zip(e).map(|(&n, &e)| error(n, e)).fold(0.0, f64::max))
        .collect();
    let mean = naive_error.iter().sum::<f64>() / naive_error.len().max(1) as f64;
    for (r, ((g, e), n)) in got.chunks(row).zip(exact.chunks(row)).zip(&naive_error).enumerate() {
        let largest = e.iter().filter(|e| e.is_finite()).fold(0.0f64, |m, e| m.max(e.abs()));
        let ulp = match dtype {
            crate::tensor::DType::F32 => largest * 2f64.powi(-22),
            crate::tensor::DType::F16 => largest * 2f64.powi(-10) + 2f64.powi(-24),
            crate::tensor::DType::BF16 => largest * 2f64.powi(-7),
            crate::tensor::DType::E4M3 => largest * 2f64.powi(-3) + 2f64.powi(-9),
            crate::tensor::DType::E5M2 => largest * 2f64.powi(-2) + 2f64.powi(-16),
            _ => 0.0,
        };
        let bound = 2.0 * n.max(mean) + ulp;
        let worst = g
            .iter()
            .zip(e)
            .map(|(&g, &e)| error(f64::from(g), e))
            .enumerate()
            .fold((0, 0.0), |w, x| if x.1 > w.1 { x } else { w });
        if worst.1 > bound {
            let (i, err) = worst;
            return Err(format!(
                "row {r}, element {i}: got {}, reference {}: error {err:.3e} > bound {bound:.3e} (naive error of the row {n:.3e})",
                g[i], e[i]
            ));
        }
    }
    Ok(())
}
