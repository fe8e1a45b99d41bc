//! Packets that cross a router between three nets, and some that must not.

use super::super::dns;
use super::super::frames::{Host, Ip4};
use super::super::scene::{Scene, UNSEEN, drop, pass, reject};
use super::super::tcp::{CLIENT, Connection, SERVER};
use super::{PING, PING6, group6, host, neighbour, on};

/// The rule that passes incoming packets without anomalies.
const IN: u32 = 490;

pub(super) fn play(scene: &mut Scene) {
    let pc = host(20, "192.0.2.20");
    let pc6 = host(20, "2001:db8:1::20");
    let web = host(131, "192.0.2.131");
    let web6 = host(131, "2001:db8:2::131");
    let hidden = host(140, "192.0.2.140");
    let names = host(153, "192.0.2.153");
    let far = host(254, "198.51.100.80");
    let far6 = host(254, "2001:db8:80::80");
    let lan = |from: Host, to: Host| on(10, from, to);
    let dmz = |from: Host, to: Host| on(20, from, to);
    let wan = |from: Host, to: Host| on(30, from, to);

    scene.frame(&[pass(100)], "ARP", lan(pc, host(1, "192.0.2.1")).arp(1));
    let group = lan(pc6, group6("ff02::1:ff00:1"));
    scene.icmp(
        &[pass(110)],
        "neighbour solicitation",
        group,
        (135, 0),
        [0; 4],
        &neighbour(host(1, "2001:db8:1::1"), 1),
    );

    scene.syn(&[drop(200)], "the dmz's address on the lan", lan(host(66, "192.0.2.131"), far), (53_000, 80));
    scene.syn(&[drop(200)], "the lan's address from the world", wan(pc, web), (53_000, 80));
    scene.syn(&[drop(200)], "the world's address on the lan", lan(far, web), (53_000, 80));
    scene.syn(
        &[drop(200)],
        "an address that no route leads to",
        wan(host(254, "fd00::1"), web6),
        (53_000, 80),
    );
    // RFC 2460, 4.4, deprecated by RFC 5095: type 0, one segment left, then UDP.
    let mut source_route = vec![17, 2, 0, 1, 0, 0, 0, 0];
    source_route.extend([0x20, 1, 0x0d, 0xb8, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x20]);
    source_route.extend([0xcf, 0x08, 0, 53, 0, 8, 0, 0]);
    scene.frame(&[drop(210)], "a source route of IPv6", wan(far6, web6).ip6(43, &source_route));
    let ssrr = Ip4 { proto: 17, options: &[137, 7, 4, 192, 0, 2, 20, 0], ..Ip4::default() };
    scene.ip4(&[drop(220)], "a strict source route", wan(far, web), ssrr, &[0xcf, 0x08, 0, 53, 0, 8, 0, 0]);
    let tiny = Ip4 { proto: 6, offset: 1, ..Ip4::default() };
    scene.ip4(&[UNSEEN], "a TCP fragment at offset 1 (RFC 3128)", wan(far, web), tiny, &[0; 24]);

    scene.udp(
        &[pass(IN), pass(620)],
        "a telephone: marked on its way in",
        lan(pc, far),
        (5_060, 5_060),
        b"OPTIONS sip:far SIP/2.0\r\n\r\n",
    );
    let mut there = Connection::new(lan(pc, far), (53_443, 443), [1, 1]);
    let mut back = Connection::new(wan(pc, far), (53_443, 443), [2, 1]);
    scene.tcp(&[pass(IN), pass(620)], "lan to world: HTTPS, its MSS lowered", (&mut there, CLIENT), "S", &[]);
    scene.tcp(&[pass(IN), pass(800)], "its answer", (&mut back, SERVER), "SA", &[]);
    scene.tcp(&[pass(IN), pass(620)], "the next segment: a state", (&mut there, CLIENT), "A", &[]);
    scene.syn(&[pass(IN), pass(620)], "the same over IPv6", lan(pc6, far6), (53_444, 443));
    scene.syn(&[pass(IN), reject(600)], "mail from the lan", lan(pc, far), (53_025, 25));
    scene.syn(&[pass(IN), pass(620)], "mail from the dmz", dmz(web, far), (53_026, 25));
    scene.syn(&[pass(IN), drop(610)], "a file share over the world", lan(pc, far), (53_445, 445));
    scene.udp(&[pass(IN), drop(610)], "NetBIOS over the world", dmz(web, far), (137, 137), &[0; 50]);
    let esp = Ip4 { proto: 50, ..Ip4::default() };
    scene.ip4(
        &[pass(IN), pass(620)],
        "a protocol without ports: ESP",
        lan(pc, far),
        esp,
        &[0, 0, 0, 7, 0, 0, 0, 1],
    );
    scene.udp(
        &[pass(IN), pass(620)],
        "a name from elsewhere",
        lan(pc, far),
        (53_053, 53),
        &dns::message(5, "www.example.com", &[]),
    );
    scene.udp(
        &[pass(IN), pass(810)],
        "its answer",
        wan(far, pc),
        (53, 53_053),
        &dns::message(5, "www.example.com", &[[192, 0, 2, 131]]),
    );
    scene.udp(&[pass(IN), drop(900)], "UDP without a request", wan(far, pc), (9_999, 53_053), &[0; 20]);
    scene.udp(&[pass(IN), drop(900)], "an answer to a port below 1024", wan(far, pc), (53, 161), &[0; 20]);

    let mut ssh = Connection::new(lan(pc, web), (53_022, 22), [1, 1]);
    let mut shell = Connection::new(dmz(pc, web), (53_022, 22), [2, 1]);
    scene.tcp(&[pass(IN), pass(700)], "lan to dmz: ssh", (&mut ssh, CLIENT), "S", &[]);
    scene.tcp(&[pass(IN), pass(710)], "its answer", (&mut shell, SERVER), "SA", &[]);
    scene.syn(&[pass(IN), drop(900)], "the dmz opens nothing towards the lan", dmz(web, pc), (53_001, 22));
    scene.udp(
        &[pass(IN), pass(700)],
        "a name from our own",
        lan(pc, names),
        (53_054, 53),
        &dns::message(6, "www.example.com", &[]),
    );
    scene.udp(
        &[pass(IN), pass(720)],
        "its answer",
        dmz(names, pc),
        (53, 53_054),
        &dns::message(6, "www.example.com", &[[192, 0, 2, 131]]),
    );
    scene.udp(&[pass(IN), drop(900)], "not from the web server", dmz(web, pc), (53, 53_054), &[0; 20]);

    scene.syn(&[pass(IN), pass(820)], "world to dmz: the web", wan(far, web), (53_080, 80));
    scene.syn(&[pass(IN), pass(820)], "over IPv6", wan(far6, web6), (53_081, 443));
    scene.syn(&[pass(IN), drop(900)], "ssh from the world is not allowed", wan(far, web), (53_082, 22));
    scene.syn(&[pass(IN), drop(900)], "a machine that is not exposed", wan(far, hidden), (53_083, 80));
    scene.syn(&[pass(IN), drop(900)], "world to lan", wan(far, pc), (53_084, 80));
    scene.udp(
        &[pass(IN), pass(830)],
        "a question to our resolver",
        wan(far, names),
        (53_085, 53),
        &dns::message(7, "www.example.com", &[]),
    );
    scene.udp(
        &[pass(IN), drop(900)],
        "a question to the web server",
        wan(far, web),
        (53_086, 53),
        &dns::message(7, "www.example.com", &[]),
    );
    let mut fragments = wan(far, names).udp_fragments(99, (53_087, 53), &[0x55; 1_600]).into_iter();
    let mut next = || fragments.next().expect("two fragments");
    scene.frame(&[pass(IN), pass(830)], "the first fragment has ports", next());
    scene.frame(&[pass(IN), pass(840)], "the later fragment has no ports", next());
    let later = Ip4 { proto: 17, offset: 185, ..Ip4::default() };
    scene.ip4(
        &[pass(IN), drop(900)],
        "a later fragment to a machine that is not exposed",
        wan(far, hidden),
        later,
        &[0x55; 64],
    );

    scene.icmp(&[pass(IN), pass(500)], "a ping from the world", wan(far, web), PING.0, PING.1, &[b'p'; 32]);
    scene.icmp(
        &[pass(IN), drop(900)],
        "a redirect from the world",
        wan(far, web),
        (5, 1),
        [192, 0, 2, 9],
        &[0; 28],
    );
    scene.icmp(&[pass(IN), pass(510)], "a ping over IPv6", wan(far6, web6), PING6.0, PING6.1, &[b'p'; 32]);
    scene.icmp(
        &[pass(IN), drop(900)],
        "node information over IPv6",
        wan(far6, web6),
        (139, 0),
        [0; 4],
        &[0; 24],
    );
}
