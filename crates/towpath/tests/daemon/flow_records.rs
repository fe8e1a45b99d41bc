//! Flow records and events of a running engine: nfcapd as the collector, and a file that is rotated.

use std::net::UdpSocket;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use towpath_port::netns::within;
use towpath_ring::{Consumer, Kind, Loss, Verdict, group};

use crate::live::machines::*;
use crate::support::until;

const IPFIX: &str = "[ipfix]\ncollector = \"127.0.0.1:4739\"\nstarts = true\n";

/// As [`RULES`], without an inspector, and with a `log` rule.
const ALLOWED: &str = "\
add 100 allow layer2 mac-type arp
add 200 check-state
add 400 allow log ip from any to any recv wan keep-state
";

/// nfcapd(1), which stores what it receives in a directory.
fn nfcapd(directory: &Path) -> Child {
    let child = Command::new("nfcapd")
        .args(["-4", "-b", "127.0.0.1", "-p", "4739", "-t", "3600", "-C", "none", "-w"])
        .arg(directory)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    until(|| waiting().is_some());
    child
}

/// Bytes that wait at the collector's socket in this thread's namespace; `None` without the socket (/proc/net/udp).
fn waiting() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/thread-self/net/udp").unwrap();
    let local = format!("0100007F:{:04X}", 4739);
    let columns = text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let own = columns.into_iter().find(|columns| columns.get(1) == Some(&&*local))?;
    u64::from_str_radix(own[4].split_once(':').unwrap().1, 16).ok()
}

/// The flows of the directory, as nfdump(1) prints them.
fn nfdump(directory: &Path) -> Vec<Value> {
    let output =
        Command::new("nfdump").args(["-C", "none", "-o", "json", "-R"]).arg(directory).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text} {}", String::from_utf8_lossy(&output.stderr));
    match serde_json::from_str(&text) {
        Ok(Value::Array(flows)) => flows,
        other => panic!("{other:?}: {text}"),
    }
}

/// The value of a sample of `ctl metrics`.
fn metric(engine: &Engine, sample: &str) -> u64 {
    let text = String::from_utf8(engine.ctl("metrics").stdout).unwrap();
    let value = text.lines().find_map(|line| line.strip_prefix(sample)?.strip_prefix(' '));
    value.unwrap_or_else(|| panic!("no {sample} in {text}")).parse().unwrap()
}

fn number(flow: &Value, name: &str) -> u64 {
    flow[name].as_u64().unwrap_or_else(|| panic!("{name}: {flow}"))
}

/// nfcapd stores, and nfdump prints, the connection with its packets and bytes of both directions, as the engine counts them.
#[towpath_testenv::needs(netns, "nfcapd")]
#[test]
fn nfdump_prints_the_flows_that_nfcapd_received() {
    within(|| {
        let (left, right) = machines();
        let store = tempfile::tempdir().unwrap();
        let mut collector = nfcapd(store.path());
        let files = files(&format!("{BRIDGE}{IPFIX}"), ALLOWED);
        let engine = Engine::start(files.path());
        arrived(transfer(&left, &right, 9000));
        // The connection was closed, its state expires, and its last record is sent.
        until(|| metric(&engine, "towpath_ipfix_records_total{cause=\"end\"}") >= 1);
        assert_eq!(metric(&engine, "towpath_ipfix_missed_total{}"), 0);
        assert_eq!(metric(&engine, "towpath_ipfix_unsent_messages_total{}"), 0);
        let rules = engine.json("show rules --json");
        let rule =
            rules["rules"].as_array().unwrap().iter().find(|rule| rule["number"] == 400).unwrap().clone();
        engine.stop();
        // A signal ends it before it has read all.
        until(|| waiting() == Some(0));
        kill_process(Pid::from_child(&collector), Signal::TERM).unwrap();
        let ended = collector.wait().unwrap();
        assert!(ended.success(), "nfcapd: {ended}");
        let flows = nfdump(store.path());
        let ours: Vec<&Value> = flows.iter().filter(|flow| flow["dst_port"] == 9000).collect();
        let sum = |name: &str| ours.iter().map(|flow| number(flow, name)).sum::<u64>();
        let all = ["in_packets", "out_packets", "in_bytes", "out_bytes"].map(sum);
        let counted = ["packets", "bytes"].map(|name| rule[name].as_u64().unwrap());
        assert_eq!([all[0] + all[1], all[2] + all[3]], counted, "{flows:#?}");
        // Both sides sent the bytes of a transfer.
        assert!(all[2] > BYTES as u64 && all[3] > BYTES as u64, "{ours:#?}");
        for flow in ours {
            assert_eq!((&flow["src4_addr"], &flow["dst4_addr"]), (&"10.0.0.1".into(), &"10.0.0.2".into()));
            assert_eq!(number(flow, "proto"), 6);
        }
    });
}

