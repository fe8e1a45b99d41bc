//! `[fleet]`: a thread that replicates the states in a group of gates.
//!
//! What: the thread reads the changes of states ([`StateFeed`]), walks through the table once per second for states that peers must
//! hear of again, and merges what peers send. [`Replica`] decides, the bus sends and receives on a thread of its own. Packet threads do not
//! wait for either. Without the bus, the engine continues with the states that it has.

use std::fmt::Write;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use towpath_fleet::{FleetStats, PeerView, Replica, Replicate, Settings, SyncView, Table};
use towpath_gate::state::record::Record;
use towpath_gate::state::{Changes, Cursor};
use towpath_gate::{Merged, NotMerged, RulesByContent};
use towpath_wire::Time;

use crate::config;
use crate::control::EndpointCounters;
use crate::ruleset_manager::RulesetManager;
use crate::service_manager::notify;
use crate::state_feed::{Change, StateFeed, StateScanner};

pub mod group;

/// Longest time for which the thread waits for a message, while there are changes and otherwise.
const ACTIVE: Duration = Duration::from_millis(1);
const IDLE: Duration = Duration::from_millis(5);

/// How long the shorter time lasts after a change.
const ACTIVITY: Duration = Duration::from_millis(100);

/// Changes and messages of one turn.
const CHANGES: usize = 1 << 14;
const MESSAGES: usize = 64;

/// Chunks of a snapshot in one turn.
const CHUNKS: usize = 4;

/// Interval of walks through the table, slots of one step, and time of a walk in one turn.
const WALK: Duration = Duration::from_secs(1);
const PART: u32 = 1024;
const STEP: Duration = Duration::from_micros(500);

/// Interval at which `towpath ctl show fleet` is updated.
const SHOW: Duration = Duration::from_millis(100);

/// What `towpath ctl show fleet` shows.
#[derive(Clone, Debug)]
pub struct FleetView {
    /// The group, and the name of this gate.
    pub group: String,
    /// The name of this gate.
    pub gate: String,
    /// The server, or why there is no connection.
    pub server: Result<String, String>,
    /// What the server refuses.
    pub warning: Option<String>,
    /// The peers.
    pub peers: Vec<PeerView>,
    /// The snapshot that is being taken.
    pub syncing: Option<SyncView>,
    /// The counters.
    pub stats: FleetStats,
}

impl FleetView {
    /// The state in a few words, for people and the service manager.
    pub fn status(&self) -> String {
        let mut text = match (&self.server, &self.syncing) {
            (Err(_), _) => "away".to_owned(),
            (Ok(_), Some(sync)) => format!("taking a snapshot of {}", sync.peer),
            (Ok(_), None) if self.stats.in_step == 1 => "in step".to_owned(),
            (Ok(_), None) => "joining".to_owned(),
        };
        let names: Vec<_> = self.peers.iter().map(|peer| &*peer.name).collect();
        let _ = match &names[..] {
            [] => write!(text, ", no peers"),
            names if names.len() > 4 => write!(text, ", {} peers", names.len()),
            names => write!(text, ", with {}", names.join(", ")),
        };
        text
    }
}

/// The thread. Dropping it ends the thread.
#[derive(Debug)]
pub struct Fleet {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Fleet {
    /// Starts the thread. Changes of states from now on are replicated.
    ///
    /// # Errors
    /// A thread cannot be started, or this build has no client of the bus.
    pub fn start(
        config: &config::Fleet,
        ruleset: &Arc<RulesetManager>,
        shown: EndpointCounters,
    ) -> io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let bus = bus::start(config)?;
        let mut member = Member::new(config, ruleset, bus, shown);
        member.show();
        let body = move || {
            crate::background::begin_as(crate::sandbox::Role::Fleet);
            // Relaxed: the flag guards no data.
            while !stopped.load(Ordering::Relaxed) {
                member.turn();
            }
        };
        let thread = thread::Builder::new().name("fleet".to_owned()).spawn(body)?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        // Relaxed: see `start`.
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            log::error!("the thread of the fleet panicked; please report it");
        }
    }
}

/// The table as the replica sees it.
struct States {
    ruleset: Arc<RulesetManager>,
    /// For snapshots of peers and walks.
    scanner: StateScanner,
    rules: RulesByContent,
    version: Option<u64>,
}

impl States {
    fn update(&mut self) {
        if self.version != Some(self.ruleset.version()) {
            let (rules, version) = self.ruleset.rules_by_content();
            (self.rules, self.version) = (rules, Some(version));
        }
    }
}

impl Table for States {
    fn rules(&mut self) -> (u64, bool) {
        self.update();
        (self.rules.fingerprint(), self.ruleset.is_unchecked())
    }

    fn merge(&mut self, record: &Record<'_>, trusted: bool) -> Result<Merged, NotMerged> {
        self.update();
        self.ruleset.merge(&self.rules, record, trusted)
    }

