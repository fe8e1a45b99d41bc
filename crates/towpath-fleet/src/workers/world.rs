//! A front, hosts and a bus that loses, repeats and cuts: no message is answered twice or wrong, all are answered in the end, and memory is
//! bounded.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use bytes::Bytes;
use proptest::prelude::*;
use towpath_wire::Time;

use super::*;

const SLOTS: u32 = 3;
const SETTINGS: HostSettings = HostSettings { workers: 2, credit: 4, fronts: 2 };

#[derive(Clone, Debug)]
enum Step {
    /// Time passes.
    Wait(u16),
    /// A message arrives at the multiplexor.
    Ask(u16),
    /// The next message of the bus is lost.
    Lose,
    /// It comes twice.
    Repeat,
    /// Bytes in it are changed.
    Damage(u16),
    /// The process of a host is killed, and starts again.
    Kill(usize),
    /// The program of a session ends.
    Exit,
    /// The server restarts.
    Restart,
    /// Each side has so many bytes of room in the client of the bus.
    Room(usize),
    /// Any bytes on the subject of the front, and of a host.
    Noise(Vec<u8>),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        10 => (0..300u16).prop_map(Step::Wait),
        20 => any::<u16>().prop_map(Step::Ask),
        1 => Just(Step::Lose),
        1 => Just(Step::Repeat),
        1 => any::<u16>().prop_map(Step::Damage),
        1 => (0..2usize).prop_map(Step::Kill),
        1 => Just(Step::Exit),
        1 => Just(Step::Restart),
        1 => prop_oneof![Just(0), Just(1), 1..100_000usize].prop_map(Step::Room),
        1 => prop::collection::vec(any::<u8>(), 0..60).prop_map(Step::Noise),
    ];
    prop::collection::vec(step, 0..150)
}

/// The ring of a slot with a session.
#[derive(Default)]
struct Ring {
    attached: bool,
    next: u32,
    /// Messages that the worker has, by sequence number.
    out: BTreeMap<u32, u64>,
    answered: BTreeSet<u32>,
}

struct World {
    now: Time,
    front: Front,
    hosts: Vec<Host>,
    /// Sessions whose programs have attached.
    programs: Vec<BTreeSet<u64>>,
    rings: BTreeMap<u32, Ring>,
    bus: VecDeque<Outgoing>,
    room: usize,
    /// Messages that no worker has.
    queue: VecDeque<(u64, u16)>,
    lengths: BTreeMap<u64, u16>,
    answered: BTreeSet<u64>,
    asked: u64,
    instances: u64,
}

