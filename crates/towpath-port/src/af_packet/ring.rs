//! The receive ring that a packet socket shares with the kernel (TPACKET_V3), as blocks that are leased.
//!
//! Purpose: the kernel fills a block with frames and passes it to user space by setting TP_STATUS_USER in its header; user space returns
//! it by clearing the status. Between the two, only user space accesses the block. A [`Lease`] is the right to access a part
//! of such a block. Leases can be split. The block returns to the kernel when its last lease is dropped, on any thread.
//!
//! Invariant: the leases of a block do not overlap, and exist only while user space owns the block. `leases[block]` counts them
//! ([`FREE`], or [`OURS`] and their number).
//!
//! Races: the kernel writes a block, then its status; we read the status (Acquire), then the block. We finish with the block,
//! then write its status (Release); the kernel reads the status before it writes the block again. A thread that drops a lease finishes
//! its accesses before it decrements the count (Release); the thread that takes the count to 0 sees them (Acquire).
//!
//! References: Documentation/networking/packet_mmap.rst, linux/if_packet.h.
#![allow(unsafe_code)]

use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::slice;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::mapping::Mapping;

/// Offset of `block_status` in `struct tpacket_block_desc`.
const BLOCK_STATUS: usize = 8;
/// Offset of `seq_num`.
const BLOCK_NUMBER: usize = 24;
/// Value of `Ring::leases`: the block is not leased. It can be if its status is TP_STATUS_USER.
const FREE: u32 = 0;
/// Base value of `Ring::leases` of a leased block, to which the number of leases is added. The last lease writes the status before
/// the block can be claimed again.
const OURS: u32 = 1;

/// The whole ring.
#[derive(Debug)]
pub(crate) struct Ring {
    mapping: Mapping,
    block_size: usize,
    /// Leases per block, in private memory.
    leases: Box<[AtomicU32]>,
}

impl Ring {
    /// Maps the ring of `socket`, configured with `blocks` blocks of `block_size` bytes.
    pub(crate) fn map(socket: BorrowedFd<'_>, block_size: usize, blocks: usize) -> io::Result<Arc<Self>> {
        let mapping = Mapping::of(socket, block_size * blocks, 0)?;
        let leases = (0..blocks).map(|_| AtomicU32::new(0)).collect();
        Ok(Arc::new(Self { mapping, block_size, leases }))
    }

    /// Leases the whole block if the kernel has passed it on and no part of it is leased.
    pub(crate) fn lease(self: &Arc<Self>, block: usize) -> Option<Lease> {
        // Relaxed: an early check, so that an empty ring costs one load. Repeated below.
        if self.status(block).load(Ordering::Relaxed) & libc::TP_STATUS_USER == 0 {
            return None;
        }
        // Acquire: pairs with the Release store of FREE in `Lease::drop`. If the status we saw was that of the block's last round, then either
        // its leases are not gone yet, and this fails; or they are, and the status is seen as cleared below.
        self.leases[block].compare_exchange(FREE, OURS + 1, Ordering::Acquire, Ordering::Relaxed).ok()?;
        // Acquire: pairs with the kernel's write of the status after those of the block's contents.
        if self.status(block).load(Ordering::Acquire) & libc::TP_STATUS_USER == 0 {
            // Relaxed: nothing was done under this claim, and only the thread that uses the port claims.
            self.leases[block].store(FREE, Ordering::Relaxed);
            return None;
        }
        Some(Lease { ring: self.clone(), block, start: 0, end: self.block_size })
    }

    /// Returns true if no part of the ring is leased.
    pub(crate) fn is_free(&self) -> bool {
        // Acquire: as in `lease`; the statuses of the blocks are written.
        self.leases.iter().all(|leases| leases.load(Ordering::Acquire) == FREE)
    }

