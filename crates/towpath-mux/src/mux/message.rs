//! A message on its way from a connection to a worker.

use bytes::Bytes;

use super::psock;
use crate::Time;

/// Names one message: the connection with its generation, and which of its messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ticket {
    /// The connection that it came from.
    pub psock: psock::Id,
    /// Which of that connection's messages, from 0.
    pub number: u64,
}

/// What a worker says about messages that it holds, see [`super::Mux::handle_completions`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Completion {
    /// This answers it: [`super::Mux::reply`].
    Reply(Ticket, Bytes),
    /// It is done: [`super::Mux::done`].
    Done(Ticket),
}

/// A whole message. Cheap to clone: clones share its bytes.
#[derive(Clone, Debug)]
pub struct Message {
    pub(super) ticket: Ticket,
    pub(super) bytes: Bytes,
    pub(super) skip: usize,
    pub(super) trim: usize,
    pub(super) mark: u32,
    pub(super) hash: u32,
    pub(super) received: Time,
    /// Bytes that it is counted with: its share of the buffer it lies in.
    pub(super) charge: usize,
    /// How many workers died with it.
    pub(super) deaths: u8,
}

/// A message where it lies, in the buffer it was read into.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    pub(super) ticket: Ticket,
    pub(super) bytes: &'a [u8],
    pub(super) skip: usize,
    pub(super) trim: usize,
    pub(super) mark: u32,
    pub(super) hash: u32,
    pub(super) received: Time,
}

impl<'a> View<'a> {
    /// What a reply is addressed with.
    pub const fn ticket(&self) -> Ticket {
        self.ticket
    }

    /// The connection that it came from.
    pub const fn psock(&self) -> psock::Id {
        self.ticket.psock
    }

    /// All of it, header included.
    pub const fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// What the framing leaves when it strips the header or the delimiter; all of it otherwise.
    pub fn payload(&self) -> &'a [u8] {
        &self.bytes[self.skip..self.bytes.len() - self.trim]
    }

    /// How many bytes the framing strips in front and behind.
    pub const fn stripped(&self) -> (usize, usize) {
        (self.skip, self.trim)
    }

    /// The framing's mark; 0 without.
    pub const fn mark(&self) -> u32 {
        self.mark
    }

    /// The hash of what it is ordered by; 0 without.
    pub const fn hash(&self) -> u32 {
        self.hash
    }

    /// When it was whole.
    pub const fn received(&self) -> Time {
        self.received
    }
}

impl Message {
    /// The same without a share in its bytes.
    pub fn view(&self) -> View<'_> {
        View {
            ticket: self.ticket,
            bytes: &self.bytes,
            skip: self.skip,
            trim: self.trim,
            mark: self.mark,
            hash: self.hash,
            received: self.received,
        }
    }

    /// What a reply is addressed with.
    pub const fn ticket(&self) -> Ticket {
        self.ticket
    }

    /// The connection that it came from.
    pub const fn psock(&self) -> psock::Id {
        self.ticket.psock
    }

    /// All of it, header included. A clone of these shares them.
    pub const fn bytes(&self) -> &Bytes {
        &self.bytes
    }

    /// What the framing leaves when it strips the header or the delimiter; all of it otherwise.
    pub fn payload(&self) -> &[u8] {
        &self.bytes[self.skip..self.bytes.len() - self.trim]
    }

    /// How many bytes the framing strips in front and behind.
    pub const fn stripped(&self) -> (usize, usize) {
        (self.skip, self.trim)
    }

    /// The framing's mark; 0 without.
    pub const fn mark(&self) -> u32 {
        self.mark
    }

    /// The hash of what it is ordered by; 0 without.
    pub const fn hash(&self) -> u32 {
        self.hash
    }

    /// When it was whole.
    pub const fn received(&self) -> Time {
        self.received
    }

    /// How many workers died while they held it.
    pub const fn deaths(&self) -> u8 {
        self.deaths
    }
}
