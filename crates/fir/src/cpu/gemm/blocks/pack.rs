//! The packed form of block-quantized weights.
//!
//! Sixteen weight rows are a panel, and 256 elements of each a cell (fewer at the end of rows of small blocks). A cell
//! holds the codes, group by group of 32 elements, then the groups' scales, then what the whole cell shares:
//!
//! ```text
//! codes   per group: low plane, 64 * LOW bytes; high plane, 64 * HIGH bytes
//! scales  per group: f16 d[16]                   Q8_0
//!                    i16 d[16], or (d, m)[16]    the other blocks of 32, in steps (`Steps`), m that of the middle code
//!                    f16 d[16] (m[16])           the same, to be dequantized
//!                    i8 sc[16] (u8 min[16])      blocks of 256, one scale per 32
//!                    i8 sc[16] sc[16]            two scales per 32; with minima, both in a byte's nibbles
//! shared  f16 d[16] (dmin[16])                   blocks of 256
//!         f16 step[16]                           blocks of 32 in steps
//! ```
//!
//! A group's codes are eight vectors of 64 bytes, in each 4 elements of 16 rows: what one instruction multiplies. The low
//! bits of vector `i` stand in bits `LOW * (i % (8 / LOW))` of vector `i / (8 / LOW)` of the low plane, so one shift and
//! one mask bring them out; high bits likewise.
//!
//! Scales of 6 bits take a byte: the form is larger than the file's by 2.8 % (Q4_K), 2.3 % (Q5_K), 3.6 % (Q3_K) and
//! 1.5 % (IQ4_XS), with steps by 1.0 to 1.4 %, and as large in the other formats.

use crate::cpu::exec::Cpu;
use crate::error::{Error, Result};
use crate::tensor::{BlockFields, BlockFormat, DType, Place, Steps, Tensor, f16};

/// Weight rows per panel.
pub(super) const LANES: usize = 16;
/// Elements along `k` per cell, and per scale of the activations.
pub(super) const SUPER: usize = 256;
/// Elements along `k` per group.
pub(super) const GROUP: usize = 32;

/// A format in its packed form.
#[derive(Clone, Copy)]
struct Form {
    format: BlockFormat,
    /// Whether scales are in steps.
    steps: bool,
}

/// Bytes of the three parts of a cell: of a group's codes, of a group's scales, of what all share.
const fn parts(Form { format, steps }: Form) -> [usize; 3] {
    let (low, high) = format.bits();
    let mins = if format.has_min() { 2 } else { 1 };
    let codes = 4 * LANES * (low + high);
    match format {
        BlockFormat::Q2K => [codes, 2 * LANES, 4 * LANES],
        _ if format.elements() == GROUP => [codes, 2 * LANES * mins, if steps { 2 * LANES } else { 0 }],
        _ => [codes, GROUP / format.sub() * LANES * mins, 2 * LANES * mins],
    }
}

/// Bytes of a cell of some groups.
const fn cell_bytes(form: Form, groups: usize) -> usize {
    let [codes, scales, shared] = parts(form);
    groups * (codes + scales) + shared
}

/// Weights `[n, k]` in the order the kernel reads.
pub(crate) struct Packed {
    form: Form,
    n: usize,
    k: usize,
    /// `[panels, bytes of a panel]`; rows past `n` are zeros.
    data: Tensor,
}

/// 256 elements, or the last ones, of the 16 rows of a panel.
#[derive(Clone, Copy)]
pub(super) struct Cell<'a> {
    /// Groups of 32 elements.
    pub(super) groups: usize,
    pub(super) codes: &'a [u8],
    pub(super) scales: &'a [u8],
    pub(super) shared: &'a [u8],
}

impl Packed {
    /// Weight rows that lie together.
    pub(crate) const ROWS: usize = LANES;

