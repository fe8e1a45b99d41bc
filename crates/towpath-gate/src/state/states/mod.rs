//! The states of one gate, for any number of threads.
//!
//! What: what all threads share is in one place, and each has a handle on it ([`States`]) that is its place among the
//! workers ([`crate::state::concurrent::epoch`]). A lookup goes through the index to the state and changes it by single atomic operations.
//! What is only done once in a state's life (making it, taking it away, and the limits that count it) takes locks of
//! its own: of the flow's lines, of the parents, of the sources.
//!
//! Invariant: a state that is linked has its parent's and its source's count, and a slot of those that `dyn_max`
//! bounds. All three are reserved before it is linked, and given back when that fails; so no bound is ever overstepped.
//! A slot counts until it is free again, not only until its state is gone.
//!
//! No lock is held while another is taken, but for those of a flow's lines in their order, and that of the rules under that of
//! what is gone.

mod burst;
mod counters;
mod dump;
mod fragment;
mod insert;
mod keepalive;
mod packet;
mod readers;
mod snapshot;
mod sweep;
mod top;

pub use self::burst::BURST;
pub use self::counters::{Counters, Gauge};
pub use self::keepalive::{KEEPALIVE_INTERVAL, Keepalive};
pub(crate) use self::snapshot::Saved;
pub use self::top::Top;

use std::fmt;
use std::sync::{Arc, Mutex};

use hashbrown::HashMap;

use self::burst::BurstBuffers;
use self::keepalive::Round;
use self::packet::LookupResult;
use self::readers::Readers;
use crate::state::concurrent::epoch::Epochs;
use crate::state::concurrent::retire_list::RetireList;
use crate::state::concurrent::sync::{Apart, AtomicU64, Ordering};
use crate::state::concurrent::worker_counters::{Counter, WorkerCounters};
use crate::state::events::{EventKind, EventQueues, StateEvent};
use crate::state::fragment_table::FragmentTable;
use crate::state::limits::first_syn::FirstSynTable;
use crate::state::limits::parents::Parents;
use crate::state::limits::rule_counts::{RemovedRules, RuleCountCache, RuleCounts};
use crate::state::limits::sources::Sources;
use crate::state::table::entry::{Entry, LONGEST_JUMP, LiveFilter, ORPHANED};
use crate::state::table::family::{Family, MOVE, MOVE_MANY, locked};
use crate::state::table::hash::Secret;
use crate::state::table::index::Index;
use crate::state::table::key::{FlowKey, Key, Key4, Key6};
use crate::state::table::memory::Pages;
use crate::state::table::slot_counters;
use crate::state::tcp::window::Window;
use crate::state::tcp::window_table::WindowTable;
use crate::state::{
    Ends, Flow, Hit, Install, Installed, Lookup, Name, Quoted, Refused, RuleId, Segment, Settings,
};
use towpath_wire::Time;

/// Slots looked at for each state that [`States::expire`] may look at: most need no look at the state.
const GLANCES: usize = 4;

/// How far time may go, in ns, before the others are told: a thread that was away for long learns from it.
const TELL: u64 = 1 << 40;

/// Every how many installs a worker asks whether the index is to grow.
const GROW: u32 = 64;

const ICMP: u8 = 1;
const TCP: u8 = 6;
const ICMP6: u8 = 58;

/// What all workers share.
#[derive(Debug)]
struct Shared {
    epochs: Epochs,
    /// Counts changes of the settings and of the indices to begin with.
    news: AtomicU64,
    /// Slots that are not free, of both families: what `dyn_max` bounds.
    held: Apart<AtomicU64>,
    peak: Apart<AtomicU64>,
    nearly_full: AtomicU64,
    /// A time that some worker has seen, in ns, and that none has passed by more than [`TELL`].
    latest: AtomicU64,
    settings: Mutex<Settings>,
    v4: Family<2>,
    v6: Family<6>,
    secret: Secret,
    parents: Mutex<Parents>,
    /// How many parents there are, for those who only want to know that.
    parents_held: AtomicU64,
    sources: Mutex<Sources>,
    windows: WindowTable,
    first_syns: FirstSynTable,
    fragments: FragmentTable,
    events: EventQueues,
    rules: RuleCounts,
    /// The rules that have states which are gone and not yet taken out.
    gone: Mutex<Arc<RemovedRules>>,
    tallies: WorkerCounters,
    /// What was counted before it could overflow: forward packets and bytes, reverse ones; by family and slot.
    spilled: Mutex<HashMap<(bool, u32), [u64; 4]>>,
    /// What workers that are gone or away had unlinked, and whether there is any.
    adrift: Mutex<(RetireList, RetireList)>,
    is_adrift: AtomicU64,
}

