//! What a router knows of its neighbors: the states of RFC 4861 section 7.3.2, for ARP too, as the kernel has them.
//!
//! ```text
//!              a packet         an answer            30 s          a packet       5 s
//!   (nothing) ---------> INCOMPLETE -----> REACHABLE -----> STALE ---------> DELAY ---> PROBE --an answer--> REACHABLE
//!                            | three requests, no answer                                  | the same
//!                            `--------------------------> FAILED <------------------------'
//!                                                            | a packet: INCOMPLETE
//! ```
//!
//! Invariants: an address is taken from an answer only while a request for it is out, so nobody is believed who was not
//! asked; of one neighbor there is one request a second at most; of neighbors that nobody has found yet there are
//! half as many as there is room for, so who makes us look for what is not there does not push out what is.
//!
//! Not supported: confirmations by upper layers (a router has none), proxies, anycast.

use std::collections::HashMap;
use std::net::IpAddr;

/// RFC 4861 section 10: MAX_MULTICAST_SOLICIT, MAX_UNICAST_SOLICIT; RETRANS_TIMER, REACHABLE_TIME, DELAY_FIRST_PROBE_TIME.
const SOLICIT: u8 = 3;
const RETRANS: u64 = 1_000_000_000;
const REACHABLE: u64 = 30_000_000_000;
const DELAY: u64 = 5_000_000_000;
/// How long one is remembered that nobody needs (the kernel's gc_stale_time).
const FORGET: u64 = 60_000_000_000;
/// Most neighbors (the kernel's gc_thresh3).
pub(super) const NEIGHBORS: usize = 1024;

/// An address on the link of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Key {
    /// The port's number.
    pub(super) port: u16,
    pub(super) address: IpAddr,
}

/// The kernel's words, without NUD_.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Incomplete,
    Reachable,
    Stale,
    Delay,
    Probe,
    Failed,
}

/// Where a packet for a neighbor goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Resolved {
    /// There; until then nobody has to ask the table again.
    At([u8; 6], u64),
    /// It is being looked for.
    Wait,
    /// There is no room to look for it.
    Full,
}

/// Who is to be asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Request {
    pub(super) key: Key,
    /// Whether it is still there; otherwise everybody is asked who it is.
    pub(super) known: Option<[u8; 6]>,
}

/// What a neighbor said of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Answer {
    pub(super) address: IpAddr,
    /// IPv6's may leave it out when it is asked whether it is still there.
    pub(super) mac: Option<[u8; 6]>,
    /// It replaces what is known.
    pub(super) overrides: bool,
}

#[derive(Clone, Copy, Debug)]
struct Neighbor {
    state: State,
    /// Known, but when INCOMPLETE or FAILED.
    mac: [u8; 6],
    /// When its state changes by itself, or it is asked again.
    due: u64,
    /// Requests since it was last known, or found missing.
    asked: u8,
    /// When it was last of use.
    used: u64,
}

/// See the file's text.
#[derive(Debug)]
pub(super) struct Table {
    neighbors: HashMap<Key, Neighbor>,
    most: usize,
    incomplete: usize,
    /// When to look at the latest.
    due: u64,
    /// When everybody on a port's link was forgotten.
    forgotten: HashMap<u16, u64>,
}

/// Every thread looks at the links once a second: within so long they mean the same one.
const SAME: u64 = 2_000_000_000;

impl Table {
    /// One with room for so many.
    pub(super) fn new(most: usize) -> Self {
        Self { neighbors: HashMap::new(), most, incomplete: 0, due: u64::MAX, forgotten: HashMap::new() }
    }

