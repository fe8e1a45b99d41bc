//! A mux of the configuration: its listeners, its workers and who serves it.
//!
//! It listens before capabilities are given up (a port below 1024 needs one), and accepts when its workers have attached. A
//! thread of the engine serves it between its packets (`muxes.rs`), or one that has nothing but its sockets and rings. The rules are
//! asked at its [`MuxAdmission`].

use std::io;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::thread::JoinHandle;

use towpath_mux::assembler::Limits;
use towpath_mux::io::{Server, Tls};
use towpath_mux::mux;
use towpath_ring::SocketFile;

use super::mux_admission::MuxAdmission;
use super::muxes::{Gone, Served};
use super::supervisor::Failure;
use crate::config::Mux;
use crate::control::QueryInbox;
use crate::eventfd::EventFd;
use crate::worker_pool::{self, Outcome, PoolControl, WorkerPool};
use towpath_engine::queue::DefaultVerdict;

/// Channels of a mux's workers are numbered behind this, times its place: inspectors have the numbers below.
const CHANNELS: u32 = 1_000_000;

/// A mux that listens, and does not accept yet.
pub(super) struct Listening {
    /// Of the Unix sockets among where it listens. They go before these are closed: then a successor may have put its own there.
    unix: Vec<SocketFile>,
    server: Server,
    config: Mux,
}

/// A mux that runs.
pub(super) struct Service {
    name: String,
    door: Arc<MuxAdmission>,
    server: Server,
    control: PoolControl,
    /// Who serves it, until it has ended.
    runs: Option<Runs>,
    /// Whether it ended well, once it has ended.
    ended: Option<bool>,
}

/// Who serves a mux.
#[derive(Debug)]
enum Runs {
    /// A thread of its own.
    Own(JoinHandle<Result<Outcome, worker_pool::Error>>),
    /// One of the engine's, which gives it back.
    Engine(Receiver<Gone>),
}

impl Listening {
    pub(super) fn open(config: &Mux) -> Result<Self, Failure> {
        let failed = |error: io::Error| Failure::Mux(config.name.clone(), error.to_string());
        let core = mux::Config {
            order: config.order,
            redeliver: config.redeliver,
            idle: config.idle,
            ..mux::Config::for_messages(config.message_max)
        };
        let limits = Limits {
            message: config.message_max,
            head_time: config.message_time,
            body_time: config.message_time,
            rate: 64 << 10,
            ..Limits::default()
        };
        let framing = config.framing.framing().clone();
        let server = Server::with_limits(framing, limits, core).map_err(failed)?;
        let tls = config.tls.as_ref().map(|(chain, key)| Tls::server(chain, key)).transpose();
        let tls = tls.map_err(|error| Failure::Mux(config.name.clone(), error.to_string()))?;
        let mut unix = Vec::new();
        for address in &config.listen {
            let (at, socket) = worker_pool::listen(&server, address, tls.as_ref())
                .map_err(|error| Failure::Mux(config.name.clone(), error.to_string()))?;
            log::info!("mux {}: listens on {at}", config.name);
            unix.extend(socket);
        }
        Ok(Self { unix, server, config: config.clone() })
    }

    /// Starts its workers, and when they have attached, or it is `stopped` meanwhile, its thread; or gives back what is for a thread of
    /// the `engine`. `place` is its place among the muxes.
    pub(super) fn start(
        self,
        place: usize,
        door: MuxAdmission,
        inbox: Option<QueryInbox>,
        engine: bool,
        done: EventFd,
        stopped: &dyn Fn() -> bool,
    ) -> Result<(Service, Option<Served>), Failure> {
        // In this order, as they are dropped in the other.
        let Self { config, server, unix } = self;
        let Mux { name, .. } = config;
        let door = Arc::new(door);
        server.set_admission(Arc::clone(&door) as Arc<_>);
        let front = worker_pool::Config {
            command: config.worker,
            workers: NonZeroUsize::new(config.workers).unwrap_or(NonZeroUsize::MIN),
            drain: config.drain,
            timeout: config.timeout,
            close_undone: !config.keep_undone,
            send: config.send,
            send_check: config.send_check,
            name: name.clone(),
            first_channel: CHANNELS * (place as u32 + 1),
        };
        let (mut front, control) = WorkerPool::ordered(&server, front, inbox, stopped)
            .map_err(|error| Failure::Workers(name.clone(), error))?;
        front.keep(unix);
        let (runs, served) = if engine {
            let (end, gone) = channel();
            (Runs::Engine(gone), Some(Served { front, end, done }))
        } else {
            let run = move || {
                let outcome = front.run();
                done.signal();
                outcome
            };
            let thread = std::thread::Builder::new().name(format!("mux-{name}"));
            let thread = thread.spawn(run).map_err(|error| Failure::System("a thread", error))?;
            (Runs::Own(thread), None)
        };
        Ok((Service { name, door, server, control, runs: Some(runs), ended: None }, served))
    }
}

impl Service {
    /// What becomes of connections that a rule hands to an inspector, from now on.
    pub(super) fn set_unserved(&self, unserved: DefaultVerdict) {
        self.door.set_unserved(unserved);
    }

    /// Keeps the states of its connections, and ends those that the rules would not let in any more. `again`: they have
    /// changed.
    pub(super) fn refresh(&self, again: bool) {
        for peer in self.door.refresh(again).refused {
            if self.server.close_peer(&peer) {
                log::info!("mux {}: {} is not let in any more by the rules: closed", self.name, peer.remote);
            }
        }
    }

    /// Whether it has ended, and if so whether it ended well. Why it did not is logged.
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

    /// The mux's name.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Nothing more is accepted or read; what was is answered.
    pub(super) fn drain(&self) {
        self.control.end();
    }

    /// Waits for its end. Whether it ended well.
    pub(super) fn join(mut self) -> bool {
        match self.runs.take() {
            Some(Runs::Own(thread)) => self.settle(thread.join().ok()),
            Some(Runs::Engine(gone)) => self.settle(gone.recv().ok().map(end)),
            None => {}
        }
        self.ended == Some(true)
    }

    /// What it came to; nothing when its thread panicked.
    fn settle(&mut self, outcome: Option<Result<Outcome, worker_pool::Error>>) {
        self.ended = Some(match outcome {
            Some(Ok(Outcome { drained, cut, totals, restarts })) => {
                let left = format!("; ended before everything was drained; {cut} connections were not done");
                log::info!(
                    "mux {}: {} connections, {} messages: {} done, {} given up, {} not begun; {restarts} workers \
                     started again{}",
                    self.name,
                    totals.attach,
                    totals.received,
                    totals.done,
                    totals.undone,
                    totals.queued + totals.in_hand,
                    if drained { "" } else { &left },
                );
                true
            }
            Some(Err(error)) => {
                log::error!("mux {}: {error}", self.name);
                false
            }
            None => {
                log::error!("mux {}: its thread panicked", self.name);
                false
            }
        });
    }
}

/// Ends a mux that an engine's thread has given back.
fn end((front, gone): Gone) -> Result<Outcome, worker_pool::Error> {
    gone.map(|drained| front.end(drained))
}
