#![allow(unsafe_code)]
//! Memory mappings shared with the kernel.

use std::ffi::c_void;
use std::os::fd::AsFd;
use std::ptr::{self, NonNull};
use std::sync::atomic::AtomicU32;

use anyhow::{Context, Result};
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};

pub(super) struct Area {
    base: NonNull<u8>,
    len: usize,
}

impl Area {
    /// Maps `len` bytes of the socket at `offset`.
    pub(super) fn of(socket: &impl AsFd, len: usize, offset: u64) -> Result<Self> {
        let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::POPULATE);
        // SAFETY: a fresh mapping at an address of the kernel's choice overlaps nothing.
        let base = unsafe { mmap(ptr::null_mut(), len, protection, flags, socket, offset) };
        Self::new(base.context("mapping a socket's ring")?, len)
    }

    /// Maps anonymous memory.
    pub(super) fn fresh(len: usize) -> Result<Self> {
        let (protection, flags) =
            (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::POPULATE);
        // SAFETY: as in `of`.
        let base = unsafe { mmap_anonymous(ptr::null_mut(), len, protection, flags) };
        Self::new(base.context("mapping memory")?, len)
    }

    fn new(base: *mut c_void, len: usize) -> Result<Self> {
        Ok(Self { base: NonNull::new(base.cast()).context("mmap gave address 0")?, len })
    }

    pub(super) fn base(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// Returns the address of `len` bytes at `offset`.
    ///
    /// # Panics
    ///
    /// Panics if the range is not within the mapping.
    #[inline]
    pub(super) fn at(&self, offset: usize, len: usize) -> *mut u8 {
        assert!(offset.checked_add(len).is_some_and(|end| end <= self.len), "inside the mapping");
        // SAFETY: the assertion above checked the range.
        unsafe { self.base.as_ptr().add(offset) }
    }

    /// Reads a value at `offset`.
    #[inline]
    pub(super) fn read<T: Plain>(&self, offset: usize) -> T {
        // SAFETY: `at` checked the range; every bit pattern is a valid T; the read may be unaligned.
        unsafe { self.at(offset, size_of::<T>()).cast::<T>().read_unaligned() }
    }

    #[inline]
    pub(super) fn write<T: Plain>(&self, offset: usize, value: T) {
        // SAFETY: `at` checked the range; the only references into the mapping are to atomics.
        unsafe { self.at(offset, size_of::<T>()).cast::<T>().write_unaligned(value) }
    }

    /// A word that the kernel also accesses atomically.
    #[inline]
    pub(super) fn word(&self, offset: usize) -> &AtomicU32 {
        let at = self.at(offset, 4).cast::<u32>();
        assert!(at.is_aligned(), "a word");
        // SAFETY: within the mapping, aligned, and accessed atomically by both sides.
        unsafe { AtomicU32::from_ptr(at) }
    }
}

impl Drop for Area {
    fn drop(&mut self) {
        // SAFETY: the address and length are those of mmap; no reference outlives self.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.len) };
    }
}

/// Types for which every bit pattern is valid.
pub(super) trait Plain: Copy {}

impl Plain for u16 {}
impl Plain for u32 {}
impl Plain for u64 {}
