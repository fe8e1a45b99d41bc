//! `towpath ctl show mux`: the columns of KCM's `/proc/net/kcm` and `/proc/net/kcm_stats`.

use std::fmt::Write;

use clap::Args;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use towpath_fleet::workers::HostView;
use towpath_metrics::Metric;
use towpath_mux::io::AcceptStats;
use towpath_mux::mux::{self, PsockRow, WorkerRow, psock, worker};

use super::super::command::{Context, Handled, Query, Reply};
use super::super::protocol::{Code, Refusal};
use super::super::text::{age, cell, duration, items, table};
use crate::metrics::{self, Layout};
use crate::process::RemoteView;
use crate::worker_pool::{UnsentStats, UpgradeStats, Violations};

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
                Some(mux) => Ok(Reply::Answer(Self::ANSWER, json!({ "mux": mux.object() }))),
                None => {
                    let message = "this engine has no multiplexor; `towpath mux` has one";
                    Err(Refusal::new(Code::NoMux, message))
                }
            },
        )
    }

    fn text(&self, answer: &Value) -> String {
        let mux = &answer["mux"];
        let all = std::iter::once(mux).chain(items(&mux["others"]));
        all.map(show).collect::<Vec<_>>().join("\n")
    }
}

/// Maximum number of connections in the list.
const PSOCKS: usize = 1000;

/// The counters of the mux in `stats`: those of `net/kcm/kcmproc.c` have KCM's names.
const TOTALS: Layout = Layout { renamed: &[("received", "rx_msgs")], families: &[], moved: &[], hidden: &[] };

/// The counters of all connections in `stats`. The mux counts the messages sent on them, too.
const PSOCK_TOTALS: Layout = Layout {
    renamed: &[
        ("rx_unrecov_intr", "rx_unrecov"),
        ("rx_need_more", "rx_need_mor"),
        ("rx_bad_hdr_len", "rx_bad_len"),
        ("rx_msg_too_big", "rx_too_big"),
        ("rx_msg_timeouts", "rx_timeout"),
    ],
    families: &[],
    moved: &[],
    hidden: &["rx_msgs", "tx_msgs", "tx_bytes"],
};

/// Headings of KCM's counters of a mux, in KCM's order. Other counters follow in their own groups.
const KCM_MUX: [(&str, &str); 9] = [
    ("rx_msgs", "RX-Msgs"),
    ("rx_bytes", "RX-Bytes"),
    ("tx_msgs", "TX-Msgs"),
    ("tx_bytes", "TX-Bytes"),
    ("tx_retries", "TX-Retries"),
    ("attach", "Attach"),
    ("unattach", "Unattach"),
    ("unattach_rsvd", "UnattchRsvd"),
    ("rx_rdy_drops", "RX-RdyDrops"),
];

/// Headings of KCM's counters of connections.
const KCM_PSOCK: [(&str, &str); 11] = [
    ("reserved", "Reserved"),
    ("unreserved", "Unreserved"),
    ("rx_aborts", "RX-Aborts"),
    ("rx_intr", "RX-Intr"),
    ("rx_unrecov", "RX-Unrecov"),
    ("rx_mem_fail", "RX-MemFail"),
    ("rx_need_mor", "RX-NeedMor"),
    ("rx_bad_len", "RX-BadLen"),
    ("rx_too_big", "RX-TooBig"),
    ("rx_timeout", "RX-Timeout"),
    ("tx_aborts", "TX-Aborts"),
];

/// A mux.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Mux {
    /// The mux's name in the rules; empty without rules.
    pub name: String,
    /// The order guarantee; the values of `--order`.
    pub order: &'static str,
    /// Bytes held in total.
    pub bytes: u64,
    /// Whether `bytes` reached the limit, so that the mux does not read.
    pub full: bool,
    /// Worker processes started to replace ones that ended.
    pub restarts: u64,
    /// Unsent messages of workers.
    pub lost: UnsentStats,
    /// Violations by workers.
    pub violations: Violations,
    /// Counters of the mux.
    pub totals: mux::Totals,
    /// Counters of all connections, including closed ones.
    pub psock_totals: psock::Stats,
    /// Accepted and refused connections.
    pub arrivals: AcceptStats,
    /// Connections that were handed over or taken over.
    pub upgrade: UpgradeStats,
    /// Workers on other machines.
    pub remote: Option<RemoteWorkers>,
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
    pub others: Vec<Mux>,
}

