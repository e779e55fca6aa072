//! Sixteen weight rows times some rows of activations.

use std::marker::PhantomData;

use super::pack::{Cell, LANES, Packed, SUPER};
use super::{Activations, Acts, FEW, GROUPED, Line, MANY, PANELS, SEVERAL, TILED, Taken, centre};
#[cfg(target_arch = "x86_64")]
use crate::cpu::arch::Amx;
use crate::cpu::arch::{Aligned, prefetch_ahead};
use crate::cpu::exec::Cpu;
use crate::cpu::integers::{IntKernel, Integers};
use crate::tensor::{BlockFormat, IQ4_VALUES};

/// Rows in memory for `rows` of them: what the kernels take at a time, at any level.
pub(super) fn padded(rows: usize) -> usize {
    match rows {
        0..=FEW => rows.next_power_of_two(),
        _ if rows <= SEVERAL => rows.next_multiple_of(FEW),
        _ => rows.next_multiple_of(MANY),
    }
}

/// Whether so many rows go through AMX tiles: [`padded`] ones do if those that were padded do.
pub(super) fn is_tiled(cpu: &Cpu, format: BlockFormat, rows: usize) -> bool {
    let least = if format == BlockFormat::Q8_0 { GROUPED } else { TILED };
    #[cfg(target_arch = "x86_64")]
    return rows >= least && cpu.amx().is_some();
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = (cpu, rows, least);
        false
    }
}

/// Puts to `sums`, `[panels, rows]`, the product of the panels from `first` on and all rows of `acts`.
pub(super) fn run(cpu: &Cpu, acts: Acts<'_>, w: &Packed, first: usize, rows: usize, sums: &mut [Line]) {
    macro_rules! go {
        ($codes:ty, $scales:ty) => {
            cpu.run_ints(Product {
                acts,
                w,
                first,
                rows,
                sums,
                #[cfg(target_arch = "x86_64")]
                amx: cpu.amx(),
                of: PhantomData::<($codes, $scales)>,
            })
        };
    }
    match w.format() {
        BlockFormat::Q4_0 => go!(Bits<4, 0>, Words<1, false>),
        BlockFormat::Q4_1 => go!(Bits<4, 0>, Words<1, true>),
        BlockFormat::Q5_0 => go!(Bits<4, 1>, Words<2, false>),
        BlockFormat::Q5_1 => go!(Bits<4, 1>, Words<2, true>),
        BlockFormat::Q8_0 => go!(Plain<8, 0>, Halves),
        BlockFormat::Q2K => go!(Bits<2, 0>, Bytes<2, true>),
        BlockFormat::Q3K => go!(Bits<2, 1>, Bytes<2, false>),
        BlockFormat::Q4K => go!(Bits<4, 0>, Bytes<1, true>),
        BlockFormat::Q5K => go!(Bits<4, 1>, Bytes<1, true>),
        BlockFormat::Q6K => go!(Bits<4, 2>, Bytes<2, false>),
        BlockFormat::Iq4Xs => go!(Table, Bytes<1, false>),
    }
}

/// How a group's codes are stored.
pub(super) trait Codes: 'static {
    /// Bytes per group.
    const BYTES: usize;
    /// Bits of a code.
    const BITS: usize;
    /// Whether codes reach past 127.
    const WIDE: bool = Self::BITS == 8;
    /// Products, four to a step, of so many steps add up in 16 bits.
    const RUN: usize = 32767 / (2 * 127 * ((1 << Self::BITS) - 1));
    /// The same codes, a byte each.
    type Plain: Codes;
    /// Codes of elements `4 * i..4 * i + 4` of a group, of 16 rows.
    fn read_at<V: Integers>(v: V, group: &[u8], i: usize) -> V::B;
    /// The same, of a place that the compiler knows.
    #[inline(always)]
    fn read<V: Integers, const I: usize>(v: V, group: &[u8]) -> V::B {
        Self::read_at(v, group, I)
    }
}

/// A low plane and a high plane of so many bits.
struct Bits<const LOW: usize, const HIGH: usize>;

