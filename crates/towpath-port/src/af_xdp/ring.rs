//! The four rings of an XDP socket: single producer, single consumer, shared with the kernel.
//!
//! What: an array of a power of two of entries, a producer's and a consumer's counter that run freely. The producer writes entries, then its
//! counter (Release); the consumer reads that counter (Acquire), then the entries, then moves its own (Release), which the
//! producer reads (Acquire) before it writes entries again. One side is the kernel.
//! Invariant: our own counter lives in our own memory; the shared one is only written. The other's is read once for each call, and its distance
//! from ours is bounded by the size of the ring.
//!
//! References: net/xdp/xsk_queue.h, linux/if_xdp.h.
#![allow(unsafe_code)]

use std::io;
use std::marker::PhantomData;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::mapping::Mapping;

/// Where things are in a ring's mapping (`struct xdp_ring_offset`).
#[derive(Clone, Copy, Debug)]
pub(super) struct Offsets {
    pub(super) producer: usize,
    pub(super) consumer: usize,
    pub(super) entries: usize,
    pub(super) flags: usize,
}

/// An entry of a ring: plain numbers, for which every pattern of bits is a value.
pub(super) trait Entry: Copy {}

/// Fill and completion rings have addresses in the UMEM.
impl Entry for u64 {}

/// `struct xdp_desc`: RX and TX rings.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Descriptor {
    pub(super) address: u64,
    pub(super) len: u32,
    pub(super) options: u32,
}

impl Entry for Descriptor {}

/// A ring, seen from the side of which `ours` is the counter.
#[derive(Debug)]
pub(super) struct Ring<T> {
    mapping: Mapping,
    offsets: Offsets,
    size: u32,
    /// Our own counter.
    ours: u32,
    /// We write the entries.
    producing: bool,
    entries: PhantomData<T>,
}

impl<T: Entry> Ring<T> {
    /// Maps a ring of `size` entries that `socket` was asked to make, at its page offset.
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

    /// For a producer: how many entries there is room for. For a consumer: how many there are.
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
    /// When it is not in the ring (`ahead` beyond its size).
    pub(super) fn get(&self, ahead: u32) -> T {
        // SAFETY: `entry` gives a place for one T inside the mapping; the caller saw by `ready` that the kernel has written it, and
        // every pattern of bits is a T. Volatile: the memory is shared.
        unsafe { self.entry(ahead).read_volatile() }
    }

    /// Writes the entry `ahead` of our counter; it is published by [`Ring::advance`].
    ///
    /// # Panics
    /// As [`Ring::get`].
    pub(super) fn set(&mut self, ahead: u32, value: T) {
        // SAFETY: as in `get`; the kernel reads it after our counter has passed it.
        unsafe { self.entry(ahead).write_volatile(value) }
    }

    /// Moves our counter on.
    pub(super) fn advance(&mut self, by: u32) {
        self.ours = self.ours.wrapping_add(by);
        let ours = if self.producing { self.offsets.producer } else { self.offsets.consumer };
        // Release: pairs with the kernel's Acquire; we are done with the entries up to there.
        self.counter(ours).store(self.ours, Ordering::Release);
    }

    /// Whether the kernel sleeps on this ring, and must be called (XDP_RING_NEED_WAKEUP).
    pub(super) fn needs_wakeup(&self) -> bool {
        // Relaxed: a hint that orders nothing; who misses it is told by the next call.
        self.counter(self.offsets.flags).load(Ordering::Relaxed) & libc::XDP_RING_NEED_WAKEUP != 0
    }

    /// For a producer: entries that the kernel has not taken yet.
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
