//! Staff, guests and the world at a small office's gateway.

use super::super::dns;
use super::super::frames::{Host, Ip4, Path};
use super::super::scene::{Scene, drop, pass, reject};
use super::super::tcp::{CLIENT, Connection, SERVER};
use super::{PING, PING6, PONG, PONG6, dhcp, everybody, group6, host, neighbour, on, quoted};

const LAN: u16 = 10;
const GUEST: u16 = 20;
const WAN: u16 = 30;

pub(super) fn play(scene: &mut Scene) {
    neighbours(scene);
    staff(scene);
    guests(scene);
    world(scene);
}

/// A host of the world, behind the line's router.
fn world_host(ip: &str) -> Host {
    host(254, ip)
}

/// A connection that begins on one port of the gateway and is answered on another.
struct Across {
    there: Connection,
    back: Connection,
}

impl Across {
    fn new(client: (u16, Host), server: (u16, Host), ports: (u16, u16)) -> Self {
        let seq = [u32::from(ports.0) * 100, u32::from(ports.1) * 100];
        let there = Connection::new(on(client.0, client.1, server.1), ports, seq);
        // The server's first segment acknowledges the client's.
        let back = Connection::new(on(server.0, client.1, server.1), ports, [seq[0] + 1, seq[1]]);
        Self { there, back }
    }
}

fn neighbours(scene: &mut Scene) {
    let alice = host(21, "203.0.113.21");
    let gateway = host(1, "203.0.113.1");
    scene.frame(&[pass(100)], "ARP request for the gateway", on(LAN, alice, gateway).arp(1));
    let solicit = neighbour(host(1, "2001:db8:10::1"), 1);
    let group = on(LAN, host(21, "2001:db8:10::21"), group6("ff02::1:ff00:1"));
    scene.icmp(&[pass(110)], "neighbour solicitation", group, (135, 0), [0; 4], &solicit);
    scene.syn(&[drop(290)], "a port without a rule", Path::new(alice, gateway), (50_000, 443));
}

fn staff(scene: &mut Scene) {
    let alice = host(21, "203.0.113.21");
    let alice6 = host(21, "2001:db8:10::21");
    let mail = host(5, "203.0.113.5");
    let web = world_host("192.0.2.80");
    let web6 = world_host("2001:db8:80::80");

    scene.udp(&[pass(1000)], "DHCP discover", on(LAN, host(21, "0.0.0.0"), everybody()), (68, 67), &dhcp(1));
    scene.syn(&[drop(1010)], "a forged source", on(LAN, host(66, "198.51.100.9"), web), (50_001, 443));
    scene.syn(
        &[drop(1010)],
        "a guest's address on the staff's port",
        on(LAN, host(66, "203.0.113.70"), web),
        (50_001, 443),
    );
    scene.syn(
        &[drop(1020)],
        "a forged source of IPv6",
        on(LAN, host(66, "2001:db8:99::1"), web6),
        (50_001, 443),
    );

    let mut smtp = Across::new((LAN, mail), (WAN, world_host("192.0.2.25")), (50_025, 25));
    scene.tcp(&[pass(1100)], "the mail server sends mail", (&mut smtp.there, CLIENT), "S", &[]);
    scene.tcp(
        &[pass(1100)],
        "the answer: check-state :any finds the state",
        (&mut smtp.back, SERVER),
        "SA",
        &[],
    );
    scene.syn(
        &[reject(1110)],
        "mail from a desk is reset",
        on(LAN, alice, world_host("192.0.2.25")),
        (50_026, 25),
    );

    let mut https = Across::new((LAN, alice), (WAN, web), (50_443, 443));
    scene.tcp(&[pass(1120)], "HTTPS", (&mut https.there, CLIENT), "S", &[]);
    scene.tcp(&[pass(1120)], "the answer: a state", (&mut https.back, SERVER), "SA", &[]);
    scene.tcp(&[pass(1120)], "the next segment: a state", (&mut https.there, CLIENT), "A", &[]);
    scene.syn(&[pass(1120)], "HTTPS over IPv6", on(LAN, alice6, web6), (50_444, 443));
    let mut stray = Connection::new(on(LAN, alice, web), (50_445, 443), [1, 1]);
    scene.tcp(&[reject(1190)], "a segment of a connection without a SYN", (&mut stray, CLIENT), "A", &[]);

    let resolver = world_host("192.0.2.53");
    let (name, answer) = ("www.example.com", [[192, 0, 2, 80]]);
    let ask = on(LAN, alice, resolver);
    scene.udp(&[pass(1130)], "a name", ask, (50_053, 53), &dns::message(3, name, &[]));
    let back = on(WAN, resolver, alice);
    scene.udp(&[pass(1130)], "its answer: a state", back, (53, 50_053), &dns::message(3, name, &answer));
    scene.udp(
        &[reject(1190)],
        "a tunnel that is not allowed",
        on(LAN, alice, web),
        (50_054, 1_194),
        &[0x38; 14],
    );
    scene.icmp(&[pass(1140)], "ping", on(LAN, alice, web), PING.0, PING.1, &[b'p'; 32]);
    scene.icmp(&[pass(1140)], "its answer: a state", on(WAN, web, alice), PONG.0, PONG.1, &[b'p'; 32]);
    scene.icmp(
        &[reject(1190)],
        "a redirect: rejected, without an answer",
        on(LAN, mail, web),
        (5, 1),
        [203, 0, 113, 9],
        &[0; 28],
    );
    scene.icmp(&[pass(1150)], "ping over IPv6", on(LAN, alice6, web6), PING6.0, PING6.1, &[b'p'; 32]);
    scene.icmp(&[pass(1150)], "its answer: a state", on(WAN, web6, alice6), PONG6.0, PONG6.1, &[b'p'; 32]);
    scene.udp(&[reject(1190)], "the tunnel over IPv6", on(LAN, alice6, web6), (50_055, 1_194), &[0x38; 14]);
}

