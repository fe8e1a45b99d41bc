//! The front's side: hosts, their workers, and the sessions of the front's slots.
//!
//! A slot that is free waits for a worker ([`Front::want`]). When a host offers one, the front opens a session; when its program has
//! attached, the caller attaches to the multiplexor for it ([`FrontEvent::Attach`]). The nearest host comes first: the one with the shortest
//! measured round trip.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use bytes::Bytes;
use towpath_wire::Time;

use super::link::{Link, LinkError, check_memory};
use super::message::{ALL, Body, Message, NotRead, SessionId};
use super::{HEARTBEAT, MAX_CREDIT, MAX_PEERS, MAX_WORKERS, Outgoing, Peer, SILENCE, WorkerStats, is_name};

/// What the caller does.
#[derive(Debug)]
pub enum FrontEvent {
    /// A worker is ready for this slot: attach to the multiplexor as it did.
    Attach {
        /// The slot.
        slot: u32,
        /// Worker and host, for people.
        name: String,
        /// The program wants events of connections.
        events: bool,
        /// The program takes messages in parts.
        parts: bool,
        /// Messages that it may hold.
        credit: u16,
    },
    /// The session of this slot has ended. The slot does not wait for another one.
    Ended {
        /// The slot.
        slot: u32,
        /// The reason, for people.
        why: String,
        /// Its link: what the worker has sent before counts.
        link: Box<Link>,
    },
    /// A line for the log.
    Warning(String),
    /// An informational log line.
    Info(String),
}

/// A host, to be shown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostView {
    /// Its name.
    pub name: String,
    /// Its workers.
    pub workers: usize,
    /// The slots that have one of them.
    pub slots: Vec<u32>,
    /// Messages that each of them may hold.
    pub credit: u16,
    /// It takes no further messages.
    pub leaving: bool,
    /// The round trip.
    pub round_trip: Option<Duration>,
}

#[derive(Debug)]
struct RemoteHost {
    credit: u16,
    leaving: bool,
    heard: Time,
    round_trip: Option<Duration>,
    /// The slot of each worker.
    workers: Vec<Option<u32>>,
}

#[derive(Debug)]
struct Session {
    host: Peer,
    id: SessionId,
    ready: bool,
    opened: Time,
    link: Link,
}

/// See the documentation of this module.
#[derive(Debug)]
pub struct Front {
    name: String,
    instance: u64,
    now: Time,
    hosts: HashMap<Peer, RemoteHost>,
    sessions: HashMap<u32, Session>,
    /// Slots without a worker.
    waiting: VecDeque<u32>,
    sessions_made: u32,
    /// How often pieces were taken: with little room, another session comes first each time.
    rounds: usize,
    pinged: Option<Time>,
    out: Vec<Outgoing>,
    events: VecDeque<FrontEvent>,
    /// Hosts of another version that were reported.
    others: Vec<(String, u8)>,
    /// The counters.
    pub stats: WorkerStats,
}

impl Front {
    /// A front with this name and a random instance.
    pub fn new(name: &str, instance: u64) -> Self {
        Self {
            name: name.to_owned(),
            instance: instance.max(1),
            now: Time::default(),
            hosts: HashMap::new(),
            sessions: HashMap::new(),
            waiting: VecDeque::new(),
            sessions_made: 0,
            rounds: 0,
            pinged: None,
            out: Vec::new(),
            events: VecDeque::new(),
            others: Vec::new(),
            stats: WorkerStats::default(),
        }
    }

    /// The subjects to subscribe to, after the configured one.
    pub fn subjects(&self) -> [String; 2] {
        ["offer.*".to_owned(), format!("front.{}.*", self.name)]
    }

    /// A free slot waits for a worker.
    pub fn want(&mut self, slot: u32) {
        self.waiting.push_back(slot);
        self.open();
    }

