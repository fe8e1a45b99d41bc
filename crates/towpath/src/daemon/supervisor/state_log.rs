//! Events of states as lines of the log, while the level of their target is `info` or more verbose.

use towpath_gate::state::{Changes, JournalRead, JournalReader};
use tracing::Level;

use crate::control::commands::show_states::State;
use crate::logging::STATES;
use crate::quantity::count;
use crate::ruleset_manager::RulesetManager;

/// Events that one turn of the supervisor logs. The others wait in the journal, whose bound is that of its readers.
const PER_TURN: usize = 1024;

/// The reader of the journal, while events are logged.
#[derive(Debug, Default)]
pub(super) struct StateLog(Option<JournalReader>);

impl StateLog {
    /// Logs new events. Returns true if more may follow soon.
    pub(super) fn log(&mut self, ruleset: &RulesetManager) -> bool {
        if !tracing::event_enabled!(target: STATES, Level::INFO) {
            self.0 = None;
            return false;
        }
        // The first call begins with the events that follow it.
        let journal = self.0.get_or_insert_with(|| ruleset.journal(Changes::All));
        let (mut logged, mut missed) = (0, 0);
        while logged < PER_TURN {
            match journal.read() {
                JournalRead::Change(event) => {
                    let what = event.kind.as_str();
                    match event.state().map(|state| State::from(ruleset.state_line(state.clone()))) {
                        Some(state) => tracing::info!(
                            target: STATES,
                            event = what,
                            rule = state.rule,
                            kind = state.kind,
                            proto = state.proto,
                            src = state.src,
                            src_port = state.src_port,
                            dst = state.dst,
                            dst_port = state.dst_port,
                            zone = state.zone,
                            packets = state.packets[0],
                            packets_back = state.packets[1],
                            bytes = state.bytes[0],
                            bytes_back = state.bytes[1],
                            "{what} {}",
                            state.text
                        ),
                        None => tracing::info!(target: STATES, event = what, "{what}"),
                    }
                    logged += 1;
                }
                JournalRead::Gap(changes) => missed += changes,
                JournalRead::End => break,
            }
        }
        if missed > 0 {
            let events = count(missed, "event");
            tracing::warn!(target: STATES, missed, "{events} of states were not logged: there were too many");
        }
        logged == PER_TURN
    }
}
