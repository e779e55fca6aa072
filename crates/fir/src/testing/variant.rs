//! Random variants, and how far f32 arithmetic may be from the reference on them.

use super::Rng;
use crate::variant::eval::{Env, Real, run};
use crate::variant::{
    Binary, Bits, Bool, Bound, F32, F32Tensor, Hooks, I32, I32Tensor, Params, RowCtx, Side, Unary, Variant, batch, d,
    kv_head, kv_len, kv_pos, logits, m, mask, o, q_idx, q_len, q_pos, qo_head, scale, score, variant,
};

/// A random variant with values for its parameters, and a row to try it on.
///
/// Floats are compared only where both sides are exact, so the lowerings agree on every truth value and integer; how
/// far their floats may differ, [`logit_error`] and its like say.
#[derive(Clone, Debug)]
pub struct Case {
    /// With all hooks but rotations.
    pub variant: Variant,
    /// A row of a request; others of the same request and head serve too.
    pub row: RowCtx,
    /// Value of the f32 parameter.
    pub number: f32,
    /// Value of the i32 parameter.
    pub integer: i32,
    /// Value of the f32 tensor.
    pub numbers: Vec<f32>,
    /// Value of the i32 tensor.
    pub integers: Vec<i32>,
    /// One per query head.
    pub heads: Vec<f32>,
    /// Bits of every request.
    pub bytes: Vec<u8>,
    /// Their segments.
    pub indptr: Vec<i32>,
}

/// Which leaves an expression may use.
#[derive(Clone, Copy, PartialEq)]
enum Place {
    Logits,
    Mask,
    Row,
    Output,
    Key,
}

struct Grow<'r> {
    rng: &'r mut Rng,
    place: Place,
    number: F32,
    integer: I32,
    numbers: F32Tensor,
    integers: I32Tensor,
    head: F32,
    bits: Bits,
}

impl Grow<'_> {
    /// A float that f32 holds exactly.
    fn exact(&mut self) -> F32 {
        let special = match self.place {
            Place::Logits => score(),
            Place::Output => [o(), m(), d()][self.rng.below(3)].clone(),
            _ => self.number.clone(),
        };
        match self.rng.below(6) {
            0 => F32::from((self.rng.normal() * 8.0).round() / 4.0),
            1 => self.number.clone(),
            2 => {
                let i = self.int(1);
                self.numbers.at(i)
            }
            3 if self.place != Place::Key => self.head.clone(),
            _ => special,
        }
    }

    fn float(&mut self, size: usize) -> F32 {
        if size <= 1 {
            return if self.rng.below(5) == 0 { self.int(1).to_f32() } else { self.exact() };
        }
        let half = size / 2;
        match self.rng.below(14) {
            0 => self.float(half) + self.float(half),
            1 => self.float(half) - self.float(half),
            2 => self.float(half) * self.float(half),
            3 => self.float(half) / (self.float(half).abs() + 0.5),
            4 => self.float(half).min(self.float(half)),
            5 => self.float(half).max(self.float(half)),
            6 => -self.float(size - 1),
            7 => self.float(size - 1).tanh(),
            8 => self.float(size - 1).min(4.0).exp(),
            9 => (self.float(size - 1).abs() + 0.25).log(),
            10 => self.float(size - 1).sigmoid(),
            11 => self.float(size - 1).abs().sqrt(),
            12 => {
                let x = self.float(half);
                x.clone() * x
            }
            _ => self.truth(half).select(self.float(half), self.float(half)),
        }
    }

    fn int(&mut self, size: usize) -> I32 {
        if size <= 1 {
            return match (self.rng.below(11), self.place) {
                (0, _) => self.integer.clone(),
                (1, _) => I32::from(self.rng.below(41) as i32 - 20),
                (2, _) => I32::from([i32::MAX, i32::MIN, 1 << 20][self.rng.below(3)]),
                (3, _) => batch(),
                (4, _) => kv_head(),
                (5, _) => kv_len(),
                (6..=7, Place::Logits | Place::Mask | Place::Key) => kv_pos(),
                (_, Place::Key) => kv_pos(),
                (6, _) => q_idx(),
                (7, _) => q_len(),
                (8, _) => qo_head(),
                _ => q_pos(),
            };
        }
        let half = size / 2;
        match self.rng.below(9) {
            0 | 1 => self.int(half) + self.int(half),
            2 => self.int(half) - self.int(half),
            3 => self.int(half) * self.int(half),
            4 => self.int(half) / self.int(half),
            5 => self.int(half) % self.int(half),
            6 => self.int(half).min(self.int(half)),
            7 => self.int(half).max(self.int(half)),
            _ => {
                let i = self.int(size - 1);
                self.integers.at(i)
            }
        }
    }

    fn truth(&mut self, size: usize) -> Bool {
        if size <= 1 {
            return match self.rng.below(6) {
                0 if self.place != Place::Key => kv_len().gt(q_pos()),
                1 => self.exact().lt(self.exact()),
                2 => Bool::from(self.rng.below(2) == 0),
                _ => self.int(1).le(self.int(1)),
            };
        }
        let half = size / 2;
        match self.rng.below(11) {
            0 => self.int(half).lt(self.int(half)),
            1 => self.int(half).ge(self.int(half)),
            2 => self.int(half).eq(self.int(half)),
            3 => self.int(half).ne(self.int(half)),
            4 => self.exact().le(self.exact()),
            5 => self.exact().gt(self.exact()),
            6 => self.truth(half) & self.truth(half),
            7 => self.truth(half) | self.truth(half),
            8 => !self.truth(size - 1),
            9 => {
                let (row, col, stride) = (self.int(half / 2), self.int(half / 2), self.int(1));
                self.bits.at(row, col, stride)
            }
            _ => self.int(half).le(self.int(half)) & self.truth(half),
        }
    }
}

