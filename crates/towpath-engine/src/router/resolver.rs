//! Neighbor resolution of one thread: a copy of the neighbor table, and the packets that wait for a neighbor.
//!
//! All threads share one table, because the reply to a request may arrive on any of them. Each thread copies the entries that it
//! uses, so that a packet takes no lock. A thread locks the table to resolve an unknown neighbor, when an entry expires, to handle
//! a reply, and to send requests. It holds the lock for the work on one entry, or for one scan.
//!
//! The copy is a table that a keyed hash of the neighbor indexes, so that the route lookup of a packet finds its neighbor with one access
//! ([`Resolver::find`]). An entry that another one displaced is copied again when a packet needs it.
//!
//! Invariant: a packet waits only while its neighbor is INCOMPLETE. At most [`WAITING`] packets wait for one neighbor (the newest),
//! as with the kernel's unres_qlen, and at most [`WAITING_BYTES`] bytes for all.
//!
//! Races: a neighbor may be resolved between a thread's lookup and its packet's wait. If the table changes before the lookup,
//! the lookup finds the neighbor. If it changes after, the version differs from the one that the thread has seen, and the
//! thread was woken.

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasher, RandomState};
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Waker;

use super::arp_nd_solicit;
use super::neighbor_table::{Key, NEIGHBORS, Request, Resolved, Table};
use crate::meta::{Adjacency, Meta};

/// Packets that wait for one neighbor (the kernel's unres_qlen, arp(7): packets of 2 KiB in unres_qlen_bytes).
const WAITING: usize = 101;
/// Bytes of all waiting packets of a thread.
const WAITING_BYTES: usize = 4 << 20;

/// Neighbors of a thread's copy: four times those of the table, so that few displace each other.
const SLOTS: usize = 4 * NEIGHBORS;

/// A copy of an entry of the neighbor table.
#[derive(Clone, Copy, Debug)]
struct Known {
    key: Key,
    mac: [u8; 6],
    /// The version of the directory at the copy. Every change of a neighbor invalidates the copy.
    version: u64,
    /// When it must be looked up again.
    until: u64,
}

/// The neighbor table that the threads of a router share.
#[derive(Debug)]
pub struct Directory {
    table: Mutex<Table>,
    /// Changes whenever a neighbor is resolved, lost, or moves.
    version: AtomicU64,
    /// The table's next timeout, for threads that do not hold the lock.
    due: AtomicU64,
    /// Wake the threads after a change.
    wakers: Vec<Waker>,
}

/// One thread's part of neighbor resolution.
#[derive(Debug)]
pub struct Resolver {
    directory: Arc<Directory>,
    /// The version of the directory that the valid entries of `known` are copies of.
    seen: u64,
    /// Neighbors by [`slot`](Self::slot).
    known: Box<[Option<Known>]>,
    /// Key of the hash: senders cannot make neighbors collide.
    seed: u64,
    waiting: HashMap<Key, VecDeque<(Vec<u8>, Meta)>>,
    /// Bytes of the frames in `waiting`.
    bytes: usize,
    /// Received packets that the frames in `waiting` stand for.
    held: u64,
    /// Frames that were evicted from `waiting` since [`take_evicted`](Self::take_evicted).
    evicted: Vec<(Vec<u8>, Meta)>,
    requests: Vec<Request>,
}

/// The result of resolving a packet's neighbor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Resolution {
    /// The neighbor has this Ethernet address.
    To([u8; 6]),
    /// The packet was copied and waits.
    Waits,
    /// There is no room to wait.
    Full,
}

/// A neighbor of a router.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NeighborSnapshot {
    /// The IP address.
    pub address: IpAddr,
    /// The Ethernet address, if known.
    pub mac: Option<[u8; 6]>,
    /// `INCOMPLETE`, `REACHABLE`, `STALE`, `DELAY`, `PROBE` or `FAILED`.
    pub state: &'static str,
}

impl Directory {
    /// Creates the table for threads that `wakers` wake.
    pub fn new(wakers: Vec<Waker>) -> Self {
        let table = Mutex::new(Table::new(NEIGHBORS));
        Self { table, version: AtomicU64::new(0), due: AtomicU64::new(u64::MAX), wakers }
    }

