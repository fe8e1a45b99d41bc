//! `towpath_inspector_*`: packets from a rule's queue, and their verdicts.

use std::ffi::{c_int, c_uint};
use std::mem::MaybeUninit;
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::io::Errno;
use towpath_ring::{Consumer, Decision, Inject, Ticket, Verdict};

use crate::error::{Failure, guard};
use crate::ffi::{Bytes, Room, Text};
use crate::metrics::{self, Metric};
use crate::ring::{self, RingStats, Wait};

/// `towpath_inspector`.
#[derive(Debug)]
pub struct Inspector {
    queue: Consumer,
    /// Scratch space of recv_batch; empty between calls.
    batch: Vec<towpath_ring::Frame>,
}

/// `struct towpath_frame`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Frame {
    /// The bytes; valid until the frame is decided.
    pub payload: *const u8,
    /// Number of bytes.
    pub len: usize,
    /// Nanoseconds since the epoch.
    pub time: u64,
    /// Length of the packet on the wire.
    pub wire_len: u32,
    /// `enum towpath_kind`.
    pub kind: u32,
    /// The queue.
    pub queue: u32,
    /// The packet's mark.
    pub mark: u32,
    /// The port that received it.
    pub port: u32,
    /// Flow hash.
    pub hash: u32,
    /// Process id of the sender.
    pub pid: u32,
    /// User id of the sender.
    pub uid: u32,
    /// Group id of the sender.
    pub gid: u32,
    /// Frames lost before this one.
    pub lost: u32,
    /// Index of the interface that received the packet.
    pub ingress: u32,
    /// Index of the interface by which it leaves.
    pub egress: u32,
    /// Link type, as in pcap files.
    pub link_type: u16,
    /// Offset of the data after the link header.
    pub network: u16,
    /// Offset of the upper layer's payload.
    pub data: u16,
    /// The netfilter hook.
    pub hook: u8,
    /// 1: both interfaces are ports of a bridge.
    pub bridged: u8,
    /// Identifies the frame to the library.
    pub ticket: Ticket,
}

/// `TOWPATH_NO_GAPS`.
pub(crate) const NO_GAPS: c_uint = 1;
/// `TOWPATH_FLOW`.
pub(crate) const FLOW: u32 = 0x100;

/// See `towpath.h`.
#[unsafe(no_mangle)]
pub extern "C" fn towpath_inspector_attach(
    path: Text,
    name: Text,
    flags: c_uint,
    inspector: Option<&mut MaybeUninit<*mut Inspector>>,
) -> c_int {
    guard(|| {
        let inspector = inspector.ok_or(Failure::null("the pointer to the inspector is NULL"))?;
        if flags & !NO_GAPS != 0 {
            return Err(Failure::new(Errno::INVAL, "unknown flags"));
        }
        let (path, mut options) = ring::attach_target(path.get(), name.get())?;
        options.gaps = flags & NO_GAPS == 0;
        let mut queue = Consumer::attach_with(&*path, &options)?;
        queue.set_interruptible(true);
        inspector.write(Box::into_raw(Box::new(Inspector { queue, batch: Vec::new() })));
        Ok(0)
    })
}

/// See `towpath.h`.
#[unsafe(no_mangle)]
pub extern "C" fn towpath_inspector_close(inspector: Option<Box<Inspector>>) {
    guard(|| {
        if let Some(inspector) = inspector {
            inspector.queue.close();
        }
        Ok(0)
    });
}

/// See `towpath.h`.
#[unsafe(no_mangle)]
pub extern "C" fn towpath_inspector_recv(
    inspector: Option<&mut Inspector>,
    frame: Option<&mut MaybeUninit<Frame>>,
    timeout: c_int,
) -> c_int {
    guard(|| {
        let queue = &mut some(inspector)?.queue;
        let into = frame.ok_or(NO_FRAME)?;
        let received = match Wait::from_millis(timeout)? {
            Wait::Forever => queue.recv()?,
            Wait::Most(timeout) => queue.recv_timeout(timeout)?,
        };
        let Some(frame) = received else { return ring::nothing(queue) };
        into.write(Frame::new(queue, frame));
        Ok(1)
    })
}

