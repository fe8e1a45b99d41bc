//! `towpath.Sender`: TCP and UDP without copying what is sent.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::time::{Duration, Instant};
use std::{mem, process};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use rustix::io::Errno;
use towpath_send::{Choice, Closed, Done, Options, SendError};

use crate::loan::{self, Pinned};
use crate::{descriptor, failure, wait};

/// How long the end of a `with` waits, in seconds.
const PATIENCE: f64 = 10.0;

/// Sends over a connected TCP or UDP socket without copying, where that works.
///
/// Sender(socket, *, choice="adaptive", segment=None, tamper_check=False, stall=None, max_buffers=None, max_pinned=None)
///
/// The descriptor of socket, an object with fileno() or a number, is duplicated: close yours when you like; the connection ends when
/// both are closed, or at close(). Nobody else sends with MSG_ZEROCOPY on it, or reads its error queue. A buffer that is queued is lent,
/// and its contents must not be changed, until reclaim() gives it back: the kernel reads it at any time. choice: "adaptive", zero copy
/// where probes show that it works; "zerocopy" for all that is long enough; "plain". segment: UDP, each buffer is cut into datagrams of so
/// many bytes. tamper_check: compares checksums at send and completion. stall: seconds that a peer may take nothing before flush and
/// drain give up. max_buffers: most that are lent; max_pinned: most bytes that the kernel pins. A context manager, whose end raises what
/// close() would only say.
#[pyclass]
#[derive(Debug)]
pub(crate) struct Sender {
    sender: Option<towpath_send::Sender>,
    /// What comes back for each buffer that is lent, in the order of their tokens.
    lent: BTreeMap<u64, Py<PyAny>>,
    next: u64,
    max_buffers: usize,
    stall: Option<Duration>,
    /// An error ended the connection.
    broken: bool,
    /// One that was found when there was something to give back.
    unsaid: Option<SendError>,
    /// What is left when it is closed: what comes back, and what the kernel may still read.
    back: Vec<Py<PyAny>>,
    pinned: Option<Pinned>,
    /// How it ended.
    finished: bool,
    counters: towpath_send::Counters,
    /// The process that opened it. A child that was forked has the same connection, and its own copy of what is queued.
    process: u32,
}

/// What a sender counted, as it was when asked.
#[pyclass(name = "SenderCounters", eq, frozen, get_all)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Counters {
    /// Bytes that left without a copy.
    zerocopy_bytes: u64,
    /// Bytes of these that the kernel copied after all.
    copied_bytes: u64,
    /// Bytes that were sent plain.
    plain_bytes: u64,
    /// Zero-copy calls.
    calls: u64,
    /// Those of them that are completed.
    completed: u64,
    /// Those that were reported as copied.
    copied: u64,
    /// Calls that the kernel had no memory for (ENOBUFS); they went plain.
    no_buffers: u64,
    /// Buffers that were changed while they were lent, with tamper_check.
    tampered: u64,
}

/// Works for so long; whether it came to its end.
type Work = fn(&mut towpath_send::Sender, Duration) -> Result<bool, SendError>;

