//! The module of libdaq 3 (`clients/daq`), in a host of this project (`clients/daq/tests`): with captures and on a bridge.

mod engine;

use std::io::{BufRead, BufReader, Read};
use std::net::UdpSocket;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, Output, Stdio};
use std::time::Duration;

use serde_json::Value;
use towpath_port::netns::{Host, settled, until, veth, within};

use engine::towpath;

/// Packets of the capture.
const PACKETS: u64 = 200;
/// Bytes of a packet: Ethernet, IPv4, UDP, and a payload.
const LENGTH: usize = 14 + 20 + 8 + 8;

/// The module and the host, in a directory with a capture and a rule file.
struct Built {
    directory: tempfile::TempDir,
}

impl Built {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let (place, here) = (directory.path(), Path::new(env!("CARGO_MANIFEST_DIR")));
        let daq = here.join("../../clients/daq");
        std::fs::create_dir_all(place.join("include")).unwrap();
        std::fs::create_dir_all(place.join("lib")).unwrap();
        std::fs::copy(here.join("include/towpath.h"), place.join("include/towpath.h")).unwrap();
        let library = std::env::current_exe().unwrap().with_file_name("libtowpath_capi.so");
        for name in ["libtowpath.so", "libtowpath.so.1"] {
            std::os::unix::fs::symlink(&library, place.join("lib").join(name)).unwrap();
        }
        let abi = format!("-I{} -Werror", daq.join("tests/abi").display());
        succeeds(
            Command::new(daq.join("build"))
                .arg(place.join("daq_towpath.so"))
                .env("DAQ_CFLAGS", &abi)
                .env("TOWPATH_PREFIX", place),
        );
        succeeds(
            Command::new("cc")
                .args(["-std=gnu11", "-Wall", "-Wextra", "-Werror"])
                .args(abi.split(' '))
                .arg(daq.join("tests/host.c"))
                .arg("-o")
                .arg(place.join("host"))
                .args(["-ldl", "-lpthread"]),
        );
        Self { directory }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// The words that start the host: its input, its act, its number of packets, and keys.
    fn words(&self, rest: &str) -> String {
        format!("{} {} {rest}", self.path("host").display(), self.path("daq_towpath.so").display())
    }

    /// Replays a capture through the host. Returns the report, and what the host printed.
    fn replay(&self, rest: &str) -> (Value, String) {
        std::fs::write(self.path("in.pcap"), capture()).unwrap();
        std::fs::write(self.path("r.ipfw"), "add inspect 1 all from any to any\n").unwrap();
        let output = succeeds(
            towpath()
                .arg("replay")
                .arg(self.path("in.pcap"))
                .arg("--rules")
                .arg(self.path("r.ipfw"))
                .args(["--json", "--deadline", "60", "--queue"])
                .arg(format!("1={}", self.words(rest)))
                .arg("--out")
                .arg(self.path("out.pcap")),
        );
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let line = said.lines().find(|line| line.starts_with("packets=")).unwrap_or_else(|| panic!("{said}"));
        (serde_json::from_slice(&output.stdout).unwrap(), line.to_owned())
    }
}

fn succeeds(command: &mut Command) -> Output {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    output
}

/// A number of the line that the host prints.
fn printed(line: &str, key: &str) -> u64 {
    let word = line.split_whitespace().find_map(|word| word.strip_prefix(key)?.strip_prefix('='));
    word.and_then(|word| word.parse().ok()).unwrap_or_else(|| panic!("{key} in {line}"))
}

/// UDP datagrams of one flow, and an ARP frame in front of them.
fn capture() -> Vec<u8> {
    let mut file = Vec::new();
    for word in [0xa1b2_c3d4_u32, 0x0004_0002, 0, 0, 65535, 1] {
        file.extend(word.to_le_bytes());
    }
    let ethernet = [2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2];
    let mut frames = vec![[&ethernet[..], &[8, 6, 0, 1, 8, 0, 6, 4, 0, 1], &[0; 20]].concat()];
    for number in 0..PACKETS as u8 {
        let udp = [0x10, 0, 0, 53, 0, 16, 0, 0, number, b'x', b'x', b'x', b'x', b'x', b'x', b'x'];
        let ip = [0x45, 0, 0, 36, 0, number, 0, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2];
        frames.push([&ethernet[..], &[8, 0], &ip, &udp].concat());
    }
    for (number, frame) in (0..).zip(frames) {
        for word in [1_700_000_000, number, frame.len() as u32, frame.len() as u32] {
            file.extend(word.to_le_bytes());
        }
        file.extend(frame);
    }
    file
}

