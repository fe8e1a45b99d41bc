//! Egress of live ports: the transmit queues, the router's link headers and fragmentation, and local delivery.
//!
//! An unchanged packet is queued by its index in the burst. A packet that was changed, kept or created is copied. After a burst, the
//! worker calls [`PortIo::transmit`] for each port, which sends the queued packets in order.
//!
//! A packet that cannot leave is counted by its [`DropReason`], for its port and for the engine
//! ([`PacketIo::take_drops`]).

mod tx_queue;

use std::convert::Infallible;
use std::marker::PhantomData;
use std::net::IpAddr;
use std::time::Instant;

use towpath_gate::{PortId, Reject};
use towpath_port::{Burst, Error, Port, TxDrop};
use towpath_wire::{self as wire, Checksum, LinkType, Packet, Time, checksum};

use self::tx_queue::{Loss, MAX_HEADER, MAX_PACKET};
pub use self::tx_queue::{RouterPort, TxConfig, TxDrops, TxQueue, TxStats};
use crate::drop_log::LostFrames;
use crate::drop_reason::{DropReason, Drops};
use crate::introspect::Introspect;
use crate::meta::{Adjacency, Egress, Meta, NextHop};
use crate::packet_io::PacketIo;
use crate::queue::Channel;
use crate::router::{self, NeighborSnapshot, Resolution, Resolver};

/// Bytes of an IPv4 header without options (RFC 791 section 3.1).
const IP4: usize = 20;

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

/// The surroundings of an engine with live ports.
pub struct PortIo<C> {
    start: Instant,
    /// By port.
    tx_queues: Vec<TxQueue>,
    queries: Box<dyn QueryServer + Send>,
    /// A frame of the router itself, or a packet with its new link header.
    scratch: Vec<u8>,
    /// The fragment that is being sent.
    fragment: Vec<u8>,
    /// Neighbor resolution, of a router.
    resolver: Option<Resolver>,
    /// The time of the last call of [`now`](PacketIo::now).
    time: u64,
    /// Packets that failed to leave since the last [`take_drops`](PacketIo::take_drops).
    drops: Drops,
    dropped: bool,
    lost: LostFrames,
    channel: PhantomData<C>,
}

impl<C: Channel> PortIo<C> {
    /// Creates the surroundings. `start` is the beginning of the clock; threads that share dynamic states need the same.
    /// A router needs a `resolver`.
    pub fn new(
        start: Instant,
        tx_queues: Vec<TxQueue>,
        queries: Box<dyn QueryServer + Send>,
        resolver: Option<Resolver>,
    ) -> Self {
        Self {
            start,
            tx_queues,
            queries,
            scratch: Vec::new(),
            fragment: Vec::new(),
            resolver,
            time: 0,
            drops: Drops::default(),
            dropped: false,
            lost: LostFrames::default(),
            channel: PhantomData,
        }
    }

