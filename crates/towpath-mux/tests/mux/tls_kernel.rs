//! TLS that the kernel does after the handshake. Most tests need a kernel with CONFIG_TLS; `.ci/nightly ktls` runs them in Debian's.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::{Arc, Mutex, PoisonError};

use rustls::pki_types::ServerName;
use rustls::pki_types::pem::PemObject;
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned, SupportedCipherSuite};
use towpath_mux::io::{Server, ServerTls, Tls};
use towpath_mux::mux::Cause;

use super::tls::{Pair, echo, ended, stop};

fn tls(pair: &Pair) -> Tls {
    Tls::from_files(ServerTls { kernel: true, ..pair.files() }).expect("a kernel with TLS")
}

/// A client that offers these ciphers only.
fn client(pair: &Pair, suites: &[SupportedCipherSuite]) -> ClientConnection {
    let mut roots = RootCertStore::empty();
    roots
        .add(rustls::pki_types::CertificateDer::from_pem_file(pair.cert()).expect("PEM"))
        .expect("a certificate");
    let mut provider = rustls::crypto::ring::default_provider();
    provider.cipher_suites = suites.to_vec();
    let config = ClientConfig::builder_with_provider(Arc::new(provider))
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_root_certificates(roots)
        .with_no_client_auth();
    let name = ServerName::try_from("localhost").expect("a name");
    ClientConnection::new(Arc::new(config), name).expect("a client")
}

/// Those for the certificate, whose key is not one of RSA.
fn all() -> Vec<SupportedCipherSuite> {
    let mut suites = rustls::crypto::ring::default_provider().cipher_suites;
    suites.retain(|suite| !format!("{:?}", suite.suite()).contains("_RSA_"));
    assert_eq!(suites.len(), 6);
    suites
}

/// One test at a time: the counters are those of the machine.
static ALONE: Mutex<()> = Mutex::new(());

/// Connections whose received records the kernel has decrypted since it started (Documentation/networking/tls.rst). They get their keys
/// after those for sending.
fn taken_over() -> u64 {
    let counts = fs::read_to_string("/proc/net/tls_stat").expect("counters");
    let line = counts.lines().find(|line| line.starts_with("TlsRxSw")).expect("a counter");
    line.split_whitespace().nth(1).expect("a number").parse().expect("a number")
}

fn ended_with(server: &Server) -> Cause {
    ended(server).cause
}

#[test]
fn a_kernel_without_tls_is_an_error_with_the_remedy() {
    let names = fs::read_to_string("/proc/sys/net/ipv4/tcp_available_ulp").unwrap_or_default();
    let pair = Pair::new();
    match Tls::from_files(ServerTls { kernel: true, ..pair.files() }) {
        Ok(_) => assert!(names.split_whitespace().any(|name| name == "tls")),
        Err(error) => {
            assert!(!names.split_whitespace().any(|name| name == "tls"));
            assert!(error.to_string().contains("`modprobe tls`"), "{error}");
        }
    }
}

#[towpath_testenv::needs(ktls)]
#[test]
fn bytes_come_back_as_they_went_with_each_cipher() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let pair = Pair::new();
    for suite in all() {
        let (server, address, thread) = echo("length=4 be adjust=4", tls(&pair));
        let before = taken_over();
        let mut stream =
            StreamOwned::new(client(&pair, &[suite]), TcpStream::connect(address).expect("it listens"));
        for length in [0, 1, 16_380, 16_381, 100_000, 5 << 20] {
            let body: Vec<u8> = (0..length).map(|at| (at * 7 + at / 251) as u8).collect();
            let message = [&(length as u32).to_be_bytes()[..], &body].concat();
            let mut answer = vec![0; message.len()];
            stream.write_all(&message).expect("it reads");
            stream.read_exact(&mut answer).expect("an answer");
            assert!(answer == message, "{suite:?}: {length} bytes differ");
        }
        assert_eq!(taken_over(), before + 1, "{suite:?}");
        stream.conn.send_close_notify();
        stream.flush().expect("it reads");
        // The server answers close_notify.
        assert_eq!(stream.read(&mut [0]).expect("an end that was said"), 0, "{suite:?}");
        assert_eq!(ended_with(&server), Cause::Clean, "{suite:?}");
        stop(&server, thread);
    }
}

/// The handshake in single bytes, and a request in the segment of its end: the kernel gets whole records.
#[towpath_testenv::needs(ktls)]
#[test]
fn no_record_behind_the_handshake_is_lost() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let pair = Pair::new();
    let (server, address, thread) = echo("line", tls(&pair));
    for suite in all() {
        for size in [usize::MAX, 1] {
            let before = taken_over();
            let (mut client, mut socket) =
                (client(&pair, &[suite]), TcpStream::connect(address).expect("it listens"));
            socket.set_nodelay(true).expect("an option");
            let mut out = Vec::new();
            while client.is_handshaking() {
                while client.wants_write() {
                    client.write_tls(&mut out).expect("memory");
                }
                std::mem::take(&mut out)
                    .chunks(size)
                    .for_each(|part| socket.write_all(part).expect("it reads"));
                client.read_tls(&mut socket).expect("it answers");
                client.process_new_packets().expect("a good handshake");
            }
            client.writer().write_all(b"hello\n").expect("memory");
            while client.wants_write() {
                client.write_tls(&mut out).expect("memory");
            }
            out.chunks(size).for_each(|part| socket.write_all(part).expect("it reads"));
            let mut answer = [0; 6];
            rustls::Stream::new(&mut client, &mut socket).read_exact(&mut answer).expect("an answer");
            assert_eq!(&answer, b"hello\n");
            assert_eq!(taken_over(), before + 1, "{suite:?}");
        }
    }
    stop(&server, thread);
}

#[towpath_testenv::needs(ktls)]
#[test]
fn other_keys_and_forged_records_end_the_connection_with_a_cause() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let pair = Pair::new();
    let (server, address, thread) = echo("line", tls(&pair));
    let connected = || {
        let mut stream =
            StreamOwned::new(client(&pair, &all()), TcpStream::connect(address).expect("it listens"));
        stream.write_all(b"hello\n").expect("it reads");
        stream.read_exact(&mut [0; 6]).expect("an answer");
        stream
    };
    let mut stream = connected();
    stream.conn.refresh_traffic_keys().expect("TLS 1.3");
    let _ = stream.write_all(b"hello\n");
    assert!(matches!(ended_with(&server), Cause::Tls(why) if why.contains("type 22")));

    let mut stream = connected();
    stream.sock.write_all(&[23, 3, 3, 0, 32]).expect("it reads");
    stream.sock.write_all(&[7; 32]).expect("it reads");
    let cause = ended_with(&server);
    assert!(matches!(&cause, Cause::Tls(why) if why.contains("not authentic")), "{cause:?}");

    // A connection without close_notify is the end of the stream, as with TLS in the process.
    drop(connected());
    assert_eq!(ended_with(&server), Cause::Clean);
    stop(&server, thread);
}
