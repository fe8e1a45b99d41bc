//! The kernel's queue: marks, names of interfaces, repeated evaluation, and several queues.

use std::collections::HashSet;
use std::net::UdpSocket;
use std::process::Command;
use std::time::Duration;

use towpath_port::netns::{Host, bound, ip, veth, within};

use super::machines::*;
use crate::support::until;

/// A machine on each of `wan` and `lan`. The kernel of this namespace is their router, with these netfilter rules.
fn routed(rules: &[&str]) -> (Host, Host) {
    let (left, right) = (Host::new(), Host::new());
    veth("wan", "l0");
    veth("lan", "r0");
    ip("addr add 10.0.1.254/24 dev wan");
    ip("addr add 10.0.2.254/24 dev lan");
    std::fs::write("/proc/sys/net/ipv4/ip_forward", "1").unwrap();
    left.take("l0", "10.0.1.1/24");
    right.take("r0", "10.0.2.1/24");
    left.run(|| ip("route add default via 10.0.1.254"));
    right.run(|| ip("route add default via 10.0.2.254"));
    for rule in rules {
        let set = ["iptables-legacy", "iptables"].iter().any(|program| {
            let output = Command::new(program).args(rule.split_whitespace()).output();
            output.is_ok_and(|output| output.status.success())
        });
        assert!(set, "iptables {rule}");
    }
    (left, right)
}

fn bind(host: &Host, address: &'static str, port: u16) -> UdpSocket {
    host.run(move || bound(|| UdpSocket::bind((address, port))))
}

/// Sends a datagram from port `from` to port `to` of the right machine until one arrives or it was sent `times`. Returns true if one
/// arrived.
fn arrives(left: &Host, right: &Host, from: u16, to: u16, times: usize) -> bool {
    let receiver = bind(right, "10.0.2.1", to);
    receiver.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
    let sender = bind(left, "10.0.1.1", from);
    (0..times).any(|_| {
        sender.send_to(b"datagram", ("10.0.2.1", to)).unwrap();
        receiver.recv(&mut [0; 16]).is_ok()
    })
}

/// Packets of the rule with this number.
fn matched(engine: &Engine, number: u64) -> u64 {
    let rules = engine.json("show rules --json");
    let rule = rules["rules"].as_array().unwrap().iter().find(|rule| rule["number"] == number);
    rule.unwrap()["packets"].as_u64().unwrap()
}

const KERNEL: &str =
    "rules = \"r.ipfw\"\n[port.kernel]\ndriver = \"nfqueue\"\nqueue = 5\n[control]\nsocket = \"ctl.sock\"\n";

/// Rules match the mark that netfilter gave a packet, and the kernel gets the mark that a rule sets.
#[towpath_testenv::needs(netns, nfqueue)]
#[test]
fn marks_come_from_the_kernel_and_go_back() {
    within(|| {
        let (left, right) = routed(&[
            "-t mangle -A PREROUTING -p udp --dport 1000 -j MARK --set-mark 0x15",
            "-A FORWARD -j NFQUEUE --queue-num 5",
            // After the queue: only packets with the mark of rule 200.
            "-t mangle -A POSTROUTING -p udp --dport 1001 -m mark ! --mark 0x77 -j DROP",
            "-t mangle -A POSTROUTING -p udp --dport 1002 -m mark ! --mark 0x77 -j DROP",
        ]);
        let rules = "add 100 deny udp from any to any mark 0x5:0xf\nadd 200 setmark 0x77 udp from any to any 1001\n\
                     add 300 allow ip from any to any\n";
        let files = files(KERNEL, rules);
        let engine = Engine::start(files.path());
        assert!(!arrives(&left, &right, 9, 1000, 3), "rule 100 denies the mark 0x15");
        until(|| matched(&engine, 100) == 3);
        assert!(arrives(&left, &right, 9, 1001, 100), "the kernel got the mark of rule 200");
        assert!(!arrives(&left, &right, 9, 1002, 3), "a mark that no rule sets stays 0");
        // Denied packets are not sent.
        until(|| {
            let ports = engine.json("show ports --json");
            let [received, sent] = ["received", "sent"].map(|what| ports["ports"][0][what].as_u64().unwrap());
            received == sent + 3
        });
        engine.stop();
    });
}

