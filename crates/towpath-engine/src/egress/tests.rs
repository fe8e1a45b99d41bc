//! Tests of frames that leave, of fragments, and of losses.

use super::*;
use crate::reorder::Limits;

const OWN: [u8; 6] = [2, 0, 0, 0, 0, 1];
const OTHER: [u8; 6] = [2, 0, 0, 0, 0, 2];

fn tx_queue(mac: Option<[u8; 6]>) -> TxQueue {
    let router = mac.map(|mac| RouterPort { mac: Some(mac) });
    let reorder = Limits::default();
    TxQueue::new(TxConfig {
        sends: true,
        router,
        mtu: usize::MAX,
        addresses: Vec::new(),
        echo: 1000,
        reorder,
        link: LinkType::ETHERNET,
    })
}

fn frame(to: [u8; 6]) -> Vec<u8> {
    let mut frame = to.to_vec();
    frame.extend([2, 0, 0, 0, 0, 9, 8, 0]);
    frame.extend([0x45, 0, 0, 28, 0, 7, 0, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 9, 0, 2]);
    frame.extend([4, 0, 0, 53, 0, 8, 0, 0]);
    frame
}

fn routed(frame: &[u8], interface: u32, next_hop: NextHop) -> Meta {
    Meta {
        interface,
        egress: Egress::Port(PortId(1)),
        next_hop,
        network: 14,
        ..Meta::new(LinkType::ETHERNET, frame.len())
    }
}

#[test]
fn a_router_accepts_and_routes_frames_for_its_own_address() {
    let tx_queues = vec![tx_queue(Some(OWN)), tx_queue(Some(OWN)), tx_queue(None)];
    let mut io = PortIo::<Infallible>::new(Instant::now(), tx_queues, Box::new(()), None);
    #[rustfmt::skip]
    let rows = [
        // to          interface  accepted  routed
        (OWN,          0,         true,     true),
        (OTHER,        0,         false,    false),
        ([0xff; 6],    0,         true,     false),
        ([1, 0, 0x5e, 0, 0, 1], 0, true,    false),
        (OTHER,        2,         true,     true),
    ];
    for (to, interface, accepted, is_routed) in rows {
        let frame = frame(to);
        let meta = routed(&frame, interface, NextHop::Mac([2; 6]));
        let other = |io: &PortIo<_>| io.tx_queues[interface as usize].drops.events.other_host;
        let before = other(&io);
        assert_eq!(io.accepts(&frame, &meta), accepted, "{to:?}");
        assert_eq!(other(&io) == before, accepted, "{to:?}");
        if accepted {
            let Ok(()) = io.send(&frame, &meta);
            let not_ours = io.take_drops().map_or(0, |drops| drops[DropReason::NotOurs]);
            assert_eq!(not_ours, u64::from(!is_routed), "{to:?}");
        }
    }
}

/// The fragments of a UDP datagram of 3,000 bytes, and its number of bytes.
fn reassembled(identification: u8, fragment_len: u16) -> (Vec<u8>, Meta) {
    let mut frame = frame(OWN);
    frame.truncate(34);
    frame[16..18].copy_from_slice(&3020_u16.to_be_bytes());
    frame[19] = identification;
    frame.extend((0..3000).map(|at| (at / 7) as u8));
    let meta = Meta { packets: 3, fragment_len, ..routed(&frame, 0, NextHop::Mac([2; 6])) };
    (frame, meta)
}

