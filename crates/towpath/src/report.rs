//! The final report of a run, as text or as one JSON object.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize, Serializer};
use serde_json::{Map, Value, json};
use towpath_engine::{self as engine, ConversationStats, Drops, QueueSnapshot, ReplyStats, Stats, Totals};
use towpath_gate::{self, RuleInfo, state};
use towpath_metrics::Metric;

use crate::control::commands::show_ports::{self, Port};
use crate::metrics::{self, Layout};
use crate::quantity::count;

/// The report of one run. Serialised, it is the object that `towpath replay --json` prints.
///
/// `packets = passed + dropped + rejected` holds in every report.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Report {
    /// Packets by outcome.
    pub totals: Totals,
    /// Replies to rejected packets.
    pub replies: ReplyStats,
    /// Conversations of a replay.
    pub conversations: ConversationStats,
    /// Dynamic states.
    pub states: States,
    /// States restored from a snapshot (`--states-in`); they are included in `created` of the states.
    pub restored: Option<Restored>,
    /// Every rule with its counters, in order.
    pub rules: Vec<Rule>,
    /// Every queue with its counters, by number.
    pub queues: Vec<QueueSnapshot>,
    /// The ports of an engine; empty after a replay.
    pub ports: Vec<Port>,
    /// Wall-clock seconds from reading the first packet to deciding the last one.
    pub seconds: f64,
    /// Time span of the captures.
    pub span: Duration,
    /// Capture files read.
    pub captures: usize,
}

/// Dynamic states over the run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct States {
    /// The counters.
    pub counters: state::Counters,
    /// Whether the number reached 9/10 of `max` and has not fallen below 8/10 since.
    pub is_nearly_full: bool,
}

/// The counters of states as an object: `now` is the number that is left after a run.
const STATES: Layout = Layout {
    families: &[("refused", "refused")],
    renamed: &[("now", "left"), ("parents_full", "limits_full"), ("nearly_full", "nearly_full_events")],
    moved: &[],
    hidden: &[],
};

/// The counters of a queue in a report. No frames are open and no packets are held after a run.
const QUEUE: Layout = Layout {
    families: &[("lost", "lost_by")],
    renamed: &[
        ("invalid_verdict", "garbage"),
        ("inspector_died", "died"),
        ("queue_full", "overload"),
        ("no_inspector", "no_listener"),
    ],
    moved: &[],
    hidden: &["open", "held", "held_bytes", "high_water"],
};

/// Result of restoring a snapshot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Restored {
    /// States whose rule exists here.
    pub states: u64,
    /// States whose rule does not exist here; they are assigned to the default dynamic rule.
    pub companion: u64,
    /// States that existed already.
    pub existing: u64,
    /// States that did not fit into the table.
    pub refused: u64,
}

impl From<towpath_gate::Restored> for Restored {
    fn from(restored: towpath_gate::Restored) -> Self {
        let towpath_gate::Restored { states, default_dynamic: companion, existing, refused, .. } = restored;
        Self { states, companion, existing, refused }
    }
}

impl States {
    /// Reads the counters of `states`.
    pub fn of(states: &state::States) -> Self {
        Self { counters: states.counters(), is_nearly_full: states.is_nearly_full() }
    }

    /// The states as an object.
    pub fn object(&self) -> Map<String, Value> {
        let mut object = STATES.object(&self.counters);
        object.insert("nearly_full".to_owned(), self.is_nearly_full.into());
        object
    }
}

/// A rule and its counters.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rule {
    /// Rule number.
    pub number: u32,
    /// Set number, 0..31.
    pub set: u8,
    /// Packets that executed the rule's action.
    pub packets: u64,
    /// Bytes of these packets.
    pub bytes: u64,
    /// The rule in ipfw's output format.
    pub text: String,
}

