//! `fir demo`: requests behind one system prompt, planned, run, checked and timed.

use std::io::Write;
use std::time::{Duration, Instant};

use anyhow::Result;
use clap::Args;
use fir::attention::{BatchArgs, BatchPlan, CascadeArgs, CascadeLevel, CascadePlan, Problem, Schedule, Scratch, Split};
use fir::kv::{Kv, KvLayout, PageTable, PagedKv, PagedKvMut};
use fir::page::{Slots, append_paged_kv, batch_indices_positions};
use fir::reference::{self, Precision};
use fir::testing::{Compare, Rng, compare};
use fir::variant::{self, Params};
use fir::{DType, Exec, Ragged, Tensor, TensorRef};

use crate::picture::{Style, picture};

/// Options of `fir demo`.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct Options {
    /// A small batch, timed briefly
    #[arg(long)]
    quick: bool,
    /// Seed of the random tensors
    #[arg(long, default_value_t = 0)]
    seed: u64,
}

const QO_HEADS: usize = 32;
const KV_HEADS: usize = 8;
const HEAD_DIM: usize = 128;
const PAGE_SIZE: usize = 16;
const DTYPE: DType = DType::BF16;
/// Bytes of one token's keys and values for one KV head.
const TOKEN_HEAD_BYTES: u64 = 2 * HEAD_DIM as u64 * 2;
/// Decodes are lower-case, prefill chunks upper-case.
const NAMES: [char; 12] = ['a', 'b', 'c', 'd', 'e', 'f', 'g', 'h', 'i', 'j', 'K', 'L'];
const DECODES: usize = 10;
/// The lanes' width: with worker and share, a line has 84 columns.
const LANE: usize = 64;

fn problem() -> Problem {
    Problem::new(QO_HEADS, KV_HEADS, HEAD_DIM, DTYPE, variant::causal())
}

/// Runs the demo; false if a check failed.
pub(crate) fn run(options: &Options, style: Style, out: &mut impl Write) -> Result<bool> {
    let exec = Exec::cpu()?;
    let start = Instant::now();
    let work = Workload::new(&exec, options)?;
    let (all, decodes) = (work.batch(NAMES.len())?, work.batch(DECODES)?);
    describe(&exec, &work, &all, style, out)?;

    let mut flat = Flat::new(&exec, &work, &all)?;
    let mut cascade = Cascade::new(&exec, &work, &all)?;
    flat.show(style, out)?;
    cascade.show(style, out)?;

    let passed = check(&exec, &work, &all, &mut flat, &mut cascade, style, out)?;

    let repeats = if options.quick { 3 } else { 9 };
    heading(style, out, "speed", &format!("one layer, median of {repeats} calls"))?;
    writeln!(out, "  {:28}{:>10}  {:>9}{:12}  {:>14}", "", "time", "KV read", "", "arithmetic")?;
    let mut row = |what: &str, call: Duration, bytes: u64, flops: u64, than: Option<Duration>| {
        let seconds = call.as_secs_f64();
        let ratio = than.map_or(String::new(), |flat| format!("   {:.2}x as fast", flat.as_secs_f64() / seconds));
        let (speed, rate) = (bytes as f64 / seconds / 1e9, flops as f64 / seconds / 1e9);
        let (time, bytes) = (time(call), size(bytes));
        writeln!(out, "  {what:28}{time:>10}  {bytes:>9}  {speed:5.1} GB/s  {rate:6.1} GFLOP/s{ratio}")
    };
    let flat_time = median(repeats, || flat.run(&exec))?;
    row("12 requests     BatchPlan", flat_time, flat.bytes(), all.flops(), None)?;
    let cascade_time = median(repeats, || cascade.run(&exec))?;
    row("                CascadePlan", cascade_time, cascade.bytes(), all.flops(), Some(flat_time))?;
    let mut flat = Flat::new(&exec, &work, &decodes)?;
    let mut cascade = Cascade::new(&exec, &work, &decodes)?;
    let flat_time = median(repeats, || flat.run(&exec))?;
    row("its 10 decodes  BatchPlan", flat_time, flat.bytes(), decodes.flops(), None)?;
    let cascade_time = median(repeats, || cascade.run(&exec))?;
    row("                CascadePlan", cascade_time, cascade.bytes(), decodes.flops(), Some(flat_time))?;
    writeln!(out, "  KV read: what the workers pass over, once for every 16 query tokens that share it.")?;
    writeln!(out, "  Arithmetic: multiplications and additions of the pairs that the mask shows.")?;
    let verdict = if passed { "all checks passed" } else { "A CHECK FAILED" };
    writeln!(out, "\n{} in {:.1} s", style.bold(verdict), start.elapsed().as_secs_f64())?;
    Ok(passed)
}

