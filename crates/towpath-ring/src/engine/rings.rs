//! The memory of a lane at the engine: an RX ring, a TX ring, and the engine's private state of both.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use crate::engine::endpoint::Config;
use crate::engine::lent_memory::{LentMemory, lend};
use crate::engine::tx_ring::TxRing;
use crate::engine::verdict_reader::VerdictReader;
use crate::lane::producer::Producer;
use crate::reaper::{Reaped, Teardown};
use crate::shm::abi::{self, Layout, VERSION};
use crate::shm::region::{Access, Payload, Words};
use crate::shm::seq::Seq;
use crate::shm::sync::Ordering;
use crate::shm::sys;

/// The rings of a lane.
#[derive(Debug)]
pub(crate) struct Rings {
    /// Memory that the engine writes.
    pub(crate) own: Words,
    /// Memory that the client writes.
    pub(crate) theirs: Words,
    pub(crate) payload: Payload,
    pub(crate) rx: Producer,
    pub(crate) verdict_reader: VerdictReader,
    pub(crate) tx: TxRing,
    /// Memfd of the TX payload.
    pub(crate) tx_fd: Reaped<OwnedFd>,
    pub(crate) layout: Layout,
    /// True if the RX payload is in huge pages.
    pub(crate) huge: bool,
}

/// Descriptors for the client: engine memory, RX payload, client memory, TX payload.
#[derive(Debug)]
pub(crate) struct Memory {
    fds: [OwnedFd; 4],
    /// The memory whose holders are visible. None if those of one are not.
    lent: Option<Vec<LentMemory>>,
}

impl Memory {
    /// Opens each memory for the client: descriptor, size, whether the client writes it.
    fn lend(memory: [(OwnedFd, usize, bool); 4]) -> std::io::Result<Self> {
        let (mut fds, mut all) = (Vec::with_capacity(4), Some(Vec::new()));
        for (fd, bytes, write) in memory {
            let (client, lent) = lend(fd, bytes, write)?;
            fds.push(client);
            all = all.zip(lent).map(|(mut all, lent)| {
                all.push(lent);
                all
            });
        }
        let fds = fds.try_into().map_err(|_| std::io::ErrorKind::InvalidInput)?;
        Ok(Self { fds, lent: all })
    }

    pub(crate) fn fds(&self) -> [BorrowedFd<'_>; 4] {
        self.fds.each_ref().map(AsFd::as_fd)
    }

    /// Closes the client's descriptors, and returns the memory.
    pub(crate) fn lent(self) -> Option<Vec<LentMemory>> {
        self.lent
    }
}

/// A payload area that only this process writes: mapped for writing, then sealed.
#[derive(Debug)]
pub(crate) struct Area {
    pub(crate) fd: OwnedFd,
    pub(crate) payload: Payload,
    /// True if it is in huge pages.
    pub(crate) huge: bool,
}

impl Area {
    /// Creates an area. Uses huge pages if they are wanted, the size is a multiple of them, and the system has
    /// enough.
    pub(crate) fn make(name: &str, bytes: usize, huge: bool) -> std::io::Result<Self> {
        if huge && bytes.is_multiple_of(sys::HUGE_PAGE) {
            match Self::huge(name, bytes) {
                Ok(area) => return Ok(area),
                Err(e) => log::debug!("no huge pages for {bytes} bytes ({e}): using ordinary pages"),
            }
        }
        Self::seal(sys::memfd(name, bytes)?, bytes, false)
    }

    fn huge(name: &str, bytes: usize) -> std::io::Result<Self> {
        let area = Self::seal(sys::huge_memfd(name, bytes)?, bytes, true)?;
        // Before Linux 5.14, the seal had no effect on huge pages.
        if Payload::map(area.fd.as_fd(), bytes, Access::Own).is_ok() {
            return Err(std::io::ErrorKind::Unsupported.into());
        }
        Ok(area)
    }

    fn seal(fd: OwnedFd, bytes: usize, huge: bool) -> std::io::Result<Self> {
        let payload = Payload::map(fd.as_fd(), bytes, Access::Own)?;
        sys::seal(&fd, sys::READ_ONLY)?;
        Ok(Self { fd, payload, huge })
    }
}

/// Sequence numbers of the first messages.
#[derive(Clone, Copy, Debug)]
pub(crate) struct First {
    pub(crate) rx: Seq,
    pub(crate) tx: Seq,
}

impl Rings {
    /// Makes the memory and seals it.
    pub(crate) fn make(
        config: &Config,
        layout: Layout,
        first: First,
        teardown: &Arc<Teardown>,
    ) -> std::io::Result<(Self, Memory)> {
        let engine_fd = sys::memfd("towpath-engine", layout.engine_bytes())?;
        let client_fd = sys::memfd("towpath-client", layout.client_bytes())?;
        let tx_fd = sys::memfd("towpath-tx", layout.tx.bytes())?;
        // Mapped for writing before the seal: afterwards no process can map it for writing, or write(2) to it.
        let mut own = Words::map(engine_fd.as_fd(), layout.engine_bytes(), Access::Own)?;
        let Area { fd: payload_fd, mut payload, huge } =
            Area::make("towpath-rx", layout.rx.bytes(), config.huge_pages)?;
        sys::seal(&engine_fd, sys::READ_ONLY)?;
        sys::seal(&client_fd, sys::WRITABLE)?;
        sys::seal(&tx_fd, sys::WRITABLE)?;
        let mut theirs = Words::map(client_fd.as_fd(), layout.client_bytes(), Access::Foreign)?;
        let mut tx_payload = Payload::map(tx_fd.as_fd(), layout.tx.bytes(), Access::Foreign)?;
        own.reap(teardown);
        theirs.reap(teardown);
        payload.reap(teardown);
        tx_payload.reap(teardown);
        // Relaxed: the message with the descriptors orders it.
        own.word(abi::IDENT).store(u64::from(abi::MAGIC) | u64::from(VERSION) << 32, Ordering::Relaxed);
        let rx = Producer::new(layout.rx_place(), first.rx);
        rx.clear(&own);
        let kept_fd = teardown.wrap(tx_fd.try_clone()?);
        let rings = Self {
            own,
            theirs,
            payload,
            rx,
            verdict_reader: VerdictReader::new(config, &layout, first.rx),
            tx: TxRing::new(&layout, tx_payload, first.tx),
            tx_fd: kept_fd,
            layout,
            huge,
        };
        let memory = [
            (engine_fd, layout.engine_bytes(), false),
            (payload_fd, layout.rx.bytes(), false),
            (client_fd, layout.client_bytes(), true),
            (tx_fd, layout.tx.bytes(), true),
        ];
        Ok((rings, Memory::lend(memory)?))
    }
}
