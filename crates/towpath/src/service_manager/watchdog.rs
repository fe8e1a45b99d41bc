//! The watchdog: a thread that sends `WATCHDOG=1` only while every packet thread advances.
//!
//! A packet thread advances its [`Heartbeat`] in each turn, and sleeps at most [`limit`] / 4. The watchdog looks at all of them four times
//! in each [`limit`]. A thread that has not advanced for half of the limit is hung: the notifications stop, and the manager ends
//! the process at most one and a half limits after the thread's last turn.
//!
//! A thread that has ended is not hung: the supervisor handles its end.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use super::notify;
use crate::logging::OPERATOR;

/// Notifications in one limit, if all threads advance.
const LOOKS: u32 = 4;

/// The value of a thread that has ended.
const ENDED: u64 = u64::MAX;

/// Counts the turns of a thread. Its end, also by a panic, ends the count. A cache line of its own: other threads write others.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct Heartbeat(AtomicU64);

impl Heartbeat {
    /// Counts a turn. Only the counting thread calls it.
    pub(crate) fn beat(&self) {
        // Relaxed, and no addition in one step: there is one writer, and the value guards no other data.
        self.0.store(self.0.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
    }

    /// Ends the count when the guard is dropped.
    pub(crate) fn until_dropped(self: &Arc<Self>) -> impl Drop + use<> {
        struct Guard(Arc<Heartbeat>);

        impl Drop for Guard {
            fn drop(&mut self) {
                // Relaxed: as above.
                self.0.0.store(ENDED, Ordering::Relaxed);
            }
        }

        Guard(Arc::clone(self))
    }
}

/// The time after which the service manager ends this process without a notification: WATCHDOG_USEC, if it is for this process.
pub(crate) fn limit() -> Option<Duration> {
    let number = |name: &str| std::env::var(name).ok().map(|text| text.parse::<u64>());
    let is_ours = match number("WATCHDOG_PID") {
        None => true,
        Some(pid) => pid == Ok(u64::from(std::process::id())),
    };
    let micros = number("WATCHDOG_USEC")?.ok().filter(|micros| *micros > 0)?;
    is_ours.then(|| Duration::from_micros(micros))
}

/// The thread. Dropping it ends the notifications.
#[derive(Debug)]
pub(crate) struct Watchdog {
    _stop: Sender<()>,
}

impl Watchdog {
    /// Starts the thread, which watches `threads` by name. `None` without a [`limit`].
    ///
    /// # Errors
    ///
    /// The thread cannot be created.
    pub(crate) fn start(threads: Vec<(String, Arc<Heartbeat>)>) -> io::Result<Option<Self>> {
        let Some(limit) = limit() else { return Ok(None) };
        let (stop, stopped) = channel();
        let mut watch = Watch::new(threads, limit / 2, Instant::now());
        let run = move || {
            crate::background::begin_as(crate::sandbox::Role::Watchdog);
            let mut hung = false;
            while stopped.recv_timeout(limit / LOOKS) == Err(RecvTimeoutError::Timeout) {
                match watch.hung(Instant::now()) {
                    None => {
                        notify("WATCHDOG=1");
                        hung = false;
                    }
                    Some(name) if !hung => {
                        hung = true;
                        tracing::error!(
                            target: OPERATOR,
                            "{name} has not advanced for {:.1} s: the service manager is not notified",
                            (limit / 2).as_secs_f64()
                        );
                    }
                    Some(_) => {}
                }
            }
        };
        thread::Builder::new().name("watchdog".into()).spawn(run)?;
        Ok(Some(Self { _stop: stop }))
    }

    /// The longest sleep of a watched thread.
    pub(crate) fn longest_sleep() -> Duration {
        limit().map_or(Duration::MAX, |limit| limit / LOOKS)
    }
}

/// The watched threads. No IO; the clock is an argument.
#[derive(Debug)]
struct Watch {
    threads: Vec<Watched>,
    patience: Duration,
}

#[derive(Debug)]
struct Watched {
    name: String,
    heartbeat: Arc<Heartbeat>,
    /// The last value, and the time at which it was first seen.
    last: (u64, Instant),
}

impl Watch {
    fn new(threads: Vec<(String, Arc<Heartbeat>)>, patience: Duration, now: Instant) -> Self {
        let watched = |(name, heartbeat)| Watched { name, heartbeat, last: (0, now) };
        Self { threads: threads.into_iter().map(watched).collect(), patience }
    }

    /// The name of a thread that has not advanced within the patience.
    fn hung(&mut self, now: Instant) -> Option<&str> {
        let mut hung = None;
        for (at, Watched { heartbeat, last, .. }) in self.threads.iter_mut().enumerate() {
            // Relaxed: only its change counts.
            let value = heartbeat.0.load(Ordering::Relaxed);
            if value != last.0 {
                *last = (value, now);
            }
            if value != ENDED && now.saturating_duration_since(last.1) >= self.patience {
                hung = hung.or(Some(at));
            }
        }
        hung.map(|at| &*self.threads[at].name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_thread_that_does_not_advance_is_hung() {
        let beats: Vec<_> = (0..2).map(|_| Arc::new(Heartbeat::default())).collect();
        let start = Instant::now();
        let at = |millis| start + Duration::from_millis(millis);
        let named = beats.iter().enumerate().map(|(n, beat)| (format!("engine-{n}"), Arc::clone(beat)));
        let mut watch = Watch::new(named.collect(), Duration::from_millis(500), start);
        for millis in [0, 250, 499, 700] {
            beats.iter().for_each(|beat| beat.beat());
            assert_eq!(watch.hung(at(millis)), None, "{millis}");
        }
        beats[0].beat();
        assert_eq!(watch.hung(at(1199)), None);
        assert_eq!(watch.hung(at(1200)), Some("engine-1"));
        // It goes on, and then ends.
        beats.iter().for_each(|beat| beat.beat());
        assert_eq!(watch.hung(at(1300)), None);
        drop(beats[1].until_dropped());
        beats[0].beat();
        assert_eq!(watch.hung(at(9000)), None);
        assert_eq!(watch.hung(at(9500)), Some("engine-0"));
    }
}
