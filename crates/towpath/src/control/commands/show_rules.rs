//! `towpath ctl show rules`

use clap::Args;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use towpath_wire::Time;

use super::super::client::{Engine, Failure};
use super::super::command::{Context, Handled, Query, Reply, name};
use super::super::text::items;
use super::paging;
use crate::packet_log::utc;
use crate::report;

/// Every rule with its counters: packets and bytes
#[derive(Debug, Default, Args, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ShowRules {
    /// Index of the first rule of the page.
    #[arg(skip)]
    #[serde(default)]
    from: u64,
}

/// A rule, and the seconds since 1970 of its last packet; null without a packet.
#[derive(Serialize)]
struct Row {
    #[serde(flatten)]
    rule: report::Rule,
    last: Option<u64>,
}

/// Nanoseconds.
const SECOND: u64 = 1_000_000_000;

/// The columns of a rule besides its number and text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Columns {
    pub(super) counters: bool,
    pub(super) times: Times,
    pub(super) sets: bool,
}

/// How the time of the last packet is printed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Times {
    #[default]
    None,
    /// `-t`: date and time in UTC.
    Date,
    /// `-T`: seconds since 1970.
    Seconds,
}

impl Query for ShowRules {
    const WORDS: &'static str = "show rules";
    const ANSWER: &'static str = "rules";

    fn handle(self, context: &Context<'_>) -> Handled {
        let (version, rules) = context.ruleset()?.rules_with_times();
        let (rules, next) = paging::page(rules, self.from, |(rule, _)| rule.text.len() + 100);
        let rules: Vec<Row> = rules
            .into_iter()
            .map(|(rule, last)| Row { rule, last: last.map(|last| last.as_nanos() / SECOND) })
            .collect();
        Ok(Reply::Answer(Self::ANSWER, json!({ "rules": rules, "next": next, "version": version })))
    }

    fn ask(&self, engine: &Engine) -> Result<Value, Failure> {
        Ok(json!({ "rules": rules(engine)? }))
    }

    fn text(&self, answer: &Value) -> String {
        text(items(&answer["rules"]), Columns { counters: true, ..Columns::default() })
    }
}

/// All rules, the default rule last.
pub(super) fn rules(engine: &Engine) -> Result<Vec<Value>, Failure> {
    paging::all(|from| engine.ask(&name(ShowRules::WORDS), ShowRules { from }, ShowRules::ANSWER), "rules")
}

/// Rules as ipfw's `show` and `list` print them.
pub(super) fn text(rules: &[Value], Columns { counters, times, sets }: Columns) -> String {
    let width = |key| rules.iter().map(|rule| rule[key].to_string().len()).max().unwrap_or(0);
    let (packets, bytes) = (width("packets"), width("bytes"));
    let mut text = String::new();
    for rule in rules {
        text += &format!("{:05} ", rule["number"].as_u64().unwrap_or(0));
        if counters {
            text += &format!("{:>packets$} {:>bytes$} ", rule["packets"], rule["bytes"]);
        }
        let last = rule["last"].as_u64();
        match times {
            Times::None => {}
            Times::Date => {
                let date =
                    last.map(|last| utc(Time::from_nanos(last.saturating_mul(SECOND)), false).to_string());
                text += &format!("{:20} ", date.unwrap_or_default());
            }
            Times::Seconds => text += &format!("{:>10} ", last.unwrap_or(0)),
        }
        if sets {
            text += &format!("set {} ", rule["set"]);
        }
        text += rule["text"].as_str().unwrap_or_default();
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_dates_or_seconds() {
        let rules = [
            json!({"number": 100, "set": 0, "packets": 3, "bytes": 84, "last": 1_763_799_330, "text": "allow ip from any to any"}),
            json!({"number": 65535, "set": 31, "packets": 0, "bytes": 0, "last": null, "text": "deny ip from any to any"}),
        ];
        let columns = |times| Columns { counters: false, times, sets: true };
        let rows = [
            (Times::None, "00100 set 0 allow ip from any to any\n65535 set 31 deny ip from any to any\n"),
            (
                Times::Date,
                "00100 2025-11-22T08:15:30Z set 0 allow ip from any to any\n65535                      set 31 deny ip from any to any\n",
            ),
            (
                Times::Seconds,
                "00100 1763799330 set 0 allow ip from any to any\n65535          0 set 31 deny ip from any to any\n",
            ),
        ];
        for (times, expected) in rows {
            assert_eq!(text(&rules, columns(times)), expected, "{times:?}");
        }
    }
}
