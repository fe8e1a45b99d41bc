//! The engine's Unix socket, where clients attach.

use std::collections::VecDeque;
use std::io::ErrorKind;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use towpath_metrics::metrics;

use crate::engine::bind_error::BindError;
use crate::engine::channel::Channel;
use crate::engine::open::open;
use crate::engine::quota::{Quota, Quotas};
use crate::engine::socket_file::SocketFile;
use crate::handshake::messages::{HELLO, Hello, Notice, Refusal, Reply, Welcome};
use crate::lane::verdict::Verdict;
use crate::reaper::{self, PeerKey, Plain, Reaped, Reaper};
use crate::shm::abi::{self, Layout, VERSION};
use crate::shm::geometry::Geometry;
use crate::shm::header::Credentials;
use crate::shm::park::Fences;
use crate::shm::sys::{self, Sent};

/// Users that may attach.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Allow {
    /// Every user that the socket's file permissions admit.
    Any,
    /// These user ids.
    Users(Vec<u32>),
    /// These user ids, and processes that have one of these group ids when they connect.
    UsersAndGroups(Vec<u32>, Vec<u32>),
}

impl Allow {
    fn allows(&self, peer: &Credentials) -> bool {
        match self {
            Self::Any => true,
            Self::Users(users) => users.contains(&peer.uid),
            Self::UsersAndGroups(users, groups) => users.contains(&peer.uid) || groups.contains(&peer.gid),
        }
    }
}

/// Configuration of an endpoint: rings, limits and defaults for its clients.
#[derive(Clone, Debug)]
pub struct Config {
    /// Ring towards the client. The default is [`Geometry::RX`].
    pub rx: Geometry,
    /// Ring from the client. The default is [`Geometry::TX`].
    pub tx: Geometry,
    /// Lanes per client, 1 to 64: one for each engine thread ([`Channel::split`]). Each lane has both rings. The
    /// default is 1.
    pub lanes: u32,
    /// Whether the payload towards clients uses huge pages (2 MiB, `vm.nr_hugepages`) if the area is a multiple of 2
    /// MiB and the system has enough free ones. Memory that clients write is always in ordinary pages. The default
    /// is true; [`ChannelStats::huge_pages`](crate::ChannelStats::huge_pages) has the result.
    pub huge_pages: bool,
    /// Cumulative verdicts in flight per lane: a power of two from 2 to 65536. The default is 256.
    pub records: u32,
    /// Users that may attach. The default is the engine's user and root.
    pub allow: Allow,
    /// Deadline for a verdict; none for no deadline. The default is 1 s.
    pub deadline: Option<Duration>,
    /// Verdict for frames that the client does not decide: overdue frames and invalid verdicts. The default is
    /// [`Verdict::Drop`] (fail closed).
    pub default_verdict: Verdict<'static>,
    /// Frames that a client may hold. Further holds are counted and refused; the ring stops at such a frame until
    /// its deadline. The default is 1024.
    pub held_max: u32,
    /// Invalid words after which a client is detached. The default is 64.
    pub violations_max: u64,
    /// Overdue frames after which a client is detached as stuck. By default there is no limit.
    pub overdue_max: Option<u64>,
    /// Connections without a hello; a further one closes the oldest of the user that has the most. The default is 16.
    pub pending_max: usize,
    /// Bytes in flight to one client in one-shot messages, and the largest one-shot message in both directions. The
    /// default is 64 MiB.
    pub oneshot_max: u64,
    /// Longest replacement ([`Verdict::Replace`]) in bytes. The client library refuses longer ones. A longer one
    /// from another client is not copied: the frame gets the default verdict, and it counts as a violation. The
    /// default is 256 KiB, the longest frame of Towpath's ports.
    pub replacement_max: u32,
    /// Whether the engine receives messages from clients; then it must call [`Channel::poll_messages`]. The default
    /// is false.
    pub messages: bool,
    /// Whether each side uses its own fence when it checks, after a burst, if the other side sleeps. The default is
    /// false: the sleeper executes both fences (membarrier(2)), which costs nothing per frame and microseconds per
    /// sleep.
    pub bursts: bool,
    /// Limits per user.
    pub quota: Quota,
    /// Closes descriptors and unmaps memory of clients. The default is the [shared](Reaper::shared) one.
    pub reaper: Reaper,
}

