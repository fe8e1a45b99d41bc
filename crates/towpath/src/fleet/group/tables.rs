//! The tables of the group at this gate: publishes changes, and applies what the stream has.

use std::sync::Arc;

use towpath_fleet::group::GroupOutput;
use towpath_fleet::group::tables::{self, Entries, Position, Publication, Tables};

use super::desk::GroupDone;
use crate::ruleset_manager::RulesetManager;

/// The tables of the rules.
struct Rules(Arc<RulesetManager>);

impl Entries for Rules {
    fn load(&mut self, table: &str, lines: &str) -> Result<(), String> {
        let first = |found: Vec<_>| found.first().map(ToString::to_string).unwrap_or_default();
        self.0
            .load_group_entries(table, lines)
            .map_err(|found: Vec<towpath_gate::rules::Diagnostic>| first(found))
    }

    fn change(&mut self, table: &str, lines: &str) -> u64 {
        self.0.change_group_entries(table, lines)
    }
}

/// What this gate publishes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Publishing {
    Nothing,
    /// Entries that a client has changed.
    Change,
    /// A snapshot.
    Snapshot,
    /// Entries that a client has changed are in the stream, up to this message.
    Published(u64),
}

/// See the module documentation.
pub(super) struct GroupTables {
    tables: Tables,
    rules: Rules,
    connected: bool,
    /// When the stream was made, and its last message, once it is open.
    open: Option<(u64, u64)>,
    following: bool,
    /// How often the stream was followed from some message on. Messages of an earlier time may still wait.
    epoch: u64,
    publishing: Publishing,
    /// Number of the next load.
    load: u64,
}

impl GroupTables {
    /// `load` is a number that no earlier process of this gate has reached. `position`: how far the entries are that it begins with.
    pub(super) fn new(ruleset: &Arc<RulesetManager>, load: u64, position: Option<&Position>) -> Self {
        let mut tables = Tables::default();
        if let Some(position) = position {
            tables.restore(position);
        }
        Self {
            tables,
            rules: Rules(Arc::clone(ruleset)),
            connected: false,
            open: None,
            following: false,
            epoch: 0,
            publishing: Publishing::Nothing,
            load,
        }
    }

    pub(super) fn tables(&self) -> &Tables {
        &self.tables
    }

    pub(super) fn connect(&mut self) {
        (self.connected, self.open, self.following) = (true, None, false);
    }

    /// Returns the result of the change that was in progress.
    pub(super) fn disconnect(&mut self) -> Option<Result<GroupDone, String>> {
        (self.connected, self.open, self.following) = (false, None, false);
        let before = std::mem::replace(&mut self.publishing, Publishing::Nothing);
        let change = matches!(before, Publishing::Change | Publishing::Published(_));
        change.then(|| {
            Err("the connection to the server ended before the entries were in the stream, or before they came back; change \
                 them again"
                .to_owned())
        })
    }

    /// The stream that was made then is open.
    pub(super) fn open(&mut self, made: u64, last: u64) {
        let before = self.open.replace((made, last));
        self.following &= before.is_some_and(|(before, _)| before == made);
    }

    /// Follows the stream once the rules of the group are known.
    pub(super) fn poll_follow(&mut self) -> Option<GroupOutput> {
        let (made, last) = self.open.filter(|_| !self.following)?;
        self.following = true;
        self.epoch += 1;
        Some(GroupOutput::Follow { made, after: self.tables.connect(made, last), epoch: self.epoch })
    }

    /// The rules have changed.
    pub(super) fn rules_changed(&mut self) {
        if self.tables.rules_changed() {
            self.following = false;
        }
    }

    /// Returns true if a message comes from the stream as it is followed now.
    fn follows(&self, epoch: u64) -> bool {
        self.following && epoch == self.epoch
    }

    pub(super) fn nothing_follows(&mut self, epoch: u64) {
        if self.follows(epoch) {
            self.tables.catch_up();
        }
    }

    /// Takes a message of the stream. Returns why a load was refused.
    pub(super) fn message(
        &mut self,
        (epoch, seq): (u64, u64),
        names: (&str, &str),
        bytes: Option<&[u8]>,
        pending: u64,
    ) -> Option<String> {
        if !self.follows(epoch) {
            return None;
        }
        // The stream may be read again from its beginning.
        if let Some((_, last)) = &mut self.open {
            *last = seq.max(*last);
        }
        match bytes {
            Some(bytes) => self.tables.message(seq, names, bytes, pending, &mut self.rules),
            None => self.tables.republished(seq, pending),
        }
        if self.tables.take_again() {
            self.following = false;
        }
        self.tables.take_problem()
    }

