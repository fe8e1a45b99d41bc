//! The configuration of a group: a thread that checks and applies what the group has in common.
//!
//! What: the thread `group` has a session of its own with the bus, so that a long rule file delays no states. [`Group`] decides. Rules are
//! replaced as by a reload, under a lock that a reload of this gate's own files takes too. A version that was applied is kept in a file, with
//! which the next engine begins.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use towpath_fleet::group::tables::Position;
use towpath_fleet::group::{
    CONTENT_MAX, Content, GateVersion, Group, GroupOutput, GroupStats, Local, TableStats,
};
use towpath_gate::StatePolicy;
use towpath_gate::rules::Diagnostic;
use towpath_wire::Time;

pub use self::desk::{GroupCommand, GroupDesk, GroupDone, Unknown};
use self::saved::{Saved, Saver};
use self::tables::GroupTables;
use super::bus;
use crate::config::{self, Config, GroupKeys, Rules};
use crate::control::EndpointCounters;
use crate::daemon::wiring::settings;
use crate::ruleset_manager::RulesetManager;
use crate::snapshot::Saving;

pub mod desk;
mod saved;
mod tables;

/// Longest time for which the thread waits for a message.
const WAIT: Duration = Duration::from_millis(5);

/// Messages of one turn.
const MESSAGES: usize = 64;

/// Interval at which `towpath ctl show fleet` is updated.
const SHOW: Duration = Duration::from_millis(100);

/// Problems that are logged in one session.
const TOLD: usize = 64;

/// Lines of errors that are sent to the gate that asks.
const LINES: usize = 20;

/// The first line of the file of a version.
const FIRST: &str = "version ";

/// What `towpath ctl show fleet` shows of the configuration.
#[derive(Clone, Debug, Default)]
pub struct GroupView {
    /// The gates and their versions, this one first.
    pub gates: Vec<GateVersion>,
    /// Why the group has no bucket.
    pub problem: Option<String>,
    /// The counters.
    pub stats: GroupStats,
    /// The counters of tables.
    pub tables: TableStats,
}

/// The rules that this gate has from its group, and its own configuration.
pub struct GroupRules {
    ruleset: Arc<RulesetManager>,
    /// Keeps the version.
    file: PathBuf,
    held: Mutex<Held>,
}

/// See [`GroupRules::hold`].
#[derive(Debug)]
pub struct Held {
    local: Config,
    applied: Option<(u64, Content)>,
    /// How far the entries are that this gate began with, until the thread starts.
    position: Option<Position>,
}

impl GroupRules {
    /// Begins with the version in the file of the configuration, if there is one, and otherwise with the gate's own rules. `None`: rules do
    /// not come from a group.
    pub fn open(config: &Config, ruleset: &Arc<RulesetManager>) -> Option<Arc<Self>> {
        let file = config.fleet.as_ref()?.configuration.clone()?;
        let held = Held { local: config.clone(), applied: None, position: None };
        let this = Self { ruleset: Arc::clone(ruleset), file, held: Mutex::new(held) };
        match read(&this.file) {
            Ok(None) => tracing::info!("{}: no version of the group yet", this.file.display()),
            Ok(Some((version, content))) => match this.replace(version, &content, Some(StatePolicy::Keep)) {
                Ok(()) => {
                    tracing::info!("{}: begins with version {version} of the group", this.file.display())
                }
                Err(reason) => tracing::warn!(
                    "{}: version {version} of the group does not fit this gate, which begins with its own rules: {reason}",
                    this.file.display()
                ),
            },
            Err(error) => tracing::warn!(
                "{}: the group's configuration cannot be read; this gate begins with its own rules: {error}",
                this.file.display()
            ),
        }
        match Saved::read(&saved::beside(&this.file)) {
            Ok(None) => {}
            Ok(Some(saved)) => this.restore(saved),
            Err(error) => tracing::warn!(
                "{}: the tables of the group cannot be read, and have the entries of the rule file until this gate is connected: \
                 {error}",
                saved::beside(&this.file).display()
            ),
        }
        Some(Arc::new(this))
    }

