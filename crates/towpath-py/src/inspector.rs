//! `towpath.Inspector`: receives packets from a rule's queue and returns verdicts.

use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::path::PathBuf;
use std::time::Duration;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use towpath_ring::{Consumer, Decision, FrameId, Header, Loss, RecvError};

use crate::counters::{self, Tables};
use crate::data::Data;
use crate::failure;
use crate::wait::{self, Queue};

/// Verdict on a frame. Every verdict except HOLD releases the frame.
#[pyclass(eq, eq_int, frozen, hash, rename_all = "UPPERCASE")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Verdict {
    /// Pass the packet.
    Pass = 1,
    /// Drop the packet.
    Drop = 2,
    /// Drop the packet and notify its sender (TCP reset or ICMP unreachable).
    Reject = 3,
    /// Evaluate the rules again.
    Repeat = 6,
    /// Keep the frame for a later verdict, in any order; other frames continue.
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

/// An inspector, attached to a queue of the engine.
///
/// Inspector(path=None, *, name=None, gaps=True)
///
/// Attaches to the engine's socket at path. Without path, it uses TOWPATH_SOCKET, which the engine sets for a program that it starts.
/// The engine shows name in its reports. With gaps=False, no frames of kind GAP are received for lost frames. The object is a context
/// manager and an iterator over frames. Each frame needs a verdict.
#[pyclass]
#[derive(Debug)]
pub(crate) struct Inspector {
    queue: Option<Consumer>,
}

/// A packet that waits for its verdict. payload is a copy.
#[pyclass(frozen)]
#[derive(Debug)]
pub(crate) struct Frame {
    inspector: Py<Inspector>,
    id: FrameId,
    ticket: towpath_ring::Ticket,
    header: Header,
    /// The packet's bytes, starting with the link header.
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

    /// Returns the next frame. Waits at most timeout seconds (TimeoutError). Returns None when the engine has closed the channel.
    #[pyo3(signature = (timeout=None))]
    fn recv(slf: &Bound<'_, Self>, timeout: Option<f64>) -> PyResult<Option<Frame>> {
        let py = slf.py();
        wait::next(py, "inspector", timeout, |most| {
            let mut inspector = slf.try_borrow_mut()?;
            wait::look(py, &mut inspector.queue, most, |queue, frame| Frame::new(slf, queue, frame))
        })
    }

    /// Returns up to max frames. Waits for the first one as recv does. Returns an empty list at the end.
    #[pyo3(signature = (max=64, timeout=None))]
    fn recv_batch(slf: &Bound<'_, Self>, max: usize, timeout: Option<f64>) -> PyResult<Vec<Frame>> {
        let py = slf.py();
        if max == 0 {
            return Err(PyValueError::new_err("max must be at least 1"));
        }
        let batch = wait::next(py, "inspector", timeout, |most| {
            let mut inspector = slf.try_borrow_mut()?;
            wait::look(py, &mut inspector.queue, most, |queue, first| {
                let (mut batch, mut found) = (Vec::new(), Some(first));
                while let Some(frame) = found {
                    batch.push(Frame::new(slf, queue, frame));
                    // The next call reports an error again.
                    found = if batch.len() < max { queue.try_recv().unwrap_or(None) } else { None };
                }
                batch
            })
        })?;
        Ok(batch.unwrap_or_default())
    }

    /// Decides, in one write, every received frame that is not held and has no verdict.
    #[pyo3(signature = (verdict, *, flow=false))]
    fn verdict_all(&mut self, verdict: &Verdict, flow: bool) -> PyResult<()> {
        self.queue()?.verdict_all(about_many(*verdict, flow)?);
        Ok(())
    }

    /// Like verdict_all, for the frames up to this one from the same engine thread.
    #[pyo3(signature = (frame, verdict, *, flow=false))]
    fn verdict_upto(&mut self, frame: &Frame, verdict: &Verdict, flow: bool) -> PyResult<()> {
        self.queue()?.verdict_upto(frame.id, about_many(*verdict, flow)?);
        Ok(())
    }

    /// Sends a request to the ring next to a control socket: GROUP_STATES, GROUP_EVENTS or GROUP_PACKETS. payload: JSON, or empty for the
    /// defaults. The answer is frames whose queue is the group.
    #[pyo3(signature = (group, payload=None))]
    fn request(slf: &Bound<'_, Self>, group: u32, payload: Option<Data>) -> PyResult<()> {
        let py = slf.py();
        let payload = payload.as_ref().map(|payload| payload.get(py)).transpose()?.unwrap_or_default();
        wait::send(py, || {
            let mut inspector = slf.try_borrow_mut()?;
            let queue = inspector.queue()?;
            Ok(py.detach(|| queue.request(group, &payload)))
        })
    }

