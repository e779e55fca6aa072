//! Runs a [`RowProgram`]: variants on rows of scores, of outputs and of heads.
//!
//! Values that are the same along a row are evaluated once. The others live in columns of up to [`COLUMNS`] 32-bit
//! values; each instruction is one loop over them, a multiple of 16 so that vectors are whole; the columns past the
//! row's end hold anything. Truth values are 0 and all ones.

use super::math;
use super::vector::{Kernel, Vector};
use crate::variant::eval::{Env, Val, div, rem, steps};
use crate::variant::row::{Columns, Conjunct, Instr, RowProgram, RowTransform, Src, Test};
use crate::variant::{Binary, Bound, RowCtx, Unary, bit, clamped};

/// Columns per pass: 1 KiB each, so that a program of a dozen stays in the first-level cache.
pub(crate) const COLUMNS: usize = 256;

/// Scratch of one worker, for any program; it grows at first use and is never cleared.
#[derive(Debug, Default)]
pub(crate) struct Registers {
    /// By node.
    once: Vec<Val<f32>>,
    /// Each of [`COLUMNS`] values.
    columns: Vec<Vec<u32>>,
}

impl Registers {
    #[inline(always)]
    fn prepare(&mut self, p: &RowProgram) {
        if self.once.len() < p.variant.0.nodes.len() || self.columns.len() < p.width {
            self.grow(p);
        }
    }

    #[cold]
    fn grow(&mut self, p: &RowProgram) {
        self.once.resize(p.variant.0.nodes.len().max(self.once.len()), Val::B(false));
        self.columns.resize(p.width.max(self.columns.len()), vec![0; COLUMNS]);
    }
}

/// Turns scores into logits, in place: `scores[j]` is that of `kv_start + j`, in natural units.
///
/// With `masked`, the mask is applied: a hidden position becomes −∞, or 0 without softmax. Without, it is as if the
/// mask were true.
#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "the hot path takes what it needs, without a struct to fill per tile")]
pub(crate) fn logits<V: Vector>(
    v: V,
    p: &RowProgram,
    bound: &Bound<'_>,
    ctx: &RowCtx,
    kv_start: i32,
    scores: &mut [f32],
    regs: &mut Registers,
    masked: bool,
) {
    regs.prepare(p);
    let env = Env::new(bound, ctx);
    if let Some(program) = &p.logits {
        v.call(Apply { p, program, env: &env, start: kv_start, x: scores, regs });
    }
    if masked && p.has_mask() {
        v.call(Mask { p, env: &env, start: kv_start, x: scores, regs });
    }
}

/// The keys that the range conditions of a row's mask let through, the first and the one behind the last: all that it
/// lets through, if [`RowProgram::has_interval`].
#[inline(always)]
pub(crate) fn interval(p: &RowProgram, bound: &Bound<'_>, ctx: &RowCtx, regs: &mut Registers) -> [i32; 2] {
    regs.prepare(p);
    let env = Env::new(bound, ctx);
    let (mut first, mut last) = (i64::MIN, i64::MAX);
    for c in &p.mask {
        narrow(p, c, &env, regs, &mut first, &mut last);
    }
    let end = last.saturating_add(1);
    [first, end].map(|x| x.clamp(i32::MIN.into(), i32::MAX.into()) as i32)
}

/// Narrows the keys `first..=last` to those that a condition lets through, if that is one of the row or of a range; in i64, as
/// a bound may be one past the largest i32. Otherwise the columns to evaluate.
#[inline(always)]
fn narrow<'p>(
    p: &RowProgram,
    c: &'p Conjunct,
    env: &Env<'_, f32>,
    regs: &mut Registers,
    first: &mut i64,
    last: &mut i64,
) -> Option<&'p Columns> {
    steps(&p.variant, &c.once, env, &mut regs.once);
    if c.unless.is_some_and(|id| regs.once[id as usize].b()) {
        return None;
    }
    match &c.test {
        Test::AtLeast(id, add) => *first = (*first).max(i64::from(regs.once[*id as usize].i()) + add),
        Test::AtMost(id, add) => *last = (*last).min(i64::from(regs.once[*id as usize].i()) + add),
        Test::One(id) => {
            if !regs.once[*id as usize].b() {
                *first = i64::MAX;
            }
        }
        Test::Columns(program) => return Some(program),
    }
    None
}

