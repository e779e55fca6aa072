//! Merges of attention states: those that a user has (`merge.cuh`), and those that the levels of a cascade leave
//! (`levels.cuh`).

use super::super::call::Call;
use super::super::driver::Grid;
use super::super::exec::Gpu;
use super::super::jit::Source;
use super::super::params::{Address, Twin, params};
use super::form::cpp;
use super::hooks::Hooks;
use super::{OutRows, Plan, check_last, strides};
use crate::error::{Error, Result};
use crate::plan::{DeviceSizes, Scratch};
use crate::tensor::{DType, TensorMut, TensorRef};
use crate::variant::Bound;

params! {
    struct MergeParams = "fir::MergeParams" {
        a_o in "a.o": Address,
        a_lse in "a.lse": Address,
        a_o_token in "a.o_token": u64,
        a_o_head in "a.o_head": u64,
        a_o_state in "a.o_state": u64,
        a_lse_token in "a.lse_token": u64,
        a_lse_head in "a.lse_head": u64,
        a_lse_state in "a.lse_state": u64,
        b_o in "b.o": Address,
        b_lse in "b.lse": Address,
        b_o_token in "b.o_token": u64,
        b_o_head in "b.o_head": u64,
        b_o_state in "b.o_state": u64,
        b_lse_token in "b.lse_token": u64,
        b_lse_head in "b.lse_head": u64,
        b_lse_state in "b.lse_state": u64,
        out: Address,
        lse_out: Address,
        out_token: u64,
        out_head: u64,
        lse_out_token: u64,
        lse_out_head: u64,
        mask: Address,
        tokens: u32,
        heads: u32,
        states: u32,
        dim: u32,
    }
}

params! {
    /// All but the variant's parameters, which follow.
    struct LevelsParams = "fir::LevelsParams" {
        out in "out.out": Address,
        lse in "out.lse": Address,
        out_token in "out.out_token": u64,
        out_head in "out.out_head": u64,
        lse_token in "out.lse_token": u64,
        lse_head in "out.lse_head": u64,
        partial_o in "out.partial_o": Address,
        partial_md in "out.partial_md": Address,
        merges in "out.merges": Address,
        counters in "out.counters": Address,
        tokens in "out.tokens": Address,
        states: Address,
        md: Address,
        rows: u32,
        levels: u32,
        dim: i32,
        qo_heads: i32,
        group: i32,
        pad: i32,
    }
}

fn merge_source(dtype: DType, vector: bool, two: bool) -> Source {
    let each = if vector { 16 / dtype.size() } else { 1 };
    let name = format!("fir::merge_states<{}, {each}, {two}>", cpp(dtype));
    Source::new("attention/merge.cuh", name, Twin::of::<MergeParams>())
}

pub(super) fn levels_source(out: DType, hooks: &Hooks) -> Source {
    let params = Twin::of::<LevelsParams>();
    let name = format!("fir::merge_levels<{}, {}>", cpp(out), hooks.name);
    let params = hooks.twin(&params.cpp, &[("", &params)]);
    Source { file: "attention/levels.cuh", name, text: hooks.text.clone(), params }
}

/// Every instantiation of `merge.cuh`, and those of `levels.cuh` that have hooks of every kind.
pub(super) fn kernels() -> Vec<Source> {
    let mut all = Vec::new();
    for out in [DType::F32, DType::F16, DType::BF16] {
        for vector in [false, true] {
            all.extend([false, true].map(|two| merge_source(out, vector, two)));
        }
        for variant in [crate::variant::standard(), crate::variant::causal(), crate::variant::sink()] {
            all.push(levels_source(out, &Hooks::new(&variant)));
        }
    }
    all
}

/// States `[tokens, heads, dim]` or `[tokens, states, heads, dim]`, with their names in messages.
#[derive(Clone, Copy)]
pub(crate) struct StatesRef<'a> {
    pub(crate) o: (&'static str, TensorRef<'a>),
    pub(crate) lse: (&'static str, TensorRef<'a>),
}

/// Where the merged states go.
pub(crate) struct StatesMut<'a> {
    pub(crate) o: (&'static str, TensorMut<'a>),
    pub(crate) lse: (&'static str, TensorMut<'a>),
}

/// What is merged.
pub(crate) enum Merged<'a> {
    /// Two states into a third.
    Two(StatesRef<'a>, StatesRef<'a>),
    /// Another one into the result, for the tokens that the mask selects.
    Into(StatesRef<'a>, Option<TensorRef<'a>>),
    /// All of one tensor.
    All(StatesRef<'a>),
}

