//! The demo of Towpath: all four parts at work on one machine, in network namespaces, with a summary of results.
//!
//! ```text
//! clients, attackers         the engine            servers, two workers
//! outside  10.77.0.1 ── l0 ═ wan  middle  lan ═ r0 ── 10.77.0.2  inside
//!          10.78.1.1 ── l1 ═ k0   kernel   k1 ═ r1 ── 10.78.2.2
//! ```
//!
//! The upper path goes through `towpath run`, the lower one through the kernel's forwarding, with the same sockets, threads and
//! CPUs, so that the two can be compared. All traffic is real: the kernel's TCP and UDP at both ends, and this executable in
//! other processes, started as a user would start it. Namespaces and processes end with this process. Its files are in one
//! temporary directory, which a helper process removes (`files.rs`).
//!
//! [`Args`] are the options of `towpath demo`; [`Args::run`] plays it. `towpath` depends on this crate through its default feature
//! `demo`.

mod asciicast;
mod attack;
mod cli;
mod clients;
mod digits;
mod director;
mod file;
mod files;
mod fleet;
mod inspect;
mod keys;
mod messages;
mod netns_host;
mod network;
mod process;
mod results;
mod screen;
mod status;
mod svg;
mod trace;
mod unprivileged;
mod view;
mod vs_kernel;

use std::fmt::Display;
use std::io::{self, Write as _};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use clap::ValueEnum;
use thiserror::Error;

pub use self::attack::FLOOD_MAX;
pub use self::cli::{Args, Outcome, Part};
pub use self::network::{REPORTED_RULES, RULES, configuration};
use self::results::Results;
use self::screen::Screen;

/// Writes a line to standard error. A closed standard error is not an error of the demo.
fn say(line: impl Display) {
    // One write per line: other processes may write to the same terminal.
    let _ = io::stderr().write_all(format!("{line}\n").as_bytes());
}

/// Plays all scenes, or without network namespaces the scenes that need none.
///
/// Must be called while the process has one thread: it may enter a user namespace and become root there.
fn play(options: &Options) -> Result<Results, Failure> {
    let screen = Screen::open(options)?;
    match director::play(options, &screen) {
        Err(Failure::Missing(what)) => {
            say(format_args!(
                "towpath demo: {what}. What needs no privilege follows: a capture, the mux, a file"
            ));
            unprivileged::play(options, &screen, &what)
        }
        played => played,
    }
}

/// Options of a demo.
#[derive(Clone, Debug)]
struct Options {
    /// Approximate duration.
    pub(crate) length: Duration,
    /// Port driver; `None` selects the best one available.
    pub(crate) driver: Option<Driver>,
    /// Print lines instead of the live view.
    pub(crate) plain: bool,
    /// File for the recording.
    pub(crate) record: Option<PathBuf>,
    /// File for a picture of the last screen.
    pub(crate) still: Option<PathBuf>,
}

/// A port driver of `towpath run`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Driver {
    /// Packet sockets: on every interface
    AfPacket,
    /// XDP sockets: lower latency; root only
    AfXdp,
}

impl Driver {
    /// The driver's name in a configuration.
    fn word(self) -> &'static str {
        match self {
            Self::AfPacket => "af_packet",
            Self::AfXdp => "af_xdp",
        }
    }

    fn other(self) -> Self {
        match self {
            Self::AfPacket => Self::AfXdp,
            Self::AfXdp => Self::AfPacket,
        }
    }
}

/// Why the demo failed.
#[derive(Debug, Error)]
pub(crate) enum Failure {
    /// Namespaces are unavailable, or a program is missing.
    #[error("{0}")]
    Missing(String),
    /// SIGINT or SIGTERM.
    #[error("interrupted; its processes, namespaces and files are gone")]
    Interrupted,
    /// A system call failed.
    #[error("{doing}: {source}")]
    System {
        /// The operation.
        doing: String,
        /// The error.
        source: io::Error,
    },
    /// A part of the demo failed.
    #[error("{0}")]
    Broken(String),
}

impl Failure {
    /// Converts a failure before the first scene into [`Failure::Missing`]: a prerequisite is unavailable.
    pub(crate) fn before_the_first_scene(self) -> Self {
        match self {
            Self::Interrupted => Self::Interrupted,
            missing => Self::Missing(missing.to_string()),
        }
    }
}

/// Adds the operation to an I/O error.
pub(crate) fn doing(what: impl Into<String>) -> impl FnOnce(io::Error) -> Failure {
    let doing = what.into();
    move |source| Failure::System { doing, source }
}

/// A flag that ends the demo early. Clones share it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Stop(Arc<AtomicBool>);

impl Stop {
    /// A flag that SIGINT and SIGTERM set.
    pub(crate) fn on_signals() -> Result<Self, Failure> {
        let stop = Self::default();
        for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
            signal_hook::flag::register(signal, Arc::clone(&stop.0)).map_err(doing("signals"))?;
        }
        Ok(stop)
    }

    /// Attributes a failure: Ctrl-C also ends the programs of the demo, so after a signal the cause is the interruption.
    pub(crate) fn explain(&self, failure: Failure) -> Failure {
        if self.is_set() { Failure::Interrupted } else { failure }
    }

    /// Ends the demo.
    pub(crate) fn set(&self) {
        // Relaxed: no other data depends on the flag.
        self.0.store(true, Ordering::Relaxed);
    }

    /// Returns true if the demo must end.
    pub(crate) fn is_set(&self) -> bool {
        // Relaxed: no other data depends on the flag.
        self.0.load(Ordering::Relaxed)
    }

    /// Waits for `length`, or until interrupted.
    pub(crate) fn pause(&self, length: Duration) -> Result<(), Failure> {
        let until = Instant::now() + length;
        loop {
            if self.is_set() {
                return Err(Failure::Interrupted);
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(());
            }
            thread::sleep(left.min(Duration::from_millis(20)));
        }
    }

    /// Polls `met` every few milliseconds. Returns false after `patience`.
    pub(crate) fn until(
        &self,
        patience: Duration,
        mut met: impl FnMut() -> Result<bool, Failure>,
    ) -> Result<bool, Failure> {
        let end = Instant::now() + patience;
        while Instant::now() < end {
            if met()? {
                return Ok(true);
            }
            self.pause(Duration::from_millis(5))?;
        }
        Ok(false)
    }
}
