//! Reads the client's verdicts and turns them into decisions.
//!
//! What: a client gives verdicts in two places, a ring of cumulative records ("everything up to n") and one release
//! entry per frame. A poll first reads the records, and applies each to the frames that it covers and that have no
//! verdict of their own. A verdict or hold for a single frame that was given before a record is visible
//! together with the record, and takes precedence. Then the poll reads the entries, from the oldest outstanding frame on.
//!
//! Invariant: a poll does bounded work. It reads entries until [`MISSES`] in a row are unchanged. Then it reads as
//! many again from the place where the previous poll stopped: it also finds a verdict far behind an undecided frame. Each record is
//! applied from the end of the one before it. When a poll has copied the budget of replacements ([`Budget`]), it
//! reads nothing new: entries keep their words, and a record that was applied in part is applied again.

use crate::engine::arm_scan::Scan;
use crate::engine::control_rx::ControlRx;
use crate::engine::endpoint::Config;
use crate::engine::stats::ChannelStats;
use crate::engine::tx_ring::{Budget, TxRing};
use crate::lane::deadline::Deadline;
use crate::lane::producer::{Entry, Producer};
use crate::lane::records;
use crate::lane::verdict::{Cause, Decision, Verdict, Word};
use crate::shm::abi::{self, Layout};
use crate::shm::region::Words;
use crate::shm::seq::Seq;
use crate::shm::sync::Ordering;

/// Number of consecutive unchanged entries after which a search stops.
const MISSES: u32 = 64;

/// The parts of a channel that a poll works on.
pub(crate) struct Lane<'a> {
    pub(crate) own: &'a Words,
    pub(crate) theirs: &'a Words,
    pub(crate) rx: &'a mut Producer,
    pub(crate) tx: &'a mut TxRing,
    pub(crate) control: &'a mut ControlRx,
    pub(crate) stats: &'a mut ChannelStats,
}

#[derive(Debug)]
pub(crate) struct VerdictReader {
    default: Verdict<'static>,
    held_max: u32,
    /// Remaining budget of a poll.
    budget: Budget,
    deadline: Option<Deadline>,
    records: records::Reader,
    /// Records have decided every frame up to this one.
    upto: Seq,
    /// Where the search for distant verdicts continues.
    far: Seq,
    far_skipped: usize,
    /// Every frame below is overdue.
    overdue: Seq,
    /// Frames that records were applied to.
    #[cfg(test)]
    pub(crate) walked: u64,
}

type Emit<'f> = dyn FnMut(Seq, Decision<'_>) + 'f;

impl VerdictReader {
    /// `first` is the sequence number of the first frame.
    pub(crate) fn new(config: &Config, layout: &Layout, first: Seq) -> Self {
        Self {
            default: config.default_verdict,
            held_max: config.held_max,
            budget: Budget::new(config.replacement_max),
            deadline: config.deadline.map(Deadline::new),
            records: records::Reader::new(layout.records_place()),
            upto: first.back(1),
            far: first,
            far_skipped: 0,
            overdue: first,
            #[cfg(test)]
            walked: 0,
        }
    }

    pub(crate) fn deadline(&self) -> Option<u64> {
        self.deadline.as_ref().and_then(Deadline::next)
    }

    /// Continues the search for a word that a poll would read. Returns `None` if there is one, otherwise whether the
    /// search has finished.
    pub(crate) fn is_quiet(&self, theirs: &Words, rx: &Producer, scan: &mut Scan) -> Option<bool> {
        if self.budget.is_spent() || self.records.is_ready(theirs) {
            return None;
        }
        scan.step(&rx.frames, |at| rx.has_entry(theirs, at))
    }

    pub(crate) fn poll(&mut self, mut lane: Lane<'_>, now: u64, f: &mut Emit<'_>) -> usize {
        // Numbers are compared modulo 2^32: a number far behind must not appear to be ahead.
        let floor = lane.rx.frames.next_seq().back(1 << 30);
        for seq in [&mut self.upto, &mut self.overdue] {
            if seq.is_before(floor) {
                *seq = floor;
            }
        }
        self.budget.renew();
        let before = lane.stats.decided + lane.stats.overdue + lane.stats.invalid;
        self.take_records(&mut lane, f);
        self.take_entries(&mut lane, f);
        // Verdicts that this poll left unread may be in time, so frames expire only in a poll that read all.
        if !self.budget.is_spent() {
            self.expire(&mut lane, now, f);
        }
        (lane.stats.decided + lane.stats.overdue + lane.stats.invalid - before) as usize
    }

