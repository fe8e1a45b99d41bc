//! The neighbor table: the states of RFC 4861 section 7.3.2, for ARP too, as in the kernel.
//!
//! ```text
//!              a packet         a reply              30 s          a packet       5 s
//!   (nothing) ---------> INCOMPLETE -----> REACHABLE -----> STALE ---------> DELAY ---> PROBE --a reply--> REACHABLE
//!                            | three requests, no reply                                   | the same
//!                            `--------------------------> FAILED <------------------------'
//!                                                            | a packet: INCOMPLETE
//! ```
//!
//! Invariants: an Ethernet address is taken from a reply only while a request is outstanding, so unsolicited replies change
//! nothing. The router sends at most one request per second and neighbor. At most half of the table is INCOMPLETE, so
//! packets to absent hosts do not evict present ones.
//!
//! Not supported: confirmation by upper layers (a router has none), proxies, anycast.

use std::collections::HashMap;
use std::net::IpAddr;

/// RFC 4861 section 10: MAX_MULTICAST_SOLICIT, MAX_UNICAST_SOLICIT; RETRANS_TIMER, REACHABLE_TIME, DELAY_FIRST_PROBE_TIME.
const SOLICIT: u8 = 3;
const RETRANS: u64 = 1_000_000_000;
const REACHABLE: u64 = 30_000_000_000;
const DELAY: u64 = 5_000_000_000;
/// How long an unused neighbor is kept (the kernel's gc_stale_time).
const FORGET: u64 = 60_000_000_000;
/// Maximum number of neighbors (the kernel's gc_thresh3).
pub(super) const NEIGHBORS: usize = 1024;

/// An IP address on the link of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Key {
    /// The port's number.
    pub(super) port: u16,
    pub(super) address: IpAddr,
}

/// The kernel's names, without NUD_.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Incomplete,
    Reachable,
    Stale,
    Delay,
    Probe,
    Failed,
}

/// The result of a lookup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Resolved {
    /// The Ethernet address, and until when it needs no further lookup.
    At([u8; 6], u64),
    /// A request is outstanding.
    Wait,
    /// The table is full.
    Full,
}

/// A request that is due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Request {
    pub(super) key: Key,
    /// The Ethernet address for a unicast request. `None`: a broadcast or multicast request.
    pub(super) known: Option<[u8; 6]>,
}

/// A neighbor's reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Reply {
    pub(super) address: IpAddr,
    /// IPv6 neighbors may omit it in the reply to a unicast request.
    pub(super) mac: Option<[u8; 6]>,
    /// The override flag: the reply replaces a known address.
    pub(super) overrides: bool,
}

#[derive(Clone, Copy, Debug)]
struct Neighbor {
    state: State,
    /// Valid unless INCOMPLETE or FAILED.
    mac: [u8; 6],
    /// When its state changes, or the next request is sent.
    due: u64,
    /// Requests since its address was last known or lost.
    requests_sent: u8,
    /// When a packet last needed it.
    used: u64,
}

/// The neighbor table.
#[derive(Debug)]
pub(super) struct Table {
    neighbors: HashMap<Key, Neighbor>,
    most: usize,
    incomplete: usize,
    /// The next timeout.
    due: u64,
    /// When the neighbors of a port were last forgotten.
    forgotten: HashMap<u16, u64>,
}

/// Every thread checks the links once per second. Calls of `forget` within this time concern the same event.
const SAME: u64 = 2_000_000_000;

impl Table {
    /// Creates a table for at most `most` neighbors.
    pub(super) fn new(most: usize) -> Self {
        Self { neighbors: HashMap::new(), most, incomplete: 0, due: u64::MAX, forgotten: HashMap::new() }
    }

    /// Looks a neighbor up for a packet, and requests it if necessary.
    pub(super) fn resolve(&mut self, key: Key, now: u64) -> Resolved {
        if let Some(neighbor) = self.neighbors.get_mut(&key) {
            neighbor.used = now;
            match neighbor.state {
                State::Incomplete => return Resolved::Wait,
                State::Failed => {}
                State::Stale => {
                    (neighbor.state, neighbor.due) = (State::Delay, now + DELAY);
                    self.due = self.due.min(neighbor.due);
                    return Resolved::At(neighbor.mac, neighbor.due);
                }
                State::Reachable | State::Delay | State::Probe => {
                    return Resolved::At(neighbor.mac, neighbor.due);
                }
            }
        }
        if self.incomplete >= self.most.div_ceil(2) || !self.has_room(key) {
            return Resolved::Full;
        }
        let neighbor =
            Neighbor { state: State::Incomplete, mac: [0; 6], due: now, requests_sent: 0, used: now };
        self.neighbors.insert(key, neighbor);
        self.incomplete += 1;
        self.due = self.due.min(now);
        Resolved::Wait
    }

