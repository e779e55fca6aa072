//! Not timed yet.

fn main() {}
