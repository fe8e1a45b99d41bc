//! Messages on a channel's socket: hello, welcome, lane memory, doorbell, one-shot. Fixed layouts; parsers without
//! IO.
//!
//! A hello and a welcome start with magic and version in every version of the ABI, so that sides of different
//! versions can report it.

use crate::shm::abi::{Layout, MAGIC, VERSION};
use crate::shm::geometry::Geometry;
use crate::shm::park::Fences;
use crate::shm::seq::Seq;

/// Bytes of a hello.
pub(crate) const HELLO: usize = 64;
/// Bytes of a welcome: the fixed part, then a human-readable text.
pub(crate) const WELCOME: usize = 64 + TEXT;
const TEXT: usize = 448;
/// Hello flag: no loss records, like `NETLINK_NO_ENOBUFS` of netlink(7).
const NO_GAPS: u8 = 1;
/// Hello flag: this process is registered for membarrier(2), and calls it before it sleeps.
const MEMBARRIER: u8 = 2;
/// Hello flag: this worker wants connection events.
const EVENTS: u8 = 4;
/// Hello flag: this worker takes messages in parts.
const PARTS: u8 = 8;
/// Welcome flag: the engine is registered for membarrier(2), too, so neither side executes a fence after a burst.
const AGREED_MEMBARRIER: u8 = 1;
/// Welcome flag: the engine receives messages of this client.
const MESSAGES: u8 = 2;
/// Bytes of a notice.
pub(crate) const NOTICE: usize = 16;
/// Bytes of an offer: the longest message after the welcome.
pub(crate) const OFFER: usize = 64;
const DOORBELL: u16 = 1;
const ONESHOT: u16 = 2;
const RENEW: u16 = 5;
/// Doorbell of earlier clients.
const FULL: u16 = 4;
/// An [`Offer`].
const RINGS: u16 = 3;

/// First message of a client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Hello {
    pub(crate) version: u16,
    /// Whether the client wants loss records.
    pub(crate) gaps: bool,
    /// Whether a worker wants connection events.
    pub(crate) events: bool,
    /// Whether a worker takes messages in parts.
    pub(crate) parts: bool,
    /// Scheme for the fences that the client supports.
    pub(crate) fences: Fences,
    /// Name of the client, for logs and tables; at most 32 bytes.
    pub(crate) name: String,
}

/// An invalid hello, welcome or notice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NotOurs;

impl Hello {
    pub(crate) fn emit(&self) -> [u8; HELLO] {
        let mut out = [0; HELLO];
        out[..4].copy_from_slice(&MAGIC.to_le_bytes());
        out[4..6].copy_from_slice(&self.version.to_le_bytes());
        out[6] = if self.gaps { 0 } else { NO_GAPS }
            | if self.events { EVENTS } else { 0 }
            | if self.parts { PARTS } else { 0 }
            | fence_flag(self.fences, MEMBARRIER);
        let name = &self.name.as_bytes()[..self.name.len().min(32)];
        out[32..32 + name.len()].copy_from_slice(name);
        out
    }

    /// Parses a hello. The caller checks the version; the rest of another version's hello is not parsed.
    pub(crate) fn parse(bytes: &[u8]) -> Result<Self, NotOurs> {
        let version = parse_head(bytes)?;
        if version != VERSION {
            let (gaps, events, parts, fences) = (true, false, false, Fences::Both);
            return Ok(Self { version, gaps, events, parts, fences, name: String::new() });
        }
        let flags = bytes.get(6).copied().ok_or(NotOurs)?;
        // An undefined flag requests something that this engine does not support.
        if flags & !(NO_GAPS | MEMBARRIER | EVENTS | PARTS) != 0 {
            return Err(NotOurs);
        }
        let name: &[u8; 32] = bytes.get(32..64).and_then(|b| b.try_into().ok()).ok_or(NotOurs)?;
        // A name appears in logs and tables, so characters that could move a terminal's cursor become `?`.
        let name =
            name.iter().take_while(|b| **b != 0).map(|b| if b.is_ascii_graphic() { *b as char } else { '?' });
        let (gaps, fences) = (flags & NO_GAPS == 0, fences_of(flags, MEMBARRIER));
        let (events, parts) = (flags & EVENTS != 0, flags & PARTS != 0);
        Ok(Self { version, gaps, events, parts, fences, name: name.collect() })
    }
}

