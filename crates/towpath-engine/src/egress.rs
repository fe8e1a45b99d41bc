//! What an engine between live ports needs from io: the clock, the way out, and who looks at it.
//!
//! A packet that leaves as it came is only noted, by its index in the burst; one that was changed, kept or made here is
//! copied. When the burst is handled, the worker gives each port what leaves by it, in order.

use std::convert::Infallible;
use std::marker::PhantomData;
use std::net::IpAddr;
use std::time::Instant;

use towpath_gate::{PortId, Reject, ReplyLimiter};
use towpath_port::{Burst, Frame, Verdict};
use towpath_wire::checksum;
use towpath_wire::{self as wire, LinkType, Time};

use crate::queue::Channel;
use crate::router::{self, Fib, ForwardError, NeighborSnapshot, Resolution, Resolver};
use crate::{Introspect, Meta, PacketIo};

/// Most packets that may wait for one port, and their bytes: what the engine keeps at most, and as much again.
const COPIES: usize = 16_384;
const COPY_BYTES: usize = 32 << 20;

/// See the module's text.
pub struct PortIo<C, Q> {
    start: Instant,
    /// By port.
    pub tx_queues: Vec<TxQueue>,
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
pub trait QueryServer {
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
pub struct TxQueue {
    pub items: Vec<TxItem>,
    pub copies: Burst,
    /// What the kernel waits for, when it holds the packets.
    pub verdicts: Vec<(Verdict, towpath_port::Meta, Option<usize>)>,
    /// It can send.
    pub sends: bool,
    /// Packets to this port are routed.
    pub fib: Option<Fib>,
    /// Bytes of the longest that it sends.
    pub mtu: usize,
    /// Those who came in here and were told that they are longer.
    pub told: ReplyLimiter,
    /// The router's own addresses there.
    pub addresses: Vec<IpAddr>,
    pub lost: TxDrops,
}

/// One packet on its way out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TxItem {
    /// That of the burst.
    Came(usize),
    /// That of the copies.
    Copy(usize),
}

/// Packets that passed and were not sent, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TxDrops {
    /// There was no room to keep them until they are sent.
    pub no_room: u64,
    /// The port took no more.
    pub full: u64,
    /// The port refused them.
    pub refused: u64,
    /// They had no hop left.
    pub expired: u64,
    /// Nobody knows their next hop.
    pub no_hop: u64,
    /// They were longer than the port's link takes, and could not be divided: their senders were told.
    pub too_long: u64,
    /// Their next hop did not answer, or too many others waited for it.
    pub unresolved: u64,
    /// Neighbors said who they are, and nobody had asked.
    pub unsolicited: u64,
    /// They came for another host's Ethernet address, and met no rule; or for several hosts', and would have been routed.
    pub not_ours: u64,
    /// They went on, but without what rules would have changed in them: the kernel had not handed them over whole.
    pub unchanged: u64,
}

impl TxDrops {
    /// The reasons with their counters.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> + use<> {
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

impl TxQueue {
    pub fn new(sends: bool, fib: Option<Fib>) -> Self {
        Self {
            items: Vec::new(),
            copies: Burst::with_bytes(COPIES, COPY_BYTES),
            verdicts: Vec::new(),
            sends,
            fib,
            mtu: usize::MAX,
            told: ReplyLimiter::default(),
            addresses: Vec::new(),
            lost: TxDrops::default(),
        }
    }

