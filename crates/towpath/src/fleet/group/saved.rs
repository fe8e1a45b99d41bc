//! The file of the group's tables, with which the next engine begins: what the gate has, and how far it has read the stream.
//!
//! ```text
//! towpath-tables 1
//! stream 1764349200000000000 seq 1234 loading false
//! table blocked entries 2 changed 120 loads-from 0 missing false from a
//! 192.0.2.1 0
//! 198.51.100.0/24 5
//! end crc32c 0c3f2e11
//! ```
//!
//! The file is written by a thread of its own, from a copy of the tables that costs a few references, and replaced when it is complete.
//! After a change it is written at once if the last time is [`DISTANCE`] ago, and otherwise then. What was changed since is in the stream.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crc::{CRC_32_ISCSI, Crc};
use towpath_fleet::group::tables::{Position, TablePosition};
use towpath_gate::rules::table::Table;

use crate::ruleset_manager::{RulesetManager, write_entries};
use crate::snapshot::Saving;

/// Least time between two writings, and the same as a multiple of the time that a writing takes.
const DISTANCE: Duration = Duration::from_secs(30);
const TIMES: u32 = 20;

/// Bytes of the longest file.
const FILE_MAX: u64 = 256 << 20;

/// Bytes that are written at once.
const PIECE: usize = 1 << 16;

const FIRST: &str = "towpath-tables 1\n";
const END: &str = "end crc32c ";

static CRC: Crc<u32> = Crc::<u32>::new(&CRC_32_ISCSI);

/// The file beside that of the version.
pub(super) fn beside(version: &Path) -> PathBuf {
    let mut path = version.to_owned().into_os_string();
    path.push(".tables");
    path.into()
}

/// What a file has.
#[derive(Debug)]
pub(super) struct Saved {
    pub(super) position: Position,
    text: String,
    /// The entries of each table in the text.
    entries: Vec<(usize, usize)>,
}

impl Saved {
    /// Reads a file; `None` if it does not exist.
    ///
    /// # Errors
    /// The file cannot be read, or is not complete.
    pub(super) fn read(path: &Path) -> io::Result<Option<Self>> {
        let file = match File::open(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            file => file?,
        };
        let mut bytes = Vec::new();
        file.take(FILE_MAX + 1).read_to_end(&mut bytes)?;
        Self::decode(bytes).map(Some).map_err(io::Error::other)
    }

    fn decode(bytes: Vec<u8>) -> Result<Self, String> {
        if !bytes.starts_with(FIRST.as_bytes()) {
            return Err(
                "not a file of tables, or written by a newer version of Towpath; remove it".to_owned()
            );
        }
        let cut = || format!("it is cut off after {} bytes; remove it", bytes.len());
        let end = bytes.len().checked_sub(END.len() + 9).ok_or_else(cut)?;
        let sum = bytes[end..].strip_prefix(END.as_bytes()).and_then(|rest| rest.strip_suffix(b"\n"));
        let sum = sum.and_then(|sum| u32::from_str_radix(std::str::from_utf8(sum).ok()?, 16).ok());
        if sum.ok_or_else(cut)? != CRC.checksum(&bytes[..end]) {
            return Err("damaged: the checksum does not match; remove it".to_owned());
        }
        let mut bytes = bytes;
        bytes.truncate(end);
        let damaged = || "it is damaged; remove it".to_owned();
        let text = String::from_utf8(bytes).map_err(|_| damaged())?;
        Self::parse(text).ok_or_else(damaged)
    }

    fn parse(text: String) -> Option<Self> {
        let mut rest = text.strip_prefix(FIRST)?;
        let mut position = Position::default();
        [position.made, position.seq] = {
            let mut words = next_line(&mut rest)?.split(' ');
            let numbers = [number(&mut words, "stream")?, number(&mut words, "seq")?];
            position.loading = value(&mut words, "loading")? == "true";
            numbers
        };
        let mut entries = Vec::new();
        while !rest.is_empty() {
            let mut words = next_line(&mut rest)?.split(' ');
            let name = value(&mut words, "table")?.to_owned();
            let count = number(&mut words, "entries")?;
            position.tables.push(TablePosition {
                name,
                changed: number(&mut words, "changed")?,
                loads_from: number(&mut words, "loads-from")?,
                missing: value(&mut words, "missing")? == "true",
                from: value(&mut words, "from")?.to_owned(),
            });
            let from = text.len() - rest.len();
            for _ in 0..count {
                next_line(&mut rest)?;
            }
            entries.push((from, text.len() - rest.len()));
        }
        Some(Self { position, text, entries })
    }

