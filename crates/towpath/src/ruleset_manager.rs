//! The rules of a running engine, for those who look at them and change them.
//!
//! Packets go by [`Walker`](towpath_gate::Walker)s and never wait for what is done here. The gate itself is behind a
//! lock, which its administrator and the control socket's thread take in turn.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use towpath_gate::rules::table::{Key, Kind, Table, Value};
use towpath_gate::rules::{Diagnostic, Ruleset};
use towpath_gate::state::{Counters, Cursor, Keepalive, Listed, SettingError, StateEvent, Top};
use towpath_gate::{Diff, Gate, Restored, Routes, SnapshotError, StatePolicy};
use towpath_wire::Time;

use serde::{Deserialize, Serialize};

use crate::report;
use crate::settings::{Settings, short};

/// See the module's text.
pub struct RulesetManager {
    book: Mutex<Book>,
    clock: Clock,
    /// How often rules or tables were changed.
    version: AtomicU64,
}

struct Book {
    gate: Gate,
    /// What the gate was given last.
    ruleset: Ruleset,
    default_allow: bool,
    recheck: Option<Recheck>,
    /// What it came to so far; whether it goes on is said by `recheck` alone.
    rechecks: Rechecks,
    /// There are states of a snapshot that nobody has re-checked yet.
    unchecked: bool,
}

/// A re-check that goes on.
#[derive(Clone, Copy, Debug, Default)]
struct Recheck {
    /// Where its next step begins.
    at: Cursor,
    /// It began anew here: the states before are looked at once more when those behind it were.
    again: Option<Cursor>,
    /// In that second round: where it is over.
    until: Option<Cursor>,
}

impl Recheck {
    /// By other rules from where it is, in a circle: one that began at the first state whenever rules change would never come to the last.
    fn anew(self) -> Self {
        Self { at: self.at, again: (self.at != Cursor::default()).then_some(self.at), until: None }
    }

    /// It has come to `next`, or to the end of the states. None when it is over.
    fn go_on(self, next: Option<Cursor>) -> Option<Self> {
        match next {
            Some(at) if self.until.is_none_or(|until| at.to_bits() < until.to_bits()) => {
                Some(Self { at, ..self })
            }
            Some(_) => None,
            None => self.again.map(|until| Self { until: Some(until), ..Self::default() }),
        }
    }
}

/// What re-checks of states came to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rechecks {
    /// Whether one goes on.
    pub running: bool,
    /// States that the last one has looked at, twice at some if rules changed meanwhile.
    pub looked: u64,
    /// Those of them that went, as the rules would not make them now.
    pub dropped: u64,
}

/// The time that an engine's states live by, as the engine last said it.
#[derive(Clone, Debug, Default)]
pub struct Clock(Arc<AtomicU64>);

impl Clock {
    /// What time it is. Several threads may say so: it never goes back.
    pub fn set(&self, now: Time) {
        // Relaxed, both: a moment that is a little old is as good, and guards nothing.
        if self.0.load(Ordering::Relaxed) < now.as_nanos() {
            self.0.fetch_max(now.as_nanos(), Ordering::Relaxed);
        }
    }

    /// What time it was when the engine last said so.
    pub fn now(&self) -> Time {
        // Relaxed: see `set`.
        Time::from_nanos(self.0.load(Ordering::Relaxed))
    }
}

/// What a command did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Done {
    /// What it changed.
    pub diff: Diff,
    /// What is allowed but was probably not meant.
    pub warnings: Vec<Diagnostic>,
}

/// One state of [`RulesetManager::states`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateLine {
    /// Number of its rule.
    pub rule: u32,
    /// As ipfw prints it.
    pub text: String,
    /// The same in parts.
    pub parts: Box<towpath_gate::state::Listed>,
    /// Name of its flow name.
    pub name: String,
}

/// Something that happened to a state, or to all of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// Nanoseconds of the engine's clock.
    pub at: u64,
    /// What happened, in a word or two.
    pub what: &'static str,
    /// The state as it was then; none for what happens to all.
    pub state: Option<StateLine>,
}

/// States that are looked at when there is time, and pieces of memory that are made.
const SWEPT: usize = 1 << 16;
const PREPARED: usize = 16;

/// Events that may wait at each thread until they are taken.
pub(crate) const EVENTS: usize = 65_536;

impl StateLine {
    fn new(state: Listed, gate: &Gate, verbose: bool) -> Self {
        let rule = gate.rule_number(state.rule);
        let text = state.line(rule, |name| gate.flow_name(name)).verbose(verbose).to_string();
        let name = gate.flow_name(state.name).to_owned();
        Self { rule, text, name, parts: Box::new(state) }
    }
}

