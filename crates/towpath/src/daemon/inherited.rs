//! The new process's side of an upgrade of `towpath run`: what the old one hands over ([`crate::upgrade`]).
//!
//! Objects come with the start: the connection to the launcher, and a copy of each port's and listener's descriptors. The old process uses
//! all of them meanwhile. Items come when it has stopped: the states, the inspectors' sockets, and the started inspectors. The supervisor
//! of the old process is in `supervisor/upgrade.rs`.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Seek};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use towpath_metrics::Metrics;
use towpath_port::{HandOver, Stats};

use crate::upgrade::{Item, Object, Predecessor, Received};

/// The service in the greeting.
pub(super) const SERVICE: &str = "run";
/// Kinds of objects.
const LAUNCHER: &str = "launcher";
const PORT: &str = "port";
const LISTENER: &str = "listener";
/// The channel between the pools of a mux, and its listeners.
const MUX: &str = "mux";
const MUX_LISTENER: &str = "mux-listener";

/// Names of listeners.
pub(super) const CONTROL: &str = "control";
pub(super) const DUMPS: &str = "dumps";
pub(super) const METRICS: &str = "metrics";

/// The name of a queue's listener.
pub(super) fn queue(number: u16) -> String {
    format!("queue {number}")
}

/// The identity of a socket's file.
pub(super) type FileId = Option<(u64, u64)>;

/// One thread's part of a port.
#[derive(Debug, Serialize, Deserialize)]
struct PortDetail {
    thread: usize,
    numbers: Vec<u64>,
}

/// An item, besides its descriptor.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub(super) enum ItemDetail {
    /// A file with a snapshot of the states.
    States {
        /// When the old process stopped receiving ([`now`]).
        #[serde(default)]
        stopped: u64,
        /// The counters of the ports by name, for each thread and port.
        #[serde(default)]
        ports: Vec<Vec<BTreeMap<String, u64>>>,
    },
    /// The socket of an inspector.
    Inspector {
        /// Its queue.
        queue: u16,
    },
    /// A pidfd of an inspector that the launcher has started.
    Child {
        /// Its queue.
        queue: u16,
        /// The words of its command.
        words: Vec<String>,
        /// Its process id.
        id: u32,
        /// Its user.
        user: Option<u32>,
    },
}

/// The time of a clock that all processes have, in nanoseconds.
pub(super) fn now() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// The counters of a port by name: versions may have different ones.
pub(super) fn counters(stats: &Stats) -> BTreeMap<String, u64> {
    stats.values().map(|(metric, value)| (metric.name.to_owned(), value)).collect()
}

fn stats(counters: &BTreeMap<String, u64>) -> Stats {
    let mut stats = Stats::default();
    counters.iter().for_each(|(name, value)| stats.set(name, *value));
    stats
}

/// The object of the launcher's connection.
pub(super) fn launcher(fd: OwnedFd) -> Object {
    object(LAUNCHER, "", json!({ "process": std::process::id() }), fd)
}

/// The objects of a port's thread.
pub(super) fn port(name: &str, thread: usize, part: HandOver) -> Vec<Object> {
    let detail = json!(PortDetail { thread, numbers: part.numbers });
    part.descriptors.into_iter().map(|fd| object(PORT, name, detail.clone(), fd)).collect()
}

/// The object of a listener.
pub(super) fn listener(name: &str, (fd, file): (OwnedFd, FileId)) -> Object {
    object(LISTENER, name, json!(file), fd)
}

/// The objects of a mux: the other end of its channel, and its listeners by their addresses.
pub(super) fn mux(name: &str, channel: OwnedFd, listeners: Vec<(String, OwnedFd, FileId)>) -> Vec<Object> {
    let mut objects = vec![object(MUX, name, Value::Null, channel)];
    for (address, fd, file) in listeners {
        objects.push(object(MUX_LISTENER, &of_mux(name, &address), json!(file), fd));
    }
    objects
}

/// The name of a mux's listener. A mux's name has no space.
fn of_mux(mux: &str, address: &str) -> String {
    format!("{mux} {address}")
}

fn object(kind: &str, name: &str, detail: Value, fd: OwnedFd) -> Object {
    Object { kind: kind.to_owned(), name: name.to_owned(), detail, fd }
}

/// The process that this one replaces.
#[derive(Debug)]
pub struct Inherited {
    predecessor: Predecessor,
    id: u64,
    /// The old process ends, and has said that this one ends too.
    ending: bool,
    /// Files that belong to this process when the old one has given them up, by the name of their listener.
    files: Vec<(String, FileId)>,
}

/// What the old process has handed over when it stopped.
#[derive(Debug, Default)]
pub(super) struct Items {
    pub(super) states: Option<Vec<u8>>,
    /// When the old process stopped receiving ([`now`]).
    pub(super) stopped: Option<u64>,
    /// The counters of the ports, for each thread.
    pub(super) ports: Vec<Vec<Stats>>,
    /// Queues and sockets of inspectors.
    pub(super) inspectors: Vec<(u16, OwnedFd)>,
    pub(super) children: Vec<(ItemDetail, OwnedFd)>,
}

