use super::*;
use crate::conformance::{self, Shape, Wire};
use crate::netns::{ip, settled, until, veth, within};
use crate::{Checksum, Gso, GsoKind, LinkType, driver};

mod exclusive;

/// One block per frame that is sent before the first is received: the kernel's timer may close a block after each frame.
fn config(interface: &str) -> Config {
    Config { block_size: 128 << 10, blocks: conformance::FRAMES as u32, ..Config::new(interface) }
}

fn open(interface: &str) -> Socket {
    Socket::open(config(interface)).unwrap()
}

/// From one end of a veth pair to the other.
struct Pair {
    tx: Socket,
    rx: Socket,
}

impl Pair {
    fn wire(vnet_hdr: bool) -> Box<dyn Wire> {
        let end = |name| Socket::open(Config { vnet_hdr, ..config(name) }).unwrap();
        Box::new(Self { tx: end("v0"), rx: end("v1") })
    }
}

impl Wire for Pair {
    fn shape(&self) -> Shape {
        Shape { link: LinkType::ETHERNET, longest: 9014, recorded: false }
    }

    fn tx(&mut self) -> &mut dyn Port {
        &mut self.tx
    }

    fn into_rx(self: Box<Self>) -> Box<dyn Port> {
        Box::new(self.rx)
    }
}

#[towpath_testenv::needs(netns)]
#[test]
fn conforms() {
    within(|| {
        veth("v0", "v1");
        ip("link set v0 mtu 9000");
        ip("link set v1 mtu 9000");
        conformance::check(|| Pair::wire(false));
        conformance::check(|| Pair::wire(true));
    });
}

fn frame(len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    bytes[..14].copy_from_slice(&[2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 0x88, 0xb5]);
    bytes
}

/// The next burst with frames.
fn next(port: &mut Socket, burst: &mut Burst) {
    while port.receive(burst).unwrap() != Received::Frames {
        let mut fds =
            [rustix::event::PollFd::from_borrowed_fd(port.poll_fd().unwrap(), rustix::event::PollFlags::IN)];
        let timeout = rustix::event::Timespec { tv_sec: 60, tv_nsec: 0 };
        assert!(rustix::event::poll(&mut fds, Some(&timeout)).unwrap() > 0, "nothing came");
    }
}

#[towpath_testenv::needs(netns)]
#[test]
fn frames_that_this_machine_sends_are_not_received() {
    within(|| {
        veth("v0", "v1");
        let (mut one, mut other) = (open("v0"), open("v1"));
        let bytes = frame(60);
        one.send(&mut std::iter::once(Frame::new(&bytes, LinkType::ETHERNET))).unwrap();
        other.send(&mut std::iter::once(Frame::new(&bytes[..50], LinkType::ETHERNET))).unwrap();
        let mut burst = Burst::new(8);
        next(&mut one, &mut burst);
        assert_eq!(burst.iter().map(|frame| frame.bytes.len()).collect::<Vec<_>>(), [50]);
    });
}

#[towpath_testenv::needs(netns)]
#[test]
fn a_vlan_tag_that_the_kernel_took_off_is_put_back() {
    within(|| {
        veth("v0", "v1");
        let (mut tx, mut rx) = (open("v0"), open("v1"));
        for tag in [[0x81, 0x00, 0, 7], [0x88, 0xa8, 0x60, 9]] {
            let mut bytes = frame(100);
            bytes[12..16].copy_from_slice(&tag);
            bytes[16..18].copy_from_slice(&[0x88, 0xb5]);
            tx.send(&mut std::iter::once(Frame::new(&bytes, LinkType::ETHERNET))).unwrap();
            let mut burst = Burst::new(8);
            next(&mut rx, &mut burst);
            assert_eq!(burst.frame(0).bytes, bytes);
        }
    });
}

