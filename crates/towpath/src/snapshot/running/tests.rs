//! The running snapshot, step by step: what a process would restore that was killed after each step.

use std::fs;

use towpath_gate::rules::Ruleset;
use towpath_gate::state;
use towpath_gate::{Dir, Gate, Ports, Restored, Step, Walk, Walker};
use towpath_wire::{LinkType, Time, parse};

use super::super::read;
use super::*;

const NOW: Time = Time::from_secs(1_000);
const RULES: &str = "add allow ip from any to any keep-state";
const EVERY: Duration = Duration::from_secs(5);

fn ruleset(text: &str) -> Ruleset {
    Ruleset::parse("t", text).ruleset.unwrap()
}

fn manager(rules: &str) -> (Arc<RulesetManager>, Walker) {
    let settings = state::Settings { dyn_max: 1 << 20, ..state::Settings::default() };
    let mut gate = Gate::new(ruleset(rules), Ports::new(), settings, 1);
    let walker = gate.walker().unwrap();
    let manager = Arc::new(RulesetManager::new(gate, ruleset(rules), false));
    manager.clock().set(NOW);
    (manager, walker)
}

/// A datagram of host `n`, whose state the rule makes.
fn datagram(walker: &mut Walker, n: u16) {
    let [a, b] = n.to_be_bytes();
    let frame =
        [0x45, 0, 0, 28, 0, 0, 0, 0, 64, 17, 0, 0, 10, 0, a, b, 192, 0, 2, 1, 4, 0, 0, 53, 0, 8, 0, 0];
    let packet = parse(LinkType::RAW, &frame, 28).unwrap();
    assert_eq!(walker.walk(&mut Walk::new(Dir::In, None, None), &packet, NOW), Step::Pass);
}

/// Removes the states of these hosts.
fn remove(manager: &RulesetManager, hosts: impl Fn(u16) -> bool) {
    let wanted = |state: &state::Listed, _, _: &str| hosts(host(state));
    let mut next = Some(Cursor::default());
    while let Some(at) = next {
        next = manager.remove_states(at, wanted).1;
    }
}

fn host(state: &state::Listed) -> u16 {
    match state.flow.ends.addresses().0 {
        std::net::IpAddr::V4(host) => u16::from_be_bytes([host.octets()[2], host.octets()[3]]),
        std::net::IpAddr::V6(host) => panic!("{host}"),
    }
}

/// What an engine would restore that starts now: the hosts of the states, and the result.
fn restored(path: &Path, rules: &str) -> (Vec<u16>, Restored) {
    let (manager, _) = manager(rules);
    let restored = manager.restore(&read(path).unwrap().unwrap(), NOW).unwrap();
    let (mut hosts, mut next) = (Vec::new(), Some(Cursor::default()));
    while let Some(at) = next {
        let (states, more) = manager.states(at, usize::MAX, false);
        hosts.extend(states.iter().map(|state| host(&state.parts)));
        next = more;
    }
    hosts.sort_unstable();
    (hosts, restored)
}

struct World {
    _directory: tempfile::TempDir,
    path: PathBuf,
    manager: Arc<RulesetManager>,
    walker: Walker,
    saver: Saver,
    now: Instant,
}

impl World {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("states");
        let (manager, walker) = manager(RULES);
        let now = Instant::now();
        let saver = Saver::new(&path, EVERY, Arc::clone(&manager), now);
        Self { _directory: directory, path, manager, walker, saver, now }
    }

    /// Steps until the current base, if any, is complete.
    fn base(&mut self) {
        self.saver.step(self.now);
        while self.saver.base.is_some() {
            self.saver.step(self.now);
        }
    }

    /// The end of an interval.
    fn interval(&mut self) {
        self.now += EVERY;
        self.saver.step(self.now);
    }

    fn hosts(&self) -> Vec<u16> {
        restored(&self.path, RULES).0
    }
}

#[test]
fn the_file_follows_the_table() {
    let mut world = World::new();
    (0..3_000).for_each(|n| datagram(&mut world.walker, n));
    assert!(!world.path.exists());
    // An engine was killed while it wrote a base.
    fs::write(world.path.with_extension("running.new"), "half a base").unwrap();
    world.base();
    let (hosts, result) = restored(&world.path, RULES);
    assert_eq!(hosts, Vec::from_iter(0..3_000));
    assert!(result.killed && !result.unchecked && result.cut == 0 && result.states == 3_000, "{result:?}");
    // Changes are in the file at the end of the interval, and one that begins and ends in it is not.
    datagram(&mut world.walker, 5_000);
    remove(&world.manager, |host| host == 7);
    world.saver.step(world.now);
    assert_eq!(world.hosts().len(), 3_000);
    world.interval();
    assert_eq!(world.hosts(), Vec::from_iter((0..7).chain(8..3_000).chain([5_000])));
    world.interval();
    let before = (fs::metadata(&world.path).unwrap().len(), world.saver.stats.changes);
    datagram(&mut world.walker, 6_000);
    world.saver.step(world.now);
    remove(&world.manager, |host| host == 6_000);
    world.interval();
    assert_eq!((fs::metadata(&world.path).unwrap().len(), world.saver.stats.changes), before);
    // Two files: the old one is complete while another base is written.
    world.saver.due = true;
    let saver = &mut world.saver;
    saver.begin().unwrap();
    assert!(!saver.scan().unwrap());
    datagram(&mut world.walker, 5_001);
    remove(&world.manager, |host| host == 0);
    world.interval();
    let hosts = Vec::from_iter((1..7).chain(8..3_000).chain([5_000, 5_001]));
    assert_eq!(world.hosts(), hosts);
    world.base();
    assert_eq!((world.hosts(), world.saver.stats.bases), (hosts, 2));
    assert_eq!(fs::read_dir(world.path.parent().unwrap()).unwrap().count(), 1);
}

