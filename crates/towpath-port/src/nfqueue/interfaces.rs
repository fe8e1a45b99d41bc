//! A cache of the positions of interfaces in the list of a configuration, by index.
//!
//! What: a packet of the kernel has the indices of its interfaces, and rules name interfaces. The name of an index is looked up once
//! ([`Interfaces::position`]), and again after [`KEEP`], because an interface may be renamed and its index reused.
//!
//! Invariant: `known` has at most [`MOST`] entries.

use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use rustix::net::netdevice::index_to_name;

/// Maximum age of a name.
const KEEP: Duration = Duration::from_secs(1);
/// Maximum number of cached interfaces. Other interfaces are looked up for each packet.
const MOST: usize = 1024;

#[derive(Debug, Default)]
pub(super) struct Interfaces {
    /// Index and position. An interface that is not listed has no position.
    known: Vec<(u32, Option<u16>)>,
    since: Option<Instant>,
}

impl Interfaces {
    /// Clears the cache if it is older than [`KEEP`]. Call it once for each burst.
    pub(super) fn refresh(&mut self) {
        let now = Instant::now();
        if self.since.is_none_or(|since| now.duration_since(since) >= KEEP) {
            self.known.clear();
            self.since = Some(now);
        }
    }

    /// The position of the interface with this index in `listed`. `socket` is of the interface's network namespace.
    pub(super) fn position(&mut self, index: u32, listed: &[String], socket: BorrowedFd<'_>) -> Option<u16> {
        if index == 0 || listed.is_empty() {
            return None;
        }
        if let Some((_, position)) = self.known.iter().find(|(known, _)| *known == index) {
            return *position;
        }
        // SIOCGIFNAME. An interface that was deleted meanwhile has no name.
        let name = index_to_name(socket, index).ok();
        let position = name.and_then(|name| listed.iter().position(|listed| *listed == name));
        let position = position.map(|position| position as u16);
        if self.known.len() < MOST {
            self.known.push((index, position));
        }
        position
    }
}