/// Each verdict reaches the engine as its own, with each kind of link header, in batches, and for packets that the host keeps.
#[towpath_testenv::needs("cc")]
#[test]
fn verdicts_of_a_host_of_libdaq() {
    let built = Built::new();
    // The ARP frame is a packet with link=ethernet, and no packet of the host with link=raw.
    for (act, keys, [passed, dropped, replaced]) in [
        ("pass", "", [PACKETS + 1, 0, 0]),
        ("block", "", [0, PACKETS + 1, 0]),
        ("replace", "", [0, 0, PACKETS + 1]),
        ("replace", " link=raw", [1, 0, PACKETS]),
        ("replace", " snaplen=44", [0, 0, PACKETS + 1]),
        ("mixed", " link=raw pool=7", [PACKETS / 2 + 1, PACKETS / 2, 0]),
        ("keep", " pool=40", [PACKETS + 1, 0, 0]),
        ("block", " mode=passive", [PACKETS + 1, 0, 0]),
    ] {
        let raw = u64::from(keys.contains("raw"));
        let (report, line) = built.replay(&format!("engine {act} {}{keys}", PACKETS + 1 - raw));
        let queue = &report["queues"][0];
        let counts =
            ["frames", "passed", "dropped", "replaced", "lost"].map(|key| queue[key].as_u64().unwrap());
        assert_eq!(counts, [PACKETS + 1, passed, dropped, replaced, 0], "{act}{keys}: {line}");
        let counts = ["packets", "received", "filtered"].map(|key| printed(&line, key));
        assert_eq!(counts, [PACKETS + 1 - raw, PACKETS + 1, raw], "{act}{keys}: {line}");
        assert_eq!(printed(&line, "link"), if raw == 1 { 12 } else { 1 }, "{line}");
        assert!(printed(&line, "batch") > 1, "{line}");
        let snapped = keys.contains("snaplen");
        assert_eq!(printed(&line, "cut"), if snapped { PACKETS } else { 0 }, "{line}");
        let capabilities = if keys.contains("passive") { "capabilities=160" } else { "capabilities=" };
        assert!(line.contains(capabilities), "{line}");
        if act == "replace" {
            // The last byte that the host has got.
            let at = if snapped { 44 } else { LENGTH } - 1;
            let changed = frames(&built.path("out.pcap"));
            let changed = changed.iter().filter(|frame| frame.len() == LENGTH);
            assert!(changed.clone().count() as u64 == PACKETS, "{keys}");
            for frame in changed {
                let expected: Vec<u8> =
                    (LENGTH - 7..LENGTH).map(|byte| if byte == at { b'X' } else { b'x' }).collect();
                assert_eq!(frame[LENGTH - 7..], expected, "{keys}");
            }
        }
    }
}

/// The frames of a capture in the machine's byte order.
fn frames(file: &Path) -> Vec<Vec<u8>> {
    let bytes = std::fs::read(file).unwrap();
    let mut rest = &bytes[24..];
    let mut frames = Vec::new();
    while let Some(length) = rest.get(8..12) {
        let length = u32::from_ne_bytes(length.try_into().unwrap()) as usize;
        frames.push(rest[16..16 + length].to_vec());
        rest = &rest[16 + length..];
    }
    frames
}

