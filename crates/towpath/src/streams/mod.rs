//! TCP reassembly of a capture: takes segments in any order and returns the bytes that each end sent.
//!
//! What: a stream is one use of a pair of addresses and ports. A SYN with another initial sequence number
//! than its sender's starts the next use. Streams are numbered from 0 in the order of their first packets,
//! including tunnels, as Wireshark's `tcp.stream`.
//!
//! Rules for each direction ([`Way`], direction.rs):
//! - The first data seen for a sequence number wins. Repeated bytes, and those of them that differ from
//!   retained data, are counted.
//! - Bytes that never arrived or that the capture cut off are a [`Chunk::Gap`], reported when nothing can
//!   fill it: when too much data waits after it, or at the end of the stream.
//! - A stream whose start was not captured starts with the first byte seen.
//!
//! [`Limits`] bound the memory. [`Counters`] count what the bounds cost.
//!
//! Not examined: checksums, windows, timestamps. Segments in IP fragments are passed after reassembly
//! ([`towpath_gate::reassembly`]); of fragments passed here, the first one's bytes are used and the others
//! are a gap.
//!
//! References: RFC 9293, 3.4 (modular sequence numbers); Wireshark's packet-tcp.c for the numbering.

mod direction;
pub mod guess;
pub mod messages;

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};

use towpath_wire::{Addresses, Fragment, Packet, proto, tunnel};

use direction::{Direction, Segment};

/// Maximum nesting of tunnels.
const MAX_LAYERS: usize = 8;

/// TCP flags (RFC 9293, 3.1).
const FIN: u8 = 0x01;
const SYN: u8 = 0x02;
const RST: u8 = 0x04;
const ACK: u8 = 0x10;

/// Bounds of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Maximum number of streams. Beyond it the eighth that was silent for longest is ended. Default: 65,536.
    pub streams: usize,
    /// Bytes of one direction that wait for earlier ones. Beyond it the hole before them is reported as a
    /// gap. Default: 8 MiB, more than Linux's default maximum receive window (tcp_rmem, 6 MiB), so that a
    /// retransmission arrives in time.
    pub waiting: usize,
    /// Bytes of all directions that wait. Default: 64 MiB.
    pub waiting_total: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { streams: 1 << 16, waiting: 8 << 20, waiting_total: 64 << 20 }
    }
}

/// One direction of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Way {
    /// Number of the stream, from 0 in the order of first packets.
    pub stream: u64,
    /// 0 for the sender of the stream's first packet, 1 for the other end.
    pub direction: u8,
    /// The sender.
    pub src: SocketAddr,
    /// The receiver.
    pub dst: SocketAddr,
    /// The start was not captured: the first byte is the first one seen.
    pub midstream: bool,
}

impl Way {
    /// Returns true if the client sends these bytes. The client sent the first packet; if the start was not
    /// captured, it has the higher port.
    pub fn is_client(&self) -> bool {
        if self.midstream && self.src.port() != self.dst.port() {
            return self.src.port() > self.dst.port();
        }
        self.direction == 0
    }
}

/// The next part of a direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Chunk<'a> {
    /// Bytes.
    Data(&'a [u8]),
    /// Number of bytes that the capture does not have.
    Gap(u64),
    /// End of the direction.
    End(Ending),
}

/// Why a direction ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// The sender closed it.
    Fin,
    /// One end reset the connection.
    Reset,
    /// The capture ended.
    Capture,
    /// A new connection uses the same addresses and ports.
    Reused,
    /// Too many streams: this one was silent for longest.
    Forgotten,
}

/// Counters of reassembly.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// TCP segments.
    pub segments: u64,
    /// Streams.
    pub streams: u64,
    /// Captured bytes of payload: delivered, repeated and stray.
    pub captured: u64,
    /// Bytes delivered as data.
    pub delivered: u64,
    /// Repeated bytes that were dropped.
    pub repeated: u64,
    /// Repeated bytes that differed from the retained ones.
    pub conflicting: u64,
    /// Dropped bytes before the start or after the end of a stream.
    pub stray: u64,
    /// Bytes reported as gaps.
    pub missing: u64,
    /// Gaps reported because too much data waited after them.
    pub overfull: u64,
    /// Streams ended because there were too many.
    pub forgotten: u64,
}

