//! Flow offload of flows that an inspector has decided.

use std::path::Path;
use std::thread::JoinHandle;

use towpath_port::netns::within;
use towpath_ring::{Consumer, Decision, Verdict};

use super::machines::*;
use super::offload::{Flow, bulk_is_offloaded, offload, offload_machines, rule};
use crate::support::until;

const CONFIG: &str = "[queue.1]\nsocket = \"q1.sock\"\ndeadline = 10\n[offload]\n";

/// An inspector in this process, which the engine has joined. `decide` gets the payload of each packet's upper layer.
fn inspector(
    engine: &Engine,
    directory: &Path,
    mut decide: impl FnMut(&[u8]) -> Decision<'static> + Send + 'static,
) -> JoinHandle<()> {
    let mut consumer = Consumer::attach_as(directory.join("q1.sock"), "test").unwrap();
    until(|| engine.json("show queues --json")["queues"][0]["inspectors"] == 1);
    std::thread::spawn(move || {
        let mut batch = Vec::new();
        // An error: the engine has ended.
        while consumer.recv_batch(&mut batch, 64).is_ok_and(|count| count > 0) {
            for frame in batch.drain(..) {
                let payload = usize::from(frame.header().layers.payload);
                let decision = decide(consumer.payload(&frame).get(payload..).unwrap_or_default());
                consumer.verdict(frame, decision);
            }
        }
    })
}

/// The whole flow passes after the word `go`, and is dropped after `no`.
fn by_word(payload: &[u8]) -> Decision<'static> {
    match payload {
        b"go" => Decision { flow: true, ..Verdict::Pass.into() },
        b"no" => Decision { flow: true, ..Verdict::Drop.into() },
        _ => Verdict::Pass.into(),
    }
}

/// The kernel forwards a flow that an inspector has passed, without a state, and counts its packets. A blocked flow is never forwarded.
#[towpath_testenv::needs(netns, tcx)]
#[test]
fn a_verdict_for_the_flow_offloads_it() {
    within(|| {
        let (left, right) = machines();
        let rules = "add 50 allow layer2 mac-type arp\nadd 100 inspect 1 udp from any to any\n";
        let files = files(&format!("{BRIDGE}{CONFIG}"), rules);
        let engine = Engine::start(files.path());
        let inspector = inspector(&engine, files.path(), by_word);
        let note = || {
            let explained = engine.json("explain --json in wan udp 10.0.0.1:5001 > 10.0.0.2:5001");
            explained["notes"][0].as_str().unwrap_or_else(|| panic!("{explained}")).to_owned()
        };
        let [passed, blocked] = [5001, 5002].map(|port| Flow::new(&left, &right, port));
        for flow in [&passed, &blocked] {
            (0..10).for_each(|number| flow.exchange(number));
        }
        assert_eq!(offload(&engine, "entries"), 0);
        assert!(note().contains("rule 100 sends them to an inspector that has not passed"), "{}", note());
        passed.send_word(b"go");
        // Each direction has an entry after a packet of its own.
        let mut number = 10;
        until(|| {
            passed.exchange(number);
            number += 1;
            offload(&engine, "entries") == 2
        });
        assert!(note().contains("the kernel forwards the packets of this flow"), "{}", note());
        let before = offload(&engine, "forwarded_packets");
        (number..number + 100).for_each(|number| passed.exchange(number));
        assert_eq!(offload(&engine, "forwarded_packets"), before + 200);
        let sent = 20 + 1 + 2 * u64::from(number + 100);
        assert_eq!(rule(&engine, 100).0, sent);
        // The inspector drops this one and what follows, in both directions.
        blocked.left.send(b"no").unwrap();
        until(|| engine.json("show stats --json")["stats"]["dropped_by"]["inspector"].as_u64() == Some(1));
        for _ in 0..20 {
            blocked.left.send(b"blocked").unwrap();
            blocked.right.send(b"blocked").unwrap();
        }
        until(|| engine.json("show stats --json")["stats"]["dropped_by"]["inspector"].as_u64() == Some(41));
        assert!(blocked.is_quiet() && passed.is_quiet());
        assert_eq!((offload(&engine, "entries"), rule(&engine, 100).0), (2, sent + 41));
        // The verdict is that for the flow: a new rule needs no other one, and the entries are renewed.
        assert!(engine.ctl("add 60 count udp from any to any").status.success());
        until(|| offload(&engine, "renewed") >= 2 && offload(&engine, "entries") == 2);
        let before = offload(&engine, "forwarded_packets");
        (0..20).for_each(|number| passed.exchange(number));
        assert_eq!((offload(&engine, "forwarded_packets"), rule(&engine, 60).0), (before + 40, 40));
        engine.stop();
        inspector.join().unwrap();
    });
}