    /// Begins with the entries of tables of a file.
    fn restore(&self, mut saved: Saved) {
        let mut entries = 0;
        for (table, lines) in saved.tables().filter(|(table, _)| !table.missing) {
            match self.ruleset.load_group_entries(&table.name, lines) {
                Ok(()) => entries += lines.lines().count(),
                Err(found) => {
                    table.missing = true;
                    let (name, reason) = (&table.name, self::lines(&found[..found.len().min(1)]));
                    tracing::warn!("table {name} of the group: its saved entries do not fit: {reason}");
                }
            }
        }
        tracing::info!("{entries} entries of tables of the group, as they were saved");
        self.hold().position = Some(saved.position);
    }

    /// What this gate has from the group. While it is held, no version is applied.
    pub fn hold(&self) -> MutexGuard<'_, Held> {
        // A version is complete before it is stored, so a poisoned lock can be used.
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn applied(&self) -> Option<(u64, Content)> {
        self.hold().applied.clone()
    }

    fn replace(&self, version: u64, content: &Content, states: Option<StatePolicy>) -> Result<(), String> {
        let mut held = self.hold();
        let (config, rules) = over(&held.local, content).map_err(|found| lines(&found))?;
        rules.warnings.iter().for_each(|warning| tracing::warn!("{warning}"));
        let policy = states.unwrap_or(config.reload);
        let diff =
            self.ruleset.replace(rules.ruleset, None, config.default_allow, policy, Some(settings(&config)));
        held.applied = Some((version, content.clone()));
        drop(held);
        let (added, removed) = (diff.added.len(), diff.removed.len());
        tracing::info!(
            "version {version} of the group: {added} rules added, {removed} removed, {} kept",
            diff.kept
        );
        Ok(())
    }

    fn save(&self, version: u64, content: &Content) -> io::Result<()> {
        let bytes = content.encode().map_err(io::Error::other)?;
        let mut saving = Saving::create(&self.file)?;
        saving.write(format!("{FIRST}{version}\n").as_bytes())?;
        saving.write(&bytes)?;
        saving.commit()
    }
}

impl Held {
    /// The configuration and the rules of this gate after its own configuration has become `local`; `None` without a version of the group.
    pub fn over(&self, local: &Config) -> Option<Result<(Config, Rules), Vec<Diagnostic>>> {
        self.applied.as_ref().map(|(_, content)| over(local, content))
    }

    /// This gate's own configuration has changed.
    pub fn set_local(&mut self, local: Config) {
        self.local = local;
    }
}

/// A gate's configuration with the keys of the group, and the group's rules.
fn over(local: &Config, content: &Content) -> Result<(Config, Rules), Vec<Diagnostic>> {
    let Content { config, rules } = content;
    let config = match config.name.is_empty() {
        true => local.clone(),
        false => GroupKeys::parse(&config.name, &config.text)?.over(local),
    };
    let rules = config.parse_group_rules(&rules.name, &rules.text)?;
    Ok((config, rules))
}

fn lines(found: &[Diagnostic]) -> String {
    let mut text: Vec<String> = found.iter().take(LINES).map(ToString::to_string).collect();
    if found.len() > LINES {
        text.push(format!("and {} more errors", found.len() - LINES));
    }
    text.join("\n")
}

/// Reads the file of a version; `None` if it does not exist.
fn read(path: &Path) -> io::Result<Option<(u64, Content)>> {
    let file = match File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        file => file?,
    };
    let mut bytes = Vec::new();
    file.take(CONTENT_MAX as u64 + 64).read_to_end(&mut bytes)?;
    let damaged = || io::Error::other("it is damaged; remove it");
    let end = bytes.iter().position(|byte| *byte == b'\n').ok_or_else(damaged)?;
    let first = std::str::from_utf8(&bytes[..end]).ok().and_then(|line| line.strip_prefix(FIRST));
    let version = first.and_then(|version| version.parse().ok()).ok_or_else(damaged)?;
    let content = Content::decode(&bytes[end + 1..]).map_err(io::Error::other)?;
    Ok(Some((version, content)))
}

/// The rules as the group sees them.
struct Applier(Arc<GroupRules>);

impl Local for Applier {
    fn check(&mut self, content: &Content) -> Result<(), String> {
        let local = self.0.hold().local.clone();
        over(&local, content).map(|_| ()).map_err(|found| lines(&found))
    }

