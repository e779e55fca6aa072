//! Attention: which kernel, the device's copy of a plan, and launches.
//!
//! | file | holds |
//! |---|---|
//! | this | [`Spec`], the table of kernels, [`Plan`] |
//! | [`form`] | the kernels' instantiations and parameters |
//! | [`hooks`] | a variant as the kernels take it |
//! | [`list`] | the work list in the device's memory |
//! | [`levels`] | the end of a cascade |
//! | [`merge`] | merges of states that a user has |

mod form;
mod hooks;
pub(crate) mod levels;
mod list;
pub(crate) mod merge;

use std::sync::Arc;

use self::form::{DecodeParams, Form, Instance, KvTensor, PlainParams};
use self::hooks::Hooks;
use self::list::List;
use super::call::Call;
use super::driver::Grid;
use super::exec::{Gpu, Kernel};
use super::jit::Source;
use super::params::Address;
use crate::error::{Error, Result};
use crate::kv::PageTable;
use crate::plan::{DeviceSizes, Schedule, Scratch, Split, Token};
use crate::tensor::{DType, Layout, TensorMut, TensorRef};
use crate::variant::{Bound, Variant};

/// What an attention kernel is chosen by.
#[derive(Clone, Debug)]
pub(crate) struct Spec {
    pub(crate) op: &'static str,
    pub(crate) q: DType,
    pub(crate) kv: DType,
    /// Type of the output in the end.
    pub(crate) out: DType,
    pub(crate) dim_qk: usize,
    pub(crate) dim_vo: usize,
    /// Elements of the rotary part of latent attention; `dim_qk` is without them.
    pub(crate) dim_pe: Option<usize>,
    /// Query heads per KV head.
    pub(crate) group: usize,
    /// Rows stay unfinished, for [`levels`].
    pub(crate) states: bool,
    pub(crate) variant: Variant,
}

/// Most rows of a query tile, unless one token has more: those of one tensor-core tile.
const ROWS: usize = 16;

/// A kernel and the reason why it refuses a problem, if it does.
type Candidate = (Form, fn(&Spec) -> Option<String>);

/// The kernels, best first. The tensor-core kernel for long queries goes before them all.
const CANDIDATES: &[Candidate] = &[
    (Form::Decode, |s| {
        let Some(multiply) = form::multiplied(s.kv) else { return Some(format!("{} keys and values", s.kv)) };
        let bits = form::bits(s.kv);
        let why = match s {
            _ if s.dim_pe.is_some() => "latent attention".into(),
            _ if s.group > ROWS => format!("{} query heads per KV head are more than {ROWS}", s.group),
            _ if s.dim_qk.max(s.dim_vo) > 256 => format!("head dims {}, {} above 256", s.dim_qk, s.dim_vo),
            _ if [s.dim_qk, s.dim_vo]
                .iter()
                .any(|d| !(d * bits).is_multiple_of(128) || (bits == 4 && !d.is_multiple_of(64))) =>
            {
                format!("{} rows of {} and {} elements", s.kv, s.dim_qk, s.dim_vo)
            }
            // The products' operands have 11 or 8 significant bits; the output may not have more.
            _ if s.out == DType::F32 || (s.out == DType::F16 && multiply == DType::BF16) => {
                format!("{} results of {multiply} products", s.out)
            }
            _ if s.q == DType::F32 || (s.q == DType::F16 && multiply == DType::BF16) => {
                format!("{} queries in {multiply} products", s.q)
            }
            // Rotated keys would be rounded to 16 bits before the product.
            _ if s.variant.rotates_keys() => format!("{} keys that are rotated", s.kv),
            _ => return None,
        };
        Some(why)
    }),
    (Form::Plain, |_| None),
];

/// The first kernel that takes `spec`.
fn choose(spec: &Spec) -> Result<Form> {
    let mut why = Vec::new();
    for (form, refuses) in CANDIDATES {
        match refuses(spec) {
            None => return Ok(*form),
            Some(reason) => why.push(format!("{form:?}: {reason}")),
        }
    }
    Err(Error::Unsupported { op: spec.op, why })
}

