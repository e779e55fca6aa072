//! Named-axis checks: the first argument binds an axis, the later ones must agree.

use super::Shaped;
use crate::error::{Error, Result};

/// Binds names to sizes, argument by argument, and says who bound what when two disagree.
///
/// ```
/// # use fir::tensor::{Dims, Tensor, DType};
/// let x = Tensor::zeros(DType::F32, &[3, 8]).unwrap();
/// let w = Tensor::zeros(DType::F32, &[9]).unwrap();
/// let mut dims = Dims::of("rms_norm");
/// dims.bind("x", &x, &["tokens", "hidden"]).unwrap();
/// let err = dims.bind("weight", &w, &["hidden"]).unwrap_err();
/// assert_eq!(err.to_string(), "rms_norm: `weight` has hidden=9, but `x` bound hidden=8");
/// assert_eq!(dims.get("tokens"), 3);
/// ```
#[derive(Debug)]
pub struct Dims {
    op: &'static str,
    bound: [(&'static str, usize, &'static str); 12],
    len: usize,
}

impl Dims {
    /// No axis bound yet.
    pub fn of(op: &'static str) -> Self {
        Self { op, bound: [("", 0, ""); 12], len: 0 }
    }

    /// Checks that `tensor` has these axes, and binds the new ones.
    pub fn bind(&mut self, arg: &'static str, tensor: &impl Shaped, axes: &[&'static str]) -> Result<&mut Self> {
        let shape = tensor.shape();
        if shape.len() != axes.len() {
            return Err(Error::Rank {
                op: self.op,
                arg,
                got: shape.len(),
                want: axes.len(),
                axes: format!("[{}]", axes.join(", ")),
            });
        }
        for (&axis, &got) in axes.iter().zip(shape) {
            self.axis(arg, axis, got)?;
        }
        Ok(self)
    }

    /// Checks or binds one axis.
    pub fn axis(&mut self, arg: &'static str, axis: &'static str, got: usize) -> Result<&mut Self> {
        match self.bound[..self.len].iter().find(|b| b.0 == axis) {
            Some(&(_, want, first)) if want != got => Err(Error::Dim { op: self.op, arg, axis, got, first, want }),
            Some(_) => Ok(self),
            None => {
                self.bound[self.len] = (axis, got, arg);
                self.len += 1;
                Ok(self)
            }
        }
    }

    /// Size bound to `axis`; 0 for a name that no argument bound.
    pub fn get(&self, axis: &str) -> usize {
        self.bound[..self.len].iter().find(|b| b.0 == axis).map_or(0, |b| b.1)
    }
}
