//! The state record: one state as bytes, independent of the process that wrote it.
//!
//! Snapshots consist of records. A record has everything that a restore needs: a rule is named by the hash of its content and by its
//! number, a flow name and a port by their text. Numbers are little endian.
//!
//! ```text
//! length:u16 (of what follows) version:u8 kind:u8 (0 held, or the code of an EventKind) flags:u8 proto:u8
//! id:u32 at:u64 zone:u16 src_port:u16 dst_port:u16 addresses (8 bytes, or 32 and scope:u32)
//! rule:u64 number:u32 left:u64 seen:u16 acks:2*u32 packets:2*u64 bytes:2*u64
//! [lifetime:u32] [window: 6*u64] [origin: outgoing:u8 (0, 1) port:u8 (0 none, 1 unrecorded, 2 named) [length:u8 name]]
//! name: length:u8 text (empty: default)
//! ```
//!
//! A reader skips a record of another version by its length. The input is untrusted: lengths are checked before they are used, and
//! a record has a maximum length.

use std::fmt;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use super::events::EventKind;
use super::tcp::window::{WORDS, Window};
use super::{Ends, Flow};
use towpath_wire::{Time, proto};

/// The version that is written and read.
pub const VERSION: u8 = 1;

/// Maximum length of a record in bytes.
pub const MAX_BYTES: usize = 1024;

// Flags.
const V6: u8 = 1;
const LIMITED: u8 = 2;
const REPLIED: u8 = 4;
const WINDOW: u8 = 8;
const LIFETIME: u8 = 16;
const EVERY_PACKET: u8 = 32;
const ORIGIN: u8 = 64;

/// Maximum accepted time left, a hundred days. Longer times are reduced to it.
const MAX_REMAINING: Duration = Duration::from_secs(9_000_000);

/// Maximum accepted count of packets or bytes, so that sums do not overflow.
const MAX_COUNT: u64 = 1 << 60;

/// A rule by its content.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct RuleRef {
    /// Hash of its set and its text; 0 if the state has no rule.
    pub hash: u64,
    /// Its number.
    pub number: u32,
}

impl RuleRef {
    /// A rule of this set and text: FNV-1a with 64 bits (draft-eastlake-fnv), which is the same in every process. Two rules of one
    /// file that have the same hash differ in their numbers.
    pub fn new(set: u8, text: &str, number: u32) -> Self {
        let mix = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        let hash = std::iter::once(set).chain(text.bytes()).fold(0xcbf2_9ce4_8422_2325, mix);
        Self { hash, number }
    }
}

/// Where the first packet of a state was received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordOrigin<'a> {
    /// The packet was about to be transmitted.
    pub outgoing: bool,
    /// The port that received it.
    pub port: RecordPort<'a>,
}

/// The port of a [`RecordOrigin`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecordPort<'a> {
    /// It was received on no port.
    None,
    /// The port is not recorded.
    Unrecorded,
    /// The name of the port.
    Named(&'a str),
}

/// One state. Pairs are \[forward, reverse\].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record<'a> {
    /// The change that is recorded; `None` for a state as it is.
    pub kind: Option<EventKind>,
    /// The number of the state: no other state has it until this one has ended.
    pub id: u32,
    /// Time of the record, on the clock of the engine that wrote it.
    pub at: Time,
    /// Its flow, in the direction of the first packet.
    pub flow: Flow,
    /// The rule that made it.
    pub rule: RuleRef,
    /// Its flow name.
    pub name: &'a str,
    /// A limit counts it.
    pub limited: bool,
    /// It was replied to, and is evicted last.
    pub replied: bool,
    /// Time until it expires.
    pub remaining: Duration,
    /// The phase of the connection, in the form of its protocol.
    pub seen: u16,
    /// The last acknowledgement numbers of TCP; 0 if there was none.
    pub tcp_ack: [u32; 2],
    /// Packets.
    pub packets: [u64; 2],
    /// Bytes.
    pub bytes: [u64; 2],
    /// Its own lifetime in seconds.
    pub lifetime: Option<u32>,
    /// Every packet sets the lifetime (`state-timeout`).
    pub every_packet: bool,
    /// The TCP windows, with strict tracking.
    pub window: Option<[u64; WORDS]>,
    /// Where its first packet was received, if it is recorded.
    pub origin: Option<RecordOrigin<'a>>,
}

