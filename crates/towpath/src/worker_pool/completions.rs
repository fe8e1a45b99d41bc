//! Completions: replies and releases read from the workers' rings, until they are applied to the core.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use towpath_metrics::metrics;
use towpath_mux::Time;
use towpath_mux::mux::{Body, Mux, SendError, Ticket, psock, worker};
use towpath_ring::{Header, Kind, Seq, TxPayload, TxSink};

use super::authority::{Authority, Destination, Rights};
use super::frame::{FrameMessages, Out, Stream, place};
use super::tx_lease::TxLeases;
use super::violation::{Violation, Violations};
use super::zerocopy_tx::LEAST;

metrics! {
    /// Unsent messages of workers, by cause.
    pub struct UnsentStats in "mux" {
        /// Connected mode: the queues of all connections were full.
        pub full: counter messages as "lost": "Messages of workers that were not sent, by reason." (reason = "full"),
        /// No connection was open, or the message named none.
        pub not_connected: counter messages as "lost" (reason = "not_connected"),
        /// The connection that the message named had ended.
        pub gone: counter messages as "lost" (reason = "gone"),
        /// Connected mode: the connection ended before the message was sent, and the message must not go to another one.
        pub undelivered: counter messages as "lost" (reason = "undelivered"),
    }
}

impl UnsentStats {
    const fn count(&mut self, error: &SendError) {
        match error {
            SendError::Full => self.full += 1,
            SendError::NotConnected => self.not_connected += 1,
            SendError::Gone => self.gone += 1,
        }
    }
}

/// Maximum number of unsent messages that wait to be reported to their worker.
const UNSENT: usize = 1024;
/// Maximum number of bytes of these messages.
const UNSENT_BYTES: usize = 4 << 20;
/// Size of the blocks that replies are copied into, which saves allocations.
const BLOCK: usize = 64 << 10;

/// An action that a worker requested.
#[derive(Debug)]
enum Action {
    Reply(Answer),
    Send(worker::Id, Option<psock::Id>, Bytes),
    /// Closes a connection, after the reply to the message with this number.
    Close(psock::Id, Option<u64>),
    Reset(psock::Id),
}

/// A reply to consecutive messages of a connection.
#[derive(Debug)]
struct Answer {
    worker: worker::Id,
    first: Ticket,
    /// Number of messages that it answers, and of replies in it.
    count: u32,
    replies: u32,
    body: Body,
}

/// Completions of all workers that are not applied yet.
#[derive(Debug, Default)]
pub(super) struct Completions {
    /// Actions that workers requested, in their order.
    actions: Vec<Action>,
    /// Unsent messages to be reported to their workers.
    pub(super) unsent: UnsentQueue,
    /// Messages of which a part was released that is not the last one.
    pub(super) parts: Vec<(worker::Id, Ticket)>,
    pub(super) done: Vec<(worker::Id, FrameMessages)>,
    /// Messages too large for a ring. Their connections end.
    pub(super) refused: Vec<(worker::Id, Ticket)>,
    /// Messages whose workers died after a part of the answer. Their connections end, too.
    pub(super) torn: Vec<Ticket>,
    /// Time for these connections to finish their other messages.
    drain: Duration,
    block: BytesMut,
    /// Counters of unsent messages of workers.
    pub(super) lost: UnsentStats,
    /// Counters of violations by workers.
    pub(super) violations: Violations,
}

impl Completions {
    pub(super) fn new(drain: Duration) -> Self {
        Self { drain, ..Self::default() }
    }

    /// Copies a payload.
    fn copy(&mut self, bytes: &[u8]) -> Bytes {
        if bytes.len() > BLOCK / 4 {
            return Bytes::copy_from_slice(bytes);
        }
        if self.block.capacity() < bytes.len() {
            self.block = BytesMut::with_capacity(BLOCK);
        }
        self.block.extend_from_slice(bytes);
        self.block.split().freeze()
    }

    /// A worker's message is not sent.
    fn unsent(&mut self, worker: worker::Id, to: Option<psock::Id>, error: SendError, bytes: Bytes) {
        self.lost.count(&error);
        self.unsent.push(Unsent { worker: Some(worker), to, error, bytes });
    }