    fn take_records(&mut self, lane: &mut Lane<'_>, f: &mut Emit<'_>) {
        let Ok(count) = self.records.look(lane.theirs) else {
            lane.stats.violations += 1;
            return;
        };
        for _ in 0..count {
            let (mark, word) = self.records.peek(lane.theirs);
            if !self.take_record(lane, mark, word, f) {
                break;
            }
            self.records.step();
        }
        self.records.acknowledge(lane.own);
    }

    /// Applies a record. Returns false if a part of it is left for the next poll.
    fn take_record(&mut self, lane: &mut Lane<'_>, mark: u64, raw: u64, f: &mut Emit<'_>) -> bool {
        let next = lane.rx.frames.next_seq();
        let upto = Word::seq_of(raw);
        // A record outside of (last decided, last published] could decide frames that are not published yet.
        let inside = self.upto.is_before(upto) && upto.is_before(next);
        let word = match Word::parse(raw) {
            // A hold or a replacement concerns one frame.
            Ok(word) if inside && !word.is_hold() && word.replacement().is_none() => word,
            _ => {
                lane.stats.violations += 1;
                return true;
            }
        };
        // The frames of earlier records have verdicts or are released. Without this, each record could cost a walk
        // through all outstanding frames.
        let (oldest, begin) = (lane.rx.frames.oldest(), self.upto.next());
        let mut seq = if oldest.is_before(begin) { begin } else { oldest };
        while seq != upto.next() && !upto.is_before(seq) {
            #[cfg(test)]
            {
                self.walked += 1;
            }
            if let Some(at) = lane.rx.frames.find(seq)
                && !self.take_entry(lane, at, f)
                // A hold wins even when it was over the quota: the client is reading the frame.
                && !lane.rx.says_hold(at)
            {
                // Its own verdict word may be unread.
                if self.budget.is_spent() {
                    return false;
                }
                let decision = word.decision((mark as u32, (mark >> 32) as u32), &[], Cause::Cumulative);
                self.give_back(lane, at, decision, f);
            }
            seq = seq.next();
        }
        self.upto = upto;
        true
    }

    fn take_entries(&mut self, lane: &mut Lane<'_>, f: &mut Emit<'_>) {
        let end = lane.rx.frames.next_seq();
        let stopped = self.scan(lane, lane.rx.frames.oldest(), end, f);
        if stopped != end {
            // The oldest frame, or the near search, may have passed `far`.
            let from =
                if self.far.is_before(stopped) || !self.far.is_before(end) { stopped } else { self.far };
            self.far = self.scan(lane, from, end, f);
        }
        for _ in 0..MISSES.min(lane.rx.frames.skipped().len() as u32) {
            if self.far_skipped >= lane.rx.frames.skipped().len() {
                self.far_skipped = 0;
            }
            let Some(at) = lane.rx.frames.skipped().get(self.far_skipped).copied() else { break };
            // A released frame is replaced in the list by another one.
            if !self.take_entry(lane, at, f) {
                self.far_skipped += 1;
            }
        }
    }

    /// Reads entries from `seq` to `end`, or until [`MISSES`] in a row are unchanged. Returns where it stopped.
    fn scan(&mut self, lane: &mut Lane<'_>, mut seq: Seq, end: Seq, f: &mut Emit<'_>) -> Seq {
        let mut misses = 0;
        while seq != end && misses < MISSES {
            match lane.rx.frames.find(seq) {
                Some(at) if self.take_entry(lane, at, f) => misses = 0,
                _ => misses += 1,
            }
            seq = seq.next();
        }
        seq
    }

    /// Reads the entry of the message at `at`; returns true if the message was released.
    #[inline]
    fn take_entry(&mut self, lane: &mut Lane<'_>, at: u32, f: &mut Emit<'_>) -> bool {
        lane.rx.has_entry(lane.theirs, at) && self.take_new_entry(lane, at, f)
    }

