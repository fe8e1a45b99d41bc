//! `towpath.Worker`: receives messages of a mux's connections and sends replies.

use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::path::PathBuf;
use std::time::Duration;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use towpath_ring::{Event, RecvError, ReserveError, Ticket};

use crate::asynchronous;
use crate::counters::{self, Tables};
use crate::data::Data;
use crate::failure;
use crate::wait::{self, Queue};
use crate::worker_event::{Ended, Opened};

/// A worker process of towpath mux.
///
/// Worker(path=None, *, name=None, events=False, parts=False)
///
/// Attaches to the mux's socket at path. Without path, it uses TOWPATH_SOCKET, which the mux sets for a program that it starts. The mux
/// shows name in its reports. The object is a context manager, and an iterator and asynchronous iterator over messages. With events, it also
/// returns Opened and Ended objects, for connections. With parts, which a framing with body=stream needs, long messages come in parts. A message is done when the iterator is asked for the next one. If the process ends before that, another worker gets the message, unless it was replied to.
#[pyclass]
#[derive(Debug)]
pub(crate) struct Worker {
    worker: Option<towpath_ring::Worker>,
    /// The message that the iterator returned last.
    given: Option<Ticket>,
}

/// Identifies a connection of the mux. It stays distinct from later connections with the same index.
#[pyclass(eq, frozen, hash, get_all)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Connection {
    /// Index of the connection.
    pub(crate) index: u32,
    /// Generation of the index.
    pub(crate) generation: u32,
}

/// An event that the worker must complete: a Message or an Opened event.
#[pyclass(frozen, subclass)]
#[derive(Debug)]
pub(crate) struct Delivery {
    worker: Py<Worker>,
    ticket: Ticket,
    /// The connection.
    #[pyo3(get)]
    connection: Connection,
    /// Time of arrival of the complete message, or of the event, in nanoseconds since the epoch.
    #[pyo3(get)]
    time: u64,
}

/// A message that this worker sent and that was not delivered. errno is EPIPE: its connection ended; ENOTCONN: no connection was open; or
/// EAGAIN: the send queues of all connections were full.
#[pyclass(frozen, get_all)]
#[derive(Debug)]
pub(crate) struct Unsent {
    /// Destination; None for any connection.
    connection: Option<Connection>,
    /// Why it was not sent.
    errno: i32,
    /// The message.
    bytes: Py<PyBytes>,
}

/// A message of a connection. bytes and payload are copies.
#[pyclass(frozen, extends = Delivery)]
#[derive(Debug)]
pub(crate) struct Message {
    /// All bytes of the message.
    #[pyo3(get)]
    bytes: Py<PyBytes>,
    /// The message without the header or delimiter that the framing strips.
    #[pyo3(get)]
    payload: Py<PyBytes>,
    /// The framing's mark; 0 if unset.
    #[pyo3(get)]
    mark: u32,
    /// Hash of the framing's ordering key; 0 if unset.
    #[pyo3(get)]
    hash: u32,
    /// Number of this part of a message, from 1; 0 for a whole message. All parts of a message come to this worker, in order. The next ones
    /// come when this one is done.
    #[pyo3(get)]
    part: u32,
    /// Whether another part of the message follows.
    #[pyo3(get)]
    more: bool,
    /// Whether the connection ended before the last part: none follows, and bytes is empty.
    #[pyo3(get)]
    cut: bool,
}

impl Queue for towpath_ring::Worker {
    type Item = Event;

    fn receive(&mut self, timeout: Duration) -> Result<Option<Self::Item>, RecvError> {
        self.recv_event_timeout(timeout)
    }

    fn is_ended(&mut self) -> bool {
        self.queue().is_ended()
    }
}

#[pymethods]
impl Worker {
    #[new]
    #[pyo3(signature = (path=None, *, name=None, events=false, parts=false))]
    fn new(
        py: Python<'_>,
        path: Option<PathBuf>,
        name: Option<&str>,
        events: bool,
        parts: bool,
    ) -> PyResult<Self> {
        let (path, mut options) = wait::whereto(path, name)?;
        (options.events, options.parts) = (events, parts);
        let attached = py.detach(|| towpath_ring::Worker::attach(path, &options));
        py.check_signals()?;
        let mut worker = attached.map_err(|error| failure::attach(&error))?;
        worker.queue().set_interruptible(true);
        worker.queue().set_send_timeout(Some(wait::ROOM));
        Ok(Self { worker: Some(worker), given: None })
    }

    /// Returns the next message, or event if the worker asked for events. Waits at most timeout seconds (TimeoutError). Returns None when the
    /// mux releases this worker. The caller marks the message, or the Opened event, as done.
    #[pyo3(signature = (timeout=None))]
    fn recv(slf: &Bound<'_, Self>, timeout: Option<f64>) -> PyResult<Option<Py<PyAny>>> {
        Ok(Self::receive(slf, timeout)?.map(|(event, _)| event))
    }