    /// Returns true if there is room for this neighbor. It may evict an unused one.
    fn has_room(&mut self, key: Key) -> bool {
        if self.neighbors.len() < self.most || self.neighbors.contains_key(&key) {
            return true;
        }
        let idle = self.neighbors.iter().filter(|(_, n)| matches!(n.state, State::Stale | State::Failed));
        let Some(key) = idle.min_by_key(|(_, neighbor)| neighbor.used).map(|(key, _)| *key) else {
            return false;
        };
        self.neighbors.remove(&key);
        true
    }

    /// Looks a neighbor up without a packet. `None` if it is unknown or FAILED.
    pub(super) fn look(&self, key: Key) -> Option<Resolved> {
        let neighbor = self.neighbors.get(&key)?;
        match neighbor.state {
            State::Failed => None,
            State::Incomplete => Some(Resolved::Wait),
            _ => Some(Resolved::At(neighbor.mac, neighbor.due)),
        }
    }

    /// Handles a reply. Returns true if the request was outstanding and the reply is accepted.
    pub(super) fn handle_reply(&mut self, port: u16, reply: Reply, now: u64) -> bool {
        let Some(neighbor) = self.neighbors.get_mut(&Key { port, address: reply.address }) else {
            return false;
        };
        let outstanding =
            matches!(neighbor.state, State::Incomplete | State::Probe) && neighbor.requests_sent > 0;
        let mac = match (neighbor.state, reply.mac) {
            // "If the Override flag is clear and the supplied link-layer address differs": section 7.2.5.
            (State::Probe, Some(mac)) if mac != neighbor.mac && !reply.overrides => return false,
            (State::Probe, None) => neighbor.mac,
            (_, Some(mac)) => mac,
            (_, None) => return false,
        };
        if !outstanding {
            return false;
        }
        self.incomplete -= usize::from(neighbor.state == State::Incomplete);
        *neighbor = Neighbor {
            state: State::Reachable,
            mac,
            due: now + REACHABLE,
            requests_sent: 0,
            used: neighbor.used,
        };
        self.due = self.due.min(neighbor.due);
        true
    }

    /// Executes the timeouts that are due and appends the requests that are due. Returns true if a neighbor FAILED.
    pub(super) fn handle_timeout(&mut self, now: u64, requests: &mut Vec<Request>) -> bool {
        if now < self.due {
            return false;
        }
        let (mut due, mut lost) = (u64::MAX, false);
        let incomplete = &mut self.incomplete;
        self.neighbors.retain(|key, neighbor| {
            let keep =
                neighbor.due > now || neighbor.handle_timeout(*key, now, incomplete, &mut lost, requests);
            due = if keep { due.min(neighbor.due) } else { due };
            keep
        });
        self.due = due;
        lost
    }

    /// When [`handle_timeout`](Self::handle_timeout) must be called at the latest. `u64::MAX`: never.
    pub(super) fn poll_timeout(&self) -> u64 {
        self.due
    }

    /// Forgets the neighbors of a port. Several threads report the same event: neighbors that were resolved after the first report
    /// stay.
    pub(super) fn forget(&mut self, port: u16, now: u64) {
        if self.forgotten.get(&port).is_some_and(|at| now.saturating_sub(*at) < SAME) {
            return;
        }
        self.forgotten.insert(port, now);
        self.neighbors.retain(|key, _| key.port != port);
        self.incomplete = self.neighbors.values().filter(|n| n.state == State::Incomplete).count();
    }

    /// The neighbors: key, state, and the Ethernet address if known.
    pub(super) fn iter(&self) -> impl Iterator<Item = (Key, State, Option<[u8; 6]>)> {
        self.neighbors.iter().map(|(key, neighbor)| {
            let known = !matches!(neighbor.state, State::Incomplete | State::Failed);
            (*key, neighbor.state, known.then_some(neighbor.mac))
        })
    }
}

impl Neighbor {
    /// Executes the neighbor's timeout. Returns false if it is to be removed.
    fn handle_timeout(
        &mut self,
        key: Key,
        now: u64,
        incomplete: &mut usize,
        lost: &mut bool,
        requests: &mut Vec<Request>,
    ) -> bool {
        match self.state {
            State::Incomplete | State::Probe if self.requests_sent < SOLICIT => {
                let known = (self.state == State::Probe).then_some(self.mac);
                requests.push(Request { key, known });
                (self.requests_sent, self.due) = (self.requests_sent + 1, now + RETRANS);
            }
            State::Incomplete | State::Probe => {
                *incomplete -= usize::from(self.state == State::Incomplete);
                *lost = true;
                (self.state, self.requests_sent, self.due) = (State::Failed, 0, now + FORGET);
            }
            State::Reachable => (self.state, self.due) = (State::Stale, now + FORGET),
            State::Delay => {
                requests.push(Request { key, known: Some(self.mac) });
                (self.state, self.requests_sent, self.due) = (State::Probe, 1, now + RETRANS);
            }
            State::Stale | State::Failed => return false,
        }
        true
    }
}

