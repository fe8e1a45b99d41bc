//! `towpath.Inspector`: packets from a rule's queue, verdicts back.

use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::path::PathBuf;
use std::time::Duration;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use towpath_ring::{Consumer, Decision, FrameId, Header, Loss, RecvError};

use crate::data::Data;
use crate::failure;
use crate::wait::{self, Queue};

/// What is to happen to a frame. To say it gives the frame back, except HOLD.
#[pyclass(eq, eq_int, frozen, hash, rename_all = "UPPERCASE")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Verdict {
    /// Let it go on.
    Pass = 1,
    /// Drop it.
    Drop = 2,
    /// Drop it and tell the sender (reset or unreachable).
    Reject = 3,
    /// Take it through the rules again.
    Repeat = 6,
    /// Keep it: others go on, this one is decided later, in any order.
    Hold = 7,
}

impl From<Verdict> for Decision<'static> {
    fn from(verdict: Verdict) -> Self {
        use towpath_ring::Verdict as Ring;
        Self::from(match verdict {
            Verdict::Pass => Ring::Pass,
            Verdict::Drop => Ring::Drop,
            Verdict::Reject => Ring::Reject,
            Verdict::Repeat => Ring::Repeat,
            Verdict::Hold => Ring::Hold,
        })
    }
}

/// An inspector: attached to a queue of the engine's rules.
///
/// Inspector(path=None, *, name=None, gaps=True)
///
/// Attaches to the engine's socket at path, or to that of the engine that started this program (TOWPATH_SOCKET). The engine shows
/// name to people. Without gaps, there are no frames of kind GAP where others were lost. A context manager, and an iterator over
/// frames, each of which is to be decided.
#[pyclass]
#[derive(Debug)]
pub(crate) struct Inspector {
    queue: Option<Consumer>,
}

/// A frame: a packet that waits for its verdict. payload is a copy.
#[pyclass(frozen)]
#[derive(Debug)]
pub(crate) struct Frame {
    inspector: Py<Inspector>,
    id: FrameId,
    ticket: towpath_ring::Ticket,
    header: Header,
    /// The bytes, link header first.
    #[pyo3(get)]
    payload: Py<PyBytes>,
}

impl Queue for Consumer {
    type Item = towpath_ring::Frame;

    fn receive(&mut self, timeout: Duration) -> Result<Option<Self::Item>, RecvError> {
        self.recv_timeout(timeout)
    }

    fn is_ended(&mut self) -> bool {
        Self::is_ended(self)
    }
}

#[pymethods]
impl Inspector {
    #[new]
    #[pyo3(signature = (path=None, *, name=None, gaps=true))]
    fn new(py: Python<'_>, path: Option<PathBuf>, name: Option<&str>, gaps: bool) -> PyResult<Self> {
        let (path, mut options) = wait::whereto(path, name)?;
        options.gaps = gaps;
        let attached = py.detach(|| Consumer::attach_with(path, &options));
        py.check_signals()?;
        let mut queue = attached.map_err(|error| failure::attach(&error))?;
        queue.set_interruptible(true);
        queue.set_send_timeout(Some(wait::ROOM));
        Ok(Self { queue: Some(queue) })
    }

    /// The next frame; waits for it, at most timeout seconds (TimeoutError). None when the engine has ended the channel.
    #[pyo3(signature = (timeout=None))]
    fn recv(slf: &Bound<'_, Self>, timeout: Option<f64>) -> PyResult<Option<Frame>> {
        let py = slf.py();
        wait::next(py, "inspector", timeout, |most| {
            let mut inspector = slf.try_borrow_mut()?;
            wait::look(py, &mut inspector.queue, most, |queue, frame| Frame::new(slf, queue, frame))
        })
    }