    /// Sends what is queued for the port number `at`. Calls `complain` with each error of the port.
    pub fn transmit(
        &mut self,
        at: usize,
        port: &mut dyn Port,
        burst: &Burst,
        mut complain: impl FnMut(&Error),
    ) {
        let Self { tx_queues, drops, dropped, lost: frames, .. } = self;
        let tx = &mut tx_queues[at];
        if tx.items.is_empty() && tx.verdicts.is_empty() {
            return;
        }
        let mut counted = Drops::default();
        let mut lost = |loss: Loss<'_>| match loss {
            Loss::Packet(reason, frame, meta) => {
                drops[reason] += u64::from(meta.packets);
                counted[reason] += u64::from(meta.packets);
                *dropped |= meta.packets > 0;
                frames.keep(reason, frame, &Meta { egress: Egress::Port(PortId(at as u16)), ..meta });
            }
            Loss::Error(error) => complain(error),
        };
        tx.send_all(port, burst, &mut lost);
        tx.decide_all(port, &mut lost);
        tx.drops.drops.add(&counted);
        tx.clear();
        if let Err(error) = port.flush() {
            complain(&error);
        }
        // The port counts them: see `count_port_drops`.
        let link = port.caps().link.unwrap_or(LinkType::ETHERNET);
        port.take_refused(&mut |reason, frame| {
            let meta = Meta { egress: Egress::Port(PortId(at as u16)), ..Meta::new(link, frame.len()) };
            let meta = Meta { interface: at as u32, time: burst_time(burst), ..meta };
            frames.keep(reason.into(), frame, &meta);
            *dropped = true;
        });
    }

    /// Takes over the port's own counters of frames that it accepted and did not send since it was opened, in the order of
    /// [`TxDrop::ALL`].
    pub fn count_port_drops(&mut self, at: usize, counts: [u64; TxDrop::ALL.len()]) {
        let tx = &mut self.tx_queues[at];
        for (at, (count, reason)) in counts.into_iter().zip(TxDrop::ALL).enumerate() {
            let new = count.saturating_sub(tx.port_drops[at]);
            self.drops[DropReason::from(reason)] += new;
            self.dropped |= new > 0;
        }
        tx.port_drops = counts;
    }

    /// Sends requests for neighbors that are due, and queues the packets whose neighbors were resolved. Call it between two bursts.
    pub fn poll_neighbors(&mut self) {
        let Self { tx_queues, scratch, resolver: Some(resolver), time, drops, dropped, lost, .. } = self
        else {
            return;
        };
        resolver.poll_requests(*time, |port, request| {
            let Some(tx) = tx_queues.get_mut(usize::from(port)) else { return };
            let Some(mac) = tx.mac() else { return };
            if request.emit(mac, &tx.config.addresses, scratch) {
                let meta = Meta { time: *time, ..own_frame(port.into(), scratch.len()) };
                // Without room, the request is sent again a second later.
                let _ = tx.push(scratch, &meta);
            }
        });
        resolver.release(|port, mac, mut frame, meta| {
            let Some(tx) = tx_queues.get_mut(usize::from(port)) else { return };
            let result = match mac {
                Some(mac) => {
                    frame[..mac.len()].copy_from_slice(&mac);
                    tx.push(&frame, &meta)
                }
                None => Err(DropReason::Unresolved),
            };
            if let Err(reason) = result {
                tx.drops.drops[reason] += u64::from(meta.packets);
                drops[reason] += u64::from(meta.packets);
                *dropped = true;
                lost.keep(reason, &frame, &meta);
            }
        });
    }

    /// When [`poll_neighbors`](Self::poll_neighbors) must be called at the latest.
    pub fn neighbors_due(&self) -> Option<u64> {
        self.resolver.as_ref().map(Resolver::due).filter(|due| *due != u64::MAX)
    }

    /// Forgets the neighbors of a port: its link was down, and the hosts on it may be others.
    pub fn forget_neighbors(&mut self, port: usize) {
        let now = self.wall();
        if let Some(resolver) = &mut self.resolver {
            resolver.forget(port as u16, now);
        }
    }

    /// Drops the packets that wait for neighbors, when the engine ends.
    pub fn abandon_neighbors(&mut self) {
        let mut waiting = Vec::new();
        if let Some(resolver) = &mut self.resolver {
            resolver.abandon(|port, packets| waiting.push((usize::from(port), packets)));
        }
        for (port, packets) in waiting {
            self.count_drop(port, DropReason::Unresolved, packets);
        }
    }

    /// The neighbors of a port.
    pub fn neighbors(&self, port: usize) -> Vec<NeighborSnapshot> {
        self.resolver.as_ref().map_or_else(Vec::new, |resolver| resolver.snapshot(port as u16))
    }

    /// The transmit queues, by port.
    pub fn tx_queues(&self) -> &[TxQueue] {
        &self.tx_queues
    }

    /// The transmit queue of a port.
    pub fn tx_queue_mut(&mut self, port: usize) -> &mut TxQueue {
        &mut self.tx_queues[port]
    }

    /// Nanoseconds of the engine's wall clock.
    pub fn wall(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    fn drop(&mut self, port: usize, reason: DropReason, frame: &[u8], meta: &Meta) {
        self.count_drop(port, reason, meta.packets.into());
        self.lost.keep(reason, frame, meta);
    }

    fn count_drop(&mut self, port: usize, reason: DropReason, packets: u64) {
        if let Some(tx) = self.tx_queues.get_mut(port) {
            tx.drops.drops[reason] += packets;
        }
        self.drops[reason] += packets;
        self.dropped |= packets > 0;
    }

    /// Queues a packet. Returns why it is dropped, if it is.
    fn queue(&mut self, port: PortId, frame: &[u8], meta: &Meta) -> Result<(), DropReason> {
        let Some(tx) = self.tx_queues.get_mut(usize::from(port.0)) else { return Ok(()) };
        if meta.port.queued.is_some() {
            return tx.push_verdict(frame, meta);
        }
        match tx.config.router {
            Some(router) => self.route(router, port, frame, meta),
            None if meta.fragment_len > 0 => self.fragment_again(port, frame, meta),
            None => tx.push(frame, meta),
        }
    }

    /// Queues a reassembled datagram of a bridge in fragments as long as those that it came in, or as the MTU if that is shorter.
    fn fragment_again(&mut self, port: PortId, frame: &[u8], meta: &Meta) -> Result<(), DropReason> {
        let Self { tx_queues, fragment, .. } = self;
        let tx = &mut tx_queues[usize::from(port.0)];
        let (network, mtu) = (usize::from(meta.network), tx.config.mtu);
        // An inspector may have replaced the datagram by any packet.
        let is_ip4 = frame.len() >= network + IP4 && frame[network] >> 4 == 4;
        if is_ip4 {
            router::needs_fragmentation(frame, network, meta, mtu)?;
        }
        let piece_len = mtu.min(meta.fragment_len.into());
        let push = |piece: &mut [u8], meta: &Meta| tx.push(piece, meta);
        let fragmented =
            is_ip4.then(|| push_fragments(frame, (network, piece_len), fragment, meta, push)).flatten();
        match fragmented {
            Some(result) => result,
            None if frame.len().saturating_sub(network) > mtu => Err(DropReason::TooLong),
            None => tx.push(frame, meta),
        }
    }

    /// Queues a routed packet with its new link header, in fragments if necessary.
    fn route(
        &mut self,
        RouterPort { mac }: RouterPort,
        port: PortId,
        frame: &[u8],
        meta: &Meta,
    ) -> Result<(), DropReason> {
        let Self { tx_queues, scratch, fragment, resolver, time, .. } = self;
        let tx = &mut tx_queues[usize::from(port.0)];
        let (mtu, mut out_meta) = (tx.config.mtu, *meta);
        let piece_len = if meta.fragment_len > 0 { mtu.min(meta.fragment_len.into()) } else { mtu };
        let forwarded = router::forward(frame, &mut out_meta, mac, mtu, scratch)?;
        let mut resolver = resolver.as_mut();
        let mut push = |bytes: &mut [u8], meta: &Meta| {
            let Some(neighbor) = forwarded.neighbor else { return tx.push(bytes, meta) };
            let Some(resolver) = &mut resolver else { return Err(DropReason::NoNextHop) };
            match resolver.resolve(port.0, neighbor, *time, bytes, meta) {
                Resolution::To(mac) => {
                    bytes[..mac.len()].copy_from_slice(&mac);
                    tx.push(bytes, meta)
                }
                Resolution::Waits => Ok(()),
                Resolution::Full => Err(DropReason::Unresolved),
            }
        };
        let result = match forwarded.fragment_at {
            None => push(scratch, &out_meta),
            Some(network) => {
                out_meta.port.offload = checksum::complete(scratch, out_meta.port.offload);
                push_fragments(scratch, (network, piece_len), fragment, &out_meta, push)
                    .unwrap_or(Err(DropReason::TooLong))
            }
        };
        for (frame, meta) in resolver.map(Resolver::take_evicted).unwrap_or_default() {
            self.drop(port.0.into(), DropReason::Unresolved, &frame, &meta);
        }
        result
    }

    /// Answers an echo request to an address of the router. A reply longer than the MTU leaves in fragments, as the request came.
    fn reply_echo(&mut self, packet: &Packet<'_>, meta: &Meta) {
        let Self { tx_queues, scratch, fragment, time, .. } = self;
        let Some(tx) = tx_queues.get_mut(meta.interface as usize).filter(|tx| tx.config.sends) else {
            return;
        };
        // The limit is checked before the reply is built, so that replies over the limit cost nothing.
        if !tx.echo.take(*time) {
            tx.drops.events.echo_limited += 1;
            return;
        }
        let verified = meta.port.offload.checksum != Checksum::Unverified;
        if towpath_gate::echo_reply(packet, verified, scratch).is_err() {
            tx.drops.events.echo_invalid += 1;
            return;
        }
        let (network, mtu) = (packet.network, tx.config.mtu);
        let reply = Meta { network: network as u16, ..reply_meta(scratch.len(), meta) };
        let result = match scratch.len().saturating_sub(network) > mtu {
            false => tx.push(scratch, &reply),
            true => {
                // The reply must not have the Don't Fragment bit then, and needs an identification.
                if let Some([id_high, id_low, flags, _]) = scratch.get_mut(network + 4..network + 8) {
                    (*id_high, *id_low) = ((*time >> 16) as u8, (*time >> 8) as u8);
                    *flags = 0;
                }
                checksum::fill(reply.link, scratch, reply.wire_len);
                push_fragments(scratch, (network, mtu), fragment, &reply, |piece, meta| tx.push(piece, meta))
                    .unwrap_or(Err(DropReason::TooLong))
            }
        };
        match result {
            Ok(()) => tx.drops.events.echo_replies += 1,
            Err(_) => tx.drops.events.echo_invalid += 1,
        }
    }

    /// Tells the sender of a packet that it is longer than `mtu` (path MTU discovery, RFC 1191 and RFC 8201).
    fn send_too_big(&mut self, frame: &[u8], meta: &Meta, mtu: usize) {
        let Self { tx_queues, scratch, time, .. } = self;
        let Ok(packet) = wire::parse(meta.link, frame, meta.wire_len) else { return };
        let Some(tx) = tx_queues.get_mut(meta.interface as usize).filter(|tx| tx.config.sends) else {
            return;
        };
        let reject = Reject::too_big(&packet, u32::try_from(mtu).unwrap_or(u32::MAX));
        // The limit is checked before the answer is built, so that answers over the limit cost nothing.
        if tx.too_big.take(Time::from_nanos(*time))
            && reject.reply(&packet, &tx.config.addresses, scratch).is_ok()
        {
            let reply = reply_meta(scratch.len(), meta);
            let _ = tx.push(scratch, &reply);
        }
    }
}