/// How far a sender was, and since when.
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
            "adaptive" => Choice::Adaptive,
            "zerocopy" => Choice::Zerocopy,
            "plain" => Choice::Plain,
            _ => return Err(PyValueError::new_err(r#"a choice is "adaptive", "zerocopy" or "plain""#)),
        };
        if segment == Some(0) {
            return Err(PyValueError::new_err("a segment has bytes; None does not cut"));
        }
        if max_buffers == Some(0) {
            return Err(PyValueError::new_err("max_buffers is 1 at least"));
        }
        let stall = stall.map(wait::patience).transpose()?;
        if stall == Some(Duration::ZERO) {
            return Err(PyValueError::new_err("stall is more than 0; None waits for ever"));
        }
        let defaults = Options::default();
        let options = Options {
            choice,
            segment,
            tamper_check,
            max_frames: max_buffers.unwrap_or(defaults.max_frames),
            max_pinned: max_pinned.unwrap_or(defaults.max_pinned),
            keep_done: true,
            // It is looked at beside the signals: see `look`.
            stall: None,
            ..defaults
        };
        loan::sweep(Instant::now());
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

    /// Queues anything with the buffer protocol, to be sent together with what comes after it. From here on it is lent: do not change its
    /// contents until reclaim() has given it back, or id in its place; a bytearray cannot be resized until then. Never waits.
    /// BlockingIOError: max_buffers are lent, and this one is not; reclaim() some, drain() if there are none. Another OSError: the
    /// connection is over, close it (EMSGSIZE: a datagram was too long, others can be sent); this one is lent all the same.
    #[pyo3(signature = (data, id=None))]
    fn queue(slf: &Bound<'_, Self>, data: &Bound<'_, PyAny>, id: Option<Py<PyAny>>) -> PyResult<()> {
        let buffer = loan::take(data)?;
        let mut this = slf.try_borrow_mut()?;
        let (lent, max) = (this.lent.len(), this.max_buffers);
        this.open()?;
        if lent >= max {
            let text = format!("{lent} buffers are lent: reclaim() some, drain() if there are none");
            return Err(failure::with_errno(Errno::AGAIN.raw_os_error(), text));
        }
        let token = this.next;
        this.next += 1;
        this.lent.insert(token, id.unwrap_or_else(|| data.clone().unbind()));
        let sender = this.open()?;
        let sent = slf.py().detach(|| sender.queue(token, buffer));
        sent.map_err(|error| this.failed(&error))
    }

    /// Waits until the kernel has taken everything that is queued, at most timeout seconds (TimeoutError; 0 sends what there is room
    /// for); it may read it still. TimeoutError too when the peer took nothing for stall seconds. Else as queue.
    #[pyo3(signature = (timeout=None))]
    fn flush(slf: &Bound<'_, Self>, timeout: Option<f64>) -> PyResult<()> {
        Self::work(slf, timeout, |sender, most| sender.flush_for(most))
    }

    /// Waits until everything is sent and the kernel done with it, so that all can be reclaimed, at most timeout seconds (TimeoutError).
    /// Else as flush.
    #[pyo3(signature = (timeout=None))]
    fn drain(slf: &Bound<'_, Self>, timeout: Option<f64>) -> PyResult<()> {
        Self::work(slf, timeout, |sender, most| sender.drain(most))
    }

    /// What was lent and has come back since: each object that was queued, or the id that it was queued with. Never waits. After close()
    /// too: what was not sent at once, what is pinned a minute later.
    fn reclaim(slf: &Bound<'_, Self>) -> PyResult<Vec<Py<PyAny>>> {
        let mut this = slf.try_borrow_mut()?;
        let done = this.done()?;
        let mut back = mem::take(&mut this.back);
        back.extend(done.iter().filter_map(|done| this.lent.remove(&done.token)));
        drop(this);
        // The end of an export may run code of Python's, which may use this.
        drop(done);
        Ok(back)
    }

    /// What the kernel may still read although the connection was reset (see close): as reclaim() will give it.
    #[getter]
    fn pinned(&self, py: Python<'_>) -> Vec<Py<PyAny>> {
        if self.sender.is_some() {
            return Vec::new();
        }
        self.lent.values().map(|id| id.clone_ref(py)).collect()
    }

    /// The socket, to poll for POLLERR (register it with 0 events): then buffers may have come back; with POLLOUT: flush(0) sends more.
    fn fileno(&self) -> PyResult<RawFd> {
        let sender = self.sender.as_ref().ok_or_else(|| failure::closed("sender"))?;
        Ok(sender.as_fd().as_raw_fd())
    }

    /// What was counted.
    #[getter]
    fn counters(&self) -> Counters {
        self.sender.as_ref().map_or(&self.counters, towpath_send::Sender::counters).into()
    }

    /// Ends the connection: sends what is queued, announces the end, waits for completions, at most timeout seconds. True: everything was
    /// sent, and nothing is lent any more. False: the connection broke or was reset here; what the kernel may still read is pinned, stays
    /// lent, and comes back by reclaim() a minute later; everything else is yours. A signal's handler that raises ends the wait, and the
    /// sender is open as before.
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
        // How that ended, close has said.
        if slf.try_borrow()?.sender.is_none() {
            return Ok(());
        }
        match Self::end(slf, wait::patience(PATIENCE)?) {
            Ok(Err(unsent)) if kind.is_none() && slf.try_borrow()?.process == process::id() => Err(unsent),
            Ok(_) => Ok(()),
            Err(raised) => {
                // Whoever interrupts this waits no more.
                Self::finish(slf, None).map(drop)?;
                Err(raised)
            }
        }
    }
}

