//! The worker host: programs with rings whose frames come from fronts.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use bytes::Bytes;
use towpath_fleet::nats::SessionError;
use towpath_fleet::worker_bus::{self, Side};
use towpath_fleet::workers::{Host, HostEvent, HostSettings, Link, LinkError, Outgoing, What, WorkerStats};
use towpath_ring::{Allow, Channel, Death, Endpoint, ReserveError, Seq};

use super::poller::Poller;
use super::{BusSettings, instant, meta, random, record, time};
use crate::process::socket_directory::{self, SocketDirectory};
use crate::process::{Child, Place, Program, Starter};
use crate::worker_pool::worker_ring;

/// Token of the signals in the poller. Others are the sessions: of their endpoint or channel, and with [`EXIT_TOKEN`] of their program.
const SIGNALS: u64 = u64::MAX;
const EXIT_TOKEN: u64 = 1 << 63;
/// Time for a program to attach, and to exit after its session.
const ATTACH: Duration = Duration::from_secs(15);
const EXIT: Duration = Duration::from_secs(5);
/// Interval of checks of programs that attach or exit.
const LOOK: Duration = Duration::from_millis(20);
/// A session that its front ends in this time without a completed message counts as one of a program that did nothing.
const EARLY: Duration = Duration::from_secs(1);
/// Delay of the next start after a program that did nothing. Doubles.
const AGAIN: Duration = Duration::from_millis(100);
const AGAIN_MOST: Duration = Duration::from_secs(10);
/// Maximum number of calls of [`Channel::poll_messages`] per turn, so that a program that only sends does not delay the others.
const ROUNDS: usize = 2;
/// Time without a front after which that is logged.
const ALONE: Duration = Duration::from_secs(5);
/// Interval of log lines about refused messages.
const REFUSED: Duration = Duration::from_secs(10);

/// A worker host.
#[derive(Debug)]
pub struct HostConfig {
    /// The bus.
    pub bus: BusSettings,
    /// What it offers.
    pub settings: HostSettings,
    /// The program.
    pub program: Program,
    /// Starts it.
    pub starter: Starter,
    /// Time for fronts to take their messages back when it ends.
    pub drain: Duration,
}

/// What a host has done.
#[derive(Clone, Copy, Debug)]
pub struct HostOutcome {
    /// All sessions had ended in time.
    pub drained: bool,
    /// The counters.
    pub stats: WorkerStats,
}

/// Serves fronts until `ended` is signalled, which is readable then; `end` returns true for each signal. The first one drains, the second
/// one ends at once.
///
/// # Errors
/// A descriptor, a directory or the thread's runtime cannot be made.
pub fn serve(config: HostConfig, signals: impl AsFd, end: impl FnMut() -> bool) -> io::Result<HostOutcome> {
    let poller = Poller::new()?;
    poller.add(signals, SIGNALS)?;
    let start = Instant::now();
    let directory = socket_directory::make(config.starter.changes_user())?;
    let mut side = HostSide {
        host: Host::new(&config.bus.name, random(), config.settings),
        poller,
        programs: HashMap::new(),
        gone: Vec::new(),
        delayed: Vec::new(),
        failures: (0, start),
        directory,
        start,
        draining: None,
        away: Some(String::new()),
        fronts: (start, false),
        refused: (0, start),
        drained: None,
        end,
        config: &config,
    };
    let BusSettings { server, subject, name } = &config.bus;
    let subjects = [side.host.subject()];
    worker_bus::run(server, name, subject, &subjects, &mut side)?;
    Ok(HostOutcome { drained: side.drained == Some(true), stats: side.host.stats })
}

/// The program of a session.
#[derive(Debug)]
struct Running {
    child: Child,
    name: String,
    started: Instant,
    /// Until it attaches.
    endpoint: Option<Endpoint>,
    channel: Option<Channel>,
    /// It has completed a message.
    served: bool,
    /// Released frames. They are passed on after all earlier answers.
    released: Vec<Seq>,
}

struct HostSide<'a, E> {
    host: Host,
    poller: Poller,
    programs: HashMap<u64, Running>,
    /// Programs whose sessions have ended, and since when.
    gone: Vec<(Child, Instant)>,
    /// Sessions whose programs start later.
    delayed: Vec<(u64, String)>,
    /// Programs that ended at once, in a row, and when the next one starts.
    failures: (u32, Instant),
    directory: SocketDirectory,
    start: Instant,
    /// The deadline of the drain.
    draining: Option<Instant>,
    /// Without a connection: what the log said last about it.
    away: Option<String>,
    /// When there was a session last, and whether their absence was logged.
    fronts: (Instant, bool),
    refused: (u64, Instant),
    drained: Option<bool>,
    end: E,
    config: &'a HostConfig,
}

