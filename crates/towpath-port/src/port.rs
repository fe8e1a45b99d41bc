use std::os::fd::BorrowedFd;

use crate::{Burst, Error, Frame};

/// Where packets come from and go to, a burst at a time.
///
/// A driver may do one direction only ([`Port::caps`] says so); the other answers [`Error::Direction`].
pub trait Port: Send {
    /// The name that rules, reports and errors use for this port.
    fn name(&self) -> &str;

    /// What this port can do.
    fn caps(&self) -> Caps;

    /// Clears `burst` and receives as many frames as are there and fit into it.
    ///
    /// Frames that do not fit stay in the port for the next call. A live port does not block: it answers
    /// [`Received::Nothing`], and [`Port::poll_fd`] tells when to come again. A file or a pipe may block while
    /// the burst is empty, never once it holds a frame.
    ///
    /// # Errors
    /// [`Error::Io`] when the medium fails, [`Error::Direction`] when this port only sends. `burst` holds what was
    /// received before the failure.
    fn receive(&mut self, burst: &mut Burst) -> Result<Received, Error>;

    /// Sends frames in order, and returns how many it took.
    ///
    /// The port pulls a frame from the iterator only when it has room for it: what it did not pull is still the
    /// caller's, to send again or to drop and count.
    ///
    /// # Errors
    /// [`Error::Io`] when the medium fails; other variants when a frame cannot be sent by this port at all. The frame
    /// pulled last is then not sent, those before it are.
    fn send<'a>(&mut self, frames: &mut dyn Iterator<Item = Frame<'a>>) -> Result<usize, Error>;

    /// Hands what the port still buffers to the medium.
    ///
    /// # Errors
    /// [`Error::Io`] when the medium fails.
    fn flush(&mut self) -> Result<(), Error> {
        Ok(())
    }

    /// The descriptor to poll before the next [`Port::receive`]; `None` when there is nothing to wait for.
    fn poll_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

/// What a call of [`Port::receive`] brought.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Received {
    /// The burst holds at least one frame.
    Frames,
    /// Nothing is there now; more may come.
    Nothing,
    /// Nothing is there and nothing will come.
    End,
}

/// What a port can do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Caps {
    /// Frames come out of it.
    pub receive: bool,
    /// Frames go into it.
    pub send: bool,
    /// [`Received::End`] can come: a file ends, a link does not.
    pub ends: bool,
    /// Frames bring the time of their arrival with them; otherwise `time_ns` is the moment of [`Port::receive`].
    pub timestamps: bool,
}
