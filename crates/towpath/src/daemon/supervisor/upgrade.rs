//! Upgrade of `towpath run`: another version of the program takes over while packets flow ([`crate::upgrade`]).
//!
//! ```text
//! old engine                                          new engine (started by the launcher, as root)
//! objects: launcher, ports, listeners         ---->   opens everything, starts its threads, receives nothing
//!                                             <----   Ready, or Refused(reason)
//! stops receiving, decides every held packet;
//! packets wait in the kernel's rings
//! items: states, inspectors; Go               ---->   restores states, gives inspectors new rings
//!                                             <----   Serving; receives
//! waits for [`TRIAL`];
//! muxes: connections (channel of each mux)    ---->   attach them
//! Done; ends                                  ---->   owns the files
//! ```
//!
//! No packet and no frame travels: the old engine decides all that it has, so that an inspector has no frame when it is handed over. It gets
//! new rings on its connection, because sealed memory cannot be mapped for writing by another process. Verdicts for flows, counters and
//! rules that were changed at run time do not travel: the new engine reads the files, as at a reload.
//!
//! Until Done, the old engine keeps every descriptor. If the new one refuses, ends, or is late, it is killed, and the old one receives
//! again from where the kernel's rings are.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::fs::{MemfdFlags, memfd_create};
use serde_json::json;
use towpath_port::HandOver;

use super::super::inherited::{self, FileId, Inherited, ItemDetail, SERVICE};
use super::super::inspector_sockets::Socket;
use super::super::mux_service::Service;
use super::super::worker_command::WorkerCommand;
use super::{ACCEPTS_PER_TURN, Failure, Supervisor, idle_wait};
use crate::logging::OPERATOR;
use crate::offload::Offloading;
use crate::process::{Child, Remote};
use crate::quantity::count;
use crate::service_manager;
use crate::snapshot;
use crate::upgrade::{Channel, EXIT, HANDSHAKE, Message, Object, Successor, TRIAL};
use crate::worker_pool::Moved;

/// Time for inspectors to return overdue frames, beyond the longest deadline of a queue.
const RETURN: Duration = Duration::from_secs(1);
/// Time beyond that for the threads to pause.
const SETTLE: Duration = Duration::from_secs(2);
/// Time for inspectors to take their new rings.
const ATTACH: Duration = Duration::from_secs(2);
/// Time for a thread to answer.
const ANSWER: Duration = Duration::from_secs(5);
/// Interval of looks at a channel that is full, and at sockets of inspectors.
const LOOK: Duration = Duration::from_millis(2);

/// A server that starts when the process that this one replaces has stopped.
pub(super) type Later = Box<dyn FnOnce(&mut Supervisor) -> Result<(), Failure>>;

/// The queues and sockets of inspectors that were given up.
type Inspectors = Vec<(u16, OwnedFd)>;

/// State of an upgrade at the old engine.
#[derive(Debug, Default)]
pub(super) enum Upgrade {
    #[default]
    None,
    /// The new engine prepares, until this time at the latest.
    Starting { successor: Successor, until: Instant, muxes: Vec<Channel> },
    /// The new engine has everything but the connections of muxes. This one waits until the time.
    HandedOver { successor: Successor, until: Instant, phase: Phase, inspectors: Inspectors },
    /// Both engines end. This one has the files.
    Ending(Successor),
}

/// The new engine has everything that this one had when it stopped.
#[derive(Debug)]
pub(super) enum Phase {
    /// It does not receive packets yet.
    Taking(Vec<Channel>),
    /// It carries packets and accepts connections.
    Trial(Vec<Channel>),
    /// The muxes hand over their connections.
    Moving,
}

impl Upgrade {
    /// Returns true while this engine receives nothing.
    pub(super) const fn is_handed_over(&self) -> bool {
        matches!(self, Self::HandedOver { .. })
    }

    /// Returns true while the muxes hand over connections.
    pub(super) const fn moves(&self) -> bool {
        matches!(self, Self::HandedOver { phase: Phase::Moving, .. })
    }

