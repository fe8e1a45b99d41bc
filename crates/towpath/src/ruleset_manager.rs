//! The ruleset of a running engine: queries and changes.
//!
//! Worker threads evaluate the rules through [`Walker`](towpath_gate::Walker)s and never wait for this module. A mutex protects the
//! gate; the supervisor and the control socket's thread take it in turn.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use towpath_engine::Topology;
use towpath_gate::rules::{Diagnostic, Ruleset};
use towpath_gate::state::record::Record;
use towpath_gate::state::{
    Changes, Counters, Cursor, JournalRead, JournalReader, Keepalive, Kind as StateKind, Listed,
    SettingError, StateEvent, Top,
};
use towpath_gate::{
    Diff, Gate, Merged, NamedRule, NotMerged, Restored, Routes, RuleRefs, RulesByContent, SnapshotError,
    StatePolicy,
};
use towpath_wire::Time;

pub use self::clock::Clock;
pub use self::group_tables::write_entries;
use self::listings::Listings;
use self::recheck::Recheck;
pub use self::recheck::Rechecks;
use crate::offload::Offload;
use crate::report;
use crate::settings::{Settings, short};
use crate::snapshot::running::RunningStats;

mod clock;
mod group_tables;
mod listings;
mod recheck;
mod tables;

/// Owns the ruleset; worker threads evaluate it through `Walker`s. See the module documentation.
pub struct RulesetManager {
    book: Mutex<Book>,
    /// How packets are forwarded, for explanations.
    topology: Topology,
    clock: Clock,
    /// Number of changes of rules or tables.
    version: AtomicU64,
    /// Listings of tables that clients read in pages.
    listings: Listings,
    /// Flows whose packets the kernel forwards.
    offload: OnceLock<Arc<Offload>>,
}

struct Book {
    gate: Gate,
    /// The ruleset that the gate was loaded with last.
    ruleset: Ruleset,
    default_allow: bool,
    recheck: Option<Recheck>,
    /// Results of the current or last re-check. `running` is unused here: `recheck` tells whether one is running.
    rechecks: Rechecks,
    /// States of a snapshot have not been re-checked yet.
    unchecked: bool,
    /// Reads the changes of states for clients, and the number of those that it missed.
    watching: Option<JournalReader>,
    missed: u64,
    running: RunningStats,
    /// Tables whose entries come from a group of gates.
    group_tables: BTreeSet<String>,
}

/// Result of a command.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Done {
    /// The changes.
    pub diff: Diff,
    /// Warnings: valid, but probably a mistake.
    pub warnings: Vec<Diagnostic>,
}

/// Why a table has no [`RulesetManager::listing`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoListing {
    /// The table does not exist.
    NoTable,
    /// The listing of this version was discarded, and the table may have changed since.
    Discarded,
}

/// One state of [`RulesetManager::states`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateLine {
    /// The rule's number.
    pub rule: u32,
    /// The state in ipfw's output format.
    pub text: String,
    /// The same data as fields.
    pub parts: Box<towpath_gate::state::Listed>,
    /// The state's flow name (`:name` in rules).
    pub name: String,
}

/// An event of one state, or of the whole state table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// Time on the engine's clock, in nanoseconds.
    pub at: u64,
    /// The kind of event.
    pub what: &'static str,
    /// The state at the time of the event; `None` for an event of the whole table.
    pub state: Option<StateLine>,
}

/// Limits of [`RulesetManager::tidy`]: states to scan, and calls of `Gate::prepare`.
const SWEPT: usize = 1 << 16;
const PREPARED: usize = 16;

/// Maximum number of states that a filtered listing examines while it holds the lock: some milliseconds.
const EXAMINED: usize = 1 << 15;

/// Maximum number of events that one call takes from the journal, and that wait for a client.
pub(crate) const EVENTS: usize = 65_536;

impl StateLine {
    fn new(state: Listed, gate: &Gate, verbose: bool) -> Self {
        let rule = gate.listed_rule(&state);
        let text = state.line(rule, |name| gate.flow_name(name)).verbose(verbose).to_string();
        let name = gate.flow_name(state.name).to_owned();
        Self { rule, text, name, parts: Box::new(state) }
    }
}

