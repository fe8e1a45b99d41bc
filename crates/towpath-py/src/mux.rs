//! `towpath.Mux`: a multiplexor in this process, by handles with a socket's calls, as Linux's KCM has them.

use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::time::Duration;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use rustix::io::Errno;
use towpath_mux::assembler::Limits;
use towpath_mux::framing::Framing;
use towpath_mux::io::{Error, Flags, Kind, Server, Socket, To};
use towpath_mux::mux::{Config, Show, Ticket, psock};

use crate::data::Data;
use crate::worker::Connection;
use crate::{descriptor, failure, wait};

/// How long the end of a `with` waits, in seconds.
const PATIENCE: f64 = 10.0;

/// A handle of a multiplexor in this process, for one thread.
///
/// Mux(framing, kind="dgram", *, connected=False, message_max=None, head_max=None, connection_bytes=None, send_bytes=None,
/// send_most=None, mux_bytes=None, head_time=None, body_time=None, rate=0, idle=None, send_time=60.0)
///
/// Makes a multiplexor; clone() gives other threads their handles. A message goes to the handle that asks, whichever connection it comes
/// from. kind is what ends a message: "dgram", the send itself unless it says MSG_MORE, and a short read drops the rest; "seqpacket", the
/// send that says MSG_EOR, and a short read leaves the rest to the next one. Flags are those of the module socket. A context manager,
/// and an iterator over messages. What was read is done when the next is asked for.
///
/// Bounds in bytes, None for the default: message_max, of a message, above which its connection ends (16 MiB); head_max, of one before its
/// length is known, for framings that do not bound that (64 KiB); connection_bytes, of a connection's messages that are not done, from which
/// on it is not read (1 MiB); send_bytes, of what its peer has not taken, likewise (256 KiB), and send_most, above which it ends (16 MiB, or
/// two of message_max); mux_bytes, of everything (256 MiB). In seconds, None for ever: head_time, from a message's first byte until its
/// length is known, of a line its end; body_time, from its first byte until its last when its length is known, besides what rate gives, in
/// bytes per second; idle, without traffic and work; send_time, in which a peer takes nothing.
#[pyclass]
#[derive(Debug)]
pub(crate) struct Mux {
    socket: Option<Socket>,
    /// Of the connections that are attached without one of their own.
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
    /// Bytes that the message has from the first of these on: a datagram's real length.
    #[pyo3(get)]
    length: usize,
    /// The rest was dropped (MSG_TRUNC).
    #[pyo3(get)]
    truncated: bool,
    /// These bytes end the message (MSG_EOR).
    #[pyo3(get)]
    end: bool,
    /// The connection that it came from.
    #[pyo3(get)]
    connection: Connection,
    /// The framing's mark; 0 without.
    #[pyo3(get)]
    mark: u32,
    /// The framing's hash; 0 without.
    #[pyo3(get)]
    hash: u32,
    /// How many bytes of the message the framing strips in front and behind; they are read like all others.
    #[pyo3(get)]
    stripped: (usize, usize),
}

/// What a multiplexor counted, as it was when asked; received = done + undone + queued + in_hand.
#[pyclass(name = "MuxCounters", eq, frozen, get_all)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Counters {
    /// Connections that are attached.
    connections: u64,
    /// Connections that were.
    attached: u64,
    /// Those of them that ended, however; the errors are below.
    ended: u64,
    /// Whole messages that arrived.
    received: u64,
    /// Their bytes.
    received_bytes: u64,
    /// Messages that were read and are done.
    done: u64,
    /// Messages that were given up.
    undone: u64,
    /// Messages that no handle has begun to read.
    queued: u64,
    /// Messages that handles have, and that are not done.
    in_hand: u64,
    /// Messages that were sent, all of them.
    sent: u64,
    /// Bytes that were sent.
    sent_bytes: u64,
    /// Messages that were not sent, or not all of them, because their connection ended.
    unsent: u64,
    /// Bytes that it holds.
    bytes: u64,
    /// Connections that were reset, or where a read or write failed.
    resets: u64,
    /// Connections that their peers closed inside a message.
    inside: u64,
    /// Connections whose bytes are no message.
    malformed: u64,
    /// Connections with a message above message_max.
    too_long: u64,
    /// Connections with a message that was not known or whole in time: head_time, body_time.
    late: u64,
    /// Connections that were idle for too long.
    idle: u64,
    /// Connections whose peers took nothing for send_time.
    send_timeouts: u64,
    /// Connections for which there was more than send_most.
    send_full: u64,
    /// Connections that held most when mux_bytes was not enough.
    mux_full: u64,
    /// Connections that were not drained in time.
    drain_timeouts: u64,
}

