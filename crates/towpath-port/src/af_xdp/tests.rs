use super::*;
use crate::conformance::{self, Shape, Wire};
use crate::netns::{ip, patiently, settled, until, veth, within};
use crate::{Checksum, af_packet};

fn config(interface: &str) -> Config {
    Config { chunks: 2048, ..Config::new(interface) }
}

fn open(config: Config) -> Socket {
    patiently(|| Socket::open(config.clone())).unwrap()
}

/// Sent by a packet socket, or by another XDP socket.
struct Pair {
    tx: Box<dyn Port>,
    rx: Socket,
    longest: usize,
}

impl Wire for Pair {
    fn shape(&self) -> Shape {
        Shape { link: LinkType::ETHERNET, longest: self.longest, recorded: false }
    }

    fn tx(&mut self) -> &mut dyn Port {
        &mut *self.tx
    }

    fn into_rx(self: Box<Self>) -> Box<dyn Port> {
        Box::new(self.rx)
    }
}

#[towpath_testenv::needs(netns, xdp)]
#[test]
fn conforms() {
    within(|| {
        veth("v0", "v1");
        conformance::check(|| {
            let tx = Box::new(open(config("v0")));
            Box::new(Pair { tx, rx: open(config("v1")), longest: 1514 })
        });
        let native = |name| Config { mode: Mode::Native, ..config(name) };
        conformance::check(|| {
            let tx = Box::new(open(native("v0")));
            Box::new(Pair { tx, rx: open(native("v1")), longest: 1514 })
        });
    });
}

/// An MTU of 9000 needs a program for fragments and XDP_USE_SG.
#[towpath_testenv::needs(netns, xdp)]
#[test]
fn long_frames_lie_in_several_buffers() {
    within(|| {
        veth("v0", "v1");
        ip("link set v0 mtu 9000");
        ip("link set v1 mtu 9000");
        let error = Socket::open(config("v0")).unwrap_err().to_string();
        assert!(error.contains("an MTU of 9000 needs multi_buffer"), "{error}");
        conformance::check(|| {
            let end = |name| open(Config { multi_buffer: true, ..config(name) });
            Box::new(Pair { tx: Box::new(end("v0")), rx: end("v1"), longest: 9014 })
        });
    });
}

fn frame(number: u8) -> Vec<u8> {
    let mut bytes = vec![number; 60];
    bytes[..14].copy_from_slice(&[2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 0x88, 0xb5]);
    bytes
}

fn send(tx: &mut dyn Port, number: u8) {
    let bytes = frame(number);
    assert_eq!(tx.send(&mut std::iter::once(Frame::new(&bytes, LinkType::ETHERNET))).unwrap(), 1);
    tx.flush().unwrap();
}

#[towpath_testenv::needs(netns, xdp)]
#[test]
fn an_interface_goes_down_and_comes_back() {
    within(|| {
        veth("v0", "v1");
        let mut rx = open(config("v1"));
        let mut tx = open(config("v0"));
        let mut burst = Burst::new(8);
        send(&mut tx, 1);
        until(|| rx.receive(&mut burst).unwrap() == Received::Frames);
        ip("link set v1 down");
        until(|| rx.state().unwrap() == State::Down);
        send(&mut tx, 2);
        ip("link set v1 up");
        until(|| rx.state().unwrap() == State::Up && tx.state().unwrap() == State::Up);
        until(|| {
            send(&mut tx, 3);
            rx.receive(&mut burst).unwrap() == Received::Frames
        });
        ip("link del v0");
        assert_eq!((rx.state().unwrap(), tx.state().unwrap()), (State::Gone, State::Gone));
        assert!(matches!(rx.reopen(), Err(Error::NoInterface { .. })));
        veth("v0", "v1");
        rx.reopen().unwrap();
        tx.reopen().unwrap();
        until(|| {
            send(&mut tx, 4);
            rx.receive(&mut burst).unwrap() == Received::Frames
        });
        assert_eq!(burst.frame(0).bytes, frame(4));
    });
}

