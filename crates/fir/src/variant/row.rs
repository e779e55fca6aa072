//! The CPU lowering: a variant compiled to programs over a row of columns.
//!
//! What is the same for all columns of a row (all that depends on neither the key nor its score; in `output`, on no
//! element of `o`) is evaluated once, by [`super::eval`]'s interpreter in f32. The rest becomes instructions that run
//! over whole columns, in `cpu/variant.rs`. Here they are plain data.

use super::expr::{Binary, Id, Leaf, Node, Op, Ty, Unary};
use super::interval::{Block, Visible};
use super::params::Bound;
use super::rope::{Rope, frequencies};
use super::spec::{Expr, Hook, Normalize, Variant, Vectors};
use crate::error::{Error, Result};

/// An operand: a column of values, or one value for all columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Src {
    Col(u32),
    One(Id),
}

/// One pass over the columns. Destinations differ from operands.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Instr {
    /// The keys' positions.
    KvPos {
        dst: u32,
    },
    /// One value in every column.
    Splat {
        dst: u32,
        from: Id,
    },
    Unary {
        op: Unary,
        dst: u32,
        a: u32,
    },
    /// At least one operand is a column.
    Binary {
        op: Binary,
        dst: u32,
        a: Src,
        b: Src,
    },
    Select {
        dst: u32,
        mask: Src,
        a: u32,
        b: u32,
    },
    AtF {
        dst: u32,
        slot: u32,
        index: u32,
    },
    AtI {
        dst: u32,
        slot: u32,
        index: u32,
    },
    Bit {
        dst: u32,
        slot: u32,
        row: Src,
        col: Src,
        stride: Src,
    },
}

/// An expression over columns. Column 0 holds the input: scores, or elements of `o`.
#[derive(Clone, Debug)]
pub(crate) struct Columns {
    /// Nodes to evaluate once per row, in order.
    pub(crate) once: Vec<Id>,
    pub(crate) code: Vec<Instr>,
    pub(crate) result: Src,
    /// Columns that the code uses.
    pub(crate) width: usize,
}

/// One of the conditions that a mask is the conjunction of.
#[derive(Clone, Debug)]
pub(crate) struct Conjunct {
    /// Nodes to evaluate once per row, in order.
    pub(crate) once: Vec<Id>,
    /// When this node is true, the condition holds for all columns.
    pub(crate) unless: Option<Id>,
    pub(crate) test: Test,
}

#[derive(Clone, Debug)]
pub(crate) enum Test {
    /// `kv_pos >= node + add`.
    AtLeast(Id, i64),
    /// `kv_pos <= node + add`.
    AtMost(Id, i64),
    /// The node, the same for all columns.
    One(Id),
    /// Column by column.
    Columns(Columns),
}

/// A vector transform for heads of a known size.
#[derive(Clone, Debug, Default)]
pub(crate) struct RowTransform {
    pub(crate) rope: Option<Rotation>,
    /// Nodes to evaluate once per row, in order.
    pub(crate) once: Vec<Id>,
    /// Their product scales the row.
    pub(crate) scales: Vec<Id>,
}

#[derive(Clone, Debug)]
pub(crate) struct Rotation {
    pub(crate) interleave: bool,
    /// Turns (of 2π) per position, for each pair. In f64, a position of 10⁶ is reduced to within 10⁻¹⁰ turns.
    pub(crate) turns: Vec<f64>,
}

/// A variant, compiled for rows. Made once per plan.
#[derive(Clone, Debug)]
pub(crate) struct RowProgram {
    pub(crate) variant: Variant,
    pub(crate) logits: Option<Columns>,
    pub(crate) mask: Vec<Conjunct>,
    /// Whether the mask differs from head to head.
    pub(crate) masks_by_head: bool,
    pub(crate) output: Option<Columns>,
    pub(crate) query: RowTransform,
    pub(crate) key: RowTransform,
    pub(crate) value: RowTransform,
    /// Columns of scratch that the widest program uses, the input's included.
    pub(crate) width: usize,
}

impl RowProgram {
    /// Compiles `variant` for heads of the given sizes; refuses rotations that do not fit them.
    pub(crate) fn new(variant: &Variant, head_dim_qk: usize, head_dim_vo: usize) -> Result<Self> {
        let compile = |e: &Expr| Columns::new(variant, e.root, &e.order);
        let logits = variant.0.logits.as_ref().map(compile);
        let output = variant.0.output.as_ref().map(compile);
        let mut mask = Vec::new();
        if let Some(e) = &variant.0.mask {
            conjuncts(variant, e.root, &mut mask);
        }
        let in_mask = mask.iter().filter_map(|c| if let Test::Columns(c) = &c.test { Some(c.width) } else { None });
        let width = in_mask.chain(logits.iter().map(|c| c.width)).chain(output.iter().map(|c| c.width)).max();
        Ok(Self {
            width: width.unwrap_or(1),
            logits,
            mask,
            masks_by_head: variant.0.mask.as_ref().is_some_and(|e| {
                let by_head = |&id: &Id| matches!(variant.0.nodes[id as usize], Op::Leaf(Leaf::QoHead | Leaf::KvHead));
                e.order.iter().any(by_head)
            }),
            output,
            query: RowTransform::new(variant, Hook::Query, &variant.0.query, head_dim_qk)?,
            key: RowTransform::new(variant, Hook::Key, &variant.0.key, head_dim_qk)?,
            value: RowTransform::new(variant, Hook::Value, &variant.0.value, head_dim_vo)?,
            variant: variant.clone(),
        })
    }

