//! CUDA lowering.
use super::spec::Variant;
/// CUDA C++ text.
pub fn cuda_source(_variant: &Variant) -> String {
    String::new()
}