impl Book {
    /// The rules behind which commands are read, with what these change; and their warnings.
    fn read(&self, text: &str) -> Result<(Ruleset, Vec<Diagnostic>), Vec<Diagnostic>> {
        let before = self.ruleset.to_text();
        let lines = before.lines().count() as u32;
        let own = |mut found: Diagnostic| {
            found.line = found.line.saturating_sub(lines);
            found.file = "command".into();
            found
        };
        let parsed = Ruleset::parse("command", &(before + text));
        let ruleset = match parsed.ruleset {
            Ok(ruleset) => ruleset.with_default_allow(self.default_allow),
            Err(errors) => return Err(errors.into_iter().map(own).collect()),
        };
        let warnings = parsed.warnings.into_iter().filter(|found| found.line > lines).map(own).collect();
        Ok((ruleset, warnings))
    }

    /// What becomes of the states of rules that a command deletes.
    fn policy(&self) -> StatePolicy {
        match self.gate.states().settings().dyn_keep_states {
            true => StatePolicy::Keep,
            false => StatePolicy::Delete,
        }
    }

    fn begin_recheck(&mut self) {
        if self.recheck.is_none() {
            self.rechecks = Rechecks::default();
        }
        self.recheck = Some(self.recheck.map_or_else(Recheck::default, Recheck::anew));
    }
}

impl RulesetManager {
    /// The rules of `gate`, which was made of `ruleset`.
    pub fn new(gate: Gate, ruleset: Ruleset, default_allow: bool) -> Self {
        let rechecks = Rechecks::default();
        let book =
            Mutex::new(Book { gate, ruleset, default_allow, recheck: None, rechecks, unchecked: false });
        Self { book, clock: Clock::default(), version: AtomicU64::new(0) }
    }

    /// Another number whenever rules or tables have changed.
    pub fn version(&self) -> u64 {
        // Acquire: pairs with the release in `changed`; who sees the number finds what was changed.
        self.version.load(Ordering::Acquire)
    }

    fn changed(&self) {
        // Release: see `version`.
        self.version.fetch_add(1, Ordering::Release);
    }

    /// Where the engine says what time it is.
    pub fn clock(&self) -> Clock {
        self.clock.clone()
    }

    fn book(&self) -> MutexGuard<'_, Book> {
        // What is in there is whole after every step: a panic elsewhere does not spoil it.
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets go of what no thread goes by any more, collects states that are over, and makes memory that the threads are going
    /// to need. To be called from time to time: it takes some milliseconds at most.
    pub fn tidy(&self) {
        let now = self.clock.now();
        self.book().gate.expire(now, SWEPT);
        for _ in 0..PREPARED {
            // Pages of a machine that is short of them take milliseconds: whoever asks something meanwhile has its turn in between.
            if !self.book().gate.prepare() {
                break;
            }
        }
    }

    /// Takes other rules and routes, if any, and settings, in one step. With [`StatePolicy::Recheck`] the states of rules that stay
    /// are then to be looked at ([`RulesetManager::recheck_some`]), all of them again where that goes on already.
    pub fn replace(
        &self,
        ruleset: Ruleset,
        routes: Option<Routes>,
        default_allow: bool,
        policy: StatePolicy,
        settings: Option<Settings>,
    ) -> Diff {
        let now = self.clock.now();
        let mut book = self.book();
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

    /// Carries out commands of a rule file (`add`, `delete`, `table`, `set`, `zero`, ...), one a line: all of them in one
    /// step, or none.
    ///
    /// # Errors
    /// Everything that is wrong with them.
    pub fn command(&self, text: &str) -> Result<Done, Vec<Diagnostic>> {
        refuse_looks(text)?;
        let now = self.clock.now();
        let mut book = self.book();
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
            zero(line, &mut book.gate);
        }
        Ok(Done { diff, warnings })
    }

    /// What commands would change, which they do not.
    ///
    /// # Errors
    /// As [`RulesetManager::command`].
    pub fn preview(&self, text: &str) -> Result<Done, Vec<Diagnostic>> {
        refuse_looks(text)?;
        let now = self.clock.now();
        let book = self.book();
        let (ruleset, warnings) = book.read(text)?;
        Ok(Done { diff: book.gate.preview(&ruleset, book.policy(), now), warnings })
    }

    /// Every rule with its counters, the default rule last.
    pub fn rules(&self) -> Vec<report::Rule> {
        self.book().gate.show().into_iter().map(report::Rule::from).collect()
    }

    /// The whole configuration as a rule file that reads back as the same.
    pub fn to_text(&self) -> String {
        self.book().ruleset.to_text()
    }

