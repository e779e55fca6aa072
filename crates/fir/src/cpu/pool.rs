//! The thread pool, and the only two ways an output is written by several threads.
//!
//! * [`Pool::scatter`]: parts made beforehand (by [`RowsMut::split`], say), each moved into one thread.
//! * [`RowsOnce`]: rows of a tensor, each handed out at most once, by whoever asks first.
//!
//! A call returns when all its work is done, so work may borrow from the caller.
#![allow(unsafe_code)]

use std::cell::{Cell, UnsafeCell};
use std::marker::PhantomData;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{self, JoinHandle, Thread};

use super::arch::prefetch_at;
use super::rows::three_axes;
use crate::error::{Error, Result};
use crate::tensor::{Element, TensorMut};

/// Spins before sleeping: 52 µs on a Xeon of model 207, longer than the gap between two operators of a model's layer.
const SPINS: u32 = 4000;

thread_local! {
    /// Set while this thread runs a pool's work: a nested call then does all its work here.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// A fixed set of threads; the caller is worker 0.
///
/// A call is open while its caller works: threads that are awake join it and take pieces of its work, those that are not
/// are not waited for. So a thread that the system gave to somebody else costs its share, and nothing more.
pub(crate) struct Pool {
    shared: Arc<Shared>,
    /// One call at a time.
    call: Mutex<()>,
    threads: Vec<JoinHandle<()>>,
}

struct Shared {
    /// The work of the call in progress. Written by the caller while no thread is inside.
    job: UnsafeCell<Option<Job>>,
    /// Number of calls so far, whether the last is open, and how many threads are inside: see [`EPOCH`], [`OPEN`].
    gate: AtomicU64,
    panicked: AtomicBool,
    stop: AtomicBool,
    /// Threads that sleep, or are about to.
    asleep: AtomicUsize,
    sleep: Mutex<()>,
    wake: Condvar,
    /// The caller, while it sleeps until the last thread has left.
    waiting: Mutex<Option<Thread>>,
}

/// A call in [`Shared::gate`].
const EPOCH: u64 = 1 << 32;
/// Whether the call may be joined.
const OPEN: u64 = 1 << 31;
/// The threads inside.
const INSIDERS: u64 = OPEN - 1;

/// A borrowed closure with its lifetime erased; `Pool::run` outlives every use of it.
#[derive(Clone, Copy)]
struct Job(*const (dyn Fn(usize) + Sync + 'static));

// SAFETY: `job` is written only by the caller of `Pool::run`, which holds `call`, before it opens the gate (release) and
// after the last thread left the previous call (acquire); threads read it only after they entered an open gate (acquire),
// and leave (release) when they are done with it. The closure behind it is `Sync`.
unsafe impl Sync for Shared {}
// SAFETY: as above; nothing in it is tied to a thread.
unsafe impl Send for Shared {}

impl Pool {
    /// A pool of `workers` threads, the caller included.
    pub(crate) fn new(workers: usize) -> Self {
        let shared = Arc::new(Shared {
            job: UnsafeCell::new(None),
            gate: AtomicU64::new(0),
            panicked: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            asleep: AtomicUsize::new(0),
            sleep: Mutex::new(()),
            wake: Condvar::new(),
            waiting: Mutex::new(None),
        });
        let threads = (1..workers)
            .map_while(|worker| {
                let shared = Arc::clone(&shared);
                // A machine that refuses a thread gets a smaller pool.
                thread::Builder::new().name(format!("fir-{worker}")).spawn(move || shared.serve(worker)).ok()
            })
            .collect();
        Self { shared, call: Mutex::new(()), threads }
    }

    /// Number of workers, the caller included.
    pub(crate) fn workers(&self) -> usize {
        self.threads.len() + 1
    }

    /// Whether it has threads for a call from here, all of which look out for it, as they do for some microseconds after one.
    pub(crate) fn is_awake(&self) -> bool {
        !self.threads.is_empty() && !INSIDE.get() && self.shared.asleep.load(Ordering::Relaxed) == 0
    }

    /// Calls `work(0)` here, and `work(w)` on every thread `w` that joins meanwhile; returns when all have returned.
    ///
    /// `work` must take pieces of what is to do until none is left: nobody but the caller is sure to come. A panic of one
    /// is passed on.
    pub(crate) fn run(&self, work: &(dyn Fn(usize) + Sync)) {
        if self.threads.is_empty() || INSIDE.get() {
            return work(0);
        }
        let _one = self.call.lock().unwrap_or_else(PoisonError::into_inner);
        let s = &*self.shared;
        // SAFETY: only the lifetime changes. `work` is used by threads inside the gate, and this function waits until
        // there are none before it returns, panic or not.
        let job = Job(unsafe {
            std::mem::transmute::<*const (dyn Fn(usize) + Sync + '_), *const (dyn Fn(usize) + Sync + 'static)>(work)
        });
        // SAFETY: this thread holds `call`, the gate is shut and nobody is inside, so nobody else touches `job`.
        unsafe { *s.job.get() = Some(job) };
        s.gate.fetch_add(EPOCH | OPEN, Ordering::SeqCst);
        s.rouse();

        INSIDE.set(true);
        let mine = catch_unwind(AssertUnwindSafe(|| work(0)));
        INSIDE.set(false);
        let mut inside = s.gate.fetch_and(!OPEN, Ordering::AcqRel) & INSIDERS;
        let mut spins = 0u32;
        while inside != 0 {
            spins += 1;
            if spins < SPINS {
                std::hint::spin_loop();
            } else {
                // A thread inside was interrupted. Sleeping, this one is woken at once when it is done; yielding, it
                // would wait for the end of somebody's time slice.
                *s.waiting.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread::current());
                if s.gate.load(Ordering::Acquire) & INSIDERS != 0 {
                    thread::park();
                }
            }
            inside = s.gate.load(Ordering::Acquire) & INSIDERS;
        }
        let theirs = s.panicked.swap(false, Ordering::Relaxed);
        match mine {
            Err(panic) => resume_unwind(panic),
            Ok(()) if theirs => panic!("a worker of the pool panicked"),
            Ok(()) => {}
        }
    }

    /// Calls `work` once for every part, on whichever worker is free.
    pub(crate) fn scatter<P: Send>(&self, parts: Vec<P>, work: impl Fn(P) + Sync) {
        if parts.len() <= 1 || self.threads.is_empty() || INSIDE.get() {
            parts.into_iter().for_each(work);
            return;
        }
        let parts: Vec<Mutex<Option<P>>> = parts.into_iter().map(|p| Mutex::new(Some(p))).collect();
        // Each worker goes through a stretch of its own, and then helps the others: what it reads and writes goes on where it was.
        let (n, workers) = (parts.len(), self.workers());
        let stretch = |w: usize| n * w / workers..n * (w + 1) / workers;
        let next: Vec<Next> = (0..workers).map(|w| Next(AtomicUsize::new(stretch(w).start))).collect();
        self.run(&|me| {
            for w in (me..workers).chain(0..me) {
                let (next, end) = (&next[w].0, stretch(w).end);
                // Only looked at when it is done: to add would take its line from the others.
                while next.load(Ordering::Relaxed) < end {
                    let i = next.fetch_add(1, Ordering::Relaxed);
                    if i >= end {
                        break;
                    }
                    if let Some(part) = parts[i].lock().unwrap_or_else(PoisonError::into_inner).take() {
                        work(part);
                    }
                }
            }
        });
    }
}

/// The next part of a stretch, on a line of its own.
#[repr(align(64))]
struct Next(AtomicUsize);

impl Shared {
    fn serve(&self, worker: usize) {
        INSIDE.set(true);
        let mut seen = 0;
        loop {
            let mut spins = 0;
            let mut gate = self.gate.load(Ordering::SeqCst);
            while gate / EPOCH == seen {
                spins += 1;
                if spins < SPINS {
                    std::hint::spin_loop();
                } else {
                    self.doze(seen);
                }
                gate = self.gate.load(Ordering::SeqCst);
            }
            if self.stop.load(Ordering::Relaxed) {
                return;
            }
            seen = gate / EPOCH;
            while gate & OPEN != 0 && gate / EPOCH == seen {
                match self.gate.compare_exchange_weak(gate, gate + 1, Ordering::AcqRel, Ordering::Acquire) {
                    Ok(_) => {
                        self.enter(worker);
                        break;
                    }
                    Err(now) => gate = now,
                }
            }
        }
    }

    /// Does the call's work; the gate counts this thread among those inside.
    fn enter(&self, worker: usize) {
        // SAFETY: the gate was entered with acquire after the caller's release, so `job` is this call's; the caller does
        // not touch it, nor end the closure's life, before this thread has left.
        let work = unsafe { &*(*self.job.get()).expect("a job behind an open gate").0 };
        if catch_unwind(AssertUnwindSafe(|| work(worker))).is_err() {
            self.panicked.store(true, Ordering::Relaxed);
        }
        let before = self.gate.fetch_sub(1, Ordering::AcqRel);
        if before & (OPEN | INSIDERS) == 1 {
            // The caller looks at the gate again after it said that it waits: one of the two sees the other.
            if let Some(caller) = self.waiting.lock().unwrap_or_else(PoisonError::into_inner).take() {
                caller.unpark();
            }
        }
    }

    /// Sleeps until there is another call than the one `seen`.
    fn doze(&self, seen: u64) {
        self.asleep.fetch_add(1, Ordering::SeqCst);
        let mut guard = self.sleep.lock().unwrap_or_else(PoisonError::into_inner);
        while self.gate.load(Ordering::SeqCst) / EPOCH == seen {
            guard = self.wake.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
        drop(guard);
        self.asleep.fetch_sub(1, Ordering::SeqCst);
    }

    /// Wakes those that sleep. A thread says that it sleeps before it looks at the gate for the last time, and the gate
    /// moves before this looks for sleepers: one of the two sees the other.
    fn rouse(&self) {
        if self.asleep.load(Ordering::SeqCst) > 0 {
            // A thread holds this lock from its last look to its sleep.
            drop(self.sleep.lock());
            self.wake.notify_all();
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        self.shared.gate.fetch_add(EPOCH, Ordering::SeqCst);
        self.shared.rouse();
        for t in self.threads.drain(..) {
            let _ = t.join();
        }
    }
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Pool({} workers)", self.workers())
    }
}

/// Rows (the last axis, of stride 1) of a tensor of rank 1 to 3, for exclusive use; row `r` of `[a, b, row]` is
/// `(r / b, r % b)`.
pub(crate) struct RowsMut<'a, T> {
    /// First element of row 0 of the whole tensor.
    start: *mut T,
    /// Rows per entry of the outer axis.
    inner: usize,
    strides: [usize; 2],
    row: usize,
    /// The rows that this value may touch.
    range: Range<usize>,
    life: PhantomData<&'a mut [T]>,
}

// SAFETY: it stands for a `&mut [T]`; no other value reaches its rows.
unsafe impl<T: Send> Send for RowsMut<'_, T> {}
// SAFETY: a shared one gives nothing out but its sizes.
unsafe impl<T: Sync> Sync for RowsMut<'_, T> {}

impl<'a, T: Element> RowsMut<'a, T> {
    /// Takes over `out`, of element type `T` and shape `[row]`, `[rows, row]` or `[a, b, row]`.
    pub(crate) fn new(op: &'static str, arg: &'static str, out: TensorMut<'a>) -> Result<Self> {
        let (data, layout) = out.typed::<T>(op, arg)?.into_parts();
        let (shape, strides) = three_axes(op, arg, &layout)?;
        debug_assert!(!layout.may_alias() && layout.extent() <= data.len());
        let range = 0..shape[0] * shape[1];
        Ok(Self { start: data.as_mut_ptr(), inner: shape[1], strides, row: shape[2], range, life: PhantomData })
    }

    /// Takes over a slice as rows of `row` elements; what is left over is no row.
    pub(crate) fn from_slice(data: &'a mut [T], row: usize) -> Self {
        let range = 0..data.len() / row.max(1);
        Self { start: data.as_mut_ptr(), inner: 1, strides: [row, 0], row, range, life: PhantomData }
    }

    /// The rows it holds, numbered as in the whole tensor.
    pub(crate) fn range(&self) -> Range<usize> {
        self.range.clone()
    }

    /// Elements per row.
    pub(crate) fn row_len(&self) -> usize {
        self.row
    }

    /// Row `r` of the whole tensor.
    ///
    /// # Panics
    /// If it is not in [`Self::range`].
    #[inline(always)]
    pub(crate) fn row(&mut self, r: usize) -> &mut [T] {
        assert!(self.range.contains(&r), "row {r} of {:?}", self.range);
        // SAFETY: `r` is in this value's range, so no other value reaches the row, and `&mut self` keeps a second
        // reference from this one away.
        unsafe { self.row_unchecked(r) }
    }

    /// Some rows of the whole tensor, one after the other: a division for all of them instead of one for each.
    ///
    /// # Panics
    /// If they are not in [`Self::range`].
    #[inline(always)]
    pub(crate) fn some(&mut self, rows: Range<usize>) -> SomeRows<'_, 'a, T> {
        let Range { start, end } = self.range;
        assert!(start <= rows.start && rows.start <= rows.end && rows.end <= end, "rows {rows:?} of {start}..{end}");
        let inner = self.inner.max(1);
        SomeRows { left: rows.len(), at: [rows.start / inner, rows.start % inner], of: self }
    }

    /// # Safety
    /// `r` is in range and no other reference to the row exists for `'a`.
    #[inline(always)]
    unsafe fn row_unchecked(&self, r: usize) -> &'a mut [T] {
        if self.row == 0 {
            return &mut [];
        }
        let at = r / self.inner * self.strides[0] + r % self.inner * self.strides[1];
        // SAFETY: the row lies inside the slice that `new` took over for `'a`, as its layout reaches no further, and
        // the layout reaches no element twice, so rows do not overlap; the caller keeps the row unshared.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(at), self.row) }
    }

    /// Cuts into consecutive values of these numbers of rows.
    ///
    /// # Panics
    /// If they are more rows than there are.
    pub(crate) fn cut(self, rows: impl IntoIterator<Item = usize>) -> Vec<Self> {
        let Range { start: mut at, end } = self.range;
        let next = |n| {
            assert!(n <= end - at, "{n} rows of {}", end - at);
            let range = at..at + n;
            at += n;
            Self { range, life: PhantomData, ..self }
        };
        rows.into_iter().map(next).collect()
    }

    /// Cuts into at most `parts` values of equal numbers of rows; into none if rows have no elements (they need no
    /// memory, so there may be 2^64 of them).
    pub(crate) fn split(self, parts: usize) -> Vec<Self> {
        if self.row == 0 {
            return Vec::new();
        }
        let Range { start: first, end } = self.range;
        let each = (end - first).div_ceil(parts.max(1)).max(1);
        (first..end).step_by(each).map(|r| Self { range: r..end.min(r + each), life: PhantomData, ..self }).collect()
    }

    /// Cuts every row into pieces of `width` elements, the last one shorter; one value per piece, of all rows.
    pub(crate) fn split_columns(self, width: usize) -> Vec<Self> {
        let Self { start, row, .. } = self;
        // Pieces of a row do not overlap, and stay inside it: so the reasons given for `row_unchecked` hold.
        (0..row)
            .step_by(width.max(1))
            .map(|c| Self { start: start.wrapping_add(c), row: width.min(row - c), range: self.range.clone(), ..self })
            .collect()
    }
}

/// What [`RowsMut::some`] gives.
pub(crate) struct SomeRows<'b, 'a, T> {
    of: &'b mut RowsMut<'a, T>,
    /// Rows left, from this entry of the outer axis and row of it on.
    left: usize,
    at: [usize; 2],
}

impl<'b, T: Element> Iterator for SomeRows<'b, '_, T> {
    type Item = &'b mut [T];
    #[inline(always)]
    fn next(&mut self) -> Option<&'b mut [T]> {
        self.left = self.left.checked_sub(1)?;
        let [outer, inner] = self.at;
        let row = outer * self.of.strides[0] + inner * self.of.strides[1];
        self.at = if inner + 1 == self.of.inner { [outer + 1, 0] } else { [outer, inner + 1] };
        if self.of.row == 0 {
            return Some(&mut []);
        }
        // SAFETY: as in `row_unchecked`; `some` saw that the rows are in range, each comes once, and the `&mut` to their owner keeps
        // other references to them away.
        Some(unsafe { std::slice::from_raw_parts_mut(self.of.start.add(row), self.of.row) })
    }
}