    /// The Ethernet address of a neighbor on the link of a port, for packets that take another path than through a
    /// [`Resolver`]. As for a packet, an unknown neighbor is requested, and one that was not confirmed for long is asked again. Calls
    /// must come at least every second while there are such packets.
    pub fn resolve(&self, port: u16, address: IpAddr, now: u64) -> Option<[u8; 6]> {
        let before = self.due.load(Ordering::Relaxed);
        let resolved = self.with(|table| table.resolve(Key { port, address }, now));
        // A request is due earlier than the threads know.
        if self.due.load(Ordering::Relaxed) < before {
            self.wakers.iter().for_each(Waker::wake_by_ref);
        }
        match resolved {
            Resolved::At(mac, _) => Some(mac),
            Resolved::Wait | Resolved::Full => None,
        }
    }

    fn with<T>(&self, change: impl FnOnce(&mut Table) -> T) -> T {
        // The table is consistent after every step, so a poisoned lock is usable.
        let mut table: MutexGuard<'_, Table> = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        let result = change(&mut table);
        // Relaxed: a thread that reads an old value is woken, or reads again in its next turn.
        self.due.store(table.poll_timeout(), Ordering::Relaxed);
        result
    }

    /// Invalidates the threads' copies.
    fn changed(&self) {
        // Release: pairs with the acquire load in Resolver::release. The table was changed before.
        self.version.fetch_add(1, Ordering::Release);
        self.wakers.iter().for_each(Waker::wake_by_ref);
    }
}

impl Resolver {
    /// Creates the part of one thread.
    pub fn new(directory: Arc<Directory>) -> Self {
        Self {
            directory,
            seen: 0,
            known: vec![None; SLOTS].into(),
            seed: RandomState::new().hash_one(0) | 1,
            waiting: HashMap::new(),
            bytes: 0,
            held: 0,
            evicted: Vec::new(),
            requests: Vec::new(),
        }
    }

    /// The index of a neighbor in `known`.
    #[inline]
    fn slot(&self, key: Key) -> usize {
        let bits = match key.address {
            IpAddr::V4(address) => address.to_bits().into(),
            IpAddr::V6(address) => {
                (address.to_bits() as u64).wrapping_mul(self.seed) ^ (address.to_bits() >> 64) as u64
            }
        };
        let hash = (bits ^ u64::from(key.port) << 48).wrapping_mul(self.seed);
        (hash >> (u64::BITS - SLOTS.trailing_zeros())) as usize
    }

    /// The neighbor with this address, if this thread knows it. Takes no lock.
    #[inline]
    pub(crate) fn find(&self, port: u16, address: IpAddr, now: u64) -> Option<Adjacency> {
        let key = Key { port, address };
        let adjacency = Adjacency(self.slot(key) as u16);
        self.mac_at(adjacency, key, now).map(|_| adjacency)
    }

    /// The Ethernet address in an entry, if the entry is this neighbor's and valid.
    #[inline]
    fn mac_at(&self, Adjacency(at): Adjacency, key: Key, now: u64) -> Option<[u8; 6]> {
        let known = self.known.get(usize::from(at))?.as_ref()?;
        (known.key == key && known.version == self.seen && now < known.until).then_some(known.mac)
    }

    /// Resolves `address` on the link of `port` for a packet. Copies the packet if it waits. `found` is the result of
    /// [`find`](Self::find) when the packet was routed.
    pub(crate) fn resolve(
        &mut self,
        port: u16,
        (address, found): (IpAddr, Option<Adjacency>),
        now: u64,
        frame: &[u8],
        meta: &Meta,
    ) -> Resolution {
        let key = Key { port, address };
        if let Some(mac) = found.and_then(|found| self.mac_at(found, key, now)) {
            return Resolution::To(mac);
        }
        // Waiting packets leave after this burst, and this packet must not overtake them.
        if self.waiting.get(&key).is_some_and(|queue| !queue.is_empty()) {
            return self.hold(key, frame, meta);
        }
        let slot = self.slot(key);
        if let Some(mac) = self.mac_at(Adjacency(slot as u16), key, now) {
            return Resolution::To(mac);
        }
        match self.directory.with(|table| table.resolve(key, now)) {
            Resolved::At(mac, until) => {
                self.known[slot] = Some(Known { key, mac, version: self.seen, until });
                Resolution::To(mac)
            }
            Resolved::Wait => self.hold(key, frame, meta),
            Resolved::Full => Resolution::Full,
        }
    }

    fn hold(&mut self, key: Key, frame: &[u8], meta: &Meta) -> Resolution {
        let queue = self.waiting.entry(key).or_default();
        while queue.len() >= WAITING || self.bytes + frame.len() > WAITING_BYTES {
            let Some((oldest, meta)) = queue.pop_front() else { return Resolution::Full };
            self.bytes -= oldest.len();
            self.held -= u64::from(meta.packets);
            self.evicted.push((oldest, meta));
        }
        self.bytes += frame.len();
        self.held += u64::from(meta.packets);
        queue.push_back((frame.to_vec(), *meta));
        Resolution::Waits
    }

