//! The operators with arguments decoded from bytes; see `fir::testing::hostile`. Run by `cargo xtask fuzz [minutes]`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    // Accepted or refused: both are fine. A panic or a sanitizer's report is not.
    let _ = fir::testing::hostile::call(data);
});
