//! Reassembly of IPv4 datagrams, for the rule action `reass` (ipfw(8)).
//!
//! Source, destination, protocol and identification identify a datagram (RFC 791), within the zone of its port.
//! Fragments that overlap, that end beyond 65,535 bytes, or that disagree about the end invalidate the datagram: it
//! is dropped with all its fragments. RFC 5722 requires that for IPv6; FreeBSD trims them, which lets the sender
//! choose the bytes that count. An exact duplicate is not an overlap: the network may duplicate packets (RFC 8200,
//! 4.5), and a capture of several interfaces contains duplicates.
//!
//! Bounded in datagrams, in fragments of each, and in bytes; without room, the oldest datagram is dropped. The caller
//! provides the time. Each fragment is accounted for once: in the `parts` of a complete datagram, or in the number
//! that `add`, `expire` or `drain` report as dropped. [`Reassembler::take_lost`] has the dropped frames.

use std::collections::HashMap;
use std::net::Ipv4Addr;
use std::ops::Range;
use std::time::Duration;

use towpath_wire::{self as wire, Addresses, Fragment, Packet, Time};

/// Maximum time to complete a datagram: 30 s, as FreeBSD's `net.inet.ip.fragttl`.
pub const LIFETIME: Duration = Duration::from_secs(30);
/// Maximum number of fragments of one datagram. FreeBSD's `net.inet.ip.maxfragsperpacket` is 16; jumbo datagrams over
/// small links need 45.
pub const MAX_FRAGMENTS: usize = 64;
/// Maximum number of incomplete datagrams.
pub const MAX_DATAGRAMS: usize = 1024;
/// Maximum number of bytes in incomplete datagrams.
pub const MAX_BYTES: usize = 8 << 20;

/// The longest IPv4 packet.
const MAX_PACKET: usize = 65_535;

/// Incomplete datagrams. `T` is what the caller needs to know about a fragment that is dropped.
#[derive(Debug)]
pub struct Reassembler<T = ()> {
    waiting: HashMap<Key, Datagram<T>>,
    bytes: usize,
    /// The fragments that the last call dropped.
    lost: Vec<(Vec<u8>, T)>,
}

