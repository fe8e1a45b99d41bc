//! TLS by rustls (feature `tls`).
//!
//! What: a mutex protects the session. The reader and the writer of a connection take it in turn, and encrypt and
//! decrypt records while they hold it. The socket is non-blocking. With [`ServerTls::kernel`], the kernel does so after the handshake.
//!
//! Invariant: bytes count as sent when the socket has accepted all records that contain them, not when the
//! session has. When all bytes of a connection count as sent, the socket has therefore accepted all records.

mod config;
mod kernel;
mod names;
mod starttls;

use std::io::{self, ErrorKind, IoSlice, Read, Write};
use std::os::fd::OwnedFd;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendFlags, send, sendmsg};
use rustls::Connection;

use super::connection_info::ConnectionInfo;
use super::link::ReadOutcome;
use super::unix_peer::UnixPeer;
use crate::mux::{Cause, Outcome, Transmit};
use starttls::{Next, Prelude};

pub use config::{ServerTls, Tls, TlsError};
use kernel::{Boundary, Bounded, Kernel};

/// Maximum number of plaintext bytes in a written record.
const CHUNK: usize = 16 << 10;
/// Maximum number of slices in a written record.
const SLICES: usize = 64;
/// Maximum number of bytes read at once before TLS.
const PLAINTEXT: usize = 4096;

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
    /// The plaintext that precedes TLS, until TLS begins.
    prelude: Option<Prelude>,
    /// The client asked for TLS in plaintext.
    starttls: bool,
    layer: Layer,
    /// What the handshake has told.
    told: Told,
    /// Bytes that followed the handshake, and whether the peer closed. Taken once.
    early: Vec<u8>,
    over: bool,
}

/// The part that encrypts and decrypts.
#[derive(Debug)]
enum Layer {
    Rustls(Box<Records>),
    Kernel(Kernel),
    /// The keys could not be given to the kernel; the connection ends.
    Failed,
}

/// The records of a connection, by rustls.
#[derive(Debug)]
struct Records {
    connection: Connection,
    /// Number of queued bytes in records that the socket has not accepted completely.
    taken: usize,
    /// Where a read may end, as long as the kernel shall take over.
    boundary: Option<Boundary>,
}

/// Names and protocol of a handshake.
#[derive(Clone, Debug, Default)]
struct Told {
    server_name: String,
    protocol: Vec<u8>,
    client_names: Vec<String>,
}

