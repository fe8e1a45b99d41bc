//! The handle on the states: [`States`].
//!
//! What: the data that all workers share is in [`shared`]; each worker has a [`States`] with its own number. A lookup goes through
//! the index to the state and changes it by single atomic operations. Operations that occur once in a state's life (insert, unlink,
//! and the limits that count it) take short locks: of the flow's lines, of the parents, of the sources.
//!
//! Invariant: a linked state is counted by its parent and its source, and holds one of the `dyn_max` slots. All three are
//! reserved before it is linked, and released if that fails, so that no bound is ever exceeded.
//!
//! No lock is held while another is taken, except the locks of one flow's lines (in their order), and the rules' counts under
//! the list of removed rules.

mod burst;
mod dump;
mod evict;
mod foresee;
mod fragment;
mod hand_over;
mod insert;
mod merge;
mod packet;
mod readers;
mod remove;
mod shared;
mod snapshot;
mod sweep;
mod top;

pub use self::burst::BURST;
pub use self::foresee::Foreseen;
pub(crate) use self::hand_over::HandedOver;
pub(crate) use self::snapshot::Saved;
pub use self::top::Top;

use std::fmt;
use std::sync::Arc;

use towpath_wire::Time;

use self::burst::BurstBuffers;
use self::packet::LookupResult;
use self::readers::Readers;
use self::shared::{AddressFamily, LocalFamily, Shared};
use self::sweep::ReclaimBackoff;
use super::concurrent::epoch::Participant;
use super::concurrent::sync::Ordering;
use super::concurrent::worker_counters::Counter;
use super::counters::Counters;
use super::events::{EventKind, StateEvent};
use super::journal::{Changes, JournalReader};
use super::keepalive::{Keepalive, KeepaliveScan};
use super::limits::rule_counts::{RemovedRules, RuleCountCache};
use super::table::entry::{Entry, MAX_TIME_JUMP};
use super::table::family::locked;
use super::table::growing_index::{MIGRATE_LINES, MIGRATE_LINES_IDLE};
use super::table::key::{Key, with_key};
use super::table::live_filter::LiveFilter;
use super::table::memory::Pages;
use super::table::shrink::Progress;
use super::{Flow, Hit, Install, Installed, Lookup, Name, Quoted, Refused, RuleId, Segment, Settings};

/// Nanoseconds that a worker's time may advance before it publishes the time for workers that were away.
const TIME_STEP: u64 = 1 << 40;

/// States that a worker links or unlinks between two looks at the number of all states: whether the index must grow, and the peak.
const CHECK: u32 = 64;

const ICMP: u8 = 1;
const TCP: u8 = 6;
const ICMP6: u8 = 58;

/// A handle on the dynamic states of a gate. Each thread has its own ([`States::worker`]); all see the same states.
///
/// A state is live until it expires, to the nanosecond, and is never found after that. It is held, and counts in
/// [`States::len`], until it is collected: by [`States::expire`], which scans all states step by step, or by an install that needs
/// its room.
///
/// The slots of unlinked states are not reused before every handle has been called again. A thread that will not call for a
/// while should call [`States::idle`].
pub struct States {
    shared: Arc<Shared>,
    worker: Participant,
    /// The shared version at the last call.
    version: u64,
    /// The shared time at the last call.
    shared_time: u64,
    /// States that this worker linked and unlinked.
    changes: u32,
    balance: Balance,
    backoff: ReclaimBackoff,
    /// The shard of the parents from which this worker collects next.
    parents_turn: usize,
    settings: Settings,
    removed: Arc<RemovedRules>,
    v4: LocalFamily,
    v6: LocalFamily,
    rule_counts: RuleCountCache,
    bursts: Option<Box<BurstBuffers>>,
    /// The time of the last call.
    now: Time,
    /// Incremented when this worker changes the index in a way that makes its [hints](burst) wrong.
    hint_version: u64,
    keepalives: KeepaliveScan,
    readers: Readers,
}

/// States that a worker linked, less those that it unlinked, since its last look at the number of all states; and the largest
/// such number since then.
#[derive(Clone, Copy, Debug, Default)]
struct Balance {
    now: i64,
    top: i64,
}

impl Balance {
    fn below_top(self) -> u64 {
        self.top.abs_diff(self.now)
    }
}

impl States {
    /// An empty table in pages of the default size. `seed` keys the hash; it should be unpredictable to network peers.
    pub fn new(settings: Settings, seed: u64) -> Self {
        Self::with_pages(settings, seed, Pages::Base)
    }

