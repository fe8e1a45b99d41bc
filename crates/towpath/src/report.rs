//! What a replay tells its user at the end: as text for people, as one JSON object for programs.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use towpath_gate::state;
use towpath_gate::{self, RuleInfo};

use towpath_engine as engine;

/// The report of one run. Serialised, it is the object that `towpath replay --json` prints.
///
/// `packets = passed + dropped + rejected` holds in every report.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Report {
    /// Frames read from the captures.
    pub packets: u64,
    /// Their bytes on the wire.
    pub bytes: u64,
    /// Packets that went out.
    pub passed: u64,
    /// Packets that a rule, an inspector or a full table dropped.
    pub dropped: u64,
    /// Dropped packets by reason: the names of [`DropReason`](towpath_engine::DropReason).
    pub dropped_by: BTreeMap<String, u64>,
    /// Packets that a rule or an inspector rejected.
    pub rejected: u64,
    /// What became of the answers to them.
    pub replies: Replies,
    /// Packets that were handed to at least one inspector.
    pub inspected: u64,
    /// Conversations seen.
    pub conversations: Conversations,
    /// Dynamic states.
    pub states: States,
    /// Those of a snapshot (`--states-in`), which count as made.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub restored: Option<Restored>,
    /// Every rule with its counters, in order.
    pub rules: Vec<Rule>,
    /// Every queue with its counters, by number.
    pub queues: Vec<Queue>,
    /// Wall-clock seconds from the first packet read to the last one decided.
    pub seconds: f64,
    /// How much time the captures span.
    #[serde(skip)]
    pub span: Duration,
    /// Capture files read.
    #[serde(skip)]
    pub captures: usize,
}

/// Conversations by protocol.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Conversations {
    /// TCP.
    pub tcp: u64,
    /// UDP.
    pub udp: u64,
}

/// Answers to rejected packets. `rejected = sent + silent + limited + unsent`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Replies {
    /// Sent, or written to the file of `--replies`.
    pub sent: u64,
    /// None was due: the packet is one that may not be answered, or its fragments were answered as one.
    pub silent: u64,
    /// Not sent, because the port had sent 200 within a second.
    pub limited: u64,
    /// Not sent, because the port cannot.
    pub unsent: u64,
}

/// Dynamic states over the run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct States {
    /// States made, those of a snapshot included.
    pub created: u64,
    /// Most states at one time.
    pub peak: u64,
    /// States alive when the last packet had been decided.
    pub left: u64,
    /// Of these, how many were never replied to, or have not heard the reply yet (half-open TCP and SCTP): under a flood, most.
    #[serde(default)]
    pub unreplied: u64,
    /// Places of states that are gone, until every thread is known to have let go of them.
    #[serde(default)]
    pub waiting: u64,
    /// `dyn_max`: how many there may be, those that wait included.
    #[serde(default)]
    pub max: u64,
    /// Whether they have come to 9/10 of that, and not fallen below 8/10 since.
    #[serde(default)]
    pub nearly_full: bool,
    /// States whose time was over. `created = left + expired + removed + evicted`.
    #[serde(default)]
    pub expired: u64,
    /// States that were removed, with their rule or by themselves.
    #[serde(default)]
    pub removed: u64,
    /// States that had to make room (`dyn_evict`).
    #[serde(default)]
    pub evicted: u64,
    /// Packets that were dropped because they could not have their state.
    #[serde(default)]
    pub refused: RefusedStates,
    /// How often a packet that looked for a state did not have that of its flow, as it does not fit into the connection
    /// (`strict`). The rules behind say what becomes of it.
    #[serde(default)]
    pub unfit: u64,
}

/// What became of a snapshot's states.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Restored {
    /// States of rules that are here too.
    pub states: u64,
    /// States of other rules, which belong to the default rule's companion now.
    pub companion: u64,
    /// States that were here already.
    pub existing: u64,
    /// States for which there was no room.
    pub refused: u64,
}

impl From<towpath_gate::Restored> for Restored {
    fn from(restored: towpath_gate::Restored) -> Self {
        let towpath_gate::Restored { states, default_dynamic: companion, existing, refused, .. } = restored;
        Self { states, companion, existing, refused }
    }
}

/// Why packets could not have their state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RefusedStates {
    /// There were `dyn_max`.
    pub full: u64,
    /// Over the number of a `limit`.
    pub over_limit: u64,
    /// Over the rate of a `limit`.
    pub over_rate: u64,
    /// There were `dyn_parent_max` entries that limits count in.
    pub limits_full: u64,
    /// The source had `dyn_source_max`.
    pub over_source: u64,
    /// They did not fit into their connection, or began none (`strict`).
    pub invalid: u64,
    /// First SYNs, which have to be repeated (`dyn_first_syn`).
    pub first_syn: u64,
}

