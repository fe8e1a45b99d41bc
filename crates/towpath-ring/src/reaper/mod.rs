//! Helper threads that drop values whose drop may block.
//!
//! What: close(2) of a descriptor that a peer made may sleep as long as the peer wants: a TCP socket with `SO_LINGER`
//! and unsent data sleeps at its last close, and a FUSE file is flushed at every close. A socket closes the unread
//! descriptors in its queue. munmap(2) of a large region takes milliseconds. A thread that handles packets, messages,
//! signals or control therefore gives such values to [`Reaper::drop_for`].
//!
//! Invariants:
//! - The caller never waits for a drop. It takes a lock that is held for a few instructions, and starts no thread
//!   while a helper exists.
//! - The values of one peer are dropped one after another, by at most one helper at a time. A blocked peer therefore
//!   blocks one helper.
//! - A helper is idle whenever a value arrives, up to [`Limits::helpers`] helpers: a helper that takes a value starts another
//!   helper if none is idle. Up to two idle helpers stay, so that a peer that connects and disconnects in a loop does not start a
//!   thread for each connection.
//!
//! Bounds: the queue has no limit and needs none, because every value in it existed before. The owner of the values
//! limits them: it admits no connection of a peer without [`Reaper::has_room`], and a connection's slot (its charge
//! against a limit) is a part of the dropped value, so that the slot is free when the drop has finished. If
//! [`Limits::helpers`] peers block at the same time, the values of other peers wait until one helper is free; their
//! packets do not wait.
//!
//! Process exit does not wait for helpers. exit_group(2) ends a helper that sleeps in close(2), and the kernel does not
//! linger for sockets of an exiting process (`PF_EXITING` in `inet_release`, net/ipv4/af_inet.c). Before Linux 6.2, the
//! flush of a FUSE file can delay the exit until its server answers or ends.
//!
//! [`refuse_descriptors`] and [`Reaper::receive`] are for sockets on which no descriptor is expected.

#[cfg(test)]
mod attack;
mod reaped;
mod receive;
mod teardown;

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;

use towpath_metrics::metrics;

pub use reaped::Reaped;
#[cfg(any(test, feature = "test-util"))]
pub use receive::ACCEPT_DESCRIPTORS;
pub use receive::{Plain, accept_descriptors, refuse_descriptors};
pub use teardown::Teardown;

/// The party whose values are dropped one after another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum PeerKey {
    /// All processes of a user, by user id.
    User(u32),
    /// A listener, whose queue may have connections of any user.
    Listener,
    /// A worker process that the engine started, by a number that its owner chooses.
    Worker(u32),
}

/// Limits of a [`Reaper`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Helper threads, at least 1. The default is 32.
    pub helpers: usize,
    /// Pending values of one peer above which [`Reaper::has_room`] returns false. The default is 512.
    pub pending_per_peer: usize,
    /// Pending values of all peers, of each at most `pending_per_peer`, above which [`Reaper::has_room`] returns false.
    /// Otherwise one peer could keep all others out. The default is 4096.
    pub pending: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { helpers: 32, pending_per_peer: 512, pending: 4096 }
    }
}

metrics! {
    /// Counters of a [`Reaper`].
    pub struct Stats in "reaper" {
        /// Values dropped by helper threads.
        pub dropped: counter events,
        /// Values that wait for a helper thread or are being dropped.
        pub pending: gauge events,
        /// Peers whose value a helper thread is dropping.
        pub busy: gauge events,
        /// Helper threads.
        pub helpers: gauge events,
        /// Values that found all helper threads busy.
        pub saturated: counter events,
        /// Helper threads that could not be started.
        pub start_failures: counter events,
        /// Admissions refused because of the values that wait.
        pub no_room: counter events,
        /// Messages with descriptors on sockets that accept none.
        pub passed_descriptors: counter events,
    }
}

type Value = Box<dyn Send>;

/// Set by [`on_helper_start`].
static HELPER_START: OnceLock<fn()> = OnceLock::new();

/// Calls `start` on each helper thread of this process that starts from now on, before its first value: to set the thread's
/// scheduling. Only the first call has an effect.
pub fn on_helper_start(start: fn()) {
    // A second call: the first function stays.
    let _ = HELPER_START.set(start);
}

