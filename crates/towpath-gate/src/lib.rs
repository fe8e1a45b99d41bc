//! The decision about every packet: ipfw rules with dynamic states.
//!
//! No descriptor, no clock, no thread: bytes and a [`Time`](towpath_wire::Time) go in, a decision comes out.
// `unsafe` is in `state/table/memory.rs` only, which has the memory of the states.
#![deny(unsafe_code)]
// `cfg(loom)` swaps the atomics for those of a model checker; the manifest of a workspace member cannot declare it.
#![allow(unexpected_cfgs)]

pub mod gate;
pub mod reassembly;
pub mod rules;
pub mod state;

pub use gate::Gate;