impl RefusedStates {
    /// The reasons with their counts.
    pub fn rows(&self) -> [(&'static str, u64); 7] {
        [
            ("states full", self.full),
            ("over limit", self.over_limit),
            ("over rate", self.over_rate),
            ("limits full", self.limits_full),
            ("over source", self.over_source),
            ("invalid", self.invalid),
            ("first SYN", self.first_syn),
        ]
    }
}

impl States {
    /// The counters of `states`.
    pub fn of(states: &state::States) -> Self {
        let counters = states.counters();
        Self {
            created: counters.created,
            peak: counters.peak,
            left: counters.now,
            unreplied: counters.unreplied,
            waiting: counters.waiting,
            max: counters.max,
            nearly_full: states.is_nearly_full(),
            expired: counters.expired,
            removed: counters.removed,
            evicted: counters.evicted,
            unfit: counters.unfit,
            refused: RefusedStates {
                full: counters.full,
                over_limit: counters.over_limit,
                over_rate: counters.over_rate,
                limits_full: counters.parents_full,
                over_source: counters.over_source,
                invalid: counters.invalid,
                first_syn: counters.first_syn,
            },
        }
    }
}

/// One rule's line.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rule {
    /// Rule number.
    pub number: u32,
    /// Set, 0..31.
    pub set: u8,
    /// Packets its action ran for.
    pub packets: u64,
    /// Their bytes.
    pub bytes: u64,
    /// The rule, as ipfw prints it.
    pub text: String,
}

/// One queue's line. `frames = passed + dropped + replaced + lost` at the end of a run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Queue {
    /// Queue number.
    pub number: u16,
    /// Frames that the rules sent to the queue.
    pub frames: u64,
    /// Frames that the inspector let through unchanged (for a tee: that it took).
    pub passed: u64,
    /// Frames that the inspector dropped or rejected.
    pub dropped: u64,
    /// Frames that the inspector let through with a payload of its own.
    pub replaced: u64,
    /// Frames that no inspector decided: they died, were detached, too slow, overloaded, or there is none.
    pub lost: u64,
    /// Why frames were lost.
    pub lost_by: LostBy,
    /// Frames that went to another queue because this one had no room; they do not count here.
    pub handed_on: u64,
    /// Frames that went to another inspector of the queue because theirs was gone; each counts once.
    pub redelivered: u64,
    /// Packets that a verdict for their flow decided; no inspector got them, and they are not frames.
    pub by_flow: u64,
    /// Frames that inspectors have now.
    #[serde(skip)]
    pub open: u64,
    /// Most frames that the inspector held at one time.
    #[serde(skip)]
    pub high_water: u64,
    /// What went wrong, if something did.
    #[serde(skip)]
    pub trouble: Option<String>,
}

/// Why frames of a queue were lost. The sum is [`Queue::lost`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LostBy {
    /// The inspector let the deadline pass, or still had it when the engine stopped.
    pub overdue: u64,
    /// The inspector's answer had no meaning.
    pub garbage: u64,
    /// The inspector was gone.
    pub died: u64,
    /// The inspector had no room.
    pub overload: u64,
    /// There was no inspector.
    pub no_listener: u64,
}

impl From<engine::ReplyStats> for Replies {
    fn from(stats: engine::ReplyStats) -> Self {
        let engine::ReplyStats { sent, silent, limited, unsent } = stats;
        Self { sent, silent, limited, unsent }
    }
}

impl From<engine::QueueSnapshot> for Queue {
    fn from(queue: engine::QueueSnapshot) -> Self {
        let engine::QueueSnapshot { number, stats, trouble, .. } = queue;
        Self {
            number,
            frames: stats.frames,
            passed: stats.passed,
            dropped: stats.dropped,
            replaced: stats.replaced,
            lost: stats.lost(),
            lost_by: LostBy {
                overdue: stats.overdue,
                garbage: stats.invalid_verdict,
                died: stats.inspector_died,
                overload: stats.queue_full,
                no_listener: stats.no_inspector,
            },
            handed_on: stats.handed_on,
            redelivered: stats.redelivered,
            by_flow: stats.by_flow,
            open: stats.open,
            high_water: stats.high_water,
            trouble,
        }
    }
}

/// The drop reasons that occurred, by name.
pub fn dropped_by(drops: &engine::Drops) -> BTreeMap<String, u64> {
    drops.iter().map(|(reason, count)| (reason.name().to_owned(), count)).collect()
}