/// A state's addresses, and strides of tokens, heads and states: bytes of `o`, elements of `lse`.
#[derive(Clone, Copy, Default)]
struct Operand {
    o: Address,
    lse: Address,
    o_strides: [u64; 3],
    lse_strides: [u64; 3],
}

impl Operand {
    fn new<'a>(call: &mut Call<'a>, states: StatesRef<'a>) -> Result<Self> {
        let (o, lse) = (states.o.1, states.lse.1);
        check_last(call.op(), states.o.0, o.layout())?;
        let order = |s: &[u64]| if s.len() == 3 { [s[0], s[2], s[1]] } else { [s[0], s[1], 0] };
        let size = o.dtype().size() as u64;
        let (o_strides, lse_strides) = if o.shape().len() == 4 {
            (order(&strides::<3>(o.layout(), size)), order(&strides::<3>(lse.layout(), 1)))
        } else {
            (order(&strides::<2>(o.layout(), size)), order(&strides::<2>(lse.layout(), 1)))
        };
        Ok(Self { o: call.read(states.o.0, o)?, lse: call.read(states.lse.0, lse)?, o_strides, lse_strides })
    }

    fn is_multiple_of(&self, bytes: u64) -> bool {
        self.o.0.is_multiple_of(bytes) && self.o_strides.iter().all(|s| s % bytes == 0)
    }
}

/// Merges states.
pub(crate) fn merge<'a>(gpu: &'a Gpu, op: &'static str, what: Merged<'a>, into: StatesMut<'a>) -> Result<()> {
    let mut call = Call::new(gpu, op);
    let (layout, dtype) = (*into.o.1.layout(), into.o.1.dtype());
    super::super::norm::check_float(op, into.o.0, dtype)?;
    check_last(op, into.o.0, &layout)?;
    let [tokens, heads, dim] = [0, 1, 2].map(|i| layout.shape()[i]);
    let count = |arg, n: usize| u32::try_from(n).map_err(|_| Error::value(op, arg, n, "at most 2^32 - 1 on CUDA"));
    let rows = count(into.o.0, tokens.saturating_mul(heads))?;
    let [o_token, o_head] = strides(&layout, dtype.size() as u64);
    let [lse_token, lse_head] = strides(into.lse.1.layout(), 1);
    let out = Operand {
        o: call.write(into.o.0, into.o.1)?,
        lse: call.write(into.lse.0, into.lse.1)?,
        o_strides: [o_token, o_head, 0],
        lse_strides: [lse_token, lse_head, 0],
    };
    let two = !matches!(what, Merged::All(_));
    let (a, b, states, mask) = match what {
        Merged::Two(a, b) => (Operand::new(&mut call, a)?, Operand::new(&mut call, b)?, 2, None),
        Merged::Into(b, mask) => (out, Operand::new(&mut call, b)?, 2, mask),
        Merged::All(a) => (Operand::new(&mut call, a)?, Operand::default(), a.o.1.shape()[1], None),
    };
    let mask = match mask {
        Some(mask) if mask.strides()[0] != 1 && tokens > 1 => {
            return Err(Error::layout(op, "mask", format!("stride {}", mask.strides()[0]), "1 on CUDA"));
        }
        Some(mask) => call.read("mask", mask)?,
        None => Address(0),
    };
    if rows == 0 {
        return call.finish();
    }
    let bytes = 16;
    let vector = (dim * dtype.size()).is_multiple_of(bytes as usize) && [out, a, b].iter().all(|x| x.is_multiple_of(bytes));
    let kernel = gpu.kernel(merge_source(dtype, vector, two))?;
    let params = MergeParams {
        a_o: a.o,
        a_lse: a.lse,
        a_o_token: a.o_strides[0],
        a_o_head: a.o_strides[1],
        a_o_state: a.o_strides[2],
        a_lse_token: a.lse_strides[0],
        a_lse_head: a.lse_strides[1],
        a_lse_state: a.lse_strides[2],
        b_o: b.o,
        b_lse: b.lse,
        b_o_token: b.o_strides[0],
        b_o_head: b.o_strides[1],
        b_o_state: b.o_strides[2],
        b_lse_token: b.lse_strides[0],
        b_lse_head: b.lse_strides[1],
        b_lse_state: b.lse_strides[2],
        out: out.o,
        lse_out: out.lse,
        out_token: out.o_strides[0],
        out_head: out.o_strides[1],
        lse_out_token: out.lse_strides[0],
        lse_out_head: out.lse_strides[1],
        mask,
        tokens: count(into.o.0, tokens)?,
        heads: count(into.o.0, heads)?,
        states: count("o", states)?,
        dim: count(into.o.0, dim)?,
    };
    // A row's threads are in one warp; 256 in a block.
    let each = if vector { 16 / dtype.size() } else { 1 };
    let across = dim.div_ceil(each).clamp(1, 32);
    let across = if across.is_power_of_two() { across } else { across.next_power_of_two() / 2 } as u32;
    let down = 256 / across;
    let grid = Grid { block: [across, down, 1], ..Grid::new(rows.div_ceil(down), 1) };
    call.launch(&kernel, grid, &params)?;
    call.finish()
}

