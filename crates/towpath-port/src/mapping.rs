//! Memory that this process shares with the kernel.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::AtomicU64;

use rustix::fs::{FallocateFlags, MemfdFlags};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// A mapping of whole pages, unmapped on drop. It returns addresses only; the rings of the drivers define which side accesses which bytes.
#[derive(Debug)]
pub(crate) struct Mapping {
    base: NonNull<c_void>,
    len: usize,
}

// SAFETY: a mapping is plain memory and not bound to a thread; its users synchronise access.
unsafe impl Send for Mapping {}
// SAFETY: as above; `Mapping` itself only gives out addresses.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len` bytes of `fd` at `offset`.
    pub(crate) fn of(fd: BorrowedFd<'_>, len: usize, offset: u64) -> io::Result<Self> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::SHARED | MapFlags::POPULATE;
        // SAFETY: creates a mapping at an address that the kernel chooses; existing memory is unaffected.
        let base = unsafe { mmap(null_mut(), len, protection, flags, fd, offset) }?;
        Self::new(base, len)
    }

    /// Makes memory that another process can map too ([`of`](Self::of)), filled with zeroes.
    pub(crate) fn shared(name: &str, len: usize) -> io::Result<(OwnedFd, Self)> {
        let file = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC)?;
        // A lack of memory is an error here and not a SIGBUS later.
        rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, len as u64)?;
        let mapping = Self::of(file.as_fd(), len, 0)?;
        Ok((file, mapping))
    }

    fn new(base: *mut c_void, len: usize) -> io::Result<Self> {
        let base = NonNull::new(base).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { base, len })
    }

    /// The first 8 bytes.
    ///
    /// # Panics
    /// Panics if the mapping is shorter.
    pub(crate) fn word(&self) -> &AtomicU64 {
        // SAFETY: a mapping begins at a page, has at least 8 bytes and lives as long as `self`. Both sides access the word atomically.
        unsafe { AtomicU64::from_ptr(self.at(0, 8).cast()) }
    }

    /// `count` words from `offset` on.
    ///
    /// # Panics
    /// Panics if the mapping is shorter, or `offset` is not a multiple of 8.
    pub(crate) fn words(&self, offset: usize, count: usize) -> &[AtomicU64] {
        assert!(offset.is_multiple_of(8), "words are aligned");
        let first = self.at(offset, 8 * count).cast::<AtomicU64>();
        // SAFETY: `at` checks the range; a mapping begins at a page, so the words are aligned, and it lives as long as `self`. Both
        // sides access them atomically, in whole words or aligned parts of them.
        unsafe { std::slice::from_raw_parts(first, count) }
    }

    /// The address of the byte at `offset`.
    ///
    /// # Panics
    /// Panics if fewer than `len` bytes follow.
    pub(crate) fn at(&self, offset: usize, len: usize) -> *mut u8 {
        assert!(offset.checked_add(len).is_some_and(|end| end <= self.len), "range exceeds the mapping");
        self.base.as_ptr().cast::<u8>().wrapping_add(offset)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `new` got this mapping from mmap, and every user of its addresses holds `self`.
        let done = unsafe { munmap(self.base.as_ptr(), self.len) };
        debug_assert!(done.is_ok(), "{done:?}");
    }
}
