//! `towpath.Worker`: receives messages of a mux's connections and sends replies.

use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::path::PathBuf;
use std::time::Duration;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use towpath_ring::{RecvError, Ticket};

use crate::counters::{self, Tables};
use crate::data::Data;
use crate::failure;
use crate::wait::{self, Queue};

/// A worker process of towpath mux.
///
/// Worker(path=None, *, name=None)
///
/// Attaches to the mux's socket at path. Without path, it uses TOWPATH_SOCKET, which the mux sets for a program that it starts. The mux
/// shows name in its reports. The object is a context manager and an iterator over messages. A message is done when the iterator is
/// asked for the next one. If the process ends before that, another worker gets the message, unless it was replied to.
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

/// A message of a connection. bytes and payload are copies.
#[pyclass(frozen)]
#[derive(Debug)]
pub(crate) struct Message {
    worker: Py<Worker>,
    ticket: Ticket,
    /// All bytes of the message.
    #[pyo3(get)]
    bytes: Py<PyBytes>,
    /// The message without the header or delimiter that the framing strips.
    #[pyo3(get)]
    payload: Py<PyBytes>,
    /// The connection of the message.
    #[pyo3(get)]
    connection: Connection,
    /// Arrival time of the complete message in nanoseconds since the epoch.
    #[pyo3(get)]
    time: u64,
    /// The framing's mark; 0 if unset.
    #[pyo3(get)]
    mark: u32,
    /// Hash of the framing's ordering key; 0 if unset.
    #[pyo3(get)]
    hash: u32,
}

impl Queue for towpath_ring::Worker {
    type Item = towpath_ring::Message;

    fn receive(&mut self, timeout: Duration) -> Result<Option<Self::Item>, RecvError> {
        self.recv_timeout(timeout)
    }

    fn is_ended(&mut self) -> bool {
        self.queue().is_ended()
    }
}

#[pymethods]
impl Worker {
    #[new]
    #[pyo3(signature = (path=None, *, name=None))]
    fn new(py: Python<'_>, path: Option<PathBuf>, name: Option<&str>) -> PyResult<Self> {
        let (path, options) = wait::whereto(path, name)?;
        let attached = py.detach(|| towpath_ring::Worker::attach(path, &options));
        py.check_signals()?;
        let mut worker = attached.map_err(|error| failure::attach(&error))?;
        worker.queue().set_interruptible(true);
        worker.queue().set_send_timeout(Some(wait::ROOM));
        Ok(Self { worker: Some(worker), given: None })
    }

    /// Returns the next message. Waits at most timeout seconds (TimeoutError). Returns None when the mux releases this worker. The caller
    /// marks the message as done.
    #[pyo3(signature = (timeout=None))]
    fn recv(slf: &Bound<'_, Self>, timeout: Option<f64>) -> PyResult<Option<Message>> {
        let py = slf.py();
        wait::next(py, "worker", timeout, |most| {
            let mut this = slf.try_borrow_mut()?;
            wait::look(py, &mut this.worker, most, |worker, message| Message::new(slf, worker, message))
        })
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

    fn __next__(slf: &Bound<'_, Self>) -> PyResult<Option<Message>> {
        let mut this = slf.try_borrow_mut()?;
        let given = this.given.take();
        let worker = this.worker()?;
        // The caller may have marked it as done already.
        if let Some(message) = given.and_then(|ticket| worker.recall(ticket)) {
            worker.done(message);
        }
        drop(this);
        let next = Self::recv(slf, None)?;
        slf.try_borrow_mut()?.given = next.as_ref().map(|message| message.ticket);
        Ok(next)
    }
}

impl Worker {
    fn worker(&mut self) -> PyResult<&mut towpath_ring::Worker> {
        self.worker.as_mut().ok_or_else(|| failure::closed("worker"))
    }
}

#[pymethods]
impl Message {
    /// Replies on the message's connection. Waits while the ring is full. A message has one reply; with more=True, this is a part of it, and
    /// another call follows with the next part. A message with a reply is not given to another worker if this process dies. The mux detaches
    /// a worker that replies again, unless it runs with --worker-may push.
    #[pyo3(signature = (data, *, more=false))]
    fn reply(&self, py: Python<'_>, data: Data, more: bool) -> PyResult<()> {
        let data = data.get(py)?;
        wait::send(py, || {
            let mut this = self.worker.bind(py).try_borrow_mut()?;
            let worker = this.worker()?;
            let message = worker.recall(self.ticket).ok_or_else(done)?;
            Ok(py.detach(|| match more {
                true => worker.reply_part(&message, &data),
                false => worker.reply(&message, &data),
            }))
        })
    }

    /// Marks the message as done: its memory is released, and the mux may send more messages to this worker.
    fn done(&self, py: Python<'_>) -> PyResult<()> {
        let mut this = self.worker.bind(py).try_borrow_mut()?;
        let worker = this.worker()?;
        let message = worker.recall(self.ticket).ok_or_else(done)?;
        worker.done(message);
        Ok(())
    }
}

impl Message {
    fn new(slf: &Bound<'_, Worker>, worker: &towpath_ring::Worker, message: towpath_ring::Message) -> Self {
        let py = slf.py();
        let (all, left) = (worker.bytes(&message), worker.payload(&message));
        let bytes = PyBytes::new(py, all).unbind();
        let payload =
            if left.len() == all.len() { bytes.clone_ref(py) } else { PyBytes::new(py, left).unbind() };
        let towpath_ring::Connection { index, generation } = message.connection();
        Self {
            worker: slf.clone().unbind(),
            bytes,
            payload,
            connection: Connection { index, generation },
            time: message.time(),
            mark: message.mark(),
            hash: message.hash(),
            ticket: message.into_ticket(),
        }
    }
}

fn done() -> PyErr {
    PyValueError::new_err("the message was done before")
}
