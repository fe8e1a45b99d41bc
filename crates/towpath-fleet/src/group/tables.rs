//! Table entries of a group: a stream that every gate applies in the same order.
//!
//! A message is a change of some entries, or a part of all entries of a table. Parts replace the table when the last one has come. They
//! are a *load*, which replaces everything before it, or a *snapshot*: the table after the message `upto`, with which a gate that joins need not
//! read the messages before it. The bus removes these.
//!
//! ```text
//! "TWGT" version:u8 oldest:u8 kind:u8 zero:u8
//!   1 change: lines (`add KEY`, `add KEY VALUE` or `delete KEY`)
//!   2 part:   load:u64 upto:u64 (all ones: a load) index:u32 count:u32 lines (`KEY` or `KEY VALUE`)
//! ```
//!
//! Invariant: the entries of a table are a function of the messages of its subject alone. A gate that catches up keeps the changes that it
//! has seen since it began, because a snapshot that follows them may be older than they are.

use std::collections::{BTreeMap, VecDeque};

use super::stats::TableStats;
use crate::workers::is_name;

const MAGIC: &[u8; 4] = b"TWGT";

/// The version that is written, and the oldest one whose readers can read it.
const VERSION: u8 = 1;
const OLDEST: u8 = 1;

/// Bytes of the lines of one message, of one load, and of changes that a gate keeps while it catches up.
const LINES_MAX: usize = 512 << 10;
const LOAD_MAX: usize = 64 << 20;
const LOG_MAX: usize = 64 << 20;

/// Tables, loads that are incomplete, and the bytes of the latter.
const TABLES: usize = 256;
const LOADS: usize = 8;
const LOADS_MAX: usize = 2 * LOAD_MAX;

/// Bytes of changes after which a snapshot is worth it.
const COMPACT: usize = 4 << 20;

/// Bytes of changes after which a snapshot does not wait for a load.
const LONGEST_WAIT: usize = 4 * COMPACT;

/// Instead of a sequence number: the parts are a load.
const ALL: u64 = u64::MAX;

/// The tables of this gate.
pub trait Entries {
    /// Replaces all entries of a table by lines `KEY` or `KEY VALUE`.
    ///
    /// # Errors
    /// The table does not exist, or the lines are wrong: nothing is changed.
    fn load(&mut self, table: &str, lines: &str) -> Result<(), String>;

    /// Adds and deletes entries: lines `add KEY`, `add KEY VALUE` or `delete KEY`. Returns the number of lines that were refused.
    fn change(&mut self, table: &str, lines: &str) -> u64;
}

/// What the bus publishes for a table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Publication {
    /// The table.
    pub table: String,
    /// Messages, in order.
    pub messages: Vec<Vec<u8>>,
    /// Messages that the stream may forget afterwards.
    pub forget: Forget,
}

/// Messages of a table that the stream may forget.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Forget {
    /// None.
    Nothing,
    /// Those before the ones that are published.
    Before,
    /// Those up to this one.
    UpTo(u64),
}

impl Publication {
    /// The first message that the stream must keep, if the first one of these has the number `first`.
    pub fn keep_from(&self, first: u64) -> u64 {
        match self.forget {
            Forget::Nothing => 0,
            Forget::Before => first,
            Forget::UpTo(seq) => seq + 1,
        }
    }
}

/// The entries `lines` as a load.
pub fn load(table: &str, number: u64, lines: &str) -> Publication {
    Publication { table: table.to_owned(), messages: parts(number, ALL, lines), forget: Forget::Before }
}

/// Changes of entries, in as few messages as possible.
pub fn change(table: &str, lines: &str) -> Publication {
    let messages = chunks(lines).map(|lines| encode(1, &[], lines)).collect();
    Publication { table: table.to_owned(), messages, forget: Forget::Nothing }
}

fn parts(number: u64, upto: u64, lines: &str) -> Vec<Vec<u8>> {
    let chunks: Vec<&str> = chunks(lines).collect();
    let count = chunks.len().max(1) as u64;
    let part = |(at, lines): (usize, &str)| encode(2, &[number, upto, at as u64 | count << 32], lines);
    match chunks.is_empty() {
        true => vec![part((0, ""))],
        false => chunks.into_iter().enumerate().map(part).collect(),
    }
}

/// Whole lines of at most [`LINES_MAX`] bytes together.
fn chunks(mut lines: &str) -> impl Iterator<Item = &str> {
    std::iter::from_fn(move || {
        let end = match lines.len() {
            0 => return None,
            all if all <= LINES_MAX => all,
            _ => {
                let bytes = &lines.as_bytes()[..LINES_MAX];
                // A longer line is cut: it is refused by every gate.
                let end = bytes.iter().rposition(|byte| *byte == b'\n').map_or(LINES_MAX, |at| at + 1);
                (0..=end).rev().find(|end| lines.is_char_boundary(*end)).unwrap_or(lines.len())
            }
        };
        let (chunk, rest) = lines.split_at(end);
        lines = rest;
        Some(chunk)
    })
}

