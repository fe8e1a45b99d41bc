//! The metrics endpoint: `GET /metrics` over HTTP on a TCP or Unix socket, for Prometheus and other scrapers.
//!
//! One thread serves all clients. It collects the counters as `towpath ctl metrics` does: each engine thread copies its counters between two
//! bursts, at most once per `FRESH` for all clients together. Clients between two collections get the same text.
//!
//! Bounds: `CLIENTS` connections; a new one takes the place of the one that has been idle the longest. Connections that are being served
//! keep their place unless they take nothing for a second; new ones then wait in the kernel's backlog. Accepting costs at most a twentieth
//! of a CPU. Each client has the bounds of `http.rs`. Answers share one copy of the text.

mod http;
mod text;

use std::io::{self, ErrorKind};
use std::net::TcpListener;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{SendFlags, SocketFlags, accept_with, send};
use thiserror::Error;
use towpath_metrics::metrics;
use towpath_ring::reaper::{PeerKey, Plain, Reaped, Reaper, refuse_descriptors};
use towpath_ring::{Credentials, SocketFile};

use self::http::{Connection, Late, Request};
use self::text::{Format, prometheus_text};
use crate::config;
use crate::control::command::{Context, Pending};
use crate::control::commands::collect_metrics;
use crate::control::{AcceptBackoff, AcceptPace, EndpointCounters, QuerySender, listen};
use crate::eventfd::EventFd;
use crate::process::Identity;
use crate::ruleset_manager::RulesetManager;
use crate::service_manager::{Address, Sockets};

/// Connections at a time.
const CLIENTS: usize = 32;

/// Connections accepted in one turn.
const ACCEPTS: usize = 8;

/// Bytes read at once.
const READ: usize = 4 << 10;

/// Maximum age of the text that a client gets.
const FRESH: Duration = Duration::from_millis(250);

/// Maximum time for a collection. Prometheus waits 10 s by default.
const COLLECT: Duration = Duration::from_secs(2);

/// Maximum sleep.
const MAX_SLEEP: Duration = Duration::from_secs(1);

/// Pause before a query is sent again to an engine thread whose inbox is full.
const RETRY: Duration = Duration::from_millis(5);

/// The peer of all TCP clients, for the reaper: TCP passes no descriptors.
const TCP: PeerKey = PeerKey::Worker(u32::MAX - 1);

metrics! {
    /// Counters of the metrics endpoint.
    pub struct EndpointStats in "scrape" {
        /// Clients of the metrics endpoint that are connected.
        pub clients: gauge connections,
        /// Clients of the metrics endpoint that were accepted.
        pub accepted: counter connections,
        /// Requests that were answered with the metrics.
        pub answered: counter events as "requests": "Requests to the metrics endpoint, by result." (result = "answered"),
        /// Requests that were refused: malformed, too long, or for something else than the metrics.
        pub refused: counter events as "requests" (result = "refused"),
        /// Requests that were not answered because the engine threads did not answer in time.
        pub unanswered: counter events as "requests" (result = "unanswered"),
        /// Clients disconnected because they made no request in time.
        pub idle: counter connections as "closed": "Clients of the metrics endpoint that were disconnected, by reason." (reason = "idle"),
        /// Clients disconnected because they did not send or take their messages in time.
        pub slow: counter connections as "closed" (reason = "slow"),
        /// Clients disconnected because a new client needed their place.
        pub displaced: counter connections as "closed" (reason = "displaced"),
        /// Times that the counters were collected.
        pub collections: counter events,
    }
}

/// Why the endpoint cannot be created.
#[derive(Debug, Error)]
#[error("cannot listen on {address}: {source}; {hint}")]
pub struct BindError {
    address: String,
    hint: &'static str,
    source: io::Error,
}

/// A metrics endpoint before its thread starts. Connections wait.
#[derive(Debug)]
pub struct Listening {
    /// Dropped before the listener: the file is identified by its inode number, which may be reused afterwards.
    file: Option<SocketFile>,
    listener: OwnedFd,
    address: String,
}