    /// Packs with the threads of `cpu`, or with this one: for products, or as they are, to be dequantized.
    pub(crate) fn new(
        cpu: Option<&Cpu>,
        op: &'static str,
        format: BlockFormat,
        data: &[u8],
        [n, k]: [usize; 2],
        products: bool,
    ) -> Result<Self> {
        let form = Form { format, steps: products && format.is_stepped() };
        let row_bytes = format.row_bytes(op, k)?;
        if n.checked_mul(row_bytes) != Some(data.len()) {
            let want = format!("{n} rows of {row_bytes} bytes ({k} elements of {format})");
            return Err(Error::value(op, "data.len()", data.len(), want));
        }
        // `k` is bounded by the data now, unless there is none.
        let bytes = if n == 0 { 0 } else { panel_bytes(form, k) };
        let mut packed = Tensor::zeros(DType::U8, &[n.div_ceil(LANES), bytes])?;
        if bytes > 0 {
            let panels = packed.as_mut_slice::<u8>()?.chunks_exact_mut(bytes);
            let parts: Vec<_> = panels.zip(data.chunks(LANES * row_bytes)).collect();
            let pack = |(out, rows): (&mut [u8], &[u8])| pack_panel(form, rows, row_bytes, out);
            match cpu {
                Some(cpu) => cpu.pool().scatter(parts, pack),
                None => parts.into_iter().for_each(pack),
            }
        }
        Ok(Self { form, n, k, data: packed })
    }

    pub(crate) fn format(&self) -> BlockFormat {
        self.form.format
    }

    pub(crate) fn n(&self) -> usize {
        self.n
    }

    pub(crate) fn k(&self) -> usize {
        self.k
    }

    /// Where the panels are.
    pub(crate) fn place(&self) -> Place {
        self.data.place()
    }

    /// Bytes of all panels.
    pub(crate) fn bytes(&self) -> usize {
        self.data.view().layout().len()
    }

    /// `[panels, bytes of a panel]`
    #[cfg(feature = "cuda")]
    pub(crate) fn data(&self) -> &Tensor {
        &self.data
    }

    /// The same weights in other memory.
    #[cfg(feature = "cuda")]
    pub(crate) fn with_data(self, data: Tensor) -> Self {
        Self { data, ..self }
    }

    /// Bytes of 256 columns of a panel.
    #[cfg(feature = "cuda")]
    pub(crate) fn cell_bytes(&self) -> usize {
        cell_bytes(self.form, SUPER / GROUP)
    }

    /// The bytes of panel `p`.
    pub(super) fn panel(&self, p: usize) -> &[u8] {
        let bytes = panel_bytes(self.form, self.k);
        &self.data.as_slice::<u8>().expect("bytes")[p * bytes..][..bytes]
    }

    /// The bytes of cell `s` of a panel.
    #[inline(always)]
    pub(super) fn bytes_of<'a>(&self, panel: &'a [u8], s: usize) -> &'a [u8] {
        &panel[s * cell_bytes(self.form, SUPER / GROUP)..][..cell_bytes(self.form, self.groups(s))]
    }

    /// Cell `s` of a panel.
    #[inline(always)]
    pub(super) fn cell<'a>(&self, panel: &'a [u8], s: usize) -> Cell<'a> {
        let (groups, [codes, scales, _]) = (self.groups(s), parts(self.form));
        let (codes, rest) = self.bytes_of(panel, s).split_at(groups * codes);
        let (scales, shared) = rest.split_at(groups * scales);
        Cell { groups, codes, scales, shared }
    }

    /// Groups of cell `s`.
    #[inline(always)]
    fn groups(&self, s: usize) -> usize {
        ((self.k - s * SUPER) / GROUP).min(SUPER / GROUP)
    }
}

/// Bytes of a panel, a multiple of a cache line.
fn panel_bytes(form: Form, k: usize) -> usize {
    let rest = k % SUPER / GROUP;
    let last = if rest > 0 { cell_bytes(form, rest) } else { 0 };
    (k / SUPER * cell_bytes(form, SUPER / GROUP) + last).next_multiple_of(64)
}

/// Packs up to 16 rows.
fn pack_panel(form: Form, rows: &[u8], row_bytes: usize, out: &mut [u8]) {
    let (format, [code_bytes, scale_bytes, _]) = (form.format, parts(form));
    let mut blocks = [BlockFields::ZERO; LANES];
    // Blocks of 32 elements: `from` counts the groups of a cell, which are blocks; else there is one block per cell.
    let blocks_per_cell = SUPER / format.elements();
    let row_blocks = row_bytes / format.bytes();
    let (mut cell_at, mut first) = (0, 0);
    while first < row_blocks {
        let count = blocks_per_cell.min(row_blocks - first);
        let groups = count * format.elements() / GROUP;
        let cell = &mut out[cell_at..][..cell_bytes(form, groups)];
        cell_at += cell.len();
        let (codes, rest) = cell.split_at_mut(groups * code_bytes);
        let (scales, shared) = rest.split_at_mut(groups * scale_bytes);
        let mut halves = [[(f16::ZERO, f16::ZERO); LANES]; SUPER / GROUP];
        for b in 0..count {
            for (block, row) in blocks.iter_mut().zip(rows.chunks_exact(row_bytes)) {
                block.read(format, &row[(first + b) * format.bytes()..][..format.bytes()]);
            }
            let block_groups = format.elements() / GROUP;
            let codes = &mut codes[b * code_bytes..][..block_groups * code_bytes];
            pack_codes(format, &blocks, codes);
            let scales = &mut scales[b * scale_bytes..][..block_groups * scale_bytes];
            if form.steps {
                halves[b] = blocks.map(|block| (block.d, block.m));
            } else if format.elements() == GROUP {
                pack_halves(format, &blocks, scales);
            } else {
                pack_halves(format, &blocks, shared);
                pack_scales(format, &blocks, scales);
            }
        }
        if form.steps {
            pack_steps(format, &halves[..count], scales, shared);
        }
        first += count;
    }
}