impl<T> Default for Reassembler<T> {
    fn default() -> Self {
        Self { waiting: HashMap::new(), bytes: 0, lost: Vec::new() }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Key {
    zone: u16,
    src: Ipv4Addr,
    dst: Ipv4Addr,
    proto: u8,
    id: u16,
}

#[derive(Debug)]
struct Datagram<T> {
    since: Time,
    /// The length of the payload, known from the last fragment.
    len: Option<usize>,
    /// By offset.
    pieces: Vec<Kept<T>>,
    bytes: usize,
    /// The number of packets that the pieces stand for.
    parts: u32,
    /// The length of the longest fragment, with its IPv4 header.
    longest: u16,
}

/// A fragment that waits for the others.
#[derive(Debug)]
struct Kept<T> {
    offset: usize,
    frame: Vec<u8>,
    /// Positions of the IPv4 header and of the payload in the frame, and the end of the payload.
    network: usize,
    payload: Range<usize>,
    tag: T,
}

impl<T> Kept<T> {
    fn payload(&self) -> &[u8] {
        &self.frame[self.payload.clone()]
    }

    fn end(&self) -> usize {
        self.offset + self.payload.len()
    }
}

/// The result of [`Reassembler::add`].
#[derive(Debug, PartialEq, Eq)]
pub struct Added {
    /// The datagram, if this fragment completed it.
    pub whole: Option<Whole>,
    /// Fragments that were dropped: this one and those before, because they are inconsistent; those before, because
    /// they have waited too long; or those of the oldest datagrams, because there was no room.
    pub dropped: u32,
}

/// A complete datagram.
#[derive(Debug, PartialEq, Eq)]
pub struct Whole {
    /// The frame: the first fragment's link header, its IPv4 header with corrected length, flags and checksum, and
    /// the whole payload.
    pub frame: Vec<u8>,
    /// The number of packets that it came in.
    pub parts: u32,
    /// The length of the longest fragment, with its IPv4 header.
    pub longest: u16,
}

impl<T> Reassembler<T> {
    /// A reassembler without datagrams.
    pub fn new() -> Self {
        Self::default()
    }

    /// The number of fragments that wait.
    pub fn waiting(&self) -> u32 {
        self.waiting.values().map(|datagram| datagram.parts).sum()
    }

    /// Adds a fragment. A packet that is not an IPv4 fragment, or that the capture truncated, is dropped.
    ///
    /// `parts` is the number of packets that it stands for: 1, unless it was itself reassembled. `zone` is that of its port.
    pub fn add(&mut self, packet: &Packet<'_>, zone: u16, parts: u32, now: Time, tag: T) -> Added {
        self.lost.clear();
        let Some((key, piece)) = piece(packet, zone) else {
            self.lost.push((packet.frame.to_vec(), tag));
            return Added { whole: None, dropped: parts };
        };
        // The caller expires datagrams only now and then. Which fragments belong together must not depend on that.
        let late = |datagram: &Datagram<T>| now.since(datagram.since) > LIFETIME;
        let mut dropped = if self.waiting.get(&key).is_some_and(late) { self.drop_datagram(&key) } else { 0 };
        // A duplicate needs no room.
        if let Some(datagram) = self.waiting.get_mut(&key).filter(|datagram| datagram.has(&piece)) {
            datagram.parts += parts;
            return Added { whole: None, dropped };
        }
        while !self.waiting.contains_key(&key) && self.waiting.len() >= MAX_DATAGRAMS
            || self.bytes + piece.frame.len() > MAX_BYTES
        {
            dropped += self.drop_oldest();
        }
        let datagram = self.waiting.entry(key).or_insert_with(|| Datagram::new(now));
        datagram.parts += parts;
        self.bytes += piece.frame.len();
        let fits = datagram.insert(&piece, tag);
        if fits && !datagram.is_whole() {
            return Added { whole: None, dropped };
        }
        if !fits {
            dropped += self.drop_datagram(&key);
            return Added { whole: None, dropped };
        }
        let Some(datagram) = self.waiting.remove(&key) else { return Added { whole: None, dropped } };
        self.bytes -= datagram.bytes;
        let (parts, longest) = (datagram.parts, datagram.longest);
        match datagram.frame() {
            Some(frame) => Added { whole: Some(Whole { frame, parts, longest }), dropped },
            None => Added { whole: None, dropped: dropped + self.lose(datagram) },
        }
    }

    /// Drops the datagrams that have waited longer than [`LIFETIME`]. Returns the number of fragments dropped.
    pub fn expire(&mut self, now: Time) -> u32 {
        self.drop_all(|datagram| now.since(datagram.since) > LIFETIME)
    }

    /// Drops all datagrams. Returns the number of fragments dropped.
    pub fn drain(&mut self) -> u32 {
        self.drop_all(|_| true)
    }

    /// The frames that the last call dropped. An exact duplicate has none of its own.
    pub fn take_lost(&mut self) -> Vec<(Vec<u8>, T)> {
        std::mem::take(&mut self.lost)
    }

    fn drop_all(&mut self, which: impl Fn(&Datagram<T>) -> bool) -> u32 {
        self.lost.clear();
        let Self { waiting, bytes, lost } = self;
        let mut dropped = 0;
        for (_, datagram) in waiting.extract_if(|_, datagram| which(datagram)) {
            *bytes -= datagram.bytes;
            dropped += datagram.parts;
            lost.extend(datagram.into_lost());
        }
        dropped
    }

    fn drop_oldest(&mut self) -> u32 {
        let oldest = self.waiting.iter().min_by_key(|(_, datagram)| datagram.since).map(|(key, _)| *key);
        oldest.map_or(0, |key| self.drop_datagram(&key))
    }

    /// Drops a datagram. Returns the number of its fragments.
    fn drop_datagram(&mut self, key: &Key) -> u32 {
        let Some(datagram) = self.waiting.remove(key) else { return 0 };
        self.bytes -= datagram.bytes;
        self.lose(datagram)
    }

    /// Keeps the frames of a dropped datagram for [`take_lost`](Self::take_lost). Returns the number of its fragments.
    fn lose(&mut self, datagram: Datagram<T>) -> u32 {
        let parts = datagram.parts;
        self.lost.extend(datagram.into_lost());
        parts
    }
}

/// One validated fragment.
struct Piece<'a> {
    offset: usize,
    last: bool,
    frame: &'a [u8],
    network: usize,
    payload: Range<usize>,
}

impl Piece<'_> {
    fn payload(&self) -> &[u8] {
        &self.frame[self.payload.clone()]
    }
}