/// The lines of a file of events.
pub(crate) fn events(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    // The last line may not be whole yet.
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    whole
        .lines()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}")))
        .collect()
}

fn has(path: &Path, event: &str, test: impl Fn(&Value) -> bool) -> bool {
    events(path).iter().any(|line| line["event"] == event && test(line))
}

/// States, verdicts and drops are lines. After SIGHUP, they go to a new file.
#[towpath_testenv::needs(netns)]
#[test]
fn events_are_lines_of_a_file_that_is_rotated() {
    within(|| {
        let (left, right) = machines();
        let table = "[events]\noutput = \"log/events.json\"\n[engine]\nlog-drops = \"all\"\n";
        let files = files(&format!("{BRIDGE}{table}"), ALLOWED);
        let engine = Engine::start(files.path());
        let path = files.path().join("log/events.json");
        arrived(transfer(&left, &right, 9000));
        until(|| has(&path, "ended", |line| line["dst_port"] == 9000 && line["reason"] == "closed"));
        let all = events(&path);
        let states: Vec<&Value> =
            all.iter().filter(|line| line["dst_port"] == 9000 && line["id"].is_u64()).collect();
        let words: Vec<&str> = states.iter().filter_map(|line| line["event"].as_str()).collect();
        assert_eq!((words[0], words[1], words.last()), ("created", "replied", Some(&"ended")), "{states:#?}");
        let last = states.last().unwrap();
        assert_eq!(
            (&last["rule"], &last["src"], &last["port"]),
            (&400.into(), &"10.0.0.1".into(), &"wan".into())
        );
        assert!(
            last["bytes"][0].as_u64() > Some(BYTES as u64) && last["bytes"][1].as_u64() > Some(BYTES as u64)
        );
        // The packet of the `log` rule.
        assert!(has(&path, "verdict", |line| line["action"] == "Accept" && line["rule"] == 400), "{all:#?}");
        // The right machine may not open connections: the default rule drops them.
        let refused =
            right.run(|| UdpSocket::bind("10.0.0.2:0").unwrap().send_to(b"x", "10.0.0.1:7").is_ok());
        assert!(refused);
        until(|| has(&path, "drop", |line| line["reason"] == "rule" && line["dst_port"] == 7));

        let old = files.path().join("log/events.json.1");
        std::fs::rename(&path, &old).unwrap();
        engine.signal(Signal::HUP);
        until(|| path.exists());
        let before = events(&old).len();
        arrived(transfer(&left, &right, 9001));
        until(|| has(&path, "created", |line| line["dst_port"] == 9001));
        assert_eq!(events(&old).len(), before);
        engine.stop();
        let metrics = events(&path);
        assert!(!metrics.iter().any(|line| line["event"] == "lost"), "{metrics:#?}");
    });
}

/// A reader that takes nothing costs lines, and no packet.
#[towpath_testenv::needs(netns)]
#[test]
fn a_full_standard_output_stops_no_packet() {
    within(|| {
        let (left, right) = machines();
        let files = files(&format!("{BRIDGE}[events]\noutput = \"stdout\"\n"), ALLOWED);
        // `Engine` reads standard output at the end only.
        let engine = Engine::start(files.path());
        // Repeated, because the left machine drops some while it looks for the Ethernet address of the other.
        until(|| {
            left.run(|| {
                let socket = UdpSocket::bind("10.0.0.1:0").unwrap();
                // Each port is a state: more lines than a pipe takes.
                (1..2000).for_each(|port| _ = socket.send_to(b"x", ("10.0.0.2", port)));
            });
            metric(&engine, "towpath_states_created_states_total{}") >= 1000
        });
        arrived(transfer(&left, &right, 9000));
        engine.stop();
    });
}

