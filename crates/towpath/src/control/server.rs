//! The control socket: a thread that has the sockets, so that the engine has none of this.
//!
//! Who may ask: the engine's own user, root and the socket's owner, whoever the kernel says the peer is (SO_PEERCRED). Whoever
//! else the socket's file lets in (by its group, say) may look, but at nobody's packets, and change nothing; its mode is 0600
//! unless it was said otherwise. At most [`CLIENTS`] at a time, and those who only look cannot take the last [`KEPT`] of these
//! places; one more is told so and closed. What they may take of memory and time is in [`Session`]. Every refusal is counted,
//! and told in the log.

use std::fs::Permissions;
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, TryRecvError};
use std::thread::JoinHandle;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::Mode;
use thiserror::Error;
use towpath_ring::{Credentials, SocketFile};

use super::accept_backoff::AcceptBackoff;
use super::flow_filter::FlowFilter;
use super::protocol::{Code, Request};
use super::query::{Ended, Query, QueryInbox, QuerySender, Response};
use super::ruleset;
use super::session::Session;
use super::trace::{TraceBuffer, TraceSource};
use crate::config::Control;
use crate::eventfd::EventFd;
use crate::ruleset_manager::RulesetManager;

/// Clients at a time.
const CLIENTS: usize = 64;

/// Places that those who only look leave free.
const KEPT: usize = 8;

/// Connections taken at a time.
const ACCEPTS: usize = 64;

/// Requests of one client before the others have their turn.
const AT_A_TIME: usize = 16;

/// Nanoseconds between two looks at what a trace has brought.
const TRACE_LOOK: u64 = 10_000_000;

/// Events of one answer.
const EVENTS: usize = 500;

/// Nanoseconds between two looks in any case.
const LOOK: u64 = 1_000_000_000;

/// Nanoseconds that clients have for the last answers when the engine has ended.
const SHUTDOWN_GRACE: u64 = 1_000_000_000;

/// Why there is no control socket.
#[derive(Debug, Error)]
pub enum BindError {
    /// Another engine has it.
    #[error("another engine listens on {0}; stop it or choose another path")]
    InUse(PathBuf),
    /// There is a file that is no socket.
    #[error("{0} is there already and no socket; choose another path or remove it")]
    NoSocket(PathBuf),
    /// The system refused it.
    #[error("cannot listen on {path}: {source}; name a directory that is there and may be written to")]
    System {
        /// The socket.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
}

/// The control socket of one engine. Dropping it removes the socket, after the clients have got their last answers: of an engine
/// whose inboxes are still there (it panics) that is that it has ended.
#[derive(Debug)]
pub struct Server {
    file: Option<SocketFile>,
    over: Arc<AtomicBool>,
    bell: EventFd,
    thread: Option<JoinHandle<()>>,
}

/// A control socket that nobody answers yet: connections wait.
#[derive(Debug)]
pub struct Listening {
    /// The first to be dropped: it knows its own file as long as that is listened on.
    file: SocketFile,
    listener: UnixListener,
    access: Access,
}

/// Who may do what.
#[derive(Clone, Copy, Debug)]
pub struct Access {
    /// The engine's user.
    engine: u32,
    /// Who may change things too.
    owner: Option<u32>,
    /// Whoever the socket's file lets in may look.
    others: bool,
}

/// What a client may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    Owner,
    /// It may look.
    Reader,
}

impl Role {
    /// Why a request is not granted.
    fn refuses(self, request: &Request) -> Option<&'static str> {
        match self {
            Self::Owner => None,
            Self::Reader if request.changes() => {
                Some("you may look, and change nothing; root, the engine's user and the socket's owner may")
            }
            Self::Reader if request.looks_into_packets() => {
                Some("you may not look into packets; root, the engine's user and the socket's owner may")
            }
            Self::Reader => None,
        }
    }

    /// Clients there may be for one more to be let in.
    fn room(self) -> usize {
        match self {
            Self::Owner => CLIENTS,
            Self::Reader => CLIENTS - KEPT,
        }
    }
}

impl Access {
    fn of(self, user: u32) -> Option<Role> {
        match user {
            0 => Some(Role::Owner),
            user if user == self.engine || Some(user) == self.owner => Some(Role::Owner),
            _ => self.others.then_some(Role::Reader),
        }
    }
}

