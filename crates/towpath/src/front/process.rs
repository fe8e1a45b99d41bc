//! A worker process: started, attached, and what it has of the multiplexor's messages.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use thiserror::Error;
use towpath_mux::Time;
use towpath_mux::io::Driver;
use towpath_mux::mux::{Body, Mux, Run, SendError, Ticket, View, psock, worker};
use towpath_ring::{
    self as ring, Channel, Death, Endpoint, Full, Geometry, Header, Kind, Layers, Meta, POLL_BYTES,
    POLL_MESSAGES, Part, Seq, TxPayload, TxSink,
};

use super::loan::Loans;
use super::senders::LEAST;
use crate::control::mux::Lost;
use crate::control::protocol;

/// How long a process has to attach.
const ATTACH: Duration = Duration::from_secs(15);
/// How long it has to end once its channel is closed, before it is killed.
const EXIT: Duration = Duration::from_secs(2);
/// How often a process is looked at that does not say when it is ready.
const LOOK: Duration = Duration::from_millis(20);
/// Messages that it may have at a time: several turns of them when they are short; the core gives fewer when they take long.
const CREDIT: usize = 256;
/// Bytes of its messages from which on it gets no more.
const RX: u32 = 4 << 20;
/// Messages up to so many bytes go to a worker together, in a frame of so many bytes of them.
const SHORT: usize = 4 << 10;
const BUNDLE: usize = 32 << 10;
/// Most calls of [`Channel::poll_messages`] in a turn, so that a worker that only sends does not keep the others waiting.
const ROUNDS: usize = 16;
/// Messages that were not sent: so many wait for their worker to be told, and so many it is told of at once.
const UNSENT: usize = 1024;
/// Bytes of these, whatever their number.
const UNSENT_BYTES: usize = 4 << 20;
const NOTICES: usize = 64;
/// Replies are copied into blocks of this many bytes, so that most need no allocation of their own.
const BLOCK: usize = 64 << 10;

/// Why there is no worker process any more, or none yet.
#[derive(Debug, Error)]
pub enum Ending {
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

/// An answer to messages of one connection that follow each other.
#[derive(Debug)]
struct Answer {
    worker: worker::Id,
    first: Ticket,
    /// Messages that it answers, and with how many replies.
    count: u32,
    replies: u32,
    body: Body,
}

/// What workers gave back, until the core is told.
#[derive(Debug, Default)]
pub(super) struct Returns {
    replies: Vec<Answer>,
    sends: Vec<(worker::Id, Option<psock::Id>, Bytes)>,
    /// Those that nobody took, whose workers are to hear of it.
    unsent: VecDeque<Unsent>,
    done: Vec<(worker::Id, Row)>,
    /// Messages that no ring can take: their connections end.
    pub(super) refused: Vec<(worker::Id, Ticket)>,
    /// How long those have for what else they asked.
    drain: Duration,
    block: BytesMut,
    /// Messages of workers that were not sent.
    pub(super) lost: Lost,
}

impl Returns {
    pub(super) fn new(drain: Duration) -> Self {
        Self { drain, ..Self::default() }
    }

    /// A copy.
    fn copy(&mut self, bytes: &[u8]) -> Bytes {
        if bytes.len() > BLOCK / 4 {
            return Bytes::copy_from_slice(bytes);
        }
        if self.block.capacity() < bytes.len() {
            self.block = BytesMut::with_capacity(BLOCK);
        }
        self.block.extend_from_slice(bytes);
        self.block.split().freeze()
    }

    /// A worker's message came back: its connection ended before all of it had left, and there is no other.
    pub(super) fn undelivered(&mut self, bytes: Bytes) {
        self.lost.undelivered += 1;
        push(&mut self.unsent, Unsent { worker: None, to: None, error: SendError::Gone, bytes });
    }

    /// Whether no worker is to hear of a message that nobody took.
    pub(super) fn is_all_told(&self) -> bool {
        self.unsent.is_empty()
    }

    /// That worker is gone: nobody is there to hear of what it sent.
    pub(super) fn forget(&mut self, id: worker::Id) {
        self.unsent.retain(|unsent| unsent.worker != Some(id));
    }