/// Why bytes are not a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecordError {
    /// The bytes end before the record does.
    Truncated,
    /// The record has another version.
    Version(u8),
    /// The contents are invalid.
    Malformed,
}

impl fmt::Display for RecordError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Truncated => f.write_str("the record is truncated"),
            Self::Version(version) => {
                write!(f, "record version {version} is not supported ({VERSION} is)")
            }
            Self::Malformed => f.write_str("the record is malformed"),
        }
    }
}

impl std::error::Error for RecordError {}

impl<'a> Record<'a> {
    /// Appends the record to `out`. A port name or a flow name of more than 255 bytes is left out; rules and configuration have no
    /// such names.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let begin = out.len();
        out.extend([0; 2]);
        let flag = |flag: u8, on: bool| if on { flag } else { 0 };
        let flags = flag(V6, matches!(self.flow.ends, Ends::V6(..)))
            | flag(LIMITED, self.limited)
            | flag(REPLIED, self.replied)
            | flag(WINDOW, self.window.is_some())
            | flag(LIFETIME, self.lifetime.is_some())
            | flag(EVERY_PACKET, self.every_packet)
            | flag(ORIGIN, self.origin.is_some());
        let Flow { ends, proto, src_port, dst_port, zone } = self.flow;
        out.extend([VERSION, self.kind.map_or(0, |kind| kind as u8), flags, proto]);
        out.extend(self.id.to_le_bytes());
        out.extend(self.at.as_nanos().to_le_bytes());
        [zone, src_port, dst_port].iter().for_each(|n| out.extend(n.to_le_bytes()));
        match ends {
            Ends::V4(src, dst) => [src, dst].iter().for_each(|ip| out.extend(ip.octets())),
            Ends::V6(src, dst, scope) => {
                [src, dst].iter().for_each(|ip| out.extend(ip.octets()));
                out.extend(scope.to_le_bytes());
            }
        }
        out.extend(self.rule.hash.to_le_bytes());
        out.extend(self.rule.number.to_le_bytes());
        out.extend((self.remaining.min(MAX_REMAINING).as_nanos() as u64).to_le_bytes());
        out.extend(self.seen.to_le_bytes());
        self.tcp_ack.iter().for_each(|n| out.extend(n.to_le_bytes()));
        self.packets.iter().chain(&self.bytes).for_each(|n| out.extend(n.min(&MAX_COUNT).to_le_bytes()));
        self.lifetime.iter().for_each(|n| out.extend(n.to_le_bytes()));
        self.window.iter().flatten().for_each(|n| out.extend(n.to_le_bytes()));
        let text = |text: &str, out: &mut Vec<u8>| match u8::try_from(text.len()) {
            Ok(length) => {
                out.push(length);
                out.extend(text.as_bytes());
            }
            Err(_) => out.push(0),
        };
        if let Some(RecordOrigin { outgoing, port }) = self.origin {
            out.push(outgoing.into());
            match port {
                RecordPort::None => out.push(0),
                RecordPort::Unrecorded => out.push(1),
                RecordPort::Named(name) => {
                    out.push(2);
                    text(name, out);
                }
            }
        }
        text(if self.name == "default" { "" } else { self.name }, out);
        // At most 2 + 166 + 48 + 2 * 258 bytes.
        let length = (out.len() - begin - 2) as u16;
        out[begin..begin + 2].copy_from_slice(&length.to_le_bytes());
    }

    /// Returns true if both sides of a TCP connection have closed it, or one has reset it.
    pub fn has_closed(&self) -> bool {
        // Three bits for each direction: FIN 1, SYN 2, RST 4.
        const FINS: u16 = 0o11;
        const RSTS: u16 = 0o44;
        self.flow.proto == proto::TCP && (self.seen & FINS == FINS || self.seen & RSTS != 0)
    }

    /// Returns true if strict tracking has seen segments of both sides that fit together.
    pub fn is_tracked(&self) -> bool {
        self.window.is_some_and(|words| Window::from_words(words).is_agreed())
    }

    /// Reads the record at the beginning of `bytes`. Returns it with its length.
    ///
    /// # Errors
    /// The bytes are not a record of this version.
    pub fn decode(bytes: &'a [u8]) -> Result<(Self, usize), RecordError> {
        let length = skip(bytes)?;
        let mut at = Reader { bytes: &bytes[2..length] };
        let record = at.record()?;
        if at.bytes.is_empty() { Ok((record, length)) } else { Err(RecordError::Malformed) }
    }
}

