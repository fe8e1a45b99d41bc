//! Compiles C programs against Debian's header, and runs them on the queues of real engines with this library.

#[path = "../../towpath-capi/tests/engine/mod.rs"]
mod engine;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

use engine::towpath;

/// Packets of the capture.
const PACKETS: usize = 1000;
/// Bytes of a packet before its IP header.
const ETHERNET: usize = 14;
/// Bytes of an IPv4 header and a UDP header.
const HEADERS: usize = 28;

struct Directory(tempfile::TempDir);

impl Directory {
    /// A directory with a capture of [`PACKETS`] packets and a rule file.
    fn new(rules: &str) -> Self {
        // UDP datagrams with 4 to 1,003 bytes of payload.
        Self::with(
            rules,
            (0..PACKETS).map(|number| datagram(4096, 53, &vec![number as u8 | 0x80; 4 + number])),
        )
    }

    /// A directory with a capture of these packets and a rule file.
    fn with(rules: &str, packets: impl Iterator<Item = Vec<u8>>) -> Self {
        let directory = Self(tempfile::tempdir().unwrap());
        std::fs::write(directory.path("in.pcap"), capture(packets)).unwrap();
        std::fs::write(directory.path("rules.ipfw"), rules).unwrap();
        directory
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// A C program of the directory `tests`, linked to the system's library.
    fn program(&self, name: &str) -> PathBuf {
        let program = self.path(name);
        let output = Command::new("cc")
            .args(["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-o"])
            .arg(&program)
            .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(name).with_extension("c"))
            .args(["-lnetfilter_queue", "-lnfnetlink", "-lmnl", "-lpthread"])
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        program
    }

    /// Replays the capture through a program on queue 1.
    fn replay(&self, program: &Path, arguments: &str) -> Replayed {
        Replayed::new(&self.command(program, arguments).output().unwrap())
    }

    fn command(&self, program: &Path, arguments: &str) -> Command {
        let command = format!("1=towpath nfq --library {} -- {} {arguments}", library(), program.display());
        let mut replay = towpath();
        replay
            .arg("replay")
            .arg(self.path("in.pcap"))
            .arg("--rules")
            .arg(self.path("rules.ipfw"))
            .arg("--out")
            .arg(self.path("out.pcap"))
            .args(["--json", "--deadline", "60", "--queue", &command]);
        replay
    }
}

/// The library, next to this test's executable.
fn library() -> String {
    let library = std::env::current_exe().unwrap().with_file_name("libnetfilter_queue.so");
    library.to_str().unwrap().to_owned()
}

struct Replayed {
    report: Value,
    /// The line that the program printed.
    program: String,
}

impl Replayed {
    fn new(output: &Output) -> Self {
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{text}");
        let program =
            text.lines().find(|line| line.starts_with("packets=")).unwrap_or_else(|| panic!("{text}"));
        Self { report: serde_json::from_slice(&output.stdout).unwrap(), program: program.to_owned() }
    }

    /// A counter of the queue.
    fn queue(&self, key: &str) -> usize {
        let queue = &self.report["queues"][0];
        queue[key].as_u64().unwrap_or_else(|| panic!("{key} of {queue}")) as usize
    }

    /// A number that the program printed.
    fn printed(&self, key: &str) -> usize {
        let word = self.program.split(' ').find_map(|word| word.strip_prefix(key)?.strip_prefix('='));
        word.and_then(|word| word.parse().ok()).unwrap_or_else(|| panic!("{key} in {}", self.program))
    }
}

/// A capture of Ethernet frames with these packets.
fn capture(packets: impl Iterator<Item = Vec<u8>>) -> Vec<u8> {
    let mut file = Vec::new();
    // File header of a little-endian capture, LINKTYPE_ETHERNET.
    for word in [0xa1b2_c3d4_u32, 0x0004_0002, 0, 0, 65535, 1] {
        file.extend(word.to_le_bytes());
    }
    for (number, packet) in packets.enumerate() {
        let length = (ETHERNET + packet.len()) as u32;
        for word in [1_700_000_000, number as u32, length, length] {
            file.extend(word.to_le_bytes());
        }
        file.extend([2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 8, 0]);
        file.extend(packet);
    }
    file
}