impl Default for Config {
    fn default() -> Self {
        let mut users = vec![rustix::process::geteuid().as_raw(), 0];
        users.dedup();
        Self {
            rx: Geometry::RX,
            tx: Geometry::TX,
            lanes: 1,
            huge_pages: true,
            records: 256,
            allow: Allow::Users(users),
            deadline: Some(Duration::from_secs(1)),
            default_verdict: Verdict::Drop,
            held_max: 1024,
            violations_max: 64,
            overdue_max: None,
            pending_max: 16,
            oneshot_max: 64 << 20,
            replacement_max: 256 << 10,
            messages: false,
            bursts: false,
            quota: Quota::default(),
            reaper: Reaper::shared(),
        }
    }
}

impl Config {
    pub(crate) fn layout(&self) -> Layout {
        Layout { rx: self.rx, tx: self.tx, records: self.records }
    }

    /// Bytes of shared memory per client, charged against [`Quota::bytes_per_user`].
    #[must_use]
    pub fn bytes_per_client(&self) -> u64 {
        u64::from(self.lanes) * self.layout().total_bytes()
    }

    fn check(&self) -> Result<(), BindError> {
        let rule = |direction| move |rule| BindError::Geometry { direction, rule };
        self.rx.check().map_err(rule("RX"))?;
        self.tx.check().map_err(rule("TX"))?;
        if !self.records.is_power_of_two() || self.records < 2 || self.records > Layout::MAX_RECORDS {
            return Err(BindError::Records(self.records));
        }
        if !(1..=abi::MAX_LANES).contains(&self.lanes) {
            return Err(BindError::Lanes(self.lanes));
        }
        Ok(())
    }
}

/// Doorbells of an adopted client that are read in one look for its hello.
const NOTICES: u32 = 64;

/// A connection without a hello.
#[derive(Debug)]
struct Pending {
    socket: Reaped<OwnedFd>,
    peer: Credentials,
    /// A client of an earlier channel, whose doorbells precede its hello.
    adopted: bool,
}

/// The engine's socket. Dropping it removes the socket's file unless the path names another file by then. Its
/// channels stay.
///
/// ```
/// use towpath_ring::{Config, Consumer, Endpoint, Meta, Verdict};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let dir = tempfile::tempdir()?;
/// let path = dir.path().join("ring.sock");
/// let mut endpoint = Endpoint::bind(&path, Config::default())?;
///
/// let client = std::thread::spawn(move || -> Result<_, Box<dyn std::error::Error + Send + Sync>> {
///     let mut queue = Consumer::attach(&path)?;
///     let frame = queue.recv()?.expect("the engine is there");
///     let size = queue.payload(&frame).len();
///     queue.verdict(frame, Verdict::Pass);
///     Ok(size)
/// });
///
/// let mut channel = loop {
///     match endpoint.accept()? {
///         Some(channel) => break channel,
///         None => endpoint.wait(None)?,
///     }
/// };
/// let mut reservation = channel.reserve(5)?;
/// reservation.write(b"hello");
/// let seq = reservation.commit(&Meta::default());
/// channel.kick();
/// channel.wait(None)?;
/// channel.poll_verdicts(0, |decided, decision| {
///     assert_eq!((decided, decision.verdict), (seq, Verdict::Pass));
/// });
/// assert_eq!(client.join().unwrap().unwrap(), 5);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Endpoint {
    /// Dropped first: it identifies its own file while the listener is open.
    file: SocketFile,
    listener: Reaped<OwnedFd>,
    /// epoll set: the listener and every pending connection.
    watched: OwnedFd,
    config: Config,
    /// Oldest first.
    pending: VecDeque<Pending>,
    quotas: Quotas,
    fences: Fences,
    stats: Stats,
}

metrics! {
    /// Counters of an endpoint.
    pub struct Stats in "endpoint" {
        /// Clients attached.
        pub attached: counter connections,
        /// Connections refused because the allow-list does not contain the user.
        pub not_permitted: counter connections as "refused": "Connections refused, by reason." (reason = "not_permitted"),
        /// Connections refused because the client has another ABI version.
        pub wrong_version: counter connections as "refused" (reason = "wrong_version"),
        /// Connections refused because a quota was reached, or because the user is barred.
        pub over_limit: counter connections as "refused" (reason = "over_limit"),
        /// Connections closed because the set-up failed or the first message was not a hello.
        pub failed: counter connections as "refused" (reason = "failed"),
        /// Users barred for a while, after a violation by one of their clients or too many attaches.
        pub bars: counter events,
    }
}