impl Listening {
    /// Listens as a configuration says. A socket that nobody listens on any more is replaced.
    ///
    /// # Errors
    /// Why not.
    pub fn bind(control: &Control) -> Result<Self, BindError> {
        let path = control.socket.as_path();
        let system = |source| BindError::System { path: path.into(), source };
        // Nobody gets in before the file has its owner and mode.
        let before = rustix::process::umask(Mode::from_raw_mode(0o177));
        let bound = bind(path);
        rustix::process::umask(before);
        let (listener, file) = bound?;
        if control.owner.is_some() || control.group.is_some() {
            std::os::unix::fs::chown(path, control.owner, control.group).map_err(system)?;
        }
        std::fs::set_permissions(path, Permissions::from_mode(control.mode)).map_err(system)?;
        listener.set_nonblocking(true).map_err(system)?;
        let access = Access {
            engine: rustix::process::geteuid().as_raw(),
            owner: control.owner,
            others: control.mode & 0o066 != 0,
        };
        Ok(Self { file, listener, access })
    }

    /// Begins to answer: a inbox for each of `wakes`, which are rung when there is a question for threads that may sleep.
    ///
    /// # Errors
    /// The system refused it.
    pub fn start(
        self,
        book: Option<Arc<RulesetManager>>,
        wakes: Vec<Option<EventFd>>,
    ) -> Result<(Server, Vec<QueryInbox>), BindError> {
        let Self { file, listener, access } = self;
        let system = |source| BindError::System { path: file.path().into(), source };
        let bell = EventFd::new().map_err(system)?;
        let over = Arc::new(AtomicBool::new(false));
        let (inboxes, senders) = wakes.into_iter().map(|wake| QueryInbox::new(bell.clone(), wake)).unzip();
        let house = ServerState {
            listener,
            pause: AcceptBackoff::of("control"),
            senders,
            over: Arc::clone(&over),
            bell: bell.clone(),
            book,
            clients: Vec::new(),
            access,
            watched: false,
            start: Instant::now(),
            stats: Stats::default(),
        };
        let thread =
            std::thread::Builder::new().name("control".into()).spawn(|| house.run()).map_err(system)?;
        Ok((Server { file: Some(file), over, bell, thread: Some(thread) }, inboxes))
    }
}

fn bind(path: &Path) -> Result<(UnixListener, SocketFile), BindError> {
    SocketFile::bind(path, || UnixListener::bind(path)).map_err(|error| match error.kind() {
        ErrorKind::AddrInUse if SocketFile::is_socket(path) => BindError::InUse(path.into()),
        ErrorKind::AddrInUse => BindError::NoSocket(path.into()),
        _ => BindError::System { path: path.into(), source: error },
    })
}

