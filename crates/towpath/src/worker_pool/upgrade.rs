//! Upgrade of a pool (SIGUSR2): hands over its listeners and connections to a new process ([`crate::upgrade`]).
//!
//! What: the old pool starts the new process and serves meanwhile. When the new one serves, the old one stops accepting, but keeps its
//! listeners. When the new one has served for [`TRIAL`], the old one
//! unattaches its connections: each one is handed over when its messages are answered and the kernel has the answers. What cannot be
//! handed over stays: connections with TLS, outbound connections, and all connections with [`OnWorkerEnd::Close`], whose workers have
//! state of them. The pool serves these until they end or `drain` has passed, then drains as after SIGTERM, and ends.
//!
//! A pool of `towpath run` is a part of a process: the supervisor starts the new process, and begins and completes the upgrade through
//! [`super::PoolControl`]. The pool is in [`State::Moving`] only, and keeps its listeners until it is told that the upgrade is complete.
//!
//! Invariants:
//! - A connection is attached in one process at a time, and has no message there when it leaves.
//! - The old process owns the listeners, their files and the control socket until the new one is told that everything was handed over.
//!   If the new process refuses, ends, or is late before that, the old one accepts connections again.

mod take_over;

pub use take_over::{Inherited, InheritedFile};

use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::json;
use towpath_mux::io::{Connector, Ended, HandOver, Server};
use towpath_mux::mux::{Cause, OnWorkerEnd};
use towpath_ring::SocketFile;

use super::WorkerPool;
use super::moved::MovedConnection;
use super::signals::{Moved, Step};
use crate::control;
use crate::quantity::count;
use crate::service_manager;
use crate::upgrade::{Executable, HANDSHAKE, Message, Object, Predecessor, Successor, TRIAL};

/// The service in the greeting.
pub const SERVICE: &str = "mux";
/// Kinds of objects: a listener, by the argument that names its address, and the control socket, by its path.
const LISTENER: &str = "listener";
const CONTROL: &str = "control";
/// Interval of looks at connections that wait to be handed over, and at a full channel.
const LOOK: Duration = Duration::from_millis(2);
/// The same while nothing changes. A look examines every connection.
const STAY: Duration = Duration::from_millis(50);
/// Interval of looks for room for connections.
const PAUSE: Duration = Duration::from_millis(10);
/// Time for a new process that has closed its channel to exit.
const EXIT: Duration = Duration::from_secs(1);
/// Connections that are attached in one turn.
const BURST: usize = 64;
/// Token of the channel to the new process, and of the process. Slots have lower ones.
pub(super) const SUCCESSOR: u32 = 1 << 20;
/// Token of the channel to the old process.
pub(super) const PREDECESSOR: u32 = SUCCESSOR + 1;

towpath_metrics::metrics! {
    /// Counters of upgrades.
    pub struct UpgradeStats in "mux" {
        /// Connections handed over to a newer process.
        pub handed_over: counter connections as "upgrade_connections": "Connections of this process at upgrades, by result." (result = "handed_over"),
        /// Connections taken over from an older process.
        pub taken_over: counter connections as "upgrade_connections" (result = "taken_over"),
        /// Connections of an older process that could not be attached.
        pub not_taken: counter connections as "upgrade_connections" (result = "not_taken"),
        /// Connections that were not handed over, and were served until they ended.
        pub stayed: counter connections as "upgrade_connections" (result = "stayed"),
        /// Connections that were closed because they had not ended in time.
        pub closed: counter connections as "upgrade_connections" (result = "closed"),
        /// Upgrades that failed or were refused; this process continued.
        pub failed: counter events as "upgrades_failed",
    }
}

/// The data that a pool hands over besides its connections.
#[derive(Debug)]
pub struct Upgradable {
    /// The program to start. `None`: the process has other services, and [`super::PoolControl::hand_over`] begins and completes an upgrade.
    pub executable: Option<Executable>,
    /// The arguments that name the listening addresses, in the order of the server's listeners.
    pub listen: Vec<String>,
    /// Time for the new process to be ready.
    pub limit: Duration,
    /// Files of Unix listeners.
    pub files: Vec<SocketFile>,
    /// Files that belong to the process that this one replaces, which gives them up.
    pub later: Vec<InheritedFile>,
    /// The control socket.
    pub control: Option<(PathBuf, control::Server)>,
    /// Outbound connections. The new process makes its own.
    pub connectors: Vec<Connector>,
    /// The process that this one replaces, after Go.
    pub predecessor: Option<Predecessor>,
    /// The same after Done: the end of this channel tells that process that this one has ended, until it ends itself.
    pub finished: Option<Predecessor>,
}