    /// The tables, and their entries as lines.
    pub(super) fn tables(&mut self) -> impl Iterator<Item = (&mut TablePosition, &str)> {
        let Self { position, text, entries } = self;
        position.tables.iter_mut().zip(entries.iter().map(|(from, to)| &text[*from..*to]))
    }
}

fn next_line<'a>(rest: &mut &'a str) -> Option<&'a str> {
    let (line, after) = rest.split_once('\n')?;
    *rest = after;
    Some(line)
}

fn value<'a>(words: &mut impl Iterator<Item = &'a str>, name: &str) -> Option<&'a str> {
    words.next().filter(|word| *word == name).and_then(|_| words.next())
}

fn number<'a>(words: &mut impl Iterator<Item = &'a str>, name: &str) -> Option<u64> {
    value(words, name)?.parse().ok()
}

/// Writes a file. A table that is missing has no entries.
fn write(path: &Path, position: &Position, tables: &[Option<Table>]) -> io::Result<()> {
    let mut out =
        Out { saving: Saving::create(path)?, piece: String::new(), sum: CRC.digest(), bytes: 0, error: None };
    let Position { made, seq, loading, .. } = position;
    out.add(&format!("{FIRST}stream {made} seq {seq} loading {loading}\n"));
    for (of, table) in position.tables.iter().zip(tables) {
        let TablePosition { name, missing, changed, loads_from, from } = of;
        let count = table.as_ref().map_or(0, Table::len);
        out.add(&format!(
            "table {name} entries {count} changed {changed} loads-from {loads_from} missing {missing} from {from}\n"
        ));
        if let Some(table) = table {
            write_entries(table, |line| out.add(line));
        }
    }
    out.flush();
    let Out { mut saving, sum, bytes, error, .. } = out;
    if let Some(error) = error {
        return Err(error);
    }
    if bytes > FILE_MAX {
        return Err(io::Error::other("the tables of the group have more than 256 MiB of text"));
    }
    saving.write(format!("{END}{:08x}\n", sum.finalize()).as_bytes())?;
    saving.commit()
}

/// A file that is being written.
struct Out {
    saving: Saving,
    piece: String,
    sum: crc::Digest<'static, u32>,
    bytes: u64,
    error: Option<io::Error>,
}

impl Out {
    fn add(&mut self, text: &str) {
        self.piece.push_str(text);
        if self.piece.len() >= PIECE {
            self.flush();
        }
    }

    fn flush(&mut self) {
        self.bytes += self.piece.len() as u64;
        if self.error.is_none() && self.bytes <= FILE_MAX {
            self.sum.update(self.piece.as_bytes());
            self.error = self.saving.write(self.piece.as_bytes()).err();
        }
        self.piece.clear();
    }
}

/// Writes the file when the tables have changed.
#[derive(Debug)]
pub(super) struct Saver {
    path: PathBuf,
    /// The stream and the message of the file.
    saved: (u64, u64),
    writing: Option<(JoinHandle<io::Result<()>>, Instant)>,
    /// When the next writing may begin.
    next: Instant,
}

impl Saver {
    /// `saved`: what the file has.
    pub(super) fn new(path: PathBuf, saved: Option<&Position>) -> Self {
        let saved = saved.map_or((0, 0), |position| (position.made, position.seq));
        Self { path, saved, writing: None, next: Instant::now() }
    }

    /// Begins to write if `reached` is not what the file has, and it is time. Returns why the last writing failed.
    pub(super) fn poll(
        &mut self,
        position: impl FnOnce() -> Option<Position>,
        reached: (u64, u64),
        rules: &RulesetManager,
    ) -> Option<String> {
        let problem = self.writing.take_if(|(thread, _)| thread.is_finished()).and_then(|(thread, begun)| {
            let took = begun.elapsed();
            self.next = begun + DISTANCE.max(took * TIMES);
            self.ended(thread)
        });
        if self.writing.is_none()
            && self.saved != reached
            && Instant::now() >= self.next
            && let Some(position) = position()
        {
            self.saved = reached;
            let tables = tables_of(&position, rules);
            let path = self.path.clone();
            let body = move || write(&path, &position, &tables);
            match thread::Builder::new().name("group-tables".to_owned()).spawn(body) {
                Ok(thread) => self.writing = Some((thread, Instant::now())),
                Err(error) => return Some(self.failed(&error)),
            }
        }
        problem
    }