/// Slots of a paged tensor `[pages, page_size, heads, row]`, or `[pages, page_size, row]` for one head, for exclusive
/// use; slot `s` is `(s / page_size, s % page_size)` and holds a row per head.
pub(crate) struct SlotsMut<'a, T> {
    /// First element of the whole tensor.
    start: *mut T,
    page_size: usize,
    heads: usize,
    /// Of pages, slots and heads.
    strides: [usize; 3],
    row: usize,
    /// The slots that this value may touch.
    range: Range<usize>,
    life: PhantomData<&'a mut [T]>,
}

// SAFETY: it stands for a `&mut [T]`; no other value reaches its slots.
unsafe impl<T: Send> Send for SlotsMut<'_, T> {}

impl<'a, T: Element> SlotsMut<'a, T> {
    /// Takes over `out`, of element type `T`, rank 3 or 4, and rows that are contiguous.
    pub(crate) fn new(op: &'static str, arg: &'static str, out: TensorMut<'a>) -> Result<Self> {
        let (data, layout) = out.typed::<T>(op, arg)?.into_parts();
        debug_assert!(!layout.may_alias() && layout.extent() <= data.len());
        let (page_size, heads, row, strides, last) = match (layout.shape(), layout.strides()) {
            (&[_, p, r], &[s, t, u]) => (p, 1, r, [s, t, 0], u),
            (&[_, p, h, r], &[s, t, w, u]) => (p, h, r, [s, t, w], u),
            (shape, _) => {
                let axes = "[pages, page_size, heads, row]".into();
                return Err(Error::Rank { op, arg, got: shape.len(), want: 4, axes });
            }
        };
        if last != 1 && row > 1 {
            return Err(Error::layout(op, arg, format!("stride {last} of the last axis"), "1"));
        }
        let range = 0..layout.shape()[0] * page_size;
        Ok(Self { start: data.as_mut_ptr(), page_size, heads, strides, row, range, life: PhantomData })
    }

