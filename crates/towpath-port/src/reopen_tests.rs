//! Interfaces that go and come back: every driver carries frames again.

use std::thread;

use rustix::thread::gettid;

use crate::driver::{self, DriverConfig};
use crate::netns::{Host, ip, patiently, settled, until, veth, within};
use crate::{
    Burst, Error, Frame, LinkType, Opener, Port, Received, State, af_packet, af_xdp, host_filter, tun,
};

/// The ways in which `v1` goes and comes back.
const WAYS: [fn(&Host); 5] = [
    // Deleted and made again.
    |_| {
        ip("link del v1");
        made("");
    },
    // With the same index.
    |_| {
        ip("link del v1");
        made("index 77");
        ip("link del v1");
        made("index 77");
    },
    // Moved to another network namespace and back. It keeps its index.
    |other| {
        ip(&format!("link set v1 netns {}", other.tid()));
        let home = gettid().as_raw_nonzero();
        other.run(move || ip(&format!("link set v1 netns {home}")));
        ip("link set v1 up");
    },
    // Renamed and back.
    |_| {
        ip("link set v1 down");
        ip("link set v1 name v9");
        ip("link set v9 name v1");
        ip("link set v1 up");
    },
    // Another interface gets the name.
    |_| {
        ip("link set v1 down");
        ip("link set v1 name v9");
        ip("link set v0 name v8");
        made("");
    },
];

fn made(index: &str) {
    ip(&format!("link add v1 {index} type veth peer name v0"));
    ip("link set v0 up");
    ip("link set v1 up");
}

/// What a worker does each second.
fn tend(ports: &mut [Box<dyn Port>]) -> bool {
    let one = |port: &mut Box<dyn Port>| match port.state().unwrap() {
        State::Up => true,
        State::Down => false,
        State::Gone => {
            match port.reopen() {
                // The launcher and this process find the interface at different times, or it is in use.
                Ok(()) | Err(Error::NoInterface { .. } | Error::InUse { .. }) => {}
                Err(error) => panic!("{error}"),
            }
            false
        }
    };
    ports.iter_mut().fold(true, |up, port| one(port) & up)
}

/// A frame from `v0` arrives at one of the ports.
fn arrives(ports: &mut [Box<dyn Port>]) {
    ["v0", "v1"].into_iter().for_each(settled);
    let mut bytes = vec![7; 60];
    bytes[..14].copy_from_slice(&[2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 0x88, 0xb5]);
    arrives_from("v0", &bytes, LinkType::ETHERNET, ports);
}

/// A frame that a packet socket sends on `interface` arrives at one of the ports.
fn arrives_from(interface: &str, bytes: &[u8], link: LinkType, ports: &mut [Box<dyn Port>]) {
    until(|| tend(ports));
    let mut tx = af_packet::Socket::open(af_packet::Config::new(interface)).unwrap();
    let mut burst = Burst::new(64);
    until(|| {
        tx.send(&mut std::iter::once(Frame::new(bytes, link))).unwrap();
        ports.iter_mut().any(|port| {
            let came = port.receive(&mut burst).unwrap() == Received::Frames;
            came && burst.iter().any(|frame| frame.bytes == bytes)
        })
    });
}

fn come_back(open: impl Fn() -> Vec<Box<dyn Port>> + Sync) {
    for way in WAYS {
        within(|| {
            made("index 77");
            ["v0", "v1"].into_iter().for_each(settled);
            let other = Host::new();
            let mut ports = open();
            arrives(&mut ports);
            for _ in 0..2 {
                way(&other);
                arrives(&mut ports);
                if crate::interface::exists("v9") {
                    ip("link del v9");
                }
            }
        });
    }
}

#[towpath_testenv::needs(netns)]
#[test]
fn af_packet_ports_come_back() {
    come_back(|| {
        let config = af_packet::Config::new("v1");
        config.open("p", 2, &Opener::local(&config)).unwrap()
    });
}

#[towpath_testenv::needs(netns, tcx)]
#[test]
fn exclusive_ports_come_back() {
    come_back(|| {
        let host = host_filter::Filter::parse(["arp", "ssh"]).unwrap();
        let kernel = af_packet::Kernel::Excluded { host, closed: false, stated: true };
        let config = af_packet::Config { kernel, ..af_packet::Config::new("v1") };
        config.open("p", 2, &Opener::local(&config)).unwrap()
    });
}