/// Scales and minima of 16 rows of a cell, `[blocks, rows]`, in steps.
fn pack_steps(format: BlockFormat, halves: &[[(f16, f16); LANES]], scales: &mut [u8], shared: &mut [u8]) {
    let each = if format.has_min() { 4 } else { 2 };
    for n in 0..LANES {
        let mut row = [(f16::ZERO, f16::ZERO); SUPER / GROUP];
        for (row, halves) in row.iter_mut().zip(halves) {
            *row = halves[n];
        }
        let steps = Steps::new(format, &row[..halves.len()]);
        shared[2 * n..][..2].copy_from_slice(&steps.step.to_le_bytes());
        for (b, out) in scales.chunks_exact_mut(each * LANES).enumerate() {
            let (out, d) = (&mut out[each * n..][..each], steps.d[b]);
            out[..2].copy_from_slice(&d.to_le_bytes());
            if format.has_min() {
                // Between those of the first code and of the last, so within 16 bits.
                let middle = (i32::from(steps.m[b]) + super::centre(format) * i32::from(d)) as i16;
                out[2..].copy_from_slice(&middle.to_le_bytes());
            }
        }
    }
}

/// `d`, then the minima's, of 16 blocks.
fn pack_halves(format: BlockFormat, blocks: &[BlockFields; LANES], out: &mut [u8]) {
    for (n, block) in blocks.iter().enumerate() {
        out[2 * n..][..2].copy_from_slice(&block.d.to_le_bytes());
        if format.has_min() {
            out[2 * (LANES + n)..][..2].copy_from_slice(&block.m.to_le_bytes());
        }
    }
}

/// Integer scales and minima of 16 blocks.
fn pack_scales(format: BlockFormat, blocks: &[BlockFields; LANES], out: &mut [u8]) {
    let nibbles = format.has_min() && format.sub() < GROUP;
    let each = if format.has_min() && !nibbles { 2 * LANES } else { LANES };
    for (j, out) in out.chunks_exact_mut(each).enumerate() {
        for (n, block) in blocks.iter().enumerate() {
            let (scale, min) = (block.scales[j] as u8, block.mins[j]);
            out[n] = if nibbles { scale | min << 4 } else { scale };
            if each > LANES {
                out[LANES + n] = min;
            }
        }
    }
}

/// Codes of 16 blocks, group by group.
fn pack_codes(format: BlockFormat, blocks: &[BlockFields; LANES], out: &mut [u8]) {
    let (low, high) = format.bits();
    let mask = |bits: usize| (((1u16 << bits) - 1) as u32) * 0x0101_0101;
    out.fill(0);
    for (g, out) in out.chunks_exact_mut(4 * LANES * (low + high)).enumerate() {
        let (low_plane, high_plane) = out.split_at_mut(4 * LANES * low);
        for i in 0..GROUP / 4 {
            let put = |plane: &mut [u8], from: usize, bits: usize| {
                let (vector, shift) = (i * bits / 8, i * bits % 8);
                let words = plane[4 * LANES * vector..][..4 * LANES].chunks_exact_mut(4);
                for (word, block) in words.zip(blocks) {
                    let word: &mut [u8; 4] = word.try_into().expect("4 bytes");
                    // Four codes at once: no code's bits reach the next byte.
                    let codes = block.codes[g * GROUP + 4 * i..].first_chunk().expect("4 codes");
                    let field = (u32::from_le_bytes(*codes) >> from & mask(bits)) << shift;
                    *word = (u32::from_le_bytes(*word) | field).to_le_bytes();
                }
            };
            put(low_plane, 0, low);
            if high > 0 {
                put(high_plane, low, high);
            }
        }
    }
}
