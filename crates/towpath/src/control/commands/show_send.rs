//! `towpath ctl show send`: zero-copy sends.

use std::collections::BTreeMap;
use std::fmt::Write;

use clap::Args;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use towpath_send::{Counters, Histogram, Mode, PlainCause, PollSender, Reason, Time};

use super::super::command::{Context, Handled, Query, Reply};
use super::super::protocol::{Code, Refusal};
use super::super::text::table;

/// Zero-copy sends: the long replies of the muxes
///
/// The limits, why bytes were sent with a copy, notification ranges, how long buffers were pinned, and why modes switched. Then one line
/// per connection that had a long reply: bytes sent without a copy, bytes that the kernel copied, bytes sent with a copy,
/// notification numbers used and outstanding, bytes pinned and their limit, ENOBUFS errors.
#[derive(Debug, Default, Args, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ShowSend {}

impl Query for ShowSend {
    const WORDS: &'static str = "show send";
    const ANSWER: &'static str = "send";

    fn handle(self, context: &Context<'_>) -> Handled {
        context.query(
            |target| target.pool().map(|pool| pool.send()),
            |parts| {
                let mut all = parts.into_iter().flatten();
                let Some(mut send) = all.next() else {
                    let message = "this engine has no multiplexor and sends no messages; `towpath mux` does";
                    return Err(Refusal::new(Code::NotFound, message));
                };
                send.others.extend(all);
                Ok(Reply::Answer(Self::ANSWER, json!({ "send": send })))
            },
        )
    }

    fn text(&self, answer: &Value) -> String {
        Send::deserialize(&answer["send"]).map_or_else(|error| format!("send: {error}\n"), |send| show(&send))
    }
}

/// Maximum number of connections in the list.
const SENDERS: usize = 200;

/// The zero-copy senders of a mux.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Send {
    /// The mux's name, if there are several.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub name: String,
    /// Configured mode: adaptive, zerocopy or plain.
    pub choice: String,
    /// RLIMIT_MEMLOCK of the user, in bytes; null if unlimited.
    pub locked_limit: Option<u64>,
    /// Bytes of it that the senders use in total; 0 if unlimited.
    pub locked_used: u64,
    /// net.core.optmem_max, in bytes.
    pub optmem: u64,
    /// Connections that ever had a long reply.
    pub connections: u64,
    /// Ended connections with outstanding completions.
    pub lingering: u64,
    /// Of these, connections that were reset because the peer acknowledged nothing for a minute.
    #[serde(default)]
    pub stalled: u64,
    /// Of these, connections that were reset because too many lingered.
    #[serde(default)]
    pub crowded: u64,
    /// Buffers that the kernel may still read but whose completion will not be reported.
    pub quarantined: u64,
    /// Bytes sent from the worker's shared memory, without a copy by the mux.
    #[serde(default)]
    pub lent_bytes: u64,
    /// Counters of all connections, including closed ones.
    pub totals: Totals,
    /// Open connections.
    pub senders: Vec<Sender>,
    /// Number of open connections that are not listed; they pin the least.
    pub senders_left_out: u64,
    /// The senders of the engine's other muxes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub others: Vec<Send>,
}