    /// The block that the kernel passes on next, or has passed on first. Another process may have read the ring.
    ///
    /// The kernel numbers the blocks when it begins to fill them.
    pub(crate) fn position(&self) -> usize {
        loop {
            let passed =
                |block: &usize| self.status(*block).load(Ordering::Acquire) & libc::TP_STATUS_USER != 0;
            let first = (0..self.blocks()).filter(passed).min_by_key(|block| self.number(*block));
            if let Some(first) = first {
                return first;
            }
            let open = (0..self.blocks()).max_by_key(|block| self.number(*block)).unwrap_or(0);
            // Without a passed block the last one is being filled, unless it was passed on meanwhile.
            if self.number(open) == 0 {
                return 0;
            }
            if !(0..self.blocks()).any(|block| passed(&block)) {
                return open;
            }
        }
    }

    /// The number of a block; 0: the kernel has not filled it yet.
    fn number(&self, block: usize) -> u64 {
        let at = self.mapping.at(block * self.block_size + BLOCK_NUMBER, 8).cast();
        // SAFETY: as in `status`; aligned to 8 bytes.
        let number = unsafe { AtomicU64::from_ptr(at) };
        // Relaxed: blocks that are passed on are ordered by their status, and the others are looked at again.
        number.load(Ordering::Relaxed)
    }

    pub(crate) fn blocks(&self) -> usize {
        self.leases.len()
    }

    fn status(&self, block: usize) -> &AtomicU32 {
        let at = self.mapping.at(block * self.block_size + BLOCK_STATUS, 4).cast();
        // SAFETY: inside the mapping, which `self` keeps; aligned, since blocks are whole pages; both sides access it atomically only, and
        // leases leave it out (see `Lease::place`).
        unsafe { AtomicU32::from_ptr(at) }
    }
}

/// The right to a part of a block.
#[derive(Debug)]
pub(crate) struct Lease {
    ring: Arc<Ring>,
    block: usize,
    start: usize,
    end: usize,
}

impl Lease {
    /// The bytes at `range` of the block; `None` when they are not all leased.
    #[inline]
    pub(crate) fn bytes(&self, range: Range<usize>) -> Option<&[u8]> {
        let (at, len) = self.place(range)?;
        // SAFETY: inside the mapping, which `self.ring` keeps; leases of a block that is ours do not overlap, and this one is borrowed:
        // no writer exists. The kernel initialised the memory (zeroes at first).
        Some(unsafe { slice::from_raw_parts(at, len) })
    }

    /// As [`Lease::bytes`], to be changed.
    #[inline]
    pub(crate) fn bytes_mut(&mut self, range: Range<usize>) -> Option<&mut [u8]> {
        let (at, len) = self.place(range)?;
        // SAFETY: as in `bytes`, and this lease is borrowed mutably: no other reader exists.
        Some(unsafe { slice::from_raw_parts_mut(at, len) })
    }

    /// Splits off everything before `at`; `self` keeps the rest.
    ///
    /// # Panics
    /// When `at` is outside the lease.
    pub(crate) fn split_front(&mut self, at: usize) -> Self {
        assert!((self.start..=self.end).contains(&at), "inside the lease");
        // Relaxed: we hold a lease, so the count is not 0 and cannot become it meanwhile.
        self.ring.leases[self.block].fetch_add(1, Ordering::Relaxed);
        let front = Self { ring: self.ring.clone(), block: self.block, start: self.start, end: at };
        self.start = at;
        front
    }

    fn place(&self, range: Range<usize>) -> Option<(*mut u8, usize)> {
        // The status word is shared with the kernel and never part of a slice.
        let outside = range.start < self.start.max(BLOCK_STATUS + 4) || range.end > self.end;
        let len = range.end.checked_sub(range.start).filter(|_| !outside)?;
        Some((self.ring.mapping.at(self.block * self.ring.block_size + range.start, len), len))
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        // Release: the accesses under this lease precede the drop. Acquire: the last drop follows the accesses under all others.
        if self.ring.leases[self.block].fetch_sub(1, Ordering::AcqRel) != OURS + 1 {
            return;
        }
        // Release: pairs with the kernel's read of the status before it fills the block again.
        self.ring.status(self.block).store(libc::TP_STATUS_KERNEL, Ordering::Release);
        // Release: pairs with the claim in `Ring::lease`, which then sees the status as we have just written it, or later.
        self.ring.leases[self.block].store(FREE, Ordering::Release);
    }
}
