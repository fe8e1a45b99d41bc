//! The model of the states, the harness that compares the table with it, and the loom tests.

#[cfg(all(test, loom))]
mod interleavings;
pub mod model;
pub mod ops;
