//! The memory of one burst of frames.
//!
//! Frames are stored contiguously in one buffer that [`Burst::clear`] empties without freeing it, so a burst stops
//! allocating once it has held its largest batch. The number of frames and bytes is bounded. A live port lends its own memory
//! to a burst instead of copying; the memory returns to the port when the burst is cleared or dropped.

use std::ops::Range;

use crate::{LinkType, MAX_FRAME, Meta};

/// A frame and its metadata.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame<'a> {
    /// The captured bytes, link header first.
    pub bytes: &'a [u8],
    /// Length of the frame on the wire in bytes, at least `bytes.len()`.
    pub wire_len: u32,
    /// Arrival time in nanoseconds since 1970-01-01 UTC.
    pub time_ns: u64,
    /// Link type.
    pub link: LinkType,
    /// Index of the interface within the port; 0 if the port has one.
    pub interface: u32,
    /// Metadata from a live port.
    pub meta: Meta,
}

impl<'a> Frame<'a> {
    /// A complete frame with time 0, interface 0 and default metadata.
    pub fn new(bytes: &'a [u8], link: LinkType) -> Self {
        let wire_len = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
        Self { bytes, wire_len, time_ns: 0, link, interface: 0, meta: Meta::default() }
    }
}

/// A burst of frames: reusable, bounded memory that ports receive into.
///
/// ```
/// use towpath_port::{Burst, Frame, LinkType};
///
/// let mut burst = Burst::new(32);
/// let frame = Frame::new(b"abc", LinkType::RAW);
/// burst.push(frame).unwrap();
/// assert_eq!(burst.frame(0), frame);
/// ```
#[derive(Debug)]
pub struct Burst {
    frames: Vec<Entry>,
    /// Initialised memory; the first `used` bytes hold frames.
    bytes: Vec<u8>,
    used: usize,
    /// Memory that a port lent, returned when the burst is cleared.
    lent: Option<Lent>,
    max_frames: usize,
    max_bytes: usize,
}

/// Limit on the bytes that a live port receives at once, plus one frame, so that they are still in the cache when they are sent. It
/// matters for long frames: 256 jumbo frames of 9,000 bytes exceed the L2 cache.
pub(crate) const NEAR: usize = 256 << 10;

/// Memory that a port shares with the kernel, lent to one burst.
#[derive(Debug)]
#[expect(
    clippy::large_enum_variant,
    reason = "one in each burst; a box would be an allocation for each receive"
)]
pub(crate) enum Lent {
    /// Part of a block of a packet socket's ring.
    Block(crate::af_packet::Lease),
    /// Chunks of an XDP socket's UMEM.
    Chunks(crate::af_xdp::Chunks),
}

impl Lent {
    #[inline]
    fn bytes(&self, chunk: u32, range: Range<usize>) -> Option<&[u8]> {
        match self {
            Self::Block(lease) => lease.bytes(range),
            Self::Chunks(chunks) => chunks.bytes(chunk, range),
        }
    }

    fn bytes_mut(&mut self, chunk: u32, range: Range<usize>) -> Option<&mut [u8]> {
        match self {
            Self::Block(lease) => lease.bytes_mut(range),
            Self::Chunks(chunks) => chunks.bytes_mut(chunk, range),
        }
    }
}

/// Error of [`Burst::push`]: the burst has no room for the frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full;

impl Burst {
    /// An empty burst of at most `max_frames` frames (at least 1) and 2 KiB per frame, but at least [`MAX_FRAME`] bytes.
    pub fn new(max_frames: usize) -> Self {
        Self::with_bytes(max_frames, max_frames.saturating_mul(2048))
    }

    /// An empty burst of at most `max_frames` frames (at least 1) and `max_bytes` bytes, clamped to [`MAX_FRAME`]..=2^32 - 1.
    pub fn with_bytes(max_frames: usize, max_bytes: usize) -> Self {
        Self {
            frames: Vec::new(),
            bytes: Vec::new(),
            used: 0,
            lent: None,
            max_frames: max_frames.max(1),
            max_bytes: max_bytes.clamp(MAX_FRAME, u32::MAX as usize),
        }
    }