impl<E: FnMut() -> bool> HostSide<'_, E> {
    fn handle_events(&mut self, now: Instant) {
        let mut early = false;
        while let Some(event) = self.host.poll_event() {
            match event {
                HostEvent::Start { session, name } => self.delayed.push((session, name)),
                HostEvent::Stop { session, kill } => {
                    self.delayed.retain(|(delayed, _)| *delayed != session);
                    early |= self.stop(session, kill, now);
                }
                HostEvent::Warning(text) => tracing::warn!("{text}"),
                HostEvent::Info(text) => tracing::info!("{text}"),
            }
        }
        if early {
            // Once for all that end together, as at the end of a connection.
            self.failed(false, now);
        }
        if now >= self.failures.1 {
            for (session, name) in std::mem::take(&mut self.delayed) {
                self.start(session, name, now);
            }
        }
    }

    fn start(&mut self, session: u64, name: String, now: Instant) {
        match self.spawn(session, &name, now) {
            Ok(running) => drop(self.programs.insert(session, running)),
            Err(error) => {
                let program = &self.config.program.words[0];
                tracing::warn!("{name}: cannot start `{program}`: {error}");
                self.host.gone(session, &format!("cannot start `{program}`: {error}"));
                self.failed(false, now);
            }
        }
    }

    fn spawn(&self, session: u64, name: &str, now: Instant) -> io::Result<Running> {
        let path = self.directory.path().join(format!("worker-{session}.sock"));
        let mut endpoint = Endpoint::bind(&path, worker_ring()).map_err(io::Error::other)?;
        let started = self.config.starter.start(&Place::Mux(String::new()), &self.config.program, &path)?;
        endpoint.set_allow(Allow::Users(vec![started.user]));
        let mut child = started.child;
        let watched = self.poller.add(&child, session | EXIT_TOKEN);
        let watched = watched.and_then(|()| self.poller.add(&endpoint, session));
        watched.inspect_err(|_| {
            let _ = child.kill();
            let _ = child.wait();
        })?;
        let (endpoint, name) = (Some(endpoint), name.to_owned());
        Ok(Running {
            child,
            name,
            started: now,
            endpoint,
            channel: None,
            served: false,
            released: Vec::new(),
        })
    }

    /// The next program starts at once after one that has worked, and later after one that has not.
    fn failed(&mut self, served: bool, now: Instant) {
        let row = if served { 0 } else { self.failures.0 + 1 };
        let wait = match row {
            0 | 1 => Duration::ZERO,
            more => AGAIN_MOST.min(AGAIN * 2u32.saturating_pow(more - 2).min(1000)),
        };
        self.failures = (row, now + wait);
    }

    /// The session has ended: its program learns that by the end of its ring. Returns true if the front ended it soon after its start and
    /// before it completed a message.
    fn stop(&mut self, session: u64, kill: bool, now: Instant) -> bool {
        let Some(mut running) = self.programs.remove(&session) else { return false };
        let early = !running.served && now < running.started + EARLY;
        let unattached = running.endpoint.is_some();
        if let Some(channel) = &mut running.channel {
            self.poller.remove(channel.as_fd());
            channel.detach();
        }
        if kill || unattached {
            // Fails if it has exited.
            let _ = running.child.kill();
        }
        self.gone.push((running.child, now));
        early
    }

    /// Programs that have attached or ended.
    fn look(&mut self, now: Instant) {
        let mut ended = Vec::new();
        for (session, running) in &mut self.programs {
            match running.look(&self.poller, *session, now) {
                Ok(true) => {
                    if let Some(channel) = &running.channel {
                        self.host.ready(*session, channel.wants_events(), channel.takes_parts());
                    }
                }
                Ok(false) => {}
                Err(why) => ended.push((*session, why)),
            }
        }
        for (session, why) in ended {
            self.ended(session, &why, now);
        }
        self.gone.retain_mut(|(child, since)| {
            if now > *since + EXIT {
                let _ = child.kill();
            }
            matches!(child.try_wait(), Ok(None))
        });
    }

    /// A program has ended, or broke the protocol of its ring.
    fn ended(&mut self, session: u64, why: &str, now: Instant) {
        let Some(running) = self.programs.get_mut(&session) else { return };
        if let (Some(channel), Some(link)) = (&mut running.channel, self.host.link(session)) {
            // What it has answered before counts.
            running.served |=
                from_program(channel, link, &mut running.released, time(self.start, now).as_nanos())
                    .completed;
        }
        let (served, name) = (running.served, running.name.clone());
        tracing::warn!("{name}: {why}");
        self.host.gone(session, why);
        self.stop(session, false, now);
        self.failed(served, now);
    }

    fn exchange(&mut self, now: Instant) {
        let mut ended = Vec::new();
        let clock = time(self.start, now).as_nanos();
        for (session, running) in &mut self.programs {
            let (Some(channel), Some(link)) = (&mut running.channel, self.host.link(*session)) else {
                continue;
            };
            let (mut published, mut read) = (false, false);
            match to_program(channel, link) {
                Ok(any) => published = any,
                Err(why) => ended.push((*session, why)),
            }
            if link.has_room() {
                let Wrote { any, completed } = from_program(channel, link, &mut running.released, clock);
                running.served |= completed;
                read = any;
            }
            match (published, read) {
                (true, _) => channel.kick(),
                (false, true) => channel.kick_for_room(),
                (false, false) => {}
            }
        }
        for (session, why) in ended {
            match why {
                Ok(error) => self.host.fail(session, error),
                Err(why) => self.ended(session, &why, now),
            }
        }
    }

    /// Returns true if there are programs that attach or exit.
    fn waits(&self) -> bool {
        self.programs.values().any(|running| running.channel.is_none()) || !self.gone.is_empty()
    }

    fn handle_signals(&mut self, now: Instant) {
        while (self.end)() {
            if self.draining.is_some() {
                self.drained = Some(false);
                return;
            }
            tracing::info!("draining: no further messages are taken");
            self.draining = Some(now + self.config.drain);
            self.host.leave();
        }
        if let Some(deadline) = self.draining {
            let idle = self.host.sessions() == 0;
            if idle || now >= deadline {
                self.drained = Some(idle);
            }
        }
    }

    /// Logs that there is no front, and refused messages.
    fn report(&mut self, now: Instant) {
        if self.host.sessions() > 0 {
            self.fronts = (now, false);
        } else if !self.fronts.1 && now.duration_since(self.fronts.0) >= ALONE {
            self.fronts.1 = true;
            let subject = &self.config.bus.subject;
            tracing::warn!(
                "no front at `{subject}`: run `towpath mux --remote {subject}`, and permit it and this host the subjects `{subject}.>`"
            );
        }
        let WorkerStats { malformed, version, unknown, too_many, .. } = self.host.stats;
        let all = malformed + version + unknown + too_many;
        let (before, last) = self.refused;
        if all > before && now.duration_since(last) >= REFUSED {
            self.refused = (all, now);
            tracing::warn!(
                "{} messages at `{}` were refused: {malformed} malformed, {version} of another version, {unknown} for unknown \
                 sessions, {too_many} of too many fronts, since the start",
                all - before,
                self.config.bus.subject
            );
        }
    }
}

