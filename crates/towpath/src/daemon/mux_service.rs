//! A configured mux: its listeners, its workers, and the thread that serves it.
//!
//! The mux listens before capabilities are dropped (a port below 1024 needs one) and accepts once its workers have attached.
//! Either an engine thread serves it between packet bursts (`muxes.rs`), or a thread that serves only this mux. The rules
//! admit its peers through [`MuxAdmission`].

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use towpath_mux::assembler::Limits;
use towpath_mux::io::{Server, Tls};
use towpath_mux::mux;
use towpath_ring::SocketFile;

use super::inherited::{self, FileId, Inherited};
use super::mux_admission::MuxAdmission;
use super::muxes::{Gone, Served};
use super::remote_front::{RemoteConfig, RemoteFront};
use super::supervisor::Failure;
use crate::config::Mux;
use crate::control::QueryInbox;
use crate::eventfd::EventFd;
use crate::process::{Identity, Place, Starter};
use crate::quantity::count;
use crate::service_manager::{Address, Sockets};
use crate::upgrade::{Channel, Message, Object, Packet, Predecessor, Successor};
use crate::worker_pool::{self, InheritedFile, Moved, Outcome, PoolControl, Upgradable, WorkerPool};
use towpath_engine::queue::DefaultVerdict;

/// The workers of mux number n (from 1) have channel numbers from n times this number on. Inspectors have lower numbers.
const CHANNELS: u32 = 1_000_000;

/// A mux that listens and does not accept yet.
pub(super) struct Listening {
    /// The files of Unix listeners. They are removed before the listeners close: afterwards a successor may have bound the path.
    unix: Vec<SocketFile>,
    server: Server,
    tls: Option<Tls>,
    config: Mux,
    remote: Option<RemoteConfig>,
    starter: Starter,
    /// The addresses and files of the server's listeners, in its order.
    addresses: Vec<(String, FileId)>,
    inherited: Parts,
}

/// What a mux gets from the process that this one replaces.
#[derive(Default)]
struct Parts {
    /// Listeners, which that process uses until it has stopped.
    listeners: Vec<(String, OwnedFd, FileId)>,
    /// Their Unix sockets' files, which that process owns until the end.
    files: Vec<InheritedFile>,
    predecessor: Option<Predecessor>,
}

/// A running mux.
pub(super) struct Service {
    name: String,
    admission: Arc<MuxAdmission>,
    server: Server,
    tls: Option<Tls>,
    control: PoolControl,
    drain: Duration,
    addresses: Vec<(String, FileId)>,
    /// Listeners of the process that this one replaces, until [`Service::listen`].
    waiting: Vec<(String, OwnedFd, FileId)>,
    /// The thread or engine that serves the mux, until it has ended.
    runs: Option<Runs>,
    /// `Some(true)` if the mux ended without an error; `None` while it runs.
    ended: Option<bool>,
    /// Its workers on other machines. Ends after the pool, which waits for them.
    _remote_front: Option<RemoteFront>,
}

/// Where a mux is served.
#[derive(Debug)]
enum Runs {
    /// A thread that serves only this mux.
    Own(JoinHandle<Result<Outcome, worker_pool::Error>>),
    /// An engine thread, which returns the mux when it ends.
    Engine(Receiver<Gone>),
}