/// The length of the record at the beginning of `bytes`, of any version.
///
/// # Errors
/// The bytes are not a whole record.
pub fn skip(bytes: &[u8]) -> Result<usize, RecordError> {
    let length = bytes.first_chunk().ok_or(RecordError::Truncated)?;
    let length = 2 + usize::from(u16::from_le_bytes(*length));
    match length {
        3..=MAX_BYTES if length <= bytes.len() => Ok(length),
        3..=MAX_BYTES => Err(RecordError::Truncated),
        _ => Err(RecordError::Malformed),
    }
}

struct Reader<'a> {
    bytes: &'a [u8],
}

impl<'a> Reader<'a> {
    #[inline(always)]
    fn take<const N: usize>(&mut self) -> Result<[u8; N], RecordError> {
        let (taken, rest) = self.bytes.split_first_chunk().ok_or(RecordError::Malformed)?;
        self.bytes = rest;
        Ok(*taken)
    }

    fn u8(&mut self) -> Result<u8, RecordError> {
        self.take().map(|[byte]| byte)
    }

    fn flag(&mut self) -> Result<bool, RecordError> {
        match self.u8()? {
            flag @ 0..=1 => Ok(flag == 1),
            _ => Err(RecordError::Malformed),
        }
    }

    fn u16(&mut self) -> Result<u16, RecordError> {
        self.take().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Result<u32, RecordError> {
        self.take().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, RecordError> {
        self.take().map(u64::from_le_bytes)
    }

    fn count(&mut self) -> Result<u64, RecordError> {
        self.u64().and_then(|n| if n > MAX_COUNT { Err(RecordError::Malformed) } else { Ok(n) })
    }

    fn text(&mut self) -> Result<&'a str, RecordError> {
        let length = self.u8()?.into();
        let (text, rest) = self.bytes.split_at_checked(length).ok_or(RecordError::Malformed)?;
        self.bytes = rest;
        std::str::from_utf8(text).map_err(|_| RecordError::Malformed)
    }

    fn record(&mut self) -> Result<Record<'a>, RecordError> {
        let version = self.u8()?;
        if version != VERSION {
            return Err(RecordError::Version(version));
        }
        let kind = match self.u8()? {
            0 => None,
            code => match EventKind::from_bits(code) {
                Some(kind) if !kind.is_of_table() => Some(kind),
                _ => return Err(RecordError::Malformed),
            },
        };
        let flags = self.u8()?;
        let has = |flag| flags & flag != 0;
        let proto = self.u8()?;
        // EVERY_PACKET needs LIFETIME, and only TCP has windows.
        let unfit = has(EVERY_PACKET) && !has(LIFETIME) || has(WINDOW) && proto != proto::TCP;
        if has(!(V6 | LIMITED | REPLIED | WINDOW | LIFETIME | EVERY_PACKET | ORIGIN)) || unfit {
            return Err(RecordError::Malformed);
        }
        let (id, at) = (self.u32()?, Time::from_nanos(self.u64()?));
        let (zone, src_port, dst_port) = (self.u16()?, self.u16()?, self.u16()?);
        let ends = match has(V6) {
            true => {
                let (src, dst) = (self.take::<16>()?, self.take::<16>()?);
                Ends::V6(Ipv6Addr::from(src), Ipv6Addr::from(dst), self.u32()?)
            }
            false => Ends::V4(Ipv4Addr::from(self.take::<4>()?), Ipv4Addr::from(self.take::<4>()?)),
        };
        Ok(Record {
            kind,
            id,
            at,
            flow: Flow { ends, proto, src_port, dst_port, zone },
            rule: RuleRef { hash: self.u64()?, number: self.u32()? },
            limited: has(LIMITED),
            replied: has(REPLIED),
            remaining: Duration::from_nanos(self.u64()?).min(MAX_REMAINING),
            seen: self.u16()?,
            tcp_ack: [self.u32()?, self.u32()?],
            packets: [self.count()?, self.count()?],
            bytes: [self.count()?, self.count()?],
            lifetime: if has(LIFETIME) { Some(self.u32()?) } else { None },
            every_packet: has(EVERY_PACKET),
            window: match has(WINDOW) {
                true => {
                    let mut words = [0; WORDS];
                    for word in &mut words {
                        *word = self.u64()?;
                    }
                    Some(words)
                }
                false => None,
            },
            origin: if has(ORIGIN) { Some(self.origin()?) } else { None },
            name: match self.text()? {
                "" => "default",
                name => name,
            },
        })
    }

