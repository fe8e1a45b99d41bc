//! TLS on the mux's sockets, with rustls, `openssl s_client`, and a second mux as peers.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rustls::crypto::CryptoProvider;
use rustls::pki_types::ServerName;
use rustls::pki_types::pem::PemObject;
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use tempfile::TempDir;
use towpath_mux::Time;
use towpath_mux::io::{Admission, Admit, Connect, Ended, Event, Peer, Server, ServerTls, Tls};
use towpath_mux::mux::{Cause, Config, Order};

use super::passed::pass;

/// A self-signed certificate for `localhost`, and its key.
pub(super) struct Pair {
    directory: TempDir,
}

impl Pair {
    pub(super) fn new() -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).expect("a certificate");
        std::fs::write(directory.path().join("cert.pem"), made.cert.pem()).expect("a file");
        std::fs::write(directory.path().join("key.pem"), made.signing_key.serialize_pem()).expect("a file");
        Self { directory }
    }

    pub(super) fn cert(&self) -> PathBuf {
        self.directory.path().join("cert.pem")
    }

    fn key(&self) -> PathBuf {
        self.directory.path().join("key.pem")
    }

    pub(super) fn server(&self) -> Tls {
        Tls::from_files(self.files()).expect("both files are good")
    }

    pub(super) fn files(&self) -> ServerTls {
        ServerTls::new(self.cert(), self.key())
    }

    /// A plain rustls client.
    fn client(&self) -> ClientConnection {
        self.client_with(rustls::crypto::ring::default_provider())
    }

    pub(super) fn client_with(&self, provider: CryptoProvider) -> ClientConnection {
        let mut roots = RootCertStore::empty();
        let cert = rustls::pki_types::CertificateDer::from_pem_file(self.cert()).expect("PEM");
        roots.add(cert).expect("a certificate");
        let config = ClientConfig::builder_with_provider(Arc::new(provider))
            .with_safe_default_protocol_versions()
            .expect("versions")
            .with_root_certificates(roots)
            .with_no_client_auth();
        let name = ServerName::try_from("localhost").expect("a name");
        ClientConnection::new(Arc::new(config), name).expect("a client")
    }
}

/// Messages of several records, and of less than one, through an [`echo`] with a length of four bytes; and the ends of both sides.
pub(super) fn exchange(mut stream: StreamOwned<ClientConnection, TcpStream>) {
    for length in [0, 1, 16_380, 16_381, 100_000, 5 << 20] {
        let body: Vec<u8> = (0..length).map(|at| (at * 7 + at / 251) as u8).collect();
        let message = [&(length as u32).to_be_bytes()[..], &body].concat();
        let mut answer = vec![0; message.len()];
        stream.write_all(&message).expect("it reads");
        stream.read_exact(&mut answer).expect("an answer");
        assert!(answer == message, "{length} bytes differ");
    }
    stream.conn.send_close_notify();
    stream.flush().expect("it reads");
    // The server answers close_notify.
    assert_eq!(stream.read(&mut [0]).expect("an end that was said"), 0);
}

/// Makes the handshake, and sends a line right behind it. Sends parts of at most `size` bytes.
pub(super) fn request_behind_handshake(
    client: &mut ClientConnection,
    socket: &mut TcpStream,
    close: bool,
    size: usize,
) {
    let mut out = Vec::new();
    while client.is_handshaking() {
        while client.wants_write() {
            client.write_tls(&mut out).expect("memory");
        }
        std::mem::take(&mut out).chunks(size).for_each(|part| socket.write_all(part).expect("it reads"));
        client.read_tls(socket).expect("it answers");
        client.process_new_packets().expect("a good handshake");
    }
    client.writer().write_all(b"hello\n").expect("memory");
    if close {
        client.send_close_notify();
    }
    while client.wants_write() {
        client.write_tls(&mut out).expect("memory");
    }
    out.chunks(size).for_each(|part| socket.write_all(part).expect("it reads"));
    let mut answer = [0; 6];
    rustls::Stream::new(client, socket).read_exact(&mut answer).expect("an answer");
    assert_eq!(&answer, b"hello\n");
}

pub(super) fn echo(framing: &str, tls: Tls) -> (Server, SocketAddr, JoinHandle<()>) {
    let server = Server::new(framing.parse().expect("a framing"), Config::new(Order::None)).expect("epoll");
    let address = server.listen_tls("127.0.0.1:0", tls).expect("a port");
    let mut worker = server.worker().expect("a worker");
    let thread = thread::spawn(move || {
        while let Some(message) = worker.recv().expect("epoll") {
            worker.reply(&message, message.bytes().clone());
        }
    });
    (server, address, thread)
}

pub(super) fn stop(server: &Server, thread: JoinHandle<()>) {
    server.drain(Some(Duration::from_secs(60)));
    thread.join().expect("it does not panic");
    server.look(|mux| mux.check().expect("the counts fit"));
}

pub(super) fn ended(server: &Server) -> Ended {
    loop {
        match server.poll_ended() {
            Some(ended) => return ended,
            None => thread::yield_now(),
        }
    }
}