    /// The row of `head` in `slot`.
    ///
    /// # Panics
    /// If the slot is not this value's or there is no such head.
    #[inline(always)]
    pub(crate) fn row(&mut self, slot: usize, head: usize) -> &mut [T] {
        assert!(self.range.contains(&slot) && head < self.heads, "slot {slot} of {:?}, head {head}", self.range);
        if self.row == 0 {
            return &mut [];
        }
        let [pages, slots, heads] = self.strides;
        let at = slot / self.page_size * pages + slot % self.page_size * slots + head * heads;
        // SAFETY: slot and head are in range, so the row lies inside the slice that `new` took over for `'a`; its
        // layout reaches no element twice, so rows do not overlap; no other value has this slot, and `&mut self`
        // keeps a second reference from this one away.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(at), self.row) }
    }

    /// Cuts into consecutive values of these numbers of slots.
    ///
    /// # Panics
    /// If they are more slots than there are.
    pub(crate) fn cut(self, slots: impl IntoIterator<Item = usize>) -> Vec<Self> {
        let Range { start: mut at, end } = self.range;
        let next = |n| {
            assert!(n <= end - at, "{n} slots of {}", end - at);
            let range = at..at + n;
            at += n;
            Self { range, life: PhantomData, ..self }
        };
        slots.into_iter().map(next).collect()
    }
}