    /// Adds a copy of `frame`.
    ///
    /// # Errors
    /// [`Full`] if the frame does not fit; the burst is unchanged.
    #[inline]
    pub fn push(&mut self, frame: Frame<'_>) -> Result<(), Full> {
        let len = frame.bytes.len();
        if self.is_full() || len > self.max_bytes.saturating_sub(self.used) {
            return Err(Full);
        }
        let start = self.used;
        self.room(len).copy_from_slice(frame.bytes);
        self.add(Place::Own, start..start + len, frame);
        self.used += len;
        Ok(())
    }

    /// The next `len` bytes of the burst's own memory, for a port to read into. Grows beyond `max_bytes` if necessary.
    #[inline]
    pub(crate) fn room(&mut self, len: usize) -> &mut [u8] {
        let end = self.used + len;
        if self.bytes.len() < end {
            self.bytes.resize(end, 0);
        }
        &mut self.bytes[self.used..end]
    }

    /// Offset of [`Burst::room`].
    pub(crate) fn used(&self) -> usize {
        self.used
    }

    /// Returns true if the burst is within its bounds and accepts another frame.
    #[inline]
    pub(crate) fn has_room(&self) -> bool {
        !self.is_full() && self.used < self.max_bytes
    }

    /// The number of frames that can be added.
    pub(crate) fn vacancies(&self) -> usize {
        self.max_frames.saturating_sub(self.frames.len())
    }

    /// A range of the used part of the burst's own memory.
    pub(crate) fn used_bytes(&self, range: Range<usize>) -> &[u8] {
        &self.bytes[..self.used][range]
    }

    /// Adds the first `len` bytes of [`Burst::room`] to the used part.
    pub(crate) fn advance(&mut self, len: usize) {
        assert!(len <= self.bytes.len() - self.used, "advance exceeds the room");
        self.used += len;
    }

    /// Adds a frame whose bytes are at `range` of the burst's own memory. `frame.bytes` is ignored.
    #[inline]
    pub(crate) fn add_own(&mut self, range: Range<usize>, frame: Frame<'_>) {
        self.add(Place::Own, range, frame);
    }

    /// Adds a frame whose bytes are at `range` of the memory passed to [`Burst::lend`]. `frame.bytes` is ignored.
    #[inline]
    pub(crate) fn add_lent(&mut self, range: Range<usize>, frame: Frame<'_>) {
        self.add(Place::Lent { chunk: 0 }, range, frame);
    }

    /// As [`Burst::add_lent`], for memory lent in chunks: the index of the chunk, and the range within it.
    #[inline]
    pub(crate) fn add_chunk(&mut self, chunk: u32, range: Range<usize>, frame: Frame<'_>) {
        self.add(Place::Lent { chunk }, range, frame);
    }

    /// Sets the memory of the frames added by [`Burst::add_lent`].
    pub(crate) fn lend(&mut self, lent: Lent) {
        self.lent = Some(lent);
    }

    #[inline]
    fn add(&mut self, place: Place, range: Range<usize>, frame: Frame<'_>) {
        let Frame { bytes: _, wire_len, time_ns, link, interface, meta } = frame;
        let (start, len) = (range.start as u32, range.len() as u32);
        let wire_len = wire_len.max(len);
        self.frames.push(Entry { place, start, len, wire_len, interface, time_ns, link, meta });
    }

    /// Removes all frames. Keeps the burst's own memory, returns lent memory to its port.
    pub fn clear(&mut self) {
        self.frames.clear();
        self.used = 0;
        self.lent = None;
    }

    /// The number of frames.
    pub fn len(&self) -> usize {
        self.frames.len()
    }

    /// Returns true if there are no frames.
    pub fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    /// Returns true if the burst holds its maximum number of frames. ([`Burst::push`] may fail earlier for lack of bytes.)
    pub fn is_full(&self) -> bool {
        self.frames.len() >= self.max_frames
    }

