//! A psock (KCM): an attached connection with its framing, queues and state.

use std::collections::VecDeque;
use std::fmt;

use super::body::Body;
use super::event::Cause;
use super::message::Message;
use super::opened::Opened;
use super::stream::Stream;
use super::tx_queue::{SEPARATE, TxQueue};
use super::worker;
use crate::Time;
use crate::assembler::Assembler;

slotmap::new_key_type! {
    /// Identifies a connection. Ids are not reused.
    pub struct Id;
}

impl Id {
    /// Index and generation, for use outside of this process.
    pub fn parts(self) -> (u32, u32) {
        let ffi = slotmap::Key::data(&self).as_ffi();
        (ffi as u32, (ffi >> 32) as u32)
    }

    /// The inverse of [`Id::parts`]. Unknown parts give an id without a connection.
    pub fn from_parts(index: u32, generation: u32) -> Self {
        slotmap::KeyData::from_ffi(u64::from(generation) << 32 | u64::from(index)).into()
    }
}

/// `psock-1`, as in KCM and `towpath ctl show mux`.
impl fmt::Display for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "psock-{}", self.parts().0)
    }
}

#[derive(Debug)]
pub(super) struct Psock {
    pub(super) assembler: Assembler,
    pub(super) phase: Phase,
    /// A reader has the assembler's buffer, which had this number of bytes before the read.
    pub(super) reading: Option<usize>,
    /// Space of the next read in bytes.
    pub(super) read_size: usize,
    /// Not read because its messages reach [`super::Config::psock_bytes`].
    pub(super) full: bool,
    /// The interest that was last reported.
    pub(super) reported: Interest,
    /// Number of messages that are queued or with workers.
    pub(super) outstanding: usize,
    /// Number of messages with workers.
    pub(super) in_hand: usize,
    /// Bytes charged for `outstanding` messages.
    pub(super) memory: usize,
    /// Bytes charged for the assembler.
    pub(super) buffered: usize,
    /// Messages were received or sent on it before it was attached ([`super::Mux::attach_resumed`]).
    pub(super) resumed: bool,
    /// Its opened event.
    pub(super) opened: Opened,
    /// Number of the next message.
    pub(super) next: u64,
    /// Messages that wait for an earlier message of this connection.
    pub(super) pending: VecDeque<Message>,
    /// [`super::Order::Serial`]: a message is ready or with a worker.
    pub(super) busy: bool,
    /// [`super::Order::Sticky`]: the worker of this connection.
    pub(super) bound: Option<worker::Id>,
    /// [`super::Order::Replies`]: replies that wait for earlier ones. The first belongs to message `first`.
    pub(super) answers: VecDeque<Answer>,
    pub(super) first: u64,
    /// Messages that are received or given in parts, by number.
    pub(super) streams: VecDeque<Stream>,
    /// Why the connection is closed after the message that arrives in parts, and whether it is handed back.
    pub(super) then: Option<(Cause, bool)>,
    pub(super) tx: TxQueue,
    /// The connection was reset by its peer or a worker, or reading, writing or TLS failed.
    pub(super) reset: bool,
    /// It ended at once: messages that no worker has begun are discarded.
    pub(super) cut: bool,
    /// In the list of deferred updates.
    pub(super) unsettled: bool,
    /// Time of the last traffic or completion.
    pub(super) active: Time,
    /// When a closing connection ends at the latest.
    pub(super) deadline: Option<Time>,
    /// Time of its current timer entry.
    pub(super) armed: Option<Time>,
    pub(super) stats: Stats,
}

#[derive(Debug)]
pub(super) enum Phase {
    Open,
    /// Not read any more. Ends when its messages are done and its replies are sent.
    Closing {
        cause: Cause,
        hand_back: bool,
    },
    /// Ended; workers may still hold its messages. `unreported`: the cause, until its writer has returned and
    /// the end is reported.
    Dead {
        unreported: Option<Cause>,
    },
}

/// Replies to one message ([`super::Order::Replies`]).
#[derive(Debug, Default)]
pub(super) struct Answer {
    /// Each with the number of replies in it.
    pub(super) replies: Vec<(Body, u32)>,
    pub(super) done: bool,
    /// The connection is closed after these replies.
    pub(super) last: bool,
}

impl Answer {
    /// Adds replies. From [`SEPARATE`] pieces on, short ones are joined.
    pub(super) fn push(&mut self, bytes: Body, replies: u32) {
        if bytes.is_empty() {
            return;
        }
        if self.replies.len() >= SEPARATE
            && let Some((last, count)) = self.replies.last_mut()
            && last.append(&bytes)
        {
            *count += replies;
            return;
        }
        self.replies.push((bytes, replies));
    }
}

/// The readiness to wait for on a connection's socket.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Interest {
    /// Readable: call [`super::Mux::reserve`].
    pub read: bool,
    /// Writable: call [`super::Mux::handle_writable`].
    pub write: bool,
}

