//! `towpath run` between real interfaces: two machines (network namespaces) with the kernel's own TCP, and the engine between
//! them. The received bytes are compared with the sent ones.

mod bridge;
mod drivers;
mod drop_reasons;
mod edits;
mod exclusive;
mod inspectors;
mod losses;
pub(crate) mod machines;
mod mux_kills;
mod mux_upgrade;
mod nfqueue;
mod offload;
mod offload_denied;
mod offload_fail;
mod offload_same;
mod offload_tcp;
mod offload_verdicts;
mod offload_vlan;
mod offload_xdp;
mod refusals;
mod restarts;
mod router;
mod services;
mod upgrade;
mod upgrade_kills;
mod upgrade_ports;
