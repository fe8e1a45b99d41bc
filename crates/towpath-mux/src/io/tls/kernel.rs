//! Kernel TLS: after the handshake the kernel encrypts and decrypts (Documentation/networking/tls.rst).
//!
//! What: rustls makes the handshake, and the socket gets the keys. From then on the plaintext is written to and read from the socket.
//! Records of other types than data have their type in a control message.
//!
//! Invariant: the socket still has every record that follows the handshake, because the kernel decrypts whole records in order. Until
//! the handshake has ended, no read goes beyond the end of a record ([`Boundary`]).
//!
//! Bounds: keys do not change. AES-GCM protects [`RECORDS`] records with one key (RFC 8446, 5.5); the connection ends before. A peer that
//! wants to change keys (KeyUpdate) ends the connection, with a cause.

use std::fs;
use std::io::{self, IoSlice};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::OnceLock;

use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg};
use rustls::{CipherSuite, Connection, ConnectionTrafficSecrets, ProtocolVersion};

use super::super::link::ReadOutcome;
use super::super::sys;
use super::{CHUNK, SLICES};
use crate::mux::{Cause, Outcome, Transmit};

/// Options of setsockopt(2), levels and control messages (linux/tcp.h, linux/socket.h, linux/tls.h).
const TCP_ULP: i32 = 31;
const TLS_TX: i32 = 1;
const TLS_RX: i32 = 2;
/// Ciphers (linux/tls.h).
const AES_GCM_128: u16 = 51;
const AES_GCM_256: u16 = 52;
const CHACHA20_POLY1305: u16 = 54;

/// Bytes of a sequence number (linux/tls.h).
const SEQUENCE: usize = 8;

/// Types of records (RFC 8446, 5.1).
const ALERT: u8 = 21;
const DATA: u8 = 23;
/// The alert close_notify, which is a warning (RFC 8446, 6).
const CLOSE_NOTIFY: [u8; 2] = [1, 0];

/// Head of a record: type, version, length (RFC 8446, 5.1).
const HEAD: usize = 5;

/// Number of records under one key of AES-GCM after which a connection ends: 2^24.5 are safe if all of them are full (RFC 8446, 5.5). One
/// more write may exceed it, by less than that.
const RECORDS: u64 = 1 << 24;

/// Checks that this kernel has TLS.
///
/// # Errors
///
/// It has none; the error names the remedy.
pub(super) fn check() -> Result<(), String> {
    let list = "/proc/sys/net/ipv4/tcp_available_ulp";
    let there =
        fs::read_to_string(list).is_ok_and(|names| names.split_whitespace().any(|name| name == "tls"));
    let why =
        "this kernel has no TLS: load its module with `modprobe tls` (CONFIG_TLS), or leave the option out";
    if !there {
        return Err(format!("{list} lacks `tls`: {why}"));
    }
    if ciphers().is_empty() {
        return Err(
            "the kernel's TLS accepts no key of AES-GCM and ChaCha20-Poly1305: load their modules".to_owned()
        );
    }
    Ok(())
}

/// The ciphers of this kernel, whose algorithms may be modules: a socket takes a key of each.
fn ciphers() -> &'static [u16] {
    static CIPHERS: OnceLock<Vec<u16>> = OnceLock::new();
    CIPHERS.get_or_init(|| {
        let takes = |&(cipher, key, iv, salt): &(u16, usize, usize, usize)| {
            let pair = || {
                let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
                let socket = TcpStream::connect(listener.local_addr()?)?;
                // A socket must be connected, and stay so.
                Ok::<_, io::Error>((listener.accept()?, socket))
            };
            let Ok((_peer, socket)) = pair() else { return false };
            let info =
                [&0x0304_u16.to_ne_bytes()[..], &cipher.to_ne_bytes(), &vec![0; key + iv + salt + SEQUENCE]]
                    .concat();
            sys::set_bytes(socket.as_fd(), libc::IPPROTO_TCP, TCP_ULP, b"tls").is_ok()
                && sys::set_bytes(socket.as_fd(), libc::SOL_TLS, TLS_TX, &info).is_ok()
        };
        let known = [(AES_GCM_128, 16, 8, 4), (AES_GCM_256, 32, 8, 4), (CHACHA20_POLY1305, 32, 12, 0)];
        known.iter().filter(|cipher| takes(cipher)).map(|cipher| cipher.0).collect()
    })
}

