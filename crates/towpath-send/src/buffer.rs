//! Memory to send from. It stays in place and unmodified until the kernel has completed the send.

use std::fmt;
use std::hash::Hasher;
use std::io;
use std::ops::{Deref, DerefMut, Range};
use std::sync::Arc;

use twox_hash::XxHash3_64;

use crate::sys::{Pages, Part, Region, Slot, Slots};

/// A pool of frames in private memory. Each frame occupies whole pages, so frames never share a page. Huge pages are used
/// where available: the kernel then pins fewer pages.
///
/// A dropped frame returns to the pool, whether the caller drops it or the sender at completion.
#[derive(Debug)]
pub struct Pool {
    slots: Slots,
    pages: Pages,
}

impl Pool {
    /// Allocates `frames` frames of at least `frame_size` bytes each, rounded up to whole pages and below 4 GiB. `huge` requests huge
    /// pages.
    ///
    /// # Errors
    /// Out of memory, or a frame size of zero or of 4 GiB and more.
    pub fn new(frames: usize, frame_size: usize, huge: bool) -> io::Result<Self> {
        let (slots, pages) = Slots::allocate(frames, frame_size, huge)?;
        Ok(Self { slots, pages })
    }

    /// Takes a free frame, which is empty. Returns `None` if all frames are in use.
    #[inline]
    pub fn take(&mut self) -> Option<Frame> {
        Some(Frame { slot: self.slots.take()?, head: 0, end: 0 })
    }

    /// Kind of the pages that hold the frames.
    pub fn pages(&self) -> Pages {
        self.pages
    }

    /// Size of each frame in bytes.
    pub fn frame_size(&self) -> usize {
        self.slots.len()
    }
}

/// A frame of a [`Pool`]. Its filled part is sent; it dereferences to that part.
pub struct Frame {
    slot: Slot,
    // A 32-bit head keeps the struct small, because frames are moved often. The struct has no padding, so store forwarding works.
    head: u32,
    end: usize,
}

impl Frame {
    /// Empties the frame and leaves `bytes` of room at its start for a header written later by [`prepend`](Self::prepend). At most
    /// the frame's size.
    pub fn reserve_head(&mut self, bytes: usize) {
        self.head = bytes.min(self.size()) as u32;
        self.end = self.head as usize;
    }

    /// Writes `header` in front of the filled part. Returns false if the reserved room is too small.
    pub fn prepend(&mut self, header: &[u8]) -> bool {
        let Some(head) = (self.head as usize).checked_sub(header.len()) else { return false };
        let range = head..self.head as usize;
        self.all()[range].copy_from_slice(header);
        self.head = head as u32;
        true
    }

    /// Appends as many of `bytes` as fit, and returns that number.
    #[inline]
    pub fn put(&mut self, bytes: &[u8]) -> usize {
        let spare = self.spare();
        let len = bytes.len().min(spare.len());
        spare[..len].copy_from_slice(&bytes[..len]);
        self.end += len;
        len
    }

    /// The unfilled part, for example to read into. Call [`filled`](Self::filled) afterwards.
    #[inline]
    pub fn spare(&mut self) -> &mut [u8] {
        let end = self.end;
        &mut self.all()[end..]
    }

    /// Marks the first `bytes` of [`spare`](Self::spare) as filled; at most all of it.
    #[inline]
    pub fn filled(&mut self, bytes: usize) {
        self.end = self.end.saturating_add(bytes).min(self.size());
    }

    #[inline]
    fn size(&self) -> usize {
        self.slot.len()
    }

    #[inline]
    fn all(&mut self) -> &mut [u8] {
        self.slot.bytes_mut()
    }
}

impl Deref for Frame {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        &self.slot.bytes()[self.head as usize..self.end]
    }
}

impl DerefMut for Frame {
    #[inline]
    fn deref_mut(&mut self) -> &mut [u8] {
        let range = self.head as usize..self.end;
        &mut self.all()[range]
    }
}

impl fmt::Debug for Frame {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Frame({} of {} bytes)", self.len(), self.size())
    }
}

/// Memory to send from. The sender owns it until the kernel has completed the send.
///
/// Created from a [`Frame`], a `Vec<u8>`, an `Arc<[u8]>`, a part of a [`Region`], or any other owner of bytes
/// ([`owner`](Self::owner)).
#[derive(Debug)]
pub struct Buffer(Memory);

#[derive(Debug)]
enum Memory {
    Frame(Frame),
    Vec(Vec<u8>),
    Shared(Arc<[u8]>),
    Region(Region, Range<usize>),
    Lent(Box<dyn Lent>),
    Owner(Owner),
}

