//! `[engine]`: the threads that process packets.

use std::path::{Path, PathBuf};
use std::time::Duration;

use towpath_engine::LogDrops;
use towpath_engine::reorder::Limits;

use super::Config;
use super::process;
use super::reader::Table;
use crate::process::Identity;
use crate::sandbox::Mode;

/// Configuration of the threads that process packets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Engine {
    /// Number of threads.
    pub threads: usize,
    /// CPU of each thread; empty: not pinned.
    pub cpus: Vec<usize>,
    /// Behaviour of a thread without packets.
    pub wait: Wait,
    /// Time that a stop waits for inspectors.
    pub drain: Duration,
    /// Maximum number of packets in one burst.
    pub burst: usize,
    /// Bounds of the reorder buffer of a thread.
    pub reorder: Limits,
    /// Keep the state table in huge pages if the kernel has any.
    pub hugepages: bool,
    /// The dropped packets that are logged.
    pub log_drops: LogDrops,
    /// User and group of an engine that root starts.
    pub identity: Option<Identity>,
    /// The programs that an upgrade may start.
    pub upgrade: Vec<PathBuf>,
    /// Time for the new version to be ready.
    pub upgrade_time: Duration,
    /// What happens to a thread that makes a system call that its role does not make.
    pub sandbox: Mode,
}

/// Maximum number of threads and muxes: a gate has 64 walkers, one of them its own.
const WALKERS: usize = 63;

/// Behaviour of an engine thread without packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// Polls for this time, then sleeps.
    Park(Duration),
    /// Never sleeps.
    Spin,
}

impl Default for Engine {
    fn default() -> Self {
        Self {
            threads: 1,
            cpus: Vec::new(),
            wait: Wait::Park(Duration::from_micros(50)),
            drain: Duration::from_secs(5),
            burst: 256,
            reorder: Limits::default(),
            hugepages: false,
            log_drops: LogDrops::Losses,
            identity: None,
            upgrade: Vec::new(),
            upgrade_time: Duration::from_secs(30),
            sandbox: Mode::Off,
        }
    }
}

/// Checks requirements between threads, ports and muxes.
pub(super) fn check(top: &Table<'_, '_>, config: &Config) {
    let threads = config.engine.threads;
    let span = top.table("engine").map_or(top.span.clone(), |table| table.span_of("threads"));
    if let Some(port) = config.ports.iter().find(|port| threads > 1 && !port.driver.is_multi_queue()) {
        let message =
            format!("port `{}` has the driver {}, which supports one thread", port.name, port.driver.name());
        top.wrong(&span, message, "write threads = 1");
    }
    let walkers = threads + config.muxes.len() + usize::from(config.offload.is_some());
    if walkers > WALKERS {
        let message = format!("{walkers} threads and muxes; at most {WALKERS} together are supported");
        top.wrong(&span, message, "write fewer threads, or run some muxes in another engine");
    }
}

pub(super) fn take(top: &Table<'_, '_>) -> Engine {
    let default = Engine::default();
    let Some(table) = top.table("engine") else { return default };
    let threads = table.number_at("threads");
    let cpus = table.numbers("cpus");
    let count = threads.as_ref().map_or(1, |at| at.value as usize);
    if !cpus.is_empty() && cpus.len() != count {
        let message = format!("{} CPUs for {count} threads", cpus.len());
        table.wrong(&table.span_of("cpus"), message, "name one for each thread, or none");
    }
    let spin = table.number("spin").map(Duration::from_micros);
    let wait = match table.word("wait") {
        Some("spin") => Wait::Spin,
        _ => spin.map_or(default.wait, Wait::Park),
    };
    let engine = Engine {
        threads: count,
        cpus: cpus.into_iter().map(|at| at.value as usize).collect(),
        wait,
        drain: table.seconds("drain").unwrap_or(default.drain),
        burst: table.number("burst").map_or(default.burst, |burst| burst as usize),
        reorder: Limits {
            packets: table
                .number("reorder-packets")
                .map_or(default.reorder.packets, |packets| packets as usize),
            bytes: table.number("reorder-memory").map_or(default.reorder.bytes, |mib| (mib as usize) << 20),
        },
        hugepages: table.flag("hugepages").unwrap_or(default.hugepages),
        log_drops: match table.word("log-drops") {
            Some("no") => LogDrops::No,
            Some("all") => LogDrops::All,
            _ => default.log_drops,
        },
        identity: process::engine(&table),
        upgrade: upgrade(&table),
        upgrade_time: table.seconds("upgrade-time").unwrap_or(default.upgrade_time),
        sandbox: table.word("sandbox").and_then(Mode::of_word).unwrap_or(default.sandbox),
    };
    table.finish();
    engine
}

/// The programs of `upgrade`. A relative path would depend on the directory in which the engine was started.
fn upgrade(table: &Table<'_, '_>) -> Vec<PathBuf> {
    let (absolute, relative): (Vec<_>, Vec<_>) =
        table.texts("upgrade").into_iter().partition(|at| Path::new(at.value).is_absolute());
    for at in relative {
        table.wrong(
            &at.span,
            format!("`{}` is not an absolute path", at.value),
            "write \"/usr/bin/towpath\"",
        );
    }
    absolute.into_iter().map(|at| at.value.into()).collect()
}