    /// Returns true if both engines end.
    pub(super) const fn is_ending(&self) -> bool {
        matches!(self, Self::Ending(_))
    }

    /// Returns true while the new engine runs and both end.
    pub(super) fn is_outlived(&self) -> bool {
        matches!(self, Self::Ending(successor) if !successor.is_over())
    }

    /// The descriptors that become readable with news.
    pub(super) fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let successor = match self {
            Self::None | Self::Ending(_) => None,
            Self::Starting { successor, .. } | Self::HandedOver { successor, .. } => Some(successor),
        };
        successor.into_iter().flat_map(|successor| [successor.as_fd(), successor.process()])
    }
}

impl Supervisor {
    /// Publishes which upgrades are possible.
    pub(super) fn offer_upgrades(&self) {
        let impossible = match &self.launcher {
            None => Some("root has not started this engine: stop it and start the new version".to_owned()),
            Some(_) => None,
        };
        self.counters.upgrade(|desk| {
            desk.programs.clone_from(&self.config.engine.upgrade);
            desk.impossible = impossible;
        });
    }

    /// SIGUSR2: requests an upgrade to the first program of the configuration.
    pub(super) fn request_upgrade(&self) {
        let refused = self.counters.upgrade(|desk| {
            let why = match &desk.impossible {
                _ if desk.running => "an upgrade is in progress".to_owned(),
                Some(why) => why.clone(),
                None if desk.programs.is_empty() => "`upgrade` of [engine] names no program".to_owned(),
                None => {
                    (desk.wanted, desk.running, desk.failed) = (Some(0), true, None);
                    return None;
                }
            };
            Some(why)
        });
        if let Some(why) = refused {
            log::warn!("SIGUSR2 ignored: {why}");
        }
    }

    /// Continues an upgrade. Returns true if another engine has replaced this one, which ends.
    pub(super) fn attend_upgrade(&mut self) -> bool {
        if self.own_files() {
            service_manager::notify("READY=1");
        }
        match &self.upgrade {
            Upgrade::None => {
                if let Some(at) = self.counters.upgrade(|desk| desk.wanted.take())
                    && let Err(why) = self.begin_upgrade(at)
                {
                    self.fail(&why);
                }
                false
            }
            Upgrade::Starting { .. } => {
                self.attend_start();
                false
            }
            Upgrade::HandedOver { .. } => self.attend_hand_over(),
            Upgrade::Ending(_) => false,
        }
    }

    fn fail(&self, why: &str) {
        log::error!(target: OPERATOR, "not upgraded: {why}; this engine continues");
        self.counters.upgrade(|desk| (desk.running, desk.failed) = (false, Some(why.to_owned())));
        self.counters.update(|servers| servers.upgrades.failed += 1);
    }

    /// Starts the program number `at`.
    fn begin_upgrade(&mut self, at: usize) -> Result<(), String> {
        let text = |error: io::Error| error.to_string();
        if self.inherited.is_some() {
            return Err("the last upgrade is not complete".to_owned());
        }
        let launcher = self.launcher.as_ref().ok_or("the engine has no launcher")?;
        let path = self.config.engine.upgrade.get(at).ok_or("the configuration has changed")?.clone();
        let (mut objects, muxes) = self.objects()?;
        let (ours, theirs) = Channel::pair().map_err(text)?;
        let (child, connection): (Child, OwnedFd) =
            launcher.upgrade(at, theirs.as_fd()).map_err(|error| format!("{}: {error}", path.display()))?;
        drop(theirs);
        objects.push(inherited::launcher(connection));
        log::info!(target: OPERATOR, "upgrade: process {} of {} starts", child.id(), path.display());
        let mut successor = Successor::over(ours, child, SERVICE, objects);
        let _ = successor.flush();
        let until = Instant::now() + self.config.engine.upgrade_time;
        self.upgrade = Upgrade::Starting { successor, until, muxes };
        Ok(())
    }