    /// Ends the slot: it does not wait any more, or its session ends. `kill`: the program is killed. The next ping offers the worker to
    /// other slots: if the pool ends, it closes them meanwhile.
    pub fn close(&mut self, slot: u32, kill: bool) {
        self.waiting.retain(|waiting| *waiting != slot);
        if let Some(session) = self.remove(slot) {
            self.send(&session.host, Body::Close { id: session.id, kill });
        }
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
        let host = Peer { name: name.to_owned(), instance: message.from };
        if let Body::Offer { workers, credit, leaving } = message.body {
            return self.offer(host, (workers, credit, leaving));
        }
        if message.to != self.instance {
            // For an earlier process of this name.
            self.stats.unknown += u64::from(message.to == ALL);
            return;
        }
        let Some(known) = self.hosts.get_mut(&host) else {
            self.stats.unknown += 1;
            return;
        };
        known.heard = now;
        match message.body {
            Body::Pong { time } => {
                // The time is the word of the host, which may lie. A host that is silent for longer has ended.
                let trip = now.since(Time::from_nanos(time.min(now.as_nanos()))).min(SILENCE);
                let mean = known.round_trip.map_or(trip, |mean| mean * 7 / 8 + trip / 8);
                known.round_trip = Some(mean);
            }
            Body::Ready { id, events, parts } => {
                let credit = known.credit;
                let Some(slot) = self.slot(&host, id) else { return self.not_known(&host, id) };
                let Some(session) = self.sessions.get_mut(&slot).filter(|session| !session.ready) else {
                    return;
                };
                session.ready = true;
                self.stats.sessions += 1;
                let name = format!("worker {} of {}", id.worker, host.name);
                self.events.push_back(FrontEvent::Attach { slot, name, events, parts, credit });
            }
            Body::Data { id, number, taken, bytes } => self.data(&host, id, (number, taken, &bytes)),
            Body::Gone { id, text } => {
                let Some(slot) = self.slot(&host, id) else {
                    self.stats.unknown += 1;
                    return;
                };
                let link = self.remove(slot).map(|session| session.link);
                self.ended(slot, link, format!("host {}: {text}", host.name));
            }
            Body::Offer { .. } | Body::Ping { .. } | Body::Open { .. } | Body::Close { .. } => {
                self.stats.malformed += 1;
            }
        }
    }

    fn other_version(&mut self, name: &str, version: u8) {
        self.stats.version += 1;
        let other = (name.to_owned(), version);
        if self.others.len() < MAX_PEERS && !self.others.contains(&other) {
            self.events.push_back(FrontEvent::Warning(format!(
                "worker host {name} has version {version} of the protocol and this front version {}; install the same \
                 towpath on both",
                super::WORKER_VERSION
            )));
            self.others.push(other);
        }
    }

    fn offer(&mut self, peer: Peer, (workers, credit, leaving): (u16, u16, bool)) {
        if workers == 0 || workers > MAX_WORKERS || credit == 0 || credit > MAX_CREDIT {
            self.stats.malformed += 1;
            return;
        }
        let now = self.now;
        if !self.hosts.contains_key(&peer) {
            if leaving {
                return;
            }
            if self.hosts.len() >= MAX_PEERS || peer.is_one_too_many(self.hosts.keys()) {
                self.stats.too_many += 1;
                return;
            }
            let count = usize::from(workers);
            let host =
                RemoteHost { credit, leaving, heard: now, round_trip: None, workers: vec![None; count] };
            self.events
                .push_back(FrontEvent::Info(format!("worker host {} offers {workers} workers", peer.name)));
            self.hosts.insert(peer.clone(), host);
            // The first one measures the round trip.
            self.send(&peer, Body::Ping { time: now.as_nanos() });
        }
        let Some(host) = self.hosts.get_mut(&peer) else { return };
        (host.heard, host.leaving) = (now, host.leaving || leaving);
        self.open();
    }

