//! Short and long query tiles of one call beside each other: how many multiprocessors each kind gets.
//!
//! Long tiles are bound by tensor cores, short ones by memory. One after the other they take the sum of their times, beside
//! each other less, though each slows the other down; but a block of `sm90_prefill.cuh` has a multiprocessor for itself, so
//! the device is cut in two.

use super::form::{Form, bits};
use super::hooks::Hooks;
use super::{Batch, Plan, Spec, choose, tile_of};
use crate::cuda::exec::Gpu;
use crate::error::Result;
use crate::plan::{Entry, Split};

/// What a batch asks of a device.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Load {
    /// KV heads of long tiles, and microseconds of one multiprocessor for all that they see.
    units: f64,
    long: f64,
    /// KV heads of short tiles, and bytes of their keys and values.
    short_units: f64,
    short: f64,
}

/// Of an H200, head dim 128, in microseconds: until the first long tile of a queue is there, and of units that are few; what 128
/// rows against 128 positions take of a multiprocessor, what a unit takes beside that, and what each part of cut units adds
/// to the end. By these a prefill of 2048 takes 218 and 84 on 32 and 96 multiprocessors; 217 and 85 were measured.
const QUEUE: f64 = 20.0;
const START: f64 = 12.0;
const TILE: f64 = 1.2;
const UNIT: f64 = 2.0;
const PART: f64 = 1.5;
/// Of short tiles: bytes per microsecond that all multiprocessors together read, that one of them does beside long tiles, and
/// alone; microseconds of a multiprocessor for a unit, however short, and until the first is there.
const MEMORY: f64 = 4.1e6;
const EACH_BESIDE: f64 = 4.0e4;
const EACH: f64 = 6.1e4;
const SHORT_UNIT: f64 = 5.0;
const FIRST: f64 = 6.0;
/// How much of their speed long tiles lose while short ones read at the memory's rate; with the square of that rate where it is
/// less (44 %, 70 % and 88 % were left with 100, 76 and 44 multiprocessors for short tiles).
const SLOWED: f64 = 0.58;
/// What a second launch behind the first takes.
const TURN: f64 = 8.0;
/// Bytes of short tiles for each multiprocessor up to which it has one block: 16 x 512 takes 20.1 us with one on an H200 and 21.7 with two,
/// 16 x 2048 (1.02 MB) 48.0 and 48.9.
const LITTLE: f64 = 1.1e6;
/// Of decodes that read one prefix each for itself, which the second-level cache then has: bytes per microsecond, with one block to a
/// multiprocessor and with more, and what a launch takes besides. By these 8 and 32 requests of 2048 shared tokens and 128 of their own take
/// 25 and 43 us, 4 and 64 of 8192 and 128 39 and 253; 27, 43, 41 and 246 were measured.
const CACHE_LITTLE: f64 = 4.9e6;
const CACHE: f64 = 9.0e6;
const FLAT: f64 = 11.0;
/// What the merge of a cascade's levels adds.
const MERGE: f64 = 2.0;

impl Load {
    /// Of `positions` against a query tile, for all KV heads.
    pub(crate) fn of(spec: &Spec, kv_heads: usize, positions: u32, long: bool) -> Self {
        let (heads, dims) = (kv_heads as f64, (spec.dim_qk + spec.dim_vo) as f64);
        if long {
            let tiles = f64::from(positions.div_ceil(128));
            return Self { units: heads, long: heads * tiles * TILE * dims / 256.0, ..Self::default() };
        }
        let bytes = f64::from(positions) * dims * bits(spec.kv) as f64 / 8.0;
        Self { short_units: heads, short: heads * bytes, ..Self::default() }
    }

    pub(super) fn of_entries(spec: &Spec, kv_heads: usize, entries: &[Entry], long: bool) -> Self {
        entries.iter().map(|e| Self::of(spec, kv_heads, e.kv_end - e.kv_start, long)).fold(Self::default(), Self::and)
    }