impl Sender {
    fn open(&mut self) -> PyResult<&mut towpath_send::Sender> {
        if self.process != process::id() {
            return Err(PyValueError::new_err("another process has opened the sender, and sends with it"));
        }
        self.sender.as_mut().ok_or_else(|| failure::closed("sender"))
    }

    fn failed(&mut self, error: &SendError) -> PyErr {
        // A datagram's peer may listen again; what was refused was sent.
        let passes = match error {
            SendError::TooLong { .. } => true,
            SendError::Gone(source) => source.kind() == std::io::ErrorKind::ConnectionRefused,
            _ => false,
        };
        self.broken |= !passes;
        failure::send(error)
    }

    /// Works until it has come to its end.
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

    /// Works for so long at most; a peer that stalls is seen over several of these.
    fn look(
        &mut self,
        py: Python<'_>,
        most: Duration,
        work: Work,
        moved: &mut Moved,
    ) -> Result<bool, SendError> {
        // Who closed it has nothing left to do.
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

    /// Buffers that the kernel is done with.
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

    /// Sends everything, and closes it. Why not everything was sent, if so; an error when a signal's handler raised one, and it is open.
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
                // Those behind it can be sent.
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

    /// Closes it as it is. Why not everything was sent, if so.
    fn finish(slf: &Bound<'_, Self>, why: Option<PyErr>) -> PyResult<PyResult<()>> {
        let mut this = slf.try_borrow_mut()?;
        let (mut sender, mut done) = (this.sender.take(), Vec::new());
        // In a child that was forked the connection is the parent's: a descriptor less does nothing to it.
        if let Some(sender) = sender.take_if(|_| this.process == process::id()) {
            let closed =
                slf.py().detach(|| sender.close(Duration::ZERO)).map_err(|error| failure::send(&error))?;
            let Closed { finished, remains, counters } = closed;
            this.finished = finished && !this.broken;
            this.counters = counters;
            done.extend(remains.done.into_iter().chain(remains.unsent));
            let back: Vec<_> = done.iter().filter_map(|done| this.lent.remove(&done.token)).collect();
            this.back.extend(back);
            this.pinned = Some(Pinned::new(remains.quarantine));
        }
        let finished = this.finished;
        drop(this);
        // The end of an export may run code of Python's, which may use this.
        drop((done, sender));
        loan::sweep(Instant::now());
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
        self.pinned.take().into_iter().for_each(loan::leave);
    }
}

/// What moves whenever bytes are taken or completions come.
fn progress(sender: &towpath_send::Sender) -> u64 {
    let counters = sender.counters();
    counters.numbers + counters.plain_calls + counters.notifications
}

#[pymethods]
impl Counters {
    fn __repr__(&self) -> String {
        crate::repr("Sender", self)
    }
}

impl From<&towpath_send::Counters> for Counters {
    fn from(counters: &towpath_send::Counters) -> Self {
        Self {
            zerocopy_bytes: counters.zerocopy_bytes,
            copied_bytes: counters.copied_bytes,
            plain_bytes: counters.plain_bytes(),
            calls: counters.numbers,
            completed: counters.completed,
            copied: counters.copied,
            no_buffers: counters.no_buffers,
            tampered: counters.tampered,
        }
    }
}