impl Listening {
    /// Listens as the configuration says, for an engine that becomes the user `identity`.
    ///
    /// # Errors
    ///
    /// [`BindError`].
    pub fn bind(config: &config::Metrics, identity: Option<Identity>) -> Result<Self, BindError> {
        let hint = match config.unix() {
            Some(_) => "choose a path in an existing, writable directory that no other program uses",
            None => "choose an address of this machine and a port that no other program uses",
        };
        let failed = |source| BindError { address: config.listen.clone(), hint, source };
        let (listener, file) = match config.unix() {
            Some(path) => {
                let (listener, file) = SocketFile::bind(path, || listen(path)).map_err(failed)?;
                let (owner, group) = identity.map(|identity| (identity.user, identity.group)).unzip();
                file.set_access(owner, config.group.or(group), Some(config.mode)).map_err(failed)?;
                (listener.into(), Some(file))
            }
            None => {
                let listener = TcpListener::bind(&*config.listen).map_err(failed)?;
                listener.set_nonblocking(true).map_err(failed)?;
                (listener.into(), None)
            }
        };
        Ok(Self::of(config, file, listener))
    }

    /// The endpoint of the process that this one replaces, which has passed its listener. The file of a Unix socket belongs to that
    /// process until [`Endpoint::own_file`].
    pub fn adopt(config: &config::Metrics, listener: OwnedFd) -> Self {
        Self::of(config, config.unix().map(|path| SocketFile::adopt(path, None)), listener)
    }

    fn of(config: &config::Metrics, file: Option<SocketFile>, listener: OwnedFd) -> Self {
        let address = match &file {
            Some(_) => config.listen.clone(),
            None => match rustix::net::getsockname(&listener).map(std::net::SocketAddr::try_from) {
                Ok(Ok(address)) => address.to_string(),
                _ => config.listen.clone(),
            },
        };
        Self { file, listener, address }
    }

    /// As [`bind`](Self::bind), with the socket of the service manager if it has passed it.
    ///
    /// # Errors
    ///
    /// [`BindError`].
    pub fn open(
        config: &config::Metrics,
        identity: Option<Identity>,
        sockets: &mut Sockets,
    ) -> Result<Self, BindError> {
        let Some(passed) = sockets.take(Address::of(&config.address())) else {
            let mut listening = Self::bind(config, identity)?;
            match &mut listening.file {
                Some(file) => sockets.store_unix("metrics", &listening.listener, file),
                None => _ = sockets.store("metrics", listening.listener.as_fd()),
            }
            return Ok(listening);
        };
        let hint = "the socket of the service manager cannot be used: check its unit";
        let failed = |source| BindError { address: config.listen.clone(), hint, source };
        let (owner, group) = identity.map(|identity| (identity.user, identity.group)).unzip();
        let group = config.group.or(group);
        let file = config.unix().map(|path| passed.file(path, owner, group, Some(config.mode)));
        let file = file.transpose().map_err(failed)?;
        if file.is_some() {
            refuse_descriptors(&passed.socket).map_err(failed)?;
        }
        rustix::io::ioctl_fionbio(&passed.socket, true).map_err(|error| failed(error.into()))?;
        Ok(Self { file, listener: passed.socket, address: config.listen.clone() })
    }

    /// Starts the thread. It collects with `senders`, whose queries signal `wakeup`.
    ///
    /// # Errors
    ///
    /// Fails if the thread cannot be created.
    pub fn start(
        self,
        ruleset: Arc<RulesetManager>,
        senders: Vec<QuerySender>,
        wakeup: EventFd,
        shared: EndpointCounters,
    ) -> io::Result<Endpoint> {
        let Self { file, listener, address } = self;
        let copy = listener.try_clone()?;
        let over = Arc::new(AtomicBool::new(false));
        let server = Server {
            listener,
            unix: file.is_some(),
            senders,
            wakeup: wakeup.clone(),
            over: Arc::clone(&over),
            ruleset,
            shared,
            reaper: Reaper::shared(),
            clients: Vec::new(),
            pace: AcceptPace::default(),
            backoff: AcceptBackoff::of("metrics"),
            rendered: None,
            collecting: None,
            stats: EndpointStats::default(),
            start: Instant::now(),
        };
        let thread = std::thread::Builder::new().name("metrics".into()).spawn(|| server.run())?;
        tracing::info!("metrics: listens on {address}");
        Ok(Endpoint { file, listener: copy, over, wakeup, thread: Some(thread) })
    }
}

