//! Admission of a mux's peers by the gate's rules.
//!
//! Purpose: an accepted connection is evaluated as its SYN would be: `tcp`, `setup`, `in`, `recv` with the mux's name. A state
//! made by the evaluation (`keep-state`, `limit`) is kept established as long as the connection lives, even while it is silent,
//! and is removed with the connection.
//!
//! Invariant: a connection in `admitted` has passed and is not closed; leaving `admitted` removes its states.
//! Races: the thread that serves the mux adds and removes connections while the supervisor refreshes some at a time. One lock
//! serialises them. No holder waits for a peer. Rule changes reach the walker as they do for packets.
//!
//! Not supported: inspection is per packet; connections are not inspected. A rule that sends the connection to a queue is
//! treated as a queue without an inspector: `unserved` decides. A copy (`tee`) is left out.

use std::collections::HashMap;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use towpath_gate::state::{Ends, Flow, Lookup, Segment};
use towpath_gate::{Dir, NoReply, PortId, Reject, Step, Walk, Walker};
use towpath_mux::io::{Admission, Admit, Peer};
use towpath_wire::{self as wire, LinkType, Time};

use crate::packet_log::LogSender;
use crate::ruleset_manager::Clock;
use towpath_engine::queue::DefaultVerdict;

/// Protocol number of TCP (IANA), and its flags (RFC 9293 section 3.1).
const TCP: u8 = 6;
const SYN: u8 = 0x02;
const ACK: u8 = 0x10;

/// Upper bound of states checked for expiry in each call. Without ports no other thread checks them.
const EXPIRE: usize = 16_384;

/// Connections refreshed while holding the lock once: about 0.1 ms.
const PIECE: usize = 256;

/// Upper bound of walk steps that name a queue; beyond it the connection is denied.
const DETOURS: usize = 16;

/// Admission of one mux's peers; see the module documentation.
pub(super) struct MuxAdmission {
    inside: Mutex<Inside>,
}

struct Inside {
    walker: Walker,
    port: PortId,
    /// Start of the clock that the states use, and the clock shared with readers of the states.
    start: Instant,
    clock: Clock,
    /// The verdict for a connection that a rule sends to an inspector.
    unserved: DefaultVerdict,
    /// Admitted connections. The value is true for those that are evaluated again in every refresh: connections with a state, and
    /// refused connections that are not closed yet (a connection in its TLS handshake cannot be closed).
    admitted: HashMap<Peer, bool>,
    log: LogSender,
}

/// Result of a refresh.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Refreshed {
    /// Connections whose rule is gone and that the current rules refuse.
    pub(super) refused: Vec<Peer>,
}

impl MuxAdmission {
    /// Creates the admission of a mux whose connections are received by `port`.
    pub(super) fn new(
        walker: Walker,
        port: PortId,
        (start, clock): (Instant, Clock),
        unserved: DefaultVerdict,
        log: LogSender,
    ) -> Self {
        let inside = Inside { walker, port, start, clock, unserved, admitted: HashMap::new(), log };
        Self { inside: Mutex::new(inside) }
    }

    fn inside(&self) -> MutexGuard<'_, Inside> {
        // Each operation leaves the contents consistent, so a poisoned lock is usable.
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the verdict for connections that a rule sends to an inspector.
    pub(super) fn set_unserved(&self, unserved: DefaultVerdict) {
        self.inside().unserved = unserved;
    }

    /// Keeps the states of silent connections alive. With `again` (the rules have changed), connections without a state are
    /// evaluated again, too. Call it about once a second.
    pub(super) fn refresh(&self, again: bool) -> Refreshed {
        let peers: Vec<Peer> = {
            let mut inside = self.inside();
            inside.tell();
            inside.admitted.keys().copied().collect()
        };
        let mut refreshed = Refreshed::default();
        for peers in peers.chunks(PIECE) {
            let mut inside = self.inside();
            let now = inside.now();
            for peer in peers {
                // The connection may have closed since.
                let Some(&state) = inside.admitted.get(peer) else { continue };
                if state && inside.refresh(peer, now) || !state && !again {
                    continue;
                }
                match inside.evaluate(peer, now) {
                    Admit::Pass => {
                        let state = inside.establish(peer, now);
                        inside.admitted.insert(*peer, state);
                    }
                    Admit::Deny | Admit::Reset => {
                        inside.admitted.insert(*peer, true);
                        refreshed.refused.push(*peer);
                    }
                }
            }
        }
        let mut inside = self.inside();
        let now = inside.now();
        inside.walker.expire(now, EXPIRE);
        inside.tell();
        inside.walker.idle();
        refreshed
    }
}