    /// An empty table in pages of the given kind.
    pub fn with_pages(settings: Settings, seed: u64, pages: Pages) -> Self {
        Self::register(Arc::new(Shared::new(settings, seed, pages))).expect("a new table has no workers")
    }

    /// Another handle on the same states, for another thread. Returns `None` when there are 64.
    pub fn worker(&self) -> Option<Self> {
        Self::register(Arc::clone(&self.shared))
    }

    fn register(shared: Arc<Shared>) -> Option<Self> {
        let worker = shared.epochs.register()?;
        // Acquire: pairs with the release of publish(). What is read below is at least as new.
        let version = shared.version.load(Ordering::Acquire);
        let settings = locked(&shared.settings).clone();
        Some(Self {
            worker,
            version,
            // Relaxed: a hint, see advance_time().
            shared_time: shared.time.load(Ordering::Relaxed),
            changes: 0,
            balance: Balance::default(),
            backoff: ReclaimBackoff::default(),
            parents_turn: worker.id(),
            settings,
            removed: shared.rules.removed(),
            v4: LocalFamily::new(&shared.v4, worker.id()),
            v6: LocalFamily::new(&shared.v6, worker.id()),
            rule_counts: RuleCountCache::new(worker.id()),
            bursts: None,
            now: Time::default(),
            hint_version: 0,
            keepalives: KeepaliveScan::default(),
            readers: Readers::default(),
            shared,
        })
    }

    /// Takes the handle offline: the slots of unlinked states do not wait for it, and other workers free those that it has
    /// unlinked. The next call brings it back.
    pub fn idle(&mut self) {
        self.free();
        self.abandon_retired();
        self.give_back();
        self.shared.epochs.offline(&mut self.worker);
    }

    /// The time of this handle's last call.
    pub(crate) fn now(&self) -> Time {
        self.now
    }

    /// Returns true if the handle is offline: it is new, or [`States::idle`] was its last call.
    pub fn is_idle(&self) -> bool {
        !self.worker.is_online()
    }

    /// Prefaults memory that growth will need, continues a migration of the index, and frees memory that is no longer used:
    /// up to a millisecond of work, with huge pages several. Returns true if more work remains.
    ///
    /// After a flood, when an eighth of the memory is in use, the memory of free slots goes back to the system, and the index is
    /// halved until an eighth of it is in use.
    ///
    /// Call it periodically outside the packet path, or from a dedicated thread. Without it, [`States::install`] prefaults and
    /// migrates when the memory is needed, and none is given back.
    pub fn prepare(&mut self) -> bool {
        self.quiescent();
        let Shared { v4, v6, .. } = &*self.shared;
        v4.index.free_old();
        v6.index.free_old();
        let [states4, states6] = self.shared.lens();
        let more = v4.prepare(states4) | v6.prepare(states6);
        self.grow();
        // Prefaulting takes a while.
        let [states4, states6] = self.shared.lens();
        let progress = [v4.shrink(states4), v6.shrink(states6)];
        let more = more || progress != [Progress::Done; 2];
        let before = self.version;
        if progress.contains(&Progress::Begun) {
            self.publish();
        }
        // A halved index may be halved again.
        self.migrate(MIGRATE_LINES_IDLE) | more | (self.version != before)
    }

    /// Bytes of memory of the states and of what is prepared for more: slots and indices. Memory that was given back to the
    /// system does not count.
    pub fn memory(&self) -> u64 {
        let [states4, states6] = self.shared.lens();
        self.shared.v4.bytes(states4) + self.shared.v6.bytes(states6)
    }

    /// Finds the live state of a packet's flow, in either direction. The state counts the packet and is refreshed by it.
    #[inline]
    pub fn lookup(&mut self, flow: &Flow, lookup: Lookup, segment: &Segment, now: Time) -> Option<Hit> {
        self.begin(now);
        let found = self.find(flow, lookup, segment, now);
        self.hit_of(found)
    }

    /// Finds the live state of a flow, in either direction, without changing it.
    #[inline]
    pub fn peek(&mut self, flow: &Flow, lookup: Lookup, now: Time) -> Option<Hit> {
        self.begin(now);
        let flow = &*self.key_flow(flow);
        with_key!(flow, |key, side| self.peek_key(&key, side, lookup, now))
    }

    /// Finds the live state of the packet that an ICMP error quotes, without changing it. The direction of the hit is that of
    /// the error, opposite to the quoted packet.
    pub fn lookup_related(&mut self, quoted: &Quoted, lookup: Lookup, now: Time) -> Option<Hit> {
        self.begin(now);
        let flow = &*self.key_flow(&quoted.flow);
        let hit = with_key!(flow, |key, side| self.related(&key, side.other(), lookup, quoted.tcp_seq, now));
        if hit.is_some() {
            self.count(Counter::Related);
        }
        hit
    }