/// The mark of a connection is read and set through the verdict.
#[towpath_testenv::needs(netns, nfqueue, queue_ct)]
#[test]
fn marks_of_connections_come_from_the_kernel_and_go_back() {
    within(|| {
        let (left, right) = routed(&[
            "-t mangle -A PREROUTING -p udp --dport 1000 -j CONNMARK --set-mark 0x9",
            "-A FORWARD -m connmark --mark 0x31 -j ACCEPT",
            "-A FORWARD -j NFQUEUE --queue-num 5",
        ]);
        let rules = "add 100 deny udp from any to any connmark 0x9\nadd 200 setconnmark 0x31 udp from any to any 1001\n\
                     add 300 allow ip from any to any\n";
        let config = KERNEL.replace("queue = 5", "queue = 5\nconntrack = true");
        let files = files(&config, rules);
        let engine = Engine::start(files.path());
        assert!(!arrives(&left, &right, 9, 1000, 3), "rule 100 denies the mark 9 of the connection");
        assert!(arrives(&left, &right, 9, 1001, 100));
        let queued = matched(&engine, 200);
        assert!(arrives(&left, &right, 9, 1001, 100));
        assert_eq!(matched(&engine, 200), queued, "later packets of the connection do not come to the queue");
        engine.stop();
    });
}

/// A packet whose mark changed begins again at the first netfilter rule.
#[towpath_testenv::needs(netns, nfqueue)]
#[test]
fn a_packet_with_a_new_mark_is_evaluated_again() {
    within(|| {
        let (left, right) = routed(&[
            "-A FORWARD -p udp -m mark --mark 0x1 -j DROP",
            "-A FORWARD -m mark --mark 0x2 -j ACCEPT",
            "-A FORWARD -j NFQUEUE --queue-num 5",
        ]);
        let rules = "add 100 setmark 0x1 udp from any to any 1000\nadd 200 setmark 0x2 udp from any to any 1001\n\
                     add 300 allow ip from any to any\n";
        let files = files(&KERNEL.replace("queue = 5", "queue = 5\nrepeat = true"), rules);
        let engine = Engine::start(files.path());
        assert!(!arrives(&left, &right, 9, 1000, 3), "the first netfilter rule drops the mark 1");
        assert!(arrives(&left, &right, 9, 1001, 100));
        assert!(arrives(&left, &right, 9, 1002, 100), "a packet with its old mark is accepted");
        engine.stop();
    });
}

/// `recv` and `xmit` match the kernel's interfaces by name, also after one was renamed.
#[towpath_testenv::needs(netns, nfqueue)]
#[test]
fn rules_name_the_interfaces_of_the_kernel() {
    within(|| {
        let (left, right) = routed(&["-A FORWARD -j NFQUEUE --queue-num 5"]);
        let rules = "add 100 deny udp from any to any 1000 recv wan\nadd 110 deny udp from any to any 1001 xmit lan\n\
                     add 120 deny udp from any to any 1002 recv lan\nadd 130 deny udp from any to any 1003 recv kernel\n\
                     add 140 deny udp from any to any 1004 recv dsl0\nadd 300 allow ip from any to any\n";
        let listed = "queue = 5\ninterfaces = [\"wan\", \"lan\", \"dsl0\"]";
        let files = files(&KERNEL.replace("queue = 5", listed), rules);
        let engine = Engine::start(files.path());
        for (to, expected) in [(1000, false), (1001, false), (1002, true), (1003, true), (1004, true)] {
            let times = if expected { 100 } else { 3 };
            assert_eq!(arrives(&left, &right, 9, to, times), expected, "{to}");
        }
        ip("link set wan down");
        ip("link set wan name dsl0");
        ip("link set dsl0 up");
        // A name is kept for a second.
        until(|| !arrives(&left, &right, 9, 1004, 1) && matched(&engine, 140) > 0);
        engine.stop();
    });
}