    /// As recv, as a coroutine for asyncio: event = await worker.arecv().
    fn arecv<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        let take = slf.getattr("recv")?;
        let take = slf.py().import("functools")?.getattr("partial")?.call1((take, 0))?;
        asynchronous::coroutine(slf.py(), "receive", (slf, take))
    }

    /// Closes a connection when everything that was sent to it before has left. Later data for it is dropped. The mux detaches a worker that
    /// names a connection to which it may not send.
    fn close_connection(slf: &Bound<'_, Self>, connection: &Connection) -> PyResult<()> {
        Self::end(slf, *connection, towpath_ring::Worker::close_connection)
    }

    /// Resets a connection at once: over TCP, the peer sees ECONNRESET. Otherwise as close_connection.
    fn reset_connection(slf: &Bound<'_, Self>, connection: &Connection) -> PyResult<()> {
        Self::end(slf, *connection, towpath_ring::Worker::reset_connection)
    }

    /// Sends a message on a connection. A connection that has ended is ignored. Without a connection, in connected mode, the mux selects the
    /// connection with the least data to send. Waits while the ring is full. The mux detaches a worker that sends on a connection that it
    /// received no message from, or without a connection in connected mode, unless it runs with --worker-may push.
    #[pyo3(signature = (data, connection=None))]
    fn send(slf: &Bound<'_, Self>, data: Data, connection: Option<&Connection>) -> PyResult<()> {
        let py = slf.py();
        let data = data.get(py)?;
        wait::send(py, || {
            let mut this = slf.try_borrow_mut()?;
            let worker = this.worker()?;
            Ok(py.detach(|| match connection {
                Some(&Connection { index, generation }) => {
                    worker.forward(towpath_ring::Connection { index, generation }, &data)
                }
                None => worker.send(&data),
            }))
        })
    }

    /// Returns the oldest message of send() that was not delivered; None without one. They arrive with received messages; up to 1,024
    /// messages and 4 MiB are kept. Never waits.
    fn poll_unsent(&mut self, py: Python<'_>) -> PyResult<Option<Unsent>> {
        Ok(self.worker()?.poll_unsent().map(|towpath_ring::Unsent { connection, errno, bytes }| Unsent {
            connection: connection.map(Connection::from),
            errno,
            bytes: PyBytes::new(py, &bytes).unbind(),
        }))
    }

    /// Wakes the mux if it sleeps and work is pending. A receiving call also does this.
    fn flush(&mut self) -> PyResult<()> {
        self.worker()?.queue().flush();
        Ok(())
    }

    /// Returns the counters: a dict of dicts, by table ("consumer") and name.
    fn metrics(&mut self) -> PyResult<Tables> {
        Ok(counters::tables(&[&self.worker()?.stats()]))
    }

    /// Returns a descriptor for event loops, readable between arm and disarm when a message is available. Use it only for polling.
    fn fileno(&mut self) -> PyResult<RawFd> {
        Ok(self.worker()?.as_fd().as_raw_fd())
    }

    /// Prepares for polling fileno(). Returns False if a message is available already.
    fn arm(&mut self) -> PyResult<bool> {
        Ok(self.worker()?.queue().arm())
    }

    /// Ends polling of fileno(). Then call recv(0) until it raises TimeoutError.
    fn disarm(&mut self) -> PyResult<()> {
        self.worker()?.queue().disarm().map_err(|error| failure::recv(&error))
    }

    /// Closes the worker. Messages that are neither done nor replied to go to another worker.
    fn close(&mut self) {
        self.worker.take().into_iter().for_each(towpath_ring::Worker::close);
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __exit__(&mut self, _kind: &Bound<'_, PyAny>, _value: &Bound<'_, PyAny>, _trace: &Bound<'_, PyAny>) {
        self.close();
    }

    fn __iter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __next__(slf: &Bound<'_, Self>) -> PyResult<Option<Py<PyAny>>> {
        Self::finish(slf)?;
        Self::next(slf, None)
    }

    fn __aiter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __anext__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        Self::finish(slf)?;
        let next = asynchronous::coroutine(slf.py(), "receive", (slf, slf.getattr("_take")?))?;
        asynchronous::coroutine(slf.py(), "following", (next,))
    }

    /// The next message or event of the asynchronous iterator, if there is one (TimeoutError).
    fn _take(slf: &Bound<'_, Self>) -> PyResult<Option<Py<PyAny>>> {
        Self::next(slf, Some(0.0))
    }
}

impl Worker {
    pub(crate) fn worker(&mut self) -> PyResult<&mut towpath_ring::Worker> {
        self.worker.as_mut().ok_or_else(|| failure::closed("worker"))
    }

    /// Marks the last message of the iterator as done.
    fn finish(slf: &Bound<'_, Self>) -> PyResult<()> {
        let mut this = slf.try_borrow_mut()?;
        let given = this.given.take();
        let worker = this.worker()?;
        // The caller may have marked it as done already.
        if let Some(message) = given.and_then(|ticket| worker.recall(ticket)) {
            worker.done(message);
        }
        Ok(())
    }

