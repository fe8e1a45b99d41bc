use std::net::IpAddr;
use std::process::Command;
use towpath_wire::checksum;

use super::*;
use crate::conformance::{self, Shape, Wire};
use crate::netns::{Host, ip, patiently, until, within};
use crate::{State, tun, veth_tests};

/// Runs the iptables that supports NFQUEUE.
fn iptables(arguments: &str) {
    let found = ["iptables-legacy", "iptables"].iter().any(|program| {
        let output = Command::new(program).args(arguments.split_whitespace()).output();
        output.is_ok_and(|output| output.status.success())
    });
    assert!(found, "iptables with NFQUEUE: {arguments}");
}

/// A TUN interface whose packets all go to queue 5.
fn into_queue() -> tun::Device {
    let config = tun::Config { persist: true, ..tun::Config::tun("t0") };
    let mut device = patiently(|| tun::Device::open(config.clone())).unwrap();
    ip("link set t0 mtu 9000");
    until(|| device.state().unwrap() == State::Up);
    device
}

fn queue(config: Config) -> Queue {
    patiently(|| Queue::open(config.clone())).unwrap()
}

struct Queued {
    tx: tun::Device,
    rx: Queue,
}

impl Wire for Queued {
    fn shape(&self) -> Shape {
        Shape { link: LinkType::RAW, longest: 9000, recorded: false }
    }

    fn tx(&mut self) -> &mut dyn Port {
        &mut self.tx
    }

    fn into_rx(self: Box<Self>) -> Box<dyn Port> {
        Box::new(self.rx)
    }
}

#[towpath_testenv::needs(netns, tun, nfqueue)]
#[test]
fn conforms() {
    within(|| {
        iptables("-t raw -A PREROUTING -i t0 -j NFQUEUE --queue-num 5");
        conformance::check(|| Box::new(Queued { tx: into_queue(), rx: queue(Config::new(5)) }));
    });
}

fn datagram(number: u8) -> Vec<u8> {
    let mut bytes = Vec::new();
    let builder = etherparse::PacketBuilder::ipv4([10, 1, 0, 2], [10, 1, 0, 1], 64).udp(7, 9);
    builder.write(&mut bytes, &[b'n', number]).unwrap();
    bytes
}

/// The destination socket receives the packets as each kind of verdict demands.
#[towpath_testenv::needs(netns, tun, nfqueue)]
#[test]
fn verdicts_are_obeyed() {
    within(|| {
        let mut tx = into_queue();
        ip("addr add 10.1.0.1/24 dev t0");
        iptables("-A INPUT -i t0 -m mark ! --mark 7 -j NFQUEUE --queue-num 5");
        let mut queue = queue(Config::new(5));
        let socket = std::net::UdpSocket::bind("10.1.0.1:9").unwrap();
        socket.set_read_timeout(Some(std::time::Duration::from_secs(60))).unwrap();
        let packets: Vec<_> = (0..8).map(datagram).collect();
        tx.send(&mut packets.iter().map(|bytes| Frame::new(bytes, LinkType::RAW))).unwrap();
        // The kernel may queue them one after the other.
        until(|| waiting() == 8);
        let mut burst = Burst::new(64);
        until(|| queue.receive(&mut burst).unwrap() == Received::Frames);
        assert_eq!(burst.len(), 8);
        for frame in burst.iter() {
            assert_eq!(frame.meta.queued.unwrap().hook, 1, "local in");
            let (mut bytes, mut offload) = (frame.bytes.to_vec(), frame.meta.offload);
            bytes[28] = b'N';
            offload = checksum::renew(LinkType::RAW, &mut bytes, offload);
            match bytes[29] {
                1 | 4 => queue.verdict(frame, QueueVerdict::Drop).unwrap(),
                2 => {
                    let meta = Meta { offload, ..frame.meta };
                    queue.verdict(Frame { bytes: &bytes, meta, ..frame }, QueueVerdict::Replace).unwrap();
                }
                3 => {
                    let meta = Meta { mark: 7, ..frame.meta };
                    queue.verdict(Frame { meta, ..frame }, QueueVerdict::Repeat).unwrap();
                }
                _ => queue.verdict(frame, QueueVerdict::Accept).unwrap(),
            }
            assert!(queue.verdict(frame, QueueVerdict::Accept).is_err(), "one verdict for each");
        }
        queue.flush().unwrap();
        let mut got: Vec<_> = (0..6)
            .map(|_| {
                let mut bytes = [0; 2];
                socket.recv(&mut bytes).unwrap();
                (bytes[1], bytes[0])
            })
            .collect();
        got.sort_unstable();
        assert_eq!(got, [(0, b'n'), (2, b'N'), (3, b'n'), (5, b'n'), (6, b'n'), (7, b'n')]);
    });
}

