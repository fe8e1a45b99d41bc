//! Another way for bytes to leave than sendmsg(2): a hook for sends without a copy, which need a socket's error queue and keep
//! what was sent until the kernel is done with it.

use std::fmt;
use std::os::fd::BorrowedFd;

use crate::mux::{Outcome, Transmit};

/// Whoever has that other way.
pub trait ZerocopySenders: fmt::Debug + Send + Sync {
    /// Messages that are shorter are written as ever, until the first that is not.
    fn min_bytes(&self) -> usize;

    /// The way for this connection, which has no TLS; none when there is none. It is asked once, and keeps a descriptor of its own
    /// for as long as it needs the socket.
    fn open(&self, socket: BorrowedFd<'_>) -> Option<Box<dyn ZerocopySender>>;
}

/// The way of one connection. It is dropped when the connection has ended.
pub trait ZerocopySender: fmt::Debug + Send {
    /// Hands over as much of `transmit` as the socket takes, and advances it by that. Never blocks. What it said it could not hand
    /// over comes again.
    fn write(&mut self, transmit: &mut Transmit) -> Outcome;

    /// The socket's error queue has something (EPOLLERR). Whether it was emptied: if not, this is called again, since epoll says it
    /// once only (EPOLLET).
    ///
    /// # Errors
    ///
    /// The error number of a socket that is broken: there was nothing in the queue but that.
    fn handle_error_queue(&mut self) -> Result<bool, i32>;
}
