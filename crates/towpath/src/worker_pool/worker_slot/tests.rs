//! Tests of the slot with processes that the tests play.

use towpath_mux::assembler::Limits;
use towpath_mux::io::Server;
use towpath_mux::mux::{Config, Message, Order};
use towpath_ring::{Options, Worker};

use super::super::violation::Violation;
use super::*;
use crate::process::{Local, Place, Program, Starter};

/// A slot whose process is played by the test: attaches, detaches, and does not exit.
struct Scene {
    driver: Driver,
    completions: Completions,
    slot: WorkerSlot,
    directory: tempfile::TempDir,
    starts: usize,
}

impl Scene {
    fn new() -> Self {
        let server = Server::new("line".parse().unwrap(), Config::new(Order::None)).unwrap();
        let directory = tempfile::tempdir().unwrap();
        let slot = WorkerSlot::new(0, directory.path(), Rights::default());
        Self {
            driver: server.driver().unwrap(),
            completions: Completions::default(),
            slot,
            directory,
            starts: 0,
        }
    }

    fn look(&mut self, now: Instant) {
        self.slot.ready = true;
        self.slot.look(&mut self.driver, &mut self.completions, now, 0);
    }

    /// Starts a process and attaches in its place.
    fn attached(&mut self, now: Instant) -> (u32, Worker) {
        let path = self.directory.path().join(format!("worker-0-{}.sock", self.starts));
        self.starts += 1;
        let worker = attach(&mut self.slot, path, &mut self.driver, now);
        (self.slot.process.as_ref().unwrap().pid(), worker)
    }

    /// Starts a process, attaches and detaches. Returns the process id.
    fn detached(&mut self, now: Instant) -> u32 {
        let (pid, worker) = self.attached(now);
        drop(worker);
        while self.slot.is_attached() {
            self.look(now);
        }
        pid
    }

    fn until_gone(&mut self, left: usize, now: Instant) {
        while self.slot.gone.len() > left {
            self.look(now);
            std::thread::yield_now();
        }
    }
}

/// Trains the core: messages take a microsecond.
pub(in super::super) fn learn(mux: &mut Mux, mut now: Time) {
    let mut batch = Vec::new();
    let worker = mux.clone_worker(64, now);
    ask(mux, 1000, now);
    while mux.poll_messages(worker, now, &mut batch) > 0 {
        for message in batch.drain(..) {
            now = now + Duration::from_micros(1);
            mux.done(worker, message.ticket(), now);
        }
    }
    mux.leave(worker, None, now);
}

/// A connection sends lines of one letter.
pub(in super::super) fn ask(mux: &mut Mux, lines: usize, now: Time) {
    let psock = mux.attach("line".parse().unwrap(), Limits::default(), now).unwrap();
    mux.handle_bytes(psock, "x\n".repeat(lines).as_bytes(), now);
}

/// A process that does nothing.
pub(in super::super) fn sleeps() -> Command {
    Command {
        program: Program::new(&["sleep".to_owned(), "1000".to_owned()]),
        place: Place::Mux(String::new()),
        starter: Starter::Local(Local::plain()),
        waits: false,
    }
}

/// Starts an idle process; the test attaches in its place.
pub(in super::super) fn attach(
    slot: &mut WorkerSlot,
    path: PathBuf,
    driver: &mut Driver,
    now: Instant,
) -> Worker {
    slot.start(&sleeps(), driver, now);
    let options = Options { events: true, ..Options::default() };
    let attach = std::thread::spawn(move || Worker::attach(path, &options).unwrap());
    while !slot.is_attached() {
        slot.ready = true;
        slot.look(driver, &mut Completions::default(), now, 0);
    }
    attach.join().unwrap()
}

fn is_alive(pid: u32) -> bool {
    // proc_pid_stat(5): the state follows the name.
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(") ").next().is_some_and(|rest| !rest.is_empty() && !rest.starts_with('Z'))
}

#[test]
fn a_detached_process_is_not_waited_for() {
    let mut scene = Scene::new();
    let now = Instant::now();
    let pid = scene.detached(now);
    assert!(is_alive(pid), "a detached process has time to exit");
    assert!(scene.slot.is_due(now), "the next process may start");
    assert!(scene.slot.due(None, now).is_some(), "the slot is supervised again");
    scene.until_gone(0, now + Duration::from_secs(3600));
    assert!(!is_alive(pid), "killed after its time");
}

#[test]
fn the_number_of_detached_processes_is_bounded() {
    let mut scene = Scene::new();
    let now = Instant::now();
    let pids: Vec<u32> = (0..GONE + 2).map(|_| scene.detached(now)).collect();
    scene.until_gone(GONE, now);
    let alive: Vec<bool> = pids.into_iter().map(is_alive).collect();
    assert_eq!(alive, [vec![false; 2], vec![true; GONE]].concat(), "the oldest are killed");
}

