//! The multiplexor's core: connections on one side, workers on the other, messages between them. It has no
//! descriptors, clock or threads. The caller reads and writes sockets and passes the time.
//!
//! What: bytes of a connection ([`Mux::reserve`], [`Mux::handle_read`]) become messages. A free worker takes
//! messages ([`Mux::poll_messages`]), replies ([`Mux::reply`]) and completes them ([`Mux::done`]). Replies
//! leave on the connection of their message ([`Mux::transmit`]). [`Mux::poll_event`] returns what the caller
//! has to do; [`Mux::poll_timeout`] returns when to call [`Mux::handle_timeout`].
//!
//! Invariants:
//! - No ready message waits while a worker is idle. An idle worker is woken, unless an awake worker will
//!   finish the message sooner than the wake-up takes; after [`Config::patience`] it is woken in any case.
//! - Each message is with at most one worker and is done once.
//! - received + opened = done + undone + discarded + queued + in_hand ([`Totals`], checked by [`Mux::check`]).
//! - Before a message of a connection that has none waiting, every other connection gets at most one turn of a worker.
//! - All memory is counted in bytes and bounded ([`Config`]). A full connection or mux is not read, so that
//!   TCP's window closes. A connection whose peer does not read, or sends slowly, affects only itself.
//! - A message is sent whole and never interleaved with another, unless its connection ends.
//! - [`Retry::Always`]: a message of [`Mux::send`] is acknowledged by a peer's TCP, kept, or returned.
//!
//! Parts: `receive.rs` reads and assembles, `schedule.rs` and `wake.rs` choose workers (with the tables in
//! `workers.rs`, `ready.rs` and `sticky.rs`), `batch.rs` has messages that were read together, `transmit.rs` sends,
//! `unacked.rs` keeps what peers have not acknowledged, `opened.rs` reports new connections to workers, `close.rs`, `timer.rs`,
//! `discard.rs` and `worker_end.rs` end connections, `stream.rs` gives long messages in parts, `stats.rs` counts.
//!
//! Reference: Linux, net/kcm/kcmsock.c and Documentation/networking/kcm.rst, which define the terms. KCM
//! assigns a message to a worker when the message arrives. Here a free worker takes the next message, so
//! that no message waits behind a busy worker.

mod balance;
mod batch;
mod body;
mod close;
mod config;
mod deferred;
mod discard;
mod event;
#[cfg(feature = "io")]
mod handle;
mod in_flight;
mod memory;
mod message;
mod opened;
mod order;
mod pool;
pub mod psock;
mod ready;
mod receive;
mod schedule;
mod service_time;
mod stats;
mod sticky;
mod stream;
mod summary;
mod timer;
mod transmit;
mod tx_queue;
mod unacked;
mod wake;
pub mod worker;
mod worker_end;
mod workers;
#[cfg(any(test, feature = "test-util"))]
pub mod world;

use std::collections::VecDeque;

use slotmap::SlotMap;

pub use batch::Batch;
pub use body::{Body, Lease};
pub use config::{Bound, Config, OnWorkerEnd, Order, Retry};
pub use event::{Cause, End, Event, Resume, SendError, Undelivered};
pub use message::{Completion, Message, Ticket, View};
pub use receive::AttachError;
pub use stats::{PsockRow, Show, Totals, WorkerRow};
pub use stream::{MessagePart, PartKind};
pub use summary::Summary;
pub use transmit::{Outcome, Transmit};

use crate::Time;
use balance::Balance;
use deferred::Deferred;
use in_flight::InFlight;
use memory::Memory;
use order::KeyQueues;
use psock::Psock;
use ready::Ready;
use receive::Reads;
use service_time::ServiceTime;
use stats::Counters;
use timer::Timers;
use workers::Workers;

