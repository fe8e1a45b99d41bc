//! The host's side: fronts and their sessions, each with a program.
//!
//! A program runs for one session of one front. When the session ends, so does the program; the next session starts it again.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use bytes::Bytes;
use towpath_wire::Time;

use super::link::{Link, LinkError, check_memory};
use super::message::{ALL, Body, Message, NotRead, SessionId};
use super::{HEARTBEAT, MAX_PEERS, Outgoing, Peer, SILENCE, WorkerStats, is_name};

/// What a host offers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostSettings {
    /// Worker processes for each front.
    pub workers: u16,
    /// Messages that each of them may hold.
    pub credit: u16,
    /// Fronts that it serves at the same time.
    pub fronts: usize,
}

/// What the caller does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HostEvent {
    /// Start the program for this session; then call [`Host::ready`] or [`Host::gone`].
    Start {
        /// The session.
        session: u64,
        /// The worker's number and the front, for people.
        name: String,
    },
    /// End the program of this session.
    Stop {
        /// The session.
        session: u64,
        /// Kill it.
        kill: bool,
    },
    /// A line for the log.
    Warning(String),
    /// An informational log line.
    Info(String),
}

#[derive(Debug)]
struct Session {
    front: Peer,
    id: SessionId,
    /// The options of the program, when it has attached.
    ready: Option<(bool, bool)>,
    /// Its program has ended, for this reason. The session ends when the rest of its answers is sent.
    over: Option<String>,
    link: Link,
}

#[derive(Debug)]
struct RemoteFront {
    heard: Time,
    workers: Vec<Option<u64>>,
}

/// See the documentation of this module.
#[derive(Debug)]
pub struct Host {
    name: String,
    instance: u64,
    settings: HostSettings,
    leaving: bool,
    now: Time,
    fronts: HashMap<Peer, RemoteFront>,
    sessions: HashMap<u64, Session>,
    sessions_made: u64,
    /// How often pieces were taken: with little room, another session comes first each time.
    rounds: usize,
    offered: Option<Time>,
    out: Vec<Outgoing>,
    events: VecDeque<HostEvent>,
    /// Fronts of another version that were reported.
    others: Vec<(String, u8)>,
    /// The counters.
    pub stats: WorkerStats,
}

impl Host {
    /// A host with this name and a random instance.
    pub fn new(name: &str, instance: u64, settings: HostSettings) -> Self {
        Self {
            name: name.to_owned(),
            instance: instance.max(1),
            settings,
            leaving: false,
            now: Time::default(),
            fronts: HashMap::new(),
            sessions: HashMap::new(),
            sessions_made: 0,
            rounds: 0,
            offered: None,
            out: Vec::new(),
            events: VecDeque::new(),
            others: Vec::new(),
            stats: WorkerStats::default(),
        }
    }

    /// The subject to subscribe to, after the configured one.
    pub fn subject(&self) -> String {
        format!("host.{}.*", self.name)
    }

    /// A message of the bus. `subject` is what follows the configured one.
    pub fn message(&mut self, subject: &str, bytes: &Bytes, now: Time) {
        self.now = now;
        let name = subject.rsplit('.').next().unwrap_or_default();
        if !is_name(name) {
            self.stats.malformed += 1;
            return;
        }
        let message = match Message::parse(bytes) {
            Ok(message) => message,
            Err(NotRead::Malformed) => {
                self.stats.malformed += 1;
                return;
            }
            Err(NotRead::Version(version)) => return self.other_version(name, version),
        };
        if message.to != self.instance {
            self.stats.unknown += u64::from(message.to == ALL);
            return;
        }
        let front = Peer { name: name.to_owned(), instance: message.from };
        if matches!(message.body, Body::Ping { .. }) && !self.meet(&front) {
            return;
        }
        let Some(known) = self.fronts.get_mut(&front) else {
            self.stats.unknown += 1;
            return;
        };
        known.heard = now;
        match message.body {
            Body::Ping { time } => self.send(&front, Body::Pong { time }),
            Body::Open { id } => self.open(&front, id),
            Body::Close { id, kill } => match self.session(&front, id) {
                Some(session) => self.stop(session, kill),
                None => self.stats.unknown += 1,
            },
            Body::Data { id, number, taken, bytes } => match self.session(&front, id) {
                Some(session) => self.data(session, (number, taken, &bytes)),
                None => {
                    self.stats.unknown += 1;
                    self.send(&front, Body::Gone { id, text: "the session has ended".to_owned() });
                }
            },
            Body::Offer { .. } | Body::Pong { .. } | Body::Ready { .. } | Body::Gone { .. } => {
                self.stats.malformed += 1;
            }
        }
    }