#[test]
fn a_reassembled_datagram_leaves_in_fragments() {
    #[rustfmt::skip]
    let rows = [
        // bridge, fragment_len, MTU, Don't Fragment: IP packets that leave
        (true,  1500, 1500, false, &[1500, 1500, 60][..]),
        (true,  1500, 1500, true,  &[1500, 1500, 60]),
        (true,  1020, 1500, false, &[1020, 1020, 1020]),
        (true,  1500, 1020, false, &[1020, 1020, 1020]),
        (true,  1500, 1020, true,  &[]),
        (false, 1500, 1500, false, &[1500, 1500, 60]),
        (false, 1500, 1500, true,  &[1500, 1500, 60]),
        (false, 1020, 1500, false, &[1020, 1020, 1020]),
        (false, 1500, 1020, false, &[1020, 1020, 1020]),
        // The sender must learn the MTU.
        (false, 1500, 1020, true,  &[]),
        (false, 1500, 9000, false, &[3020]),
    ];
    for (bridge, fragment_len, mtu, dont_fragment, expected) in rows {
        let mac = (!bridge).then_some(OWN);
        let mut io =
            PortIo::<Infallible>::new(Instant::now(), vec![tx_queue(mac), tx_queue(mac)], Box::new(()), None);
        io.tx_queue_mut(1).set_mtu(mtu);
        let (mut frame, meta) = reassembled(9, fragment_len);
        frame[20] = if dont_fragment { 0x40 } else { 0 };
        let Ok(()) = io.send(&frame, &meta);
        let left: Vec<_> = io.tx_queues[1].copied().map(|frame| frame.bytes.to_vec()).collect();
        assert_eq!(left.iter().map(|frame| frame.len() - 14).collect::<Vec<_>>(), expected, "{bridge} {mtu}");
        if expected.is_empty() {
            assert_eq!(io.take_drops().map(|drops| drops[DropReason::TooLong]), Some(3));
            continue;
        }
        assert_eq!(io.take_drops(), None);
        // The fragments are the datagram.
        let data: Vec<u8> = left.iter().flat_map(|frame| frame[34..].to_vec()).collect();
        assert_eq!(data, frame[34..]);
        assert!(
            left.iter()
                .all(|frame| frame[18..20] == [0, 9] && frame[20] & 0x40 == u8::from(dont_fragment) << 6)
        );
    }
    // A frame that has no IPv4 header there leaves unchanged, or not at all.
    for (first, len, expected) in
        [(0, 20, true), (0x4f, 34, true), (0x40, 34, true), (0x40, 1514, true), (0x40, 1515, false)]
    {
        let mut io = PortIo::<Infallible>::new(
            Instant::now(),
            vec![tx_queue(None), tx_queue(None)],
            Box::new(()),
            None,
        );
        io.tx_queue_mut(1).set_mtu(1500);
        let (_, meta) = reassembled(9, 1500);
        let Ok(()) = io.send(&vec![first; len], &meta);
        let left: Vec<_> = io.tx_queues[1].copied().map(|frame| frame.bytes.len()).collect();
        assert_eq!(left, if expected { vec![len] } else { vec![] }, "{first:#x} {len}");
        let dropped = io.take_drops().map_or(0, |drops| drops[DropReason::TooLong]);
        assert_eq!(dropped, if expected { 0 } else { 3 }, "{first:#x} {len}");
    }
}

/// A port that is full, down, or refuses long frames.
struct Unwilling(Vec<Vec<u8>>);

impl Port for Unwilling {
    fn name(&self) -> &'static str {
        "p"
    }

    fn caps(&self) -> towpath_port::Caps {
        towpath_port::Caps::default()
    }

    fn receive(&mut self, _: &mut Burst) -> Result<towpath_port::Received, Error> {
        Ok(towpath_port::Received::Nothing)
    }

    /// By the last byte: 0 is sent, 1 goes down with the interface, 2 is too long; before 3, the port is full.
    fn send<'a>(
        &mut self,
        frames: &mut dyn Iterator<Item = towpath_port::Frame<'a>>,
    ) -> Result<usize, Error> {
        let mut taken = 0;
        for frame in frames {
            match frame.bytes.last() {
                Some(1) => self.0.push(frame.bytes.to_vec()),
                Some(2) => {
                    return Err(Error::TooLong { name: "p".into(), len: frame.bytes.len(), max: 1 });
                }
                Some(3) => return Ok(taken),
                _ => {}
            }
            taken += 1;
        }
        Ok(taken)
    }

    fn take_refused(&mut self, each: &mut dyn FnMut(TxDrop, &[u8])) {
        self.0.drain(..).for_each(|frame| each(TxDrop::Down, &frame));
    }

    fn stats(&mut self) -> towpath_port::Stats {
        towpath_port::Stats::default()
    }
}

