//! `towpath_mux_*`: a multiplexor in this process. A handle has the calls of a socket, as in Linux's KCM.

use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::os::fd::IntoRawFd;
use std::time::Duration;

use rustix::io::Errno;
use towpath_mux::assembler::Limits;
use towpath_mux::framing::Framing;
use towpath_mux::io::{Error, Flags, Kind, Server, Socket, To};
use towpath_mux::mux::{Bound, Config, Order, Summary, psock};

use crate::error::{Failure, guard};
use crate::ffi::{Bytes, Room, Text, duplicate};
use crate::framing::{self, not_in_a_framer, parsed};
use crate::metrics::{self, Metric};
use crate::ring::{self, Wait};
use crate::worker::Connection;

/// `towpath_mux`.
#[derive(Debug)]
pub struct Mux {
    pub(crate) socket: Socket,
    /// The framing of connections that are attached without their own.
    pub(crate) framing: Framing,
    connected: bool,
    /// Bytes that `towpath_mux_poll_ended` and `towpath_mux_poll_event` returned last.
    pub(crate) rest: Vec<u8>,
    pub(crate) event: Vec<u8>,
}

/// `struct towpath_mux_message`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Received {
    /// Length of the message from the first byte of this read.
    pub length: usize,
    /// Bytes that the framing strips at the start.
    pub skip: usize,
    /// Bytes that the framing strips at the end.
    pub trim: usize,
    /// The connection.
    pub connection: Connection,
    /// MSG_TRUNC, MSG_EOR.
    pub flags: u32,
    /// The framing's mark.
    pub mark: u32,
    /// The framing's hash.
    pub hash: u32,
    /// 0.
    pub reserved: u32,
}

/// `struct towpath_mux_options`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Options {
    /// Limit on the length of a message.
    pub message_max: u64,
    /// Limit on the bytes of a message before its length is known.
    pub head_max: u64,
    /// Limit on the bytes of a connection's messages that are not done.
    pub connection_bytes: u64,
    /// Bytes not accepted by the peer above which the connection is not read.
    pub send_bytes: u64,
    /// Bytes not accepted by the peer above which the connection ends.
    pub send_most: u64,
    /// Limit on the bytes of the mux.
    pub mux_bytes: u64,
    /// Milliseconds from a message's first byte until its length is known.
    pub head_time: u32,
    /// Milliseconds from then until the message's last byte.
    pub body_time: u32,
    /// Bytes per second that extend `body_time`.
    pub rate: u32,
    /// Limit on milliseconds without traffic.
    pub idle: u32,
    /// Limit on milliseconds without progress of a peer.
    pub send_time: u32,
    /// `enum towpath_order`.
    pub order: u32,
    /// Limit on the messages of a connection that handles hold.
    pub in_flight: u32,
    /// Sticky order: connections above the fewest of a handle from which they move.
    pub rebalance: u32,
}

/// `enum towpath_order`, by number from 1.
pub(crate) const ORDERS: [Order; 5] = [Order::None, Order::Replies, Order::Serial, Order::Sticky, Order::Key];
/// `TOWPATH_CONNECTED`.
pub(crate) const CONNECTED: u32 = 1;
/// `TOWPATH_ROOM`.
pub(crate) const ROOM: u32 = 1;

/// See `towpath.h`.
#[unsafe(no_mangle)]
pub extern "C" fn towpath_mux_socket(
    kind: c_int,
    framing: Text,
    flags: u32,
    mux: Option<&mut MaybeUninit<*mut Mux>>,
) -> c_int {
    guard(|| {
        let framing = parsed(&framing)?.ok_or(NULL_FRAMING)?;
        open(kind, framing, flags, Options::default(), mux)
    })
}

/// See `towpath.h`.
#[unsafe(no_mangle)]
pub extern "C" fn towpath_mux_socket_with(
    kind: c_int,
    framing: Text,
    flags: u32,
    options: Option<&Options>,
    mux: Option<&mut MaybeUninit<*mut Mux>>,
) -> c_int {
    guard(|| {
        let framing = parsed(&framing)?.ok_or(NULL_FRAMING)?;
        open(kind, framing, flags, options.copied().unwrap_or_default(), mux)
    })
}