    /// Both.
    pub(crate) fn and(self, other: Self) -> Self {
        Self {
            units: self.units + other.units,
            long: self.long + other.long,
            short_units: self.short_units + other.short_units,
            short: self.short + other.short,
        }
    }

    /// Whether it has long tiles, and short ones.
    pub(crate) fn kinds(self) -> [bool; 2] {
        [self.long > 0.0, self.short > 0.0]
    }

    /// Whether one block of two reads a multiprocessor's share of the short tiles as fast, with half as many parts to merge.
    fn is_little(self, multiprocessors: usize) -> bool {
        self.short <= LITTLE * multiprocessors as f64
    }

    /// Microseconds of the long tiles alone on `n` multiprocessors: units that are few are cut into up to 16 parts
    /// (`plan::schedule::queue_parts`), and come in rounds.
    fn long_on(self, n: f64) -> f64 {
        if self.units >= 4.0 * n {
            return QUEUE + (self.long + self.units * UNIT) / n;
        }
        let in_parts = |parts: f64| {
            let rounds = (self.units * parts / n).ceil();
            rounds * (self.long / self.units / parts + UNIT) + if parts > 1.0 { PART * parts } else { 0.0 }
        };
        // As many as come at once, where that is two or more.
        let once = (n / self.units).floor().min(16.0);
        if once > 1.0 {
            return START + in_parts(once);
        }
        START + (1..=16).map(|parts| in_parts(f64::from(parts))).fold(f64::INFINITY, f64::min)
    }

    /// Microseconds of the short ones on `n` that read so many bytes in one each.
    fn short_on(self, n: f64, each: f64) -> f64 {
        FIRST + (self.short / MEMORY.min(n * each)).max(self.short_units * SHORT_UNIT / n)
    }

    /// Microseconds of both beside each other: each is slower as long as the other one runs.
    fn beside(self, long: f64, short: f64) -> f64 {
        let speed = 1.0 - SLOWED * (short * EACH_BESIDE / MEMORY).min(1.0).powi(2);
        let (alone, shorts) = (self.long_on(long), self.short_on(short, EACH_BESIDE));
        if alone > speed * shorts {
            return shorts + alone - speed * shorts;
        }
        let longs = alone / speed;
        longs + (1.0 - longs / shorts) * self.short_on(short, EACH)
    }

    /// How many of `all` multiprocessors long tiles should have beside short ones; none where it is better that each kind has all
    /// of them in turn.
    ///
    /// Microseconds that were measured for 63 decodes of 2048 and a prefill of 2048: in turn 207, with 48, 56, 64, 72 and 88 for the
    /// prefill 215, 188, 192, 199 and 244 (by the model 204; 214, 189, 186, 195, 237); for 127 of 1024 and a prefill of 4096: 348; 557, 475, 419, 382
    /// and 321 (333; 549, 476, 420, 375, 308); 31 of 2048 and 1024: 110; 96, 94, 99, 103, 127 (104; 92, 89, 91, 94, 116).
    pub(super) fn share(self, all: usize) -> Option<usize> {
        self.best(all).1
    }

    /// Microseconds of both kinds, with [`Self::share`] of them.
    fn best(self, all: usize) -> (f64, Option<usize>) {
        let whole = all as f64;
        let [longs, shorts] = self.kinds();
        let alone =
            if longs { self.long_on(whole) } else { 0.0 } + if shorts { self.short_on(whole, EACH) } else { 0.0 };
        if !(longs && shorts) {
            return (alone, None);
        }
        let beside = |n: usize| (self.beside(n as f64, (all - n) as f64), Some(n));
        let in_turn = (alone + TURN, None);
        (2..all).step_by(2).map(beside).fold(in_turn, |best, one| if one.0 < best.0 { one } else { best })
    }

    /// Microseconds of requests that each read all they see, `distinct` bytes of it not the same as others'.
    fn flat(self, all: usize, distinct: f64) -> f64 {
        let rate = if self.is_little(all) { CACHE_LITTLE } else { CACHE };
        let shorts = FLAT + (self.short / rate).max(distinct / MEMORY);
        if self.kinds()[0] { shorts + self.best(all).0 - self.short_on(all as f64, EACH) } else { shorts }
    }