impl State {
    /// The name in ip-neighbour(8).
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Incomplete => "INCOMPLETE",
            Self::Reachable => "REACHABLE",
            Self::Stale => "STALE",
            Self::Delay => "DELAY",
            Self::Probe => "PROBE",
            Self::Failed => "FAILED",
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SECOND: u64 = 1_000_000_000;
    const MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];
    const OTHER: [u8; 6] = [2, 0, 0, 0, 0, 2];

    fn key(last: u8) -> Key {
        Key { port: 1, address: [10, 0, 0, last].into() }
    }

    fn reply(last: u8, mac: Option<[u8; 6]>, overrides: bool) -> Reply {
        Reply { address: key(last).address, mac, overrides }
    }

    fn state(table: &Table, last: u8) -> Option<State> {
        table.iter().find(|(of, ..)| *of == key(last)).map(|(_, state, _)| state)
    }

    /// Each thread reports the link within a second.
    #[test]
    fn a_link_is_forgotten_once() {
        let mut table = Table::new(4);
        let mut requests = Vec::new();
        let rows = [(10, None), (11, Some(State::Reachable)), (13, None)];
        for (at, then) in rows {
            let now = at * SECOND;
            table.resolve(key(1), now);
            table.handle_timeout(now, &mut requests);
            table.handle_reply(1, reply(1, Some(MAC), true), now);
            table.forget(1, now);
            assert_eq!(state(&table, 1), then, "at {at} s");
        }
    }

    /// Rows: time, event, whether a request is due or the reply is accepted, state afterwards.
    #[test]
    fn the_states_of_a_neighbor() {
        enum Do {
            Send,
            Time,
            Hear(Option<[u8; 6]>, bool),
        }
        use Do::{Hear, Send, Time};
        #[rustfmt::skip]
        let rows = [
            (0,   Hear(Some(MAC), true),    false, None),
            (0,   Send,                     false, Some(State::Incomplete)),
            (0,   Hear(Some(MAC), true),    false, Some(State::Incomplete)), // no request was sent yet
            (0,   Time,                     true,  Some(State::Incomplete)),
            (0,   Time,                     false, Some(State::Incomplete)), // one per second
            (1,   Time,                     true,  Some(State::Incomplete)),
            (1,   Hear(None, true),         false, Some(State::Incomplete)),
            (1,   Hear(Some(MAC), false),   true,  Some(State::Reachable)),
            (2,   Hear(Some(OTHER), true),  false, Some(State::Reachable)), // no request is outstanding
            (2,   Send,                     false, Some(State::Reachable)),
            (31,  Time,                     false, Some(State::Stale)),
            (40,  Hear(Some(OTHER), true),  false, Some(State::Stale)),
            (50,  Send,                     false, Some(State::Delay)),
            (52,  Hear(Some(OTHER), true),  false, Some(State::Delay)),
            (55,  Time,                     true,  Some(State::Probe)),
            (55,  Hear(Some(OTHER), false), false, Some(State::Probe)),
            (55,  Hear(None, false),        true,  Some(State::Reachable)),
            (85,  Time,                     false, Some(State::Stale)),
            (86,  Send,                     false, Some(State::Delay)),
            (91,  Time,                     true,  Some(State::Probe)),
            (91,  Hear(Some(OTHER), true),  true,  Some(State::Reachable)), // it moved
            (121, Time,                     false, Some(State::Stale)),
            (121, Send,                     false, Some(State::Delay)),
            (126, Time,                     true,  Some(State::Probe)),
            (127, Time,                     true,  Some(State::Probe)),
            (128, Time,                     true,  Some(State::Probe)),
            (129, Time,                     false, Some(State::Failed)),
            (129, Hear(Some(MAC), true),    false, Some(State::Failed)),
            (130, Send,                     false, Some(State::Incomplete)),
            (130, Time,                     true,  Some(State::Incomplete)),
            (131, Time,                     true,  Some(State::Incomplete)),
            (132, Time,                     true,  Some(State::Incomplete)),
            (133, Time,                     false, Some(State::Failed)),
            (193, Time,                     false, None),
        ];
        let mut table = Table::new(4);
        for (at, what, expected, then) in rows {
            let now = at * SECOND;
            let mut requests = Vec::new();
            let happened = match what {
                Send => {
                    table.resolve(key(1), now);
                    false
                }
                Time => {
                    table.handle_timeout(now, &mut requests);
                    !requests.is_empty()
                }
                Hear(mac, overrides) => table.handle_reply(1, reply(1, mac, overrides), now),
            };
            assert_eq!((happened, state(&table, 1)), (expected, then), "at {at} s");
        }
    }

    #[test]
    fn requests_for_absent_hosts_do_not_evict_present_ones() {
        let mut table = Table::new(8);
        for last in 0..4 {
            table.resolve(key(last), 0);
        }
        table.handle_timeout(0, &mut Vec::new());
        for last in 0..4 {
            assert!(table.handle_reply(1, reply(last, Some(MAC), true), 0));
        }
        let full = (10..200).filter(|last| table.resolve(key(*last), 0) == Resolved::Full).count();
        assert_eq!((full, table.neighbors.len()), (190 - 4, 8));
        assert!((0..4).all(|last| matches!(table.resolve(key(last), 0), Resolved::At(MAC, _))));
        // FAILED neighbors make room.
        for at in 0..4 {
            table.handle_timeout(at * SECOND, &mut Vec::new());
        }
        assert_eq!(table.resolve(key(99), 4 * SECOND), Resolved::Wait);
        assert_eq!(table.neighbors.len(), 8);
    }

    /// The model: what an observer of requests and replies knows of a neighbor.
    #[derive(Clone, Copy, Debug, Default)]
    struct Seen {
        mac: Option<[u8; 6]>,
        /// Requests without a reply, and the time of the last one.
        out: u8,
        last: Option<u64>,
    }

    #[derive(Clone, Debug)]
    enum Op {
        Send(u8),
        Pass(u64),
        Hear(u8, u8, bool),
    }

    fn ops() -> impl Strategy<Value = Vec<Op>> {
        let op = prop_oneof![
            (0..6_u8).prop_map(Op::Send),
            prop_oneof![Just(0), 1..3 * SECOND, Just(SECOND), Just(30 * SECOND)].prop_map(Op::Pass),
            (0..6_u8, 1..4_u8, any::<bool>())
                .prop_map(|(host, mac, overrides)| Op::Hear(host, mac, overrides)),
        ];
        prop::collection::vec(op, 0..200)
    }

    proptest! {
        #[test]
        fn only_solicited_replies_are_accepted(ops in ops()) {
            const MOST: usize = 4;
            let (mut table, mut now) = (Table::new(MOST), 0);
            let mut seen = [Seen::default(); 6];
            for op in ops {
                match op {
                    Op::Send(host) => {
                        if let Resolved::At(mac, until) = table.resolve(key(host), now) {
                            prop_assert_eq!(Some(mac), seen[usize::from(host)].mac);
                            prop_assert!(until > now);
                        }
                    }
                    Op::Pass(time) => now += time,
                    Op::Hear(host, mac, overrides) => {
                        let reply = reply(host, Some([mac; 6]), overrides);
                        let accepted = table.handle_reply(1, reply, now);
                        let seen = &mut seen[usize::from(host)];
                        let expected = seen.out > 0 && (overrides || seen.mac.is_none_or(|old| old == [mac; 6]));
                        prop_assert_eq!(accepted, expected, "{:?} at {}", seen, now);
                        if accepted {
                            *seen = Seen { mac: Some([mac; 6]), out: 0, ..*seen };
                        }
                    }
                }
                let mut requests = Vec::new();
                table.handle_timeout(now, &mut requests);
                for Request { key, known } in requests {
                    let IpAddr::V4(address) = key.address else { unreachable!() };
                    let seen = &mut seen[usize::from(address.octets()[3])];
                    prop_assert!(seen.last.is_none_or(|last| now >= last + SECOND));
                    if known.is_none() && seen.out == 0 {
                        // Resolution starts again, and earlier addresses are forgotten.
                        seen.mac = None;
                    }
                    prop_assert_eq!(known, seen.mac);
                    (seen.out, seen.last) = (seen.out + 1, Some(now));
                    prop_assert!(seen.out <= SOLICIT);
                }
                for (host, seen) in seen.iter_mut().enumerate() {
                    // Three requests, and a second after the last: it was not found.
                    if matches!(state(&table, host as u8), None | Some(State::Failed)) {
                        let over = seen.last.is_some_and(|last| now >= last + SECOND);
                        prop_assert!(seen.out == 0 || seen.out == SOLICIT && over);
                        *seen = Seen { mac: None, out: 0, last: seen.last };
                    }
                }
                prop_assert!(table.neighbors.len() <= MOST);
                let incomplete = table.iter().filter(|(_, state, _)| *state == State::Incomplete).count();
                prop_assert_eq!(incomplete, table.incomplete);
                prop_assert!(incomplete <= MOST / 2);
                prop_assert!(table.neighbors.values().all(|neighbor| neighbor.due >= table.due));
            }
        }
    }
}