/// State of upgrades of a pool.
#[derive(Debug, Default)]
pub(super) struct Upgrades {
    own: Option<Upgradable>,
    state: State,
    /// New processes that did not take over and have not exited.
    ending: Vec<Successor>,
    pub(super) stats: UpgradeStats,
    /// The new process or its channel is ready; the channel of the old one is.
    pub(super) successor_ready: bool,
    pub(super) predecessor_ready: bool,
    /// Connections are not taken over until then: there is no room for them.
    paused: Option<Instant>,
}

#[derive(Debug, Default)]
enum State {
    #[default]
    None,
    /// The new process prepares, until this time at the latest. `told`: it has Go.
    Starting { successor: Successor, until: Instant, told: bool },
    /// The new process serves. It gets the connections then.
    Trial { successor: Successor, until: Instant },
    /// The new process gets the connections.
    Moving(Box<Moving>),
}

#[derive(Debug)]
struct Moving {
    successor: Successor,
    /// Connections are handed over.
    open: bool,
    /// Connections that stay are served until then.
    until: Instant,
    /// The last state of the connections, and when it was read.
    over: HandOver,
    looked: Option<Instant>,
    /// Time until the next look, unless a connection was taken.
    pace: Duration,
    /// Everything that can be handed over was.
    done: bool,
    /// The new process was told to end.
    ending: bool,
    /// The listeners and their files belong to the new process.
    given_up: bool,
    /// The process, of which this pool is a part, has completed the upgrade: the pool ends by itself.
    completed: bool,
}

impl Upgrades {
    /// When [`WorkerPool::attend_upgrade`] is to be called without an event.
    pub(super) fn due(&self, now: Instant) -> Option<Instant> {
        let state = match &self.state {
            State::None => None,
            State::Starting { successor, .. } if !successor.is_flushed() => Some(now + LOOK),
            State::Starting { until, .. } | State::Trial { until, .. } => Some(*until),
            State::Moving(moving) => {
                Some(if moving.has_queue() { now + LOOK } else { moving.next_look(now) })
            }
        };
        let ending = self.ending.iter().filter_map(|successor| now.checked_add(successor.patience(now)));
        ending.chain(state).chain(self.paused).min()
    }

    /// Returns true until the new process has all connections that were handed over.
    pub(super) fn has_queue(&self) -> bool {
        matches!(&self.state, State::Moving(moving) if moving.has_queue())
    }

    /// Returns true during an upgrade.
    pub(super) const fn is_active(&self) -> bool {
        !matches!(self.state, State::None)
    }

    /// Takes a connection that was unattached for the new process. Returns other ends of connections.
    pub(super) fn take(&mut self, server: &Server, mut ended: Ended) -> Option<Ended> {
        // The framing has given back others: another protocol begins there.
        if ended.cause != Cause::Unattached {
            return Some(ended);
        }
        let Some((fd, resume)) = ended.socket.take().zip(ended.resume.take()) else { return Some(ended) };
        match &mut self.state {
            State::Moving(moving) if moving.open => {
                moving.successor.push_item(MovedConnection::from(*resume).detail(), fd, ended.rest);
                moving.looked = None;
            }
            // The new process has ended.
            _ => drop(server.attach_moved(fd, &ended.rest, *resume)),
        }
        None
    }

    /// The pool accepts nothing more: removes the files of its listeners, unless the new process has them.
    pub(super) fn remove_files(&mut self) {
        self.give_up();
        self.own.iter_mut().for_each(|own| own.files.clear());
    }

    /// The new process has the listeners and the control socket from here on, if it serves.
    fn give_up(&mut self) {
        let Self { own: Some(own), state: State::Moving(moving), .. } = self else { return };
        let part = own.executable.is_none();
        if !moving.open || moving.ending || part && !moving.done {
            return;
        }
        if std::mem::replace(&mut moving.given_up, true) {
            return;
        }
        if !part {
            service_manager::notify(&format!("MAINPID={}", moving.successor.id()));
        }
        own.files.iter_mut().for_each(SocketFile::give_up);
        own.control.iter_mut().for_each(|(_, server)| server.hand_over());
        own.connectors.clear();
    }

    /// Returns true if the process has other services, whose upgrade is completed with this one's.
    fn is_part(&self) -> bool {
        self.own.as_ref().is_some_and(|own| own.executable.is_none())
    }

