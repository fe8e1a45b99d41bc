//! Counts of TCP and UDP conversations, for the report of a replay.
//!
//! A conversation is a protocol and a pair of addresses and ports, in either direction. A TCP port pair that is reused counts
//! again: a SYN with another initial sequence number begins the next conversation. The counts agree with Wireshark's.
//! The payload of a tunnel counts too, in addition to the tunnel's own conversation. A fragmented datagram counts with its
//! first fragment.
//!
//! Addresses are not stored. A conversation is 64 bits of a keyed hash (SipHash with a random key), so that a sender cannot
//! construct collisions. Of a million conversations, one is lost with a probability of 1 in 37 million. A limit bounds the
//! memory; [`Conversations::uncounted`] counts the packets of further conversations.

use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasher, BuildHasherDefault, Hasher, RandomState};
use std::net::Ipv4Addr;

use towpath_wire::{Addresses, Fragment, Packet, proto, tunnel};

/// Maximum number of conversations per protocol: the capacity of a hash table of 2^21 slots.
const LIMIT: usize = 7 << 18;

/// Maximum number of nested tunnels.
const MAX_LAYERS: usize = 8;

/// TCP flags (RFC 9293, 3.1).
const SYN: u8 = 0x02;
const ACK: u8 = 0x10;

/// Counts conversations.
///
/// # Examples
///
/// ```
/// use towpath_wire::{LinkType, self as wire};
/// use towpath_engine::conversations::Conversations;
///
/// let mut seen = Conversations::new();
/// let query = [
///     0x45, 0, 0, 28, 0, 0, 0, 0, 64, 17, 0, 0, 192, 0, 2, 1, 198, 51, 100, 2, // IPv4
///     0x10, 0x92, 0, 53, 0, 8, 0, 0, // UDP
/// ];
/// seen.observe(&wire::parse(LinkType::RAW, &query, 28).expect("well-formed"));
/// assert_eq!((seen.tcp(), seen.udp()), (0, 1));
/// ```
#[derive(Debug)]
pub struct Conversations {
    key: RandomState,
    limit: usize,
    tcp: HashMap<u64, Bases, Hashed>,
    udp: HashSet<u64, Hashed>,
    /// Reused port pairs of `tcp`.
    reused: u64,
    uncounted: u64,
}

impl Default for Conversations {
    fn default() -> Self {
        Self::new()
    }
}

impl Conversations {
    /// Creates a counter for 1.8 million conversations per protocol (at most 55 MB for TCP, 20 MB for UDP).
    pub fn new() -> Self {
        Self::with_limit(LIMIT)
    }

    /// Creates a counter for `limit` conversations per protocol.
    pub fn with_limit(limit: usize) -> Self {
        Self {
            key: RandomState::new(),
            limit,
            tcp: HashMap::default(),
            udp: HashSet::default(),
            reused: 0,
            uncounted: 0,
        }
    }

    /// Counts one packet. Packets that are neither TCP nor UDP, and later fragments, have no conversation.
    pub fn observe(&mut self, packet: &Packet<'_>) {
        self.observe_layer(packet);
        let mut layer = *packet;
        for _ in 0..MAX_LAYERS {
            // The payload of a tunnel may be malformed. The tunnel's own packet counts in any case.
            let Ok(Some(inner)) = tunnel::inner(&layer) else { return };
            self.observe_layer(&inner);
            layer = inner;
        }
    }

    fn observe_layer(&mut self, packet: &Packet<'_>) {
        if packet.fragment == Fragment::Later {
            return;
        }
        match packet.proto {
            proto::TCP => self.observe_tcp(packet),
            // As in Wireshark, both are one protocol.
            proto::UDP | proto::UDPLITE => self.observe_udp(packet),
            _ => {}
        }
    }

    /// The number of TCP conversations.
    pub fn tcp(&self) -> u64 {
        self.tcp.len() as u64 + self.reused
    }

    /// The number of UDP conversations.
    pub fn udp(&self) -> u64 {
        self.udp.len() as u64
    }

    /// The number of packets whose conversation is beyond the limit.
    pub fn uncounted(&self) -> u64 {
        self.uncounted
    }