/// The position of a read in the records of a connection.
#[derive(Debug, Default)]
pub(super) struct Boundary {
    head: [u8; HEAD],
    /// Received bytes of the head.
    have: usize,
    /// Bytes of the record that have not been received.
    left: usize,
}

impl Boundary {
    /// Number of bytes that may be read: up to the end of a head or of a record.
    pub(super) fn next(&self) -> usize {
        if self.left > 0 { self.left } else { HEAD - self.have }
    }

    /// Takes note of received bytes.
    pub(super) fn pass(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let part = self.next().min(bytes.len());
            let (now, later) = bytes.split_at(part);
            bytes = later;
            if self.left > 0 {
                self.left -= part;
                continue;
            }
            self.head[self.have..self.have + part].copy_from_slice(now);
            self.have += part;
            if self.have == HEAD {
                (self.have, self.left) = (0, u16::from_be_bytes([self.head[3], self.head[4]]).into());
            }
        }
    }

    /// Every record that has begun was received whole.
    pub(super) const fn is_between(&self) -> bool {
        self.have == 0 && self.left == 0
    }
}

/// A connection whose records the kernel handles.
#[derive(Debug)]
pub(super) struct Kernel {
    /// Records that may still be sent.
    left: u64,
}

impl Kernel {
    /// Prepares the socket; without keys it passes bytes unchanged. Returns false if the kernel does not do that for this socket or for
    /// the cipher.
    pub(super) fn prepare(fd: &OwnedFd, connection: &Connection) -> bool {
        let cipher = connection.negotiated_cipher_suite().and_then(|suite| cipher_of(suite.suite()));
        cipher.is_some_and(|cipher| ciphers().contains(&cipher))
            && sys::set_bytes(fd.as_fd(), libc::IPPROTO_TCP, TCP_ULP, b"tls").is_ok()
    }

    /// Gives the keys of a finished handshake to a prepared socket.
    pub(super) fn begin(fd: &OwnedFd, connection: Connection) -> Result<Self, String> {
        let version = match connection.protocol_version() {
            Some(ProtocolVersion::TLSv1_2) => 0x0303,
            _ => 0x0304,
        };
        let secrets = connection.dangerous_extract_secrets().map_err(|error| error.to_string())?;
        let mut left = u64::MAX;
        for (option, (sequence, secrets)) in [(TLS_TX, secrets.tx), (TLS_RX, secrets.rx)] {
            let (info, limit) = crypto_info(version, sequence, &secrets);
            if option == TLS_TX {
                left = limit.saturating_sub(sequence);
            }
            sys::set_bytes(fd.as_fd(), libc::SOL_TLS, option, &info)
                .map_err(|errno| format!("the kernel refuses the keys of TLS: {errno}"))?;
        }
        Ok(Self { left })
    }

    /// Reads up to the spare capacity of `buffer`.
    pub(super) fn read(&self, fd: &OwnedFd, buffer: &mut Vec<u8>) -> Result<ReadOutcome, Cause> {
        while buffer.len() < buffer.capacity() {
            let before = buffer.len();
            let (bytes, record) = match sys::receive(fd.as_fd(), buffer) {
                Ok(received) => (received.bytes, received.record),
                Err(Errno::AGAIN) => return Ok(ReadOutcome::WouldBlock),
                Err(Errno::INTR) => continue,
                Err(Errno::BADMSG) => return Err(Cause::Tls("a record is not authentic".to_owned())),
                Err(Errno::INVAL | Errno::MSGSIZE) => {
                    return Err(Cause::Tls("a record is malformed".to_owned()));
                }
                Err(errno) => return Err(Cause::Reset(errno.raw_os_error())),
            };
            match record {
                None | Some(DATA) if bytes == 0 => return Ok(ReadOutcome::Eof),
                None | Some(DATA) => {}
                Some(ALERT) => {
                    let alert = buffer.split_off(before);
                    return match alert.get(1) {
                        Some(0) => Ok(ReadOutcome::Eof),
                        Some(number) => Err(Cause::Tls(format!("the peer sent alert {number}"))),
                        None => Err(Cause::Tls("an alert is incomplete".to_owned())),
                    };
                }
                Some(other) => {
                    buffer.truncate(before);
                    let why = "the kernel cannot change keys, nor take other messages of a handshake";
                    return Err(Cause::Tls(format!("a record of type {other}: {why}")));
                }
            }
        }
        Ok(ReadOutcome::More)
    }

