//! `towpath.Mux`: a multiplexor in this process. Its handles have socket calls like those of Linux's KCM.

use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use rustix::io::Errno;
use towpath_mux::assembler::Limits;
use towpath_mux::framing::Framing;
use towpath_mux::io::{Connect, Error, Flags, Kind, Server, ServerTls, Socket, Tls, TlsError, To};
use towpath_mux::mux::{Config, Order, Ticket, psock};

use crate::counters::{self, MuxCounters, Tables};
use crate::data::Data;
use crate::framing::{self, not_in_a_function};
use crate::mux_event::{ConnectionInfo, Connector, MuxEnded, MuxEvent, Policy};
use crate::worker::Connection;
use crate::{asynchronous, descriptor, failure, wait};

/// How long the exit of a `with` block waits, in seconds.
const PATIENCE: f64 = 10.0;

/// A handle of a multiplexor in this process, for use by one thread.
///
/// Mux(framing, kind="dgram", *, connected=False, message_max=None, head_max=None, connection_bytes=None, send_bytes=None,
/// send_most=None, mux_bytes=None, head_time=None, body_time=None, rate=0, idle=None, send_time=60.0, order=None,
/// in_flight=None, rebalance=None)
///
/// Creates a multiplexor of this framing, a text or a Framing; clone() creates handles for other threads. A message goes to any handle that receives, whatever its connection.
/// kind selects what ends a message. "dgram": each send is a message unless it has MSG_MORE, and a short read discards the rest.
/// "seqpacket": a send with MSG_EOR ends the message, and a short read leaves the rest for the next one. Flags are those of the module
/// socket. The object is a context manager, and an iterator and asynchronous iterator over messages. A message is done when the next one is
/// requested. order is that of messages that several handles process: "none", "replies", "serial", "sticky" or "key"; None is the order
/// that the framing's protocol needs.
///
/// in_flight: messages of one connection that handles hold at a time; None: all handles but one are busy with a connection while another one
/// is active. rebalance, for "sticky": a connection moves between two messages if its handle has this number of connections more than another one; None: it
/// never moves.
///
/// Limits in bytes, None for the default. message_max: length of a message; a longer one ends its connection (16 MiB). head_max: length of a
/// message's head before its length is known, for framings without a limit (64 KiB). connection_bytes: messages of a connection that are
/// not done; reading stops at the limit (1 MiB). send_bytes: data that the peer has not accepted; reading stops at the limit (256 KiB).
/// send_most: data that the peer has not accepted; the connection ends above it (16 MiB, or twice message_max). mux_bytes: total memory
/// (256 MiB).
///
/// Timeouts in seconds, None for no limit. head_time: from a message's first byte until its length is known, or until the end of a line.
/// body_time: from the first byte to the last of a message with a known length, plus its length divided by rate, in bytes per second.
/// idle: time without traffic and without work. send_time: time in which the peer accepts no data.
#[pyclass]
#[derive(Debug)]
pub(crate) struct Mux {
    socket: Option<Socket>,
    /// Framing of connections that are attached without one.
    framing: Framing,
    connected: bool,
}

/// A message of a connection, or a part of one. bytes is a copy.
#[pyclass(frozen)]
#[derive(Debug)]
pub(crate) struct Received {
    mux: Py<Mux>,
    ticket: Ticket,
    /// The bytes that were read.
    #[pyo3(get)]
    bytes: Py<PyBytes>,
    /// Length of the message from the first of these bytes on; for a datagram, its full length.
    #[pyo3(get)]
    length: usize,
    /// The rest of the message was discarded (MSG_TRUNC).
    #[pyo3(get)]
    truncated: bool,
    /// These bytes end the message (MSG_EOR).
    #[pyo3(get)]
    end: bool,
    /// The connection of the message.
    #[pyo3(get)]
    connection: Connection,
    /// The framing's mark; 0 if unset.
    #[pyo3(get)]
    mark: u32,
    /// The framing's hash; 0 if unset.
    #[pyo3(get)]
    hash: u32,
    /// Number of bytes that the framing strips at the start and at the end. They are part of bytes.
    #[pyo3(get)]
    stripped: (usize, usize),
}