/// Returns the drop reasons that occurred, by name.
pub fn dropped_by(drops: &Drops) -> BTreeMap<&'static str, u64> {
    drops.iter().map(|(reason, count)| (reason.name(), count)).collect()
}

/// A queue as an object. `frames = passed + dropped + replaced + lost` at the end of a run.
fn queue_object(queue: &QueueSnapshot) -> Value {
    let mut object = QUEUE.object(&queue.stats);
    object.insert("number".to_owned(), queue.number.into());
    object.insert("lost".to_owned(), queue.stats.lost().into());
    object.into()
}

/// Adds the queues of another thread.
pub fn add_queues(all: &mut Vec<QueueSnapshot>, queues: Vec<QueueSnapshot>) {
    for queue in queues {
        match all.iter_mut().find(|own| own.number == queue.number) {
            Some(own) => own.add(queue),
            None => all.push(queue),
        }
    }
}

impl Report {
    /// Returns the report of one engine. The caller adds the rules, the wall-clock time and the number of captures.
    pub fn of<E: engine::PacketIo>(engine: &mut engine::Engine<E>) -> Self {
        let engine::Summary { totals, replies, conversations, queues, span } = engine.summary();
        let states = States::of(engine.states());
        Self { totals, replies, conversations, states, queues, span, ..Self::default() }
    }

    /// Adds the report of another thread of the same engine. The threads share one state table, so its counters are not summed.
    pub fn add(&mut self, other: &Self) {
        self.totals.add(&other.totals);
        self.replies.add(&other.replies);
        self.states = other.states;
        self.span = self.span.max(other.span);
        add_queues(&mut self.queues, other.queues.clone());
        let parts = [&mut self.ports, &mut other.ports.clone()].map(|ports| Some(std::mem::take(ports)));
        self.ports = show_ports::merge(parts.into_iter().filter(|part| part != &Some(Vec::new())).collect())
            .unwrap_or_default();
    }

    /// The report as an object.
    pub fn object(&self) -> Map<String, Value> {
        let mut object = metrics::json(&self.totals.stats);
        let Value::Object(more) = json!({
            "dropped": self.totals.dropped(),
            "dropped_by": dropped_by(&self.totals.drops),
            "replies": metrics::json(&self.replies),
            "conversations": metrics::json(&self.conversations),
            "states": self.states.object(),
            "rules": self.rules,
            "queues": self.queues.iter().map(queue_object).collect::<Vec<_>>(),
            "seconds": self.seconds,
        }) else {
            return object;
        };
        object.extend(more);
        if !self.ports.is_empty() {
            object.insert("ports".to_owned(), self.ports.iter().map(Port::object).collect());
        }
        if let Some(restored) = self.restored {
            object.insert("restored".to_owned(), json!(restored));
        }
        object
    }
}

impl Serialize for Report {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.object().serialize(serializer)
    }
}

