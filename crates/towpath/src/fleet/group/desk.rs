//! What clients of the control socket ask of the group, and the results.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use towpath_fleet::group::{Content, GateVersion};

/// Commands that wait for the thread, and results that wait for clients.
const COMMANDS: usize = 16;
const OUTCOMES: usize = 64;

/// A change of what the group has in common.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GroupCommand {
    /// Applies a version.
    Apply(Content),
    /// Changes entries of a table: lines `add KEY`, `add KEY VALUE` or `delete KEY`.
    Change {
        /// The table.
        table: String,
        /// The lines.
        lines: String,
    },
    /// Replaces all entries of a table: lines `KEY` or `KEY VALUE`.
    Load {
        /// The table.
        table: String,
        /// The lines.
        lines: String,
    },
}

/// What a change has done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GroupDone {
    /// This version is applied; what each gate has.
    Version(u64, Vec<GateVersion>),
    /// The entries are in the stream, and applied here.
    Entries,
}

/// Changes that clients ask for, and their results.
#[derive(Debug, Default)]
pub struct GroupDesk(Mutex<Desk>);

#[derive(Debug, Default)]
struct Desk {
    last: u64,
    commands: VecDeque<(u64, GroupCommand)>,
    /// The command that is being executed.
    running: Option<u64>,
    outcomes: VecDeque<(u64, Result<GroupDone, String>)>,
}

/// A change is not known, or no longer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unknown;

impl GroupDesk {
    fn lock(&self) -> MutexGuard<'_, Desk> {
        // The data is consistent after every step, so a poisoned lock can be used.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks for a change. Returns its number, or `None` if too many wait.
    pub fn ask(&self, command: GroupCommand) -> Option<u64> {
        let mut desk = self.lock();
        if desk.commands.len() >= COMMANDS {
            return None;
        }
        desk.last += 1;
        let number = desk.last;
        desk.commands.push_back((number, command));
        Some(number)
    }

    /// The result of a change: `None` while it waits or is in progress.
    ///
    /// # Errors
    /// The change is not known, or no longer.
    pub fn outcome(&self, number: u64) -> Result<Option<Result<GroupDone, String>>, Unknown> {
        let desk = self.lock();
        if desk.running == Some(number) || desk.commands.iter().any(|(waiting, _)| *waiting == number) {
            return Ok(None);
        }
        let outcome = desk.outcomes.iter().find(|(done, _)| *done == number);
        outcome.map(|(_, outcome)| Some(outcome.clone())).ok_or(Unknown)
    }

    /// The next change, if none is in progress.
    pub(super) fn next(&self) -> Option<GroupCommand> {
        let mut desk = self.lock();
        if desk.running.is_some() {
            return None;
        }
        let (number, command) = desk.commands.pop_front()?;
        desk.running = Some(number);
        Some(command)
    }

    /// The change in progress has ended.
    pub(super) fn finish(&self, outcome: Result<GroupDone, String>) {
        let mut desk = self.lock();
        let Some(number) = desk.running.take() else { return };
        desk.outcomes.push_back((number, outcome));
        if desk.outcomes.len() > OUTCOMES {
            desk.outcomes.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_are_executed_one_after_another() {
        let desk = GroupDesk::default();
        let change = || GroupCommand::Change { table: "T".to_owned(), lines: String::new() };
        let numbers: Vec<_> = (0..COMMANDS).map(|_| desk.ask(change()).unwrap()).collect();
        assert_eq!(
            (desk.ask(change()), desk.outcome(numbers[0]), desk.outcome(99)),
            (None, Ok(None), Err(Unknown))
        );
        assert!(desk.next().is_some() && desk.next().is_none());
        desk.finish(Err("no".to_owned()));
        assert_eq!(desk.outcome(numbers[0]), Ok(Some(Err("no".to_owned()))));
        assert_eq!(desk.outcome(numbers[1]), Ok(None));
        for _ in 0..2 * OUTCOMES {
            desk.ask(change()).unwrap();
            desk.next().unwrap();
            desk.finish(Ok(GroupDone::Entries));
        }
        assert_eq!(desk.outcome(numbers[0]), Err(Unknown));
    }
}
