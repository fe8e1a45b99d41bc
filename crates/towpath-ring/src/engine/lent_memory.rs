//! Memory that was sent to a client, and whether a process still has it.
//!
//! What: the end of a channel does not take memory from its client, and a client can pass its descriptors on before
//! it exits. It can also keep a descriptor that only names the memory (`O_PATH` of open(2)) and open it later. An inotify
//! watch (inotify(7)) on the file of a memfd ends when the kernel frees the file: after the last descriptor, mapping and
//! `O_PATH` descriptor in any process, also in a message that is not received yet. A memfd has no name, so nothing else
//! keeps it.
//!
//! The client gets descriptors that are opened for it through `/proc/self/fd`: those of memory that it must not write
//! are read-only.
//!
//! Limits: the watch needs `/proc` and room in `fs.inotify.max_user_watches` and `max_user_instances`. Without them, the
//! memory is not watched, and counts until the client's process ends (`quota.rs`).

use std::collections::BTreeSet;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags};
use rustix::io::Errno;

use crate::shm::sys;

/// The watches of this process: an inotify instance is a scarce resource (128 for each user by default).
static WATCHES: Mutex<Watches> = Mutex::new(Watches { inotify: None, live: BTreeSet::new() });

/// One memory that was sent to a client.
#[derive(Debug)]
pub(crate) struct LentMemory {
    watch: i32,
    pub(crate) bytes: u64,
}

impl LentMemory {
    /// Returns true if a process still has the memory; this process counts.
    pub(crate) fn is_held(&self) -> bool {
        let mut watches = lock();
        // Without an answer, it counts as held.
        let _ = watches.read();
        watches.live.contains(&self.watch)
    }
}

impl Drop for LentMemory {
    fn drop(&mut self) {
        lock().remove(self.watch);
    }
}

/// Opens the memory of `fd` for a client, which may write it if `write`. Returns the client's descriptor, and the
/// memory if its end is visible.
pub(crate) fn lend(fd: OwnedFd, bytes: usize, write: bool) -> io::Result<(OwnedFd, Option<LentMemory>)> {
    let client = match sys::reopen(fd.as_fd(), write) {
        // Without /proc, the client gets the descriptor itself.
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok((fd, None)),
        client => client?,
    };
    let lent = match lock().add(fd.as_fd()) {
        Ok(watch) => Some(LentMemory { watch, bytes: bytes as u64 }),
        Err(e) => {
            log::debug!("the end of {bytes} bytes of shared memory is not visible: inotify: {e}");
            None
        }
    };
    Ok((client, lent))
}

fn lock() -> MutexGuard<'static, Watches> {
    WATCHES.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Watches {
    inotify: Option<OwnedFd>,
    /// Watches of files that exist.
    live: BTreeSet<i32>,
}

impl Watches {
    fn add(&mut self, fd: BorrowedFd<'_>) -> io::Result<i32> {
        // The kernel's queue of events stays short, also if no memory is asked for.
        self.read()?;
        let inotify = match self.inotify.take() {
            Some(inotify) => inotify,
            None => inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?,
        };
        let inotify = self.inotify.insert(inotify);
        let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
        let watch = inotify::add_watch(&*inotify, path, WatchFlags::DELETE_SELF)?;
        self.live.insert(watch);
        Ok(watch)
    }

    fn remove(&mut self, watch: i32) {
        if self.live.remove(&watch)
            && let Some(inotify) = &self.inotify
        {
            // Fails if the file was freed meanwhile.
            let _ = inotify::remove_watch(inotify, watch);
        }
    }

    /// Takes the watches that have ended out of `live`.
    fn read(&mut self) -> io::Result<()> {
        let Some(inotify) = &self.inotify else { return Ok(()) };
        let mut buffer = [MaybeUninit::uninit(); 4096];
        let mut reader = inotify::Reader::new(inotify, &mut buffer);
        let mut overflow = false;
        loop {
            match reader.next() {
                Ok(event) if event.events().contains(ReadFlags::QUEUE_OVERFLOW) => overflow = true,
                Ok(event) => {
                    self.live.remove(&event.wd());
                }
                Err(Errno::AGAIN) => break,
                Err(e) => return Err(e.into()),
            }
        }
        // Events were lost (fs.inotify.max_queued_events): the kernel lists the watches that exist.
        if overflow {
            let list = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", inotify.as_raw_fd()))?;
            let existing = existing(&list);
            self.live.retain(|watch| existing.contains(watch));
        }
        Ok(())
    }
}

/// The watches in the kernel's description of an inotify descriptor (proc_pid_fdinfo(5)).
fn existing(list: &str) -> BTreeSet<i32> {
    let watches = list.lines().filter_map(|line| line.strip_prefix("inotify wd:"));
    watches.filter_map(|rest| i32::from_str_radix(rest.split(' ').next()?, 16).ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shm::region::{Access, Words};

    /// Opens the file of a memfd without access to its bytes.
    fn named(fd: BorrowedFd<'_>) -> OwnedFd {
        use rustix::fs::{Mode, OFlags, open};
        let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
        open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).unwrap()
    }

    #[test]
    fn memory_is_held_by_descriptors_copies_mappings_and_names() {
        for write in [false, true] {
            let fd = sys::memfd("lent", 4096).unwrap();
            let ours = Words::map(fd.as_fd(), 4096, Access::Foreign).unwrap();
            let (client, lent) = lend(fd, 4096, write).unwrap();
            let lent = lent.expect("the end of memory is visible on this kernel");
            assert!(lent.is_held());
            let copy = client.try_clone().unwrap();
            drop(client);
            assert!(lent.is_held(), "a copy");
            let mapping = Words::map(copy.as_fd(), 4096, Access::Foreign).unwrap();
            let name = named(copy.as_fd());
            drop(copy);
            assert!(lent.is_held(), "a mapping");
            drop(mapping);
            assert!(lent.is_held(), "our mapping");
            drop(ours);
            assert!(lent.is_held(), "a descriptor that only names it");
            // It still gives access to the bytes.
            drop(sys::reopen(name.as_fd(), write).unwrap());
            drop(name);
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

    #[test]
    fn a_watch_ends_with_its_value_and_lost_events_are_made_up_for() {
        let lent = |name| {
            let (client, lent) = lend(sys::memfd(name, 4096).unwrap(), 4096, true).unwrap();
            (client, lent.unwrap())
        };
        let (client, first) = lent("first");
        let watch = first.watch;
        drop(first);
        assert!(!lock().live.contains(&watch));
        drop(client);
        // The kernel's list has the watch of the file that exists.
        let (client, second) = lent("second");
        let list = || {
            let watches = lock();
            let fd = watches.inotify.as_ref().unwrap().as_raw_fd();
            existing(&std::fs::read_to_string(format!("/proc/self/fdinfo/{fd}")).unwrap())
        };
        assert!(list().contains(&second.watch) && !list().contains(&watch));
        drop(client);
        assert!(!list().contains(&second.watch));
        let text =
            "pos:\t0\nflags:\t02004000\ninotify wd:1f ino:c070 sdev:1 mask:400\ninotify wd:2 ino:c071\n";
        assert_eq!(existing(text), BTreeSet::from([2, 0x1f]));
    }

    #[towpath_testenv::needs(hugetlb)]
    #[test]
    fn huge_pages_are_lent_too() {
        let (client, lent) = lend(sys::tests::hugetlb(2 << 20), 2 << 20, false).unwrap();
        let lent = lent.expect("the end of memory is visible on this kernel");
        let held = lent.is_held();
        drop(client);
        assert!(held && !lent.is_held());
    }
}
