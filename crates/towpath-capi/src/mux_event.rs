//! `towpath_mux_poll_ended`, `towpath_mux_poll_event`, `towpath_mux_connection_info`: reports on connections and messages.

use std::ffi::{c_char, c_int};
use std::mem::MaybeUninit;
use std::os::fd::IntoRawFd;

use rustix::io::Errno;
use towpath_mux::io::{ConnectionInfo, Ended, Event};
use towpath_mux::mux::{Cause, psock};
use towpath_ring::EndCause;

use crate::error::{Failure, guard};
use crate::metrics::text;
use crate::mux::{Mux, NO_CONNECTION, of, some};
use crate::worker::Connection;

/// `struct towpath_mux_ended`. Texts end with a NUL byte.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct MuxEnded {
    /// The connection.
    pub connection: Connection,
    /// `enum towpath_cause`.
    pub cause: u32,
    /// The errno(3) number.
    pub error: i32,
    /// Ended inside a message: its bytes that had arrived.
    pub bytes: u64,
    /// Ended inside a message: its length; 0 if it was not known.
    pub length: u64,
    /// Replies that were not sent completely.
    pub unsent: u64,
    /// Bytes that belong to no message.
    pub rest: *const u8,
    /// Number of these bytes.
    pub rest_len: usize,
    /// The descriptor of a connection that was given back; -1 for others.
    pub fd: c_int,
    /// 0.
    pub reserved: u32,
    /// Address of the peer.
    pub peer: [c_char; 128],
    /// The cause as text.
    pub text: [c_char; 256],
}

/// `struct towpath_mux_event`. Texts end with a NUL byte.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct MuxEvent {
    /// `enum towpath_mux_event_kind`.
    pub kind: u32,
    /// 0.
    pub reserved: u32,
    /// Undone: its connection.
    pub connection: Connection,
    /// Undone, undelivered: the message.
    pub bytes: *const u8,
    /// Number of its bytes.
    pub len: usize,
    /// Undelivered: bytes that were sent.
    pub sent: u64,
    /// Not attached: address of the peer.
    pub peer: [c_char; 128],
    /// Not attached: the reason.
    pub text: [c_char; 256],
}

/// `struct towpath_connection_info`. Texts end with a NUL byte.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Info {
    /// Address of the peer.
    pub peer: [c_char; 128],
    /// Own address.
    pub local: [c_char; 128],
    /// Address of the listener.
    pub listener: [c_char; 128],
    /// SNI.
    pub server_name: [c_char; 256],
    /// ALPN.
    pub protocol: [c_char; 256],
    /// Names of the client's certificate, separated by newlines.
    pub client_names: [c_char; 1024],
    /// The connection has TLS.
    pub tls: u32,
    /// The client asked for TLS in plaintext.
    pub starttls: u32,
}

/// `TOWPATH_ON_UNDONE`.
pub(crate) const UNDONE: u32 = 1;
/// `TOWPATH_ON_UNDELIVERED`.
pub(crate) const UNDELIVERED: u32 = 2;
/// `TOWPATH_ON_SEND_ROOM`.
pub(crate) const SEND_ROOM: u32 = 3;
/// `TOWPATH_ON_NOT_ATTACHED`.
pub(crate) const NOT_ATTACHED: u32 = 4;

/// See `towpath.h`.
#[unsafe(no_mangle)]
pub extern "C" fn towpath_mux_poll_ended(
    mux: Option<&mut Mux>,
    ended: Option<&mut MaybeUninit<MuxEnded>>,
) -> c_int {
    guard(|| {
        let mux = some(mux)?;
        let into = ended.ok_or(Failure::null("the pointer to the end is NULL"))?;
        let Some(ended) = mux.socket.server().poll_ended() else { return Ok(0) };
        let Ended { psock, peer, cause, socket, rest, unsent, .. } = ended;
        let (bytes, length) = match cause {
            Cause::Inside { bytes, length } => (bytes as u64, length.unwrap_or(0) as u64),
            _ => (0, 0),
        };
        mux.rest = rest.into();
        into.write(MuxEnded {
            connection: psock.into(),
            cause: EndCause::from_name(cause.name()).code(),
            error: cause.errno(),
            bytes,
            length,
            unsent: unsent as u64,
            rest: mux.rest.as_ptr(),
            rest_len: mux.rest.len(),
            fd: socket.map_or(-1, IntoRawFd::into_raw_fd),
            reserved: 0,
            peer: text(&peer.map_or_else(String::new, |peer| peer.to_string())),
            text: text(&cause.to_string()),
        });
        Ok(1)
    })
}

/// See `towpath.h`.
#[unsafe(no_mangle)]
pub extern "C" fn towpath_mux_poll_event(
    mux: Option<&mut Mux>,
    event: Option<&mut MaybeUninit<MuxEvent>>,
) -> c_int {
    guard(|| {
        let mux = some(mux)?;
        let into = event.ok_or(Failure::null("the pointer to the event is NULL"))?;
        let server = mux.socket.server();
        let nothing = MuxEvent {
            kind: 0,
            reserved: 0,
            connection: Connection { index: 0, generation: 0 },
            bytes: std::ptr::null(),
            len: 0,
            sent: 0,
            peer: text(""),
            text: text(""),
        };
        let event = loop {
            break match server.poll_event() {
                None => return Ok(0),
                // Only a driver has workers that leave.
                Some(Event::Left(_)) => continue,
                Some(Event::Undone(message)) => {
                    mux.event = message.bytes().to_vec();
                    MuxEvent { kind: UNDONE, connection: message.psock().into(), ..nothing }
                }
                Some(Event::Undelivered(message)) => {
                    mux.event = message.bytes.into();
                    MuxEvent { kind: UNDELIVERED, sent: message.left as u64, ..nothing }
                }
                Some(Event::WriteSpace) => MuxEvent { kind: SEND_ROOM, ..nothing },
                Some(Event::NotAttached { peer, why }) => {
                    let peer = text(&peer.map_or_else(String::new, |peer| peer.to_string()));
                    MuxEvent { kind: NOT_ATTACHED, peer, text: text(&why), ..nothing }
                }
            };
        };
        into.write(match event.kind {
            UNDONE | UNDELIVERED => MuxEvent { bytes: mux.event.as_ptr(), len: mux.event.len(), ..event },
            _ => event,
        });
        Ok(1)
    })
}

/// See `towpath.h`.
#[unsafe(no_mangle)]
pub extern "C" fn towpath_mux_connection_info(
    mux: Option<&Mux>,
    connection: Option<&Connection>,
    info: Option<&mut MaybeUninit<Info>>,
) -> c_int {
    guard(|| {
        let server = of(mux)?.server();
        let &Connection { index, generation } = connection.ok_or(NO_CONNECTION)?;
        let into = info.ok_or(Failure::null("the pointer to the information is NULL"))?;
        let found = server.connection_info(psock::Id::from_parts(index, generation));
        let ended = Failure::new(Errno::NOENT, "the connection has ended");
        into.write(Info::of(&found.ok_or(ended)?));
        Ok(0)
    })
}

impl Info {
    fn of(info: &ConnectionInfo) -> Self {
        Self {
            peer: text(&info.peer),
            local: text(&info.local),
            listener: text(&info.listener),
            server_name: text(&info.server_name),
            protocol: text(&String::from_utf8_lossy(&info.protocol)),
            client_names: text(&info.client_names.join("\n")),
            tls: info.tls.into(),
            starttls: info.starttls.into(),
        }
    }
}
