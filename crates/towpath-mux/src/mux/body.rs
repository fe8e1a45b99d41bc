//! The bytes of a message on its way out: ours, or leased by whoever said it.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use bytes::Bytes;

/// Short answers, which share their memory with others (a block that many of them are copied into, the buffer that a socket was
/// read into): it is all kept for as long as one of them is, and they are counted with their own bytes only.
const SHORT: usize = 16 << 10;

/// Bytes in memory of others, who may change them at any time: nobody here looks at them. They are given back when this is dropped.
///
/// A [`ZerocopySender`](crate::io::ZerocopySender) that knows what they are has the kernel send them from where they lie; for every other way out
/// they are copied first.
pub trait Lease: Any + fmt::Debug + Send + Sync {
    /// How many bytes.
    fn len(&self) -> usize;

    /// Whether there are none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// A copy of what they are now.
    fn copy(&self) -> Bytes;
}

/// What is sent.
#[derive(Clone, Debug)]
pub enum Body {
    /// Bytes that nobody changes.
    Bytes(Bytes),
    /// Bytes of others.
    Leased(Arc<dyn Lease>),
}

impl Body {
    /// How many bytes.
    pub fn len(&self) -> usize {
        match self {
            Self::Bytes(bytes) => bytes.len(),
            Self::Leased(leased) => leased.len(),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The bytes; none of what is leased, which is [copied](Self::copy_leased) before anybody asks.
    pub(super) fn bytes(&self) -> &[u8] {
        match self {
            Self::Bytes(bytes) => bytes,
            Self::Leased(_) => &[],
        }
    }

    /// It is to wait, nobody knows how long: in memory of its own when it is short.
    pub(super) fn own(&mut self) {
        if let Self::Bytes(bytes) = self
            && bytes.len() <= SHORT
        {
            *bytes = Bytes::copy_from_slice(bytes);
        }
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