/// Between any two parts of a base, states begin and end. The base and its changes have those that exist at its end.
#[test]
fn a_base_is_consistent_while_states_change() {
    let mut world = World::new();
    (0..20_000).for_each(|n| datagram(&mut world.walker, n));
    world.saver.begin().unwrap();
    let (mut new, mut removed) = (20_000, 0);
    while !world.saver.scan().unwrap() {
        // States that the base has passed, and those that it has not. Others take their slots.
        let last = new + 99;
        (new..=last).for_each(|n| datagram(&mut world.walker, n));
        remove(&world.manager, |host| host == removed || host == 19_999 - removed || host == last);
        world.manager.tidy();
        removed += 1;
        new += 100;
    }
    assert!(removed > 10);
    let exists = |n: &u16| match n {
        ..20_000 => (removed..20_000 - removed).contains(n),
        _ => n % 100 != 99,
    };
    assert_eq!(world.hosts(), Vec::from_iter((0..new).filter(exists)));
}

#[test]
fn changes_of_rules_and_gaps_are_followed_by_another_base() {
    let mut world = World::new();
    datagram(&mut world.walker, 1);
    world.base();
    world.manager.command("add 50 count ip from any to any").unwrap();
    world.interval();
    world.base();
    assert_eq!(world.saver.stats.bases, 2);
    let changed = "add 50 count ip from any to any\nadd 100 allow ip from any to any keep-state";
    let (hosts, result) = restored(&world.path, changed);
    assert_eq!((hosts, result.unchecked, result.states), (vec![1], false, 1));
    // More changes than the journal has room for.
    for _ in 0..2 {
        (0..40_000).for_each(|n| datagram(&mut world.walker, n));
        remove(&world.manager, |host| host % 2 == 1);
    }
    world.interval();
    assert!(world.saver.stats.missed > 0);
    world.base();
    assert!(world.saver.stats.bases > 2);
    let (hosts, result) = restored(&world.path, changed);
    assert!(!result.gap);
    assert_eq!(hosts, Vec::from_iter((0..40_000).step_by(2)));
}

#[test]
fn a_large_file_is_replaced() {
    let mut world = World::new();
    world.base();
    for n in 0..40_000_u32 {
        datagram(&mut world.walker, n as u16);
        if n % 10_000 == 9_999 {
            world.interval();
        }
    }
    let mut largest = 0;
    for _ in 0..4 {
        for quarter in 0..4 {
            let hosts = quarter * 10_000..(quarter + 1) * 10_000;
            remove(&world.manager, |host| hosts.contains(&host));
            hosts.for_each(|n| datagram(&mut world.walker, n));
            world.interval();
            world.base();
            largest = largest.max(fs::metadata(&world.path).unwrap().len());
        }
    }
    assert_eq!(world.hosts().len(), 40_000);
    assert!(world.saver.stats.bases > 1);
    // A base of all states, as many bytes of changes, the slack, and the changes of one interval.
    let base = world.saver.log.as_ref().unwrap().base;
    assert!(largest < base * (1 + GROWTH) + SLACK + base, "{largest} {base}");
}

/// A file that cannot be written is set aside: its states become outdated. The next intervals try again.
#[test]
fn a_file_that_cannot_be_written_is_set_aside() {
    let mut world = World::new();
    datagram(&mut world.walker, 1);
    world.base();
    let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    world.saver.log.as_mut().unwrap().file = full;
    datagram(&mut world.walker, 2);
    world.interval();
    assert!(!world.path.exists() && world.path.with_extension("used").exists());
    assert_eq!(world.saver.stats.errors, 1);
    world.saver.step(world.now);
    assert!(!world.path.exists(), "within the interval");
    world.interval();
    world.base();
    assert_eq!(world.hosts(), [1, 2]);
}

/// The thread, as the daemon uses it.
#[test]
fn the_thread_saves_until_it_is_dropped() {
    let World { _directory, path, manager, mut walker, .. } = World::new();
    datagram(&mut walker, 1);
    let running = Running::start(&path, Duration::from_millis(100), &manager).unwrap();
    while !path.exists() {
        thread::yield_now();
    }
    datagram(&mut walker, 2);
    while restored(&path, RULES).0 != [1, 2] {
        thread::sleep(Duration::from_millis(5));
    }
    drop(running);
}