impl<const LOW: usize, const HIGH: usize> Codes for Bits<LOW, HIGH> {
    const BYTES: usize = 4 * LANES * (LOW + HIGH);
    const BITS: usize = LOW + HIGH;
    type Plain = Plain<LOW, HIGH>;
    #[inline(always)]
    fn read_at<V: Integers>(v: V, group: &[u8], i: usize) -> V::B {
        let (low, high) = group.split_at(4 * LANES * LOW);
        let plane = v.bytes(&low[4 * LANES * (i * LOW / 8)..]);
        let codes = v.field(plane, (i * LOW % 8) as u32, 0, (1 << LOW) - 1);
        if HIGH == 0 {
            return codes;
        }
        let (plane, at) = (v.bytes(&high[4 * LANES * (i * HIGH / 8)..]), i * HIGH % 8);
        let (right, left) = (at.saturating_sub(LOW) as u32, LOW.saturating_sub(at) as u32);
        v.or(codes, v.field(plane, right, left, ((1 << HIGH) - 1) << LOW))
    }
}

/// Four bits that number the values of IQ4_XS.
struct Table;

impl Codes for Table {
    const BYTES: usize = Bits::<4, 0>::BYTES;
    const BITS: usize = 8;
    type Plain = Plain<8, 0>;
    #[inline(always)]
    fn read_at<V: Integers>(v: V, group: &[u8], i: usize) -> V::B {
        const UNSIGNED: [u8; 16] = {
            let (mut table, mut i) = ([0; 16], 0);
            while i < 16 {
                table[i] = IQ4_VALUES[i] as u8 ^ 0x80;
                i += 1;
            }
            table
        };
        v.lookup(&UNSIGNED, Bits::<4, 0>::read_at(v, group, i))
    }
}

/// A byte each, of so many bits as two planes have.
struct Plain<const LOW: usize, const HIGH: usize>;

impl<const LOW: usize, const HIGH: usize> Codes for Plain<LOW, HIGH> {
    const BYTES: usize = 4 * LANES * 8;
    const BITS: usize = LOW + HIGH;
    type Plain = Self;
    #[inline(always)]
    fn read_at<V: Integers>(v: V, group: &[u8], i: usize) -> V::B {
        v.bytes(&group[4 * LANES * i..])
    }
}

/// How codes are scaled.
pub(super) trait Scales: 'static {
    /// Sub-blocks with a scale of their own per group of 32.
    const SUBS: usize;
    const MIN: bool;
    /// Whether the scales of sub-blocks are integers; else f16.
    const INTEGERS: bool;
    /// Whether they have 16 bits.
    const WORDS: bool = false;
    /// Whether those have a minimum in the 16 bits above, and activations' sums come in such pairs.
    const PAIRS: bool = false;
    /// Bytes per group.
    const BYTES: usize;

    /// Integer scale and minimum of a sub-block.
    fn read<V: Integers>(v: V, group: &[u8], sub: usize) -> (V::I, V::I);
}

/// f16 per group.
pub(super) struct Halves;
/// A byte per sub-block, and f16 per cell; minima side by side with scales, or in the nibbles of one byte.
struct Bytes<const SUBS: usize, const MIN: bool>;
/// 16 bits per group, or a pair of them, and f16 per cell. Sums of activations and codes must fit into 16 bits, too: those of 5 bits do
/// for 16 elements.
struct Words<const SUBS: usize, const MIN: bool>;

impl Scales for Halves {
    const SUBS: usize = 1;
    const MIN: bool = false;
    const INTEGERS: bool = false;
    const BYTES: usize = 2 * LANES;
    #[inline(always)]
    fn read<V: Integers>(v: V, _: &[u8], _: usize) -> (V::I, V::I) {
        (v.splat(0), v.splat(0))
    }
}

impl<const SUBS: usize, const MIN: bool> Scales for Bytes<SUBS, MIN> {
    const SUBS: usize = SUBS;
    const MIN: bool = MIN;
    const INTEGERS: bool = true;
    const BYTES: usize = if SUBS == 2 || MIN { 2 * LANES } else { LANES };
    #[inline(always)]
    fn read<V: Integers>(v: V, group: &[u8], sub: usize) -> (V::I, V::I) {
        let own = &group[sub * LANES..];
        match (MIN, SUBS) {
            (false, _) => (v.signed(own), v.splat(0)),
            (true, 1) => (v.signed(own), v.unsigned(&own[LANES..], 0, 0xff)),
            (true, _) => (v.unsigned(own, 0, 15), v.unsigned(own, 4, 15)),
        }
    }
}