fn piece<'a>(packet: &Packet<'a>, zone: u16) -> Option<(Key, Piece<'a>)> {
    let Addresses::V4(src, dst) = packet.addresses else { return None };
    if packet.fragment == Fragment::Whole {
        return None;
    }
    let network = packet.network;
    let header = usize::from(packet.frame.get(network)? & 0x0f) * 4;
    let end = network + packet.ip_len as usize;
    // None if the capture truncated the packet.
    let payload = network + header..end;
    if packet.frame.get(payload.clone())?.is_empty() {
        return None;
    }
    let offset = usize::from(packet.fragment_offset) * 8;
    let last = packet.ipoff_flags() & wire::MF == 0;
    // All but the last fragment carry a multiple of eight bytes (RFC 791, 3.2).
    if !last && payload.len() % 8 != 0 || header + offset + payload.len() > MAX_PACKET {
        return None;
    }
    let key = Key { zone, src, dst, proto: packet.proto, id: packet.ip_id()? };
    Some((key, Piece { offset, last, frame: packet.frame, network, payload }))
}

impl<T> Datagram<T> {
    fn new(since: Time) -> Self {
        Self { since, len: None, pieces: Vec::new(), bytes: 0, parts: 0, longest: 0 }
    }

    /// Returns true if exactly this piece is there.
    fn has(&self, piece: &Piece<'_>) -> bool {
        let same = |kept: &Kept<T>| kept.offset == piece.offset && kept.payload() == piece.payload();
        let ends = self.len == Some(piece.offset + piece.payload.len());
        ends == piece.last && self.pieces.iter().any(same)
    }

    /// Keeps a piece. Returns false if the datagram is inconsistent with it.
    fn insert(&mut self, piece: &Piece<'_>, tag: T) -> bool {
        let (start, end) = (piece.offset, piece.offset + piece.payload.len());
        let at = self.pieces.partition_point(|kept| kept.offset < start);
        let before = at.checked_sub(1).map(|i| &self.pieces[i]);
        let overlaps = before.is_some_and(|kept| kept.end() > start)
            || self.pieces.get(at).is_some_and(|kept| kept.offset < end);
        let Piece { offset, network, payload, .. } = piece;
        let (frame, payload) = (piece.frame.to_vec(), payload.clone());
        self.bytes += frame.len();
        self.pieces.insert(at, Kept { offset: *offset, frame, network: *network, payload, tag });
        let longest = piece.payload.end - piece.network;
        self.longest = self.longest.max(longest as u16);
        let agrees = self.len.is_none_or(|len| if piece.last { end == len } else { end <= len });
        if piece.last {
            self.len = Some(end);
        }
        let furthest = self.pieces.last().map_or(0, Kept::end);
        agrees
            && !overlaps
            && self.len.is_none_or(|len| furthest <= len)
            && self.pieces.len() <= MAX_FRAGMENTS
    }

    fn is_whole(&self) -> bool {
        let have: usize = self.pieces.iter().map(|kept| kept.payload.len()).sum();
        self.pieces.first().is_some_and(|kept| kept.offset == 0) && self.len == Some(have)
    }

    /// The frame of a complete datagram.
    fn frame(&self) -> Option<Vec<u8>> {
        let Kept { frame: first, network, payload, .. } = self.pieces.first()?;
        let mut frame = first[..payload.start].to_vec();
        self.pieces.iter().for_each(|kept| frame.extend_from_slice(kept.payload()));
        let total = u16::try_from(frame.len() - network).ok()?;
        let header = frame.get_mut(*network..)?;
        header[2..4].copy_from_slice(&total.to_be_bytes());
        // Don't Fragment stays; More Fragments and the offset are cleared.
        header[6] &= 0x40;
        header[7] = 0;
        wire::checksum::fill_ip4(&mut frame, *network);
        Some(frame)
    }

    fn into_lost(self) -> impl Iterator<Item = (Vec<u8>, T)> {
        self.pieces.into_iter().map(|kept| (kept.frame, kept.tag))
    }
}

