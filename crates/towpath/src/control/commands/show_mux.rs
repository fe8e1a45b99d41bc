//! `towpath ctl show mux`: the columns of KCM's `/proc/net/kcm` and `/proc/net/kcm_stats`.

use std::fmt::Write;

use clap::Args;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use towpath_mux::mux::psock::Status;
use towpath_mux::mux::{self, PsockRow, WorkerRow};

use super::super::command::{Context, Handled, Query, Reply};
use super::super::protocol::{Code, Refusal};
use super::super::text::{duration, table};

/// The muxes, in the columns of Linux's /proc/net/kcm and /proc/net/kcm_stats
///
/// One line each for the mux, each worker (kcm) and each connection (psock): messages and bytes received and sent, messages waiting
/// or held by workers, bytes held, state. Then the counters, the results of the messages, and how long messages waited and were
/// processed. Of more than 1000 connections, the ones that hold the most are listed.
#[derive(Debug, Default, Args, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ShowMux {}

impl Query for ShowMux {
    const WORDS: &'static str = "show mux";
    const ANSWER: &'static str = "mux";

    fn handle(self, context: &Context<'_>) -> Handled {
        context.query(
            |target| target.pool().map(|pool| pool.mux()),
            |parts| match parts.into_iter().flatten().reduce(Mux::and) {
                Some(mux) => Ok(Reply::Answer(Self::ANSWER, json!({ "mux": mux }))),
                None => {
                    let message = "this engine has no multiplexor; `towpath mux` has one";
                    Err(Refusal::new(Code::NoMux, message))
                }
            },
        )
    }

    fn text(&self, answer: &Value) -> String {
        Mux::deserialize(&answer["mux"]).map_or_else(|error| format!("mux: {error}\n"), |mux| show(&mux))
    }
}

/// Maximum number of connections in the list.
const PSOCKS: usize = 1000;

/// A mux.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mux {
    /// The mux's name in the rules; empty without rules.
    #[serde(default)]
    pub name: String,
    /// The order guarantee; the values of `--order`.
    pub order: String,
    /// Bytes held in total.
    pub bytes: u64,
    /// Whether `bytes` reached the limit, so that the mux does not read.
    pub full: bool,
    /// Worker processes started to replace ones that ended.
    pub restarts: u64,
    /// Unsent messages of workers.
    #[serde(default)]
    pub lost: Lost,
    /// All counters, including those of closed connections and ended workers.
    pub stats: Stats,
    /// Accepted and refused connections.
    #[serde(default)]
    pub arrivals: Arrivals,
    /// How long messages waited for a worker.
    pub queue_wait: Times,
    /// How long workers held messages.
    pub service_time: Times,
    /// Workers (KCM sockets).
    pub workers: Vec<Worker>,
    /// Connections.
    pub psocks: Vec<Psock>,
    /// Number of open connections that are not listed; they hold the least.
    pub psocks_left_out: u64,
    /// The other muxes of the same engine.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub others: Vec<Mux>,
}

/// Counters of accepted and refused connections and of TLS handshakes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Arrivals {
    /// Connections accepted by listeners.
    pub accepted: u64,
    /// Of these, connections closed because a rule denied them.
    pub denied: u64,
    /// Of these, connections reset because a rule said so.
    pub reset: u64,
    /// Connections that were not attached because the mux was draining, plus failures to accept for lack of descriptors or memory.
    pub refused: u64,
    /// TLS handshakes that failed, inbound and outbound.
    pub handshakes_failed: u64,
    /// TLS handshakes that took too long or were dropped in favour of newer ones.
    pub handshakes_late: u64,
    /// Ended connections that were closed before their peers had received everything.
    #[serde(default)]
    pub cut_short: u64,
}

impl From<towpath_mux::io::AcceptStats> for Arrivals {
    fn from(arrivals: towpath_mux::io::AcceptStats) -> Self {
        let towpath_mux::io::AcceptStats {
            accepted,
            denied,
            reset,
            refused,
            handshakes_failed,
            handshakes_late,
            cut_short,
        } = arrivals;
        Self { accepted, denied, reset, refused, handshakes_failed, handshakes_late, cut_short }
    }
}