/// A distribution of durations, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[allow(missing_docs)] // quantiles
pub struct Times {
    pub p50: u64,
    pub p90: u64,
    pub p99: u64,
    pub p999: u64,
    pub max: u64,
}

/// A worker (KCM: a socket).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Worker {
    /// Its state and its counters.
    pub row: WorkerRow,
    /// Process id; 0 for a thread. A number above all process ids for a worker on another machine.
    pub pid: u32,
    /// Its name on another machine.
    pub remote: Option<String>,
}

/// Workers on other machines.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteWorkers {
    /// Their hosts, and the server.
    pub view: RemoteView,
    /// Messages that the workers of each host have.
    pub in_flight: Vec<usize>,
}

/// A connection (KCM: a psock).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Psock {
    /// Its state and its counters.
    pub row: PsockRow,
    /// The peer's address; `None` for a Unix socket.
    pub peer: Option<String>,
}

impl Mux {
    /// Reads the state of the core. `identity` returns the process id of a worker, and its name if it is on another machine.
    pub fn of(
        core: &mux::Mux,
        restarts: u64,
        identity: impl Fn(worker::Id) -> (u32, Option<String>),
    ) -> Self {
        let mux::Show { totals, psock_totals, bytes, full, workers, mut psocks } = core.show();
        psocks.sort_unstable_by_key(|row| (std::cmp::Reverse(row.recv_bytes + row.send_bytes), row.id));
        let psocks_left_out = psocks.len().saturating_sub(PSOCKS) as u64;
        psocks.truncate(PSOCKS);
        Self {
            order: order(core.config().order),
            bytes: bytes as u64,
            full,
            restarts,
            totals,
            psock_totals,
            queue_wait: Times::of(core.queue_wait()),
            service_time: Times::of(core.service_time()),
            workers: workers.into_iter().map(|row| Worker::of(row, &identity)).collect(),
            psocks: psocks.into_iter().map(|row| Psock { row, peer: None }).collect(),
            psocks_left_out,
            ..Self::default()
        }
    }

