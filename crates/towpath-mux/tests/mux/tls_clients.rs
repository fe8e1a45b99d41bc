//! TLS with options: protocols, certificates of clients, files that are read again, and STARTTLS, also with hostile clients.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair, SanType};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, HandshakeKind, RootCertStore, StreamOwned};
use tempfile::TempDir;
use towpath_mux::framing::StartTls;
use towpath_mux::io::{ConnectionInfo, Server, ServerTls, Tls};

use super::tls::{Pair, echo, not_attached, stop};

/// Two CAs and the certificates that they signed, as files.
struct Files {
    directory: TempDir,
}

/// A CA that signs.
struct Ca {
    issuer: Issuer<'static, KeyPair>,
    pem: String,
}

impl Ca {
    fn new(name: &str) -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, name);
        let key = KeyPair::generate().expect("a key");
        let pem = params.self_signed(&key).expect("a certificate").pem();
        Self { issuer: Issuer::new(params, key), pem }
    }

    /// Writes `NAME.pem` and `NAME.key`.
    fn sign(&self, directory: &Path, name: &str, alternative: Vec<SanType>) {
        let mut params = CertificateParams::default();
        params.subject_alt_names = alternative;
        params.distinguished_name = rcgen::DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, name);
        let key = KeyPair::generate().expect("a key");
        let signed = params.signed_by(&key, &self.issuer).expect("a certificate");
        std::fs::write(directory.join(format!("{name}.pem")), signed.pem()).expect("a file");
        std::fs::write(directory.join(format!("{name}.key")), key.serialize_pem()).expect("a file");
    }
}

impl Files {
    fn new() -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path();
        let (ca, other) = (Ca::new("ca"), Ca::new("other"));
        std::fs::write(path.join("ca.pem"), &ca.pem).expect("a file");
        std::fs::write(path.join("other-ca.pem"), &other.pem).expect("a file");
        let localhost = || vec![SanType::DnsName("localhost".try_into().expect("ASCII"))];
        ca.sign(path, "first", localhost());
        ca.sign(path, "second", localhost());
        let uri = SanType::URI("spiffe://example/device".try_into().expect("ASCII"));
        ca.sign(path, "device", vec![SanType::DnsName("device.example".try_into().expect("ASCII")), uri]);
        ca.sign(path, "common name", Vec::new());
        other.sign(path, "stranger", vec![SanType::DnsName("device.example".try_into().expect("ASCII"))]);
        Self { directory }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn copy(&self, from: &str, to: &str) {
        for ending in ["pem", "key"] {
            let path = |name: &str| self.path(&format!("{name}.{ending}"));
            std::fs::copy(path(from), path(to)).expect("files");
        }
    }

    fn server(&self) -> ServerTls {
        ServerTls::new(self.path("first.pem"), self.path("first.key"))
    }

    /// A client with the certificate of this name that offers these protocols.
    fn client(&self, name: Option<&str>, alpn: &[&str]) -> Arc<ClientConfig> {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_file(self.path("ca.pem")).expect("PEM")).expect("a certificate");
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider);
        let builder = builder.with_safe_default_protocol_versions().expect("versions");
        let builder = builder.with_root_certificates(roots);
        let mut config = match name {
            None => builder.with_no_client_auth(),
            Some(name) => {
                let own = CertificateDer::from_pem_file(self.path(&format!("{name}.pem"))).expect("PEM");
                let key = PrivateKeyDer::from_pem_file(self.path(&format!("{name}.key"))).expect("PEM");
                builder.with_client_auth_cert(vec![own], key).expect("a key")
            }
        };
        config.alpn_protocols = alpn.iter().map(|id| id.as_bytes().to_vec()).collect();
        Arc::new(config)
    }
}

type Stream = StreamOwned<ClientConnection, TcpStream>;

fn over(config: &Arc<ClientConfig>, socket: TcpStream) -> Stream {
    let name = ServerName::try_from("localhost").expect("a name");
    StreamOwned::new(ClientConnection::new(Arc::clone(config), name).expect("a client"), socket)
}

fn connect(config: &Arc<ClientConfig>, address: SocketAddr) -> Stream {
    over(config, TcpStream::connect(address).expect("it listens"))
}

/// Sends a line and reads it back. Completes the handshake first.
fn echoes(stream: &mut Stream) -> std::io::Result<()> {
    stream.write_all(b"hello\n")?;
    let mut answer = [0; 6];
    stream.read_exact(&mut answer)?;
    assert_eq!(&answer, b"hello\n");
    Ok(())
}

/// The only connection.
fn info(server: &Server) -> ConnectionInfo {
    let rows = server.show().psocks;
    assert_eq!(rows.len(), 1);
    server.connection_info(rows[0].id).expect("it is open")
}