    /// Tells the core: first what was answered, then what is done.
    pub(super) fn apply(&mut self, mux: &mut Mux, now: Time) {
        mux.together(|mux| {
            for Answer { worker, first, count, replies, body } in self.replies.drain(..) {
                // Nobody is there to be answered any more: the core counts that.
                let _: Result<(), SendError> = mux.reply_row(worker, (first, count), replies, body, now);
            }
            for (worker, to, bytes) in self.sends.drain(..) {
                let length = bytes.len();
                match super::send(mux, to, bytes.clone(), now) {
                    Ok(()) => mux.count_sent(worker, length),
                    Err(error) => {
                        self.lost.count(&error);
                        push(&mut self.unsent, Unsent { worker: Some(worker), to, error, bytes });
                    }
                }
            }
            for (id, row) in self.done.drain(..) {
                mux.done_row(id, (row.first, row.count), now);
            }
        });
        for (id, ticket) in self.refused.drain(..) {
            mux.drain_psock(ticket.psock, Some(now + self.drain), now);
            mux.done(id, ticket, now);
        }
    }
}

/// A message that was not sent.
#[derive(Debug)]
struct Unsent {
    /// Who sent it, as far as that is known; any worker may hear of it otherwise.
    worker: Option<worker::Id>,
    to: Option<psock::Id>,
    error: SendError,
    bytes: Bytes,
}

/// The oldest make room.
fn push(unsent: &mut VecDeque<Unsent>, last: Unsent) {
    unsent.push_back(last);
    let bytes = |unsent: &VecDeque<Unsent>| unsent.iter().map(|unsent| unsent.bytes.len()).sum::<usize>();
    while unsent.len() > UNSENT || unsent.len() > 1 && bytes(unsent) > UNSENT_BYTES {
        unsent.pop_front();
    }
}

/// Messages of one connection that follow each other: those of a frame.
#[derive(Clone, Copy, Debug)]
struct Row {
    first: Ticket,
    count: u32,
}

impl Row {
    /// The one at this place.
    fn at(&self, place: u32) -> Ticket {
        Ticket { number: self.first.number + u64::from(place), ..self.first }
    }
}

/// A frame that the process has.
#[derive(Clone, Copy, Debug)]
struct Out {
    row: Row,
    /// Since when it may have been at it, in nanoseconds of the front's clock: it was given it then, or had done the one before, or
    /// answered some of it.
    since: u64,
    /// So many of them were answered, from the first on.
    answered: u32,
}

impl Out {
    /// What a reply with this header answers: from which place on, and how many.
    fn answer(&mut self, header: &Header) -> (u32, u32) {
        // Without a number, and where there is no choice, it is all of them.
        let upto = if header.group == 0 { self.row.count } else { header.group.min(self.row.count) };
        // Another answer to what was answered is one to the last of that.
        let from = self.answered.min(upto - 1);
        self.answered = self.answered.max(upto);
        (from, upto - from)
    }