/// Dynamic states: ipfw's, found by a packet of either direction.
///
/// A state is live until its expiry, to the nanosecond, and is never found after it; it is held, and counts in
/// [`States::len`], until it is collected: by [`States::expire`], which goes round all of them, or by an install that
/// needs its room.
///
/// This is a handle: other threads have their own ([`States::worker`]), and all see the same states. A thread that does
/// not call for long should say so ([`States::idle`]), as the room of states that are gone waits for it.
pub struct States {
    shared: Arc<Shared>,
    worker: usize,
    /// The last epoch stamped; 0 is away.
    seen: u64,
    news: u64,
    latest: u64,
    installs: u32,
    /// Slots that were looked at in vain for room since some were found, in this tick ([`collect`]).
    vain: (u32, u32),
    settings: Settings,
    gone: Arc<RemovedRules>,
    v4: LocalFamily,
    v6: LocalFamily,
    recent: RuleCountCache,
    bursts: Option<Box<BurstBuffers>>,
    /// The time of the last call.
    now: Time,
    /// Counts what this worker does to the index that makes its guesses wrong ([`burst`]).
    turns: u64,
    round: Round,
    visits: Mutex<Readers>,
}

/// What a worker has of each family.
#[derive(Debug)]
struct LocalFamily {
    index: Arc<Index>,
    slot_counters: slot_counters::LocalSlotCounters,
    retired: RetireList,
}

/// The family of keys of `N` words.
trait AddressFamily<const N: usize>: FlowKey {
    const V6: bool;
    fn family(shared: &Shared) -> &Family<N>;
    fn local(states: &States) -> &LocalFamily;
    fn retired(states: &mut States) -> &mut RetireList;
}

impl AddressFamily<2> for Key4 {
    const V6: bool = false;

    #[inline]
    fn family(shared: &Shared) -> &Family<2> {
        &shared.v4
    }

    #[inline]
    fn local(states: &States) -> &LocalFamily {
        &states.v4
    }

    fn retired(states: &mut States) -> &mut RetireList {
        &mut states.v4.retired
    }
}

impl AddressFamily<6> for Key6 {
    const V6: bool = true;

    #[inline]
    fn family(shared: &Shared) -> &Family<6> {
        &shared.v6
    }

    #[inline]
    fn local(states: &States) -> &LocalFamily {
        &states.v6
    }

    fn retired(states: &mut States) -> &mut RetireList {
        &mut states.v6.retired
    }
}

impl States {
    /// An empty table in pages of the system. `seed` keys the hash and should be unpredictable to network peers.
    pub fn new(settings: Settings, seed: u64) -> Self {
        Self::with_pages(settings, seed, Pages::Base)
    }

    /// An empty table in pages of that kind.
    pub fn with_pages(settings: Settings, seed: u64, pages: Pages) -> Self {
        let settings = settings.clamped();
        let shared = Shared {
            epochs: Epochs::new(),
            news: AtomicU64::new(0),
            held: Apart(AtomicU64::new(0)),
            peak: Apart(AtomicU64::new(0)),
            nearly_full: AtomicU64::new(0),
            latest: AtomicU64::new(0),
            settings: Mutex::new(settings),
            v4: Family::new(seed, pages),
            v6: Family::new(seed ^ 0x3c6e_f372_fe94_f82b, pages),
            secret: Secret::new(seed ^ 0xbb67_ae85_84ca_a73b),
            parents: Mutex::new(Parents::new()),
            parents_held: AtomicU64::new(0),
            sources: Mutex::default(),
            windows: WindowTable::new(),
            first_syns: FirstSynTable::default(),
            fragments: FragmentTable::default(),
            events: EventQueues::new(),
            rules: RuleCounts::default(),
            gone: Mutex::default(),
            tallies: WorkerCounters::new(),
            spilled: Mutex::default(),
            adrift: Mutex::default(),
            is_adrift: AtomicU64::new(0),
        };
        Self::join(Arc::new(shared)).expect("the first worker finds a place")
    }

    /// Another handle on the same states, for another thread. `None` when there are 64 already.
    pub fn worker(&self) -> Option<Self> {
        Self::join(Arc::clone(&self.shared))
    }