/// The tensors of a layer, and who owns which pages.
struct Workload {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prompt_pages: Vec<i32>,
    own_pages: Vec<Vec<i32>>,
    prompt: usize,
    own: Vec<u32>,
    q_lens: Vec<u32>,
    append_time: Duration,
}

impl Workload {
    fn new(exec: &Exec, options: &Options) -> Result<Self> {
        let mut rng = Rng::new(options.seed);
        let (prompt, chunk) = if options.quick { (256, 16) } else { (2048, 64) };
        // Tokens after the prompt, those of this step included.
        let mut own: Vec<u32> = vec![90, 130, 190, 300, 370, 400, 500, 640, 830, 1100, 64, 64 + 256];
        if options.quick {
            own = own.iter().map(|n| n.div_ceil(4)).collect();
        }
        let q_lens = [vec![1; DECODES], vec![chunk; NAMES.len() - DECODES]].concat();

        // Pages come in any order, as from an engine that has run for a while.
        let pages_of = |tokens: usize| tokens.div_ceil(PAGE_SIZE);
        let num_pages = pages_of(prompt) + own.iter().map(|&n| pages_of(n as usize)).sum::<usize>();
        let mut free: Vec<i32> = (0..num_pages as i32).collect();
        for i in (1..num_pages).rev() {
            free.swap(i, rng.below(i + 1));
        }
        let mut take = |tokens: usize| free.split_off(free.len() - pages_of(tokens));
        let prompt_pages = take(prompt);
        let own_pages = own.iter().map(|&n| take(n as usize)).collect();

        let q = rng.tensor(DTYPE, &[q_lens.iter().sum::<u32>() as usize, QO_HEADS, HEAD_DIM]);
        let cache = || Tensor::zeros(DTYPE, &[num_pages, PAGE_SIZE, KV_HEADS, HEAD_DIM]);
        let append_time = Duration::ZERO;
        let mut work = Self { q, k: cache()?, v: cache()?, prompt_pages, own_pages, prompt, own, q_lens, append_time };

        // The prompt through the first request's pages, and each request's own tokens through its own.
        let mut new = work.own.clone();
        new[0] += prompt as u32;
        let (new, table) = (Ragged::from_lens(&new)?, work.batch(NAMES.len())?.flat);
        let lens: Vec<i32> = table.lens().iter().map(|&n| n as i32).collect();
        let (mut requests, mut positions) = (vec![0; new.rows()], vec![0; new.rows()]);
        let shape = [new.rows()];
        batch_indices_positions(
            exec,
            &new,
            TensorRef::new(&lens, &[lens.len()])?,
            fir::TensorMut::new(&mut requests, &shape)?,
            fir::TensorMut::new(&mut positions, &shape)?,
        )?;
        let shape = [new.rows(), KV_HEADS, HEAD_DIM];
        let (k, v) = (rng.tensor(DTYPE, &shape), rng.tensor(DTYPE, &shape));
        let slots = Slots::Tokens {
            table: &table,
            batch_indices: TensorRef::new(&requests, &shape[..1])?,
            positions: TensorRef::new(&positions, &shape[..1])?,
        };
        let start = Instant::now();
        let cache = PagedKvMut::new(work.k.view_mut(), work.v.view_mut(), KvLayout::Nhd)?;
        append_paged_kv(exec, k.view(), v.view(), slots, cache)?;
        work.append_time = start.elapsed();
        Ok(work)
    }

