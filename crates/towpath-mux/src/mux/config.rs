//! Configuration of a mux.

use std::time::Duration;

use crate::framing::Framing;
pub use crate::order::Order;

/// What happens to the connections of a worker that dies or leaves: those bound to it ([`Order::Sticky`]), and in other orders those
/// whose messages it holds and those that it opened ([`super::Mux::report_opened`]).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum OnWorkerEnd {
    /// Other workers continue them.
    #[default]
    Move,
    /// They end after the replies so far. Their messages are given up.
    Close {
        /// Sent last; empty for nothing.
        goodbye: &'static [u8],
    },
}

/// Connected mode: what to do with a message whose connection ended before it was sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Retry {
    /// Return it to the sender.
    Never,
    /// Send it on another connection if no byte of it was sent; otherwise return it.
    #[default]
    IfNoByteLeft,
    /// Always send it on another connection, also if the peer's TCP has not acknowledged all of it: every
    /// message is acknowledged at least once, or returned. A message may arrive twice. A peer's TCP
    /// acknowledges bytes that its application has not read: what an application had not processed when it
    /// ended is lost, and only a reply of the application proves otherwise. The bytes of a Unix socket are
    /// acknowledged when the peer has read them.
    Always,
}

/// A bound with hysteresis: full from `high` bytes until `low` bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bound {
    /// Becomes full at this number of bytes.
    pub high: usize,
    /// Stays full above this number of bytes.
    pub low: usize,
}

impl Bound {
    /// Full at `high`, until half of it.
    pub const fn of(high: usize) -> Self {
        Self { high, low: high / 2 }
    }

    pub(super) const fn is_full(self, was: bool, bytes: usize) -> bool {
        if was { bytes > self.low } else { bytes >= self.high }
    }
}

/// Configuration of a mux.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// Ordering of messages. No default: [`Config::for_framing`] has that of the protocol.
    pub order: Order,
    /// Connected mode: all connections lead to one equivalent peer, and [`super::Mux::send`] chooses one.
    /// Default: false.
    pub connected: bool,
    /// What happens to a message of [`super::Mux::send`] whose connection ended. Default:
    /// [`Retry::IfNoByteLeft`].
    pub retry: Retry,
    /// [`Retry::Always`]: bytes of messages that were sent on a connection and that its peer has not
    /// acknowledged. They are kept. A connection with as many sends no more until the peer acknowledges some.
    /// One write may exceed it. Default: 4 MiB.
    pub unacked_bytes: usize,
    /// Number of times that a message is given to another worker because its worker died. After that it is
    /// returned by [`super::Event::Undone`]. Default: 2.
    pub redeliver: u8,
    /// What happens to the connections of a worker that ends. Default: [`OnWorkerEnd::Move`].
    pub on_worker_end: OnWorkerEnd,
    /// Maximum number of messages that a worker gets in one turn, 1 to 64. A worker that reads a connection
    /// may process more short messages of it ([`super::Batch`]), unless this is 1. Default: 64.
    pub batch: usize,
    /// Maximum number of messages of one connection that workers hold at a time, at least 1. `None`: all workers but one have messages
    /// of the connection, as many as a worker takes in a turn, while another connection was attached or sent a message in the last 10 s;
    /// otherwise no limit. [`Order::Serial`] and [`Order::Sticky`] have no limit either: a connection has one message or one worker at
    /// a time. Default: `None`. `Some(usize::MAX)`: no limit, so that no message waits while a worker is idle.
    pub in_flight: Option<usize>,
    /// [`Order::Sticky`]: a connection moves to the worker with the fewest connections when its own worker has more than this
    /// number in addition, at least 1. It moves between two messages, with no message outstanding. `None`: it never moves, because workers
    /// may keep state of a connection. Default: `None`.
    pub rebalance: Option<usize>,
    /// A worker that holds this number of message bytes gets no more. A worker without messages always gets
    /// one. Default: 1 MiB.
    pub worker_bytes: usize,
    /// Bytes of buffer space for a read. Grows to four times this value while the socket has more. Default:
    /// 64 KiB.
    pub read: usize,
    /// Bytes of a connection's whole messages that are queued or with workers. A full connection is not read.
    /// Default: 1 MiB.
    pub psock_bytes: Bound,
    /// Bytes of a message that is delivered in parts ([`crate::assembler::Limits::part`]) and that its worker has not done. The connection is
    /// not read above this. Default: 256 KiB.
    pub stream_bytes: Bound,
    /// Bytes of replies that the peer has not accepted, or that wait for an earlier reply
    /// ([`Order::Replies`]). A full connection is not read. Default: 256 KiB.
    pub send_bytes: Bound,
    /// Bytes of such replies above which the connection ends. A single reply may exceed it. Default: 16 MiB.
    pub send_most: usize,
    /// All bytes that the mux holds. A full mux reads nothing. If it would stay full with all messages done,
    /// it ends the connection that holds the most. Default: 256 MiB.
    pub mux_bytes: Bound,
    /// Time without traffic and messages after which a connection ends. Default: `None`, no limit.
    pub idle: Option<Duration>,
    /// Time without progress after which a connection with data to send ends. Default: 60 s.
    pub send_time: Option<Duration>,
    /// Cost of waking a worker. Messages that take less time are left to an awake worker. 0 wakes an idle
    /// worker for every message. Default: 20 us.
    pub wake_cost: Duration,
    /// Maximum time that the next message waits for an awake worker while another worker is idle. Default: 1 ms.
    pub patience: Duration,
}

impl Config {
    /// Default configuration with this order.
    pub const fn new(order: Order) -> Self {
        Self {
            order,
            connected: false,
            retry: Retry::IfNoByteLeft,
            unacked_bytes: 4 << 20,
            redeliver: 2,
            on_worker_end: OnWorkerEnd::Move,
            batch: 64,
            in_flight: None,
            rebalance: None,
            worker_bytes: 1 << 20,
            read: 64 << 10,
            psock_bytes: Bound::of(1 << 20),
            stream_bytes: Bound::of(256 << 10),
            send_bytes: Bound::of(256 << 10),
            send_most: 16 << 20,
            mux_bytes: Bound::of(256 << 20),
            idle: None,
            send_time: Some(Duration::from_secs(60)),
            wake_cost: Duration::from_micros(20),
            patience: Duration::from_millis(1),
        }
    }

    /// Default configuration with the order that the framing's protocol needs ([`Framing::order`]).
    ///
    /// # Examples
    ///
    /// ```
    /// use towpath_mux::framing::Framing;
    /// use towpath_mux::mux::{Config, Order};
    ///
    /// assert_eq!(Config::for_framing(&Framing::parse("http1")?).order, Order::Replies);
    /// assert_eq!(Config::for_framing(&Framing::parse("smtp")?).order, Order::Sticky);
    /// # Ok::<(), towpath_mux::framing::ParseError>(())
    /// ```
    pub const fn for_framing(framing: &Framing) -> Self {
        Self::new(framing.order())
    }

    /// The same for messages of up to `bytes` bytes: two replies of this size may wait to be sent.
    #[must_use]
    pub fn for_messages(self, bytes: usize) -> Self {
        Self { send_most: self.send_most.max(bytes.saturating_mul(2)), ..self }
    }
}
