//! Block-sparse attention: block masks turned into page tables. There is no kernel of its own, but for small row blocks on a GPU,
//! which share what they read.
//!
//! A row block of the query attends to column blocks of the keys, so a row block is a request and a column block is
//! a page. Column blocks of one row gather rows one by one (vector-sparse). Positions count the gathered tokens in
//! the order they are listed: `kv_pos` of a variant is the place in the list, not the column.

use super::batch::{BatchArgs, BatchPlan, Problem};
#[cfg(feature = "cuda")]
use crate::cuda::attention::sparse as gpu_kernel;
use crate::error::{Error, Result};
use crate::exec::Exec;
use crate::kv::{Kv, KvLayout, PageTable, PagedKv, Ragged};
use crate::plan::{Schedule, Scratch, Split};
use crate::tensor::{Bool, Dims, TensorMut, TensorRef};
use crate::variant::Params;

/// Which column blocks each row block sees, in CSR form (BSR).
#[derive(Clone, Copy, Debug)]
pub struct BlockMask<'a> {
    /// `[row_blocks + 1]`, from 0, not decreasing.
    pub indptr: &'a [i32],
    /// Column blocks of each row block.
    pub indices: &'a [i32],
    /// Query tokens; the last row block may be short.
    pub rows: usize,
    /// KV tokens.
    pub cols: usize,
    /// Query tokens per row block.
    pub block_rows: usize,
    /// KV tokens per column block; 1 gathers rows one by one.
    pub block_cols: usize,
}

/// Attention under a block mask, scheduled.
#[must_use = "a plan does nothing until `run`"]
#[derive(Debug)]
pub struct SparsePlan {
    plan: BatchPlan,
    table: PageTable<'static>,
    cols: usize,
    /// On a GPU, where small row blocks share their columns.
    #[cfg(feature = "cuda")]
    shared: Option<gpu_kernel::Plan>,
}

/// One layer's tensors for [`SparsePlan::run`] and [`VariableSparsePlan::run`].
#[derive(Debug)]
pub struct SparseArgs<'a> {
    /// `[rows, qo_heads, head_dim_qk]`; `[qo_heads, rows, head_dim_qk]` for [`VariableSparsePlan`]
    pub q: TensorRef<'a>,
    /// `[cols, kv_heads, head_dim_qk]`; `[kv_heads, cols, head_dim_qk]` for [`VariableSparsePlan`]
    pub k: TensorRef<'a>,
    /// As `k`, with `head_dim_vo`.
    pub v: TensorRef<'a>,
    /// Values of the variant's parameters.
    pub params: &'a Params<'a>,
    /// Factor of the scores; `1 / sqrt(head_dim_qk)` when `None`.
    pub sm_scale: Option<f32>,
    /// Made by the plan's `scratch`; one per call in flight.
    pub scratch: &'a mut Scratch,
    /// As `q`, with `head_dim_vo`.
    pub out: TensorMut<'a>,
    /// `[rows, qo_heads]`, or `[qo_heads, rows]` for [`VariableSparsePlan`], f32; written when given.
    pub lse: Option<TensorMut<'a>>,
}

impl SparsePlan {
    /// Cuts the row blocks over the workers of `exec`.
    pub fn new(exec: &Exec, problem: Problem, mask: BlockMask<'_>, split: Split) -> Result<Self> {
        const OP: &str = "SparsePlan";
        let BlockMask { indptr, indices, rows, cols, block_rows, block_cols } = mask;
        if block_rows == 0 || block_cols == 0 {
            return Err(Error::value(OP, "block_rows, block_cols", format!("{block_rows}, {block_cols}"), "1 or more"));
        }
        let row_blocks = indptr.len().saturating_sub(1);
        if rows.div_ceil(block_rows) != row_blocks {
            let want = rows.div_ceil(block_rows);
            return Err(Error::Dim {
                op: OP,
                arg: "indptr",
                axis: "row_blocks",
                got: row_blocks,
                first: "rows / block_rows",
                want,
            });
        }
        if rows > i32::MAX as usize {
            return Err(Error::value(OP, "rows", rows, "at most 2^31 - 1"));
        }
        let lens: Vec<u32> = (0..row_blocks).map(|i| block_rows.min(rows - i * block_rows) as u32).collect();
        let full = vec![i32::try_from(block_cols).unwrap_or(i32::MAX); row_blocks];
        let table = PageTable::new(block_cols, cols / block_cols, indptr.to_vec(), indices.to_vec(), &full)?;
        let plan = BatchPlan::new(exec, problem, &Ragged::from_lens(&lens)?, table.lens(), split)?;
        #[cfg(feature = "cuda")]
        let shared = match exec {
            // In a shared list a row's order depends on its neighbours.
            Exec::Cuda(gpu) if split == Split::Balanced => {
                let p = plan.problem();
                let mask = gpu_kernel::Mask { indptr, indices, rows, block_rows, block_cols };
                gpu_kernel::Plan::new(gpu, &p.spec(OP, false, 0), p.kv_heads, mask)?
            }
            _ => None,
        };
        Ok(Self {
            plan,
            table: placed(exec, table)?,
            cols,
            #[cfg(feature = "cuda")]
            shared,
        })
    }