    /// The frame at `index`.
    ///
    /// # Panics
    /// Panics if `index` is not below [`Burst::len`].
    #[inline]
    pub fn frame(&self, index: usize) -> Frame<'_> {
        let entry = &self.frames[index];
        Frame {
            bytes: self.slice(entry),
            wire_len: entry.wire_len,
            time_ns: entry.time_ns,
            link: entry.link,
            interface: entry.interface,
            meta: entry.meta,
        }
    }

    /// The bytes of the frame at `index`, for changes in place.
    ///
    /// # Panics
    /// Panics if `index` is not below [`Burst::len`].
    pub fn bytes_mut(&mut self, index: usize) -> &mut [u8] {
        let entry = &self.frames[index];
        let range = entry.range();
        match (entry.place, &mut self.lent) {
            (Place::Own, _) => &mut self.bytes[range],
            (Place::Lent { chunk }, lent) => lent
                .as_mut()
                .and_then(|lent| lent.bytes_mut(chunk, range))
                .expect("the port lent the memory of its frames"),
        }
    }

    #[inline]
    fn slice(&self, entry: &Entry) -> &[u8] {
        let range = entry.range();
        match entry.place {
            Place::Own => &self.bytes[range],
            Place::Lent { chunk } => self
                .lent
                .as_ref()
                .and_then(|lent| lent.bytes(chunk, range))
                .expect("the port lent the memory of its frames"),
        }
    }

    /// The frames in order of arrival.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = Frame<'_>> + Clone {
        (0..self.len()).map(|index| self.frame(index))
    }
}

/// The memory that contains a frame.
#[derive(Clone, Copy, Debug)]
enum Place {
    Own,
    /// Lent by a port; `chunk` is the index if the port lends several chunks.
    Lent {
        chunk: u32,
    },
}

#[derive(Debug)]
struct Entry {
    place: Place,
    start: u32,
    len: u32,
    wire_len: u32,
    interface: u32,
    time_ns: u64,
    link: LinkType,
    meta: Meta,
}

impl Entry {
    fn range(&self) -> std::ops::Range<usize> {
        self.start as usize..(self.start + self.len) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(bytes: &[u8]) -> Frame<'_> {
        Frame {
            bytes,
            wire_len: 0,
            time_ns: 7,
            link: LinkType::ETHERNET,
            interface: 3,
            meta: Meta::default(),
        }
    }

    #[test]
    fn is_bounded_in_frames_and_bytes() {
        let mut burst = Burst::new(2);
        assert_eq!(burst.push(frame(b"one")), Ok(()));
        assert_eq!(burst.push(frame(b"two")), Ok(()));
        assert_eq!(burst.push(frame(b"three")), Err(Full));

        let mut burst = Burst::with_bytes(10, 0);
        assert_eq!(burst.push(frame(&vec![1; MAX_FRAME])), Ok(()));
        assert_eq!(burst.push(frame(b"x")), Err(Full));
        assert_eq!(burst.len(), 1);
    }

    #[test]
    fn a_warm_burst_keeps_its_memory() {
        let mut burst = Burst::new(64);
        let fill = |burst: &mut Burst| (0..64).for_each(|_| burst.push(frame(&[9; 1500])).unwrap());
        fill(&mut burst);
        let at = (burst.bytes.as_ptr(), burst.frames.as_ptr());
        burst.clear();
        fill(&mut burst);
        assert_eq!((burst.bytes.as_ptr(), burst.frames.as_ptr()), at);
    }

    #[test]
    fn wire_len_is_never_below_the_captured_length() {
        let mut burst = Burst::new(1);
        burst.push(frame(b"four")).unwrap();
        assert_eq!(burst.frame(0).wire_len, 4);
        burst.bytes_mut(0)[0] = b'F';
        assert_eq!(burst.iter().next().unwrap().bytes, b"Four");
    }
}
