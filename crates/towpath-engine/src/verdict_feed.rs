//! Verdicts for flows, as flow offload learns of them.
//!
//! An engine thread announces a verdict to the thread that decides which flows the kernel forwards. A verdict that passes is announced
//! for each direction while no packet of the flow waits: earlier packets of the flow have left. The decided packet announces its
//! direction. So does each later packet that the verdict passes. Any other verdict is announced at once; if the kernel drops packets by
//! verdicts, one that drops is then announced for each direction, too.
//!
//! Each side has a reference to the [`SharedVerdict`]. The reader stores the slots of the flow's entries there, and the time of the
//! last packet that the kernel forwarded. The engine thread ends the entries with one store to each slot when it removes the verdict: for
//! another verdict, for a new connection, after its idle time, when its inspector is not trusted any more, or for want of room.
//!
//! Bounds: `ROOM` announcements. Without room, a verdict that passes is announced by a later packet. If another verdict finds no room, the
//! reader forgets all verdicts ([`VerdictReader::take_gap`]), and they are announced again.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, OnceLock};
use std::thread::Thread;

use towpath_gate::PortId;
use towpath_gate::state::Flow;
use towpath_port::offload::FlowMap;
use towpath_ring::Verdict;
use towpath_wire::Time;

use crate::flow_verdict::{FlowVerdict, IDLE};

/// Announcements that wait for the reader.
const ROOM: usize = 4096;
/// Entries of one verdict: its directions, on more than one port.
const SLOTS: usize = 4;

/// Ends entries of the kernel's flow map.
pub trait Entries: Send + Sync + std::fmt::Debug {
    /// Ends the entry with this slot. Does not wait.
    fn end(&self, slot: u32);
}

impl Entries for FlowMap {
    fn end(&self, slot: u32) {
        Self::end(self, slot);
    }
}

/// A verdict for a flow, known to the engine thread that has it and to the reader.
#[derive(Debug)]
pub struct SharedVerdict {
    passes: bool,
    drops: bool,
    mark: (u32, u32),
    ended: AtomicBool,
    /// The time of the last packet, in nanoseconds.
    seen: AtomicU64,
    /// The round in which each direction was announced.
    announced: [AtomicU64; 2],
    /// The slots of the entries, plus one; 0: free.
    slots: [AtomicU32; SLOTS],
    entries: Arc<dyn Entries>,
}

impl SharedVerdict {
    fn new(verdict: &FlowVerdict, seen: Time, entries: Arc<dyn Entries>) -> Self {
        Self {
            passes: matches!(verdict.verdict, Verdict::Pass),
            drops: matches!(verdict.verdict, Verdict::Drop),
            mark: verdict.mark,
            ended: AtomicBool::new(false),
            seen: AtomicU64::new(seen.as_nanos()),
            announced: Default::default(),
            slots: Default::default(),
            entries,
        }
    }

    /// Returns true if packets of the flow pass.
    pub fn passes(&self) -> bool {
        self.passes
    }

    /// Returns true if packets of the flow are dropped without an answer.
    pub fn drops(&self) -> bool {
        self.drops
    }

    /// The new bits of the mark, and which bits change.
    pub fn mark(&self) -> (u32, u32) {
        self.mark
    }

    /// Returns true if the verdict applies at `now`.
    pub fn applies(&self, now: Time) -> bool {
        !self.is_ended() && now.since(self.seen()).as_nanos() < u128::from(IDLE)
    }

    /// Returns true if the engine thread has removed the verdict.
    pub fn is_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    /// The time of the last packet.
    pub(crate) fn seen(&self) -> Time {
        // Relaxed: the time alone counts.
        Time::from_nanos(self.seen.load(Ordering::Relaxed))
    }

    /// A packet of the flow was forwarded.
    pub fn saw(&self, now: Time) {
        // The packets of a burst have one time: only the first one writes.
        if self.seen() < now {
            self.seen.fetch_max(now.as_nanos(), Ordering::Relaxed);
        }
    }

    /// Notes the slot of an entry that has just been written or renewed. Returns false if the entry must end: the verdict has ended, or it
    /// has no room for another slot.
    #[must_use]
    pub fn attach(&self, slot: u32) -> bool {
        let number = slot + 1;
        let has = |at: &AtomicU32| at.load(Ordering::Relaxed) == number;
        // Only the reader stores slots.
        let place = self
            .slots
            .iter()
            .find(|at| has(at))
            .or_else(|| self.slots.iter().find(|at| at.load(Ordering::Relaxed) == 0));
        let Some(place) = place else { return false };
        place.store(number, Ordering::Relaxed);
        // With that of `end`: either this thread sees the end, or the engine thread sees the slot and ends the entry after it was written.
        fence(Ordering::SeqCst);
        !self.is_ended()
    }