    /// The pool ends: processes that did not take over are ended, too.
    pub(super) fn end(&mut self) {
        self.ending.iter_mut().for_each(Successor::kill);
    }
}

impl State {
    /// The new process has Go.
    fn go(&mut self, now: Instant) {
        if let Self::Starting { until, told, .. } = self {
            (*until, *told) = (now + HANDSHAKE, true);
        }
    }
}

impl Moving {
    fn has_queue(&self) -> bool {
        self.open && !self.successor.is_flushed()
    }

    fn next_look(&self, now: Instant) -> Instant {
        self.looked.map_or(now, |looked| (looked + self.pace).min(self.until).max(now))
    }
}

impl Upgradable {
    /// A pool of a process that has other services: its Unix listeners' files, those that it inherits, and the other end of its upgrade.
    pub const fn part(
        files: Vec<SocketFile>,
        later: Vec<InheritedFile>,
        predecessor: Option<Predecessor>,
    ) -> Self {
        Self {
            executable: None,
            listen: Vec::new(),
            limit: Duration::ZERO,
            files,
            later,
            control: None,
            connectors: Vec::new(),
            predecessor,
            finished: None,
        }
    }

    /// The objects for a new process.
    fn objects(&self, server: &Server) -> io::Result<Vec<Object>> {
        let mut objects = Vec::new();
        for (name, listener) in self.listen.iter().zip(server.listeners()?) {
            let path = name.strip_prefix("unix:").map(Path::new);
            let file = path.and_then(|path| self.files.iter().find(|file| file.path() == path));
            let detail = json!(file.and_then(SocketFile::identity));
            objects.push(Object {
                kind: LISTENER.to_owned(),
                name: name.clone(),
                detail,
                fd: listener.socket,
            });
        }
        if let Some((path, server)) = &self.control {
            let (fd, file) = server.listener()?;
            let name = path.display().to_string();
            objects.push(Object { kind: CONTROL.to_owned(), name, detail: json!(file), fd });
        }
        Ok(objects)
    }
}

impl WorkerPool {
    /// Enables upgrades (SIGUSR2), and continues the connections of an older process.
    ///
    /// # Errors
    /// Fails if the channel to the older process cannot be watched.
    pub fn enable_upgrades(&mut self, own: Upgradable) -> Result<(), super::Error> {
        if let Some(predecessor) = &own.predecessor {
            let watched = self.driver.watch(predecessor, PREDECESSOR);
            watched.map_err(super::system("listening to the older process"))?;
            // It has ended otherwise, which the next turn finds.
            let _ = predecessor.serves();
        }
        self.upgrades.own = Some(own);
        Ok(())
    }

    /// Starts an upgrade, or says why not.
    pub(super) fn begin_upgrade(&mut self) {
        if self.upgrades.is_part() {
            return self.take_steps();
        }
        let Upgrades { own, state, stats, .. } = &mut self.upgrades;
        let refused = match (&own, &state) {
            (None, _) => "this process cannot be upgraded",
            (_, State::Starting { .. } | State::Trial { .. } | State::Moving(_)) => {
                "an upgrade is in progress"
            }
            _ if self.draining.is_some() => "the mux is draining",
            // pid_namespaces(7): "If the "init" process of a PID namespace terminates, the kernel terminates all of the processes in the namespace"
            _ if std::process::id() == 1 => {
                "this process is process 1 of its PID namespace, whose other processes end with it; start the mux below an init, or use SIGTERM and a restart"
            }
            (Some(Upgradable { predecessor: Some(_), .. }), _) => {
                "connections of the last upgrade are being taken over"
            }
            _ => "",
        };
        let own = own.as_mut().filter(|_| refused.is_empty());
        let Some((own, executable)) = own.and_then(|own| Some((&*own, own.executable.as_ref()?))) else {
            return tracing::warn!("SIGUSR2 ignored: {refused}");
        };
        let path = executable.path().display();
        let objects = own.objects(&self.driver.server());
        let started = objects.and_then(|objects| Successor::start(executable, SERVICE, objects));
        match started {
            Ok(successor) => {
                tracing::info!("upgrade: process {} of {path} starts", successor.id());
                let watched = self.driver.watch(&successor, SUCCESSOR);
                let watched = watched.and_then(|()| self.driver.watch(successor.process(), SUCCESSOR));
                *state = State::Starting { successor, until: Instant::now() + own.limit, told: false };
                self.upgrades.successor_ready = true;
                if let Err(error) = watched {
                    self.cancel_upgrade(&error.to_string());
                }
            }
            Err(error) => {
                stats.failed += 1;
                tracing::error!("upgrade failed: {path}: {error}; this process continues");
            }
        }
    }

