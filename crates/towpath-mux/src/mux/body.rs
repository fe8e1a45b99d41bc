//! Bytes to send: owned by the mux, or leased from a worker.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};

/// Bodies up to this size share memory with others (a block of copied replies, a read buffer). One of them
/// keeps all of that memory, but only its own bytes are counted. Joined bodies have at most this size.
const SHORT: usize = 16 << 10;

/// Bytes in memory that another process may change at any time. This crate does not read them. They are
/// released on drop.
///
/// A [`ZerocopySender`](crate::io::ZerocopySender) that supports the type has the kernel send them in place.
/// They are copied for all other ways of sending.
pub trait Lease: Any + fmt::Debug + Send + Sync {
    /// Number of bytes.
    fn len(&self) -> usize;

    /// Returns true if there are none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Copies the current bytes.
    fn copy(&self) -> Bytes;
}

/// Bytes to send.
#[derive(Clone, Debug)]
pub enum Body {
    /// Immutable bytes.
    Bytes(Bytes),
    /// Leased bytes.
    Leased(Arc<dyn Lease>),
}

impl Body {
    /// Number of bytes.
    pub fn len(&self) -> usize {
        match self {
            Self::Bytes(bytes) => bytes.len(),
            Self::Leased(leased) => leased.len(),
        }
    }

    /// Returns true if there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The bytes; empty for leased ones, which the caller [copies](Self::copy_leased) first.
    pub(super) fn bytes(&self) -> &[u8] {
        match self {
            Self::Bytes(bytes) => bytes,
            Self::Leased(_) => &[],
        }
    }

    /// Copies short bytes into separate memory, because the time until they are sent is unbounded.
    pub(super) fn own(&mut self) {
        if let Self::Bytes(bytes) = self
            && bytes.len() <= SHORT
        {
            *bytes = Bytes::copy_from_slice(bytes);
        }
    }

    /// Appends a copy of other bytes. Returns false if the sum would be long, or if one of them is leased.
    pub(super) fn append(&mut self, more: &Self) -> bool {
        let (Self::Bytes(bytes), Self::Bytes(more)) = (self, more) else { return false };
        if bytes.len() + more.len() > SHORT {
            return false;
        }
        let mut joined = std::mem::take(bytes).try_into_mut().unwrap_or_else(|shared| {
            let mut copy = BytesMut::with_capacity(2 * (shared.len() + more.len()));
            copy.extend_from_slice(&shared);
            copy
        });
        joined.extend_from_slice(more);
        *bytes = joined.freeze();
        true
    }

    pub(super) fn copy_leased(&mut self) {
        if let Self::Leased(leased) = self {
            *self = Self::Bytes(leased.copy());
        }
    }

    pub(super) fn into_bytes(self) -> Bytes {
        match self {
            Self::Bytes(bytes) => bytes,
            Self::Leased(leased) => leased.copy(),
        }
    }
}

impl From<Bytes> for Body {
    fn from(bytes: Bytes) -> Self {
        Self::Bytes(bytes)
    }
}