fn encode(kind: u8, words: &[u64], lines: &str) -> Vec<u8> {
    let mut out = Vec::with_capacity(32 + lines.len());
    out.extend(MAGIC);
    out.extend([VERSION, OLDEST, kind, 0]);
    words.iter().for_each(|word| out.extend(word.to_le_bytes()));
    out.extend(lines.as_bytes());
    out
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Message<'a> {
    Change(&'a str),
    Part { load: u64, upto: u64, index: u32, count: u32, lines: &'a str },
}

fn decode(bytes: &[u8]) -> Option<Message<'_>> {
    let &[_, oldest, kind, _, ref rest @ ..] = bytes.strip_prefix(MAGIC)? else { return None };
    if oldest > VERSION {
        return None;
    }
    let lines = |rest| std::str::from_utf8(rest).ok().filter(|lines| lines.len() <= LINES_MAX);
    match kind {
        1 => lines(rest).map(Message::Change),
        2 => {
            let (words, rest) = rest.split_first_chunk::<24>()?;
            let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|byte| words[8 * at + byte]));
            let (index, count) = (word(2) as u32, (word(2) >> 32) as u32);
            let bounded = index < count && count as usize <= LOAD_MAX / 1024;
            let lines = lines(rest).filter(|_| bounded)?;
            Some(Message::Part { load: word(0), upto: word(1), index, count, lines })
        }
        _ => None,
    }
}

#[derive(Debug, Default)]
struct Held {
    /// Changes since this gate began to catch up, with their numbers.
    log: Vec<(u64, String)>,
    log_bytes: usize,
    /// Bytes of changes since the last load or snapshot in the stream.
    changed: usize,
    /// The entries contain all messages up to this one.
    base: u64,
    /// A load that began before this message is dropped: the stream may have forgotten its first parts.
    loads_from: u64,
    /// The gate that published the last change.
    from: String,
    /// The rules of this gate have no such table, or one of another type.
    missing: bool,
}

/// A load whose last part has not come.
#[derive(Debug)]
struct Load {
    table: String,
    from: String,
    number: u64,
    /// The number of the message with its first part.
    first: u64,
    parts: u32,
    lines: String,
}

/// How far a gate has read the stream. A later process that has the entries of this moment continues with the next message.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Position {
    /// When the stream was made.
    pub made: u64,
    /// The last message that was applied.
    pub seq: u64,
    /// A load has begun and is not complete.
    pub loading: bool,
    /// The tables whose entries come from the group.
    pub tables: Vec<TablePosition>,
}

/// What a gate knows of a table beside its entries.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TablePosition {
    /// The name.
    pub name: String,
    /// The rules have no such table, or one of another type.
    pub missing: bool,
    /// Bytes of changes since the last load or snapshot.
    pub changed: u64,
    /// A load that began before this message is dropped.
    pub loads_from: u64,
    /// The gate that published the last change.
    pub from: String,
}

/// The tables of a group.
#[derive(Debug, Default)]
pub struct Tables {
    tables: BTreeMap<String, Held>,
    loads: VecDeque<Load>,
    /// When the stream was made; 0: none was read.
    made: u64,
    /// The last message.
    seq: u64,
    /// The last message before this gate began to catch up: it has seen all messages up to it, and none is missing since.
    begun: u64,
    caught_up: bool,
    /// The process before had a part of a load, which this one has not.
    unsure: bool,
    /// The rest of that load has come.
    again: bool,
    problem: Option<String>,
    stats: TableStats,
}

impl Tables {
    /// Continues where a process before was.
    pub fn restore(&mut self, position: &Position) {
        let Position { made, seq, loading, ref tables } = *position;
        (self.made, self.seq, self.begun, self.unsure) = (made, seq, seq, loading);
        for table in tables.iter().filter(|table| is_name(&table.name)).take(TABLES) {
            let TablePosition { ref name, missing, changed, loads_from, ref from } = *table;
            let changed = usize::try_from(changed).unwrap_or(usize::MAX);
            let held = Held { missing, changed, loads_from, from: from.clone(), ..Held::default() };
            self.tables.insert(name.clone(), held);
        }
    }

