//! The programs on veth pairs, in network namespaces.

use std::time::Duration;

use rustix::thread::{CapabilitySet, CapabilitySets, set_capabilities};

use towpath_wire::End;

use super::deny::{Denying, Net};
use super::*;
use crate::netns::{Host, ip, until, veth, within};
use crate::{Burst, Port, Received, af_packet, driver::DriverConfig};

const ENTRIES: u32 = 64;
const FLOWS: Flows = Flows { entries: ENTRIES, outlive: false, deny: true };

fn key(ifindex: u32, port: u16) -> FlowKey {
    FlowKey {
        src: [10, 0, 0, 1].into(),
        dst: [10, 0, 0, 2].into(),
        ifindex,
        src_port: port,
        dst_port: port,
        vlan: None,
        proto: 17,
    }
}

#[test]
fn keys_have_the_layout_of_the_program() {
    let bytes = FlowKey { vlan: Some(5), ..key(0x0102_0304, 0x1122) }.to_bytes();
    assert_eq!((bytes[..4].to_vec(), bytes[16..20].to_vec()), (vec![10, 0, 0, 1], vec![10, 0, 0, 2]));
    assert_eq!(bytes[32..36], 0x0102_0304_u32.to_ne_bytes());
    assert_eq!(
        (bytes[36..38].to_vec(), bytes[40..42].to_vec()),
        (vec![0x11, 0x22], 0x8005_u16.to_ne_bytes().to_vec())
    );
    assert_eq!(bytes[42..], [17, 4]);
    let six =
        FlowKey { src: "2001:db8::1".parse().unwrap(), dst: "2001:db8::2".parse().unwrap(), ..key(1, 1) };
    assert_eq!((six.to_bytes()[..2].to_vec(), six.to_bytes()[31], six.to_bytes()[43]), (vec![0x20, 1], 2, 6));
}

#[test]
fn the_last_cpu_gives_the_number_of_values() {
    assert!(possible_cpus().unwrap() >= 1);
}

/// An engine's side of two ports, `wan` and `lan`, with machines behind them.
struct World {
    map: FlowMap,
    wan: af_packet::Socket,
    links: [Link; 2],
    left: Host,
    right: Host,
}

/// Programs with the same number of entries share their maps: each test has a number of its own.
fn world(entries: u32) -> World {
    let (left, right) = (Host::new(), Host::new());
    veth("wan", "l0");
    veth("lan", "r0");
    ip("link set r0 address 02:00:00:00:00:02");
    left.take("l0", "10.0.0.1/24");
    right.take("r0", "10.0.0.2/24");
    let flows = Some(Flows { entries, ..FLOWS });
    let config = |name: &str| af_packet::Config { flows, ..af_packet::Config::new(name) };
    let opener = Opener::local(&config("wan"));
    let map = FlowMap::open(&opener, entries).unwrap();
    map.set_epoch(|_| 7);
    let wan = af_packet::Socket::open(config("wan")).unwrap();
    let links = Links::new().unwrap();
    let links = ["wan", "lan"].map(|name| {
        until(|| links.get(name).is_some());
        links.get(name).unwrap()
    });
    // Without an engine nothing answers to ARP.
    left.run(|| ip("neigh add 10.0.0.2 lladdr 02:00:00:00:00:02 dev l0"));
    World { map, wan, links, left, right }
}

/// Frames to a port that the socket received.
fn received(port: &mut dyn Port, to: u16) -> usize {
    let mut burst = Burst::new(64);
    let mut count = 0;
    while port.receive(&mut burst).unwrap() == Received::Frames {
        let is = |frame: &crate::Frame<'_>| frame.bytes.get(36..38) == Some(&to.to_be_bytes()[..]);
        count += burst.iter().filter(is).count();
    }
    count
}

