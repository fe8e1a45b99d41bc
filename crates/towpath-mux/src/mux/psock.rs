//! A psock: an attached connection with its framing, its queues and its state.

use std::collections::VecDeque;
use std::fmt;

use super::body::Body;
use super::event::Cause;
use super::message::Message;
use super::tx_queue::TxQueue;
use super::worker;
use crate::Time;
use crate::assembler::Assembler;

slotmap::new_key_type! {
    /// Names a connection; not valid for another one later.
    pub struct Id;
}

impl Id {
    /// Its index and its generation: what names it outside of this process.
    pub fn parts(self) -> (u32, u32) {
        let ffi = slotmap::Key::data(&self).as_ffi();
        (ffi as u32, (ffi >> 32) as u32)
    }

    /// The opposite. Parts that are no connection's give an id that no connection has.
    pub fn from_parts(index: u32, generation: u32) -> Self {
        slotmap::KeyData::from_ffi(u64::from(generation) << 32 | u64::from(index)).into()
    }
}

/// As KCM and `towpath ctl show mux` name it: `psock-1`.
impl fmt::Display for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "psock-{}", self.parts().0)
    }
}

#[derive(Debug)]
pub(super) struct Psock {
    pub(super) assembler: Assembler,
    pub(super) phase: Phase,
    /// The assembler's buffer is with whoever reads the socket: this many bytes of it were there before.
    pub(super) reading: Option<usize>,
    /// How much room the next read is given, in bytes.
    pub(super) read_size: usize,
    /// Not read because something is full. Each remembers itself for its hysteresis.
    pub(super) full: bool,
    /// What was last told of [`Interest`].
    pub(super) reported: Interest,
    /// Messages that are queued or with workers.
    pub(super) outstanding: usize,
    /// Of these, those with workers.
    pub(super) in_hand: usize,
    /// Bytes that these are counted with.
    pub(super) memory: usize,
    /// Bytes that the assembler is counted with.
    pub(super) buffered: usize,
    /// The next message's number.
    pub(super) next: u64,
    /// Messages that wait for others of this connection.
    pub(super) pending: VecDeque<Message>,
    /// [`super::Order::Serial`]: one of them is ready or with a worker.
    pub(super) busy: bool,
    /// [`super::Order::Sticky`]: whose they are.
    pub(super) bound: Option<worker::Id>,
    /// [`super::Order::Replies`]: answers that wait for earlier ones; the first is that of message `first`.
    pub(super) answers: VecDeque<Answer>,
    pub(super) first: u64,
    pub(super) tx: TxQueue,
    /// Among those that [`super::Mux::handle_completions`] has yet to look after.
    pub(super) unsettled: bool,
    /// When anything last happened, and when the peer last took something.
    pub(super) active: Time,
    /// When closing it has taken too long.
    pub(super) deadline: Option<Time>,
    /// The earliest of its entries among the timers.
    pub(super) armed: Option<Time>,
    pub(super) stats: Stats,
}

#[derive(Debug)]
pub(super) enum Phase {
    Open,
    /// Nothing more is read; it ends when its messages are done and its replies sent.
    Closing {
        cause: Cause,
        hand_back: bool,
    },
    /// It has ended; its messages are still worked on. With the cause until that is told, which waits for who writes to it.
    Dead {
        unreported: Option<Cause>,
    },
}

/// What answers a message, in the order of messages.
#[derive(Debug, Default)]
pub(super) struct Answer {
    /// Each with how many answers are in it.
    pub(super) replies: Vec<(Body, u32)>,
    pub(super) done: bool,
}

/// What to wait for on a connection's socket.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Interest {
    /// Bytes to read: call [`super::Mux::reserve`].
    pub read: bool,
    /// Room to write: call [`super::Mux::handle_writable`].
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

/// A connection's state, printed as KCM does: `Rsvd-2 RxPause RdyRx TxWait`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Status {
    /// Messages with workers.
    pub reserved: usize,
    /// A message is not whole.
    pub rx_wait: bool,
    /// Not read because something is full.
    pub rx_pause: bool,
    /// Messages wait for a worker.
    pub ready: bool,
    /// Not read any more.
    pub rx_stop: bool,
    /// The peer takes no more for now.
    pub tx_wait: bool,
    /// Nothing is sent any more.
    pub tx_stop: bool,
    /// It ends when what it holds is done.
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
            next: 0,
            pending: VecDeque::new(),
            busy: false,
            bound: None,
            answers: VecDeque::new(),
            first: 0,
            tx: TxQueue::new(now),
            unsettled: false,
            active: now,
            deadline: None,
            armed: None,
            stats: Stats::default(),
        }
    }

    /// So many of its messages are with a worker from now on.
    pub(super) fn hold(&mut self, count: usize) {
        self.stats.reserved += u64::from(self.in_hand == 0);
        self.in_hand += count;
    }

    pub(super) fn is_open(&self) -> bool {
        matches!(self.phase, Phase::Open)
    }

    pub(super) fn is_dead(&self) -> bool {
        matches!(self.phase, Phase::Dead { .. })
    }

    /// Whether nobody holds anything of it.
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