    /// Where this gate is; `None` while it catches up.
    pub fn position(&self) -> Option<Position> {
        let table = |(name, held): (&String, &Held)| TablePosition {
            name: name.clone(),
            missing: held.missing,
            changed: held.changed as u64,
            loads_from: held.loads_from,
            from: held.from.clone(),
        };
        let tables = || self.tables.iter().map(table).collect();
        let Self { made, seq, unsure, .. } = *self;
        let loading = unsure || !self.loads.is_empty();
        self.caught_up.then(|| Position { made, seq, loading, tables: tables() })
    }

    /// A session has begun: the bus sends the messages after the one that this returns. `made`: when the stream was made, `last`: the last
    /// message that it has.
    pub fn connect(&mut self, made: u64, last: u64) -> u64 {
        if std::mem::replace(&mut self.made, made) != made || last < self.seq {
            // Another stream, with other numbers: its messages are applied to the tables as they are.
            self.seq = 0;
            self.loads.clear();
            self.tables
                .values_mut()
                .for_each(|held| *held = Held { missing: held.missing, ..Held::default() });
        }
        self.begun = self.seq;
        self.caught_up = false;
        if last <= self.seq {
            self.catch_up();
        }
        self.seq
    }

    /// The stream has no further message now.
    pub fn catch_up(&mut self) {
        self.caught_up = true;
        self.tables.values_mut().for_each(|held| (held.log, held.log_bytes) = (Vec::new(), 0));
    }

    /// The rules have changed. Returns true if the stream must be read again from its beginning, because they lacked a table before.
    pub fn rules_changed(&mut self) -> bool {
        let again = self.tables.values().any(|held| held.missing);
        if again {
            self.begin_again();
        }
        again
    }

    /// Returns true, once, if the stream must be read again from its beginning, because this process lacks a part of a load.
    pub fn take_again(&mut self) -> bool {
        let again = std::mem::take(&mut self.again);
        if again {
            self.begin_again();
        }
        again
    }

    fn begin_again(&mut self) {
        self.tables.clear();
        self.loads.clear();
        (self.seq, self.begun, self.caught_up) = (0, 0, false);
    }

    /// Why a load was refused, once.
    pub fn take_problem(&mut self) -> Option<String> {
        self.problem.take()
    }

    /// Number of the last message that was applied.
    pub fn seq(&self) -> u64 {
        self.seq
    }

    /// When the stream was made, and the number of its last message that was applied.
    pub fn reached(&self) -> (u64, u64) {
        (self.made, self.seq)
    }

    /// All messages of the stream have been applied.
    pub fn is_caught_up(&self) -> bool {
        self.caught_up
    }