impl World {
    fn new() -> Self {
        let mut front = Front::new("f", 7);
        (0..SLOTS).for_each(|slot| front.want(slot));
        let host = |number: u64| Host::new(&format!("h{number}"), number + 1, SETTINGS);
        Self {
            now: Time::from_secs(1),
            front,
            hosts: vec![host(0), host(1)],
            programs: vec![BTreeSet::new(); 2],
            rings: (0..SLOTS).map(|slot| (slot, Ring::default())).collect(),
            bus: VecDeque::new(),
            room: usize::MAX,
            queue: VecDeque::new(),
            lengths: BTreeMap::new(),
            answered: BTreeSet::new(),
            asked: 0,
            instances: 100,
        }
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Wait(millis) => self.now = self.now + Duration::from_millis(millis.into()),
            Step::Ask(len) => {
                self.asked += 1;
                self.lengths.insert(self.asked, len);
                self.queue.push_back((self.asked, len));
            }
            Step::Lose => drop(self.bus.pop_front()),
            Step::Repeat => self.bus.extend(self.bus.front().cloned()),
            Step::Damage(at) => {
                if let Some(message) = self.bus.front_mut() {
                    let mut bytes = message.bytes.to_vec();
                    // Headers only: the payload of a damaged record is not checked, TCP and TLS do that.
                    let at = usize::from(at) % bytes.len().min(32);
                    bytes[at] ^= 0x55;
                    message.bytes = bytes.into();
                }
            }
            Step::Kill(at) => {
                self.instances += 1;
                self.hosts[at] = Host::new(&format!("h{at}"), self.instances, SETTINGS);
                self.programs[at].clear();
            }
            Step::Exit => {
                for (host, programs) in self.hosts.iter_mut().zip(&mut self.programs) {
                    if let Some(session) = programs.pop_first() {
                        host.gone(session, "killed");
                    }
                }
            }
            Step::Restart => {
                self.bus.clear();
                self.front.disconnected("restart");
                self.hosts.iter_mut().for_each(|host| host.disconnected("restart"));
            }
            Step::Room(room) => self.room = room,
            Step::Noise(bytes) => {
                let bytes = Bytes::from(bytes);
                self.front.message("front.f.h0", &bytes, self.now);
                self.hosts[0].message("host.h0.f", &bytes, self.now);
            }
        }
        self.turn();
    }

    /// The sides do all that they can, without time.
    fn turn(&mut self) {
        for _ in 0..30 {
            self.front.tick(self.now);
            self.hosts.iter_mut().for_each(|host| host.tick(self.now));
            self.serve_front();
            (0..self.hosts.len()).for_each(|at| self.serve_host(at));
            let mut out = Vec::new();
            self.front.take_outgoing(&mut out, self.room);
            self.hosts.iter_mut().for_each(|host| host.take_outgoing(&mut out, self.room));
            self.bus.extend(out);
            // Some of the messages stay on their way.
            for _ in 0..self.bus.len().div_ceil(2) {
                let Some(Outgoing { subject, bytes }) = self.bus.pop_front() else { break };
                let at = if subject.contains("h0") { 0 } else { 1 };
                match (subject.starts_with("host."), self.hosts.get_mut(at)) {
                    (true, Some(host)) => host.message(&subject, &bytes, self.now),
                    (true, None) => {}
                    (false, _) => self.front.message(&subject, &bytes, self.now),
                }
            }
        }
        let memory = |link: Option<&mut Link>| link.map_or(0, |link| link.bytes());
        (0..SLOTS).for_each(|slot| assert!(memory(self.front.link(slot)) <= 3 << 20));
    }

    fn serve_front(&mut self) {
        for (slot, ring) in &mut self.rings {
            let Some(link) = self.front.link(*slot).filter(|_| ring.attached) else { continue };
            if let Err(error) = take(ring, link, &mut self.answered, &self.lengths) {
                self.front.fail(*slot, error);
                continue;
            }
            let link = self.front.link(*slot).unwrap();
            while ring.out.len() < usize::from(SETTINGS.credit)
                && link.has_room()
                && let Some((number, len)) = self.queue.pop_front()
            {
                let payload = vec![number as u8; len.into()];
                link.push(&Record { seq: ring.next, time: number, ..Record::default() }, &payload);
                ring.out.insert(ring.next, number);
                ring.next += 1;
            }
        }
        while let Some(event) = self.front.poll_event() {
            match event {
                FrontEvent::Attach { slot, credit, .. } => {
                    assert_eq!(credit, SETTINGS.credit);
                    let ring = self.rings.get_mut(&slot).unwrap();
                    assert!(!ring.attached, "one session for a slot");
                    *ring = Ring { attached: true, ..Ring::default() };
                }
                FrontEvent::Ended { slot, mut link, .. } => {
                    let ring = self.rings.get_mut(&slot).unwrap();
                    let _ = take(ring, &mut link, &mut self.answered, &self.lengths);
                    // What has no answer goes to other workers.
                    let left = std::mem::take(ring).out.into_values();
                    let again = left.filter(|number| !self.answered.contains(number));
                    let lengths = &self.lengths;
                    self.queue.extend(again.map(|number| (number, lengths[&number])));
                    self.front.want(slot);
                }
                FrontEvent::Warning(_) | FrontEvent::Info(_) => {}
            }
        }
    }

    fn serve_host(&mut self, at: usize) {
        let (host, programs) = (&mut self.hosts[at], &mut self.programs[at]);
        for session in programs.clone() {
            let Some(link) = host.link(session) else { continue };
            let mut failed = None;
            while link.has_room() {
                let (record, payload) = match link.peek() {
                    Ok(Some(found)) => found,
                    Ok(None) => break,
                    Err(error) => {
                        failed = Some(error);
                        break;
                    }
                };
                let payload = payload.to_vec();
                link.pop();
                // Answers to the message in the frame `seq`; then it is done.
                link.push(
                    &Record { kind: 9, port: record.seq, time: record.time, ..Record::default() },
                    &payload,
                );
                link.push(&Record { what: What::Release, seq: record.seq, ..Record::default() }, &[]);
            }
            if let Some(error) = failed {
                host.fail(session, error);
            }
        }
        while let Some(event) = host.poll_event() {
            match event {
                HostEvent::Start { session, .. } => {
                    assert!(programs.len() < usize::from(SETTINGS.workers) * SETTINGS.fronts);
                    programs.insert(session);
                    host.ready(session, false, false);
                }
                HostEvent::Stop { session, .. } => drop(programs.remove(&session)),
                HostEvent::Warning(_) | HostEvent::Info(_) => {}
            }
        }
    }
}

