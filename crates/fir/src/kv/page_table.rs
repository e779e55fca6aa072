//! [`PageTable`]: which pages hold which request, in CSR form.

use std::borrow::Cow;

#[cfg(feature = "cuda")]
use std::sync::Arc;

use super::ragged::Ragged;
use crate::error::{Error, Result};
#[cfg(feature = "cuda")]
use crate::tensor::{Tensor, TensorRef};

/// Pages of a batch of requests: request `r` holds `lens[r]` tokens in pages
/// `indices[indptr[r]..indptr[r + 1]]`, in order.
///
/// Made only by [`PageTable::new`] and [`PageTable::with_lens`], which check every page id in a used slot against
/// the pool's size. Slots past a request's last token may hold anything: nobody reads them.
///
/// For a GPU it is copied there once per step by `to_device`; ids that a device made itself are taken by `on_device`.
#[derive(Clone, Debug)]
pub struct PageTable<'a> {
    indptr: Cow<'a, [i32]>,
    /// Empty when they are on a device alone.
    indices: Cow<'a, [i32]>,
    #[cfg(feature = "cuda")]
    device: Option<OnDevice<'a>>,
    lens: Vec<u32>,
    page_size: usize,
    num_pages: usize,
}

/// A table on a device: offsets and page ids, i32.
#[cfg(feature = "cuda")]
#[derive(Clone, Debug)]
pub(crate) struct OnDevice<'a> {
    pub(crate) indptr: Ints<'a>,
    pub(crate) indices: Ints<'a>,
}

/// Offsets or page ids on a device.
#[cfg(feature = "cuda")]
#[derive(Clone, Debug)]
pub(crate) enum Ints<'a> {
    /// So many of a list, from a place on.
    Owned(Arc<Tensor>, usize, usize),
    Borrowed(TensorRef<'a>),
}

#[cfg(feature = "cuda")]
impl Ints<'_> {
    pub(crate) fn view(&self) -> TensorRef<'_> {
        match self {
            Self::Owned(ints, at, len) => ints.view().slice(0, *at..at + len).expect("a part of the list"),
            Self::Borrowed(ints) => *ints,
        }
    }
}

/// Tables are equal when they name the same pages, wherever they are; ids on a device alone are not looked at.
impl PartialEq for PageTable<'_> {
    fn eq(&self, other: &Self) -> bool {
        let key = |t: &Self| (t.page_size, t.num_pages);
        (key(self), &self.indptr, &self.lens, &self.indices) == (key(other), &other.indptr, &other.lens, &other.indices)
    }
}

impl Eq for PageTable<'_> {}

const OP: &str = "PageTable";

impl<'a> PageTable<'a> {
    /// As the number of a pool's pages: the fewest that the table needs, for a pool that is not known yet.
    pub const FEWEST: usize = usize::MAX;

    /// From the number of tokens in each request's last page, which is `1..=page_size` (0 is taken as an empty page).
    ///
    /// * `indptr`: `[batch + 1]`, from 0, not decreasing
    /// * `indices`: at least `indptr[batch]` page ids
    /// * `last_page_len`: `[batch]`; ignored for a request without pages
    pub fn new(
        page_size: usize,
        num_pages: usize,
        indptr: impl Into<Cow<'a, [i32]>>,
        indices: impl Into<Cow<'a, [i32]>>,
        last_page_len: &[i32],
    ) -> Result<Self> {
        let (indptr, indices) = (indptr.into(), indices.into());
        check_indptr(&indptr, indices.len(), page_size)?;
        check_batch("last_page_len", last_page_len.len(), &indptr)?;
        let mut lens = Vec::with_capacity(last_page_len.len());
        for (r, (pages, &last)) in indptr.windows(2).zip(last_page_len).enumerate() {
            let n = (pages[1] - pages[0]) as usize;
            let len = if n == 0 {
                Some(0)
            } else if last < 0 || last as usize > page_size {
                return Err(Error::value(
                    OP,
                    "last_page_len",
                    format!("{last} at request {r}"),
                    format!("0 to page_size={page_size}"),
                ));
            } else {
                (n - 1).checked_mul(page_size).and_then(|t| t.checked_add(last as usize))
            };
            lens.push(checked_len(len, r)?);
        }
        Self::checked(page_size, num_pages, indptr, indices, lens)
    }

