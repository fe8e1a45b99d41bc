//! A message of a connection, as a worker sees it.

#[cfg(doc)]
use crate::Worker;
use crate::client::{Frame, Ticket};
use crate::lane::batch::Part;
use crate::shm::header::{Header, Kind};
use crate::shm::seq::Seq;

/// A message that this worker has. Its bytes stay in the ring, see [`Worker::bytes`].
#[derive(Debug)]
#[must_use = "a message that is never done is never released"]
pub struct Message {
    pub(super) frame: Frame,
}

/// Identifies a connection of the multiplexor. Never identifies a later connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Connection {
    /// Index.
    pub index: u32,
    /// Number of this connection among those with the same index.
    pub generation: u32,
}

/// A message in the ring, see [`Worker::serve`].
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    pub(super) part: Part<'a>,
    pub(super) connection: Connection,
    pub(super) time: u64,
    pub(super) piece: Piece,
}

/// Which part of a message a frame has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Piece {
    /// From 1; 0: the whole message.
    number: u32,
    more: bool,
    cut: bool,
}

impl Piece {
    pub(super) fn of(header: &Header) -> Self {
        let number = if header.kind == Kind::MESSAGE { 0 } else { header.wire_len };
        Self { number, more: header.kind == Kind::MESSAGE_PART, cut: header.kind == Kind::MESSAGE_CUT }
    }
}

impl<'a> View<'a> {
    /// As [`Message::part`].
    #[must_use]
    pub const fn part(&self) -> u32 {
        self.piece.number
    }

    /// As [`Message::more`]. The answer is then a part of the answer to the message.
    #[must_use]
    pub const fn more(&self) -> bool {
        self.piece.more
    }

    /// As [`Message::is_cut`].
    #[must_use]
    pub const fn is_cut(&self) -> bool {
        self.piece.cut
    }

    /// All bytes of the message, or of the part.
    #[must_use]
    pub const fn bytes(&self) -> &'a [u8] {
        self.part.bytes
    }

    /// The bytes that the framing leaves after it strips header or delimiter; all bytes without stripping.
    #[must_use]
    pub fn payload(&self) -> &'a [u8] {
        stripped(self.part.bytes, self.part.skip, self.part.trim)
    }

    /// Connection of the message.
    #[must_use]
    pub const fn connection(&self) -> Connection {
        self.connection
    }

    /// Time of the delivery to this process, in nanoseconds since the epoch.
    #[must_use]
    pub const fn time(&self) -> u64 {
        self.time
    }

    /// The framing's mark; 0 without.
    #[must_use]
    pub const fn mark(&self) -> u32 {
        self.part.mark
    }

    /// Hash of the ordering key; 0 without.
    #[must_use]
    pub const fn hash(&self) -> u32 {
        self.part.hash
    }
}

impl Message {
    /// Number of the part of a message, from 1; 0 for a whole message. A multiplexor with `body=stream` delivers long
    /// messages in parts. All parts of a message come to this worker, in order; parts of messages of other connections
    /// may come between them. The next ones come when this one is done.
    ///
    /// A message whose first part is done is never given to another worker. [`Worker::reply_part`] and
    /// [`Worker::reply`] of a part answer the message.
    #[must_use]
    pub fn part(&self) -> u32 {
        Piece::of(self.frame.header()).number
    }

    /// Returns true if another part of this message follows.
    #[must_use]
    pub fn more(&self) -> bool {
        Piece::of(self.frame.header()).more
    }

    /// Returns true if the connection ended before the last part of this message: no part follows. It has no bytes.
    #[must_use]
    pub fn is_cut(&self) -> bool {
        Piece::of(self.frame.header()).cut
    }

    /// Connection of the message.
    #[must_use]
    pub fn connection(&self) -> Connection {
        connection(&self.frame)
    }

    /// Time when the message was complete, in nanoseconds since the epoch.
    #[must_use]
    pub fn time(&self) -> u64 {
        self.frame.header().time
    }

    /// The framing's mark; 0 without.
    #[must_use]
    pub fn mark(&self) -> u32 {
        self.frame.header().mark
    }

    /// Hash of the ordering key; 0 without.
    #[must_use]
    pub fn hash(&self) -> u32 {
        self.frame.header().hash
    }

    /// Sequence number of the message's frame.
    #[must_use]
    pub fn seq(&self) -> Seq {
        self.frame.seq()
    }

    /// Converts the message into a ticket; [`Worker::recall`] returns it.
    #[must_use]
    pub fn into_ticket(self) -> Ticket {
        self.frame.into_ticket()
    }
}

pub(super) fn connection(frame: &Frame) -> Connection {
    let header = frame.header();
    Connection { index: header.port, generation: header.group }
}

pub(super) fn stripped(bytes: &[u8], skip: u16, trim: u16) -> &[u8] {
    let end = bytes.len() - usize::from(trim).min(bytes.len());
    &bytes[usize::from(skip).min(end)..end]
}
