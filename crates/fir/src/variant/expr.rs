//! Typed expression handles, and the flat graph that a variant keeps of them.
//!
//! A handle ([`F32`], [`I32`], [`Bool`]) is a shared tree; cloning one is cheap. Building a variant flattens its trees
//! into one list of [`Node`]s, operands before users and equal nodes merged, so that equality, hashing and every
//! lowering take time linear in the number of distinct nodes, however often a handle was used.

use std::collections::HashMap;
use std::ops;
use std::sync::Arc;

use super::params::ParamType;

/// Deepest expression: deeper ones are refused, so that walking and dropping them cannot exhaust the stack.
pub(super) const MAX_DEPTH: u32 = 500;

/// A node of an expression: `A` stands for an operand, `P` for a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Op<A, P> {
    /// By its bits, so that it can be compared and hashed.
    F32(u32),
    I32(i32),
    Bool(bool),
    Leaf(Leaf),
    /// A scalar parameter.
    Param(P),
    /// An element of a tensor parameter; the index is clamped.
    At(P, A),
    /// Bit `row * stride + col` of this request's segment.
    Bit(P, [A; 3]),
    Unary(Unary, A),
    Binary(Binary, A, A),
    Select(A, A, A),
    /// Stands for an expression deeper than [`MAX_DEPTH`].
    TooDeep,
}

/// What a row of attention knows by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Leaf {
    Score,
    QPos,
    KvPos,
    QIdx,
    QLen,
    KvLen,
    Batch,
    QoHead,
    KvHead,
    O,
    M,
    D,
}

impl Leaf {
    /// As it is written in Rust, without the parentheses, and in the CUDA text.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Score => "score",
            Self::QPos => "q_pos",
            Self::KvPos => "kv_pos",
            Self::QIdx => "q_idx",
            Self::QLen => "q_len",
            Self::KvLen => "kv_len",
            Self::Batch => "batch",
            Self::QoHead => "qo_head",
            Self::KvHead => "kv_head",
            Self::O => "o",
            Self::M => "m",
            Self::D => "d",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Unary {
    Neg,
    Tanh,
    Exp,
    Log,
    Sigmoid,
    Abs,
    Sqrt,
    ToF32,
    Not,
}

/// `F` and `I` in a name tell the operands' type. "Greater than" is "less than" with its operands exchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Binary {
    AddF,
    SubF,
    MulF,
    DivF,
    MinF,
    MaxF,
    LtF,
    LeF,
    AddI,
    SubI,
    MulI,
    DivI,
    RemI,
    MinI,
    MaxI,
    LtI,
    LeI,
    EqI,
    And,
    Or,
}

/// Type of an expression.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Ty {
    F32,
    I32,
    Bool,
}

/// Index of a node in its variant.
pub(crate) type Id = u32;
/// A node of a built variant; parameters are slots.
pub(crate) type Node = Op<Id, u32>;

impl Node {
    /// Its operands.
    pub(crate) fn operands(&self) -> impl Iterator<Item = Id> {
        let [a, b, c] = match *self {
            Op::At(_, a) | Op::Unary(_, a) => [Some(a), None, None],
            Op::Binary(_, a, b) => [Some(a), Some(b), None],
            Op::Bit(_, [a, b, c]) | Op::Select(a, b, c) => [Some(a), Some(b), Some(c)],
            Op::F32(_) | Op::I32(_) | Op::Bool(_) | Op::Leaf(_) | Op::Param(_) | Op::TooDeep => [None; 3],
        };
        [a, b, c].into_iter().flatten()
    }

    /// Type of its value; `param` gives the type of a slot.
    pub(crate) fn ty(&self, param: impl Fn(u32) -> ParamType) -> Ty {
        match *self {
            Op::F32(_) | Op::Select(..) | Op::TooDeep => Ty::F32,
            Op::I32(_) => Ty::I32,
            Op::Bool(_) | Op::Bit(..) | Op::Unary(Unary::Not, _) => Ty::Bool,
            Op::Leaf(Leaf::Score | Leaf::O | Leaf::M | Leaf::D) => Ty::F32,
            Op::Leaf(_) => Ty::I32,
            Op::Param(p) | Op::At(p, _) => match param(p) {
                ParamType::I32 | ParamType::I32Tensor => Ty::I32,
                _ => Ty::F32,
            },
            Op::Unary(..) => Ty::F32,
            Op::Binary(op, ..) => match op {
                Binary::AddF | Binary::SubF | Binary::MulF | Binary::DivF | Binary::MinF | Binary::MaxF => Ty::F32,
                Binary::AddI | Binary::SubI | Binary::MulI => Ty::I32,
                Binary::DivI | Binary::RemI | Binary::MinI | Binary::MaxI => Ty::I32,
                Binary::LtF | Binary::LeF | Binary::LtI | Binary::LeI | Binary::EqI => Ty::Bool,
                Binary::And | Binary::Or => Ty::Bool,
            },
        }
    }
}

