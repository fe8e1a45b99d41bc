//! Flow offload by XDP programs: the tests of `af_packet` ports with `af_xdp` ports.

use towpath_port::netns::{ip, within};

use super::machines::*;
use super::offload::{self as same, Flow, entries, offload, offload_machines};
use super::{offload_fail, offload_verdicts, offload_vlan};
use crate::support::until;

/// A bridge of `af_xdp` ports in generic mode.
fn generic() -> String {
    BRIDGE.replace("af_packet", "af_xdp")
}

fn native() -> String {
    BRIDGE.replace("\"af_packet\"", "\"af_xdp\"\nmode = \"native\"")
}

#[towpath_testenv::needs(netns, xdp, "ethtool")]
#[test]
fn the_counters_are_those_of_the_engine_on_xdp() {
    same::counters_are_equal(&generic());
}

#[towpath_testenv::needs(netns, xdp, "ethtool")]
#[test]
fn the_counters_are_those_of_the_engine_on_native_xdp() {
    same::counters_are_equal(&native());
}

/// Packets of one port are redirected by XDP, and those of the other by tc.
#[towpath_testenv::needs(netns, xdp, tcx, "ethtool")]
#[test]
fn a_bridge_has_ports_of_both_drivers() {
    same::counters_are_equal(&BRIDGE.replacen("af_packet", "af_xdp", 1));
}

#[towpath_testenv::needs(netns, xdp, "ethtool")]
#[test]
fn entries_change_under_traffic_on_xdp() {
    same::entries_change(&generic());
}

#[towpath_testenv::needs(netns, xdp, "ethtool")]
#[test]
fn entries_change_under_traffic_on_native_xdp() {
    same::entries_change(&native());
}

#[towpath_testenv::needs(netns, xdp, "ethtool")]
#[test]
fn a_rule_that_denies_ends_an_offloaded_flow_on_xdp() {
    same::denied_at_once(&generic());
}

#[towpath_testenv::needs(netns, xdp)]
#[test]
fn tagged_frames_of_a_bridge_are_offloaded_on_xdp() {
    offload_vlan::tagged_frames(&generic());
}

#[towpath_testenv::needs(netns, xdp)]
#[test]
fn a_vlan_with_a_port_has_its_own_entries_on_xdp() {
    offload_vlan::vlan_with_a_port(&generic());
}

#[towpath_testenv::needs(netns, xdp, "ethtool")]
#[test]
fn routed_flows_are_rewritten_on_xdp() {
    same::routed("af_xdp");
}

#[towpath_testenv::needs(netns, xdp, ipv6, "ethtool")]
#[test]
fn ipv6_is_offloaded_on_xdp() {
    same::ipv6(&generic());
}

#[towpath_testenv::needs(netns, xdp, "ethtool")]
#[test]
fn flows_are_offloaded_after_an_upgrade_on_xdp() {
    same::upgrades(&generic());
}

#[towpath_testenv::needs(netns, xdp, "ethtool")]
#[test]
fn a_blocked_flow_is_dropped_by_the_xdp_program() {
    offload_verdicts::blocked_by_the_kernel(&generic());
}

#[towpath_testenv::needs(netns, xdp, bpffs, "ethtool")]
#[test]
fn offloaded_flows_outlive_a_killed_engine_on_xdp() {
    offload_fail::flows_outlive(&generic());
}

#[towpath_testenv::needs(netns, xdp, bpffs, "ethtool")]
#[test]
fn offloaded_flows_outlive_a_killed_engine_after_an_upgrade_on_xdp() {
    offload_fail::upgraded(&generic(), true);
}

#[towpath_testenv::needs(netns, xdp, bpffs, "ethtool")]
#[test]
fn the_lifetime_of_a_flow_ends_without_an_engine_on_xdp() {
    offload_fail::lifetime_ends(&generic());
}

#[towpath_testenv::needs(netns, xdp, "ethtool")]
#[test]
fn closed_flows_end_with_a_killed_engine_on_xdp() {
    offload_fail::closed_flows_end(&generic());
}

/// Frames whose checksum a host has left to its interface stay in the engine, which completes it.
#[towpath_testenv::needs(netns, xdp)]
#[test]
fn partial_checksums_stay_in_the_engine() {
    within(|| {
        let (left, right) = machines();
        let files = files(
            &format!("{}[offload]\nrules = \"all\"\n", generic()),
            "add 50 allow layer2 mac-type arp\nadd 100 allow udp from any to any keep-state\n",
        );
        let engine = Engine::start(files.path());
        let flow = Flow::new(&left, &right, 5001);
        (0..10).for_each(|number| flow.exchange(number));
        entries(&engine, 2);
        let before = engine.json("show offload --json")["offload"]["missed"]["partial"].as_u64().unwrap();
        (10..20).for_each(|number| flow.exchange(number));
        let shown = engine.json("show offload --json");
        assert_eq!(shown["offload"]["missed"]["partial"], before + 20, "{shown}");
        assert_eq!(offload(&engine, "forwarded_packets"), 0);
        engine.stop();
    });
}

