//! `towpath run` between real interfaces: two machines (network namespaces) with the kernel's own TCP, and the engine between
//! them. What arrives is compared byte for byte.

mod bridge;
mod drivers;
mod edits;
mod machines;
mod router;
mod services;
