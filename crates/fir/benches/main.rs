//! Benches: a file per operator, one binary. `cargo xtask bench [part of a name]` runs them; `cargo test --bench ops`
//! only lets each check its result.
#![allow(clippy::print_stdout, reason = "benches report on stdout")]

mod harness;
mod norm;

fn main() {
    let mut bench = harness::Bench::from_args();
    norm::benches(&mut bench);
    bench.finish();
}
