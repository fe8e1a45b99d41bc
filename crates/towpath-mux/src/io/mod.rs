//! The multiplexor on sockets (feature `io`).
//!
//! A [`Server`] has listeners, connections and one of four worker APIs:
//! - [`Worker`]: threads of the application poll and process messages in turn. No other thread exists. This
//!   is the fastest API.
//! - [`Socket`]: handles with the calls of KCM's sockets. A thread of the server has the connections.
//! - [`Driver`]: the application's thread has the connections and passes messages to workers elsewhere, such
//!   as other processes.
//! - `Messages` (feature `tokio`): a `Stream` of messages for one task, over a driver.
//!
//! `Socket` and `Driver` run the same loop (`turn.rs`). The rest of this text describes [`Worker`].
//!
//! What: leader and followers over one epoll. An idle worker that finds no leader becomes the leader: it
//! waits for sockets, reads them, and processes the first message itself. If that takes longer than a
//! wake-up, another worker leads meanwhile. Other idle workers are parked. One mutex protects the core. It is
//! held for bookkeeping only, never during a read, a write, a wait, or a worker's processing.
//!
//! Invariants:
//! - There is at most one leader. While it finds sockets ready whenever it looks, helpers wait for sockets,
//!   too, on up to half of the processors, until none is ready for [`mux::Config::patience`]. The kernel
//!   wakes one of them per socket.
//! - One worker at a time reads a socket (`reader.rs`). The holder of its [`mux::Transmit`] writes it.
//! - The thread that makes a change performs its effects before it continues: writes and wake-ups without the
//!   mutex; changes of epoll interest under the mutex, so that two changes keep their order.
//! - A leader that processes messages shorter than a wake-up is not replaced. One parked worker, the
//!   watchdog, checks every [`mux::Config::patience`] whether the leader got stuck.
//!
//! A worker that reads several short messages of a connection processes them itself, as a local batch in its
//! local queue ([`mux::Batch`], `local_queue.rs`). A leader without a working follower spins before it
//! sleeps, if sockets were recently ready within the cost of sleeping.
//!
//! Races: a worker parks after it has released the mutex and may be woken before it sleeps;
//! [`std::thread::park`] then returns at once. An event for a leader that is about to wait is not lost,
//! because the leader's epoll watches an eventfd. A helper that sees the eventfd leaves it readable for the
//! leader. The eventfd also reports a deadline earlier than the one that the leader waits for
//! (`state/pollers.rs`, `sleeps_until`).
//!
//! With TLS (feature `tls`) a connection is attached after its handshake.
//!
//! While the rest of a long message is missing, SO_RCVLOWAT avoids wake-ups for parts of it.

mod admission;
mod closer;
mod connection_info;
mod connector;
mod driver;
mod hand_over;
mod handshake;
mod linger;
mod link;
mod listener;
mod local_queue;
mod pending;
mod reader;
mod socket;
mod state;
#[cfg(feature = "tokio")]
mod stream;
mod sys;
#[cfg(feature = "tls")]
mod tls;
#[cfg(not(feature = "tls"))]
#[path = "no_tls.rs"]
mod tls;
mod turn;
mod unix_peer;
mod worker;
mod zerocopy_sender;

use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::os::fd::{AsFd, OwnedFd, RawFd};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use rustix::event::epoll;
use rustix::io::Errno;

use crate::Time;
use crate::assembler::Limits;
use crate::framing::Framing;
use crate::mux::{self, Mux, psock};
use link::Link;
use listener::Listener;
use state::{State, Work};

pub use admission::{Admission, Admit, Peer};
pub use closer::{Close, set_close};
pub use connection_info::{ConnectionInfo, Lifecycle};
pub use connector::{Connect, Connector};
pub use driver::Driver;
pub use hand_over::{HandOver, ListenerSocket, Resume};
pub use listener::AcceptStats;
pub use socket::{Error, Flags, Kind, Received, Socket, To};
pub use state::{Ended, Event};
#[cfg(feature = "tokio")]
pub use stream::{Messages, Reply};
#[cfg(feature = "tls")]
pub use tls::{ServerTls, Tls, TlsError};
pub use worker::{Answer, Worker};
pub use zerocopy_sender::{ZerocopySender, ZerocopySenders};