    /// Whether logits differ from scores.
    pub(crate) fn has_logits(&self) -> bool {
        self.logits.is_some()
    }
    /// Whether keys may be hidden.
    pub(crate) fn has_mask(&self) -> bool {
        self.variant.0.mask.is_some()
    }
    /// Whether the mask lets through an interval of a row's keys, and hides all others.
    pub(crate) fn has_interval(&self) -> bool {
        self.has_mask() && self.mask.iter().all(|c| !matches!(c.test, Test::Columns(_)))
    }
    /// Whether rows start with a key that is not there.
    pub(crate) fn has_init(&self) -> bool {
        self.variant.0.init.is_some()
    }
    /// Whether outputs are transformed.
    pub(crate) fn has_output(&self) -> bool {
        self.output.is_some()
    }
    /// Whether queries are transformed.
    pub(crate) fn has_query(&self) -> bool {
        !self.variant.0.query.is_empty()
    }
    /// Whether keys are transformed.
    pub(crate) fn has_key(&self) -> bool {
        !self.variant.0.key.is_empty()
    }
    /// Whether values are transformed.
    pub(crate) fn has_value(&self) -> bool {
        !self.variant.0.value.is_empty()
    }
    /// Whether logits pass through softmax.
    pub(crate) fn softmax(&self) -> bool {
        self.variant.0.normalize == Normalize::Softmax
    }

    /// What the mask says of a whole block. With `bound` unknown, parameters count as any value.
    pub(crate) fn block(&self, bound: Option<&Bound<'_>>, block: &Block) -> Visible {
        super::visible_in(&self.variant, bound, block)
    }
}

impl RowTransform {
    fn new(variant: &Variant, hook: Hook, vectors: &Vectors, head_dim: usize) -> Result<Self> {
        let rotation = |rope: &Rope| match rope.rotated(head_dim) {
            Ok(_) => Ok(Rotation {
                interleave: rope.interleave,
                turns: frequencies(rope, head_dim).into_iter().map(|f| f / std::f64::consts::TAU).collect(),
            }),
            Err(want) => Err(Error::Variant {
                variant: variant.name().into(),
                what: format!("hook `{}`: rope", hook.name()),
                got: format!("rotary_dim {} for heads of {head_dim}", rope.rotary_dim.unwrap_or(head_dim)),
                want,
            }),
        };
        Ok(Self {
            rope: vectors.rope.as_ref().map(rotation).transpose()?,
            once: union(vectors.scales.iter().map(|e| &e.order[..])),
            scales: vectors.scales.iter().map(|e| e.root).collect(),
        })
    }
}

/// All ids of some ascending lists, ascending.
fn union<'a>(lists: impl Iterator<Item = &'a [Id]>) -> Vec<Id> {
    let mut all: Vec<Id> = lists.flatten().copied().collect();
    all.sort_unstable();
    all.dedup();
    all
}

/// For each node up to `root`: whether `root` is made of it, and whether it differs from column to column.
fn varying(nodes: &[Node], root: Id) -> (Vec<bool>, Vec<bool>) {
    let n = root as usize + 1;
    let (mut used, mut varies) = (vec![false; n], vec![false; n]);
    used[root as usize] = true;
    for (id, node) in nodes[..n].iter().enumerate() {
        varies[id] = matches!(node, Op::Leaf(Leaf::Score | Leaf::KvPos | Leaf::O))
            || node.operands().any(|a| varies[a as usize]);
    }
    for id in (0..n).rev() {
        if used[id] {
            for a in nodes[id].operands() {
                used[a as usize] = true;
            }
        }
    }
    (used, varies)
}

