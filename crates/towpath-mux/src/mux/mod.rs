//! The multiplexor's core: connections on one side, workers on the other, messages between them. No descriptor, no
//! clock, no thread: whoever drives it reads and writes sockets and says what time it is.
//!
//! What: bytes of a connection ([`Mux::reserve`] and [`Mux::handle_read`]) become messages; a worker that is free takes them
//! ([`Mux::poll_messages`]), answers ([`Mux::reply`]) and is done ([`Mux::done`]); answers leave through the connection that asked
//! ([`Mux::transmit`]). [`Mux::poll_event`] says what is to be done outside, [`Mux::poll_timeout`] when to come back.
//!
//! Invariants:
//! - a message that is ready does not wait while a worker is idle: an idle one is woken, unless one that is awake will
//!   have done it sooner than that takes, and in any case after [`Config::patience`];
//! - each message is with one worker at most, and is done once;
//! - received = done + given up + queued + with workers ([`Totals`], checked by [`Mux::check`]);
//! - everything is counted in bytes of memory and bounded ([`Config`]); what is full stops being read, so that TCP's
//!   window closes; a connection that takes nothing or drips costs itself only;
//! - a message leaves whole and unmixed, unless its connection ends.
//!
//! Reference: Linux, net/kcm/kcmsock.c and Documentation/networking/kcm.rst, whose words these are. There a message's worker is
//! chosen when it arrives; here a free worker takes the oldest message, so that none waits behind a busy one.

mod balance;
mod batch;
mod body;
mod close;
mod config;
mod deferred;
mod event;
#[cfg(feature = "io")]
mod handle;
mod memory;
mod message;
mod order;
mod pool;
pub mod psock;
mod ready;
mod receive;
mod schedule;
mod service_time;
mod stats;
mod timer;
mod transmit;
mod tx_queue;
mod wake;
pub mod worker;
mod workers;
#[cfg(any(test, feature = "test-util"))]
pub mod world;

use std::collections::VecDeque;

use slotmap::SlotMap;

pub use batch::Batch;
pub use body::{Body, Lease};
pub use config::{Bound, Config, Order, Retry};
pub use event::{Cause, End, Event, SendError, Undelivered};
pub use message::{Completion, Message, Ticket, View};
pub use receive::AttachError;
pub use stats::{PsockRow, Show, Totals, WorkerRow};
pub use transmit::{Outcome, Transmit};

use crate::Time;
use balance::Balance;
use deferred::Deferred;
use memory::Memory;
use order::KeyQueues;
use psock::Psock;
use ready::Ready;
use receive::Reads;
use service_time::ServiceTime;
use stats::Counters;
use timer::Timers;
use workers::Workers;

/// Joins connections to workers. See the module's documentation.
///
/// # Examples
///
/// ```
/// use towpath_mux::Time;
/// use towpath_mux::assembler::Limits;
/// use towpath_mux::mux::{Config, Event, Mux, Outcome};
///
/// let mut mux = Mux::new(Config::default());
/// let now = Time::default();
/// let psock = mux.attach("line".parse()?, Limits::default(), now)?;
/// let worker = mux.clone_worker(1, now);
///
/// // The socket had these bytes: one message, and the start of another.
/// mux.handle_bytes(psock, b"hello\nwor", now);
/// let mut batch = Vec::new();
/// mux.poll_messages(worker, now, &mut batch);
/// assert_eq!(batch[0].payload(), b"hello");
///
/// // It is echoed to whoever sent it.
/// mux.reply(worker, batch[0].ticket(), batch[0].bytes().clone(), now)?;
/// mux.done(worker, batch[0].ticket(), now);
/// let Some(mut transmit) = mux.transmit(psock) else { panic!("nothing to send") };
/// assert_eq!(transmit.slices().next(), Some(&b"hello\n"[..]));
/// transmit.advance(6);
/// mux.handle_transmitted(transmit, Outcome::Taken, now);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Mux {
    config: Config,
    /// The latest time that a call gave.
    now: Time,
    draining: bool,
    /// [`Event::Drained`] was reported.
    drained: bool,
    psocks: SlotMap<psock::Id, Psock>,
    workers: Workers,
    /// Messages that any worker may take, oldest first.
    ready: Ready,
    keys: KeyQueues,
    service_time: ServiceTime,
    memory: Memory,
    balance: Balance,
    timers: Timers,
    events: VecDeque<Event>,
    reads: Reads,
    deferred: Deferred,
    counters: Counters,
}

impl Mux {
    /// A mux without connections and workers.
    ///
    /// # Panics
    ///
    /// When `config.batch` is 0.
    pub fn new(config: Config) -> Self {
        assert!(config.batch > 0, "a batch has at least one message");
        Self {
            config,
            now: Time::default(),
            draining: false,
            drained: false,
            psocks: SlotMap::with_key(),
            workers: Workers::default(),
            ready: Ready::default(),
            keys: KeyQueues::default(),
            service_time: ServiceTime::default(),
            memory: Memory::new(config.mux_bytes),
            balance: Balance::default(),
            timers: Timers::default(),
            events: VecDeque::new(),
            reads: Reads::default(),
            deferred: Deferred::default(),
            counters: Counters::default(),
        }
    }

    /// What it was told when it was made.
    pub const fn config(&self) -> &Config {
        &self.config
    }

    /// Whether it was told to drain: it takes no new connection.
    pub const fn is_draining(&self) -> bool {
        self.draining
    }

    /// Whether it holds as many bytes as it may, so that nothing is read.
    pub const fn is_full(&self) -> bool {
        self.memory.is_full()
    }

    /// What is to be done outside; call it until it is `None`, after anything else was called.
    pub fn poll_event(&mut self) -> Option<Event> {
        if self.events.is_empty() {
            // Behind anything that may have been the last that could be worked off.
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