/// See `towpath.h`.
#[unsafe(no_mangle)]
pub extern "C" fn towpath_mux_socket_framed(
    kind: c_int,
    framing: Option<&framing::Framing>,
    flags: u32,
    options: Option<&Options>,
    mux: Option<&mut MaybeUninit<*mut Mux>>,
) -> c_int {
    guard(|| {
        let framing = framing.ok_or(NULL_FRAMING)?.framing.clone();
        open(kind, framing, flags, options.copied().unwrap_or_default(), mux)
    })
}

/// See `towpath.h`.
#[unsafe(no_mangle)]
pub extern "C" fn towpath_mux_clone(mux: Option<&Mux>, clone: Option<&mut MaybeUninit<*mut Mux>>) -> c_int {
    guard(|| {
        of(mux)?;
        let Mux { socket, framing, connected, .. } = mux.ok_or(Failure::NULL_HANDLE)?;
        let into = clone.ok_or(NULL_OUTPUT)?;
        give(into, Mux::new(socket.try_clone()?, framing.clone(), *connected))
    })
}

/// See `towpath.h`.
#[unsafe(no_mangle)]
pub extern "C" fn towpath_mux_close(mux: Option<Box<Mux>>, timeout: c_int) -> c_int {
    guard(|| {
        let Some(mux) = mux else { return Ok(1) };
        if let Err(refused) = not_in_a_framer() {
            Box::leak(mux);
            return Err(refused);
        }
        match Wait::for_close(timeout) {
            Ok(patience) => Ok(mux.socket.close(patience).into()),
            Err(refused) => {
                // The call failed, so the handle stays valid for the caller.
                Box::leak(mux);
                Err(refused)
            }
        }
    })
}

/// See `towpath.h`.
#[unsafe(no_mangle)]
pub extern "C" fn towpath_mux_attach(
    mux: Option<&Mux>,
    fd: c_int,
    framing: Text,
    connection: Option<&mut MaybeUninit<Connection>>,
) -> c_int {
    guard(|| {
        of(mux)?;
        let mux = mux.ok_or(Failure::NULL_HANDLE)?;
        let framing = parsed(&framing)?.unwrap_or_else(|| mux.framing.clone());
        attach(mux, fd, framing, connection)
    })
}

/// See `towpath.h`.
#[unsafe(no_mangle)]
pub extern "C" fn towpath_mux_attach_framed(
    mux: Option<&Mux>,
    fd: c_int,
    framing: Option<&framing::Framing>,
    connection: Option<&mut MaybeUninit<Connection>>,
) -> c_int {
    guard(|| {
        of(mux)?;
        let mux = mux.ok_or(Failure::NULL_HANDLE)?;
        attach(mux, fd, framing.ok_or(NULL_FRAMING)?.framing.clone(), connection)
    })
}

fn attach(
    mux: &Mux,
    fd: c_int,
    framing: Framing,
    connection: Option<&mut MaybeUninit<Connection>>,
) -> Result<c_int, Failure> {
    let id = mux.socket.attach(duplicate(fd)?, framing)?;
    if let Some(connection) = connection {
        connection.write(id.into());
    }
    Ok(0)
}

/// See `towpath.h`.
#[unsafe(no_mangle)]
pub extern "C" fn towpath_mux_unattach(
    mux: Option<&mut Mux>,
    connection: Option<&Connection>,
    timeout: c_int,
    mut rest: Room<u8>,
    room: usize,
    length: Option<&mut MaybeUninit<usize>>,
) -> c_int {
    guard(|| {
        let mux = some(mux)?;
        let &Connection { index, generation } = connection.ok_or(NO_CONNECTION)?;
        let patience = match Wait::from_millis(timeout)? {
            Wait::Forever => None,
            Wait::Most(patience) => Some(patience),
        };
        let rest = if room > 0 { rest.get(room)? } else { &mut [] };
        let ended = mux.socket.unattach(psock::Id::from_parts(index, generation), patience)?;
        let Some(fd) = ended.socket else {
            return Err(Failure::new(Errno::NOTCONN, format!("the connection has ended: {}", ended.cause)));
        };
        for (into, byte) in rest.iter_mut().zip(&ended.rest) {
            into.write(*byte);
        }
        if let Some(length) = length {
            length.write(ended.rest.len());
        }
        Ok(fd.into_raw_fd())
    })
}