impl Running {
    /// Returns true if it has attached, or the reason for its end.
    fn look(&mut self, poller: &Poller, session: u64, now: Instant) -> Result<bool, String> {
        let failed = |error: io::Error| error.to_string();
        if let Some(endpoint) = &mut self.endpoint
            && let Some(channel) = endpoint.accept().map_err(failed)?
        {
            poller.add(&channel, session).map_err(failed)?;
            poller.remove(endpoint.as_fd());
            (self.endpoint, self.channel) = (None, Some(channel));
            return Ok(true);
        }
        let status = self.child.try_wait().map_err(failed)?;
        let id = self.child.id();
        // Reads the socket.
        let lives = self.channel.as_mut().is_none_or(|channel| channel.check_peer());
        match (status, &self.channel) {
            (Some(status), Some(_)) => Err(format!("process {id}: {status}")),
            (Some(status), None) => {
                Err(format!("it ended before it attached ({status}); run it alone to see why"))
            }
            (None, Some(channel)) if !lives => {
                Err(format!("process {id}: {}", channel.death().unwrap_or(Death::Closed)))
            }
            (None, None) if now > self.started + ATTACH => Err(format!(
                "it did not attach within {} s; a worker attaches to the socket that TOWPATH_SOCKET names",
                ATTACH.as_secs()
            )),
            _ => Ok(false),
        }
    }
}

