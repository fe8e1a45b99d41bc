//! The running snapshot: a states file that a thread keeps up to date while packets are processed (`states-every`).
//!
//! What: a base has the records of all states. The thread writes it in steps into a temporary file, from copies that it takes of the
//! table, and renames the file into its place. Then it appends the changes of each interval, which it reads from the table's journal.
//! Packets do not wait for it. A state that changes several times in one interval is written once. A state that begins and ends in one
//! interval is not written.
//!
//! While a base is written, changes go to the old file and to the new one: a state that the base has passed already is in its
//! changes. When the base is complete, the new file replaces the old one. The file is therefore usable at every moment: frames have
//! checksums, and a reader stops at the first incomplete one.
//!
//! Another base is written when the rules have changed (records name rules), when changes were missed because the journal overwrote
//! them before the thread read them, and when the changes are larger than `GROWTH` times the base plus `SLACK`.
//!
//! fsync: a base is synced before the rename, and the changes once per interval. A loss of power loses at most the changes since the
//! last sync, or a new base. A kill of the process loses nothing that was written.
//!
//! Bounds: the journal, `PENDING` changes, and the file. While a base is written, the old file grows by at most `OLD_GROWTH`
//! times its base plus `OLD_SLACK`, and then gets a gap.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use towpath_gate::state::{Changes, Cursor, EventKind, JournalRead, JournalReader, StateEvent};
use towpath_gate::{Frame, RuleRefs, SnapshotWriter};
use towpath_metrics::metrics;

use super::{Saving, set_aside};
use crate::ruleset_manager::RulesetManager;

metrics! {
    /// The running snapshot of the states.
    pub struct RunningStats in "states_file" {
        /// Bases of the states file that were completed. A base has all states.
        pub bases: counter events,
        /// Changes of states that were appended to the states file.
        pub changes: counter events,
        /// Changes that the states file lacks, because the journal or the file had no room. Another base follows.
        pub missed: counter events,
        /// Failed writes of the states file. It is renamed to `FILE.used`, and another base is begun after an interval.
        pub errors: counter events,
        /// Size of the states file.
        pub bytes: gauge bytes,
    }
}

/// Interval at which the journal is read. It holds 65,536 changes: 3 million per second.
const TICK: Duration = Duration::from_millis(20);

/// Time that a step of a base may take in each tick.
const STEP: Duration = Duration::from_millis(5);

/// Slots in one frame of a base: half a millisecond.
const PART: u32 = 1024;

/// Maximum number of changed states that wait for the end of the interval. More are written at once.
const PENDING: usize = 1 << 20;

/// Changed states that are encoded while the rules are locked.
const CHUNK: usize = 1024;

/// Another base begins when the changes are larger than this many bases and bytes.
const GROWTH: u64 = 1;
const SLACK: u64 = 8 << 20;

/// While a base is written, the old file ends with a gap when its changes are larger than this many bases and bytes.
const OLD_GROWTH: u64 = 4;
const OLD_SLACK: u64 = 64 << 20;

/// The thread of a running snapshot. Dropping it stops the thread.
pub struct Running {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Running {
    /// Starts the thread.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn start(path: &Path, every: Duration, ruleset: &Arc<RulesetManager>) -> io::Result<Self> {
        let (stop, stopped) = channel();
        // The journal first: a change that is not in it is older than the base.
        let mut saver = Saver::new(path, every, Arc::clone(ruleset), Instant::now());
        let body = move || {
            crate::background::begin_as(crate::sandbox::Role::States);
            while stopped.recv_timeout(TICK) == Err(RecvTimeoutError::Timeout) {
                saver.step(Instant::now());
            }
        };
        let thread = thread::Builder::new().name("states".to_owned()).spawn(body)?;
        Ok(Self { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread of the running snapshot panicked; please report it");
        }
    }
}

/// A file that is being written.
struct Log {
    file: File,
    writer: SnapshotWriter,
    bytes: u64,
    /// Its bytes when its base was complete.
    base: u64,
    /// It ends with a gap.
    full: bool,
}

impl Log {
    fn frame(&mut self, kind: Frame, content: &[u8]) -> io::Result<()> {
        let mut out = Vec::with_capacity(content.len() + 9);
        self.writer.frame(kind, content, &mut out);
        self.write(&out)
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all(bytes)?;
        self.bytes += bytes.len() as u64;
        Ok(())
    }

