//! The transmit queue of a port.

use std::net::IpAddr;

use towpath_gate::ReplyLimiter;
use towpath_metrics::metrics;
use towpath_port::{Burst, Error, Frame, Port, QueueVerdict, TxDrop};
use towpath_wire::LinkType;

use crate::drop_reason::{DropReason, Drops};
use crate::meta::Meta;
use crate::reorder::Limits;

/// The longest IP packet (RFC 791 section 3.1), and the longest link header in front of it: Ethernet with two VLAN tags.
pub(super) const MAX_PACKET: usize = 65_535;
pub(super) const MAX_HEADER: usize = 22;

/// How often a port that has no room is offered the rest of a burst again.
const TX_RETRIES: usize = 16;

/// The transmit queue of a port.
pub struct TxQueue {
    pub(super) items: Vec<TxItem>,
    copies: Burst,
    /// Verdicts for packets that the kernel holds.
    pub(super) verdicts: Vec<TxVerdict>,
    pub(super) config: TxConfig,
    pub(super) echo: EchoLimiter,
    /// Limits ICMP "too big" errors to the hosts behind this port.
    pub(super) too_big: ReplyLimiter,
    pub(super) drops: TxDrops,
    /// The port's own counters at the last [`PortIo::count_port_drops`].
    pub(super) port_drops: [u64; TxDrop::ALL.len()],
}

/// The properties of a port for its transmit queue.
#[derive(Clone, Debug)]
pub struct TxConfig {
    /// The port can send.
    pub sends: bool,
    /// The link type of its frames.
    pub link: LinkType,
    /// Set for a port of a router.
    pub router: Option<RouterPort>,
    /// Bytes of the longest IP packet that the port sends.
    pub mtu: usize,
    /// The router's addresses on the port's link.
    pub addresses: Vec<IpAddr>,
    /// Replies to echo requests per second; 0: none.
    pub echo: u32,
    /// The bounds of the engine's reorder buffer, which may send all its packets by one port.
    pub reorder: Limits,
}

/// A port of a router.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RouterPort {
    /// The port's Ethernet address. `None` if the port carries IP packets.
    pub mac: Option<[u8; 6]>,
}

/// A packet in a transmit queue, and the number of received packets that it stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TxItem {
    source: TxSource,
    packets: u16,
    /// The port that the packet came in by.
    interface: u16,
}

/// What [`TxQueue::send_all`] and [`TxQueue::decide_all`] report.
pub(super) enum Loss<'a> {
    /// A frame that the port did not take.
    Packet(DropReason, &'a [u8], Meta),
    /// An error of the port. The port counts the frames that it took and did not send.
    Error(&'a Error),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TxSource {
    /// Index in the burst.
    Burst(usize),
    /// Index in the copies.
    Copy(usize),
}

pub(super) struct TxVerdict {
    verdict: QueueVerdict,
    meta: towpath_port::Meta,
    /// The replacement's index in the copies.
    copy: Option<usize>,
    packets: u16,
    /// The port that the packet came in by.
    interface: u16,
}

/// Limits the replies to echo requests (GCRA, ITU-T I.371).
#[derive(Clone, Copy, Debug)]
pub(super) struct EchoLimiter {
    /// Nanoseconds per reply. 0: no replies.
    period: u64,
    /// Time at which the bucket is empty.
    empty: u64,
}

/// Replies at once. Linux has the same burst (net.ipv4.icmp_msgs_burst).
const ECHO_BURST: u64 = 50;

impl EchoLimiter {
    pub(super) fn new(per_second: u32) -> Self {
        Self { period: 1_000_000_000u64.checked_div(per_second.into()).unwrap_or(0), empty: 0 }
    }

    /// Returns true if another reply may be sent now, and counts it.
    pub(super) fn take(&mut self, now: u64) -> bool {
        let has_room = self.period > 0 && self.empty.saturating_sub(now) <= (ECHO_BURST - 1) * self.period;
        if has_room {
            self.empty = self.empty.max(now) + self.period;
        }
        has_room
    }
}

/// Packets that a port did not send, and other events of its egress.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TxDrops {
    /// Packets that passed the rules and did not leave, by reason.
    pub drops: Drops,
    /// Events that are not drops of packets.
    pub events: TxStats,
}

metrics! {
    /// Events of a port's egress that are not drops of packets.
    pub struct TxStats in "egress" {
        /// Frames received for the Ethernet address of another host. They are not packets of the engine.
        pub other_host: counter packets,
        /// Replies of neighbors to requests that the router did not send.
        pub unsolicited: counter packets,
        /// Replies to echo requests for the router's addresses.
        pub echo_replies: counter packets,
        /// Echo requests for the router's addresses without a reply, because of the port's rate limit.
        pub echo_limited: counter packets,
        /// Echo requests for the router's addresses that are malformed or cannot be answered.
        pub echo_invalid: counter packets,
        /// Packets that left without the edits of rules, because the kernel handed over only their first bytes.
        pub unchanged: counter packets,
    }
}

