//! `towpath_worker_*`: a worker process receives the messages of a mux's connections and answers them.

use std::ffi::{OsStr, c_int, c_uint, c_void};
use std::mem::MaybeUninit;

use rustix::io::Errno;
use towpath_ring::{BATCH_MAX, Options, Reply, ReserveError, Ticket, View};

use crate::error::{Failure, guard};
use crate::ffi::{Bytes, Room, Text};
use crate::metrics::{self, Metric};
use crate::ring::{self, RingStats, Wait};

/// `towpath_worker`.
#[derive(Debug)]
pub struct Worker {
    worker: towpath_ring::Worker,
    /// The message that `towpath_worker_poll_unsent` returned last.
    unsent: Vec<u8>,
}

/// `struct towpath_connection`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Connection {
    /// Index of the connection.
    pub index: u32,
    /// Distinguishes the connections that have had this index.
    pub generation: u32,
}

/// `struct towpath_message`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Message {
    /// The bytes; valid until the message is done.
    pub bytes: *const u8,
    /// Number of bytes.
    pub len: usize,
    /// The message without the framing's header or delimiter.
    pub payload: *const u8,
    /// Number of bytes of the payload.
    pub payload_len: usize,
    /// Nanoseconds since the epoch.
    pub time: u64,
    /// Its connection.
    pub connection: Connection,
    /// The framing's mark.
    pub mark: u32,
    /// Hash of the ordering key; 0 without.
    pub hash: u32,
    /// Number of the part, from 1; 0: a whole message.
    pub part: u32,
    /// 1: another part follows.
    pub more: u16,
    /// 1: the rest of the message does not come.
    pub cut: u16,
    /// Identifies the message to the library.
    pub ticket: Ticket,
}

/// `struct towpath_unsent`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Unsent {
    /// Destination; generation 0 for any connection.
    pub connection: Connection,
    /// The message; valid until the next call.
    pub bytes: *const u8,
    /// Number of bytes.
    pub len: usize,
    /// Why it was not sent, as an errno(3) number.
    pub error: i32,
    /// 0.
    pub reserved: u32,
}

/// `towpath_work`.
pub type Work = extern "C" fn(&Message, &mut Reply, *mut c_void);

/// See `towpath.h`.
#[unsafe(no_mangle)]
pub extern "C" fn towpath_worker_attach(
    path: Text,
    name: Text,
    worker: Option<&mut MaybeUninit<*mut Worker>>,
) -> c_int {
    guard(|| {
        let into = worker.ok_or(Failure::null("the pointer to the worker is NULL"))?;
        let (path, options) = ring::attach_target(path.get(), name.get())?;
        into.write(Worker::attach(&path, &options)?);
        Ok(0)
    })
}

/// See `towpath.h`.
#[unsafe(no_mangle)]
pub extern "C" fn towpath_worker_close(worker: Option<Box<Worker>>) {
    guard(|| {
        if let Some(worker) = worker {
            worker.worker.close();
        }
        Ok(0)
    });
}

/// See `towpath.h`.
#[unsafe(no_mangle)]
pub extern "C" fn towpath_worker_recv(
    worker: Option<&mut Worker>,
    message: Option<&mut MaybeUninit<Message>>,
    timeout: c_int,
) -> c_int {
    guard(|| {
        let worker = some(worker)?;
        let into = message.ok_or(NO_MESSAGE)?;
        let received = match Wait::from_millis(timeout)? {
            Wait::Forever => worker.recv()?,
            Wait::Most(timeout) => worker.recv_timeout(timeout)?,
        };
        let Some(message) = received else { return ring::nothing(worker.queue()) };
        into.write(Message::new(worker, message));
        Ok(1)
    })
}

/// See `towpath.h`.
#[unsafe(no_mangle)]
pub extern "C" fn towpath_worker_reply(
    worker: Option<&mut Worker>,
    message: Option<&Message>,
    bytes: Bytes,
    len: usize,
) -> c_int {
    answer(worker, message, bytes, len, towpath_ring::Worker::reply)
}