    /// From each request's number of tokens, at most what its pages hold.
    pub fn with_lens(
        page_size: usize,
        num_pages: usize,
        indptr: impl Into<Cow<'a, [i32]>>,
        indices: impl Into<Cow<'a, [i32]>>,
        lens: &[i32],
    ) -> Result<Self> {
        let (indptr, indices) = (indptr.into(), indices.into());
        check_indptr(&indptr, indices.len(), page_size)?;
        let lens = checked_lens(page_size, &indptr, lens)?;
        Self::checked(page_size, num_pages, indptr, indices, lens)
    }

    /// The table of a cascade's requests with all their pages: those of the groups that they are in, level by level, then their own.
    ///
    /// `levels`: query tokens of each group, and the groups' pages; the last level's groups are the requests. All but the last
    /// must hold whole pages, and all page ids must be on the host.
    pub fn joined(levels: &[(&Ragged, &PageTable<'_>)]) -> Result<PageTable<'static>> {
        let Some(&(requests, own)) = levels.last() else {
            return Err(Error::value(OP, "levels", "empty", "at least one level"));
        };
        let (page_size, mut indptr, mut indices, mut lens) = (own.page_size, vec![0], vec![], vec![]);
        for (l, &(qo, table)) in levels.iter().enumerate() {
            table.check_host(OP)?;
            if (table.page_size, table.batch(), qo.rows()) != (page_size, qo.batch(), requests.rows()) {
                return Err(Error::value(
                    OP,
                    "levels",
                    format!(
                        "{} groups and pages of {} at level {l}, with {} query tokens in {} groups",
                        table.batch(),
                        table.page_size,
                        qo.rows(),
                        qo.batch()
                    ),
                    format!(
                        "as many groups in either, pages of {page_size} and {} query tokens, as at the last level",
                        requests.rows()
                    ),
                ));
            }
            let cut = table.lens.iter().position(|&n| !(n as usize).is_multiple_of(page_size));
            if let (Some(g), true) = (cut, l + 1 < levels.len()) {
                return Err(Error::value(
                    OP,
                    "levels",
                    format!("{} tokens in group {g} of level {l}", table.lens[g]),
                    format!("whole pages of {page_size} above the last level"),
                ));
            }
        }
        let mut groups = vec![0; levels.len()];
        for (r, rows) in requests.indptr().windows(2).enumerate() {
            let mut len = 0;
            for (l, &(qo, table)) in levels.iter().enumerate() {
                let group = &mut groups[l];
                if l + 1 == levels.len() {
                    *group = r;
                } else if rows[0] == rows[1] {
                    // In no group.
                    continue;
                }
                while qo.indptr()[*group + 1] < rows[1] {
                    *group += 1;
                }
                if qo.indptr()[*group] > rows[0] {
                    return Err(Error::value(
                        OP,
                        "levels",
                        format!("group {group} of level {l} from token {} on", qo.indptr()[*group]),
                        format!("borders of requests, of which {r} begins at token {}", rows[0]),
                    ));
                }
                indices.extend_from_slice(table.pages(*group));
                len += i64::from(table.lens[*group]);
            }
            indptr.push(i32::try_from(indices.len()).unwrap_or(i32::MAX));
            lens.push(i32::try_from(len).unwrap_or(i32::MAX));
        }
        let num_pages = levels.iter().map(|(_, t)| t.num_pages).max().unwrap_or(0);
        PageTable::with_lens(page_size, num_pages, indptr, indices, &lens)
    }

    /// With page ids that are on a device already, together with a copy of `indptr`. Nobody looks at the ids before the
    /// kernels do, which take those past the pool for its last page.
    #[cfg(feature = "cuda")]
    pub(crate) fn with_device_ids(
        page_size: usize,
        num_pages: usize,
        indptr: Vec<i32>,
        device: OnDevice<'a>,
        slots: usize,
        lens: &[i32],
    ) -> Result<Self> {
        check_indptr(&indptr, slots, page_size)?;
        let lens = checked_lens(page_size, &indptr, lens)?;
        if num_pages == 0 && lens.iter().any(|&n| n > 0) {
            return Err(Error::value(OP, "num_pages", 0, "more, as requests hold tokens"));
        }
        Ok(Self {
            indptr: indptr.into(),
            indices: Cow::Borrowed(&[]),
            device: Some(device),
            lens,
            page_size,
            num_pages,
        })
    }

    /// The same table with its copy on a device.
    #[cfg(feature = "cuda")]
    pub(crate) fn with_device(self, device: OnDevice<'a>) -> Self {
        Self { device: Some(device), ..self }
    }

    /// The memory of its copy on a device, if nobody else has that copy.
    #[cfg(feature = "cuda")]
    pub(crate) fn into_device_memory(self) -> Option<Tensor> {
        match self.device?.indices {
            Ints::Owned(all, ..) => Arc::into_inner(all),
            Ints::Borrowed(_) => None,
        }
    }

    /// Its copy on a device.
    #[cfg(feature = "cuda")]
    pub(crate) fn device(&self) -> Option<&OnDevice<'a>> {
        self.device.as_ref()
    }

    /// All slots; none when the page ids are on a device alone.
    pub(crate) fn indices(&self) -> &[i32] {
        &self.indices
    }

    /// Refuses a table whose page ids only a device knows.
    pub(crate) fn check_host(&self, op: &'static str) -> Result<()> {
        let held = self.lens.iter().any(|&n| n > 0);
        if held && self.indices.is_empty() {
            return Err(Error::place(op, "page table", "a device's memory alone", "host memory"));
        }
        Ok(())
    }
}

fn checked_lens(page_size: usize, indptr: &[i32], lens: &[i32]) -> Result<Vec<u32>> {
    check_batch("lens", lens.len(), indptr)?;
    let mut checked = Vec::with_capacity(lens.len());
    for (r, (pages, &len)) in indptr.windows(2).zip(lens).enumerate() {
        let held = ((pages[1] - pages[0]) as usize).saturating_mul(page_size);
        if len < 0 || len as usize > held {
            return Err(Error::value(
                OP,
                "lens",
                format!("{len} at request {r}"),
                format!("0 to {held}, what its {} pages of {page_size} hold", pages[1] - pages[0]),
            ));
        }
        checked.push(len as u32);
    }
    Ok(checked)
}

impl<'a> PageTable<'a> {
    fn checked(
        page_size: usize,
        num_pages: usize,
        indptr: Cow<'a, [i32]>,
        indices: Cow<'a, [i32]>,
        lens: Vec<u32>,
    ) -> Result<Self> {
        let used = |r: usize| indptr[r] as usize..indptr[r] as usize + lens[r].div_ceil(page_size as u32) as usize;
        let (requests, slots) = (0..lens.len(), indptr[lens.len()] as usize);
        let fewest = if requests.clone().map(|r| used(r).len()).sum::<usize>() == slots {
            pool_for(&indices[..slots])
        } else {
            requests.clone().map(|r| pool_for(&indices[used(r)])).max().unwrap_or(0)
        };
        // Which one is wrong is looked for only now: a batch of 32768 ids took 16 µs one by one.
        if fewest > num_pages.min(1 << 31) {
            let wrong = |slot: &usize| indices[*slot] < 0 || indices[*slot] as usize >= num_pages;
            let at = requests.clone().find_map(|r| used(r).find(wrong).map(|slot| (slot, r)));
            let (slot, r) = at.expect("the largest id is one of them");
            let want = match num_pages {
                Self::FEWEST => "a page id, which is not negative".to_owned(),
                n => format!("a page id from 0 to {}, as the pool has {n} pages", n as i64 - 1),
            };
            let page = slot - used(r).start;
            let got = format!("{} at slot {slot} (page {page} of request {r})", indices[slot]);
            return Err(Error::value(OP, "indices", got, want));
        }
        let num_pages = if num_pages == Self::FEWEST { fewest } else { num_pages };
        Ok(Self {
            indptr,
            indices,
            #[cfg(feature = "cuda")]
            device: None,
            lens,
            page_size,
            num_pages,
        })
    }

    /// Number of requests.
    pub fn batch(&self) -> usize {
        self.lens.len()
    }

    /// Tokens per page.
    pub fn page_size(&self) -> usize {
        self.page_size
    }

    /// Pages of the pool that the ids were checked against.
    pub fn num_pages(&self) -> usize {
        self.num_pages
    }

    /// Tokens of each request.
    pub fn lens(&self) -> &[u32] {
        &self.lens
    }

    /// Offsets of the requests' slots.
    pub fn indptr(&self) -> &[i32] {
        &self.indptr
    }

    /// Page ids of request `r` that hold tokens; none for a request that is not in the batch, or if a device alone knows
    /// them.
    pub fn pages(&self, r: usize) -> &[i32] {
        if r >= self.batch() || self.indices.is_empty() {
            return &[];
        }
        &self.indices[self.indptr[r] as usize..][..(self.lens[r] as usize).div_ceil(self.page_size)]
    }

    /// Page and slot of token `pos` of request `r`; `None` past its end, or if a device alone knows it.
    pub fn locate(&self, r: usize, pos: usize) -> Option<(usize, usize)> {
        if pos >= *self.lens.get(r)? as usize {
            return None;
        }
        Some((*self.indices.get(self.indptr[r] as usize + pos / self.page_size)? as usize, pos % self.page_size))
    }
}

/// Pages of the smallest pool that has these; over 2^31 if an id is negative, which without its sign is a large one.
fn pool_for(ids: &[i32]) -> usize {
    ids.iter().map(|&id| id as u32).reduce(u32::max).map_or(0, |most| most as usize + 1)
}

fn check_batch(arg: &'static str, got: usize, indptr: &[i32]) -> Result<()> {
    if got + 1 != indptr.len() {
        return Err(Error::Dim { op: OP, arg, axis: "batch", got, first: "indptr", want: indptr.len() - 1 });
    }
    Ok(())
}

fn checked_len(len: Option<usize>, r: usize) -> Result<u32> {
    len.filter(|&l| l <= i32::MAX as usize)
        .map(|l| l as u32)
        .ok_or_else(|| Error::value(OP, "indptr", format!("over 2^31 tokens at request {r}"), "at most 2^31 - 1"))
}

fn check_indptr(indptr: &[i32], indices: usize, page_size: usize) -> Result<()> {
    if page_size == 0 || page_size > i32::MAX as usize {
        return Err(Error::value(OP, "page_size", page_size, "1 to 2^31 - 1"));
    }
    super::ragged::check_indptr(OP, "indptr", indptr)?;
    let last = indptr[indptr.len() - 1] as usize;
    if last > indices {
        return Err(Error::value(OP, "indptr", format!("{last} at its end"), format!("at most the {indices} indices")));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn used_slots_are_checked_and_unused_ones_are_not() {
        let t = PageTable::new(4, 3, &[0, 2, 2, 3][..], &[2, 0, 1, i32::MIN, 77][..], &[3, 9, 4]).unwrap();
        assert_eq!(t.lens(), [7, 0, 4]);
        assert_eq!(t.pages(0), [2, 0]);
        assert_eq!((t.pages(3), t.pages(usize::MAX)), (&[][..], &[][..]));
        assert_eq!(t.locate(0, 6), Some((0, 2)));
        assert_eq!((t.locate(0, 7), t.locate(1, 0), t.locate(9, 0)), (None, None, None));
        let hostile = PageTable::with_lens(4, 3, &[0, 3][..], &[1, -5, 99][..], &[4]).unwrap();
        assert_eq!(hostile.pages(0), [1]);
        let fewest =
            |ids: &'static [i32], lens: &[i32]| PageTable::with_lens(4, PageTable::FEWEST, &[0, 3][..], ids, lens);
        assert_eq!(fewest(&[1, 6, 99], &[8]).map(|t| t.num_pages()), Ok(7));
        assert_eq!(fewest(&[1, 6, 99], &[0]).map(|t| t.num_pages()), Ok(0));
        assert_eq!(fewest(&[i32::MAX, 6, 99], &[9]).map(|t| t.num_pages()), Ok(1 << 31));
        let negative = fewest(&[1, -6, 99], &[8]).unwrap_err().to_string();
        assert!(
            negative.contains("-6 at slot 1 (page 1 of request 0), expected a page id, which is not"),
            "{negative}"
        );
    }

    #[test]
    fn levels_are_joined() {
        let ragged = |lens: &[u32]| Ragged::from_lens(lens).unwrap();
        let table = |lens: &[i32], ids: &'static [i32]| {
            let ends = lens.iter().scan(0, |end, &n| {
                *end += (n + 3) / 4;
                Some(*end)
            });
            PageTable::with_lens(4, 9, [0].into_iter().chain(ends).collect::<Vec<_>>(), ids, lens).unwrap()
        };
        // A prefix of two pages for the first two requests and one of none for the last, which has no token in the middle.
        let (two, one) = (ragged(&[3, 2]), ragged(&[1, 2, 0, 2]));
        let (shared, own) = (table(&[8, 0], &[5, 6]), table(&[3, 0, 4, 5], &[1, 2, 3, 4]));
        let joined = PageTable::joined(&[(&two, &shared), (&one, &own)]).unwrap();
        assert_eq!((joined.lens(), joined.num_pages()), (&[11, 8, 4, 5][..], 9));
        let pages: Vec<_> = (0..4).map(|r| joined.pages(r).to_vec()).collect();
        assert_eq!(pages, [vec![5, 6, 1], vec![5, 6], vec![2], vec![3, 4]]);
        let msg = |levels: &[(&Ragged, &PageTable<'_>)]| PageTable::joined(levels).unwrap_err().to_string();
        assert!(msg(&[(&two, &table(&[7, 0], &[5, 6])), (&one, &own)]).contains("7 tokens in group 0 of level 0"));
        assert!(msg(&[(&ragged(&[2, 3]), &shared), (&one, &own)]).contains("group 1 of level 0 from token 2 on"));
        assert!(msg(&[(&ragged(&[3, 3]), &shared), (&one, &own)]).contains("6 query tokens"));
        assert!(msg(&[]).contains("at least one level"));
    }

    #[test]
    fn bad_tables_say_what_and_where() {
        let msg = |t: Result<PageTable<'_>>| t.unwrap_err().to_string();
        let new = |p, n, ptr: &'static [i32], ids: &'static [i32], last: &[i32]| PageTable::new(p, n, ptr, ids, last);
        assert_eq!(
            msg(new(4, 3, &[0, 2], &[0, 3], &[1])),
            "PageTable: `indices` is 3 at slot 1 (page 1 of request 0), expected a page id from 0 to 2, as the pool has 3 pages"
        );
        assert!(msg(new(4, 3, &[0, 2, 1], &[0, 0], &[1, 1])).contains("decreas"));
        assert!(msg(new(4, 3, &[1, 2], &[0, 0], &[1])).contains("indptr"));
        assert!(msg(new(4, 3, &[], &[], &[])).contains("indptr"));
        assert!(msg(new(0, 3, &[0, 1], &[0], &[1])).contains("page_size"));
        assert!(msg(new(4, 3, &[0, 1], &[0], &[5])).contains("last_page_len"));
        assert!(msg(new(4, 3, &[0, 1], &[0], &[-1])).contains("last_page_len"));
        assert!(msg(new(4, 3, &[0, 1], &[0], &[])).contains("batch=0"));
        assert!(msg(new(4, 3, &[0, 5], &[0], &[1])).contains("at most the 1 indices"));
        assert!(msg(PageTable::with_lens(4, 3, &[0, 1][..], &[0][..], &[5])).contains("0 to 4"));
        assert!(new(i32::MAX as usize, 3, &[0, 3], &[0, 0, 0], &[1]).is_err());
    }
}