/// The ring takes what the worker has sent.
fn take(
    ring: &mut Ring,
    link: &mut Link,
    answered: &mut BTreeSet<u64>,
    lengths: &BTreeMap<u64, u16>,
) -> Result<(), LinkError> {
    while let Some((record, payload)) = link.peek()? {
        match record.what {
            What::Release => drop(ring.out.remove(&record.seq).ok_or(LinkError::Record)?),
            What::Frame => {
                // As the pool does: an answer to a message that the worker does not hold is a violation.
                let number = *ring.out.get(&record.port).ok_or(LinkError::Record)?;
                assert!(ring.answered.insert(record.port), "one answer in a session");
                assert_eq!(
                    payload,
                    vec![number as u8; lengths[&number].into()],
                    "the answer of another message"
                );
                assert!(answered.insert(number), "message {number} was answered twice");
            }
        }
        link.pop();
    }
    Ok(())
}

fn run(steps: Vec<Step>) {
    let mut world = World::new();
    steps.into_iter().for_each(|step| world.step(step));
    // In peace, all is answered.
    world.room = usize::MAX;
    for _ in 0..100 {
        world.step(Step::Wait(100));
    }
    assert!(
        world.queue.is_empty() && world.answered.len() as u64 == world.asked,
        "{} of {}",
        world.answered.len(),
        world.asked
    );
    for slot in 0..SLOTS {
        assert!(world.front.link(slot).is_some(), "slot {slot} has a worker");
    }
}

proptest! {
    #[test]
    fn every_message_is_answered_once(steps in steps()) {
        run(steps);
    }
}

#[test]
fn messages_of_a_silent_host_return_within_a_second() {
    let mut world = World::new();
    (0..10).for_each(|_| world.step(Step::Wait(100)));
    assert_eq!(world.front.hosts().len(), 2);
    // Both hosts stop: nothing that they send arrives any more.
    world.hosts.clear();
    world.programs.clear();
    world.bus.clear();
    (0..SLOTS).for_each(|slot| assert!(world.front.link(slot).is_some()));
    let stopped = world.now;
    while world.front.link(0).is_some() {
        // As the caller does.
        world.now = world.front.due().max(world.now + Duration::from_millis(1));
        world.turn();
        world.bus.clear();
    }
    assert!(world.now.since(stopped) < Duration::from_secs(1), "{:?}", world.now.since(stopped));
    assert!(world.front.hosts().is_empty());
    assert_eq!(world.front.stats.silent, u64::from(SLOTS));
}

#[test]
fn the_nearest_host_comes_first() {
    let mut front = Front::new("f", 7);
    let at = |millis: u64| Time::from_secs(1) + Duration::from_millis(millis);
    front.tick(at(0));
    let offer = |instance| message::Message {
        from: instance,
        to: 0,
        body: message::Body::Offer { workers: 2, credit: 1, leaving: false },
    };
    front.message("offer.far", &offer(1).to_bytes(), at(0));
    front.message("offer.near", &offer(2).to_bytes(), at(0));
    for (name, instance, trip) in [("near", 2, 1), ("far", 1, 9)] {
        let pong =
            message::Message { from: instance, to: 7, body: message::Body::Pong { time: at(0).as_nanos() } };
        front.message(&format!("front.f.{name}"), &pong.to_bytes(), at(trip));
    }
    let mut out = Vec::new();
    front.take_outgoing(&mut out, usize::MAX);
    out.clear();
    (0..3).for_each(|slot| front.want(slot));
    front.take_outgoing(&mut out, usize::MAX);
    let subjects: Vec<_> = out.iter().map(|out| &*out.subject).collect();
    assert_eq!(subjects, ["host.near.f", "host.near.f", "host.far.f"]);
    let names: Vec<_> = front.hosts().into_iter().map(|host| host.name).collect();
    assert_eq!(names, ["near", "far"]);
}