    /// Ends an upgrade whose new process has no connections yet.
    pub(super) fn cancel_upgrade(&mut self, why: &str) {
        match std::mem::take(&mut self.upgrades.state) {
            State::Starting { mut successor, .. } | State::Trial { mut successor, .. } => {
                successor.terminate(Instant::now());
                self.continue_without(successor, why);
            }
            state => self.upgrades.state = state,
        }
    }

    /// The new process was told to end by another process before it had connections. It drains those that it accepted.
    fn leave_successor(&mut self) {
        match std::mem::take(&mut self.upgrades.state) {
            State::Starting { successor, .. } | State::Trial { successor, .. } => {
                let why = format!("process {} was told to end", successor.id());
                self.continue_without(successor, &why);
            }
            state => self.upgrades.state = state,
        }
    }

    /// The new process has failed: this one accepts connections again.
    fn continue_without(&mut self, successor: Successor, why: &str) {
        tracing::error!("upgrade failed: {why}; this process continues");
        self.upgrades.stats.failed += 1;
        self.suspend_listening(false);
        self.driver.unwatch(successor.as_fd());
        self.driver.unwatch(successor.process());
        self.upgrades.ending.push(successor);
    }

    /// Stops or resumes accepting: the new process does meanwhile.
    fn suspend_listening(&self, suspend: bool) {
        self.driver.server().suspend_listening(suspend);
        if let Some((_, control)) = self.upgrades.own.as_ref().and_then(|own| own.control.as_ref()) {
            control.suspend(suspend);
        }
    }

    /// The pool drains: an upgrade that has not begun is cancelled, and the older process is told.
    pub(super) fn drain_upgrade(&mut self) {
        self.cancel_upgrade("the mux was told to end");
        let own = self.upgrades.own.as_ref();
        if own.is_some_and(|own| own.executable.is_some()) {
            service_manager::notify("STOPPING=1");
        }
        if let Some(predecessor) = own.and_then(|own| own.predecessor.as_ref()) {
            predecessor.end();
        }
    }

    /// Handles the new and the old process, and unattaches connections.
    pub(super) fn attend_upgrade(&mut self, now: Instant) {
        self.upgrades.ending.retain_mut(|successor| !successor.has_ended(now));
        self.take_over(now);
        let ready = std::mem::take(&mut self.upgrades.successor_ready);
        match &mut self.upgrades.state {
            State::None => {}
            State::Starting { .. } => self.prepare_successor(ready, now),
            State::Trial { .. } => self.try_successor(ready, now),
            State::Moving(_) => self.unattach_connections(ready, now),
        }
    }

