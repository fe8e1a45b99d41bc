//! A worker process: start, attachment, and the messages that it holds.

mod exit;
mod rx_frames;

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use towpath_engine::queue::VerdictStats;
use towpath_mux::io::Driver;
use towpath_mux::mux::{Batch, MessagePart, Order, PartKind, Ticket, psock, worker};
use towpath_ring::reaper::{PeerKey, Reaped, Reaper};
use towpath_ring::{self as ring, Allow, Channel, Death, Endpoint, Geometry, POLL_BYTES, Position, Seq};

use super::authority::{Authority, Rights};
use super::completions::{Answers, Completions};
use super::connections::{EndedEvent, PENDING};
use super::frame::{Out, Stream, place};
use super::tx_lease::TxLeases;
use super::violation::Violation;
use crate::control::commands::show_rings;
use crate::process::{Child, Place, Program, Starter};
pub use exit::WorkerExit;

/// Time for a process to attach.
const ATTACH: Duration = Duration::from_secs(15);
/// Time to exit after its channel was closed. Then it is killed.
const EXIT: Duration = Duration::from_secs(5);
/// Interval of checks of a process without a channel.
const LOOK: Duration = Duration::from_millis(20);
/// Interval of checks whether a retired process has connections.
const RETIRED: Duration = Duration::from_millis(100);
/// Maximum number of messages that it holds: several turns of short ones. The core gives fewer long ones.
const CREDIT: usize = 256;
/// Size of its RX area in bytes.
const RX: u32 = 4 << 20;
/// Maximum number of calls of [`Channel::poll_messages`] per turn, and number of bytes after which no further call
/// follows, so that a worker that only sends does not delay the others.
const ROUNDS: usize = 2;
const TURN_BYTES: usize = 2 * POLL_BYTES;

/// The ring of a worker.
pub(crate) fn worker_ring() -> ring::Config {
    ring::Config {
        rx: Geometry::with(RX, 1024).expect("4 MiB in frames of 1 KiB"),
        deadline: None,
        // A single invalid word means a broken or hostile worker, which is detached.
        violations_max: 0,
        messages: true,
        bursts: true,
        ..ring::Config::default()
    }
}

/// How worker processes are started.
#[derive(Clone, Debug)]
pub(super) struct Command {
    pub(super) program: Program,
    pub(super) place: Place,
    pub(super) starter: Starter,
    /// It attaches when there is a worker on another machine for it, however long that takes.
    pub(super) waits: bool,
}

/// See the documentation of this module.
#[derive(Debug)]
pub(super) struct Process {
    program: String,
    child: Child,
    token: u32,
    started: Instant,
    /// See [`Command::waits`].
    waits: bool,
    /// Maximum number of messages that it holds.
    credit: usize,
    /// Its endpoint, until it attaches.
    endpoint: Option<Reaped<Endpoint>>,
    channel: Option<Reaped<Channel>>,
    /// Its leased frames, if replies may be sent from its memory.
    tx_leases: Option<TxLeases>,
    rights: Rights,
    authority: Authority,
    violation: Option<Violation>,
    /// Its id in the core while it is a worker.
    id: Option<worker::Id>,
    /// It leaves: deadline in nanoseconds of the pool's clock, after which it is killed if it still has
    /// messages.
    leaves: Option<u64>,
    /// It retires: it keeps the connections that it has until this time of the pool's clock ([`Order::Sticky`]).
    retires: Option<u64>,
    /// When its channel was closed, and why it was killed.
    closed: Option<Instant>,
    killed: Option<&'static str>,
    /// The channel is armed: the process will write its doorbell.
    armed: bool,
    /// TX space was freed since the process was last woken; it may wait for it.
    gave_room: bool,
    /// Frames that it holds, by sequence number from `first`. `None`: completed out of order.
    out: VecDeque<Option<Out>>,
    first: Seq,
    working: usize,
    /// Time of its last progress, or of its first message after it was idle, in nanoseconds of the pool's
    /// clock.
    progress: u64,
    /// It has made progress since it was idle.
    moves: bool,
    served: bool,
    /// Taken from the core and not published for lack of space.
    waiting: VecDeque<Batch>,
    /// Parts that are not published, number of bytes of those that it has or that wait, and the messages.
    parts: VecDeque<MessagePart>,
    part_bytes: usize,
    streams: HashMap<Ticket, Stream>,
    /// Released frames. They are applied after all earlier replies.
    released: Vec<Seq>,
    /// Frames with notices of unsent messages or ended events that it has not released.
    notices: VecDeque<Seq>,
    /// Ended events that are not published.
    ended: VecDeque<Arc<EndedEvent>>,
    batch: Vec<Batch>,
}

