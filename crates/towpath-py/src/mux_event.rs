//! Events of the connections and messages of a mux: `MuxEnded`, `MuxEvent`, `ConnectionInfo`; and the policy for new connections.

use std::fmt;

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use towpath_mux::Time;
use towpath_mux::io::{self, Admission, Admit as Decision, Event, Peer};
use towpath_mux::mux::Cause;

use crate::descriptor;
use crate::worker::Connection;

/// A connection of a mux that ended. cause is a word such as "clean", "inside", "reset", "idle" or "malformed"; text has details.
#[pyclass(frozen, get_all)]
#[derive(Debug)]
pub(crate) struct MuxEnded {
    /// The connection.
    connection: Connection,
    /// The peer's address; "" if it is not IP.
    peer: String,
    /// The cause.
    cause: &'static str,
    /// Error number (errno(3)); 0 without an error.
    errno: i32,
    /// The cause with details.
    text: String,
    /// Cause "inside": bytes of the incomplete message that had arrived.
    bytes: u64,
    /// Cause "inside": the length of this message; None if it was not known.
    length: Option<u64>,
    /// Number of replies that were not sent completely.
    unsent: usize,
    /// Bytes that were read and belong to no message.
    rest: Py<PyBytes>,
    /// A blocking socket if the framing gave the connection back; else None.
    socket: Option<Py<PyAny>>,
}

impl MuxEnded {
    pub(crate) fn new(py: Python<'_>, ended: io::Ended) -> PyResult<Self> {
        let (bytes, length) = match ended.cause {
            Cause::Inside { bytes, length } => (bytes as u64, length.map(|length| length as u64)),
            _ => (0, None),
        };
        let socket = ended.socket.map(|fd| descriptor::give(py, fd)).transpose()?;
        if let Some(socket) = &socket {
            socket.call_method1("setblocking", (true,))?;
        }
        Ok(Self {
            connection: ended.psock.into(),
            peer: ended.peer.map_or_else(String::new, |peer| peer.to_string()),
            cause: ended.cause.name(),
            errno: ended.cause.errno(),
            text: ended.cause.to_string(),
            bytes,
            length,
            unsent: ended.unsent,
            rest: PyBytes::new(py, &ended.rest).unbind(),
            socket: socket.map(Bound::unbind),
        })
    }
}

/// An event of a mux. kind is one of:
/// - "undone": a message was abandoned because too many handles ended while they processed it;
/// - "not_attached": the handshake of a connection failed;
/// - "undelivered" (connected=True): a message was not sent completely;
/// - "send_room" (connected=True): there is room to send again.
#[pyclass(frozen, get_all)]
#[derive(Debug)]
pub(crate) struct MuxEvent {
    /// The kind.
    kind: &'static str,
    /// "undone": the connection of the message; else None.
    connection: Option<Connection>,
    /// "undone", "undelivered": the message; else b"".
    bytes: Py<PyBytes>,
    /// "undelivered": number of its bytes that were sent.
    sent: usize,
    /// "not_attached": the peer's address; else "".
    peer: String,
    /// "not_attached": the reason; else "".
    text: String,
}

impl MuxEvent {
    /// `None` for an event that only a driver has.
    pub(crate) fn new(py: Python<'_>, event: Event) -> Option<Self> {
        let (kind, connection, bytes, sent, peer, text) = match event {
            Event::Left(_) => return None,
            Event::Undone(message) => {
                ("undone", Some(message.psock().into()), message.bytes().clone(), 0, None, String::new())
            }
            Event::Undelivered(message) => {
                ("undelivered", None, message.bytes, message.left, None, String::new())
            }
            Event::WriteSpace => ("send_room", None, Default::default(), 0, None, String::new()),
            Event::NotAttached { peer, why } => ("not_attached", None, Default::default(), 0, peer, why),
        };
        let peer = peer.map_or_else(String::new, |peer| peer.to_string());
        Some(Self { kind, connection, bytes: PyBytes::new(py, &bytes).unbind(), sent, peer, text })
    }
}

