//! What an engine between live ports needs from outside: the clock, the way out, and who looks at it.
//!
//! A packet that leaves as it came is only noted, by its index in the burst; one that was changed, kept or made here is
//! copied. When the burst is handled, the worker gives each port what leaves by it, in order.

use std::convert::Infallible;
use std::marker::PhantomData;
use std::net::IpAddr;
use std::time::Instant;

use towpath_gate::{PortId, Reject, ReplyLimiter};
use towpath_port::{Burst, Frame, LinkType, Verdict, checksum};
use towpath_wire::{self as wire, Link, Time};

use super::hop::{self, Hops, Stuck};
use super::neighbor::{self, Fate, NeighborSnapshot, Resolver};
use crate::engine::{Edge, Introspect, Meta};
use crate::queue::Channel;

/// Most packets that may wait for one port, and their bytes: what the engine keeps at most, and as much again.
const COPIES: usize = 16_384;
const COPY_BYTES: usize = 32 << 20;

/// See the module's text.
pub(super) struct Outside<C, Q> {
    start: Instant,
    /// By port.
    pub(super) lines: Vec<Line>,
    queries: Q,
    scratch: Vec<u8>,
    /// The fragment that is being sent.
    fragment: Vec<u8>,
    /// Of a router.
    resolver: Option<Resolver>,
    /// The time when the engine asked last.
    time: u64,
    channel: PhantomData<C>,
}

/// Answers queries about a running engine.
pub(super) trait QueryServer {
    /// Answers the pending queries. Returns for how many nanoseconds at most the engine may sleep before the next call.
    fn serve(&mut self, engine: &mut dyn Introspect) -> u64;
}

/// No queries.
impl QueryServer for () {
    fn serve(&mut self, _engine: &mut dyn Introspect) -> u64 {
        u64::MAX
    }
}

/// What leaves by one port.
pub(super) struct Line {
    pub(super) leaving: Vec<Leaving>,
    pub(super) copies: Burst,
    /// What the kernel waits for, when it holds the packets.
    pub(super) verdicts: Vec<(Verdict, towpath_port::Meta, Option<usize>)>,
    /// It can send.
    pub(super) sends: bool,
    /// Packets to this port are routed.
    pub(super) hops: Option<Hops>,
    /// Bytes of the longest that it sends.
    pub(super) mtu: usize,
    /// Those who came in here and were told that they are longer.
    pub(super) told: ReplyLimiter,
    /// The router's own addresses there.
    pub(super) addresses: Vec<IpAddr>,
    pub(super) lost: Lost,
}

/// One packet on its way out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Leaving {
    /// That of the burst.
    Came(usize),
    /// That of the copies.
    Copy(usize),
}

/// Packets that passed and were not sent, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Lost {
    /// There was no room to keep them until they are sent.
    pub(super) no_room: u64,
    /// The port took no more.
    pub(super) full: u64,
    /// The port refused them.
    pub(super) refused: u64,
    /// They had no hop left.
    pub(super) expired: u64,
    /// Nobody knows their next hop.
    pub(super) no_hop: u64,
    /// They were longer than the port's link takes, and could not be divided: their senders were told.
    pub(super) too_long: u64,
    /// Their next hop did not answer, or too many others waited for it.
    pub(super) unresolved: u64,
    /// Neighbors said who they are, and nobody had asked.
    pub(super) unsolicited: u64,
    /// They came for another host's Ethernet address, and met no rule; or for several hosts', and would have been routed.
    pub(super) not_ours: u64,
    /// They went on, but without what rules would have changed in them: the kernel had not handed them over whole.
    pub(super) unchanged: u64,
}

impl Lost {
    /// The reasons with their counters.
    pub(super) fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> + use<> {
        let Self {
            no_room,
            full,
            refused,
            expired,
            no_hop,
            too_long,
            unresolved,
            unsolicited,
            not_ours,
            unchanged,
        } = *self;
        [
            ("no_room", no_room),
            ("full", full),
            ("refused", refused),
            ("expired", expired),
            ("no_hop", no_hop),
            ("too_long", too_long),
            ("unresolved", unresolved),
            ("unsolicited", unsolicited),
            ("not_ours", not_ours),
            ("unchanged", unchanged),
        ]
        .into_iter()
    }
}

