//! Where clients attach: the engine's Unix socket.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use towpath_metrics::metrics;

use crate::engine::bind_error::BindError;
use crate::engine::channel::Channel;
use crate::engine::open::open;
use crate::engine::quota::{Quota, Quotas};
use crate::engine::socket_file::SocketFile;
use crate::handshake::messages::{HELLO, Hello, Refusal, Reply, Welcome};
use crate::lane::verdict::Verdict;
use crate::shm::abi::{self, Layout, VERSION};
use crate::shm::geometry::Geometry;
use crate::shm::header::Credentials;
use crate::shm::park::Fences;
use crate::shm::sys::{self, Received};

/// Which users may attach.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Allow {
    /// Every user whom the socket's file permissions let in.
    Any,
    /// These user ids.
    Users(Vec<u32>),
    /// These user ids, and processes whose group is one of these when they connect, whatever their user is.
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

/// What an endpoint gives its clients, and what it asks of them.
#[derive(Clone, Debug)]
pub struct Config {
    /// The ring towards the client.
    pub rx: Geometry,
    /// The ring from the client.
    pub tx: Geometry,
    /// How many lanes each client has, 1 to 64: one for each engine thread that sends to it ([`Channel::split`]). Each has
    /// both rings, and the memory of both. The default is 1.
    pub lanes: u32,
    /// Whether the payload towards clients may be in huge pages (2 MiB, `vm.nr_hugepages`): when the area is a multiple of
    /// them and the system has enough to spare; else ordinary pages do. What clients write is always in ordinary pages.
    /// The default is yes; [`ChannelStats::huge_pages`](crate::ChannelStats::huge_pages) says what it came to.
    pub huge_pages: bool,
    /// Cumulative verdicts that may be under way, on each lane: a power of two.
    pub records: u32,
    /// Who may attach. The default is the engine's own user and root.
    pub allow: Allow,
    /// How long a frame may stay undecided; none means for ever. The default is 1 s.
    pub deadline: Option<Duration>,
    /// The verdict of frames that their client does not decide: overdue, left by the dead, or answered with garbage.
    /// The default is [`Verdict::Drop`] (fail closed).
    pub default_verdict: Verdict<'static>,
    /// Most frames that a client may hold at a time; a hold beyond it is counted and not honoured, so that the ring
    /// comes to a stop at that frame.
    pub held_max: u32,
    /// Words without meaning after which a client is detached.
    pub violations_max: u64,
    /// A client that sits on more than so many overdue frames is stuck, and detached. The default is none: it stays.
    pub overdue_max: Option<u64>,
    /// Most connections that have not said hello yet; one more ends the oldest of them.
    pub pending_max: usize,
    /// Most bytes under way to one client in messages that are larger than its ring; also the largest such message, in
    /// both directions.
    pub oneshot_max: u64,
    /// Most bytes of a replacement ([`Verdict::Replace`]), however it comes. A client is told, and its library refuses to send a
    /// longer one; what comes all the same is not copied: the frame gets the default verdict, and it counts as a word
    /// without meaning. The default is 256 KiB, the longest frame of any of Towpath's ports.
    pub replacement_max: u32,
    /// Whether messages from clients are wanted; then [`Channel::poll_messages`] must be called. The default is not.
    pub messages: bool,
    /// Whether each side looks in a burst's end, behind a fence of its own, if the other is asleep. The default is not: who goes to
    /// sleep makes everybody's fence (membarrier(2)), which costs nothing for each frame, and microseconds for each sleep.
    pub bursts: bool,
    /// What each user may have.
    pub quota: Quota,
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
        }
    }
}

impl Config {
    pub(crate) fn layout(&self) -> Layout {
        Layout { rx: self.rx, tx: self.tx, records: self.records }
    }

    /// Bytes of shared memory that each client takes to begin with, of what its user may have
    /// ([`Quota::bytes_per_user`]).
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

/// A connection that has not said hello.
#[derive(Debug)]
struct Pending {
    socket: OwnedFd,
    peer: Credentials,
}

/// The engine's socket. Dropping it removes the socket's file, unless it is another's by then; channels stay.
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
    /// The first to be dropped: it knows its own file as long as that is listened on.
    file: SocketFile,
    listener: OwnedFd,
    /// The listener and every pending connection.
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
        pub not_permitted: counter connections as "refused" (reason = "not_permitted"),
        /// Connections refused because the client has another ABI version.
        pub wrong_version: counter connections as "refused" (reason = "wrong_version"),
        /// Connections refused because a quota was reached.
        pub over_limit: counter connections as "refused" (reason = "over_limit"),
        /// Connections closed because the set-up failed or the first message was no hello.
        pub failed: counter connections as "refused" (reason = "failed"),
    }
}

impl Endpoint {
    /// Listens at `path`. A socket file that no engine listens on any more is replaced; a file of any other kind is not.
    ///
    /// # Errors
    /// The rule that the configuration breaks, a live engine at `path`, or what the system said.
    pub fn bind(path: impl AsRef<Path>, config: Config) -> Result<Self, BindError> {
        let path = path.as_ref();
        config.check()?;
        let failed = |source| BindError::Listen { path: path.into(), source };
        let (listener, file) =
            SocketFile::bind(path, || sys::listen(path, 64)).map_err(|error| match error.kind() {
                std::io::ErrorKind::AddrInUse if SocketFile::is_socket(path) => BindError::InUse(path.into()),
                _ => failed(error),
            })?;
        let watched = sys::watch_set().map_err(failed)?;
        sys::watch(&watched, &listener).map_err(failed)?;
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

    /// Where it listens.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.file.path()
    }