/// Cuts a mask into the conditions it is the conjunction of.
fn conjuncts(variant: &Variant, root: Id, out: &mut Vec<Conjunct>) {
    if let Op::Binary(Binary::And, a, b) = variant.0.nodes[root as usize] {
        conjuncts(variant, a, out);
        conjuncts(variant, b, out);
        return;
    }
    let (used, varies) = varying(&variant.0.nodes, root);
    let once: Vec<Id> = (0..=root).filter(|&id| used[id as usize] && !varies[id as usize]).collect();
    // `flag | test`, where the flag is one for the row.
    let (unless, test) = match variant.0.nodes[root as usize] {
        Op::Binary(Binary::Or, a, b) if varies[b as usize] && !varies[a as usize] => (Some(a), b),
        Op::Binary(Binary::Or, a, b) if varies[a as usize] && !varies[b as usize] => (Some(b), a),
        _ => (None, root),
    };
    let is_kv_pos = |id: Id| matches!(variant.0.nodes[id as usize], Op::Leaf(Leaf::KvPos));
    let one = |id: Id| !varies[id as usize];
    let test = match variant.0.nodes[test as usize] {
        _ if one(test) => Test::One(test),
        Op::Binary(Binary::LeI, a, b) if is_kv_pos(a) && one(b) => Test::AtMost(b, 0),
        Op::Binary(Binary::LtI, a, b) if is_kv_pos(a) && one(b) => Test::AtMost(b, -1),
        Op::Binary(Binary::LeI, a, b) if is_kv_pos(b) && one(a) => Test::AtLeast(a, 0),
        Op::Binary(Binary::LtI, a, b) if is_kv_pos(b) && one(a) => Test::AtLeast(a, 1),
        _ => {
            let order: Vec<Id> = {
                let (used, _) = varying(&variant.0.nodes, test);
                (0..=test).filter(|&id| used[id as usize]).collect()
            };
            Test::Columns(Columns::new(variant, test, &order))
        }
    };
    out.push(Conjunct { once, unless, test });
}

impl Columns {
    /// Compiles the expression `root`, made of the nodes `order`.
    fn new(variant: &Variant, root: Id, order: &[Id]) -> Self {
        let nodes = &variant.0.nodes;
        let (_, varies) = varying(nodes, root);
        // The last user of each node; the root's is nobody.
        let mut last = vec![0; root as usize + 1];
        for &id in order {
            nodes[id as usize].operands().for_each(|a| last[a as usize] = id);
        }
        last[root as usize] = Id::MAX;

        let mut c = Compiler { code: Vec::new(), column: vec![0; root as usize + 1], free: Vec::new(), width: 1 };
        for &id in order.iter().filter(|&&id| varies[id as usize]) {
            let node = nodes[id as usize];
            if matches!(node, Op::Leaf(Leaf::Score | Leaf::O)) {
                continue; // column 0, where the caller puts it; it is never freed.
            }
            let src = |c: &Compiler, a: Id| {
                if varies[a as usize] { Src::Col(c.column[a as usize]) } else { Src::One(a) }
            };
            let mut temporary = Vec::new();
            let mut column = |c: &mut Compiler, a: Id| match src(c, a) {
                Src::Col(x) => x,
                Src::One(from) => {
                    let dst = c.take();
                    c.code.push(Instr::Splat { dst, from });
                    temporary.push(dst);
                    dst
                }
            };
            let instr = match node {
                Op::Leaf(_) => Instr::KvPos { dst: c.take() },
                Op::Unary(op, a) => {
                    let a = column(&mut c, a);
                    Instr::Unary { op, dst: c.take(), a }
                }
                Op::Binary(op, a, b) => Instr::Binary { op, a: src(&c, a), b: src(&c, b), dst: c.take() },
                Op::Select(mask, a, b) => {
                    let (mask, a, b) = (src(&c, mask), column(&mut c, a), column(&mut c, b));
                    Instr::Select { dst: c.take(), mask, a, b }
                }
                Op::At(slot, i) => {
                    let index = column(&mut c, i);
                    match node.ty(|p| variant.param_type(p)) {
                        Ty::I32 => Instr::AtI { dst: c.take(), slot, index },
                        _ => Instr::AtF { dst: c.take(), slot, index },
                    }
                }
                Op::Bit(slot, [r, k, s]) => {
                    Instr::Bit { slot, row: src(&c, r), col: src(&c, k), stride: src(&c, s), dst: c.take() }
                }
                Op::F32(_) | Op::I32(_) | Op::Bool(_) | Op::Param(_) | Op::TooDeep => {
                    unreachable!("the same for all columns")
                }
            };
            let dst = match instr {
                Instr::KvPos { dst }
                | Instr::Splat { dst, .. }
                | Instr::Unary { dst, .. }
                | Instr::Binary { dst, .. }
                | Instr::Select { dst, .. }
                | Instr::AtF { dst, .. }
                | Instr::AtI { dst, .. }
                | Instr::Bit { dst, .. } => dst,
            };
            c.code.push(instr);
            c.column[id as usize] = dst;
            c.free.extend(temporary);
            let mut operands: Vec<Id> = node.operands().filter(|&a| varies[a as usize]).collect();
            operands.sort_unstable();
            operands.dedup();
            for a in operands {
                if last[a as usize] == id && c.column[a as usize] != 0 {
                    c.free.push(c.column[a as usize]);
                }
            }
        }
        let result = if varies[root as usize] { Src::Col(c.column[root as usize]) } else { Src::One(root) };
        let once = order.iter().copied().filter(|&id| !varies[id as usize]).collect();
        Self { once, code: c.code, result, width: c.width }
    }
}

/// Columns are taken when a node is computed and given back after its last use.
struct Compiler {
    code: Vec<Instr>,
    column: Vec<u32>,
    free: Vec<u32>,
    width: usize,
}

impl Compiler {
    fn take(&mut self) -> u32 {
        self.free.pop().unwrap_or_else(|| {
            self.width += 1;
            self.width as u32 - 1
        })
    }
}
