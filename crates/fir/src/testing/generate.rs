//! Random inputs from a seed.

use crate::tensor::{DType, Tensor};

/// A small seeded generator (splitmix64); the same seed gives the same values everywhere.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// A generator of its own sequence.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in `0..n`; 0 when `n` is 0.
    pub fn below(&mut self, n: usize) -> usize {
        if n == 0 { 0 } else { (self.bits() % n as u64) as usize }
    }

    /// Uniform in `[0, 1)`.
    pub fn uniform(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1u64 << 24) as f32
    }

    /// Nearly normal: mean 0, variance 1.
    pub fn normal(&mut self) -> f32 {
        // Sum of 12 uniforms: bounded by 6, which keeps low-precision inputs finite.
        (0..12).map(|_| self.uniform()).sum::<f32>() - 6.0
    }

    /// `n` nearly normal values.
    pub fn normals(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.normal()).collect()
    }

    /// A tensor of nearly normal values, rounded to `dtype` (a float type other than fp4).
    ///
    /// # Panics
    /// If `dtype` is no such type or the shape does not fit: a fault of the test.
    pub fn tensor(&mut self, dtype: DType, shape: &[usize]) -> Tensor {
        let data = self.normals(shape.iter().product());
        Tensor::from_f32(dtype, &data, shape).expect("a float tensor")
    }
}
