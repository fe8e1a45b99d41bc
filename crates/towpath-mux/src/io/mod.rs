//! The multiplexor on real sockets (feature `io`): the threads that call [`Worker::recv`] are all there are.
//!
//! What: leader and followers over one epoll. A worker that has nothing to do and finds no leader becomes it: it waits for
//! sockets, reads them, and does the first message itself; if that takes longer than waking somebody, another worker leads
//! meanwhile. Everybody else who has nothing to do is parked. The core is behind one mutex that is held for bookkeeping
//! only: never during a read, a write, a wait or a worker's work.
//!
//! Invariants:
//! - there is at most one leader. When it finds sockets ready whenever it looks, others wait for them too, on half of the
//!   processors at most, until nothing comes for [`mux::Config::patience`]; the kernel wakes one of them for each;
//! - a socket is read by one worker at a time (`reader.rs`), and written by whoever holds its [`mux::Transmit`];
//! - what has changed is done by whoever changed it, before they go on: writes and wake-ups behind the mutex, what epoll
//!   watches under it, so that two changes cannot overtake each other;
//! - when messages take less than a wake-up, a leader that works is not replaced; one parked worker, the watchdog, then looks
//!   every [`mux::Config::patience`] whether it has got stuck.
//!
//! A worker that reads several short messages of a connection does them itself ([`mux::Batch`]): they are with it from the read
//! on, in its local_queue (`local_queue.rs`). A leader that is alone waits awake for sockets for a moment when they were ready sooner than
//! sleeping takes, lately.
//!
//! Races: a worker parks behind the mutex, and may be woken before it sleeps: then [`std::thread::park`] returns at once. A
//! leader may be told of messages while it goes to wait: the eventfd (an eventfd) is watched like a socket. Who else waits may hear
//! it, and leaves it ringing. It rings too when something becomes due sooner than who waits knew of (`state.rs`, `until`).
//!
//! With TLS (feature `tls`), a connection is attached when it has handshake_advanced hands.
//!
//! While the rest of a long message is awaited, nobody is woken for a part of it (SO_RCVLOWAT).

mod admission;
mod connector;
mod driver;
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
pub use connector::{Connect, Connector};
pub use driver::Driver;
pub use listener::AcceptStats;
pub use socket::{Error, Flags, Kind, Received, Socket, To};
pub use state::{Ended, Event};
#[cfg(feature = "tokio")]
pub use stream::{Messages, Reply};
#[cfg(feature = "tls")]
pub use tls::{Tls, TlsError};
pub use worker::{Answer, Worker};
pub use zerocopy_sender::{ZerocopySender, ZerocopySenders};

/// Connections, listeners and workers of one multiplexor. Cheap to clone.
///
/// # Examples
///
/// ```
/// use std::io::{Read, Write};
/// use towpath_mux::io::Server;
/// use towpath_mux::mux::Config;
///
/// let server = Server::new("line".parse()?, Config::default())?;
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
    /// Rung when the leader is worker_wanted.
    eventfd: OwnedFd,
    start: Instant,
    framing: Framing,
    limits: Limits,
    zerocopy: OnceLock<Arc<dyn ZerocopySenders>>,
    state: Mutex<State>,
}

impl Server {
    /// A multiplexor without listeners, connections and workers.
    ///
    /// # Errors
    ///
    /// When the system gives no epoll or eventfd.
    pub fn new(framing: Framing, config: mux::Config) -> io::Result<Self> {
        Self::with_limits(framing, Limits::default(), config)
    }

    /// The same, with bounds and timers for messages.
    ///
    /// # Errors
    ///
    /// When the system gives no epoll or eventfd.
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

    /// Listens on a TCP address, and says which it is (a port of 0 is chosen). One of IPv6 is for IPv6 alone, whatever the
    /// system's default is: `[::]` and `0.0.0.0` may have the same port, and peers have the addresses that they wrote.
    ///
    /// # Errors
    ///
    /// When the address cannot be listened on.
    pub fn listen(&self, address: impl ToSocketAddrs) -> io::Result<SocketAddr> {
        self.listen_as(listener::bind(address)?, None)
    }

