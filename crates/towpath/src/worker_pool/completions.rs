//! What workers gave back: read from their rings, kept until the core is reported.

use std::collections::VecDeque;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use towpath_mux::Time;
use towpath_mux::mux::{Body, Mux, SendError, Ticket, psock, worker};
use towpath_ring::{Header, Kind, Seq, TxPayload, TxSink};

use super::frame::{FrameMessages, Out, place};
use super::tx_lease::TxLeases;
use super::zerocopy_tx::LEAST;
use crate::control::mux::Lost;

/// Messages that were not sent: so many wait for their worker to be reported.
const UNSENT: usize = 1024;
/// Bytes of these, whatever their number.
const UNSENT_BYTES: usize = 4 << 20;
/// Replies are copied into blocks of this many bytes, so that most need no allocation of their own.
const BLOCK: usize = 64 << 10;

/// An answer to messages of one connection that follow each other.
#[derive(Debug)]
struct Answer {
    worker: worker::Id,
    first: Ticket,
    /// Messages that it answers, and with how many replies.
    count: u32,
    replies: u32,
    body: Body,
}

/// What workers gave back, until the core is reported.
#[derive(Debug, Default)]
pub(super) struct Completions {
    replies: Vec<Answer>,
    sends: Vec<(worker::Id, Option<psock::Id>, Bytes)>,
    /// Those that nobody took, whose workers are to read of it.
    pub(super) unsent: VecDeque<Unsent>,
    pub(super) done: Vec<(worker::Id, FrameMessages)>,
    /// Messages that no ring can take: their connections end.
    pub(super) refused: Vec<(worker::Id, Ticket)>,
    /// How long those have for what else they asked.
    drain: Duration,
    block: BytesMut,
    /// Messages of workers that were not sent.
    pub(super) lost: Lost,
}

impl Completions {
    pub(super) fn new(drain: Duration) -> Self {
        Self { drain, ..Self::default() }
    }

    /// A copy.
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

    /// A worker's message came back: its connection ended before all of it had left, and there is no other.
    pub(super) fn undelivered(&mut self, bytes: Bytes) {
        self.lost.undelivered += 1;
        push(&mut self.unsent, Unsent { worker: None, to: None, error: SendError::Gone, bytes });
    }

    /// Whether no worker is to read of a message that nobody took.
    pub(super) fn is_all_reported(&self) -> bool {
        self.unsent.is_empty()
    }

    /// That worker is gone: nobody is there to read of what it sent.
    pub(super) fn forget(&mut self, id: worker::Id) {
        self.unsent.retain(|unsent| unsent.worker != Some(id));
    }

    /// Tells the core: first what was answered, then what is done.
    pub(super) fn apply(&mut self, mux: &mut Mux, now: Time) {
        mux.together(|mux| {
            for Answer { worker, first, count, replies, body } in self.replies.drain(..) {
                // Nobody is there to be answered any more: the core counts that.
                let _: Result<(), SendError> = mux.reply_batch(worker, (first, count), replies, body, now);
            }
            for (worker, to, bytes) in self.sends.drain(..) {
                let length = bytes.len();
                match super::send(mux, to, bytes.clone(), now) {
                    Ok(()) => mux.count_sent(worker, length),
                    Err(error) => {
                        self.lost.count(&error);
                        push(&mut self.unsent, Unsent { worker: Some(worker), to, error, bytes });
                    }
                }
            }
            for (id, messages) in self.done.drain(..) {
                mux.done_batch(id, (messages.first, messages.count), now);
            }
        });
        for (id, ticket) in self.refused.drain(..) {
            mux.drain_psock(ticket.psock, Some(now + self.drain), now);
            mux.done(id, ticket, now);
        }
    }
}

/// A message that was not sent.
#[derive(Debug)]
pub(super) struct Unsent {
    /// Who sent it, as far as that is known; any worker may read of it otherwise.
    pub(super) worker: Option<worker::Id>,
    pub(super) to: Option<psock::Id>,
    pub(super) error: SendError,
    pub(super) bytes: Bytes,
}

/// The oldest make room.
fn push(unsent: &mut VecDeque<Unsent>, last: Unsent) {
    unsent.push_back(last);
    let bytes = |unsent: &VecDeque<Unsent>| unsent.iter().map(|unsent| unsent.bytes.len()).sum::<usize>();
    while unsent.len() > UNSENT || unsent.len() > 1 && bytes(unsent) > UNSENT_BYTES {
        unsent.pop_front();
    }
}

