//! `towpath run` between real interfaces: two machines (network namespaces) with the kernel's own TCP, and the engine between
//! them. What arrives is compared byte for byte. Without the privilege each test says so and does nothing.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream, UdpSocket};
use std::ops::Deref;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use towpath_port::netns::{Host, ip, until, veth, within};

mod support;
use support::Control;

/// Bytes of one transfer.
const BYTES: usize = 4 << 20;

const LEFT: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 1);
const RIGHT: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 2);

/// The right machine keeps its address when its interface is made anew: nobody has to ask for it again.
const RIGHT_MAC: &str = "link set r0 address 02:00:00:00:00:02";

/// ARP and whatever a machine on the left begins.
const RULES: &str = "\
add 100 allow layer2 mac-type arp
add 200 check-state
add 300 inspect 1 tcp from any to any 9000
add 310 inspect 1 tcp from any 9000 to any
add 400 allow ip from any to any recv wan keep-state
";

const BRIDGE: &str = r#"
rules = "r.ipfw"
[port.wan]
driver = "af_packet"
[port.lan]
driver = "af_packet"
[[bridge]]
ports = ["wan", "lan"]
[control]
socket = "ctl.sock"
"#;

/// Two machines, and this namespace between them with the interfaces `wan` and `lan`.
fn machines() -> (Host, Host) {
    let (left, right) = (Host::new(), Host::new());
    veth("wan", "l0");
    veth("lan", "r0");
    ip(RIGHT_MAC);
    left.take("l0", &format!("{LEFT}/24"));
    right.take("r0", &format!("{RIGHT}/24"));
    (left, right)
}

/// An engine in this thread's namespace.
struct Engine {
    control: Control,
    child: Child,
}

impl Deref for Engine {
    type Target = Control;

    fn deref(&self) -> &Control {
        &self.control
    }
}

impl Engine {
    fn start(directory: &Path) -> Self {
        Self::try_start(directory).unwrap_or_else(|said| panic!("{said}"))
    }

    /// What it said when it cannot be started.
    fn try_start(directory: &Path) -> Result<Self, String> {
        let child = Command::new(env!("CARGO_BIN_EXE_towpath"))
            .args(["run", directory.join("t.toml").to_str().unwrap()])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut engine = Self { control: Control::of(directory), child };
        let mut ended = false;
        until(|| {
            ended = engine.child.try_wait().unwrap().is_some();
            ended || engine.ctl("show stats").status.success()
        });
        if ended {
            let mut said = String::new();
            engine.child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
            return Err(said);
        }
        Ok(engine)
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Stops it as systemd would; what it said.
    fn stop(self) -> String {
        self.signal(Signal::TERM);
        let output = self.child.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{said}");
        said
    }
}

/// A directory with a configuration and rules.
fn files(config: &str, rules: &str) -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("t.toml"), config).unwrap();
    std::fs::write(directory.path().join("r.ipfw"), rules).unwrap();
    directory
}

/// Bytes that differ from place to place.
fn bytes(seed: u8) -> Vec<u8> {
    (0..BYTES).map(|at| (at as u32).wrapping_mul(2_654_435_761).to_be_bytes()[1] ^ seed).collect()
}

/// What one side got of a transfer: the other side's bytes.
type Got = mpsc::Receiver<Vec<u8>>;

/// Both machines send to each other over one connection, and say what they got.
fn transfer(left: &Host, right: &Host, port: u16) -> (Got, Got) {
    let (ready, listens) = mpsc::channel();
    let server = right.start(move || {
        let listener = TcpListener::bind((RIGHT, port)).unwrap();
        ready.send(()).unwrap();
        both_ways(listener.accept().unwrap().0, 2)
    });
    listens.recv().unwrap();
    let client = left.start(move || both_ways(TcpStream::connect((RIGHT, port)).unwrap(), 1));
    (client, server)
}