/// Instantiations for `fir jit build` and the tests: those of common models. A user's variant has others.
pub(super) fn kernels() -> Vec<Source> {
    use crate::variant::{alibi, causal, custom_mask, rope_llama, sigmoid, sink, sliding_window, soft_cap, standard};
    let arch = super::arch::Arch::HOPPER.typical().1;
    let spec = |q, kv, out, [dim_qk, dim_vo]: [usize; 2], variant| Spec {
        op: "kernels",
        q,
        kv,
        out,
        dim_qk,
        dim_vo,
        dim_pe: None,
        group: 1,
        states: false,
        variant,
    };
    let (f32, f16, bf16) = (DType::F32, DType::F16, DType::BF16);
    let mut specs = Vec::new();
    for d in [bf16, f16] {
        for dims in [[64, 64], [96, 96], [128, 128], [192, 128], [256, 256]] {
            specs.push(spec(d, d, d, dims, standard()));
        }
        specs.push(spec(d, d, d, [128, 128], causal()));
    }
    for kv in [DType::E4M3, DType::E5M2] {
        specs.extend([[64, 64], [128, 128], [256, 256]].map(|dims| spec(bf16, kv, bf16, dims, standard())));
        specs.push(spec(bf16, kv, bf16, [128, 128], causal()));
        specs.push(spec(f16, kv, f16, [128, 128], standard()));
    }
    specs.push(spec(bf16, DType::E2M1x2, bf16, [128, 128], standard()));
    // Every kind of hook and of parameter.
    let rope = rope_llama(1e4, 1.0, false);
    let variants =
        [Ok(sliding_window()), Ok(soft_cap()), Ok(alibi()), Ok(sink()), Ok(custom_mask()), Ok(sigmoid()), rope];
    for variant in variants.into_iter().flatten() {
        specs.push(spec(bf16, bf16, bf16, [128, 128], variant.clone()));
        specs.push(spec(f32, f32, f32, [128, 128], variant));
    }
    for dims in [[128, 128], [256, 256], [512, 512]] {
        specs.extend([f32, f16, bf16].map(|out| spec(f32, f32, out, dims, standard())));
        specs.push(spec(f32, f32, f32, dims, causal()));
    }
    for variant in [standard(), causal()] {
        for out in [f32, f16, bf16] {
            specs.push(Spec { dim_pe: Some(64), ..spec(bf16, bf16, out, [512, 512], variant.clone()) });
        }
        for d in [f32, bf16] {
            specs.push(Spec { states: true, ..spec(d, d, d, [128, 128], variant.clone()) });
        }
    }
    let mut all: Vec<Source> = Vec::new();
    for spec in specs {
        let form = choose(&spec).unwrap_or(Form::Plain);
        let source = form.instance(&spec, &Hooks::new(&spec.variant), arch).source;
        if !all.contains(&source) {
            all.push(source);
        }
    }
    all.extend(levels::kernels());
    all.extend(merge::kernels());
    all
}

/// A plan as a device has it: the kernel, loaded, and the work list.
#[derive(Debug)]
pub(crate) struct Plan {
    spec: Spec,
    hooks: Hooks,
    instance: Instance,
    kernel: Arc<Kernel>,
    /// The kernel that merges a cascade's levels, if this is one.
    levels: Option<Arc<Kernel>>,
    workers: usize,
    /// Whether the list holds room for any cut of a batch of so many query tiles.
    split: Split,
    list: List,
    /// Rows of partial results that scratch has room for.
    partial_rows: usize,
    counters: usize,
}

/// A batch as its schedule has it.
#[derive(Clone, Copy)]
pub(crate) struct Batch<'a> {
    pub(crate) schedule: &'a Schedule,
    /// Where every query token stands.
    pub(crate) tokens: &'a [Token],
    /// KV tokens of the schedule's requests.
    pub(crate) kv_lens: &'a [u32],
    /// First position of each of them, at a level of a cascade.
    pub(crate) kv_base: Option<&'a [i32]>,
}

/// Where rows of KV are.
#[derive(Clone, Copy)]
pub(crate) enum Index<'a> {
    Paged(&'a PageTable<'a>),
    /// One request after another.
    Ragged,
}