/// A frame of an entry is redirected and counted; other frames are received. Another epoch, and the end of the entry, undo that.
#[towpath_testenv::needs(netns, tcx)]
#[test]
fn frames_of_an_entry_are_redirected_and_not_received() {
    within(|| {
        let World { map, mut wan, links: [from, to], left, right } = world(ENTRIES + 1);
        let [server, other] =
            [7, 8].map(|port| right.run(move || std::net::UdpSocket::bind(("10.0.0.2", port)).unwrap()));
        for socket in [&server, &other] {
            socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        }
        // One socket for each port: processes of other tests may keep a closed one until execve(2).
        let senders =
            [7, 8].map(|port| left.run(move || std::net::UdpSocket::bind(("10.0.0.1", port)).unwrap()));
        let send = |port: u16| {
            let sent = senders[usize::from(port) - 7].send_to(b"12345678", ("10.0.0.2", port));
            assert_eq!(sent.unwrap(), 8);
        };
        let redirect = Redirect { ifindex: to.ifindex, mtu: to.mtu, ..Redirect::default() };
        map.write(3, redirect, 7);
        let (written, result) = map.insert(&[(key(from.ifindex, 7), 3)]);
        assert!(result.is_ok() && written == 1);
        for _ in 0..5 {
            send(7);
            server.recv(&mut [0; 16]).unwrap();
        }
        send(8);
        until(|| received(&mut wan, 8) == 1);
        assert_eq!(received(&mut wan, 7), 0);
        let counts = map.counts(3);
        assert_eq!((counts.packets, counts.bytes, counts.in_use), (5, 5 * 36, true));
        let stats = map.stats().unwrap();
        assert_eq!((stats.forwarded_packets, stats.forwarded_bytes, stats.stale), (5, 180, 0));
        assert!(stats.no_entry >= 1, "{stats:?}");
        // Another epoch.
        map.set_epoch(|_| 8);
        send(7);
        until(|| received(&mut wan, 7) == 1);
        assert!(map.renew(3, redirect, 8) && !map.renew(3, Redirect { mtu: 1, ..redirect }, 8));
        send(7);
        server.recv(&mut [0; 16]).unwrap();
        // Above the MTU of the egress.
        map.write(4, Redirect { mtu: 30, ..redirect }, 8);
        map.insert(&[(key(from.ifindex, 8), 4)]).1.unwrap();
        send(8);
        until(|| received(&mut wan, 8) == 1);
        assert_eq!(map.stats().unwrap().mtu, 1);
        // Ended, and removed.
        map.end(3);
        assert!(!map.counts(3).in_use);
        send(7);
        until(|| received(&mut wan, 7) == 1);
        map.remove(&key(from.ifindex, 7)).unwrap();
        map.remove(&key(from.ifindex, 7)).unwrap();
        // The port ends: the kernel's network stack alone has the frames.
        drop(wan);
        map.renew(4, redirect, 8);
        other.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
        // A child process that another test has forked holds copies of the port's descriptors until it calls execve(2).
        until(|| {
            (0..3).all(|_| {
                send(8);
                other.recv(&mut [0; 16]).is_err()
            })
        });
    });
}