/// Addresses and TLS names of a connection. An address is IP:PORT, [IP]:PORT or unix:PATH, or "".
#[pyclass(frozen, get_all)]
#[derive(Debug)]
pub(crate) struct ConnectionInfo {
    /// The peer's address.
    peer: String,
    /// The own address.
    local: String,
    /// The address of the listener that accepted the connection; "" for others.
    listener: String,
    /// True if the connection has TLS.
    tls: bool,
    /// The server name that the client asked for (SNI); "" without.
    server_name: String,
    /// The protocol that the two sides agreed on (ALPN); b"" without.
    protocol: Py<PyBytes>,
    /// Names in the verified certificate of the client.
    client_names: Vec<String>,
    /// True if the client asked for TLS in plaintext (STARTTLS).
    starttls: bool,
}

impl ConnectionInfo {
    pub(crate) fn new(py: Python<'_>, info: io::ConnectionInfo) -> Self {
        let io::ConnectionInfo { peer, local, listener, tls, server_name, protocol, client_names, starttls } =
            info;
        let protocol = PyBytes::new(py, &protocol).unbind();
        Self { peer, local, listener, tls, server_name, protocol, client_names, starttls }
    }
}

/// Keeps a connection to a peer (Mux.connect), also when this object is dropped.
#[pyclass]
#[derive(Debug)]
pub(crate) struct Connector(pub(crate) Option<io::Connector>);

#[pymethods]
impl Connector {
    /// Stops the attempts to connect. An open connection stays.
    fn close(&mut self) {
        self.0 = None;
    }
}

impl Drop for Connector {
    fn drop(&mut self) {
        self.0.take().into_iter().for_each(io::Connector::detach);
    }
}

/// Result of a function of Mux.set_admission.
#[pyclass(eq, frozen, hash)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Admit {
    /// Attach the connection.
    #[pyo3(name = "PASS")]
    Pass,
    /// Close it.
    #[pyo3(name = "DENY")]
    Deny,
    /// Reset it.
    #[pyo3(name = "RESET")]
    Reset,
}

/// An admission policy in Python.
pub(crate) struct Policy {
    admit: Py<PyAny>,
    left: Option<Py<PyAny>>,
}

impl Policy {
    pub(crate) fn new(py: Python<'_>, admit: Py<PyAny>, left: Option<Py<PyAny>>) -> PyResult<Self> {
        let callable = |function: &Py<PyAny>| function.bind(py).is_callable();
        if !callable(&admit) || left.as_ref().is_some_and(|left| !callable(left)) {
            return Err(PyTypeError::new_err("the functions of an admission policy must be callable"));
        }
        Ok(Self { admit, left })
    }
}

impl fmt::Debug for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Policy")
    }
}

fn addresses(peer: &Peer) -> (String, String) {
    (peer.remote.to_string(), peer.local.to_string())
}

impl Admission for Policy {
    fn admit(&self, peer: &Peer, _: Time) -> Decision {
        let decision = Python::try_attach(|py| {
            let result = self
                .admit
                .bind(py)
                .call1(addresses(peer))
                .and_then(|result| Ok(*result.cast::<Admit>()?.get()));
            result.unwrap_or_else(|error| {
                error.write_unraisable(py, Some(self.admit.bind(py)));
                Admit::Deny
            })
        });
        match decision.unwrap_or(Admit::Deny) {
            Admit::Pass => Decision::Pass,
            Admit::Deny => Decision::Deny,
            Admit::Reset => Decision::Reset,
        }
    }

    fn closed(&self, peer: &Peer, _: Time) {
        let Some(left) = &self.left else { return };
        Python::try_attach(|py| {
            if let Err(error) = left.bind(py).call1(addresses(peer)) {
                error.write_unraisable(py, Some(left.bind(py)));
            }
        });
    }
}
