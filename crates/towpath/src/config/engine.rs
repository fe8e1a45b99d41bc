//! `[engine]`: the threads that have the packets.

use std::time::Duration;

use rustix::thread::CpuSet;

use super::reader::Table;
use super::{Config, Driver};

/// The threads that have the packets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Engine {
    /// How many.
    pub threads: usize,
    /// Which processor each stays on; none when empty.
    pub cpus: Vec<usize>,
    /// What a thread does when nothing comes.
    pub wait: Wait,
    /// How long a stop waits for inspectors.
    pub drain: Duration,
    /// Most packets of one burst.
    pub burst: usize,
    /// Whether the states are in huge pages, where there are any.
    pub hugepages: bool,
}

/// Threads that may have packets, or a mux's peers, to take through the rules: a gate has 64 places, and its own.
const WALKERS: usize = 63;

/// What an engine thread does when nothing comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// Looks for so long, then sleeps.
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
            hugepages: false,
        }
    }
}

/// What the threads, the ports and the muxes ask of each other.
pub(super) fn check(top: &Table<'_, '_>, config: &Config) {
    let threads = config.engine.threads;
    let span = top.table("engine").map_or(top.span.clone(), |table| table.span_of("threads"));
    let single = |driver: &Driver| matches!(driver, Driver::Nfqueue { .. } | Driver::Pcap { .. });
    if let Some(port) = config.ports.iter().find(|port| threads > 1 && single(&port.driver)) {
        let message = format!("port `{}` is of {}, which has one thread", port.name, port.driver.word());
        top.wrong(&span, message, "write threads = 1");
    }
    let walkers = threads + config.muxes.len();
    if walkers > WALKERS {
        let message = format!("threads and muxes together can be {WALKERS}, not {walkers}");
        top.wrong(&span, message, "write fewer threads, or give some muxes an engine of their own");
    }
}

pub(super) fn take(top: &Table<'_, '_>) -> Engine {
    let default = Engine::default();
    let Some(table) = top.table("engine") else { return default };
    let threads = table.number_at("threads", 1..=WALKERS as u64);
    let cpus = table.numbers("cpus", 0..=CpuSet::MAX_CPU as u64 - 1);
    let count = threads.as_ref().map_or(1, |at| at.value as usize);
    if !cpus.is_empty() && cpus.len() != count {
        let message = format!("{} processors for {count} threads", cpus.len());
        table.wrong(&table.span_of("cpus"), message, "name one for each thread, or none");
    }
    let spin = table.number("spin", 0..=1_000_000).map(Duration::from_micros);
    let wait = match table.word("wait", &[("park", false), ("spin", true)]) {
        Some(true) => Wait::Spin,
        _ => spin.map_or(default.wait, Wait::Park),
    };
    let engine = Engine {
        threads: count,
        cpus: cpus.into_iter().map(|at| at.value as usize).collect(),
        wait,
        drain: table.seconds("drain", 0.0..=3600.0).unwrap_or(default.drain),
        burst: table.number("burst", 1..=1024).map_or(default.burst, |burst| burst as usize),
        hugepages: table.flag("hugepages").unwrap_or(default.hugepages),
    };
    table.finish();
    engine
}