/// Counters; see docs/book/src/reference/send.md.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Totals {
    /// Bytes sent with MSG_ZEROCOPY.
    pub zerocopy_bytes: u64,
    /// Of these, bytes that the kernel reported as copied.
    pub copied_bytes: u64,
    /// Bytes sent without MSG_ZEROCOPY, by cause.
    pub plain_bytes: BTreeMap<String, u64>,
    /// Calls with MSG_ZEROCOPY; each uses one notification number.
    pub numbers: u64,
    /// Numbers that the kernel reported as completed.
    pub completed: u64,
    /// Numbers whose connection was closed first: numbers = completed + abandoned + outstanding.
    #[serde(default)]
    pub abandoned: u64,
    /// Completed numbers in ranges with SO_EE_CODE_ZEROCOPY_COPIED.
    pub copied: u64,
    /// Calls without MSG_ZEROCOPY.
    pub plain_calls: u64,
    /// Notifications read.
    pub notifications: u64,
    /// Numbers per notification.
    pub per_notification: Quantiles,
    /// Microseconds from the call to its completion.
    pub pin_time_us: Quantiles,
    /// ENOBUFS errors.
    pub no_buffers: u64,
    /// Mode switches, by reason.
    pub switches: BTreeMap<String, u64>,
    /// Numbers reported twice. Not 0 means a bug.
    pub duplicates: u64,
    /// Reported numbers that were never used. Not 0 means a bug.
    pub unknown: u64,
    /// Notifications that did not start at the oldest outstanding number.
    #[serde(default)]
    pub out_of_order: u64,
    /// Isolated probes that were not copied, and that were copied.
    #[serde(default)]
    pub probes: [u64; 2],
    /// Buffers that changed between the call and the completion: the worker wrote to a sent reply. Counted only with `--send-check`.
    #[serde(default)]
    pub tampered: u64,
    /// Error queue entries of other kinds that were discarded.
    #[serde(default)]
    pub events_lost: u64,
}

/// Quantiles of a power-of-two histogram, as upper bounds of buckets; null if the histogram is empty.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)] // quantiles
pub struct Quantiles {
    pub p50: Option<u64>,
    pub p99: Option<u64>,
    pub max: Option<u64>,
}

/// A connection.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sender {
    /// The peer's address.
    pub peer: String,
    /// Current mode: copying, probing or zerocopy.
    pub mode: String,
    /// Why zero copy cannot be used on this connection; null if it can.
    pub unarmed: Option<String>,
    /// Outstanding notification numbers.
    pub outstanding: u64,
    /// Bytes in flight.
    pub pinned: u64,
    /// Limit of bytes in flight.
    pub budget: u64,
    /// Bytes that wait for room in the socket.
    pub unsent: u64,
    /// The peer has not acknowledged data for a long time; short messages are copied.
    pub stuck: bool,
    /// Counters of this connection.
    pub totals: Totals,
}

impl Send {
    /// Limits the list to the size of a control message.
    pub(crate) fn bound(&mut self) {
        self.senders.sort_by_key(|sender| std::cmp::Reverse(sender.pinned));
        self.senders_left_out = self.senders.len().saturating_sub(SENDERS) as u64;
        self.senders.truncate(SENDERS);
    }
}

impl Totals {
    /// Converts the counters of a sender.
    pub fn of(counters: &Counters) -> Self {
        let named = |names: Vec<&'static str>, counts: &[u64]| {
            let pairs = names.into_iter().zip(counts).filter(|(_, count)| **count > 0);
            pairs.map(|(name, count)| (name.to_owned(), *count)).collect()
        };
        Self {
            zerocopy_bytes: counters.zerocopy_bytes,
            copied_bytes: counters.copied_bytes,
            plain_bytes: named(PlainCause::ALL.map(PlainCause::name).into(), &counters.plain),
            numbers: counters.numbers,
            completed: counters.completed,
            abandoned: counters.abandoned,
            copied: counters.copied,
            plain_calls: counters.plain_calls,
            notifications: counters.notifications,
            per_notification: Quantiles::of(&counters.per_notification),
            pin_time_us: Quantiles::of(&counters.pin_time),
            no_buffers: counters.no_buffers,
            switches: named(Reason::ALL.map(Reason::name).into(), &counters.switches),
            duplicates: counters.duplicates,
            unknown: counters.unknown,
            out_of_order: counters.out_of_order,
            probes: counters.probes,
            tampered: counters.tampered,
            events_lost: counters.events_lost,
        }
    }
}

impl Quantiles {
    fn of(histogram: &Histogram) -> Self {
        let [p50, p99, max] = [0.5, 0.99, 1.0].map(|share| histogram.quantile(share));
        Self { p50, p99, max }
    }
}