/// A client of the ring gets the changes that it asks for, copies of logged packets up to its range and rate, and records of what it missed.
#[towpath_testenv::needs(netns)]
#[test]
fn a_client_of_the_ring_follows_states_and_packets() {
    within(|| {
        let (left, right) = machines();
        let files = files(BRIDGE, ALLOWED);
        let engine = Engine::start(files.path());
        let path = files.path().join("ctl.sock.ring");
        let mut ring = Consumer::attach_as(&path, "follower").unwrap();
        let next = |ring: &mut Consumer| {
            let frame = ring.recv_timeout(Duration::from_secs(60)).unwrap().expect("a frame");
            let (header, payload) = (*frame.header(), ring.payload(&frame).to_vec());
            ring.verdict(frame, Verdict::Pass);
            (header, payload)
        };
        // Requests that are not valid.
        for (number, payload, errno) in
            [(9, &b""[..], 2), (group::EVENTS, b"x", 22), (group::PACKETS, b"{\"rate\":0}", 22)]
        {
            ring.request(number, payload).unwrap();
            let (header, _) = next(&mut ring);
            assert_eq!((header.kind, header.group, header.mark), (Kind::ERROR, number, errno));
        }
        ring.request(group::EVENTS, b"{\"events\":[\"created\",\"ended\"]}").unwrap();
        ring.request(group::PACKETS, b"{\"rules\":[400],\"copy-range\":40,\"rate\":1000}").unwrap();
        let answers = [next(&mut ring).0, next(&mut ring).0].map(|header| (header.kind, header.group));
        assert_eq!(answers, [(Kind::DONE, group::EVENTS), (Kind::DONE, group::PACKETS)]);
        // The copies are wanted from the next turn of the packet thread on.
        let mut copied = false;
        until(|| {
            left.run(|| UdpSocket::bind("10.0.0.1:0").unwrap().send_to(b"x", "10.0.0.2:7").unwrap());
            while let Some(frame) = ring.try_recv().unwrap() {
                copied |= frame.header().kind == Kind::PACKET;
                ring.verdict(frame, Verdict::Pass);
            }
            copied
        });
        arrived(transfer(&left, &right, 9000));
        let (mut events, mut packets) = (Vec::new(), 0);
        while events.last() != Some(&"ended".to_owned()) {
            let (header, payload) = next(&mut ring);
            match header.kind {
                Kind::EVENT => {
                    let line: Value = serde_json::from_slice(&payload).unwrap();
                    assert_eq!((header.group, &line["rule"]), (group::EVENTS, &Value::from(400)));
                    if line["dst_port"] == 9000 {
                        events.push(line["event"].as_str().unwrap().to_owned());
                    }
                }
                Kind::PACKET => {
                    assert_eq!((header.group, header.mark, payload.len()), (group::PACKETS, 400, 40));
                    assert!(header.wire_len > 40 && header.layers.network == 14 && header.layers.link == 1);
                    assert_eq!(&payload[12..14], &[8, 0]);
                    packets += 1;
                }
                // The transfer has more packets in a second than the rate, or than the channel takes.
                Kind::GAP => assert_eq!(header.loss_record().unwrap().loss, Some(Loss::Limited)),
                kind => panic!("{kind:?}"),
            }
        }
        assert_eq!(events, ["created", "ended"]);
        assert!(packets > 0);
        engine.stop();
    });
}

/// A client that does not read loses events and gets their number; the engine and other clients continue.
#[towpath_testenv::needs(netns)]
#[test]
fn a_client_that_does_not_read_gets_a_loss_record() {
    within(|| {
        let (left, right) = machines();
        let files = files(BRIDGE, ALLOWED);
        let engine = Engine::start(files.path());
        let path = files.path().join("ctl.sock.ring");
        let mut slow = Consumer::attach_as(&path, "slow").unwrap();
        slow.request(group::EVENTS, b"{\"events\":[\"created\"]}").unwrap();
        let frame = slow.recv().unwrap().unwrap();
        assert_eq!(frame.header().kind, Kind::DONE);
        slow.verdict(frame, Verdict::Pass);
        let made = || metric(&engine, "towpath_states_created_states_total{}");
        let before = made();
        // More than the 4,096 frames of the ring. The right machine is known now, so that no packet waits for its address.
        arrived(transfer(&left, &right, 9000));
        until(|| {
            left.run(|| {
                for port in 1..=2000 {
                    // Each socket has another port, and makes another state.
                    let socket = UdpSocket::bind("10.0.0.1:0").unwrap();
                    let _ = socket.send_to(b"x", ("10.0.0.2", port));
                }
            });
            made() > before + 6000
        });
        let (mut events, mut lost) = (0, 0);
        until(|| {
            while let Some(frame) = slow.recv_timeout(Duration::from_millis(200)).unwrap() {
                match frame.header().kind {
                    Kind::EVENT => events += 1,
                    Kind::GAP => lost += u64::from(frame.header().loss_record().unwrap().count),
                    kind => panic!("{kind:?}"),
                }
                slow.verdict(frame, Verdict::Pass);
            }
            events + lost >= made() - before
        });
        assert!(events > 0 && lost > 0, "{events} events, {lost} lost");
        engine.stop();
    });
}