    /// Reports a message of a worker that was not sent: its connection ended, and no other connection could take it.
    pub(super) fn undelivered(&mut self, bytes: Bytes) {
        self.lost.undelivered += 1;
        self.unsent.push(Unsent { worker: None, to: None, error: SendError::Gone, bytes });
    }

    /// Returns true if no unsent message waits to be reported.
    pub(super) fn is_all_reported(&self) -> bool {
        self.unsent.is_empty()
    }

    /// Drops the reports for a worker that has ended.
    pub(super) fn forget(&mut self, id: worker::Id) {
        self.unsent.retain(|unsent| unsent.worker != Some(id));
    }

    /// Applies the completions: what the workers wrote, then releases.
    pub(super) fn apply(&mut self, mux: &mut Mux, now: Time) {
        mux.together(|mux| {
            for action in self.actions.drain(..) {
                match action {
                    Action::Reply(Answer { worker, first, count, replies, body }) => {
                        // A reply without a connection is counted by the core.
                        let _: Result<(), SendError> =
                            mux.reply_batch(worker, (first, count), replies, body, now);
                    }
                    Action::Send(worker, to, bytes) => {
                        let length = bytes.len();
                        match super::send(mux, to, bytes.clone(), now) {
                            Ok(()) => mux.count_sent(worker, length),
                            Err(error) => {
                                self.lost.count(&error);
                                self.unsent.push(Unsent { worker: Some(worker), to, error, bytes });
                            }
                        }
                    }
                    Action::Close(psock, after) => mux.close_after(psock, after, now),
                    Action::Reset(psock) => mux.reset(psock, now),
                }
            }
            for (id, ticket) in self.parts.drain(..) {
                mux.part_done(id, ticket, now);
            }
            for (id, messages) in self.done.drain(..) {
                mux.done_batch(id, (messages.first, messages.count), now);
            }
        });
        for ticket in self.torn.drain(..) {
            mux.drain_psock(ticket.psock, Some(now + self.drain), now);
        }
        for (id, ticket) in self.refused.drain(..) {
            mux.drain_psock(ticket.psock, Some(now + self.drain), now);
            mux.done(id, ticket, now);
        }
    }
}

/// An unsent message.
#[derive(Debug)]
pub(super) struct Unsent {
    /// The worker that sent it. `None`: any worker may get the report.
    pub(super) worker: Option<worker::Id>,
    pub(super) to: Option<psock::Id>,
    pub(super) error: SendError,
    pub(super) bytes: Bytes,
}

/// Unsent messages to be reported, oldest first.
#[derive(Debug, Default)]
pub(super) struct UnsentQueue {
    queue: VecDeque<Unsent>,
    /// Bytes in it. A worker can send many messages to connections that have ended.
    bytes: usize,
}

impl UnsentQueue {
    /// Adds a report. Above the bounds, the oldest reports are dropped.
    fn push(&mut self, last: Unsent) {
        self.bytes += last.bytes.len();
        self.queue.push_back(last);
        while self.queue.len() > UNSENT || self.queue.len() > 1 && self.bytes > UNSENT_BYTES {
            self.bytes -= self.queue.pop_front().map_or(0, |first| first.bytes.len());
        }
    }

    /// Removes the reports for which `keep` returns false.
    pub(super) fn retain(&mut self, mut keep: impl FnMut(&Unsent) -> bool) {
        let bytes = &mut self.bytes;
        self.queue.retain(|unsent| {
            let kept = keep(unsent);
            *bytes -= if kept { 0 } else { unsent.bytes.len() };
            kept
        });
    }

    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    #[cfg(test)]
    fn len(&self) -> usize {
        self.queue.len()
    }
}

/// Reads the frames of one process. After a violation, it ignores the others.
pub(super) struct Answers<'a> {
    pub(super) id: worker::Id,
    pub(super) first: Seq,
    pub(super) out: &'a mut VecDeque<Option<Out>>,
    pub(super) streams: &'a mut HashMap<Ticket, Stream>,
    pub(super) tx_leases: Option<&'a mut TxLeases>,
    pub(super) completions: &'a mut Completions,
    pub(super) authority: &'a Authority,
    pub(super) rights: Rights,
    pub(super) violation: &'a mut Option<Violation>,
    /// Number of bytes copied.
    pub(super) copied: usize,
    pub(super) now: u64,
}

