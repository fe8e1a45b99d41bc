//! `towpath ctl show send`: zero-copy sends.

use std::fmt::Write;

use clap::Args;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use towpath_metrics::Metric;
use towpath_send::{Counters, Distributions, Histogram, Mode, PollSender, Time};

use super::super::command::{Context, Handled, Query, Reply};
use super::super::protocol::{Code, Refusal};
use super::super::text::{cell, items, nonzero, table};
use crate::metrics::Layout;

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
                Ok(Reply::Answer(Self::ANSWER, json!({ "send": send.object() })))
            },
        )
    }

    fn text(&self, answer: &Value) -> String {
        let send = &answer["send"];
        let all = std::iter::once(send).chain(items(&send["others"]));
        all.map(show).collect::<Vec<_>>().join("\n")
    }
}

/// Maximum number of connections in the list.
const SENDERS: usize = 200;

/// The counters of a sender. Causes and reasons without bytes or switches are left out.
const COUNTERS: Layout = Layout {
    families: &[("plain", "plain_bytes"), ("switches", "switches")],
    renamed: &[],
    moved: &[],
    hidden: &["probes_not_copied", "probes_copied"],
};

/// The zero-copy senders of a mux.
#[derive(Clone, Debug, Default)]
pub struct Send {
    /// The mux's name, if there are several.
    pub name: String,
    /// Configured mode: adaptive, zerocopy or plain.
    pub choice: &'static str,
    /// RLIMIT_MEMLOCK of the user, in bytes; `None` if unlimited.
    pub locked_limit: Option<u64>,
    /// Locked memory that the senders use in total, in bytes; 0 if unlimited.
    pub locked_used: u64,
    /// net.core.optmem_max, in bytes.
    pub optmem: u64,
    /// Connections that ever had a long reply.
    pub connections: u64,
    /// Ended connections with outstanding completions.
    pub lingering: u64,
    /// Of these, connections that were reset because the peer acknowledged nothing for a minute.
    pub stalled: u64,
    /// Of these, connections that were reset because too many lingered.
    pub crowded: u64,
    /// Buffers that the kernel may still read but whose completion will not be reported.
    pub quarantined: u64,
    /// Bytes sent from the worker's shared memory, without a copy by the mux.
    pub lent_bytes: u64,
    /// Counters of all connections, including closed ones.
    pub totals: Totals,
    /// Open connections.
    pub senders: Vec<Sender>,
    /// Number of open connections that are not listed; they pin the least.
    pub senders_left_out: u64,
    /// The senders of the engine's other muxes.
    pub others: Vec<Send>,
}

/// Counters and distributions of one sender, or of several.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// The counters.
    pub counters: Counters,
    /// The distributions.
    pub distributions: Distributions,
}

/// A connection.
#[derive(Clone, Debug)]
pub struct Sender {
    /// The peer's address.
    pub peer: String,
    /// Current mode: copying, probing or zerocopy.
    pub mode: &'static str,
    /// Why zero copy cannot be used on this connection; `None` if it can.
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

    /// The senders as an object.
    fn object(&self) -> Value {
        let mut object = json!({
            "choice": self.choice,
            "locked_limit": self.locked_limit,
            "locked_used": self.locked_used,
            "optmem": self.optmem,
            "connections": self.connections,
            "lingering": self.lingering,
            "stalled": self.stalled,
            "crowded": self.crowded,
            "quarantined": self.quarantined,
            "lent_bytes": self.lent_bytes,
            "totals": self.totals.object(),
            "senders": self.senders.iter().map(Sender::object).collect::<Vec<_>>(),
            "senders_left_out": self.senders_left_out,
        });
        if !self.name.is_empty() {
            object["name"] = json!(self.name);
        }
        if !self.others.is_empty() {
            object["others"] = self.others.iter().map(Self::object).collect();
        }
        object
    }
}