    /// Up to `max` states from `from` on, and where to go on; none at the end. No state comes twice, and none that lives
    /// throughout is missed.
    pub fn states(&self, from: Cursor, max: usize, verbose: bool) -> (Vec<StateLine>, Option<Cursor>) {
        let now = self.clock.now();
        let book = self.book();
        let gate = &book.gate;
        let mut lines = Vec::new();
        let mut next = None;
        for (state, cursor) in gate.states().dump(from, now).take(max) {
            lines.push(StateLine::new(state, gate, verbose));
            next = Some(cursor);
        }
        let next = next.filter(|_| lines.len() == max);
        (lines, next)
    }

    /// The states that most goes through, at most `max` of them.
    pub fn top(&self, max: usize, by: Top) -> Vec<StateLine> {
        let now = self.clock.now();
        let book = self.book();
        let line = |state| StateLine::new(state, &book.gate, false);
        book.gate.states().top(max, by, now).into_iter().map(line).collect()
    }

    /// Whether what happens to states is to be told from now on.
    pub fn watch(&self, on: bool) {
        self.book().gate.states_mut().set_event_queue(if on { EVENTS } else { 0 });
    }

    /// What happened to states since this was asked last, and how many events found no room since the beginning.
    pub fn events(&self) -> (Vec<Event>, u64) {
        let mut book = self.book();
        let told = book.gate.states_mut().take_events();
        let event = |event: StateEvent| Event {
            at: event.at.as_nanos(),
            what: event.kind.as_str(),
            state: event.state.map(|state| StateLine::new(state, &book.gate, false)),
        };
        let events = told.into_iter().map(event).collect();
        (events, book.gate.states().events_lost())
    }

    /// The keepalives that are due; looks at `least` states, or at this `part` of all, whatever is more.
    pub fn keepalives(&self, least: usize, part: f64) -> Vec<Keepalive> {
        let now = self.clock.now();
        let mut due = Vec::new();
        let gate = &mut self.book().gate;
        let budget = least.max((gate.states().slots() as f64 * part).ceil() as usize);
        gate.keepalives(now, budget, |keepalive| due.push(keepalive));
        due
    }

    /// The tables: name, type, entries.
    pub fn tables(&self) -> Vec<(String, String, usize)> {
        let book = self.book();
        let row = |(name, table): (&str, &towpath_gate::rules::table::Table)| {
            (name.to_owned(), table.kind().to_string(), table.len())
        };
        book.ruleset.tables().map(row).collect()
    }

    /// The entries of a table, as ipfw prints them; `None` when there is no such table.
    pub fn table(&self, name: &str) -> Option<Vec<(String, String)>> {
        let book = self.book();
        let (_, table) = book.ruleset.tables().find(|(other, _)| *other == name)?;
        let row = |(key, value)| (table.show_key(&key), table.show_value(&value));
        Some(table.list().into_iter().map(row).collect())
    }

    /// The entry that a table has for a key, as ipfw prints it: of addresses that with the longest prefix. `None` when there is no such
    /// table.
    ///
    /// # Errors
    /// It is no key of that table.
    pub fn lookup(&self, name: &str, key: &str) -> Option<Result<Option<(String, String)>, String>> {
        let book = self.book();
        let (_, table) = book.ruleset.tables().find(|(other, _)| *other == name)?;
        let row = |(key, value): (Key, Value)| (table.show_key(&key), table.show_value(&value));
        Some(read_key(table.kind(), key).map(|key| entry(table, key).map(row)))
    }

    /// The pipes: number, bits a second, bytes at once.
    pub fn pipes(&self) -> Vec<(u32, u64, u64)> {
        let book = self.book();
        book.ruleset.pipes().map(|(number, pipe)| (number, pipe.rate, pipe.burst)).collect()
    }

    /// Gives the states that there are, in pieces, for a file, which also says whether they were re-checked.
    pub fn snapshot(&self, piece: impl FnMut(&[u8])) {
        let now = self.clock.now();
        let book = self.book();
        book.gate.snapshot_of(now, book.unchecked || book.recheck.is_some(), piece);
    }

    /// Takes the states of a snapshot, whose time goes on at `now`.
    ///
    /// # Errors
    /// The snapshot is not whole and right.
    pub fn restore(&self, snapshot: &[u8], now: Time) -> Result<Restored, SnapshotError> {
        let mut book = self.book();
        let restored = book.gate.restore(snapshot, now)?;
        book.unchecked |= restored.unchecked;
        Ok(restored)
    }

    /// Has all states looked at, as after a reload ([`RulesetManager::recheck_some`]).
    pub fn recheck(&self) {
        self.book().begin_recheck();
    }

    /// Goes on with a re-check, if there is one: looks at some states, and drops those that the rules would not make now. It takes
    /// some milliseconds. Whether there is more to do.
    pub fn recheck_some(&self) -> bool {
        let now = self.clock.now();
        let mut book = self.book();
        let Some(recheck) = book.recheck else { return false };
        let step = book.gate.recheck_step(recheck.at, now);
        book.recheck = recheck.go_on(step.next);
        book.rechecks.looked += step.checked as u64;
        book.rechecks.dropped += step.dropped as u64;
        book.unchecked &= book.recheck.is_some();
        book.recheck.is_some()
    }

