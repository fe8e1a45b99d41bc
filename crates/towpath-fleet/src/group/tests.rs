//! Groups on a model of the bus: messages arrive when a test lets them.

use super::*;

/// A gate that refuses rules with a word.
#[derive(Default)]
struct Rules {
    refuses: &'static str,
    /// Refuses the word when it applies a version, but not when it checks one.
    late: &'static str,
    applied: Vec<u64>,
}

impl Local for Rules {
    fn check(&mut self, content: &Content) -> Result<(), String> {
        match content.rules.text.find(self.refuses).filter(|_| !self.refuses.is_empty()) {
            Some(at) => Err(format!("{}:1:{}: no port of this name", content.rules.name, at + 1)),
            None => Ok(()),
        }
    }

    fn apply(&mut self, version: u64, content: &Content) -> Result<(), String> {
        self.check(content)?;
        if !self.late.is_empty() && content.rules.text.contains(self.late) {
            return Err("another configuration".to_owned());
        }
        self.applied.push(version);
        Ok(())
    }
}

/// Gates on one bus with one bucket.
struct World {
    gates: Vec<(Group, Rules, bool)>,
    bucket: Option<(u64, Vec<u8>)>,
    now: Time,
    /// The gate whose answers are lost.
    mute: Option<usize>,
}

const MOST: usize = 1 << 20;

fn content(text: &str) -> Content {
    Content { config: Part::default(), rules: Part { name: "edge.ipfw".to_owned(), text: text.to_owned() } }
}

impl World {
    fn new(gates: usize) -> Self {
        let mut world = Self { gates: Vec::new(), bucket: None, now: Time::from_secs(1), mute: None };
        (0..gates).for_each(|_| world.join(None));
        world.run(40);
        world
    }

    fn join(&mut self, applied: Option<(u64, Vec<u8>)>) {
        let at = self.gates.len();
        let group = Group::new(&name(at), 1000 * (at as u64 + 1), applied);
        self.gates.push((group, Rules::default(), false));
        self.connect(at);
    }

    fn connect(&mut self, at: usize) {
        let (group, rules, there) = &mut self.gates[at];
        *there = true;
        group.connect(MOST, self.now);
        match &self.bucket {
            Some((version, bytes)) => group.current(*version, bytes, rules, self.now),
            None => group.absent(),
        }
    }

    fn disconnect(&mut self, at: usize) {
        self.gates[at].0.disconnect();
        self.gates[at].2 = false;
    }

    /// Steps of 100 ms.
    fn run(&mut self, steps: usize) {
        for _ in 0..steps {
            self.now = self.now + Duration::from_millis(100);
            for from in 0..self.gates.len() {
                while let Some(output) = self.gates[from].0.poll(self.now) {
                    self.deliver(from, output);
                }
            }
        }
    }

    fn deliver(&mut self, from: usize, output: GroupOutput) {
        let now = self.now;
        match output {
            GroupOutput::Publish(_) if self.mute == Some(from) => {}
            GroupOutput::Publish(bytes) => {
                for (group, rules, _) in self.gates.iter_mut().filter(|(_, _, there)| *there) {
                    group.message(&name(from), &bytes, rules, now);
                }
            }
            GroupOutput::Follow { .. } | GroupOutput::Entries(_) => unreachable!("the caller's"),
            GroupOutput::Write { base, content } => {
                let has = self.bucket.as_ref().map_or(0, |(version, _)| *version);
                if has != base {
                    return self.gates[from].0.written(Err(WriteError::Changed), now);
                }
                self.bucket = Some((base + 1, content.clone()));
                self.gates[from].0.written(Ok(base + 1), now);
                for (group, rules, _) in self.gates.iter_mut().filter(|(_, _, there)| *there) {
                    group.current(base + 1, &content, rules, now);
                }
            }
        }
    }

    fn propose(&mut self, at: usize, text: &str) -> Result<(), String> {
        let (group, rules, _) = &mut self.gates[at];
        group.propose(&content(text), rules, self.now)
    }

    fn apply(&mut self, at: usize, text: &str) -> Outcome {
        self.propose(at, text)?;
        self.run(150);
        self.gates[at].0.take_outcome().expect("an outcome within 15 s")
    }

