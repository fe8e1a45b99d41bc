//! Detects that the machine, and not an attack, kept a CPU from the engine: a thread for each CPU, scheduled as an engine thread is, of a
//! process that is not attached.
//!
//! The receive ring of an `af_packet` port holds 128 ms of packets at low rates (`Config::retire` of towpath-port). A longer stall
//! of a CPU, for example of a virtual one, loses packets of a link in any engine.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, sched_getaffinity};

use crate::pin;

/// The stall above which a link may lose packets, with a margin: the canary sees a part of a stall.
pub(super) const LONG: Duration = Duration::from_millis(60);
/// Time slice of an engine thread, and time between two looks.
const SLICE: Duration = towpath_port::scheduling::SHORTEST_SLICE;
const LOOK: Duration = Duration::from_millis(1);

/// The threads, which look until they are asked.
pub(super) struct Canary {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<Duration>>,
}

impl Canary {
    pub(super) fn start() -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let allowed = sched_getaffinity(None).unwrap_or_default();
        let cpus = (0..CpuSet::MAX_CPU).filter(|&cpu| allowed.is_set(cpu));
        let threads = cpus.map(|cpu| {
            let stop = Arc::clone(&stop);
            thread::spawn(move || look(cpu, &stop))
        });
        Self { threads: threads.collect(), stop }
    }

    /// The longest stall since the start.
    pub(super) fn finish(self) -> Duration {
        self.stop.store(true, Ordering::Relaxed);
        self.threads.into_iter().filter_map(|thread| thread.join().ok()).max().unwrap_or_default()
    }
}

/// Sleeps on `cpu` until `stop`, and returns the longest delay of an end of a sleep.
fn look(cpu: usize, stop: &AtomicBool) -> Duration {
    // Both fail in a sandbox only; the delays are longer then.
    let _ = pin::to(cpu);
    let _ = towpath_port::scheduling::set_slice(SLICE);
    let mut longest = Duration::ZERO;
    while !stop.load(Ordering::Relaxed) {
        let begun = Instant::now();
        thread::sleep(LOOK);
        longest = longest.max(begun.elapsed().saturating_sub(LOOK));
    }
    longest
}
