//! Drop reasons of packets that the kernel or a limit of the engine refuses: those that `losses.rs` and `drop_reasons.rs` do not produce.

use std::process::Command;
use std::time::Duration;

use towpath_engine::DropReason;
use towpath_port::netns::{Host, ip, settled, veth, within};
use towpath_port::{LinkType, tun};
use towpath_ring::Consumer;
use towpath_wire::checksum;

use super::losses::{Shown, captured, comments, datagram, is_logged, send, trace};
use super::machines::*;
use crate::support::until;

/// A new reason needs a test that produces it.
#[test]
fn every_drop_reason_is_produced_by_a_test() {
    let tests = [include_str!("losses.rs"), include_str!("drop_reasons.rs"), include_str!("refusals.rs")];
    let is_produced = |name: &str| tests.iter().any(|test| test.contains(&format!("\"{name}\"")));
    let names = DropReason::ALL.iter().map(|reason| reason.name());
    assert_eq!(names.filter(|name| !is_produced(name)).collect::<Vec<_>>(), [""; 0]);
}

fn dropped(engine: &Engine, reason: &str) -> u64 {
    engine.json("show stats --json")["stats"]["dropped_by"][reason].as_u64().unwrap_or(0)
}

/// Each of these reasons is in every place that reports losses.
fn is_reported(engine: Engine, reasons: &[&str], directory: &std::path::Path) {
    let shown = Shown::of(&engine);
    reasons.iter().for_each(|reason| shown.has(reason));
    let capture = directory.join("any");
    until(|| reasons.iter().all(|reason| comments(&captured(&capture), reason) > 0));
    let said = engine.stop();
    reasons.iter().for_each(|reason| assert!(is_logged(&said, reason), "{reason}: {said}"));
}

/// The packets of `wan` go to queue 5, those to port 2000 to queue 6, which has only their first bytes.
const QUEUES: &str = r#"
rules = "r.ipfw"
[port.kernel]
driver = "nfqueue"
queue = 5
[port.short]
driver = "nfqueue"
queue = 6
copy-range = 22
[control]
socket = "ctl.sock"
[engine]
log-drops = "all"
"#;

/// A datagram from this address to port 1000, which is rejected.
fn from(address: [u8; 4]) -> Vec<u8> {
    let mut frame = datagram([10, 0, 2, 1], (9, 1000), 20);
    frame[26..30].copy_from_slice(&address);
    // The kernel checks that of the header before the queue has the packet.
    let wire_len = frame.len() as u32;
    checksum::fill(LinkType::ETHERNET, &mut frame, wire_len);
    frame
}

/// The kernel routes an answer of the engine to a rejected packet, and its rules for outgoing packets hold.
#[towpath_testenv::needs(netns, nfqueue)]
#[test]
fn the_kernels_refusals_are_reported_by_reason() {
    within(|| {
        let left = Host::new();
        veth("wan", "l0");
        ip("link set wan address 02:00:00:00:00:fe");
        ip("addr add 10.0.1.254/24 dev wan");
        left.take("l0", "10.0.1.1/24");
        settled("wan");
        ip("route add unreachable 10.61.0.0/16");
        ip("route add prohibit 10.62.0.0/16");
        ip("route add blackhole 10.63.0.0/16");
        for rule in [
            "-t raw -A PREROUTING -p udp --dport 2000 -j NFQUEUE --queue-num 6",
            "-t raw -A PREROUTING -p udp -j NFQUEUE --queue-num 5",
            "-A OUTPUT -d 10.0.1.1 -j DROP",
        ] {
            let set = ["iptables-legacy", "iptables"].iter().any(|program| {
                let output = Command::new(program).args(rule.split_whitespace()).output();
                output.is_ok_and(|output| output.status.success())
            });
            assert!(set, "iptables {rule}");
        }
        let rules = "add 100 unreach port udp from any to any 1000\nadd 200 allow ip from any to any\n";
        let files = files(QUEUES, rules);
        let engine = Engine::start(files.path());
        let mut any = trace(files.path(), "any");
        // A port counts the answers that it could not send as packets that have passed and were lost.
        send(&left, (0..9).map(|_| datagram([10, 0, 2, 1], (9, 9), 20)).collect());
        until(|| engine.json("show stats --json")["stats"]["passed"] == 9);
        let rows = [
            ("malformed_capture", datagram([10, 0, 2, 1], (9, 2000), 20)),
            ("tx_refused_eperm", from([10, 0, 1, 1])),
            ("tx_refused_enetunreach", from([203, 0, 113, 1])),
            ("tx_refused_ehostunreach", from([10, 61, 0, 1])),
            ("tx_refused", from([10, 62, 0, 1])),
            ("tx_refused_einval", from([10, 63, 0, 1])),
        ];
        for (reason, frame) in &rows {
            send(&left, vec![frame.clone()]);
            until(|| dropped(&engine, reason) > 0);
        }
        is_reported(engine, &rows.map(|(reason, _)| reason), files.path());
        assert!(any.wait().unwrap().success(), "the trace ends with the engine");
    });
}