    fn join(shared: Arc<Shared>) -> Option<Self> {
        let worker = shared.epochs.join()?;
        let local =
            |index, slot_counters| LocalFamily { index, slot_counters, retired: RetireList::default() };
        let news = shared.news.load(Ordering::Acquire);
        let settings = locked(&shared.settings).clone();
        let gone = Arc::clone(&locked(&shared.gone));
        let v4 = local(shared.v4.index(), shared.v4.slot_counters.join(worker));
        let v6 = local(shared.v6.index(), shared.v6.slot_counters.join(worker));
        let latest = shared.latest.load(Ordering::Relaxed);
        Some(Self {
            shared,
            worker,
            seen: 0,
            news,
            latest,
            installs: 0,
            vain: (0, 0),
            settings,
            gone,
            v4,
            v6,
            recent: RuleCountCache::default(),
            bursts: None,
            now: Time::default(),
            turns: 0,
            round: Round::default(),
            visits: Mutex::default(),
        })
    }

    /// Says that this thread will not call for a while: room of states that are gone does not wait for it, and what it
    /// took away itself is the others' to free. The next call comes back.
    pub fn idle(&mut self) {
        self.free();
        self.set_adrift();
        self.shared.epochs.go(self.worker);
        self.seen = 0;
    }

    /// The time of this handle's last call.
    pub(crate) fn now(&self) -> Time {
        self.now
    }

    /// Whether nobody waits for this handle: as it is new, and after [`States::idle`].
    pub fn is_idle(&self) -> bool {
        self.seen == 0
    }

    /// Makes and touches memory that growth is going to need, lets growth that has begun go on, and gives memory back that it
    /// needs no more: some of it, for a millisecond or, with huge pages, several. Whether there is more to do now. To be called outside the
    /// packets' path, from time to time or by a thread of its own; who does not call it has the same work in [`States::install`] when it is needed.
    pub fn prepare(&mut self) -> bool {
        self.stamp();
        let Shared { v4, v6, .. } = &*self.shared;
        v4.release();
        v6.release();
        let more = v4.prepare() | v6.prepare();
        self.grow();
        self.move_some(MOVE_MANY) | more
    }

    /// Finds the live state of a packet's flow, in either direction; the packet counts in it and refreshes it.
    #[inline]
    pub fn lookup(&mut self, flow: &Flow, lookup: Lookup, segment: &Segment, now: Time) -> Option<Hit> {
        self.begin(now);
        let found = self.find(flow, lookup, segment, now);
        self.hit_of(found)
    }

    /// Finds the live state of a flow, in either direction, and leaves it as it is: for those who only ask.
    #[inline]
    pub fn peek(&mut self, flow: &Flow, lookup: Lookup, now: Time) -> Option<Hit> {
        self.begin(now);
        let flow = &*self.keyed(flow);
        match flow.ends {
            Ends::V4(src, dst) => {
                let (key, side) = Key4::new(src, dst, flow);
                self.seek(&key, side, lookup, now)
            }
            Ends::V6(src, dst, zone) => {
                let (key, side) = Key6::new(src, dst, zone, flow);
                self.seek(&key, side, lookup, now)
            }
        }
    }

    /// Finds the live state that an ICMP error is about: the direction is that of the error, against the packet that it
    /// quotes. The state stays as it is.
    pub fn lookup_related(&mut self, quoted: &Quoted, lookup: Lookup, now: Time) -> Option<Hit> {
        self.begin(now);
        let flow = &*self.keyed(&quoted.flow);
        let hit = match flow.ends {
            Ends::V4(src, dst) => {
                let (key, side) = Key4::new(src, dst, flow);
                self.related(&key, side.other(), lookup, quoted.tcp_seq, now)
            }
            Ends::V6(src, dst, zone) => {
                let (key, side) = Key6::new(src, dst, zone, flow);
                self.related(&key, side.other(), lookup, quoted.tcp_seq, now)
            }
        };
        if hit.is_some() {
            self.count(Counter::Related);
        }
        hit
    }

