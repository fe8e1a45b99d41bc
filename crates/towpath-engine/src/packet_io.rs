//! The engine's interface to ports, the clock and queries.

use std::net::IpAddr;

use towpath_gate::PortId;
use towpath_wire::LinkType;

use crate::drop_reason::{DropReason, Drops};
use crate::introspect::Introspect;
use crate::meta::{Adjacency, Meta};
use crate::queue::Channel;

/// The IO of an engine: a clock, transmission, the router's neighbors, and queries.
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

    /// The link type of the frames that an interface sends. `None` if it does not send. Default: none.
    fn link(&self, interface: u32) -> Option<LinkType> {
        let _ = interface;
        None
    }

    /// The neighbor with this address on the link of a port, if it is resolved. The route lookup of each packet calls it. Default: none.
    fn neighbor(&self, port: PortId, address: IpAddr) -> Option<Adjacency> {
        let _ = (port, address);
        None
    }

    /// Delivers a packet to the router itself: ARP, neighbor discovery, and other link-local protocols. Default: ignored.
    fn deliver_local(&mut self, frame: &[u8], meta: &Meta) {
        let _ = (frame, meta);
    }

    /// Reports that a packet was dropped or rejected. Default: ignored.
    fn discard(&mut self, meta: &Meta) {
        let _ = meta;
    }

    /// The maximum length of a frame that begins with `bytes`, replaces a frame with the metadata `meta`, and leaves by `egress`.
    /// `None`: the egress is not known yet. Default: any length.
    fn max_frame(&self, egress: Option<PortId>, bytes: &[u8], meta: &Meta) -> usize {
        let _ = (egress, bytes, meta);
        usize::MAX
    }

    /// Sends the answer to a rejected packet by `port`, which received the packet. Returns false if the port cannot send.
    fn reply(&mut self, port: PortId, frame: &[u8], meta: &Meta) -> bool {
        let _ = (port, frame, meta);
        false
    }

    /// Returns the packets that failed to leave since the last call, by reason. `None` if every packet left.
    fn take_drops(&mut self) -> Option<Drops> {
        None
    }

    /// Passes frames that failed to leave since the last call to `each`: all of them, up to a bound, after
    /// [`trace_lost_frames`](Self::trace_lost_frames), otherwise the first bytes of one frame of each reason. Returns the number of
    /// frames for which there was no room. Default: none.
    fn take_lost_frames(&mut self, each: &mut dyn FnMut(DropReason, &[u8], &Meta)) -> u64 {
        let _ = each;
        0
    }

    /// States whether [`take_lost_frames`](Self::take_lost_frames) is to return all frames. Default: ignored.
    fn trace_lost_frames(&mut self, all: bool) {
        let _ = all;
    }

    /// The number of packets that wait in the router for a neighbor.
    fn held(&self) -> u64 {
        0
    }

    /// Yields the CPU to inspectors that share it and have packets. Default: nothing.
    fn yield_cpu(&mut self) {}

    /// Answers queries about the engine. Called once per burst and while the engine waits. Returns for how many nanoseconds
    /// at most the engine may sleep before the next call. Default: no queries.
    fn serve_queries(&mut self, engine: &mut dyn Introspect) -> u64 {
        let _ = engine;
        u64::MAX
    }
}