    /// Goes on with a re-check, if there is one, until it is over or there was `enough` of it; at least one step.
    pub fn recheck_until(&self, mut enough: impl FnMut() -> bool) {
        while self.recheck_some() && !enough() {}
    }

    /// How far re-checks are.
    pub fn rechecks(&self) -> Rechecks {
        let book = self.book();
        Rechecks { running: book.recheck.is_some(), ..book.rechecks }
    }

    /// The counters of the dynamic states.
    pub fn state_counters(&self) -> Counters {
        self.book().gate.states().counters()
    }

    /// Returns true if the number of states reached 9/10 of `dyn_max`, and has not fallen below 8/10 since.
    pub fn is_nearly_full(&self) -> bool {
        self.book().gate.states().is_nearly_full()
    }

    /// Every setting, and what can only be read.
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

    /// Changes a setting. Returns its name, its value before, and the one that it has now: lifetimes of what was closed are cut short.
    ///
    /// # Errors
    /// There is no such setting, it is read-only, or `value` is out of its range.
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

/// The words of a command.
fn words(line: &str) -> impl Iterator<Item = &str> {
    let is_ipfw = |word: &str| word == "ipfw" || word.starts_with('/') && word.ends_with("/ipfw");
    line.split_whitespace().skip_while(move |word| is_ipfw(word) || word.starts_with('-'))
}

/// Refuses commands that only show something: a rule file may have them, where they mean nothing, but who asks here wants an answer.
fn refuse_looks(text: &str) -> Result<(), Vec<Diagnostic>> {
    let mut found = Vec::new();
    for (line, number) in text.lines().zip(1..) {
        let mut words = words(line);
        let shows = match (words.next(), words.next(), words.next()) {
            (Some("table"), Some(_), Some(word @ ("list" | "info" | "detail" | "lookup"))) => word,
            (Some("set" | "pipe"), Some(word @ ("show" | "list")), _) => word,
            (Some("pipe"), Some(_), Some(word @ ("show" | "list"))) => word,
            _ => continue,
        };
        let column = line.find(shows).map_or(1, |at| line[..at].chars().count() as u32 + 1);
        found.push(Diagnostic {
            file: "command".into(),
            line: number,
            column,
            end: column + shows.len() as u32,
            message: format!("\"{shows}\" shows something, and a command changes something"),
            hint: Some("ask with show-tables, show-table, lookup, show-pipes or show-rules".to_owned()),
        });
    }
    if found.is_empty() { Ok(()) } else { Err(found) }
}

/// The key that `text` is in a table of this kind: what `add` would read.
fn read_key(kind: Kind, text: &str) -> Result<Key, String> {
    let mut words = text.split_whitespace();
    let (Some(word), None) = (words.next(), words.next()) else {
        return Err(format!("`{text}` is no key: a key is one word"));
    };
    let parsed = Ruleset::parse("key", &format!("table t create type {kind}\ntable t add {word}"));
    let ruleset = parsed.ruleset.map_err(|errors| errors[0].message.clone())?;
    let mut keys = ruleset.tables().flat_map(|(_, table)| table.list());
    keys.next().map(|(key, _)| key).ok_or_else(|| format!("`{word}` is no key"))
}

/// What a table has for a key.
fn entry(table: &Table, key: Key) -> Option<(Key, Value)> {
    let get = |key: Key| table.get(&key).ok().flatten().map(|value| (key.clone(), *value));
    match key {
        Key::Net4(addr, len) => (0..=len).rev().find_map(|len| {
            let mask = u32::MAX.checked_shl(32 - u32::from(len)).unwrap_or(0);
            get(Key::Net4(addr & mask, len))
        }),
        Key::Net6(addr, len) => (0..=len).rev().find_map(|len| {
            let mask = u128::MAX.checked_shl(128 - u32::from(len)).unwrap_or(0);
            get(Key::Net6(addr & mask, len))
        }),
        Key::Mac(bits, len) => (0..=len).rev().find_map(|len| {
            let mask = u64::MAX.checked_shl(64 - u32::from(len)).unwrap_or(0);
            get(Key::Mac(bits & mask, len))
        }),
        key => get(key),
    }
}

/// `zero` and `zero N...` count anew; in a rule file they mean nothing yet.
fn zero(line: &str, gate: &mut Gate) {
    let mut words = words(line);
    if words.next() != Some("zero") {
        return;
    }
    let mut any = false;
    for number in words.map_while(|word| word.parse().ok()) {
        any = true;
        gate.zero(Some(number));
    }
    if !any {
        gate.zero(None);
    }
}

#[cfg(test)]
mod tests;
