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

mod error;
mod flags;
mod gather;
mod unread;
mod workqueue;

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use rustix::event::{EventfdFlags, eventfd};

use super::state::{Seat, State, Work};
use super::{Ended, Server, Shared};
use crate::Time;
use crate::framing::Framing;
use crate::mux::{Message, Order, SendError, Ticket, psock, worker};
use gather::Gather;
use unread::Read;

pub use error::Error;
pub use flags::Flags;

/// Messages that a handle gathers with [`Flags::BATCH`] before it sends them anyway.
const BATCH: usize = 64;
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
    Asker,
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
/// socket.send(To::Asker, &buffer[..message.bytes], Flags::empty())?;
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
    bell: Arc<OwnedFd>,
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
        let bell = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let now = shared.now();
        let mut state = shared.lock();
        if state.mux.is_draining() || state.closed {
            return Err(io::Error::new(io::ErrorKind::NotConnected, "the mux was told to drain"));
        }
        if state.handles.is_none() {
            if state.driven || !state.workers.is_empty() {
                return Err(io::Error::new(
                    io::ErrorKind::AlreadyExists,
                    "the server has a driver or workers already",
                ));
            }
            workqueue::start(&shared)?;
        }
        *state.handles.get_or_insert(0) += 1;
        let id = state.mux.clone_worker(usize::MAX, now);
        state.workers.insert(id, Seat { bell: Some(Arc::clone(&bell)), ..Seat::new(Arc::default()) });
        // Until it asks for messages it is not to be counted on, by nobody.
        state.mux.disable(id, true, now);
        state.mux.poll_batch(id, now, &mut Vec::new());
        let most = state.mux.config().send_most;
        drop(state);
        Ok(Socket {
            shared,
            id,
            kind,
            bell,
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
            state.waits_no_more();
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
                state.pump_again(&shared, &mut work);
            }
            let ended = state.ended.iter().position(|ended| ended.psock == id);
            let ended = ended.and_then(|at| state.ended.remove(at));
            let waits = ended.is_none() && state.sockets.contains_key(id) && !state.closed;
            if waits {
                state.callers.push(std::thread::current());
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
        let mut work = Work::default();
        let mut state = shared.lock();
        let now = shared.now();
        self.hand_back(&mut state, now, false);
        state.mux.disable(self.id, true, now);
        self.attends = false;
        state.pump(&shared, &mut work);
        drop(state);
        shared.perform(work);
    }

    /// Reads the next message, or goes on with one that was read in part; waits for one. Messages that were read before are done.
    ///
    /// # Errors
    ///
    /// [`Error::WouldBlock`] with [`Flags::DONTWAIT`] or behind [`Socket::set_recv_timeout`]; [`Error::Disabled`];
    /// [`Error::Drained`] when nothing will come any more.
    pub fn recv(&mut self, buffer: &mut [u8], flags: Flags) -> Result<Received, Error> {
        let (message, at) = self.take(1, flags)?;
        let read = unread::read(self.kind, &message.bytes()[at..], buffer, flags.contains(Flags::PEEK));
        Ok(self.put(message, at, read))
    }

    /// The same with a share in the message's bytes instead of a copy: all that is left of it.
    ///
    /// # Errors
    ///
    /// As [`Socket::recv`].
    pub fn recv_bytes(&mut self, flags: Flags) -> Result<(Received, Bytes), Error> {
        let (message, at) = self.take(1, flags)?;
        let bytes = message.bytes().slice(at..);
        let read = unread::fit(self.kind, bytes.len(), bytes.len(), flags.contains(Flags::PEEK));
        Ok((self.put(message, at, read), bytes))
    }

    /// Reads several messages, as many as there are buffers at most (recvmmsg(2) with MSG_WAITFORONE): waits for the first. Where messages
    /// take long it may be one, and the others are for other handles. None of them is done before the next call.
    ///
    /// # Errors
    ///
    /// As [`Socket::recv`], for the first.
    pub fn recv_many(&mut self, buffers: &mut [&mut [u8]], flags: Flags) -> Result<Vec<Received>, Error> {
        let most = buffers.len();
        let mut all = Vec::with_capacity(most);
        for buffer in buffers {
            let (message, at) = if all.is_empty() {
                self.take(most, flags)?
            } else {
                match self.current.take().or_else(|| self.next.pop_front().map(|message| (message, 0))) {
                    Some(next) => next,
                    None => break,
                }
            };
            let read = unread::read(self.kind, &message.bytes()[at..], buffer, flags.contains(Flags::PEEK));
            all.push(self.put(message, at, read));
            if flags.contains(Flags::PEEK) {
                break;
            }
        }
        if !self.next.is_empty() {
            // A packet took several buffers: others may have those behind it.
            let shared = Arc::clone(&self.shared);
            let mut work = Work::default();
            let mut state = shared.lock();
            let now = shared.now();
            let back: Vec<_> = self.next.drain(..).map(|message| message.ticket()).collect();
            state.mux.handle_hand_back(self.id, &back, now);
            state.pump(&shared, &mut work);
            drop(state);
            shared.perform(work);
        }
        Ok(all)
    }

    /// The messages that this handle has read are done: their connections go on where they waited for that.
    pub fn done(&mut self) {
        let shared = Arc::clone(&self.shared);
        let mut work = Work::default();
        let mut state = shared.lock();
        let now = shared.now();
        self.finish(&mut state, now);
        state.pump(&shared, &mut work);
        drop(state);
        shared.perform(work);
    }

    /// Sends a message or a part of one; how many bytes that were, all of them. A message without bytes is none.
    ///
    /// Waits while too much waits to be sent: on every connection for [`To::Any`], on that connection for [`To::Psock`]. An answer never
    /// waits: a peer that does not take its answers is not read any more, until [`crate::mux::Config::send_most`].
    ///
    /// # Errors
    ///
    /// [`Error::WouldBlock`], and nothing of these bytes was taken. Behind any other but [`Error::Elsewhere`] the message is dropped
    /// with the parts that were taken before. An error of a message that was batched ([`Flags::BATCH`]) is said by the call that sends
    /// those, which then has taken nothing itself.
    pub fn send(&mut self, to: To, bytes: &[u8], flags: Flags) -> Result<usize, Error> {
        if let Some(error) = self.error.take() {
            return Err(error);
        }
        let to = self.address(to)?;
        let length = self.gather.length_with(to, bytes)?;
        if !self.gather.ends(flags) {
            self.gather.add(to, bytes);
            return Ok(bytes.len());
        }
        if flags.contains(Flags::BATCH) && length > 0 && self.batch.len() < BATCH {
            self.batch.push_back((to, self.gather.finish(bytes)));
            return Ok(bytes.len());
        }
        let shared = Arc::clone(&self.shared);
        let until = self.send_timeout.map(|timeout| Instant::now() + timeout);
        loop {
            let mut work = Work::default();
            let mut state = shared.lock();
            state.waits_no_more();
            let (now, before) = (shared.now(), self.batch.len());
            let sent = self.deliver(&mut state, to, bytes, now);
            if matches!(sent, Err(Error::WouldBlock)) && self.batch.len() == before {
                // Nothing has changed for others.
                state.pump_again(&shared, &mut work);
            } else {
                state.pump(&shared, &mut work);
            }
            let waits = matches!(sent, Err(Error::WouldBlock)) && !flags.contains(Flags::DONTWAIT);
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            let waits = waits && left != Some(Duration::ZERO);
            if waits {
                state.callers.push(std::thread::current());
            }
            drop(state);
            shared.perform(work);
            if !waits {
                return sent.map(|()| bytes.len());
            }
            park(left);
        }
    }

    /// Sends several messages at once (sendmmsg(2)), each for its address; how many were taken.
    ///
    /// # Errors
    ///
    /// As [`Socket::send`], when not even the first was taken.
    pub fn send_many(&mut self, messages: &[(To, &[u8])], flags: Flags) -> Result<usize, Error> {
        for (at, &(to, bytes)) in messages.iter().enumerate() {
            let last = at + 1 == messages.len();
            let batch = if last { Flags::empty() } else { Flags::BATCH };
            match self.send(to, bytes, flags | batch) {
                Ok(_) => {}
                Err(error) if at == 0 => return Err(error),
                Err(Error::WouldBlock) => return Ok(at),
                Err(error) => {
                    self.error = Some(error);
                    return Ok(at);
                }
            }
        }
        Ok(messages.len())
    }

    /// For event loops: says that this thread is about to sleep until [`as_fd`](AsFd::as_fd) is readable. False when it is not to, because
    /// there is a message to be read, or the mux has drained, or, with `send`, there is room to send there, or something went wrong with
    /// what was sent. What it wakes for may be gone when it comes: it looks with [`Flags::DONTWAIT`].
    ///
    /// Without `send`, messages that were read are done, as when the next one is asked for. With it they are not, and whoever still has
    /// one wakes for room only.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::io::{Read, Write};
    /// use rustix::event::{PollFd, PollFlags, poll};
    /// use towpath_mux::io::{Error, Flags, Kind, Server, To};
    /// use towpath_mux::mux::Config;
    ///
    /// let server = Server::new("line".parse()?, Config::default())?;
    /// let mut client = std::net::TcpStream::connect(server.listen("127.0.0.1:0")?)?;
    /// let mut socket = server.socket(Kind::Dgram)?;
    /// client.write_all(b"hello\n")?;
    /// let mut answered = 0;
    /// while answered < 1 {
    ///     if socket.arm(None) {
    ///         // Beside whatever else is waited for.
    ///         poll(&mut [PollFd::new(&socket, PollFlags::IN)], None)?;
    ///     }
    ///     socket.disarm();
    ///     loop {
    ///         match socket.recv_bytes(Flags::DONTWAIT) {
    ///             Ok((_, bytes)) => socket.send(To::Asker, &bytes, Flags::empty())?,
    ///             Err(Error::WouldBlock) => break,
    ///             Err(error) => return Err(error.into()),
    ///         };
    ///         answered += 1;
    ///     }
    /// }
    /// client.read_exact(&mut [0; 6])?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use = "false means that there is something to do"]
    pub fn arm(&mut self, send: Option<To>) -> bool {
        let told = send.is_some() && self.error.is_some();
        let answers = matches!(send, Some(To::Asker | To::Message(_)));
        if self.current.is_some() || !self.next.is_empty() || told || answers {
            return false;
        }
        self.hush();
        let shared = Arc::clone(&self.shared);
        let mut work = Work::default();
        let mut state = shared.lock();
        let now = shared.now();
        let before = (self.held.len(), self.batch.len());
        if send.is_none() {
            self.finish(&mut state, now);
        }
        let changed = (self.held.len(), self.batch.len()) != before;
        // What is batched and found no room leaves when there is some, too.
        let to = send.or(self.batch.front().map(|(to, _)| *to));
        let roomy = to.is_some_and(|to| !matches!(room(&mut state, to), Err(SendError::Full)));
        let receives = self.receives && self.held.is_empty();
        let ready = receives && state.mux.has_ready(self.id);
        let mut sleeps = !(state.closed || roomy || ready);
        if sleeps && receives {
            self.attend(&mut state, true, now);
            // It is idle from here on. It gets something only if that has waited for a handle to come (`Order::Sticky`).
            state.mux.poll_few(self.id, 1, now, &mut self.room);
            self.next.extend(self.room.drain(..));
            sleeps = self.next.is_empty();
        }
        state.set_armed(self.id, sleeps);
        match to {
            Some(To::Any) if sleeps => state.roomless.push((self.id, None)),
            Some(To::Psock(psock)) if sleeps => state.roomless.push((self.id, Some(psock))),
            _ => {}
        }
        if changed {
            state.pump(&shared, &mut work);
        } else {
            state.pump_again(&shared, &mut work);
        }
        drop(state);
        shared.perform(work);
        sleeps
    }

    /// For event loops: awake again. Then it is to look for messages, with [`Flags::DONTWAIT`] until there are none: who was woken for
    /// one and does not come holds others up for [`crate::mux::Config::patience`].
    pub fn disarm(&mut self) {
        let shared = Arc::clone(&self.shared);
        let mut state = shared.lock();
        let now = shared.now();
        state.set_armed(self.id, false);
        self.attend(&mut state, false, now);
        if !self.attends {
            // It gets nothing: it is idle, and not waited for. Nobody else is woken before it has had its time to look.
            state.mux.poll_few(self.id, 1, now, &mut self.room);
        }
        drop(state);
        self.hush();
    }

    /// Reads what rang.
    fn hush(&self) {
        // When nothing has, it says so (EAGAIN).
        let _ = rustix::io::read(&*self.bell, &mut [0; 8]);
    }

    /// Closes the handle, and waits until the mux has drained if it was the last one, at most `patience`: messages that nobody has read come
    /// back as [`super::Told::Undone`], answers leave. Whether it has, or others are open. Dropping it does the same without
    /// waiting.
    pub fn close(self, patience: Duration) -> bool {
        let shared = Arc::clone(&self.shared);
        drop(self);
        let server = Server { shared: Arc::clone(&shared) };
        if shared.lock().handles == Some(0) {
            server.drain(Some(patience));
        }
        // A connection's last bytes may leave at that very moment.
        let until = Instant::now() + patience + Duration::from_secs(1);
        loop {
            let mut state = shared.lock();
            state.waits_no_more();
            let over = state.closed || state.handles != Some(0);
            let left = until.saturating_duration_since(Instant::now());
            if over || left.is_zero() {
                return over;
            }
            state.callers.push(std::thread::current());
            drop(state);
            park(Some(left));
        }
    }

    /// The next message, and how many bytes of it were read. It is nobody's until it is put back.
    fn take(&mut self, most: usize, flags: Flags) -> Result<(Message, usize), Error> {
        if let Some(current) = self.current.take() {
            return Ok(current);
        }
        if !self.receives {
            return Err(Error::Disabled);
        }
        let shared = Arc::clone(&self.shared);
        let until = self.recv_timeout.map(|timeout| Instant::now() + timeout);
        loop {
            let mut work = Work::default();
            let mut state = shared.lock();
            let now = shared.now();
            self.finish(&mut state, now);
            self.attend(&mut state, true, now);
            state.mux.poll_few(self.id, most, now, &mut self.room);
            self.next.extend(self.room.drain(..));
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            let wrong = match self.next.is_empty() {
                false => None,
                true if state.closed => Some(Error::Drained),
                true if flags.contains(Flags::DONTWAIT) || left == Some(Duration::ZERO) => {
                    Some(Error::WouldBlock)
                }
                true => None,
            };
            if wrong.is_some() {
                self.attend(&mut state, false, now);
            } else if let Some(seat) = state.workers.get_mut(self.id).filter(|_| self.next.is_empty()) {
                (seat.thread, seat.armed) = (Some(std::thread::current()), false);
            }
            state.pump(&shared, &mut work);
            drop(state);
            shared.perform(work);
            if let Some(message) = self.next.pop_front() {
                return Ok((message, 0));
            }
            if let Some(error) = wrong {
                return Err(error);
            }
            park(left);
        }
    }

    /// Whether it is counted on to take a message that comes. With [`Order::Sticky`] that cannot be taken back: messages of its connections
    /// would move.
    fn attend(&mut self, state: &mut State, attends: bool, now: Time) {
        if self.attends != attends && (attends || state.mux.config().order != Order::Sticky) {
            self.attends = attends;
            state.mux.disable(self.id, !attends, now);
        }
    }

    /// What was read of a message is not to be read again.
    fn put(&mut self, message: Message, at: usize, read: Read) -> Received {
        let received = Received {
            bytes: read.copied,
            length: message.bytes().len() - at,
            flags: read.flags,
            ticket: message.ticket(),
            mark: message.mark(),
            hash: message.hash(),
            stripped: message.stripped(),
        };
        if at == 0 && read.taken > 0 {
            self.held.push(message.ticket());
        }
        let at = at + read.taken;
        if at < message.bytes().len() {
            self.current = Some((message, at));
        }
        received
    }

    /// Messages that were read to their end are done; what answers them leaves before.
    fn finish(&mut self, state: &mut State, now: Time) {
        if let Err(error) = self.flush(state, now)
            && !matches!(error, Error::WouldBlock)
        {
            self.error = Some(error);
        }
        let current = self.current.as_ref().map(|(message, _)| message.ticket());
        for ticket in self.held.extract_if(.., |ticket| Some(*ticket) != current) {
            state.mux.done(self.id, ticket, now);
        }
    }

    /// What was not begun goes to others; and (`all`) what was not read to its end, unless it is answered already.
    fn hand_back(&mut self, state: &mut State, now: Time, all: bool) {
        let current = self.current.take_if(|(_, at)| all || *at == 0).map(|(message, _)| message);
        let current = current.filter(|message| {
            let (ticket, answered) = (message.ticket(), self.answered == Some(message.ticket()));
            // Peeked and answered: it is done, when this handle next finishes something.
            if answered && !self.held.contains(&ticket) {
                self.held.push(ticket);
            }
            !answered
        });
        let back = current.into_iter().chain(self.next.drain(..));
        let back: Vec<_> = back.map(|message| message.ticket()).collect();
        self.held.retain(|ticket| !back.contains(ticket));
        state.mux.handle_hand_back(self.id, &back, now);
    }

    /// Whom a message is for, by name.
    fn address(&self, to: To) -> Result<To, Error> {
        match to {
            To::Any if !self.shared.lock().mux.config().connected => Err(Error::NoAddress),
            To::Asker => match self.gather.to() {
                Some(first @ To::Message(_)) => Ok(first),
                _ => self.held.last().copied().map(To::Message).ok_or(Error::NoAddress),
            },
            to => Ok(to),
        }
    }

    /// Sends what is batched, and then the message that these bytes end.
    fn deliver(&mut self, state: &mut State, to: To, part: &[u8], now: Time) -> Result<(), Error> {
        self.flush(state, now)?;
        match room(state, to) {
            Ok(()) => {}
            Err(SendError::Full) => return Err(Error::WouldBlock),
            Err(error) => {
                self.gather.clear();
                return Err(error.into());
            }
        }
        let whole = self.gather.finish(part);
        if let To::Message(ticket) = to {
            self.answered = Some(ticket);
        }
        if whole.is_empty() { Ok(()) } else { transmit(state, self.id, to, whole, now) }
    }

    /// Sends what is batched, as far as there is room for it. One that cannot be sent holds up no other; the first error is told.
    fn flush(&mut self, state: &mut State, now: Time) -> Result<(), Error> {
        let (mut blocked, mut wrong) = (false, None);
        for _ in 0..self.batch.len() {
            let Some((to, bytes)) = self.batch.pop_front() else { break };
            let sent = match room(state, to) {
                Ok(()) => transmit(state, self.id, to, bytes, now),
                Err(SendError::Full) => {
                    blocked = true;
                    self.batch.push_back((to, bytes));
                    Ok(())
                }
                Err(error) => Err(error.into()),
            };
            if let Err(error) = sent {
                wrong.get_or_insert(error);
            }
        }
        match wrong {
            Some(error) => Err(error),
            None if blocked => Err(Error::WouldBlock),
            None => Ok(()),
        }
    }
}