/// See `towpath.h`.
#[unsafe(no_mangle)]
pub extern "C" fn towpath_worker_reply_part(
    worker: Option<&mut Worker>,
    message: Option<&Message>,
    bytes: Bytes,
    len: usize,
) -> c_int {
    answer(worker, message, bytes, len, towpath_ring::Worker::reply_part)
}

/// Sends an answer, or a part of one, by `send`.
fn answer(
    worker: Option<&mut Worker>,
    message: Option<&Message>,
    bytes: Bytes,
    len: usize,
    send: fn(&mut towpath_ring::Worker, &towpath_ring::Message, &[u8]) -> Result<(), ReserveError>,
) -> c_int {
    guard(|| {
        let (worker, message) = recall(worker, message)?;
        let bytes = bytes.get(len)?;
        send(worker, &message, bytes)?;
        Ok(0)
    })
}

/// See `towpath.h`.
#[unsafe(no_mangle)]
pub extern "C" fn towpath_worker_done(worker: Option<&mut Worker>, message: Option<&Message>) -> c_int {
    guard(|| {
        let (worker, message) = recall(worker, message)?;
        worker.done(message);
        Ok(0)
    })
}

/// See `towpath.h`.
#[unsafe(no_mangle)]
pub extern "C" fn towpath_worker_send(
    worker: Option<&mut Worker>,
    connection: Option<&Connection>,
    bytes: Bytes,
    len: usize,
) -> c_int {
    guard(|| {
        let worker = some(worker)?;
        let bytes = bytes.get(len)?;
        match connection {
            Some(&Connection { index, generation }) => {
                worker.forward(towpath_ring::Connection { index, generation }, bytes)?;
            }
            None => worker.send(bytes)?,
        }
        Ok(0)
    })
}

/// See `towpath.h`.
#[unsafe(no_mangle)]
pub extern "C" fn towpath_worker_poll_unsent(
    worker: Option<&mut Worker>,
    unsent: Option<&mut MaybeUninit<Unsent>>,
) -> c_int {
    guard(|| {
        let worker = worker.ok_or(Failure::NULL_HANDLE)?;
        let into = unsent.ok_or(Failure::null("the pointer to the unsent message is NULL"))?;
        let Some(towpath_ring::Unsent { connection, errno, bytes }) = worker.worker.poll_unsent() else {
            return Ok(0);
        };
        worker.unsent = bytes;
        into.write(Unsent {
            connection: connection.map_or(Connection { index: 0, generation: 0 }, Connection::from),
            bytes: worker.unsent.as_ptr(),
            len: worker.unsent.len(),
            error: errno,
            reserved: 0,
        });
        Ok(1)
    })
}

/// See `towpath.h`.
#[unsafe(no_mangle)]
pub extern "C" fn towpath_worker_serve(
    worker: Option<&mut Worker>,
    at_once: c_uint,
    work: Option<Work>,
    context: *mut c_void,
) -> c_int {
    guard(|| {
        let worker = some(worker)?;
        let work = work.ok_or(Failure::null("the function is NULL"))?;
        let at_once = at_once as usize;
        if !(1..=BATCH_MAX).contains(&at_once) {
            return Err(Failure::new(Errno::INVAL, "at_once must be 1 to 64"));
        }
        worker.set_taking(at_once);
        worker.serve(|view, reply| work(&Message::of(&view), reply, context))?;
        Ok(0)
    })
}

/// See `towpath.h`.
#[unsafe(no_mangle)]
pub extern "C" fn towpath_reply_append(reply: Option<&mut Reply>, bytes: Bytes, len: usize) -> c_int {
    guard(|| {
        let reply = reply.ok_or(Failure::null("the reply is NULL"))?;
        let bytes = bytes.get(len)?;
        reply.extend_from_slice(bytes);
        Ok(0)
    })
}

/// See `towpath.h`.
#[unsafe(no_mangle)]
pub extern "C" fn towpath_worker_flush(worker: Option<&mut Worker>) -> c_int {
    guard(|| {
        some(worker)?.queue().flush();
        Ok(0)
    })
}

/// See `towpath.h`.
#[unsafe(no_mangle)]
pub extern "C" fn towpath_worker_fd(worker: Option<&Worker>) -> c_int {
    guard(|| Ok(ring::fd(&worker.ok_or(Failure::NULL_HANDLE)?.worker)))
}