    /// Writes what was changed since, before the end. Returns why that failed.
    pub(super) fn finish(&mut self, position: Option<Position>, rules: &RulesetManager) -> Option<String> {
        if let Some((thread, _)) = self.writing.take() {
            self.ended(thread);
        }
        let position = position.filter(|position| self.saved != (position.made, position.seq))?;
        write(&self.path, &position, &tables_of(&position, rules)).err().map(|error| self.failed(&error))
    }

    fn ended(&mut self, thread: JoinHandle<io::Result<()>>) -> Option<String> {
        let written =
            thread.join().unwrap_or_else(|_| Err(io::Error::other("the thread panicked; please report it")));
        written.err().map(|error| self.failed(&error))
    }

    fn failed(&mut self, error: &io::Error) -> String {
        // It is tried again.
        self.saved = (0, 0);
        let path = self.path.display();
        format!(
            "{path}: the tables of the group cannot be saved: {error}; after a restart without a server, the gate begins with older ones"
        )
    }
}

/// The tables as they are now.
fn tables_of(position: &Position, rules: &RulesetManager) -> Vec<Option<Table>> {
    let of = |table: &TablePosition| rules.table(&table.name).filter(|_| !table.missing);
    position.tables.iter().map(of).collect()
}

#[cfg(test)]
mod tests {
    use towpath_gate::rules::Ruleset;

    use super::*;

    fn tables() -> (Position, Vec<Option<Table>>) {
        let rules = "table t create type addr\ntable t add 192.0.2.1 7\ntable t add 198.51.100.0/24\n";
        let ruleset = Ruleset::parse("t", rules).ruleset.unwrap();
        let table = |name: &str, missing| TablePosition {
            name: name.to_owned(),
            missing,
            changed: 3,
            loads_from: 4,
            from: String::new(),
        };
        let position =
            Position { made: 5, seq: 6, loading: true, tables: vec![table("t", false), table("none", true)] };
        (position, vec![ruleset.table("t").cloned(), None])
    }

    #[test]
    fn a_file_reads_back_and_a_cut_or_damaged_one_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = beside(&directory.path().join("group"));
        assert!(Saved::read(&path).unwrap().is_none());
        let (position, tables) = tables();
        write(&path, &position, &tables).unwrap();
        let mut saved = Saved::read(&path).unwrap().unwrap();
        assert_eq!(saved.position, position);
        let found: Vec<_> =
            saved.tables().map(|(table, lines)| (table.name.clone(), lines.to_owned())).collect();
        assert_eq!(
            found,
            [
                ("t".to_owned(), "192.0.2.1/32 7\n198.51.100.0/24 0\n".to_owned()),
                ("none".to_owned(), String::new())
            ]
        );
        let bytes = std::fs::read(&path).unwrap();
        for len in 0..bytes.len() {
            let error = Saved::decode(bytes[..len].to_vec()).unwrap_err();
            assert!(
                error.ends_with("; remove it") && (len < FIRST.len() || error.contains("cut off")),
                "{len}: {error}"
            );
        }
        for at in 0..bytes.len() {
            let mut bytes = bytes.clone();
            bytes[at] ^= 1;
            assert!(Saved::decode(bytes).is_err(), "byte {at}");
        }
        // A checksum does not make a wrong count right.
        let text = String::from_utf8(bytes).unwrap().replace("entries 2", "entries 9");
        let text = text.split_once(END).unwrap().0;
        let sum = CRC.checksum(text.as_bytes());
        let error = Saved::decode(format!("{text}{END}{sum:08x}\n").into_bytes()).unwrap_err();
        assert_eq!(error, "it is damaged; remove it");
    }

    #[test]
    fn an_old_file_stays_if_the_new_one_cannot_be_written() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("none").join("group");
        let (position, tables) = tables();
        assert!(write(&path, &position, &tables).is_err());
    }
}