#[towpath_testenv::needs(netns)]
#[test]
fn an_interface_goes_down_and_comes_back() {
    within(|| {
        veth("v0", "v1");
        let (mut one, mut other) = (open("v0"), open("v1"));
        let bytes = frame(60);
        let pass = |tx: &mut Socket, rx: &mut Socket| {
            tx.send(&mut std::iter::once(Frame::new(&bytes, LinkType::ETHERNET))).unwrap();
            next(rx, &mut Burst::new(8));
        };
        pass(&mut one, &mut other);

        ip("link set v0 down");
        until(|| one.state().unwrap() == State::Down);
        until(|| other.state().unwrap() == State::Down); // no carrier
        assert_eq!(one.send(&mut std::iter::once(Frame::new(&bytes, LinkType::ETHERNET))).unwrap(), 1);
        assert_eq!(one.stats().port_down, 1);
        ip("link set v0 up");
        until(|| one.state().unwrap() == State::Up);
        ["v0", "v1"].into_iter().for_each(settled);
        pass(&mut one, &mut other);
        pass(&mut other, &mut one);

        ip("link del v0");
        assert_eq!(one.state().unwrap(), State::Gone);
        assert_eq!(one.receive(&mut Burst::new(8)).unwrap(), Received::Nothing);
        let error = one.reopen().unwrap_err();
        assert!(matches!(error, Error::NoInterface { .. }), "{error}");
        veth("v0", "v1");
        one.reopen().unwrap();
        other.reopen().unwrap();
        pass(&mut one, &mut other);
        assert_eq!(one.stats().sent, 3, "counters go on");
    });
}

#[towpath_testenv::needs(netns)]
#[test]
fn a_changed_mtu_is_obeyed() {
    within(|| {
        veth("v0", "v1");
        let (mut tx, mut rx) = (open("v0"), open("v1"));
        let bytes = frame(4014);
        let once = || std::iter::once(Frame::new(&bytes, LinkType::ETHERNET));
        assert!(matches!(tx.send(&mut once()), Err(Error::TooLong { max: 1514, .. })));
        ip("link set v0 mtu 9000");
        ip("link set v1 mtu 9000");
        assert_eq!(tx.state().unwrap(), State::Up);
        assert_eq!(tx.caps().max_frame, Some(9014));
        tx.send(&mut once()).unwrap();
        let mut burst = Burst::new(8);
        next(&mut rx, &mut burst);
        assert_eq!(burst.frame(0).bytes.len(), 4014);
        ip("link set v0 mtu 1500"); // not looked at yet: the kernel refuses
        assert_eq!(tx.send(&mut once()).unwrap(), 1);
        assert_eq!(tx.stats().tx_refused_emsgsize, 1);
        let mut refused = Vec::new();
        tx.take_refused(&mut |reason, frame| refused.push((reason, frame.to_vec())));
        assert_eq!(refused, [(crate::TxDrop::Emsgsize, bytes)]);
    });
}

#[towpath_testenv::needs(netns)]
#[test]
fn a_full_ring_is_counted() {
    within(|| {
        veth("v0", "v1");
        let mut tx = open("v0");
        let small = Config { block_size: 128 << 10, blocks: 2, ..Config::new("v1") };
        let mut rx = Socket::open(small).unwrap();
        let bytes = frame(1000);
        // More than the ring has room for, and fewer than the kernel's own queue in front of it (net.core.netdev_max_backlog).
        let sent = tx.send(&mut std::iter::repeat_n(Frame::new(&bytes, LinkType::ETHERNET), 600)).unwrap();
        assert_eq!((sent, tx.stats().dropped()), (600, 0));
        // The kernel may deliver them later. The test receives nothing before the ring was full.
        until(|| rx.stats().rx_full > 0);
        let mut burst = Burst::new(4096);
        let mut received = 0;
        until(|| {
            let _ = rx.receive(&mut burst).unwrap();
            received += burst.len();
            received as u64 + rx.stats().rx_full >= sent as u64
        });
        assert_eq!(received as u64 + rx.stats().dropped(), 600);
    });
}

#[towpath_testenv::needs(netns)]
#[test]
fn two_sockets_share_an_interface() {
    within(|| {
        veth("v0", "v1");
        let mut tx = open("v0");
        let share = |queue| Config { fanout: Some(Fanout::Hash(7)), queue, ..config("v1") };
        let mut rx = [0, 1].map(|queue| Socket::open(share(queue)).unwrap());
        flows_are_shared(&mut tx, &mut rx);
        // The fanout group of the old interface exists until its last socket is closed. The first port to reopen does not wait for the
        // other.
        ip("link del v0");
        veth("v0", "v1");
        tx.reopen().unwrap();
        rx.iter_mut().for_each(|rx| rx.reopen().unwrap());
        flows_are_shared(&mut tx, &mut rx);
    });
}

