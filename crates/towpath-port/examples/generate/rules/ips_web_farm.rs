//! Traffic of a web farm: legitimate visitors and attacks.

use super::super::dns;
use super::super::frames::Path;
use super::super::scene::{Scene, drop, pass, queue, reject, tee};
use super::super::tcp::{CLIENT, Connection, SERVER};
use super::{PING, PONG, host, neighbour, quoted};

pub(super) fn play(scene: &mut Scene) {
    let router = host(1, "203.0.113.1");
    let web = host(10, "203.0.113.10");
    let second = host(11, "203.0.113.11");
    let web6 = host(10, "2001:db8:113::10");
    let resolver = host(53, "203.0.113.53");
    let visitor = host(1, "198.51.100.20");
    let visitor6 = host(1, "2001:db8:20::20");
    let blocked = host(1, "198.51.100.66");
    let probe = host(1, "192.0.2.200");

    scene.frame(&[pass(100)], "ARP", Path::new(router, web).arp(1));
    let solicit = neighbour(web6, 1);
    let group = Path::new(host(1, "fe80::1"), super::group6("ff02::1:ff00:10"));
    scene.icmp(&[pass(110)], "neighbour solicitation", group, (135, 0), [0; 4], &solicit);
    scene.syn(&[drop(120)], "a source that is blocked", Path::new(blocked, web), (60_000, 80));
    scene.udp(
        &[drop(120)],
        "a request of a blocked source",
        Path::new(blocked, resolver),
        (60_000, 53),
        &dns::message(1, "www.example.com", &[]),
    );
    let mut odd = Connection::new(Path::new(visitor, web), (60_001, 80), [1, 1]);
    scene.tcp(&[drop(130)], "SYN and FIN at once", (&mut odd, CLIENT), "SF", &[]);

    let mut http = Connection::new(Path::new(visitor, web), (60_080, 80), [100, 900]);
    scene.tcp(
        &[tee(9, 200), queue(1, 310)],
        "opens HTTP: a copy for queue 9, then queue 1",
        (&mut http, CLIENT),
        "S",
        &[],
    );
    scene.tcp(&[queue(1, 310)], "the answer: the state's rule inspects it", (&mut http, SERVER), "SA", &[]);
    scene.tcp(&[queue(1, 310)], "acknowledges", (&mut http, CLIENT), "A", &[]);
    scene.tcp(
        &[queue(1, 310)],
        "a request",
        (&mut http, CLIENT),
        "PA",
        b"GET /index.html HTTP/1.1\r\nHost: www.example.com\r\n\r\n",
    );
    scene.tcp(
        &[queue(1, 310)],
        "its response",
        (&mut http, SERVER),
        "PA",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok",
    );
    scene.tcp(
        &[queue(1, 310)],
        "a request for /etc/passwd: queue 1 will drop it",
        (&mut http, CLIENT),
        "PA",
        b"GET /../../../etc/passwd HTTP/1.1\r\nHost: www.example.com\r\n\r\n",
    );
    scene.tcp(&[queue(1, 310)], "closes", (&mut http, SERVER), "FA", &[]);
    scene.syn(
        &[tee(9, 200), queue(1, 310)],
        "the other server, the other port",
        Path::new(visitor, second),
        (60_081, 8_080),
    );
    scene.syn(&[tee(9, 200), queue(1, 310)], "HTTP over IPv6", Path::new(visitor6, web6), (60_082, 80));
    scene.syn(
        &[queue(1, 310)],
        "a health check: inspected without a copy",
        Path::new(probe, web),
        (60_083, 80),
    );
    let mut stray = Connection::new(Path::new(visitor, web), (60_084, 80), [1, 1]);
    scene.tcp(
        &[drop(900)],
        "a segment of a connection without a SYN",
        (&mut stray, CLIENT),
        "PA",
        b"GET / HTTP/1.1\r\n\r\n",
    );

    let mut tls = Connection::new(Path::new(visitor, web), (60_443, 443), [5, 50]);
    scene.tcp(&[tee(9, 200), pass(320)], "opens TLS: not inspected", (&mut tls, CLIENT), "S", &[]);
    scene.tcp(&[pass(320)], "the answer: a state", (&mut tls, SERVER), "SA", &[]);
    scene.tcp(&[pass(320)], "a client hello", (&mut tls, CLIENT), "PA", &[22, 3, 1, 0, 4, 1, 0, 0, 0]);
    scene.syn(&[tee(9, 200), pass(320)], "a second connection", Path::new(visitor, second), (60_444, 443));
    scene.syn(&[tee(9, 200), pass(320)], "a third", Path::new(visitor, web), (60_445, 443));
    scene.syn(
        &[tee(9, 200), drop(320)],
        "a fourth connection exceeds the limit",
        Path::new(visitor, web),
        (60_446, 443),
    );
    scene.syn(
        &[tee(9, 200), pass(320)],
        "another visitor",
        Path::new(host(1, "198.51.100.21"), web),
        (60_447, 443),
    );

    let ask = Path::new(visitor, resolver);
    let good = dns::message(7, "www.example.com", &[]);
    scene.udp(&[queue(2, 400), pass(410)], "DNS: read, then allowed below", ask, (60_053, 53), &good);
    scene.udp(
        &[pass(410)],
        "the answer: a state",
        ask.reverse(),
        (53, 60_053),
        &dns::message(7, "www.example.com", &[[203, 0, 113, 10]]),
    );
    scene.udp(
        &[queue(2, 400), pass(410)],
        "asks again: read again, the state is found below",
        ask,
        (60_053, 53),
        &good,
    );
    scene.udp(
        &[queue(2, 400), pass(410)],
        "a name that queue 2 will drop",
        ask,
        (60_054, 53),
        &dns::message(8, "exfil.malware.example", &[]),
    );
    scene.udp(&[drop(900)], "an answer without a request", ask.reverse(), (53, 60_055), &good);
    scene.syn(&[drop(900)], "DNS over TCP is not allowed", ask, (60_056, 53));

    let updates = host(1, "192.0.2.80");
    let mut fetch = Connection::new(Path::new(web, updates), (42_000, 443), [3, 30]);
    scene.tcp(&[pass(500)], "a server fetches its updates", (&mut fetch, CLIENT), "S", &[]);
    scene.tcp(&[pass(500)], "their answer: a state of another name", (&mut fetch, SERVER), "SA", &[]);
    scene.tcp(&[pass(500)], "acknowledges", (&mut fetch, CLIENT), "A", &[]);
    scene.syn(&[drop(520)], "a server connects to another host", Path::new(web, blocked), (42_001, 4_444));
    scene.udp(
        &[drop(520)],
        "a request to another resolver",
        Path::new(second, host(1, "192.0.2.53")),
        (42_002, 53),
        &good,
    );

    scene.syn(&[tee(9, 200), reject(600)], "a closed port: rejected", Path::new(visitor, web), (60_100, 22));
    scene.syn(
        &[tee(9, 200), reject(610)],
        "over IPv6 with its own word",
        Path::new(visitor6, web6),
        (60_101, 22),
    );
    scene.icmp(&[pass(700)], "a ping", Path::new(visitor, web), PING.0, PING.1, &[b'p'; 56]);
    scene.icmp(&[pass(510)], "its answer", Path::new(web, visitor), PONG.0, PONG.1, &[b'p'; 56]);
    let about = quoted(&Path::new(web, visitor).udp(1, (443, 60_000), &[0; 8]), false);
    scene.icmp(
        &[pass(700)],
        "an error about a server's packet",
        Path::new(visitor, web),
        (3, 4),
        [0, 0, 5, 0],
        &about,
    );
    scene.icmp(&[drop(900)], "a timestamp request", Path::new(visitor, web), (13, 0), [0; 4], &[0; 12]);
}
