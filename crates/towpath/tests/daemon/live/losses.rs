//! Drop reasons are produced on purpose, and found in every place that reports losses: `show stats`, its `--json`, the metrics, the log,
//! and a trace of dropped packets. `drop_reasons.rs` and `refusals.rs` produce the others.

use std::path::Path;
use std::process::{Child, Command, Stdio};

use serde_json::Value;
use towpath_port::netns::{Host, ip, settled, veth, within};
use towpath_port::{Frame, LinkType, Port, af_packet};
use towpath_ring::Consumer;
use towpath_wire::checksum;

use super::machines::*;
use crate::support::until;

const CONFIG: &str = r#"
rules = "r.ipfw"
[port.wan]
driver = "af_packet"
address = "10.0.1.254"
[port.lan]
driver = "af_packet"
address = "10.0.2.254"
[control]
socket = "ctl.sock"
[[route]]
to = "10.0.1.0/24"
port = "wan"
[[route]]
to = "10.0.2.0/24"
port = "lan"
[[route]]
to = "10.8.0.0/16"
port = "lan"
via = "10.0.2.1"
mac = "02:00:00:00:00:02"
[queue.1]
socket = "q1.sock"
deadline = 0.01
[queue.2]
socket = "q2.sock"
deadline = 600
high = 1
[settings]
dyn_max = 2
dyn_udp_lifetime = 3600
[engine]
log-drops = "all"
"#;

const RULES: &str = "\
add 100 allow layer2 mac-type arp
add 200 deny udp from any to any 1000
add 210 inspect 1 udp from any to any 1001 in
add 220 inspect 2 udp from any to any 1002 in
add 230 allow udp from any to any 1003 in limit src-addr 1
add 240 allow udp from any to any 1004 in keep-state
add 300 allow ip from any to any
";

/// The Ethernet address of the router on the link of the left host.
pub(super) const WAN: [u8; 6] = [2, 0, 0, 0, 0, 0xfe];

/// A UDP datagram to the router that may not be fragmented.
pub(super) fn datagram(to: [u8; 4], ports: (u16, u16), len: usize) -> Vec<u8> {
    let mut frame = WAN.to_vec();
    frame.extend([2, 0, 0, 0, 0, 1, 8, 0]);
    frame.extend([0x45, 0, 0, 0, 0, 0, 0x40, 0, 64, 17, 0, 0, 10, 0, 1, 1]);
    frame[16..18].copy_from_slice(&(28 + len as u16).to_be_bytes());
    frame.extend(to);
    frame.extend([ports.0, ports.1, 8 + len as u16, 0].map(u16::to_be_bytes).concat());
    frame.resize(42 + len, 7);
    let wire_len = frame.len() as u32;
    checksum::fill(LinkType::ETHERNET, &mut frame, wire_len);
    frame
}

/// The left host sends these frames.
pub(super) fn send(left: &Host, frames: Vec<Vec<u8>>) {
    left.run(move || {
        let mut socket = af_packet::Socket::open(af_packet::Config::new("l0")).unwrap();
        let mut frames = frames.iter().map(|frame| Frame::new(frame, LinkType::ETHERNET));
        socket.send(&mut frames).unwrap();
        socket.flush().unwrap();
    });
}

/// Traces dropped packets. Returns when the trace runs.
pub(super) fn trace(directory: &Path, reason: &str) -> Child {
    let capture = directory.join(reason);
    let child = Command::new(env!("CARGO_BIN_EXE_towpath"))
        .args(["ctl", "--socket", directory.join("ctl.sock").to_str().unwrap()])
        .args(["trace", "--drop", reason, "--out", capture.to_str().unwrap()])
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    until(|| std::fs::metadata(&capture).is_ok_and(|file| file.len() > 0));
    child
}

/// A capture so far.
pub(super) fn captured(capture: &Path) -> String {
    String::from_utf8_lossy(&std::fs::read(capture).unwrap()).into_owned()
}