impl Inherited {
    /// The process that has started this one to be replaced by it; `None` if this process was started otherwise.
    ///
    /// # Errors
    /// The two versions do not match. The old process was told.
    pub fn of_this_process() -> io::Result<Option<Self>> {
        let predecessor = Predecessor::of_this_process(SERVICE)?;
        Ok(predecessor.map(|predecessor| Self { predecessor, id: 0, ending: false, files: Vec::new() }))
    }

    /// A function that tells the old process that this one cannot replace it.
    ///
    /// # Errors
    /// There is no free descriptor.
    pub fn refusal(&self) -> io::Result<impl FnOnce(&str) + use<>> {
        self.predecessor.refusal()
    }

    /// The process id of the old process.
    pub(super) const fn id(&self) -> u64 {
        self.id
    }

    /// The connection to the launcher.
    pub(super) fn launcher(&mut self) -> io::Result<OwnedFd> {
        let object = self.predecessor.take(LAUNCHER, "").ok_or(io::ErrorKind::InvalidData)?;
        self.id = object.detail["process"].as_u64().unwrap_or(0);
        Ok(object.fd)
    }

    /// The parts of a port, one per thread. Empty: the old process did not have the port.
    pub(super) fn port(&mut self, name: &str) -> Vec<HandOver> {
        let mut parts: Vec<HandOver> = Vec::new();
        while let Some(object) = self.predecessor.take(PORT, name) {
            let Ok(PortDetail { thread, numbers }) = serde_json::from_value(object.detail) else { continue };
            if parts.len() <= thread.min(64) {
                parts.resize_with(thread.min(64) + 1, HandOver::default);
            }
            if let Some(part) = parts.get_mut(thread) {
                part.numbers = numbers;
                part.descriptors.push(object.fd);
            }
        }
        parts
    }

    /// A listener by its name.
    pub(super) fn listener(&mut self, name: &str) -> Option<OwnedFd> {
        let object = self.predecessor.take(LISTENER, name)?;
        self.files.push((name.to_owned(), serde_json::from_value(object.detail).ok().flatten()));
        Some(object.fd)
    }

    /// The listener of a mux, and its file.
    pub(super) fn mux_listener(&mut self, mux: &str, address: &str) -> Option<(OwnedFd, FileId)> {
        let object = self.predecessor.take(MUX_LISTENER, &of_mux(mux, address))?;
        Some((object.fd, serde_json::from_value(object.detail).ok().flatten()))
    }

    /// The old process at the other end of a mux's channel.
    pub(super) fn mux(&mut self, name: &str) -> Option<Predecessor> {
        let object = self.predecessor.take(MUX, name)?;
        Predecessor::part(u32::try_from(self.id).unwrap_or(0), object.fd).ok()
    }

    /// Says that this process can serve, and waits until the old one has stopped and handed over everything, up to `limit`.
    pub(super) fn wait(&mut self, limit: Duration) -> io::Result<Items> {
        self.predecessor.ready()?;
        let until = Instant::now() + limit;
        let mut items = Items::default();
        loop {
            match self.predecessor.receive()? {
                Received::Item(item) => items.add(item)?,
                Received::Go => return Ok(items),
                Received::Done | Received::Ending => return Err(io::ErrorKind::InvalidData.into()),
                Received::Full => return Err(io::Error::other("there are no free descriptors")),
                Received::Nothing => {
                    let left = until.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return Err(io::ErrorKind::TimedOut.into());
                    }
                    wait_for(&self.predecessor, left);
                }
            }
        }
    }

    /// Says that this process serves.
    pub(super) fn serves(&self) -> io::Result<()> {
        self.predecessor.serves()
    }

    /// Returns true if the old process was told to end, and this one is to end too.
    pub(super) const fn is_ending(&self) -> bool {
        self.ending
    }

    /// Returns the files once the old process has given them up, or has ended.
    pub(super) fn ended(&mut self) -> Option<Vec<(String, FileId)>> {
        match self.predecessor.receive() {
            Ok(Received::Ending) => {
                self.ending = true;
                None
            }
            Ok(Received::Nothing | Received::Full | Received::Item(_) | Received::Go) => None,
            Ok(Received::Done) | Err(_) => Some(std::mem::take(&mut self.files)),
        }
    }
}

fn wait_for(fd: &impl AsFd, limit: Duration) {
    let timeout = Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: limit.subsec_nanos().into() };
    // Interrupted: the caller looks again.
    let _ = poll(&mut [PollFd::new(fd, PollFlags::IN)], Some(&timeout));
}

/// Readable when there is news.
impl AsFd for Inherited {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.predecessor.as_fd()
    }
}

impl Items {
    fn add(&mut self, Item { detail, fd, .. }: Item) -> io::Result<()> {
        match serde_json::from_value(detail)? {
            ItemDetail::States { stopped, ports } => {
                self.stopped = Some(stopped).filter(|at| *at > 0);
                self.ports = ports.iter().map(|ports| ports.iter().map(stats).collect()).collect();
                let (mut file, mut states) = (File::from(fd), Vec::new());
                file.rewind()?;
                file.read_to_end(&mut states)?;
                self.states = Some(states);
            }
            ItemDetail::Inspector { queue } => self.inspectors.push((queue, fd)),
            child @ ItemDetail::Child { .. } => self.children.push((child, fd)),
        }
        Ok(())
    }
}
