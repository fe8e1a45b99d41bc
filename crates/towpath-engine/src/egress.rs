//! Egress of live ports: the transmit queues, the router's link headers and fragmentation, and local delivery.
//!
//! An unchanged packet is queued by its index in the burst. A packet that was changed, kept or created is copied. After a burst, the
//! worker calls [`PortIo::transmit`] for each port, which sends the queued packets in order.
//!
//! A packet that cannot leave is counted by its [`DropReason`], for its port and for the engine
//! ([`PacketIo::take_drops`]).

#[cfg(test)]
mod tests;
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

    /// Sets the counters from which [`count_port_drops`](Self::count_port_drops) counts: another engine has counted those before.
    pub fn begin_port_drops(&mut self, at: usize, counts: [u64; TxDrop::ALL.len()]) {
        self.tx_queues[at].port_drops = counts;
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
        let waiting = self.resolver.as_mut().map(Resolver::abandon);
        for (port, frame, meta) in waiting.into_iter().flatten() {
            self.drop(port.into(), DropReason::Unresolved, &frame, &meta);
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
        let packets = u64::from(meta.packets);
        if let Some(tx) = self.tx_queues.get_mut(port) {
            tx.drops.drops[reason] += packets;
        }
        self.drops[reason] += packets;
        self.dropped |= packets > 0;
        self.lost.keep(reason, frame, meta);
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
