//! The gate's word about the peers of a mux.
//!
//! What: a connection that a mux accepted walks the rules as its SYN would have: `tcp`, `setup`, `in`, received by the mux's
//! name. What passes and made a state (`keep-state`, `limit`) has it as long as the connection lives: the state is kept
//! established however silent the connection is, and goes with it.
//!
//! Invariant: a connection in `standing` has passed and was not closed; what it has of states goes when it leaves there.
//! Races: the thread that serves the mux comes and goes, the supervisor's tends, some connections at a time: one lock, which
//! nobody holds for long, nor while a peer could make him wait. Rules change meanwhile as for packets: the walker takes them over.
//!
//! Not supported: inspectors see packets, and a connection is none. A rule that hands it to a queue is that of a queue
//! nobody serves: `unserved` decides; a copy (`tee`) is left out.

use std::collections::HashMap;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::mpsc::SyncSender;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use towpath_gate::state::{Ends, Flow, Lookup, Segment};
use towpath_gate::{Dir, NoReply, PortId, Reject, Step, Walk, Walker};
use towpath_mux::io::{Admission, Admit, Peer};
use towpath_wire::{self as wire, LinkType, Time};

use crate::ruleset_manager::Clock;
use towpath_engine::queue::DefaultVerdict;

/// TCP's number (IANA), and flags (RFC 9293 section 3.1).
const TCP: u8 = 6;
const SYN: u8 = 0x02;
const ACK: u8 = 0x10;

/// States that are looked at for expiry each time: where there are no ports, nobody else does.
const EXPIRE: usize = 16_384;

/// Connections that are looked after before whoever waits at the door has a turn: some 0.1 ms.
const PIECE: usize = 256;

/// Steps of one walk that hand the connection to somebody, before it is denied.
const DETOURS: usize = 16;

/// See the module's text.
pub(super) struct MuxAdmission {
    name: String,
    inside: Mutex<Inside>,
}

struct Inside {
    walker: Walker,
    port: PortId,
    /// The beginning of the clock that all states live by, and the clock for who looks at them.
    start: Instant,
    clock: Clock,
    /// What becomes of a connection that a rule hands to an inspector.
    unserved: DefaultVerdict,
    /// Connections that passed, and whether they are asked about every time: they have a state, or were refused since and are not
    /// closed yet (one that still shakes hands cannot be).
    standing: HashMap<Peer, bool>,
    log: SyncSender<String>,
    /// Lines of `log` rules that nobody took, since it was told.
    unlogged: u64,
}

/// What became of connections when they were looked after.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Refreshed {
    /// Their rules are gone, and those that there are now would not let them in.
    pub(super) refused: Vec<Peer>,
}

impl MuxAdmission {
    /// The door of the mux whose connections are received by `port`.
    pub(super) fn new(
        name: &str,
        walker: Walker,
        port: PortId,
        (start, clock): (Instant, Clock),
        unserved: DefaultVerdict,
        log: SyncSender<String>,
    ) -> Self {
        let inside =
            Inside { walker, port, start, clock, unserved, standing: HashMap::new(), log, unlogged: 0 };
        Self { name: name.to_owned(), inside: Mutex::new(inside) }
    }

    fn inside(&self) -> MutexGuard<'_, Inside> {
        // What is in there is whole after every step.
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What becomes of connections that a rule hands to an inspector, from now on.
    pub(super) fn set_unserved(&self, unserved: DefaultVerdict) {
        self.inside().unserved = unserved;
    }

