//! What a variant means: one logit at a time, in f64.
//!
//! The interpreter is generic over its number type: `reference/` runs it in f64, the CPU rows run the parts of an
//! expression that are the same for a whole row in f32.
//!
//! Functions panic when the parameters were bound for another variant, and on nothing else.

use super::expr::{Binary, Id, Leaf, Node, Op, Unary};
use super::params::{Bound, ParamType, bit, clamped};
use super::rope::frequencies;
use super::spec::{Expr, Variant, Vectors};

/// Which row of the attention matrix: what is known of a query before any key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowCtx {
    /// Request.
    pub batch: i32,
    /// Query token of the request.
    pub q_idx: i32,
    /// Query tokens of the request.
    pub q_len: i32,
    /// Keys of the request.
    pub kv_len: i32,
    /// Query head.
    pub qo_head: i32,
    /// Key and value head.
    pub kv_head: i32,
}

impl RowCtx {
    /// Position of the query token: `kv_len − q_len + q_idx`.
    #[inline(always)]
    pub fn q_pos(&self) -> i32 {
        self.kv_len.wrapping_sub(self.q_len).wrapping_add(self.q_idx)
    }
}

/// The rows of which tensor a transform acts on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Side {
    /// Queries.
    Query,
    /// Keys.
    Key,
    /// Values.
    Value,
}

/// The logit of `kv_pos`, mask apart.
pub fn logit(variant: &Variant, bound: &Bound<'_>, row: &RowCtx, kv_pos: i32, score: f64) -> f64 {
    let env = Env { kv_pos, score, ..Env::new(bound, row) };
    variant.0.logits.as_ref().map_or(score, |e| run(variant, e, &env).f())
}

/// Whether the row sees `kv_pos`.
pub fn visible(variant: &Variant, bound: &Bound<'_>, row: &RowCtx, kv_pos: i32) -> bool {
    let env = Env::<f64> { kv_pos, ..Env::new(bound, row) };
    variant.0.mask.as_ref().is_none_or(|e| run(variant, e, &env).b())
}

/// The logit of the key that is not there, if the row starts with one.
pub fn init(variant: &Variant, bound: &Bound<'_>, row: &RowCtx) -> Option<f64> {
    variant.0.init.as_ref().map(|e| run(variant, e, &Env::new(bound, row)).f())
}

/// An element of the output: of `o` (normalised already), the row's largest logit `m` and `d = Σ exp(logit − m)`.
pub fn output(variant: &Variant, bound: &Bound<'_>, row: &RowCtx, o: f64, m: f64, d: f64) -> f64 {
    let env = Env { o, m, d, ..Env::new(bound, row) };
    variant.0.output.as_ref().map_or(o, |e| run(variant, e, &env).f())
}

/// Transforms one head's row in place. Of `row`, keys and values use the request, its length and the head.
pub fn transform(variant: &Variant, bound: &Bound<'_>, side: Side, row: &RowCtx, pos: i32, x: &mut [f64]) {
    let Vectors { rope, scales } = match side {
        Side::Query => &variant.0.query,
        Side::Key => &variant.0.key,
        Side::Value => &variant.0.value,
    };
    if let Some(rope) = rope
        && let Ok(dim) = rope.rotated(x.len())
    {
        for (i, f) in frequencies(rope, x.len()).into_iter().enumerate() {
            let (sin, cos) = (f64::from(pos) * f).sin_cos();
            let (a, b) = if rope.interleave { (2 * i, 2 * i + 1) } else { (i, i + dim / 2) };
            (x[a], x[b]) = (x[a] * cos - x[b] * sin, x[a] * sin + x[b] * cos);
        }
    }
    let env = Env { kv_pos: pos, ..Env::new(bound, row) };
    for e in scales {
        let by: f64 = run(variant, e, &env).f();
        x.iter_mut().for_each(|x| *x *= by);
    }
}