impl Line {
    pub(super) fn new(sends: bool, hops: Option<Hops>) -> Self {
        Self {
            leaving: Vec::new(),
            copies: Burst::with_bytes(COPIES, COPY_BYTES),
            verdicts: Vec::new(),
            sends,
            hops,
            mtu: usize::MAX,
            told: ReplyLimiter::default(),
            addresses: Vec::new(),
            lost: Lost::default(),
        }
    }

    fn copy(&mut self, bytes: &[u8], meta: &Meta) -> Option<usize> {
        let frame = Frame {
            bytes,
            wire_len: meta.wire_len,
            time_ns: meta.time,
            link: LinkType(meta.link_type),
            interface: 0,
            meta: meta.port,
        };
        match self.copies.push(frame) {
            Ok(()) => Some(self.copies.len() - 1),
            Err(_) => {
                self.lost.no_room += 1;
                None
            }
        }
    }

    fn send(&mut self, bytes: &[u8], meta: &Meta) {
        if let Some(at) = self.copy(bytes, meta) {
            self.leaving.push(Leaving::Copy(at));
        }
    }

    /// Sends a routed packet, to `ask` where somebody has to be asked for first.
    fn send_to(
        &mut self,
        ask: Option<IpAddr>,
        bytes: &mut [u8],
        meta: &Meta,
        resolver: Option<&mut Resolver>,
        (port, time): (u16, u64),
    ) {
        let Some(address) = ask else { return self.send(bytes, meta) };
        match resolver.map(|resolver| resolver.resolve(port, address, time, bytes, meta)) {
            Some(Fate::To(mac)) => {
                bytes[..mac.len()].copy_from_slice(&mac);
                self.send(bytes, meta);
            }
            Some(Fate::Waits(lost) | Fate::Lost(lost)) => self.lost.unresolved += lost,
            None => self.lost.no_hop += 1,
        }
    }

    /// The kernel's own packet: it needs the verdict, and the bytes only when they are others.
    fn answer(&mut self, bytes: &[u8], meta: &Meta) {
        // Only the beginning of the packet is here, as rules have changed it: put in its place, nothing would be left of the rest.
        let beginning =
            meta.port.queued.is_some_and(|queued| queued.cut) && bytes.len() < meta.wire_len as usize;
        self.lost.unchanged += u64::from(meta.changed && beginning);
        if !meta.changed || beginning {
            return self.verdicts.push((Verdict::Accept, meta.port, None));
        }
        match self.copy(bytes, meta) {
            Some(at) => self.verdicts.push((Verdict::Replace, meta.port, Some(at))),
            None => self.verdicts.push((Verdict::Drop, meta.port, None)),
        }
    }

    /// Nothing leaves any more.
    pub(super) fn clear(&mut self) {
        self.leaving.clear();
        self.verdicts.clear();
        self.copies.clear();
    }
}

impl<C: Channel, Q: QueryServer> Outside<C, Q> {
    /// `start` is the beginning of the clock: the same for all threads, whose states are the same.
    pub(super) fn new(start: Instant, lines: Vec<Line>, queries: Q, resolver: Option<Resolver>) -> Self {
        Self {
            start,
            lines,
            queries,
            scratch: Vec::new(),
            fragment: Vec::new(),
            resolver,
            time: 0,
            channel: PhantomData,
        }
    }

    /// Asks for neighbors that packets wait for, and sends what does not have to wait any more. Between two bursts.
    pub(super) fn look_after_neighbors(&mut self) {
        let Self { lines, scratch, resolver: Some(resolver), time, .. } = self else { return };
        resolver.ask(*time, |port, asking| {
            let Some(line) = lines.get_mut(usize::from(port)) else { return };
            let Some(own) = line.hops.as_ref().and_then(|hops| hops.own) else { return };
            if asking.emit(own, &line.addresses, scratch) {
                line.send(scratch, &ours(port, scratch.len(), *time));
            }
        });
        resolver.release(|port, mac, mut frame, meta| {
            let Some(line) = lines.get_mut(usize::from(port)) else { return };
            match mac {
                Some(mac) => {
                    frame[..mac.len()].copy_from_slice(&mac);
                    line.send(&frame, &meta);
                }
                None => line.lost.unresolved += 1,
            }
        });
    }

    /// When to do that at the latest.
    pub(super) fn neighbors_due(&self) -> Option<u64> {
        self.resolver.as_ref().map(Resolver::due).filter(|due| *due != u64::MAX)
    }

    /// The link of a port is another one, perhaps with others on it.
    pub(super) fn forget_neighbors(&mut self, port: usize) {
        let now = self.wall();
        if let Some(resolver) = &mut self.resolver {
            resolver.forget(port as u16, now);
        }
    }