impl<const SUBS: usize, const MIN: bool> Scales for Words<SUBS, MIN> {
    const SUBS: usize = SUBS;
    const MIN: bool = false; // None apart from the pairs'.
    const INTEGERS: bool = true;
    const WORDS: bool = true;
    const PAIRS: bool = MIN;
    const BYTES: usize = if MIN { 4 * LANES } else { 2 * LANES };
    #[inline(always)]
    fn read<V: Integers>(v: V, group: &[u8], _: usize) -> (V::I, V::I) {
        (if MIN { v.load_i32(bytemuck::cast_slice(group)) } else { v.words(group) }, v.splat(0))
    }
}

struct Product<'a, C, S> {
    acts: Acts<'a>,
    w: &'a Packed,
    first: usize,
    rows: usize,
    sums: &'a mut [Line],
    #[cfg(target_arch = "x86_64")]
    amx: Option<Amx>,
    of: PhantomData<(C, S)>,
}

impl<C: Codes, S: Scales> IntKernel for Product<'_, C, S> {
    type Out = ();
    #[inline(always)]
    fn run<V: Integers>(self, v: V) {
        let Self { acts, w, first, rows, sums, .. } = self;
        #[cfg(target_arch = "x86_64")]
        if V::TILES
            && let (Acts::Strips(strips), Some(amx)) = (acts, self.amx)
        {
            return if S::INTEGERS {
                super::tiles::run::<V, C, S>(v, amx, strips, w, first, rows, sums)
            } else {
                super::groups::run::<V, C>(v, amx, strips, w, first, rows, sums)
            };
        }
        let Acts::Rows(acts) = acts else { unreachable!("strips are made where there are tiles") };
        let offset = centre(w.format());
        sums.fill(Line([0.0; LANES]));
        let sums: &mut [f32] = bytemuck::cast_slice_mut(sums);
        if rows <= anew::<V>() {
            for (p, sums) in sums.chunks_exact_mut(rows * LANES).enumerate() {
                let panel = w.panel(first + p);
                for (s, acts) in acts.chunks_exact(rows).enumerate() {
                    let cell = w.cell(panel, s);
                    for (i, (acts, sums)) in acts.chunks(FEW).zip(sums.chunks_mut(FEW * LANES)).enumerate() {
                        strip::<V, C, S>(v, offset, cell, acts, sums, i == 0);
                    }
                }
            }
            return;
        }
        let mut plain = [Aligned([0u8; 4 * LANES * SUPER / 4]); PANELS];
        for (turn, sums) in sums.chunks_mut(PANELS * rows * LANES).enumerate() {
            let first = first + turn * PANELS;
            for (s, acts) in acts.chunks_exact(rows).enumerate() {
                for (p, plain) in plain.iter_mut().enumerate().take(sums.len() / (rows * LANES)) {
                    unpack::<V, C>(v, w.cell(w.panel(first + p), s), &mut plain.0);
                }
                // A few rows at a time against all panels: their activations come from afar, the codes do not.
                for (r, acts) in acts.chunks_exact(FEW).enumerate() {
                    for (p, sums) in sums.chunks_exact_mut(rows * LANES).enumerate() {
                        let cell = w.cell(w.panel(first + p), s);
                        let cell = Cell { codes: &plain[p].0[..cell.groups * C::Plain::BYTES], ..cell };
                        strip::<V, C::Plain, S>(
                            v,
                            offset,
                            cell,
                            acts,
                            &mut sums[r * FEW * LANES..][..FEW * LANES],
                            false,
                        );
                    }
                }
            }
        }
    }
}

/// Most rows whose codes are unpacked anew for every pass: the fewer rows one takes, the sooner a copy pays. With AVX2 16 rows of
/// Q4_1, Q4_K and Q8_0 are 1.02, 1.33 and 1.4 times as fast so.
#[inline(always)]
fn anew<V: Integers>() -> usize {
    match V::ROWS {
        FEW.. => SEVERAL,
        4.. => 2 * FEW,
        _ => FEW,
    }
}