/// Publishes the front's frames, as far as there is space. The error is the front's or the program's fault.
fn to_program(channel: &mut Channel, link: &mut Link) -> Result<bool, Result<LinkError, String>> {
    let mut busy = false;
    while let Some((record, payload)) = link.peek().map_err(Ok)? {
        if record.what != What::Frame {
            return Err(Ok(LinkError::Record));
        }
        match channel.send(payload, &meta(&record)) {
            // Both rings number their frames from the same number on.
            Ok(seq) if seq.0 == record.seq => {}
            Ok(_) => return Err(Ok(LinkError::Record)),
            Err(ReserveError::RingFull | ReserveError::NoContiguousSpace) => break,
            Err(error) => return Err(Err(error.to_string())),
        }
        link.pop();
        busy = true;
    }
    Ok(busy)
}

/// What a program has written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Wrote {
    any: bool,
    /// It has completed a message.
    completed: bool,
}

/// Passes what the program has written to the front: answers first, then the releases that it wrote after them.
fn from_program(channel: &mut Channel, link: &mut Link, released: &mut Vec<Seq>, now: u64) -> Wrote {
    let before = released.len();
    // Answers to the frames released here were written before: the reads below have them.
    channel.poll_verdicts(now, |seq, _| released.push(seq));
    let completed = released.len() > before;
    let mut any = completed;
    for _ in 0..ROUNDS {
        any |= channel.poll_messages(|header, payload| link.push(&record(header, Seq(0)), payload)) > 0;
        if !channel.has_message() {
            break;
        }
    }
    if channel.has_message() {
        return Wrote { any, completed };
    }
    for seq in released.drain(..) {
        link.push(
            &towpath_fleet::workers::Record { what: What::Release, seq: seq.0, ..Default::default() },
            &[],
        );
    }
    Wrote { any, completed }
}

impl<E: FnMut() -> bool> Side for HostSide<'_, E> {
    fn connected(&mut self, server: &str) {
        self.away = None;
        self.fronts = (Instant::now(), false);
        tracing::info!(
            "connected to {server}, subject `{}`, host {}",
            self.config.bus.subject,
            self.config.bus.name
        );
        crate::service_manager::notify("READY=1");
    }

    fn disconnected(&mut self, error: &SessionError) {
        let text = error.to_string();
        if self.away.as_ref() != Some(&text) {
            tracing::warn!("{text}; the host tries again every second");
        }
        self.host.stats.overflows += u64::from(matches!(error, SessionError::Behind));
        self.host.disconnected("the connection to the server has ended");
        self.away = Some(text);
    }

    fn warning(&mut self, text: &str) {
        tracing::warn!("{text}");
    }

    fn message(&mut self, subject: &str, bytes: &Bytes, copied: bool, now: Instant) {
        if copied {
            self.host.stats.malformed += 1;
            return;
        }
        self.host.message(subject, bytes, time(self.start, now));
    }

    fn turn(&mut self, readable: bool, room: usize, out: &mut Vec<Outgoing>) {
        let now = Instant::now();
        let (mut look, mut signals) = (self.waits(), self.draining.is_some());
        for token in self.poller.ready(readable) {
            match (token, self.programs.get_mut(&token).and_then(|running| running.channel.as_mut())) {
                (SIGNALS, _) => signals = true,
                // A doorbell, or the end of the channel.
                (_, Some(channel)) => {
                    channel.disarm();
                    look |= !channel.check_peer();
                }
                (_, None) => look = true,
            }
        }
        if look {
            self.look(now);
        }
        if signals {
            self.handle_signals(now);
        }
        if self.away.is_none() && now >= instant(self.start, self.host.due()) {
            self.host.tick(time(self.start, now));
            self.report(now);
        }
        self.exchange(now);
        self.handle_events(now);
        self.host.take_outgoing(out, room);
    }

    fn arm(&mut self) -> bool {
        let Self { programs, host, poller, .. } = self;
        !poller.has_rest()
            && programs.iter_mut().all(|(session, running)| {
                let Some(channel) = &mut running.channel else { return true };
                let room = host.link(*session).is_some_and(|link| link.has_room());
                channel.arm() || !room && !channel.is_dead()
            })
    }

    fn due(&self) -> Instant {
        let look = self.waits().then(|| Instant::now() + LOOK);
        let start = (!self.delayed.is_empty()).then_some(self.failures.1);
        let own = match self.away {
            None => instant(self.start, self.host.due()),
            Some(_) => Instant::now() + Duration::from_secs(1),
        };
        [look, start, self.draining].into_iter().flatten().fold(own, Instant::min)
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.poller.as_fd()
    }

    fn is_over(&self) -> bool {
        self.drained.is_some()
    }
}

