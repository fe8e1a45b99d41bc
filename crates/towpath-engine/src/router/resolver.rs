//! A thread's way to what is known of neighbors, and its packets that wait for one.
//!
//! What: one [`Table`] for all threads, since the answer to a request comes to one of them. Each has a copy of what it needs, so a
//! packet takes no lock: only who looks for a neighbor, or asks again when its time is over, and what nobody but another
//! thread can keep, for as long as one entry takes.
//!
//! Invariant: a packet waits only while its neighbor is INCOMPLETE; of each neighbor the newest [`WAITING`] do, as in the kernel
//! (unres_qlen), and no more than [`BYTES`] of all.
//! Races: a neighbor may be found between a thread's look and its packet's wait. If the change is before the look, the packet
//! finds it; if behind it, the version is another one than the thread has seen, and its bell has been rung.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Waker;

use super::arp_nd_solicit;
use super::neighbor_table::{Key, NEIGHBORS, Request, Resolved, Table};
use crate::Meta;
use std::net::IpAddr;

/// Packets that wait for one neighbor (the kernel's unres_qlen, arp(7), as packets of 2 KiB in its unres_qlen_bytes).
const WAITING: usize = 101;
/// Bytes of all packets that wait, of a thread.
const BYTES: usize = 4 << 20;

/// What all threads know. See the file's text.
#[derive(Debug)]
pub struct Directory {
    table: Mutex<Table>,
    /// Another one whenever a neighbor is found, lost, or somewhere else.
    version: AtomicU64,
    /// The table's time, for those who do not have it locked.
    due: AtomicU64,
    /// Wake the threads.
    wakers: Vec<Waker>,
}

/// A thread's part of it.
#[derive(Debug)]
pub struct Resolver {
    directory: Arc<Directory>,
    seen: u64,
    known: HashMap<Key, ([u8; 6], u64)>,
    /// The one of the last packet: most have it in common.
    last: Option<(Key, [u8; 6], u64)>,
    waiting: HashMap<Key, VecDeque<(Vec<u8>, Meta)>>,
    bytes: usize,
    requests: Vec<Request>,
}

/// What becomes of a packet for a neighbor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Resolution {
    /// It goes there.
    To([u8; 6]),
    /// It waits; so many others do not any more.
    Waits(u64),
    /// There is no room for it, nor for others that waited; so many in all.
    Lost(u64),
}

impl Directory {
    /// A directory for the threads that `wakers` wake.
    pub fn new(wakers: Vec<Waker>) -> Self {
        let table = Mutex::new(Table::new(NEIGHBORS));
        Self { table, version: AtomicU64::new(0), due: AtomicU64::new(u64::MAX), wakers }
    }

    fn with<T>(&self, change: impl FnOnce(&mut Table) -> T) -> T {
        // What is in there is whole after every step.
        let mut table: MutexGuard<'_, Table> = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        let result = change(&mut table);
        // Relaxed: who reads it late is told by the bell, or looks in its next turn.
        self.due.store(table.poll_timeout(), Ordering::Relaxed);
        result
    }

    /// What threads have copied is old.
    fn changed(&self) {
        // Release: pairs with the acquire load in Resolver::has_changed; the table was changed before.
        self.version.fetch_add(1, Ordering::Release);
        self.wakers.iter().for_each(Waker::wake_by_ref);
    }
}

impl Resolver {
    pub fn new(directory: Arc<Directory>) -> Self {
        let (known, waiting) = (HashMap::new(), HashMap::new());
        Self { directory, seen: 0, known, last: None, waiting, bytes: 0, requests: Vec::new() }
    }