/// Reassembles the TCP streams of a capture. See the documentation of this module.
#[derive(Debug)]
pub struct Streams {
    limits: Limits,
    streams: HashMap<[SocketAddr; 2], Stream>,
    /// Bytes that wait in all directions.
    waiting: usize,
    counters: Counters,
}

#[derive(Debug)]
struct Stream {
    number: u64,
    /// Sender of the first packet.
    first: SocketAddr,
    /// Initial sequence numbers of both ends, if known, to detect reuse of the ports.
    began: [Option<u32>; 2],
    directions: [Direction; 2],
    /// Value of the segment counter at its last segment.
    last: u64,
}

impl Streams {
    /// Nothing was seen yet.
    pub fn new(limits: Limits) -> Self {
        Self { limits, streams: HashMap::new(), waiting: 0, counters: Counters::default() }
    }

    /// Takes a packet and passes the data that becomes available to `out`, in order. Ignores packets that are
    /// not TCP, or that are in an unknown tunnel.
    ///
    /// # Examples
    ///
    /// ```
    /// use towpath::streams::{Chunk, Limits, Streams};
    /// use towpath_wire::{LinkType, self as wire};
    ///
    /// let mut segment = vec![
    ///     0x45, 0, 0, 42, 0, 0, 0, 0, 64, 6, 0, 0, 192, 0, 2, 1, 192, 0, 2, 2, // IPv4
    ///     0x10, 0x92, 0, 80, 0, 0, 0, 100, 0, 0, 0, 7, 0x50, 0x10, 0, 0, 0, 0, 0, 0, // TCP, sequence number 100
    /// ];
    /// segment.extend(b"hi");
    /// let mut streams = Streams::new(Limits::default());
    /// let mut bytes = Vec::new();
    /// streams.handle_packet(&wire::parse(LinkType::RAW, &segment, 42).expect("well-formed"), &mut |way, chunk| {
    ///     assert_eq!((way.stream, way.dst.port(), way.midstream), (0, 80, true));
    ///     if let Chunk::Data(data) = chunk {
    ///         bytes.extend_from_slice(data);
    ///     }
    /// });
    /// assert_eq!(bytes, b"hi");
    /// ```
    pub fn handle_packet(&mut self, packet: &Packet<'_>, out: &mut impl FnMut(&Way, Chunk<'_>)) {
        self.handle_layer(packet, out);
        let mut layer = *packet;
        for _ in 0..MAX_LAYERS {
            let Ok(Some(inner)) = tunnel::inner(&layer) else { return };
            self.handle_layer(&inner, out);
            layer = inner;
        }
    }

    /// The capture has ended: reports remaining holes as gaps and ends all directions.
    pub fn handle_end(&mut self, out: &mut impl FnMut(&Way, Chunk<'_>)) {
        let mut streams: Vec<_> = self.streams.drain().collect();
        streams.sort_unstable_by_key(|(_, stream)| stream.number);
        for (ends, stream) in streams {
            finish(stream, &ends, Ending::Capture, &mut self.waiting, &mut self.counters, out);
        }
    }

    /// The counters.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    fn handle_layer(&mut self, packet: &Packet<'_>, out: &mut impl FnMut(&Way, Chunk<'_>)) {
        if packet.proto != proto::TCP || packet.fragment == Fragment::Later {
            return;
        }
        let Some((src, dst)) = addresses(packet) else { return };
        self.counters.segments += 1;
        let ends = if src <= dst { [src, dst] } else { [dst, src] };
        if self.streams.get(&ends).is_some_and(|stream| stream.begins_again(packet, src))
            && let Some(old) = self.streams.remove(&ends)
        {
            finish(old, &ends, Ending::Reused, &mut self.waiting, &mut self.counters, out);
        }
        if self.streams.len() >= self.limits.streams.max(1) && !self.streams.contains_key(&ends) {
            self.forget(out);
        }
        let counters = &mut self.counters;
        let stream = self.streams.entry(ends).or_insert_with(|| {
            counters.streams += 1;
            Stream {
                number: counters.streams - 1,
                first: src,
                began: [None; 2],
                directions: [Direction::default(), Direction::default()],
                last: 0,
            }
        });
        stream.last = counters.segments;
        stream.learn(packet, src);
        let sender = usize::from(src != stream.first);
        let way = stream.way(&ends, sender);
        let segment = Segment {
            seq: packet.tcp_seq,
            syn: packet.tcp_flags & SYN != 0,
            fin: packet.tcp_flags & FIN != 0,
            rst: packet.tcp_flags & RST != 0,
            payload: packet.payload(),
            length: packet.tcp_data_len().unwrap_or(0),
        };
        let direction = &mut stream.directions[sender];
        let before = direction.waiting();
        let room = self.limits.waiting.min((self.limits.waiting_total + before).saturating_sub(self.waiting));
        direction.handle_segment(&segment, room, counters, &mut |chunk| out(&way, chunk));
        self.waiting = self.waiting - before + direction.waiting();
        if segment.rst {
            stream.directions[1 - sender].reset();
        }
    }

    /// Ends the eighth of the streams that was silent for longest.
    fn forget(&mut self, out: &mut impl FnMut(&Way, Chunk<'_>)) {
        let mut last: Vec<u64> = self.streams.values().map(|stream| stream.last).collect();
        last.sort_unstable();
        let Some(&bound) = last.get(last.len() / 8) else { return };
        let silent = self.streams.extract_if(|_, stream| stream.last <= bound);
        let mut silent: Vec<_> = silent.collect();
        silent.sort_unstable_by_key(|(_, stream)| stream.number);
        for (ends, stream) in silent {
            self.counters.forgotten += 1;
            finish(stream, &ends, Ending::Forgotten, &mut self.waiting, &mut self.counters, out);
        }
    }
}