/// Number of packets that wait for their verdict: the third column of /proc/net/netfilter/nfnetlink_queue.
fn waiting() -> usize {
    let text = std::fs::read_to_string("/proc/thread-self/net/netfilter/nfnetlink_queue").unwrap();
    text.split_whitespace().nth(2).unwrap().parse().unwrap()
}

/// A replacement that cannot be sent drops its packet. The packet does not wait, and later packets are accepted in one batch.
#[towpath_testenv::needs(netns, tun, nfqueue)]
#[test]
fn a_replacement_that_the_kernel_cannot_take_drops_the_packet() {
    within(|| {
        let mut tx = into_queue();
        ip("addr add 10.1.0.1/24 dev t0");
        iptables("-A INPUT -i t0 -j NFQUEUE --queue-num 5");
        // The kernel copies the two headers and one byte of each packet.
        let mut queue = queue(Config { copy_range: 29, ..Config::new(5) });
        let socket = std::net::UdpSocket::bind("10.1.0.1:9").unwrap();
        socket.set_read_timeout(Some(std::time::Duration::from_secs(60))).unwrap();
        let packets: Vec<_> = (0..6).map(datagram).collect();
        tx.send(&mut packets.iter().map(|bytes| Frame::new(bytes, LinkType::RAW))).unwrap();
        until(|| waiting() == 6);
        let mut burst = Burst::new(64);
        until(|| queue.receive(&mut burst).unwrap() == Received::Frames);
        assert_eq!((burst.len(), waiting()), (6, 6));
        let whole = datagram(77);
        for (at, frame) in burst.iter().enumerate() {
            assert_eq!((frame.bytes.len(), frame.wire_len, frame.meta.queued.unwrap().cut), (29, 30, true));
            let replaced = |bytes| Frame { bytes, ..frame };
            match at {
                0 => {
                    let long = vec![0x45; 65_532];
                    let error = queue.verdict(replaced(&long), QueueVerdict::Replace).unwrap_err();
                    assert!(matches!(error, Error::TooLong { len: 65_532, max: 65_531, .. }), "{error}");
                }
                2 => {
                    let error = queue.verdict(frame, QueueVerdict::Replace).unwrap_err();
                    assert!(matches!(error, Error::Cut { len: 29, .. }), "{error}");
                }
                // A complete packet may replace a truncated one.
                4 => queue.verdict(replaced(&whole), QueueVerdict::Replace).unwrap(),
                _ => queue.verdict(frame, QueueVerdict::Accept).unwrap(),
            }
            assert!(queue.verdict(frame, QueueVerdict::Accept).is_err(), "one verdict for each");
        }
        queue.flush().unwrap();
        assert_eq!((queue.pending.len(), waiting()), (0, 0));
        let mut got: Vec<_> = (0..4)
            .map(|_| {
                let mut bytes = [0; 2];
                socket.recv(&mut bytes).unwrap();
                bytes[1]
            })
            .collect();
        got.sort_unstable();
        assert_eq!(got, [1, 3, 5, 77]);
    });
}