    fn versions(&self) -> Vec<u64> {
        self.gates.iter().map(|(group, ..)| group.version()).collect()
    }
}

fn name(at: usize) -> String {
    char::from(b'a' + at as u8).to_string()
}

#[test]
fn a_version_is_applied_at_all_gates_and_at_those_that_join() {
    let mut world = World::new(3);
    let (version, gates) = world.apply(1, "add allow ip from any to any").unwrap();
    assert_eq!((version, world.versions()), (1, vec![1, 1, 1]));
    let shown: Vec<_> = gates.iter().map(|gate| (&*gate.gate, gate.version, gate.in_touch)).collect();
    assert_eq!(shown, [("b", 1, true), ("a", 1, true), ("c", 1, true)]);
    world.join(None);
    world.run(20);
    assert_eq!(world.versions(), [1, 1, 1, 1]);
    // One that has this version from a file does not apply it again; one with an old version does.
    let held = world.bucket.clone();
    world.join(held);
    world.join(Some((7, content("old").encode().unwrap())));
    assert_eq!((world.gates[4].1.applied.len(), &world.gates[5].1.applied[..]), (0, &[1][..]));
    assert_eq!(world.apply(5, "add deny ip from any to any").unwrap().0, 2);
    assert_eq!(world.versions(), [2; 6]);
}

#[test]
fn a_gate_that_refuses_keeps_all_gates_as_they_are() {
    let mut world = World::new(3);
    world.apply(0, "first").unwrap();
    world.gates[2].1.refuses = "wan9";
    let error = world.apply(0, "add allow ip from any to any via wan9").unwrap_err();
    assert_eq!(error, "gate c: edge.ipfw:1:34: no port of this name\nnothing was applied");
    assert_eq!((world.versions(), world.bucket.as_ref().unwrap().0), (vec![1, 1, 1], 1));
    assert_eq!(world.gates[2].0.stats(world.now).checks_refused, 1);
    // Its own gate refuses at once.
    world.gates[0].1.refuses = "wan9";
    assert_eq!(world.propose(0, "wan9").unwrap_err(), "gate a: edge.ipfw:1:1: no port of this name");
    assert!(world.apply(0, "second").is_ok());
}

#[test]
fn a_gate_that_does_not_answer_is_named_and_one_that_is_away_is_not_waited_for() {
    let mut world = World::new(3);
    world.propose(0, "first").unwrap();
    world.mute = Some(1);
    // It is waited for, although it is not heard any more.
    world.run(90);
    assert!(world.gates[0].0.take_outcome().is_none());
    world.run(20);
    let error = world.gates[0].0.take_outcome().unwrap().unwrap_err();
    assert!(error.starts_with("gate b did not answer within 10 s"), "{error}");
    assert_eq!((world.versions(), &world.bucket), (vec![0, 0, 0], &None));
    world.mute = None;
    world.disconnect(2);
    world.run(40);
    let (_, gates) = world.apply(0, "second").unwrap();
    assert_eq!(world.versions(), [1, 1, 0]);
    let away = &gates[2];
    assert_eq!((&*away.gate, away.version, away.in_touch), ("c", 0, false));
    world.connect(2);
    assert_eq!(world.versions(), [1, 1, 1]);
}

#[test]
fn of_two_versions_at_the_same_time_one_is_applied() {
    let mut world = World::new(2);
    world.propose(0, "one").unwrap();
    world.propose(1, "two").unwrap();
    assert!(world.propose(1, "three").unwrap_err().contains("another version"));
    world.run(20);
    let outcomes = [0, 1].map(|at| world.gates[at].0.take_outcome().unwrap());
    let [Ok((1, _)), Err(error)] = outcomes else { panic!("{outcomes:?}") };
    assert!(error.contains("another version was applied at the same time"), "{error}");
    assert_eq!(world.versions(), [1, 1]);
}