/// See `towpath.h`.
#[unsafe(no_mangle)]
pub extern "C" fn towpath_worker_arm(worker: Option<&mut Worker>) -> c_int {
    guard(|| Ok(some(worker)?.queue().arm().into()))
}

/// See `towpath.h`.
#[unsafe(no_mangle)]
pub extern "C" fn towpath_worker_disarm(worker: Option<&mut Worker>) -> c_int {
    guard(|| {
        some(worker)?.queue().disarm()?;
        Ok(0)
    })
}

/// See `towpath.h`.
#[unsafe(no_mangle)]
pub extern "C" fn towpath_worker_metrics(
    worker: Option<&Worker>,
    mut metrics: Room<Metric>,
    max: usize,
) -> c_int {
    guard(|| {
        let worker = worker.ok_or(Failure::NULL_HANDLE)?;
        metrics::write(&[&worker.worker.stats()], &mut metrics, max)
    })
}

/// See `towpath.h`.
#[unsafe(no_mangle)]
pub extern "C" fn towpath_worker_stats(
    worker: Option<&Worker>,
    stats: Option<&mut MaybeUninit<RingStats>>,
) -> c_int {
    guard(|| {
        let worker = worker.ok_or(Failure::NULL_HANDLE)?;
        let stats = stats.ok_or(Failure::null("the pointer to the statistics is NULL"))?;
        stats.write(worker.worker.stats().into());
        Ok(0)
    })
}

impl Worker {
    /// Attaches, and returns a handle.
    pub(crate) fn attach(path: &OsStr, options: &Options) -> Result<*mut Self, Failure> {
        let mut worker = towpath_ring::Worker::attach(path, options)?;
        worker.queue().set_interruptible(true);
        Ok(Box::into_raw(Box::new(Self { worker, unsent: Vec::new() })))
    }
}

impl Message {
    pub(crate) fn new(worker: &towpath_ring::Worker, message: towpath_ring::Message) -> Self {
        let (bytes, payload) = (worker.bytes(&message), worker.payload(&message));
        Self {
            bytes: bytes.as_ptr(),
            len: bytes.len(),
            payload: payload.as_ptr(),
            payload_len: payload.len(),
            time: message.time(),
            connection: message.connection().into(),
            mark: message.mark(),
            hash: message.hash(),
            part: message.part(),
            more: message.more().into(),
            cut: message.is_cut().into(),
            ticket: message.into_ticket(),
        }
    }

    /// A message that is done when the callback returns; its ticket is invalid.
    fn of(view: &View<'_>) -> Self {
        let (bytes, payload) = (view.bytes(), view.payload());
        Self {
            bytes: bytes.as_ptr(),
            len: bytes.len(),
            payload: payload.as_ptr(),
            payload_len: payload.len(),
            time: view.time(),
            connection: view.connection().into(),
            mark: view.mark(),
            hash: view.hash(),
            part: view.part(),
            more: view.more().into(),
            cut: view.is_cut().into(),
            ticket: Ticket { lane: u32::MAX, seq: 0, at: 0 },
        }
    }
}

impl From<towpath_ring::Connection> for Connection {
    fn from(connection: towpath_ring::Connection) -> Self {
        let towpath_ring::Connection { index, generation } = connection;
        Self { index, generation }
    }
}

pub(crate) const NO_MESSAGE: Failure = Failure::NULL_FRAME;

pub(crate) fn some(worker: Option<&mut Worker>) -> Result<&mut towpath_ring::Worker, Failure> {
    Ok(&mut worker.ok_or(Failure::NULL_HANDLE)?.worker)
}

pub(crate) fn recall<'a>(
    worker: Option<&'a mut Worker>,
    message: Option<&Message>,
) -> Result<(&'a mut towpath_ring::Worker, towpath_ring::Message), Failure> {
    let worker = some(worker)?;
    let message = message.ok_or(NO_MESSAGE)?;
    let message = worker.recall(message.ticket).ok_or_else(ring::stale)?;
    Ok((worker, message))
}
