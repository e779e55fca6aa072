//! The CUDA lowering: a variant as C++ text, a struct that kernels take as their `Variant` parameter.
//!
//! The text needs no include. Integers wrap around (by way of `unsigned`), tensor indices are clamped and bits are
//! read within their segment, as everywhere. A hook that the variant does not set is there as the identity, and a
//! `kHas…` constant says so.

use std::fmt::Write;

use super::expr::{Binary, Id, Leaf, Op, Ty, Unary};
use super::params::ParamType;
use super::rope::Rope;
use super::spec::{Expr, Hook, Normalize, Variant, Vectors};
use super::text::{KNOWN, SHIM, element};

/// C++ text of `variant`: `struct NAME_Params` and `struct NAME`. Hooks of text stand between the head that they need and a
/// struct of the other hooks.
///
/// ```
/// # use fir::variant::*;
/// let text = cuda_source(&causal());
/// assert!(text.contains("return kv_pos <= q_pos;"));
/// ```
pub fn cuda_source(variant: &Variant) -> String {
    let mut out = String::new();
    // Writing to a string does not fail.
    let _ = write_source(&mut out, variant);
    out
}

/// The C++ type that kernels take as their `Variant`.
#[cfg(feature = "cuda")]
pub(crate) fn cuda_type(v: &Variant) -> String {
    match &v.0.text {
        Some(text) => format!("fir::TextHooks<{}, {}_Rest>", text.name, v.name()),
        None => v.name().into(),
    }
}

fn write_source(out: &mut String, v: &Variant) -> std::fmt::Result {
    let name = &match &v.0.text {
        Some(text) => {
            // Messages of the compiler name the user's lines.
            write!(out, "{SHIM}#line 1 \"{}\"\n{}\n#line 1 \"rest\"\n", text.name, text.source)?;
            format!("{}_Rest", v.name())
        }
        None => v.name().to_owned(),
    };
    writeln!(out, "struct {name}_Params {{")?;
    let known = KNOWN.iter().copied().filter(|k| v.is_cuda_text() && v.params().all(|p| p.0 != k.0));
    for (param, ty) in v.params().chain(known) {
        let field = match ty {
            ParamType::F32 => "float",
            ParamType::I32 => "int",
            ParamType::F32Tensor | ParamType::PerHead => "struct { const float* data; int len; }",
            ParamType::I32Tensor => "struct { const int* data; int len; }",
            ParamType::Bits => "struct { const unsigned char* data; const int* indptr; int batch, len; }",
            ParamType::Tensor(dtype) => {
                writeln!(out, "  {}* {param};", element(dtype).unwrap_or("void"))?;
                continue;
            }
        };
        writeln!(out, "  {field} {param};")?;
    }
    writeln!(out, "}};\n\nstruct {name} {{\n  using Params = {name}_Params;")?;
    let inner = &*v.0;
    let reads = |e: &Expr| e.order.iter().any(|&id| matches!(inner.nodes[id as usize], Op::At(..) | Op::Bit(..)));
    for (flag, value) in [
        ("Softmax", inner.normalize == Normalize::Softmax),
        ("HasQuery", !inner.query.is_empty()),
        ("HasKey", !inner.key.is_empty()),
        ("HasValue", !inner.value.is_empty()),
        ("HasLogits", inner.logits.is_some()),
        ("HasMask", inner.mask.is_some()),
        ("MaskReads", inner.mask.as_ref().is_some_and(reads)),
        ("HasInit", inner.init.is_some()),
        ("HasOutput", inner.output.is_some()),
    ] {
        writeln!(out, "  static constexpr bool k{flag} = {value};")?;
    }
    for (side, vectors) in [("Query", &inner.query), ("Key", &inner.key)] {
        if let Some(rope) = &vectors.rope {
            write_rope(out, side, rope)?;
        } else {
            writeln!(out, "  static constexpr bool k{side}Rope = false;")?;
        }
    }
    write_helpers(out, v)?;
    let scales = |v: &Vectors| v.scales.clone();
    for (hook, function, exprs) in [
        (Hook::Query, "query_scale", scales(&inner.query)),
        (Hook::Key, "key_scale", scales(&inner.key)),
        (Hook::Value, "value_scale", scales(&inner.value)),
        (Hook::Logits, "logits", inner.logits.iter().cloned().collect()),
        (Hook::Mask, "mask", inner.mask.iter().cloned().collect()),
        (Hook::Init, "init", inner.init.iter().cloned().collect()),
        (Hook::Output, "output", inner.output.iter().cloned().collect()),
    ] {
        write_hook(out, v, hook, function, &exprs)?;
    }
    writeln!(out, "}};")
}

