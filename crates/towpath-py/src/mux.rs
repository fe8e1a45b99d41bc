//! `towpath.Mux`: a multiplexor in this process. Its handles have socket calls like those of Linux's KCM.

use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::time::Duration;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use rustix::io::Errno;
use towpath_mux::assembler::Limits;
use towpath_mux::framing::Framing;
use towpath_mux::io::{Error, Flags, Kind, Server, Socket, To};
use towpath_mux::mux::{Config, Order, Ticket, psock};

use crate::counters::{self, MuxCounters, Tables};
use crate::data::Data;
use crate::worker::Connection;
use crate::{descriptor, failure, wait};

/// How long the exit of a `with` block waits, in seconds.
const PATIENCE: f64 = 10.0;

/// A handle of a multiplexor in this process, for use by one thread.
///
/// Mux(framing, kind="dgram", *, connected=False, message_max=None, head_max=None, connection_bytes=None, send_bytes=None,
/// send_most=None, mux_bytes=None, head_time=None, body_time=None, rate=0, idle=None, send_time=60.0, order="none")
///
/// Creates a multiplexor; clone() creates handles for other threads. A message goes to any handle that receives, whatever its connection.
/// kind selects what ends a message. "dgram": each send is a message unless it has MSG_MORE, and a short read discards the rest.
/// "seqpacket": a send with MSG_EOR ends the message, and a short read leaves the rest for the next one. Flags are those of the module
/// socket. The object is a context manager and an iterator over messages. A message is done when the next one is requested.
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
        order="none"
    ))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments in Python")]
    fn new(
        framing: &str,
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
        order: &str,
    ) -> PyResult<Self> {
        let order = match order {
            "none" => Order::None,
            "replies" => Order::Replies,
            "serial" => Order::Serial,
            "sticky" => Order::Sticky,
            "key" => Order::Key,
            _ => {
                let text = r#"order must be "none", "replies", "serial", "sticky" or "key""#;
                return Err(PyValueError::new_err(text));
            }
        };
        let kind = match kind {
            "dgram" => Kind::Dgram,
            "seqpacket" => Kind::Seqpacket,
            _ => return Err(PyValueError::new_err(r#"kind must be "dgram" or "seqpacket""#)),
        };
        let framing = parse(framing)?;
        if order == Order::Key && !framing.may_have_key() {
            return Err(PyValueError::new_err(
                "the framing gives no key: add key=OFFSET:LENGTH to its clauses",
            ));
        }
        let bounds = [message_max, head_max, connection_bytes, send_bytes, send_most, mux_bytes];
        if bounds.contains(&Some(0)) {
            return Err(PyValueError::new_err("a limit is at least 1 byte; None selects the default"));
        }
        let limits = Limits::default();
        let limits = Limits {
            head: head_max.unwrap_or(limits.head),
            message: message_max.unwrap_or(limits.message),
            head_time: time(head_time)?,
            body_time: time(body_time)?,
            rate,
        };
        let config = message_max.map_or_else(Config::default, Config::for_messages);
        let config = Config {
            connected,
            order,
            psock_bytes: connection_bytes.map_or(config.psock_bytes, towpath_mux::mux::Bound::of),
            send_bytes: send_bytes.map_or(config.send_bytes, towpath_mux::mux::Bound::of),
            send_most: send_most.unwrap_or(config.send_most),
            mux_bytes: mux_bytes.map_or(config.mux_bytes, towpath_mux::mux::Bound::of),
            idle: time(idle)?,
            send_time: time(send_time)?,
            ..config
        };
        let server = Server::with_limits(framing.clone(), limits, config);
        let socket =
            server.and_then(|server| server.socket(kind)).map_err(|error| failure::system(&error))?;
        Ok(Self { socket: Some(socket), framing, connected })
    }

    /// Creates another handle of the same multiplexor and kind, for another thread (KCM's SIOCKCMCLONE).
    fn clone(&self) -> PyResult<Self> {
        let socket = self.open()?.try_clone().map_err(|error| failure::system(&error))?;
        Ok(Self { socket: Some(socket), framing: self.framing.clone(), connected: self.connected })
    }

    /// Accepts TCP connections at "HOST:PORT"; port 0 selects a free port. Returns the bound (host, port).
    fn listen(&self, py: Python<'_>, address: &str) -> PyResult<(String, u16)> {
        let server = self.open()?.server();
        let bound = py.detach(|| server.listen(address)).map_err(|error| failure::system(&error))?;
        Ok((bound.ip().to_string(), bound.port()))
    }

    /// Attaches a connected stream socket, or its descriptor number, with the given framing or the multiplexor's (KCM's SIOCKCMATTACH). The
    /// descriptor is duplicated and becomes non-blocking. The caller may close its own, and must not read or write it.
    #[pyo3(signature = (socket, framing=None))]
    fn attach(&self, socket: &Bound<'_, PyAny>, framing: Option<&str>) -> PyResult<Connection> {
        let handle = self.open()?;
        let framing = framing.map(parse).transpose()?.unwrap_or_else(|| self.framing.clone());
        let fd = descriptor::duplicate(socket)?;
        handle.attach(fd, framing).map(Connection::from).map_err(|error| failure::mux(&error))
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
    fn set_receive(&mut self, receives: bool) -> PyResult<()> {
        self.open_mut()?.set_receive(receives);
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
        let read = if bytes.len() == all.len() {
            socket.recv_bytes(flags).map(|(read, _)| read)
        } else {
            socket.recv(&mut vec![0; bytes.len()], flags)
        };
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

    /// A snapshot of the counters of all handles.
    #[getter]
    fn counters(&self) -> PyResult<MuxCounters> {
        Ok(MuxCounters((&self.open()?.server().show()).into()))
    }

    /// Returns all counters of all handles: a dict of dicts, by table ("mux", "mux_connection", "mux_accept") and name.
    fn metrics(&self) -> PyResult<Tables> {
        let server = self.open()?.server();
        let show = server.show();
        Ok(counters::tables(&[&show.totals, &show.psock_totals, &server.accept_stats()]))
    }

    /// Marks the messages that this handle has read as done. Their connections continue if they waited for this.
    fn done(&mut self) -> PyResult<()> {
        self.open_mut()?.done();
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
    fn arm(&mut self, to: Option<&Connection>, room: bool) -> PyResult<bool> {
        let to = match to {
            Some(connection) => Some(To::Psock((*connection).into())),
            None if room => Some(if self.connected { To::Any } else { To::Requester }),
            None => None,
        };
        Ok(self.open_mut()?.arm(to))
    }

    /// Ends polling of fileno(). Then call recv(flags=MSG_DONTWAIT) until it raises BlockingIOError: the wake-up was not given to another handle.
    fn disarm(&mut self) -> PyResult<()> {
        self.open_mut()?.disarm();
        Ok(())
    }

    /// Ends the multiplexor for all handles. It stops accepting and reading. Messages already read are still answered and sent, for at most
    /// patience seconds; then recv returns None. Does not wait.
    #[pyo3(signature = (patience=10.0))]
    fn drain(&self, patience: f64) -> PyResult<()> {
        self.open()?.server().drain(Some(wait::patience(patience)?));
        Ok(())
    }

    /// Closes the handle. The last handle waits until all data is sent, at most patience seconds. Returns True if all data was sent or other
    /// handles are open.
    #[pyo3(signature = (patience=10.0))]
    fn close(&mut self, py: Python<'_>, patience: f64) -> PyResult<bool> {
        let patience = wait::patience(patience)?;
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
}

impl Mux {
    fn open(&self) -> PyResult<&Socket> {
        self.socket.as_ref().ok_or_else(|| failure::closed("mux"))
    }

    fn open_mut(&mut self) -> PyResult<&mut Socket> {
        self.socket.as_mut().ok_or_else(|| failure::closed("mux"))
    }
}

fn parse(framing: &str) -> PyResult<Framing> {
    Framing::parse(framing).map_err(|error| PyValueError::new_err(error.to_string()))
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