#[towpath_testenv::needs(netns, xdp)]
#[test]
fn queues_come_back_together() {
    within(|| {
        let veths = || {
            ip("link add v0 numrxqueues 2 numtxqueues 2 type veth peer name v1 numrxqueues 2 numtxqueues 2");
            ip("link set v0 up");
            ip("link set v1 up");
            ["v0", "v1"].into_iter().for_each(settled);
        };
        veths();
        let mut queues = Socket::open_queues(&config("v1"), 2).unwrap();
        for _ in 0..2 {
            ip("link del v0");
            assert!(matches!(queues[0].reopen(), Err(Error::NoInterface { .. })));
            veths();
            for queue in &mut queues {
                queue.reopen().unwrap();
                assert_eq!(queue.state().unwrap(), State::Up);
            }
            assert_eq!([0, 1].map(|at: usize| queues[at].queue), [0, 1]);
            let mut tx = af_packet::Socket::open(af_packet::Config::new("v0")).unwrap();
            let mut burst = Burst::new(64);
            until(|| {
                send(&mut tx, 4);
                queues.iter_mut().any(|queue| queue.receive(&mut burst).unwrap() == Received::Frames)
            });
            assert_eq!(burst.frame(0).bytes, frame(4));
        }
    });
}

/// An empty fill ring: while all chunks are in use, no frame arrives and losses are counted. After their release, frames arrive again.
#[towpath_testenv::needs(netns, xdp)]
#[test]
fn an_empty_fill_ring_is_counted_and_recovers() {
    within(|| {
        veth("v0", "v1");
        let mut rx = open(Config { chunks: 256, ..config("v1") });
        let mut tx = af_packet::Socket::open(af_packet::Config::new("v0")).unwrap();
        let bytes = frame(1);
        tx.send(&mut std::iter::repeat_n(Frame::new(&bytes, LinkType::ETHERNET), 1000)).unwrap();
        until(|| rx.stats().rx_full > 0);
        let mut held = Vec::new();
        let mut count = 0;
        until(|| {
            let mut burst = Burst::new(64);
            let _ = rx.receive(&mut burst).unwrap();
            count += burst.len() as u64;
            held.push(burst);
            count + rx.stats().rx_full == 1000
        });
        held.clear();
        let _ = rx.receive(&mut Burst::new(1)).unwrap();
        let mut burst = Burst::new(64);
        tx.send(&mut std::iter::repeat_n(Frame::new(&bytes, LinkType::ETHERNET), 50)).unwrap();
        let mut again = 0;
        until(|| {
            let _ = rx.receive(&mut burst).unwrap();
            again += burst.len();
            again == 50
        });
    });
}

#[towpath_testenv::needs(netns, xdp)]
#[test]
fn unfinished_checksums_are_recognised() {
    within(|| {
        veth("v0", "v1");
        ip("addr add 10.1.0.1/24 dev v0");
        ip("neigh add 10.1.0.2 lladdr 02:00:00:00:00:09 dev v0");
        let mut rx = open(config("v1"));
        let socket = std::net::UdpSocket::bind("10.1.0.1:0").unwrap();
        socket.send_to(b"hello", "10.1.0.2:9").unwrap();
        let mut burst = Burst::new(8);
        until(|| rx.receive(&mut burst).unwrap() == Received::Frames);
        let checksum = burst.frame(0).meta.offload.checksum;
        assert_eq!(checksum, Checksum::Partial { start: 34, offset: 6 });
    });
}

/// A frame with several datagrams is dropped and counted, because XDP does not report their length. Datagrams that the sending host
/// segments arrive.
#[towpath_testenv::needs(netns, xdp)]
#[test]
fn datagrams_that_are_not_cut_are_counted() {
    within(|| {
        veth("v0", "v1");
        ip("addr add 10.1.0.1/24 dev v0");
        ip("neigh add 10.1.0.2 lladdr 02:00:00:00:00:09 dev v0");
        let mut rx = open(Config { multi_buffer: true, ..config("v1") });
        let socket = std::net::UdpSocket::bind("10.1.0.1:0").unwrap();
        // UDP_SEGMENT of linux/udp.h.
        sys::set(socket.as_fd(), libc::IPPROTO_UDP, 103, &[1200]).unwrap();
        let mut burst = Burst::new(64);
        socket.send_to(&[7; 6000], "10.1.0.2:9").unwrap();
        until(|| {
            assert_ne!(rx.receive(&mut burst).unwrap(), Received::Frames);
            rx.stats().rx_unsegmented == 1
        });
        ip("link set v0 gso_max_segs 1");
        socket.send_to(&[7; 6000], "10.1.0.2:9").unwrap();
        let mut lens = Vec::new();
        until(|| {
            let _ = rx.receive(&mut burst).unwrap();
            lens.extend(burst.iter().map(|frame| frame.bytes.len()));
            lens.len() == 5
        });
        assert_eq!(lens, [1242; 5]);
    });
}