impl Listening {
    /// Listens on the addresses of the configuration, by sockets of the service manager where it has passed them.
    pub(super) fn open(
        config: &Mux,
        remote: Option<RemoteConfig>,
        starter: &Starter,
        identity: Option<Identity>,
        sockets: &mut Sockets,
        mut older: Option<&mut Inherited>,
    ) -> Result<Self, Failure> {
        let failed = |error: io::Error| Failure::Mux(config.name.clone(), error.to_string());
        let core = mux::Config {
            redeliver: config.redeliver,
            on_worker_end: config.on_worker_end.config(config.framing.framing().name()),
            idle: config.idle,
            in_flight: config.in_flight,
            rebalance: config.rebalance,
            ..mux::Config::new(config.order).for_messages(config.message_max)
        };
        let limits = Limits {
            message: config.message_max,
            head_time: config.message_time,
            body_time: config.message_time,
            rate: 64 << 10,
            part: worker_pool::PART,
            ..Limits::default()
        };
        let (limits, core) = config.bounds.apply(limits, core);
        let framing = config.framing.framing().clone();
        let server = Server::with_limits(framing, limits, core).map_err(failed)?;
        let tls = config.tls.clone().map(Tls::from_files).transpose();
        let tls = tls.map_err(|error| Failure::Mux(config.name.clone(), error.to_string()))?;
        let (owner, group) = identity.map(|identity| (identity.user, identity.group)).unzip();
        let (mut unix, mut addresses, mut inherited) = (Vec::new(), Vec::new(), Parts::default());
        for (number, address) in config.listen.iter().enumerate() {
            let taken = older.as_mut().and_then(|older| older.mux_listener(&config.name, address));
            if let Some((socket, file)) = taken {
                if let Address::Unix(path) = Address::of(address) {
                    inherited.files.push(InheritedFile::Listener(path.to_owned(), file));
                }
                inherited.listeners.push((address.clone(), socket, file));
                continue;
            }
            if let Some(passed) = sockets.take(Address::of(address)) {
                addresses.push((address.clone(), None));
                if let Address::Unix(path) = Address::of(address) {
                    unix.push(passed.file(path, owner, group, None).map_err(failed)?);
                }
                let at = match &tls {
                    Some(tls) => server.listen_tls_on(passed.socket, tls.clone()),
                    None => server.listen_on(passed.socket),
                };
                tracing::info!("mux {}: listens on {}", config.name, at.map_err(failed)?);
                continue;
            }
            let (at, socket) = worker_pool::listen(&server, address, tls.as_ref())
                .map_err(|error| Failure::Mux(config.name.clone(), error.to_string()))?;
            tracing::info!("mux {}: listens on {at}", config.name);
            let name = format!("mux-{}-{number}", config.name);
            let bound = server.listeners().map_err(failed)?.into_iter().find(|listener| listener.name == at);
            if let Some(mut socket) = socket {
                socket.set_access(owner, group, None).map_err(failed)?;
                bound.iter().for_each(|bound| sockets.store_unix(&name, &bound.socket, &mut socket));
                addresses.push((address.clone(), socket.identity()));
                unix.push(socket);
            } else {
                addresses.push((address.clone(), None));
                bound.iter().for_each(|bound| _ = sockets.store(&name, bound.socket.as_fd()));
            }
        }
        inherited.predecessor = older.and_then(|older| older.mux(&config.name));
        let (config, starter) = (config.clone(), starter.clone());
        Ok(Self { unix, server, tls, config, remote, starter, addresses, inherited })
    }

    /// Starts the workers and waits until they have attached or `stopped` is set. Then starts the mux's thread, or returns the part
    /// that an engine thread serves if `engine` is set. `place` is the position among the muxes.
    pub(super) fn start(
        self,
        place: usize,
        admission: MuxAdmission,
        inbox: Option<QueryInbox>,
        engine: bool,
        done: EventFd,
        stopped: &dyn Fn() -> bool,
    ) -> Result<(Service, Option<Served>), Failure> {
        // If this function fails, `unix` is dropped before `server`: locals are dropped in the reverse order.
        let Self { config, remote, tls, server, unix, starter, addresses, inherited } = self;
        let Parts { listeners: waiting, files, predecessor } = inherited;
        let program = config.program();
        let Mux { name, .. } = config;
        let admission = Arc::new(admission);
        server.set_admission(Arc::clone(&admission) as Arc<_>);
        let remote = remote.map(RemoteConfig::start).transpose();
        let remote = remote.map_err(|error| Failure::Mux(name.clone(), error.to_string()))?;
        let (remote_front, remote) = remote.unzip();
        let front = worker_pool::Config {
            program,
            place: Place::Mux(name.clone()),
            starter,
            workers: config.workers,
            remote,
            drain: config.drain,
            timeout: config.timeout,
            close_undone: !config.keep_undone,
            send: config.send,
            send_check: config.send_check,
            may_push: config.may_push,
            name: name.clone(),
            first_channel: CHANNELS * (place as u32 + 1),
            // `Service` reloads certificates, not the pool.
            tls: None,
        };
        let (mut front, control) = WorkerPool::with_control(&server, front, inbox, stopped)
            .map_err(|error| Failure::Workers(name.clone(), error))?;
        front
            .enable_upgrades(Upgradable::part(unix, files, predecessor))
            .map_err(|error| Failure::Workers(name.clone(), error))?;
        let (runs, served) = if engine {
            let (end, gone) = channel();
            (Runs::Engine(gone), Some(Served { front, end, done }))
        } else {
            let run = move || {
                crate::sandbox::enter(crate::sandbox::Role::Mux);
                let outcome = front.run();
                done.signal();
                outcome
            };
            let thread = std::thread::Builder::new().name(format!("mux-{name}"));
            let thread = thread.spawn(run).map_err(|error| Failure::System("a thread", error))?;
            (Runs::Own(thread), None)
        };
        let (runs, drain) = (Some(runs), config.drain);
        let ended = None;
        let service = Service {
            name,
            admission,
            server,
            tls,
            control,
            drain,
            addresses,
            waiting,
            runs,
            ended,
            _remote_front: remote_front,
        };
        Ok((service, served))
    }
}

impl Service {
    /// Sets the verdict for connections that a rule sends to an inspector.
    pub(super) fn set_unserved(&self, unserved: DefaultVerdict) {
        self.admission.set_unserved(unserved);
    }

    /// The objects of this mux for a new process, and this process's end of its channel.
    pub(super) fn objects(&self) -> io::Result<(Vec<Object>, Channel)> {
        let (ours, theirs) = Channel::pair()?;
        let sockets = self.server.listeners()?.into_iter().map(|listener| listener.socket);
        let listeners = self.addresses.iter().zip(sockets);
        let listeners = listeners.map(|((address, file), socket)| (address.clone(), socket, *file)).collect();
        Ok((inherited::mux(&self.name, theirs, listeners), ours))
    }