#[cfg(test)]
mod tests {
    use etherparse::PacketBuilder;
    use proptest::prelude::*;

    use super::*;
    use towpath_wire::LinkType;

    /// A UDP datagram and its fragments of at most `step` bytes.
    fn fragments(payload: &[u8], step: usize, id: u16) -> (Vec<u8>, Vec<Vec<u8>>) {
        let mut whole = Vec::new();
        PacketBuilder::ethernet2([2; 6], [4; 6])
            .ipv4([10, 0, 0, 1], [10, 0, 0, 2], 64)
            .udp(7, 9)
            .write(&mut whole, payload)
            .unwrap();
        whole[18..20].copy_from_slice(&id.to_be_bytes());
        whole[20] &= !0x40;
        wire::checksum::fill_ip4(&mut whole, 14);
        let (head, body) = whole.split_at(34);
        let count = body.len().div_ceil(step);
        let pieces = body.chunks(step).enumerate().map(|(i, chunk)| {
            let mut frame = [head, chunk].concat();
            frame[16..18].copy_from_slice(&(20 + chunk.len() as u16).to_be_bytes());
            let more = if i + 1 < count { 0x2000 } else { 0 };
            frame[20..22].copy_from_slice(&(more | (i * step / 8) as u16).to_be_bytes());
            frame
        });
        (whole.clone(), pieces.collect())
    }

    fn add(reassembler: &mut Reassembler, frame: &[u8], secs: u64) -> Added {
        let packet = wire::parse(LinkType::ETHERNET, frame, 0).unwrap();
        reassembler.add(&packet, 0, 1, Time::from_secs(secs), ())
    }