impl Session {
    /// `kernel`: the kernel takes over after the handshake, if it can.
    fn of(connection: Connection, prelude: Option<Prelude>, kernel: bool) -> Self {
        let boundary = kernel.then(Boundary::default);
        let layer = Layer::Rustls(Box::new(Records { connection, taken: 0, boundary }));
        let (told, early) = (Told::default(), Vec::new());
        Self { inner: Mutex::new(Inner { prelude, starttls: false, layer, told, early, over: false }) }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Continues the handshake as far as the socket allows. `peer`: that of a Unix socket.
    pub(super) fn advance_handshake(&self, fd: &OwnedFd, peer: Option<&UnixPeer>) -> HandshakeStep {
        let mut inner = self.lock();
        if let Some(step) = inner.advance_prelude(fd, peer) {
            return step;
        }
        let Inner { layer, early, over, .. } = &mut *inner;
        let Layer::Rustls(records) = layer else { return HandshakeStep::Done };
        loop {
            match records.flush(fd) {
                Ok(()) => {}
                Err(Errno::AGAIN) => return HandshakeStep::More { write: true },
                Err(errno) => return HandshakeStep::Failed(errno.to_string()),
            }
            if !records.connection.is_handshaking() {
                return inner.finish_handshake(fd);
            }
            match records.receive(fd, peer, early) {
                Ok(Received::Nothing) => return HandshakeStep::More { write: false },
                Ok(Received::Some) => {}
                Ok(Received::End) if records.connection.is_handshaking() => {
                    return HandshakeStep::Failed("the peer closed during the handshake".to_owned());
                }
                Ok(Received::End) => *over = true,
                Err(cause) => return HandshakeStep::Failed(cause.to_string()),
            }
        }
    }

    /// Adds the names of the handshake.
    pub(super) fn names(&self, info: ConnectionInfo) -> ConnectionInfo {
        let inner = self.lock();
        let Told { server_name, protocol, client_names } = inner.told.clone();
        ConnectionInfo { server_name, protocol, client_names, starttls: inner.starttls, ..info }
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
        let records = match &mut inner.layer {
            Layer::Rustls(records) => records,
            Layer::Kernel(kernel) => return kernel.read(fd, buffer),
            Layer::Failed => return Ok(ReadOutcome::Eof),
        };
        let full = buffer.capacity();
        while buffer.len() < full {
            match records.receive(fd, peer, buffer)? {
                Received::Nothing => return Ok(ReadOutcome::WouldBlock),
                Received::Some => {}
                Received::End => return Ok(ReadOutcome::Eof),
            }
            // The session may have records to send (alerts, key updates). If the peer does not read, they stay queued.
            let _ = records.flush(fd);
        }
        Ok(ReadOutcome::More)
    }

    /// Writes as much as the socket accepts. The bytes of a record count as sent when the socket has accepted the
    /// whole record. A peer cannot use a part of a record, so a message whose first record was not sent
    /// completely may be sent on another connection.
    pub(super) fn write(&self, fd: &OwnedFd, transmit: &mut Transmit) -> Outcome {
        let mut inner = self.lock();
        let records = match &mut inner.layer {
            Layer::Rustls(records) => records,
            Layer::Kernel(kernel) => return kernel.write(fd, transmit),
            Layer::Failed => return Outcome::Failed(Errno::PROTO.raw_os_error()),
        };
        loop {
            match records.flush(fd) {
                Ok(()) => {}
                Err(Errno::AGAIN) => return Outcome::Blocked,
                Err(errno) => return Outcome::Failed(errno.raw_os_error()),
            }
            transmit.advance(std::mem::take(&mut records.taken));
            if transmit.is_empty() {
                return Outcome::Taken;
            }
            // One record: CHUNK is its maximum.
            let (mut slices, mut bytes) = (Vec::new(), 0);
            for slice in transmit.slices(SLICES) {
                let part = &slice[..slice.len().min(CHUNK - bytes)];
                bytes += part.len();
                slices.push(IoSlice::new(part));
                if bytes == CHUNK {
                    break;
                }
            }
            match records.connection.writer().write_vectored(&slices) {
                Ok(0) => return Outcome::Failed(Errno::PROTO.raw_os_error()),
                Ok(taken) => records.taken = taken,
                Err(error) => return Outcome::Failed(errno(&error).raw_os_error()),
            }
        }
    }

    /// Sends close_notify, as far as the socket accepts it. Before TLS there is none to send.
    pub(super) fn close(&self, fd: &OwnedFd) {
        let mut inner = self.lock();
        if inner.prelude.is_some() {
            return;
        }
        match &mut inner.layer {
            Layer::Rustls(records) => {
                records.connection.send_close_notify();
                let _ = records.flush(fd);
            }
            Layer::Kernel(kernel) => kernel.close(fd),
            Layer::Failed => {}
        }
    }
}

impl Inner {
    /// Continues the plaintext that precedes TLS. Returns `None` when TLS begins.
    fn advance_prelude(&mut self, fd: &OwnedFd, peer: Option<&UnixPeer>) -> Option<HandshakeStep> {
        while let Some(prelude) = &mut self.prelude {
            if !prelude.send.is_empty() {
                match Socket(fd, None).write(&prelude.send) {
                    Ok(sent) => drop(prelude.send.drain(..sent)),
                    Err(error) if error.kind() == ErrorKind::Interrupted => {}
                    Err(error) if error.kind() == ErrorKind::WouldBlock => {
                        return Some(HandshakeStep::More { write: true });
                    }
                    Err(error) => return Some(HandshakeStep::Failed(error.to_string())),
                }
                continue;
            }
            match std::mem::take(&mut prelude.next) {
                Next::End(why) => return Some(HandshakeStep::Failed(why.to_owned())),
                Next::Tls(first) => {
                    self.prelude = None;
                    self.starttls = first.is_empty();
                    let Layer::Rustls(records) = &mut self.layer else { return None };
                    if let Err(error) = records.feed(&first) {
                        let _ = records.flush(fd);
                        return Some(HandshakeStep::Failed(Cause::Tls(error.to_string()).to_string()));
                    }
                    return None;
                }
                Next::Read => {}
            }
            let mut bytes = [0; PLAINTEXT];
            match Socket(fd, peer).read(&mut bytes) {
                Ok(0) => return Some(HandshakeStep::Failed("the peer closed before TLS".to_owned())),
                Ok(came) => prelude.handle(&bytes[..came]),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    return Some(HandshakeStep::More { write: false });
                }
                Err(error) if peer.is_some() && errno(&error) == Errno::PERM => {
                    return Some(HandshakeStep::Failed(Cause::Descriptors.to_string()));
                }
                Err(error) => return Some(HandshakeStep::Failed(error.to_string())),
            }
        }
        None
    }

