//! Presets with real client programs: the framing cuts their messages correctly, and replies reach their
//! requesters.
#![cfg(feature = "io")]

use std::process::{Command, Output, Stdio};
use std::thread;

use towpath_mux::io::Server;
use towpath_mux::mux::Config;

/// Output of a client, and the messages that it sent.
struct Talk {
    output: Output,
    seen: Vec<Vec<u8>>,
}

impl Talk {
    /// Runs a command line; `PORT` is replaced by the port of a worker.
    fn run(framing: &str, answer: fn(&[u8]) -> Vec<u8>, client: &str) -> Self {
        let framing = framing.parse().expect("a preset");
        let server = Server::new(framing, Config::default()).expect("epoll");
        let port = server.listen("127.0.0.1:0").expect("a port").port().to_string();
        let mut worker = server.worker().expect("a worker");
        let worker = thread::spawn(move || {
            let mut seen = Vec::new();
            let served = worker.serve(|message, reply| {
                seen.push(message.bytes().to_vec());
                reply.extend(answer(message.bytes()));
            });
            served.map(|()| seen)
        });
        // A client that gets no answer is killed, so that the test fails instead of hanging.
        let output = Command::new("timeout")
            .arg("60")
            .args(client.split(' ').map(|word| word.replace("PORT", &port)))
            .stdin(Stdio::null())
            .output()
            .expect("timeout starts");
        // Its last messages may follow its exit; draining at once would drop them.
        while !server.show().psocks.is_empty() && !worker.is_finished() {
            thread::yield_now();
        }
        server.drain(None);
        let seen = worker.join().expect("it does not panic").expect("epoll");
        Self { output, seen }
    }

    /// Its output, after a successful exit.
    fn printed(&self) -> String {
        assert!(self.output.status.success(), "{:?}\n{:x?}", self.output, self.seen);
        String::from_utf8_lossy(&self.output.stdout).into_owned()
    }
}

#[towpath_testenv::needs("mosquitto_pub")]
#[test]
fn mosquitto_publishes() {
    let client = "mosquitto_pub -h 127.0.0.1 -p PORT -t a -m hello -q 1";
    let talk = Talk::run("mqtt", broker, client);
    assert_eq!(talk.printed(), "");
    let kinds: Vec<_> = talk.seen.iter().map(|packet| packet[0]).collect();
    assert_eq!(kinds, [0x10, 0x32, 0xe0], "CONNECT, PUBLISH, DISCONNECT: {:x?}", talk.seen);
    assert!(talk.seen[1].ends_with(b"hello"));
}

/// A minimal MQTT 3.1.1 broker for a topic of one letter.
fn broker(packet: &[u8]) -> Vec<u8> {
    match packet {
        [0x10, ..] => vec![0x20, 2, 0, 0],
        // The packet identifier follows the length and the topic.
        &[0x32, _, 0, 1, _, high, low, ..] => vec![0x40, 2, high, low],
        [0xc0, ..] => vec![0xd0, 0],
        _ => Vec::new(),
    }
}

#[towpath_testenv::needs("psql")]
#[test]
fn psql_asks() {
    // Debian's wrapper examines -h and -p. TLS and Kerberos settings of the environment are ignored.
    let client = "psql -X -w -h 127.0.0.1 -p PORT -U u -c select(1) \
                  -d dbname=d\tsslmode=disable\tgssencmode=disable";
    let talk = Talk::run("postgres-frontend", database, client);
    assert_eq!(talk.printed(), "SELECT 0\n");
    assert_eq!(talk.seen[1..], [&b"Q\0\0\0\x0eselect(1)\0"[..], b"X\0\0\0\x04"], "{:x?}", talk.seen);
}

/// A minimal server: accepts every login and returns no rows.
fn database(message: &[u8]) -> Vec<u8> {
    const READY: &[u8] = b"Z\0\0\0\x05I";
    match message[0] {
        // The first message has no type, only a length.
        0 => [b"R\0\0\0\x08\0\0\0\0", READY].concat(),
        b'Q' => [b"C\0\0\0\x0dSELECT 0\0", READY].concat(),
        _ => Vec::new(),
    }
}

#[towpath_testenv::needs("memcstat")]
#[test]
fn libmemcached_clients_work() {
    let rows = [
        ("memcstat --binary --servers=127.0.0.1:PORT", "pid: 1\n", &[VERSION, STAT, QUIT][..]),
        ("memcexist --binary --servers=127.0.0.1:PORT one two", "", &[ADD, ADD, QUIT]),
        ("memcflush --binary --servers=127.0.0.1:PORT", "", &[FLUSH, QUIT]),
    ];
    for (client, printed, asked) in rows {
        let talk = Talk::run("memcached-binary", cache, client);
        assert!(talk.printed().ends_with(printed), "{client}: {:?}", talk.output);
        let seen: Vec<_> = talk.seen.iter().map(|request| request[1]).collect();
        assert_eq!(seen, asked, "{client}: {:x?}", talk.seen);
    }
}

const ADD: u8 = 0x02;
const QUIT: u8 = 0x07;
const FLUSH: u8 = 0x08;
const VERSION: u8 = 0x0b;
const STAT: u8 = 0x10;

/// A minimal server that has every key.
fn cache(request: &[u8]) -> Vec<u8> {
    const EXISTS: u8 = 2;
    match request[1] {
        ADD => response(request, EXISTS, "", ""),
        VERSION => response(request, 0, "", "1.6.0"),
        // The packet without a key ends the sequence.
        STAT => [response(request, 0, "pid", "1"), response(request, 0, "", "")].concat(),
        _ => response(request, 0, "", ""),
    }
}

fn response(request: &[u8], status: u8, key: &str, value: &str) -> Vec<u8> {
    let (key_length, length) = (key.len() as u8, (key.len() + value.len()) as u8);
    let head = [0x81, request[1], 0, key_length, 0, 0, 0, status, 0, 0, 0, length];
    let opaque = &request[12..16];
    [&head[..], opaque, &[0; 8], key.as_bytes(), value.as_bytes()].concat()
}

#[towpath_testenv::needs("h2load")]
#[test]
fn h2load_is_answered() {
    let client = "h2load -n 20 -c 2 -m 5 http://127.0.0.1:PORT/";
    let talk = Talk::run("http2-frame", site, client);
    let printed = talk.printed();
    assert!(printed.contains("20 succeeded, 0 failed, 0 errored, 0 timeout"), "{printed}");
    assert_eq!(talk.seen.iter().filter(|frame| frame.starts_with(b"PRI ")).count(), 2);
}

/// Returns status 200 for every request.
fn site(frame: &[u8]) -> Vec<u8> {
    if frame.starts_with(b"PRI ") {
        return vec![0, 0, 0, SETTINGS, 0, 0, 0, 0, 0];
    }
    let (kind, flags, stream) = (frame[3], frame[4], &frame[5..9]);
    match kind {
        SETTINGS if flags & ACK == 0 => vec![0, 0, 0, SETTINGS, ACK, 0, 0, 0, 0],
        HEADERS => [&[0, 0, 1, HEADERS, END_HEADERS | END_STREAM], stream, &[STATUS_200]].concat(),
        _ => Vec::new(),
    }
}

const HEADERS: u8 = 1;
const SETTINGS: u8 = 4;
const ACK: u8 = 1;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;
/// Entry 8 of HPACK's static table.
const STATUS_200: u8 = 0x88;
