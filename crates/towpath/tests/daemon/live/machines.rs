//! Two machines with the engine between them, and transfers between them.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::ops::Deref;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use towpath_port::netns::{Host, bound, ip, settled, veth};

pub(crate) use crate::bridged::BRIDGE;
use crate::support::{Control, Log, until};

/// Bytes of one transfer.
pub(crate) const BYTES: usize = 4 << 20;

pub(crate) const LEFT: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 1);
pub(crate) const RIGHT: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 2);

/// The right host has a fixed Ethernet address, so that it stays valid when its interface is created again.
pub(crate) const RIGHT_MAC: &str = "link set r0 address 02:00:00:00:00:02";

/// Allows ARP and all connections that a host on the left opens.
pub(crate) const RULES: &str = "\
add 100 allow layer2 mac-type arp
add 200 check-state
add 300 inspect 1 tcp from any to any 9000
add 310 inspect 1 tcp from any 9000 to any
add 400 allow ip from any to any recv wan keep-state
";

/// Two machines, and this namespace between them with the interfaces `wan` and `lan`.
pub(crate) fn machines() -> (Host, Host) {
    let (left, right) = (Host::new(), Host::new());
    veth("wan", "l0");
    veth("lan", "r0");
    ip(RIGHT_MAC);
    left.take("l0", &format!("{LEFT}/24"));
    right.take("r0", &format!("{RIGHT}/24"));
    ["wan", "lan"].into_iter().for_each(settled);
    (left, right)
}

/// An engine in this thread's namespace.
pub(crate) struct Engine {
    pub(crate) control: Control,
    pub(crate) child: Child,
    /// The log of this engine and of those that replace it.
    pub(crate) log: Log,
}

impl Deref for Engine {
    type Target = Control;

    fn deref(&self) -> &Control {
        &self.control
    }
}

impl Engine {
    pub(crate) fn start(directory: &Path) -> Self {
        Self::try_start(directory).unwrap_or_else(|said| panic!("{said}"))
    }

    /// Starts the engine. On an error, returns its output.
    pub(crate) fn try_start(directory: &Path) -> Result<Self, String> {
        Self::try_start_by(directory, &mut Command::new(env!("CARGO_BIN_EXE_towpath")))
    }

    /// The same with the environment of this command.
    pub(crate) fn try_start_by(directory: &Path, command: &mut Command) -> Result<Self, String> {
        let mut child = command
            .args(["run", directory.join("t.toml").to_str().unwrap()])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let log = Log::of(&mut child);
        let mut engine = Self { control: Control::of(directory), child, log };
        let mut ended = false;
        until(|| {
            ended = engine.child.try_wait().unwrap().is_some();
            ended || engine.ctl("show stats").status.success()
        });
        if ended {
            return Err(engine.log.whole());
        }
        Ok(engine)
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Stops the engine as systemd does. Returns its output.
    pub(crate) fn stop(mut self) -> String {
        self.signal(Signal::TERM);
        let mut stdout = self.child.stdout.take().unwrap();
        let report = std::thread::spawn(move || std::io::copy(&mut stdout, &mut std::io::sink()));
        let said = self.log.whole();
        report.join().unwrap().unwrap();
        assert!(self.child.wait().unwrap().success(), "{said}");
        said
    }
}

impl Drop for Engine {
    /// A test that fails leaves no engine behind.
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A directory with a configuration and rules.
pub(crate) fn files(config: &str, rules: &str) -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("t.toml"), config).unwrap();
    std::fs::write(directory.path().join("r.ipfw"), rules).unwrap();
    directory
}

/// Bytes that depend on their position.
pub(crate) fn bytes(seed: u8) -> Vec<u8> {
    (0..BYTES).map(|at| (at as u32).wrapping_mul(2_654_435_761).to_be_bytes()[1] ^ seed).collect()
}

/// The bytes that one side received from the other.
pub(crate) type Got = mpsc::Receiver<Vec<u8>>;

/// Both machines send to each other over one connection. Returns the received bytes of both.
pub(crate) fn transfer(left: &Host, right: &Host, port: u16) -> (Got, Got) {
    let (ready, listens) = mpsc::channel();
    let server = right.start(move || {
        let listener = bound(|| TcpListener::bind((RIGHT, port)));
        ready.send(()).unwrap();
        both_ways(listener.accept().unwrap().0, 2)
    });
    listens.recv().unwrap();
    let client = left.start(move || both_ways(TcpStream::connect((RIGHT, port)).unwrap(), 1));
    (client, server)
}

