//! TCP connections between two network namespaces through two ports of this process. The received bytes are compared with the sent ones. Topology: `a - va = m0 [ports] m1 = vb - b`.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::netns::{Host, ip, patiently, within};
use crate::{Burst, Error, LinkType, Port, Received, State, af_packet, af_xdp, tun};

const BYTES: usize = 8 << 20;

/// Forwards the frames of each port to the other one until `stop` is set.
fn pump(ports: &mut [Box<dyn Port>; 2], stop: &AtomicBool) {
    let mut burst = Burst::new(64);
    while !stop.load(Ordering::Relaxed) {
        let mut idle = true;
        for from in 0..2 {
            if ports[from].receive(&mut burst).expect("receive") != Received::Frames {
                continue;
            }
            idle = false;
            let link = ports[1 - from].caps().link.expect("live ports have one link type");
            // A TUN device carries IP packets only.
            let carried = |frame: &crate::Frame<'_>| {
                link == LinkType::ETHERNET || frame.bytes.first().is_some_and(|first| first >> 4 == 4)
            };
            let mut frames = burst.iter().filter(carried);
            ports[1 - from].send(&mut frames).expect("send");
        }
        if idle {
            let mut fds = ports.each_ref().map(|port| {
                PollFd::from_borrowed_fd(port.poll_fd().expect("live ports have one"), PollFlags::IN)
            });
            let timeout = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };
            poll(&mut fds, Some(&timeout)).expect("poll");
        }
    }
}

/// Sends [`BYTES`] bytes from `a` to `b` and back, and compares them.
fn exchange(a: &Host, b: &Host, bind: &'static str) {
    let pattern = || (0..BYTES).map(|at| (at as u32).wrapping_mul(2_654_435_761).to_be_bytes()[0]);
    let (bound, address) = std::sync::mpsc::channel();
    let echo = b.start(move || {
        let listener = TcpListener::bind(bind).unwrap();
        bound.send(listener.local_addr().unwrap()).unwrap();
        let (mut stream, _) = listener.accept().unwrap();
        let mut got = vec![0; BYTES];
        stream.read_exact(&mut got).unwrap();
        stream.write_all(&got).unwrap();
        got
    });
    let address = address.recv().unwrap();
    let back = a.run(move || {
        let mut stream = TcpStream::connect(address).unwrap();
        let sent: Vec<u8> = pattern().collect();
        stream.write_all(&sent).unwrap();
        let mut back = vec![0; BYTES];
        stream.read_exact(&mut back).unwrap();
        back
    });
    let got = echo.recv().unwrap();
    assert!(got.iter().copied().eq(pattern()), "the bytes that arrived");
    assert!(back == got, "the bytes that came back");
}

/// Runs an exchange between two hosts whose checksum and segmentation offloads stay on.
fn between_veths(open: impl Fn(&str) -> Result<Box<dyn Port>, Error> + Send + Sync) {
    between_veths_with(open, "");
}

/// As [`between_veths`]; `setting` is applied to the hosts' interfaces by `ip link set`.
fn between_veths_with(
    open: impl Fn(&str) -> Result<Box<dyn Port>, Error> + Send + Sync,
    setting: &'static str,
) {
    within(|| {
        let (a, b) = (Host::new(), Host::new());
        ip("link add va type veth peer name m0");
        ip("link add vb type veth peer name m1");
        ip("link set m0 up");
        ip("link set m1 up");
        a.take("va", "10.9.0.1/24");
        b.take("vb", "10.9.0.2/24");
        if !setting.is_empty() {
            a.run(move || ip(&format!("link set va {setting}")));
            b.run(move || ip(&format!("link set vb {setting}")));
        }
        let mut ports = [open("m0").unwrap(), open("m1").unwrap()];
        run(&mut ports, &a, &b);
    });
}

/// Calls `work` until the exchange is over. `work` returns true if it processed frames.
pub(crate) fn while_exchanging(
    a: &Host,
    b: &Host,
    bind: &'static str,
    mut work: impl FnMut(&mut Burst) -> bool,
) {
    thread::scope(|scope| {
        let exchanging = scope.spawn(|| exchange(a, b, bind));
        let mut burst = Burst::new(64);
        while !exchanging.is_finished() {
            if !work(&mut burst) {
                thread::yield_now();
            }
        }
        exchanging.join().expect("the exchange");
    });
}