/// See `towpath.h`.
#[unsafe(no_mangle)]
pub extern "C" fn towpath_inspector_recv_batch(
    inspector: Option<&mut Inspector>,
    mut frames: Room<Frame>,
    max: usize,
    timeout: c_int,
) -> c_int {
    guard(|| {
        let Inspector { queue, batch } = some(inspector)?;
        let max = max.min(c_int::MAX as usize);
        let frames = frames.get(max)?;
        let ended = match Wait::from_millis(timeout)? {
            Wait::Forever => queue.recv_batch(batch, max).map(drop),
            Wait::Most(timeout) => queue.recv_timeout(timeout).and_then(|first| {
                batch.extend(first);
                while !batch.is_empty()
                    && batch.len() < max
                    && let Some(next) = queue.try_recv()?
                {
                    batch.push(next);
                }
                Ok(())
            }),
        };
        if batch.is_empty() {
            ended?;
            return ring::nothing(queue);
        }
        // The next call reports the error again.
        let count = batch.len();
        for (into, frame) in frames.iter_mut().zip(batch.drain(..)) {
            into.write(Frame::new(queue, frame));
        }
        Ok(count as c_int)
    })
}

/// See `towpath.h`.
#[unsafe(no_mangle)]
pub extern "C" fn towpath_inspector_verdict(
    inspector: Option<&mut Inspector>,
    frame: Option<&Frame>,
    verdict: u32,
) -> c_int {
    guard(|| {
        let decision = decision(verdict)?;
        decide(inspector, frame, decision)
    })
}

/// See `towpath.h`.
#[unsafe(no_mangle)]
pub extern "C" fn towpath_inspector_verdict_mark(
    inspector: Option<&mut Inspector>,
    frame: Option<&Frame>,
    verdict: u32,
    mark: u32,
    mask: u32,
) -> c_int {
    guard(|| {
        let decision = decision(verdict)?;
        decide(inspector, frame, decision.with_mark(mark, mask))
    })
}

/// See `towpath.h`.
#[unsafe(no_mangle)]
pub extern "C" fn towpath_inspector_verdict_upto(
    inspector: Option<&mut Inspector>,
    frame: Option<&Frame>,
    verdict: u32,
) -> c_int {
    guard(|| {
        let queue = &mut some(inspector)?.queue;
        let frame = frame.ok_or(NO_FRAME)?;
        queue.verdict_upto(frame.id(), about_many(verdict)?);
        Ok(0)
    })
}

/// See `towpath.h`.
#[unsafe(no_mangle)]
pub extern "C" fn towpath_inspector_verdict_all(inspector: Option<&mut Inspector>, verdict: u32) -> c_int {
    guard(|| {
        some(inspector)?.queue.verdict_all(about_many(verdict)?);
        Ok(0)
    })
}

/// See `towpath.h`.
#[unsafe(no_mangle)]
pub extern "C" fn towpath_inspector_replace(
    inspector: Option<&mut Inspector>,
    frame: Option<&Frame>,
    payload: Bytes,
    len: usize,
) -> c_int {
    guard(|| {
        let queue = &mut some(inspector)?.queue;
        let frame = frame.ok_or(NO_FRAME)?;
        let payload = payload.get(len)?;
        let frame = queue.recall(frame.ticket).ok_or_else(ring::stale)?;
        queue.replace(frame, payload).map_err(|not| not.why)?;
        Ok(0)
    })
}

/// See `towpath.h`.
#[unsafe(no_mangle)]
pub extern "C" fn towpath_inspector_inject(
    inspector: Option<&mut Inspector>,
    frame: Option<&Frame>,
    way: u32,
    packet: Bytes,
    len: usize,
) -> c_int {
    guard(|| {
        let queue = &mut some(inspector)?.queue;
        let frame = frame.ok_or(NO_FRAME)?;
        let way = match way {
            0 => Inject::Forward,
            1 => Inject::Back,
            _ => return Err(Failure::new(Errno::INVAL, "unknown way")),
        };
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let time = u64::try_from(now.as_nanos()).unwrap_or(u64::MAX);
        queue.inject((frame.ticket.lane, frame.port), way, frame.link_type, packet.get(len)?, time)?;
        Ok(0)
    })
}

/// See `towpath.h`.
#[unsafe(no_mangle)]
pub extern "C" fn towpath_inspector_request(
    inspector: Option<&mut Inspector>,
    group: u32,
    payload: Bytes,
    len: usize,
) -> c_int {
    guard(|| {
        let payload = payload.get(len)?;
        some(inspector)?.queue.request(group, payload)?;
        Ok(0)
    })
}

/// See `towpath.h`.
#[unsafe(no_mangle)]
pub extern "C" fn towpath_inspector_flush(inspector: Option<&mut Inspector>) -> c_int {
    guard(|| {
        some(inspector)?.queue.flush();
        Ok(0)
    })
}

/// See `towpath.h`.
#[unsafe(no_mangle)]
pub extern "C" fn towpath_inspector_fd(inspector: Option<&Inspector>) -> c_int {
    guard(|| Ok(ring::fd(&inspector.ok_or(NO_INSPECTOR)?.queue)))
}