impl Case {
    /// A variant whose hooks have about `size` operations each.
    ///
    /// # Panics
    /// If the variant is refused: a fault of the generator.
    pub fn random(rng: &mut Rng, size: usize) -> Self {
        let (requests, heads) = (1 + rng.below(3), 1 + rng.below(4));
        let kv_len = 1 + rng.below(300);
        // Now and then more queries than keys.
        let most = if rng.below(8) == 0 { 2 * kv_len } else { kv_len };
        let q_len = 1 + rng.below(most);
        let numbers: Vec<f32> = (0..1 + rng.below(9)).map(|_| rng.normal()).collect();
        let integers = (0..1 + rng.below(9)).map(|_| rng.below(600) as i32 - 100).collect();
        let mut indptr = vec![rng.below(3) as i32];
        for b in 0..requests {
            indptr.push(indptr[b] + rng.below(40) as i32);
        }
        let bytes = (0..indptr[requests] as usize + rng.below(3)).map(|_| rng.bits() as u8).collect();
        let row = RowCtx {
            batch: rng.below(requests) as i32,
            q_idx: rng.below(q_len) as i32,
            q_len: q_len as i32,
            kv_len: kv_len as i32,
            qo_head: rng.below(heads) as i32,
            kv_head: rng.below(heads) as i32,
        };
        let (number, integer) = (rng.normal(), rng.below(400) as i32 - 100);
        let per_head = rng.normals(heads);
        let variant = variant("Random", |p| {
            let mut grow = Grow {
                place: Place::Mask,
                number: p.f32("number"),
                integer: p.i32("integer"),
                numbers: p.f32_tensor("numbers"),
                integers: p.i32_tensor("integers"),
                head: p.per_head("heads"),
                bits: p.bits("bits"),
                rng,
            };
            let hooks: Hooks = mask(grow.truth(size));
            grow.place = Place::Logits;
            let hooks = hooks.logits(grow.float(size));
            grow.place = Place::Row;
            let hooks = hooks.init(grow.float(size / 2)).query(scale(grow.float(size / 2)));
            grow.place = Place::Output;
            let hooks = hooks.output(grow.float(size));
            grow.place = Place::Key;
            let hooks = hooks.key(scale(grow.float(size / 4)).scale(grow.float(2)));
            hooks.value(scale(grow.float(size / 4)))
        })
        .expect("a well-formed variant");
        Self { variant, row, number, integer, numbers, integers, heads: per_head, bytes, indptr }
    }

