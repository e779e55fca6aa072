//! The end of a cascade: the states that its levels leave, merged and finished (`levels.cuh`).

use bytemuck::Zeroable as _;

use super::super::call::Call;
use super::super::driver::Grid;
use super::super::exec::Gpu;
use super::super::jit::Source;
use super::super::params::{Address, Twin, params};
use super::form::{OutParams, cpp};
use super::hooks::Hooks;
use super::{OutRows, Plan, check_last, strides};
use crate::error::Result;
use crate::plan::{DeviceSizes, Scratch};
use crate::tensor::{DType, TensorMut};
use crate::variant::Bound;

params! {
    /// All but the variant's parameters, which follow.
    struct LevelsParams = "fir::LevelsParams" {
        out: OutParams,
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

    /// Names them for the records of a dry run.
    pub(super) fn name(&self, call: &mut Call<'_>) {
        let rows = self.levels * self.tokens * self.heads;
        call.name("states", self.o.0, rows * self.dim * 4);
        call.name("states' md", self.md.0, rows * 8);
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
            rows: rows as u32,
            levels: states.levels as u32,
            dim: states.dim as i32,
            qo_heads: states.heads as i32,
            group: self.spec.group as i32,
            pad: 0,
        };
        let mut bytes = bytemuck::bytes_of(&params).to_vec();
        self.hooks.pack(&mut call, bound, self.known(1.0), &mut bytes)?;
        self.launch(gpu, &call, kernel, Grid::new(rows.div_ceil(4) as u32, 128), &bytes)?;
        call.finish()
    }
}