/// Connections, listeners and workers of one multiplexor. Clones refer to the same multiplexor.
///
/// # Examples
///
/// ```
/// use std::io::{Read, Write};
/// use towpath_mux::io::Server;
/// use towpath_mux::mux::{Config, Order};
///
/// let server = Server::new("line".parse()?, Config::new(Order::Replies))?;
/// let address = server.listen("127.0.0.1:0")?;
/// let mut worker = server.worker()?;
/// let echo = std::thread::spawn(move || {
///     while let Some(message) = worker.recv()? {
///         worker.reply(&message, message.bytes().clone());
///     }
///     Ok::<_, std::io::Error>(())
/// });
///
/// let mut client = std::net::TcpStream::connect(address)?;
/// client.write_all(b"hello\n")?;
/// let mut answer = [0; 6];
/// client.read_exact(&mut answer)?;
/// assert_eq!(&answer, b"hello\n");
///
/// server.drain(None);
/// echo.join().expect("it does not panic")?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Server {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    epoll: OwnedFd,
    /// Eventfd that wakes the leader.
    eventfd: OwnedFd,
    start: Instant,
    framing: Framing,
    limits: Limits,
    zerocopy: OnceLock<Arc<dyn ZerocopySenders>>,
    state: Mutex<State>,
}

impl Server {
    /// Returns a multiplexor without listeners, connections and workers.
    ///
    /// # Errors
    ///
    /// Fails if the kernel provides no epoll instance or eventfd.
    pub fn new(framing: Framing, config: mux::Config) -> io::Result<Self> {
        Self::with_limits(framing, Limits::default(), config)
    }

    /// As [`Server::new`], with bounds and timers for messages.
    ///
    /// # Errors
    ///
    /// As [`Server::new`].
    pub fn with_limits(framing: Framing, limits: Limits, config: mux::Config) -> io::Result<Self> {
        use rustix::event::{EventfdFlags, eventfd};
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let eventfd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        epoll::add(&epoll, &eventfd, state::EVENTFD, epoll::EventFlags::IN)?;
        let state = Mutex::new(State::new(Mux::new(config)));
        let start = Instant::now();
        let zerocopy = OnceLock::new();
        Ok(Self { shared: Arc::new(Shared { epoll, eventfd, start, framing, limits, zerocopy, state }) })
    }

    /// Listens on a TCP address and returns the bound address. Port 0 selects a free port. An IPv6 address
    /// accepts IPv6 only, whatever the system's default is, so that `[::]` and `0.0.0.0` may share a port.
    ///
    /// # Errors
    ///
    /// Fails if the address cannot be bound.
    pub fn listen(&self, address: impl ToSocketAddrs) -> io::Result<SocketAddr> {
        self.listen_as(listener::bind(address)?, None)
    }

    /// As [`Server::listen`], with TLS. Connections are attached after their handshakes.
    ///
    /// # Errors
    ///
    /// Fails if the address cannot be bound.
    #[cfg(feature = "tls")]
    pub fn listen_tls(&self, address: impl ToSocketAddrs, tls: Tls) -> io::Result<SocketAddr> {
        self.listen_as(listener::bind(address)?, Some(tls))
    }

    /// Reads the certificates and keys of all listeners again ([`Tls::reload`]). Later handshakes use them; connections are not affected.
    /// Reads files in the calling thread, without a lock.
    ///
    /// # Errors
    ///
    /// As [`Tls::from_files`]. All listeners then keep what was read before.
    #[cfg(feature = "tls")]
    pub fn reload_tls(&self) -> Result<(), TlsError> {
        let all = self
            .shared
            .lock()
            .listeners
            .all()
            .filter_map(|listener| listener.tls.clone())
            .collect::<Vec<_>>();
        Tls::reload_all(&all)
    }