    /// The entry with this slot was removed.
    pub fn detach(&self, slot: u32) {
        for place in self.slots.iter().filter(|place| place.load(Ordering::Relaxed) == slot + 1) {
            place.store(0, Ordering::Relaxed);
        }
    }

    /// Ends the entries of the flow. The verdict continues.
    pub fn end_entries(&self) {
        for place in &self.slots {
            if let Some(slot) = place.load(Ordering::Relaxed).checked_sub(1) {
                self.entries.end(slot);
            }
        }
    }

    fn end(&self) {
        self.ended.store(true, Ordering::Release);
        fence(Ordering::SeqCst);
        self.end_entries();
    }
}

/// The engine thread's reference to a verdict. Dropping it ends the verdict and its entries.
#[derive(Debug)]
pub(crate) struct OwnVerdict(Arc<SharedVerdict>);

impl OwnVerdict {
    /// The time of the last packet that the kernel forwarded.
    pub(crate) fn seen(&self) -> Time {
        self.0.seen()
    }

    pub(crate) fn saw(&self, now: Time) {
        self.0.saw(now);
    }
}

impl Drop for OwnVerdict {
    fn drop(&mut self) {
        self.0.end();
    }
}

/// An announcement.
#[derive(Debug)]
pub struct Announced {
    /// The queue whose inspector decided.
    pub queue: u16,
    /// The flow, in the direction of the packet.
    pub flow: Flow,
    /// The port that the packet came in by.
    pub arrival: PortId,
    /// The verdict.
    pub verdict: Arc<SharedVerdict>,
}

/// What both sides share besides the verdicts.
#[derive(Debug)]
struct Shared {
    /// A verdict that was announced in an earlier round is announced again.
    round: AtomicU64,
    gap: AtomicBool,
    refused: AtomicU64,
    /// The thread of the reader, which an announcement wakes.
    thread: OnceLock<Thread>,
}

/// Announces the verdicts of an engine thread. Each thread has a clone.
#[derive(Clone, Debug)]
pub struct VerdictFeed {
    sender: SyncSender<Announced>,
    shared: Arc<Shared>,
    entries: Arc<dyn Entries>,
    /// The kernel drops packets by verdicts: each direction is announced.
    drops: bool,
}

/// Limit on [`DecidedFlow`]s of a batch of verdicts. Others are announced by their next packets.
pub(crate) const MAX_DECIDED: usize = 256;

/// A flow whose packet an inspector has just decided for the whole flow.
#[derive(Debug)]
pub(crate) struct DecidedFlow {
    pub(crate) queue: u16,
    /// In the direction of the packet.
    pub(crate) flow: Flow,
    pub(crate) arrival: PortId,
    /// Of the reorder buffer.
    pub(crate) bucket: u16,
}

/// Where a packet came from, for an announcement.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Origin<'f> {
    pub(crate) feed: &'f VerdictFeed,
    pub(crate) queue: u16,
    pub(crate) arrival: PortId,
}

impl Origin<'_> {
    /// The kernel may carry out this verdict.
    pub(crate) fn offers(&self, verdict: Verdict) -> bool {
        match verdict {
            Verdict::Pass => true,
            Verdict::Drop => self.feed.drops,
            _ => false,
        }
    }

    /// Announces a verdict that has passed or dropped a packet of `flow`. `forward`: in the direction of the verdict's key.
    pub(crate) fn announce(
        &self,
        own: &mut Option<OwnVerdict>,
        (flow, forward): (&Flow, bool),
        verdict: &FlowVerdict,
        now: Time,
    ) {
        let Self { feed, .. } = *self;
        let round = feed.shared.round.load(Ordering::Relaxed);
        let told = |own: &OwnVerdict| own.0.announced[usize::from(forward)].load(Ordering::Relaxed) == round;
        if !self.offers(verdict.verdict) || own.as_ref().is_some_and(told) {
            return;
        }
        let own = own.get_or_insert_with(|| feed.share(verdict, now));
        if self.send(own, flow) {
            own.0.announced[usize::from(forward)].store(round, Ordering::Relaxed);
        }
    }

    /// Announces a verdict that does not pass.
    pub(crate) fn announce_block(&self, flow: &Flow, verdict: &FlowVerdict, now: Time) -> OwnVerdict {
        let own = self.feed.share(verdict, now);
        if !self.send(&own, flow) {
            self.feed.shared.gap.store(true, Ordering::Release);
        }
        own
    }

    fn send(&self, own: &OwnVerdict, flow: &Flow) -> bool {
        let Self { feed, queue, arrival } = *self;
        let announced = Announced { queue, flow: *flow, arrival, verdict: Arc::clone(&own.0) };
        let sent = feed.sender.try_send(announced).is_ok();
        feed.shared.refused.fetch_add(u64::from(!sent), Ordering::Relaxed);
        // A system call if the thread sleeps; then it has read all earlier announcements.
        if let Some(thread) = feed.shared.thread.get() {
            thread.unpark();
        }
        sent
    }
}