    /// Inserts a state for the packet's flow under `name`. If there is a live one, counts the packet in it instead, whichever
    /// rule made it. Of several threads that install the same flow at once, one inserts the state.
    ///
    /// # Errors
    /// There is no room, or a limit is reached: the packet is to be denied. Expired states are collected first.
    pub fn install(
        &mut self,
        flow: &Flow,
        name: Name,
        segment: &Segment,
        rule: RuleId,
        install: &Install,
        now: Time,
    ) -> Result<Installed, Refused> {
        self.begin(now);
        let installed = match self.find(flow, Lookup::Named(name), segment, now) {
            LookupResult::Hit(_) => return Ok(Installed::Existing),
            LookupResult::Miss if self.must_repeat(flow, segment, now, true) => Err(Refused::FirstSyn),
            LookupResult::Miss => self.insert(&self.key_flow(flow), name, segment, rule, install, now),
            LookupResult::Invalid => Err(Refused::Invalid),
        };
        match installed {
            Ok(Some(_)) => {
                self.inserted();
                Ok(Installed::New)
            }
            Ok(None) => Ok(Installed::Existing),
            Err(refused) => {
                self.count(Counter::of(refused));
                Err(refused)
            }
        }
    }

    /// The number of `rule`'s states. When it is 0, no orphaned state refers to the rule.
    pub fn count_of(&self, rule: RuleId) -> usize {
        self.shared.rules.count(rule) as usize
    }

    /// Sends the keepalives that are due, looking at up to `budget` slots. Call it from one worker only, once per burst or
    /// periodically. A scan of all slots begins every [`KEEPALIVE_PERIOD`](super::KEEPALIVE_PERIOD) seconds, unless the one
    /// before is not finished. Does nothing while `dyn_keepalive` is off.
    pub fn keepalives(&mut self, now: Time, budget: usize, mut send: impl FnMut(Keepalive)) {
        self.begin(now);
        if !self.settings.dyn_keepalive || !self.keepalives.is_due(now) {
            return;
        }
        let mut budget = u32::try_from(budget).unwrap_or(u32::MAX);
        let Self { shared, removed, keepalives, .. } = self;
        let live = LiveFilter::new(now, removed);
        keepalives.run((0, &shared.v4), live, &mut budget, &mut send);
        keepalives.run((1, &shared.v6), live, &mut budget, &mut send);
    }

    /// A reader of the changes of all workers from now on.
    pub fn journal(&self) -> JournalReader {
        self.journal_of(Changes::All)
    }

    /// A reader of these changes of all workers from now on.
    pub fn journal_of(&self, changes: Changes) -> JournalReader {
        JournalReader::new(&self.shared.journal, changes)
    }

    /// The settings in force, as of this handle's last call.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Changes the settings; each worker applies them from its next call on. States keep their expiry until their next
    /// packet. When `dyn_max` falls below the number of states, they stay, and installs are refused until enough have ended.
    pub fn set_settings(&mut self, settings: Settings) {
        *locked(&self.shared.settings) = settings.clamped();
        self.publish();
        self.update_nearly_full();
    }

    /// `dyn_count`: the number of states held, including those that have expired and were not collected yet.
    #[inline]
    pub fn len(&self) -> usize {
        self.shared.len() as usize
    }

    /// Returns true if no states are held.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// `dyn_parent_count`: the number of parents held.
    pub fn parents(&self) -> usize {
        self.shared.limits.parents_len()
    }

    /// The number of slots ever used, of both address families. One keepalive scan visits all of them.
    pub fn slots(&self) -> usize {
        self.shared.v4.slab.len() as usize + self.shared.v6.slab.len() as usize
    }

    /// `curr_max_length`: the largest number of states, under different names, that one flow had at the same time.
    pub fn curr_max_length(&self) -> usize {
        self.shared.v4.longest().max(self.shared.v6.longest())
    }

    /// Returns true if the number of states reached 9/10 of `dyn_max`, and has not fallen below 8/10 since.
    pub fn is_nearly_full(&self) -> bool {
        self.shared.occupancy.is_nearly_full()
    }