    /// Makes a state for the flow under `name`, of which the packet is the first; or, when there is one, counts the
    /// packet in it, whichever rule made it. Of several threads that install a flow at once one makes the state.
    ///
    /// # Errors
    /// The packet is to be denied: there is no room, or a limit is reached. Room that expired states take up is used
    /// first.
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
        let made = match self.find(flow, Lookup::Named(name), segment, now) {
            LookupResult::Hit(_) => return Ok(Installed::Existing),
            LookupResult::Miss if self.is_first_syn(flow, segment, now) => Err(Refused::FirstSyn),
            LookupResult::Miss => self.make(&self.keyed(flow), name, segment, rule, install, now),
            LookupResult::Invalid => Err(Refused::Invalid),
        };
        match made {
            Ok(Installed::New) => {
                self.count(Counter::Created);
                self.made();
            }
            Ok(Installed::Existing) => {}
            Err(Refused::Full) => self.count(Counter::Full),
            Err(Refused::OverLimit) => self.count(Counter::OverLimit),
            Err(Refused::OverRate) => self.count(Counter::OverRate),
            Err(Refused::ParentsFull) => self.count(Counter::ParentsFull),
            Err(Refused::OverSource) => self.count(Counter::OverSource),
            Err(Refused::Invalid) => self.count(Counter::Invalid),
            Err(Refused::FirstSyn) => self.count(Counter::FirstSyn),
        }
        made
    }

    /// Removes the states of every rule that `gone` names, and their parents. How many states that were, those included
    /// that had ended.
    ///
    /// The work is in proportion to the rules. From the next call of each worker on no packet finds these states, and
    /// nobody is shown them; their room is like that of states that have ended: [`States::expire`] collects it by and by, and
    /// an install that needs it. What such a rule makes afterwards stays.
    pub fn remove_where(&mut self, mut gone: impl FnMut(RuleId) -> bool) -> usize {
        self.stamp();
        if locked(&self.shared.gone).is_spent() {
            let latest = self.shared.latest.load(Ordering::Relaxed);
            let now = Time::from_nanos(self.now.as_nanos().max(latest));
            self.sweep::<2>(None, now, &mut usize::MAX.clone());
            self.sweep::<6>(None, now, &mut usize::MAX.clone());
            self.forget_gone();
        }
        let mut all = locked(&self.shared.gone);
        let list = Arc::make_mut(&mut all);
        list.prune();
        let removed = self.shared.rules.turn(&mut gone, list);
        drop(all);
        if removed > 0 {
            // Release: pairs with the acquire in stamp().
            self.shared.news.fetch_add(1, Ordering::Release);
            self.catch_up();
        }
        self.with_parents(|parents, secret| parents.remove_where(secret, gone));
        removed as usize
    }

    /// Removes the state of a flow (in either direction) under `name`. Whether there was a live one.
    pub fn remove(&mut self, flow: &Flow, name: Name, now: Time) -> bool {
        self.remove_if_of(flow, name, None, now)
    }

    /// The same if `rule` has made it.
    pub(crate) fn remove_of(&mut self, flow: &Flow, name: Name, rule: RuleId, now: Time) -> bool {
        self.remove_if_of(flow, name, Some(rule), now)
    }

    fn remove_if_of(&mut self, flow: &Flow, name: Name, rule: Option<RuleId>, now: Time) -> bool {
        self.begin(now);
        let flow = &*self.keyed(flow);
        let removed = match flow.ends {
            Ends::V4(src, dst) => self.remove_one(&Key4::new(src, dst, flow).0, name, rule, now),
            Ends::V6(src, dst, zone) => self.remove_one(&Key6::new(src, dst, zone, flow).0, name, rule, now),
        };
        self.count_many(Counter::Removed, removed.is_some().into());
        self.gauge_moved();
        removed == Some(true)
    }

    /// Removes the states of a flow (in either direction) under whatever name. How many live ones there were.
    pub fn remove_flow(&mut self, flow: &Flow, now: Time) -> usize {
        self.begin(now);
        let flow = &*self.keyed(flow);
        let removed = match flow.ends {
            Ends::V4(src, dst) => self.remove_named_or_not(&Key4::new(src, dst, flow).0, now),
            Ends::V6(src, dst, zone) => self.remove_named_or_not(&Key6::new(src, dst, zone, flow).0, now),
        };
        self.count_many(Counter::Removed, removed as u64);
        self.gauge_moved();
        removed
    }

    /// Marks the states of every rule that `gone` names as orphaned: they live on without their rule
    /// (`dyn_keep_states`). How many states that were. Their parents stay while they count one of them.
    pub fn orphan_where(&mut self, mut gone: impl FnMut(RuleId) -> bool) -> usize {
        self.stamp();
        let rules = self.shared.rules.with_states(&mut gone);
        self.with_parents(|parents, _| parents.orphan_where(gone));
        self.mark_rules::<2>(&rules, ORPHANED) + self.mark_rules::<6>(&rules, ORPHANED)
    }

    /// How many states `rule` has: an orphans' rule may be forgotten when it is 0.
    pub fn count_of(&self, rule: RuleId) -> usize {
        self.shared.rules.count(rule) as usize
    }

    /// Collects entries whose time is over, looking at no more than `budget`. To be called once per burst. The calls of
    /// all workers together go round all states.
    pub fn expire(&mut self, now: Time, mut budget: usize) {
        self.begin(now);
        if self.gone.is_empty() {
            let glances = u32::try_from(budget.saturating_mul(GLANCES)).unwrap_or(u32::MAX);
            self.sweep::<2>(Some(glances), now, &mut budget);
            self.sweep::<6>(Some(glances), now, &mut budget);
        } else {
            // Each slot may take a look: both families have their share, and none of its slots is left out.
            let half = budget.div_ceil(2);
            let slots = u32::try_from(half).unwrap_or(u32::MAX);
            self.sweep::<2>(Some(slots), now, &mut half.clone());
            self.sweep::<6>(Some(slots), now, &mut half.clone());
            self.forget_gone();
        }
        // Relaxed: only whether there is something to do.
        if self.shared.parents_held.load(Ordering::Relaxed) > 0 {
            self.collect_parents(now, &mut budget);
        }
        let Shared { v4, v6, .. } = &*self.shared;
        let done = v4.move_behind(&self.v4.index) | v6.move_behind(&self.v6.index);
        self.moved(done);
        self.free();
    }

    /// Collects every entry whose time is over, whatever it costs. For a report or a test.
    pub fn expire_all(&mut self, now: Time) {
        self.begin(now);
        self.sweep::<2>(None, now, &mut usize::MAX.clone());
        self.sweep::<6>(None, now, &mut usize::MAX.clone());
        self.forget_gone();
        self.free();
        self.with_parents(|parents, secret| parents.collect_all(secret, now, &mut usize::MAX.clone()));
    }

    /// Has what happens to states told from now on: at most `most` events wait at each worker until somebody takes them
    /// ([`States::take_events`]); 0 ends it.
    pub fn watch(&mut self, most: usize) {
        self.shared.events.set(most);
    }

    /// What happened to states since the last call, at all workers, in the order of the times that these were given.
    pub fn take_events(&mut self) -> Vec<StateEvent> {
        self.shared.events.take()
    }

    /// Events that found no room since the beginning.
    pub fn events_lost(&self) -> u64 {
        self.shared.events.lost()
    }

    /// The settings in force, as this worker's last call saw them.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Changes the settings, for all workers from their next call on. States that are there keep the expiry that they
    /// have until their next packet, and are kept when `dyn_max` falls below their number: new ones are refused until enough of
    /// them have ended.
    pub fn set_settings(&mut self, settings: Settings) {
        *locked(&self.shared.settings) = settings.clamped();
        self.shared.news.fetch_add(1, Ordering::Release);
        self.catch_up();
        self.gauge_moved();
    }
}