impl Stream {
    /// Returns true if a segment from `src` starts the next use of the same addresses and ports.
    fn begins_again(&self, packet: &Packet<'_>, src: SocketAddr) -> bool {
        let began = self.began[usize::from(src != self.first)];
        packet.tcp_flags & (SYN | ACK) == SYN && began.is_some_and(|began| began != packet.tcp_seq)
    }

    /// Records the initial sequence numbers.
    fn learn(&mut self, packet: &Packet<'_>, src: SocketAddr) {
        let sender = usize::from(src != self.first);
        let (syn, ack) = (packet.tcp_flags & SYN != 0, packet.tcp_flags & ACK != 0);
        // Midstream, the number before the first one seen is as good an estimate as any.
        let seq = if syn { packet.tcp_seq } else { packet.tcp_seq.wrapping_sub(1) };
        self.began[sender].get_or_insert(seq);
        if ack {
            self.began[1 - sender].get_or_insert(packet.tcp_ack.wrapping_sub(1));
        }
        if syn && ack {
            // It acknowledges only the other end's SYN.
            self.directions[1 - sender].start(packet.tcp_ack);
        }
    }

    fn way(&self, ends: &[SocketAddr; 2], sender: usize) -> Way {
        let other = if ends[0] == self.first { ends[1] } else { ends[0] };
        let (src, dst) = if sender == 0 { (self.first, other) } else { (other, self.first) };
        let midstream = self.directions[sender].midstream();
        Way { stream: self.number, direction: sender as u8, src, dst, midstream }
    }
}

fn finish(
    mut stream: Stream,
    ends: &[SocketAddr; 2],
    ending: Ending,
    waiting: &mut usize,
    counters: &mut Counters,
    out: &mut impl FnMut(&Way, Chunk<'_>),
) {
    for sender in 0..2 {
        let way = stream.way(ends, sender);
        *waiting -= stream.directions[sender].waiting();
        stream.directions[sender].finish(ending, counters, &mut |chunk| out(&way, chunk));
    }
}

fn addresses(packet: &Packet<'_>) -> Option<(SocketAddr, SocketAddr)> {
    let (src, dst) = match packet.addresses {
        Addresses::None => return None,
        Addresses::V4(src, dst) => (IpAddr::V4(src), IpAddr::V4(dst)),
        Addresses::V6(src, dst) => (IpAddr::V6(src), IpAddr::V6(dst)),
    };
    Some((SocketAddr::new(src, packet.src_port), SocketAddr::new(dst, packet.dst_port)))
}

#[cfg(test)]
mod tests;
