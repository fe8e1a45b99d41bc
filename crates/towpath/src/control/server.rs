//! The control socket: a thread that has the sockets, so that the engine has none of this.
//!
//! Who may ask: the engine's own user and root, whoever the kernel says the peer is (SO_PEERCRED); the socket's file has
//! mode 0600 besides. At most [`CLIENTS`] at a time; one more is told so and closed. What they may take of memory and time
//! is in [`Session`]. Every refusal is counted, and told in the log.

use std::fs::Permissions;
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, TryRecvError};
use std::thread::JoinHandle;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt::socket_peercred;
use thiserror::Error;

use super::desk::{Ask, Desk, Ended, Mailbox, Reply};
use super::protocol::{Code, Request};
use super::session::Session;
use super::tap::{Spout, Tap};

/// Clients at a time.
const CLIENTS: usize = 64;

/// Connections taken at a time.
const ACCEPTS: usize = 64;

/// Requests of one client before the others have their turn.
const AT_A_TIME: usize = 16;

/// Nanoseconds between two looks at what a trace has brought.
const TRACE_LOOK: u64 = 10_000_000;

/// Nanoseconds between two looks in any case.
const LOOK: u64 = 1_000_000_000;

/// Nanoseconds that clients have for the last answers when the engine has ended.
const FAREWELL: u64 = 1_000_000_000;

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
    #[error("cannot listen on {path}: {source}")]
    System {
        /// The socket.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
}