    /// At most max frames; waits for the first one as recv does. Empty at the end.
    #[pyo3(signature = (max=64, timeout=None))]
    fn recv_batch(slf: &Bound<'_, Self>, max: usize, timeout: Option<f64>) -> PyResult<Vec<Frame>> {
        let py = slf.py();
        if max == 0 {
            return Err(PyValueError::new_err("a batch has room for one frame at least"));
        }
        let batch = wait::next(py, "inspector", timeout, |most| {
            let mut inspector = slf.try_borrow_mut()?;
            wait::look(py, &mut inspector.queue, most, |queue, first| {
                let (mut batch, mut found) = (Vec::new(), Some(first));
                while let Some(frame) = found {
                    batch.push(Frame::new(slf, queue, frame));
                    // What is wrong behind these is said again by the next call.
                    found = if batch.len() < max { queue.try_recv().unwrap_or(None) } else { None };
                }
                batch
            })
        })?;
        Ok(batch.unwrap_or_default())
    }

    /// Decides in one write about every frame that was received, is not held, and has no verdict of its own.
    #[pyo3(signature = (verdict, *, flow=false))]
    fn verdict_all(&mut self, verdict: &Verdict, flow: bool) -> PyResult<()> {
        self.queue()?.verdict_all(about_many(*verdict, flow)?);
        Ok(())
    }

    /// The same up to this frame, on the engine thread that it came from.
    #[pyo3(signature = (frame, verdict, *, flow=false))]
    fn verdict_upto(&mut self, frame: &Frame, verdict: &Verdict, flow: bool) -> PyResult<()> {
        self.queue()?.verdict_upto(frame.id, about_many(*verdict, flow)?);
        Ok(())
    }

    /// Wakes the engine if it sleeps and something was decided; receiving does it too.
    fn flush(&mut self) -> PyResult<()> {
        self.queue()?.flush();
        Ok(())
    }

    /// A descriptor for event loops, readable between arm and disarm when there is something. Only to be waited on.
    fn fileno(&mut self) -> PyResult<RawFd> {
        Ok(self.queue()?.as_fd().as_raw_fd())
    }

    /// Before waiting on fileno(). False: there is a frame already.
    fn arm(&mut self) -> PyResult<bool> {
        Ok(self.queue()?.arm())
    }

    /// After waiting on fileno(); then recv(0) until it raises TimeoutError.
    fn disarm(&mut self) -> PyResult<()> {
        self.queue()?.disarm().map_err(|error| failure::recv(&error))
    }

    /// Ends it. What was not decided gets the queue's default verdict.
    fn close(&mut self) {
        self.queue.take().into_iter().for_each(Consumer::close);
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

    fn __next__(slf: &Bound<'_, Self>) -> PyResult<Option<Frame>> {
        Self::recv(slf, None)
    }
}

impl Inspector {
    fn queue(&mut self) -> PyResult<&mut Consumer> {
        self.queue.as_mut().ok_or_else(|| failure::closed("inspector"))
    }
}

#[pymethods]
impl Frame {
    /// Decides about the frame; flow: from now on for its flow; mark: new bits of the packet's mark, under mask.
    #[pyo3(signature = (verdict, *, flow=false, mark=None, mask=u32::MAX))]
    fn verdict(
        &self,
        py: Python<'_>,
        verdict: &Verdict,
        flow: bool,
        mark: Option<u32>,
        mask: u32,
    ) -> PyResult<()> {
        self.decide(py, decision((*verdict).into(), flow, mark, mask))
    }

    /// Hands the frame to another queue.
    #[pyo3(signature = (queue, *, flow=false, mark=None, mask=u32::MAX))]
    fn to_queue(&self, py: Python<'_>, queue: u16, flow: bool, mark: Option<u32>, mask: u32) -> PyResult<()> {
        self.decide(py, decision(towpath_ring::Verdict::Queue(queue).into(), flow, mark, mask))
    }

    /// Lets the frame go on with another payload; waits while the ring towards the engine is full.
    fn replace(&self, py: Python<'_>, payload: Data) -> PyResult<()> {
        let payload = payload.get(py)?;
        wait::send(py, || {
            let mut inspector = self.inspector.bind(py).try_borrow_mut()?;
            let queue = inspector.queue()?;
            let frame = queue.recall(self.ticket).ok_or_else(decided)?;
            Ok(py.detach(|| queue.replace(frame, &payload)).map_err(|not| not.why))
        })
    }