    fn remove(&mut self, record: &Record<'_>, within: Option<Duration>) -> Option<u32> {
        self.ruleset.remove_merged(record, within)
    }

    fn scan(&mut self, from: Cursor, slots: u32, each: &mut dyn FnMut(&Record<'_>)) -> Option<Cursor> {
        self.scanner.scan_locked(from, slots, each)
    }
}

/// What the thread does, as turns.
struct Member {
    replica: Replica,
    states: States,
    feed: StateFeed,
    bus: bus::Bus,
    begun: Instant,
    active: Instant,
    /// When the next walk begins, and where the one that runs continues.
    walks: Instant,
    walk: Option<Cursor>,
    /// Copies of messages were seen and logged.
    republished: bool,
    view: FleetView,
    shows: Instant,
    status: String,
    shown: EndpointCounters,
}

impl Member {
    fn new(
        config: &config::Fleet,
        ruleset: &Arc<RulesetManager>,
        bus: bus::Bus,
        shown: EndpointCounters,
    ) -> Self {
        let begun = Instant::now();
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let settings = Settings {
            gate: config.gate.clone(),
            // Another process of this gate begins at another time.
            incarnation: since.as_nanos() as u64,
            replicate: if config.all { Replicate::All } else { Replicate::Replied },
            window: config.window,
        };
        let view = FleetView {
            group: config.group.clone().unwrap_or_default(),
            gate: config.gate.clone(),
            server: Err("connecting".to_owned()),
            warning: None,
            peers: Vec::new(),
            syncing: None,
            stats: FleetStats::default(),
        };
        Self {
            replica: Replica::new(settings),
            // A state that has no reply yet is not replicated.
            feed: StateFeed::of(ruleset, if config.all { Changes::All } else { Changes::AfterBeginning }),
            states: States {
                ruleset: Arc::clone(ruleset),
                scanner: StateScanner::new(ruleset),
                rules: RulesByContent::default(),
                version: None,
            },
            bus,
            begun,
            active: begun,
            walks: begun,
            walk: None,
            republished: false,
            view,
            shows: begun,
            status: String::new(),
            shown,
        }
    }

    fn now(&self) -> Time {
        Time::default() + self.begun.elapsed()
    }

    fn turn(&mut self) {
        let wait = if self.active.elapsed() < ACTIVITY { ACTIVE } else { IDLE };
        let mut wait = if self.replica.is_serving() { Duration::ZERO } else { wait };
        for _ in 0..MESSAGES {
            let Some(incoming) = self.bus.receive(wait) else { break };
            wait = Duration::ZERO;
            self.take(incoming);
        }
        self.replica.dropped(self.bus.take_dropped());
        self.changes();
        self.walk();
        self.send();
        if self.shows.elapsed() >= SHOW {
            self.shows = Instant::now();
            self.show();
        }
    }

    fn take(&mut self, incoming: bus::Incoming) {
        let now = self.now();
        match incoming {
            bus::Incoming::Connected(server) => {
                log::info!("fleet: connected to {server}");
                self.view.server = Ok(server);
                self.replica.connect(now);
            }
            bus::Incoming::Away(error) => {
                let error = error.to_string();
                // Once for each reason: the client tries again every second.
                if self.view.server != Err(error.clone()) {
                    log::warn!("fleet: {error}; the engine continues with the states that it has");
                }
                (self.view.server, self.view.warning) = (Err(error), None);
                self.replica.disconnect();
            }
            bus::Incoming::Warning(warning) => {
                if self.view.warning.as_ref() != Some(&warning) {
                    log::warn!("fleet: {warning}");
                }
                self.view.warning = Some(warning);
            }
            bus::Incoming::Republished { from } => {
                if !self.republished {
                    log::warn!(
                        "fleet: the server sends copies of messages under the name of `{from}`; they are refused"
                    );
                }
                self.republished = true;
                self.replica.republished();
            }
            bus::Incoming::ReplayFailed { peer, error } => {
                log::warn!("fleet: no replay of the messages of {peer}: {error}; a snapshot fills the gap");
                self.replica.replay_failed();
            }
            bus::Incoming::Message { channel, from, bytes } => {
                self.replica.message(channel, &from, &bytes, &mut self.states, now);
            }
        }
    }

    fn changes(&mut self) {
        let now = self.now();
        let Self { feed, replica, active, .. } = self;
        feed.read(CHANGES, |change| match change {
            Change::State(record) => {
                *active = Instant::now();
                replica.change(record, now);
            }
            Change::Table(..) => {}
            Change::Gap(changes) => replica.missed(changes),
        });
    }

    /// Continues the walk through the table.
    fn walk(&mut self) {
        if self.walk.is_none() && self.walks.elapsed() >= WALK {
            self.walks = Instant::now();
            self.walk = Some(Cursor::default());
        }
        let (begun, now) = (Instant::now(), self.now());
        while let Some(at) = self.walk.filter(|_| begun.elapsed() < STEP) {
            let Self { states, replica, .. } = self;
            self.walk = states.scan(at, PART, &mut |record| replica.scanned(record, now));
        }
    }