/// The same with iperf3(1), in one direction and then in the other. `amount` are its options for that.
pub(crate) fn iperf3(left: &Host, right: &Host, port: u16, amount: &'static str) {
    for way in [None, Some("--reverse")] {
        let (ready, listens) = mpsc::channel();
        let server = right.start(move || {
            let words = format!("--server --one-off --forceflush --bind {RIGHT} --port {port}");
            let mut server =
                Command::new("iperf3").args(words.split(' ')).stdout(Stdio::piped()).spawn().unwrap();
            let lines = BufReader::new(server.stdout.take().unwrap()).lines().map_while(Result::ok);
            let mut ready = Some(ready);
            for line in lines {
                if line.contains("listening")
                    && let Some(ready) = ready.take()
                {
                    ready.send(()).unwrap();
                }
            }
            assert!(server.wait().unwrap().success());
        });
        listens.recv().unwrap();
        let said = left.run(move || {
            let words = format!("--client {RIGHT} --port {port} {amount} --json");
            Command::new("iperf3").args(words.split(' ')).args(way).output().unwrap().stdout
        });
        let said: serde_json::Value = serde_json::from_slice(&said).unwrap();
        // Bytes in flight when the sender ends are not counted.
        let received = said["end"]["sum_received"]["bytes"].as_u64();
        assert!(received >= Some(4 << 20), "{way:?}: {said}");
        server.recv().unwrap();
    }
}

pub(crate) fn both_ways(mut stream: TcpStream, seed: u8) -> Vec<u8> {
    let mut other = stream.try_clone().unwrap();
    let sender = std::thread::spawn(move || {
        other.write_all(&bytes(seed)).unwrap();
        other.shutdown(std::net::Shutdown::Write).unwrap();
    });
    let mut got = Vec::new();
    stream.read_to_end(&mut got).unwrap();
    sender.join().unwrap();
    got
}

/// Statistics of an interface in the calling thread's namespace, from /proc/net/dev: frames and bytes, received and sent.
pub(crate) fn statistics(interface: &str) -> [[u64; 2]; 2] {
    let text = std::fs::read_to_string("/proc/thread-self/net/dev").unwrap();
    let line = text.lines().find_map(|line| line.trim().strip_prefix(interface)?.strip_prefix(':'));
    let columns: Vec<u64> = line.unwrap().split_whitespace().map(|column| column.parse().unwrap()).collect();
    // Columns: bytes and packets of one direction, eight columns later those of the other.
    [[columns[1], columns[0]], [columns[9], columns[8]]]
}

/// A connection that stays open: the right machine returns the pieces that the left one sends.
pub(crate) struct Echo {
    stop: Arc<AtomicBool>,
    /// Number of returned pieces.
    pieces: Arc<AtomicU64>,
    client: mpsc::Receiver<()>,
    server: mpsc::Receiver<()>,
}

impl Echo {
    pub(crate) fn start(left: &Host, right: &Host, port: u16) -> Self {
        let (ready, listens) = mpsc::channel();
        let server = right.start(move || {
            let listener = bound(|| TcpListener::bind((RIGHT, port)));
            ready.send(()).unwrap();
            let mut stream = listener.accept().unwrap().0;
            let mut back = stream.try_clone().unwrap();
            std::io::copy(&mut stream, &mut back).unwrap();
        });
        listens.recv().unwrap();
        let (stop, pieces) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (over, count) = (Arc::clone(&stop), Arc::clone(&pieces));
        let client = left.start(move || {
            let mut stream = TcpStream::connect((RIGHT, port)).unwrap();
            let all = bytes(0);
            let mut back = vec![0; 16 << 10];
            while !over.load(Ordering::Relaxed) {
                let at = count.fetch_add(1, Ordering::Relaxed) as usize % 200 * back.len();
                let piece = &all[at..at + back.len()];
                stream.write_all(piece).unwrap();
                stream.read_exact(&mut back).unwrap();
                assert!(back == piece, "other bytes came back");
            }
        });
        Self { stop, pieces, client, server }
    }

    /// Waits until more pieces have returned. TCP's retransmission timeout grows, so this may take a while.
    pub(crate) fn goes_on(&self) {
        let before = self.pieces.load(Ordering::Relaxed);
        let begun = Instant::now();
        while self.pieces.load(Ordering::Relaxed) < before + 3 {
            assert!(begun.elapsed() < Duration::from_secs(120), "nothing comes back any more");
            // Yield the processor to those that move the pieces.
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    pub(crate) fn end(self) {
        self.stop.store(true, Ordering::Relaxed);
        self.client.recv().unwrap();
        self.server.recv().unwrap();
    }
}

impl Drop for Echo {
    /// After a failed assertion, the machines end.
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

pub(crate) fn arrived((client, server): (Got, Got)) {
    assert!(client.recv().unwrap() == bytes(2), "the left machine got other bytes");
    assert!(server.recv().unwrap() == bytes(1), "the right machine got other bytes");
}
