//! A worker process: started, attached, and what it has of the multiplexor's messages.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, PidfdFlags, pidfd_open};
use thiserror::Error;
use towpath_mux::Time;
use towpath_mux::io::Driver;
use towpath_mux::mux::{Batch, Mux, Ticket, psock, worker};
use towpath_ring::{
    self as ring, Channel, Death, Endpoint, Geometry, Kind, Meta, POLL_BYTES, POLL_MESSAGES, ReserveError,
    Seq,
};

use super::completions::{Answers, Completions, Unsent};
use super::frame::{FrameMessages, Out, messages, part, pass, pieces, place, send_first};
use super::tx_lease::TxLeases;
use crate::control::protocol;

/// How long a process has to attach.
const ATTACH: Duration = Duration::from_secs(15);
/// How long it has to end once its channel is closed, before it is killed.
const EXIT: Duration = Duration::from_secs(5);
/// How often a process is looked at that does not say when it is ready.
const LOOK: Duration = Duration::from_millis(20);
/// Messages that it may have at a time: several turns of them when they are short; the core gives fewer when they take long.
const CREDIT: usize = 256;
/// Bytes of its messages from which on it gets no more.
const RX: u32 = 4 << 20;
/// Most calls of [`Channel::poll_messages`] in a turn, so that a worker that only sends does not keep the others waiting.
const ROUNDS: usize = 16;
/// Messages that were not sent: so many it is reported of at once.
const NOTICES: usize = 64;

/// Why there is no worker process any more, or none yet.
#[derive(Debug, Error)]
pub enum WorkerExit {
    /// The socket could not be made.
    #[error("{0}")]
    Bind(#[from] ring::BindError),
    /// The program could not be started.
    #[error("cannot start `{program}`: {source}")]
    Start {
        /// First word of the command.
        program: String,
        /// What the system said.
        source: io::Error,
    },
    /// The program ended before it attached.
    #[error("`{program}` ended before it attached ({status}); run it alone to see why")]
    Early {
        /// First word of the command.
        program: String,
        /// How it ended.
        status: ExitStatus,
    },
    /// The program did not attach in time.
    #[error(
        "`{program}` did not attach within {} s; a worker attaches to the socket that TOWPATH_SOCKET names \
         (towpath_ring::Worker::attach_env)",
        ATTACH.as_secs()
    )]
    Late {
        /// First word of the command.
        program: String,
    },
    /// It ended, or was ended, after it had attached.
    #[error("process {pid}: {why}")]
    Gone {
        /// Its process.
        pid: u32,
        /// How.
        why: String,
    },
    /// A system call failed.
    #[error("{0}")]
    System(#[from] io::Error),
}

/// See the file's text.
#[derive(Debug)]
pub(super) struct Process {
    program: String,
    child: Child,
    _pidfd: OwnedFd,
    token: u32,
    started: Instant,
    /// Where it attaches, until it has.
    endpoint: Option<Endpoint>,
    channel: Option<Channel>,
    /// What it has lent, where answers may leave from where it wrote them.
    tx_leases: Option<TxLeases>,
    leases: bool,
    /// Its name in the core, while it has one.
    id: Option<worker::Id>,
    /// It gets nothing more, and is killed when it has some then, in nanoseconds of the front's clock.
    leaves: Option<u64>,
    /// Since when it is to end, and whether it was killed.
    closed: Option<Instant>,
    killed: Option<&'static str>,
    /// It was asked to ring when it has something.
    armed: bool,
    /// It may be waiting for the room that was left to it since it was kicked.
    gave_room: bool,
    /// What it has, by number: the first is that of `first`. None where it was done out of order.
    out: VecDeque<Option<Out>>,
    first: Seq,
    working: usize,
    /// When it last said something or got something while it had nothing, in nanoseconds of the front's clock.
    progress: u64,
    /// It has said something since it had nothing.
    moves: bool,
    served: bool,
    /// Taken from the core, and not published: there was no room.
    waiting: VecDeque<Batch>,
    /// Released, and reported the core when all of its replies were read.
    released: Vec<Seq>,
    /// Frames that say what was not sent, which it has not given back.
    notices: VecDeque<Seq>,
    batch: Vec<Batch>,
}