    fn cache(&self) -> Result<PagedKv<'_>> {
        Ok(PagedKv::new(self.k.view(), self.v.view(), KvLayout::Nhd)?)
    }

    fn num_pages(&self) -> usize {
        self.k.shape()[0]
    }

    fn table(&self, requests: &[(&[i32], u32)]) -> Result<PageTable<'static>> {
        let lens: Vec<i32> = requests.iter().map(|r| r.1 as i32).collect();
        let pages = Ragged::from_lens(&requests.iter().map(|r| r.0.len() as u32).collect::<Vec<_>>())?;
        let indices = requests.iter().map(|r| r.0).collect::<Vec<_>>().concat();
        Ok(PageTable::with_lens(PAGE_SIZE, self.num_pages(), pages.indptr().to_vec(), indices, &lens)?)
    }

    /// The first `n` requests.
    fn batch(&self, n: usize) -> Result<Batch> {
        let prompt = self.prompt as u32;
        let whole: Vec<Vec<i32>> =
            self.own_pages[..n].iter().map(|own| [&self.prompt_pages[..], own].concat()).collect();
        let lens = &self.own[..n];
        let qo = Ragged::from_lens(&self.q_lens[..n])?;
        Ok(Batch {
            everyone: Ragged::from_lens(&[qo.rows() as u32])?,
            qo,
            flat: self.table(&whole.iter().zip(lens).map(|(p, own)| (&p[..], prompt + own)).collect::<Vec<_>>())?,
            shared: self.table(&[(&self.prompt_pages[..], prompt)])?,
            own: self.table(&self.own_pages.iter().zip(lens).map(|(p, own)| (&p[..], *own)).collect::<Vec<_>>())?,
        })
    }
}

/// Some of the requests, as one level of KV and as two.
struct Batch {
    qo: Ragged,
    /// All query tokens as one group.
    everyone: Ragged,
    flat: PageTable<'static>,
    shared: PageTable<'static>,
    own: PageTable<'static>,
}

impl Batch {
    /// Multiplications and additions of the two products, over the pairs that a causal mask shows.
    fn flops(&self) -> u64 {
        let pairs: u64 =
            self.qo.lens().iter().zip(self.flat.lens()).map(|(&q, &kv)| visible(q.into(), kv.into())).sum();
        pairs * 4 * (QO_HEADS * HEAD_DIM) as u64
    }
}

/// Pairs of query token and position that a causal mask shows.
fn visible(q_len: u64, kv_len: u64) -> u64 {
    q_len * (kv_len - q_len) + q_len * (q_len + 1) / 2
}

/// What both ways of running have.
struct Outputs {
    out: Tensor,
    lse: Tensor,
    plan_time: Duration,
}

impl Outputs {
    fn new(batch: &Batch, plan_time: Duration) -> Result<Self> {
        let rows = batch.qo.rows();
        let (out, lse) =
            (Tensor::zeros(DTYPE, &[rows, QO_HEADS, HEAD_DIM])?, Tensor::zeros(DType::F32, &[rows, QO_HEADS])?);
        Ok(Self { out, lse, plan_time })
    }
}

/// A batch as one level.
struct Flat<'a> {
    plan: BatchPlan,
    scratch: Scratch,
    q: TensorRef<'a>,
    kv: Kv<'a>,
    outputs: Outputs,
}

impl<'a> Flat<'a> {
    fn new(exec: &Exec, work: &'a Workload, batch: &'a Batch) -> Result<Self> {
        let mut plan = BatchPlan::new(exec, problem(), &batch.qo, batch.flat.lens(), Split::Balanced)?;
        let plan_time = median(9, || Ok(plan.refill(&batch.qo, batch.flat.lens())?))?;
        Ok(Self {
            scratch: plan.scratch(),
            plan,
            q: work.q.view().slice(0, 0..batch.qo.rows())?,
            kv: Kv::Paged(work.cache()?, &batch.flat),
            outputs: Outputs::new(batch, plan_time)?,
        })
    }

    fn run(&mut self, exec: &Exec) -> Result<()> {
        let Self { plan, scratch, q, kv, outputs } = self;
        let (out, lse) = (outputs.out.view_mut(), Some(outputs.lse.view_mut()));
        let args = BatchArgs { q: *q, kv: *kv, params: &Params::new(), sm_scale: None, scratch, out, lse };
        Ok(plan.run(exec, args)?)
    }

    fn bytes(&self) -> u64 {
        walked(self.plan.schedule())
    }

    fn show(&self, style: Style, out: &mut impl Write) -> Result<()> {
        let s = self.plan.schedule();
        heading(
            style,
            out,
            "schedule",
            &format!("BatchPlan, planned in {}: {}", time(self.outputs.plan_time), counts(s)),
        )?;
        out.write_all(picture(s, &NAMES, LANE, style).as_bytes())?;
        let total: u64 = s.items().iter().map(|i| s.item_cost(i)).sum();
        write!(out, "  share (%)")?;
        for (r, name) in NAMES.into_iter().enumerate() {
            let mine: u64 = s.items().iter().filter(|i| i.request as usize == r).map(|i| s.item_cost(i)).sum();
            write!(out, "  {} {:.1}", style.name(name), mine as f64 * 100.0 / total as f64)?;
        }
        writeln!(out)?;
        Ok(())
    }
}