    fn data(&mut self, host: &Peer, id: SessionId, (number, taken, bytes): (u32, u64, &[u8])) {
        let Some(slot) = self.slot(host, id) else { return self.not_known(host, id) };
        let links =
            self.sessions.values().filter(|session| session.host == *host).map(|session| &session.link);
        let memory = check_memory(links, bytes);
        let Some(session) = self.sessions.get_mut(&slot) else { return };
        let received = memory.and_then(|()| session.link.receive(number, taken, bytes));
        if let Err(error) = received {
            self.fail(slot, error);
        }
    }

    /// The peer of this slot broke the protocol.
    pub fn fail(&mut self, slot: u32, error: LinkError) {
        self.stats.broken += 1;
        let Some(session) = self.remove(slot) else { return };
        self.send(&session.host, Body::Close { id: session.id, kill: true });
        // Nothing after the damage counts.
        self.ended(slot, None, format!("host {}: {error}", session.host.name));
    }

    /// A message for a session that does not exist: the host may have missed its end.
    fn not_known(&mut self, host: &Peer, id: SessionId) {
        self.stats.unknown += 1;
        self.send(host, Body::Close { id, kill: true });
    }

    /// The time has passed: pings, and the end of hosts that are silent.
    pub fn tick(&mut self, now: Time) {
        self.now = now;
        let silent = |host: &RemoteHost| now.since(host.heard) > SILENCE;
        let lost: Vec<Peer> =
            self.hosts.iter().filter(|(_, host)| silent(host)).map(|(peer, _)| peer.clone()).collect();
        for peer in lost {
            let left = self.hosts.get(&peer).is_some_and(|host| host.leaving);
            let why = match left {
                true => format!("host {} has ended", peer.name),
                false => format!("host {} was not heard for {} ms", peer.name, SILENCE.as_millis()),
            };
            self.forget(&peer, &why);
        }
        if self.pinged.is_none_or(|pinged| now.since(pinged) >= HEARTBEAT) {
            self.pinged = Some(now);
            let peers: Vec<Peer> = self.hosts.keys().cloned().collect();
            for peer in peers {
                self.send(&peer, Body::Ping { time: now.as_nanos() });
            }
            // An opening may have been lost.
            let late: Vec<(Peer, SessionId)> = self
                .sessions
                .values()
                .filter(|session| !session.ready && now.since(session.opened) >= HEARTBEAT)
                .map(|session| (session.host.clone(), session.id))
                .collect();
            for (peer, id) in late {
                self.send(&peer, Body::Open { id });
            }
            self.open();
        }
    }

    /// When [`tick`](Self::tick) is due.
    pub fn due(&self) -> Time {
        let silent = self.hosts.values().map(|host| host.heard + SILENCE + Duration::from_millis(1)).min();
        let ping = self.pinged.map_or(self.now, |pinged| pinged + HEARTBEAT);
        silent.map_or(ping, |silent| silent.min(ping))
    }

    /// The connection to the server has ended: all hosts are gone.
    pub fn disconnected(&mut self, why: &str) {
        self.out.clear();
        let peers: Vec<Peer> = self.hosts.keys().cloned().collect();
        for peer in peers {
            self.forget(&peer, why);
        }
        self.out.clear();
    }

    fn forget(&mut self, peer: &Peer, why: &str) {
        let Some(host) = self.hosts.remove(peer) else { return };
        self.events.push_back(FrontEvent::Info(format!("{why}: its workers are given up")));
        for slot in host.workers.into_iter().flatten() {
            if let Some(session) = self.sessions.remove(&slot) {
                self.stats.silent += 1;
                self.ended(slot, Some(session.link), why.to_owned());
            }
        }
    }

    /// Opens sessions for the slots that wait, at the nearest hosts.
    fn open(&mut self) {
        while let Some(&slot) = self.waiting.front() {
            let near = self
                .hosts
                .iter()
                .filter(|(_, host)| !host.leaving && host.round_trip.is_some())
                .filter_map(|(peer, host)| {
                    let free = host.workers.iter().position(Option::is_none)?;
                    Some((host.round_trip, free, peer.clone()))
                })
                .min();
            let Some((_, worker, peer)) = near else { return };
            self.waiting.pop_front();
            self.sessions_made = self.sessions_made.wrapping_add(1);
            let id = SessionId { worker: worker as u16, session: self.sessions_made };
            if let Some(host) = self.hosts.get_mut(&peer) {
                host.workers[worker] = Some(slot);
            }
            self.send(&peer, Body::Open { id });
            let session = Session { host: peer, id, ready: false, opened: self.now, link: Link::default() };
            self.sessions.insert(slot, session);
        }
    }