fn both_ways(mut stream: TcpStream, seed: u8) -> Vec<u8> {
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

/// A connection that stays: what the left machine sends comes back from the right one, piece by piece.
struct Echo {
    stop: Arc<AtomicBool>,
    /// Pieces that came back.
    pieces: Arc<AtomicU64>,
    client: mpsc::Receiver<()>,
    server: mpsc::Receiver<()>,
}

impl Echo {
    fn start(left: &Host, right: &Host, port: u16) -> Self {
        let (ready, listens) = mpsc::channel();
        let server = right.start(move || {
            let listener = TcpListener::bind((RIGHT, port)).unwrap();
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

    /// Waits until some more has come back. TCP sends again what was lost, ever more rarely: this may take a while.
    fn goes_on(&self) {
        let before = self.pieces.load(Ordering::Relaxed);
        let begun = Instant::now();
        while self.pieces.load(Ordering::Relaxed) < before + 3 {
            assert!(begun.elapsed() < Duration::from_secs(120), "nothing comes back any more");
            std::thread::yield_now();
        }
    }

    fn end(self) {
        self.stop.store(true, Ordering::Relaxed);
        self.client.recv().unwrap();
        self.server.recv().unwrap();
    }
}

fn arrived((client, server): (Got, Got)) {
    assert!(client.recv().unwrap() == bytes(2), "the left machine got other bytes");
    assert!(server.recv().unwrap() == bytes(1), "the right machine got other bytes");
}

#[test]
fn tcp_goes_through_the_bridge_and_its_inspectors() {
    within(|| {
        let (left, right) = machines();
        let queue = "[queue.1]\ncommand = \"towpath inspect --queue 1 --match nothing-like-this --verdict drop\"\n\
                     workers = 2\noverload = \"block\"\n";
        let files = files(&format!("{BRIDGE}{queue}"), RULES);
        let engine = Engine::start(files.path());
        arrived(transfer(&left, &right, 9001));
        arrived(transfer(&left, &right, 9000));
        let queues = engine.json("show queues --json");
        let queue = &queues["queues"][0];
        // Segments that are not cut yet: a packet stands for up to 64 KiB.
        assert!(queue["passed"].as_u64() > Some(64) && queue["lost"] == 0, "{queues}");
        let stats = engine.json("show stats --json");
        assert_eq!(stats["stats"]["undecodable"], 0, "{stats}");
        assert!(stats["stats"]["states"]["created"].as_u64() > Some(0), "{stats}");
        let ports = engine.json("show ports --json");
        assert_eq!((&ports["ports"][0]["name"], &ports["ports"][0]["state"]), (&"wan".into(), &"up".into()));
        // Nobody on the right may begin anything.
        assert!(right.run(|| {
            let refused = TcpStream::connect_timeout(&(LEFT, 9).into(), Duration::from_millis(300));
            refused.unwrap_err().kind() == std::io::ErrorKind::TimedOut
        }));
        let said = engine.stop();
        assert!(said.contains("capabilities kept: CAP_NET_RAW"), "{said}");
    });
}

/// How often rules are reloaded under traffic.
const RELOADS: usize = 1000;

#[test]
fn rules_are_reloaded_under_traffic() {
    within(|| {
        let (left, right) = machines();
        let files = files(BRIDGE, RULES);
        let mut engine = Engine::start(files.path());
        let echo = Echo::start(&left, &right, 9001);
        let mut said = BufReader::new(engine.child.stderr.take().unwrap()).lines();
        let mut says = |what: &str| said.find(|line| line.as_ref().unwrap().contains(what)).unwrap().unwrap();
        for n in 0..RELOADS {
            // Rules come, go and change around those that let the packets through, and around their states.
            let other =
                ["count ip from any to any", "deny udp from any to any", "allow icmp from any to any"];
            let rules = format!("add {} {}\n{RULES}add 1000 {}\n", 10 + n % 7, other[n % 3], other[n % 2]);
            std::fs::write(files.path().join("r.ipfw"), rules).unwrap();
            engine.signal(Signal::HUP);
            says("reloaded: ");
        }
        echo.goes_on();
        assert_eq!(engine.json("show stats --json")["stats"]["dropped"], 0);
        assert_eq!(engine.json("show rules --json")["rules"][0]["number"], 10 + (RELOADS - 1) % 7);
        echo.end();
        // What cannot be taken is refused by its name, and what runs goes on.
        std::fs::write(files.path().join("r.ipfw"), "add alow ip from any to any\n").unwrap();
        engine.signal(Signal::HUP);
        says("not reloaded: ");
        let config = BRIDGE.replace("[port.lan]", "[port.lan]\ninterface = \"other\"");
        std::fs::write(files.path().join("t.toml"), config).unwrap();
        engine.signal(Signal::HUP);
        assert!(says("not reloaded: ").ends_with("[port.lan] cannot change while it runs: restart"));
        arrived(transfer(&left, &right, 9001));
        engine.signal(Signal::TERM);
        assert!(engine.child.wait().unwrap().success());
    });
}

#[test]
fn an_engine_that_was_killed_is_started_again_under_traffic() {
    within(|| {
        let (left, right) = machines();
        let files = files(BRIDGE, "add allow ip from any to any\n");
        let mut engine = Engine::start(files.path());
        let echo = Echo::start(&left, &right, 9001);
        for _ in 0..3 {
            echo.goes_on();
            engine.child.kill().unwrap();
            engine.child.wait().unwrap();
            engine = Engine::start(files.path());
            echo.goes_on();
        }
        echo.end();
        engine.stop();
    });
}

#[test]
fn an_interface_that_went_away_is_taken_up_again() {
    within(|| {
        let (left, right) = machines();
        let files = files(BRIDGE, RULES);
        let engine = Engine::start(files.path());
        let state = |name: &str| {
            let ports = engine.json("show ports --json");
            let ports = ports["ports"].as_array().unwrap().clone();
            let port = ports.iter().find(|port| port["name"] == name).unwrap();
            port["state"].as_str().unwrap().to_owned()
        };
        ip("link set lan down");
        until(|| state("lan") == "down");
        ip("link set lan up");
        until(|| state("lan") == "up");
        arrived(transfer(&left, &right, 9001));
        ip("link del lan");
        until(|| state("lan") == "gone");
        veth("lan", "r0");
        ip(RIGHT_MAC);
        right.take("r0", &format!("{RIGHT}/24"));
        until(|| state("lan") == "up");
        arrived(transfer(&left, &right, 9001));
        engine.stop();
    });
}

/// Most inspectors at a time.
const INSPECTORS: usize = 24;

#[test]
fn inspectors_come_and_go_under_traffic() {
    within(|| {
        let (left, right) = machines();
        let queue = "[queue.1]\nsocket = \"q1.sock\"\ndefault = \"pass\"\noverload = \"pass\"\n";
        let files = files(&format!("unserved = \"pass\"\n{BRIDGE}{queue}"), RULES);
        let engine = Engine::start(files.path());
        let socket = files.path().join("q1.sock");
        let echo = Echo::start(&left, &right, 9000);
        let attached = || engine.json("show queues --json")["queues"][0]["inspectors"].as_u64();
        let mut inspectors: Vec<Child> = Vec::new();
        let (mut most, mut random) = (0, 1_u32);
        for _ in 0..20 {
            // Numerical Recipes' generator: the same every time, and in no order.
            random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let (come, at) = (random >> 29, (random >> 8) as usize);
            for _ in 0..(come as usize).min(INSPECTORS - inspectors.len()) {
                let inspector = Command::new(env!("CARGO_BIN_EXE_towpath"))
                    .args(["inspect", "--queue", "1", "--match", "nothing-like-this", "--verdict", "drop"])
                    .env("TOWPATH_SOCKET", &socket)
                    .spawn();
                inspectors.push(inspector.unwrap());
            }
            let wanted = inspectors.len() as u64;
            most = most.max(wanted);
            until(|| attached() == Some(wanted));
            echo.goes_on();
            let leave = at % (come as usize + 1).min(inspectors.len() + 1);
            for _ in 0..leave {
                let mut inspector = inspectors.swap_remove(at % inspectors.len());
                inspector.kill().unwrap();
                inspector.wait().unwrap();
            }
            let wanted = inspectors.len() as u64;
            until(|| attached() == Some(wanted));
            echo.goes_on();
        }
        assert_eq!(most, INSPECTORS as u64);
        for mut inspector in inspectors {
            inspector.kill().unwrap();
            inspector.wait().unwrap();
        }
        until(|| attached() == Some(0));
        echo.goes_on();
        assert_eq!(engine.json("show stats --json")["stats"]["dropped"], 0);
        echo.end();
        engine.stop();
    });
}

#[test]
fn several_threads_share_one_gate() {
    within(|| {
        let (left, right) = machines();
        let more = "[engine]\nthreads = 2\n[queue.1]\ncommand = \"towpath inspect --queue 1 --match nothing-like-this --verdict drop\"\n\
                    overload = \"block\"\n";
        let files = files(&format!("{BRIDGE}{more}"), RULES);
        let engine = Engine::start(files.path());
        for round in 0..4 {
            arrived(transfer(&left, &right, 9001 + round));
            arrived(transfer(&left, &right, 9000));
        }
        let stats = engine.json("show stats --json");
        assert!(stats["stats"]["states"]["created"].as_u64() >= Some(4), "{stats}");
        let queues = engine.json("show queues --json");
        assert_eq!(
            (&queues["queues"][0]["inspectors"], &queues["queues"][0]["lost"]),
            (&1.into(), &0.into()),
            "{queues}"
        );
        assert_eq!(engine.json("show rings --json")["rings"].as_array().unwrap().len(), 2);
        engine.stop();
    });
}

#[test]
fn what_becomes_of_a_flow_is_followed_and_states_are_dumped() {
    within(|| {
        let (left, right) = machines();
        let files = files(&format!("{BRIDGE}[engine]\nthreads = 2\n"), RULES);
        let engine = Engine::start(files.path());
        let follow = |more: &[&str], name: &str| {
            let capture = files.path().join(name);
            let child = Command::new(env!("CARGO_BIN_EXE_towpath"))
                .args(["ctl", "--socket", files.path().join("ctl.sock").to_str().unwrap(), "trace", "--out"])
                .arg(&capture)
                .args(more)
                .stderr(Stdio::piped())
                .spawn()
                .unwrap();
            // It is there when it may write.
            until(|| std::fs::metadata(&capture).is_ok_and(|file| file.len() > 0));
            (child, capture)
        };
        // Of several connections, which the threads share.
        let (flow, flow_capture) = follow(&["--flow", "tcp 10.0.0.2:9002", "--count", "20"], "flow");
        let (denied, denied_capture) = follow(&["--rule", "65535", "--count", "1"], "denied");
        for port in 9001..9004 {
            arrived(transfer(&left, &right, port));
        }
        assert!(
            right.run(|| TcpStream::connect_timeout(&(LEFT, 9).into(), Duration::from_millis(300)).is_err())
        );
        for child in [flow, denied] {
            let output = child.wait_with_output().unwrap();
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(output.status.success() && said.contains(" packets traced, 0 left out"), "{said}");
        }
        let text = |capture: &Path| String::from_utf8_lossy(&std::fs::read(capture).unwrap()).into_owned();
        let flow = text(&flow_capture);
        assert_eq!(flow.matches("rule 400: pass, out by ").count(), 20);
        assert_eq!(text(&denied_capture).matches("rule 65535: drop").count(), 1);
        for (capture, expected) in [(flow_capture, 20), (denied_capture, 1)] {
            use towpath_port::{Burst, Port, Received, pcap};
            let (mut reader, mut burst, mut frames) =
                (pcap::Reader::open(capture).unwrap(), Burst::new(64), 0);
            while reader.receive(&mut burst).unwrap() == Received::Frames {
                frames += burst.len();
            }
            assert_eq!(frames, expected);
        }
        let lines = |words: &str| {
            let output = engine.ctl(words);
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            String::from_utf8(output.stdout).unwrap()
        };
        let flows = |text: &str| text.lines().filter(|line| line.contains(" 10.0.0.1 ")).count();
        let dump = lines("dump states");
        assert_eq!(flows(&dump), 3, "{dump}");
        assert_eq!(flows(&lines("show states")), 3);
        let page: Value = serde_json::from_str(lines("dump states --json").lines().next().unwrap()).unwrap();
        assert_eq!(
            (page["states"].as_array().map(Vec::len), &page["next"]),
            (Some(3), &Value::Null),
            "{page}"
        );
        // Behind all of IPv4's.
        assert_eq!(lines("dump states --from 8589934592"), "");
        engine.stop();
    });
}

/// The machines' offloads are on: segments that are not cut, unfinished checksums. Every driver has to cope, and an inspector
/// that looks at everything changes nothing.
#[test]
fn every_inline_driver_has_real_tcp() {
    let rows = [
        "driver = \"af_packet\"",
        "driver = \"af_packet\"\noffload = true",
        "driver = \"af_xdp\"",
        // The device is made by the engine, and then belongs to a machine.
        "driver = \"tap\"",
        "driver = \"tap\"\noffload = true",
        "driver = \"tun\"",
        "driver = \"tun\"\noffload = true",
    ];
    let queue = "[queue.1]\ncommand = \"towpath inspect --queue 1 --match nothing-like-this --verdict drop\"\n\
                 overload = \"block\"\n";
    for driver in rows {
        within(|| {
            let config = BRIDGE.replace("driver = \"af_packet\"", driver);
            let files = files(&format!("{config}{queue}"), RULES);
            let devices = driver.contains("\"t");
            if devices && !Path::new("/dev/net/tun").exists() {
                return println!("skipped: no /dev/net/tun");
            }
            let hosts = (!devices).then(machines);
            let engine = match Engine::try_start(files.path()) {
                Ok(engine) => engine,
                Err(said) if driver.contains("xdp") && said.contains("af_packet") => {
                    return println!("skipped: {said}");
                }
                Err(said) => panic!("{driver}: {said}"),
            };
            let (left, right) = hosts.unwrap_or_else(|| {
                let (left, right) = (Host::new(), Host::new());
                left.take("wan", &format!("{LEFT}/24"));
                right.take("lan", &format!("{RIGHT}/24"));
                (left, right)
            });
            arrived(transfer(&left, &right, 9001));
            arrived(transfer(&left, &right, 9000));
            let stats = engine.json("show stats --json");
            assert_eq!(stats["stats"]["undecodable"], 0, "{driver}: {stats}");
            let queues = engine.json("show queues --json");
            let queue = &queues["queues"][0];
            assert!(queue["passed"].as_u64() > Some(64) && queue["lost"] == 0, "{driver}: {queues}");
            engine.stop();
        });
    }
}

#[test]
fn a_router_takes_a_hop_from_every_packet() {
    within(|| {
        if !Path::new("/dev/net/tun").exists() {
            return println!("skipped: no /dev/net/tun");
        }
        let config = "rules = \"r.ipfw\"\n[port.wan]\ndriver = \"tun\"\n[port.lan]\ndriver = \"tun\"\noffload = true\n\
                      [control]\nsocket = \"ctl.sock\"\n[[route]]\nto = \"10.0.0.1\"\nport = \"wan\"\n\
                      [[route]]\nto = \"10.0.0.2\"\nport = \"lan\"\n";
        let rules = "add 100 count ip from any to any in recv wan ipttl 64\nadd 200 allow ip from any to any out keep-state\n\
                     add 300 allow ip from any to any\n";
        let files = files(config, rules);
        let engine = Engine::start(files.path());
        let (left, right) = (Host::new(), Host::new());
        left.take("wan", &format!("{LEFT}/24"));
        right.take("lan", &format!("{RIGHT}/24"));
        arrived(transfer(&left, &right, 9001));
        let rules = engine.json("show rules --json");
        assert!(rules["rules"][0]["packets"].as_u64() > Some(0), "{rules}");
        assert!(rules["rules"][1]["packets"].as_u64() > Some(0), "{rules}");
        engine.stop();
    });
}

#[test]
fn the_kernels_own_queue_is_decided() {
    within(|| {
        let (left, right) = (Host::new(), Host::new());
        veth("wan", "l0");
        veth("lan", "r0");
        ip("addr add 10.0.1.254/24 dev wan");
        ip("addr add 10.0.2.254/24 dev lan");
        std::fs::write("/proc/sys/net/ipv4/ip_forward", "1").unwrap();
        left.take("l0", "10.0.1.1/24");
        right.take("r0", &format!("{RIGHT}/32"));
        left.run(|| ip("route add default via 10.0.1.254"));
        right.run(|| {
            ip("addr add 10.0.2.1/24 dev r0");
            ip("route add default via 10.0.2.254");
        });
        ip(&format!("route add {RIGHT} dev lan"));
        let queued = ["iptables-legacy", "iptables"].iter().any(|program| {
            let words = ["-A", "FORWARD", "-j", "NFQUEUE", "--queue-num", "5"];
            Command::new(program).args(words).output().is_ok_and(|output| output.status.success())
        });
        if !queued {
            return println!("skipped: no iptables with NFQUEUE");
        }
        let config = "rules = \"r.ipfw\"\n[port.kernel]\ndriver = \"nfqueue\"\nqueue = 5\n[control]\nsocket = \"ctl.sock\"\n\
                      [queue.1]\ncommand = \"towpath inspect --queue 1 --match nothing-like-this --verdict drop\"\n\
                      overload = \"block\"\n";
        let rules = "add 100 inspect 1 tcp from any to any 9000\nadd 200 deny tcp from any to any 9009\n\
                     add 210 reset tcp from any to any 9010\nadd 220 unreach port udp from any to any 9010\n\
                     add 300 allow ip from any to any\n";
        let files = files(config, rules);
        let engine = Engine::start(files.path());
        arrived(transfer(&left, &right, 9001));
        arrived(transfer(&left, &right, 9000));
        assert!(left.run(|| {
            let refused = TcpStream::connect_timeout(&(RIGHT, 9009).into(), Duration::from_millis(300));
            refused.unwrap_err().kind() == std::io::ErrorKind::TimedOut
        }));
        // What is rejected is answered past the queue, at once.
        left.run(|| {
            let error = TcpStream::connect((RIGHT, 9010)).unwrap_err();
            assert_eq!(error.kind(), std::io::ErrorKind::ConnectionRefused, "{error}");
            let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
            socket.connect((RIGHT, 9010)).unwrap();
            socket.send(b"hello").unwrap();
            socket.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
            let error = socket.recv(&mut [0; 8]).unwrap_err();
            assert_eq!(error.kind(), std::io::ErrorKind::ConnectionRefused, "{error}");
        });
        let stats = engine.json("show stats --json");
        assert!(stats["stats"]["dropped"].as_u64() > Some(0), "{stats}");
        assert_eq!(stats["stats"]["rejected"], 2, "{stats}");
        engine.stop();
    });
}

/// What a port that reads a file of the calling thread's namespace says of an interface: frames received, frames sent.
fn frames(interface: &str) -> [u64; 2] {
    let text = std::fs::read_to_string("/proc/thread-self/net/dev").unwrap();
    let line = text.lines().find_map(|line| line.trim().strip_prefix(interface)?.strip_prefix(':'));
    let columns: Vec<u64> = line.unwrap().split_whitespace().map(|column| column.parse().unwrap()).collect();
    // As its header says: bytes and packets of one direction, eight columns later those of the other.
    [columns[1], columns[9]]
}

/// Packets that come while the engine cannot look, more than its ring has room for: what the kernel delivered to the port is
/// received or counted as lost, and what was received is sent or counted, up to the other machine.
#[test]
fn a_flood_is_received_or_counted() {
    within(|| {
        let (left, right) = machines();
        let files = files(BRIDGE, "add allow ip from any to any\n");
        let engine = Engine::start(files.path());
        // Both know each other's Ethernet address afterwards.
        let there = right.run(|| UdpSocket::bind((RIGHT, 9)).unwrap());
        left.run(|| UdpSocket::bind("0.0.0.0:0").unwrap().send_to(b"hello", (RIGHT, 9)).unwrap());
        there.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        there.recv(&mut [0; 8]).unwrap();
        engine.signal(Signal::STOP);
        left.run(|| {
            let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
            for _ in 0..40_000 {
                // A sender that is too fast for its own interface is told so; that packet was never on the wire.
                let _ = socket.send_to(&[7; 1400], (RIGHT, 9));
            }
        });
        engine.signal(Signal::CONT);
        let side = |name: &str| {
            let ports = engine.json("show ports --json");
            let port =
                ports["ports"].as_array().unwrap().iter().find(|port| port["name"] == name).unwrap().clone();
            let lost = |reason: &str| {
                let lost = port["lost"].as_array().unwrap().iter().find(|lost| lost[0] == reason);
                lost.map_or(0, |lost| lost[1].as_u64().unwrap())
            };
            let [received, sent] = ["received", "sent"].map(|what| port[what].as_u64().unwrap());
            (
                received,
                sent,
                lost("rx_full"),
                lost("tx_full") + lost("tx_refused") + lost("full") + lost("refused"),
            )
        };
        until(|| {
            let [[_, left_sent], [right_got, _]] = [left.run(|| frames("l0")), right.run(|| frames("r0"))];
            let ((received, _, lost, _), (_, sent, _, refused)) = (side("wan"), side("lan"));
            let stats = engine.json("show stats --json");
            let count = |what: &str| stats["stats"][what].as_u64().unwrap();
            let decided = count("passed") + count("dropped") + count("rejected") + count("undecodable");
            let ports = side("wan").0 + side("lan").0;
            left_sent == received + lost
                && (received, sent) == (sent + refused, right_got)
                && (ports, ports) == (count("packets"), decided)
                && lost > 0
        });
        engine.stop();
    });
}

/// Two machines of IPv6 with a router between them that they find by its neighbor advertisements.
#[test]
fn a_router_is_found_by_its_neighbors() {
    within(|| {
        let (left, right) = (Host::new(), Host::new());
        veth("wan", "l0");
        veth("lan", "r0");
        let config = "rules = \"r.ipfw\"\n[port.wan]\ndriver = \"af_packet\"\naddress = \"2001:db8:1::fe\"\n\
                      [port.lan]\ndriver = \"af_packet\"\naddress = \"2001:db8:2::fe\"\n\
                      [control]\nsocket = \"ctl.sock\"\n\
                      [[route]]\nto = \"2001:db8:1::/64\"\nport = \"wan\"\nmac = \"02:00:00:00:00:01\"\n\
                      [[route]]\nto = \"2001:db8:2::/64\"\nport = \"lan\"\nmac = \"02:00:00:00:00:02\"\n";
        for (host, device, number) in [(&left, "l0", 1), (&right, "r0", 2)] {
            ip(&format!("link set {device} address 02:00:00:00:00:0{number}"));
            host.take(device, &format!("10.0.{number}.1/24"));
            let there = host.run(move || {
                let there = std::fs::write(format!("/proc/sys/net/ipv6/conf/{device}/disable_ipv6"), "0");
                if there.is_ok() {
                    ip(&format!("addr add 2001:db8:{number}::1/64 dev {device} nodad"));
                    ip(&format!("route add default via 2001:db8:{number}::fe dev {device}"));
                }
                there
            });
            if let Err(error) = there {
                return println!("skipped: this kernel has no IPv6 ({error})");
            }
        }
        let files = files(
            config,
            "add 100 allow icmp6 from any to any icmp6types 135,136\nadd 200 allow tcp from any to any\n",
        );
        let engine = Engine::start(files.path());
        let (ready, listens) = mpsc::channel();
        let server = right.start(move || {
            let listener = TcpListener::bind("[2001:db8:2::1]:9001").unwrap();
            ready.send(()).unwrap();
            both_ways(listener.accept().unwrap().0, 2)
        });
        listens.recv().unwrap();
        let client = left.start(|| both_ways(TcpStream::connect("[2001:db8:2::1]:9001").unwrap(), 1));
        arrived((client, server));
        engine.stop();
    });
}