impl Answers<'_> {
    /// The frame that a reply answers. `None` if the process does not hold it: the message is done, or never
    /// existed.
    fn held(&mut self, seq: u32) -> Option<&mut Out> {
        place(self.first, Seq(seq)).and_then(|at| self.out.get_mut(at)?.as_mut())
    }

    /// The messages that a reply answers: the first, their number, and the number of replies.
    fn answer(&mut self, header: &Header) -> Result<(Ticket, u32, u32), Violation> {
        let (now, again) = (self.now, self.rights.push);
        let held = self.held(header.port).ok_or(Violation::Unheld)?;
        if held.part.is_some() {
            (held.since, held.answered) = (now, 1);
            let first = held.messages.first;
            let stream = self.streams.get_mut(&first).ok_or(Violation::Unheld)?;
            return Ok((first, 1, stream.answer(header, again)?));
        }
        let (from, count, replies) = held.answer(header, again)?;
        held.since = now;
        Ok((held.messages.at(from), count, replies))
    }

    /// A reply to a message that the worker holds.
    fn reply(&mut self, header: &Header, payload: TxPayload<'_>) -> Result<(), Violation> {
        let (first, count, replies) = self.answer(header)?;
        let body = match (payload, &mut self.tx_leases) {
            (TxPayload::Held(frame), Some(tx_leases)) => Body::Leased(tx_leases.lend(first.psock, frame)),
            // `hold` has returned false.
            (TxPayload::Held(_), None) => return Ok(()),
            (TxPayload::Copied(bytes), _) => Body::Bytes(self.completions.copy(bytes)),
        };
        let answer = Answer { worker: self.id, first, count, replies, body };
        self.completions.actions.push(Action::Reply(answer));
        Ok(())
    }

    /// A worker's message: sends it if the worker may.
    fn send(&mut self, header: &Header, bytes: Bytes) -> Result<(), Violation> {
        let (index, generation) = (header.port, header.group);
        let to = (generation != 0).then(|| psock::Id::from_parts(index, generation));
        let destination = match to {
            None if self.rights.connected && !self.rights.push => return Err(Violation::Push),
            None => Destination::Granted,
            Some(_) if self.rights.push => Destination::Granted,
            Some(_) => self.authority.destination(index, generation),
        };
        match destination {
            Destination::Granted => self.completions.actions.push(Action::Send(self.id, to, bytes)),
            Destination::Ended => self.completions.unsent(self.id, to, SendError::Gone, bytes),
            Destination::Unknown => return Err(Violation::Connection),
        }
        Ok(())
    }
}

impl Answers<'_> {
    /// Closes or resets a connection if the worker may send to it.
    fn end(&mut self, header: &Header) -> Result<(), Violation> {
        let psock = psock::Id::from_parts(header.port, header.group);
        let destination = match self.rights.push {
            true => Destination::Granted,
            false => self.authority.destination(header.port, header.group),
        };
        match destination {
            Destination::Granted => {}
            Destination::Ended => return Ok(()),
            Destination::Unknown => return Err(Violation::Connection),
        }
        if header.kind == Kind::RESET {
            self.completions.actions.push(Action::Reset(psock));
            return Ok(());
        }
        let of = |held: &mut Out| held.messages.at(held.answered.saturating_sub(1));
        // The message was released before, or the worker named none.
        let last = self.held(header.mark).map(of);
        let after = last.filter(|last| last.psock == psock).map(|last| last.number);
        self.completions.actions.push(Action::Close(psock, after));
        Ok(())
    }
}