    /// The new process prepares: it gets Go when it is ready.
    fn prepare_successor(&mut self, news: bool, now: Instant) {
        let State::Starting { successor, until, told } = &mut self.upgrades.state else { return };
        let late = now >= *until;
        // If the new process has closed the channel, it may have said why before.
        let _ = successor.flush();
        if !news && !late {
            return;
        }
        // Before the channel is read: a process that has ended sends nothing more.
        let status = successor.try_wait().map(|status| format!("ended ({status})"));
        let (id, told, mut heard) = (successor.id(), *told, successor.receive());
        // It waits for Go for a limited time: what follows Ready says that it has given up.
        let ready = !told && matches!(heard, Ok(Some(Message::Ready)));
        if ready {
            heard = successor.receive();
        }
        match heard {
            Ok(None) if ready && status.is_none() => {
                // There is room in the channel: it has the objects.
                successor.push(Message::Go);
                if let Err(error) = successor.flush() {
                    return self.cancel_upgrade(&format!("process {id} has closed the channel: {error}"));
                }
                self.upgrades.state.go(now);
            }
            Ok(Some(Message::Serving)) if told => self.begin_trial(now),
            Ok(Some(Message::Refused { reason })) => {
                self.cancel_upgrade(&format!("process {id} refuses: {reason}"));
            }
            Ok(Some(Message::Ending)) => self.leave_successor(),
            Ok(Some(_)) => self.cancel_upgrade(&format!("process {id} sent an invalid message")),
            Ok(None) if late => {
                let what = if told { "did not serve" } else { "was not ready" };
                self.cancel_upgrade(&format!("process {id} {what} in time"));
            }
            Ok(None) if status.is_none() => {}
            Ok(None) => self.cancel_upgrade(&format!("process {id} {}", status.unwrap_or_default())),
            // An exit closes the channel first. The status says more.
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof && status.is_none() && !late => {
                self.driver.unwatch(successor.as_fd());
                *until = (*until).min(now + EXIT);
            }
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                let how = status.unwrap_or_else(|| "closed the channel".to_owned());
                self.cancel_upgrade(&format!("process {id} {how}"));
            }
            Err(_) => self.cancel_upgrade(&format!("process {id} sent an invalid message")),
        }
    }

    /// The new process serves: this one stops accepting, but keeps the listeners.
    fn begin_trial(&mut self, now: Instant) {
        let State::Starting { successor, .. } = std::mem::take(&mut self.upgrades.state) else { return };
        self.suspend_listening(true);
        self.upgrades.state = State::Trial { successor, until: now + TRIAL };
        self.try_successor(true, now);
    }

    /// The new process serves, but has no connections of this one.
    fn try_successor(&mut self, news: bool, now: Instant) {
        let State::Trial { successor, until } = &mut self.upgrades.state else { return };
        let late = now >= *until;
        if !news && !late {
            return;
        }
        let id = successor.id();
        let status = successor.try_wait().map(|status| format!("ended ({status})"));
        match (successor.receive(), status) {
            (Ok(Some(Message::Ending)), _) => self.leave_successor(),
            (Ok(Some(_)), _) => self.cancel_upgrade(&format!("process {id} sent an invalid message")),
            (_, Some(status)) => self.cancel_upgrade(&format!("process {id} {status}")),
            (Err(error), None) => {
                self.cancel_upgrade(&format!("process {id} has closed the channel: {error}"));
            }
            (Ok(None), None) if late => self.begin_hand_over(now),
            (Ok(None), None) => {}
        }
    }

    /// The steps of the process, of which this pool is a part.
    fn take_steps(&mut self) {
        while let Some(step) = self.signals.step() {
            match step {
                Step::HandOver(successor) => self.hand_over_to(successor),
                Step::Complete => self.complete_part(),
            }
        }
    }

    /// A new process has replaced that of this pool, which ends with the connections that stay.
    fn complete_part(&mut self) {
        match &mut self.upgrades.state {
            State::Moving(moving) if moving.done => {
                moving.completed = true;
                self.driver.server().stop_listening();
                self.upgrades.give_up();
            }
            _ if self.draining.is_none() => self.begin_drain(Instant::now(), self.config.drain),
            _ => {}
        }
    }

    /// The process, of which this pool is a part, is replaced by a new one.
    fn hand_over_to(&mut self, successor: Successor) {
        if self.draining.is_some() {
            return self.signals.tell(Moved::Completely);
        }
        self.driver.server().suspend_listening(true);
        // Fails if there is no memory: a loss is then found at the next item.
        let _ = self.driver.watch(&successor, SUCCESSOR);
        self.begin_moving(successor, Instant::now());
    }

    /// The new process has served for a while: it gets the connections.
    fn begin_hand_over(&mut self, now: Instant) {
        let State::Trial { successor, .. } = std::mem::take(&mut self.upgrades.state) else { return };
        tracing::info!("upgrade: process {} serves from here on", successor.id());
        self.driver.unwatch(successor.process());
        self.begin_moving(successor, now);
    }

    fn begin_moving(&mut self, successor: Successor, now: Instant) {
        let moving = Moving {
            successor,
            open: true,
            until: now + self.config.drain,
            over: HandOver::default(),
            looked: None,
            pace: LOOK,
            done: false,
            ending: false,
            given_up: false,
            completed: false,
        };
        self.upgrades.state = State::Moving(Box::new(moving));
        self.unattach_connections(false, now);
    }

    /// Reads the channel, and unattaches connections.
    fn unattach_connections(&mut self, ready: bool, now: Instant) {
        let server = self.driver.server();
        let State::Moving(moving) = &mut self.upgrades.state else { return };
        if ready && moving.open {
            match moving.successor.receive() {
                Ok(None) => {}
                Ok(Some(Message::Ending)) => {
                    tracing::info!(
                        "process {} was told to end; this process drains, too",
                        moving.successor.id()
                    );
                    (moving.until, moving.ending) = (now, true);
                }
                Ok(Some(_)) => self.lose_successor("sent an invalid message"),
                Err(error) => self.lose_successor(&format!("has closed the channel: {error}")),
            }
        }
        let config = server.look(|mux| *mux.config());
        let stay = matches!(config.on_worker_end, OnWorkerEnd::Close { .. }) || config.connected;
        let State::Moving(moving) = &mut self.upgrades.state else { return };
        // A connection that waits here is not served.
        if now < moving.next_look(now) || moving.open && moving.successor.queued() >= BURST {
            return;
        }
        let moves = moving.open && !moving.done && !stay && self.draining.is_none();
        if !moving.open {
            // It may have exited.
            moving.successor.try_wait();
        }
        let patience = moving.until.saturating_duration_since(now);
        let before = std::mem::replace(&mut moving.over, server.hand_over(moves.then_some(patience)));
        moving.pace = if moving.over == before { STAY } else { LOOK };
        moving.looked = Some(now);
    }

    /// The new process has ended. If it did not have everything, this one serves what it still has, and accepts connections again
    /// unless it drains.
    fn lose_successor(&mut self, how: &str) {
        let part = self.upgrades.is_part();
        let State::Moving(moving) = &mut self.upgrades.state else { return };
        moving.open = false;
        self.driver.unwatch(moving.successor.as_fd());
        if moving.given_up && moving.successor.is_flushed() {
            return;
        }
        self.signals.tell(Moved::Lost);
        let back = moving.successor.take_back();
        // The process of a part decides what the end of the new one means.
        let ending = moving.ending && !part;
        let continues = !moving.given_up && !ending && self.draining.is_none();
        let server = self.driver.server();
        for (detail, fd, bytes) in back {
            if let Some(moved) = MovedConnection::parse(detail) {
                let _ = server.attach_moved(fd, &bytes, moved.into());
            }
        }
        let id = moving.successor.id();
        if continues {
            let State::Moving(mut moving) = std::mem::take(&mut self.upgrades.state) else { return };
            moving.successor.terminate(Instant::now());
            return self.continue_without(moving.successor, &format!("process {id} {how}"));
        }
        if !moving.ending {
            tracing::error!(
                "process {id} {how}; this process serves the connections that it still has, and ends: start the mux again"
            );
            self.upgrades.stats.failed += 1;
        }
    }

    /// Sends connections that were unattached, and begins the drain when none is left, or at the deadline. Called after their ends were
    /// read.
    pub(super) fn finish_upgrade(&mut self, now: Instant) {
        let part = self.upgrades.is_part();
        let State::Moving(moving) = &mut self.upgrades.state else { return };
        let stats = &mut self.upgrades.stats;
        if moving.open {
            match moving.successor.flush() {
                Ok(items) => stats.handed_over += items,
                Err(error) => return self.lose_successor(&format!("has closed the channel: {error}")),
            }
        }
        // After SIGTERM to this process: the new one must learn that nothing more follows.
        let drained = self.draining.is_some() && self.driver.is_drained();
        if drained {
            moving.over = HandOver::default();
        }
        let HandOver { finishing, waiting, staying } = moving.over;
        let (looked, mut given_up) = (moving.looked == Some(now) || drained, false);
        let part = part && self.draining.is_none() && !moving.completed;
        let late = now >= moving.until;
        let complete = looked && finishing + waiting == 0 && moving.successor.is_flushed();
        if !moving.done && moving.open && (complete || part && late) {
            moving.done = true;
            moving.successor.push(Message::Done);
            given_up = true;
            stats.stayed += staying as u64;
            let most = moving.until.saturating_duration_since(now).as_secs();
            tracing::info!(
                "upgrade: {} handed over to process {}, {staying} stay for up to {most} s",
                count(stats.handed_over, "connection"),
                moving.successor.id()
            );
        }
        if part {
            // The process owns the listeners and completes the upgrade, or takes everything back.
            if moving.done {
                // A new process that ends has not taken over.
                self.signals.tell(if moving.ending { Moved::Lost } else { Moved::Completely });
            }
            return;
        }
        let empty = looked && moving.over == HandOver::default() && (moving.done || !moving.open);
        let until = moving.until;
        if given_up {
            self.driver.server().stop_listening();
            self.upgrades.give_up();
        }
        if self.draining.is_none() && (empty || late) {
            let open = self.driver.server().look(|mux| mux.totals().attach - mux.totals().unattach);
            if late {
                self.upgrades.stats.closed += open;
                tracing::warn!(
                    "upgrade: {} had not ended in time and are drained",
                    count(open, "connection")
                );
            }
            let patience = if late { self.config.drain } else { until.saturating_duration_since(now) };
            self.begin_drain(now, patience);
        }
    }
}