fn write_rope(out: &mut String, side: &str, rope: &Rope) -> std::fmt::Result {
    let mut constant =
        |ty: &str, field: &str, value: String| writeln!(out, "  static constexpr {ty} k{side}Rope{field} = {value};");
    constant("bool", "", "true".into())?;
    constant("float", "Theta", float(rope.theta))?;
    constant("float", "Scale", float(rope.scale))?;
    constant("bool", "Interleave", rope.interleave.to_string())?;
    // 0: the whole head.
    constant("int", "Dim", rope.rotary_dim.unwrap_or(0).to_string())?;
    constant("bool", "Llama31", rope.llama31.is_some().to_string())?;
    if let Some(l) = rope.llama31 {
        constant("float", "LowFreqFactor", float(l.low_freq_factor))?;
        constant("float", "HighFreqFactor", float(l.high_freq_factor))?;
        constant("float", "OldContextLen", float(l.old_context_len))?;
    }
    Ok(())
}

/// The functions that expressions call, if they do.
fn write_helpers(out: &mut String, v: &Variant) -> std::fmt::Result {
    const HEAD: &str = "\n  __device__ __forceinline__ static";
    let has = |f: fn(&Op<Id, u32>) -> bool| v.0.nodes.iter().any(f);
    if has(|n| matches!(n, Op::At(..))) {
        writeln!(
            out,
            "\n  template <typename T>{HEAD} T at(const T* data, int len, int i) {{\n    \
             return data[i < 0 ? 0 : (i < len ? i : len - 1)];\n  }}"
        )?;
    }
    if has(|n| matches!(n, Op::Bit(..))) {
        writeln!(
            out,
            "{HEAD} bool bit(const unsigned char* data, int len, const int* indptr, int requests, int batch, int row, int col,\n\
            \x20                                            int stride) {{\n    \
             if (batch < 0 || batch >= requests) return false;\n    \
             const long long i = (long long)row * stride + col, start = indptr[batch], byte = start + (i >> 3);\n    \
             if (i < 0 || start < 0 || byte >= indptr[batch + 1] || byte >= len) return false;\n    \
             return (data[byte] >> (i & 7)) & 1;\n  }}"
        )?;
    }
    if has(|n| matches!(n, Op::Binary(Binary::DivI, ..))) {
        writeln!(out, "{HEAD} int div(int a, int b) {{ return b <= 0 ? 0 : a / b - (a % b < 0 ? 1 : 0); }}")?;
    }
    if has(|n| matches!(n, Op::Binary(Binary::RemI, ..))) {
        writeln!(out, "{HEAD} int rem(int a, int b) {{ return b <= 0 ? 0 : a % b + (a % b < 0 ? b : 0); }}")?;
    }
    if has(|n| matches!(n, Op::Unary(Unary::Sigmoid, ..))) {
        writeln!(out, "{HEAD} float sigmoid(float x) {{ return 1.0f / (1.0f + expf(-x)); }}")?;
    }
    // The second operand when either is NaN, which fminf and fmaxf would not give.
    for (op, ty, name, sign) in [
        (Binary::MinF, "float", "min_f", '<'),
        (Binary::MaxF, "float", "max_f", '>'),
        (Binary::MinI, "int", "min_i", '<'),
        (Binary::MaxI, "int", "max_i", '>'),
    ] {
        if v.0.nodes.iter().any(|n| matches!(n, Op::Binary(o, ..) if *o == op)) {
            writeln!(out, "{HEAD} {ty} {name}({ty} a, {ty} b) {{ return a {sign} b ? a : b; }}")?;
        }
    }
    Ok(())
}