/// A part of shared memory on loan. Dropping the value ends the loan: the kernel no longer reads the memory then.
pub trait Lent: fmt::Debug + Send + Sync {
    /// The shared memory.
    fn region(&self) -> &Region;

    /// The part of the region on loan. Must always return the same range.
    fn span(&self) -> Range<usize>;
}

/// Any other owner of bytes.
struct Owner(Box<dyn AsRef<[u8]> + Send + Sync>);

impl fmt::Debug for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Owner({} bytes)", self.0.as_ref().as_ref().len())
    }
}

impl Buffer {
    /// A part of shared memory. Returns `None` if `span` is not within the region.
    pub fn region(region: &Region, span: Range<usize>) -> Option<Self> {
        region.part(span.start, span.end.checked_sub(span.start)?)?;
        Some(Self(Memory::Region(region.clone(), span)))
    }

    /// A part of shared memory on loan, dropped when the kernel has completed the send. Returns `None` if the span is not within
    /// the region.
    pub fn lent(lent: impl Lent + 'static) -> Option<Self> {
        let span = lent.span();
        lent.region().part(span.start, span.end.checked_sub(span.start)?)?;
        Some(Self(Memory::Lent(Box::new(lent))))
    }

    /// The bytes of any value that keeps them in place and unchanged until it is dropped, such as `bytes::Bytes` or a mapping.
    pub fn owner(owner: impl AsRef<[u8]> + Send + Sync + 'static) -> Self {
        Self(Memory::Owner(Owner(Box::new(owner))))
    }

    /// Length in bytes.
    #[inline]
    pub fn len(&self) -> usize {
        match &self.0 {
            Memory::Frame(frame) => frame.len(),
            Memory::Vec(vec) => vec.len(),
            Memory::Shared(bytes) => bytes.len(),
            Memory::Region(_, span) => span.len(),
            Memory::Lent(lent) => lent.span().len(),
            Memory::Owner(owner) => owner.0.as_ref().as_ref().len(),
        }
    }

    /// Returns true if the length is 0.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the frame, if the buffer was created from one.
    pub fn into_frame(self) -> Option<Frame> {
        if let Memory::Frame(frame) = self.0 { Some(frame) } else { None }
    }

    /// Returns the vector, if the buffer was created from one.
    pub fn into_vec(self) -> Option<Vec<u8>> {
        if let Memory::Vec(vec) = self.0 { Some(vec) } else { None }
    }

    /// The part `span`, for one call.
    #[inline]
    pub(crate) fn part(&self, span: Range<usize>) -> Part<'_> {
        match &self.0 {
            Memory::Region(region, all) => {
                region.part(all.start + span.start, span.len()).unwrap_or(Part::NONE)
            }
            Memory::Lent(lent) => {
                lent.region().part(lent.span().start + span.start, span.len()).unwrap_or(Part::NONE)
            }
            _ => Part::of(self.bytes().get(span).unwrap_or(&[])),
        }
    }

    /// Checksum (XXH3) of the current contents.
    pub(crate) fn checksum(&self) -> u64 {
        let mut hash = XxHash3_64::new();
        let shared = match &self.0 {
            Memory::Region(region, span) => Some((region, span.clone())),
            Memory::Lent(lent) => Some((lent.region(), lent.span())),
            _ => None,
        };
        if let Some((region, span)) = shared {
            let mut copy = [0; 4096];
            for at in span.clone().step_by(copy.len()) {
                let len = copy.len().min(span.end - at);
                region.copy_out(at, &mut copy[..len]);
                hash.write(&copy[..len]);
            }
        }
        hash.write(self.bytes());
        hash.finish()
    }

    /// The bytes of private memory; empty for a region.
    #[inline]
    fn bytes(&self) -> &[u8] {
        match &self.0 {
            Memory::Frame(frame) => frame,
            Memory::Vec(vec) => vec,
            Memory::Shared(bytes) => bytes,
            Memory::Region(..) | Memory::Lent(_) => &[],
            Memory::Owner(owner) => owner.0.as_ref().as_ref(),
        }
    }
}

impl From<Frame> for Buffer {
    #[inline]
    fn from(frame: Frame) -> Self {
        Self(Memory::Frame(frame))
    }
}

impl From<Vec<u8>> for Buffer {
    #[inline]
    fn from(bytes: Vec<u8>) -> Self {
        Self(Memory::Vec(bytes))
    }
}

