//! The multiplexor over sockets. Tests that measure or limit the whole process are separate binaries.

mod clients;
mod hand_over;
mod passed;
mod peers;
mod retry;
mod sockets;
#[cfg(feature = "tokio")]
mod stream;
#[cfg(feature = "tls")]
mod tls;
#[cfg(feature = "tls")]
mod tls_clients;
mod tls_kernel;
mod worker_api;
mod write_space;
mod zerocopy;