pub(super) fn not_attached(server: &Server) -> String {
    loop {
        match server.poll_event() {
            Some(Event::NotAttached { why, .. }) => return why,
            _ => thread::yield_now(),
        }
    }
}

#[test]
fn bytes_come_back_as_they_went() {
    let pair = Pair::new();
    let (server, address, thread) = echo("length=4 be adjust=4", pair.server());
    exchange(StreamOwned::new(pair.client(), TcpStream::connect(address).expect("it listens")));
    assert_eq!(ended(&server).cause, Cause::Clean);
    stop(&server, thread);
}

/// Descriptors that came with the first records, before the socket was attached: afterwards it refuses them (Linux 6.16).
#[test]
fn a_unix_peer_that_passes_descriptors_again_ends_its_handshake_and_they_are_closed() {
    for times in [1, 2] {
        let pair = Pair::new();
        let (server, _, thread) = echo("line", pair.server());
        let (ours, theirs) = UnixStream::pair().expect("sockets");
        let (mut watched, passed) = UnixStream::pair().expect("sockets");
        let mut client = pair.client();
        let mut hello = Vec::new();
        while client.wants_write() {
            client.write_tls(&mut hello).expect("memory");
        }
        let parts: Vec<_> = hello.chunks(hello.len().div_ceil(times)).collect();
        assert_eq!(parts.len(), times);
        assert!(parts.into_iter().all(|part| pass(&theirs, part, &passed, 1)));
        drop(passed);
        server.attach_tls(ours, &pair.server()).expect("a socket");
        if times == 1 {
            let mut stream = StreamOwned::new(client, theirs);
            stream.write_all(b"message\n").expect("it reads");
            let mut answer = [0; 8];
            stream.read_exact(&mut answer).expect("an answer");
            assert_eq!(&answer, b"message\n");
        } else {
            assert_eq!(not_attached(&server), "the peer passed descriptors");
        }
        assert_eq!(watched.read(&mut [0]).expect("an end"), 0, "all copies are closed");
        stop(&server, thread);
    }
}

/// Bytes in the same segment as the end of the handshake are processed, also if no other bytes follow.
#[test]
fn a_request_right_after_the_handshake_is_answered() {
    let pair = Pair::new();
    let (server, address, thread) = echo("line", pair.server());
    for close in [false, true] {
        let (mut client, mut socket) = (pair.client(), TcpStream::connect(address).expect("it listens"));
        request_behind_handshake(&mut client, &mut socket, close, usize::MAX);
    }
    stop(&server, thread);
}

#[test]
fn non_tls_peers_are_refused_with_a_reason() {
    let pair = Pair::new();
    let (server, address, thread) = echo("line", pair.server());
    // Garbage, then the end of the stream.
    let mut peer = TcpStream::connect(address).expect("it listens");
    peer.write_all(b"GET / HTTP/1.1\r\n\r\n").expect("it reads");
    assert!(not_attached(&server).contains("TLS"));
    drop(TcpStream::connect(address).expect("it listens"));
    assert_eq!(not_attached(&server), "the peer closed during the handshake");
    // A client that does not trust the certificate.
    let mut other = StreamOwned::new(Pair::new().client(), TcpStream::connect(address).expect("it listens"));
    assert!(other.write_all(b"hello\n").is_err());
    assert!(not_attached(&server).starts_with("TLS: received fatal alert"));
    // Garbage after the handshake.
    let mut stream = StreamOwned::new(pair.client(), TcpStream::connect(address).expect("it listens"));
    stream.write_all(b"hello\n").expect("it reads");
    stream.read_exact(&mut [0; 6]).expect("an answer");
    stream
        .sock
        .write_all(&[23, 3, 3, 0, 20, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20])
        .expect("it reads");
    assert_eq!(ended(&server).cause, Cause::Tls("cannot decrypt peer's message".to_owned()));

    let accept_stats = server.accept_stats();
    assert_eq!(
        (accept_stats.accepted, accept_stats.handshakes_failed, accept_stats.handshakes_late),
        (4, 3, 0)
    );
    stop(&server, thread);
}

#[test]
fn silence_ends_a_handshake() {
    let pair = Pair::new();
    let (server, address, thread) =
        echo("line", pair.server().with_handshake_time(Duration::from_millis(50)));
    let mut silent = TcpStream::connect(address).expect("it listens");
    silent.write_all(&[22, 3, 1]).expect("it reads");
    assert_eq!(not_attached(&server), "its handshake took too long");
    // Unread data makes the server's close a reset.
    if let Err(error) = silent.read_to_end(&mut Vec::new()) {
        assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset, "{error}");
    }
    let accept_stats = server.accept_stats();
    assert_eq!(
        (accept_stats.accepted, accept_stats.handshakes_failed, accept_stats.handshakes_late),
        (1, 0, 1)
    );
    stop(&server, thread);
}

/// Admits every peer and records the ends.
#[derive(Debug, Default)]
struct Open(Mutex<Vec<Peer>>);

impl Admission for Open {
    fn admit(&self, _: &Peer, _: Time) -> Admit {
        Admit::Pass
    }