/// Ends a connection and waits until the server has seen it.
fn close(server: &Server, mut stream: Stream) {
    stream.conn.send_close_notify();
    let _ = stream.flush();
    drop(stream);
    while !server.show().psocks.is_empty() {
        std::thread::yield_now();
    }
}

#[test]
fn protocols_are_negotiated_and_others_are_refused() {
    let files = Files::new();
    let alpn = vec![b"mqtt".to_vec(), b"http/1.1".to_vec()];
    let tls = Tls::from_files(ServerTls { alpn, ..files.server() }).expect("good files");
    let (server, address, thread) = echo("line", tls);
    let rows: [(&[&str], &str); 4] =
        [(&[], ""), (&["x", "mqtt"], "mqtt"), (&["http/1.1", "mqtt"], "mqtt"), (&["http/1.1"], "http/1.1")];
    for (offered, agreed) in rows {
        let mut stream = connect(&files.client(None, offered), address);
        echoes(&mut stream).expect("an answer");
        let agreed_by_client = stream.conn.alpn_protocol().unwrap_or_default();
        assert_eq!(
            (agreed_by_client, info(&server).protocol.as_slice()),
            (agreed.as_bytes(), agreed.as_bytes())
        );
        close(&server, stream);
    }
    let error = echoes(&mut connect(&files.client(None, &["h2", "dot"]), address)).expect_err("refused");
    assert!(error.to_string().contains("NoApplicationProtocol"), "{error}");
    assert!(not_attached(&server).contains("peer doesn't support any known protocol"));
    stop(&server, thread);

    // Without protocols of its own, the server ignores an offer.
    let (server, address, thread) = echo("line", Tls::from_files(files.server()).expect("good files"));
    let mut stream = connect(&files.client(None, &["h2"]), address);
    echoes(&mut stream).expect("an answer");
    assert_eq!((stream.conn.alpn_protocol(), info(&server).protocol.len()), (None, 0));
    close(&server, stream);
    stop(&server, thread);
}

#[test]
fn certificates_of_clients_are_verified_and_named() {
    let files = Files::new();
    for client_optional in [false, true] {
        let client_ca = Some(files.path("ca.pem"));
        let tls = ServerTls { client_ca, client_optional, ..files.server() };
        let (server, address, thread) = echo("line", Tls::from_files(tls).expect("good files"));
        let rows: [(&str, &[&str]); 2] =
            [("device", &["device.example", "spiffe://example/device"]), ("common name", &["common name"])];
        for (name, expected) in rows {
            let config = files.client(Some(name), &[]);
            // The second connection resumes the session of the first one.
            for kind in [HandshakeKind::Full, HandshakeKind::Resumed] {
                let mut stream = connect(&config, address);
                echoes(&mut stream).expect("an answer");
                assert_eq!(stream.conn.handshake_kind(), Some(kind));
                assert_eq!(info(&server).client_names, expected);
                close(&server, stream);
            }
        }
        let error = echoes(&mut connect(&files.client(Some("stranger"), &[]), address)).expect_err("refused");
        assert!(error.to_string().contains("UnknownCA") || error.to_string().contains("reset"), "{error}");
        assert!(not_attached(&server).contains("UnknownIssuer"));
        let mut stream = connect(&files.client(None, &[]), address);
        if client_optional {
            echoes(&mut stream).expect("an answer");
            assert_eq!(info(&server).client_names, [""; 0]);
            close(&server, stream);
        } else {
            echoes(&mut stream).expect_err("refused");
            assert_eq!(not_attached(&server), "TLS: peer sent no certificates");
        }
        stop(&server, thread);
    }
}