/// A number the interpreter may run in.
pub(crate) trait Real: Copy {
    fn of_f32(x: f32) -> Self;
    fn of_i32(x: i32) -> Self;
    fn unary(op: Unary, a: Self) -> Self;
    fn binary(op: Binary, a: Self, b: Self) -> Self;
    fn lt(a: Self, b: Self) -> bool;
    fn le(a: Self, b: Self) -> bool;
}

macro_rules! real {
    ($($t:ident: $from_i32:expr),*) => {$(
        impl Real for $t {
            #[inline]
            fn of_f32(x: f32) -> Self {
                Self::from(x)
            }
            #[inline]
            fn of_i32(x: i32) -> Self {
                $from_i32(x)
            }
            #[inline]
            fn unary(op: Unary, a: Self) -> Self {
                match op {
                    Unary::Neg => -a,
                    Unary::Tanh => a.tanh(),
                    Unary::Exp => a.exp(),
                    Unary::Log => a.ln(),
                    Unary::Sigmoid => 1.0 / (1.0 + (-a).exp()),
                    Unary::Abs => a.abs(),
                    Unary::Sqrt => a.sqrt(),
                    Unary::ToF32 | Unary::Not => unreachable!("{op:?} of a number"),
                }
            }
            #[inline]
            fn binary(op: Binary, a: Self, b: Self) -> Self {
                match op {
                    Binary::AddF => a + b,
                    Binary::SubF => a - b,
                    Binary::MulF => a * b,
                    Binary::DivF => a / b,
                    Binary::MinF => if a < b { a } else { b },
                    Binary::MaxF => if a > b { a } else { b },
                    _ => unreachable!("{op:?} of numbers"),
                }
            }
            #[inline]
            fn lt(a: Self, b: Self) -> bool {
                a < b
            }
            #[inline]
            fn le(a: Self, b: Self) -> bool {
                a <= b
            }
        }
    )*};
}
real!(f32: |x| x as Self, f64: Self::from);

/// The value of a node.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Val<R> {
    F(R),
    I(i32),
    B(bool),
}

impl<R: Real> Val<R> {
    /// Expressions are typed, so these do not fail.
    #[inline(always)]
    pub(crate) fn f(self) -> R {
        let Self::F(x) = self else { unreachable!("not a number") };
        x
    }
    #[inline(always)]
    pub(crate) fn i(self) -> i32 {
        let Self::I(x) = self else { unreachable!("not an integer") };
        x
    }
    #[inline(always)]
    pub(crate) fn b(self) -> bool {
        let Self::B(x) = self else { unreachable!("not a truth value") };
        x
    }
}

/// Values of the leaves; those that a hook does not have are never read.
#[derive(Clone, Copy)]
pub(crate) struct Env<'e, R> {
    pub(crate) bound: &'e Bound<'e>,
    pub(crate) row: &'e RowCtx,
    pub(crate) kv_pos: i32,
    pub(crate) score: R,
    pub(crate) o: R,
    pub(crate) m: R,
    pub(crate) d: R,
}

impl<'e, R: Real> Env<'e, R> {
    pub(crate) fn new(bound: &'e Bound<'e>, row: &'e RowCtx) -> Self {
        let zero = R::of_i32(0);
        Self { bound, row, kv_pos: 0, score: zero, o: zero, m: zero, d: zero }
    }
}

/// The value of a hook's expression.
pub(crate) fn run<R: Real>(variant: &Variant, expr: &Expr, env: &Env<'_, R>) -> Val<R> {
    let mut values = vec![Val::B(false); expr.root as usize + 1];
    steps(variant, &expr.order, env, &mut values);
    values[expr.root as usize]
}

/// Fills in `values` of the nodes `order`, whose operands come before them.
pub(crate) fn steps<R: Real>(variant: &Variant, order: &[Id], env: &Env<'_, R>, values: &mut [Val<R>]) {
    for &id in order {
        values[id as usize] = step(variant, &variant.0.nodes[id as usize], values, env);
    }
}