    /// Keeps the states of connections that are silent. With `again`, because rules have changed, connections without a
    /// state are asked about again, too. To be called every second or so.
    pub(super) fn refresh(&self, again: bool) -> Refreshed {
        let (unlogged, peers) = {
            let mut inside = self.inside();
            let peers: Vec<Peer> = inside.standing.keys().copied().collect();
            (std::mem::take(&mut inside.unlogged), peers)
        };
        if unlogged > 0 {
            log::warn!("mux {}: {unlogged} lines of log rules were left out", self.name);
        }
        let mut refreshed = Refreshed::default();
        for peers in peers.chunks(PIECE) {
            let mut inside = self.inside();
            let now = inside.now();
            for peer in peers {
                // It may have gone since.
                let Some(&state) = inside.standing.get(peer) else { continue };
                if state && inside.refresh(peer, now) || !state && !again {
                    continue;
                }
                match inside.ask(peer, now) {
                    Admit::Pass => {
                        let state = inside.establish(peer, now);
                        inside.standing.insert(*peer, state);
                    }
                    Admit::Deny | Admit::Reset => {
                        inside.standing.insert(*peer, true);
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
        f.debug_struct("MuxAdmission").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Admission for MuxAdmission {
    fn admit(&self, peer: &Peer, _: towpath_mux::Time) -> Admit {
        let mut inside = self.inside();
        let now = inside.now();
        let admit = inside.ask(peer, now);
        if admit == Admit::Pass {
            let state = inside.establish(peer, now);
            inside.standing.insert(*peer, state);
        }
        inside.tell();
        inside.walker.idle();
        admit
    }

    fn closed(&self, peer: &Peer, _: towpath_mux::Time) {
        let mut inside = self.inside();
        if inside.standing.remove(peer) == Some(true) {
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

    /// What the rules say about the connection's SYN.
    fn ask(&mut self, peer: &Peer, now: Time) -> Admit {
        let frame = syn(peer);
        let Ok(packet) = wire::parse(LinkType::RAW, &frame, frame.len() as u32) else { return Admit::Deny };
        let mut walk = Walk::new(Dir::In, Some(self.port), None);
        for _ in 0..DETOURS {
            match self.walker.walk(&mut walk, &packet, now) {
                Step::Pass | Step::Forward(..) => return Admit::Pass,
                // A connection of this machine with itself: nothing would be sent to it, but it can be reset.
                Step::Reject(Reject::Reset | Reject::NoReply(NoReply::Source)) => return Admit::Reset,
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

    /// The kernel has shaken hands already: the state that the walk made, if it made one, learns of it.
    fn establish(&mut self, peer: &Peer, now: Time) -> bool {
        let flow = flow(peer);
        let answer = Segment { tcp_flags: SYN | ACK, tcp_ack: 1, tcp_window: u16::MAX, ..Segment::default() };
        let states = self.walker.states_mut();
        states.renew(&flow.reversed(), Lookup::Any, &answer, now) && self.refresh(peer, now)
    }

    /// Both sides are there. False when the connection has no state any more.
    fn refresh(&mut self, peer: &Peer, now: Time) -> bool {
        let flow = flow(peer);
        let there =
            Segment { tcp_flags: ACK, tcp_seq: 1, tcp_ack: 1, tcp_window: u16::MAX, ..Segment::default() };
        let states = self.walker.states_mut();
        states.renew(&flow, Lookup::Any, &there, now)
            && states.renew(&flow.reversed(), Lookup::Any, &there, now)
    }

    /// Hands the lines of `log` rules over. Nobody waits for who prints them.
    fn tell(&mut self) {
        let Self { walker, log, unlogged, .. } = self;
        while let Some(logged) = walker.log().take() {
            let port = logged.port.and_then(|port| walker.ports().name(port));
            if log.try_send(logged.line(port).to_string()).is_err() {
                *unlogged += 1;
            }
        }
    }
}

/// The connection as the gate knows it, from its peer to us.
fn flow(peer: &Peer) -> Flow {
    let (from, to) = (peer.remote.ip().to_canonical(), peer.local.ip().to_canonical());
    let ends = match (from, to) {
        (IpAddr::V4(from), IpAddr::V4(to)) => Ends::V4(from, to),
        (from, to) => Ends::V6(six(from), six(to), 0),
    };
    Flow { ends, proto: TCP, src_port: peer.remote.port(), dst_port: peer.local.port(), tenant: 0 }
}

fn six(address: IpAddr) -> std::net::Ipv6Addr {
    match address {
        IpAddr::V4(address) => address.to_ipv6_mapped(),
        IpAddr::V6(address) => address,
    }
}

/// A connection's SYN as the rules see it: an IP packet with a TCP header and nothing in it. The checksums are left out:
/// the kernel has seen the real one.
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

    fn door(rules: &str) -> (Gate, MuxAdmission) {
        let ruleset = Ruleset::parse("t", rules).ruleset.unwrap();
        let mut ports = Ports::new();
        let port = ports.add("web", Vec::new());
        let mut gate = Gate::new(ruleset, ports, state::Settings::default(), 1);
        let walker = gate.walker().unwrap();
        let time = (Instant::now(), Clock::default());
        let door = MuxAdmission::new("web", walker, port, time, DefaultVerdict::Drop, sync_channel(9).0);
        (gate, door)
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
            let (_gate, door) = door(&format!("add {rule}\n"));
            assert_eq!(door.admit(&peer(remote, 4000), ZERO), expected, "{rule} from {remote}");
        }
    }

    #[test]
    fn a_limit_counts_connections_that_live() {
        for remote in ["10.0.0.1", "2001:db8::9"] {
            let (gate, door) = door("add allow tcp from any to any 80 setup limit src-addr 2\n");
            let admit = |port| door.admit(&peer(remote, port), ZERO);
            assert_eq!([admit(1), admit(2), admit(3)], [Admit::Pass, Admit::Pass, Admit::Deny]);
            assert_eq!(gate.states().len(), 2);
            // Established, whichever segments the rules never saw.
            let listed: Vec<_> = gate.states().list(Time::default()).collect();
            assert!(
                listed.iter().filter(|line| line.packets[0] > 0).all(|line| line.seconds() > 200),
                "{listed:?}"
            );
            door.closed(&peer(remote, 1), ZERO);
            assert_eq!((gate.states().len(), admit(3)), (1, Admit::Pass));
            door.closed(&peer(remote, 2), ZERO);
            door.closed(&peer(remote, 3), ZERO);
            assert_eq!(gate.states().len(), 0);
        }
    }

    #[test]
    fn states_stay_until_their_connections_go_or_their_rules_do() {
        let rules =
            "add 100 allow tcp from 10.0.0.0/8 to any setup keep-state\nadd 200 allow tcp from any to any\n";
        let (mut gate, door) = door(rules);
        let (with, without) = (peer("10.0.0.1", 1), peer("11.0.0.1", 1));
        assert_eq!([&with, &without].map(|peer| door.admit(peer, ZERO)), [Admit::Pass; 2]);
        assert_eq!((door.refresh(false), gate.states().len()), (Refreshed::default(), 1));
        let mut reload = |rules: &str| {
            let ruleset = Ruleset::parse("t", rules).ruleset.unwrap();
            gate.reload(ruleset, StatePolicy::Delete, Time::default());
            gate.states().list(Time::default()).count()
        };
        assert_eq!(reload("add 200 allow tcp from any to any\n"), 0);
        assert_eq!(door.refresh(true).refused, []);
        assert_eq!(reload("add 200 allow tcp from 10.0.0.0/8 to any\n"), 0);
        assert_eq!(door.refresh(false).refused, [], "nobody asks about what has no state");
        assert_eq!(door.refresh(true).refused, [without]);
        assert_eq!(door.refresh(false).refused, [without], "it was not closed yet");
        door.closed(&without, ZERO);
        assert_eq!(door.refresh(true).refused, []);
    }

    #[test]
    fn what_becomes_of_the_unserved_can_change() {
        let (_gate, door) = door("add inspect 1 tcp from any to any\n");
        let peer = peer("10.0.0.1", 1);
        assert_eq!(door.admit(&peer, ZERO), Admit::Deny);
        door.set_unserved(DefaultVerdict::Pass);
        assert_eq!((door.admit(&peer, ZERO), door.refresh(true).refused), (Admit::Pass, vec![]));
        door.set_unserved(DefaultVerdict::Drop);
        assert_eq!(door.refresh(true).refused, [peer]);
    }
}