/// What a look at a process found.
#[derive(Debug)]
pub(super) enum ProcessState {
    /// Nothing new.
    Same,
    /// It has attached.
    Attached,
    /// It is gone.
    Gone(WorkerExit),
}

impl Process {
    /// Starts `command`, with the socket at `path` in TOWPATH_SOCKET.
    pub(super) fn start(
        command: &[String],
        path: &Path,
        driver: &Driver,
        token: u32,
        leases: bool,
        now: Instant,
    ) -> Result<Self, WorkerExit> {
        let config = ring::Config {
            rx: Geometry::with(RX, 1024).expect("4 MiB in frames of 1 KiB"),
            deadline: None,
            // One meaningless word is a broken or hostile worker: it is detached, nothing more of it counts.
            violations_max: 0,
            messages: true,
            bursts: true,
            ..ring::Config::default()
        };
        let endpoint = Endpoint::bind(path, config)?;
        let (first, rest) = command.split_first().expect("a command has a first word");
        let program = match first.as_str() {
            "towpath" => std::env::current_exe()?,
            other => other.into(),
        };
        let mut child = Command::new(program)
            .args(rest)
            .env("TOWPATH_SOCKET", path)
            .stdin(Stdio::null())
            .stdout(io::stderr())
            // A terminal's interrupt is for the front, which drains; a worker that had it too would die with its message.
            .process_group(0)
            .spawn()
            .map_err(|source| WorkerExit::Start { program: first.clone(), source })?;
        let watched = Pid::from_raw(child.id() as i32).map_or(Err(io::ErrorKind::NotFound.into()), |pid| {
            let pidfd = pidfd_open(pid, PidfdFlags::empty())?;
            driver.watch(&pidfd, token)?;
            driver.watch(&endpoint, token)?;
            Ok(pidfd)
        });
        let pidfd = watched.inspect_err(|_: &io::Error| {
            let _ = child.kill();
            let _ = child.wait();
        })?;
        Ok(Self {
            program: first.clone(),
            child,
            _pidfd: pidfd,
            token,
            started: now,
            endpoint: Some(endpoint),
            channel: None,
            tx_leases: None,
            leases,
            id: None,
            leaves: None,
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
            released: Vec::new(),
            notices: VecDeque::new(),
            batch: Vec::new(),
        })
    }

    /// Looks whether it has attached, or is gone; kills what takes too long.
    pub(super) fn look(&mut self, driver: &mut Driver, now: Instant) -> Result<ProcessState, WorkerExit> {
        if let Some(endpoint) = &mut self.endpoint
            && let Some(channel) = endpoint.accept()?
        {
            driver.watch(&channel, self.token)?;
            driver.unwatch(endpoint.as_fd());
            self.endpoint = None;
            self.tx_leases = self.leases.then(|| TxLeases::of(&channel)).flatten();
            self.channel = Some(channel);
            self.id = Some(driver.change(|mux, now| mux.clone_worker(CREDIT, now)));
            return Ok(ProcessState::Attached);
        }
        if let Some(channel) = &mut self.channel {
            if channel.check_peer() {
                return Ok(ProcessState::Same);
            }
            let death = channel.death().unwrap_or(Death::Closed);
            return Ok(ProcessState::Gone(self.gone(death.to_string())));
        }
        if let Some(status) = self.child.try_wait()? {
            let program = self.program.clone();
            return Ok(ProcessState::Gone(match self.closed {
                Some(_) => self.gone(status.to_string()),
                None => WorkerExit::Early { program, status },
            }));
        }
        match self.closed {
            Some(closed) if now > closed + EXIT && self.killed.is_none() => self.kill("it did not end"),
            Some(_) => {}
            None if now > self.started + ATTACH => {
                self.kill("it did not attach");
                return Ok(ProcessState::Gone(WorkerExit::Late { program: self.program.clone() }));
            }
            None => {}
        }
        Ok(ProcessState::Same)
    }

