//! Attention: which kernel, the device's copy of a plan, and launches.
//!
//! | file | holds |
//! |---|---|
//! | this | [`Spec`], the table of kernels, [`Plan`] |
//! | [`form`] | the kernels' instantiations and parameters |
//! | [`hopper`] | those of `sm90_prefill.cuh`, and its maps of tensors |
//! | [`hooks`] | a variant as the kernels take it |
//! | [`mla`] | latent attention on Hopper |
//! | [`list`] | the work list in the device's memory |
//! | [`levels`] | the end of a cascade |
//! | [`share`] | short and long tiles beside each other |
//! | [`sparse`] | small row blocks of block-sparse attention |
//! | [`merge`] | merges of states that a user has |

mod form;
mod hooks;
mod hopper;
pub(crate) mod levels;
mod list;
pub(crate) mod merge;
mod mla;
pub(crate) mod share;
pub(crate) mod sparse;

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use self::form::{AttentionParams, Form, Instance, KvPool, KvTensor, OutParams, PlainParams, PrefillParams};
use self::hooks::{Hooks, Known};
use self::list::{List, Order};
use self::share::Load;
use super::arch::Arch;
use super::call::Call;
use super::driver::Grid;
use super::exec::{Gpu, Kernel};
use super::jit::Source;
use super::params::Address;
use crate::error::{Error, Result};
use crate::kv::PageTable;
use crate::plan::{Cut, DeviceSizes, Entry, Schedule, Scratch, Split, Token};
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
    /// Made for [`MANY`] query tiles and more.
    pub(crate) many: bool,
    pub(crate) variant: Variant,
}

/// Query tiles from which on more and smaller blocks are faster: see `decode.cuh`'s shapes in [`form`].
pub(crate) const MANY: usize = 64;

/// Rows of one tensor-core tile: most rows of a short query tile, unless one token has more.
const ROWS: usize = 16;

/// The kernels for tiles of up to [`ROWS`] rows, and for longer ones, best first.
const CANDIDATES: [[Form; 4]; 2] = [
    [Form::Decode, Form::Hopper, Form::Prefill, Form::Plain],
    [Form::Hopper, Form::Prefill, Form::Decode, Form::Plain],
];

/// The first kernel that takes `spec` on a device of `arch`.
fn choose(spec: &Spec, arch: Arch, long: bool) -> Result<Form> {
    let mut why = Vec::new();
    for form in CANDIDATES[usize::from(long)] {
        match form.refuses(spec, arch) {
            None => return Ok(form),
            Some(reason) => why.push(format!("{form:?}: {reason}")),
        }
    }
    Err(Error::Unsupported { op: spec.op, why })
}

/// Tokens of a request's query tiles, and whether they are long ones, by the rows that tiles of a plan's one or two lanes may have.
fn tile_of(mut rows: impl Iterator<Item = usize>, group: usize, q_len: u32) -> (u32, bool) {
    let short = rows.next().unwrap_or(1);
    let long = rows.next().filter(|_| (q_len as usize).saturating_mul(group) > short);
    ((long.unwrap_or(short) / group).max(1) as u32, long.is_some())
}

/// What a plan of `spec` may need, for pages of any size.
pub(crate) fn sources(spec: &Spec, arch: Arch) -> Result<Vec<Source>> {
    let (hooks, shared) = (Hooks::new(&spec.variant), arch.typical().1);
    let mut all: Vec<Source> = Vec::new();
    let many = Spec { many: true, ..spec.clone() };
    let all_runs =
        [(spec, false, true), (&many, false, true), (spec, true, true), (spec, false, false), (spec, true, false)];
    for (spec, long, runs) in all_runs {
        let source = choose(spec, arch, long)?.where_runs(spec, runs).instance(spec, &hooks, shared, runs).source;
        if !all.contains(&source) {
            all.push(source);
        }
    }
    Ok(all)
}

