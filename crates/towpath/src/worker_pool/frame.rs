//! Frames of messages: which messages share a frame, their layout, and which of them were answered.

use std::collections::VecDeque;

use towpath_mux::mux::{Batch, Ticket, View};
use towpath_ring::{Channel, Header, Kind, Layers, Meta, Part, ReserveError, Seq};

/// Messages up to the first size share frames of up to the second size, in bytes.
const SHORT: usize = 4 << 10;
const BUNDLE: usize = 32 << 10;

/// Consecutive messages of a connection in one frame.
#[derive(Clone, Copy, Debug)]
pub(super) struct FrameMessages {
    pub(super) first: Ticket,
    pub(super) count: u32,
}

impl FrameMessages {
    /// Ticket of the message at this place.
    pub(super) fn at(&self, place: u32) -> Ticket {
        Ticket { number: self.first.number + u64::from(place), ..self.first }
    }
}

/// A frame that the process holds.
#[derive(Clone, Copy, Debug)]
pub(super) struct Out {
    pub(super) messages: FrameMessages,
    /// When the process may have started with it, in nanoseconds of the pool's clock: at its delivery, at the
    /// completion of the frame before it, or at its last reply.
    pub(super) since: u64,
    /// Number of messages that were answered, from the front.
    pub(super) answered: u32,
}

impl Out {
    /// The messages that a reply with this header answers: first place and number.
    pub(super) fn answer(&mut self, header: &Header) -> (u32, u32) {
        // Without a number in the header, the reply answers all of them.
        let upto =
            if header.group == 0 { self.messages.count } else { header.group.min(self.messages.count) };
        // A second reply to answered messages counts for the last of them.
        let from = self.answered.min(upto - 1);
        self.answered = self.answered.max(upto);
        (from, upto - from)
    }

    /// The messages that were not answered.
    pub(super) fn unanswered(&self) -> impl Iterator<Item = Ticket> + use<> {
        let Self { messages, answered, .. } = *self;
        (answered..messages.count).map(move |place| messages.at(place))
    }
}

/// Place of sequence number `seq` after `first`.
pub(super) fn place(first: Seq, seq: Seq) -> Option<usize> {
    (!seq.is_before(first)).then(|| seq.since(first) as usize)
}

/// Number of leading messages, up to `most`, that share a frame: short consecutive messages of one
/// connection. A message that a worker died with gets its own frame.
pub(super) fn messages(waiting: &VecDeque<Batch>, most: usize) -> usize {
    let (mut next, mut bytes, mut count): (Option<Ticket>, usize, usize) = (None, 0, 0);
    for run in waiting {
        let Some(first) = run.first().filter(|first| next.is_none_or(|next| next == *first)) else { break };
        if run.deaths() > 0 {
            break;
        }
        let some = run.short(most - count, SHORT, BUNDLE - bytes);
        bytes += run.bytes(some).len();
        count += some;
        if some < run.len() {
            break;
        }
        next = Some(Ticket { number: first.number + run.len() as u64, ..first });
    }
    count.max(1)
}

/// The bytes of the first `count` messages.
pub(super) fn pieces(waiting: &VecDeque<Batch>, count: usize) -> impl Iterator<Item = &[u8]> {
    let pieces = waiting.iter().scan(count, |left, run| {
        let some = run.len().min(*left);
        *left -= some;
        Some(run.bytes(some))
    });
    pieces.take_while(|piece| !piece.is_empty())
}

/// The first `count` messages were published.
pub(super) fn pass(waiting: &mut VecDeque<Batch>, mut count: usize) {
    while let Some(run) = waiting.front_mut() {
        if run.len() > count {
            return run.skip(count);
        }
        count -= run.len();
        waiting.pop_front();
    }
}

/// Publishes the first message of a batch in its own frame.
pub(super) fn send_first(channel: &mut Channel, run: &Batch, epoch: u64) -> Result<Seq, ReserveError> {
    let first = run.views().next().expect("a run that waits has messages");
    channel.send(first.bytes(), &meta(&first, epoch))
}

pub(super) fn part(message: View<'_>) -> Part<'_> {
    let (skip, trim) = message.stripped();
    let (mark, hash) = (message.mark(), message.hash());
    Part { bytes: message.bytes(), skip: narrow(skip), trim: narrow(trim), mark, hash }
}

/// Metadata of a message in the ring.
fn meta(message: &View<'_>, time: u64) -> Meta {
    let (port, group) = message.psock().parts();
    let (skip, trim) = message.stripped();
    let layers = Layers { link: 0, network: narrow(skip), payload: narrow(trim) };
    let (mark, hash) = (message.mark(), message.hash());
    Meta { kind: Kind::MESSAGE, time, mark, port, group, hash, layers, ..Meta::default() }
}

fn narrow(bytes: usize) -> u16 {
    u16::try_from(bytes).unwrap_or(u16::MAX)
}