fn guests(scene: &mut Scene) {
    let guest = host(70, "203.0.113.70");
    let web = world_host("192.0.2.80");
    let gateway = host(1, "203.0.113.65");
    let up = |to: Host| on(GUEST, guest, to);

    scene.udp(
        &[pass(2000)],
        "a guest's DHCP discover",
        on(GUEST, host(70, "0.0.0.0"), everybody()),
        (68, 67),
        &dhcp(1),
    );
    scene.syn(
        &[drop(2010)],
        "a guest with a staff address",
        on(GUEST, host(70, "203.0.113.21"), web),
        (51_000, 443),
    );
    let six = on(GUEST, host(70, "2001:db8:20::70"), world_host("2001:db8:80::80"));
    scene.syn(&[drop(2010)], "IPv6: not from 203.0.113.64/26 either", six, (51_000, 443));
    scene.udp(
        &[pass(2030)],
        "asks the gateway for a name",
        up(gateway),
        (51_053, 53),
        &dns::message(4, "www.example.com", &[]),
    );
    scene.udp(
        &[drop(2090)],
        "a request to another resolver",
        up(world_host("192.0.2.53")),
        (51_054, 53),
        &dns::message(4, "www.example.com", &[]),
    );
    scene.syn(&[drop(2040)], "tries the staff's file share", up(host(21, "203.0.113.21")), (51_001, 445));
    scene.syn(&[drop(2040)], "tries another guest", up(host(71, "203.0.113.71")), (51_002, 80));
    let mut https = Across::new((GUEST, guest), (WAN, web), (51_443, 443));
    scene.tcp(&[pass(2050)], "HTTPS of a guest", (&mut https.there, CLIENT), "S", &[]);
    scene.tcp(&[pass(2050)], "the answer: a state", (&mut https.back, SERVER), "SA", &[]);
    scene.udp(&[pass(2060)], "QUIC: the pipe has room", up(web), (51_500, 443), &[0x40; 1_350]);
    scene.udp(
        &[pass(2060)],
        "the state's rule is the pipe: still room",
        up(web),
        (51_500, 443),
        &[0x40; 1_350],
    );
    scene.udp(&[drop(2060)], "full: the policer drops", up(web), (51_500, 443), &[0x40; 1_350]);
    scene.wait(1);
    scene.udp(
        &[pass(2060)],
        "the answer a second later, through the same pipe",
        on(WAN, web, guest),
        (443, 51_500),
        &[0x40; 1_350],
    );
    scene.syn(&[drop(2090)], "ssh of a guest: set 6 is disabled", up(web), (51_003, 22));
}