impl fmt::Debug for MuxAdmission {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MuxAdmission").finish_non_exhaustive()
    }
}

impl Admission for MuxAdmission {
    fn admit(&self, peer: &Peer, _: towpath_mux::Time) -> Admit {
        let mut inside = self.inside();
        let now = inside.now();
        let admit = inside.evaluate(peer, now);
        if admit == Admit::Pass {
            let state = inside.establish(peer, now);
            inside.admitted.insert(*peer, state);
        }
        inside.tell();
        inside.walker.idle();
        admit
    }

    fn closed(&self, peer: &Peer, _: towpath_mux::Time) {
        let mut inside = self.inside();
        if inside.admitted.remove(peer) == Some(true) {
            let now = inside.now();
            inside.walker.states_mut().remove_flow(&flow(peer), now);
            inside.walker.idle();
        }
    }
}

impl Inside {
    fn now(&self) -> Time {
        let now = Time::from_nanos(u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX));
        self.clock.set(now);
        now
    }

    /// Evaluates the connection's SYN.
    fn evaluate(&mut self, peer: &Peer, now: Time) -> Admit {
        let frame = syn(peer);
        let Ok(packet) = wire::parse(LinkType::RAW, &frame, frame.len() as u32) else { return Admit::Deny };
        let mut walk = Walk::new(Dir::In, Some(self.port), None);
        for _ in 0..DETOURS {
            match self.walker.walk(&mut walk, &packet, now) {
                Step::Pass | Step::Forward(..) => return Admit::Pass,
                // The loopback interface: a reply packet would not be sent, but the connection can be reset.
                Step::Reject(Reject::Reset | Reject::NoReply(NoReply::BadSource)) => return Admit::Reset,
                Step::Drop(_) | Step::Reject(_) | Step::Reassemble => return Admit::Deny,
                Step::Tee(_) => {}
                Step::Inspect(_) | Step::Divert(_) if self.unserved == DefaultVerdict::Drop => {
                    return Admit::Deny;
                }
                Step::Inspect(_) => return Admit::Pass,
                Step::Divert(_) => {}
            }
        }
        Admit::Deny
    }

    /// Marks the state that the walk made as established: the kernel has completed the handshake.
    fn establish(&mut self, peer: &Peer, now: Time) -> bool {
        let flow = flow(peer);
        let answer = Segment { tcp_flags: SYN | ACK, tcp_ack: 1, tcp_window: u16::MAX, ..Segment::default() };
        let states = self.walker.states_mut();
        states.renew(&flow.reversed(), Lookup::Any, &answer, now) && self.refresh(peer, now)
    }

    /// Refreshes the state as established in both directions. Returns false if the connection has no state.
    fn refresh(&mut self, peer: &Peer, now: Time) -> bool {
        let flow = flow(peer);
        let there =
            Segment { tcp_flags: ACK, tcp_seq: 1, tcp_ack: 1, tcp_window: u16::MAX, ..Segment::default() };
        let states = self.walker.states_mut();
        states.renew(&flow, Lookup::Any, &there, now)
            && states.renew(&flow.reversed(), Lookup::Any, &there, now)
    }

    /// Sends the lines of `log` rules to the supervisor without blocking.
    fn tell(&mut self) {
        let now = self.now();
        self.log.send(&mut self.walker, now, false);
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        let now = self.now();
        self.log.send(&mut self.walker, now, true);
    }
}