    /// The counters and gauges of all workers together.
    pub fn counters(&self) -> Counters {
        let sum = |counter| self.shared.counters.sum(counter);
        Counters {
            created: sum(Counter::Created),
            expired: sum(Counter::Expired),
            removed: sum(Counter::Removed),
            evicted: sum(Counter::Evicted),
            full: sum(Counter::Full),
            over_limit: sum(Counter::OverLimit),
            over_rate: sum(Counter::OverRate),
            parents_full: sum(Counter::ParentsFull),
            over_source: sum(Counter::OverSource),
            invalid: sum(Counter::Invalid),
            first_syn: sum(Counter::FirstSyn),
            unfit: sum(Counter::Unfit),
            related: sum(Counter::Related),
            nearly_full: sum(Counter::NearlyFull),
            preempted: self.shared.v4.index.preempted() + self.shared.v6.index.preempted(),
            now: self.shared.len(),
            peak: self.peak(),
            unreplied: self.unreplied(),
            waiting: self.waiting(),
            max: self.settings.dyn_max.into(),
            parents: self.parents() as u64,
            parents_max: self.settings.dyn_parent_max.into(),
        }
    }
}

/// Code that all calls share.
impl States {
    /// Begins a call: announces a quiescent state, and applies what other workers have changed.
    #[inline]
    fn begin(&mut self, now: Time) {
        self.quiescent();
        self.now = now;
        if now.as_nanos() > self.shared_time.saturating_add(TIME_STEP) {
            self.advance_time(now);
        }
    }

    #[inline]
    fn quiescent(&mut self) {
        self.shared.epochs.quiescent(&mut self.worker);
        // Acquire: pairs with the release of publish().
        if self.shared.version.load(Ordering::Acquire) != self.version {
            self.update();
        }
    }

    /// Tells all workers that shared configuration has changed.
    fn publish(&mut self) {
        // Release: pairs with the acquire of quiescent() and update().
        self.shared.version.fetch_add(1, Ordering::Release);
        self.update();
    }

    #[cold]
    fn update(&mut self) {
        // The memory may be about to shrink, or `dyn_max` has changed.
        self.give_back();
        // Acquire: pairs with the release of publish(). What is read below is at least as new.
        self.version = self.shared.version.load(Ordering::Acquire);
        self.settings = locked(&self.shared.settings).clone();
        self.removed = self.shared.rules.removed();
        self.v4.index = self.shared.v4.index.current();
        self.v6.index = self.shared.v6.index.current();
    }

    /// Publishes the time. After a jump so long that a past expiry could be taken for a future one, collects the expired
    /// states first.
    #[cold]
    fn advance_time(&mut self, now: Time) {
        // Relaxed, here and below: a time that a worker reads late only makes it publish once more. TIME_STEP leaves the margin.
        let latest = self.shared.time.load(Ordering::Relaxed);
        // The first time is not a jump: there are no states.
        if latest != 0 && now.as_nanos().saturating_sub(latest) > MAX_TIME_JUMP {
            let latest = Time::from_nanos(latest);
            let expired = self.remove_expired::<2>(latest, now) + self.remove_expired::<6>(latest, now);
            self.count_many(Counter::Expired, expired);
            self.update_nearly_full();
        }
        // Relaxed: as above.
        self.shared.time.fetch_max(now.as_nanos(), Ordering::Relaxed);
        self.shared_time = self.shared.time.load(Ordering::Relaxed);
    }

    /// Unlinks the states that have expired by `now`, reading their expiry relative to `latest`. Returns their number.
    fn remove_expired<const N: usize>(&mut self, latest: Time, now: Time) -> u64
    where
        Key<N>: AddressFamily<N>,
    {
        let still = |entry: Entry<'_, N>| entry.expires(latest) <= now;
        let slots = 0..Key::<N>::family(&self.shared).slab.len();
        slots.map(|slot| u64::from(self.remove_if::<N>(slot, now, EventKind::Expired, still))).sum()
    }

