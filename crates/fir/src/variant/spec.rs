//! [`Variant`]: name, parameters and hooks, checked when it is built.

use std::sync::Arc;

use super::expr::{Bits, Bool, F32, F32Tensor, Flatten, I32, I32Tensor, Id, Leaf, MAX_DEPTH, Named, Node, Op, param};
use super::params::ParamType;
use super::rope::Rope;
use super::text::Text;
use crate::error::{Error, Result};

/// How logits become weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Normalize {
    /// `weight = exp(logit) / Σ exp(logit)`; a masked position counts as −∞.
    Softmax,
    /// `weight = logit`; a masked position weighs 0.
    None,
}

/// A place where a variant may act.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Hook {
    Query,
    Key,
    Value,
    Logits,
    Mask,
    Init,
    Output,
}

impl Hook {
    const ALL: [Self; 7] = [Self::Query, Self::Key, Self::Value, Self::Logits, Self::Mask, Self::Init, Self::Output];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Query => "query",
            Self::Key => "key",
            Self::Value => "value",
            Self::Logits => "logits",
            Self::Mask => "mask",
            Self::Init => "init",
            Self::Output => "output",
        }
    }

    /// The leaves that have a value there, in the order in which the CUDA text passes them (`q_pos` apart, which
    /// follows from others). Keys and values are transformed once for all queries, so nothing of a query is there.
    pub(crate) fn leaves(self) -> &'static [Leaf] {
        use Leaf::{Batch, D, KvHead, KvLen, KvPos, M, O, QIdx, QLen, QPos, QoHead, Score};
        match self {
            Self::Query | Self::Init => &[Batch, QIdx, QLen, KvLen, QoHead, KvHead, QPos],
            Self::Key | Self::Value => &[Batch, KvLen, KvPos, KvHead],
            Self::Logits => &[Score, Batch, QIdx, QLen, KvLen, KvPos, QoHead, KvHead, QPos],
            Self::Mask => &[Batch, QIdx, QLen, KvLen, KvPos, QoHead, KvHead, QPos],
            Self::Output => &[O, M, D, Batch, QIdx, QLen, KvLen, QoHead, KvHead, QPos],
        }
    }
}

/// The expression of a hook: its last node, and all that it is made of, operands first.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Expr {
    pub(crate) root: Id,
    pub(crate) order: Vec<Id>,
}

/// A vector transform: rotation and scaling commute, so it is at most one rotation, and a product.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Vectors {
    pub(crate) rope: Option<Rope>,
    pub(crate) scales: Vec<Expr>,
}

impl Vectors {
    pub(crate) fn is_empty(&self) -> bool {
        self.rope.is_none() && self.scales.is_empty()
    }
}

/// What is done to a score between `q · k` and softmax, and around it. See the [module](super).
///
/// Made by [`variant`](fn@variant); a plain value, equal to another when name, parameters and hooks are.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Variant(pub(crate) Arc<Inner>);

#[derive(Debug, PartialEq, Eq, Hash)]
pub(crate) struct Inner {
    name: String,
    params: Vec<(Arc<str>, ParamType)>,
    pub(crate) nodes: Vec<Node>,
    pub(crate) query: Vectors,
    pub(crate) key: Vectors,
    pub(crate) value: Vectors,
    pub(crate) logits: Option<Expr>,
    pub(crate) mask: Option<Expr>,
    pub(crate) init: Option<Expr>,
    pub(crate) output: Option<Expr>,
    pub(crate) normalize: Normalize,
    /// Hooks that are CUDA C++ text, over the others.
    pub(crate) text: Option<Text>,
}

impl std::fmt::Debug for Variant {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

/// Declares the parameters of a variant, and gives the expressions that read them.
#[derive(Debug, Default)]
pub struct Declare {
    params: Vec<Named>,
    twice: Option<String>,
}

impl Declare {
    fn add(&mut self, name: &str, ty: ParamType) -> Named {
        let named: Named = (name.into(), ty);
        if self.params.iter().any(|p| p.0 == named.0) {
            self.twice.get_or_insert_with(|| name.into());
        } else {
            self.params.push(named.clone());
        }
        named
    }

