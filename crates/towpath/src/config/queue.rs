//! `[queue.N]`: the inspectors of a queue, and its policy.

use std::path::{Path, PathBuf};
use std::time::Duration;

use towpath_ring::{self as ring, Fanout, Overload, Quota};

use super::command;
use super::process;
use super::reader::{At, Table};
use super::users::{self, Users};
use crate::process::{Program, Settings};
use towpath_engine::queue::{DefaultVerdict, Policy, parse};

/// A queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Queue {
    /// The queue number in rules.
    pub number: u16,
    /// Policy towards its inspectors.
    pub policy: Policy,
    /// Its inspectors.
    pub inspectors: Inspectors,
}

/// How inspectors reach a queue: they attach to a socket, or the engine starts them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Inspectors {
    /// The socket where inspectors attach.
    pub socket: Option<PathBuf>,
    /// Users that may attach besides root and the engine's user.
    pub users: Users,
    /// File mode of the socket.
    pub mode: Option<u32>,
    /// Commands that the engine starts.
    pub commands: Vec<Vec<String>>,
    /// The commands are programs for libnetfilter_queue.
    pub nfqueue: bool,
    /// Processes of each command.
    pub workers: usize,
    /// Further processes of each command, on standby.
    pub standby: usize,
    /// How the processes run.
    pub process: Settings,
    /// Inspectors may send packets of their own.
    pub may_inject: bool,
    /// Bytes of shared memory for the inspectors of one user.
    pub memory: Option<u64>,
}

/// Unit of `memory`.
const MIB: u64 = 1 << 20;

impl Inspectors {
    /// Number of processes that the engine starts.
    pub fn wanted(&self) -> usize {
        self.commands.len() * (self.workers + self.standby)
    }

    /// Number of them that get packets. The others are on standby.
    pub fn serving(&self) -> usize {
        self.commands.len() * self.workers
    }

    /// The programs that the engine starts, each `workers` + `standby` times.
    pub fn programs(&self) -> impl Iterator<Item = Program> + '_ {
        let prefix: &[&str] = if self.nfqueue { &["towpath", "nfq", "--"] } else { &[] };
        self.commands.iter().map(move |words| Program {
            words: prefix.iter().map(ToString::to_string).chain(words.iter().cloned()).collect(),
            settings: self.process.clone(),
        })
    }

    /// Bytes of the rings of all started inspectors, or of one attached inspector, in an engine with `threads` threads.
    pub fn rings(&self, threads: usize) -> u64 {
        let lanes = u32::try_from(threads).unwrap_or(u32::MAX);
        let each = ring::Config { lanes, ..ring::Config::default() }.bytes_per_client();
        each * self.wanted().max(1) as u64
    }

    /// Limits for one user in an engine with `threads` threads. The default has room for twice the started inspectors: at a reload the
    /// new ones attach before the old ones have ended.
    pub fn limits(&self, threads: usize) -> Quota {
        let (default, twice) = (Quota::default(), 2 * self.wanted());
        let bytes = default.bytes_per_user.max(2 * self.rings(threads));
        Quota {
            bytes_per_user: self.memory.unwrap_or(bytes),
            channels_per_user: default.channels_per_user.max(twice),
            channels: default.channels.max(default.channels_per_user + twice),
            ..default
        }
    }
}

impl Queue {
    /// Returns true if a reload can change this queue to `other`.
    pub(super) fn may_become(&self, other: &Self) -> bool {
        let mut same = other.clone();
        same.policy.default = self.policy.default;
        same.policy.may_queue.clone_from(&self.policy.may_queue);
        same.inspectors.commands.clone_from(&self.inspectors.commands);
        same.inspectors.nfqueue = self.inspectors.nfqueue;
        same.policy.stall = self.policy.stall;
        same.inspectors.workers = self.inspectors.workers;
        same.inspectors.standby = self.inspectors.standby;
        same.inspectors.process.clone_from(&self.inspectors.process);
        same.inspectors.users.clone_from(&self.inspectors.users);
        *self == same
    }
}

/// Default deadline in nanoseconds, and default overload policy: a live port cannot keep packets for a slow inspector, so the
/// newest is dropped.
const LIVE: (u64, Overload) = (1_000_000_000, Overload::DropNewest);

/// Default of `stall` in deadlines.
const STALL: u64 = 3;

