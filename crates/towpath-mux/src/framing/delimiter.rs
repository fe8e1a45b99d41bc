//! Delimiters that end a message.
//!
//! The delimiter whose last byte is earliest in the stream ends the message. If several end at this byte, the
//! longest one does. The choice does not depend on how much of the stream has arrived.

/// Maximum number of distinct last bytes, searched in one pass.
const LAST_BYTES: usize = 3;

#[derive(Debug)]
pub(super) struct Delimiters {
    /// Longest first.
    delimiters: Vec<Vec<u8>>,
    last: Vec<u8>,
}

impl Delimiters {
    /// `None` if the list is empty, a delimiter is empty, or there are more than three distinct last bytes.
    pub(super) fn new(mut delimiters: Vec<Vec<u8>>) -> Option<Self> {
        delimiters.sort_by_key(|delimiter| std::cmp::Reverse(delimiter.len()));
        let mut last =
            delimiters.iter().map(|delimiter| delimiter.last().copied()).collect::<Option<Vec<_>>>()?;
        last.sort_unstable();
        last.dedup();
        if last.is_empty() || last.len() > LAST_BYTES {
            return None;
        }
        Some(Self { delimiters, last })
    }

    /// End of the first delimiter that ends after `scanned`, and its length.
    pub(super) fn find(&self, bytes: &[u8], scanned: usize) -> Option<(usize, usize)> {
        let fresh = bytes.get(scanned..)?;
        match *self.last.as_slice() {
            [a] => memchr::memchr_iter(a, fresh).find_map(|at| self.ending(bytes, scanned + at + 1)),
            [a, b] => memchr::memchr2_iter(a, b, fresh).find_map(|at| self.ending(bytes, scanned + at + 1)),
            [a, b, c] => {
                memchr::memchr3_iter(a, b, c, fresh).find_map(|at| self.ending(bytes, scanned + at + 1))
            }
            _ => None,
        }
    }

    fn ending(&self, bytes: &[u8], end: usize) -> Option<(usize, usize)> {
        let delimiter = self.delimiters.iter().find(|delimiter| bytes[..end].ends_with(delimiter))?;
        Some((end, delimiter.len()))
    }
}