    fn copy(&mut self, bytes: &[u8], meta: &Meta) -> Option<usize> {
        let frame = Frame {
            bytes,
            wire_len: meta.wire_len,
            time_ns: meta.time,
            link: meta.link,
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
            self.items.push(TxItem::Copy(at));
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
            Some(Resolution::To(mac)) => {
                bytes[..mac.len()].copy_from_slice(&mac);
                self.send(bytes, meta);
            }
            Some(Resolution::Waits(lost) | Resolution::Lost(lost)) => self.lost.unresolved += lost,
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
    pub fn clear(&mut self) {
        self.items.clear();
        self.verdicts.clear();
        self.copies.clear();
    }
}

impl<C: Channel, Q: QueryServer> PortIo<C, Q> {
    /// `start` is the beginning of the clock: the same for all threads, whose states are the same.
    pub fn new(start: Instant, tx_queues: Vec<TxQueue>, queries: Q, resolver: Option<Resolver>) -> Self {
        Self {
            start,
            tx_queues,
            queries,
            scratch: Vec::new(),
            fragment: Vec::new(),
            resolver,
            time: 0,
            channel: PhantomData,
        }
    }

    /// Asks for neighbors that packets wait for, and sends what does not have to wait any more. Between two bursts.
    pub fn look_after_neighbors(&mut self) {
        let Self { tx_queues, scratch, resolver: Some(resolver), time, .. } = self else { return };
        resolver.ask(*time, |port, asking| {
            let Some(txq) = tx_queues.get_mut(usize::from(port)) else { return };
            let Some(own) = txq.fib.as_ref().and_then(|fib| fib.own) else { return };
            if asking.emit(own, &txq.addresses, scratch) {
                txq.send(scratch, &ours(port, scratch.len(), *time));
            }
        });
        resolver.release(|port, mac, mut frame, meta| {
            let Some(txq) = tx_queues.get_mut(usize::from(port)) else { return };
            match mac {
                Some(mac) => {
                    frame[..mac.len()].copy_from_slice(&mac);
                    txq.send(&frame, &meta);
                }
                None => txq.lost.unresolved += 1,
            }
        });
    }

    /// When to do that at the latest.
    pub fn neighbors_due(&self) -> Option<u64> {
        self.resolver.as_ref().map(Resolver::due).filter(|due| *due != u64::MAX)
    }

    /// The link of a port is another one, perhaps with others on it.
    pub fn forget_neighbors(&mut self, port: usize) {
        let now = self.wall();
        if let Some(resolver) = &mut self.resolver {
            resolver.forget(port as u16, now);
        }
    }

    /// What waits for a neighbor is dropped: the engine ends.
    pub fn abandon(&mut self) {
        let Self { tx_queues, resolver: Some(resolver), .. } = self else { return };
        resolver.abandon(|port, count| tx_queues[usize::from(port)].lost.unresolved += count);
    }

    /// Whom the router has looked for on the link of a port.
    pub fn neighbors(&self, port: usize) -> Vec<NeighborSnapshot> {
        self.resolver.as_ref().map_or_else(Vec::new, |resolver| resolver.snapshot(port as u16))
    }

    /// The query server.
    pub fn queries_mut(&mut self) -> &mut Q {
        &mut self.queries
    }

    /// Nanoseconds of the clock that the engine lives by.
    pub fn wall(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// Tells the sender of `frame` that no more than `mtu` bytes of it would go on: without that, who sends by the MTU of a path (RFC 1191,
    /// RFC 8201) never learns it.
    fn tell_too_long(&mut self, frame: &[u8], meta: &Meta, mtu: usize) {
        let Self { tx_queues, scratch, time, .. } = self;
        let Ok(packet) = wire::parse(meta.link, frame, meta.wire_len) else { return };
        let Some(txq) = tx_queues.get_mut(meta.interface as usize).filter(|txq| txq.sends) else { return };
        let told = Reject::too_big(&packet, u32::try_from(mtu).unwrap_or(u32::MAX));
        // The limit first: who is beyond it costs no answer.
        if !txq.told.take(Time::from_nanos(*time)) || told.reply(&packet, &txq.addresses, scratch).is_err() {
            return;
        }
        let (wire_len, port) = (scratch.len() as u32, towpath_port::Meta::default());
        txq.send(scratch, &Meta { wire_len, port, hop: None, ..*meta });
    }

    fn txq(&mut self, port: PortId) -> Option<&mut TxQueue> {
        self.tx_queues.get_mut(usize::from(port.0))
    }
}

impl<C: Channel, Q: QueryServer> PacketIo for PortIo<C, Q> {
    type Channel = C;
    type Error = Infallible;

    fn now(&mut self) -> u64 {
        self.time = self.wall();
        self.time
    }

    fn takes(&mut self, frame: &[u8], meta: &Meta) -> bool {
        let Some(txq) = self.tx_queues.get_mut(meta.interface as usize) else { return true };
        let Some(own) = txq.fib.as_ref().and_then(|fib| fib.own) else { return true };
        let takes = meta.link != LinkType::ETHERNET || router::is_own(frame, own) || router::is_group(frame);
        txq.lost.not_ours += u64::from(!takes);
        takes
    }

    fn send(&mut self, frame: &[u8], meta: &Meta) -> Result<(), Infallible> {
        let Self { tx_queues, scratch, fragment, resolver, time, .. } = self;
        // Of a router: what is for itself, and what is for others.
        if let Some(txq) = tx_queues.get_mut(meta.interface as usize)
            && let Some(own) = txq.fib.as_ref().and_then(|fib| fib.own)
        {
            if meta.out.is_none() {
                if router::answer(frame, own, &txq.addresses, scratch) {
                    let (wire_len, port) = (scratch.len() as u32, towpath_port::Meta::default());
                    txq.send(scratch, &Meta { wire_len, port, ..*meta });
                } else if let Some(resolver) = resolver {
                    let (at, ours) = (meta.interface as u16, (own, &txq.addresses[..]));
                    let asked = resolver.handle_answer(at, frame, ours, *time);
                    txq.lost.unsolicited += u64::from(asked == Some(false));
                }
                return Ok(());
            }
            // What came for several hosts at once is for them: RFC 1812 section 5.3.4.
            if meta.link == LinkType::ETHERNET && !router::is_own(frame, own) {
                txq.lost.not_ours += 1;
                return Ok(());
            }
        }
        let Some(out) = meta.out else { return Ok(()) };
        let Some(txq) = tx_queues.get_mut(usize::from(out.0)) else { return Ok(()) };
        if meta.port.queued.is_some() {
            txq.answer(frame, meta);
            return Ok(());
        }
        let Some(fib) = &txq.fib else {
            txq.send(frame, meta);
            return Ok(());
        };
        let (mut as_it_leaves, mtu, at) = (*meta, txq.mtu, (out.0, *time));
        match fib.forward(frame, &mut as_it_leaves, mtu, scratch) {
            Ok(forwarded) => match forwarded.fragment {
                None => txq.send_to(forwarded.ask, scratch, &as_it_leaves, resolver.as_mut(), at),
                Some(network) => {
                    as_it_leaves.port.offload = checksum::complete(scratch, as_it_leaves.port.offload);
                    let divided = router::fragment(scratch, network, mtu, fragment, |piece| {
                        let meta = Meta { wire_len: piece.len() as u32, ..as_it_leaves };
                        txq.send_to(forwarded.ask, piece, &meta, resolver.as_mut(), at);
                    });
                    txq.lost.too_long += u64::from(!divided);
                }
            },
            Err(ForwardError::Expired) => txq.lost.expired += 1,
            Err(ForwardError::NoHop) => txq.lost.no_hop += 1,
            Err(ForwardError::TooLong) => {
                txq.lost.too_long += 1;
                self.tell_too_long(frame, meta, mtu);
            }
        }
        Ok(())
    }

    fn pass(&mut self, index: usize, frame: &[u8], meta: &Meta) -> Result<(), Infallible> {
        let Some(txq) = meta.out.and_then(|port| self.txq(port)) else { return self.send(frame, meta) };
        if txq.fib.is_some() || meta.port.queued.is_some() {
            return self.send(frame, meta);
        }
        txq.items.push(TxItem::Came(index));
        Ok(())
    }

    fn discard(&mut self, meta: &Meta) {
        if meta.port.queued.is_some()
            && let Some(txq) = self.tx_queues.get_mut(meta.interface as usize)
        {
            txq.verdicts.push((Verdict::Drop, meta.port, None));
        }
    }

    fn yield_cpu(&mut self) {
        // sched_yield(2).
        std::thread::yield_now();
    }

    fn serve_queries(&mut self, engine: &mut dyn Introspect) -> u64 {
        self.queries.serve(engine)
    }

    fn reply(&mut self, port: PortId, frame: &[u8], meta: &Meta) -> bool {
        // By the interface that the packet came from: its VLAN has a port of its own, but not a txq.
        let _ = port;
        let Some(txq) = self.tx_queues.get_mut(meta.interface as usize) else { return false };
        if !txq.sends {
            return false;
        }
        txq.send(frame, meta);
        true
    }
}

/// What a frame of ours is, on its way out by `port`.
fn ours(port: u16, len: usize, now: u64) -> Meta {
    Meta {
        wire_len: len as u32,
        time: now,
        link: LinkType::ETHERNET,
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
        let fib = || Some(Fib::new(&[], 0, Some(OWN)));
        let tx_queues = vec![TxQueue::new(true, fib()), TxQueue::new(true, fib()), TxQueue::new(true, None)];
        let mut io = PortIo::<Infallible, _>::new(Instant::now(), tx_queues, (), None);
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
                link: LinkType::ETHERNET,
                interface,
                out: Some(PortId(1)),
                hop: None,
                changed: false,
                port: towpath_port::Meta::default(),
            };
            let not_ours = |io: &PortIo<_, _>| io.tx_queues[interface as usize].lost.not_ours;
            let before = not_ours(&io);
            assert_eq!(io.takes(&frame, &meta), taken, "{to:?}");
            if taken {
                let Ok(()) = io.send(&frame, &meta);
            }
            assert_eq!(not_ours(&io) == before, routed, "{to:?}");
        }
    }
}