    /// Stops (`true`) or resumes (`false`) accepting connections.
    pub(super) fn suspend(&self, suspend: bool) {
        self.server.suspend_listening(suspend);
    }

    /// Accepts connections by the listeners of the process that this one replaces, which has stopped.
    pub(super) fn listen(&mut self) -> Result<(), Failure> {
        for (address, socket, file) in std::mem::take(&mut self.waiting) {
            let at = match &self.tls {
                Some(tls) => self.server.listen_tls_on(socket, tls.clone()),
                None => self.server.listen_on(socket),
            };
            at.map_err(|error| Failure::Mux(self.name.clone(), error.to_string()))?;
            self.addresses.push((address, file));
        }
        Ok(())
    }

    /// Hands the connections over to a new process by the channel of [`Service::objects`]. Does nothing if the new one has no such mux.
    pub(super) fn hand_over(&self, whole: &Successor, channel: Channel) {
        if self.ended.is_some()
            || !matches!(channel.receive(), Ok(Some(Packet::Message(Message::Serving, _))))
        {
            return tracing::warn!("mux {}: process {} does not have it", self.name, whole.id());
        }
        match Successor::part(whole, channel) {
            Ok(successor) => self.control.hand_over(successor),
            Err(error) => tracing::error!("mux {}: its connections stay: {error}", self.name),
        }
    }

    /// How far the connections have moved.
    pub(super) fn moved(&mut self) -> Moved {
        if self.ended().is_some() { Moved::Completely } else { self.control.moved() }
    }

    /// Time in which connections end.
    pub(super) const fn drain_time(&self) -> Duration {
        self.drain
    }

    /// Reads the mux's certificates and keys again.
    pub(super) fn reload_tls(&self) {
        if let Some(tls) = &self.tls {
            worker_pool::reload_tls(tls, &format!("mux {}: ", self.name));
        }
    }

    /// Refreshes the states of the mux's connections and closes connections that the rules refuse. `again`: the rules have changed.
    pub(super) fn refresh(&self, again: bool) {
        for peer in self.admission.refresh(again).refused {
            if self.server.close_peer(&peer) {
                tracing::info!(
                    peer = %peer.remote.ip(),
                    "mux {}: {} the rules no longer admit this peer: closed", self.name, peer.remote
                );
            }
        }
    }

    /// Returns whether the mux ended without an error, or `None` while it runs. The error is logged.
    pub(super) fn ended(&mut self) -> Option<bool> {
        match self.runs.take() {
            Some(Runs::Own(thread)) if thread.is_finished() => self.settle(thread.join().ok()),
            Some(Runs::Engine(gone)) => match gone.try_recv() {
                Ok(gone) => self.settle(Some(end(gone))),
                Err(TryRecvError::Disconnected) => self.settle(None),
                Err(TryRecvError::Empty) => self.runs = Some(Runs::Engine(gone)),
            },
            runs => self.runs = runs,
        }
        self.ended
    }

    /// Name of the mux.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Stops accepting and reading. Messages that were read are answered.
    pub(super) fn drain(&self) {
        self.control.end();
    }

    /// A new process has replaced this one: connections that stay are served until they end, or until the time for a drain has passed.
    pub(super) fn retire(&self) {
        self.control.complete();
    }

    /// Waits for the end. Returns whether the mux ended without an error.
    pub(super) fn join(mut self) -> bool {
        match self.runs.take() {
            Some(Runs::Own(thread)) => self.settle(thread.join().ok()),
            Some(Runs::Engine(gone)) => self.settle(gone.recv().ok().map(end)),
            None => {}
        }
        self.ended == Some(true)
    }

    /// Logs the outcome; `None` if its thread panicked.
    fn settle(&mut self, outcome: Option<Result<Outcome, worker_pool::Error>>) {
        self.ended = Some(match outcome {
            Some(Ok(Outcome { drained, cut, totals, restarts, .. })) => {
                let left = format!("; ended before the drain was complete; {} cut", count(cut, "connection"));
                tracing::info!(
                    "mux {}: {}, {}: {} done, {} given up, {} discarded, {} not begun; {} started again{}",
                    self.name,
                    count(totals.attach, "connection"),
                    count(totals.received, "message"),
                    totals.messages_done(),
                    totals.undone,
                    totals.messages_discarded(),
                    totals.queued + totals.in_hand,
                    count(restarts, "worker"),
                    if drained { "" } else { &left },
                );
                true
            }
            Some(Err(error)) => {
                tracing::error!("mux {}: {error}", self.name);
                false
            }
            None => {
                tracing::error!("mux {}: its thread panicked", self.name);
                false
            }
        });
    }
}

/// Ends a mux that an engine thread has returned.
fn end((front, gone): Gone) -> Result<Outcome, worker_pool::Error> {
    gone.map(|drained| front.end(drained))
}