/// Counters under KCM's names, and the results of messages: received = done + undone + queued + in_hand.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)] // KCM's names: net/kcm/kcmproc.c, and docs/book/src/reference/mux.md
pub struct Stats {
    pub rx_msgs: u64,
    pub rx_bytes: u64,
    pub tx_msgs: u64,
    pub tx_bytes: u64,
    pub tx_retries: u64,
    pub attach: u64,
    pub unattach: u64,
    pub unattach_rsvd: u64,
    pub rx_rdy_drops: u64,
    pub reserved: u64,
    pub unreserved: u64,
    pub rx_aborts: u64,
    pub rx_intr: u64,
    pub rx_unrecov: u64,
    pub rx_mem_fail: u64,
    pub rx_need_mor: u64,
    pub rx_bad_len: u64,
    pub rx_too_big: u64,
    pub rx_timeout: u64,
    pub tx_aborts: u64,
    pub done: u64,
    pub undone: u64,
    pub queued: u64,
    pub in_hand: u64,
    pub handed_back: u64,
    pub redelivered: u64,
    pub unsent: u64,
    #[serde(default)]
    pub resets: u64,
    #[serde(default)]
    pub inside: u64,
    #[serde(default)]
    pub malformed: u64,
    pub idle: u64,
    pub send_timeouts: u64,
    pub send_full: u64,
    pub drain_timeouts: u64,
}

/// Unsent messages of workers, by cause.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lost {
    /// Connected mode: the queues of all connections were full.
    pub full: u64,
    /// Connected mode: no connection was open. Otherwise: the message named no connection.
    pub not_connected: u64,
    /// The connection that the message named had ended.
    pub gone: u64,
    /// Connected mode: the connection ended before the message was sent completely, and the message must not go to another one.
    pub undelivered: u64,
}

impl Lost {
    /// Counts one message.
    pub(crate) const fn count(&mut self, why: &mux::SendError) {
        match why {
            mux::SendError::Full => self.full += 1,
            mux::SendError::NotConnected => self.not_connected += 1,
            mux::SendError::Gone => self.gone += 1,
        }
    }

    /// Returns the difference to the earlier counters `before`.
    pub(crate) const fn since(&self, before: &Self) -> Self {
        Self {
            full: self.full - before.full,
            not_connected: self.not_connected - before.not_connected,
            gone: self.gone - before.gone,
            undelivered: self.undelivered - before.undelivered,
        }
    }
}

impl std::fmt::Display for Lost {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { full, not_connected, gone, undelivered } = self;
        let causes = [
            (full, "found all connections full"),
            (not_connected, "found no connection"),
            (gone, "were for one that had ended"),
            (undelivered, "were on one that ended before they were sent"),
        ];
        let causes = causes.iter().filter(|(count, _)| **count > 0);
        f.write_str(&causes.map(|(count, why)| format!("{count} {why}")).collect::<Vec<_>>().join(", "))
    }
}

/// A distribution of durations, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)] // quantiles
pub struct Times {
    pub p50: u64,
    pub p90: u64,
    pub p99: u64,
    pub p999: u64,
    pub max: u64,
}

/// A worker (KCM: a socket).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Worker {
    /// Index among the attached workers.
    pub index: u32,
    /// Process id; 0 for a thread.
    pub pid: u32,
    /// Messages delivered to the worker.
    pub rx_msgs: u64,
    /// Bytes of these messages.
    pub rx_bytes: u64,
    /// Messages sent by the worker.
    pub tx_msgs: u64,
    /// Bytes of these messages.
    pub tx_bytes: u64,
    /// Messages that wait for this worker only, plus messages that it holds.
    pub recv_q: u64,
    /// Messages that the worker handed back, or that were taken back from it.
    pub handed_back: u64,
    /// RxWait: waits for messages. RxStop: gets no messages.
    pub status: String,
}