/// The logit a row starts with: `m = logit, d = 1, o = 0`. `None` when it starts empty.
#[inline]
pub(crate) fn init(p: &RowProgram, bound: &Bound<'_>, ctx: &RowCtx, regs: &mut Registers) -> Option<f32> {
    if !p.has_init() {
        return None;
    }
    regs.prepare(p);
    let e = p.variant.0.init.as_ref()?;
    steps(&p.variant, &e.order, &Env::new(bound, ctx), &mut regs.once);
    Some(regs.once[e.root as usize].f())
}

/// Transforms a row of the output in place; `o` is normalised already, `m` is in natural units.
#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "as `logits`")]
pub(crate) fn output<V: Vector>(
    v: V,
    p: &RowProgram,
    bound: &Bound<'_>,
    ctx: &RowCtx,
    o: &mut [f32],
    m: f32,
    d: f32,
    regs: &mut Registers,
) {
    let Some(program) = &p.output else { return };
    regs.prepare(p);
    let env = Env { m, d, ..Env::new(bound, ctx) };
    v.call(Apply { p, program, env: &env, start: 0, x: o, regs });
}

/// Does `t`, a hook of `p`, to a row of a query, key or value head in place; `pos` is its position. Of `ctx`, the request, `kv_len` and
/// `kv_head` count for keys and values.
#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "as `logits`")]
pub(crate) fn transform<V: Vector>(
    v: V,
    p: &RowProgram,
    t: &RowTransform,
    bound: &Bound<'_>,
    ctx: &RowCtx,
    pos: i32,
    x: &mut [f32],
    regs: &mut Registers,
) {
    if let Some(r) = &t.rope {
        v.call(Rotate { turns: &r.turns, interleave: r.interleave, pos, x });
    }
    if !t.scales.is_empty() {
        regs.prepare(p);
        let env = Env { kv_pos: pos, ..Env::new(bound, ctx) };
        steps(&p.variant, &t.once, &env, &mut regs.once);
        for &id in &t.scales {
            let by = regs.once[id as usize].f();
            for x in x.iter_mut() {
                *x *= by;
            }
        }
    }
}

/// Rotates the first `2 · turns.len()` elements of `x` (all of it, if it is shorter) by `pos · turns` turns.
struct Rotate<'a> {
    turns: &'a [f64],
    interleave: bool,
    pos: i32,
    x: &'a mut [f32],
}

impl Kernel for Rotate<'_> {
    type Out = ();
    #[inline(always)]
    fn run<V: Vector>(self, _: V) {
        let Self { turns, interleave, pos, x } = self;
        let pairs = turns.len().min(x.len() / 2);
        let mut i = 0;
        while i < pairs {
            let n = (pairs - i).min(16);
            let (mut sin, mut cos) = ([0f32; 16], [0f32; 16]);
            let mut part = [0f64; 16];
            part[..n].copy_from_slice(&turns[i..i + n]);
            for j in 0..16 {
                (sin[j], cos[j]) = sin_cos(f64::from(pos) * part[j]);
            }
            if interleave {
                for (j, pair) in x[2 * i..2 * (i + n)].as_chunks_mut::<2>().0.iter_mut().enumerate() {
                    let [a, b] = *pair;
                    *pair = [a * cos[j] - b * sin[j], a * sin[j] + b * cos[j]];
                }
            } else {
                let (low, high) = x.split_at_mut(pairs);
                for (j, (a, b)) in low[i..i + n].iter_mut().zip(&mut high[i..i + n]).enumerate() {
                    (*a, *b) = (*a * cos[j] - *b * sin[j], *a * sin[j] + *b * cos[j]);
                }
            }
            i += n;
        }
    }
}