#[test]
fn strangers_are_refused_and_counted() {
    let mut world = World::new();
    (0..10).for_each(|_| world.step(Step::Wait(100)));
    let before = world.front.stats;
    let now = world.now;
    let id = message::SessionId { worker: 9, session: 1 };
    let say = |from, to, body| message::Message { from, to, body }.to_bytes();
    let data = message::Body::Data { id, number: 0, taken: 0, bytes: Bytes::new() };
    let offer = |workers, credit| message::Body::Offer { workers, credit, leaving: false };
    // Rows: message, the counter that grows.
    type Counter = fn(&WorkerStats) -> u64;
    let malformed: Counter = |stats| stats.malformed;
    let unknown: Counter = |stats| stats.unknown;
    let rows: Vec<(&str, Bytes, Counter)> = vec![
        ("front.f.h0", Bytes::from_static(b"hello"), malformed),
        ("front.f.nobody", say(5, 7, data.clone()), unknown),
        ("front.f.h0", say(1, 7, data.clone()), unknown),
        ("front.f.h0", say(1, 7, message::Body::Gone { id, text: "x".into() }), unknown),
        ("front.f.h0", say(1, 7, message::Body::Open { id }), malformed),
        ("offer.h9", say(9, 0, offer(0, 1)), malformed),
        ("offer.h9", say(9, 0, offer(65, 1)), malformed),
        ("offer.h9", say(9, 0, offer(1, 257)), malformed),
        ("front.f.h0", say(1, 0, data), unknown),
    ];
    // Names that are none do not reach logs and subjects.
    for name in ["", "h\u{1b}[2J", "ä", "*", &"x".repeat(65)] {
        let before = (world.front.stats.malformed, world.hosts[0].stats.malformed);
        world.front.message(&format!("offer.{name}"), &say(9, 0, offer(1, 1)), now);
        world.hosts[0].message(&format!("host.h0.{name}"), &say(9, 1, message::Body::Ping { time: 0 }), now);
        let after = (world.front.stats.malformed, world.hosts[0].stats.malformed);
        assert_eq!(after, (before.0 + 1, before.1 + 1), "{name:?}");
    }
    for (subject, bytes, counter) in rows {
        let before = counter(&world.front.stats);
        world.front.message(subject, &bytes, now);
        assert_eq!(counter(&world.front.stats), before + 1, "{subject}");
    }
    // Hosts beyond the bound.
    for number in 0..2 * MAX_PEERS as u64 {
        world.front.message(&format!("offer.x{number}"), &say(1000 + number, 0, offer(1, 1)), now);
    }
    assert_eq!(world.front.hosts().len(), MAX_PEERS);
    assert_eq!(world.front.stats.too_many - before.too_many, 2 * MAX_PEERS as u64 - (MAX_PEERS as u64 - 2));
    // Processes of one name, at both sides.
    let mut front = Front::new("f", 7);
    (0..10u64).for_each(|instance| front.message("offer.h", &say(100 + instance, 0, offer(1, 1)), now));
    assert_eq!((front.hosts().len(), front.stats.too_many), (INSTANCES, 8));
    let mut host = Host::new("h", 1, HostSettings { fronts: 8, ..SETTINGS });
    (0..10u64).for_each(|instance| {
        host.message("host.h.f", &say(100 + instance, 1, message::Body::Ping { time: 0 }), now);
    });
    assert_eq!(host.stats.too_many, 8);
    // Another version is reported once.
    let mut other = say(1, 7, message::Body::Ping { time: 0 }).to_vec();
    other[4] = 200;
    (0..3).for_each(|_| world.front.message("offer.h0", &other.clone().into(), now));
    assert_eq!(world.front.stats.version, 3);
    let warnings = std::iter::from_fn(|| world.front.poll_event())
        .filter(|event| matches!(event, FrontEvent::Warning(text) if text.contains("version 200")));
    assert_eq!(warnings.count(), 1);
    assert!((0..SLOTS).all(|slot| world.front.link(slot).is_some()), "sessions go on");
}

#[test]
fn a_host_that_leaves_gets_no_new_session_and_keeps_its_sessions() {
    let mut world = World::new();
    (0..10).for_each(|_| world.step(Step::Wait(100)));
    world.hosts[0].leave();
    world.step(Step::Wait(1));
    let leaving = (0..SLOTS).filter(|slot| world.front.is_leaving(*slot)).count();
    assert!(leaving > 0 && world.hosts[0].sessions() == leaving);
    for slot in 0..SLOTS {
        if world.front.is_leaving(slot) {
            world.front.close(slot, false);
            *world.rings.get_mut(&slot).unwrap() = Ring::default();
            world.front.want(slot);
        }
    }
    (0..5).for_each(|_| world.step(Step::Wait(100)));
    assert_eq!(world.hosts[0].sessions(), 0);
    assert_eq!(
        (0..SLOTS).filter(|slot| world.front.link(*slot).is_some()).count(),
        2,
        "the workers of the other host"
    );
}