/// A connection (KCM: a psock).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Psock {
    /// Index of the connection's slot.
    pub index: u32,
    /// Generation of the slot: distinguishes connections that used the same index.
    pub generation: u32,
    /// The peer's address; `None` for a Unix socket.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peer: Option<String>,
    /// Complete messages received.
    pub rx_msgs: u64,
    /// Bytes of these messages.
    pub rx_bytes: u64,
    /// Messages sent completely.
    pub tx_msgs: u64,
    /// Bytes of these messages.
    pub tx_bytes: u64,
    /// Messages that wait or are held by workers.
    pub recv_q: u64,
    /// Bytes of these messages and of the incomplete one.
    pub rmem: u64,
    /// Bytes that wait to be sent.
    pub smem: u64,
    /// KCM's state flags: Rsvd-N RxPause RdyRx RxWait TxWait RxStop TxStop Done.
    pub status: String,
}

impl Mux {
    /// Reads the state of the core. `pid` returns the process id of a worker.
    pub fn of(core: &mux::Mux, restarts: u64, pid: impl Fn(mux::worker::Id) -> u32) -> Self {
        let show = core.show();
        let mut psocks: Vec<&PsockRow> = show.psocks.iter().collect();
        psocks.sort_by_key(|row| (std::cmp::Reverse(row.recv_bytes + row.send_bytes), row.id));
        Self {
            name: String::new(),
            others: Vec::new(),
            order: order(core.config().order).to_owned(),
            bytes: show.bytes as u64,
            full: show.full,
            restarts,
            lost: Lost::default(),
            stats: Stats::of(&show),
            arrivals: Arrivals::default(),
            queue_wait: Times::of(core.queue_wait()),
            service_time: Times::of(core.service_time()),
            workers: (0..)
                .zip(&show.workers)
                .map(|(index, row)| Worker::of(index, row, pid(row.id)))
                .collect(),
            psocks: psocks.iter().take(PSOCKS).map(|row| Psock::of(row)).collect(),
            psocks_left_out: psocks.len().saturating_sub(PSOCKS) as u64,
        }
    }

    /// Adds the peer's address to each connection.
    #[must_use]
    pub fn with_peers(mut self, peer: impl Fn(mux::psock::Id) -> Option<std::net::SocketAddr>) -> Self {
        for psock in &mut self.psocks {
            let id = mux::psock::Id::from_parts(psock.index, psock.generation);
            psock.peer = peer(id).map(|peer| peer.to_string());
        }
        self
    }

    /// Adds a mux of the same engine; the muxes are sorted by name. The total number of listed connections stays limited to `PSOCKS`.
    #[must_use]
    fn and(mut self, mut other: Self) -> Self {
        if other.name < self.name {
            std::mem::swap(&mut self, &mut other);
            self.others = std::mem::take(&mut other.others);
        }
        self.others.push(other);
        self.others.sort_by(|a, b| a.name.cmp(&b.name));
        let share = PSOCKS / (1 + self.others.len());
        let Self { psocks, psocks_left_out, others, .. } = &mut self;
        let own = std::iter::once((psocks, psocks_left_out));
        for (psocks, left_out) in
            own.chain(others.iter_mut().map(|mux| (&mut mux.psocks, &mut mux.psocks_left_out)))
        {
            *left_out += psocks.len().saturating_sub(share) as u64;
            psocks.truncate(share);
        }
        self
    }
}

