//! Live ports: replacements of packets by frames of another kind, repeated packets, and keepalives. No engine thread may trust what a
//! parse of the replaced packet found.

use std::time::Instant;

use towpath_gate::{PortId, Routes};

use super::*;
use crate::egress::{PortIo, RouterPort, TxConfig, TxQueue};
use crate::reorder::Limits;

const MTU: usize = 1500;

type Live = Engine<PortIo<Inspector>>;

/// An engine with two ports. The inspector serves queue 1.
fn engine(rules: &str, mode: impl Fn(PortId) -> ForwardMode, router: bool) -> (Gate, Live, Inspector) {
    let ruleset = Ruleset::parse("t", rules).ruleset.unwrap();
    let mut ports = Ports::new();
    let (a, b) = (ports.add("a", Vec::new()), ports.add("b", Vec::new()));
    let mut gate = Gate::new(ruleset, ports, state::Settings::default(), 1);
    let mut routes = Routes::new();
    let gateway = towpath_gate::Gateway::Mac([2; 6]);
    routes.add([10, 0, 0, 0].into(), 8, towpath_gate::Route { port: b, connected: true, gateway });
    gate.set_routes(routes);
    let mut topology = Topology::none();
    topology.add(a, mode(b));
    let tx_queue = || {
        TxQueue::new(TxConfig {
            echo: 0,
            sends: true,
            router: router.then_some(RouterPort { mac: None }),
            mtu: MTU,
            addresses: Vec::new(),
            reorder: Limits::default(),
            link: LinkType::ETHERNET,
        })
    };
    let io = PortIo::new(Instant::now(), vec![tx_queue(), tx_queue()], Box::new(()), None);
    let queues = vec![Queue::new(1, Policy::default())];
    let mut engine = Engine::live(io, gate.walker().unwrap(), topology, queues, Policy::default());
    let inspector = Inspector::default();
    engine.join(1, 1, inspector.clone()).unwrap();
    (gate, engine, inspector)
}

/// The lengths of the frames that leave, and the packets whose replacement is refused, after these replacements in turn.
fn replace(
    (_gate, mut engine, inspector): (Gate, Live, Inspector),
    frames: &[&[u8]],
    replacements: &[&'static [u8]],
) -> (Vec<usize>, u64) {
    let meta = |frame: &[u8]| Meta::new(LinkType::ETHERNET, frame.len());
    let Ok(()) = engine.process_burst(frames.iter().map(|frame| (*frame, meta(frame))));
    for bytes in replacements {
        assert_eq!(inspector.decide_with(Verdict::Replace(bytes).into()), 1);
        let Ok(()) = engine.idle();
    }
    assert!(engine.reorder.is_empty());
    let dropped = engine.totals().drops[DropReason::InvalidVerdict];
    (engine.io.tx_queues()[1].copied().map(|frame| frame.bytes.len()).collect(), dropped)
}

/// An Ethernet frame of `len` bytes with this EtherType, and a payload of the byte `fill`.
fn other(ethertype: u16, fill: u8, len: usize) -> Vec<u8> {
    let mut frame = vec![fill; len];
    frame[..12].fill(2);
    frame[12..14].copy_from_slice(&ethertype.to_be_bytes());
    frame
}

fn leak(frame: Vec<u8>) -> &'static [u8] {
    frame.leak()
}