/// Joins connections to workers. See the documentation of this module.
///
/// # Examples
///
/// ```
/// use towpath_mux::Time;
/// use towpath_mux::assembler::Limits;
/// use towpath_mux::mux::{Config, Event, Mux, Order, Outcome};
///
/// let mut mux = Mux::new(Config::new(Order::Replies));
/// let now = Time::default();
/// let psock = mux.attach("line".parse()?, Limits::default(), now)?;
/// let worker = mux.clone_worker(1, now);
///
/// // One whole message, and the start of another.
/// mux.handle_bytes(psock, b"hello\nwor", now);
/// let mut batch = Vec::new();
/// mux.poll_messages(worker, now, &mut batch);
/// assert_eq!(batch[0].payload(), b"hello");
///
/// // Echo it.
/// mux.reply(worker, batch[0].ticket(), batch[0].bytes().clone(), now)?;
/// mux.done(worker, batch[0].ticket(), now);
/// let Some(mut transmit) = mux.transmit(psock) else { panic!("nothing to send") };
/// assert_eq!(transmit.slices(1).next(), Some(&b"hello\n"[..]));
/// transmit.advance(6);
/// mux.handle_transmitted(transmit, Outcome::Taken, now);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Mux {
    config: Config,
    /// Latest time passed by the caller.
    now: Time,
    draining: bool,
    /// Connections have opened events ([`Mux::report_opened`]).
    reports_opened: bool,
    /// [`Event::Drained`] was reported.
    drained: bool,
    psocks: SlotMap<psock::Id, Psock>,
    workers: Workers,
    /// Messages that any worker may take.
    ready: Ready,
    keys: KeyQueues,
    service_time: ServiceTime,
    in_flight: InFlight,
    memory: Memory,
    balance: Balance,
    timers: Timers,
    events: VecDeque<Event>,
    reads: Reads,
    deferred: Deferred,
    counters: Counters,
}

impl Mux {
    /// Returns a mux without connections and workers.
    ///
    /// # Panics
    ///
    /// Panics if `config.batch` or `config.in_flight` is 0.
    pub fn new(config: Config) -> Self {
        assert!(
            config.batch > 0 && config.in_flight != Some(0),
            "a batch, and the share of a connection, is at least one message"
        );
        Self {
            config,
            now: Time::default(),
            draining: false,
            reports_opened: false,
            drained: false,
            psocks: SlotMap::with_key(),
            workers: Workers::default(),
            ready: Ready::default(),
            keys: KeyQueues::default(),
            service_time: ServiceTime::default(),
            in_flight: InFlight::new(&config),
            memory: Memory::new(config.mux_bytes),
            balance: Balance::default(),
            timers: Timers::default(),
            events: VecDeque::new(),
            reads: Reads::default(),
            deferred: Deferred::default(),
            counters: Counters::default(),
        }
    }

    /// The configuration passed to [`Mux::new`].
    pub const fn config(&self) -> &Config {
        &self.config
    }

    /// Returns true after [`Mux::drain`]. A draining mux refuses new connections.
    pub const fn is_draining(&self) -> bool {
        self.draining
    }

    /// Returns true if the memory bound is reached ([`Config::mux_bytes`]). No connection is read meanwhile.
    pub const fn is_full(&self) -> bool {
        self.memory.is_full()
    }

    /// Returns the next event. Call this after every other call, until it returns `None`.
    pub fn poll_event(&mut self) -> Option<Event> {
        if self.events.is_empty() {
            // The call before this one may have been the last that could free memory.
            self.shed_memory();
        }
        if let Some(event) = self.events.pop_front() {
            return Some(event);
        }
        if let Some(worker) = self.wake() {
            return Some(Event::Wake(worker));
        }
        if self.draining && !self.drained && self.psocks.is_empty() {
            self.drained = true;
            return Some(Event::Drained);
        }
        None
    }

    /// Counts `after` bytes in place of `before`.
    fn recount(&mut self, before: usize, after: usize) {
        if self.memory.charge(before, after) {
            // Every connection: one that was attached while the mux was full has never been reported readable. This is rare.
            for psock in self.psocks.keys().collect::<Vec<_>>() {
                self.update_interest(psock);
            }
        }
    }
}

#[cfg(test)]
mod tests;
