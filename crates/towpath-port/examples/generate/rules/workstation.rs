//! Fifteen seconds of traffic at the network card of a workstation.

use super::super::dns;
use super::super::frames::{Ip4, Path};
use super::super::scene::{Scene, drop, pass, reject};
use super::super::tcp::{CLIENT, Connection, SERVER};
use super::{PING, PING6, PONG, PONG6, dhcp, everybody, group6, host, neighbour, quoted};

pub(super) fn play(scene: &mut Scene) {
    let me = host(10, "192.0.2.10");
    let me6 = host(10, "2001:db8:1::10");
    let router = host(1, "192.0.2.1");
    let router6 = host(1, "fe80::1");
    let admin = host(2, "192.0.2.2");
    let admin_afar = host(1, "198.51.100.5");
    let web = host(1, "203.0.113.80");
    let web6 = host(1, "2001:db8:80::80");
    let stranger = host(1, "198.51.100.77");

    scene.frame(&[pass(100)], "ARP request for the router", Path::new(me, router).arp(1));
    scene.frame(&[pass(100)], "ARP: the router answers", Path::new(router, me).arp(2));
    let solicit = neighbour(router6, 1);
    let router_group = Path::new(me6, group6("ff02::1:ff00:1"));
    scene.icmp(&[pass(110)], "neighbour solicitation", router_group, (135, 0), [0; 4], &solicit);
    let advertise = neighbour(router6, 2);
    scene.icmp(
        &[pass(110)],
        "neighbour advertisement",
        Path::new(router6, me6),
        (136, 0),
        [0xe0, 0, 0, 0],
        &advertise,
    );

    let nobody = host(10, "0.0.0.0");
    scene.udp(
        &[pass(300)],
        "DHCP discover, no address yet",
        Path::new(nobody, everybody()),
        (68, 67),
        &dhcp(1),
    );
    scene.udp(&[pass(310)], "DHCP offer by broadcast", Path::new(router, everybody()), (67, 68), &dhcp(2));
    scene.udp(
        &[pass(300)],
        "DHCP renewal, from the address itself",
        Path::new(me, router),
        (68, 67),
        &dhcp(1),
    );
    scene.udp(&[pass(310)], "its answer, to the address", Path::new(router, me), (67, 68), &dhcp(2));

    let ask = Path::new(me, router);
    let name = "www.example.com";
    scene.udp(&[pass(510)], "asks the resolver", ask, (51_000, 53), &dns::message(1, name, &[]));
    let answer = dns::message(1, name, &[[203, 0, 113, 80]]);
    scene.udp(&[pass(510)], "the resolver answers: a state", ask.reverse(), (53, 51_000), &answer);
    scene.udp(&[drop(65000)], "an answer to a port without a request", ask.reverse(), (53, 51_001), &answer);

    let mut https = Connection::new(Path::new(me, web), (51_443, 443), [7_000, 90_000]);
    scene.tcp(&[pass(500)], "opens HTTPS", (&mut https, CLIENT), "S", &[]);
    scene.tcp(&[pass(500)], "the server answers: a state", (&mut https, SERVER), "SA", &[]);
    scene.tcp(&[pass(500)], "acknowledges", (&mut https, CLIENT), "A", &[]);
    scene.tcp(&[pass(500)], "sends", (&mut https, CLIENT), "PA", &[0x17; 80]);
    scene.tcp(&[pass(500)], "receives", (&mut https, SERVER), "PA", &[0x17; 300]);
    scene.tcp(&[pass(500)], "closes", (&mut https, CLIENT), "FA", &[]);
    scene.tcp(&[pass(500)], "the server closes too: one second is left", (&mut https, SERVER), "FA", &[]);
    scene.tcp(&[pass(500)], "acknowledges", (&mut https, CLIENT), "A", &[]);
    scene.wait(3);
    scene.tcp(&[drop(410)], "three seconds later the state is gone", (&mut https, SERVER), "A", &[]);

    let mut ssh6 = Connection::new(Path::new(me6, web6), (51_022, 22), [1, 1]);
    scene.tcp(&[pass(500)], "opens ssh over IPv6", (&mut ssh6, CLIENT), "S", &[]);
    scene.tcp(&[pass(500)], "is refused: a reset, by the state", (&mut ssh6, SERVER), "RA", &[]);
    scene.wait(2);
    scene.tcp(
        &[drop(410)],
        "two seconds after the reset the state has expired",
        (&mut ssh6, SERVER),
        "A",
        &[],
    );

    let clock = Path::new(me, host(1, "203.0.113.123"));
    scene.udp(&[pass(510)], "asks for the time", clock, (123, 123), &[0x23; 48]);
    scene.wait(12);
    scene.udp(
        &[drop(65000)],
        "twelve seconds later: UDP states live ten",
        clock.reverse(),
        (123, 123),
        &[0x24; 48],
    );

    scene.icmp(&[pass(520)], "ping", Path::new(me, web), PING.0, PING.1, &[b'p'; 56]);
    scene.icmp(&[pass(520)], "its answer: a state", Path::new(web, me), PONG.0, PONG.1, &[b'p'; 56]);
    scene.icmp(&[drop(65000)], "a ping from outside", Path::new(stranger, me), PING.0, PING.1, &[b'p'; 56]);
    scene.icmp(&[pass(530)], "ping over IPv6", Path::new(me6, web6), PING6.0, PING6.1, &[b'p'; 56]);
    scene.icmp(&[pass(530)], "its answer: a state", Path::new(web6, me6), PONG6.0, PONG6.1, &[b'p'; 56]);
    scene.icmp(
        &[drop(65000)],
        "an answer without a request",
        Path::new(host(1, "2001:db8:80::81"), me6),
        PONG6.0,
        PONG6.1,
        &[b'p'; 56],
    );

    let about = quoted(&clock.udp(1, (123, 123), &[0x23; 48]), false);
    scene.icmp(&[pass(600)], "unreachable, says the router", Path::new(router, me), (3, 1), [0; 4], &about);
    scene.icmp(&[drop(65000)], "a redirect", Path::new(router, me), (5, 1), [192, 0, 2, 99], &about);
    let about6 = quoted(&Path::new(me6, web6).icmp(0, 128, 0, [0; 4], &[]), false);
    let too_big = Path::new(host(1, "2001:db8:1::1"), me6);
    let about = "packet too big, about the ping: its state";
    scene.icmp(&[pass(530)], about, too_big, (2, 0), [0, 0, 5, 0], &about6);

    let mut first = Connection::new(Path::new(admin, me), (40_001, 22), [10, 20]);
    scene.tcp(&[pass(700)], "an administrator opens ssh", (&mut first, CLIENT), "S", &[]);
    scene.tcp(&[pass(700)], "the answer: a state", (&mut first, SERVER), "SA", &[]);
    scene.tcp(&[pass(700)], "acknowledges", (&mut first, CLIENT), "A", &[]);
    let ssh = Path::new(admin, me);
    scene.syn(&[pass(700)], "a second connection", ssh, (40_002, 22));
    scene.syn(&[drop(700)], "a third: over the limit, so the rule drops", ssh, (40_003, 22));
    scene.syn(&[pass(700)], "another administrator, own count", Path::new(admin_afar, me), (40_004, 22));
    scene.syn(&[drop(65000)], "ssh from another host", Path::new(stranger, me), (40_005, 22));
    scene.syn(&[drop(65000)], "an administrator tries another port", ssh, (40_006, 443));

    scene.syn(&[reject(800)], "ident, asked by a mail server", Path::new(web, me), (40_113, 113));
    let trace = Path::new(stranger, me);
    scene.udp(&[reject(810)], "a traceroute arrives", trace, (45_000, 33_434), &[0; 12]);
    scene.udp(&[drop(65000)], "a port above those of traceroute", trace, (45_000, 33_524), &[0; 12]);

    let netbios = Path::new(host(50, "192.0.2.50"), host(255, "192.0.2.255"));
    scene.udp(&[drop(900)], "NetBIOS of a neighbour", netbios, (137, 137), &[0; 50]);
    let mdns = Path::new(host(50, "fe80::50"), group6("ff02::fb"));
    scene.udp(&[drop(900)], "mDNS of a neighbour", mdns, (5353, 5353), &[0; 30]);
    let igmp = Path::new(router, super::super::frames::Host::new([1, 0, 0x5e, 0, 0, 1], "224.0.0.1", 1));
    let query = Ip4 { proto: 2, options: &[148, 4, 0, 0], ..Ip4::default() };
    scene.ip4(&[drop(910)], "IGMP to all hosts", igmp, query, &[0x11, 100, 0xee, 0x9b, 0, 0, 0, 0]);

    let loopback = host(66, "127.0.0.1");
    scene.udp(
        &[drop(200)],
        "to the loopback address, on a wire",
        Path::new(stranger, loopback),
        (1_900, 53),
        &[0; 9],
    );
    scene.syn(&[drop(210)], "from the loopback address", Path::new(loopback, me), (40_007, 22));
    scene.syn(&[drop(210)], "and from IPv6's", Path::new(host(66, "::1"), me6), (40_008, 22));
    scene.syn(&[drop(65000)], "a scan", Path::new(stranger, me), (40_009, 445));
    let mut scan = Connection::new(Path::new(stranger, me), (40_010, 80), [5, 5]);
    scene.tcp(&[drop(410)], "a scan with ACK alone", (&mut scan, CLIENT), "A", &[]);

    let about6 = quoted(&Path::new(me6, host(1, "2001:db8:80::81")).icmp(0, 128, 0, [0; 4], &[]), false);
    let about = "packet too big for a flow without a state";
    scene.icmp(&[pass(610)], about, too_big, (2, 0), [0, 0, 5, 0], &about6);
}