impl Stats {
    fn of(show: &mux::Show) -> Self {
        let (totals, psocks) = (&show.totals, &show.psock_totals);
        Self {
            rx_msgs: totals.received,
            rx_bytes: psocks.rx_bytes,
            tx_msgs: totals.tx_msgs,
            tx_bytes: totals.tx_bytes,
            tx_retries: totals.tx_retries,
            attach: totals.attach,
            unattach: totals.unattach,
            unattach_rsvd: totals.unattach_rsvd,
            // A waiting message is dropped only if the workers that had it died.
            rx_rdy_drops: totals.undone,
            reserved: psocks.reserved,
            unreserved: psocks.unreserved,
            rx_aborts: psocks.rx_aborts,
            rx_intr: psocks.rx_intr,
            rx_unrecov: psocks.rx_unrecov_intr,
            rx_mem_fail: psocks.rx_mem_fail,
            rx_need_mor: psocks.rx_need_more,
            rx_bad_len: psocks.rx_bad_hdr_len,
            rx_too_big: psocks.rx_msg_too_big,
            rx_timeout: psocks.rx_msg_timeouts,
            tx_aborts: psocks.tx_aborts,
            done: totals.done,
            undone: totals.undone,
            queued: totals.queued,
            in_hand: totals.in_hand,
            handed_back: totals.handed_back,
            redelivered: totals.redelivered,
            unsent: totals.unsent,
            resets: totals.resets,
            inside: totals.inside,
            malformed: totals.malformed,
            idle: totals.idle,
            send_timeouts: totals.send_timeouts,
            send_full: totals.send_full,
            drain_timeouts: totals.drain_timeouts,
        }
    }
}

impl Times {
    fn of(histogram: &hdrhistogram::Histogram<u64>) -> Self {
        let at = |quantile| histogram.value_at_quantile(quantile);
        Self { p50: at(0.5), p90: at(0.9), p99: at(0.99), p999: at(0.999), max: histogram.max() }
    }
}

impl Worker {
    fn of(index: u32, row: &WorkerRow, pid: u32) -> Self {
        let status = match (row.disabled, row.rx_wait) {
            (true, _) => "RxStop",
            (false, true) => "RxWait",
            (false, false) => "",
        };
        Self {
            index,
            pid,
            rx_msgs: row.stats.rx_msgs,
            rx_bytes: row.stats.rx_bytes,
            tx_msgs: row.stats.tx_msgs,
            tx_bytes: row.stats.tx_bytes,
            recv_q: (row.queued + row.in_hand) as u64,
            handed_back: row.stats.handed_back,
            status: status.to_owned(),
        }
    }
}

impl Psock {
    fn of(row: &PsockRow) -> Self {
        let (index, generation) = row.id.parts();
        let status: &Status = &row.status;
        Self {
            index,
            generation,
            peer: None,
            rx_msgs: row.stats.rx_msgs,
            rx_bytes: row.stats.rx_bytes,
            tx_msgs: row.stats.tx_msgs,
            tx_bytes: row.stats.tx_bytes,
            recv_q: row.recv_queue as u64,
            rmem: row.recv_bytes as u64,
            smem: row.send_bytes as u64,
            status: status.to_string(),
        }
    }
}

/// Formats the muxes like KCM's two files.
fn show(mux: &Mux) -> String {
    let all = std::iter::once(mux).chain(&mux.others);
    all.map(show_one).collect::<Vec<_>>().join("\n")
}