    /// Whether a cascade of these levels, with so many bytes of keys and values, is expected to be faster than requests of `flat` together.
    /// `beside`: whether kernels of long and short tiles may run beside each other.
    fn pays(levels: &[Self], distinct: f64, flat: Self, all: usize, beside: bool) -> bool {
        if distinct == 0.0 || flat.kinds() == [false; 2] {
            return false;
        }
        // The last two do, if the longer one is of long tiles; see `CascadePlan`.
        let mut launches = Vec::with_capacity(levels.len());
        match levels {
            [first @ .., before, last] if beside && before.kinds()[0] && last.kinds() == [false, true] => {
                launches.extend(first.iter().copied().chain([before.and(*last)]));
            }
            _ => launches.extend(levels),
        }
        let time: f64 = launches.iter().map(|l| l.best(all).0).sum();
        time + (launches.len() - 1) as f64 * TURN + MERGE < flat.flat(all, distinct)
    }
}

/// What requests of so many query and KV tokens ask of a device, in query tiles that `tile` says.
fn load(spec: &Spec, kv_heads: usize, tile: impl Fn(u32) -> (u32, bool), [q_lens, kv_lens]: [&[u32]; 2]) -> Load {
    let mut all = Load::default();
    for (&q_len, &kv_len) in q_lens.iter().zip(kv_lens) {
        let (tile, long) = tile(q_len);
        for _ in 0..q_len.div_ceil(tile) {
            all = all.and(Load::of(spec, kv_heads, kv_len, long));
        }
    }
    all
}

/// Whether a cascade is expected to be faster than `flat`, the same requests apart. Either is query and KV tokens.
pub(crate) fn pays(gpu: &Gpu, spec: &Spec, kv_heads: usize, levels: &[[&[u32]; 2]], flat: [&[u32]; 2]) -> Result<bool> {
    let (properties, hooks) = (gpu.properties(), Hooks::new(&spec.variant));
    let mut forms = vec![choose(spec, properties.arch, false)?, choose(spec, properties.arch, true)?];
    forms.dedup();
    let rows = |form: &Form| form.instance(spec, &hooks, properties.shared_per_block, true).rows;
    let rows: Vec<_> = forms.iter().map(rows).collect();
    let distinct: f64 = levels.iter().flat_map(|l| l[1]).map(|&n| Load::of(spec, kv_heads, n, false).short).sum();
    let load = |lens| load(spec, kv_heads, |q_len| tile_of(rows.iter().copied(), spec.group, q_len), lens);
    let levels: Vec<_> = levels.iter().map(|l| load(*l)).collect();
    let beside = forms == [Form::Decode, Form::Hopper];
    Ok(Load::pays(&levels, distinct, load(flat), properties.multiprocessors as usize, beside))
}

impl Plan {
    /// What requests of so many query and KV tokens ask of the device.
    pub(crate) fn load(&self, q_lens: &[u32], kv_lens: &[u32]) -> Load {
        load(&self.spec, self.kv_heads, |q_len| self.tile(q_len), [q_lens, kv_lens])
    }

    /// Says what else will run beside the next batches.
    pub(crate) fn set_beside(&mut self, load: Load) {
        self.beside = load;
    }

    /// Whether lanes may run beside each other.
    pub(super) fn is_shared(&self) -> bool {
        let forms = self.lanes.iter().map(|l| l.instance.form);
        forms.eq([Form::Decode, Form::Hopper])
    }