    fn slot(&self, host: &Peer, id: SessionId) -> Option<u32> {
        let slot = (*self.hosts.get(host)?.workers.get(usize::from(id.worker))?)?;
        self.sessions.get(&slot).is_some_and(|session| session.id == id).then_some(slot)
    }

    fn remove(&mut self, slot: u32) -> Option<Session> {
        let session = self.sessions.remove(&slot)?;
        if let Some(host) = self.hosts.get_mut(&session.host) {
            host.workers[usize::from(session.id.worker)] = None;
        }
        Some(session)
    }

    fn ended(&mut self, slot: u32, link: Option<Link>, why: String) {
        self.events.push_back(FrontEvent::Ended { slot, why, link: Box::new(link.unwrap_or_default()) });
    }

    fn send(&mut self, host: &Peer, body: Body) {
        let bytes = Message { from: self.instance, to: host.instance, body }.to_bytes();
        let subject = format!("host.{}.{}", host.name, self.name);
        self.out.push(Outgoing { subject, bytes });
    }

    /// The link of a slot with a session.
    pub fn link(&mut self, slot: u32) -> Option<&mut Link> {
        self.sessions.get_mut(&slot).filter(|session| session.ready).map(|session| &mut session.link)
    }

    /// Returns true if the host of this slot takes no further messages.
    pub fn is_leaving(&self, slot: u32) -> bool {
        let host = self.sessions.get(&slot).and_then(|session| self.hosts.get(&session.host));
        host.is_some_and(|host| host.leaving)
    }

    /// The round trip of a slot's host.
    pub fn round_trip(&self, slot: u32) -> Option<Duration> {
        self.hosts.get(&self.sessions.get(&slot)?.host)?.round_trip
    }

    /// The hosts, nearest first.
    pub fn hosts(&self) -> Vec<HostView> {
        let view = |(peer, host): (&Peer, &RemoteHost)| HostView {
            name: peer.name.clone(),
            workers: host.workers.len(),
            slots: host.workers.iter().flatten().copied().collect(),
            credit: host.credit,
            leaving: host.leaving,
            round_trip: host.round_trip,
        };
        let mut hosts: Vec<_> = self.hosts.iter().map(view).collect();
        hosts.sort_by(|one, two| (one.round_trip, &one.name).cmp(&(two.round_trip, &two.name)));
        hosts
    }

    /// Moves the messages for the bus to `out`: what is ready of each session in pieces, while there is `room` for another one.
    pub fn take_outgoing(&mut self, out: &mut Vec<Outgoing>, mut room: usize) {
        out.append(&mut self.out);
        self.rounds = self.rounds.wrapping_add(usize::from(room > 0));
        let first = self.rounds % self.sessions.len().max(1);
        let mut pieces = |session: &mut Session| {
            while session.ready && room > 0 {
                let Some((number, taken, bytes)) = session.link.next() else { return };
                let body = Body::Data { id: session.id, number, taken, bytes };
                let bytes = Message { from: self.instance, to: session.host.instance, body }.to_bytes();
                room = room.saturating_sub(bytes.len());
                let subject = format!("host.{}.{}", session.host.name, self.name);
                out.push(Outgoing { subject, bytes });
            }
        };
        self.sessions.values_mut().skip(first).for_each(&mut pieces);
        self.sessions.values_mut().take(first).for_each(pieces);
    }

    /// What the caller does next.
    pub fn poll_event(&mut self) -> Option<FrontEvent> {
        self.events.pop_front()
    }
}