impl VerdictFeed {
    /// A feed of verdicts that end entries of `entries`, and its reader.
    pub fn new(entries: Arc<dyn Entries>) -> (Self, VerdictReader) {
        let (sender, receiver) = sync_channel(ROOM);
        let shared = Shared {
            round: AtomicU64::new(1),
            gap: AtomicBool::new(false),
            refused: AtomicU64::new(0),
            thread: OnceLock::new(),
        };
        let shared = Arc::new(shared);
        let feed = Self { sender, shared: Arc::clone(&shared), entries, drops: false };
        (feed, VerdictReader { receiver, shared })
    }

    /// Verdicts that drop packets are announced for each direction, too.
    #[must_use]
    pub fn with_drops(self, drops: bool) -> Self {
        Self { drops, ..self }
    }

    /// Announcements wake this thread from now on ([`std::thread::park`]). Only the first call has an effect.
    pub fn wake(&self, thread: Thread) {
        let _ = self.shared.thread.set(thread);
    }

    fn share(&self, verdict: &FlowVerdict, now: Time) -> OwnVerdict {
        OwnVerdict(Arc::new(SharedVerdict::new(verdict, now, Arc::clone(&self.entries))))
    }
}

/// Reads the announcements of all engine threads.
#[derive(Debug)]
pub struct VerdictReader {
    receiver: Receiver<Announced>,
    shared: Arc<Shared>,
}

impl VerdictReader {
    /// The next announcement.
    pub fn read(&self) -> Option<Announced> {
        self.receiver.try_recv().ok()
    }

    /// Returns true if a verdict that does not pass was lost since the last call: no verdict may be used until it is announced again.
    pub fn take_gap(&self) -> bool {
        self.shared.gap.swap(false, Ordering::Acquire)
    }

    /// All verdicts are announced again, by the next packets that they pass.
    pub fn begin_round(&self) {
        self.shared.round.fetch_add(1, Ordering::Relaxed);
    }