fn world(scene: &mut Scene) {
    let mail = host(5, "203.0.113.5");
    let shell = host(6, "203.0.113.6");
    let alice = host(21, "203.0.113.21");
    let stranger = world_host("192.0.2.66");
    let down = |from: Host, to: Host| on(WAN, from, to);

    scene.syn(&[drop(9000)], "from a private address", down(world_host("10.9.8.7"), mail), (52_000, 25));
    scene.syn(&[drop(9000)], "from one of our own", down(world_host("203.0.113.21"), mail), (52_000, 25));
    let own6 = down(world_host("2001:db8:10::21"), host(5, "2001:db8:10::5"));
    scene.syn(&[drop(9000)], "and of IPv6", own6, (52_000, 443));
    let mut odd = Connection::new(down(stranger, mail), (52_001, 25), [1, 1]);
    scene.tcp(&[drop(9010)], "SYN and FIN at once", (&mut odd, CLIENT), "SF", &[]);
    // RFC 791, 3.1: loose source and record route by way of one host.
    let lsrr = Ip4 { proto: 17, options: &[131, 7, 4, 203, 0, 113, 21, 0], ..Ip4::default() };
    scene.ip4(&[drop(9020)], "a source route", down(stranger, mail), lsrr, &[0xcb, 0x20, 0, 53, 0, 8, 0, 0]);

    let mut smtp = Across::new((WAN, stranger), (LAN, mail), (52_025, 25));
    scene.tcp(
        &[pass(3010)],
        "mail arrives: back from the subroutine, in the table",
        (&mut smtp.there, CLIENT),
        "S",
        &[],
    );
    scene.tcp(&[pass(3010)], "the mail server answers: a state", (&mut smtp.back, SERVER), "SA", &[]);
    let https6 = down(world_host("2001:db8:66::1"), host(5, "2001:db8:10::5"));
    scene.syn(&[pass(3010)], "its web mail over IPv6", https6, (52_443, 443));
    scene.syn(&[drop(3090)], "a port that is not in the table", down(stranger, mail), (52_002, 80));
    scene.udp(&[drop(3090)], "the port, not the protocol", down(stranger, mail), (52_003, 443), &[0; 20]);

    let partner = world_host("198.51.100.7");
    let mut ssh = Across::new((WAN, partner), (LAN, shell), (52_022, 22));
    scene.tcp(&[pass(3020)], "a partner's ssh", (&mut ssh.there, CLIENT), "S", &[]);
    scene.tcp(&[pass(3020)], "the answer: a state", (&mut ssh.back, SERVER), "SA", &[]);
    scene.syn(&[pass(3020)], "the second", down(partner, shell), (52_023, 22));
    scene.syn(&[drop(3020)], "a third: the table says two", down(partner, shell), (52_024, 22));
    let other = world_host("198.51.100.130");
    scene.syn(&[pass(3020)], "another partner", down(other, shell), (52_025, 22));
    scene.syn(
        &[drop(3020)],
        "a second connection of its net: over the limit",
        down(other, shell),
        (52_026, 22),
    );
    scene.syn(
        &[pass(3020)],
        "each address by itself",
        down(world_host("198.51.100.131"), shell),
        (52_027, 22),
    );
    scene.syn(&[drop(3090)], "ssh of a stranger", down(stranger, shell), (52_028, 22));
    scene.syn(&[drop(3090)], "a partner at another port", down(partner, shell), (52_029, 23));

    let about = quoted(&down(alice, stranger).udp(1, (50_053, 53), &[0; 8]), true);
    scene.icmp(&[pass(3030)], "time exceeded", down(stranger, alice), (11, 0), [0; 4], &about);
    scene.icmp(&[drop(3090)], "a ping from outside", down(stranger, alice), PING.0, PING.1, &[b'p'; 32]);
    let stranger6 = down(world_host("2001:db8:66::1"), host(21, "2001:db8:10::21"));
    scene.icmp(&[pass(3040)], "packet too big", stranger6, (2, 0), [0, 0, 5, 0], &[0x60; 48]);
    scene.icmp(&[drop(3090)], "a ping of IPv6 from outside", stranger6, PING6.0, PING6.1, &[b'p'; 32]);
    scene.udp(&[drop(3090)], "an answer without a request", down(stranger, alice), (53, 50_060), &[0; 20]);
}