/// Instantiations for `fir jit build` and the tests: those of common models. A user's variant has others.
pub(super) fn kernels() -> Vec<Source> {
    use crate::variant::{alibi, causal, custom_mask, rope_llama, sigmoid, sink, sliding_window, soft_cap, standard};
    let shared = Arch::HOPPER.typical().1;
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
        many: false,
        variant,
    };
    let (f32, f16, bf16) = (DType::F32, DType::F16, DType::BF16);
    let mut specs = Vec::new();
    for d in [bf16, f16] {
        for dims in [[64, 64], [96, 96], [128, 128], [192, 128], [256, 256]] {
            specs.push(spec(d, d, d, dims, standard()));
        }
        specs.push(spec(d, d, d, [128, 128], causal()));
        specs.extend([standard(), causal()].map(|v| Spec { many: true, ..spec(d, d, d, [128, 128], v) }));
    }
    for kv in [DType::E4M3, DType::E5M2] {
        specs.extend([[64, 64], [128, 128], [256, 256]].map(|dims| spec(bf16, kv, bf16, dims, standard())));
        specs.push(spec(bf16, kv, bf16, [128, 128], causal()));
        specs.push(spec(f16, kv, f16, [128, 128], standard()));
    }
    specs.extend([standard(), causal()].map(|v| spec(DType::E4M3, DType::E4M3, bf16, [128, 128], v)));
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
        specs.push(Spec { dim_pe: Some(64), ..spec(f16, f16, f16, [512, 512], variant.clone()) });
        for d in [f32, bf16] {
            specs.push(Spec { states: true, ..spec(d, d, d, [128, 128], variant.clone()) });
        }
    }
    let mut all: Vec<Source> = mla::kernels(&specs);
    for spec in specs {
        let hooks = Hooks::new(&spec.variant);
        // Pages that are no multiple of a run: of the commonest problem alone.
        let common = spec.kv == bf16 && spec.dim_qk == 128 && !spec.states && spec.variant == standard();
        for (arch, long, runs) in [
            (Arch::HOPPER, false, true),
            (Arch::HOPPER, true, true),
            (Arch::HOPPER, false, false),
            (Arch::HOPPER, true, false),
            (Arch::OLDEST, true, true),
        ] {
            let (form, runs) = (choose(&spec, arch, long).unwrap_or(Form::Plain), runs || !common);
            let source = form.where_runs(&spec, runs).instance(&spec, &hooks, shared, runs).source;
            if !all.contains(&source) {
                all.push(source);
            }
        }
    }
    all.extend(levels::kernels());
    all.extend(merge::kernels());
    all.extend(sparse::kernels());
    all
}

/// A plan as a device has it: kernels, loaded when a batch first needs them, and their work lists.
#[derive(Debug)]
pub(crate) struct Plan {
    gpu: Gpu,
    spec: Spec,
    hooks: Hooks,
    kv_heads: usize,
    split: Split,
    /// Query tiles that there is room for.
    tiles: usize,
    /// The kernel for short query tiles, and that for longer ones if it is another.
    lanes: Vec<Lane>,
    /// The kernel that merges a cascade's levels, if this is one.
    levels: Option<Arc<Kernel>>,
    /// What other plans have beside this one's batches: a level of a cascade.
    beside: Load,
}

/// One of a plan's kernels with its share of the batch.
#[derive(Debug)]
struct Lane {
    instance: Instance,
    /// Blocks that run beside each other, and how many of them share a list.
    workers: usize,
    team: usize,
    /// Those that have something to do: fewer than all where the other lane runs beside this one.
    busy: usize,
    schedule: Schedule,
    /// KV heads of all items that are taken before the next ones, where the kernel asks.
    heads_at_once: usize,
    /// None before a batch needs it.
    loaded: Option<(Arc<Kernel>, List)>,
    /// The kernel that merges what was cut, where the lane's own does not.
    merge: Option<Arc<Kernel>>,
}