    /// Whether it has ended, once its channel is gone. It is killed when it takes too long, or was never reported to end because it had
    /// not attached; nobody waits for it.
    pub(super) fn has_ended(&mut self, now: Instant) -> bool {
        let late = self.closed.is_none_or(|closed| now > closed + EXIT);
        if (late || self.endpoint.is_some()) && self.killed.is_none() {
            self.kill("it did not end");
        }
        // One that cannot be waited for is nobody's child any more.
        !matches!(self.child.try_wait(), Ok(None))
    }

    fn gone(&self, how: String) -> WorkerExit {
        let why = self.killed.map_or(how, |why| format!("killed: {why}"));
        WorkerExit::Gone { pid: self.child.id(), why }
    }

    /// When [`look`](Self::look) or [`collect`](Self::collect) has something to do by itself.
    pub(super) fn due(&self, timeout: Option<Duration>, start: Instant) -> Option<Instant> {
        if self.channel.is_none() {
            return Some(Instant::now() + LOOK);
        }
        let oldest = self.out.front().copied().flatten();
        let late = oldest.zip(timeout).map(|(oldest, timeout)| Duration::from_nanos(oldest.since) + timeout);
        let leaves = self.leaves.filter(|_| self.killed.is_none()).map(Duration::from_nanos);
        late.into_iter().chain(leaves).min().map(|due| start + due)
    }

    pub(super) fn is_attached(&self) -> bool {
        self.id.is_some()
    }

    pub(super) fn is_working(&self) -> bool {
        self.working > 0
    }

    /// Whether it works where this thread runs: then it goes on when this thread does not.
    pub(super) fn shares_cpu(&self) -> bool {
        self.channel.as_ref().is_some_and(Channel::shares_cpu)
    }

    pub(super) fn has_room(&self) -> bool {
        self.id.is_some() && self.leaves.is_none() && self.waiting.is_empty() && self.working < CREDIT
    }

    pub(super) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(super) fn is(&self, id: worker::Id) -> bool {
        self.id == Some(id)
    }

    /// Whether it has done a message.
    pub(super) const fn has_served(&self) -> bool {
        self.served
    }

    pub(super) const fn started(&self) -> Instant {
        self.started
    }

    /// Its socket or its process has something to say.
    pub(super) fn handle_ready(&mut self) {
        if let Some(channel) = &mut self.channel {
            channel.disarm();
            self.armed = false;
        }
    }