impl Book {
    /// Parses commands as an extension of the current rules. Returns the resulting rules and the commands' warnings. Deleting a rule
    /// that does not exist is an error, unless the command has `-q`. The cost does not depend on the number of table entries.
    fn read(&self, text: &str) -> Result<(Ruleset, Vec<Diagnostic>), Vec<Diagnostic>> {
        let before = self.ruleset.to_text_without_tables();
        let lines = before.lines().count() as u32;
        let own = |mut found: Diagnostic| {
            found.line = found.line.saturating_sub(lines);
            found.file = "command".into();
            found
        };
        let parsed = self.ruleset.parse_with_tables("command", &(before + text));
        let ruleset = match parsed.ruleset {
            Ok(ruleset) => ruleset.with_default_allow(self.default_allow),
            Err(errors) => return Err(errors.into_iter().map(own).collect()),
        };
        let found = parsed.warnings.into_iter().filter(|found| found.line > lines).map(own);
        let (absent, warnings): (Vec<_>, Vec<_>) = found.partition(|found| found.no_such_rule);
        if absent.is_empty() { Ok((ruleset, warnings)) } else { Err(absent) }
    }

    /// See [`RulesetManager::states_where`].
    fn states_where(
        &self,
        (from, max): (Cursor, usize),
        verbose: bool,
        wanted: impl Fn(&Listed, u32, &str) -> bool,
        now: Time,
    ) -> (Vec<StateLine>, Option<Cursor>) {
        let gate = &self.gate;
        let mut lines = Vec::new();
        for ((state, next), examined) in gate.states().dump(from, now).zip(1..) {
            if wanted(&state, gate.listed_rule(&state), gate.flow_name(state.name)) {
                lines.push(StateLine::new(state, gate, verbose));
            }
            if lines.len() >= max || examined == EXAMINED {
                return (lines, Some(next));
            }
        }
        (lines, None)
    }

    /// The policy for states of rules that a command deletes.
    fn policy(&self) -> StatePolicy {
        match self.gate.states().settings().dyn_keep_states {
            true => StatePolicy::Keep,
            false => StatePolicy::Delete,
        }
    }
}

impl RulesetManager {
    /// Creates the manager of `gate`, which was built from `ruleset`.
    pub fn new(gate: Gate, ruleset: Ruleset, default_allow: bool) -> Self {
        let rechecks = Rechecks::default();
        let book = Mutex::new(Book {
            gate,
            ruleset,
            default_allow,
            recheck: None,
            rechecks,
            unchecked: false,
            watching: None,
            missed: 0,
            running: RunningStats::default(),
            group_tables: BTreeSet::new(),
        });
        let listings = Listings::default();
        let topology = Topology::none();
        let (clock, version) = (Clock::default(), AtomicU64::new(0));
        Self { book, topology, clock, version, listings, offload: OnceLock::new() }
    }

    /// Sets how the packets of each port are forwarded, for [`explain`](Self::explain). Default: by their routes.
    #[must_use]
    pub fn with_topology(self, topology: Topology) -> Self {
        Self { topology, ..self }
    }

    /// From now on, what the kernel counts is part of the counters of rules and states. Called once.
    pub fn set_offload(&self, offload: Arc<Offload>) {
        let own = Arc::clone(&offload);
        self.book().gate.on_change(move |version| own.set_version(version));
        let _ = self.offload.set(offload);
    }

    /// The flows whose packets the kernel forwards.
    pub fn offload(&self) -> Option<&Arc<Offload>> {
        self.offload.get()
    }