    fn origin(&mut self) -> Result<RecordOrigin<'a>, RecordError> {
        let outgoing = self.flag()?;
        let port = match self.u8()? {
            0 => RecordPort::None,
            1 => RecordPort::Unrecorded,
            2 => RecordPort::Named(self.text()?),
            _ => return Err(RecordError::Malformed),
        };
        Ok(RecordOrigin { outgoing, port })
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use proptest::prelude::*;

    use super::*;

    type Parts =
        ((bool, [u8; 32], u32, u8), [u16; 4], [u32; 4], [u64; 4], u64, Option<[u64; WORDS]>, u8, String);

    fn parts() -> impl Strategy<Value = Parts> {
        let count = 0..=MAX_COUNT;
        (
            (any::<bool>(), any::<[u8; 32]>(), any::<u32>(), prop_oneof![Just(6_u8), any::<u8>()]),
            any::<[u16; 4]>(),
            any::<[u32; 4]>(),
            [count.clone(), count.clone(), count.clone(), count],
            any::<u64>(),
            any::<Option<[u64; WORDS]>>(),
            any::<u8>(),
            "[a-z]{0,63}",
        )
    }

    fn record(parts: &Parts) -> Record<'_> {
        let (
            (v6, address, scope, proto),
            [zone, src_port, dst_port, seen],
            words,
            counts,
            any,
            window,
            bits,
            name,
        ) = parts;
        let (src, dst) = address.split_at(16);
        let ends = match v6 {
            true => {
                let ip = |bytes: &[u8]| Ipv6Addr::from(<[u8; 16]>::try_from(bytes).unwrap());
                Ends::V6(ip(src), ip(dst), *scope)
            }
            false => {
                let ip = |bytes: &[u8]| Ipv4Addr::from(<[u8; 4]>::try_from(&bytes[..4]).unwrap());
                Ends::V4(ip(src), ip(dst))
            }
        };
        let port =
            [RecordPort::None, RecordPort::Unrecorded, RecordPort::Named(name)][usize::from(bits >> 2) % 3];
        let lifetime = (bits & 1 != 0).then_some(words[0]);
        Record {
            kind: [None, Some(EventKind::Created), Some(EventKind::Evicted)][usize::from(bits >> 4) % 3],
            id: words[1],
            at: Time::from_nanos(*any),
            flow: Flow { ends, proto: *proto, src_port: *src_port, dst_port: *dst_port, zone: *zone },
            rule: RuleRef { hash: any.rotate_left(7), number: words[2] },
            name: if name.is_empty() { "default" } else { name },
            limited: bits & 2 != 0,
            replied: bits & 4 != 0,
            remaining: Duration::from_nanos(any % MAX_REMAINING.as_nanos() as u64),
            seen: *seen,
            tcp_ack: [words[2], words[3]],
            packets: [counts[0], counts[1]],
            bytes: [counts[2], counts[3]],
            lifetime,
            every_packet: lifetime.is_some() && bits & 8 != 0,
            window: window.filter(|_| *proto == proto::TCP),
            origin: (bits & 64 != 0).then_some(RecordOrigin { outgoing: bits & 1 != 0, port }),
        }
    }

    proptest! {
        #[test]
        fn a_record_reads_back(parts in parts(), rest in any::<[u8; 3]>()) {
            let record = record(&parts);
            let mut bytes = Vec::new();
            record.encode(&mut bytes);
            let length = bytes.len();
            prop_assert!(length <= MAX_BYTES);
            bytes.extend(rest);
            prop_assert_eq!(Record::decode(&bytes), Ok((record, length)));
            prop_assert_eq!(skip(&bytes), Ok(length));
            for cut in 0..length {
                prop_assert_eq!(Record::decode(&bytes[..cut]), Err(RecordError::Truncated));
            }
        }

        /// Damaged bytes never cause a panic. A record that is decoded from them can be encoded and decoded again.
        #[test]
        fn other_bytes_are_refused_or_read(parts in parts(), changes in prop::collection::vec(any::<(u16, u8)>(), 1..4)) {
            let mut bytes = Vec::new();
            record(&parts).encode(&mut bytes);
            for (at, bits) in changes {
                let at = usize::from(at) % bytes.len();
                bytes[at] ^= bits;
            }
            if let Ok((read, length)) = Record::decode(&bytes) {
                prop_assert!(length <= bytes.len());
                let mut again = Vec::new();
                read.encode(&mut again);
                prop_assert_eq!(Record::decode(&again), Ok((read, again.len())));
            }
        }
    }

    #[test]
    fn lengths_and_versions_are_checked() {
        let parts =
            ((false, [9; 32], 0, 6), [1; 4], [2; 4], [3; 4], 4, Some([5; WORDS]), 0xff, "web".to_owned());
        let mut good = Vec::new();
        record(&parts).encode(&mut good);
        let with = |at: usize, byte: u8| {
            let mut bytes = good.clone();
            bytes[at] = byte;
            bytes.resize(70_000, 0);
            Record::decode(&bytes).map(|_| ())
        };
        assert_eq!(with(2, VERSION), Ok(()));
        for version in [0, VERSION + 1, 255] {
            assert_eq!(with(2, version), Err(RecordError::Version(version)));
        }
        // Too long for any record, no content, longer and shorter than the content.
        assert_eq!(with(1, 0xff), Err(RecordError::Malformed));
        assert_eq!(Record::decode(&[0, 0, 0]), Err(RecordError::Malformed));
        assert_eq!(with(0, good[0] + 1), Err(RecordError::Malformed));
        assert_eq!(with(0, good[0] - 1), Err(RecordError::Malformed));
        // Kinds of the table and unknown ones, an unknown flag, windows of another protocol.
        for (at, byte) in [(3, 8), (3, 200), (4, 0xff), (5, 17)] {
            assert_eq!(with(at, byte), Err(RecordError::Malformed), "{at} {byte}");
        }
    }

    #[test]
    fn a_rule_is_known_by_set_and_text() {
        let rule = RuleRef::new(0, "allow ip from any to any", 100);
        // The value of FNV-1a: files of another process and of another version have the same.
        assert_eq!(RuleRef::new(97, "", 0).hash, 0xaf63_dc4c_8601_ec8c);
        assert_eq!(RuleRef::new(0, "allow ip from any to any", 100), rule);
        assert_ne!(RuleRef::new(1, "allow ip from any to any", 100).hash, rule.hash);
        assert_ne!(RuleRef::new(0, "allow ip from any to me", 100).hash, rule.hash);
    }
}
