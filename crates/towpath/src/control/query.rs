//! Queries to an engine thread: a bounded inbox that the thread empties between two bursts.
//!
//! A query is a closure that runs on the engine's thread and returns a value. The engine makes no system call for it except the
//! wake-up of the server, and never waits.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};

use towpath_engine::Introspect;
use towpath_engine::egress::QueryServer;

use super::commands::{show_mux, show_ports, show_rings, show_send};
use crate::eventfd::EventFd;
use crate::metrics::Samples;

/// Nanoseconds that an engine may sleep between two looks into its inbox, if the server cannot wake it.
const POLL_INTERVAL: u64 = 5_000_000;

/// Queries that one call of [`QueryInbox::serve`] runs.
const BURST: usize = 4;

/// Queries that may wait.
const QUEUE: usize = 16;

/// The target of a query: a packet engine or a pool of worker processes.
pub struct Target<'a> {
    engine: Option<&'a mut dyn Introspect>,
    pool: Option<&'a dyn WorkerPoolView>,
    ports: Option<&'a [show_ports::Port]>,
}

/// A pool of worker processes behind a mux, as a query sees it.
pub trait WorkerPoolView {
    /// The rings of the worker processes.
    fn rings(&self) -> Vec<show_rings::Ring>;

    /// The mux.
    fn mux(&self) -> show_mux::Mux;

    /// The zero-copy senders.
    fn send(&self) -> show_send::Send;

    /// Adds the counters of the mux and of the zero-copy senders.
    fn metrics(&self, samples: &mut Samples) {
        let _ = samples;
    }
}

impl<'a> Target<'a> {
    /// The packet engine.
    pub fn engine(&mut self) -> Option<&mut (dyn Introspect + 'a)> {
        match &mut self.engine {
            Some(engine) => Some(&mut **engine),
            None => None,
        }
    }

    /// The worker pool.
    pub fn pool(&self) -> Option<&(dyn WorkerPoolView + 'a)> {
        self.pool
    }

    /// The live ports. `None` if the engine has none.
    pub fn ports(&self) -> Option<&'a [show_ports::Port]> {
        self.ports
    }
}

impl fmt::Debug for Target<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Target").finish_non_exhaustive()
    }
}

type Query = Box<dyn FnOnce(&mut Target<'_>) + Send>;

/// Copies of the state of an engine's live ports, for queries. The engine's thread updates them.
pub type PortRows = Arc<Mutex<Vec<show_ports::Port>>>;

/// The engine's end of the queue of queries.
pub struct QueryInbox {
    queries: Receiver<Query>,
    servers: Servers,
    ended: Arc<AtomicBool>,
    ports: Option<PortRows>,
    interval: u64,
}

/// The server's end of the queue of queries.
#[derive(Debug)]
pub struct QuerySender {
    queries: SyncSender<Query>,
    ended: Arc<AtomicBool>,
    wake: Option<EventFd>,
    /// Signalled after each query of this sender.
    server: EventFd,
    servers: Servers,
}

/// Signalled when the inbox is dropped: one eventfd for each server that sends queries.
type Servers = Arc<Mutex<Vec<EventFd>>>;

/// The result of a query.
///
/// A channel would also do, but its code would be compiled once for each type of result.
#[derive(Debug)]
pub struct Answer<T>(Arc<Mutex<Option<T>>>);

impl<T> Answer<T> {
    /// Returns `None` while the query waits or runs, then the result once. The result is `None` if the engine's thread has ended
    /// before it ran the query.
    pub fn poll(&mut self) -> Option<Option<T>> {
        // A query drops its reference when it has run, or when it is dropped without being run.
        let result = Arc::get_mut(&mut self.0)?;
        Some(result.get_mut().unwrap_or_else(PoisonError::into_inner).take())
    }
}

/// Why a query was not sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SendError {
    /// Too many queries wait.
    Full,
    /// The engine's thread has ended.
    Ended,
}

impl QueryInbox {
    /// Creates both ends. `server` is signalled after each query, `wake` when a query is sent. Without `wake` the engine looks into
    /// the inbox every [`POLL_INTERVAL`].
    pub(crate) fn new(server: EventFd, wake: Option<EventFd>) -> (Self, QuerySender) {
        let (sender, queries) = sync_channel(QUEUE);
        let ended = Arc::new(AtomicBool::new(false));
        let interval = if wake.is_some() { u64::MAX } else { POLL_INTERVAL };
        let servers = Servers::new(Mutex::new(vec![server.clone()]));
        let shared = Arc::clone(&servers);
        let sender =
            QuerySender { queries: sender, ended: Arc::clone(&ended), wake, server, servers: shared };
        (Self { queries, servers, ended, ports: None, interval }, sender)
    }