/// Destination of a message.
#[derive(FromPyObject)]
enum Destination<'py> {
    #[pyo3(transparent)]
    Requester(Bound<'py, Received>),
    #[pyo3(transparent)]
    Connection(Bound<'py, Connection>),
}

#[pymethods]
impl Mux {
    #[new]
    #[pyo3(signature = (
        framing, kind="dgram", *, connected=false, message_max=None, head_max=None, connection_bytes=None, send_bytes=None,
        send_most=None, mux_bytes=None, head_time=None, body_time=None, rate=0, idle=None, send_time=Some(60.0),
        order=None, in_flight=None, rebalance=None
    ))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments in Python")]
    fn new(
        py: Python<'_>,
        framing: framing::Argument<'_>,
        kind: &str,
        connected: bool,
        message_max: Option<usize>,
        head_max: Option<usize>,
        connection_bytes: Option<usize>,
        send_bytes: Option<usize>,
        send_most: Option<usize>,
        mux_bytes: Option<usize>,
        head_time: Option<f64>,
        body_time: Option<f64>,
        rate: u32,
        idle: Option<f64>,
        send_time: Option<f64>,
        order: Option<&str>,
        in_flight: Option<usize>,
        rebalance: Option<usize>,
    ) -> PyResult<Self> {
        let framing = framing.get()?;
        let order = match order {
            None => framing.order(),
            Some("none") => Order::None,
            Some("replies") => Order::Replies,
            Some("serial") => Order::Serial,
            Some("sticky") => Order::Sticky,
            Some("key") => Order::Key,
            Some(_) => {
                let text = r#"order must be "none", "replies", "serial", "sticky" or "key""#;
                return Err(PyValueError::new_err(text));
            }
        };
        let kind = match kind {
            "dgram" => Kind::Dgram,
            "seqpacket" => Kind::Seqpacket,
            _ => return Err(PyValueError::new_err(r#"kind must be "dgram" or "seqpacket""#)),
        };
        if order == Order::Key && !framing.may_have_key() {
            return Err(PyValueError::new_err(
                "the framing gives no key: add key=OFFSET:LENGTH to its clauses",
            ));
        }
        let bounds = [message_max, head_max, connection_bytes, send_bytes, send_most, mux_bytes];
        if bounds.contains(&Some(0)) {
            return Err(PyValueError::new_err("a limit is at least 1 byte; None selects the default"));
        }
        if [in_flight, rebalance].contains(&Some(0)) {
            return Err(PyValueError::new_err(
                "in_flight and rebalance are at least 1; None selects the default",
            ));
        }
        let limits = Limits::default();
        let limits = Limits {
            head: head_max.unwrap_or(limits.head),
            message: message_max.unwrap_or(limits.message),
            head_time: time(head_time)?,
            body_time: time(body_time)?,
            rate,
            ..limits
        };
        let config = Config::new(order);
        let config = message_max.map_or(config, |bytes| config.for_messages(bytes));
        let config = Config {
            connected,
            in_flight,
            rebalance,
            psock_bytes: connection_bytes.map_or(config.psock_bytes, towpath_mux::mux::Bound::of),
            send_bytes: send_bytes.map_or(config.send_bytes, towpath_mux::mux::Bound::of),
            send_most: send_most.unwrap_or(config.send_most),
            mux_bytes: mux_bytes.map_or(config.mux_bytes, towpath_mux::mux::Bound::of),
            idle: time(idle)?,
            send_time: time(send_time)?,
            ..config
        };
        let opened = py.detach(|| Server::with_limits(framing.clone(), limits, config)?.socket(kind));
        let socket = opened.map_err(|error| failure::system(&error))?;
        Ok(Self { socket: Some(socket), framing, connected })
    }

    /// Creates another handle of the same multiplexor and kind, for another thread (KCM's SIOCKCMCLONE).
    fn clone(&self, py: Python<'_>) -> PyResult<Self> {
        let socket = self.open()?;
        let socket = py.detach(|| socket.try_clone()).map_err(|error| failure::system(&error))?;
        Ok(Self { socket: Some(socket), framing: self.framing.clone(), connected: self.connected })
    }

    /// Accepts TCP connections at "HOST:PORT"; port 0 selects a free port. Returns the bound (host, port).
    fn listen(&self, py: Python<'_>, address: &str) -> PyResult<(String, u16)> {
        let server = self.open()?.server();
        let bound = py.detach(|| server.listen(address)).map_err(|error| failure::system(&error))?;
        Ok((bound.ip().to_string(), bound.port()))
    }

    /// The same with TLS: connections are attached after their handshakes. certificate: path of a PEM file with the certificate chain, own
    /// certificate first; key: path of a PEM file with its private key. client_ca: path of a PEM file with the authorities that sign
    /// certificates of clients; clients need one then, unless client_optional. ALPN has the protocols of the multiplexor's framing.
    /// handshake_time: limit in seconds. starttls: begin in plaintext and require STARTTLS (framing "smtp") or SSLRequest
    /// ("postgres-frontend").
    #[pyo3(signature = (
        address, certificate, key, *, client_ca=None, client_optional=false, handshake_time=10.0, starttls=false
    ))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments in Python")]
    fn listen_tls(
        &self,
        py: Python<'_>,
        address: &str,
        certificate: PathBuf,
        key: PathBuf,
        client_ca: Option<PathBuf>,
        client_optional: bool,
        handshake_time: f64,
        starttls: bool,
    ) -> PyResult<(String, u16)> {
        let server = self.open()?.server();
        let prelude = self.framing.starttls().filter(|_| starttls);
        if starttls && prelude.is_none() {
            let text = "starttls: the protocol of the framing has none; use smtp or postgres-frontend";
            return Err(PyValueError::new_err(text));
        }
        let files = ServerTls::new(certificate, key).for_framing(&self.framing);
        let files = ServerTls { client_ca, client_optional, starttls: prelude, ..files };
        let tls = Tls::from_files(files).map_err(tls_error)?;
        let tls = tls.with_handshake_time(wait::patience(handshake_time)?);
        let bound = py.detach(|| server.listen_tls(address, tls)).map_err(|error| failure::system(&error))?;
        Ok((bound.ip().to_string(), bound.port()))
    }

    /// Reads the certificates and keys of all listeners again. Later handshakes use them; connections are not affected. ValueError: a file,
    /// which the message names, is invalid; all listeners then keep what was read before.
    fn reload_tls(&self, py: Python<'_>) -> PyResult<()> {
        let server = self.open()?.server();
        py.detach(|| server.reload_tls()).map_err(tls_error)
    }

    /// Accepts connections at a Unix stream socket, which it makes at path.
    fn listen_unix(&self, py: Python<'_>, path: PathBuf) -> PyResult<()> {
        let server = self.open()?.server();
        py.detach(|| server.listen_unix(path)).map_err(|error| failure::system(&error))
    }

    /// Keeps a connection to peer, "HOST:PORT" or "unix:PATH": connects, attaches, and does so again when it ends, until the multiplexor
    /// drains or close() of the result. Does not wait. timeout: limit of a connect(2) in seconds. pause: seconds before the second attempt,
    /// doubled for each further one, at most pause_most. With tls_roots, the path of a PEM file with the certificates that sign servers, the
    /// connection has TLS; tls_name is the name in the server's certificate, otherwise the host of peer.
    #[pyo3(signature = (
        peer, *, timeout=10.0, pause=0.1, pause_most=30.0, tls_roots=None, tls_name=None, handshake_time=10.0
    ))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments in Python")]
    fn connect(
        &self,
        py: Python<'_>,
        peer: &str,
        timeout: f64,
        pause: f64,
        pause_most: f64,
        tls_roots: Option<PathBuf>,
        tls_name: Option<&str>,
        handshake_time: f64,
    ) -> PyResult<Connector> {
        let server = self.open()?.server();
        let host = peer.rsplit_once(':').map_or(peer, |(host, _)| host.trim_matches(['[', ']']));
        let tls = tls_roots.map(|roots| Tls::client(roots, tls_name.unwrap_or(host)));
        let tls = tls.transpose().map_err(tls_error)?;
        let handshake_time = wait::patience(handshake_time)?;
        let how = Connect {
            timeout: wait::patience(timeout)?,
            pause: wait::patience(pause)?,
            pause_most: wait::patience(pause_most)?,
            tls: tls.map(|tls| tls.with_handshake_time(handshake_time)),
        };
        let connector = py.detach(|| server.connect(peer, how)).map_err(|error| failure::system(&error))?;
        Ok(Connector(Some(connector)))
    }

    /// Sets a policy for TCP connections that are accepted from now on. admit(remote, local), two addresses, returns an Admit before a byte is
    /// read; an exception denies the connection and goes to sys.unraisablehook. left(remote, local) is called once for each connection that
    /// passed, when it has left the multiplexor. Threads of the multiplexor call both; its connections wait meanwhile.
    #[pyo3(signature = (admit, left=None))]
    fn set_admission(&self, py: Python<'_>, admit: Py<PyAny>, left: Option<Py<PyAny>>) -> PyResult<()> {
        let server = self.open()?.server();
        let policy = Arc::new(Policy::new(py, admit, left)?);
        py.detach(|| server.set_admission(policy));
        Ok(())
    }

    /// Returns the oldest ended connection that was not returned before; None without one. The last 1,024 are kept. Never waits.
    fn poll_ended(&self, py: Python<'_>) -> PyResult<Option<MuxEnded>> {
        let server = self.open()?.server();
        py.detach(|| server.poll_ended()).map(|ended| MuxEnded::new(py, ended)).transpose()
    }

    /// Returns the oldest event that was not returned before; None without one. The last 1,024 are kept. Never waits.
    fn poll_event(&self, py: Python<'_>) -> PyResult<Option<MuxEvent>> {
        let server = self.open()?.server();
        while let Some(event) = py.detach(|| server.poll_event()) {
            if let Some(event) = MuxEvent::new(py, event) {
                return Ok(Some(event));
            }
        }
        Ok(None)
    }

    /// Returns the addresses and TLS names of a connection; None when it has ended.
    fn connection_info(&self, py: Python<'_>, connection: &Connection) -> PyResult<Option<ConnectionInfo>> {
        let (server, id) = (self.open()?.server(), psock::Id::from(*connection));
        Ok(py.detach(|| server.connection_info(id)).map(|info| ConnectionInfo::new(py, info)))
    }

    /// Attaches a connected stream socket, or its descriptor number, with the given framing or the multiplexor's (KCM's SIOCKCMATTACH). The
    /// descriptor is duplicated and becomes non-blocking. The caller may close its own, and must not read or write it.
    #[pyo3(signature = (socket, framing=None))]
    fn attach(
        &self,
        py: Python<'_>,
        socket: &Bound<'_, PyAny>,
        framing: Option<framing::Argument<'_>>,
    ) -> PyResult<Connection> {
        let handle = self.open()?;
        let framing = framing.map_or_else(|| Ok(self.framing.clone()), |framing| framing.get())?;
        let fd = descriptor::duplicate(socket)?;
        let attached = py.detach(|| handle.attach(fd, framing));
        attached.map(Connection::from).map_err(|error| failure::mux(&error))
    }

    /// Detaches a connection (KCM's SIOCKCMUNATTACH). Waits at most patience seconds until its messages are done and answered. Marks the
    /// messages that this handle has read as done. Returns a blocking socket and the bytes read after the last message.
    #[pyo3(signature = (connection, patience=10.0))]
    fn unattach<'py>(
        &mut self,
        py: Python<'py>,
        connection: &Connection,
        patience: f64,
    ) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyBytes>)> {
        let patience = wait::patience(patience)?;
        let handle = self.open_mut()?;
        let id = psock::Id::from(*connection);
        let ended =
            py.detach(|| handle.unattach(id, Some(patience))).map_err(|error| failure::mux(&error))?;
        let Some(fd) = ended.socket else {
            return Err(failure::with_errno(
                Errno::NOTCONN.raw_os_error(),
                format!("the connection has ended: {}", ended.cause),
            ));
        };
        let socket = descriptor::give(py, fd)?;
        socket.call_method1("setblocking", (true,))?;
        Ok((socket, PyBytes::new(py, &ended.rest)))
    }

    /// With False, the handle receives no further messages, and messages that it has not started to read go to other handles
    /// (KCM_RECV_DISABLE). With True, it receives again.
    fn set_receive(&mut self, py: Python<'_>, receives: bool) -> PyResult<()> {
        let socket = self.open_mut()?;
        py.detach(|| socket.set_receive(receives));
        Ok(())
    }

    /// Reads the next message, or the rest of a partly read one: max bytes, or everything. Waits at most timeout seconds (TimeoutError). Returns
    /// None when the multiplexor has drained. flags: MSG_PEEK, MSG_DONTWAIT (BlockingIOError).
    #[pyo3(signature = (max=None, flags=0, timeout=None))]
    fn recv(
        slf: &Bound<'_, Self>,
        max: Option<usize>,
        flags: u32,
        timeout: Option<f64>,
    ) -> PyResult<Option<Received>> {
        let py = slf.py();
        let flags = known(flags, Flags::PEEK | Flags::DONTWAIT)?;
        not_in_a_function()?;
        let found = wait::pieces(py, flags, timeout, |most| {
            let mut this = slf.try_borrow_mut()?;
            let Some(socket) = &mut this.socket else { return Ok(None) };
            socket.set_recv_timeout(Some(most));
            Ok(Some(py.detach(|| socket.recv_bytes(flags | Flags::PEEK))))
        })?;
        let all = match found {
            Some(Ok((_, all))) => all,
            None | Some(Err(Error::Drained)) => return Ok(None),
            Some(Err(error)) => return Err(failure::mux(&error)),
        };
        let mut this = slf.try_borrow_mut()?;
        let socket = this.open_mut()?;
        let bytes = &all[..max.unwrap_or(all.len()).min(all.len())];
        // The message is available: neither call waits.
        let read = py.detach(|| match bytes.len() == all.len() {
            true => socket.recv_bytes(flags).map(|(read, _)| read),
            false => socket.recv(&mut vec![0; bytes.len()], flags),
        });
        let read = read.map_err(|error| failure::mux(&error))?;
        Ok(Some(Received {
            mux: slf.clone().unbind(),
            ticket: read.ticket,
            bytes: PyBytes::new(py, bytes).unbind(),
            length: read.length,
            truncated: read.flags.contains(Flags::TRUNC),
            end: read.flags.contains(Flags::EOR),
            connection: read.ticket.psock.into(),
            mark: read.mark,
            hash: read.hash,
            stripped: read.stripped,
        }))
    }

    /// Sends a message or a part of one, completely. to: a message that this handle has read and that is not done, to reply to it; or a
    /// connection; or None, for the connection of the last message read, or with connected=True the connection with the least data to send.
    /// Waits for buffer space, at most timeout seconds (TimeoutError). flags: MSG_MORE, MSG_EOR, MSG_DONTWAIT (BlockingIOError), and this
    /// module's MSG_BATCH: more messages follow, and this one may be sent together with them.
    #[pyo3(signature = (data, to=None, flags=0, timeout=None))]
    fn send(
        slf: &Bound<'_, Self>,
        data: Data,
        to: Option<Destination<'_>>,
        flags: u32,
        timeout: Option<f64>,
    ) -> PyResult<()> {
        let py = slf.py();
        let flags = known(flags, Flags::MORE | Flags::EOR | Flags::DONTWAIT | Flags::BATCH)?;
        not_in_a_function()?;
        let connected = slf.try_borrow()?.connected;
        let to = match to {
            Some(Destination::Requester(message)) if !message.get().mux.is(slf) => {
                return Err(PyValueError::new_err("the message was read by another handle"));
            }
            Some(Destination::Requester(message)) => To::Message(message.get().ticket),
            Some(Destination::Connection(connection)) => To::Psock((*connection.get()).into()),
            None if connected => To::Any,
            None => To::Requester,
        };
        let data = data.get(py)?;
        let sent = wait::pieces(py, flags, timeout, |most| {
            let mut this = slf.try_borrow_mut()?;
            let Some(socket) = &mut this.socket else { return Ok(None) };
            socket.set_send_timeout(Some(most));
            Ok(Some(py.detach(|| socket.send(to, &data, flags))))
        })?;
        let sent = sent.ok_or_else(|| failure::closed("mux"))?;
        sent.map(drop).map_err(|error| failure::mux(&error))
    }

    /// As recv, as a coroutine for asyncio: message = await mux.arecv(). One task at a time receives with a handle.
    #[pyo3(signature = (max=None, flags=0))]
    fn arecv<'py>(slf: &Bound<'py, Self>, max: Option<usize>, flags: u32) -> PyResult<Bound<'py, PyAny>> {
        asynchronous::coroutine(slf.py(), "mux_receive", (slf, max, flags))
    }

    /// As send, as a coroutine for asyncio: await mux.asend(data).
    #[pyo3(signature = (data, to=None, flags=0))]
    fn asend<'py>(
        slf: &Bound<'py, Self>,
        data: &Bound<'py, PyAny>,
        to: Option<&Bound<'py, PyAny>>,
        flags: u32,
    ) -> PyResult<Bound<'py, PyAny>> {
        asynchronous::coroutine(slf.py(), "mux_send", (slf, data, to, flags))
    }

    /// A snapshot of the counters of all handles.
    #[getter]
    fn counters(&self, py: Python<'_>) -> PyResult<MuxCounters> {
        let server = self.open()?.server();
        Ok(MuxCounters((&py.detach(|| server.show())).into()))
    }

    /// Returns all counters of all handles: a dict of dicts, by table ("mux", "mux_connection", "mux_accept") and name.
    fn metrics(&self, py: Python<'_>) -> PyResult<Tables> {
        let server = self.open()?.server();
        let (show, accepted) = py.detach(|| (server.show(), server.accept_stats()));
        Ok(counters::tables(&[&show.totals, &show.psock_totals, &accepted]))
    }

    /// Marks the messages that this handle has read as done. Their connections continue if they waited for this.
    fn done(&mut self, py: Python<'_>) -> PyResult<()> {
        let socket = self.open_mut()?;
        py.detach(|| socket.done());
        Ok(())
    }

    /// Returns a descriptor for event loops, readable between arm and disarm when a message may be available. Use it only for polling.
    fn fileno(&self) -> PyResult<RawFd> {
        Ok(self.open()?.as_fd().as_raw_fd())
    }

    /// Prepares for polling fileno(). Returns False if a message, the end or (if requested) room to send is available already. To wait for
    /// room, pass the connection as to, or room=True for the connection that send without to uses. Without a request for room, messages
    /// that were read are marked as done. With one, a handle that has read a message is woken for room only.
    #[pyo3(signature = (to=None, *, room=false))]
    fn arm(&mut self, py: Python<'_>, to: Option<&Connection>, room: bool) -> PyResult<bool> {
        let to = match to {
            Some(connection) => Some(To::Psock((*connection).into())),
            None if room => Some(if self.connected { To::Any } else { To::Requester }),
            None => None,
        };
        let socket = self.open_mut()?;
        Ok(py.detach(|| socket.arm(to)))
    }

    /// Ends polling of fileno(). Then call recv(flags=MSG_DONTWAIT) until it raises BlockingIOError: the wake-up was not given to another handle.
    fn disarm(&mut self, py: Python<'_>) -> PyResult<()> {
        let socket = self.open_mut()?;
        py.detach(|| socket.disarm());
        Ok(())
    }

    /// Ends the multiplexor for all handles. It stops accepting and reading. Messages already read are still answered and sent, for at most
    /// patience seconds; then recv returns None. Does not wait.
    #[pyo3(signature = (patience=10.0))]
    fn drain(&self, py: Python<'_>, patience: f64) -> PyResult<()> {
        let (server, patience) = (self.open()?.server(), wait::patience(patience)?);
        py.detach(|| server.drain(Some(patience)));
        Ok(())
    }

    /// Closes the handle. The last handle waits until all data is sent, at most patience seconds. Returns True if all data was sent or other
    /// handles are open.
    #[pyo3(signature = (patience=10.0))]
    fn close(&mut self, py: Python<'_>, patience: f64) -> PyResult<bool> {
        let patience = wait::patience(patience)?;
        not_in_a_function()?;
        let Some(socket) = self.socket.take() else { return Ok(true) };
        Ok(py.detach(|| socket.close(patience)))
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __exit__(
        &mut self,
        py: Python<'_>,
        _kind: &Bound<'_, PyAny>,
        _value: &Bound<'_, PyAny>,
        _trace: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        self.close(py, PATIENCE).map(drop)
    }

    fn __iter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __next__(slf: &Bound<'_, Self>) -> PyResult<Option<Received>> {
        Self::recv(slf, None, 0, None)
    }

    fn __aiter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __anext__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        let next = Self::arecv(slf, None, 0)?;
        asynchronous::coroutine(slf.py(), "following", (next,))
    }
}