    /// The same, with TLS: a connection is attached when it has handshake_advanced hands.
    ///
    /// # Errors
    ///
    /// When the address cannot be listened on.
    #[cfg(feature = "tls")]
    pub fn listen_tls(&self, address: impl ToSocketAddrs, tls: Tls) -> io::Result<SocketAddr> {
        self.listen_as(listener::bind(address)?, Some(tls))
    }

    fn listen_as(
        &self,
        (fd, address): (OwnedFd, SocketAddr),
        tls: Option<tls::Tls>,
    ) -> io::Result<SocketAddr> {
        let listener = Listener { fd, tcp: true, tls };
        self.shared.lock().listeners.add(&self.shared.epoll, listener)?;
        Ok(address)
    }

    /// Listens on a Unix stream socket at this path.
    ///
    /// # Errors
    ///
    /// When the path cannot be listened on.
    pub fn listen_unix(&self, path: impl AsRef<Path>) -> io::Result<()> {
        let listener = UnixListener::bind(path)?;
        listener.set_nonblocking(true)?;
        let listener = Listener { fd: listener.into(), tcp: false, tls: None };
        self.shared.lock().listeners.add(&self.shared.epoll, listener)
    }

    /// Asks `admission` about TCP connections that listeners accept from now on, instead of letting all in.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::io::Read;
    /// use std::sync::Arc;
    /// use std::sync::atomic::{AtomicU64, Ordering};
    /// use towpath_mux::Time;
    /// use towpath_mux::io::{Admission, Admit, Peer, Server};
    /// use towpath_mux::mux::Config;
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
    /// let server = Server::new("line".parse()?, Config::default())?;
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

    /// Has listeners accept only while a descriptor with a number below `limit` is free, so that connections leave those from it on to
    /// whatever else the process opens (see getrlimit(2), RLIMIT_NOFILE). Others wait, as without any descriptor.
    pub fn set_descriptor_limit(&self, limit: RawFd) {
        self.shared.lock().listeners.limit = Some(limit);
    }

    /// Has long messages leave by `zerocopy` instead of sendmsg(2), on connections without TLS, from now on. Once.
    pub fn set_zerocopy(&self, zerocopy: Arc<dyn ZerocopySenders>) {
        // Those who set it twice keep the first.
        let _ = self.shared.zerocopy.set(zerocopy);
    }

    /// What became of connections that came.
    pub fn accept_stats(&self) -> AcceptStats {
        self.shared.lock().accept_stats
    }

    /// Attaches a connected stream socket, and makes it non-blocking. `read` has bytes that were read of it already.
    ///
    /// # Errors
    ///
    /// When the mux drains, or is full and bytes were read, or the system refuses to watch the descriptor.
    pub fn attach(&self, socket: impl Into<OwnedFd>, read: &[u8]) -> io::Result<psock::Id> {
        self.attach_as(socket, None, read)
    }

    /// The same for a connection with a framing of its own.
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

    /// Attaches a connected stream socket when it has handshake_advanced hands, in either role. [`Server::poll_event`] says when that fails.
    ///
    /// # Errors
    ///
    /// When the mux drains, or the system refuses to watch the descriptor.
    #[cfg(feature = "tls")]
    pub fn attach_tls(&self, socket: impl Into<OwnedFd>, tls: &Tls) -> io::Result<()> {
        self.admit_socket(socket.into(), Some(tls), None)
    }

