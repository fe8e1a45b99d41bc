#![allow(unsafe_code)]
//! A shared memory page between two sides of a measurement, for raw limits.

use std::ffi::c_void;
use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

use anyhow::{Context, Result};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

const LEN: usize = 4096;

pub(crate) struct Mapping {
    base: NonNull<c_void>,
    file: File,
}

impl Mapping {
    pub(crate) fn create() -> Result<Self> {
        let file = File::from(memfd_create("towpath-bench", MemfdFlags::CLOEXEC)?);
        ftruncate(&file, LEN as u64)?;
        Self::map(file)
    }

    /// Maps the page that [`Mapping::path`] of another process names.
    pub(crate) fn open(path: &str) -> Result<Self> {
        let file = OpenOptions::new().read(true).write(true).open(path);
        Self::map(file.with_context(|| format!("opening the shared page {path}"))?)
    }

    pub(crate) fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.file.as_raw_fd())
    }

    /// The first word of line `line`. Lines are 128 bytes apart, because the prefetcher fetches pairs of cache lines.
    pub(crate) fn word(&self, line: usize) -> &AtomicU64 {
        assert!(line < LEN / 128);
        // SAFETY: the assertion above checked that the offset is within the mapping.
        let at = unsafe { self.base.byte_add(line * 128) };
        // SAFETY: `map` mapped LEN bytes readable and writable, page-aligned, for the lifetime of self; the other process runs this
        // program and also accesses the word as an atomic.
        unsafe { at.cast::<AtomicU64>().as_ref() }
    }

    fn map(file: File) -> Result<Self> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::SHARED | MapFlags::POPULATE;
        // SAFETY: a new mapping at an address chosen by the kernel overlaps no other; the file is LEN bytes long.
        let base = unsafe { mmap(std::ptr::null_mut(), LEN, protection, flags, &file, 0) };
        let base = NonNull::new(base.context("mapping the shared page")?).context("mmap gave address 0")?;
        Ok(Self { base, file })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: base and LEN are those of mmap, and no reference outlives self.
        let _ = unsafe { munmap(self.base.as_ptr(), LEN) };
    }
}
