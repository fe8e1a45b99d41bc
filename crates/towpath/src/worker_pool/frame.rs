//! Frames of messages: which messages share a frame, their layout, and which of them were answered.

use std::collections::VecDeque;

use towpath_mux::mux::{Batch, MessagePart, PartKind, Ticket, View};
use towpath_ring::{Channel, Header, Kind, Layers, Meta, Part, ReserveError, Seq};

use super::violation::{EMPTY_PARTS, Violation};

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
    /// The next message was answered in part.
    pub(super) begun: bool,
    /// Number of parts of this answer that had no bytes.
    pub(super) empty: u16,
    /// A part of a message, and its length in bytes.
    pub(super) part: Option<(PartKind, usize)>,
}

/// A message in parts that a process has.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Stream {
    /// Number of parts published.
    pub(super) parts: u32,
    /// It was answered, or answered in part.
    pub(super) answered: bool,
    pub(super) begun: bool,
    /// Number of parts of the answer that had no bytes.
    pub(super) empty: u16,
}

impl Stream {
    /// A reply to any part answers the message. Returns the number of replies.
    pub(super) fn answer(&mut self, header: &Header, again: bool) -> Result<u32, Violation> {
        if self.answered && (header.kind == Kind::REPLY_PART || !again) {
            return Err(Violation::Again);
        }
        if header.group.max(header.mark) > 1 && !again {
            return Err(Violation::Answers);
        }
        if header.kind == Kind::REPLY_PART {
            self.begun = true;
            count_empty(&mut self.empty, header)?;
            return Ok(0);
        }
        (self.answered, self.begun) = (true, false);
        Ok(1)
    }
}

impl Out {
    pub(super) const fn new(messages: FrameMessages, since: u64) -> Self {
        Self { messages, since, answered: 0, begun: false, empty: 0, part: None }
    }

    /// The messages that a reply with this header answers: first place, number, and number of replies. `again`: a
    /// message may have several answers.
    pub(super) fn answer(&mut self, header: &Header, again: bool) -> Result<(u32, u32, u32), Violation> {
        let count = self.messages.count;
        // Without a number in the header, the reply answers all of them.
        let upto = if header.group == 0 { count } else { header.group };
        if upto > count && !again {
            return Err(Violation::Answers);
        }
        let upto = upto.min(count);
        if header.kind == Kind::REPLY_PART {
            // A part belongs to the first message without an answer.
            let from = if header.group == 0 { self.answered } else { upto - 1 };
            if from != self.answered || from >= count {
                return Err(Violation::Again);
            }
            self.begun = true;
            count_empty(&mut self.empty, header)?;
            return Ok((from, 1, 0));
        }
        if upto <= self.answered && !again {
            return Err(Violation::Again);
        }
        // A further reply to answered messages counts for the last of them.
        let from = self.answered.min(upto - 1);
        if header.mark > upto - from && !again {
            return Err(Violation::Answers);
        }
        if upto > self.answered {
            (self.answered, self.begun, self.empty) = (upto, false, 0);
        }
        Ok((from, upto - from, header.mark.clamp(1, upto - from)))
    }

    /// The message that was answered in part.
    pub(super) fn torn(&self) -> Option<Ticket> {
        self.begun.then(|| self.messages.at(self.answered))
    }

    /// The messages of which nothing was answered.
    pub(super) fn unanswered(&self) -> impl Iterator<Item = Ticket> + use<> {
        let Self { messages, answered, begun, .. } = *self;
        (answered + u32::from(begun)..messages.count).map(move |place| messages.at(place))
    }
}