    /// Copies of the descriptors of ports and listeners, and the channels of the muxes.
    fn objects(&self) -> Result<(Vec<Object>, Vec<Channel>), String> {
        let text = |error: io::Error| error.to_string();
        let mut objects = Vec::new();
        for (thread, worker) in self.workers.iter().enumerate() {
            let (to, from) = channel();
            worker.say(WorkerCommand::Ports(to));
            let parts = from.recv_timeout(ANSWER).map_err(|_| format!("thread {thread} does not answer"))?;
            for (port, part) in self.config.ports.iter().zip(parts) {
                let part: HandOver = part.map_err(text)?.ok_or_else(|| {
                    format!("port {}: {} ports cannot be handed over", port.name, port.driver.name())
                })?;
                objects.extend(inherited::port(&port.name, thread, part));
            }
        }
        let mut listener = |name: &str, found: Option<io::Result<(OwnedFd, FileId)>>| {
            if let Some(found) = found.transpose().map_err(text)? {
                objects.push(inherited::listener(name, found));
            }
            Ok::<_, String>(())
        };
        listener(inherited::CONTROL, self.server.as_ref().map(|server| server.listener()))?;
        listener(inherited::DUMPS, self.dumps.as_ref().map(|dumps| dumps.listener()))?;
        listener(inherited::METRICS, self.endpoint.as_ref().map(|endpoint| endpoint.listener()))?;
        for socket in &self.sockets {
            listener(&inherited::queue(socket.queue), socket.listener().transpose())?;
        }
        let mut muxes = Vec::new();
        for service in &self.services {
            let (parts, channel) = service.objects().map_err(text)?;
            objects.extend(parts);
            muxes.push(channel);
        }
        Ok((objects, muxes))
    }

    /// The new engine prepares: when it is ready, this one stops and hands over.
    fn attend_start(&mut self) {
        let Upgrade::Starting { mut successor, until, muxes } = std::mem::take(&mut self.upgrade) else {
            return;
        };
        let _ = successor.flush();
        match news(&mut successor, until, "was not ready") {
            Ok(None) => self.upgrade = Upgrade::Starting { successor, until, muxes },
            Ok(Some(Message::Ready)) => match self.hand_over(&mut successor) {
                Ok(inspectors) => {
                    let until = Instant::now() + HANDSHAKE;
                    let phase = Phase::Taking(muxes);
                    self.upgrade = Upgrade::HandedOver { successor, until, phase, inspectors };
                }
                Err((why, inspectors)) => self.take_back(successor, inspectors, &why),
            },
            Ok(Some(_)) => self.give_up(successor, "it sent an invalid message"),
            Err(why) => self.give_up(successor, &why),
        }
    }

    /// The new engine has everything. Returns true when it has carried packets for a while.
    fn attend_hand_over(&mut self) -> bool {
        let upgrade = std::mem::take(&mut self.upgrade);
        let Upgrade::HandedOver { mut successor, mut until, mut phase, inspectors } = upgrade else {
            return false;
        };
        let taking = matches!(phase, Phase::Taking(_));
        let late = if taking { until } else { Instant::now() + TRIAL };
        match news(&mut successor, late, "did not receive packets") {
            Ok(None) => {
                phase = match phase {
                    Phase::Trial(muxes) if Instant::now() >= until => {
                        until = self.move_connections(&successor, muxes);
                        Phase::Moving
                    }
                    phase => phase,
                };
                if matches!(phase, Phase::Moving) {
                    let moved: Vec<_> = self.services.iter_mut().map(Service::moved).collect();
                    // A new engine that ends closes its channels first.
                    if moved.contains(&Moved::Lost) {
                        until = until.min(Instant::now() + EXIT);
                    }
                    let complete = moved.iter().all(|moved| *moved == Moved::Completely);
                    if successor.closed().is_none() && (complete || Instant::now() >= until) {
                        self.complete(&mut successor);
                        return true;
                    }
                }
                self.upgrade = Upgrade::HandedOver { successor, until, phase, inspectors };
            }
            Ok(Some(Message::Serving)) if let Phase::Taking(muxes) = phase => {
                log::info!(target: OPERATOR, "upgrade: process {} carries packets from here on", successor.id());
                let (until, phase) = (Instant::now() + TRIAL, Phase::Trial(muxes));
                self.upgrade = Upgrade::HandedOver { successor, until, phase, inspectors };
            }
            Ok(Some(_)) => self.take_back(successor, inspectors, "it sent an invalid message"),
            Err(why) => self.take_back(successor, inspectors, &why),
        }
        false
    }