impl TxDrops {
    /// The names and values of the counters that are not 0.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> + use<> {
        use towpath_metrics::Metrics;
        let events: Vec<_> = self.events.values().map(|(metric, value)| (metric.name, value)).collect();
        let drops = self.drops.iter().map(|(reason, count)| (reason.name(), count));
        drops.chain(events).filter(|(_, count)| *count > 0)
    }
}

impl TxQueue {
    /// An empty queue.
    pub fn new(config: TxConfig) -> Self {
        Self {
            items: Vec::new(),
            copies: copies(config.reorder),
            verdicts: Vec::new(),
            echo: EchoLimiter::new(config.echo),
            config,
            too_big: ReplyLimiter::default(),
            drops: TxDrops::default(),
            port_drops: [0; TxDrop::ALL.len()],
        }
    }

    /// Sets the length of the longest IP packet that the port sends.
    pub fn set_mtu(&mut self, mtu: usize) {
        self.config.mtu = mtu;
    }

    /// Sets the port's Ethernet address: that of an interface that was made again.
    pub fn set_mac(&mut self, mac: Option<[u8; 6]>) {
        if let Some(router) = &mut self.config.router {
            router.mac = mac;
        }
    }

    /// Sets the bounds of the engine's reorder buffer. Call it when no packet is queued.
    pub fn set_reorder_limits(&mut self, limits: Limits) {
        debug_assert!(self.items.is_empty() && self.verdicts.is_empty(), "indices of the copies are queued");
        if self.config.reorder != limits {
            self.config.reorder = limits;
            self.copies = copies(limits);
        }
    }

    /// The packets that did not leave.
    pub fn drops(&self) -> &TxDrops {
        &self.drops
    }

    /// See [`PacketIo::max_frame`].
    pub(super) fn max_frame(&self, bytes: &[u8], meta: &Meta) -> usize {
        // A router fragments longer packets or answers them. A bridge fragments packets that were received in fragments. A port
        // segments packets that were received unsegmented.
        if self.config.router.is_some() || meta.fragment_len > 0 || meta.port.offload.gso.is_some() {
            return MAX_PACKET + MAX_HEADER;
        }
        // The MTU does not include the link header and a VLAN tag.
        let header = match bytes.get(12..14) {
            _ if meta.link != LinkType::ETHERNET => 0,
            Some([0x81, 0x00] | [0x88, 0xa8]) => 18,
            _ => 14,
        };
        self.config.mtu.saturating_add(header)
    }

    pub(super) fn mac(&self) -> Option<[u8; 6]> {
        self.config.router.and_then(|router| router.mac)
    }

