//! Handles with the calls of Linux's KCM sockets: each datagram or packet is a message.
//!
//! What: a [`Socket`] is a worker of the mux, for one thread. A clone is another worker. [`Socket::recv`]
//! returns the next message of any connection. [`Socket::send`] sends one to the requester, to a named
//! connection, or, if `Config::connected` is set (all connections lead to equivalent peers), to the
//! connection with the fewest bytes to send. A thread of the server (`workqueue.rs`) reads and writes the
//! connections independently of calls.
//!
//! Differences from KCM's sockets: a message waits for the next socket that calls `recv`, not behind a busy
//! one; a reply goes to the connection of its request; a packet longer than the buffer loses nothing; closing
//! sends all queued messages.
//!
//! A message is done at the next `recv`, or when the socket is closed. Until then it can be answered, counts
//! against the bounds of the mux, and goes to another socket if the thread panics.
//!
//! Event loops wait for the socket's descriptor ([`Socket::arm`]).

mod arm;
mod error;
mod flags;
mod gather;
mod receive;
mod send;
mod unread;
mod workqueue;

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use rustix::event::{EventfdFlags, eventfd};

use super::state::{Mode, Work, WorkerSlot};
use super::{Ended, Server, Shared};
use crate::framing::Framing;
use crate::mux::{Message, Ticket, psock, worker};
use gather::Gather;

pub use error::Error;
pub use flags::Flags;

/// Maximum time to send queued messages after the last socket is dropped.
const LINGER: Duration = Duration::from_secs(30);

/// The rule for the end of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// SOCK_DGRAM: each send is a message unless [`Flags::MORE`] is set. A read shorter than the message
    /// drops the rest.
    Dgram,
    /// SOCK_SEQPACKET: [`Flags::EOR`] ends a message. A read shorter than the message leaves the rest for the
    /// next read.
    Seqpacket,
}

/// Destination of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum To {
    /// Connected mode: the connection with the fewest bytes to send.
    Any,
    /// The connection of the last message read, as a reply to it.
    Requester,
    /// The connection of any message read and not done, as a reply to it.
    Message(Ticket),
    /// This connection.
    Psock(psock::Id),
}

/// Result of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Received {
    /// Number of bytes in the buffer.
    pub bytes: usize,
    /// Length of the message from the first of these bytes on: the real length of a datagram.
    pub length: usize,
    /// [`Flags::TRUNC`] if the rest was dropped, [`Flags::EOR`] if these bytes end the message.
    pub flags: Flags,
    /// The message, for [`To::Message`]; names its connection.
    pub ticket: Ticket,
    /// The framing's mark; 0 without one.
    pub mark: u32,
    /// The framing's hash; 0 without one.
    pub hash: u32,
    /// Number of bytes that the framing strips at the front and at the end. They are read with the message.
    pub stripped: (usize, usize),
}

/// A handle of a mux with the calls of a KCM socket, for one thread. See the documentation of [`super`].
///
/// # Examples
///
/// A server that returns lines in capitals. The example `socket` has several threads.
///
/// ```
/// use std::io::{Read, Write};
/// use towpath_mux::io::{Flags, Kind, Server, To};
/// use towpath_mux::mux::{Config, Order};
///
/// let server = Server::new("line".parse()?, Config::new(Order::Replies))?;
/// let address = server.listen("127.0.0.1:0")?;
/// let mut socket = server.socket(Kind::Dgram)?;
///
/// let mut client = std::net::TcpStream::connect(address)?;
/// client.write_all(b"hello\n")?;
///
/// let mut buffer = [0; 1024];
/// let message = socket.recv(&mut buffer, Flags::empty())?;
/// buffer[..message.bytes].make_ascii_uppercase();
/// socket.send(To::Requester, &buffer[..message.bytes], Flags::empty())?;
///
/// let mut answer = [0; 6];
/// client.read_exact(&mut answer)?;
/// assert_eq!(&answer, b"HELLO\n");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Socket {
    shared: Arc<Shared>,
    id: worker::Id,
    kind: Kind,
    /// The eventfd(2) to poll.
    eventfd: Arc<OwnedFd>,
    gather: Gather,
    /// Messages to send together with the next one.
    batch: VecDeque<(To, Bytes)>,
    /// Error of a batched message, for the next call.
    error: Option<Error>,
    /// The message being read, and the number of bytes read.
    current: Option<(Message, usize)>,
    /// The next messages while one call reads several; otherwise empty.
    next: VecDeque<Message>,
    room: Vec<Message>,
    /// Messages that were read, wholly or in part, and are not done.
    held: Vec<Ticket>,
    /// The message that was answered last.
    answered: Option<Ticket>,
    /// `receives`: false after `set_receive(false)`. `attends`: the worker is enabled in `mux::Mux`; `recv`
    /// and `arm` enable it.
    receives: bool,
    attends: bool,
    recv_timeout: Option<Duration>,
    send_timeout: Option<Duration>,
}