    /// Which worker does what.
    pub fn schedule(&self) -> &Schedule {
        self.plan.schedule()
    }

    /// Scratch of exactly the size that [`Self::run`] needs.
    pub fn scratch(&self) -> Scratch {
        self.plan.scratch()
    }

    /// Runs one layer.
    pub fn run(&self, exec: &Exec, args: SparseArgs<'_>) -> Result<()> {
        const OP: &str = "SparsePlan::run";
        #[cfg_attr(not(feature = "cuda"), expect(unused_mut))]
        let SparseArgs { q, k, v, params, sm_scale, scratch, mut out, mut lse } = args;
        Dims::of(OP).axis("mask", "cols", self.cols)?.bind("k", &k, &["cols", "kv_heads", "head_dim_qk"])?.bind(
            "v",
            &v,
            &["cols", "kv_heads", "head_dim_vo"],
        )?;
        let kv = PagedKv::new(blocks(k, &self.table)?, blocks(v, &self.table)?, KvLayout::Nhd)?;
        let kv = Kv::Paged(kv, &self.table);
        #[cfg(feature = "cuda")]
        if let (Some(shared), Exec::Cuda(gpu)) = (&self.shared, exec) {
            let scale = self.plan.check_run(OP, &q, &kv, sm_scale, &out, lse.as_ref())?;
            self.plan.bind(gpu.place(), params)?;
            let (out, lse) = (out.reborrow(), lse.as_mut().map(TensorMut::reborrow));
            if shared.run(gpu, OP, q, [k, v], scale, out, lse)? {
                return Ok(());
            }
        }
        self.plan.run(exec, BatchArgs { q, kv, params, sm_scale, scratch, out, lse })
    }
}