/// A batch as two levels: the prompt, and what each request has of its own.
struct Cascade<'a> {
    plan: CascadePlan,
    scratch: Vec<Scratch>,
    q: TensorRef<'a>,
    kv: [Kv<'a>; 2],
    outputs: Outputs,
}

impl<'a> Cascade<'a> {
    fn new(exec: &Exec, work: &'a Workload, batch: &'a Batch) -> Result<Self> {
        let levels = [
            CascadeLevel { qo: &batch.everyone, kv_lens: batch.shared.lens() },
            CascadeLevel { qo: &batch.qo, kv_lens: batch.own.lens() },
        ];
        let plan = CascadePlan::new(exec, problem(), &levels, Split::Balanced)?;
        let plan_time = median(9, || {
            let again = CascadePlan::new(exec, problem(), &levels, Split::Balanced)?;
            std::hint::black_box(&again);
            Ok(())
        })?;
        Ok(Self {
            scratch: plan.scratch(),
            plan,
            q: work.q.view().slice(0, 0..batch.qo.rows())?,
            kv: [Kv::Paged(work.cache()?, &batch.shared), Kv::Paged(work.cache()?, &batch.own)],
            outputs: Outputs::new(batch, plan_time)?,
        })
    }

    fn run(&mut self, exec: &Exec) -> Result<()> {
        let Self { plan, scratch, q, kv, outputs } = self;
        let (out, lse) = (outputs.out.view_mut(), Some(outputs.lse.view_mut()));
        let args = CascadeArgs { q: *q, kv, params: &Params::new(), sm_scale: None, scratch, out, lse };
        Ok(plan.run(exec, args)?)
    }

    fn bytes(&self) -> u64 {
        self.plan.schedules().map(walked).sum()
    }

    fn show(&self, style: Style, out: &mut impl Write) -> Result<()> {
        heading(style, out, "schedule", &format!("CascadePlan, planned in {}", time(self.outputs.plan_time)))?;
        let levels =
            [("the prompt, for all query tokens together", &['='][..]), ("each request's own tokens", &NAMES[..])];
        for (s, (what, names)) in self.plan.schedules().zip(levels) {
            writeln!(out, "  {what}: {}", counts(s))?;
            out.write_all(picture(s, names, LANE, style).as_bytes())?;
        }
        Ok(())
    }
}

/// Bytes of keys and values that the items pass over.
fn walked(s: &Schedule) -> u64 {
    s.items()
        .iter()
        .map(|i| u64::from(i.kv_end - i.kv_start) * u64::from(i.head_end - i.head_start) * TOKEN_HEAD_BYTES)
        .sum()
}

fn counts(s: &Schedule) -> String {
    let plural = |n: usize, what: &str| format!("{n} {what}{}", if n == 1 { "" } else { "s" });
    let cut = match s.merges().len() {
        0 => "no head cut".to_owned(),
        n => format!("{} cut (/)", plural(n, "head")),
    };
    format!("{}, {cut}", plural(s.items().len(), "item"))
}

