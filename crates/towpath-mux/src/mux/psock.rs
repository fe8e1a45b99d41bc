//! A psock: an attached connection with its framing, its queues and its state.

use std::collections::VecDeque;
use std::fmt;

use super::body::Body;
use super::event::Cause;
use super::message::Message;
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
    pub(super) send_full: bool,
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
    pub(super) send: VecDeque<Outgoing>,
    /// Bytes in `send` and with whoever writes the socket.
    pub(super) send_bytes: usize,
    /// Bytes of the first of `send` that have left.
    pub(super) left: usize,
    /// The queue is with whoever writes the socket.
    pub(super) sending: bool,
    /// The socket took less than it was given.
    pub(super) blocked: bool,
    pub(super) transmit_reported: bool,
    /// Among those that [`super::Mux::handle_completions`] has yet to look after.
    pub(super) unsettled: bool,
    /// When anything last happened, and when the peer last took something.
    pub(super) active: Time,
    pub(super) progress: Time,
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

#[derive(Debug)]
pub(super) struct Outgoing {
    pub(super) bytes: Body,
    /// Messages in it.
    pub(super) messages: u32,
    /// It may go to another connection.
    pub(super) connected: bool,
    /// Its memory is nobody else's, or it is long.
    pub(super) owned: bool,
}

impl Outgoing {
    pub(super) fn new(bytes: impl Into<Body>, messages: u32) -> Self {
        Self { bytes: bytes.into(), messages, connected: false, owned: false }
    }

    /// Nobody knows how long it waits: then it has memory of its own.
    pub(super) fn own(&mut self) {
        if !std::mem::replace(&mut self.owned, true) {
            self.bytes.own();
        }
    }
}

/// What to wait for on a connection's socket.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Interest {
    /// Bytes to read: call [`super::Mux::reserve`].
    pub read: bool,
    /// Room to write: call [`super::Mux::handle_writable`].
    pub write: bool,
}

/// A connection's counters, under KCM's names (net/kcm/kcmproc.c; `psock` and `strp` statistics).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Whole messages that arrived.
    pub rx_msgs: u64,
    /// Their bytes.
    pub rx_bytes: u64,
    /// Messages that were sent, all of them.
    pub tx_msgs: u64,
    /// Their bytes.
    pub tx_bytes: u64,
    /// How often it went from no message with the workers to some.
    pub reserved: u64,
    /// How often back.
    pub unreserved: u64,
    /// Ends by an error while receiving.
    pub rx_aborts: u64,
    /// Given back by the framing at a message's first byte.
    pub rx_intr: u64,
    /// Given back by the framing behind bytes that it had already asked more for.
    pub rx_unrecov_intr: u64,
    /// Ends because the mux was full.
    pub rx_mem_fail: u64,
    /// Reads behind which a message was not whole.
    pub rx_need_more: u64,
    /// Lengths that end before bytes that belong to the message.
    pub rx_bad_hdr_len: u64,
    /// Messages over the limit.
    pub rx_msg_too_big: u64,
    /// Messages that were not whole in time.
    pub rx_msg_timeouts: u64,
    /// Ends with something not sent.
    pub tx_aborts: u64,
}

impl Stats {
    pub(super) fn add(&mut self, other: &Self) {
        let Self {
            rx_msgs,
            rx_bytes,
            tx_msgs,
            tx_bytes,
            reserved,
            unreserved,
            rx_aborts,
            rx_intr,
            rx_unrecov_intr,
            rx_mem_fail,
            rx_need_more,
            rx_bad_hdr_len,
            rx_msg_too_big,
            rx_msg_timeouts,
            tx_aborts,
        } = other;
        self.rx_msgs += rx_msgs;
        self.rx_bytes += rx_bytes;
        self.tx_msgs += tx_msgs;
        self.tx_bytes += tx_bytes;
        self.reserved += reserved;
        self.unreserved += unreserved;
        self.rx_aborts += rx_aborts;
        self.rx_intr += rx_intr;
        self.rx_unrecov_intr += rx_unrecov_intr;
        self.rx_mem_fail += rx_mem_fail;
        self.rx_need_more += rx_need_more;
        self.rx_bad_hdr_len += rx_bad_hdr_len;
        self.rx_msg_too_big += rx_msg_too_big;
        self.rx_msg_timeouts += rx_msg_timeouts;
        self.tx_aborts += tx_aborts;
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
            send_full: false,
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
            send: VecDeque::new(),
            send_bytes: 0,
            left: 0,
            sending: false,
            blocked: false,
            transmit_reported: false,
            unsettled: false,
            active: now,
            progress: now,
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
        self.outstanding == 0 && self.reading.is_none() && !self.sending
    }

    pub(super) fn status(&self) -> Status {
        Status {
            reserved: self.in_hand,
            rx_wait: self.assembler.held() > 0,
            rx_pause: self.is_open() && !self.reported.read,
            ready: self.outstanding > self.in_hand,
            rx_stop: !self.is_open(),
            tx_wait: self.blocked,
            tx_stop: self.is_dead(),
            done: !self.is_open(),
        }
    }
}