    /// What waits for a neighbor is dropped: the engine ends.
    pub(super) fn abandon(&mut self) {
        let Self { lines, resolver: Some(resolver), .. } = self else { return };
        resolver.abandon(|port, count| lines[usize::from(port)].lost.unresolved += count);
    }

    /// Whom the router has looked for on the link of a port.
    pub(super) fn neighbors(&self, port: usize) -> Vec<NeighborSnapshot> {
        self.resolver.as_ref().map_or_else(Vec::new, |resolver| resolver.snapshot(port as u16))
    }

    /// The query server.
    pub(super) fn queries_mut(&mut self) -> &mut Q {
        &mut self.queries
    }

    /// Nanoseconds of the clock that the engine lives by.
    pub(super) fn wall(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// Tells the sender of `frame` that no more than `mtu` bytes of it would go on: without that, who sends by the MTU of a path (RFC 1191,
    /// RFC 8201) never learns it.
    fn tell_too_long(&mut self, frame: &[u8], meta: &Meta, mtu: usize) {
        let Self { lines, scratch, time, .. } = self;
        let Ok(packet) = wire::parse(meta.link, frame, meta.wire_len) else { return };
        let Some(line) = lines.get_mut(meta.interface as usize).filter(|line| line.sends) else { return };
        let told = Reject::too_big(&packet, u32::try_from(mtu).unwrap_or(u32::MAX));
        // The limit first: who is beyond it costs no answer.
        if !line.told.take(Time::from_nanos(*time)) || told.reply(&packet, &line.addresses, scratch).is_err()
        {
            return;
        }
        let (wire_len, port) = (scratch.len() as u32, towpath_port::Meta::default());
        line.send(scratch, &Meta { wire_len, port, hop: None, ..*meta });
    }

    fn line(&mut self, port: PortId) -> Option<&mut Line> {
        self.lines.get_mut(usize::from(port.0))
    }
}

impl<C: Channel, Q: QueryServer> Edge for Outside<C, Q> {
    type Channel = C;
    type Error = Infallible;

    fn now(&mut self) -> u64 {
        self.time = self.wall();
        self.time
    }

    fn takes(&mut self, frame: &[u8], meta: &Meta) -> bool {
        let Some(line) = self.lines.get_mut(meta.interface as usize) else { return true };
        let Some(own) = line.hops.as_ref().and_then(|hops| hops.own) else { return true };
        let takes = meta.link != Link::Ethernet || hop::is_own(frame, own) || hop::is_group(frame);
        line.lost.not_ours += u64::from(!takes);
        takes
    }

    fn send(&mut self, frame: &[u8], meta: &Meta) -> Result<(), Infallible> {
        let Self { lines, scratch, fragment, resolver, time, .. } = self;
        // Of a router: what is for itself, and what is for others.
        if let Some(line) = lines.get_mut(meta.interface as usize)
            && let Some(own) = line.hops.as_ref().and_then(|hops| hops.own)
        {
            if meta.out.is_none() {
                if neighbor::answer(frame, own, &line.addresses, scratch) {
                    let (wire_len, port) = (scratch.len() as u32, towpath_port::Meta::default());
                    line.send(scratch, &Meta { wire_len, port, ..*meta });
                } else if let Some(resolver) = resolver {
                    let (at, ours) = (meta.interface as u16, (own, &line.addresses[..]));
                    let asked = resolver.handle_answer(at, frame, ours, *time);
                    line.lost.unsolicited += u64::from(asked == Some(false));
                }
                return Ok(());
            }
            // What came for several hosts at once is for them: RFC 1812 section 5.3.4.
            if meta.link == Link::Ethernet && !hop::is_own(frame, own) {
                line.lost.not_ours += 1;
                return Ok(());
            }
        }
        let Some(out) = meta.out else { return Ok(()) };
        let Some(line) = lines.get_mut(usize::from(out.0)) else { return Ok(()) };
        if meta.port.queued.is_some() {
            line.answer(frame, meta);
            return Ok(());
        }
        let Some(hops) = &line.hops else {
            line.send(frame, meta);
            return Ok(());
        };
        let (mut as_it_leaves, mtu, at) = (*meta, line.mtu, (out.0, *time));
        match hops.forward(frame, &mut as_it_leaves, mtu, scratch) {
            Ok(onward) => match onward.divide {
                None => line.send_to(onward.ask, scratch, &as_it_leaves, resolver.as_mut(), at),
                Some(network) => {
                    as_it_leaves.port.offload = checksum::complete(scratch, as_it_leaves.port.offload);
                    let divided = hop::divide(scratch, network, mtu, fragment, |piece| {
                        let meta = Meta { wire_len: piece.len() as u32, ..as_it_leaves };
                        line.send_to(onward.ask, piece, &meta, resolver.as_mut(), at);
                    });
                    line.lost.too_long += u64::from(!divided);
                }
            },
            Err(Stuck::Expired) => line.lost.expired += 1,
            Err(Stuck::NoHop) => line.lost.no_hop += 1,
            Err(Stuck::TooLong) => {
                line.lost.too_long += 1;
                self.tell_too_long(frame, meta, mtu);
            }
        }
        Ok(())
    }