    /// A number.
    pub fn f32(&mut self, name: &str) -> F32 {
        F32(param(self.add(name, ParamType::F32)))
    }
    /// An integer.
    pub fn i32(&mut self, name: &str) -> I32 {
        I32(param(self.add(name, ParamType::I32)))
    }
    /// An f32 tensor of one axis.
    pub fn f32_tensor(&mut self, name: &str) -> F32Tensor {
        F32Tensor(self.add(name, ParamType::F32Tensor))
    }
    /// An i32 tensor of one axis.
    pub fn i32_tensor(&mut self, name: &str) -> I32Tensor {
        I32Tensor(self.add(name, ParamType::I32Tensor))
    }
    /// The value of this row's query head, of an f32 tensor with one value per query head.
    pub fn per_head(&mut self, name: &str) -> F32 {
        F32Tensor(self.add(name, ParamType::PerHead)).at(super::qo_head())
    }
    /// Packed bits.
    pub fn bits(&mut self, name: &str) -> Bits {
        Bits(self.add(name, ParamType::Bits))
    }
}

/// Steps applied in order to one head's row of a query, key or value.
#[derive(Clone, Debug, Default)]
pub struct Transform {
    ropes: Vec<Rope>,
    scales: Vec<F32>,
}

impl Transform {
    /// Then rotates.
    pub fn rope(mut self, rope: Rope) -> Self {
        self.ropes.push(rope);
        self
    }
    /// Then multiplies.
    pub fn scale(mut self, by: impl Into<F32>) -> Self {
        self.scales.push(by.into());
        self
    }
}

/// Rotates by the row's position: `q_pos` for a query, `kv_pos` for a key. Values are not rotated.
pub fn rope(rope: Rope) -> Transform {
    Transform::default().rope(rope)
}

/// Multiplies by a number.
pub fn scale(by: impl Into<F32>) -> Transform {
    Transform::default().scale(by)
}

/// The hooks of a variant that is being built; each is set once.
#[derive(Clone, Debug, Default)]
pub struct Hooks {
    query: Option<Transform>,
    key: Option<Transform>,
    value: Option<Transform>,
    logits: Option<F32>,
    mask: Option<Bool>,
    init: Option<F32>,
    output: Option<F32>,
    none: bool,
    twice: Option<Hook>,
}

macro_rules! hooks {
    ($($(#[$doc:meta])* $name:ident($t:ty) = $hook:ident;)*) => {
        impl Hooks {
            $($(#[$doc])*
            pub fn $name(mut self, x: impl Into<$t>) -> Self {
                if self.$name.replace(x.into()).is_some() {
                    self.twice = Some(Hook::$hook);
                }
                self
            })*

            /// The weight of a position is its logit, without softmax; a masked position weighs 0.
            pub fn normalize_none(mut self) -> Self {
                self.none = true;
                self
            }
        }
        $($(#[$doc])*
        pub fn $name(x: impl Into<$t>) -> Hooks {
            Hooks::default().$name(x)
        })*
    };
}
hooks! {
    /// Transforms each query head's row, before `q · k`.
    query(Transform) = Query;
    /// Transforms each key head's row, before `q · k`.
    key(Transform) = Key;
    /// Transforms each value head's row.
    value(Transform) = Value;
    /// Makes a logit of a [`score`](super::score).
    logits(F32) = Logits;
    /// Which keys a query sees; all when not set. Keys past the request's end are never seen.
    mask(Bool) = Mask;
    /// The logit of a key that is not there, and whose value is zero: an attention sink.
    init(F32) = Init;
    /// Makes an element of the output of [`o`](super::o), [`m`](super::m) and [`d`](super::d).
    output(F32) = Output;
}

/// No hook at all: plain attention.
pub fn plain() -> Hooks {
    Hooks::default()
}

/// Builds a variant: `build` declares parameters and returns the hooks.
///
/// `name` is a type's name in the CUDA text: an upper-case letter, then letters, digits and single underscores.
///
/// # Errors
/// [`Error::Variant`] when a name is taken twice or is no identifier, when a hook is set twice or reads what it does
/// not have (a score in a mask, say), or when a constant is NaN.
pub fn variant(name: &str, build: impl FnOnce(&mut Declare) -> Hooks) -> Result<Variant> {
    let refuse = |what: String, got: &str, want: &str| Error::Variant {
        variant: name.into(),
        what,
        got: got.into(),
        want: want.into(),
    };
    let mut declare = Declare::default();
    let hooks = build(&mut declare);
    if let Some(p) = declare.twice {
        return Err(refuse(format!("parameter `{p}`"), "declared twice", "once"));
    }
    if let Some(hook) = hooks.twice {
        return Err(refuse(format!("hook `{}`", hook.name()), "set twice", "once"));
    }
    let params = declare.params;
    let slot = |p: &Named| match params.iter().position(|q| q == p) {
        Some(i) => Ok(i as u32),
        None => Err(refuse(format!("parameter `{}`", p.0), &format!("an undeclared {}", p.1), "one of its own")),
    };
    let mut flat = Flatten::default();
    let mut draft = Draft::default();
    let root = |flat: &mut Flatten, x: &Option<F32>| x.as_ref().map(|x| flat.tree(&x.0, &slot)).transpose();
    draft.logits = root(&mut flat, &hooks.logits)?;
    draft.mask = hooks.mask.as_ref().map(|x| flat.tree(&x.0, &slot)).transpose()?;
    draft.init = root(&mut flat, &hooks.init)?;
    draft.output = root(&mut flat, &hooks.output)?;
    for (to, from) in [(&mut draft.query, &hooks.query), (&mut draft.key, &hooks.key), (&mut draft.value, &hooks.value)]
    {
        let Some(from) = from else { continue };
        to.0.clone_from(&from.ropes);
        to.1 = from.scales.iter().map(|x| flat.tree(&x.0, &slot)).collect::<Result<_>>()?;
    }
    draft.none = hooks.none;
    finish(name.into(), params, flat.nodes, draft)
}

/// The hooks of a variant, flattened but not checked.
#[derive(Default)]
pub(super) struct Draft {
    query: (Vec<Rope>, Vec<Id>),
    key: (Vec<Rope>, Vec<Id>),
    value: (Vec<Rope>, Vec<Id>),
    logits: Option<Id>,
    mask: Option<Id>,
    init: Option<Id>,
    output: Option<Id>,
    none: bool,
    text: Option<Text>,
}

impl Draft {
    /// Hooks of text alone; `none`: without softmax.
    pub(super) fn of_text(text: Text, none: bool) -> Self {
        Self { text: Some(text), none, ..Self::default() }
    }
}

/// Checks all that a variant promises to its lowerings.
pub(super) fn finish(name: String, params: Vec<Named>, nodes: Vec<Node>, draft: Draft) -> Result<Variant> {
    let refuse =
        |what: String, got: String, want: &str| Error::Variant { variant: name.clone(), what, got, want: want.into() };
    const WORD: &str = "letters, digits and single underscores";
    let word = |s: &str| s.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_') && !s.contains("__");
    if !name.starts_with(|c: char| c.is_ascii_uppercase()) || !word(&name) {
        return Err(refuse("name".into(), format!("{name:?}"), &format!("an upper-case letter, then {WORD}")));
    }
    for (p, _) in &params {
        if !p.starts_with(|c: char| c.is_ascii_alphabetic()) || !word(p) || CPP_WORDS.contains(&&**p) {
            return Err(refuse(
                "parameter's name".into(),
                format!("{p:?}"),
                &format!("a letter, then {WORD}; no C++ word"),
            ));
        }
    }
    let expr = |root: Id| Expr { root, order: reachable(&nodes, root) };
    let vectors = |hook: Hook, (ropes, scales): &(Vec<Rope>, Vec<Id>)| {
        let what = format!("hook `{}`", hook.name());
        if ropes.len() > usize::from(hook != Hook::Value) {
            let want = if hook == Hook::Value { "none" } else { "at most one" };
            return Err(refuse(what, format!("{} rotations", ropes.len()), want));
        }
        if let Some((field, got, want)) = ropes.first().and_then(Rope::fault) {
            return Err(refuse(format!("{what}: rope's {field}"), got, want));
        }
        Ok(Vectors { rope: ropes.first().copied(), scales: scales.iter().map(|&s| expr(s)).collect() })
    };
    let inner = Inner {
        query: vectors(Hook::Query, &draft.query)?,
        key: vectors(Hook::Key, &draft.key)?,
        value: vectors(Hook::Value, &draft.value)?,
        logits: draft.logits.map(expr),
        mask: draft.mask.map(expr),
        init: draft.init.map(expr),
        output: draft.output.map(expr),
        normalize: if draft.none { Normalize::None } else { Normalize::Softmax },
        text: draft.text,
        name: name.clone(),
        params,
        nodes,
    };
    for hook in Hook::ALL {
        for e in inner.exprs(hook) {
            for &id in &e.order {
                let what = || format!("hook `{}`", hook.name());
                match inner.nodes[id as usize] {
                    Op::TooDeep => {
                        let want = format!("at most {MAX_DEPTH} operations deep");
                        return Err(refuse(what(), "a deeper expression".into(), &want));
                    }
                    Op::F32(x) if f32::from_bits(x).is_nan() => {
                        return Err(refuse(what(), "the constant NaN".into(), "a number"));
                    }
                    Op::Leaf(leaf) if !hook.leaves().contains(&leaf) => {
                        let has: Vec<_> = hook.leaves().iter().map(|l| format!("{}()", l.name())).collect();
                        return Err(refuse(what(), format!("{}()", leaf.name()), &has.join(", ")));
                    }
                    Op::Leaf(leaf @ (Leaf::M | Leaf::D)) if draft.none => {
                        return Err(refuse(what(), format!("{}()", leaf.name()), "o() alone, as there is no softmax"));
                    }
                    _ => {}
                }
            }
        }
    }
    if draft.none && inner.init.is_some() {
        return Err(refuse("hook `init`".into(), "an expression".into(), "none, as there is no softmax"));
    }
    Ok(Variant(Arc::new(inner)))
}

/// Words of C++ and CUDA that may not name a field.
const CPP_WORDS: &[&str] = &[
    "alignas",
    "alignof",
    "and",
    "asm",
    "auto",
    "bitand",
    "bitor",
    "bool",
    "break",
    "case",
    "catch",
    "char",
    "class",
    "compl",
    "concept",
    "const",
    "constexpr",
    "continue",
    "decltype",
    "default",
    "delete",
    "do",
    "double",
    "else",
    "enum",
    "explicit",
    "export",
    "extern",
    "false",
    "float",
    "for",
    "friend",
    "goto",
    "half",
    "if",
    "inline",
    "int",
    "long",
    "mutable",
    "namespace",
    "new",
    "noexcept",
    "not",
    "nullptr",
    "operator",
    "or",
    "private",
    "protected",
    "public",
    "register",
    "requires",
    "return",
    "short",
    "signed",
    "sizeof",
    "static",
    "struct",
    "switch",
    "template",
    "this",
    "throw",
    "true",
    "try",
    "typedef",
    "typeid",
    "typename",
    "union",
    "unsigned",
    "using",
    "virtual",
    "void",
    "volatile",
    "while",
    "xor",
];

/// The nodes that `root` is made of, operands first, itself last.
fn reachable(nodes: &[Node], root: Id) -> Vec<Id> {
    let mut used = vec![false; root as usize + 1];
    used[root as usize] = true;
    // Operands come before their users.
    for id in (0..=root).rev() {
        if used[id as usize] {
            for a in nodes[id as usize].operands() {
                used[a as usize] = true;
            }
        }
    }
    (0..=root).filter(|&id| used[id as usize]).collect()
}

impl Inner {
    /// The expressions of a hook.
    pub(crate) fn exprs(&self, hook: Hook) -> impl Iterator<Item = &Expr> {
        let (one, many): (_, &[Expr]) = match hook {
            Hook::Query => (None, &self.query.scales),
            Hook::Key => (None, &self.key.scales),
            Hook::Value => (None, &self.value.scales),
            Hook::Logits => (self.logits.as_ref(), &[]),
            Hook::Mask => (self.mask.as_ref(), &[]),
            Hook::Init => (self.init.as_ref(), &[]),
            Hook::Output => (self.output.as_ref(), &[]),
        };
        one.into_iter().chain(many)
    }
}

impl Variant {
    /// Its name.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Names and types of its parameters, in the order they were declared.
    pub fn params(&self) -> impl ExactSizeIterator<Item = (&str, ParamType)> {
        self.0.params.iter().map(|(n, t)| (&**n, *t))
    }

    /// Type of the parameter in `slot`.
    pub(crate) fn param_type(&self, slot: u32) -> ParamType {
        self.0.params[slot as usize].1
    }

    /// Whether it turns keys by their positions.
    #[cfg(feature = "cuda")]
    pub(crate) fn rotates_keys(&self) -> bool {
        self.0.key.rope.is_some()
    }

    /// Whether it turns queries by their positions.
    #[cfg(feature = "cuda")]
    pub(crate) fn rotates_queries(&self) -> bool {
        self.0.query.rope.is_some()
    }

    /// Whether it has hooks of CUDA C++ text, which may do anything that the expressions do not say.
    pub fn is_cuda_text(&self) -> bool {
        self.0.text.is_some()
    }

    /// How its logits become weights.
    pub fn normalize(&self) -> Normalize {
        self.0.normalize
    }

    /// The same under another name.
    pub fn named(&self, name: &str) -> Result<Self> {
        let Inner { params, nodes, .. } = &*self.0;
        finish(name.into(), params.clone(), nodes.clone(), self.draft(|id| id))
    }

    fn draft(&self, id: impl Fn(Id) -> Id) -> Draft {
        let of = |e: &Option<Expr>| e.as_ref().map(|e| id(e.root));
        let vectors = |v: &Vectors| (v.rope.iter().copied().collect(), v.scales.iter().map(|e| id(e.root)).collect());
        Draft {
            query: vectors(&self.0.query),
            key: vectors(&self.0.key),
            value: vectors(&self.0.value),
            logits: of(&self.0.logits),
            mask: of(&self.0.mask),
            init: of(&self.0.init),
            output: of(&self.0.output),
            none: self.0.normalize == Normalize::None,
            text: self.0.text.clone(),
        }
    }

    /// Both: a key is seen when both see it, this variant's logit is the other's score, and transforms apply one
    /// after the other. Parameters of one name and type are one parameter. The name is both names.
    ///
    /// # Errors
    /// [`Error::Variant`] when both have an `init`, an `output` or a rotation of the same rows, or when a parameter
    /// has another type in the other.
    pub fn and(self, other: Self) -> Result<Self> {
        let name = format!("{}{}", self.name(), other.name());
        let refuse =
            |what: String, got: String, want: String| Error::Variant { variant: name.clone(), what, got, want };
        let mut params = self.0.params.clone();
        let mut slots = Vec::new();
        for (n, ty) in &other.0.params {
            slots.push(match params.iter().position(|p| p.0 == *n) {
                Some(i) if params[i].1 == *ty => i as u32,
                Some(i) => {
                    let want = format!("{}, as in `{}`", params[i].1, self.name());
                    return Err(refuse(format!("parameter `{n}`"), format!("{ty} in `{}`", other.name()), want));
                }
                None => {
                    params.push((n.clone(), *ty));
                    params.len() as u32 - 1
                }
            });
        }
        let mut flat = Flatten::default();
        for &node in &self.0.nodes {
            flat.node(node);
        }
        let mut ids: Vec<Id> = Vec::new();
        for node in &other.0.nodes {
            let id = |a: Id| ids[a as usize];
            let new = match *node {
                Op::Leaf(Leaf::Score) if self.0.logits.is_some() => self.0.logits.as_ref().map(|e| e.root),
                _ => None,
            };
            let new = new.unwrap_or_else(|| {
                flat.node(match *node {
                    Op::Param(p) => Op::Param(slots[p as usize]),
                    Op::At(p, a) => Op::At(slots[p as usize], id(a)),
                    Op::Bit(p, abc) => Op::Bit(slots[p as usize], abc.map(id)),
                    Op::Unary(op, a) => Op::Unary(op, id(a)),
                    Op::Binary(op, a, b) => Op::Binary(op, id(a), id(b)),
                    Op::Select(a, b, c) => Op::Select(id(a), id(b), id(c)),
                    Op::F32(_) | Op::I32(_) | Op::Bool(_) | Op::Leaf(_) | Op::TooDeep => *node,
                })
            });
            ids.push(new);
        }
        let mut draft = self.draft(|id| id);
        let theirs = other.draft(|id| ids[id as usize]);
        for (one, another) in [(&self, &other), (&other, &self)] {
            let i = &another.0;
            if one.0.text.is_some()
                && (i.logits.is_some() || i.init.is_some() || i.output.is_some() || i.text.is_some())
            {
                let got = format!("logits, init, output or text of `{}`", another.name());
                let want = "masks and transforms alone beside hooks of text".into();
                return Err(refuse(format!("hooks of `{}`", one.name()), got, want));
            }
        }
        draft.text = draft.text.or(theirs.text);
        for (hook, ours, theirs) in
            [("init", &mut draft.init, theirs.init), ("output", &mut draft.output, theirs.output)]
        {
            if ours.is_some() && theirs.is_some() {
                return Err(refuse(format!("hook `{hook}`"), "two".into(), "at most one".into()));
            }
            *ours = ours.or(theirs);
        }
        draft.logits = theirs.logits.or(draft.logits);
        draft.mask = match (draft.mask, theirs.mask) {
            (Some(a), Some(b)) => Some(flat.node(Op::Binary(super::expr::Binary::And, a, b))),
            (a, b) => a.or(b),
        };
        for (ours, theirs) in
            [(&mut draft.query, theirs.query), (&mut draft.key, theirs.key), (&mut draft.value, theirs.value)]
        {
            ours.0.extend(theirs.0);
            ours.1.extend(theirs.1);
        }
        draft.none |= theirs.none;
        finish(name, params, flat.nodes, draft)
    }
}