/// Bytes ahead of the group in use that few rows ask the memory for. Cells are short, so the caches' own prefetchers, which
/// follow one stream, start anew for the codes and the scales of each: over 40 % of the time went into waiting for these.
pub(super) const AHEAD: usize = 4096;

/// Calls `$body` with `$i` standing for each number.
macro_rules! each {
    ($i:ident in [$($n:literal)*] $body:block) => {$({
        const $i: usize = $n;
        $body
    })*};
}
pub(super) use each;

/// Writes a cell's codes, a byte each.
#[inline(always)]
fn unpack<V: Integers, C: Codes>(v: V, cell: Cell<'_>, out: &mut [u8]) {
    let groups = cell.codes.chunks_exact(C::BYTES);
    for (group, out) in groups.zip(out.chunks_exact_mut(C::Plain::BYTES)) {
        each!(I in [0 1 2 3 4 5 6 7] { v.store_bytes(C::read::<V, I>(v, group), &mut out[4 * LANES * I..]); });
    }
}

/// A cell times 1, 2, 4 or 8 rows, as many at a time as the level holds; `ahead` if it comes from memory.
#[inline(always)]
fn strip<V: Integers, C: Codes, S: Scales>(
    v: V,
    offset: i32,
    cell: Cell<'_>,
    acts: &[Activations],
    sums: &mut [f32],
    ahead: bool,
) {
    // With fewer steps to a sum there are two sums to keep for each row.
    let most = V::ROWS.min(if V::SIXTEEN_BITS && !C::WIDE && C::RUN < 4 { 2 } else { FEW }).min(acts.len()).max(1);
    for (acts, sums) in acts.chunks_exact(most).zip(sums.chunks_exact_mut(most * LANES)) {
        match most {
            1 => tile::<V, C, S, 1>(v, offset, cell, acts, sums, ahead),
            2 => tile::<V, C, S, 2>(v, offset, cell, acts, sums, ahead),
            4 => tile::<V, C, S, 4>(v, offset, cell, acts, sums, ahead),
            _ => tile::<V, C, S, 8>(v, offset, cell, acts, sums, ahead),
        }
    }
}