/// Rows that several workers take in any order, each at most once.
pub(crate) struct RowsOnce<'a, T> {
    rows: RowsMut<'a, T>,
    /// A bit per row.
    taken: Vec<AtomicU64>,
}

// SAFETY: `take` gives a row to one asker only.
unsafe impl<T: Send> Sync for RowsOnce<'_, T> {}

impl<'a, T: Element> RowsOnce<'a, T> {
    pub(crate) fn new(rows: RowsMut<'a, T>) -> Self {
        Self { taken: rows.range.clone().step_by(64).map(|_| AtomicU64::new(0)).collect(), rows }
    }

    /// Row `r`.
    ///
    /// # Panics
    /// If it is out of range or was taken before: both are faults of the schedule, not of the user's input.
    #[inline(always)]
    pub(crate) fn take(&self, r: usize) -> &'a mut [T] {
        self.take_some(r, 1).next().expect("one")
    }

    /// Rows `r..r + n`. To take them one by one would wait for what was written before, each time.
    ///
    /// # Panics
    /// As [`Self::take`].
    #[inline(always)]
    pub(crate) fn take_some(&self, r: usize, n: usize) -> impl Iterator<Item = &'a mut [T]> {
        let Range { start, end } = self.rows.range;
        assert!(start <= r && r <= end && n <= end - r, "rows {r}..{r} + {n} of {start}..{end}");
        let (mut at, last) = (r - start, r - start + n);
        while at < last {
            let some = (last - at).min(64 - at % 64);
            let bits = (u64::MAX >> (64 - some)) << (at % 64);
            let taken = self.taken[at / 64].fetch_or(bits, Ordering::Relaxed) & bits;
            assert_eq!(taken, 0, "of rows {r}..{r} + {n} some were taken before");
            at += some;
        }
        // SAFETY: the rows are in range, and were not taken before.
        (r..r + n).map(|r| unsafe { self.rows.row_unchecked(r) })
    }

    /// Asks for the lines of rows `r..r + n`, of those that there are, which will be taken soon. Taking rows waits for what was
    /// written before, and that for its lines: of rows of 256 bytes it was a tenth of a prefill of 512 tokens.
    #[inline(always)]
    pub(crate) fn ask(&self, r: usize, n: usize) {
        let RowsMut { start, inner, strides, row, range, .. } = &self.rows;
        for r in r.max(range.start)..(r + n).min(range.end) {
            prefetch_at(start.wrapping_add(r / inner * strides[0] + r % inner * strides[1]), *row);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::TensorMut;

    #[test]
    fn all_work_is_done_once_whoever_comes() {
        for workers in 1..5 {
            let pool = Pool::new(workers);
            for round in 0..50 {
                let (next, counts) = (AtomicUsize::new(0), [const { AtomicUsize::new(0) }; 9]);
                pool.run(&|w| {
                    assert!(w < workers);
                    while let Some(count) = counts.get(next.fetch_add(1, Ordering::Relaxed)) {
                        count.fetch_add(1, Ordering::Relaxed);
                    }
                });
                assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 1));
                if round % 20 == 19 {
                    // Long enough for threads to fall asleep.
                    thread::sleep(std::time::Duration::from_millis(2));
                }
            }
        }
    }

    #[test]
    fn threads_join_a_call_that_lasts() {
        let pool = Pool::new(3);
        let came = AtomicUsize::new(0);
        pool.run(&|_| {
            came.fetch_add(1, Ordering::SeqCst);
            while came.load(Ordering::SeqCst) < 3 {
                thread::yield_now();
            }
        });
        assert_eq!(came.load(Ordering::SeqCst), 3);
    }

    #[test]
    fn scatter_moves_each_part_once() {
        let pool = Pool::new(3);
        let mut data = [0u32; 100];
        pool.scatter(data.chunks_mut(7).enumerate().collect(), |(i, part)| part.fill(i as u32));
        assert!(data.iter().enumerate().all(|(i, &x)| x as usize == i / 7));
    }

    #[test]
    fn nested_calls_and_panics_do_not_hang() {
        let pool = Pool::new(3);
        let n = AtomicUsize::new(0);
        pool.scatter(vec![(); 9], |()| {
            pool.scatter(vec![(); 2], |()| {
                n.fetch_add(1, Ordering::Relaxed);
            });
        });
        assert_eq!(n.load(Ordering::Relaxed), 18);
        for bad in 0..9 {
            let parts: Vec<usize> = (0..9).collect();
            assert!(catch_unwind(AssertUnwindSafe(|| pool.scatter(parts, |i| assert_ne!(i, bad)))).is_err());
        }
        pool.run(&|_| {});
    }

    #[test]
    fn rows_are_given_out_once() {
        let mut data = [0f32; 24];
        let out = TensorMut::strided(&mut data, &[2, 3, 2], &[12, 4, 1]).unwrap();
        let rows = RowsOnce::new(RowsMut::<f32>::new("t", "x", out).unwrap());
        rows.take(5).fill(1.0);
        assert!(catch_unwind(AssertUnwindSafe(|| rows.take(5).len())).is_err());
        assert!(catch_unwind(AssertUnwindSafe(|| rows.take(6).len())).is_err());
        assert!(catch_unwind(AssertUnwindSafe(|| rows.take_some(3, 3).count())).is_err());
        assert!(catch_unwind(AssertUnwindSafe(|| rows.take_some(4, 3).count())).is_err());
        drop(rows);
        assert_eq!(data[20..22], [1.0, 1.0]);
        assert_eq!(data.iter().sum::<f32>(), 2.0);
        // A part gives out its own rows only.
        let out = TensorMut::new(&mut data, &[12, 2]).unwrap();
        let part = RowsMut::<f32>::new("t", "x", out).unwrap().split(2).remove(1);
        let rows = RowsOnce::new(part);
        assert!(catch_unwind(AssertUnwindSafe(|| rows.take(0).len())).is_err());
        rows.take(6).fill(3.0);
        drop(rows);
        assert_eq!(data[12..14], [3.0, 3.0]);
    }

    #[test]
    fn cut_rows_are_consecutive_and_within_the_tensor() {
        fn rows(data: &mut [f32]) -> RowsMut<'_, f32> {
            RowsMut::new("t", "x", TensorMut::new(data, &[12, 2]).unwrap()).unwrap()
        }
        let mut data = [0f32; 24];
        let ranges: Vec<_> = rows(&mut data).cut([3, 0, 5]).iter().map(RowsMut::range).collect();
        assert_eq!(ranges, [0..3, 3..3, 3..8]);
        assert!(catch_unwind(AssertUnwindSafe(|| rows(&mut data).cut([8, 5]).len())).is_err());
    }

    #[test]
    fn slots_reach_their_rows_and_no_others() {
        // Heads before tokens: [pages = 3, page_size = 2, heads = 2, row = 2], with a gap after each row.
        let mut data = [0f32; 36];
        let out = TensorMut::strided(&mut data, &[3, 2, 2, 2], &[12, 3, 6, 1]).unwrap();
        let mut parts = SlotsMut::<f32>::new("t", "x", out).unwrap().cut([3, 0, 3]);
        let mut last = parts.pop().unwrap();
        assert!(catch_unwind(AssertUnwindSafe(|| last.row(2, 0).len())).is_err());
        assert!(catch_unwind(AssertUnwindSafe(|| last.row(3, 2).len())).is_err());
        assert!(catch_unwind(AssertUnwindSafe(|| parts[1].row(3, 0).len())).is_err());
        Pool::new(2).scatter(vec![(parts.remove(0), 0..3), (last, 3..6)], |(mut part, slots)| {
            for s in slots {
                part.row(s, 0).fill(s as f32 + 1.0);
                part.row(s, 1).fill(-(s as f32) - 1.0);
            }
        });
        assert_eq!(data[..12], [1., 1., 0., 2., 2., 0., -1., -1., 0., -2., -2., 0.]);
        assert_eq!(data[27..29], [6., 6.]);
        let rank = TensorMut::new(&mut data, &[6, 6]).unwrap();
        assert!(SlotsMut::<f32>::new("t", "x", rank).is_err());
        let scattered = TensorMut::strided(&mut data, &[3, 2, 2], &[12, 6, 3]).unwrap();
        assert!(SlotsMut::<f32>::new("t", "x", scattered).is_err());
    }

    #[test]
    fn split_rows_cover_the_tensor() {
        let mut data = [0f32; 24];
        let out = TensorMut::strided(&mut data, &[2, 3, 2], &[12, 4, 1]).unwrap();
        let parts = RowsMut::<f32>::new("t", "x", out).unwrap().split(4);
        Pool::new(2).scatter(parts, |mut part| {
            for r in part.range() {
                part.row(r).fill(r as f32 + 1.0);
            }
        });
        assert_eq!(data[..12], [1., 1., 0., 0., 2., 2., 0., 0., 3., 3., 0., 0.]);
        assert_eq!(data[20..22], [6.0, 6.0]);
    }

    #[test]
    fn split_columns_cover_the_tensor() {
        let mut data = [0f32; 18];
        let out = TensorMut::strided(&mut data, &[2, 7], &[9, 1]).unwrap();
        let parts = RowsMut::<f32>::new("t", "x", out).unwrap().split_columns(3);
        assert_eq!(parts.iter().map(RowsMut::row_len).collect::<Vec<_>>(), [3, 3, 1]);
        Pool::new(2).scatter(parts.into_iter().enumerate().collect(), |(c, mut part)| {
            for r in part.range() {
                part.row(r).fill((10 * r + c) as f32 + 1.0);
            }
        });
        assert_eq!(data[..9], [1., 1., 1., 2., 2., 2., 3., 0., 0.]);
        assert_eq!(data[9..], [11., 11., 11., 12., 12., 12., 13., 0., 0.]);
        let none = TensorMut::strided(&mut data, &[0, 7], &[9, 1]).unwrap();
        assert!(RowsMut::<f32>::new("t", "x", none).unwrap().split_columns(3).iter().all(|p| p.range().is_empty()));
    }
}