/// Each thread reads a queue of its own, as `--queue-balance` distributes the flows.
#[towpath_testenv::needs(netns, nfqueue)]
#[test]
fn threads_share_the_queues_of_a_range() {
    within(|| {
        let (left, right) = routed(&["-A FORWARD -j NFQUEUE --queue-balance 5:6"]);
        let config = format!("{KERNEL}[engine]\nthreads = 2\n");
        let files =
            files(&config, "add 100 check-state\nadd 200 allow udp from 10.0.1.0/24 to any keep-state\n");
        let engine = Engine::start(files.path());
        // Replies find the state that a thread installed, whichever thread they come to.
        let mut queues = HashSet::new();
        // The addresses of a flow select its queue.
        left.run(|| (2..34).for_each(|host| ip(&format!("addr add 10.0.1.{host}/24 dev l0"))));
        for (port, host) in (2000..).zip(2..34) {
            let server = right.run(move || UdpSocket::bind(("10.0.2.1", port)).unwrap());
            let client = left.run(move || UdpSocket::bind((format!("10.0.1.{host}"), 0)).unwrap());
            for socket in [&server, &client] {
                socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
            }
            client.send_to(b"question", ("10.0.2.1", port)).unwrap();
            let (_, from) = server.recv_from(&mut [0; 16]).unwrap();
            server.send_to(b"answer", from).unwrap();
            client.recv(&mut [0; 16]).unwrap();
        }
        let text = std::fs::read_to_string("/proc/thread-self/net/netfilter/nfnetlink_queue").unwrap();
        for line in text.lines() {
            let columns: Vec<u64> = line.split_whitespace().map(|column| column.parse().unwrap()).collect();
            // The queue's number, and the number of packets that it has had.
            queues.extend((columns[7] > 0).then_some(columns[0]));
        }
        assert_eq!(queues, HashSet::from([5, 6]), "{text}");
        engine.stop();
    });
}

/// The queue's length is that of the configuration, and a full queue drops or accepts.
#[towpath_testenv::needs(netns, nfqueue)]
#[test]
fn a_full_queue_drops_or_accepts() {
    for (fail, arrive) in [("closed", false), ("open", true)] {
        within(|| {
            let (left, right) = routed(&["-A FORWARD -p udp -j NFQUEUE --queue-num 5"]);
            let config =
                KERNEL.replace("queue = 5", &format!("queue = 5\nqueue-length = 4\nfail = \"{fail}\""));
            let files = files(&config, "add 300 allow ip from any to any\n");
            let engine = Engine::start(files.path());
            engine.signal(rustix::process::Signal::STOP);
            // proc_pid_status(5): the threads of the process stop one after the other.
            let tasks = format!("/proc/{}/task", engine.child.id());
            until(|| {
                std::fs::read_dir(&tasks).unwrap().all(|task| {
                    let status =
                        std::fs::read_to_string(task.unwrap().path().join("status")).unwrap_or_default();
                    status.contains("State:\tT")
                })
            });
            let receiver = right.run(|| UdpSocket::bind("10.0.2.1:1000").unwrap());
            receiver.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
            let sender = left.run(|| UdpSocket::bind("10.0.1.1:0").unwrap());
            for number in 0..20_u8 {
                sender.send_to(&[number], "10.0.2.1:1000").unwrap();
            }
            let passed: HashSet<u8> = if arrive { (4..20).collect() } else { HashSet::new() };
            let mut got = HashSet::new();
            let mut more = |count: usize| {
                let mut byte = [0];
                while got.len() < count {
                    receiver.recv(&mut byte).unwrap();
                    got.insert(byte[0]);
                }
                got.clone()
            };
            assert_eq!(more(passed.len()), passed, "{fail}: while the engine is stopped");
            receiver.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
            assert!(receiver.recv(&mut [0]).is_err(), "{fail}: others are dropped, or wait");
            receiver.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
            engine.signal(rustix::process::Signal::CONT);
            let got = more(passed.len() + 4);
            assert!((0..4).all(|number| got.contains(&number)), "{fail}: the queue held the first four");
            engine.stop();
        });
    }
}
