//! The frame memory of an XDP socket (UMEM), as owned chunks.
//!
//! Purpose: a [`Chunk`] is the right to access one chunk. User space owns it (free, or lent to a burst), or the kernel does, from the fill
//! or TX ring until it returns in the RX or completion ring. Chunks that a burst drops return on a stack: any thread pushes,
//! the port's thread takes the whole stack.
//!
//! Invariant: at most one `Chunk` exists per index, and none while the kernel owns the chunk. [`Umem::new`] creates each once,
//! [`Chunk::give`] consumes it, and [`Umem::taken`] recreates it only if it was given. `given` is a record of the engine alone; ring contents
//! are not trusted.
//!
//! Races: push writes the links, then the head (Release). Take swaps the head (Acquire), then reads the links. No operation pops a
//! single chunk, so the ABA problem cannot occur.
//!
//! References: Documentation/networking/af_xdp.rst.
#![allow(unsafe_code)]

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::slice;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};

use crate::mapping::Mapping;

/// Bytes per chunk: one page, the kernel's limit without huge pages.
pub(crate) const CHUNK: usize = 4096;
/// Terminator of a list of chunks.
const NONE: u32 = u32::MAX;

#[derive(Debug)]
pub(crate) struct Umem {
    memory: OwnedFd,
    mapping: Mapping,
    chunks: u32,
    /// Stack of returned chunks, linked by `links`.
    returned: AtomicU32,
    links: Box<[AtomicU32]>,
}

/// The right to access one chunk.
#[derive(Debug)]
pub(crate) struct Chunk(u32);

impl Umem {
    /// Allocates `chunks` chunks and returns all of them.
    pub(crate) fn new(chunks: u32) -> io::Result<(Arc<Self>, Vec<Chunk>)> {
        let (memory, mapping) = Mapping::shared("towpath-umem", Self::bytes_of(chunks))?;
        let umem = Self::of(memory, mapping, chunks);
        Ok((Arc::new(umem), (0..chunks).map(Chunk).collect()))
    }

    /// The memory that another process has made for `chunks` chunks. Its chunks are [`free`](Self::free) once that process has stopped.
    pub(crate) fn adopt(memory: OwnedFd, chunks: u32) -> io::Result<Arc<Self>> {
        // A shorter file would raise SIGBUS.
        if rustix::fs::fstat(&memory)?.st_size != Self::bytes_of(chunks) as i64 {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let mapping = Mapping::of(memory.as_fd(), Self::bytes_of(chunks), 0)?;
        Ok(Arc::new(Self::of(memory, mapping, chunks)))
    }

    fn of(memory: OwnedFd, mapping: Mapping, chunks: u32) -> Self {
        let links = (0..chunks).map(|_| AtomicU32::new(NONE)).collect();
        Self { memory, mapping, chunks, returned: AtomicU32::new(NONE), links }
    }

    /// The chunks, and a byte for each that says whether the kernel owns it.
    const fn bytes_of(chunks: u32) -> usize {
        chunks as usize * (CHUNK + 1)
    }

    /// A descriptor of the memory for another process.
    pub(crate) fn memory(&self) -> io::Result<OwnedFd> {
        self.memory.try_clone()
    }

    /// All chunks that the kernel does not own. The caller gives up those that it has: none may be lent ([`lent`](Self::lent)).
    pub(crate) fn free(&self) -> Vec<Chunk> {
        // Relaxed: no chunk is lent, so no thread pushes.
        self.returned.store(NONE, Ordering::Relaxed);
        (0..self.chunks).filter(|chunk| !self.is_given(*chunk)).map(Chunk).collect()
    }

    /// Number of chunks that bursts have, if `free` are free at the port.
    pub(crate) fn lent(&self, free: usize) -> usize {
        // Acquire: pairs with the exchange in `put_back`. Only the caller takes the stack.
        let mut next = self.returned.load(Ordering::Acquire);
        let mut there = free + (0..self.chunks).filter(|chunk| self.is_given(*chunk)).count();
        while next != NONE {
            there += 1;
            // Relaxed: seen by the Acquire above.
            next = self.links[next as usize].load(Ordering::Relaxed);
        }
        (self.chunks as usize).saturating_sub(there)
    }

    /// Whether the kernel owns a chunk: a byte behind the chunks, for a process that takes the port over.
    fn given(&self, chunk: u32) -> &AtomicU8 {
        assert!(chunk < self.chunks, "a chunk of the memory");
        let at = self.mapping.at(self.chunks as usize * CHUNK + chunk as usize, 1);
        // SAFETY: inside the mapping, which `self` keeps; the kernel does not write there, and all accesses are atomic.
        unsafe { AtomicU8::from_ptr(at) }
    }

    fn is_given(&self, chunk: u32) -> bool {
        // Relaxed: only the port's thread changes it, or the process before, which has stopped.
        self.given(chunk).load(Ordering::Relaxed) != 0
    }

    /// Address and length of the UMEM, for XDP_UMEM_REG.
    pub(crate) fn place(&self) -> (u64, u64) {
        let len = self.chunks as usize * CHUNK;
        (self.mapping.at(0, len) as u64, len as u64)
    }

    /// Transfers the chunk to the kernel and returns its UMEM address.
    pub(crate) fn give(&self, chunk: Chunk) -> u64 {
        self.given(chunk.0).store(1, Ordering::Relaxed);
        u64::from(chunk.0) * CHUNK as u64
    }

    /// Takes back the chunk that contains `address`, read from a ring; `None` if the kernel did not own it.
    pub(crate) fn taken(&self, address: u64) -> Option<Chunk> {
        let number = u32::try_from(address / CHUNK as u64).ok()?;
        if number >= self.chunks || !self.is_given(number) {
            return None;
        }
        self.given(number).store(0, Ordering::Relaxed);
        Some(Chunk(number))
    }

    /// A range of a chunk; `None` if it exceeds the chunk.
    #[inline]
    pub(crate) fn bytes<'a>(&'a self, chunk: &'a Chunk, range: Range<usize>) -> Option<&'a [u8]> {
        let (at, len) = self.range(chunk, range)?;
        // SAFETY: inside the mapping, which `self` keeps; the only right to the chunk is borrowed, so neither the kernel nor another
        // thread writes. A new memfd is initialized with zeroes.
        Some(unsafe { slice::from_raw_parts(at, len) })
    }

    /// As [`Umem::bytes`], mutable.
    #[inline]
    pub(crate) fn bytes_mut<'a>(&'a self, chunk: &'a mut Chunk, range: Range<usize>) -> Option<&'a mut [u8]> {
        let (at, len) = self.range(chunk, range)?;
        // SAFETY: as in `bytes`, and the chunk is borrowed mutably: no other reader exists.
        Some(unsafe { slice::from_raw_parts_mut(at, len) })
    }

    fn range(&self, chunk: &Chunk, range: Range<usize>) -> Option<(*mut u8, usize)> {
        let len = range.end.checked_sub(range.start).filter(|_| range.end <= CHUNK)?;
        Some((self.mapping.at(chunk.0 as usize * CHUNK + range.start, len), len))
    }

    /// Returns chunks to the port, from any thread.
    fn put_back(&self, chunks: impl Iterator<Item = Chunk>) {
        let mut first = NONE;
        let mut last = None;
        for Chunk(number) in chunks {
            // Relaxed: published by the exchange below.
            self.links[number as usize].store(first, Ordering::Relaxed);
            first = number;
            last.get_or_insert(number);
        }
        let Some(last) = last else { return };
        // Relaxed: the exchange checks it.
        let mut head = self.returned.load(Ordering::Relaxed);
        loop {
            // Relaxed: published by the exchange.
            self.links[last as usize].store(head, Ordering::Relaxed);
            // Release: pairs with the swap in `take_back`, which then sees the links and all earlier accesses to the chunks.
            match self.returned.compare_exchange_weak(head, first, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return,
                Err(now) => head = now,
            }
        }
    }

    /// Takes all returned chunks.
    pub(crate) fn take_back(&self, free: &mut Vec<Chunk>) {
        // Relaxed: an early check that is cheap if the stack is empty.
        if self.returned.load(Ordering::Relaxed) == NONE {
            return;
        }
        // Acquire: pairs with the exchange in `put_back`. The swap is a read-modify-write, so it sees the pushes before the last one, too.
        let mut next = self.returned.swap(NONE, Ordering::Acquire);
        while next != NONE {
            free.push(Chunk(next));
            // Relaxed: seen by the Acquire above.
            next = self.links[next as usize].load(Ordering::Relaxed);
        }
    }
}

/// Limit on chunks lent to one burst.
pub(crate) const LENT: usize = 64;

/// The chunks lent to a burst, by index.
#[derive(Debug)]
pub(crate) struct Chunks {
    umem: Arc<Umem>,
    chunks: [Option<Chunk>; LENT],
    len: usize,
}

impl Chunks {
    pub(crate) fn new(umem: Arc<Umem>) -> Self {
        Self { umem, chunks: [const { None }; LENT], len: 0 }
    }