fn fence_flag(fences: Fences, flag: u8) -> u8 {
    if fences == Fences::Membarrier { flag } else { 0 }
}

fn fences_of(flags: u8, flag: u8) -> Fences {
    if flags & flag == 0 { Fences::Both } else { Fences::Membarrier }
}

/// Returns true if the message begins as a hello. A notice does not.
pub(crate) fn is_hello(bytes: &[u8]) -> bool {
    bytes.starts_with(&MAGIC.to_le_bytes())
}

fn parse_head(bytes: &[u8]) -> Result<u16, NotOurs> {
    let (magic, rest) = bytes.split_first_chunk::<4>().ok_or(NotOurs)?;
    let version = rest.first_chunk::<2>().ok_or(NotOurs)?;
    if u32::from_le_bytes(*magic) != MAGIC {
        return Err(NotOurs);
    }
    Ok(u16::from_le_bytes(*version))
}

/// Answer of an engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Welcome {
    pub(crate) version: u16,
    pub(crate) answer: Reply,
}

/// Parameters of a channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Terms {
    pub(crate) layout: Layout,
    /// Number of lanes. The memory of all but the first comes in offers.
    pub(crate) lanes: u32,
    /// Largest one-shot message in bytes.
    pub(crate) oneshot_max: u64,
    /// Longest replacement, in bytes.
    pub(crate) replacement_max: u32,
    /// Agreed scheme for the fences.
    pub(crate) fences: Fences,
    /// Whether the engine receives messages.
    pub(crate) messages: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Reply {
    /// Attached; the descriptors come with this message.
    Attached(Terms),
    /// Refused, with a human-readable text.
    Refused(Refusal, String),
}

/// Why an engine refuses a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// Another ABI version.
    Version,
    /// The allow-list does not contain the user.
    NotPermitted,
    /// A quota is exceeded.
    Limit,
    /// The set-up failed.
    Failed,
}

impl Welcome {
    pub(crate) fn emit(&self) -> [u8; WELCOME] {
        let mut out = [0; WELCOME];
        out[..4].copy_from_slice(&MAGIC.to_le_bytes());
        out[4..6].copy_from_slice(&self.version.to_le_bytes());
        match &self.answer {
            Reply::Attached(Terms { layout, lanes, oneshot_max, replacement_max, fences, messages }) => {
                out[7] = fence_flag(*fences, AGREED_MEMBARRIER) | if *messages { MESSAGES } else { 0 };
                out[8..12].copy_from_slice(&lanes.to_le_bytes());
                emit_layout(layout, &mut out[16..]);
                out[52..56].copy_from_slice(&replacement_max.to_le_bytes());
                out[56..64].copy_from_slice(&oneshot_max.to_le_bytes());
            }
            Reply::Refused(why, text) => {
                out[6] = match why {
                    Refusal::Version => 1,
                    Refusal::NotPermitted => 2,
                    Refusal::Limit => 3,
                    Refusal::Failed => 4,
                };
                let mut end = text.len().min(TEXT);
                while !text.is_char_boundary(end) {
                    end -= 1;
                }
                out[64..64 + end].copy_from_slice(&text.as_bytes()[..end]);
            }
        }
        out
    }