    /// Notes what the handshake has told, and gives the keys to the kernel if it shall have them.
    fn finish_handshake(&mut self, fd: &OwnedFd) -> HandshakeStep {
        let Layer::Rustls(records) = &mut self.layer else { return HandshakeStep::Done };
        self.told = records.told();
        let boundary = records.boundary.take();
        // A socket that cannot have them (a Unix socket), or bytes that the kernel does not get: TLS stays here.
        let moves =
            boundary.is_some_and(|boundary| boundary.is_between()) && self.early.is_empty() && !self.over;
        if !moves || !Kernel::prepare(fd, &records.connection) {
            return HandshakeStep::Done;
        }
        let Layer::Rustls(records) = std::mem::replace(&mut self.layer, Layer::Failed) else {
            return HandshakeStep::Done;
        };
        match Kernel::begin(fd, records.connection) {
            Ok(kernel) => self.layer = Layer::Kernel(kernel),
            Err(why) => return HandshakeStep::Failed(why),
        }
        HandshakeStep::Done
    }
}

impl Records {
    fn told(&self) -> Told {
        let (server_name, client_names) = match &self.connection {
            Connection::Server(server) => {
                let certificate = server.peer_certificates().and_then(<[_]>::first);
                let client_names = certificate.map(names::names).unwrap_or_default();
                (server.server_name().unwrap_or_default().to_owned(), client_names)
            }
            Connection::Client(_) => (String::new(), Vec::new()),
        };
        Told {
            server_name,
            protocol: self.connection.alpn_protocol().unwrap_or_default().to_vec(),
            client_names,
        }
    }

    /// Passes received bytes to the session.
    fn feed(&mut self, mut bytes: &[u8]) -> Result<(), rustls::Error> {
        if let Some(boundary) = &mut self.boundary {
            boundary.pass(bytes);
        }
        while !bytes.is_empty() {
            // A session has room for more than one read.
            if !self.connection.read_tls(&mut bytes).is_ok_and(|taken| taken > 0) {
                return Err(rustls::Error::General("the first bytes are too many".to_owned()));
            }
            self.connection.process_new_packets()?;
        }
        Ok(())
    }

    /// Reads the socket once and appends the plaintext.
    fn receive(
        &mut self,
        fd: &OwnedFd,
        peer: Option<&UnixPeer>,
        buffer: &mut Vec<u8>,
    ) -> Result<Received, Cause> {
        let came = match self.connection.read_tls(&mut Bounded(Socket(fd, peer), &mut self.boundary)) {
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
