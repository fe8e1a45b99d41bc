//! Flow offload: a thread that lets the kernel forward the packets of flows that the rules have decided.
//!
//! What: the thread learns of states from the change journal of the state table, and of inspectors' verdicts for flows from the engine
//! threads ([`verdict_feed`](towpath_engine::verdict_feed)). When a state has as many packets as
//! `after`, and the path of its packets is fixed ([`flow_path`](towpath_engine::offload::flow_path)), the thread writes an entry for each direction into
//! the [`FlowMap`]. A verdict that passes a flow does the same, also without a state. Every `TICK` it adds what the kernel counted to the
//! states and rules, and so refreshes the states and the verdicts. An entry ends with its state, and with its verdict. Worker threads never
//! wait for it.
//!
//! Changes: an entry is valid in one epoch, which has the version of rules, tables, ports, routes and settings in its upper bits. The gate
//! stores the new version when it publishes a change ([`Gate::on_change`](towpath_gate::Gate::on_change)); a change of an interface
//! and a pause change the lower bits. From that moment, every packet takes the path through the engine. The thread then examines each
//! entry again and renews those whose path is the same.
//!
//! Races: the thread examines a flow with the rules of a version, and writes the entry with this version. If the rules change between, the
//! entry is of another epoch from the beginning. A state that ends is reported by the journal; until the thread reads it (a few
//! milliseconds), the kernel forwards packets of the flow, as if they had arrived before. A command that removes states ends their entries
//! before it answers: a packet that the kernel forwards creates no state, and the reply to it would be refused. A slot is used again only after
//! `QUARANTINE`, so that a program that has read the entry before still finds its own slot.
//!
//! Addresses: with `deny`, the kernel also drops the packets whose source or destination a rule denies (`denied`).
//!
//! Bounds: the slots of the map, `PENDING` states that have too few packets, `VERDICTS` flows with verdicts. Without room, flows keep their path through the engine.

mod denied;
mod entry;
mod interfaces;
mod keys;
mod reasons;
mod table;
mod verdicts;

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use towpath_engine::Topology;
use towpath_engine::offload::{FlowPath, NoPath};
use towpath_engine::router::Directory;
use towpath_engine::verdict_feed::VerdictFeed;
use towpath_gate::state::{Flow, JournalReader, Name};
use towpath_gate::{PortId, Walker};
use towpath_metrics::metrics;
use towpath_port::offload::{FlowMap, PathStats};
use towpath_port::scheduling;
use towpath_wire::Time;

pub use self::denied::ByAddress;
pub use self::interfaces::Interface;
use self::interfaces::Interfaces;
use self::table::Table;
use crate::config;

metrics! {
    /// The entries of flow offload. A flow has two, one for each direction.
    pub struct OffloadStats in "offload" {
        /// Entries now.
        pub entries: gauge events,
        /// Addresses and networks whose packets the kernel drops, because a rule denies them.
        pub denied: gauge events,
        /// Entries that there is room for.
        pub capacity: gauge events,
        /// Entries that were written.
        pub offered: counter events,
        /// Entries that were renewed after a change of rules, tables, routes or interfaces.
        pub renewed: counter events,
        /// Entries that were removed: with their state, or because their path has changed.
        pub removed: counter events,
        /// Entries that were not written, because the map was full.
        pub full: counter events,
        /// States and verdicts for flows that were not examined at once, because too many were waiting.
        pub deferred: counter events,
    }
}

metrics! {
    /// Directions of flows that were examined and have no entry. `towpath ctl explain` shows the reason of a flow in words.
    pub struct NotOffloaded in "offload" {
        /// The rules do not fix the path, or a packet has a property that is not offloaded.
        pub rules: counter events as "not_offloaded": "Directions of flows that were examined and have no entry, by reason." (reason = "rules"),
        /// The rule of the state has no `offload`.
        pub not_marked: counter events as "not_offloaded" (reason = "not_marked"),
        /// The port that receives the packets does not offload flows.
        pub port: counter events as "not_offloaded" (reason = "port"),
        /// The packets do not leave by another port.
        pub not_forwarded: counter events as "not_offloaded" (reason = "not_forwarded"),
        /// The destination is the router or its own link.
        pub local: counter events as "not_offloaded" (reason = "local"),
        /// The frames have a VLAN tag, and the port routes.
        pub tagged: counter events as "not_offloaded" (reason = "tagged"),
        /// The driver of the egress interface takes no frames from native XDP programs.
        pub native_egress: counter events as "not_offloaded" (reason = "native_egress"),
        /// An interface is down.
        pub down: counter events as "not_offloaded" (reason = "down"),
    }
}