/// Sine and cosine of `turns · 2π`, within 2 ulp of the larger one's last place; branch-free, so that loops over it
/// vectorise. The reduction is in f64: it is exact, so the angle is as good as `turns`.
#[inline(always)]
pub(crate) fn sin_cos(turns: f64) -> (f32, f32) {
    // Adding 1.5 · 2^52 rounds to the nearest integer, for magnitudes below 2^51; its low bits are that integer's.
    const SHIFT: f64 = 6_755_399_441_055_744.0;
    let shifted = turns * 4.0 + SHIFT;
    let quarter = shifted.to_bits() as u32;
    // Within an eighth of a turn on either side of a quarter.
    let y = ((turns - (shifted - SHIFT) * 0.25) * std::f64::consts::TAU) as f32;
    let y2 = y * y;
    // Taylor-like polynomials, fitted on |y| <= π/4: errors below 2^-25.
    let s = ((-1.951_529_6e-4 * y2 + 8.332_161e-3) * y2 - 1.666_665_5e-1) * y2 * y + y;
    let c = ((2.443_315_7e-5 * y2 - 1.388_731_6e-3) * y2 + 4.166_664_6e-2) * y2 * y2 - 0.5 * y2 + 1.0;
    let (s, c) = if quarter & 1 != 0 { (c, s) } else { (s, c) };
    let flip = |x: f32, bit: u32| f32::from_bits(x.to_bits() ^ (bit << 31));
    (flip(s, quarter >> 1 & 1), flip(c, (quarter >> 1 ^ quarter) & 1))
}

/// Runs a program with `x` as its input column, and writes the result over it.
struct Apply<'a> {
    p: &'a RowProgram,
    program: &'a Columns,
    env: &'a Env<'a, f32>,
    start: i32,
    x: &'a mut [f32],
    regs: &'a mut Registers,
}

impl Kernel for Apply<'_> {
    type Out = ();
    #[inline(always)]
    fn run<V: Vector>(self, v: V) {
        let Self { p, program, env, mut start, x, regs } = self;
        steps(&p.variant, &program.once, env, &mut regs.once);
        for x in x.chunks_mut(COLUMNS) {
            copy(v, x, bytemuck::cast_slice_mut(&mut regs.columns[0]));
            v.call(Execute { program, env, start, n: x.len(), regs });
            match program.result {
                Src::Col(c) => copy(v, &bytemuck::cast_slice(&regs.columns[c as usize])[..x.len()], x),
                Src::One(id) => x.fill(regs.once[id as usize].f()),
            }
            start = start.wrapping_add(COLUMNS as i32);
        }
    }
}

/// Copies `x` to the head of `out` in whole vectors: the loads that follow are as wide, and a load that spans two
/// narrower stores (`memcpy`'s) waits for both to leave the store buffer.
#[inline(always)]
fn copy<V: Vector>(v: V, x: &[f32], out: &mut [f32]) {
    let full = x.len() / V::LANES * V::LANES;
    let mut i = 0;
    while i < full {
        v.store(v.load(&x[i..]), &mut out[i..]);
        i += V::LANES;
    }
    for (out, x) in out[full..].iter_mut().zip(&x[full..]) {
        *out = *x;
    }
}

/// Fills the columns that the mask hides.
struct Mask<'a> {
    p: &'a RowProgram,
    env: &'a Env<'a, f32>,
    start: i32,
    x: &'a mut [f32],
    regs: &'a mut Registers,
}

impl Kernel for Mask<'_> {
    type Out = ();
    #[inline(always)]
    fn run<V: Vector>(self, v: V) {
        let Self { p, env, start, x, regs } = self;
        let hidden = if p.softmax() { f32::NEG_INFINITY } else { 0.0 };
        let (mut first, mut last) = (i64::MIN, i64::MAX);
        for c in &p.mask {
            let Some(program) = narrow(p, c, env, regs, &mut first, &mut last) else { continue };
            let mut start = start;
            for x in x.chunks_mut(COLUMNS) {
                v.call(Execute { program, env, start, n: x.len(), regs });
                let Src::Col(c) = program.result else { unreachable!("a test that varies") };
                for (x, &m) in x.iter_mut().zip(&regs.columns[c as usize]) {
                    *x = if m != 0 { *x } else { hidden };
                }
                start = start.wrapping_add(COLUMNS as i32);
            }
        }
        let n = x.len() as i64;
        let from = first.saturating_sub(start.into()).clamp(0, n) as usize;
        let to = last.saturating_sub(start.into()).saturating_add(1).clamp(0, n) as usize;
        if from >= to {
            x.fill(hidden);
        } else {
            x[..from].fill(hidden);
            x[to..].fill(hidden);
        }
    }
}