/// A running metrics endpoint. When dropped, it removes the socket's file and ends the thread.
#[derive(Debug)]
pub struct Endpoint {
    file: Option<SocketFile>,
    listener: OwnedFd,
    over: Arc<AtomicBool>,
    wakeup: EventFd,
    thread: Option<JoinHandle<()>>,
}

impl Endpoint {
    /// The listening socket for another process, and the identity of its file.
    ///
    /// # Errors
    ///
    /// The process has no free descriptor.
    pub fn listener(&self) -> io::Result<(OwnedFd, Option<(u64, u64)>)> {
        Ok((self.listener.try_clone()?, self.file.as_ref().and_then(SocketFile::identity)))
    }

    /// The file belongs to another process from here on.
    pub fn give_up_file(&mut self) {
        self.file.iter_mut().for_each(SocketFile::give_up);
    }

    /// The file belongs to this process from here on.
    pub fn own_file(&mut self, identity: Option<(u64, u64)>) {
        self.file.iter_mut().for_each(|file| file.own(identity));
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        self.file = None;
        // Release: pairs with the acquire in the thread.
        self.over.store(true, Ordering::Release);
        self.wakeup.signal();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The text in both formats, and when its collection began.
struct Rendered {
    begun: Instant,
    open: Arc<str>,
    text: Arc<str>,
}

impl Rendered {
    fn body(&self, format: Format) -> Arc<str> {
        match format {
            Format::OpenMetrics => Arc::clone(&self.open),
            Format::Text => Arc::clone(&self.text),
        }
    }
}

/// A collection that has begun.
struct Collecting {
    begun: Instant,
    /// `None`: the queries are to be sent again.
    pending: Option<Box<dyn Pending<String>>>,
}

struct Client {
    stream: Reaped<OwnedFd>,
    connection: Connection,
    /// The format of the request that waits.
    format: Format,
    gone: bool,
}

/// The thread.
struct Server {
    listener: OwnedFd,
    unix: bool,
    senders: Vec<QuerySender>,
    wakeup: EventFd,
    over: Arc<AtomicBool>,
    ruleset: Arc<RulesetManager>,
    shared: EndpointCounters,
    reaper: Reaper,
    clients: Vec<Client>,
    pace: AcceptPace,
    backoff: AcceptBackoff,
    rendered: Option<Rendered>,
    collecting: Option<Collecting>,
    stats: EndpointStats,
    start: Instant,
}

impl Server {
    fn run(mut self) {
        crate::background::begin_as(crate::sandbox::Role::Metrics);
        // Acquire: pairs with the release in `Endpoint::drop`.
        while !self.over.load(Ordering::Acquire) {
            let now = self.now();
            for client in &mut self.clients {
                client.serve(&self.reaper, now, &mut self.stats);
            }
            self.collect();
            self.answer(now);
            self.clients.retain(|client| !client.gone && !client.connection.is_over());
            self.stats.clients = self.clients.len() as u64;
            let stats = self.stats;
            self.shared.update(|servers| servers.metrics = stats);
            let accepts = match self.wait(now) {
                Ok(accepts) => accepts,
                Err(error) => return tracing::warn!("metrics: poll: {error}"),
            };
            self.wakeup.clear();
            if accepts {
                self.accept();
            }
        }
    }

    fn now(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// Begins a collection if a client waits for one, and takes the result.
    fn collect(&mut self) {
        let now = Instant::now();
        let waits = self.clients.iter().any(|client| client.connection.is_waiting());
        if waits && self.collecting.is_none() && !self.is_fresh(now) {
            self.stats.collections += 1;
            self.collecting = Some(Collecting { begun: now, pending: None });
        }
        let Some(collecting) = &mut self.collecting else { return };
        if collecting.pending.is_none() {
            let servers = self.shared.servers();
            let context = Context {
                ruleset: Some(&self.ruleset),
                engines: &self.senders,
                control: servers.control,
                endpoints: &self.shared,
            };
            // The inbox of a thread may be full: the queries are sent again.
            collecting.pending = collect_metrics(&context, |samples| samples.into_text()).ok();
        }
        let over = self.senders.iter().all(QuerySender::has_ended);
        let result = collecting.pending.as_mut().and_then(|pending| pending.poll(over));
        match result {
            Some(Ok(text)) => {
                let rendered = Rendered {
                    begun: collecting.begun,
                    text: prometheus_text(&text).into(),
                    open: text.into(),
                };
                (self.rendered, self.collecting) = (Some(rendered), None);
            }
            None if collecting.begun.elapsed() < COLLECT && !over => {}
            Some(Err(_)) | None => {
                self.collecting = None;
                for client in self.clients.iter_mut().filter(|client| client.connection.is_waiting()) {
                    client.connection.answer(None, 0);
                    self.stats.unanswered += 1;
                }
            }
        }
    }

    fn is_fresh(&self, now: Instant) -> bool {
        self.rendered.as_ref().is_some_and(|rendered| now.saturating_duration_since(rendered.begun) < FRESH)
    }

    /// Answers the clients that wait, if the text is fresh.
    fn answer(&mut self, now: u64) {
        if self.collecting.is_some() || !self.is_fresh(Instant::now()) {
            return;
        }
        let Some(rendered) = &self.rendered else { return };
        for client in self.clients.iter_mut().filter(|client| client.connection.is_waiting()) {
            client.connection.answer(Some((client.format, rendered.body(client.format))), now);
            self.stats.answered += 1;
            client.write(now);
        }
    }

    /// Sleeps until a descriptor is ready or a time has come. Returns whether a client waits to be accepted.
    fn wait(&mut self, now: u64) -> io::Result<bool> {
        let mut sleep = MAX_SLEEP;
        if let Some(due) = self.clients.iter().filter_map(|client| client.connection.poll_timeout(now)).min()
        {
            sleep = sleep.min(Duration::from_nanos(due.saturating_sub(now)));
        }
        if self.collecting.as_ref().is_some_and(|collecting| collecting.pending.is_none()) {
            sleep = sleep.min(RETRY);
        }
        let waits = self.clients.iter().any(|client| client.connection.is_waiting());
        if waits && self.collecting.is_none() {
            // The text has become too old meanwhile.
            sleep = Duration::ZERO;
        }
        let pause = self.pace.left(Instant::now());
        let has_place = self.clients.len() < CLIENTS || self.victim(now).is_some();
        let listens = pause.is_zero() && has_place && !self.backoff.is_on();
        if !pause.is_zero() {
            sleep = sleep.min(pause);
        } else if !has_place {
            sleep = sleep.min(Duration::from_millis(100));
        }
        let timeout = Timespec { tv_sec: sleep.as_secs() as i64, tv_nsec: sleep.subsec_nanos().into() };
        let flags = if listens { PollFlags::IN } else { PollFlags::empty() };
        let mut fds = vec![PollFd::new(&self.listener, flags), PollFd::new(&self.wakeup, PollFlags::IN)];
        for client in &self.clients {
            let mut flags = PollFlags::empty();
            flags.set(PollFlags::IN, client.connection.wants() > 0);
            flags.set(PollFlags::OUT, !client.connection.poll_output().is_empty());
            fds.push(PollFd::new(&*client.stream, flags));
        }
        match poll(&mut fds, Some(&timeout)) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let accepts = listens && !fds[0].revents().is_empty();
        // Without a request for IN, only a reset or a hang-up of both sides is reported.
        let failed =
            |fd: &PollFd<'_>| fd.revents().intersects(PollFlags::ERR | PollFlags::NVAL | PollFlags::HUP);
        let failed: Vec<bool> = fds[2..].iter().map(failed).collect();
        for (client, failed) in self.clients.iter_mut().zip(failed) {
            client.gone |= failed;
        }
        Ok(accepts)
    }

    /// The client that has been idle the longest.
    fn victim(&self, now: u64) -> Option<usize> {
        let idle = |(at, client): (usize, &Client)| Some((client.connection.idle_since(now)?, at));
        self.clients.iter().enumerate().filter_map(idle).min().map(|(_, at)| at)
    }

    fn accept(&mut self) {
        let begun = Instant::now();
        for _ in 0..ACCEPTS {
            let now = self.now();
            let full = self.clients.len() >= CLIENTS;
            let victim = self.victim(now);
            if full && victim.is_none() {
                break;
            }
            let stream = match accept_with(&self.listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Ok(stream) => stream,
                Err(Errno::AGAIN) => break,
                Err(Errno::CONNABORTED | Errno::INTR) => continue,
                Err(error) => {
                    self.backoff.begin(&error.into());
                    break;
                }
            };
            let peer = match self.unix.then(|| Credentials::of(&stream)) {
                Some(Ok(credentials)) => PeerKey::User(credentials.uid),
                _ => TCP,
            };
            if let Some(victim) = victim.filter(|_| full) {
                self.stats.displaced += 1;
                self.clients.swap_remove(victim);
            }
            self.stats.accepted += 1;
            let stream = self.reaper.wrap(peer, stream);
            let mut client =
                Client { stream, connection: Connection::new(now), format: Format::Text, gone: false };
            // A client whose request has arrived is being served, so the next new client does not take its place.
            client.serve(&self.reaper, now, &mut self.stats);
            self.clients.push(client);
            if AcceptPace::is_over(begun, Instant::now()) {
                break;
            }
        }
        self.pace.pause(begun, Instant::now());
    }
}

impl Client {
    /// Reads, takes a request and writes.
    fn serve(&mut self, reaper: &Reaper, now: u64, stats: &mut EndpointStats) {
        self.read(reaper, now);
        match self.connection.poll_request(now) {
            Some(Request::Metrics(format)) => self.format = format,
            Some(Request::Refused) => stats.refused += 1,
            None => {}
        }
        self.write(now);
        let count = match self.connection.handle_timeout(now) {
            Some(Late::Idle) => &mut stats.idle,
            Some(Late::Slow) => &mut stats.slow,
            None => return,
        };
        *count += 1;
        self.gone = true;
    }

    fn read(&mut self, reaper: &Reaper, now: u64) {
        let mut buffer = [0; READ];
        let room = self.connection.wants().min(buffer.len());
        if room == 0 {
            return;
        }
        match reaper.receive(self.stream.peer(), &*self.stream, &mut buffer[..room]) {
            // The endpoint accepts no descriptors.
            Ok(Plain { passed_descriptors: true, .. }) => self.gone = true,
            Ok(Plain { bytes: 0, .. }) => self.connection.handle_end(),
            Ok(Plain { bytes, .. }) => self.connection.handle_bytes(&buffer[..bytes], now),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
            Err(_) => self.gone = true,
        }
    }

    fn write(&mut self, now: u64) {
        loop {
            let output = self.connection.poll_output();
            if output.is_empty() {
                return;
            }
            match send(&*self.stream, output, SendFlags::NOSIGNAL) {
                Ok(bytes) => self.connection.handle_taken(bytes, now),
                Err(Errno::AGAIN | Errno::INTR) => return,
                Err(_) => {
                    self.gone = true;
                    return;
                }
            }
        }
    }
}
