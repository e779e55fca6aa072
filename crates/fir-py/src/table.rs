//! Page tables from Python's tensors.
#![allow(unsafe_code)]

use fir::kv::PageTable;
use fir::tensor::Place;
use fir::{Error, Exec};
use pyo3::prelude::*;

use crate::error::to_py;
use crate::tensor::Arg;
use crate::values::host_i32;

/// Pages of a batch: a table of its own, or one whose page ids, and offsets if given, stay in device tensors of the caller's.
pub(crate) struct Table {
    table: PageTable<'static>,
    /// What the table borrows from; dropped after it.
    _held: Vec<Held>,
}

/// A tensor that a table borrows from.
struct Held {
    arg: Box<Arg>,
    _tensor: Py<PyAny>,
}

impl Held {
    fn new(tensor: &Bound<'_, PyAny>, arg: Arg) -> Self {
        Self { arg: Box::new(arg), _tensor: tensor.clone().unbind() }
    }

    /// # Safety
    /// The view is dropped before `self` is.
    unsafe fn view(&self) -> PyResult<fir::TensorRef<'static>> {
        let view = self.arg.view().map_err(to_py)?;
        // SAFETY: it borrows from the box, which does not move, and from the tensor, which is kept alive; both are dropped
        // after it, says the caller.
        Ok(unsafe { std::mem::transmute::<fir::TensorRef<'_>, fir::TensorRef<'static>>(view) })
    }
}

/// What a table's lengths count: tokens of the last page, or of the request.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lens {
    LastPage,
    Tokens,
}

impl Table {
    pub(crate) fn get(&self) -> &PageTable<'static> {
        &self.table
    }

    pub(crate) fn new(
        exec: &Exec,
        page_size: usize,
        indptr: &Arg,
        indices: &Bound<'_, PyAny>,
        lens: &Arg,
        what: Lens,
        offsets: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let (indptr, ids) = (host_i32(indptr, "indptr")?, indices.extract::<Arg>()?);
        let lens = host_i32(lens, if what == Lens::LastPage { "last_page_len" } else { "kv_len" })?;
        if ids.place() == Place::Host {
            if offsets.is_some() && matches!(exec, Exec::Cuda(_)) {
                let want = "a device, as the offsets are: graphs read both";
                return Err(to_py(Error::place("plan", "indices", Place::Host, want)));
            }
            let ids = host_i32(&ids, "indices")?;
            // The pool is not known before `run`, which sees that it has this many pages; unused slots may hold anything.
            let tokens = tokens_of(&indptr, &lens, page_size, what);
            let most = tokens.iter().zip(&*indptr).fold(-1, |most, (&n, &first)| {
                let used = ids.get(first as usize..).unwrap_or(&[]);
                largest(&used[..used.len().min(n.div_ceil(page_size.max(1)))], most)
            });
            let pages = usize::try_from(i64::from(most) + 1).unwrap_or(0);
            let (indptr, ids) = (indptr.into_owned(), ids.into_owned());
            let table = match what {
                Lens::LastPage => PageTable::new(page_size, pages, indptr, ids, &lens),
                Lens::Tokens => PageTable::with_lens(page_size, pages, indptr, ids, &lens),
            };
            let table = match (table, exec) {
                (Ok(table), Exec::Cuda(gpu)) => table.into_device(gpu),
                (table, _) => table,
            };
            return Ok(Self { table: table.map_err(to_py)?, _held: vec![] });
        }
        let Exec::Cuda(gpu) = exec else {
            let (got, want) = (ids.place(), "host memory, as the tensors of the call");
            return Err(to_py(Error::place("plan", "indices", got, want)));
        };
        let lens: Vec<i32> = match what {
            Lens::Tokens => lens.into_owned(),
            Lens::LastPage => tokens_of(&indptr, &lens, page_size, what).iter().map(|&n| n as i32).collect(),
        };
        // The kernels take ids past the pool for its last page, so one page is as good as any number.
        let (pages, ids) = (1, Held::new(indices, ids));
        // SAFETY: the table is dropped before what it borrows from, here and below.
        let view = unsafe { ids.view() }?;
        let Some(offsets) = offsets else {
            let table = PageTable::on_device(gpu, page_size, pages, &indptr, view, &lens).map_err(to_py)?;
            return Ok(Self { table, _held: vec![ids] });
        };
        let offsets = Held::new(offsets, offsets.extract()?);
        // SAFETY: as above.
        let there = unsafe { offsets.view() }?;
        let table = PageTable::in_buffers(gpu, page_size, pages, (&indptr, there), view, &lens).map_err(to_py)?;
        Ok(Self { table, _held: vec![ids, offsets] })
    }
}

/// The largest of `most` and the ids. For AVX2 too, as x86-64 alone has no maximum of integers: 6 of 32 µs of a plan with
/// 32768 ids.
fn largest(ids: &[i32], most: i32) -> i32 {
    #[inline(always)]
    fn of(ids: &[i32], most: i32) -> i32 {
        ids.iter().fold(most, |most, &id| most.max(id))
    }
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        #[target_feature(enable = "avx2")]
        fn wide(ids: &[i32], most: i32) -> i32 {
            of(ids, most)
        }
        // SAFETY: this CPU has AVX2.
        return unsafe { wide(ids, most) };
    }
    of(ids, most)
}

/// Tokens of each request; 0 for what is wrong, which the table itself refuses.
fn tokens_of(indptr: &[i32], lens: &[i32], page_size: usize, what: Lens) -> Vec<usize> {
    let tokens = |(w, &n): (&[i32], &i32)| match (what, w[1] - w[0], usize::try_from(n)) {
        (Lens::Tokens, _, Ok(n)) => n,
        (Lens::LastPage, 1.., Ok(n)) => (w[1] - w[0] - 1) as usize * page_size + n,
        _ => 0,
    };
    indptr.windows(2).zip(lens).map(tokens).collect()
}