    /// The states that are live, as far as this worker knows.
    #[inline(always)]
    fn live(&self, now: Time) -> LiveFilter<'_> {
        LiveFilter::new(now, &self.removed)
    }

    /// Records a change of the state in `slot`, if the journal has a reader of it.
    #[inline]
    fn record<const N: usize>(&self, kind: EventKind, slot: u32)
    where
        Key<N>: AddressFamily<N>,
    {
        let journal = &self.shared.journal;
        let wanted = match kind {
            EventKind::Created | EventKind::Restored => journal.has_beginnings(),
            _ => journal.is_enabled(),
        };
        if wanted {
            self.write_change::<N>(kind, slot);
        }
    }

    #[cold]
    #[inline(never)]
    fn write_change<const N: usize>(&self, kind: EventKind, slot: u32)
    where
        Key<N>: AddressFamily<N>,
    {
        self.shared.journal.push(|| {
            // Another worker may have unlinked the state and recorded its end.
            match kind.is_end() || Key::<N>::family(&self.shared).slab.is_occupied(slot) {
                true => StateEvent::pack(self.now, kind, &self.saved::<N>(slot, self.now)),
                false => StateEvent::VOID,
            }
        });
    }

    /// Migrates up to `lines` lines of each index. Returns true if a migration remains.
    #[inline]
    fn migrate(&mut self, lines: u64) -> bool {
        let Shared { v4, v6, .. } = &*self.shared;
        let done = v4.migrate(&self.v4.index, lines) | v6.migrate(&self.v6.index, lines);
        if done {
            self.publish();
        }
        self.is_migrating()
    }

    fn is_migrating(&self) -> bool {
        self.v4.index.next().is_some() || self.v6.index.next().is_some()
    }

    fn grow(&self) {
        let Shared { v4, v6, .. } = &*self.shared;
        let [states4, states6] = self.shared.lens();
        v4.index.grow(states4);
        v6.index.grow(states6);
    }

    /// Runs after every insert.
    fn inserted(&mut self) {
        self.count(Counter::Created);
        self.balance.now += 1;
        self.balance.top = self.balance.top.max(self.balance.now);
        self.changed();
        // Each insert continues the migration, so that it ends before the next one is due.
        if self.is_migrating() {
            self.migrate(MIGRATE_LINES);
        }
        self.update_nearly_full();
    }

    /// Runs after a state was linked or unlinked.
    fn changed(&mut self) {
        self.changes = self.changes.wrapping_add(1);
        if self.changes.is_multiple_of(CHECK) {
            self.grow();
            self.record_peak();
        } else {
            self.shared.counters.set(self.worker.id(), Counter::BelowTop, self.balance.below_top());
        }
    }

    /// The largest number of states. Exact if one worker made and ended the states; otherwise it may be too large by the changes
    /// of the workers since they last looked at the number of all states.
    fn peak(&self) -> u64 {
        let below = self.shared.counters.sum_of(self.workers(), Counter::BelowTop);
        self.record_peak_of(below);
        self.shared.occupancy.peak()
    }

    /// Records the number of states when it was larger by `below`.
    fn record_peak_of(&self, below: u64) {
        let now = self.shared.len();
        // Others may have linked more states since: there were never more than `dyn_max`.
        self.shared.occupancy.record_peak(now.max((now + below).min(self.settings.dyn_max.into())));
    }

    fn record_peak(&mut self) {
        self.record_peak_of(self.balance.below_top());
        self.balance = Balance::default();
        self.shared.counters.set(self.worker.id(), Counter::BelowTop, 0);
    }

    /// Gives back what this worker keeps for its next states.
    fn give_back(&mut self) {
        if self.balance.top > self.balance.now || self.balance.now > 0 {
            self.record_peak();
        }
        let Self { shared, v4, v6, .. } = self;
        v4.free.give_back(&shared.v4.slab);
        v6.free.give_back(&shared.v6.slab);
    }

    /// The number of worker numbers that were ever in use.
    fn workers(&self) -> usize {
        self.shared.epochs.registered()
    }

    /// The number of states that are not assured.
    fn unreplied(&self) -> u64 {
        let sum = |counter| self.shared.counters.sum(counter);
        let assured = sum(Counter::Assured).saturating_sub(sum(Counter::AssuredGone));
        self.shared.len().saturating_sub(assured)
    }

    /// The number of used slots without a linked state: nearly all of them are retired.
    fn waiting(&self) -> u64 {
        self.shared.occupancy.used(self.workers()).saturating_sub(self.shared.len())
    }

    fn update_nearly_full(&self) {
        let changed = self.shared.occupancy.update_nearly_full(|| self.shared.len(), self.settings.dyn_max);
        let Some(full) = changed else { return };
        self.count_many(Counter::NearlyFull, full.into());
        if self.shared.journal.is_enabled() {
            let kind = if full { EventKind::NearlyFull } else { EventKind::NoLongerFull };
            self.shared.journal.push(|| StateEvent::pack_table(self.now, kind));
        }
    }

    #[inline]
    fn count(&self, counter: Counter) {
        self.count_many(counter, 1);
    }

    fn count_many(&self, counter: Counter, events: u64) {
        self.shared.counters.add(self.worker.id(), counter, events);
    }
}

impl Drop for States {
    fn drop(&mut self) {
        self.free();
        self.abandon_retired();
        self.give_back();
        self.shared.epochs.unregister(self.worker);
    }
}

impl fmt::Debug for States {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("States")
            .field("worker", &self.worker.id())
            .field("counters", &self.counters())
            .finish()
    }
}
