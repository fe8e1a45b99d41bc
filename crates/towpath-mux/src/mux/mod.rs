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

mod batch;
mod body;
mod close;
mod config;
mod event;
#[cfg(feature = "io")]
mod handle;
mod message;
mod order;
mod pool;
pub mod psock;
mod ready;
mod receive;
mod schedule;
mod stats;
mod timer;
mod transmit;
mod wake;
pub mod worker;
#[cfg(any(test, feature = "test-util"))]
pub mod world;

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap, HashMap, VecDeque};

use hdrhistogram::Histogram;
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
use order::KeyQueue;
use pool::Pool;
use psock::Psock;
use ready::Ready;
use worker::Worker;

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
    psocks: SlotMap<psock::Id, Psock>,
    workers: SlotMap<worker::Id, Worker>,
    /// Messages that any worker may take, the oldest first.
    ready: Ready,
    /// [`Order::Key`]: what waits behind a message with the same hash.
    keys: HashMap<u32, KeyQueue>,
    /// Idle workers, the one that asked last at the end.
    idle: VecDeque<worker::Id>,
    /// Workers that were told to ask and have not yet.
    woken: usize,
    /// Workers that have a turn or ask by themselves soon.
    awake: usize,
    /// Mean time that a message takes, in nanoseconds; 0 before the first.
    ewma: u64,
    /// The same, which falls more slowly than it rises.
    ewma_slow: u64,
    /// What most messages take less than and most more: the median, about. A worker that lost its processor for a while, or a
    /// rare slow message, does not change it much.
    median: u64,
    /// The least that messages took of late, on average over a turn: what they take when nothing keeps their worker from them.
    floor: u64,
    /// All that is held, in bytes, and whether that is too much.
    bytes: usize,
    full: bool,
    /// Those of them that messages take, which workers make free.
    message_bytes: usize,
    /// Connections by what they have to send. Connected mode only.
    by_send_bytes: BTreeSet<(usize, psock::Id)>,
    /// Somebody was told that there is no room.
    write_space_wanted: bool,
    draining: bool,
    drained: bool,
    now: Time,
    timers: BinaryHeap<Reverse<(Time, psock::Id)>>,
    events: VecDeque<Event>,
    /// Buffers to read into.
    spare: Pool,
    /// Where to note the messages of a read; empty between two.
    extents: Vec<receive::Extent>,
    /// Connections are looked after when all that a worker said is known, and which.
    deferring: bool,
    unsettled: Vec<psock::Id>,
    /// Who reads, and the run that it got.
    reader: Option<worker::Id>,
    local: Option<Batch>,
    totals: Totals,
    queue_wait: Histogram<u64>,
    service_time: Histogram<u64>,
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
            psocks: SlotMap::with_key(),
            workers: SlotMap::with_key(),
            ready: Ready::default(),
            keys: HashMap::new(),
            idle: VecDeque::new(),
            woken: 0,
            awake: 0,
            ewma: 0,
            ewma_slow: 0,
            median: 0,
            floor: 0,
            bytes: 0,
            full: false,
            message_bytes: 0,
            by_send_bytes: BTreeSet::new(),
            write_space_wanted: false,
            draining: false,
            drained: false,
            now: Time::default(),
            timers: BinaryHeap::new(),
            events: VecDeque::new(),
            spare: Pool::default(),
            extents: Vec::new(),
            deferring: false,
            unsettled: Vec::new(),
            reader: None,
            local: None,
            totals: Totals::default(),
            queue_wait: stats::histogram(),
            service_time: stats::histogram(),
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
        self.full
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

    /// Counts `after` instead of `before` bytes.
    fn recount(&mut self, before: usize, after: usize) {
        self.bytes = self.bytes - before + after;
        let was = self.full;
        self.full = self.config.mux_bytes.is_full(was, self.bytes);
        if was && !self.full {
            // All of them: who came meanwhile was never told to be read. It is seldom, behind half of what the mux may hold.
            for psock in self.psocks.keys().collect::<Vec<_>>() {
                self.update_interest(psock);
            }
        }
    }
}

#[cfg(test)]
mod tests;