    fn send(&mut self) {
        let now = self.now();
        while let Some(output) = self.replica.poll(&mut self.states, now) {
            if let Err(output) = self.bus.send(output) {
                self.replica.lost(&output);
                return;
            }
        }
        for _ in 0..CHUNKS {
            if !self.bus.has_room() {
                return;
            }
            let Some(chunk) = self.replica.poll_chunk(&mut self.states, now) else { return };
            if self.bus.send(chunk).is_err() {
                return;
            }
        }
    }

    fn show(&mut self) {
        let now = self.now();
        self.view.stats = self.replica.stats(now);
        self.view.peers = self.replica.peers(&mut self.states, now);
        self.view.syncing = self.replica.syncing();
        let status = self.view.status();
        if status != self.status {
            notify(&format!("STATUS=fleet: {status}"));
            log::info!("fleet: {status}");
            self.status = status;
        }
        self.shown.set_fleet(self.view.clone());
    }
}

#[cfg(feature = "fleet")]
pub(crate) use bus::server;

#[cfg(feature = "fleet")]
mod bus {
    use std::io;

    pub(super) use towpath_fleet::nats::{Bus, GroupBus, GroupIncoming, Incoming};

    use towpath_fleet::nats::{BusConfig, ServerConfig};

    use crate::config;

    pub(super) fn start(config: &config::Fleet) -> io::Result<Bus> {
        Bus::start(bus_config(config), || crate::background::begin_as(crate::sandbox::Role::Fleet))
    }

    pub(super) fn start_group(config: &config::Fleet) -> io::Result<GroupBus> {
        GroupBus::start(bus_config(config), || crate::background::begin_as(crate::sandbox::Role::Fleet))
    }

    pub(crate) fn server(config: &config::Fleet) -> ServerConfig {
        ServerConfig {
            servers: config.servers.clone(),
            credentials: config.credentials.clone(),
            tls: config.tls,
            tls_ca: config.tls_ca.clone(),
            tls_identity: config.tls_identity.clone(),
        }
    }

    fn bus_config(config: &config::Fleet) -> BusConfig {
        BusConfig {
            server: server(config),
            group: config.group.clone().unwrap_or_default(),
            gate: config.gate.clone(),
        }
    }
}

/// A build without the client of NATS: the configuration is refused.
#[cfg(not(feature = "fleet"))]
mod bus {
    use std::convert::Infallible;
    use std::io;
    use std::time::Duration;

    use towpath_fleet::group::{GroupOutput, WriteError};
    use towpath_fleet::{Channel, Output};

    use crate::config;

    pub(super) struct Bus(Infallible);

    pub(super) struct GroupBus(Infallible);

    #[expect(dead_code, reason = "this build has no bus that tells anything")]
    pub(super) enum GroupIncoming {
        Connected(String, usize),
        Away(String),
        NoBucket(String),
        Warning(String),
        Absent,
        Current(u64, Vec<u8>),
        Foreign(u64),
        Written(Result<u64, WriteError>),
        TablesOpen { made: u64, last: u64 },
        NothingFollows(u64),
        Entries { epoch: u64, seq: u64, pending: u64, table: String, from: String, bytes: Option<Vec<u8>> },
        Published(Result<u64, String>),
        Republished(String),
        Message(String, Vec<u8>),
    }

    #[expect(dead_code, reason = "this build has no bus that tells anything")]
    pub(super) enum Incoming {
        Connected(String),
        Away(String),
        Warning(String),
        Republished { from: String },
        ReplayFailed { peer: String, error: String },
        Message { channel: Channel, from: String, bytes: Vec<u8> },
    }

    pub(super) fn start(_: &config::Fleet) -> io::Result<Bus> {
        Err(io::Error::other("this towpath was built without [fleet]; build it with `--features fleet`"))
    }

    pub(super) fn start_group(config: &config::Fleet) -> io::Result<GroupBus> {
        match start(config)?.0 {}
    }

    impl GroupBus {
        pub(super) fn receive(&self, _: Duration) -> Option<GroupIncoming> {
            match self.0 {}
        }

        pub(super) fn take_dropped(&self) -> u64 {
            match self.0 {}
        }

        pub(super) fn send(&self, _: GroupOutput) -> Result<(), GroupOutput> {
            match self.0 {}
        }
    }

    impl Bus {
        pub(super) fn receive(&self, _: Duration) -> Option<Incoming> {
            match self.0 {}
        }

        pub(super) fn send(&self, _: Output) -> Result<(), Output> {
            match self.0 {}
        }

        pub(super) fn has_room(&self) -> bool {
            match self.0 {}
        }

        pub(super) fn take_dropped(&self) -> u64 {
            match self.0 {}
        }
    }
}