/// What a process says, as it is read.
pub(super) struct Answers<'a> {
    pub(super) id: worker::Id,
    pub(super) first: Seq,
    pub(super) out: &'a mut VecDeque<Option<Out>>,
    pub(super) tx_leases: Option<&'a mut TxLeases>,
    pub(super) completions: &'a mut Completions,
    /// Bytes that were copied.
    pub(super) copied: usize,
    pub(super) now: u64,
}

impl Answers<'_> {
    /// The frame that a reply answers. None for a number that it does not have: the message was done, or never was, and there
    /// is nobody to answer.
    fn held(&mut self, header: &Header) -> Option<&mut Out> {
        place(self.first, Seq(header.port)).and_then(|at| self.out.get_mut(at)?.as_mut())
    }
}

impl TxSink for Answers<'_> {
    fn hold(&mut self, header: &Header) -> bool {
        let len = header.len as usize;
        if header.kind != Kind::REPLY || len < LEAST {
            return false;
        }
        let Some(psock) = self.held(header).map(|held| held.messages.first.psock) else { return false };
        self.tx_leases.as_mut().is_some_and(|tx_leases| tx_leases.has_room(psock, len))
    }

    fn take(&mut self, header: &Header, payload: TxPayload<'_>) {
        let (worker, now) = (self.id, self.now);
        let answer = match header.kind {
            Kind::REPLY => self.held(header).map(|held| {
                held.since = now;
                let (from, count) = held.answer(header);
                (held.messages.at(from), count)
            }),
            _ => None,
        };
        let body = match (payload, &mut self.tx_leases, answer) {
            // `hold` has asked whether there is somebody to answer.
            (TxPayload::Held(frame), Some(tx_leases), Some((first, _))) => {
                Body::Leased(tx_leases.lend(first.psock, frame))
            }
            (TxPayload::Held(_), ..) => return,
            (TxPayload::Copied(bytes), ..) => {
                self.copied += bytes.len();
                let bytes = self.completions.copy(bytes);
                if header.kind == Kind::MESSAGE {
                    return self.completions.sends.push((worker, addressee(header), bytes));
                }
                Body::Bytes(bytes)
            }
        };
        if let Some((first, count)) = answer {
            let replies = header.mark.clamp(1, count);
            self.completions.replies.push(Answer { worker, first, count, replies, body });
        }
    }
}

/// Where a worker's message is to go: no connection named is any of them.
fn addressee(header: &Header) -> Option<psock::Id> {
    let (index, generation) = (header.port, header.group);
    (generation != 0).then(|| psock::Id::from_parts(index, generation))
}

#[cfg(test)]
mod tests {
    use towpath_mux::assembler::Limits;
    use towpath_mux::mux::{Bound, Config};

    use super::*;

    #[test]
    fn what_workers_send_and_nobody_takes_is_counted_by_cause() {
        let now = Time::default();
        let send_bytes = Bound { high: 10, low: 5 };
        let rows = [
            // Whether it is connected mode, whether there is a connection, and whether that one is named: what became of two.
            (true, false, false, Lost { not_connected: 2, ..Lost::default() }),
            (true, true, false, Lost { full: 1, ..Lost::default() }),
            (true, true, true, Lost::default()),
            (false, true, false, Lost { not_connected: 2, ..Lost::default() }),
            (false, true, true, Lost::default()),
            (false, false, true, Lost { gone: 2, ..Lost::default() }),
        ];
        for (connected, there, named, expected) in rows {
            let mut mux = Mux::new(Config { connected, send_bytes, ..Config::default() });
            let worker = mux.clone_worker(1, now);
            let psock = mux.attach("line".parse().unwrap(), Limits::default(), now).unwrap();
            if !there {
                mux.handle_error(psock, 104, now);
            }
            let mut completions = Completions::default();
            for _ in 0..2 {
                let bytes = Bytes::from_static(b"0123456789");
                completions.sends.push((worker, named.then_some(psock), bytes));
            }
            completions.apply(&mut mux, now);
            assert_eq!(completions.lost, expected, "{connected} {there} {named}");
            let Lost { full, not_connected, gone, .. } = expected;
            let sent: Vec<_> = mux.show().workers.iter().map(|worker| worker.stats.tx_msgs).collect();
            assert_eq!(sent, [2 - full - not_connected - gone], "{connected} {there} {named}");
            assert_eq!(
                completions.unsent.len() as u64,
                full + not_connected + gone,
                "all are to be reported"
            );
        }
        let (some, more) =
            (Lost { full: 1, ..Lost::default() }, Lost { full: 3, gone: 2, ..Lost::default() });
        assert_eq!(
            more.since(&some).to_string(),
            "2 found all connections full, 2 were for one that had ended"
        );
    }
}
