#![allow(unsafe_code)]
//! Memory that is shared with the kernel: a mapping, and words in it.

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
    /// What the socket has at `offset`.
    pub(super) fn of(socket: &impl AsFd, len: usize, offset: u64) -> Result<Self> {
        let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::POPULATE);
        // SAFETY: a fresh mapping at an address of the kernel's choice overlaps nothing.
        let base = unsafe { mmap(ptr::null_mut(), len, protection, flags, socket, offset) };
        Self::new(base.context("mapping a socket's ring")?, len)
    }

    /// Fresh memory.
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

    /// The address of `len` bytes at `offset`.
    ///
    /// # Panics
    /// When they are not all inside.
    #[inline]
    pub(super) fn at(&self, offset: usize, len: usize) -> *mut u8 {
        assert!(offset.checked_add(len).is_some_and(|end| end <= self.len), "inside the mapping");
        // SAFETY: as just asserted.
        unsafe { self.base.as_ptr().add(offset) }
    }

    /// A value at `offset`, of a type for which every pattern of bits is a value.
    #[inline]
    pub(super) fn read<T: Plain>(&self, offset: usize) -> T {
        // SAFETY: inside the mapping (`at`); every pattern of bits is a T, and it need not be aligned.
        unsafe { self.at(offset, size_of::<T>()).cast::<T>().read_unaligned() }
    }

    #[inline]
    pub(super) fn write<T: Plain>(&self, offset: usize, value: T) {
        // SAFETY: inside the mapping (`at`), to which there are no references but of atomics.
        unsafe { self.at(offset, size_of::<T>()).cast::<T>().write_unaligned(value) }
    }

    /// A word that the kernel too accesses as one.
    #[inline]
    pub(super) fn word(&self, offset: usize) -> &AtomicU32 {
        let at = self.at(offset, 4).cast::<u32>();
        assert!(at.is_aligned(), "a word");
        // SAFETY: inside the mapping, aligned, and accessed atomically by both.
        unsafe { AtomicU32::from_ptr(at) }
    }
}

impl Drop for Area {
    fn drop(&mut self) {
        // SAFETY: what mmap gave; no reference outlives self.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.len) };
    }
}

/// Types for which every pattern of bits is a value.
pub(super) trait Plain: Copy {}

impl Plain for u16 {}
impl Plain for u32 {}
impl Plain for u64 {}