/// A native program cannot redirect to an interface whose driver does not take its frames. `explain` says so; the engine forwards them.
#[towpath_testenv::needs(netns, xdp, "ethtool")]
#[test]
fn native_programs_need_an_egress_that_takes_their_frames() {
    within(|| {
        let (left, right) = offload_machines(&native());
        right.run(|| towpath_port::netns::run("ethtool", "-K r0 gro off"));
        let files = files(
            &format!("{}[offload]\nrules = \"all\"\n", native()),
            "add 50 allow layer2 mac-type arp\nadd 100 allow udp from any to any keep-state\n",
        );
        let engine = Engine::start(files.path());
        let flow = Flow::new(&left, &right, 5001);
        (0..10).for_each(|number| flow.exchange(number));
        // The replies leave by an interface that takes them.
        entries(&engine, 1);
        let explained = engine.json("explain --json in wan udp 10.0.0.1:5001 > 10.0.0.2:5001");
        let note = explained["notes"][0].as_str().unwrap();
        assert!(
            note.contains("takes no frames from native XDP programs") && note.ends_with("(native_egress)"),
            "{note}"
        );
        // `show offload` has the same reason.
        let shown = engine.json("show offload --json");
        let reasons = shown["offload"]["not_offloaded"].as_object().unwrap();
        let counted: Vec<_> =
            reasons.iter().filter(|(_, count)| count.as_u64() > Some(0)).map(|(name, _)| name).collect();
        assert_eq!(counted, ["native_egress"], "{shown}");
        let shown = engine.ctl("show offload").stdout;
        let text = String::from_utf8(shown).unwrap();
        assert!(text.contains("not offloaded") && text.contains("native egress"), "{text}");
        right.run(|| towpath_port::netns::run("ethtool", "-K r0 gro on"));
        let mut number = 10;
        until(|| {
            flow.exchange(number);
            number += 1;
            offload(&engine, "entries") == 2
        });
        engine.stop();
    });
}

/// Frames of several buffers (XDP frags) are forwarded unchanged: the MTU is 9000, and a buffer has less than a page.
#[towpath_testenv::needs(netns, xdp, "ethtool")]
#[test]
fn frames_of_several_buffers_are_forwarded() {
    long_frames(&generic());
}

#[towpath_testenv::needs(netns, xdp, "ethtool")]
#[test]
fn frames_of_several_buffers_are_forwarded_by_native_programs() {
    long_frames(&native());
}

fn long_frames(bridge: &str) {
    within(|| {
        let (left, right) = offload_machines(bridge);
        left.run(|| ip("link set l0 mtu 9000"));
        right.run(|| ip("link set r0 mtu 9000"));
        ["wan", "lan"].into_iter().for_each(|name| ip(&format!("link set {name} mtu 9000")));
        let files = files(
            &format!("{bridge}[offload]\nrules = \"all\"\n"),
            "add 50 allow layer2 mac-type arp\nadd 100 allow udp from any to any keep-state\n",
        );
        let engine = Engine::start(files.path());
        let flow = Flow::new(&left, &right, 5001);
        (0..10).for_each(|number| flow.exchange(number));
        entries(&engine, 2);
        (10..20).for_each(|number| flow.exchange(number));
        let before = offload(&engine, "forwarded_packets");
        let mut buffer = vec![0; 1 << 16];
        // The last one has as many bytes as the MTU permits.
        let lengths = [1000, 2958, 2959, 3400, 4000, 4500, 6000, 8192, 8972];
        for (seed, length) in lengths.into_iter().enumerate() {
            let sent = &bytes(seed as u8)[..length];
            for (from, to) in [(&flow.left, &flow.right), (&flow.right, &flow.left)] {
                from.send(sent).unwrap();
                let len = to.recv(&mut buffer).unwrap();
                assert!(buffer[..len] == *sent, "{length} bytes, {len} arrive");
            }
        }
        let shown = engine.json("show offload --json");
        assert_eq!(offload(&engine, "forwarded_packets"), before + 2 * lengths.len() as u64, "{shown}");
        assert!(flow.is_quiet());
        engine.stop();
    });
}
