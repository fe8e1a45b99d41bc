//! Memory that was sent to a client, and whether another process still has it.
//!
//! What: the end of a channel does not take memory from its client, and a client can pass its descriptors on before
//! it exits. The client therefore gets descriptors of files that are opened for it through `/proc/self/fd`. The
//! kernel counts such opens for each inode (`i_writecount`, `i_readcount`) until the last descriptor and mapping of
//! the open file is gone, in any process. It does not count the descriptor of memfd_create(2), which the engine
//! keeps. A write lease (`F_SETLEASE`, fcntl(2)) on a descriptor that the engine opens for reading is granted only if
//! nothing else is counted (`check_conflicting_open`, fs/locks.c).
//!
//! Limits: the lease needs `/proc`, `fs.leases-enable` and Linux 5.3 or later. [`lend`] tries both answers before the
//! client gets the descriptor; if one is wrong, the memory is not watched.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use crate::shm::sys;

/// One memory that was sent to a client.
#[derive(Debug)]
pub(crate) struct LentMemory {
    fd: OwnedFd,
    pub(crate) bytes: u64,
}

impl LentMemory {
    /// Returns true if another process, or a mapping of the client's descriptor, still has the memory. No lease, no
    /// proof: it counts as held.
    pub(crate) fn is_held(&self) -> bool {
        !sys::is_unheld(self.fd.as_fd()).unwrap_or(false)
    }
}

/// Opens the memory of `fd` for a client, which may write it if `write`. Returns the client's descriptor, and the
/// memory if its holders are visible.
pub(crate) fn lend(fd: OwnedFd, bytes: usize, write: bool) -> io::Result<(OwnedFd, Option<LentMemory>)> {
    let is_unheld = |expected| sys::is_unheld(fd.as_fd()).is_ok_and(|unheld| unheld == expected);
    let works_before = is_unheld(true);
    let client = match sys::reopen(fd.as_fd(), write) {
        // Without /proc, the client gets the descriptor itself.
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok((fd, None)),
        client => client?,
    };
    let is_visible = works_before && is_unheld(false);
    let lent = is_visible.then_some(LentMemory { fd, bytes: bytes as u64 });
    Ok((client, lent))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shm::region::{Access, Words};

    #[test]
    fn memory_is_held_by_descriptors_copies_and_mappings() {
        for write in [false, true] {
            let fd = sys::memfd("lent", 4096).unwrap();
            let ours = Words::map(fd.as_fd(), 4096, Access::Foreign).unwrap();
            let (client, lent) = lend(fd, 4096, write).unwrap();
            let lent = lent.expect("holders are visible on this kernel");
            assert!(lent.is_held());
            let copy = client.try_clone().unwrap();
            drop(client);
            assert!(lent.is_held(), "a copy");
            let mapping = Words::map(copy.as_fd(), 4096, Access::Foreign).unwrap();
            drop(copy);
            assert!(lent.is_held(), "a mapping");
            // A client can open its descriptor again, too.
            drop((mapping, ours));
            assert!(!lent.is_held());
        }
    }

    #[test]
    fn a_descriptor_in_flight_and_one_that_the_client_opened_again_hold_it() {
        let fd = sys::memfd("lent", 4096).unwrap();
        let (client, lent) = lend(fd, 4096, true).unwrap();
        let lent = lent.unwrap();
        let (one, other) = sys::pair().unwrap();
        assert_eq!(sys::send(&one, b"x", &[client.as_fd()]).unwrap(), sys::Sent::Yes);
        let again = sys::reopen(client.as_fd(), false).unwrap();
        drop(client);
        drop(one);
        assert!(lent.is_held());
        drop(other);
        assert!(lent.is_held());
        drop(again);
        assert!(!lent.is_held());
    }

    #[towpath_testenv::needs(hugetlb)]
    #[test]
    fn huge_pages_are_lent_too() {
        let (client, lent) = lend(sys::tests::hugetlb(2 << 20), 2 << 20, false).unwrap();
        // Kernels without leases on hugetlbfs do not watch it.
        let held = lent.as_ref().is_none_or(LentMemory::is_held);
        drop(client);
        assert!(held && !lent.is_some_and(|lent| lent.is_held()));
    }
}