/// A cell times `R` rows.
#[inline(always)]
fn tile<V: Integers, C: Codes, S: Scales, const R: usize>(
    v: V,
    offset: i32,
    cell: Cell<'_>,
    acts: &[Activations],
    sums: &mut [f32],
    ahead: bool,
) {
    if R > V::ROWS {
        return; // Never called: `strip` has cut the rows. Without this it would be compiled for every level.
    }
    let rows: &[Activations; R] = acts.first_chunk().expect("R rows");
    let words: &[i32] = bytemuck::cast_slice(rows);
    // Integer scales: sums of the cell. f16 scales: `t` of the cell.
    let (mut whole, mut minima, mut t) = ([v.splat(0); R], [v.splat_f32(0.0); R], [v.splat_f32(0.0); R]);
    let groups = cell.codes.chunks_exact(C::BYTES).zip(cell.scales.chunks_exact(S::BYTES));
    for (g, (group, scales)) in groups.enumerate().take(SUPER / 32) {
        if ahead {
            prefetch_ahead(group, AHEAD);
            prefetch_ahead(scales, AHEAD);
        }
        let (mut part, mut on_way) = ([[v.splat(0); R]; 2], [v.none(); R]);
        if !(S::MIN || C::WIDE && V::SIXTEEN_BITS) {
            for (sub, part) in part.iter_mut().enumerate().take(S::SUBS) {
                for r in 0..R {
                    part[r] = v.splat(rows[r].sums[S::SUBS * g + sub]);
                }
            }
        }
        let (mut scale, mut min) = ([v.splat(0); 2], [v.splat(0); 2]);
        for sub in 0..if S::INTEGERS { S::SUBS } else { 0 } {
            (scale[sub], min[sub]) = S::read(v, scales, sub);
        }
        each!(I in [0 1 2 3 4 5 6 7] {
            let sub = I * S::SUBS / 8;
            v.dots(C::WIDE, &mut part[sub], &mut on_way, C::read::<V, I>(v, group), &words[8 * g + I..]);
            // The last step of its sub-block, or of as many as add up.
            let steps = I % (8 / S::SUBS) + 1;
            if !C::WIDE && (steps == 8 / S::SUBS || steps.is_multiple_of(C::RUN)) {
                if S::INTEGERS {
                    v.settle_scaled(&mut whole, &mut on_way, scale[sub]);
                } else {
                    v.settle(&mut part[sub], &mut on_way);
                }
            }
        });
        if !S::INTEGERS {
            let d = v.halves(scales);
            for r in 0..R {
                t[r] = v.fma(d, v.float(part[0][r]), t[r]);
            }
        } else {
            for sub in 0..S::SUBS {
                for r in 0..R {
                    whole[r] = if S::WORDS {
                        let part = if S::PAIRS { v.flip(part[sub][r]) } else { part[sub][r] };
                        v.add_pairs(part, scale[sub], whole[r])
                    } else {
                        v.mul_add(part[sub][r], scale[sub], whole[r])
                    };
                    if S::MIN {
                        // Exact, as the sum stays below 2^24.
                        minima[r] = v.fma(v.float(min[sub]), v.splat_f32(rows[r].sum(S::SUBS * g + sub)), minima[r]);
                    }
                }
            }
        }
    }
    if S::INTEGERS {
        let d = v.halves(cell.shared);
        for r in 0..R {
            t[r] = v.mul(d, v.float(whole[r]));
        }
        if S::MIN {
            let m = v.halves(&cell.shared[2 * LANES..]);
            for r in 0..R {
                t[r] = v.fnma(m, minima[r], t[r]);
            }
        }
    }
    for r in 0..R {
        let sum = &mut sums[r * LANES..][..LANES];
        v.store(v.fma(t[r], v.splat_f32(rows[r].scale), v.load(sum)), sum);
    }
    // Few rows have any: a loop of its own is not unrolled.
    for (acts, sum) in rows.iter().zip(sums.chunks_exact_mut(LANES)) {
        if acts.taken.count > 0 {
            add_taken::<V, C, S>(v, offset, cell, &acts.taken, sum);
        }
    }
}

/// Adds the products of what was taken out of a row to its sums.
#[inline(always)]
pub(super) fn add_taken<V: Integers, C: Codes, S: Scales>(
    v: V,
    offset: i32,
    cell: Cell<'_>,
    taken: &Taken,
    sum: &mut [f32],
) {
    let mut total = v.load(sum);
    for (at, value) in taken.iter() {
        let weights = weights::<V, C, S>(v, offset, cell, at);
        total = v.fma(weights, v.splat_f32(value), total);
    }
    v.store(total, sum);
}

/// Element `at` of a cell's 16 rows; `offset` is what codes are less ([`super::centre`]).
#[inline(always)]
fn weights<V: Integers, C: Codes, S: Scales>(v: V, offset: i32, cell: Cell<'_>, at: usize) -> V::F {
    let (g, step, byte) = (at / 32, at % 32 / 4, at % 4);
    let (group, scales) = (&cell.codes[g * C::BYTES..][..C::BYTES], &cell.scales[g * S::BYTES..][..S::BYTES]);
    let mut codes = [0u8; 4 * LANES];
    v.store_bytes(C::read_at(v, group, step), &mut codes);
    let words: &[i32; LANES] = bytemuck::cast_ref(&codes);
    // Beside a minimum in the upper 16 bits of a scale stands a one.
    let code = words.map(|word| (word >> (8 * byte) & 0xff) - offset);
    let code = v.load_i32(&if S::PAIRS { code.map(|code| 1 << 16 | code & 0xffff) } else { code });
    if !S::INTEGERS {
        return v.mul(v.halves(scales), v.float(code));
    }
    let (scale, min) = S::read(v, scales, step * S::SUBS / 8);
    let d = v.halves(cell.shared);
    if S::WORDS {
        return v.mul(d, v.float(v.add_pairs(code, scale, v.splat(0))));
    }
    let whole = v.mul(v.mul(d, v.float(scale)), v.float(code)); // The first is exact.
    if S::MIN { v.fnma(v.halves(&cell.shared[2 * LANES..]), v.float(min), whole) } else { whole }
}
