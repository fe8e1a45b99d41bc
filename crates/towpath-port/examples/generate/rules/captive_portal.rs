//! Traffic of guests, members and staff of a cafe's network, at the captive portal.

use super::super::dns;
use super::super::frames::{Host, Path};
use super::super::scene::{Scene, drop, pass, reject};
use super::super::tcp::{CLIENT, Connection, SERVER};
use super::{PING, dhcp, everybody, host, neighbour};

const CAFE: u16 = 10;
const WAN: u16 = 20;

fn device(n: u8, ip: &str) -> Host {
    Host::new([0x02, 0, 0, 0, 0x0c, n], ip, 64)
}

pub(super) fn play(scene: &mut Scene) {
    let portal = host(1, "10.1.0.1");
    let member = device(21, "10.1.0.21");
    let slow = device(22, "10.1.0.22");
    let guest = device(30, "10.1.0.30");
    let staff = device(7, "10.1.0.7");
    let sent_away = device(0x66, "10.1.0.66");
    let web = host(254, "203.0.113.80");
    let bank = host(254, "198.51.100.80");
    let up = |from: Host, to: Host| super::on(CAFE, from, to);
    let down = |from: Host, to: Host| super::on(WAN, from, to);

    scene.frame(&[pass(100)], "ARP: a guest looks for the portal", up(guest, portal).arp(1));
    scene.frame(&[drop(110)], "a frame that is not IP", up(guest, everybody()).other(0x88cc, &[2, 1, 7]));
    let six = Path { vlan: Some(CAFE), ..Path::new(device(30, "fe80::30"), super::group6("ff02::1:ff00:1")) };
    let solicit = neighbour(host(1, "fe80::1"), 1);
    scene.icmp(&[drop(110)], "a neighbour solicitation of IPv6", six, (135, 0), [0; 4], &solicit);
    scene.syn(&[drop(120)], "a source that is blocked", up(sent_away, portal), (50_000, 443));
    scene.udp(
        &[drop(130)],
        "a forged source: the portal's address",
        up(device(31, "10.1.0.1"), guest),
        (53, 5_000),
        &[0; 30],
    );
    scene.syn(&[drop(140)], "an address from elsewhere", up(device(31, "192.0.2.9"), web), (50_001, 80));

    let nobody = device(30, "0.0.0.0");
    scene.udp(&[pass(200)], "DHCP discover", up(nobody, everybody()), (68, 67), &dhcp(1));
    scene.udp(&[pass(200)], "DHCP renewal, to the portal alone", up(guest, portal), (68, 67), &dhcp(1));
    let question = dns::message(1, "www.example.com", &[]);
    scene.udp(&[pass(210)], "a guest asks for a name", up(guest, portal), (50_053, 53), &question);
    let elsewhere = up(guest, host(254, "198.51.100.53"));
    scene.udp(&[reject(620)], "a request to another resolver", elsewhere, (50_054, 53), &question);
    scene.syn(&[pass(220)], "a guest opens the portal's page", up(guest, portal), (50_002, 443));
    scene.syn(&[drop(290)], "and tries its ssh", up(guest, portal), (50_003, 22));
    scene.icmp(&[pass(230)], "pings the portal", up(guest, portal), PING.0, PING.1, &[b'p'; 32]);
    scene.icmp(&[drop(290)], "pings another guest", up(guest, member), PING.0, PING.1, &[b'p'; 32]);

    let mut out = Connection::new(up(staff, web), (50_010, 8_443), [1, 1]);
    scene.tcp(&[pass(310)], "staff, known by the Ethernet address", (&mut out, CLIENT), "S", &[]);
    let mut back = Connection::new(down(staff, web), (50_010, 8_443), [2, 1]);
    scene.tcp(&[pass(310)], "the answer from the line: a state", (&mut back, SERVER), "SA", &[]);
    scene.tcp(&[pass(310)], "the next segment: a state", (&mut out, CLIENT), "A", &[]);
    let mut stray = Connection::new(down(staff, web), (50_011, 8_443), [2, 1]);
    scene.tcp(&[drop(700)], "from the line, for staff, without a state", (&mut stray, SERVER), "SA", &[]);

    scene.syn(&[pass(400)], "a member opens a connection, through pipe 1", up(member, web), (50_020, 993));
    let mut mail = Connection::new(down(member, web), (50_020, 993), [2, 1]);
    scene.tcp(&[pass(410)], "the answer, through the same pipe", (&mut mail, SERVER), "SA", &[]);
    let quic = up(slow, web);
    scene.udp(&[pass(400)], "a slow member: pipe 2 has room", quic, (50_022, 443), &[0x40; 1_350]);
    scene.udp(&[pass(400)], "still has", quic, (50_022, 443), &[0x40; 1_350]);
    scene.udp(&[drop(400)], "is full: the policer drops", quic, (50_022, 443), &[0x40; 1_350]);
    scene.udp(&[drop(410)], "in the other direction too", down(web, slow), (443, 50_022), &[0x40; 1_350]);
    scene.udp(
        &[pass(400)],
        "the other member has a separate pipe",
        up(member, web),
        (50_023, 443),
        &[0x40; 1_350],
    );
    scene.wait(1);
    scene.udp(
        &[pass(410)],
        "after a second the pipe has room again",
        down(web, slow),
        (443, 50_022),
        &[0x40; 1_350],
    );

    let mut pay = Connection::new(up(guest, bank), (50_030, 443), [1, 1]);
    scene.tcp(
        &[pass(500)],
        "a guest opens the payment server, which is always allowed",
        (&mut pay, CLIENT),
        "S",
        &[],
    );
    let mut paid = Connection::new(down(guest, bank), (50_030, 443), [2, 1]);
    scene.tcp(&[pass(510)], "its answer comes back", (&mut paid, SERVER), "SA", &[]);
    scene.syn(&[drop(700)], "the payment server opens a connection", down(bank, guest), (443, 50_031));
    scene.syn(&[pass(600)], "a guest's first page is the portal's: forwarded", up(guest, web), (50_032, 80));
    let mut page = Connection::new(up(guest, web), (50_032, 80), [2, 1]);
    scene.tcp(
        &[pass(600)],
        "a further segment of it",
        (&mut page, CLIENT),
        "PA",
        b"GET / HTTP/1.1\r\nHost: www.example.com\r\n\r\n",
    );
    scene.syn(&[reject(610)], "HTTPS of an unpaid guest is refused", up(guest, web), (50_033, 443));
    scene.icmp(&[reject(620)], "a guest pings the world", up(guest, web), PING.0, PING.1, &[b'p'; 32]);
    let mut late = Connection::new(down(guest, web), (50_033, 443), [2, 1]);
    scene.tcp(&[drop(700)], "from the line, for a guest", (&mut late, SERVER), "SA", &[]);
}
