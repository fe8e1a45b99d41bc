//! The packet path of Towpath: packets from ports through the gate, to inspectors on rings, and out again.
#![forbid(unsafe_code)]

pub mod capture_clock;
pub mod conversations;
pub mod egress;
mod engine;
pub mod flow_verdict;
pub mod queue;
pub mod reorder;
pub mod router;

pub use engine::*;