fn describe(exec: &Exec, work: &Workload, batch: &Batch, style: Style, out: &mut impl Write) -> Result<()> {
    let machine = match exec {
        Exec::Cpu(cpu) => format!("{} on {} threads", cpu.level(), cpu.workers()),
        _ => "?".to_owned(),
    };
    heading(style, out, "fir demo", "attention of one layer for 12 requests behind one system prompt")?;
    let (shortest, longest) = (work.own.iter().min().unwrap_or(&0), work.own.iter().max().unwrap_or(&0));
    let (first, last) = (style.name(NAMES[0]), style.name(NAMES[DECODES - 1]));
    let chunks = (style.name(NAMES[DECODES]), style.name(NAMES[DECODES + 1]));
    let mut line = |what: &str, text: String| writeln!(out, "  {what:9} {text}");
    line(
        "requests",
        format!(
            "{DECODES} decodes {first}..{last} of 1 query token, 2 prefill chunks {} {} of {}",
            chunks.0, chunks.1, work.q_lens[DECODES]
        ),
    )?;
    line("tokens", format!("{} of the prompt, shared; {shortest} to {longest} of each request's own", work.prompt))?;
    line("heads", format!("{QO_HEADS} of queries, {KV_HEADS} of keys and values, of {HEAD_DIM}; {DTYPE}, causal"))?;
    let bytes = work.num_pages() as u64 * (PAGE_SIZE * KV_HEADS) as u64 * TOKEN_HEAD_BYTES;
    let unshared = batch.flat.lens().iter().map(|&n| (n as usize).div_ceil(PAGE_SIZE)).sum::<usize>();
    line(
        "cache",
        format!(
            "{} pages of {PAGE_SIZE} tokens, {}; {unshared} if the prompt's {} were not shared",
            work.num_pages(),
            size(bytes),
            work.prompt_pages.len()
        ),
    )?;
    line("", format!("filled by append_paged_kv in {}", time(work.append_time)))?;
    line("work", format!("{:.2} GFLOP", batch.flops() as f64 / 1e9))?;
    line("machine", machine)?;
    Ok(())
}

/// Compares both ways with the reference on some rows, and with each other on all.
fn check(
    exec: &Exec,
    work: &Workload,
    batch: &Batch,
    flat: &mut Flat<'_>,
    cascade: &mut Cascade<'_>,
    style: Style,
    out: &mut impl Write,
) -> Result<bool> {
    flat.run(exec)?;
    cascade.run(exec)?;
    let mut passed = true;
    let mut line = |out: &mut dyn Write, what: &str, result: Result<String, String>| {
        passed &= result.is_ok();
        let (mark, text) = match result {
            Ok(text) => ("ok  ", text),
            Err(text) => ("FAIL", text),
        };
        writeln!(out, "  {} {what}: {text}", style.bold(mark))
    };

    // A causal row sees nothing after itself, so a token of a chunk is the last of a shorter request.
    let samples = [(0, 0), (DECODES - 1, 0), (DECODES, 0), (DECODES + 1, work.q_lens[DECODES + 1] - 1)];
    let start = Instant::now();
    let requests: Vec<(&[i32], u32)> = samples
        .iter()
        .map(|&(r, token)| (batch.flat.pages(r), batch.flat.lens()[r] - work.q_lens[r] + token + 1))
        .collect();
    let rows: Vec<usize> = samples.iter().map(|&(r, token)| batch.qo.indptr()[r] as usize + token as usize).collect();
    let (table, qo) = (work.table(&requests)?, Ragged::ones(samples.len())?);
    let q = pick(work.q.view(), &rows)?;
    let (variant, params) = (variant::causal(), Params::new());
    let want = reference::attention::Batch {
        q: q.view(),
        qo: &qo,
        kv: Kv::Paged(work.cache()?, &table),
        variant: &variant,
        params: &params,
        sm_scale: f64::from(1.0 / (HEAD_DIM as f32).sqrt()),
    };
    let exact = reference::attention::batch(Precision::Exact, &want)?;
    let naive = reference::attention::batch(Precision::Naive(DTYPE), &want)?;
    heading(
        style,
        out,
        "checks",
        &format!("the reference's {} rows in plain f64 loops took {}", rows.len() * QO_HEADS, time(start.elapsed())),
    )?;
    for (name, outputs) in
        [("BatchPlan against the reference", &flat.outputs), ("CascadePlan against the reference", &cascade.outputs)]
    {
        let (o, lse) = (pick(outputs.out.view(), &rows)?, pick(outputs.lse.view(), &rows)?);
        let result = compare(o.view(), Compare { exact: &exact.0, naive: &naive.0, row: HEAD_DIM })
            .and_then(|()| compare(lse.view(), Compare { exact: &exact.1, naive: &naive.1, row: 1 }))
            .map(|()| error(&o, &exact.0))
            .map(|error| {
                format!("largest error {error:.1e}, naive {DTYPE} code's {:.1e}", largest(&naive.0, &exact.0))
            });
        line(out, name, result)?;
    }
    line(out, "CascadePlan against BatchPlan", same(&cascade.outputs, &flat.outputs)?)?;
    Ok(passed)
}