    fn take_new_entry(&mut self, lane: &mut Lane<'_>, at: u32, f: &mut Emit<'_>) -> bool {
        // Checked before the entry is read, so that the next poll still sees it as changed.
        if self.budget.is_spent() {
            return false;
        }
        let seq = lane.rx.frames.seq_at(at);
        let word = match lane.rx.entry(lane.theirs, at) {
            Entry::Unchanged => return false,
            Entry::WrongSeq => {
                lane.stats.violations += 1;
                return false;
            }
            Entry::Invalid => {
                lane.stats.violations += 1;
                self.give_back(lane, at, self.by_default(Cause::Invalid), f);
                return true;
            }
            Entry::Word(word) => word,
        };
        if word.is_hold() {
            self.hold(lane, at);
            return false;
        }
        let mark = if word.has_mark() { lane.rx.mark(lane.theirs, at) } else { (0, 0) };
        let Some(frame) = word.replacement() else {
            self.give_back(lane, at, word.decision(mark, &[], Cause::Single), f);
            return true;
        };
        // The copy is made even for a late verdict: it releases the TX frame.
        let budget = &mut self.budget;
        let scratch = lane.tx.take_replacement(lane.own, lane.theirs, lane.control, frame, seq, budget);
        let decision = if let Some(bytes) = &scratch {
            word.decision(mark, bytes, Cause::Single)
        } else {
            // A replacement missing for lack of a descriptor is not the client's fault.
            lane.stats.violations += u64::from(!lane.control.take_short());
            self.by_default(Cause::Invalid)
        };
        self.give_back(lane, at, decision, f);
        if let Some(bytes) = scratch {
            lane.tx.put_back(bytes);
        }
        true
    }

    fn hold(&self, lane: &mut Lane<'_>, at: u32) {
        if lane.rx.frames.is_skipped(at) {
            return;
        }
        if lane.rx.frames.held() >= self.held_max {
            lane.stats.holds_refused += 1;
            return;
        }
        lane.rx.frames.hold(at);
    }

    /// Releases the frame and reports its decision, unless it was decided by default before.
    #[inline]
    fn give_back(&self, lane: &mut Lane<'_>, at: u32, decision: Decision<'_>, f: &mut Emit<'_>) {
        let seq = lane.rx.frames.seq_at(at);
        let late = lane.rx.frames.is_expired(at);
        lane.rx.frames.release(at);
        if late {
            lane.stats.late += 1;
            return;
        }
        match decision.cause {
            Cause::Single | Cause::Cumulative => lane.stats.decided += 1,
            Cause::Invalid => lane.stats.invalid += 1,
            Cause::Overdue => unreachable!("overdue frames do not come back"),
        }
        lane.stats.cumulative += u64::from(decision.cause == Cause::Cumulative);
        f(seq, decision);
    }

    /// Decides overdue frames by default. Their memory stays with the client, which may be reading it.
    fn expire(&mut self, lane: &mut Lane<'_>, now: u64, f: &mut Emit<'_>) {
        let Some(deadline) = &mut self.deadline else { return };
        let below = deadline.overdue(now);
        deadline.mark(now, lane.rx.frames.next_seq());
        let Some(below) = below else { return };
        let mut seq = if self.overdue.is_before(lane.rx.frames.oldest()) {
            lane.rx.frames.oldest()
        } else {
            self.overdue
        };
        while seq.is_before(below) {
            if let Some(at) = lane.rx.frames.find(seq) {
                self.decide_overdue(lane, at, f);
            }
            seq = seq.next();
        }
        self.overdue = below;
        for i in 0..lane.rx.frames.skipped().len() {
            let at = lane.rx.frames.skipped()[i];
            if lane.rx.frames.seq_at(at).is_before(below) {
                self.decide_overdue(lane, at, f);
            }
        }
        // Relaxed: a hint for the client, which orders nothing.
        let word = 1 << 32 | u64::from(below.0);
        lane.own.word(abi::ENGINE_OVERDUE).store(word, Ordering::Relaxed);
    }

    fn decide_overdue(&self, lane: &mut Lane<'_>, at: u32, f: &mut Emit<'_>) {
        if lane.rx.frames.is_expired(at) {
            return;
        }
        lane.rx.frames.expire(at);
        lane.stats.overdue += 1;
        f(lane.rx.frames.seq_at(at), self.by_default(Cause::Overdue));
    }

    fn by_default(&self, cause: Cause) -> Decision<'static> {
        Decision { cause, ..self.default.into() }
    }
}