    /// The hash of both ends (address and port as one number), and which end sent the packet.
    fn hash(&self, packet: &Packet<'_>) -> Option<(u64, usize)> {
        Some(match packet.addresses {
            Addresses::None => return None,
            Addresses::V4(src, dst) => {
                let end = |address: Ipv4Addr, port| u64::from(address.to_bits()) << 16 | u64::from(port);
                let ([low, high], sender) = ordered(end(src, packet.src_port), end(dst, packet.dst_port));
                (self.key.hash_one((low, high)), sender)
            }
            Addresses::V6(src, dst) => {
                let ([low, high], sender) =
                    ordered((src.to_bits(), packet.src_port), (dst.to_bits(), packet.dst_port));
                (self.key.hash_one((low, high)), sender)
            }
        })
    }

    fn observe_tcp(&mut self, packet: &Packet<'_>) {
        let Some((hash, sender)) = self.hash(packet) else { return };
        if let Some(bases) = self.tcp.get_mut(&hash) {
            self.reused += u64::from(bases.observe(packet, sender));
        } else if self.tcp.len() < self.limit {
            self.tcp.entry(hash).or_default().observe(packet, sender);
        } else {
            self.uncounted += 1;
        }
    }

    fn observe_udp(&mut self, packet: &Packet<'_>) {
        let Some((hash, _)) = self.hash(packet) else { return };
        if self.udp.len() < self.limit {
            self.udp.insert(hash);
        } else if !self.udp.contains(&hash) {
            self.uncounted += 1;
        }
    }
}

/// Two ends in an order that does not depend on the direction, and which of them sent the packet.
fn ordered<T: Ord>(src: T, dst: T) -> ([T; 2], usize) {
    if src <= dst { ([src, dst], 0) } else { ([dst, src], 1) }
}

/// The initial sequence numbers of the two ends of a TCP conversation, where known.
#[derive(Debug, Default)]
struct Bases {
    seq: [u32; 2],
    known: [bool; 2],
}

impl Bases {
    /// Handles a segment from end `sender`. Returns true if it begins another conversation.
    fn observe(&mut self, packet: &Packet<'_>, sender: usize) -> bool {
        let syn = packet.tcp_flags & SYN != 0;
        let ack = packet.tcp_flags & ACK != 0;
        let again = syn && !ack && self.known[sender] && self.seq[sender] != packet.tcp_seq;
        if again {
            *self = Self::default();
        }
        // For a conversation seen from the middle, the number before the first segment is the guess.
        self.learn(sender, if syn { packet.tcp_seq } else { packet.tcp_seq.wrapping_sub(1) });
        if ack {
            self.learn(1 - sender, packet.tcp_ack.wrapping_sub(1));
        }
        again
    }

    fn learn(&mut self, end: usize, seq: u32) {
        if !self.known[end] {
            self.seq[end] = seq;
            self.known[end] = true;
        }
    }
}

/// A hasher for keys that are hashes.
type Hashed = BuildHasherDefault<Same>;

#[derive(Default)]
struct Same(u64);

impl Hasher for Same {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write_u64(&mut self, hash: u64) {
        self.0 = hash;
    }

    fn write(&mut self, bytes: &[u8]) {
        // Not called for a u64.
        self.0 = bytes.iter().fold(self.0, |hash, byte| hash.rotate_left(8) ^ u64::from(*byte));
    }
}

#[cfg(test)]
mod tests {
    use towpath_wire::{self as wire, LinkType};

    use super::*;

    /// A TCP segment or UDP datagram between two ends of 192.0.2.0/24, ports as given.
    fn packet(protocol: u8, ends: ((u8, u16), (u8, u16)), flags: u8, seq: u32, ack: u32) -> Vec<u8> {
        let ((src, src_port), (dst, dst_port)) = ends;
        let mut bytes = vec![0x45, 0, 0, 40, 0, 0, 0, 0, 64, protocol, 0, 0, 192, 0, 2, src, 192, 0, 2, dst];
        bytes.extend(src_port.to_be_bytes());
        bytes.extend(dst_port.to_be_bytes());
        if protocol == proto::TCP {
            bytes.extend(seq.to_be_bytes());
            bytes.extend(ack.to_be_bytes());
            bytes.extend([0x50, flags, 0, 0, 0, 0, 0, 0]);
        } else {
            bytes.extend([0, 8, 0, 0]);
            bytes.resize(40, 0);
        }
        bytes
    }