/// Each wrong configuration has a message that names the remedy.
#[towpath_testenv::needs("cc")]
#[test]
fn wrong_configurations_are_explained() {
    let built = Built::new();
    for (rest, hint) in [
        ("engine pass 1", "no engine has started this program"),
        ("0 pass 1", "1 to 65535"),
        ("eth0 pass 1", "the path of its socket"),
        ("1 pass 1 directory=/nowhere", "/nowhere/queue-1.sock"),
        ("1 pass 1 link=ppp", "link=ethernet"),
        ("1 pass 1 colour=red", "`colour` is no variable"),
        ("1 pass 1 mode=file", "towpath replay"),
    ] {
        let words = built.words(rest);
        let mut words = words.split(' ');
        let mut host = Command::new(words.next().unwrap());
        let output = host.args(words).env_remove("TOWPATH_SOCKET").output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(1) && said.contains(hint), "{rest}: {said}");
    }
    let build = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../clients/daq/build");
    for (prefix, flags, hint) in [
        ("/nowhere", "", "no header daq_module_api.h"),
        ("/nowhere", "-Iclients/daq/tests/abi", "crates/towpath-capi/install"),
    ] {
        let output = Command::new(&build)
            .arg(built.path("none.so"))
            .current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("../.."))
            .env("DAQ_CFLAGS", flags)
            .env("TOWPATH_PREFIX", prefix)
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(1) && said.contains(hint), "{said}");
    }
}

const CONFIG: &str = r#"
rules = "r.ipfw"
[port.wan]
driver = "af_packet"
[port.lan]
driver = "af_packet"
[[bridge]]
ports = ["wan", "lan"]
[control]
socket = "ctl.sock"
[queue.1]
socket = "queue-1.sock"
"#;

/// Ends its process when it is dropped.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A machine on each side of a bridge in this namespace.
struct World {
    built: Built,
    client: UdpSocket,
    server: UdpSocket,
    left: Host,
    _right: Host,
}

/// A socket of a machine.
fn socket(host: &Host, address: &'static str) -> UdpSocket {
    let socket = host.run(move || UdpSocket::bind(address).unwrap());
    socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    socket
}

impl World {
    fn new(more: &str) -> Self {
        let built = Built::new();
        let (left, right) = (Host::new(), Host::new());
        veth("wan", "l0");
        veth("lan", "r0");
        left.take("l0", "10.0.0.1/24");
        right.take("r0", "10.0.0.2/24");
        ["wan", "lan"].into_iter().for_each(settled);
        towpath_port::netns::ip("link set lo up");
        let rules = "add allow layer2 mac-type arp\nadd inspect 1 udp from any to any 9\nadd allow ip from any to any\n";
        std::fs::write(built.path("r.ipfw"), rules).unwrap();
        std::fs::write(built.path("t.toml"), format!("{CONFIG}{more}")).unwrap();
        let (client, server) = (socket(&left, "10.0.0.1:8"), socket(&right, "10.0.0.2:9"));
        client.connect("10.0.0.2:9").unwrap();
        Self { built, client, server, left, _right: right }
    }

    fn engine(&self) -> Process {
        let mut engine = towpath();
        engine.arg("run").arg(self.built.path("t.toml")).stdout(Stdio::null()).stderr(Stdio::null());
        let engine = Process(engine.spawn().unwrap());
        until(|| self.ctl("show stats").is_some());
        engine
    }

    /// A host on queue 1.
    fn host(&self, rest: &str) -> (Process, BufReader<ChildStderr>) {
        let rest = format!("{} {rest}", self.built.path("queue-1.sock").display());
        let words = self.built.words(&rest);
        let mut words = words.split(' ');
        let mut host = Command::new(words.next().unwrap());
        let mut host = Process(host.args(words).stderr(Stdio::piped()).spawn().unwrap());
        let mut said = BufReader::new(host.0.stderr.take().unwrap());
        let mut line = String::new();
        said.read_line(&mut line).unwrap();
        assert_eq!(line, "started\n");
        self.until_attached();
        (host, said)
    }

    /// Waits until the engine's thread has the host.
    fn until_attached(&self) {
        until(|| self.ctl("show queues").is_some_and(|answer| answer["queues"][0]["inspectors"] == 1));
    }

    fn ctl(&self, words: &str) -> Option<Value> {
        let output = towpath()
            .arg("ctl")
            .arg("--socket")
            .arg(self.built.path("ctl.sock"))
            .args(words.split(' '))
            .arg("--json")
            .output()
            .unwrap();
        output.status.success().then(|| serde_json::from_slice(&output.stdout).unwrap())
    }

    fn queue(&self, key: &str) -> u64 {
        self.ctl("show queues").unwrap()["queues"][0][key].as_u64().unwrap()
    }
}