impl Server {
    /// Listens at `path`, for this user and root. A socket that nobody listens on any more is replaced.
    ///
    /// # Errors
    /// Why not.
    pub fn open(path: &Path, book: Option<Arc<RulesetManager>>) -> Result<(Self, QueryInbox), BindError> {
        let (server, mut inboxes) = Listening::bind(&Control::private(path))?.start(book, vec![None])?;
        Ok((server, inboxes.remove(0)))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // First the name: who comes now finds nobody, not somebody who leaves.
        self.file = None;
        // Release: pairs with the acquire in the thread. Desks may be left, whose engine will not end before this process does.
        self.over.store(true, Ordering::Release);
        self.bell.signal();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// What the thread has.
struct ServerState {
    listener: UnixListener,
    pause: AcceptBackoff,
    /// One for each thread of the engine.
    senders: Vec<QuerySender>,
    /// Nobody is to be served any more, whatever becomes of the engine.
    over: Arc<AtomicBool>,
    bell: EventFd,
    /// The rules; none when there are none to look at.
    book: Option<Arc<RulesetManager>>,
    clients: Vec<Client>,
    access: Access,
    /// Somebody gets events.
    watched: bool,
    start: Instant,
    stats: Stats,
}

/// Clients that were turned away.
#[derive(Clone, Copy, Debug, Default)]
struct Stats {
    not_permitted: u64,
    too_many: u64,
    cut_off: u64,
}

struct Client {
    stream: UnixStream,
    role: Role,
    session: Session,
    asked: Option<Asked>,
    /// It cannot be written to or read from any more.
    gone: bool,
}

/// What the engine was asked for a client.
struct Asked {
    request: Request,
    /// Those that have not come.
    replies: Vec<Receiver<Response>>,
    /// Those that have, in one.
    merged: Option<Response>,
    source: Option<TraceSource>,
}

impl ServerState {
    fn run(mut self) {
        let mut farewell = None;
        loop {
            let now = self.now();
            // Acquire: pairs with the release in `Server::drop`.
            let over = self.over.load(Ordering::Acquire) || self.senders.iter().all(QuerySender::is_over);
            if farewell.is_none() && over {
                farewell = Some(now + SHUTDOWN_GRACE);
            }
            for client in &mut self.clients {
                client.serve(&self.senders, self.book.as_deref(), now, farewell.is_some());
                if client.session.handle_timeout(now) {
                    self.stats.cut_off += 1;
                    log::warn!(
                        "control: a client was cut off: it was silent or slow ({} so far)",
                        self.stats.cut_off
                    );
                    client.gone = true;
                }
            }
            self.clients.retain(|client| !client.gone && !client.session.is_over());
            self.tell_events();
            if farewell.is_some_and(|farewell| self.clients.is_empty() || now >= farewell) {
                return;
            }
            if let Err(error) = self.wait(now) {
                log::warn!("control: poll: {error}");
                return;
            }
            self.bell.clear();
            self.accept();
        }
    }

    /// Gives what happened to states to those who watch.
    fn tell_events(&mut self) {
        let Some(book) = &self.book else { return };
        let watch = self.clients.iter().any(|client| client.session.is_watching());
        if watch != self.watched {
            self.watched = watch;
            book.watch(watch);
        }
        if !watch {
            return;
        }
        let (events, lost) = ruleset::events(book);
        for part in events.chunks(EVENTS) {
            let part = Arc::from(part);
            self.clients.iter_mut().for_each(|client| client.session.handle_events(&part, lost));
        }
    }

    fn now(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// Sleeps until somebody wants something.
    fn wait(&mut self, now: u64) -> io::Result<()> {
        let tracing = self.clients.iter().any(|client| client.session.is_tracing());
        let due = self.clients.iter().filter_map(|client| client.session.poll_timeout()).min();
        let until = due.unwrap_or(u64::MAX).min(now + if tracing { TRACE_LOOK } else { LOOK });
        let ready = self.clients.iter().any(|client| client.session.is_ready());
        let sleep = if ready { 0 } else { until.saturating_sub(now) };
        let timeout =
            Timespec { tv_sec: (sleep / 1_000_000_000) as i64, tv_nsec: (sleep % 1_000_000_000) as i64 };
        let listens = if self.pause.is_on() { PollFlags::empty() } else { PollFlags::IN };
        let mut fds = vec![PollFd::new(&self.listener, listens), PollFd::new(&self.bell, PollFlags::IN)];
        for client in &mut self.clients {
            let mut flags = PollFlags::empty();
            flags.set(PollFlags::IN, client.session.wants() > 0);
            flags.set(PollFlags::OUT, !client.session.poll_output().is_empty());
            fds.push(PollFd::new(&client.stream, flags));
        }
        match poll(&mut fds, Some(&timeout)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let hung: Vec<bool> = fds[2..].iter().map(|fd| fd.revents().contains(PollFlags::HUP)).collect();
        for (client, hung) in self.clients.iter_mut().zip(hung) {
            client.gone |= hung && client.session.is_tracing();
        }
        Ok(())
    }

    fn accept(&mut self) {
        for _ in 0..ACCEPTS {
            if self.pause.is_on() {
                return;
            }
            let stream = match self.listener.accept() {
                Ok((stream, _)) => stream,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                // One that has given up meanwhile, or a signal.
                Err(error)
                    if matches!(error.kind(), ErrorKind::ConnectionAborted | ErrorKind::Interrupted) =>
                {
                    continue;
                }
                Err(error) => return self.pause.begin(&error),
            };
            if stream.set_nonblocking(true).is_err() {
                continue;
            }
            let mut session = Session::new(self.now());
            let peer = Credentials::of(&stream);
            let role = peer.as_ref().ok().and_then(|peer| self.access.of(peer.uid));
            match (role, peer) {
                (Some(_), _) => {}
                (None, Ok(peer)) => {
                    self.stats.not_permitted += 1;
                    let Credentials { pid, uid, .. } = peer;
                    let count = self.stats.not_permitted;
                    if count.is_power_of_two() {
                        log::warn!(
                            "control: refused process {pid} of user {uid}: neither the engine's user nor root ({count} so far)"
                        );
                    }
                    session.refuse(
                        Code::NotPermitted,
                        format!("user {uid} may not look into an engine of user {}", self.access.engine),
                    );
                    say_farewell(stream, session);
                    continue;
                }
                (None, Err(error)) => {
                    log::warn!("control: a client's credentials are not known: {error}");
                    continue;
                }
            }
            let role = role.unwrap_or(Role::Reader);
            if self.clients.len() >= role.room() {
                self.stats.too_many += 1;
                if self.stats.too_many.is_power_of_two() {
                    log::warn!(
                        "control: {} connections refused: {} at a time",
                        self.stats.too_many,
                        role.room()
                    );
                }
                session.refuse(Code::Busy, format!("{} clients look already; try again", role.room()));
                say_farewell(stream, session);
                continue;
            }
            self.clients.push(Client { stream, role, session, asked: None, gone: false });
        }
    }
}

/// Writes what fits at once: a new socket has room for an error.
fn say_farewell(mut stream: UnixStream, mut session: Session) {
    let _ = stream.write(session.poll_output());
}

impl Client {
    fn serve(&mut self, senders: &[QuerySender], book: Option<&RulesetManager>, now: u64, over: bool) {
        self.read(now);
        self.take_reply(book, now, over);
        for _ in 0..AT_A_TIME {
            if let Some(request) = self.session.poll_request(now) {
                self.grant(request, senders, book, now);
            }
            self.write(now);
            if self.gone || !self.session.is_ready() {
                break;
            }
        }
        if over && self.asked.is_none() && (!self.session.is_tracing() || self.session.is_watching()) {
            self.session.close();
        }
    }

    fn read(&mut self, now: u64) {
        let mut buffer = [0; 4096];
        let room = self.session.wants().min(buffer.len());
        if room == 0 {
            return;
        }
        match self.stream.read(&mut buffer[..room]) {
            Ok(0) => self.session.handle_end(),
            Ok(n) => self.session.handle_bytes(&buffer[..n], now),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
            Err(_) => self.gone = true,
        }
    }

    fn grant(&mut self, request: Request, senders: &[QuerySender], book: Option<&RulesetManager>, now: u64) {
        if let Some(why) = self.role.refuses(&request) {
            return self.session.refuse(Code::NotPermitted, why.to_owned());
        }
        if request == Request::Events && book.is_some() {
            return self.session.watch(now);
        }
        match book.and_then(|book| ruleset::answer(book, &request)) {
            Some(Ok(answer)) => self.session.handle_answer(&answer, now),
            Some(Err((code, message))) => self.session.refuse(code, message),
            None => self.ask(request, senders),
        }
    }

    fn ask(&mut self, request: Request, senders: &[QuerySender]) {
        let filter = match &request {
            Request::Follow { rule, flow, .. } => FlowFilter::new(*rule, flow.as_deref()),
            _ => Ok(FlowFilter::default()),
        };
        let filter = match filter {
            Ok(filter) => filter,
            Err(message) => return self.session.refuse(Code::Invalid, message),
        };
        // One trace of all threads together.
        let (tap, source) = match request {
            Request::Trace { .. } | Request::Follow { .. } => Some(TraceBuffer::new()).unzip(),
            _ => (None, None),
        };
        let again = || tap.as_ref().map_or_else(|| TraceBuffer::new().0, TraceBuffer::again);
        let mut replies = Vec::new();
        for sender in senders {
            let ask = match request {
                Request::ShowRings => Query::Rings,
                Request::ShowMux => Query::Mux,
                Request::ShowSend => Query::Send,
                Request::ShowFrames { channel } => Query::Frames(channel),
                Request::ShowQueues => Query::Queues,
                Request::ShowPorts => Query::Ports,
                Request::ShowStats => Query::Stats,
                Request::Trace { channel, .. } => Query::Trace(channel, again()),
                Request::Follow { .. } => Query::Follow(filter.clone(), again()),
                // The ruleset has answered all others.
                _ => {
                    return self
                        .session
                        .refuse(Code::NotFound, "this engine has nothing of that kind".into());
                }
            };
            match sender.ask(ask) {
                Ok(Some(reply)) => replies.push(reply),
                Ok(None) => {
                    let message = "the engine has too many questions to answer";
                    return self.session.refuse(Code::Busy, message.into());
                }
                // One thread of several: the others answer.
                Err(Ended) => {}
            }
        }
        if replies.is_empty() {
            return self.session.refuse(Code::Ended, "the engine has ended".into());
        }
        self.asked = Some(Asked { request, replies, merged: None, source });
    }

    fn take_reply(&mut self, book: Option<&RulesetManager>, now: u64, over: bool) {
        let Some(mut asked) = self.asked.take() else { return };
        if !self.session.is_waiting() {
            // It was told that the engine is busy; the replies are nobody's.
            return;
        }
        asked.replies.retain(|reply| match reply.try_recv() {
            Ok(reply) => {
                asked.merged = Some(match asked.merged.take() {
                    Some(merged) => merged.merge(reply),
                    None => reply,
                });
                false
            }
            Err(TryRecvError::Empty) if !over => true,
            // It ended before it could.
            Err(_) => false,
        });
        if !asked.replies.is_empty() {
            self.asked = Some(asked);
            return;
        }
        match asked.merged {
            Some(mut reply) => {
                if let (Response::Stats(stats), Some(book)) = (&mut reply, book) {
                    stats.recheck = book.rechecks();
                }
                self.session.handle_reply(&asked.request, reply, asked.source, now);
            }
            None => self.session.refuse(Code::Ended, "the engine has ended".into()),
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
mod tests {
    use std::thread;

    use super::super::QueryHandler;
    use super::super::protocol::{Answer, Frame, Ring, emit, parse_answer};
    use super::*;

    #[test]
    fn who_may_ask_what() {
        let access = Access { engine: 100, owner: Some(7), others: true };
        let closed = Access { others: false, ..access };
        for (user, open, shut) in [
            (0, Some(Role::Owner), Some(Role::Owner)),
            (100, Some(Role::Owner), Some(Role::Owner)),
            (7, Some(Role::Owner), Some(Role::Owner)),
            (8, Some(Role::Reader), None),
        ] {
            assert_eq!((access.of(user), closed.of(user)), (open, shut), "user {user}");
        }
        for (request, reader) in [
            (Request::ShowRings, true),
            (Request::ShowStates { from: 0, verbose: false }, true),
            (Request::Events, true),
            (Request::ShowFrames { channel: 1 }, false),
            (Request::Trace { channel: 1, count: None }, false),
            (Request::Follow { rule: Some(100), flow: None, count: None }, false),
            (Request::Command { text: "flush".into(), check: false }, false),
            (Request::Set { name: "dyn_max".into(), value: 1 }, false),
        ] {
            assert_eq!(Role::Reader.refuses(&request).is_none(), reader, "{request:?}");
            assert_eq!(Role::Owner.refuses(&request), None, "{request:?}");
        }
        assert!(Role::Reader.room() < Role::Owner.room());
    }

    /// An engine that has nothing to show.
    struct Nothing;

    impl QueryHandler for Nothing {
        fn rings(&mut self) -> Vec<Ring> {
            Vec::new()
        }
        fn frames(&mut self, _: u32) -> Option<Vec<Frame>> {
            None
        }
        fn ports(&self) -> Vec<String> {
            Vec::new()
        }
    }

    fn ask(mut stream: &UnixStream) -> Option<Answer> {
        stream.write_all(&emit(&Request::ShowRings)).ok()?;
        let mut length = [0; 4];
        stream.read_exact(&mut length).ok()?;
        let mut message = vec![0; u32::from_le_bytes(length) as usize];
        stream.read_exact(&mut message).ok()?;
        parse_answer(&message[1..]).ok()
    }

    #[test]
    fn another_engines_socket_stays() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        let one = Server::open(&path, None).unwrap();
        assert!(matches!(Server::open(&path, None), Err(BindError::InUse(_))));
        std::fs::remove_file(&path).unwrap();
        let (server, inbox) = Server::open(&path, None).unwrap();
        drop(one);
        assert!(UnixStream::connect(&path).is_ok());
        drop(inbox);
        drop(server);
        assert!(!path.exists());
    }

    #[test]
    fn the_others_answer_for_a_thread_that_has_ended() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        let listening = Listening::bind(&Control::private(&path)).unwrap();
        let (server, mut inboxes) = listening.start(None, vec![None, None]).unwrap();
        drop(inboxes.remove(0));
        // It was served while one inbox was gone already.
        let asked = |inbox: &mut QueryInbox| {
            let path = path.clone();
            let client = thread::spawn(move || ask(&UnixStream::connect(path).unwrap()));
            while !client.is_finished() {
                inbox.attend(&mut Nothing);
                thread::yield_now();
            }
            client.join().unwrap()
        };
        for _ in 0..2 {
            assert_eq!(asked(&mut inboxes[0]), Some(Answer::Rings { rings: Vec::new() }));
        }
        drop(inboxes);
        drop(server);
    }

    #[test]
    fn it_ends_although_its_engine_does_not() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        let (server, inbox) = Server::open(&path, None).unwrap();
        let mut asks = UnixStream::connect(&path).unwrap();
        asks.write_all(&emit(&Request::ShowRings)).unwrap();
        // Nobody attends the inbox.
        drop(server);
        assert!(!path.exists());
        // Whether it was told so depends on whether it was let in before.
        let _ = asks.read_to_end(&mut Vec::new());
        drop(inbox);
    }
}
