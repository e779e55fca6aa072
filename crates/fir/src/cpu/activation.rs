//! Gated activations: `act(x[..d]) * x[d..]`, row by row.

use super::exec::Cpu;
use super::math::{erfc, sigmoid};
use super::pool::RowsMut;
use super::rows::{Rows, for_parts, with_float};
use super::vector::{Kernel, Lane, Vector};
use crate::error::Result;
use crate::tensor::{TensorMut, TensorRef};

/// A function of one element.
pub(crate) trait Activation: Copy + Send + Sync {
    fn apply<V: Vector>(self, v: V, x: V::F) -> V::F;
}

/// `x / (1 + e^-x)`.
#[derive(Clone, Copy)]
pub(crate) struct Silu;

/// `x (1 + erf(x / √2)) / 2`.
#[derive(Clone, Copy)]
pub(crate) struct Gelu;

/// `x (1 + tanh(√(2/π) (x + 0.044715 x³))) / 2`.
#[derive(Clone, Copy)]
pub(crate) struct GeluTanh;

impl Activation for Silu {
    #[inline(always)]
    fn apply<V: Vector>(self, v: V, x: V::F) -> V::F {
        v.mul(x, sigmoid(v, x))
    }
}

impl Activation for Gelu {
    #[inline(always)]
    fn apply<V: Vector>(self, v: V, x: V::F) -> V::F {
        // 1 + erf z = erfc(-z), which does not cancel for negative z.
        let z = v.mul(x, v.splat(-std::f32::consts::FRAC_1_SQRT_2));
        v.mul(v.mul(x, v.splat(0.5)), erfc(v, z))
    }
}

impl Activation for GeluTanh {
    #[inline(always)]
    fn apply<V: Vector>(self, v: V, x: V::F) -> V::F {
        // (1 + tanh u) / 2 = sigmoid(2u), which does not cancel for negative u. 1.5957692 = 2 √(2/π).
        let cubic = v.fma(v.mul(x, x), v.splat(0.044715 * 1.595_769_2), v.splat(1.595_769_2));
        v.mul(x, sigmoid(v, v.mul(x, cubic)))
    }
}

pub(crate) fn act_and_mul(
    cpu: &Cpu,
    op: &'static str,
    act: impl Activation,
    x: TensorRef<'_>,
    out: TensorMut<'_>,
) -> Result<()> {
    with_float!(op, "x", x.dtype(), T => {
        let (x, out) = (Rows::<T>::new(op, "x", x)?, RowsMut::<T>::new(op, "out", out)?);
        for_parts(cpu, out, |out| cpu.run(ActAndMul { act, x, out }));
        Ok(())
    })
}

/// `act(x[..d]) * x[d..]`, rounded to the type of the output.
pub(crate) struct ActAndMul<'a, A, T, O> {
    pub(crate) act: A,
    pub(crate) x: Rows<'a, T>,
    pub(crate) out: RowsMut<'a, O>,
}

impl<A: Activation, T: Lane, O: Lane> Kernel for ActAndMul<'_, A, T, O> {
    type Out = ();
    #[inline(always)]
    fn run<V: Vector>(mut self, v: V) {
        for r in self.out.range() {
            let out = self.out.row(r);
            let (gate, up) = self.x.row(r).split_at(out.len());
            let full = out.len() / V::LANES * V::LANES;
            let mut i = 0;
            while i < full {
                let y = v.mul(self.act.apply(v, T::load(v, &gate[i..])), T::load(v, &up[i..]));
                O::store(v, y, &mut out[i..]);
                i += V::LANES;
            }
            if i < out.len() {
                let y = v.mul(self.act.apply(v, T::load_tail(v, &gate[i..])), T::load_tail(v, &up[i..]));
                O::store_tail(v, y, &mut out[i..]);
            }
        }
    }
}