#[test]
fn files_are_read_again_without_an_effect_on_connections() {
    let files = Files::new();
    files.copy("first", "used");
    std::fs::copy(files.path("ca.pem"), files.path("used-ca.pem")).expect("files");
    let from = ServerTls {
        client_ca: Some(files.path("used-ca.pem")),
        ..ServerTls::new(files.path("used.pem"), files.path("used.key"))
    };
    let tls = Tls::from_files(from).expect("good files");
    let (server, address, thread) = echo("line", tls.clone());
    let config = files.client(Some("device"), &[]);
    let shown = |stream: &Stream| stream.conn.peer_certificates().expect("a certificate")[0].to_vec();
    let of = |name: &str| CertificateDer::from_pem_file(files.path(name)).expect("PEM").to_vec();
    let mut old = connect(&config, address);
    echoes(&mut old).expect("an answer");
    assert_eq!(shown(&old), of("first.pem"));

    // A chain whose key has not been replaced yet, and files that are none.
    std::fs::copy(files.path("second.pem"), files.path("used.pem")).expect("files");
    let error = tls.reload().expect_err("they do not match").to_string();
    assert!(
        error.contains("used.pem") && error.contains("used.key") && error.contains("do not match"),
        "{error}"
    );
    std::fs::write(files.path("used.key"), "").expect("a file");
    let error = tls.reload().expect_err("no key").to_string();
    assert!(error.contains("used.key: no private key in PEM"), "{error}");
    let mut stream = connect(&files.client(Some("device"), &[]), address);
    echoes(&mut stream).expect("the old ones are in use");
    assert_eq!(shown(&stream), of("first.pem"));

    files.copy("second", "used");
    tls.reload().expect("good files");
    let mut stream = connect(&config, address);
    echoes(&mut stream).expect("an answer");
    assert_eq!((shown(&stream), stream.conn.handshake_kind()), (of("second.pem"), Some(HandshakeKind::Full)));
    let mut stream = connect(&config, address);
    echoes(&mut stream).expect("an answer");
    assert_eq!(stream.conn.handshake_kind(), Some(HandshakeKind::Resumed));

    // Another CA: the client is refused, although it could resume a session.
    std::fs::write(files.path("used-ca.pem"), "-----BEGIN").expect("a file");
    let error = tls.reload().expect_err("no certificate").to_string();
    assert!(error.contains("used-ca.pem: no certificate in PEM"), "{error}");
    std::fs::copy(files.path("other-ca.pem"), files.path("used-ca.pem")).expect("files");
    tls.reload().expect("good files");
    echoes(&mut connect(&config, address)).expect_err("refused");
    assert!(not_attached(&server).contains("UnknownIssuer"));
    echoes(&mut connect(&files.client(Some("stranger"), &[]), address)).expect("an answer");
    echoes(&mut old).expect("it goes on");
    stop(&server, thread);
}

/// A plaintext connection of which lines are read.
struct Plain(BufReader<TcpStream>);

impl Plain {
    fn connect(address: SocketAddr) -> Self {
        Self(BufReader::new(TcpStream::connect(address).expect("it listens")))
    }

    fn send(&mut self, bytes: &[u8]) {
        self.0.get_mut().write_all(bytes).expect("it reads");
    }

    /// Reads a line that begins with `expected`.
    fn expect(&mut self, expected: &str) {
        let mut line = String::new();
        self.0.read_line(&mut line).expect("text");
        assert!(line.starts_with(expected) && line.ends_with("\r\n"), "{line:?} instead of {expected:?}");
    }

    fn into_inner(self) -> TcpStream {
        assert!(self.0.buffer().is_empty(), "nothing follows");
        self.0.into_inner()
    }
}

fn starttls(files: &Files, starttls: StartTls) -> Tls {
    Tls::from_files(ServerTls { starttls: Some(starttls), ..files.server() }).expect("good files")
}

#[test]
fn smtp_begins_in_plaintext_and_begins_anew_with_tls() {
    let files = Files::new();
    let (server, address, thread) = echo("smtp", starttls(&files, StartTls::Smtp));
    let mut plain = Plain::connect(address);
    plain.expect("220 ");
    plain.send(b"MAIL FROM:<a@example>\r\n");
    plain.expect("530 5.7.0 ");
    plain.send(b"EHLO client.example\r\n");
    plain.expect("250-");
    plain.expect("250 STARTTLS");
    plain.send(b"STARTTLS\r\n");
    plain.expect("220 2.0.0 ");
    let mut stream = over(&files.client(None, &[]), plain.into_inner());
    // The worker, which echoes, gets what follows the handshake and nothing else. A second STARTTLS is a command as any other.
    for line in ["EHLO client.example\r\n", "STARTTLS\r\n", "QUIT\r\n"] {
        stream.write_all(line.as_bytes()).expect("it reads");
        let mut answer = vec![0; line.len()];
        stream.read_exact(&mut answer).expect("an answer");
        assert_eq!(String::from_utf8_lossy(&answer), line);
    }
    assert!(info(&server).starttls && info(&server).tls);
    close(&server, stream);

    // Bytes after STARTTLS, which an attacker on the path could have added.
    let mut plain = Plain::connect(address);
    plain.expect("220 ");
    plain.send(b"STARTTLS\r\nRSET\r\n");
    plain.expect("554 ");
    assert_eq!(plain.0.read(&mut [0]).expect("an end"), 0);
    assert_eq!(not_attached(&server), "plaintext after STARTTLS");
    // Plaintext instead of the handshake.
    let mut plain = Plain::connect(address);
    plain.expect("220 ");
    plain.send(b"STARTTLS\r\n");
    plain.expect("220 ");
    plain.send(b"EHLO client.example\r\n");
    assert!(not_attached(&server).starts_with("TLS: "));
    let mut plain = Plain::connect(address);
    plain.expect("220 ");
    drop(plain);
    assert_eq!(not_attached(&server), "the peer closed before TLS");
    stop(&server, thread);
}