impl<C: Channel> PacketIo for PortIo<C> {
    type Channel = C;
    type Error = Infallible;

    fn now(&mut self) -> u64 {
        self.time = self.wall();
        self.time
    }

    fn accepts(&mut self, frame: &[u8], meta: &Meta) -> bool {
        let Some(tx) = self.tx_queues.get_mut(meta.interface as usize) else { return true };
        let Some(mac) = tx.mac() else { return true };
        let accepts =
            meta.link != LinkType::ETHERNET || router::is_for(frame, mac) || router::is_multicast(frame);
        tx.drops.events.other_host += u64::from(!accepts);
        accepts
    }

    fn send(&mut self, frame: &[u8], meta: &Meta) -> Result<(), Infallible> {
        let Egress::Port(port) = meta.egress else { return Ok(()) };
        let came_in = self.tx_queues.get(meta.interface as usize).and_then(TxQueue::mac);
        if let Some(mac) = came_in
            && meta.link == LinkType::ETHERNET
            && !router::is_for(frame, mac)
        {
            self.drop(meta.interface as usize, DropReason::NotOurs, frame, meta);
            return Ok(());
        }
        if let Err(reason) = self.queue(port, frame, meta) {
            self.drop(port.0.into(), reason, frame, meta);
            if reason == DropReason::TooLong {
                let mtu = self.tx_queues[usize::from(port.0)].config.mtu;
                self.send_too_big(frame, meta, mtu);
            }
        }
        Ok(())
    }