    /// Where a packet to `address` on the link of `port` goes; one that has to wait is copied.
    pub(crate) fn resolve(
        &mut self,
        port: u16,
        address: IpAddr,
        now: u64,
        frame: &[u8],
        meta: &Meta,
    ) -> Resolution {
        let key = Key { port, address };
        if let Some((last, mac, until)) = self.last
            && last == key
            && now < until
        {
            return Resolution::To(mac);
        }
        // Those that wait leave behind this burst, and this one after them.
        if self.waiting.get(&key).is_some_and(|queue| !queue.is_empty()) {
            return self.hold(key, frame, meta);
        }
        let known = self.known.get(&key).copied().filter(|(_, until)| now < *until);
        let resolved = match known {
            Some((mac, until)) => Resolved::At(mac, until),
            None => self.directory.with(|table| table.resolve(key, now)),
        };
        match resolved {
            Resolved::At(mac, until) => {
                self.known.insert(key, (mac, until));
                self.last = Some((key, mac, until));
                Resolution::To(mac)
            }
            Resolved::Wait => self.hold(key, frame, meta),
            Resolved::Full => Resolution::Lost(1),
        }
    }

    fn hold(&mut self, key: Key, frame: &[u8], meta: &Meta) -> Resolution {
        let queue = self.waiting.entry(key).or_default();
        let mut lost = 0;
        while queue.len() >= WAITING || self.bytes + frame.len() > BYTES {
            let Some((oldest, _)) = queue.pop_front() else { return Resolution::Lost(lost + 1) };
            self.bytes -= oldest.len();
            lost += 1;
        }
        self.bytes += frame.len();
        queue.push_back((frame.to_vec(), *meta));
        Resolution::Waits(lost)
    }

    /// A frame that the rules let in, for us: when it answers a request, it is believed. Nothing when it is no answer; otherwise
    /// whether one was asked for.
    pub(crate) fn handle_answer(
        &mut self,
        port: u16,
        frame: &[u8],
        (own, addresses): ([u8; 6], &[IpAddr]),
        now: u64,
    ) -> Option<bool> {
        let answer = arp_nd_solicit::read(frame, own, addresses)?;
        let believed = self.directory.with(|table| table.handle_answer(port, answer, now));
        if believed {
            self.directory.changed();
        }
        Some(believed)
    }

    /// Whom to ask now: each is given to `send`, with what it takes to make the request.
    pub(crate) fn ask(&mut self, now: u64, mut send: impl FnMut(u16, Asking)) {
        if self.due() > now {
            return;
        }
        let Self { directory, requests, .. } = self;
        if directory.with(|table| table.handle_timeout(now, requests)) {
            directory.changed();
        }
        requests.drain(..).for_each(|request| send(request.key.port, Asking(request)));
    }

    /// When that is to be called at the latest.
    pub(crate) fn due(&self) -> u64 {
        // Relaxed: see Directory::with.
        self.directory.due.load(Ordering::Relaxed)
    }

    /// Gives the packets that do not have to wait any more to `each`, with where they go; nowhere when their neighbor was not found.
    pub(crate) fn release(&mut self, mut each: impl FnMut(u16, Option<[u8; 6]>, Vec<u8>, Meta)) {
        // Acquire: pairs with the release in Directory::changed.
        let version = self.directory.version.load(Ordering::Acquire);
        if version == self.seen {
            return;
        }
        (self.seen, self.last) = (version, None);
        self.known.clear();
        let Self { directory, waiting, bytes, .. } = self;
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
                each(key.port, mac, frame, meta);
            }
        }
    }

    /// Nobody waits any more: how many did, by port.
    pub(crate) fn abandon(&mut self, mut each: impl FnMut(u16, u64)) {
        self.bytes = 0;
        self.waiting.drain().for_each(|(key, queue)| each(key.port, queue.len() as u64));
    }

    /// The link of a port is another one.
    pub(crate) fn forget(&mut self, port: u16, now: u64) {
        self.directory.with(|table| table.forget(port, now));
        self.directory.changed();
    }

    /// The neighbors on the link of a port, by address.
    pub(crate) fn snapshot(&self, port: u16) -> Vec<NeighborSnapshot> {
        let mut found: Vec<_> = self.directory.with(|table| {
            let here = table.iter().filter(|(key, ..)| key.port == port);
            here.map(|(key, state, mac)| NeighborSnapshot { address: key.address, mac, state: state.word() })
                .collect()
        });
        found.sort_by_key(|neighbor| neighbor.address);
        found
    }
}