    pub(crate) fn parse(bytes: &[u8]) -> Result<Self, NotOurs> {
        let version = parse_head(bytes)?;
        let text = |at: usize| {
            let text = bytes.get(at..).unwrap_or_default();
            let text = text.split(|b| *b == 0).next().unwrap_or_default();
            String::from_utf8_lossy(text).chars().filter(|c| !c.is_control()).collect()
        };
        let answer = match bytes.get(6).copied().ok_or(NotOurs)? {
            _ if version != VERSION => Reply::Refused(Refusal::Version, String::new()),
            0 => {
                let layout = parse_layout(bytes)?;
                let lanes = bytes.get(8..).and_then(<[u8]>::first_chunk).ok_or(NotOurs)?;
                let lanes = u32::from_le_bytes(*lanes);
                let replacement_max = bytes.get(52..).and_then(<[u8]>::first_chunk).ok_or(NotOurs)?;
                let oneshot_max = bytes.get(56..).and_then(<[u8]>::first_chunk).ok_or(NotOurs)?;
                let fences = fences_of(bytes[7], AGREED_MEMBARRIER);
                Reply::Attached(Terms {
                    layout,
                    lanes,
                    oneshot_max: u64::from_le_bytes(*oneshot_max),
                    replacement_max: u32::from_le_bytes(*replacement_max),
                    fences,
                    messages: bytes[7] & MESSAGES != 0,
                })
            }
            1 => Reply::Refused(Refusal::Version, text(64)),
            2 => Reply::Refused(Refusal::NotPermitted, text(64)),
            3 => Reply::Refused(Refusal::Limit, text(64)),
            _ => Reply::Refused(Refusal::Failed, text(64)),
        };
        Ok(Self { version, answer })
    }
}

/// Emits the two geometries and the number of records.
fn emit_layout(layout: &Layout, out: &mut [u8]) {
    let words = [&layout.rx, &layout.tx]
        .into_iter()
        .flat_map(|g| [g.block_size, g.block_nr, g.frame_size, g.frame_nr])
        .chain([layout.records]);
    for (at, word) in out.chunks_exact_mut(4).zip(words) {
        at.copy_from_slice(&word.to_le_bytes());
    }
}

fn parse_layout(bytes: &[u8]) -> Result<Layout, NotOurs> {
    let mut words = bytes.get(16..52).ok_or(NotOurs)?.as_chunks::<4>().0.iter();
    let mut word = || words.next().map(|w| u32::from_le_bytes(*w)).ok_or(NotOurs);
    let mut geometry =
        || Ok(Geometry { block_size: word()?, block_nr: word()?, frame_size: word()?, frame_nr: word()? });
    let (rx, tx) = (geometry()?, geometry()?);
    Ok(Layout { rx, tx, records: word()? })
}

/// The memory of one lane, for lanes 1 and above. Its descriptors come with this message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Offer {
    pub(crate) lane: u32,
    pub(crate) layout: Layout,
}

impl Offer {
    pub(crate) fn emit(self) -> [u8; OFFER] {
        let mut out = [0; OFFER];
        out[..2].copy_from_slice(&RINGS.to_le_bytes());
        out[4..8].copy_from_slice(&self.lane.to_le_bytes());
        emit_layout(&self.layout, &mut out[16..]);
        out
    }

    pub(crate) fn parse(bytes: &[u8]) -> Result<Self, NotOurs> {
        let bytes: &[u8; OFFER] = bytes.try_into().map_err(|_| NotOurs)?;
        let [kind, kind2, _, _, l0, l1, l2, l3, ..] = *bytes;
        if u16::from_le_bytes([kind, kind2]) != RINGS {
            return Err(NotOurs);
        }
        Ok(Self { lane: u32::from_le_bytes([l0, l1, l2, l3]), layout: parse_layout(bytes)? })
    }
}

/// A message after the welcome, in either direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Notice {
    /// Wake-up: check the lanes.
    Doorbell,
    /// The payload of message `seq`, in a memfd of `len` bytes.
    OneShot { seq: Seq, len: u64 },
    /// To the client: send a hello again; new memory follows, of this engine or of its successor. The client has no frames.
    Renew,
}

impl Notice {
    pub(crate) fn emit(self) -> [u8; NOTICE] {
        let (kind, seq, len) = match self {
            Self::Doorbell => (DOORBELL, 0, 0),
            Self::OneShot { seq, len } => (ONESHOT, seq.0, len),
            Self::Renew => (RENEW, 0, 0),
        };
        let mut out = [0; NOTICE];
        out[..2].copy_from_slice(&kind.to_le_bytes());
        out[4..8].copy_from_slice(&seq.to_le_bytes());
        out[8..].copy_from_slice(&len.to_le_bytes());
        out
    }