/// The table where the executor's kernels read it.
fn placed(exec: &Exec, table: PageTable<'static>) -> Result<PageTable<'static>> {
    match exec {
        #[cfg(feature = "cuda")]
        Exec::Cuda(gpu) if gpu.stream().is_some() => table.into_device(gpu),
        _ => Ok(table),
    }
}

/// `[cols, …]` as `[pages, page_size, …]`, without the columns that fill no page.
fn blocks<'a>(t: TensorRef<'a>, table: &PageTable<'_>) -> Result<TensorRef<'a>> {
    t.slice(0, 0..table.num_pages() * table.page_size())?.split_axis(table.page_size())
}

/// Attention under a mask of blocks whose sizes vary, per KV head, scheduled.
#[must_use = "a plan does nothing until `run`"]
#[derive(Debug)]
pub struct VariableSparsePlan {
    /// One per KV head: their masks differ.
    heads: Vec<(BatchPlan, PageTable<'static>)>,
    problem: Problem,
    rows: usize,
    cols: usize,
}

impl VariableSparsePlan {
    /// * `mask`: `[kv_heads, row_blocks, col_blocks]`, bool
    /// * `row_sizes`: `[kv_heads, row_blocks]`, i32, the same sum for every head
    /// * `col_sizes`: `[kv_heads, col_blocks]`, i32, the same sum for every head
    pub fn new(
        exec: &Exec,
        problem: Problem,
        mask: TensorRef<'_>,
        row_sizes: TensorRef<'_>,
        col_sizes: TensorRef<'_>,
        split: Split,
    ) -> Result<Self> {
        const OP: &str = "VariableSparsePlan";
        let mut dims = Dims::of(OP);
        dims.axis("problem", "kv_heads", problem.kv_heads)?
            .bind("mask", &mask, &["kv_heads", "row_blocks", "col_blocks"])?
            .bind("row_sizes", &row_sizes, &["kv_heads", "row_blocks"])?
            .bind("col_sizes", &col_sizes, &["kv_heads", "col_blocks"])?;
        let (row_blocks, col_blocks) = (dims.get("row_blocks"), dims.get("col_blocks"));
        problem.check(OP)?;
        let per_head = Problem { qo_heads: problem.group(), kv_heads: 1, ..problem.clone() };
        mask.layout().check_listed(OP, "mask")?;
        let mask = mask.typed::<Bool>(OP, "mask")?;
        let visible: Vec<bool> = mask.layout().offsets().map(|i| mask.data()[i].get()).collect();
        let (row_sizes, rows) = sizes(OP, "row_sizes", row_sizes)?;
        let (col_sizes, cols) = sizes(OP, "col_sizes", col_sizes)?;
        let mut heads = Vec::with_capacity(problem.kv_heads);
        for h in 0..problem.kv_heads {
            let mut starts = vec![0u32; col_blocks + 1];
            for (b, &n) in col_sizes[h * col_blocks..][..col_blocks].iter().enumerate() {
                starts[b + 1] = starts[b] + n;
            }
            let (mut indptr, mut indices) = (vec![0i32], Vec::new());
            for r in 0..row_blocks {
                for b in (0..col_blocks).filter(|b| visible[(h * row_blocks + r) * col_blocks + b]) {
                    // Listed one by one, before the memory of the columns is seen.
                    if indices.len() + (starts[b + 1] - starts[b]) as usize > 1 << 28 {
                        let got = format!("over 2^28 columns of row blocks up to {r} at head {h}");
                        return Err(Error::value(OP, "mask", got, "at most 2^28"));
                    }
                    indices.extend(starts[b] as i32..starts[b + 1] as i32);
                }
                indptr.push(indices.len() as i32);
            }
            let table = PageTable::new(1, cols, indptr, indices, &vec![1; row_blocks])?;
            let qo = Ragged::from_lens(&row_sizes[h * row_blocks..][..row_blocks])?;
            heads.push((BatchPlan::new(exec, per_head.clone(), &qo, table.lens(), split)?, placed(exec, table)?));
        }
        Ok(Self { heads, problem, rows, cols })
    }

    /// Schedules of the KV heads.
    pub fn schedules(&self) -> impl Iterator<Item = &Schedule> {
        self.heads.iter().map(|(plan, _)| plan.schedule())
    }

    /// Scratch that fits every head: they run one after another.
    pub fn scratch(&self) -> Scratch {
        #[cfg(feature = "cuda")]
        if let Some(first) = self.heads.first().and_then(|(plan, _)| plan.on_gpu()) {
            let sizes = self.heads.iter().filter_map(|(plan, _)| plan.on_gpu()).map(|plan| plan.sizes());
            return first.scratch(sizes.reduce(|a, b| a.max(b)).unwrap_or_default());
        }
        self.heads.iter().map(|(plan, _)| plan.scratch()).max_by_key(Scratch::bytes).unwrap_or_default()
    }

    /// Runs one layer.
    pub fn run(&self, exec: &Exec, args: SparseArgs<'_>) -> Result<()> {
        const OP: &str = "VariableSparsePlan::run";
        let SparseArgs { q, k, v, params, sm_scale, scratch, mut out, mut lse } = args;
        let mut dims = Dims::of(OP);
        dims.axis("problem", "qo_heads", self.problem.qo_heads)?
            .axis("problem", "kv_heads", self.problem.kv_heads)?
            .axis("row_sizes", "rows", self.rows)?
            .axis("col_sizes", "cols", self.cols)?
            .bind("q", &q, &["qo_heads", "rows", "head_dim_qk"])?
            .bind("k", &k, &["kv_heads", "cols", "head_dim_qk"])?
            .bind("v", &v, &["kv_heads", "cols", "head_dim_vo"])?
            .bind("out", &out, &["qo_heads", "rows", "head_dim_vo"])?;
        if let Some(lse) = &lse {
            dims.bind("lse", lse, &["qo_heads", "rows"])?;
        }
        let group = self.problem.group();
        for (h, (plan, table)) in self.heads.iter().enumerate() {
            let qo = h * group..(h + 1) * group;
            let kv = PagedKv::new(head_rows(k, h)?, head_rows(v, h)?, KvLayout::Nhd)?;
            let lse = match &mut lse {
                Some(lse) => Some(lse.reborrow().slice(0, qo.clone())?.transpose(0, 1)?),
                None => None,
            };
            let out = out.reborrow().slice(0, qo.clone())?.transpose(0, 1)?;
            let q = q.slice(0, qo)?.transpose(0, 1)?;
            let kv = Kv::Paged(kv, table);
            plan.run(exec, BatchArgs { q, kv, params, sm_scale, scratch, out, lse })?;
        }
        Ok(())
    }
}

/// Head `h` of `[kv_heads, cols, dim]` as pages of one row: `[cols, 1, 1, dim]`.
fn head_rows(t: TensorRef<'_>, h: usize) -> Result<TensorRef<'_>> {
    t.slice(0, h..h + 1)?.transpose(0, 1)?.split_axis(1)
}

/// Block sizes, head after head, and their sum, which must be the same for every head.
fn sizes(op: &'static str, arg: &'static str, t: TensorRef<'_>) -> Result<(Vec<u32>, usize)> {
    t.layout().check_listed(op, arg)?;
    let view = t.typed::<i32>(op, arg)?;
    let all: Vec<i32> = view.layout().offsets().map(|i| view.data()[i]).collect();
    if let Some(i) = all.iter().position(|&n| n < 0) {
        return Err(Error::value(op, arg, format!("{} at block {i}", all[i]), "0 or more"));
    }
    let mut sums = all.chunks(t.shape()[1].max(1)).map(|h| h.iter().map(|&n| n as u64).sum::<u64>());
    let first = sums.next().unwrap_or(0);
    if let Some(other) = sums.find(|&s| s != first) {
        return Err(Error::value(op, arg, format!("{other} in all for one head"), format!("{first} as for the first")));
    }
    if first > i32::MAX as u64 {
        return Err(Error::value(op, arg, format!("{first} in all"), "at most 2^31 - 1"));
    }
    Ok((all.into_iter().map(|n| n as u32).collect(), first as usize))
}