#[towpath_testenv::needs(netns, xdp)]
#[test]
fn af_xdp_ports_come_back() {
    come_back(|| {
        let config = af_xdp::Config { chunks: 512, ..af_xdp::Config::new("v1") };
        patiently(|| config.open("p", 1, &Opener::local(&config))).unwrap()
    });
}

/// The ways in which the TUN device `t0` goes and comes back.
const TUN_WAYS: [fn(&Host); 5] = [
    // Deleted. The port makes it again.
    |_| ip("link del t0"),
    // Deleted and made again.
    |_| {
        ip("link del t0");
        ip("tuntap add t0 mode tun multi_queue");
    },
    // Moved to another network namespace and back.
    |other| {
        ip(&format!("link set t0 netns {}", other.tid()));
        let home = gettid().as_raw_nonzero();
        other.run(move || ip(&format!("link set t0 netns {home}")));
        ip("link set t0 up");
    },
    // Renamed and back.
    |_| {
        ip("link set t0 down");
        ip("link set t0 name t9");
        ip("link set t9 name t0");
        ip("link set t0 up");
    },
    // Another interface gets the name and is down. The port keeps its device.
    |_| {
        ip("link set t0 down");
        ip("link set t0 name t9");
        ip("link set t9 up");
        ip("tuntap add t0 mode tun");
    },
];

#[towpath_testenv::needs(netns, tun)]
#[test]
fn tun_devices_come_back() {
    let packet = [0x45, 0, 0, 20, 0, 0, 0, 0, 64, 59, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2];
    for way in TUN_WAYS {
        within(|| {
            let config = tun::Config::tun("t0");
            let other = Host::new();
            let mut ports = patiently(|| config.open("p", 2, &Opener::local(&config))).unwrap();
            arrives_from("t0", &packet, LinkType::RAW, &mut ports);
            for _ in 0..2 {
                way(&other);
                let renamed = crate::interface::exists("t9");
                arrives_from(if renamed { "t9" } else { "t0" }, &packet, LinkType::RAW, &mut ports);
                for port in &mut ports {
                    assert_eq!(
                        port.send(&mut std::iter::once(Frame::new(&packet, LinkType::RAW))).unwrap(),
                        1
                    );
                    assert_eq!(port.stats().port_down, 0);
                }
                if renamed {
                    ip("tuntap del t0 mode tun");
                    ip("link set t9 down");
                    ip("link set t9 name t0");
                    ip("link set t0 up");
                }
            }
        });
    }
}

/// The error of an attempt. A process that another test starts has copies of all descriptors until execve(2), so a claim may live on for a
/// moment.
fn error_of<T>(mut attempt: impl FnMut() -> Result<T, Error>) -> Error {
    loop {
        match attempt() {
            Err(Error::InUse { .. }) => thread::yield_now(),
            result => return result.err().expect("an error"),
        }
    }
}

/// An optional interface that does not exist yet.
#[towpath_testenv::needs(netns, xdp)]
#[test]
fn optional_interfaces_are_waited_for() {
    let configs = [
        (driver::Config::AfPacket(af_packet::Config::new("v1")), 2),
        (driver::Config::AfXdp(af_xdp::Config { chunks: 512, ..af_xdp::Config::new("v1") }), 1),
    ];
    for (config, workers) in configs {
        within(|| {
            let error = error_of(|| config.open("p", workers));
            assert!(matches!(error, Error::NoInterface { .. }), "{error:?}");
            let open = || config.open_optional("p", workers, &config.local_opener());
            let mut ports = patiently(open).unwrap();
            assert_eq!(ports.len(), workers);
            for port in &mut ports {
                assert_eq!(port.state().unwrap(), State::Gone);
                let error = error_of(|| port.reopen());
                assert!(matches!(error, Error::NoInterface { .. }), "{error:?}");
                assert_eq!(port.receive(&mut Burst::new(8)).unwrap(), Received::Nothing);
            }
            veth("v0", "v1");
            arrives(&mut ports);
            ip("link del v1");
            assert_eq!(ports[0].state().unwrap(), State::Gone);
            veth("v0", "v1");
            arrives(&mut ports);
        });
    }
}