/// See `towpath.h`.
#[unsafe(no_mangle)]
pub extern "C" fn towpath_inspector_arm(inspector: Option<&mut Inspector>) -> c_int {
    guard(|| Ok(some(inspector)?.queue.arm().into()))
}

/// See `towpath.h`.
#[unsafe(no_mangle)]
pub extern "C" fn towpath_inspector_disarm(inspector: Option<&mut Inspector>) -> c_int {
    guard(|| {
        some(inspector)?.queue.disarm()?;
        Ok(0)
    })
}

/// See `towpath.h`.
#[unsafe(no_mangle)]
pub extern "C" fn towpath_inspector_metrics(
    inspector: Option<&Inspector>,
    mut metrics: Room<Metric>,
    max: usize,
) -> c_int {
    guard(|| {
        let inspector = inspector.ok_or(NO_INSPECTOR)?;
        metrics::write(&[&inspector.queue.stats()], &mut metrics, max)
    })
}

/// See `towpath.h`.
#[unsafe(no_mangle)]
pub extern "C" fn towpath_inspector_stats(
    inspector: Option<&Inspector>,
    stats: Option<&mut MaybeUninit<RingStats>>,
) -> c_int {
    guard(|| {
        let inspector = inspector.ok_or(NO_INSPECTOR)?;
        let stats = stats.ok_or(Failure::null("the pointer to the statistics is NULL"))?;
        stats.write(inspector.queue.stats().into());
        Ok(0)
    })
}

impl Frame {
    fn new(queue: &Consumer, frame: towpath_ring::Frame) -> Self {
        let payload = queue.payload(&frame);
        let (payload, len) = (payload.as_ptr(), payload.len());
        let header = *frame.header();
        let (sender, interfaces) = (header.sender(), header.interfaces());
        Self {
            payload,
            len,
            time: header.time,
            wire_len: header.wire_len,
            kind: header.kind.0.into(),
            queue: header.group,
            mark: header.mark,
            port: header.port,
            hash: header.hash,
            pid: sender.pid,
            uid: sender.uid,
            gid: sender.gid,
            lost: header.lost.into(),
            ingress: interfaces.ingress,
            egress: interfaces.egress,
            link_type: header.layers.link,
            network: header.layers.network,
            data: header.layers.payload,
            hook: interfaces.hook,
            bridged: interfaces.bridged.into(),
            ticket: frame.into_ticket(),
        }
    }

    fn id(&self) -> towpath_ring::FrameId {
        towpath_ring::FrameId { lane: self.ticket.lane, seq: towpath_ring::Seq(self.ticket.seq) }
    }
}

const NO_INSPECTOR: Failure = Failure::NULL_HANDLE;
const NO_FRAME: Failure = Failure::NULL_FRAME;

fn some(inspector: Option<&mut Inspector>) -> Result<&mut Inspector, Failure> {
    inspector.ok_or(NO_INSPECTOR)
}

fn decide(
    inspector: Option<&mut Inspector>,
    frame: Option<&Frame>,
    decision: Decision<'static>,
) -> Result<c_int, Failure> {
    let queue = &mut some(inspector)?.queue;
    let frame = frame.ok_or(NO_FRAME)?;
    let frame = queue.recall(frame.ticket).ok_or_else(ring::stale)?;
    queue.verdict(frame, decision);
    Ok(0)
}

/// Decodes a verdict: `enum towpath_verdict` in bits 0-7, `TOWPATH_FLOW`, and a queue in bits 16-31.
fn decision(verdict: u32) -> Result<Decision<'static>, Failure> {
    let queue = (verdict >> 16) as u16;
    let named = match verdict as u8 {
        1 => Verdict::Pass,
        2 => Verdict::Drop,
        3 => Verdict::Reject,
        5 => Verdict::Queue(queue),
        6 => Verdict::Repeat,
        7 => Verdict::Hold,
        _ => return Err(Failure::new(Errno::INVAL, "unknown verdict")),
    };
    let flags = verdict & 0xff00;
    if flags & !FLOW != 0 || queue != 0 && !matches!(named, Verdict::Queue(_)) {
        return Err(Failure::new(Errno::INVAL, "unknown bits in the verdict"));
    }
    Ok(Decision { flow: flags & FLOW != 0, ..named.into() })
}

/// Decodes a verdict on several frames.
fn about_many(verdict: u32) -> Result<Decision<'static>, Failure> {
    let decision = decision(verdict)?;
    if decision.verdict == Verdict::Hold {
        return Err(Failure::new(Errno::INVAL, "TOWPATH_HOLD applies to single frames only"));
    }
    Ok(decision)
}