fn add_dropped_by(mut all: BTreeMap<String, u64>, other: BTreeMap<String, u64>) -> BTreeMap<String, u64> {
    for (reason, count) in other {
        *all.entry(reason).or_default() += count;
    }
    all
}

impl Report {
    /// The report of one engine. The caller adds the rules, the wall-clock time and the number of captures.
    pub fn of<E: engine::PacketIo>(engine: &mut engine::Engine<E>) -> Self {
        let engine::Summary { totals, replies, conversations, queues, span } = engine.summary();
        let stats = totals.stats;
        Self {
            packets: stats.packets,
            bytes: stats.bytes,
            passed: stats.passed,
            dropped: totals.dropped(),
            dropped_by: dropped_by(&totals.drops),
            rejected: stats.rejected,
            inspected: stats.inspected,
            replies: replies.into(),
            conversations: Conversations { tcp: conversations.tcp, udp: conversations.udp },
            states: States::of(engine.states()),
            queues: queues.into_iter().map(Queue::from).collect(),
            span,
            ..Self::default()
        }
    }

    /// Adds what another thread of the same engine did. States are the same for all.
    pub fn add(&mut self, other: &Self) {
        self.packets += other.packets;
        self.bytes += other.bytes;
        self.passed += other.passed;
        self.dropped += other.dropped;
        self.rejected += other.rejected;
        self.inspected += other.inspected;
        self.dropped_by = add_dropped_by(std::mem::take(&mut self.dropped_by), other.dropped_by.clone());
        self.replies.add(other.replies);
        self.states = other.states;
        self.span = self.span.max(other.span);
        for queue in &other.queues {
            match self.queues.iter_mut().find(|own| own.number == queue.number) {
                Some(own) => own.add(queue),
                None => self.queues.push(queue.clone()),
            }
        }
    }
}

impl Replies {
    /// Adds those of another thread.
    pub fn add(&mut self, other: Self) {
        self.sent += other.sent;
        self.silent += other.silent;
        self.limited += other.limited;
        self.unsent += other.unsent;
    }
}

impl Queue {
    /// Adds what another thread's part of the queue did.
    pub fn add(&mut self, other: &Self) {
        self.frames += other.frames;
        self.passed += other.passed;
        self.dropped += other.dropped;
        self.replaced += other.replaced;
        self.lost += other.lost;
        self.lost_by.overdue += other.lost_by.overdue;
        self.lost_by.garbage += other.lost_by.garbage;
        self.lost_by.died += other.lost_by.died;
        self.lost_by.overload += other.lost_by.overload;
        self.lost_by.no_listener += other.lost_by.no_listener;
        self.handed_on += other.handed_on;
        self.redelivered += other.redelivered;
        self.by_flow += other.by_flow;
        self.open += other.open;
        self.high_water = self.high_water.max(other.high_water);
        if self.trouble.is_none() {
            self.trouble.clone_from(&other.trouble);
        }
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
        // Live ports have no captures, and no end by which a speed could be told.
        let is_replay = self.captures > 0;
        let (packets, bytes) = (count(self.packets, "packet"), count(self.bytes, "byte"));
        if is_replay {
            let captures = count(self.captures as u64, "capture");
            let span = self.span.as_secs_f64();
            line(f, "read", &format!("{packets} in {captures}, {bytes}, spanning {span:.1} s"))?;
        } else {
            line(f, "received", &format!("{packets}, {bytes}"))?;
        }
        line(f, "passed", &self.passed.to_string())?;
        line(f, "dropped", &self.dropped.to_string())?;
        if !self.dropped_by.is_empty() {
            let reasons: Vec<_> =
                self.dropped_by.iter().map(|(reason, count)| format!("{count} {reason}")).collect();
            line(f, "  by reason", &reasons.join(", "))?;
        }
        line(f, "rejected", &self.rejected.to_string())?;
        let Replies { sent, silent, limited, unsent } = self.replies;
        if self.rejected > 0 {
            line(
                f,
                "replies",
                &format!("{sent} sent, {silent} not due, {limited} over the rate, {unsent} unsent"),
            )?;
        }
        line(f, "inspected", &self.inspected.to_string())?;
        if is_replay {
            let Conversations { tcp, udp } = self.conversations;
            line(f, "conversations", &format!("{tcp} tcp, {udp} udp"))?;
        }
        let States { created, peak, left, evicted, refused, .. } = self.states;
        let mut states = format!("{created} created, {peak} peak, {left} left");
        if evicted > 0 {
            states += &format!(", {evicted} evicted");
        }
        line(f, "states", &states)?;
        if let Some(Restored { states, companion, existing, refused }) = self.restored {
            let text = format!("{} restored", states + companion);
            let text = format!(
                "{text} ({companion} of rules that are not here), {existing} existing, {refused} refused"
            );
            line(f, "snapshot", &text)?;
        }
        let refused: Vec<_> = refused.rows().into_iter().filter(|(_, count)| *count > 0).collect();
        if !refused.is_empty() {
            let reasons: Vec<_> = refused.iter().map(|(why, count)| format!("{count} {why}")).collect();
            line(f, "no state", &reasons.join(", "))?;
        }
        if is_replay {
            let rate = if self.seconds > 0.0 { self.packets as f64 / self.seconds } else { 0.0 };
            line(f, "speed", &format!("{rate:.0} packets/s ({:.6} s)", self.seconds))?;
        }
        if !self.queues.is_empty() {
            writeln!(f)?;
        }
        for queue in &self.queues {
            writeln!(f, "{queue}")?;
        }
        writeln!(f)?;
        write_rules(f, &self.rules)
    }
}

