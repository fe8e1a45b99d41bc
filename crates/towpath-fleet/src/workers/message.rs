//! Messages between fronts and worker hosts, as bytes.
//!
//! ```text
//! "TWWK" version:u8 kind:u8 zero:u16 from:u64 to:u64 (instances; 0: all)
//!   1 offer: workers:u16 credit:u16 leaving:u8 zero:[u8; 3]          host, to all fronts
//!   2 ping:  time:u64                                                front
//!   3 pong:  time:u64                                                host
//!   4 open:  worker:u16 zero:u16 session:u32                         front
//!   5 ready: worker:u16 flags:u16 (1 events, 2 parts) session:u32    host
//!   6 data:  worker:u16 zero:u16 session:u32 number:u32 zero:u32 taken:u64 { bytes }
//!   7 close: worker:u16 flags:u16 (1 kill) session:u32               front
//!   8 gone:  worker:u16 zero:u16 session:u32 { text }                host
//! ```
//!
//! Numbers are little endian. The subject names the sender. An instance is a random number of a process, so that a process that was
//! started again, or has the name of another one, is not confused with it. The input is untrusted: lengths are checked before they are used.

use bytes::{BufMut, Bytes, BytesMut};

const MAGIC: &[u8; 4] = b"TWWK";

/// The version of the protocol. Fronts and hosts of different versions do not work together, and say so.
pub const VERSION: u8 = 1;

/// Bytes before the fields of a kind.
const HEAD: usize = 24;

/// Bytes of the text of [`Body::Gone`].
pub(super) const TEXT: usize = 256;

/// The most bytes of [`Body::Data`].
pub(super) const CHUNK: usize = 64 << 10;

/// The instance that stands for all.
pub(super) const ALL: u64 = 0;

const EVENTS: u16 = 1;
const PARTS: u16 = 2;
const KILL: u16 = 1;

/// What a message says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Body {
    /// A host is alive.
    Offer {
        /// Worker processes for each front.
        workers: u16,
        /// Messages that each of them may hold.
        credit: u16,
        /// The host ends: it takes no further messages.
        leaving: bool,
    },
    /// A front is alive.
    Ping {
        /// The front's clock.
        time: u64,
    },
    /// The answer.
    Pong {
        /// The time of the ping.
        time: u64,
    },
    /// A front wants a worker.
    Open {
        /// The worker, and the session.
        id: SessionId,
    },
    /// The program has attached.
    Ready {
        /// The worker, and the session.
        id: SessionId,
        /// It wants events of connections.
        events: bool,
        /// It takes messages in parts.
        parts: bool,
    },
    /// A piece of the records of a session.
    Data {
        /// The worker, and the session.
        id: SessionId,
        /// One more than that of the piece before.
        number: u32,
        /// Bytes that the sender has taken from the other direction.
        taken: u64,
        /// The piece.
        bytes: Bytes,
    },
    /// The session ends.
    Close {
        /// The worker, and the session.
        id: SessionId,
        /// The program is killed.
        kill: bool,
    },
    /// The session has ended.
    Gone {
        /// The worker, and the session.
        id: SessionId,
        /// The reason, for people.
        text: String,
    },
}

/// A session of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SessionId {
    /// The worker's number on its host.
    pub(super) worker: u16,
    /// The number that the front gave the session.
    pub(super) session: u32,
}

/// A message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Message {
    /// The sender's instance.
    pub(super) from: u64,
    /// The receiver's.
    pub(super) to: u64,
    /// What it says.
    pub(super) body: Body,
}

/// Why a message is not read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NotRead {
    /// It is no message of this protocol, or damaged.
    Malformed,
    /// It has another version.
    Version(u8),
}