    /// The parameters' values.
    pub fn params(&self) -> Params<'_> {
        Params::new()
            .f32("number", self.number)
            .i32("integer", self.integer)
            .f32_tensor("numbers", &self.numbers)
            .i32_tensor("integers", &self.integers)
            .f32_tensor("heads", &self.heads)
            .bits("bits", &self.bytes, &self.indptr)
    }

    /// The parameters, bound.
    ///
    /// # Panics
    /// If they are refused: a fault of the generator.
    pub fn bind(&self) -> Bound<'_> {
        self.variant.bind(&self.params(), self.heads.len(), self.indptr.len() - 1).expect("values of the right types")
    }
}

/// Variants whose logits are exact in f32 and in f64 alike: every integer operation and comparison, over operands of
/// either sign, and what floats do with NaN and infinities.
///
/// # Panics
/// If one is refused: a fault of this function.
pub fn exact_variants() -> Vec<Variant> {
    // From -40 to 40, and 0; and numbers that wrap around.
    let (a, b) = (|| kv_pos() % 81 - 40, || q_idx() % 7 - 3);
    let big = || kv_pos() * 0x0123_4567 + i32::MIN;
    let nan = || (score() - score()) / (score() - score());
    let inf = || score().abs() / 0.0;
    let pick = |x: Bool| x.select(1.0, 2.0);
    let logit: Vec<F32> = vec![
        (a() + b()).to_f32(),
        (a() - b()).to_f32(),
        (a() * b()).to_f32(),
        (a() / b()).to_f32(),
        (a() % b()).to_f32(),
        (big() / b() % 1000).to_f32(),
        (big() % (b() * 1000)).to_f32(),
        ((big() - i32::MAX) % 1000).to_f32(),
        ((big() * big()) % 1000).to_f32(),
        ((-big()) / 65536).to_f32(),
        a().min(b()).to_f32(),
        a().max(b()).to_f32(),
        pick(a().lt(b())),
        pick(a().le(b())),
        pick(a().gt(b())),
        pick(a().ge(b())),
        pick(a().eq(b())),
        pick(a().ne(b())),
        pick(a().lt(0) & b().lt(0)),
        pick(a().lt(0) | !b().lt(0)),
        nan().min(1.0),
        F32::from(1.0).min(nan()).max(3.0),
        nan().max(1.0),
        pick(nan().lt(1.0)),
        pick(!nan().ge(1.0)),
        pick(inf().gt(f32::MAX)),
        pick((-inf()).le(f32::NEG_INFINITY)),
        (-inf()).exp(),
        inf().tanh(),
        (-inf()).sigmoid(),
        -score().abs(),
        score().abs().sqrt() * 0.0 - 0.0,
    ];
    logit
        .into_iter()
        .enumerate()
        .map(|(i, x)| variant(&format!("Exact{i}"), |_| logits(x)).expect("a well-formed variant"))
        .collect()
}

/// Largest error that the logit of `kv_pos` may have in f32; infinite where it may overflow.
///
/// # Panics
/// If `variant` compares floats that are not exact: then a small error may have any consequence.
pub fn logit_error(variant: &Variant, bound: &Bound<'_>, row: &RowCtx, kv_pos: i32, score: f32) -> f64 {
    let env = Env { kv_pos, score: Approx::of_f32(score), ..Env::new(bound, row) };
    variant.0.logits.as_ref().map_or(0.0, |e| run(variant, e, &env).f().error())
}

/// Largest error that the starting logit may have in f32; panics as [`logit_error`].
pub fn init_error(variant: &Variant, bound: &Bound<'_>, row: &RowCtx) -> f64 {
    variant.0.init.as_ref().map_or(0.0, |e| run(variant, e, &Env::<Approx>::new(bound, row)).f().error())
}

/// Largest error that an element of the output may have in f32; panics as [`logit_error`].
pub fn output_error(variant: &Variant, bound: &Bound<'_>, row: &RowCtx, [o, m, d]: [f32; 3]) -> f64 {
    let [o, m, d] = [o, m, d].map(Approx::of_f32);
    let env = Env { o, m, d, ..Env::new(bound, row) };
    variant.0.output.as_ref().map_or(0.0, |e| run(variant, e, &env).f().error())
}