/// The bits of a value that is the same in all columns.
#[inline(always)]
fn word(x: Val<f32>) -> u32 {
    match x {
        Val::F(x) => x.to_bits(),
        Val::I(x) => x as u32,
        Val::B(x) => truth(x),
    }
}

#[inline(always)]
fn truth(x: bool) -> u32 {
    u32::from(x).wrapping_neg()
}

/// `$out[i] = $e` for all `i`, with `$x` (and `$y`) standing for the operands' bits. A macro, as a closure might be
/// compiled without the level's instructions; plain loops, as fixed blocks get unrolled before they are vectorised.
macro_rules! each {
    ($out:expr, $x:ident in $a:expr => $e:expr) => {
        for (out, &$x) in $out.iter_mut().zip($a.iter()) {
            *out = $e;
        }
    };
    ($out:expr, $x:ident in $a:expr, $y:ident in $b:expr => $e:expr) => {
        for ((out, &$x), &$y) in $out.iter_mut().zip($a.iter()).zip($b.iter()) {
            *out = $e;
        }
    };
}

/// [`each`] over two operands, of which one may be the same in all columns.
macro_rules! pairs {
    ($regs:expr, $n:expr, $out:expr, $a:expr, $b:expr, |$x:ident, $y:ident| $e:expr) => {
        match ($a, $b) {
            (Src::Col(a), Src::Col(b)) => {
                each!($out, $x in $regs.columns[a as usize][..$n], $y in $regs.columns[b as usize][..$n] => $e)
            }
            (Src::Col(a), Src::One(b)) => {
                let $y = word($regs.once[b as usize]);
                each!($out, $x in $regs.columns[a as usize][..$n] => $e)
            }
            (Src::One(a), Src::Col(b)) => {
                let $x = word($regs.once[a as usize]);
                each!($out, $y in $regs.columns[b as usize][..$n] => $e)
            }
            (Src::One(_), Src::One(_)) => unreachable!("the same in all columns"),
        }
    };
}

/// `$out = math::$f($a)`, a vector at a time.
macro_rules! vectors {
    ($v:expr, $out:expr, $a:expr, $f:ident) => {{
        let (out, a): (&mut [f32], &[f32]) = (bytemuck::cast_slice_mut($out), bytemuck::cast_slice($a));
        let mut i = 0;
        while i < a.len() {
            $v.store(math::$f($v, $v.load(&a[i..])), &mut out[i..]);
            i += V::LANES;
        }
    }};
}

/// Runs the instructions over the first `n` columns, rounded up to whole blocks. It is large, and so out of line.
struct Execute<'a> {
    program: &'a Columns,
    env: &'a Env<'a, f32>,
    start: i32,
    n: usize,
    regs: &'a mut Registers,
}

impl Kernel for Execute<'_> {
    type Out = ();
    #[inline(always)]
    fn run<V: Vector>(self, v: V) {
        let Self { program, env, start, n, regs } = self;
        execute(v, program, env, start, n.next_multiple_of(16), regs);
    }
}