fn run(ports: &mut [Box<dyn Port>; 2], a: &Host, b: &Host) {
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let pumping = scope.spawn(|| pump(ports, &stop));
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| exchange(a, b, "10.9.0.2:0")));
        stop.store(true, Ordering::Relaxed);
        pumping.join().expect("the pump");
        if let Err(panic) = result {
            std::panic::resume_unwind(panic);
        }
    });
    for port in ports {
        assert_eq!(port.state().unwrap(), State::Up);
        let stats = port.stats();
        assert!(stats.received_bytes > BYTES as u64, "{stats:?}");
        assert_eq!(stats.tx_drops()[1..], [0; 7], "{stats:?}");
    }
}

#[towpath_testenv::needs(netns)]
#[test]
fn tcp_through_packet_sockets() {
    between_veths(|name| Ok(Box::new(af_packet::Socket::open(af_packet::Config::new(name))?)));
}

#[towpath_testenv::needs(netns)]
#[test]
fn tcp_through_packet_sockets_with_offloads() {
    between_veths(|name| {
        let config = af_packet::Config { vnet_hdr: true, ..af_packet::Config::new(name) };
        Ok(Box::new(af_packet::Socket::open(config)?))
    });
}

/// The hosts' checksum offload is on, and XDP does not report it: TCP stalls unless the port detects partial checksums.
#[towpath_testenv::needs(netns, xdp)]
#[test]
fn tcp_through_xdp_sockets() {
    let open = |name: &str| -> Result<Box<dyn Port>, Error> {
        Ok(Box::new(af_xdp::Socket::open(af_xdp::Config::new(name))?))
    };
    between_veths_with(open, "gso_max_segs 1");
}

/// Large segments arrive in several buffers, and are segmented on output.
#[towpath_testenv::needs(netns, xdp)]
#[test]
fn tcp_through_xdp_sockets_with_the_hosts_offloads() {
    between_veths(|name| {
        let config = af_xdp::Config { multi_buffer: true, ..af_xdp::Config::new(name) };
        Ok(Box::new(af_xdp::Socket::open(config)?))
    });
}

/// A path of ports of different kinds: offloads on one side, none on the other.
#[towpath_testenv::needs(netns, xdp)]
#[test]
fn tcp_between_ports_of_two_kinds() {
    let open = |name: &str| -> Result<Box<dyn Port>, Error> {
        if name == "m1" {
            return Ok(Box::new(af_xdp::Socket::open(af_xdp::Config::new(name))?));
        }
        let config = af_packet::Config { vnet_hdr: true, ..af_packet::Config::new(name) };
        Ok(Box::new(af_packet::Socket::open(config)?))
    };
    between_veths_with(open, "gso_max_segs 1");
}

fn between_tuns(kind: fn(String) -> tun::Config, offloads: [bool; 2]) {
    within(|| {
        let (a, b) = (Host::new(), Host::new());
        let device = |name: &str, vnet_hdr| {
            let config = tun::Config { vnet_hdr, ..kind(name.into()) };
            patiently(|| tun::Device::open(config.clone()))
        };
        let (one, other) = (device("ta", offloads[0]).unwrap(), device("tb", offloads[1]).unwrap());
        a.take("ta", "10.9.0.1/24");
        b.take("tb", "10.9.0.2/24");
        run(&mut [Box::new(one), Box::new(other)], &a, &b);
    });
}

#[towpath_testenv::needs(netns, tun)]
#[test]
fn tcp_through_tun() {
    for offloads in [[true, true], [false, false], [true, false]] {
        between_tuns(tun::Config::tun, offloads);
    }
}

#[towpath_testenv::needs(netns, tun)]
#[test]
fn tcp_through_tap() {
    for offloads in [[true, true], [false, true]] {
        between_tuns(tun::Config::tap, offloads);
    }
}

/// An ordinary user can open packet sockets and NFQUEUE in its own user and network namespace.
#[towpath_testenv::needs(userns)]
#[test]
fn a_namespace_of_ones_own_is_privilege_enough() {
    let tests = std::env::current_exe().unwrap();
    let within = |test: &str| {
        let mut command = std::process::Command::new("unshare");
        command
            .arg("-Urn")
            .arg(&tests)
            .args(["--exact", test, "--include-ignored", "--nocapture"])
            .output()
            .unwrap()
    };
    for test in [
        "af_packet::tests::conforms",
        "veth_tests::tcp_through_packet_sockets",
        "nfqueue::tests::a_queue_has_one_reader",
    ] {
        let output = within(test);
        let said = String::from_utf8_lossy(&output.stdout);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && said.contains("1 passed"), "{test}: {said}\n{errors}");
    }
}
