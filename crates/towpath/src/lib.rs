//! The library of the `towpath` program: configuration, the daemon and its worker threads, the control protocol, the mux's worker pool,
//! reports and metrics.
//!
//! The packet path is in the crate `towpath-engine`. The commands are in `main.rs` and `cli/`, a thin layer over this library.
#![forbid(unsafe_code)]

mod background;
pub mod config;
pub mod control;
pub mod daemon;
pub mod doctor;
pub mod eventfd;
pub mod events;
pub mod exit;
pub mod explained;
pub mod fleet;
pub mod framing;
pub mod inspector;
pub mod ipfix;
pub mod leftovers;
pub mod logging;
pub mod metrics;
pub mod mux_bounds;
pub mod offload;
pub mod output;
pub mod packet_log;
pub mod process;
pub mod quantity;
#[cfg(feature = "fleet")]
pub mod remote_workers;
pub mod report;
pub mod ruleset_manager;
pub mod sandbox;
pub mod service_manager;
pub mod settings;
pub mod snapshot;
pub mod state_feed;
pub mod streams;
pub mod top;
pub mod upgrade;
pub mod worker_pool;