fn write_hook(out: &mut String, v: &Variant, hook: Hook, function: &str, exprs: &[Expr]) -> std::fmt::Result {
    let arguments: Vec<String> = hook
        .leaves()
        .iter()
        .filter(|l| **l != Leaf::QPos)
        .map(|l| format!("{} {}", if is_float(*l) { "float" } else { "int" }, l.name()))
        .collect();
    let ty = if hook == Hook::Mask { "bool" } else { "float" };
    writeln!(
        out,
        "\n  __device__ __forceinline__ static {ty} {function}(const Params& p, {}) {{",
        arguments.join(", ")
    )?;
    // A value that several operations use gets a name; the rest is written where it is used.
    let mut uses = vec![0u32; v.0.nodes.len()];
    let mut order: Vec<Id> = exprs.iter().flat_map(|e| e.order.iter().copied()).collect();
    order.sort_unstable();
    order.dedup();
    for &id in &order {
        v.0.nodes[id as usize].operands().for_each(|a| uses[a as usize] += 1);
    }
    exprs.iter().for_each(|e| uses[e.root as usize] += 1);

    let mut text: Vec<String> = vec![String::new(); v.0.nodes.len()];
    // Compilers bound how deep parentheses nest (clang at 256), so a deep value gets a name too.
    let mut depth = vec![0u32; v.0.nodes.len()];
    let mut names = 0;
    for &id in &order {
        let node = &v.0.nodes[id as usize];
        if matches!(node, Op::Leaf(Leaf::QPos)) {
            writeln!(out, "    const int q_pos = int(unsigned(kv_len) - unsigned(q_len) + unsigned(q_idx));")?;
        }
        let t = expression(v, id, &text);
        let below = node.operands().map(|a| depth[a as usize] + 1).max().unwrap_or(0);
        let named = below > 0 && (uses[id as usize] > 1 || below > 40);
        depth[id as usize] = if named { 0 } else { below };
        text[id as usize] = if named {
            let ty = match node.ty(|p| v.param_type(p)) {
                Ty::F32 => "float",
                Ty::I32 => "int",
                Ty::Bool => "bool",
            };
            writeln!(out, "    const {ty} t{names} = {};", bare(&t))?;
            names += 1;
            format!("t{}", names - 1)
        } else {
            t
        };
    }
    let result = match (exprs, hook) {
        ([], Hook::Mask) => "true".into(),
        ([], Hook::Logits) => "score".into(),
        ([], Hook::Output) => "o".into(),
        ([], Hook::Init) => "0.0f".into(),
        ([], _) => "1.0f".into(),
        ([e], _) => bare(&text[e.root as usize]).to_string(),
        (many, _) => many.iter().map(|e| text[e.root as usize].clone()).collect::<Vec<_>>().join(" * "),
    };
    writeln!(out, "    return {result};\n  }}")
}

fn is_float(leaf: Leaf) -> bool {
    matches!(leaf, Leaf::Score | Leaf::O | Leaf::M | Leaf::D)
}

/// Without the parentheses around all of it.
fn bare(text: &str) -> &str {
    let Some(inner) = text.strip_prefix('(').and_then(|t| t.strip_suffix(')')) else { return text };
    // The first parenthesis must close at the end, as in `(a + b)` and not in `(a) + (b)`.
    let mut depth = 0i32;
    for c in inner.chars() {
        depth += i32::from(c == '(') - i32::from(c == ')');
        if depth < 0 {
            return text;
        }
    }
    inner
}