    fn send_borrowed(&mut self, index: usize, frame: &[u8], meta: &Meta) -> Result<(), Infallible> {
        let Egress::Port(port) = meta.egress else { return Ok(()) };
        let tx = self.tx_queues.get_mut(usize::from(port.0));
        match tx.filter(|tx| tx.config.router.is_none() && meta.port.queued.is_none()) {
            Some(tx) => {
                tx.push_borrowed(index, meta);
                Ok(())
            }
            None => self.send(frame, meta),
        }
    }

    fn link(&self, interface: u32) -> Option<LinkType> {
        let config = &self.tx_queues.get(interface as usize)?.config;
        config.sends.then_some(config.link)
    }

    fn neighbor(&self, port: PortId, address: IpAddr) -> Option<Adjacency> {
        self.resolver.as_ref()?.find(port.0, address, self.time)
    }

    fn deliver_local(&mut self, frame: &[u8], meta: &Meta) {
        if let Ok(packet) = wire::parse(meta.link, frame, meta.wire_len)
            && towpath_gate::is_echo_request(&packet)
        {
            return self.reply_echo(&packet, meta);
        }
        let Self { tx_queues, scratch, resolver, time, .. } = self;
        let Some(tx) = tx_queues.get_mut(meta.interface as usize) else { return };
        let Some(mac) = tx.mac() else { return };
        if router::arp_nd_reply(frame, mac, &tx.config.addresses, scratch) {
            let reply = reply_meta(scratch.len(), meta);
            let _ = tx.push(scratch, &reply);
        } else if let Some(resolver) = resolver {
            let own = (mac, &tx.config.addresses[..]);
            let solicited = resolver.handle_reply(meta.interface as u16, frame, own, *time);
            tx.drops.events.unsolicited += u64::from(solicited == Some(false));
        }
    }

