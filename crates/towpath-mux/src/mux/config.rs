//! What a mux is told when it is made.

use std::time::Duration;

/// What keeps its order when several workers work at once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Order {
    /// Nothing: the first worker that is free takes the next message (KCM).
    #[default]
    None,
    /// Messages are worked on in parallel; the replies to a connection leave in the order of its messages.
    Replies,
    /// One message of a connection at a time, on any worker.
    Serial,
    /// All messages of a connection on one worker, until that leaves.
    Sticky,
    /// One message with the same hash ([`crate::framing::Message::hash`]) at a time, on any worker and over all connections. A
    /// hash of 0 means no key, and no order.
    Key,
}

/// What becomes of a connected mode's message whose connection ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Retry {
    /// It is returned.
    Never,
    /// It is sent on another connection if no byte of it left, and returned otherwise.
    #[default]
    IfNoByteLeft,
    /// It is sent again on another connection: at least once.
    Always,
}

/// A bound with hysteresis: full at `high`, not full any more at `low`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bound {
    /// Bytes from which on it is full.
    pub high: usize,
    /// Bytes down to which it stays full.
    pub low: usize,
}

impl Bound {
    /// Full at `high`, until half of it is free.
    pub const fn of(high: usize) -> Self {
        Self { high, low: high / 2 }
    }

    pub(super) const fn is_full(self, was: bool, bytes: usize) -> bool {
        if was { bytes > self.low } else { bytes >= self.high }
    }
}

/// What a mux is told when it is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// What keeps its order.
    pub order: Order,
    /// Whether all connections lead to one equivalent peer, so that [`super::Mux::send`] may choose one.
    pub connected: bool,
    /// What becomes of a message of [`super::Mux::send`] whose connection ended.
    pub retry: Retry,
    /// How often a message is given to another worker because the one that held it died; then it comes back as
    /// [`super::Event::Undone`]. 2.
    pub redeliver: u8,
    /// The most messages that a worker gets in one turn, 1 to 64. Short ones that it has read itself ([`super::Batch`]) may be
    /// more, unless this is 1. 64.
    pub batch: usize,
    /// Bytes of messages that a worker may hold before it gets no more; it always gets one. 1 MiB.
    pub worker_bytes: usize,
    /// Bytes that a read is given room for; up to four times that when the socket had more. 64 KiB.
    pub read: usize,
    /// Bytes of a connection's whole messages that are queued or being worked on. Full, it is not read. 1 MiB.
    pub psock_bytes: Bound,
    /// Bytes of replies that a connection's peer has not taken, or that wait for an earlier one ([`Order::Replies`]). Full, it is not
    /// read. 256 KiB.
    pub send_bytes: Bound,
    /// Bytes of such replies above which a connection ends; one may always wait. 16 MiB.
    pub send_most: usize,
    /// All bytes that the mux holds. Full, nothing is read; if it would be full even with all messages done, the connection that holds
    /// most ends. 256 MiB.
    pub mux_bytes: Bound,
    /// How long a connection may be without traffic and without work; `None` for ever.
    pub idle: Option<Duration>,
    /// How long a peer may take nothing of what is sent to it. 60 s.
    pub send_time: Option<Duration>,
    /// What waking a worker costs: messages are left to one that is awake when they take less time than this. 20 us;
    /// zero wakes an idle worker for every message.
    pub wake_cost: Duration,
    /// How long a message waits at most, while a worker is idle, for one that was thought to be done soon. 1 ms.
    pub patience: Duration,
}

impl Config {
    /// The default for messages of up to so many bytes: answers that are as long may wait to be sent, two of them.
    pub fn for_messages(bytes: usize) -> Self {
        let default = Self::default();
        Self { send_most: default.send_most.max(bytes.saturating_mul(2)), ..default }
    }
}

impl Default for Config {
    fn default() -> Self {
        Self {
            order: Order::None,
            connected: false,
            retry: Retry::IfNoByteLeft,
            redeliver: 2,
            batch: 64,
            worker_bytes: 1 << 20,
            read: 64 << 10,
            psock_bytes: Bound::of(1 << 20),
            send_bytes: Bound::of(256 << 10),
            send_most: 16 << 20,
            mux_bytes: Bound::of(256 << 20),
            idle: None,
            send_time: Some(Duration::from_secs(60)),
            wake_cost: Duration::from_micros(20),
            patience: Duration::from_millis(1),
        }
    }
}