    /// A packet is to be sent to it.
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
        let neighbor = Neighbor { state: State::Incomplete, mac: [0; 6], due: now, asked: 0, used: now };
        self.neighbors.insert(key, neighbor);
        self.incomplete += 1;
        self.due = self.due.min(now);
        Resolved::Wait
    }

    /// Whether there is room for this one; one that nobody needs may have to go.
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

    /// What is known of it, without a wish to send there; none when it is not there, or was not found.
    pub(super) fn look(&self, key: Key) -> Option<Resolved> {
        let neighbor = self.neighbors.get(&key)?;
        match neighbor.state {
            State::Failed => None,
            State::Incomplete => Some(Resolved::Wait),
            _ => Some(Resolved::At(neighbor.mac, neighbor.due)),
        }
    }

    /// It has answered. Whether it was asked and is believed.
    pub(super) fn handle_answer(&mut self, port: u16, answer: Answer, now: u64) -> bool {
        let Some(neighbor) = self.neighbors.get_mut(&Key { port, address: answer.address }) else {
            return false;
        };
        let asked = matches!(neighbor.state, State::Incomplete | State::Probe) && neighbor.asked > 0;
        let mac = match (neighbor.state, answer.mac) {
            // "If the Override flag is clear and the supplied link-layer address differs": section 7.2.5.
            (State::Probe, Some(mac)) if mac != neighbor.mac && !answer.overrides => return false,
            (State::Probe, None) => neighbor.mac,
            (_, Some(mac)) => mac,
            (_, None) => return false,
        };
        if !asked {
            return false;
        }
        self.incomplete -= usize::from(neighbor.state == State::Incomplete);
        *neighbor =
            Neighbor { state: State::Reachable, mac, due: now + REACHABLE, asked: 0, used: neighbor.used };
        self.due = self.due.min(neighbor.due);
        true
    }

    /// Does what is due; whom to ask now is put into `requests`. Whether somebody was not found.
    pub(super) fn handle_timeout(&mut self, now: u64, requests: &mut Vec<Request>) -> bool {
        if now < self.due {
            return false;
        }
        let (mut due, mut lost) = (u64::MAX, false);
        let incomplete = &mut self.incomplete;
        self.neighbors.retain(|key, neighbor| {
            let keep = neighbor.due > now || neighbor.go_on(*key, now, incomplete, &mut lost, requests);
            due = if keep { due.min(neighbor.due) } else { due };
            keep
        });
        self.due = due;
        lost
    }

    /// When to call that at the latest; never is `u64::MAX`.
    pub(super) fn poll_timeout(&self) -> u64 {
        self.due
    }

    /// Nobody on the link of this port is known any more. What threads say of it one after the other is one thing: who was found since
    /// the first of them said so stays.
    pub(super) fn forget(&mut self, port: u16, now: u64) {
        if self.forgotten.get(&port).is_some_and(|at| now.saturating_sub(*at) < SAME) {
            return;
        }
        self.forgotten.insert(port, now);
        self.neighbors.retain(|key, _| key.port != port);
        self.incomplete = self.neighbors.values().filter(|n| n.state == State::Incomplete).count();
    }

    /// Everybody: the address, its state, and where it is if that is known.
    pub(super) fn iter(&self) -> impl Iterator<Item = (Key, State, Option<[u8; 6]>)> {
        self.neighbors.iter().map(|(key, neighbor)| {
            let known = !matches!(neighbor.state, State::Incomplete | State::Failed);
            (*key, neighbor.state, known.then_some(neighbor.mac))
        })
    }
}

impl Neighbor {
    /// Its time has come. False when it is not needed any more.
    fn go_on(
        &mut self,
        key: Key,
        now: u64,
        incomplete: &mut usize,
        lost: &mut bool,
        requests: &mut Vec<Request>,
    ) -> bool {
        match self.state {
            State::Incomplete | State::Probe if self.asked < SOLICIT => {
                let known = (self.state == State::Probe).then_some(self.mac);
                requests.push(Request { key, known });
                (self.asked, self.due) = (self.asked + 1, now + RETRANS);
            }
            State::Incomplete | State::Probe => {
                *incomplete -= usize::from(self.state == State::Incomplete);
                *lost = true;
                (self.state, self.asked, self.due) = (State::Failed, 0, now + FORGET);
            }
            State::Reachable => (self.state, self.due) = (State::Stale, now + FORGET),
            State::Delay => {
                requests.push(Request { key, known: Some(self.mac) });
                (self.state, self.asked, self.due) = (State::Probe, 1, now + RETRANS);
            }
            State::Stale | State::Failed => return false,
        }
        true
    }
}

impl State {
    /// As ip-neighbour(8) writes it.
    pub(super) const fn word(self) -> &'static str {
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

    fn answer(last: u8, mac: Option<[u8; 6]>, overrides: bool) -> Answer {
        Answer { address: key(last).address, mac, overrides }
    }

    fn state(table: &Table, last: u8) -> Option<State> {
        table.iter().find(|(of, ..)| *of == key(last)).map(|(_, state, _)| state)
    }