#[towpath_testenv::needs(netns, xdp, bpffs)]
#[test]
fn fail_open_passes_and_fail_closed_drops() {
    within(|| {
        veth("v0", "v1");
        let mut tx = af_packet::Socket::open(af_packet::Config::new("v0")).unwrap();
        // Receives the packets that XDP passes to the network stack.
        let mut stack = af_packet::Socket::open(af_packet::Config::new("v1")).unwrap();
        let mut burst = Burst::new(64);
        let mut arrives = |tx: &mut af_packet::Socket, phase: u8| {
            until(|| {
                send(tx, phase);
                let _ = stack.receive(&mut burst).unwrap();
                let phases = || burst.iter().map(|frame| frame.bytes[59]);
                assert!(phases().all(|seen| seen != 2), "what was sent while closed was dropped");
                phases().any(|seen| seen == phase)
            });
        };
        let port = open(config("v1"));
        drop(port);
        arrives(&mut tx, 1);

        let pin = std::path::PathBuf::from(format!("/sys/fs/bpf/towpath-test-{}", std::process::id()));
        let closed = Config { after: After::Drop(pin.clone()), ..config("v1") };
        let port = open(closed.clone());
        drop(port);
        send(&mut tx, 2);
        let port = open(closed);
        drop(port);
        send(&mut tx, 2);
        std::fs::remove_file(&pin).unwrap();
        arrives(&mut tx, 3);
    });
}

#[towpath_testenv::needs(netns, xdp)]
#[test]
fn errors_say_what_to_do() {
    within(|| {
        veth("v0", "v1");
        let _held = open(config("v0"));
        #[rustfmt::skip]
        let rows = [
            (config("eth9"),                                                          "no such interface"),
            (config("v0"),                                                            "another XDP program or socket"),
            (Config { chunks: 1000, ..config("v1") },                                 "power of two"),
            (Config { zero_copy: true, ..config("v1") },                              "needs mode native"),
            (Config { zero_copy: true, mode: Mode::Native, ..config("v1") },          "without zero_copy"),
        ];
        for (config, expected) in rows {
            let error = Socket::open(config).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
        assert!(Socket::open_queues(&config("v1"), 65).unwrap_err().to_string().contains("1 to 64"));
    });
}

/// The error comes before that of the MTU, and says which numbers differ.
#[towpath_testenv::needs(netns, xdp)]
#[test]
fn fewer_queues_than_threads_are_an_error_that_says_so() {
    within(|| {
        ip(
            "link add v0 mtu 9000 numrxqueues 1 numtxqueues 1 type veth peer name v1 numrxqueues 1 numtxqueues 1",
        );
        ip("link set v0 up");
        for multi_buffer in [false, true] {
            let error =
                Socket::open_queues(&Config { multi_buffer, ..config("v0") }, 2).unwrap_err().to_string();
            assert!(
                error.contains("has 1 receive queue, and 2 threads need one each: set [engine] threads = 1"),
                "{error}"
            );
        }
    });
}

/// Two queues for two threads.
#[towpath_testenv::needs(netns, xdp)]
#[test]
fn two_queues_conform() {
    within(|| {
        ip("link add v0 numrxqueues 2 numtxqueues 2 type veth peer name v1 numrxqueues 2 numtxqueues 2");
        ip("link set v0 up");
        ip("link set v1 up");
        ["v0", "v1"].into_iter().for_each(settled);
        let shape = Shape { link: LinkType::ETHERNET, longest: 1514, recorded: false };
        let open = |name: &str| {
            let config = config(name);
            patiently(|| crate::driver::DriverConfig::open(&config, name, 2, &Opener::local(&config)))
                .unwrap()
        };
        conformance::check(|| Box::new(conformance::QueuesWire { tx: open("v0"), rx: open("v1"), shape }));
    });
}