/// Largest error that the product of a transform's scales may have in f32; panics as [`logit_error`].
pub fn scale_error(variant: &Variant, bound: &Bound<'_>, side: Side, row: &RowCtx, pos: i32) -> f64 {
    let vectors = match side {
        Side::Query => &variant.0.query,
        Side::Key => &variant.0.key,
        Side::Value => &variant.0.value,
    };
    let env = Env::<Approx> { kv_pos: pos, ..Env::new(bound, row) };
    let product = |x, e| Approx::binary(Binary::MulF, x, run(variant, e, &env).f());
    vectors.scales.iter().fold(Approx::of_f32(1.0), product).error()
}

/// A number and how far its f32 twin may be from it: running error analysis.
#[derive(Clone, Copy, Debug)]
struct Approx {
    x: f64,
    err: f64,
}

/// One unit in the last place of 1.
const ULP: f64 = 1.0 / (1 << 23) as f64;

impl Approx {
    /// Beyond a tenth of the largest f32, an intermediate may overflow.
    fn error(self) -> f64 {
        if self.x.is_finite() && self.x.abs() + self.err < 1e37 { self.err } else { f64::INFINITY }
    }

    /// `x`, with `inherited` error from the operands, and `ulps` from its own rounding; and what underflows.
    fn rounded(x: f64, inherited: f64, ulps: f64) -> Self {
        let err = inherited + ulps * ULP * (x.abs() + inherited) + 1e-37;
        let err = Self { x, err }.error();
        Self { x, err: if err.is_nan() { f64::INFINITY } else { err } }
    }
}

impl Real for Approx {
    fn of_f32(x: f32) -> Self {
        Self { x: x.into(), err: 0.0 }
    }
    fn of_i32(x: i32) -> Self {
        let err = if x.unsigned_abs() <= 1 << 24 { 0.0 } else { ULP * f64::from(x).abs() };
        Self { x: x.into(), err }
    }
    fn unary(op: Unary, Self { x, err }: Self) -> Self {
        // The polynomials' errors are those that cpu/math.rs states.
        match op {
            Unary::Neg => Self { x: -x, err },
            Unary::Abs => Self { x: x.abs(), err },
            Unary::Tanh => Self::rounded(x.tanh(), err, 3.0),
            Unary::Exp => Self::rounded(x.exp(), x.exp() * err.exp_m1(), 2.0),
            Unary::Log => Self::rounded(x.ln(), if err < x { -(-err / x).ln_1p() } else { f64::INFINITY }, 1.0),
            Unary::Sigmoid => Self::rounded(1.0 / (1.0 + (-x).exp()), err / 4.0, 3.0),
            Unary::Sqrt => {
                let slope = if err < x { err / (x - err).sqrt() } else { f64::INFINITY };
                Self::rounded(x.sqrt(), slope.min(err.sqrt()), 1.0)
            }
            Unary::ToF32 | Unary::Not => unreachable!("{op:?} of a number"),
        }
    }
    fn binary(op: Binary, a: Self, b: Self) -> Self {
        let larger = a.err.max(b.err);
        match op {
            Binary::AddF => Self::rounded(a.x + b.x, a.err + b.err, 1.0),
            Binary::SubF => Self::rounded(a.x - b.x, a.err + b.err, 1.0),
            Binary::MulF => Self::rounded(a.x * b.x, a.x.abs() * b.err + b.x.abs() * a.err + a.err * b.err, 1.0),
            Binary::DivF => {
                let x = a.x / b.x;
                let least = b.x.abs() - b.err;
                Self::rounded(x, if least > 0.0 { (a.err + x.abs() * b.err) / least } else { f64::INFINITY }, 1.0)
            }
            Binary::MinF => Self { x: a.x.min(b.x), err: larger },
            Binary::MaxF => Self { x: a.x.max(b.x), err: larger },
            _ => unreachable!("{op:?} of numbers"),
        }
    }
    fn lt(a: Self, b: Self) -> bool {
        assert!(a.err == 0.0 && b.err == 0.0, "only exact numbers are compared");
        a.x < b.x
    }
    fn le(a: Self, b: Self) -> bool {
        assert!(a.err == 0.0 && b.err == 0.0, "only exact numbers are compared");
        a.x <= b.x
    }
}
