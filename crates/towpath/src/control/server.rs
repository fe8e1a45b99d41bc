//! The control socket. A dedicated thread serves it, so no engine thread reads from or writes to a client.
//!
//! Access: root, the engine's user and the socket's `owner` are owners ([`Role::Owner`]), by the credentials that the kernel reports
//! (SO_PEERCRED). Other users that the mode of the socket file lets in are readers: they see no packets and change nothing. The default
//! mode is 0600. The number of clients is limited for each user and for all (`slots.rs`); a client too many gets an error. The limits of
//! one client are in [`Session`]. Every refusal is counted and logged.
//!
//! Clients may not pass descriptors: a descriptor's close may sleep as long as its maker wants. The kernel refuses them (Linux 6.16); on
//! older kernels the client is disconnected. Sockets and descriptors are closed by the [`Reaper`]'s threads.

use std::io::{self, ErrorKind, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::Mode;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use serde_json::Value;
use thiserror::Error;
use towpath_ring::reaper::{PeerKey, Plain, Reaped, Reaper, refuse_descriptors};
use towpath_ring::{Credentials, SocketFile};

use super::accept_backoff::AcceptBackoff;
use super::command::{Access, Context, Pending, Reply, Request};
use super::commands::show_states::Event;
use super::endpoints::EndpointCounters;
use super::protocol::{Code, READER_REQUEST_MAX, Refusal};
use super::query::{QueryInbox, QuerySender};
use super::session::{Late, Session};
use super::slots::{self, AccessControl, ControlStats, Full, Role};
use crate::config::Control;
use crate::eventfd::EventFd;
use crate::process::Identity;
use crate::ruleset_manager::RulesetManager;
use crate::service_manager::{Address, Sockets};

/// Connections that wait to be accepted.
const BACKLOG: i32 = 128;

/// Key under which the [`Reaper`] closes the listener; its accept queue may hold connections with passed descriptors.
const LISTENER: PeerKey = PeerKey::Worker(u32::MAX);

/// Maximum number of connections accepted in one turn of the server's loop.
const ACCEPTS: usize = 64;

/// Maximum number of requests served for one client in one turn.
const BURST: usize = 16;

/// Bytes read from a client at once.
const READ: usize = 16 << 10;

/// Interval in nanoseconds at which the output of traces is read.
const TRACE_INTERVAL: u64 = 10_000_000;

/// Maximum number of events in one answer.
const EVENTS: usize = 500;

/// Maximum sleep in nanoseconds.
const MAX_SLEEP: u64 = 1_000_000_000;

/// Nanoseconds that clients have to read the last answers after the engine has ended.
const SHUTDOWN_GRACE: u64 = 1_000_000_000;

/// Why the control socket cannot be created.
#[derive(Debug, Error)]
pub enum BindError {
    /// Another engine listens on it.
    #[error("another engine listens on {0}; stop it or choose another path")]
    InUse(PathBuf),
    /// The file exists and is not a socket.
    #[error("{0} exists and is not a socket; choose another path or remove it")]
    NoSocket(PathBuf),
    /// A system call failed.
    #[error("cannot listen on {path}: {source}; choose a path in an existing, writable directory")]
    System {
        /// The socket.
        path: PathBuf,
        /// The error.
        source: io::Error,
    },
}

/// The control socket of an engine. When dropped, it removes the socket and waits until the clients have their last answers, at most
/// `SHUTDOWN_GRACE`.
#[derive(Debug)]
pub struct Server {
    file: Option<SocketFile>,
    listener: Arc<Reaped<UnixListener>>,
    /// Another process accepts clients.
    handed_over: Arc<AtomicBool>,
    over: Arc<AtomicBool>,
    wakeup: EventFd,
    thread: Option<JoinHandle<()>>,
    endpoints: EndpointCounters,
    /// One for each engine thread, for other servers.
    senders: Vec<QuerySender>,
}

/// A control socket before its server starts. Connections wait.
#[derive(Debug)]
pub struct Listening {
    /// Must be dropped before `listener`: the file is identified by its inode number, which may be reused once the listener is
    /// closed.
    file: SocketFile,
    listener: UnixListener,
    access: AccessControl,
    /// Another process accepts clients at first ([`Server::suspend`]).
    suspended: bool,
}

impl Listening {
    /// Creates the socket of a configuration. A socket file without a listener is replaced.
    ///
    /// # Errors
    ///
    /// Fails if another engine listens, if the file is not a socket, or if a system call fails.
    pub fn bind(control: &Control) -> Result<Self, BindError> {
        Self::bind_as(control, None)
    }

    /// As [`bind`](Self::bind), for an engine that becomes the user `identity`. It owns the file unless the configuration names an
    /// owner.
    ///
    /// # Errors
    ///
    /// As [`bind`](Self::bind).
    pub fn bind_as(control: &Control, identity: Option<Identity>) -> Result<Self, BindError> {
        let path = control.socket.as_path();
        let system = |source| BindError::System { path: path.into(), source };
        let (listener, file) = bind(path)?;
        let owner = control.owner.or(identity.map(|identity| identity.user));
        let group = control.group.or(identity.map(|identity| identity.group));
        file.set_access(owner, group, Some(control.mode)).map_err(system)?;
        let access = AccessControl {
            engine: Identity::engine_user(identity),
            owner: control.owner,
            others: control.mode & 0o066 != 0,
        };
        Ok(Self { file, listener, access, suspended: false })
    }

    /// As [`bind_as`](Self::bind_as), with the socket of the service manager if it has passed it.
    ///
    /// # Errors
    ///
    /// As [`bind`](Self::bind).
    pub fn open(
        control: &Control,
        identity: Option<Identity>,
        sockets: &mut Sockets,
    ) -> Result<Self, BindError> {
        let path = control.socket.as_path();
        let Some(passed) = sockets.take(Address::Unix(path)) else {
            let mut listening = Self::bind_as(control, identity)?;
            sockets.store_unix("control", &listening.listener, &mut listening.file);
            return Ok(listening);
        };
        let system = |source| BindError::System { path: path.into(), source };
        let owner = control.owner.or(identity.map(|identity| identity.user));
        let group = control.group.or(identity.map(|identity| identity.group));
        let file = passed.file(path, owner, group, Some(control.mode)).map_err(system)?;
        let listener = UnixListener::from(passed.socket);
        listener.set_nonblocking(true).map_err(system)?;
        refuse_descriptors(&listener).map_err(system)?;
        let access = AccessControl {
            engine: Identity::engine_user(identity),
            owner: control.owner,
            others: control.mode & 0o066 != 0,
        };
        Ok(Self { file, listener, access, suspended: false })
    }

    /// The private socket at `path` of another process, which has passed its listener and the identity of its file.
    ///
    /// # Errors
    ///
    /// Fails if it is not a Unix socket.
    pub fn adopt(path: &Path, listener: OwnedFd, file: Option<(u64, u64)>) -> Result<Self, BindError> {
        let system = |source| BindError::System { path: path.into(), source };
        let listener = UnixListener::from(listener);
        listener.set_nonblocking(true).map_err(system)?;
        let access = AccessControl { engine: Identity::engine_user(None), owner: None, others: false };
        Ok(Self { file: SocketFile::adopt(path, file), listener, access, suspended: false })
    }

    /// The socket of the process that this one replaces, which has passed its listener, with the access rights of the configuration. That
    /// process accepts clients until [`Server::suspend`], and has the file until [`Server::own_file`].
    ///
    /// # Errors
    ///
    /// Fails if it is not a Unix socket.
    pub fn adopt_as(
        control: &Control,
        identity: Option<Identity>,
        listener: OwnedFd,
    ) -> Result<Self, BindError> {
        let this = Self::adopt(&control.socket, listener, None)?;
        let access = AccessControl {
            engine: Identity::engine_user(identity),
            owner: control.owner,
            others: control.mode & 0o066 != 0,
        };
        Ok(Self { access, suspended: true, ..this })
    }

    /// Starts the server's thread. Returns one inbox for each of `wakes`: the eventfd that wakes the engine thread for a query, or
    /// `None` if the thread looks into its inbox in intervals.
    ///
    /// # Errors
    ///
    /// Fails if eventfd(2) or the creation of the thread fails.
    pub fn start(
        self,
        ruleset: Option<Arc<RulesetManager>>,
        wakes: Vec<Option<EventFd>>,
    ) -> Result<(Server, Vec<QueryInbox>), BindError> {
        self.start_with(ruleset, wakes, EndpointCounters::default())
    }

    /// As [`start`](Self::start), with counters that other threads publish.
    ///
    /// # Errors
    ///
    /// As [`start`](Self::start).
    pub fn start_with(
        self,
        ruleset: Option<Arc<RulesetManager>>,
        wakes: Vec<Option<EventFd>>,
        endpoints: EndpointCounters,
    ) -> Result<(Server, Vec<QueryInbox>), BindError> {
        let Self { file, listener, access, suspended } = self;
        let system = |source| BindError::System { path: file.path().into(), source };
        let wakeup = EventFd::new().map_err(system)?;
        let over = Arc::new(AtomicBool::new(false));
        let (inboxes, senders): (_, Vec<_>) =
            wakes.into_iter().map(|wake| QueryInbox::new(wakeup.clone(), wake)).unzip();
        let others = senders.iter().map(|sender| sender.for_server(wakeup.clone())).collect();
        let reaper = Reaper::shared();
        let listener = Arc::new(reaper.wrap(LISTENER, listener));
        let handed_over = Arc::new(AtomicBool::new(suspended));
        let state = ServerState {
            listener: Arc::clone(&listener),
            handed_over: Arc::clone(&handed_over),
            reaper,
            backoff: AcceptBackoff::of("control"),
            senders,
            over: Arc::clone(&over),
            wakeup: wakeup.clone(),
            ruleset,
            clients: Vec::new(),
            access,
            watching: false,
            start: Instant::now(),
            stats: ControlStats::default(),
            endpoints: endpoints.clone(),
        };
        let thread =
            std::thread::Builder::new().name("control".into()).spawn(|| state.run()).map_err(system)?;
        let thread = Some(thread);
        let file = Some(file);
        let server = Server { file, listener, handed_over, over, wakeup, thread, endpoints, senders: others };
        Ok((server, inboxes))
    }
}

fn bind(path: &Path) -> Result<(UnixListener, SocketFile), BindError> {
    SocketFile::bind(path, || listen(path)).map_err(|error| match error.kind() {
        ErrorKind::AddrInUse if SocketFile::is_socket(path) => BindError::InUse(path.into()),
        ErrorKind::AddrInUse => BindError::NoSocket(path.into()),
        _ => BindError::System { path: path.into(), source: error },
    })
}

/// Listens at `path`. The file has the mode 0600 when it appears: no client may connect before it has its owner and mode.
pub(crate) fn listen(path: &Path) -> io::Result<UnixListener> {
    // Accepted sockets inherit the setting.
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    refuse_descriptors(&socket)?;
    // bind(2) gives the mode of the socket's inode to the file (unix_bind_bsd, net/unix/af_unix.c).
    rustix::fs::fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(socket.into())
}

impl Server {
    /// Listens at `path` for this user and root, and serves one engine thread. A socket file without a listener is replaced.
    ///
    /// # Errors
    ///
    /// As [`Listening::bind`] and [`Listening::start`].
    pub fn open(path: &Path, ruleset: Option<Arc<RulesetManager>>) -> Result<(Self, QueryInbox), BindError> {
        let (server, mut inboxes) = Listening::bind(&Control::private(path))?.start(ruleset, vec![None])?;
        Ok((server, inboxes.remove(0)))
    }

    /// A duplicate of the listening socket, and the identity of its file, for another process ([`Listening::adopt`]).
    ///
    /// # Errors
    ///
    /// Fails if the process has no free descriptor.
    pub fn listener(&self) -> io::Result<(OwnedFd, Option<(u64, u64)>)> {
        let file = self.file.as_ref().and_then(SocketFile::identity);
        Ok(((**self.listener).try_clone()?.into(), file))
    }

    /// Accepts no more clients and keeps the file: another process has both. Clients that are connected are served.
    pub fn hand_over(&mut self) {
        if let Some(file) = &mut self.file {
            file.give_up();
        }
        self.suspend(true);
    }

    /// Stops (`true`) or resumes (`false`) accepting clients. Another process may accept them meanwhile.
    pub fn suspend(&self, suspend: bool) {
        // Relaxed: the thread may accept a client later than this, whom it serves.
        self.handed_over.store(suspend, Ordering::Relaxed);
        self.wakeup.signal();
    }

    /// Owns the file of the socket from here on: the process that owned it has given it up.
    pub fn own_file(&mut self, identity: Option<(u64, u64)>) {
        if let Some(file) = &mut self.file {
            file.own(identity);
        }
    }

    /// Senders of queries for another server, which `wakeup` wakes.
    pub(crate) fn senders(&self, wakeup: &EventFd) -> Vec<QuerySender> {
        self.senders.iter().map(|sender| sender.for_server(wakeup.clone())).collect()
    }

    /// The counters that other threads publish.
    pub fn endpoints(&self) -> &EndpointCounters {
        &self.endpoints
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // The file first: a client that connects now finds no engine instead of one that ends.
        self.file = None;
        // Release: pairs with the acquire in the thread. Without this flag the thread ends only when all inboxes are dropped; an
        // engine thread may still hold one.
        self.over.store(true, Ordering::Release);
        self.wakeup.signal();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The server's thread.
struct ServerState {
    listener: Arc<Reaped<UnixListener>>,
    handed_over: Arc<AtomicBool>,
    reaper: Reaper,
    backoff: AcceptBackoff,
    /// One for each engine thread.
    senders: Vec<QuerySender>,
    /// Set when the server must end, even if the engine still runs.
    over: Arc<AtomicBool>,
    wakeup: EventFd,
    ruleset: Option<Arc<RulesetManager>>,
    clients: Vec<Client>,
    access: AccessControl,
    /// True if a client has subscribed to state events.
    watching: bool,
    start: Instant,
    stats: ControlStats,
    endpoints: EndpointCounters,
}

struct Client {
    stream: Reaped<UnixStream>,
    user: u32,
    role: Role,
    session: Session,
    pending: Option<Box<dyn Pending>>,
    /// The stream has failed.
    gone: bool,
    /// It passed descriptors.
    passed_descriptors: bool,
}

impl ServerState {
    fn run(mut self) {
        crate::background::begin_as(crate::sandbox::Role::Control);
        let mut deadline = None;
        loop {
            let now = self.now();
            // Acquire: pairs with the release in `Server::drop`.
            let over = self.over.load(Ordering::Acquire) || self.senders.iter().all(QuerySender::has_ended);
            if deadline.is_none() && over {
                deadline = Some(now + SHUTDOWN_GRACE);
            }
            self.stats.clients = self.clients.len() as u64;
            let control = self.stats;
            self.endpoints.update(|servers| servers.control = control);
            let (ruleset, engines, endpoints) = (self.ruleset.as_ref(), &self.senders, &self.endpoints);
            let context = Context { ruleset, engines, control, endpoints };
            for client in &mut self.clients {
                client.serve(&self.reaper, &context, now, deadline.is_some());
                let (count, what) = match client.session.handle_timeout(now) {
                    _ if client.passed_descriptors => (&mut self.stats.descriptors, "passed descriptors"),
                    None => continue,
                    Some(Late::Idle) => (&mut self.stats.idle, "made no request for 60 s"),
                    Some(Late::Slow) => (&mut self.stats.slow, "sent or read too slowly"),
                };
                *count += 1;
                tracing::warn!(
                    peer = client.user,
                    "control: disconnected a client of user {}, which {what} ({count} so far)",
                    client.user
                );
                client.gone = true;
            }
            self.clients.retain(|client| !client.gone && !client.session.is_over());
            self.distribute_events();
            if deadline.is_some_and(|deadline| self.clients.is_empty() || now >= deadline) {
                return;
            }
            if let Err(error) = self.wait(now) {
                tracing::warn!("control: poll: {error}");
                return;
            }
            self.wakeup.clear();
            self.accept();
        }
    }

    /// Sends state events to the clients that subscribed to them.
    fn distribute_events(&mut self) {
        let Some(ruleset) = &self.ruleset else { return };
        let watching = self.clients.iter().any(|client| client.session.takes_events());
        if watching != self.watching {
            self.watching = watching;
            ruleset.watch(watching);
        }
        if !watching {
            return;
        }
        let (events, lost) = ruleset.events();
        let events: Vec<Event> = events.into_iter().map(Event::from).collect();
        for part in events.chunks(EVENTS) {
            let part = Arc::from(part);
            self.clients.iter_mut().for_each(|client| client.session.handle_events(&part, lost));
        }
    }

    fn now(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// Sleeps until a descriptor is ready or a timeout is due.
    fn wait(&mut self, now: u64) -> io::Result<()> {
        let live = self.clients.iter().any(|client| client.session.is_live());
        let due = self.clients.iter().filter_map(|client| client.session.poll_timeout()).min();
        let pace = self.clients.iter().filter_map(|client| client.session.poll_pace(now)).min();
        let until = due.into_iter().chain(pace).min().unwrap_or(u64::MAX);
        let until = until.min(now + if live { TRACE_INTERVAL } else { MAX_SLEEP });
        let ready = self.clients.iter().any(|client| client.session.is_ready(now));
        let sleep = if ready { 0 } else { until.saturating_sub(now) };
        let timeout =
            Timespec { tv_sec: (sleep / 1_000_000_000) as i64, tv_nsec: (sleep % 1_000_000_000) as i64 };
        let pauses = self.backoff.is_on() || self.handed_over.load(Ordering::Relaxed);
        let listens = if pauses { PollFlags::empty() } else { PollFlags::IN };
        let mut fds = vec![PollFd::new(&**self.listener, listens), PollFd::new(&self.wakeup, PollFlags::IN)];
        for client in &mut self.clients {
            let mut flags = PollFlags::empty();
            flags.set(PollFlags::IN, client.session.wants() > 0);
            flags.set(PollFlags::OUT, !client.session.poll_output().is_empty());
            fds.push(PollFd::new(&*client.stream, flags));
        }
        match poll(&mut fds, Some(&timeout)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let hung: Vec<bool> = fds[2..].iter().map(|fd| fd.revents().contains(PollFlags::HUP)).collect();
        for (client, hung) in self.clients.iter_mut().zip(hung) {
            client.gone |= hung && client.session.is_live();
        }
        Ok(())
    }

    fn accept(&mut self) {
        for _ in 0..ACCEPTS {
            if self.backoff.is_on() || self.handed_over.load(Ordering::Relaxed) {
                return;
            }
            let stream = match self.listener.accept() {
                Ok((stream, _)) => stream,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                // The client has given up, or a signal was received.
                Err(error)
                    if matches!(error.kind(), ErrorKind::ConnectionAborted | ErrorKind::Interrupted) =>
                {
                    continue;
                }
                Err(error) => return self.backoff.begin(&error),
            };
            if stream.set_nonblocking(true).is_err() {
                continue;
            }
            self.admit(stream);
        }
    }

    /// Gives a client its place, or refuses it.
    fn admit(&mut self, stream: UnixStream) {
        let mut session = Session::new(self.now());
        let Credentials { pid, uid, .. } = match Credentials::of(&stream) {
            Ok(peer) => peer,
            Err(error) => {
                self.reaper.drop_for(LISTENER, stream);
                return tracing::warn!("control: the credentials of a client are unknown: {error}");
            }
        };
        let stream = self.reaper.wrap(PeerKey::User(uid), stream);
        if !self.reaper.has_room(stream.peer()) {
            // Too many closes are pending in the Reaper. This connection is still admitted; accept then pauses for 1 s.
            let error = format!("user {uid} has closed connections whose descriptors cannot be closed");
            self.backoff.begin(&io::Error::other(error));
        }
        let Some(role) = self.access.role(uid) else {
            self.stats.not_permitted += 1;
            let count = self.stats.not_permitted;
            tracing::warn!(
                peer = uid,
                "control: refused process {pid} of user {uid}: neither the engine's user nor root ({count} so far)"
            );
            let message = format!("user {uid} has no access to the engine of user {}", self.access.engine);
            session.refuse(&Refusal::new(Code::NotPermitted, message));
            return send_refusal(stream, session);
        };
        if let Err(full) = slots::admit(self.clients.iter().map(|client| client.user), uid, role) {
            let count = match full {
                Full::All(_) => &mut self.stats.too_many,
                Full::User(..) => &mut self.stats.user_limit,
            };
            *count += 1;
            tracing::warn!(
                peer = uid,
                "control: refused process {pid} of user {uid}: {full} ({count} so far)"
            );
            session.refuse(&Refusal::new(Code::Busy, full.to_string()));
            return send_refusal(stream, session);
        }
        self.stats.accepted += 1;
        if role == Role::Reader {
            session.limit_requests(READER_REQUEST_MAX);
        }
        let (pending, gone, passed_descriptors) = (None, false, false);
        self.clients.push(Client { stream, user: uid, role, session, pending, gone, passed_descriptors });
    }
}

/// Writes a refusal. A new socket has room for it.
fn send_refusal(mut stream: Reaped<UnixStream>, mut session: Session) {
    let _ = stream.write(session.poll_output());
}

impl Client {
    fn serve(&mut self, reaper: &Reaper, context: &Context<'_>, now: u64, over: bool) {
        self.read(reaper, now);
        self.take_reply(now, over);
        for _ in 0..BURST {
            if let Some((request, body)) = self.session.poll_request(now) {
                self.grant(request, body, context, now);
            }
            self.write(now);
            if self.gone || !self.session.is_ready(now) {
                break;
            }
        }
        if over && self.pending.is_none() && (!self.session.is_live() || self.session.takes_events()) {
            self.session.close();
        }
    }

    fn read(&mut self, reaper: &Reaper, now: u64) {
        let mut buffer = [0; READ];
        for _ in 0..BURST {
            let room = self.session.wants().min(buffer.len());
            if room == 0 {
                return;
            }
            match reaper.receive(self.stream.peer(), &*self.stream, &mut buffer[..room]) {
                Ok(Plain { passed_descriptors: true, .. }) => self.passed_descriptors = true,
                Ok(Plain { bytes: 0, .. }) => self.session.handle_end(),
                Ok(Plain { bytes, .. }) => {
                    self.session.handle_bytes(&buffer[..bytes], now);
                    if bytes == buffer.len() {
                        continue;
                    }
                }
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
                Err(_) => self.gone = true,
            }
            return;
        }
    }

    fn grant(&mut self, request: &Request, body: Value, context: &Context<'_>, now: u64) {
        match self.role.refusal(request.access) {
            Some(refusal) => self.session.refuse(&refusal),
            None if request.access == Access::Root && self.user != 0 => {
                self.session.refuse(&Refusal::new(Code::NotPermitted, "only root may do this"));
            }
            None => match (request.handle)(body, context) {
                Ok(Reply::Pending(pending)) => self.pending = Some(pending),
                Ok(reply) => self.session.handle_reply(reply, now),
                Err(refusal) => self.session.refuse(&refusal),
            },
        }
    }

    fn take_reply(&mut self, now: u64, over: bool) {
        // The session has refused a request that took too long: its result is dropped.
        let Some(mut pending) = self.pending.take().filter(|_| self.session.is_waiting()) else { return };
        match pending.poll(over) {
            None | Some(Ok(Reply::Pending(_))) => self.pending = Some(pending),
            Some(Ok(reply)) => self.session.handle_reply(reply, now),
            Some(Err(refusal)) => self.session.refuse(&refusal),
        }
    }

    fn write(&mut self, now: u64) {
        loop {
            let output = self.session.poll_output();
            if output.is_empty() {
                return;
            }
            match self.stream.write(output) {
                Ok(n) => self.session.handle_taken(n, now),
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {
                    return;
                }
                Err(_) => {
                    self.gone = true;
                    return;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