#[test]
fn an_answer_longer_than_the_window_arrives_after_its_program_has_exited() {
    let mut world = World::new();
    (0..10).for_each(|_| world.step(Step::Wait(100)));
    // The answer, and the exit at once: all but a window of it is with the host.
    let at = usize::from(world.programs[0].is_empty());
    let session = world.programs[at].pop_first().unwrap();
    let payload = vec![5; 5 << 20];
    world.hosts[at].link(session).unwrap().push(&Record { kind: 9, ..Record::default() }, &payload);
    world.hosts[at].gone(session, "exit");
    let sessions = world.hosts[at].sessions();
    let (mut received, mut ended) = (0, None);
    for _ in 0..1000 {
        let mut out = Vec::new();
        world.hosts[at].take_outgoing(&mut out, usize::MAX);
        out.into_iter().for_each(|out| world.front.message(&out.subject, &out.bytes, world.now));
        for slot in 0..SLOTS {
            let Some(link) = world.front.link(slot) else { continue };
            if let Ok(Some((_, payload))) = link.peek() {
                received = payload.len();
                link.pop();
            }
        }
        while let Some(event) = world.front.poll_event() {
            if let FrontEvent::Ended { why, mut link, .. } = event {
                received = link.peek().unwrap().map_or(received, |(_, payload)| payload.len());
                link.pop();
                ended = Some(why);
            }
        }
        let mut out = Vec::new();
        world.front.take_outgoing(&mut out, usize::MAX);
        out.retain(|out| out.subject.contains(&format!("h{at}")));
        out.into_iter().for_each(|out| world.hosts[at].message(&out.subject, &out.bytes, world.now));
    }
    assert_eq!((received, ended), (payload.len(), Some(format!("host h{at}: exit"))));
    assert_eq!(world.hosts[at].sessions(), sessions - 1);
}

#[test]
fn without_room_the_pieces_of_sessions_wait_and_with_little_they_take_turns() {
    let mut world = World::new();
    (0..10).for_each(|_| world.step(Step::Wait(100)));
    let payload = vec![5; 2 * message::CHUNK];
    let at = usize::from(world.programs[0].len() < 2);
    for session in world.programs[at].clone() {
        world.hosts[at].link(session).unwrap().push(&Record::default(), &payload);
    }
    (0..SLOTS).for_each(|slot| world.front.link(slot).unwrap().push(&Record::default(), &payload));
    let mut sessions = BTreeSet::new();
    let mut take = |room| {
        let (mut out, mut other) = (Vec::new(), Vec::new());
        world.front.take_outgoing(&mut out, room);
        world.hosts[at].take_outgoing(&mut other, room);
        [out, other].map(|out| {
            let bodies = out.iter().map(|out| message::Message::parse(&out.bytes).unwrap().body);
            let pieces = bodies.filter_map(|body| match body {
                message::Body::Data { id, bytes, .. } if !bytes.is_empty() => Some(id),
                _ => None,
            });
            let pieces: Vec<_> = pieces.collect();
            sessions.extend(out.iter().zip(&pieces).map(|(out, id)| (out.subject.clone(), id.worker)));
            pieces.len()
        })
    };
    assert_eq!(take(0), [0, 0]);
    // One piece each time, of another session.
    for _ in 0..SLOTS {
        assert_eq!(take(1), [1, 1]);
    }
    assert_eq!(sessions.len(), 5, "{sessions:?}");
}

#[test]
fn a_host_whose_answers_wait_still_hears_acknowledgements() {
    let mut world = World::new();
    (0..10).for_each(|_| world.step(Step::Wait(100)));
    let at = usize::from(world.programs[0].len() < 2);
    let sessions = world.programs[at].clone();
    let payload = vec![5; RECORD];
    for session in &sessions {
        world.hosts[at].link(*session).unwrap().push(&Record::default(), &payload);
        world.hosts[at].link(*session).unwrap().push(&Record::default(), &payload);
    }
    assert_eq!(world.hosts[at].sessions(), 2, "a host has more bytes than a peer may send");
    let mut data = |bytes: &'static [u8]| {
        let body = message::Body::Data {
            id: world.hosts[at].session_id(*sessions.first().unwrap()),
            number: 0,
            taken: 0,
            bytes: Bytes::from_static(bytes),
        };
        let bytes = message::Message { from: 7, to: at as u64 + 1, body }.to_bytes();
        world.hosts[at].message(&format!("host.h{at}.f"), &bytes, world.now);
        let mut events = std::iter::from_fn(|| world.hosts[at].poll_event());
        (events.any(|event| matches!(event, HostEvent::Stop { .. })), world.hosts[at].stats.broken)
    };
    assert_eq!(data(b""), (false, 0));
    assert_eq!(data(b"x"), (true, 1));
}