/// A parameter by name, before the variant gives it a slot.
pub(super) type Named = (Arc<str>, ParamType);

/// A shared expression.
pub(super) type Tree = Arc<TreeNode>;

#[derive(Debug)]
pub(super) struct TreeNode {
    op: Op<Tree, Named>,
    depth: u32,
}

fn tree(op: Op<Tree, Named>) -> Tree {
    let below = match &op {
        Op::At(_, a) | Op::Unary(_, a) => a.depth,
        Op::Binary(_, a, b) => a.depth.max(b.depth),
        Op::Bit(_, [a, b, c]) | Op::Select(a, b, c) => a.depth.max(b.depth).max(c.depth),
        _ => 0,
    };
    if below >= MAX_DEPTH {
        return Arc::new(TreeNode { op: Op::TooDeep, depth: MAX_DEPTH });
    }
    Arc::new(TreeNode { op, depth: below + 1 })
}

/// Flattens trees, merging equal nodes.
#[derive(Default)]
pub(super) struct Flatten {
    pub(super) nodes: Vec<Node>,
    known: HashMap<Node, Id>,
    /// By address; the trees outlive the flattening.
    seen: HashMap<*const TreeNode, Id>,
}

impl Flatten {
    /// The node of `t`; `slot` finds a parameter or says why not.
    pub(super) fn tree<E>(&mut self, t: &Tree, slot: &impl Fn(&Named) -> Result<u32, E>) -> Result<Id, E> {
        if let Some(&id) = self.seen.get(&Arc::as_ptr(t)) {
            return Ok(id);
        }
        let node = match &t.op {
            Op::F32(x) => Op::F32(*x),
            Op::I32(x) => Op::I32(*x),
            Op::Bool(x) => Op::Bool(*x),
            Op::Leaf(x) => Op::Leaf(*x),
            Op::TooDeep => Op::TooDeep,
            Op::Param(p) => Op::Param(slot(p)?),
            Op::At(p, a) => Op::At(slot(p)?, self.tree(a, slot)?),
            Op::Bit(p, [a, b, c]) => Op::Bit(slot(p)?, [self.tree(a, slot)?, self.tree(b, slot)?, self.tree(c, slot)?]),
            Op::Unary(op, a) => Op::Unary(*op, self.tree(a, slot)?),
            Op::Binary(op, a, b) => Op::Binary(*op, self.tree(a, slot)?, self.tree(b, slot)?),
            Op::Select(a, b, c) => Op::Select(self.tree(a, slot)?, self.tree(b, slot)?, self.tree(c, slot)?),
        };
        let id = self.node(node);
        self.seen.insert(Arc::as_ptr(t), id);
        Ok(id)
    }

    /// The index of `node`, which it gets now unless an equal one has it.
    pub(super) fn node(&mut self, node: Node) -> Id {
        *self.known.entry(node).or_insert_with(|| {
            self.nodes.push(node);
            self.nodes.len() as Id - 1
        })
    }
}

/// An expression whose value is an f32.
#[derive(Clone, Debug)]
pub struct F32(pub(super) Tree);
/// An expression whose value is an i32. Arithmetic wraps around.
#[derive(Clone, Debug)]
pub struct I32(pub(super) Tree);
/// An expression whose value is true or false.
#[derive(Clone, Debug)]
pub struct Bool(pub(super) Tree);

/// An f32 tensor parameter of one axis.
#[derive(Clone, Debug)]
pub struct F32Tensor(pub(super) Named);
/// An i32 tensor parameter of one axis.
#[derive(Clone, Debug)]
pub struct I32Tensor(pub(super) Named);
/// A parameter of packed bits, a segment of bytes for each request.
#[derive(Clone, Debug)]
pub struct Bits(pub(super) Named);