/// Helpers that wait for values at most: one for the next value, and one that takes its place meanwhile.
const IDLE_HELPERS: usize = 2;

/// Handle of a set of helper threads that drop values. Clones share the threads, which run until the process ends.
///
/// ```
/// use towpath_ring::reaper::{PeerKey, Reaper};
///
/// let reaper = Reaper::shared();
/// let (socket, _) = std::os::unix::net::UnixStream::pair().unwrap();
/// // Returns at once, even if close(2) blocks.
/// reaper.drop_for(PeerKey::User(1000), socket);
/// ```
#[derive(Clone)]
pub struct Reaper {
    shared: Arc<Shared>,
}

struct Shared {
    limits: Limits,
    state: Mutex<State>,
    work: Condvar,
}

#[derive(Default)]
struct State {
    /// Values of each peer that has pending values. A peer whose value is being dropped has an entry, possibly empty.
    values: BTreeMap<PeerKey, VecDeque<Value>>,
    /// Peers with values and without a helper, in the order of service.
    ready: VecDeque<PeerKey>,
    /// Helpers that wait for work.
    idle: usize,
    stats: Stats,
}

impl State {
    /// Pending values, of each peer at most `most`. A peer with an entry may also have a value that is being dropped.
    fn counted(&self, most: usize) -> usize {
        self.values.values().map(|values| (values.len() + 1).min(most)).sum()
    }
}

impl Reaper {
    /// Creates a set without threads; the first value starts one. Prefer [`shared`](Self::shared).
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        let limits = Limits { helpers: limits.helpers.max(1), ..limits };
        Self { shared: Arc::new(Shared { limits, state: Mutex::default(), work: Condvar::new() }) }
    }

    /// The set of this process, with the default limits.
    #[must_use]
    pub fn shared() -> Self {
        static SHARED: OnceLock<Reaper> = OnceLock::new();
        SHARED.get_or_init(|| Self::new(Limits::default())).clone()
    }

    /// Starts the first helper, so that no later call of [`drop_for`](Self::drop_for) does.
    pub fn start(&self) {
        let mut state = self.shared.lock();
        if state.stats.helpers == 0 {
            self.shared.start_helper(&mut state);
        }
    }

    /// Drops `value` on a helper thread. Never blocks.
    ///
    /// Values of the same peer are dropped in the order of the calls. `value` may be a tuple: its fields are dropped
    /// in order, so that `(connection, slot)` releases the slot after the connection is closed.
    pub fn drop_for(&self, peer: PeerKey, value: impl Send + 'static) {
        let value: Value = Box::new(value);
        let mut state = self.shared.lock();
        state.stats.pending += 1;
        if state.stats.helpers == 0 {
            self.shared.start_helper(&mut state);
        }
        if let Some(values) = state.values.get_mut(&peer) {
            values.push_back(value);
            return;
        }
        state.values.insert(peer, VecDeque::from([value]));
        state.ready.push_back(peer);
        if state.idle == 0 && state.stats.helpers as usize >= self.shared.limits.helpers {
            state.stats.saturated += 1;
        }
        self.shared.work.notify_one();
    }

    /// Returns false if `peer` or all peers together have as many pending values as the [`Limits`] permit. Admit no
    /// connection of the peer then.
    #[must_use]
    pub fn has_room(&self, peer: PeerKey) -> bool {
        let Limits { pending_per_peer, pending, .. } = self.shared.limits;
        let mut state = self.shared.lock();
        let theirs = state.values.get(&peer).map_or(0, |values| values.len() + 1);
        let has_room = theirs < pending_per_peer && state.counted(pending_per_peer) < pending;
        state.stats.no_room += u64::from(!has_room);
        has_room
    }

    /// Returns true if all peers together have as many pending values as the [`Limits`] permit. Accept no connection
    /// then: to close it could need another value.
    #[must_use]
    pub fn is_full(&self) -> bool {
        let Limits { pending_per_peer, pending, .. } = self.shared.limits;
        let mut state = self.shared.lock();
        let is_full = state.counted(pending_per_peer) >= pending;
        state.stats.no_room += u64::from(is_full);
        is_full
    }

    /// Begins a [`Teardown`], for the parts of one connection.
    #[must_use]
    pub fn teardown(&self, peer: PeerKey) -> Arc<Teardown> {
        Teardown::new(self.clone(), peer)
    }

    /// Wraps `value`, so that it is dropped on a helper thread.
    pub fn wrap<T: Send + 'static>(&self, peer: PeerKey, value: T) -> Reaped<T> {
        self.teardown(peer).wrap(value)
    }

    /// The counters.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.shared.lock().stats
    }

    fn count_passed_descriptors(&self) {
        self.shared.lock().stats.passed_descriptors += 1;
    }
}

