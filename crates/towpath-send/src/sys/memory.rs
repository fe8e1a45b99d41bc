//! Memory to send from: of our own, in parts that have one owner each, and of others, mapped for reading.

use std::ffi::c_void;
use std::io;
use std::marker::PhantomData;
use std::mem::{ManuallyDrop, forget};
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::{NonNull, null_mut};
use std::slice;
use std::sync::Arc;

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};

use super::Part;
use super::free::{self, Free, Place, Taken};

/// What one huge page has; also the alignment of transparent ones (x86-64 and arm64 with pages of 4 KiB).
const HUGE: usize = 2 << 20;
const PAGE: usize = 4096;

/// The kind of pages that memory was got in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pages {
    /// Ordinary pages.
    Ordinary,
    /// Reserved huge pages (MAP_HUGETLB).
    Huge,
    /// Ordinary memory that the kernel was asked to back by huge pages (MADV_HUGEPAGE), and may have.
    Transparent,
}

/// Mapped memory, unmapped when the last user is gone. Pages that the kernel still sends from live on.
#[derive(Debug)]
struct Mapping {
    base: NonNull<c_void>,
    len: usize,
    /// Somebody else has mapped it, and keeps it.
    foreign: bool,
}

// SAFETY: a mapping is plain memory and belongs to no thread; who may read and write it is said by `Slot` and `Region`.
unsafe impl Send for Mapping {}
// SAFETY: as above; `Mapping` itself gives no access.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(base: *mut c_void, len: usize) -> io::Result<Self> {
        let base = NonNull::new(base).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { base, len, foreign: false })
    }

    fn anonymous(len: usize, flags: MapFlags) -> io::Result<Self> {
        // SAFETY: a new mapping, at an address of the kernel's choice.
        let base = unsafe {
            mmap_anonymous(null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | flags)
        }?;
        Self::new(base, len)
    }

    fn advise(&self, advice: Advice) -> io::Result<()> {
        // SAFETY: the mapping is whole, and advice about huge pages changes no contents.
        Ok(unsafe { madvise(self.base.as_ptr(), self.len, advice) }?)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if self.foreign {
            return;
        }
        // SAFETY: it was mapped by us, and whoever had a part of it held it by an Arc.
        let done = unsafe { munmap(self.base.as_ptr(), self.len) };
        debug_assert!(done.is_ok(), "{done:?}");
    }
}

/// Private memory in parts of one length, and which of them are free. The one who takes them has this; parts that are
/// dropped, on whatever thread, are there to be taken again.
#[derive(Debug)]
pub(crate) struct Slots {
    area: Arc<Area>,
    taken: Taken,
}

#[derive(Debug)]
struct Area {
    mapping: Mapping,
    /// Where the first part begins, and bytes of each.
    start: usize,
    len: usize,
    free: Free,
}

/// A part of private memory that one owner alone reads and writes.
#[derive(Debug)]
pub(crate) struct Slot {
    /// Each part has a reference to its area, taken and given with it: to count them anew at each taking would cost more than all else
    /// that taking does.
    area: ManuallyDrop<Arc<Area>>,
    index: u32,
}

impl Slots {
    /// `count` parts of `len` bytes, whole pages; huge ones where asked for and to be had.
    pub(crate) fn allocate(count: usize, len: usize, huge: bool) -> io::Result<(Self, Pages)> {
        // No sum may wrap: parts are cut by these numbers, not by what was mapped.
        let invalid = io::ErrorKind::InvalidInput;
        let len = len.max(1).checked_next_multiple_of(PAGE).ok_or(invalid)?;
        let total = count.checked_mul(len).filter(|total| *total > 0).ok_or(invalid)?;
        let count = u32::try_from(count).ok().filter(|count| *count < free::MOST).ok_or(invalid)?;
        u32::try_from(len).map_err(|_| invalid)?;
        let (mapping, pages) = if huge {
            let whole = total.checked_next_multiple_of(HUGE).ok_or(invalid)?;
            match Mapping::anonymous(whole, MapFlags::HUGETLB | MapFlags::POPULATE) {
                Ok(mapping) => (mapping, Pages::Huge),
                Err(_) => {
                    let aligned = whole.checked_add(HUGE).ok_or(invalid)?;
                    let mapping = Mapping::anonymous(aligned, MapFlags::empty())?;
                    let pages = mapping.advise(Advice::LinuxHugepage).map(|()| Pages::Transparent);
                    (mapping, pages.unwrap_or(Pages::Ordinary))
                }
            }
        } else {
            let mapping = Mapping::anonymous(total, MapFlags::empty())?;
            // Refused only by a kernel without huge pages, where it is not needed.
            let _ = mapping.advise(Advice::LinuxNoHugepage);
            (mapping, Pages::Ordinary)
        };
        let start = match pages {
            Pages::Transparent => mapping.base.as_ptr().align_offset(HUGE),
            _ => 0,
        };
        let (free, taken) = Free::all(count);
        let area = Arc::new(Area { mapping, start, len, free });
        // One for each part: see `Slot`.
        (0..count).for_each(|_| forget(area.clone()));
        Ok((Self { area, taken }, pages))
    }