fn show_one(mux: &Mux) -> String {
    let Mux { stats, .. } = mux;
    let mut rows = vec![row([
        "Object", "RX-Msgs", "RX-Bytes", "TX-Msgs", "TX-Bytes", "Recv-Q", "Rmem", "Send-Q", "Smem", "Status",
    ])];
    let psocks = mux.psocks.len() as u64 + mux.psocks_left_out;
    let counts = |n: [u64; 4]| n.map(|n| n.to_string());
    let [a, b, c, d] = counts([stats.rx_msgs, stats.rx_bytes, stats.tx_msgs, stats.tx_bytes]);
    let status = format!(
        "KCMs: {} Psocks {psocks} order {}{}",
        mux.workers.len(),
        mux.order,
        if mux.full { " full" } else { "" }
    );
    rows.push(row([
        if mux.name.is_empty() { "mux" } else { &mux.name },
        &a,
        &b,
        &c,
        &d,
        &stats.queued.to_string(),
        &mux.bytes.to_string(),
        "-",
        "-",
        &status,
    ]));
    for worker in &mux.workers {
        let [a, b, c, d] = counts([worker.rx_msgs, worker.rx_bytes, worker.tx_msgs, worker.tx_bytes]);
        let pid = if worker.pid == 0 { String::new() } else { format!("pid {} ", worker.pid) };
        let status = format!("{pid}{}", worker.status);
        let object = format!("kcm-{}", worker.index);
        rows.push(row([
            &object,
            &a,
            &b,
            &c,
            &d,
            &worker.recv_q.to_string(),
            "-",
            "-",
            "-",
            status.trim_end(),
        ]));
    }
    for psock in &mux.psocks {
        let [a, b, c, d] = counts([psock.rx_msgs, psock.rx_bytes, psock.tx_msgs, psock.tx_bytes]);
        let [e, f, g] = [psock.recv_q, psock.rmem, psock.smem].map(|n| n.to_string());
        let object = format!("psock-{}", psock.index);
        let status = psock.peer.iter().chain([&psock.status]).cloned().collect::<Vec<_>>().join(" ");
        rows.push(row([&object, &a, &b, &c, &d, &e, &f, "-", &g, status.trim_end()]));
    }
    let mut text = table(&rows);
    if mux.psocks_left_out > 0 {
        let _ = writeln!(text, "and {} psocks that hold less", mux.psocks_left_out);
    }
    let arrivals = &mux.arrivals;
    let groups: [(&str, &[(&str, u64)]); 6] = [
        (
            "MUX",
            &[
                ("RX-Msgs", stats.rx_msgs),
                ("RX-Bytes", stats.rx_bytes),
                ("TX-Msgs", stats.tx_msgs),
                ("TX-Bytes", stats.tx_bytes),
                ("TX-Retries", stats.tx_retries),
                ("Attach", stats.attach),
                ("Unattach", stats.unattach),
                ("UnattchRsvd", stats.unattach_rsvd),
                ("RX-RdyDrops", stats.rx_rdy_drops),
            ],
        ),
        (
            "Psock",
            &[
                ("Reserved", stats.reserved),
                ("Unreserved", stats.unreserved),
                ("RX-Aborts", stats.rx_aborts),
                ("RX-Intr", stats.rx_intr),
                ("RX-Unrecov", stats.rx_unrecov),
                ("RX-MemFail", stats.rx_mem_fail),
                ("RX-NeedMor", stats.rx_need_mor),
                ("RX-BadLen", stats.rx_bad_len),
                ("RX-TooBig", stats.rx_too_big),
                ("RX-Timeout", stats.rx_timeout),
                ("TX-Aborts", stats.tx_aborts),
            ],
        ),
        (
            "Messages",
            &[
                ("done", stats.done),
                ("undone", stats.undone),
                ("queued", stats.queued),
                ("in-hand", stats.in_hand),
                ("handed-back", stats.handed_back),
                ("redelivered", stats.redelivered),
                ("unsent", stats.unsent),
                ("restarts", mux.restarts),
            ],
        ),
        (
            "Ends",
            &[
                ("resets", stats.resets),
                ("inside", stats.inside),
                ("malformed", stats.malformed),
                ("idle", stats.idle),
                ("send-timeouts", stats.send_timeouts),
                ("send-full", stats.send_full),
                ("drain-timeouts", stats.drain_timeouts),
            ],
        ),
        (
            "Lost",
            &[
                ("full", mux.lost.full),
                ("not-connected", mux.lost.not_connected),
                ("gone", mux.lost.gone),
                ("undelivered", mux.lost.undelivered),
            ],
        ),
        (
            "Arrivals",
            &[
                ("accepted", arrivals.accepted),
                ("denied", arrivals.denied),
                ("reset", arrivals.reset),
                ("refused", arrivals.refused),
                ("handshakes-failed", arrivals.handshakes_failed),
                ("handshakes-late", arrivals.handshakes_late),
                ("cut-short", arrivals.cut_short),
            ],
        ),
    ];
    for (name, counters) in groups {
        let names = std::iter::once(name).chain(counters.iter().map(|(name, _)| *name));
        let numbers =
            std::iter::once(String::new()).chain(counters.iter().map(|(_, number)| number.to_string()));
        text.push('\n');
        for line in table(&[names.map(str::to_owned).collect(), numbers.collect()]).lines() {
            text += line.trim_end();
            text.push('\n');
        }
    }
    text.push('\n');
    for (name, times) in [("wait", &mux.queue_wait), ("service", &mux.service_time)] {
        let Times { p50, p90, p99, p999, max } = *times;
        let [p50, p90, p99, p999, max] = [p50, p90, p99, p999, max].map(duration);
        let _ = writeln!(text, "{name}: p50 {p50} p90 {p90} p99 {p99} p99.9 {p999} max {max}");
    }
    text
}

