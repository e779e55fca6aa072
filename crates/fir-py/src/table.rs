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
#[derive(Clone, Copy)]
pub(crate) enum Lens<'a> {
    LastPage(&'a Arg),
    Tokens(&'a Arg),
}

impl<'a> Lens<'a> {
    pub(crate) fn new(lens: &'a Arg, last_page: bool) -> Self {
        if last_page { Self::LastPage(lens) } else { Self::Tokens(lens) }
    }
}

impl Table {
    pub(crate) fn get(&self) -> &PageTable<'static> {
        &self.table
    }

    /// Itself, if it may be the `spent` of another: its memory is its own, not the caller's.
    pub(crate) fn reusable(self) -> Option<Self> {
        self._held.is_empty().then_some(self)
    }

    /// `spent`: a table of the same plan that no call reads any more, whose memory is taken if it will do.
    pub(crate) fn new(
        exec: &Exec,
        page_size: usize,
        indptr: &Arg,
        indices: &Bound<'_, PyAny>,
        lens: Lens<'_>,
        offsets: Option<&Bound<'_, PyAny>>,
        spent: Option<Self>,
    ) -> PyResult<Self> {
        let (indptr, ids) = (host_i32(indptr, "indptr")?, indices.extract::<Arg>()?);
        let given = match lens {
            Lens::LastPage(lens) => host_i32(lens, "last_page_len"),
            Lens::Tokens(lens) => host_i32(lens, "kv_len"),
        }?;
        if ids.place() == Place::Host {
            if offsets.is_some() && matches!(exec, Exec::Cuda(_)) {
                let want = "a device, as the offsets are: graphs read both";
                return Err(to_py(Error::place("plan", "indices", Place::Host, want)));
            }
            let ids = host_i32(&ids, "indices")?;
            // The pool is not known before `run`, which sees that it has as many pages.
            let (pages, indptr, ids) = (PageTable::FEWEST, indptr.into_owned(), ids.into_owned());
            let table = match lens {
                Lens::LastPage(_) => PageTable::new(page_size, pages, indptr, ids, &given),
                Lens::Tokens(_) => PageTable::with_lens(page_size, pages, indptr, ids, &given),
            };
            let table = match (table, exec) {
                (Ok(table), Exec::Cuda(gpu)) => table.into_device_over(gpu, spent.map(|spent| spent.table)),
                (table, _) => table,
            };
            return Ok(Self { table: table.map_err(to_py)?, _held: vec![] });
        }
        let Exec::Cuda(gpu) = exec else {
            let (got, want) = (ids.place(), "host memory, as the tensors of the call");
            return Err(to_py(Error::place("plan", "indices", got, want)));
        };
        let lens = match lens {
            Lens::Tokens(_) => given,
            Lens::LastPage(_) => tokens_of(&indptr, &given, page_size).into(),
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

/// Tokens of each request; too many are refused by the table itself, and less than none in the last page are taken for no tokens.
fn tokens_of(indptr: &[i32], last_page: &[i32], page_size: usize) -> Vec<i32> {
    let tokens = |(w, &n): (&[i32], &i32)| match (w[1] - w[0], usize::try_from(n)) {
        (pages @ 1.., Ok(n)) => ((pages - 1) as usize * page_size + n) as i32,
        _ => 0,
    };
    indptr.windows(2).zip(last_page).map(tokens).collect()
}