    /// Bytes of each part.
    pub(crate) fn len(&self) -> usize {
        self.area.len
    }

    /// A free part; none when all are out.
    #[inline]
    pub(crate) fn take(&mut self) -> Option<Slot> {
        let index = self.area.free.take(&mut self.taken)?;
        // SAFETY: `allocate` forgot one reference for each part, and `Free` gives this part, and its reference with it, to us alone.
        let area = unsafe { Arc::from_raw(Arc::as_ptr(&self.area)) };
        Some(Slot { area: ManuallyDrop::new(area), index })
    }
}

impl Drop for Slots {
    fn drop(&mut self) {
        for _ in 0..self.area.free.close(&mut self.taken) {
            // SAFETY: the reference of a part that is free, which nobody will take any more; `self.area` is another one.
            unsafe { Arc::decrement_strong_count(Arc::as_ptr(&self.area)) }
        }
    }
}

impl Slot {
    /// Bytes that it has.
    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.area.len
    }

    #[inline]
    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: `allocate` cuts the mapping into parts that do not overlap, `Free` gives each index to one `Slot` at a time,
        // and this one is borrowed: nobody writes. Fresh anonymous memory is zeroes.
        unsafe { slice::from_raw_parts(self.start(), self.area.len) }
    }

    #[inline]
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`, and this one is borrowed mutably: nobody else reads.
        unsafe { slice::from_raw_parts_mut(self.start(), self.area.len) }
    }

    #[inline]
    fn start(&self) -> *mut u8 {
        let offset = self.area.start + self.index as usize * self.area.len;
        self.area.mapping.base.as_ptr().cast::<u8>().wrapping_add(offset)
    }
}

impl Drop for Slot {
    #[inline]
    fn drop(&mut self) {
        let given = self.area.free.place(self.index).is_some_and(Place::give);
        if !given {
            // SAFETY: the part's own reference, which nobody takes over; it is not used after this.
            unsafe { ManuallyDrop::drop(&mut self.area) }
        }
    }
}

/// Memory of others, mapped for reading or kept for it: what is sent from it is opaque, and may change while it is looked at.
#[derive(Clone, Debug)]
pub struct Region(Arc<Mapping>);

impl Region {
    /// Maps the first `len` bytes of `fd` (a memfd, a file of tmpfs) for reading.
    ///
    /// # Errors
    /// What mmap(2) and fstat(2) say; InvalidInput when `fd` has fewer bytes. A descriptor whose size may still shrink should
    /// be sealed (F_SEAL_SHRINK): sending from what is gone is an error (EFAULT), looking at it is SIGBUS.
    pub fn map(fd: &OwnedFd, len: usize) -> io::Result<Self> {
        let size = u64::try_from(rustix::fs::fstat(fd.as_fd())?.st_size).unwrap_or(0);
        if len == 0 || size < len as u64 {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("a region of {len} bytes, of a descriptor that has {size}"),
            ));
        }
        // SAFETY: a new mapping, at an address of the kernel's choice, for reading.
        let base = unsafe { mmap(null_mut(), len, ProtFlags::READ, MapFlags::SHARED, fd, 0) }?;
        Ok(Self(Arc::new(Mapping::new(base, len)?)))
    }

    /// Memory that somebody else in this process has, and lends: nothing is mapped, nor unmapped in the end.
    ///
    /// # Safety
    /// The bytes are there to be read until the region and all that was made of it are dropped. Whoever has them may write them
    /// meanwhile: no reference to them is made.
    pub unsafe fn foreign(bytes: NonNull<[u8]>) -> Self {
        Self(Arc::new(Mapping { base: bytes.cast(), len: bytes.len(), foreign: true }))
    }

    /// Bytes that it has.
    pub fn len(&self) -> usize {
        self.0.len
    }

    /// Whether it has none; one that was mapped has some.
    pub fn is_empty(&self) -> bool {
        self.0.len == 0
    }

    /// Bytes to send; none when they are not all in it.
    pub(crate) fn part(&self, offset: usize, len: usize) -> Option<Part<'_>> {
        offset.checked_add(len).filter(|end| *end <= self.0.len)?;
        let iov_base = self.0.base.as_ptr().wrapping_byte_add(offset);
        Some(Part(libc::iovec { iov_base, iov_len: len }, PhantomData))
    }

    /// Copies bytes out, as they are at that moment; what is not in it stays as it is.
    pub fn copy_out(&self, offset: usize, into: &mut [u8]) {
        let Some(part) = self.part(offset, into.len()) else { return };
        let base = part.0.iov_base.cast::<u8>();
        let whole = if base.cast::<u64>().is_aligned() { into.len() / 8 * 8 } else { 0 };
        let (words, rest) = into.split_at_mut(whole);
        for (at, word) in words.chunks_exact_mut(8).enumerate() {
            let from = base.cast::<u64>().wrapping_add(at);
            // SAFETY: as below, and aligned, because the first one is.
            let value = unsafe { from.read_volatile() };
            word.copy_from_slice(&value.to_ne_bytes());
        }
        for (at, byte) in rest.iter_mut().enumerate() {
            let from = base.wrapping_add(whole + at);
            // SAFETY: `part` checked that it is inside the mapping, which is readable. Volatile: another process may write it.
            *byte = unsafe { from.read_volatile() };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_others_keep_is_read_where_it_is_and_left_there() {
        let mut kept: Vec<u8> = (0..100).collect();
        // SAFETY: `kept` is not touched until the region is dropped.
        let region = unsafe { Region::foreign(NonNull::from(&mut kept[1..])) };
        let mut copy = [0; 20];
        region.copy_out(70, &mut copy);
        assert_eq!(copy[..], (71..91).collect::<Vec<u8>>());
        assert!(region.part(0, 99).is_some() && region.part(0, 100).is_none());
        drop(region);
        assert_eq!(kept[99], 99);
        // SAFETY: there are no bytes.
        let none = unsafe { Region::foreign(NonNull::from(&mut [])) };
        assert!(none.is_empty() && none.part(0, 0).is_some());
    }

    #[test]
    fn an_area_ends_with_the_last_that_has_a_part_of_it() {
        // How many parts are out when the one who takes them ends, of three of which one was given back before.
        for out in 0..=3 {
            let (mut slots, _) = Slots::allocate(3, 1, false).unwrap();
            let area = Arc::downgrade(&slots.area);
            drop(slots.take());
            let mut taken: Vec<_> = std::iter::from_fn(|| slots.take()).take(out).collect();
            assert_eq!((taken.len(), area.strong_count()), (out, 4));
            drop(slots);
            assert_eq!(area.strong_count(), out);
            while let Some(slot) = taken.pop() {
                assert!(slot.bytes().iter().all(|byte| *byte == 0));
                drop(slot);
                assert_eq!(area.strong_count(), taken.len());
            }
        }
    }

    #[test]
    fn parts_are_given_while_the_area_ends() {
        for _ in 0..200 {
            let (mut slots, _) = Slots::allocate(64, 1, false).unwrap();
            let area = Arc::downgrade(&slots.area);
            let taken: Vec<_> = std::iter::from_fn(|| slots.take()).collect();
            let giver = std::thread::spawn(move || drop(taken));
            drop(slots);
            giver.join().unwrap();
            assert_eq!(area.strong_count(), 0);
        }
    }
}