/// A neighbor of a router.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NeighborSnapshot {
    /// Its address.
    pub address: IpAddr,
    /// Its Ethernet address, while that is known.
    pub mac: Option<[u8; 6]>,
    /// `INCOMPLETE`, `REACHABLE`, `STALE`, `DELAY`, `PROBE` or `FAILED`.
    pub state: &'static str,
}

/// A request that is to be made.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Asking(Request);

impl Asking {
    /// Puts the frame into `out`, in the name of `own` and one of `addresses`. False when none is of its family.
    pub(crate) fn emit(self, own: [u8; 6], addresses: &[IpAddr], out: &mut Vec<u8>) -> bool {
        arp_nd_solicit::ask(self.0, own, addresses, out)
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
        Meta {
            wire_len: 60,
            time: 0,
            link: LinkType::ETHERNET,
            interface: 0,
            out: None,
            hop: None,
            changed: false,
            port: towpath_port::Meta::default(),
        }
    }

    /// Two threads: one looks for a neighbor, the answer comes to the other.
    #[test]
    fn packets_wait_until_their_neighbor_is_found_or_is_not() {
        let directory = Arc::new(Directory::new(vec![Waker::noop().clone(); 2]));
        let [mut one, mut two] = [(); 2].map(|()| Resolver::new(Arc::clone(&directory)));
        let addresses: [IpAddr; 1] = [[10, 0, 0, 1].into()];
        let there: IpAddr = [10, 0, 0, 2].into();
        let send = |resolver: &mut Resolver, number: u8, now| {
            resolver.resolve(3, there, now, &[number; 60], &meta())
        };
        for number in 0..100 {
            assert_eq!(send(&mut one, number, 0), Resolution::Waits(0));
        }
        assert_eq!(send(&mut one, 100, 0), Resolution::Waits(0));
        assert_eq!(send(&mut one, 101, 0), Resolution::Waits(1), "the oldest has to go");
        let (mut request, mut reply) = (Vec::new(), Vec::new());
        one.ask(0, |port, asking| {
            assert!(port == 3 && request.is_empty() && asking.emit(OWN, &addresses, &mut request));
        });
        two.ask(0, |_, _| panic!("it was asked"));
        assert!(super::super::answer(&request, THEIRS, &[there], &mut reply));
        // On another link, from another, and again: not believed.
        let ours = (OWN, &addresses[..]);
        assert_eq!(two.handle_answer(4, &reply, ours, 0), Some(false));
        assert_eq!(two.handle_answer(3, &reply, ours, 0), Some(true));
        assert_eq!(two.handle_answer(3, &reply, ours, 0), Some(false));
        assert_eq!(two.handle_answer(3, &request, ours, 0), None);
        let mut left = Vec::new();
        one.release(|port, mac, frame, _| left.push((port, mac, frame[0])));
        assert_eq!(left, (1..=101).map(|number| (3, Some(THEIRS), number)).collect::<Vec<_>>());
        assert_eq!(
            (send(&mut one, 7, 0), send(&mut two, 7, 0)),
            (Resolution::To(THEIRS), Resolution::To(THEIRS))
        );
        assert_eq!(one.snapshot(3).len(), 1);
        assert_eq!((one.snapshot(3)[0].state, one.snapshot(3)[0].mac), ("REACHABLE", Some(THEIRS)));
        // The link is another one, where it is not found.
        two.forget(3, SECOND);
        one.release(|_, _, _, _| panic!("nothing waits"));
        assert_eq!(send(&mut one, 8, SECOND), Resolution::Waits(0));
        let mut asked = 0;
        for now in 1..4 {
            two.ask(now * SECOND, |_, _| asked += 1);
            one.release(|_, _, _, _| panic!("it is still looked for"));
        }
        two.ask(4 * SECOND, |_, _| asked += 1);
        let mut gone = Vec::new();
        one.release(|port, mac, frame, _| gone.push((port, mac, frame[0])));
        assert_eq!((asked, gone), (3, vec![(3, None, 8)]));
        assert_eq!(one.bytes, 0);
    }
}