    /// Receives for an iterator.
    fn next(slf: &Bound<'_, Self>, timeout: Option<f64>) -> PyResult<Option<Py<PyAny>>> {
        let Some((event, ticket)) = Self::receive(slf, timeout)? else { return Ok(None) };
        slf.try_borrow_mut()?.given = ticket;
        Ok(Some(event))
    }

    /// Receives an event, and the ticket with which it is done.
    fn receive(slf: &Bound<'_, Self>, timeout: Option<f64>) -> PyResult<Option<(Py<PyAny>, Option<Ticket>)>> {
        let py = slf.py();
        let received = wait::next(py, "worker", timeout, |most| {
            let mut this = slf.try_borrow_mut()?;
            wait::look(py, &mut this.worker, most, |worker, event| Self::object(slf, worker, event))
        })?;
        received.transpose()
    }

    /// The object of an event.
    fn object(
        slf: &Bound<'_, Self>,
        worker: &towpath_ring::Worker,
        event: Event,
    ) -> PyResult<(Py<PyAny>, Option<Ticket>)> {
        let py = slf.py();
        Ok(match event {
            Event::Message(message) => {
                let object = Message::new(py, worker, &message);
                let delivery = Delivery::new(slf, message);
                let ticket = delivery.ticket;
                (Py::new(py, (object, delivery))?.into_any(), Some(ticket))
            }
            Event::Opened(opened) => {
                let delivery = Delivery::new(slf, opened.message);
                let ticket = delivery.ticket;
                (Py::new(py, (Opened::new(py, opened.info), delivery))?.into_any(), Some(ticket))
            }
            Event::Ended(ended) => (Py::new(py, Ended::new(ended))?.into_any(), None),
        })
    }

    fn end(
        slf: &Bound<'_, Self>,
        connection: Connection,
        end: fn(&mut towpath_ring::Worker, towpath_ring::Connection) -> Result<(), ReserveError>,
    ) -> PyResult<()> {
        let py = slf.py();
        wait::send(py, || {
            let mut this = slf.try_borrow_mut()?;
            let worker = this.worker()?;
            Ok(py.detach(|| end(worker, connection.into())))
        })
    }
}

#[pymethods]
impl Delivery {
    /// Replies on the connection. Waits while the ring is full. A message has one reply; with more=True, this is a part of it, and another
    /// call follows with the next part; with close=True, the connection is closed after it. A message with a reply is not given to another
    /// worker if this process dies. The mux detaches a worker that replies again, unless it runs with --worker-may push.
    #[pyo3(signature = (data, *, more=false, close=false))]
    fn reply(&self, py: Python<'_>, data: Data, more: bool, close: bool) -> PyResult<()> {
        let data = data.get(py)?;
        self.send(py, |worker, message| match more {
            true => worker.reply_part(message, &data),
            false => worker.reply(message, &data),
        })?;
        if close { self.close(py) } else { Ok(()) }
    }

    /// Closes the connection after the replies so far. Later replies on it are dropped.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let connection = self.connection.into();
        self.send(py, |worker, message| worker.close_after_on(connection, message))
    }

    /// Marks it as done: its memory is released, and the mux may send more messages to this worker.
    fn done(&self, py: Python<'_>) -> PyResult<()> {
        let mut this = self.worker.bind(py).try_borrow_mut()?;
        let worker = this.worker()?;
        let message = worker.recall(self.ticket).ok_or_else(done)?;
        worker.done(message);
        Ok(())
    }
}

impl Delivery {
    fn new(worker: &Bound<'_, Worker>, message: towpath_ring::Message) -> Self {
        let (connection, time) = (message.connection().into(), message.time());
        Self { worker: worker.clone().unbind(), connection, time, ticket: message.into_ticket() }
    }

    fn send(
        &self,
        py: Python<'_>,
        send: impl Fn(&mut towpath_ring::Worker, &towpath_ring::Message) -> Result<(), ReserveError> + Sync,
    ) -> PyResult<()> {
        wait::send(py, || {
            let mut this = self.worker.bind(py).try_borrow_mut()?;
            let worker = this.worker()?;
            let message = worker.recall(self.ticket).ok_or_else(done)?;
            Ok(py.detach(|| send(worker, &message)))
        })
    }
}

impl From<Connection> for towpath_ring::Connection {
    fn from(Connection { index, generation }: Connection) -> Self {
        Self { index, generation }
    }
}

impl From<towpath_ring::Connection> for Connection {
    fn from(towpath_ring::Connection { index, generation }: towpath_ring::Connection) -> Self {
        Self { index, generation }
    }
}

impl Message {
    fn new(py: Python<'_>, worker: &towpath_ring::Worker, message: &towpath_ring::Message) -> Self {
        let (all, left) = (worker.bytes(message), worker.payload(message));
        let bytes = PyBytes::new(py, all).unbind();
        let payload =
            if left.len() == all.len() { bytes.clone_ref(py) } else { PyBytes::new(py, left).unbind() };
        let (mark, hash) = (message.mark(), message.hash());
        let (part, more, cut) = (message.part(), message.more(), message.is_cut());
        Self { bytes, payload, mark, hash, part, more, cut }
    }
}

fn done() -> PyErr {
    PyValueError::new_err("the message was done before")
}