/// Unfinished rows of a cascade's levels, in scratch: `[levels, rows, dim]` and their (m, d).
#[derive(Clone, Copy)]
pub(crate) struct States {
    pub(super) o: Address,
    md: Address,
    levels: usize,
    tokens: usize,
    heads: usize,
    dim: usize,
}

impl States {
    fn sizes_of(levels: usize, rows: usize, dim: usize) -> DeviceSizes {
        DeviceSizes { counters: 0, floats: levels * rows * (dim + 2) + 4 }
    }

    /// What they take of a scratch.
    pub(crate) fn sizes(levels: usize, tokens: usize, heads: usize, dim: usize) -> DeviceSizes {
        Self::sizes_of(levels, tokens * heads, dim)
    }

    /// In a scratch of that size.
    pub(crate) fn new(
        op: &'static str,
        scratch: &mut Scratch,
        levels: usize,
        [tokens, heads, dim]: [usize; 3],
    ) -> Result<Self> {
        let start = match scratch.take_device(op, Self::sizes(levels, tokens, heads, dim))? {
            Some([_, floats]) => floats.address,
            None => 5 << 60,
        };
        let md = start;
        let o = md + (8 * levels * tokens * heads) as u64;
        Ok(Self { o: Address(o), md: Address(md), levels, tokens, heads, dim })
    }

    pub(super) fn bytes(&self) -> usize {
        self.levels * self.tokens * self.heads * self.dim * 4
    }

    /// Where level `level` goes: pairs take the place of `lse`.
    pub(super) fn level(&self, level: usize) -> OutRows {
        let (row, rows) = (4 * self.dim as u64, (level * self.tokens * self.heads) as u64);
        let out = Address(self.o.0 + rows * row);
        let heads = self.heads as u64;
        OutRows { out, token: heads * row, head: row, lse: (Address(self.md.0 + rows * 8), heads, 1) }
    }
}

impl Plan {
    /// Merges what the levels of a cascade left, of which this plan is one, and finishes the rows.
    pub(crate) fn finish_levels<'a>(
        &'a self,
        gpu: &'a Gpu,
        op: &'static str,
        states: States,
        bound: &Bound<'a>,
        out: TensorMut<'a>,
        lse: Option<TensorMut<'a>>,
    ) -> Result<()> {
        let mut call = Call::new(gpu, op);
        check_last(op, "out", out.layout())?;
        let [out_token, out_head] = strides(out.layout(), out.dtype().size() as u64);
        let out = call.write("out", out)?;
        let (lse, lse_token, lse_head) = match lse {
            Some(lse) => {
                let [token, head] = strides(lse.layout(), 1);
                (call.write("lse", lse)?, token, head)
            }
            None => (Address(0), 0, 0),
        };
        let rows = states.tokens * states.heads;
        let Some(kernel) = self.levels.as_ref().filter(|_| rows > 0) else { return call.finish() };
        call.name("states", states.o.0, states.bytes());
        self.list.name(&mut call);
        let params = LevelsParams {
            out,
            lse,
            out_token,
            out_head,
            lse_token,
            lse_head,
            partial_o: Address(0),
            partial_md: Address(0),
            merges: Address(0),
            counters: Address(0),
            tokens: self.list.tokens(),
            states: states.o,
            md: states.md,
            rows: rows as u32,
            levels: states.levels as u32,
            dim: states.dim as i32,
            qo_heads: states.heads as i32,
            group: self.spec.group as i32,
            pad: 0,
        };
        let mut bytes = bytemuck::bytes_of(&params).to_vec();
        self.hooks.pack(&mut call, bound, &mut bytes)?;
        let other = self.list.enter(gpu)?;
        call.launch_bytes(kernel, Grid::new(rows.div_ceil(4) as u32, 128), &bytes)?;
        if other {
            self.list.leave(gpu)?;
        }
        call.finish()
    }
}