    /// What it has done.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.stats
    }

    /// Lets these attach from now on. Who has attached stays.
    pub fn set_allow(&mut self, allow: Allow) {
        self.config.allow = allow;
    }

    /// The next client that has attached, if there is one. Never blocks, and does a bounded amount of work.
    ///
    /// # Errors
    /// When accept(2) fails for a reason that is ours, such as too many open files.
    pub fn accept(&mut self) -> std::io::Result<Option<Channel>> {
        for _ in 0..self.config.pending_max.max(1) {
            if let Some(channel) = self.hear() {
                return Ok(Some(channel));
            }
            let Some(socket) = sys::accept(&self.listener)? else { return Ok(None) };
            self.admit(socket);
        }
        Ok(self.hear())
    }

    /// Waits until [`accept`](Self::accept) may have something to do, at most `timeout`.
    ///
    /// # Errors
    /// When poll(2) fails.
    pub fn wait(&self, timeout: Option<Duration>) -> std::io::Result<()> {
        sys::wait(&[self.watched.as_fd()], timeout).map(drop)
    }

    /// Reads the hellos that have come.
    fn hear(&mut self) -> Option<Channel> {
        let mut i = 0;
        while let Some(pending) = self.pending.get(i) {
            // Longer than a hello, so that what is too long is not taken for one.
            let mut hello = [0; HELLO + 1];
            let heard = sys::recv(&pending.socket, &mut hello);
            if let Ok(Received::Nothing) = heard {
                i += 1;
                continue;
            }
            let Some(pending) = self.pending.remove(i) else { break };
            if let Err(e) = sys::unwatch(&self.watched, &pending.socket) {
                log::warn!("{}: cannot stop watching a connection: {e}", self.path().display());
            }
            let Ok(Received::Message(len, _)) = heard else {
                self.stats.failed += 1;
                continue;
            };
            if let Some(channel) = self.attach(pending, &hello[..len]) {
                return Some(channel);
            }
        }
        None
    }

    fn admit(&mut self, socket: OwnedFd) {
        let peer = match Credentials::of(&socket) {
            Ok(peer) => peer,
            Err(e) => {
                log::warn!("{}: a client's credentials are not known: {e}", self.path().display());
                self.stats.failed += 1;
                return;
            }
        };
        if self.config.allow.allows(&peer) {
            // Connections that say nothing could otherwise keep everybody else out.
            if self.pending.len() >= self.config.pending_max.max(1) {
                self.refuse_oldest();
            }
            if let Err(e) = sys::watch(&self.watched, &socket) {
                log::warn!("{}: cannot watch a connection: {e}", self.path().display());
                self.stats.failed += 1;
                return;
            }
            self.pending.push_back(Pending { socket, peer });
            return;
        }
        let Credentials { pid, uid, .. } = peer;
        self.stats.not_permitted += 1;
        let count = self.stats.not_permitted;
        // Anybody may try, as often as they like.
        if count.is_power_of_two() {
            log::warn!(
                "{}: refused process {pid} of user {uid}: not in the allow list ({count} so far)",
                self.path().display()
            );
        }
        refuse(
            &socket,
            Refusal::NotPermitted,
            format!("user {uid} may not attach to {}", self.path().display()),
        );
    }

    /// Ends the connection that has said nothing for longest, and says which limit it is.
    fn refuse_oldest(&mut self) {
        let holders: Vec<_> = self.pending.iter().map(|p| format!("[{}]", p.peer.pid)).collect();
        let Some(oldest) = self.pending.pop_front() else { return };
        let limit = self.config.pending_max.max(1);
        let over = format!("{limit} connections that have not said hello; held by: {}", holders.join(" "));
        self.stats.failed += 1;
        let count = self.stats.failed;
        if count.is_power_of_two() {
            log::warn!(
                "{}: refused process {}: {over} ({count} so far)",
                self.path().display(),
                oldest.peer.pid
            );
        }
        refuse(&oldest.socket, Refusal::Limit, over);
    }

    fn attach(&mut self, pending: Pending, hello: &[u8]) -> Option<Channel> {
        let Pending { socket, peer } = pending;
        let Ok(mut hello) = Hello::parse(hello) else {
            self.stats.failed += 1;
            return None;
        };
        if hello.version != VERSION {
            let text = format!("engine {VERSION}, client {}", hello.version);
            log::warn!(
                "{}: refused process {}: ABI versions differ: {text}",
                self.path().display(),
                peer.pid
            );
            self.stats.wrong_version += 1;
            refuse(&socket, Refusal::Version, text);
            return None;
        }
        // What the client offers and we cannot take part in is not agreed on.
        hello.fences = hello.fences.and(self.fences);
        let charge = match self.quotas.take(&peer, &hello.name, self.config.bytes_per_client()) {
            Ok(charge) => charge,
            Err(over) => {
                log::warn!("{}: refused process {}: {over}", self.path().display(), peer.pid);
                self.stats.over_limit += 1;
                refuse(&socket, Refusal::Limit, over);
                return None;
            }
        };
        match open(&self.config, &socket, peer, &hello, charge) {
            Ok(channel) => {
                self.stats.attached += 1;
                Some(channel)
            }
            Err(e) => {
                log::warn!("{}: cannot attach process {}: {e}", self.path().display(), peer.pid);
                self.stats.failed += 1;
                refuse(&socket, Refusal::Failed, e.to_string());
                None
            }
        }
    }
}

/// Tells a client why not. It has not been given anything, so that it does not listen is no concern.
fn refuse(socket: &OwnedFd, why: Refusal, text: String) {
    let welcome = Welcome { version: VERSION, answer: Reply::Refused(why, text) };
    let _ = sys::send(socket, &welcome.emit(), &[]);
}

impl AsFd for Endpoint {
    /// Readable when [`Endpoint::accept`] has something to do.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.watched.as_fd()
    }
}