    /// Wakes the engine if it sleeps and verdicts are pending. A receiving call also does this.
    fn flush(&mut self) -> PyResult<()> {
        self.queue()?.flush();
        Ok(())
    }

    /// Returns the counters: a dict of dicts, by table ("consumer") and name.
    fn metrics(&mut self) -> PyResult<Tables> {
        Ok(counters::tables(&[&self.queue()?.stats()]))
    }

    /// Returns a descriptor for event loops, readable between arm and disarm when a frame is available. Use it only for polling.
    fn fileno(&mut self) -> PyResult<RawFd> {
        Ok(self.queue()?.as_fd().as_raw_fd())
    }

    /// Prepares for polling fileno(). Returns False if a frame is available already.
    fn arm(&mut self) -> PyResult<bool> {
        Ok(self.queue()?.arm())
    }

    /// Ends polling of fileno(). Then call recv(0) until it raises TimeoutError.
    fn disarm(&mut self) -> PyResult<()> {
        self.queue()?.disarm().map_err(|error| failure::recv(&error))
    }

    /// Closes the inspector. Frames without a verdict get the queue's default verdict.
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
    /// Decides the frame. flow: apply the verdict to the rest of its flow. mark: new bits of the packet's mark, under mask.
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

    /// Sends the frame to another queue.
    #[pyo3(signature = (queue, *, flow=false, mark=None, mask=u32::MAX))]
    fn to_queue(&self, py: Python<'_>, queue: u16, flow: bool, mark: Option<u32>, mask: u32) -> PyResult<()> {
        self.decide(py, decision(towpath_ring::Verdict::Queue(queue).into(), flow, mark, mask))
    }

    /// Passes the frame with another payload. Waits while the ring to the engine is full.
    fn replace(&self, py: Python<'_>, payload: Data) -> PyResult<()> {
        let payload = payload.get(py)?;
        wait::send(py, || {
            let mut inspector = self.inspector.bind(py).try_borrow_mut()?;
            let queue = inspector.queue()?;
            let frame = queue.recall(self.ticket).ok_or_else(decided)?;
            Ok(py.detach(|| queue.replace(frame, &payload)).map_err(|not| not.why))
        })
    }

    /// Capture time in nanoseconds since the epoch.
    #[getter]
    fn time(&self) -> u64 {
        self.header.time
    }

    /// Length of the packet on the wire in bytes. payload is shorter if the packet was truncated.
    #[getter]
    fn wire_len(&self) -> u32 {
        self.header.wire_len
    }

    /// The frame's kind: PACKET, MESSAGE, EVENT, DUMP, DONE, ERROR or GAP.
    #[getter]
    fn kind(&self) -> u16 {
        self.header.kind.0
    }

    /// The queue of the frame; the group of an answer to a request.
    #[getter]
    fn queue(&self) -> u32 {
        self.header.group
    }

    /// The packet's mark.
    #[getter]
    fn mark(&self) -> u32 {
        self.header.mark
    }

    /// The ingress port.
    #[getter]
    fn port(&self) -> u32 {
        self.header.port
    }

    /// Hash of the flow, the same in both directions.
    #[getter]
    fn hash(&self) -> u32 {
        self.header.hash
    }

    /// Process, user and group id of a local sender; 0 for packets from the network.
    #[getter]
    fn sender(&self) -> (u32, u32, u32) {
        let sender = self.header.sender();
        (sender.pid, sender.uid, sender.gid)
    }

    /// Number of frames lost before this one; 65535 means that many or more.
    #[getter]
    fn lost(&self) -> u16 {
        self.header.lost
    }

    /// Link type, as in pcap files.
    #[getter]
    fn link_type(&self) -> u16 {
        self.header.layers.link
    }

    /// Offset of the network header, such as the IP header.
    #[getter]
    fn network(&self) -> u16 {
        self.header.layers.network
    }

    /// Offset of the upper layer's payload; the frame's length if it has no payload.
    #[getter]
    fn data(&self) -> u16 {
        self.header.layers.payload
    }

    /// The loss record of a frame of kind GAP: the number of lost frames and the reason ("no room", "oldest", "dropped", "passed",
    /// "handed on", "too large", "overwritten", "limited" or "unknown"). None for other kinds.
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
        return Err(PyValueError::new_err("HOLD applies to a single frame only"));
    }
    Ok(Decision { flow, ..verdict.into() })
}

fn decided() -> PyErr {
    PyValueError::new_err("the frame was decided before")
}