    /// Announcements for which there was no room.
    pub fn refused(&self) -> u64 {
        self.shared.refused.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use towpath_gate::state::Ends;

    use super::*;
    use crate::flow_verdict::FlowVerdictCache;

    /// The slots that were ended.
    #[derive(Debug, Default)]
    struct Ended(Mutex<Vec<u32>>);

    impl Entries for Ended {
        fn end(&self, slot: u32) {
            self.0.lock().unwrap().push(slot);
        }
    }

    const PASS: FlowVerdict = FlowVerdict { verdict: Verdict::Pass, mark: (7, 15), channel: 1 };
    const DROP: FlowVerdict = FlowVerdict { verdict: Verdict::Drop, mark: (0, 0), channel: 1 };

    fn flow(port: u16) -> Flow {
        let ends = Ends::V4([10, 0, 0, 1].into(), [10, 0, 0, 2].into());
        Flow { ends, proto: 17, src_port: port, dst_port: 53, zone: 0 }
    }

    struct World {
        ended: Arc<Ended>,
        feed: VerdictFeed,
        reader: VerdictReader,
        cache: FlowVerdictCache,
    }

    impl World {
        fn new(room: usize) -> Self {
            let ended = Arc::new(Ended::default());
            let (feed, reader) = VerdictFeed::new(Arc::clone(&ended) as Arc<dyn Entries>);
            Self { ended, feed, reader, cache: FlowVerdictCache::with_room(room) }
        }

        fn insert(&mut self, flow: &Flow, verdict: FlowVerdict, now: Time) {
            let origin = Origin { feed: &self.feed, queue: 1, arrival: PortId(3) };
            self.cache.insert_and_announce(flow, verdict, now, Some(origin));
        }

        fn find(&mut self, flow: &Flow, now: Time) -> Option<FlowVerdict> {
            let origin = Origin { feed: &self.feed, queue: 1, arrival: PortId(3) };
            self.cache.find_and_announce(flow, false, now, Some(origin))
        }

        fn ended(&self) -> Vec<u32> {
            std::mem::take(&mut *self.ended.0.lock().unwrap())
        }
    }

    fn at(seconds: u64) -> Time {
        Time::from_secs(seconds)
    }

    #[test]
    fn a_verdict_that_passes_is_announced_once_for_each_direction() {
        let mut world = World::new(8);
        world.insert(&flow(1), PASS, at(1));
        assert!(world.reader.read().is_none(), "no packet has had it");
        for _ in 0..2 {
            for flow in [flow(1), flow(1).reversed()] {
                assert_eq!(world.find(&flow, at(2)), Some(PASS));
            }
        }
        for flow in [flow(1), flow(1).reversed()] {
            let Announced { queue, flow: announced, arrival, verdict } = world.reader.read().unwrap();
            assert_eq!((queue, announced, arrival), (1, flow, PortId(3)));
            assert!(verdict.passes() && verdict.mark() == (7, 15) && verdict.applies(at(3)));
        }
        assert!(world.reader.read().is_none());
        world.reader.begin_round();
        world.find(&flow(1), at(3));
        assert!(world.reader.read().is_some() && world.reader.read().is_none());
    }

    #[test]
    fn another_verdict_ends_the_entries_at_once() {
        let mut world = World::new(8);
        world.insert(&flow(1), PASS, at(1));
        world.find(&flow(1), at(1));
        let verdict = world.reader.read().unwrap().verdict;
        assert!(verdict.attach(5) && verdict.attach(5) && verdict.attach(6));
        verdict.detach(6);
        // The same verdict again changes nothing.
        world.insert(&flow(1), PASS, at(1));
        assert!(world.ended().is_empty());
        world.insert(&flow(1), DROP, at(1));
        assert_eq!(world.ended(), vec![5]);
        assert!(verdict.is_ended() && !verdict.applies(at(1)) && !verdict.attach(7));
        let block = world.reader.read().unwrap().verdict;
        assert!(!block.passes() && block.applies(at(1)));
        assert_eq!(world.find(&flow(1), at(1)), Some(DROP));
        assert!(world.reader.read().is_none(), "a verdict that does not pass is announced once");
        world.cache.forget(1);
        assert!(block.is_ended());
    }

    #[test]
    fn packets_that_the_kernel_forwards_refresh_a_verdict() {
        let mut world = World::new(4);
        world.insert(&flow(1), PASS, at(1));
        world.find(&flow(1), at(1));
        let verdict = world.reader.read().unwrap().verdict;
        verdict.saw(at(250));
        assert!(verdict.applies(at(549)) && !verdict.applies(at(550)));
        // Others use the cache; this flow stays, because the kernel forwards its packets.
        for round in 0_u16..10 {
            verdict.saw(at(250 + u64::from(round)));
            world.insert(&flow(100 + round), PASS, at(250 + u64::from(round)));
        }
        assert_eq!(world.find(&flow(1), at(500)), Some(PASS));
        assert!(!verdict.is_ended());
        assert!(world.cache.len() <= 4);
        // Without packets, it is evicted.
        for round in 0_u16..10 {
            world.insert(&flow(200 + round), PASS, at(501));
        }
        assert!(verdict.is_ended());
        assert_eq!(world.find(&flow(1), at(501)), None);
    }

    #[test]
    fn without_room_a_later_packet_announces_and_a_lost_block_is_a_gap() {
        let mut world = World::new(8);
        world.insert(&flow(1), PASS, at(1));
        for _ in 0..ROOM {
            world.find(&flow(1), at(1));
            world.reader.begin_round();
        }
        assert_eq!(world.reader.refused(), 0);
        world.find(&flow(1), at(1));
        assert_eq!(world.reader.refused(), 1);
        assert!(!world.reader.take_gap());
        world.insert(&flow(2), DROP, at(1));
        assert!(world.reader.take_gap() && !world.reader.take_gap());
        world.reader.read().unwrap();
        world.find(&flow(1), at(1));
        assert_eq!(std::iter::from_fn(|| world.reader.read()).count(), ROOM);
    }
}