#[test]
fn a_reassembled_datagram_may_be_replaced_by_any_frame() {
    let datagram = packet("udp 10.0.0.1:4000 > 10.0.0.2:53 len 24 id 7");
    let [first, last] = fragments(&datagram);
    let long = packet("udp 10.0.0.1:4000 > 10.0.0.2:53 len 1473 id 7");
    let length = (datagram.len() - 14 + 2) as u8;
    let in_pppoe =
        [&datagram[..12], &[0x88, 0x64, 0x11, 0, 0, 1, 0, length, 0, 0x21], &datagram[14..]].concat();
    // IEEE 802 local experimental EtherType: not IP.
    let local = |fill, len| leak(other(0x88b5, fill, len));
    type Row<'a> = (&'a [&'static [u8]], &'a [usize], u64);
    #[rustfmt::skip]
    let rows: [Row<'_>; 9] = [
        // replacements                              frames that leave   refused
        (&[leak(datagram.clone())],                  &[50, 50],          0),
        (&[local(0x4f, 34)],                         &[34],              0),
        (&[local(0x40, 34)],                         &[34],              0),
        (&[local(0x44, 34)],                         &[34],              0),
        (&[local(0x45, 1514)],                       &[1514],            0),
        (&[local(0x45, 1515)],                       &[],                2),
        (&[leak(in_pppoe.clone())],                  &[in_pppoe.len()],  0),
        // The first replacement is no datagram that came in fragments.
        (&[local(0x4f, 34), leak(datagram.clone())], &[datagram.len()],  0),
        (&[local(0x4f, 34), leak(long)],             &[],                2),
    ];
    for (replacements, expected, refused) in rows {
        let rules = match replacements.len() {
            1 => "add reass ip from any to any\nadd inspect 1 all from any to any\n",
            _ => {
                "add reass ip from any to any\nadd divert 1 all from any to any\nadd inspect 1 all from any to any\n"
            }
        };
        let world = engine(rules, |xmit| ForwardMode::Bridge { xmit, walk_out: false }, false);
        assert_eq!(
            replace(world, &[&first, &last], replacements),
            (expected.to_vec(), refused),
            "{expected:?}"
        );
    }
}

#[test]
fn a_routed_packet_is_not_replaced_by_one_that_cannot_be_routed() {
    let frame = packet("udp 10.0.0.1:4000 > 10.0.0.2:53");
    // The packet has its route when the inspector replaces it.
    let rules = "add inspect 1 all from any to any out\nadd allow ip from any to any\n";
    for fill in [0, 0x40, 0x41, 0x44, 0x4f, 0x60, 0x6f] {
        for len in [15, 34, 1514, 3000] {
            let world = engine(rules, |_| ForwardMode::Router, true);
            let mut other = other(0x88b5, fill, len);
            // No Don't Fragment, where an IPv4 header would have it.
            other.iter_mut().skip(20).take(2).for_each(|byte| *byte = 0);
            assert_eq!(routed(world, &frame, leak(other)), (vec![], 1), "{fill:#x} {len}");
        }
    }
    let in_mpls = [&frame[..12], &[0x88, 0x47, 0, 0, 1, 64], &frame[14..]].concat();
    #[rustfmt::skip]
    let rows = [
        (packet("udp 10.0.0.1:4000 > 10.0.0.3:53 len 9"), true),
        (packet("udp 169.254.0.1:4000 > 10.0.0.2:53"),    false),
        (packet("udp 10.0.0.1:4000 > 224.0.0.5:53"),      false),
        (in_mpls,                                         false),
    ];
    for (replacement, leaves) in rows {
        let world = engine(rules, |_| ForwardMode::Router, true);
        let (left, dropped) = routed(world, &frame, leak(replacement.clone()));
        assert_eq!((left.len() == 1, dropped == 0), (leaves, leaves), "{replacement:x?}");
    }
}

/// The lengths of the frames that leave, and the number of bad replacements, after `frame` is replaced.
fn routed(
    (_gate, mut engine, inspector): (Gate, Live, Inspector),
    frame: &[u8],
    replacement: &'static [u8],
) -> (Vec<usize>, u64) {
    let Ok(()) = engine.process_burst([(frame, Meta::new(LinkType::ETHERNET, frame.len()))].into_iter());
    assert_eq!(inspector.decide_with(Verdict::Replace(replacement).into()), 1);
    let Ok(()) = engine.idle();
    let dropped = engine.totals().drops[DropReason::BadReplacement];
    assert_eq!(engine.totals().stats.passed, 1 - dropped);
    (engine.io.tx_queues()[1].copied().map(|frame| frame.bytes.len()).collect(), dropped)
}

