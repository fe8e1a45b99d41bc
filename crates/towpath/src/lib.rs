//! The engine of Towpath: packets from ports through the gate, to inspectors on rings, and out again.
//!
//! The command line `towpath` is a thin layer over this library.
#![forbid(unsafe_code)]

pub mod config;
pub mod control;
pub mod daemon;
pub mod eventfd;
pub mod exit;
pub mod framing;
pub mod inspector;
pub mod metrics;
pub mod output;
pub mod report;
pub mod ruleset_manager;
pub mod settings;
pub mod snapshot;
pub mod streams;
pub mod worker_pool;