    /// The same for one that is made again when it has ended.
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
        self.shared.with(|state, work| state.admit(shared, (socket, None), tls, owner, work))
    }

    /// Gives a connection back: [`Server::poll_ended`] has it when its messages are done.
    pub fn unattach(&self, id: psock::Id, patience: Option<Duration>) {
        let now = self.shared.now();
        self.shared.change(|mux| mux.unattach(id, patience.map(|patience| now + patience), now));
    }

    /// Ends a connection when its messages are done and answered.
    pub fn drain_psock(&self, id: psock::Id, patience: Option<Duration>) {
        let now = self.shared.now();
        self.shared.change(|mux| mux.drain_psock(id, patience.map(|patience| now + patience), now));
    }

    /// Ends the connection of a peer that was admitted, at once, as if it had been reset, also while it shakes hands. Whether
    /// there was one.
    pub fn close_peer(&self, peer: &Peer) -> bool {
        let now = self.shared.now();
        self.shared.with(|state, work| {
            let mut attached = state.sockets.iter();
            let found = attached.find(|(_, socket)| socket.link.peer() == Some(peer)).map(|(id, _)| id);
            if let Some(id) = found {
                state.mux.handle_error(id, Errno::CONNABORTED.raw_os_error(), now);
            }
            found.is_some()
                || state.refuse_handshake(&self.shared, peer, work)
                || state.refuse_lingering(&self.shared, peer, work)
        })
    }

    /// Stops listening, drains every connection, and then lets the workers go: [`Worker::recv`] gives `None`. From then on
    /// connections are not waited for, but a worker that has a message is, however long it takes: nobody can end a thread.
    /// A peer that still sends is read, and that dropped, until it has taken its answers.
    pub fn drain(&self, patience: Option<Duration>) {
        let now = self.shared.now();
        self.shared.with(|state, work| {
            state.shut(&self.shared, work);
            let deadline = patience.map(|patience| now + patience);
            state.lingers.end_by(deadline);
            state.mux.drain(deadline, now);
        });
    }

    /// A new worker, for one thread.
    ///
    /// # Errors
    ///
    /// When the mux has drained.
    pub fn worker(&self) -> io::Result<Worker> {
        Worker::new(Arc::clone(&self.shared))
    }

    /// Connected mode: sends a message on the connection that has the least to send, now.
    ///
    /// # Errors
    ///
    /// [`mux::SendError::NotConnected`] when none is open, [`mux::SendError::Full`] when all have as much to send as may wait.
    ///
    /// # Panics
    ///
    /// When the mux is not in connected mode.
    pub fn send(&self, bytes: impl Into<Bytes>) -> Result<psock::Id, mux::SendError> {
        let now = self.shared.now();
        self.shared.change(|mux| mux.send(bytes, now))
    }

    /// The next connection that ended, oldest first. Up to 1024 are kept.
    pub fn poll_ended(&self) -> Option<Ended> {
        self.shared.lock().notices.pop_ended()
    }

    /// The next message that came back, or was not sent; and, to a [`Driver`], what its workers are to do. Oldest first, up to
    /// 1024 are kept.
    pub fn poll_event(&self) -> Option<Event> {
        self.shared.lock().notices.pop_event()
    }

    /// Who is at the other end of a connection; none over a Unix socket, or when it has ended.
    pub fn peer(&self, id: psock::Id) -> Option<SocketAddr> {
        self.shared.lock().sockets.get(id).and_then(|socket| socket.link.address())
    }

    /// Everything as it stands.
    pub fn show(&self) -> mux::Show {
        self.shared.lock().mux.show()
    }

    /// The core, to be looked at.
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

    /// Writes and wakes, until nothing more follows.
    fn perform(&self, mut work: Work) {
        loop {
            work.wake(self);
            if work.writes.is_empty() {
                return;
            }
            let write = |(mut transmit, link): (mux::Transmit, Arc<Link>)| {
                let outcome = link.write(&mut transmit, self.zerocopy.get().map(|zerocopy| &**zerocopy));
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
        // It only fails when it has been rung 2^64 times: then it rings.
        let _ = rustix::io::write(self.eventfd.as_fd(), &1u64.to_ne_bytes());
    }
}

/// The time on a clock that began then.
fn since(start: Instant) -> Time {
    Time::from_nanos(u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX))
}

fn timespec(time: Duration) -> rustix::event::Timespec {
    rustix::event::Timespec {
        tv_sec: time.as_secs().try_into().unwrap_or(i64::MAX),
        tv_nsec: time.subsec_nanos().into(),
    }
}
