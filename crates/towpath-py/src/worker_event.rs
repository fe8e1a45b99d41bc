//! `towpath.Opened` and `towpath.Ended`: connection events of a worker.

use pyo3::prelude::*;
use pyo3::types::PyBytes;
use towpath_ring::OpenedInfo;

use crate::worker::{Connection, Delivery};

/// A connection was opened. The worker may reply, and send to the connection, and must mark the event as done, as the iterator does. If the
/// process ends before, another worker gets the event. An address is IP:PORT, [IP]:PORT or unix:PATH, or "".
#[pyclass(frozen, extends = Delivery)]
#[derive(Debug)]
pub(crate) struct Opened {
    info: OpenedInfo,
    /// The protocol that the two sides agreed on (ALPN); b"" without.
    #[pyo3(get)]
    protocol: Py<PyBytes>,
}

#[pymethods]
impl Opened {
    /// True if messages were received or sent before: another worker served the connection.
    #[getter]
    const fn resumed(&self) -> bool {
        self.info.resumed
    }

    /// True if the connection has TLS.
    #[getter]
    const fn tls(&self) -> bool {
        self.info.tls
    }

    /// True if TLS began with STARTTLS or SSLRequest. An SMTP client was greeted then.
    #[getter]
    const fn starttls(&self) -> bool {
        self.info.starttls
    }

    /// The peer's address.
    #[getter]
    fn peer(&self) -> &str {
        &self.info.peer
    }

    /// The own address.
    #[getter]
    fn local(&self) -> &str {
        &self.info.local
    }

    /// The address of the listener that accepted the connection; "" for outbound connections.
    #[getter]
    fn listener(&self) -> &str {
        &self.info.listener
    }

    /// The server name that the client asked for (SNI); "" without.
    #[getter]
    fn server_name(&self) -> &str {
        &self.info.server_name
    }

    /// The DNS names and URIs, or else the common name, in the verified certificate of the client.
    #[getter]
    fn client_names(&self) -> Vec<String> {
        self.info.client_names.clone()
    }
}

impl Opened {
    pub(crate) fn new(py: Python<'_>, info: OpenedInfo) -> Self {
        let protocol = PyBytes::new(py, &info.protocol).unbind();
        Self { info, protocol }
    }
}

/// A connection ended, and all of its messages are done. cause is a word such as "clean", "inside", "reset", "idle" or "closed"; text has
/// details.
#[pyclass(frozen, get_all)]
#[derive(Debug)]
pub(crate) struct Ended {
    /// The connection.
    connection: Connection,
    /// Time of the event in nanoseconds since the epoch.
    time: u64,
    /// The cause.
    cause: &'static str,
    /// Error number (errno(3)); 0 without an error.
    errno: i32,
    /// Cause "inside": bytes of the incomplete message that had arrived.
    bytes: u64,
    /// Cause "inside": the length of this message; None if it was not known.
    length: Option<u64>,
    /// The cause with details.
    text: String,
}

impl Ended {
    pub(crate) fn new(ended: towpath_ring::Ended) -> Self {
        let towpath_ring::Ended { connection, time, info } = ended;
        let towpath_ring::EndedInfo { cause, errno, bytes, length, text } = info;
        Self { connection: connection.into(), time, cause: cause.name(), errno, bytes, length, text }
    }
}