/// See `towpath.h`.
#[unsafe(no_mangle)]
pub extern "C" fn towpath_mux_set_receive(mux: Option<&mut Mux>, receives: c_int) -> c_int {
    guard(|| {
        some(mux)?.socket.set_receive(receives != 0);
        Ok(0)
    })
}

/// See `towpath.h`.
#[unsafe(no_mangle)]
pub extern "C" fn towpath_mux_set_timeouts(mux: Option<&mut Mux>, recv: c_int, send: c_int) -> c_int {
    guard(|| {
        let socket = &mut some(mux)?.socket;
        let (recv, send) = (limit(recv)?, limit(send)?);
        socket.set_recv_timeout(recv);
        socket.set_send_timeout(send);
        Ok(0)
    })
}

/// See `towpath.h`.
#[unsafe(no_mangle)]
pub extern "C" fn towpath_mux_recv(
    mux: Option<&mut Mux>,
    mut buffer: Room<u8>,
    len: usize,
    flags: c_int,
    message: Option<&mut MaybeUninit<Received>>,
) -> c_int {
    guard(|| {
        let socket = &mut some(mux)?.socket;
        let flags = flags_of(flags, Flags::PEEK | Flags::DONTWAIT)?;
        // C's buffer may be uninitialised; only as much as the message needs is zeroed.
        let needs = socket.recv(&mut [], flags | Flags::PEEK)?.length.min(len).min(c_int::MAX as usize);
        let read = socket.recv(buffer.zeroed(needs)?, flags)?;
        if let Some(message) = message {
            message.write(Received {
                length: read.length,
                skip: read.stripped.0,
                trim: read.stripped.1,
                connection: read.ticket.psock.into(),
                flags: read.flags.bits(),
                mark: read.mark,
                hash: read.hash,
                reserved: 0,
            });
        }
        Ok(read.bytes as c_int)
    })
}

/// See `towpath.h`.
#[unsafe(no_mangle)]
pub extern "C" fn towpath_mux_send(
    mux: Option<&mut Mux>,
    to: Option<&Connection>,
    bytes: Bytes,
    len: usize,
    flags: c_int,
) -> c_int {
    guard(|| {
        let Mux { socket, connected, .. } = some(mux)?;
        // The result, an int, could not represent the length.
        if len > c_int::MAX as usize {
            return Err(Failure::new(Errno::MSGSIZE, "a message must be shorter than 2 GiB"));
        }
        let bytes = bytes.get(len)?;
        let flags = flags_of(flags, Flags::MORE | Flags::EOR | Flags::DONTWAIT | Flags::BATCH)?;
        Ok(socket.send(destination(to, *connected), bytes, flags)? as c_int)
    })
}

/// See `towpath.h`.
#[unsafe(no_mangle)]
pub extern "C" fn towpath_mux_fd(mux: Option<&Mux>) -> c_int {
    guard(|| Ok(ring::fd(of(mux)?)))
}

/// See `towpath.h`.
#[unsafe(no_mangle)]
pub extern "C" fn towpath_mux_arm(mux: Option<&mut Mux>, to: Option<&Connection>, flags: u32) -> c_int {
    guard(|| {
        let Mux { socket, connected, .. } = some(mux)?;
        if flags & !ROOM != 0 {
            return Err(Failure::new(Errno::INVAL, "unknown flags"));
        }
        let send = (flags & ROOM != 0).then(|| destination(to, *connected));
        Ok(socket.arm(send).into())
    })
}

/// See `towpath.h`.
#[unsafe(no_mangle)]
pub extern "C" fn towpath_mux_disarm(mux: Option<&mut Mux>) -> c_int {
    guard(|| {
        some(mux)?.socket.disarm();
        Ok(0)
    })
}

/// See `towpath.h`.
#[unsafe(no_mangle)]
pub extern "C" fn towpath_mux_counters(
    mux: Option<&Mux>,
    counters: Option<&mut MaybeUninit<Summary>>,
) -> c_int {
    guard(|| {
        let server = of(mux)?.server();
        let into = counters.ok_or(Failure::null("the pointer to the counters is NULL"))?;
        into.write((&server.show()).into());
        Ok(0)
    })
}

