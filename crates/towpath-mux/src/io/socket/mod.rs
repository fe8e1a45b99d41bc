//! Handles with the calls of a socket, as Linux's KCM has them: datagrams or packets in, datagrams or packets out, each a message.
//!
//! What: a [`Socket`] is a worker of the mux, for one thread; a clone of it is another worker. [`Socket::recv`] gives the next message
//! of any connection, [`Socket::send`] sends one: to who asked, to a named connection, or in connected mode to any. A thread of the mux's own
//! (`workqueue.rs`) has the sockets, so that bytes come and go while nobody calls.
//!
//! Differences from KCM's sockets, which are its faults or what it had planned: a message waits for the next handle that asks, so that
//! none waits behind a busy one; answers find who asked; a packet that is longer than the buffer loses nothing; closing sends what is to
//! be sent.
//!
//! A message is done when the next one is asked for, or when the handle is closed; until then it can be answered, counts in the mux's
//! bounds, and goes to another handle if the thread panics.
//!
//! A thread that has other things to wait for waits by the handle's descriptor, which is rung while it is armed ([`Socket::arm`]).

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

/// How long what is to be sent is waited for when the last handle is dropped.
const LINGER: Duration = Duration::from_secs(30);

/// What ends a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// SOCK_DGRAM: each send is a message, unless it says [`Flags::MORE`]. A read that is shorter than the message drops its rest.
    Dgram,
    /// SOCK_SEQPACKET: the send that says [`Flags::EOR`] ends a message. A read that is shorter than the message leaves its rest to the
    /// next one.
    Seqpacket,
}

/// Whom a message is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum To {
    /// Connected mode: the connection that has the least to send.
    Any,
    /// The connection that the message came from which this handle read last. It is its answer.
    Requester,
    /// The same for any message that this handle has read and that is not done.
    Message(Ticket),
    /// This connection.
    Psock(psock::Id),
}

/// What a read brought.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Received {
    /// Bytes that are in the buffer.
    pub bytes: usize,
    /// Bytes that the message has from the first of these on: a datagram's real length.
    pub length: usize,
    /// [`Flags::TRUNC`] when the rest was dropped, [`Flags::EOR`] when these bytes end the message.
    pub flags: Flags,
    /// The message: what [`To::Message`] answers, and in it the connection that it came from.
    pub ticket: Ticket,
    /// The framing's mark; 0 without.
    pub mark: u32,
    /// The framing's hash; 0 without.
    pub hash: u32,
    /// How many bytes of the message the framing strips in front and behind. They are read like all others.
    pub stripped: (usize, usize),
}

/// A handle of a mux, as a KCM socket is: for one thread. See the module's documentation of [`super`].
///
/// # Examples
///
/// Lines in capitals, by datagrams; the example `socket` has a handle in each of some threads.
///
/// ```
/// use std::io::{Read, Write};
/// use towpath_mux::io::{Flags, Kind, Server, To};
/// use towpath_mux::mux::Config;
///
/// let server = Server::new("line".parse()?, Config::default())?;
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
    /// What is polled: an eventfd(2).
    eventfd: Arc<OwnedFd>,
    gather: Gather,
    /// Whole messages that leave with the next one.
    batch: VecDeque<(To, Bytes)>,
    /// What went wrong with one of them when nobody could be told.
    error: Option<Error>,
    /// The message that is read, and how many of its bytes were.
    current: Option<(Message, usize)>,
    /// Those that come next, while a call reads several; empty otherwise.
    next: VecDeque<Message>,
    room: Vec<Message>,
    /// Messages that were read, or begun to be, and are not done.
    held: Vec<Ticket>,
    /// The one that was answered last.
    answered: Option<Ticket>,
    /// It was told to receive; it is counted on to ask for messages.
    receives: bool,
    attends: bool,
    recv_timeout: Option<Duration>,
    send_timeout: Option<Duration>,
}