/// With `deny`, the kernel drops the packets of a flow that an inspector blocks, in both directions, and counts them.
#[towpath_testenv::needs(netns, tcx)]
#[test]
fn a_blocked_flow_is_dropped_by_the_kernel() {
    blocked_by_the_kernel(BRIDGE);
}

pub(super) fn blocked_by_the_kernel(bridge: &str) {
    within(|| {
        let (left, right) = offload_machines(bridge);
        let rules = "add 50 allow layer2 mac-type arp\nadd 100 inspect 1 udp from any to any\n";
        let files = files(&format!("{bridge}{CONFIG}deny = true\n"), rules);
        let engine = Engine::start(files.path());
        let inspector = inspector(&engine, files.path(), by_word);
        let flow = Flow::new(&left, &right, 5001);
        (0..10).for_each(|number| flow.exchange(number));
        assert_eq!(offload(&engine, "entries"), 0);
        flow.left.send(b"no").unwrap();
        // Packets that the inspector has already would pass.
        until(|| engine.json("show stats --json")["stats"]["dropped_by"]["inspector"].as_u64() == Some(1));
        let mut sent = 21;
        let send = |sent: &mut u64| {
            for socket in [&flow.left, &flow.right] {
                socket.send(b"blocked").unwrap();
                *sent += 1;
            }
        };
        // One direction is announced by the verdict, the other by its next packet.
        until(|| {
            send(&mut sent);
            offload(&engine, "entries") == 2
        });
        let explained = engine.json("explain --json in wan udp 10.0.0.1:5001 > 10.0.0.2:5001");
        let note = explained["notes"][0].as_str().unwrap();
        assert!(note.contains("the kernel drops the packets of this flow"), "{note}");
        // Earlier ones have left the sockets' queues.
        until(|| rule(&engine, 100).0 == sent);
        let before = offload(&engine, "dropped_packets");
        (0..50).for_each(|_| send(&mut sent));
        until(|| offload(&engine, "dropped_packets") == before + 100);
        assert_eq!(rule(&engine, 100).0, sent);
        // The verdict goes on under other rules.
        assert!(engine.ctl("add 60 count udp from any to any").status.success());
        until(|| offload(&engine, "renewed") >= 2 && offload(&engine, "entries") == 2);
        let (before, counted) = (offload(&engine, "dropped_packets"), sent);
        (0..20).for_each(|_| send(&mut sent));
        until(|| offload(&engine, "dropped_packets") == before + 40);
        assert_eq!((rule(&engine, 60).0, rule(&engine, 100).0), (40, sent));
        assert_eq!(sent, counted + 40);
        assert!(flow.is_quiet());
        // A rule that passes the flow is effective at once.
        assert!(engine.ctl("add 10 allow udp from any to any").status.success());
        (10..30).for_each(|number| flow.exchange(number));
        assert_eq!(rule(&engine, 10).0, 40);
        assert!(engine.ctl("delete 10").status.success());
        send(&mut sent);
        until(|| rule(&engine, 100).0 == sent);
        assert!(flow.is_quiet());
        engine.stop();
        inspector.join().unwrap();
    });
}

/// TCP with a state: an inspector passes each connection after ten packets, and the kernel forwards the rest.
#[towpath_testenv::needs(netns, tcx, "iperf3")]
#[test]
fn a_connection_is_offloaded_after_ten_packets() {
    within(|| {
        let (left, right) = machines();
        let rules = "add 50 allow layer2 mac-type arp\nadd 100 check-state\nadd 200 inspect 1 tcp from any to any recv wan keep-state\n";
        let config = format!("{BRIDGE}[settings]\ndyn_fin_lifetime = 1\n{CONFIG}");
        let files = files(&config, rules);
        let engine = Engine::start(files.path());
        let mut packets = 0;
        let inspector = inspector(&engine, files.path(), move |_| {
            packets += 1;
            Decision { flow: packets % 10 == 0, ..Verdict::Pass.into() }
        });
        bulk_is_offloaded(&engine, &left, &right);
        engine.stop();
        inspector.join().unwrap();
    });
}