impl Lane {
    fn cut(&self, kv_heads: usize, group: usize, split: Split) -> Cut {
        // Workers of latent attention have lists of their own: they go in step where a team is one of them, as that cuts fewer
        // requests (64 x 2048 none of 64; else 65 parts are written and merged, 128 KB each for a block).
        let in_step = kv_heads == 1 || !matches!(self.instance.form, Form::Mla(_));
        Cut { workers: self.busy, kv_heads: kv_heads as u32, group: group as u32, split, in_step }
    }
}

/// A batch of query tiles.
#[derive(Clone, Copy)]
pub(crate) struct Batch<'a> {
    /// Those of at most [`Plan::tile`]'s short rows, and the others.
    pub(crate) entries: &'a [Entry],
    pub(crate) long: &'a [Entry],
    /// Where every query token stands.
    pub(crate) tokens: &'a [Token],
    /// KV tokens of the entries' requests.
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
    Level(levels::States<'a>, usize),
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
    /// Factor of the scores, the keys' scale included; for hooks of text that scale alone.
    pub(crate) sm_scale: f32,
    /// What those hooks are told to multiply scores by.
    pub(crate) text_scale: f32,
    pub(crate) v_scale: f32,
    pub(crate) bound: &'a Bound<'a>,
    pub(crate) scratch: &'a mut Scratch,
    pub(crate) sink: Sink<'a>,
    /// Whether this comes right behind another plan's launch of the same call, whose results it does not read.
    pub(crate) behind: bool,
}

impl Plan {
    /// Chooses kernels; lists will have room for so many query tiles of so many KV heads. `decodes`: of one token each.
    pub(crate) fn new(
        gpu: &Gpu,
        mut spec: Spec,
        [tiles, mut kv_heads]: [usize; 2],
        split: Split,
        decodes: bool,
    ) -> Result<Self> {
        if spec.states && spec.variant.is_cuda_text() {
            // Rows are finished by a kernel that knows of no scale.
            return Err(Error::Unsupported { op: spec.op, why: vec!["a cascade with hooks of CUDA C++ text".into()] });
        }
        let hooks = Hooks::new(&spec.variant);
        let properties = gpu.properties();
        let mut forms = match mla::forms(properties.arch, properties.shared_per_block, &spec) {
            Some((forms, group)) => {
                // All query heads have the same keys: any part of them is what a KV head's are elsewhere.
                (kv_heads, spec.group) = (kv_heads * spec.group / group, group);
                forms
            }
            None => vec![choose(&spec, properties.arch, false)?, choose(&spec, properties.arch, true)?],
        };
        forms.dedup();
        if decodes {
            forms.truncate(1);
        }
        let lane = |form: Form| {
            let instance = form.instance(&spec, &hooks, properties.shared_per_block, true);
            let workers = (properties.multiprocessors * instance.blocks / form.cluster()).max(1) as usize;
            let schedule = Schedule::default();
            let mut lane = Lane {
                instance,
                workers,
                team: 1,
                busy: workers,
                schedule,
                heads_at_once: kv_heads,
                loaded: None,
                merge: None,
            };
            if !matches!(form, Form::Prefill | Form::Hopper) {
                lane.team = lane.cut(kv_heads, spec.group, split).team();
            }
            lane
        };
        let lanes = forms.into_iter().map(lane).collect();
        let levels = spec.states.then(|| gpu.kernel(levels::source(spec.out, &hooks))).transpose()?;
        let beside = Load::default();
        Ok(Self { gpu: gpu.clone(), spec, hooks, kv_heads, split, tiles, lanes, levels, beside })
    }

    /// Tokens of a query tile of a request of `q_len` tokens, and whether it is long.
    pub(crate) fn tile(&self, q_len: u32) -> (u32, bool) {
        let rows = self.lanes.iter().map(|lane| lane.instance.rows);
        tile_of(rows, self.spec.group, q_len)
    }

    /// Who does what of the short tiles.
    pub(crate) fn schedule(&self) -> &Schedule {
        &self.lanes[0].schedule
    }