    /// Begins to publish a change of a client.
    pub(super) fn change(&mut self, table: &str, lines: &str, load: bool) -> Result<GroupOutput, String> {
        if !self.connected || self.open.is_none() {
            return Err("no connection to the stream of the group's tables; nothing was changed, and the gates continue with the \
                        entries that they have: see `towpath ctl show fleet`"
                .to_owned());
        }
        if self.publishing == Publishing::Snapshot {
            return Err("this gate is publishing a snapshot of a table; try again".to_owned());
        }
        self.publishing = Publishing::Change;
        self.load += 1;
        Ok(GroupOutput::Entries(match load {
            true => tables::load(table, self.load, lines),
            false => tables::change(table, lines),
        }))
    }

    /// Entries are in the stream, or not. Returns the result of the change in progress if that has ended.
    pub(super) fn published(&mut self, published: Result<u64, String>) -> Option<Result<GroupDone, String>> {
        let before = std::mem::replace(&mut self.publishing, Publishing::Nothing);
        match (before, published) {
            (Publishing::Change, Ok(seq)) => {
                self.publishing = Publishing::Published(seq);
                None
            }
            (Publishing::Change, Err(error)) => Some(Err(format!(
                "the server did not take all entries: {error}; this gate needs the permission to publish `towpath.GROUP.table.*`"
            ))),
            (_, Err(error)) => {
                log::warn!("fleet: no snapshot of a table: {error}");
                None
            }
            _ => None,
        }
    }

    /// Returns the result of the change in progress once its entries are applied here.
    pub(super) fn poll_done(&mut self) -> Option<GroupDone> {
        let Publishing::Published(seq) = self.publishing else { return None };
        if self.tables.seq() < seq {
            return None;
        }
        self.publishing = Publishing::Nothing;
        Some(GroupDone::Entries)
    }

    /// Publishes a snapshot of a table with many changes, the last of which comes from this gate.
    pub(super) fn poll_snapshot(&mut self, gate: &str) -> Option<GroupOutput> {
        if !self.connected || self.publishing != Publishing::Nothing {
            return None;
        }
        let (table, upto) = self.tables.poll_compaction(gate)?;
        let lines = self.rules.0.entry_lines(&table)?;
        if self.tables.too_long(&lines) {
            return None;
        }
        self.publishing = Publishing::Snapshot;
        let publication: Publication = tables::snapshot(&table, upto, &lines);
        Some(GroupOutput::Entries(publication))
    }
}

#[cfg(test)]
mod tests {
    use towpath_gate::rules::Ruleset;
    use towpath_gate::{Gate, Ports, state};

    use super::*;

    fn manager(rules: &str) -> Arc<RulesetManager> {
        let ruleset = Ruleset::parse("rules", rules).ruleset.unwrap();
        let gate = Gate::new(ruleset.clone(), Ports::new(), state::Settings::default(), 1);
        Arc::new(RulesetManager::new(gate, ruleset, false))
    }

    fn payload(publication: GroupOutput) -> Vec<u8> {
        let GroupOutput::Entries(publication) = publication else { panic!("{publication:?}") };
        publication.messages[0].clone()
    }

    #[test]
    fn messages_of_an_earlier_reading_are_ignored() {
        let ruleset = manager("add allow ip from any to any\n");
        let mut tables = GroupTables::new(&ruleset, 0, None);
        tables.connect();
        tables.open(7, 2);
        let first = payload(tables.change("T", "add 192.0.2.1\n", false).unwrap());
        let second = payload(tables.change("T", "add 192.0.2.2\n", false).unwrap());
        assert_eq!(tables.poll_follow(), Some(GroupOutput::Follow { made: 7, after: 0, epoch: 1 }));
        let names = ("T", "a");
        tables.message((1, 1), names, Some(&first), 1);
        // The rules get the table, and the stream is read again, before the second message of the first reading has come.
        ruleset.command("table T create type addr").unwrap();
        tables.rules_changed();
        tables.message((1, 2), names, Some(&second), 0);
        assert_eq!(tables.poll_follow(), Some(GroupOutput::Follow { made: 7, after: 0, epoch: 2 }));
        tables.message((1, 2), names, Some(&second), 0);
        tables.nothing_follows(1);
        assert!(!tables.tables().is_caught_up());
        tables.message((2, 1), names, Some(&first), 1);
        tables.message((2, 2), names, Some(&second), 0);
        assert!(tables.tables().is_caught_up());
        let entries = ruleset.entry_lines("T").unwrap();
        assert_eq!(entries.lines().count(), 2, "{entries}");
    }
}