/// Packets that the port sends reach a socket of this machine through the kernel's routes, for IPv4 and IPv6.
#[towpath_testenv::needs(netns)]
#[test]
fn replies_use_the_kernels_routes() {
    within(|| {
        // A kernel without IPv6 does not have this file; the IPv6 row is then skipped.
        let six = std::fs::write("/proc/sys/net/ipv6/conf/lo/disable_ipv6", "0").is_ok();
        let mut queue = queue(Config { replies: true, ..Config::new(5) });
        assert!(queue.caps().send);
        let header = |from: std::net::SocketAddr, to: std::net::SocketAddr| match (from.ip(), to.ip()) {
            (IpAddr::V4(from), IpAddr::V4(to)) => {
                etherparse::PacketBuilder::ipv4(from.octets(), to.octets(), 64)
            }
            (IpAddr::V6(from), IpAddr::V6(to)) => {
                etherparse::PacketBuilder::ipv6(from.octets(), to.octets(), 64)
            }
            _ => unreachable!("both addresses have one IP version"),
        };
        let own: &[&str] = if six { &["127.0.0.1:0", "[::1]:0"] } else { &["127.0.0.1:0"] };
        for own in own {
            let socket = std::net::UdpSocket::bind(own).unwrap();
            socket.set_read_timeout(Some(std::time::Duration::from_secs(60))).unwrap();
            let at = socket.local_addr().unwrap();
            let mut bytes = Vec::new();
            header(at, at).udp(7, at.port()).write(&mut bytes, b"answer").unwrap();
            let once = &mut std::iter::once(Frame::new(&bytes, LinkType::RAW));
            assert_eq!(queue.send(once).unwrap(), 1);
            let mut got = [0; 16];
            let (len, from) = socket.recv_from(&mut got).unwrap();
            assert_eq!((&got[..len], from), (&b"answer"[..], (at.ip(), 7).into()));
        }
        // A packet without a route, and bytes that are not an IP packet, are refused and counted.
        for bytes in [datagram(1), vec![0; 20]] {
            let once = &mut std::iter::once(Frame::new(&bytes, LinkType::RAW));
            assert_eq!(queue.send(once).unwrap(), 1);
        }
        let stats = queue.stats();
        let refused = (stats.tx_refused_enetunreach, stats.tx_refused_einval);
        assert_eq!((stats.sent, refused), (own.len() as u64, (1, 1)), "{stats:?}");
        let frame = Frame::new(&[0; 60], LinkType::ETHERNET);
        assert!(matches!(queue.send(&mut std::iter::once(frame)), Err(Error::LinkType { .. })));
    });
}

#[towpath_testenv::needs(netns, tun, nfqueue)]
#[test]
fn packets_without_room_are_counted() {
    within(|| {
        let mut tx = into_queue();
        iptables("-t raw -A PREROUTING -i t0 -j NFQUEUE --queue-num 5");
        let mut queue = queue(Config { max_len: 10, ..Config::new(5) });
        let bytes = datagram(1);
        tx.send(&mut std::iter::repeat_n(Frame::new(&bytes, LinkType::RAW), 100)).unwrap();
        until(|| queue.stats().rx_full == 90);
        let mut burst = Burst::new(64);
        until(|| queue.receive(&mut burst).unwrap() == Received::Frames);
        assert_eq!(burst.len(), 10);
    });
}

#[towpath_testenv::needs(netns)]
#[test]
fn a_queue_has_one_reader() {
    within(|| {
        let _one = queue(Config::new(5));
        let error = Queue::open(Config::new(5)).unwrap_err().to_string();
        assert!(error.contains("another process reads queue 5"), "{error}");
    });
}

/// `a - [router: NFQUEUE] - b`; every packet gets `verdict`.
fn tcp(config: Config, verdict: QueueVerdict) {
    within(move || {
        let (a, b) = (Host::new(), Host::new());
        ip("link add va type veth peer name m0");
        ip("link add vb type veth peer name m1");
        ip("addr add 10.9.1.254/24 dev m0");
        ip("addr add 10.9.2.254/24 dev m1");
        ip("link set m0 up");
        ip("link set m1 up");
        a.take("va", "10.9.1.1/24");
        b.take("vb", "10.9.2.2/24");
        a.run(|| ip("route add default via 10.9.1.254"));
        b.run(|| ip("route add default via 10.9.2.254"));
        std::fs::write("/proc/sys/net/ipv4/ip_forward", "1").unwrap();
        iptables("-A FORWARD -j NFQUEUE --queue-num 5");
        let mut queue = queue(config);
        let mut longest = 0;
        veth_tests::while_exchanging(&a, &b, "10.9.2.2:0", |burst| {
            if queue.receive(burst).unwrap() != Received::Frames {
                return false;
            }
            for frame in burst.iter() {
                longest = longest.max(frame.bytes.len());
                queue.verdict(frame, verdict).unwrap();
            }
            queue.flush().unwrap();
            true
        });
        assert_eq!(longest > 1500, queue.config.gso, "with GSO, packets arrive unsegmented");
        assert_eq!(queue.stats().dropped(), 0);
    });
}

#[towpath_testenv::needs(netns, nfqueue)]
#[test]
fn tcp_through_a_queue() {
    tcp(Config::new(5), QueueVerdict::Accept);
    tcp(Config { gso: false, ..Config::new(5) }, QueueVerdict::Accept);
}

/// With the GSO flag, packets have partial checksums: a verdict with a payload must complete them, or TCP stalls.
#[towpath_testenv::needs(netns, nfqueue)]
#[test]
fn tcp_through_a_queue_that_replaces_every_packet() {
    tcp(Config::new(5), QueueVerdict::Replace);
    tcp(Config { gso: false, ..Config::new(5) }, QueueVerdict::Replace);
}
