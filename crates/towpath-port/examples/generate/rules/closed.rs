//! Connections of administrators and of other hosts to a file server.

use super::super::dns;
use super::super::frames::{Ip4, Path};
use super::super::scene::{Scene, UNSEEN, drop, pass};
use super::super::tcp::{CLIENT, Connection, SERVER};
use super::{PING, PONG, group6, host};

const DEFAULT: u32 = 65_535;

pub(super) fn play(scene: &mut Scene) {
    let me = host(1, "192.0.2.1");
    let admin = host(10, "192.0.2.10");
    let resolver = host(53, "192.0.2.53");

    scene.frame(&[pass(100)], "ARP: an administrator's machine asks", Path::new(admin, me).arp(1));
    scene.frame(&[pass(100)], "ARP: the server answers", Path::new(me, admin).arp(2));
    let all = super::super::frames::Host::new([0x01, 0x80, 0xc2, 0, 0, 0x0e], "0.0.0.0", 0);
    scene.frame(
        &[drop(DEFAULT)],
        "LLDP of a switch",
        Path::new(host(99, "0.0.0.0"), all).other(0x88cc, &[2, 7, 4, 2, 0, 0, 0, 0, 99]),
    );

    let mut ssh = Connection::new(Path::new(admin, me), (40_000, 22), [100, 200]);
    scene.tcp(&[pass(300)], ".10 opens ssh", (&mut ssh, CLIENT), "S", &[]);
    scene.tcp(&[pass(300)], "the server answers: a state", (&mut ssh, SERVER), "SA", &[]);
    scene.tcp(&[pass(300)], "acknowledges", (&mut ssh, CLIENT), "A", &[]);
    scene.tcp(&[pass(300)], "the server's greeting", (&mut ssh, SERVER), "PA", b"SSH-2.0-files\r\n");
    for (n, port, stop, what) in [
        (12, 443, pass(300), ".12, the last of the range, opens HTTPS"),
        (20, 22, pass(300), ".20, the single one, opens ssh"),
        (13, 22, drop(DEFAULT), ".13 is just outside the range"),
        (110, 22, drop(DEFAULT), ".110 is not in the range"),
        (10, 23, drop(DEFAULT), ".10 tries telnet"),
    ] {
        scene.syn(
            &[stop],
            what,
            Path::new(host(n, &format!("192.0.2.{n}")), me),
            (40_100 + u16::from(n), port),
        );
    }
    let elsewhere = Path::new(host(10, "198.51.100.10"), me);
    scene.syn(&[drop(DEFAULT)], "another net's .10", elsewhere, (40_020, 22));
    scene.syn(&[drop(DEFAULT)], "the server opens a connection", Path::new(me, admin), (40_021, 22));
    let mut stray = Connection::new(Path::new(host(11, "192.0.2.11"), me), (40_022, 22), [1, 1]);
    scene.tcp(
        &[drop(DEFAULT)],
        ".11: a segment of a connection without a SYN",
        (&mut stray, CLIENT),
        "PA",
        b"ls\n",
    );
    scene.tcp(&[pass(300)], ".10 resets its connection", (&mut ssh, CLIENT), "RA", &[]);
    scene.wait(2);
    scene.tcp(&[drop(DEFAULT)], "and two seconds later there is no state", (&mut ssh, SERVER), "A", &[]);

    let ping = Path::new(host(77, "192.0.2.77"), me);
    scene.icmp(&[pass(310)], "a small ping, 84 bytes", ping, PING.0, PING.1, &[b'p'; 56]);
    scene.icmp(&[pass(320)], "its answer, by a separate rule", ping.reverse(), PONG.0, PONG.1, &[b'p'; 56]);
    scene.icmp(&[pass(310)], "a ping of 128 bytes: the largest", ping, PING.0, PING.1, &[b'p'; 100]);
    scene.icmp(&[drop(DEFAULT)], "a ping of 129 bytes", ping, PING.0, PING.1, &[b'p'; 101]);
    scene.icmp(&[drop(DEFAULT)], "the server sends a ping", ping.reverse(), PING.0, PING.1, &[b'p'; 56]);
    scene.icmp(&[drop(DEFAULT)], "a ping from elsewhere", elsewhere, PING.0, PING.1, &[b'p'; 56]);

    let ask = Path::new(me, resolver);
    let (question, name) = (dns::message(9, "updates.example", &[]), "updates.example");
    let answer = dns::message(9, name, &[[192, 0, 2, 99]]);
    scene.udp(&[pass(400)], "the server asks for a name", ask, (5_353, 53), &question);
    scene.udp(&[pass(400)], "the answer: keep-state looks up first", ask.reverse(), (53, 5_353), &answer);
    scene.udp(&[drop(DEFAULT)], "an answer to another port", ask.reverse(), (53, 5_354), &answer);
    scene.udp(&[drop(DEFAULT)], "a question to the server", ask.reverse(), (5_353, 53), &question);
    let later = Ip4 { proto: 17, offset: 185, ..Ip4::default() };
    scene.ip4(&[drop(DEFAULT)], "a later fragment has no ports, so no state", ask.reverse(), later, &[0; 64]);
    let tiny = Ip4 { proto: 6, offset: 1, ..Ip4::default() };
    scene.ip4(&[UNSEEN], "a TCP fragment at offset 1 (RFC 3128)", Path::new(admin, me), tiny, &[0; 24]);

    let solicit = super::neighbour(host(1, "fe80::1"), 1);
    let all6 = Path::new(host(10, "fe80::10"), group6("ff02::1:ff00:1"));
    scene.icmp(&[drop(DEFAULT)], "IPv6 is not allowed", all6, (135, 0), [0; 4], &solicit);
}