impl From<RuleInfo> for Rule {
    fn from(shown: RuleInfo) -> Self {
        let RuleInfo { number, set, packets, bytes, text, .. } = shown;
        Self { number, set, packets, bytes, text }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let line = |f: &mut fmt::Formatter<'_>, name: &str, value: &str| writeln!(f, "{name:<14}{value}");
        // A live run has neither captures nor a defined duration, so there is no rate.
        let is_replay = self.captures > 0;
        let Stats { packets, bytes, passed, rejected, inspected, .. } = self.totals.stats;
        let received = (count(packets, "packet"), count(bytes, "byte"));
        if is_replay {
            let captures = count(self.captures as u64, "capture");
            let span = self.span.as_secs_f64();
            line(f, "read", &format!("{} in {captures}, {}, spanning {span:.1} s", received.0, received.1))?;
        } else {
            line(f, "received", &format!("{}, {}", received.0, received.1))?;
        }
        line(f, "passed", &passed.to_string())?;
        line(f, "dropped", &self.totals.dropped().to_string())?;
        let reasons = dropped_by(&self.totals.drops);
        if !reasons.is_empty() {
            let reasons: Vec<_> = reasons.iter().map(|(reason, count)| format!("{count} {reason}")).collect();
            line(f, "  by reason", &reasons.join(", "))?;
        }
        line(f, "rejected", &rejected.to_string())?;
        if rejected > 0 {
            line(f, "replies", &metrics::listing(&self.replies))?;
        }
        line(f, "inspected", &inspected.to_string())?;
        let listed = ["packets", "bytes", "passed", "rejected", "inspected"];
        let also = metrics::nonzero(&self.totals.stats, |metric| !listed.contains(&metric.name));
        if !also.is_empty() {
            line(f, "also", &also)?;
        }
        if is_replay {
            line(f, "conversations", &metrics::listing(&self.conversations))?;
        }
        let state::Counters { created, peak, now, .. } = self.states.counters;
        let mut states = format!("{created} created, {peak} peak, {now} left");
        // `created = left + expired + removed + evicted`.
        let listed = ["created", "expired", "removed"];
        let also = |metric: &Metric| metric.label.is_none() && !listed.contains(&metric.name);
        let also = metrics::nonzero(&self.states.counters, also);
        if !also.is_empty() {
            states += &format!(", {also}");
        }
        line(f, "states", &states)?;
        if let Some(Restored { states, companion, existing, refused }) = self.restored {
            let text = format!("{} restored", states + companion);
            let text = format!(
                "{text} ({companion} of rules that are not here), {existing} existing, {refused} refused"
            );
            line(f, "snapshot", &text)?;
        }
        let refused = metrics::nonzero(&self.states.counters, |metric| metric.stem == "refused");
        if !refused.is_empty() {
            line(f, "no state", &refused)?;
        }
        if is_replay {
            let rate = if self.seconds > 0.0 { packets as f64 / self.seconds } else { 0.0 };
            line(f, "speed", &format!("{rate:.0} packets/s ({:.6} s)", self.seconds))?;
        }
        if !self.queues.is_empty() {
            writeln!(f)?;
        }
        for queue in &self.queues {
            write_queue(f, queue)?;
        }
        writeln!(f)?;
        write_rules(f, &self.rules)
    }
}

fn write_queue(f: &mut fmt::Formatter<'_>, queue: &QueueSnapshot) -> fmt::Result {
    let QueueSnapshot { number, stats, trouble, .. } = queue;
    write!(
        f,
        "queue {number}: {}, {} passed, {} dropped, {} replaced, {} lost, high-water {}",
        count(stats.frames, "frame"),
        stats.passed,
        stats.dropped,
        stats.replaced,
        stats.lost(),
        stats.high_water
    )?;
    let listed = ["frames", "passed", "dropped", "replaced"];
    let more = metrics::nonzero(stats, |metric| !listed.contains(&metric.name));
    if !more.is_empty() {
        write!(f, ", {more}")?;
    }
    match trouble {
        Some(trouble) => writeln!(f, "; {trouble}"),
        None => writeln!(f),
    }
}