    /// The muxes hand over their connections. Returns the time until which they do so.
    fn move_connections(&self, successor: &Successor, muxes: Vec<Channel>) -> Instant {
        let longest = self.services.iter().map(Service::drain_time).max();
        self.services.iter().zip(muxes).for_each(|(service, channel)| service.hand_over(successor, channel));
        Instant::now() + longest.unwrap_or_default() + ANSWER
    }

    /// Stops or resumes accepting connections and clients.
    fn suspend_listening(&self, suspend: bool) {
        self.server.iter().for_each(|server| server.suspend(suspend));
        self.services.iter().for_each(|service| service.suspend(suspend));
    }

    /// Ends a new engine that has got nothing.
    fn give_up(&mut self, mut successor: Successor, why: &str) {
        successor.kill();
        self.fail(why);
    }

    /// Stops receiving, and passes on the states and the inspectors. With an error, returns the inspectors that were given up.
    fn hand_over(&mut self, successor: &mut Successor) -> Result<Inspectors, (String, Inspectors)> {
        let (begun, stopped) = (Instant::now(), inherited::now());
        let lost = |why: String| (why, Vec::new());
        // The kernel forwards nothing from here on: the states have what it has counted.
        self.offload_paused = self.offload.as_ref().map(Offloading::pause);
        self.pause().map_err(lost)?;
        // The next engine writes the same file.
        self.running = None;
        self.suspend_listening(true);
        let (mut inspectors, mut ports) = (Vec::new(), Vec::new());
        for worker in &self.workers {
            let (to, from) = channel();
            worker.say(WorkerCommand::HandOver(to));
            match from.recv_timeout(ANSWER) {
                Ok(found) => {
                    inspectors.extend(found.inspectors);
                    ports.push(found.ports.iter().map(inherited::counters).collect());
                }
                Err(_) => return Err(("a thread does not answer".to_owned(), inspectors)),
            }
        }
        match self.push_items(successor, &inspectors, ItemDetail::States { stopped, ports }) {
            Ok(()) => {
                log::info!(
                    target: OPERATOR,
                    "upgrade: {} and {} handed over in {:.1} ms",
                    count(self.ruleset.state_counters().now, "state"),
                    count(inspectors.len() as u64, "inspector"),
                    begun.elapsed().as_secs_f64() * 1e3
                );
                Ok(inspectors)
            }
            Err(error) => Err((format!("handing over: {error}"), inspectors)),
        }
    }

    /// Waits until no thread has a packet.
    fn pause(&self) -> Result<(), String> {
        let deadlines = self.config.queues.iter().map(|queue| Duration::from_nanos(queue.policy.deadline));
        let until = Instant::now() + deadlines.max().unwrap_or_default() + RETURN;
        let (begun, paused) = channel::<()>();
        for worker in &self.workers {
            worker.say(WorkerCommand::Pause(until, begun.clone()));
        }
        drop(begun);
        // No message ever arrives: the call returns when the last sender is dropped.
        match paused.recv_timeout(until + SETTLE - Instant::now()) {
            Err(RecvTimeoutError::Disconnected) => Ok(()),
            _ => Err("packets were not decided in time".to_owned()),
        }
    }