fn flows_are_shared(tx: &mut Socket, rx: &mut [Socket; 2]) {
    let mut frames = Vec::new();
    for port in 0..64_u16 {
        let builder = etherparse::PacketBuilder::ethernet2([2; 6], [4; 6]);
        let mut bytes = Vec::new();
        builder.ipv4([10, 0, 0, 1], [10, 0, 0, 2], 9).udp(1000 + port, 5).write(&mut bytes, b"x").unwrap();
        frames.push(bytes);
    }
    for _ in 0..4 {
        tx.send(&mut frames.iter().map(|bytes| Frame::new(bytes, LinkType::ETHERNET))).unwrap();
    }
    let mut seen = std::collections::HashMap::new();
    let mut burst = Burst::new(64);
    let mut count = 0;
    until(|| {
        for (index, rx) in rx.iter_mut().enumerate() {
            let _ = rx.receive(&mut burst).unwrap();
            for frame in burst.iter() {
                assert_eq!(usize::from(frame.meta.queue), index);
                assert_eq!(*seen.entry(frame.bytes.to_vec()).or_insert(index), index, "a flow stays");
                count += 1;
            }
        }
        count == 256
    });
    assert!(seen.values().any(|queue| *queue == 0) && seen.values().any(|queue| *queue == 1));
}

