//! Hook for zero-copy sends. They use the socket's error queue and keep the sent bytes until the kernel
//! completes them.

use std::fmt;
use std::os::fd::BorrowedFd;

use crate::mux::{Outcome, Transmit};

/// Opens zero-copy senders for connections.
pub trait ZerocopySenders: fmt::Debug + Send + Sync {
    /// Minimum size of a message that opens a connection's zero-copy sender. Shorter messages are sent by
    /// sendmsg(2) until then.
    fn min_bytes(&self) -> usize;

    /// Opens the sender of a connection without TLS. `None`: not supported. Called once per connection. The
    /// sender duplicates the descriptor if it needs the socket for longer.
    fn open(&self, socket: BorrowedFd<'_>) -> Option<Box<dyn ZerocopySender>>;
}

/// Zero-copy sender of one connection. Dropped when the connection has ended.
pub trait ZerocopySender: fmt::Debug + Send {
    /// Sends as much of `transmit` as the socket accepts and advances it. Never blocks. The rest is passed
    /// again.
    fn write(&mut self, transmit: &mut Transmit) -> Outcome;

    /// Sends copies from here on. Returns true if no send is in flight and nothing waits here: then the sender does not use the socket
    /// any more, is not called again, and leaves the connection open when it is dropped. Default: false; the connection then
    /// cannot be handed over to another process.
    fn release(&mut self) -> bool {
        false
    }

    /// Handles EPOLLERR. Returns true if the error queue is empty; otherwise it is called again, because
    /// epoll reports once (EPOLLET).
    ///
    /// # Errors
    ///
    /// Returns the error number if the socket is broken and the queue had nothing else.
    fn handle_error_queue(&mut self) -> Result<bool, i32>;
}
