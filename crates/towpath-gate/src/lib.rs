//! The decision about every packet: ipfw rules with dynamic states.
//!
//! No descriptor, no clock, no thread: bytes and a [`Time`] go in, a decision comes out.
#![forbid(unsafe_code)]

mod time;

pub mod gate;
pub mod packet;
pub mod reassembly;
pub mod rules;
pub mod state;
pub mod wire;

pub use gate::Gate;
pub use packet::Packet;
pub use time::Time;