    fn observe(seen: &mut Conversations, bytes: &[u8]) {
        seen.observe(&wire::parse(LinkType::RAW, bytes, 0).expect("well-formed"));
    }

    const CLIENT: (u8, u16) = (1, 4242);
    const SERVER: (u8, u16) = (2, 80);
    const THERE: ((u8, u16), (u8, u16)) = (CLIENT, SERVER);
    const BACK: ((u8, u16), (u8, u16)) = (SERVER, CLIENT);

    #[test]
    fn a_reused_port_pair_counts_again() {
        // Ends, flags, seq, ack, conversations afterwards.
        let rows = [
            (THERE, SYN, 100, 0, 1),
            (THERE, SYN, 100, 0, 1),               // retransmission
            (BACK, SYN | ACK, 700, 101, 1),        //
            (THERE, ACK, 101, 701, 1),             //
            (BACK, ACK, 900, 150, 1),              //
            (THERE, SYN, 5000, 0, 2),              // the port pair is reused
            (THERE, SYN, 5000, 0, 2),              //
            (BACK, SYN | ACK, 9000, 5001, 2),      //
            (BACK, SYN, 9000, 0, 2),               // a simultaneous open
            (BACK, SYN, 9001, 0, 3),               // the server connects
            (((1, 4243), SERVER), ACK, 77, 88, 4), // seen from the middle
            ((SERVER, (1, 4243)), SYN, 87, 0, 4),  // its SYN, late
            (((1, 4243), SERVER), SYN, 76, 0, 4),  //
            (((1, 4243), SERVER), SYN, 75, 0, 5),  //
        ];
        let mut seen = Conversations::new();
        for (at, (ends, flags, seq, ack, expected)) in rows.into_iter().enumerate() {
            observe(&mut seen, &packet(proto::TCP, ends, flags, seq, ack));
            assert_eq!(seen.tcp(), expected, "row {at}");
        }
        assert_eq!(seen.udp(), 0);
    }

    #[test]
    fn both_directions_of_udp_count_once() {
        let mut seen = Conversations::new();
        for ends in [THERE, BACK, THERE, (CLIENT, (2, 81)), ((1, 80), (2, 4242))] {
            observe(&mut seen, &packet(proto::UDP, ends, 0, 0, 0));
        }
        // UDP-Lite between the same ports is the same conversation, as in Wireshark.
        observe(&mut seen, &packet(proto::UDPLITE, BACK, 0, 0, 0));
        assert_eq!((seen.udp(), seen.tcp(), seen.uncounted()), (3, 0, 0));
        observe(&mut seen, &packet(proto::UDPLITE, ((1, 81), SERVER), 0, 0, 0));
        assert_eq!(seen.udp(), 4);
    }

    #[test]
    fn other_protocols_and_later_fragments_do_not_count() {
        let mut seen = Conversations::new();
        observe(&mut seen, &packet(132, THERE, 0, 0, 0));
        let mut later = packet(proto::UDP, THERE, 0, 0, 0);
        later[7] = 1;
        observe(&mut seen, &later);
        assert_eq!((seen.udp(), seen.tcp()), (0, 0));
        let mut first = packet(proto::UDP, THERE, 0, 0, 0);
        first[6] = 0x20;
        observe(&mut seen, &first);
        assert_eq!(seen.udp(), 1);
    }

    #[test]
    fn the_limit_holds() {
        let mut seen = Conversations::with_limit(2);
        for port in 1..=5 {
            observe(&mut seen, &packet(proto::TCP, ((1, port), SERVER), SYN, 1, 0));
            observe(&mut seen, &packet(proto::UDP, ((1, port), SERVER), 0, 0, 0));
        }
        // Packets of known conversations are counted.
        observe(&mut seen, &packet(proto::TCP, ((1, 2), SERVER), SYN, 1, 0));
        observe(&mut seen, &packet(proto::UDP, ((1, 2), SERVER), 0, 0, 0));
        assert_eq!((seen.tcp(), seen.udp(), seen.uncounted()), (2, 2, 6));
    }
}