/// Where finished rows go.
#[expect(clippy::large_enum_variant, reason = "one at a time, on the stack")]
pub(crate) enum Sink<'a> {
    Output {
        out: TensorMut<'a>,
        lse: Option<TensorMut<'a>>,
    },
    /// Level `level` of a cascade's states.
    Level(levels::States, usize),
}

/// One layer's tensors: those of KV are `[pages, page_size, kv_heads, dim]`.
pub(crate) struct Args<'a> {
    pub(crate) op: &'static str,
    pub(crate) q: (&'static str, TensorRef<'a>),
    /// Latent attention's second part, and its factor.
    pub(crate) q_pe: Option<(TensorRef<'a>, f32)>,
    pub(crate) k: TensorRef<'a>,
    pub(crate) v: TensorRef<'a>,
    pub(crate) kpe: Option<TensorRef<'a>>,
    pub(crate) block_scales: Option<[TensorRef<'a>; 2]>,
    pub(crate) index: Index<'a>,
    /// Factor of the scores, the keys' scale included.
    pub(crate) sm_scale: f32,
    pub(crate) v_scale: f32,
    pub(crate) bound: &'a Bound<'a>,
    pub(crate) scratch: &'a mut Scratch,
    pub(crate) sink: Sink<'a>,
}

impl Plan {
    /// Chooses and loads the kernel; the list has room for `tiles` query tiles.
    pub(crate) fn new(gpu: &Gpu, spec: Spec, tiles: usize, split: Split) -> Result<Self> {
        let hooks = Hooks::new(&spec.variant);
        let instance = choose(&spec)?.instance(&spec, &hooks, gpu.properties().shared_per_block);
        let kernel = gpu.kernel(instance.source.clone())?;
        let workers = (gpu.properties().multiprocessors * instance.blocks) as usize;
        let levels = spec.states.then(|| gpu.kernel(levels::source(spec.out, &hooks))).transpose()?;
        let list = List::new(gpu, tiles, workers)?;
        Ok(Self { spec, hooks, instance, kernel, levels, workers, split, list, partial_rows: 0, counters: 0 })
    }

    /// Rows of a query tile: as many tokens' as fit.
    pub(crate) fn rows(&self) -> usize {
        (ROWS / self.spec.group).max(1) * self.spec.group
    }

    /// Blocks that run beside each other.
    pub(crate) fn workers(&self) -> usize {
        self.workers
    }

    /// Copies a batch to the device, in the order of the stream that the plan was made with.
    pub(crate) fn fill(&mut self, batch: Batch<'_>) -> Result<()> {
        self.list.fill(batch, self.workers)?;
        (self.partial_rows, self.counters) = (batch.schedule.partial_rows(), batch.schedule.merges().len());
        // A balanced cut has a border less than workers, each of which leaves two parts at most: scratch of that size fits
        // every later batch of the plan too.
        if self.split == Split::Balanced && self.rows() <= ROWS {
            self.partial_rows = self.partial_rows.max(2 * self.workers * self.rows());
            self.counters = self.counters.max(self.workers);
        }
        Ok(())
    }

    /// Memory that a run needs: pairs (m, d), then rows from a multiple of 16 bytes on.
    pub(crate) fn sizes(&self) -> DeviceSizes {
        DeviceSizes { counters: self.counters, floats: self.partial_rows * (self.spec.dim_vo + 2) + 4 }
    }

    /// Memory for a run of so much, in the order of the plan's stream.
    pub(crate) fn scratch(&self, sizes: DeviceSizes) -> Scratch {
        self.list.scratch(sizes)
    }

    /// Queues one layer.
    pub(crate) fn run<'a>(&'a self, gpu: &'a Gpu, args: Args<'a>) -> Result<()> {
        let Args { op, q, q_pe, k, v, kpe, block_scales, index, sm_scale, v_scale, bound, scratch, sink } = args;
        let spec = &self.spec;
        self.list.check(op, gpu)?;
        let mut call = Call::new(gpu, op);
        let pages = k.shape()[0];
        let page_size = k.shape()[1];
        let too_many = |arg, got: usize| Error::value(op, arg, got, "at most 2^32 - 1 on CUDA");
        let num_pages = u32::try_from(pages).map_err(|_| too_many("kv", pages))?;

        let rows = Rows::new(&mut call, q.0, q.1)?;
        let pe = match q_pe {
            Some((t, factor)) => Some((Rows::new(&mut call, "q_pe", t)?, factor)),
            None => None,
        };
        let k = kv_tensor(&mut call, "k", k)?;
        let v = kv_tensor(&mut call, "v", v)?;
        let kpe = kpe.map(|t| kv_tensor(&mut call, "kpe", t)).transpose()?.unwrap_or_default();
        let [k_scales, v_scales] = match block_scales {
            Some([a, b]) => [kv_tensor(&mut call, "k_block_scales", a)?, kv_tensor(&mut call, "v_block_scales", b)?],
            None => [KvTensor::default(); 2],
        };
        let (indptr, indices, page_size) = match index {
            Index::Paged(table) => {
                let [indptr, indices] = read_table(&mut call, table)?;
                (indptr, indices, page_size as u32)
            }
            // A single page of all rows, of which nothing is divided by.
            Index::Ragged => (self.list.starts(), Address(0), 1),
        };
        let sizes = self.sizes();
        let (counters, floats) = match scratch.take_device(op, sizes)? {
            Some([counters, floats]) => (counters.address, floats.address),
            None => (1 << 60, (1 << 60) + (1 << 40)),
        };
        let rest = (8 * self.partial_rows as u64).next_multiple_of(16);
        let (partial_md, partial_o) = (Address(floats), Address(floats + rest));
        call.name("counters", counters, sizes.counters * 4);
        call.name("partial_md", partial_md.0, rest as usize);
        call.name("partial_o", partial_o.0, sizes.floats * 4 - rest as usize);
        self.list.name(&mut call);

        let out = match sink {
            Sink::Output { out, lse } => {
                let lse = match lse {
                    Some(lse) => {
                        let [token, head] = strides(lse.layout(), 4);
                        (call.write("lse", lse)?, token / 4, head / 4)
                    }
                    None => (Address(0), 0, 0),
                };
                let (layout, dtype) = (*out.layout(), out.dtype());
                check_last(op, "out", &layout)?;
                let [token, head] = strides(&layout, dtype.size() as u64);
                OutRows { out: call.write("out", out)?, token, head, lse }
            }
            Sink::Level(states, level) => {
                states.name(&mut call);
                states.level(level)
            }
        };
        if self.list.is_empty() {
            return call.finish();
        }
        let decode = DecodeParams {
            q: rows.start,
            q_token: rows.token,
            q_head: rows.head,
            items: self.list.items(),
            out: out.out,
            lse: out.lse.0,
            out_token: out.token,
            out_head: out.head,
            lse_token: out.lse.1,
            lse_head: out.lse.2,
            partial_o,
            partial_md,
            merges: self.list.merges(),
            counters: Address(counters),
            tokens: self.list.tokens(),
            k: k.data,
            k_page: k.page,
            k_row: k.row,
            k_head: k.head,
            v: v.data,
            v_page: v.page,
            v_row: v.row,
            v_head: v.head,
            k_scales: k_scales.data,
            k_scales_page: k_scales.page,
            k_scales_row: k_scales.row,
            k_scales_head: k_scales.head,
            v_scales: v_scales.data,
            v_scales_page: v_scales.page,
            v_scales_row: v_scales.row,
            v_scales_head: v_scales.head,
            indices,
            indptr,
            num_pages,
            page_size,
            page_shift: if page_size.is_power_of_two() { page_size.trailing_zeros() as i32 } else { -1 },
            dim_qk: spec.dim_qk as i32,
            dim_vo: spec.dim_vo as i32,
            k_scale: 1.0,
            v_scale,
            pad: 0,
            sm_scale,
            group: spec.group as i32,
        };
        let out_bytes = if spec.states { 4 } else { 4 * spec.out.size() as u64 };
        let aligned = [rows.start.0, rows.token, rows.head].iter().all(|x| x % 16 == 0)
            && [k, v].iter().all(|t| t.is_multiple_of(16))
            && [k_scales, v_scales].iter().all(|t| t.is_multiple_of(4))
            && [out.out.0, out.token, out.head].iter().all(|x| x % out_bytes == 0);
        let fallback;
        let (instance, kernel) = if self.instance.form == Form::Decode && !aligned {
            // Rare enough to be compiled when it is met, and not with every plan.
            let plain = Form::Plain.instance(spec, &self.hooks, gpu.properties().shared_per_block);
            let kernel = gpu.kernel(plain.source.clone())?;
            fallback = plain;
            (&fallback, kernel)
        } else {
            (&self.instance, self.kernel.clone())
        };
        let mut bytes = Vec::with_capacity(instance.source.params.size);
        if instance.form == Form::Plain {
            let (pe, pe_factor) = pe.unwrap_or_default();
            bytes.extend_from_slice(bytemuck::bytes_of(&PlainParams {
                q_pe: pe.start,
                q_pe_token: pe.token,
                q_pe_head: pe.head,
                kpe: kpe.data,
                kpe_page: kpe.page,
                kpe_row: kpe.row,
                kpe_head: kpe.head,
                dim_pe: spec.dim_pe.unwrap_or(0) as i32,
                pe_factor,
                q_type: form::number(spec.q),
                kv_type: form::number(spec.kv),
            }));
        }
        bytes.extend_from_slice(bytemuck::bytes_of(&decode));
        self.hooks.pack(&mut call, bound, &mut bytes)?;
        let grid = Grid { smem: instance.smem, ..Grid::new(self.workers as u32, instance.threads) };
        let other = self.list.enter(gpu)?;
        call.launch_bytes(&kernel, grid, &bytes)?;
        if other {
            self.list.leave(gpu)?;
        }
        call.finish()
    }
}

