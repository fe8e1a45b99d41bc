//! TLS by rustls (feature `tls`).
//!
//! What: a mutex protects the session. The reader and the writer of a connection take it in turn, and encrypt and
//! decrypt records while they hold it. The socket is non-blocking.
//!
//! Invariant: bytes count as sent when the socket has accepted all records that contain them, not when the
//! session has. When all bytes of a connection count as sent, the socket has therefore accepted all records.

use std::fmt;
use std::io::{self, ErrorKind, IoSlice, Read, Write};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendFlags, send, sendmsg};
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, Connection, RootCertStore, ServerConfig, ServerConnection};

use super::connection_info::ConnectionInfo;
use super::link::ReadOutcome;
use super::unix_peer::UnixPeer;
use crate::mux::{Cause, Outcome, Transmit};

/// Maximum number of plaintext bytes in a written record.
const CHUNK: usize = 16 << 10;
/// Maximum number of slices in a written record.
const SLICES: usize = 64;
/// Default handshake timeout.
const HANDSHAKE: Duration = Duration::from_secs(10);

/// TLS configuration of one side. Clones share it.
#[derive(Clone)]
pub struct Tls {
    side: Side,
    time: Duration,
}

#[derive(Clone)]
enum Side {
    Server(Arc<ServerConfig>),
    Client(Arc<ClientConfig>, ServerName<'static>),
}

/// Why TLS cannot be configured.
#[derive(Debug)]
pub struct TlsError(String);

impl fmt::Display for TlsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for TlsError {}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.side {
            Side::Server(_) => "Tls(server)",
            Side::Client(..) => "Tls(client)",
        })
    }
}

impl Tls {
    /// Server side, with a certificate chain (own certificate first) and its private key, both PEM files.
    ///
    /// # Errors
    ///
    /// A file cannot be read, has no certificate or key, or the two do not match. The error names the file.
    pub fn server(chain: impl AsRef<Path>, key: impl AsRef<Path>) -> Result<Self, TlsError> {
        let (chain, key) = (chain.as_ref(), key.as_ref());
        let certificates = certificates(chain)?;
        let private =
            PrivateKeyDer::from_pem_file(key).map_err(|error| not_pem(key, "private key", &error))?;
        let config = ServerConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .map_err(wrong)?
            .with_no_client_auth()
            .with_single_cert(certificates, private);
        let config = config.map_err(|error| {
            TlsError(format!(
                "the certificate {} and the key {} do not match: {error}",
                chain.display(),
                key.display()
            ))
        })?;
        Ok(Self::server_with(Arc::new(config)))
    }

    /// Server side with a rustls configuration.
    pub fn server_with(config: Arc<ServerConfig>) -> Self {
        Self { side: Side::Server(config), time: HANDSHAKE }
    }

    /// Client side. Trusts servers with this name whose certificate is signed by one in the PEM file.
    ///
    /// # Errors
    ///
    /// The file cannot be read or has no valid certificate, or `name` is neither a host name nor an address.
    pub fn client(roots: impl AsRef<Path>, name: &str) -> Result<Self, TlsError> {
        let mut store = RootCertStore::empty();
        for certificate in certificates(roots.as_ref())? {
            store.add(certificate).map_err(wrong)?;
        }
        let config = ClientConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .map_err(wrong)?
            .with_root_certificates(store)
            .with_no_client_auth();
        let name = ServerName::try_from(name.to_owned())
            .map_err(|_| TlsError(format!("`{name}` is neither a host name nor an address")))?;
        Ok(Self::client_with(Arc::new(config), name))
    }

    /// Client side with a rustls configuration.
    pub fn client_with(config: Arc<ClientConfig>, name: ServerName<'static>) -> Self {
        Self { side: Side::Client(config, name), time: HANDSHAKE }
    }

    /// Sets the handshake timeout. Default: 10 s.
    #[must_use]
    pub fn with_handshake_time(self, time: Duration) -> Self {
        Self { time, ..self }
    }

    /// Starts a session.
    pub(super) fn session(&self) -> io::Result<Session> {
        let connection = match &self.side {
            Side::Server(config) => ServerConnection::new(Arc::clone(config)).map(Connection::from),
            Side::Client(config, name) => {
                ClientConnection::new(Arc::clone(config), name.clone()).map(Connection::from)
            }
        };
        Ok(Session::of(connection.map_err(io::Error::other)?))
    }