    /// Cuts the multiprocessors between lanes that run beside each other, and gives each all of them otherwise.
    pub(super) fn share(&mut self, batch: &Batch<'_>) {
        let of = |entries, long| Load::of_entries(&self.spec, self.kv_heads, entries, long);
        let load = self.beside.and(of(batch.entries, false)).and(of(batch.long, true));
        let all = self.gpu.properties().multiprocessors as usize;
        let long = if self.is_shared() { load.share(all) } else { None };
        let one_block = long.is_none() && self.split == Split::Balanced && load.is_little(all);
        for (i, lane) in self.lanes.iter_mut().enumerate() {
            let own = long.map_or(all, |long| if i == 1 { long } else { all - long });
            lane.busy = (lane.workers * own / all).max(1);
            if one_block && lane.instance.form == Form::Decode && lane.workers == 2 * all {
                lane.busy = all;
            }
            // A team is never cut.
            if lane.busy < lane.team {
                lane.busy = lane.workers;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_gets_what_it_needs() {
        let load = |units, tiles, short_units, tokens| Load {
            units,
            long: units * tiles * TILE,
            short_units,
            short: short_units * tokens * 512.0,
        };
        assert_eq!(
            [load(0.0, 0.0, 8.0, 9.0), load(8.0, 9.0, 0.0, 0.0), load(0.0, 0.0, 0.0, 0.0)].map(|l| l.share(132)),
            [None; 3]
        );
        // 63 decodes of 2048 and a prefill of 2048 tokens, 127 of 1024 and 4096, 31 of 2048 and 1024: 56, 88 and 56 are the best that were
        // measured.
        for (case, best) in [
            (load(512.0, 8.5, 504.0, 2048.0), 52..=64),
            (load(1024.0, 16.5, 1016.0, 1024.0), 82..=94),
            (load(256.0, 4.5, 248.0, 2048.0), 48..=60),
        ] {
            assert!(case.share(132).is_some_and(|n| best.contains(&n)), "{case:?}: {:?}", case.share(132));
        }
        // Cascades of 16, 64 and 256 requests with a prefix of 8192 and 128 tokens of their own, and of 256 with 32768 and 512.
        let n = load(8.0, 64.0, 128.0, 128.0).share(132);
        assert!(n.is_some_and(|n| (64..90).contains(&n)), "{n:?}");
        let n = load(16.0, 64.0, 512.0, 128.0).share(132);
        assert!(n.is_some_and(|n| (64..100).contains(&n)), "{n:?}");
        assert_eq!(load(64.0, 64.0, 2048.0, 128.0).share(132), None);
        let n = load(64.0, 256.0, 2048.0, 512.0).share(132);
        assert!(n.is_some_and(|n| (80..104).contains(&n)), "{n:?}");
        // Next to nothing of one kind gets next to nothing.
        assert!(load(4096.0, 100.0, 8.0, 200.0).share(132).is_none_or(|n| n > 120));
        assert!(load(1.0, 1.0, 512.0, 2048.0).share(132).is_none_or(|n| n < 20));
        assert_eq!(load(1.0, 1.0, 1.0, 1.0).share(1), None);
        // Requests with a prefix and 128 tokens of their own: which way was faster. Up to four are a short tile of 16 rows.
        for (prefix, requests, faster) in [
            (2048.0, 1.0, false),
            (2048.0, 4.0, false),
            (2048.0, 8.0, false),
            (2048.0, 16.0, true),
            (2048.0, 128.0, true),
            (8192.0, 2.0, false),
            (8192.0, 4.0, true),
            (8192.0, 8.0, true),
            (8192.0, 64.0, true),
        ] {
            let shared = if requests <= 4.0 {
                load(0.0, 0.0, 8.0, prefix)
            } else {
                load(8.0 * f64::ceil(requests / 32.0), prefix / 128.0, 0.0, 0.0)
            };
            let own = load(0.0, 0.0, 8.0 * requests, 128.0);
            let flat = load(0.0, 0.0, 8.0 * requests, prefix + 128.0);
            let distinct = 8.0 * 512.0 * (prefix + 128.0 * requests);
            assert_eq!(Load::pays(&[shared, own], distinct, flat, 132, true), faster, "{prefix} {requests}");
        }
        // Nobody reads it.
        assert!(!Load::pays(&[Load::default(); 2], 8.0 * 512.0 * 8192.0, Load::default(), 132, true));
        // 16 x 2048 and 64 x 2048.
        assert!(load(0.0, 0.0, 128.0, 2048.0).is_little(132) && !load(0.0, 0.0, 512.0, 2048.0).is_little(132));
    }
}