    /// Those that were not answered.
    fn unanswered(&self) -> impl Iterator<Item = Ticket> + use<> {
        let Self { row, answered, .. } = *self;
        (answered..row.count).map(move |place| row.at(place))
    }
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
    loans: Option<Loans>,
    lends: bool,
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
    waiting: VecDeque<Run>,
    /// Released, and told the core when all of its replies were read.
    released: Vec<Seq>,
    /// Frames that say what was not sent, which it has not given back.
    notices: VecDeque<Seq>,
    batch: Vec<Run>,
}

/// What a look at a process found.
#[derive(Debug)]
pub(super) enum Look {
    /// Nothing new.
    Same,
    /// It has attached.
    Attached,
    /// It is gone.
    Gone(Ending),
}

impl Process {
    /// Starts `command`, with the socket at `path` in TOWPATH_SOCKET.
    pub(super) fn start(
        command: &[String],
        path: &Path,
        driver: &Driver,
        token: u32,
        lends: bool,
        now: Instant,
    ) -> Result<Self, Ending> {
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
            .map_err(|source| Ending::Start { program: first.clone(), source })?;
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
            loans: None,
            lends,
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
    pub(super) fn look(&mut self, driver: &mut Driver, now: Instant) -> Result<Look, Ending> {
        if let Some(endpoint) = &mut self.endpoint
            && let Some(channel) = endpoint.accept()?
        {
            driver.watch(&channel, self.token)?;
            driver.unwatch(endpoint.as_fd());
            self.endpoint = None;
            self.loans = self.lends.then(|| Loans::of(&channel)).flatten();
            self.channel = Some(channel);
            self.id = Some(driver.change(|mux, now| mux.clone_worker(CREDIT, now)));
            return Ok(Look::Attached);
        }
        if let Some(channel) = &mut self.channel {
            if channel.check_peer() {
                return Ok(Look::Same);
            }
            let death = channel.death().unwrap_or(Death::Closed);
            return Ok(Look::Gone(self.gone(death.to_string())));
        }
        if let Some(status) = self.child.try_wait()? {
            let program = self.program.clone();
            return Ok(Look::Gone(match self.closed {
                Some(_) => self.gone(status.to_string()),
                None => Ending::Early { program, status },
            }));
        }
        match self.closed {
            Some(closed) if now > closed + EXIT && self.killed.is_none() => self.kill("it did not end"),
            Some(_) => {}
            None if now > self.started + ATTACH => {
                self.kill("it did not attach");
                return Ok(Look::Gone(Ending::Late { program: self.program.clone() }));
            }
            None => {}
        }
        Ok(Look::Same)
    }

    /// Whether it has ended, once its channel is gone. It is killed when it takes too long, or was never told to end because it had
    /// not attached; nobody waits for it.
    pub(super) fn has_ended(&mut self, now: Instant) -> bool {
        let late = self.closed.is_none_or(|closed| now > closed + EXIT);
        if (late || self.endpoint.is_some()) && self.killed.is_none() {
            self.kill("it did not end");
        }
        // One that cannot be waited for is nobody's child any more.
        !matches!(self.child.try_wait(), Ok(None))
    }

    fn gone(&self, how: String) -> Ending {
        let why = self.killed.map_or(how, |why| format!("killed: {why}"));
        Ending::Gone { pid: self.child.id(), why }
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
        returns: &mut Returns,
        now: u64,
        timeout: Option<Duration>,
        alone: bool,
    ) -> bool {
        let (Some(channel), Some(id)) = (&mut self.channel, self.id) else { return false };
        let Self { out, first, released, loans, .. } = self;
        let gave = loans.as_mut().is_some_and(|loans| loans.give_back(channel));
        let loans = if alone { loans.as_mut() } else { None };
        // What is released now was answered before: those replies are there when the lane is read below.
        channel.poll_verdicts(now, |seq, _| released.push(seq));
        let (mut any, mut all) = (!released.is_empty(), false);
        let mut answers = Answers { id, first: *first, out, loans, returns, copied: 0, now };
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
            self.settle(returns, id, now);
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
    fn settle(&mut self, returns: &mut Returns, id: worker::Id, now: u64) {
        for seq in self.released.drain(..) {
            if let Some(at) = self.notices.iter().position(|notice| *notice == seq) {
                self.notices.remove(at);
                continue;
            }
            let Some(slot) = place(self.first, seq).and_then(|at| self.out.get_mut(at)) else { continue };
            if let Some(held) = slot.take() {
                self.working -= held.row.count as usize;
                self.served = true;
                returns.done.push((id, held.row));
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
        mux.poll_rows(id, most, now, &mut self.batch);
        self.waiting.extend(self.batch.drain(..));
        !self.waiting.is_empty()
    }

    /// Tells it what it sent and nobody took, as far as there is room.
    fn tell_unsent(&mut self, unsent: &mut VecDeque<Unsent>) {
        let (Some(channel), Some(id)) = (&mut self.channel, self.id) else { return };
        let mut told = false;
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
                Err(Full::TooLarge) => return false,
                Err(_) => return true,
            }
            told = true;
            false
        });
        if told {
            channel.kick();
        }
    }

    /// Publishes what it was given.
    pub(super) fn hand_over(&mut self, returns: &mut Returns, now: u64, epoch: u64) {
        if !returns.unsent.is_empty() {
            self.tell_unsent(&mut returns.unsent);
        }
        let (Some(channel), Some(id)) = (&mut self.channel, self.id) else { return };
        if self.waiting.is_empty() && !std::mem::take(&mut self.gave_room) {
            return;
        }
        let most = channel.bundle_max();
        while let Some((first, ticket)) = self.waiting.front().and_then(|run| Some((run, run.first()?))) {
            let mut count = row(&self.waiting, most);
            let sent = match count {
                1 => send_first(channel, first, epoch),
                _ => {
                    let (port, group) = ticket.psock.parts();
                    let parts = self.waiting.iter().flat_map(Run::views).take(count).map(part);
                    let meta = Meta { time: epoch, port, group, ..Meta::default() };
                    match channel.send_bundle_of(parts, pieces(&self.waiting, count), &meta) {
                        // No gap for all of them: the first alone, in a memory of its own if need be.
                        Err(Full::Held | Full::TooLarge) => {
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
                    let row = Row { first: ticket, count: count as u32 };
                    self.out.push_back(Some(Out { row, since: now, answered: 0 }));
                    if self.working == 0 {
                        (self.progress, self.moves) = (now, false);
                    }
                    self.working += count;
                }
                Err(Full::TooLarge) => {
                    log::warn!("{:?}: a message is larger than a worker can be given", ticket.psock);
                    returns.refused.push((id, ticket));
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
        if self.loans.as_ref().is_some_and(Loans::has_back) {
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
    pub(super) fn die(&mut self, driver: &mut Driver, returns: &mut Returns, now: u64) {
        if let Some(id) = self.id {
            if self.channel.as_ref().and_then(Channel::death) != Some(Death::Violations) {
                self.collect(returns, now, None, false);
                self.settle(returns, id, now);
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
                returns.apply(mux, now);
                mux.handle_hand_back(id, &back, now);
                mux.handle_worker_died(id, now);
            });
            returns.forget(id);
        }
        self.working = 0;
        self.close();
    }

    /// The message that it said it was at, if it has that.
    fn at(&self) -> Option<Ticket> {
        let (seq, index) = self.channel.as_ref()?.at()?;
        let held = place(self.first, seq).and_then(|at| *self.out.get(at)?)?;
        (index < held.row.count).then(|| held.row.at(index))
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

/// What a process says, as it is read.
struct Answers<'a> {
    id: worker::Id,
    first: Seq,
    out: &'a mut VecDeque<Option<Out>>,
    loans: Option<&'a mut Loans>,
    returns: &'a mut Returns,
    /// Bytes that were copied.
    copied: usize,
    now: u64,
}

impl Answers<'_> {
    /// The frame that a reply answers. None for a number that it does not have: the message was done, or never was, and there
    /// is nobody to answer.
    fn held(&mut self, header: &Header) -> Option<&mut Out> {
        place(self.first, Seq(header.port)).and_then(|at| self.out.get_mut(at)?.as_mut())
    }
}

impl TxSink for Answers<'_> {
    fn hold(&mut self, header: &Header) -> bool {
        let len = header.len as usize;
        if header.kind != Kind::REPLY || len < LEAST {
            return false;
        }
        let Some(psock) = self.held(header).map(|held| held.row.first.psock) else { return false };
        self.loans.as_mut().is_some_and(|loans| loans.has_room(psock, len))
    }

    fn take(&mut self, header: &Header, payload: TxPayload<'_>) {
        let (worker, now) = (self.id, self.now);
        let answer = match header.kind {
            Kind::REPLY => self.held(header).map(|held| {
                held.since = now;
                let (from, count) = held.answer(header);
                (held.row.at(from), count)
            }),
            _ => None,
        };
        let body = match (payload, &mut self.loans, answer) {
            // `hold` has asked whether there is somebody to answer.
            (TxPayload::Held(frame), Some(loans), Some((first, _))) => {
                Body::Lent(loans.lend(first.psock, frame))
            }
            (TxPayload::Held(_), ..) => return,
            (TxPayload::Copied(bytes), ..) => {
                self.copied += bytes.len();
                let bytes = self.returns.copy(bytes);
                if header.kind == Kind::MESSAGE {
                    return self.returns.sends.push((worker, addressee(header), bytes));
                }
                Body::Bytes(bytes)
            }
        };
        if let Some((first, count)) = answer {
            let replies = header.mark.clamp(1, count);
            self.returns.replies.push(Answer { worker, first, count, replies, body });
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.channel = None;
        // The end of its socket tells it to go; one that never attached has not been told anything.
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

/// Where the message with number `seq` is behind the first.
fn place(first: Seq, seq: Seq) -> Option<usize> {
    (!seq.is_before(first)).then(|| seq.since(first) as usize)
}

/// Where a worker's message is to go: no connection named is any of them.
fn addressee(header: &Header) -> Option<psock::Id> {
    let (index, generation) = (header.port, header.group);
    (generation != 0).then(|| psock::Id::from_parts(index, generation))
}

/// How many of these messages, `most` at most, go into one frame: short ones of one connection that follow each other. One that
/// somebody died with goes alone.
fn row(waiting: &VecDeque<Run>, most: usize) -> usize {
    let (mut next, mut bytes, mut count): (Option<Ticket>, usize, usize) = (None, 0, 0);
    for run in waiting {
        let Some(first) = run.first().filter(|first| next.is_none_or(|next| next == *first)) else { break };
        if run.deaths() > 0 {
            break;
        }
        let some = run.short(most - count, SHORT, BUNDLE - bytes);
        bytes += run.bytes(some).len();
        count += some;
        if some < run.len() {
            break;
        }
        next = Some(Ticket { number: first.number + run.len() as u64, ..first });
    }
    count.max(1)
}

/// The bytes of the first so many messages.
fn pieces(waiting: &VecDeque<Run>, count: usize) -> impl Iterator<Item = &[u8]> {
    let pieces = waiting.iter().scan(count, |left, run| {
        let some = run.len().min(*left);
        *left -= some;
        Some(run.bytes(some))
    });
    pieces.take_while(|piece| !piece.is_empty())
}

/// The first so many messages were published.
fn pass(waiting: &mut VecDeque<Run>, mut count: usize) {
    while let Some(run) = waiting.front_mut() {
        if run.len() > count {
            return run.skip(count);
        }
        count -= run.len();
        waiting.pop_front();
    }
}

/// Publishes the first message of a run by itself.
fn send_first(channel: &mut Channel, run: &Run, epoch: u64) -> Result<Seq, Full> {
    let first = run.views().next().expect("a run that waits has messages");
    channel.send(first.bytes(), &meta(&first, epoch))
}

fn part(message: View<'_>) -> Part<'_> {
    let (skip, trim) = message.stripped();
    let (mark, hash) = (message.mark(), message.hash());
    Part { bytes: message.bytes(), skip: narrow(skip), trim: narrow(trim), mark, hash }
}

/// What stands before a message in the ring.
fn meta(message: &View<'_>, time: u64) -> Meta {
    let (port, group) = message.psock().parts();
    let (skip, trim) = message.stripped();
    let layers = Layers { link: 0, network: narrow(skip), payload: narrow(trim) };
    let (mark, hash) = (message.mark(), message.hash());
    Meta { kind: Kind::MESSAGE, time, mark, port, group, hash, layers, ..Meta::default() }
}

fn narrow(bytes: usize) -> u16 {
    u16::try_from(bytes).unwrap_or(u16::MAX)
}

#[cfg(test)]
mod tests {
    use towpath_mux::assembler::Limits;
    use towpath_mux::mux::{Bound, Config};

    use super::*;

    #[test]
    fn what_workers_send_and_nobody_takes_is_counted_by_cause() {
        let now = Time::default();
        let send_bytes = Bound { high: 10, low: 5 };
        let rows = [
            // Whether it is connected mode, whether there is a connection, and whether that one is named: what became of two.
            (true, false, false, Lost { not_connected: 2, ..Lost::default() }),
            (true, true, false, Lost { full: 1, ..Lost::default() }),
            (true, true, true, Lost::default()),
            (false, true, false, Lost { not_connected: 2, ..Lost::default() }),
            (false, true, true, Lost::default()),
            (false, false, true, Lost { gone: 2, ..Lost::default() }),
        ];
        for (connected, there, named, expected) in rows {
            let mut mux = Mux::new(Config { connected, send_bytes, ..Config::default() });
            let worker = mux.clone_worker(1, now);
            let psock = mux.attach("line".parse().unwrap(), Limits::default(), now).unwrap();
            if !there {
                mux.handle_error(psock, 104, now);
            }
            let mut returns = Returns::default();
            for _ in 0..2 {
                let bytes = Bytes::from_static(b"0123456789");
                returns.sends.push((worker, named.then_some(psock), bytes));
            }
            returns.apply(&mut mux, now);
            assert_eq!(returns.lost, expected, "{connected} {there} {named}");
            let Lost { full, not_connected, gone, .. } = expected;
            let sent: Vec<_> = mux.show().workers.iter().map(|worker| worker.stats.tx_msgs).collect();
            assert_eq!(sent, [2 - full - not_connected - gone], "{connected} {there} {named}");
            assert_eq!(returns.unsent.len() as u64, full + not_connected + gone, "all are to be told");
        }
        let (some, more) =
            (Lost { full: 1, ..Lost::default() }, Lost { full: 3, gone: 2, ..Lost::default() });
        assert_eq!(
            more.since(&some).to_string(),
            "2 found all connections full, 2 were for one that had ended"
        );
    }
}
