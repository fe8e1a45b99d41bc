//! Free byte buffers of the reorder buffer, by size.

/// Capacity of the buffers of the first class. Those of each further class have twice the capacity.
const SMALLEST: usize = 256;
/// Classes: the last one has room for the longest IP packet with its headers.
const CLASSES: usize = 10;

/// Free byte buffers. Their capacities add up to at most a limit. A new buffer has at most twice the capacity that its packet needs, or
/// [`SMALLEST`].
#[derive(Debug)]
pub(super) struct SpareBuffers {
    classes: [Vec<Vec<u8>>; CLASSES],
    bytes: usize,
    limit: usize,
}

impl SpareBuffers {
    /// No buffers. Later, at most `limit` bytes of them.
    pub(super) fn new(limit: usize) -> Self {
        Self { classes: Default::default(), bytes: 0, limit }
    }

    /// Sets the limit. Buffers above it are freed when others are to be kept.
    pub(super) fn set_limit(&mut self, limit: usize) {
        self.limit = limit;
    }

    /// A buffer with these bytes: the free one that was used last, or a new one.
    pub(super) fn copy(&mut self, bytes: &[u8]) -> Vec<u8> {
        let class = class_with_room(bytes.len());
        let mut buffer = match self.classes.get_mut(class).and_then(Vec::pop) {
            Some(buffer) => {
                self.bytes -= buffer.capacity();
                buffer
            }
            None => Vec::with_capacity(bytes.len().max(SMALLEST << class.min(CLASSES - 1))),
        };
        buffer.extend_from_slice(bytes);
        buffer
    }

    /// Keeps a buffer. Buffers of other sizes, the largest ones first, give way to it: packets of its size come now.
    pub(super) fn keep(&mut self, mut buffer: Vec<u8>) {
        let capacity = buffer.capacity();
        let Some(own) = (capacity / SMALLEST).checked_ilog2().map(|log| log as usize) else { return };
        if own >= CLASSES {
            return;
        }
        while self.bytes + capacity > self.limit {
            let others = self.classes.iter_mut().enumerate().rev().filter(|(class, _)| *class != own);
            let Some(freed) = others.map(|(_, class)| class).find_map(Vec::pop) else { return };
            self.bytes -= freed.capacity();
        }
        buffer.clear();
        self.bytes += capacity;
        self.classes[own].push(buffer);
    }
}

/// The first class whose buffers have room for `len` bytes.
fn class_with_room(len: usize) -> usize {
    len.div_ceil(SMALLEST).next_power_of_two().ilog2() as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_used_again_for_packets_of_their_size() {
        let mut spare = SpareBuffers::new(1 << 20);
        for len in [0, 1, 256, 257, 1_514, 2_049, 9_014, 65_557, SMALLEST << (CLASSES - 1)] {
            let bytes = vec![7; len];
            let buffer = spare.copy(&bytes);
            assert_eq!(buffer, bytes);
            assert!(buffer.capacity() <= (2 * len).max(SMALLEST), "{len} bytes in {}", buffer.capacity());
            let place = buffer.as_ptr();
            spare.keep(buffer);
            let again = spare.copy(&bytes);
            assert_eq!(again.as_ptr(), place, "{len} bytes");
        }
        assert_eq!(spare.bytes, 0);
    }

    #[test]
    fn free_buffers_stay_within_the_limit() {
        let mut spare = SpareBuffers::new(4_096);
        let buffers: Vec<_> = (0..3).map(|_| spare.copy(&[0; 2_000])).collect();
        buffers.into_iter().for_each(|buffer| spare.keep(buffer));
        assert_eq!((spare.bytes, spare.classes[3].len()), (4_096, 2));
        spare.keep(Vec::with_capacity(SMALLEST - 1));
        spare.keep(Vec::with_capacity(SMALLEST << CLASSES));
        assert_eq!(spare.bytes, 4_096, "buffers of no class are not kept");
        // Packets of another size come.
        spare.keep(Vec::with_capacity(512));
        assert_eq!((spare.bytes, spare.classes[3].len(), spare.classes[1].len()), (2_560, 1, 1));
        spare.keep(Vec::with_capacity(8_192));
        assert_eq!(spare.bytes, 0, "a buffer above the limit is not kept");
        spare.set_limit(100);
        let buffer = spare.copy(&[0; 50]);
        spare.keep(buffer);
        assert_eq!(spare.bytes, 0, "nothing is kept below a lower limit");
    }
}