/// What a worker does on the way.
impl States {
    /// Every call begins with it: the worker knows no slots, and sees what is new.
    #[inline]
    fn begin(&mut self, now: Time) {
        self.stamp();
        self.now = now;
        if now.as_nanos() > self.latest.saturating_add(TELL) {
            self.time_passed(now);
        }
    }

    #[inline]
    fn stamp(&mut self) {
        self.shared.epochs.stamp(self.worker, &mut self.seen);
        // Acquire: pairs with the release where it is counted up.
        if self.shared.news.load(Ordering::Acquire) != self.news {
            self.catch_up();
        }
    }

    #[cold]
    fn catch_up(&mut self) {
        self.news = self.shared.news.load(Ordering::Acquire);
        self.settings = locked(&self.shared.settings).clone();
        self.gone = Arc::clone(&locked(&self.shared.gone));
        self.v4.index = self.shared.v4.index();
        self.v6.index = self.shared.v6.index();
    }

    /// Tells the others what time it is. After a jump that could make an old end look like one to come, the states that
    /// have ended are collected first.
    #[cold]
    fn time_passed(&mut self, now: Time) {
        let latest = self.shared.latest.load(Ordering::Relaxed);
        // The first time that is told is no jump: there are no states.
        if latest != 0 && now.as_nanos().saturating_sub(latest) > LONGEST_JUMP {
            let latest = Time::from_nanos(latest);
            let mut expired = 0;
            let over = |end: Time| end <= now;
            for slot in 0..self.shared.v4.slab.len() {
                let still = |entry: Entry<'_, 2>| over(entry.end(latest));
                expired += u64::from(self.remove_if::<2>(slot, now, EventKind::Expired, still));
            }
            for slot in 0..self.shared.v6.slab.len() {
                let still = |entry: Entry<'_, 6>| over(entry.end(latest));
                expired += u64::from(self.remove_if::<6>(slot, now, EventKind::Expired, still));
            }
            self.count_many(Counter::Expired, expired);
            self.gauge_moved();
        }
        self.shared.latest.fetch_max(now.as_nanos(), Ordering::Relaxed);
        self.latest = self.shared.latest.load(Ordering::Relaxed);
    }