    /// Adds the peer's address to each connection.
    #[must_use]
    pub fn with_peers(mut self, peer: impl Fn(psock::Id) -> Option<std::net::SocketAddr>) -> Self {
        for psock in &mut self.psocks {
            psock.peer = peer(psock.row.id).map(|peer| peer.to_string());
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
        self.others.sort_unstable_by(|a, b| a.name.cmp(&b.name));
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

    /// The mux as an object.
    fn object(&self) -> Map<String, Value> {
        let mut stats = PSOCK_TOTALS.object(&self.psock_totals);
        stats.extend(TOTALS.object(&self.totals));
        // A waiting message is dropped only if the workers that had it died.
        stats.insert("rx_rdy_drops".to_owned(), self.totals.undone.into());
        let Value::Object(mut object) = json!({
            "name": self.name,
            "order": self.order,
            "bytes": self.bytes,
            "full": self.full,
            "restarts": self.restarts,
            "lost": metrics::json(&self.lost),
            "violations": metrics::json(&self.violations),
            "stats": stats,
            "arrivals": metrics::json(&self.arrivals),
            "upgrade": metrics::json(&self.upgrade),
            "queue_wait": self.queue_wait,
            "service_time": self.service_time,
            "workers": (0..).zip(&self.workers).map(|(at, worker)| worker.object(at)).collect::<Vec<_>>(),
            "psocks": self.psocks.iter().map(Psock::object).collect::<Vec<_>>(),
            "psocks_left_out": self.psocks_left_out,
        }) else {
            return Map::new();
        };
        if let Some(remote) = &self.remote {
            object.insert("remote".to_owned(), remote.object());
        }
        if !self.others.is_empty() {
            object.insert("others".to_owned(), self.others.iter().map(Self::object).collect());
        }
        object
    }
}

impl Times {
    fn of(histogram: &hdrhistogram::Histogram<u64>) -> Self {
        let at = |quantile| histogram.value_at_quantile(quantile);
        Self { p50: at(0.5), p90: at(0.9), p99: at(0.99), p999: at(0.999), max: histogram.max() }
    }
}

impl RemoteWorkers {
    fn object(&self) -> Value {
        let RemoteView { subject, server, hosts, stats } = &self.view;
        let host = |(host, in_flight): (&HostView, &usize)| {
            json!({
                "name": host.name,
                "workers": host.workers,
                "used": host.slots.len(),
                "credit": host.credit,
                "in_flight": in_flight,
                "round_trip": host.round_trip.map(|trip| trip.as_nanos() as u64),
                "leaving": host.leaving,
            })
        };
        let hosts: Vec<_> = hosts.iter().zip(&self.in_flight).map(host).collect();
        json!({
            "subject": subject,
            "server": server.as_ref().ok(),
            "error": server.as_ref().err(),
            "hosts": hosts,
            "stats": metrics::json(stats),
        })
    }
}

impl Worker {
    fn of(row: WorkerRow, identity: impl Fn(worker::Id) -> (u32, Option<String>)) -> Self {
        let (pid, remote) = identity(row.id);
        Self { row, pid, remote }
    }

    fn object(&self, index: u32) -> Value {
        let Self { row, pid, remote } = self;
        // RxWait: waits for messages. RxStop: gets no messages.
        let status = match (row.disabled, row.rx_wait) {
            (true, _) => "RxStop",
            (false, true) => "RxWait",
            (false, false) => "",
        };
        let mut object = metrics::json(&row.stats);
        object.insert("index".to_owned(), index.into());
        object.insert("pid".to_owned(), (*pid).into());
        object.insert("recv_q".to_owned(), (row.queued + row.in_hand).into());
        object.insert("status".to_owned(), status.into());
        if let Some(remote) = remote {
            object.insert("remote".to_owned(), (&**remote).into());
        }
        object.into()
    }
}

impl Psock {
    fn object(&self) -> Value {
        let Self { row, peer } = self;
        let (index, generation) = row.id.parts();
        let psock::Stats { rx_msgs, rx_bytes, tx_msgs, tx_bytes, .. } = row.stats;
        let mut object = json!({
            "index": index,
            "generation": generation,
            // The other counters of a connection are in the totals: an answer has up to 1000 connections.
            "rx_msgs": rx_msgs,
            "rx_bytes": rx_bytes,
            "tx_msgs": tx_msgs,
            "tx_bytes": tx_bytes,
            "recv_q": row.recv_queue,
            "rmem": row.recv_bytes,
            "smem": row.send_bytes,
            "status": row.status.to_string(),
        });
        if let Some(peer) = peer {
            object["peer"] = json!(peer);
        }
        object
    }
}

/// Formats a mux like KCM's two files.
fn show(mux: &Value) -> String {
    let stats = &mux["stats"];
    let mut rows = vec![row([
        "Object", "RX-Msgs", "RX-Bytes", "TX-Msgs", "TX-Bytes", "Recv-Q", "Rmem", "Send-Q", "Smem", "Status",
    ])];
    let mut push = |object: &str, counters: &Value, held: [&Value; 3], status: &str| {
        let [a, b, c, d] = ["rx_msgs", "rx_bytes", "tx_msgs", "tx_bytes"].map(|key| cell(&counters[key]));
        let [recv_q, rmem, smem] = held.map(cell);
        rows.push(row([object, &a, &b, &c, &d, &recv_q, &rmem, "-", &smem, status.trim_end()]));
    };
    let word = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let (workers, psocks) = (items(&mux["workers"]), items(&mux["psocks"]));
    let left_out = mux["psocks_left_out"].as_u64().unwrap_or(0);
    let status = format!(
        "KCMs: {} Psocks {} order {}{}",
        workers.len(),
        psocks.len() as u64 + left_out,
        word(&mux["order"]),
        if mux["full"] == true { " full" } else { "" }
    );
    let name = Some(word(&mux["name"])).filter(|name| !name.is_empty()).unwrap_or("mux".to_owned());
    push(&name, stats, [&stats["queued"], &mux["bytes"], &Value::Null], &status);
    for worker in workers {
        let status = format!("{}{}", name_of(worker), word(&worker["status"]));
        push(
            &format!("kcm-{}", worker["index"]),
            worker,
            [&worker["recv_q"], &Value::Null, &Value::Null],
            &status,
        );
    }
    for psock in psocks {
        let status = format!("{} {}", word(&psock["peer"]), word(&psock["status"]));
        let held = [&psock["recv_q"], &psock["rmem"], &psock["smem"]];
        push(&format!("psock-{}", psock["index"]), psock, held, status.trim_start());
    }
    let mut text = table(&rows);
    if left_out > 0 {
        let _ = writeln!(text, "and {left_out} psocks that hold less");
    }
    if !mux["remote"].is_null() {
        text += &show_remote(&mux["remote"]);
    }
    let known = |list: &[(&'static str, &'static str)]| {
        list.iter().map(|(key, heading)| ((*heading).to_owned(), cell(&stats[*key]))).collect::<Vec<_>>()
    };
    // Counters without a heading of KCM, each in the group of its table or family.
    let more = |layout: &Layout, rows: &[Metric], object: &Value, wanted: &dyn Fn(&Metric) -> bool| {
        let keys = rows.iter().filter(|metric| wanted(metric)).map(|metric| layout.key(metric));
        let keys = keys.filter(|key| KCM_MUX.iter().chain(&KCM_PSOCK).all(|(kcm, _)| kcm != key));
        keys.map(|key| (key.replace('_', "-"), cell(&object[key]))).collect::<Vec<_>>()
    };
    let ends = |metric: &Metric| metric.stem == "ended";
    let plain = Layout::default();
    let psock = more(&PSOCK_TOTALS, psock::Stats::TABLE, stats, &|_| true);
    let mut messages = more(&TOTALS, mux::Totals::TABLE, stats, &|metric| !ends(metric));
    messages.push(("restarts".to_owned(), cell(&mux["restarts"])));
    let groups = [
        ("MUX", known(&KCM_MUX)),
        ("Psock", [known(&KCM_PSOCK), psock].concat()),
        ("Messages", messages),
        ("Ends", more(&TOTALS, mux::Totals::TABLE, stats, &ends)),
        ("Lost", more(&plain, UnsentStats::TABLE, &mux["lost"], &|_| true)),
        ("Violations", more(&plain, Violations::TABLE, &mux["violations"], &|_| true)),
        ("Arrivals", more(&plain, AcceptStats::TABLE, &mux["arrivals"], &|_| true)),
        ("Upgrade", more(&plain, UpgradeStats::TABLE, &mux["upgrade"], &|_| true)),
    ];
    for (name, counters) in groups {
        let (mut names, mut numbers) = (vec![name.to_owned()], vec![String::new()]);
        for (name, number) in counters {
            names.push(name);
            numbers.push(number);
        }
        text.push('\n');
        for line in table(&[names, numbers]).lines() {
            text += line.trim_end();
            text.push('\n');
        }
    }
    text.push('\n');
    for (name, times) in [("wait", &mux["queue_wait"]), ("service", &mux["service_time"])] {
        let at = |key: &str| duration(times[key].as_u64().unwrap_or(0));
        let [p50, p90, p99, p999, max] = ["p50", "p90", "p99", "p999", "max"].map(at);
        let _ = writeln!(text, "{name}: p50 {p50} p90 {p90} p99 {p99} p99.9 {p999} max {max}");
    }
    text
}

/// The process of a worker, or its name on another machine.
fn name_of(worker: &Value) -> String {
    match worker["remote"].as_str() {
        Some(name) => format!("{name} "),
        None if worker["pid"] == 0 => String::new(),
        None => format!("pid {} ", worker["pid"]),
    }
}

/// The hosts of workers on other machines.
fn show_remote(remote: &Value) -> String {
    let server = match remote["server"].as_str() {
        Some(server) => format!("connected to {server}"),
        None => cell(&remote["error"]),
    };
    let mut text = format!("\nremote workers at {}: {server}\n", cell(&remote["subject"]));
    let hosts = items(&remote["hosts"]);
    if hosts.is_empty() {
        return text;
    }
    let mut rows = vec![row(["Host", "Workers", "Used", "Credit", "In-flight", "Round-trip", "Status"])];
    rows.extend(hosts.iter().map(|host| {
        let [name, workers, used, credit, held] =
            ["name", "workers", "used", "credit", "in_flight"].map(|key| cell(&host[key]));
        let leaving = if host["leaving"] == true { "leaving" } else { "" };
        row([&name, &workers, &used, &credit, &held, &age(&host["round_trip"]), leaving])
    }));
    text.extend(table(&rows).lines().flat_map(|line| [line.trim_end(), "\n"]));
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
    use towpath_fleet::workers::WorkerStats;
    use towpath_mux::Time;
    use towpath_mux::assembler::Limits;
    use towpath_mux::mux::{Config, Order};

    use super::*;

    #[test]
    fn a_mux_is_shown_in_kcms_columns() {
        let now = Time::default();
        let mut core = mux::Mux::new(Config::new(Order::None));
        let psock = core.attach("line".parse().unwrap(), Limits::default(), now).unwrap();
        let worker = core.clone_worker(1, now);
        core.handle_bytes(psock, b"one\ntwo\nthr", now);
        core.poll_messages(worker, now, &mut Vec::new());
        let mut shown = Mux::of(&core, 3, |_| (4711, None));
        shown.arrivals = AcceptStats {
            accepted: 90,
            denied: 5,
            reset: 6,
            refused: 7,
            handshakes_failed: 8,
            handshakes_late: 9,
            cut_short: 10,
        };
        shown = shown.with_peers(|_| Some(([127, 0, 0, 1], 4712).into()));
        let text_of = |mux: &Mux| ShowMux {}.text(&json!({ "mux": mux.object() }));
        let stats = &shown.object()["stats"];
        let number = |key: &str| stats[key].as_u64().unwrap();
        assert_eq!(number("rx_msgs"), number("done") + number("queued") + number("in_hand"));
        let text = text_of(&shown);
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
        let both = text_of(&shown.clone().and(Mux { name: "web".into(), ..shown.clone() }));
        assert!(both.starts_with(&text) && both.contains("\n    web  "), "{both}");
        shown.remote = Some(RemoteWorkers {
            view: RemoteView {
                subject: "jobs".to_owned(),
                server: Ok("192.0.2.10:4222".to_owned()),
                hosts: vec![HostView {
                    name: "h1".to_owned(),
                    workers: 4,
                    slots: vec![7, 8],
                    credit: 16,
                    leaving: true,
                    round_trip: Some(std::time::Duration::from_micros(310)),
                }],
                stats: WorkerStats::default(),
            },
            in_flight: vec![3],
        });
        shown.workers[0].remote = Some("worker 0 of h1".to_owned());
        let text = text_of(&shown);
        let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(lines[2][9..], ["worker", "0", "of", "h1"]);
        let at = text.lines().position(|line| line == "remote workers at jobs: connected to 192.0.2.10:4222");
        assert_eq!(lines[at.unwrap() + 2], ["h1", "4", "2", "16", "3", "310us", "leaving"]);
        shown.remote.as_mut().unwrap().view.server = Err("the connection ended".to_owned());
        assert!(text_of(&shown).contains("\nremote workers at jobs: the connection ended\n"));
        for metric in [mux::Totals::TABLE, psock::Stats::TABLE].concat() {
            let layout = if metric.group == "mux" { TOTALS } else { PSOCK_TOTALS };
            assert!(stats.get(layout.key(&metric)).is_some(), "{} is missing", metric.name);
        }
    }
}