    fn exceeds(&self, growth: u64, slack: u64) -> bool {
        self.bytes - self.base > self.base * growth + slack
    }
}

/// A base that is being written.
struct Base {
    log: Log,
    saving: Saving,
    next: Option<Cursor>,
    /// The version of rules and tables that it began with.
    version: u64,
}

/// What the thread does, as steps.
struct Saver {
    path: PathBuf,
    every: Duration,
    ruleset: Arc<RulesetManager>,
    journal: JournalReader,
    refs: RuleRefs,
    /// The version of rules and tables that `refs` has, and that the base has.
    version: u64,
    base_version: u64,
    /// The last change of each state, and whether a file may have the state.
    pending: HashMap<u32, (bool, StateEvent)>,
    log: Option<Log>,
    base: Option<Base>,
    /// Another base is due.
    due: bool,
    /// Intervals since the last base.
    intervals: u32,
    flushed: Instant,
    failed: bool,
    stats: RunningStats,
}

impl Saver {
    fn new(path: &Path, every: Duration, ruleset: Arc<RulesetManager>, now: Instant) -> Self {
        Self {
            path: path.to_owned(),
            every,
            journal: ruleset.journal(Changes::All),
            ruleset,
            refs: RuleRefs::default(),
            version: u64::MAX,
            base_version: u64::MAX,
            pending: HashMap::new(),
            log: None,
            base: None,
            due: true,
            intervals: 0,
            flushed: now,
            failed: false,
            stats: RunningStats::default(),
        }
    }

    /// One turn of the thread.
    fn step(&mut self, now: Instant) {
        let result = self.drain().and_then(|()| {
            let over = now.duration_since(self.flushed) >= self.every;
            // After an error, the next try is at the end of the interval.
            if self.due && self.base.is_none() && (!self.failed || over) {
                self.begin()?;
            }
            let deadline = Instant::now() + STEP;
            while self.base.is_some() && !self.scan()? && Instant::now() < deadline {}
            if over {
                self.flushed = now;
                self.flush()?;
                self.intervals = self.intervals.saturating_add(1);
                self.sync()?;
            }
            Ok(())
        });
        if let Err(error) = result {
            self.fail(&error, now);
        }
        self.stats.bytes = self.log.as_ref().map_or(0, |log| log.bytes);
        self.ruleset.set_snapshot_stats(self.stats);
    }

    /// Reads the journal to its end.
    fn drain(&mut self) -> io::Result<()> {
        loop {
            match self.journal.read() {
                JournalRead::Change(event) => self.take(event),
                JournalRead::Gap(changes) => {
                    self.stats.missed += changes;
                    self.gap()?;
                }
                JournalRead::End => return Ok(()),
            }
            if self.pending.len() >= PENDING {
                self.flush()?;
            }
        }
    }

    fn take(&mut self, event: StateEvent) {
        let Some(id) = event.id() else { return };
        let before = self.pending.get(&id).map(|(stored, _)| *stored);
        let stored = before.unwrap_or(event.kind != EventKind::Created);
        // A recent base may have the state although its first change is read only now.
        let settled = self.base.is_none() && self.intervals > 1;
        if event.kind.is_end() && !stored && settled {
            self.pending.remove(&id);
        } else {
            self.pending.insert(id, (stored, event));
        }
    }

    /// Writes a gap to the files. A base that has begun is completed nevertheless: otherwise none would be completed while changes are
    /// faster than this thread.
    fn gap(&mut self) -> io::Result<()> {
        self.due = true;
        for log in self.log.iter_mut().chain(self.base.as_mut().map(|base| &mut base.log)) {
            log.frame(Frame::Gap, &[])?;
        }
        Ok(())
    }