impl TxSink for Answers<'_> {
    fn hold(&mut self, header: &Header) -> bool {
        let len = header.len as usize;
        let reply = matches!(header.kind, Kind::REPLY | Kind::REPLY_PART);
        if !reply || len < LEAST || self.violation.is_some() {
            return false;
        }
        let Some(psock) = self.held(header.port).map(|held| held.messages.first.psock) else { return false };
        self.tx_leases.as_mut().is_some_and(|tx_leases| tx_leases.has_room(psock, len))
    }

    fn take(&mut self, header: &Header, payload: TxPayload<'_>) {
        if let TxPayload::Copied(bytes) = &payload {
            self.copied += bytes.len();
        }
        // A held frame of a process that is detached is not given back.
        if self.violation.is_some() {
            return;
        }
        let taken = match (header.kind, payload) {
            (Kind::MESSAGE, TxPayload::Copied(bytes)) => {
                let bytes = self.completions.copy(bytes);
                self.send(header, bytes)
            }
            (Kind::REPLY | Kind::REPLY_PART, payload) => self.reply(header, payload),
            (Kind::CLOSE | Kind::RESET, TxPayload::Copied([])) => self.end(header),
            _ => Err(Violation::Frame),
        };
        *self.violation = taken.err();
    }
}

#[cfg(test)]
mod tests {
    use towpath_mux::assembler::Limits;
    use towpath_mux::mux::{Bound, Config, Order};

    use super::*;

    #[test]
    fn unsent_messages_of_workers_are_counted_by_cause() {
        let now = Time::default();
        let send_bytes = Bound { high: 10, low: 5 };
        let rows = [
            // Rows: connected mode, connection open, connection named; results of two messages.
            (true, false, false, UnsentStats { not_connected: 2, ..UnsentStats::default() }),
            (true, true, false, UnsentStats { full: 1, ..UnsentStats::default() }),
            (true, true, true, UnsentStats::default()),
            (false, true, false, UnsentStats { not_connected: 2, ..UnsentStats::default() }),
            (false, true, true, UnsentStats::default()),
            (false, false, true, UnsentStats { gone: 2, ..UnsentStats::default() }),
        ];
        for (connected, there, named, expected) in rows {
            let mut mux = Mux::new(Config { connected, send_bytes, ..Config::new(Order::None) });
            let worker = mux.clone_worker(1, now);
            let psock = mux.attach("line".parse().unwrap(), Limits::default(), now).unwrap();
            if !there {
                mux.handle_error(psock, 104, now);
            }
            let mut completions = Completions::default();
            for _ in 0..2 {
                let bytes = Bytes::from_static(b"0123456789");
                completions.actions.push(Action::Send(worker, named.then_some(psock), bytes));
            }
            completions.apply(&mut mux, now);
            assert_eq!(completions.lost, expected, "{connected} {there} {named}");
            let UnsentStats { full, not_connected, gone, .. } = expected;
            let sent: Vec<_> = mux.show().workers.iter().map(|worker| worker.stats.tx_msgs).collect();
            assert_eq!(sent, [2 - full - not_connected - gone], "{connected} {there} {named}");
            assert_eq!(
                completions.unsent.len() as u64,
                full + not_connected + gone,
                "all are to be reported"
            );
        }
        let (some, more) = (
            UnsentStats { full: 1, ..UnsentStats::default() },
            UnsentStats { full: 3, gone: 2, ..UnsentStats::default() },
        );
        assert_eq!(crate::metrics::nonzero(&more.since(&some), |_| true), "2 full, 2 gone");
    }

    #[test]
    fn reports_of_unsent_messages_are_bounded_in_number_and_bytes() {
        let unsent = |len: usize| Unsent {
            worker: None,
            to: None,
            error: SendError::Gone,
            bytes: Bytes::from(vec![0; len]),
        };
        // Rows: bytes of each message, number of reports that are kept.
        for (len, kept) in [(0, UNSENT), (1, UNSENT), (1 << 20, 4), (5 << 20, 1)] {
            let mut queue = UnsentQueue::default();
            for _ in 0..if len > 1 { 20 } else { 2000 } {
                queue.push(unsent(len));
            }
            assert_eq!((queue.len(), queue.bytes), (kept, kept * len), "{len}");
            queue.retain(|_| false);
            assert_eq!((queue.len(), queue.bytes), (0, 0), "{len}");
        }
    }
}