#[test]
fn a_gate_that_cannot_apply_keeps_its_version_and_says_so() {
    let mut world = World::new(2);
    world.apply(0, "one").unwrap();
    world.gates[1].1.late = "two";
    let (version, gates) = world.apply(0, "two").unwrap();
    assert_eq!((version, world.versions()), (2, vec![2, 1]));
    assert_eq!(gates[1].failed, Some((2, "another configuration".to_owned())));
    let stats = world.gates[1].0.stats(world.now);
    assert_eq!((stats.version, stats.failed, stats.not_applied, stats.gates), (1, 2, 1, 2));
    world.apply(0, "three").unwrap();
    assert_eq!((world.versions(), world.gates[1].0.stats(world.now).failed), (vec![3, 3], 0));
}

#[test]
fn without_a_session_or_a_bucket_nothing_is_applied() {
    let mut world = World::new(2);
    world.gates[0].0.no_bucket("no JetStream");
    assert_eq!(world.propose(0, "one").unwrap_err(), "no JetStream");
    world.gates[0].0.absent();
    world.propose(0, "one").unwrap();
    world.disconnect(0);
    let error = world.gates[0].0.take_outcome().unwrap().unwrap_err();
    assert!(error.ends_with("nothing was applied"), "{error}");
    assert!(world.propose(0, "one").unwrap_err().starts_with("no connection"));
    let long = "x".repeat(CONTENT_MAX);
    world.connect(0);
    assert!(world.propose(0, &long).unwrap_err().contains("ctl fleet table NAME load"));
    world.gates[0].0.connect(1 << 15, world.now);
    world.gates[0].0.absent();
    assert!(world.propose(0, &long[..1 << 15]).unwrap_err().contains("max_payload"));
}

#[test]
fn a_gate_that_has_just_joined_waits_until_it_knows_the_others() {
    let mut world = World::new(1);
    world.join(None);
    world.gates[0].1.refuses = "wan9";
    // No gate has been heard yet.
    world.propose(1, "wan9").unwrap();
    world.run(1);
    assert!(world.gates[1].0.is_applying());
    world.run(40);
    let error = world.gates[1].0.take_outcome().unwrap().unwrap_err();
    assert!(error.starts_with("gate a: edge.ipfw"), "{error}");
}

#[test]
fn hostile_messages_are_bounded_and_counted() {
    let mut world = World::new(1);
    let now = world.now;
    let (group, rules, _) = &mut world.gates[0];
    for number in 0..1000_u64 {
        let status = Message::Status { version: number, failed: 0, reason: String::new() };
        group.message(&format!("x{number}"), &status.encode(number), rules, now);
    }
    assert_eq!(
        (group.gates(now).len(), group.stats.messages_peers),
        (1 + MAX_PEERS, 1000 - MAX_PEERS as u64)
    );
    group.message("x1", b"TWGM", rules, now);
    group.message("x1", &[], rules, now);
    for name in ["", "x\u{1b}[2J", &"x".repeat(65)] {
        group.message(name, &Message::Answer { apply: 1, refused: None }.encode(1), rules, now);
    }
    assert_eq!(group.stats.messages_malformed, 5);
    let bytes = content("one").encode().unwrap();
    for apply in 0..10 {
        group.message("x1", &Message::Prepare { apply, content: &bytes }.encode(1), rules, now);
    }
    let checks = u64::from(CHECKS);
    assert_eq!((group.stats.checks, group.stats.checks_refused), (checks, 10 - checks));
    // Answers that the bus does not take are bounded.
    for apply in 0..1000 {
        group.message("x1", &Message::Prepare { apply, content: &bytes }.encode(1), rules, now);
    }
    assert_eq!((group.outputs.len(), group.stats.not_sent), (OUTPUTS, 1010 - OUTPUTS as u64));
    // A damaged version is refused, and the gate keeps what it has.
    group.current(9, b"towpath-group 1\nconfig", rules, now);
    assert_eq!((group.version(), group.failed.as_ref().map(|(version, _)| *version)), (0, Some(9)));
    // Another process with the name of this gate.
    group.message("a", &Message::Answer { apply: 1, refused: None }.encode(7), rules, now);
    assert_eq!(group.stats.messages_own_name, 1);
    // An answer to no question.
    group.message("x1", &Message::Answer { apply: 77, refused: None }.encode(1), rules, now);
    assert!(!group.is_applying());
}