    pub(crate) fn parse(bytes: &[u8]) -> Result<Self, NotOurs> {
        let (kind, rest) = bytes.split_first_chunk::<2>().ok_or(NotOurs)?;
        let (_, rest) = rest.split_first_chunk::<2>().ok_or(NotOurs)?;
        let (seq, rest) = rest.split_first_chunk::<4>().ok_or(NotOurs)?;
        let len = rest.try_into().map_err(|_| NotOurs)?;
        match u16::from_le_bytes(*kind) {
            DOORBELL | FULL => Ok(Self::Doorbell),
            ONESHOT => Ok(Self::OneShot { seq: Seq(u32::from_le_bytes(*seq)), len: u64::from_le_bytes(len) }),
            RENEW => Ok(Self::Renew),
            _ => Err(NotOurs),
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn messages_survive_emit_and_parse() {
        let rows =
            [(true, true, Fences::Both), (false, false, Fences::Both), (true, false, Fences::Membarrier)];
        for (gaps, events, fences) in rows {
            let hello =
                Hello { version: VERSION, gaps, events, parts: gaps != events, fences, name: "ids-1".into() };
            assert_eq!(Hello::parse(&hello.emit()), Ok(hello));
        }
        let layout = Layout { rx: Geometry::RX, tx: Geometry::TX, records: 256 };
        for answer in [
            Reply::Attached(Terms {
                layout,
                lanes: 1,
                oneshot_max: 1 << 40,
                replacement_max: 0,
                fences: Fences::Both,
                messages: true,
            }),
            Reply::Attached(Terms {
                layout,
                lanes: 64,
                oneshot_max: 0,
                replacement_max: 77,
                fences: Fences::Membarrier,
                messages: false,
            }),
            Reply::Refused(Refusal::NotPermitted, "uid 7 may not".into()),
            Reply::Refused(Refusal::Limit, "ä".repeat(TEXT / 2)),
        ] {
            let welcome = Welcome { version: VERSION, answer };
            assert_eq!(Welcome::parse(&welcome.emit()), Ok(welcome));
        }
        let offer = Offer { lane: 7, layout };
        assert_eq!(Offer::parse(&offer.emit()), Ok(offer));
        assert_eq!(Offer::parse(&offer.emit()[1..]), Err(NotOurs));
        for notice in [Notice::Doorbell, Notice::Renew, Notice::OneShot { seq: Seq(9), len: 1 << 33 }] {
            assert_eq!(Notice::parse(&notice.emit()), Ok(notice));
        }
    }

    #[test]
    fn another_version_is_reported_and_not_parsed() {
        let theirs = Hello {
            version: 9,
            gaps: true,
            events: false,
            parts: false,
            fences: Fences::Both,
            name: "x".into(),
        }
        .emit();
        assert_eq!(
            Hello::parse(&theirs[..6]),
            Ok(Hello {
                version: 9,
                gaps: true,
                events: false,
                parts: false,
                fences: Fences::Both,
                name: String::new()
            })
        );
        let mut theirs =
            Welcome { version: 9, answer: Reply::Refused(Refusal::Failed, String::new()) }.emit();
        theirs[6] = 0;
        let answer = Reply::Refused(Refusal::Version, String::new());
        assert_eq!(Welcome::parse(&theirs), Ok(Welcome { version: 9, answer }));
    }

    proptest! {
        #[test]
        fn parsers_never_panic(bytes: Vec<u8>, ours: bool) {
            let mut bytes = bytes;
            if ours && bytes.len() >= 6 {
                bytes[..4].copy_from_slice(&MAGIC.to_le_bytes());
                bytes[4..6].copy_from_slice(&VERSION.to_le_bytes());
            }
            let _ = Hello::parse(&bytes);
            let _ = Welcome::parse(&bytes);
            let _ = Notice::parse(&bytes);
            let _ = Offer::parse(&bytes);
        }
    }
}