impl Drop for Mux {
    fn drop(&mut self) {
        let Some(socket) = self.socket.take() else { return };
        if framing::frames() {
            // This thread has the lock of a mux.
            std::thread::spawn(|| drop(socket));
            return;
        }
        // The lock of the mux: see `framing.rs`.
        let mut socket = Some(socket);
        Python::try_attach(|py| py.detach(|| drop(socket.take())));
    }
}

impl Mux {
    fn open(&self) -> PyResult<&Socket> {
        not_in_a_function()?;
        self.socket.as_ref().ok_or_else(|| failure::closed("mux"))
    }

    fn open_mut(&mut self) -> PyResult<&mut Socket> {
        not_in_a_function()?;
        self.socket.as_mut().ok_or_else(|| failure::closed("mux"))
    }
}

#[expect(clippy::needless_pass_by_value, reason = "for map_err")]
fn tls_error(error: TlsError) -> PyErr {
    PyValueError::new_err(error.to_string())
}

/// Converts a time limit; `None` means no limit.
fn time(seconds: Option<f64>) -> PyResult<Option<Duration>> {
    let Some(seconds) = seconds else { return Ok(None) };
    if seconds.is_nan() || seconds < 0.0 {
        return Err(PyValueError::new_err("a timeout must be not negative; None means no limit"));
    }
    // A duration out of range also means no limit.
    let time = Duration::try_from_secs_f64(seconds).ok();
    if time == Some(Duration::ZERO) {
        return Err(PyValueError::new_err("a timeout must be more than 0; None means no limit"));
    }
    Ok(time)
}

fn known(flags: u32, known: Flags) -> PyResult<Flags> {
    let flags = Flags::from_bits(flags).filter(|flags| known.contains(*flags));
    flags.ok_or_else(|| PyValueError::new_err("unsupported flags for this call"))
}

impl From<psock::Id> for Connection {
    fn from(id: psock::Id) -> Self {
        let (index, generation) = id.parts();
        Self { index, generation }
    }
}

impl From<Connection> for psock::Id {
    fn from(Connection { index, generation }: Connection) -> Self {
        Self::from_parts(index, generation)
    }
}