    /// As [`book`](Self::book), with the counters that the kernel has at this moment.
    fn drained_book(&self) -> MutexGuard<'_, Book> {
        if let Some(offload) = self.offload() {
            offload.drain();
        }
        self.book()
    }

    /// Returns a number that increases with each change of rules or tables.
    pub fn version(&self) -> u64 {
        // Acquire: pairs with the release in `changed`. A thread that reads the new number also sees the change.
        self.version.load(Ordering::Acquire)
    }

    fn changed(&self) {
        // Release: see `version`.
        self.version.fetch_add(1, Ordering::Release);
    }

    /// Returns the clock that the engine sets.
    pub fn clock(&self) -> Clock {
        self.clock.clone()
    }

    fn book(&self) -> MutexGuard<'_, Book> {
        // The data is consistent after every step, so a poisoned lock can be used.
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Frees memory that no thread uses any more, removes expired states, and allocates memory that the threads will need. Call
    /// periodically; a call takes some milliseconds at most.
    pub fn tidy(&self) {
        let now = self.clock.now();
        self.listings.expire(Instant::now());
        self.book().gate.expire(now, SWEPT);
        for _ in 0..PREPARED {
            // Allocating pages may take milliseconds; release the lock in between for waiting queries.
            if !self.book().gate.prepare() {
                break;
            }
        }
    }

    /// Replaces the rules, and the routes and settings if given, in one step. With [`StatePolicy::Recheck`], the states must then be re-checked
    /// with [`RulesetManager::recheck_some`]. A re-check in progress covers all states again.
    pub fn replace(
        &self,
        mut ruleset: Ruleset,
        routes: Option<Routes>,
        default_allow: bool,
        policy: StatePolicy,
        settings: Option<Settings>,
    ) -> Diff {
        let now = self.clock.now();
        let mut book = self.book();
        book.keep_group_tables(&mut ruleset);
        book.ruleset = ruleset.clone();
        book.default_allow = default_allow;
        if let Some(settings) = settings {
            settings.give(&mut book.gate);
        }
        let policy = match policy {
            StatePolicy::Recheck => StatePolicy::RecheckLater,
            other => other,
        };
        let diff = book.gate.reload_with_routes(ruleset, routes, policy, now);
        match policy {
            StatePolicy::RecheckLater => book.begin_recheck(),
            StatePolicy::Drop => (book.recheck, book.unchecked) = (None, false),
            _ => {}
        }
        self.changed();
        diff
    }

    /// Runs rule file commands (`add`, `delete`, `table`, `set`, `zero`, `resetlog`, ...), one per line. Either all of them take effect, in one
    /// step, or none.
    ///
    /// # Errors
    /// All errors of the commands.
    pub fn command(&self, text: &str) -> Result<Done, Vec<Diagnostic>> {
        refuse_looks(text)?;
        let now = self.clock.now();
        let mut book = self.book();
        book.refuse_group_tables(text)?;
        if let Some(changed) = book.ruleset.change_entries("command", text) {
            let names = changed?;
            let Book { gate, ruleset, .. } = &mut *book;
            for (name, table) in ruleset.tables().filter(|(name, _)| names.iter().any(|other| other == name))
            {
                gate.with_table(name, |own| *own = table.clone());
            }
            self.changed();
            let diff = Diff { kept: ruleset.rules().len(), tables: names, ..Diff::default() };
            return Ok(Done { diff, warnings: Vec::new() });
        }
        let (ruleset, warnings) = book.read(text)?;
        let mut diff = Diff::default();
        if !ruleset.same_as(&book.ruleset) {
            book.ruleset = ruleset.clone();
            let policy = book.policy();
            diff = book.gate.reload(ruleset, policy, now);
            self.changed();
        }
        for line in text.lines() {
            reset_counters(line, &mut book.gate);
        }
        Ok(Done { diff, warnings })
    }

    /// Returns the changes that commands would make, without making them.
    ///
    /// # Errors
    /// As [`RulesetManager::command`].
    pub fn preview(&self, text: &str) -> Result<Done, Vec<Diagnostic>> {
        refuse_looks(text)?;
        let now = self.clock.now();
        let book = self.book();
        book.refuse_group_tables(text)?;
        let (ruleset, warnings) = book.read(text)?;
        Ok(Done { diff: book.gate.preview(&ruleset, book.policy(), now), warnings })
    }

    /// Returns the rules with their counters, the default rule last.
    pub fn rules(&self) -> Vec<report::Rule> {
        self.drained_book().gate.show().into_iter().map(report::Rule::from).collect()
    }

    /// Returns the version of the rules, and the rules as [`rules`](Self::rules), each with the time since 1970 of its last packet.
    pub fn rules_with_times(&self) -> (u64, Vec<(report::Rule, Option<Time>)>) {
        let (version, rules) = {
            let book = self.drained_book();
            // Under the lock: a change increments the version before the lock is released.
            (self.version(), book.gate.show())
        };
        let rules = rules
            .into_iter()
            .map(|rule| (rule.last.map(|last| self.clock.wall(last)), rule))
            .map(|(last, rule)| (rule.into(), last));
        (version, rules.collect())
    }

    /// Returns the configuration as a rule file that parses to the same configuration.
    pub fn to_text(&self) -> String {
        self.book().ruleset.to_text()
    }

    /// Returns up to `max` states starting at `from`, and the cursor to continue at (`None` at the end). No state is returned twice. A
    /// state that exists during the whole iteration is not missed.
    pub fn states(&self, from: Cursor, max: usize, verbose: bool) -> (Vec<StateLine>, Option<Cursor>) {
        self.states_where(from, max, verbose, |_, _, _| true)
    }

    /// Returns true if a listing of the states may continue at `at`: it is not beyond the end.
    pub fn has_position(&self, at: Cursor) -> bool {
        self.book().gate.states().has_position(at)
    }

    /// As [`states`](Self::states), only those that `wanted` accepts: the state, the number of its rule, and its flow name. A call
    /// examines a bounded number of states, so it may return fewer than `max` although more exist.
    pub fn states_where(
        &self,
        from: Cursor,
        max: usize,
        verbose: bool,
        wanted: impl Fn(&Listed, u32, &str) -> bool,
    ) -> (Vec<StateLine>, Option<Cursor>) {
        let now = self.clock.now();
        // Once for a listing in parts.
        let book = if from == Cursor::default() { self.drained_book() } else { self.book() };
        book.states_where((from, max), verbose, wanted, now)
    }

    /// Removes the states that `wanted` accepts, among a bounded number of states from `from` on. Returns the removed states, and
    /// the cursor to continue at.
    pub fn remove_states(
        &self,
        from: Cursor,
        wanted: impl Fn(&Listed, u32, &str) -> bool,
    ) -> (Vec<StateLine>, Option<Cursor>) {
        let now = self.clock.now();
        let mut book = self.book();
        // A parent counts states and ends with them.
        let wanted = |state: &Listed, rule, name: &str| {
            !matches!(state.kind, StateKind::Parent { .. }) && wanted(state, rule, name)
        };
        let (mut lines, next) = book.states_where((from, EXAMINED), false, wanted, now);
        lines.retain(|line| book.gate.remove_state(&line.parts.flow, line.parts.name, now));
        drop(book);
        if let Some(offload) = self.offload() {
            offload.end_states(lines.iter().map(|line| (line.parts.flow, line.parts.name)));
        }
        (lines, next)
    }

    /// Returns the states with the most traffic, at most `max` of them.
    pub fn top(&self, max: usize, by: Top) -> Vec<StateLine> {
        let now = self.clock.now();
        let book = self.drained_book();
        let line = |state| StateLine::new(state, &book.gate, false);
        book.gate.states().top(max, by, now).into_iter().map(line).collect()
    }

    /// Enables or disables the recording of state events.
    pub fn watch(&self, on: bool) {
        let mut book = self.book();
        book.watching = on.then(|| book.gate.states().journal());
    }

    /// Returns the events since the last call, at most `EVENTS`, and the total number of events that were missed.
    pub fn events(&self) -> (Vec<Event>, u64) {
        let mut book = self.book();
        let Book { gate, watching, missed, .. } = &mut *book;
        let mut events = Vec::new();
        while let Some(journal) = watching.as_mut().filter(|_| events.len() < EVENTS) {
            match journal.read() {
                JournalRead::Change(event) => events.push(Event {
                    at: event.at.as_nanos(),
                    what: event.kind.as_str(),
                    state: event.state().map(|state| StateLine::new(state.clone(), gate, false)),
                }),
                JournalRead::Gap(changes) => *missed += changes,
                JournalRead::End => break,
            }
        }
        (events, *missed)
    }

    /// Returns the keepalives that are due. Scans `least` states or the fraction `part` of all states, whichever is more.
    pub fn keepalives(&self, least: usize, part: f64) -> Vec<Keepalive> {
        let now = self.clock.now();
        let mut due = Vec::new();
        let gate = &mut self.book().gate;
        let budget = least.max((gate.states().slots() as f64 * part).ceil() as usize);
        gate.keepalives(now, budget, |keepalive| due.push(keepalive));
        due
    }

    /// Returns the pipes: number, rate in bits per second, burst in bytes.
    pub fn pipes(&self) -> Vec<(u32, u64, u64)> {
        let book = self.book();
        book.ruleset.pipes().map(|(number, pipe)| (number, pipe.rate, pipe.burst)).collect()
    }

    /// Passes a snapshot of the states to `piece`, in pieces. The snapshot records whether the states were re-checked.
    pub fn snapshot(&self, piece: impl FnMut(&[u8])) {
        let now = self.clock.now();
        let book = self.drained_book();
        book.gate.snapshot_of(now, book.unchecked || book.recheck.is_some(), piece);
    }

    /// A reader of the changes of states.
    pub fn journal(&self, changes: Changes) -> JournalReader {
        self.book().gate.states().journal_of(changes)
    }

    /// A state of the journal as listings have it.
    pub fn state_line(&self, state: Listed) -> StateLine {
        StateLine::new(state, &self.book().gate, false)
    }

    /// Updates `refs` to the current rules. Returns true if it changed.
    pub fn update_refs(&self, refs: &mut RuleRefs) -> bool {
        self.book().gate.update_refs(refs)
    }

    /// The rules as records name them, and the version of rules and tables.
    pub fn described_rules(&self) -> (Vec<NamedRule>, u64) {
        let book = self.book();
        // Under the lock: a change increments the version before the lock is released.
        (book.gate.described_rules(), self.version())
    }

    /// The rules for the base of a snapshot, and the version of rules and tables.
    pub fn snapshot_rules(&self, refs: &RuleRefs) -> (Vec<u8>, u64) {
        let book = self.book();
        let mut out = Vec::new();
        book.gate.snapshot_rules(refs, book.unchecked || book.recheck.is_some(), &mut out);
        // Under the lock: a change increments the version before the lock is released.
        (out, self.version())
    }

    /// The states in the next `slots` slots for the base of a snapshot, and where to continue.
    pub fn snapshot_part(
        &self,
        refs: &RuleRefs,
        from: Cursor,
        slots: u32,
        out: &mut Vec<u8>,
    ) -> Option<Cursor> {
        let now = self.clock.now();
        self.book().gate.snapshot_part(refs, from, slots, now, out)
    }

    /// Passes the states in the next `slots` slots to `each`, which must not use the rules: they are locked.
    pub fn scan_part(
        &self,
        refs: &RuleRefs,
        from: Cursor,
        slots: u32,
        each: impl FnMut(&Record<'_>),
    ) -> Option<Cursor> {
        let now = self.clock.now();
        self.book().gate.scan_part(refs, from, slots, now, each)
    }

    /// Changes of states for a snapshot.
    pub fn snapshot_changes(&self, refs: &RuleRefs, events: &[StateEvent], out: &mut Vec<u8>) {
        let book = self.book();
        events.iter().for_each(|event| book.gate.snapshot_change(refs, event, out));
    }

    /// Returns true if a re-check has not covered all states.
    pub fn is_unchecked(&self) -> bool {
        let book = self.book();
        book.unchecked || book.recheck.is_some()
    }

    /// Sets the counters of the running snapshot.
    pub fn set_snapshot_stats(&self, stats: RunningStats) {
        self.book().running = stats;
    }

    /// The counters of the running snapshot.
    pub fn snapshot_stats(&self) -> RunningStats {
        self.book().running
    }

    /// Restores the states of a snapshot; their lifetimes continue at `now`.
    ///
    /// # Errors
    /// The snapshot is truncated or damaged.
    pub fn restore(&self, snapshot: &[u8], now: Time) -> Result<Restored, SnapshotError> {
        let mut book = self.book();
        let restored = book.gate.restore(snapshot, now)?;
        book.unchecked |= restored.unchecked;
        Ok(restored)
    }

    /// The rules by content, and the version of rules and tables.
    pub fn rules_by_content(&self) -> (RulesByContent, u64) {
        let book = self.book();
        // Under the lock: a change increments the version before the lock is released.
        (book.gate.rules_by_content(), self.version())
    }

    /// Merges a record of another gate.
    ///
    /// # Errors
    /// The reason why the state does not exist here.
    pub fn merge(
        &self,
        rules: &RulesByContent,
        record: &Record<'_>,
        trusted: bool,
    ) -> Result<Merged, NotMerged> {
        let now = self.clock.now();
        self.book().gate.merge(rules, record, trusted, now)
    }

    /// Removes a state because another gate has removed it ([`Gate::remove_merged`](towpath_gate::Gate::remove_merged)).
    pub fn remove_merged(&self, record: &Record<'_>, within: Option<Duration>) -> Option<u32> {
        let now = self.clock.now();
        self.book().gate.remove_merged(record, within, now)
    }

    /// The counters of the dynamic states.
    pub fn state_counters(&self) -> Counters {
        self.book().gate.states().counters()
    }

    /// The counters of the rules' evaluation.
    pub fn gate_counters(&self) -> towpath_gate::GateCounters {
        self.book().gate.counters()
    }

    /// Returns true if the number of states reached 9/10 of `dyn_max`, and has not fallen below 8/10 since.
    pub fn is_nearly_full(&self) -> bool {
        self.book().gate.states().is_nearly_full()
    }

    /// Returns every setting and the read-only values.
    pub fn settings(&self) -> Vec<(&'static str, u64)> {
        let book = self.book();
        let mut rows = Settings::of(&book.gate).rows();
        let states = book.gate.states();
        rows.push(("dyn_count", states.len() as u64));
        rows.push(("dyn_parent_count", states.parents() as u64));
        rows.push(("curr_max_length", states.curr_max_length() as u64));
        rows.push(("static_count", book.ruleset.rules().len() as u64));
        rows.push(("tables_count", book.ruleset.tables().count() as u64));
        rows.push(("default_to_accept", book.default_allow.into()));
        rows
    }

    /// Changes a setting. Returns its name, its old value and its new value. The new value may be lower than `value`, because the lifetimes
    /// of closing connections are capped.
    ///
    /// # Errors
    /// The setting does not exist or is read-only, or `value` is out of range.
    pub fn set(&self, name: &str, value: u64) -> Result<(String, u64, u64), SettingError> {
        let mut book = self.book();
        let mut settings = Settings::of(&book.gate);
        let short = short(name);
        let value_in = |settings: &Settings| {
            settings.rows().into_iter().find(|(row, _)| *row == short).map_or(0, |(_, value)| value)
        };
        let before = value_in(&settings);
        settings.set(name, value)?;
        settings.give(&mut book.gate);
        Ok((short.to_owned(), before, value_in(&Settings::of(&book.gate))))
    }
}

