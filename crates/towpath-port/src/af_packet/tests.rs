use super::ingress::tests::WITHOUT_TCX;
use super::*;
use crate::conformance::{self, Shape, Wire};
use crate::netns::{ip, until, veth, within};
use crate::{Checksum, Gso, GsoKind, LinkType, driver};

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

/// An exclusive port. `host` has the packets that the network stack gets.
fn exclusive(interface: &str, host: &[&str]) -> Socket {
    let host = crate::host_filter::Filter::parse(host.iter().copied()).unwrap();
    let kernel = Kernel::Excluded { host, closed: false, stated: true };
    Socket::open(Config { kernel, ..config(interface) }).unwrap()
}

/// A host on `v0` with 10.1.0.1, whose neighbor 10.1.0.2 is this namespace with `v1`.
fn host_and_stack() -> crate::netns::Host {
    let host = crate::netns::Host::new();
    veth("v0", "v1");
    ip("link set v1 address 02:00:00:00:00:09");
    ip("addr add 10.1.0.2/24 dev v1");
    host.take("v0", "10.1.0.1/24");
    crate::netns::settled("v1");
    host.run(|| ip("neigh add 10.1.0.2 lladdr 02:00:00:00:00:09 dev v0"));
    host
}

/// Sends `count` datagrams with this text from port 1000 of the host to a port of 10.1.0.2.
fn send_from(host: &crate::netns::Host, text: &'static str, port: u16, count: usize) {
    host.run(move || {
        let socket = std::net::UdpSocket::bind("10.1.0.1:1000").unwrap();
        for _ in 0..count {
            socket.send_to(text.as_bytes(), ("10.1.0.2", port)).unwrap();
        }
    });
}

fn bound(port: u16) -> std::net::UdpSocket {
    let socket = std::net::UdpSocket::bind(("10.1.0.2", port)).unwrap();
    socket.set_nonblocking(true).unwrap();
    socket
}

/// The texts of the datagrams that wait.
fn texts(socket: &std::net::UdpSocket) -> Vec<String> {
    let mut bytes = [0; 64];
    let mut found = Vec::new();
    while let Ok(len) = socket.recv(&mut bytes) {
        found.push(String::from_utf8_lossy(&bytes[..len]).into_owned());
    }
    found
}

/// Waits for datagrams, and returns those that are there.
fn first_texts(socket: &std::net::UdpSocket) -> Vec<String> {
    let mut got = Vec::new();
    until(|| {
        got = texts(socket);
        !got.is_empty()
    });
    got
}

/// The texts of the port's UDP packets; at least `count`.
fn received(port: &mut Socket, count: usize) -> Vec<String> {
    let (mut burst, mut found) = (Burst::new(64), Vec::new());
    until(|| {
        let _ = port.receive(&mut burst).unwrap();
        let udp = burst.iter().filter(|frame| frame.bytes.len() > 42 && frame.bytes[23] == 17);
        let text = |frame: Frame<'_>| {
            let len = usize::from(u16::from_be_bytes([frame.bytes[38], frame.bytes[39]]));
            String::from_utf8_lossy(&frame.bytes[42..34 + len]).into_owned()
        };
        found.extend(udp.map(text));
        found.len() >= count
    });
    found
}

/// Runs a test with a tcx link and with a filter of the qdisc `clsact`, as before Linux 6.6.
fn with_both_hooks(test: impl Fn() + Send + Copy + 'static) {
    for without_tcx in [false, true] {
        within(move || {
            WITHOUT_TCX.set(without_tcx);
            test();
        });
    }
}

/// The order of the kernel's taps: a frame reaches the packet sockets before the ingress hook, and the network stack after it.
#[towpath_testenv::needs(netns, tcx)]
#[test]
fn the_network_stack_does_not_get_what_an_exclusive_port_has() {
    with_both_hooks(|| {
        let host = host_and_stack();
        let stack = bound(9);
        // Any socket sees it.
        let mut sniffer = open("v1");
        let mut port = exclusive("v1", &[]);
        send_from(&host, "taken", 9, 5);
        assert_eq!(received(&mut port, 5), ["taken"; 5]);
        assert_eq!(received(&mut sniffer, 5), ["taken"; 5]);
        drop(port);
        // Frames are handled in order: what arrived before would be here too.
        send_from(&host, "free", 9, 1);
        assert_eq!(first_texts(&stack), ["free"]);
    });
}