    /// The handshake timeout.
    pub(super) fn time(&self) -> Duration {
        self.time
    }
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let none = |error| not_pem(path, "certificate", &error);
    let all = CertificateDer::pem_file_iter(path).map_err(none)?;
    let all = all.collect::<Result<Vec<_>, _>>().map_err(none)?;
    match all.is_empty() {
        true => Err(TlsError(format!(
            "{}: no certificate in PEM: the file has no section CERTIFICATE",
            path.display()
        ))),
        false => Ok(all),
    }
}

/// Error for a PEM file without a valid section for `what`.
fn not_pem(path: &Path, what: &str, error: &pem::Error) -> TlsError {
    let path = path.display();
    TlsError(match error {
        pem::Error::Io(error) => format!("{path}: cannot be read: {error}"),
        error => format!("{path}: no {what} in PEM: {error}"),
    })
}

fn provider() -> Arc<rustls::crypto::CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

fn wrong(error: rustls::Error) -> TlsError {
    TlsError(error.to_string())
}

/// Progress of a handshake.
#[derive(Debug)]
pub(super) enum HandshakeStep {
    /// Done. [`Session::early`] returns the bytes that followed it.
    Done,
    /// Waits for the peer, or for the socket to become writable.
    More { write: bool },
    /// Failed, with the reason.
    Failed(String),
}

/// Result of one read of the socket.
enum Received {
    Nothing,
    Some,
    End,
}

/// The TLS session of a connection.
#[derive(Debug)]
pub(super) struct Session {
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    connection: Connection,
    /// Number of queued bytes in records that the socket has not accepted completely.
    taken: usize,
    /// Bytes that followed the handshake, and whether the peer closed. Taken once.
    early: Vec<u8>,
    over: bool,
}