    /// Begins a base.
    fn begin(&mut self) -> io::Result<()> {
        // The name is the same in each engine, so that a killed one leaves at most one file, which the next one replaces.
        let saving = Saving::create_as(&self.path, "running")?;
        if !saving.is_renamed() {
            return Err(io::Error::other("it is not a regular file, which states-every needs"));
        }
        self.update_refs();
        let (rules, version) = self.ruleset.snapshot_rules(&self.refs);
        let mut head = Vec::new();
        let mut writer = SnapshotWriter::begin(&mut head);
        writer.frame(Frame::Rules, &rules, &mut head);
        let mut log = Log { file: saving.file()?, writer, bytes: 0, base: 0, full: false };
        log.write(&head)?;
        self.due = false;
        self.base = Some(Base { log, saving, next: Some(Cursor::default()), version });
        Ok(())
    }

    /// Writes the next part of the base. Returns true if it is complete.
    fn scan(&mut self) -> io::Result<bool> {
        let Some(base) = &mut self.base else { return Ok(true) };
        if let Some(at) = base.next {
            let mut content = Vec::new();
            base.next = self.ruleset.snapshot_part(&self.refs, at, PART, &mut content);
            if !content.is_empty() {
                base.log.frame(Frame::Held, &content)?;
            }
            return Ok(false);
        }
        // The changes up to here belong to the base: without them it would have states of different times.
        self.drain()?;
        self.flush()?;
        let Some(Base { mut log, saving, version, .. }) = self.base.take() else { return Ok(true) };
        log.frame(Frame::Complete, &[])?;
        log.base = log.bytes;
        saving.commit()?;
        (self.log, self.base_version, self.intervals) = (Some(log), version, 0);
        self.stats.bases += 1;
        if std::mem::take(&mut self.failed) {
            tracing::info!("{}: states are saved again", self.path.display());
        }
        Ok(true)
    }

    /// Appends the pending changes to the files.
    fn flush(&mut self) -> io::Result<()> {
        self.update_refs();
        let (version, rechecking) = (self.version, self.ruleset.is_unchecked());
        let unchecked = |base: u64| rechecking || version != base;
        let events: Vec<StateEvent> = self.pending.drain().map(|(_, (_, event))| event).collect();
        for events in events.chunks(CHUNK) {
            let mut content = vec![0];
            self.ruleset.snapshot_changes(&self.refs, events, &mut content);
            let base = self.base.iter_mut().map(|base| (base.version, &mut base.log));
            for (version, log) in base.chain(self.log.iter_mut().map(|log| (self.base_version, log))) {
                if !log.full {
                    content[0] = unchecked(version).into();
                    log.frame(Frame::Changes, &content)?;
                }
            }
            self.stats.changes += events.len() as u64;
        }
        // Tables or rules have changed, and no state has: this is recorded, too.
        if events.is_empty()
            && unchecked(self.base_version)
            && let Some(log) = self.log.as_mut().filter(|log| !log.full)
        {
            log.frame(Frame::Changes, &[1])?;
        }
        if let Some(log) = self.log.as_mut() {
            self.due |= log.exceeds(GROWTH, SLACK) && self.base.is_none();
            if !log.full && log.exceeds(OLD_GROWTH, OLD_SLACK) {
                log.frame(Frame::Gap, &[])?;
                log.full = true;
                self.stats.missed += 1;
            }
        }
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        self.log.as_ref().map_or(Ok(()), |log| log.file.sync_data())
    }

    /// Updates the rules that records name. If they have changed, another base is due.
    fn update_refs(&mut self) {
        let version = self.ruleset.version();
        if version != self.version {
            let changed = self.ruleset.update_refs(&mut self.refs);
            self.due |= changed && self.version != u64::MAX;
            self.version = version;
        }
    }

    /// Sets the file aside, because it becomes outdated.
    fn fail(&mut self, error: &io::Error, now: Instant) {
        self.stats.errors += 1;
        let file = self.path.display();
        if !std::mem::replace(&mut self.failed, true) {
            tracing::warn!(
                "{file}: states are not saved: {error}; the engine tries again every {} s",
                self.every.as_secs_f64()
            );
        }
        (self.log, self.base, self.due, self.flushed) = (None, None, true, now);
        self.pending.clear();
        set_aside(&self.path);
    }
}

#[cfg(test)]
mod tests;
