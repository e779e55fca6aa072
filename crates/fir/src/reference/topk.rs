//! The largest elements of rows, by sorting.

use super::values;
use crate::error::Result;
use crate::tensor::TensorRef;

/// Places of the `k` largest numbers of `x`, ascending: of equal ones the first, NaN never.
pub fn top_places(x: &[f64], k: usize) -> Vec<usize> {
    let mut places: Vec<usize> = (0..x.len()).filter(|&i| !x[i].is_nan()).collect();
    // Stable: equals stay in the order of their places.
    places.sort_by(|&a, &b| x[b].partial_cmp(&x[a]).unwrap_or(std::cmp::Ordering::Equal));
    places.truncate(k);
    places.sort_unstable();
    places
}

/// For each row the places of its `k` largest numbers, the largest first if `sorted` (and equal ones by place), else by
/// place; -1 where there are fewer.
pub fn top_k(x: TensorRef<'_>, k: usize, sorted: bool) -> Result<Vec<i64>> {
    let n = x.shape()[1];
    let (rows, x) = (x.shape()[0], values(x)?);
    let mut out = Vec::new();
    for row in (0..rows).map(|r| &x[r * n..][..n]) {
        let mut places = top_places(row, k);
        if sorted {
            // Stable, and `top_places` gave them by place.
            places.sort_by(|&a, &b| row[b].partial_cmp(&row[a]).unwrap_or(std::cmp::Ordering::Equal));
        }
        out.extend((0..k).map(|j| places.get(j).map_or(-1, |&i| i as i64)));
    }
    Ok(out)
}
