//! Row norms. A row is read twice (from cache the second time) and written once.

use super::exec::Cpu;
use super::pool::RowsMut;
use super::rows::{Rows, for_parts, widened, with_float};
use super::vector::{Kernel, Lane, Vector};
use crate::error::Result;
use crate::tensor::{TensorMut, TensorRef};

pub(crate) fn rms_norm(cpu: &Cpu, x: TensorRef<'_>, weight: TensorRef<'_>, eps: f32, out: TensorMut<'_>) -> Result<()> {
    const OP: &str = "rms_norm";
    let weight = &*widened(OP, "weight", weight)?;
    with_float!(OP, "x", x.dtype(), T => {
        let (x, out) = (Rows::<T>::new(OP, "x", x)?, RowsMut::<T>::new(OP, "out", out)?);
        for_parts(cpu, out, |out| cpu.run(RmsNorm { x, weight, eps, out }));
        Ok(())
    })
}

struct RmsNorm<'a, T> {
    x: Rows<'a, T>,
    weight: &'a [f32],
    eps: f32,
    out: RowsMut<'a, T>,
}

impl<T: Lane> Kernel for RmsNorm<'_, T> {
    type Out = ();
    #[inline(always)]
    fn run<V: Vector>(mut self, v: V) {
        for r in self.out.range() {
            let (x, out) = (self.x.row(r), self.out.row(r));
            let scale = 1.0 / (sum_of_squares(v, x) / x.len() as f32 + self.eps).sqrt();
            let full = x.len() / V::LANES * V::LANES;
            let mut i = 0;
            while i < full {
                let y = v.mul(v.mul(T::load(v, &x[i..]), v.splat(scale)), v.load(&self.weight[i..]));
                T::store(v, y, &mut out[i..]);
                i += V::LANES;
            }
            for i in full..x.len() {
                out[i] = T::from_f32(x[i].to_f32() * scale * self.weight[i]);
            }
        }
    }
}

/// `Σ x²`, in four chains so that the adds' latency hides.
#[inline(always)]
fn sum_of_squares<V: Vector, T: Lane>(v: V, x: &[T]) -> f32 {
    let mut acc = [v.splat(0.0); 4];
    let step = 4 * V::LANES;
    let full = x.len() / step * step;
    let mut i = 0;
    while i < full {
        for (c, acc) in acc.iter_mut().enumerate() {
            let x = T::load(v, &x[i + c * V::LANES..]);
            *acc = v.fma(x, x, *acc);
        }
        i += step;
    }
    for x in x[full..].chunks(V::LANES) {
        let x = T::load_tail(v, x);
        acc[0] = v.fma(x, x, acc[0]);
    }
    v.sum(v.add(v.add(acc[0], acc[1]), v.add(acc[2], acc[3])))
}
