//! The status that the view shows. The director and the polling thread write it; the view reads it.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::process::ctl;
use super::vs_kernel::Comparison;
use crate::say;

/// Interval between two queries of the engine.
const LOOK: Duration = Duration::from_millis(400);
/// Messages kept.
const NEWS: usize = 8;
/// Points of the rate curves.
pub(super) const POINTS: usize = 64;

/// The shared status. Clones refer to the same status.
#[derive(Clone, Debug)]
pub(super) struct Status(Arc<Mutex<Shown>>);

/// Contents of the status.
#[derive(Clone, Debug)]
pub(super) struct Shown {
    pub(super) begun: Instant,
    pub(super) place: String,
    /// The network of hosts and engine exists.
    pub(super) hosts: bool,
    pub(super) scenes: Vec<Scene>,
    /// Number, packets, and text of each rule.
    pub(super) rules: Vec<(u64, u64, String)>,
    /// Packets per second, the newest last.
    pub(super) passed: VecDeque<u64>,
    pub(super) dropped: VecDeque<u64>,
    /// The machine of the comparison.
    pub(super) machine: String,
    /// Keys are read.
    pub(super) keys: bool,
    /// Keys that were pressed and not handled.
    pub(super) asked_for: Asked,
    /// Floods that the user started.
    pub(super) floods: u64,
    /// Workers of the mux: process id, messages, state.
    pub(super) workers: Vec<(u64, u64, String)>,
    pub(super) news: VecDeque<String>,
    pub(super) vs_kernel: Vec<Comparison>,
    /// Set at the end: whether every expectation was met.
    pub(super) ended: Option<bool>,
    /// Print lines to standard error: there is no view.
    plain: bool,
    engine: Option<PathBuf>,
    mux: Option<PathBuf>,
    quiet: bool,
    /// Time of the last query, and the passed and dropped packets then.
    asked: Option<(Instant, u64, u64)>,
}

/// Keys that were pressed.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Asked {
    pub(super) kill: bool,
    pub(super) flood: bool,
}

/// A scene and its state.
#[derive(Clone, Debug)]
pub(super) struct Scene {
    pub(super) name: &'static str,
    /// The kernel's path has no equivalent.
    pub(super) starred: bool,
    pub(super) state: State,
    /// The result.
    pub(super) line: String,
}

/// State of a scene.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// Not started.
    Waits,
    /// Running.
    Plays,
    /// Ended; whether its expectations were met.
    Over(bool),
}