impl fmt::Display for Queue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "queue {}: {}, {} passed, {} dropped, {} replaced, {} lost, high-water {}",
            self.number,
            count(self.frames, "frame"),
            self.passed,
            self.dropped,
            self.replaced,
            self.lost,
            self.high_water
        )?;
        let LostBy { overdue, garbage, died, overload, no_listener } = self.lost_by;
        let more = [
            (overdue, "overdue"),
            (garbage, "answered with garbage"),
            (died, "left by the dead"),
            (overload, "without room"),
            (no_listener, "without inspector"),
            (self.handed_on, "handed on"),
            (self.redelivered, "redelivered"),
            (self.by_flow, "decided by flow"),
        ];
        for (n, what) in more.into_iter().filter(|(n, _)| *n > 0) {
            write!(f, ", {n} {what}")?;
        }
        match &self.trouble {
            Some(trouble) => write!(f, "; {trouble}"),
            None => Ok(()),
        }
    }
}

/// The rules in the format of `ipfw show`: number, packets and bytes right-aligned, the rule.
fn write_rules(f: &mut fmt::Formatter<'_>, rules: &[Rule]) -> fmt::Result {
    let width = |value: fn(&Rule) -> u64| rules.iter().map(value).max().unwrap_or(0).to_string().len();
    let packets = width(|rule| rule.packets);
    let bytes = width(|rule| rule.bytes);
    for rule in rules {
        writeln!(f, "{:05} {:>packets$} {:>bytes$} {}", rule.number, rule.packets, rule.bytes, rule.text)?;
    }
    Ok(())
}

fn count(n: u64, noun: &str) -> String {
    let s = if n == 1 { "" } else { "s" };
    format!("{n} {noun}{s}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> Report {
        Report {
            packets: 10,
            bytes: 640,
            passed: 7,
            dropped: 2,
            rejected: 1,
            inspected: 3,
            conversations: Conversations { tcp: 2, udp: 1 },
            states: States { created: 3, peak: 2, left: 1, ..States::default() },
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
            queues: vec![Queue { number: 1, frames: 3, passed: 2, lost: 1, ..Queue::default() }],
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
            text.contains("queue 1: 3 frames, 2 passed, 0 dropped, 0 replaced, 1 lost, high-water 0\n"),
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
            "by_flow dropped frames handed_on lost lost_by number passed redelivered replaced"
        );
        assert_eq!(keys(&value["queues"][0]["lost_by"]), "died garbage no_listener overdue overload");
        assert_eq!(keys(&value["rules"][0]), "bytes number packets set text");
        assert_eq!(
            keys(&value["states"]),
            "created evicted expired left max nearly_full peak refused removed unfit unreplied waiting"
        );
        assert_eq!(keys(&value["conversations"]), "tcp udp");
        assert_eq!(keys(&value["replies"]), "limited sent silent unsent");
    }

    #[test]
    fn packets_without_their_state_are_told_by_reason() {
        let refused = RefusedStates { full: 5, over_source: 2, ..RefusedStates::default() };
        let states = States { evicted: 9, refused, ..report().states };
        let text = Report { states, ..report() }.to_string();
        let line = |head: &str| text.lines().find(|line| line.starts_with(head)).map(str::to_owned);
        assert!(line("states").is_some_and(|line| line.ends_with("1 left, 9 evicted")), "{text}");
        assert!(
            line("no state").is_some_and(|line| line.ends_with("5 states full, 2 over source")),
            "{text}"
        );
        assert!(!report().to_string().contains("no state"));
    }
}
