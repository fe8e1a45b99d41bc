//! `towpath.Sender`: zero-copy sends over TCP and UDP.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::time::{Duration, Instant};
use std::{mem, process};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use rustix::io::Errno;
use towpath_send::{Closed, CopyMode, Done, Options, SendError};

use crate::asynchronous;
use crate::buffer_export::{self, Pinned};
use crate::counters::{self, SenderCounters, Tables};
use crate::{descriptor, failure, wait};

/// How long the exit of a `with` block waits, in seconds.
const PATIENCE: f64 = 10.0;

/// Sends over a connected TCP or UDP socket, without copying where the kernel supports it.
///
/// Sender(socket, *, choice="adaptive", segment=None, tamper_check=False, stall=None, max_buffers=None, max_pinned=None)
///
/// socket is an object with fileno() or a descriptor number. The descriptor is duplicated: the caller may close its own. The connection
/// ends when both are closed, or at close(). No other code may send with MSG_ZEROCOPY on the socket or read its error queue. A queued
/// buffer must not be changed until reclaim() returns it, because the kernel may read it at any time.
///
/// choice: "adaptive" sends without a copy where probes show that it works; "zerocopy" sends everything above the minimum length without
/// a copy; "plain" always copies. segment (UDP): length in bytes of the datagrams that each buffer is cut into. tamper_check: compare
/// checksums at send and completion. stall: seconds without progress at the peer after which flush and drain fail. max_buffers: limit on
/// outstanding buffers. max_pinned: limit on the bytes that the kernel pins. The object is a context manager; its exit raises the error
/// that close() reports as False.
#[pyclass]
#[derive(Debug)]
pub(crate) struct Sender {
    sender: Option<towpath_send::Sender>,
    /// The object that reclaim returns for each outstanding buffer, by token.
    lent: BTreeMap<u64, Py<PyAny>>,
    next: u64,
    max_buffers: usize,
    stall: Option<Duration>,
    /// The connection failed.
    broken: bool,
    /// An error found after completions, to be raised by the next call.
    unsaid: Option<SendError>,
    /// After close: the objects to return, and the buffers that the kernel may still read.
    back: Vec<Py<PyAny>>,
    pinned: Option<Pinned>,
    /// Everything was sent at close.
    finished: bool,
    counters: towpath_send::Counters,
    /// The process that created the sender. A forked child shares the connection and has a copy of the queue.
    process: u32,
}

/// Runs the sender for at most the given duration. Returns true when the operation is complete.
type Work = fn(&mut towpath_send::Sender, Duration) -> Result<bool, SendError>;

/// The last observed progress and its time.
type Moved = Option<(u64, Instant)>;