/// Result of a check of a process.
#[derive(Debug)]
pub(super) enum ProcessState {
    /// No change.
    Same,
    /// It has attached.
    Attached,
    /// It has ended.
    Gone(WorkerExit),
}

impl Process {
    /// Starts `command` with the path of its socket in TOWPATH_SOCKET.
    pub(super) fn start(
        command: &Command,
        path: &Path,
        driver: &Driver,
        token: u32,
        rights: Rights,
        now: Instant,
    ) -> Result<Self, WorkerExit> {
        let mut endpoint = Endpoint::bind(path, worker_ring())?;
        let Command { program, place, starter, waits } = command;
        if starter.changes_user() {
            // Access is checked with SO_PEERCRED; the mode only has to permit connecting.
            endpoint.set_access(None, None, Some(0o666))?;
        }
        let first = &program.words[0];
        let started = starter
            .start(place, program, path)
            .map_err(|source| WorkerExit::Start { program: first.clone(), source })?;
        let mut child = started.child;
        // Only its own user. No worker attached before: the engine accepts later.
        endpoint.set_allow(Allow::Users(vec![started.user]));
        let reaped = PeerKey::Worker(child.id());
        let watched = driver.watch(&child, token).and_then(|()| driver.watch(&endpoint, token));
        watched.inspect_err(|_: &io::Error| {
            let _ = child.kill();
            let _ = child.wait();
        })?;
        Ok(Self {
            program: first.clone(),
            child,
            token,
            started: now,
            waits: *waits,
            credit: CREDIT,
            endpoint: Some(Reaper::shared().wrap(reaped, endpoint)),
            channel: None,
            tx_leases: None,
            rights,
            authority: Authority::default(),
            violation: None,
            id: None,
            leaves: None,
            retires: None,
            closed: None,
            killed: None,
            armed: false,
            gave_room: false,
            out: VecDeque::new(),
            first: Seq::FIRST,
            working: 0,
            progress: 0,
            moves: false,
            served: false,
            waiting: VecDeque::new(),
            parts: VecDeque::new(),
            part_bytes: 0,
            streams: HashMap::new(),
            released: Vec::new(),
            notices: VecDeque::new(),
            ended: VecDeque::new(),
            batch: Vec::new(),
        })
    }

    /// Checks whether it has attached or ended. Kills it if it takes too long.
    pub(super) fn look(&mut self, driver: &mut Driver, now: Instant) -> Result<ProcessState, WorkerExit> {
        if let Some(endpoint) = &mut self.endpoint
            && let Some(channel) = endpoint.accept()?
        {
            driver.watch(&channel, self.token)?;
            driver.unwatch(endpoint.as_fd());
            self.endpoint = None;
            if self.rights.parts && !channel.takes_parts() {
                return Ok(ProcessState::Gone(WorkerExit::Whole { pid: self.child.id() }));
            }
            let reaped = PeerKey::Worker(self.child.id());
            self.tx_leases = self.rights.leases.then(|| TxLeases::of(&channel, reaped)).flatten();
            self.channel = Some(Reaper::shared().wrap(reaped, channel));
            self.credit = self.child.remote_worker().map_or(CREDIT, |remote| remote.credit.clamp(1, CREDIT));
            let credit = self.credit;
            self.id = Some(driver.change(|mux, now| mux.clone_worker(credit, now)));
            return Ok(ProcessState::Attached);
        }
        if let Some(channel) = &mut self.channel {
            if channel.check_peer() {
                return Ok(ProcessState::Same);
            }
            let death = channel.death().unwrap_or(Death::Closed);
            if death == Death::Violations {
                self.violation.get_or_insert(Violation::Ring);
            }
            return Ok(ProcessState::Gone(self.gone(death.to_string())));
        }
        if let Some(status) = self.child.try_wait()? {
            let program = self.program.clone();
            return Ok(ProcessState::Gone(match self.closed {
                Some(_) => self.gone(status.to_string()),
                None if self.waits => self.gone("it has ended".to_owned()),
                None => WorkerExit::Early { program, status },
            }));
        }
        match self.closed {
            Some(closed) if now > closed + EXIT && self.killed.is_none() => self.kill("it did not end"),
            Some(_) => {}
            None if now > self.started + ATTACH && !self.waits => {
                self.kill("it did not attach");
                return Ok(ProcessState::Gone(WorkerExit::Late { program: self.program.clone() }));
            }
            None => {}
        }
        Ok(ProcessState::Same)
    }