#[test]
fn a_client_that_says_nothing_or_too_little_before_starttls_is_late() {
    let files = Files::new();
    for (protocol, said) in [
        (StartTls::Smtp, &b""[..]),
        (StartTls::Smtp, b"EHLO a\r\nSTARTT"),
        (StartTls::Postgres, b"\0\0\0\x08"),
    ] {
        let tls = starttls(&files, protocol).with_handshake_time(Duration::from_millis(50));
        let (server, address, thread) = echo("line", tls);
        let mut socket = TcpStream::connect(address).expect("it listens");
        socket.write_all(said).expect("it reads");
        assert_eq!(not_attached(&server), "its handshake took too long", "{said:?}");
        stop(&server, thread);
    }
}

#[test]
fn postgres_clients_ask_for_tls() {
    const SSL: [u8; 8] = [0, 0, 0, 8, 0x04, 0xd2, 0x16, 0x2f];
    const GSS: [u8; 8] = [0, 0, 0, 8, 0x04, 0xd2, 0x16, 0x30];
    let files = Files::new();
    let (server, address, thread) = echo("line", starttls(&files, StartTls::Postgres));
    let config = files.client(None, &[]);
    // (request, answer) before the handshake; the last one is PostgreSQL 17's direct TLS.
    let rows: [&[([u8; 8], &[u8; 1])]; 3] = [&[(SSL, b"S")], &[(GSS, b"N"), (SSL, b"S")], &[]];
    for row in rows {
        let mut socket = TcpStream::connect(address).expect("it listens");
        for (request, answer) in row {
            socket.write_all(request).expect("it reads");
            let mut got = [0];
            socket.read_exact(&mut got).expect("an answer");
            assert_eq!(&got, *answer);
        }
        let mut stream = over(&config, socket);
        echoes(&mut stream).expect("an answer");
        assert_eq!(info(&server).starttls, !row.is_empty());
        close(&server, stream);
    }
    let startup = [&[0, 0, 0, 17, 0, 3, 0, 0][..], b"user\0me\0\0"].concat();
    let mut socket = TcpStream::connect(address).expect("it listens");
    socket.write_all(&startup).expect("it reads");
    let mut answer = Vec::new();
    socket.read_to_end(&mut answer).expect("an end");
    assert!(answer.starts_with(b"E\0\0\0") && answer.ends_with(b"sslmode=require\0\0"), "{answer:?}");
    assert_eq!(not_attached(&server), "a PostgreSQL startup message without TLS");
    let mut socket = TcpStream::connect(address).expect("it listens");
    socket.write_all(&[&SSL[..], &startup].concat()).expect("it reads");
    assert_eq!(not_attached(&server), "plaintext after SSLRequest");
    stop(&server, thread);
}

/// The length of a handshake message has 24 bits; the session accepts 64 KiB.
#[test]
fn a_huge_hello_is_refused_early() {
    let files = Files::new();
    let (server, address, thread) = echo("line", Tls::from_files(files.server()).expect("good files"));
    let mut socket = TcpStream::connect(address).expect("it listens");
    // A record of 16 KiB with the head of a ClientHello of 16 MiB, and records that continue it.
    let record = [&[22, 3, 1, 0x40, 0][..], &[0; 1 << 14]].concat();
    let mut first = record.clone();
    first[5..9].copy_from_slice(&[1, 0xff, 0xff, 0xff]);
    let sent = socket.write_all(&first).and_then(|()| (0..1024).try_for_each(|_| socket.write_all(&record)));
    assert!(sent.is_err(), "the connection ends long before 16 MiB");
    assert!(not_attached(&server).starts_with("TLS: "));
    echoes(&mut connect(&files.client(None, &[]), address)).expect("others are served");
    stop(&server, thread);
}

/// A client of TLS 1.2 that asks for another handshake (`R`) gets the alert no_renegotiation, and keeps its connection if it goes on.
#[towpath_testenv::needs("openssl")]
#[test]
fn renegotiation_is_refused() {
    let pair = Pair::new();
    let (server, address, thread) = echo("line", pair.server());
    let mut client = Command::new("openssl")
        .args(["s_client", "-tls1_2", "-connect", &address.to_string(), "-CAfile"])
        .arg(pair.cert())
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("openssl starts");
    client.stdin.as_mut().expect("a pipe").write_all(b"R\n").expect("it reads");
    let mut said = String::new();
    client.stderr.take().expect("a pipe").read_to_string(&mut said).expect("text");
    client.wait().expect("it ends");
    assert!(said.contains("no renegotiation"), "{said}");
    stop(&server, thread);
}
