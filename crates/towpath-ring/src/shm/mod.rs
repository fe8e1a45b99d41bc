//! Shared memory: its byte layout, its mappings, and the primitives both sides use on it.

pub(crate) mod abi;
#[cfg(not(loom))]
pub(crate) mod cpu;
pub(crate) mod geometry;
pub(crate) mod header;
pub(crate) mod park;
pub(crate) mod region;
pub(crate) mod seq;
pub(crate) mod sync;
#[cfg(not(loom))]
pub(crate) mod sys;