    /// Reads what it answered and released; whether there was anything. `alone`: what it answers may leave from its own memory.
    pub(super) fn collect(
        &mut self,
        completions: &mut Completions,
        now: u64,
        timeout: Option<Duration>,
        alone: bool,
    ) -> bool {
        let (Some(channel), Some(id)) = (&mut self.channel, self.id) else { return false };
        let Self { out, first, released, tx_leases, .. } = self;
        let gave = tx_leases.as_mut().is_some_and(|tx_leases| tx_leases.give_back(channel));
        let tx_leases = if alone { tx_leases.as_mut() } else { None };
        // What is released now was answered before: those replies are there when the lane is read below.
        channel.poll_verdicts(now, |seq, _| released.push(seq));
        let (mut any, mut all) = (!released.is_empty(), false);
        let mut answers = Answers { id, first: *first, out, tx_leases, completions, copied: 0, now };
        for _ in 0..ROUNDS {
            answers.copied = 0;
            let count = channel.poll_frames(&mut answers);
            any |= count > 0;
            if count < POLL_MESSAGES && answers.copied < POLL_BYTES {
                // Of one that broke the protocol, answers may stand behind what ended it.
                all = !channel.is_dead();
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

    /// What was released is done.
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
                completions.done.push((id, held.messages));
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

    /// Whether it has no message and takes one.
    pub(super) fn is_idle(&self) -> bool {
        self.has_room() && self.working == 0
    }

    /// Whether it has messages and has not said anything for so long, in nanoseconds.
    pub(super) fn is_stuck(&self, now: u64, patience: u64) -> bool {
        self.working > 0 && now.saturating_sub(self.progress) >= patience
    }

    /// Whether it has said something about what it has.
    pub(super) const fn moves(&self) -> bool {
        self.moves
    }

    /// How long until it is, if it does not say anything.
    pub(super) fn until_stuck(&self, now: u64, patience: u64) -> Option<u64> {
        (self.working > 0).then(|| patience.saturating_sub(now.saturating_sub(self.progress)))
    }

    /// Messages that it has.
    pub(super) const fn working(&self) -> usize {
        self.working
    }

    /// Takes messages from the core until it has `most`; whether it got any.
    pub(super) fn fill(&mut self, mux: &mut Mux, now: Time, most: usize) -> bool {
        let Some(id) = self.id.filter(|_| self.has_room() && self.working < most) else { return false };
        mux.poll_batches(id, most, now, &mut self.batch);
        self.waiting.extend(self.batch.drain(..));
        !self.waiting.is_empty()
    }

    /// Tells it what it sent and nobody took, as far as there is room.
    fn report_unsent(&mut self, unsent: &mut VecDeque<Unsent>) {
        let (Some(channel), Some(id)) = (&mut self.channel, self.id) else { return };
        let mut reported = false;
        unsent.retain(|unsent| {
            if unsent.worker.is_some_and(|worker| worker != id) || self.notices.len() >= NOTICES {
                return true;
            }
            let (port, group) = unsent.to.map_or((0, 0), psock::Id::parts);
            let mark = unsent.error.errno().unsigned_abs();
            match channel
                .send(&unsent.bytes, &Meta { kind: Kind::ERROR, port, group, mark, ..Meta::default() })
            {
                Ok(seq) => self.notices.push_back(seq),
                // It was counted.
                Err(ReserveError::TooLarge) => return false,
                Err(_) => return true,
            }
            reported = true;
            false
        });
        if reported {
            channel.kick();
        }
    }

    /// Publishes what it was given.
    pub(super) fn hand_over(&mut self, completions: &mut Completions, now: u64, epoch: u64) {
        if !completions.unsent.is_empty() {
            self.report_unsent(&mut completions.unsent);
        }
        let (Some(channel), Some(id)) = (&mut self.channel, self.id) else { return };
        if self.waiting.is_empty() && !std::mem::take(&mut self.gave_room) {
            return;
        }
        let most = channel.bundle_max();
        while let Some((first, ticket)) = self.waiting.front().and_then(|run| Some((run, run.first()?))) {
            let mut count = messages(&self.waiting, most);
            let sent = match count {
                1 => send_first(channel, first, epoch),
                _ => {
                    let (port, group) = ticket.psock.parts();
                    let parts = self.waiting.iter().flat_map(Batch::views).take(count).map(part);
                    let meta = Meta { time: epoch, port, group, ..Meta::default() };
                    match channel.send_bundle_of(parts, pieces(&self.waiting, count), &meta) {
                        // No gap for all of them: the first alone, in a memory of its own if need be.
                        Err(ReserveError::NoContiguousSpace | ReserveError::TooLarge) => {
                            count = 1;
                            send_first(channel, first, epoch)
                        }
                        sent => sent,
                    }
                }
            };
            match sent {
                Ok(seq) => {
                    if self.out.is_empty() {
                        self.first = seq;
                    }
                    // Numbers that were no message's (there are none today) are nobody's.
                    while place(self.first, seq).is_some_and(|at| at > self.out.len()) {
                        self.out.push_back(None);
                    }
                    let messages = FrameMessages { first: ticket, count: count as u32 };
                    self.out.push_back(Some(Out { messages, since: now, answered: 0 }));
                    if self.working == 0 {
                        (self.progress, self.moves) = (now, false);
                    }
                    self.working += count;
                }
                Err(ReserveError::TooLarge) => {
                    log::warn!("{:?}: a message is larger than a worker can be given", ticket.psock);
                    completions.refused.push((id, ticket));
                }
                Err(_) => break,
            }
            pass(&mut self.waiting, count);
        }
        channel.kick();
    }

    /// Asks it to ring; false when it has something already.
    pub(super) fn arm(&mut self) -> bool {
        let Some(channel) = &mut self.channel else { return true };
        // Frames came back behind the last look: it may wait for their room.
        if self.tx_leases.as_ref().is_some_and(TxLeases::has_back) {
            return false;
        }
        // Its one doorbell may have been read along with what it answered, and then nobody hears of it.
        if !self.armed || channel.has_rung() {
            self.armed = channel.arm();
        }
        self.armed
    }

    /// It gets nothing more; what it has it does, until the deadline.
    pub(super) fn leave(&mut self, driver: &mut Driver, patience: Duration, now: u64) {
        let Some(id) = self.id else { return };
        let patience = u64::try_from(patience.as_nanos()).unwrap_or(u64::MAX);
        self.leaves = Some(now.saturating_add(patience));
        let back: Vec<Ticket> =
            self.waiting.drain(..).flat_map(|run| run.rest().collect::<Vec<_>>()).collect();
        driver.change(|mux, now| {
            mux.handle_hand_back(id, &back, now);
            // Not the core's deadline: that blames it for all it has, what it has not begun too.
            mux.leave(id, None, now);
        });
    }

    /// It has left: its channel ends, which tells it to end too.
    pub(super) fn close(&mut self) {
        self.id = None;
        self.channel = None;
        self.closed.get_or_insert_with(Instant::now);
    }

    /// Its channel is gone. What it said before counts, what it had not answered goes to others.
    pub(super) fn die(&mut self, driver: &mut Driver, completions: &mut Completions, now: u64) {
        if let Some(id) = self.id {
            if self.channel.as_ref().and_then(Channel::death) != Some(Death::Violations) {
                self.collect(completions, now, None, false);
                self.settle(completions, id, now);
            }
            // It worked on one that it had not answered, the first of them unless it said which; the others are not what killed it.
            let mut back: Vec<Ticket> = self.out.iter().flatten().flat_map(Out::unanswered).collect();
            let at = self.at();
            let blamed = back.iter().position(|ticket| Some(*ticket) == at).unwrap_or(0);
            if !back.is_empty() {
                back.remove(blamed);
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
        self.close();
    }

    /// The message that it said it was at, if it has that.
    fn at(&self) -> Option<Ticket> {
        let (seq, index) = self.channel.as_ref()?.at()?;
        let held = place(self.first, seq).and_then(|at| *self.out.get(at)?)?;
        (index < held.messages.count).then(|| held.messages.at(index))
    }

    pub(super) fn kill(&mut self, why: &'static str) {
        self.killed = Some(why);
        // It has ended already: then that is found next.
        let _ = self.child.kill();
    }

    /// Its ring as `towpath ctl show rings` prints it.
    pub(super) fn ring(&self, number: u32) -> Option<protocol::Ring> {
        let channel = self.channel.as_ref()?;
        let (peer, geometry, stats) = (channel.peer(), channel.geometry(), channel.stats());
        Some(protocol::Ring {
            channel: number,
            name: channel.name().to_owned(),
            pid: peer.pid,
            uid: peer.uid,
            fanout: "least".into(),
            overload: "block".into(),
            block_size: geometry.block_size,
            block_nr: geometry.block_nr,
            frame_size: geometry.frame_size,
            frame_nr: geometry.frame_nr,
            depth: stats.out,
            used: stats.out,
            high_water: stats.high_water,
            held: stats.held,
            published: stats.published,
            bytes: stats.bytes,
            verdicts: protocol::Verdicts {
                decided: stats.decided,
                cumulative: stats.cumulative,
                pass: stats.decided,
                ..protocol::Verdicts::default()
            },
            full: stats.full,
            violations: stats.violations,
            wakeups: stats.wakeups,
            oneshots: stats.oneshots,
            ..protocol::Ring::default()
        })
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.channel = None;
        // The end of its socket tells it to go; one that never attached has not been reported anything.
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
