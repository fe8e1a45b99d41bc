//! The sender over real sockets.

mod checked;
mod example;
mod grpc;
mod offloads;
mod sockets;
mod tokio;
mod uring;