impl Server {
    /// Opens a socket (KCM's socket(2)). The first one starts the thread that has the connections. Closing
    /// the last one drains the mux.
    ///
    /// # Errors
    ///
    /// Fails if the server has a [`super::Driver`] or [`super::Worker`]s, if it drains, or if the thread or
    /// the eventfd cannot be created.
    pub fn socket(&self, kind: Kind) -> io::Result<Socket> {
        let shared = Arc::clone(&self.shared);
        let eventfd = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let now = shared.now();
        let mut state = shared.lock();
        if state.mux.is_draining() || state.closed {
            return Err(io::Error::new(io::ErrorKind::NotConnected, "the mux drains"));
        }
        if state.mode.is_driver() || state.mode == Mode::Workers && !state.workers.is_empty() {
            return Err(io::Error::new(
                io::ErrorKind::AlreadyExists,
                "the server has a driver or workers; sockets need a server without them",
            ));
        }
        if state.mode == Mode::Workers {
            workqueue::start(&shared)?;
        }
        state.mode.open_socket();
        let id = state.mux.clone_worker(usize::MAX, now);
        state.workers.insert(
            id,
            WorkerSlot { eventfd: Some(Arc::clone(&eventfd)), ..WorkerSlot::new(Arc::default()) },
        );
        // The worker stays disabled in `mux::Mux` until the first `recv` or `arm`, so it gets no messages.
        state.mux.disable(id, true, now);
        state.mux.poll_messages(id, now, &mut Vec::new());
        let most = state.mux.config().send_most;
        drop(state);
        Ok(Socket {
            shared,
            id,
            kind,
            eventfd,
            gather: Gather::new(kind, most),
            batch: VecDeque::new(),
            error: None,
            current: None,
            next: VecDeque::new(),
            room: Vec::new(),
            held: Vec::new(),
            answered: None,
            receives: true,
            attends: false,
            recv_timeout: None,
            send_timeout: None,
        })
    }
}

impl Socket {
    /// Opens another socket of the same mux and kind (KCM's SIOCKCMCLONE).
    ///
    /// # Errors
    ///
    /// As [`Server::socket`].
    pub fn try_clone(&self) -> io::Result<Self> {
        self.server().socket(self.kind)
    }

    /// The server: listeners, outbound connections, counters, ended connections.
    pub fn server(&self) -> Server {
        Server { shared: Arc::clone(&self.shared) }
    }

    /// The worker's id in the core.
    pub const fn id(&self) -> worker::Id {
        self.id
    }

    /// The rule for the end of a message.
    pub const fn kind(&self) -> Kind {
        self.kind
    }

    /// Attaches a connected stream socket with a framing (KCM's SIOCKCMATTACH) and makes it non-blocking.
    ///
    /// # Errors
    ///
    /// [`Error::Drained`] if the mux drains; [`Error::Io`] if epoll refuses the descriptor.
    pub fn attach(&self, socket: impl Into<OwnedFd>, framing: Framing) -> Result<psock::Id, Error> {
        let server = self.server();
        if server.look(crate::mux::Mux::is_draining) {
            return Err(Error::Drained);
        }
        Ok(server.attach_framed(socket, framing, &[])?)
    }