impl From<Arc<[u8]>> for Buffer {
    #[inline]
    fn from(bytes: Arc<[u8]>) -> Self {
        Self(Memory::Shared(bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dropped_frames_return_and_frames_do_not_overlap() {
        for huge in [false, true] {
            let mut pool = Pool::new(3, 5000, huge).unwrap();
            assert_eq!(pool.frame_size(), 8192);
            let mut frames: Vec<_> = std::iter::from_fn(|| pool.take()).collect();
            assert_eq!(frames.len(), 3);
            for (fill, frame) in (1..).zip(&mut frames) {
                frame.filled(usize::MAX >> 1);
                frame.fill(fill);
            }
            for (fill, frame) in (1..).zip(&frames) {
                assert!(frame.len() == 8192 && frame.iter().all(|byte| *byte == fill));
            }
            frames.pop();
            let again = pool.take().expect("the dropped frame");
            assert!(again.is_empty() && pool.take().is_none());
        }
        assert!(Pool::new(0, 4096, false).is_err());
    }

    #[test]
    fn sizes_beyond_the_address_space_are_rejected() {
        let top = usize::MAX;
        // The rounded frame length, the total length and the length with huge pages must not overflow.
        for (count, size) in
            [(1, top), (1, top - 4094), (2, top / 2 + 1), (top, 4096), (1, top - 4095), (1, top - (3 << 20))]
        {
            for huge in [false, true] {
                assert!(Pool::new(count, size, huge).is_err(), "{count} of {size}, {huge}");
            }
        }
    }

    #[test]
    fn adjacent_frames_join_into_one_part() {
        let mut pool = Pool::new(3, 4096, false).unwrap();
        let frames: Vec<Buffer> = std::iter::from_fn(|| pool.take())
            .map(|mut frame| {
                frame.filled(4096);
                frame.into()
            })
            .collect();
        let mut part = frames[0].part(0..4096);
        assert!(!part.join(&frames[2].part(0..4096)));
        assert!(!part.join(&frames[1].part(1..4096)));
        assert!(part.join(&frames[1].part(0..4096)) && part.join(&frames[2].part(0..10)));
    }

    #[test]
    fn a_frame_outlives_its_pool() {
        let mut frame = Pool::new(1, 1, false).unwrap().take().unwrap();
        assert_eq!(frame.put(&[7; 5000]), 4096);
        assert_eq!(frame.put(b"x"), 0);
        assert!(frame.iter().all(|byte| *byte == 7));
    }

    #[test]
    fn prepend_writes_a_header() {
        let mut frame = Pool::new(1, 100, false).unwrap().take().unwrap();
        frame.reserve_head(6);
        frame.put(b"body");
        assert!(frame.prepend(b"len "));
        assert!(!frame.prepend(b"too long"));
        assert!(frame.prepend(b"v1"));
        assert_eq!(&frame[..], b"v1len body");
    }

    #[derive(Debug)]
    struct TestLoan {
        region: Region,
        span: Range<usize>,
        _loan: Arc<()>,
    }

    impl Lent for TestLoan {
        fn region(&self) -> &Region {
            &self.region
        }

        fn span(&self) -> Range<usize> {
            self.span.clone()
        }
    }

    #[test]
    fn a_buffer_keeps_its_loan() {
        let fd = rustix::fs::memfd_create("lent", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::io::write(&fd, &[9; 6000]).unwrap();
        let region = Region::map(&fd, 6000).unwrap();
        let loan = Arc::new(());
        let lent = |span| Buffer::lent(TestLoan { region: region.clone(), span, _loan: loan.clone() });
        assert!(lent(10..6001).is_none());
        let buffer = lent(10..5010).unwrap();
        assert_eq!((buffer.len(), Arc::strong_count(&loan)), (5000, 2));
        assert_eq!(buffer.checksum(), Buffer::from(vec![9; 5000]).checksum());
        drop(buffer);
        assert_eq!(Arc::strong_count(&loan), 1);
    }

    #[test]
    fn region_checksums_read_shared_memory_in_place() {
        let fd = rustix::fs::memfd_create("region", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::io::write(&fd, &[9; 6000]).unwrap();
        let region = Region::map(&fd, 6000).unwrap();
        assert!(Region::map(&fd, 6001).is_err());
        assert!(Buffer::region(&region, 0..6001).is_none());
        let buffer = Buffer::region(&region, 100..5900).unwrap();
        assert_eq!(buffer.len(), 5800);
        assert_eq!(buffer.checksum(), Buffer::from(vec![9; 5800]).checksum());
        rustix::io::pwrite(&fd, &[8], 5000).unwrap();
        assert_ne!(buffer.checksum(), Buffer::from(vec![9; 5800]).checksum());
    }
}