    /// Returns true if it has exited after its channel was closed. Kills it if it takes too long, or if it
    /// never attached. Does not wait.
    pub(super) fn has_ended(&mut self, now: Instant) -> bool {
        let late = self.closed.is_none_or(|closed| now > closed + EXIT);
        if (late || self.endpoint.is_some()) && self.killed.is_none() {
            self.kill("it did not end");
        }
        // A process that cannot be waited for is not a child any more.
        !matches!(self.child.try_wait(), Ok(None))
    }

    fn gone(&self, how: String) -> WorkerExit {
        if let Some(why) = self.violation {
            return WorkerExit::Violation { pid: self.child.id(), why };
        }
        let why = self.killed.map_or(how, |why| format!("killed: {why}"));
        if let Some(remote) = self.child.remote_worker() {
            return WorkerExit::Remote { name: remote.name, why: remote.end.unwrap_or(why) };
        }
        WorkerExit::Gone { pid: self.child.id(), why }
    }

    /// When [`ProcessState`] must be checked or [`collect`](Self::collect) called without an event.
    pub(super) fn due(&self, timeout: Option<Duration>, start: Instant) -> Option<Instant> {
        if self.channel.is_none() {
            // Its socket and its end are watched.
            let waits = self.waits && self.endpoint.is_some();
            return (!waits).then(|| Instant::now() + LOOK);
        }
        let oldest = self.out.front().copied().flatten();
        let late = oldest.zip(timeout).map(|(oldest, timeout)| Duration::from_nanos(oldest.since) + timeout);
        let leaves = self.leaves.filter(|_| self.killed.is_none()).map(Duration::from_nanos);
        let due = late.into_iter().chain(leaves).min().map(|due| start + due);
        due.into_iter().chain(self.retires.map(|_| Instant::now() + RETIRED)).min()
    }

    pub(super) fn is_attached(&self) -> bool {
        self.id.is_some()
    }

    pub(super) fn is_working(&self) -> bool {
        self.working > 0
    }

    /// Returns true if it runs on the CPU of this thread: it then runs only when this thread sleeps.
    pub(super) fn shares_cpu(&self) -> bool {
        self.channel.as_ref().is_some_and(|channel| channel.shares_cpu())
    }

    pub(super) fn has_room(&self) -> bool {
        let takes = self.id.is_some() && self.leaves.is_none() && self.waiting.is_empty();
        takes && self.working < self.credit && self.ended.len() < PENDING
    }

    /// The round trip to a worker on another machine.
    pub(super) fn round_trip(&self) -> Option<Duration> {
        self.child.remote_worker().map(|remote| remote.round_trip)
    }

    /// The name of the worker on another machine.
    pub(super) fn remote_name(&self) -> Option<String> {
        self.child.remote_worker().map(|remote| remote.name)
    }

    pub(super) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(super) fn is(&self, id: worker::Id) -> bool {
        self.id == Some(id)
    }

    /// Returns true if it has completed a message.
    pub(super) const fn has_served(&self) -> bool {
        self.served
    }

    pub(super) const fn started(&self) -> Instant {
        self.started
    }

    /// Its socket, channel or process is ready.
    pub(super) fn handle_ready(&mut self) {
        if let Some(channel) = &mut self.channel {
            channel.disarm();
            self.armed = false;
        }
    }