/// Whom a message is for.
#[derive(FromPyObject)]
enum Whom<'py> {
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
        send_most=None, mux_bytes=None, head_time=None, body_time=None, rate=0, idle=None, send_time=Some(60.0)
    ))]
    #[expect(clippy::too_many_arguments, reason = "they are keywords there")]
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
    ) -> PyResult<Self> {
        let kind = match kind {
            "dgram" => Kind::Dgram,
            "seqpacket" => Kind::Seqpacket,
            _ => return Err(PyValueError::new_err(r#"a kind is "dgram" or "seqpacket""#)),
        };
        let framing = parse(framing)?;
        let bounds = [message_max, head_max, connection_bytes, send_bytes, send_most, mux_bytes];
        if bounds.contains(&Some(0)) {
            return Err(PyValueError::new_err("a bound has a byte at least; None is the default"));
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

    /// Another handle of the same multiplexor and kind, for another thread (KCM's SIOCKCMCLONE).
    fn clone(&self) -> PyResult<Self> {
        let socket = self.open()?.try_clone().map_err(|error| failure::system(&error))?;
        Ok(Self { socket: Some(socket), framing: self.framing.clone(), connected: self.connected })
    }

    /// Accepts TCP connections at "HOST:PORT", port 0 for any; the (host, port) that it is.
    fn listen(&self, py: Python<'_>, address: &str) -> PyResult<(String, u16)> {
        let server = self.open()?.server();
        let bound = py.detach(|| server.listen(address)).map_err(|error| failure::system(&error))?;
        Ok((bound.ip().to_string(), bound.port()))
    }

    /// Attaches a connected stream socket, or the descriptor of one, with a framing of its own or the multiplexor's (KCM's
    /// SIOCKCMATTACH). The descriptor is duplicated: close yours, and do not read or write it; both are non-blocking from here on.
    #[pyo3(signature = (socket, framing=None))]
    fn attach(&self, socket: &Bound<'_, PyAny>, framing: Option<&str>) -> PyResult<Connection> {
        let handle = self.open()?;
        let framing = framing.map(parse).transpose()?.unwrap_or_else(|| self.framing.clone());
        let fd = descriptor::duplicate(socket)?;
        handle.attach(fd, framing).map(Connection::from).map_err(|error| failure::mux(&error))
    }

    /// Takes a connection back (KCM's SIOCKCMUNATTACH): waits until its messages are done and answered, at most patience seconds. What
    /// this handle has read is done thereby. A blocking socket, and the bytes that were read behind the last message.
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

    /// False: it receives no more, and what it has not begun to read goes to other handles (KCM_RECV_DISABLE). True: again.
    fn set_receive(&mut self, receives: bool) -> PyResult<()> {
        self.open_mut()?.set_receive(receives);
        Ok(())
    }

    /// Reads the next message, or goes on with one that was read in part: max bytes, or all. Waits for it, at most timeout seconds
    /// (TimeoutError). None when the multiplexor has drained. flags: MSG_PEEK, MSG_DONTWAIT (BlockingIOError).
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
        // It is there: neither waits.
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

    /// Sends a message or a part of one, all of it. to: a message that this handle has read and that is not done, which this answers; a
    /// connection; None: who asked last, or with connected=True the connection that has the least to send. Waits for room, at most
    /// timeout seconds (TimeoutError). flags: MSG_MORE, MSG_EOR, MSG_DONTWAIT (BlockingIOError), and this module's MSG_BATCH: more
    /// messages follow, this one may leave with them.
    #[pyo3(signature = (data, to=None, flags=0, timeout=None))]
    fn send(
        slf: &Bound<'_, Self>,
        data: Data,
        to: Option<Whom<'_>>,
        flags: u32,
        timeout: Option<f64>,
    ) -> PyResult<()> {
        let py = slf.py();
        let flags = known(flags, Flags::MORE | Flags::EOR | Flags::DONTWAIT | Flags::BATCH)?;
        let connected = slf.try_borrow()?.connected;
        let to = match to {
            Some(Whom::Requester(message)) if !message.get().mux.is(slf) => {
                return Err(PyValueError::new_err("another handle has read that message"));
            }
            Some(Whom::Requester(message)) => To::Message(message.get().ticket),
            Some(Whom::Connection(connection)) => To::Psock((*connection.get()).into()),
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

    /// What was counted, over all handles.
    #[getter]
    fn counters(&self) -> PyResult<Counters> {
        Ok(self.open()?.server().show().into())
    }

    /// The messages that this handle has read are done: their connections go on where they waited for that.
    fn done(&mut self) -> PyResult<()> {
        self.open_mut()?.done();
        Ok(())
    }

    /// A descriptor for event loops, readable between arm and disarm when there may be something. Only to be waited on.
    fn fileno(&self) -> PyResult<RawFd> {
        Ok(self.open()?.as_fd().as_raw_fd())
    }

    /// Before waiting on fileno(). False: there is a message, or the end, already; with a connection, or room=True for where send sends
    /// without one, or there is room to send. Messages that were read are done, unless room is waited for: who has one then is woken for
    /// room only.
    #[pyo3(signature = (to=None, *, room=false))]
    fn arm(&mut self, to: Option<&Connection>, room: bool) -> PyResult<bool> {
        let to = match to {
            Some(connection) => Some(To::Psock((*connection).into())),
            None if room => Some(if self.connected { To::Any } else { To::Requester }),
            None => None,
        };
        Ok(self.open_mut()?.arm(to))
    }

    /// After waiting on fileno(); then recv(flags=MSG_DONTWAIT) until it raises BlockingIOError: others wait for who was woken.
    fn disarm(&mut self) -> PyResult<()> {
        self.open_mut()?.disarm();
        Ok(())
    }

    /// Ends the multiplexor for all handles: it accepts and reads no more; what was read is still answered and sent, for at most patience
    /// seconds; then recv gives None. Does not wait for that.
    #[pyo3(signature = (patience=10.0))]
    fn drain(&self, patience: f64) -> PyResult<()> {
        self.open()?.server().drain(Some(wait::patience(patience)?));
        Ok(())
    }

    /// Ends the handle. If it was the last one, waits until what is to be sent has been, at most patience seconds. Whether that is so, or
    /// others are open.
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

/// A time that something may take; none for ever.
fn time(seconds: Option<f64>) -> PyResult<Option<Duration>> {
    let Some(seconds) = seconds else { return Ok(None) };
    if seconds.is_nan() || seconds < 0.0 {
        return Err(PyValueError::new_err("a time is not negative; None is for ever"));
    }
    // Longer than anything is for ever, too.
    let time = Duration::try_from_secs_f64(seconds).ok();
    if time == Some(Duration::ZERO) {
        return Err(PyValueError::new_err("a time is more than 0; None is for ever"));
    }
    Ok(time)
}

fn known(flags: u32, known: Flags) -> PyResult<Flags> {
    let flags = Flags::from_bits(flags).filter(|flags| known.contains(*flags));
    flags.ok_or_else(|| PyValueError::new_err("flags that this call does not know"))
}

#[pymethods]
impl Counters {
    fn __repr__(&self) -> String {
        crate::repr("Mux", self)
    }
}

impl From<Show> for Counters {
    fn from(show: Show) -> Self {
        let Show { totals, psock_totals, bytes, .. } = show;
        Self {
            // One that has ended may be shown as long as somebody has its messages.
            connections: totals.attach - totals.unattach,
            attached: totals.attach,
            ended: totals.unattach,
            received: totals.received,
            received_bytes: psock_totals.rx_bytes,
            done: totals.done,
            undone: totals.undone,
            queued: totals.queued,
            in_hand: totals.in_hand,
            sent: totals.tx_msgs,
            sent_bytes: totals.tx_bytes,
            unsent: totals.unsent,
            bytes: bytes as u64,
            resets: totals.resets,
            inside: totals.inside,
            malformed: totals.malformed + psock_totals.rx_bad_hdr_len,
            too_long: psock_totals.rx_msg_too_big,
            late: psock_totals.rx_msg_timeouts,
            idle: totals.idle,
            send_timeouts: totals.send_timeouts,
            send_full: totals.send_full,
            mux_full: psock_totals.rx_mem_fail,
            drain_timeouts: totals.drain_timeouts,
        }
    }
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