impl Message {
    pub(super) fn to_bytes(&self) -> Bytes {
        let extra = match &self.body {
            Body::Data { bytes, .. } => bytes.len(),
            _ => TEXT,
        };
        let mut out = BytesMut::with_capacity(HEAD + 32 + extra);
        out.put_slice(MAGIC);
        out.put_u8(VERSION);
        out.put_u8(self.body.kind());
        out.put_u16_le(0);
        out.put_u64_le(self.from);
        out.put_u64_le(self.to);
        match &self.body {
            Body::Offer { workers, credit, leaving } => {
                out.put_u16_le(*workers);
                out.put_u16_le(*credit);
                out.put_u8(u8::from(*leaving));
                out.put_slice(&[0; 3]);
            }
            Body::Ping { time } | Body::Pong { time } => out.put_u64_le(*time),
            Body::Open { id } => id.put(0, &mut out),
            Body::Ready { id, events, parts } => {
                let flags = if *events { EVENTS } else { 0 } | if *parts { PARTS } else { 0 };
                id.put(flags, &mut out);
            }
            Body::Data { id, number, taken, bytes } => {
                id.put(0, &mut out);
                out.put_u32_le(*number);
                out.put_u32_le(0);
                out.put_u64_le(*taken);
                out.put_slice(bytes);
            }
            Body::Close { id, kill } => id.put(if *kill { KILL } else { 0 }, &mut out),
            Body::Gone { id, text } => {
                id.put(0, &mut out);
                out.put_slice(&text.as_bytes()[..text.floor_char_boundary(TEXT)]);
            }
        }
        out.freeze()
    }

    pub(super) fn parse(bytes: &Bytes) -> Result<Self, NotRead> {
        let head: &[u8; HEAD] = bytes.first_chunk().ok_or(NotRead::Malformed)?;
        if !head.starts_with(MAGIC) {
            return Err(NotRead::Malformed);
        }
        if head[4] != VERSION {
            return Err(NotRead::Version(head[4]));
        }
        let mut fields = Fields(&bytes[8..]);
        let (from, to) = (fields.u64()?, fields.u64()?);
        let rest = |fields: &Fields<'_>| bytes.slice(bytes.len() - fields.0.len()..);
        let body = match head[5] {
            1 => {
                let (workers, credit) = (fields.u16()?, fields.u16()?);
                let [leaving, ..] = fields.take::<4>()?;
                Body::Offer { workers, credit, leaving: leaving != 0 }
            }
            2 => Body::Ping { time: fields.u64()? },
            3 => Body::Pong { time: fields.u64()? },
            4 => Body::Open { id: fields.id()?.0 },
            5 => {
                let (id, flags) = fields.id()?;
                Body::Ready { id, events: flags & EVENTS != 0, parts: flags & PARTS != 0 }
            }
            6 => {
                let (id, number, _, taken) = (fields.id()?.0, fields.u32()?, fields.u32()?, fields.u64()?);
                let bytes = rest(&fields);
                if bytes.len() > CHUNK {
                    return Err(NotRead::Malformed);
                }
                return Ok(Self { from, to, body: Body::Data { id, number, taken, bytes } });
            }
            7 => {
                let (id, flags) = fields.id()?;
                Body::Close { id, kill: flags & KILL != 0 }
            }
            8 => {
                let id = fields.id()?.0;
                let text = rest(&fields);
                if text.len() > TEXT {
                    return Err(NotRead::Malformed);
                }
                let text = String::from_utf8_lossy(&text).replace(|c: char| c.is_control(), "?");
                return Ok(Self { from, to, body: Body::Gone { id, text } });
            }
            _ => return Err(NotRead::Malformed),
        };
        if fields.0.is_empty() { Ok(Self { from, to, body }) } else { Err(NotRead::Malformed) }
    }
}

impl Body {
    const fn kind(&self) -> u8 {
        match self {
            Self::Offer { .. } => 1,
            Self::Ping { .. } => 2,
            Self::Pong { .. } => 3,
            Self::Open { .. } => 4,
            Self::Ready { .. } => 5,
            Self::Data { .. } => 6,
            Self::Close { .. } => 7,
            Self::Gone { .. } => 8,
        }
    }
}

impl SessionId {
    fn put(self, flags: u16, out: &mut BytesMut) {
        out.put_u16_le(self.worker);
        out.put_u16_le(flags);
        out.put_u32_le(self.session);
    }
}