    /// Reads replies and releases. Returns true if there were any. `alone`: replies may be sent from its
    /// memory.
    pub(super) fn collect(
        &mut self,
        completions: &mut Completions,
        now: u64,
        timeout: Option<Duration>,
        alone: bool,
    ) -> bool {
        let (Some(channel), Some(id)) = (&mut self.channel, self.id) else { return false };
        if self.violation.is_some() {
            return false;
        }
        let Self { out, first, released, tx_leases, authority, rights, violation, streams, .. } = self;
        let gave = tx_leases.as_mut().is_some_and(|tx_leases| tx_leases.give_back(channel));
        let tx_leases = if alone { tx_leases.as_mut() } else { None };
        // Replies to the frames released here were written before: the TX ring read below has them.
        channel.poll_verdicts(now, |seq, _| released.push(seq));
        let (mut any, mut all) = (!released.is_empty(), false);
        let rights = *rights;
        let mut answers = Answers {
            id,
            first: *first,
            out,
            streams,
            tx_leases,
            completions,
            authority,
            rights,
            violation,
            copied: 0,
            now,
        };
        for _ in 0..ROUNDS {
            let count = channel.poll_frames(&mut answers);
            any |= count > 0;
            if answers.violation.is_some() {
                channel.detach();
                break;
            }
            // A poll ends early at a message that it cannot read; the replies after it count.
            if !channel.has_message() {
                // After a protocol violation there may be replies after the point where reading stopped.
                all = !channel.is_dead();
                break;
            }
            if answers.copied >= TURN_BYTES {
                break;
            }
        }
        self.gave_room |= any || gave;
        if any {
            (self.progress, self.moves) = (now, true);
        }
        if all {
            self.settle(completions, id, now);
        }
        let oldest = self.out.front().copied().flatten();
        if let (Some(timeout), Some(oldest)) = (timeout, oldest)
            && u128::from(now.saturating_sub(oldest.since)) > timeout.as_nanos()
            && self.killed.is_none()
        {
            self.kill("it had a message for too long");
        }
        if self.leaves.is_some_and(|leaves| now >= leaves) && self.working > 0 && self.killed.is_none() {
            self.kill("it was replaced, and not done in time");
        }
        any || gave
    }

    /// Applies the releases.
    fn settle(&mut self, completions: &mut Completions, id: worker::Id, now: u64) {
        for seq in self.released.drain(..) {
            if let Some(at) = self.notices.iter().position(|notice| *notice == seq) {
                self.notices.remove(at);
                continue;
            }
            let Some(slot) = place(self.first, seq).and_then(|at| self.out.get_mut(at)) else { continue };
            if let Some(held) = slot.take() {
                self.working -= held.messages.count as usize;
                self.served = true;
                let ticket = held.messages.first;
                self.part_bytes -= held.part.map_or(0, |(_, bytes)| bytes);
                match held.part {
                    Some((PartKind::More, _)) => completions.parts.push((id, ticket)),
                    Some(_) => {
                        self.streams.remove(&ticket);
                        completions.done.push((id, held.messages));
                    }
                    None => completions.done.push((id, held.messages)),
                }
            }
        }
        while let Some(None) = self.out.front() {
            self.out.pop_front();
            self.first = self.first.next();
            if let Some(Some(next)) = self.out.front_mut() {
                next.since = now;
            }
        }
    }

    /// Returns true if it has no message and accepts one.
    pub(super) fn is_idle(&self) -> bool {
        self.has_room() && self.working == 0
    }

    /// Returns true if it has messages and made no progress for `patience` nanoseconds.
    pub(super) fn is_stuck(&self, now: u64, patience: u64) -> bool {
        self.working > 0 && now.saturating_sub(self.progress) >= patience
    }

    /// Returns true if it has made progress on its current messages.
    pub(super) const fn moves(&self) -> bool {
        self.moves
    }

    /// Time until it counts as stuck without progress.
    pub(super) fn until_stuck(&self, now: u64, patience: u64) -> Option<u64> {
        (self.working > 0).then(|| patience.saturating_sub(now.saturating_sub(self.progress)))
    }

