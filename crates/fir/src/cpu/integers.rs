//! Sixteen lanes of bytes, i32 and f32 at every level: what products of quantized numbers are written over.
//!
//! A vector of [`super::vector::Vector`] has as many lanes as the CPU; here the number is fixed, as it is the width of a
//! packed panel. Every operation is exact or rounds once, so all levels give the same bits.

/// Words from a row of quantized activations to the next.
pub(crate) const PITCH: usize = 96;

/// A kernel on sixteen lanes, to be run at some level.
pub(crate) trait IntKernel {
    /// What it returns.
    type Out;
    /// The algorithm. Implementations are `#[inline(always)]`.
    fn run<V: Integers>(self, v: V) -> Self::Out;
}

/// A set of instructions on sixteen lanes. The value is the proof that this CPU has them.
///
/// Loads and stores take slices of at least as many elements as they touch and panic on shorter ones.
pub(crate) trait Integers: Copy + Send + Sync + 'static {
    /// Rows of one pass over a panel: as many as there are registers for their sums.
    const ROWS: usize;
    /// Whether a CPU with these instructions may have AMX.
    const TILES: bool = false;
    /// Whether products are of 16 bits before they are of 32: then only so many add up on their way, and [`Self::dots`] takes wide
    /// codes less 128.
    const SIXTEEN_BITS: bool = false;
    /// Four bytes in each of sixteen lanes.
    type B: Copy;
    /// Sixteen i32.
    type I: Copy;
    /// Sums of products on their way to sixteen i32, where these take more than one instruction.
    type P: Copy;
    /// Sixteen f32.
    type F: Copy;

    /// 64 bytes.
    fn bytes(self, x: &[u8]) -> Self::B;
    fn store_bytes(self, x: Self::B, out: &mut [u8]);
    /// `(x >> right << left) & mask` of every byte.
    fn field(self, x: Self::B, right: u32, left: u32, mask: u8) -> Self::B;
    fn or(self, a: Self::B, b: Self::B) -> Self::B;
    /// `x - by` of every byte, wrapping.
    fn sub_bytes(self, x: Self::B, by: u8) -> Self::B;
    /// `h`, signed bytes, and `l`, unsigned ones, with `256 * h + l = scale * x + base`, which must fit into 16 bits, for unsigned bytes
    /// `x` and the lower 16 bits of `scale` and `base`.
    fn scaled(self, x: Self::B, scale: Self::I, base: Self::I) -> (Self::B, Self::B);
    /// Entry `x` of `table`, for bytes below 16.
    fn lookup(self, table: &[u8; 16], x: Self::B) -> Self::B;
    /// No products.
    fn none(self) -> Self::P;
    /// Adds to each lane of `sums[r]`, or on the way to it to `on_way[r]`, the product of its four bytes, unsigned (but see
    /// [`Self::SIXTEEN_BITS`]), and the four signed bytes, none of them -128, of `a[r * PITCH]`. Exact, for any `q` if `wide`, else
    /// for those below 128, as long as no more products are on their way than 16 bits hold: 32767 / 254 over the largest `q`.
    fn dots<const R: usize>(
        self,
        wide: bool,
        sums: &mut [Self::I; R],
        on_way: &mut [Self::P; R],
        q: Self::B,
        a: &[i32],
    );
    /// Adds what is on its way.
    fn settle<const R: usize>(self, sums: &mut [Self::I; R], on_way: &mut [Self::P; R]);
    /// Adds what is on its way times the lower 16 bits of `scale`.
    fn settle_scaled<const R: usize>(self, sums: &mut [Self::I; R], on_way: &mut [Self::P; R], scale: Self::I);

    fn splat(self, x: i32) -> Self::I;
    fn load_i32(self, x: &[i32]) -> Self::I;
    /// 16 signed bytes.
    fn signed(self, x: &[u8]) -> Self::I;
    /// Bits of 16 bytes: `(x >> right) & mask`.
    fn unsigned(self, x: &[u8], right: u32, mask: i32) -> Self::I;
    /// 16 numbers of 16 bits, with zeros above them.
    fn words(self, x: &[u8]) -> Self::I;
    /// `a * b + c`, which must fit.
    fn mul_add(self, a: Self::I, b: Self::I, c: Self::I) -> Self::I;
    /// `a * b + c` of the upper and of the lower signed 16 bits of `a` and `b`, wrapping.
    fn add_pairs(self, a: Self::I, b: Self::I, c: Self::I) -> Self::I;
    /// `x` with bit 15 changed.
    fn flip(self, x: Self::I) -> Self::I;

    fn splat_f32(self, x: f32) -> Self::F;
    /// 16 numbers of f16, in 32 bytes.
    fn halves(self, x: &[u8]) -> Self::F;
    fn load(self, x: &[f32]) -> Self::F;
    fn store(self, x: Self::F, out: &mut [f32]);
    /// Nearest f32, ties to even.
    fn float(self, x: Self::I) -> Self::F;
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`, rounded once, at every level.
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// `c - a * b`, rounded once, at every level.
    fn fnma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
}
