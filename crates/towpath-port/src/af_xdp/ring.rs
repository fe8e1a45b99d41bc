//! The four rings of an XDP socket: single producer, single consumer, shared with the kernel.
//!
//! Purpose: an array of entries (a power of two) with free-running producer and consumer counters. The producer writes entries, then its
//! counter (Release). The consumer reads that counter (Acquire), then the entries, then advances its own (Release), which the
//! producer reads (Acquire) before it overwrites entries. One side is the kernel.
//! Invariant: our counter is kept in private memory; its shared copy is only written. The other side's counter is read once per call, and
//! its distance from ours is clamped to the size of the ring.
//!
//! References: net/xdp/xsk_queue.h, linux/if_xdp.h.
#![allow(unsafe_code)]

use std::io;
use std::marker::PhantomData;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::mapping::Mapping;

/// Offsets within a ring's mapping (`struct xdp_ring_offset`).
#[derive(Clone, Copy, Debug)]
pub(super) struct Offsets {
    pub(super) producer: usize,
    pub(super) consumer: usize,
    pub(super) entries: usize,
    pub(super) flags: usize,
}

/// An entry of a ring: plain integers, valid for every bit pattern.
pub(super) trait Entry: Copy {}

/// Entries of the fill and completion rings: UMEM addresses.
impl Entry for u64 {}

/// Entries of the RX and TX rings: `struct xdp_desc`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Descriptor {
    pub(super) address: u64,
    pub(super) len: u32,
    pub(super) options: u32,
}

impl Entry for Descriptor {}

/// One side of a ring; `ours` is the counter of this side.
#[derive(Debug)]
pub(super) struct Ring<T> {
    mapping: Mapping,
    offsets: Offsets,
    size: u32,
    /// Counter of this side.
    ours: u32,
    /// This side is the producer.
    producing: bool,
    entries: PhantomData<T>,
}

impl<T: Entry> Ring<T> {
    /// Maps a ring of `size` entries of `socket` at its page offset.
    pub(super) fn map(
        socket: BorrowedFd<'_>,
        page: u64,
        offsets: Offsets,
        size: u32,
        producing: bool,
    ) -> io::Result<Self> {
        let mapping = Mapping::of(socket, offsets.entries + size as usize * size_of::<T>(), page)?;
        Ok(Self { mapping, offsets, size, ours: 0, producing, entries: PhantomData })
    }

    /// For a producer: the number of free entries. For a consumer: the number of available entries.
    pub(super) fn ready(&self) -> u32 {
        let other = if self.producing { self.offsets.consumer } else { self.offsets.producer };
        // Acquire: pairs with the kernel's Release; it is done with the entries up to there.
        let other = self.counter(other).load(Ordering::Acquire);
        if self.producing {
            self.size.saturating_sub(self.ours.wrapping_sub(other))
        } else {
            other.wrapping_sub(self.ours).min(self.size)
        }
    }

    /// The entry `ahead` of our counter.
    ///
    /// # Panics
    /// Panics if `ahead` is not below the size of the ring.
    pub(super) fn get(&self, ahead: u32) -> T {
        // SAFETY: `entry` gives a place for one T inside the mapping; the caller saw by `ready` that the kernel has written it, and
        // every pattern of bits is a T. Volatile: the memory is shared.
        unsafe { self.entry(ahead).read_volatile() }
    }

    /// Writes the entry `ahead` of our counter. [`Ring::advance`] publishes it.
    ///
    /// # Panics
    /// As [`Ring::get`].
    pub(super) fn set(&mut self, ahead: u32, value: T) {
        // SAFETY: as in `get`; the kernel reads it after our counter has passed it.
        unsafe { self.entry(ahead).write_volatile(value) }
    }

    /// Reads our counter: another process has used the ring.
    pub(super) fn resume(&mut self) {
        let ours = if self.producing { self.offsets.producer } else { self.offsets.consumer };
        // Acquire: pairs with the Release in `advance`. Only this process or its predecessor has written it.
        self.ours = self.counter(ours).load(Ordering::Acquire);
    }

    /// Advances our counter.
    pub(super) fn advance(&mut self, by: u32) {
        self.ours = self.ours.wrapping_add(by);
        let ours = if self.producing { self.offsets.producer } else { self.offsets.consumer };
        // Release: pairs with the kernel's Acquire; we are done with the entries up to there.
        self.counter(ours).store(self.ours, Ordering::Release);
    }

    /// Returns true if the kernel needs a wakeup for this ring (XDP_RING_NEED_WAKEUP).
    pub(super) fn needs_wakeup(&self) -> bool {
        // Relaxed: a hint. A missed flag is seen by the next call.
        self.counter(self.offsets.flags).load(Ordering::Relaxed) & libc::XDP_RING_NEED_WAKEUP != 0
    }

    /// For a producer: the number of entries that the kernel has not consumed.
    pub(super) fn outstanding(&self) -> u32 {
        self.size - self.ready()
    }

    fn entry(&self, ahead: u32) -> *mut T {
        assert!(ahead < self.size, "an entry of the ring");
        let index = (self.ours.wrapping_add(ahead) & (self.size - 1)) as usize;
        self.mapping.at(self.offsets.entries + index * size_of::<T>(), size_of::<T>()).cast()
    }

    fn counter(&self, offset: usize) -> &AtomicU32 {
        let at = self.mapping.at(offset, 4).cast();
        // SAFETY: inside the mapping, which `self` keeps; the kernel aligns it, and both sides access it atomically only.
        unsafe { AtomicU32::from_ptr(at) }
    }
}
