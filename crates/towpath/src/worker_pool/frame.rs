//! Frames of messages: which of them go into one together and how they stand in it, and which of one were answered.

use std::collections::VecDeque;

use towpath_mux::mux::{Batch, Ticket, View};
use towpath_ring::{Channel, Header, Kind, Layers, Meta, Part, ReserveError, Seq};

/// Messages up to so many bytes go to a worker together, in a frame of so many bytes of them.
const SHORT: usize = 4 << 10;
const BUNDLE: usize = 32 << 10;

/// Messages of one connection that follow each other: those of a frame.
#[derive(Clone, Copy, Debug)]
pub(super) struct FrameMessages {
    pub(super) first: Ticket,
    pub(super) count: u32,
}

impl FrameMessages {
    /// The one at this place.
    pub(super) fn at(&self, place: u32) -> Ticket {
        Ticket { number: self.first.number + u64::from(place), ..self.first }
    }
}

/// A frame that the process has.
#[derive(Clone, Copy, Debug)]
pub(super) struct Out {
    pub(super) messages: FrameMessages,
    /// Since when it may have been at it, in nanoseconds of the front's clock: it was given it then, or had done the one before, or
    /// answered some of it.
    pub(super) since: u64,
    /// So many of them were answered, from the first on.
    pub(super) answered: u32,
}

impl Out {
    /// What a reply with this header answers: from which place on, and how many.
    pub(super) fn answer(&mut self, header: &Header) -> (u32, u32) {
        // Without a number, and where there is no choice, it is all of them.
        let upto =
            if header.group == 0 { self.messages.count } else { header.group.min(self.messages.count) };
        // Another answer to what was answered is one to the last of that.
        let from = self.answered.min(upto - 1);
        self.answered = self.answered.max(upto);
        (from, upto - from)
    }

    /// Those that were not answered.
    pub(super) fn unanswered(&self) -> impl Iterator<Item = Ticket> + use<> {
        let Self { messages, answered, .. } = *self;
        (answered..messages.count).map(move |place| messages.at(place))
    }
}

/// Where the message with number `seq` is behind the first.
pub(super) fn place(first: Seq, seq: Seq) -> Option<usize> {
    (!seq.is_before(first)).then(|| seq.since(first) as usize)
}

/// How many of these messages, `most` at most, go into one frame: short ones of one connection that follow each other. One that
/// somebody died with goes alone.
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

/// The bytes of the first so many messages.
pub(super) fn pieces(waiting: &VecDeque<Batch>, count: usize) -> impl Iterator<Item = &[u8]> {
    let pieces = waiting.iter().scan(count, |left, run| {
        let some = run.len().min(*left);
        *left -= some;
        Some(run.bytes(some))
    });
    pieces.take_while(|piece| !piece.is_empty())
}

/// The first so many messages were published.
pub(super) fn pass(waiting: &mut VecDeque<Batch>, mut count: usize) {
    while let Some(run) = waiting.front_mut() {
        if run.len() > count {
            return run.skip(count);
        }
        count -= run.len();
        waiting.pop_front();
    }
}

/// Publishes the first message of a run by itself.
pub(super) fn send_first(channel: &mut Channel, run: &Batch, epoch: u64) -> Result<Seq, ReserveError> {
    let first = run.views().next().expect("a run that waits has messages");
    channel.send(first.bytes(), &meta(&first, epoch))
}

pub(super) fn part(message: View<'_>) -> Part<'_> {
    let (skip, trim) = message.stripped();
    let (mark, hash) = (message.mark(), message.hash());
    Part { bytes: message.bytes(), skip: narrow(skip), trim: narrow(trim), mark, hash }
}

/// What stands before a message in the ring.
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