/// Rows `[tokens, heads, dim]`: where they are, and their strides in bytes.
#[derive(Clone, Copy, Default)]
struct Rows {
    start: Address,
    token: u64,
    head: u64,
}

impl Rows {
    fn new<'a>(call: &mut Call<'a>, arg: &'static str, t: TensorRef<'a>) -> Result<Self> {
        check_last(call.op(), arg, t.layout())?;
        let [token, head] = strides(t.layout(), t.dtype().size() as u64);
        Ok(Self { start: call.read(arg, t)?, token, head })
    }
}

/// The output's rows, and those of `lse` with strides in elements.
struct OutRows {
    out: Address,
    token: u64,
    head: u64,
    lse: (Address, u64, u64),
}

/// Strides of the first axes in bytes; 0 for an axis that is never stepped along.
fn strides<const N: usize>(layout: &Layout, size: u64) -> [u64; N] {
    std::array::from_fn(|i| if layout.shape()[i] > 1 { layout.strides()[i] as u64 * size } else { 0 })
}

fn check_last(op: &'static str, arg: &'static str, layout: &Layout) -> Result<()> {
    match (layout.shape().last(), layout.strides().last()) {
        (Some(&n), Some(&step)) if n > 1 && step != 1 => {
            Err(Error::layout(op, arg, format!("stride {step} of the last axis"), "1"))
        }
        _ => Ok(()),
    }
}

fn kv_tensor<'a>(call: &mut Call<'a>, arg: &'static str, t: TensorRef<'a>) -> Result<KvTensor> {
    check_last(call.op(), arg, t.layout())?;
    let [page, row, head] = strides(t.layout(), t.dtype().size() as u64);
    Ok(KvTensor { data: call.read(arg, t)?, page, row, head })
}

/// Offsets and page ids on the device.
fn read_table<'a>(call: &mut Call<'a>, table: &'a PageTable<'a>) -> Result<[Address; 2]> {
    use crate::kv::Indices;
    let (indptr, indices) = match table.device() {
        Some(device) => {
            let indices = match &device.indices {
                Indices::Owned(t) => t.view(),
                Indices::Borrowed(t) => *t,
            };
            (device.indptr.view(), indices)
        }
        None => {
            let host = [table.indptr(), table.indices()];
            (TensorRef::new(host[0], &[host[0].len()])?, TensorRef::new(host[1], &[host[1].len()])?)
        }
    };
    // Ids of no pages at all still say that KV is paged.
    let indices = match call.read("page table", indices)? {
        Address(0) => Address(1 << 8),
        some => some,
    };
    Ok([call.read("page table's indptr", indptr)?, indices])
}
