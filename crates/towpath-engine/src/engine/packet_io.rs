//! What the engine needs from outside, and what a port says about a frame.

use std::net::IpAddr;

use towpath_gate::PortId;
use towpath_wire::LinkType;

use super::Introspect;
use crate::queue::Channel;

/// What the engine needs from outside.
pub trait PacketIo {
    /// The link to an inspector.
    type Channel: Channel;

    /// Why sending failed.
    type Error;

    /// Wall-clock time in nanoseconds since any fixed moment. Asked for once per burst, and while waiting.
    fn now(&mut self) -> u64;

    /// Whether a live engine takes this frame on. One that it does not take meets no rule and is no packet; who is asked counts
    /// it. The default: all.
    fn takes(&mut self, frame: &[u8], meta: &Meta) -> bool {
        let _ = (frame, meta);
        true
    }

    /// Sends one packet out.
    ///
    /// # Errors
    ///
    /// The engine gives the error to its caller; the packet counts as passed.
    fn send(&mut self, frame: &[u8], meta: &Meta) -> Result<(), Self::Error>;

    /// Sends the packet at `index` of the burst that is being handled, which leaves as it burst. The default:
    /// [`PacketIo::send`], which copies it.
    ///
    /// # Errors
    ///
    /// As [`PacketIo::send`].
    fn pass(&mut self, index: usize, frame: &[u8], meta: &Meta) -> Result<(), Self::Error> {
        let _ = index;
        self.send(frame, meta)
    }

    /// A packet ended here. The default: nobody needs to know.
    fn discard(&mut self, meta: &Meta) {
        let _ = meta;
    }

    /// Inspectors have packets and run on this thread's CPU: they go first. The default: nothing, they run when this thread
    /// waits.
    fn yield_cpu(&mut self) {}

    /// Answers those who look at the engine from outside; called once per burst, and while the engine waits. Returns for
    /// how many nanoseconds at most the engine may sleep before it calls this again. The default: nobody looks.
    fn serve_queries(&mut self, engine: &mut dyn Introspect) -> u64 {
        let _ = engine;
        u64::MAX
    }

    /// Sends the answer to a rejected packet out by `port`, where that packet burst in. False when the port cannot send,
    /// or not now: the answer is then lost, and counted.
    fn reply(&mut self, port: PortId, frame: &[u8], meta: &Meta) -> bool {
        let _ = (port, frame, meta);
        false
    }
}

/// What a port says about a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Meta {
    /// Bytes on the wire.
    pub wire_len: u32,
    /// Capture time, nanoseconds since the epoch.
    pub time: u64,
    /// How the frame begins.
    pub link: LinkType,
    /// The interface that it burst from: of the capture, or the number of the live port.
    pub interface: u32,
    /// The port that it leaves by; none before it has passed, and for one that goes nowhere.
    pub out: Option<PortId>,
    /// The next hop that a rule (`fwd`) has named, in place of that of its route.
    pub hop: Option<IpAddr>,
    /// Its bytes are not those that burst.
    pub changed: bool,
    /// What a live port knows about it besides.
    pub port: towpath_port::Meta,
}