    /// Sets what queries see of the live ports.
    pub fn set_ports(&mut self, ports: PortRows) {
        self.ports = Some(ports);
    }

    /// Runs waiting queries against a packet engine. Returns the maximum time in nanoseconds until the next call.
    pub fn serve_engine(&mut self, engine: &mut dyn Introspect) -> u64 {
        self.serve(Some(engine), None)
    }

    /// Runs waiting queries against a worker pool. Returns the maximum time in nanoseconds until the next call.
    pub fn serve_pool(&mut self, pool: &dyn WorkerPoolView) -> u64 {
        self.serve(None, Some(pool))
    }

    fn serve(&mut self, mut engine: Option<&mut dyn Introspect>, pool: Option<&dyn WorkerPoolView>) -> u64 {
        for query in self.queries.try_iter().take(BURST) {
            let ports = self.ports.as_ref().map(|ports| ports.lock().unwrap_or_else(PoisonError::into_inner));
            let engine: Option<&mut dyn Introspect> = match &mut engine {
                Some(engine) => Some(&mut **engine),
                None => None,
            };
            query(&mut Target { engine, pool, ports: ports.as_ref().map(|ports| &ports[..]) });
        }
        self.interval
    }
}

impl QueryServer for QueryInbox {
    fn serve(&mut self, engine: &mut dyn Introspect) -> u64 {
        self.serve_engine(engine)
    }
}

impl fmt::Debug for QueryInbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QueryInbox").finish_non_exhaustive()
    }
}

impl Drop for QueryInbox {
    fn drop(&mut self) {
        // Release: pairs with the acquire in QuerySender::has_ended. Every result was sent before.
        self.ended.store(true, Ordering::Release);
        self.servers.lock().unwrap_or_else(PoisonError::into_inner).iter().for_each(EventFd::signal);
    }
}

impl QuerySender {
    /// A sender of another server, which `server` wakes. Both share the queue of queries.
    pub(crate) fn for_server(&self, server: EventFd) -> Self {
        self.servers.lock().unwrap_or_else(PoisonError::into_inner).push(server.clone());
        let (ended, servers) = (Arc::clone(&self.ended), Arc::clone(&self.servers));
        Self { queries: self.queries.clone(), ended, wake: self.wake.clone(), server, servers }
    }

    /// Sends a query. The server's eventfd is signalled after it has run.
    ///
    /// # Errors
    ///
    /// Fails if the queue is full or the engine's thread has ended.
    pub fn send<T: Send + 'static>(
        &self,
        query: impl FnOnce(&mut Target<'_>) -> T + Send + 'static,
    ) -> Result<Answer<T>, SendError> {
        let answer = Arc::new(Mutex::new(None));
        let result = Arc::clone(&answer);
        let server = self.server.clone();
        let query: Query = Box::new(move |target| {
            let answer = query(target);
            *result.lock().unwrap_or_else(PoisonError::into_inner) = Some(answer);
            // Before the signal: the server takes the result when it is the only owner.
            drop(result);
            server.signal();
        });
        match self.queries.try_send(query) {
            Ok(()) => {
                if let Some(wake) = &self.wake {
                    wake.signal();
                }
                Ok(Answer(answer))
            }
            Err(TrySendError::Full(_)) => Err(SendError::Full),
            Err(TrySendError::Disconnected(_)) => Err(SendError::Ended),
        }
    }

    /// Returns true if the engine's thread has ended.
    pub fn has_ended(&self) -> bool {
        // Acquire: pairs with the release in QueryInbox::drop.
        self.ended.load(Ordering::Acquire)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_query_has_one_result_or_its_thread_has_ended() {
        let (mut inbox, sender) = QueryInbox::new(EventFd::new().unwrap(), None);
        let rows = PortRows::default();
        inbox.set_ports(Arc::clone(&rows));
        let mut answer =
            sender.send(|target| (target.pool().is_none(), target.ports().map(<[_]>::len))).unwrap();
        assert_eq!(answer.poll(), None);
        inbox.serve(None, None);
        assert_eq!(answer.poll(), Some(Some((true, Some(0)))));
        let mut unrun = sender.send(|_| ()).unwrap();
        drop(inbox);
        assert_eq!(unrun.poll(), Some(None));
        assert!(sender.has_ended());
    }
}