/// The words of a command, without a leading `ipfw` and options.
fn words(line: &str) -> impl Iterator<Item = &str> {
    let is_ipfw = |word: &str| word == "ipfw" || word.starts_with('/') && word.ends_with("/ipfw");
    line.split_whitespace().skip_while(move |word| is_ipfw(word) || word.starts_with('-'))
}

/// Rejects commands that only show data: a rule file ignores them, and a client of the control socket would expect output.
fn refuse_looks(text: &str) -> Result<(), Vec<Diagnostic>> {
    let mut found = Vec::new();
    for (line, number) in text.lines().zip(1..) {
        let mut words = words(line);
        let shows = match (words.next(), words.next(), words.next()) {
            (Some("table"), Some(_), Some(word @ ("list" | "info" | "detail" | "lookup"))) => word,
            (Some("set" | "pipe"), Some(word @ ("show" | "list")), _) => word,
            (Some("set" | "pipe"), Some(_), Some(word @ ("show" | "list"))) => word,
            _ => continue,
        };
        let column = line.find(shows).map_or(1, |at| line[..at].chars().count() as u32 + 1);
        found.push(Diagnostic {
            file: "command".into(),
            line: number,
            column,
            end: column + shows.len() as u32,
            message: format!("\"{shows}\" only shows data, and this request changes the rules"),
            hint: Some(
                "use the request show-tables, show-table, lookup, show-pipes or show-rules".to_owned(),
            ),
            no_such_rule: false,
        });
    }
    if found.is_empty() { Ok(()) } else { Err(found) }
}

/// Runs `zero` and `resetlog`, with or without rule numbers, which reset counters. The rule parser accepts them without an effect.
fn reset_counters(line: &str, gate: &mut Gate) {
    let mut words = words(line);
    let reset = match words.next() {
        Some("zero") => Gate::zero,
        Some("resetlog") => Gate::reset_log,
        _ => return,
    };
    let numbers: Vec<u32> = words.map_while(|word| word.parse().ok()).collect();
    if numbers.is_empty() {
        reset(gate, None);
    }
    numbers.into_iter().for_each(|number| reset(gate, Some(number)));
}

mod explain;
#[cfg(test)]
mod tests;