    /// Returns true if the front is known, or may be.
    fn meet(&mut self, front: &Peer) -> bool {
        if self.fronts.contains_key(front) {
            return true;
        }
        let full = self.fronts.len() >= self.settings.fronts.min(MAX_PEERS);
        if full || front.is_one_too_many(self.fronts.keys()) {
            self.stats.too_many += 1;
            return false;
        }
        let workers = vec![None; usize::from(self.settings.workers)];
        self.fronts.insert(front.clone(), RemoteFront { heard: self.now, workers });
        self.events.push_back(HostEvent::Info(format!("front {} is there", front.name)));
        true
    }

    fn other_version(&mut self, name: &str, version: u8) {
        self.stats.version += 1;
        let other = (name.to_owned(), version);
        if self.others.len() < MAX_PEERS && !self.others.contains(&other) {
            self.events.push_back(HostEvent::Warning(format!(
                "front {name} has version {version} of the protocol and this worker host version {}; install the same \
                 towpath on both",
                super::WORKER_VERSION
            )));
            self.others.push(other);
        }
    }

    fn open(&mut self, front: &Peer, id: SessionId) {
        let Some(known) = self.fronts.get(front) else { return };
        let Some(worker) = known.workers.get(usize::from(id.worker)) else {
            self.stats.unknown += 1;
            return;
        };
        if let Some(old) = *worker {
            match self.sessions.get(&old) {
                // The front asks again.
                Some(session) if session.id == id => {
                    if let Some((events, parts)) = session.ready {
                        self.send(front, Body::Ready { id, events, parts });
                    }
                    return;
                }
                // The front has given it up.
                _ => self.stop(old, true),
            }
        }
        if self.leaving {
            return self.send(front, Body::Gone { id, text: "the host ends".to_owned() });
        }
        self.sessions_made += 1;
        let session = self.sessions_made;
        if let Some(known) = self.fronts.get_mut(front) {
            known.workers[usize::from(id.worker)] = Some(session);
        }
        let name = format!("worker {} for {}", id.worker, front.name);
        self.sessions.insert(
            session,
            Session { front: front.clone(), id, ready: None, over: None, link: Link::default() },
        );
        self.stats.sessions += 1;
        self.events.push_back(HostEvent::Start { session, name });
    }

    fn data(&mut self, at: u64, (number, taken, bytes): (u32, u64, &[u8])) {
        let Some(front) = self.sessions.get(&at).map(|session| session.front.clone()) else { return };
        let links =
            self.sessions.values().filter(|session| session.front == front).map(|session| &session.link);
        let memory = check_memory(links, bytes);
        let Some(session) = self.sessions.get_mut(&at) else { return };
        let received = memory.and_then(|()| session.link.receive(number, taken, bytes));
        if let Err(error) = received {
            self.fail(at, error);
        }
    }

    /// The front broke the protocol of this session.
    pub fn fail(&mut self, session: u64, error: LinkError) {
        self.stats.broken += 1;
        self.events.push_back(HostEvent::Stop { session, kill: true });
        let mut room = usize::MAX;
        self.flush(session, &mut room);
        self.end(session, error.to_string());
    }

    /// The program of the session has attached.
    pub fn ready(&mut self, session: u64, events: bool, parts: bool) {
        let Some(known) = self.sessions.get_mut(&session) else { return };
        known.ready = Some((events, parts));
        let (front, id) = (known.front.clone(), known.id);
        self.send(&front, Body::Ready { id, events, parts });
    }

    /// The program of the session has ended. The front learns it after the rest of the answers, as its window and the room permit.
    pub fn gone(&mut self, session: u64, why: &str) {
        if let Some(found) = self.sessions.get_mut(&session) {
            found.over = Some(why.to_owned());
            self.end_sent(session);
        }
    }

    /// Ends the session if its program has ended and all that it has answered is sent.
    fn end_sent(&mut self, session: u64) {
        let Some(found) = self.sessions.get_mut(&session).filter(|found| found.link.is_sent()) else {
            return;
        };
        if let Some(why) = found.over.take() {
            self.end(session, why);
        }
    }

    fn end(&mut self, session: u64, text: String) {
        if let Some(Session { front, id, .. }) = self.remove(session) {
            self.send(&front, Body::Gone { id, text });
        }
    }

    /// Moves what the session has sent to the messages for the bus, up to the window, while there is room.
    fn flush(&mut self, session: u64, room: &mut usize) {
        let Some(session) = self.sessions.get_mut(&session) else { return };
        while *room > 0
            && let Some((number, taken, bytes)) = session.link.next()
        {
            let body = Body::Data { id: session.id, number, taken, bytes };
            let bytes = Message { from: self.instance, to: session.front.instance, body }.to_bytes();
            *room = room.saturating_sub(bytes.len());
            let subject = format!("front.{}.{}", session.front.name, self.name);
            self.out.push(Outgoing { subject, bytes });
        }
    }

