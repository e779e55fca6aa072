//! The end of a cascade: the states that its levels leave, and the parts of what was cut, merged and finished (`levels.cuh`).

use bytemuck::Zeroable as _;

use super::super::call::Call;
use super::super::driver::{Buffer, Grid};
use super::super::exec::Gpu;
use super::super::jit::Source;
use super::super::params::{Address, Twin, params};
use super::form::{OutParams, cpp};
use super::hooks::Hooks;
use super::{OutRows, Plan, check_last, strides};
use crate::error::Result;
use crate::plan::{DeviceSizes, Scratch};
use crate::tensor::{DType, DeviceMemory as _, TensorMut};
use crate::variant::Bound;

params! {
    /// All but the variant's parameters, which follow.
    struct LevelsParams = "fir::LevelsParams" {
        out: OutParams,
        states: Address,
        md: Address,
        parts: Address,
        rows: u32,
        levels: u32,
        dim: i32,
        qo_heads: i32,
        group: i32,
        pad: i32,
    }
}

pub(super) fn source(out: DType, hooks: &Hooks) -> Source {
    let params = Twin::of::<LevelsParams>();
    let name = format!("fir::merge_levels<{}, {}>", cpp(out), hooks.name);
    let params = hooks.twin(&params.cpp, &[("", &params)]);
    Source { file: "attention/levels.cuh", name, prelude: hooks.text.clone(), params }
}

/// Instantiations with hooks of every kind.
pub(super) fn kernels() -> Vec<Source> {
    let mut all = Vec::new();
    for out in [DType::F32, DType::F16, DType::BF16] {
        for variant in [crate::variant::standard(), crate::variant::causal(), crate::variant::sink()] {
            all.push(source(out, &Hooks::new(&variant)));
        }
    }
    all
}

/// The parts of a cascade's levels: where those of each token are.
#[derive(Debug, Default)]
pub(crate) struct Parts {
    /// Rows of all levels, and the first of each.
    rows: usize,
    first: Vec<usize>,
    /// As `levels.cuh` reads them; none on a dry run. It stays where it is for as many tokens.
    memory: Option<Buffer>,
    len: usize,
}

impl Parts {
    /// Takes the parts of the levels' batches, of so many query tokens.
    pub(crate) fn fill(&mut self, levels: &[&Plan], tokens: usize) -> Result<()> {
        self.rows = 0;
        self.first.clear();
        let head = levels.len().next_multiple_of(4);
        let mut words = vec![-1i32; head];
        let mut most = head;
        for (l, plan) in levels.iter().enumerate() {
            self.first.push(self.rows);
            let (heads, start) = (plan.kv_heads, words.len());
            most += 4 * tokens * heads;
            for lane in &plan.lanes {
                for m in lane.schedule.merges() {
                    if words.len() == start {
                        words[l] = (start / 4) as i32;
                        words.resize(start + 4 * tokens * heads, 0);
                    }
                    for i in 0..m.q_len as usize {
                        let at = start + 4 * ((m.q_start as usize + i) * heads + m.head as usize);
                        let row = self.rows + m.first as usize + i * plan.spec.group;
                        words[at..at + 3].copy_from_slice(&[row as i32, m.stride as i32, m.parts as i32]);
                    }
                }
                self.rows += plan.parts(lane)[0];
            }
        }
        self.len = size_of_val(&words[..]);
        let Some((gpu, stream)) = levels.first().and_then(|plan| Some((&plan.gpu, plan.gpu.stream()?))) else {
            return Ok(());
        };
        let memory = match self.memory.take().filter(|memory| memory.span().len >= self.len) {
            Some(memory) => memory,
            None => Buffer::new(stream, most * size_of::<i32>())?,
        };
        gpu.send(&[bytemuck::cast_slice(&words)], self.memory.insert(memory))
    }

    /// What a graph keeps of them: where they are, how many rows, and the first of each level.
    pub(crate) fn place(&self) -> (u64, usize, &[usize]) {
        (self.address().0, self.rows, &self.first)
    }

    fn address(&self) -> Address {
        Address(self.memory.as_ref().map_or(6 << 60, Buffer::address))
    }
}

/// Unfinished rows of a cascade's levels, in scratch: (m, d) of `[levels, rows]` and of parts, then the rows, `dim` each.
#[derive(Clone, Copy)]
pub(crate) struct States<'a> {
    pub(super) o: Address,
    md: Address,
    levels: usize,
    tokens: usize,
    heads: usize,
    dim: usize,
    parts: &'a Parts,
}

impl<'a> States<'a> {
    /// What they take of a scratch.
    pub(crate) fn sizes(levels: usize, [tokens, heads, dim]: [usize; 3], parts: &Parts) -> DeviceSizes {
        DeviceSizes { counters: 0, floats: (levels * tokens * heads + parts.rows) * (dim + 2) + 4 }
    }

    /// In a scratch of that size.
    pub(crate) fn new(
        op: &'static str,
        scratch: &mut Scratch,
        levels: usize,
        [tokens, heads, dim]: [usize; 3],
        parts: &'a Parts,
    ) -> Result<Self> {
        let start = match scratch.take_device(op, Self::sizes(levels, [tokens, heads, dim], parts))? {
            Some([_, floats]) => floats.address,
            None => 5 << 60,
        };
        let o = start + (8 * (levels * tokens * heads + parts.rows) as u64).next_multiple_of(16);
        Ok(Self { o: Address(o), md: Address(start), levels, tokens, heads, dim, parts })
    }

    /// Names them for the records of a dry run.
    pub(super) fn name(&self, call: &mut Call<'_>) {
        let (rows, parts) = (self.levels * self.tokens * self.heads, self.parts.rows);
        let [partial_md, partial_o] = self.partials_from(0);
        call.name("states", self.o.0, rows * self.dim * 4);
        call.name("states' md", self.md.0, rows * 8);
        call.name("parts of states", partial_o.0, parts * self.dim * 4);
        call.name("parts' md", partial_md.0, parts * 8);
        call.name("table of parts", self.parts.address().0, self.parts.len);
    }

    /// Pairs and rows of the parts from row `row` on.
    fn partials_from(&self, row: usize) -> [Address; 2] {
        let row = (self.levels * self.tokens * self.heads + row) as u64;
        [Address(self.md.0 + 8 * row), Address(self.o.0 + 4 * self.dim as u64 * row)]
    }

    /// Those of level `level`.
    pub(super) fn partials(&self, level: usize) -> [Address; 2] {
        self.partials_from(self.parts.first[level])
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
        states: States<'_>,
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
        states.name(&mut call);
        self.name(&mut call);
        let params = LevelsParams {
            out: OutParams {
                out,
                lse,
                out_token,
                out_head,
                lse_token,
                lse_head,
                tokens: self.token_list(),
                ..OutParams::zeroed()
            },
            states: states.o,
            md: states.md,
            parts: states.parts.address(),
            rows: rows as u32,
            levels: states.levels as u32,
            dim: states.dim as i32,
            qo_heads: states.heads as i32,
            group: self.spec.group as i32,
            pad: 0,
        };
        let mut bytes = bytemuck::bytes_of(&params).to_vec();
        self.hooks.pack(&mut call, bound, self.known(1.0), &mut bytes)?;
        let grid = Grid { early: true, ..Grid::new(rows.div_ceil(4) as u32, 128) };
        self.launch(gpu, &call, kernel, grid, &bytes)?;
        call.finish()
    }
}