impl Server {
    /// A handle (KCM's socket(2)). The first one starts a thread that has the sockets; when the last one is closed, the mux drains.
    ///
    /// # Errors
    ///
    /// When the server has a [`super::Driver`] or [`super::Worker`]s, or has been told to drain; or the system gives no thread, or no
    /// descriptor.
    pub fn socket(&self, kind: Kind) -> io::Result<Socket> {
        let shared = Arc::clone(&self.shared);
        let eventfd = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let now = shared.now();
        let mut state = shared.lock();
        if state.mux.is_draining() || state.closed {
            return Err(io::Error::new(io::ErrorKind::NotConnected, "the mux was told to drain"));
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
        // Until it asks for messages it is not to be counted on, by nobody.
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
    /// Another handle of the same mux and kind (KCM's SIOCKCMCLONE).
    ///
    /// # Errors
    ///
    /// As [`Server::socket`].
    pub fn try_clone(&self) -> io::Result<Self> {
        self.server().socket(self.kind)
    }

    /// The mux: listeners, outbound connections, counters, ends.
    pub fn server(&self) -> Server {
        Server { shared: Arc::clone(&self.shared) }
    }

    /// Its name in the core.
    pub const fn id(&self) -> worker::Id {
        self.id
    }

    /// What ends a message.
    pub const fn kind(&self) -> Kind {
        self.kind
    }

    /// Attaches a connected stream socket with a framing of its own (KCM's SIOCKCMATTACH), and makes it non-blocking.
    ///
    /// # Errors
    ///
    /// [`Error::Drained`] when the mux was told to drain; [`Error::Io`] when the system refuses to watch the descriptor.
    pub fn attach(&self, socket: impl Into<OwnedFd>, framing: Framing) -> Result<psock::Id, Error> {
        let server = self.server();
        if server.look(crate::mux::Mux::is_draining) {
            return Err(Error::Drained);
        }
        Ok(server.attach_framed(socket, framing, &[])?)
    }

    /// Takes a connection back (KCM's SIOCKCMUNATTACH): waits until its messages are done and answered, at most `patience`. What this
    /// handle holds is done thereby. The descriptor and the bytes that were read behind the last message are in what comes back; none when
    /// the connection ended otherwise, as [`Ended::cause`] says.
    ///
    /// # Errors
    ///
    /// [`Error::NotAttached`].
    pub fn unattach(&mut self, id: psock::Id, patience: Option<Duration>) -> Result<Ended, Error> {
        let shared = Arc::clone(&self.shared);
        let mut first = true;
        // One of it that is read in part would be waited for as well.
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

    /// How long [`Socket::recv`] waits at most (SO_RCVTIMEO); `None` for ever. Then it is [`Error::WouldBlock`].
    pub const fn set_recv_timeout(&mut self, timeout: Option<Duration>) {
        self.recv_timeout = timeout;
    }

    /// The same for [`Socket::send`] (SO_SNDTIMEO).
    pub const fn set_send_timeout(&mut self, timeout: Option<Duration>) {
        self.send_timeout = timeout;
    }

    /// Stops or resumes receiving (KCM_RECV_DISABLE, the other way round). Messages that it has and has not begun to read go to other
    /// handles; one that is read in part is still read to its end.
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

    /// Closes the handle, and waits until the mux has drained if it was the last one, at most `patience`: messages that nobody has read come
    /// back as [`super::Event::Undone`], answers leave. Whether it has, or others are open. Dropping it does the same without
    /// waiting.
    pub fn close(self, patience: Duration) -> bool {
        let shared = Arc::clone(&self.shared);
        drop(self);
        let server = Server { shared: Arc::clone(&shared) };
        if shared.lock().mode.is_unused() {
            server.drain(Some(patience));
        }
        // A connection's last bytes may leave at that very moment.
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
            // Nobody can wait for room any more.
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
            // What nobody will read is taken by the thread that has the sockets.
            shared.notify();
        }
    }
}
