//! Packets that inspectors send. The inspector is hostile: no packet of it may leave by a port that it does not name, or count as received.

use towpath_gate::PortId;
use towpath_ring::{Header, Inject, Kind, Layers};

use super::*;

/// Injects frames with these headers. Returns the frames that leave and the counters `injected` and `not_injected`.
fn inject(rules: &str, packets: &[(Header, Vec<u8>)]) -> (Vec<Vec<u8>>, [u64; 2]) {
    let inside = Inside { may_inject: true, injected: packets.to_vec(), ..Inside::default() };
    let mut world = World::new(rules, inside);
    let Ok(()) = world.engine.idle();
    world.settle();
    world.assert_clear();
    assert_eq!(world.counts(), [0; 4], "injected packets are no received packets");
    let verdicts = world.engine.queues.get_mut(0).inspectors().next().unwrap().verdicts();
    (world.engine.io.0, [verdicts.injected, verdicts.not_injected])
}

fn header(way: u32, port: u32, link: LinkType) -> Header {
    let mut header = Header::default();
    (header.kind, header.group, header.port) = (Kind::PACKET, way, port);
    header.layers = Layers { link: link.0, ..Layers::default() };
    header
}

const FORWARD: u32 = Inject::Forward as u32;
const BACK: u32 = Inject::Back as u32;
const RULES: &str = "add allow ip from any to any\n";

#[test]
fn an_injected_packet_leaves_with_correct_checksums() {
    let frame = packet("udp 10.0.0.1:4000 > 10.0.0.2:53 len 24");
    let mut wrong = frame.clone();
    // The checksum of the IPv4 header.
    wrong[24] = !wrong[24];
    for way in [FORWARD, BACK] {
        let (sent, counts) = inject(RULES, &[(header(way, 0, LinkType::ETHERNET), wrong.clone())]);
        assert_eq!((sent, counts), (vec![frame.clone()], [1, 0]), "{way}");
    }
}

#[test]
fn invalid_packets_are_counted_and_not_sent() {
    let frame = packet("udp 10.0.0.1:4000 > 10.0.0.2:53");
    let ethernet = |way, port| header(way, port, LinkType::ETHERNET);
    let mut message = ethernet(BACK, 0);
    message.kind = Kind::MESSAGE;
    for (what, header, frame) in [
        ("no such port", ethernet(FORWARD, 7), frame.clone()),
        ("no such port, back", ethernet(BACK, 1 << 16), frame.clone()),
        ("no such way", ethernet(2, 0), frame.clone()),
        ("another link type", header(FORWARD, 0, LinkType::RAW), frame.clone()),
        ("another kind", message, frame.clone()),
        ("empty", ethernet(FORWARD, 0), Vec::new()),
        ("cut", ethernet(FORWARD, 0), frame[..20].to_vec()),
        ("too long", ethernet(BACK, 0), vec![0; (256 << 10) + 1]),
    ] {
        assert_eq!(inject(RULES, &[(header, frame)]), (Vec::new(), [0, 1]), "{what}");
    }
}

/// An injected packet leaves after the packets of its flow that wait, and an engine without packets looks for it.
#[test]
fn an_injected_packet_keeps_the_order_of_its_flow() {
    let first = packet("udp 10.0.0.1:4000 > 10.0.0.2:53 len 8");
    let second = packet("udp 10.0.0.1:4000 > 10.0.0.2:53 len 9");
    let mut world =
        World::new("add inspect 1 ip from any to any\n", Inside { may_inject: true, ..Inside::default() });
    world.burst(&[&first]);
    world.inspector.0.borrow_mut().injected = vec![(header(FORWARD, 0, LinkType::ETHERNET), second.clone())];
    let Ok(()) = world.engine.idle();
    assert!(world.engine.io.0.is_empty());
    world.settle();
    assert_eq!(world.engine.io.0, [first, second.clone()]);
    assert_eq!(world.counts(), [1, 1, 0, 0]);
    world.inspector.0.borrow_mut().injected = vec![(header(FORWARD, 0, LinkType::ETHERNET), second)];
    world.burst(&[]);
    assert_eq!(world.engine.io.0.len(), 3);
}

/// An inspector without permission is not asked.
#[test]
fn nothing_is_read_without_permission() {
    let frame = packet("udp 10.0.0.1:4000 > 10.0.0.2:53");
    let inside = Inside { injected: vec![(header(BACK, 0, LinkType::ETHERNET), frame)], ..Inside::default() };
    let mut world = World::new(RULES, inside);
    let Ok(()) = world.engine.idle();
    assert!(world.engine.io.0.is_empty() && world.inspector.0.borrow().injected.len() == 1);
    assert_eq!(world.engine.topology.interface_of(PortId(0)).map(|(at, _)| at), Some(0));
}