impl Totals {
    /// Adds the counters of a sender.
    pub fn add(&mut self, sender: &PollSender) {
        self.counters.add(sender.counters());
        self.distributions += sender.distributions();
    }

    fn object(&self) -> Map<String, Value> {
        let mut object = COUNTERS.object(&self.counters);
        for (_, key) in COUNTERS.families {
            if let Some(family) = object.get_mut(*key).and_then(Value::as_object_mut) {
                family.retain(|_, count| *count != 0);
            }
        }
        // Not copied, copied.
        let probes = [self.counters.probes_not_copied, self.counters.probes_copied];
        object.insert("probes".to_owned(), json!(probes));
        object.insert("per_notification".to_owned(), quantiles(&self.distributions.per_notification));
        object.insert("pin_time_us".to_owned(), quantiles(&self.distributions.pin_time));
        object
    }
}

/// Quantiles of a power-of-two histogram, as upper bounds of buckets; null if the histogram is empty.
fn quantiles(histogram: &Histogram) -> Value {
    let [p50, p99, max] = [0.5, 0.99, 1.0].map(|share| histogram.quantile(share));
    json!({ "p50": p50, "p99": p99, "max": max })
}

impl Sender {
    /// Reads the state of a sender.
    pub fn of(peer: &str, sender: &PollSender, now: Time) -> Self {
        let mode = match sender.mode() {
            Mode::Copying => "copying",
            Mode::Probing => "probing",
            Mode::Zerocopy => "zerocopy",
        };
        let (counters, distributions) = (*sender.counters(), sender.distributions().clone());
        Self {
            peer: peer.to_owned(),
            mode,
            unarmed: sender.unarmed().map(|why| why.to_string()),
            outstanding: sender.outstanding() as u64,
            pinned: sender.pinned(),
            budget: sender.budget(),
            unsent: sender.unsent(),
            stuck: sender.is_stuck(now),
            totals: Totals { counters, distributions },
        }
    }

    fn object(&self) -> Value {
        json!({
            "peer": self.peer,
            "mode": self.mode,
            "unarmed": self.unarmed,
            "outstanding": self.outstanding,
            "pinned": self.pinned,
            "budget": self.budget,
            "unsent": self.unsent,
            "stuck": self.stuck,
            "totals": self.totals.object(),
        })
    }
}