    /// Received packets that wait.
    pub(crate) fn held(&self) -> u64 {
        self.held
    }

    /// The frames that were evicted since the last call, because newer ones wait.
    pub(crate) fn take_evicted(&mut self) -> Vec<(Vec<u8>, Meta)> {
        std::mem::take(&mut self.evicted)
    }

    /// Handles a frame that may be a reply to a request. Returns whether the request was sent, or `None` if the frame is not a reply.
    pub(crate) fn handle_reply(
        &mut self,
        port: u16,
        frame: &[u8],
        (mac, addresses): ([u8; 6], &[IpAddr]),
        now: u64,
    ) -> Option<bool> {
        let reply = arp_nd_solicit::parse_reply(frame, mac, addresses)?;
        let accepted = self.directory.with(|table| table.handle_reply(port, reply, now));
        if accepted {
            self.directory.changed();
        }
        Some(accepted)
    }

    /// Passes each request that is due to `send`, with the number of its port.
    pub(crate) fn poll_requests(&mut self, now: u64, mut send: impl FnMut(u16, PendingRequest)) {
        if self.due() > now {
            return;
        }
        let Self { directory, requests, .. } = self;
        if directory.with(|table| table.handle_timeout(now, requests)) {
            directory.changed();
        }
        requests.drain(..).for_each(|request| send(request.key.port, PendingRequest(request)));
    }

    /// When [`poll_requests`](Self::poll_requests) must be called at the latest.
    pub(crate) fn due(&self) -> u64 {
        // Relaxed: see Directory::with.
        self.directory.due.load(Ordering::Relaxed)
    }

    /// Passes the packets that no longer wait to `each`, with their neighbor's Ethernet address, or `None` if it did not answer.
    pub(crate) fn release(&mut self, mut each: impl FnMut(u16, Option<[u8; 6]>, Vec<u8>, Meta)) {
        // Acquire: pairs with the release in Directory::changed.
        let version = self.directory.version.load(Ordering::Acquire);
        if version == self.seen {
            return;
        }
        // The entries of `known` are invalid from now on.
        self.seen = version;
        let Self { directory, waiting, bytes, held, .. } = self;
        if waiting.is_empty() {
            return;
        }
        let decided: Vec<(Key, Option<[u8; 6]>)> = directory.with(|table| {
            let decide = |key: &Key| match table.look(*key) {
                Some(Resolved::At(mac, _)) => Some((*key, Some(mac))),
                Some(Resolved::Wait | Resolved::Full) => None,
                None => Some((*key, None)),
            };
            waiting.keys().filter_map(decide).collect()
        });
        for (key, mac) in decided {
            for (frame, meta) in waiting.remove(&key).into_iter().flatten() {
                *bytes -= frame.len();
                *held -= u64::from(meta.packets);
                each(key.port, mac, frame, meta);
            }
        }
    }

    /// Drops the waiting packets. Returns them with their ports.
    pub(crate) fn abandon(&mut self) -> impl Iterator<Item = (u16, Vec<u8>, Meta)> + use<> {
        (self.bytes, self.held) = (0, 0);
        let waiting = std::mem::take(&mut self.waiting).into_iter();
        waiting.flat_map(|(key, queue)| queue.into_iter().map(move |(frame, meta)| (key.port, frame, meta)))
    }

    /// Forgets the neighbors of a port.
    pub(crate) fn forget(&mut self, port: u16, now: u64) {
        self.directory.with(|table| table.forget(port, now));
        self.directory.changed();
    }

    /// The neighbors of a port, by address.
    pub(crate) fn snapshot(&self, port: u16) -> Vec<NeighborSnapshot> {
        let mut found: Vec<_> = self.directory.with(|table| {
            let here = table.iter().filter(|(key, ..)| key.port == port);
            here.map(|(key, state, mac)| NeighborSnapshot { address: key.address, mac, state: state.name() })
                .collect()
        });
        found.sort_unstable_by_key(|neighbor| neighbor.address);
        found
    }
}

/// A request that is due.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PendingRequest(Request);

impl PendingRequest {
    /// Writes the request into `out`, from `mac` and one of `addresses`. Returns false if no address is of the request's family, or if the
    /// request is for one of them: the router does not resolve its own addresses.
    pub(crate) fn emit(self, mac: [u8; 6], addresses: &[IpAddr], out: &mut Vec<u8>) -> bool {
        !addresses.contains(&self.0.key.address) && arp_nd_solicit::emit(self.0, mac, addresses, out)
    }
}

