//! TLS that the kernel does after the handshake. Most tests need a kernel with CONFIG_TLS; `.ci/nightly ktls` runs them in Debian's.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::{Mutex, PoisonError};

use rustls::crypto::CryptoProvider;
use rustls::{ClientConnection, StreamOwned, SupportedCipherSuite};
use towpath_mux::io::{ServerTls, Tls};
use towpath_mux::mux::Cause;

use super::tls::{Pair, echo, ended, exchange, request_behind_handshake, stop};

fn tls(pair: &Pair) -> Tls {
    Tls::from_files(ServerTls { kernel: true, ..pair.files() }).expect("a kernel with TLS")
}

/// A client that offers these ciphers only.
fn client(pair: &Pair, suites: &[SupportedCipherSuite]) -> ClientConnection {
    let provider = rustls::crypto::ring::default_provider();
    pair.client_with(CryptoProvider { cipher_suites: suites.to_vec(), ..provider })
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
        let socket = TcpStream::connect(address).expect("it listens");
        exchange(StreamOwned::new(client(&pair, &[suite]), socket));
        assert_eq!(taken_over(), before + 1, "{suite:?}");
        assert_eq!(ended(&server).cause, Cause::Clean, "{suite:?}");
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
            request_behind_handshake(&mut client, &mut socket, false, size);
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
    assert!(matches!(ended(&server).cause, Cause::Tls(why) if why.contains("type 22")));

    let mut stream = connected();
    stream.sock.write_all(&[23, 3, 3, 0, 32]).expect("it reads");
    stream.sock.write_all(&[7; 32]).expect("it reads");
    let cause = ended(&server).cause;
    assert!(matches!(&cause, Cause::Tls(why) if why.contains("not authentic")), "{cause:?}");

    // A connection without close_notify is the end of the stream, as with TLS in the process.
    drop(connected());
    assert_eq!(ended(&server).cause, Cause::Clean);
    stop(&server, thread);
}