impl Status {
    pub(super) fn new(scenes: &[&'static str], starred: &[&'static str], plain: bool) -> Self {
        let scene = |name: &&'static str| {
            let starred = starred.contains(name);
            Scene { name, starred, state: State::Waits, line: String::new() }
        };
        Self(Arc::new(Mutex::new(Shown {
            begun: Instant::now(),
            place: String::new(),
            hosts: false,
            scenes: scenes.iter().map(scene).collect(),
            rules: Vec::new(),
            passed: VecDeque::new(),
            dropped: VecDeque::new(),
            machine: String::new(),
            keys: false,
            asked_for: Asked::default(),
            floods: 0,
            workers: Vec::new(),
            news: VecDeque::new(),
            vs_kernel: Vec::new(),
            ended: None,
            plain,
            engine: None,
            mux: None,
            quiet: false,
            asked: None,
        })))
    }

    pub(super) fn shown(&self) -> MutexGuard<'_, Shown> {
        self.0.lock().expect("no thread panics while holding the lock")
    }

    /// Starts a scene.
    pub(super) fn play(&self, name: &'static str) {
        let mut shown = self.shown();
        if let Some(scene) = shown.scenes.iter_mut().find(|scene| scene.name == name) {
            scene.state = State::Plays;
        }
        shown.line(&format!("{name} ..."));
    }

    /// Ends a scene.
    pub(super) fn over(&self, name: &'static str, well: bool, line: String) {
        let mut shown = self.shown();
        shown.line(&format!("{name}: {line}{}", if well { "" } else { " (FAILED)" }));
        if let Some(scene) = shown.scenes.iter_mut().find(|scene| scene.name == name) {
            (scene.state, scene.line) = (State::Over(well), line);
        }
    }

    /// Adds a message of the current scene.
    pub(super) fn note(&self, name: &'static str, line: String) {
        if let Some(scene) = self.shown().scenes.iter_mut().find(|scene| scene.name == name) {
            scene.line = line;
        }
    }

    pub(super) fn say(&self, line: String) {
        let mut shown = self.shown();
        shown.line(&line);
        if shown.news.len() == NEWS {
            shown.news.pop_front();
        }
        shown.news.push_back(line);
    }

    /// Sets the engine to query.
    pub(super) fn engine(&self, socket: Option<&Path>) {
        self.shown().engine = socket.map(Into::into);
    }

    /// Sets the mux to query.
    pub(super) fn mux(&self, socket: Option<&Path>) {
        let mut shown = self.shown();
        shown.workers.clear();
        shown.mux = socket.map(Into::into);
    }

    /// Suspends queries while something is measured.
    pub(super) fn quiet(&self, quiet: bool) {
        self.shown().quiet = quiet;
    }

    /// Starts a thread that queries until `over` is set.
    pub(super) fn watch(&self, over: Arc<AtomicBool>) -> JoinHandle<()> {
        let status = self.clone();
        thread::spawn(move || {
            // Relaxed: no other data depends on the flag.
            while !over.load(Ordering::Relaxed) {
                status.look();
                thread::sleep(LOOK);
            }
        })
    }

    fn look(&self) {
        let (engine, mux, quiet) = {
            let shown = self.shown();
            (shown.engine.clone(), shown.mux.clone(), shown.quiet)
        };
        if quiet {
            // Packets of a suspended interval have no rate.
            self.shown().asked = None;
            return;
        }
        if let Some(socket) = engine {
            let (rules, stats) = (ctl(&socket, "show rules"), ctl(&socket, "show stats"));
            if let (Some(rules), Some(stats)) = (rules, stats) {
                self.shown().engine_is(&rules, &stats["stats"]);
            }
        }
        if let Some(mux) = mux.as_ref().and_then(|socket| ctl(socket, "show mux")) {
            let mut shown = self.shown();
            // The engine may have ended meanwhile.
            if shown.mux.is_some() {
                shown.mux_is(&mux["mux"]);
            }
        }
    }
}

impl Shown {
    fn line(&self, line: &str) {
        if self.plain {
            say(format_args!("{:5.1} s  {line}", self.begun.elapsed().as_secs_f64()));
        }
    }

    fn engine_is(&mut self, rules: &Value, stats: &Value) {
        let row = |rule: &Value| {
            Some((rule["number"].as_u64()?, rule["packets"].as_u64()?, rule["text"].as_str()?.to_owned()))
        };
        self.rules = rules["rules"].as_array().into_iter().flatten().filter_map(row).collect();
        let number = |name: &str| stats[name].as_u64().unwrap_or(0);
        let (now, passed, dropped) = (Instant::now(), number("passed"), number("dropped"));
        if let Some((then, passed_then, dropped_then)) = self.asked {
            let seconds = now.duration_since(then).as_secs_f64();
            let rate = |now: u64, then: u64| (now.saturating_sub(then) as f64 / seconds) as u64;
            push(&mut self.passed, rate(passed, passed_then));
            push(&mut self.dropped, rate(dropped, dropped_then));
        }
        self.asked = Some((now, passed, dropped));
    }

    fn mux_is(&mut self, mux: &Value) {
        let row = |worker: &Value| {
            let status = worker["status"].as_str()?.to_owned();
            Some((worker["pid"].as_u64()?, worker["rx_msgs"].as_u64()?, status))
        };
        self.workers = mux["workers"].as_array().into_iter().flatten().filter_map(row).collect();
    }
}

fn push(points: &mut VecDeque<u64>, point: u64) {
    if points.len() == POINTS {
        points.pop_front();
    }
    points.push_back(point);
}
