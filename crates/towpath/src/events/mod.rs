//! `[events]`: states, drops and verdicts as JSON, one object per line, to a file, a Unix socket or standard output.
//!
//! A thread reads the changes of states ([`StateFeed`]) and takes the packets of `log` rules and of the drop log, which the packet threads
//! put into a bounded channel without waiting. It writes without waiting for a reader; what has no room is lost and counted, and a line says
//! how many were.

pub mod line;
mod output;

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel, sync_channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use thiserror::Error;
use towpath_gate::{LogEntry, Suppressed};
use towpath_metrics::metrics;

use self::output::Output;
use crate::config;
use crate::control::EndpointCounters;
use crate::ruleset_manager::{Clock, RulesetManager};
use crate::state_feed::{Change, StateFeed, TICK};

metrics! {
    /// Events of states and packets as JSON lines.
    pub struct EventStats in "events" {
        /// Lines that were put into the buffer of the output.
        pub lines: counter events,
        /// Bytes that were written.
        pub written: counter bytes,
        /// Lines lost because the output was slow or failed.
        pub slow: counter events as "lost": "Events that were lost, by reason." (reason = "slow"),
        /// Changes of states that were missed, because the thread was slower than the journal is long.
        pub states: counter events as "lost" (reason = "states"),
        /// Packets lost because the channel of the packet threads was full.
        pub packets: counter events as "lost" (reason = "packets"),
        /// Failed attempts to open or write the output.
        pub errors: counter events,
    }
}

/// Packets that may wait for the thread.
const PACKETS: usize = 4096;

/// Changes and packets in one turn.
const TURN: usize = 1 << 16;

/// Bytes of lines that are put into the buffer together.
const BLOCK: usize = 16 << 10;

/// Longest time without progress of the output when the engine ends.
const STOP: Duration = Duration::from_millis(500);

/// Why events cannot be written.
#[derive(Debug, Error)]
#[error("{output}: {source}; choose a path in an existing directory where the engine's user may write")]
pub struct OpenError {
    output: String,
    source: io::Error,
}

/// A packet for the events.
#[derive(Clone, Debug)]
enum PacketEvent {
    Packet(LogEntry, Option<Box<str>>),
    Suppressed(Suppressed),
}

/// The end of the packet threads. It never waits.
#[derive(Clone, Debug)]
pub struct PacketEvents {
    events: SyncSender<PacketEvent>,
    lost: Arc<AtomicU64>,
    drops: bool,
    verdicts: bool,
}

impl PacketEvents {
    /// Takes a logged packet; `port` is the name of its port.
    pub(crate) fn packet(&self, entry: &LogEntry, port: Option<&str>) {
        let wanted = if line::is_drop(entry) { self.drops } else { self.verdicts };
        if wanted {
            self.send(PacketEvent::Packet(*entry, port.map(Into::into)));
        }
    }

    /// Takes a number of packets that are not logged.
    pub(crate) fn suppressed(&self, summary: Suppressed) {
        self.send(PacketEvent::Suppressed(summary));
    }