impl Session {
    fn of(connection: Connection) -> Self {
        Self { inner: Mutex::new(Inner { connection, taken: 0, early: Vec::new(), over: false }) }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Continues the handshake as far as the socket allows. `peer`: that of a Unix socket.
    pub(super) fn advance_handshake(&self, fd: &OwnedFd, peer: Option<&UnixPeer>) -> HandshakeStep {
        let mut inner = self.lock();
        loop {
            match inner.flush(fd) {
                Ok(()) => {}
                Err(Errno::AGAIN) => return HandshakeStep::More { write: true },
                Err(errno) => return HandshakeStep::Failed(errno.to_string()),
            }
            if !inner.connection.is_handshaking() {
                return HandshakeStep::Done;
            }
            let mut early = std::mem::take(&mut inner.early);
            let received = inner.receive(fd, peer, &mut early);
            inner.early = early;
            match received {
                Ok(Received::Nothing) => return HandshakeStep::More { write: false },
                Ok(Received::Some) => {}
                Ok(Received::End) if inner.connection.is_handshaking() => {
                    return HandshakeStep::Failed("the peer closed during the handshake".to_owned());
                }
                Ok(Received::End) => inner.over = true,
                Err(cause) => return HandshakeStep::Failed(cause.to_string()),
            }
        }
    }

    /// Adds the names of the handshake.
    pub(super) fn names(&self, info: ConnectionInfo) -> ConnectionInfo {
        let inner = self.lock();
        let server_name = match &inner.connection {
            Connection::Server(server) => server.server_name().unwrap_or_default().to_owned(),
            Connection::Client(_) => String::new(),
        };
        let protocol = inner.connection.alpn_protocol().unwrap_or_default().to_vec();
        ConnectionInfo { server_name, protocol, ..info }
    }

    /// Returns, once, the bytes that followed the handshake, and true if the peer closed.
    pub(super) fn early(&self) -> (Vec<u8>, bool) {
        let mut inner = self.lock();
        (std::mem::take(&mut inner.early), std::mem::take(&mut inner.over))
    }

    /// Reads up to the spare capacity of `buffer`, plus the rest of the last record. `peer`: that of a Unix socket.
    pub(super) fn read(
        &self,
        fd: &OwnedFd,
        peer: Option<&UnixPeer>,
        buffer: &mut Vec<u8>,
    ) -> Result<ReadOutcome, Cause> {
        let mut inner = self.lock();
        let full = buffer.capacity();
        while buffer.len() < full {
            match inner.receive(fd, peer, buffer)? {
                Received::Nothing => return Ok(ReadOutcome::WouldBlock),
                Received::Some => {}
                Received::End => return Ok(ReadOutcome::Eof),
            }
            // The session may have records to send (alerts, key updates). If the peer does not read, they stay queued.
            let _ = inner.flush(fd);
        }
        Ok(ReadOutcome::More)
    }

    /// Writes as much as the socket accepts. The bytes of a record count as sent when the socket has accepted the
    /// whole record. A peer cannot use a part of a record, so a message whose first record was not sent
    /// completely may be sent on another connection.
    pub(super) fn write(&self, fd: &OwnedFd, transmit: &mut Transmit) -> Outcome {
        let mut inner = self.lock();
        loop {
            match inner.flush(fd) {
                Ok(()) => {}
                Err(Errno::AGAIN) => return Outcome::Blocked,
                Err(errno) => return Outcome::Failed(errno.raw_os_error()),
            }
            transmit.advance(std::mem::take(&mut inner.taken));
            if transmit.is_empty() {
                return Outcome::Taken;
            }
            // One record: CHUNK is its maximum.
            let (mut slices, mut bytes) = (Vec::new(), 0);
            for slice in transmit.slices().take(SLICES) {
                let part = &slice[..slice.len().min(CHUNK - bytes)];
                bytes += part.len();
                slices.push(IoSlice::new(part));
                if bytes == CHUNK {
                    break;
                }
            }
            match inner.connection.writer().write_vectored(&slices) {
                Ok(0) => return Outcome::Failed(Errno::PROTO.raw_os_error()),
                Ok(taken) => inner.taken = taken,
                Err(error) => return Outcome::Failed(errno(&error).raw_os_error()),
            }
        }
    }

    /// Sends close_notify, as far as the socket accepts it.
    pub(super) fn close(&self, fd: &OwnedFd) {
        let mut inner = self.lock();
        inner.connection.send_close_notify();
        let _ = inner.flush(fd);
    }
}

impl Inner {
    /// Reads the socket once and appends the plaintext.
    fn receive(
        &mut self,
        fd: &OwnedFd,
        peer: Option<&UnixPeer>,
        buffer: &mut Vec<u8>,
    ) -> Result<Received, Cause> {
        let came = match self.connection.read_tls(&mut Socket(fd, peer)) {
            Ok(came) => came,
            Err(error) if error.kind() == ErrorKind::Interrupted => return Ok(Received::Some),
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(Received::Nothing),
            Err(error) if peer.is_some() && errno(&error) == Errno::PERM => return Err(Cause::Descriptors),
            Err(error) => return Err(Cause::Reset(errno(&error).raw_os_error())),
        };
        let state = match self.connection.process_new_packets() {
            Ok(state) => state,
            Err(error) => {
                // Sends the alert that tells the peer the reason.
                let _ = self.flush(fd);
                return Err(Cause::Tls(error.to_string()));
            }
        };
        let at = buffer.len();
        buffer.resize(at + state.plaintext_bytes_to_read(), 0);
        let read = self.connection.reader().read_exact(&mut buffer[at..]);
        read.map_err(|error| Cause::Tls(error.to_string()))?;
        Ok(if came == 0 || state.peer_has_closed() { Received::End } else { Received::Some })
    }

    /// Writes pending records.
    fn flush(&mut self, fd: &OwnedFd) -> Result<(), Errno> {
        while self.connection.wants_write() {
            match self.connection.write_tls(&mut Socket(fd, None)) {
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(errno(&error)),
                Ok(_) => {}
            }
        }
        Ok(())
    }
}

/// The socket as `std::io` streams, and the peer to read from if it is a Unix socket.
struct Socket<'a>(&'a OwnedFd, Option<&'a UnixPeer>);

impl Read for Socket<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        Ok(match self.1 {
            None => rustix::io::read(self.0, buffer)?,
            Some(peer) => peer.receive_slice(self.0, buffer)?,
        })
    }
}

impl Write for Socket<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(send(self.0, bytes, SendFlags::NOSIGNAL)?)
    }

    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        Ok(sendmsg(self.0, slices, &mut SendAncillaryBuffer::default(), SendFlags::NOSIGNAL)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn errno(error: &io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::IO)
}