/// Interval at which the kernel's counters are read.
const TICK: Duration = Duration::from_millis(250);
/// Interval at which the journal is read, while there are changes, and otherwise.
const ACTIVE: Duration = Duration::from_micros(500);
const IDLE: Duration = Duration::from_millis(4);
/// Least interval between two walks through all states for those that were not examined.
const SWEEP: Duration = Duration::from_secs(5);
/// How long the shorter interval lasts after a change.
const ACTIVITY: Duration = Duration::from_millis(100);
/// Time until the slot of an entry that has ended is used again. A program needs microseconds.
const QUARANTINE: Duration = Duration::from_secs(1);
/// Limit on states that wait for their packets.
const PENDING: usize = 1 << 16;
/// Limit on flows with verdicts.
const VERDICTS: usize = 1 << 17;

/// The bits of the epoch: the number of pauses, changes of interfaces, and the version of the rules.
const LINKS: u32 = 8;
const VERSION: u32 = 24;
const PAUSED: u64 = (1 << LINKS) - 1;

/// The parts of the engine that decide where packets go.
pub struct Parts {
    /// A walker of the gate.
    pub walker: Walker,
    /// Reads the changes of states.
    pub journal: JournalReader,
    /// The ports.
    pub topology: Topology,
    /// The interface of each port that offloads flows.
    pub interfaces: Vec<Option<Interface>>,
    /// The neighbors of a router.
    pub directory: Option<Arc<Directory>>,
    /// The beginning of the engine's clock.
    pub start: Instant,
}

/// Which flows are offloaded. See the module documentation.
pub struct Offload {
    map: Arc<FlowMap>,
    pauses: AtomicU32,
    table: Mutex<Table>,
    feed: VerdictFeed,
}

/// The thread. Dropping it ends the thread and all entries.
pub struct Offloading {
    offload: Arc<Offload>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

/// While it exists, the kernel forwards no packets.
#[derive(Debug)]
pub struct Pause(Arc<Offload>);

/// The state of offload, for `ctl show offload`.
#[derive(Clone, Copy, Debug, Default)]
pub struct Shown {
    /// The entries.
    pub stats: OffloadStats,
    /// The flows without an entry.
    pub refused: NotOffloaded,
    /// The packets at the programs.
    pub path: PathStats,
    /// The current epoch.
    pub epoch: u64,
    /// A trace runs.
    pub paused: bool,
}

impl Offload {
    /// Prepares offload with an open map. The caller passes the versions of the rules to [`set_version`](Self::set_version).
    ///
    /// # Errors
    /// Errors of socket(2).
    pub fn new(map: FlowMap, config: &config::Offload, mut parts: Parts) -> io::Result<Arc<Self>> {
        let map = Arc::new(map);
        let (feed, verdicts) = VerdictFeed::new(Arc::clone(&map) as Arc<_>);
        let feed = feed.with_drops(config.deny);
        let interfaces = Interfaces::new(std::mem::take(&mut parts.interfaces))?;
        let table = Table::new(Arc::clone(&map), *config, parts, interfaces, verdicts);
        Ok(Arc::new(Self { map, pauses: AtomicU32::new(0), table: Mutex::new(table), feed }))
    }