    fn send(&self, event: PacketEvent) {
        if self.events.try_send(event).is_err() {
            // Relaxed: a counter that orders nothing.
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// The events before their thread starts. Packets wait.
#[derive(Debug)]
pub struct Prepared {
    config: config::Events,
    packets: Receiver<PacketEvent>,
    sender: PacketEvents,
}

/// The thread. Dropping it writes the last events and ends it.
#[derive(Debug)]
pub struct Events {
    stop: Option<Sender<()>>,
    reopen: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Prepared {
    /// Makes the channel of the packet threads.
    pub fn new(config: &config::Events) -> Self {
        let (events, packets) = sync_channel(PACKETS);
        let (drops, verdicts) = (config.drops, config.verdicts);
        let sender = PacketEvents { events, lost: Arc::default(), drops, verdicts };
        Self { config: config.clone(), packets, sender }
    }

    /// The end of a packet thread. `None`: no event of packets is wanted.
    pub fn sender(&self) -> Option<PacketEvents> {
        (self.config.drops || self.config.verdicts).then(|| self.sender.clone())
    }

    /// Opens the output and starts the thread. Changes of states from now on are events.
    ///
    /// # Errors
    ///
    /// [`OpenError`].
    pub fn start(self, ruleset: &Arc<RulesetManager>, shown: EndpointCounters) -> Result<Events, OpenError> {
        let Self { config, packets, sender } = self;
        let failed = |source| OpenError { output: config.output.to_string(), source };
        let output = Output::open(config.output.clone()).map_err(failed)?;
        let (stop, stopped) = channel();
        let reopen = Arc::new(AtomicBool::new(false));
        let mut writer = Writer {
            feed: config.states.then(|| StateFeed::new(ruleset)),
            packets,
            lost_packets: sender.lost,
            told_packets: 0,
            output,
            clock: ruleset.clock(),
            missed: 0,
            block: Vec::new(),
            reopen: Arc::clone(&reopen),
        };
        let body = move || {
            crate::background::begin_as(crate::sandbox::Role::Events);
            while stopped.recv_timeout(TICK) == Err(RecvTimeoutError::Timeout) {
                writer.step(Instant::now());
                let stats = writer.stats();
                shown.update(|servers| servers.events = stats);
            }
            writer.stop();
        };
        let thread = thread::Builder::new().name("events".to_owned()).spawn(body).map_err(failed)?;
        log::info!("events: written to {}", config.output);
        Ok(Events { stop: Some(stop), reopen, thread: Some(thread) })
    }
}

impl Events {
    /// Makes the thread open its file again, because it was renamed.
    pub fn reopen(&self) {
        // Relaxed: a request that orders nothing.
        self.reopen.store(true, Ordering::Relaxed);
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            log::error!("the thread of events panicked; please report it");
        }
    }
}

/// What the thread does, as steps.
struct Writer {
    feed: Option<StateFeed>,
    packets: Receiver<PacketEvent>,
    lost_packets: Arc<AtomicU64>,
    told_packets: u64,
    output: Output,
    clock: Clock,
    missed: u64,
    block: Vec<u8>,
    reopen: Arc<AtomicBool>,
}

impl Writer {
    fn step(&mut self, now: Instant) {
        // Relaxed: see `Events::reopen`.
        if self.reopen.swap(false, Ordering::Relaxed) {
            self.output.reopen(now);
        }
        self.states();
        self.packets();
        self.output.write(now);
    }

    fn states(&mut self) {
        let Self { feed: Some(feed), output, clock, block, missed, .. } = self else { return };
        feed.read(TURN, |change| {
            match change {
                Change::State(record) => line::state(record, clock.wall(record.at), block),
                Change::Table(kind, at) => line::table(kind, clock.wall(at), block),
                Change::Gap(changes) => {
                    *missed += changes;
                    line::lost("states", changes, clock.wall(clock.now()), block);
                }
            }
            if block.len() >= BLOCK {
                flush(output, block, clock);
            }
        });
        flush(output, block, clock);
    }

    fn packets(&mut self) {
        let Self { packets, output, clock, block, lost_packets, told_packets, .. } = self;
        for event in packets.try_iter().take(TURN) {
            match event {
                PacketEvent::Packet(entry, port) => {
                    line::packet(&entry, port.as_deref(), clock.wall(entry.time), block);
                }
                PacketEvent::Suppressed(summary) => {
                    line::suppressed(&summary, clock.wall(summary.time), block);
                }
            }
            if block.len() >= BLOCK {
                flush(output, block, clock);
            }
        }
        // Relaxed: a counter that orders nothing.
        let lost = lost_packets.load(Ordering::Relaxed);
        if lost > *told_packets {
            line::lost("packets", lost - *told_packets, clock.wall(clock.now()), block);
            *told_packets = lost;
        }
        flush(output, block, clock);
    }

    /// Writes the last events.
    fn stop(&mut self) {
        let mut progress = Instant::now();
        self.step(progress);
        while self.output.is_waiting() && progress.elapsed() < STOP {
            if self.output.write(Instant::now()) {
                progress = Instant::now();
            } else {
                thread::sleep(TICK);
            }
        }
        if self.output.is_waiting() {
            log::warn!("events: the last lines were not written: the output takes nothing");
        }
    }

    fn stats(&self) -> EventStats {
        let Output { lines, bytes, lost, errors, .. } = self.output;
        // Relaxed: a counter that orders nothing.
        let packets = self.lost_packets.load(Ordering::Relaxed);
        EventStats { lines, written: bytes, slow: lost, states: self.missed, packets, errors }
    }
}

fn flush(output: &mut Output, block: &mut Vec<u8>, clock: &Clock) {
    if !block.is_empty() {
        let told = |count, out: &mut Vec<u8>| line::lost("slow", count, clock.wall(clock.now()), out);
        output.put(block, told);
        block.clear();
    }
}
