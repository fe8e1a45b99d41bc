//! Memory that this process shares with the kernel.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::{NonNull, null_mut};

use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};

/// A mapping of whole pages, unmapped when it is dropped. Gives no access by itself: each driver's ring says who may touch what.
#[derive(Debug)]
pub(crate) struct Mapping {
    base: NonNull<c_void>,
    len: usize,
}

// SAFETY: a mapping is plain memory and belongs to no thread; who may read and write it is for its users to say.
unsafe impl Send for Mapping {}
// SAFETY: as above; `Mapping` itself gives out an address and nothing more.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// `len` bytes of what `fd` maps at `offset`.
    pub(crate) fn of(fd: BorrowedFd<'_>, len: usize, offset: u64) -> io::Result<Self> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::SHARED | MapFlags::POPULATE;
        // SAFETY: a new mapping, at an address of the kernel's choice.
        let base = unsafe { mmap(null_mut(), len, protection, flags, fd, offset) }?;
        Self::new(base, len)
    }

    /// `len` bytes of this process's own, zeroes.
    pub(crate) fn anonymous(len: usize) -> io::Result<Self> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE | MapFlags::POPULATE;
        // SAFETY: a new mapping, at an address of the kernel's choice.
        let base = unsafe { mmap_anonymous(null_mut(), len, protection, flags) }?;
        Self::new(base, len)
    }

    fn new(base: *mut c_void, len: usize) -> io::Result<Self> {
        let base = NonNull::new(base).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { base, len })
    }

    /// The address of the byte at `offset`.
    ///
    /// # Panics
    /// When fewer than `len` bytes follow there.
    pub(crate) fn at(&self, offset: usize, len: usize) -> *mut u8 {
        assert!(offset.checked_add(len).is_some_and(|end| end <= self.len), "inside the mapping");
        self.base.as_ptr().cast::<u8>().wrapping_add(offset)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped by us, and whoever points into it holds it.
        let done = unsafe { munmap(self.base.as_ptr(), self.len) };
        debug_assert!(done.is_ok(), "{done:?}");
    }
}