#[pymethods]
impl Sender {
    #[new]
    #[pyo3(signature = (
        socket, *, choice="adaptive", segment=None, tamper_check=false, stall=None, max_buffers=None, max_pinned=None
    ))]
    fn new(
        socket: &Bound<'_, PyAny>,
        choice: &str,
        segment: Option<u16>,
        tamper_check: bool,
        stall: Option<f64>,
        max_buffers: Option<usize>,
        max_pinned: Option<u64>,
    ) -> PyResult<Self> {
        let choice = match choice {
            "adaptive" => CopyMode::Adaptive,
            "zerocopy" => CopyMode::Zerocopy,
            "plain" => CopyMode::Plain,
            _ => return Err(PyValueError::new_err(r#"choice must be "adaptive", "zerocopy" or "plain""#)),
        };
        if segment == Some(0) {
            return Err(PyValueError::new_err("segment must be at least 1; None disables segmentation"));
        }
        if max_buffers == Some(0) {
            return Err(PyValueError::new_err("max_buffers must be at least 1"));
        }
        let stall = stall.map(wait::patience).transpose()?;
        if stall == Some(Duration::ZERO) {
            return Err(PyValueError::new_err("stall must be greater than 0; None disables it"));
        }
        let defaults = Options::default();
        let options = Options {
            choice,
            segment,
            tamper_check,
            max_frames: max_buffers.unwrap_or(defaults.max_frames),
            max_pinned: max_pinned.unwrap_or(defaults.max_pinned),
            keep_done: true,
            // `look` checks for a stall, because it also handles signals.
            stall: None,
            ..defaults
        };
        buffer_export::sweep(Instant::now());
        let max_buffers = options.max_frames;
        let fd = descriptor::duplicate(socket)?;
        let sender = towpath_send::Sender::new(fd, options).map_err(|error| failure::send(&error))?;
        Ok(Self {
            sender: Some(sender),
            lent: BTreeMap::new(),
            next: 0,
            max_buffers,
            stall,
            broken: false,
            unsaid: None,
            back: Vec::new(),
            pinned: None,
            finished: false,
            counters: towpath_send::Counters::default(),
            process: process::id(),
        })
    }

    /// Queues an object with the buffer protocol. The data is sent together with the data queued after it. The contents must not change until
    /// reclaim() returns the object (or id, if given); a bytearray cannot be resized until then. Never waits. BlockingIOError: max_buffers
    /// buffers are outstanding, and this one was not queued; call reclaim(), or drain() if nothing can be reclaimed. Another OSError: the
    /// connection failed, close it (EMSGSIZE: the datagram was too long, others can be sent). The buffer is outstanding in this case too.
    #[pyo3(signature = (data, id=None))]
    fn queue(slf: &Bound<'_, Self>, data: &Bound<'_, PyAny>, id: Option<Py<PyAny>>) -> PyResult<()> {
        let buffer = buffer_export::take(data)?;
        let mut this = slf.try_borrow_mut()?;
        let (lent, max) = (this.lent.len(), this.max_buffers);
        this.open()?;
        if lent >= max {
            let text =
                format!("{lent} buffers are outstanding: call reclaim(), or drain() if it returns none");
            return Err(failure::with_errno(Errno::AGAIN.raw_os_error(), text));
        }
        let token = this.next;
        this.next += 1;
        this.lent.insert(token, id.unwrap_or_else(|| data.clone().unbind()));
        let sender = this.open()?;
        let sent = slf.py().detach(|| sender.queue(token, buffer));
        sent.map_err(|error| this.failed(&error))
    }

    /// Waits until the kernel has accepted everything in the queue, at most timeout seconds (TimeoutError; 0 sends what fits now). The kernel
    /// may still read the buffers. Also raises TimeoutError if the peer made no progress for stall seconds. Other errors are those of queue.
    #[pyo3(signature = (timeout=None))]
    fn flush(slf: &Bound<'_, Self>, timeout: Option<f64>) -> PyResult<()> {
        Self::work(slf, timeout, |sender, most| sender.flush_for(most))
    }

    /// Queues a buffer and waits until the kernel has accepted it, as a coroutine for asyncio: await sender.send(data). Errors are those of
    /// queue and flush; BlockingIOError: await sender.send again after reclaim().
    #[pyo3(signature = (data, id=None))]
    fn send<'py>(
        slf: &Bound<'py, Self>,
        data: &Bound<'py, PyAny>,
        id: Option<Py<PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        asynchronous::coroutine(slf.py(), "send", (slf, data, id))
    }

    /// Waits until everything is sent and all buffers can be reclaimed, at most timeout seconds (TimeoutError). Other errors are those of
    /// flush.
    #[pyo3(signature = (timeout=None))]
    fn drain(slf: &Bound<'_, Self>, timeout: Option<f64>) -> PyResult<()> {
        Self::work(slf, timeout, |sender, most| sender.drain(most))
    }

    /// Returns the buffers that were completed since the last call: each queued object, or its id. Never waits. After close() it returns
    /// unsent buffers at once and pinned buffers a minute later.
    fn reclaim(slf: &Bound<'_, Self>) -> PyResult<Vec<Py<PyAny>>> {
        let mut this = slf.try_borrow_mut()?;
        let done = this.done()?;
        let mut back = mem::take(&mut this.back);
        back.extend(done.iter().filter_map(|done| this.lent.remove(&done.token)));
        drop(this);
        // Releasing an export may run Python code, which may use this object.
        drop(done);
        Ok(back)
    }

    /// The buffers that the kernel may still read after a reset (see close), as reclaim() will return them.
    #[getter]
    fn pinned(&self, py: Python<'_>) -> Vec<Py<PyAny>> {
        if self.sender.is_some() {
            return Vec::new();
        }
        self.lent.values().map(|id| id.clone_ref(py)).collect()
    }

    /// Returns the socket's descriptor. Poll it for POLLERR (register it with 0 events): reclaim() may return buffers. On POLLOUT,
    /// flush(0) sends more.
    fn fileno(&self) -> PyResult<RawFd> {
        let sender = self.sender.as_ref().ok_or_else(|| failure::closed("sender"))?;
        Ok(sender.as_fd().as_raw_fd())
    }

    /// A snapshot of the counters.
    #[getter]
    fn counters(&self) -> SenderCounters {
        SenderCounters(self.counted().into())
    }

    /// Returns all counters: a dict of dicts, by table ("send") and name.
    fn metrics(&self) -> Tables {
        counters::tables(&[self.counted()])
    }

    /// Closes the connection: sends the queue, shuts down the sending side and waits for completions, at most timeout seconds. Returns True if
    /// everything was sent and no buffer is outstanding. Returns False if the connection failed or this call reset it: buffers that the kernel may
    /// still read stay pinned, and reclaim() returns them a minute later; all others are released. An exception from a signal handler ends the
    /// wait and leaves the sender open.
    #[pyo3(signature = (timeout=10.0))]
    fn close(slf: &Bound<'_, Self>, timeout: f64) -> PyResult<bool> {
        Ok(Self::end(slf, wait::patience(timeout)?)?.is_ok())
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __exit__(
        slf: &Bound<'_, Self>,
        kind: &Bound<'_, PyAny>,
        _value: &Bound<'_, PyAny>,
        _trace: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        // close() has reported its result already.
        if slf.try_borrow()?.sender.is_none() {
            return Ok(());
        }
        match Self::end(slf, wait::patience(PATIENCE)?) {
            Ok(Err(unsent)) if kind.is_none() && slf.try_borrow()?.process == process::id() => Err(unsent),
            Ok(_) => Ok(()),
            Err(raised) => {
                // After an interrupt, close without waiting again.
                Self::finish(slf, None).map(drop)?;
                Err(raised)
            }
        }
    }
}

impl Sender {
    fn open(&mut self) -> PyResult<&mut towpath_send::Sender> {
        if self.process != process::id() {
            return Err(PyValueError::new_err("the sender belongs to another process"));
        }
        self.sender.as_mut().ok_or_else(|| failure::closed("sender"))
    }

    fn failed(&mut self, error: &SendError) -> PyErr {
        // A UDP peer may listen again; the refused datagram was sent.
        let passes = match error {
            SendError::TooLong { .. } => true,
            SendError::Gone(source) => source.kind() == std::io::ErrorKind::ConnectionRefused,
            _ => false,
        };
        self.broken |= !passes;
        failure::send(error)
    }

    /// Repeats `work` until it is complete.
    fn work(slf: &Bound<'_, Self>, timeout: Option<f64>, work: Work) -> PyResult<()> {
        let mut moved = None;
        wait::until(slf.py(), timeout, |most| {
            let mut this = slf.try_borrow_mut()?;
            this.open()?;
            match this.look(slf.py(), most, work, &mut moved) {
                Err(error @ SendError::Stalled(_)) => Err(failure::send(&error)),
                worked => worked.map_err(|error| this.failed(&error)),
            }
        })
    }

    /// Runs `work` once, for at most `most`. Detects a stall across several calls.
    fn look(
        &mut self,
        py: Python<'_>,
        most: Duration,
        work: Work,
        moved: &mut Moved,
    ) -> Result<bool, SendError> {
        // A signal handler closed the sender.
        let Some(sender) = &mut self.sender else { return Ok(true) };
        let most = self.stall.map_or(most, |stall| most.min(stall));
        let (progress, since) = *moved.get_or_insert_with(|| (progress(sender), Instant::now()));
        if py.detach(|| work(sender, most))? {
            return Ok(true);
        }
        if self::progress(sender) != progress {
            *moved = None;
        } else if let Some(stall) = self.stall.filter(|stall| since.elapsed() >= *stall) {
            return Err(SendError::Stalled(stall));
        }
        Ok(false)
    }

    /// Returns the buffers that the kernel has released.
    fn done(&mut self) -> PyResult<Vec<Done>> {
        let mut done = Vec::new();
        if self.sender.is_none() {
            let pinned = self.pinned.as_mut();
            return Ok(pinned.map(|pinned| pinned.take_over(Instant::now())).unwrap_or_default());
        }
        self.open()?;
        if let Some(error) = self.unsaid.take() {
            return Err(failure::send(&error));
        }
        loop {
            match self.open()?.reclaim() {
                Ok(Some(next)) => done.push(next),
                Ok(None) => return Ok(done),
                Err(error) if done.is_empty() => return Err(self.failed(&error)),
                Err(error) => {
                    self.failed(&error);
                    self.unsaid = Some(error);
                    return Ok(done);
                }
            }
        }
    }

    /// Sends everything and closes the sender. The inner error says why data was not sent; the outer error is an exception of a signal
    /// handler, and the sender stays open.
    fn end(slf: &Bound<'_, Self>, patience: Duration) -> PyResult<PyResult<()>> {
        let deadline = Instant::now() + patience;
        let (mut why, mut moved) = (None, None);
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let mut this = slf.try_borrow_mut()?;
            if this.sender.is_none() || this.process != process::id() {
                break;
            }
            match this.look(slf.py(), left.min(wait::PIECE), |sender, most| sender.drain(most), &mut moved) {
                Ok(true) => break,
                Ok(false) if left.is_zero() => {
                    why = why.or_else(|| Some(failure::timed_out("not everything was sent in time")));
                    break;
                }
                Ok(false) => {}
                // The next datagrams can still be sent.
                Err(SendError::Gone(source)) if source.kind() == std::io::ErrorKind::ConnectionRefused => {}
                Err(error @ SendError::TooLong { .. }) => {
                    why = Some(failure::send(&error));
                    this.broken = true;
                }
                Err(error) => {
                    why = Some(this.failed(&error));
                    break;
                }
            }
            drop(this);
            slf.py().check_signals()?;
        }
        Self::finish(slf, why)
    }

    /// Closes the sender without waiting. The inner error says why data was not sent.
    fn finish(slf: &Bound<'_, Self>, why: Option<PyErr>) -> PyResult<PyResult<()>> {
        let mut this = slf.try_borrow_mut()?;
        let (mut sender, mut done) = (this.sender.take(), Vec::new());
        // In a forked child, the connection belongs to the parent: the child only closes its descriptor.
        if let Some(sender) = sender.take_if(|_| this.process == process::id()) {
            let closed =
                slf.py().detach(|| sender.close(Duration::ZERO)).map_err(|error| failure::send(&error))?;
            let Closed { finished, remains, counters, .. } = closed;
            this.finished = finished && !this.broken;
            this.counters = counters;
            done.extend(remains.done.into_iter().chain(remains.unsent));
            let back: Vec<_> = done.iter().filter_map(|done| this.lent.remove(&done.token)).collect();
            this.back.extend(back);
            this.pinned = Some(Pinned::new(remains.quarantine));
        }
        let finished = this.finished;
        drop(this);
        // Releasing an export may run Python code, which may use this object.
        drop((done, sender));
        buffer_export::sweep(Instant::now());
        if finished {
            return Ok(Ok(()));
        }
        Ok(Err(why.unwrap_or_else(|| {
            failure::with_errno(Errno::CONNRESET.raw_os_error(), "not everything was sent".to_owned())
        })))
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        self.pinned.take().into_iter().for_each(buffer_export::leave);
    }
}

impl Sender {
    fn counted(&self) -> &towpath_send::Counters {
        self.sender.as_ref().map_or(&self.counters, towpath_send::Sender::counters)
    }
}

/// A value that increases when the kernel accepts bytes or reports completions.
fn progress(sender: &towpath_send::Sender) -> u64 {
    let counters = sender.counters();
    counters.numbers + counters.plain_calls + counters.notifications
}