impl Endpoint {
    /// Listens at `path`. Replaces a stale socket; keeps a file of any other kind.
    ///
    /// # Errors
    /// The broken rule of the configuration, an engine that listens at `path`, or the system's error.
    pub fn bind(path: impl AsRef<Path>, config: Config) -> Result<Self, BindError> {
        let path = path.as_ref();
        config.check()?;
        let failed = |source| BindError::Listen { path: path.into(), source };
        let listen = || {
            let socket = sys::bound(path)?;
            // Until a client is attached, it has no descriptor to pass.
            reaper::refuse_descriptors(&socket)?;
            sys::listen_on(&socket, 64)?;
            Ok(socket)
        };
        let (listener, file) = SocketFile::bind(path, listen).map_err(|error| match error.kind() {
            std::io::ErrorKind::AddrInUse if SocketFile::is_socket(path) => BindError::InUse(path.into()),
            _ => failed(error),
        })?;
        Self::with(listener, file, config).map_err(failed)
    }

    /// Listens on `listener`, which another engine has bound to `path`. The file belongs to that engine until
    /// [`own_file`](Self::own_file).
    ///
    /// # Errors
    /// The broken rule of the configuration, or the system's error.
    pub fn on(listener: OwnedFd, path: impl AsRef<Path>, config: Config) -> Result<Self, BindError> {
        let path = path.as_ref();
        config.check()?;
        rustix::io::ioctl_fionbio(&listener, true)
            .map_err(Into::into)
            .and_then(|()| Self::with(listener, SocketFile::adopt(path, None), config))
            .map_err(|source| BindError::Listen { path: path.into(), source })
    }

    fn with(listener: OwnedFd, file: SocketFile, config: Config) -> std::io::Result<Self> {
        config.reaper.start();
        let listener = config.reaper.wrap(PeerKey::Listener, listener);
        let watched = sys::watch_set()?;
        sys::watch(&watched, &listener)?;
        Ok(Self {
            file,
            listener,
            watched,
            quotas: Quotas::new(config.quota),
            fences: if config.bursts { Fences::Both } else { Fences::offer() },
            config,
            pending: VecDeque::new(),
            stats: Stats::default(),
        })
    }

    /// The listening socket, for another process, and the identity of its file.
    ///
    /// # Errors
    /// There is no free descriptor.
    pub fn listener(&self) -> std::io::Result<(OwnedFd, Option<(u64, u64)>)> {
        Ok((self.listener.try_clone()?, self.file.identity()))
    }

    /// The file belongs to another process from here on.
    pub fn give_up_file(&mut self) {
        self.file.give_up();
    }

    /// The file belongs to this endpoint from here on.
    pub fn own_file(&mut self, identity: Option<(u64, u64)>) {
        self.file.own(identity);
    }

    /// Takes over a client of an earlier channel ([`Channel::hand_over`]). The client is asked for a hello, and
    /// [`accept`](Self::accept) returns its new channel. Allow-list and quotas apply as to a new client.
    ///
    /// # Errors
    /// The client has ended.
    pub fn adopt(&mut self, socket: OwnedFd) -> std::io::Result<()> {
        match sys::send(&socket, &Notice::Renew.emit(), &[])? {
            Sent::Yes => {}
            // A full socket has unread doorbells of the client's last frames; it reads them and then finds the end.
            Sent::Full | Sent::Gone => {
                sys::shut(&socket);
                return Err(ErrorKind::BrokenPipe.into());
            }
        }
        if self.admit(socket, Instant::now(), true) {
            Ok(())
        } else {
            Err(ErrorKind::PermissionDenied.into())
        }
    }

    /// Number of adopted clients whose hello has not arrived.
    #[must_use]
    pub fn adopting(&self) -> usize {
        self.pending.iter().filter(|pending| pending.adopted).count()
    }