/// Packets of `host` to the machine go to the stack alone; the others go to the port alone.
#[towpath_testenv::needs(netns, tcx)]
#[test]
fn the_network_stack_gets_the_packets_of_host() {
    with_both_hooks(|| {
        let host = host_and_stack();
        let sockets = [9, 10, 11, 12].map(bound);
        #[rustfmt::skip]
        let rows: [(&str, [bool; 4]); 9] = [
            ("udp from any to me 9",                          [true, false, false, false]),
            ("udp from any to me 9,11-12",                    [true, false, true, true]),
            ("udp from 10.1.0.0/31 to me 10",                 [false, true, false, false]),
            ("udp from 10.1.0.2/31 to me",                    [false, false, false, false]),
            ("udp from 10.1.0.1 999-1000 to 10.1.0.2 10",     [false, true, false, false]),
            ("udp from any 1001 to me",                       [false, false, false, false]),
            ("tcp from any to me 9",                          [false, false, false, false]),
            ("ip from any to 10.1.0.3",                       [false, false, false, false]),
            ("ip from any to me",                             [true, true, true, true]),
        ];
        for (entry, expected) in rows {
            let mut port = exclusive("v1", &["arp", "nd", "dhcp", "icmp", "ssh", entry]);
            for to in 9..13 {
                send_from(&host, "one", to, 1);
            }
            // 10.1.0.77 is not an address of this machine: a mark that every earlier frame has arrived.
            host.run(|| {
                ip("neigh replace 10.1.0.77 lladdr 02:00:00:00:00:09 dev v0");
                std::net::UdpSocket::bind("10.1.0.1:0").unwrap().send_to(b"mark", "10.1.0.77:9").unwrap();
            });
            let mut seen = Vec::new();
            until(|| {
                seen.extend(received(&mut port, 0));
                seen.iter().any(|text| text == "mark")
            });
            let taken = expected.iter().filter(|stays| !**stays).count();
            assert_eq!(seen.len(), taken + 1, "{entry}");
            for (socket, stays) in sockets.iter().zip(expected) {
                assert_eq!(texts(socket).len(), usize::from(stays), "{entry}");
            }
        }
    });
}

/// ARP goes to both. Without it in `host`, the stack does not answer.
#[towpath_testenv::needs(netns, tcx)]
#[test]
fn arp_goes_to_both() {
    with_both_hooks(|| {
        let host = host_and_stack();
        for (list, answered) in [(&["icmp"][..], false), (&["arp", "icmp"], true)] {
            let mut port = exclusive("v1", list);
            host.run(|| ip("neigh del 10.1.0.2 dev v0"));
            host.run(|| {
                std::net::UdpSocket::bind("10.1.0.1:0").unwrap().send_to(b"x", "10.1.0.2:9").unwrap()
            });
            // Without an ARP reply, the host repeats its request. After one, it sends the datagram.
            let (mut burst, mut asked, mut sent) = (Burst::new(64), 0, 0);
            until(|| {
                let _ = port.receive(&mut burst).unwrap();
                let count = |kind: [u8; 2]| burst.iter().filter(|frame| frame.bytes[12..14] == kind).count();
                asked += count([8, 6]);
                sent += count([8, 0]);
                if answered { asked > 0 && sent > 0 } else { asked > 1 }
            });
            assert_eq!(sent > 0, answered);
        }
    });
}

/// `me` follows the interface's addresses.
#[towpath_testenv::needs(netns, tcx)]
#[test]
fn a_new_address_is_left_to_the_host() {
    with_both_hooks(|| {
        let host = host_and_stack();
        let mut port = exclusive("v1", &["udp from any to me 9"]);
        ip("addr add 10.1.0.3/24 dev v1");
        host.run(|| ip("neigh add 10.1.0.3 lladdr 02:00:00:00:00:09 dev v0"));
        let socket = std::net::UdpSocket::bind("10.1.0.3:9").unwrap();
        socket.set_nonblocking(true).unwrap();
        let send = |text: &'static str| {
            host.run(move || {
                let from = std::net::UdpSocket::bind("10.1.0.1:0").unwrap();
                from.send_to(text.as_bytes(), "10.1.0.3:9").unwrap();
            });
        };
        send("before");
        assert_eq!(received(&mut port, 1), ["before"]);
        assert_eq!(port.state().unwrap(), State::Up);
        send("after");
        assert_eq!(first_texts(&socket), ["after"]);
        assert!(received(&mut port, 0).is_empty());
    });
}

/// A link of a closed port stays until the next port replaces it. An open one removes it.
#[towpath_testenv::needs(netns, tcx, bpffs)]
#[test]
fn a_closed_port_stays_closed() {
    within(|| {
        let host = host_and_stack();
        let stack = bound(9);
        let pin = crate::pins::path("v1");
        let end = |closed| {
            let host = crate::host_filter::Filter::default();
            let kernel = Kernel::Excluded { host, closed, stated: true };
            drop(Socket::open(Config { kernel, ..config("v1") }).unwrap());
        };
        for _ in 0..2 {
            end(true);
            assert!(pin.exists());
            send_from(&host, "closed", 9, 3);
        }
        end(false);
        assert!(!pin.exists());
        send_from(&host, "open", 9, 1);
        assert_eq!(first_texts(&stack), ["open"]);
    });
}