    /// Cuts a batch over the workers and copies the lists to the device, in the order of the stream that the plan was made
    /// with. Loads what kernels it needs.
    pub(crate) fn fill(&mut self, batch: Batch<'_>) -> Result<()> {
        self.share(&batch);
        for (lane, entries) in self.lanes.iter_mut().zip([batch.entries, batch.long]) {
            let cut = lane.cut(self.kv_heads, self.spec.group, self.split);
            let (kernel, list) = match &mut lane.loaded {
                Some((kernel, list)) => (kernel.clone(), list),
                None if entries.is_empty() => continue,
                loaded @ None => {
                    let kernel = self.gpu.kernel(lane.instance.source.clone())?;
                    let list = List::new(&self.gpu, [self.tiles, self.kv_heads / lane.team], lane.workers)?;
                    let (kernel, list) = loaded.insert((kernel, list));
                    (kernel.clone(), list)
                }
            };
            debug_assert!(kernel.source == lane.instance.source);
            let (filled, order) = match lane.instance.form {
                Form::Prefill | Form::Hopper => (lane.schedule.fill_queue(cut, entries), Order::Queue(lane.workers)),
                Form::Decode | Form::Plain | Form::Mla(_) => {
                    (lane.schedule.fill(cut, entries), Order::Lists(lane.workers))
                }
            };
            filled.ok_or_else(|| {
                Error::value(self.spec.op, "split", format!("{:?}", self.split), "at most 2^24 partial rows")
            })?;
            list.fill(&lane.schedule, batch, order)?;
            match lane.instance.form {
                // Also where this batch was not cut: a graph of it may be replayed for one that was.
                Form::Mla(cluster) if lane.merge.is_none() => {
                    lane.merge = Some(self.gpu.kernel(mla::merge(&self.spec, &self.hooks, cluster))?);
                }
                Form::Hopper => {
                    let (mut rows, mut last) = (0, None);
                    for e in entries.iter().filter(|e| last.replace(e.request) != Some(e.request)) {
                        rows += u64::from(batch.kv_lens[e.request as usize]);
                    }
                    let many = [lane.schedule.items().len(), lane.busy];
                    lane.heads_at_once =
                        hopper::heads_at_once(&self.spec, rows, self.kv_heads, self.gpu.properties().l2_bytes, many);
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Rows of partial results and counters of merges that a lane needs. A balanced cut leaves two parts of a tile per
    /// worker at most: scratch of that size fits every later batch of the plan too.
    fn parts(&self, lane: &Lane) -> [usize; 2] {
        let mut now = [lane.schedule.partial_rows(), lane.schedule.merges().len()];
        let rows = lane.instance.rows;
        if self.split == Split::Balanced && self.spec.group <= rows && (lane.loaded.is_some() || !self.spec.states) {
            now[0] = now[0].max(2 * lane.workers * (rows / self.spec.group * self.spec.group));
            now[1] = now[1].max(2 * lane.workers);
        }
        // Nobody counts the merges of a cascade's levels.
        if self.spec.states { [now[0], 0] } else { now }
    }

    /// Memory that a run needs: counters of merges, then the queue; pairs (m, d), then rows from a multiple of 16 bytes on.
    pub(crate) fn sizes(&self) -> DeviceSizes {
        let [rows, merges] = self.most_parts();
        DeviceSizes { counters: merges + 2, floats: rows * (self.spec.dim_vo + 2) + 4 }
    }

    /// What all lanes need: lanes that take turns share it.
    fn most_parts(&self) -> [usize; 2] {
        let all = self.lanes.iter().map(|l| self.parts(l));
        match self.is_shared() {
            // They are among the cascade's states, and nobody counts them.
            _ if self.spec.states => [0, 0],
            true => all.fold([0, 0], |a, b| [a[0] + b[0], a[1] + b[1]]),
            false => all.fold([0, 0], |a, b| [a[0].max(b[0]), a[1].max(b[1])]),
        }
    }

    /// What the lanes before lane `i` have of it.
    fn parts_before(&self, i: usize) -> [usize; 2] {
        let before = if self.is_shared() || self.spec.states { &self.lanes[..i] } else { &[] };
        before.iter().map(|l| self.parts(l)).fold([0, 0], |a, b| [a[0] + b[0], a[1] + b[1]])
    }

    /// Memory for a run of so much, in the order of the plan's stream.
    pub(crate) fn scratch(&self, sizes: DeviceSizes) -> Scratch {
        list::scratch(&self.gpu, sizes)
    }

    /// What hooks of text are told.
    fn known(&self, sm_scale: f32) -> Known {
        let kv_heads = self.kv_heads as i32;
        Known { sm_scale, qo_heads: kv_heads * self.spec.group as i32, kv_heads }
    }

    /// Where tokens stand, for a level of a cascade.
    fn token_list(&self) -> Address {
        self.lanes.iter().filter_map(|l| l.loaded.as_ref()).map(|(_, list)| list.tokens()).next().unwrap_or_default()
    }

    /// What a graph keeps of a run besides what its tensors say: where lists and partial rows are, and which lanes have any
    /// work. How many blocks took from a queue, and in which order, is kept too, and good for any batch.
    pub(crate) fn recorded(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        for (i, lane) in self.lanes.iter().enumerate() {
            let list = lane.loaded.as_ref().filter(|(_, list)| !list.is_empty());
            (list.map(|(_, list)| list.items().0), self.parts_before(i)).hash(&mut hasher);
        }
        self.most_parts().hash(&mut hasher);
        hasher.finish()
    }

    /// Names the lists for the records of a dry run.
    fn name(&self, call: &mut Call<'_>) {
        self.lanes.iter().filter_map(|l| l.loaded.as_ref()).for_each(|(_, list)| list.name(call));
    }

    /// Queues a launch; on another stream than the plan's in turn with the copies of its lists.
    fn launch(&self, gpu: &Gpu, call: &Call<'_>, kernel: &Kernel, grid: Grid, bytes: &[u8]) -> Result<()> {
        let other = list::enter(&self.gpu, gpu)?;
        call.launch_bytes(kernel, grid, bytes)?;
        if other { list::leave(&self.gpu, gpu) } else { Ok(()) }
    }

    /// Queues one layer; whether there was anything to queue.
    pub(crate) fn run<'a>(&'a self, gpu: &'a Gpu, args: Args<'a>) -> Result<bool> {
        let Args { op, q, q_pe, k, v, kpe, block_scales, index, sm_scale, text_scale, v_scale, bound, scratch, .. } =
            args;
        let (sink, behind) = (args.sink, args.behind);
        let spec = &self.spec;
        list::check(op, &self.gpu, gpu)?;
        let mut call = Call::new(gpu, op);
        let pages = k.shape()[0];
        let (page_size, rows_per_page) = (k.shape()[1], k.shape()[1]);
        let too_many = |arg, got: usize| Error::value(op, arg, got, "at most 2^32 - 1 on CUDA");
        let num_pages = u32::try_from(pages).map_err(|_| too_many("kv", pages))?;

        let (rows, tokens) = (Rows::new(&mut call, q.0, q.1)?, q.1.shape()[0]);
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
            // A single page of all rows, of which nothing is divided by; each list has the requests' starts.
            Index::Ragged => (Address(0), Address(0), 1),
        };
        let sizes = self.sizes();
        let (counters, floats) = match scratch.take_device(op, sizes)? {
            Some([counters, floats]) => (counters.address, floats.address),
            None => (1 << 60, (1 << 60) + (1 << 40)),
        };
        let [partial_rows, merges] = self.most_parts();
        let rest = (8 * partial_rows as u64).next_multiple_of(16);
        let (partial_md, partial_o) = (Address(floats), Address(floats + rest));
        let queue = Address(counters + 4 * merges as u64);
        call.name("counters", counters, merges * 4);
        call.name("queue", queue.0, 8);
        call.name("partial_md", partial_md.0, rest as usize);
        call.name("partial_o", partial_o.0, sizes.floats * 4 - rest as usize);
        self.name(&mut call);

        let mut parts = [Address(counters), partial_md, partial_o];
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
                let [partial_md, partial_o] = states.partials(level);
                parts = [Address(0), partial_md, partial_o];
                states.level(level)
            }
        };
        let common = AttentionParams {
            q: rows.start,
            q_token: rows.token,
            q_head: rows.head,
            items: Address(0),
            out: OutParams {
                out: out.out,
                lse: out.lse.0,
                out_token: out.token,
                out_head: out.head,
                lse_token: out.lse.1,
                lse_head: out.lse.2,
                partial_o: Address(0),
                partial_md: Address(0),
                merges: Address(0),
                counters: Address(0),
                tokens: Address(0),
            },
            kv: KvPool {
                k,
                v,
                k_scales,
                v_scales,
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
            },
            sm_scale,
            group: spec.group as i32,
            team: 1,
            beside: 0,
        };
        let out_bytes = if spec.states { 16 } else { 4 * spec.out.size() as u64 };
        let aligned = [rows.start.0, rows.token, rows.head].iter().all(|x| x % 16 == 0)
            && [k, v].iter().all(|t| t.is_multiple_of(16))
            && [k_scales, v_scales].iter().all(|t| t.is_multiple_of(4))
            && [out.out.0, out.token, out.head].iter().all(|x| x % out_bytes == 0);
        // Offsets of rows travel as 32-bit counts of 16 bytes in `prefill.cuh`.
        let spans = |t: KvTensor| t.page.saturating_mul(pages as u64).max(t.row.saturating_mul(rows_per_page as u64));
        let near = spans(k).max(spans(v)) < 1 << 36;
        let runs = indices == Address(0) || page_size.is_multiple_of(form::RUN as u32);
        let (q_pe, pe_factor) = pe.unwrap_or_default();
        let latent = mla::Tensors { q_pe, pe_factor, ckv: k, kpe, pages: pages as u64, page_size };
        // `sm90_prefill.cuh` writes 16 bytes at a time, or boxes.
        let out_rows = Rows { start: out.out, token: out.token, head: out.head };
        let whole = aligned && [out.out.0, out.token, out.head].iter().all(|x| x % 16 == 0);
        let boxes = hopper::Boxes::new([k, v], pages as u64, rows_per_page as u64, indices == Address(0));
        let mut tail = Vec::new();
        self.hooks.pack(&mut call, bound, self.known(text_scale), &mut tail)?;
        // What was copied for this call must have come before anything reads it.
        let mut behind = behind && !call.has_copies();
        let mut bytes = Vec::with_capacity(1024);
        // Long tiles first: their blocks have a multiprocessor each, and those of short ones fill the others.
        for (i, lane) in self.lanes.iter().enumerate().rev() {
            let Some((kernel, list)) = lane.loaded.as_ref().filter(|(_, list)| !list.is_empty()) else { continue };
            let fallback;
            let form = lane.instance.form;
            // Maps of tensors that the copy engine does not take are not made.
            let gathers = near && form.where_runs(spec, false) == form;
            let hopper = (form == Form::Hopper && whole && (boxes.is_some() || gathers))
                .then(|| hopper::params(gpu, spec, ([rows, out_rows], tokens), [k, v], self.kv_heads, boxes).ok())
                .flatten();
            let fits = match form {
                Form::Decode => aligned && runs,
                Form::Prefill => aligned && near,
                Form::Hopper => hopper.is_some() && boxes.is_some(),
                Form::Plain => true,
                Form::Mla(_) => aligned && latent.fit(),
            };
            let (instance, kernel) = if fits {
                (&lane.instance, kernel.clone())
            } else {
                // Rare enough to be compiled when it is met, and not with every plan.
                let form = match form {
                    Form::Decode if aligned => form,
                    Form::Hopper if hopper.is_some() => form,
                    Form::Hopper if aligned && near && Form::Prefill.refuses(spec, gpu.properties().arch).is_none() => {
                        Form::Prefill
                    }
                    _ => Form::Plain,
                };
                fallback = form.instance(spec, &self.hooks, gpu.properties().shared_per_block, false);
                (&fallback, gpu.kernel(fallback.source.clone())?)
            };
            bytes.clear();
            match instance.form {
                Form::Decode => {}
                Form::Prefill => bytes.extend_from_slice(bytemuck::bytes_of(&PrefillParams {
                    queue,
                    count: list.count(),
                    heads: self.kv_heads as i32,
                    pad: 0,
                })),
                Form::Hopper => bytes.extend(hopper.iter().flat_map(|p| {
                    let params = hopper::Sm90Params {
                        queue,
                        count: list.count(),
                        heads_at_once: lane.heads_at_once as i32,
                        ..*p
                    };
                    bytemuck::bytes_of(&params).to_vec()
                })),
                Form::Plain => {
                    bytes.extend_from_slice(bytemuck::bytes_of(&PlainParams {
                        q_pe: q_pe.start,
                        q_pe_token: q_pe.token,
                        q_pe_head: q_pe.head,
                        kpe,
                        dim_pe: spec.dim_pe.unwrap_or(0) as i32,
                        pe_factor,
                        q_type: form::number(spec.q),
                        kv_type: form::number(spec.kv),
                    }));
                }
                Form::Mla(_) => {
                    bytes.extend_from_slice(bytemuck::bytes_of(&latent.params(gpu, spec.kv, list.merge_count())?))
                }
            }
            // Behind what the lanes before have.
            let [rows, merges] = self.parts_before(i).map(|n| n as u64);
            let [counters, partial_md, partial_o] = parts;
            let out = OutParams {
                merges: list.merges(),
                tokens: list.tokens(),
                counters: Address(counters.0 + 4 * merges),
                partial_md: Address(partial_md.0 + 8 * rows),
                partial_o: Address(partial_o.0 + 4 * rows * spec.dim_vo as u64),
                ..common.out
            };
            let indptr = if indices == Address(0) { list.starts() } else { indptr };
            let kv = KvPool { indptr, ..common.kv };
            let (items, team) = (list.items(), lane.team as i32);
            // Beside the longer tiles of this call, `decode.cuh` waits for them in the end; else, and those of `sm90_*.cuh`
            // always, for the kernel before them at the start. A launch that may start early also takes the driver of an H200 0.5 of 3.5 µs less.
            let beside = i32::from(behind && instance.form == Form::Decode);
            bytes.extend_from_slice(bytemuck::bytes_of(&AttentionParams { items, out, kv, team, beside, ..common }));
            bytes.extend_from_slice(&tail);
            if matches!(instance.form, Form::Mla(_) | Form::Hopper) {
                // Aligned to what their maps are.
                bytes.resize(kernel.source.params.size, 0);
            }
            let cluster = instance.form.cluster();
            // Lists of workers who have nothing are empty, and a graph that is replayed may have more of them; a queue has any
            // number of takers.
            let workers = if instance.form == Form::Hopper { lane.busy } else { lane.workers };
            let blocks = workers as u32 * cluster;
            let early = matches!(instance.form, Form::Decode | Form::Hopper | Form::Mla(_));
            let grid = Grid { smem: instance.smem, cluster, early, ..Grid::new(blocks, instance.threads) };
            self.launch(gpu, &call, &kernel, grid, &bytes)?;
            behind = true;
            if let (Form::Mla(cluster), Some(merge)) = (instance.form, &lane.merge) {
                let merges = match gpu.stream() {
                    Some(stream) if stream.is_recorded()? => None,
                    _ => Some(lane.schedule.merges().len()),
                };
                if merges != Some(0) {
                    self.launch(gpu, &call, merge, mla::merge_grid(gpu, merges, cluster), &bytes)?;
                }
            }
        }
        call.finish()?;
        Ok(behind)
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
    let (indptr, indices) = match table.device() {
        Some(device) => (device.indptr.view(), device.indices.view()),
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