    proptest! {
        #[test]
        fn any_order_gives_the_datagram(
            payload in proptest::collection::vec(any::<u8>(), 1..600),
            step in 1usize..10,
            order in any::<u64>(),
        ) {
            let (whole, mut pieces) = fragments(&payload, step * 8, 5);
            prop_assume!(pieces.len() > 1 && pieces.len() <= MAX_FRAGMENTS);
            let mut seed = order;
            for i in (1..pieces.len()).rev() {
                seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1);
                pieces.swap(i, (seed >> 33) as usize % (i + 1));
            }
            let mut reassembler = Reassembler::new();
            let (last, first) = pieces.split_last().unwrap();
            for piece in first {
                prop_assert_eq!(add(&mut reassembler, piece, 1), Added { whole: None, dropped: 0 });
            }
            let parts = pieces.len() as u32;
            let longest = pieces.iter().map(|piece| piece.len() as u16 - 14).max().unwrap();
            prop_assert_eq!(
                add(&mut reassembler, last, 2),
                Added { whole: Some(Whole { frame: whole, parts, longest }), dropped: 0 }
            );
            prop_assert_eq!((reassembler.waiting(), reassembler.bytes), (0, 0));
        }
    }

    #[test]
    fn inconsistent_fragments_drop_the_datagram() {
        let (_, pieces) = fragments(&[1; 100], 24, 5);
        let mut reassembler = Reassembler::new();
        add(&mut reassembler, &pieces[0], 1);
        add(&mut reassembler, &pieces[2], 1);
        let mut other = pieces[0].clone();
        *other.last_mut().unwrap() ^= 1;
        assert_eq!(add(&mut reassembler, &other, 1), Added { whole: None, dropped: 3 }, "other bytes");
        let mut lost: Vec<_> = reassembler.take_lost().into_iter().map(|(frame, ())| frame).collect();
        lost.sort_unstable();
        let mut sent = vec![pieces[0].clone(), other, pieces[2].clone()];
        sent.sort_unstable();
        assert_eq!(lost, sent, "the frames as they were received");
        // Two different ends.
        let (_, longer) = fragments(&[1; 200], 24, 5);
        add(&mut reassembler, pieces.last().unwrap(), 1);
        assert_eq!(add(&mut reassembler, longer.last().unwrap(), 1), Added { whole: None, dropped: 2 });
        assert_eq!((reassembler.waiting(), reassembler.bytes), (0, 0));
    }

    #[test]
    fn a_duplicate_is_not_an_overlap() {
        let (whole, pieces) = fragments(&[1; 60], 24, 5);
        let mut reassembler = Reassembler::new();
        for piece in [&pieces[2], &pieces[2], &pieces[0], &pieces[0], &pieces[2]] {
            assert_eq!(add(&mut reassembler, piece, 1), Added { whole: None, dropped: 0 });
        }
        assert_eq!(
            add(&mut reassembler, &pieces[1], 1),
            Added { whole: Some(Whole { frame: whole, parts: 6, longest: 44 }), dropped: 0 }
        );
        assert_eq!((reassembler.waiting(), reassembler.bytes), (0, 0));

        add(&mut reassembler, &pieces[0], 1);
        add(&mut reassembler, &pieces[1], 1);
        // The same bytes, as a piece that is not the last.
        let mut last = pieces[1].clone();
        last[20] &= !0x20;
        assert_eq!(add(&mut reassembler, &last, 1), Added { whole: None, dropped: 3 });
        assert_eq!((reassembler.waiting(), reassembler.bytes), (0, 0));
    }

    #[test]
    fn datagrams_of_zones_are_separate() {
        let (_, pieces) = fragments(&[1; 40], 24, 5);
        let [first, last] = &pieces[..] else { panic!("two fragments") };
        let mut reassembler = Reassembler::new();
        let mut add = |frame: &[u8], zone| {
            let packet = wire::parse(LinkType::ETHERNET, frame, 0).unwrap();
            reassembler.add(&packet, zone, 1, Time::from_secs(1), ()).whole.is_some()
        };
        assert_eq!([add(first, 1), add(last, 2), add(first, 2), add(last, 1)], [false, false, true, true]);
    }

    #[test]
    fn datagrams_are_dropped_by_time_and_number() {
        let mut reassembler = Reassembler::new();
        let (_, pieces) = fragments(&[1; 100], 24, 5);
        add(&mut reassembler, &pieces[0], 1);
        add(&mut reassembler, &pieces[1], 20);
        assert_eq!(reassembler.expire(Time::from_secs(31)), 0);
        assert_eq!((reassembler.expire(Time::from_secs(32)), reassembler.take_lost().len()), (2, 2));
        for id in 0..MAX_DATAGRAMS as u16 + 1 {
            let (_, pieces) = fragments(&[1; 100], 24, id);
            let added = add(&mut reassembler, &pieces[0], 40 + u64::from(id));
            assert_eq!(added.dropped, u32::from(usize::from(id) >= MAX_DATAGRAMS));
        }
        assert_eq!(reassembler.waiting(), MAX_DATAGRAMS as u32);
        assert_eq!(reassembler.drain(), MAX_DATAGRAMS as u32);
        assert_eq!((reassembler.waiting(), reassembler.bytes), (0, 0));
    }

    #[test]
    fn a_fragment_does_not_join_expired_ones() {
        let (whole, pieces) = fragments(&[1; 40], 24, 5);
        let [first, last] = &pieces[..] else { panic!("two fragments") };
        let mut reassembler = Reassembler::new();
        add(&mut reassembler, first, 1);
        // expire() was not called meanwhile, as within a burst.
        assert_eq!(add(&mut reassembler, last, 32), Added { whole: None, dropped: 1 });
        assert_eq!((reassembler.waiting(), reassembler.bytes), (1, last.len()));
        let whole = Some(Whole { frame: whole, parts: 2, longest: 44 });
        assert_eq!(add(&mut reassembler, first, 62), Added { whole, dropped: 0 }, "exactly 30 s");
        assert_eq!((reassembler.waiting(), reassembler.bytes), (0, 0));
    }

    #[test]
    fn only_complete_ipv4_fragments_are_accepted() {
        let mut reassembler = Reassembler::new();
        let (whole, pieces) = fragments(&[1; 100], 24, 5);
        assert_eq!(add(&mut reassembler, &whole, 1).dropped, 1, "no fragment");
        let cut = &pieces[1][..pieces[1].len() - 4];
        let packet = wire::parse(LinkType::ETHERNET, cut, pieces[1].len() as u32).unwrap();
        assert_eq!(
            reassembler.add(&packet, 0, 1, Time::from_secs(1), ()).dropped,
            1,
            "cut short by the capture"
        );
        assert_eq!(reassembler.waiting(), 0);
    }
}