/// See `towpath.h`.
#[unsafe(no_mangle)]
pub extern "C" fn towpath_mux_metrics(mux: Option<&Mux>, mut metrics: Room<Metric>, max: usize) -> c_int {
    guard(|| {
        let server = of(mux)?.server();
        let show = server.show();
        metrics::write(&[&show.totals, &show.psock_totals, &server.accept_stats()], &mut metrics, max)
    })
}

/// See `towpath.h`.
#[unsafe(no_mangle)]
pub extern "C" fn towpath_mux_drain(mux: Option<&Mux>, timeout: c_int) -> c_int {
    guard(|| {
        of(mux)?.server().drain(limit(timeout)?);
        Ok(0)
    })
}

/// See `towpath.h`.
#[unsafe(no_mangle)]
pub extern "C" fn towpath_mux_done(mux: Option<&mut Mux>) -> c_int {
    guard(|| {
        some(mux)?.socket.done();
        Ok(0)
    })
}

/// Linux's numbers of socket types (include/linux/net.h).
mod libc_type {
    pub(super) const DGRAM: u32 = 2;
    pub(super) const SEQPACKET: u32 = 5;
}

const NULL_OUTPUT: Failure = Failure::null("the pointer to the handle is NULL");
const NULL_FRAMING: Failure = Failure::null("the framing is NULL");
pub(crate) const NO_CONNECTION: Failure = Failure::null("the connection is NULL");

fn open(
    kind: c_int,
    framing: Framing,
    flags: u32,
    options: Options,
    mux: Option<&mut MaybeUninit<*mut Mux>>,
) -> Result<c_int, Failure> {
    let into = mux.ok_or(NULL_OUTPUT)?;
    let kind = match kind as u32 {
        libc_type::DGRAM => Kind::Dgram,
        libc_type::SEQPACKET => Kind::Seqpacket,
        _ => {
            return Err(Failure::new(
                Errno::PROTONOSUPPORT,
                "the type of a mux must be SOCK_DGRAM or SOCK_SEQPACKET",
            ));
        }
    };
    if flags & !CONNECTED != 0 {
        return Err(Failure::new(Errno::INVAL, "unknown flags"));
    }
    let order = options.order(&framing)?;
    let connected = flags & CONNECTED != 0;
    if order == Order::Key && !framing.may_have_key() {
        return Err(Failure::new(
            Errno::INVAL,
            "the framing gives no key: add key=OFFSET:LENGTH to its clauses",
        ));
    }
    let config = Config { connected, ..options.config(order) };
    let server = Server::with_limits(framing.clone(), options.limits(), config)?;
    give(into, Mux::new(server.socket(kind)?, framing, connected))
}

impl Mux {
    const fn new(socket: Socket, framing: Framing, connected: bool) -> Self {
        Self { socket, framing, connected, rest: Vec::new(), event: Vec::new() }
    }
}

impl Options {
    fn limits(&self) -> Limits {
        let defaults = Limits::default();
        Limits {
            head: bytes(self.head_max).unwrap_or(defaults.head),
            message: bytes(self.message_max).unwrap_or(defaults.message),
            head_time: millis(self.head_time),
            body_time: millis(self.body_time),
            rate: self.rate,
            part: 0,
        }
    }

    /// The order; 0 selects that of the framing.
    fn order(&self, framing: &Framing) -> Result<Order, Failure> {
        let Some(at) = self.order.checked_sub(1) else { return Ok(framing.order()) };
        let order = ORDERS.get(at as usize).copied();
        order.ok_or(Failure::new(Errno::INVAL, "order is none of enum towpath_order"))
    }

    fn config(&self, order: Order) -> Config {
        let defaults = Config::new(order);
        let defaults = bytes(self.message_max).map_or(defaults, |bytes| defaults.for_messages(bytes));
        Config {
            psock_bytes: bytes(self.connection_bytes).map_or(defaults.psock_bytes, Bound::of),
            send_bytes: bytes(self.send_bytes).map_or(defaults.send_bytes, Bound::of),
            send_most: bytes(self.send_most).unwrap_or(defaults.send_most),
            mux_bytes: bytes(self.mux_bytes).map_or(defaults.mux_bytes, Bound::of),
            in_flight: count(self.in_flight),
            rebalance: count(self.rebalance),
            idle: millis(self.idle),
            send_time: match self.send_time {
                0 => defaults.send_time,
                u32::MAX => None,
                time => millis(time),
            },
            ..defaults
        }
    }
}