/// The number of packets of a capture with this reason in their comment. A reason is followed by the end of the comment, or by the port.
pub(super) fn comments(capture: &str, reason: &str) -> usize {
    let comment = format!("drop, {reason}");
    let ends = |at: usize| !matches!(capture.as_bytes().get(at), Some(b'_' | b'a'..=b'z' | b'0'..=b'9'));
    capture.match_indices(&comment).filter(|(at, _)| ends(at + comment.len())).count()
}

/// Returns true if the log has a line with this reason.
pub(super) fn is_logged(said: &str, reason: &str) -> bool {
    said.contains(&format!("Drop ({reason})")) || said.contains(&format!("Deny ({reason})"))
}

/// The losses of an engine as its commands show them.
pub(super) struct Shown {
    text: String,
    metrics: String,
}

impl Shown {
    /// `show stats`, which agrees with its JSON, and the metrics.
    pub(super) fn of(engine: &Engine) -> Self {
        let text = String::from_utf8(engine.ctl("show stats").stdout).unwrap();
        let metrics = String::from_utf8(engine.ctl("metrics").stdout).unwrap();
        let total = engine.json("show stats --json")["stats"].clone();
        let sum: u64 = total["dropped_by"].as_object().unwrap().values().filter_map(Value::as_u64).sum();
        assert_eq!(Some(sum), total["dropped"].as_u64(), "{total}");
        Self { text, metrics }
    }

    pub(super) fn has(&self, reason: &str) {
        let Self { text, metrics } = self;
        let line = format!("{reason} ");
        assert!(text.lines().any(|own| own.trim_start().starts_with(&line)), "{reason}: {text}");
        assert!(metrics.contains(&format!("{{reason=\"{reason}\"}} ")), "{reason}: {metrics}");
    }
}

#[towpath_testenv::needs(netns)]
#[test]
fn each_loss_is_reported_by_its_reason_in_every_place() {
    within(|| {
        let (left, right) = (Host::new(), Host::new());
        veth("wan", "l0");
        veth("lan", "r0");
        ip("link set wan address 02:00:00:00:00:fe");
        ip(RIGHT_MAC);
        left.take("l0", "10.0.1.1/24");
        right.take("r0", "10.0.2.1/24");
        ip("link set lan mtu 1400");
        ["wan", "lan"].into_iter().for_each(settled);
        let files = files(CONFIG, RULES);
        let path = |name: &str| files.path().join(name);
        let engine = Engine::start(files.path());
        let mut traces = ["any", "no_route", "malformed"].map(|reason| trace(files.path(), reason));
        let dropped = |reason: &str| {
            engine.json("show stats --json")["stats"]["dropped_by"][reason].as_u64().unwrap_or(0)
        };
        let inspectors = |at: usize| engine.json("show queues --json")["queues"][at]["inspectors"].clone();
        let to = |port: u16| datagram([10, 8, 0, 1], (9, port), 20);
        let mut seen = Vec::new();
        let mut produced = |reason: &'static str| {
            until(|| dropped(reason) > 0);
            seen.push(reason);
        };

        let mut malformed = to(9);
        malformed[16] = 0xff;
        send(&left, vec![malformed]);
        produced("malformed_ip4_total_length");
        send(&left, vec![datagram([203, 0, 113, 9], (9, 9), 20)]);
        produced("no_route");
        send(&left, vec![to(1000)]);
        produced("rule");
        // The limit before the table is full.
        send(&left, vec![to(1003), datagram([10, 8, 0, 1], (10, 1003), 20)]);
        produced("over_limit");
        send(&left, vec![to(1004), datagram([10, 8, 0, 1], (10, 1004), 20)]);
        produced("states_full");

        send(&left, vec![to(1001)]);
        produced("no_inspector");
        let silent = Consumer::attach(path("q1.sock")).unwrap();
        until(|| inspectors(0) == 1);
        send(&left, vec![to(1001)]);
        produced("overdue");
        drop(silent);
        let first = Consumer::attach(path("q2.sock")).unwrap();
        until(|| inspectors(1) == 1);
        // Packets of one flow would wait for each other.
        send(&left, vec![to(1002), datagram([10, 8, 0, 1], (10, 1002), 20)]);
        produced("queue_full");
        // The packet that the first inspector held goes to the second, and dies with it.
        let mut second = Consumer::attach(path("q2.sock")).unwrap();
        until(|| inspectors(1) == 2);
        drop(first);
        let held = second.recv().unwrap();
        assert!(held.is_some());
        drop((held, second));
        produced("inspector_died");

        send(&left, vec![datagram([10, 0, 2, 77], (9, 9), 20)]);
        produced("unresolved");
        send(&left, vec![datagram([10, 8, 0, 1], (9, 9), 1430)]);
        produced("too_long");
        // The kernel refuses a frame if the engine does not know the new MTU yet.
        until(|| {
            ip("link set lan mtu 1300");
            send(&left, vec![datagram([10, 8, 0, 1], (9, 9), 1350)]);
            std::thread::sleep(std::time::Duration::from_millis(20));
            ip("link set lan mtu 1400");
            dropped("tx_refused_emsgsize") > 0
        });
        produced("tx_refused_emsgsize");
        ip("link set lan down");
        send(&left, vec![to(9)]);
        produced("port_down");

        let shown = Shown::of(&engine);
        let captured = |name: &str| captured(&path(name));
        until(|| seen.iter().all(|reason| comments(&captured("any"), reason) > 0));
        until(|| comments(&captured("no_route"), "no_route") > 0);
        until(|| comments(&captured("malformed"), "malformed_ip4_total_length") > 0);
        for trace in &mut traces {
            trace.kill().unwrap();
            trace.wait().unwrap();
        }
        let said = engine.stop();
        seen.iter().for_each(|reason| shown.has(reason));
        seen.iter().for_each(|reason| assert!(is_logged(&said, reason), "{reason}: {said}"));
        assert!(said.contains("ipfw: 200 Drop (rule) UDP 10.0.1.1:9 10.8.0.1:1000 in via wan"), "{said}");
        assert!(said.contains("ipfw: Drop (no_route) UDP 10.0.1.1:9 203.0.113.9:9 in via wan"), "{said}");
        assert!(said.contains("ipfw: Drop (port_down) UDP 10.0.1.1:9 10.8.0.1:9 out via lan"), "{said}");
        let any = captured("any");
        assert!(any.contains("rule 200: drop, rule") && any.contains("drop, port_down, out by lan"));
        for (name, of) in [("no_route", "no_route"), ("malformed", "malformed_ip4_total_length")] {
            let capture = captured(name);
            assert_eq!((comments(&capture, of), capture.matches("drop, ").count()), (1, 1), "{name}");
        }
    });
}