/// The bytes that are not read yet.
pub(super) struct Fields<'a>(pub(super) &'a [u8]);

impl Fields<'_> {
    pub(super) fn take<const N: usize>(&mut self) -> Result<[u8; N], NotRead> {
        let (field, rest) = self.0.split_first_chunk().ok_or(NotRead::Malformed)?;
        self.0 = rest;
        Ok(*field)
    }

    pub(super) fn u16(&mut self) -> Result<u16, NotRead> {
        self.take().map(u16::from_le_bytes)
    }

    pub(super) fn u32(&mut self) -> Result<u32, NotRead> {
        self.take().map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self) -> Result<u64, NotRead> {
        self.take().map(u64::from_le_bytes)
    }

    fn id(&mut self) -> Result<(SessionId, u16), NotRead> {
        let (worker, flags, session) = (self.u16()?, self.u16()?, self.u32()?);
        Ok((SessionId { worker, session }, flags))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const ID: SessionId = SessionId { worker: 3, session: 9 };

    fn all() -> Vec<Body> {
        vec![
            Body::Offer { workers: 2, credit: 8, leaving: true },
            Body::Ping { time: 1 },
            Body::Pong { time: u64::MAX },
            Body::Open { id: ID },
            Body::Ready { id: ID, events: true, parts: false },
            Body::Data { id: ID, number: 7, taken: 1 << 40, bytes: Bytes::from_static(b"records") },
            Body::Close { id: ID, kill: true },
            Body::Gone { id: ID, text: "killed".into() },
        ]
    }

    #[test]
    fn messages_are_read_as_they_were_written() {
        for body in all() {
            let message = Message { from: 5, to: 6, body };
            assert_eq!(Message::parse(&message.to_bytes()), Ok(message));
        }
    }

    #[test]
    fn lengths_are_exact_except_where_bytes_or_a_text_follow() {
        for body in all() {
            let open = matches!(body, Body::Data { .. } | Body::Gone { .. });
            let bytes = Message { from: 5, to: 6, body }.to_bytes();
            let fields = if open { HEAD + 8 } else { bytes.len() };
            for len in 0..fields {
                assert_eq!(Message::parse(&bytes.slice(..len)), Err(NotRead::Malformed), "{len}");
            }
            let longer = Bytes::from([&bytes[..], b"x"].concat());
            assert_eq!(Message::parse(&longer).is_ok(), open);
        }
        let most = Body::Data { id: ID, number: 0, taken: 0, bytes: vec![0; CHUNK + 1].into() };
        assert_eq!(
            Message::parse(&Message { from: 1, to: 1, body: most }.to_bytes()),
            Err(NotRead::Malformed)
        );
    }

    #[test]
    fn another_version_is_told_from_damage() {
        let mut bytes =
            BytesMut::from(&Message { from: 5, to: 6, body: Body::Ping { time: 1 } }.to_bytes()[..]);
        bytes[4] = 9;
        assert_eq!(Message::parse(&bytes.clone().freeze()), Err(NotRead::Version(9)));
        bytes[0] = b'X';
        assert_eq!(Message::parse(&bytes.freeze()), Err(NotRead::Malformed));
    }

    #[test]
    fn a_text_is_cut_at_a_character_and_has_no_control_characters() {
        let text = "ä".repeat(TEXT) + "\n";
        let read = Message::parse(&Message { from: 1, to: 2, body: Body::Gone { id: ID, text } }.to_bytes());
        assert_eq!(read.unwrap().body, Body::Gone { id: ID, text: "ä".repeat(TEXT / 2) });
        let read = Message::parse(
            &Message { from: 1, to: 2, body: Body::Gone { id: ID, text: "a\x1bb".into() } }.to_bytes(),
        );
        assert_eq!(read.unwrap().body, Body::Gone { id: ID, text: "a?b".into() });
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(head in prop::bool::ANY, bytes in prop::collection::vec(any::<u8>(), 0..100)) {
            let mut all = if head { [&MAGIC[..], &[VERSION]].concat() } else { Vec::new() };
            all.extend(bytes);
            let _ = Message::parse(&all.into());
        }
    }
}