/// The value of an option; `None` selects the default.
fn bytes(option: u64) -> Option<usize> {
    (option > 0).then(|| usize::try_from(option).unwrap_or(usize::MAX))
}

/// The value of an option that is a number of things; `None` selects the default, and UINT32_MAX is no limit.
fn count(option: u32) -> Option<usize> {
    match option {
        0 => None,
        u32::MAX => Some(usize::MAX),
        count => Some(count as usize),
    }
}

fn millis(option: u32) -> Option<Duration> {
    (option > 0).then(|| Duration::from_millis(option.into()))
}

pub(crate) fn some(mux: Option<&mut Mux>) -> Result<&mut Mux, Failure> {
    not_in_a_framer()?;
    mux.ok_or(Failure::NULL_HANDLE)
}

pub(crate) fn of(mux: Option<&Mux>) -> Result<&Socket, Failure> {
    not_in_a_framer()?;
    Ok(&mux.ok_or(Failure::NULL_HANDLE)?.socket)
}

/// A text in UTF-8.
pub(crate) fn text_of<'a>(text: &'a Text, what: &str) -> Result<&'a str, Failure> {
    let found = text.get().and_then(|text| text.to_str());
    found.ok_or_else(|| Failure::new(Errno::INVAL, format!("{what} is NULL or not valid UTF-8")))
}

/// The destination of a message.
fn destination(to: Option<&Connection>, connected: bool) -> To {
    match to {
        Some(&Connection { index, generation }) => To::Psock(psock::Id::from_parts(index, generation)),
        None if connected => To::Any,
        None => To::Requester,
    }
}

fn give(into: &mut MaybeUninit<*mut Mux>, mux: Mux) -> Result<c_int, Failure> {
    into.write(Box::into_raw(Box::new(mux)));
    Ok(0)
}

fn flags_of(flags: c_int, known: Flags) -> Result<Flags, Failure> {
    let flags = Flags::from_bits(flags as u32).filter(|flags| known.contains(*flags));
    flags.ok_or_else(|| Failure::new(Errno::INVAL, "flags that this call does not support"))
}

fn limit(timeout: c_int) -> Result<Option<Duration>, Failure> {
    Ok(match Wait::from_millis(timeout)? {
        Wait::Forever => None,
        Wait::Most(timeout) => Some(timeout),
    })
}

impl From<psock::Id> for Connection {
    fn from(id: psock::Id) -> Self {
        let (index, generation) = id.parts();
        Self { index, generation }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::of_errno(error.errno(), error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zero_selects_the_default_of_each_option() {
        let none = Options::default();
        let default = Config::new(Order::Serial);
        assert_eq!((none.limits(), none.config(Order::Serial)), (Limits::default(), default));
        let smtp = Framing::preset("smtp").unwrap();
        assert_eq!(none.order(&smtp).unwrap(), Order::Sticky);
        let all = Options {
            message_max: 1 << 30,
            head_max: 2,
            connection_bytes: 30,
            send_bytes: 40,
            send_most: 0,
            mux_bytes: 60,
            head_time: 7,
            body_time: 8,
            rate: 9,
            idle: 10,
            send_time: 11,
            order: 1,
            in_flight: 12,
            rebalance: 13,
        };
        let [seven, eight, ten, eleven] = [7, 8, 10, 11].map(|time| Some(Duration::from_millis(time)));
        let limits =
            Limits { head: 2, message: 1 << 30, head_time: seven, body_time: eight, rate: 9, part: 0 };
        assert_eq!(all.limits(), limits);
        let config = Config {
            psock_bytes: Bound { high: 30, low: 15 },
            send_bytes: Bound { high: 40, low: 20 },
            // Room for answers of the same length.
            send_most: 2 << 30,
            mux_bytes: Bound { high: 60, low: 30 },
            in_flight: Some(12),
            rebalance: Some(13),
            idle: ten,
            send_time: eleven,
            ..default
        };
        assert_eq!(all.config(Order::Serial), config);
        assert_eq!(all.order(&smtp).unwrap(), Order::None);
        let others = Options { send_most: 50, send_time: u32::MAX, in_flight: u32::MAX, ..all };
        let unlimited = Config { send_most: 50, send_time: None, in_flight: Some(usize::MAX), ..config };
        assert_eq!(others.config(Order::Serial), unlimited);
    }
}
