//! A pool of read buffers. A buffer returns when its last message is dropped.

use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;

/// Number of buffers that are kept.
const SPARES: usize = 16;

/// Spare buffers. Shared, because other threads drop messages.
#[derive(Clone, Debug, Default)]
pub(super) struct Pool {
    spare: Arc<Mutex<Vec<Vec<u8>>>>,
}

/// A buffer that messages share.
struct SharedBuffer {
    buffer: Vec<u8>,
    pool: Pool,
}

impl Pool {
    /// Removes a buffer, or returns an empty one.
    pub(super) fn take(&self) -> Vec<u8> {
        self.spare.lock().unwrap_or_else(PoisonError::into_inner).pop().unwrap_or_default()
    }

    /// Returns a buffer to the pool.
    pub(super) fn put(&self, mut buffer: Vec<u8>) {
        let mut spare = self.spare.lock().unwrap_or_else(PoisonError::into_inner);
        if spare.len() < SPARES {
            buffer.clear();
            spare.push(buffer);
        }
    }

    /// Shares the buffer's bytes. The buffer returns to the pool when the last share is dropped, unless it is
    /// larger than `most`.
    pub(super) fn lend(&self, buffer: Vec<u8>, most: usize) -> Bytes {
        if buffer.capacity() > most {
            return Bytes::from(buffer);
        }
        Bytes::from_owner(SharedBuffer { buffer, pool: self.clone() })
    }
}

impl AsRef<[u8]> for SharedBuffer {
    fn as_ref(&self) -> &[u8] {
        &self.buffer
    }
}

impl Drop for SharedBuffer {
    fn drop(&mut self) {
        self.pool.put(std::mem::take(&mut self.buffer));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_returns_when_its_last_share_is_dropped() {
        let pool = Pool::default();
        let mut buffer = Vec::with_capacity(100);
        buffer.extend_from_slice(b"onetwo");
        let (at, whole) = (buffer.as_ptr(), pool.lend(buffer, 1000));
        let (one, two) = (whole.slice(..3), whole.slice(3..));
        drop((whole, one));
        assert_eq!(pool.take().capacity(), 0, "a share is left");
        drop(two);
        let again = pool.take();
        assert_eq!((again.as_ptr(), again.len()), (at, 0));
        drop(pool.lend(again, 10));
        assert_eq!(pool.take().capacity(), 0, "too large to be kept");
    }
}