    fn pass(&mut self, index: usize, frame: &[u8], meta: &Meta) -> Result<(), Infallible> {
        let Some(line) = meta.out.and_then(|port| self.line(port)) else { return self.send(frame, meta) };
        if line.hops.is_some() || meta.port.queued.is_some() {
            return self.send(frame, meta);
        }
        line.leaving.push(Leaving::Came(index));
        Ok(())
    }

    fn discard(&mut self, meta: &Meta) {
        if meta.port.queued.is_some()
            && let Some(line) = self.lines.get_mut(meta.interface as usize)
        {
            line.verdicts.push((Verdict::Drop, meta.port, None));
        }
    }

    fn give_way(&mut self) {
        // sched_yield(2).
        std::thread::yield_now();
    }

    fn attend(&mut self, engine: &mut dyn Introspect) -> u64 {
        self.queries.serve(engine)
    }

    fn reply(&mut self, port: PortId, frame: &[u8], meta: &Meta) -> bool {
        // By the interface that the packet came from: its VLAN has a port of its own, but not a line.
        let _ = port;
        let Some(line) = self.lines.get_mut(meta.interface as usize) else { return false };
        if !line.sends {
            return false;
        }
        line.send(frame, meta);
        true
    }
}

/// What a frame of ours is, on its way out by `port`.
fn ours(port: u16, len: usize, now: u64) -> Meta {
    Meta {
        wire_len: len as u32,
        time: now,
        link: Link::Ethernet,
        link_type: LinkType::ETHERNET.0,
        interface: port.into(),
        out: Some(PortId(port)),
        hop: None,
        changed: false,
        port: towpath_port::Meta::default(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: [u8; 6] = [2, 0, 0, 0, 0, 1];
    const OTHER: [u8; 6] = [2, 0, 0, 0, 0, 2];

    #[test]
    fn a_router_takes_what_is_for_it() {
        let hops = || Some(Hops::new(&[], 0, Some(OWN)));
        let lines = vec![Line::new(true, hops()), Line::new(true, hops()), Line::new(true, None)];
        let mut outside = Outside::<crate::inspector::Inspector, _>::new(Instant::now(), lines, (), None);
        #[rustfmt::skip]
        let rows = [
            // to          interface  taken  routed
            (OWN,          0,         true,  true),
            (OTHER,        0,         false, false),
            ([0xff; 6],    0,         true,  false),
            ([1, 0, 0x5e, 0, 0, 1], 0, true, false),
            (OTHER,        2,         true,  true),
        ];
        for (to, interface, taken, routed) in rows {
            let mut frame = to.to_vec();
            frame.extend([2, 0, 0, 0, 0, 9, 8, 0]);
            frame.extend([0x45, 0, 0, 28, 0, 7, 0, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 9, 0, 2]);
            frame.extend([4, 0, 0, 53, 0, 8, 0, 0]);
            let meta = Meta {
                wire_len: frame.len() as u32,
                time: 0,
                link: Link::Ethernet,
                link_type: LinkType::ETHERNET.0,
                interface,
                out: Some(PortId(1)),
                hop: None,
                changed: false,
                port: towpath_port::Meta::default(),
            };
            let not_ours = |outside: &Outside<_, _>| outside.lines[interface as usize].lost.not_ours;
            let before = not_ours(&outside);
            assert_eq!(outside.takes(&frame, &meta), taken, "{to:?}");
            if taken {
                let Ok(()) = outside.send(&frame, &meta);
            }
            assert_eq!(not_ours(&outside) == before, routed, "{to:?}");
        }
    }
}