/// Frames that a port does not send are counted once, and shown to traces and to the log.
#[test]
fn frames_that_a_port_does_not_send_are_counted_and_shown() {
    use DropReason::{PortDown, TooLong, TxFull};
    for all in [false, true] {
        let mut io = PortIo::<Infallible>::new(
            Instant::now(),
            vec![tx_queue(None), tx_queue(None)],
            Box::new(()),
            None,
        );
        io.trace_lost_frames(all);
        for kind in [0, 2, 1, 2, 0, 3, 0, 1] {
            let mut frame = frame(OWN);
            frame.push(kind);
            let meta = Meta { interface: 0, ..routed(&frame, 0, NextHop::None) };
            let Ok(()) = io.send(&frame, &meta);
        }
        // A frame of the router itself is not a packet.
        let Ok(()) = io.send(&[3], &Meta { packets: 0, ..routed(&[3], 0, NextHop::None) });
        let mut complaints = 0;
        io.transmit(1, &mut Unwilling(Vec::new()), &Burst::new(1), |_| complaints += 1);
        let drops = io.take_drops().unwrap();
        // The port counts the frame that it took while its interface was down.
        assert_eq!(drops.iter().collect::<Vec<_>>(), [(TooLong, 2), (TxFull, 3)]);
        assert_eq!(io.tx_queues()[1].drops().drops, drops);
        assert_eq!(complaints, 2);
        let mut shown = Vec::new();
        let left_out = io.take_lost_frames(&mut |reason, frame, meta| {
            assert_eq!(
                (meta.interface, meta.egress),
                (if reason == PortDown { 1 } else { 0 }, Egress::Port(PortId(1)))
            );
            shown.push((reason, frame.last().copied().unwrap()));
        });
        let expected: &[_] = match all {
            true => &[(TooLong, 2), (TooLong, 2), (TxFull, 3), (TxFull, 0), (TxFull, 1), (PortDown, 1)],
            false => &[(TooLong, 2), (TxFull, 3), (PortDown, 1)],
        };
        assert_eq!((&shown[..], left_out), (expected, 0));
        io.count_port_drops(1, [0, 1, 0, 0, 0, 0, 0, 0]);
        assert_eq!(io.take_drops().unwrap().iter().collect::<Vec<_>>(), [(PortDown, 1)]);
        assert_eq!((io.take_drops(), io.take_lost_frames(&mut |_, _, _| panic!("shown twice"))), (None, 0));
    }
}

/// Each packet that does not leave is dropped for one reason, and no packet is dropped twice.
#[test]
fn packets_that_do_not_leave_are_dropped_by_reason() {
    let rows = [
        (NextHop::Mac([2; 6]), usize::MAX, 64, None),
        (NextHop::None, usize::MAX, 64, Some(DropReason::NoNextHop)),
        (NextHop::Neighbor([10, 9, 0, 2].into()), usize::MAX, 64, Some(DropReason::NoNextHop)),
        (NextHop::Mac([2; 6]), 20, 64, Some(DropReason::TooLong)),
        (NextHop::Mac([2; 6]), usize::MAX, 1, Some(DropReason::TtlExceeded)),
    ];
    for (next_hop, mtu, ttl, expected) in rows {
        let mut io = PortIo::<Infallible>::new(
            Instant::now(),
            vec![tx_queue(Some(OWN)), tx_queue(Some(OWN))],
            Box::new(()),
            None,
        );
        io.tx_queue_mut(1).set_mtu(mtu);
        let mut frame = frame(OWN);
        frame[22] = ttl;
        let meta = Meta { packets: 3, ..routed(&frame, 0, next_hop) };
        let Ok(()) = io.send(&frame, &meta);
        let drops = io.take_drops();
        assert_eq!(drops.is_some(), expected.is_some(), "{expected:?}");
        let drops = drops.unwrap_or_default();
        assert_eq!(expected.map_or(0, |reason| drops[reason]), drops.total());
        assert_eq!(drops.total(), if expected.is_some() { 3 } else { 0 });
        assert_eq!(io.take_drops(), None);
    }
}