/// The connection's flow as the gate sees it, from the peer to the mux.
fn flow(peer: &Peer) -> Flow {
    let (from, to) = (peer.remote.ip().to_canonical(), peer.local.ip().to_canonical());
    let ends = match (from, to) {
        (IpAddr::V4(from), IpAddr::V4(to)) => Ends::V4(from, to),
        (from, to) => Ends::V6(to_v6(from), to_v6(to), 0),
    };
    Flow { ends, proto: TCP, src_port: peer.remote.port(), dst_port: peer.local.port(), zone: 0 }
}

fn to_v6(address: IpAddr) -> std::net::Ipv6Addr {
    match address {
        IpAddr::V4(address) => address.to_ipv6_mapped(),
        IpAddr::V6(address) => address,
    }
}

/// The connection's SYN as an IP packet with a TCP header and no payload. Checksums are zero: the kernel has verified the
/// real ones.
fn syn(peer: &Peer) -> Vec<u8> {
    let mut frame = match flow(peer).ends {
        Ends::V4(from, to) => {
            // RFC 791 section 3.1: version and header length, service, total length 40, identification, fragment, time to
            // live, protocol, checksum.
            let mut frame = vec![0x45, 0, 0, 40, 0, 0, 0x40, 0, 64, TCP, 0, 0];
            frame.extend(from.octets());
            frame.extend(to.octets());
            frame
        }
        Ends::V6(from, to, _) => {
            // RFC 8200 section 3: version, payload length 20, next header, hop limit.
            let mut frame = vec![0x60, 0, 0, 0, 0, 20, TCP, 64];
            frame.extend(from.octets());
            frame.extend(to.octets());
            frame
        }
    };
    frame.extend(port(peer.remote));
    frame.extend(port(peer.local));
    // RFC 9293 section 3.1: sequence, acknowledgement, data offset, flags, window, checksum, urgent.
    frame.extend([0, 0, 0, 0, 0, 0, 0, 0, 0x50, SYN, 0xff, 0xff, 0, 0, 0, 0]);
    frame
}

