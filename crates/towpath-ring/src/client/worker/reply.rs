//! The answer to a message, and why it could not be sent.

use std::io;

use thiserror::Error;

#[cfg(doc)]
use crate::Worker;
use crate::client::recv_error::RecvError;
use crate::lane::reserve_error::ReserveError;
use crate::shm::header::Kind;

/// The answer to a message in [`Worker::serve`]. Written bytes are appended to it.
#[derive(Debug, Default)]
pub struct Reply {
    /// May begin with the answers to earlier messages.
    pub(super) bytes: Vec<u8>,
    /// End of each answer that waits to be sent, and the number of the frame's messages that were done by then.
    pub(super) ends: Vec<(usize, u32)>,
    /// [`Kind::CLOSE`] or [`Kind::RESET`]: ends the connection after the last answer.
    pub(super) then: Option<Kind>,
}

impl Reply {
    /// Appends these bytes.
    #[inline]
    pub fn extend_from_slice(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// Closes the connection after this answer. See [`Worker::close_after`].
    pub const fn close(&mut self) {
        self.then = Some(Kind::CLOSE);
    }

    /// Resets the connection after this answer was queued. See [`Worker::reset_connection`].
    pub const fn reset(&mut self) {
        self.then = Some(Kind::RESET);
    }

    pub(super) fn clear(&mut self) {
        self.then = None;
        self.bytes.clear();
        self.ends.clear();
    }
}

impl Extend<u8> for Reply {
    fn extend<T: IntoIterator<Item = u8>>(&mut self, bytes: T) {
        self.bytes.extend(bytes);
    }
}

impl io::Write for Reply {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Why [`Worker::serve`] failed.
#[derive(Debug, Error)]
pub enum ServeError {
    /// Receiving failed.
    #[error(transparent)]
    Recv(#[from] RecvError),
    /// An answer was not sent. Its message is done without an answer, except after [`ReserveError::Interrupted`] and
    /// [`ReserveError::RingFull`]: then the next call sends the answer.
    #[error("an answer of {len} bytes: {why}")]
    Reply {
        /// Length of the answer.
        len: usize,
        /// The reason.
        why: ReserveError,
    },
}
