//! The final report of a run, as text or as one JSON object.

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
    /// Bytes of these frames on the wire.
    pub bytes: u64,
    /// Packets that were sent out.
    pub passed: u64,
    /// Packets that a rule, an inspector or a full table dropped.
    pub dropped: u64,
    /// Dropped packets by reason: the names of [`DropReason`](towpath_engine::DropReason).
    pub dropped_by: BTreeMap<String, u64>,
    /// Packets that a rule or an inspector rejected.
    pub rejected: u64,
    /// Replies to rejected packets.
    pub replies: Replies,
    /// Packets that were handed to at least one inspector.
    pub inspected: u64,
    /// Conversations seen.
    pub conversations: Conversations,
    /// Dynamic states.
    pub states: States,
    /// States restored from a snapshot (`--states-in`); they are included in `states.created`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub restored: Option<Restored>,
    /// Every rule with its counters, in order.
    pub rules: Vec<Rule>,
    /// Every queue with its counters, by number.
    pub queues: Vec<Queue>,
    /// Wall-clock seconds from reading the first packet to deciding the last one.
    pub seconds: f64,
    /// Time span of the captures.
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

/// Replies to rejected packets. `rejected = sent + silent + limited + unsent`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Replies {
    /// Sent, or written to the file of `--replies`.
    pub sent: u64,
    /// No reply was due: the packet must not be answered, or its fragments share one reply.
    pub silent: u64,
    /// Not sent: the port's limit of 200 per second was reached.
    pub limited: u64,
    /// Not sent: the port cannot send.
    pub unsent: u64,
}

/// Dynamic states over the run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct States {
    /// States created, including those of a snapshot.
    pub created: u64,
    /// Maximum number of states at one time.
    pub peak: u64,
    /// States that exist after the last packet was decided.
    pub left: u64,
    /// Of these, states without a reply, or half-open (TCP, SCTP: the reply is not acknowledged yet). Under a flood, most are.
    #[serde(default)]
    pub unreplied: u64,
    /// Slots of deleted states that cannot be reused until all threads have released them.
    #[serde(default)]
    pub waiting: u64,
    /// `dyn_max`: the maximum number of states, including `waiting`.
    #[serde(default)]
    pub max: u64,
    /// Whether the number reached 9/10 of `max` and has not fallen below 8/10 since.
    #[serde(default)]
    pub nearly_full: bool,
    /// States that expired. `created = left + expired + removed + evicted`.
    #[serde(default)]
    pub expired: u64,
    /// States that were removed, with their rule or individually.
    #[serde(default)]
    pub removed: u64,
    /// States that were evicted for new ones (`dyn_evict`).
    #[serde(default)]
    pub evicted: u64,
    /// Packets dropped because their state could not be created.
    #[serde(default)]
    pub refused: RefusedStates,
    /// Lookups that ignored the flow's state because the packet does not fit the connection (`strict`). The following rules decide
    /// the packet.
    #[serde(default)]
    pub unfit: u64,
}

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

/// Why states could not be created; counts packets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RefusedStates {
    /// The table had `dyn_max` states.
    pub full: u64,
    /// The count of a `limit` was reached.
    pub over_limit: u64,
    /// The rate of a `limit` was reached.
    pub over_rate: u64,
    /// The table of limit counters had `dyn_parent_max` entries.
    pub limits_full: u64,
    /// The source had `dyn_source_max` states.
    pub over_source: u64,
    /// The packet does not fit its connection or does not start one (`strict`).
    pub invalid: u64,
    /// First SYNs, which the client must repeat (`dyn_first_syn`).
    pub first_syn: u64,
}

impl RefusedStates {
    /// Returns the names of the reasons and their counts.
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
    /// Reads the counters of `states`.
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

/// A queue and its counters. `frames = passed + dropped + replaced + lost` at the end of a run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Queue {
    /// Queue number.
    pub number: u16,
    /// Frames that the rules sent to the queue.
    pub frames: u64,
    /// Frames that the inspector passed unchanged (for a tee: that it took).
    pub passed: u64,
    /// Frames that the inspector dropped or rejected.
    pub dropped: u64,
    /// Frames that the inspector passed with a replaced payload.
    pub replaced: u64,
    /// Frames decided without an inspector: it died, was detached, too slow or overloaded, or there was none.
    pub lost: u64,
    /// Why frames were lost.
    pub lost_by: LostBy,
    /// Frames handed to another queue because this one had no room; they do not count in `frames`.
    pub handed_on: u64,
    /// Frames redelivered to another inspector of the queue because theirs was gone; each counts once.
    pub redelivered: u64,
    /// Packets decided by a flow verdict. They did not reach an inspector and do not count in `frames`.
    pub by_flow: u64,
    /// Frames that inspectors hold now.
    #[serde(skip)]
    pub open: u64,
    /// Maximum number of frames that the inspector held at one time.
    #[serde(skip)]
    pub high_water: u64,
    /// The first failure, if any.
    #[serde(skip)]
    pub trouble: Option<String>,
}

/// Why frames of a queue were lost. The sum is [`Queue::lost`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LostBy {
    /// The inspector missed the deadline, or still had the frame when the engine stopped.
    pub overdue: u64,
    /// The inspector's verdict was invalid.
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

/// Returns the drop reasons that occurred, by name.
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
    /// Returns the report of one engine. The caller adds the rules, the wall-clock time and the number of captures.
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

    /// Adds the report of another thread of the same engine. The threads share one state table, so its counters are not summed.
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
    /// Adds the counters of another thread.
    pub fn add(&mut self, other: Self) {
        self.sent += other.sent;
        self.silent += other.silent;
        self.limited += other.limited;
        self.unsent += other.unsent;
    }
}

impl Queue {
    /// Adds another thread's counters of the same queue.
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
        // A live run has neither captures nor a defined duration, so there is no rate.
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