/// A UDP datagram over IPv4.
fn datagram(from: u16, to: u16, payload: &[u8]) -> Vec<u8> {
    let length = HEADERS + payload.len();
    let mut packet = vec![0x45, 0, 0, 0, 0, 0, 0, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2];
    packet[2..4].copy_from_slice(&(length as u16).to_be_bytes());
    for word in [from, to, (length - 20) as u16, 0] {
        packet.extend(word.to_be_bytes());
    }
    packet.extend(payload);
    packet
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

const INSPECT: &str = "add inspect 1 ip4 from any to any\nadd allow all from any to any\n";

/// Every way to read the socket delivers every packet, with its attributes.
#[towpath_testenv::needs(libnetfilter_queue)]
#[test]
fn a_program_with_callbacks_runs_unchanged() {
    let directory = Directory::new(INSPECT);
    let program = directory.program("verdicts");
    for mode in [
        "accept", "small", "poll", "epoll", "nonblock", "meta", "range", "same", "stolen", "reverse", "kept",
        "close",
    ] {
        let run = directory.replay(&program, mode);
        let counts = ["packets", "headers", "wrong", "refused"].map(|key| run.printed(key));
        assert_eq!(counts, [PACKETS, PACKETS, 0, 0], "{mode}: {}", run.program);
        let dropped = usize::from(mode == "kept");
        let counts = ["frames", "passed", "dropped", "lost"].map(|key| run.queue(key));
        assert_eq!(counts, [PACKETS, PACKETS - dropped, dropped, 0], "{mode}");
    }
}

/// The program's queue has another number than the engine's: a started program gets the queue that it was started for.
#[towpath_testenv::needs(libnetfilter_queue)]
#[test]
fn a_started_program_gets_its_queue_by_any_number() {
    let directory = Directory::new(INSPECT);
    let run = directory.replay(&directory.program("verdicts"), "accept 0");
    assert_eq!((run.printed("packets"), run.queue("passed")), (PACKETS, PACKETS));
}

/// A second verdict for a packet is ENOENT, for single and for batch verdicts; a batch covers all packets up to its id.
#[towpath_testenv::needs(libnetfilter_queue)]
#[test]
fn a_packet_has_one_verdict() {
    let directory = Directory::new(INSPECT);
    let program = directory.program("verdicts");
    for mode in ["twice", "batch", "error"] {
        let run = directory.replay(&program, mode);
        assert_eq!((run.printed("packets"), run.printed("wrong")), (PACKETS, 0), "{mode}: {}", run.program);
        let dropped = match mode {
            "twice" => PACKETS / 2,
            // Every second batch of 8 packets; the last one is incomplete.
            "batch" => PACKETS.div_ceil(16) * 8,
            _ => 0,
        };
        let counts = ["frames", "passed", "dropped", "lost"].map(|key| run.queue(key));
        assert_eq!(counts, [PACKETS, PACKETS - dropped, dropped, 0], "{mode}");
        assert_eq!(run.printed("refused") > 0, mode == "error", "{}", run.program);
    }
}

/// Calls at the limits of the library: unknown ids, threads, forks, queues that callbacks destroy and handles that they close.
#[towpath_testenv::needs(libnetfilter_queue)]
#[test]
fn a_program_at_the_limits_runs_as_with_the_kernel() {
    let directory = Directory::new(INSPECT);
    let program = directory.program("limits");
    for mode in ["unknown", "large", "threads", "forks", "maxlen", "one", "rebuild", "later", "close"] {
        let run = directory.replay(&program, mode);
        // A packet that comes once more, after it had its verdict already, is known to the library as decided.
        let again = matches!(mode, "rebuild" | "later");
        assert!(again || run.printed("wrong") == 0, "{mode}: {}", run.program);
        let packets = run.printed("packets");
        let counts = ["frames", "passed", "lost"].map(|key| run.queue(key));
        match mode {
            // The packets without a verdict get the default.
            "close" => assert!(packets >= 500 && counts[1] >= 500, "{counts:?}, {}", run.program),
            "rebuild" | "later" => {
                assert!(packets > PACKETS && counts == [PACKETS, PACKETS, 0], "{counts:?}, {}", run.program)
            }
            _ => assert_eq!((packets, counts), (PACKETS, [PACKETS, PACKETS, 0]), "{mode}"),
        }
    }
}

/// A rule after `divert` matches the mark that the verdict sets.
#[towpath_testenv::needs(libnetfilter_queue)]
#[test]
fn a_verdict_sets_the_mark() {
    let rules = "add divert 1 ip4 from any to any\nadd deny ip from any to any mark 0x11220000:0xffff0000\n\
                 add allow all from any to any\n";
    let directory = Directory::new(rules);
    let run = directory.replay(&directory.program("verdicts"), "marks");
    assert_eq!((run.queue("passed"), run.printed("wrong"), run.printed("marks")), (PACKETS, 0, 0));
    assert_eq!(run.report["dropped"], PACKETS, "{}", run.report);
}

/// A program that parses the messages itself, with libmnl, and gives verdicts in another thread.
#[towpath_testenv::needs(libnetfilter_queue)]
#[test]
fn a_program_that_parses_messages_runs_unchanged() {
    let directory = Directory::new(INSPECT);
    let run = directory.replay(&directory.program("messages"), "");
    assert_eq!((run.printed("packets"), run.printed("wrong")), (PACKETS, 0), "{}", run.program);
    assert_eq!((run.queue("passed"), run.queue("dropped")), (PACKETS / 2, PACKETS / 2));
}

/// The packet begins at the IP header for the program; the link header stays.
#[towpath_testenv::needs(libnetfilter_queue)]
#[test]
fn a_changed_packet_may_be_longer_or_shorter() {
    let directory = Directory::new(INSPECT);
    let program = directory.program("verdicts");
    let before = frames(&directory.path("in.pcap"));
    for (mode, change) in [("longer", 40), ("shorter", -4)] {
        let run = directory.replay(&program, mode);
        assert_eq!((run.queue("replaced"), run.printed("wrong")), (PACKETS, 0), "{mode}");
        let after = frames(&directory.path("out.pcap"));
        assert_eq!(after.len(), PACKETS, "{mode}");
        for (before, after) in before.iter().zip(&after) {
            assert_eq!(after.len() as i64, before.len() as i64 + change, "{mode}");
            assert_eq!(after[..ETHERNET + 2], before[..ETHERNET + 2], "{mode}");
            let same = after.len().min(before.len());
            // The program writes the lengths, and the engine the checksum of the IPv4 header.
            for same in [ETHERNET + 12..ETHERNET + 24, ETHERNET + HEADERS..same] {
                assert_eq!(after[same.clone()], before[same], "{mode}");
            }
            assert!(after[same..].iter().all(|byte| *byte == b'x'), "{mode}");
        }
    }
}

/// python-netfilterqueue of PyPI, built with Debian's headers.
#[towpath_testenv::needs("python:netfilterqueue")]
#[test]
fn a_program_for_python_netfilterqueue_runs_unchanged() {
    let directory = Directory::new(
        "add divert 1 ip4 from any to any\nadd deny ip from any to any mark 0x77\nadd allow all from any to any\n",
    );
    let python = Path::new(towpath_testenv::clients!()).join("bin/python");
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/filter.py");
    let run = directory.replay(&python, &format!("{} 1 {PACKETS}", script.display()));
    assert_eq!((run.printed("packets"), run.printed("wrong")), (PACKETS, 0), "{}", run.program);
    let [dropped, changed] = ["dropped", "changed"].map(|key| run.printed(key));
    let counts = ["dropped", "replaced", "passed", "lost"].map(|key| run.queue(key));
    assert_eq!(counts, [dropped, changed, PACKETS - dropped - changed, 0]);
    // The rule drops the packets that the program marked.
    assert_eq!(run.report["passed"], changed, "{}", run.report);
    assert!(frames(&directory.path("out.pcap")).iter().all(|frame| frame.ends_with(b"!")));
}

/// dhcpoptinj of Debian adds an option to DHCP requests.
#[towpath_testenv::needs("dhcpoptinj")]
#[test]
fn dhcpoptinj_of_debian_runs_unchanged() {
    // A BOOTP request (RFC 951) with the magic cookie, the option "DHCP message type" and the end option (RFC 2132).
    let mut request = vec![1, 1, 6, 0];
    request.resize(236, 0);
    request.extend([0x63, 0x82, 0x53, 0x63, 53, 1, 1, 255]);
    let packets = (0..10).map(|_| datagram(68, 67, &request));
    let directory = Directory::with(INSPECT, packets);
    let output = directory.command(Path::new("dhcpoptinj"), "-d -f -q 1 -o 0c746f77").output().unwrap();
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["queues"][0]["replaced"], 10, "{}", String::from_utf8_lossy(&output.stderr));
    for frame in frames(&directory.path("out.pcap")) {
        // The option "host name" with the value "tow".
        assert!(frame.windows(5).any(|bytes| bytes == [12, 3, b't', b'o', b'w']), "{frame:?}");
    }
}