impl Sender {
    /// Reads the state of a sender.
    pub fn of(peer: &str, sender: &PollSender, now: Time) -> Self {
        let mode = match sender.mode() {
            Mode::Copying => "copying",
            Mode::Probing => "probing",
            Mode::Zerocopy => "zerocopy",
        };
        Self {
            peer: peer.to_owned(),
            mode: mode.to_owned(),
            unarmed: sender.unarmed().map(|why| why.to_string()),
            outstanding: sender.outstanding() as u64,
            pinned: sender.pinned(),
            budget: sender.budget(),
            unsent: sender.unsent(),
            stuck: sender.is_stuck(now),
            totals: Totals::of(sender.counters()),
        }
    }
}

/// Formats the output of `towpath ctl show send`.
fn show(send: &Send) -> String {
    let name = if send.name.is_empty() { String::new() } else { format!("{}: ", send.name) };
    let mut text = format!(
        "{name}{}; {} connections had long answers, {} are there, {} linger ({} were reset), {} buffers in quarantine\n",
        send.choice,
        send.connections,
        send.senders.len() as u64 + send.senders_left_out,
        send.lingering,
        send.stalled + send.crowded,
        send.quarantined
    );
    let limit =
        send.locked_limit.map_or("no limit".to_owned(), |limit| format!("{} of {limit}", send.locked_used));
    let _ = writeln!(text, "locked memory: {limit}; option memory: {} for each socket", send.optmem);
    let words = |map: &BTreeMap<String, u64>| {
        let words: Vec<_> = map.iter().map(|(name, count)| format!("{name} {count}")).collect();
        if words.is_empty() { "-".to_owned() } else { words.join(", ") }
    };
    let quantiles = |quantiles: &Quantiles| match (quantiles.p50, quantiles.p99) {
        (Some(p50), Some(p99)) => format!("< {p50}, p99 < {p99}"),
        _ => "-".to_owned(),
    };
    let totals = &send.totals;
    let _ = writeln!(text, "from workers' frames: {} (bytes)", send.lent_bytes);
    let _ = writeln!(text, "sent plain: {} (bytes)", words(&totals.plain_bytes));
    let _ = writeln!(text, "numbers per notification: {}", quantiles(&totals.per_notification));
    let _ = writeln!(text, "pinned for: {} us", quantiles(&totals.pin_time_us));
    let _ = writeln!(text, "modes switched: {}", words(&totals.switches));
    let [not_copied, copied] = totals.probes;
    let _ = writeln!(text, "probes: {not_copied} not copied, {copied} copied");
    if totals.tampered > 0 {
        let _ = writeln!(text, "changed after they were sent: {} answers", totals.tampered);
    }
    let heads =
        ["Peer", "Mode", "Zerocopy", "Copied", "Plain", "Numbers", "Out", "Pinned", "Budget", "ENOBUFS"];
    let mut rows = vec![heads.map(str::to_owned).to_vec()];
    let mut push = |peer: &str, mode: &str, totals: &Totals, [outstanding, pinned, budget]: [String; 3]| {
        let plain: u64 = totals.plain_bytes.values().sum();
        let counts =
            [totals.zerocopy_bytes, totals.copied_bytes, plain, totals.numbers].map(|n| n.to_string());
        let mut row = vec![peer.to_owned(), mode.to_owned()];
        row.extend(counts);
        row.extend([outstanding, pinned, budget, totals.no_buffers.to_string()]);
        rows.push(row);
    };
    let out = totals.numbers - totals.completed - totals.abandoned;
    push("all", "", totals, [out.to_string(), "-".to_owned(), "-".to_owned()]);
    for sender in &send.senders {
        let mode = match (&sender.unarmed, sender.stuck) {
            (Some(_), _) => "unarmed",
            (None, true) => "stuck",
            (None, false) => &sender.mode,
        };
        let counts = [sender.outstanding, sender.pinned, sender.budget].map(|n| n.to_string());
        push(&sender.peer, mode, &sender.totals, counts);
    }
    text += &table(&rows);
    if send.senders_left_out > 0 {
        let _ = writeln!(text, "and {} connections more", send.senders_left_out);
    }
    for other in &send.others {
        text += "\n";
        text += &show(other);
    }
    text
}