    /// Announces the verdicts for flows of an engine thread.
    pub fn verdict_feed(&self) -> VerdictFeed {
        self.feed.clone()
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        // The table is consistent after every step, so a poisoned lock can be used.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The rules, tables, ports, routes or settings have this version now: entries of another one end. One store to memory.
    pub fn set_version(&self, version: u64) {
        self.map.set_epoch(|epoch| with_version(epoch, version));
    }

    /// Adds the kernel's counters to states and rules.
    pub fn drain(&self) {
        self.table().drain();
    }

    /// Ends the entries of states that have been removed. Packets take the path through the engine from now on.
    pub fn end_states(&self, states: impl Iterator<Item = (Flow, Name)>) {
        let (mut table, now) = (self.table(), Instant::now());
        states.for_each(|state| table.end_state(&state, now));
    }

    /// The kernel forwards no packets until the result is dropped.
    pub fn pause(self: &Arc<Self>) -> Pause {
        // The lock orders pauses.
        let _table = self.table();
        // Relaxed: under the lock.
        if self.pauses.fetch_add(1, Ordering::Relaxed) == 0 {
            self.map.set_epoch(|epoch| epoch | PAUSED);
        }
        Pause(Arc::clone(self))
    }

    /// The path of the packets of a flow that arrive on a port, or why they are not offloaded.
    ///
    /// # Errors
    /// The reason.
    pub fn path(&self, flow: &Flow, arrival: PortId, now: Time) -> Result<FlowPath, NoPath> {
        self.table().path(flow, arrival, now)
    }

    /// By which address the kernel drops the packets of a flow that arrive on a port, which the rule `denies` denies; otherwise why it does not.
    /// `None`: the rule does not deny an address, or there is no room for it.
    pub fn denied(&self, packets: (&Flow, PortId), denies: u32) -> Option<ByAddress> {
        self.table().denied(packets, denies)
    }

    /// The state of offload.
    ///
    /// # Errors
    /// Errors of bpf(2).
    pub fn show(&self) -> io::Result<Shown> {
        let (stats, refused) = self.table().stats();
        let epoch = self.map.epoch();
        Ok(Shown {
            stats,
            refused,
            path: self.map.stats()?,
            epoch: epoch >> LINKS,
            paused: epoch & PAUSED != 0,
        })
    }
}

/// The epoch with this version of the rules.
fn with_version(epoch: u64, version: u64) -> u64 {
    version << VERSION | epoch & ((1 << VERSION) - 1)
}

impl Drop for Pause {
    fn drop(&mut self) {
        let Self(offload) = self;
        let _table = offload.table();
        // Relaxed: under the lock.
        if offload.pauses.fetch_sub(1, Ordering::Relaxed) == 1 {
            offload.map.set_epoch(|epoch| epoch & !PAUSED);
        }
    }
}

impl Offloading {
    /// Starts the thread.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn start(offload: &Arc<Offload>) -> io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let (own, stopped) = (Arc::clone(offload), Arc::clone(&stop));
        let body = move || {
            // Before its role, which permits no change of the scheduling. A verdict does not wait for the end of another thread's slice.
            if let Err(error) = scheduling::set_slice(scheduling::SHORTEST_SLICE) {
                log::debug!("verdicts may wait for their way into the kernel: no short time slices: {error}");
            }
            crate::sandbox::enter(crate::sandbox::Role::Offload);
            // An announcement of a verdict ends the wait.
            own.feed.wake(thread::current());
            // Relaxed: nothing else depends on it; the wake-up that follows it is not lost.
            while !stopped.load(Ordering::Relaxed) {
                let (is_active, retired) = {
                    let mut table = own.table();
                    (table.step(Instant::now()), table.take_retired())
                };
                // Without the lock.
                drop(retired);
                thread::park_timeout(if is_active { ACTIVE } else { IDLE });
            }
        };
        let thread = thread::Builder::new().name("offload".to_owned()).spawn(body)?;
        Ok(Self { offload: Arc::clone(offload), stop, thread: Some(thread) })
    }

    /// The kernel forwards no packets until the result is dropped. The states have what it has counted.
    pub fn pause(&self) -> Pause {
        let pause = self.offload.pause();
        self.offload.drain();
        pause
    }
}

impl Drop for Offloading {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            if thread.join().is_err() {
                log::error!("the thread of flow offload panicked; please report it");
            }
        }
        self.offload.table().clear();
    }
}

impl std::fmt::Debug for Offload {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Offload").field("map", &self.map).finish_non_exhaustive()
    }
}