    fn apply(&mut self, version: u64, content: &Content) -> Result<(), String> {
        self.0.replace(version, content, None).inspect_err(|reason| {
            tracing::warn!(
                "version {version} of the group is not applied, and this gate continues as before: {reason}"
            );
        })?;
        if let Err(error) = self.0.save(version, content) {
            // The version is applied: after a restart without a server, the gate begins with the one before.
            tracing::warn!(
                "{}: version {version} of the group cannot be saved: {error}",
                self.0.file.display()
            );
        }
        Ok(())
    }
}

/// The thread. Dropping it ends the thread.
#[derive(Debug)]
pub struct GroupThread {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl GroupThread {
    /// Starts the thread.
    ///
    /// # Errors
    /// A thread cannot be started, or this build has no client of the bus.
    pub fn start(
        config: &config::Fleet,
        rules: Arc<GroupRules>,
        shown: EndpointCounters,
    ) -> io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let bus = bus::start_group(config)?;
        let desk = Arc::new(GroupDesk::default());
        shown.set_group_desk(Arc::clone(&desk));
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let applied = rules.applied().and_then(|(version, content)| Some((version, content.encode().ok()?)));
        let begun = Instant::now();
        // Another process of this gate begins at another time.
        let incarnation = since.as_nanos() as u64;
        let position = rules.hold().position.take();
        let mut member = Member {
            saver: Saver::new(saved::beside(&rules.file), position.as_ref()),
            group: Group::new(&config.gate, incarnation, applied),
            gate: config.gate.clone(),
            tables: GroupTables::new(&rules.ruleset, incarnation, position.as_ref()),
            known: false,
            rules: Applier(rules),
            bus,
            desk,
            begun,
            unsent: None,
            entries: None,
            problem: None,
            told: BTreeSet::new(),
            shows: begun,
            shown,
        };
        member.show();
        let body = move || {
            crate::background::begin_as(crate::sandbox::Role::States);
            // Relaxed: the flag guards no data.
            while !stopped.load(Ordering::Relaxed) {
                member.turn();
            }
            member.finish();
        };
        let thread = thread::Builder::new().name("group".to_owned()).spawn(body)?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for GroupThread {
    fn drop(&mut self) {
        // Relaxed: see `start`.
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            log::error!("the thread of the group's configuration panicked; please report it");
        }
    }
}

/// What the thread does, as turns.
struct Member {
    group: Group,
    gate: String,
    tables: GroupTables,
    saver: Saver,
    /// The version of the group is known, or that there is none.
    known: bool,
    rules: Applier,
    bus: bus::GroupBus,
    desk: Arc<GroupDesk>,
    begun: Instant,
    /// The client had no room for it.
    unsent: Option<GroupOutput>,
    /// A change of a client.
    entries: Option<GroupOutput>,
    problem: Option<String>,
    /// Problems of this session that are in the log.
    told: BTreeSet<String>,
    shows: Instant,
    shown: EndpointCounters,
}

impl Member {
    fn now(&self) -> Time {
        Time::default() + self.begun.elapsed()
    }

    fn turn(&mut self) {
        let mut wait = WAIT;
        for _ in 0..MESSAGES {
            let Some(incoming) = self.bus.receive(wait) else { break };
            wait = Duration::ZERO;
            self.take(incoming);
        }
        self.group.dropped(self.bus.take_dropped());
        let now = self.now();
        if let Some(command) = self.desk.next() {
            self.begin(&command, now);
        }
        while let Some(output) = self.next_output(now) {
            if let Err(output) = self.bus.send(output) {
                self.unsent = Some(output);
                break;
            }
        }
        if let Some(outcome) = self.group.take_outcome() {
            self.desk.finish(outcome.map(|(version, gates)| GroupDone::Version(version, gates)));
        }
        if let Some(done) = self.tables.poll_done() {
            self.desk.finish(Ok(done));
        }
        let (tables, rules) = (self.tables.tables(), &self.rules.0.ruleset);
        if let Some(problem) = self.saver.poll(|| tables.position(), tables.reached(), rules) {
            self.tell(problem);
        }
        if self.shows.elapsed() >= SHOW {
            self.shows = Instant::now();
            self.show();
        }
    }

    fn finish(&mut self) {
        let position = self.tables.tables().position();
        if let Some(problem) = self.saver.finish(position, &self.rules.0.ruleset) {
            self.tell(problem);
        }
    }

