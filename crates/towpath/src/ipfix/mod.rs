//! `[ipfix]`: flow records of the dynamic states for a collector, over UDP (RFC 7011).
//!
//! A thread reads the changes of states ([`StateFeed`]) and scans the table for flows that continue longer than the active timeout. The
//! packet threads do not wait for it. `message.rs` encodes, `tracker.rs` decides which records there are; neither does IO.
//!
//! UDP loses datagrams, so templates are sent again periodically, and a message that the kernel does not take is lost and counted. The
//! sequence number of the next message shows the collector that records are missing.

#[cfg(test)]
mod decode;
pub mod message;
mod tracker;

use std::collections::{HashMap, HashSet};
use std::io::{self, ErrorKind};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs, UdpSocket};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use thiserror::Error;
use towpath_gate::NamedRule;
use towpath_gate::state::Cursor;
use towpath_metrics::metrics;
use towpath_wire::Time;

use self::message::{Encoder, FlowRecord, Message};
use self::tracker::Tracker;
use crate::config;
use crate::control::EndpointCounters;
use crate::ruleset_manager::{Clock, RulesetManager};
use crate::state_feed::{Change, StateFeed, TICK};

metrics! {
    /// Flow records for the IPFIX collector.
    pub struct IpfixStats in "ipfix" {
        /// Flow records that were sent to the collector, by cause: the start of a flow.
        pub started: counter events as "records": "Flow records that were sent to the collector, by cause." (cause = "start"),
        /// Flow records that were sent to the collector, by cause: the active timeout.
        pub active: counter events as "records" (cause = "active"),
        /// Flow records that were sent to the collector, by cause: the end of a flow.
        pub ended: counter events as "records" (cause = "end"),
        /// Messages that were sent.
        pub sent: counter messages,
        /// Messages that the kernel did not take. Their records are lost.
        pub unsent: counter messages,
        /// Flow records and names of rules in messages that were not sent.
        pub unsent_records: counter events,
        /// Changes of states that were missed, because the thread was slower than the journal is long.
        pub missed: counter events,
        /// Flows whose end was among the missed changes. They have no last record.
        pub lost_ends: counter events,
        /// Flows that have begun and not ended.
        pub flows: gauge events,
    }
}

/// Bytes of IPv6 and UDP headers before a message.
const HEADERS: usize = 48;

/// A message that is not full is sent after this time.
const FLUSH: Duration = Duration::from_millis(250);

/// Slots of the table in one step of a scan: half a millisecond with the lock of the rules.
const PART: u32 = 1024;

/// Time that a scan may take in each tick.
const STEP: Duration = Duration::from_millis(5);

/// Part of the active timeout after which another scan begins.
const SCANS: u32 = 4;

/// Changes taken before messages are sent.
const CHANGES: usize = 1 << 16;

/// Longest time for the records at the end of the engine.
const STOP: Duration = Duration::from_secs(1);

/// Why flow records cannot be exported.
#[derive(Debug, Error)]
#[error(
    "cannot send to the collector {collector}: {source}; check the address and that this machine has a route to it"
)]
pub struct OpenError {
    collector: String,
    source: io::Error,
}

/// A socket before its thread starts.
#[derive(Debug)]
pub struct Opened {
    socket: UdpSocket,
    collector: SocketAddr,
    config: config::Ipfix,
}

/// The thread. Dropping it sends the last records and ends it.
#[derive(Debug)]
pub struct Ipfix {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Opened {
    /// Resolves the collector's name and opens a socket.
    ///
    /// # Errors
    ///
    /// [`OpenError`].
    pub fn open(config: &config::Ipfix) -> Result<Self, OpenError> {
        let failed = |source| OpenError { collector: config.collector.clone(), source };
        let none = || io::Error::new(ErrorKind::NotFound, "the name has no address");
        let collector = config.collector.to_socket_addrs().map_err(failed)?.next();
        let collector = collector.ok_or_else(|| failed(none()))?;
        let local: SocketAddr = match collector {
            SocketAddr::V4(_) => (Ipv4Addr::UNSPECIFIED, 0).into(),
            SocketAddr::V6(_) => (Ipv6Addr::UNSPECIFIED, 0).into(),
        };
        let socket = UdpSocket::bind(local).map_err(failed)?;
        socket.connect(collector).map_err(failed)?;
        socket.set_nonblocking(true).map_err(failed)?;
        Ok(Self { socket, collector, config: config.clone() })
    }