#[cfg(test)]
mod tests {
    use towpath_wire::LinkType;

    use super::*;

    const OWN: [u8; 6] = [2, 0, 0, 0, 0, 1];
    const THEIRS: [u8; 6] = [2, 0, 0, 0, 0, 2];
    const SECOND: u64 = 1_000_000_000;

    fn meta() -> Meta {
        Meta::new(LinkType::ETHERNET, 60)
    }

    /// One thread resolves a neighbor, the reply arrives on the other.
    #[test]
    fn packets_wait_until_their_neighbor_is_resolved_or_lost() {
        let directory = Arc::new(Directory::new(vec![Waker::noop().clone(); 2]));
        let [mut one, mut two] = [(); 2].map(|()| Resolver::new(Arc::clone(&directory)));
        let addresses: [IpAddr; 1] = [[10, 0, 0, 1].into()];
        let there: IpAddr = [10, 0, 0, 2].into();
        let send = |resolver: &mut Resolver, number: u8, now| {
            let found = resolver.find(3, there, now);
            resolver.resolve(3, (there, found), now, &[number; 60], &meta())
        };
        for number in 0..100 {
            assert_eq!(send(&mut one, number, 0), Resolution::Waits);
        }
        assert_eq!(send(&mut one, 100, 0), Resolution::Waits);
        assert_eq!(send(&mut one, 101, 0), Resolution::Waits);
        assert_eq!((one.take_evicted().len(), one.held()), (1, 101), "the oldest is evicted");
        let (mut request, mut reply) = (Vec::new(), Vec::new());
        one.poll_requests(0, |port, pending| {
            assert!(port == 3 && request.is_empty() && pending.emit(OWN, &addresses, &mut request));
        });
        two.poll_requests(0, |_, _| panic!("the request was sent"));
        assert!(super::super::arp_nd_reply(&request, THEIRS, &[there], &mut reply));
        // Not accepted: a reply on another link, a second reply.
        let ours = (OWN, &addresses[..]);
        assert_eq!(two.handle_reply(4, &reply, ours, 0), Some(false));
        assert_eq!(two.handle_reply(3, &reply, ours, 0), Some(true));
        assert_eq!(two.handle_reply(3, &reply, ours, 0), Some(false));
        assert_eq!(two.handle_reply(3, &request, ours, 0), None);
        let mut left = Vec::new();
        one.release(|port, mac, frame, _| left.push((port, mac, frame[0])));
        assert_eq!(left, (1..=101).map(|number| (3, Some(THEIRS), number)).collect::<Vec<_>>());
        assert_eq!(
            (send(&mut one, 7, 0), send(&mut two, 7, 0)),
            (Resolution::To(THEIRS), Resolution::To(THEIRS))
        );
        // The route lookup finds it now, until the table changes or the time is over.
        let found = one.find(3, there, 0).unwrap();
        let key = Key { port: 3, address: there };
        assert_eq!(one.mac_at(found, key, 0), Some(THEIRS));
        assert_eq!((one.find(4, there, 0), one.find(3, there, 30 * SECOND)), (None, None));
        assert_eq!(one.mac_at(found, Key { port: 4, ..key }, 0), None, "the entry of another neighbor");
        assert_eq!(one.snapshot(3).len(), 1);
        assert_eq!((one.snapshot(3)[0].state, one.snapshot(3)[0].mac), ("REACHABLE", Some(THEIRS)));
        // The link changed, and the neighbor does not answer.
        two.forget(3, SECOND);
        one.release(|_, _, _, _| panic!("no packet waits"));
        assert_eq!(one.find(3, there, SECOND), None);
        // A packet that was routed before waits too.
        let late = one.resolve(3, (there, Some(found)), SECOND, &[8; 60], &meta());
        assert_eq!((late, one.held()), (Resolution::Waits, 1));
        let mut requests = 0;
        for now in 1..4 {
            two.poll_requests(now * SECOND, |_, _| requests += 1);
            one.release(|_, _, _, _| panic!("requests are not exhausted"));
        }
        two.poll_requests(4 * SECOND, |_, _| requests += 1);
        let mut gone = Vec::new();
        one.release(|port, mac, frame, _| gone.push((port, mac, frame[0])));
        assert_eq!((requests, gone), (3, vec![(3, None, 8)]));
        assert_eq!((one.bytes, one.held()), (0, 0));
    }
}