    /// Which states are there, as far as this worker knows.
    #[inline(always)]
    fn living(&self, now: Time) -> LiveFilter<'_> {
        LiveFilter::new(now, &self.gone)
    }

    /// Whether it is a SYN that has to be repeated.
    fn is_first_syn(&self, flow: &Flow, segment: &Segment, now: Time) -> bool {
        if !self.settings.dyn_first_syn || flow.proto != TCP || !Window::begins(segment) {
            return false;
        }
        let words = match flow.ends {
            Ends::V4(src, dst) => Key4::new(src, dst, flow).0.0.to_vec(),
            Ends::V6(src, dst, zone) => Key6::new(src, dst, zone, flow).0.0.to_vec(),
        };
        let words: [u64; 6] = std::array::from_fn(|at| words.get(at).copied().unwrap_or(0));
        !self.shared.first_syns.repeated(self.shared.secret.hash(&words), now)
    }

    /// Tells what happened to a state, if somebody watches.
    #[inline]
    fn tell<const N: usize>(&self, what: EventKind, slot: u32)
    where
        Key<N>: AddressFamily<N>,
    {
        if self.shared.events.is_on() {
            let state = Some(self.listed(Key::<N>::family(&self.shared), slot, self.now));
            self.shared.events.tell(self.worker, StateEvent { at: self.now, what, state });
        }
    }

    /// Lets growth go on by so many lines; whether it goes on after this.
    #[inline]
    fn move_some(&mut self, lines: u64) -> bool {
        let Shared { v4, v6, .. } = &*self.shared;
        let done = v4.move_some(&self.v4.index, lines) | v6.move_some(&self.v6.index, lines);
        self.moved(done);
        self.v4.index.next().is_some() || self.v6.index.next().is_some()
    }

    /// Some flows have moved: if these were the last, all workers go by the next index.
    #[inline]
    fn moved(&mut self, done: bool) {
        if done {
            // Release: pairs with the acquire in stamp().
            self.shared.news.fetch_add(1, Ordering::Release);
            self.catch_up();
        }
    }

    fn grow(&self) {
        self.shared.v4.grow();
        self.shared.v6.grow();
    }

    /// A state was made.
    fn made(&mut self) {
        self.installs = self.installs.wrapping_add(1);
        if self.installs.is_multiple_of(GROW) {
            self.grow();
        }
        // Whoever makes states lets growth go on, so that it is over before it is time to grow again.
        if self.v4.index.next().is_some() || self.v6.index.next().is_some() {
            self.move_some(MOVE);
        }
        let len = self.len() as u64;
        // Relaxed: a number for people.
        if len > self.shared.peak.load(Ordering::Relaxed) {
            self.shared.peak.fetch_max(len, Ordering::Relaxed);
        }
        self.gauge_moved();
    }

    fn with_parents<T>(&self, work: impl FnOnce(&mut Parents, &Secret) -> T) -> T {
        let mut parents = locked(&self.shared.parents);
        let done = work(&mut parents, &self.shared.secret);
        // Relaxed: a number for people.
        self.shared.parents_held.store(parents.len() as u64, Ordering::Relaxed);
        done
    }

    /// Collects parents unless somebody else is at them: nobody who has packets waits for that.
    fn collect_parents(&self, now: Time, budget: &mut usize) {
        let Ok(mut parents) = self.shared.parents.try_lock() else { return };
        parents.collect(&self.shared.secret, now, budget);
        // Relaxed: a number for people.
        self.shared.parents_held.store(parents.len() as u64, Ordering::Relaxed);
    }
}

impl Drop for States {
    fn drop(&mut self) {
        self.free();
        self.set_adrift();
        self.shared.epochs.leave(self.worker);
    }
}

impl fmt::Debug for States {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("States").field("worker", &self.worker).field("gauge", &self.gauge()).finish()
    }
}