#[test]
fn a_replaced_worker_past_its_deadline_is_charged_one_death() {
    let mut scene = Scene::new();
    let now = Instant::now();
    let (pid, worker) = scene.attached(now);
    scene.driver.change(|mux, now| {
        learn(mux, now);
        ask(mux, 3, now);
    });
    let Scene { driver, completions, slot, .. } = &mut scene;
    let process = slot.process.as_mut().unwrap();
    assert!(driver.change(|mux, now| process.fill(mux, now, 3)));
    process.hand_over(completions, &Connections::default(), 0, 0);
    assert_eq!(process.working(), 3);
    process.leave(driver, Duration::from_nanos(10), 0);
    process.collect(completions, 9, None, false);
    assert!(is_alive(pid), "it has time");
    process.collect(completions, 10, None, false);
    while is_alive(pid) {
        std::thread::yield_now();
    }
    drop(worker);
    while scene.slot.is_attached() {
        scene.look(now);
    }
    let mut again = Vec::new();
    scene.driver.change(|mux, now| {
        let other = mux.clone_worker(3, now);
        while mux.poll_messages(other, now, &mut again) > 0 {}
    });
    let deaths: Vec<_> = again.iter().map(Message::deaths).collect();
    assert_eq!(deaths, [1, 0, 0]);
}

#[test]
fn a_slot_is_barred_after_violations_and_after_too_many_ends() {
    let mut slot = WorkerSlot::new(0, Path::new("/"), Rights::default());
    slot.attached_once = true;
    let (start, mut violations) = (Instant::now(), Violations::default());
    let mut wait = |slot: &mut WorkerSlot, violation: Option<Violation>, at: Duration| {
        let pid = 1;
        let exit = match violation {
            Some(why) => WorkerExit::Violation { pid, why },
            None => WorkerExit::Gone { pid, why: String::new() },
        };
        slot.failed(exit, true, &mut violations, start + at);
        slot.again.take().unwrap() - (start + at)
    };
    let seconds = Duration::from_secs;
    // Violations in a row, each after a completed message, a minute apart.
    let row: Vec<_> = (0..8).map(|at| wait(&mut slot, Some(Violation::Again), seconds(60 * at))).collect();
    assert_eq!(row, [1, 2, 4, 8, 16, 32, 60, 60].map(seconds));
    // 120 s without a violation end the row.
    assert_eq!(wait(&mut slot, Some(Violation::Ring), seconds(7 * 60 + 120)), seconds(1));
    // Processes that complete messages and end at once.
    let later = seconds(3600);
    let ends: Vec<_> =
        (0..BUDGET + 3).map(|at| wait(&mut slot, None, later + Duration::from_millis(at.into()))).collect();
    assert_eq!(ends[..BUDGET as usize], vec![Duration::ZERO; BUDGET as usize]);
    assert_eq!(ends[BUDGET as usize..], [100, 200, 400].map(Duration::from_millis));
    assert_eq!(wait(&mut slot, None, later + LIVED), Duration::ZERO, "a new period");
    assert_eq!((violations.again, violations.ring, violations.barred), (8, 1, 12));
}

#[test]
fn a_slot_restarts_after_process_and_replacement_fail() {
    let mut scene = Scene::new();
    let now = Instant::now();
    let (_, worker) = scene.attached(now);
    let sleep = sleeps();
    scene.slot.replace(&sleep, &scene.driver, Duration::ZERO, now);
    drop(worker);
    while scene.slot.is_attached() {
        scene.look(now);
    }
    assert!(scene.slot.is_replacing() && !scene.slot.is_due(now + AGAIN_MOST), "the replacement may attach");
    // The replacement does not attach.
    let late = now + Duration::from_secs(3600);
    scene.look(late);
    assert!(!scene.slot.is_replacing() && scene.slot.was_kept());
    assert!(scene.slot.is_due(late + AGAIN_MOST), "a restart is scheduled");
}

#[test]
fn an_unattached_process_is_killed_when_its_replacement_attaches() {
    let mut scene = Scene::new();
    let now = Instant::now();
    scene.detached(now);
    let sleep = sleeps();
    scene.slot.start(&sleep, &scene.driver, now);
    let late = scene.slot.process.as_ref().unwrap().pid();
    scene.slot.replace(&sleep, &scene.driver, Duration::ZERO, now);
    let path = scene.directory.path().join("worker-0-2.sock");
    let attach = std::thread::spawn(move || Worker::attach(path, &Options::default()).unwrap());
    while !scene.slot.is_attached() {
        scene.look(now);
    }
    assert!(!scene.slot.is_replacing(), "the replacement of the next slot may begin");
    // The detached process has time to exit; the old one has not.
    scene.until_gone(1, now);
    assert!(!is_alive(late));
    assert_eq!(scene.driver.change(|mux, _| mux.show().workers.len()), 1, "the core has one worker");
    drop(attach.join().unwrap());
}

#[test]
fn the_timeout_of_a_message_starts_after_the_one_before() {
    let mut scene = Scene::new();
    let start = Instant::now();
    let (_, mut worker) = scene.attached(start);
    let Scene { driver, completions, slot, .. } = &mut scene;
    driver.change(|mux, now| {
        learn(mux, now);
        // Of two connections, so that each message has its own frame.
        ask(mux, 1, now);
        ask(mux, 1, now);
        assert!(slot.fill(mux, now, 2));
    });
    slot.hand_over(completions, &Connections::default(), 0, 0);
    let (second, timeout) = (Duration::from_secs(1), Some(Duration::from_secs(5)));
    assert_eq!(slot.due(timeout, start), Some(start + 5 * second));
    let message = worker.recv().unwrap().unwrap();
    worker.done(message);
    assert!(slot.collect(completions, 4_000_000_000, timeout));
    assert_eq!(slot.due(timeout, start), Some(start + 9 * second), "both were delivered at once");
}
