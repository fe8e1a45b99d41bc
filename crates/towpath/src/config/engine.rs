//! `[engine]`: the threads that have the packets.

use std::time::Duration;

use super::reader::Table;

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
}

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
        }
    }
}

pub(super) fn take(top: &Table<'_, '_>) -> Engine {
    let default = Engine::default();
    let Some(table) = top.table("engine") else { return default };
    let threads = table.number_at("threads", 1..=64);
    let cpus = table.numbers("cpus", 0..=4095);
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
    };
    table.finish();
    engine
}