fn port(address: SocketAddr) -> [u8; 2] {
    address.port().to_be_bytes()
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::sync_channel;

    use towpath_gate::rules::Ruleset;
    use towpath_gate::{Gate, state};
    use towpath_gate::{Ports, StatePolicy};

    use super::*;

    const ZERO: towpath_mux::Time = towpath_mux::Time::from_nanos(0);

    fn admission(rules: &str) -> (Gate, MuxAdmission) {
        let ruleset = Ruleset::parse("t", rules).ruleset.unwrap();
        let mut ports = Ports::new();
        let port = ports.add("web", Vec::new());
        let mut gate = Gate::new(ruleset, ports, state::Settings::default(), 1);
        let walker = gate.walker().unwrap();
        let time = (Instant::now(), Clock::default());
        let admission =
            MuxAdmission::new(walker, port, time, DefaultVerdict::Drop, LogSender::new(sync_channel(9).0));
        (gate, admission)
    }

    fn peer(remote: &str, port: u16) -> Peer {
        let remote: IpAddr = remote.parse().unwrap();
        let local = match remote.to_canonical() {
            IpAddr::V4(_) if remote.is_ipv4() => "192.0.2.1",
            IpAddr::V4(_) => "::ffff:192.0.2.1",
            IpAddr::V6(_) => "2001:db8::1",
        };
        let local: IpAddr = local.parse().unwrap();
        Peer { local: (local, 80).into(), remote: (remote, port).into() }
    }

    #[test]
    fn rules_decide_about_peers() {
        let rows = [
            ("allow tcp from any to any 80 setup in recv web", "10.0.0.1", Admit::Pass),
            ("allow tcp from any to any 80 setup in via web keep-state", "2001:db8::9", Admit::Pass),
            ("allow ip from 10.0.0.0/8 to any", "::ffff:10.0.0.1", Admit::Pass),
            ("allow tcp from any to any 81", "10.0.0.1", Admit::Deny),
            ("allow tcp from any to any recv other", "10.0.0.1", Admit::Deny),
            ("allow tcp from any to any out", "10.0.0.1", Admit::Deny),
            ("allow tcp from any to any established", "10.0.0.1", Admit::Deny),
            ("reset tcp from any to any", "10.0.0.1", Admit::Reset),
            ("reset tcp from any to any", "127.0.0.1", Admit::Reset),
            ("deny tcp from any to any", "127.0.0.1", Admit::Deny),
            ("unreach port tcp from any to any", "10.0.0.1", Admit::Deny),
            ("tee 1 ip from any to any\nadd allow ip from any to any", "10.0.0.1", Admit::Pass),
            ("inspect 1 ip from any to any", "10.0.0.1", Admit::Deny),
        ];
        for (rule, remote, expected) in rows {
            let (_gate, admission) = admission(&format!("add {rule}\n"));
            assert_eq!(admission.admit(&peer(remote, 4000), ZERO), expected, "{rule} from {remote}");
        }
    }

    #[test]
    fn a_limit_counts_connections_that_live() {
        for remote in ["10.0.0.1", "2001:db8::9"] {
            let (gate, admission) = admission("add allow tcp from any to any 80 setup limit src-addr 2\n");
            let admit = |port| admission.admit(&peer(remote, port), ZERO);
            assert_eq!([admit(1), admit(2), admit(3)], [Admit::Pass, Admit::Pass, Admit::Deny]);
            assert_eq!(gate.states().len(), 2);
            // The state is established although the rules saw no further segment.
            let listed: Vec<_> = gate.states().list(Time::default()).collect();
            assert!(
                listed.iter().filter(|line| line.packets[0] > 0).all(|line| line.seconds() > 200),
                "{listed:?}"
            );
            admission.closed(&peer(remote, 1), ZERO);
            assert_eq!((gate.states().len(), admit(3)), (1, Admit::Pass));
            admission.closed(&peer(remote, 2), ZERO);
            admission.closed(&peer(remote, 3), ZERO);
            assert_eq!(gate.states().len(), 0);
        }
    }

    #[test]
    fn states_stay_until_their_connections_go_or_their_rules_do() {
        let rules =
            "add 100 allow tcp from 10.0.0.0/8 to any setup keep-state\nadd 200 allow tcp from any to any\n";
        let (mut gate, admission) = admission(rules);
        let (with, without) = (peer("10.0.0.1", 1), peer("11.0.0.1", 1));
        assert_eq!([&with, &without].map(|peer| admission.admit(peer, ZERO)), [Admit::Pass; 2]);
        assert_eq!((admission.refresh(false), gate.states().len()), (Refreshed::default(), 1));
        let mut reload = |rules: &str| {
            let ruleset = Ruleset::parse("t", rules).ruleset.unwrap();
            gate.reload(ruleset, StatePolicy::Delete, Time::default());
            gate.states().list(Time::default()).count()
        };
        assert_eq!(reload("add 200 allow tcp from any to any\n"), 0);
        assert_eq!(admission.refresh(true).refused, []);
        assert_eq!(reload("add 200 allow tcp from 10.0.0.0/8 to any\n"), 0);
        assert_eq!(
            admission.refresh(false).refused,
            [],
            "a connection without a state is not evaluated again"
        );
        assert_eq!(admission.refresh(true).refused, [without]);
        assert_eq!(admission.refresh(false).refused, [without], "it was not closed yet");
        admission.closed(&without, ZERO);
        assert_eq!(admission.refresh(true).refused, []);
    }

    #[test]
    fn the_verdict_of_unserved_queues_can_change() {
        let (_gate, admission) = admission("add inspect 1 tcp from any to any\n");
        let peer = peer("10.0.0.1", 1);
        assert_eq!(admission.admit(&peer, ZERO), Admit::Deny);
        admission.set_unserved(DefaultVerdict::Pass);
        assert_eq!((admission.admit(&peer, ZERO), admission.refresh(true).refused), (Admit::Pass, vec![]));
        admission.set_unserved(DefaultVerdict::Drop);
        assert_eq!(admission.refresh(true).refused, [peer]);
    }
}
