//! The front's side: attaches to the pool's rings for workers on other machines.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use bytes::Bytes;
use towpath_fleet::nats::SessionError;
use towpath_fleet::worker_bus::{self, Side};
use towpath_fleet::workers::{Front, FrontEvent, Link, LinkError, Outgoing, What, WorkerStats};
use towpath_ring::{AttachError, Consumer, Frame, Options, ReserveError, Verdict};

use super::poller::Poller;
use super::{BusSettings, instant, meta, random, record, time};
use crate::eventfd::EventFd;
use crate::process::{Child, Place, Program, Remote, RemoteView, RemoteWorker, Started};

/// Token of the wake-up in the poller. Others are the slots.
const WAKE: u64 = u64::MAX;
/// The first id of a worker: above the process ids of this machine.
const FIRST: u32 = 1 << 31;
/// Time without a worker host after which that is logged.
const ALONE: Duration = Duration::from_secs(5);
/// Interval of log lines about refused messages.
const REFUSED: Duration = Duration::from_secs(10);

/// Workers on other machines for a pool. Dropping it ends the thread.
#[derive(Debug)]
pub struct RemoteFront {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

/// How workers are found.
#[derive(Clone, Debug)]
pub struct FrontConfig {
    /// The bus.
    pub bus: BusSettings,
    /// What the thread calls first.
    pub begin: fn(),
}

/// What the pool and the thread share.
#[derive(Debug)]
struct Shared {
    registry: Mutex<Registry>,
    wake: EventFd,
}

#[derive(Debug)]
struct Registry {
    workers: HashMap<u32, Worker>,
    made: u32,
    /// Workers that the pool has started and the thread has not seen.
    started: Vec<u32>,
    killed: Vec<u32>,
    attached: Vec<(u32, Result<Consumer, AttachError>)>,
    /// The thread ends, or has ended.
    over: bool,
    view: RemoteView,
}

#[derive(Debug)]
struct Worker {
    socket: PathBuf,
    remote: RemoteWorker,
    /// Signalled at the end, and then closed: the pool watches another descriptor of it.
    end: Option<EventFd>,
    /// The pool knows that it has ended, and still asks why.
    known: bool,
    /// It has asked: another worker was started since.
    old: bool,
}

impl RemoteFront {
    /// Starts the thread.
    ///
    /// # Errors
    /// A descriptor or the thread cannot be made.
    pub fn start(config: FrontConfig) -> io::Result<Self> {
        let registry = Mutex::new(Registry::new(&config.bus.subject));
        let shared = Arc::new(Shared { registry, wake: EventFd::new()? });
        let poller = Poller::new()?;
        poller.add(&shared.wake, WAKE)?;
        let mut side = FrontSide::new(&config.bus, Arc::clone(&shared), poller);
        let body = move || {
            (config.begin)();
            let BusSettings { server, subject, name } = &config.bus;
            let subjects = side.front.subjects();
            if let Err(error) = worker_bus::run(server, name, subject, &subjects, &mut side) {
                tracing::error!("no remote workers at `{subject}`: {error}");
            }
            side.finish();
        };
        let thread = thread::Builder::new().name("remote-workers".to_owned()).spawn(body)?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// The starter for the pool.
    pub fn starter(&self) -> Arc<dyn Remote> {
        Arc::clone(&self.shared) as Arc<_>
    }
}

impl Drop for RemoteFront {
    fn drop(&mut self) {
        self.shared.lock().over = true;
        self.shared.wake.signal();
        if let Some(thread) = self.thread.take() {
            // A panic was already printed.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Registry> {
        self.registry.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Registry {
    fn new(subject: &str) -> Self {
        let server = Err("connecting".to_owned());
        let stats = WorkerStats::default();
        Self {
            workers: HashMap::new(),
            made: 0,
            started: Vec::new(),
            killed: Vec::new(),
            attached: Vec::new(),
            over: false,
            view: RemoteView { subject: subject.to_owned(), server, hosts: Vec::new(), stats },
        }
    }

    fn end(&mut self, id: u32) {
        if let Some(end) = self.workers.get_mut(&id).and_then(|worker| worker.end.take()) {
            end.signal();
        }
    }
}

impl Remote for Shared {
    fn start(self: Arc<Self>, _: &Place, _: &Program, socket: &Path) -> io::Result<Started> {
        let end = EventFd::new()?;
        let watched = end.as_fd().try_clone_to_owned()?;
        let mut registry = self.lock();
        if registry.over {
            return Err(io::Error::other("the thread of remote workers has ended"));
        }
        registry.workers.retain(|_, worker| !std::mem::replace(&mut worker.old, worker.known));
        let id = FIRST | registry.made;
        registry.made = (registry.made + 1) % FIRST;
        let remote =
            RemoteWorker { name: "a worker on another machine".to_owned(), ..RemoteWorker::default() };
        let worker = Worker { socket: socket.into(), remote, end: Some(end), known: false, old: false };
        registry.workers.insert(id, worker);
        registry.started.push(id);
        drop(registry);
        self.wake.signal();
        let user = rustix::process::geteuid().as_raw();
        Ok(Started { child: Child::of_launcher(id, watched, self), user })
    }

    fn status(&self, id: u32) -> io::Result<Option<ExitStatus>> {
        let mut registry = self.lock();
        if registry.workers.get(&id).is_some_and(|worker| worker.end.is_some()) {
            return Ok(None);
        }
        if let Some(worker) = registry.workers.get_mut(&id) {
            worker.known = true;
        }
        Ok(Some(ExitStatus::default()))
    }

    fn kill(&self, id: u32) -> io::Result<()> {
        let mut registry = self.lock();
        // Without a session, the thread has nothing to do with it.
        let waits = registry.workers.get(&id).is_some_and(|worker| worker.remote.credit == 0);
        if registry.over || waits {
            registry.end(id);
        }
        registry.killed.push(id);
        drop(registry);
        self.wake.signal();
        Ok(())
    }

    fn remote_worker(&self, id: u32) -> Option<RemoteWorker> {
        Some(self.lock().workers.get(&id).map(|worker| worker.remote.clone()).unwrap_or_default())
    }

    fn remote_view(&self) -> Option<RemoteView> {
        Some(self.lock().view.clone())
    }
}

/// A client of the pool's ring.
#[derive(Debug)]
struct End {
    consumer: Consumer,
    /// The frames that the worker has, by sequence number.
    frames: HashMap<u32, Frame>,
    credit: usize,
    /// Length of the reply that waits for space.
    blocked: Option<usize>,
}

/// Why a client leaves the ring.
#[derive(Debug)]
enum Leave {
    /// The pool has closed it, or its host takes no more messages and it has none.
    Closed,
    /// The host broke the protocol.
    Broken(LinkError),
    Ring(String),
}

#[derive(Debug)]
struct FrontSide {
    front: Front,
    subject: String,
    shared: Arc<Shared>,
    poller: Poller,
    ends: HashMap<u32, End>,
    start: Instant,
    /// When hosts were last there, and whether their absence was logged.
    hosts: (Instant, bool),
    refused: (u64, Instant),
    /// Without a connection: what the log said last about it.
    away: Option<String>,
    over: bool,
}

impl FrontSide {
    fn new(bus: &BusSettings, shared: Arc<Shared>, poller: Poller) -> Self {
        let start = Instant::now();
        Self {
            front: Front::new(&bus.name, random()),
            subject: bus.subject.clone(),
            shared,
            poller,
            ends: HashMap::new(),
            start,
            hosts: (start, false),
            refused: (0, start),
            away: Some(String::new()),
            over: false,
        }
    }

    /// The thread ends: no worker may be waited for.
    fn finish(&mut self) {
        self.ends.clear();
        let mut registry = self.shared.lock();
        registry.over = true;
        let ids: Vec<u32> = registry.workers.keys().copied().collect();
        ids.into_iter().for_each(|id| registry.end(id));
        registry.attached.clear();
    }

    /// What the pool and the helper threads have done.
    fn hear(&mut self) {
        let mut registry = self.shared.lock();
        let (started, killed) = (std::mem::take(&mut registry.started), std::mem::take(&mut registry.killed));
        let attached = std::mem::take(&mut registry.attached);
        self.over = registry.over;
        registry.view.stats = self.front.stats;
        drop(registry);
        started.into_iter().for_each(|slot| self.front.want(slot));
        for (slot, consumer) in attached {
            self.attached(slot, consumer);
        }
        for slot in killed {
            self.front.close(slot, true);
            self.leave(slot, None);
        }
    }

    fn attached(&mut self, slot: u32, consumer: Result<Consumer, AttachError>) {
        let known = self.front.link(slot).is_some();
        let consumer = match consumer {
            Ok(consumer) if known => consumer,
            // The session has ended meanwhile.
            Ok(_) => return self.leave(slot, None),
            Err(error) => {
                tracing::warn!("a remote worker cannot attach: {error}");
                self.front.close(slot, true);
                return self.leave(slot, None);
            }
        };
        if let Err(error) = self.poller.add(&consumer, u64::from(slot)) {
            tracing::warn!("a remote worker cannot attach: {error}");
            self.front.close(slot, true);
            return self.leave(slot, None);
        }
        let credit = self.shared.lock().workers.get(&slot).map_or(1, |worker| worker.remote.credit);
        self.ends.insert(slot, End { consumer, frames: HashMap::new(), credit, blocked: None });
    }

    /// Attaches in a helper thread: the pool may be busy.
    fn attach(&self, slot: u32, name: String, options: Options, credit: u16) {
        let round_trip = self.front.round_trip(slot).unwrap_or_default();
        let mut registry = self.shared.lock();
        let Some(worker) = registry.workers.get_mut(&slot) else { return };
        worker.remote =
            RemoteWorker { name, credit: usize::from(credit), round_trip, ..RemoteWorker::default() };
        let socket = worker.socket.clone();
        drop(registry);
        let shared = Arc::clone(&self.shared);
        let attach = move || {
            let consumer = Consumer::attach_with(&socket, &options);
            shared.lock().attached.push((slot, consumer));
            shared.wake.signal();
        };
        if let Err(error) = thread::Builder::new().name("remote-attach".to_owned()).spawn(attach) {
            let failed = AttachError::System { doing: "starting a thread", source: error };
            self.shared.lock().attached.push((slot, Err(failed)));
            self.shared.wake.signal();
        }
    }

    /// The client of a slot leaves its ring, and the pool learns of it.
    fn leave(&mut self, slot: u32, why: Option<String>) {
        let mut registry = self.shared.lock();
        if let Some(worker) = registry.workers.get_mut(&slot) {
            worker.remote.end = worker.remote.end.take().or(why);
        }
        drop(registry);
        // The pool reads the reason when it finds the closed ring.
        self.ends.remove(&slot);
        self.shared.lock().end(slot);
    }

    fn handle_events(&mut self) {
        while let Some(event) = self.front.poll_event() {
            match event {
                FrontEvent::Attach { slot, name, events, parts, credit } => {
                    // A multiplexor's ring drops no frames, so gaps are not reported.
                    let options =
                        Options { gaps: false, events, parts, ..Options::named(&name.replace(' ', "-")) };
                    self.attach(slot, name, options, credit);
                }
                FrontEvent::Ended { slot, why, mut link } => {
                    if let Some(end) = self.ends.get_mut(&slot) {
                        // What it has answered before counts, as far as there is space.
                        let _ = end.replies(&mut link);
                        end.consumer.flush();
                    }
                    self.leave(slot, Some(why));
                }
                FrontEvent::Warning(text) => tracing::warn!("{text}"),
                FrontEvent::Info(text) => tracing::info!("{text}"),
            }
        }
    }

    /// Serves the rings.
    fn exchange(&mut self) {
        let mut leaving = Vec::new();
        for (slot, end) in &mut self.ends {
            let stops = self.front.is_leaving(*slot);
            let Some(link) = self.front.link(*slot) else { continue };
            if let Err(why) = end.exchange(link, stops) {
                leaving.push((*slot, why));
            }
        }
        for (slot, why) in leaving {
            match why {
                Leave::Closed => {
                    self.front.close(slot, false);
                    self.leave(slot, Some("it has left".to_owned()));
                }
                Leave::Broken(error) => self.front.fail(slot, error),
                Leave::Ring(error) => {
                    self.front.close(slot, true);
                    self.leave(slot, Some(error));
                }
            }
        }
    }

    /// Logs that there is no host, and refused messages.
    fn report(&mut self, now: Instant) {
        let hosts = self.front.hosts();
        if !hosts.is_empty() {
            self.hosts = (now, false);
        } else if self.away.is_none() && !self.hosts.1 && now.duration_since(self.hosts.0) >= ALONE {
            self.hosts.1 = true;
            let subject = &self.subject;
            tracing::warn!(
                "no worker host at `{subject}`: run `towpath worker --subject {subject}`, and permit it and this front the subjects \
                 `{subject}.>`"
            );
        }
        let mut registry = self.shared.lock();
        for (slot, worker) in &mut registry.workers {
            if let Some(trip) = self.front.round_trip(*slot) {
                worker.remote.round_trip = trip;
            }
        }
        registry.view.hosts = hosts;
        drop(registry);
        let WorkerStats { malformed, version, unknown, too_many, .. } = self.front.stats;
        let all = malformed + version + unknown + too_many;
        let (before, last) = self.refused;
        if all > before && now.duration_since(last) >= REFUSED {
            self.refused = (all, now);
            tracing::warn!(
                "{} messages at `{}` were refused: {malformed} malformed, {version} of another version, {unknown} for unknown \
                 sessions, {too_many} of too many hosts, since the start",
                all - before,
                self.subject
            );
        }
    }
}

impl End {
    fn exchange(&mut self, link: &mut Link, stops: bool) -> Result<(), Leave> {
        let mut busy = self.replies(link)?;
        while self.takes(link, stops) {
            let ring = |error: towpath_ring::RecvError| Leave::Ring(error.to_string());
            let Some(frame) = self.consumer.try_recv().map_err(ring)? else { break };
            link.push(&record(frame.header(), frame.seq()), self.consumer.payload(&frame));
            self.consumer.tell_received(&frame);
            self.frames.insert(frame.seq().0, frame);
            busy = true;
        }
        self.consumer.flush();
        // Frames that were published before the end can still be received.
        let closed = self.consumer.is_ended() && !busy;
        if closed || stops && self.frames.is_empty() { Err(Leave::Closed) } else { Ok(()) }
    }

    fn takes(&self, link: &Link, stops: bool) -> bool {
        !stops && link.has_room() && self.frames.len() < self.credit
    }

    /// Passes what the worker has sent to the ring.
    fn replies(&mut self, link: &mut Link) -> Result<bool, Leave> {
        self.blocked = None;
        let mut busy = false;
        while let Some((record, payload)) = link.peek().map_err(Leave::Broken)? {
            match record.what {
                What::Release => {
                    let Some(frame) = self.frames.remove(&record.seq) else {
                        return Err(Leave::Broken(LinkError::Record));
                    };
                    self.consumer.verdict(frame, Verdict::Pass);
                }
                What::Frame => match self.consumer.try_send(payload, &meta(&record)) {
                    Ok(()) => {}
                    Err(ReserveError::RingFull | ReserveError::NoContiguousSpace) => {
                        self.blocked = Some(payload.len());
                        return Ok(busy);
                    }
                    Err(error) => return Err(Leave::Ring(error.to_string())),
                },
            }
            link.pop();
            busy = true;
        }
        Ok(busy)
    }
}

impl Side for FrontSide {
    fn connected(&mut self, server: &str) {
        self.away = None;
        self.hosts = (Instant::now(), false);
        self.shared.lock().view.server = Ok(server.to_owned());
        tracing::info!("remote workers at `{}`: connected to {server}", self.subject);
    }

    fn disconnected(&mut self, error: &SessionError) {
        let text = error.to_string();
        if self.away.as_ref() != Some(&text) {
            tracing::warn!(
                "remote workers at `{}`: {text}; without the server there are none, and the front tries again every second",
                self.subject
            );
        }
        self.front.stats.overflows += u64::from(matches!(error, SessionError::Behind));
        self.front.disconnected("the connection to the server has ended");
        let mut registry = self.shared.lock();
        (registry.view.server, registry.view.hosts) = (Err(text.clone()), Vec::new());
        drop(registry);
        self.away = Some(text);
    }

    fn warning(&mut self, text: &str) {
        tracing::warn!("remote workers at `{}`: {text}", self.subject);
    }

    fn message(&mut self, subject: &str, bytes: &Bytes, copied: bool, now: Instant) {
        if copied {
            self.front.stats.malformed += 1;
            return;
        }
        self.front.message(subject, bytes, time(self.start, now));
    }

    fn turn(&mut self, readable: bool, room: usize, out: &mut Vec<Outgoing>) {
        let now = Instant::now();
        for token in self.poller.ready(readable) {
            if token == WAKE {
                self.shared.wake.clear();
            } else if let Some(end) = u32::try_from(token).ok().and_then(|slot| self.ends.get_mut(&slot)) {
                // An error is also found by the exchange.
                let _ = end.consumer.disarm();
            }
        }
        self.hear();
        if self.away.is_none() && now >= instant(self.start, self.front.due()) {
            self.front.tick(time(self.start, now));
            self.report(now);
        }
        self.exchange();
        self.handle_events();
        self.front.take_outgoing(out, room);
    }

    fn arm(&mut self) -> bool {
        let Self { front, ends, poller, .. } = self;
        !poller.has_rest()
            && ends.iter_mut().all(|(slot, end)| {
                let stops = front.is_leaving(*slot);
                let takes = front.link(*slot).is_some_and(|link| end.takes(link, stops));
                let quiet = end.consumer.arm();
                let full = end.blocked.is_none_or(|len| !end.consumer.has_room(len));
                full && (quiet || !takes && !end.consumer.is_ended())
            })
    }

    fn due(&self) -> Instant {
        match self.away {
            None => instant(self.start, self.front.due()),
            Some(_) => Instant::now() + Duration::from_secs(1),
        }
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.poller.as_fd()
    }

    fn is_over(&self) -> bool {
        self.over
    }
}
