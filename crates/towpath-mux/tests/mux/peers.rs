//! Presets with real client programs: the framing cuts their messages correctly, and replies reach their
//! requesters.
#![cfg(feature = "io")]

use std::net::SocketAddr;
use std::process::{Command, Output, Stdio};
use std::thread;

use towpath_mux::framing::Framing;
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
        Self::listen(framing, answer, client, |server| server.listen("127.0.0.1:0").expect("a port"))
    }

    fn listen(
        framing: &str,
        answer: fn(&[u8]) -> Vec<u8>,
        client: &str,
        listen: impl FnOnce(&Server) -> SocketAddr,
    ) -> Self {
        let framing: Framing = framing.parse().expect("a preset");
        let config = Config::for_framing(&framing);
        let server = Server::new(framing, config).expect("epoll");
        let port = listen(&server).port().to_string();
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

/// psql asks for TLS in plaintext and verifies the certificate. Without TLS it gets the reason.
#[cfg(feature = "tls")]
#[towpath_testenv::needs("psql")]
#[test]
fn psql_asks_over_tls() {
    use towpath_mux::framing::StartTls;
    use towpath_mux::io::{ServerTls, Tls};

    let pair = super::tls::Pair::new();
    let run = |mode: &str| {
        let client = format!(
            "psql -X -w -h localhost -p PORT -U u -c select(1) \
             -d dbname=d\thostaddr=127.0.0.1\tgssencmode=disable\tsslmode={mode}\tsslrootcert={}",
            pair.cert().display()
        );
        let files = ServerTls { starttls: Some(StartTls::Postgres), ..pair.files() };
        let tls = Tls::from_files(files).expect("good files");
        let listen = |server: &Server| server.listen_tls("127.0.0.1:0", tls).expect("a port");
        Talk::listen("postgres-frontend", database, &client, listen)
    };
    for mode in ["require", "verify-full"] {
        let talk = run(mode);
        assert_eq!(talk.printed(), "SELECT 0\n");
        assert_eq!(
            talk.seen[0][4..8],
            [0, 3, 0, 0],
            "the startup message is the first one: {:x?}",
            talk.seen
        );
        assert_eq!(talk.seen[1..], [&b"Q\0\0\0\x0eselect(1)\0"[..], b"X\0\0\0\x04"], "{:x?}", talk.seen);
    }
    let talk = run("disable");
    let said = String::from_utf8_lossy(&talk.output.stderr);
    assert!(said.contains("FATAL:  the server requires TLS: set sslmode=require"), "{said}");
    assert_eq!(talk.seen.len(), 0);
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

#[towpath_testenv::needs("curl")]
#[test]
fn curl_is_answered() {
    let rows = [
        ("curl -sS -d hello http://127.0.0.1:PORT/a http://127.0.0.1:PORT/b", "5 5 ", ["POST /a", "POST /b"]),
        (
            "curl -sS -H Transfer-Encoding:chunked -d hello http://127.0.0.1:PORT/c --next -sS http://127.0.0.1:PORT/d",
            "15 0 ",
            ["POST /c", "GET /d H"],
        ),
    ];
    for (client, printed, asked) in rows {
        let talk = Talk::run("http1", page, client);
        assert_eq!(talk.printed(), printed, "{client}");
        assert_eq!(talk.seen.len(), 2, "{client}: {:x?}", talk.seen);
        for (request, start) in talk.seen.iter().zip(asked) {
            assert!(request.starts_with(start.as_bytes()), "{client}: {:x?}", talk.seen);
        }
    }
}

/// Returns the length of the body as it was sent.
fn page(request: &[u8]) -> Vec<u8> {
    let head = request.windows(4).position(|at| at == b"\r\n\r\n").expect("a head") + 4;
    let text = format!("{} ", request.len() - head);
    format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{text}", text.len()).into_bytes()
}

#[towpath_testenv::needs("python3")]
#[test]
fn smtplib_sends_a_mail() {
    // The words are separated by tabs: the command line is cut at blanks. There is no greeting to wait for.
    let client = "python3 -c import\tsmtplib,socket;s=smtplib.SMTP();s.sock=socket.create_connection(('127.0.0.1',PORT));\
                  s.sendmail('a@a',['b@b'],'Subject:x\\n\\n.dot\\n');s.quit()";
    let talk = Talk::run("smtp", mail_server, client);
    assert_eq!(talk.printed(), "");
    let kinds: Vec<_> =
        talk.seen.iter().map(|line| String::from_utf8_lossy(&line[..4]).to_lowercase()).collect();
    assert_eq!(kinds, ["ehlo", "mail", "rcpt", "data", "subj", "quit"], "{:x?}", talk.seen);
    assert_eq!(talk.seen[4], b"Subject:x\r\n\r\n..dot\r\n.\r\n");
}

fn mail_server(message: &[u8]) -> Vec<u8> {
    let text: &[u8] = match message.to_ascii_lowercase().as_slice() {
        b"data\r\n" => b"354 go\r\n",
        [b'q', ..] => b"221 bye\r\n",
        _ => b"250 ok\r\n",
    };
    text.to_vec()
}

const HEADERS: u8 = 1;
const SETTINGS: u8 = 4;
const ACK: u8 = 1;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;
/// Entry 8 of HPACK's static table.
const STATUS_200: u8 = 0x88;