fn leaf(leaf: Leaf) -> Tree {
    tree(Op::Leaf(leaf))
}
fn unary(op: Unary, a: Tree) -> Tree {
    tree(Op::Unary(op, a))
}
fn binary(op: Binary, a: Tree, b: Tree) -> Tree {
    tree(Op::Binary(op, a, b))
}
pub(super) fn param(p: Named) -> Tree {
    tree(Op::Param(p))
}

macro_rules! leaves {
    ($($(#[$doc:meta])* $name:ident: $t:ident = $leaf:ident;)*) => {$(
        $(#[$doc])*
        pub fn $name() -> $t {
            $t(leaf(Leaf::$leaf))
        }
    )*};
}
leaves! {
    /// The score `sm_scale · (q · k)`, in natural units. In `logits` only.
    score: F32 = Score;
    /// Position of the query token in its request, aligned at the end: `kv_len − q_len + q_idx`.
    q_pos: I32 = QPos;
    /// Position of the key in its request.
    kv_pos: I32 = KvPos;
    /// Index of the query token among its request's query tokens.
    q_idx: I32 = QIdx;
    /// Number of query tokens of the request.
    q_len: I32 = QLen;
    /// Number of keys of the request.
    kv_len: I32 = KvLen;
    /// Index of the request in the batch.
    batch: I32 = Batch;
    /// Index of the query head.
    qo_head: I32 = QoHead;
    /// Index of the key and value head.
    kv_head: I32 = KvHead;
    /// An element of the row's result: the weighted mean of the values (their weighted sum without softmax). In
    /// `output` only.
    o: F32 = O;
    /// The row's largest logit, in natural units; −∞ for a row that sees nothing. In `output` only.
    m: F32 = M;
    /// `Σ exp(logit − m)` over the row; 0 for a row that sees nothing. In `output` only.
    d: F32 = D;
}

impl From<f32> for F32 {
    fn from(x: f32) -> Self {
        Self(tree(Op::F32(x.to_bits())))
    }
}
impl From<i32> for I32 {
    fn from(x: i32) -> Self {
        Self(tree(Op::I32(x)))
    }
}
impl From<bool> for Bool {
    fn from(x: bool) -> Self {
        Self(tree(Op::Bool(x)))
    }
}

macro_rules! operators {
    ($t:ident, $lit:ty: $($tr:ident $f:ident $op:ident),*) => {$(
        impl<R: Into<$t>> ops::$tr<R> for $t {
            type Output = $t;
            fn $f(self, rhs: R) -> $t {
                $t(binary(Binary::$op, self.0, rhs.into().0))
            }
        }
        impl ops::$tr<$t> for $lit {
            type Output = $t;
            fn $f(self, rhs: $t) -> $t {
                $t(binary(Binary::$op, $t::from(self).0, rhs.0))
            }
        }
    )*};
}
operators!(F32, f32: Add add AddF, Sub sub SubF, Mul mul MulF, Div div DivF);
// Euclidean: the remainder is not negative. By zero or less, both are 0.
operators!(I32, i32: Add add AddI, Sub sub SubI, Mul mul MulI, Div div DivI, Rem rem RemI);
operators!(Bool, bool: BitAnd bitand And, BitOr bitor Or);

impl ops::Neg for F32 {
    type Output = Self;
    fn neg(self) -> Self {
        Self(unary(Unary::Neg, self.0))
    }
}
impl ops::Neg for I32 {
    type Output = Self;
    fn neg(self) -> Self {
        0 - self
    }
}
impl ops::Not for Bool {
    type Output = Self;
    fn not(self) -> Self {
        Self(unary(Unary::Not, self.0))
    }
}

impl F32 {
    /// Hyperbolic tangent.
    pub fn tanh(self) -> Self {
        Self(unary(Unary::Tanh, self.0))
    }
    /// `e` to this power.
    pub fn exp(self) -> Self {
        Self(unary(Unary::Exp, self.0))
    }
    /// Natural logarithm.
    pub fn log(self) -> Self {
        Self(unary(Unary::Log, self.0))
    }
    /// `1 / (1 + e^−x)`.
    pub fn sigmoid(self) -> Self {
        Self(unary(Unary::Sigmoid, self.0))
    }
    /// Magnitude.
    pub fn abs(self) -> Self {
        Self(unary(Unary::Abs, self.0))
    }
    /// Square root.
    pub fn sqrt(self) -> Self {
        Self(unary(Unary::Sqrt, self.0))
    }
    /// `if self < other { self } else { other }`: `other` when either is NaN.
    pub fn min(self, other: impl Into<Self>) -> Self {
        Self(binary(Binary::MinF, self.0, other.into().0))
    }
    /// `if self > other { self } else { other }`: `other` when either is NaN.
    pub fn max(self, other: impl Into<Self>) -> Self {
        Self(binary(Binary::MaxF, self.0, other.into().0))
    }
    /// `self < other`; false when either is NaN, as all comparisons.
    pub fn lt(self, other: impl Into<Self>) -> Bool {
        Bool(binary(Binary::LtF, self.0, other.into().0))
    }
    /// `self <= other`.
    pub fn le(self, other: impl Into<Self>) -> Bool {
        Bool(binary(Binary::LeF, self.0, other.into().0))
    }
    /// `self > other`.
    pub fn gt(self, other: impl Into<Self>) -> Bool {
        Bool(binary(Binary::LtF, other.into().0, self.0))
    }
    /// `self >= other`.
    pub fn ge(self, other: impl Into<Self>) -> Bool {
        Bool(binary(Binary::LeF, other.into().0, self.0))
    }
}

impl I32 {
    /// The smaller one.
    pub fn min(self, other: impl Into<Self>) -> Self {
        Self(binary(Binary::MinI, self.0, other.into().0))
    }
    /// The larger one.
    pub fn max(self, other: impl Into<Self>) -> Self {
        Self(binary(Binary::MaxI, self.0, other.into().0))
    }
    /// `self < other`.
    pub fn lt(self, other: impl Into<Self>) -> Bool {
        Bool(binary(Binary::LtI, self.0, other.into().0))
    }
    /// `self <= other`.
    pub fn le(self, other: impl Into<Self>) -> Bool {
        Bool(binary(Binary::LeI, self.0, other.into().0))
    }
    /// `self > other`.
    pub fn gt(self, other: impl Into<Self>) -> Bool {
        Bool(binary(Binary::LtI, other.into().0, self.0))
    }
    /// `self >= other`.
    pub fn ge(self, other: impl Into<Self>) -> Bool {
        Bool(binary(Binary::LeI, other.into().0, self.0))
    }
    /// `self == other`.
    pub fn eq(self, other: impl Into<Self>) -> Bool {
        Bool(binary(Binary::EqI, self.0, other.into().0))
    }
    /// `self != other`.
    pub fn ne(self, other: impl Into<Self>) -> Bool {
        !self.eq(other)
    }
    /// The nearest f32.
    pub fn to_f32(self) -> F32 {
        F32(unary(Unary::ToF32, self.0))
    }
}

impl Bool {
    /// True when both are.
    pub fn and(self, other: impl Into<Self>) -> Self {
        self & other
    }
    /// True when either is.
    pub fn or(self, other: impl Into<Self>) -> Self {
        self | other
    }
    /// `if self { a } else { b }`.
    pub fn select(self, a: impl Into<F32>, b: impl Into<F32>) -> F32 {
        F32(tree(Op::Select(self.0, a.into().0, b.into().0)))
    }
}

impl F32Tensor {
    /// Element `index`, which is clamped to the tensor.
    pub fn at(&self, index: impl Into<I32>) -> F32 {
        F32(tree(Op::At(self.0.clone(), index.into().0)))
    }
}
impl I32Tensor {
    /// Element `index`, which is clamped to the tensor.
    pub fn at(&self, index: impl Into<I32>) -> I32 {
        I32(tree(Op::At(self.0.clone(), index.into().0)))
    }
}
impl Bits {
    /// Bit `row · stride + col` of this request's segment, lowest bit of a byte first; false outside of it.
    pub fn at(&self, row: impl Into<I32>, col: impl Into<I32>, stride: impl Into<I32>) -> Bool {
        Bool(tree(Op::Bit(self.0.clone(), [row.into().0, col.into().0, stride.into().0])))
    }
}