/// Counts a part of an answer that has no bytes.
fn count_empty(empty: &mut u16, part: &Header) -> Result<(), Violation> {
    *empty += u16::from(part.len == 0);
    if *empty > EMPTY_PARTS { Err(Violation::EmptyParts) } else { Ok(()) }
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
        // An opened event, or a part, has its own frame.
        if run.deaths() > 0 || run.is_opened() || run.more() {
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
    let mut meta = meta(&first, epoch);
    if first.more() {
        (meta.kind, meta.wire_len) = (Kind::MESSAGE_PART, 1);
    }
    channel.send(first.bytes(), &meta)
}

/// Publishes a part of a message, its `number`-th.
pub(super) fn send_part(
    channel: &mut Channel,
    part: &MessagePart,
    number: u32,
    epoch: u64,
) -> Result<Seq, ReserveError> {
    let kind = match part.kind {
        PartKind::More => Kind::MESSAGE_PART,
        PartKind::Last => Kind::MESSAGE_END,
        PartKind::Cut => Kind::MESSAGE_CUT,
    };
    let view = part.view();
    channel.send(view.bytes(), &Meta { kind, wire_len: number, ..meta(&view, epoch) })
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

#[cfg(test)]
mod tests {
    use towpath_mux::mux::psock;

    use super::*;

    fn header(kind: Kind, group: u32, mark: u32) -> Header {
        let mut header = Header::default();
        (header.kind, header.group, header.mark) = (kind, group, mark);
        header
    }

    #[test]
    fn a_message_has_one_answer_in_any_number_of_parts() {
        let first = Ticket { psock: psock::Id::from_parts(1, 1), number: 7 };
        let reply = |group, mark| header(Kind::REPLY, group, mark);
        let part = |group| header(Kind::REPLY_PART, group, 0);
        let (again, answers) = (Err(Violation::Again), Err(Violation::Answers));
        // Rows: messages in the frame; headers with the result without and with `--worker-may push`.
        let rows = [
            (1, vec![(reply(0, 0), Ok((0, 1, 1)), Ok((0, 1, 1))), (reply(0, 0), again, Ok((0, 1, 1)))]),
            (1, vec![(reply(2, 0), answers, Ok((0, 1, 1)))]),
            (1, vec![(reply(1, 2), answers, Ok((0, 1, 1)))]),
            (1, vec![(reply(u32::MAX, u32::MAX), answers, Ok((0, 1, 1)))]),
            (1, vec![(part(0), Ok((0, 1, 0)), Ok((0, 1, 0))); 3]),
            (
                1,
                vec![
                    (part(1), Ok((0, 1, 0)), Ok((0, 1, 0))),
                    (reply(1, 0), Ok((0, 1, 1)), Ok((0, 1, 1))),
                    (part(1), again, again),
                ],
            ),
            (3, vec![(reply(0, 3), Ok((0, 3, 3)), Ok((0, 3, 3))), (part(0), again, again)]),
            (
                3,
                vec![
                    (reply(2, 2), Ok((0, 2, 2)), Ok((0, 2, 2))),
                    (reply(3, 1), Ok((2, 1, 1)), Ok((2, 1, 1))),
                ],
            ),
            (3, vec![(reply(2, 2), Ok((0, 2, 2)), Ok((0, 2, 2))), (reply(2, 1), again, Ok((1, 1, 1)))]),
            (3, vec![(reply(2, 1), Ok((0, 2, 1)), Ok((0, 2, 1))), (reply(3, 2), answers, Ok((2, 1, 1)))]),
            (3, vec![(part(2), again, again)]),
            (3, vec![(reply(1, 1), Ok((0, 1, 1)), Ok((0, 1, 1))), (part(0), Ok((1, 1, 0)), Ok((1, 1, 0)))]),
        ];
        for (count, headers) in rows {
            let messages = FrameMessages { first, count };
            let [mut out, mut pushing] = [Out::new(messages, 0); 2];
            for (header, expected, with_push) in headers {
                assert_eq!(out.answer(&header, false), expected, "{count} messages: {header:?}");
                assert_eq!(pushing.answer(&header, true), with_push, "{count} messages: {header:?}");
            }
        }
    }

    #[test]
    fn parts_without_bytes_are_bounded_for_each_answer() {
        let first = Ticket { psock: psock::Id::from_parts(1, 1), number: 7 };
        let part = |len| {
            let mut part = header(Kind::REPLY_PART, 0, 0);
            part.len = len;
            part
        };
        let mut out = Out::new(FrameMessages { first, count: 2 }, 0);
        let mut stream = Stream::default();
        for message in 1..=2 {
            for at in 0..2 * u32::from(EMPTY_PARTS) {
                assert!(out.answer(&part(at % 2), true).is_ok(), "{message}: {at}");
            }
            assert!(out.answer(&part(1), true).is_ok());
            if message == 1 {
                assert_eq!(out.answer(&header(Kind::REPLY, 1, 0), true), Ok((0, 1, 1)));
            }
        }
        assert_eq!(out.answer(&part(0), true), Err(Violation::EmptyParts));
        for _ in 0..EMPTY_PARTS {
            assert_eq!(stream.answer(&part(0), true), Ok(0));
        }
        assert_eq!(stream.answer(&part(0), true), Err(Violation::EmptyParts));
    }

    #[test]
    fn a_message_that_was_answered_in_part_is_not_given_again() {
        let first = Ticket { psock: psock::Id::from_parts(1, 1), number: 0 };
        let mut out = Out::new(FrameMessages { first, count: 3 }, 0);
        let left = |out: &Out| out.unanswered().map(|ticket| ticket.number).collect::<Vec<_>>();
        assert_eq!(left(&out), [0, 1, 2]);
        out.answer(&header(Kind::REPLY_PART, 1, 0), false).unwrap();
        assert_eq!(left(&out), [1, 2]);
        out.answer(&header(Kind::REPLY, 1, 0), false).unwrap();
        assert_eq!(left(&out), [1, 2]);
        out.answer(&header(Kind::REPLY, 3, 0), false).unwrap();
        assert!(left(&out).is_empty());
    }
}
