//! AMX's instructions, one by one, for tests on CPUs without them (feature `testing`, [`env::FIR_EMULATE_TILES`]).
//!
//! Such a CPU raises `SIGILL` at each; the handler here does what the instruction would and goes on behind it, a microsecond or
//! two later. So the level's kernels are tested as they are, with the vectors of this CPU. What the CPU would refuse, as
//! tiles that are not configured or whose shapes do not fit, ends the process here too.

use std::arch::asm;
use std::arch::x86_64::*;
use std::cell::UnsafeCell;
use std::ffi::c_void;

use crate::env;

/// Rows of 64 bytes, of which the first `rows` are used and of those the first `bytes`; the rest are zeros.
#[derive(Clone, Copy)]
struct Tile {
    rows: usize,
    bytes: usize,
    data: Rows,
}

/// Without rows.
const NONE: Tile = Tile { rows: 0, bytes: 0, data: [[0; 64]; 16] };

type State = [Tile; 8];

type Rows = [[u8; 64]; 16];

thread_local! {
    /// Without a destructor and with a constant, so that a handler may touch it first.
    static STATE: UnsafeCell<State> = const { UnsafeCell::new([NONE; 8]) };
}

/// Whether tests asked for tiles on a CPU that lacks them; if so, from now on it has them, as far as one can see.
pub(crate) fn tiles() -> bool {
    let asked = matches!(env::read::<u8>(env::FIR_EMULATE_TILES, "0 or 1"), Ok(Some(1)));
    asked && is_x86_feature_detected!("avx512bw") && install()
}

fn install() -> bool {
    // SAFETY: all zeros are a valid `sigaction`, whose fields are then set as the call wants them; the handler allocates
    // nothing, takes no lock and leaves what it does not know to the default action.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO;
        libc::sigaction(libc::SIGILL, &action, std::ptr::null_mut()) == 0
    }
}

/// The general registers by their number in an instruction.
const REGISTERS: [i32; 16] = [
    libc::REG_RAX,
    libc::REG_RCX,
    libc::REG_RDX,
    libc::REG_RBX,
    libc::REG_RSP,
    libc::REG_RBP,
    libc::REG_RSI,
    libc::REG_RDI,
    libc::REG_R8,
    libc::REG_R9,
    libc::REG_R10,
    libc::REG_R11,
    libc::REG_R12,
    libc::REG_R13,
    libc::REG_R14,
    libc::REG_R15,
];