#[test]
fn a_replacement_is_segmented_only_if_it_is_of_the_same_kind() {
    let tcp = |len| packet(&format!("tcp 10.0.0.1:4000 > 10.0.0.2:80 len {len}"));
    let udp = |len| packet(&format!("udp 10.0.0.1:4000 > 10.0.0.2:53 len {len}"));
    let received = tcp(4000);
    let gso = towpath_port::Gso { kind: towpath_port::GsoKind::Tcp4, size: 1000, ecn: false };
    #[rustfmt::skip]
    let rows = [
        // router, replacement, frames that leave, segmented
        (false, tcp(3000),  1, true),
        (false, tcp(1000),  1, false),
        (false, udp(1000),  1, false),
        // No frame of this length leaves by the port.
        (false, udp(3000),  0, true),
        (true,  tcp(3000),  1, true),
        (true,  udp(1000),  1, false),
        // In fragments.
        (true,  udp(3000),  3, false),
    ];
    for (router, replacement, expected, segmented) in rows {
        let mode = |xmit| match router {
            true => ForwardMode::Router,
            false => ForwardMode::Bridge { xmit, walk_out: false },
        };
        let (_gate, mut engine, inspector) =
            engine("add inspect 1 all from any to any in\nadd allow ip from any to any\n", mode, router);
        let mut meta = Meta::new(LinkType::ETHERNET, received.len());
        meta.port.offload.gso = Some(gso);
        let Ok(()) = engine.process_burst([(&received[..], meta)].into_iter());
        let mut replacement = replacement;
        // May be fragmented.
        replacement[20] = 0;
        let len = replacement.len();
        assert_eq!(inspector.decide_with(Verdict::Replace(leak(replacement)).into()), 1);
        let Ok(()) = engine.idle();
        let left: Vec<_> = engine.io.tx_queues()[1].copied().collect();
        assert_eq!(left.len(), expected, "{router} {len}");
        assert!(left.iter().all(|left| left.meta.offload.gso == segmented.then_some(gso)), "{router} {len}");
        let invalid = engine.totals().drops[DropReason::InvalidVerdict];
        assert_eq!(invalid, u64::from(expected == 0), "{router} {len}");
    }
}

#[test]
fn a_repeated_packet_is_charged_once() {
    // The bucket has room for one packet.
    let rules = "pipe 1 config bw 8Kbit/s burst 1000\nadd pipe 1 udp from any to any in\n\
                 add divert 1 udp from any to any out\nadd allow ip from any to any\n";
    let (_gate, mut engine, inspector) =
        engine(rules, |xmit| ForwardMode::Bridge { xmit, walk_out: true }, false);
    let frame = packet("udp 10.0.0.1:4000 > 10.0.0.2:53 len 972");
    let Ok(()) = engine.process_burst([(&frame[..], Meta::new(LinkType::ETHERNET, frame.len()))].into_iter());
    for verdict in [Verdict::Repeat, Verdict::Pass] {
        assert_eq!(inspector.decide_with(verdict.into()), 1, "{verdict:?}");
        let Ok(()) = engine.idle();
    }
    assert_eq!(engine.totals().drops[DropReason::Policed], 0);
    assert_eq!(engine.io.tx_queues()[1].copied().count(), 1);
}

#[test]
fn a_repeated_packet_has_the_mark_of_the_verdict() {
    let rules = "add allow udp from any to any mark 7\nadd divert 1 udp from any to any in\nadd deny ip from any to any\n";
    let (_gate, mut engine, inspector) =
        engine(rules, |xmit| ForwardMode::Bridge { xmit, walk_out: false }, false);
    let frame = packet("udp 10.0.0.1:4000 > 10.0.0.2:53 len 100");
    let Ok(()) = engine.process_burst([(&frame[..], Meta::new(LinkType::ETHERNET, frame.len()))].into_iter());
    let repeat = Decision { mark: 7, mask: u32::MAX, ..Verdict::Repeat.into() };
    assert_eq!(inspector.decide_with(repeat), 1);
    let Ok(()) = engine.idle();
    assert_eq!((inspector.decide_with(Verdict::Pass.into()), engine.totals().stats.passed), (0, 1));
}

#[test]
fn a_keepalive_stays_in_its_zone() {
    // The ports are in zone 0.
    for (zone, expected) in [(0, 1), (2, 0)] {
        let (_gate, mut engine, _) = engine("add allow ip from any to any\n", |_| ForwardMode::Router, true);
        let ends = towpath_wire::Ends::V4([10, 0, 0, 1].into(), [10, 0, 0, 2].into());
        let flow = towpath_wire::Flow { ends, proto: 6, src_port: 4000, dst_port: 80, zone };
        let Ok(()) = engine.send_keepalive(&state::Keepalive { flow, seq: 1, ack: 1 });
        assert_eq!(engine.io.tx_queues()[1].copied().count(), expected, "zone {zone}");
    }
}