    /// Adds a chunk and returns its index.
    ///
    /// # Panics
    /// Panics if it already holds [`LENT`] chunks.
    pub(crate) fn add(&mut self, chunk: Chunk) -> u32 {
        self.chunks[self.len] = Some(chunk);
        self.len += 1;
        self.len as u32 - 1
    }

    #[inline]
    pub(crate) fn bytes(&self, number: u32, range: Range<usize>) -> Option<&[u8]> {
        self.umem.bytes(self.chunks.get(number as usize)?.as_ref()?, range)
    }

    pub(crate) fn bytes_mut(&mut self, number: u32, range: Range<usize>) -> Option<&mut [u8]> {
        self.umem.bytes_mut(self.chunks.get_mut(number as usize)?.as_mut()?, range)
    }
}

impl Drop for Chunks {
    fn drop(&mut self) {
        self.umem.put_back(self.chunks.iter_mut().filter_map(Option::take));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_come_back_from_every_thread() {
        let (umem, mut free) = Umem::new(256).unwrap();
        for _ in 0..50 {
            std::thread::scope(|scope| {
                for _ in 0..4 {
                    let mut lent = Chunks::new(umem.clone());
                    free.drain(..LENT.min(free.len())).for_each(|chunk| {
                        lent.add(chunk);
                    });
                    scope.spawn(move || {
                        for number in 0..lent.len as u32 {
                            lent.bytes_mut(number, 0..8).unwrap().fill(number as u8);
                        }
                        drop(lent);
                    });
                }
            });
            umem.take_back(&mut free);
            let mut numbers: Vec<u32> = free.iter().map(|chunk| chunk.0).collect();
            numbers.sort_unstable();
            assert!(numbers.into_iter().eq(0..256));
        }
    }

    #[test]
    fn chunks_that_the_kernel_does_not_own_are_not_taken() {
        let (umem, mut free) = Umem::new(2).unwrap();
        assert!(umem.taken(0).is_none());
        let address = umem.give(free.pop().unwrap());
        assert!(umem.taken(address + 100).is_some(), "anywhere in the chunk");
        assert!(umem.taken(address).is_none(), "only once");
        assert!(umem.taken(1 << 40).is_none());
        let chunk = free.pop().unwrap();
        assert!(umem.bytes(&chunk, 4000..4097).is_none());
    }
}