    /// Writes as much as the socket accepts. The kernel makes a record of each part of up to 16 KiB that it has accepted.
    pub(super) fn write(&mut self, fd: &OwnedFd, transmit: &mut Transmit) -> Outcome {
        while !transmit.is_empty() {
            if self.left == 0 {
                return Outcome::Failed(Errno::KEYEXPIRED.raw_os_error());
            }
            let slices: Vec<_> = transmit.slices(SLICES).map(IoSlice::new).collect();
            let mut none = SendAncillaryBuffer::default();
            match sendmsg(fd, &slices, &mut none, SendFlags::NOSIGNAL) {
                Ok(sent) => {
                    self.left = self.left.saturating_sub(sent.div_ceil(CHUNK) as u64);
                    transmit.advance(sent);
                }
                Err(Errno::AGAIN) => return Outcome::Blocked,
                Err(Errno::INTR) => {}
                Err(errno) => return Outcome::Failed(errno.raw_os_error()),
            }
        }
        Outcome::Taken
    }

    /// Sends close_notify, if the socket accepts it.
    pub(super) fn close(&self, fd: &OwnedFd) {
        let _ = sys::send_record(fd.as_fd(), ALERT, &CLOSE_NOTIFY);
    }
}

/// The cipher of a suite. `None`: the kernel has none of this kind.
fn cipher_of(suite: CipherSuite) -> Option<u16> {
    use CipherSuite as Suite;
    match suite {
        Suite::TLS13_AES_128_GCM_SHA256
        | Suite::TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256
        | Suite::TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256 => Some(AES_GCM_128),
        Suite::TLS13_AES_256_GCM_SHA384
        | Suite::TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384
        | Suite::TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384 => Some(AES_GCM_256),
        Suite::TLS13_CHACHA20_POLY1305_SHA256
        | Suite::TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256
        | Suite::TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256 => Some(CHACHA20_POLY1305),
        _ => None,
    }
}

/// `struct tls12_crypto_info_*` (linux/tls.h), and the number of records that the key protects.
fn crypto_info(version: u16, sequence: u64, secrets: &ConnectionTrafficSecrets) -> (Vec<u8>, u64) {
    // The salt of AES-GCM is the fixed part of the nonce.
    let (cipher, key, iv, salt, limit) = match secrets {
        ConnectionTrafficSecrets::Aes128Gcm { key, iv } => (AES_GCM_128, key, iv, 4, RECORDS),
        ConnectionTrafficSecrets::Aes256Gcm { key, iv } => (AES_GCM_256, key, iv, 4, RECORDS),
        ConnectionTrafficSecrets::Chacha20Poly1305 { key, iv } => (CHACHA20_POLY1305, key, iv, 0, u64::MAX),
        // The enum is not exhaustive; `prepare` has refused other ciphers.
        _ => return (Vec::new(), 0),
    };
    let (salt, iv) = iv.as_ref().split_at(salt);
    let head = [version.to_ne_bytes(), cipher.to_ne_bytes()].concat();
    ([&head, iv, key.as_ref(), salt, &sequence.to_be_bytes()].concat(), limit)
}

/// Reads no further than the boundary allows.
pub(super) struct Bounded<'a, R>(pub(super) R, pub(super) &'a mut Option<Boundary>);

impl<R: io::Read> io::Read for Bounded<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let Some(boundary) = self.1 else { return self.0.read(buffer) };
        let room = buffer.len().min(boundary.next());
        let came = self.0.read(&mut buffer[..room])?;
        boundary.pass(&buffer[..came]);
        Ok(came)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_end_with_records() {
        let stream = [&[22, 3, 1, 0, 3, 1, 2, 3][..], &[20, 3, 3, 0, 1, 1], &[23, 3, 3, 0, 0]].concat();
        let mut boundary = Boundary::default();
        let (mut at, mut ends) = (0, Vec::new());
        while at < stream.len() {
            let part = boundary.next();
            boundary.pass(&stream[at..at + part]);
            at += part;
            if boundary.is_between() {
                ends.push(at);
            }
        }
        assert_eq!(ends, [8, 14, 19]);
        // In one piece, and in single bytes.
        for size in [stream.len(), 1] {
            let mut boundary = Boundary::default();
            stream.chunks(size).for_each(|part| boundary.pass(part));
            assert!(boundary.is_between(), "{boundary:?}");
            boundary.pass(&[23, 3]);
            assert!(!boundary.is_between() && boundary.next() == 3);
        }
    }
}