#[inline]
fn step<R: Real>(variant: &Variant, node: &Node, values: &[Val<R>], env: &Env<'_, R>) -> Val<R> {
    let at = |id: Id| values[id as usize];
    match *node {
        Op::F32(x) => Val::F(R::of_f32(f32::from_bits(x))),
        Op::I32(x) => Val::I(x),
        Op::Bool(x) => Val::B(x),
        Op::Leaf(leaf) => match leaf {
            Leaf::Score => Val::F(env.score),
            Leaf::O => Val::F(env.o),
            Leaf::M => Val::F(env.m),
            Leaf::D => Val::F(env.d),
            Leaf::QPos => Val::I(env.row.q_pos()),
            Leaf::KvPos => Val::I(env.kv_pos),
            Leaf::QIdx => Val::I(env.row.q_idx),
            Leaf::QLen => Val::I(env.row.q_len),
            Leaf::KvLen => Val::I(env.row.kv_len),
            Leaf::Batch => Val::I(env.row.batch),
            Leaf::QoHead => Val::I(env.row.qo_head),
            Leaf::KvHead => Val::I(env.row.kv_head),
        },
        Op::Param(p) => match variant.param_type(p) {
            ParamType::I32 => Val::I(env.bound.i32(p)),
            _ => Val::F(R::of_f32(env.bound.f32(p))),
        },
        Op::At(p, i) => match variant.param_type(p) {
            ParamType::I32Tensor => Val::I(clamped(env.bound.i32s(p), at(i).i())),
            _ => Val::F(R::of_f32(clamped(env.bound.f32s(p), at(i).i()))),
        },
        Op::Bit(p, [r, c, s]) => Val::B(bit(env.bound.segment(p, env.row.batch), at(r).i(), at(c).i(), at(s).i())),
        Op::Unary(Unary::ToF32, a) => Val::F(R::of_i32(at(a).i())),
        Op::Unary(Unary::Not, a) => Val::B(!at(a).b()),
        Op::Unary(op, a) => Val::F(R::unary(op, at(a).f())),
        Op::Select(c, a, b) => {
            if at(c).b() {
                at(a)
            } else {
                at(b)
            }
        }
        Op::Binary(op, a, b) => {
            let (a, b) = (at(a), at(b));
            match op {
                Binary::LtF => Val::B(R::lt(a.f(), b.f())),
                Binary::LeF => Val::B(R::le(a.f(), b.f())),
                Binary::AddI => Val::I(a.i().wrapping_add(b.i())),
                Binary::SubI => Val::I(a.i().wrapping_sub(b.i())),
                Binary::MulI => Val::I(a.i().wrapping_mul(b.i())),
                Binary::DivI => Val::I(div(a.i(), b.i())),
                Binary::RemI => Val::I(rem(a.i(), b.i())),
                Binary::MinI => Val::I(a.i().min(b.i())),
                Binary::MaxI => Val::I(a.i().max(b.i())),
                Binary::LtI => Val::B(a.i() < b.i()),
                Binary::LeI => Val::B(a.i() <= b.i()),
                Binary::EqI => Val::B(a.i() == b.i()),
                Binary::And => Val::B(a.b() & b.b()),
                Binary::Or => Val::B(a.b() | b.b()),
                op => Val::F(R::binary(op, a.f(), b.f())),
            }
        }
        Op::TooDeep => unreachable!("refused on building"),
    }
}

/// Euclidean quotient; 0 by zero or less.
#[inline(always)]
pub(crate) fn div(a: i32, b: i32) -> i32 {
    if b <= 0 { 0 } else { a.div_euclid(b) }
}

/// Euclidean remainder; 0 by zero or less.
#[inline(always)]
pub(crate) fn rem(a: i32, b: i32) -> i32 {
    if b <= 0 { 0 } else { a.rem_euclid(b) }
}