/// Addresses in the map are dropped at a port whose entry has the current epoch, by the first of the rules of their class, and counted.
#[towpath_testenv::needs(netns, tcx)]
#[test]
fn frames_of_denied_addresses_are_dropped_and_counted() {
    within(|| {
        let World { map, mut wan, links: [from, _], left, .. } = world(ENTRIES + 2);
        let sender = left.run(|| std::net::UdpSocket::bind("10.0.0.1:7").unwrap());
        let send = || assert_eq!(sender.send_to(b"12345678", "10.0.0.2:7").unwrap(), 8);
        let net = |address: &str, len| Net::new(End::Source, address.parse().unwrap(), len);
        let to = |address: &str, len| Net::new(End::Destination, address.parse().unwrap(), len);
        let deny = map.deny();
        // Packets of IPv4 and UDP.
        let counts = |rule| deny.counts(5, 1, rule).unwrap();
        let entries =
            [(net("10.0.0.0", 8), 0b100), (net("10.0.0.1", 32), 0b110), (net("10.0.0.9", 32), 0b001)];
        deny.write(&entries).unwrap();
        let port = Denying { ifindex: from.ifindex, any_vlan: true, rules: [0b111; 4], ..Denying::default() };
        deny.add_port(5, port).unwrap();
        map.set_denying_ports(1);
        // The entry has no epoch yet.
        send();
        until(|| received(&mut wan, 7) == 1);
        deny.renew(5, 7);
        (0..20).for_each(|_| send());
        until(|| counts(1) == [20, 20 * 36]);
        // The network alone, for another rule.
        deny.remove(&[net("10.0.0.1", 32), net("10.0.0.77", 32)]).unwrap();
        (0..10).for_each(|_| send());
        until(|| counts(2) == [10, 10 * 36]);
        assert_eq!((counts(0), counts(1)), ([0; 2], [20, 20 * 36]));
        let stats = map.stats().unwrap();
        assert_eq!((stats.dropped_packets, stats.dropped_bytes, received(&mut wan, 7)), (30, 30 * 36, 0));
        // Another epoch, rules of other tables, another port, no entry.
        map.set_epoch(|_| 8);
        send();
        until(|| received(&mut wan, 7) == 1);
        deny.renew(5, 8);
        // The rules of other classes do not count.
        for rules in [[0b011; 4], [0b111, 0b011, 0b111, 0b111]] {
            deny.add_port(5, Denying { rules, ..port }).unwrap();
            deny.renew(5, 8);
            send();
            until(|| received(&mut wan, 7) == 1);
        }
        deny.add_port(6, Denying { ifindex: from.ifindex + 1000, ..port }).unwrap();
        deny.renew(6, 8);
        deny.remove_port(5, port).unwrap();
        send();
        until(|| received(&mut wan, 7) == 1);
        assert_eq!(map.stats().unwrap().dropped_packets, 30);
        // Rules 1 and 3 deny destinations, rule 2 a source. The first one counts.
        let port = Denying { rules: [0, 0b1111, 0, 0], destinations: 0b1010, ..port };
        deny.add_port(5, port).unwrap();
        deny.renew(5, 8);
        deny.write(&[(to("10.0.0.0", 30), 0b1000), (to("10.0.0.1", 32), 0b0010)]).unwrap();
        (0..5).for_each(|_| send());
        until(|| counts(2) == [15, 15 * 36]);
        deny.write(&[(to("10.0.0.2", 32), 0b1010)]).unwrap();
        (0..5).for_each(|_| send());
        until(|| counts(1) == [25, 25 * 36]);
        deny.remove(&[net("10.0.0.0", 8), to("10.0.0.2", 32)]).unwrap();
        (0..5).for_each(|_| send());
        until(|| counts(3) == [5, 5 * 36]);
        assert_eq!((counts(0), counts(1), counts(2)), ([0; 2], [25, 25 * 36], [15, 15 * 36]));
        assert_eq!((map.stats().unwrap().dropped_packets, received(&mut wan, 7)), (45, 0));
    });
}

/// The map has as many entries as it was opened with.
#[towpath_testenv::needs(netns, tcx)]
#[test]
fn a_full_map_refuses_entries() {
    within(|| {
        let World { map, links: [from, to], .. } = world(ENTRIES);
        let redirect = Redirect { ifindex: to.ifindex, mtu: to.mtu, ..Redirect::default() };
        let entries: Vec<_> =
            (0..ENTRIES + 8).map(|at| (key(from.ifindex, 1000 + at as u16), at % ENTRIES)).collect();
        (0..ENTRIES).for_each(|slot| map.write(slot, redirect, 7));
        let (written, result) = map.insert(&entries);
        assert!(written >= ENTRIES as usize / 2 && written < entries.len() && result.is_err(), "{written}");
        for (key, _) in &entries {
            map.remove(key).unwrap();
        }
    });
}

