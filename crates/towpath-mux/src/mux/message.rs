//! Messages between connections and workers.

use bytes::Bytes;

use super::psock;
use crate::Time;

/// Identifies a message: its connection, including the generation, and its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ticket {
    /// The connection that it came from.
    pub psock: psock::Id,
    /// Number of the message within its connection, from 0.
    pub number: u64,
}

/// A step in the processing of a message ([`super::Mux::handle_completions`]).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Completion {
    /// A reply: [`super::Mux::reply`].
    Reply(Ticket, Bytes),
    /// The message is done: [`super::Mux::done`].
    Done(Ticket),
}

/// A whole message, or the first part of one. Clones share its bytes.
#[derive(Clone, Debug)]
pub struct Message {
    pub(super) ticket: Ticket,
    pub(super) bytes: Bytes,
    pub(super) skip: usize,
    pub(super) trim: usize,
    pub(super) mark: u32,
    pub(super) hash: u32,
    pub(super) received: Time,
    /// Bytes charged for it: its share of the buffer.
    pub(super) charge: usize,
    /// Number of workers that died while they held it.
    pub(super) deaths: u8,
    /// The first part of a message: others follow (`stream.rs`).
    pub(super) more: bool,
}

/// A message in the buffer that it was read into.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    pub(super) ticket: Ticket,
    pub(super) bytes: &'a [u8],
    pub(super) skip: usize,
    pub(super) trim: usize,
    pub(super) mark: u32,
    pub(super) hash: u32,
    pub(super) received: Time,
    pub(super) more: bool,
}

impl<'a> View<'a> {
    /// As [`Message::more`].
    pub const fn more(&self) -> bool {
        self.more
    }

    /// The ticket, which addresses a reply.
    pub const fn ticket(&self) -> Ticket {
        self.ticket
    }

    /// The connection that it came from.
    pub const fn psock(&self) -> psock::Id {
        self.ticket.psock
    }

    /// The whole message, header included.
    pub const fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// The message without the parts that the framing strips (header, delimiter).
    pub fn payload(&self) -> &'a [u8] {
        &self.bytes[self.skip..self.bytes.len() - self.trim]
    }

    /// Number of bytes that the framing strips at the front and at the end.
    pub const fn stripped(&self) -> (usize, usize) {
        (self.skip, self.trim)
    }

    /// The framing's mark; 0 without one.
    pub const fn mark(&self) -> u32 {
        self.mark
    }

    /// The framing's hash, for [`super::Order::Key`]; 0 without one.
    pub const fn hash(&self) -> u32 {
        self.hash
    }

    /// When the message was complete.
    pub const fn received(&self) -> Time {
        self.received
    }
}

impl Message {
    /// A view that does not share ownership of the bytes.
    pub fn view(&self) -> View<'_> {
        View {
            ticket: self.ticket,
            bytes: &self.bytes,
            skip: self.skip,
            trim: self.trim,
            mark: self.mark,
            hash: self.hash,
            received: self.received,
            more: self.more,
        }
    }

    /// Returns true for the first part of a message that is delivered in parts ([`crate::assembler::Limits::part`]): the others follow
    /// ([`super::Mux::next_part`]).
    pub const fn more(&self) -> bool {
        self.more
    }

    /// The ticket, which addresses a reply.
    pub const fn ticket(&self) -> Ticket {
        self.ticket
    }

    /// The connection that it came from.
    pub const fn psock(&self) -> psock::Id {
        self.ticket.psock
    }

    /// The whole message, header included. Clones share the memory.
    pub const fn bytes(&self) -> &Bytes {
        &self.bytes
    }

    /// The message without the parts that the framing strips (header, delimiter).
    pub fn payload(&self) -> &[u8] {
        &self.bytes[self.skip..self.bytes.len() - self.trim]
    }

    /// Number of bytes that the framing strips at the front and at the end.
    pub const fn stripped(&self) -> (usize, usize) {
        (self.skip, self.trim)
    }

    /// The framing's mark; 0 without one.
    pub const fn mark(&self) -> u32 {
        self.mark
    }

    /// The framing's hash, for [`super::Order::Key`]; 0 without one.
    pub const fn hash(&self) -> u32 {
        self.hash
    }

    /// When the message, or its first part, was complete.
    pub const fn received(&self) -> Time {
        self.received
    }

    /// Number of workers that died while they held it.
    pub const fn deaths(&self) -> u8 {
        self.deaths
    }
}
