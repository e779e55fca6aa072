//! The operators: public functions and plans with their docs, checks and dispatch.

pub mod norm;
pub mod page;
pub mod rope;