/// Waits until the host ends. Returns its line of counts.
fn end((mut host, mut said): (Process, BufReader<ChildStderr>)) -> String {
    let mut line = String::new();
    said.read_to_string(&mut line).unwrap();
    assert!(host.0.wait().unwrap().success(), "{line}");
    line
}

/// The last byte of the next datagram.
fn last(socket: &UdpSocket) -> u8 {
    let mut datagram = [0; 64];
    let length = socket.recv(&mut datagram).unwrap();
    datagram[length - 1]
}

/// A host sends packets of its own in both directions of a flow, and a packet of its own that belongs to no message.
#[towpath_testenv::needs(netns, "cc")]
#[test]
fn a_host_injects_packets() {
    within(|| {
        let world = World::new("may-inject = true\n");
        let _engine = world.engine();
        for keys in ["", " link=raw"] {
            let host = world.host(&format!("answer 3{keys}"));
            for _ in 0..3 {
                world.client.send(b"-1").unwrap();
                assert_eq!(last(&world.client), b'a', "{keys}");
            }
            let line = end(host);
            assert_eq!((printed(&line, "injected"), printed(&line, "block")), (3, 3), "{line}");
            assert_eq!(printed(&line, "indices"), 3, "both interfaces are known: {line}");
        }
        let host = world.host("follow 3");
        for number in b'1'..=b'3' {
            world.client.send(&[b'-', number]).unwrap();
            assert_eq!([(); 3].map(|()| last(&world.server)), [number, b'f', b'g']);
        }
        let line = end(host);
        assert_eq!((printed(&line, "injected"), printed(&line, "pass")), (6, 3), "{line}");
        let totals = &world.ctl("show stats").unwrap()["stats"];
        let [packets, passed, dropped] =
            ["packets", "passed", "dropped"].map(|key| totals[key].as_u64().unwrap());
        assert_eq!(packets, passed + dropped, "injected packets are no received packets: {totals}");
    });
}

/// A verdict for the flow holds for its later packets, which the host does not get.
#[towpath_testenv::needs(netns, "cc")]
#[test]
fn verdicts_for_flows() {
    within(|| {
        let world = World::new("");
        let _engine = world.engine();
        for (act, address, passes) in [
            ("whitelist", "10.0.0.1:81", true),
            ("ignore", "10.0.0.1:82", true),
            ("blacklist", "10.0.0.1:83", false),
        ] {
            let client = socket(&world.left, address);
            client.connect("10.0.0.2:9").unwrap();
            let before = world.queue("by_flow");
            let host = world.host(&format!("{act} 1"));
            let decided = |at: u64| until(|| world.queue("passed") + world.queue("dropped") == at);
            let count = world.queue("frames");
            client.send(b"-1").unwrap();
            decided(count + 1);
            for number in b'2'..=b'5' {
                client.send(&[b'-', number]).unwrap();
            }
            until(|| world.queue("by_flow") == before + 4);
            if passes {
                assert_eq!([(); 5].map(|()| last(&world.server)), *b"12345", "{act}");
            }
            let line = end(host);
            assert_eq!((printed(&line, "packets"), printed(&line, "flow")), (1, 1), "{line}");
        }
    });
}

/// Without permission nothing is injected, and the message names the key. Interrupts end waits.
#[towpath_testenv::needs(netns, "cc")]
#[test]
fn interrupts_and_refusals() {
    within(|| {
        let world = World::new("");
        let _engine = world.engine();
        end(world.host("interrupts 0"));
        let host = world.host("refused 1");
        world.client.send(b"-1").unwrap();
        assert_eq!(last(&world.server), b'1');
        end(host);
    });
}

/// The module attaches again to an engine that was killed and started again.
#[towpath_testenv::needs(netns, "cc")]
#[test]
fn a_host_outlives_engines() {
    within(|| {
        let world = World::new("");
        let engine = world.engine();
        let host = world.host("pass 4");
        let pair = || {
            for number in *b"12" {
                world.client.send(&[b'-', number]).unwrap();
                assert_eq!(last(&world.server), number);
            }
        };
        pair();
        drop(engine);
        let _engine = world.engine();
        world.until_attached();
        pair();
        let line = end(host);
        assert_eq!((printed(&line, "packets"), printed(&line, "pass")), (4, 4), "{line}");
    });
}
