//! The subjects of measurements.

pub(crate) mod fleet;
pub(crate) mod framing;
pub(crate) mod gate;
mod gate_changes;
mod gate_saves;
pub(crate) mod instructions;
pub(crate) mod live;
pub(crate) mod mux;
pub(crate) mod nfqueue;
pub(crate) mod offload;
pub(crate) mod replay;
pub(crate) mod ring;
pub(crate) mod rows;
pub(crate) mod send;
pub(crate) mod sweep;
