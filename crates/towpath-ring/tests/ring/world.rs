//! An engine here and its client in another process: this test binary, started again to run one `#[ignore]`d test.
#![allow(dead_code)] // each test binary uses its part

use std::cell::Cell;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;
use towpath_ring::{Channel, Config, Consumer, Decision, Endpoint, Kind, Meta, Options, Seq, Verdict};

/// Upper bound of each wait. No test waits until it has passed.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

pub(crate) struct World {
    pub(crate) endpoint: Endpoint,
    dir: TempDir,
    /// Lanes of channels that the test does not use. Dropping one ends the channel.
    idle: Vec<Channel>,
}

thread_local! {
    /// Number of lanes of this test's channels, and the lane that the test uses.
    static LANES: Cell<(u32, usize)> = const { Cell::new((1, 0)) };
}

/// Runs a test with channels of one lane, and with the second of two.
pub(crate) fn each(test: impl Fn()) {
    for lanes in [(1, 0), (2, 1)] {
        LANES.set(lanes);
        test();
    }
}

/// Number of lanes of this test's channels.
pub(crate) fn lanes() -> u32 {
    LANES.get().0
}

/// The same with the first of two lanes, which carries the client's own messages.
pub(crate) fn each_first(test: impl Fn()) {
    for lanes in [(1, 0), (2, 0)] {
        LANES.set(lanes);
        test();
    }
}

impl World {
    pub(crate) fn new(config: Config) -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let lanes = config.lanes.max(LANES.get().0);
        let config = Config { lanes, ..config };
        let endpoint = Endpoint::bind(dir.path().join("ring"), config).expect("an endpoint");
        Self { endpoint, dir, idle: Vec::new() }
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.dir.path().join("ring")
    }

    /// Starts the ignored test `name` of this binary as a client process.
    pub(crate) fn spawn(&self, name: &str) -> Process {
        self.spawn_with(name, "")
    }

    /// The same, with STEP in its environment.
    pub(crate) fn spawn_with(&self, name: &str, step: &str) -> Process {
        let child = Command::new(std::env::current_exe().expect("our own path"))
            .args(["--exact", name, "--ignored", "--nocapture", "--test-threads=1"])
            .env("TOWPATH_SOCKET", self.socket())
            .env("STEP", step)
            .stdout(Stdio::null())
            .spawn()
            .expect("a client process");
        Process(child)
    }

    /// Attaches a client of this process.
    pub(crate) fn attach(&mut self, options: Options) -> (Channel, Consumer) {
        let path = self.socket();
        let client = std::thread::spawn(move || Consumer::attach_with(path, &options).expect("attached"));
        let channel = self.accept();
        (channel, client.join().expect("attached"))
    }

    /// The lane of the next channel that the test uses.
    pub(crate) fn accept(&mut self) -> Channel {
        let mut lanes = self.accept_all().split();
        let lane = lanes.swap_remove(LANES.get().1);
        self.idle.extend(lanes);
        lane
    }

    pub(crate) fn accept_all(&mut self) -> Channel {
        let end = Instant::now() + PATIENCE;
        loop {
            if let Some(channel) = self.endpoint.accept().expect("accept") {
                return channel;
            }
            assert!(Instant::now() < end, "no client attached");
            self.endpoint.wait(Some(Duration::from_millis(100))).expect("wait");
        }
    }
}

/// An engine's and a client's end in this process.
pub(crate) fn pair(config: Config) -> (World, Channel, Consumer) {
    pair_with(config, Options::default())
}

pub(crate) fn pair_with(config: Config, options: Options) -> (World, Channel, Consumer) {
    let mut world = World::new(config);
    let (channel, client) = world.attach(options);
    (world, channel, client)
}

/// A client process, which ends with the test.
pub(crate) struct Process(Child);

impl Process {
    /// Kills the process with SIGKILL and waits for its exit.
    pub(crate) fn kill(&mut self) {
        self.0.kill().expect("kill");
        self.0.wait().expect("wait");
    }

    pub(crate) fn succeeds(mut self) {
        let status = self.0.wait().expect("wait");
        assert!(status.success(), "the client failed: {status}");
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Sends with back-pressure. Decisions that arrive meanwhile are passed to `f`.
pub(crate) fn send(channel: &mut Channel, bytes: &[u8], mut f: impl FnMut(Seq, Decision<'_>)) -> Option<Seq> {
    let end = Instant::now() + PATIENCE;
    loop {
        match channel.send(bytes, &Meta { kind: Kind::PACKET, ..Meta::default() }) {
            Ok(seq) => return Some(seq),
            Err(towpath_ring::ReserveError::Disconnected) => return None,
            Err(_) => {}
        }
        assert!(Instant::now() < end, "the client gives nothing back: {:?}", channel.stats());
        // A verdict that the poll found may have freed the needed room: wait only if it found none.
        if channel.poll_verdicts(0, &mut f) == 0 {
            channel.wait(Some(PATIENCE)).expect("wait");
        }
    }
}

/// Polls until everything is decided or the client is dead.
pub(crate) fn settle(channel: &mut Channel, mut f: impl FnMut(Seq, Decision<'_>)) {
    let end = Instant::now() + PATIENCE;
    loop {
        channel.poll_verdicts(0, &mut f);
        if channel.held() == 0 || channel.is_dead() {
            channel.poll_verdicts(0, &mut f);
            return;
        }
        assert!(Instant::now() < end, "the client decides nothing: {:?}", channel.stats());
        channel.wait(Some(PATIENCE)).expect("wait");
    }
}

/// published = decided + defaulted + drained + out.
pub(crate) fn assert_conserved(channel: &Channel) {
    let s = channel.stats();
    assert_eq!(s.published, s.decided + s.overdue + s.invalid + s.drained + s.out, "{s:?}");
}

pub(crate) fn consumer() -> Consumer {
    Consumer::attach_env().expect("attached")
}

/// The bytes of message `n`. Each byte differs from the same byte of the neighbouring messages.
pub(crate) fn message(n: u32, len: usize) -> Vec<u8> {
    (0..len).map(|i| (n as usize).wrapping_mul(31).wrapping_add(i.wrapping_mul(7) + i / 251) as u8).collect()
}

/// The verdict without the payload of a replacement.
pub(crate) fn bare(verdict: Verdict<'_>) -> Verdict<'static> {
    match verdict {
        Verdict::Replace(_) => Verdict::Replace(&[]),
        Verdict::Pass => Verdict::Pass,
        Verdict::Drop => Verdict::Drop,
        Verdict::Reject => Verdict::Reject,
        Verdict::Queue(number) => Verdict::Queue(number),
        Verdict::Repeat => Verdict::Repeat,
        Verdict::Hold => Verdict::Hold,
    }
}

/// The payload of a replacement.
pub(crate) fn replaced(verdict: Verdict<'_>) -> Option<Vec<u8>> {
    if let Verdict::Replace(bytes) = verdict { Some(bytes.to_vec()) } else { None }
}

/// Frames that fill the RX payload several times, each replaced by its own bytes.
pub(crate) fn replace_frames(channel: &mut Channel, client: &mut Consumer) {
    for n in 0..300 {
        let bytes = message(n, 20_000);
        channel.send(&bytes, &Meta::default()).expect("room");
        let frame = client.try_recv().expect("received").expect("a frame");
        assert!(client.payload(&frame) == bytes);
        client.replace(frame, &bytes).expect("replaced");
        channel.poll_verdicts(0, |_, d| assert!(d.verdict == Verdict::Replace(&bytes)));
    }
    assert_conserved(channel);
}