/// Reads the queues of an engine with `threads` threads.
pub(super) fn take(
    top: &Table<'_, '_>,
    directory: &Path,
    unserved: DefaultVerdict,
    threads: usize,
) -> Vec<Queue> {
    let mut queues: Vec<Queue> = Vec::new();
    let mut handed: Vec<(u16, u16, std::ops::Range<usize>)> = Vec::new();
    let mut named: Vec<(u16, At<u64>)> = Vec::new();
    for (name, table) in top.named("queue") {
        let number = name.value.parse::<u16>().ok().filter(|number| *number > 0);
        let Some(number) = number else {
            let hint = "write [queue.N] with N in 1..65535, the number that rules name";
            table.wrong(&name.span, format!("`{}` is not a queue number", name.value), hint);
            continue;
        };
        let may_queue = table.numbers("may-queue");
        let policy = policy(&table, unserved, &may_queue);
        named.extend(may_queue.into_iter().map(|at| (number, at)));
        if let Overload::Queue(other) = policy.overload {
            handed.push((number, other, table.span_of("overload")));
        }
        let inspectors = inspectors(&table, directory, &name, threads);
        table.finish();
        queues.push(Queue { number, policy, inspectors });
    }
    for (number, other, span) in handed {
        if number == other || !queues.iter().any(|queue| queue.number == other) {
            let message = format!(
                "queue {number} hands packets to queue {other}, which is not another queue of this file"
            );
            top.wrong(&span, message, "name another [queue.N]");
        }
    }
    for (number, at) in named {
        if !queues.iter().any(|queue| u64::from(queue.number) == at.value) {
            let message = format!("queue {number} may name queue {}, which is not in this file", at.value);
            top.wrong(&at.span, message, "name a [queue.N] of this file");
        }
    }
    queues.sort_by_key(|queue| queue.number);
    if let Some(pair) = queues.windows(2).find(|pair| pair[0].number == pair[1].number) {
        top.wrong(&top.span, format!("queue {} is defined twice", pair[0].number), "");
    }
    queues
}

fn policy(table: &Table<'_, '_>, unserved: DefaultVerdict, may_queue: &[At<u64>]) -> Policy {
    let nanos = |duration: Duration| u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
    let high = table.number("high").map(|high| high as u32);
    let low = table.number_at("low");
    if let Some(at) = &low
        && high.is_none_or(|high| at.value >= u64::from(high))
    {
        table.wrong(&at.span, "`low` needs a larger `high`", "");
    }
    let high = high.unwrap_or(u32::MAX);
    let deadline = table.seconds("deadline").map_or(LIVE.0, nanos);
    Policy {
        deadline,
        stall: table.seconds("stall").map_or(deadline.saturating_mul(STALL), nanos),
        default: super::verdict(table.word("default")).unwrap_or(unserved),
        fanout: words_of(table, "fanout", parse::fanout).unwrap_or(Fanout::FlowHash),
        overload: words_of(table, "overload", parse::overload).unwrap_or(LIVE.1),
        high,
        low: low.map_or(high.saturating_sub(u32::from(high != u32::MAX)), |at| at.value as u32),
        may_queue: ascending(may_queue),
        share: table.number("share").unwrap_or(1) as u16,
    }
}

/// The queue numbers in ascending order, each once.
fn ascending(numbers: &[At<u64>]) -> Vec<u16> {
    let mut numbers: Vec<u16> = numbers.iter().map(|at| at.value as u16).collect();
    numbers.sort_unstable();
    numbers.dedup();
    numbers
}

fn words_of<T>(table: &Table<'_, '_>, key: &'static str, read: fn(&str) -> Result<T, String>) -> Option<T> {
    let text = table.text(key)?;
    match read(text.value) {
        Ok(value) => Some(value),
        Err(error) => {
            table.wrong(&text.span, error, "");
            None
        }
    }
}

fn inspectors(table: &Table<'_, '_>, directory: &Path, name: &At<&str>, threads: usize) -> Inspectors {
    let socket = table.text("socket").map(|text| directory.join(text.value));
    let commands = table.texts("command");
    let commands: Vec<_> =
        commands.iter().filter_map(|text| command::words(table, text, directory)).collect();
    if socket.is_none() && commands.is_empty() {
        let hint = "write socket = \"PATH\" for inspectors that attach, or command = \"...\" for one that the engine starts";
        table.wrong(&name.span, format!("queue {} needs `socket` or `command`", name.value), hint);
    }
    let users = users::take(table);
    for key in ["user", "group", "env", "limits", "cgroup", "sandbox"] {
        if commands.is_empty() && table.has(key) && !table.has("command") {
            table.wrong(
                &table.span_of(key),
                format!("`{key}` is for a `command`"),
                "inspectors that attach choose it themselves",
            );
        }
    }
    let standby = table.number_at("standby");
    if let Some(at) = standby.as_ref().filter(|at| commands.is_empty() && at.value > 0) {
        table.wrong(&at.span, "`standby` is for a `command`", "inspectors that attach all get packets");
    }
    if socket.is_none() && !users.is_empty() {
        table.wrong(&name.span, "`users` and `groups` are for a `socket`", "");
    }
    let memory = table.number_at("memory");
    let inspectors = Inspectors {
        mode: users::mode(table),
        socket,
        users,
        commands,
        nfqueue: table.word("interface") == Some("nfqueue"),
        workers: table.number("workers").unwrap_or(1) as usize,
        standby: standby.map_or(0, |at| at.value) as usize,
        process: process::take(table, directory),
        may_inject: table.flag("may-inject").unwrap_or(false),
        memory: memory.as_ref().map(|at| at.value * MIB),
    };
    let need = inspectors.rings(threads).div_ceil(MIB);
    if let Some(at) = memory.filter(|at| at.value < need) {
        let count = inspectors.wanted().max(1);
        let message = format!(
            "the rings of {count} inspectors take {need} MiB with {threads} threads, not {}",
            at.value
        );
        table.wrong(&at.span, message, format!("write memory = {need} or more, or leave it out"));
    }
    inspectors
}