/// Without tcx, the filter of a killed engine lets everything pass, that of a closed port drops until the next port opens.
#[towpath_testenv::needs(netns, tcx)]
#[test]
fn a_filter_without_a_heartbeat_passes_everything_unless_its_port_is_closed() {
    within(|| {
        WITHOUT_TCX.set(true);
        let host = host_and_stack();
        let stack = bound(9);
        let attach = |closed| {
            let kernel = Kernel::Excluded { host: Default::default(), closed, stated: true };
            // The descriptors are closed as those of a process that is killed. The heartbeat is not kept up.
            let config = Config { kernel, ..config("v1") };
            drop(driver::DriverConfig::open_object(&config, &Object::IngressProgram).unwrap());
            config
        };
        attach(false);
        until(|| {
            send_from(&host, "open", 9, 1);
            !texts(&stack).is_empty()
        });
        let config = attach(true);
        texts(&stack);
        for _ in 0..15 {
            send_from(&host, "closed", 9, 1);
            std::thread::sleep(std::time::Duration::from_millis(100));
        }
        assert_eq!(texts(&stack), [""; 0]);
        assert_eq!(crate::clsact::Abandoned::all().len(), 1);
        drop(Socket::open(config).unwrap());
        send_from(&host, "closed", 9, 1);
        drop(exclusive("v1", &[]));
        send_from(&host, "open", 9, 1);
        assert_eq!(first_texts(&stack), ["open"]);
        assert_eq!(crate::clsact::Abandoned::all(), []);
        attach(true);
        for abandoned in crate::clsact::Abandoned::all() {
            assert_eq!(abandoned.interface, "v1");
            abandoned.remove().unwrap();
        }
        send_from(&host, "free", 9, 1);
        assert_eq!(first_texts(&stack), ["free"]);
    });
}

/// The filter of another program has the first place of the hook: it is not replaced.
#[towpath_testenv::needs(netns, tcx)]
#[test]
fn the_filter_of_another_program_stays() {
    within(|| {
        WITHOUT_TCX.set(true);
        let _host = host_and_stack();
        let tc = |words: &[&str]| {
            let done = std::process::Command::new("tc").args(words).output().unwrap();
            assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        };
        tc(&["qdisc", "add", "dev", "v1", "clsact"]);
        // One instruction of classic BPF: match everything.
        let code = ["bpf", "bytecode", "1,6 0 0 4294967295,", "flowid", "1:1"];
        tc(&[
            &["filter", "add", "dev", "v1", "ingress", "pref", "1", "protocol", "all", "handle", "1"],
            &code[..],
        ]
        .concat());
        let kernel = Kernel::Excluded { host: Default::default(), closed: false, stated: true };
        let refused = Socket::open(Config { kernel, ..config("v1") }).unwrap_err();
        assert!(matches!(refused, Error::NotExclusive { .. }), "{refused}");
    });
}

/// The programs follow an interface that is made again, with all sockets of the port.
#[towpath_testenv::needs(netns, tcx)]
#[test]
fn an_exclusive_port_is_reopened() {
    with_both_hooks(|| {
        for _ in 0..2 {
            let host = host_and_stack();
            let kernel = Kernel::Excluded { host: Default::default(), closed: false, stated: true };
            let config = super::Config { kernel, ..config("v1") };
            let mut ports = driver::DriverConfig::open(&config, "p", 2, &Opener::local(&config)).unwrap();
            ip("link del v1");
            drop(host);
            until(|| ports[0].state().unwrap() == State::Gone);
            let host = host_and_stack();
            let stack = bound(9);
            for port in &mut ports {
                port.reopen().unwrap();
                assert_eq!(port.state().unwrap(), State::Up);
            }
            send_from(&host, "taken", 9, 5);
            let mut burst = Burst::new(64);
            let mut count = 0;
            until(|| {
                for port in &mut ports {
                    let _ = port.receive(&mut burst).unwrap();
                    count += burst.iter().filter(|frame| frame.bytes[23] == 17).count();
                }
                count == 5
            });
            drop(ports);
            send_from(&host, "free", 9, 1);
            assert_eq!(first_texts(&stack), ["free"]);
            // The end of a namespace removes its interfaces later.
            ip("link del v1");
            drop(host);
        }
    });
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
