//! Exclusive ports: what the network stack gets.

use super::super::ingress::tests::WITHOUT_TCX;
use super::*;

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
        let socket = crate::netns::bound(|| std::net::UdpSocket::bind("10.1.0.1:1000"));
        for _ in 0..count {
            socket.send_to(text.as_bytes(), ("10.1.0.2", port)).unwrap();
        }
    });
}

fn bound(port: u16) -> std::net::UdpSocket {
    let socket = crate::netns::bound(|| std::net::UdpSocket::bind(("10.1.0.2", port)));
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

/// Sends datagrams to this socket until the network stack has one; it has no others. A port that was closed just now drops some more while
/// a child process that another test has forked holds copies of its descriptors, until it calls execve(2).
fn reaches(host: &crate::netns::Host, text: &'static str, stack: &std::net::UdpSocket) {
    let to = stack.local_addr().unwrap().port();
    until(|| {
        send_from(host, text, to, 1);
        let got = texts(stack);
        assert!(got.iter().all(|got| got == text), "{got:?}");
        !got.is_empty()
    });
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
        reaches(&host, "free", &stack);
    });
}

/// Packets of `host` to the machine go to the stack alone; the others go to the port alone.
#[towpath_testenv::needs(netns, tcx)]
#[test]
fn the_network_stack_gets_the_packets_of_host() {
    with_both_hooks(|| {
        let host = host_and_stack();
        let sockets = [9, 10, 11, 12].map(bound);
        // All entries but the last keep its datagrams from the stack.
        let other = bound(13);
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
            // 10.1.0.77 is not an address of this machine: the port gets its frame in any row.
            host.run(|| {
                ip("neigh replace 10.1.0.77 lladdr 02:00:00:00:00:09 dev v0");
                std::net::UdpSocket::bind("10.1.0.1:0").unwrap().send_to(b"mark", "10.1.0.77:9").unwrap();
            });
            let ones = |texts: &[String]| texts.iter().filter(|text| *text == "one").count();
            let taken = expected.iter().filter(|stays| !**stays).count();
            let (mut seen, mut stack) = (Vec::new(), [0; 4]);
            // The kernel delivers frames that were sent on different processors in any order.
            until(|| {
                seen.extend(received(&mut port, 0));
                stack.iter_mut().zip(&sockets).for_each(|(count, socket)| *count += ones(&texts(socket)));
                seen.iter().any(|text| text == "mark") && ones(&seen) + stack.iter().sum::<usize>() >= 4
            });
            assert_eq!((ones(&seen), stack), (taken, expected.map(usize::from)), "{entry}");
            // The next port is alone: this one's filter is gone.
            drop(port);
            reaches(&host, "free", &other);
            assert_eq!(sockets.each_ref().map(|socket| ones(&texts(socket))), [0; 4], "{entry}: once");
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
        reaches(&host, "open", &stack);
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
        let got = texts(&stack);
        assert!(!got.iter().any(|text| text == "closed"), "{got:?}");
        assert_eq!(crate::clsact::Abandoned::all().len(), 1);
        drop(Socket::open(config).unwrap());
        send_from(&host, "closed", 9, 1);
        drop(exclusive("v1", &[]));
        reaches(&host, "open", &stack);
        assert_eq!(crate::clsact::Abandoned::all(), []);
        attach(true);
        for abandoned in crate::clsact::Abandoned::all() {
            assert_eq!(abandoned.interface, "v1");
            abandoned.remove().unwrap();
        }
        reaches(&host, "free", &stack);
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
            reaches(&host, "free", &stack);
            // The end of a namespace removes its interfaces later.
            ip("link del v1");
            drop(host);
        }
    });
}
