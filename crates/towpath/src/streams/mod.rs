//! The TCP streams of a capture: segments in the order and shape that the network gave them go in, the bytes that each end
//! sent come out.
//!
//! What: a stream is a pair of addresses and ports in one of its uses; a SYN whose sequence number is not the one that its
//! sender began with starts the next use. Streams are numbered from 0 in the order of their first packet, tunnels
//! included, as Wireshark's `tcp.stream` is.
//!
//! Rules of reassembly, for each [`Way`] of a stream on its own (see direction.rs):
//! - the first data seen for a sequence number wins, whatever comes later for the same; how much came again, and how
//!   much of that was different where it could still be compared, is counted;
//! - what never came, and what the capture cut off, is a [`Chunk::Gap`], announced once nothing can fill it any more: when too
//!   much waits behind it, or the stream is over;
//! - a stream whose start was not captured begins with the first byte seen.
//!
//! Memory is bounded by [`Limits`]; what a bound costs is counted in [`Counters`].
//!
//! Not looked at: checksums, windows, timestamps. A segment that IP divided is given when it is whole
//! ([`towpath_gate::reassembly`]); of fragments given here, the first's bytes are used and the others are a gap.
//!
//! References: RFC 9293, 3.4 (sequence numbers wrap; comparisons are modular); Wireshark's packet-tcp.c for the numbering.

mod direction;
pub mod guess;
pub mod messages;

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};

use towpath_wire::{Addresses, Fragment, Packet, proto, tunnel};

use direction::{Direction, Segment};

/// Tunnels within tunnels that are looked through.
const MAX_LAYERS: usize = 8;

/// TCP flags (RFC 9293, 3.1).
const FIN: u8 = 0x01;
const SYN: u8 = 0x02;
const RST: u8 = 0x04;
const ACK: u8 = 0x10;

/// Bounds on what is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Streams that are followed at once; beyond it the eighth that was silent longest is ended. 65,536.
    pub streams: usize,
    /// Bytes of one direction that wait for earlier ones; beyond it the hole before them is a gap. 8 MiB: more than the
    /// window that Linux gives a connection by itself (tcp_rmem, 6 MiB), so that a retransmission comes in time.
    pub waiting: usize,
    /// Bytes of all directions that wait. 64 MiB.
    pub waiting_total: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { streams: 1 << 16, waiting: 8 << 20, waiting_total: 64 << 20 }
    }
}

/// One direction of one stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Way {
    /// The stream's number, from 0 in the order of first packets.
    pub stream: u64,
    /// 0 from the sender of the stream's first packet, 1 from the other end.
    pub direction: u8,
    /// Who sends these bytes.
    pub src: SocketAddr,
    /// Who receives them.
    pub dst: SocketAddr,
    /// Whether its start was not captured: the first byte is the first one seen.
    pub midstream: bool,
}

impl Way {
    /// Whether the client sends these bytes: who sent the first packet, or, when the start was not captured, who has the
    /// higher port.
    pub fn is_client(&self) -> bool {
        if self.midstream && self.src.port() != self.dst.port() {
            return self.src.port() > self.dst.port();
        }
        self.direction == 0
    }
}

/// What comes next in one direction of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Chunk<'a> {
    /// These bytes.
    Data(&'a [u8]),
    /// So many bytes that are not in the capture.
    Gap(u64),
    /// Nothing: the direction is over.
    End(Ending),
}

/// Why a direction is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// Its sender closed it.
    Fin,
    /// One end reset the connection.
    Reset,
    /// The capture ended before the connection did.
    Capture,
    /// The same addresses and ports were used for a new connection.
    Reused,
    /// More streams than may be followed: this one was silent longest.
    Forgotten,
}

/// What was done to the segments.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// TCP segments looked at.
    pub segments: u64,
    /// Streams seen.
    pub streams: u64,
    /// Bytes of payload captured: delivered, repeated and stray together.
    pub captured: u64,
    /// Bytes that came out as data.
    pub delivered: u64,
    /// Bytes that had come before and were dropped.
    pub repeated: u64,
    /// Of those, bytes that differed from what was kept.
    pub conflicting: u64,
    /// Bytes dropped because they lie before a stream's start or behind its end.
    pub stray: u64,
    /// Bytes missing, announced as gaps.
    pub missing: u64,
    /// Gaps announced because too much waited behind them.
    pub overfull: u64,
    /// Streams ended because too many were followed.
    pub forgotten: u64,
}

/// Follows the TCP streams of a capture. See the module's documentation.
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
    /// Who sent the first packet.
    first: SocketAddr,
    /// The sequence numbers that the two ends began with, as far as they are known; for seeing that a port pair is used again.
    began: [Option<u32>; 2],
    directions: [Direction; 2],
    /// Count of segments when the last one came.
    last: u64,
}

impl Streams {
    /// Nothing seen yet.
    pub fn new(limits: Limits) -> Self {
        Self { limits, streams: HashMap::new(), waiting: 0, counters: Counters::default() }
    }

    /// Takes one packet; what it makes available goes to `out` in order. Packets that are not TCP, or inside a tunnel that is
    /// not known, change nothing.
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

    /// Says that no packet follows: every hole is a gap now, and every direction ends.
    pub fn handle_end(&mut self, out: &mut impl FnMut(&Way, Chunk<'_>)) {
        let mut streams: Vec<_> = self.streams.drain().collect();
        streams.sort_unstable_by_key(|(_, stream)| stream.number);
        for (ends, stream) in streams {
            finish(stream, &ends, Ending::Capture, &mut self.waiting, &mut self.counters, out);
        }
    }

    /// What was done so far.
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

    /// Ends the eighth of the streams that was silent longest.
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
    /// Whether a segment from `src` starts the next use of the same addresses and ports.
    fn begins_again(&self, packet: &Packet<'_>, src: SocketAddr) -> bool {
        let began = self.began[usize::from(src != self.first)];
        packet.tcp_flags & (SYN | ACK) == SYN && began.is_some_and(|began| began != packet.tcp_seq)
    }

    /// Takes note of the sequence numbers that the ends began with.
    fn learn(&mut self, packet: &Packet<'_>, src: SocketAddr) {
        let sender = usize::from(src != self.first);
        let (syn, ack) = (packet.tcp_flags & SYN != 0, packet.tcp_flags & ACK != 0);
        // Seen from the middle, the number before the first one seen is as good a guess as any.
        let seq = if syn { packet.tcp_seq } else { packet.tcp_seq.wrapping_sub(1) };
        self.began[sender].get_or_insert(seq);
        if ack {
            self.began[1 - sender].get_or_insert(packet.tcp_ack.wrapping_sub(1));
        }
        if syn && ack {
            // It acknowledges nothing but the other's SYN.
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