/// The control socket of one engine. Dropping it removes the socket, after the clients have got their last answers; the
/// desk must be gone before, or it waits.
#[derive(Debug)]
pub struct Server {
    path: PathBuf,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Listens at `path`. A socket that nobody listens on any more is replaced.
    ///
    /// # Errors
    /// Why not.
    pub fn open(path: &Path) -> Result<(Self, Desk), BindError> {
        let system = |source| BindError::System { path: path.into(), source };
        let listener = match UnixListener::bind(path) {
            Err(error) if error.kind() == ErrorKind::AddrInUse => {
                let metadata = std::fs::symlink_metadata(path).map_err(system)?;
                if !metadata.file_type().is_socket() {
                    return Err(BindError::NoSocket(path.into()));
                }
                match UnixStream::connect(path) {
                    Ok(_) => return Err(BindError::InUse(path.into())),
                    Err(refused) if refused.kind() == ErrorKind::ConnectionRefused => {}
                    Err(other) => return Err(system(other)),
                }
                std::fs::remove_file(path).map_err(system)?;
                UnixListener::bind(path).map_err(system)?
            }
            other => other.map_err(system)?,
        };
        std::fs::set_permissions(path, Permissions::from_mode(0o600)).map_err(system)?;
        listener.set_nonblocking(true).map_err(system)?;
        let (desk, mailbox) = Desk::new().map_err(system)?;
        let house = House {
            listener,
            mailbox,
            clients: Vec::new(),
            owner: rustix::process::geteuid().as_raw(),
            start: Instant::now(),
            stats: Stats::default(),
        };
        let thread =
            std::thread::Builder::new().name("control".into()).spawn(|| house.run()).map_err(system)?;
        Ok((Self { path: path.into(), thread: Some(thread) }, desk))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // First the name: who comes now finds nobody, not somebody who leaves.
        let _ = std::fs::remove_file(&self.path);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// What the thread has.
struct House {
    listener: UnixListener,
    mailbox: Mailbox,
    clients: Vec<Client>,
    /// The engine's user.
    owner: u32,
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
    session: Session,
    asked: Option<Asked>,
    /// It cannot be written to or read from any more.
    gone: bool,
}

/// What the engine was asked for a client.
struct Asked {
    request: Request,
    reply: Receiver<Reply>,
    spout: Option<Spout>,
}

impl House {
    fn run(mut self) {
        let mut farewell = None;
        loop {
            let now = self.now();
            if farewell.is_none() && self.mailbox.is_over() {
                farewell = Some(now + FAREWELL);
            }
            for client in &mut self.clients {
                client.serve(&self.mailbox, now, farewell.is_some());
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
            if farewell.is_some_and(|farewell| self.clients.is_empty() || now >= farewell) {
                return;
            }
            if let Err(error) = self.wait(now) {
                log::warn!("control: poll: {error}");
                return;
            }
            self.mailbox.bell().hush();
            self.accept();
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
        let mut fds = vec![
            PollFd::new(&self.listener, PollFlags::IN),
            PollFd::new(self.mailbox.bell().fd(), PollFlags::IN),
        ];
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
            let Ok((stream, _)) = self.listener.accept() else { return };
            if stream.set_nonblocking(true).is_err() {
                continue;
            }
            let mut session = Session::new(self.now());
            match socket_peercred(&stream) {
                Ok(peer) if peer.uid.is_root() || peer.uid.as_raw() == self.owner => {}
                Ok(peer) => {
                    self.stats.not_permitted += 1;
                    let (pid, uid) = (peer.pid.as_raw_nonzero(), peer.uid.as_raw());
                    log::warn!(
                        "control: refused process {pid} of user {uid}: neither the engine's user nor root"
                    );
                    session.refuse(
                        Code::NotPermitted,
                        format!("user {uid} may not look into an engine of user {}", self.owner),
                    );
                    say_farewell(stream, session);
                    continue;
                }
                Err(error) => {
                    log::warn!("control: a client's credentials are not known: {error}");
                    continue;
                }
            }
            if self.clients.len() >= CLIENTS {
                self.stats.too_many += 1;
                if self.stats.too_many.is_power_of_two() {
                    log::warn!("control: {} connections refused: {CLIENTS} at a time", self.stats.too_many);
                }
                session.refuse(Code::Busy, format!("{CLIENTS} clients look already; try again"));
                say_farewell(stream, session);
                continue;
            }
            self.clients.push(Client { stream, session, asked: None, gone: false });
        }
    }
}

/// Writes what fits at once: a new socket has room for an error.
fn say_farewell(mut stream: UnixStream, mut session: Session) {
    let _ = stream.write(session.poll_output());
}

impl Client {
    fn serve(&mut self, mailbox: &Mailbox, now: u64, over: bool) {
        self.read(now);
        self.take_reply(now, over);
        for _ in 0..AT_A_TIME {
            if let Some(request) = self.session.poll_request(now) {
                self.ask(request, mailbox);
            }
            self.write(now);
            if self.gone || !self.session.is_ready() {
                break;
            }
        }
        if over && self.asked.is_none() && !self.session.is_tracing() {
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

    fn ask(&mut self, request: Request, mailbox: &Mailbox) {
        let (ask, spout) = match request {
            Request::ShowRings => (Ask::Rings, None),
            Request::ShowMux => (Ask::Mux, None),
            Request::ShowFrames { channel } => (Ask::Frames(channel), None),
            Request::Trace { channel, .. } => {
                let (tap, spout) = Tap::new();
                (Ask::Trace(channel, tap), Some(spout))
            }
        };
        match mailbox.ask(ask) {
            Ok(Some(reply)) => self.asked = Some(Asked { request, reply, spout }),
            Ok(None) => self.session.refuse(Code::Busy, "the engine has too many questions to answer".into()),
            Err(Ended) => self.session.refuse(Code::Ended, "the engine has ended".into()),
        }
    }

    fn take_reply(&mut self, now: u64, over: bool) {
        let Some(asked) = self.asked.take() else { return };
        if !self.session.is_waiting() {
            // It was told that the engine is busy; the reply is nobody's.
            return;
        }
        match asked.reply.try_recv() {
            Ok(reply) => self.session.handle_reply(asked.request, reply, asked.spout, now),
            Err(TryRecvError::Empty) if !over => self.asked = Some(asked),
            Err(_) => self.session.refuse(Code::Ended, "the engine has ended".into()),
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