    /// When it was taken, in nanoseconds since the epoch.
    #[getter]
    fn time(&self) -> u64 {
        self.header.time
    }

    /// Bytes that the packet had on the wire; payload has less when it was cut.
    #[getter]
    fn wire_len(&self) -> u32 {
        self.header.wire_len
    }

    /// PACKET, MESSAGE, EVENT, GAP.
    #[getter]
    fn kind(&self) -> u16 {
        self.header.kind.0
    }

    /// The queue that it was sent to.
    #[getter]
    fn queue(&self) -> u32 {
        self.header.group
    }

    /// The packet's mark.
    #[getter]
    fn mark(&self) -> u32 {
        self.header.mark
    }

    /// The port that it came from.
    #[getter]
    fn port(&self) -> u32 {
        self.header.port
    }

    /// Hash of its flow; the same in both directions.
    #[getter]
    fn hash(&self) -> u32 {
        self.header.hash
    }

    /// Process, user and group id of the sender, when that was a local process; 0 for the network.
    #[getter]
    fn sender(&self) -> (u32, u32, u32) {
        (self.header.pid, self.header.uid, self.header.gid)
    }

    /// Frames lost between the one before and this one; 65535 for that many or more.
    #[getter]
    fn lost(&self) -> u16 {
        self.header.lost
    }

    /// Link type, as in pcap files.
    #[getter]
    fn link_type(&self) -> u16 {
        self.header.layers.link
    }

    /// Offset of what follows the link header: the IP header of an IP packet.
    #[getter]
    fn network(&self) -> u16 {
        self.header.layers.network
    }

    /// Offset of the upper layer's payload; the frame's length when it has none.
    #[getter]
    fn data(&self) -> u16 {
        self.header.layers.payload
    }

    /// Of a frame of kind GAP: how many frames were lost, and why ("no room", "oldest", "dropped", "passed", "handed on",
    /// "too large", "overwritten", "limited", or "unknown").
    #[getter]
    fn gap(&self) -> Option<(u32, &'static str)> {
        let gap = self.header.loss_record()?;
        let why = gap.loss.map_or("unknown", |loss| match loss {
            Loss::NoRoom => "no room",
            Loss::Oldest => "oldest",
            Loss::Dropped => "dropped",
            Loss::Passed => "passed",
            Loss::HandedOn => "handed on",
            Loss::TooLarge => "too large",
            Loss::Overwritten => "overwritten",
            Loss::Limited => "limited",
        });
        Some((gap.count, why))
    }
}

impl Frame {
    fn new(inspector: &Bound<'_, Inspector>, queue: &Consumer, frame: towpath_ring::Frame) -> Self {
        let payload = PyBytes::new(inspector.py(), queue.payload(&frame)).unbind();
        let (id, header) = (frame.id(), *frame.header());
        Self { inspector: inspector.clone().unbind(), id, ticket: frame.into_ticket(), header, payload }
    }

    fn decide(&self, py: Python<'_>, decision: Decision<'static>) -> PyResult<()> {
        let mut inspector = self.inspector.bind(py).try_borrow_mut()?;
        let queue = inspector.queue()?;
        let frame = queue.recall(self.ticket).ok_or_else(decided)?;
        queue.verdict(frame, decision);
        Ok(())
    }
}

fn decision(decision: Decision<'static>, flow: bool, mark: Option<u32>, mask: u32) -> Decision<'static> {
    let decision = Decision { flow, ..decision };
    mark.map_or(decision, |mark| decision.with_mark(mark, mask))
}

fn about_many(verdict: Verdict, flow: bool) -> PyResult<Decision<'static>> {
    if verdict == Verdict::Hold {
        return Err(PyValueError::new_err("frames are held one by one"));
    }
    Ok(Decision { flow, ..verdict.into() })
}

fn decided() -> PyErr {
    PyValueError::new_err("the frame was decided before")
}