    fn closed(&self, peer: &Peer, _: Time) {
        self.0.lock().expect("no panic").push(*peer);
    }
}

#[test]
fn a_peer_can_be_closed_during_its_handshake() {
    let pair = Pair::new();
    let (server, address, thread) = echo("line", pair.server());
    let open = Arc::new(Open::default());
    server.set_admission(Arc::clone(&open) as Arc<dyn Admission>);
    let mut silent = TcpStream::connect(address).expect("it listens");
    let peer = Peer { local: address, remote: silent.local_addr().expect("connected") };
    while !server.close_peer(&peer) {
        let accept_stats = server.accept_stats();
        assert_eq!(
            (accept_stats.handshakes_failed, accept_stats.handshakes_late),
            (0, 0),
            "it was not found"
        );
        thread::yield_now();
    }
    assert_eq!(not_attached(&server), "the peer is not admitted any more");
    silent.read_to_end(&mut Vec::new()).expect("it is closed");
    assert_eq!(*open.0.lock().expect("no panic"), [peer], "before the peer sees the end");
    assert!(!server.close_peer(&peer), "the connection has gone");
    stop(&server, thread);
}

#[test]
fn invalid_certificate_files_are_named() {
    let (pair, other) = (Pair::new(), Pair::new());
    let none = Path::new("/nonexistent/cert.pem");
    let rows = [
        (none.to_owned(), pair.key(), "/nonexistent/cert.pem: cannot be read: No such file"),
        (pair.cert(), none.to_owned(), "/nonexistent/cert.pem: cannot be read: No such file"),
        (pair.key(), pair.key(), "key.pem: no certificate in PEM"),
        (pair.cert(), pair.cert(), "cert.pem: no private key in PEM"),
        (pair.cert(), other.key(), "do not match"),
    ];
    for (cert, key, expected) in rows {
        let error = Tls::server(cert, key).expect_err(expected).to_string();
        assert!(error.contains(expected), "{error}");
    }
    assert!(Tls::client(none, "localhost").is_err());
    let error = Tls::client(pair.cert(), "local host").expect_err("no name").to_string();
    assert_eq!(error, "`local host` is neither a host name nor an address");
}

/// A mux that sends requests over TLS, reconnects to a restarted server, and stops when it drains.
#[test]
fn outbound_connections_are_reestablished() {
    let pair = Pair::new();
    let config = Config { connected: true, ..Config::new(Order::None) };
    let client = Server::new("line".parse().expect("a framing"), config).expect("epoll");
    let mut worker = client.worker().expect("a worker");
    let (tell, answers) = channel();
    let asks = thread::spawn(move || {
        while let Some(message) = worker.recv().expect("epoll") {
            tell.send(message.payload().to_vec()).expect("the receiver is open");
        }
    });
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address");
    let tls = Tls::client(pair.cert(), "localhost").expect("a certificate");
    let how = Connect { tls: Some(tls), pause: Duration::from_millis(2), ..Connect::default() };
    let _keeper = client.connect(&address.to_string(), how).expect("a thread");
    // A server that hangs up, and one that sends garbage.
    drop(listener.accept().expect("it connects"));
    let (mut nonsense, _) = listener.accept().expect("it connects again");
    nonsense.write_all(b"220 smtp.example ESMTP\r\n").expect("it reads");
    let (socket, _) = listener.accept().expect("it connects a third time");
    drop(nonsense);

    let server = Server::new("line".parse().expect("a framing"), Config::new(Order::None)).expect("epoll");
    server.attach_tls(socket, &pair.server()).expect("it is connected");
    let mut echo = server.worker().expect("a worker");
    let echo = thread::spawn(move || {
        while let Some(message) = echo.recv().expect("epoll") {
            echo.reply(&message, message.bytes().clone());
        }
    });
    while client.send(&b"hello\n"[..]).is_err() {
        thread::yield_now();
    }
    assert_eq!(answers.recv().expect("an answer"), b"hello");
    stop(&server, echo);
    drop(listener.accept().expect("it connects a fourth time"));
    assert!(client.accept_stats().handshakes_failed >= 2, "the first two attempts");
    stop(&client, asks);
}

#[towpath_testenv::needs("openssl")]
#[test]
fn openssl_is_answered() {
    let pair = Pair::new();
    let (server, address, thread) = echo("line", pair.server());
    for version in ["-tls1_2", "-tls1_3"] {
        let mut client = Command::new("openssl")
            .args(["s_client", "-quiet", "-verify_return_error", version, "-servername", "localhost"])
            .args(["-connect", &address.to_string(), "-CAfile"])
            .arg(pair.cert())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("openssl starts");
        let mut stdin = client.stdin.take().expect("a pipe");
        stdin.write_all(b"hello\nworld\n").expect("it reads");
        let mut answer = [0; 12];
        client.stdout.take().expect("a pipe").read_exact(&mut answer).expect("an answer");
        assert_eq!(&answer, b"hello\nworld\n", "{version}");
        // With -quiet, s_client does not end with its input.
        client.kill().expect("it runs");
        client.wait().expect("it ends");
    }
    stop(&server, thread);
}