    fn discard(&mut self, meta: &Meta) {
        if meta.port.queued.is_some()
            && let Some(tx) = self.tx_queues.get_mut(meta.interface as usize)
        {
            tx.push_discard(meta);
        }
    }

    fn max_frame(&self, egress: Option<PortId>, bytes: &[u8], meta: &Meta) -> usize {
        let tx = egress.and_then(|port| self.tx_queues.get(usize::from(port.0)));
        tx.map_or(MAX_PACKET + MAX_HEADER, |tx| tx.max_frame(bytes, meta))
    }

    fn reply(&mut self, _port: PortId, frame: &[u8], meta: &Meta) -> bool {
        // Indexed by the interface: a VLAN has a separate port number, but no separate transmit queue.
        let tx = self.tx_queues.get_mut(meta.interface as usize);
        tx.filter(|tx| tx.config.sends).is_some_and(|tx| tx.push(frame, meta).is_ok())
    }

    fn take_drops(&mut self) -> Option<Drops> {
        std::mem::take(&mut self.dropped).then(|| std::mem::take(&mut self.drops))
    }

    fn take_lost_frames(&mut self, each: &mut dyn FnMut(DropReason, &[u8], &Meta)) -> u64 {
        self.lost.take(each)
    }

    fn trace_lost_frames(&mut self, all: bool) {
        self.lost.set_all(all);
    }

    fn held(&self) -> u64 {
        self.resolver.as_ref().map_or(0, Resolver::held)
    }

    fn yield_cpu(&mut self) {
        // sched_yield(2).
        std::thread::yield_now();
    }

    fn serve_queries(&mut self, engine: &mut dyn Introspect) -> u64 {
        self.queries.serve(engine)
    }
}

/// The time of the first frame of a burst.
fn burst_time(burst: &Burst) -> u64 {
    if burst.is_empty() { 0 } else { burst.frame(0).time_ns }
}

/// Calls `push` with each fragment of at most `piece_len` bytes of the IPv4 packet at `network` of `frame`, and its metadata. Returns
/// the first error, or `None` if the packet cannot be fragmented ([`router::fragment`]).
fn push_fragments(
    frame: &[u8],
    (network, piece_len): (usize, usize),
    fragment: &mut Vec<u8>,
    meta: &Meta,
    mut push: impl FnMut(&mut [u8], &Meta) -> Result<(), DropReason>,
) -> Option<Result<(), DropReason>> {
    let mut result = Ok(());
    let fragmented = router::fragment(frame, network, piece_len, fragment, |piece, last| {
        // The packet counts with its last fragment.
        let packets = if last { meta.packets } else { 0 };
        let meta = Meta { wire_len: piece.len() as u32, packets, ..*meta };
        result = result.and(push(piece, &meta));
    });
    fragmented.then_some(result)
}

/// The metadata of an Ethernet frame of the router itself, on its way out by `port`.
fn own_frame(port: u32, len: usize) -> Meta {
    Meta { interface: port, packets: 0, ..Meta::new(LinkType::ETHERNET, len) }
}

