//! Flow offload of frames with VLAN tags.

use towpath_gate::PacketSpec;
use towpath_port::af_packet::{self, Socket};
use towpath_port::netns::within;
use towpath_port::{Burst, Frame, LinkType, Port, Received};

use super::machines::*;
use super::offload::{entries, offload, rule};
use crate::support::until;

const RULES: &str =
    "add 50 allow layer2 mac-type arp\nadd 100 check-state\nadd 200 allow udp from any to any keep-state\n";

/// The interfaces of both machines, as packet sockets.
struct Machines {
    left: Socket,
    right: Socket,
}

impl Machines {
    /// Sends a frame and waits until it arrives as it is, once.
    fn pass(&mut self, frame: &[u8]) {
        let mut burst = Burst::new(64);
        let mut arrived = 0;
        assert_eq!(self.left.send(&mut [Frame::new(frame, LinkType::ETHERNET)].into_iter()).unwrap(), 1);
        until(|| {
            while self.right.receive(&mut burst).unwrap() == Received::Frames {
                arrived += burst.iter().filter(|received| received.bytes == frame).count();
            }
            arrived > 0
        });
        assert_eq!(arrived, 1);
    }
}

fn frame(words: &str) -> Vec<u8> {
    PacketSpec::parse(words).unwrap().frame
}

/// A bridge forwards all tags alike, if no VLAN has a port of its own. Frames keep their tag.
#[towpath_testenv::needs(netns, tcx)]
#[test]
fn tagged_frames_of_a_bridge_are_offloaded() {
    tagged_frames(BRIDGE);
}

pub(super) fn tagged_frames(bridge: &str) {
    within(|| {
        let (left, right) = machines();
        let mut machines = Machines {
            left: left.run(|| Socket::open(af_packet::Config::new("l0")).unwrap()),
            right: right.run(|| Socket::open(af_packet::Config::new("r0")).unwrap()),
        };
        let files = files(&format!("{bridge}[offload]\nrules = \"all\"\n"), RULES);
        let engine = Engine::start(files.path());
        let [tagged, other, plain] = ["vlan 5", "vlan 6", ""]
            .map(|tag| frame(&format!("udp 10.0.0.1:5001 > 10.0.0.3:5001 len 100 {tag}")));
        (0..10).for_each(|_| machines.pass(&tagged));
        entries(&engine, 2);
        let before = offload(&engine, "forwarded_packets");
        for _ in 0..10 {
            [&tagged, &other, &plain].into_iter().for_each(|frame| machines.pass(frame));
        }
        assert_eq!(offload(&engine, "forwarded_packets"), before + 30);
        assert_eq!(rule(&engine, 200).0, 40);
        engine.stop();
    });
}

/// A VLAN with a port of its own has entries of its own: rules see its port.
#[towpath_testenv::needs(netns, tcx)]
#[test]
fn a_vlan_with_a_port_has_its_own_entries() {
    vlan_with_a_port(BRIDGE);
}

pub(super) fn vlan_with_a_port(bridge: &str) {
    within(|| {
        let (left, right) = machines();
        let mut machines = Machines {
            left: left.run(|| Socket::open(af_packet::Config::new("l0")).unwrap()),
            right: right.run(|| Socket::open(af_packet::Config::new("r0")).unwrap()),
        };
        let config = bridge.replace("[port.lan]", "[port.wan.vlan.blue]\nid = 7\nzone = 9\n[port.lan]");
        let config = config.replace("[[bridge]]", "[port.lan.vlan.green]\nid = 7\nzone = 9\n[[bridge]]");
        let rules = format!("{RULES}add 60 count udp from any to any in recv blue\n");
        let files = files(&format!("{config}[offload]\nrules = \"all\"\n"), &rules);
        let engine = Engine::start(files.path());
        let [own, other, plain] = ["vlan 7", "vlan 5", ""]
            .map(|tag| frame(&format!("udp 10.0.0.1:5001 > 10.0.0.3:5001 len 100 {tag}")));
        (0..10).for_each(|_| machines.pass(&own));
        entries(&engine, 2);
        (0..10).for_each(|_| machines.pass(&plain));
        entries(&engine, 4);
        let before = offload(&engine, "forwarded_packets");
        for _ in 0..10 {
            [&own, &other, &plain].into_iter().for_each(|frame| machines.pass(frame));
        }
        // The port `wan` has the packets of other VLANs and those without a tag: the former stay in the engine.
        assert_eq!(offload(&engine, "forwarded_packets"), before + 20);
        assert_eq!((rule(&engine, 60).0, rule(&engine, 200).0), (20, 50));
        engine.stop();
    });
}
