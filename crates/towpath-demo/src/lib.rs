//! `towpath demo`: all four parts at work on one machine, in network namespaces of its own, and what became of everything.
//!
//! ```text
//! people, attackers          the engine            servers, two workers
//! outside  10.77.0.1 ── l0 ═ wan  middle  lan ═ r0 ── 10.77.0.2  inside
//!          10.78.1.1 ── l1 ═ k0   kernel   k1 ═ r1 ── 10.78.2.2
//! ```
//!
//! The upper way goes through `towpath run`, the lower one through the kernel's own forwarding: the same sockets, threads and
//! processors, so the two can be compared. Everything is real: the kernel's TCP and UDP at both ends, and this very program in other
//! processes, started as a user would start it. Namespaces and processes end with this process, however it ends; its files
//! lie in one temporary directory, which another process removes then (`files.rs`).

mod asciicast;
mod attack;
mod cli;
mod clients;
mod director;
mod file;
mod files;
mod inspect;
mod messages;
mod netns_host;
mod network;
mod process;
mod results;
mod screen;
mod status;
mod svg;
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

/// What the demo is asked for.
#[derive(Clone, Debug)]
struct Options {
    /// How long it takes, about.
    pub(crate) length: Duration,
    /// What the engine has its interfaces by; what does best here without it.
    pub(crate) driver: Option<Driver>,
    /// Lines instead of a picture.
    pub(crate) plain: bool,
    /// Where the recording goes.
    pub(crate) record: Option<PathBuf>,
    /// Where a picture of its last screen goes.
    pub(crate) still: Option<PathBuf>,
}

/// How the engine gets at its interfaces: a driver of `towpath run`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Driver {
    /// Packet sockets: everywhere
    AfPacket,
    /// XDP sockets: shorter waits; as root only
    AfXdp,
}

impl Driver {
    /// As a configuration has it.
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

/// Why the demo came to no result.
#[derive(Debug, Error)]
pub(crate) enum Failure {
    /// The system does not let us have the namespaces, or a program is missing.
    #[error("{0}")]
    Missing(String),
    /// SIGINT or SIGTERM.
    #[error("interrupted; its processes, namespaces and files are gone")]
    Interrupted,
    /// A system call failed.
    #[error("{doing}: {source}")]
    System {
        /// What was being done.
        doing: String,
        /// What the system said.
        source: io::Error,
    },
    /// A part of the demo did not do what it is there for.
    #[error("{0}")]
    Broken(String),
}

impl Failure {
    /// This, while nothing has been played yet: something that the demo needs is not to be had here.
    pub(crate) fn before_the_first_scene(self) -> Self {
        match self {
            Self::Interrupted => Self::Interrupted,
            missing => Self::Missing(missing.to_string()),
        }
    }
}

/// Adds what was being done to an error of the system.
pub(crate) fn doing(what: impl Into<String>) -> impl FnOnce(io::Error) -> Failure {
    let doing = what.into();
    move |source| Failure::System { doing, source }
}

/// Whether the demo shall end early. Copies are about the same.
#[derive(Clone, Debug, Default)]
pub(crate) struct Stop(Arc<AtomicBool>);

impl Stop {
    /// One that SIGINT and SIGTERM set.
    pub(crate) fn on_signals() -> Result<Self, Failure> {
        let stop = Self::default();
        for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
            signal_hook::flag::register(signal, Arc::clone(&stop.0)).map_err(doing("signals"))?;
        }
        Ok(stop)
    }

    /// What to say about a failure. A signal from a terminal ends the programs that the demo runs, too: that they failed is not what happened.
    pub(crate) fn explain(&self, failure: Failure) -> Failure {
        if self.is_set() { Failure::Interrupted } else { failure }
    }

    /// Whether it shall end.
    pub(crate) fn is_set(&self) -> bool {
        // Relaxed: the flag is all there is to know.
        self.0.load(Ordering::Relaxed)
    }

    /// Waits so long.
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

    /// Looks every few milliseconds whether `met`, and gives up after `patience`.
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