/// The metadata of the answer of `len` bytes to a frame with the metadata `meta`.
fn reply_meta(len: usize, meta: &Meta) -> Meta {
    Meta {
        wire_len: len as u32,
        packets: 0,
        next_hop: NextHop::None,
        port: towpath_port::Meta::default(),
        ..*meta
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reorder::Limits;

    const OWN: [u8; 6] = [2, 0, 0, 0, 0, 1];
    const OTHER: [u8; 6] = [2, 0, 0, 0, 0, 2];

    fn tx_queue(mac: Option<[u8; 6]>) -> TxQueue {
        let router = mac.map(|mac| RouterPort { mac: Some(mac) });
        let reorder = Limits::default();
        TxQueue::new(TxConfig {
            sends: true,
            router,
            mtu: usize::MAX,
            addresses: Vec::new(),
            echo: 1000,
            reorder,
            link: LinkType::ETHERNET,
        })
    }

    fn frame(to: [u8; 6]) -> Vec<u8> {
        let mut frame = to.to_vec();
        frame.extend([2, 0, 0, 0, 0, 9, 8, 0]);
        frame.extend([0x45, 0, 0, 28, 0, 7, 0, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 9, 0, 2]);
        frame.extend([4, 0, 0, 53, 0, 8, 0, 0]);
        frame
    }

    fn routed(frame: &[u8], interface: u32, next_hop: NextHop) -> Meta {
        Meta {
            interface,
            egress: Egress::Port(PortId(1)),
            next_hop,
            network: 14,
            ..Meta::new(LinkType::ETHERNET, frame.len())
        }
    }

    #[test]
    fn a_router_accepts_and_routes_frames_for_its_own_address() {
        let tx_queues = vec![tx_queue(Some(OWN)), tx_queue(Some(OWN)), tx_queue(None)];
        let mut io = PortIo::<Infallible>::new(Instant::now(), tx_queues, Box::new(()), None);
        #[rustfmt::skip]
        let rows = [
            // to          interface  accepted  routed
            (OWN,          0,         true,     true),
            (OTHER,        0,         false,    false),
            ([0xff; 6],    0,         true,     false),
            ([1, 0, 0x5e, 0, 0, 1], 0, true,    false),
            (OTHER,        2,         true,     true),
        ];
        for (to, interface, accepted, is_routed) in rows {
            let frame = frame(to);
            let meta = routed(&frame, interface, NextHop::Mac([2; 6]));
            let other = |io: &PortIo<_>| io.tx_queues[interface as usize].drops.events.other_host;
            let before = other(&io);
            assert_eq!(io.accepts(&frame, &meta), accepted, "{to:?}");
            assert_eq!(other(&io) == before, accepted, "{to:?}");
            if accepted {
                let Ok(()) = io.send(&frame, &meta);
                let not_ours = io.take_drops().map_or(0, |drops| drops[DropReason::NotOurs]);
                assert_eq!(not_ours, u64::from(!is_routed), "{to:?}");
            }
        }
    }

    /// The fragments of a UDP datagram of 3,000 bytes, and its number of bytes.
    fn reassembled(identification: u8, fragment_len: u16) -> (Vec<u8>, Meta) {
        let mut frame = frame(OWN);
        frame.truncate(34);
        frame[16..18].copy_from_slice(&3020_u16.to_be_bytes());
        frame[19] = identification;
        frame.extend((0..3000).map(|at| (at / 7) as u8));
        let meta = Meta { packets: 3, fragment_len, ..routed(&frame, 0, NextHop::Mac([2; 6])) };
        (frame, meta)
    }

    #[test]
    fn a_reassembled_datagram_leaves_in_fragments() {
        #[rustfmt::skip]
        let rows = [
            // bridge, fragment_len, MTU, Don't Fragment: IP packets that leave
            (true,  1500, 1500, false, &[1500, 1500, 60][..]),
            (true,  1500, 1500, true,  &[1500, 1500, 60]),
            (true,  1020, 1500, false, &[1020, 1020, 1020]),
            (true,  1500, 1020, false, &[1020, 1020, 1020]),
            (true,  1500, 1020, true,  &[]),
            (false, 1500, 1500, false, &[1500, 1500, 60]),
            (false, 1500, 1500, true,  &[1500, 1500, 60]),
            (false, 1020, 1500, false, &[1020, 1020, 1020]),
            (false, 1500, 1020, false, &[1020, 1020, 1020]),
            // The sender must learn the MTU.
            (false, 1500, 1020, true,  &[]),
            (false, 1500, 9000, false, &[3020]),
        ];
        for (bridge, fragment_len, mtu, dont_fragment, expected) in rows {
            let mac = (!bridge).then_some(OWN);
            let mut io = PortIo::<Infallible>::new(
                Instant::now(),
                vec![tx_queue(mac), tx_queue(mac)],
                Box::new(()),
                None,
            );
            io.tx_queue_mut(1).set_mtu(mtu);
            let (mut frame, meta) = reassembled(9, fragment_len);
            frame[20] = if dont_fragment { 0x40 } else { 0 };
            let Ok(()) = io.send(&frame, &meta);
            let left: Vec<_> = io.tx_queues[1].copied().map(|frame| frame.bytes.to_vec()).collect();
            assert_eq!(
                left.iter().map(|frame| frame.len() - 14).collect::<Vec<_>>(),
                expected,
                "{bridge} {mtu}"
            );
            if expected.is_empty() {
                assert_eq!(io.take_drops().map(|drops| drops[DropReason::TooLong]), Some(3));
                continue;
            }
            assert_eq!(io.take_drops(), None);
            // The fragments are the datagram.
            let data: Vec<u8> = left.iter().flat_map(|frame| frame[34..].to_vec()).collect();
            assert_eq!(data, frame[34..]);
            assert!(
                left.iter()
                    .all(|frame| frame[18..20] == [0, 9] && frame[20] & 0x40 == u8::from(dont_fragment) << 6)
            );
        }
        // A frame that has no IPv4 header there leaves unchanged, or not at all.
        for (first, len, expected) in
            [(0, 20, true), (0x4f, 34, true), (0x40, 34, true), (0x40, 1514, true), (0x40, 1515, false)]
        {
            let mut io = PortIo::<Infallible>::new(
                Instant::now(),
                vec![tx_queue(None), tx_queue(None)],
                Box::new(()),
                None,
            );
            io.tx_queue_mut(1).set_mtu(1500);
            let (_, meta) = reassembled(9, 1500);
            let Ok(()) = io.send(&vec![first; len], &meta);
            let left: Vec<_> = io.tx_queues[1].copied().map(|frame| frame.bytes.len()).collect();
            assert_eq!(left, if expected { vec![len] } else { vec![] }, "{first:#x} {len}");
            let dropped = io.take_drops().map_or(0, |drops| drops[DropReason::TooLong]);
            assert_eq!(dropped, if expected { 0 } else { 3 }, "{first:#x} {len}");
        }
    }

    /// A port that is full, down, or refuses long frames.
    struct Unwilling(Vec<Vec<u8>>);

    impl Port for Unwilling {
        fn name(&self) -> &'static str {
            "p"
        }

        fn caps(&self) -> towpath_port::Caps {
            towpath_port::Caps::default()
        }

        fn receive(&mut self, _: &mut Burst) -> Result<towpath_port::Received, Error> {
            Ok(towpath_port::Received::Nothing)
        }

        /// By the last byte: 0 is sent, 1 goes down with the interface, 2 is too long; before 3, the port is full.
        fn send<'a>(
            &mut self,
            frames: &mut dyn Iterator<Item = towpath_port::Frame<'a>>,
        ) -> Result<usize, Error> {
            let mut taken = 0;
            for frame in frames {
                match frame.bytes.last() {
                    Some(1) => self.0.push(frame.bytes.to_vec()),
                    Some(2) => {
                        return Err(Error::TooLong { name: "p".into(), len: frame.bytes.len(), max: 1 });
                    }
                    Some(3) => return Ok(taken),
                    _ => {}
                }
                taken += 1;
            }
            Ok(taken)
        }

        fn take_refused(&mut self, each: &mut dyn FnMut(TxDrop, &[u8])) {
            self.0.drain(..).for_each(|frame| each(TxDrop::Down, &frame));
        }

        fn stats(&mut self) -> towpath_port::Stats {
            towpath_port::Stats::default()
        }
    }

    /// Frames that a port does not send are counted once, and shown to traces and to the log.
    #[test]
    fn frames_that_a_port_does_not_send_are_counted_and_shown() {
        use DropReason::{PortDown, TooLong, TxFull};
        for all in [false, true] {
            let mut io = PortIo::<Infallible>::new(
                Instant::now(),
                vec![tx_queue(None), tx_queue(None)],
                Box::new(()),
                None,
            );
            io.trace_lost_frames(all);
            for kind in [0, 2, 1, 2, 0, 3, 0, 1] {
                let mut frame = frame(OWN);
                frame.push(kind);
                let meta = Meta { interface: 0, ..routed(&frame, 0, NextHop::None) };
                let Ok(()) = io.send(&frame, &meta);
            }
            // A frame of the router itself is not a packet.
            let Ok(()) = io.send(&[3], &Meta { packets: 0, ..routed(&[3], 0, NextHop::None) });
            let mut complaints = 0;
            io.transmit(1, &mut Unwilling(Vec::new()), &Burst::new(1), |_| complaints += 1);
            let drops = io.take_drops().unwrap();
            // The port counts the frame that it took while its interface was down.
            assert_eq!(drops.iter().collect::<Vec<_>>(), [(TooLong, 2), (TxFull, 3)]);
            assert_eq!(io.tx_queues()[1].drops().drops, drops);
            assert_eq!(complaints, 2);
            let mut shown = Vec::new();
            let left_out = io.take_lost_frames(&mut |reason, frame, meta| {
                assert_eq!(
                    (meta.interface, meta.egress),
                    (if reason == PortDown { 1 } else { 0 }, Egress::Port(PortId(1)))
                );
                shown.push((reason, frame.last().copied().unwrap()));
            });
            let expected: &[_] = match all {
                true => &[(TooLong, 2), (TooLong, 2), (TxFull, 3), (TxFull, 0), (TxFull, 1), (PortDown, 1)],
                false => &[(TooLong, 2), (TxFull, 3), (PortDown, 1)],
            };
            assert_eq!((&shown[..], left_out), (expected, 0));
            io.count_port_drops(1, [0, 1, 0, 0, 0, 0, 0, 0]);
            assert_eq!(io.take_drops().unwrap().iter().collect::<Vec<_>>(), [(PortDown, 1)]);
            assert_eq!(
                (io.take_drops(), io.take_lost_frames(&mut |_, _, _| panic!("shown twice"))),
                (None, 0)
            );
        }
    }

    /// Each packet that does not leave is dropped for one reason, and no packet is dropped twice.
    #[test]
    fn packets_that_do_not_leave_are_dropped_by_reason() {
        let rows = [
            (NextHop::Mac([2; 6]), usize::MAX, 64, None),
            (NextHop::None, usize::MAX, 64, Some(DropReason::NoNextHop)),
            (NextHop::Neighbor([10, 9, 0, 2].into()), usize::MAX, 64, Some(DropReason::NoNextHop)),
            (NextHop::Mac([2; 6]), 20, 64, Some(DropReason::TooLong)),
            (NextHop::Mac([2; 6]), usize::MAX, 1, Some(DropReason::TtlExceeded)),
        ];
        for (next_hop, mtu, ttl, expected) in rows {
            let mut io = PortIo::<Infallible>::new(
                Instant::now(),
                vec![tx_queue(Some(OWN)), tx_queue(Some(OWN))],
                Box::new(()),
                None,
            );
            io.tx_queue_mut(1).set_mtu(mtu);
            let mut frame = frame(OWN);
            frame[22] = ttl;
            let meta = Meta { packets: 3, ..routed(&frame, 0, next_hop) };
            let Ok(()) = io.send(&frame, &meta);
            let drops = io.take_drops();
            assert_eq!(drops.is_some(), expected.is_some(), "{expected:?}");
            let drops = drops.unwrap_or_default();
            assert_eq!(expected.map_or(0, |reason| drops[reason]), drops.total());
            assert_eq!(drops.total(), if expected.is_some() { 3 } else { 0 });
            assert_eq!(io.take_drops(), None);
        }
    }
}