    /// Starts the thread. Changes of states from now on are exported.
    ///
    /// # Errors
    ///
    /// The thread cannot be started.
    pub fn start(self, ruleset: &Arc<RulesetManager>, shown: EndpointCounters) -> io::Result<Ipfix> {
        let Self { socket, collector, config } = self;
        let (stop, stopped) = channel();
        let mut exporter = Exporter::new(socket, collector, &config, ruleset, Instant::now());
        let body = move || {
            crate::background::begin_as(crate::sandbox::Role::Ipfix);
            while stopped.recv_timeout(TICK) == Err(RecvTimeoutError::Timeout) {
                exporter.step(Instant::now());
                let stats = exporter.stats();
                shown.update(|servers| servers.ipfix = stats);
            }
            exporter.stop();
        };
        let thread = thread::Builder::new().name("ipfix".to_owned()).spawn(body)?;
        log::info!("ipfix: sends flow records to {collector}");
        Ok(Ipfix { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for Ipfix {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            log::error!("the thread of flow records panicked; please report it");
        }
    }
}

/// What the thread does, as steps.
struct Exporter {
    ruleset: Arc<RulesetManager>,
    feed: StateFeed,
    tracker: Tracker,
    out: Output,
    clock: Clock,
    refresh: Duration,
    /// When templates are sent again, and when a message that is not full is sent.
    templates: Instant,
    flush: Instant,
    /// When the next scan begins, the interval of scans, and where the scan that runs continues.
    scans: Instant,
    every: Duration,
    scan: Option<Cursor>,
}

impl Exporter {
    fn new(
        socket: UdpSocket,
        collector: SocketAddr,
        config: &config::Ipfix,
        ruleset: &Arc<RulesetManager>,
        now: Instant,
    ) -> Self {
        let message_max = usize::from(config.mtu).saturating_sub(HEADERS);
        Self {
            feed: StateFeed::new(ruleset),
            ruleset: Arc::clone(ruleset),
            tracker: Tracker::new(config.active_timeout, config.starts),
            out: Output {
                encoder: Encoder::new(config.domain, message_max),
                socket,
                collector,
                time: 0,
                rules: HashMap::new(),
                version: None,
                named: HashSet::new(),
                failing: false,
                causes: [0; 3],
                stats: IpfixStats::default(),
            },
            clock: ruleset.clock(),
            refresh: config.template_refresh,
            templates: now,
            flush: now,
            scans: now,
            every: config.active_timeout / SCANS,
            scan: None,
        }
    }

    /// One turn of the thread.
    fn step(&mut self, now: Instant) {
        self.begin_turn(now);
        self.changes();
        if self.scan.is_none() && now >= self.scans {
            self.tracker.begin_scan();
            self.scan = Some(Cursor::default());
            self.scans = now + self.every;
        }
        let deadline = Instant::now() + STEP;
        while let Some(at) = self.scan {
            // A state's changes precede what the scan finds of it.
            self.changes();
            let Self { feed, tracker, out, clock, .. } = self;
            self.scan = feed.scan(at, PART, |record| out.flow(tracker.scanned(record), clock));
            if self.scan.is_none() {
                self.tracker.end_scan();
            }
            if Instant::now() >= deadline {
                break;
            }
        }
        if now >= self.flush {
            self.flush = now + FLUSH;
            self.out.flush();
        }
    }

    fn begin_turn(&mut self, now: Instant) {
        self.out.time = (self.clock.wall(self.clock.now()).as_nanos() / 1_000_000_000) as u32;
        self.out.update_rules(&self.ruleset);
        if now >= self.templates {
            self.templates = now + self.refresh;
            self.out.templates();
        }
    }

    fn changes(&mut self) {
        let Self { feed, tracker, out, clock, .. } = self;
        feed.read(CHANGES, |change| match change {
            Change::State(record) => out.flow(tracker.change(record), clock),
            Change::Table(..) => {}
            Change::Gap(changes) => {
                out.stats.missed += changes;
                tracker.gap();
            }
        });
    }

    /// Sends the last record of each flow.
    fn stop(&mut self) {
        let begun = Instant::now();
        self.begin_turn(begun);
        self.changes();
        let mut next = Some(Cursor::default());
        while let Some(at) = next.filter(|_| begun.elapsed() < STOP) {
            let Self { feed, tracker, out, clock, .. } = self;
            next = feed.scan(at, PART, |record| out.flow(tracker.stopped(record), clock));
        }
        self.out.flush();
        if self.tracker.len() > 0 {
            log::warn!("ipfix: the last records of {} flows were not sent: no time", self.tracker.len());
        }
    }

    fn stats(&self) -> IpfixStats {
        IpfixStats { flows: self.tracker.len() as u64, lost_ends: self.tracker.lost_ends, ..self.out.stats }
    }
}

/// The messages, and the socket.
struct Output {
    encoder: Encoder,
    socket: UdpSocket,
    collector: SocketAddr,
    /// Export time in seconds since 1970.
    time: u32,
    /// The rules by the hash of their content, at this version of the rules.
    rules: HashMap<u64, NamedRule>,
    version: Option<u64>,
    /// Rules whose names were sent since the last templates.
    named: HashSet<u64>,
    /// The last message was not sent.
    failing: bool,
    /// Flow records of the current message: start, active, end.
    causes: [u64; 3],
    stats: IpfixStats,
}

impl Output {
    fn update_rules(&mut self, ruleset: &RulesetManager) {
        if self.version != Some(ruleset.version()) {
            let (rules, version) = ruleset.described_rules();
            self.rules = rules.into_iter().map(|rule| (rule.reference.hash, rule)).collect();
            self.version = Some(version);
        }
    }

    fn templates(&mut self) {
        self.named.clear();
        let full = self.encoder.templates(self.time);
        self.send(full);
    }

    /// Adds a record, after the name of its rule. The times become times since 1970.
    fn flow(&mut self, record: Option<FlowRecord>, clock: &Clock) {
        let Some(mut record) = record else { return };
        let wall = |millis: u64| {
            clock.wall(Time::from_nanos(millis.saturating_mul(1_000_000))).as_nanos() / 1_000_000
        };
        (record.start, record.end) = (wall(record.start), wall(record.end));
        if let Some(rule) = self.rules.get(&record.rule) {
            record.passes = rule.passes;
            if self.named.insert(record.rule) {
                let full = self.encoder.rule(record.rule, rule.reference.number, &rule.text, self.time);
                self.send(full);
            }
        }
        let full = self.encoder.flow(&record, self.time);
        self.send(full);
        let cause = match record.reason {
            message::Reason::Start => 0,
            message::Reason::Active => 1,
            _ => 2,
        };
        self.causes[cause] += 1;
    }

    fn flush(&mut self) {
        let message = self.encoder.finish(self.time);
        self.send(message);
    }

    /// Sends a message. One that the kernel does not take is lost.
    fn send(&mut self, message: Option<Message>) {
        let Some(Message { bytes, records }) = message else { return };
        let [started, active, ended] = std::mem::take(&mut self.causes);
        let sent = match self.socket.send(&bytes) {
            // The error belongs to an earlier message: nothing listened at the collector's port.
            Err(error) if error.kind() == ErrorKind::ConnectionRefused => self.socket.send(&bytes),
            sent => sent,
        };
        match sent {
            Ok(_) => {
                self.stats.sent += 1;
                self.stats.started += started;
                self.stats.active += active;
                self.stats.ended += ended;
                if std::mem::take(&mut self.failing) {
                    log::info!("ipfix: sends to {} again", self.collector);
                }
            }
            Err(error) => {
                self.stats.unsent += 1;
                self.stats.unsent_records += u64::from(records);
                if !std::mem::replace(&mut self.failing, true) {
                    log::warn!("ipfix: cannot send to {}: {error}; flow records are lost", self.collector);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