const ROUTER: &str = r#"
rules = "r.ipfw"
[port.wan]
driver = "af_packet"
address = "10.0.1.254"
[port.lan]
driver = "af_packet"
address = "10.0.2.254"
[port.deaf]
driver = "af_packet"
address = "10.0.3.254"
[control]
socket = "ctl.sock"
[[route]]
to = "10.8.0.0/16"
port = "lan"
via = "10.0.2.1"
mac = "02:00:00:00:00:02"
[[route]]
to = "10.9.0.0/16"
port = "deaf"
via = "10.0.3.1"
mac = "02:00:00:00:00:03"
[queue.1]
socket = "q1.sock"
deadline = 600
[engine]
log-drops = "all"
reorder-packets = 256
reorder-memory = 1
"#;

const LIMITED: &str = "add 100 inspect 1 udp from any to any 2015 in\nadd 200 allow ip from any to any\n";

/// Limits of the engine and of a device.
#[towpath_testenv::needs(netns, tun)]
#[test]
fn packets_without_room_are_reported_by_reason() {
    within(|| {
        let (left, right) = (Host::new(), Host::new());
        veth("wan", "l0");
        veth("lan", "r0");
        ip("link set wan address 02:00:00:00:00:fe");
        ip(RIGHT_MAC);
        left.take("l0", "10.0.1.1/24");
        right.take("r0", "10.0.2.1/24");
        ["wan", "lan"].into_iter().for_each(settled);
        // Frames to this device wait for a reader.
        let _deaf = tun::Device::open(tun::Config::tap("deaf")).unwrap();
        ip("link set wan mtu 9000");
        left.run(|| ip("link set l0 mtu 9000"));
        let files = files(ROUTER, LIMITED);
        let engine = Engine::start(files.path());
        let mut any = trace(files.path(), "any");

        // A packet of 9,000 bytes leaves in 187 fragments: three in one burst exceed the copies of the transmit queue.
        ip("link set lan mtu 68");
        let mut long = datagram([10, 8, 0, 1], (9, 9), 8972);
        long[20] = 0;
        until(|| {
            send(&left, vec![long.clone(); 20]);
            dropped(&engine, "tx_no_buffer") > 0
        });
        until(|| {
            send(&left, (0..200).map(|from| datagram([10, 9, 0, 1], (from, 9), 20)).collect());
            dropped(&engine, "tx_full") > 0
        });
        without_share(&left, &engine, files.path());
        is_reported(engine, &["tx_no_buffer", "tx_full", "replace_limit"], files.path());
        assert!(any.wait().unwrap().success(), "the trace ends with the engine");
    });
}

/// Replacements at once: more than the share of the queue, less than the ring of the inspector.
const REPLACED: u32 = 16;

/// After this time without a packet, the inspector has all.
const SILENCE: Duration = Duration::from_millis(100);

/// An inspector replaces packets of a flow by long ones. They wait for an earlier packet, until its share has no room.
fn without_share(left: &Host, engine: &Engine, directory: &std::path::Path) {
    let mut consumer = Consumer::attach(directory.join("q1.sock")).unwrap();
    until(|| engine.json("show queues --json")["queues"][0]["inspectors"] == 1);
    let long = datagram([10, 8, 0, 1], (9, 2015), 60_000);
    until(|| {
        send(left, vec![datagram([10, 8, 0, 1], (9, 2015), 20); 30]);
        // Fewer may have found room.
        let (mut earlier, mut replaced) = (None, 0);
        while let Some(frame) = consumer.recv_timeout(SILENCE).unwrap() {
            match earlier {
                None => earlier = Some(frame),
                // The ring towards the engine has room for these; it is released in order.
                Some(_) if replaced < REPLACED => {
                    consumer.replace(frame, &long).unwrap();
                    replaced += 1;
                }
                Some(_) => consumer.verdict(frame, towpath_ring::Verdict::Pass),
            }
        }
        let limited = dropped(engine, "replace_limit") > 0;
        if let Some(earlier) = earlier {
            consumer.verdict(earlier, towpath_ring::Verdict::Pass);
        }
        consumer.flush();
        limited
    });
}