extern "C" fn handler(signal: i32, _: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: the system hands a handler with `SA_SIGINFO` the interrupted thread's context, and the instruction that was
    // refused is readable; no other reference to this thread's state lives, as only this function makes one.
    unsafe {
        let registers = &mut (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs;
        let at = registers[libc::REG_RIP as usize] as *const u8;
        let state = &mut *STATE.with(UnsafeCell::get);
        match Instruction::decode(at, registers).and_then(|i| i.run(state).then_some(i.len)) {
            Some(len) => registers[libc::REG_RIP as usize] += len as i64,
            // Met again on return, it ends the process.
            None => _ = libc::signal(signal, libc::SIG_DFL),
        }
    }
}

struct Instruction {
    /// Prefix (0 none, 1 `66`, 2 `F3`, 3 `F2`) and opcode.
    what: (u8, u8),
    reg: usize,
    /// The second source.
    third: usize,
    /// The first source, of instructions between tiles.
    rm: Option<usize>,
    /// Address and distance of rows.
    place: (usize, usize),
    len: usize,
}

impl Instruction {
    /// # Safety
    /// At `at` is an instruction, all of it readable.
    unsafe fn decode(at: *const u8, registers: &[i64; 23]) -> Option<Self> {
        // SAFETY: as promised; only bytes that belong to an instruction of this form are read.
        let byte = |i: usize| unsafe { *at.add(i) };
        // Three bytes of prefix with the map of opcodes 0F38.
        if byte(0) != 0xc4 || byte(1) & 0x1f != 2 {
            return None;
        }
        let (high, vector, modrm) = (!byte(1) >> 5, byte(2), byte(4));
        let low = (modrm & 7) as usize;
        let mut i = Self {
            what: (vector & 3, byte(3)),
            reg: (modrm >> 3 & 7) as usize,
            third: (!vector >> 3 & 7) as usize,
            rm: None,
            place: (0, 0),
            len: 5,
        };
        if modrm >> 6 == 3 {
            i.rm = Some(low);
            return Some(i);
        }
        let value = |number: usize| registers[REGISTERS[number] as usize] as usize;
        let mut base = low | (high as usize & 1) << 3;
        if low == 4 {
            let sib = byte(5);
            i.len += 1;
            base = (sib & 7) as usize | (high as usize & 1) << 3;
            let index = (sib >> 3 & 7) as usize | (high as usize >> 1 & 1) << 3;
            // Number 4 is no index.
            i.place.1 = if index == 4 { 0 } else { value(index) << (sib >> 6) };
        }
        let mut start = value(base);
        match modrm >> 6 {
            // Relative to the instruction, or an address without a base: the compiler makes neither here.
            0 if base & 7 == 5 => return None,
            0 => {}
            1 => {
                start = start.wrapping_add_signed(byte(i.len) as i8 as isize);
                i.len += 1;
            }
            _ => {
                let far = i32::from_le_bytes(std::array::from_fn(|k| byte(i.len + k)));
                start = start.wrapping_add_signed(far as isize);
                i.len += 4;
            }
        }
        i.place.0 = start;
        Some(i)
    }

    /// Whether it is known and may run now.
    ///
    /// # Safety
    /// The memory it names may be read, or written, as the CPU would.
    unsafe fn run(&self, state: &mut State) -> bool {
        let (start, apart) = self.place;
        let row = |i: usize| start.wrapping_add(i.wrapping_mul(apart));
        let tile = &mut state[self.reg];
        // SAFETY: rows lie where the instruction says, which whoever wrote it answers for; `tiles` saw AVX-512.
        unsafe {
            match (self.what, self.rm) {
                ((0, 0x49), None) => {
                    let config = &*(start as *const [u8; 64]);
                    for (t, tile) in state.iter_mut().enumerate() {
                        let bytes = u16::from_le_bytes([config[16 + 2 * t], config[17 + 2 * t]]);
                        *tile = Tile { rows: config[48 + t].into(), bytes: bytes.into(), ..NONE };
                    }
                    return config[0] == 1 && state.iter().all(|t| t.rows <= 16 && t.bytes <= 64);
                }
                ((0, 0x49), Some(0)) => *state = [NONE; 8],
                _ if tile.rows == 0 => return false,
                ((3, 0x49), Some(_)) => tile.data = NONE.data,
                ((1 | 3, 0x4b), None) => {
                    tile.data = NONE.data;
                    for (i, to) in tile.data.iter_mut().take(tile.rows).enumerate() {
                        std::ptr::copy(row(i) as *const u8, to.as_mut_ptr(), tile.bytes);
                    }
                }
                ((2, 0x4b), None) => {
                    for (i, from) in tile.data.iter().take(tile.rows).enumerate() {
                        std::ptr::copy(from.as_ptr(), row(i) as *mut u8, tile.bytes);
                    }
                }
                (what, Some(a)) => {
                    let (c, left, right) = (*tile, state[a], state[self.third]);
                    if [c.rows, c.bytes, left.bytes] != [left.rows, right.bytes, 4 * right.rows] {
                        return false;
                    }
                    // Zeros beyond a tile's shape give zeros.
                    let c = &mut state[self.reg].data;
                    match what {
                        (2, 0x5c) => bf16(c, &left.data, &right.data),
                        (0, 0x5e) => integers(c, (&left.data, false), (&right.data, false)),
                        (1, 0x5e) => integers(c, (&left.data, false), (&right.data, true)),
                        (2, 0x5e) => integers(c, (&left.data, true), (&right.data, false)),
                        (3, 0x5e) => integers(c, (&left.data, true), (&right.data, true)),
                        _ => return false,
                    }
                }
                _ => return false,
            }
        }
        true
    }
}

/// The two numbers of 4 bytes at `4 * k` of a row, in every lane.
#[target_feature(enable = "avx512f,avx512bw")]
fn splat(row: &[u8; 64], k: usize) -> __m512i {
    _mm512_set1_epi32(i32::from_le_bytes(std::array::from_fn(|i| row[4 * k + i])))
}

#[target_feature(enable = "avx512f,avx512bw")]
fn load(row: &[u8; 64]) -> __m512i {
    // SAFETY: 64 bytes are read.
    unsafe { _mm512_loadu_si512(row.as_ptr().cast()) }
}

/// Sums of the products of even elements and of odd ones, added up at the end; subnormals are zeros.
#[target_feature(enable = "avx512f,avx512bw")]
fn bf16(c: &mut Rows, a: &Rows, b: &Rows) {
    // SAFETY: flushes subnormals to zero, in and out; the thread's own setting comes back when the handler returns.
    unsafe { asm!("ldmxcsr [{}]", in(reg) &0x9fc0u32, options(nostack, readonly)) };
    let even = |x| _mm512_castsi512_ps(_mm512_slli_epi32::<16>(x));
    let odd = |x| _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(0xffff_0000u32 as i32)));
    for (c, a) in c.iter_mut().zip(a) {
        let (mut evens, mut odds) = (_mm512_setzero_ps(), _mm512_setzero_ps());
        for (k, b) in b.iter().enumerate() {
            let (x, y) = (splat(a, k), load(b));
            evens = _mm512_fmadd_ps(even(x), even(y), evens);
            odds = _mm512_fmadd_ps(odd(x), odd(y), odds);
        }
        let sum = _mm512_add_ps(_mm512_castsi512_ps(load(c)), _mm512_add_ps(evens, odds));
        // SAFETY: 64 bytes are written.
        unsafe { _mm512_storeu_ps(c.as_mut_ptr().cast(), sum) };
    }
}

/// Sums of four products of bytes each; with each operand, whether its bytes are signed.
#[target_feature(enable = "avx512f,avx512bw")]
fn integers(c: &mut Rows, a: (&Rows, bool), b: (&Rows, bool)) {
    // Bytes as 16 bits, even ones and odd ones.
    let wide = |x: __m512i, signed: bool| {
        let high = _mm512_slli_epi16::<8>(x);
        match signed {
            true => [_mm512_srai_epi16::<8>(high), _mm512_srai_epi16::<8>(x)],
            false => [_mm512_srli_epi16::<8>(high), _mm512_srli_epi16::<8>(x)],
        }
    };
    for (c, row) in c.iter_mut().zip(a.0) {
        let mut sum = load(c);
        for (k, column) in b.0.iter().enumerate() {
            let (x, y) = (wide(splat(row, k), a.1), wide(load(column), b.1));
            for half in 0..2 {
                sum = _mm512_add_epi32(sum, _mm512_madd_epi16(x[half], y[half]));
            }
        }
        // SAFETY: 64 bytes are written.
        unsafe { _mm512_storeu_si512(c.as_mut_ptr().cast(), sum) };
    }
}
