//! `towpath_worker_recv_event`: messages, and opened and ended connections.

use std::ffi::{c_char, c_int, c_uint};
use std::mem::MaybeUninit;
use std::ptr;

use rustix::io::Errno;
use towpath_ring::{EndedInfo, Event, Kind, OpenedInfo, Reply, ReserveError, Ticket};

use crate::error::{Failure, guard};
use crate::ffi::Text;
use crate::metrics::text;
use crate::ring::{self, Wait};
use crate::worker::{Connection, Message, NO_MESSAGE, Worker, recall, some};

/// `TOWPATH_EVENTS`.
pub(crate) const EVENTS: c_uint = 1;
/// `TOWPATH_PARTS`.
pub(crate) const PARTS: c_uint = 2;

/// `struct towpath_worker_event`. Texts end with a NUL byte.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct WorkerEvent {
    /// `enum towpath_worker_event_kind`.
    pub kind: u32,
    /// Opened: messages were received or sent before.
    pub resumed: u16,
    /// Opened: the connection has TLS.
    pub tls: u8,
    /// Opened: the client asked for TLS in plaintext.
    pub starttls: u8,
    /// The message. An event has a message without bytes, which stands for it in replies.
    pub message: Message,
    /// Opened: address of the peer.
    pub peer: [c_char; 128],
    /// Opened: own address.
    pub local: [c_char; 128],
    /// Opened: address of the listener.
    pub listener: [c_char; 128],
    /// Opened: SNI.
    pub server_name: [c_char; 256],
    /// Opened: ALPN.
    pub protocol: [c_char; 256],
    /// Opened: names of the client's certificate, separated by newlines.
    pub client_names: [c_char; 1024],
    /// Ended: `enum towpath_cause`.
    pub cause: u32,
    /// Ended: the errno(3) number.
    pub error: i32,
    /// Ended inside a message: its bytes that had arrived.
    pub bytes: u64,
    /// Ended inside a message: its length; 0 if it was not known.
    pub length: u64,
    /// Ended: the cause as text.
    pub text: [c_char; 256],
}

/// See `towpath.h`.
#[unsafe(no_mangle)]
pub extern "C" fn towpath_worker_attach_with(
    path: Text,
    name: Text,
    flags: c_uint,
    worker: Option<&mut MaybeUninit<*mut Worker>>,
) -> c_int {
    guard(|| {
        let into = worker.ok_or(Failure::null("the pointer to the worker is NULL"))?;
        if flags & !(EVENTS | PARTS) != 0 {
            return Err(Failure::new(Errno::INVAL, "flags has undefined bits"));
        }
        let (path, mut options) = ring::attach_target(path.get(), name.get())?;
        options.events = flags & EVENTS != 0;
        options.parts = flags & PARTS != 0;
        into.write(Worker::attach(&path, &options)?);
        Ok(0)
    })
}

/// See `towpath.h`.
#[unsafe(no_mangle)]
pub extern "C" fn towpath_worker_recv_event(
    worker: Option<&mut Worker>,
    event: Option<&mut MaybeUninit<WorkerEvent>>,
    timeout: c_int,
) -> c_int {
    guard(|| {
        let worker = some(worker)?;
        let into = event.ok_or(Failure::null("the pointer to the event is NULL"))?;
        let received = match Wait::from_millis(timeout)? {
            Wait::Forever => worker.recv_event()?,
            Wait::Most(timeout) => worker.recv_event_timeout(timeout)?,
        };
        let Some(event) = received else { return ring::nothing(worker.queue()) };
        into.write(match event {
            Event::Opened(opened) => WorkerEvent::opened(Message::new(worker, opened.message), &opened.info),
            Event::Message(message) => WorkerEvent::of(Kind::MESSAGE, Message::new(worker, message)),
            Event::Ended(ended) => {
                WorkerEvent::ended(empty(ended.connection.into(), ended.time), &ended.info)
            }
        });
        Ok(1)
    })
}