    fn stop(&mut self, session: u64, kill: bool) {
        self.remove(session);
        self.events.push_back(HostEvent::Stop { session, kill });
    }

    fn session(&self, front: &Peer, id: SessionId) -> Option<u64> {
        let session = (*self.fronts.get(front)?.workers.get(usize::from(id.worker))?)?;
        self.sessions.get(&session).is_some_and(|found| found.id == id).then_some(session)
    }

    fn remove(&mut self, at: u64) -> Option<Session> {
        let session = self.sessions.remove(&at)?;
        if let Some(front) = self.fronts.get_mut(&session.front) {
            front.workers[usize::from(session.id.worker)] = None;
        }
        Some(session)
    }

    fn send(&mut self, front: &Peer, body: Body) {
        let bytes = Message { from: self.instance, to: front.instance, body }.to_bytes();
        let subject = format!("front.{}.{}", front.name, self.name);
        self.out.push(Outgoing { subject, bytes });
    }

    /// The time has passed: offers, and the end of fronts that are silent.
    pub fn tick(&mut self, now: Time) {
        self.now = now;
        let silent = |front: &RemoteFront| now.since(front.heard) > SILENCE;
        let lost: Vec<Peer> =
            self.fronts.iter().filter(|(_, front)| silent(front)).map(|(peer, _)| peer.clone()).collect();
        for peer in lost {
            self.forget(&peer, &format!("front {} was not heard for {} ms", peer.name, SILENCE.as_millis()));
        }
        if self.offered.is_none_or(|offered| now.since(offered) >= HEARTBEAT) {
            self.offer();
        }
    }

    fn offer(&mut self) {
        self.offered = Some(self.now);
        let HostSettings { workers, credit, .. } = self.settings;
        let body = Body::Offer { workers, credit, leaving: self.leaving };
        let bytes = Message { from: self.instance, to: ALL, body }.to_bytes();
        self.out.push(Outgoing { subject: format!("offer.{}", self.name), bytes });
    }

    /// When [`tick`](Self::tick) is due.
    pub fn due(&self) -> Time {
        let silent = self.fronts.values().map(|front| front.heard + SILENCE + Duration::from_millis(1)).min();
        let offer = self.offered.map_or(self.now, |offered| offered + HEARTBEAT);
        silent.map_or(offer, |silent| silent.min(offer))
    }

    /// Takes no further messages, and says so at once. Sessions end when their fronts have no message left with them.
    pub fn leave(&mut self) {
        self.leaving = true;
        self.offer();
    }

    /// The connection to the server has ended: all fronts are gone.
    pub fn disconnected(&mut self, why: &str) {
        let peers: Vec<Peer> = self.fronts.keys().cloned().collect();
        for peer in peers {
            self.forget(&peer, why);
        }
        self.out.clear();
    }

    fn forget(&mut self, peer: &Peer, why: &str) {
        let Some(front) = self.fronts.remove(peer) else { return };
        self.events.push_back(HostEvent::Info(format!("{why}: its sessions end")));
        for session in front.workers.into_iter().flatten() {
            self.stats.silent += 1;
            self.sessions.remove(&session);
            self.events.push_back(HostEvent::Stop { session, kill: false });
        }
    }

    /// The link of a session.
    pub fn link(&mut self, session: u64) -> Option<&mut Link> {
        self.sessions.get_mut(&session).map(|session| &mut session.link)
    }

    /// The number of sessions, with those whose programs have ended and whose answers are not all sent.
    pub fn sessions(&self) -> usize {
        self.sessions.len()
    }

    #[cfg(test)]
    pub(super) fn session_id(&self, session: u64) -> SessionId {
        self.sessions[&session].id
    }

    /// Moves the messages for the bus to `out`: what is ready of each session in pieces, while there is `room` for another one.
    pub fn take_outgoing(&mut self, out: &mut Vec<Outgoing>, mut room: usize) {
        let mut sessions: Vec<u64> = self.sessions.keys().copied().collect();
        self.rounds = self.rounds.wrapping_add(usize::from(room > 0));
        let first = self.rounds % sessions.len().max(1);
        sessions.rotate_left(first);
        sessions.retain(|session| self.sessions[session].ready.is_some());
        for session in sessions {
            self.flush(session, &mut room);
            self.end_sent(session);
        }
        out.append(&mut self.out);
    }

    /// What the caller does next.
    pub fn poll_event(&mut self) -> Option<HostEvent> {
        self.events.pop_front()
    }
}
