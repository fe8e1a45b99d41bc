//! Copies of counters and rings that the control server and the metrics endpoint show. The supervisor stores the counters of reloads and of
//! the sockets where inspectors attach, the dump thread the rings of its clients, and each server its own counters.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use towpath_fleet::FleetStats;
use towpath_fleet::group::{GroupStats, TableStats};
use towpath_ring::Stats;

use super::commands::show_rings::Ring;
use super::slots::ControlStats;
use crate::events::EventStats;
use crate::fleet::FleetView;
use crate::fleet::group::{GroupDesk, GroupView};
use crate::ipfix::IpfixStats;
use crate::metrics::{EndpointStats, EngineUpgradeStats, ReloadStats};

/// The copies. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct EndpointCounters(Arc<Mutex<Shown>>);

#[derive(Debug, Default)]
struct Shown {
    sockets: Vec<(u16, Stats)>,
    paths: Vec<(u16, PathBuf)>,
    dumps: Vec<Ring>,
    servers: ServerStats,
    upgrade: UpgradeDesk,
    fleet: Option<FleetView>,
    group: Option<GroupView>,
    desk: Option<Arc<GroupDesk>>,
}

/// Upgrades of the engine: what `towpath ctl upgrade` requests of the supervisor, and what it says of the last one.
#[derive(Clone, Debug, Default)]
pub struct UpgradeDesk {
    /// The programs that may be started.
    pub programs: Vec<PathBuf>,
    /// Why no upgrade is possible.
    pub impossible: Option<String>,
    /// The program that a request named, by its number.
    pub wanted: Option<usize>,
    /// An upgrade was requested or is in progress.
    pub running: bool,
    /// Why the last upgrade failed.
    pub failed: Option<String>,
}

/// Counters that belong to the whole engine.
#[derive(Clone, Copy, Debug, Default)]
pub struct ServerStats {
    /// The control socket.
    pub control: ControlStats,
    /// The metrics endpoint.
    pub metrics: EndpointStats,
    /// Reloads.
    pub reloads: ReloadStats,
    /// Upgrades.
    pub upgrades: EngineUpgradeStats,
    /// Flow records.
    pub ipfix: IpfixStats,
    /// Events.
    pub events: EventStats,
    /// States in a group of gates.
    pub fleet: FleetStats,
    /// The configuration of the group.
    pub group: GroupStats,
    /// The tables of the group.
    pub group_tables: TableStats,
}

impl EndpointCounters {
    /// Replaces all counters.
    pub fn set(&self, counters: impl Iterator<Item = (u16, Stats)>) {
        let sockets = &mut self.lock().sockets;
        sockets.clear();
        sockets.extend(counters);
    }

    /// A copy of the counters.
    pub fn get(&self) -> Vec<(u16, Stats)> {
        self.lock().sockets.clone()
    }

    /// Replaces the paths of the sockets that the configuration names.
    pub fn set_paths(&self, paths: impl Iterator<Item = (u16, PathBuf)>) {
        let shown = &mut self.lock().paths;
        shown.clear();
        shown.extend(paths);
    }

    /// The path of a queue's socket, if the configuration names one.
    pub(super) fn path(&self, queue: u16) -> Option<PathBuf> {
        self.lock().paths.iter().find(|(number, _)| *number == queue).map(|(_, path)| path.clone())
    }

    /// Changes the counters of the engine.
    pub fn update(&self, change: impl FnOnce(&mut ServerStats)) {
        change(&mut self.lock().servers);
    }

    /// A copy of the counters of the engine.
    pub fn servers(&self) -> ServerStats {
        self.lock().servers
    }

    /// Replaces the rings of dump clients.
    pub(super) fn set_dumps(&self, rings: Vec<Ring>) {
        self.lock().dumps = rings;
    }

    /// A copy of the rings of dump clients.
    pub(super) fn dumps(&self) -> Vec<Ring> {
        self.lock().dumps.clone()
    }

    /// Replaces what `towpath ctl show fleet` shows.
    pub fn set_fleet(&self, view: FleetView) {
        let mut shown = self.lock();
        shown.servers.fleet = view.stats;
        shown.fleet = Some(view);
    }

    /// Replaces what `towpath ctl show fleet` shows of the group's configuration.
    pub fn set_group(&self, view: GroupView) {
        let mut shown = self.lock();
        (shown.servers.group, shown.servers.group_tables) = (view.stats, view.tables);
        shown.group = Some(view);
    }

    /// What `towpath ctl show fleet` shows of the group's configuration; `None` if rules do not come from a group.
    pub fn group(&self) -> Option<GroupView> {
        self.lock().group.clone()
    }

    /// From now on, clients may change the group's configuration.
    pub fn set_group_desk(&self, desk: Arc<GroupDesk>) {
        self.lock().desk = Some(desk);
    }

    /// Where changes of the group's configuration are asked for; `None` if rules do not come from a group.
    pub fn group_desk(&self) -> Option<Arc<GroupDesk>> {
        self.lock().desk.clone()
    }

    /// What `towpath ctl show fleet` shows; `None` without a group.
    pub fn fleet(&self) -> Option<FleetView> {
        self.lock().fleet.clone()
    }

    /// Changes or reads the state of upgrades.
    pub fn upgrade<T>(&self, change: impl FnOnce(&mut UpgradeDesk) -> T) -> T {
        change(&mut self.lock().upgrade)
    }

    fn lock(&self) -> MutexGuard<'_, Shown> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