/// Of many drops within a second, the log has one line, and one with the number of the others.
#[towpath_testenv::needs(netns)]
#[test]
fn the_log_states_how_many_lines_it_suppressed() {
    within(|| {
        let left = Host::new();
        veth("wan", "l0");
        veth("lan", "r0");
        ip("link set wan address 02:00:00:00:00:fe");
        left.take("l0", "10.0.1.1/24");
        settled("wan");
        for (which, lines) in [("losses", 2), ("no", 0)] {
            let config = CONFIG.replace("log-drops = \"all\"", &format!("log-drops = \"{which}\""));
            let files = files(&config, RULES);
            let engine = Engine::start(files.path());
            let to = |address, port| datagram(address, (9, port), 20);
            send(&left, (0..50).map(|_| to([203, 0, 113, 9], 9)).collect());
            send(&left, (0..50).map(|_| to([10, 8, 0, 1], 1000)).collect());
            until(|| {
                let stats = engine.json("show stats --json");
                let dropped = &stats["stats"]["dropped_by"];
                dropped["no_route"] == 50 && dropped["rule"] == 50
            });
            let said = engine.stop();
            let suppressed: u64 = said
                .lines()
                .filter(|line| {
                    line.contains("suppressed") && line.contains("one \"Drop (no_route)\" per second")
                })
                .filter_map(|line| line.split("suppressed ").nth(1)?.split(' ').next()?.parse::<u64>().ok())
                .sum();
            let written = said.matches("ipfw: Drop (no_route) UDP").count() as u64;
            assert_eq!(written + suppressed, if lines > 0 { 50 } else { 0 }, "{which}: {said}");
            // A rule has its own `log`.
            assert!(!said.contains("Drop (rule)"), "{said}");
        }
    });
}