impl<E> Drop for HostSide<'_, E> {
    fn drop(&mut self) {
        let now = Instant::now();
        let mut children = std::mem::take(&mut self.gone);
        for (_, mut running) in self.programs.drain() {
            if let Some(channel) = &mut running.channel {
                channel.detach();
            }
            children.push((running.child, now));
        }
        while now.elapsed() < EXIT
            && children.iter_mut().any(|(child, _)| matches!(child.try_wait(), Ok(None)))
        {
            std::thread::sleep(LOOK / 4);
        }
        for (child, _) in &mut children {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

#[cfg(test)]
mod tests {
    use towpath_ring::{Consumer, Options, Verdict};

    use super::*;
    use crate::process::Local;

    /// A message of the front `f`, as in the documentation of `towpath_fleet::workers`.
    fn message(kind: u8, rest: &[u8]) -> Bytes {
        let instances = [7u64.to_le_bytes(), 1u64.to_le_bytes()].concat();
        [b"TWWK\x01", &[kind, 0, 0][..], &instances, rest].concat().into()
    }

    #[test]
    fn a_front_that_opens_one_session_after_another_waits_for_programs() {
        let config = HostConfig {
            bus: BusSettings { server: Default::default(), subject: "s".into(), name: "h".into() },
            settings: HostSettings { workers: 2, credit: 1, fronts: 1 },
            program: Program::new(&["sleep".to_owned(), "1000".to_owned()]),
            starter: Starter::Local(Local::plain()),
            drain: Duration::ZERO,
        };
        let start = Instant::now();
        let mut side = HostSide {
            host: Host::new("h", 1, config.settings),
            poller: Poller::new().unwrap(),
            programs: HashMap::new(),
            gone: Vec::new(),
            delayed: Vec::new(),
            failures: (0, start),
            directory: socket_directory::make(false).unwrap(),
            start,
            draining: None,
            away: None,
            fronts: (start, false),
            refused: (0, start),
            drained: None,
            end: || false,
            config: &config,
        };
        side.message("host.h.f", &message(2, &[0; 8]), false, start);
        let open = |session: u8| message(4, &[0, 0, 0, 0, session, 0, 0, 0]);
        // Rows: milliseconds since the start, the session that is opened, programs that run, programs that were started.
        let rows = [
            (0, 1, 1, 1),
            (1, 2, 1, 2),
            (2, 3, 0, 2),
            (50, 4, 0, 2),
            (102, 5, 1, 3),
            (103, 6, 0, 3),
            (302, 7, 0, 3),
            (303, 8, 1, 4),
        ];
        for (millis, session, running, started) in rows {
            side.message("host.h.f", &open(session), false, start);
            side.handle_events(start + Duration::from_millis(millis));
            assert_eq!(
                (side.programs.len(), side.programs.len() + side.gone.len()),
                (running, started),
                "at {millis} ms"
            );
        }
        // One that is ended later does not count.
        side.message("host.h.f", &open(9), false, start);
        side.handle_events(start + Duration::from_secs(2));
        assert_eq!(side.programs.len(), 1);
        let sessions: Vec<u64> = side.programs.keys().copied().collect();
        for session in sessions {
            side.stop(session, true, start);
        }
    }

    #[test]
    fn a_program_has_completed_a_message_when_it_releases_it() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("worker.sock");
        let mut endpoint = Endpoint::bind(&path, worker_ring()).unwrap();
        let attach =
            std::thread::spawn(move || Consumer::attach_with(&path, &Options::named("test")).unwrap());
        let mut channel =
            std::iter::repeat_with(|| endpoint.accept().unwrap()).find_map(|channel| channel).unwrap();
        let mut consumer = attach.join().unwrap();
        let (mut link, mut released) = (Link::default(), Vec::new());
        channel.send(b"question", &meta(&towpath_fleet::workers::Record::default())).unwrap();
        channel.kick();
        let frame = consumer.recv().unwrap().unwrap();
        // Messages alone, as of a program that logs and exits.
        consumer.try_send(b"answer", &meta(&towpath_fleet::workers::Record::default())).unwrap();
        consumer.flush();
        let wrote = from_program(&mut channel, &mut link, &mut released, 1);
        assert_eq!(wrote, Wrote { any: true, completed: false });
        consumer.verdict(frame, Verdict::Pass);
        consumer.flush();
        assert_eq!(
            from_program(&mut channel, &mut link, &mut released, 2),
            Wrote { any: true, completed: true }
        );
        assert_eq!(
            from_program(&mut channel, &mut link, &mut released, 3),
            Wrote { any: false, completed: false }
        );
    }
}