    fn listen_as(
        &self,
        (fd, address): (OwnedFd, SocketAddr),
        tls: Option<tls::Tls>,
    ) -> io::Result<SocketAddr> {
        let listener = Listener { fd, tcp: true, tls, name: address.to_string().into() };
        self.shared.lock().listeners.add(&self.shared.epoll, listener)?;
        Ok(address)
    }

    /// Listens on a Unix stream socket at `path`.
    ///
    /// # Errors
    ///
    /// Fails if the path cannot be bound.
    pub fn listen_unix(&self, path: impl AsRef<Path>) -> io::Result<()> {
        let name = format!("unix:{}", path.as_ref().display()).into();
        let listener = UnixListener::bind(path)?;
        listener.set_nonblocking(true)?;
        sys::refuse_descriptors(listener.as_fd());
        let listener = Listener { fd: listener.into(), tcp: false, tls: None, name };
        self.shared.lock().listeners.add(&self.shared.epoll, listener)
    }

    /// Sets the policy for TCP connections accepted from now on. Default: all are attached.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::io::Read;
    /// use std::sync::Arc;
    /// use std::sync::atomic::{AtomicU64, Ordering};
    /// use towpath_mux::Time;
    /// use towpath_mux::io::{Admission, Admit, Peer, Server};
    /// use towpath_mux::mux::{Config, Order};
    ///
    /// /// Two at a time.
    /// #[derive(Debug, Default)]
    /// struct Two(AtomicU64);
    ///
    /// impl Admission for Two {
    ///     fn admit(&self, peer: &Peer, _: Time) -> Admit {
    ///         assert!(peer.remote.ip().is_loopback());
    ///         if self.0.load(Ordering::Relaxed) == 2 {
    ///             return Admit::Deny;
    ///         }
    ///         self.0.fetch_add(1, Ordering::Relaxed);
    ///         Admit::Pass
    ///     }
    ///
    ///     fn closed(&self, _: &Peer, _: Time) {
    ///         self.0.fetch_sub(1, Ordering::Relaxed);
    ///     }
    /// }
    ///
    /// let server = Server::new("line".parse()?, Config::new(Order::Replies))?;
    /// server.set_admission(Arc::new(Two::default()));
    /// let address = server.listen("127.0.0.1:0")?;
    /// let mut worker = server.worker()?;
    /// let thread = std::thread::spawn(move || worker.recv());
    ///
    /// let clients: Vec<_> = (0..3).map(|_| std::net::TcpStream::connect(address)).collect::<Result<_, _>>()?;
    /// assert_eq!((&clients[2]).read(&mut [0])?, 0, "the third is closed");
    /// server.drain(None);
    /// thread.join().expect("it does not panic")?;
    /// assert_eq!(server.accept_stats().denied, 1);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn set_admission(&self, admission: Arc<dyn Admission>) {
        self.shared.lock().listeners.admission = Some(admission);
    }

    /// Accepts connections only while a descriptor below `limit` is free, which reserves the others for the
    /// rest of the process (getrlimit(2), RLIMIT_NOFILE). Further connections wait in the backlog.
    pub fn set_descriptor_limit(&self, limit: RawFd) {
        self.shared.lock().listeners.limit = Some(limit);
    }

    /// Sends long messages by `zerocopy` instead of sendmsg(2), on connections without TLS. The first call
    /// counts.
    pub fn set_zerocopy(&self, zerocopy: Arc<dyn ZerocopySenders>) {
        // A second call has no effect.
        let _ = self.shared.zerocopy.set(zerocopy);
    }

    /// Counters of listeners and handshakes.
    pub fn accept_stats(&self) -> AcceptStats {
        self.shared.lock().accept_stats
    }

    /// Attaches a connected stream socket and makes it non-blocking. `read`: bytes that were already read
    /// from it.
    ///
    /// # Errors
    ///
    /// Fails if the mux drains, if it is full and `read` is not empty, or if epoll refuses the descriptor.
    pub fn attach(&self, socket: impl Into<OwnedFd>, read: &[u8]) -> io::Result<psock::Id> {
        self.attach_as(socket, None, read)
    }

    /// Returns true if long messages are given in parts ([`Limits::part`]).
    pub fn streams(&self) -> bool {
        self.shared.limits.part > 0 && self.shared.framing.streams()
    }

    /// As [`Server::attach`], with a framing for this connection.
    ///
    /// # Errors
    ///
    /// As [`Server::attach`].
    pub fn attach_framed(
        &self,
        socket: impl Into<OwnedFd>,
        framing: Framing,
        read: &[u8],
    ) -> io::Result<psock::Id> {
        self.attach_as(socket, Some(framing), read)
    }

    fn attach_as(
        &self,
        socket: impl Into<OwnedFd>,
        framing: Option<Framing>,
        read: &[u8],
    ) -> io::Result<psock::Id> {
        let socket = socket.into();
        rustix::io::ioctl_fionbio(&socket, true)?;
        let link = Arc::new(Link::new(socket, None, None));
        let shared = &self.shared;
        self.shared.with(|state, work| state.attach_read(shared, link, None, (framing, read), work))
    }

    /// Attaches a connected stream socket after its TLS handshake, as client or server.
    /// [`Event::NotAttached`] reports a failed handshake.
    ///
    /// # Errors
    ///
    /// Fails if the mux drains, or if epoll refuses the descriptor.
    #[cfg(feature = "tls")]
    pub fn attach_tls(&self, socket: impl Into<OwnedFd>, tls: &Tls) -> io::Result<()> {
        self.admit_socket(socket.into(), Some(tls), None)
    }

    /// The same for a connection that its [`Connector`] replaces when it ends.
    fn attach_kept(
        &self,
        socket: impl Into<OwnedFd>,
        tls: Option<&tls::Tls>,
        owner: Sender<connector::ConnectionEvent>,
    ) -> io::Result<()> {
        self.admit_socket(socket.into(), tls, Some(owner))
    }

    fn admit_socket(
        &self,
        socket: OwnedFd,
        tls: Option<&tls::Tls>,
        owner: Option<Sender<connector::ConnectionEvent>>,
    ) -> io::Result<()> {
        rustix::io::ioctl_fionbio(&socket, true)?;
        let shared = &self.shared;
        self.shared.with(|state, work| state.admit(shared, (socket, None, None), tls, owner, work))
    }

    /// Unattaches a connection. [`Server::poll_ended`] returns it when its messages are done, after
    /// `patience` at the latest.
    pub fn unattach(&self, id: psock::Id, patience: Option<Duration>) {
        let now = self.shared.now();
        self.shared.change(|mux| mux.unattach(id, patience.map(|patience| now + patience), now));
    }

    /// Ends a connection when its messages are done and answered, after `patience` at the latest.
    pub fn drain_psock(&self, id: psock::Id, patience: Option<Duration>) {
        let now = self.shared.now();
        self.shared.change(|mux| mux.drain_psock(id, patience.map(|patience| now + patience), now));
    }

    /// Resets the connection of an admitted peer, also during its handshake. Returns true if there was one.
    pub fn close_peer(&self, peer: &Peer) -> bool {
        let now = self.shared.now();
        self.shared.with(|state, work| {
            let mut attached = state.sockets.iter();
            let found = attached.find(|(_, socket)| socket.link.peer() == Some(peer)).map(|(id, _)| id);
            if let Some(id) = found {
                state.fail(id, mux::Cause::Reset(Errno::CONNABORTED.raw_os_error()), now);
            }
            found.is_some()
                || state.refuse_handshake(&self.shared, peer, work)
                || state.refuse_lingering(&self.shared, peer, work)
        })
    }

    /// Stops listening and drains all connections, for at most `patience`. Then [`Worker::recv`] returns
    /// `None`. A worker that processes a message is waited for without limit. Data that a peer still sends is
    /// read and dropped until the peer has received its replies.
    pub fn drain(&self, patience: Option<Duration>) {
        let now = self.shared.now();
        self.shared.with(|state, work| {
            state.shut(&self.shared, work);
            let deadline = patience.map(|patience| now + patience);
            state.lingers.end_by(deadline);
            state.mux.drain(deadline, now);
        });
    }

    /// Adds a worker, for one thread.
    ///
    /// # Errors
    ///
    /// Fails if the mux has drained, or if the server has a [`Driver`] or [`Socket`]s.
    pub fn worker(&self) -> io::Result<Worker> {
        Worker::new(Arc::clone(&self.shared))
    }

    /// Connected mode: sends a message on the connection with the fewest bytes to send.
    ///
    /// # Errors
    ///
    /// [`mux::SendError::NotConnected`] if no connection is open, [`mux::SendError::Full`] if all are full.
    ///
    /// # Panics
    ///
    /// Panics if the mux is not in connected mode.
    pub fn send(&self, bytes: impl Into<Bytes>) -> Result<psock::Id, mux::SendError> {
        let now = self.shared.now();
        self.shared.change(|mux| mux.send(bytes, now))
    }

    /// Returns the next ended connection, oldest first. The last 1024 are kept, and all that were unattached.
    pub fn poll_ended(&self) -> Option<Ended> {
        self.shared.lock().notices.pop_ended()
    }

    /// Returns the next event, oldest first. The last 1024 are kept.
    pub fn poll_event(&self) -> Option<Event> {
        self.shared.lock().notices.pop_event()
    }

    /// Address of the peer. `None` over a Unix socket and after the connection has ended.
    pub fn peer(&self, id: psock::Id) -> Option<SocketAddr> {
        self.shared.lock().sockets.get(id).and_then(|socket| socket.link.address())
    }

    /// Addresses and TLS names of a connection. `None` after it has ended.
    pub fn connection_info(&self, id: psock::Id) -> Option<ConnectionInfo> {
        self.shared.lock().sockets.get(id).map(|socket| socket.link.info())
    }

    /// Returns a snapshot.
    pub fn show(&self) -> mux::Show {
        self.shared.lock().mux.show()
    }

    /// Calls `look` with the core.
    pub fn look<T>(&self, look: impl FnOnce(&Mux) -> T) -> T {
        look(&self.shared.lock().mux)
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) -> Time {
        since(self.start)
    }

    /// Changes the state, then performs the resulting events, writes and wake-ups.
    fn with<T>(&self, change: impl FnOnce(&mut State, &mut Work) -> T) -> T {
        let mut work = Work::default();
        let mut state = self.lock();
        let result = change(&mut state, &mut work);
        state.pump(self, &mut work);
        drop(state);
        self.perform(work);
        result
    }

    /// The same for the core.
    fn change<T>(&self, change: impl FnOnce(&mut Mux) -> T) -> T {
        self.with(|state, _| change(&mut state.mux))
    }

    /// Performs writes and wake-ups, and their effects, until none is left.
    fn perform(&self, mut work: Work) {
        loop {
            work.wake(self);
            if work.writes.is_empty() {
                return;
            }
            let write = |(mut transmit, link): (mux::Transmit, Arc<Link>)| {
                let outcome = link.write(&mut transmit, self.zerocopy.get().map(|zerocopy| &**zerocopy));
                let failed = matches!(outcome, mux::Outcome::Failed(_));
                if (transmit.wants_unacked() || transmit.keeps() && failed)
                    && let (Some(bytes), _) = link.unacked()
                {
                    transmit.set_unacked(bytes);
                }
                (transmit, outcome)
            };
            let outcomes: Vec<_> = work.writes.drain(..).map(write).collect();
            let now = self.now();
            let mut state = self.lock();
            for (transmit, outcome) in outcomes {
                state.mux.handle_transmitted(transmit, outcome, now);
            }
            state.pump(self, &mut work);
        }
    }

    fn notify(&self) {
        // Fails only if the counter is at its maximum; then the eventfd is readable.
        let _ = rustix::io::write(self.eventfd.as_fd(), &1u64.to_ne_bytes());
    }
}

/// Time since `start`.
fn since(start: Instant) -> Time {
    Time::from_nanos(u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX))
}

fn timespec(time: Duration) -> rustix::event::Timespec {
    rustix::event::Timespec {
        tv_sec: time.as_secs().try_into().unwrap_or(i64::MAX),
        tv_nsec: time.subsec_nanos().into(),
    }
}