/// Formats the output of `towpath ctl show send`.
fn show(send: &Value) -> String {
    let number = |key: &str| send[key].as_u64().unwrap_or(0);
    let senders = items(&send["senders"]);
    let name = send["name"].as_str().map_or_else(String::new, |name| format!("{name}: "));
    let mut text = format!(
        "{name}{}; {} connections had long replies, {} are open, {} linger ({} were reset), {} buffers in quarantine\n",
        cell(&send["choice"]),
        number("connections"),
        senders.len() as u64 + number("senders_left_out"),
        number("lingering"),
        number("stalled") + number("crowded"),
        number("quarantined")
    );
    let limit = match send["locked_limit"].as_u64() {
        Some(limit) => format!("{} of {limit}", number("locked_used")),
        None => "no limit".to_owned(),
    };
    let _ = writeln!(text, "locked memory: {limit}; option memory: {} for each socket", number("optmem"));
    let words = |map: &Value| map.as_object().and_then(by_name).unwrap_or("-".to_owned());
    let quantiles = |quantiles: &Value| match (quantiles["p50"].as_u64(), quantiles["p99"].as_u64()) {
        (Some(p50), Some(p99)) => format!("< {p50}, p99 < {p99}"),
        _ => "-".to_owned(),
    };
    let totals = &send["totals"];
    let _ = writeln!(text, "from workers' frames: {} (bytes)", number("lent_bytes"));
    let _ = writeln!(text, "sent plain: {} (bytes)", words(&totals["plain_bytes"]));
    let _ = writeln!(text, "numbers per notification: {}", quantiles(&totals["per_notification"]));
    let _ = writeln!(text, "pinned for: {} us", quantiles(&totals["pin_time_us"]));
    let _ = writeln!(text, "modes switched: {}", words(&totals["switches"]));
    let [not_copied, copied] = [0, 1].map(|at| cell(&totals["probes"][at]));
    let _ = writeln!(text, "probes: {not_copied} not copied, {copied} copied");
    // The counters without a column.
    let columns = ["zerocopy_bytes", "copied_bytes", "numbers", "no_buffers"];
    let also = |row: &&Metric| row.label.is_none() && !columns.contains(&row.name);
    let names: Vec<&str> = Counters::TABLE.iter().filter(also).map(|row| row.name).collect();
    let also = totals.as_object().into_iter().flatten().filter(|(name, _)| names.contains(&name.as_str()));
    if let Some(counters) = nonzero(also) {
        let _ = writeln!(text, "also: {counters}");
    }
    let heads =
        ["Peer", "Mode", "Zerocopy", "Copied", "Plain", "Numbers", "Out", "Pinned", "Budget", "ENOBUFS"];
    let mut rows = vec![heads.map(str::to_owned).to_vec()];
    let mut push = |peer: &Value, mode: &str, totals: &Value, [outstanding, pinned, budget]: [&Value; 3]| {
        let plain = totals["plain_bytes"].as_object().into_iter().flatten();
        let plain: u64 = plain.filter_map(|(_, bytes)| bytes.as_u64()).sum();
        let total = |key: &str| cell(&totals[key]);
        rows.push(vec![
            cell(peer),
            mode.to_owned(),
            total("zerocopy_bytes"),
            total("copied_bytes"),
            plain.to_string(),
            total("numbers"),
            cell(outstanding),
            cell(pinned),
            cell(budget),
            total("no_buffers"),
        ]);
    };
    let [numbers, completed, abandoned] =
        ["numbers", "completed", "abandoned"].map(|key| totals[key].as_u64().unwrap_or(0));
    let out = json!(numbers.saturating_sub(completed + abandoned));
    push(&json!("all"), "", totals, [&out, &Value::Null, &Value::Null]);
    for sender in senders {
        let mode = match (sender["unarmed"].is_null(), sender["stuck"] == true) {
            (false, _) => "unarmed",
            (true, true) => "stuck",
            (true, false) => sender["mode"].as_str().unwrap_or("-"),
        };
        let held = [&sender["outstanding"], &sender["pinned"], &sender["budget"]];
        push(&sender["peer"], mode, &sender["totals"], held);
    }
    text += &table(&rows);
    if number("senders_left_out") > 0 {
        let _ = writeln!(text, "and {} connections more", number("senders_left_out"));
    }
    text
}

/// The counters of a family: `small 3, copying 1`. `None` without any.
fn by_name(family: &Map<String, Value>) -> Option<String> {
    let words: Vec<String> = family.iter().map(|(name, count)| format!("{name} {count}")).collect();
    (!words.is_empty()).then(|| words.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_counter_is_in_the_object_and_the_text() {
        let counters = Counters { plain_small: 7, tampered: 3, probes_copied: 2, ..Counters::default() };
        let totals = Totals { counters, ..Totals::default() };
        let send = Send { choice: "adaptive", totals, ..Send::default() };
        let object = send.object();
        assert_eq!(object["totals"]["plain_bytes"], json!({ "small": 7 }));
        assert_eq!(object["totals"]["probes"], json!([0, 2]));
        for row in Counters::TABLE.iter().filter(|row| row.label.is_none()) {
            assert!(object["totals"].get(row.name).is_some(), "{} is missing", row.name);
        }
        let text = ShowSend {}.text(&json!({ "send": object }));
        for line in ["sent plain: small 7 (bytes)", "probes: 0 not copied, 2 copied", "also: 3 tampered"] {
            assert!(text.lines().any(|other| other == line), "{line}: {text}");
        }
    }
}