/// The rows of the first axis that are named, as a tensor of their own.
fn pick(x: TensorRef<'_>, rows: &[usize]) -> Result<Tensor> {
    let mut data = vec![];
    for &row in rows {
        data.extend(x.select(0, row)?.to_f32_vec()?);
    }
    let mut shape = x.shape().to_vec();
    shape[0] = rows.len();
    Ok(Tensor::from_f32(x.dtype(), &data, &shape)?)
}

fn error(got: &Tensor, exact: &[f64]) -> f64 {
    let got: Vec<f64> = got.view().to_f32_vec().unwrap_or_default().into_iter().map(f64::from).collect();
    largest(&got, exact)
}

fn largest(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
}

/// Whether the two differ by no more than a step of bf16 at a row's largest value, in any row.
fn same(a: &Outputs, b: &Outputs) -> Result<Result<String, String>> {
    let (a, b) = (a.out.view().to_f32_vec()?, b.out.view().to_f32_vec()?);
    let (mut equal, mut most) = (0, 0f32);
    for (r, (a, b)) in a.chunks(HEAD_DIM).zip(b.chunks(HEAD_DIM)).enumerate() {
        let step = b.iter().fold(0f32, |m, x| m.max(x.abs())) / 128.0;
        for (a, b) in a.iter().zip(b) {
            let apart = (a - b).abs();
            equal += usize::from(apart == 0.0);
            most = most.max(apart);
            if apart.is_nan() || apart > step {
                return Ok(Err(format!("{a} and {b} in row {r}, further apart than {step:.1e}")));
            }
        }
    }
    let (rows, differ) = (a.len() / HEAD_DIM, a.len() - equal);
    Ok(Ok(format!("{rows} rows, {differ} of {} elements differ, by {most:.1e} at most", a.len())))
}

fn heading(style: Style, out: &mut impl Write, what: &str, text: &str) -> Result<()> {
    Ok(writeln!(out, "\n{}  {text}", style.bold(what))?)
}

/// Median time of `n` calls after one more.
fn median(n: usize, mut call: impl FnMut() -> Result<()>) -> Result<Duration> {
    call()?;
    let mut times = vec![];
    for _ in 0..n {
        let start = Instant::now();
        call()?;
        times.push(start.elapsed());
    }
    times.sort_unstable();
    Ok(times.get(n / 2).copied().unwrap_or_default())
}

fn time(t: Duration) -> String {
    let us = t.as_secs_f64() * 1e6;
    let (x, unit) = if us < 1e3 { (us, "us") } else { (us / 1e3, "ms") };
    // Three digits.
    format!("{x:.*} {unit}", if x < 10.0 { 2 } else { usize::from(x < 100.0) })
}

fn size(bytes: u64) -> String {
    format!("{:.1} MB", bytes as f64 / 1e6)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn demo_passes_and_plain_output_is_ascii_of_100_columns() {
        let (options, mut out) = (Options { quick: true, seed: 3 }, vec![]);
        assert!(run(&options, Style::Plain, &mut out).unwrap());
        let text = String::from_utf8(out).unwrap();
        for line in text.lines() {
            assert!(line.len() <= 100, "{line}");
            assert!(line.bytes().all(|b| (b' '..=b'~').contains(&b)), "{line}");
        }
        assert!(text.contains("all checks passed"), "{text}");
    }

    #[test]
    fn a_wrong_row_is_not_the_same() {
        let outputs = |x: f32| Outputs {
            out: Tensor::from_f32(DTYPE, &[[1.0; HEAD_DIM], [x; HEAD_DIM]].concat(), &[2, 1, HEAD_DIM]).unwrap(),
            lse: Tensor::zeros(DType::F32, &[2, 1]).unwrap(),
            plan_time: Duration::ZERO,
        };
        assert!(same(&outputs(2.0), &outputs(2.0)).unwrap().unwrap().contains("0 of 256"));
        assert!(same(&outputs(2.0), &outputs(2.0 + 1.0 / 64.0)).unwrap().is_ok());
        assert!(same(&outputs(2.0), &outputs(2.0625)).unwrap().unwrap_err().contains("row 1"));
        assert!(same(&outputs(f32::NAN), &outputs(2.0)).unwrap().is_err());
    }

    #[test]
    fn visible_pairs_are_counted() {
        let slow = |q: u64, kv: u64| (0..q).map(|i| kv - q + i + 1).sum::<u64>();
        for (q, kv) in [(1, 1), (1, 77), (5, 5), (16, 300)] {
            assert_eq!(visible(q, kv), slow(q, kv));
        }
    }
}
