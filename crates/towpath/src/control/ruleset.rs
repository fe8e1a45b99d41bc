//! Questions about rules, and commands that change them: answered from the ruleset, without the engine.
//!
//! A listing comes in pages: each answer says where the next begins, so that nobody keeps anything for a client. Who asks sees by a
//! number that rules or tables have changed meanwhile, and begins anew.

use towpath_gate::state::{Cursor, Ends, Kind, Listed, Top};

use super::protocol::{Answer, Code, Request};
use super::records::{Changes, Event, Pipe, State, Table};
use crate::ruleset_manager::{self, RulesetManager, StateLine};

/// Rows of one page.
const PAGE: usize = 1000;

/// Bytes of text of one page, about: a page must fit into an answer.
const PAGE_BYTES: usize = 256 << 10;

/// Top talkers that are shown when nobody says how many, and at most.
const TOP: u64 = 10;
const TOP_MAX: u64 = 100;

/// What happened to states since this was asked last.
pub(super) fn events(book: &RulesetManager) -> (Vec<Event>, u64) {
    let (events, lost) = book.events();
    let row = |event: ruleset_manager::Event| Event {
        at: event.at,
        what: event.what.to_owned(),
        state: event.state.map(State::from),
    };
    (events.into_iter().map(row).collect(), lost)
}

/// The answer to what the ruleset can answer; none for what only the engine knows.
pub(super) fn answer(book: &RulesetManager, request: &Request) -> Option<Result<Answer, (Code, String)>> {
    Some(match request {
        Request::ShowRules { from } => {
            let (version, rules) = at_version(book, RulesetManager::rules);
            let (rules, next) = page(rules, *from, |rule| rule.text.len() + 80);
            Ok(Answer::Rules { rules, next, version })
        }
        Request::ShowStates { from, verbose } => {
            let (lines, next) = book.states(Cursor::from_bits(*from), PAGE, *verbose);
            Ok(Answer::States {
                states: lines.into_iter().map(State::from).collect(),
                next: next.map(Cursor::to_bits),
            })
        }
        Request::ShowTop { count, bytes } => {
            let count = if *count == 0 { TOP } else { (*count).min(TOP_MAX) };
            let lines = book.top(count as usize, if *bytes { Top::Bytes } else { Top::Packets });
            Ok(Answer::Top { states: lines.into_iter().map(State::from).collect() })
        }
        Request::ShowTables => {
            let row = |(name, kind, entries)| Table { name, kind, entries: entries as u64 };
            Ok(Answer::Tables { tables: book.tables().into_iter().map(row).collect() })
        }
        Request::ShowTable { name, from } => match at_version(book, |book| book.table(name)) {
            (version, Some(entries)) => {
                let (entries, next) = page(entries, *from, |(key, value)| key.len() + value.len() + 10);
                Ok(Answer::Table { name: name.clone(), entries, next, version })
            }
            (_, None) => Err((Code::NotFound, no_table(name))),
        },
        Request::Lookup { name, key } => match book.lookup(name, key) {
            Some(Ok(Some((key, value)))) => Ok(Answer::Entry { key, value }),
            Some(Ok(None)) => Err((Code::NotFound, format!("{key} is not in table {name}"))),
            Some(Err(error)) => Err((Code::Invalid, error)),
            None => Err((Code::NotFound, no_table(name))),
        },
        Request::ShowPipes => {
            let row = |(number, rate, burst)| Pipe { number, rate, burst };
            Ok(Answer::Pipes { pipes: book.pipes().into_iter().map(row).collect() })
        }
        Request::ShowSettings => {
            let row = |(name, value): (&str, u64)| (name.to_owned(), value);
            Ok(Answer::Settings { settings: book.settings().into_iter().map(row).collect() })
        }
        Request::Command { text, check } => {
            match if *check { book.preview(text) } else { book.command(text) } {
                Ok(done) => {
                    let warnings = done.warnings.iter().map(ToString::to_string).collect();
                    Ok(Answer::Done { changes: Changes { warnings, ..done.diff.into() } })
                }
                Err(errors) => {
                    let lines: Vec<String> = errors.iter().map(ToString::to_string).collect();
                    Err((Code::Invalid, lines.join("\n")))
                }
            }
        }
        Request::Set { name, value } => match book.set(name, *value) {
            Ok((name, before, value)) => Ok(Answer::Set { name, before, value }),
            Err(error) => Err((Code::Invalid, error.to_string())),
        },
        Request::ShowRings
        | Request::ShowMux
        | Request::ShowSend
        | Request::ShowFrames { .. }
        | Request::Trace { .. }
        | Request::Follow { .. }
        | Request::ShowQueues
        | Request::ShowPorts
        | Request::Events
        | Request::ShowStats => return None,
    })
}

fn no_table(name: &str) -> String {
    format!("there is no table {name}; `towpath ctl show tables` lists them")
}

/// What is looked up, and the version that it is of.
fn at_version<T>(book: &RulesetManager, look: impl Fn(&RulesetManager) -> T) -> (u64, T) {
    loop {
        let version = book.version();
        let found = look(book);
        // Whatever changes says so before the next one may look.
        if book.version() == version {
            return (version, found);
        }
    }
}

/// The rows of one page, and where the next begins.
fn page<T>(rows: Vec<T>, from: u64, bytes: impl Fn(&T) -> usize) -> (Vec<T>, Option<u64>) {
    let total = rows.len() as u64;
    let mut room = PAGE_BYTES;
    let fits = |row: &T| {
        let fits = room > 0;
        room = room.saturating_sub(bytes(row));
        fits
    };
    let from = from.min(total);
    let rows: Vec<T> = rows.into_iter().skip(from as usize).take(PAGE).take_while(fits).collect();
    let next = from + rows.len() as u64;
    (rows, (next < total).then_some(next))
}

impl From<StateLine> for State {
    fn from(line: StateLine) -> Self {
        let StateLine { rule, text, parts, name } = line;
        let Listed { kind, orphaned, flow, packets, bytes, .. } = *parts;
        let (src, dst) = match flow.ends {
            Ends::V4(src, dst) => (src.to_string(), dst.to_string()),
            Ends::V6(src, dst, _) => (src.to_string(), dst.to_string()),
        };
        let (kind, count) = match kind {
            Kind::State => ("state", 0),
            Kind::Limit => ("limit", 0),
            Kind::Parent { count } => ("parent", count),
        };
        Self {
            rule,
            kind: kind.to_owned(),
            name,
            proto: flow.proto,
            src,
            src_port: flow.src_port,
            dst,
            dst_port: flow.dst_port,
            packets,
            bytes,
            expire: parts.seconds(),
            orphaned,
            count,
            text,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_whole_and_end() {
        let (mut from, mut got) = (0, Vec::new());
        loop {
            let (rows, next) = page((0..2500).collect::<Vec<u32>>(), from, |_| 1000);
            assert!(rows.len() <= PAGE_BYTES / 1000 + 1);
            got.extend(rows);
            match next {
                Some(next) => from = next,
                None => break,
            }
        }
        assert!(got.into_iter().eq(0..2500));
        assert_eq!(page(vec![1], 7, |_| 1), (vec![], None));
        // A row that is larger than a page comes alone.
        assert_eq!(page(vec![1, 2], 0, |_| PAGE_BYTES), (vec![1], Some(1)));
    }
}