fn row<const N: usize>(cells: [&str; N]) -> Vec<String> {
    cells.map(str::to_owned).to_vec()
}

fn order(order: mux::Order) -> &'static str {
    match order {
        mux::Order::None => "none",
        mux::Order::Replies => "replies",
        mux::Order::Serial => "serial",
        mux::Order::Sticky => "sticky",
        mux::Order::Key => "key",
    }
}

#[cfg(test)]
mod tests {
    use towpath_mux::Time;
    use towpath_mux::assembler::Limits;
    use towpath_mux::mux::Config;

    use super::*;

    #[test]
    fn a_mux_is_shown_in_kcms_columns() {
        let now = Time::default();
        let mut core = mux::Mux::new(Config::default());
        let psock = core.attach("line".parse().unwrap(), Limits::default(), now).unwrap();
        let worker = core.clone_worker(1, now);
        core.handle_bytes(psock, b"one\ntwo\nthr", now);
        core.poll_messages(worker, now, &mut Vec::new());
        let mut shown = Mux::of(&core, 3, |_| 4711);
        shown.arrivals = Arrivals {
            accepted: 90,
            denied: 5,
            reset: 6,
            refused: 7,
            handshakes_failed: 8,
            handshakes_late: 9,
            cut_short: 10,
        };
        shown = shown.with_peers(|_| Some(([127, 0, 0, 1], 4712).into()));
        assert_eq!(shown.stats.rx_msgs, shown.stats.done + shown.stats.queued + shown.stats.in_hand);
        let text = show(&shown);
        let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(lines[0][..3], ["Object", "RX-Msgs", "RX-Bytes"]);
        assert_eq!(lines[1][..6], ["mux", "2", "8", "0", "0", "1"]);
        assert_eq!(lines[1][9..], ["KCMs:", "1", "Psocks", "1", "order", "none"]);
        assert_eq!(lines[2][..6], ["kcm-0", "1", "4", "0", "0", "1"]);
        assert_eq!(lines[2][9..], ["pid", "4711"]);
        assert_eq!(lines[3][..6], ["psock-1", "2", "8", "0", "0", "2"]);
        assert_eq!(lines[3][9..], ["127.0.0.1:4712", "Rsvd-1", "RdyRx", "RxWait"]);
        assert!(
            ["UnattchRsvd", "RX-NeedMor", "restarts", "not-connected"].iter().all(|word| text.contains(word)),
            "{text}"
        );
        let arrivals = lines.iter().position(|line| line.first() == Some(&"Arrivals")).expect("a table");
        assert_eq!(lines[arrivals + 1], ["90", "5", "6", "7", "8", "9", "10"]);
        let both = show(&shown.clone().and(Mux { name: "web".into(), ..shown.clone() }));
        assert!(both.starts_with(&text) && both.contains("\n    web  "), "{both}");
        let again: Mux = serde_json::from_str(&serde_json::to_string(&shown).unwrap()).unwrap();
        assert_eq!(again, shown);
    }
}