/// A literal of exactly this value.
fn float(x: f32) -> String {
    if x.is_infinite() {
        format!("__int_as_float({:#010x})", x.to_bits() as i32)
    } else if x.is_sign_negative() {
        format!("({x:?}f)")
    } else {
        // The shortest decimal that is read back as `x`.
        format!("{x:?}f")
    }
}

/// The text of a node, of its operands' texts: one word, a call, or in parentheses.
fn expression(v: &Variant, id: Id, text: &[String]) -> String {
    let at = |id: Id| &*text[id as usize];
    let param = |slot: u32| v.params().nth(slot as usize).map_or("", |p| p.0);
    match v.0.nodes[id as usize] {
        Op::F32(x) => float(f32::from_bits(x)),
        // -2147483648 would be the negation of a number that is no int.
        Op::I32(i32::MIN) => "(-2147483647 - 1)".into(),
        Op::I32(x) if x < 0 => format!("({x})"),
        Op::I32(x) => x.to_string(),
        Op::Bool(x) => x.to_string(),
        Op::Leaf(leaf) => leaf.name().into(),
        Op::Param(p) => format!("p.{}", param(p)),
        Op::At(p, i) => format!("at(p.{0}.data, p.{0}.len, {1})", param(p), bare(at(i))),
        Op::Bit(p, [r, c, s]) => format!(
            "bit(p.{0}.data, p.{0}.len, p.{0}.indptr, p.{0}.batch, batch, {1}, {2}, {3})",
            param(p),
            bare(at(r)),
            bare(at(c)),
            bare(at(s))
        ),
        Op::Unary(op, a) => match op {
            Unary::Neg => format!("(-{})", at(a)),
            Unary::Not => format!("(!{})", at(a)),
            Unary::Tanh => format!("tanhf({})", bare(at(a))),
            Unary::Exp => format!("expf({})", bare(at(a))),
            Unary::Log => format!("logf({})", bare(at(a))),
            Unary::Sigmoid => format!("sigmoid({})", bare(at(a))),
            Unary::Abs => format!("fabsf({})", bare(at(a))),
            Unary::Sqrt => format!("sqrtf({})", bare(at(a))),
            Unary::ToF32 => format!("float({})", bare(at(a))),
        },
        Op::Binary(op, a, b) => {
            let call = |f: &str| format!("{f}({}, {})", bare(at(a)), bare(at(b)));
            let infix = |op: &str| format!("({} {op} {})", at(a), at(b));
            // A sum of sums stays unsigned in between.
            let wraps =
                |id: Id| matches!(v.0.nodes[id as usize], Op::Binary(Binary::AddI | Binary::SubI | Binary::MulI, ..));
            let unsigned = |id: Id| match at(id).strip_prefix("int") {
                Some(inner) if wraps(id) => inner.to_string(),
                _ => format!("unsigned({})", bare(at(id))),
            };
            let wrapping = |op: &str| format!("int({} {op} {})", unsigned(a), unsigned(b));
            match op {
                Binary::AddF => infix("+"),
                Binary::SubF => infix("-"),
                Binary::MulF => infix("*"),
                Binary::DivF => infix("/"),
                Binary::MinF => call("min_f"),
                Binary::MaxF => call("max_f"),
                Binary::AddI => wrapping("+"),
                Binary::SubI => wrapping("-"),
                Binary::MulI => wrapping("*"),
                Binary::DivI => call("div"),
                Binary::RemI => call("rem"),
                Binary::MinI => call("min_i"),
                Binary::MaxI => call("max_i"),
                Binary::LtF | Binary::LtI => infix("<"),
                Binary::LeF | Binary::LeI => infix("<="),
                Binary::EqI => infix("=="),
                Binary::And => infix("&&"),
                Binary::Or => infix("||"),
            }
        }
        Op::Select(c, a, b) => format!("({} ? {} : {})", at(c), at(a), at(b)),
        Op::TooDeep => unreachable!("refused on building"),
    }
}