/// The addresses of `host` stay with the kernel, also with offload.
#[towpath_testenv::needs(netns, tcx)]
#[test]
fn the_host_filter_comes_first() {
    within(|| {
        let (left, _right) = (Host::new(), Host::new());
        veth("wan", "l0");
        left.take("l0", "10.0.0.1/24");
        ip("addr add 10.0.0.254/24 dev wan");
        let host = crate::host_filter::Filter::parse(["arp", "udp from any to me 7"]).unwrap();
        let kernel = af_packet::Kernel::Excluded { host, closed: false, stated: true };
        let config = af_packet::Config { flows: Some(FLOWS), kernel, ..af_packet::Config::new("wan") };
        let map = FlowMap::open(&Opener::local(&config), ENTRIES).unwrap();
        let mut ports = config.open("wan", 1, &Opener::local(&config)).unwrap();
        let own = std::net::UdpSocket::bind("10.0.0.254:7").unwrap();
        own.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        left.run(|| {
            let socket = std::net::UdpSocket::bind("10.0.0.1:5000").unwrap();
            for port in [7, 8] {
                socket.send_to(b"12345678", ("10.0.0.254", port)).unwrap();
            }
        });
        own.recv(&mut [0; 16]).unwrap();
        until(|| received(&mut *ports[0], 8) == 1);
        assert_eq!(received(&mut *ports[0], 7), 0);
        // The program for flows has seen the packet that the port gets.
        assert!(map.stats().unwrap().no_entry >= 1);
    });
}

/// The verifier accepts all programs of a process with all privileges, also that of Linux 6.1 (`.ci/nightly verifier`).
#[towpath_testenv::needs(netns, xdp)]
#[test]
fn all_programs_load() {
    within(|| {
        let sockets = crate::sys::WordMap::new(17, 64).unwrap();
        for (closed, frags) in [(false, true), (true, false)] {
            let xdp = Xdp { index: 1, sockets: sockets.as_fd(), closed, frags };
            load_xdp(std::process::id(), Flows { entries: 8 * ENTRIES, ..FLOWS }, xdp).unwrap();
            program::load_weak(FLOWS, xdp).unwrap();
        }
    });
}

/// The verifier accepts the programs of a thread with the privileges of the engine's launcher, without CAP_PERFMON.
#[towpath_testenv::needs(netns, xdp)]
#[test]
fn xdp_programs_load() {
    within(|| {
        let sockets = crate::sys::WordMap::new(17, 64).unwrap();
        let bits = CapabilitySet::NET_ADMIN | CapabilitySet::BPF;
        let own = CapabilitySets { effective: bits, permitted: bits, inheritable: CapabilitySet::empty() };
        set_capabilities(None, own).unwrap();
        for (closed, frags) in [(false, true), (true, false)] {
            let xdp = Xdp { index: 1, sockets: sockets.as_fd(), closed, frags };
            load_xdp(std::process::id(), Flows { entries: 2 * ENTRIES, ..FLOWS }, xdp).unwrap();
            program::load_weak(FLOWS, xdp).unwrap();
        }
    });
}

/// A program that the verifier refuses is not a missing privilege, and a missing privilege is not a program that it refuses.
#[towpath_testenv::needs(netns, xdp)]
#[test]
fn the_verifiers_refusal_is_no_missing_privilege() {
    within(|| {
        // r0 = *(u32 *)(r1 + 4096), beyond the context; exit.
        let code = [0x1000_1061, 0x95];
        let load = || crate::sys::bpf_load(6, &code, 0, 37).unwrap_err();
        assert_eq!(load().raw_os_error(), Some(crate::sys::REFUSED_BY_VERIFIER), "{}", load());
        let reason = |error: i32| {
            let opener = Opener::new(move |_| Err(io::Error::from_raw_os_error(error)));
            FlowMap::open(&opener, ENTRIES).unwrap_err()
        };
        assert!(reason(crate::sys::REFUSED_BY_VERIFIER).contains("verifier refuses a program"));
        assert!(reason(libc::EACCES).contains("may not load BPF programs"));
        let config = crate::af_xdp::Config::new("wan");
        let error = config.refused("attaching", load()).to_string();
        assert!(error.contains("attaching: the kernel's verifier refuses"), "{error}");
        let none = CapabilitySet::empty();
        set_capabilities(None, CapabilitySets { effective: none, permitted: none, inheritable: none })
            .unwrap();
        assert_eq!(load().raw_os_error(), Some(libc::EPERM));
        let config = af_packet::Config {
            flows: Some(Flows { entries: 4 * ENTRIES, ..FLOWS }),
            ..af_packet::Config::new("wan")
        };
        let reason = FlowMap::open(&Opener::local(&config), 4 * ENTRIES).unwrap_err();
        assert!(reason.contains("may not load BPF programs"), "{reason}");
    });
}