    fn push_items(
        &mut self,
        successor: &mut Successor,
        inspectors: &[(u16, OwnedFd)],
        detail: ItemDetail,
    ) -> io::Result<()> {
        let mut states = File::from(memfd_create("towpath-states", MemfdFlags::CLOEXEC)?);
        let mut written = Ok(());
        self.ruleset.snapshot(|piece| {
            if written.is_ok() {
                written = states.write_all(piece);
            }
        });
        written?;
        successor.push_item(json!(detail), states.into(), bytes::Bytes::new());
        for (queue, socket) in inspectors {
            let detail = json!(ItemDetail::Inspector { queue: *queue });
            successor.push_item(detail, socket.try_clone()?, bytes::Bytes::new());
        }
        for socket in &mut self.sockets {
            let queue = socket.queue;
            for (pidfd, words, id, user) in socket.children()? {
                let detail = json!(ItemDetail::Child { queue, words, id, user });
                successor.push_item(detail, pidfd, bytes::Bytes::new());
            }
        }
        successor.push(Message::Go);
        let until = Instant::now() + ANSWER;
        loop {
            successor.flush()?;
            if successor.is_flushed() {
                return Ok(());
            }
            if Instant::now() >= until {
                return Err(io::ErrorKind::TimedOut.into());
            }
            idle_wait(&mut [PollFd::new(&*successor, PollFlags::OUT)], LOOK);
        }
    }

    /// The new engine has failed after this one had stopped: ends it, takes the inspectors back, and receives again.
    fn take_back(&mut self, mut successor: Successor, inspectors: Vec<(u16, OwnedFd)>, why: &str) {
        // Two processes must not receive: it has ended when this returns.
        successor.kill();
        drop(successor);
        self.adopt(inspectors);
        self.offload_paused = None;
        self.workers.iter().for_each(|worker| worker.say(WorkerCommand::Resume));
        self.suspend_listening(false);
        if let Err(error) = self.save_states() {
            log::warn!("states are not saved while the engine runs: no thread: {error}; reload again");
        }
        self.fail(why);
    }

    /// Gives inspectors new rings, in this order, and waits until they have them.
    fn adopt(&mut self, inspectors: Vec<(u16, OwnedFd)>) {
        let mut sockets = std::mem::take(&mut self.sockets);
        let mut order = Vec::new();
        for (queue, client) in inspectors {
            if let Ok(peer) = towpath_ring::Credentials::of(&client) {
                order.push((queue, peer.pid));
            }
            match sockets.iter_mut().find(|socket| socket.queue == queue) {
                Some(socket) => socket.adopt(client),
                None => log::warn!("queue {queue}: no such queue; its inspector was detached"),
            }
        }
        let until = Instant::now() + ATTACH;
        let mut attached = Vec::new();
        loop {
            for socket in &mut sockets {
                for _ in 0..ACCEPTS_PER_TURN {
                    let Some((channel, standby)) = socket.accept() else { break };
                    attached.push((socket.queue, channel, standby));
                }
            }
            let left = sockets.iter().map(Socket::adopting).sum::<usize>();
            if left == 0 {
                break;
            }
            if Instant::now() >= until {
                log::warn!(
                    "upgrade: {} did not take new rings in time, and may do so later",
                    count(left as u64, "inspector")
                );
                break;
            }
            let mut fds: Vec<_> = sockets.iter().map(|socket| PollFd::new(socket, PollFlags::IN)).collect();
            idle_wait(&mut fds, LOOK);
        }
        // Flows are divided by the order of the inspectors.
        let place =
            |queue: u16, pid: u32| order.iter().position(|at| *at == (queue, pid)).unwrap_or(usize::MAX);
        attached.sort_by_key(|(queue, channel, _)| place(*queue, channel.peer().pid));
        for (queue, channel, standby) in attached {
            self.join(queue, channel, standby);
        }
        self.sockets = sockets;
    }

