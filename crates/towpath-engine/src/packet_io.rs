//! The engine's interface to its surroundings, and the metadata of a frame.

use towpath_gate::PortId;
use towpath_port::Frame;
use towpath_wire::LinkType;

use crate::drop_reason::Drops;
use crate::introspect::Introspect;
use crate::queue::Channel;
use crate::router::NextHop;

/// The engine's surroundings: a clock, the way out, and queries.
///
/// A test double needs [`now`](Self::now) and [`send`](Self::send).
pub trait PacketIo {
    /// The channel type of the inspectors. [`Infallible`](std::convert::Infallible) for an engine without inspectors.
    type Channel: Channel;

    /// An error of [`send`](Self::send). The engine returns it to its caller.
    type Error;

    /// Wall-clock time in nanoseconds since any fixed moment. Called once per burst, and while the engine waits.
    fn now(&mut self) -> u64;

    /// Returns true if a live engine accepts this frame. A frame that is not accepted is not a packet: it meets no rule and the
    /// engine does not count it. Default: every frame is accepted.
    fn accepts(&mut self, frame: &[u8], meta: &Meta) -> bool {
        let _ = (frame, meta);
        true
    }

    /// Sends a packet. The implementation copies the frame.
    ///
    /// # Errors
    ///
    /// The error ends the call into the engine. A failure that concerns only this packet is not an error: the implementation
    /// counts it and reports it with [`take_drops`](Self::take_drops).
    fn send(&mut self, frame: &[u8], meta: &Meta) -> Result<(), Self::Error>;

    /// Sends the unchanged packet at `index` of the current burst. Default: [`send`](Self::send).
    ///
    /// # Errors
    ///
    /// See [`send`](Self::send).
    fn send_borrowed(&mut self, index: usize, frame: &[u8], meta: &Meta) -> Result<(), Self::Error> {
        let _ = index;
        self.send(frame, meta)
    }

    /// Delivers a packet to the router itself: ARP, neighbor discovery, and other link-local protocols. Default: ignored.
    fn deliver_local(&mut self, frame: &[u8], meta: &Meta) {
        let _ = (frame, meta);
    }

    /// A packet was dropped or rejected. Default: ignored.
    fn discard(&mut self, meta: &Meta) {
        let _ = meta;
    }

    /// The length of the longest frame that may leave by `egress` in the place of a frame with the metadata `meta`, and that begins
    /// like `bytes`. `None`: the egress is not known yet. Default: any length.
    fn max_frame(&self, egress: Option<PortId>, bytes: &[u8], meta: &Meta) -> usize {
        let _ = (egress, bytes, meta);
        usize::MAX
    }

    /// Sends the answer to a rejected packet out by `port`, the port that it came in by. Returns false if the port cannot
    /// send.
    fn reply(&mut self, port: PortId, frame: &[u8], meta: &Meta) -> bool {
        let _ = (port, frame, meta);
        false
    }

    /// Returns the packets that failed to leave since the last call, by reason. `None` if every packet left.
    fn take_drops(&mut self) -> Option<Drops> {
        None
    }

    /// The number of packets that wait in the router for a neighbor.
    fn held(&self) -> u64 {
        0
    }

    /// Yields the CPU: inspectors that share it have packets. Default: nothing.
    fn yield_cpu(&mut self) {}

    /// Answers queries about the engine. Called once per burst and while the engine waits. Returns for how many nanoseconds
    /// at most the engine may sleep before the next call. Default: no queries.
    fn serve_queries(&mut self, engine: &mut dyn Introspect) -> u64 {
        let _ = engine;
        u64::MAX
    }
}

/// Where a packet leaves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Egress {
    /// By no particular port: a packet of a replay without a route, or of a monitored port.
    #[default]
    Unrouted,
    /// By this port.
    Port(PortId),
    /// To the router itself.
    Local,
}

impl Egress {
    /// The port, if the packet leaves by one.
    pub fn port(self) -> Option<PortId> {
        match self {
            Self::Port(port) => Some(port),
            Self::Unrouted | Self::Local => None,
        }
    }
}

/// The metadata of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Meta {
    /// Bytes on the wire.
    pub wire_len: u32,
    /// Capture time in nanoseconds since the epoch.
    pub time: u64,
    /// The link type: the header at the beginning of the frame.
    pub link: LinkType,
    /// The interface that the frame came from: of the capture, or the number of the live port.
    pub interface: u32,
    /// Where the packet leaves. Set when it has passed.
    pub egress: Egress,
    /// The next hop of a routed packet. Set when it has passed.
    pub next_hop: NextHop,
    /// Offset of the IP header of a routed packet. Set when it has passed.
    pub network: u16,
    /// The number of received packets that the frame stands for: more than 1 for a reassembled datagram, 0 for a frame
    /// of the router itself.
    pub packets: u16,
    /// The bytes differ from those that were received.
    pub changed: bool,
    /// The port driver's metadata.
    pub port: towpath_port::Meta,
}

impl Meta {
    /// The metadata of a frame that arrived on `interface`.
    pub fn received(frame: &Frame<'_>, interface: u32) -> Self {
        Self {
            wire_len: frame.wire_len,
            time: frame.time_ns,
            interface,
            port: frame.meta,
            ..Self::new(frame.link, 0)
        }
    }

    /// The metadata of one packet of `len` bytes that is complete and has no offloads.
    pub fn new(link: LinkType, len: usize) -> Self {
        Self {
            wire_len: len as u32,
            time: 0,
            link,
            interface: 0,
            egress: Egress::Unrouted,
            next_hop: NextHop::None,
            network: 0,
            packets: 1,
            changed: false,
            port: towpath_port::Meta::default(),
        }
    }
}