towpath_metrics::metrics! {
    /// Counters of one connection, under KCM's names (net/kcm/kcmproc.c, statistics of `psock` and `strp`).
    pub struct Stats in "mux_connection" {
        /// Whole messages received.
        pub rx_msgs: counter messages,
        /// Bytes of whole messages received.
        pub rx_bytes: counter bytes,
        /// Messages sent completely.
        pub tx_msgs: counter messages,
        /// Bytes sent.
        pub tx_bytes: counter bytes,
        /// Transitions from no message with workers to at least one.
        pub reserved: counter events,
        /// Transitions from at least one message with workers to none.
        pub unreserved: counter events,
        /// Connections that ended by an error while receiving.
        pub rx_aborts: counter connections,
        /// Connections that the framing gave back at the first byte of a message.
        pub rx_intr: counter connections,
        /// Connections that the framing gave back after it had asked for more bytes of the message.
        pub rx_unrecov_intr: counter connections,
        /// Connections that ended because the mux was full.
        pub rx_mem_fail: counter connections,
        /// Reads that left an incomplete message.
        pub rx_need_more: counter events,
        /// Lengths that end before bytes already known to belong to the message.
        pub rx_bad_hdr_len: counter messages,
        /// Messages or headers above the size limit.
        pub rx_msg_too_big: counter messages,
        /// Messages that were not complete in time.
        pub rx_msg_timeouts: counter messages,
        /// Connections that ended with unsent data.
        pub tx_aborts: counter connections,
    }
}

/// State of a connection, printed as by KCM: `Rsvd-2 RxPause RdyRx TxWait`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Status {
    /// Number of messages with workers.
    pub reserved: usize,
    /// A message is incomplete.
    pub rx_wait: bool,
    /// Not read because a bound is reached.
    pub rx_pause: bool,
    /// Messages wait for a worker.
    pub ready: bool,
    /// Not read any more.
    pub rx_stop: bool,
    /// The socket is not writable.
    pub tx_wait: bool,
    /// Nothing is sent any more.
    pub tx_stop: bool,
    /// Ends when its messages are done.
    pub done: bool,
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = [
            (self.done, "Done"),
            (self.tx_stop, "TxStop"),
            (self.rx_stop, "RxStop"),
            (self.rx_pause, "RxPause"),
            (self.ready, "RdyRx"),
            (self.rx_wait, "RxWait"),
            (self.tx_wait, "TxWait"),
        ];
        let mut space = "";
        if self.reserved > 0 {
            write!(f, "Rsvd-{}", self.reserved)?;
            space = " ";
        }
        for (_, name) in names.iter().filter(|(is, _)| *is) {
            write!(f, "{space}{name}")?;
            space = " ";
        }
        Ok(())
    }
}

impl Psock {
    pub(super) fn new(assembler: Assembler, now: Time) -> Self {
        Self {
            assembler,
            phase: Phase::Open,
            reading: None,
            read_size: 0,
            full: false,
            reported: Interest::default(),
            outstanding: 0,
            in_hand: 0,
            memory: 0,
            buffered: 0,
            resumed: false,
            opened: Opened::No,
            next: 0,
            pending: VecDeque::new(),
            busy: false,
            bound: None,
            answers: VecDeque::new(),
            first: 0,
            streams: VecDeque::new(),
            then: None,
            tx: TxQueue::new(now),
            reset: false,
            cut: false,
            unsettled: false,
            active: now,
            deadline: None,
            armed: None,
            stats: Stats::default(),
        }
    }

    /// Counts `count` more messages with workers. Returns their number.
    pub(super) fn hold(&mut self, count: usize) -> usize {
        self.stats.reserved += u64::from(self.in_hand == 0);
        self.in_hand += count;
        self.in_hand
    }

    pub(super) fn is_open(&self) -> bool {
        matches!(self.phase, Phase::Open)
    }

    pub(super) fn is_dead(&self) -> bool {
        matches!(self.phase, Phase::Dead { .. })
    }

    /// Drops the replies that wait for earlier ones. Returns their number.
    pub(super) fn drop_answers(&mut self) -> u64 {
        let mut count = 0;
        for (bytes, replies) in self.answers.iter_mut().flat_map(|answer| answer.replies.drain(..)) {
            self.tx.bytes -= bytes.len();
            count += u64::from(replies);
        }
        count
    }

    /// Returns true if replies may be sent.
    pub(super) fn accepts(&self) -> bool {
        !self.is_dead() && !self.tx.shut
    }

    /// Returns true if no worker, reader or writer holds anything of it.
    pub(super) fn is_free(&self) -> bool {
        self.outstanding == 0 && self.reading.is_none() && !self.tx.sending
    }

    pub(super) fn status(&self) -> Status {
        Status {
            reserved: self.in_hand,
            rx_wait: self.assembler.held() > 0,
            rx_pause: self.is_open() && !self.reported.read,
            ready: self.outstanding > self.in_hand,
            rx_stop: !self.is_open(),
            tx_wait: self.tx.blocked,
            tx_stop: self.is_dead(),
            done: !self.is_open(),
        }
    }
}