    /// Number of messages that it holds.
    pub(super) const fn working(&self) -> usize {
        self.working
    }

    /// Arms the doorbell. Returns false if there is something to read already.
    pub(super) fn arm(&mut self) -> bool {
        let Some(channel) = &mut self.channel else { return true };
        // Frames were released after the last check; the process may wait for their space.
        if self.tx_leases.as_ref().is_some_and(TxLeases::has_back) {
            return false;
        }
        // The doorbell may have been read together with replies. Then it would not be written again.
        if !self.armed || channel.has_rung() {
            self.armed = channel.arm();
        }
        self.armed
    }

    /// It was replaced. With [`Order::Sticky`], it keeps its connections until they end or the deadline passes; otherwise it leaves.
    pub(super) fn retire(&mut self, driver: &mut Driver, patience: Duration, now: u64) {
        let Some(id) = self.id else { return };
        let sticky = driver.change(|mux, now| {
            let sticky = mux.config().order == Order::Sticky;
            if sticky {
                mux.retire(id, now);
            }
            sticky
        });
        if !sticky {
            return self.leave(driver, patience, now);
        }
        self.retires = Some(now.saturating_add(u64::try_from(patience.as_nanos()).unwrap_or(u64::MAX)));
    }

    pub(super) const fn is_retiring(&self) -> bool {
        self.retires.is_some()
    }

    /// Leaves if it has retired and has no connection any more, or at its deadline.
    pub(super) fn check_retired(&mut self, driver: &mut Driver, now: u64) {
        let Some((until, id)) = self.retires.zip(self.id) else { return };
        if now >= until || !driver.server().look(|mux| mux.is_bound(id)) {
            self.retires = None;
            self.leave(driver, Duration::from_nanos(until.saturating_sub(now)), now);
        }
    }

    /// Kills it if it holds messages: a drain ended without them.
    pub(super) fn kill_working(&mut self) {
        if self.working > 0 {
            self.kill("it was not done at the end of the drain");
        }
    }

    /// Stops giving it messages. It finishes those that it holds until the deadline.
    pub(super) fn leave(&mut self, driver: &mut Driver, patience: Duration, now: u64) {
        let Some(id) = self.id else { return };
        let patience = u64::try_from(patience.as_nanos()).unwrap_or(u64::MAX);
        self.leaves = Some(now.saturating_add(patience));
        let back: Vec<Ticket> =
            self.waiting.drain(..).flat_map(|run| run.rest().collect::<Vec<_>>()).collect();
        driver.change(|mux, now| {
            mux.handle_hand_back(id, &back, now);
            // Not the core's deadline, which would count the death against all of its messages.
            mux.leave(id, None, now);
        });
    }

    /// It has left: closes its channel, which tells it to exit.
    pub(super) fn close(&mut self, driver: &Driver) {
        self.id = None;
        // A helper thread closes the descriptors, maybe late: the ends of their peers would be reported until then.
        if let Some(endpoint) = &self.endpoint {
            driver.unwatch(endpoint.as_fd());
        }
        if let Some(channel) = &mut self.channel {
            driver.unwatch(channel.as_fd());
            channel.detach();
        }
        self.channel = None;
        self.closed.get_or_insert_with(Instant::now);
    }