    /// Unattaches a connection (KCM's SIOCKCMUNATTACH). Waits until its messages are done and answered, for
    /// up to `patience`. Completes the messages that this socket holds. The result has the descriptor and the
    /// bytes read after the last message; no descriptor if the connection ended otherwise ([`Ended::cause`]).
    ///
    /// # Errors
    ///
    /// [`Error::NotAttached`].
    pub fn unattach(&mut self, id: psock::Id, patience: Option<Duration>) -> Result<Ended, Error> {
        let shared = Arc::clone(&self.shared);
        let mut first = true;
        // Moves a partly read or peeked message of this connection to `held`, so that `finish` completes it;
        // otherwise unattach would wait for it.
        let current = self.current.take_if(|(message, _)| message.ticket().psock == id);
        if let Some(ticket) = current.map(|(message, _)| message.ticket())
            && !self.held.contains(&ticket)
        {
            self.held.push(ticket);
        }
        loop {
            let mut work = Work::default();
            let mut state = shared.lock();
            state.remove_waiter();
            let now = shared.now();
            let before = (self.held.len(), self.batch.len());
            self.finish(&mut state, now);
            let changed = first || (self.held.len(), self.batch.len()) != before;
            if std::mem::take(&mut first) {
                state.mux.unattach(id, patience.map(|patience| now + patience), now);
            }
            if changed {
                state.pump(&shared, &mut work);
            } else {
                state.pump_quietly(&shared, &mut work);
            }
            let ended = state.notices.take_ended(id);
            let waits = ended.is_none() && state.sockets.contains_key(id) && !state.closed;
            if waits {
                state.waiters.push(std::thread::current());
            }
            drop(state);
            shared.perform(work);
            if !waits {
                return ended.ok_or(Error::NotAttached);
            }
            std::thread::park();
        }
    }

    /// Timeout of [`Socket::recv`] (SO_RCVTIMEO), after which it returns [`Error::WouldBlock`]. `None`: no
    /// limit.
    pub const fn set_recv_timeout(&mut self, timeout: Option<Duration>) {
        self.recv_timeout = timeout;
    }

    /// Timeout of [`Socket::send`] (SO_SNDTIMEO).
    pub const fn set_send_timeout(&mut self, timeout: Option<Duration>) {
        self.send_timeout = timeout;
    }

    /// Enables or disables receiving (KCM_RECV_DISABLE, inverted). Messages not begun go to other sockets. A
    /// partly read message can be read to its end.
    pub fn set_receive(&mut self, receives: bool) {
        self.receives = receives;
        if receives {
            return;
        }
        let shared = Arc::clone(&self.shared);
        let now = shared.now();
        shared.with(|state, _| {
            self.hand_back(state, now, false);
            state.mux.disable(self.id, true, now);
        });
        self.attends = false;
    }

    /// Closes the socket. If it is the last one, waits up to `patience` until the mux has drained: unread
    /// messages are returned by [`super::Event::Undone`], replies are sent. Returns true if the mux has
    /// drained or other sockets are open. Dropping the socket does not wait.
    pub fn close(self, patience: Duration) -> bool {
        let shared = Arc::clone(&self.shared);
        drop(self);
        let server = Server { shared: Arc::clone(&shared) };
        if shared.lock().mode.is_unused() {
            server.drain(Some(patience));
        }
        // The last bytes of a connection may be sent at the deadline.
        let until = Instant::now() + patience + Duration::from_secs(1);
        loop {
            let mut state = shared.lock();
            state.remove_waiter();
            let over = state.closed || !state.mode.is_unused();
            let left = until.saturating_duration_since(Instant::now());
            if over || left.is_zero() {
                return over;
            }
            state.waiters.push(std::thread::current());
            drop(state);
            park(Some(left));
        }
    }
}

fn park(timeout: Option<Duration>) {
    match timeout {
        Some(timeout) => std::thread::park_timeout(timeout),
        None => std::thread::park(),
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        let shared = Arc::clone(&self.shared);
        let mut work = Work::default();
        let mut state = shared.lock();
        let now = shared.now();
        self.hand_back(&mut state, now, true);
        if std::thread::panicking() {
            state.mux.handle_worker_died(self.id, now);
        } else {
            self.finish(&mut state, now);
            state.mux.leave(self.id, None, now);
        }
        for (to, bytes) in self.batch.drain(..) {
            // No thread waits for write space any more.
            let psock = match to {
                To::Psock(psock) => Some(psock),
                To::Any => state.mux.least_loaded(),
                To::Requester | To::Message(_) => None,
            };
            let sent = psock.is_some_and(|psock| state.mux.forward(psock, bytes.clone(), now).is_ok());
            if !sent {
                state.undelivered(bytes, &mut work);
            }
        }
        state.set_armed(self.id, false);
        state.workers.remove(self.id);
        let last = state.mode.close_socket();
        state.pump(&shared, &mut work);
        drop(state);
        shared.perform(work);
        if last {
            self.server().drain(Some(LINGER));
            // Wakes the work-queue thread (`workqueue.rs`), which returns all waiting messages as undone.
            shared.notify();
        }
    }
}