    /// Each thread says so within its second.
    #[test]
    fn a_link_that_comes_back_is_forgotten_once() {
        let mut table = Table::new(4);
        let mut requests = Vec::new();
        let rows = [(10, None), (11, Some(State::Reachable)), (13, None)];
        for (at, then) in rows {
            let now = at * SECOND;
            table.resolve(key(1), now);
            table.handle_timeout(now, &mut requests);
            table.handle_answer(1, answer(1, Some(MAC), true), now);
            table.forget(1, now);
            assert_eq!(state(&table, 1), then, "at {at} s");
        }
    }

    /// A neighbor's life, a row for each thing that happens: when, what, whether it is asked or believed, and its state then.
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
            (0,   Hear(Some(MAC), true),    false, Some(State::Incomplete)), // nobody was asked yet
            (0,   Time,                     true,  Some(State::Incomplete)),
            (0,   Time,                     false, Some(State::Incomplete)), // one a second
            (1,   Time,                     true,  Some(State::Incomplete)),
            (1,   Hear(None, true),         false, Some(State::Incomplete)),
            (1,   Hear(Some(MAC), false),   true,  Some(State::Reachable)),
            (2,   Hear(Some(OTHER), true),  false, Some(State::Reachable)), // nobody has asked
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
                Hear(mac, overrides) => table.handle_answer(1, answer(1, mac, overrides), now),
            };
            assert_eq!((happened, state(&table, 1)), (expected, then), "at {at} s");
        }
    }

    #[test]
    fn who_makes_us_look_for_what_is_not_there_does_not_push_out_what_is() {
        let mut table = Table::new(8);
        for last in 0..4 {
            table.resolve(key(last), 0);
        }
        table.handle_timeout(0, &mut Vec::new());
        for last in 0..4 {
            assert!(table.handle_answer(1, answer(last, Some(MAC), true), 0));
        }
        let full = (10..200).filter(|last| table.resolve(key(*last), 0) == Resolved::Full).count();
        assert_eq!((full, table.neighbors.len()), (190 - 4, 8));
        assert!((0..4).all(|last| matches!(table.resolve(key(last), 0), Resolved::At(MAC, _))));
        // What was not found makes room.
        for at in 0..4 {
            table.handle_timeout(at * SECOND, &mut Vec::new());
        }
        assert_eq!(table.resolve(key(99), 4 * SECOND), Resolved::Wait);
        assert_eq!(table.neighbors.len(), 8);
    }

    /// What a stupid observer knows of a neighbor: what it was told, and what it saw asked.
    #[derive(Clone, Copy, Debug, Default)]
    struct Seen {
        mac: Option<[u8; 6]>,
        /// Requests without an answer, and the time of the last one.
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
            (0..6_u8, 1..4_u8, any::<bool>()).prop_map(|(who, mac, overrides)| Op::Hear(who, mac, overrides)),
        ];
        prop::collection::vec(op, 0..200)
    }

    proptest! {
        #[test]
        fn only_answers_are_believed(ops in ops()) {
            const MOST: usize = 4;
            let (mut table, mut now) = (Table::new(MOST), 0);
            let mut seen = [Seen::default(); 6];
            for op in ops {
                match op {
                    Op::Send(who) => {
                        if let Resolved::At(mac, until) = table.resolve(key(who), now) {
                            prop_assert_eq!(Some(mac), seen[usize::from(who)].mac);
                            prop_assert!(until > now);
                        }
                    }
                    Op::Pass(time) => now += time,
                    Op::Hear(who, mac, overrides) => {
                        let told = answer(who, Some([mac; 6]), overrides);
                        let believed = table.handle_answer(1, told, now);
                        let seen = &mut seen[usize::from(who)];
                        let expected = seen.out > 0 && (overrides || seen.mac.is_none_or(|old| old == [mac; 6]));
                        prop_assert_eq!(believed, expected, "{:?} at {}", seen, now);
                        if believed {
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
                        // Looked for anew: what was known of it is forgotten.
                        seen.mac = None;
                    }
                    prop_assert_eq!(known, seen.mac);
                    (seen.out, seen.last) = (seen.out + 1, Some(now));
                    prop_assert!(seen.out <= SOLICIT);
                }
                for (who, seen) in seen.iter_mut().enumerate() {
                    // Three requests, and a second after the last: it was not found.
                    if matches!(state(&table, who as u8), None | Some(State::Failed)) {
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