    /// The names of the tables whose entries come from the group.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tables.keys().map(|name| &**name)
    }

    /// The counters.
    pub fn stats(&self) -> TableStats {
        TableStats {
            seq: self.seq,
            caught_up: self.caught_up.into(),
            tables: self.tables.len() as u64,
            ..self.stats
        }
    }

    /// A message of the stream: its number, its table, its sender, and the number of messages that follow it now.
    pub fn message(
        &mut self,
        seq: u64,
        (table, from): (&str, &str),
        bytes: &[u8],
        pending: u64,
        entries: &mut dyn Entries,
    ) {
        if self.advance(seq) {
            self.take(seq, table, from, bytes, entries);
        }
        if pending == 0 {
            self.catch_up();
        }
    }

    /// A message of the stream that the server has sent, not a gate.
    pub fn republished(&mut self, seq: u64, pending: u64) {
        self.stats.messages_republished += u64::from(self.advance(seq));
        if pending == 0 {
            self.catch_up();
        }
    }

    /// Returns true if the message is new.
    fn advance(&mut self, seq: u64) -> bool {
        if seq <= self.seq {
            return false;
        }
        if self.caught_up && seq > self.seq + 1 {
            // The stream has forgotten messages that this gate had not seen yet: a snapshot follows.
            (self.begun, self.caught_up) = (self.seq, false);
        }
        self.seq = seq;
        self.stats.messages += 1;
        true
    }

    fn take(&mut self, seq: u64, table: &str, from: &str, bytes: &[u8], entries: &mut dyn Entries) {
        // Names are shown to users.
        let message = decode(bytes).filter(|_| is_name(table) && is_name(from));
        let Some(message) = message else { return self.stats.messages_malformed += 1 };
        if !self.tables.contains_key(table) {
            if self.tables.len() >= TABLES {
                return self.stats.messages_tables += 1;
            }
            // The entries of the rule file are not the group's.
            let missing = entries.load(table, "").is_err();
            self.tables.insert(table.to_owned(), Held { missing, ..Held::default() });
        }
        let Some(held) = self.tables.get_mut(table) else { return };
        match message {
            Message::Change(lines) => {
                held.changed += lines.len();
                if held.from != from {
                    from.clone_into(&mut held.from);
                }
                self.stats.entries += lines.lines().count() as u64;
                self.stats.refused += entries.change(table, lines);
                if !self.caught_up && held.log_bytes + lines.len() <= LOG_MAX {
                    held.log_bytes += lines.len();
                    held.log.push((seq, lines.to_owned()));
                } else if !self.caught_up {
                    // A snapshot that is older would lose this change.
                    held.base = held.base.max(seq);
                }
            }
            // A snapshot has messages that were before it.
            Message::Part { upto, .. } if upto != ALL && upto >= seq => self.stats.messages_malformed += 1,
            Message::Part { load, upto, index, count, lines } => {
                let Some(load) = self.part((table, from), load, (index, count), lines) else { return };
                self.complete(&load, upto, entries);
            }
        }
    }

    /// Returns a load if this part is its last one.
    fn part(
        &mut self,
        (table, from): (&str, &str),
        number: u64,
        (index, count): (u32, u32),
        lines: &str,
    ) -> Option<Load> {
        let same = |load: &Load| load.table == table && load.from == from;
        let at = self.loads.iter().position(same);
        let mut load = match at.and_then(|at| self.loads.remove(at)) {
            Some(load) if load.number == number && load.parts == index => load,
            other => {
                self.stats.loads_incomplete += u64::from(other.is_some());
                if index != 0 {
                    self.again |= std::mem::take(&mut self.unsure);
                    return None;
                }
                Load {
                    table: table.to_owned(),
                    from: from.to_owned(),
                    number,
                    first: self.seq,
                    parts: 0,
                    lines: String::new(),
                }
            }
        };
        load.parts += 1;
        load.lines += lines;
        if load.lines.len() > LOAD_MAX {
            self.stats.loads_incomplete += 1;
            return None;
        }
        if load.parts == count {
            return Some(load);
        }
        self.loads.push_back(load);
        while self.loads.len() > LOADS
            || self.loads.iter().map(|load| load.lines.len()).sum::<usize>() > LOADS_MAX
        {
            self.loads.pop_front();
            self.stats.loads_incomplete += 1;
        }
        None
    }

    fn complete(&mut self, load: &Load, upto: u64, entries: &mut dyn Entries) {
        let Load { table, lines, first, .. } = load;
        let Some(held) = self.tables.get_mut(table) else { return };
        if upto == ALL && *first < held.loads_from {
            // A gate that joins does not get it.
            return self.stats.loads_incomplete += 1;
        }
        // With it, the stream forgets the messages before.
        held.loads_from = held.loads_from.max(if upto == ALL { *first } else { upto + 1 });
        held.changed = 0;
        if upto != ALL && (self.caught_up || upto < self.begun.max(held.base)) {
            // This gate has everything that the snapshot has.
            return;
        }
        held.base = if upto == ALL { self.seq } else { upto };
        if let Err(why) = entries.load(table, lines) {
            held.missing = true;
            self.problem = Some(format!("the entries of the table {table} are refused: {why}"));
            self.stats.loads_refused += 1;
            return;
        }
        held.missing = false;
        self.stats.loads += 1;
        held.log.retain(|(seq, _)| upto != ALL && *seq > upto);
        held.log_bytes = held.log.iter().map(|(_, lines)| lines.len()).sum();
        for (_, lines) in &held.log {
            self.stats.refused += entries.change(table, lines);
        }
    }

    /// A table whose changes are worth a snapshot, and the number of the last message that it has. The gate that published the last change
    /// makes the snapshot: it has the permission to publish entries of the table.
    pub fn poll_compaction(&mut self, gate: &str) -> Option<(String, u64)> {
        if !self.caught_up {
            return None;
        }
        // A snapshot makes the stream forget the first parts of a load whose last one has not come. It does not wait for one for ever.
        let loading = |name: &str| self.loads.iter().any(|load| load.table == name);
        let worth = |name: &str, changed| changed > COMPACT && (changed > LONGEST_WAIT || !loading(name));
        let (name, held) =
            self.tables.iter_mut().find(|(name, held)| held.from == gate && worth(name, held.changed))?;
        held.changed = 0;
        Some((name.clone(), self.seq))
    }
}

impl Tables {
    /// Returns true, and counts it, if `lines` are too long for a load or snapshot: every gate would drop it.
    pub fn too_long(&mut self, lines: &str) -> bool {
        let long = lines.len() > LOAD_MAX;
        self.stats.loads_incomplete += u64::from(long);
        long
    }
}

/// The entries `lines` of a table after the message `upto`, for gates that join.
pub fn snapshot(table: &str, upto: u64, lines: &str) -> Publication {
    Publication { table: table.to_owned(), messages: parts(upto, upto, lines), forget: Forget::UpTo(upto) }
}

#[cfg(test)]
mod tests;