impl Default for Reaper {
    /// The set of this process ([`shared`](Self::shared)).
    fn default() -> Self {
        Self::shared()
    }
}

impl fmt::Debug for Reaper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reaper").finish_non_exhaustive()
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts a helper if the limit permits. Without a new one, the values wait for an existing helper, or for the
    /// next call.
    fn start_helper(self: &Arc<Self>, state: &mut State) {
        if state.stats.helpers as usize >= self.limits.helpers {
            return;
        }
        let shared = self.clone();
        match thread::Builder::new().name("reaper".into()).spawn(move || shared.help()) {
            Ok(_) => state.stats.helpers += 1,
            Err(_) => state.stats.start_failures += 1,
        }
    }

    /// Body of a helper thread.
    fn help(self: Arc<Self>) {
        if let Some(start) = HELPER_START.get() {
            start();
        }
        let mut state = self.lock();
        loop {
            let Some(peer) = state.ready.pop_front() else {
                if state.idle >= IDLE_HELPERS {
                    break;
                }
                state.idle += 1;
                state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
                state.idle -= 1;
                continue;
            };
            let value = state.values.get_mut(&peer).and_then(VecDeque::pop_front);
            state.stats.busy += 1;
            if state.idle == 0 {
                self.start_helper(&mut state);
            }
            drop(state);
            // A panic of a value's drop ends neither the helper nor the service of the peer; its message is printed.
            let _ = catch_unwind(AssertUnwindSafe(|| drop(value)));
            state = self.lock();
            state.stats.busy -= 1;
            state.stats.pending -= 1;
            state.stats.dropped += 1;
            if state.values.get(&peer).is_some_and(|values| !values.is_empty()) {
                state.ready.push_back(peer);
            } else {
                state.values.remove(&peer);
            }
        }
        state.stats.helpers -= 1;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};

    use super::*;

    /// A value whose drop reports its name, and then blocks until its gate is dropped.
    struct Blocking {
        name: u32,
        dropped: Sender<u32>,
        gate: Option<Receiver<()>>,
    }

    impl Drop for Blocking {
        fn drop(&mut self) {
            self.dropped.send(self.name).unwrap();
            if let Some(gate) = &self.gate {
                let _ = gate.recv();
            }
        }
    }

    struct Bench {
        reaper: Reaper,
        report: Sender<u32>,
        dropped: Receiver<u32>,
    }

    impl Bench {
        fn new(limits: Limits) -> Self {
            let (report, dropped) = channel();
            Self { reaper: Reaper::new(limits), report, dropped }
        }

        /// Drops a value of user `uid`.
        fn drop_for(&self, uid: u32, name: u32) {
            let value = Blocking { name, dropped: self.report.clone(), gate: None };
            self.reaper.drop_for(PeerKey::User(uid), value);
        }

        /// Drops a value of user `uid` that blocks until the result is dropped.
        fn block(&self, uid: u32, name: u32) -> Sender<()> {
            let (open, gate) = channel();
            let value = Blocking { name, dropped: self.report.clone(), gate: Some(gate) };
            self.reaper.drop_for(PeerKey::User(uid), value);
            open
        }

        fn next(&self) -> u32 {
            self.dropped.recv().unwrap()
        }

        fn wait_until_dropped(&self, count: u64) {
            while self.reaper.stats().dropped < count {
                thread::yield_now();
            }
        }
    }

    #[test]
    fn a_blocked_peer_delays_its_own_values_only() {
        let bench = Bench::new(Limits::default());
        let open = bench.block(1, 10);
        assert_eq!(bench.next(), 10);
        bench.drop_for(1, 11);
        for name in 0..100 {
            bench.drop_for(2, name);
        }
        assert_eq!((0..100).map(|_| bench.next()).collect::<Vec<_>>(), (0..100).collect::<Vec<_>>());
        bench.wait_until_dropped(100);
        let stats = bench.reaper.stats();
        assert_eq!((stats.pending, stats.busy, stats.saturated), (2, 1, 0));
        drop(open);
        assert_eq!(bench.next(), 11);
        bench.wait_until_dropped(102);
        assert_eq!(bench.reaper.stats().pending, 0);
    }

    #[test]
    fn values_one_after_another_need_two_helpers() {
        /// Reports the thread that drops it.
        struct Where(Sender<thread::ThreadId>);

        impl Drop for Where {
            fn drop(&mut self) {
                self.0.send(thread::current().id()).unwrap();
            }
        }

        let (report, dropped) = channel();
        let reaper = Reaper::new(Limits::default());
        let mut helpers = std::collections::HashSet::new();
        for count in 1..=100 {
            reaper.drop_for(PeerKey::User(count), Where(report.clone()));
            helpers.insert(dropped.recv().unwrap());
            let all_wait = || {
                let state = reaper.shared.lock();
                state.stats.dropped == count.into() && state.idle as u64 == state.stats.helpers
            };
            while !all_wait() {
                thread::yield_now();
            }
        }
        assert_eq!((helpers.len() <= 2, reaper.stats().helpers), (true, 2), "{helpers:?}");
    }

    #[test]
    fn helpers_call_the_function_of_their_start() {
        use std::sync::atomic::{AtomicUsize, Ordering};

        static STARTS: AtomicUsize = AtomicUsize::new(0);
        on_helper_start(|| {
            STARTS.fetch_add(1, Ordering::Relaxed);
        });
        let bench = Bench::new(Limits::default());
        bench.drop_for(1, 1);
        bench.wait_until_dropped(1);
        assert!(STARTS.load(Ordering::Relaxed) > 0);
    }

    #[test]
    fn at_the_limit_of_helpers_values_wait_and_are_counted() {
        let bench = Bench::new(Limits { helpers: 2, ..Limits::default() });
        let (one, two) = (bench.block(1, 1), bench.block(2, 2));
        let mut both = [bench.next(), bench.next()];
        both.sort_unstable();
        assert_eq!(both, [1, 2]);
        bench.drop_for(3, 3);
        let stats = bench.reaper.stats();
        assert_eq!((stats.helpers, stats.saturated, stats.pending), (2, 1, 3));
        drop(one);
        assert_eq!(bench.next(), 3);
        drop(two);
        bench.wait_until_dropped(3);
    }

    #[test]
    fn admission_ends_at_the_limit_of_a_peer_and_of_all() {
        let bench = Bench::new(Limits { pending_per_peer: 2, pending: 3, ..Limits::default() });
        let user = PeerKey::User;
        let (one, two) = (bench.block(1, 1), bench.block(2, 2));
        let both = [bench.next(), bench.next()];
        assert!(bench.reaper.has_room(user(1)), "{both:?}");
        bench.drop_for(1, 1);
        assert!(!bench.reaper.has_room(user(1)), "two of its own");
        assert!(!bench.reaper.has_room(user(3)), "three of all");
        assert_eq!(bench.reaper.stats().no_room, 2);
        drop((one, two));
        bench.wait_until_dropped(3);
        // One peer counts for no more than its own limit.
        let one = bench.block(1, 1);
        bench.next();
        (0..9).for_each(|name| bench.drop_for(1, name));
        assert!(!bench.reaper.has_room(user(1)) && bench.reaper.has_room(user(3)) && !bench.reaper.is_full());
        drop(one);
        bench.wait_until_dropped(13);
        assert!(bench.reaper.has_room(user(1)) && bench.reaper.has_room(user(3)));
    }

    #[test]
    fn fields_of_a_tuple_are_dropped_in_order_and_a_panic_stops_no_helper() {
        struct Panics;
        impl Drop for Panics {
            fn drop(&mut self) {
                panic!("in a drop, for the test");
            }
        }
        let bench = Bench::new(Limits::default());
        let value = |name| Blocking { name, dropped: bench.report.clone(), gate: None };
        bench.reaper.drop_for(PeerKey::Worker(1), (value(1), value(2)));
        bench.reaper.drop_for(PeerKey::Worker(1), Panics);
        drop(bench.reaper.wrap(PeerKey::Worker(1), value(3)));
        assert_eq!([bench.next(), bench.next(), bench.next()], [1, 2, 3]);
    }
}