    /// Path of the socket.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.file.path()
    }

    /// Sets the owner, the group and the mode of the socket's file ([`SocketFile::set_access`]).
    ///
    /// # Errors
    /// The path names another file than this socket, or the system's error.
    pub fn set_access(
        &self,
        owner: Option<u32>,
        group: Option<u32>,
        mode: Option<u32>,
    ) -> std::io::Result<()> {
        self.file.set_access(owner, group, mode)
    }

    /// The endpoint's counters.
    #[must_use]
    pub fn stats(&self) -> Stats {
        Stats { bars: self.quotas.bars(), ..self.stats }
    }

    /// Changes the allow-list for future clients.
    pub fn set_allow(&mut self, allow: Allow) {
        self.config.allow = allow;
    }

    /// Returns the next attached client, if there is one. Never blocks, and does bounded work.
    ///
    /// # Errors
    /// accept(2) failed for a reason of this process, such as too many open files, or the [`Reaper`] has no room for
    /// the sockets of further clients. Try again later.
    pub fn accept(&mut self) -> std::io::Result<Option<Channel>> {
        self.accept_at(Instant::now())
    }

    /// Like [`accept`](Self::accept), at this time. Limits per time ([`Quota::bar`]) depend on it.
    ///
    /// # Errors
    /// As for [`accept`](Self::accept).
    pub fn accept_at(&mut self, now: Instant) -> std::io::Result<Option<Channel>> {
        if let Some(channel) = self.hear(0, now) {
            return Ok(Some(channel));
        }
        for _ in 0..self.config.pending_max.max(1) {
            if self.config.reaper.is_full() {
                return Err(std::io::Error::other("too many sockets of ended clients wait to be closed"));
            }
            let Some(socket) = sys::accept(&self.listener)? else { return Ok(None) };
            if self.admit(socket, now, false)
                && let Some(channel) = self.hear(self.pending.len() - 1, now)
            {
                return Ok(Some(channel));
            }
        }
        Ok(None)
    }

    /// Waits at most `timeout` until [`accept`](Self::accept) may have work.
    ///
    /// # Errors
    /// poll(2) failed.
    pub fn wait(&self, timeout: Option<Duration>) -> std::io::Result<()> {
        sys::wait(&[self.watched.as_fd()], timeout).map(drop)
    }

    /// Reads the hellos of the pending connections from index `i`.
    fn hear(&mut self, mut i: usize, now: Instant) -> Option<Channel> {
        let mut notices = 0;
        while let Some(pending) = self.pending.get(i) {
            // One byte more than a hello, to detect longer messages.
            let mut hello = [0; HELLO + 1];
            let (reaper, key) = (pending.socket.reaper(), pending.socket.peer());
            let heard = match reaper.receive(key, &*pending.socket, &mut hello) {
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {
                    i += 1;
                    continue;
                }
                Ok(Plain { passed_descriptors: false, bytes })
                    if pending.adopted && notices < NOTICES && Notice::parse(&hello[..bytes]).is_ok() =>
                {
                    notices += 1;
                    continue;
                }
                heard => heard,
            };
            let Some(pending) = self.pending.remove(i) else { break };
            self.unwatch(&pending.socket);
            match heard {
                Ok(Plain { passed_descriptors: true, .. }) => {
                    self.stats.failed += 1;
                    self.quotas.bar(&pending.peer, now);
                    sys::shut(&pending.socket);
                }
                Ok(Plain { bytes: bytes @ 1.., .. }) => {
                    if let Some(channel) = self.attach(pending, &hello[..bytes], now) {
                        return Some(channel);
                    }
                }
                // The end of the socket, or an error.
                _ => self.stats.failed += 1,
            }
        }
        None
    }

    /// The close that would remove the socket from the set happens later.
    fn unwatch(&self, socket: &OwnedFd) {
        if let Err(e) = sys::unwatch(&self.watched, socket) {
            log::warn!("{}: cannot stop watching a connection: {e}", self.path().display());
        }
    }

    /// Returns true if the connection is the last pending one now; otherwise it was refused.
    fn admit(&mut self, socket: OwnedFd, now: Instant, adopted: bool) -> bool {
        let peer = match Credentials::of(&socket) {
            Ok(peer) => peer,
            Err(e) => {
                log::warn!("{}: cannot read a client's credentials: {e}", self.path().display());
                self.stats.failed += 1;
                self.config.reaper.drop_for(PeerKey::Listener, socket);
                return false;
            }
        };
        let key = PeerKey::User(peer.uid);
        // Unread messages may have descriptors.
        let socket = self.config.reaper.wrap(key, socket);
        if self.config.allow.allows(&peer) {
            if let Err(why) = self.quotas.admit(&peer, now) {
                self.refuse_over_limit(&socket, &peer, why);
                return false;
            }
            if !self.config.reaper.has_room(key) {
                let why = format!("descriptors of user {}'s ended connections wait to be closed", peer.uid);
                self.refuse_over_limit(&socket, &peer, why);
                return false;
            }
            // Silent connections could otherwise keep other clients out.
            if !adopted && self.pending.len() - self.adopting() >= self.config.pending_max.max(1) {
                self.refuse_oldest();
            }
            if let Err(e) = sys::watch(&self.watched, &socket) {
                log::warn!(peer = peer.uid; "{}: cannot watch a connection: {e}", self.path().display());
                self.stats.failed += 1;
                return false;
            }
            self.pending.push_back(Pending { socket, peer, adopted });
            return true;
        }
        let Credentials { pid, uid, .. } = peer;
        self.stats.not_permitted += 1;
        let count = self.stats.not_permitted;
        // Any user can trigger this line any number of times.
        if count.is_power_of_two() {
            log::warn!(
                peer = uid;
                "{}: refused process {pid} of user {uid}: not in the allow list ({count} so far)",
                self.path().display()
            );
        }
        refuse(
            &socket,
            Refusal::NotPermitted,
            format!("user {uid} may not attach to {}", self.path().display()),
        );
        false
    }

    /// Refuses the oldest pending connection of the user that has the most, and names the limit. A user with many
    /// connections does not push out those of others, whose hello may not have arrived yet.
    fn refuse_oldest(&mut self) {
        let new = || self.pending.iter().filter(|pending| !pending.adopted);
        let count = |uid| new().filter(|pending| pending.peer.uid == uid).count();
        let most = new().map(|pending| count(pending.peer.uid)).max();
        let oldest =
            self.pending.iter().position(|pending| !pending.adopted && Some(count(pending.peer.uid)) == most);
        let holders: Vec<_> = new().map(|p| format!("[{}]", p.peer.pid)).collect();
        let Some(oldest) = oldest.and_then(|at| self.pending.remove(at)) else { return };
        self.unwatch(&oldest.socket);
        let limit = self.config.pending_max.max(1);
        let over = format!("{limit} connections without a hello; held by: {}", holders.join(" "));
        self.stats.failed += 1;
        let count = self.stats.failed;
        if count.is_power_of_two() {
            log::warn!(
                peer = oldest.peer.uid;
                "{}: refused process {}: {over} ({count} so far)",
                self.path().display(),
                oldest.peer.pid
            );
        }
        refuse(&oldest.socket, Refusal::Limit, over);
    }

    /// Refuses a client, and counts and logs it.
    fn refuse_over_limit(&mut self, socket: &OwnedFd, peer: &Credentials, why: String) {
        self.stats.over_limit += 1;
        let count = self.stats.over_limit;
        // Any user can trigger this line any number of times.
        if count.is_power_of_two() {
            log::warn!(
                peer = peer.uid;
                "{}: refused process {}: {why} ({count} so far)",
                self.path().display(),
                peer.pid
            );
        }
        refuse(socket, Refusal::Limit, why);
    }

    fn attach(&mut self, pending: Pending, hello: &[u8], now: Instant) -> Option<Channel> {
        let Pending { socket, peer, .. } = pending;
        let Ok(mut hello) = Hello::parse(hello) else {
            self.stats.failed += 1;
            sys::shut(&socket);
            return None;
        };
        if hello.version != VERSION {
            let text = format!("engine {VERSION}, client {}", hello.version);
            log::warn!(
                peer = peer.uid;
                "{}: refused process {}: ABI versions differ: {text}",
                self.path().display(),
                peer.pid
            );
            self.stats.wrong_version += 1;
            refuse(&socket, Refusal::Version, text);
            return None;
        }
        // Both sides must support the scheme.
        hello.fences = hello.fences.and(self.fences);
        let charge = match self.quotas.take(&peer, &hello.name, self.config.bytes_per_client(), now) {
            Ok(charge) => charge,
            Err(over) => {
                self.refuse_over_limit(&socket, &peer, over);
                return None;
            }
        };
        if self.config.oneshot_max > 0
            && let Err(e) = reaper::accept_descriptors(&*socket)
        {
            log::warn!(
                peer = peer.uid;
                "{}: process {} cannot send one-shot messages: {e}",
                self.path().display(),
                peer.pid
            );
        }
        match open(&self.config, &socket, peer, &hello, charge) {
            Ok(channel) => {
                self.stats.attached += 1;
                Some(channel)
            }
            Err(e) => {
                log::warn!(
                    peer = peer.uid;
                    "{}: cannot attach process {}: {e}",
                    self.path().display(),
                    peer.pid
                );
                self.stats.failed += 1;
                refuse(&socket, Refusal::Failed, e.to_string());
                None
            }
        }
    }
}

/// Sends a refusal. Delivery is not required: the client has received nothing.
fn refuse(socket: &OwnedFd, why: Refusal, text: String) {
    let welcome = Welcome { version: VERSION, answer: Reply::Refused(why, text) };
    let _ = sys::send(socket, &welcome.emit(), &[]);
    // The client reads the refusal, then the end, whenever the socket is closed.
    sys::shut(socket);
}

impl AsFd for Endpoint {
    /// Readable if [`Endpoint::accept`] has work.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.watched.as_fd()
    }
}

#[cfg(test)]
mod tests;