    /// The frames that are queued as copies.
    #[cfg(test)]
    pub(crate) fn copied(&self) -> impl Iterator<Item = Frame<'_>> {
        (0..self.copies.len()).map(|at| self.copies.frame(at))
    }

    pub(super) fn copy(&mut self, bytes: &[u8], meta: &Meta) -> Option<usize> {
        let frame = Frame {
            bytes,
            wire_len: meta.wire_len,
            time_ns: meta.time,
            link: meta.link,
            interface: 0,
            meta: meta.port,
        };
        self.copies.push(frame).ok().map(|()| self.copies.len() - 1)
    }

    /// Queues the packet at `index` of the burst.
    pub(super) fn push_borrowed(&mut self, index: usize, meta: &Meta) {
        self.push_item(TxSource::Burst(index), meta);
    }

    pub(super) fn push(&mut self, bytes: &[u8], meta: &Meta) -> Result<(), DropReason> {
        let at = self.copy(bytes, meta).ok_or(DropReason::TxNoBuffer)?;
        self.push_item(TxSource::Copy(at), meta);
        Ok(())
    }

    fn push_item(&mut self, source: TxSource, meta: &Meta) {
        self.items.push(TxItem { source, packets: meta.packets, interface: meta.interface as u16 });
    }

    /// Queues a verdict for the packet that the kernel holds. It needs the bytes only if they changed.
    pub(super) fn push_verdict(&mut self, bytes: &[u8], meta: &Meta) -> Result<(), DropReason> {
        // If the kernel truncated the packet, only its first bytes are here. As a replacement, they would drop the rest.
        let cut = meta.port.queued.is_some_and(|queued| queued.cut) && bytes.len() < meta.wire_len as usize;
        self.drops.events.unchanged += u64::from(meta.changed && cut);
        let (verdict, copy) = match meta.changed && !cut {
            false => (QueueVerdict::Accept, None),
            true => match self.copy(bytes, meta) {
                Some(at) => (QueueVerdict::Replace, Some(at)),
                None => (QueueVerdict::Drop, None),
            },
        };
        let packets = if verdict == QueueVerdict::Drop { 0 } else { meta.packets };
        let interface = meta.interface as u16;
        self.verdicts.push(TxVerdict { verdict, meta: meta.port, copy, packets, interface });
        if verdict == QueueVerdict::Drop { Err(DropReason::TxNoBuffer) } else { Ok(()) }
    }

    pub(super) fn push_discard(&mut self, meta: &Meta) {
        self.verdicts.push(TxVerdict {
            verdict: QueueVerdict::Drop,
            meta: meta.port,
            copy: None,
            packets: 0,
            interface: meta.interface as u16,
        });
    }

    pub(super) fn clear(&mut self) {
        self.items.clear();
        self.verdicts.clear();
        self.copies.clear();
    }

    /// Sends the queued packets. Calls `lost` with the packets that the port did not take.
    pub(super) fn send_all(&mut self, port: &mut dyn Port, burst: &Burst, lost: &mut dyn FnMut(Loss<'_>)) {
        let Self { items, copies, .. } = self;
        let frame = |item: &TxItem| match item.source {
            TxSource::Burst(at) => burst.frame(at),
            TxSource::Copy(at) => copies.frame(at),
        };
        let (mut done, mut retries) = (0, 0);
        while done < items.len() {
            let mut pulled = 0;
            let mut frames = items[done..].iter().map(|item| {
                pulled += 1;
                frame(item)
            });
            match port.send(&mut frames) {
                Ok(sent) => {
                    done += sent;
                    retries += 1;
                    if done < items.len() && retries > TX_RETRIES {
                        for item in &items[done..] {
                            lost(item.loss(DropReason::TxFull, &frame(item)));
                        }
                        break;
                    }
                }
                Err(error) => {
                    let end = (done + pulled.max(1)).min(items.len());
                    // After an I/O error, none of the frames that the port took was sent, and the port counts them. After another error,
                    // the port refused only the last frame that it took.
                    if !matches!(error, Error::Io { .. }) {
                        let item = &items[end - 1];
                        lost(item.loss(refusal(&error), &frame(item)));
                    }
                    lost(Loss::Error(&error));
                    done = end;
                }
            }
        }
    }

    pub(super) fn decide_all(&mut self, port: &mut dyn Port, lost: &mut dyn FnMut(Loss<'_>)) {
        for TxVerdict { verdict, meta, copy, packets, interface } in &self.verdicts {
            let plain = || Frame { meta: *meta, ..Frame::new(&[], LinkType::RAW) };
            let frame = copy.map_or_else(plain, |at| self.copies.frame(at));
            if let Err(error) = port.verdict(frame, *verdict) {
                if !matches!(error, Error::Io { .. }) {
                    let meta = Meta { packets: *packets, ..Meta::received(&frame, (*interface).into()) };
                    lost(Loss::Packet(refusal(&error), frame.bytes, meta));
                }
                lost(Loss::Error(&error));
            }
        }
    }
}

impl TxItem {
    fn loss<'a>(&self, reason: DropReason, frame: &Frame<'a>) -> Loss<'a> {
        let meta = Meta { packets: self.packets, ..Meta::received(frame, self.interface.into()) };
        Loss::Packet(reason, frame.bytes, meta)
    }
}

/// Why a port did not take a frame.
fn refusal(error: &Error) -> DropReason {
    match error {
        Error::TooLong { .. } => DropReason::TooLong,
        _ => DropReason::TxRefused,
    }
}

/// Room for the packets of a reorder buffer, and for as many of a burst.
fn copies(limits: Limits) -> Burst {
    Burst::with_bytes(limits.packets.saturating_mul(2), limits.bytes.saturating_mul(2))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn echo_replies_are_limited_to_a_rate_and_a_burst() {
        let second = 1_000_000_000;
        let mut limiter = EchoLimiter::new(1000);
        let taken = |limiter: &mut EchoLimiter, now| (0..500).filter(|_| limiter.take(now)).count();
        assert_eq!(taken(&mut limiter, second), 50);
        assert_eq!(taken(&mut limiter, second + 10_000_000), 10);
        assert_eq!(taken(&mut limiter, 9 * second), 50);
        assert_eq!(taken(&mut EchoLimiter::new(0), second), 0);
    }
}