    /// The new engine carries packets: this one gives up its files and processes, and ends.
    fn complete(&mut self, successor: &mut Successor) {
        service_manager::notify(&format!("MAINPID={}", successor.id()));
        self.server.iter_mut().for_each(|server| server.hand_over());
        self.endpoint.iter_mut().for_each(|endpoint| endpoint.give_up_file());
        self.dumps.iter_mut().for_each(|dumps| dumps.give_up_file());
        for socket in &mut self.sockets {
            socket.give_up_file();
            socket.leave_children();
        }
        if let Some(launcher) = &self.launcher {
            launcher.hand_over();
        }
        successor.push(Message::Done);
        // The end of the channel says the same.
        let _ = successor.flush();
        log::info!(target: OPERATOR, "upgrade: process {} has replaced this one, which ends", successor.id());
    }

    /// This engine is told to stop: an engine that does not carry packets yet is ended, and one that does ends as this one does.
    pub(super) fn stop_upgrade(&mut self) {
        // The stop may come before the turn in which the end of the process before is seen.
        self.own_files();
        match std::mem::take(&mut self.upgrade) {
            Upgrade::None | Upgrade::Ending(_) => {}
            Upgrade::HandedOver { successor, phase: Phase::Trial(_) | Phase::Moving, .. }
                if !successor.is_over() =>
            {
                self.end_with(successor);
            }
            Upgrade::Starting { successor, .. } => self.give_up(successor, "the engine was told to stop"),
            Upgrade::HandedOver { successor, inspectors, .. } => {
                self.take_back(successor, inspectors, "the engine was told to stop");
            }
        }
    }

    /// The new engine has packets and clients: it drains as this one does. This one removes the files, when both have ended.
    fn end_with(&mut self, mut successor: Successor) {
        successor.push(Message::Ending);
        // Its end says the same.
        let _ = successor.flush();
        self.sockets.iter_mut().for_each(Socket::leave_children);
        if let Some(launcher) = &self.launcher {
            launcher.hand_over();
        }
        self.upgrade = Upgrade::Ending(successor);
    }

    /// Returns true if the process that this one replaces was told to end, with this one.
    pub(super) fn ends_with_predecessor(&self) -> bool {
        self.inherited.as_ref().is_some_and(Inherited::is_ending)
    }

    /// Takes over from the process that this one replaces: waits until it has stopped, restores the states, and gives the inspectors new
    /// rings. Returns false if it replaces none.
    pub(super) fn take_over(&mut self, later: Vec<Later>) -> Result<bool, Failure> {
        let Some(inherited) = self.inherited.take() else { return Ok(false) };
        let taken = self.take_over_from(inherited, later);
        if taken.is_err() {
            // They are the old engine's, which continues.
            self.sockets.iter_mut().for_each(Socket::leave_children);
        }
        taken.map(|()| true)
    }