    fn begin(&mut self, command: &GroupCommand, now: Time) {
        let begun = match command {
            GroupCommand::Apply(content) => self.group.propose(content, &mut self.rules, now),
            GroupCommand::Change { table, lines } => self.change(table, lines, false),
            GroupCommand::Load { table, lines } => self.change(table, lines, true),
        };
        if let Err(reason) = begun {
            self.desk.finish(Err(reason));
        }
    }

    fn change(&mut self, table: &str, lines: &str, load: bool) -> Result<(), String> {
        self.entries = Some(self.tables.change(table, lines, load)?);
        Ok(())
    }

    fn next_output(&mut self, now: Time) -> Option<GroupOutput> {
        if let Some(output) =
            self.unsent.take().or_else(|| self.entries.take()).or_else(|| self.group.poll(now))
        {
            return Some(output);
        }
        // Tables are those of the rules: the version comes first.
        let follow = if self.known { self.tables.poll_follow() } else { None };
        follow.or_else(|| self.tables.poll_snapshot(&self.gate))
    }

    fn take(&mut self, incoming: bus::GroupIncoming) {
        let now = self.now();
        match incoming {
            bus::GroupIncoming::Connected(server, most) => {
                log::info!("fleet: the configuration comes from {server}");
                self.told.clear();
                self.group.connect(most, now);
                self.tables.connect();
            }
            bus::GroupIncoming::Away(error) => {
                (self.unsent, self.entries, self.known) = (None, None, false);
                self.group.disconnect();
                if let Some(outcome) = self.tables.disconnect() {
                    self.desk.finish(outcome);
                }
                self.tell(format!("{error}; the gate continues with version {}", self.group.version()));
            }
            bus::GroupIncoming::NoBucket(reason) => {
                self.group.no_bucket(&reason);
                self.tell(reason);
            }
            bus::GroupIncoming::Warning(warning) => self.tell(warning),
            bus::GroupIncoming::Absent => {
                (self.problem, self.known) = (None, true);
                self.group.absent();
            }
            bus::GroupIncoming::Current(version, bytes) => {
                (self.problem, self.known) = (None, true);
                if let Err(error) = Content::decode(&bytes) {
                    tracing::warn!("version {version} of the group is not applied: {error}");
                }
                self.group.current(version, &bytes, &mut self.rules, now);
                self.tables.rules_changed();
            }
            bus::GroupIncoming::Foreign(version) => {
                self.known = true;
                self.group.foreign(version);
                self.tell(format!(
                    "revision {version} of the bucket was not written by a gate; apply a version again"
                ));
            }
            bus::GroupIncoming::Written(written) => self.group.written(written, now),
            bus::GroupIncoming::TablesOpen { made, last } => {
                self.problem = None;
                self.tables.open(made, last);
            }
            bus::GroupIncoming::NothingFollows(epoch) => self.tables.nothing_follows(epoch),
            bus::GroupIncoming::Entries { epoch, seq, pending, table, from, bytes } => {
                let names = (&*table, &*from);
                let problem = self.tables.message((epoch, seq), names, bytes.as_deref(), pending);
                if let Some(problem) = problem {
                    self.tell(problem);
                }
            }
            bus::GroupIncoming::Published(published) => {
                if let Some(outcome) = self.tables.published(published) {
                    self.desk.finish(outcome);
                }
            }
            bus::GroupIncoming::Republished(_) => self.group.republished(),
            bus::GroupIncoming::Message(from, bytes) => {
                self.group.message(&from, &bytes, &mut self.rules, now);
            }
        }
    }

    /// Logs a problem once for each reason and session: the client tries again every second.
    fn tell(&mut self, problem: String) {
        // `ctl show fleet` shows the last one in any case.
        if self.told.len() < TOLD && self.told.insert(problem.clone()) {
            log::warn!("fleet: {problem}");
        }
        self.problem = Some(problem);
    }

    fn show(&mut self) {
        let now = self.now();
        let (gates, stats) = (self.group.gates(now), self.group.stats(now));
        let tables = self.tables.tables().stats();
        self.shown.set_group(GroupView { gates, problem: self.problem.clone(), stats, tables });
    }
}