/// Formats the rules like `ipfw show`: number, packets and bytes (right-aligned), rule.
fn write_rules(f: &mut fmt::Formatter<'_>, rules: &[Rule]) -> fmt::Result {
    let width = |value: fn(&Rule) -> u64| rules.iter().map(value).max().unwrap_or(0).to_string().len();
    let packets = width(|rule| rule.packets);
    let bytes = width(|rule| rule.bytes);
    for rule in rules {
        writeln!(f, "{:05} {:>packets$} {:>bytes$} {}", rule.number, rule.packets, rule.bytes, rule.text)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> Report {
        let stats = Stats { packets: 10, bytes: 640, passed: 7, rejected: 1, inspected: 3 };
        let mut totals = Totals { stats, ..Totals::default() };
        totals.drops[engine::DropReason::Rule] = 2;
        let counters = state::Counters { created: 3, peak: 2, now: 1, ..state::Counters::default() };
        let queue = engine::queue::Stats { frames: 3, passed: 2, overdue: 1, ..Default::default() };
        Report {
            totals,
            conversations: ConversationStats { tcp: 2, udp: 1 },
            states: States { counters, is_nearly_full: false },
            rules: vec![
                Rule { number: 100, set: 0, packets: 7, bytes: 500, text: "allow ip from any to any".into() },
                Rule {
                    number: 65535,
                    set: 31,
                    packets: 12,
                    bytes: 9,
                    text: "deny ip from any to any".into(),
                },
            ],
            queues: vec![QueueSnapshot {
                number: 1,
                stats: queue,
                flow_verdicts: Default::default(),
                verdict_time: Default::default(),
                inspectors: 0,
                trouble: None,
            }],
            seconds: 0.5,
            captures: 1,
            ..Report::default()
        }
    }

    #[test]
    fn rules_are_printed_as_ipfw_show_does() {
        let text = report().to_string();
        assert!(text.contains("\n00100  7 500 allow ip from any to any\n"), "{text}");
        assert!(text.contains("\n65535 12   9 deny ip from any to any\n"), "{text}");
        assert!(
            text.contains(
                "queue 1: 3 frames, 2 passed, 0 dropped, 0 replaced, 1 lost, high-water 0, 1 overdue\n"
            ),
            "{text}"
        );
        assert!(text.contains("20 packets/s (0.500000 s)"), "{text}");
    }

    #[test]
    fn a_live_engine_says_nothing_of_captures() {
        let text = Report { captures: 0, seconds: 0.0, ..report() }.to_string();
        assert!(text.starts_with("received      10 packets, 640 bytes\n"), "{text}");
        for word in ["capture", "conversations", "speed"] {
            assert!(!text.contains(word), "{word}: {text}");
        }
    }

    #[test]
    fn json_has_the_documented_keys_and_no_others() {
        let value = serde_json::to_value(report()).unwrap();
        let keys = |v: &serde_json::Value| {
            let mut keys: Vec<_> = v.as_object().unwrap().keys().cloned().collect();
            keys.sort();
            keys.join(" ")
        };
        assert_eq!(
            keys(&value),
            "bytes conversations dropped dropped_by inspected packets passed queues rejected replies rules seconds states"
        );
        assert_eq!(
            keys(&value["queues"][0]),
            "by_flow dropped frames handed_on lost lost_by no_room number passed probes redelivered replaced stalled stalls takeovers"
        );
        assert_eq!(
            keys(&value["queues"][0]["lost_by"]),
            "copy_budget died garbage no_listener overdue overload"
        );
        assert_eq!(keys(&value["rules"][0]), "bytes number packets set text");
        assert_eq!(
            keys(&value["states"]),
            "created evicted expired left max nearly_full nearly_full_events parents parents_max peak preempted refused \
             related removed unfit unreplied waiting"
        );
        assert_eq!(
            keys(&value["states"]["refused"]),
            "first_syn full invalid limits_full over_limit over_rate over_source"
        );
        assert_eq!(keys(&value["conversations"]), "tcp udp");
        assert_eq!(keys(&value["replies"]), "limited sent silent unsent");
    }

    #[test]
    fn packets_without_their_state_are_listed_by_reason() {
        let counters = state::Counters { evicted: 9, full: 5, over_source: 2, ..report().states.counters };
        let states = States { counters, ..report().states };
        let text = Report { states, ..report() }.to_string();
        let line = |head: &str| text.lines().find(|line| line.starts_with(head)).map(str::to_owned);
        assert!(line("states").is_some_and(|line| line.ends_with("1 left, 9 evicted")), "{text}");
        assert!(line("no state").is_some_and(|line| line.ends_with("5 full, 2 over source")), "{text}");
        assert!(!report().to_string().contains("no state"));
    }
}