    fn take_over_from(&mut self, mut inherited: Inherited, later: Vec<Later>) -> Result<(), Failure> {
        let deadlines = self.config.queues.iter().map(|queue| Duration::from_nanos(queue.policy.deadline));
        let limit = deadlines.max().unwrap_or_default() + RETURN + SETTLE + 4 * ANSWER;
        let items = inherited.wait(limit).map_err(Failure::Upgrade)?;
        let begun = Instant::now();
        let mut restored = None;
        if let Some(states) = &items.states {
            match self.ruleset.restore(states, self.ruleset.clock().now()) {
                Ok(states) => restored = Some(states),
                Err(error) => return Err(Failure::Upgrade(io::Error::other(format!("states: {error}")))),
            }
        }
        if let Some(launcher) = &self.launcher {
            for (detail, pidfd) in items.children {
                let ItemDetail::Child { queue, words, id, user } = detail else { continue };
                let remote = std::sync::Arc::clone(launcher) as std::sync::Arc<dyn Remote>;
                let mut child = Child::of_launcher(id, pidfd, remote);
                match self.sockets.iter_mut().find(|socket| socket.queue == queue) {
                    Some(socket) => socket.adopt_child(child, &words, user),
                    None => drop(child.kill()),
                }
            }
        }
        self.adopt(items.inspectors);
        for (worker, ports) in self.workers.iter().zip(items.ports) {
            worker.say(WorkerCommand::Counters(ports));
        }
        match inherited.serves() {
            // It has ended: it would kill this one before it closes the channel. This one has everything.
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {
                log::warn!(target: OPERATOR, "upgrade: process {} ended before this one carried packets", inherited.id());
            }
            serves => serves.map_err(Failure::Upgrade)?,
        }
        // Packets come before clients.
        self.workers.iter().for_each(|worker| worker.say(WorkerCommand::Begin));
        let pause = items.stopped.map_or(0, |stopped| inherited::now().saturating_sub(stopped));
        self.counters.update(|servers| servers.upgrades.pause = pause);
        self.services.iter_mut().try_for_each(Service::listen)?;
        for start in later {
            start(self)?;
        }
        if let Some(server) = &self.server {
            server.suspend(false);
        }
        log::info!(
            target: OPERATOR,
            "upgrade: took over from process {} in {:.1} ms, {:.1} ms after it stopped receiving: {}",
            inherited.id(),
            begun.elapsed().as_secs_f64() * 1e3,
            pause as f64 / 1e6,
            restored.map_or_else(String::new, snapshot::told)
        );
        if restored.is_some_and(|restored| restored.default_dynamic > 0 || restored.unchecked)
            && self.config.reload != towpath_gate::StatePolicy::Keep
        {
            self.ruleset.recheck();
            self.rechecking = self.ruleset.rechecks().running;
        }
        self.inherited = Some(inherited);
        Ok(())
    }

    /// This process ends with its launcher, and so does the one that it replaces: waits until that one gives up its files, ends, or says that it
    /// removes them.
    pub(super) fn settle_files(&mut self) {
        let until = Instant::now() + ANSWER;
        while !self.own_files() && Instant::now() < until {
            let Some(inherited) = self.inherited.as_ref().filter(|inherited| !inherited.is_ending()) else {
                return;
            };
            idle_wait(&mut [PollFd::new(inherited, PollFlags::IN)], LOOK);
        }
    }

    /// Owns the files of the process that this one replaces, when that has given them up or has ended. Returns true then.
    pub(super) fn own_files(&mut self) -> bool {
        let Some(files) = self.inherited.as_mut().and_then(|inherited| inherited.ended()) else {
            return false;
        };
        self.inherited = None;
        for (name, file) in files {
            match &*name {
                inherited::CONTROL => self.server.iter_mut().for_each(|server| server.own_file(file)),
                inherited::DUMPS => self.dumps.iter_mut().for_each(|dumps| dumps.own_file(file)),
                inherited::METRICS => self.endpoint.iter_mut().for_each(|endpoint| endpoint.own_file(file)),
                _ => {
                    let queue = self.sockets.iter_mut().find(|socket| inherited::queue(socket.queue) == name);
                    queue.into_iter().for_each(|socket| socket.own_file(file));
                }
            }
        }
        true
    }
}

/// The next message of the new engine, until the time; or how it has failed.
fn news(successor: &mut Successor, until: Instant, what: &str) -> Result<Option<Message>, String> {
    let id = successor.id();
    // Before the channel is read: a process that has ended sends nothing more.
    let status = successor.try_wait();
    match successor.receive() {
        Ok(Some(Message::Refused { reason })) => Err(format!("process {id} refuses: {reason}")),
        Ok(Some(message)) => Ok(Some(message)),
        Ok(None) if status.is_none() && Instant::now() < until => Ok(None),
        Ok(None) if status.is_none() => Err(format!("process {id} {what} in time")),
        Ok(None) => Err(format!("process {id} ended ({})", status.unwrap_or_default())),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => match status {
            Some(status) => Err(format!("process {id} ended ({status})")),
            // Its status follows.
            None if successor.closed().is_some_and(|closed| closed.elapsed() < EXIT) => Ok(None),
            None => Err(format!("process {id} closed the channel")),
        },
        Err(error) => Err(format!("process {id} sent an invalid message: {error}")),
    }
}