    /// Its channel has gone. Its earlier replies count. Unanswered messages go to other workers.
    pub(super) fn die(&mut self, driver: &mut Driver, completions: &mut Completions, now: u64) {
        if let Some(id) = self.id {
            let violated =
                self.channel.as_ref().and_then(|channel| channel.death()) == Some(Death::Violations);
            if !violated && self.violation.is_none() {
                self.collect(completions, now, None, false);
                self.settle(completions, id, now);
            }
            // The death counts against the message that it was processing: the one that it named, or the
            // first unanswered one.
            let mut back: Vec<Ticket> = self.out.iter().flatten().flat_map(Out::unanswered).collect();
            completions.torn.extend(self.out.iter().flatten().filter_map(Out::torn));
            completions
                .torn
                .extend(self.streams.iter().filter(|(_, stream)| stream.begun).map(|(ticket, _)| *ticket));
            self.streams.clear();
            self.parts.clear();
            self.part_bytes = 0;
            let once = driver.change(|mux, _| mux.config().redeliver == 0);
            let begun = if once { self.begun() } else { Vec::new() };
            if begun.is_empty() {
                let at = self.at();
                // A worker that violates its authority after its answer was not processing the message after it.
                let answered =
                    self.out.iter().flatten().next().is_some_and(|held| held.unanswered().next().is_none());
                let blamed = back.iter().position(|ticket| Some(*ticket) == at);
                let blamed = blamed.or((self.violation.is_none() || !answered).then_some(0));
                if let Some(blamed) = blamed.filter(|_| !back.is_empty()) {
                    back.remove(blamed);
                }
            } else {
                // Without redelivery, every message that it may have begun is given up.
                back.retain(|ticket| !begun.contains(ticket));
            }
            self.out.clear();
            self.waiting.drain(..).for_each(|run| back.extend(run.rest()));
            driver.change(|mux, now| {
                completions.apply(mux, now);
                mux.handle_hand_back(id, &back, now);
                mux.handle_worker_died(id, now);
            });
            completions.forget(id);
        }
        self.working = 0;
        self.close(driver);
    }

    /// The message that it named as being processed.
    fn at(&self) -> Option<Ticket> {
        let Position::At(seq, index) = self.channel.as_ref()?.position()? else { return None };
        let held = place(self.first, seq).and_then(|at| *self.out.get(at)?)?;
        (index < held.messages.count).then(|| held.messages.at(index))
    }

    /// The unanswered messages that it may have begun.
    fn begun(&self) -> Vec<Ticket> {
        let position = self.channel.as_ref().and_then(|channel| channel.position());
        let (seq, count) = match position {
            Some(Position::At(seq, index)) => (seq, index + 1),
            Some(Position::Received(seq)) => (seq, u32::MAX),
            None => return Vec::new(),
        };
        let Some(last) = place(self.first, seq) else { return Vec::new() };
        let held = self.out.iter().enumerate().take(last + 1);
        let held = held.filter_map(|(at, held)| Some((at, held.as_ref()?)));
        let begun = held.flat_map(|(at, held)| {
            let end = if at == last { held.messages.at(0).number + u64::from(count) } else { u64::MAX };
            held.unanswered().filter(move |ticket| ticket.number < end)
        });
        begun.collect()
    }

    /// The connection has ended.
    pub(super) fn revoke(&mut self, connection: psock::Id) {
        self.authority.revoke(connection);
    }

    /// Revokes the connections for which `is_open` returns false.
    pub(super) fn retain(&mut self, is_open: impl FnMut(psock::Id) -> bool) {
        self.authority.retain(is_open);
    }

    pub(super) fn kill(&mut self, why: &'static str) {
        self.killed = Some(why);
        // It has exited; the next check finds that.
        let _ = self.child.kill();
    }

    /// Its ring for `towpath ctl show rings`.
    pub(super) fn ring(&self, number: u32) -> Option<show_rings::Ring> {
        let channel = self.channel.as_deref()?;
        let (peer, geometry, stats) = (channel.peer(), channel.geometry(), channel.stats());
        Some(show_rings::Ring {
            channel: number,
            name: channel.name().to_owned(),
            peer,
            fanout: "least",
            overload: "block".into(),
            geometry: Some(geometry),
            depth: stats.out as u32,
            used: stats.out as u32,
            stats,
            verdicts: VerdictStats { pass: stats.decided, ..VerdictStats::default() },
            ..show_rings::Ring::default()
        })
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if let Some(channel) = &mut self.channel {
            channel.detach();
        }
        self.channel = None;
        // Closing its socket tells it to exit. A process that never attached gets no such sign.
        let closed = self.closed.unwrap_or(self.started);
        while self.endpoint.is_none() && self.killed.is_none() && closed.elapsed() < EXIT {
            match self.child.try_wait() {
                Ok(Some(_)) | Err(_) => return,
                Ok(None) => std::thread::sleep(LOOK / 4),
            }
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