/// Whether there is room for a message.
fn room(state: &mut State, to: To) -> Result<(), SendError> {
    match to {
        To::Any => state.mux.room_for(None),
        To::Psock(psock) => state.mux.room_for(Some(psock)),
        To::Asker | To::Message(_) => Ok(()),
    }
}

fn transmit(state: &mut State, id: worker::Id, to: To, bytes: Bytes, now: Time) -> Result<(), Error> {
    match to {
        To::Any => state.mux.send(bytes, now).map(drop)?,
        To::Psock(psock) => state.mux.forward(psock, bytes, now)?,
        To::Message(ticket) => state.mux.reply(id, ticket, bytes, now)?,
        To::Asker => return Err(Error::NoAddress),
    }
    Ok(())
}

fn park(timeout: Option<Duration>) {
    match timeout {
        Some(timeout) => std::thread::park_timeout(timeout),
        None => std::thread::park(),
    }
}

impl AsFd for Socket {
    /// Readable when there may be something to do, between [`Socket::arm`] and [`Socket::disarm`]. Only to be polled.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
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
                To::Any => state.mux.least_to_send(),
                To::Asker | To::Message(_) => None,
            };
            let sent = psock.is_some_and(|psock| state.mux.forward(psock, bytes.clone(), now).is_ok());
            if !sent {
                state.undelivered(bytes, &mut work);
            }
        }
        state.set_armed(self.id, false);
        state.workers.remove(self.id);
        let last = state.handles.as_mut().is_some_and(|handles| {
            *handles -= 1;
            *handles == 0
        });
        state.pump(&shared, &mut work);
        drop(state);
        shared.perform(work);
        if last {
            self.server().drain(Some(LINGER));
            // What nobody will read is taken by the thread that has the sockets.
            shared.ring();
        }
    }
}