/// See `towpath.h`.
#[unsafe(no_mangle)]
pub extern "C" fn towpath_worker_close_after(
    worker: Option<&mut Worker>,
    message: Option<&Message>,
) -> c_int {
    guard(|| {
        let of = message.map(|message| message.connection);
        let (worker, message) = recall(worker, message)?;
        let Connection { index, generation } = of.ok_or(NO_MESSAGE)?;
        worker.close_after_on(towpath_ring::Connection { index, generation }, &message)?;
        Ok(0)
    })
}

/// See `towpath.h`.
#[unsafe(no_mangle)]
pub extern "C" fn towpath_worker_close_connection(
    worker: Option<&mut Worker>,
    connection: Option<&Connection>,
) -> c_int {
    end(worker, connection, towpath_ring::Worker::close_connection)
}

/// See `towpath.h`.
#[unsafe(no_mangle)]
pub extern "C" fn towpath_worker_reset_connection(
    worker: Option<&mut Worker>,
    connection: Option<&Connection>,
) -> c_int {
    end(worker, connection, towpath_ring::Worker::reset_connection)
}

fn end(
    worker: Option<&mut Worker>,
    connection: Option<&Connection>,
    end: fn(&mut towpath_ring::Worker, towpath_ring::Connection) -> Result<(), ReserveError>,
) -> c_int {
    guard(|| {
        let worker = some(worker)?;
        let connection = connection.ok_or(NO_MESSAGE)?;
        let &Connection { index, generation } = connection;
        end(worker, towpath_ring::Connection { index, generation })?;
        Ok(0)
    })
}

/// See `towpath.h`.
#[unsafe(no_mangle)]
pub extern "C" fn towpath_reply_close(reply: Option<&mut Reply>) -> c_int {
    guard(|| {
        reply.ok_or(Failure::null("the reply is NULL"))?.close();
        Ok(0)
    })
}

/// See `towpath.h`.
#[unsafe(no_mangle)]
pub extern "C" fn towpath_reply_reset(reply: Option<&mut Reply>) -> c_int {
    guard(|| {
        reply.ok_or(Failure::null("the reply is NULL"))?.reset();
        Ok(0)
    })
}

/// The message of an ended event: its ticket is invalid.
fn empty(connection: Connection, time: u64) -> Message {
    Message {
        bytes: ptr::null(),
        len: 0,
        payload: ptr::null(),
        payload_len: 0,
        time,
        connection,
        mark: 0,
        hash: 0,
        part: 0,
        more: 0,
        cut: 0,
        ticket: Ticket { lane: u32::MAX, seq: 0, at: 0 },
    }
}

impl WorkerEvent {
    fn of(kind: Kind, message: Message) -> Self {
        Self {
            kind: kind.0.into(),
            resumed: 0,
            tls: 0,
            starttls: 0,
            message,
            peer: text(""),
            local: text(""),
            listener: text(""),
            server_name: text(""),
            protocol: text(""),
            client_names: text(""),
            cause: 0,
            error: 0,
            bytes: 0,
            length: 0,
            text: text(""),
        }
    }

    fn opened(message: Message, info: &OpenedInfo) -> Self {
        Self {
            resumed: info.resumed.into(),
            tls: info.tls.into(),
            starttls: info.starttls.into(),
            peer: text(&info.peer),
            local: text(&info.local),
            listener: text(&info.listener),
            server_name: text(&info.server_name),
            protocol: text(&String::from_utf8_lossy(&info.protocol)),
            client_names: text(&info.client_names.join("\n")),
            ..Self::of(
                Kind::OPENED,
                Message { bytes: ptr::null(), len: 0, payload: ptr::null(), payload_len: 0, ..message },
            )
        }
    }

    fn ended(message: Message, info: &EndedInfo) -> Self {
        Self {
            cause: info.cause.code(),
            error: info.errno,
            bytes: info.bytes,
            length: info.length.unwrap_or(0),
            text: text(&info.text),
            ..Self::of(Kind::ENDED, message)
        }
    }
}