#[towpath_testenv::needs(netns)]
#[test]
fn bad_configurations_say_what_to_do() {
    within(|| {
        veth("v0", "v1");
        #[rustfmt::skip]
        let rows = [
            (Config::new("eth9"),                                   "no such interface \"eth9\""),
            (Config::new("a-name-that-is-too-long"),                "no such interface"),
            (Config { block_size: 100_000, ..Config::new("v0") },   "power of two"),
            (Config { blocks: 1, ..Config::new("v0") },             "at least 2 blocks"),
            (Config { retire: std::time::Duration::ZERO, ..Config::new("v0") }, "1 ms"),
        ];
        for (config, expected) in rows {
            let error = Socket::open(config).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
        let one = Socket::open(Config { fanout: Some(Fanout::Hash(7)), ..config("v0") }).unwrap();
        let error = Socket::open(Config { fanout: Some(Fanout::Cpu(7)), ..config("v0") }).unwrap_err();
        // Each socket gets a new group, which further sockets can join.
        let alone = || Socket::open(Config { fanout: Some(Fanout::HashAlone), ..config("v0") }).unwrap();
        let (first, second) = (alone(), alone());
        assert_ne!(first.fanout(), second.fanout());
        let third = Socket::open(Config { fanout: first.fanout(), ..config("v0") }).unwrap();
        assert_eq!(third.fanout(), first.fanout());
        assert!(error.to_string().contains("choose another"), "{error}");
        drop(one);
    });
}

/// A port without PACKET_VNET_HDR completes the partial checksums of the frames that it sends.
#[towpath_testenv::needs(netns)]
#[test]
fn unfinished_checksums_and_frames_to_be_cut_are_put_right() {
    within(|| {
        veth("v0", "v1");
        ip("addr add 10.1.0.1/24 dev v0");
        ip("neigh add 10.1.0.2 lladdr 02:00:00:00:00:09 dev v0");
        for vnet_hdr in [false, true] {
            let mut rx = Socket::open(Config { vnet_hdr, ..config("v1") }).unwrap();
            let socket = std::net::UdpSocket::bind("10.1.0.1:0").unwrap();
            socket.send_to(b"hello", "10.1.0.2:9").unwrap();
            let mut burst = Burst::new(8);
            next(&mut rx, &mut burst);
            let frame = burst.frame(0);
            assert_eq!(frame.meta.offload.checksum, Checksum::Partial { start: 34, offset: 6 });
            let mut bytes = frame.bytes.to_vec();
            towpath_wire::checksum::complete(&mut bytes, frame.meta.offload);
            let mut renewed = frame.bytes.to_vec();
            towpath_wire::checksum::renew(LinkType::ETHERNET, &mut renewed, frame.meta.offload);
            assert_eq!(bytes, renewed);
            assert_eq!(udp_sum(&bytes), 0xffff);
        }
    });
}

/// UDP_SEGMENT of linux/udp.h: the bytes of each call are sent as datagrams of this length.
const UDP_SEGMENT: i32 = 103;

/// Datagrams in one GSO frame are segmented at the sender's segment size, also if the MTU allows longer ones.
#[towpath_testenv::needs(netns)]
#[test]
fn datagrams_keep_their_lengths() {
    within(|| {
        veth("v0", "v1");
        veth("v2", "v3");
        ip("addr add 10.1.0.1/24 dev v0");
        ip("neigh add 10.1.0.2 lladdr 02:00:00:00:00:09 dev v0");
        for vnet_hdr in [false, true] {
            let (mut rx, mut tx) = (Socket::open(Config { vnet_hdr, ..config("v1") }).unwrap(), open("v2"));
            let mut sink = open("v3");
            let socket = std::net::UdpSocket::bind("10.1.0.1:0").unwrap();
            let mut burst = Burst::new(64);
            // The second fits the MTU as a whole.
            for (size, count) in [(1200, 10), (100, 9)] {
                sys::set(socket.as_fd(), libc::IPPROTO_UDP, UDP_SEGMENT, &[size]).unwrap();
                socket.send_to(&vec![7; (size * count) as usize], "10.1.0.2:9").unwrap();
                next(&mut rx, &mut burst);
                let frame = burst.frame(0);
                let gso = Gso { kind: GsoKind::Udp, size: size as u16, ecn: false };
                assert_eq!((burst.len(), frame.meta.offload.gso), (1, Some(gso)));
                assert_eq!(tx.send(&mut burst.iter()).unwrap(), 1);
                let mut lens = Vec::new();
                while lens.len() < count as usize {
                    next(&mut sink, &mut burst);
                    for frame in burst.iter() {
                        assert_eq!(udp_sum(frame.bytes), 0xffff);
                        lens.push(frame.bytes.len() - 42);
                    }
                }
                assert_eq!(lens, vec![size as usize; count as usize]);
            }
        }
    });
}

#[test]
fn frames_that_a_failed_socket_did_not_take_are_counted() {
    // No socket: ENOTSOCK.
    let file = std::fs::File::open("/dev/null").unwrap();
    let (mut tx_offload, (mut stats, mut refused), config) =
        (tx_offload::TxOffload::default(), <(Stats, Refused)>::default(), Config::new("v0"));
    let medium = tx_offload::Medium {
        link: LinkType::ETHERNET,
        max_piece: 1514,
        checksum: false,
        segmentation: Segmentation::default(),
    };
    let mut frames = std::iter::repeat_n(Frame::new(&[0; 60], LinkType::ETHERNET), 5);
    let failed = tx_offload.send("v0", &medium, &mut frames, |tx_offload, pieces| {
        transmit(file.as_fd(), &config, (&mut stats, &mut refused), tx_offload, pieces)
    });
    assert!(matches!(failed, Err(Error::Io { .. })));
    assert_eq!((stats.sent, stats.tx_refused), (0, 5));
}

/// The sum over an Ethernet frame's UDP datagram and its pseudo header: 0xffff if the checksum is correct.
fn udp_sum(frame: &[u8]) -> u16 {
    let len = (frame.len() - 34) as u16;
    let fixed = towpath_wire::checksum::sum(&len.to_be_bytes(), 17);
    towpath_wire::checksum::sum(&frame[34..], towpath_wire::checksum::sum(&frame[26..34], fixed))
}

/// Fan-out to two threads.
#[towpath_testenv::needs(netns)]
#[test]
fn two_sockets_conform() {
    within(|| {
        veth("v0", "v1");
        let shape = Shape { link: LinkType::ETHERNET, longest: 1514, recorded: false };
        let open = |name: &str| {
            let config = config(name);
            driver::DriverConfig::open(&config, name, 2, &Opener::local(&config)).unwrap()
        };
        conformance::check(|| Box::new(conformance::QueuesWire { tx: open("v0"), rx: open("v1"), shape }));
    });
}