#[inline(always)]
fn execute<V: Vector>(v: V, program: &Columns, env: &Env<'_, f32>, start: i32, n: usize, regs: &mut Registers) {
    let f = f32::from_bits;
    for instr in &program.code {
        match *instr {
            Instr::KvPos { dst } => {
                for (j, out) in regs.columns[dst as usize][..n].iter_mut().enumerate() {
                    *out = (start as u32).wrapping_add(j as u32);
                }
            }
            Instr::Splat { dst, from } => {
                let x = word(regs.once[from as usize]);
                regs.columns[dst as usize][..n].fill(x);
            }
            Instr::Unary { op, dst, a } => {
                let mut column = std::mem::take(&mut regs.columns[dst as usize]);
                let (out, a) = (&mut column[..n], &regs.columns[a as usize][..n]);
                match op {
                    Unary::Neg => each!(out, x in a => x ^ 1 << 31),
                    Unary::Abs => each!(out, x in a => x & !(1 << 31)),
                    Unary::Sqrt => each!(out, x in a => f(x).sqrt().to_bits()),
                    Unary::ToF32 => each!(out, x in a => (x as i32 as f32).to_bits()),
                    Unary::Not => each!(out, x in a => !x),
                    Unary::Tanh => vectors!(v, out, a, tanh),
                    Unary::Exp => vectors!(v, out, a, exp),
                    Unary::Sigmoid => vectors!(v, out, a, sigmoid),
                    // A call per column: logarithms of scores are rare.
                    Unary::Log => each!(out, x in a => f(x).ln().to_bits()),
                }
                regs.columns[dst as usize] = column;
            }
            Instr::Binary { op, dst, a, b } => {
                let mut column = std::mem::take(&mut regs.columns[dst as usize]);
                let out = &mut column[..n];
                match op {
                    Binary::AddF => pairs!(regs, n, out, a, b, |x, y| (f(x) + f(y)).to_bits()),
                    Binary::SubF => pairs!(regs, n, out, a, b, |x, y| (f(x) - f(y)).to_bits()),
                    Binary::MulF => pairs!(regs, n, out, a, b, |x, y| (f(x) * f(y)).to_bits()),
                    Binary::DivF => pairs!(regs, n, out, a, b, |x, y| (f(x) / f(y)).to_bits()),
                    Binary::MinF => pairs!(regs, n, out, a, b, |x, y| if f(x) < f(y) { x } else { y }),
                    Binary::MaxF => pairs!(regs, n, out, a, b, |x, y| if f(x) > f(y) { x } else { y }),
                    Binary::LtF => pairs!(regs, n, out, a, b, |x, y| truth(f(x) < f(y))),
                    Binary::LeF => pairs!(regs, n, out, a, b, |x, y| truth(f(x) <= f(y))),
                    Binary::AddI => pairs!(regs, n, out, a, b, |x, y| x.wrapping_add(y)),
                    Binary::SubI => pairs!(regs, n, out, a, b, |x, y| x.wrapping_sub(y)),
                    Binary::MulI => pairs!(regs, n, out, a, b, |x, y| x.wrapping_mul(y)),
                    Binary::DivI => pairs!(regs, n, out, a, b, |x, y| div(x as i32, y as i32) as u32),
                    Binary::RemI => pairs!(regs, n, out, a, b, |x, y| rem(x as i32, y as i32) as u32),
                    Binary::MinI => pairs!(regs, n, out, a, b, |x, y| (x as i32).min(y as i32) as u32),
                    Binary::MaxI => pairs!(regs, n, out, a, b, |x, y| (x as i32).max(y as i32) as u32),
                    Binary::LtI => pairs!(regs, n, out, a, b, |x, y| truth((x as i32) < y as i32)),
                    Binary::LeI => pairs!(regs, n, out, a, b, |x, y| truth(x as i32 <= y as i32)),
                    Binary::EqI => pairs!(regs, n, out, a, b, |x, y| truth(x == y)),
                    Binary::And => pairs!(regs, n, out, a, b, |x, y| x & y),
                    Binary::Or => pairs!(regs, n, out, a, b, |x, y| x | y),
                }
                regs.columns[dst as usize] = column;
            }
            Instr::Select { dst, mask, a, b } => {
                let mut column = std::mem::take(&mut regs.columns[dst as usize]);
                let out = &mut column[..n];
                let (a, b) = (&regs.columns[a as usize][..n], &regs.columns[b as usize][..n]);
                match mask {
                    Src::One(id) => out.copy_from_slice(if regs.once[id as usize].b() { a } else { b }),
                    Src::Col(m) => {
                        let m = &regs.columns[m as usize][..n];
                        for (((out, &m), &a), &b) in out.iter_mut().zip(m).zip(a).zip(b) {
                            *out = (m & a) | (!m & b);
                        }
                    }
                }
                regs.columns[dst as usize] = column;
            }
            Instr::AtF { dst, slot, index } => {
                let mut column = std::mem::take(&mut regs.columns[dst as usize]);
                let x = env.bound.f32s(slot);
                each!(column[..n], i in regs.columns[index as usize][..n] => clamped(x, i as i32).to_bits());
                regs.columns[dst as usize] = column;
            }
            Instr::AtI { dst, slot, index } => {
                let mut column = std::mem::take(&mut regs.columns[dst as usize]);
                let x = env.bound.i32s(slot);
                each!(column[..n], i in regs.columns[index as usize][..n] => clamped(x, i as i32) as u32);
                regs.columns[dst as usize] = column;
            }
            Instr::Bit { dst, slot, row, col, stride } => {
                let mut column = std::mem::take(&mut regs.columns[dst as usize]);
                let segment = env.bound.segment(slot, env.row.batch);
                let out = &mut column[..n];
                match (row, col, stride) {
                    (Src::One(r), Src::Col(c), Src::One(s)) => {
                        let (r, s) = (regs.once[r as usize].i(), regs.once[s as usize].i());
                        each!(out, c in regs.columns[c as usize][..n] => truth(bit(segment, r, c as i32, s)));
                    }
                    _ => {
                        for (j, out) in out.iter_mut().enumerate() {
                            let at = |src| match src {
                                Src::Col(c) => regs.columns[c as usize][j] as i32,
                                Src::One(id) => regs.once[id as usize].i(),
                            };
                            *out = truth(bit(segment, at(row), at(col), at(stride)));
                        }
                    }
                }
                regs.columns[dst as usize] = column;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::level::{Level, Token};
    use crate::testing::{Case, Rng, exact_variants, init_error, logit_error, output_error, scale_error};
    use crate::variant::{self as dsl, Params, Rope, Side, eval, kv_pos, logits as set_logits, score, variant};

    /// Runs one of this file's functions at a level.
    struct Run<'a> {
        p: &'a RowProgram,
        bound: &'a Bound<'a>,
        ctx: RowCtx,
        what: What,
        x: &'a mut [f32],
        regs: &'a mut Registers,
    }
    #[derive(Clone, Copy)]
    enum What {
        Logits { kv_start: i32, masked: bool },
        Output { m: f32, d: f32 },
        Side(Side, i32),
    }
    impl Kernel for Run<'_> {
        type Out = ();
        #[inline(always)]
        fn run<V: Vector>(self, v: V) {
            let Run { p, bound, ctx, what, x, regs } = self;
            match what {
                What::Logits { kv_start, masked } => logits(v, p, bound, &ctx, kv_start, x, regs, masked),
                What::Output { m, d } => output(v, p, bound, &ctx, x, m, d, regs),
                What::Side(Side::Query, pos) => transform(v, p, &p.query, bound, &ctx, pos, x, regs),
                What::Side(Side::Key, pos) => transform(v, p, &p.key, bound, &ctx, pos, x, regs),
                What::Side(Side::Value, pos) => transform(v, p, &p.value, bound, &ctx, pos, x, regs),
            }
        }
    }

    fn levels() -> Vec<Token> {
        Level::available().into_iter().filter_map(Token::of).collect()
    }

    fn near(got: f32, want: f64, err: f64) -> bool {
        err.is_infinite() || (f64::from(got) - want).abs() <= err
    }

    #[test]
    fn rows_agree_with_the_reference_on_random_variants() {
        let mut regs = Registers::default();
        let (mut close, mut all) = (0usize, 0usize);
        for seed in 0..600 {
            let mut rng = Rng::new(seed);
            let case = Case::random(&mut rng, 2 + seed as usize % 40);
            let (bound, row) = (case.bind(), case.row);
            let p = RowProgram::new(&case.variant, 8, 8).unwrap();
            let n = rng.below(70);
            let kv_start = rng.below(300) as i32;
            let scores: Vec<f32> = (0..n).map(|_| rng.normal() * 4.0).collect();
            for token in levels() {
                for masked in [false, true] {
                    let mut x = scores.clone();
                    let what = What::Logits { kv_start, masked };
                    token.run(Run { p: &p, bound: &bound, ctx: row, what, x: &mut x, regs: &mut regs });
                    for (j, (&got, &s)) in x.iter().zip(&scores).enumerate() {
                        let pos = kv_start + j as i32;
                        if masked && !eval::visible(&case.variant, &bound, &row, pos) {
                            assert_eq!(got, f32::NEG_INFINITY, "seed {seed} column {j} of {n}");
                            continue;
                        }
                        let want = eval::logit(&case.variant, &bound, &row, pos, s.into());
                        let err = logit_error(&case.variant, &bound, &row, pos, s);
                        all += 1;
                        close += usize::from(err < 1e-3 * (1.0 + want.abs()));
                        assert!(
                            near(got, want, err),
                            "seed {seed} column {j}: {got} {want} ±{err}: {:?}",
                            case.variant
                        );
                    }
                }
                let (m, d) = (2.5f32, 17.0);
                let mut x = scores.clone();
                let what = What::Output { m, d };
                token.run(Run { p: &p, bound: &bound, ctx: row, what, x: &mut x, regs: &mut regs });
                for (&got, &o) in x.iter().zip(&scores) {
                    let want = eval::output(&case.variant, &bound, &row, o.into(), m.into(), d.into());
                    let err = output_error(&case.variant, &bound, &row, [o, m, d]);
                    assert!(near(got, want, err), "seed {seed}: output {got} {want} ±{err}");
                }
                for side in [Side::Query, Side::Key, Side::Value] {
                    let (mut got, mut want) = ([1.0f32], [1.0f64]);
                    let what = What::Side(side, kv_start);
                    token.run(Run { p: &p, bound: &bound, ctx: row, what, x: &mut got, regs: &mut regs });
                    eval::transform(&case.variant, &bound, side, &row, kv_start, &mut want);
                    let err = scale_error(&case.variant, &bound, side, &row, kv_start);
                    assert!(near(got[0], want[0], err), "seed {seed}: {side:?} {got:?} {want:?} ±{err}");
                }
                let (got, want) = (init(&p, &bound, &row, &mut regs), eval::init(&case.variant, &bound, &row));
                assert!(
                    near(got.unwrap(), want.unwrap(), init_error(&case.variant, &bound, &row)),
                    "seed {seed}: {got:?} {want:?}"
                );
            }
        }
        // A bound that is always infinite would prove nothing.
        assert!(close * 10 > all * 7, "{close} of {all}");
    }

    #[test]
    fn exact_operations_are_exact() {
        let mut rng = Rng::new(2);
        for v in exact_variants() {
            let (p, bound) = (RowProgram::new(&v, 8, 8).unwrap(), v.bind(&Params::new(), 1, 1).unwrap());
            for q_idx in 0..7 {
                let ctx = RowCtx { batch: 0, q_idx, q_len: 50, kv_len: 200, qo_head: 0, kv_head: 0 };
                let scores = rng.normals(200);
                for token in levels() {
                    let mut x = scores.clone();
                    let (what, regs) = (What::Logits { kv_start: 0, masked: true }, &mut Registers::default());
                    token.run(Run { p: &p, bound: &bound, ctx, what, x: &mut x, regs });
                    for (j, (&got, &s)) in x.iter().zip(&scores).enumerate() {
                        let want = eval::logit(&v, &bound, &ctx, j as i32, s.into());
                        assert_eq!(f64::from(got), want, "{} {} [{j}] {s}", v.name(), token.level());
                    }
                }
            }
        }
    }

    #[test]
    fn rows_longer_than_the_scratch_are_cut() {
        let v = variant("Ramp", |_| set_logits(score() + kv_pos().to_f32()).mask((kv_pos() % 3).ne(1))).unwrap();
        let (p, bound) = (RowProgram::new(&v, 8, 8).unwrap(), v.bind(&Params::new(), 1, 1).unwrap());
        let ctx = RowCtx { batch: 0, q_idx: 0, q_len: 1, kv_len: 2000, qo_head: 0, kv_head: 0 };
        for token in levels() {
            for n in [0, 1, 255, 256, 257, 1000] {
                let mut x = vec![0.5; n];
                let what = What::Logits { kv_start: 7, masked: true };
                token.run(Run { p: &p, bound: &bound, ctx, what, x: &mut x, regs: &mut Registers::default() });
                for (j, &x) in x.iter().enumerate() {
                    let pos = 7 + j;
                    assert_eq!(x, if pos % 3 == 1 { f32::NEG_INFINITY } else { pos as f32 + 0.5 });
                }
            }
        }
    }

    #[test]
    fn transforms_agree_with_the_reference_up_to_a_million_positions() {
        let mut rng = Rng::new(3);
        for (interleave, rotary_dim) in [(false, None), (true, None), (false, Some(32)), (true, Some(20))] {
            let rope = Rope { theta: 1e6, scale: 4.0, interleave, rotary_dim, ..Rope::default() };
            let llama31 = dsl::Llama31 { low_freq_factor: 1.0, high_freq_factor: 4.0, old_context_len: 8192.0 };
            let v = variant("Turn", |p| {
                let by = p.f32("by");
                let smooth = Rope { llama31: Some(llama31), ..rope };
                let by_pos = kv_pos().to_f32() * 1e-6 + 1.0;
                dsl::query(dsl::rope(rope).scale(by)).key(dsl::rope(smooth).scale(by_pos)).value(dsl::scale(0.5))
            })
            .unwrap();
            let bound = v.bind(&Params::new().f32("by", 1.25), 1, 1).unwrap();
            let ctx = RowCtx { batch: 0, q_idx: 0, q_len: 1, kv_len: 1, qo_head: 0, kv_head: 0 };
            for dim in [32, 64, 128, 130] {
                let p = RowProgram::new(&v, dim, dim).unwrap();
                for pos in [0, 1, 2, 1000, 131_071, 1_000_000, -5] {
                    let x = rng.normals(dim);
                    for side in [Side::Query, Side::Key, Side::Value] {
                        let mut want: Vec<f64> = x.iter().map(|&x| x.into()).collect();
                        eval::transform(&v, &bound, side, &ctx, pos, &mut want);
                        for token in levels() {
                            let mut got = x.clone();
                            let (what, regs) = (What::Side(side, pos), &mut Registers::default());
                            token.run(Run { p: &p, bound: &bound, ctx, what, x: &mut got, regs });
                            for (i, (&g, &w)) in got.iter().zip(&want).enumerate() {
                                // Two products of numbers below 6, each rounded thrice, and a factor.
                                let bound = 6.0 * 2f64.powi(-21);
                                assert!((f64::from(g) - w).abs() < bound, "{side:?} {dim} {pos} [{i}]: {g} {w}");
                            }
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn sin_cos_is_exact_to_two_ulp() {
        let mut rng = Rng::new(5);
        for i in 0..100_000 {
            let turns = f64::from(rng.normal()) * 10f64.powi(i % 9 - 2);
            let (s, c) = sin_cos(turns);
            let (ws, wc) = ((turns - turns.round()) * std::f64::consts::TAU).sin_cos();
            for (got, want) in [(s, ws), (c, wc)] {
                assert!((f64::from(got) - want).abs() < 2f64.powi(-23), "{turns}: {got} {want}");
            }
        }
        assert_eq!(sin_cos(0.0), (0.0, 1.0));
    }

    #[test]
    fn a_rotation_that_does_not_fit_is_refused() {
        let v =
            |rotary_dim| variant("Turn", |_| dsl::query(dsl::rope(Rope { rotary_dim, ..Rope::default() }))).unwrap();
        assert!(RowProgram::new(&v(None), 7, 8).is_err());
        let err = RowProgram::new(&v(Some(64)), 32, 32).unwrap_err().to_string();
        let want = "variant `Turn`: hook `query`: rope: got rotary_dim 64 for heads of 32, \
                    expected rotary_dim even and at most the head's 32";
        assert_eq!(err, want);
        assert!(RowProgram::new(&v(Some(32)), 32, 7).is_ok());
    }
}
